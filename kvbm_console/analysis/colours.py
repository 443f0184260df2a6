"""Colours of tiers, states and trouble, on a dark and on a light ground: the console and pages have the same.

Law of this file: colour means a tier, a state or trouble, and orange means trouble alone.
"""

from typing import Final

DARK: Final[dict[str, str]] = {
    "background": "#11151c", "bar": "#1a212b", "sel": "#263244", "rule": "#2d3847", "text": "#d7dee8",
    "muted": "#8f9bad", "faint": "#717d90", "ok": "#47c299", "caution": "#ff9f43", "fault": "#fb4a64",
    "faultground": "#3d1620", "heldground": "#3a2814", "cautionground": "#3a2814", "gap": "#a87c7c",
    "gapground": "#241b20", "trend": "#65798f", "trendnow": "#8f9bad",
    "g1": "#27b3c2", "g2": "#b3adff", "g3": "#9353d6", "g4": "#8d5a86", "gone": "#39424f",
    "fill.copy": "#93a5b9", "fill.onboard": "#8f9a35", "fill.prefill": "#2f86c6", "fill.decode": "#2b7d66",
    "initialized": "#a9b5c5", "onboard": "#cfd84f", "prefill": "#309ce8", "decode": "#47c299",
    "preempted": "#efbcec", "finishing": "#8f9bad", "finished": "#717d90",
    "seam": "#fb4a64",
}
LIGHT: Final[dict[str, str]] = {
    "background": "#fbfbf8", "bar": "#eeefea", "sel": "#d9e5f2", "rule": "#d3d6d1", "text": "#1d2630",
    "muted": "#586370", "faint": "#707a84", "ok": "#007a62", "caution": "#a34c00", "fault": "#b8144b",
    "faultground": "#fbdde6", "heldground": "#fde6c8", "cautionground": "#fde6c8", "gap": "#87605a",
    "gapground": "#f3e9e4", "trend": "#86a1bd", "trendnow": "#586370",
    "g1": "#00808c", "g2": "#5a50e0", "g3": "#5b2a9d", "g4": "#8f5f83", "gone": "#8d949c",
    "fill.copy": "#44617f", "fill.onboard": "#a3a83a", "fill.prefill": "#3f86bd", "fill.decode": "#5fb3a0",
    "initialized": "#586370", "onboard": "#5f6b00", "prefill": "#085891", "decode": "#007a62",
    "preempted": "#ae18cc", "finishing": "#586370", "finished": "#707a84",
    "seam": "#d0103f",
}
_PAGE: Final = {
    "bg": "background", "bar": "bar", "sel": "sel", "rule": "rule", "text": "text", "muted": "muted", "fault": "fault",
    "caution": "caution", "hold": "caution", "ok": "ok", "initialized": "initialized", "onboard": "fill.onboard",
    "prefill": "fill.prefill", "decode": "fill.decode", "preempted": "preempted", "finishing": "finishing",
    "finished": "finished", "trend": "trend", "g1": "g1", "g2": "g2", "g3": "g3", "g4": "g4",
}
"""Variables of a page's style sheet, and the colours that they have."""


def style_sheet() -> str:
    """The variables of a page, light or dark as the reader's system is, or as ``data-theme`` says."""
    dark, light = (
        "".join(f" --{name}:{colours[role]};" for name, role in _PAGE.items()) for colours in (DARK, LIGHT))
    return (
        f":root {{{light} color-scheme:light; }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{{dark} color-scheme:dark; }} }}\n"
        f":root[data-theme=dark] {{{dark} color-scheme:dark; }}"
    )
