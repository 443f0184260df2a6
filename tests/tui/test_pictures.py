"""The pictures of the README: drawn from a recording, never older than the code, and all of them shown.

Law of this file: what is committed is compared with what today's code draws, character by character.
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recordings.screens import make  # noqa: E402
from recordings.screens.film import film  # noqa: E402


def test_the_pictures_are_what_the_code_draws() -> None:
    assert make.stale() == [], "make screens draws them again"


def test_every_view_and_panel_is_there_in_every_look() -> None:
    views = {*make.VIEWS.values(), *make.MORE}
    for name, look in make.LOOKS.items():
        assert {path.stem for path in (make.HERE / name).glob("*.svg")} == set(look.views or views)
    for name in make.TEXTS:
        told = (make.HERE / f"{name}.txt").read_text(encoding="utf-8")
        assert set(re.findall(r"^=== (\w+) ===$", told, re.MULTILINE)) == views
        assert name.endswith("none") or told.isascii()


def test_every_picture_is_in_the_readme() -> None:
    shown = set(re.findall(r"\(recordings/screens/(\w+\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert shown == {path.name for path in make.HERE.glob("*.svg")}


def frame(rows: list[str]) -> str:
    """A picture as the console exports it, with one text in each row."""
    text = "".join(
        f'<text class="film-r{len(row)}" x="0" y="{20 + 24.4 * y:.1f}" clip-path="url(#film-line-{y})">{row}</text>'
        for y, row in enumerate(rows) if row
    )
    styles = "".join(f".film-r{number} {{ fill: #{number}{number}{number} }}\n" for number in range(1, 6))
    return f'<svg><style>{styles}</style><defs></defs><g transform="translate(9, 41)">{text}</g></svg>'


def seen(moving: str, number: int, total: int) -> list[str]:
    """The texts that are visible during a frame."""
    rules = dict(re.findall(r"@keyframes (f\d+)\{(.*?)\}\.f", moving))
    texts = []
    for name, cells in re.findall(r'<g(?: class="(f\d+)")?>(<text.*?</text>)</g>', moving):
        steps = re.findall(r"([\d.]+)%\{visibility:(\w+)\}", rules.get(name, "0%{visibility:visible}"))
        now = [what for percent, what in steps if float(percent) <= 100 * (number + 0.5) / total]
        if now[-1] == "visible":
            texts.append(re.sub("<[^>]*>", "", cells))
    return texts


@pytest.mark.parametrize("frames", [
    [["a", "bb"], ["a", "ccc"], ["a", "bb"]], [["a"], ["b"], ["c"], ["a"]], [["a", "", "b"], ["", "a", "b"]],
])
def test_a_film_shows_every_frame_as_it_was(frames: list[list[str]]) -> None:
    moving = film([frame(rows) for rows in frames], 0.5)
    for number, rows in enumerate(frames):
        assert seen(moving, number, len(frames)) == [row for row in rows if row]
