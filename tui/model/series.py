"""Values over the target's time: sums per second, gauges per second, and latencies of the last minute.

Law of this file: a second without a sample is ``None`` and is drawn as a blank, never as a zero. Every series keeps a
fixed number of seconds.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from kvbm_console.analysis.nearest_rank import nearest_rank

from .numbers import S

KEPT_S: Final = 600
"""Ten minutes, the longest trend on any screen."""
WINDOW_S: Final = 60
"""The window of rates, hit rates and percentiles."""
SAMPLES_MAX: Final = 1_024
"""Latencies kept for one route; enough for a p99, and 100 routes would still be small."""
WINDOWS_S: Final = (60, 120, 300, 600)
"""Windows of the long charts. A chart has the shortest window that holds all known values, so a young run is not mostly
blank."""


class Seconds:
    """Values of the last KEPT_S seconds of the target's time; None for a second that was not seen."""

    __slots__ = ("_values", "second")

    def __init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=KEPT_S)
        self.second: int | None = None
        """The second of the newest value; None before the first."""

    def blank(self, at_ns: int) -> None:
        """Leave the seconds up to ``at_ns`` blank, because they lie in a gap."""
        second = at_ns // S
        if self.second is not None and second > self.second:
            self._values.extend([None] * min(second - self.second, KEPT_S))
            self.second = second

    def _newest(self, seconds: int) -> list[float | None]:
        known = [*islice(reversed(self._values), seconds)]
        known.reverse()
        return [None] * (seconds - len(known)) + known


class Sums(Seconds):
    """Amounts per second; a second that passed without an amount is 0."""

    __slots__ = ()

    def advance(self, at_ns: int) -> None:
        """Time has come to ``at_ns``: seconds passed without an amount become zeros."""
        second = at_ns // S
        if self.second is None:
            self.second = second
            self._values.append(0.0)
            return
        missing = second - self.second
        if missing <= 0:
            return
        self._values.extend([0.0] * min(missing, KEPT_S))
        self.second = second

    def add(self, at_ns: int, amount: float) -> None:
        """Count ``amount`` into its second, unless that is no longer kept."""
        self.advance(at_ns)
        assert self.second is not None
        back = self.second - at_ns // S
        if back < len(self._values):
            self._values[-1 - back] = (self._values[-1 - back] or 0.0) + amount

    def last(self, seconds: int, now_ns: int) -> list[float | None]:
        """The values of the last ``seconds``, oldest first, the running second last."""
        if self.second is None:
            return [None] * seconds
        late = min(seconds, max(0, now_ns // S - self.second))
        return self._newest(seconds - late) + [0.0] * late

    def total(self, seconds: int, now_ns: int) -> float:
        """Sum over the last ``seconds``."""
        return sum(filter(None, self.last(seconds, now_ns)))

    def rate(self, now_ns: int, seconds: int = 5) -> float | None:
        """Amount per second over the last whole ``seconds`` that are known; None when there is none."""
        values = [value for value in self.last(seconds + 1, now_ns)[:-1] if value is not None]
        if not values:
            values = [value for value in self.last(1, now_ns) if value is not None]
        return sum(values) / len(values) if values else None


class Estimate(Sums):
    """Amounts of which only a sample may be seen; ``settle`` scales up the amounts since the call before."""

    __slots__ = ("_fresh",)

    def __init__(self) -> None:
        super().__init__()
        self._fresh = 0.0

    def add(self, at_ns: int, amount: float) -> None:
        """Count ``amount`` into its second."""
        super().add(at_ns, amount)
        self._fresh += amount

    def settle(self, at_ns: int = 0, each: float = 1.0) -> None:
        """Scale up the amounts since the last call: they stood for ``each`` times as much."""
        if each > 1.0 and self._fresh:
            super().add(at_ns, self._fresh * (each - 1.0))
        self._fresh = 0.0


class Gauge(Seconds):
    """A level, sampled at most once a second; a second without a sample keeps the level before it."""

    __slots__ = ()

    def set(self, at_ns: int, level: float | None) -> None:
        """The level at ``at_ns``."""
        second = at_ns // S
        if self.second is None or not self._values:
            self._values.append(level)
        elif second > self.second:
            self._values.extend([self._values[-1]] * min(second - self.second - 1, KEPT_S))
            self._values.append(level)
        else:
            self._values[-1] = level
            return
        self.second = second

    def last(self, seconds: int) -> list[float | None]:
        """The levels of the last ``seconds``, oldest first."""
        return self._newest(seconds)


class Latencies:
    """Latencies of transfers that ended within the last minute, bounded and sorted for percentiles."""

    __slots__ = ("_ordered", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()
        self._ordered: list[int] = []

    def add(self, ended_ns: int, took_ns: int) -> None:
        """Add the latency of a transfer that ended."""
        if len(self._samples) >= SAMPLES_MAX:
            self._forget()
        self._samples.append((ended_ns, took_ns))
        insort(self._ordered, took_ns)

    def _forget(self) -> None:
        _, took = self._samples.popleft()
        del self._ordered[bisect_left(self._ordered, took)]

    def window(self, now_ns: int) -> list[int]:
        """The times of the last minute, sorted; to be read before the next call only."""
        edge = now_ns - WINDOW_S * S
        samples = self._samples
        while samples and samples[0][0] < edge:
            self._forget()
        return self._ordered


def percentile(ordered: list[int], percent: int) -> int | None:
    """The smallest of the sorted values that ``percent`` of them do not exceed; None without values."""
    return nearest_rank(ordered, percent) if ordered else None


def resample(values: Sequence[float | None], cells: int, *, mean: bool = True) -> list[float | None]:
    """Fit values into ``cells``: the mean (or the maximum) of the known values of each cell, None for a cell without
    values."""
    return list(_resampled(tuple(values), cells, mean)) if cells > 0 else []


@lru_cache(maxsize=256)
def _resampled(values: tuple[float | None, ...], cells: int, mean: bool) -> tuple[float | None, ...]:
    """Values of each cell; cached because most trends are equal on the next frame."""
    parts: list[Sequence[Any]] = [values[stretch] for stretch in _stretches(len(values), cells)]
    if None in values:
        parts = [[value for value in part if value is not None] for part in parts]
    return tuple([(sum(part) / len(part) if mean else max(part)) if part else None for part in parts])


@lru_cache(maxsize=64)
def _stretches(size: int, cells: int) -> list[slice]:
    """The values of each cell."""
    return [
        slice(cell * size // cells, max(cell * size // cells + 1, (cell + 1) * size // cells)) for cell in range(cells)
    ]


def from_left(values: Sequence[float | None], known: int, cells: int) -> list[float | None]:
    """The cells of a chart whose last ``known`` values are not older than the run: fewer than ``cells`` until it fills.

    >>> from_left([None, None, 1.0, 2.0], 2, 4), from_left([0.0, 0.0, 1.0, 2.0], 9, 4)
    ([1.0, 2.0], [0.0, 0.0, 1.0, 2.0])
    """
    before = max(0, len(values) - known)
    shown = -(-(len(values) - before) * cells // max(1, len(values)))
    return resample([*values[before:], *[None] * before], cells)[:shown]


def window_of(known: int) -> int:
    """The window of a long chart of a run that is known for so many seconds."""
    return next((seconds for seconds in WINDOWS_S if known <= seconds), WINDOWS_S[-1])


def window_text(seconds: int) -> str:
    """``60 s`` or ``10 min``."""
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"


class Density:
    """Events over the whole run in a fixed number of buckets that double in width when the run outgrows them."""

    BUCKETS: Final = 240
    """More than the widest minimap has cells, halved at most once per doubling of the run."""

    __slots__ = ("counts", "start_ns", "width_ns")

    def __init__(self) -> None:
        self.start_ns: int | None = None
        self.width_ns = S // 4
        self.counts: list[int] = []

    def add(self, at_ns: int, amount: int) -> None:
        """``amount`` events happened at ``at_ns``."""
        if self.start_ns is None:
            self.start_ns = at_ns
        index = max(0, at_ns - self.start_ns) // self.width_ns
        while index >= self.BUCKETS:
            self.counts = [sum(self.counts[i : i + 2]) for i in range(0, len(self.counts), 2)]
            self.width_ns *= 2
            index = max(0, at_ns - self.start_ns) // self.width_ns
        if index >= len(self.counts):
            self.counts.extend([0] * (index + 1 - len(self.counts)))
        self.counts[index] += amount
