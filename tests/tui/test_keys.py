"""The effect of keys and clicks in every view, without a terminal."""


import pytest

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import SlotState
from kvbm_console.stream.feed import EventsArrived, FeedItem
from kvbm_console.stream.verbs import ContinueHold, Disarm, SetBreakpoint, StepSlot
from tests.tui.desks import FakeActions, FakeTransport, desk_of, everything, screen
from tests.tui.script import Mono, S, connected, story
from tui.desk import BREAKS, SLOT, SLOTS, TIMELINE, WARNINGS, WHY
from tui.keys import click, press


@pytest.mark.parametrize("key", "123456789")
def test_digits_show_views(key: str) -> None:
    desk = desk_of()
    press(desk, key)
    assert desk.current == int(key) - 1


@pytest.mark.parametrize("view", range(WHY + 1))
def test_where_there_are_no_arrows_the_cursor_keys_have_names(view: int) -> None:
    """``<``, ``>``, ``^`` and ``v`` are what is left of arrows, and other keys."""
    desk = desk_of(ascii_only=True)
    desk.go(view)
    for size in ((80, 24), (200, 60)):
        for showing_help in (False, True):
            desk.help = showing_help
            shown = "\n".join(screen(desk, *size))
            assert not any(arrows in shown for arrows in ("↑↓", "↑ ↓", "←→")), shown
    desk.help = False
    press(desk, "[")
    assert "↑" not in screen(desk)[-1]


def test_filter_is_applied_while_it_is_typed_and_errors_show_their_column() -> None:
    desk = desk_of()
    desk.go(SLOTS)
    press(desk, "/")
    for key in "rag":
        press(desk, key)
    assert "1 match" in everything(desk)
    press(desk, "enter")
    assert desk.filters[SLOTS].text == "rag"
    press(desk, "/")
    for key in "x = 1":
        press(desk, "space" if key == " " else key)
    assert "column 1: a slot has no field `ragx`" in screen(desk)[-1]
    press(desk, "enter")
    assert desk.prompt is not None
    press(desk, "escape")
    assert desk.prompt is None
    assert desk.filters[SLOTS].text == "rag"
    press(desk, "escape")
    assert SLOTS not in desk.filters
    press(desk, "/")
    for key in "zzz":
        press(desk, key)
    press(desk, "enter")
    assert "0 of 3 match  zzz   esc  clear" in everything(desk)


def test_break_continue_step_and_disarm() -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions)
    desk.select("rag-0002.7")
    press(desk, "b")
    assert desk.prompt is not None
    assert desk.prompt.text == "to finishing request rag-0002.7"
    press(desk, "enter")
    assert actions.calls.pop() == SetBreakpoint(
        BreakpointSpec(to_state=SlotState.FINISHING, request="rag-0002.7"))
    press(desk, "c")
    assert actions.calls.pop() == ContinueHold(1)
    press(desk, "s")
    assert actions.calls.pop() == StepSlot(1)
    press(desk, "D")
    assert not actions.calls
    for key in ("y", "enter"):
        press(desk, key)
    assert actions.calls.pop() == Disarm()
    press(desk, "D")
    for key in ("n", "enter"):
        press(desk, key)
    assert not actions.calls
    press(desk, "C")
    assert actions.calls.pop() == ContinueHold()


@pytest.mark.parametrize("key", ["b", "c", "s", "D", "C"])
def test_without_control_nothing_is_asked_and_the_reason_is_told(key: str) -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions, read_only=True)
    press(desk, key)
    assert not actions.calls
    assert f"{key}: not here, read-only" in screen(desk)[-1]
    assert "chat-prod read-only" in screen(desk)[0]


def test_a_stop_is_announced_for_six_seconds() -> None:
    mono = Mono()
    script = story()
    actions = FakeActions()
    desk = desk_of(script, mono=mono, actions=actions)
    mono.at_ns += 19 * S
    desk.mirror.take(script.heartbeat(), mono.at_ns)
    assert "held at breakpoint" not in screen(desk)[-1]
    slot = script.state.slot_of["rag-0002.7"]
    before = len(script.events)
    script.hold(slot)
    desk.mirror.take(EventsArrived(script.events[before:]), mono.at_ns)
    assert screen(desk, 120, 40)[-1] == (
        " ‖ rag-0002.7 held at breakpoint 1, entering decoding; 30 s left   H go there")
    press(desk, "H")
    assert (desk.current, desk.selected) == (SLOT, "rag-0002.7")
    mono.at_ns += 6 * S + 1
    assert "H go there" not in screen(desk)[-1]


def test_c_without_a_clear_hold_opens_the_holds() -> None:
    script = story()
    script.hold(script.state.slot_of["rag-0002.7"])
    actions = FakeActions()
    desk = desk_of(script, actions=actions)
    press(desk, "c")
    assert not actions.calls
    assert desk.current == BREAKS


def test_transport_keys_of_a_recording() -> None:
    transport = FakeTransport()
    script = story()
    items: list[FeedItem] = [connected(recording=True, control=False), script.snapshot()]
    desk = desk_of(script, items=items, actions=FakeActions(transport), late_ns=0)
    assert " PAUSED  +00:00:07.000  seq 50 of 100  ━" in screen(desk)[-2]
    press(desk, "space")
    assert transport.playing
    assert "PLAY 1×" in screen(desk)[-2]
    press(desk, ">")
    press(desk, ">")
    assert transport.speed == 4.0
    press(desk, "<")
    assert transport.speed == 2.0
    press(desk, ",")
    press(desk, ".")
    assert transport.calls == [("step", -1), ("step", 1)]
    press(desk, ":")
    for key in "seek 99":
        press(desk, "space" if key == " " else key)
    press(desk, "enter")
    assert transport.calls[-1] == ("seek", 99)
    bar = desk.draw(80, 24)[-2]
    (zone,) = [zone for zone in bar.zones if zone.action[0] == "seek"]
    click(desk, zone.start, bar)
    assert transport.calls[-1] == ("seek", 0)
    click(desk, zone.end - 1, bar)
    assert transport.calls[-1] == ("seek", 100)
    assert "8 Play" in screen(desk)[1]


@pytest.mark.parametrize(("typed", "said"), [
    ("fly", ":fly: no command fits"), ("seek 3", ":seek 3: only a recording can do that"),
    ("delete x", ":delete x: expected a number"), ("break to nowhere", "to takes no `nowhere`"),
])
def test_a_wrong_command_is_told(typed: str, said: str) -> None:
    desk = desk_of()
    press(desk, ":")
    for key in typed:
        press(desk, "space" if key == " " else key)
    press(desk, "enter")
    assert said in screen(desk)[-1]


def test_clicks_select_open_and_press_keys() -> None:
    desk = desk_of(late_ns=9 * S)
    tabs = desk.draw(80, 24)[1]
    click(desk, tabs.text.index("2 Slots"), tabs)
    assert desk.current == SLOTS
    lines = desk.draw(80, 24)
    click(desk, 30, lines[4])
    assert desk.selected == "agent-0003.2"
    click(desk, 30, desk.draw(80, 24)[4])
    assert desk.current == SLOT
    keys = desk.draw(80, 24)[-1]
    click(desk, keys.text.index("? help"), keys)
    assert desk.help


def test_help_lists_only_keys_of_this_view_and_any_key_leaves_it() -> None:
    desk = desk_of()
    desk.go(TIMELINE)
    press(desk, "?")
    text = everything(desk)
    assert "TIMELINE" in text
    assert "EVERYWHERE" in text
    press(desk, "escape")
    assert not desk.help
    assert desk.current == TIMELINE


def test_warnings_open_what_they_are_about() -> None:
    desk = desk_of()
    press(desk, "enter")
    assert (desk.current, desk.selected) == (SLOT, "agent-0003.2")
    press(desk, "!")
    assert desk.current == WARNINGS
