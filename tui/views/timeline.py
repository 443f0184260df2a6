"""Timeline: many slots against time, the axis and the minimap above them, the event under the cursor below.

Law of this file: ink is work, texture is data movement, a thin line is waiting, hatching is a hold. A gap is a band
through all rows, and nothing is interpolated across it. At the live edge the window moves by whole cells.
"""

import sys
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Final

import msgspec

from kvbm_console.analysis.lints import Level
from kvbm_console.analysis.lives import Life, Transfer
from kvbm_console.core import events as ev
from kvbm_console.core.events import Event
from kvbm_console.core.ids import SlotState

from ..desk import SLOT, TIMELINE, TRANSFERS, Desk, View
from ..draw import bars, table, words
from ..draw.frame import Hint
from ..draw.glyphs import FILL, state_role
from ..draw.lifeline import STEPS_NS, Lifelines, Window, joined, runs, tick_ns, transfer_codes
from ..draw.spans import Line, Row, Span, Zone, fit, part
from ..draw.table import Table, moved
from ..draw.words import LIFE_WORDS
from ..model.events import cause_of, describe, effect_of, entry_words, kind_words
from ..model.lints import slot_level
from ..model.numbers import S, count, cut, duration, plain, plural, spoken
from ..model.places import distance, seq_at
from ..model.series import Density, resample
from ..model.slots import Limits, limits
from ..model.timeline import LIVES, LifeOrder
from .blocks import history_section
from .lanes import lane_line, lanes_of, tracks

PASSED_TEXT_MIN: Final = 16
"""Cells of a run that has room for its label."""
RETRY_NS: Final = S
"""How often an effect that is not there yet is looked for again."""
CELL_MAX_NS: Final = 60 * 60 * S
CELL_MIN_NS: Final = 1_000_000
FIT_LIVES: Final = 40
"""The first window covers about as much as the lives that fit on a screen."""
FIT_AGES: Final = 4
"""A life that began this many times as long ago as half of these does not widen the first window: one stuck request
would leave a single cell to each of the others."""
SPAN_MIN_NS: Final = S // 5
"""The first window is never shorter than this."""
FINE_NS: Final = tuple(
    tenth * unit // 20 for unit in (10**power for power in range(6, 13))
    for tenth in (20, 25, 30, 40, 50, 60, 80, 100, 120, 150)
)
"""Cell widths that fill a window; zooming goes by the coarser 1-2-5 steps."""
OPERATIONS_MAX: Final = 6
HEADS_MAX: Final = 1_024
"""Heads of rows kept; some screens of them."""


def minimap(desk: Desk, window: Window, width: int, left: int, now: int) -> Line:
    """Density of all known events, with the window in brackets; on a recording a click seeks."""
    cells = window.cells
    density = desk.mirror.density
    playback = desk.actions.playback
    if playback is not None:
        values: list[float | None] = [float(value) for value in playback.density(cells)]
        named = "past kept" if desk.looks_back else "whole recording"
        row = Row().put(f" {named}", "muted").to(left).spans(bars.trend(values, desk.glyphs))
        return row.zone(left, ("seek", left, cells)).line("", width)
    start = density.start_ns if density.start_ns is not None else now
    span = max(1, now - start)
    named = "whole run" if start < S else "last"  # the daemon remembers no older events
    row = Row().put(f" {named} {duration(span)}", "muted").to(left)
    known: list[float | None] = [float(value) for value in density.counts]
    text = "".join(span.text for span in bars.trend(resample(known, cells, mean=False), desk.glyphs)) if known else ""
    low = (window.start_ns - start) * cells // span
    high = (min(window.end_ns, now) - start) * cells // span
    low, high = max(0, min(cells - 2, low)), max(1, min(cells, high))
    if text and low > 0:
        row.put(text[:low], "trend").put(desk.glyphs.window[0], "text")
        row.put(text[low + 1 : high], "trendnow").put(text[high:], "trend")
    else:
        row.put(text[: cells], "trendnow")
    row.to(left + cells).put(desk.glyphs.window[1], "rule")
    return row.line("", width)


def axis(window: Window, width: int, left: int, now: int, *, live: bool) -> Line:
    """Times before now, at round distances."""
    row = Row().put(f" 1 cell = {spoken(window.cell_ns)}", "muted")
    step = tick_ns(window.cell_ns, 11)
    end = left + window.cells
    ticks = []
    at = step
    while at < window.cells * window.cell_ns:
        x = left + window.cell(now - at)
        if x < left:
            break
        text = f"−{at // S}s" if step % S == 0 and at < 600 * S else f"−{duration(at)}"
        if x + len(text) < end - 3:
            ticks.append((x, text))
        at += step
    for x, text in reversed(ticks):
        if x >= row.x:
            row.to(x).put(text, "faint")
    return row.right("now" if live else f"−{duration(now - window.end_ns)}", end, "faint").line("", width)


def gap_cells(desk: Desk, window: Window) -> list[tuple[int, int, int]]:
    """(first cell, last cell, events) of the gaps in the window."""
    found = []
    for gap in desk.mirror.gaps:
        end = gap.end_ns if gap.end_ns is not None else window.now_ns
        first, last = window.cell(gap.start_ns), window.cell(end)
        if last >= 0 and first < window.cells:
            found.append((max(0, first), min(window.cells - 1, last), gap.count))
    return found


def passed_cells(desk: Desk, window: Window) -> list[tuple[int, int]]:
    """(first cell, last cell) of the runs in which events were passed over."""
    runs: list[tuple[int, int]] = []
    for stretch in desk.mirror.coverage.between(window.start_ns, window.end_ns):
        first, last = max(0, window.cell(stretch.start_ns)), min(window.cells - 1, window.cell(stretch.end_ns))
        if runs and last >= runs[-1][0] - 1:
            first, last = min(first, runs[-1][0]), runs.pop()[1]
        runs.append((first, last))
    return runs[::-1]


def over_line(
    labels: list[tuple[int, str, str]], passed: list[tuple[int, int]], left: int, width: int, gap: str
) -> Line:
    """Labels, each (cell of the row, text, role), above the cells; below them the cells of passed-over events."""
    cells = [(" ", "text")] * width
    for first, last in passed:
        size = last - first + 1
        text = " passed over ".center(size, gap) if size >= PASSED_TEXT_MIN else gap * size
        for x, char in enumerate(text, left + first):
            if x < width:
                cells[x] = (char, "gap")
    end = 0
    for x, text, role in sorted(labels):
        if x >= end:
            end = x + len(text)
            for at, char in enumerate(text, x):
                if at < width:
                    cells[at] = (char, role)
    while cells and cells[-1] == (" ", "text"):
        cells.pop()
    row = Row()
    for role, run in groupby(cells, key=itemgetter(1)):
        row.put("".join(char for char, _ in run), role)
    return row.line("", width)


def replace(spans: list[Span], first: int, last: int, make: Callable[[str], tuple[str, str]]) -> list[Span]:
    """Cells from ``first`` up to ``last``, replaced by the text and the role that ``make`` returns for them."""
    changed = [Span(*make(text)) for text, _ in part(spans, first, last)]
    return [*part(spans, 0, first), *changed, *part(spans, last, sys.maxsize)]


_LEGEND: Final = (
    (SlotState.ONBOARD_STAGED, "staged"), (SlotState.ONBOARDING, "onboard"), (SlotState.PREFILLING, "prefill"),
    (SlotState.DECODING, "decode"), (SlotState.SKIPPED_DECODE, "skipped"), (SlotState.PREEMPTED, "preempt"),
    (SlotState.FINISHING, "finish"),
)


def legend(desk: Desk, width: int) -> Line:
    """The meanings of the textures."""
    row = Row().put(" ")
    glyphs = desk.glyphs
    for state, short in _LEGEND:
        word = state.words if width >= 180 else short
        row.put(glyphs.life[state] * 2, FILL[state]).put(f" {word}  ", "muted")
    row.put(glyphs.hatch * 2, "hatch").put(" held  ", "muted").put(glyphs.gap * 2, "gap").put(" gap  ", "muted")
    if row.x + 18 < width:
        row.put(glyphs.late * 2, "limit.fault").put(" past its limit", "muted")
    return row.line("", width - 1)


def steps(life: Life) -> list[tuple[int, int]]:
    """(seq, time) of every event of a life, because the cursor can stand on each."""
    known = {event.seq: event.at_ns for event in life.story}
    known.update({move.seq: move.start_ns for move in life.moves if move.seq is not None})
    return sorted(known.items())


def find(desk: Desk, life: Life, seq: int) -> Event | None:
    """An event of a life: its story reaches further back than the log."""
    return desk.mirror.event(seq) or next((event for event in life.story if event.seq == seq), None)


class Traced(msgspec.Struct):
    """Cause and effect of an event, kept because the search would take a whole frame each time."""

    seq: int
    cause: Event | None
    effect: Event | None
    mono_ns: int


class EventFeet:
    """The last rows of the timeline."""

    def __init__(self) -> None:
        self._traced: Traced | None = None

    def _trace(self, desk: Desk, event: Event) -> Traced:
        known, mono = self._traced, desk.mono()
        if known is None or known.seq != event.seq:
            known = Traced(event.seq, cause_of(event, desk.mirror), effect_of(event, desk.mirror), mono)
        elif known.effect is None and mono - known.mono_ns >= RETRY_NS:
            known = Traced(event.seq, known.cause, effect_of(event, desk.mirror), mono)
        self._traced = known
        return known

    def lines(self, desk: Desk, cursor_ns: int | None, width: int) -> list[Line]:
        """The event under the cursor, then its cause and effect."""
        life = desk.life
        if life is None or cursor_ns is None:
            hint = "choose a row with ↑ ↓, then n for its next event" if life is None else "n N walk its events"
            row = Row().put(f" {desk.glyphs.keys(hint)}", "faint")
            _mark(desk, row, None, desk.now_ns)
            return [row.line("", width - 1), Line()]
        event = find(desk, life, desk.event) if desk.event is not None else None
        if event is None or event.at_ns != cursor_ns:
            return [self._between(desk, life, cursor_ns, width), Line()]
        first, second = Row().put(" "), Row().put(" ")
        if width >= 100:
            first.put(f"−{duration(desk.now_ns - cursor_ns)}", "strong")
            first.put(f"  {desk.times.text(cursor_ns, millis=True)}  ", "text")
        first.put("seq ", "muted").put(f"{count(event.seq)}  ", "muted")
        first.spans([words.request(life.request, 20, "strong")]).put("  ")
        if type(event) is ev.SlotMoved:
            first.spans(words.state(event.old, desk.glyphs)).put(" → ", "muted")
            first.spans(words.state(event.new, desk.glyphs))
        else:
            first.put(f"{kind_words(type(event))}  ", "text")
            first.put(cut(plain(describe(event, desk.mirror)), max(0, width - 2 - first.x)), "muted")
        _mark(desk, first, event.seq, cursor_ns)
        traced = self._trace(desk, event)
        second.put("cause  ", "muted")
        if traced.cause is not None:
            second.put(f"{kind_words(type(traced.cause))} {count(traced.cause.seq)}", "text")
        else:
            second.put(f"stimulus {count(event.cause)}", "text")
        if type(event) is ev.SlotMoved:
            second.put(f"  {entry_words(event.entry)}, iteration {count(event.iteration)}", "muted")
        effect = traced.effect
        second.put("   effect  ", "muted")
        second.put("–" if effect is None else f"{kind_words(type(effect))} {count(effect.seq)}  ", "text")
        if effect is not None and width >= 100:
            second.put(cut(plain(describe(effect, desk.mirror)), max(0, width - second.x - 2)), "muted")
        return [first.line("", width - 1), second.line("", width - 1)]

    def _between(self, desk: Desk, life: Life, cursor_ns: int, width: int) -> Line:
        """The row for a cursor between two events: the state there and its beginning."""
        row = Row().put(" ")
        if width >= 100:
            row.put(f"−{duration(desk.now_ns - cursor_ns)}", "strong")
            row.put(f"  {desk.times.text(cursor_ns, millis=True)}  ", "text")
        row.spans([words.request(life.request, 20, "strong")])
        index = life.at(cursor_ns)
        if index is not None and not life.seen_at(cursor_ns):
            row.put("  not seen here: these events were passed over", "muted")
        elif index is not None:
            move = life.moves[index]
            row.put("  in ", "muted").spans(words.state(move.state, desk.glyphs))
            row.put(f" for {duration(cursor_ns - move.start_ns)}", "muted")
        _mark(desk, row, None, cursor_ns)
        return row.line("", width - 1)


def _mark(desk: Desk, row: Row, seq: int | None, at_ns: int) -> None:
    """The distance from the latest mark."""
    mark = desk.marks.latest
    if mark is not None:
        here = seq if seq is not None else seq_at(desk.mirror, at_ns)
        row.put("   ").put(distance(mark, here, at_ns), "text")


class Timeline(View):
    """View 4."""

    schema = LIVES
    needs_requests = "The timeline shows requests over time."
    words = (
        ("cell", "a column; the axis tells its time"),
        ("gap", "events that are not known; nothing is drawn there"),
        ("lane", "requests that do not overlap, on one row"),
        ("waiting", "requests that wait at some time of a cell"),
        ("past its limit", "longer in one state than 4 × what 99 of 100 need"), *LIFE_WORDS,
    )

    def __init__(self) -> None:
        self.cell_ns: int | None = None
        """The width of a cell; None for a width that fills the picture."""
        self.end_ns: int | None = None
        """The right edge; None follows the live edge."""
        self.cursor_ns: int | None = None
        self.inside: int | None = None
        """The chosen transfer below the selected row, while ``tab`` is in the transfers."""
        self.feet = EventFeet()
        self.top = 0
        self.order = LifeOrder()
        self.lines = Lifelines()
        self._heads: dict[tuple[object, ...], tuple[Span, ...]] = {}
        self._gaps: list[tuple[int, int, int]] = []
        self._fitted_ns: int | None = None
        self._density: Density | None = None
        """The history for which the window was chosen; a seek makes another history."""
        self.window = Window(0, S, 1, 0)
        self.shown: list[Life] = []
        self.page = 1
        self.packed = False
        """True if requests that do not overlap share a row."""

    # --- drawing -----------------------------------------------------------------------------------------------------

    def streamed(self, desk: Desk, width: int, height: int) -> list[Line]:
        return history_section(desk, desk.mirror.facts, width, height)

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Minimap, axis, gaps, rows, then the event under the cursor."""
        left = 26 if width >= 100 else 22
        cells = max(8, width - 1 - left)
        now = desk.now_ns
        lives = self._lives(desk)
        self.window = window = self._window(desk, lives, cells, now)
        if self._density is not desk.mirror.density:
            self._density = desk.mirror.density
            if not window.start_ns <= now <= window.end_ns:
                self.end_ns = self.cursor_ns = None
                self.window = window = self._window(desk, lives, cells, now)
            elif self.cursor_ns is not None and not window.start_ns <= self.cursor_ns <= now:
                self.cursor_ns = None
        lives = self._in_sight(desk, lives)
        if desk.mirror.halves.known:
            lives = [life for life in lives if not self._joined(desk, life)]
        bounds = limits(desk.mirror)
        feet = self._feet(desk, width)
        room = height - 3 - len(feet)
        lines = [minimap(desk, window, width, left, now), axis(window, width, left, now, live=self.end_ns is None)]
        self._gaps = gap_cells(desk, window)
        lines.append(self._over(desk, left, window, width))
        self.page = max(1, room)
        if self.packed:
            return [*fit([*lines, *self._lanes(desk, lives, room, left, width, bounds)], height - len(feet)), *feet]
        at = None
        if desk.selected is not None:
            at = next((i for i, life in enumerate(lives) if life.request == desk.selected), None)
        self.top = max(0, min(self.top, len(lives) - 1)) if lives else 0
        if at is not None:
            self.top = min(max(self.top, at - room + 3), at)
        rows: list[Line] = []
        self.shown = []
        for life in lives[self.top :]:
            if len(rows) >= room:
                break
            self.shown.append(life)
            rows.append(self._row(desk, life, window, left, width, bounds))
            if life.request == desk.selected:
                rows += self._operations(desk, life, window, left, width, bounds)
        rows = (rows or self._empty(desk))[:room]
        rows += [Line()] * (room - len(rows))
        return [*lines, *rows, *feet]

    def _lanes(self, desk: Desk, lives: list[Life], room: int, left: int, width: int, bounds: Limits) -> list[Line]:
        """The counters, then the lanes; with more of them than rows, the lane of the selected request is among them."""
        lanes = lanes_of(lives, desk.now_ns)
        above = tracks(desk, lives, self.lines, self.window, bounds, left)[: max(1, room // 3)]
        rows = max(1, room - len(above) - 1)
        chosen = next((i for i, lane in enumerate(lanes) if any(life.request == desk.selected for life in lane)), None)
        self.top = table.window(len(lanes), chosen, min(self.top, max(0, len(lanes) - rows)), rows)
        shown = lanes[self.top : self.top + rows]
        told = f"{plural(len(lives), 'request')} in {plural(len(lanes), 'lane')}"
        if len(lanes) > len(shown):
            told += f", {self.top + 1} to {self.top + len(shown)} shown"
        head = Row().put(f" {told}", "muted").line()
        return [*above, head, *(
            lane_line(desk, lane, self.lines, self.window, bounds, left, width) for lane in shown)]

    def _in_sight(self, desk: Desk, lives: list[Life]) -> list[Life]:
        """The lives in a window that a person chose, and the selected life."""
        if self.cell_ns is None:
            return lives
        start, end = self.window.start_ns, self.window.end_ns
        return [
            life for life in lives if life.request == desk.selected
            or (life.first_known_ns() < end and (life.closed_ns is None or life.closed_ns >= start))
        ]

    def _joined(self, desk: Desk, life: Life) -> bool:
        """True for a prefill half that the row of its decode half shows."""
        return life.request != desk.selected and desk.mirror.halves.decode_of(life) is not None

    def _empty(self, desk: Desk) -> list[Line]:
        """The reason for an empty list."""
        wanted, known = desk.filters.get(TIMELINE), len(desk.mirror.lives) + len(desk.mirror.past)
        if wanted is None or self._lives(desk):
            reason = "No request is in this window; f follows, 0 fits." if known else "No request is known here yet."
            return [Row().put(f" {reason}", "muted").line()]
        row = Row().put(f" 0 of {plural(known, 'request')} match  ", "text").put(plain(wanted.text), "muted")
        return [row.put("   esc", "key").put("  clear", "muted").line()]

    def _lives(self, desk: Desk) -> list[Life]:
        return self.order.update(desk.mirror, desk.mono(), desk.selected, desk.filters.get(TIMELINE))

    def _window(self, desk: Desk, lives: list[Life], cells: int, now: int) -> Window:
        cell = self.cell_ns
        if cell is None:
            ages = sorted(now - life.first_known_ns() for life in (lives if self.packed else lives[:FIT_LIVES]))
            far = sys.maxsize if self.packed or not ages else FIT_AGES * ages[len(ages) // 2]
            span = max(SPAN_MIN_NS, max((age for age in ages if age <= far), default=0))
            cell = next((step for step in FINE_NS if step * cells >= span), CELL_MAX_NS)
            if not self.packed and self._fitted_ns is not None and span <= self._fitted_ns * cells <= 2 * span:
                cell = self._fitted_ns
            self._fitted_ns = cell
        edge = self.end_ns if self.end_ns is not None else now
        end = (edge // cell + 1) * cell
        return Window(end - cells * cell, cell, cells, now)

    def _over(self, desk: Desk, left: int, window: Window, width: int) -> Line:
        """Labels of gaps, and the cursor's time."""
        labels: list[tuple[int, str, str]] = []
        for first, _, gap_count in self._gaps:
            labels.append((left + first, f"gap {count(gap_count)}", "caution"))
        if self.cursor_ns is not None and 0 <= window.cell(self.cursor_ns) < window.cells:
            text = f"{desk.glyphs.cursor_top} −{duration(desk.now_ns - self.cursor_ns)}"
            x = left + window.cell(self.cursor_ns)
            if x + len(text) > width - 1:
                text = f"−{duration(desk.now_ns - self.cursor_ns)} {desk.glyphs.cursor_top}"
                x -= len(text) - 1
            labels.append((x, text, "strong"))
        for mark in desk.marks.places:
            if 0 <= window.cell(mark.at_ns) < window.cells:
                labels.append((left + window.cell(mark.at_ns), desk.glyphs.mark, "strong"))
        return over_line(labels, passed_cells(desk, window), left, width, desk.glyphs.gap)

    def _row(self, desk: Desk, life: Life, window: Window, left: int, width: int, bounds: Limits) -> Line:
        state = desk.mirror.facts
        slot = state.slots.get(life.slot)
        level = slot_level(desk.mirror, slot, desk.now_ns) if slot is not None else None
        now = None if life.closed_ns is not None else life.state
        key = (life.slot, life.request, level, now, life.lost, life.request == desk.selected, left)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            head = self._heads[key] = self._head(desk, life, level, left)
        prefill = desk.mirror.halves.prefill_of(life)
        if prefill is None:
            first, end, ink = self.lines.ink(life, window, bounds, desk.glyphs)
        else:
            ink = tuple(runs(*joined(self.lines, prefill, life, window, bounds), desk.glyphs))
            first, end = 0, window.cells
        zones = (Zone(0, width, ("select", life.request)),)
        if not self._gaps and self.cursor_ns is None:
            if not ink:
                return Line(head, "", zones, left)
            return Line((*head, Span(" " * first, "text"), *ink), "", zones, left + end)
        spans = Row().to(first).spans(ink).to(window.cells).line().spans
        return Row().spans(head).spans(self._overlay(desk, list(spans), window)).line("", width)._replace(zones=zones)

    def _head(self, desk: Desk, life: Life, level: Level | None, left: int) -> tuple[Span, ...]:
        """Mark, state and name, in front of the cells."""
        chosen = life.request == desk.selected
        row = Row().put(desk.glyphs.select if chosen else " ", "selbar")
        live = life.closed_ns is None
        if level is Level.HELD:
            row.put("   ").put(desk.glyphs.held, "heldbox")
        else:
            row.spans(words.mark(level, desk.glyphs)).put(" ")
            role = state_role(life.state) if live else "state.finished"
            row.put("?" if life.lost else desk.glyphs.state[life.state if live else SlotState.FINISHED], role)
        row.put(" ")
        name = "strong" if level is not None or chosen else "text" if live else "muted"
        row.spans([words.request(life.request, left - row.x - 2, name)]).to(left)
        spans = row.line().spans
        return tuple(Span(text, f"{role}@sel") for text, role in spans) if chosen else spans

    def _operations(
        self, desk: Desk, life: Life, window: Window, left: int, width: int, bounds: Limits
    ) -> list[Line]:
        """The prefill half of the selected request, then its transfers that touch the window."""
        lines = []
        prefill = desk.mirror.halves.prefill_of(life)
        if prefill is not None:
            row = Row().put("     ").put(f"{desk.glyphs.branch} ", "rule")
            row.put(f"prefill{words.engine(prefill.source)}", "muted").to(left)
            codes, busy = self.lines.codes(prefill, window, bounds)
            spans = self._overlay(desk, runs(codes, busy, desk.glyphs), window)
            lines.append(row.spans(spans).zone(0, ("select", prefill.request), width).line("", width))
        for transfer in self._shown_transfers(life, window):
            chosen = transfer.candidate == self.inside
            row = Row().put(desk.glyphs.select if chosen else " ", "selbar").put("    ")
            row.put(f"{desk.glyphs.branch} ", "rule").put(f"{transfer.label} ", "strong" if chosen else "muted")
            row.spans([words.route(transfer.route)])
            if left >= 26:
                row.put(f" {transfer.blocks}", "muted")
            row.to(left)
            codes = transfer_codes(transfer, life, window)
            wire = "fill.onboard" if transfer.route.is_load else "fill.copy"
            spans = self._overlay(desk, runs(codes, set(), desk.glyphs, wire), window)
            lines.append(Row().add(row.line(width=left)).to(left).spans(spans).line("", width))
        return lines

    def _shown_transfers(self, life: Life, window: Window) -> list[Transfer]:
        found = [
            transfer for transfer in life.transfers
            if (transfer.ended_ns or window.now_ns) >= window.start_ns and transfer.planned_ns < window.end_ns
            and transfer.reason is None
        ]
        found.sort(key=lambda transfer: (not transfer.open, -transfer.planned_ns))
        return found[:OPERATIONS_MAX]

    def _overlay(self, desk: Desk, spans: list[Span], window: Window) -> list[Span]:
        """Gap bands, the mark and the cursor over a row; they split its runs."""
        for first, last, _ in self._gaps:
            spans = replace(spans, first, last + 1, lambda text: (desk.glyphs.gap * len(text), "gap"))
        if self.cursor_ns is not None:
            cell = window.cell(self.cursor_ns)
            if 0 <= cell < window.cells:
                spans = replace(spans, cell, cell + 1, lambda text: (
                    (desk.glyphs.cursor, "muted") if text == " " else (text, "strong")))
        return spans

    # --- the last rows -----------------------------------------------------------------------------------------------

    def _feet(self, desk: Desk, width: int) -> list[Line]:
        wide = width >= 100
        lines = self.feet.lines(desk, self.cursor_ns, width)
        if wide:
            lines.append(legend(desk, width))
        return lines

    # --- keys --------------------------------------------------------------------------------------------------------

    def hints(self, desk: Desk) -> list[Hint]:
        hints = [("h l", "cursor"), ("+-", "zoom"), ("n", "next event"), ("[ ]", "cause, effect"), ("m", "mark"),
                 ("f", "follow"), ("0", "fit"), ("tab", "transfers")]
        here = [("u", "run to cursor")] if desk.recording else [("b", "break here")] if desk.may_control else []
        return [("z", "unpack" if self.packed else "whole run"), *hints, *here, ("o", "order")]

    def press(self, desk: Desk, key: str) -> bool:
        """Move the cursor, zoom, walk events, mark, follow."""
        match key:
            case "h" | "l":
                self._slide(desk, -1 if key == "h" else 1)
            case "+" | "=" | "-" | "_":
                self._zoom(desk, key in "+=")
            case "0":
                self._fit(desk)
            case "up" | "k" | "down" | "j" | "pageup" | "pagedown" | "g" | "G" | "home" | "end":
                self._walk(desk, key)
            case "n" | "N":
                self._event(desk, 1 if key == "n" else -1)
            case "f":
                self.end_ns, self.cursor_ns = None, None
            case "o":
                self.order.by_arrival = not self.order.by_arrival
            case "z":
                self.packed = not self.packed
                self.cell_ns, self.end_ns, self.top = None, None, 0
            case "tab" | "shift+tab":
                self._enter_transfers(desk)
            case "enter" if desk.selected is not None:
                self._open(desk)
            case "escape" if self.inside is not None:
                self.inside = None
            case "escape" if self.cursor_ns is not None:
                self.cursor_ns = None
            case _ if key.startswith("at:"):
                self.cursor_ns = int(key[3:])
                self._show_cursor(desk)
            case _:
                return False
        return True

    def _enter_transfers(self, desk: Desk) -> None:
        """Enter the transfers of the selected row, or leave them."""
        life = desk.life
        known = self._shown_transfers(life, self.window) if life is not None else []
        self.inside = known[0].candidate if known and self.inside is None else None
        if not known:
            desk.tell("the selected row has no transfer here", "muted")

    def _open(self, desk: Desk) -> None:
        if self.inside is None:
            desk.go(SLOT)
            return
        desk.go(TRANSFERS)
        desk.view.press(desk, f"candidate:{self.inside}")
        self.inside = None

    def reveal(self, desk: Desk, event: Event) -> bool:
        """Put the cursor on an event of the selected request; False for another request's event."""
        life = desk.life
        if life is None or find(desk, life, event.seq) is None:
            return False
        self.cursor_ns = event.at_ns
        self._show_cursor(desk)
        return True

    def rows(self, desk: Desk) -> Table | None:
        """Every move of every life that the filter leaves."""
        names = ["slot", "request", "state", "from_ns", "until_ns", "seq"]
        found = []
        for life in self._lives(desk):
            ends = [move.start_ns if move.unseen_ns is None else move.unseen_ns for move in life.moves[1:]]
            ends = [*ends, life.closed_ns if life.closed_ns is not None else desk.now_ns]
            for move, end in zip(life.moves, ends, strict=False):
                seq = "" if move.seq is None else str(move.seq)
                found.append([str(life.slot), life.request, move.state.label, str(move.start_ns), str(end), seq])
        return names, found

    def _slide(self, desk: Desk, step: int) -> None:
        window = self.window
        at = self.cursor_ns if self.cursor_ns is not None else min(desk.now_ns, window.end_ns)
        self.cursor_ns = max(0, min(desk.now_ns, at + step * window.cell_ns))
        self._show_cursor(desk)

    def _show_cursor(self, desk: Desk) -> None:
        """Move the window so that the cursor is in it."""
        window, at = self.window, self.cursor_ns
        if at is None:
            return
        span = window.cells * window.cell_ns
        if at < window.start_ns or at >= window.end_ns:
            end = at + span // 4
            self.end_ns = None if end >= desk.now_ns else end

    def _zoom(self, desk: Desk, closer: bool) -> None:
        cell = self.window.cell_ns
        index = min(range(len(STEPS_NS)), key=lambda i: abs(STEPS_NS[i] - cell))
        new = STEPS_NS[min(len(STEPS_NS) - 1, max(0, index + (-1 if closer else 1)))]
        centre = self.cursor_ns
        self.cell_ns = max(CELL_MIN_NS, min(CELL_MAX_NS, new))
        if centre is not None:
            end = centre + self.window.cells * self.cell_ns // 2
            self.end_ns = None if end >= desk.now_ns else end

    def _fit(self, desk: Desk) -> None:
        """The selected life, or everything, fills the window."""
        life = desk.life
        if life is None:
            self.cell_ns, self.end_ns = None, None
            return
        end = life.closed_ns if life.closed_ns is not None else desk.now_ns
        span = max(CELL_MIN_NS * 10, end - life.first_known_ns())
        self.cell_ns = next((step for step in STEPS_NS if step * self.window.cells >= span), CELL_MAX_NS)
        self.end_ns = None if life.closed_ns is None else end

    def _walk(self, desk: Desk, key: str) -> None:
        life = desk.life
        if self.inside is not None and life is not None:
            known = [transfer.candidate for transfer in self._shown_transfers(life, self.window)]
            if known:
                inside = known.index(self.inside) if self.inside in known else None
                self.inside = known[moved(inside, key, len(known), OPERATIONS_MAX)]
            return
        lives = self._in_sight(desk, self._lives(desk))
        if lives:
            at = next((i for i, life in enumerate(lives) if life.request == desk.selected), None)
            desk.select(lives[moved(at, key, len(lives), self.page)].request)

    def _event(self, desk: Desk, step: int) -> None:
        """Snap the cursor to the next or previous event of the selected life."""
        life = desk.life
        known = steps(life) if life is not None else []
        if not known:
            desk.tell("choose a request first", "muted")
            return
        at = self.cursor_ns
        seqs = [seq for seq, _ in known]
        if at is None:
            index = len(known) - 1
        elif desk.event in seqs and known[seqs.index(desk.event)][1] == at:
            index = min(len(known) - 1, max(0, seqs.index(desk.event) + step))
        elif step > 0:
            index = next((i for i, (_, when) in enumerate(known) if when > at), len(known) - 1)
        else:
            index = next((i for i in reversed(range(len(known))) if known[i][1] < at), 0)
        desk.event, self.cursor_ns = known[index]
        self._show_cursor(desk)
