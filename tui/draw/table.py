"""A table of own make: columns with a priority, so that a narrow screen loses the least important ones first.

Law of this file: a column's place depends only on the width of the screen, never on the values, so columns stand still
while values change.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from .spans import Line, Row, Span

T = TypeVar("T")
Table = tuple[list[str], list[list[str]]]
"""Names of columns, and rows of text: the form that is exported as CSV."""
KEPT_MAX: Final = 512
"""Rows kept of one table; some screens of them."""


class Column(msgspec.Struct, Generic[T], frozen=True):
    """One column. ``width`` 0 takes what is left; ``gap`` blank cells stand before it."""

    name: str
    width: int
    cell: Callable[[T, int], list[Span]]
    """Spans of a row for a width; they are cut to it."""
    right: bool = False
    gap: int = 1
    from_width: int = 0
    """Screens narrower than this do not have the column."""
    ages: bool = False
    """Whether it changes by time alone; aligned to the right, so that what follows stands still."""


def layout(columns: Sequence[Column[T]], width: int) -> list[tuple[Column[T], int, int]]:
    """(column, start, width) for a table of ``width`` cells, its last cell left empty."""
    shown = [column for column in columns if width >= column.from_width]
    fixed = sum(column.width + column.gap for column in shown)
    rest = max(0, width - 1 - fixed)
    flexible = sum(column.width == 0 for column in shown)
    placed = []
    x = 0
    for column in shown:
        x += column.gap
        size = column.width or rest // max(1, flexible)
        placed.append((column, x, size))
        x += size
    return placed


def header(
    places: Sequence[tuple[Column[T], int, int]], role: str = "faint", sorts: Mapping[str, str] | None = None
) -> Line:
    """The row of names; a click on one of ``sorts`` asks for its order."""
    row = Row()
    for column, x, size in places:
        if column.right:
            row.right(column.name, x + size, role)
        else:
            row.to(x).put(column.name[:size] if size else column.name, role)
        if sorts is not None and column.name in sorts:
            row.zone(x, ("sort", sorts[column.name]), x + max(size, len(column.name)))
    return row.line()


def cells(places: Sequence[tuple[Column[T], int, int]], item: T, row: Row | None = None) -> Row:
    """One row of the table, not yet finished, behind what stands in ``row``."""
    row = row if row is not None else Row()
    for column, x, size in places:
        spans = column.cell(item, size)
        length = len(spans[0][0]) if len(spans) == 1 else len("".join([text for text, _ in spans]))
        if column.right:
            row.to(x + size - min(size, length))
        else:
            row.to(x)
        if length <= size:
            row.spans(spans)
            continue
        left = size
        for text, role in spans:
            row.put(text[:left], role)
            left -= len(text)
            if left <= 0:
                break
    return row


class Kept(Generic[T]):
    """Rows whose items do not change any more: only what ages is drawn anew."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[Span, ...] | int]] = {}
        """The spans of columns that stay, and the places of those that do not."""

    def cells(
        self, places: Sequence[tuple[Column[T], int, int]], item: T, row: Row, key: Hashable
    ) -> Row:
        """As ``cells``. ``key`` tells everything on which the row depends; it begins where the last one did."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= KEPT_MAX:
                self._known.clear()
            known = self._known[key] = _stretches(places, item, row.x)
        for part in known:
            if isinstance(part, int):
                cells(places[part : part + 1], item, row)
            else:
                row.spans(part)
        return row


def _stretches(
    places: Sequence[tuple[Column[T], int, int]], item: T, x: int
) -> list[tuple[Span, ...] | int]:
    """The parts of a row from cell ``x`` on."""
    parts: list[tuple[Span, ...] | int] = []
    first = 0
    for index, (column, start, size) in enumerate(places):
        if column.ages:
            parts += [_stretch(places[first:index], item, x), index]
            first, x = index + 1, start + size
    return [*parts, _stretch(places[first:], item, x)]


def _stretch(places: Sequence[tuple[Column[T], int, int]], item: T, x: int) -> tuple[Span, ...]:
    row = Row()
    row.x = x
    return cells(places, item, row).line().spans


def window(total: int, selected: int | None, top: int, height: int) -> int:
    """The first visible row, moved as little as possible so that the selected one is visible."""
    if height <= 0:
        return 0
    if selected is not None:
        top = min(max(top, selected - height + 1), selected)
    return max(0, min(top, max(0, total - height)))


MOVES = frozenset({"up", "down", "k", "j", "pageup", "pagedown", "g", "G", "home", "end"})


def moved(at: int | None, key: str, total: int, page: int) -> int:
    """The row after a movement key; without a row before, down and up begin at the first and last one."""
    last = total - 1
    if key in ("g", "home"):
        return 0
    if key in ("G", "end"):
        return last
    if at is None:
        return 0 if key in ("down", "j", "pagedown") else last
    step = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}[key]
    return min(last, max(0, at + step))
