"""The device pool: vLLM's block pool as a pure class, owned by an engine (or by the store facade), never by the leader.

Law of this file: a change happens whole or not at all, and nothing that has a holder is ever given to another.

Order of reuse, as in vLLM: a released block without a hash is reused first; then the places in the order in which they
were released or, at the beginning, numbered. Whoever releases a request passes its blocks in prompt order; they are
released tail first, so that a prefix outlives what follows it. A block keeps its hash, and can be found by it, until
the place is handed out again. A hash may stand in several places.

The free order is a ring with position stamps instead of a linked list: ``_ring`` only grows, ``_stamp[b]`` is the index
of the live entry of ``b`` (-1, or before the head: not in the ring), and an entry whose stamp differs is dead. Touching
a block therefore costs one assignment, and popping is a slice. Dead entries are dropped when they outnumber the places
four to one.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvbm_console.core.columns import gather, prefix_of
from kvbm_console.core.errors import InternalError, UsageError
from kvbm_console.core.ids import EMPTY_HASH

_DEAD_FACTOR: Final = 4
"""The ring is compacted when its dead prefix exceeds this many times the capacity: amortised O(1), bounded memory."""
BULK_MIN: Final = 16
"""From this many blocks on, a column is gathered at once; for fewer the preparations cost more than a loop."""


class DevicePool:
    """Places of device memory: free order, holders, and where each sequence hash stands.

    ``capacity_blocks`` places numbered from 0. Counts are in blocks.

    >>> pool = DevicePool(4)
    >>> ids = pool.allocate(3); ids
    [0, 1, 2]
    >>> pool.store(ids[:2], [11, 12])
    >>> pool.release(ids)
    >>> pool.match([11, 12, 13]), pool.allocate(3)
    ([0, 1], [2, 3, 1])
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise UsageError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self._numbers = list(range(capacity_blocks))
        """Shared integers: handing out the same objects again costs no allocation."""
        self.clear()

    def clear(self) -> None:
        """Return to the initial state: no holder, no hash, places in the order of their numbers."""
        self.refs = [0] * self.capacity_blocks
        self.hash_of = [EMPTY_HASH] * self.capacity_blocks
        self._index: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._unhashed: list[int] = []
        self._ring = self._numbers[:]
        self._stamp = self._numbers[:]
        self._head = 0
        self._free = self.capacity_blocks
        self._shared = [0, 0]
        """How many places have so many holders, from two on; the last entry is not 0."""

    # --- questions ---

    @property
    def free_blocks(self) -> int:
        """Places without a holder: empty or cached."""
        return self._free

    @property
    def most_holders(self) -> int:
        """The largest number of holders of one place."""
        shared = self._shared
        return len(shared) - 1 if len(shared) > 2 else int(self._free < self.capacity_blocks)

    def match(self, hashes: Sequence[int], limit: int | None = None) -> list[int]:
        """Places of the longest prefix of ``hashes`` that is here, at most ``limit`` blocks. Changes nothing.

        The caller caps the prefix at prompt - 1 tokens, so that one token is left to compute.
        """
        return prefix_of(self._index.get, hashes if limit is None else hashes[:limit])

    def fits(self, count: int, prefix: Sequence[int] = ()) -> bool:
        """Whether ``allocate(count, prefix)`` would succeed: the prefix must not pay for the new blocks."""
        return count + gather(self.refs, prefix).count(0) <= self._free

    def free_order(self) -> list[int]:
        """The places without a holder, next to be reused first."""
        stamp = self._stamp
        ring = [block for at, block in enumerate(self._ring[self._head :], self._head) if stamp[block] == at]
        return self._unhashed[::-1] + ring

    # --- changes ---

    def allocate(self, count: int, prefix: Sequence[int] = ()) -> list[int] | None:
        """Take a holder on every block of ``prefix`` and ``count`` further places; all, or None and nothing changed.

        Returns the new places only; what they held is forgotten. The prefix (distinct blocks, from ``match``) is
        never among them.
        """
        if count < 0:
            raise InternalError(f"cannot allocate {count} blocks")
        if prefix:
            if not self.fits(count, prefix):
                return None
            self.touch(prefix)
        elif count > self._free:
            return None
        return self._pop(count)

    def touch(self, ids: Iterable[int]) -> None:
        """One more holder for each block; a free one leaves the free order."""
        refs, stamp, head = self.refs, self._stamp, self._head
        taken = 0
        more: list[int] = []
        for block in ids:
            holders = refs[block]
            refs[block] = holders + 1
            if holders:
                more.append(holders + 1)
                continue
            if stamp[block] < head:
                self._unhashed.remove(block)
            stamp[block] = -1
            taken += 1
        self._free -= taken
        if more:
            self._count_shared(more, 1)

    def store(self, ids: Sequence[int], hashes: Sequence[int]) -> None:
        """The blocks are full and carry these hashes from now on. A block that has one, or no holder, is refused."""
        hash_of, refs, first_of = self.hash_of, self.refs, self._index.setdefault
        for block, sequence_hash in zip(ids, hashes, strict=True):
            if hash_of[block] or not sequence_hash or not refs[block]:
                raise InternalError(f"device block {block} cannot take hash {sequence_hash:016x}")
            hash_of[block] = sequence_hash
            if first_of(sequence_hash, block) != block:
                self._copies.setdefault(sequence_hash, []).append(block)

    def release(self, ids: Sequence[int]) -> None:
        """One holder less for each block of a request, given in prompt order and released tail first."""
        refs, stamp, ring, hash_of, unhashed = self.refs, self._stamp, self._ring, self.hash_of, self._unhashed
        at, before = len(ring), len(ring) + len(unhashed)
        fewer: list[int] = []
        for block in reversed(ids):
            left = refs[block] - 1
            if left:
                if left < 0:
                    raise InternalError(f"device block {block} has no holder to give back")
                refs[block] = left
                fewer.append(left + 1)
                continue
            refs[block] = 0
            if hash_of[block]:
                stamp[block] = at
                at += 1
                ring.append(block)
            else:
                unhashed.append(block)
        self._free += len(ring) + len(unhashed) - before
        if fewer:
            self._count_shared(fewer, -1)

    def _count_shared(self, holders: list[int], change: int) -> None:
        """Places have got so many holders by one more (1), or had them before one less (-1)."""
        shared = self._shared
        for count in sorted(set(holders)):
            places = change * holders.count(count)
            if count == len(shared):
                shared.append(0)
            shared[count] += places
            if count > 2:
                shared[count - 1] -= places
        while len(shared) > 2 and not shared[-1]:
            shared.pop()

    # --- the free order ---

    def _pop(self, count: int) -> list[int]:
        taken = self._pop_few(count) if count < BULK_MIN else self._pop_many(count)
        self._free -= count
        dead = _DEAD_FACTOR * self.capacity_blocks
        if self._head > dead or len(self._ring) > 2 * dead:
            self._compact()
        return taken

    def _pop_few(self, count: int) -> list[int]:
        taken: list[int] = []
        unhashed = self._unhashed
        missing = count
        while unhashed and missing:
            taken.append(unhashed.pop())
            missing -= 1
        if missing:
            ring, stamp, head = self._ring, self._stamp, self._head
            while missing:
                block = ring[head]
                if stamp[block] == head:
                    taken.append(block)
                    missing -= 1
                head += 1
            self._head = head
        refs, hash_of = self.refs, self.hash_of
        for block in taken:
            refs[block] = 1
            if hash_of[block]:
                self._forget(block)
        return taken

    def _pop_many(self, count: int) -> list[int]:
        unhashed, refs = self._unhashed, self.refs
        taken: list[int] = []
        if unhashed:
            taken = unhashed[: -count - 1 : -1]
            del unhashed[-len(taken) :]
        if len(taken) < count:
            cached = self._pop_ring(count - len(taken))
            self._forget_all(cached)
            taken += cached
        for block in taken:
            refs[block] = 1
        return taken

    def _pop_ring(self, count: int) -> list[int]:
        """The next ``count`` live entries of the ring. A stamp before the head says that its block is not in it."""
        ring, stamp, head = self._ring, self._stamp, self._head
        taken: list[int] = []
        while True:
            missing = count - len(taken)
            part = ring[head : head + missing]
            if not part:
                raise InternalError(f"{missing} places are counted free and not in the free order")
            end = head + len(part)
            if list(map(stamp.__getitem__, part)) == list(range(head, end)):
                taken += part
            else:
                taken += [block for at, block in enumerate(part, head) if stamp[block] == at]
            head = end
            if len(taken) == count:
                self._head = head
                return taken

    def _forget_all(self, ids: list[int]) -> None:
        """These places lose their hashes, if they have any."""
        hash_of, index = self.hash_of, self._index
        hashes = gather(hash_of, ids)
        if not any(hashes):
            return
        if self._copies or not all(hashes):
            for block in ids:
                if hash_of[block] != EMPTY_HASH:
                    self._forget(block)
            return
        for block, sequence_hash in zip(ids, hashes, strict=True):
            del index[sequence_hash]
            hash_of[block] = EMPTY_HASH

    def _forget(self, block: int) -> None:
        sequence_hash = self.hash_of[block]
        self.hash_of[block] = EMPTY_HASH
        others = self._copies.get(sequence_hash)
        if self._index[sequence_hash] != block:
            assert others is not None
            others.remove(block)
        elif others:
            self._index[sequence_hash] = others.pop(0)
        else:
            del self._index[sequence_hash]
        if others is not None and not others:
            del self._copies[sequence_hash]

    def _compact(self) -> None:
        stamp = self._stamp
        self._ring = [block for at, block in enumerate(self._ring[self._head :], self._head) if stamp[block] == at]
        self._head = 0
        stamp[:] = [-1] * self.capacity_blocks
        for at, block in enumerate(self._ring):
            stamp[block] = at

    # --- the audit ---

    def audit(self, holders: Iterable[Sequence[int]] | None = None) -> list[str]:
        """Every broken rule, found by walking; empty when all is well. ``holders``: the block lists of all holders."""
        found: list[str] = []
        order = self.free_order()
        if len(set(order)) != len(order):
            found.append("a place is twice in the free order")
        if set(order) != {block for block in self._numbers if not self.refs[block]}:
            found.append("the free order is not the set of places without a holder")
        if len(order) != self._free:
            found.append(f"{self._free} places are counted free, {len(order)} are")
        standing: dict[int, list[int]] = {}
        for block, sequence_hash in enumerate(self.hash_of):
            if sequence_hash != EMPTY_HASH:
                standing.setdefault(sequence_hash, []).append(block)
        indexed = {key: sorted([block, *self._copies.get(key, ())]) for key, block in self._index.items()}
        if indexed != standing or not self._copies.keys() <= self._index.keys():
            found.append("the index of hashes is not what the places hold")
        if any(self.hash_of[block] != EMPTY_HASH for block in self._unhashed):
            found.append("a block with a hash is among those reused first")
        if self._shared != self._counted():
            found.append("the numbers of places with several holders are not those counted")
        if holders is not None:
            counted = [0] * self.capacity_blocks
            for ids in holders:
                for block in ids:
                    counted[block] += 1
            if counted != self.refs:
                found.append("the holders of some place are not those counted")
        return found

    def _counted(self) -> list[int]:
        """What ``_shared`` has to be."""
        counted = [0] * (max(1, max(self.refs)) + 1)
        for holders in self.refs:
            counted[holders] += holders > 1
        return counted
