"""The prompt of a request as a bar: what the cache saved, what was computed here, what is to do.

Law of this file: it draws the shares that ``model.prompts`` has found, near tiers first.
"""

from ..model.prompts import Prompt
from .bars import divide
from .glyphs import Glyphs
from .spans import Span


def prompt_bar(prompt: Prompt, cells: int, glyphs: Glyphs) -> list[Span]:
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
