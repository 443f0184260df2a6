"""Exported pictures: the same cells, whoever draws them."""

import html
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from tui.app import sturdy

PIECE = re.compile(
    r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)" clip-path="[^"]*">([^<]*)</text>')
CELL = 12.2


def cells(svg: str) -> dict[tuple[float, int], str]:
    """The place of each visible character."""
    found = {}
    for x, y, length, told in PIECE.findall(svg):
        text = html.unescape(told)
        assert abs(float(length) - CELL * len(text)) < 0.11
        for index, character in enumerate(text):
            if character not in " \u00a0":
                found[(float(y), round((float(x) + CELL * index) / CELL))] = character
    return found


@given(st.lists(st.lists(st.tuples(st.text("ab<&\" '▄·", max_size=6), st.sampled_from(["red", "bold", "reverse"])),
                         min_size=1, max_size=5), min_size=1, max_size=4))
def test_every_character_stands_where_it_stood(rows: list[list[tuple[str, str]]]) -> None:
    console = Console(record=True, width=40, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    for row in rows:
        console.print(Text.assemble(*row))
    console.file.close()
    drawn = console.export_svg(title="x", unique_id="t")
    trimmed = sturdy(drawn)
    assert sturdy(trimmed) == trimmed
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0]
    assert f'<svg class="rich-terminal" width="{width}" height="{height}" viewBox="0 0 {width} {height}"' in trimmed
    assert cells(trimmed) == cells(drawn)
    for _, _, _, told in PIECE.findall(trimmed):
        text = html.unescape(told)
        assert text == text.strip("\u00a0 ")
        assert text
    assert len(trimmed) <= len(drawn) + len(f' width="{width}" height="{height}"') + 8 * trimmed.count("<text")
