"""Ghosts: the blocks that a pool evicted, remembered by hash, to recognise those that are stored again.

Theory of operation
-------------------
A stream does not report hits. It does report a block that the engine evicted and computed again: its hash is removed
and stored again later. The number of evictions in between tells how many more places would have kept the block in an
LRU cache.

    removed a b c d     a left at 0, b at 1, c at 2, d at 3
    stored  b           4 evictions so far, b left at 1: b had needed 3 more places

So a pool of ``capacity + 4`` places would have kept b. Counts by this distance are the part of a miss-ratio curve above
the present capacity. Hits on resident blocks are silent, so nothing is known of smaller capacities.

Memory has a bound. When ``GHOSTS_MAX`` hashes are kept, every second hash is left out from then on, and each found
block counts twice (SHARDS, Waldspurger et al., FAST 2015). Hashes are uniform, so their low bits choose without bias.
Blocks that left more than ``HISTORY`` pool sizes ago are forgotten.

Law of this file: a block counts once for each time that it is stored again.
"""

from collections.abc import Sequence
from typing import Final

from kvbm_console.core.ids import AGE_BOUNDS_NS, age_class

GHOSTS_MAX: Final = 8_192
"""Hashes of a pool: 1 MB at most. An estimate from so many samples is right to about a percentage point."""
HISTORY: Final = 8
"""Pool sizes of evictions that are remembered; nobody doubles a cache more than three times."""
HISTORY_LEAST: Final = 4_096
"""Evictions that are remembered of any pool."""

Again = dict[tuple[int, int], int]
"""(age bound in ns, bound of the evictions since then) to blocks."""


class Ghosts:
    """The evicted blocks of one pool."""

    __slots__ = ("_evicted", "_left", "_mask")

    def __init__(self) -> None:
        self._evicted = 0
        self._left: dict[int, tuple[int, int | None]] = {}
        """Hash to the number of evictions in front of its report, and the time of that report."""
        self._mask = 0

    @property
    def weight(self) -> int:
        """The number of blocks that each found block stands for."""
        return self._mask + 1

    def clear(self) -> None:
        """The pool was cleared, so no policy evicted its blocks."""
        self._left.clear()

    def evict(self, hashes: Sequence[int], at_ns: int | None, resident: int) -> None:
        """These blocks were evicted from a pool that held ``resident`` blocks, at None if the time is unknown."""
        left, mask = self._left, self._mask
        report = self._evicted, at_ns
        left.update(dict.fromkeys([key for key in hashes if not key & mask] if mask else hashes, report))
        self._evicted += len(hashes)
        if len(left) > GHOSTS_MAX:
            self._forget(self._evicted - max(HISTORY_LEAST, HISTORY * resident))

    def find(self, hashes: Sequence[int], at_ns: int | None) -> Again:
        """The blocks among these that were evicted before. They are here again, so they are forgotten.

        An unknown age is in the class of the oldest.
        """
        left = self._left
        if left.keys().isdisjoint(hashes):
            return {}
        found: Again = {}
        last: tuple[int, int | None] | None = None
        blocks = 0
        for key in hashes:
            report = left.pop(key, None)
            if report is last:
                blocks += 1
                continue
            if last is not None:
                self._count(found, last, at_ns, blocks)
            last, blocks = report, 1
        if last is not None:
            self._count(found, last, at_ns, blocks)
        return found

    def _count(self, found: Again, report: tuple[int, int | None], at_ns: int | None, blocks: int) -> None:
        number, left_ns = report
        distance = max(1, self._evicted - number)
        age = -1 if at_ns is None or left_ns is None else age_class(at_ns - left_ns)
        at = AGE_BOUNDS_NS[age], 1 << (distance - 1).bit_length()
        found[at] = found.get(at, 0) + blocks * (self._mask + 1)

    def _forget(self, before: int) -> None:
        """Forget old evictions, then sample half as many hashes while there are too many."""
        self._left = {key: report for key, report in self._left.items() if report[0] >= before}
        while len(self._left) > GHOSTS_MAX // 2:
            self._mask = 2 * self._mask + 1
            self._left = {key: report for key, report in self._left.items() if not key & self._mask}
