"""Small answers: a document with rows that fit a stated size, and the offset at which to go on.

    {"seq": 237, "at_ms": 700.0, "columns": ["seq", "text"], "rows": [[237, "op 10"]], "total": 40, "next_offset": 1}

Law of this file: an answer never exceeds ``ANSWER_TOKENS_MAX``, and rows that were left out are counted.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import UsageError

ANSWER_TOKENS_MAX: Final = 2_000
"""Tokens of an answer, as ``tokens_at_most`` counts them."""
TEXT_CHARS_MAX: Final = 400
"""Characters of a cell; a longer text is cut and ends with an ellipsis."""
SHORT_CHARS_MAX: Final = 40
"""The same for a row that would not fit alone."""
ITEMS_MAX: Final = 12
"""Items of a cell, and cells of a row: the last ones."""

ROWS_MAX: Final = 400
"""Rows that a page could hold if each had a few bytes."""

Answer = dict[str, Any]
Row = Sequence[Any]
_PIECE: Final = re.compile(r"[A-Za-z]{1,4}|[^\sA-Za-z]")


def tokens_at_most(text: str) -> int:
    """A count that no usual tokenizer exceeds on such text: four letters, a digit, a sign or a foreign byte each.

    >>> tokens_at_most('{"seq":237}')
    9
    """
    return sum(1 if piece.isascii() else len(piece.encode()) for piece in _PIECE.findall(text))


def ms(ns: int | None) -> float | None:
    """Milliseconds of the engine's time, to the microsecond."""
    return None if ns is None else round(ns / 1e6, 3)


class PageRows:
    """Rows of a long walk: all are counted, and only those that a page can hold from ``offset`` on are kept."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.total = 0
        self.rows: list[Row] = []

    def add(self, row: Callable[[], Row]) -> None:
        """One more row, which is made only if it is kept."""
        if self.offset <= self.total < self.offset + ROWS_MAX:
            self.rows.append(row())
        self.total += 1


def paged(answer: Answer, columns: Sequence[str], rows: Sequence[Row] | PageRows, offset: int = 0) -> Answer:
    """The answer with the rows from ``offset`` on that fit. Raises ``UsageError`` for an offset outside."""
    if isinstance(rows, PageRows):
        offset, total, shown = rows.offset, rows.total, rows.rows
    else:
        total, shown = len(rows), list(rows[max(0, offset):])
    if not 0 <= offset <= total:
        raise UsageError(f"offset must be from 0 to {total}, got {offset}")
    page: Answer = {**answer, "columns": list(columns), "rows": [], "total": total}
    tokens = tokens_at_most(text_of({**page, "next_offset": total}))
    for row in shown:
        cut = _cut(row, TEXT_CHARS_MAX)
        if tokens + _tokens(cut) > ANSWER_TOKENS_MAX:
            if page["rows"]:
                break
            cut = _cut(row, SHORT_CHARS_MAX)  # a page without a row would be asked for again for ever
        tokens += _tokens(cut)
        page["rows"].append(cut)
    if offset + len(page["rows"]) < total:
        page["next_offset"] = offset + len(page["rows"])
    return page


def text_of(answer: Answer) -> str:
    """The answer as JSON on one line."""
    return msgspec.json.encode(answer).decode()


def _cut(cell: Any, chars: int) -> Any:
    """The cell with every text cut, and the last items of a list."""
    if isinstance(cell, str):
        return cell if len(cell) <= chars else cell[: chars - 1] + "…"
    return [_cut(one, chars) for one in cell[-ITEMS_MAX:]] if isinstance(cell, list | tuple) else cell


def _tokens(row: Any) -> int:
    return tokens_at_most(msgspec.json.encode(row).decode()) + 1
