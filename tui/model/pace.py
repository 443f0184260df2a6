"""How much of the events the console can afford: every one folded into the facts, or facts sampled from snapshots.

Folding costs some microseconds an event. A console that took a whole core of the machine that it watches would change
what it shows, so above a share of a core it goes over to *sampling*: the facts come as snapshots, several a second, and
of events only what history needs is taken (moves, holds, copies). That has a share of its own: behind each snapshot
events are looked at until it is used up, and those that come then are passed over until the next one.

Law of this file: plain arithmetic on what was measured; the facts are never mixed, either all events were folded or a
snapshot took their place.
"""

from typing import Final

SECOND_NS: Final = 1_000_000_000
WINDOW_NS: Final = SECOND_NS // 2
"""Over this time the share is measured: shorter than an eye waits, longer than a burst after a pause."""
SHARE_MAX: Final = 0.12
"""Share of a core above which facts are sampled: drawing takes as much again, both together less than a quarter."""
SHARE_BACK: Final = 0.07
"""Share that folding every event may cost at the present rate before sampling ends; well below, or it would flap."""
RATE_MIN: Final = 5_000
"""Events a second below which every one is folded: batches are then so small that sampling would save nothing, and a
crowded machine makes everything look dear."""
REFRESH_NS: Final = SECOND_NS // 4
"""Facts are at most about this old while they are sampled."""
LOOK_SHARE: Final = 1 / 30
"""Share of a core for looking at events while facts are sampled."""
SNAPSHOT_FACTOR: Final = 120
"""A snapshot that took t to take over is followed by this many times t without one: with large pools facts come less
often. Before that its bytes were read and decoded, for about three times t: all of it is a thirtieth of a core."""
URGENT_NS: Final = SECOND_NS // 16
"""So soon behind a snapshot another one may be asked for, because somebody is held or let go."""
URGENT_FACTOR: Final = 30


class Pace:
    """The decision, from what work took. Times are ns: ``cpu_ns`` of this thread, ``mono_ns`` of the local clock."""

    __slots__ = ("_began", "_cost_ns", "_cpu", "_events", "_left_ns", "_next", "_snapshot_mono", "_soon", "sampling")

    def __init__(self) -> None:
        self.sampling = False
        self._began: int | None = None
        self._cpu = 0
        self._events = 0
        self._cost_ns = 0.0
        """What one event cost when it was folded."""
        self._next = self._soon = 0
        self._snapshot_mono: int | None = None
        self._left_ns = LOOK_SHARE * REFRESH_NS

    @property
    def affords(self) -> bool:
        """Whether there is time left to look at events before the next snapshot."""
        return self._left_ns > 0

    def worked(self, events: int, cpu_ns: int, mono_ns: int) -> None:
        """So many events were taken, and it cost so much."""
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
        self.sampling = self.sampling and self._events * SECOND_NS >= RATE_MIN * passed
        self._began, self._cpu, self._events = mono_ns, 0, 0

    def snapshot(self, cpu_ns: int, mono_ns: int) -> None:
        """A snapshot was taken, and it cost so much."""
        since = mono_ns - self._snapshot_mono if self._snapshot_mono is not None else REFRESH_NS
        self._snapshot_mono = mono_ns
        self._left_ns = LOOK_SHARE * min(since, SECOND_NS)
        self._next = mono_ns + max(REFRESH_NS, SNAPSHOT_FACTOR * cpu_ns)
        self._soon = mono_ns + max(URGENT_NS, URGENT_FACTOR * cpu_ns)

    def due(self, mono_ns: int, *, urgent: bool = False) -> bool:
        """Whether to ask for a snapshot now; the next one is due when this one has come, or a second later."""
        if mono_ns < (self._soon if urgent else self._next):
            return False
        self._next = self._soon = mono_ns + SECOND_NS
        return True
