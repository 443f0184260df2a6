"""The machine of the film: the incident of ``demo`` in virtual time, as a live target that obeys its console.

Law of this file: nothing depends on the wall's clock, and a key that is pressed in the film acts on the machine.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from kvbm_console.analysis.explain import Explanation, explain
from kvbm_console.analysis.walk import Evidence
from kvbm_console.cli.machine import daemon_options
from kvbm_console.core.events import Event
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.stimuli import LeaseGranted, LeaseLost, Stimulus
from kvbm_console.debug.leases import Leases
from kvbm_console.debug.sessions import Sessions
from kvbm_console.recording.reader import Item
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.incident import SCENARIOS
from kvbm_console.stream.feed import Connected, EventsArrived, FeedItem, Heartbeat, SnapshotTaken
from kvbm_console.stream.verbs import A, Verb
from recordings.screens.tape import CLOCK_ANCHOR_NS, SECOND

STEP_NS = SECOND // 20
BEAT_STEPS = 10
"""A heartbeat every half second, as from a daemon."""


class Stage:
    """``stream.feed.Feed`` and ``stream.feed.Controls`` of a machine that runs up to where ``until`` lets it."""

    def __init__(self, name: str) -> None:
        options = daemon_options(
            workload=None, scenario=SCENARIOS[name], limit=None, speed=None, record=None, listen="unix:film.sock",
            check=False,
        )
        assert options.engine is not None
        assert options.workload is not None
        self._events: list[Event] = []
        self.at_ns = 0
        self.rig = build(
            options.config, options.engine, options.workload, publish=self._publish, links=options.links)
        if options.stage is not None:
            options.stage(self.rig)
        self._first = Leader(options.config).state
        submit = self.rig.dispatcher.submit
        self._sessions = Sessions(self.rig.dispatcher, Leases(
            self.mono, granted=lambda owner, back: submit(LeaseGranted, owner, back),
            lost=lambda owner: submit(LeaseLost, owner)))
        self._session = self._sessions.open("you", lease=True)
        self.name = options.workload.name
        self._block_bytes = options.block_bytes
        self._until_ns = 0
        self._more = asyncio.Event()
        self._there = asyncio.Event()

    def _publish(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self._events += outcome.events

    def mono(self) -> int:
        """The console's clock: the run's time itself."""
        return self.at_ns

    def wall(self) -> int:
        """The time of day: the same in every film."""
        return CLOCK_ANCHOR_NS + self.at_ns

    async def until(self, at_ns: int) -> None:
        """Let the run come to this time, and wait until the console has all of it."""
        self._until_ns = at_ns
        self._there.clear()
        self._more.set()
        await self._there.wait()

    async def items(self) -> AsyncIterator[FeedItem]:
        """As ``stream.feed.Feed``."""
        config = self.rig.leader.config
        yield Connected(
            self.name, "0123456789abcdef", 1, True, self._block_bytes, config=config, clock_anchor_ns=CLOCK_ANCHOR_NS)
        yield SnapshotTaken(decode_facts(encode_facts(self._first)))
        sent = step = 0
        while True:
            while self.at_ns + STEP_NS > self._until_ns:
                self._more.clear()
                self._there.set()
                await self._more.wait()
            step += 1
            self.at_ns = step * STEP_NS
            self.rig.run(self.at_ns)
            if len(self._events) > sent:
                yield EventsArrived(self._events[sent:])
                sent = len(self._events)
            if step % BEAT_STEPS == 0:
                head = self.rig.leader.state.seq - 1
                yield Heartbeat(head, self.at_ns, "recording", head, head - 20, 400_000_000, 0, 1)

    async def ask(self, verb: Verb[A]) -> A:
        """As ``stream.feed.Controls``: carried out at once."""
        return self._sessions.carry_out(self._session, verb)

    def saw(self, enabled: Mapping[int, bool]) -> None:
        """Nothing: this console never loses its connection."""

    async def retry_now(self) -> None:
        """Nothing, for the same reason."""

    async def explain(self, request: str) -> Explanation:
        """The explanation of a request by all events so far."""
        events = list(self._events)

        def items() -> Iterator[Item]:
            yield SnapshotTaken(decode_facts(encode_facts(self._first)))
            yield EventsArrived(list(events))

        nothing: dict[int, Any] = {}
        return explain(
            Evidence("film", self.rig.leader.config, len(events), items, lambda seq: nothing, False), request)
