"""Stops as a person meets them: banners above every view, announcements, the editor of a breakpoint.

Law of this file: no terminal and no clock of its own.
"""

import msgspec
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import HoldEnd, Note, OnTimeout, ResetMode, Site, SlotState, Suspend, WaitPoint
from kvbm_console.stream.feed import EventsArrived, FeedItem, SnapshotTaken
from kvbm_console.stream.verbs import Drain, Reset, RunFor, Thaw
from tests.tui.desks import desk_of, everything, screen
from tests.tui.script import MS, Mono, S, Script, connected, story
from tui.desk import Desk
from tui.keys import press
from tui.model.breaks import parse_breakpoint, spell


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
    assert desk.actions.calls == [Thaw()], "without a question: it only lets go"
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
    assert desk.actions.calls == [RunFor(200 * MS), RunFor(1_500 * MS)]
    typed(desk, ":run for 200")
    press(desk, "enter")
    assert "expected a time with a unit such as 200ms or 5s, got '200'" in everything(desk)
    typed(desk, ":thaw")
    assert "nothing is frozen" in everything(desk)


def test_the_palette_resets_and_drains_after_a_question() -> None:
    desk = desk_of(story())
    live = len(desk.mirror.state.slots) if desk.mirror.state is not None else 0
    for text, question, otherwise, call in (
        (":reset", f"Forget what all tiers hold and end {live} live requests? y/n", "nothing was reset",
         Reset()),
        (":reset physical", f"Overwrite and forget what all tiers hold and end {live} live requests? y/n",
         "nothing was reset", Reset(ResetMode.PHYSICAL)),
        (":drain 5s", f"Take no new request, wait 5 s at most for {live} live requests, then reset? y/n",
         "nothing is drained", Drain(5 * S)),
    ):
        desk.actions.calls.clear()
        typed(desk, text)
        press(desk, "enter")
        assert question in everything(desk), text
        assert not desk.actions.calls
        press(desk, "n")
        press(desk, "enter")
        assert otherwise in everything(desk)
        assert not desk.actions.calls
        typed(desk, text)
        press(desk, "enter")
        press(desk, "y")
        press(desk, "enter")
        assert desk.actions.calls == [call], text
    typed(desk, ":drain soon")
    press(desk, "enter")
    assert "expected a time with a unit such as 200ms or 5s, got 'soon'" in everything(desk)


def test_a_target_that_drains_says_so_on_every_view() -> None:
    script = story()
    script.emit(ev.DrainBegun, 30 * S, "ann@host")
    desk = desk_of(script)
    for view in "123456789":
        press(desk, view)
        assert screen(desk)[2].startswith(" Draining: no new request is taken; "), view
    typed(desk, ":drain")
    assert "it drains already" in everything(desk)


def test_an_observer_may_neither_reset_nor_drain() -> None:
    desk = desk_of(story(), read_only=True)
    for text in (":reset", ":drain 5s"):
        typed(desk, text)
        press(desk, "enter")
        assert f"{text}: read-only" in everything(desk)
    assert not desk.actions.calls


def test_a_hold_that_suspends_others_says_for_whom_they_wait() -> None:
    script, mono = story(), Mono()
    slot = script.open("chat-9")
    for suspend, said in ((Suspend.PIPELINE, "All copies wait"), (Suspend.ALL, "Engines wait")):
        hold = script.state.next_hold
        script.emit(ev.SlotHeld, hold, slot, Site.PROMOTE_WILL, WaitPoint.PROMOTE, (), "ops", 60 * S, suspend)
        desk = desk_of(script, mono=mono, late_ns=0)
        assert screen(desk)[2] == f" {said} for held chat-9. Resumes by itself in 60 s.  C  continue all"
        script.release(hold, 0)
        assert "wait for held" not in everything(desk_of(script, late_ns=0))


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


# --- the view of breakpoints -----------------------------------------------------------------------------------------


def test_the_chosen_breakpoint_is_told_in_full_and_whose_it_is_on_any_width() -> None:
    script = story()
    text = "from skipped_decode to decoding request agent-0003* ignore 2 hits >=3 after 7"
    text += " once when tokens.computed > 4096"
    spec = msgspec.structs.replace(parse_breakpoint(text), id=1)
    script.set_breakpoint(spec, owner="ann@host")
    desk = desk_of(script)
    press(desk, "7")
    press(desk, "down")
    for width in (60, 80, 120, 200):
        told = " ".join(everything(desk, width, 40).split())
        assert f"{spell(spec)} by ann@host" in told, width
    wide = everything(desk, 200, 60)
    assert "agent-0003* skipped decode → decoding " in wide
    assert "tokens.computed > 4096, hits >=3, ignore 2, once, after 7" in wide


def test_a_held_slot_tells_what_follows_by_itself_and_its_verbs() -> None:
    script = story()
    (held,) = script.state.holds.values()
    desk = desk_of(script)
    desk.select(script.state.slots[held.slot].request)
    press(desk, "3")
    head = next(row for row in screen(desk, 160, 40) if "HELD" in row)
    assert "  c continue  s step  u until…" in head
    assert "resumes in " in head
    press(desk, "7")
    assert f"stands still at {held.point.label}, breakpoint 1" in everything(desk, 200, 60)
    script.release(held.hold, 0)
    script.emit(
        ev.SlotHeld, held.hold + 1, held.slot, Site.PROMOTE_WILL, WaitPoint.PROMOTE, (1,), "ops", 30 * S, Suspend.SLOT,
        OnTimeout.SKIP_CANDIDATE,
    )
    script.emit(ev.HoldParked, held.hold + 1)
    desk = desk_of(script)
    press(desk, "7")
    assert "skips its copies in 2" in everything(desk, 200, 60)


# --- the end of a hold -----------------------------------------------------------------------------------------------


def ended(desk: Desk, script: Script, why: HoldEnd, by: str) -> None:
    """The only hold ends in this way, after 12 s."""
    (held,) = script.state.holds.values()
    script.wait(12 * S)
    told = len(script.events)
    script.emit(ev.HoldReleased, held.hold, held.slot, why, by, 12 * S)
    desk.mirror.take(EventsArrived(script.events[told:]), desk.mono())


@pytest.mark.parametrize(("why", "by", "reason"), [
    (HoldEnd.PRESSURE, "chat-7", "made way for chat-7, which needs its blocks"),
    (HoldEnd.EXPIRED, "", "its longest time was over"),
    (HoldEnd.CANCELLED, "preempted", "the request was preempted"),
    (HoldEnd.LEASE_LOST, "ann-1", "the lease of ann-1 was lost"),
])
def test_a_hold_that_ended_tells_by_what_where_the_eye_is(why: HoldEnd, by: str, reason: str) -> None:
    script, mono = story(), Mono()
    desk = desk_of(script, mono=mono, late_ns=0)
    (held,) = script.state.holds.values()
    request = script.state.slots[held.slot].request
    desk.select(request)
    everything(desk)
    mono.at_ns += 30 * S
    ended(desk, script, why, by)
    assert screen(desk, 160, 40)[-1].startswith(f" ‖ {request} goes on after 12.0s: {reason}")
    press(desk, "3")
    head = everything(desk, 200, 40)
    assert f"hold {held.hold} ended 0ms ago after 12.0s: {reason}" in head
    press(desk, "7")
    rows = screen(desk, 120, 40)
    at = next(index for index, row in enumerate(rows) if row.startswith(" ENDED"))
    assert f"held 12.0s, {reason}" in rows[at + 1]


def test_what_somebody_continued_is_listed_and_not_announced() -> None:
    script, mono = story(), Mono()
    desk = desk_of(script, mono=mono, late_ns=0)
    everything(desk)
    mono.at_ns += 30 * S
    ended(desk, script, HoldEnd.CONTINUED, "ann@host")
    assert "goes on" not in screen(desk)[-1]
    press(desk, "7")
    assert "held 12.0s, continued by ann@host" in everything(desk, 120, 40)


def test_refused_holds_leave_a_trace_that_counts_them() -> None:
    script, mono = story(), Mono()
    desk = desk_of(script, mono=mono, late_ns=0)
    everything(desk)
    mono.at_ns += 30 * S
    (held,) = script.state.holds.values()
    told = len(script.events)
    for _ in range(54):
        script.emit(ev.HoldDenied, held.slot, Site.TRANSITION_DID, "the budget of 4 holds is used up")
    desk.mirror.take(EventsArrived(script.events[told:]), mono.at_ns)
    request = script.state.slots[held.slot].request
    said = f"‖ the hold of {request} and 53 before was refused: the budget of 4 holds is used up"
    assert said in screen(desk, 120, 40)[-1]
    press(desk, "7")
    text = everything(desk, 160, 60)
    assert "refused: the budget of 4 holds is used up (54 in a row)" in text
    assert "54 refused" in text


def test_announcements_leave_the_keys_alone_for_most_of_the_time() -> None:
    """A breakpoint that stops something every second announces itself, and never covers the key row for good."""
    script, mono = story(), Mono()
    desk = desk_of(script, mono=mono, late_ns=0)
    script.release(next(iter(script.state.holds)), 0)
    covered = []
    for second in range(120):
        told = len(script.events) - (second == 0)
        slot = script.open(f"chat-{second}")
        script.hold(slot)
        desk.mirror.take(EventsArrived(script.events[told:]), mono.at_ns)
        covered.append("held at" in screen(desk)[-1] or "goes on" in screen(desk)[-1])
        mono.at_ns += S
    assert 0.2 <= sum(covered) / len(covered) <= 0.5


def test_a_countdown_says_what_may_end_the_hold_earlier() -> None:
    script = story()
    (held,) = script.state.holds.values()
    assert script.state.slots[held.slot].device_blocks
    desk = desk_of(script)
    press(desk, "7")
    assert "; sooner if others need its blocks" in everything(desk, 120, 40)
    desk.select(script.state.slots[held.slot].request)
    press(desk, "3")
    assert "sooner if others need its blocks" in everything(desk, 200, 40)
    script.emit(ev.LeaseChanged, "ops", True)
    desk = desk_of(script)
    press(desk, "7")
    assert "sooner if others need its blocks or its console is gone" in everything(desk, 160, 40)
