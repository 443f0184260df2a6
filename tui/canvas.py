"""The canvas: the only widget of the console, a grid of rows that are drawn only when they changed.

A row becomes one string with the terminal's codes for its styles, kept ready, and the rows of a frame go out in one
write. The framework draws the whole screen after a resize, and pictures, from the same rows.

Law of this file: a frame sends the rows that differ from the screen, and nothing else.
"""

from collections.abc import Callable, Sequence

from rich.color import ColorSystem
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from .draw.glyphs import TRANSLATE
from .draw.spans import BLANK, Line
from .model.numbers import FILL, is_shown, plain, shown
from .theme import Theme

PLAIN = "\x1b[0m"
LATIN_1 = "\xff"
"""The last character that the fonts of poor terminals have."""


class Canvas(Widget):
    """Shows lines. ``draw`` takes a whole frame."""

    can_focus = False

    def __init__(self, theme: Theme, *, ascii_only: bool = False) -> None:
        super().__init__()
        self.theme = theme
        self.ascii_only = ascii_only
        self.lines: list[Line] = []
        self.send: Callable[[str], bool] | None = None
        """Writes to the terminal; False, or None, when the framework has to draw."""
        self.colours: ColorSystem | None = ColorSystem.TRUECOLOR
        self.rows_drawn = 0
        """Rows that were sent so far, for tests and benchmarks."""
        self._width = 0
        self._codes: dict[str, dict[str, str]] = {}
        """Ground, then role, to the codes that begin the style."""

    def draw(self, lines: Sequence[Line], width: int) -> None:
        """Show these lines; rows that did not change are left alone."""
        before = self.lines
        self.lines = list(lines)
        if len(lines) != len(before) or width != self._width:
            self._width = width
            self.rows_drawn += len(lines)
            self.refresh()
            return
        dirty = [y for y, line in enumerate(lines) if line is not before[y] and line != before[y]]
        if not dirty:
            return
        self.rows_drawn += len(dirty)
        send = self.send
        if send is None or not send("".join([f"\x1b[{y + 1}H{self.row(lines[y], width)}" for y in dirty])):
            self.refresh(*[Region(0, y, width, 1) for y in dirty])

    def row(self, line: Line, width: int) -> str:
        """A row as the terminal gets it, ``width`` cells, its styles ended."""
        parts, ground = [], line.ground
        known = self._codes.setdefault(ground, {})
        x, now = 0, PLAIN
        as_is = not self.ascii_only and is_shown(line.text)
        for text, role in line.spans:
            x += len(text)
            if x > width:
                text = text[: width - x]
            if not as_is:
                text = self._shown(text)
            code = known.get(role) or self._code(role, ground)
            if code != now:
                parts.append(code)
                now = code
            parts.append(text)
            if x >= width:
                break
        else:
            code = known.get("text") or self._code("text", ground)
            if code != now:
                parts.append(code)
                now = code
            parts.append(" " * (width - x))
        if now != PLAIN:
            parts.append(PLAIN)
        return "".join(parts)

    def _shown(self, text: str) -> str:
        """The text as the terminal gets it. Control characters are replaced, so no name from outside moves the
        cursor."""
        if not text.isprintable() and FILL not in text:
            text = plain(text)
        if self.ascii_only:
            return "".join([character if character <= LATIN_1 else "?" for character in text.translate(TRANSLATE)])
        return shown(text)

    def _code(self, role: str, ground: str) -> str:
        """The codes that begin this style after any other style."""
        style = self.theme.style(role, ground)
        opening = style.render("x", color_system=self.colours).partition("x")[0] if self.colours else ""
        found = self._codes[ground][role] = opening.replace("\x1b[", "\x1b[0;", 1) if opening else PLAIN
        return found

    def _strip(self, line: Line, width: int) -> Strip:
        style = self.theme.style
        segments: list[Segment] = []
        x = 0
        for span in line.spans:
            text = span.text[: width - x]
            if text:
                segments.append(Segment(self._shown(text), style(span.role, line.ground)))
                x += len(text)
        if x < width:
            segments.append(Segment(" " * (width - x), style("text", line.ground)))
        return Strip(segments, width)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Strips as they are: no border, no padding, no filter between them and the terminal."""
        width = self.size.width
        strips = [
            self._strip(self.lines[y] if y < len(self.lines) else BLANK, width) for y in range(crop.y, crop.bottom)
        ]
        if crop.x == 0 and crop.width == width:
            return strips
        return [strip.crop(crop.x, crop.right) for strip in strips]
