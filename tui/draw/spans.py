"""Rows of text as data: spans with a role, on a ground, with zones that answer the mouse.

Law of this file: a role is a name and never a colour. Every character is one cell wide, so positions are plain indices.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Action = tuple[Any, ...]
"""The request of a click on a zone, for example ``("view", 2)``."""


class Span(NamedTuple):
    """Text with a role."""

    text: str
    role: str


class Zone(NamedTuple):
    """Cells from ``start`` up to ``end`` that answer a click."""

    start: int
    end: int
    action: Action


class Line(NamedTuple):
    """A row of the screen. ``ground`` is the background of the whole row: empty, ``bar`` or ``sel``."""

    spans: tuple[Span, ...] = ()
    ground: str = ""
    zones: tuple[Zone, ...] = ()
    cells: int = -1
    """Cells that it covers, below 0 before they are counted."""

    @property
    def text(self) -> str:
        """The row as plain text."""
        return "".join([text for text, _ in self.spans])

    @property
    def width(self) -> int:
        """Cells that it covers."""
        return self.cells if self.cells >= 0 else len(self.text)


BLANK = Line()
_span = tuple.__new__
"""A span without the call that names its fields: a frame has thousands."""


class Row:
    """Builds a line from left to right; positions are absolute cells."""

    __slots__ = ("_spans", "_zones", "x")

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._zones: list[Zone] = []
        self.x = 0
        """Cells written so far."""

    def put(self, text: str, role: str = "text", action: Action | None = None) -> "Row":
        """Append text."""
        if text:
            spans, start = self._spans, self.x
            self.x = start + len(text)
            if action is not None:
                self._zones.append(Zone(start, self.x, action))
            if spans and spans[-1][1] == role:
                spans[-1] = _span(Span, (spans[-1][0] + text, role))
            else:
                spans.append(_span(Span, (text, role)))
        return self

    def to(self, x: int) -> "Row":
        """Blank cells up to ``x``; nothing when that is behind."""
        return self.put(" " * (x - self.x), "text") if x > self.x else self

    def right(self, text: str, end: int, role: str = "text", action: Action | None = None) -> "Row":
        """Text that ends before cell ``end``."""
        return self.to(end - len(text)).put(text, role, action)

    def spans(self, spans: Iterable[Span]) -> "Row":
        """Append spans."""
        own, x = self._spans, self.x
        last = own[-1][1] if own else None
        for span in spans:
            text, role = span
            if text:
                if role == last:
                    own[-1] = _span(Span, (own[-1][0] + text, role))
                else:
                    own.append(span)
                    last = role
                x += len(text)
        self.x = x
        return self

    def add(self, line: Line) -> "Row":
        """Append a whole line, with its zones."""
        base = self.x
        self.spans(line.spans)
        if line.zones:
            self._zones.extend([Zone(zone.start + base, zone.end + base, zone.action) for zone in line.zones])
        return self

    def zone(self, start: int, action: Action, end: int | None = None) -> "Row":
        """Let cells answer a click."""
        self._zones.append(Zone(start, self.x if end is None else end, action))
        return self

    def line(self, ground: str = "", width: int | None = None) -> Line:
        """The row; with ``width``, cut there."""
        line = Line(tuple(self._spans), ground, tuple(self._zones), self.x)
        return line if width is None or self.x <= width else crop(line, width)


def part(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """The cells from ``start`` up to ``end``."""
    kept: list[Span] = []
    at = 0
    for text, role in spans:
        low, high = max(start - at, 0), min(end - at, len(text))
        if low < high:
            kept.append(Span(text[low:high], role))
        at += len(text)
    return kept


def crop(line: Line, width: int) -> Line:
    """The first ``width`` cells of a line."""
    if line.width <= width:
        return line
    zones = tuple(zone for zone in line.zones if zone.start < width)
    return Line(tuple(part(line.spans, 0, width)), line.ground, zones, width)


def beside(left: Sequence[Line], right: Sequence[Line], x: int) -> list[Line]:
    """Two blocks of lines next to each other, the right one from cell ``x``."""
    rows = []
    for index in range(max(len(left), len(right))):
        near = left[index] if index < len(left) else BLANK
        far = right[index] if index < len(right) else BLANK
        if not far.spans:
            rows.append(near)
        elif not near.spans and not near.ground:
            rows.append(Row().to(x).add(far).line(far.ground))
        else:
            rows.append(Row().add(crop(near, x)).to(x).add(far).line(near.ground))
    return rows


def plain(text: str, role: str = "text", ground: str = "") -> Line:
    """A line with a margin and a single span."""
    return Line((Span(" ", "text"), Span(text, role)), ground)


def fit(lines: Sequence[Line], height: int) -> list[Line]:
    """Exactly ``height`` lines."""
    return [*lines[:height], *[BLANK] * (height - len(lines))]
