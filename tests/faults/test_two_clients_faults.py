"""F13 over the wire: two clients set, clear and continue while an engine waits in its hooks; one of them is killed."""

import asyncio
import random
import signal

import pytest

from kvbm_console.client import Client, ControlSession, HookedFeed
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import Authority, Site, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.stream.verbs import ContinueHold, Disarm, EnableBreakpoint, RemoveBreakpoint, SetBreakpoint
from tests.server.daemons import daemon_at, process, published

pytestmark = pytest.mark.fault
TURNS = 60
REQUESTS = ("r0", "r1", "r2")
FORGETFUL = """
import asyncio, sys
from kvbm_console.client import Client
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import Site
from kvbm_console.stream.verbs import SetBreakpoint

async def main():
    async with Client(sys.argv[1]) as client, client.control("forgetful") as session:
        await session.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_WILL)))
        print("armed")
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def turn(session: ControlSession, rng: random.Random, state: CacheState) -> None:
    """One thing that a client does; what the other one has done meanwhile is answered, not raised."""
    numbers, holds = list(state.breakpoints), [*state.holds, max(1, state.next_hold - 1)]
    try:
        match rng.randrange(6):
            case 0 | 1:
                await session.ask(SetBreakpoint(BreakpointSpec(
                    site=rng.choice([Site.CALL_WILL, Site.CALL_DID]), request=rng.choice(["*", "r0", "r[12]"]),
                    one_shot=rng.random() < 0.5)))
            case 2 if numbers:
                await session.ask(RemoveBreakpoint(rng.choice(numbers)))
            case 3 if state.next_hold > 1:
                assert await session.ask(ContinueHold(rng.choice(holds))) in ("continued", "already_continued")
            case 4 if numbers:
                await session.ask(EnableBreakpoint(rng.choice(numbers), rng.random() < 0.5))
            case _:
                await session.ask(ContinueHold(None))
    except Refused as error:
        if "there is no breakpoint" not in str(error):  # the other client has removed it
            raise


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_f13_two_clients_and_one_that_forgets(seed: int) -> None:
    rng = random.Random(seed)
    async with daemon_at() as daemon, Client(daemon.address) as client, client.feed("engine") as feed:
        hooked = HookedFeed(feed)
        state = daemon.service.state
        await hooked.call(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
        for at, request in enumerate(REQUESTS):
            await hooked.call(st.RequestArrived, request, pack_hashes([at + 1]), 20, 8, 0, None)
        over = False

        async def engine(request: str) -> int:
            calls = 0
            while not over:
                await hooked.call(st.MatchRequested, request, 0)
                calls += 1
            return calls

        calls = [asyncio.create_task(engine(request)) for request in REQUESTS]
        with process("-c", FORGETFUL, daemon.address) as child:
            assert await asyncio.to_thread(child.line) == "armed"
            await published(daemon, lambda: bool(state.holds))
            async with client.control("one") as one, client.control("two") as two:
                for _ in range(TURNS):
                    await asyncio.gather(turn(one, rng, state), turn(two, rng, state))
                child.send(signal.SIGKILL)
                await published(daemon, lambda: "forgetful-1" not in daemon.service.leases.owners)
                await one.ask(Disarm())
                over = True
                assert not state.holds
                assert all(count >= 1 for count in await asyncio.wait_for(asyncio.gather(*calls), 20))
        assert state.totals.holds == sum(state.totals.holds_ended) > 0
        assert not any(known.enabled for known in state.breakpoints.values())
