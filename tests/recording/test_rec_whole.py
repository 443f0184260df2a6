"""What is said of a directory of which something is damaged or gone: each run is looked at, and nothing is "equal".

Law of this file: a recording is called whole when every run of its directory is there and equal.
"""

import shutil
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core.errors import CorruptRecording
from kvbm_console.recording.reader import PAUSED, Recording
from kvbm_console.recording.seal import seal_segment
from kvbm_console.recording.verify import verify
from tests.recording.helpers import Log, recorder_of


def made(directory: Path) -> list[Path]:
    """Two runs of three sealed segments of 10 events each; their paths in order."""
    for run in ("first", "second"):
        log = Log()
        recorder = recorder_of(log, directory, incarnation=run, seal=False)
        for number in range(3):
            recorder.offer(*log.flush(10))
            assert recorder.settle()
            if number < 2:
                assert recorder.rotate()
                assert recorder.settle()
        recorder.close()
    return [seal_segment(path) for path in sorted(directory.glob("*.active"))]


@cache
def template(root: Path) -> Path:
    """Made once, copied by each test."""
    directory = root / "template"
    made(directory)
    return directory


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the directory."""
    return Path(shutil.copytree(template(tmp_path_factory.getbasetemp()), tmp_path / "run"))


def segments(directory: Path) -> list[Path]:
    """Sealed segments in order."""
    return sorted(directory.glob("*.mcap"))


def flip(path: Path) -> None:
    """Change a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def exit_status(directory: Path) -> tuple[int, str]:
    """What ``rec verify`` says."""
    done = CliRunner().invoke(cli, ["rec", "verify", str(directory)])
    return done.exit_code, done.output


def test_two_whole_runs_are_both_verified(run: Path) -> None:
    report = verify(run)
    assert (report.ok, report.run, report.findings) == (True, "second", [])
    assert [(one.run, one.ok, one.events) for one in report.earlier] == [("first", True, 30)]
    assert exit_status(run)[0] == 0


def test_a_flipped_bit_in_an_older_run_is_found(run: Path) -> None:
    flip(segments(run)[1])
    report = verify(run)
    assert (report.ok, report.first_difference) == (False, None)
    assert [one.ok for one in report.earlier] == [False]
    assert "corrupt" in str(report.earlier[0].first_difference)
    assert exit_status(run)[0] == 1


def test_an_older_segment_that_cannot_be_opened_hides_no_later_run(run: Path) -> None:
    first = segments(run)[0]
    first.write_bytes(first.read_bytes()[:500])
    assert Recording.open(run).unreadable.keys() == {first}
    report = verify(run)
    assert not report.ok
    assert report.findings[0].startswith(f"{first.name} cannot be read: ")
    info = CliRunner().invoke(cli, ["rec", "info", str(run)])
    assert info.exit_code == 0
    assert f"unreadable {first.name}: " in info.output


def test_a_damaged_segment_that_can_be_of_the_run_is_refused(run: Path) -> None:
    last = segments(run)[-1]
    last.write_bytes(last.read_bytes()[:500])
    with pytest.raises(CorruptRecording):
        Recording.open(run)


@pytest.mark.parametrize(("gone", "sentence"), [
    (4, "events 10 to 19 are missing: a segment was removed"),
    (5, "every segment behind event 19 was removed"),
])
def test_a_segment_of_the_last_run_that_is_gone_is_no_whole_recording(run: Path, gone: int, sentence: str) -> None:
    segments(run)[gone].unlink()
    report = verify(run)
    assert (report.ok, report.findings, report.first_difference) == (False, [sentence], None)
    status, output = exit_status(run)
    assert status == 1
    assert sentence in output
    assert output.rstrip().endswith("the present events are equal")


@pytest.mark.parametrize(("gone", "sentence"), [
    (1, "events 10 to 19 are missing: a segment was removed"),
    (2, "every segment behind event 19 was removed"),
])
def test_a_segment_of_an_older_run_that_is_gone_is_found(run: Path, gone: int, sentence: str) -> None:
    segments(run)[gone].unlink()
    report = verify(run)
    assert not report.ok
    assert [(one.run, one.findings) for one in report.earlier] == [("first", [sentence])]


def test_segments_that_retention_removed_from_the_front_are_no_damage(run: Path) -> None:
    for path in segments(run)[:5]:
        path.unlink()
    report = verify(run)
    assert (report.ok, report.events, report.findings, report.earlier) == (True, 10, [], [])


def test_a_recording_that_was_stopped_and_started_again_is_whole_with_a_gap(tmp_path: Path) -> None:
    log = Log()
    for _ in range(2):
        recorder = recorder_of(log, tmp_path)
        recorder.offer(*log.flush(10))
        assert recorder.settle()
        recorder.close()
        log.flush(5)
    assert [gap.reason for gap in Recording.open(tmp_path).gaps] == [PAUSED]
    assert verify(tmp_path).ok


def test_one_file_of_a_directory_is_whole_by_itself(run: Path) -> None:
    assert verify(segments(run)[0]).ok


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    recordings = Path(__file__).resolve().parents[2] / "recordings"
    done = CliRunner().invoke(cli, ["rec", "verify", str(recordings / "gap.mcap")])
    assert "46 events are missing in 1 gap\n" in done.output
