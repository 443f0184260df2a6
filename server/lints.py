"""The lints on a daemon's own stream, for its metrics.

They read the ring, as a console does, so neither a stimulus nor a scrape waits for them. They take an eighth of a core
at most. If that does not suffice, they pass events over, count them, and go on from newer facts.

Law of this file: the metrics show the findings of the lints in the events that they saw. A scrape only reads numbers.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

import anyio
import anyio.to_thread

from kvbm_console.analysis.lints import LINTS, LintFold, current, stream_lints
from kvbm_console.core.snapshots import decode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.service import LeaderService, Snapshot
from kvbm_console.stream.feed import GapSeen
from kvbm_console.stream.ring import Lost
from kvbm_console.wire.batches import unpack_events
from kvbm_console.wire.frames import batch_of

EVERY_S: Final = 1.0
"""A scrape comes every few seconds at most."""
SHARE: Final = 8
"""Reciprocal of the share of a core that the lints take, as much as a console."""
TURN_EVENTS: Final = 16_384
"""Events of a turn, some tens of milliseconds in a thread; the budget is checked between turns."""


class LintWatch:
    """Watches a service from ``run`` on. ``active`` and ``passed_over`` may be read at any time."""

    def __init__(self, service: LeaderService) -> None:
        self.active: Mapping[str, int] = dict.fromkeys((name for name, lint in LINTS.items() if lint.on_stream), 0)
        """Lint to the problems that it has found and that are so now."""
        self.passed_over = 0
        """Events that were not looked at, because there was no time for them."""
        self._service = service
        self._spent_s = 0.0
        """Time that the last turn took of its thread."""
        self._begin()

    def _begin(self) -> None:
        snapshot = self._service.snapshot()
        self._watch = LintFold(stream_lints())
        self._cursor = self._service.ring.cursor(snapshot.seq)
        self._state = CacheState()
        self._resume: tuple[Snapshot, GapSeen | None] | None = (snapshot, None)

    async def run(self) -> None:
        """Watch from now until cancelled; may be called again after a lint's bug has ended the watch."""
        self._begin()
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            await self.turn()
            behind = self._service.ring.pending(self._cursor)
            pause_s = max(0.0 if behind else EVERY_S, (SHARE - 1) * self._spent_s)

    async def turn(self) -> None:
        """Take the events published since the last turn, up to a limit."""
        frames: list[bytes] = []
        start = self._cursor.received
        while self._cursor.received - start < TURN_EVENTS:
            item = self._service.ring.read(self._cursor)
            if isinstance(item, Lost):
                snapshot = self._service.go_on_from(self._cursor)
                self.passed_over += snapshot.seq - item.first
                self._resume = snapshot, GapSeen(item.first, snapshot.seq - 1, "passed over")
                frames.clear()
            elif item is None:
                break
            else:
                frames.append(item)
        resume, self._resume = self._resume, None
        at_ns = self._service.at_ns
        with anyio.CancelScope(shield=True):  # a cancelled thread would go on beside us
            self._spent_s = await anyio.to_thread.run_sync(self._take, resume, frames, at_ns)

    def _take(self, resume: tuple[Snapshot, GapSeen | None] | None, frames: list[bytes], at_ns: int) -> float:
        began = time.thread_time()
        if resume is not None:
            self._state = decode_facts(resume[0].facts)
            self._watch.resumed(self._state, resume[1])
        for frame in frames:
            for event in unpack_events(batch_of(frame)):
                if event.seq >= self._state.seq:
                    self._watch.apply(self._state, event)
        found = dict.fromkeys(self.active, 0)
        for finding in current(self._watch.findings(self._state, at_ns), at_ns):
            if finding.lint in found:
                found[finding.lint] += 1
        self.active = found
        return time.thread_time() - began
