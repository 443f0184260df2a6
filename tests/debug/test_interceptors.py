"""Interceptor hooks: breakpoints at call sites pause the caller's own task, and nobody else.

Law of this file: tests wait for events of the leader, never for time.
"""

import anyio
import pytest

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.ids import Site, WaitPoint
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.debug.interceptors import HookedPort
from kvbm_console.dispatch import Dispatcher, start_leader


class House:
    """A leader, its dispatcher and a rendezvous that returns at the next publication."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.leader = Leader(LeaderConfig(g2_blocks=8), check=True)
        self.dispatcher = Dispatcher(self.leader, lambda: 0, publish=self._published)
        start_leader(self.dispatcher)

    def _published(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        self.event.set()
        self.event = anyio.Event()

    async def changed(self) -> None:
        await self.event.wait()

    async def until_held(self, count: int = 1) -> None:
        while len(self.leader.state.holds) < count:
            await self.changed()

    def arm(self, **fields: object) -> None:
        self.dispatcher.submit(st.BreakpointsReplaced, "test", (BreakpointSpec(**fields),))  # type: ignore[arg-type]


class Diary:
    """An interceptor that writes down what it saw."""

    def __init__(self, name: str, pages: list[str]) -> None:
        self.name = name
        self.pages = pages

    async def will_call(self, entry: str, request: str) -> None:
        self.pages.append(f"{self.name} will {entry} {request}")

    async def finished_call(self, entry: str, request: str, outcome: Outcome) -> None:
        self.pages.append(f"{self.name} finished {entry} {request}")


def arrive(house: House, request: str) -> None:
    house.dispatcher.submit_from(1, None, st.RequestArrived, request, pack_hashes([5, 6]), 40, 8, 0, None)


@pytest.mark.asyncio
async def test_interceptors_run_around_the_call_and_in_reverse_after_it() -> None:
    house = House()
    pages: list[str] = []
    port = HookedPort(house.dispatcher, 1, house.changed, [Diary("a", pages), Diary("b", pages)])
    arrive(house, "r")
    outcome = await port.call(st.MatchRequested, "r", 0)
    assert outcome.result == MatchAnswer(0, False)
    entry = "get_num_new_matched_tokens"
    assert pages == [f"a will {entry} r", f"b will {entry} r", f"b finished {entry} r", f"a finished {entry} r"]


@pytest.mark.asyncio
@pytest.mark.parametrize("site", [Site.CALL_WILL, Site.CALL_DID])
async def test_a_breakpoint_at_a_call_site_pauses_only_that_caller(site: Site) -> None:
    house = House()
    port = HookedPort(house.dispatcher, 1, house.changed)
    for request in ("held", "free"):
        arrive(house, request)
    house.arm(site=site, request="held")
    returned = []

    async def call(request: str) -> None:
        await port.call(st.MatchRequested, request, 0)
        returned.append(request)

    async with anyio.create_task_group() as group:
        group.start_soon(call, "held")
        await house.until_held()
        (hold,) = house.leader.state.holds.values()
        assert (hold.site, hold.parked) == (site, site is Site.CALL_WILL)
        assert (hold.point is WaitPoint.CALL) == (site is Site.CALL_WILL)
        looked_up = house.leader.state.slot_named("held")
        assert looked_up is not None
        assert (looked_up.last_answer is None) == (site is Site.CALL_WILL), "will is before the call, did after it"
        await call("free")
        assert returned == ["free"], "one held caller never stops another"
        house.dispatcher.submit(st.HoldContinued, hold.hold, "test", None)
    assert returned == ["free", "held"]
    assert not house.leader.state.holds


@pytest.mark.asyncio
async def test_an_announced_call_is_asked_once_only() -> None:
    house = House()
    port = HookedPort(house.dispatcher, 1, house.changed)
    arrive(house, "r")
    house.arm(site=Site.CALL_WILL)
    async with anyio.create_task_group() as group:
        group.start_soon(port.call, st.MatchRequested, "r", 0)
        await house.until_held()
        house.dispatcher.submit(st.HoldContinued, None, "test", None)
    assert house.leader.state.totals.breakpoint_hits == 1
    # A caller that does not announce itself is asked where it can stand still: at the lookup.
    house.dispatcher.submit_from(1, None, st.MatchRequested, "r", 0)
    (hold,) = house.leader.state.holds.values()
    assert (hold.point, hold.parked) == (WaitPoint.LOOKUP, True)
