"""The recorder: what it promises when all is well, and what it counts when the disk, or we, are too slow."""

import errno
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Event
from kvbm_console.recording import format as fmt
from kvbm_console.recording.info import info_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import active_segments
from kvbm_console.recording.threads import BATCH_MAX
from kvbm_console.recording.verify import verify
from kvbm_console.recording.writer import RETRY_S, Recorder
from tests.recording.helpers import Disk, FakeClock, Log, recorder_of

RETRY_NS = round(RETRY_S * 10**9)


def read(directory: Path) -> list[Event]:
    """All events that are in a recording."""
    return [event for batch in Recording.open(directory).events() for event in batch]


def test_what_is_offered_is_read_back_and_the_watermarks_follow(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    assert recorder.status().written_seq == -1
    for size in (1, 100, 7):
        recorder.offer(*log.flush(size))
    assert recorder.settle()
    status = recorder.status()
    assert (status.state, status.written_seq, status.synced_seq, status.not_recorded) == ("recording", 107, 107, 0)
    recorder.close()
    assert read(tmp_path) == log.events
    assert recorder.status().state == "closed"
    assert recorder.status().path == str(tmp_path / "000001-000000000000.mcap"), "where it is, sealed"


def test_stimuli_without_events_are_kept_in_order(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    stimuli, _ = log.flush(3)
    recorder.offer(stimuli, None)
    recorder.close()
    assert [stimulus.n for batch in Recording.open(tmp_path).stimuli() for stimulus in batch] == [0, 1, 2]


def test_files_are_private_and_offers_after_close_are_ignored(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path / "new", seal=False)
    recorder.offer(*log.flush(1))
    recorder.close()
    recorder.close()
    recorder.offer(*log.flush(1))
    (segment,) = (tmp_path / "new").glob("*.active")
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600
    assert len(read(tmp_path / "new")) == 1


@pytest.mark.fault
def test_f18_a_second_recorder_on_the_same_directory_is_refused_with_one_sentence(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    with pytest.raises(UsageError, match="is being recorded to by another process") as refused:
        recorder_of(log, tmp_path)
    assert "\n" not in str(refused.value)
    recorder.close()
    recorder_of(log, tmp_path).close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot record to"):
        recorder_of(Log(), tmp_path / "file")
    disk = Disk()
    disk.free = 100
    with pytest.raises(UsageError, match="No space left"):
        recorder_of(Log(), tmp_path / "full", open_file=disk.open)
    assert list((tmp_path / "full").glob("0*")) == []


def test_short_writes_are_completed(tmp_path: Path) -> None:
    disk = Disk()
    disk.short = 7
    log = Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open)
    recorder.offer(*log.flush(50))
    recorder.close()
    assert read(tmp_path) == log.events


def test_what_waited_for_the_disk_is_written_in_few_calls(tmp_path: Path) -> None:
    disk, log = Disk(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open)
    assert recorder.settle()
    disk.gate.clear()
    before = disk.writes
    for _ in range(3 * BATCH_MAX):
        recorder.offer(*log.flush(2))
    disk.gate.set()
    assert recorder.settle()
    assert disk.writes - before <= 5, "beside a busy thread each call waits for the interpreter"
    recorder.close()
    assert read(tmp_path) == log.events


@pytest.mark.slow
def test_beside_a_thread_that_never_rests_the_recorder_keeps_up(tmp_path: Path) -> None:
    log = Log()
    chunks = [log.flush(1_000) for _ in range(400)]
    end = log.keyframe()
    recorder = Recorder(
        tmp_path, config=LeaderConfig(), incarnation="run", keyframe=iter([(0, b"", log.memory)]).__next__,
        sync_interval_s=None, keyframe_events=10**9, queue_bytes=2 * 1024 * 1024, seal=False,
    )
    due = time.perf_counter()
    for stimuli, events in chunks:
        due += 0.002
        while time.perf_counter() < due:
            pass
        recorder.offer(stimuli, events)
    assert recorder.settle()
    status = recorder.status()
    assert (status.written_seq, status.not_recorded) == (end[0] - 1, 0)
    recorder.close()


@pytest.mark.fault
@pytest.mark.parametrize("room", [0, 1, 40, 300, 2_000, 9_000])
def test_f5_a_full_disk_degrades_counts_exactly_and_resumes_by_itself(tmp_path: Path, room: int) -> None:
    disk, clock, log = Disk(), FakeClock(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, clock=clock)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.free = room
    for _ in range(40):
        recorder.offer(*log.flush(10))
    assert recorder.settle()
    degraded = recorder.status()
    assert (degraded.state, degraded.reason) == ("degraded", "No space left on device")
    assert degraded.written_seq + 1 + degraded.not_recorded == len(log.events)
    written = read(tmp_path)
    assert written == log.events[: degraded.written_seq + 1], "what is there while the disk is full is readable"

    disk.free = None
    clock.now_ns += RETRY_NS
    assert recorder.settle()
    recorder.offer(*log.flush(10))  # dropped, and asks for the keyframe that ends the loss
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    resumed = recorder.status()
    assert (resumed.state, resumed.reason) == ("recording", None)
    assert resumed.written_seq == len(log.events) - 1
    recorder.close()

    recording = Recording.open(tmp_path)
    assert sum(gap.count for gap in recording.gaps) == resumed.not_recorded
    assert {gap.reason for gap in recording.gaps} == {"No space left on device"}
    got = read(tmp_path)
    assert len(got) + resumed.not_recorded == len(log.events)
    assert got == log.events[: len(written)] + log.events[len(written) + resumed.not_recorded :]
    assert recording.state_at(recording.last_seq).seq == len(log.events), "facts are known again behind the gap"


@pytest.mark.fault
def test_f5_a_disk_that_stays_full_until_the_end_leaves_a_readable_file(tmp_path: Path) -> None:
    disk, log = Disk(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, seal=False)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.free = 200
    for _ in range(5):
        recorder.offer(*log.flush(10))
    recorder.close()
    assert recorder.status().not_recorded == 50
    assert read(tmp_path) == log.events[:10]


@pytest.mark.fault
def test_f5_the_end_of_a_full_disk_is_probed_at_most_every_quarter_second(tmp_path: Path) -> None:
    disk, clock, log = Disk(), FakeClock(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, clock=clock)
    disk.write_error = errno.EIO
    recorder.offer(*log.flush(1))
    assert recorder.settle()
    disk.write_error = None
    clock.now_ns += RETRY_NS - 1
    recorder.offer(*log.flush(1))
    assert recorder.settle()
    assert recorder.status().state == "degraded"
    recorder.close()


@pytest.mark.fault
def test_a_file_whose_end_cannot_be_restored_is_left_and_a_new_segment_begins(tmp_path: Path) -> None:
    disk, clock, log = Disk(), FakeClock(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, clock=clock, seal=False)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.free, disk.truncate_error = 100, errno.EIO
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.free = disk.truncate_error = None
    clock.now_ns += RETRY_NS
    assert recorder.settle()
    for _ in range(2):
        recorder.offer(*log.flush(10))
    recorder.close()
    assert len(list(tmp_path.glob("*.active"))) == 2
    recording = Recording.open(tmp_path)
    assert [(gap.first, gap.last) for gap in recording.gaps] == [(10, 29)]
    assert [event.seq for event in read(tmp_path)] == [*range(10), *range(30, 40)]


def after_a_failed_sync(tmp_path: Path) -> tuple[Disk, Log, Recorder]:
    """A recorder of which ten events are synced, and the sync of the next ten has failed."""
    disk, log = Disk(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, seal=False)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.sync_error = errno.EIO
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    return disk, log, recorder


@pytest.mark.fault
def test_f6_a_segment_whose_sync_failed_is_over_and_synced_seq_stood_still(tmp_path: Path) -> None:
    disk, log, recorder = after_a_failed_sync(tmp_path)
    status = recorder.status()
    assert (status.state, status.written_seq, status.synced_seq) == ("degraded", 19, 9)
    assert (status.reason, status.sync_failures) == ("Input/output error", 1)
    assert recorder.settle()
    assert recorder.status().sync_failures == 1, "a file whose sync failed is never synced again"

    disk.sync_error = None
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    assert recorder.settle()
    status = recorder.status()
    assert (status.state, status.segment, status.synced_seq) == ("recording", 2, 29)
    recorder.close()
    assert read(tmp_path) == log.events, "nothing was lost by it"
    marks = [fmt.decode_mark(frame.data) for frame in Recording.open(tmp_path).frames() if frame.channel == fmt.MARKS]
    assert fmt.SyncFailed(10, 19, "Input/output error") in marks


@pytest.mark.fault
def test_no_sync_passes_a_failed_one_that_is_not_told_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss behind such a sync took the mark, and nothing said that the events in front of it were unsure."""
    disk, log, recorder = after_a_failed_sync(tmp_path)
    disk.sync_error = None
    append, synced = recorder._append_mark, []

    def append_mark(segment: Any, mark: fmt.Mark) -> None:
        assert recorder._syncer.sync(5.0)
        synced.append(recorder.status().synced_seq)
        append(segment, mark)

    monkeypatch.setattr(recorder, "_append_mark", append_mark)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    assert synced == [9]
    assert recorder.settle()
    assert recorder.status().synced_seq == 29
    recorder.close()


def test_a_writer_that_falls_behind_counts_and_goes_on_with_a_keyframe(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path, queue_bytes=20_000)
    for _ in range(400):
        recorder.offer(*log.flush(100))
    assert recorder.settle()
    recorder.offer(*log.flush(1))
    recorder.offer(*log.flush(1))
    recorder.close()
    lost = recorder.status().not_recorded
    assert lost + len(read(tmp_path)) == len(log.events)
    assert read(tmp_path)[-1] == log.events[-1]
    assert sum(gap.count for gap in Recording.open(tmp_path).gaps) == lost


def test_chunks_that_do_not_follow_each_other_become_a_gap(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    recorder.offer(*log.flush(5))
    log.flush(5)
    recorder.offer(*log.flush(5))
    recorder.offer(*log.flush(5))
    recorder.close()
    assert [(gap.first, gap.last) for gap in Recording.open(tmp_path).gaps] == [(5, 14)]
    assert recorder.status().not_recorded == 10
    assert [event.seq for event in read(tmp_path)] == [*range(5), *range(15, 20)]


def test_a_recorder_that_begins_in_the_middle_knows_the_facts_from_there(tmp_path: Path) -> None:
    log = Log()
    log.flush(100)
    recorder = recorder_of(log, tmp_path)
    recorder.offer(*log.flush(10))
    recorder.close()
    recording = Recording.open(tmp_path)
    assert (recording.first_seq, recording.last_seq) == (100, 109)
    assert recording.state_at(104).seq == 105


def test_segments_rotate_by_size_without_a_hole(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path, segment_bytes=6_000, seal=False)
    for _ in range(30):
        recorder.offer(*log.flush(50))
        assert recorder.settle()
    recorder.close()
    recording = Recording.open(tmp_path)
    assert len(recording.segments) > 3
    assert read(tmp_path) == log.events
    assert recording.gaps == []
    for segment in recording.segments:
        first = next(iter(segment.frames(segment.entries[0])))
        assert first.channel == fmt.KEYFRAMES, "every segment begins with a complete keyframe"
        assert fmt.decode_keyframe(first.data).complete


def test_segments_rotate_by_time(tmp_path: Path) -> None:
    clock, log = FakeClock(), Log()
    recorder = recorder_of(log, tmp_path, segment_ns=10, clock=clock, seal=False)
    recorder.offer(*log.flush(5))
    clock.now_ns = 10
    recorder.offer(*log.flush(5))
    recorder.offer(*log.flush(5))
    recorder.close()
    assert [segment.about.first_seq for segment in Recording.open(tmp_path).segments] == [0, 10]


@pytest.mark.fault
def test_a_rotation_that_finds_no_room_stays_in_the_old_segment(tmp_path: Path) -> None:
    disk, clock, log = Disk(), FakeClock(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open, segment_ns=10, clock=clock, seal=False)
    recorder.offer(*log.flush(5))
    assert recorder.settle()
    disk.free = 1_000
    clock.now_ns = 10
    recorder.offer(*log.flush(5))
    assert recorder.settle()
    assert recorder.status().state == "degraded"
    disk.free = None
    clock.now_ns += RETRY_NS
    assert recorder.settle()
    recorder.offer(*log.flush(5))
    recorder.offer(*log.flush(5))
    recorder.close()
    recording = Recording.open(tmp_path)
    assert [segment.about.segment for segment in recording.segments] == [1, 2]
    lost = recorder.status().not_recorded
    assert lost + len(read(tmp_path)) == 20
    assert sum(gap.count for gap in recording.gaps) == lost


def test_keyframes_are_spaced_by_events(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path, keyframe_events=100)
    for _ in range(50):
        recorder.offer(*log.flush(10))
    recorder.close()
    assert info_of(Recording.open(tmp_path)).keyframes == 1 + 5


def test_a_second_run_in_the_same_directory_is_a_run_of_its_own(tmp_path: Path) -> None:
    for incarnation in ("one", "two"):
        log = Log()
        recorder = recorder_of(log, tmp_path, incarnation=incarnation)
        recorder.offer(*log.flush(5 if incarnation == "one" else 7))
        recorder.close()
    assert info_of(Recording.open(tmp_path)).runs == ["one", "two"]
    assert Recording.open(tmp_path).last_seq == 6
    assert Recording.open(tmp_path, run="one").last_seq == 4


def test_offering_never_waits_for_the_disk(tmp_path: Path) -> None:
    disk, log = Disk(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open)
    assert recorder.settle()
    disk.gate.clear()
    for _ in range(100):
        recorder.offer(*log.flush(10))
    assert recorder.status().written_seq == -1, "every write is stuck, and still all offers came back"
    disk.gate.set()
    recorder.close()
    assert read(tmp_path) == log.events


# --- sealing at the end ---


def test_a_large_last_segment_is_sealed_at_the_end(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    for _ in range(24):
        recorder.offer(*log.flush(64, "x" * 8_000))
        recorder.settle()
    assert recorder.status().bytes > 16 * 2**20
    recorder.close()
    assert (recorder.unsealed, active_segments(tmp_path)) == ([], [])
    assert verify(tmp_path).ok


def test_an_end_that_has_no_time_leaves_whole_segments_and_names_them(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    recorder.offer(*log.flush(40))
    asked = iter((False, False, True))
    recorder.close(lambda: next(asked))
    left = active_segments(tmp_path)
    assert [path.name for path in recorder.unsealed] == [path.name for path in left] == ["000001-000000000000.active"]
    assert not list(tmp_path.glob("*.tmp"))
    assert recorder.status().path == str(left[0])
    assert verify(tmp_path).ok
    recorder_of(log, tmp_path).close()
    assert not active_segments(tmp_path), "the next recorder of the directory seals what is left"
