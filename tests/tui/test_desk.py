"""The desk: what is on the screen, row by row, without a terminal."""


import msgspec
import pytest

from kvbm_console.analysis.colours import DARK, LIGHT
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.ids import Authority, SlotState, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.stream.document import tier_row
from kvbm_console.stream.feed import Disconnected, EventsArrived, FeedItem, GapSeen, SnapshotTaken
from tests.tui.desks import FakeActions, FakeTransport, desk_of, everything, screen
from tests.tui.script import MS, Mono, S, Script, connected, opening, story
from tui.desk import BREAKS, FAST_HZ, LOG, OVERVIEW, RECORD, SLOT, SLOTS, TIERS, TIMELINE, TRANSFERS, WARNINGS, Desk
from tui.draw import frame
from tui.draw.spans import Line
from tui.keys import press
from tui.model.filters import Filter
from tui.model.places import Mark
from tui.model.slots import SlotOrder
from tui.model.timeline import LIVES, LifeOrder
from tui.model.waits import sentences
from tui.source import Kept
from tui.theme import THEMES, Theme

SIZES = [(60, 16), (80, 24), (99, 30), (110, 36), (120, 40), (160, 45), (200, 50), (200, 60), (250, 80)]


# --- the frame -------------------------------------------------------------------------------------------------------


def test_the_status_row_is_the_mock_up() -> None:
    status = frame.StatusRow(
        pill="LIVE", pill_role="pill.ok", target="chat-prod", note="", run=7, iteration=18_204, clock="14:03:07",
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


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
@pytest.mark.parametrize("size", [1, 9, 21, 40, 41, 90, 300])
def test_a_long_name_swallows_nothing(width: int, size: int) -> None:
    """Law: rate, lag, losses, recorder and badges stand on the row whatever the name, two cells behind it."""
    name = "".join(chr(ord("a") + i % 26) for i in range(size))
    for pill, note, recorder in (("LIVE", "", "recording"), ("LIVE −2.1s", "observe", "degraded"), ("LIVE", "", None)):
        text = frame.status_line(frame.StatusRow(
            pill=pill, pill_role="pill.ok", target=name, note=note, run=7, iteration=18_204, clock="14:03:07",
            socket="unix:/run/user/1000/kvbm/chat-prod.sock", rate=1_921, lag=38, lost=921, lost_age_ns=130 * S,
            recorder=recorder, synced_age_ns=400 * MS, not_recorded=12_204, buffered=0, faults=1, cautions=2, holds=1,
        ), width).text
        words = ["1.92k ev/s  lag 38  lost 921", "  rec ", "  !!1 !2 ‖1"]
        if width == 80 and recorder == "degraded":  # the badges need the room of the rate
            words[0] = "  lost 921"
        assert all(word in text for word in words), text
        assert len(text) == width - 1
        shown = text.removeprefix(f" {pill}  ").split(" ", 1)[0]
        assert shown == name or (len(shown) >= frame.NAME_MIN and "…" in shown), text
        assert shown.split("…")[0] == name[: len(shown.split("…")[0])]
        assert shown[0] == name[0]
        assert shown[-1] == name[-1]
        assert text.removeprefix(f" {pill}  {shown}").startswith(f" {note}  " if note else "  "), text


def test_the_tabs_are_the_mock_up() -> None:
    assert frame.tabs_line(0, 80, False).text == (
        "1 Overview 2 Slots 3 Slot 4 Time 5 Transfers 6 Tiers 7 Breaks 8 Rec 9 Log p Map")
    assert frame.tabs_line(0, 120, True).text == (
        " 1 Overview  2 Slots  3 Slot  4 Timeline  5 Transfers  6 Tiers  7 Breakpoints  8 Replay  9 Log  p Prefixes")


def test_the_key_row_is_the_mock_up() -> None:
    hints = (("enter", "open"), ("c", "continue"), ("/", "filter"), (":", "commands"))
    assert frame.keys_line(hints, 80).text == (
        " enter open  c continue  / filter  : commands                   ? help  q quit")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", range(10))
def test_every_view_fills_the_screen_exactly(view: int, size: tuple[int, int]) -> None:
    nothing: list[FeedItem] = [connected(), SnapshotTaken(CacheState())]
    for ascii_only in (False, True):
        for items in (None, nothing):
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

    for view in range(10):
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


@pytest.mark.parametrize(("code", "words"), [
    ("fell_behind", "the reader fell behind"), ("not_kept", "the daemon no longer kept them"),
    ("restarted", "another run began"),
])
def test_the_reason_of_a_loss_is_told_in_words(code: str, words: str) -> None:
    script, mono = story(), Mono()
    desk = desk_of(script, mono=mono)
    seq = script.state.seq
    desk.mirror.take(GapSeen(seq, seq + 920, code), mono.at_ns)
    mono.at_ns += S
    for view in (OVERVIEW, RECORD, LOG, WARNINGS):
        desk.current = view
        text = everything(desk, 120, 40)
        assert words in text
        assert code not in text


def test_targets_with_a_common_beginning_are_told_apart() -> None:
    names = ["inference-cluster-west-prefill", "inference-cluster-west-decode"]
    assert frame.targets_line(names, 0, 80).text.split()[:2] == ["inference-clus…t-prefill", "inference-clus…st-decode"]


def test_before_the_first_request_and_before_the_daemon() -> None:
    script = Script()
    for pool in ((0, 0, 0, 0, Tier.G2, "CPU_PINNED", 128, 16, Authority.LEADER),
                 (1, 1, 0, 0, Tier.G1, "GPU", 64, 16, Authority.OBSERVED)):
        text = everything(desk_of(script))
        assert "No engine has connected to chat-prod, run 7 yet." in text
        assert "No request" not in text
        script.emit(ev.PoolKnown, *pool)
    assert "No request yet. Connected to chat-prod, run 7, iteration 0." in everything(desk_of(script))
    desk = desk_of(items=[Disconnected("nobody listens", 1.0)], late_ns=0)
    assert screen(desk)[2] == " No daemon answered 0 s ago. Next try in 1 s.  r  now"


def test_a_recording_is_read_and_not_connected_to() -> None:
    for items in ([], [connected(recording=True, control=False)]):
        rows = screen(desk_of(items=items, actions=FakeActions(FakeTransport()), late_ns=0))
        assert rows[2] == " Reading …"
        assert "CONNECTING" not in rows[0]
    assert screen(desk_of(items=[], late_ns=0))[2] == " Connecting …"


# --- views -----------------------------------------------------------------------------------------------------------


def test_overview_shows_trouble_first() -> None:
    rows = screen(desk_of())
    assert rows[2] == " NEEDS YOU   1 hold"
    assert rows[3].startswith("  ‖ agent-0003.2  held 3.00s  at breakpoint 1; resumes by itself in 27 s")
    assert rows[4:6] == ["", ""], "three rows always, so that nothing moves"
    assert rows[6] == " CACHE   hit rate, last 4 s, of 18 prompt blocks"
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


def test_another_order_moves_the_selected_row_as_well() -> None:
    script = Script()
    script.pools()
    for name, blocks in (("a", 1), ("b", 3), ("c", 2)):
        script.run(name, blocks)
        script.wait(50 * MS)
    desk = desk_of(script)
    desk.go(SLOTS)
    press(desk, "j")
    order = desk.view.order  # type: ignore[attr-defined]
    for _ in order.columns:
        everything(desk)
        press(desk, "o")
        fresh = SlotOrder().update(desk.mirror, desk.mono(), None, order.text, order.sort, None)
        everything(desk)
        assert desk.order.numbers == fresh, order.text
    desk.go(TIMELINE)
    everything(desk)
    lives = LifeOrder()
    for by_arrival in (True, False):
        press(desk, "o")
        lives.by_arrival = by_arrival
        everything(desk)
        assert desk.view.shown == lives.update(desk.mirror, desk.mono(), None, None)  # type: ignore[attr-defined]


def test_a_timeline_without_a_row_says_why() -> None:
    desk = desk_of()
    desk.go(TIMELINE)
    desk.filters[TIMELINE] = Filter.parse("request ~ nobody", LIVES)
    text = everything(desk)
    assert "0 of 4 requests match  request ~ nobody   esc  clear" in text


def test_what_this_console_records_is_told_where_the_daemon_records_nothing() -> None:
    actions = FakeActions()
    script = story()
    desk = desk_of(script, actions=actions)
    desk.mirror.take(script.heartbeat(recorder=None, synced_age_ns=None), desk.mono())
    desk.go(RECORD)
    assert "rec off" in screen(desk)[0]
    actions.kept = Kept("/tmp/seen.mcap", 1_204, 3 * 2**20, 2)
    rows = screen(desk)
    assert "rec here" in rows[0]
    assert " THIS CONSOLE   records what it sees" in rows
    assert " file           /tmp/seen.mcap" in rows
    assert " events         1,204, 3.00 MiB" in rows
    assert " not recorded   2 events" in rows
    assert not any("Nothing is recorded" in row for row in rows)


def test_one_screen_has_one_rate_of_events() -> None:
    for size in SIZES[4:]:
        text = everything(desk_of(), *size)
        assert text.count("ev/s") == 1
        assert "events/s" not in text
        assert "/step" in text


def test_a_copy_that_is_long_overdue_is_not_said_to_take_about_the_usual() -> None:
    script = Script()
    script.pools()
    slot = script.run("chat-1", 6)
    script.offload(slot, 2)  # 4 ms
    script.start(script.promote(script.plan(slot, 2)))
    for wait_ns, told in (
        (MS, "operation 1, about 4.0 ms on G1→G2"), (31 * S, "operation 1 for 31 s on G1→G2, where most take 4.0 ms"),
    ):
        script.wait(wait_ns)
        script.iterate()
        desk = desk_of(script, late_ns=0)
        waiting = msgspec.structs.replace(script.state.slots[slot], state=SlotState.FINISHING)
        assert sentences(desk.mirror, waiting, desk.mono())[0] == told


def test_no_finished_row_stands_between_live_ones_unless_the_selected_one_would_move() -> None:
    script, mono = Script(), Mono()
    script.pools()
    slots = [script.run(name, 1) for name in ("a", "b", "c", "d")]
    desk = desk_of(script, mono=mono)
    desk.go(SLOTS)
    for selected in (None, "c"):
        desk.select(selected)
        screen(desk)
        first = len(script.events)
        script.finish(slots.pop(0))
        desk.mirror.take(EventsArrived(script.events[first:]), mono.at_ns)
        rows = screen(desk)
        assert any("finished" in row for row in rows) == (selected is not None), rows
    assert next(number for number in desk.order.numbers if number in script.state.slots) == slots[0]
    mono.at_ns += S
    assert not any("finished" in row for row in screen(desk))


def test_stamps_that_say_nothing_have_no_column_and_a_duration_is_no_reason() -> None:
    desk = desk_of()
    desk.go(TRANSFERS)
    rows = screen(desk, 200, 50)
    head = next(row for row in rows if "STATUS" in row)
    assert "ended" in head
    assert "REASON" not in head
    assert "enqueued" not in head, "every candidate was enqueued when it was planned"
    assert any(row.endswith("took 4.0 ms") for row in rows)


def test_another_geometry_after_a_reconnect_is_another_number_of_bytes() -> None:
    script = story()
    desk = desk_of(script)
    desk.go(TRANSFERS)
    assert "640 KiB" in everything(desk, 120, 40)  # 4 blocks of 160 KiB, ended
    desk.mirror.take(Disconnected("gone", 1.0), desk.mono())
    for item in opening(script, incarnation="two", block_bytes=32 * 163_840):
        desk.mirror.take(item, desk.mono())
    text = everything(desk, 120, 40)
    assert "640 KiB" not in text
    assert "20 MiB" in text


def test_another_incarnation_with_the_same_numbers_is_drawn_anew() -> None:
    def of(name: str, incarnation: str) -> list[FeedItem]:
        script = Script()
        script.pools()
        script.run(name, 3)
        return opening(script, incarnation=incarnation)

    desk = desk_of(items=of("chat-0001", "one"))
    for view in (LOG, TIMELINE, SLOTS, TRANSFERS):
        desk.go(view)
        everything(desk)
    for item in of("rag-0002", "two"):
        desk.mirror.take(item, desk.mono())
    for view in (LOG, TIMELINE, SLOTS, TRANSFERS):
        desk.go(view)
        assert "chat-0001" not in everything(desk), view


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


@pytest.mark.parametrize("width", [80, 99, 100, 111, 112, 120, 139, 140, 160])
@pytest.mark.parametrize("size", [4, 13, 30, 60])
def test_the_head_of_a_held_slot_is_never_cut(width: int, size: int) -> None:
    script = Script()
    script.pools()
    slot = script.run("x" * size, 3)
    script.hold(slot, max_hold_ns=30 * S)
    desk = desk_of(script)
    desk.select("x" * size)
    desk.go(SLOT)
    assert "resumes in" in everything(desk, width, 40)


def test_one_slot_tells_its_story() -> None:
    desk = desk_of()
    desk.select("agent-0003.2")
    desk.go(SLOT)
    rows = screen(desk)
    assert rows[3].startswith(" ‖ HELD 3.00s   in ● decoding at breakpoint 1   resumes in 27 s ━")
    assert "you; then the next iteration" in "\n".join(rows)
    assert any("slot held" in row for row in rows)
    desk.select("chat-0001.1")
    assert "finished" in screen(desk)[3]


def test_timeline_walks_events_and_measures() -> None:
    desk = desk_of()
    desk.go(TIMELINE)
    desk.select("rag-0002.7")
    screen(desk)
    press(desk, "n")
    assert "operation started" in screen(desk)[-3]
    press(desk, "m")
    assert "◊" in everything(desk)
    while "→" not in screen(desk)[-3] or "decoding" not in screen(desk)[-3]:
        press(desk, "N")
    rows = screen(desk)
    assert "▲ prefilling → ● decoding" in rows[-3]
    assert "Δ 329 ms, 27 events" in rows[-3]
    assert rows[-2].startswith(" cause  slot moved ")
    assert "iteration scheduled, iteration" in rows[-2]
    assert any("┬" in row for row in rows)


def test_a_gap_is_a_band_through_all_rows() -> None:
    script = story()
    mono = Mono()
    cut = len(script.events) - 15
    items: list[FeedItem] = [connected(), SnapshotTaken(CacheState()), EventsArrived(script.events[:cut]),
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
    assert desk.event == newest - 1
    rows = screen(desk)
    assert next(row for row in rows if row.startswith("▌")).split()[1] == f"{newest - 1:,}"
    assert any(row.startswith(f" seq {newest - 1:,}  ") for row in rows[-5:])
    assert "stopped" in everything(desk)
    press(desk, "pageup")
    assert "newer  G" in everything(desk)
    press(desk, "G")
    assert "following" in everything(desk)
    assert desk.event is None


# --- themes ----------------------------------------------------------------------------------------------------------


def test_themes_resolve_every_role_that_is_drawn() -> None:
    roles: set[tuple[str, str]] = set()
    for view in range(10):
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


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it, from 1 to 21."""
    lights = []
    for colour in (one, other):
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("name", ["dark", "light"])
@pytest.mark.parametrize("role", ["text", "muted", "faint", "ok", "caution", "fault", "hatch", "heldbox", "gap"])
def test_text_can_be_read_on_its_ground(name: str, role: str) -> None:
    style = Theme(name).style(role)
    assert style.color is not None
    assert style.bgcolor is not None
    assert contrast(style.color.name, style.bgcolor.name) >= 3


def test_without_colour_trouble_is_bold_and_selection_is_reverse() -> None:
    theme = Theme("none")
    assert theme.style("fault").bold
    assert theme.style("mark.caution").bold
    assert theme.style("text", "sel").reverse
    assert theme.style("pill.ok").reverse


def test_when_everything_in_flight_is_held_every_view_says_so() -> None:
    script = story()
    desk = desk_of(script)
    assert "Everything in flight" not in everything(desk), "one of three stands still"
    for slot in [slot for slot in script.state.slots.values() if slot.hold is None]:
        script.hold(slot.slot)
    desk = desk_of(script)
    assert len(script.state.holds) == 3
    for view in "123456789":
        press(desk, view)
        assert screen(desk)[2].startswith(" Everything in flight is held (3). Resumes by itself in "), view
        assert "C  continue all" in screen(desk)[2]
    script.release(next(iter(script.state.holds)), S)
    assert "Everything in flight" not in everything(desk_of(script))


def test_beside_requests_the_pools_of_several_engines_are_told_apart_and_an_end_is_said() -> None:
    script = story()
    first = len(script.state.pools)
    for number in range(2):
        script.emit(ev.PoolKnown, first + number, 5 + number, number, 0, Tier.G1, "GPU", None, 16, Authority.STREAM)
    for number in range(2):
        script.emit(ev.BlocksSeen, first + number, pack_hashes(range(1, 4 + number)), b"", False)
    script.emit(ev.SourceLost, 5, 0, 0, False, True)
    desk = desk_of(script, late_ns=0)
    rows = {row.text.split()[1]: row for row in desk.draw(120, 40) if row.text.startswith(" G1 e")}
    assert set(rows) == {"e5", "e6"}
    assert "its engine ended" in rows["e5"].text
    assert "stale" in {span.role for span in rows["e5"].spans}
    assert " e6 r1" in rows["e6"].text
    assert " 4/–" in rows["e6"].text
    assert "stale" not in {span.role for span in rows["e6"].spans}


def test_a_replay_is_drawn_at_the_time_of_its_steps() -> None:
    """Ten thousand batches of the last hour come at once, and none of their blocks was stored just now."""
    script = story()
    pool = len(script.state.pools)
    script.emit(ev.PoolKnown, pool, 5, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM)
    for age_s, blocks in ((3600, 700), (30, 60), (0, 1)):
        hashes = pack_hashes(range(age_s + 1, age_s + 1 + blocks))
        script.emit(ev.BlocksSeen, pool, hashes, b"", False, age_ns=age_s * S)
    script.emit(ev.BlocksSeen, pool, pack_hashes([9_999]), b"", False, age_ns=None)
    desk = desk_of(script, late_ns=0)
    stored = desk.mirror.flows.stored[pool]
    assert stored.total(3, desk.now_ns) == 1
    assert stored.total(60, desk.now_ns) == 61


@pytest.mark.parametrize("size", SIZES)
def test_tiers_say_how_soon_what_was_evicted_was_asked_for_again(size: tuple[int, int]) -> None:
    """Of the host tier 6, 2 and 2 blocks came back within 200 ms, 1 s and 5 s; of the device nothing is known."""
    script = story()
    slot = script.open("again", blocks=10)
    script.emit(ev.PrefixScored, slot, 10, (0, 0, 0, 0), (2, 2, 2), (200 * MS, S, 5 * S), (6, 2, 2))
    desk = desk_of(script)
    desk.current = TIERS
    rows = "\n".join(screen(desk, *size))
    if size[1] >= 24:
        assert "asked again 10: half within 200ms, 90 % within 5.00s" in rows
        assert "asked again –" in rows
    else:
        assert "again 200ms" in rows
        assert "again –" in rows
        assert "hit " in rows


def test_tables_of_numbers_change_eight_times_a_second_while_events_come_too_fast_to_read() -> None:
    desk, mono = desk_of(), Mono(0)
    desk.mono = mono
    drawn = 0

    def make() -> list[Line]:
        nonlocal drawn
        drawn += 1
        return []

    def second() -> int:
        nonlocal drawn
        drawn = 0
        for frame_number in range(30):
            mono.at_ns += S // 30
            desk.mirror.progress.arrived(rate // 30, mono.at_ns)
            desk.paced("a", make)
            if frame_number % 10 == 0:
                desk.width += 1  # another size is another picture
        return drawn

    rate = 0
    assert second() == 30
    rate = 100_000
    second()
    assert second() == pytest.approx(FAST_HZ + 3, abs=2)


@pytest.mark.parametrize("authority", [Authority.OBSERVED, Authority.STREAM, Authority.ENGINE])
def test_own_tiers_that_no_engine_uses_are_not_shown_beside_a_watched_engine(authority: Authority) -> None:
    script = Script()
    script.emit(ev.PoolKnown, 0, 0, 0, 0, Tier.G2, "CPU_PINNED", 128, 16, Authority.LEADER)
    script.emit(ev.PoolKnown, 1, 0, 0, 0, Tier.G3, "DISK", 256, 16, Authority.LEADER)
    assert script.state.shown_pools == script.state.pools, "without an engine they are all there is"
    script.emit(ev.PoolKnown, 2, 5, 0, 0, Tier.G1, "GPU", 64, 16, authority)
    script.emit(ev.PoolKnown, 3, 5, 0, 0, Tier.G2, "CPU", 32, 16, authority)
    if authority is not Authority.STREAM:
        script.open("a", source=5)
    uses = authority is Authority.ENGINE
    assert [pool.info.pool for pool in script.state.shown_pools] == ([0, 1, 2, 3] if uses else [2, 3])
    desk = desk_of(script)
    for view in "16":
        press(desk, view)
        told = "\n".join(line.text for size in ((80, 24), (120, 40), (200, 60)) for line in desk.draw(*size))
        assert ("/256" in told) == uses, view
        assert ("/128" in told) == uses, view
    tier = tier_row(script.state, Tier.G2)
    assert tier["capacity_blocks"] == (160 if uses else 32)
    assert tier_row(script.state, Tier.G3)["capacity_blocks"] == (256 if uses else 0)


def test_the_chosen_mark_may_go_while_nothing_is_drawn() -> None:
    actions = FakeActions(FakeTransport())
    desk = desk_of(items=[connected(recording=True, control=False), story().snapshot()], actions=actions)
    desk.current = RECORD
    for seq in (5, 9):
        desk.marks.toggle(Mark(seq, seq * S))
    press(desk, "G")
    desk.draw(50, 12)
    for key in ("x", "enter"):
        press(desk, key)
    assert actions.playback is not None
    assert actions.playback.calls == [("seek", 5)], "the mark that is left"


def test_enter_is_offered_where_it_goes_somewhere() -> None:
    tape: list[FeedItem] = [connected(recording=True, control=False), story().snapshot()]
    for items in (None, tape):
        desk = desk_of(items=items, actions=FakeActions(FakeTransport() if items else None))
        desk.current = RECORD
        assert "enter" not in dict(desk.hints)
        desk.marks.toggle(Mark(5, 5 * S))
        assert "enter" in dict(desk.hints)
    quiet = desk_of(Script())
    quiet.current = WARNINGS
    assert not quiet.warnings
    assert "enter" not in dict(quiet.hints)
    assert dict(quiet.hints)["↑↓"] == "scroll"
    desk = desk_of()
    desk.current = WARNINGS
    assert dict(desk.hints)["enter"] == "go there"


def test_a_click_on_a_word_of_the_key_row_is_its_key() -> None:
    for width in (60, 80, 120):
        line = frame.keys_line((("enter", "open"),), width)
        for text, key in (("help", "?"), ("quit", "q"), ("open", "enter")):
            cells = range(line.text.index(text), line.text.index(text) + len(text))
            assert all(any(zone.start <= x < zone.end and zone.action == ("key", key) for zone in line.zones)
                       for x in cells)
