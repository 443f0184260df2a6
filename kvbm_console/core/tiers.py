"""Pools: the places of one (source, data-parallel rank, group, tier) and what is true of each.

Law of this file: the five conditions of a place add up to the capacity, and a count is never clamped. Columns, not an
object per block: arrays make digest and snapshot a memcpy.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import EMPTY_HASH, Authority, Condition, Tier

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2
"""Values of ``PoolFacts.content``: no content, being written, readable."""
CAPACITY_MAX: Final = 2**31 - 1
"""Block ids are int32 on the wire."""


class PoolInfo(msgspec.Struct, frozen=True):
    """What a pool is. ``capacity_blocks`` is None when its engine does not tell."""

    pool: int
    source: int
    dp_rank: int
    group: int
    tier: Tier
    medium: str
    capacity_blocks: int | None
    block_tokens: int
    authority: Authority


class PoolFacts:
    """The places of one pool as columns. Only ``CacheState.apply`` writes them.

    ``hash_of[b]`` is the sequence hash of the full block at place b (``EMPTY_HASH``: none), ``content[b]`` one of
    ``FREE, WRITING, READY``, ``refs[b]`` the number of holders (slots, staging, operations), ``stored_at[b]`` when its
    content became readable. ``by_hash`` finds a ready or writing place; further places with the same hash stand in
    ``copies``. ``quarantined`` maps a place that a copy of an older epoch still writes to that operation.
    """

    __slots__ = ("by_hash", "content", "copies", "counts", "hash_of", "info", "quarantined", "refs", "stored_at")

    def __init__(self, info: PoolInfo) -> None:
        self.info = info
        places = info.capacity_blocks or 0
        self.hash_of = array("Q", bytes(8 * places))
        self.content = bytearray(places)
        self.refs = array("i", bytes(4 * places))
        self.stored_at = array("q", bytes(8 * places))
        self.by_hash: dict[int, int] = {}
        self.copies: dict[int, list[int]] = {}
        self.quarantined: dict[int, int] = {}
        self.counts = [places, 0, 0, 0, 0]
        """Places by ``Condition``, kept up to date by the methods below and recounted by the audit."""

    def __len__(self) -> int:
        return len(self.content)

    # --- questions ---

    def condition(self, block: int) -> Condition:
        """The condition of one place, from its columns."""
        if block in self.quarantined:
            return Condition.QUARANTINED
        if self.content[block] == WRITING:
            return Condition.WRITING
        if self.refs[block]:
            return Condition.REFERENCED
        return Condition.CACHED if self.content[block] == READY else Condition.EMPTY

    def walk(self) -> list[int]:
        """Places by condition, counted one by one (the audit's answer to ``counts``)."""
        counts = [0] * len(Condition)
        for block in range(len(self.content)):
            counts[self.condition(block)] += 1
        return counts

    def places_of(self, sequence_hash: int) -> list[int]:
        """All places whose content has this hash, the one in ``by_hash`` first."""
        first = self.by_hash.get(sequence_hash)
        return [] if first is None else [first, *self.copies.get(sequence_hash, ())]

    def ready_place(self, sequence_hash: int) -> int | None:
        """A place where this hash may be read, or None."""
        for block in self.places_of(sequence_hash):
            if self.content[block] == READY:
                return block
        return None

    @property
    def resident_blocks(self) -> int:
        """Cached, referenced and writing places."""
        return self.counts[Condition.CACHED] + self.counts[Condition.REFERENCED] + self.counts[Condition.WRITING]

    # --- changes, called by apply only ---

    def require_known(self, ids: Iterable[int]) -> None:
        """Check that the ids are places of this pool; a pool of unknown capacity grows to hold them."""
        ids = list(ids)
        if not ids:
            return
        if min(ids) < 0:
            raise FoldError(f"pool {self.info.pool} has no place {min(ids)}")
        top = max(ids)
        if top >= len(self.content):
            if self.info.capacity_blocks is not None or top > CAPACITY_MAX:
                raise FoldError(f"pool {self.info.pool} has {len(self.content)} places, not {top}")
            grow = max(top + 1, 2 * len(self.content)) - len(self.content)
            self.hash_of.frombytes(bytes(8 * grow))
            self.content.extend(bytes(grow))
            self.refs.frombytes(bytes(4 * grow))
            self.stored_at.frombytes(bytes(8 * grow))
            self.counts[Condition.EMPTY] += grow

    def _recount(self, block: int, before: Condition) -> None:
        after = self.condition(block)
        if after is not before:
            self.counts[before] -= 1
            self.counts[after] += 1

    def ref(self, ids: Sequence[int]) -> None:
        """One more holder for each place."""
        refs, counts, content = self.refs, self.counts, self.content
        quarantined = self.quarantined
        for block in ids:
            refs[block] += 1
            if refs[block] == 1 and content[block] != WRITING and not (quarantined and block in quarantined):
                counts[1 if content[block] else 0] -= 1
                counts[2] += 1

    def unref(self, ids: Sequence[int]) -> None:
        """One holder less for each place; a place without a holder is a bug (I2: never clamped)."""
        refs, counts, content = self.refs, self.counts, self.content
        quarantined = self.quarantined
        for block in ids:
            left = refs[block] - 1
            if left < 0:
                raise FoldError(f"pool {self.info.pool} place {block} has no holder to give back")
            refs[block] = left
            if left == 0 and content[block] != WRITING and not (quarantined and block in quarantined):
                counts[2] -= 1
                counts[1 if content[block] else 0] += 1

    def store(self, ids: Sequence[int], hashes: Sequence[int], content: int, at_ns: int) -> None:
        """Give places their hash and content (``WRITING`` or ``READY``); a place that has a hash is refused."""
        for block, sequence_hash in zip(ids, hashes, strict=True):
            before = self.condition(block)
            if self.hash_of[block] != EMPTY_HASH or sequence_hash == EMPTY_HASH:
                raise FoldError(f"pool {self.info.pool} place {block} cannot take hash {sequence_hash:016x}")
            self.hash_of[block] = sequence_hash
            self.content[block] = content
            self.stored_at[block] = at_ns
            if sequence_hash in self.by_hash:
                self.copies.setdefault(sequence_hash, []).append(block)
            else:
                self.by_hash[sequence_hash] = block
            self._recount(block, before)

    def make_ready(self, ids: Sequence[int], at_ns: int) -> None:
        """Places that were being written may be read."""
        for block in ids:
            if self.content[block] != WRITING:
                raise FoldError(f"pool {self.info.pool} place {block} is not being written")
            before = self.condition(block)
            self.content[block] = READY
            self.stored_at[block] = at_ns
            self._recount(block, before)

    def forget(self, ids: Sequence[int]) -> None:
        """Places lose hash and content."""
        for block in ids:
            before = self.condition(block)
            sequence_hash = self.hash_of[block]
            self.hash_of[block] = EMPTY_HASH
            self.content[block] = FREE
            self.stored_at[block] = 0
            self._recount(block, before)
            if sequence_hash == EMPTY_HASH:
                continue
            others = self.copies.get(sequence_hash)
            if self.by_hash[sequence_hash] == block:
                if others:
                    self.by_hash[sequence_hash] = others.pop(0)
                else:
                    del self.by_hash[sequence_hash]
            elif others:
                others.remove(block)
            if others is not None and not others:
                del self.copies[sequence_hash]

    def quarantine(self, ids: Sequence[int], operation: int) -> None:
        """Places that a copy still writes or reads across a reset: neither free nor resident until it is reported."""
        for block in ids:
            before = self.condition(block)
            self.quarantined[block] = operation
            self._recount(block, before)

    def lift(self, operation: int) -> list[int]:
        """Free the places that this operation had kept in quarantine; returns them."""
        ids = [block for block, keeper in self.quarantined.items() if keeper == operation]
        for block in ids:
            before = self.condition(block)
            del self.quarantined[block]
            self._recount(block, before)
        return ids

    def clear(self) -> None:
        """Forget all content and holders (reset); quarantined places stay quarantined."""
        places = len(self.content)
        self.hash_of = array("Q", bytes(8 * places))
        self.content = bytearray(places)
        self.refs = array("i", bytes(4 * places))
        self.stored_at = array("q", bytes(8 * places))
        self.by_hash.clear()
        self.copies.clear()
        self.counts = [places - len(self.quarantined), 0, 0, 0, len(self.quarantined)]
