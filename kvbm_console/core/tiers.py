"""Pools: the places of one (source, data-parallel rank, group, tier) and the facts of each place.

Theory of operation
-------------------
A place has a content (``FREE``, ``WRITING`` or ``READY``) and a number of holders: slots, staging and operations. Its
condition follows from both.

=========  ===========  ==========
content    no holder    holders
=========  ===========  ==========
free       empty        referenced
writing    writing      writing
ready      cached       referenced
=========  ===========  ==========

A reset quarantines the places that a running copy still reads or writes. They are neither free nor resident until the
last of these copies is reported. ``counts`` has the places by condition and every method keeps it up to date, whereas
``walk`` counts them again for the audit.

Example: place 3 is empty. An allocation gives it a holder (referenced), and the filled block gets its hash (still
referenced). The request ends (cached), and the hash can be found until an eviction (empty). If the request ends while
an operation reads the place, the operation's reference keeps it referenced.

An event stream describes a pool by hashes alone, so places are chosen for its blocks here, the lowest free place first.
The choice follows from the content, so a state from a snapshot chooses the same.

vLLM keeps block 0 for padding, and SGLang page 0. A pool's columns have such places, so that a place has its engine's
number, but no condition: they are below ``first_place``.

Law of this file: the five conditions of a place add up to the capacity, and a count is never clamped. Columns, not an
object per block: they make digest and snapshot a memcpy, and a place that was never used costs nothing.
"""

import heapq
from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from typing import Final

import msgspec

from kvbm_console.core.chains import Chains
from kvbm_console.core.columns import BULK_LEAST, copied, places_array, prefix_of, read_at, used, write_at, zeros
from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import EMPTY_HASH, Authority, Condition, Measure, Tier

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2
"""Values of ``PoolFacts.content``: no content, being written, readable."""
CAPACITY_MAX: Final = 2**31 - 1
"""Block ids are int32 on the wire."""
GROWN_MAX: Final = 2**24
"""Places of a pool of unknown capacity, which grows to the highest id that is named, by 21 bytes a place. One event
with an id of 2**31 - 1 would take 45 GB."""
UNKNOWN_NS: Final = -(2**63)
"""Of ``PoolFacts.stored_at``: an event stream did not tell when the block was stored."""
GONE: Final = -1
"""Of ``CacheState.lost_sources``: the source ended."""
REPLACEABLE: Final = -2
"""The same, and pools that are declared later take over the indices of its pools."""
_EMPTY, _CACHED, _REFERENCED, _WRITING = map(
    int, (Condition.EMPTY, Condition.CACHED, Condition.REFERENCED, Condition.WRITING))
"""Indices of ``PoolFacts.counts``. A member of an enumeration takes three times as long to find and to index with."""
SORT_WITHIN: Final = 8
"""Sorting a heap of at most so many places for each that is taken or given back is cheaper than moving each alone."""


def window_blocks(window: int, block_tokens: int) -> int:
    """Blocks in a row, up to its end, that a hit needs in a group with this window; 0 if it needs all.

    >>> window_blocks(64, 16), window_blocks(0, 16)
    (4, 0)
    """
    return -(-(window - 1) // block_tokens) if window else 0


class PoolInfo(msgspec.Struct, frozen=True):
    """The identity and the size of a pool. ``capacity_blocks`` is None when its engine does not tell.

    The engine numbers its places from ``first_place`` on, and gives lower numbers to no request. ``window``: see
    ``PoolKnown``."""

    pool: int
    source: int
    dp_rank: int
    group: int
    tier: Tier
    medium: str
    capacity_blocks: int | None
    block_tokens: int
    authority: Authority
    first_place: int = 0
    window: int | None = None

    @property
    def remote(self) -> bool:
        """True for a part of a pool that engines share, whose medium has the second word ``REMOTE``."""
        return self.medium.partition(" ")[2].partition(" ")[0] == "REMOTE"


class EngineFacts(msgspec.Struct, array_like=True):
    """The numbers that an engine told last on its own metrics page, and when; and the first of this incarnation."""

    at_ns: int
    values: dict[Measure, int]
    first_ns: int
    first: dict[Measure, int]

    def since(self, measure: Measure) -> int | None:
        """The growth of a counter since the first numbers; None if unknown."""
        now, first = self.values.get(measure), self.first.get(measure)
        return None if now is None or first is None else now - first


class PoolFacts:
    """The places of one pool as columns. Only ``CacheState.apply`` writes them.

    ``hash_of[b]`` is the sequence hash of the full block at place b, or ``EMPTY_HASH``. ``content[b]`` is ``FREE``,
    ``WRITING`` or ``READY``, ``refs[b]`` the number of holders (slots, staging, operations), and ``stored_at[b]`` the
    time when the content became readable, or ``UNKNOWN_NS``. ``by_hash`` finds a ready or writing place; further places
    with the same hash stand in ``copies``. ``quarantined`` maps a place that copies of an older epoch still read or
    write to those operations.
    """

    __slots__ = (
        "by_hash", "chains", "content", "copies", "counts", "hash_of", "info", "quarantined", "refs", "silent", "spare",
        "spare_from", "stored_at",
    )

    def __init__(self, info: PoolInfo) -> None:
        self.info = info
        places = info.first_place + (info.capacity_blocks or 0)
        self.hash_of = zeros("Q", places)
        self.content = zeros("B", places)
        self.refs = zeros("I", places)
        self.stored_at = zeros("q", places)
        self.by_hash: dict[int, int] = {}
        self.copies: dict[int, list[int]] = {}
        self.quarantined: dict[int, list[int]] = {}
        self.chains = Chains() if info.authority is Authority.STREAM else None
        """The parents and lives of the blocks that a stream describes."""
        if self.chains is not None:
            self.chains.grow(places)
        self.silent = False
        """True while the engine has not told which blocks are here, so that no count of them is known."""
        self.counts = [places - info.first_place, 0, 0, 0, 0]
        """Places by ``Condition``, kept up to date by the methods below and recounted by the audit."""
        self.spare: list[int] | None = None
        """Heap of the free places below ``spare_from`` of a pool that a stream describes, None before its first use. It
        is derived from ``content``, so a state from a snapshot chooses the same places."""
        self.spare_from = 0

    def __len__(self) -> int:
        return len(self.content)

    # --- questions ---

    def condition(self, block: int) -> Condition:
        """The condition of one place, from its columns."""
        return Condition.QUARANTINED if block in self.quarantined else self._condition(block)

    def _condition(self, block: int) -> Condition:
        if self.content[block] == WRITING:
            return Condition.WRITING
        if self.refs[block]:
            return Condition.REFERENCED
        return Condition.CACHED if self.content[block] == READY else Condition.EMPTY

    def walk(self) -> list[int]:
        """Places by condition, counted from the columns (the audit's answer to ``counts``)."""
        counts = [0] * len(Condition)
        for at in used(self.content, self.refs):
            content = self.content[at].tobytes()
            held = bytes(compress(content, self.refs[at].tolist()))  # the content of the places that have a holder
            counts[Condition.WRITING] += content.count(WRITING)
            counts[Condition.REFERENCED] += len(held) - held.count(WRITING)
            counts[Condition.CACHED] += content.count(READY) - held.count(READY)
        counts[Condition.EMPTY] = self.capacity - sum(counts)
        for block in self.quarantined:  # few: these are counted where they would be without it
            counts[self._condition(block)] -= 1
            counts[Condition.QUARANTINED] += 1
        return counts

    def places_of(self, sequence_hash: int) -> list[int]:
        """All places whose content has this hash, the place in ``by_hash`` first."""
        first = self.by_hash.get(sequence_hash)
        return [] if first is None else [first, *self.copies.get(sequence_hash, ())]

    def ready_place(self, sequence_hash: int) -> int | None:
        """A place where this hash may be read, or None."""
        for block in self.places_of(sequence_hash):
            if self.content[block] == READY:
                return block
        return None

    def ready_prefix(self, hashes: Sequence[int]) -> list[int]:
        """Places where the leading hashes of these may be read."""
        places = prefix_of(self.by_hash, hashes)
        if not self.counts[Condition.WRITING] and not self.quarantined:
            return places  # all that has content can be read
        ready: list[int] = []
        for place, sequence_hash in zip(places, hashes, strict=False):
            found = place if self.content[place] == READY else self.ready_place(sequence_hash)
            if found is None:
                break
            ready.append(found)
        return ready

    def filled(self, ids: Sequence[int]) -> list[int]:
        """Those of these places that have content."""
        known = len(self.content)
        return [place for place in ids if place < known and self.hash_of[place]]

    @property
    def capacity(self) -> int:
        """Places that the engine may give out; those that were named so far if it does not tell its capacity."""
        return len(self.content) - self.info.first_place

    @property
    def places_max(self) -> int:
        """The lowest number that none of its places may come to have."""
        return GROWN_MAX if self.info.capacity_blocks is None else len(self.content)

    @property
    def resident_blocks(self) -> int:
        """Cached, referenced and writing places."""
        return self.counts[Condition.CACHED] + self.counts[Condition.REFERENCED] + self.counts[Condition.WRITING]

    # --- changes, called by apply only ---

    def require_known(self, ids: Sequence[int]) -> None:
        """Check that the ids are places of this pool; a pool of unknown capacity grows to hold them."""
        first = self.info.first_place
        low, top = min(ids, default=first), max(ids, default=-1)
        if low < first:
            raise FoldError(f"pool {self.info.pool} has no place {low}")
        if top >= len(self.content):
            if top >= self.places_max:
                raise FoldError(f"pool {self.info.pool} has {len(self.content)} places, not {top}")
            places = min(GROWN_MAX, max(top + 1, 2 * len(self.content)))
            self.counts[_EMPTY] += places - len(self.content)
            self.hash_of, self.content = copied(self.hash_of, places), copied(self.content, places)
            self.refs, self.stored_at = copied(self.refs, places), copied(self.stored_at, places)
            if self.chains is not None:
                self.chains.grow(places)

    def recount(self, block: int, before: Condition) -> None:
        """The condition of a place was ``before``: the counts follow."""
        after = self.condition(block)
        if after is not before:
            self.counts[before] -= 1
            self.counts[after] += 1

    def ref(self, ids: Sequence[int]) -> None:
        """One more holder for each place, which has to be known: see ``require_known``."""
        refs, content, quarantined = self.refs, self.content, self.quarantined
        first, known = self.info.first_place, len(content)
        empty = cached = 0
        for block in ids:
            if not first <= block < known:
                self.require_known(ids)
                refs, content = self.refs, self.content
                known = len(content)
            before = refs[block]
            refs[block] = before + 1
            if not before and block not in quarantined:
                full = content[block]
                if full == READY:
                    cached += 1
                elif full == FREE:
                    empty += 1
        counts = self.counts
        counts[_EMPTY] -= empty
        counts[_CACHED] -= cached
        counts[_REFERENCED] += empty + cached

    def unref(self, ids: Sequence[int]) -> None:
        """One holder less for each place. A place without a holder is a bug (I2), so no count is clamped."""
        refs, content, quarantined = self.refs, self.content, self.quarantined
        empty = cached = 0
        for block in ids:
            left = refs[block] - 1
            if left < 0:
                raise FoldError(f"pool {self.info.pool} place {block} has no holder to give back")
            refs[block] = left
            if not left and block not in quarantined:
                full = content[block]
                if full == READY:
                    cached += 1
                elif full == FREE:
                    empty += 1
        counts = self.counts
        counts[_EMPTY] += empty
        counts[_CACHED] += cached
        counts[_REFERENCED] -= empty + cached

    def store(self, ids: Sequence[int], hashes: Sequence[int], content: int, at_ns: int) -> None:
        """Give places their hash and content (``WRITING`` or ``READY``); a place that has a hash is refused."""
        hash_of, contents, stored_at, refs = self.hash_of, self.content, self.stored_at, self.refs
        first_of, quarantined, first_place = self.by_hash.setdefault, self.quarantined, self.info.first_place
        held = away = 0
        for block, sequence_hash in zip(ids, hashes, strict=True):
            if block < first_place:
                self.require_known(ids)
            if contents[block] or not sequence_hash:
                raise FoldError(f"pool {self.info.pool} place {block} cannot take hash {sequence_hash:016x}")
            hash_of[block] = sequence_hash
            contents[block] = content
            stored_at[block] = at_ns
            if first_of(sequence_hash, block) != block:
                self.copies.setdefault(sequence_hash, []).append(block)
            if block in quarantined:
                away += 1
            elif refs[block]:
                held += 1
        unheld = len(ids) - held - away
        counts = self.counts
        counts[_EMPTY] -= unheld
        if content == READY:
            counts[_CACHED] += unheld
        else:
            counts[_REFERENCED] -= held
            counts[_WRITING] += unheld + held

    def make_ready(self, ids: Sequence[int], at_ns: int) -> None:
        """Places that were being written may be read."""
        content, refs, stored_at, quarantined = self.content, self.refs, self.stored_at, self.quarantined
        held = away = 0
        for block in ids:
            if content[block] != WRITING:
                raise FoldError(f"pool {self.info.pool} place {block} is not being written")
            content[block] = READY
            stored_at[block] = at_ns
            if block in quarantined:
                away += 1
            elif refs[block]:
                held += 1
        unheld = len(ids) - held - away
        counts = self.counts
        counts[_WRITING] -= held + unheld
        counts[_REFERENCED] += held
        counts[_CACHED] += unheld

    def evict(self, ids: Sequence[int]) -> None:
        """As ``forget``; a place that has holders is a bug (I3)."""
        refs = self.refs
        for block in ids:
            if refs[block]:
                raise FoldError(f"pool {self.info.pool} place {block} has holders and cannot be evicted")
        self.forget(ids)

    def forget(self, ids: Sequence[int]) -> None:
        """Places lose hash and content."""
        self.spare = None
        content, refs, hash_of, stored_at, by_hash = self.content, self.refs, self.hash_of, self.stored_at, self.by_hash
        copies, quarantined, chains = self.copies, self.quarantined, self.chains
        written = held = cached = 0  # being written, of these with a holder, and cached
        for block in ids:
            full = content[block]
            if full and block not in quarantined:
                if full == WRITING:
                    written += 1
                    held += refs[block] > 0
                elif not refs[block]:
                    cached += 1
            sequence_hash = hash_of[block]
            hash_of[block] = EMPTY_HASH
            content[block] = FREE
            stored_at[block] = 0
            if chains is not None:
                chains.parent_of[block] = 0
            if not sequence_hash:
                continue
            if sequence_hash in copies:
                self._forget_copy(sequence_hash, block)
            else:
                del by_hash[sequence_hash]
                if chains is not None:
                    chains.marks.pop(sequence_hash, None)
        counts = self.counts
        counts[_WRITING] -= written
        counts[_REFERENCED] += held
        counts[_CACHED] -= cached
        counts[_EMPTY] += written - held + cached

    def _forget_copy(self, sequence_hash: int, block: int) -> None:
        """One of several places of this hash loses it."""
        others = self.copies[sequence_hash]
        if self.by_hash[sequence_hash] == block:
            self.by_hash[sequence_hash] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self.copies[sequence_hash]

    def clear(self) -> None:
        """Forget all content and holders (reset); quarantined places stay quarantined."""
        places = len(self.content)
        self.hash_of, self.content = zeros("Q", places), zeros("B", places)
        self.refs, self.stored_at = zeros("I", places), zeros("q", places)
        self.by_hash.clear()
        self.copies.clear()
        if self.chains is not None:
            self.chains.clear()
        self.spare = None
        self.counts = [self.capacity - len(self.quarantined), 0, 0, 0, len(self.quarantined)]


def quarantine(pool: PoolFacts, ids: Sequence[int], operation: int) -> None:
    """This operation still writes or reads these places across a reset."""
    for block in ids:
        before = pool.condition(block)
        keepers = pool.quarantined.setdefault(block, [])
        if operation not in keepers:  # recordings of before have copies that name a place twice
            keepers.append(operation)
        pool.recount(block, before)


def lift(pool: PoolFacts, operation: int) -> None:
    """This operation of an older epoch has ended: free the places that no other operation keeps."""
    for block in [block for block, keepers in pool.quarantined.items() if operation in keepers]:
        pool.quarantined[block].remove(operation)
        if not pool.quarantined[block]:
            before = pool.condition(block)
            del pool.quarantined[block]
            pool.recount(block, before)


def take_free(pool: PoolFacts, count: int) -> list[int]:
    """The lowest places without content; the pool grows when it must.

    The caller fills them. O(count * log places), except for the first time after a snapshot or a clear.
    """
    if pool.spare is None:
        pool.spare_from = 0
        for at in used(pool.content):
            pool.spare_from = at.start + len(pool.content[at].tobytes().rstrip(b"\0"))
        pool.spare = [place for place, full in enumerate(pool.content[: pool.spare_from]) if not full]
    spare = pool.spare
    if len(spare) <= SORT_WITHIN * count:
        spare.sort()  # still a heap
        reused = spare[:count]
        del spare[:count]
    else:
        reused = [heapq.heappop(spare) for _ in range(count)]
    fresh = range(pool.spare_from, pool.spare_from + count - len(reused))
    pool.spare_from = fresh.stop
    return [*reused, *fresh] if fresh else reused


def _give_back(spare: list[int], places: list[int]) -> None:
    """Add places to a heap of free places."""
    if len(spare) <= SORT_WITHIN * len(places):
        spare += places
        spare.sort()
    else:
        for place in places:
            heapq.heappush(spare, place)


def store_copies(pool: PoolFacts, hashes: list[int], fronts: Iterable[int], at_ns: int) -> None:
    """A stream's pool got a copy of each of these hashes, with the hash in front of each (0: none).

    Places of such a pool have no holder, so each is empty before and cached behind.
    """
    chains = pool.chains
    assert chains is not None
    if not all(hashes):
        raise FoldError(f"pool {pool.info.pool} cannot take hash {EMPTY_HASH:016x}")
    places = take_free(pool, len(hashes))
    if pool.spare_from > len(pool.content):
        pool.require_known(places)
    hash_of, content, stored_at, parent_of = pool.hash_of, pool.content, pool.stored_at, chains.parent_of
    if places and places[-1] - places[0] == len(places) - 1:  # they ascend, so these follow each other
        here = slice(places[0], places[-1] + 1)
        hash_of[here], parent_of[here] = array("Q", hashes), array("Q", fronts)
        content[here], stored_at[here] = bytes((READY,)) * len(places), array("q", (at_ns,)) * len(places)
    elif len(places) >= BULK_LEAST:
        at = places_array(places)
        write_at(hash_of, at, array("Q", hashes))
        write_at(content, at, READY)
        write_at(stored_at, at, at_ns)
        write_at(parent_of, at, array("Q", fronts))
    else:
        for place, key, front in zip(places, hashes, fronts, strict=True):
            hash_of[place] = key
            content[place] = READY
            stored_at[place] = at_ns
            parent_of[place] = front
    firsts = list(map(pool.by_hash.setdefault, hashes, places))
    if firsts != places:
        for first, place, key in zip(firsts, places, hashes, strict=True):
            if first != place:
                pool.copies.setdefault(key, []).append(place)
    chains.stored_blocks += len(places)
    pool.counts[_EMPTY] -= len(places)
    pool.counts[_CACHED] += len(places)


def forget_copies(pool: PoolFacts, hashes: Sequence[int], at_ns: int) -> int:
    """A stream's pool lost the latest copy of each of these hashes. Returns how many it had. O(log places) a hash.

    Places of such a pool have no holder, so each is cached before and empty behind. A block has a lifetime if the
    times of its store and of its eviction are known, which are ``UNKNOWN_NS`` if not.
    """
    chains = pool.chains
    assert chains is not None
    by_hash, copies = pool.by_hash, pool.copies
    if copies:
        places = []
        for key in hashes:
            others = copies.get(key)
            if others is None:
                places.append(by_hash.pop(key, -1))
            else:
                places.append(others.pop())
                if not others:
                    del copies[key]
    else:
        places = list(map(by_hash.pop, hashes, repeat(-1)))
    if -1 in places:
        places = [place for place in places if place >= 0]
    if chains.marks:
        for key in hashes:
            if key not in by_hash:
                chains.marks.pop(key, None)
    _empty(pool, chains, places, at_ns)
    if pool.spare is not None:
        _give_back(pool.spare, places)
    pool.counts[_CACHED] -= len(places)
    pool.counts[_EMPTY] += len(places)
    return len(places)


def _empty(pool: PoolFacts, chains: Chains, places: list[int], at_ns: int) -> None:
    """These places of a stream's pool lose their content; count how long it was there."""
    hash_of, content, stored_at, parent_of = pool.hash_of, pool.content, pool.stored_at, chains.parent_of
    known = at_ns != UNKNOWN_NS
    if len(places) >= BULK_LEAST:
        at = places_array(places)
        if known:
            since = read_at(stored_at, at)
            chains.count_lives(at_ns - since[since != UNKNOWN_NS])
        for column in (hash_of, content, stored_at, parent_of):
            write_at(column, at, 0)
        return
    lived = chains.lived
    for place in places:
        began_ns = stored_at[place]
        if known and began_ns != UNKNOWN_NS:
            lived[(at_ns - began_ns).bit_length() if at_ns > began_ns else 0] += 1
        hash_of[place] = EMPTY_HASH
        content[place] = FREE
        stored_at[place] = 0
        parent_of[place] = EMPTY_HASH
