"""Observers who ask as much as they can, beside an engine at full speed: what it costs the engine and its debuggers.

In these runs alone work takes time: a step of the engine, an answer, an event of the RPC library. The library's events
come one a turn of the loop (``Loop.one_event_a_turn``), as ``r27`` proved that they do where turns are long.

Laws of this file: beside a flood of questions the engine keeps ``ENGINE_SHARE`` of the time, and beside any flood a
debugger's verb is answered within ``VERB_S``.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.client import Client
from kvbm_console.core.errors import KvbmConsoleError
from tests.sim.load import ADDRESS, Actor

if TYPE_CHECKING:
    from tests.sim.run import Simulation

FLOODS: Final = ("callers_flood", "questions_flood", "readers_flood")
"""The kinds of faults that begin a flood."""
STEP_S: Final = 1e-3
ANSWER_S: Final = 1e-3
"""Two steps fill a slice; ``status`` of a large cache takes about as long."""
IN_FLIGHT: Final = 16
READERS: Final = 72
CALLS_A_MS: Final = 2
"""Calls that begin and are given up at once."""
ENGINE_SHARE: Final = 0.5
"""Beside calls that are given up it is 0.58 and more, where a real engine loses 2 %: an idle turn takes four times as
long here as a real one."""
WINDOW_S: Final = 0.5
"""The engine's share is judged over so long each time."""
WARM_S: Final = 2.5
"""In the beginning of a flood it is not judged: a flood begins with what its lanes have saved up. With that it opens 72
streams, and each stream writes the small chunks that the others' subscriptions flush."""
VERB_S: Final = 0.3
"""A real daemon keeps 50 ms; a simulated turn and the network take four times as long as real ones."""


def drawn(seed: int, kinds: Sequence[str]) -> bool:
    """True if work takes time in this run."""
    return bool(set(FLOODS) & set(kinds)) if kinds else random.Random(f"{seed} floods").random() < 0.08


class Flood(Actor):
    """A program without a token from afar; it does nothing before its time."""

    kind = "flood"

    def __init__(self, simulation: "Simulation", number: int) -> None:
        self.asks: str | None = None
        """The kind of the flood that goes on."""
        self.since_ns = self.until_ns = 0
        super().__init__(simulation, number)

    def start(self, kind: str, seconds: float) -> None:
        """Flood for so long."""
        now = self.simulation.world.now
        if self.floods != kind:
            self.since_ns = now
        self.asks, self.until_ns = kind, now + round(seconds * 1e9)

    @property
    def floods(self) -> str | None:
        """The kind that goes on now."""
        return self.asks if self.simulation.world.now < self.until_ns and not self.simulation.calm else None

    async def _main(self) -> None:
        while not self.stopped:
            if self.floods is None:
                await asyncio.sleep(0.05)
                continue
            async with Client(ADDRESS, name=self.name) as client:
                client._channel.controls = False
                if self.floods == "questions_flood":
                    await asyncio.gather(*(self._ask(client) for _ in range(IN_FLIGHT)))
                elif self.floods == "readers_flood":
                    await asyncio.gather(*(self._read(client) for _ in range(READERS)))
                else:
                    await self._call(client)

    async def _ask(self, client: Client) -> None:
        while self.floods == "questions_flood":
            try:
                await self.dice.choice((client.hello, client.status, client.digest))()
            except KvbmConsoleError:
                await asyncio.sleep(0.1)

    async def _read(self, client: Client) -> None:
        try:
            async with client.subscribe() as stream:
                async for _ in stream:
                    if self.floods != "readers_flood":
                        return
        except KvbmConsoleError:
            await asyncio.sleep(0.1)

    async def _call(self, client: Client) -> None:
        while self.floods == "callers_flood":
            for _ in range(CALLS_A_MS):
                call = asyncio.ensure_future(client.hello())
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
            await asyncio.sleep(1e-3)


class FloodMonitor:
    """Watches the engine's share and the debuggers' verbs of one run."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self._share: tuple[int, int] | None = None
        """The time and the engine's work when the undisturbed part of a flood began."""

    @property
    def _alone(self) -> bool:
        """Nothing but floods has happened in this run."""
        return set(self.simulation.faults.happened) <= set(FLOODS)

    def sample(self, service: Any) -> None:
        """Look at the engine's share while an observer asks or reads and no request is held."""
        simulation = self.simulation
        floods = [actor for actor in simulation.actors if isinstance(actor, Flood) and actor.floods]
        flooded = floods and simulation.world.now - floods[0].since_ns >= WARM_S * 1e9
        stands = service.state.holds or service.state.pipeline_closed or service.recoveries
        if not flooded or stands or not self._alone or not simulation.embedded:
            self._share = None
            return
        now, stepped = simulation.world.now, simulation.machine.stepped_ns
        if self._share is None:
            self._share = now, stepped
            return
        took_ns, worked_ns = now - self._share[0], stepped - self._share[1]
        if took_ns >= WINDOW_S * 1e9:
            self._share = now, stepped
            if worked_ns < ENGINE_SHARE * took_ns:
                simulation.monitors.violated("share", f"the engine had {worked_ns / took_ns:.0%} of {took_ns / 1e9} s")

    def answered(self, debugger: Actor, began_ns: int) -> None:
        """A verb of a debugger was answered."""
        took_s = (self.simulation.world.now - began_ns) / 1e9
        busy = self.simulation.busy and self._alone
        if busy and took_s > VERB_S and not self.simulation.calm and not debugger.process.dead:
            self.simulation.monitors.violated("share", f"{debugger.name} waited {took_s:.2f} s for a verb")
