"""A recorder keeps its promises when a disk, a process or a person interferes: bounds hold, threads live.

Law of this file: every event is in the recording or counted as not recorded, and the directory stays within its bound.
"""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.core.snapshots import encode_facts
from kvbm_console.recording import seal
from kvbm_console.recording import writer as writer_module
from kvbm_console.recording.files import SegmentFile
from kvbm_console.recording.format import encode_frame
from kvbm_console.recording.options import Retention
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import recover_directory
from kvbm_console.recording.seal import seal_segment
from kvbm_console.recording.writer import ROTATION_RETRY_S, Recorder
from tests.recording.helpers import Disk, FakeClock, Log, recorder_of


def size_of(directory: Path) -> int:
    """Bytes of everything in a directory."""
    found = 0
    for path in directory.iterdir():
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            continue  # removed or renamed while the directory was listed
    return found


def record(recorder: Recorder, log: Log, count: int, text: str = "note") -> None:
    """Offer one flush and wait until it is written or counted."""
    recorder.offer(*log.flush(count, text))
    assert recorder.settle()


def accounted(recorder: Recorder, directory: Path, log: Log) -> None:
    """Close, recover, and compare what is there with what was told."""
    recorder.close()
    recover_directory(directory)
    recording = Recording.open(directory)
    missing = sum(gap.count for gap in recording.gaps)
    assert recording.last_seq == log.state.seq - 1
    assert missing == recorder.status().not_recorded
    assert encode_facts(recording.state_at(recording.last_seq)) == encode_facts(log.state)


@pytest.mark.parametrize("sealing", [True, False])
def test_keep_is_a_bound_at_every_moment_whether_or_not_sealing_keeps_up(tmp_path: Path, sealing: bool) -> None:
    log, keep = Log(), 400_000
    recorder = recorder_of(
        log, tmp_path, segment_bytes=100_000, retention=Retention(keep_bytes=keep, segment_bytes=100_000), seal=sealing,
    )
    highest = 0
    for _ in range(150):
        record(recorder, log, 200, "x" * 40)
        highest = max(highest, size_of(tmp_path))
    assert recorder.status().segment > 8
    assert highest <= keep
    assert size_of(tmp_path) > keep // 4, "and what fits is kept"
    recorder.close()


def test_a_segment_below_its_keyframe_does_not_rotate_with_every_flush(tmp_path: Path) -> None:
    log = Log()
    taken = 0

    def large() -> tuple[int, bytes, bytes]:
        nonlocal taken
        taken += 1
        seq, facts, _ = log.keyframe()
        return seq, facts, b"\xc4" * 300_000

    recorder = recorder_of(log, tmp_path, keyframe=large, segment_bytes=100_000)
    for _ in range(100):
        record(recorder, log, 200, "x" * 40)
    assert taken == recorder.status().segment <= 3
    recorder.close()


def test_a_flush_beside_the_first_keyframe_does_not_rotate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keyframe is in the file, and the recorder does not know its size yet."""
    log, written, offered, append = Log(), threading.Event(), threading.Event(), Recorder._append

    def append_and_wait(recorder: Recorder, *args: Any) -> None:
        append(recorder, *args)
        written.set()
        assert offered.wait(60)

    monkeypatch.setattr(Recorder, "_append", append_and_wait)
    recorder = recorder_of(
        log, tmp_path, keyframe=lambda: (*log.keyframe()[:2], b"\xc4" * 300_000), segment_bytes=100_000,
    )
    assert written.wait(60)
    recorder.offer(*log.flush(200))
    offered.set()
    assert recorder.settle()
    assert recorder.status().segment == 1
    recorder.close()


def test_a_flush_beside_the_first_keyframe_never_sees_half_of_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one size and not the other the segment was above its limit. No second segment fits, so all was lost."""
    log, sizing, offered, begin_bytes = Log(), threading.Event(), threading.Event(), Recorder._begin_bytes
    taken = 0

    def large() -> tuple[int, bytes, bytes]:
        nonlocal taken
        taken += 1
        return *log.keyframe()[:2], b"\xc4" * 300_000

    def wait_and_size(recorder: Recorder, *args: Any) -> int:
        sizing.set()
        assert offered.wait(60)
        return begin_bytes(recorder, *args)

    monkeypatch.setattr(Recorder, "_begin_bytes", wait_and_size)
    recorder = recorder_of(log, tmp_path, keyframe=large, retention=Retention(keep_bytes=500_000))
    assert sizing.wait(60)
    recorder.offer(*log.flush(1))
    offered.set()
    assert recorder.settle()
    record(recorder, log, 1)
    assert (recorder.status().not_recorded, taken) == (0, 1)
    accounted(recorder, tmp_path, log)


@pytest.mark.parametrize("keyframe_bytes", [10_000, 60_000, 110_000])
def test_keep_is_a_bound_and_keeps_a_past_whatever_a_keyframe_takes(tmp_path: Path, keyframe_bytes: int) -> None:
    """Segments outgrew their limit by the keyframes inside them. Then two did not fit, and each rotation removed all
    but the newest segment."""
    log, keep = Log(), 400_000
    memory = b"\xc4" + os.urandom(keyframe_bytes)
    recorder = recorder_of(
        log, tmp_path, keyframe=lambda: (*log.keyframe()[:2], memory), segment_bytes=100_000, keyframe_events=1_000,
        retention=Retention(keep_bytes=keep, segment_bytes=100_000),
    )
    highest, past = 0, []
    for index in range(300):
        record(recorder, log, 100, "x" * 40)
        highest = max(highest, size_of(tmp_path))
        if index > 100:
            past.append(log.state.seq - min(int(path.stem[7:]) for path in tmp_path.iterdir() if path.stem[7:]))
    status = recorder.status()
    assert highest <= keep
    assert (status.state, status.reason, status.not_recorded) == ("recording", None, 0)
    assert status.segment > 8
    assert min(past) >= 500, "a segment without a past is no recording"
    recorder.close()
    assert size_of(tmp_path) <= keep


def test_a_keep_that_cannot_hold_two_keyframes_is_told_and_stays_a_bound(tmp_path: Path) -> None:
    """The clock passes with the flushes, 10 ms for each: how long the disk takes decides nothing."""
    log, keep, taken, now_ns = Log(), 500_000, 0, 0

    def large() -> tuple[int, bytes, bytes]:
        nonlocal taken
        taken += 1
        return *log.keyframe()[:2], b"\xc4" * 300_000

    recorder = recorder_of(
        log, tmp_path, keyframe=large, retention=Retention(keep_bytes=keep), clock=lambda: now_ns,
    )
    record(recorder, log, 1)
    status = recorder.status()
    assert status.state == "degraded"
    assert status.reason is not None
    assert status.reason.startswith("keep is 500000 bytes, less than two segments with keyframes of 303")
    assert status.not_recorded == 0
    for _ in range(100):
        now_ns += 10_000_000
        record(recorder, log, 100, "x" * 40)
        assert size_of(tmp_path) <= keep
    status = recorder.status()
    assert status.state == "degraded"
    assert 0 < status.not_recorded < 10_000
    assert taken <= 5, "each export of the whole state stops the engine"
    recorder.close()
    assert size_of(tmp_path) <= keep
    recording = Recording.open(tmp_path)
    assert recording.last_seq == log.state.seq - 1
    assert sum(gap.count for gap in recording.gaps) == recorder.status().not_recorded


def test_a_keyframe_as_large_as_all_that_may_wait_loses_nothing(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(
        log, tmp_path, keyframe=lambda: (*log.keyframe()[:2], b"\xc4" * 100_000), queue_bytes=40_000,
        keyframe_events=50,
    )
    for _ in range(40):
        recorder.offer(*log.flush(10))
    assert recorder.settle()
    assert recorder.status().not_recorded == 0
    accounted(recorder, tmp_path, log)


def test_keyframes_between_have_facts_only_where_memory_are_large(tmp_path: Path) -> None:
    """Memory takes a hundred times as long to export as facts, and only a rerun needs it."""
    log, exports, shown = Log(), 0, 0
    memory = os.urandom(2_390_000)

    def keyframe() -> tuple[int, bytes, bytes]:
        nonlocal exports
        exports += 1
        return *log.keyframe()[:2], memory

    def facts() -> tuple[int, bytes]:
        nonlocal shown
        shown += 1
        return log.keyframe()[:2]

    recorder = recorder_of(log, tmp_path, keyframe=keyframe, facts=facts)
    for _ in range(80):
        record(recorder, log, 10_000)
    assert (exports, shown) == (3, 3), "300,000 events apart, and 150,000"
    assert recorder.rotate()
    record(recorder, log, 1)
    assert exports == 4, "a segment begins with a complete one"
    recorder.close()
    entries = [entry for entry in Recording.open(tmp_path).entries if entry.keyframe]
    assert [entry.complete for entry in entries] == [True, False, True, False, True, False, True]
    assert encode_facts(Recording.open(tmp_path).state_at(log.state.seq - 1)) == encode_facts(log.state)


def test_a_rotation_that_the_disk_refuses_loses_nothing_and_is_tried_again(tmp_path: Path) -> None:
    log, clock, refused = Log(), FakeClock(), [False]

    def opened(path: Path) -> SegmentFile:
        if refused[0]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return SegmentFile(path)

    recorder = recorder_of(log, tmp_path, open_file=opened, clock=clock, segment_ns=10**9)
    record(recorder, log, 10)
    refused[0] = True
    clock.now_ns += 10**9
    record(recorder, log, 10)
    record(recorder, log, 10)
    status = recorder.status()
    assert (status.state, status.segment, status.not_recorded) == ("degraded", 1, 0)
    assert status.reason == f"no new segment can begin: {os.strerror(errno.EMFILE)}"
    refused[0] = False
    clock.now_ns += int(ROTATION_RETRY_S * 10**9)
    record(recorder, log, 10)
    assert (recorder.status().state, recorder.status().segment) == ("recording", 2)
    accounted(recorder, tmp_path, log)
    assert Recording.open(tmp_path).gaps == []


def test_a_rotation_while_the_disk_is_full_is_asked_for_again_afterwards(tmp_path: Path) -> None:
    """A loss that was healed without a rotation once left the recorder in its old segment for ever."""
    log, clock, disk = Log(), FakeClock(), Disk()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, clock=clock, segment_ns=10**9)
    record(recorder, log, 10)
    clock.now_ns += 10**9
    disk.free = 0
    record(recorder, log, 10)
    assert recorder.status().not_recorded > 0
    disk.free = None
    for _ in range(3):
        clock.now_ns += 10**10
        record(recorder, log, 10)
        record(recorder, log, 10)
    assert recorder.status().segment >= 3
    assert recorder.status().state == "recording"
    accounted(recorder, tmp_path, log)


def test_a_bug_in_the_writing_thread_is_a_loss_that_is_told_and_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, left = Log(), [0]

    def encoded(frame: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise MemoryError("no memory for a frame")
        return encode_frame(frame)

    monkeypatch.setattr("kvbm_console.recording.format.encode_frame", encoded)
    monkeypatch.setattr(writer_module, "RETRY_S", 0)
    recorder = recorder_of(log, tmp_path)
    record(recorder, log, 10)
    left[0] = 1
    record(recorder, log, 10)
    status = recorder.status()
    assert (status.state, status.not_recorded, status.reason) == (
        "degraded", 10, "MemoryError: no memory for a frame"
    )
    record(recorder, log, 10)
    record(recorder, log, 10)
    assert recorder.status().state == "recording"
    accounted(recorder, tmp_path, log)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("a bug")])
def test_a_sealer_that_cannot_start_a_process_says_so_and_seals_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    log, failing, failed = Log(), threading.Event(), threading.Event()
    failing.set()

    class Child(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **named: Any) -> None:
            if failing.is_set():
                failed.set()
                raise error
            super().__init__(*args, **named)

    monkeypatch.setattr(seal.subprocess, "Popen", Child)
    monkeypatch.setattr(seal, "SEAL_RETRY_S", 0.01)
    recorder = recorder_of(log, tmp_path)
    record(recorder, log, 10)
    assert recorder.rotate()
    record(recorder, log, 10)
    assert failed.wait(10)
    while (status := recorder.status()).reason is None:
        record(recorder, log, 1)
    assert status.state == "degraded"
    assert status.reason.startswith("segments are not sealed: ")
    failing.clear()
    first = tmp_path / "000001-000000000000.mcap"
    while not first.exists():
        record(recorder, log, 1)
    while recorder.status().state != "recording":
        record(recorder, log, 1)
    accounted(recorder, tmp_path, log)


def interfere(directory: Path, how: str) -> None:
    """What a person does to a directory that is being recorded to."""
    active = next(directory.glob("*.active"))
    if how == "directory removed":
        shutil.rmtree(directory)
    elif how == "file removed":
        active.unlink()
    elif how == "file emptied":
        os.truncate(active, 0)
    else:
        os.truncate(active, active.stat().st_size - 20)


@pytest.mark.parametrize("how", ["directory removed", "file removed", "file emptied", "file cut"])
def test_a_recording_that_is_removed_or_cut_under_its_recorder_is_told_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", 0)
    directory, log = tmp_path / "run", Log()
    recorder = recorder_of(log, directory)
    record(recorder, log, 10)
    record(recorder, log, 10)
    interfere(directory, how)
    record(recorder, log, 10)
    status = recorder.status()
    assert status.state == "degraded"
    assert status.reason is not None
    assert status.reason.startswith("the file was ")
    assert status.not_recorded == (20 if how == "file cut" else 30), "the flush that met it and what was there before"
    assert status.written_seq == log.state.seq - 1 - status.not_recorded
    for _ in range(3):
        record(recorder, log, 10)
    assert recorder.status().state == "recording"
    accounted(recorder, directory, log)


def test_a_directory_that_is_moved_away_takes_its_segment_along_and_a_new_one_begins(tmp_path: Path) -> None:
    directory, log = tmp_path / "run", Log()
    recorder = recorder_of(log, directory)
    record(recorder, log, 10)
    directory.rename(tmp_path / "moved")
    for _ in range(3):
        record(recorder, log, 10)
    assert recorder.status().not_recorded == 0
    assert recorder.status().segment == 2, "without a rotation that anybody asked for"
    with pytest.raises(Exception, match="is being recorded to by another process"):
        recorder_of(Log(), directory)
    recorder.close()
    for place, first, last in ((tmp_path / "moved", 0, 29), (directory, 30, 39)):
        recover_directory(place)
        found = Recording.open(place)
        assert (found.first_seq, found.last_seq, found.gaps) == (first, last, [])


def test_a_segment_is_not_brought_back_by_a_sealing_that_was_given_up(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path, seal=False)
    for _ in range(4):
        record(recorder, log, 50)
        assert recorder.rotate()
    record(recorder, log, 1)
    recorder.close()
    paths = sorted(tmp_path.glob("*.active"))
    sealer = seal.BackgroundSealer(tmp_path, Retention(keep_bytes=1), paths[:1], lambda: 0)
    sealer.retain(0)
    sealer.stop()
    assert sorted(path.stem for path in tmp_path.iterdir() if path.name != "lock") == [paths[-1].stem]
    assert sealer.removed_segments == 4
    seal_segment(paths[-1])


@pytest.mark.parametrize("keep_bytes", [None, 60_000])
def test_events_go_on_behind_the_last_keyframe_when_no_frame_can_hold_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_bytes: int | None
) -> None:
    """A pool that had grown to 2.4 million blocks ended its recording: what came behind the next keyframe was lost."""
    monkeypatch.setattr("kvbm_console.recording.format.KEYFRAME_BYTES_MAX", 100_000)
    log, clock, taken, grown = Log(), FakeClock(), 0, False

    def keyframe() -> tuple[int, bytes, bytes]:
        nonlocal taken
        taken += 1
        seq, facts, memory = log.keyframe()
        return seq, facts, b"\xc4" * 200_000 if grown else memory

    recorder = recorder_of(
        log, tmp_path, keyframe=keyframe, clock=clock, keyframe_events=50, segment_bytes=20_000, segment_ns=10**15,
        retention=Retention(keep_bytes=keep_bytes),
    )
    record(recorder, log, 100)
    before, grown = taken, True
    for _ in range(60):
        record(recorder, log, 40)
        clock.now_ns += 10**9
    status = recorder.status()
    assert status.state == "degraded"
    assert status.reason is not None
    assert status.reason.endswith("bytes is above the limit of 100000")
    if keep_bytes is None:
        assert status.not_recorded == 0
        assert taken - before <= 2, "each try exports the whole state"
        assert recorder.rotate()
        assert recorder.settle()
        assert recorder.status().not_recorded == 0
    else:
        assert status.not_recorded > 0, "keep is a bound"
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= keep_bytes
    grown = False
    clock.now_ns += 61 * 10**9
    for _ in range(3):
        record(recorder, log, 60)
        clock.now_ns += 10**9
    assert recorder.status().state == "recording"
    recorder.close()
    if keep_bytes is None:
        events = [event.seq for batch in Recording.open(tmp_path).events() for event in batch]
        assert events == list(range(log.state.seq))


def test_a_keyframe_that_no_frame_can_hold_is_told_and_tried_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try exports the whole state on the engine's loop: four a second once starved the engine."""
    monkeypatch.setattr("kvbm_console.recording.format.KEYFRAME_BYTES_MAX", 100_000)
    log, clock, taken = Log(), FakeClock(), 0

    def large() -> tuple[int, bytes, bytes]:
        nonlocal taken
        taken += 1
        return *log.keyframe()[:2], b"\xc4" * 200_000

    recorder = recorder_of(log, tmp_path, keyframe=large, clock=clock)
    for _ in range(40):
        record(recorder, log, 10)
        clock.now_ns += 10**9
    status = recorder.status()
    assert taken <= 2
    assert (status.state, status.not_recorded) == ("degraded", log.state.seq)
    assert status.reason is not None
    assert status.reason.endswith("bytes is above the limit of 100000")
    recorder.close()


@pytest.mark.parametrize("queue_bytes", [32_000_000, 20_000])
def test_a_disk_that_hangs_for_20_s_is_told_and_costs_what_does_not_fit_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue_bytes: int
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", 0)
    log, clock, disk = Log(), FakeClock(), Disk()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, clock=clock, queue_bytes=queue_bytes)
    record(recorder, log, 10)
    disk.gate.clear()
    writes = disk.writes
    recorder.offer(*log.flush(10))
    while disk.writes == writes:
        recorder.offer(None, None)  # until the writing thread stands in its call
    assert recorder.status().state == "recording"
    for _ in range(20):
        clock.now_ns += 10**9
        recorder.offer(*log.flush(100, "x" * 40))
    status = recorder.status()
    assert (status.state, status.reason) == ("degraded", "the disk has not answered a write for more than 5 s")
    assert status.written_seq == 9
    disk.gate.set()
    for _ in range(3):
        record(recorder, log, 10)
    status = recorder.status()
    assert (status.state, status.reason) == ("recording", None)
    assert (status.not_recorded == 0) == (queue_bytes > 20_000)
    accounted(recorder, tmp_path, log)


def test_keyframes_that_wait_for_a_disk_take_half_of_the_queue_at_most(tmp_path: Path) -> None:
    """Each is an export of the whole state, so a disk that hangs would otherwise take all memory."""
    log, disk, taken, size, queue_bytes = Log(), Disk(), [], 20_000, 200_000

    def keyframe() -> tuple[int, bytes, bytes]:
        seq, facts, _ = log.keyframe()
        taken.append(seq)
        return seq, facts, bytes(size)

    recorder = recorder_of(
        log, tmp_path, keyframe=keyframe, open_file=disk.open, queue_bytes=queue_bytes, keyframe_events=10,
    )
    record(recorder, log, 10)
    disk.gate.clear()
    before = len(taken)
    for _ in range(50):
        recorder.offer(*log.flush(10))
    assert 1 < len(taken) - before <= queue_bytes // 2 // size + 1
    disk.gate.set()
    record(recorder, log, 10)
    resumed = len(taken)
    record(recorder, log, 10)
    assert len(taken) > resumed
    status = recorder.status()
    assert (status.state, status.not_recorded) == ("recording", 0)
    accounted(recorder, tmp_path, log)


def test_a_sync_that_hangs_is_told_and_events_are_written_meanwhile(tmp_path: Path) -> None:
    log, clock, disk = Log(), FakeClock(), Disk()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, clock=clock)
    record(recorder, log, 10)
    held, entered = threading.Event(), threading.Event()

    def hangs(self: Any) -> None:
        entered.set()
        held.wait()

    disk_file: Any = recorder._segment.file
    disk_file.datasync = hangs.__get__(disk_file)
    for _ in range(2):
        recorder.offer(*log.flush(5))
        written = threading.Event()
        recorder._queue.put(written)
        assert written.wait(10)
        recorder._syncer.wake()
        assert entered.wait(10)
    clock.now_ns += 20 * 10**9
    status = recorder.status()
    assert (status.state, status.reason) == ("degraded", "the disk has not answered a sync for more than 5 s")
    assert status.written_seq == 19
    assert status.synced_seq < 19
    held.set()
    record(recorder, log, 10)
    assert recorder.status().state == "recording"
    assert recorder.status().synced_seq == 29
    accounted(recorder, tmp_path, log)


def test_a_disk_that_hangs_while_older_segments_are_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, clock = Log(), FakeClock()
    recorder = recorder_of(log, tmp_path, clock=clock, retention=Retention(keep_bytes=1_000_000))
    record(recorder, log, 10)
    goes_on, stands, real = threading.Event(), threading.Event(), seal.used_bytes

    def hangs(directory: Path) -> int:
        stands.set()
        goes_on.wait()
        return real(directory)

    recorder._granted = 0  # the next write asks for room
    monkeypatch.setattr(seal, "used_bytes", hangs)
    recorder.offer(*log.flush(10))
    assert stands.wait(10)
    clock.now_ns += 6 * 10**9
    status = recorder.status()
    assert (status.state, status.reason) == ("degraded", "the disk has not answered a write for more than 5 s")
    goes_on.set()
    record(recorder, log, 10)
    assert recorder.status().state == "recording"
    accounted(recorder, tmp_path, log)


def test_a_recorder_ends_within_its_bounds_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CLOSE_TIMEOUT_S", 0.05)
    log, disk = Log(), Disk()
    recorder = recorder_of(log, tmp_path, open_file=disk.open)
    record(recorder, log, 10)
    disk.gate.clear()
    recorder.offer(*log.flush(10))
    recorder.close()  # returns
    assert recorder.status().written_seq == 9
    disk.gate.set()
    assert recorder._worker.join(10)
    recover_directory(tmp_path)
    assert Recording.open(tmp_path).last_seq == 19


@pytest.mark.parametrize("grown_bytes", [60_000, 150_000])
def test_rotations_that_are_refused_for_long_leave_room_for_the_one_that_is_not(
    tmp_path: Path, grown_bytes: int
) -> None:
    """A segment that had grown while descriptors were out left no room for a keyframe beside it, for ever.

    Nor does its reserve suffice where keyframes have ``grown_bytes`` meanwhile: then the segment itself makes way.
    """
    log, clock, keep, refused, keyframe_bytes = Log(), FakeClock(), 400_000, [False], [60_000]

    def opened(path: Path) -> SegmentFile:
        if refused[0]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return SegmentFile(path)

    recorder = recorder_of(
        log, tmp_path, keyframe=lambda: (*log.keyframe()[:2], b"\xc4" * keyframe_bytes[0]), open_file=opened,
        clock=clock, segment_bytes=100_000, retention=Retention(keep_bytes=keep), segment_ns=10**15,
    )
    record(recorder, log, 100, "x" * 40)
    refused[0], keyframe_bytes[0] = True, grown_bytes
    for _ in range(100):
        clock.now_ns += 10**9
        record(recorder, log, 100, "x" * 40)
        assert size_of(tmp_path) <= keep
    status = recorder.status()
    assert (status.state, status.segment) == ("degraded", 1)
    assert status.reason == f"no new segment can begin: {os.strerror(errno.EMFILE)}"
    assert status.not_recorded > 0
    refused[0] = False
    for _ in range(40):
        clock.now_ns += 10**9
        record(recorder, log, 100, "x" * 40)
        assert size_of(tmp_path) <= keep
    status = recorder.status()
    assert (status.state, status.reason) == ("recording", None)
    assert status.segment > 2
    recorder.close()
    assert Recording.open(tmp_path).last_seq == log.state.seq - 1


# --- a segment that makes way for the next ----------------------------------------------------------------------------


class FullDisk:
    """A disk of ``room`` bytes, which a removed file leaves only when it is empty or closed."""

    def __init__(self) -> None:
        self.room = 10**9
        self.refused = False
        """True while no file can be opened."""
        self.broken = False
        """True while the disk takes nothing large."""
        self._sizes: dict[SegmentFile, int] = {}

    def open(self, path: Path) -> SegmentFile:
        """A new file on it."""
        if self.refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        disk, sizes = self, self._sizes

        class File(SegmentFile):
            def writev(self, buffers: Any) -> int:
                size = sum(map(len, buffers))
                if sum(sizes.values()) + size > disk.room or (disk.broken and size > 10_000):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                taken = super().writev(buffers)
                sizes[self] = sizes.get(self, 0) + taken
                return taken

            def truncate(self, size: int) -> None:
                super().truncate(size)
                sizes[self] = size

            def close(self) -> None:
                super().close()
                sizes.pop(self, None)

        return File(path)

    @property
    def used(self) -> int:
        """Bytes of all open files, removed ones included."""
        return sum(self._sizes.values())


def refused_for_long(tmp_path: Path) -> tuple[Recorder, Log, FullDisk, Callable[[], None]]:
    """A recorder whose rotations were refused for so long that its segment and a grown keyframe no longer fit."""
    disk, clock, log, keyframe_bytes = FullDisk(), FakeClock(), Log(), 60_000
    recorder = recorder_of(
        log, tmp_path, keyframe=lambda: (*log.keyframe()[:2], b"\xc4" * keyframe_bytes), open_file=disk.open,
        clock=clock, segment_bytes=100_000, retention=Retention(keep_bytes=400_000), segment_ns=10**15,
    )

    def go_on() -> None:
        clock.now_ns += 10**9
        record(recorder, log, 100, "x" * 40)

    go_on()
    disk.refused, keyframe_bytes = True, 150_000
    for _ in range(100):
        go_on()
    assert recorder.status().reason == "no new segment can begin: Too many open files"
    disk.refused = False
    return recorder, log, disk, go_on


def test_a_full_disk_has_room_for_the_segment_that_another_made_way_for(tmp_path: Path) -> None:
    recorder, log, disk, go_on = refused_for_long(tmp_path / "run")
    disk.room = disk.used + 20_000
    for _ in range(3):
        go_on()
    status = recorder.status()
    assert (status.state, status.reason, status.removed_segments) == ("recording", None, 1)
    assert status.written_seq == log.state.seq - 1
    recorder.close()
    recording = Recording.open(tmp_path / "run")
    assert recording.last_seq == log.state.seq - 1


def test_a_segment_that_made_way_for_none_is_told_with_the_reason_of_the_disk(tmp_path: Path) -> None:
    """The daemon removed it itself, so it must not say that another did."""
    recorder, log, disk, go_on = refused_for_long(tmp_path / "run")
    disk.broken = True
    for _ in range(3):
        go_on()
    status = recorder.status()
    assert (status.state, status.reason) == ("degraded", "No space left on device")
    assert (status.written_seq, status.not_recorded) == (-1, log.state.seq)
    disk.broken = False
    for _ in range(30):
        go_on()
    assert recorder.status().state == "recording"
    recorder.close()
