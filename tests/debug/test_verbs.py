"""The verbs: continue, until, step, skip, the pipeline, freeze, run for, disarm. Who did what is an event.

Law of this file: a verb acts on what it names, and a lost race is answered, not raised.
"""

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import (
    Authority,
    BreakpointAction,
    BreakpointEnd,
    CandidateStatus,
    Clock,
    HoldEnd,
    OnTimeout,
    Route,
    Site,
    SlotState,
    Suspend,
    Tier,
    WaitPoint,
)
from kvbm_console.core.instructions import PauseEngine
from tests.core.engine_model import BLOCK

from .house import SECOND, House

COPYING = {"g1": 8, "g2": 16, "offload_threshold": 0.0}


def held_load(site: Site = Site.EVALUATE_WILL, **fields: object) -> House:
    """A house in which the load of request r is held at a site."""
    house = House(**COPYING)
    house.stored_below()
    house.stop_at(site, route=Route.G2_G1, one_shot=True, **fields)
    house.onboarding("r")
    return house


# --- continue, until, step ---


def test_a_lost_race_is_already_continued() -> None:
    house = held_load()
    number = house.hold.hold
    house.go_on(number)
    for kind in (st.HoldContinued, st.SlotStepped, st.CandidateSkipRequested):
        fields = (number, "late", None) if kind is st.HoldContinued else (number, "late")
        house.command(kind, *fields)
        assert house.why == "already_continued"


def test_until_a_state_stops_that_slot_once() -> None:
    house = held_load()
    house.command(st.HoldContinued, house.hold.hold, "me-7", SlotState.DECODING)
    house.move_all()
    house.step(3)
    assert (house.hold.owner, house.hold.breakpoints, house.hold.site) == ("me-7", (), Site.TRANSITION_DID)
    assert house.state_of("r") is SlotState.SKIPPED_DECODE
    house.go_on()
    house.step(3)
    assert not house.state.holds


def test_until_a_site_stops_that_slot_once() -> None:
    house = held_load()
    house.command(st.HoldContinued, house.hold.hold, "me-7", None, Site.COMPLETE_WILL)
    assert not house.state.holds
    house.move_all()
    assert (house.hold.owner, house.hold.site, house.hold.point) == ("me-7", Site.COMPLETE_WILL, WaitPoint.COMPLETION)
    house.go_on()
    assert not house.state.holds


def test_steps_go_from_site_to_site() -> None:
    house = held_load(Site.CANDIDATE_ENQUEUE)
    seen = []
    for _ in range(8):
        seen.append(house.hold.site)
        house.command(st.SlotStepped, house.hold.hold, "me")
        if not house.state.holds:
            house.move_all()
        if not house.state.holds:
            house.step(1)
        if not house.state.holds:
            break
    assert seen[:6] == [
        Site.CANDIDATE_ENQUEUE, Site.EVALUATE_WILL, Site.EVALUATE_DID, Site.PROMOTE_WILL, Site.DISPATCH_WILL,
        Site.COMPLETE_WILL,
    ]
    assert Site.TRANSITION_DID in seen[6:], "then the slot moves"


def test_continue_all_releases_every_hold() -> None:
    house = House(hold_budget_min=8)
    house.stop_at(to=SlotState.INITIALIZED)
    for name in "abc":
        house.arrive(name, "ab")
    assert len(house.state.holds) == 3
    house.go_on()
    assert house.ended == [HoldEnd.CONTINUED] * 3
    assert {event.by for event in house.ever(ev.HoldReleased)} == {"me"}


# --- skip ---


def test_skip_needs_a_candidate() -> None:
    house = House()
    house.stop_at(to=SlotState.DECODING)
    house.decoding("r")
    house.command(st.CandidateSkipRequested, house.hold.hold, "me")
    assert house.why == "request 'r' has no candidate that could be skipped"
    assert house.state.holds


def test_on_timeout_skip_candidate() -> None:
    house = held_load(on_timeout=OnTimeout.SKIP_CANDIDATE)
    assert house.hold.on_timeout is OnTimeout.SKIP_CANDIDATE
    house.expire("hold", house.hold.hold)
    assert house.ended == [HoldEnd.EXPIRED]
    assert house.state.totals.candidates_ended[CandidateStatus.SKIPPED] == 1
    assert house.woken == ["r"]
    house.step(2)
    assert house.state_of("r") is SlotState.DECODING, "it is computed instead"


# --- suspend pipeline, suspend all ---


def test_suspend_pipeline_closes_the_gate_for_all_candidates() -> None:
    house = held_load(suspend=Suspend.PIPELINE)
    assert house.state.pipeline_closed
    assert not house.state.engines_paused
    house.arrive("other", "xy")
    assert house.admit("other")
    house.step(2)
    assert house.state_of("other") is SlotState.DECODING, "engines go on"
    waiting = [one for one in house.state.candidates.values() if one.status is CandidateStatus.PENDING_EVALUATION]
    assert {one.slot for one in waiting} == {house.slot("r").slot, house.slot("other").slot}
    house.command(st.PipelineStepped, "me")
    assert not house.rejected
    assert house.mover.queued, "one candidate went through, and its copy is asked for"
    house.command(st.PipelineStepped, "me")
    assert house.why == "no candidate waits that could go on"
    house.go_on()
    assert not house.state.pipeline_closed
    house.move_all()
    assert all(one.status is not CandidateStatus.PENDING_EVALUATION for one in house.state.candidates.values())


def test_the_pipeline_is_stepped_only_while_it_is_closed() -> None:
    house = House()
    house.command(st.PipelineStepped, "me")
    assert house.why == "the pipeline is not closed: nothing is frozen and no hold suspends it"


def test_suspend_all_pauses_the_engines_for_as_long_as_the_hold_lasts() -> None:
    house = held_load(suspend=Suspend.ALL)
    assert (house.paused, house.state.engines_paused, house.state.pipeline_closed) == (1, True, True)
    house.go_on()
    assert (house.paused, house.state.engines_paused) == (0, False)


# --- freeze, thaw, run for ---


def test_freeze_and_thaw() -> None:
    house = House()
    house.command(st.FreezeRequested, "me-1", 30 * SECOND)
    assert house.paused == 1
    assert house.state.frozen is not None
    assert house.state.frozen.by == "me-1"
    house.command(st.FreezeRequested, "you", 30 * SECOND)
    assert house.why == "already frozen by me-1"
    house.command(st.ThawRequested, "you")
    assert house.paused == 0
    (thawed,) = house.ever(ev.Thawed)
    assert (thawed.why, thawed.by) == (HoldEnd.CONTINUED, "you")
    house.command(st.ThawRequested, "you")
    assert house.why == "already_thawed"


@pytest.mark.parametrize("max_hold_ns", [0, -1, 121 * SECOND])
def test_a_freeze_has_an_end(max_hold_ns: int) -> None:
    house = House()
    house.command(st.FreezeRequested, "me", max_hold_ns)
    assert house.why.startswith("max_hold_ns must be above 0 and at most 120000000000")
    house.command(st.RunForRequested, SECOND, "me", max_hold_ns)
    assert house.rejected


def test_a_freeze_ends_by_its_deadline_on_the_wall() -> None:
    house = House()
    house.command(st.FreezeRequested, "me", 5 * SECOND)
    ((clock, due),) = house.deadlines.values()
    assert (clock, due - house.now) == (Clock.WALL, 5 * SECOND)
    house.expire("freeze")
    assert house.state.frozen is None
    assert [event.why for event in house.ever(ev.Thawed)] == [HoldEnd.EXPIRED]
    assert house.paused == 0


def test_run_for_goes_on_for_a_while_of_engine_time_and_freezes_again() -> None:
    house = House()
    house.command(st.FreezeRequested, "me", 30 * SECOND)
    house.command(st.RunForRequested, SECOND // 5, "me", 9 * SECOND)
    assert house.paused == 0
    ((clock, due),) = house.deadlines.values()
    assert (clock, due - house.now) == (Clock.ENGINE, SECOND // 5)
    house.decoding("r")
    house.expire("run_for")
    assert house.paused == 1
    assert house.state.frozen is not None
    assert house.state.frozen.max_hold_ns == 9 * SECOND
    house.command(st.ThawRequested, "me")
    assert not house.deadlines


def test_a_freeze_ends_a_run() -> None:
    house = House()
    house.command(st.RunForRequested, SECOND, "me", SECOND)
    house.command(st.FreezeRequested, "me", SECOND)
    assert [purpose for purpose, _ in house.leader.memory.deadlines.values()] == ["freeze"]


def test_a_breakpoint_can_freeze() -> None:
    house = House()
    number = house.stop_at(to=SlotState.DECODING, action=BreakpointAction.FREEZE, max_hold_ns=7 * SECOND)
    house.decoding("r")
    assert house.paused == 1
    assert house.state.frozen is not None
    assert (house.state.frozen.by, house.state.frozen.max_hold_ns) == ("me", 7 * SECOND)
    assert [event.breakpoints for event in house.ever(ev.BreakpointHit)] == [(number,)]
    assert not house.state.holds


def test_a_second_engine_is_paused_too_when_it_declares_itself() -> None:
    house = House()
    house.command(st.FreezeRequested, "me", SECOND)
    house.tell(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 8, BLOCK, Authority.ENGINE, source=2)
    assert house.asked == [PauseEngine(2)]
    assert house.leader.memory.paused == [1, 2]


# --- disarm, expiry ---


def test_disarm_mutes_and_releases_everything() -> None:
    house = House(hold_budget_min=8)
    house.stop_at(to=SlotState.INITIALIZED)
    house.stop_at(to=SlotState.INITIALIZED, owner="you", suspend=Suspend.ALL)
    house.arrive("a", "ab")
    house.command(st.SlotStepped, house.hold.hold, "me")
    house.arrive("b", "ab")
    house.command(st.FreezeRequested, "me", SECOND)
    house.command(st.Disarmed, "you")
    assert not house.state.holds
    assert house.state.frozen is None
    assert house.paused == 0
    assert not any(known.enabled for known in house.state.breakpoints.values())
    assert house.leader.gate is None
    assert len(house.state.breakpoints) == 2, "muted, not removed"


def test_a_breakpoint_expires() -> None:
    house = House()
    number = house.stop_at(to=SlotState.INITIALIZED, expires_ns=3 * SECOND)
    ((clock, due),) = house.deadlines.values()
    assert (clock, due - house.now) == (Clock.WALL, 3 * SECOND)
    house.breaks(BreakpointSpec(id=number, to_state=SlotState.INITIALIZED, expires_ns=3 * SECOND))
    assert len(house.deadlines) == 1, "said again is not begun again"
    house.expire("expiry", number)
    (stopped,) = house.ever(ev.BreakpointStopped)
    assert (stopped.breakpoint, stopped.why, stopped.message) == (number, BreakpointEnd.EXPIRED, "after 3 s")
    house.arrive("a", "ab")
    assert not house.state.holds


def test_a_removed_breakpoint_leaves_no_deadline() -> None:
    house = House()
    house.stop_at(to=SlotState.INITIALIZED)
    house.breaks()
    assert not house.deadlines
    assert not house.leader.memory.deadlines


def test_an_expiry_survives_a_reset() -> None:
    house = House()
    number = house.stop_at(to=SlotState.INITIALIZED)
    house.command(st.FreezeRequested, "me", SECOND)
    house.reset()
    assert house.state.frozen is None
    assert house.paused == 0
    house.expire("expiry", number)
    assert not house.state.breakpoints[number].enabled


def test_until_stops_at_a_call_although_no_breakpoint_watches_calls() -> None:
    house = House()
    house.stop_at(to=SlotState.INITIALIZED, one_shot=True)
    house.arrive("r", "ab")
    house.command(st.HoldContinued, house.hold.hold, "me", None, Site.CALL_DID)
    assert not house.state.holds
    house.lookup("r")
    assert house.hold.site is Site.CALL_DID
