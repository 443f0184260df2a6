"""The prompt of a request as a bar: what the cache saved, what was computed here, what is to do.

Law of this file: amounts are tokens of the prompt, near tiers first; what is not known is left to do.
"""

from kvbm_console.core.slots import SlotFacts

from .bars import divide
from .glyphs import Glyphs
from .spans import Span


def parts(slot: SlotFacts, computed: int) -> tuple[list[int], int, int]:
    """(tokens found in G1 to G4, tokens computed here, tokens to do) of the prompt."""
    prompt = max(1, slot.prompt_tokens)
    cached: list[int] = []
    left = prompt
    for tokens in slot.cached:
        cached.append(min(tokens, left))
        left -= cached[-1]
    done = min(left, max(0, computed - sum(cached)))
    return cached, done, left - done


def prompt_bar(slot: SlotFacts, computed: int, cells: int, glyphs: Glyphs) -> list[Span]:
    """The bar in ``cells``."""
    cached, done, todo = parts(slot, computed)
    widths = divide([*cached, done, todo], cells)
    spans = [
        Span(char * width, f"fill.{tier.name.lower()}")
        for (tier, char), width in zip(glyphs.prompt.items(), widths, strict=False) if width
    ]
    if widths[4]:
        spans.append(Span(glyphs.computed * widths[4], "computed"))
    if widths[5]:
        spans.append(Span(glyphs.todo * widths[5], "todo"))
    return spans
