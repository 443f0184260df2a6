"""Cause and effect, marks, hits on recordings, the palette, warnings, copies: what the keys behind them do."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from kvbm_console.analysis.hits import find_hits
from kvbm_console.analysis.lints.lint import UNKNOWN_LIMIT_NS
from kvbm_console.core import events as ev
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import (
    BreakpointAction,
    CandidateStatus,
    Note,
    OnTimeout,
    Route,
    Site,
    SlotState,
    Suspend,
    Tier,
)
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.verbs import ContinueHold, Freeze, RemoveBreakpoint, SetBreakpoint, SkipCandidate, StepPipeline
from tests.tui.desks import FakeActions, FakeTransport, desk_of, everything, screen
from tests.tui.script import S, Script, connected, story
from tests.tui.test_replay import RECORDINGS, Replay, command, replaying
from tui.commands import commands, matching
from tui.desk import LOG, SLOT, SLOTS, TIMELINE, TRANSFERS, WARNINGS
from tui.keys import click, press
from tui.model.breaks import parse_breakpoint, spell
from tui.model.events import cause_of, effect_of
from tui.model.lints import Lints
from tui.model.places import MARKS_MAX, Mark, Marks
from tui.views.warnings import Warnings

# --- cause and effect ------------------------------------------------------------------------------------------------


def chain(kind: type[ev.Event], request: str) -> list[str]:
    """The kinds from the last event of this kind back to where nothing is known any more."""
    desk = desk_of()
    life = desk.mirror.life_of(request)
    assert life is not None
    event: ev.Event | None = next(event for event in reversed(life.story) if type(event) is kind)
    found = []
    while event is not None:
        found.append(type(event).__name__)
        event = cause_of(event, desk.mirror)
    return found


def test_a_copy_follows_from_its_promotion_and_that_from_its_plan() -> None:
    found = chain(ev.CandidateEnded, "chat-0001.1")
    assert found[:7] == ["CandidateEnded", "BlocksReady", "OperationReported", "OperationStarted", "CandidatePromoted",
                         "BlocksReserved", "CandidateEvaluated"]
    assert found[-1] == "SlotOpened"


def test_a_move_follows_from_the_move_before_unless_something_opened_it() -> None:
    assert chain(ev.SlotMoved, "rag-0002.7") == ["SlotMoved", "SlotMoved", "DeviceBlocksAssigned", "SlotOpened"]


def test_effect_is_the_inverse_of_cause() -> None:
    desk = desk_of()
    for event in desk.mirror.log:
        effect = effect_of(event, desk.mirror)
        if effect is not None:
            assert cause_of(effect, desk.mirror) is event


def test_brackets_walk_in_the_slot_the_timeline_and_the_log() -> None:
    for view in (SLOT, TIMELINE, LOG, SLOTS):
        desk = desk_of()
        desk.select("rag-0002.7")
        desk.go(view)
        screen(desk)
        press(desk, "[")
        first = desk.event
        assert first is not None
        assert desk.current == (LOG if view == SLOTS else view)
        assert f"{first:,}" in everything(desk)
        press(desk, "[")
        assert desk.event is not None
        assert desk.event < first
        press(desk, "]")
        assert desk.event == first
    desk.event = 0
    press(desk, "[")
    assert "follows from stimulus 0; nothing before it is kept" in screen(desk)[-1]


# --- marks -----------------------------------------------------------------------------------------------------------


def test_a_mark_in_the_timeline_is_the_event_under_the_cursor_and_not_another_of_that_time() -> None:
    desk = desk_of()
    desk.go(TIMELINE)
    screen(desk, 120, 40)
    press(desk, "down")
    walked = 0
    for _ in range(12):
        press(desk, "n")
        screen(desk, 120, 40)
        if desk.event is None:
            continue
        press(desk, "m")
        assert [mark.seq for mark in desk.marks.places] == [desk.event]
        assert "Δ 0 ms, 0 events" in everything(desk, 120, 40)
        press(desk, "m")
        walked += 1
    assert walked > 3


def test_marks_measure_time_and_events_and_are_bounded() -> None:
    marks = Marks()
    for number in range(MARKS_MAX + 5):
        assert marks.toggle(Mark(number, number * S))
    assert len(marks.places) == MARKS_MAX
    assert marks.next_from(9, 9 * S) == Mark(8, 8 * S)
    assert marks.next_from(0, 0) == Mark(MARKS_MAX + 4, (MARKS_MAX + 4) * S)
    assert not marks.toggle(Mark(9, 9 * S))
    assert marks.latest == Mark(MARKS_MAX + 4, (MARKS_MAX + 4) * S)


def test_a_bookmark_on_a_recording_is_listed_and_sought() -> None:
    transport = FakeTransport()
    script = story()
    desk = desk_of(script, items=[connected(recording=True, control=False), script.snapshot()],
                   actions=FakeActions(transport), late_ns=0)
    press(desk, "m")
    press(desk, "8")
    assert "BOOKMARKS   1 mark" in everything(desk)
    assert "◊" in screen(desk)[-2]
    press(desk, "enter")
    assert transport.calls[-1] == ("seek", script.state.seq - 1)
    press(desk, "x")
    assert "none; m sets one here" in everything(desk)


# --- hits ------------------------------------------------------------------------------------------------------------


async def settled(replay: Replay) -> None:
    """Until the search and the seek after it are over."""
    while not replay.session.hits.complete or replay.session.mirror.state is None or (
            replay.session.mirror.state.seq != replay.playback.position_seq + 1):
        await replay.pilot.pause()


@pytest.mark.asyncio
async def test_continue_and_reverse_continue_go_from_hit_to_hit() -> None:
    async with replaying("preempt-and-resume.mcap") as replay:
        recording = Recording.open(RECORDINGS / "preempt-and-resume.mcap")
        wanted = [event.seq for events in recording.events() for event in events
                  if isinstance(event, ev.SlotMoved) and event.new is SlotState.DECODING]
        assert len(wanted) >= 2
        await replay.pilot.press("b", "ctrl+u", *["space" if key == " " else key for key in "to decoding"], "enter")
        await replay.pilot.press("c")
        await settled(replay)
        assert replay.playback.position_seq == wanted[0]
        assert replay.same()
        await replay.pilot.press("c")
        await settled(replay)
        assert replay.playback.position_seq == wanted[1]
        await replay.pilot.press("C")
        await settled(replay)
        assert replay.playback.position_seq == wanted[0]
        await replay.pilot.press("C")
        assert f"no hit in front of seq {wanted[0]}" in replay.text()


@pytest.mark.asyncio
async def test_a_recording_takes_the_whole_specification_and_u_runs_to_the_cursor() -> None:
    """As `break test` counts: condition, ignored matches and hit condition."""
    said = "to decoding ignore 1 hits >=2 when tokens.computed > 1"
    spec = parse_breakpoint(said)
    wanted = [hit.seq - 1 for hit in find_hits(RECORDINGS / "preempt-and-resume.mcap", [spec]).hits]
    async with replaying("preempt-and-resume.mcap") as replay:
        await replay.pilot.press("b", "ctrl+u", *["space" if key == " " else key for key in said], "enter")
        assert wanted
        for seq in wanted:
            await replay.pilot.press("c")
            await settled(replay)
            assert replay.playback.position_seq == seq
        await replay.pilot.press("C")
        if len(wanted) == 1:
            assert f"no hit in front of seq {wanted[0]}" in replay.text()
        before = next(event for event in replay.session.mirror.log if isinstance(event, ev.SlotMoved))
        replay.app.desk.reveal(before)
        await replay.pilot.press("u")
        await settled(replay)
        assert replay.playback.position_seq == before.seq
        assert replay.same()
        await replay.pilot.press("u")
        assert "put the cursor on a place first" in replay.text()


@pytest.mark.asyncio
async def test_s_walks_along_one_slot_forwards_and_back() -> None:
    async with replaying("preempt-and-resume.mcap") as replay:
        await command(replay, "seek 40")
        await replay.at(40)
        state = replay.session.mirror.state
        assert state is not None
        slot = next(iter(state.slots.values()))
        replay.app.desk.select(slot.request)
        seen = [replay.playback.position_seq]
        for _ in range(3):
            await replay.pilot.press("s")
            while replay.playback.position_seq == seen[-1] or replay.session._searching:
                await replay.pilot.pause()
            await replay.at(replay.playback.position_seq)
            seen.append(replay.playback.position_seq)
        assert seen == sorted(set(seen))
        await replay.pilot.press("S")
        await replay.at(replay.playback.position_seq)
        assert replay.playback.position_seq in seen


# --- verbs of the debugger -------------------------------------------------------------------------------------------


def test_until_skip_pipeline_and_freeze_ask_the_target() -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions)
    desk.select("agent-0003.2")
    press(desk, "u")
    assert desk.prompt is not None
    press(desk, "ctrl+u")
    for key in "preem":
        press(desk, key)
    assert "a state: initialized" in screen(desk)[-1]
    press(desk, "tab")
    press(desk, "enter")
    assert actions.calls.pop() == ContinueHold(1, SlotState.PREEMPTED)
    press(desk, "X")
    assert actions.calls.pop() == SkipCandidate(1)
    press(desk, "S")
    assert actions.calls.pop() == StepPipeline()
    press(desk, "F")
    assert not actions.calls
    for key in ("y", "enter"):
        press(desk, key)
    assert actions.calls.pop() == Freeze()


def test_the_editor_says_what_would_have_hit() -> None:
    desk = desk_of()
    press(desk, "b")
    for key in ("ctrl+u", *"to decoding"):
        press(desk, "space" if key == " " else key)
    assert "ok, would have hit 3 times in the last 60 s" in screen(desk)[-1]
    for key in " when ag > 3 s":
        press(desk, "space" if key == " " else key)
    assert "no field `ag`" in screen(desk)[-1]


NAMES = some.text(some.characters(categories=("L", "N", "P", "S", "Zs")), max_size=12)


@given(spec=some.builds(
    BreakpointSpec, site=some.sampled_from(Site), request=some.sampled_from(["*", "chat-*", "a b", 'say "x"', "\\"]),
    from_state=some.sampled_from([None, *SlotState]), to_state=some.sampled_from([None, *SlotState]),
    tier=some.sampled_from([None, *Tier]), route=some.sampled_from([None, *Route]),
    status=some.sampled_from([None, *CandidateStatus]), action=some.sampled_from(BreakpointAction),
    one_shot=some.booleans(), persist=some.booleans(), ignore_count=some.integers(0, 9), name=NAMES,
    hit_condition=some.sampled_from(["", "==2", ">=3", "%4"]), log=some.sampled_from(["", "at {site}", '"{request}"']),
    condition=some.sampled_from(["", "age > 5 ms", 'request ~ "a b" and not held']),
    suspend=some.sampled_from(Suspend), on_timeout=some.sampled_from(OnTimeout), depends_on=some.integers(0, 9),
    max_hold_ns=some.integers(1, 120 * S), expires_ns=some.integers(1, 3_600 * S), id=some.just(0),
))
@example(spec=BreakpointSpec())
def test_what_is_spelled_is_the_same_breakpoint_again(spec: BreakpointSpec) -> None:
    if spec.narrowed:
        assert parse_breakpoint(spell(spec)) == spec
    else:
        with pytest.raises(UsageError, match=r"^say where"):
            parse_breakpoint(spell(spec))


def test_a_wrong_condition_is_told_at_its_column_of_the_whole_line() -> None:
    desk = desk_of()
    press(desk, "b")
    for key in ("ctrl+u", *"to decoding when tokns > 3"):
        press(desk, "space" if key == " " else key)
    assert desk.prompt is not None
    assert desk.prompt.wrong_column == len("to decoding when ")
    assert "no field `tokns`; the nearest is `tokens." in screen(desk)[-1]
    press(desk, "enter")
    assert desk.prompt is not None, "it is not taken"
    for key in ("ctrl+u", *"to decoding when live > 0"):
        press(desk, "space" if key == " " else key)
    assert "ok, true now of 3 of 3 live slots that it names" in screen(desk)[-1]


def test_b_breaks_on_the_chosen_candidate_and_on_the_chosen_move() -> None:
    desk = desk_of()
    for key in ("5", "down", "b"):
        screen(desk)
        press(desk, key)
    assert desk.prompt is not None
    spec = parse_breakpoint(desk.prompt.text)
    transfer = desk.mirror.transfer_of(candidate=desk.view.selected)  # type: ignore[attr-defined]
    assert transfer is not None
    assert (spec.route, spec.request) == (transfer.route, transfer.request or "*")
    assert spec.site in (Site.EVALUATE_WILL, Site.DISPATCH_WILL, Site.COMPLETE_WILL)
    press(desk, "escape")
    press(desk, "9")
    move = next(event for event in reversed(desk.mirror.log) if isinstance(event, ev.SlotMoved))
    desk.event = move.seq
    press(desk, "b")
    assert desk.prompt is not None
    assert parse_breakpoint(desk.prompt.text) == BreakpointSpec(from_state=move.old, to_state=move.new)


def test_enter_edits_the_chosen_breakpoint() -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions)
    for key in ("7", "down", "enter"):
        press(desk, key)
    assert desk.prompt is not None
    assert desk.prompt.text == "to decoding"
    for key in (*" once", "enter"):
        press(desk, "space" if key == " " else key)
    assert actions.calls.pop() == SetBreakpoint(BreakpointSpec(id=1, to_state=SlotState.DECODING, one_shot=True))


# --- palette ---------------------------------------------------------------------------------------------------------


def test_the_palette_finds_by_letters_and_says_why_not() -> None:
    desk = desk_of(read_only=True)
    press(desk, ":")
    for key in "cont":
        press(desk, key)
    rows = screen(desk)
    assert rows[-1] == " :cont"
    assert "continue all" in rows[-2]
    assert any("continue agent-0003.2" in row and "read-only" in row for row in rows[-8:])
    press(desk, "enter")
    assert desk.prompt is None
    assert "read-only" in screen(desk)[-1]


def test_a_command_with_an_argument_waits_for_it() -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions)
    press(desk, ":")
    for key in "dele":
        press(desk, key)
    press(desk, "enter")
    assert desk.prompt is not None
    assert desk.prompt.text == "delete "
    for key in ("1", "enter"):
        press(desk, key)
    assert actions.calls.pop() == RemoveBreakpoint(1)
    press(desk, ":")
    press(desk, "up")
    assert desk.prompt is not None
    press(desk, "escape")
    assert desk.prompt is None


def test_every_command_is_found_by_its_own_name() -> None:
    desk = desk_of()
    known = commands(desk, press)
    for command_ in known:
        assert matching(command_.name, known)[0].name == command_.name


# --- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_panel_explains_and_goes_there(size: tuple[int, int]) -> None:
    desk = desk_of(late_ns=12 * S)
    press(desk, "!")
    text = everything(desk, *size)
    assert "WARNINGS   " in text
    for word in ("evidence", "limit", "why bad", "what to do", "since seq"):
        assert word in text
    press(desk, "/")
    for key in "lint = stuck":
        press(desk, "space" if key == " " else key)
    press(desk, "enter")
    assert "HELD" not in everything(desk, *size)
    press(desk, "escape")
    press(desk, "enter")
    assert desk.current == SLOT
    assert desk.selected is not None


def test_a_warning_that_leads_to_the_log_chooses_its_event() -> None:
    script = Script()
    script.pools()
    script.emit(ev.Noted, Note.LOOP_BLOCKED, "the event loop stood still for 0.7 s")
    (noted,) = [event for event in script.events if isinstance(event, ev.Noted)]
    script.run("chat-1")
    script.iterate(count=60)
    desk = desk_of(script)
    press(desk, "!")
    press(desk, "enter")
    assert desk.current == LOG
    assert desk.event == noted.seq
    assert f" seq {noted.seq}  Noted" in everything(desk)


def test_a_warning_about_copies_chooses_the_worst_of_them_and_its_request() -> None:
    script, actions = Script(), FakeActions()
    script.pools()
    for request, blocks in (("first-0001.0", 4), ("second-0002.0", 2)):
        slot = script.run(request, 20)
        script.start(script.promote(script.plan(slot, blocks)))
        script.wait(S)
    script.wait(UNKNOWN_LIMIT_NS)
    desk = desk_of(script, actions=actions)
    desk.select("second-0002.0")
    press(desk, "!")
    for key in "/lint = slow":
        press(desk, "space" if key == " " else key)
    press(desk, "enter")
    press(desk, "enter")
    assert desk.current == TRANSFERS
    assert "first-0001.0" in next(row for row in screen(desk) if row.startswith(desk.glyphs.select))
    press(desk, "w")
    assert ("why", "first-0001.0") in actions.calls


def test_without_warnings_it_tells_what_is_watched() -> None:
    desk = desk_of(late_ns=0)
    desk.lints = Lints()
    desk.mirror.state.holds.clear()  # type: ignore[union-attr]
    desk.mirror.gaps.clear()
    desk.current = WARNINGS
    text = "\n".join(line.text for line in Warnings().body(desk, 80, 20))
    assert "Nothing needs you." in text
    assert "stuck" in text


# --- sort, copy, export ----------------------------------------------------------------------------------------------


def test_transfers_are_sorted_by_key_and_by_a_click_on_the_header() -> None:
    desk = desk_of()
    desk.go(TRANSFERS)
    press(desk, "o")
    assert "sorted by age" in everything(desk)
    press(desk, "O")
    assert "sorted by age reversed" in everything(desk)
    header = next(line for line in desk.draw(80, 24) if "STATUS" in line.text)
    click(desk, header.text.index("BLOCKS"), header)
    assert "sorted by blocks" in everything(desk)
    desk.go(SLOTS)
    header = next(line for line in desk.draw(80, 24) if "REQUEST" in line.text)
    click(desk, header.text.index("REQUEST"), header)
    assert "sorted by request" in everything(desk)


def test_y_copies_more_each_time() -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions)
    desk.select("rag-0002.7")
    desk.go(SLOTS)
    screen(desk)
    for expected in ("rag-0002.7", "● decoding", "sorted by need"):
        press(desk, "y")
        (name, text) = actions.calls.pop()
        assert name == "copy"
        assert expected in str(text)


@pytest.mark.parametrize("view", range(10))
def test_what_is_exported_has_a_column_for_every_cell(view: int) -> None:
    desk = desk_of()
    desk.go(view)
    desk.select("rag-0002.7")
    table = desk.view.rows(desk)
    if table is not None:
        assert all(len(row) == len(table[0]) for row in table[1])
        assert view == 7 or table[1]


@pytest.mark.parametrize("view", range(10))
def test_help_names_only_keys_that_do_something_here(view: int) -> None:
    desk = desk_of()
    desk.go(view)
    press(desk, "?")
    rows = screen(desk, 80, 40)
    assert any("EVERYWHERE" in row for row in rows)
    assert any(row.endswith("leave") or "q " in row for row in rows)
    assert all(len(row) <= 80 for row in rows)
