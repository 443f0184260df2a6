"""Stops as a person meets them: banners above every view, announcements, the editor of a breakpoint.

Law of this file: no terminal and no clock of its own.
"""

from kvbm_console.core import events as ev
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import HoldEnd, Note, Site, SlotState, WaitPoint
from kvbm_console.stream.feed import EventsArrived, FeedItem, SnapshotTaken
from tests.tui.desks import desk_of, everything, screen
from tests.tui.script import MS, Mono, S, connected, story
from tui.desk import Desk
from tui.keys import press


def typed(desk: Desk, text: str) -> None:
    for key in text:
        press(desk, "space" if key == " " else key)


def test_a_frozen_target_says_so_on_every_view_until_when_and_f_thaws_it() -> None:
    script, mono = story(), Mono()
    script.emit(ev.Frozen, "ann@host", 30 * S)
    desk = desk_of(script, mono=mono, late_ns=0)
    for view in "123456789":
        press(desk, view)
        assert screen(desk)[2] == " Frozen by ann@host. Thaws by itself in 30 s.  F  thaw now", view
    mono.at_ns += 8 * S + 1
    assert "Thaws by itself in 21 s." in screen(desk)[2], "on the wall's clock: the engine's stands still"
    press(desk, "!")
    assert "by ann@host; goes on by itself in 21 s" in everything(desk, 160, 40)
    press(desk, "F")
    assert desk.actions.calls == [("thaw",)], "without a question: it only lets go"
    assert desk.prompt is None
    script.emit(ev.Thawed, HoldEnd.CONTINUED, "ann@host", 0)
    desk.mirror.take(EventsArrived(script.events[-1:]), mono.at_ns)
    assert "Frozen by" not in everything(desk)
    assert desk.mirror.frozen_mono is None
    press(desk, "F")
    assert "Freeze the target" in everything(desk)


def test_a_console_that_comes_into_a_freeze_counts_from_its_beginning() -> None:
    script, mono = story(), Mono()
    script.emit(ev.Frozen, "", 30 * S)
    script.wait(4 * S)
    script.emit(ev.Noted, Note.CLOCK_STEPPED, "")
    items: list[FeedItem] = [connected(), SnapshotTaken(script.state)]
    desk = desk_of(items=items, mono=mono, late_ns=0, read_only=True)
    assert screen(desk)[2] == " Frozen by a breakpoint. Thaws by itself in 26 s."


def test_the_palette_runs_for_a_time_and_thaws_what_is_frozen() -> None:
    script = story()
    desk = desk_of(script)
    for text in (":run for 200ms", ":run for 1.5 s"):
        typed(desk, text)
        press(desk, "enter")
    assert desk.actions.calls == [("run_for", 200 * MS), ("run_for", 1_500 * MS)]
    typed(desk, ":run for 200")
    press(desk, "enter")
    assert "expected a time with a unit such as 200ms or 5s, got '200'" in everything(desk)
    typed(desk, ":thaw")
    assert "nothing is frozen" in everything(desk)


# --- the announcement of a stop --------------------------------------------------------------------------------------


def test_a_stop_is_announced_with_the_state_that_was_broken_on() -> None:
    """Whoever is held while it decodes is left out of the next iteration, long before the announcement is read."""
    script, mono = story(), Mono()
    slot = script.open("chat-9")
    script.admit(slot)
    script.move(slot, SlotState.PREFILLING)
    script.wait(5 * MS)
    script.set_breakpoint(BreakpointSpec(id=1, to_state=SlotState.DECODING))
    desk = desk_of(script, mono=mono, late_ns=0)
    told = len(script.events)
    script.move(slot, SlotState.DECODING)
    script.hold(slot)
    script.wait(5 * MS)
    script.move(slot, SlotState.SKIPPED_DECODE)
    mono.at_ns += 2 * S
    desk.mirror.take(EventsArrived(script.events[told:]), mono.at_ns)
    assert screen(desk)[-1].startswith(" ‖ chat-9 held at breakpoint 1, entering decoding; 30 s left   H go there")


def test_a_step_that_arrived_is_announced_as_one() -> None:
    script, mono = story(), Mono()
    slot = script.open("chat-9")
    desk = desk_of(script, mono=mono, late_ns=0)
    told = len(script.events)
    script.emit(ev.SlotHeld, script.state.next_hold, slot, Site.REQUEST_FINISH, WaitPoint.RELEASE, (), "ops", 30 * S)
    mono.at_ns += 2 * S
    desk.mirror.take(EventsArrived(script.events[told:]), mono.at_ns)
    assert screen(desk)[-1].startswith(" ‖ chat-9 held at a step, at request.finish; 30 s left")


# --- the editor of a breakpoint --------------------------------------------------------------------------------------


def test_a_wrong_word_is_told_below_it_and_what_stops_everything_is_not_taken() -> None:
    desk = desk_of()
    press(desk, "b")
    press(desk, "ctrl+u")
    typed(desk, "to decoding reqest")
    line, below = screen(desk)[-2:]
    assert below.index("^") == line.index("reqest")
    assert "no word `reqest`; the nearest is `request`" in below, "in full on 80 columns"
    press(desk, "ctrl+u")
    assert screen(desk)[-1].strip().startswith("tab  to  from  request")
    press(desk, "enter")
    typed(desk, "once")
    assert screen(desk)[-1].strip() == "say where: to, from, request, site, tier, route, status or when"
    press(desk, "enter")
    assert desk.prompt is not None
    assert desk.actions.calls == []
