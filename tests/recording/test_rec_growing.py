"""An active segment is read in windows and never mapped: it finds what one scan finds, whatever its writer does."""

import mmap
import random
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.core.errors import CorruptRecording
from kvbm_console.recording import format as fmt
from kvbm_console.recording import segments
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.scan import map_file, scan
from kvbm_console.recording.segments import ActiveSegment
from tests.recording.helpers import Log, frame_ends, frames_of, real_run, write_active


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Windows that hold a few frames, so that a small file has many of them."""
    monkeypatch.setattr(segments, "WINDOW_BYTES", 700)
    monkeypatch.setattr(segments, "ENTRY_BYTES", 1_500)
    monkeypatch.setattr("kvbm_console.recording.scan.ENTRY_BYTES", 1_500)
    return 700


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """An active segment of a real run, with keyframes far larger than a window."""
    real_run().record(tmp_path, [13, 40, 3], keyframe_events=200, seal=False)
    (path,) = tmp_path.glob("*.active")
    return path


def test_windows_find_what_one_scan_finds(run_file: Path, small_windows: int) -> None:
    whole = scan(map_file(run_file), run_file.name)
    segment = ActiveSegment(run_file)
    assert len(whole.entries) > 20
    assert segment.size > 100 * small_windows
    assert segment.entries == whole.entries
    assert (segment.next_seq, segment.end, segment.torn_bytes) == (whole.next_seq, whole.end, 0)
    assert [frame for entry in segment.entries for frame in segment.frames(entry)] == frames_of(run_file)


def test_a_follower_has_at_every_length_what_one_scan_has(run_file: Path, small_windows: int) -> None:
    """The file grows by any number of bytes, mostly into the middle of a frame."""
    dice = random.Random(8)
    content = run_file.read_bytes()
    at = frame_ends(run_file)[0]
    run_file.write_bytes(content[:at])
    segment = ActiveSegment(run_file)
    while at < len(content):
        step = dice.choice([1, 30, 500, 5_000])
        with run_file.open("ab") as file:
            file.write(content[at : at + step])
        at += step
        before = segment.next_seq, len(segment.entries)
        grown = segment.refresh()
        whole = scan(map_file(run_file), run_file.name)
        assert (segment.entries, segment.next_seq, segment.torn_bytes) == (
            whole.entries, whole.next_seq, whole.torn_bytes)
        assert grown or before == (segment.next_seq, len(segment.entries))


@pytest.mark.fault
def test_f5_a_beginning_that_its_writer_takes_back_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mapped pages behind the end of a file that became shorter are a bus error, so nothing of it may be mapped."""
    log = Log()
    path = write_active(tmp_path, log, [50, 50], end=False)
    whole = path.stat().st_size

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an active segment was mapped")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with path.open("ab") as file:
        file.write(fmt.RECORD_HEAD.pack(fmt.OP_MESSAGE, 5_000_000) + bytes(3_000_000))
    recording = Recording.open(tmp_path)
    segment = recording.segments[0]
    assert segment.torn_bytes == 3_000_000 + fmt.RECORD_HEAD.size
    with path.open("ab") as file:
        file.truncate(whole)
    assert not recording.refresh()
    assert segment.torn_bytes == 0
    assert sum(map(len, recording.events())) == 100
    assert recording.state_at(99).seq == 100


@pytest.mark.fault
@pytest.mark.parametrize("jump", [False, True])
def test_damage_is_refused_wherever_the_next_valid_frame_is(run_file: Path, small_windows: int, jump: bool) -> None:
    """A byte flipped in, or one frame cut out of, the middle of a file of many windows."""
    ends = frame_ends(run_file)
    content = bytearray(run_file.read_bytes())
    frames = frames_of(run_file)
    middle = next(at for at in range(len(frames) // 2, len(frames)) if frames[at].channel == fmt.EVENTS)
    if jump:
        del content[ends[middle] : ends[middle + 1]]
    else:
        content[ends[middle] + 40] ^= 1
    run_file.write_bytes(content)
    with pytest.raises(CorruptRecording, match=f"corrupt at byte {ends[middle]}: valid frames follow"):
        ActiveSegment(run_file)
