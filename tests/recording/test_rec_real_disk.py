"""F5 and F1 on what the machine really has: a disk of one megabyte that fills, a segment of 256 MB after a crash."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import SegmentWriter
from kvbm_console.recording.format import Frame
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import recover_segment
from tests.recording.helpers import Log, recorder_of

DISK_BYTES = 1024 * 1024
RESUME_S = 5.0
SEGMENT_BYTES = 256_000_000
SCAN_S = 1.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; skips where mounting is not possible."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "kvbm-test", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.fault
def test_f5_a_disk_that_is_really_full_is_survived_counted_and_left_readable(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(DISK_BYTES // 2))
    log = Log()
    recorder = recorder_of(log, small_disk / "run", seal=False)
    while recorder.status().state != "degraded":
        recorder.offer(*log.flush(100, "x" * 100))
        assert recorder.settle()
        assert len(log.events) < 100_000, "it must have filled by now"
    degraded = recorder.status()
    assert degraded.reason == "No space left on device"
    assert degraded.written_seq + 1 + degraded.not_recorded == len(log.events)
    assert [e for batch in Recording.open(small_disk / "run").events() for e in batch] == (
        log.events[: degraded.written_seq + 1]
    )

    ballast.unlink()
    freed = time.monotonic()
    while recorder.status().state == "degraded":
        recorder.offer(*log.flush(10))
        assert recorder.settle()
        assert time.monotonic() - freed < RESUME_S
    recorder.offer(*log.flush(10))
    recorder.close()
    recording = Recording.open(small_disk / "run")
    got = [event for batch in recording.events() for event in batch]
    assert len(got) + sum(gap.count for gap in recording.gaps) == len(log.events)
    assert sum(gap.count for gap in recording.gaps) == recorder.status().not_recorded
    assert recording.state_at(recording.last_seq).seq == len(log.events)


@pytest.mark.fault
@pytest.mark.slow
def test_f1_a_segment_of_256_mb_is_recovered_within_a_second_of_work(tmp_path: Path) -> None:
    log = Log()
    about = fmt.About(incarnation="run")
    _, facts, memory = log.keyframe()
    stimuli, events = log.flush(100, "n" * 8)
    segment = SegmentWriter(tmp_path, about)
    keyframe = fmt.encode_item(fmt.Keyframe(0, True, facts, memory, about))
    segment.append(Frame(fmt.KEYFRAMES, 0, 0, 0, 0, keyframe))
    first_seq = 0
    while segment.size < SEGMENT_BYTES:  # scanning verifies frames and decodes none, so the same bytes will do
        segment.append(Frame(fmt.STIMULI, first_seq, 100, 0, 0, stimuli.data))
        segment.append(Frame(fmt.EVENTS, first_seq, 100, 0, 0, events.data))
        first_seq += 100
    segment.file.writev([b"\x05torn"])
    segment.file.close()
    began = time.process_time()
    found = recover_segment(segment.path)
    taken = time.process_time() - began
    print(f"{first_seq:,} events in {segment.size:,} bytes: {taken:.2f} s")
    assert (found.outcome, found.torn_bytes, found.next_seq) == ("truncated", 5, first_seq)
    assert taken <= SCAN_S
