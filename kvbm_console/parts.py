"""The health of a daemon: its tasks and threads, its loop, its clock, and the cost of breakpoints' conditions.

Law of this file: the end of a part is an event and a warning, whatever the reason. A part whose state survives its end
is restarted, three times at once and then once a minute. Clocks are handed in, and a finding becomes a stimulus.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

import msgspec

from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import BreakpointOverran, NoteReported
from kvbm_console.dispatch import Dispatcher

RESTARTS_AT_ONCE: Final = 3
"""Immediate restarts within ``RESTART_PAUSE_NS``; later restarts wait."""
RESTART_PAUSE_NS: Final = 60_000_000_000
"""A part that fails at each start costs little then."""
WARNED_NS: Final = 300_000_000_000
"""A part that was restarted is among the warnings for five minutes."""
REASON_MAX: Final = 200
"""Characters of a reason in a report."""
log = logging.getLogger("kvbm_console.server")


class DaemonPart(msgspec.Struct):
    """One part. ``why`` is the reason of its end while it is not healthy."""

    name: str
    why: str | None = None
    last_why: str = ""
    runs: bool = False
    """True if it ran all the same when it last was not healthy."""
    ended: int = 0
    """The number of its ends."""
    restarted: int = 0
    last_ns: int = 0
    """Time of its last end, on the monotonic clock."""
    at_once: list[int] = []
    """Times of its recent restarts."""


class Parts:
    """All parts of a daemon. ``submit`` is the dispatcher's."""

    def __init__(self, submit: Callable[..., object], monotonic: Callable[[], int] = time.monotonic_ns) -> None:
        self._submit = submit
        self._monotonic = monotonic
        self._parts: dict[str, DaemonPart] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called when a part ended or is healthy again."""

    def rows(self) -> list[dict[str, Any]]:
        """Every part, for the status document."""
        return [
            {"part": each.name, "healthy": each.why is None, "ended": each.ended, "restarted": each.restarted,
             "why": each.why or each.last_why}
            for each in self._parts.values()
        ]

    def warnings(self) -> list[str]:
        """A sentence for each part that is not healthy, or was not a short time ago."""
        now_ns = self._monotonic()
        return [
            f"{each.name}{'' if each.runs else ' ended'}: {each.why}" if each.why is not None
            else f"{each.name} runs as it should again: {each.last_why}" if each.runs
            else f"{each.name} ended and was restarted: {each.last_why}"
            for each in self._parts.values() if each.why is not None or (
                each.ended and now_ns - each.last_ns < WARNED_NS
            )
        ]

    def is_healthy(self, name: str) -> bool:
        """True if every part whose name begins like this runs."""
        return all(each.why is None for each in self._parts.values() if each.name.startswith(name))

    async def keep(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task of the daemon, again when it raises; returns when it returns."""
        part = self._of(name)
        while True:
            try:
                await run()
                return
            except Exception as error:  # a bug of ours: the daemon goes on, and says so
                log.exception("%s ended", name)
                self._end(part, f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._pause_ns(part) / 1e9)
            self._begin(part)

    def look(self, workers: Mapping[str, Any], restart: Callable[[str], None]) -> None:
        """Report the threads that ended, and restart them with ``restart(name)``.

        ``workers`` holds them by the names of their parts, each with ``ended``: the reason, None while it runs.
        """
        for name in [name for name in self._parts if name.startswith("recorder") and name not in workers]:
            del self._parts[name]  # that recorder was stopped
            self.on_change()
        for name, worker in workers.items():
            part = self._of(name)
            if worker.ended is None:
                continue
            if part.why is None:
                self._end(part, worker.ended)
            if not self._pause_ns(part):
                restart(name)
                self._begin(part)

    def known(self, names: Iterable[str]) -> None:
        """Parts that others restart."""
        for name in names:
            self._of(name)

    def ended(self, name: str, why: str) -> None:
        """A part that others restart has ended."""
        part = self._of(name)
        part.runs = False
        self._end(part, why)

    def troubled(self, name: str, why: str) -> None:
        """Such a part still runs, but not as it should."""
        part = self._of(name)
        part.runs = True
        self._end(part, why)

    def begun(self, name: str) -> None:
        """It runs again, as it should."""
        self._begin(self._of(name))

    def _of(self, name: str) -> DaemonPart:
        return self._parts.setdefault(name, DaemonPart(name))

    def _end(self, part: DaemonPart, why: str) -> None:
        part.why = part.last_why = why[:REASON_MAX]
        part.ended += 1
        part.last_ns = self._monotonic()
        self._submit(NoteReported, Note.PART_ENDED, f"{part.name}: {part.why}")
        self.on_change()

    def _begin(self, part: DaemonPart) -> None:
        part.why = None
        part.restarted += 1
        part.at_once = [*part.at_once[1 - RESTARTS_AT_ONCE :], self._monotonic()]
        self._submit(NoteReported, Note.PART_RESTARTED, part.name)
        self.on_change()

    def _pause_ns(self, part: DaemonPart) -> int:
        """Pause before the part's next restart."""
        if len(part.at_once) < RESTARTS_AT_ONCE:
            return 0
        return max(0, part.at_once[0] + RESTART_PAUSE_NS - self._monotonic())

# --- clocks and conditions ---


WINDOW_NS: Final = 1_000_000_000
"""Span over which the cost of a breakpoint is summed."""
CONDITION_SHARE_MAX: Final = 0.05
"""Share of the daemon's time for a breakpoint's condition, because an observer must cost less than its subject."""
BLOCKED_NS: Final = 500_000_000
"""A loop that is later than this was kept busy, and heartbeats and leases are late as well."""
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
            detail = f"the event loop stood still for {late_ns / 1e9:.1f} s"
            self._dispatcher.submit(NoteReported, Note.LOOP_BLOCKED, detail)

    def _look_at_the_wall(self, now_ns: int) -> None:
        offset_ns = self._wall() - now_ns
        stepped_ns, self._offset_ns = offset_ns - self._offset_ns, offset_ns
        if abs(stepped_ns) >= STEP_NS:
            detail = f"the wall clock was set by {stepped_ns / 1e9:+.1f} s"
            self._dispatcher.submit(NoteReported, Note.CLOCK_STEPPED, detail)

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
