"""Pieces that several views write the same way: a state, a request, an age, a mark, a route.

Law of this file: only the mark, the state and the age of a row are coloured, never the whole row.
"""

from kvbm_console.analysis.lints import Level
from kvbm_console.core.ids import Route, SlotState

from ..model.numbers import cut_middle, plain
from .glyphs import Glyphs, state_role
from .spans import Span

LEVEL_ROLE = {None: "text", Level.FAULT: "fault", Level.HELD: "caution", Level.CAUTION: "caution"}


def mark(level: Level | None, glyphs: Glyphs) -> list[Span]:
    """Two cells: ``!!``, `` ‖``, `` !`` or blanks."""
    if level is None:
        return [Span("  ", "text")]
    if level is Level.FAULT:
        return [Span("!!", "mark.fault")]
    if level is Level.HELD:
        return [Span(" ", "text"), Span(glyphs.held, "heldbox")]
    return [Span(" ", "text"), Span("!", "mark.caution")]


def state(value: SlotState, glyphs: Glyphs) -> list[Span]:
    """Glyph and name."""
    return [Span(f"{glyphs.state[value]} {value.label}", state_role(value))]


def request(name: str, width: int, role: str = "text") -> Span:
    """The name of a request in at most ``width`` cells, cut in its middle."""
    return Span(cut_middle(plain(name), width), role)


def route(value: Route, glyphs: Glyphs) -> Span:
    """Arrow and tiers; loads stand out, as they are what a request waits for."""
    return Span(glyphs.route(value), "load" if value.is_load else "text")
