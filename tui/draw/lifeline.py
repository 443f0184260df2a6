"""A life as cells on a time axis.

Law of this file: a cell shows the state that fills most of it, but a rare state beats a long state. The order is held,
past its limit, preempted, onboarding, staged, the others. Unknown time stays blank.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from kvbm_console.analysis.lints import WATCHED, fault_after
from kvbm_console.analysis.lives import Life, Transfer
from kvbm_console.core.ids import SlotState

from ..model.slots import Limits
from .glyphs import FILL, Glyphs
from .spans import Span

BLANK: Final = 0
HELD: Final = 20
LATE: Final = 21
VERY_LATE: Final = 22
QUEUED: Final = 23
WIRE: Final = 24
UNSEEN: Final = 25
_RANK: Final = {
    BLANK: -1, 1 + SlotState.ONBOARD_STAGED: 1, 1 + SlotState.ONBOARDING: 2, 1 + SlotState.PREEMPTED: 3, LATE: 4,
    VERY_LATE: 4, HELD: 5,
}
_STATE: Final = {1 + state: state for state in SlotState}
CHANGES_MARKED: Final = 3
"""A cell with so many changes is underlined: there is more in it than it can show."""
CACHE_MAX: Final = 512

Ink = tuple[int, int, tuple[Span, ...]]
"""The first cell that is not blank, the cell behind the last such cell, and the spans between them."""
BUSY: Final = 0x80
STEPS_NS: Final = tuple(
    factor * unit for unit in (1_000_000, 10_000_000, 100_000_000, 1_000_000_000, 10_000_000_000)
    for factor in (1, 2, 5)
) + tuple(value * 60_000_000_000 for value in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600))
"""Distances of ticks on an axis, and of the zoom."""


class Window:
    """Cells of ``cell_ns`` from ``start_ns``; ``now_ns`` ends everything that is still going on."""

    __slots__ = ("cell_ns", "cells", "now_ns", "start_ns")

    def __init__(self, start_ns: int, cell_ns: int, cells: int, now_ns: int) -> None:
        self.start_ns = start_ns
        self.cell_ns = max(1, cell_ns)
        self.cells = cells
        self.now_ns = now_ns

    @property
    def end_ns(self) -> int:
        """The end of the last cell."""
        return self.start_ns + self.cells * self.cell_ns

    def cell(self, at_ns: int) -> int:
        """The cell of a time; may lie outside."""
        return (at_ns - self.start_ns) // self.cell_ns


class _Kept:
    """The cells of a life, as they were drawn last."""

    __slots__ = ("busy", "changes", "codes", "ink", "life", "until_ns", "weights", "window")

    def __init__(self, life: Life, window: Window, codes: bytearray, weights: list[int], busy: set[int]) -> None:
        self.life, self.changes, self.window = life, life.changes, window
        self.codes, self.weights, self.busy = codes, weights, busy
        self.until_ns = _until(life, window)
        self.ink: Ink | None = None
        """The spans of the present cells; None before they are made."""

    def go_on(self, life: Life, window: Window, limits: Limits, moved: int) -> None:
        """Advance to a later window, ``moved`` cells further on; earlier cells stay as they are."""
        until_ns = _until(life, window)
        if not moved and until_ns == self.until_ns:
            return
        before, ink = self.codes, self.ink
        if moved:
            before = before[moved:] + bytes(min(moved, window.cells))
            if self.busy:
                self.busy = {cell - moved for cell in self.busy if cell >= moved}
            self.ink = (ink[0] - moved, ink[1] - moved, ink[2]) if ink is not None and ink[0] >= moved else None
        codes, last = before, max(0, window.cell(self.until_ns))
        if life.closed_ns is None:
            codes, weights = before[:], self.weights[moved:] + [0] * min(moved, window.cells)
            if last < window.cells:
                codes[last], weights[last] = BLANK, 0
                _draw(codes, weights, life, window, limits, window.start_ns + last * window.cell_ns)
            if codes != before:
                self.ink = None
            self.weights = weights
        self.codes, self.window, self.until_ns = codes, window, until_ns


class Lifelines:
    """Codes of lives, kept: while a life does not change, only its newest cells are drawn."""

    def __init__(self) -> None:
        self._known: dict[int, _Kept] = {}

    def codes(self, life: Life, window: Window, limits: Limits) -> tuple[bytearray, set[int]]:
        """(a code for each cell, cells with many changes)."""
        kept = self._drawn(life, window, limits)
        return kept.codes, kept.busy

    def ink(self, life: Life, window: Window, limits: Limits, glyphs: Glyphs) -> Ink:
        """The spans of a life. They are kept with its cells, so every call needs the same glyphs."""
        kept = self._drawn(life, window, limits)
        if kept.ink is None:
            first = len(kept.codes) - len(kept.codes.lstrip(b"\0"))
            cells = kept.codes.rstrip(b"\0")[first:]
            busy = {cell - first for cell in kept.busy if 0 <= cell - first < len(cells)}
            kept.ink = first, first + len(cells), tuple(runs(cells, busy, glyphs))
        return kept.ink

    def _drawn(self, life: Life, window: Window, limits: Limits) -> _Kept:
        kept = self._known.get(life.slot)
        moved = _moved(kept, life, window) if kept is not None else None
        if kept is None or moved is None:
            if len(self._known) >= CACHE_MAX:
                self._known.clear()
            codes, weights = bytearray(window.cells), [0] * window.cells
            _draw(codes, weights, life, window, limits, window.start_ns)
            kept = self._known[life.slot] = _Kept(life, window, codes, weights, busy_cells(life, window))
            return kept
        kept.go_on(life, window, limits, moved)
        return kept


def joined(
    lines: Lifelines, prefill: Life, decode: Life, window: Window, limits: Limits
) -> tuple[bytearray, set[int]]:
    """The cells of a request over two engines: those of the decode half, and before them those of the prefill half."""
    before, busy_before = lines.codes(prefill, window, limits)
    after, busy_after = lines.codes(decode, window, limits)
    codes = bytearray(late or early for early, late in zip(before, after, strict=True))
    return codes, busy_after | {cell for cell in busy_before if 0 <= cell < window.cells and not after[cell]}


def _until(life: Life, window: Window) -> int:
    return life.closed_ns if life.closed_ns is not None else window.now_ns


def _moved(kept: _Kept, life: Life, window: Window) -> int | None:
    """Whole cells that the window went on since; None when more than time has changed."""
    old = kept.window
    if kept.life is not life or kept.changes != life.changes:
        return None
    if old.cell_ns != window.cell_ns or old.cells != window.cells:
        return None
    moved, rest = divmod(window.start_ns - old.start_ns, window.cell_ns)
    if rest or moved < 0 or _until(life, window) < kept.until_ns or life.held_now() is not None:
        return None  # held time moves the limit of a stay
    return None if moved and kept.until_ns >= old.end_ns else moved


def _draw(
    codes: bytearray, weights: list[int], life: Life, window: Window, limits: Limits, from_ns: int
) -> None:
    """Draw a life into cells from ``from_ns`` on, where a cell begins and all are blank."""
    end = _until(life, window)
    first = max(0, bisect_right(life.starts, from_ns) - 1)
    last = bisect_left(life.starts, window.end_ns)
    for index in range(first, last):
        move = life.moves[index]
        if move.state is SlotState.FINISHED:
            continue
        stop = life.starts[index + 1] if index + 1 < len(life.starts) else end
        unseen_ns = life.moves[index + 1].unseen_ns if index + 1 < len(life.moves) else None
        if unseen_ns is not None:
            _paint(codes, weights, window, max(unseen_ns, move.start_ns), stop, UNSEEN, from_ns)
            stop = max(unseen_ns, move.start_ns)
        _paint(codes, weights, window, move.start_ns, stop, 1 + move.state, from_ns)
        if index == len(life.moves) - 1 and life.closed_ns is None and move.state in WATCHED:
            limit = limits(life, move.state)
            if limit is not None:
                held = life.held_ns(move.start_ns, end)
                late, fault = move.start_ns + limit + held, move.start_ns + fault_after(limit) + held
                _paint(codes, weights, window, late, min(stop, fault), LATE, from_ns)
                _paint(codes, weights, window, fault, stop, VERY_LATE, from_ns)
    for stay in life.stays:
        _paint(codes, weights, window, stay.start_ns, end if stay.end_ns is None else stay.end_ns, HELD, from_ns)


def _paint(
    codes: bytearray, weights: list[int], window: Window, start_ns: int, stop_ns: int, code: int, from_ns: int = 0
) -> None:
    """Put the part of a stretch from ``from_ns`` on into its cells, by rank and then by length."""
    start, stop = max(start_ns, window.start_ns, from_ns), min(stop_ns, window.end_ns)
    if stop < start or start_ns >= window.end_ns:
        return
    a, b = window.cell(start), min(window.cells - 1, window.cell(stop))
    if b - a > 1 and not any(codes[a + 1 : b]):
        codes[a + 1 : b] = bytes((code,)) * (b - a - 1)
        weights[a + 1 : b] = [window.cell_ns] * (b - a - 1)
        cells: Iterable[int] = (a, b)
    else:
        cells = range(a, b + 1)
    rank = _RANK.get(code, 0)
    for cell in cells:
        low = window.start_ns + cell * window.cell_ns
        length = min(stop, low + window.cell_ns) - max(start, low)
        if length <= 0 and start_ns != stop_ns:
            continue
        have = _RANK.get(codes[cell], 0)
        if rank > have or (rank == have and (length > weights[cell] or codes[cell] == BLANK)):
            codes[cell] = code
            weights[cell] = length


def busy_cells(life: Life, window: Window) -> set[int]:
    """Cells in which the state changed three times or more."""
    counts: dict[int, int] = {}
    for start in life.starts[bisect_left(life.starts, window.start_ns) : bisect_left(life.starts, window.end_ns)]:
        cell = window.cell(start)
        counts[cell] = counts.get(cell, 0) + 1
    return {cell for cell, number in counts.items() if number >= CHANGES_MARKED}


def transfer_codes(transfer: Transfer, life: Life | None, window: Window) -> bytearray:
    """Queued, wire and held cells of one transfer."""
    codes = bytearray(window.cells)
    weights = [0] * window.cells
    end = transfer.ended_ns if transfer.ended_ns is not None else window.now_ns
    begun = transfer.started_ns if transfer.started_ns is not None else end
    _paint(codes, weights, window, transfer.planned_ns, begun, QUEUED)
    if transfer.started_ns is not None:
        for cell in range(window.cells):
            low = window.start_ns + cell * window.cell_ns
            if low + window.cell_ns > transfer.started_ns and low <= end:
                codes[cell] = WIRE
    if life is not None:
        for stay in life.stays:
            start = max(stay.start_ns, transfer.planned_ns)
            stop = min(begun, end if stay.end_ns is None else stay.end_ns)
            if stop > start:
                _paint(codes, weights, window, start, stop, HELD)
    return codes


def texture(code: int, glyphs: Glyphs) -> tuple[str, str]:
    """(character, role) of a code."""
    if code == BLANK:
        return " ", "text"
    if code == HELD:
        return glyphs.hatch, "hatch"
    if code == LATE:
        return glyphs.late, "limit.caution"
    if code == VERY_LATE:
        return glyphs.late, "limit.fault"
    if code == UNSEEN:
        return glyphs.gap, "gap"
    if code == QUEUED:
        return glyphs.queued, "muted"
    if code == WIRE:
        return glyphs.wire, "wire"
    state = _STATE[code]
    return glyphs.life[state], FILL[state]


def runs(codes: bytearray, busy: set[int], glyphs: Glyphs, wire_role: str = "text") -> list[Span]:
    """A span for each run of equal cells."""
    cells = codes
    if busy:
        cells = codes[:]
        for cell in busy:
            if cells[cell]:
                cells[cell] |= BUSY
    spans: list[Span] = []
    for run in _RUN.finditer(cells):
        start, stop = run.span()
        char, role = texture(cells[start] & ~BUSY, glyphs)
        if role == "wire":
            role = wire_role
        spans.append(Span(char * (stop - start), role + ".u" if cells[start] & BUSY else role))
    return spans


_RUN: Final = re.compile(rb"(.)\1*", re.DOTALL)
"""A run of equal cells: found without a step of ours for each of them."""


def tick_ns(cell_ns: int, apart: int = 10) -> int:
    """The smallest step whose ticks are at least ``apart`` cells from each other."""
    for step in STEPS_NS:
        if step >= cell_ns * apart:
            return step
    return STEPS_NS[-1]
