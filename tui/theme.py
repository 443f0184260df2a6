"""Colours: roles to styles, for a dark and a light terminal, for 16 colours and for none.

Law of this file: a theme is resolved once into a table of styles. Colour means state or trouble, and orange means
trouble alone; without colour, bold, reverse and the glyphs carry the same meaning.
"""

from typing import Final

from rich.style import Style

from kvbm_console.analysis.colours import DARK, LIGHT

_STATES: Final = {
    "initialized": "initialized", "onboard_staged": "onboard", "onboarding": "onboard", "skipped_prefill": "prefill",
    "prefilling": "prefill", "skipped_decode": "decode", "decoding": "decode", "preempted": "preempted",
    "finishing": "finishing", "finished": "finished",
}
_ANSI_DARK: Final[dict[str, str]] = {
    "ok": "green", "caution": "bright_yellow", "fault": "bright_red", "muted": "white", "faint": "bright_black",
    "rule": "bright_black", "trend": "white", "trendnow": "bright_white", "gap": "bright_black",
    "initialized": "white", "onboard": "yellow", "prefill": "bright_blue", "decode": "cyan",
    "preempted": "bright_magenta", "finishing": "white", "finished": "bright_black",
    "fill.onboard": "yellow", "fill.prefill": "bright_blue", "fill.decode": "cyan",
    "g1": "green", "g2": "blue", "g3": "magenta", "g4": "bright_green", "gone": "bright_black", "seam": "bright_red",
}
_ANSI_LIGHT: Final[dict[str, str]] = {
    **_ANSI_DARK, "caution": "black", "fault": "red", "muted": "bright_black", "trend": "bright_black",
    "trendnow": "black", "initialized": "bright_black", "prefill": "blue", "preempted": "magenta",
    "finishing": "bright_black", "fill.prefill": "blue", "g2": "bright_blue", "g3": "bright_magenta",
}
THEMES: Final = ("dark", "light", "ansi", "ansi-light", "none")
"""The choices of ``--theme``; ``--no-color`` chooses ``none``."""


class Theme:
    """Role and ground to a style. ``background`` is None where the terminal keeps its own."""

    def __init__(self, name: str) -> None:
        if name not in THEMES:
            raise ValueError(f"theme must be one of {', '.join(THEMES)}, got {name!r}")
        self.name = name
        self._cache: dict[tuple[str, str], Style] = {}
        self._colours = {
            "dark": DARK, "light": LIGHT, "ansi": _ANSI_DARK, "ansi-light": _ANSI_LIGHT, "none": {},
        }[name]
        self.rich = name in ("dark", "light")
        self.background: str | None = self._colours["background"] if self.rich else None

    def style(self, role: str, ground: str = "") -> Style:
        """The style of a role on a ground; ``role@ground`` brings its own, roles that are not known are plain text."""
        key = (role, ground)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._resolve(role, ground)
        return found

    def _resolve(self, role: str, ground: str) -> Style:
        role, _, tint = role.partition("@")
        ground = tint or ground
        under = role.endswith(".u")
        base = role.removesuffix(".u")
        make = self._rich_style if self.rich else self._plain_style
        style = make(base, ground)
        return style + Style(underline=True) if under else style

    def _rich_style(self, role: str, ground: str) -> Style:
        colours = self._colours
        if role.startswith("map:"):
            _, above, below = role.split(":")
            words = {"label": "#ffffff", "hatch": colours["background"]}
            front = words[above] if above in words else self._pixel(above)
            return Style(color=front, bgcolor=self._pixel(below) if below else colours["background"])
        back = {"": "background", "bar": "bar", "sel": "sel"}[ground]
        bold = role in _BOLD or role.startswith("pill")
        fore = _foreground(role)
        if role in _GROUNDS:
            back = _GROUNDS[role]
        elif role.startswith("pill."):
            back, fore = _PILLS[role], "background"
            if role == "pill.replay":
                back, fore = "sel", "text"
        elif role == "cursor":
            back, fore = "text", "background"
        return Style(color=colours.get(fore, colours["text"]), bgcolor=colours[back], bold=bold)

    def _pixel(self, code: str) -> str:
        """A colour of the prefix map: ``g1.2`` is bright, ``g1.0`` dim, ``g1.2*`` chosen, ``fold.g1`` folded."""
        colours, chosen = self._colours, code.endswith("*")
        kind, _, light = code.rstrip("*").partition(".")
        if kind == "fold":
            kind, light = light, "fold"
        if kind == "seam":
            return colours["seam"]
        if not self.rich:
            return "bright_white" if chosen else colours[kind]
        colour = blend(colours["background"], colours[kind], _LIGHT[light])
        return blend(colour, colours["text"], 0.4) if chosen else colour

    def _plain_style(self, role: str, ground: str) -> Style:
        colours = self._colours
        if role.startswith("map:") and colours:
            _, above, below = role.split(":")
            words = {"label": "bright_white", "hatch": "black"}
            front = words[above] if above in words else self._pixel(above)
            return Style(color=front, bgcolor=self._pixel(below) if below else None)
        reverse = ground == "sel" or role.startswith("pill") or role in ("cursor", "tabsel", "heldbox", "keysel")
        bold = role in _BOLD or role.startswith("pill") or role in ("fault", "caution", "limit.fault")
        colour = colours.get(_foreground(role))
        if role in ("heldbox", "hatch") and colours:
            return Style(color="black", bgcolor="bright_yellow")
        return Style(color=None if reverse else colour, reverse=reverse, bold=bold)


_LIGHT: Final = {"2": 1.0, "1": 0.72, "0": 0.5, "fold": 0.6}
"""Shares of the colour of a pixel, by the age of its last use: the rest is background."""


def blend(ground: str, colour: str, share: float) -> str:
    """A colour over a ground.

    >>> blend("#000000", "#ff8000", 0.5)
    '#804000'
    """
    channels = ((int(ground[at : at + 2], 16), int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in channels)


_BOLD: Final = frozenset({"strong", "title", "key", "tabsel", "held", "heldbox", "mark.fault", "mark.caution"})
_GROUNDS: Final = {
    "heldbox": "heldground", "hatch": "heldground", "gap": "gapground", "limit.fault": "faultground",
    "limit.caution": "cautionground", "tabsel": "sel", "keysel": "sel",
}
_PILLS: Final = {
    "pill.ok": "ok", "pill.caution": "caution", "pill.fault": "fault", "pill.replay": "sel",
}
_FORES: Final = {
    "strong": "text", "title": "muted", "key": "text", "tab": "muted", "tabsel": "text", "held": "caution",
    "heldbox": "caution", "hatch": "caution", "limit.fault": "fault", "limit.caution": "caution",
    "mark.fault": "fault", "mark.caution": "caution", "track": "rule", "selbar": "text", "todo": "rule",
    "fill.g1": "g1", "fill.g2": "g2", "fill.g3": "g3", "fill.g4": "g4",
    "computed": "prefill", "keysel": "text", "stale": "faint", "load": "onboard",
}


def _foreground(role: str) -> str:
    if role.startswith("state."):
        return _STATES[role[6:]]
    return _FORES.get(role, role)
