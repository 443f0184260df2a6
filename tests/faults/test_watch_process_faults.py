"""F16 and F25 on a daemon in a process of its own: its wall clock is set, and code of its own keeps its loop.

Law of this file: the engine and the holder are other processes or sockets, and every wait is for an event.
"""

import asyncio
import signal
import time

import pytest

from kvbm_console.client import Client, HookedFeed
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.ids import Authority, HoldEnd, Note, SlotState, Tier
from kvbm_console.stream.feed import EventsArrived
from kvbm_console.stream.verbs import SetBreakpoint
from tests.faults.test_client_faults import HOLDER
from tests.server.daemons import process, socket_directory

pytestmark = pytest.mark.fault

SET_CLOCK = """
import asyncio, signal, sys, time

real, offset_ns = time.time_ns, 0
time.time_ns = lambda: real() + offset_ns
time.time = lambda: time.time_ns() / 1e9  # before anything of ours binds them

def step(*_):
    global offset_ns
    offset_ns += int(sys.argv[2]) * 3_600 * 10**9

signal.signal(signal.SIGUSR2, step)

from server.daemon import run_daemon
from tests.server.daemons import options_for

asyncio.run(run_daemon(options_for(None, sys.argv[1], lease_ttl_ns=10**9), on_ready=lambda d: print(d.address)))
"""
SELFISH = """
import asyncio, signal, sys, time
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.debug.interceptors import HookedPort
from server.daemon import Daemon
from tests.server.daemons import options_for

class Selfish:
    async def will_call(self, entry, request):
        print("blocks", flush=True)
        time.sleep(2.0)

    async def finished_call(self, entry, request, outcome):
        print("done", flush=True)

async def main():
    daemon, asked = Daemon(options_for(None, sys.argv[1])), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, asked.set)
    serving = asyncio.create_task(daemon.run(lambda d: print(d.address, flush=True)))
    await asked.wait()
    service = daemon.service
    service.dispatcher.submit_from(7, None, st.RequestArrived, "own", pack_hashes([1]), 20, 1, 0, None)
    await HookedPort(service.dispatcher, 7, service.changed.wait, [Selfish()]).call(st.MatchRequested, "own", 0)
    await serving

asyncio.run(main())
"""


async def noted(client: Client, note: Note, seen: list[ev.Event], from_now: asyncio.Event) -> ev.Noted:
    """The next note of this kind; every event up to it goes into ``seen``."""
    async with client.subscribe() as stream:
        await anext(stream)
        from_now.set()
        async for item in stream:
            if isinstance(item, EventsArrived):
                seen += item.events
                for event in item.events:
                    if isinstance(event, ev.Noted) and event.note is note:
                        return event
    raise AssertionError("the daemon ended")


async def released(client: Client, after: int) -> ev.HoldReleased:
    """The release of hold 1, from the events behind ``after``."""
    async with client.subscribe(after_seq=after, incarnation=(await client.hello()).incarnation) as stream:
        async for item in stream:
            if isinstance(item, EventsArrived):
                for event in item.events:
                    if isinstance(event, ev.HoldReleased):
                        return event
    raise AssertionError("the daemon ended")


@pytest.mark.asyncio
@pytest.mark.parametrize("hours", [1, -1])
async def test_f16_a_daemon_whose_wall_clock_is_set_keeps_order_leases_and_holds(hours: int) -> None:
    with socket_directory() as place, process("-c", SET_CLOCK, f"unix:{place}/d.sock", str(hours)) as daemon:
        address = await asyncio.to_thread(daemon.line)
        async with Client(address) as client, client.feed("engine") as feed:
            with process("-c", HOLDER.replace("PREFILLING", "INITIALIZED"), address) as holder:
                assert await asyncio.to_thread(holder.line) == "armed"
                seen: list[ev.Event] = []
                listening = asyncio.Event()
                stepped = asyncio.create_task(noted(client, Note.CLOCK_STEPPED, seen, listening))
                await listening.wait()
                await feed.submit(st.RequestArrived, "r", pack_hashes([5]), 20, 1, 0, None)
                daemon.send(signal.SIGUSR2)
                said = (await stepped).detail
                assert abs(float(said.split()[-2]) - 3_600 * hours) < 1.0
                assert said.startswith("the wall clock was set by ")
                assert len((await client.status())["holds"]) == 1, "the lease lives by the monotonic clock"
                begin = time.monotonic()
                holder.send(signal.SIGSTOP)
                gone = await released(client, seen[-1].seq)
                assert time.monotonic() - begin <= 1.0 + 0.5, "and ends by it"
                holder.send(signal.SIGCONT)
            assert gone.why is HoldEnd.LEASE_LOST
            assert gone.held_ns >= 0
            assert [event.seq for event in seen] == list(range(seen[0].seq, seen[0].seq + len(seen)))
            times = [event.at_ns for event in [*seen, gone]]
            assert times == sorted(times)


@pytest.mark.asyncio
async def test_f25_a_daemon_that_its_own_interceptor_blocks_says_so_and_an_engine_elsewhere_goes_on() -> None:
    with socket_directory() as place, process("-c", SELFISH, f"unix:{place}/d.sock") as daemon:
        address = await asyncio.to_thread(daemon.line)
        async with Client(address) as client, client.feed("engine") as feed:
            hooked = HookedFeed(feed, answer_s=0.5)
            await hooked.call(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
            await hooked.call(st.RequestArrived, "r", pack_hashes([5, 6]), 40, 8, 0, None)
            seen: list[ev.Event] = []
            listening = asyncio.Event()
            watch = asyncio.create_task(noted(client, Note.LOOP_BLOCKED, seen, listening))
            await listening.wait()
            daemon.send(signal.SIGUSR2)
            assert await asyncio.to_thread(daemon.line) == "blocks"
            begin = time.monotonic()
            with pytest.raises(ConnectionLost, match=r"did not answer within 0\.5 s"):
                await hooked.call(st.MatchRequested, "r", 0)
            assert time.monotonic() - begin <= 1.5, "the engine goes on by its own clock"
            assert float((await watch).detail.split()[-2]) >= 1.5
            assert await asyncio.to_thread(daemon.line) == "done"
            async with client.control("me", lease=False) as session:
                await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING)))
            await HookedFeed(feed).call(st.RequestArrived, "s", pack_hashes([7]), 20, 8, 0, None)
