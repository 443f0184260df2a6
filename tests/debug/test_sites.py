"""Every site stops a slot at its waitable point; everything else goes on; a continue lets exactly that slot go on."""

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.holds import POINT_OF_SITE, POINT_OF_STATE
from kvbm_console.core.ids import CandidateStatus, HoldEnd, Route, Site, SkipReason, SlotState, Tier, WaitPoint

from .house import House

COPYING = {"g1": 8, "g2": 16, "offload_threshold": 0.0}
OF_A_LOAD = [
    Site.CANDIDATE_ENQUEUE, Site.EVALUATE_WILL, Site.EVALUATE_DID, Site.PROMOTE_WILL, Site.DISPATCH_WILL,
    Site.COMPLETE_WILL,
]


@pytest.mark.parametrize("site", OF_A_LOAD, ids=lambda site: site.label)
def test_sites_of_the_pipeline_hold_a_load_until_it_is_continued(site: Site) -> None:
    house = House(**COPYING)
    house.stored_below()
    house.stop_at(site, route=Route.G2_G1)
    house.onboarding("held")
    if site is Site.COMPLETE_WILL:
        house.move_all()
    hold = house.hold
    assert (hold.site, hold.point, hold.parked) == (site, POINT_OF_SITE[site], True)
    (candidate,) = (house.state.candidates[number] for number in house.slot("held").outstanding)
    promoted = site in (Site.DISPATCH_WILL, Site.COMPLETE_WILL)
    assert (candidate.status is CandidateStatus.PROMOTED) is promoted
    assert (candidate.found is not None) is (site not in (Site.CANDIDATE_ENQUEUE, Site.EVALUATE_WILL))
    house.go_on(hold.hold)
    assert not house.state.holds, "a site that was passed once does not stop the same candidate again"
    house.move_all()
    assert house.woken == ["held"]
    house.step(2)
    assert house.state_of("held") is SlotState.DECODING


def test_others_are_copied_while_one_candidate_is_held() -> None:
    house = House(**COPYING)
    house.stored_below()
    house.stop_at(Site.EVALUATE_WILL, request="held")
    house.onboarding("held")
    assert house.hold.point is WaitPoint.EVALUATE
    house.arrive("other", "xy")
    assert house.admit("other")
    house.step(2)
    house.move_all()
    assert house.state_of("other") is SlotState.DECODING
    assert house.slot("held").outstanding, "still waits"


def test_a_skip_holds_the_slot_that_wanted_the_copy() -> None:
    house = House(**COPYING)
    house.stored_below()
    house.stop_at(Site.EVALUATE_WILL, one_shot=True)
    house.onboarding("r")
    house.stop_at(Site.SKIP_DID, status=CandidateStatus.SKIPPED, owner="another")
    house.command(st.CandidateSkipRequested, house.hold.hold, "me")
    assert house.ended == [HoldEnd.SKIPPED]
    assert [event.reason for event in house.ever(ev.CandidateSkipped)] == [SkipReason.OPERATOR]
    assert (house.hold.site, house.hold.point) == (Site.SKIP_DID, WaitPoint.PROMOTE)
    house.go_on()
    house.step(2)
    assert house.state_of("r") is SlotState.DECODING, "what was not loaded is computed"


def test_evict_will_holds_the_slot_that_wants_the_room() -> None:
    house = House(g1=5, g2=4, offload_threshold=0.0)
    house.arrive("cold", "abcd")
    assert house.admit("cold")
    house.step(1)
    house.finish("cold")
    house.move_all()
    house.stop_at(Site.EVICT_WILL, tier=Tier.G2)
    house.arrive("hot", "wxyz")
    assert house.admit("hot")
    house.step(1)
    assert (house.hold.slot, house.hold.point) == (house.slot("hot").slot, WaitPoint.PROMOTE)
    assert not house.told(ev.BlocksEvicted)
    house.go_on()
    assert not house.state.holds
    assert house.told(ev.BlocksEvicted)


def test_request_finish_withholds_the_blocks() -> None:
    house = House()
    house.decoding("r")
    house.stop_at(Site.REQUEST_FINISH)
    assert house.finish("r"), "the blocks stay allocated"
    assert (house.hold.point, house.hold.parked) == (WaitPoint.RELEASE, True)
    assert house.state_of("r") is SlotState.FINISHING
    assert house.released == []
    house.go_on()
    assert [name for name, _ in house.released] == ["r"]
    assert not house.state.slots


@pytest.mark.parametrize("site", [Site.TRANSITION_WILL, Site.TRANSITION_DID], ids=lambda site: site.label)
@pytest.mark.parametrize(
    "state",
    [SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, SlotState.PREFILLING,
     SlotState.SKIPPED_PREFILL, SlotState.DECODING, SlotState.SKIPPED_DECODE, SlotState.PREEMPTED,
     SlotState.FINISHING],
    ids=lambda state: state.label,
)
def test_every_state_holds_at_its_next_waitable_point(site: Site, state: SlotState) -> None:
    if (site, state) == (Site.TRANSITION_WILL, SlotState.INITIALIZED):
        pytest.skip("nobody moves into initialized but by the staging deadline")
    house = House(**COPYING)
    house.stored_below()
    house.stop_at(site, state, request="r", one_shot=True)
    bring_to(house, "r", state)
    hold = house.hold
    assert hold.point is POINT_OF_STATE[state]
    assert house.state_of("r") is state
    house.go_on()
    assert not house.state.holds


def bring_to(house: House, name: str, state: SlotState) -> None:
    """Drive a request into a state."""
    house.arrive(name, "abcd")
    if state is SlotState.INITIALIZED:
        return
    house.lookup(name)
    if state is SlotState.ONBOARD_STAGED:
        return
    house.allocate(name)
    if state is SlotState.ONBOARDING:
        return
    house.move_all()
    house.schedule(chunk=1)
    house.complete()
    if state is SlotState.SKIPPED_PREFILL:
        house.step(only=[])
    elif state in (SlotState.DECODING, SlotState.SKIPPED_DECODE):
        while house.state_of(name) is SlotState.PREFILLING:
            house.step(1)
        if state is SlotState.SKIPPED_DECODE:
            house.step(only=[])
    elif state is SlotState.PREEMPTED:
        house.preempt(name)
    elif state is SlotState.FINISHING:
        house.step(6)
        assert house.mover.queued, "a copy of its new block has not begun"
        house.finish(name)


def test_a_finished_slot_becomes_a_snapshot() -> None:
    house = House()
    house.decoding("r")
    house.stop_at(to=SlotState.FINISHED)
    house.finish("r")
    (captured,) = house.ever(ev.SlotCaptured)
    shown = dict(zip(captured.names, captured.values, strict=True))
    assert (shown["request"], shown["state"]) == ("r", "finished")
    assert not house.state.holds
    assert not house.state.slots


def test_call_sites_hold_a_lookup_before_and_after_it() -> None:
    house = House(**COPYING)
    house.stored_below()
    house.stop_at(Site.CALL_WILL, request="r")
    house.arrive("r", "abcd")
    assert (house.hold.site, house.hold.point) == (Site.CALL_WILL, WaitPoint.LOOKUP)
    assert house.lookup("r") is None
    house.go_on()
    assert house.lookup("r"), "the repeated lookup is the call that stood still"
    assert house.state_of("r") is SlotState.ONBOARD_STAGED


def test_several_matches_at_one_site_make_one_hold_with_all_ids() -> None:
    house = House()
    first, second = house.breaks(*[BreakpointSpec(to_state=SlotState.DECODING)] * 2)
    third = house.stop_at(to=SlotState.DECODING, owner="another")
    house.decoding("r")
    assert house.hold.breakpoints == (first, second, third)
    assert len(house.ever(ev.SlotHeld)) == 1
    (hit,) = house.ever(ev.BreakpointHit)
    assert hit.breakpoints == (first, second, third)


def test_coming_back_from_a_hold_is_no_arrival() -> None:
    """A breakpoint on decoding leaves the request out; its way back must not hit the same breakpoint for ever."""
    house = House()
    house.stop_at(to=SlotState.DECODING)
    house.decoding("r")
    house.step(1)
    assert house.state_of("r") is SlotState.SKIPPED_DECODE
    house.go_on()
    house.step(2)
    assert house.state_of("r") is SlotState.DECODING
    assert not house.state.holds
    house.step(only=[])
    house.step(1)
    assert house.hold.site is Site.TRANSITION_DID, "but coming back from another's decision is one"


def test_a_clone_is_stopped_by_its_own_name() -> None:
    house = House(g2=0)
    house.stop_at(Site.REQUEST_FINISH, request="there-*")
    house.decoding("other")
    house.clone("other", "there-2", "elsewhere")
    house.finish("elsewhere")
    assert not house.state.holds
    house.finish("there-2")
    assert house.state.slots[house.hold.slot].request == "there-2"
