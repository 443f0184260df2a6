"""A life as cells on a time axis.

Law of this file: a cell shows the state that fills most of it, but rare beats long (held, past its limit, preempted,
onboarding, staged, then the others); what is not known stays blank.
"""

from bisect import bisect_left, bisect_right
from typing import Final

from kvbm_console.core.ids import SlotState
from kvbm_console.recording.lints import WATCHED, fault_after

from ..model.lives import Life, Transfer
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
CHANGES_MARKED: Final = 3
"""A cell with so many changes is underlined: there is more in it than it can show."""
CACHE_MAX: Final = 512

Limits = dict[SlotState, int]


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
        """Where the last cell ends."""
        return self.start_ns + self.cells * self.cell_ns

    def cell(self, at_ns: int) -> int:
        """The cell of a time; may lie outside."""
        return (at_ns - self.start_ns) // self.cell_ns


class Lifelines:
    """Codes of lives, kept while neither the life nor the window changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int, int, int], tuple[list[int], set[int]]] = {}

    def codes(self, life: Life, window: Window, limits: Limits) -> tuple[list[int], set[int]]:
        """(a code for each cell, cells with many changes)."""
        until = life.closed_ns if life.closed_ns is not None else window.now_ns
        key = (life.slot, life.changes, window.start_ns, window.cell_ns, window.cells, window.cell(until))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= CACHE_MAX:
                self._known.clear()
            found = self._known[key] = (life_codes(life, window, limits), busy_cells(life, window))
        return found


def life_codes(life: Life, window: Window, limits: Limits) -> list[int]:
    """A code for each cell of the window."""
    codes = [BLANK] * window.cells
    weights = [0] * window.cells
    end = life.closed_ns if life.closed_ns is not None else window.now_ns
    first = max(0, bisect_right(life.starts, window.start_ns) - 1)
    last = bisect_left(life.starts, window.end_ns)
    for index in range(first, last):
        move = life.moves[index]
        if move.state is SlotState.FINISHED:
            continue
        stop = life.starts[index + 1] if index + 1 < len(life.starts) else end
        unseen_ns = life.moves[index + 1].unseen_ns if index + 1 < len(life.moves) else None
        if unseen_ns is not None:
            _paint(codes, weights, window, max(unseen_ns, move.start_ns), stop, UNSEEN)
            stop = max(unseen_ns, move.start_ns)
        _paint(codes, weights, window, move.start_ns, stop, 1 + move.state)
        if index == len(life.moves) - 1 and life.closed_ns is None and move.state in WATCHED:
            limit = limits.get(move.state)
            if limit is not None:
                held = life.held_ns(move.start_ns, end)
                late, fault = limit + held, fault_after(limit) + held
                _paint(codes, weights, window, move.start_ns + late, min(stop, move.start_ns + fault), LATE)
                _paint(codes, weights, window, move.start_ns + fault, stop, VERY_LATE)
    for stay in life.stays:
        _paint(codes, weights, window, stay.start_ns, end if stay.end_ns is None else stay.end_ns, HELD)
    return codes


def _paint(codes: list[int], weights: list[int], window: Window, start_ns: int, stop_ns: int, code: int) -> None:
    """Put a stretch into its cells, by rank and then by length."""
    start, stop = max(start_ns, window.start_ns), min(stop_ns, window.end_ns)
    if stop < start or start_ns >= window.end_ns or stop_ns < window.start_ns:
        return
    a, b = window.cell(start), min(window.cells - 1, window.cell(stop))
    rank = _RANK.get(code, 0)
    for cell in range(a, b + 1):
        low = window.start_ns + cell * window.cell_ns
        length = min(stop, low + window.cell_ns) - max(start, low)
        if length <= 0 and not (start == stop and cell == a):
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


def transfer_codes(transfer: Transfer, life: Life | None, window: Window) -> list[int]:
    """Queued, wire and held cells of one transfer."""
    codes = [BLANK] * window.cells
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
    state = SlotState(code - 1)
    return glyphs.life[state], FILL[state]


def runs(codes: list[int], busy: set[int], glyphs: Glyphs, wire_role: str = "text") -> list[Span]:
    """One span for each run of equal cells."""
    spans: list[Span] = []
    at = 0
    while at < len(codes):
        code, marked, stop = codes[at], at in busy, at + 1
        while stop < len(codes) and codes[stop] == code and (stop in busy) == marked:
            stop += 1
        char, role = texture(code, glyphs)
        if role == "wire":
            role = wire_role
        spans.append(Span(char * (stop - at), role + ".u" if marked and code != BLANK else role))
        at = stop
    return spans


STEPS_NS: Final = tuple(
    factor * unit for unit in (1_000_000, 10_000_000, 100_000_000, 1_000_000_000, 10_000_000_000)
    for factor in (1, 2, 5)
) + tuple(value * 60_000_000_000 for value in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600))
"""Distances of ticks on an axis, and of the zoom."""


def tick_ns(cell_ns: int, apart: int = 10) -> int:
    """The smallest step whose ticks are at least ``apart`` cells from each other."""
    for step in STEPS_NS:
        if step >= cell_ns * apart:
            return step
    return STEPS_NS[-1]
