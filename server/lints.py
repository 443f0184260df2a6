"""The lints, the digest and the LRU curve of a daemon's own stream, for its metrics and its summary.

They read the ring, as a console does, so neither a stimulus nor a scrape waits for them. They take an eighth of a core
at most. If that does not suffice, they pass events over, count them, and go on from newer facts. They run where metrics
are served, and for a minute after each question for a summary.

Law of this file: metrics and summaries show what lints, digest and curve found in the events that they saw. A scrape
and a question only read numbers.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import anyio
import anyio.to_thread

from kvbm_console.analysis.curve import CurveFold
from kvbm_console.analysis.digest import Digest, DigestFold
from kvbm_console.analysis.lints import LINTS, Finding, LintFold, current, stream_lints
from kvbm_console.core.curves import SampledRate
from kvbm_console.core.ids import Tier
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
ASKED_S: Final = 60.0
"""A fleet view asks every few seconds; a minute after its last question nobody reads the answers."""
FINDINGS_MAX: Final = 8
"""Findings of a summary, the worst first."""


class LintWatch:
    """Watches a service from ``run`` on. ``active`` and ``passed_over`` may be read at any time."""

    def __init__(self, service: LeaderService) -> None:
        self.active: Mapping[str, int] = dict.fromkeys((name for name, lint in LINTS.items() if lint.on_stream), 0)
        """Lint to the problems that it has found and that are so now."""
        self.passed_over = 0
        """Events that were not looked at, because there was no time for them."""
        self.findings: Sequence[Finding] = ()
        """The worst findings of now."""
        self.digest = Digest()
        """The digest of the requests since the oldest event that the daemon remembered when the watch began."""
        self.curve: Mapping[tuple[Tier, float], SampledRate] = {}
        """Hit rates of LRU caches around the tiers of now (``CurveFold.points``)."""
        self.turns = 0
        """Turns that are over; the other attributes say nothing before the first."""
        self.always = False
        """True where metrics are served."""
        self.ready = asyncio.Event()
        """Set while the other attributes cover the past that the daemon remembered when the watch began."""
        self._wanted = asyncio.Event()
        self._asked_s = -math.inf
        self._ran = False
        self._service = service
        self._spent_s = 0.0
        """Time that the last turn took of its thread."""
        self._turning = anyio.Lock()
        """Held by a turn: a thread folds what it read behind what the thread before it read."""
        self._begin(service.oldest_snapshot())

    def want(self) -> None:
        """Somebody asks: watch for a minute from now."""
        self._asked_s = time.monotonic()
        self._wanted.set()

    @property
    def is_wanted(self) -> bool:
        """True if metrics are served, or somebody asked within the last minute."""
        return self.always or time.monotonic() - self._asked_s < ASKED_S

    def _begin(self, snapshot: Snapshot) -> None:
        self._digest = DigestFold()
        self._curve = CurveFold()
        self._watch = LintFold(stream_lints(), [self._digest, self._curve])
        self._cursor = self._service.ring.cursor(snapshot.seq)
        self._state = CacheState()
        self._resume: tuple[Snapshot, GapSeen | None] | None = (snapshot, None)
        self._past_ends = self._service.ring.next_seq
        self.ready.clear()

    async def run(self) -> None:
        """Watch while it is wanted, until cancelled; may be called again after a lint's bug has ended the watch."""
        pause_s = 0.0
        if self._ran or self.always:  # an event that a lint cannot take must not come again
            self._begin(self._service.snapshot())
        self._ran = True
        while True:
            if not self.is_wanted:
                self._wanted.clear()
                self.ready.clear()
                self.turns = 0
                await self._wanted.wait()
                self._begin(self._service.oldest_snapshot())
                pause_s = 0.0
            await asyncio.sleep(pause_s)
            await self.turn()
            behind = self._service.ring.pending(self._cursor)
            pause_s = max(0.0 if behind else EVERY_S, (SHARE - 1) * self._spent_s)

    async def turn(self) -> None:
        """Take the events published since the last turn, up to a limit. Waits for a turn that is not over."""
        async with self._turning:
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
            # Beside facts that are behind, everything would seem to have lasted until now.
            at_ns = None if self._service.ring.pending(self._cursor) else self._service.at_ns
            with anyio.CancelScope(shield=True):  # a cancelled thread would go on beside us
                self._spent_s = await anyio.to_thread.run_sync(self._take, resume, frames, at_ns)
            if self._cursor.position >= self._past_ends:
                self.ready.set()

    def _take(self, resume: tuple[Snapshot, GapSeen | None] | None, frames: list[bytes], at_ns: int | None) -> float:
        """Take these events, and judge as of ``at_ns``, or of the last event; the time that the thread took."""
        began = time.thread_time()
        if resume is not None:
            self._state = decode_facts(resume[0].facts)
            self._watch.resumed(self._state, resume[1])
        for frame in frames:
            for event in unpack_events(batch_of(frame)):
                if event.seq >= self._state.seq:
                    self._watch.apply(self._state, event)
        found = dict.fromkeys(self.active, 0)
        at_ns = self._state.at_ns if at_ns is None else at_ns
        now = list(current(self._watch.findings(self._state, at_ns), at_ns))
        for finding in now:
            if finding.lint in found:
                found[finding.lint] += 1
        self.active = found
        self.findings = tuple(sorted(now, key=lambda finding: (finding.level, finding.since_ns))[:FINDINGS_MAX])
        self.digest = self._digest.digest.told()
        self.curve = self._curve.points(self._state)
        self.turns += 1
        return time.thread_time() - began
