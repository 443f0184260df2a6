"""Tables: columns with a priority, so that a narrow screen loses the least important columns first.

Law of this file: a column's place depends only on the width of the screen, so columns stand still while values change.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from kvbm_console.core.expression import Field

from .glyphs import Glyphs
from .spans import Line, Row, Span

T = TypeVar("T")
Table = tuple[list[str], list[list[str]]]
"""Names of columns, and rows of text: the form that is exported as CSV."""
KEPT_MAX: Final = 512
"""Rows kept of a table: some screens."""
MOVES = frozenset({"up", "down", "k", "j", "pageup", "pagedown", "g", "G", "home", "end"})


class Column(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A column of a list: on the screen, as an order, in a file and in filters."""

    name: str = ""
    """Its heading."""
    width: int | Callable[[int], int] = 0
    """Cells, also as a function of the screen's width; 0 takes the cells that are left."""
    cell: Callable[[T, int, Glyphs], list[Span]] = lambda item, size, glyphs: []
    """Spans of a row for a width; they are cut to it."""
    right: bool = False
    gap: int | Callable[[int], int] = 1
    """Blank cells before it, also as a function of the screen's width."""
    from_width: int = 0
    """Screens narrower than this do not have the column."""
    ages: bool = False
    """True if it changes by time alone; aligned to the right, so that the next column stands still."""
    order: str = ""
    """The name of the order by this column; empty when rows cannot be sorted by it."""
    key: Callable[[T], tuple[Any, ...]] = lambda item: ()
    """Sorts rows in that order."""
    title: str = ""
    """Its name in a file; empty for a column that is only on the screen."""
    value: Callable[[T], object] = lambda item: None
    """Its value in a file: None is written as nothing, a bool as yes or no."""
    field: Field | None = None
    """Its name and value in filters."""


Place = tuple[Column[T], int, int]
"""A column, its first cell and its width."""


def layout(columns: Sequence[Column[T]], width: int) -> list[Place[T]]:
    """The places of the columns of a table of ``width`` cells, its last cell left empty."""
    shown = [column for column in columns if width >= column.from_width]
    sizes = [_cells(column.width, width) for column in shown]
    gaps = [_cells(column.gap, width) for column in shown]
    rest = max(0, width - 1 - sum(sizes) - sum(gaps))
    placed = []
    x = 0
    for column, gap, size in zip(shown, gaps, sizes, strict=True):
        x += gap
        placed.append((column, x, size or rest // max(1, sizes.count(0))))
        x += placed[-1][2]
    return placed


def _cells(number: int | Callable[[int], int], width: int) -> int:
    return number if isinstance(number, int) else number(width)


def header(places: Sequence[Place[T]], role: str = "faint") -> Line:
    """The row of headings; a click on the heading of an order asks for it."""
    row = Row()
    for column, x, size in places:
        if column.right:
            row.right(column.name, x + size, role)
        else:
            row.to(x).put(column.name[:size] if size else column.name, role)
        if column.order:
            row.zone(x, ("sort", column.order), x + max(size, len(column.name)))
    return row.line()


def cells(places: Sequence[Place[T]], item: T, glyphs: Glyphs, row: Row | None = None) -> Row:
    """Append the cells of an item to ``row``, or to a new row; the row is not finished."""
    row = row if row is not None else Row()
    for column, x, size in places:
        spans = column.cell(item, size, glyphs)
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


def as_table(columns: Sequence[Column[T]], items: Iterable[T]) -> Table:
    """The list as a file has it."""
    return [column.title for column in columns], [[text_of(column.value(item)) for column in columns] for item in items]


def text_of(value: object) -> str:
    """A value as a file has it."""
    return "" if value is None else ("no", "yes")[value] if isinstance(value, bool) else str(value)


def fields_of(columns: Sequence[Column[T]]) -> list[Field]:
    """The fields of these columns for filters."""
    return [column.field for column in columns if column.field is not None]


class Order(Generic[T]):
    """The order of a list that a person chose: ``o`` takes the next, ``O`` reverses, a click on a heading does both."""

    def __init__(self, columns: Sequence[Column[T]]) -> None:
        self.columns = [column for column in columns if column.order]
        self.at = 0
        self.reverse = False

    @property
    def column(self) -> Column[T]:
        """The column that sorts the list."""
        return self.columns[self.at]

    @property
    def text(self) -> str:
        """The name of the order, with ``reversed`` if so."""
        return self.column.order + (" reversed" if self.reverse else "")

    def sort(self, items: list[T]) -> None:
        """Sort in place."""
        items.sort(key=self.column.key)
        if self.reverse:
            items.reverse()

    def press(self, key: str) -> bool:
        """Take a key, or ``sort:NAME`` from a heading; False when it is not about the order."""
        if key == "o":
            self.at = (self.at + 1) % len(self.columns)
        elif key == "O":
            self.reverse = not self.reverse
        elif key.startswith("sort:"):
            chosen = next((at for at, column in enumerate(self.columns) if column.order == key[5:]), self.at)
            self.reverse = self.at == chosen and not self.reverse
            self.at = chosen
        else:
            return False
        return True


class KeptRows(Generic[T]):
    """Rows whose items do not change any more: only columns that age are drawn anew."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[Span, ...] | int]] = {}
        """The spans of columns that stay, and the places of columns that age."""

    def cells(
        self, places: Sequence[Place[T]], item: T, glyphs: Glyphs, row: Row, key: Hashable
    ) -> Row:
        """Append the cells of an item. ``key`` has everything on which the row depends; ``row`` must
        begin at the same cell each time."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= KEPT_MAX:
                self._known.clear()
            known = self._known[key] = _stretches(places, item, glyphs, row.x)
        for part in known:
            if isinstance(part, int):
                cells(places[part : part + 1], item, glyphs, row)
            else:
                row.spans(part)
        return row


def _stretches(
    places: Sequence[Place[T]], item: T, glyphs: Glyphs, x: int
) -> list[tuple[Span, ...] | int]:
    """The parts of a row from cell ``x`` on."""
    parts: list[tuple[Span, ...] | int] = []
    first = 0
    for index, (column, start, size) in enumerate(places):
        if column.ages:
            parts += [_stretch(places[first:index], item, glyphs, x), index]
            first, x = index + 1, start + size
    return [*parts, _stretch(places[first:], item, glyphs, x)]


def _stretch(places: Sequence[Place[T]], item: T, glyphs: Glyphs, x: int) -> tuple[Span, ...]:
    row = Row()
    row.x = x
    return cells(places, item, glyphs, row).line().spans


def window(total: int, selected: int | None, top: int, height: int) -> int:
    """The first visible row, moved as little as possible so that the selected row is visible."""
    if height <= 0:
        return 0
    if selected is not None:
        top = min(max(top, selected - height + 1), selected)
    return max(0, min(top, max(0, total - height)))


def moved(at: int | None, key: str, total: int, page: int) -> int:
    """The row after a movement key; without a row before, down begins at the first row and up at the last row."""
    last = total - 1
    if key in ("g", "home"):
        return 0
    if key in ("G", "end"):
        return last
    if at is None:
        return 0 if key in ("down", "j", "pagedown") else last
    step = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}[key]
    return min(last, max(0, at + step))
