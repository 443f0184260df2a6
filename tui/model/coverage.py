"""Which events this console has: read, passed over because of their rate, or lost on the way.

Folding costs some microseconds an event. A console that took a whole core of the machine under observation would
change the behaviour that it shows. Above a share of a core it therefore *samples*: the facts come as snapshots,
several a second. Behind each snapshot the console reads events until a share of its time is used up. It *passes over*
the rest up to the next snapshot: it counts them from the heads of their batches and decodes none. History has no holes
but these stretches, and each of them ends with facts.

Example: at 100,000 events a second, folding all of them would take 40 % of a core. ``SamplingPace`` turns sampling on,
a snapshot arrives every 250 ms, and the console reads events for 8 ms behind it. ``Coverage.one_in`` then returns 12,
because 1 in 12 events was read.

Law of this file: a stretch without events is shown with its numbers and times, and nothing is made up for it.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from .numbers import S

STRETCHES_MAX: Final = 4_096
"""Stretches remembered for log and timeline: some minutes of a flood."""
RECENT: Final = 8
"""Snapshots over which the share of read events is taken: about two seconds."""
WINDOW_NS: Final = S // 2
"""Over this time the share is measured: shorter than an eye waits, longer than a burst after a pause."""
SHARE_MAX: Final = 0.12
"""Share of a core above which facts are sampled: drawing takes as much again, both together less than a quarter."""
SHARE_BACK: Final = 0.07
"""Share that folding every event may cost at the present rate before sampling ends; well below, or it would flap."""
RATE_MIN: Final = 5_000
"""Events a second below which the console folds all of them. Batches are then so small that sampling would save
nothing, and every event looks expensive on a crowded machine."""
REFRESH_NS: Final = S // 4
"""Facts are at most about this old while they are sampled."""
LOOK_SHARE: Final = 1 / 30
"""Share of a core for looking at events while facts are sampled."""
SNAPSHOT_FACTOR: Final = 120
"""After a snapshot that took t to fold, the console waits this many times t, so facts of large pools come less often.
Before that its bytes were read and decoded, for about three times t: all of it is a thirtieth of a core."""
URGENT_NS: Final = S // 16
"""Least time between two snapshots when a slot is held or released."""
URGENT_FACTOR: Final = 30


class SeenGap(msgspec.Struct):
    """Events that were not delivered: from the last applied event before to the snapshot after."""

    first: int
    last: int
    reason: str
    start_ns: int
    end_ns: int | None
    """None until the snapshot came."""
    seen_mono_ns: int

    @property
    def count(self) -> int:
        """The number of lost events."""
        return self.last - self.first + 1


class Stretch(msgspec.Struct):
    """Events ``first`` to ``last``, from ``start_ns`` to ``end_ns`` of the target's time, were passed over."""

    first: int
    last: int
    start_ns: int
    end_ns: int

    @property
    def count(self) -> int:
        """The number of events."""
        return self.last - self.first + 1


class Coverage:
    """``passing`` is true from the first event that is passed over to the next snapshot."""

    def __init__(self) -> None:
        self.stretches: deque[Stretch] = deque(maxlen=STRETCHES_MAX)
        self.passing = False
        self.passed = 0
        """Events that were passed over so far."""
        self.looked = 0
        """Events that were looked at so far."""
        self._taken = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)

    def took(self, events: int) -> None:
        """Count events that were read."""
        self._taken += events
        self.looked += events

    def passed_over(self, first: int, count: int, seen_ns: int, end_ns: int) -> None:
        """Note ``count`` events from ``first`` on that were not read; history is known up to ``seen_ns``."""
        self.passed += count
        if self.passing:
            stretch = self.stretches[-1]
            stretch.last, stretch.end_ns = first + count - 1, end_ns
        else:
            self.passing = True
            self.stretches.append(Stretch(first, first + count - 1, seen_ns, end_ns))

    def snapshot(self, end_ns: int) -> float:
        """End a stretch with new facts. Returns the number of events for each event that was read since the facts
        before."""
        passed = 0
        if self.passing:
            stretch = self.stretches[-1]
            stretch.end_ns, passed = max(stretch.end_ns, end_ns), stretch.count
        taken = self._taken
        self._recent.append((taken, passed))
        self.passing, self._taken = False, 0
        return (taken + passed) / taken if taken else 1.0

    def between(self, start_ns: int, end_ns: int) -> Iterator[Stretch]:
        """The stretches of a time, newest first."""
        for stretch in reversed(self.stretches):
            if stretch.end_ns < start_ns:
                return
            if stretch.start_ns < end_ns:
                yield stretch

    def before(self, seq: int | None, most: int) -> list[Stretch]:
        """The last ``most`` stretches up to an event, or up to now."""
        known = (stretch for stretch in reversed(self.stretches) if seq is None or stretch.last <= seq)
        return list(islice(known, most))

    def one_in(self) -> int | None:
        """The number of events for each event that was read lately; None when all were read."""
        taken, passed = (sum(column) for column in zip(*self._recent, strict=True)) if self._recent else (0, 0)
        if self.passing:
            taken, passed = taken + self._taken, passed + self.stretches[-1].count
        return None if not passed else max(2, round((taken + passed) / max(1, taken)))


class SamplingPace:
    """Decides when to sample. Times are ns: ``cpu_ns`` of this thread, ``mono_ns`` of the local clock."""

    __slots__ = ("_began", "_cost_ns", "_cpu", "_events", "_left_ns", "_next", "_snapshot_mono", "_soon", "sampling")

    def __init__(self) -> None:
        self.sampling = False
        self._began: int | None = None
        self._cpu = 0
        self._events = 0
        self._cost_ns = 0.0
        """The cost of one folded event."""
        self._next = self._soon = 0
        self._snapshot_mono: int | None = None
        self._left_ns = LOOK_SHARE * REFRESH_NS

    @property
    def affords(self) -> bool:
        """True if there is time left to look at events before the next snapshot."""
        return self._left_ns > 0

    def worked(self, events: int, cpu_ns: int, mono_ns: int) -> None:
        """Count events that were taken, and the time that they cost."""
        if self._began is None:
            self._began = mono_ns
        if self.sampling:
            self._left_ns -= cpu_ns
        self._cpu += cpu_ns
        self._events += events
        passed = mono_ns - self._began
        if passed < WINDOW_NS:
            return
        if not self.sampling:
            if self._events:
                self._cost_ns = self._cpu / self._events
            self.sampling = self._cpu > SHARE_MAX * passed
        else:
            self.sampling = self._cost_ns * self._events > SHARE_BACK * passed
        self.sampling = self.sampling and self._events * S >= RATE_MIN * passed
        self._began, self._cpu, self._events = mono_ns, 0, 0

    def snapshot(self, cpu_ns: int, mono_ns: int) -> None:
        """Count a snapshot and the time that it cost."""
        since = mono_ns - self._snapshot_mono if self._snapshot_mono is not None else REFRESH_NS
        self._snapshot_mono = mono_ns
        self._left_ns = min(0.0, self._left_ns) + LOOK_SHARE * min(since, S)
        self._next = mono_ns + max(REFRESH_NS, SNAPSHOT_FACTOR * cpu_ns)
        self._soon = mono_ns + max(URGENT_NS, URGENT_FACTOR * cpu_ns)

    def due(self, mono_ns: int, *, urgent: bool = False) -> bool:
        """True to ask for a snapshot now; the next snapshot is due when this snapshot has come, or a second later."""
        if mono_ns < (self._soon if urgent else self._next):
            return False
        self._next = self._soon = mono_ns + S
        return True
