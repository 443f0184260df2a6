"""Policies that rank blocks by a number: ``lfu``, ``frequency_based``, ``adaptive_lru``, ``lrfu``.

Law of this file: while a block is resident its rank only grows. Therefore a touch of a resident block costs no heap
operation: a block enters the heap when it becomes resident, and an entry that comes to the top with an old rank is put
back with the current one. The victim is the block with the smallest (rank, stamp); each block of each touch gets a
stamp, deepest first, so ties are broken by recency, then by depth, totally.
"""

import math
from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final

from kvbm_console.core.eviction.policy import ghosts_max

SECOND_NS: Final = 1_000_000_000
_HEAP_SLACK: Final = 5_000
"""Dead heap entries that are carried before the heap is built anew, beside three per resident block."""
_KEEP_GHOSTS: Final = 7 / 8
"""Share of the ghosts that is kept when their bound is reached: forgetting in bulk makes it cheap for each."""

Entry = tuple[float, int, int]
"""(rank, stamp, key) at the time when it entered the heap."""


class Ranked:
    """What ranked policies share: residency, the lazy heap, and the memory of evicted blocks (ghosts).

    ``_rank`` and ``_stamp`` are those of the last touch. A subclass with ``remembers`` keeps them for evicted keys too,
    at most ``ghosts_max`` of these; those that were touched longest ago are forgotten first.
    """

    name = "ranked"
    remembers = False

    def __init__(self, capacity: int) -> None:
        self.ghosts_max = ghosts_max(capacity)
        self._rank: dict[int, float] = {}
        self._stamp: dict[int, int] = {}
        self._queued: dict[int, int] = {}
        """Resident key to the stamp of its one live heap entry."""
        self._heap: list[Entry] = []
        self._offered: list[Entry] = []
        """Entries of the last victims: they go back into the heap unless these were forgotten meanwhile."""
        self._clock = 0

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._queued.keys()

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """See ``EvictionPolicy.touch``."""
        raise NotImplementedError

    def forget(self, keys: Iterable[int]) -> None:
        """These blocks are not resident any more."""
        queued = self._queued
        if self.remembers:
            for key in keys:
                queued.pop(key, None)
            if len(self._stamp) - len(queued) > self.ghosts_max:
                self._prune()
        else:
            for key in keys:
                if queued.pop(key, None) is not None:
                    self._drop(key)
        if len(self._heap) > 3 * len(queued) + _HEAP_SLACK:
            self._rebuild()

    def _drop(self, key: int) -> None:
        """Forget everything about this key."""
        del self._rank[key]
        del self._stamp[key]

    def _prune(self) -> None:
        ghosts = sorted((stamp, key) for key, stamp in self._stamp.items() if key not in self._queued)
        for _, key in ghosts[: len(ghosts) - int(self.ghosts_max * _KEEP_GHOSTS)]:
            self._drop(key)

    def _rebuild(self) -> None:
        """One entry for each resident key, with its current rank."""
        self._queued = {key: self._stamp[key] for key in self._queued}
        self._heap = [(self._rank[key], stamp, key) for key, stamp in self._queued.items()]
        heapify(self._heap)
        self._offered = []

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` lowest ranked keys that may go, lowest first; None when there are fewer."""
        heap, queued, stamps, ranks = self._heap, self._queued, self._stamp, self._rank
        for entry in self._offered:
            if queued.get(entry[2]) == entry[1]:
                heappush(heap, entry)
        self._offered = []
        chosen: list[int] = []
        offered: list[Entry] = []
        kept: list[Entry] = []
        while len(chosen) < count and heap:
            entry = heap[0]
            key = entry[2]
            if queued.get(key) != entry[1]:
                heappop(heap)
                continue
            stamp = stamps[key]
            if stamp != entry[1]:
                queued[key] = stamp
                heapreplace(heap, (ranks[key], stamp, key))
                continue
            heappop(heap)
            if key in protected or (evictable is not None and not evictable(key)):
                kept.append(entry)
            else:
                chosen.append(key)
                offered.append(entry)
        for entry in kept:
            heappush(heap, entry)
        self._offered = offered
        return chosen if len(chosen) >= count else None

    def recency_agrees(self, victims: Collection[int]) -> bool:
        """Whether recency alone ranks every one of these below each resident key that is not among them."""
        stamps, chosen = self._stamp, set(victims)
        last = max((stamps[key] for key in chosen), default=-1)
        return not any(stamps[key] < last and key not in chosen for key in self._queued)

    def gauges(self) -> dict[str, float]:
        """Ghosts and their bound, for policies that have them."""
        if not self.remembers:
            return {}
        return {"ghosts": len(self._stamp) - len(self._queued), "ghosts_max": self.ghosts_max}

    # --- keyframes ---

    def export(self) -> Any:
        """Every known key by stamp: key, stamp, rank, whether it is resident."""
        known = sorted((stamp, key) for key, stamp in self._stamp.items())
        return {
            "clock": self._clock,
            "known": [[key, stamp, self._rank[key], key in self._queued] for stamp, key in known],
        }

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self._clock = exported["clock"]
        self._stamp = {key: stamp for key, stamp, _, _ in exported["known"]}
        self._rank = {key: rank for key, _, rank, _ in exported["known"]}
        self._queued = {key: stamp for key, stamp, _, resident in exported["known"] if resident}
        self._rebuild()


class Lfu(Ranked):
    """Evicts the block that was touched least often since it became resident.

    >>> policy = Lfu(3)
    >>> policy.touch([1, 2, 3], 0); policy.touch([1, 2], 1)
    >>> policy.victims(1), policy.victims(2)
    ([3], [3, 2])
    """

    name = "lfu"

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each."""
        ranks, stamps, queued, heap, stamp = self._rank, self._stamp, self._queued, self._heap, self._clock
        for key in reversed(keys):
            stamp += 1
            if key in queued:
                ranks[key] += 1
            else:
                ranks[key] = 1
                queued[key] = stamp
                heappush(heap, (1, stamp, key))
            stamps[key] = stamp
        self._clock = stamp


class FrequencyBased(Ranked):
    """Evicts the block with the fewest touches in its lifetime, those before an earlier eviction included."""

    name = "frequency_based"
    remembers = True

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each."""
        ranks, stamps, queued, heap, stamp = self._rank, self._stamp, self._queued, self._heap, self._clock
        known = ranks.get
        for key in reversed(keys):
            stamp += 1
            rank = ranks[key] = known(key, 0) + 1
            if key not in queued:
                queued[key] = stamp
                heappush(heap, (rank, stamp, key))
            stamps[key] = stamp
        self._clock = stamp


class AdaptiveLru(Ranked):
    """Recency with a handicap for rarely used blocks: (1-w) x last touch - w x credit / (uses + 1), in seconds.

    ``frequency_weight`` w from 0 (``simple_lru``) to 1 (``lfu``). Uses are counted while resident.
    """

    name = "adaptive_lru"

    def __init__(self, capacity: int, frequency_weight: float, frequency_credit_s: float) -> None:
        super().__init__(capacity)
        self._recency = 1.0 - frequency_weight
        self._handicap = frequency_weight * frequency_credit_s if frequency_weight < 1.0 else 1.0
        self._uses: dict[int, int] = {}

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each, now."""
        ranks, stamps, queued, heap, stamp = self._rank, self._stamp, self._queued, self._heap, self._clock
        uses, handicap = self._uses, self._handicap
        recency = self._recency * (at_ns / SECOND_NS)
        first = recency - handicap / 2
        for key in reversed(keys):
            stamp += 1
            if key in queued:
                count = uses[key] = uses[key] + 1
                ranks[key] = recency - handicap / (count + 1)
            else:
                uses[key] = 1
                ranks[key] = first
                queued[key] = stamp
                heappush(heap, (first, stamp, key))
            stamps[key] = stamp
        self._clock = stamp

    def _drop(self, key: int) -> None:
        super()._drop(key)
        del self._uses[key]

    def export(self) -> Any:
        """As all, with the uses of each."""
        return {**super().export(), "uses": sorted([key, count] for key, count in self._uses.items())}

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        super().restore(exported)
        self._uses = dict(exported["uses"])


class Lrfu(Ranked):
    """Combined recency and frequency: every touch counts, and counts half after each half-life.

    The rank is the base-2 logarithm of that sum, referred to time 0, so that it is static between touches:
    with y = time / half-life, rank' = log2(2^rank + 2^y) = max(rank, y) + log2(1 + 2^-abs(rank - y)). The history of
    a block survives its eviction.
    """

    name = "lrfu"
    remembers = True

    def __init__(self, capacity: int, half_life_s: float) -> None:
        super().__init__(capacity)
        self.half_life_s = half_life_s

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each, now."""
        ranks, stamps, queued, heap, stamp = self._rank, self._stamp, self._queued, self._heap, self._clock
        now = at_ns / (SECOND_NS * self.half_life_s)
        known, log2 = ranks.get, math.log2
        child_before = child = -math.inf
        for key in reversed(keys):
            stamp += 1
            before = known(key)
            if before is None:
                rank = now
            else:
                gap = before - now
                rank = before + log2(1.0 + 2.0**-gap) if gap > 0.0 else now + log2(1.0 + 2.0**gap)
                if rank < child and before >= child_before:
                    rank = child  # a rounding error must not put a parent below its child
                child_before = before
            child = rank
            ranks[key] = rank
            if key not in queued:
                queued[key] = stamp
                heappush(heap, (rank, stamp, key))
            stamps[key] = stamp
        self._clock = stamp
