"""What a daemon watches about itself: the cost of conditions, a loop that stands still, a wall clock that jumps.

Law of this file: clocks are handed in, and what is found becomes a stimulus; nothing here changes facts or waits.
"""

from collections.abc import Callable
from typing import Final

from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import BreakpointOverran, Noted
from kvbm_console.dispatch import Dispatcher

WINDOW_NS: Final = 1_000_000_000
"""How long the cost of a breakpoint is summed up."""
CONDITION_SHARE_MAX: Final = 0.05
"""Of the daemon's time, for the condition of one breakpoint; the observer shall not cost what it observes."""
BLOCKED_NS: Final = 500_000_000
"""A loop that is later than this was kept by somebody: heartbeats and leases are late as well."""
STEP_NS: Final = 1_000_000_000
"""A wall clock that moves this much against the monotonic one was set; less is drift and smearing."""


class Watch:
    """``look`` is called about ten times a second. ``monotonic`` and ``wall`` tell nanoseconds."""

    def __init__(self, dispatcher: Dispatcher, monotonic: Callable[[], int], wall: Callable[[], int]) -> None:
        self._dispatcher = dispatcher
        self._monotonic = monotonic
        self._wall = wall
        self._offset_ns = wall() - monotonic()
        self._window_ns = monotonic()
        self._due_ns: int | None = None

    def look(self, every_ns: int) -> None:
        """Look once; the next time is due in ``every_ns``."""
        now_ns = self._monotonic()
        self._look_at_the_loop(now_ns)
        self._look_at_the_wall(now_ns)
        self._look_at_conditions(now_ns)
        self._due_ns = self._monotonic() + every_ns

    def _look_at_the_loop(self, now_ns: int) -> None:
        late_ns = 0 if self._due_ns is None else now_ns - self._due_ns
        if late_ns >= BLOCKED_NS:
            self._dispatcher.submit(Noted, Note.LOOP_BLOCKED, f"the event loop stood still for {late_ns / 1e9:.1f} s")

    def _look_at_the_wall(self, now_ns: int) -> None:
        offset_ns = self._wall() - now_ns
        stepped_ns, self._offset_ns = offset_ns - self._offset_ns, offset_ns
        if abs(stepped_ns) >= STEP_NS:
            self._dispatcher.submit(Noted, Note.CLOCK_STEPPED, f"the wall clock was set by {stepped_ns / 1e9:+.1f} s")

    def _look_at_conditions(self, now_ns: int) -> None:
        leader = self._dispatcher.leader
        if leader.meter is None:  # also after a recovery: that is another leader
            leader.meter = self._monotonic
            leader.rearm()
        if now_ns - self._window_ns < WINDOW_NS:
            return
        span_ns, self._window_ns = now_ns - self._window_ns, now_ns
        costs = dict(leader.condition_ns)
        leader.condition_ns.clear()
        for number, spent_ns in sorted(costs.items()):
            if spent_ns > CONDITION_SHARE_MAX * span_ns:
                self._dispatcher.submit(
                    BreakpointOverran, number,
                    f"its condition took {spent_ns / 1e6:.0f} ms of the last {span_ns / 1e6:.0f} ms, "
                    f"at most {CONDITION_SHARE_MAX:.0%} are allowed",
                )
