"""Pieces that several views draw the same way: a state, a request, a mark, a route, the bar of a prompt.

Law of this file: only the mark, the state and the age of a row are coloured, never the whole row.
"""

from typing import Final

from kvbm_console.analysis.lints import Level
from kvbm_console.core.ids import Route, SlotState

from ..model.numbers import cut_middle, plain
from ..model.slots import PromptShares
from .bars import divide
from .glyphs import Glyphs, state_role
from .spans import Span

LEVEL_ROLE = {None: "text", Level.FAULT: "fault", Level.HELD: "caution", Level.CAUTION: "caution"}
REQUEST_MIN: Final = 13
"""Cells of a request's name on a narrow screen, as in the lists."""
TIER_WORDS: Final = ("G1 G2 G3", "device memory, host memory, disk: a cached block lies in one tier or several")
LIFE_WORDS: Final = (
    ("staged", "found below the device; its places are kept until it is admitted"),
    ("onboarding", "its blocks are copied up to the device"),
    ("preempted", "it lost its device blocks to others and begins again"),
    ("skipped", "alive, and without a token in this iteration"),
)
"""Words of several views, with their meanings, for the help."""


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
    return [Span(f"{glyphs.state[value]} {value.words}", state_role(value))]


def request(name: str, width: int, role: str = "text") -> Span:
    """The name of a request in at most ``width`` cells, cut in its middle."""
    return Span(cut_middle(plain(name), width), role)


def engine(source: int | None) -> str:
    """`` engine 2``; empty for an engine that is not known."""
    return "" if source is None else f" engine {source}"


def route(value: Route) -> Span:
    """Arrow and tiers; loads stand out, because requests wait for them."""
    return Span(value.arrow, "load" if value.is_load else "text")


def prompt_bar(prompt: PromptShares, cells: int, glyphs: Glyphs) -> list[Span]:
    """The bar in ``cells``."""
    widths = divide([*prompt.found, prompt.computed, prompt.to_do], cells)
    spans = [
        Span(char * width, f"fill.{tier.name.lower()}")
        for (tier, char), width in zip(glyphs.prompt.items(), widths, strict=False) if width
    ]
    if widths[4]:
        spans.append(Span(glyphs.computed * widths[4], "computed"))
    if widths[5]:
        spans.append(Span(glyphs.todo * widths[5], "todo"))
    return spans
