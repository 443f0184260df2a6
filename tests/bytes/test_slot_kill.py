"""A process that stores blocks is killed: each entry has its block whole, and no ended store is lost."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_console.bytes.slot_file import SlotFile, SlotGeometry
from tests.bytes.slot_child import SLOTS, TOLD, key_of
from tests.bytes.slots import IDENTITY, content

ROOT = Path(__file__).resolve().parents[2]
KILLS, KILLS_FULL = 4, 200


def kill_one(directory: Path, seed: int, size: int) -> int:
    """Kill a child after a random number of messages, and check what it left; returns how many blocks there were."""
    told = bytearray()
    command = [sys.executable, "-m", "tests.bytes.slot_child", str(directory), str(seed), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        for _ in range(random.Random(seed).randrange(10, 400)):
            told += child.stdout.read(TOLD.size)
        child.kill()
        told += child.stdout.read()
    last: dict[int, tuple[bool, int]] = {}
    for ended, slot, number in TOLD.iter_unpack(told[: len(told) // TOLD.size * TOLD.size]):
        last[slot] = (ended, number)
    file = SlotFile.open(directory, SlotGeometry(SLOTS, size), IDENTITY)
    view, entries = memoryview(bytearray(size)), {slot: key for slot, key, _ in file.entries()}
    for slot, key in entries.items():
        assert file.load(slot, key, view), "an entry promises its block"
        assert bytes(view) == content(key, size)
    for slot, (ended, number) in last.items():
        assert not ended or entries.get(slot) == key_of(slot, number), "a store that had ended is gone"
    file.close()
    return len(entries)


@pytest.mark.fault
def test_a_kill_leaves_whole_blocks(tmp_path: Path) -> None:
    """The same directory is used again and again, so old blocks are overwritten when the kill comes."""
    assert [kill_one(tmp_path / "slots", seed, 65_536) for seed in range(1, 1 + KILLS)][-1] > SLOTS // 2


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("size", [65_536, 2**21])
def test_two_hundred_kills(tmp_path: Path, size: int) -> None:
    assert sum(kill_one(tmp_path / "slots", seed, size) for seed in range(1, 1 + KILLS_FULL // 2)) > KILLS_FULL
