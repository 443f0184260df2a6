"""The small filter: what it understands it applies, what it does not it refuses with the column."""

import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import BreakpointAction, Route, Site, SlotState, Tier
from tui.model.breaks import parse_breakpoint
from tui.model.filters import FILTER_MAX, Filter, FilterError, Value

FIELDS = ("state", "request", "age", "route", "held", "blocks")
ITEM: dict[str, Value] = {
    "state": "decoding", "request": "chat-0418.3", "age": 12_000_000, "route": "G3>G1", "held": True, "blocks": 104,
}


@pytest.mark.parametrize(("text", "expected"), [
    ("chat-04", True), ("0418", True), ("agent", False), ("chat-*", True), ("agent-*", False), ("chat-????.?", True),
    ("state = decoding", True), ("state != decoding", False), ("age > 10 ms", True), ("age > 10 h", False),
    ("age <= 12 ms", True), ("route = G3→G1", True), ("route = g3>g1", True), ("held = yes", True),
    ("held = no", False), ("blocks >= 104", True), ("request ~ \"chat-04*\"", True), ("not state = decoding", False),
    ("state = decoding and age > 10 ms and chat", True), ("state = decoding and age > 1 s", False),
])
def test_what_it_matches(text: str, expected: bool) -> None:
    assert Filter.parse(text, FIELDS).matches(ITEM) is expected


@pytest.mark.parametrize(("text", "column", "message"), [
    ("blks > 64", 0, "no field `blks`; nearest is `blocks`"), ("state = x and agee > 1", 14, "no field `agee`"),
    ("age > soon", 6, "`soon` is not a number"), ("state = decoding and ", 21, "a term is missing"),
    ("= 3", 0, "expected a field"), ("x" * (FILTER_MAX + 1), FILTER_MAX, "at most"),
])
def test_a_mistake_is_told_with_its_column(text: str, column: int, message: str) -> None:
    with pytest.raises(FilterError, match=message.replace("`", ".")) as caught:
        Filter.parse(text, FIELDS)
    assert caught.value.column == column


def test_a_missing_value_matches_no_comparison() -> None:
    assert not Filter.parse("age > 0", FIELDS).matches({"age": None})


def test_a_breakpoint_is_typed_in_words() -> None:
    spec = parse_breakpoint("to onboarding from onboard_staged request chat-04* once log max 20s")
    assert (spec.to_state, spec.from_state) == (SlotState.ONBOARDING, SlotState.ONBOARD_STAGED)
    assert (spec.request, spec.one_shot, spec.action) == ("chat-04*", True, BreakpointAction.LOG)
    assert spec.max_hold_ns == 20_000_000_000
    other = parse_breakpoint("site evict.will tier G1 route G2>G1")
    assert (other.site, other.tier, other.route) == (Site.EVICT_WILL, Tier.G1, Route.G2_G1)


@pytest.mark.parametrize(("text", "message"), [
    ("to nowhere", "to must be one of initialized"), ("into decoding", "no word `into`"), ("to", "`to` needs a value"),
    ("max soon", "max must be seconds"), ("max 999s", "max_hold_ns must be"), ("site nope", "site must be one of"),
])
def test_a_wrong_breakpoint_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("`", ".")):
        parse_breakpoint(text)
