"""One rule for every command that makes a recording: *.mcap is one sealed file, any other path a directory.

Law of this file: whatever the form, the recording is sealed and holds the same, and nothing is overwritten.
"""

from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli
from kvbm_console.core.errors import UsageError
from kvbm_console.recording.output import RecordingPath, require_new
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from tests.cli.programs import serving
from tests.engines.test_dynamo import written

ROOT: Final = Path(__file__).resolve().parents[2]
TAPE: Final = str(ROOT / "recordings" / "thrash.mcap")
OTHER: Final = str(ROOT / "recordings" / "gap.mcap")
FRAMES: Final = str(next((ROOT / "recordings" / "kv-events").glob("*.bin")))
MAKERS: Final = {
    "cut": ("rec", "cut", TAPE, "OUT", "--from", "5"), "merge": ("rec", "merge", TAPE, OTHER, "--out", "OUT"),
    "dynamo": ("rec", "import", "dynamo", "DYNAMO", "--out", "OUT", "--block-tokens", "16"),
    "kv-events": ("rec", "import", "kv-events", FRAMES, "--out", "OUT"),
}


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="kvbm-console")


def sealed(place: Path, file: Path) -> list[object]:
    """The recording at a place is this one sealed file; its events."""
    recording = Recording.open(place)
    assert [segment.path for segment in recording.segments] == [file]
    assert not [path for path in place.parent.rglob("*") if path.suffix in (".active", ".tmp", ".parts")]
    return [event for events in recording.events(recording.first_seq) for event in events]


@pytest.mark.parametrize("name", MAKERS)
def test_a_file_and_a_directory_hold_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(written("chats").text())
    found = {}
    for out in (tmp_path / "x.mcap", tmp_path / "x"):
        words = [{"OUT": str(out), "DYNAMO": str(tmp_path / "records.jsonl")}.get(word, word) for word in MAKERS[name]]
        done = invoke(*words)
        assert done.exit_code == 0, done.output
        assert str(out) in done.stdout
        file = out if out.suffix else next(out.glob("*.mcap"))
        found[out] = sealed(out, file)
        again = invoke(*words)
        assert (again.exit_code, len(again.stderr.splitlines())) == (2, 1)
        assert "nothing is overwritten" in again.stderr
    assert found[tmp_path / "x.mcap"] == found[tmp_path / "x"] != []


def test_a_daemon_records_and_dumps_in_the_same_way(tmp_path: Path) -> None:
    with serving(tmp_path, "--workload", "multiturn", "--record", "run.mcap", "--segment-size", "1MB") as daemon:
        daemon.output("rec", "dump", "dumped")
        status, said, _ = daemon.stop()
    assert status == 0
    assert "run.mcap" in said
    assert ".parts" not in said
    sealed(tmp_path / "run.mcap", tmp_path / "run.mcap")
    assert verify(tmp_path / "dumped").ok
    address = f"unix:{tmp_path}/other.sock"
    refused = invoke("serve", "--workload", "multiturn", "--record", str(tmp_path / "run.mcap"), "--listen", address)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "run.mcap exists already; nothing is overwritten" in refused.stderr


def test_a_capture_is_no_recording(tmp_path: Path) -> None:
    done = invoke("rec", "capture", "zmq://127.0.0.1:1", "--out", str(tmp_path / "x.mcap"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "rec import kv-events makes a recording of a capture" in done.stderr


def test_parts_that_are_not_one_sealed_segment_stay(tmp_path: Path) -> None:
    place = RecordingPath(tmp_path / "x.mcap")
    place.directory.mkdir()
    (place.directory / "000001-000000000000.mcap").touch()
    (place.directory / "000002-000000000009.active").touch()
    assert place.finish() is None
    assert len(list(place.directory.iterdir())) == 2
    with pytest.raises(UsageError, match=r"x\.mcap\.parts exists already"):
        require_new(tmp_path / "x.mcap", "--out")
