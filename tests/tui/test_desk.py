"""The desk: what is on the screen, row by row, and what every key does, without a terminal."""

from collections.abc import Callable

import pytest

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import Disconnected, EventsArrived, FeedItem, GapSeen, SnapshotTaken
from tests.tui.script import MS, Mono, S, Script, connected, opening, story
from tui.desk import BREAKS, LOG, OVERVIEW, SLOT, SLOTS, TIMELINE, TRANSFERS, Desk
from tui.draw import frame
from tui.draw.glyphs import ASCII, UNICODE
from tui.keys import press
from tui.model.mirror import Mirror
from tui.theme import DARK, LIGHT, THEMES, Theme
from tui.views import all_views

SIZES = [(60, 16), (80, 24), (99, 30), (110, 36), (120, 40), (160, 45), (200, 50), (200, 60), (250, 80)]


class FakeTape:
    """What ``Transport`` remembers of a recording."""

    def state_at(self, seq: int) -> CacheState:
        raise NotImplementedError

    def events(self, first_seq: int | None = None) -> "list[list[object]]":
        raise NotImplementedError


class FakeTransport:
    """A transport that remembers what was asked."""

    def __init__(self) -> None:
        self.position_seq, self.first_seq, self.last_seq, self.at_ns = 50, 0, 100, 7 * S
        self.playing, self.speed = False, 1.0
        self.calls: list[tuple[object, ...]] = []
        self.recording = FakeTape()

    def toggle(self) -> None:
        self.playing = not self.playing

    def set_speed(self, speed: float) -> None:
        self.speed = speed

    def step(self, n: int = 1) -> None:
        self.calls.append(("step", n))

    def seek(self, seq: int) -> None:
        self.calls.append(("seek", seq))

    def density(self, cells: int) -> list[int]:
        return [1] * cells


class FakeActions:
    """What the desk asks of the session, remembered."""

    def __init__(self, playback: FakeTransport | None = None) -> None:
        self.paused = self.overflowed = False
        self.buffered = 0
        self.playback = playback
        self.control = True
        self.calls: list[tuple[object, ...]] = []

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, *arguments))


def desk_of(
    script: Script | None = None, *, mono: Mono | None = None, items: list[FeedItem] | None = None,
    late_ns: int = 3 * S, actions: FakeActions | None = None, ascii_only: bool = False, read_only: bool = False,
) -> Desk:
    """A desk on a folded script, after lints have had their two seconds."""
    mono = mono or Mono()
    mirror = Mirror()
    for item in items if items is not None else opening(script or story()):
        mirror.take(item, mono.at_ns)
    desk = Desk(mirror, actions or FakeActions(), mono, all_views(),  # type: ignore[arg-type]
                glyphs=ASCII if ascii_only else UNICODE, read_only=read_only)
    desk.draw(80, 24)
    for _ in range(3 if late_ns else 0):
        mono.at_ns += late_ns // 3
        if script is not None or items is None:
            mirror.take((script or story()).heartbeat(), mono.at_ns)
        desk.draw(80, 24)
    return desk


def screen(desk: Desk, width: int = 80, height: int = 24) -> list[str]:
    return [line.text.rstrip() for line in desk.draw(width, height)]


def everything(desk: Desk, width: int = 80, height: int = 24) -> str:
    return "\n".join(screen(desk, width, height))


# --- the frame -------------------------------------------------------------------------------------------------------


def test_the_status_row_is_the_mock_up() -> None:
    status = frame.Status(
        pill="LIVE", pill_role="pill.ok", target="chat-prod", note="", run=7, iteration=18_204, at_ns=50_587 * S,
        socket="unix:/run/user/1000/kvbm/chat-prod.sock", rate=1_921, lag=38, lost=921, lost_age_ns=130 * S,
        recorder="recording", synced_age_ns=400 * MS, not_recorded=0, buffered=0, faults=1, cautions=2, holds=1,
    )
    assert frame.status_line(status, 80).text == (
        " LIVE  chat-prod  run 7       1.92k ev/s  lag 38  lost 921  rec 0.4s  !!1 !2 ‖1")
    assert frame.status_line(status, 120).text == (
        " LIVE  chat-prod  run 7  iteration 18,204        1.92k ev/s  lag 38  lost 921 2m10s ago  rec synced 0.4s ago"
        "  !!1 !2 ‖1")
    assert frame.status_line(status, 200).text == (
        " LIVE  chat-prod  run 7  iteration 18,204  14:03:07  unix:/run/user/1000/kvbm/chat-prod.sock" + " " * 37
        + "1.92k ev/s  lag 38  lost 921 2m10s ago  rec synced 0.4s ago  !!1 !2 ‖1")


def test_the_tabs_are_the_mock_up() -> None:
    assert frame.tabs_line(0, 80, False).text == (
        "1 Overview 2 Slots 3 Slot 4 Timeline 5 Transfers 6 Tiers 7 Breaks 8 Record 9 Log")
    assert frame.tabs_line(0, 120, True).text == (
        " 1 Overview  2 Slots  3 Slot  4 Timeline  5 Transfers  6 Tiers  7 Breakpoints  8 Replay  9 Log")


def test_the_key_row_is_the_mock_up() -> None:
    hints = [("enter", "open"), ("c", "continue"), ("/", "filter"), (":", "commands")]
    assert frame.keys_line(hints, 80).text == (
        " enter open  c continue  / filter  : commands                   ? help  q quit")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", range(9))
def test_every_view_fills_the_screen_exactly(view: int, size: tuple[int, int]) -> None:
    for ascii_only in (False, True):
        for items in (None, [connected(), SnapshotTaken(CacheState())]):
            desk = desk_of(items=items, ascii_only=ascii_only)
            desk.current = view
            for selected in (None, "agent-0003.2", "chat-0001.1", "unknown"):
                desk.select(selected)
                lines = desk.draw(*size)
                assert len(lines) == size[1]
                assert max(line.width for line in lines) <= size[0]
                allowed = {1} if size[0] == 80 else set()
                for y, line in enumerate(lines):
                    full = line.width == size[0] and line.text[-1] not in " ─-▏]"
                    assert not full or y in allowed or line.ground, (y, line.text)


def test_a_screen_that_is_too_small_says_so() -> None:
    desk = desk_of()
    assert "Needs 60x16, has 52x14" in everything(desk, 52, 14)


def test_ascii_needs_no_other_character_from_the_glyph_tables() -> None:
    from tui.draw.glyphs import TRANSLATE

    for view in range(9):
        desk = desk_of(ascii_only=True)
        desk.current = view
        desk.select("agent-0003.2")
        for width, height in ((80, 24), (120, 40)):
            text = "\n".join(screen(desk, width, height)).translate(TRANSLATE)
            assert text.isascii(), {character for character in text if not character.isascii()}


# --- can the screen be believed --------------------------------------------------------------------------------------


def pill(desk: Desk) -> str:
    return desk.draw(120, 40)[0].spans[0].text.strip()


def test_pills() -> None:
    mono = Mono()
    script = story()
    actions = FakeActions()
    desk = desk_of(script, mono=mono, actions=actions)
    assert pill(desk) == "LIVE"
    desk.mirror.take(script.heartbeat(head_seq=script.state.seq + 40), mono.at_ns)
    mono.at_ns += 1_500 * MS
    assert pill(desk) == "LIVE −1.5s"
    assert "lag 41" in everything(desk)
    mono.at_ns += 3 * S
    assert pill(desk) == "STALE 4s"
    assert {span.role for line in desk.draw(80, 24)[2:-1] for span in line.spans} == {"stale"}
    desk.mirror.take(Disconnected("socket closed", 3.0), mono.at_ns)
    assert pill(desk) == "RETRY 3s"
    assert "Daemon gone 0 s ago. Shown: seq" in everything(desk)
    assert "Next try in 3 s.  r  now" in everything(desk)
    desk.mirror.take(connected(), mono.at_ns)
    actions.paused = True
    desk.mirror.take(script.heartbeat(), mono.at_ns)
    assert pill(desk) == "PAUSED"
    actions.overflowed = True
    assert pill(desk) == "PAUSED full"


def test_a_loss_stays_visible() -> None:
    mono = Mono()
    script = story()
    desk = desk_of(script, mono=mono)
    seq = script.state.seq
    desk.mirror.take(GapSeen(seq, seq + 920, "ring overrun"), mono.at_ns)
    assert "lost 921" in everything(desk)
    assert "lost 921 0ms ago" in everything(desk, 120, 40)
    mono.at_ns += 400 * S
    desk.mirror.take(script.heartbeat(), mono.at_ns)
    assert "lost 921" in everything(desk)


def test_before_the_first_request_and_before_the_daemon() -> None:
    desk = desk_of(items=[connected(), SnapshotTaken(CacheState())])
    assert "No request yet. Connected to chat-prod, run 7, iteration 0." in everything(desk)
    desk = desk_of(items=[Disconnected("nobody listens", 1.0)])
    assert "No daemon" in everything(desk)


# --- views -----------------------------------------------------------------------------------------------------------


def test_overview_shows_trouble_first() -> None:
    rows = screen(desk_of())
    assert rows[2] == " NEEDS YOU   1 caution"
    assert rows[3].startswith("  ‖ agent-0003.2  held 3.00s  at breakpoint 1; resumes by itself in 27 s")
    assert rows[4] == " CACHE   hit rate, last 60 s, of 18 prompt blocks"
    assert any(row.startswith(" G1 device ━") and "20/64" in row for row in rows)
    assert any("↓ G1→G2" in row for row in rows)


def test_slots_are_sorted_by_need() -> None:
    desk = desk_of()
    desk.go(SLOTS)
    rows = screen(desk)
    assert rows[2] == " 3 live  1 held  sorted by need"
    assert rows[3] == "    STATE               AGE  REQUEST        PROMPT     WAITS FOR"
    assert [row[29:41].strip() for row in rows[4:7]] == ["agent-0003.2", "chat-0004.1", "rag-0002.7"]
    assert rows[4].startswith("  ‖ ● decoding        3.00s  agent-0003.2")
    assert rows[4].endswith("breakpoint 1, 27 s left")


def test_the_selected_row_never_moves_by_itself() -> None:
    mono = Mono()
    script = story()
    desk = desk_of(script, mono=mono)
    desk.go(SLOTS)
    press(desk, "j")
    press(desk, "j")
    assert desk.selected == "chat-0004.1"
    at = next(y for y, row in enumerate(screen(desk)) if row.startswith("▌"))
    hold = next(iter(script.state.holds))
    script.wait(2 * S)
    script.release(hold, 2 * S)
    desk.mirror.take(EventsArrived(script.events[-1:]), mono.at_ns)
    mono.at_ns += 2 * S
    desk.mirror.take(script.heartbeat(), mono.at_ns)
    assert screen(desk)[at].startswith("▌")
    assert "chat-0004.1" in screen(desk)[at]


def test_one_selection_is_shared_by_all_views() -> None:
    desk = desk_of()
    desk.go(SLOTS)
    press(desk, "j")
    press(desk, "enter")
    assert desk.current == SLOT
    assert "agent-0003.2   slot 2, arrived" in everything(desk)
    press(desk, "t")
    assert desk.current == TIMELINE
    assert any(row.startswith("▌   ‖ agent-0003.2") for row in screen(desk))
    press(desk, "escape")
    press(desk, "escape")
    assert desk.current == SLOTS
    assert desk.selected == "agent-0003.2"


def test_one_slot_tells_its_story() -> None:
    desk = desk_of()
    desk.select("agent-0003.2")
    desk.go(SLOT)
    rows = screen(desk)
    assert rows[3].startswith(" ‖ HELD 3.00s   in ● decoding at breakpoint 1   resumes in 27 s ━")
    assert "you; then the next iteration" in "\n".join(rows)
    assert any("SlotHeld" in row for row in rows)
    desk.select("chat-0001.1")
    assert "finished" in screen(desk)[3]


def test_timeline_walks_events_and_measures() -> None:
    desk = desk_of()
    desk.go(TIMELINE)
    desk.select("rag-0002.7")
    screen(desk)
    press(desk, "n")
    assert "prefilling → ● decoding" in everything(desk)
    press(desk, "m")
    press(desk, "N")
    rows = screen(desk)
    assert "· initialized → ▲ prefilling" in rows[-3]
    assert "Δ 20 ms" in rows[-3]
    assert rows[-2].startswith(" cause  build_connector_metadata, iteration")
    assert any("┬" in row for row in rows)


def test_a_gap_is_a_band_through_all_rows() -> None:
    script = story()
    mono = Mono()
    cut = len(script.events) - 15
    items = [connected(), SnapshotTaken(CacheState()), EventsArrived(script.events[:cut]),
             GapSeen(cut, len(script.events) - 1, "ring overrun"), script.snapshot(), script.heartbeat()]
    desk = desk_of(script, mono=mono, items=items, late_ns=0)
    desk.go(TIMELINE)
    rows = screen(desk, 120, 40)
    label = next(row for row in rows if "gap 15" in row)
    x = label.index("gap 15")
    assert {row[x] for row in rows[6:10]} == {"░"}


def test_transfers_list_open_ones_with_their_reason() -> None:
    desk = desk_of()
    desk.go(TRANSFERS)
    rows = screen(desk)
    assert rows[2].startswith(" TRANSFERS   1 open")
    assert any("● promoted" in row and "rag-0002.7" in row and "on the wire" in row for row in rows)
    press(desk, "j")
    rows = screen(desk)
    assert any(row.startswith("▌") for row in rows)
    assert "planned 0" in rows[-3]
    assert desk.selected == "rag-0002.7"


def test_breakpoints_and_holds() -> None:
    desk = desk_of()
    desk.go(BREAKS)
    text = everything(desk)
    assert "BREAKPOINTS   1 armed of 1" in text
    assert "transition.did" in text
    assert "1 of 4 allowed" in text
    assert "pins 8 G1" in text


def test_the_log_follows_until_it_is_scrolled() -> None:
    desk = desk_of()
    desk.go(LOG)
    newest = desk.mirror.log[-1].seq
    assert f"{newest:,}" in screen(desk)[-2]
    press(desk, "k")
    press(desk, "k")
    assert "2 newer  G" in everything(desk)
    press(desk, "G")
    assert "following" in everything(desk)


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", "123456789")
def test_digits_show_views(key: str) -> None:
    desk = desk_of()
    press(desk, key)
    assert desk.current == int(key) - 1


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
    assert "column 1: no field `ragx`" in screen(desk)[-1]
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
    assert actions.calls.pop() == (
        "add_breakpoint", BreakpointSpec(to_state=SlotState.FINISHING, request="rag-0002.7"))
    press(desk, "c")
    assert actions.calls.pop() == ("continue_hold", 1)
    press(desk, "s")
    assert actions.calls.pop() == ("step", 1)
    press(desk, "D")
    assert not actions.calls
    for key in ("y", "enter"):
        press(desk, key)
    assert actions.calls.pop() == ("disarm",)
    press(desk, "D")
    for key in ("n", "enter"):
        press(desk, key)
    assert not actions.calls
    press(desk, "C")
    assert actions.calls.pop() == ("continue_hold", None)


@pytest.mark.parametrize("key", ["b", "c", "s", "D", "C"])
def test_without_control_nothing_is_asked_and_the_reason_is_told(key: str) -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions, read_only=True)
    press(desk, key)
    assert not actions.calls
    assert f"{key}: not here, read-only" in screen(desk)[-1]
    assert "chat-prod read-only" in screen(desk)[0]


def test_a_stop_is_announced_for_eight_seconds() -> None:
    mono = Mono()
    script = story()
    actions = FakeActions()
    desk = desk_of(script, mono=mono, actions=actions)
    mono.at_ns += 9 * S
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
    mono.at_ns += 8 * S + 1
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
    items = [connected(recording=True, control=False), script.snapshot()]
    desk = desk_of(script, items=items, actions=FakeActions(transport), late_ns=0)
    assert " PAUSED  00:00:07.000  seq 50 of 100  ━" in screen(desk)[-2]
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
    desk.click(zone.start, bar)
    assert transport.calls[-1] == ("seek", 0)
    desk.click(zone.end - 1, bar)
    assert transport.calls[-1] == ("seek", 100)
    assert "8 Replay" in screen(desk)[1]


@pytest.mark.parametrize(("typed", "said"), [
    ("fly", ":fly: no command `fly`"), ("seek 3", ":seek 3: only a recording can do that"),
    ("view x", ":view x: invalid literal"), ("break to nowhere", "to must be one of"),
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
    desk.click(tabs.text.index("2 Slots"), tabs)
    assert desk.current == SLOTS
    lines = desk.draw(80, 24)
    desk.click(30, lines[4])
    assert desk.selected == "agent-0003.2"
    desk.click(30, desk.draw(80, 24)[4])
    assert desk.current == SLOT
    keys = desk.draw(80, 24)[-1]
    desk.click(keys.text.index("? help"), keys)
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
    assert desk.current == OVERVIEW


# --- themes ----------------------------------------------------------------------------------------------------------


def test_themes_resolve_every_role_that_is_drawn() -> None:
    roles: set[tuple[str, str]] = set()
    for view in range(9):
        desk = desk_of()
        desk.current = view
        desk.select("agent-0003.2")
        for size in ((80, 24), (120, 40), (200, 50)):
            roles |= {(span.role, line.ground) for line in desk.draw(*size) for span in line.spans}
    assert len(roles) > 40
    for name in THEMES:
        theme = Theme(name)
        for role, ground in roles:
            style = theme.style(role, ground)
            if name == "none":
                assert style.color is None
                assert style.bgcolor is None
    assert DARK.keys() == LIGHT.keys()


def test_without_colour_trouble_is_bold_and_selection_is_reverse() -> None:
    theme = Theme("none")
    assert theme.style("fault").bold
    assert theme.style("mark.caution").bold
    assert theme.style("text", "sel").reverse
    assert theme.style("pill.ok").reverse
