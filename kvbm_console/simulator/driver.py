"""The driver: lets virtual time follow the wall's, at a speed, or run as fast as it can.

Law of this file: speed only decides how long to sleep. The rig alone moves virtual time, so the events are the same at
1, at 10 and at max. The event loop never waits for more than a slice.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import anyio.lowlevel

from kvbm_console.core.config import SECOND_NS, require
from kvbm_console.simulator.embedded import Rig

SLICE_NS: Final = 2_000_000
"""Wall time of one slice: the longest wait of a subscriber or a debugger, well below a frame of the console."""
TURNS_MAX: Final = 64
"""Turns that the loop takes between two slices at most, while clients keep it busy."""
IDLE_TURNS: Final = 16
"""While clients keep the loop busy, at most this many idle turns end a pause. The RPC library's own thread delivers the
next event some tens of microseconds after the last. An idle turn costs 8 to 20 us."""
IDLE_PER_BUSY: Final = 2
"""Idle turns for each turn with work. A few events in each slice are no crowd: 16 idle turns for them cost 6 %."""
BUSY_FACTOR: Final = 3
"""A turn that takes so many times the shortest turn had something to do."""
LAG_NS_MAX: Final = SECOND_NS
"""When virtual time is further behind than this (a suspended laptop), the lag is forgotten instead of caught up."""
SPEED_MAX: Final = 1_000_000.0


class Pacer:
    """Virtual time as a function of the wall's: ``speed`` virtual seconds a second from the last anchor on."""

    def __init__(self, speed: float, monotonic_ns: Callable[[], int], at_ns: int) -> None:
        require(0.0 < speed <= SPEED_MAX, "speed", f"above 0 and at most {SPEED_MAX:.0f}, or max", speed)
        self.speed = speed
        self._monotonic_ns = monotonic_ns
        self.anchor(at_ns)

    def anchor(self, at_ns: int) -> None:
        """The virtual time ``at_ns`` is now."""
        self._at_ns = at_ns
        self._wall_ns = self._monotonic_ns()

    def __call__(self) -> int:
        """The virtual time that it should be now."""
        return self._at_ns + round((self._monotonic_ns() - self._wall_ns) * self.speed)


class Turns:
    """Gives the event loop the turns that it needs between two slices.

    The RPC library wakes the loop once for each of its events, and the loop handles one such wake-up a turn. A single
    turn between slices of 2 ms handles 500 RPC events a second, whatever the number of clients. The verbs of a debugger
    would then wait for seconds behind other answers. So turns go on until a turn finds nothing to do.
    """

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self._idle_ns = [SLICE_NS, SLICE_NS]
        """The shortest first turn behind a slice, and the shortest of the others. Behind a slice the loop's code is no
        longer in the caches: an idle first turn takes 16 to 35 us, and a later one 5 us."""
        self._wanted = 1
        """Idle turns that end the next pause."""

    async def take(self) -> None:
        """Let the loop run until it is idle, at most ``TURNS_MAX`` turns. Without clients that is one turn."""
        wanted, idle, busy = self._wanted, 0, 0
        self._wanted = 1
        before_ns = self._monotonic_ns()
        for turn in range(TURNS_MAX):
            await anyio.lowlevel.checkpoint()
            now_ns = self._monotonic_ns()
            took_ns, before_ns = now_ns - before_ns, now_ns
            kind = turn > 0
            self._idle_ns[kind] = min(self._idle_ns[kind], max(took_ns, 1))
            if took_ns <= BUSY_FACTOR * self._idle_ns[kind]:
                idle += 1
                if idle >= wanted:
                    return
            else:
                idle, busy = 0, busy + 1
                wanted = min(IDLE_TURNS, wanted + IDLE_PER_BUSY)
                self._wanted = min(IDLE_TURNS, 1 + IDLE_PER_BUSY * busy)


async def drive(
    rig: Rig, *, speed: float | None = 1.0, until_ns: int | None = None,
    changed: Callable[[], Awaitable[None]] | None = None, flush: Callable[[], None] | None = None,
    monotonic_ns: Callable[[], int] = time.monotonic_ns,
) -> None:
    """Run the rig until every request has ended or ``until_ns`` of virtual time has passed.

    ``speed`` None means as fast as possible. ``changed`` wakes the driver when another caller submitted a stimulus, for
    example a reset. Without it, the call returns when all requests of the rig are held. ``flush`` is called behind each
    slice.
    """
    pacer = None if speed is None else Pacer(speed, monotonic_ns, rig.now_ns)
    turns = Turns(monotonic_ns)
    while not rig.done:
        horizon_ns = until_ns
        if pacer is not None:
            if rig.next_ns is not None and pacer() - rig.next_ns > LAG_NS_MAX * pacer.speed:
                pacer.anchor(rig.next_ns)
            horizon_ns = pacer() if until_ns is None else min(until_ns, pacer())
        rig.run(horizon_ns, SLICE_NS)
        if flush is not None:
            flush()
        if rig.ranks is not None and rig.waits_for_bytes:
            await rig.ranks.moved()
            continue
        coming_ns = rig.next_ns
        if rig.done or (until_ns is not None and coming_ns is not None and coming_ns > until_ns):
            return
        if coming_ns is None:
            if changed is None:
                return
            if not rig.touched:
                await changed()
            if pacer is not None:
                pacer.anchor(rig.now_ns)
        elif pacer is None or coming_ns <= pacer():
            await turns.take()
        else:
            await _sleep_until(rig, pacer, coming_ns, changed)


async def _sleep_until(rig: Rig, pacer: Pacer, at_ns: int, changed: Callable[[], Awaitable[None]] | None) -> None:
    """Sleep until the wall has come to ``at_ns``, or something happened outside; stamps follow the wall meanwhile."""
    seconds = max(0.0, (at_ns - pacer()) / pacer.speed / SECOND_NS)  # the moment may have passed since it was asked for
    rig.calendar.pace = pacer
    try:
        if changed is None:
            await anyio.sleep(seconds)
        elif rig.touched:
            await anyio.lowlevel.checkpoint()
        else:
            with anyio.move_on_after(seconds):
                await changed()
    finally:
        rig.calendar.pace = None
