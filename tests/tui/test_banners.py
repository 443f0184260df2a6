"""What is said above every view, and the verbs that end it.

Law of this file: no terminal and no clock of its own.
"""

from kvbm_console.core import events as ev
from kvbm_console.core.ids import HoldEnd, Note
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
