"""The canvas: what it writes by itself is what the framework would have written, and nothing twice."""

import colorsys
import itertools
import re
from math import dist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.console import Console

from kvbm_console.analysis.colours import DARK, LIGHT
from tui.canvas import Canvas
from tui.draw.spans import Line, Span
from tui.theme import THEMES, Theme

ROLES = ("text", "muted", "fault", "title", "pill.ok", "heldbox", "fill.g1", "decode.u", "text@sel", "cursor", "gap")
LINES = st.builds(
    Line, st.lists(st.builds(Span, st.text("ab ·▆→", max_size=9), st.sampled_from(ROLES)), max_size=6).map(tuple),
    st.sampled_from(["", "bar", "sel"]), st.just(()),
)
SGR = re.compile(r"\x1b\[([0-9;]*)m")


def cells(text: str) -> list[tuple[str, str]]:
    """(character, its style as codes) of what a terminal gets."""
    found: list[tuple[str, str]] = []
    codes, at = "", 0
    for part in SGR.finditer(text):
        found += [(character, codes) for character in text[at : part.start()]]
        at = part.end()
        codes = part[1].removeprefix("0;") if part[1] != "0" else ""
    return found + [(character, codes) for character in text[at:]]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("colours", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT, ColorSystem.STANDARD, None])
def test_a_row_is_what_the_framework_would_write(theme: str, colours: ColorSystem | None) -> None:
    console = Console(color_system=None, force_terminal=True)
    console._color_system = colours

    @settings(max_examples=25)
    @given(LINES, st.integers(1, 30), st.booleans())
    def check(line: Line, width: int, ascii_only: bool) -> None:
        canvas = Canvas(Theme(theme), ascii_only=ascii_only)
        canvas.colours = colours
        row = canvas.row(line, width)
        assert SGR.findall(row)[-1:] in ([], ["0"]), "what stands behind it is not styled by it"
        written = cells(row)
        assert len(written) == width
        if colours is not None:  # without any, the framework still asks for true colour
            assert written == cells(canvas._strip(line, width).render(console))

    check()


@given(st.lists(st.lists(LINES, min_size=4, max_size=4), min_size=2, max_size=5))
def test_only_rows_that_differ_are_sent_and_the_terminal_shows_the_last_frame(frames: list[list[Line]]) -> None:
    canvas = Canvas(Theme("dark"))
    shown: dict[int, str] = {}
    sent: list[str] = []

    def send(text: str) -> bool:
        sent.append(text)
        for row in re.split(r"(?=\x1b\[\d+H)", text)[1:]:
            place, rest = row.removeprefix("\x1b[").split("H", 1)
            shown[int(place) - 1] = rest
        return True

    canvas.draw(frames[0], 12)
    shown.update({y: canvas.row(line, 12) for y, line in enumerate(frames[0])})  # the framework draws the first one
    canvas.send = send
    for before, after in itertools.pairwise(frames):
        sent.clear()
        rows = canvas.rows_drawn
        canvas.draw(after, 12)
        differ = sum(one != other for one, other in zip(before, after, strict=True))
        assert canvas.rows_drawn - rows == differ
        assert len(sent) == (differ > 0)
        assert shown == {y: canvas.row(line, 12) for y, line in enumerate(after)}


def lab(colour: str) -> tuple[float, float, float]:
    """A colour in CIE L*a*b*, in which distances are alike to the eye."""
    def linear(share: float) -> float:
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    def root(value: float) -> float:
        return value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116

    red, green, blue = (linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    x = root((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047)
    y = root(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    z = root((0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


STATES = ("onboard", "prefill", "decode", "preempted", "caution", "fault")
TIERS = ("g1", "g2", "g3", "g4")


@pytest.mark.parametrize("name", ["dark", "light"])
def test_a_tier_has_its_own_colour_in_every_view(name: str) -> None:
    """No colour of a tier is taken for that of a state or of trouble, nor for another tier's."""
    colours = {"dark": DARK, "light": LIGHT}[name]
    for tier in TIERS:
        for other in (*STATES, *(each for each in TIERS if each != tier)):
            assert dist(lab(colours[tier]), lab(colours[other])) >= 20, (tier, other)
        assert Theme(name).style(tier).color == Theme(name).style(f"fill.{tier}").color


@pytest.mark.parametrize("name", ["dark", "light"])
def test_orange_is_for_trouble_alone(name: str) -> None:
    orange = set()
    for role, colour in {"dark": DARK, "light": LIGHT}[name].items():
        red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        hue, _, _ = colorsys.rgb_to_hls(red, green, blue)
        if 15 <= hue * 360 <= 45 and max(red, green, blue) - min(red, green, blue) > 0.1:
            orange.add(role)
    assert orange == {"caution", "cautionground", "heldground"}


@pytest.mark.parametrize("name", ["ansi", "ansi-light"])
def test_a_tier_has_its_own_colour_among_sixteen(name: str) -> None:
    theme = Theme(name)
    found = [theme.style(role).color for role in (*TIERS, *STATES)]
    assert len(set(found)) == len(found)
