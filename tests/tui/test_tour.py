"""The tour of ``demo --tour``: its captions fit, and its keys lead from its first step to its last on a real console.

Law of this file: the real test presses the key that the screen names, and nothing else.
"""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cli.programs import PROGRAM
from tests.tui.desks import desk_of
from tests.tui.test_tmux import Screen
from tui.tour import ROWS, STEPS, Tour

DEADLINE_S: Final = 240
"""Four times what the incident takes on an idle machine at this speed."""
KEYS: Final = {"enter": "Enter", "←": "Left", "→": "Right"}


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_a_caption_and_its_key_fit_at_80_columns(at: int) -> None:
    desk, tour = desk_of(), Tour()
    tour.at = at
    if tour.step.over(desk):
        pytest.skip("this desk is where the step leads")
    lines = tour.lines(desk, 80)
    text = " ".join(line.text.strip() for line in lines).strip()
    assert len(lines) == ROWS
    assert STEPS[at].text in re.sub(r" +", " ", text)
    assert text.endswith(f"press {STEPS[at].key}" if STEPS[at].key else STEPS[at].text[-8:])
    assert all(line.width <= 80 for line in lines)


def test_no_caption_moves_the_rest_of_the_screen() -> None:
    desk = desk_of()
    desk.tour = tour = Tour()
    heights = {len(desk.draw(80, 24)), *(len(tour.lines(desk, 80)) for _ in range(3))}
    assert heights == {24, ROWS}


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    """A window of 100 by 30."""
    one = Screen(tmp_path, 100, 30)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_keys_on_the_screen_lead_through_the_whole_tour(tmp_path: Path, screen: Screen) -> None:
    screen.say(f"{PROGRAM} demo --tour --speed 2; echo left $((40 + 1))\n")
    ends, reached = time.monotonic() + DEADLINE_S, 0
    while reached < len(STEPS):
        assert time.monotonic() < ends, (reached, screen.text())
        text = screen.text()
        found = re.search(r"TOUR (\d+) of \d+ .*?(?:\n.*?)?(?:press (\S+))?$", text, re.MULTILINE)
        if found is None or (int(found[1]) == reached and STEPS[reached - 1].key != "→"):
            continue
        key = STEPS[int(found[1]) - 1].key
        if key and f"press {key}" not in text:
            continue  # half a frame
        reached = int(found[1])
        if key and key != "q":
            screen.type(KEYS.get(key, key))
            if key == "b":
                screen.until("break site dispatch.will")
                screen.type("Enter")
    screen.type("q")
    text = screen.until("left 41")
    assert "kvbm-console replay" in text
