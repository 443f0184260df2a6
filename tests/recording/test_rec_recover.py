"""Recovery, salvage and sealing: every cut, every flipped byte, a crash between any two steps."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core.errors import CorruptRecording, RecordingError
from kvbm_console.recording import format as fmt
from kvbm_console.recording import seal as sealing
from kvbm_console.recording.format import Frame
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import prepare_directory, recover_directory, recover_segment
from kvbm_console.recording.seal import SegmentBusy, seal_segment
from kvbm_console.recording.segments import SealedSegment
from tests.recording.helpers import Log, frame_ends, frames_of, recorder_of, write_active

SALVAGE_EVERY = 1 if os.environ.get("KVBM_FULL") else 7
"""Each damaged file is refused; every so many are salvaged too, which costs a rewrite."""


def sealed_frames(path: Path) -> list[Frame]:
    """Every frame of a sealed segment, all CRCs checked."""
    segment = SealedSegment(path)
    segment.verify_bytes()
    return [frame for entry in segment.entries for frame in segment.frames(entry)]


def rewrite(path: Path, data: bytes) -> None:
    """Replace the file. Truncating one in place makes some file systems wait for the disk when it is closed."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def without_counts_of_stimuli(frames: list[Frame]) -> list[tuple[object, ...]]:
    """Frames as tuples; sealed segments do not keep how many stimuli a frame has."""
    return [
        (one.channel, one.first_seq, one.end_seq, one.log_ns, one.publish_ns, one.data) for one in frames
    ]


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files that nobody needs after a power loss: do not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.mark.fault
@pytest.mark.usefixtures("fast_disk")
def test_f3_cut_at_every_byte_of_the_last_three_frames(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [3, 4, 5], end=False)
    whole, ends = path.read_bytes(), frame_ends(path)
    frames = frames_of(path)
    for cut in range(ends[-4], len(whole) + 1):
        rewrite(path, whole[:cut])
        kept = sum(end <= cut for end in ends[1:])
        recovered = recover_segment(path)
        assert frames_of(path) == frames[:kept]
        assert path.stat().st_size == ends[kept]
        assert recovered.torn_bytes == cut - ends[kept]
        assert recovered.outcome == ("truncated" if recovered.torn_bytes else "whole")


@pytest.mark.fault
def test_f3_cut_inside_the_preamble_nothing_was_recorded(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [1])
    whole, start = path.read_bytes(), frame_ends(path)[0]
    for cut in [0, 1, 7, 8, 9, 100, start - 34, start - 1]:
        rewrite(path, whole[:cut])
        with pytest.raises(RecordingError, match=r"ends inside its preamble|holds no recording"):
            Recording.open(path)
        assert recover_segment(path).outcome == "removed"
        assert not path.exists()


@pytest.mark.fault
@pytest.mark.usefixtures("fast_disk")
def test_f4_every_byte_of_an_active_segment_flipped(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [2, 3, 2])
    whole, ends = path.read_bytes(), frame_ends(path)
    frames = frames_of(path)
    damaged = path.with_name(path.name + ".damaged")
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        rewrite(path, flipped)
        if at >= ends[-2]:
            # Nothing valid follows: it cannot be told from a torn tail, and that is what it is treated as.
            assert Recording.open(path).segments[0].torn_bytes
            recover_segment(path)
            assert frames_of(path) == frames[:-1]
            continue
        with pytest.raises(RecordingError):
            Recording.open(path)
        with pytest.raises(RecordingError):
            recover_segment(path)
        assert path.read_bytes() == flipped, "strict recovery touches nothing"
        if at % SALVAGE_EVERY:
            continue
        try:
            salvaged = recover_segment(path, salvage=True)
        except RecordingError:
            # A flip that makes it another program's file, or another version's, is refused as that.
            assert at < ends[0]
            continue
        hit = sum(end <= at for end in ends)  # 0: the preamble, else the frame with this number
        left = frames if hit == 0 else [*frames[: hit - 1], *frames[hit:]]
        marks = [frame for frame in frames_of(path) if frame.channel == fmt.MARKS]
        assert [frame for frame in frames_of(path) if frame not in marks[:-1]] == left
        assert len(salvaged.gaps) == 1
        assert damaged.read_bytes() == flipped
        damaged.unlink()


@pytest.mark.fault
def test_f4_salvage_counts_the_events_that_it_lost(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [2, 30, 4])
    at = frame_ends(path)[4] + 60  # inside the batch of 30 events
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    (gap,) = recover_segment(path, salvage=True).gaps
    assert (gap.first, gap.last) == (2, 31)
    ends = frame_ends(write_active(tmp_path / "again", Log(), [2, 30, 4]))
    assert gap.bytes == ends[5] - ends[4]
    recording = Recording.open(tmp_path)
    assert recording.gaps == [gap]
    assert [event.seq for batch in recording.events() for event in batch] == [0, 1, 32, 33, 34, 35]
    with pytest.raises(RecordingError, match="facts at event 33 are unknown"):
        recording.state_at(33)


@pytest.mark.fault
@pytest.mark.usefixtures("fast_disk")
def test_f4_every_byte_of_a_sealed_segment_flipped(tmp_path: Path) -> None:
    path = seal_segment(write_active(tmp_path, Log(), [2, 3, 2]))
    whole = path.read_bytes()
    frames = sealed_frames(path)
    undetected = []
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        rewrite(path, flipped)
        try:
            if sealed_frames(path) == frames:
                undetected.append(at)
        except RecordingError:
            continue
    assert undetected == []


# --- sealing ---------------------------------------------------------------------------------------------------------


def test_a_sealed_segment_says_the_same_as_the_active_one(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [1, 50, 700, 3])
    frames = frames_of(path)
    sealed = seal_segment(path)
    assert not path.exists()
    assert without_counts_of_stimuli(sealed_frames(sealed)) == without_counts_of_stimuli(frames)
    with pytest.raises(SegmentBusy):
        seal_segment(path)


def test_a_stock_reader_reads_a_sealed_segment(tmp_path: Path) -> None:
    from mcap.reader import SeekingReader

    path = seal_segment(write_active(tmp_path, Log(), [2, 3]))
    with path.open("rb") as file:
        reader = SeekingReader(file, validate_crcs=True)
        summary = reader.get_summary()
        assert summary is not None
        assert summary.statistics is not None
        assert summary.statistics.message_count == 6
        assert reader.get_header().profile == "kvbm"
        topics = [channel.topic for _, channel, _ in reader.iter_messages()]
    assert sorted(topics) == ["events", "events", "keyframes", "marks", "stimuli", "stimuli"]


@pytest.mark.fault
@pytest.mark.parametrize("step", ["write", "compare", "rename", "sync", "unlink"])
def test_a_crash_between_any_two_steps_of_sealing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = write_active(tmp_path, Log(), [5, 6])
    expected = without_counts_of_stimuli(frames_of(path))

    class Crash(BaseException):
        """The process ends here."""

    def crash(*_: object, **__: object) -> None:
        raise Crash

    if step == "write":
        monkeypatch.setattr(sealing.os, "fdatasync", crash)
    elif step == "compare":
        monkeypatch.setattr(sealing, "_compare", crash)
    elif step == "rename":
        monkeypatch.setattr(sealing.os, "rename", crash)
    elif step == "sync":
        monkeypatch.setattr(sealing, "sync_directory", crash)
    else:
        monkeypatch.setattr(Path, "unlink", crash)
    if step in ("write", "compare", "rename"):
        # A killed process does not clean up either.
        monkeypatch.setattr(sealing.contextlib, "suppress", crash)
    with pytest.raises(Crash):
        seal_segment(path)
    monkeypatch.undo()

    assert Recording.open(tmp_path).last_seq == 10, "readable as it is"
    left = prepare_directory(tmp_path)
    assert left.next_segment == 2
    for one in left.to_seal:
        seal_segment(one)
    (sealed,) = (one for one in tmp_path.iterdir() if one.suffix != "")
    assert without_counts_of_stimuli(sealed_frames(sealed)) == expected


def test_a_recorder_seals_what_an_earlier_one_left(tmp_path: Path) -> None:
    write_active(tmp_path, Log(), [5], end=False)
    log = Log()
    recorder = recorder_of(log, tmp_path, incarnation="second")
    recorder.offer(*log.flush(3))
    recorder._sealer._queue.put(None)
    recorder._sealer.worker.join()
    recorder.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000001-000000000000.mcap", "000002-000000000000.mcap", "lock"]


def test_a_damaged_segment_does_not_keep_a_recorder_from_beginning(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [5, 5])
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    log = Log()
    recorder = recorder_of(log, tmp_path)
    recorder.close()
    assert path.read_bytes() == data
    with pytest.raises(CorruptRecording):
        recover_directory(tmp_path)


# --- from the shell --------------------------------------------------------------------------------------------------


def test_recover_and_index_from_the_shell(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [5, 5], end=False)
    os.truncate(path, path.stat().st_size - 3)
    run = CliRunner()
    recovered = run.invoke(cli, ["rec", "recover", str(tmp_path)])
    assert recovered.exit_code == 0
    assert "ends behind event 4" in recovered.stdout
    assert run.invoke(cli, ["rec", "index", str(tmp_path)]).exit_code == 0
    assert [one.suffix for one in tmp_path.glob("0*")] == [".mcap"]


def test_damage_is_refused_from_the_shell_until_a_salvage_is_asked_for(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [5, 5])
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    run = CliRunner()
    for command in (["info", str(tmp_path)], ["verify", str(tmp_path)], ["recover", str(tmp_path)]):
        refused = run.invoke(cli, ["rec", *command])
        assert refused.exit_code == 2, command
        assert "is corrupt at byte" in refused.stderr
        assert refused.stderr.count("\n") == 1
    salvaged = run.invoke(cli, ["rec", "recover", "--salvage", "--format", "json", str(tmp_path)])
    assert salvaged.exit_code == 0
    assert '"outcome":"salvaged"' in salvaged.stdout
    assert run.invoke(cli, ["rec", "info", str(tmp_path)]).exit_code == 0
