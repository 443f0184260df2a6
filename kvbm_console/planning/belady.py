"""``belady``: evict the block whose next use is farthest away; only where the future is known.

Law of this file: the optimal bound. No policy has more hits on the same requests, also when only a leading run of
resident blocks counts as a hit: the next use of a child is never before that of its parent, and of two blocks with the
same next use the deeper one goes first.
"""

from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final

_DEPTH_BITS: Final = 24
"""A rank is -(next use, depth) as one number, since comparing numbers is faster; 16 million blocks are no prompt."""
_SLACK: Final = 5_000
"""Dead heap entries that are carried before the heap is built anew, beside three per resident block."""


class Belady:
    """The optimal policy for a known sequence of touches.

    ``future`` has the keys of every touch that will come, in order; ``touch`` must be called with exactly those.

    >>> policy = Belady([[1, 2], [3], [1]])
    >>> policy.touch([1, 2], 0); policy.touch([3], 1)
    >>> policy.victims(2)
    [2, 3]
    """

    name = "belady"

    def __init__(self, future: Sequence[Sequence[int]]) -> None:
        never = len(future)
        following: dict[int, int] = {}
        self._next_of: list[list[int]] = []
        """For each touch, the number of the next touch of each of its keys."""
        for number in range(len(future) - 1, -1, -1):
            keys = future[number]
            self._next_of.append([following.get(key, never) for key in keys])
            following.update(dict.fromkeys(keys, number))
        self._next_of.reverse()
        self._touches = 0
        self._rank: dict[int, int] = {}
        """Resident key to its rank."""
        self._heap: list[tuple[int, int]] = []
        """(rank, key)"""
        self._offered: list[tuple[int, int]] = []
        """Entries of the last victims: they go back into the heap unless these were forgotten meanwhile."""

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._rank.keys()

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """The next touch of the known future."""
        ranks, heap = self._rank, self._heap
        for depth, (key, following) in enumerate(zip(keys, self._next_of[self._touches], strict=True)):
            rank = ranks[key] = -(following << _DEPTH_BITS | depth)
            heappush(heap, (rank, key))
        self._touches += 1
        if len(heap) > 3 * len(ranks) + _SLACK:
            self._rebuild()

    def forget(self, keys: Iterable[int]) -> None:
        """Blocks were given up."""
        for key in keys:
            self._rank.pop(key, None)

    def _rebuild(self) -> None:
        self._heap = [(rank, key) for key, rank in self._rank.items()]
        heapify(self._heap)
        self._offered = []

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` keys that are used again last, farthest first; None when there are fewer."""
        heap, ranks = self._heap, self._rank
        for entry in self._offered:
            if ranks.get(entry[1]) == entry[0]:
                heappush(heap, entry)
        self._offered = offered = []
        kept: list[tuple[int, int]] = []
        chosen: dict[int, None] = {}
        while len(chosen) < count and heap:
            entry = heappop(heap)
            key = entry[1]
            if ranks.get(key) != entry[0] or key in chosen:
                continue
            if key in protected or (evictable is not None and not evictable(key)):
                kept.append(entry)
            else:
                offered.append(entry)
                chosen[key] = None
        for entry in kept:
            heappush(heap, entry)
        return list(chosen) if len(chosen) >= count else None

    def gauges(self) -> dict[str, float]:
        """Nothing beside what every policy tells."""
        return {}

    def export(self) -> Any:
        """Resident keys, the first victim first, and how many touches have been."""
        return {"touches": self._touches, "resident": sorted([rank, key] for key, rank in self._rank.items())}

    def restore(self, exported: Any) -> None:
        """Become what was exported, over the same future."""
        self._touches = exported["touches"]
        self._rank = {key: rank for rank, key in exported["resident"]}
        self._rebuild()
