"""The timeline over all its zooms: the cursor stays in sight, events are met one by one, holds are hatched.

Law of this file: what is asserted is on the screen, or is where the cursor stands.
"""

import pytest

from kvbm_console.core.ids import SlotState
from tests.tui.desks import desk_of, screen
from tests.tui.script import MS, S, Script, story
from tui.desk import TIMELINE, Desk
from tui.keys import press
from tui.views.timeline import Timeline, steps

SIZE = (120, 40)
MINUTE = 60 * S
HOUR = 60 * MINUTE


def timeline(script: Script, request: str) -> tuple[Desk, Timeline]:
    desk = desk_of(script)
    desk.go(TIMELINE)
    desk.select(request)
    screen(desk, *SIZE)
    view = desk.view
    assert isinstance(view, Timeline)
    return desk, view


def cells(desk: Desk, view: Timeline, keys: str) -> list[int]:
    """Sizes of a cell, from one press to the next, until it does not change any more."""
    found: list[int] = []
    while not found or view.window.cell_ns != found[-1]:
        found.append(view.window.cell_ns)
        press(desk, keys)
        rows = screen(desk, *SIZE)
        if view.cursor_ns is not None:
            assert 0 <= view.window.cell(view.cursor_ns) < view.window.cells, rows[3]
            assert any("┬" in row for row in rows), "the cursor is in sight"
    return found


def test_zoom_goes_from_an_hour_to_a_millisecond_in_round_steps_around_the_cursor() -> None:
    desk, view = timeline(story(), "rag-0002.7")
    press(desk, "n")
    at = view.cursor_ns
    smaller = cells(desk, view, "+")
    assert smaller[-1] == MS
    assert " 1 cell = 1.0 ms" in "\n".join(screen(desk, *SIZE))
    larger = cells(desk, view, "-")
    assert larger[-1] == HOUR
    assert " 1 cell = 1h00m" in "\n".join(screen(desk, *SIZE))
    assert view.cursor_ns == at
    assert larger == sorted(larger)
    for size in larger:
        unit = next(unit for unit in (HOUR, MINUTE, S, MS) if size >= unit)
        assert size % unit == 0
        assert str(size // unit).strip("0") in ("1", "2", "5", "15", "3")


@pytest.mark.parametrize("zooms", [0, 4, 12])
def test_n_and_N_meet_every_event_of_a_request_once_and_exactly(zooms: int) -> None:
    desk, view = timeline(story(), "rag-0002.7")
    life = desk.mirror.life_of("rag-0002.7")
    assert life is not None
    press(desk, "n")
    for _ in range(zooms):
        press(desk, "+")
        screen(desk, *SIZE)
    for _ in life.story:
        press(desk, "N")
    met = []
    for _ in range(len(steps(life))):
        met.append((desk.event, view.cursor_ns))
        press(desk, "n")
        screen(desk, *SIZE)
    assert met == steps(life)


def test_a_hold_is_hatched_in_the_row_and_in_the_copy_that_waits_below_it() -> None:
    script = story()
    slot = script.open("held-0009.1", 6)
    script.wait(200 * MS)
    script.move(slot, SlotState.PREFILLING)
    script.wait(200 * MS)
    script.plan(slot, 2)
    script.hold(slot)
    script.wait(2 * S)
    desk, _ = timeline(script, "held-0009.1")
    rows = screen(desk, *SIZE)
    at = next(index for index, row in enumerate(rows) if "held-0009.1" in row)
    row, copy = rows[at], rows[at + 1]
    assert "└" in copy
    assert row.rstrip().endswith("╱" * 20)
    assert copy.rstrip().endswith("╱" * 20)
    assert row.index("╱") <= copy.index("╱"), "the copy waits within the hold of its request"


def test_a_chosen_window_shows_only_who_lived_in_it_and_the_selected_one() -> None:
    script = story()
    for number in range(5):
        slot = script.run(f"brief-{number:04}.1", 2)
        script.wait(100 * MS)
        script.finish(slot)
        script.wait(2 * S)
    desk, _ = timeline(script, "rag-0002.7")
    text = "\n".join(screen(desk, *SIZE))
    assert all(f"brief-{number:04}.1" in text for number in range(5))
    press(desk, "f")
    while "1 cell = 10 ms" not in text:
        press(desk, "+")
        text = "\n".join(screen(desk, *SIZE))
    assert "brief-" not in text, "all of them ended before the window begins"
    desk.select("brief-0000.1")
    assert "brief-0000.1" in "\n".join(screen(desk, *SIZE))


def test_a_stuck_request_leaves_the_others_their_cells() -> None:
    script = Script()
    script.pools()
    script.run("stuck", 1)
    script.wait(10 * MINUTE)
    for number in range(8):
        script.run(f"busy-{number}", 1)
        script.wait(S)
    desk = desk_of(script)
    desk.go(TIMELINE)
    screen(desk, *SIZE)
    view = desk.view
    assert isinstance(view, Timeline)
    assert view.window.cell_ns * view.window.cells < MINUTE
    assert {life.request for life in view.shown} == {"stuck", *(f"busy-{number}" for number in range(8))}
    press(desk, "z")
    screen(desk, *SIZE)
    assert view.window.cell_ns * view.window.cells >= 10 * MINUTE, "the whole run has every request"
