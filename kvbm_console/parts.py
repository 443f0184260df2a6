"""The parts of a daemon: which tasks and threads it has, which of them ended, and what is done about that.

Law of this file: the end of a part is an event and a warning, whatever the reason; a part whose state survives its end
is restarted, three times at once and then once a minute.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

import msgspec

from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import Noted

RESTARTS_AT_ONCE: Final = 3
"""Restarts within ``RESTART_PAUSE_NS`` that follow the end at once."""
RESTART_PAUSE_NS: Final = 60_000_000_000
"""A part that fails at each start costs little then."""
WARNED_NS: Final = 300_000_000_000
"""A part that was restarted is among the warnings for five minutes."""
REASON_MAX: Final = 200
"""Characters of a reason that are told."""
log = logging.getLogger("kvbm_console.server")


class Restartable(Protocol):
    """A thread that somebody else runs (``recording.worker.Worker``)."""

    @property
    def ended(self) -> str | None:
        """Why it ended; None while it runs."""
        ...


class Part(msgspec.Struct):
    """One part. ``why`` is the reason of its end while it is not healthy."""

    name: str
    why: str | None = None
    last_why: str = ""
    ended: int = 0
    """How often it ended."""
    restarted: int = 0
    last_ns: int = 0
    """When it ended last, on the monotonic clock."""
    at_once: list[int] = []
    """When it was restarted lately."""


class Parts:
    """All parts of one daemon. ``submit`` is the dispatcher's."""

    def __init__(self, submit: Callable[..., object], monotonic: Callable[[], int] = time.monotonic_ns) -> None:
        self._submit = submit
        self._monotonic = monotonic
        self._parts: dict[str, Part] = {}
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
            f"{each.name} ended: {each.why}" if each.why is not None
            else f"{each.name} ended and was restarted: {each.last_why}"
            for each in self._parts.values() if each.why is not None or (
                each.ended and now_ns - each.last_ns < WARNED_NS
            )
        ]

    def is_healthy(self, name: str) -> bool:
        """Whether every part whose name begins like this runs."""
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

    def look(self, workers: Mapping[str, Restartable], restart: Callable[[str], None]) -> None:
        """Threads by the names of their parts: those that ended are told, and restarted by ``restart(name)``."""
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

    def _of(self, name: str) -> Part:
        return self._parts.setdefault(name, Part(name))

    def _end(self, part: Part, why: str) -> None:
        part.why = part.last_why = why[:REASON_MAX]
        part.ended += 1
        part.last_ns = self._monotonic()
        self._submit(Noted, Note.PART_ENDED, f"{part.name}: {part.why}")
        self.on_change()

    def _begin(self, part: Part) -> None:
        part.why = None
        part.restarted += 1
        part.at_once = [*part.at_once[1 - RESTARTS_AT_ONCE :], self._monotonic()]
        self._submit(Noted, Note.PART_RESTARTED, part.name)
        self.on_change()

    def _pause_ns(self, part: Part) -> int:
        """How long its next restart has to wait."""
        if len(part.at_once) < RESTARTS_AT_ONCE:
            return 0
        return max(0, part.at_once[0] + RESTART_PAUSE_NS - self._monotonic())
