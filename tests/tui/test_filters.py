"""Filters: what they understand they apply to what this console knows, what they do not they refuse with the column."""

import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import BreakpointAction, Route, Site, SlotState, Tier
from tests.tui.desks import desk_of, everything, screen
from tests.tui.script import story
from tui.desk import BREAKS, LOG, SLOTS, TIMELINE, TRANSFERS, Desk
from tui.keys import press
from tui.model.breaks import parse_breakpoint
from tui.model.events import EVENTS
from tui.model.filters import FILTER_MAX, Filter, FilterError
from tui.views.slots import SCHEMA


def typed(desk: Desk, text: str, *keys: str) -> None:
    """Type into the prompt, then press keys."""
    for key in text:
        press(desk, "space" if key == " " else key)
    for key in keys:
        press(desk, key)


def names(text: str) -> set[str]:
    """Requests of the slot list that a filter leaves, three seconds after the story."""
    desk = desk_of()
    wanted = Filter.parse(text, SCHEMA)
    state = desk.mirror.state
    assert state is not None
    return {slot.request for slot in state.slots.values() if wanted.matches(slot, state, desk.now_ns)}


ALL = {"rag-0002.7", "agent-0003.2", "chat-0004.1"}


@pytest.mark.parametrize(("text", "expected"), [
    ("rag", {"rag-0002.7"}), ("00*", set()), ("*-000?.*", ALL), ("held", {"agent-0003.2"}),
    ("not held", ALL - {"agent-0003.2"}), ("state = initialized", {"chat-0004.1"}),
    ("state ~ \"*cod*\"", {"rag-0002.7", "agent-0003.2"}), ("age > 10 h", set()), ("age > 1 s", ALL),
    ("tokens.computed > 0 and (held or outstanding > 0)", {"rag-0002.7", "agent-0003.2"}),
    ("request ~ chat-* or request ~ rag-*", {"rag-0002.7", "chat-0004.1"}), ("session = none", ALL),
])
def test_what_it_matches(text: str, expected: set[str]) -> None:
    assert names(text) == expected


@pytest.mark.parametrize(("text", "column", "message"), [
    ("stat = decoding", 0, "a slot has no field `stat`; the nearest is `state`"),
    ("held and agee > 1", 9, "no field `agee`"), ("age > 3", 6, "write a unit, as 3 ms"),
    ("held and ", 9, "expected the name of a field"), ("state = (", 8, "expected a word"),
    ("x" * (FILTER_MAX + 1), FILTER_MAX, "at most"),
])
def test_a_mistake_is_told_with_its_column(text: str, column: int, message: str) -> None:
    with pytest.raises(FilterError, match=message.replace("`", ".")) as caught:
        Filter.parse(text, SCHEMA)
    assert caught.value.column == column


def test_a_filter_reads_what_the_facts_no_longer_have() -> None:
    """Candidates that ended and requests that finished: known to the history alone."""
    desk = desk_of()
    state, mirror = desk.mirror.state, desk.mirror
    wanted = Filter.parse("route = G1>G2 and request = chat-0001.1", EVENTS)
    kinds = [type(event).__name__ for event in mirror.log if wanted.matches(event, state, mirror)]
    assert {"CandidatePlanned", "CandidatePromoted", "OperationStarted", "CandidateEnded"} <= set(kinds)
    assert all(kind.startswith(("Candidate", "Operation", "Blocks")) for kind in kinds)


@pytest.mark.parametrize(("view", "text", "shown", "hidden"), [
    (SLOTS, "held", "agent-0003.2", "rag-0002.7"), (TIMELINE, "not live", "chat-0001.1", "rag-0002.7"),
    (TRANSFERS, "moving", "promoted", "completed"), (LOG, "kind = SlotHeld", "slot held", "slot opened"),
    (BREAKS, "hits = 0", "0 of 1 match", "decoding         –"),
])
def test_every_list_is_filtered(view: int, text: str, shown: str, hidden: str) -> None:
    desk = desk_of(late_ns=0)
    desk.go(view)
    press(desk, "/")
    typed(desk, text, "enter")
    assert desk.prompt is None
    assert shown in everything(desk)
    assert hidden not in everything(desk)
    press(desk, "escape")
    assert view not in desk.filters


def test_tab_completes_and_goes_round_and_up_recalls() -> None:
    desk = desk_of()
    desk.go(SLOTS)
    press(desk, "/")
    typed(desk, "sta", "tab")
    assert desk.prompt is not None
    assert desk.prompt.text == "state "
    typed(desk, "= onb")
    assert "tab  onboard_staged  onboarding" in screen(desk)[-1] or "column" in screen(desk)[-1]
    press(desk, "tab")
    assert desk.prompt.text == "state = onboard_staged"
    press(desk, "tab")
    assert desk.prompt.text == "state = onboarding"
    press(desk, "shift+tab")
    assert desk.prompt.text == "state = onboard_staged"
    press(desk, "enter")
    assert desk.filters[SLOTS].text == "state = onboard_staged"
    press(desk, "/")
    typed(desk, "", "ctrl+u", "up")
    assert desk.prompt is not None
    assert desk.prompt.text == "state = onboard_staged"


def test_the_mistake_stands_under_its_column_and_nothing_else_moves() -> None:
    desk = desk_of(story())
    desk.go(SLOTS)
    before = screen(desk)[2:-2]
    press(desk, "/")
    assert screen(desk)[2:-2] == before
    typed(desk, "held and agee > 1 s")
    rows = screen(desk)
    assert rows[-2] == " / held and agee > 1 s"
    assert rows[-1].index("^") == rows[-2].index("agee")
    assert rows[-1].endswith("no field `agee`; the nearest is `age`")
    assert len(rows) == 24


def test_a_breakpoint_is_typed_in_words() -> None:
    spec = parse_breakpoint("to onboarding from onboard_staged request chat-04* once log max 20s")
    assert (spec.to_state, spec.from_state) == (SlotState.ONBOARDING, SlotState.ONBOARD_STAGED)
    assert (spec.request, spec.one_shot, spec.action) == ("chat-04*", True, BreakpointAction.LOG)
    assert spec.max_hold_ns == 20_000_000_000
    other = parse_breakpoint("site evict.will tier G1 route G2>G1")
    assert (other.site, other.tier, other.route) == (Site.EVICT_WILL, Tier.G1, Route.G2_G1)


@pytest.mark.parametrize(("text", "message"), [
    ("to nowhere", "column 4: to takes no `nowhere`; there are initialized, onboard_staged"),
    ("to onbording", "column 4: to takes no `onbording`; the nearest is `onboarding`"),
    ("to decoding reqest x", "column 13: no word `reqest`; the nearest is `request`"),
    ("once to", "column 6: `to` needs a value"), ("max soon", "column 5: max must be seconds"),
    ("max 999s", "max_hold_ns must be"), ("site evict", "column 6: site takes no `evict`; the nearest is `evict.will`"),
    ("ignore x", "column 8: ignore must be a number"), ('once say "{nobody}"', "column 10: say: "),
    ("once when ", "column 6: `when` needs a condition"), ("log freeze", "one of log, snapshot, freeze"),
])
def test_a_wrong_breakpoint_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("`", ".")):
        parse_breakpoint(text)


@pytest.mark.parametrize("text", ["", "once", "log max 20s", "request *", "suspend all"])
def test_a_breakpoint_that_would_stop_every_move_is_refused_by_the_editor_and_by_the_command(text: str) -> None:
    with pytest.raises(UsageError, match="say where: to, from, request"):
        parse_breakpoint(text)
