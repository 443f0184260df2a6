"""The prefix map as a picture for a browser: a rectangle for each stretch, with its figures as the title on hover.

Law of this file: the picture is complete in itself. It loads nothing and runs nothing.
"""

from html import escape
from itertools import groupby
from typing import Final

from kvbm_console.analysis.colours import DARK
from kvbm_console.analysis.prefix_map import MapNode, PrefixMap
from kvbm_console.core.ids import Tier
from kvbm_console.core.state import CacheState

from ..model.numbers import count, plain, plural, spoken
from .flame import GONE, Box, Figures, figures, lay_out

WIDTH: Final = 1_200
MARGIN: Final = 40
HEIGHT: Final = 900
"""Pixels for the longest prompt."""
BLOCK_PIXELS: Final = 8
"""Pixels of a block at most."""
COLOURS: Final[dict[int, str]] = {GONE: DARK["gone"], **{tier: DARK[tier.name.lower()] for tier in Tier}}
SEAM: Final = DARK["seam"]
LABEL_PIXELS: Final = 7
"""The width of a character of a label."""


def picture(
    forest: PrefixMap, state: CacheState, *, by: str, zoom: MapNode | None, title: str, now_ns: int, since_ns: int,
) -> str:
    """The whole map, or what is behind ``zoom``, as SVG."""
    layout = lay_out(forest, state, WIDTH, HEIGHT, by=by, zoom=zoom, scale=1, since_ns=since_ns)
    base = zoom.depth if zoom is not None else 0
    scale = min(BLOCK_PIXELS, HEIGHT / max(1, layout.deepest))
    height = MARGIN + 24 + round(layout.deepest * scale)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#11151c"/>',
        f'<text x="8" y="16" fill="#d7dee8" font-size="13">{escape(title)}</text>', _legend(),
    ]
    users = forest.users_by_node()
    for box in layout.boxes:
        told = sentence(box, figures(forest, state, box, users), now_ns)
        parts.append(_group(box, told, MARGIN + (box.depth - base) * scale, scale))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> str:
    x, parts = 8, []
    for label, colour in [*((tier.name, COLOURS[tier]) for tier in Tier), ("in no tier", COLOURS[GONE]),
                          ("evicted and asked for again", SEAM)]:
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="33" fill="#8f9bad">{label}</text>')
        x += 30 + LABEL_PIXELS * len(label)
    return "".join(parts)


def _group(box: Box, told: str, top: float, scale: float) -> str:
    width = max(1, box.end - box.x - 1)
    parts = [f"<g><title>{escape(told)}</title>"]
    if box.folded:
        at = float(box.x)
        for tier, blocks in shares_of(box.lies):
            part = width * blocks / len(box.lies)
            parts.append(_rect(at, top, part, max(2.0, box.blocks * scale - 1), COLOURS[Tier(tier) if tier else GONE],
                               ' opacity="0.55"'))
            at += part
    else:
        at = top
        for tier, run in groupby(box.lies):
            tall = len(list(run)) * scale
            parts.append(_rect(box.x, at, width, max(1.0, tall), COLOURS[Tier(tier) if tier else GONE]))
            at += tall
        parts += [_rect(box.x, top + lost * scale, width, max(1.5, scale / 3), SEAM) for lost in sorted(box.lost)]
    label = f"+{count(len(box.nodes))} more" if box.folded else f"{count(box.blocks)} ×{count(box.weight)}"
    if width > LABEL_PIXELS * len(label) and box.blocks * scale >= 12:
        parts.append(f'<text x="{box.x + 4}" y="{top + 11:.1f}" fill="#ffffff">{label}</text>')
    return "".join([*parts, "</g>"])


def shares_of(lies: bytes) -> list[tuple[int, int]]:
    """Tiers with their blocks, near tiers first, ``GONE`` last."""
    return [(tier, lies.count(tier)) for tier in (*Tier, GONE) if tier in lies]


def _rect(x: float, y: float, width: float, height: float, colour: str, more: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"{more}/>'


def sentence(box: Box, known: Figures, now_ns: int) -> str:
    """The figures of a box in lines of text."""
    what = f"{plural(len(box.nodes), 'narrow branch', 'narrow branches')} folded, " if box.folded else ""
    last = "" if box.folded else f", {count(box.depth)} to {count(box.depth + box.blocks - 1)} of the prompt"
    lines = [f"{what}{plural(known.blocks, 'block')}{last}"]
    lies = [f"{Tier(tier).name} {count(blocks)}" for tier, blocks in sorted(known.lies.items()) if tier]
    if known.lies.get(GONE):
        lies.append(f"in no tier {count(known.lies[GONE])}")
    lines.append("lies now: " + ", ".join(lies))
    names = ", ".join(plain(user.request) for user in known.users[:5])
    lines.append(f"used by {plural(len(known.users), 'request')}" + (f": {names}" if names else ""))
    lines.append(f"last used {spoken(max(0, now_ns - known.last_ns))} ago")
    for each in known.culprits[:3]:
        lay = "" if each.lay_ns is None else f", median stay {spoken(each.lay_ns)}"
        who = f" for {plain(each.request)}" if each.request else ""
        lines.append(f"{each.tier.name} evicted {plural(each.blocks, 'block')}{who}{lay}")
    if known.lost_times:
        lines.append(f"evicted, asked for again: {plural(known.lost_blocks, 'block')}, {count(known.lost_times)} times")
    return "\n".join(lines)
