"""No view cuts a text in mid word, and none moves when values change, at 80, 100, 120 and 200 columns.

Law of this file: the views show a real run, the incident of ``demo`` with a stuck request, thrash and a queue.
"""

import re
from typing import Final

import pytest

from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.incident import STUCK
from tests.cli.test_demo import console_on, recorded
from tui import desk as desks
from tui.desk import BREAKS, HELP, LOG, OVERVIEW, RECORD, TIERS, TRANSFERS, Desk
from tui.draw import spans
from tui.draw.frame import NAMES
from tui.draw.spans import Line

SIZES: Final = ((80, 24), (100, 30), (120, 40), (200, 60))
WORD: Final = re.compile(r"[A-Za-z0-9]")


STILL: Final = (OVERVIEW, TRANSFERS, TIERS, BREAKS, RECORD, LOG)
"""Views whose sections do not depend on a selection or on the number of things that they list."""
FIRST_S: Final = 8
"""From here on every tier has been used."""


@pytest.fixture(scope="module")
def incident_run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The first 48 s of the incident."""
    return Recording.open(recorded(tmp_path_factory.mktemp("incident"), "incident", 48))


@pytest.fixture(scope="module")
def incident(incident_run: Recording) -> Desk:
    """A console at its end."""
    return console_on(incident_run)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of which words were cut off without a mark."""
    found: list[str] = []
    real = spans.crop

    def crop(line: Line, width: int) -> Line:
        rest = line.text[width:]
        if WORD.search(rest):
            found.append(f"{line.text[:width].rstrip()[-50:]} | {rest.rstrip()}")
        return real(line, width)

    monkeypatch.setattr(spans, "crop", crop)
    monkeypatch.setattr(desks, "crop", crop)
    return found


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("view", range(HELP), ids=lambda view: NAMES[view])
def test_no_view_cuts_a_word(incident: Desk, lost: list[str], view: int, size: tuple[int, int]) -> None:
    incident.current, incident.help = view, False
    incident.select(STUCK)
    incident.draw(*size)
    assert lost == []
    incident.help = True
    incident.draw(*size)
    assert lost == []


def test_the_tiers_leave_out_what_does_not_fit_on_the_smallest_screen(incident: Desk, lost: list[str]) -> None:
    incident.current, incident.help = TIERS, False
    incident.draw(60, 16)
    assert lost == []


def titles(lines: list[Line]) -> list[tuple[int, str]]:
    """The rows of a frame that have a title, with it."""
    return [(row, span.text) for row, line in enumerate(lines) for span in line.spans if span.role == "title"]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_no_section_moves_when_values_change(incident_run: Recording, size: tuple[int, int]) -> None:
    seen: dict[int, list[tuple[int, str]]] = {}

    def look(desk: Desk, second: int) -> None:
        if second < FIRST_S or second % 4:
            return
        for view in STILL:
            desk.current = view
            found = titles(desk.draw(*size))
            assert found == seen.setdefault(view, found), f"{NAMES[view]} at {second} s"
        desk.current = OVERVIEW

    console_on(incident_run, look)
    assert set(seen) == set(STILL)


def test_a_cut_word_is_found(lost: list[str]) -> None:
    spans.Row().put("a text of five words").line("", 10)
    assert lost == ["a text of | five words"]
