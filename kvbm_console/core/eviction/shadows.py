"""Shadow caches: small caches over a sample of the blocks that only count their hits.

Law of this file: each ranks as its full-sized namesake does (a test holds them against each other), but keeps no books
for anybody else: nothing is protected, and it evicts as soon as a touch has made it too large.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import log2
from typing import Any, Protocol

from kvbm_console.core.eviction.ranked import SECOND_NS, Entry

Batch = list[tuple[Sequence[int], int]]
"""Touches: (keys of one prefix in prompt order, time)."""


class Shadow(Protocol):
    """A cache that counts."""

    def use(self, batch: Batch) -> int:
        """Look up and insert the blocks of several touches; returns the hits."""
        ...

    def export(self) -> Any:
        """Plain values in canonical order."""
        ...

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        ...


class _Heap:
    """Resident keys with the lazy heap of ``ranked``: ranks only grow while a key is resident."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rank: dict[int, float] = {}
        self._stamp: dict[int, int] = {}
        self._queued: dict[int, int] = {}
        self._heap: list[Entry] = []
        self._clock = 0

    def _shrink(self) -> list[int]:
        """Evict down to the capacity; returns the victims."""
        queued, heap, stamps, ranks = self._queued, self._heap, self._stamp, self._rank
        gone: list[int] = []
        while len(queued) > self.capacity:
            top = heap[0][2]
            latest = stamps[top]
            if latest == heap[0][1]:
                heappop(heap)
                del queued[top]
                gone.append(top)
            else:
                heapreplace(heap, (ranks[top], latest, top))
        return gone

    def export(self) -> Any:
        """Every known key by stamp: key, stamp, rank, whether it is resident."""
        known = sorted((stamp, key) for key, stamp in self._stamp.items())
        return [self._clock, [[key, stamp, self._rank[key], key in self._queued] for stamp, key in known]]

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self._clock, known = exported[0], exported[1]
        self._stamp = {key: stamp for key, stamp, _, _ in known}
        self._rank = {key: rank for key, _, rank, _ in known}
        self._queued = {key: stamp for key, stamp, _, resident in known if resident}
        self._heap = [(self._rank[key], stamp, key) for key, stamp in self._queued.items()]
        heapify(self._heap)


class LrfuShadow(_Heap):
    """``lrfu`` with one half-life; remembers at most ``ghosts_max`` evicted keys."""

    def __init__(self, capacity: int, half_life_s: float, ghosts_max: int) -> None:
        super().__init__(capacity)
        self.half_life_s = half_life_s
        self.ghosts_max = ghosts_max

    def use(self, batch: Batch) -> int:
        """Look up and insert; returns the hits."""
        ranks, stamps, queued, heap = self._rank, self._stamp, self._queued, self._heap
        known, stamp, scale = ranks.get, self._clock, SECOND_NS * self.half_life_s
        hits = 0
        for keys, at_ns in batch:
            now = at_ns / scale
            for key in reversed(keys):
                stamp += 1
                rank = known(key)
                if rank is None:
                    rank = now
                else:
                    gap = rank - now
                    rank = rank + log2(1.0 + 2.0**-gap) if gap > 0.0 else now + log2(1.0 + 2.0**gap)
                ranks[key] = rank
                stamps[key] = stamp
                if key in queued:
                    hits += 1
                else:
                    queued[key] = stamp
                    heappush(heap, (rank, stamp, key))
            if len(queued) > self.capacity:
                self._shrink()
        self._clock = stamp
        if len(ranks) - len(queued) > self.ghosts_max:
            self._forget_oldest()
        return hits

    def _forget_oldest(self) -> None:
        ghosts = sorted((stamp, key) for key, stamp in self._stamp.items() if key not in self._queued)
        for _, key in ghosts[: len(ghosts) - self.ghosts_max // 8 * 7]:
            del self._rank[key]
            del self._stamp[key]


class AdaptiveShadow(_Heap):
    """``recency`` x last touch in seconds - ``handicap`` / (uses while resident + 1): ``adaptive_lru``, ``lfu``."""

    def __init__(self, capacity: int, recency: float, handicap: float) -> None:
        super().__init__(capacity)
        self.recency = recency
        self.handicap = handicap
        self._uses: dict[int, int] = {}

    def use(self, batch: Batch) -> int:
        """Look up and insert; returns the hits."""
        ranks, stamps, queued, heap = self._rank, self._stamp, self._queued, self._heap
        uses, handicap, stamp = self._uses, self.handicap, self._clock
        hits = 0
        for keys, at_ns in batch:
            now = self.recency * at_ns / SECOND_NS
            for key in reversed(keys):
                stamp += 1
                stamps[key] = stamp
                if key in queued:
                    hits += 1
                    count = uses[key] = uses[key] + 1
                    ranks[key] = now - handicap / (count + 1)
                else:
                    uses[key] = 1
                    rank = ranks[key] = now - handicap / 2
                    queued[key] = stamp
                    heappush(heap, (rank, stamp, key))
            if len(queued) > self.capacity:
                for key in self._shrink():
                    del ranks[key], stamps[key], uses[key]
        self._clock = stamp
        return hits

    def export(self) -> Any:
        """As all, with the uses of each."""
        return [*super().export(), sorted([key, count] for key, count in self._uses.items())]

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        super().restore(exported)
        self._uses = dict(exported[2])
