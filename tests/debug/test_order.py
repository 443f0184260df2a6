"""The fixed order of evaluation, one step after the other, and what each of them counts.

Law of this file: what a later step would do is never seen when an earlier one says no.
"""

from typing import Any

import pytest

from kvbm_console.core import breakpoints as bp
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import BreakpointAction, BreakpointEnd, Site, SlotState
from kvbm_console.core.leader import holds

from .house import House

LOG = BreakpointAction.LOG


def arrivals(house: House, *names: str) -> None:
    """Requests that pass the site ``transition.did`` into ``initialized``."""
    for name in names:
        house.arrive(name, "ab")


def hits(house: House, number: int) -> list[str]:
    """The requests at which this breakpoint took effect."""
    names = {event.slot: event.request for event in house.ever(ev.SlotOpened)}
    return [names[event.slot] for event in house.ever(ev.BreakpointHit) if number in event.breakpoints]


def logs(house: House, **fields: Any) -> int:
    return house.stop_at(to=SlotState.INITIALIZED, action=LOG, **fields)


ABC = ("a", "b", "c", "d", "e", "f", "g")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "abcdefg"), ({"request": "[b-d]"}, "bcd"), ({"enabled": False}, ""),
        ({"from_state": SlotState.DECODING}, ""), ({"condition": "to = initialized and not held"}, "abcdefg"),
        ({"ignore_count": 2}, "cdefg"), ({"hit_condition": "==3"}, "c"), ({"hit_condition": ">=3"}, "cdefg"),
        ({"hit_condition": "%3"}, "cf"), ({"hit_condition": "%2", "ignore_count": 1}, "ceg"), ({"one_shot": True}, "a"),
        ({"one_shot": True, "hit_condition": "==2"}, "b"), ({"condition": "live > 4"}, "efg"),
        ({"condition": "request ~ [bd] or slot = 5"}, "bdf"), ({"condition": "live > 2", "hit_condition": "%2"}, "df"),
        ({"condition": "live > 2", "ignore_count": 2}, "efg"),
    ],
)
def test_match_then_condition_then_count_then_ignore_and_hit_condition(fields: dict[str, Any], expected: str) -> None:
    house = House()
    number = logs(house, **fields)
    arrivals(house, *ABC)
    assert "".join(hits(house, number)) == expected
    assert house.state.breakpoints[number].hits == len(expected)


def test_a_dependency_is_asked_before_the_match() -> None:
    house = House()
    first, second = house.breaks(
        BreakpointSpec(to_state=SlotState.INITIALIZED, request="c", action=LOG),
        BreakpointSpec(to_state=SlotState.INITIALIZED, action=LOG, depends_on=1, hit_condition="==2"),
    )
    assert (first, second) == (1, 2)
    arrivals(house, *ABC)
    assert hits(house, first) == ["c"]
    assert hits(house, second) == ["e"], "at c itself the first has not taken effect when the second is asked"


def test_a_dependency_that_cannot_be_met_is_told_at_once() -> None:
    house = House()
    (verdict,) = house.tell(st.BreakpointsReplaced, "me", (BreakpointSpec(depends_on=9),), source=0)
    assert not verdict.verified
    assert verdict.message == "breakpoint 9, on which it depends, does not exist"
    itself = BreakpointSpec(id=verdict.id, depends_on=verdict.id)
    (verdict,) = house.tell(st.BreakpointsReplaced, "me", (itself,), source=0)
    assert "depends on itself" in verdict.message


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"condition": "tokns > 1"}, "condition, column 1: a condition has no field `tokns`"),
        ({"condition": "held and"}, "condition, column 9: expected the name of a field"),
        ({"log": "saw {requst}"}, "log, column 6: a condition has no field `requst`; the nearest is `request`"),
    ],
)
def test_an_expression_that_is_not_understood_is_refused_when_it_is_set(fields: dict[str, Any], why: str) -> None:
    house = House()
    house.stop_at(request="keep", action=LOG)
    house.command(st.BreakpointsReplaced, "me", (BreakpointSpec(**fields),))
    assert house.why.startswith(why)
    assert [known.spec.request for known in house.state.breakpoints.values()] == ["keep"], "nothing changed"


@pytest.mark.parametrize("ids", [(9,), (-1,), (1, 1)], ids=str)
def test_an_id_that_was_not_given_out_is_refused(ids: tuple[int, ...]) -> None:
    house = House()
    house.stop_at(request="keep", action=LOG)
    house.command(st.BreakpointsReplaced, "me", tuple(BreakpointSpec(id=number) for number in ids))
    assert "was not given out or stands twice" in house.why
    assert list(house.state.breakpoints) == [1], "nothing changed"


@pytest.mark.parametrize(
    "fields",
    [{"hit_condition": "3"}, {"hit_condition": "==0"}, {"hit_condition": "%"}, {"condition": "x" * 1_025},
     {"log": "x" * 257}, {"name": "n" * 65}, {"expires_ns": 0}, {"expires_ns": 25 * 3_600 * 10**9}, {"depends_on": -1},
     {"max_hold_ns": 121 * 10**9}, {"ignore_count": -1}, {"ignore_count": 2**60}, {"depends_on": 2**60},
     {"id": 2**60}],
)
def test_a_specification_out_of_bounds_names_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        BreakpointSpec(**fields)


def test_a_condition_that_fails_turns_the_breakpoint_failed_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise ZeroDivisionError("of our own making")

    house = House()
    good = logs(house)
    monkeypatch.setattr(bp, "compile_condition", lambda text: broken)
    bad = house.stop_at(to=SlotState.INITIALIZED, action=LOG, condition="slot = 0", owner="another")
    monkeypatch.undo()
    house.twin = False  # the rerun would compile the condition anew
    house._keyframe = None
    arrivals(house, "a", "b")
    (stopped,) = house.ever(ev.BreakpointStopped)
    assert (stopped.breakpoint, stopped.why) == (bad, BreakpointEnd.FAILED)
    assert stopped.message == "condition: of our own making"
    assert not house.state.breakpoints[bad].enabled
    assert house.state.breakpoints[bad].message == "failed: condition: of our own making"
    assert hits(house, good) == ["a", "b"]
    assert not house.rejected


def test_a_hold_and_a_snapshot_say_what_their_templates_say() -> None:
    house = House()
    house.breaks(
        BreakpointSpec(to_state=SlotState.INITIALIZED, log="{request} arrived"),
        BreakpointSpec(to_state=SlotState.INITIALIZED, log="look at {request}"),
        BreakpointSpec(to_state=SlotState.INITIALIZED, log="{live} live", action=BreakpointAction.SNAPSHOT),
    )
    house.arrive("r", "ab")
    said = {event.action: event.message for event in house.ever(ev.BreakpointHit)}
    assert said == {BreakpointAction.SNAPSHOT: "1 live", BreakpointAction.HOLD: "r arrived; look at r"}


def test_a_log_says_what_its_template_says() -> None:
    house = House()
    logs(house, log="{request} arrived at {site}, {tiers.g1.available} free")
    arrivals(house, "chat-1")
    (hit,) = house.ever(ev.BreakpointHit)
    assert hit.message == "chat-1 arrived at transition.did, 16 free"
    assert not house.state.holds


def test_the_age_at_a_move_is_that_in_the_state_it_leaves() -> None:
    house = House()
    house.stop_at(to=SlotState.PREEMPTED, action=LOG, log="preempted {request} after {age}", condition="age > 1 s")
    house.decoding("r")
    house.now += 3 * 10**9
    house.preempt("r")
    (hit,) = house.ever(ev.BreakpointHit)
    assert hit.message == "preempted r after 3 s"


def test_too_many_messages_in_a_second_disable_the_breakpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "LOGS_PER_SECOND_MAX", 3)
    house = House()
    number = logs(house, log="{request}")
    arrivals(house, "a", "b", "c")
    house.now += 2 * 10**9
    arrivals(house, "d", "e", "f")
    assert house.state.breakpoints[number].enabled, "three a second are allowed"
    arrivals(house, "g", "h")
    assert [event.message for event in house.ever(ev.BreakpointHit)] == list("abcdef")
    (stopped,) = house.ever(ev.BreakpointStopped)
    assert (stopped.breakpoint, stopped.why) == (number, BreakpointEnd.OVERRUN)
    assert house.leader.gate is None, "nothing is armed any more"


def test_a_snapshot_puts_the_values_on_the_record_and_holds_nothing() -> None:
    house = House()
    number = house.stop_at(to=SlotState.DECODING, action=BreakpointAction.SNAPSHOT, request="r")
    house.decoding("r")
    (captured,) = house.ever(ev.SlotCaptured)
    assert captured.breakpoints == (number,)
    assert dict(zip(captured.names, captured.values, strict=True))["tokens.prompt"] == "18"
    assert not house.state.holds


def test_all_actions_at_one_site_happen_in_their_order() -> None:
    house = House()
    site = {"to_state": SlotState.DECODING}
    house.breaks(*(BreakpointSpec(**site, action=action) for action in BreakpointAction))
    house.decoding("r")
    kinds = [type(event).__name__ for event in house.events if type(event) in (
        ev.BreakpointHit, ev.SlotCaptured, ev.Frozen, ev.SlotHeld)]
    assert kinds == ["BreakpointHit", "BreakpointHit", "SlotCaptured", "BreakpointHit", "Frozen", "BreakpointHit",
                     "SlotHeld"]
    assert [event.action for event in house.ever(ev.BreakpointHit)] == [
        LOG, BreakpointAction.SNAPSHOT, BreakpointAction.FREEZE, BreakpointAction.HOLD]


def test_replacing_all_breakpoints_of_an_owner_twice_changes_nothing() -> None:
    house = House()
    ids = house.breaks(BreakpointSpec(to_state=SlotState.DECODING, one_shot=True), BreakpointSpec(
        site=Site.EVICT_WILL, request="x*"))
    house.decoding("r")
    house.go_on()
    specs = tuple(known.spec for known in house.state.breakpoints.values())
    before = {number: (known.enabled, known.hits) for number, known in house.state.breakpoints.items()}
    assert before == {ids[0]: (False, 1), ids[1]: (True, 0)}
    for _ in range(2):
        assert house.breaks(*specs) == ids
        after = {number: (known.enabled, known.hits) for number, known in house.state.breakpoints.items()}
        assert after == before, "a one-shot breakpoint that was hit is not armed by saying it again"
