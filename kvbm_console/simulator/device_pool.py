"""The device pool: vLLM's block pool as a pure class, owned by an engine (or by the store facade), never by the leader.

Law of this file: a change happens whole or not at all, and nothing that has a holder is ever given to another.

Places are reused in vLLM's order. Released blocks without a hash come first, then places in the order in which they
were released or, at the beginning, numbered. ``release`` takes the blocks of a request in prompt order and releases
them tail first, so that a prefix outlives its continuation. A block keeps its hash, and can be found by it, until the
place is handed out again. A hash may stand in several places.

The free order is a ring of entries that only grows, and a number per block tells the rest. Above 0 the number counts
holders. Below 0 the block is free and its live entry is ``~number``. At 0 the block is free and waits on the stack of
blocks without a hash. All other entries are dead. So touching a block unlinks nothing, and popping is a slice. Entries
before the head are dropped when they outnumber the places four to one, and ``_base`` counts them. Dead
entries behind the head are dropped when all entries outnumber the places eight to one.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvbm_console.core.columns import prefix_of
from kvbm_console.core.errors import InternalError, UsageError
from kvbm_console.core.ids import EMPTY_HASH

HASH_BITS: Final = 64
NO_PLACE: Final = -1
"""In the place of a block that lies before the attention window of its request."""
_DEAD_FACTOR: Final = 4
"""Entries before the head are kept up to this many times the capacity: amortised O(1), bounded memory."""


def in_group(group: int, hashes: Sequence[int]) -> Sequence[int]:
    """The names of blocks in a group of layers, by their sequence hashes: groups that share a pool share no block.

    >>> in_group(0, (7,)), in_group(1, (7,)) == [7 + 2**64]
    ((7,), True)
    """
    return [(group << HASH_BITS) + key for key in hashes] if group else hashes


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
        self.hash_of = [EMPTY_HASH] * self.capacity_blocks
        self._state = [~block for block in self._numbers]
        self._index: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._unhashed: list[int] = []
        self._ring = self._numbers[:]
        self._base = self._head = 0
        self._free = self.capacity_blocks
        self._asked: Sequence[int] | None = None
        """The hashes of the last ``match``. A request that finds no room asks again in every iteration."""
        self._found: dict[int, int] = {}
        """The answer, hash to place, if it was asked for twice and none of its blocks was forgotten since."""
        self._shared = [0, 0]
        """How many places have so many holders, from two on; the last entry is not 0."""

    def grow(self, blocks: int) -> None:
        """Add so many empty places, which are given out first."""
        fresh = range(self.capacity_blocks, self.capacity_blocks + blocks)
        self.capacity_blocks += blocks
        self._numbers += fresh
        self.hash_of += [EMPTY_HASH] * blocks
        self._state += [0] * blocks
        self._unhashed += fresh
        self._free += blocks

    # --- questions ---

    @property
    def free_blocks(self) -> int:
        """Places without a holder: empty or cached."""
        return self._free

    @property
    def refs(self) -> list[int]:
        """Holders of each block."""
        return [max(state, 0) for state in self._state]

    @property
    def most_holders(self) -> int:
        """The largest number of holders of one place."""
        shared = self._shared
        return len(shared) - 1 if len(shared) > 2 else int(self._free < self.capacity_blocks)

    def holders(self, block: int) -> int:
        """Holders of one block."""
        return max(self._state[block], 0)

    def match(self, hashes: Sequence[int], limit: int | None = None) -> list[int]:
        """Places of the longest prefix of ``hashes`` that is here, at most ``limit`` blocks. Changes nothing.

        The caller caps the prefix at prompt - 1 tokens, so that one token is left to compute.
        """
        if limit is None or limit > len(hashes):
            limit = len(hashes)
        found = self._found
        if hashes is not self._asked:
            self._asked, self._found = hashes, {}
            return prefix_of(self._index, hashes[:limit])
        if len(found) > limit:
            found = self._found = {}
        known = len(found)
        more = hashes[known:limit]
        places = prefix_of(self._index, more)
        found.update(zip(more, places, strict=False))
        if len(found) < known + len(places):  # a hash stands twice in them
            self._found = {}
            return prefix_of(self._index, hashes[:limit])
        return list(found.values())

    def match_window(self, hashes: Sequence[int], blocks: int, limit: int) -> list[int]:
        """Places of the longest prefix of ``hashes`` whose last ``blocks`` are here, or all of it if it is shorter.

        At most ``limit`` blocks; ``NO_PLACE`` stands in front of those that are needed. Changes nothing.

        >>> pool = DevicePool(4)
        >>> pool.store(pool.allocate(4), [11, 12, 13, 15])
        >>> pool.match_window([9, 12, 13, 14, 15], 2, 5), pool.match_window([11, 12, 14], 3, 3)
        ([-1, 1, 2], [0, 1])
        """
        index, run = self._index, 0
        for at in range(min(limit, len(hashes)) - 1, -1, -1):
            run = run + 1 if hashes[at] in index else 0
            if run == blocks:
                return [*[NO_PLACE] * at, *map(index.__getitem__, hashes[at : at + run])]
        return [*map(index.__getitem__, hashes[:run])]

    def fits(self, count: int, prefix: Sequence[int] = ()) -> bool:
        """True if ``allocate(count, prefix)`` would succeed: the prefix must not pay for the new blocks."""
        if count > self._free or count + len(prefix) <= self._free:
            return count <= self._free
        state, room = self._state, self._free - count
        tail = prefix[-room - 1 :]  # the end of a prefix is released first: often it alone has too many free blocks
        if sum([state[block] <= 0 for block in tail]) > room:
            return False
        return len(tail) == len(prefix) or sum([state[block] <= 0 for block in prefix]) <= room

    def free_order(self) -> list[int]:
        """The places without a holder, next to be reused first."""
        first, state = self._head, self._state
        ring = enumerate(self._ring[first - self._base :], first)
        return self._unhashed[::-1] + [block for at, block in ring if state[block] == ~at]

    # --- changes ---

    def allocate(self, count: int, prefix: Sequence[int] = ()) -> list[int] | None:
        """Take a holder on every block of ``prefix`` and ``count`` further places; all, or None and nothing changed.

        Returns the new places only; their content is forgotten. The prefix (distinct blocks, from ``match``) is
        never among them.
        """
        if count < 0:
            raise InternalError(f"cannot allocate {count} blocks")
        if not self.fits(count, prefix):
            return None
        self.touch(prefix)
        return self._pop(count)

    def touch(self, ids: Sequence[int]) -> None:
        """One more holder for each block; a free one leaves the free order."""
        state = self._state
        taken = 0
        more: list[int] = []
        for block in ids:
            holders = state[block]
            if holders > 0:
                state[block] = holders + 1
                more.append(holders + 1)
            else:
                if not holders:
                    self._unhashed.remove(block)
                state[block] = 1
                taken += 1
        self._free -= taken
        if more:
            self._count_shared(more, 1)

    def store(self, ids: Sequence[int], hashes: Sequence[int]) -> None:
        """The blocks are full and carry these hashes from now on. A block that has a hash, or no holder, is refused."""
        hash_of, state, first_of = self.hash_of, self._state, self._index.setdefault
        for block, sequence_hash in zip(ids, hashes, strict=True):
            if hash_of[block] or not sequence_hash or state[block] <= 0:
                raise InternalError(f"device block {block} cannot take hash {sequence_hash:016x}")
            hash_of[block] = sequence_hash
            if first_of(sequence_hash, block) != block:
                self._copies.setdefault(sequence_hash, []).append(block)

    def release(self, ids: Sequence[int]) -> None:
        """One holder less for each block of a request, given in prompt order and released tail first."""
        state, hash_of = self._state, self.hash_of
        ring, unhashed = self._ring, self._unhashed
        before = len(ring) + len(unhashed)
        entry = ~(self._base + len(ring))
        fewer = []
        for block in reversed(ids):
            holders = state[block]
            if holders != 1:
                if holders <= 0:
                    raise InternalError(f"device block {block} has no holder to give back")
                state[block] = holders - 1
                fewer.append(holders)
            elif hash_of[block]:
                state[block] = entry
                entry -= 1
                ring.append(block)
            else:
                state[block] = 0
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
        taken = self._taken(count)
        self._free -= count
        dead, passed = _DEAD_FACTOR * self.capacity_blocks, self._head - self._base
        if passed > dead:
            del self._ring[:passed]
            self._base = self._head
        elif len(self._ring) > 2 * dead:
            self._compact()
        return taken

    def _taken(self, count: int) -> list[int]:
        taken: list[int] = []
        unhashed, state = self._unhashed, self._state
        while unhashed and count:
            block = unhashed.pop()
            state[block] = 1
            taken.append(block)
            count -= 1
        if count:
            ring, hash_of, at, entry = self._ring, self.hash_of, self._head - self._base, ~self._head
            while count:
                block = ring[at]
                if state[block] == entry:
                    state[block] = 1
                    taken.append(block)
                    count -= 1
                    if hash_of[block]:
                        self._forget(block)
                at += 1
                entry -= 1
            self._head = ~entry
        return taken

    def _forget(self, block: int) -> None:
        sequence_hash = self.hash_of[block]
        self.hash_of[block] = EMPTY_HASH
        if sequence_hash in self._found:
            self._found = {}
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
        state, first = self._state, self._head
        ring = [block for block in self._numbers if state[block] < 0]
        ring.sort(key=state.__getitem__, reverse=True)
        for at, block in enumerate(ring, first):
            state[block] = ~at
        self._ring, self._base = ring, first

    def audit(self, holders: Iterable[Sequence[int]] | None = None) -> list[str]:
        """Every broken rule, empty when all is well. ``holders`` are the block lists of all holders."""
        return _audit(self, holders)


class SharedPool(DevicePool):
    """A pool that several groups of layers share. The hashes of each are those of ``in_group``.

    >>> pool = SharedPool(1)
    >>> pool.store(pool.allocate(1), in_group(2, [7])); pool.release([0])
    >>> pool.allocate(1), pool.take_lost()
    ([0], {2: [7]})
    """

    def clear(self) -> None:
        """As ``DevicePool.clear``."""
        super().clear()
        self._lost: dict[int, list[int]] = {}

    def take_lost(self) -> dict[int, list[int]]:
        """The blocks of each group beside the first whose places were handed out since the last call."""
        lost, self._lost = self._lost, {}
        return lost

    def _forget(self, block: int) -> None:
        group, sequence_hash = divmod(self.hash_of[block], 1 << HASH_BITS)
        if group:
            self._lost.setdefault(group, []).append(sequence_hash)
        super()._forget(block)


# --- the audit: its rules are checked by walking the columns; it shares no code with the functions that change them ---


def _audit(pool: DevicePool, holders: Iterable[Sequence[int]] | None) -> list[str]:
    found: list[str] = []
    order, refs = pool.free_order(), pool.refs
    if len(set(order)) != len(order):
        found.append("a place is twice in the free order")
    if set(order) != {block for block in range(pool.capacity_blocks) if not refs[block]}:
        found.append("the free order is not the set of places without a holder")
    if len(order) != pool.free_blocks:
        found.append(f"{pool.free_blocks} places are counted free, {len(order)} are")
    if not _indexed(pool):
        found.append("the index of hashes differs from the places")
    if any(pool.hash_of[block] != EMPTY_HASH for block in pool._unhashed):
        found.append("a block with a hash is among those reused first")
    if pool._shared != _shared(refs):
        found.append("the numbers of places with several holders are not those counted")
    if holders is not None:
        counted = [0] * pool.capacity_blocks
        for ids in holders:
            for block in ids:
                counted[block] += 1
        if counted != refs:
            found.append("the holders of some place are not those counted")
    return found


def _indexed(pool: DevicePool) -> bool:
    """True if each hash is found at the places that hold it, and nowhere else."""
    standing: dict[int, list[int]] = {}
    for block, sequence_hash in enumerate(pool.hash_of):
        if sequence_hash != EMPTY_HASH:
            standing.setdefault(sequence_hash, []).append(block)
    indexed = {key: sorted([block, *pool._copies.get(key, ())]) for key, block in pool._index.items()}
    return indexed == standing and pool._copies.keys() <= pool._index.keys()


def _shared(refs: list[int]) -> list[int]:
    """How many places have so many holders, from two on."""
    counted = [0] * (max(1, max(refs)) + 1)
    for holders in refs:
        counted[holders] += holders > 1
    return counted
