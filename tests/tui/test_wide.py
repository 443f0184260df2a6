"""Wide characters keep their two cells, wherever a name is cut, on every kind of terminal.

Law of this file: the oracle of widths is the framework's table, not the console's.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.tui.desks import FakeActions, desk_of, everything
from tests.tui.script import Script, story
from tui.canvas import Canvas
from tui.desk import HELP, SLOT, SLOTS
from tui.draw.spans import Line, Row, Span
from tui.keys import press
from tui.model.numbers import cut, cut_middle, plain, shown
from tui.theme import Theme

NAME = "聊天-請求-0418"
letters = st.text(st.sampled_from("ab-7é聊天請求채팅チャットＷ\x1b\n\u0301\ue000●→"), max_size=12)


@given(letters, st.integers(0, 24), st.integers(0, 24))
def test_every_part_of_a_text_has_a_cell_for_each_character(text: str, first: int, last: int) -> None:
    safe = plain(text)
    assert plain(safe) == safe
    for part in (safe[first:last], cut(safe, last), cut_middle(safe, last)):
        assert cell_len(shown(part)) == len(part)
        assert not any(ord(character) < 32 for character in part)


@given(st.lists(st.tuples(letters, st.sampled_from(["text", "strong"])), max_size=5), st.integers(1, 40))
def test_a_row_of_the_canvas_has_its_width(spans: list[tuple[str, str]], width: int) -> None:
    line = Line(tuple(Span(plain(text), role) for text, role in spans))
    for ascii_only in (False, True):
        canvas = Canvas(Theme("none"), ascii_only=ascii_only)
        canvas.colours = None
        assert cell_len(canvas.row(line, width).replace("\x1b[0m", "")) == width
        strip = canvas._strip(line, width)
        assert sum(segment.cell_length for segment in strip) == width


def named(name: str) -> Script:
    script = story()
    script.open(name, 4)
    return script


@pytest.mark.parametrize("width", [60, 72, 80, 120, 200])
def test_a_wide_name_stands_in_its_column(width: int) -> None:
    wide, narrow = desk_of(named(NAME)), desk_of(named("x" * len(plain(NAME))))
    wide.current = narrow.current = SLOTS
    for mine, other in zip(wide.draw(width, 30), narrow.draw(width, 30), strict=True):
        assert cell_len(shown(mine.text)) == mine.width == other.width
    text = shown(everything(wide, width, 30))
    assert "聊天" in text
    assert "?" not in text.replace("? help", "")


@pytest.mark.parametrize(("width", "whole"), [(80, False), (110, True), (200, True)])
def test_a_long_name_takes_the_cells_that_others_can_spare(width: int, whole: bool) -> None:
    name = "chatcmpl-91db3718-0a"
    desk = desk_of(named(name))
    desk.current = SLOTS
    rows = [line.text for line in desk.draw(width, 24)]
    assert any(name in row for row in rows) is whole
    assert any("WAITS FOR" in row for row in rows)
    heading = next(row for row in rows if "WAITS FOR" in row)
    assert width - heading.index("WAITS FOR") >= 20, "the reason of a wait is not cut for a name"


def test_a_terminal_with_a_poor_font_gets_no_glyph_that_it_lacks() -> None:
    desk = desk_of(named(NAME), ascii_only=True)
    canvas = Canvas(Theme("none"), ascii_only=True)
    for view in range(HELP):
        desk.current = view
        for line in desk.draw(100, 40):
            assert all(character <= "\xff" for character in canvas._shown(line.text)), line.text


def test_a_copied_name_is_the_name() -> None:
    actions = FakeActions()
    desk = desk_of(named(NAME), actions=actions)
    desk.current = SLOTS
    desk.select(NAME)
    desk.draw(120, 40)
    for _ in range(3):
        press(desk, "y")
    texts = [call[1] for call in actions.calls if isinstance(call, tuple) and call[0] == "copy"]
    assert texts[0] == NAME
    assert all("聊天-" in str(text) and "\ue000" not in str(text) for text in texts)


def test_a_span_that_ends_inside_a_wide_character_ends_with_a_blank() -> None:
    line = Row().put(plain("聊")[:1], "text").put(plain("聊")[1:], "strong").line()
    canvas = Canvas(Theme("none"))
    canvas.colours = None
    assert canvas.row(line, 3).replace("\x1b[0m", "") == "   "


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("name", ["chatcmpl-" + "x" * 188 + "end", "聊天-請求-" + "絵" * 94 + "end"])
def test_a_name_of_200_characters_is_cut_in_its_middle_and_displaces_nothing(name: str, size: tuple[int, int]) -> None:
    script = named(name)
    desk = desk_of(script)
    for view in range(HELP):
        desk.current = view
        desk.selected = name
        shorter = desk.draw(*size)
        text = shown("\n".join(line.text for line in shorter))
        assert all(cell_len(shown(line.text)) <= size[0] for line in shorter)
        if name[: 5 if name.isascii() else 3] in text:
            assert "…" in text, f"view {view + 1}"
            assert "end" in text, f"view {view + 1}"
    desk.current = SLOT
    arrived = desk.times.text(script.events[-1].at_ns, millis=True)
    assert arrived in everything(desk, *size), "the head of a slot is whole"
