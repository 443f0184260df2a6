"""F1: a process that records is killed, and nothing that it had acknowledged is lost."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_console.recording.info import info_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import recover_directory
from kvbm_console.recording.verify import verify

ROOT = Path(__file__).resolve().parents[2]
KILLS = 3
KILLS_FULL = 200


def kill_one(directory: Path, seed: int) -> int:
    """Let a child record, kill it somewhere behind its first acknowledgement, recover; returns how many torn bytes."""
    flushes = random.Random(seed).randrange(20, 300)
    command = [sys.executable, "-m", "tests.recording.recording_child", str(directory), str(seed)]
    written = -1
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        while written < 0:
            written = int.from_bytes(child.stdout.read(8), "little", signed=True)
        for _ in range(flushes):
            written = int.from_bytes(child.stdout.read(8), "little", signed=True)
        child.kill()
        rest = child.stdout.read()
    if len(rest) >= 8:
        whole = len(rest) // 8 * 8
        written = int.from_bytes(rest[whole - 8 : whole], "little", signed=True)
    torn = sum(one.torn_bytes for one in recover_directory(directory))
    recording = Recording.open(directory)
    assert recording.last_seq >= written, "an acknowledged event is gone"
    seqs = [event.seq for batch in recording.events() for event in batch]
    assert seqs == list(range(recording.last_seq + 1))
    assert not info_of(recording).finished
    assert recording.state_at(recording.last_seq).seq == recording.last_seq + 1
    return torn


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(KILLS))
def test_f1_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    kill_one(tmp_path, seed)


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_f1_two_hundred_times(tmp_path: Path) -> None:
    for seed in range(1_000, 1_000 + KILLS_FULL):
        kill_one(tmp_path / str(seed), seed)


@pytest.mark.fault
def test_f1_what_a_kill_left_can_be_read_without_recovery(tmp_path: Path) -> None:
    """A reader needs no lock and changes nothing."""
    kill_one(tmp_path, 77)
    (last,) = sorted(tmp_path.glob("*.active"))[-1:]
    with last.open("ab") as file:
        file.write(b"\x05torn")
    before = last.read_bytes()
    assert Recording.open(tmp_path).segments[-1].torn_bytes == 5
    assert verify(tmp_path).events > 0
    assert last.read_bytes() == before
