"""Bars, trends and charts as spans.

Law of this file: values round down to half cells, so a bar is full only when its value is. A missing sample is a blank.
"""

from collections.abc import Sequence
from functools import lru_cache

from ..model.series import from_left, window_of, window_text
from .glyphs import Glyphs
from .spans import Line, Row, Span


def trend(
    values: Sequence[float | None], glyphs: Glyphs, top: float | None = None, role: str = "trend",
) -> list[Span]:
    """A row of bars from 0 to ``top`` or to the largest value; the last cell, now, stands out. A tier has its role."""
    if not values:
        return []
    cells = _levels(tuple(values), glyphs.trend, top)
    return [Span(cells[:-1], role), Span(cells[-1], "trendnow")]


@lru_cache(maxsize=256)
def _levels(values: tuple[float | None, ...], characters: str, top: float | None) -> str:
    """The characters of a trend; cached because most trends are equal on the next frame."""
    scale = top if top is not None else max((value for value in values if value is not None), default=0.0)
    if scale <= 0:
        return "".join([" " if value is None else characters[0] for value in values])
    steps = _steps(characters)
    return "".join([" " if value is None else steps[min(600, max(0, int(value / scale * 600)))] for value in values])


@lru_cache(maxsize=8)
def _steps(characters: str) -> str:
    """The character of each six hundredth of the scale, rounded up to one of six."""
    return "".join(characters[max(1, -(-share // 100)) - 1] for share in range(601))


def level(share: float | None, cells: int, glyphs: Glyphs, role: str) -> list[Span]:
    """A line ``━━━╸──`` in half-cell steps; only the track when the share is unknown."""
    if share is None:
        return [Span(glyphs.track * cells, "track")]
    halves = int(min(1.0, max(0.0, share)) * cells * 2)
    if share < 1.0:
        halves = min(halves, cells * 2 - 1)
    if share > 0:
        halves = max(halves, 1)
    bar = glyphs.full * (halves // 2) + (glyphs.half if halves % 2 else "")
    return [Span(bar, role), Span(glyphs.track * (cells - len(bar)), "track")]


def divide(amounts: Sequence[int], cells: int) -> list[int]:
    """Cells for each amount, adding up to ``cells``; an amount above 0 gets a cell while there is room.

    >>> divide([412, 179, 27, 382], 10)
    [4, 1, 1, 4]
    """
    total = sum(amounts)
    if total <= 0 or cells <= 0:
        return [0] * len(amounts)
    shares = [amount * cells / total for amount in amounts]
    result = [max(int(share), 1 if amount > 0 else 0) for share, amount in zip(shares, amounts, strict=True)]
    while sum(result) > cells:
        index = max(range(len(result)), key=lambda i: result[i] - shares[i] if result[i] > 1 else -1e9)
        if result[index] <= 1:
            index = max(range(len(result)), key=lambda i: (result[i] > 0, -amounts[i]))
        result[index] -= 1
    while sum(result) < cells:
        index = max(range(len(result)), key=lambda i: shares[i] - result[i])
        result[index] += 1
    return result


def stack(parts: Sequence[tuple[int, str, str]], cells: int) -> list[Span]:
    """(amount, character, role) next to each other in ``cells``."""
    widths = divide([amount for amount, _, _ in parts], cells)
    return [Span(char * width, role) for (_, char, role), width in zip(parts, widths, strict=True) if width]


def chart(
    title: str, value: str, values: Sequence[float | None], known: int, rows: int, cells: int, glyphs: Glyphs,
    role: str = "trend",
) -> list[Line]:
    """A title and ``rows`` of columns on a scale from 0 to 1, labelled 100 and 0.

    ``values`` are one a second, and the run is known for the last ``known`` of them. A young chart fills from the left.
    """
    seconds = window_of(known)
    told = f"  last {window_text(seconds)}"
    lines = [Row().put(" ").put(title, "title").put(f"   {value}").put(told, "muted").line()]
    shown = from_left(list(values)[-seconds:], known, cells)
    for row, columns in enumerate(_columns(tuple(shown), rows, glyphs.eighths)):
        label = "100" if row == 0 else "0" if row == rows - 1 else ""
        lines.append(Row().right(label, 5, "faint").put(" ").put(columns, role).line())
    return lines


@lru_cache(maxsize=64)
def _columns(shares: tuple[float | None, ...], rows: int, characters: str) -> list[str]:
    """The rows of a chart; cached because its values change once a second."""
    columns = [_column(None if share is None else int(min(1.0, max(0.0, share)) * rows * 8), rows, characters)
               for share in shares]
    return ["".join(row) for row in zip(*columns, strict=True)]


@lru_cache(maxsize=1_024)
def _column(height: int | None, rows: int, characters: str) -> str:
    """One column of a chart from its top, ``height`` in eighths of a row; a known 0 has the lowest step."""
    return "".join([
        " " if height is None or (height <= base and not (base == 0 and height == 0)) else
        characters[min(8, max(1, height - base)) - 1]
        for base in range((rows - 1) * 8, -1, -8)
    ])
