"""The canvas: the one widget of the console, a grid of rows drawn by the Line API.

Law of this file: a row is turned into a strip only when it differs from the one on the screen, and only such rows are
sent to the terminal. One frame costs one refresh, however many events led to it.
"""

from collections.abc import Sequence

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ..draw.glyphs import TRANSLATE
from ..draw.spans import BLANK, Line
from ..theme import Theme

STRIPS_MAX = 2_048
"""Strips kept for rows that come back, for example when scrolling; about 20 screens."""


class Canvas(Widget):
    """Shows lines. ``draw`` takes a whole frame."""

    can_focus = False

    def __init__(self, theme: Theme, *, ascii_only: bool = False) -> None:
        super().__init__()
        self.theme = theme
        self.ascii_only = ascii_only
        self.lines: list[Line] = []
        self._strips: list[Strip] = []
        self._known: dict[tuple[Line, int], Strip] = {}
        self.rows_drawn = 0
        """Rows that were sent so far, for tests and benchmarks."""

    def draw(self, lines: Sequence[Line], width: int) -> None:
        """Show these lines; rows that did not change are left alone."""
        height = len(lines)
        if height != len(self.lines) or any(strip.cell_length != width for strip in self._strips[:1]):
            self.lines = list(lines)
            self._strips = [self._strip(line, width) for line in lines]
            self.rows_drawn += height
            self.refresh()
            return
        dirty: list[Region] = []
        for y, line in enumerate(lines):
            if line != self.lines[y]:
                strip = self._strip(line, width)
                if strip != self._strips[y]:
                    self._strips[y] = strip
                    dirty.append(Region(0, y, width, 1))
                self.lines[y] = line
        if dirty:
            self.rows_drawn += len(dirty)
            self.refresh(*dirty)

    def _strip(self, line: Line, width: int) -> Strip:
        key = (line, width)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= STRIPS_MAX:
                self._known.clear()
            found = self._known[key] = self._make(line, width)
        return found

    def _make(self, line: Line, width: int) -> Strip:
        style = self.theme.style
        segments: list[Segment] = []
        x = 0
        for span in line.spans:
            text = span.text.translate(TRANSLATE) if self.ascii_only else span.text
            text = text[: width - x]
            if text:
                segments.append(Segment(text, style(span.role, line.ground)))
                x += len(text)
        if x < width:
            segments.append(Segment(" " * (width - x), style("text", line.ground)))
        return Strip(segments, width)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Strips as they are: no border, no padding, no filter between them and the terminal."""
        width = self.size.width
        blank = self._strip(BLANK, width)
        strips = [
            self._strips[y] if y < len(self._strips) else blank for y in range(crop.y, crop.bottom)
        ]
        if crop.x == 0 and crop.width == width:
            return strips
        return [strip.crop(crop.x, crop.right) for strip in strips]
