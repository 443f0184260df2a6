"""The users of a simulated daemon: readers, debuggers, engines that feed, and an operator of the recorder.

Each is a process of its own with the project's client library in it, and behaves as an honest program does: it takes
refusals, comes back when its connection is lost, and tells the monitors what it was told.

Law of this file: an actor's choices come from dice of its own, so another actor does not change them.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.client import Client
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import NAME_BYTES_MAX, SECOND_NS, BreakpointSpec
from kvbm_console.core.errors import KvbmConsoleError, Refused
from kvbm_console.core.ids import Authority, BreakpointAction, FinishReason, Site, SlotState, Suspend, Tier
from kvbm_console.debug.sessions import SESSION_NAME_BYTES_MAX
from kvbm_console.recording.options import RecordingOptions
from kvbm_console.stream.verbs import ContinueHold, Disarm, Freeze, RemoveBreakpoint, SetBreakpoint, Thaw
from tests.server.daemons import Mirror

if TYPE_CHECKING:
    from tests.sim.run import Simulation

ADDRESS: Final = "unix:/run/kvbm.sock"
FEED_BLOCKS: Final = 24
LOOKUP_SITES: Final = (Site.TRANSITION_DID, Site.TRANSITION_WILL, Site.CALL_DID, Site.DISPATCH_WILL, Site.EVICT_WILL)


class Actor:
    """A client program. ``connected`` is its connection now, for the network's faults."""

    kind = "actor"

    def __init__(self, simulation: "Simulation", number: int) -> None:
        self.simulation = simulation
        self.name = f"{self.kind}-{number}"
        self.dice = random.Random(f"{simulation.seed} {self.name}")
        self.stopped = False
        self.lives = 0
        self.begin()

    def begin(self) -> None:
        """Start the program."""
        self.lives += 1
        self.loop = self.simulation.machine.loop(f"{self.name}.{self.lives}", self._main)

    @property
    def process(self) -> Any:
        """Its process now."""
        return self.loop.process

    async def _main(self) -> None:
        while not self.stopped:
            try:
                async with Client(ADDRESS, name=self.simulation.names.of(self.name)) as client:
                    await self.use(client)
            except KvbmConsoleError as error:
                self.simulation.monitors.told(self.name, error)
            await asyncio.sleep(self.dice.uniform(0.1, 0.8))

    async def use(self, client: Client) -> None:
        """Its work on one connection."""
        raise NotImplementedError


class Reader(Actor):
    """Follows the stream and folds it, sometimes slowly; comes back behind the last event that it has seen."""

    kind = "reader"

    async def use(self, client: Client) -> None:
        dice, monitors = self.dice, self.simulation.monitors
        slow = dice.random() < 0.25
        mirror = Mirror()
        async with client.subscribe(digests=dice.random() < 0.5, history=dice.random() < 0.3) as stream:
            until = asyncio.get_running_loop().time() + dice.uniform(3, 20)
            async for item in stream:
                mirror.take(item)
                monitors.read(self, stream, mirror, item)
                if slow and not self.simulation.calm:
                    await asyncio.sleep(dice.uniform(0, 0.4))
                if asyncio.get_running_loop().time() > until and not self.simulation.calm:
                    break


class Debugger(Actor):
    """Sets breakpoints, holds and releases at random, as ten debuggers of ``r60`` do."""

    kind = "debugger"

    async def use(self, client: Client) -> None:
        dice, monitors = self.dice, self.simulation.monitors
        name = self.simulation.names.of(self.name, SESSION_NAME_BYTES_MAX, printable=0.8)
        async with client.control(name, lease=True) as session:
            monitors.opened(self, session)
            for _ in range(dice.randrange(3, 40)):
                began = self.simulation.world.now
                try:
                    await dice.choice(self._verbs)(self, session)
                except Refused as error:
                    monitors.refused_debugger(self, session.owner, error)
                monitors.floods.answered(self, began)
                await asyncio.sleep(dice.choice((0.1, 0.5, 2.0)) * dice.random())

    async def _set(self, session: Any) -> None:
        dice, names = self.dice, self.simulation.names
        await session.ask(SetBreakpoint(BreakpointSpec(
            site=dice.choice(LOOKUP_SITES), request=names.of(dice.choice(("*", "*", "*1*", "0")), kept=0.7),
            to_state=dice.choice((None, SlotState.PREFILLING, SlotState.ONBOARDING, SlotState.DECODING)),
            action=dice.choice((BreakpointAction.HOLD,) * 4 + (BreakpointAction.LOG,)),
            max_hold_ns=round(dice.choice((0.2, 2, 30, 30)) * SECOND_NS), one_shot=dice.random() < 0.2,
            suspend=dice.choice((Suspend.SLOT,) * 5 + (Suspend.PIPELINE,)), name=names.of("", NAME_BYTES_MAX),
        )))

    async def _continue(self, session: Any) -> None:
        await session.ask(ContinueHold(None))

    async def _freeze(self, session: Any) -> None:
        await session.ask(Freeze(round(self.dice.choice((0.3, 5)) * SECOND_NS)))

    async def _thaw(self, session: Any) -> None:
        await session.ask(Thaw())

    async def _remove(self, session: Any) -> None:
        service = self.simulation.service
        numbers = [] if service is None else list(service.state.breakpoints)
        if numbers:
            await session.ask(RemoveBreakpoint(self.dice.choice(numbers)))

    async def _disarm(self, session: Any) -> None:
        if self.dice.random() < 0.2:
            await session.ask(Disarm())

    _verbs = (_set, _set, _set, _set, _continue, _freeze, _thaw, _remove, _disarm)


class Engine(Actor):
    """A watched engine: a request after the other, numbered from 0 as vLLM's ``LLM.generate`` numbers them."""

    kind = "engine"

    async def use(self, client: Client) -> None:
        dice, names = self.dice, self.simulation.names
        async with client.feed(names.of("vllm")) as feed:
            tell = self._teller(feed)
            if names.hostile:  # with it the feed's name stands on the page of metrics
                await feed.tell_cost(1, 1, 1, 1, 1, 0)
            await tell(st.PoolDeclared, 0, 0, Tier.G1, names.of("GPU"), FEED_BLOCKS, 16, Authority.OBSERVED)
            iterations = count(1)
            for number in range(dice.randrange(2, 14)):
                if self.stopped:
                    return
                await self._request(tell, names.of(str(number)), iterations)
                await asyncio.sleep(dice.uniform(0, 0.3))

    async def _request(self, tell: Callable[..., Awaitable[Any]], name: str, iterations: Any) -> None:
        dice = self.dice
        first = dice.randrange(FEED_BLOCKS - 3)
        ids = [first, first + 1, first + 2]
        hashes = [dice.randrange(1, 2**60) for _ in range(2)]
        await tell(st.RequestArrived, name, pack_hashes(hashes), 40, 8, 0, self.simulation.names.of("") or None)
        await tell(st.LookupObserved, name, 0, 0, False, Tier.G2)
        await tell(st.BlocksAllocated, name, pack_ids(ids), 0)
        iteration = next(iterations)
        await tell(
            st.IterationScheduled, iteration=iteration, count=1, new=(name,), resumed=(), preempted=(), skipped=(),
            unskipped=(), first_tokens=(name,), progressed=(name,), positions=(40,), appended=(), appended_counts=(),
            appended_ids=b"", running=1, waiting=0,
        )
        await asyncio.sleep(dice.uniform(0, 0.1))
        await tell(st.IterationFinished, iteration, (name,), (2,), pack_ids(ids[:2]), pack_hashes(hashes))
        await tell(st.RequestFinished, name, pack_ids(ids), FinishReason.LENGTH, False)

    def _teller(self, feed: Any) -> Callable[..., Awaitable[Any]]:
        monitors, world = self.simulation.monitors, self.simulation.world

        async def tell(kind: Any, *args: Any, **kwargs: Any) -> Any:
            began = world.now
            try:
                return await feed.submit(kind, *args, **kwargs)
            except Refused as error:
                monitors.refused_engine(self, kind.__name__, error)
            finally:
                monitors.answered(self, began)

        return tell


class Operator(Actor):
    """Asks for the status, and begins, rotates and ends recordings."""

    kind = "operator"

    async def use(self, client: Client) -> None:
        dice, simulation = self.dice, self.simulation
        for _ in range(dice.randrange(1, 6)):
            await asyncio.sleep(dice.uniform(0.2, 2))
            if simulation.calm:
                return
            try:
                await dice.choice((self._status, self._rotate, self._stop))(client)
            except Refused as error:
                simulation.monitors.told(self.name, error)

    async def _status(self, client: Client) -> None:
        await client.status()

    async def _rotate(self, client: Client) -> None:
        await client.record_rotate()

    async def _stop(self, client: Client) -> None:
        if self.dice.random() < 0.3:
            await client.record_stop()
        await self._start(client)

    async def _start(self, client: Client) -> None:
        path = str(self.simulation.new_directory())
        if self.dice.random() < 0.3:  # one file: what is kept is all of it
            await client.record_start(f"{path}.mcap", RecordingOptions(sync=self.simulation.recording.sync))
        else:
            await client.record_start(path, self.simulation.recording)
