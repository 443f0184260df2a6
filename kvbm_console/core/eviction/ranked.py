"""Policies that rank blocks by a number: ``lfu``, ``frequency_based``, ``adaptive_lru``, ``lrfu``.

Law of this file: the last touch leaves a stamp and one value, for most policies a count of uses. The rank is computed
from these, and while a block is resident it only grows. Therefore a touch needs no heap operation. A block enters the
heap when it becomes resident. An entry that comes to the top with an old stamp goes back with the current rank. The
victim is the block with the smallest (rank, stamp). Each block of each touch gets a stamp, deepest first, so ties are
broken by recency, then by depth, totally. A stamp is the time of the touch in nanoseconds, moved on by as little as
makes it unique.

Blocks that enter at their first use have ranks that only grow with time, so a queue of their entries is in order by
itself. Only blocks that were used again need a heap. Most blocks of most loads never are.
"""

import math
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, KeysView, Sequence
from contextlib import closing
from heapq import heapify, heappop, heappush
from itertools import filterfalse, repeat
from typing import Any, Final

from kvbm_console.core.eviction.policy import ghosts_max

SECOND_NS: Final = 1_000_000_000
_HEAP_SLACK: Final = 5_000
"""Dead heap entries that are carried before the heap is built anew, beside three per resident block."""
_PART_MAX: Final = 512
"""Keys of a part of the order: parts grow to it, so that few keys behind the last victim are looked at."""
_KEEP_GHOSTS: Final = 7 / 8
"""Share of the ghosts that is kept when their bound is reached: forgetting in bulk makes it cheap for each."""

def packed(numbers: Iterable[int]) -> bytes:
    """A column for a keyframe: 8 bytes each, the lowest first."""
    column = array("Q", numbers)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpacked(column: bytes) -> list[int]:
    """The numbers of ``packed``; raises ValueError when its length is not a multiple of eight."""
    numbers = array("Q", column)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


Entry = tuple[float, int, int, int]
"""(rank, stamp, key) at the time when it entered the heap, and its number, which no other entry of the key has."""


class Ranked:
    """The base of ranked policies with residency, the lazy heap, and the memory of evicted blocks (ghosts).

    ``_stamp`` and ``_value`` are those of the last touch. A subclass with ``remembers`` keeps them for evicted keys
    too, at most ``ghosts_max`` of these; those that were touched longest ago are forgotten first.
    """

    name = "ranked"
    remembers = False
    is_recency = False

    def __init__(self, capacity: int) -> None:
        self.ghosts_max = ghosts_max(capacity)
        self._stamp: dict[int, int] = {}
        self._value: Counter[int] = Counter()
        """Uses of each known key, unless a subclass says otherwise."""
        self.rank: Callable[[int], float] = self._value.__getitem__
        """The rank of a resident key, of which the smallest is evicted first. A function, since it is called most of
        all."""
        self._queued: dict[int, int] = {}
        """Resident key to the number of its live entry, which is the stamp of a touch, or negative without a touch."""
        self._numbered = 0
        """Entries whose stamp is that of another block, so that an earlier entry of the key may have it too."""
        self._heap: list[Entry] = []
        self._fresh: deque[Entry] = deque()
        """Entries of blocks that entered at their first use, in order."""
        self._first: float | None = 1
        """The value of a block at its first use; None when whatever enters has the highest rank of all."""
        self._front: deque[Entry] = deque()
        """Entries that a choice of victims has passed, in order; the next choice begins with them."""
        self._clock = -1
        """The last stamp."""
        self._ordered = True
        self.rules = 0
        """How often all ranks were changed."""
        self.stamp: Callable[[int], int] = self._stamp.__getitem__
        """The stamp of a known key."""

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._queued.keys()

    def leave_order(self) -> None:
        """From now on ``victims`` is not asked: the caller has an order of its own, by ``rank`` and ``stamp``."""
        self._ordered = False

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """See ``EvictionPolicy.touch``."""
        deepest_first = keys[::-1]
        self._stamps_anew(deepest_first, at_ns)
        self._use(deepest_first, at_ns)
        entering = list(filterfalse(self._queued.__contains__, deepest_first))
        if entering:
            self._enter(entering)

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """See ``TierPolicy.use``. Without a memory of evicted blocks only resident blocks count."""
        used = keys[::-1]
        if not self.remembers:
            used = list(filter(self._queued.__contains__, used))
        self._stamps_anew(used, at_ns)
        self._use(used, at_ns)
        if len(self._stamp) - len(self._queued) > self.ghosts_max:
            self._prune()

    def insert(self, keys: Sequence[int], beside: int | None, at_ns: int) -> None:
        """See ``TierPolicy.insert``.

        A block that no request has asked for has the value of a first use, and at most that of ``beside``.
        """
        deepest_first = keys[::-1]
        values = self._value
        fresh = list(filterfalse(self._stamp.__contains__, deepest_first))
        if fresh:
            self._use(fresh, at_ns)
        if beside is None:
            self._stamps_anew(deepest_first, at_ns)
        else:
            self._stamps_beside(deepest_first, beside)
            if beside in values:
                most = values[beside]
                for key in fresh:
                    values[key] = min(values[key], most)
        self._enter(deepest_first, aside=True)

    def _stamps_anew(self, keys: Sequence[int], at_ns: int) -> None:
        """These keys, deepest first, are the newest."""
        first = max(self._clock + 1, at_ns)
        self._clock = first + len(keys) - 1
        self._stamp.update(zip(keys, range(first, first + len(keys)), strict=True))

    def _stamps_beside(self, keys: Sequence[int], beside: int) -> None:
        """These keys, deepest first, are as old as their ancestor. Whoever stores ends of prompts first needs more to
        keep a chain together (``PoolPolicy``)."""
        self._stamp.update(dict.fromkeys(keys, self._stamp[beside]))

    def _use(self, keys: Sequence[int], at_ns: int) -> None:
        """The values after one more use of each of these keys, deepest first."""
        self._value.update(keys)

    def _enter(self, keys: Sequence[int], aside: bool = False) -> None:
        """These keys become resident: they were just touched, or are put ``aside`` another key."""
        stamps, values, queued, rank, first = self._stamp, self._value, self._queued, self.rank, self._first
        if not self._ordered:
            queued.update(zip(keys, repeat(0)))
            return
        if aside:
            numbers = range(-self._numbered - 1, -self._numbered - 1 - len(keys), -1)
            self._numbered += len(keys)
            queued.update(zip(keys, numbers, strict=True))
            entries = zip(map(rank, keys), map(stamps.__getitem__, keys), keys, numbers, strict=True)
            deque(map(heappush, repeat(self._heap), entries), 0)
            return
        if first is None:
            own = list(map(stamps.__getitem__, keys))
            queued.update(zip(keys, own, strict=True))
            self._fresh.extend(zip(map(rank, keys), own, keys, own, strict=True))
            return
        for key in keys:
            stamp = queued[key] = stamps[key]
            if values[key] == first:
                self._fresh.append((rank(key), stamp, key, stamp))
            else:
                heappush(self._heap, (rank(key), stamp, key, stamp))

    def forget(self, keys: Iterable[int]) -> None:
        """These blocks are not resident any more."""
        queued = self._queued
        if self.remembers:
            deque(map(queued.pop, keys, repeat(None)), 0)
            if len(self._stamp) - len(queued) > self.ghosts_max:
                self._prune()
        else:
            self._drop([key for key in keys if queued.pop(key, None) is not None])
        if len(self._heap) + len(self._fresh) + len(self._front) > 3 * len(queued) + _HEAP_SLACK:
            self._rebuild()

    def _drop(self, keys: Sequence[int]) -> None:
        """Know nothing of these keys any more."""
        deque(map(self._stamp.pop, keys), 0)
        deque(map(self._value.pop, keys, repeat(None)), 0)

    def _prune(self) -> None:
        """Forget the ghosts that were touched longest ago, of equal stamps the lowest keys."""
        ghosts = list(filterfalse(self._queued.__contains__, self._stamp))
        count = len(ghosts) - int(self.ghosts_max * _KEEP_GHOSTS)
        if count <= 0:
            return
        stamps = list(map(self._stamp.__getitem__, ghosts))
        last = sorted(stamps)[count - 1]
        older = [key for key, stamp in zip(ghosts, stamps, strict=True) if stamp < last]
        as_old = sorted([key for key, stamp in zip(ghosts, stamps, strict=True) if stamp == last])
        self._drop([*older, *as_old[: count - len(older)]])

    def _rebuild(self) -> None:
        """One entry for each resident key, with its current rank."""
        self.rules += 1
        if not self._ordered:
            return
        self._queued = {key: self._stamp[key] for key in self._queued}
        self._heap = [(self.rank(key), stamp, key, stamp) for key, stamp in self._queued.items()]
        heapify(self._heap)
        self._fresh.clear()
        self._front.clear()

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` lowest ranked keys that may go, lowest first; None when there are fewer."""
        chosen: list[int] = []
        if count <= 0:
            return chosen
        with closing(self.coldest_first(count)) as parts:
            for keys in parts:
                chosen += [key for key in keys if key not in protected and (evictable is None or evictable(key))]
                if len(chosen) >= count:
                    return chosen[:count]
        return None

    def coldest_first(self, at_first: int) -> Generator[list[int], None, None]:
        """All resident keys in parts, the lowest ranked first; the first part has ``at_first`` keys. Closed after use.

        Until then nothing else may be asked of the policy.
        """
        heap, fresh, front = self._heap, self._fresh, self._front
        queued, stamps, rank, live = self._queued, self._stamp, self.rank, self._queued.get
        passed: list[Entry] = []
        size = max(1, at_first)
        try:
            while True:
                part: list[int] = []
                while len(part) < size:
                    if front and (not heap or front[0] < heap[0]) and (not fresh or front[0] < fresh[0]):
                        entry = front.popleft()
                    elif fresh and (not heap or fresh[0] < heap[0]):
                        entry = fresh.popleft()
                    elif heap:
                        entry = heappop(heap)
                    else:
                        break
                    _, stamp, key, number = entry
                    if live(key) != number:
                        continue
                    latest = stamps[key]
                    if latest != stamp:
                        queued[key] = latest
                        heappush(heap, (rank(key), latest, key, latest))
                        continue
                    passed.append(entry)
                    part.append(key)
                if not part:
                    return
                yield part
                size = min(2 * size, _PART_MAX)
        finally:
            front.extendleft(reversed(passed))

    def gauges(self) -> dict[str, float]:
        """Ghosts and their bound, for policies that have them."""
        if not self.remembers:
            return {}
        return {"ghosts": len(self._stamp) - len(self._queued), "ghosts_max": self.ghosts_max}

    # --- keyframes ---

    def export(self) -> Any:
        """Every known key by stamp, as columns: keys, stamps, values, residence.

        There may be hundreds of thousands, and the caller waits, so no object is made for a key.
        """
        stamps = self._stamp
        keys = [key for _, key in sorted(zip(stamps.values(), stamps, strict=True))]
        return {
            "clock": self._clock, "keys": packed(keys), "stamps": packed(map(stamps.__getitem__, keys)),
            "values": list(map(self._value.get, keys)), "resident": bytes(map(self._queued.__contains__, keys)),
        }

    def restore(self, exported: Any) -> None:
        """Take over exported columns."""
        self._clock = exported["clock"]
        keys, stamps, values, resident = known_columns(exported)
        self._stamp.update(zip(keys, stamps, strict=True))
        self._value.update({key: value for key, value in zip(keys, values, strict=True) if value is not None})
        self._queued = {key: stamp for key, stamp, here in zip(keys, stamps, resident, strict=True) if here}
        self._rebuild()


def known_columns(exported: Any) -> tuple[Sequence[int], Sequence[int], Sequence[Any], Sequence[int]]:
    """The columns of ``Ranked.export``: keys, stamps, values, residence; older recordings have a row for each key."""
    if "known" in exported:
        rows = exported["known"]
        return tuple([row[column] for row in rows] for column in range(4))  # type: ignore[return-value]
    return (
        unpacked(exported["keys"]), unpacked(exported["stamps"]), exported["values"], exported["resident"],
    )


class Recency(Ranked):
    """``simple_lru`` with a stamp for each key, for the tiers of the leader; ``SimpleLru`` is faster alone.

    >>> policy = Recency(3)
    >>> policy.touch([1, 2], 0); policy.touch([3], 1)
    >>> policy.victims(3)
    [2, 1, 3]
    """

    name = "simple_lru"
    is_recency = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._first = None
        self.rank = lambda key: 0.0

    def _use(self, keys: Sequence[int], at_ns: int) -> None:
        """Uses are not counted."""

    def restore(self, exported: Any) -> None:
        """Take over exported columns, or the keys of ``SimpleLru``."""
        if isinstance(exported, list):
            self._clock = len(exported) - 1
            self._stamp.update(zip(exported, range(len(exported)), strict=True))
            self._queued.update(self._stamp)
            self._rebuild()
        else:
            super().restore(exported)


class Lfu(Ranked):
    """Evicts the block that was touched least often since it became resident.

    >>> policy = Lfu(3)
    >>> policy.touch([1, 2, 3], 0); policy.touch([1, 2], 1)
    >>> policy.victims(1), policy.victims(2)
    ([3], [3, 2])
    """

    name = "lfu"


class FrequencyBased(Ranked):
    """Evicts the block with the fewest touches in its lifetime, those before an earlier eviction included."""

    name = "frequency_based"
    remembers = True


class AdaptiveLru(Ranked):
    """Recency with a handicap for rarely used blocks: (1-w) x last touch - w x credit / (uses + 1), in seconds.

    ``frequency_weight`` w from 0 (``simple_lru``) to 1 (``lfu``). Uses are counted while resident.
    """

    name = "adaptive_lru"

    def __init__(self, capacity: int, frequency_weight: float, frequency_credit_s: float) -> None:
        super().__init__(capacity)
        stamps, uses, recency = self._stamp, self._value, (1.0 - frequency_weight) / SECOND_NS
        handicap = frequency_weight * frequency_credit_s if frequency_weight < 1.0 else 1.0
        self.rank = lambda key: recency * stamps[key] - handicap / (uses[key] + 1)


class Lrfu(Ranked):
    """Combined recency and frequency: every touch counts, and counts half after each half-life.

    The value of a block is the natural logarithm of that sum, referred to time 0, so it is static between touches. With
    y = time x ln 2 / half-life, value' = ln(e^value + e^y). The history of a block survives its eviction.
    """

    name = "lrfu"
    remembers = True

    def __init__(self, capacity: int, half_life_s: float) -> None:
        super().__init__(capacity)
        self.half_life_s = half_life_s

    def _use(self, keys: Sequence[int], at_ns: int) -> None:
        values: Any = self._value
        now = self._first = at_ns / SECOND_NS * math.log(2.0) / self.half_life_s
        known, exp, log1p = values.get, math.exp, math.log1p
        child_before = child = -math.inf
        for key in keys:
            before = known(key)
            if before is None:
                value = now
            else:
                gap = before - now
                value = before + log1p(exp(-gap)) if gap > 0.0 else now + log1p(exp(gap))
                if value < child and before >= child_before:
                    value = child  # a rounding error must not put a parent below its child
                child_before = before
            child = value
            values[key] = value
