"""The nine safety rules: what keeps a debugger from wedging production, each with a test.

Law of this file: a test is named after its rule.
"""

import msgspec
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.breakpoints import HOLDS_MAX, hold_budget
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import (
    BreakpointAction,
    BreakpointEnd,
    Clock,
    FinishReason,
    HoldEnd,
    Note,
    Site,
    SlotState,
    Suspend,
)

from .house import SECOND, House


def test_rule_1_nothing_armed_is_no_gate_and_a_hold_blocks_nobody_else() -> None:
    house = House()
    assert house.leader.gate is None
    house.stop_at(to=SlotState.DECODING, request="held")
    assert house.leader.gate is not None
    house.decoding("held")
    house.decoding("other")
    house.step(3)
    held, other = house.slot("held"), house.slot("other")
    assert (held.state, other.state) == (SlotState.SKIPPED_DECODE, SlotState.DECODING)
    assert other.computed_tokens(house.state.iteration) > held.computed_tokens(house.state.iteration)
    house.breaks()
    assert house.leader.gate is None


def test_rule_2_a_hold_ends_by_its_own_deadline_of_30_seconds_by_default() -> None:
    house = House()
    house.stop_at(to=SlotState.INITIALIZED, one_shot=True)
    house.arrive("r", "ab")
    (due,) = [(clock, due - house.now) for number, (clock, due) in house.deadlines.items()
              if house.leader.memory.deadlines[number][0] == "hold"]
    assert due == (Clock.WALL, 30 * SECOND)
    house.expire("hold", house.hold.hold)
    assert house.ended == [HoldEnd.EXPIRED]


def test_rule_2_the_shortest_of_several_limits_counts() -> None:
    house = House()
    house.stop_at(to=SlotState.INITIALIZED, max_hold_ns=9 * SECOND)
    house.stop_at(to=SlotState.INITIALIZED, max_hold_ns=3 * SECOND, owner="you")
    house.arrive("r", "ab")
    assert house.hold.max_hold_ns == 3 * SECOND


def test_rule_3_a_lost_lease_ends_what_its_owner_holds_freezes_and_asked_for() -> None:
    house = House(hold_budget_min=8)
    for owner in ("me", "you"):
        house.command(st.LeaseGranted, owner)
        house.stop_at(to=SlotState.INITIALIZED, request=f"{owner}*", owner=owner)
        house.arrive(f"{owner}-1", "ab")
        house.arrive(f"{owner}-2", "ab")
    first = next(iter(house.state.holds))
    house.command(st.SlotStepped, first, "me")
    house.command(st.FreezeRequested, "me", SECOND)
    house.lose("me")
    assert {house.state.slots[hold.slot].request for hold in house.state.holds.values()} == {"you-1", "you-2"}
    assert house.state.frozen is None
    assert house.leader.memory.stepping == {}
    enabled = {known.owner: known.enabled for known in house.state.breakpoints.values()}
    assert enabled == {"me": False, "you": True}, "disabled, not deleted"
    assert [event.why for event in house.last if isinstance(event, ev.HoldReleased)] == [HoldEnd.LEASE_LOST]


def two_owners() -> House:
    """One hold that breakpoints of two owners asked for at the same site."""
    house = House()
    for owner in ("me", "you"):
        house.command(st.LeaseGranted, owner)
        house.stop_at(to=SlotState.INITIALIZED, owner=owner)
    house.arrive("r", "ab")
    assert house.hold.breakpoints == (1, 2)
    return house


@pytest.mark.parametrize("order", [("me", "you"), ("you", "me")])
def test_rule_3_a_hold_of_two_owners_ends_with_the_last_of_them(order: tuple[str, str]) -> None:
    house = two_owners()
    house.lose(order[0])
    assert house.state.holds, "the other one still looks at it"
    house.lose(order[1])
    assert house.ended == [HoldEnd.LEASE_LOST]


def test_rule_3_who_took_its_breakpoint_away_holds_nothing_any_more() -> None:
    house = two_owners()
    house.breaks(owner="you")
    house.lose("me")
    assert house.ended == [HoldEnd.LEASE_LOST]


def test_rule_3_an_owner_that_comes_back_finds_armed_what_nobody_touched_meanwhile() -> None:
    house = House()
    house.command(st.LeaseGranted, "me")
    specs = (
        BreakpointSpec(id=0, to_state=SlotState.DECODING), BreakpointSpec(site=Site.SKIP_DID),
        BreakpointSpec(to_state=SlotState.INITIALIZED, one_shot=True), BreakpointSpec(site=Site.EVICT_WILL),
    )
    house.command(st.BreakpointsReplaced, "me", specs)
    house.arrive("r", "ab")
    house.lose("me")
    assert not any(known.enabled for known in house.state.breakpoints.values())
    muted = tuple(
        msgspec.structs.replace(known.spec, enabled=known.spec.id != 2) for known in house.state.breakpoints.values()
    )
    house.command(st.BreakpointsReplaced, "me", muted, "you")
    house.command(st.BreakpointOverran, 4, "it cost too much")
    house.command(st.LeaseGranted, "me", True)
    found = {number: (known.enabled, known.message) for number, known in house.state.breakpoints.items()}
    assert found == {
        1: (True, ""), 2: (False, "muted by you"), 3: (False, ""), 4: (False, "overrun: it cost too much"),
    }, "the second was muted by somebody else, the third has had its hit, the fourth was stopped"
    assert house.ever(ev.BreakpointsChanged)[-1].by == "you", "who did it is on the record"
    assert house.leader.gate is not None


def test_rule_3_a_disarm_is_not_undone_by_an_owner_that_comes_back() -> None:
    house = House()
    house.command(st.LeaseGranted, "me")
    house.stop_at(to=SlotState.DECODING)
    house.lose("me")
    house.command(st.Disarmed, "you")
    house.command(st.LeaseGranted, "me", True)
    assert house.leader.gate is None
    assert house.ever(ev.BreakpointsChanged)[-1].by == "you"


def test_rule_4_beyond_the_budget_a_hit_is_a_log_and_each_refused_hold_leaves_a_trace() -> None:
    house = House(hold_budget_min=2, hold_budget_share=0.0)
    number = house.stop_at(to=SlotState.INITIALIZED)
    for name in "abcde":
        house.arrive(name, "ab")
    assert len(house.state.holds) == 2
    actions = [event.action for event in house.ever(ev.BreakpointHit)]
    assert actions == [BreakpointAction.HOLD] * 2 + [BreakpointAction.LOG] * 3
    assert [event.why for event in house.ever(ev.HoldDenied)] == ["the budget of 2 holds is used up"] * 3
    assert house.state.breakpoints[number].hits == 5
    assert house.state.totals.hold_denied == 3
    house.go_on(next(iter(house.state.holds)))
    for name in "fgh":
        house.arrive(name, "ab")
    assert len(house.ever(ev.HoldDenied)) == 5, "the first of these takes the free place"


def test_rule_4_held_slots_own_at_most_a_share_of_the_device_pool() -> None:
    house = House(g1=16, hold_budget_min=8, pressure_share=0.5)
    house.stop_at(to=SlotState.DECODING)
    house.decoding("first", "abcdefghij")
    assert len(house.state.holds) == 1, "the first hold always begins, whatever it owns"
    house.arrive("second", "kl")
    assert house.admit("second")
    house.step(2)
    assert len(house.state.holds) == 1
    (denied,) = house.ever(ev.HoldDenied)
    assert denied.why == (
        "held requests would own 14 of 16 device blocks, more than the 50% that others can spare"
    )


@pytest.mark.parametrize(("live", "budget"), [(0, 4), (16, 4), (40, 10), (256, 64), (100_000, HOLDS_MAX)])
def test_rule_4_the_budget(live: int, budget: int) -> None:
    assert hold_budget(live, 4, 0.25) == budget


def test_rule_4_what_the_copy_of_a_preempted_request_reads_counts_as_held() -> None:
    house = House(g1=16, g2=16, offload_threshold=0.0, hold_budget_min=8, pressure_share=0.5)
    house.stop_at(Site.COMPLETE_WILL, request="copies")
    house.arrive("copies", "abcdefgh", tail=0)
    assert house.admit("copies")
    house.step(1)
    house.start(house.operation_of("copies"))
    house.preempt("copies")
    house.move_all()
    assert house.hold.parked
    assert not house.slot("copies").device_blocks
    house.stop_at(to=SlotState.DECODING, owner="another")
    house.decoding("late", "kl")
    assert len(house.state.holds) == 1
    assert house.ever(ev.HoldDenied)[-1].why.startswith("held requests would own 11 of 16 device blocks")


def test_rule_5_every_host_reaches_the_same_hold_by_itself() -> None:
    house = House(hosts=3, g1=8, offload_threshold=0.0)
    house.stored_below()
    house.stop_at(Site.EVALUATE_WILL, suspend=Suspend.ALL, condition="tokens.prompt > 4")
    house.onboarding("r")
    assert [list(host.state.holds) for host in house.hosts] == [[1], [1], [1]]
    assert house.paused == 1, "only the instructions of host 0 run"
    house.command(st.HoldContinued, 1, "me", None, Site.COMPLETE_WILL)
    house.move_all()
    assert [host.digest() for host in house.hosts] == [house.leader.digest()] * 3
    assert [host.memory_digest() for host in house.hosts] == [house.leader.memory_digest()] * 3
    assert house.state.holds


@pytest.mark.parametrize("how", ["finished", "aborted", "preempted"])
def test_rule_6_what_ends_a_request_ends_its_hold(how: str) -> None:
    house = House()
    house.stop_at(to=SlotState.DECODING, one_shot=True)
    house.decoding("r")
    assert house.state.holds
    if how == "preempted":
        house.preempt("r")
        assert house.state_of("r") is SlotState.PREEMPTED
    else:
        house.finish("r", FinishReason.STOP if how == "finished" else FinishReason.ABORTED)
        assert not house.state.slots
    assert house.ended == [HoldEnd.CANCELLED]


def test_rule_6_the_transition_that_hit_is_not_cancelled_by_itself() -> None:
    house = House()
    house.stop_at(to=SlotState.PREEMPTED, one_shot=True)
    house.decoding("r")
    house.preempt("r")
    assert house.hold.site is Site.TRANSITION_DID
    assert house.lookup("r") is None
    house.go_on()
    assert house.lookup("r") is not None


def test_rule_6_a_shutdown_lets_everything_go_first() -> None:
    house = House(hold_budget_min=8)
    house.stop_at(to=SlotState.INITIALIZED)
    house.arrive("a", "ab")
    house.arrive("b", "ab")
    house.command(st.FreezeRequested, "me", SECOND)
    house.command(st.NoteReported, Note.SHUTTING_DOWN, "")
    assert house.ended == [HoldEnd.SHUTDOWN] * 2
    assert [event.why for event in house.ever(ev.Thawed)] == [HoldEnd.SHUTDOWN]
    assert type(house.last[-1]) is ev.Noted
    assert house.paused == 0


# --- rule 7 ---


def pressed(**config: object) -> House:
    """Two held slots with blocks, and a third that decodes and can be preempted."""
    house = House(g1=16, hold_budget_min=8, pressure_share=0.5, **config)
    house.stop_at(to=SlotState.DECODING, request="held*")
    house.decoding("held-1", "ab")
    house.decoding("held-2", "cd")
    house.decoding("free", "ef")
    assert len(house.state.holds) == 2
    return house


def test_rule_7_preempted_and_refused_within_two_seconds_lets_the_oldest_hold_go() -> None:
    house = pressed()
    house.finish("free")
    oldest = min(house.state.holds)
    house.arrive("large", "mnopqrstu")
    assert house.admit("large"), "it has just room for its prompt"
    house.step(3)
    house.preempt("large")
    house.lookup("large")
    assert house.ended == []
    house.lookup("large")
    assert house.ended == [HoldEnd.PRESSURE]
    (released,) = house.ever(ev.HoldReleased)
    assert (released.hold, released.by) == (oldest, "large")
    assert len(house.state.holds) == 1


def test_rule_7_refused_twice_within_two_seconds_does_the_same() -> None:
    house = pressed()
    house.arrive("late", "mnopqrstuv")
    for expected in ([], [], [HoldEnd.PRESSURE]):
        assert house.lookup("late") == 0, "answered, and the engine has no room: it asks again"
        assert house.ended == expected


def test_rule_7_not_when_the_second_time_comes_late_or_concerns_another() -> None:
    house = pressed()
    house.arrive("large", "mnopqrstuv")
    house.lookup("large")
    house.lookup("large")
    house.now += 2 * SECOND + 1
    house.arrive("late", "mnopqrstuv")
    house.lookup("late")
    house.lookup("late")
    house.lookup("large")
    assert house.ended == []


def test_rule_7_not_when_the_held_slots_own_no_blocks_there() -> None:
    house = House(g1=8, hold_budget_min=8)
    house.stop_at(to=SlotState.INITIALIZED, request="held*")
    house.arrive("held-1", "ab")
    house.arrive("late", "mnopqrs")
    for _ in range(4):
        house.lookup("late")
    assert house.ended == []


@pytest.mark.parametrize(("blocks", "why"), [
    ("mnop", "it fits beside what is held, once a request that is not held has ended"),
    ("mnopqrstuvwxyzijk", "it never fits, held or not"),
    ("abcdefghij", "its prefix is what a held request owns"),
])
def test_rule_7_counts_only_what_would_fit_if_nothing_were_held(blocks: str, why: str) -> None:
    house = pressed()
    house.arrive("late", blocks)
    for _ in range(4):
        house.lookup("late")
    assert house.ended == [], why
    assert len(house.state.holds) == 2


# --- rules 8 and 9 ---


def test_rule_8_a_breakpoint_expires_after_an_hour_by_default() -> None:
    assert BreakpointSpec().expires_ns == 3_600 * SECOND


def test_rule_8_an_overrun_disables_the_breakpoint_with_a_reason() -> None:
    house = House()
    number = house.stop_at(to=SlotState.INITIALIZED, condition="live > 0")
    house.command(st.BreakpointOverran, number, "its condition took 12 ms of the last second")
    (stopped,) = house.ever(ev.BreakpointStopped)
    assert (stopped.breakpoint, stopped.why) == (number, BreakpointEnd.OVERRUN)
    assert house.leader.gate is None
    house.command(st.BreakpointOverran, number, "again")
    assert not house.last, "an overrun of one that is disabled already comes too late"


def test_rule_8_what_conditions_cost_is_counted_by_the_shells_clock() -> None:
    house = House(twin=False)
    ticks = iter(range(0, 10**9, 1_000))
    house.leader.meter = lambda: next(ticks)
    number = house.stop_at(to=SlotState.INITIALIZED, condition="live > 100")
    for at in range(16):
        house.arrive(f"r{at}", "ab")
    assert house.leader.condition_ns == {number: 2 * 8 * 1_000}, "two of sixteen were timed, and count for eight each"


def test_rule_9_held_time_is_recorded() -> None:
    house = House()
    house.stop_at(to=SlotState.INITIALIZED)
    house.arrive("r", "ab")
    assert house.state.all_held is False, "pending: it has not come to a waitable point"
    house.lookup("r")
    assert house.state.all_held, "everything in flight stands still: the banner's condition"
    began = house.hold.since_ns
    house.now += 5 * SECOND
    house.go_on()
    (released,) = house.ever(ev.HoldReleased)
    assert released.held_ns == released.at_ns - began
    assert released.held_ns > 5 * SECOND
