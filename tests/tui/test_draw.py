"""Bars, trends, tables and rows: rounded down, blank where nothing is known, columns that stand still."""

from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.analysis.lives import Life, Move, Stay
from kvbm_console.core.ids import SlotState, WaitPoint
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.tui.desks import desk_of, screen
from tests.tui.script import MS, S, Script, connected, opening, story
from tui.draw import bars, table
from tui.draw.bars import divide
from tui.draw.frame import Transport, transport_line
from tui.draw.glyphs import ASCII, UNICODE
from tui.draw.lifeline import HELD, LATE, VERY_LATE, Lifelines, Window, busy_cells, runs, transfer_codes
from tui.draw.spans import Line, Row, Span, beside, crop
from tui.draw.table import Column
from tui.model.history import PAST_MAX
from tui.model.mirror import Mirror
from tui.model.series import Density, Gauge, Sums, from_left, percentile, resample, window_of
from tui.model.slots import Limits
from tui.model.timeline import LifeOrder


def no_limits(_: Life, __: SlotState) -> None:
    """As for a life that works."""


def life_codes(life: Life, window: Window, limits: Limits) -> bytearray:
    """The codes of a life that was not drawn before."""
    return Lifelines().codes(life, window, limits)[0]


def text(spans: list[Span]) -> str:
    return "".join(span.text for span in spans)


def test_a_level_is_full_only_when_the_value_is() -> None:
    assert text(bars.level(0.99, 16, UNICODE, "g1")) == "━━━━━━━━━━━━━━━╸"
    assert text(bars.level(1.0, 4, UNICODE, "g1")) == "━━━━"
    assert text(bars.level(0.0, 4, UNICODE, "g1")) == "────"
    assert text(bars.level(0.0001, 4, UNICODE, "g1")) == "╸───"
    assert text(bars.level(None, 4, UNICODE, "g1")) == "────"


def test_a_trend_draws_blanks_for_missing_samples_and_never_zero() -> None:
    assert text(bars.trend([None, 0.0, 0.5, 1.0], UNICODE, 1.0)) == " ▁▃▆"
    assert text(bars.trend([None, None], UNICODE)) == "  "
    assert text(bars.trend([1.0, 6.0], ASCII)) == "_*"


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=8), st.integers(0, 120))
def test_divided_cells_add_up(amounts: list[int], cells: int) -> None:
    widths = divide(amounts, cells)
    assert sum(widths) == (cells if sum(amounts) else 0)
    assert all(width >= 0 for width in widths)
    if cells >= len(amounts):
        assert all(width > 0 for width, amount in zip(widths, amounts, strict=True) if amount and cells)


def test_a_chart_has_its_labels_and_its_window() -> None:
    lines = bars.chart("G1 OCCUPANCY", "50 %", [None] * 570 + [0.5] * 30, 30, 4, 10, UNICODE)
    assert [line.text for line in lines] == [
        " G1 OCCUPANCY   50 %  last 60 s", "  100      ", "           ", "      █████", "    0 █████",
    ]


def test_young_charts_fill_from_the_left_on_one_axis() -> None:
    script = story()
    for _ in range(20):
        script.wait(S)
        script.iterate()
    desk = desk_of(items=[connected(), SnapshotTaken(CacheState()), EventsArrived(script.events)], late_ns=0)
    known = (script.at_ns - script.events[0].at_ns) // S + 1
    assert desk.known_s == known < 60
    rows = screen(desk, 200, 60)
    head = next(row for row in rows if row.startswith(" TIERS"))
    pool = rows[rows.index(head) + 1]
    at = head.index("60 s")
    assert pool[at : at + 8].rstrip() == pool[at : at + 8][: -(-known * 8 // 60)]
    assert pool[at] != " "
    early = from_left([*[None] * 35, *[1.0] * 25], 25, 12)
    late = from_left([*[None] * 50, *[1.0] * 10], 25, 12)
    assert early == [1.0] * 5
    assert late == [None, None, None, 1.0, 1.0]


def test_columns_stand_still_and_narrow_screens_lose_the_least_important() -> None:
    columns: list[Column[str]] = [
        Column(name="A", width=3, cell=lambda item, size, glyphs: [Span(item, "text")], right=True),
        Column(name="B", width=4, cell=lambda item, size, glyphs: [Span("b" * 9, "text")], from_width=20),
        Column(name="REST", cell=lambda item, size, glyphs: [Span("x" * size, "text")]),
    ]
    wide = table.layout(columns, 20)
    assert [(column.name, x, size) for column, x, size in wide] == [("A", 1, 3), ("B", 5, 4), ("REST", 10, 9)]
    assert table.cells(wide, "7", UNICODE).line().text == "   7 bbbb xxxxxxxxx"
    assert table.header(wide).text == "   A B    REST"
    assert [column.name for column, _, _ in table.layout(columns, 19)] == ["A", "REST"]


def test_the_window_moves_as_little_as_possible() -> None:
    assert table.window(100, None, 90, 20) == 80
    assert table.window(100, 5, 10, 20) == 5
    assert table.window(100, 40, 10, 20) == 21
    assert table.window(3, 2, 2, 20) == 0


def test_rows_keep_zones_at_their_cells() -> None:
    left = Row().put("ab", "text", ("one",)).line()
    right = Row().put("cd", "text", ("two",)).line()
    (joined,) = beside([left], [right], 5)
    assert joined.text == "ab   cd"
    assert [(zone.start, zone.end, zone.action) for zone in joined.zones] == [(0, 2, ("one",)), (5, 7, ("two",))]
    assert crop(Line((Span("abcdef", "text"),)), 4).text == "abcd"


def mirror_of(script: Script) -> Mirror:
    mirror = Mirror()
    for item in opening(script):
        mirror.take(item, 0)
    return mirror


def test_a_life_is_drawn_with_what_fills_most_of_a_cell_and_holds_on_top() -> None:
    script = Script()
    script.pools()
    slot = script.open("a", 4)
    script.wait(20 * MS)
    script.admit(slot)
    script.move(slot, SlotState.PREFILLING)
    script.wait(30 * MS)
    script.move(slot, SlotState.DECODING)
    script.wait(30 * MS)
    hold = script.hold(slot)
    script.wait(10 * MS)
    script.release(hold, 10 * MS)
    script.wait(10 * MS)
    mirror = mirror_of(script)
    life = mirror.lives[slot]
    window = Window(0, 10 * MS, 11, 100 * MS)
    assert text(runs(life_codes(life, window, no_limits), set(), UNICODE)) == "··███▄▄▄╱▄ "
    assert text(runs(life_codes(life, Window(0, 50 * MS, 2, 100 * MS), no_limits), set(), UNICODE)) == "█╱"


def test_past_its_limit_a_stay_is_late_and_then_very_late() -> None:
    script = Script()
    script.pools()
    slot = script.open("a", 4)
    script.wait(200 * S)
    life = mirror_of(script).lives[slot]
    codes = life_codes(
        life, Window(0, 10 * S, 20, 200 * S), lambda _, state: 10 * S if state is SlotState.INITIALIZED else None
    )
    assert codes.count(LATE) == 3
    assert codes.count(VERY_LATE) == 16


def test_a_cell_with_many_changes_is_marked() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    for state in (SlotState.SKIPPED_DECODE, SlotState.DECODING) * 3:
        script.wait(MS)
        script.move(slot, state)
    life = mirror_of(script).lives[slot]
    window = Window(0, 25 * MS, 4, 100 * MS)
    assert busy_cells(life, window) == {1}
    assert any(span.role.endswith(".u") for span in runs(life_codes(life, window, no_limits), {1}, UNICODE))


def test_pictures_are_kept_until_the_life_or_the_window_changes() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    mirror = mirror_of(script)
    lines, life = Lifelines(), mirror.lives[slot]
    window = Window(0, 10 * MS, 10, 31 * MS)
    _, _, first = lines.ink(life, window, {}, UNICODE)
    assert lines.ink(life, Window(0, 10 * MS, 10, 32 * MS), {}, UNICODE)[2] is first
    assert lines.ink(life, Window(0, 10 * MS, 10, 41 * MS), {}, UNICODE)[2] is not first
    life.close(41 * MS)
    at, _, closed = lines.ink(life, Window(0, 10 * MS, 10, 41 * MS), {}, UNICODE)
    assert closed is not first
    assert lines.ink(life, Window(0, 10 * MS, 10, 99 * MS), {}, UNICODE)[2] is closed
    shifted = lines.ink(life, Window(10 * MS, 10 * MS, 10, 99 * MS), {}, UNICODE)
    assert shifted[2] is closed if at else shifted[0] == 0  # what the window's edge does not cut only moves


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", "", "skip", "decode", "hold", "release", "close"])),
                min_size=1, max_size=25), st.sampled_from([5, 10, 40]))
def test_what_time_adds_to_a_picture_is_what_a_new_picture_has(steps: list[tuple[int, str]], cell: int) -> None:
    life = Life(0, "a", 0)
    life.add(Move(0, SlotState.DECODING, 1))
    lines, now, holds = Lifelines(), 0, 0

    def limits(_: Life, state: SlotState) -> int | None:
        return 70 * MS if state is SlotState.SKIPPED_DECODE else None

    for wait, step in steps:
        now += wait * MS
        if step in ("skip", "decode") and life.closed_ns is None:
            life.add(Move(now, SlotState.DECODING if step == "decode" else SlotState.SKIPPED_DECODE, now))
        elif step == "hold" and life.held_now() is None:
            holds += 1
            life.stays.append(Stay(holds, now, WaitPoint.SCHEDULE, ()))
            life.changes += 1
        elif step == "release" and (stay := life.held_now()) is not None:
            stay.end_ns = now
            life.changes += 1
        elif step == "close" and life.closed_ns is None:
            life.close(now)
        start = (now // (cell * MS) - 11) * cell * MS
        window = Window(start, cell * MS, 12, now)
        codes, busy = life_codes(life, window, limits), busy_cells(life, window)
        first, end, ink = lines.ink(life, window, limits, UNICODE)
        assert lines.codes(life, window, limits) == (codes, busy)
        assert end == len(codes.rstrip(b"\0")) or not any(codes)
        shown = Row().to(first).spans(ink).to(window.cells).line().spans
        assert shown == Row().spans(runs(codes, busy, UNICODE)).line().spans


def test_a_transfer_shows_its_queue_its_wire_and_where_it_was_held() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    start = script.at_ns
    candidate = script.plan(slot)
    script.wait(10 * MS)
    hold = script.hold(slot)
    script.wait(20 * MS)
    script.release(hold, 20 * MS)
    operation = script.promote(candidate)
    script.start(operation)
    script.wait(20 * MS)
    script.complete(operation)
    mirror = mirror_of(script)
    codes = transfer_codes(mirror.ended[-1], mirror.lives[slot], Window(start, 10 * MS, 6, script.at_ns))
    assert text(runs(codes, set(), UNICODE)) == "┄╱╱━━━"
    assert HELD in codes


def test_series_keep_seconds_that_were_not_seen_blank() -> None:
    sums = Sums()
    sums.add(S, 5)
    sums.add(3 * S, 7)
    assert sums.last(4, 3 * S) == [None, 5, 0, 7]
    sums.blank(5 * S)
    sums.add(6 * S, 1)
    assert sums.last(4, 6 * S) == [7, None, None, 1]
    gauge = Gauge()
    gauge.set(S, 0.5)
    gauge.set(3 * S, 0.7)
    assert gauge.last(4) == [None, 0.5, 0.5, 0.7]
    assert [window_of(known) for known in (1, 60, 61, 600, 9_000)] == [60, 60, 120, 600, 600]


def test_percentiles_and_resampling() -> None:
    assert percentile([], 50) is None
    assert percentile(list(range(1, 101)), 99) == 99
    assert resample([1.0, 3.0, None, None], 2) == [2.0, None]
    assert resample([1.0], 3) == [1.0, 1.0, 1.0]


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=50))
def test_density_keeps_every_event_however_long_the_run(times: list[int]) -> None:
    density = Density()
    for at_ns in sorted(times):
        density.add(at_ns, 1)
    assert sum(density.counts) == len(times)
    assert len(density.counts) <= Density.BUCKETS


def test_a_row_that_is_kept_is_the_row_that_would_be_drawn() -> None:
    def value(number: int, right: bool) -> Column[list[str]]:
        return Column(name=f"C{number}", width=4, right=right,
                      cell=lambda item, size, glyphs: [Span(item[number], "text"), Span("x", "muted")])

    age: Column[list[str]] = Column(
        name="AGE", width=5, cell=lambda item, size, glyphs: [Span(item[2], "fault")], right=True, ages=True)
    for columns in ([value(0, False), age, value(1, True)], [age, value(0, True)], [value(0, False), age], [age, age]):
        places = table.layout(columns, 40)
        rows: table.KeptRows[list[str]] = table.KeptRows()
        for item in (["a", "bcd", "1s"], ["a", "bcd", "22.2s"], ["a", "bcd", "123456"], ["long", "", "9"]):
            kept = rows.cells(places, item, UNICODE, Row().put("|", "muted"), (item[0], item[1]))
            assert kept.line() == table.cells(places, item, UNICODE, Row().put("|", "muted")).line()


def test_a_trend_tells_unknown_from_nothing() -> None:
    assert "".join(span.text for span in bars.trend([None, 0.0, 3.0, 6.0], UNICODE)) == " ▁▃▆"
    assert bars.trend([], UNICODE) == []


def test_rows_of_lives_come_and_go_between_two_sorts() -> None:
    script = Script()
    script.pools()
    script.run("a", 4)
    mirror, order = mirror_of(script), LifeOrder()
    assert [life.request for life in order.update(mirror, 0, None, None)] == ["a"]
    slot = script.run("b", 4)
    mirror.fold(script.events[mirror.next_seq :], 1)
    assert [life.request for life in order.update(mirror, 1, "a", None)] == ["a"], "what was chosen does not move"
    assert [life.request for life in order.update(mirror, 2, None, None)] == ["b", "a"]
    for life in (mirror.lives.pop(slot), *(Life(number, "x", 0) for number in range(1_000, 1_000 + PAST_MAX))):
        mirror.archive.bury(life)
    assert [life.request for life in order.update(mirror, 3, None, None)] == ["a"], "the oldest one was forgotten"


def test_a_queue_does_not_hide_the_rows_that_work() -> None:
    script = Script()
    script.pools()
    for name in ("ended long ago", "works", "ended"):
        slot = script.run(name, 4)
        if name != "works":
            script.finish(slot)
    for number in range(3):
        script.open(f"waits-{number}", 4)
    mirror, order = mirror_of(script), LifeOrder()
    names = ["ended", "works", "ended long ago"]
    waits = ["waits-2", "waits-1", "waits-0"]
    assert [life.request for life in order.update(mirror, 0, None, None)] == [*waits, *names], "they came just now"
    script.wait(2 * S)
    script.open("new", 4)
    mirror.fold(script.events[mirror.next_seq :], 2 * S)
    assert [life.request for life in order.update(mirror, 2 * S, None, None)] == ["new", *names[:2], *waits, names[2]]
    order.by_arrival = True
    assert [life.request for life in order.update(mirror, 2 * S, None, None)] == ["new", *waits, *names]


def test_the_bar_of_a_recording_needs_no_other_character_from_the_glyph_tables() -> None:
    middle = Transport("PAUSED", "00:00:08.000", seq=50, first_seq=0, last_seq=100, hits=0, marks=[])
    assert transport_line(middle, 80, ASCII).text.isascii()
    assert "━●─" in transport_line(middle, 80, UNICODE).text
