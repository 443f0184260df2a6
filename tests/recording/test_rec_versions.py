"""F21: recordings of every older format version replay; what a newer minor version added is passed over and counted."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core.describe import describe, kind
from kvbm_console.core.errors import RecordingError
from kvbm_console.core.events import DECIDES_SINCE, SCHEMA_ID, Event, UnknownKind
from kvbm_console.core.snapshots import digest, encode_facts
from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import SegmentWriter
from kvbm_console.recording.format import Frame
from kvbm_console.recording.info import info_of
from kvbm_console.recording.playback import Playback
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.wire.batches import MalformedBatch, pack_events, unpack_events
from kvbm_console.wire.v1 import console_pb2 as pb
from tests.recording.helpers import Log, frames_of, real_run, write_active

VERSIONS = Path(__file__).resolve().parents[2] / "recordings" / "versions"
NEW_KIND = 4_711


@pytest.mark.fault
def test_f21_there_is_a_file_of_every_format_version_so_far() -> None:
    names = {path.stem for path in VERSIONS.glob("*.mcap")}
    assert {f"{fmt.FORMAT_MAJOR}.{minor}" for minor in range(fmt.FORMAT_MINOR + 1)} <= names


@pytest.mark.fault
@pytest.mark.parametrize("path", sorted(VERSIONS.glob("*.mcap")), ids=lambda path: path.stem)
def test_f21_a_file_of_every_older_version_opens_seeks_and_folds_to_its_own_keyframes(path: Path) -> None:
    recording = Recording.open(path)
    assert info_of(recording).versions.format == path.stem
    playback = Playback(recording)
    playback.seek(recording.last_seq)
    assert playback.position_seq == recording.last_seq
    assert [event.seq for batch in recording.events() for event in batch] == list(range(recording.last_seq + 1))
    for seq in recording.keyframe_seqs[1:]:
        keyframe = recording.keyframe(seq)
        assert keyframe is not None
        from_the_start = recording.state_at(recording.first_seq - 1)
        assert encode_facts(recording.advance(from_the_start, seq - 1)) == encode_facts(recording.state_at(seq - 1))


@pytest.mark.fault
@pytest.mark.parametrize("path", sorted(VERSIONS.glob("*.mcap")), ids=lambda path: path.stem)
def test_f21_what_a_leader_decided_by_older_rules_is_not_compared(path: Path) -> None:
    report = verify(path)
    assert (report.ok, report.first_difference) == (True, None)
    is_older = int(path.stem.partition(".")[2]) < DECIDES_SINCE
    assert (report.decisions, report.older) == ((False, path.stem) if is_older else (True, ""))
    said = CliRunner().invoke(cli, ["rec", "verify", str(path)]).output
    assert (f"state replay only: leaders of format {path.stem} decided by other rules" in said) == is_older


def newer(events: list[Event], at: int, schema_id: int = SCHEMA_ID + 1) -> bytes:
    """A batch of a newer schema in which event number ``at`` is of a kind that we do not know."""
    batch = pb.EventBatch.FromString(pack_events(events).data)
    items: list[Any] = msgspec.msgpack.decode(batch.payload)
    items[at] = [NEW_KIND, *items[at][1:4], "something", {"new": [1, 2]}]
    batch.payload = msgspec.msgpack.encode(items)
    batch.schema_id = schema_id
    return batch.SerializeToString()


@pytest.mark.fault
def test_f21_unknown_kinds_are_kept_with_their_number_and_described() -> None:
    log = Log()
    log.flush(5)
    events = unpack_events(newer(log.events, 2))
    assert events[:2] + events[3:] == log.events[:2] + log.events[3:]
    assert events[2] == UnknownKind(2, log.events[2].at_ns, log.events[2].cause, NEW_KIND)
    assert (kind(events[2]), describe(events[2])) == ("UnknownKind", "kind 4711 of a newer version")
    with pytest.raises(MalformedBatch):
        unpack_events(newer(log.events, 2, SCHEMA_ID))


def newer_recording(directory: Path, source: Path, change: int) -> Path:
    """The same recording by a newer minor version, whose batch number ``change`` holds a kind that we do not know."""
    directory.mkdir()
    frames = frames_of(source)
    about = msgspec.structs.replace(Recording.open(source).segments[0].about, minor=fmt.FORMAT_MINOR + 1)
    segment = SegmentWriter(directory, about)
    batches = 0
    for frame in frames:
        if frame.channel == fmt.EVENTS:
            batches += 1
            if batches == change:
                frame = msgspec.structs.replace(frame, data=newer(unpack_events(frame.data), 1))
        segment.append(frame)
        if frame.channel == fmt.EVENTS and batches == change:
            mark = msgspec.msgpack.encode({"type": "a_new_mark", "what": 1})
            segment.append(Frame(fmt.MARKS, frame.end_seq, 0, frame.log_ns, frame.publish_ns, mark))
    segment.file.close()
    return segment.path


@pytest.mark.fault
def test_f21_a_recording_of_a_newer_minor_version_replays_but_for_what_is_unknown(tmp_path: Path) -> None:
    log = Log()
    source = write_active(tmp_path / "source", log, [10, 10, 10])
    path = newer_recording(tmp_path / "newer", source, 2)
    report = verify(path)
    assert report.ok, report.first_difference
    assert (report.events, report.unknown, report.stimuli, report.not_rerun) == (30, 1, 10, 20)
    recording = Recording.open(path)
    assert recording.state_at(29).seq == 30
    playback = Playback(recording)
    playback.seek(5)
    playback.step(20)
    assert playback.position_seq == 25


@pytest.mark.fault
def test_f21_behind_the_next_keyframe_everything_is_compared_again(tmp_path: Path) -> None:
    run = real_run()
    run.record(tmp_path / "source", [13, 40], keyframe_events=300, seal=False)
    (source,) = (tmp_path / "source").glob("*.active")
    path = newer_recording(tmp_path / "newer", source, 3)
    report = verify(path)
    assert report.ok, report.first_difference
    assert report.unknown == 1
    assert report.events + report.not_folded == len(run.all_events)
    assert 0 < report.not_rerun < report.stimuli, "the leader goes on from the next keyframe"
    assert report.stimuli + report.not_rerun == len(run.stimuli)
    assert report.digest == f"{digest(run.state_after(len(run.all_events) - 1)):016x}"


@pytest.mark.fault
def test_f21_another_major_version_is_refused_by_naming_both(tmp_path: Path) -> None:
    about = msgspec.structs.replace(fmt.About(incarnation="run"), major=fmt.FORMAT_MAJOR + 1)
    segment = SegmentWriter(tmp_path, about)
    segment.file.close()
    with pytest.raises(RecordingError, match=rf"recording format '2\.{fmt.FORMAT_MINOR}', this program reads 1\.x"):
        Recording.open(segment.path)
