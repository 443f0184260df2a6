"""``lrfu_auto``: ``lrfu`` whose half-life is chosen while it runs.

Law of this file: what is chosen depends on the touches alone. Beside the pool run shadow caches, one per half-life,
over the same sample of blocks and with the same share of the capacity. Every ``EPOCH_REFERENCES`` sampled references
the half-life whose shadow had the most hits is taken, if it is better by a margin (hysteresis), so that noise changes
nothing. Without any history it is ``simple_lru``, and its gauge says so: a half-life of 0.

A sample of blocks is enough because a block is never evicted before its children, so a hit of a block in a shadow is a
hit of the prefix that ends with it. When the half-life changes, ranks are carried over so that their order stays: a
lead over now is kept in bits (so many doublings of use), an age is kept in seconds.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import log2
from typing import Any, Final

from kvbm_console.core.eviction.ranked import SECOND_NS, Entry, Lrfu

RECENCY_S: Final = 1e-3
"""A half-life below the time between two requests: pure recency."""
HALF_LIVES_S: Final = (RECENCY_S, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0, 1e8)
"""From pure recency to pure frequency; between them the times in which agents and people come back."""
SAMPLED_SHARE: Final = 17
"""One block in so many is sampled: eight shadows then cost half of the pool itself. A prime, so that ids in sequence
are spread evenly."""
_REMAINDER: Final = 3
"""Which ones; not 0, because traces like to call the block that every prompt begins with 0."""
EPOCH_REFERENCES: Final = 512
"""Sampled references between two decisions."""
MEMORY: Final = 0.85
"""Weight of the hits of earlier epochs, per epoch: a change of the load is followed within a few epochs."""
MARGIN: Final = 0.01
"""To be taken, a half-life must have had more hits than the current one, by this share of the references."""
EVIDENCE: Final = 8
"""And by this many besides, so that a handful of lucky ones at the beginning does not count."""


class _Shadow:
    """A small ``lrfu`` over sampled blocks that counts its hits; as ``Lrfu``, without protection and bookkeeping."""

    def __init__(self, capacity: int, half_life_s: float, ghosts_max: int) -> None:
        self.capacity = capacity
        self.half_life_s = half_life_s
        self.ghosts_max = ghosts_max
        self._rank: dict[int, float] = {}
        self._stamp: dict[int, int] = {}
        self._queued: dict[int, int] = {}
        self._heap: list[Entry] = []
        self._clock = 0

    def use(self, batch: list[tuple[Sequence[int], int]]) -> int:
        """Look up and insert the sampled blocks of several touches; returns the hits."""
        ranks, stamps, queued, heap = self._rank, self._stamp, self._queued, self._heap
        known, stamp, capacity, scale = ranks.get, self._clock, self.capacity, SECOND_NS * self.half_life_s
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
            while len(queued) > capacity:
                top = heap[0][2]
                latest = stamps[top]
                if latest == heap[0][1]:
                    heappop(heap)
                    del queued[top]
                else:
                    heapreplace(heap, (ranks[top], latest, top))
        self._clock = stamp
        if len(ranks) - len(queued) > self.ghosts_max:
            self._forget_oldest()
        return hits

    def _forget_oldest(self) -> None:
        ghosts = sorted((stamp, key) for key, stamp in self._stamp.items() if key not in self._queued)
        for _, key in ghosts[: len(ghosts) - self.ghosts_max // 8 * 7]:
            del self._rank[key]
            del self._stamp[key]

    def export(self) -> Any:
        """Every known key by stamp: key, stamp, rank, whether it is resident."""
        known = sorted((stamp, key) for key, stamp in self._stamp.items())
        return [self._clock, [[key, stamp, self._rank[key], key in self._queued] for stamp, key in known]]

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self._clock, known = exported
        self._stamp = {key: stamp for key, stamp, _, _ in known}
        self._rank = {key: rank for key, _, rank, _ in known}
        self._queued = {key: stamp for key, stamp, _, resident in known if resident}
        self._heap = [(self._rank[key], stamp, key) for key, stamp in self._queued.items()]
        heapify(self._heap)


class LrfuAuto(Lrfu):
    """``lrfu`` with a half-life that follows the load. See the head of this file."""

    name = "lrfu_auto"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, HALF_LIVES_S[0])
        share = max(1, capacity // SAMPLED_SHARE)
        ghosts = max(1, self.ghosts_max // SAMPLED_SHARE)
        self._shadows = [_Shadow(share, half_life_s, ghosts) for half_life_s in HALF_LIVES_S]
        self._current = 0
        self._scores = [0.0] * len(HALF_LIVES_S)
        self._weight = 0.0
        """References behind the scores."""
        self._batch: list[tuple[Sequence[int], int]] = []
        """Sampled touches since the last decision."""
        self._sampled = 0
        """References in them."""
        self._changes = 0

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each, here and in the shadows."""
        super().touch(keys, at_ns)
        sampled = [key for key in keys if key % SAMPLED_SHARE == _REMAINDER]
        if sampled:
            self._batch.append((sampled, at_ns))
            self._sampled += len(sampled)
            if self._sampled >= EPOCH_REFERENCES:
                self._decide(at_ns)

    def _decide(self, at_ns: int) -> None:
        scores = self._scores
        for index, shadow in enumerate(self._shadows):
            scores[index] = scores[index] * MEMORY + shadow.use(self._batch)
        self._weight = self._weight * MEMORY + self._sampled
        self._batch, self._sampled = [], 0
        best = max(range(len(scores)), key=lambda index: (scores[index], -abs(index - self._current)))
        if scores[best] > scores[self._current] + MARGIN * self._weight + EVIDENCE:
            self._current = best
            self._changes += 1
            self._change_half_life(HALF_LIVES_S[best], at_ns)

    def _change_half_life(self, half_life_s: float, at_ns: int) -> None:
        before = at_ns / (SECOND_NS * self.half_life_s)
        now = at_ns / (SECOND_NS * half_life_s)
        stretch = self.half_life_s / half_life_s
        self.half_life_s = half_life_s
        self._rank = {
            key: now + (rank - before if rank > before else (rank - before) * stretch)
            for key, rank in self._rank.items()
        }
        self._rebuild()

    def gauges(self) -> dict[str, float]:
        """Also the half-life in use (0: pure recency) and how often it changed."""
        half_life_s = self.half_life_s if self._current else 0.0
        return {**super().gauges(), "half_life_s": half_life_s, "half_life_changes": self._changes}

    def export(self) -> Any:
        """As all, with the shadows and their scores."""
        return {
            **super().export(), "current": self._current, "changes": self._changes, "weight": self._weight,
            "batch": [[list(keys), at_ns] for keys, at_ns in self._batch], "scores": list(self._scores),
            "shadows": [shadow.export() for shadow in self._shadows],
        }

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self._current = exported["current"]
        self.half_life_s = HALF_LIVES_S[self._current]
        self._changes, self._weight = exported["changes"], exported["weight"]
        self._batch = [(keys, at_ns) for keys, at_ns in exported["batch"]]
        self._sampled = sum(len(keys) for keys, _ in self._batch)
        self._scores = list(exported["scores"])
        for shadow, state in zip(self._shadows, exported["shadows"], strict=True):
            shadow.restore(state)
        super().restore(exported)
