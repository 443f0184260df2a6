"""Options of a recording and what is kept of it: bounds in one sentence, whole sealed segments, oldest first."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.recording import seal
from kvbm_console.recording.format import segment_number
from kvbm_console.recording.options import RecordingOptions, Retention, recording_options
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import recover_directory
from kvbm_console.recording.seal import Ages, retain, seal_segment
from tests.recording.helpers import Log, recorder_of

ROOMY = 10**15


def segments(directory: Path, count: int, *, sealed: int) -> list[Path]:
    """A recording of so many segments, the first ``sealed`` of them sealed; their paths in order."""
    log = Log()
    recorder = recorder_of(log, directory, seal=False)
    for number in range(count):
        recorder.offer(*log.flush(50))
        assert recorder.settle()
        if number < count - 1:
            assert recorder.rotate()
            assert recorder.settle()
    recorder.close()
    paths = sorted(directory.glob("*.active"))
    assert len(paths) == count
    return [seal_segment(path) if number < sealed else path for number, path in enumerate(paths)]


def age(path: Path, seconds: int) -> None:
    """Make a file look this old."""
    at = path.stat().st_mtime_ns - seconds * 10**9
    os.utime(path, ns=(at, at))


@pytest.mark.parametrize(("words", "sentence"), [
    ({"segment_size": "256"}, "segment-size must be a size with a unit such as 256MB or 20GiB, got '256'"),
    ({"segment_size": "1KB"}, "segment-size must be from 1MB to 4GB, got '1000B'"),
    ({"segment_size": "5GB"}, "segment-size must be from 1MB to 4GB, got '5000000000B'"),
    ({"segment_time": "10"}, "segment-time must be a time with a unit such as 10m or 7d, got '10'"),
    ({"segment_time": "25h"}, "segment-time must be from 1s to 24h, got '90000s'"),
    ({"keep": "much"}, "keep must be a size such as 20GB or a time such as 7d, got 'much'"),
    ({"keep": "300MB"}, r"keep must be at least two segments \(512000000B\), got '300000000B'"),
    ({"keep": "1s"}, "keep must be at least 1m, got '1s'"),
    ({"sync": "2s"}, "sync must be one of 1s, always, never, got '2s'"),
])
def test_a_value_out_of_bounds_is_refused_in_one_sentence(words: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        recording_options(**words)


def test_words_become_numbers() -> None:
    options = recording_options(segment_size="10MB", segment_time="30s", keep="7d", sync="always")
    assert options == RecordingOptions(
        segment_bytes=10_000_000, segment_ns=30 * 10**9, keep_ns=7 * 86_400 * 10**9, sync="always"
    )
    assert recording_options(keep="20GB").keep_bytes == 20 * 10**9
    assert (recording_options(sync="never").sync_interval_s, options.sync_interval_s) == (None, 0.0)


def test_bytes_take_the_oldest_sealed_segments_and_what_is_left_reads(tmp_path: Path) -> None:
    paths = segments(tmp_path, 6, sealed=5)
    total = sum(path.stat().st_size for path in paths)
    keep = total - paths[0].stat().st_size - 1
    assert retain(tmp_path, Retention(keep_bytes=keep), free=lambda _: ROOMY) == paths[:2]
    recording = Recording.open(tmp_path)
    assert (recording.first_seq, recording.last_seq, recording.gaps) == (100, 299, [])
    assert recording.state_at(250).seq == 251


def test_segments_that_wait_to_be_sealed_go_too_and_the_last_never_does(tmp_path: Path) -> None:
    paths = segments(tmp_path, 4, sealed=2)
    draft, damaged = tmp_path / "000009-000000000000.mcap.tmp", tmp_path / "000000-000000000000.active.damaged"
    draft.write_bytes(b"x")
    damaged.write_bytes(b"x")
    for path in tmp_path.iterdir():
        age(path, 10**6)
    asked = Retention(keep_bytes=0, keep_ns=1, segment_bytes=10**12)
    assert retain(tmp_path, asked, free=lambda _: 0) == paths[:3]
    assert all(path.exists() for path in (paths[3], draft, damaged))


def test_room_is_made_for_bytes_that_are_still_to_come(tmp_path: Path) -> None:
    paths = segments(tmp_path, 4, sealed=0)
    total = sum(path.stat().st_size for path in paths)
    asked = Retention(keep_bytes=total + 100)
    assert retain(tmp_path, asked, growth=100, free=lambda _: ROOMY) == []
    assert retain(tmp_path, asked, growth=101, free=lambda _: ROOMY) == paths[:1]


def test_ages_take_what_is_older_and_stop_at_the_first_that_is_not(tmp_path: Path) -> None:
    paths = segments(tmp_path, 5, sealed=5)
    for path in (paths[0], paths[1], paths[3]):
        age(path, 3_600)
    assert retain(tmp_path, Retention(keep_ns=1_800 * 10**9), free=lambda _: ROOMY) == paths[:2]
    assert retain(tmp_path, Retention(), free=lambda _: 0) == []


@pytest.mark.parametrize("step_s", [-365 * 86_400, 365 * 86_400])
def test_a_wall_clock_that_is_set_makes_no_segment_older_or_younger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    paths = segments(tmp_path, 4, sealed=3)
    ages, hour = Ages(), Retention(keep_ns=3_600 * 10**9)
    age(paths[0], 1_800)
    last = paths.pop()
    last.rename(tmp_path / "aside")  # it ends below, between two looks
    assert retain(tmp_path, hour, ages=ages, free=lambda _: ROOMY) == []
    real_wall, real_monotonic, passed = time.time_ns, time.monotonic_ns, 0
    monkeypatch.setattr(seal.time, "time_ns", lambda: real_wall() + passed + step_s * 10**9)
    monkeypatch.setattr(seal.time, "monotonic_ns", lambda: real_monotonic() + passed)
    newest = tmp_path / "000009-000000000200.active"
    (tmp_path / "aside").rename(last)
    newest.write_bytes(b"")
    passed = 60 * 10**9
    assert retain(tmp_path, hour, ages=ages, free=lambda _: ROOMY) == []
    passed = 1_900 * 10**9
    assert retain(tmp_path, hour, ages=ages, free=lambda _: ROOMY) == paths[:1]
    passed = 3_700 * 10**9
    assert retain(tmp_path, hour, ages=ages, free=lambda _: ROOMY) == [*paths[1:], last]


def test_room_for_two_segments_stays_free(tmp_path: Path) -> None:
    paths = segments(tmp_path, 4, sealed=4)
    size = paths[0].stat().st_size
    asked = Retention(keep_bytes=ROOMY, segment_bytes=10 * size)
    assert retain(tmp_path, asked, free=lambda _: 20 * size - 1) == paths[:1]


def test_twins_that_a_crash_between_rename_and_removal_left_go_together(tmp_path: Path) -> None:
    paths = segments(tmp_path, 3, sealed=3)
    twin = paths[0].with_suffix(".active")
    twin.write_bytes(b"")
    ended: list[str] = []
    removed = retain(tmp_path, Retention(keep_bytes=0), free=lambda _: ROOMY, ending=ended.append)
    assert removed == [twin, *paths[:2]], "the one that a recovery would bring back goes first"
    assert ended == [path.stem for path in paths[:2]]


def test_a_recorder_retains_by_itself(tmp_path: Path) -> None:
    log = Log()
    keep = Retention(keep_bytes=40_000)
    recorder = recorder_of(log, tmp_path, retention=keep)
    for _ in range(5):
        recorder.offer(*log.flush(50, "x" * 100))
        assert recorder.settle()
        assert recorder.rotate()
        assert recorder.settle()
    recorder.offer(*log.flush(1))
    recorder.close()
    for path in tmp_path.glob("*.active"):
        seal_segment(path)  # by the recorder's own process or, where that was slower than this test, here
    again = recorder_of(Log(), tmp_path, retention=keep, incarnation="second")
    again.close()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert not [name for name in left if name.startswith("000001")], left
    assert Recording.open(tmp_path).incarnation == "second"


def test_always_syncs_after_every_flush_and_never_only_at_the_end_of_a_segment(tmp_path: Path) -> None:
    log = Log()
    always = recorder_of(log, tmp_path / "always", sync_interval_s=0.0)
    synced = threading.Event()
    original = always._syncer._pass

    def counted() -> None:
        original()
        if always.status().synced_seq == 4:
            synced.set()

    always._syncer._pass = counted  # type: ignore[method-assign]
    always.offer(*log.flush(5))
    assert synced.wait(10), "nobody asked for it"
    always.close()

    log = Log()
    never = recorder_of(log, tmp_path / "never", sync_interval_s=None)
    never.offer(*log.flush(5))
    written = threading.Event()
    never._queue.put(written)
    assert written.wait(10)
    assert (never.written_seq, never.status().synced_seq) == (4, -1)
    never.close()
    assert never.status().synced_seq == 4


FOREIGN = (
    "thesis.docx.tmp", "other.active", "short.active", "2024-holiday.mcap", "7-upload.tmp", "000001-notes.mcap",
    "000001-000000000000.mcap.bak",
)
"""Names that somebody else could have given to a file in the same directory."""


def test_files_that_no_recorder_has_named_are_never_touched(tmp_path: Path) -> None:
    for name in FOREIGN:
        (tmp_path / name).write_bytes(b"the only copy")
    log = Log()
    recorder = recorder_of(log, tmp_path, retention=Retention(keep_bytes=40_000, keep_ns=1, segment_bytes=10**12))
    for _ in range(3):
        recorder.offer(*log.flush(10))
        assert recorder.settle()
        assert recorder.rotate()
        assert recorder.settle()
    recorder.close()
    assert min(filter(None, map(segment_number, tmp_path.iterdir()))) >= 1
    assert max(map(segment_number, tmp_path.iterdir())) < 2024, "a foreign number is no number of a segment"
    recover_directory(tmp_path)
    assert {(tmp_path / name).read_bytes() for name in FOREIGN} == {b"the only copy"}


def test_files_that_no_recorder_has_named_are_passed_over_by_readers(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path, seal=False)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    recording = Recording.open(tmp_path)
    for name in FOREIGN:
        (tmp_path / name).write_bytes(b"the only copy")
    assert Recording.open(tmp_path).last_seq == 9
    assert recorder.rotate()
    recorder.offer(*log.flush(10))
    recorder.close()
    assert recording.refresh()
    assert recording.last_seq == 19
    assert not Recording.open(tmp_path).unreadable


def test_drafts_of_a_dead_sealer_or_salvage_go(tmp_path: Path) -> None:
    drafts = [tmp_path / f"000002-000000000050.{ending}" for ending in ("mcap.tmp", "salvage.tmp")]
    for draft in drafts:
        draft.write_bytes(b"x")
    recover_directory(tmp_path)
    assert not any(draft.exists() for draft in drafts)


@pytest.mark.parametrize("lives", [True, False])
def test_a_sealing_ends_with_its_recorder(tmp_path: Path, lives: bool) -> None:
    """A daemon was killed, and its sealing process wrote a draft that the next daemon had left no room for."""
    first, _ = segments(tmp_path, 2, sealed=0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    parent = os.getpid() if lives else gone.pid
    done = subprocess.run([sys.executable, "-P", "-c", seal._CHILD, str(first), str(parent)], check=False)
    assert done.returncode == int(not lives)
    assert first.exists() is not lives
    assert first.with_suffix(".mcap").exists() is lives
    assert not first.with_suffix(".mcap.tmp").exists()
