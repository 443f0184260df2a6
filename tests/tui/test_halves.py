"""A request that one engine prefills and another decodes is one row over time, and each half names the other."""

import pytest

from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.lives import Life
from kvbm_console.cli.why import _lines
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import SlotClosed
from kvbm_console.core.ids import FinishReason, SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import EventsArrived, PastSeen, SnapshotTaken
from tests.analysis.evidence import evidence
from tests.tui.desks import desk_of, everything
from tests.tui.script import MS, Script, connected
from tui.desk import SLOT, TIMELINE, Desk
from tui.draw.lifeline import Lifelines, Window, joined
from tui.model.history import Halves, take_past

FIRST, SECOND = "chat-7-aa", "chat-7-bb"


def two_engines() -> Script:
    """Engine 1 prefills from 10 to 40 ms, engine 2 decodes from 60 ms on."""
    script = Script()
    script.pools()
    first = script.open(FIRST, sends="x")
    script.wait(10 * MS)
    script.move(first, SlotState.PREFILLING)
    script.wait(30 * MS)
    script.move(first, SlotState.FINISHED, reason=FinishReason.STOP)
    script.emit(SlotClosed, first)
    script.wait(20 * MS)
    second = script.open(SECOND, source=2, receives="x")
    script.move(second, SlotState.PREFILLING)
    script.wait(10 * MS)
    script.move(second, SlotState.DECODING)
    script.wait(50 * MS)
    script.open("other")
    return script


def console(script: Script, *, late: bool) -> Desk:
    """A console that saw every event, or that came later and learns the past from the daemon."""
    if not late:
        return desk_of(items=[connected(), SnapshotTaken(CacheState()), EventsArrived(script.events)], late_ns=0)
    one = desk_of(items=[connected()], late_ns=0)
    for _ in take_past(one.mirror, PastSeen(script.events, script.state), one.mono()):
        pass
    one.mirror.take(script.snapshot(), one.mono())
    return one


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
@pytest.mark.parametrize("late", [False, True])
def test_the_timeline_has_one_row_for_both_halves(size: tuple[int, int], late: bool) -> None:
    one = console(two_engines(), late=late)
    one.go(TIMELINE)
    text = everything(one, *size)
    assert SECOND in text
    assert FIRST not in text
    one.select(SECOND)
    assert "prefill engine 1" in everything(one, *size)
    one.select(FIRST)
    assert FIRST in everything(one, *size), "the half that was chosen has its row"


def test_the_cells_of_a_row_are_those_of_both_engines() -> None:
    one = console(two_engines(), late=False)
    first, second = one.mirror.life_of(FIRST), one.mirror.life_of(SECOND)
    assert first is not None
    assert second is not None
    window = Window(0, 10 * MS, 12, 120 * MS)
    codes, _ = joined(Lifelines(), first, second, window, {})
    states = [None if code == 0 else SlotState(code - 1) for code in codes]
    assert states == [
        SlotState.INITIALIZED, *[SlotState.PREFILLING] * 3, None, None, SlotState.PREFILLING, *[SlotState.DECODING] * 5,
    ]


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_the_slot_view_names_the_other_half(size: tuple[int, int]) -> None:
    one = console(two_engines(), late=False)
    one.go(SLOT)
    one.select(SECOND)
    text = everything(one, *size)
    assert f"prefilled by engine 1 as {FIRST}" in text
    assert "prefill engine 1" in text
    assert "decode engine 2" in text
    one.select(FIRST)
    assert f"decoded by engine 2 as {SECOND}" in everything(one, *size)


def test_a_half_whose_other_is_not_here_says_so() -> None:
    script = Script()
    script.pools()
    script.open(SECOND, source=2, receives="x")
    one = console(script, late=False)
    one.go(SLOT)
    one.select(SECOND)
    assert "prefilled by another engine, not known here; its blocks go by the name x" in everything(one)
    one.go(TIMELINE)
    assert SECOND in everything(one)


def test_why_tells_the_time_in_each_engine() -> None:
    script = two_engines()
    lines = _lines(explain(evidence(script.events, LeaderConfig()), SECOND), None)
    at = [lines.index(line) for line in lines if line.startswith(("prefill half", "this half"))]
    assert [lines[i] for i in at] == [f"prefill half, engine 1: {FIRST}, slot 0, finished", "this half, engine 2"]
    assert lines[at[0] + 1].startswith("time   40ms from 0.000 s to 0.040 s")


def test_a_forgotten_half_is_no_half() -> None:
    halves, first, second, third = Halves(), Life(0, "a", 0), Life(1, "b", 0), Life(2, "a", 0)
    first.sends = third.sends = second.receives = "x"
    halves.add(first)
    halves.add(second)
    assert (halves.prefill_of(second), halves.decode_of(first)) == (first, second)
    halves.add(third)
    halves.forget(first)
    assert halves.prefill_of(second) is third, "a name that was used again belongs to the later life"
    halves.forget(second)
    assert halves.decode_of(third) is None
