"""F2: the power fails, and nothing that was synced is gone, nothing else is missing without being stated.

Model of the disk: what was appended behind a file's last sync survives block by block, in any combination, up to any
length; a file whose directory entry was not synced after its creation may be gone altogether.
"""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.recording import files, output, threads
from kvbm_console.recording.files import DirectoryLock
from kvbm_console.recording.output import RecordingPath
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import recover_directory
from tests.recording.helpers import Disk, Log, recorder_of

CASES = 150
CASES_FULL = 20_000
LOSSES_PER_RUN = 25
"""Ways in which the power may fail that are tried on one recorded run."""
BLOCK_BYTES = 512
"""The least that a disk writes as a whole."""


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files that nobody needs: do not wait for the real disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


class Failing:
    """One run until the power fails: what is in the files, what of it is safe, and what was promised."""

    def __init__(self, directory: Path, dice: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        disk, log = Disk(), Log()
        entries: set[Path] = set()
        monkeypatch.setattr(threads, "sync_directory", lambda place: entries.update(place.glob("*.active")))
        recorder = recorder_of(log, directory, open_file=disk.open, seal=False, keyframe_events=40)

        def write() -> None:
            for _ in range(dice.randrange(1, 5)):
                recorder.offer(*log.flush(dice.randrange(1, 30)))
                if dice.random() < 0.2:
                    recorder.rotate()

        write()
        assert recorder.settle()
        self.synced_seq = recorder.status().synced_seq
        safe, self.entries = dict(disk.synced), set(entries)
        write()
        recorder._queue.put(None)
        recorder._worker.join()
        self.files = {path: path.read_bytes() for path in directory.glob("*.active")}
        self.safe = {path: safe.get(path, 0) for path in self.files}
        recorder.close()

    def leave(self, directory: Path, dice: random.Random) -> None:
        """What one power failure leaves of it."""
        for path, content in self.files.items():
            if path not in self.entries and dice.random() < 0.5:
                continue
            data = bytearray(content)
            kept = self.safe[path]
            for block in range(kept, len(data), BLOCK_BYTES):
                if dice.random() < 0.3:
                    data[block : block + BLOCK_BYTES] = bytes(len(data[block : block + BLOCK_BYTES]))
            del data[dice.randrange(kept, len(data) + 1) :]
            (directory / path.name).write_bytes(data)


def lose_power(place: Path, cases: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Try so many failures; returns how many of them lost something that was not promised."""
    dice = random.Random(seed)
    lossy = 0
    for _ in range(cases // LOSSES_PER_RUN):
        run = place / "run"
        failing = Failing(run, dice, monkeypatch)
        for _ in range(LOSSES_PER_RUN):
            left = place / "left"
            left.mkdir()
            failing.leave(left, dice)
            recover_directory(left, salvage=True)
            recording = Recording.open(left)
            got = [event.seq for batch in recording.events() for event in batch]
            assert got[: failing.synced_seq + 1] == list(range(failing.synced_seq + 1)), "a synced event is gone"
            missing = {seq for gap in recording.gaps for seq in range(gap.first, gap.last + 1)}
            assert sorted({*got, *missing}) == list(range(recording.last_seq + 1)), "a hole that is not stated"
            lossy += bool(missing)
            shutil.rmtree(left)
        shutil.rmtree(run)
    return lossy


@pytest.mark.fault
def test_f2_a_power_loss_takes_nothing_that_was_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lose_power(tmp_path, CASES, 2, monkeypatch) > 0, "the model does lose unsynced blocks"


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_f2_twenty_thousand_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lose_power(tmp_path, CASES_FULL, 20_000, monkeypatch) > 100


@pytest.mark.fault
def test_f2_the_name_of_a_directory_is_durable_before_it_is_recorded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fails = [OSError(errno.EIO, "Input/output error")]

    def sync(place: Path) -> None:
        synced.append(place)
        if place.name == "a" and fails:
            raise fails.pop()

    monkeypatch.setattr(files, "sync_directory", sync)
    wanted = tmp_path / "a" / "b" / "c"
    with pytest.raises(UsageError, match=f"cannot record to {wanted}: Input/output error"):
        DirectoryLock(wanted)
    assert synced == [tmp_path.parent, tmp_path, tmp_path / "a"]
    assert not wanted.exists()
    synced.clear()
    DirectoryLock(wanted).release()
    assert synced == [tmp_path / "a", tmp_path / "a" / "b"], "the name whose sync failed is synced again"


@pytest.mark.fault
def test_f2_the_name_of_a_file_is_durable_before_its_parts_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RecordingPath(tmp_path / "run.mcap")
    place.directory.mkdir()
    (place.directory / "000001-000000000000.mcap").write_bytes(b"a sealed segment")
    done: list[str] = []

    def sync(directory: Path) -> None:
        assert place.file is not None
        assert (directory, place.file.exists(), place.directory.exists()) == (tmp_path, True, True)
        done.append("synced")

    monkeypatch.setattr(output, "sync_directory", sync)
    assert place.finish() == place.file
    assert done == ["synced"]
    assert not place.directory.exists()


def test_a_directory_whose_parent_may_only_be_passed_through_can_be_recorded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "sync_directory", refuse)
    DirectoryLock(tmp_path).release()
