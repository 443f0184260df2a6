"""F12: the daemon is killed or frozen while an engine in another process waits in a hook."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvbm_console.client import Client, HookedFeed
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.events import HoldReleased
from kvbm_console.core.ids import Authority, HoldEnd, Site, Tier
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.stream.verbs import ContinueHold, SetBreakpoint
from tests.server.daemons import Process, daemon_at, process, socket_directory

pytestmark = pytest.mark.fault

DAEMON = """
import asyncio, sys
from server.daemon import run_daemon
from tests.server.daemons import options_for

asyncio.run(run_daemon(options_for(None, sys.argv[1]), on_ready=lambda d: print(d.address)))
"""
MAX_HOLD_S = 2.0


async def engine(hooked: HookedFeed) -> None:
    """An engine with one request."""
    await hooked.call(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
    await hooked.call(st.RequestArrived, "r", pack_hashes([5, 6]), 40, 8, 0, None)


async def until_waiting(hooked: HookedFeed, calls: int) -> None:
    """Until so many calls of ours have come to stand still in their hooks."""
    while hooked.waited < calls:
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def waiting_engine(
    site: Site, max_hold_s: float
) -> AsyncIterator[tuple[Process, HookedFeed, "asyncio.Task[object]"]]:
    """A daemon in a process of its own, and a call of ours that stands still in its hook."""
    with socket_directory() as place, process("-c", DAEMON, f"unix:{place}/d.sock") as child:
        address = await asyncio.to_thread(child.line)
        async with (
            Client(address) as client, client.feed("engine") as feed, client.control("shell", lease=False) as shell,
        ):
            hooked = HookedFeed(feed)
            await engine(hooked)
            await shell.ask(SetBreakpoint(BreakpointSpec(site=site, max_hold_ns=int(max_hold_s * 1e9))))
            call = asyncio.create_task(hooked.call(st.MatchRequested, "r", 0))
            await until_waiting(hooked, 1)
            assert not call.done()
            yield child, hooked, call


@pytest.mark.asyncio
async def test_a_hook_waits_until_the_hold_ends_and_then_gets_its_answer() -> None:
    async with (
        daemon_at() as daemon, Client(daemon.address) as client, client.feed("engine") as feed,
        client.control("me") as session,
    ):
        hooked = HookedFeed(feed)
        await engine(hooked)
        await session.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_WILL, one_shot=True)))
        await session.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_DID, one_shot=True)))
        call = asyncio.create_task(hooked.call(st.MatchRequested, "r", 0))
        for calls, site in enumerate((Site.CALL_WILL, Site.CALL_DID), 1):
            await until_waiting(hooked, calls)
            assert [hold.site for hold in daemon.service.state.holds.values()] == [site]
            slot = daemon.service.state.slot_named("r")
            assert slot is not None
            assert (slot.last_answer is None) is (site is Site.CALL_WILL), "will is before the call, did after it"
            assert not call.done()
            await session.ask(ContinueHold(None))
        assert await call == MatchAnswer(0, False)


@pytest.mark.asyncio
@pytest.mark.parametrize("site", [Site.CALL_WILL, Site.CALL_DID], ids=lambda site: site.label)
async def test_f12_an_engine_goes_on_within_a_second_when_the_daemon_is_killed(site: Site) -> None:
    async with waiting_engine(site, 100.0) as (daemon, hooked, call):
        begin = time.monotonic()
        daemon.send(signal.SIGKILL)
        if site is Site.CALL_WILL:
            with pytest.raises(ConnectionLost):
                await call
        else:
            assert await call == MatchAnswer(0, False), "the answer was there already"
        assert time.monotonic() - begin <= 1.0
        assert hooked.waited == 1


@pytest.mark.asyncio
async def test_f12_an_engine_goes_on_after_its_own_limit_when_the_daemon_is_frozen() -> None:
    begin = time.monotonic()
    async with waiting_engine(Site.CALL_DID, MAX_HOLD_S) as (daemon, _, call):
        daemon.send(signal.SIGSTOP)
        assert await call == MatchAnswer(0, False)
        assert time.monotonic() - begin >= MAX_HOLD_S
        daemon.send(signal.SIGCONT)


@pytest.mark.asyncio
async def test_f12_a_frozen_daemon_costs_a_call_its_limit_and_one_answer() -> None:
    async with waiting_engine(Site.CALL_WILL, MAX_HOLD_S) as (daemon, hooked, call):
        begin = time.monotonic()
        daemon.send(signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="did not answer within 1 s"):
            await call
        assert time.monotonic() - begin <= MAX_HOLD_S + 1.5
        assert hooked.waited == 1
        daemon.send(signal.SIGCONT)


@pytest.mark.asyncio
async def test_a_lost_lease_lets_a_waiting_engine_go() -> None:
    async with daemon_at() as daemon, Client(daemon.address) as client, client.feed("engine") as feed:
        hooked = HookedFeed(feed)
        await engine(hooked)
        ends: list[HoldEnd] = []
        publish = daemon.service.dispatcher.publish
        assert publish is not None

        def listen(stimulus: st.Stimulus, outcome: object) -> None:
            ends.extend(e.why for e in outcome.events if isinstance(e, HoldReleased))  # type: ignore[attr-defined]
            publish(stimulus, outcome)  # type: ignore[arg-type]

        daemon.service.dispatcher.publish = listen
        async with client.control("me") as session:
            await session.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_WILL)))
            call = asyncio.create_task(hooked.call(st.MatchRequested, "r", 0))
            await until_waiting(hooked, 1)
        assert await call == MatchAnswer(0, False)
        assert ends == [HoldEnd.LEASE_LOST]
