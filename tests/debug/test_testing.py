"""The helper for tests: a slot stands still at a site, and what is left of it afterwards is nothing."""

import anyio
import pytest

from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.core.ids import HoldEnd, Site, SlotState, WaitPoint
from kvbm_console.core.leader import Leader
from kvbm_console.debug.testing import breakpoint as stop_at
from kvbm_console.service import LeaderService
from kvbm_console.simulator.embedded import build, default_engine_config, default_leader_config, parse_workload

from .house import House


def service() -> LeaderService:
    made = LeaderService(LeaderConfig(g2_blocks=8), lambda: 0, check=True)
    made.start()
    return made


def arrive(target: LeaderService, name: str) -> None:
    target.dispatcher.submit_from(1, None, st.RequestArrived, name, pack_hashes([5, 6]), 40, 8, 0, None)


@pytest.mark.asyncio
async def test_a_test_waits_for_the_hold_and_lets_it_go() -> None:
    target = service()
    with stop_at(target, to="initialized", request="chat-*", when="live > 1") as bp:
        async with anyio.create_task_group() as group:
            async def arrivals() -> None:
                for name in ("other", "chat-1", "chat-2"):
                    await anyio.lowlevel.checkpoint()
                    arrive(target, name)

            group.start_soon(arrivals)
            with anyio.fail_after(10):
                first = await bp.hit()
                second = await bp.hit()
        assert (first.request, second.request) == ("chat-1", "chat-2")
        assert (first.state, first.site, first.point) == (SlotState.INITIALIZED, Site.TRANSITION_DID, WaitPoint.LOOKUP)
        assert len(target.state.holds) == 2
        bp.go_on(first)
        assert list(target.state.holds) == [second.hold]
    assert not target.state.holds
    assert not target.state.breakpoints
    assert target.leader.gate is None


@pytest.mark.asyncio
async def test_it_is_gone_also_when_the_block_fails() -> None:
    target = service()
    before = target.dispatcher.publish

    async def failing() -> None:
        with stop_at(target, to="initialized") as bp:
            arrive(target, "r")
            await bp.hit()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()
    assert not target.state.holds
    assert not target.state.breakpoints
    assert target.dispatcher.publish == before


def test_a_race_that_a_test_chooses() -> None:
    """The copy has arrived, its completion is not applied, and now the request is preempted."""
    house = House(g1=8, g2=16, offload_threshold=0.0)
    house.stored_below()
    with stop_at(house.dispatcher, site="complete.will", route="G2>G1") as bp:
        house.onboarding("r")
        house.move_all()
        (hold,) = bp.holds
        assert (hold.request, hold.point) == ("r", WaitPoint.COMPLETION)
        house.preempt("r")
        assert house.ended == [HoldEnd.CANCELLED]
    assert audit(house.state) == []
    assert house.lookup("r") is not None


def test_a_step_is_the_same_breakpoints_hold() -> None:
    house = House(g1=8, g2=16, offload_threshold=0.0)
    house.stored_below()
    with stop_at(house.dispatcher, site="candidate.enqueue", route="G2>G1") as bp:
        house.onboarding("r")
        bp.step(bp.holds[0])
        assert [held.site for held in bp.holds] == [Site.CANDIDATE_ENQUEUE, Site.EVALUATE_WILL]
    assert not house.state.holds


def test_a_bare_leader_and_a_whole_machine() -> None:
    leader = Leader(LeaderConfig(g2_blocks=8), check=True)
    with stop_at(leader, to="initialized") as bp:
        leader.handle(st.RequestArrived(1, 5, 1, None, "r", pack_hashes([5]), 20, 1, 0, None))
        assert [held.request for held in bp.holds] == ["r"]
    assert not leader.state.holds
    assert leader.handle.__func__ is Leader.handle  # type: ignore[attr-defined]

    workload = parse_workload("multiturn:requests=4,seed=1")
    rig = build(default_leader_config(workload), default_engine_config(workload), workload, check=True)
    with stop_at(rig, to="decoding", once=True) as bp:
        rig.run_to_end()
        assert rig.only_held
        assert len(bp.holds) == 1
    rig.run_to_end()
    assert rig.done


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"too": "decoding"}, "too is no field of a breakpoint"), ({"to": "decodng"}, "to must be one of initialized"),
     ({"hits": "3"}, "hit_condition must be")],
)
def test_a_wrong_field_is_refused_at_once(fields: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        stop_at(service(), **fields)


def test_a_wrong_expression_is_refused_when_the_block_is_entered() -> None:
    target = service()
    with pytest.raises(Refused, match="condition, column 1: a condition has no field `tokns`"):
        stop_at(target, when="tokns > 1").__enter__()
    assert not target.state.breakpoints
