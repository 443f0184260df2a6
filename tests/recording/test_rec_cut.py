"""Cuts fold and replay like the stretch that they were cut from; an index can be made again from whole chunks."""

import errno
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.cli.main import cli
from kvbm_console.core.errors import CorruptRecording, RecordingError, UsageError
from kvbm_console.core.events import SlotClosed, SlotOpened
from kvbm_console.core.snapshots import digest, encode_facts
from kvbm_console.recording import format as fmt
from kvbm_console.recording.cut import cut, matcher, stretch
from kvbm_console.recording.info import info_of
from kvbm_console.recording.output import write_recording
from kvbm_console.recording.positions import Position, parse_position, seq_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import needs_index, rebuild_index
from kvbm_console.recording.segments import SealedSegment
from kvbm_console.recording.verify import verify
from kvbm_console.recording.writer import RETRY_S
from tests.recording.helpers import Disk, FakeClock, Log, real_run, recorder_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A real run with several keyframes, in two segments."""
    directory = tmp_path_factory.mktemp("run")
    real_run().record(directory, [13, 40], keyframe_events=300)
    return Recording.open(directory)


def gap_recording(directory: Path) -> Recording:
    """Events 10 to 29 are missing of 50."""
    disk, clock, log = Disk(), FakeClock(), Log()
    recorder = recorder_of(log, directory, open_file=disk.open, clock=clock)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.write_error = errno.EIO
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.write_error = None
    clock.now_ns += round(RETRY_S * 10**9)
    assert recorder.settle()
    for _ in range(3):
        recorder.offer(*log.flush(10))
    recorder.close()
    return Recording.open(directory)


@settings(max_examples=25, deadline=None)
@given(bounds=st.tuples(st.integers(0, 2_000), st.integers(0, 400)))
def test_a_cut_anywhere_replays_by_state_and_by_decision(
    recorded: Recording, tmp_path_factory: pytest.TempPathFactory, bounds: tuple[int, int]
) -> None:
    first = min(bounds[0], recorded.last_seq)
    last = min(first + bounds[1], recorded.last_seq)
    target = tmp_path_factory.mktemp("cut") / "cut.mcap"
    made = cut(recorded, first, last, target)
    assert made.first_seq <= first <= last <= made.last_seq
    part = Recording.open(target)
    assert (part.first_seq, part.last_seq, part.finished) == (made.first_seq, made.last_seq, True)
    assert encode_facts(part.state_at(last)) == encode_facts(recorded.state_at(last))
    assert encode_facts(part.state_at(made.first_seq - 1)) == encode_facts(recorded.state_at(made.first_seq - 1))
    assert [event for batch in part.events() for event in batch] == [
        event for batch in recorded.events(made.first_seq) for event in batch if event.seq <= made.last_seq
    ]
    report = verify(target)
    assert report.ok, report.first_difference
    assert report.decisions, "the leader was rerun up to the cut"
    assert report.not_rerun == 0


def test_the_whole_can_be_cut_and_a_cut_can_be_cut(recorded: Recording, tmp_path: Path) -> None:
    cut(recorded, recorded.first_seq, recorded.last_seq, tmp_path / "all.mcap")
    whole = Recording.open(tmp_path / "all.mcap")
    assert (whole.last_seq, info_of(whole).stimuli) == (recorded.last_seq, info_of(recorded).stimuli)
    cut(whole, 700, 800, tmp_path / "part.mcap")
    assert verify(tmp_path / "part.mcap").decisions
    assert info_of(whole).labels["cut_from"] == recorded.path.name


def test_a_request_is_cut_from_its_arrival_to_its_end(recorded: Recording, tmp_path: Path) -> None:
    opened = [e for batch in recorded.events() for e in batch if isinstance(e, SlotOpened)][7]
    matches = matcher(None, opened.request)
    assert matches is not None
    first, last = stretch(recorded, recorded.first_seq, recorded.last_seq, matches)
    assert first == opened.seq
    made = cut(recorded, first, last, tmp_path / "request.mcap")
    events = [event for batch in Recording.open(tmp_path / "request.mcap").events() for event in batch]
    assert any(isinstance(event, SlotClosed) and event.slot == opened.slot for event in events)
    assert made.events < info_of(recorded).events
    assert verify(tmp_path / "request.mcap").ok


def test_an_expression_and_a_request_are_asked_together(recorded: Recording) -> None:
    matches = matcher("kind = SlotMoved or kind = SlotOpened", "*")
    assert matches is not None
    first, last = stretch(recorded, 100, 900, matches)
    kinds = {e.seq: type(e).__name__ for batch in recorded.events() for e in batch}
    assert {kinds[first], kinds[last]} <= {"SlotMoved", "SlotOpened"}
    with pytest.raises(UsageError, match=r"no event of .* between 0 and 10 is of that kind"):
        stretch(recorded, 0, 10, matcher('request ~ "nobody"', None))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^column 2"):
        matcher("knd = SlotMoved", None)
    assert matcher(None, None) is None


def test_a_cut_keeps_gaps_and_cannot_begin_in_one(tmp_path: Path) -> None:
    recording = gap_recording(tmp_path / "run")
    cut(recording, 5, 40, tmp_path / "across.mcap")
    part = Recording.open(tmp_path / "across.mcap")
    assert [(gap.first, gap.last) for gap in part.gaps] == [(10, 29)]
    assert part.state_at(40).seq == 41
    assert verify(tmp_path / "across.mcap").ok
    cut(recording, 5, 20, tmp_path / "into.mcap")
    assert Recording.open(tmp_path / "into.mcap").last_seq == 20, "and says that the rest is missing"
    assert verify(tmp_path / "into.mcap").missing == 11
    with pytest.raises(RecordingError, match=r"event 15 of .* lies in a gap"):
        cut(recording, 15, 40, tmp_path / "in.mcap")
    assert not (tmp_path / "in.mcap").exists()


def test_nothing_is_overwritten_and_bounds_are_named(recorded: Recording, tmp_path: Path) -> None:
    (tmp_path / "there.mcap").write_text("mine")
    (tmp_path / "there.bin").write_text("mine")
    for first, last, name, sentence in (
        (5, 9, "there.mcap", "exists already; nothing is overwritten"),
        (5, 9, "there.bin", r"is a file: a recording is a new file \*\.mcap or a directory"),
        (5, 9, "no/cut.mcap", "must be in a directory that exists"),
        (9, 5, "cut.mcap", "has events 0 to [0-9]+, not 9 to 5"),
        (5, 10**9, "cut.mcap", "not 5 to 1000000000"),
    ):
        with pytest.raises(UsageError, match=sentence):
            cut(recorded, first, last, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.bin", "there.mcap"]
    assert (tmp_path / "there.mcap").read_text() == "mine"


def test_places_are_numbers_times_and_the_end(recorded: Recording) -> None:
    events = [event for batch in recorded.events() for event in batch]
    last = events[-1]
    assert seq_of(recorded, parse_position("end")) == seq_of(recorded, parse_position(f"{last.at_ns}ns")) == last.seq
    assert parse_position("17") == Position("seq", 17)
    assert seq_of(recorded, parse_position("-10h")) == -1
    anchor = recorded.segments[0].about.clock_anchor_ns
    assert seq_of(recorded, Position("wall", anchor + events[900].at_ns)) == recorded.seq_at(events[900].at_ns)
    assert seq_of(recorded, parse_position("1990-01-01T00:00:00+00:00")) == -1
    for at in (0, 1, 250, 299, 300, 301, 1_111, last.seq):
        ns = events[at].at_ns
        assert recorded.seq_at(ns) == max(e.seq for e in events if e.at_ns <= ns)
        assert seq_of(recorded, Position("engine", ns), following=True) == min(e.seq for e in events if e.at_ns >= ns)
    for wrong in ("", "soon", "12x", "-5", "1" * 40, "25:00", "15:60", "15:", "1:2:3", "15:00:03 parsecs"):
        with pytest.raises(UsageError, match=r"^a place is a number, a time such as 90s"):
            parse_position(wrong)


@pytest.mark.parametrize("begins", ["12:00:00", "23:59:59.900"])
def test_a_time_of_day_is_one_of_the_recording(begins: str, tmp_path: Path) -> None:
    begun = datetime.fromisoformat(f"2026-11-21T{begins}+00:00")
    anchor = round(begun.timestamp() * 1e3) * 10**6
    real_run().record(tmp_path, [13, 40], clock_anchor_ns=anchor)
    run = Recording.open(tmp_path)
    events = [event for batch in run.events() for event in batch]
    assert events[-1].at_ns > 10**8, "the second one spans midnight"
    for event in events[:: len(events) // 20]:
        micros = (anchor + event.at_ns) // 1_000
        at_ns = micros * 1_000 - anchor
        said = datetime.fromtimestamp(micros // 10**6, UTC).replace(microsecond=micros % 10**6)
        for text in (said.strftime("%H:%M:%S.%fZ"), said.astimezone().strftime("%H:%M:%S.%f")):
            assert seq_of(run, parse_position(text)) == run.seq_at(at_ns)
        assert seq_of(run, parse_position(said.strftime("%H:%M:%S.%f"), utc=True)) == run.seq_at(at_ns)
        assert seq_of(run, parse_position(said.strftime("%Y-%m-%dT%H:%M:%S.%f"), utc=True)) == run.seq_at(at_ns)
    assert seq_of(run, parse_position("9:05", utc=True)) == -1, "before its beginning, and it does not last until then"
    assert seq_of(run, parse_position("23:59:59.950", utc=True)) == (
        run.last_seq if begins == "12:00:00" else run.seq_at(50 * 10**6))


def test_a_time_of_day_without_a_zone_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        anchor = round(datetime.fromisoformat("2026-11-21T20:00:00+00:00").timestamp()) * 10**9
        real_run().record(tmp_path, [13, 40], clock_anchor_ns=anchor)
        run = Recording.open(tmp_path)
        assert seq_of(run, parse_position("01:30:00.05")) == run.seq_at(50 * 10**6)
        assert seq_of(run, parse_position("20:00:00.05", utc=True)) == run.seq_at(50 * 10**6)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_commands_cut_and_say_what_became_of_it(recorded: Recording, tmp_path: Path) -> None:
    run = CliRunner()
    done = run.invoke(cli, ["rec", "cut", str(recorded.path), str(tmp_path / "a.mcap"), "--from", "500", "--to", "600"])
    assert done.exit_code == 0, done.output
    assert "events " in done.stdout
    refused = run.invoke(cli, ["rec", "cut", str(recorded.path), str(tmp_path / "b.mcap"), "--from", "soon"])
    assert (refused.exit_code, "a place is a number" in refused.stderr) == (2, True)


# --- the index of a sealed segment ------------------------------------------------------------------------------------


def without_index(path: Path) -> bytes:
    """Cut a sealed file off in front of its index; returns what it was."""
    data = path.read_bytes()
    at = data.index(fmt.INDEX_NAME.encode()) - 9 - 16 - 4
    path.write_bytes(data[:at])
    return data


def sealed_of(recorded: Recording, directory: Path) -> Path:
    """A sealed copy with several chunks."""
    path = directory / "000001-000000000000.mcap"
    cut(recorded, 0, recorded.last_seq, path)
    return path


def test_a_missing_index_is_made_again_and_says_the_same(recorded: Recording, tmp_path: Path) -> None:
    path = sealed_of(recorded, tmp_path)
    before = SealedSegment(path).entries
    data = without_index(path)
    with pytest.raises(CorruptRecording):
        SealedSegment(path)
    assert needs_index(path)
    done = CliRunner().invoke(cli, ["rec", "index", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "indexed again" in done.stdout
    assert SealedSegment(path).entries == before
    assert path.read_bytes() == data
    assert not needs_index(path)
    assert "nothing to do" in CliRunner().invoke(cli, ["rec", "index", str(tmp_path)]).stdout


def test_a_torn_sealed_file_keeps_its_whole_chunks_and_the_rest_stays_beside_it(
    recorded: Recording, tmp_path: Path
) -> None:
    path = sealed_of(recorded, tmp_path)
    entries = SealedSegment(path).entries
    assert len(entries) > 3
    path.write_bytes(path.read_bytes()[: entries[3].offset + 20])
    found = rebuild_index(path)
    assert (found.last_seq, found.lost_bytes) == (entries[2].end_seq - 1, 20)
    assert path.with_name(path.name + ".damaged").exists()
    part = Recording.open(path)
    assert encode_facts(part.state_at(found.last_seq)) == encode_facts(recorded.state_at(found.last_seq))


def test_a_foreign_file_is_not_indexed(tmp_path: Path) -> None:
    path = tmp_path / "000001-000000000000.mcap"
    path.write_bytes(b"hello")
    with pytest.raises(RecordingError):
        needs_index(path)


def test_a_recording_of_frames_that_fail_leaves_no_file(recorded: Recording, tmp_path: Path) -> None:
    def failing() -> "object":
        yield next(iter(recorded.frames()))
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_recording(tmp_path / "x.mcap", recorded.segments[0].about, failing())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert digest(recorded.state_at(recorded.last_seq))
