"""The scenarios of ``demo``: each shows its finding in the console, and ``doctor`` names the same on its recording.

Law of this file: the machine is the one that ``demo`` builds, run in virtual time; only ``gap`` needs a real console,
because events are lost on the way to a reader.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli.demo import KEEP_BYTES
from kvbm_console.cli.machine import daemon_options
from kvbm_console.core.config import SECOND_NS
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.incident import BIG, SCENARIOS, STUCK
from kvbm_console.stream.feed import Connected, EventsArrived, Heartbeat, SnapshotTaken
from server.daemon import Daemon
from tests.cli.programs import on_terminal, run
from tests.tui.desks import FakeActions, everything
from tests.tui.script import Mono
from tui.desk import Desk
from tui.model.mirror import Mirror
from tui.views import all_views

LASTS_S: Final = {"incident": 60, "stuck": 20, "thrash": 20, "queue": 19, "calm": 45}
"""Virtual seconds until a scenario shows what it has to show. ``calm`` shows nothing."""
SEEN: Final = {
    "incident": (STUCK, "silent on rank 1", "G2", "thrash", "preempted"),
    "stuck": (STUCK, "finishing", "silent on rank 1"),
    "thrash": ("G2", "thrash", "too small for this reuse"),
    "queue": (BIG, "initialized", "G1 blocks"),
    "calm": ("NEEDS YOU   nothing",),
}
"""Words on the console's first view at that time."""
STEP_NS: Final = SECOND_NS


def recorded(directory: Path, name: str, seconds: int) -> Path:
    """The recording of a scenario's first seconds, by the daemon that ``demo`` starts."""
    daemon = Daemon(daemon_options(
        workload=None, scenario=SCENARIOS[name], limit=None, speed=None, record=directory / "run", check=False,
        listen=f"unix:{directory}/demo.sock",
    ))
    assert daemon.rig is not None
    daemon.rig.run(seconds * SECOND_NS)
    daemon.service.broadcaster.flush()
    recorder = daemon.service.recorder
    assert recorder is not None
    recorder.close()
    daemon.endpoint.close()
    return directory / "run"


def console_on(recording: Recording, look: Callable[[Desk, int], None] = lambda desk, second: None) -> Desk:
    """A console that saw the whole run as it happened, a frame a second; ``look`` is called with each second."""
    mirror, mono = Mirror(), Mono()
    mono.at_ns = 0
    mirror.take(Connected("demo", "0" * 16, 1, True, 2_097_152, config=recording.config), 0)
    mirror.take(SnapshotTaken(recording.state_at(recording.first_seq - 1)), 0)
    desk = Desk(mirror, FakeActions(), mono, all_views())  # type: ignore[arg-type]
    events = [event for batch in recording.events(recording.first_seq) for event in batch]
    at = 0
    while at < len(events):
        mono.at_ns += STEP_NS
        first = at
        while at < len(events) and events[at].at_ns <= mono.at_ns:
            at += 1
        if at > first:
            mirror.take(EventsArrived(events[first:at]), mono.at_ns)
        head = events[max(0, at - 1)].seq
        mirror.take(Heartbeat(head, mono.at_ns, "recording", head, head, 0, 0, 1), mono.at_ns)
        desk.draw(120, 40)
        look(desk, mono.at_ns // SECOND_NS)
    return desk


@pytest.mark.parametrize("name", list(LASTS_S))
def test_a_scenario_shows_its_finding_and_doctor_names_the_same(tmp_path: Path, name: str) -> None:
    place = recorded(tmp_path, name, LASTS_S[name])
    desk = console_on(Recording.open(place))
    screen = everything(desk, 120, 40)
    needs = screen[: screen.index("FATE") if "FATE" in screen else len(screen)]
    for words in SEEN[name]:
        assert words in needs, screen
    kinds = {warning.lint for warning in desk.warnings}
    found = {finding.lint for finding in diagnose(evidence_of(Recording.open(place))).findings}
    wanted = set(SCENARIOS[name].lints)
    assert wanted <= kinds, (wanted, kinds)
    assert wanted <= found, (wanted, found)
    if not wanted:
        assert not kinds | found, (kinds, found)


def test_gap_loses_events_for_the_console_and_for_the_recording(tmp_path: Path) -> None:
    status, drawn = on_terminal(tmp_path, "demo", "--scenario", "gap", "--speed", "8", "--seconds", "12")
    assert status == 0, drawn[-2_000:]
    assert re.search(r"lost [1-9][0-9,]+", drawn), drawn[-4_000:]
    assert "events" in drawn
    place = str(tmp_path / "state" / "kvbm-console" / "demo")
    for command in (f"replay {place}", f"doctor {place}", "attach http://HOST:8000"):
        assert f"kvbm-console {command}" in drawn[-800:]
    assert f"{KEEP_BYTES // 10**6} MB" in drawn[-800:]
    found = run(tmp_path, "doctor", "--brief", place)
    assert found.returncode == 1, found.stderr
    assert re.search(r"^ ! [0-9,]+ events +lost", found.stdout, re.MULTILINE), found.stdout


def test_no_record_keeps_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--no-record", "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    assert "recorder    off" in done.stdout
    assert not (tmp_path / "state").exists()


def test_a_state_directory_that_cannot_be_written_is_said_and_the_demo_goes_on(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    done = run(tmp_path, "demo", "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    assert "no recording is kept: cannot write to" in done.stderr


@pytest.mark.parametrize(("flags", "told"), [
    (("--scenario", "stuck", "--workload", "multiturn"), "--scenario and --workload both say what is served"),
    (("--no-record", "--record", "run"), "--no-record and --record exclude each other"),
    (("--tour", "--scenario", "calm"), "--tour explains the scenario incident, got calm"),
    (("--tour",), "demo --tour needs a terminal"),
])
def test_flags_that_contradict_each_other_are_one_sentence(
    tmp_path: Path, flags: tuple[str, ...], told: str
) -> None:
    done = run(tmp_path, "demo", *flags)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
