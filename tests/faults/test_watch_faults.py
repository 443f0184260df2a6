"""F16 and F25: a wall clock that is set, an interceptor that keeps the loop; and a condition that costs too much."""

import time

import anyio
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.ids import BreakpointEnd, HoldEnd, Note, SlotState
from kvbm_console.core.leader import Outcome
from kvbm_console.debug.interceptors import HookedPort
from kvbm_console.dispatch import Dispatcher
from kvbm_console.parts import Watch
from kvbm_console.service import LeaderService
from kvbm_console.wire.batches import unpack_events

pytestmark = pytest.mark.fault
HOUR_NS = 3_600 * 10**9


class Clock:
    """A clock that goes only when it is told."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def events_of(service: LeaderService) -> list[ev.Event]:
    service.broadcaster.flush()
    return [event for data in service.ring.data_since(0) for event in unpack_events(data)]


def arrive(service: LeaderService, name: str) -> None:
    service.dispatcher.submit_from(1, None, st.RequestArrived, name, pack_hashes([1]), 20, 1, 0, None)


@pytest.mark.asyncio
@pytest.mark.parametrize("hours", [1, -1])
async def test_f16_the_wall_clock_jumps_an_hour(hours: int) -> None:
    """Order is by seq, leases run on the monotonic clock, no duration is negative, and the step is an event."""
    monotonic, wall = Clock(), Clock(1_800_000_000 * 10**9)
    service = LeaderService(LeaderConfig(), monotonic, monotonic=monotonic, wall=wall, lease_ttl_ns=5 * 10**9)
    service.start()
    session = service.sessions.open("me", lease=True)
    service.sessions.set(session, BreakpointSpec(to_state=SlotState.INITIALIZED))
    async with anyio.create_task_group() as group:
        await group.start(service.run)
        arrive(service, "r")
        wall.now_ns += hours * HOUR_NS
        while not any(isinstance(event, ev.Noted) for event in events_of(service)):
            await service.changed.wait()
        assert service.state.holds, "the lease lives by the monotonic clock"
        monotonic.now_ns += 5 * 10**9
        wall.now_ns += 5 * 10**9
        while service.state.holds:
            await service.changed.wait()
        group.cancel_scope.cancel()
    events = events_of(service)
    assert [event.seq for event in events] == list(range(len(events)))
    assert [event.at_ns for event in events] == sorted(event.at_ns for event in events)
    (stepped,) = (event for event in events if isinstance(event, ev.Noted) and event.note is Note.CLOCK_STEPPED)
    assert stepped.detail == f"the wall clock was set by {hours * 3600:+.1f} s"
    (released,) = (event for event in events if isinstance(event, ev.HoldReleased))
    assert released.why is HoldEnd.LEASE_LOST
    assert released.held_ns == 5 * 10**9


class Selfish:
    """An interceptor that blocks the loop, as nobody should."""

    async def will_call(self, entry: str, request: str) -> None:
        time.sleep(2.0)  # noqa: ASYNC251 - the fault itself

    async def finished_call(self, entry: str, request: str, outcome: Outcome) -> None:
        return


@pytest.mark.asyncio
async def test_f25_an_interceptor_that_blocks_the_loop_is_told_and_the_engine_goes_on() -> None:
    service = LeaderService(LeaderConfig(), lambda: 0)
    service.start()
    arrive(service, "r")
    port = HookedPort(service.dispatcher, 1, service.changed.wait, [Selfish()])
    async with anyio.create_task_group() as group:
        await group.start(service.run)
        await anyio.lowlevel.checkpoint()
        outcome = await port.call(st.MatchRequested, "r", 0)
        assert outcome.result is not None
        while not any(isinstance(event, ev.Noted) for event in events_of(service)):
            await service.changed.wait()
        group.cancel_scope.cancel()
    (noted,) = (event for event in events_of(service) if isinstance(event, ev.Noted))
    assert noted.note is Note.LOOP_BLOCKED
    assert noted.detail.startswith("the event loop stood still for ")
    assert 1.5 <= float(noted.detail.split()[-2]) <= 2.5


def test_a_condition_that_costs_too_much_is_disabled() -> None:
    monotonic = Clock()
    service = LeaderService(LeaderConfig(), lambda: 0, monotonic=monotonic)
    service.start()
    watch = Watch(service.dispatcher, monotonic, lambda: 0)
    service.sessions.set(service.sessions.open("shell", lease=False), BreakpointSpec(
        to_state=SlotState.INITIALIZED, condition="live > 1000"))
    watch.look(10**8)
    dear, cheap = 60_000_000, 40_000_000
    for spent, enabled in ((cheap, True), (dear, False)):
        service.leader.condition_ns[1] = spent
        monotonic.now_ns += 10**9
        watch.look(10**9)
        assert service.state.breakpoints[1].enabled is enabled
    (stopped,) = (event for event in events_of(service) if isinstance(event, ev.BreakpointStopped))
    assert stopped.why is BreakpointEnd.OVERRUN
    assert stopped.message == "its condition took 60 ms of the last 1000 ms, at most 5% are allowed"
    assert isinstance(service.dispatcher, Dispatcher)
