"""Around the rows of the timeline: the minimap, the axis, gap bands and the legend.

Law of this file: positions come from one window, so that everything above and below the rows stands over its cell.
"""

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Final

from kvbm_console.core.ids import SlotState

from ..desk import Desk
from ..draw import bars
from ..draw.glyphs import FILL
from ..draw.lifeline import Window, tick_ns
from ..draw.spans import Line, Row, Span
from ..model.numbers import S, duration, spoken
from ..model.series import resample
from .sections import kept


def minimap(desk: Desk, window: Window, width: int, left: int, now: int) -> Line:
    """Event density of all that is known with the window in brackets; on a recording a click seeks."""
    cells = window.cells
    density = desk.mirror.density
    playback = desk.actions.playback
    if playback is not None:
        values: list[float | None] = [float(value) for value in playback.density(cells)]
        row = Row().put(" whole recording", "muted").to(left).spans(bars.trend(values, desk.glyphs))
        return row.zone(left, ("seek", left, cells)).line("", width)
    start = density.start_ns if density.start_ns is not None else now
    span = max(1, now - start)
    state = desk.mirror.state
    assert state is not None

    def trend() -> list[Line]:
        known: list[float | None] = [float(value) for value in density.counts]
        return [Row().spans(bars.trend(resample(known, cells, mean=False), desk.glyphs)).line()] if known else []

    named = "whole run" if start < S else "last"  # the daemon remembers no more of what was before this console
    row = Row().put(f" {named} {duration(span)}", "muted").to(left)
    text = "".join(line.text for line in kept(desk, state, "minimap", (cells, density.start_ns), trend))
    low = (window.start_ns - start) * cells // span
    high = (min(window.end_ns, now) - start) * cells // span
    low, high = max(0, min(cells - 2, low)), max(1, min(cells, high))
    if text and low > 0:
        row.put(text[:low], "trend").put(desk.glyphs.window[0], "text")
        row.put(text[low + 1 : high], "fill.g1").put(text[high:], "trend")
    else:
        row.put(text[: cells], "fill.g1")
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
    """(cell of the row, text, role) above the cells; under them those in which events were passed over."""
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


PASSED_TEXT_MIN: Final = 16
"""Cells of a run that has room to say what it is."""


def replace(
    spans: list[Span], first: int, last: int, make: Callable[[str], tuple[str, str]]
) -> list[Span]:
    """Cells from ``first`` up to ``last`` of a row, replaced by what ``make`` gives for their text."""
    result: list[Span] = []
    at = 0
    for span in spans:
        end = at + len(span.text)
        low, high = max(first, at), min(last, end)
        if low >= high:
            result.append(span)
        else:
            if low > at:
                result.append(Span(span.text[: low - at], span.role))
            text, role = make(span.text[low - at : high - at])
            result.append(Span(text, role))
            if high < end:
                result.append(Span(span.text[high - at :], span.role))
        at = end
    return result


_LEGEND: Final = (
    (SlotState.ONBOARD_STAGED, "staged"), (SlotState.ONBOARDING, "onboard"), (SlotState.PREFILLING, "prefill"),
    (SlotState.DECODING, "decode"), (SlotState.SKIPPED_DECODE, "skipped"), (SlotState.PREEMPTED, "preempt"),
    (SlotState.FINISHING, "finish"),
)


def legend(desk: Desk, width: int) -> Line:
    """What the textures mean."""
    row = Row().put(" ")
    glyphs = desk.glyphs
    for state, short in _LEGEND:
        word = state.label if width >= 180 else short
        row.put(glyphs.life[state] * 2, FILL[state]).put(f" {word}  ", "muted")
    row.put(glyphs.hatch * 2, "hatch").put(" held  ", "muted").put(glyphs.gap * 2, "gap").put(" gap  ", "muted")
    row.put(glyphs.late * 2, "limit.fault").put(" past its limit", "muted")
    return row.line("", width - 1)
