"""``status`` for people: the console's overview without a terminal, and then the tables.

Law of this file: what is asserted is what the command prints.
"""

import subprocess
from pathlib import Path

from kvbm_console.cli.glance import drawn
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.cli.programs import DEADLINE_S, PROGRAM, environment, serving
from tests.tui.script import connected
from tui.model.mirror import Mirror

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
SECTIONS = ("NEEDS YOU", "CACHE", "TIERS", "FLOWS", "SLOTS")


def test_a_hold_is_told_at_once_with_what_happens_next() -> None:
    tape = Recording.open(RECORDINGS / "breakpoint-hold.mcap")
    mirror = Mirror()
    mirror.take(connected(), 0)
    mirror.take(SnapshotTaken(tape.state_at(tape.first_seq)), 0)
    for events in tape.events(tape.first_seq + 1):
        for event in events:
            mirror.take(EventsArrived([event]), 0)
            if mirror.state is not None and mirror.state.holds:
                break
        else:
            continue
        break
    text = drawn(mirror)
    assert text[0].startswith(" NEEDS YOU   1 caution")
    assert "held" in text[1]
    assert "at breakpoint" in text[1]
    assert [name for name in SECTIONS if any(line.startswith(f" {name}") for line in text)] == list(SECTIONS)


def test_status_has_the_overview_and_the_tables(tmp_path: Path) -> None:
    with serving(tmp_path, "--workload", "multiturn", "--speed", "max") as daemon:
        daemon.until("PrefixScored")
        text = daemon.output("status")
        plain = subprocess.run(
            [PROGRAM, "status"], capture_output=True, cwd=tmp_path, timeout=DEADLINE_S, check=True,
            env={**environment(tmp_path), "PYTHONIOENCODING": "ascii:replace"},
        ).stdout
    for name in SECTIONS:
        assert f"\n {name}" in f"\n{text}"
        assert f"\n {name}".encode() in b"\n" + plain
    assert "\nstream " in text
    assert "HIT RATE" in text
    assert plain.isascii()
