"""Shadow caches: small caches over a sample of the blocks that only count their hits.

Law of this file: each shadow ranks as its full-sized namesake does, which a test compares. No key is protected, and a
shadow evicts as soon as a batch of touches has made it too large. Stamps do not depend on residence, so all shadows
read one column of them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final, Protocol

from kvbm_console.core.eviction.ranked import SECOND_NS, packed, unpacked

Batch = list[tuple[Sequence[int], Sequence[int], int]]
"""Touches as (keys of one prefix deepest first, their stamps, time). The column of stamps may be ahead of them."""
_EXPONENT_MAX: Final = 500.0
"""Half-lives until the sums of ``LrfuShadow`` are referred to another time; a float has room for 1,023."""
Entry = tuple[float, int, int]
"""(rank, stamp, key) at the time when it entered the heap."""
_HEAP_SLACK: Final = 1_000
"""Dead heap entries that are carried before the heap is built anew, beside two per resident key."""
_UNKNOWN: Final = -1
"""The stamp of an entry that is put back when it comes to the top, as if its block had been touched since."""


class Shadow(Protocol):
    """A cache that counts."""

    def use(self, batch: Batch) -> int:
        """Look up and insert the blocks of several touches; returns the hits."""
        ...

    def forget(self, key: int) -> None:
        """Forget this key, which the policy has forgotten."""
        ...

    def export(self) -> Any:
        """Plain values in canonical order."""
        ...

    def restore(self, exported: Any) -> None:
        """Become what was exported, over the same stamps."""
        ...


class RecencyShadow:
    """``simple_lru``."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def use(self, batch: Batch) -> int:
        """See ``Shadow.use``."""
        order, hits = self._order, 0
        for keys, _, _ in batch:
            for key in keys:
                if key in order:
                    hits += 1
                    order.move_to_end(key)
                else:
                    order[key] = None
        while len(order) > self.capacity:
            order.popitem(last=False)
        return hits

    def forget(self, key: int) -> None:
        """See ``Shadow.forget``."""
        self._order.pop(key, None)

    def export(self) -> Any:
        """The keys, coldest first."""
        return list(self._order)

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self._order = OrderedDict.fromkeys(exported)


class _Heap:
    """Resident keys with the queue and the lazy heap of ``ranked``: ranks only grow while a key is resident."""

    def __init__(self, capacity: int, stamps: Mapping[int, int]) -> None:
        self.capacity = capacity
        self._stamps = stamps
        self._value: dict[int, float] = {}
        self._resident: dict[int, int] = {}
        """Key to the stamp of its one live entry; an entry with an older stamp than the column's is put back."""
        self._heap: list[Entry] = []
        self._fresh: deque[Entry] = deque()

    def rank(self, key: int) -> float:
        """Of a resident key."""
        return self._value[key]

    def forget(self, key: int) -> None:
        """See ``Shadow.forget``."""
        self._resident.pop(key, None)
        self._value.pop(key, None)
        # The entry of a popular key has a high rank, so it would never come to the top of the heap.
        if len(self._heap) + len(self._fresh) > 3 * len(self._resident) + _HEAP_SLACK:
            self._rebuild()

    def _shrink(self, gone: Callable[[int], Any] | None = None) -> None:
        """Evict down to the capacity; ``gone`` is told the victims."""
        excess = len(self._resident) - self.capacity
        if excess <= 0:
            return
        resident, stamps, heap, fresh = self._resident, self._stamps, self._heap, self._fresh
        live, oldest, rank = resident.get, fresh.popleft, self.rank
        while excess > 0:
            _, stamp, key = oldest() if fresh and (not heap or fresh[0] < heap[0]) else heappop(heap)
            if live(key) != stamp:
                continue
            latest = stamps[key]
            if latest == stamp:
                del resident[key]
                if gone is not None:
                    gone(key)
                excess -= 1
            else:
                resident[key] = latest
                heappush(heap, (rank(key), latest, key))

    def _rebuild(self) -> None:
        self._resident = dict.fromkeys(self._resident, _UNKNOWN)
        self._heap = [(self.rank(key), _UNKNOWN, key) for key in self._resident]
        heapify(self._heap)
        self._fresh.clear()

    def export(self) -> Any:
        """Two columns, keys and their values, and which keys are resident."""
        keys = sorted(self._value)
        return [[packed(keys), list(map(self._value.__getitem__, keys))], packed(sorted(self._resident))]

    def restore(self, exported: Any) -> None:
        """Become what was exported, over the same stamps."""
        values, resident = exported
        if isinstance(resident, bytes):
            values, resident = zip(unpacked(values[0]), values[1], strict=True), unpacked(resident)
        self._value = dict(values)  # older recordings have a row for each key
        self._resident = dict.fromkeys(resident, _UNKNOWN)
        self._rebuild()


class LrfuShadow(_Heap):
    """``lrfu`` with one half-life. A value is the plain sum, referred to ``_base`` half-lives after time 0."""

    def __init__(self, capacity: int, stamps: Mapping[int, int], half_life_s: float) -> None:
        super().__init__(capacity, stamps)
        self.half_life_s = half_life_s
        self._base = 0.0

    def use(self, batch: Batch) -> int:
        """See ``Shadow.use``."""
        resident, heap, fresh = self._resident, self._heap, self._fresh
        values, hits, scale = self._value, 0, SECOND_NS * self.half_life_s
        known = values.get
        for keys, stamps, at_ns in batch:
            exponent = at_ns / scale - self._base
            if exponent > _EXPONENT_MAX:
                self._refer(exponent)
                values, resident, heap, known = self._value, self._resident, self._heap, self._value.get
                exponent = 0.0
            weight = 2.0**exponent
            for key, stamp in zip(keys, stamps, strict=True):
                before = known(key)
                if key in resident:
                    hits += 1
                    values[key] = (before or 0.0) + weight
                    continue
                resident[key] = stamp
                if before is None:
                    values[key] = weight
                    fresh.append((weight, stamp, key))
                else:
                    value = values[key] = before + weight
                    heappush(heap, (value, stamp, key))
        self._shrink()
        return hits

    def _refer(self, exponent: float) -> None:
        """Refer the sums to a time so many half-lives later; a sum too old to count becomes 0, and stamps decide."""
        self._base += exponent
        factor = 2.0**-exponent
        self._value = {key: value * factor for key, value in self._value.items()}
        self._rebuild()

    def export(self) -> Any:
        """As all, with the reference."""
        return [*super().export(), self._base]

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        super().restore(exported[:2])
        self._base = exported[2]


class AdaptiveShadow(_Heap):
    """``recency`` x last touch in seconds - ``handicap`` / (uses while resident + 1): ``adaptive_lru``, ``lfu``."""

    def __init__(self, capacity: int, stamps: Mapping[int, int], recency: float, handicap: float) -> None:
        super().__init__(capacity, stamps)
        self.recency = recency / SECOND_NS
        self.handicap = handicap

    def rank(self, key: int) -> float:
        """Of a resident key."""
        return self.recency * self._stamps[key] - self.handicap / (self._value[key] + 1)

    def use(self, batch: Batch) -> int:
        """See ``Shadow.use``."""
        resident, fresh, uses = self._resident, self._fresh, self._value
        recency, entering, hits = self.recency, self.handicap / 2, 0
        for keys, stamps, _ in batch:
            for key, stamp in zip(keys, stamps, strict=True):
                if key in resident:
                    hits += 1
                    uses[key] += 1
                else:
                    uses[key] = 1
                    resident[key] = stamp
                    fresh.append((recency * stamp - entering, stamp, key))
        self._shrink(uses.pop)
        return hits
