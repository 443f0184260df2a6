"""Slot files on a disk that is a list of what was written, and the mutants that the laws must find.

Law of this file: ``SlotFile`` is the real one. Only the two files below it are modelled.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvbm_console.bytes import slot_file
from kvbm_console.bytes.slot_file import ENTRY_WORDS, SlotFile, SlotGeometry, SlotIdentity, SlotMedium, check_of

SECTOR_BYTES = 512
SMALL = SlotGeometry(slots=5, block_bytes=4 * SECTOR_BYTES)
IDENTITY = SlotIdentity("a model", "bfloat16", "one layer", 16, 0, 1, "sha256", "0")
KEYS = [b"same ofs" + bytes([number]) * 24 for number in range(8)]
"""Keys whose first 64 bits are the same."""


def content(key: bytes, size: int) -> bytes:
    """The bytes of a block."""
    return hashlib.shake_128(key).digest(size)


class Words:
    """The words of all entries, each set of which is told to the disk."""

    def __init__(self, disk: "Disk") -> None:
        self.disk = disk

    def __getitem__(self, part: slice) -> Any:
        return np.array(self.disk.words[part], np.uint64)

    def __setitem__(self, at: int, value: int) -> None:
        self.disk.words[at] = value
        self.disk.log.append(("word", at, value))


class Disk(SlotMedium):
    """Both files in memory, and the log of all that was written. A sync is two entries of the log."""

    direct = False

    def __init__(self, geometry: SlotGeometry) -> None:
        self.geometry = geometry
        self.words: Any = [0] * geometry.slots * ENTRY_WORDS
        self.sectors: dict[tuple[int, int], bytes] = {}
        self.log: list[tuple[str, Any, Any]] = []
        self.between: Callable[[], object] = lambda: None
        """Called between the syncs of data and index."""

    def rows(self) -> Any:
        return np.array(self.words, np.uint64).reshape(-1, ENTRY_WORDS)

    def write(self, slot: int, views: Sequence[memoryview]) -> None:
        for place, view in enumerate(views, slot):
            for number, at in enumerate(range(0, len(view), SECTOR_BYTES)):
                sector = bytes(view[at : at + SECTOR_BYTES])
                self.sectors[place, number] = sector
                self.log.append(("sector", (place, number), sector))

    def read(self, slot: int, views: Sequence[memoryview]) -> bool:
        for place, view in enumerate(views, slot):
            for number, at in enumerate(range(0, len(view), SECTOR_BYTES)):
                view[at : at + SECTOR_BYTES] = self.sectors.get((place, number), bytes(SECTOR_BYTES))
        return True

    def sync(self) -> None:
        self.log.append(("data synced", None, None))
        self.between()
        self.log.append(("index synced", None, None))

    def close(self) -> None:
        pass

    def killed(self, cut: int) -> "Disk":
        """What a kill leaves after so many entries of the log: all of them."""
        left = Disk(self.geometry)
        for what, where, value in self.log[:cut]:
            if what == "word":
                left.words[where] = value
            elif what == "sector":
                left.sectors[where] = value
        return left

    def powerless(self, cut: int, dice: random.Random) -> "Disk":
        """What a power loss may leave: of each sector and word any version since the last sync before the cut."""
        versions: dict[str, dict[Any, list[Any]]] = {"word": {}, "sector": {}}
        for what, where, value in self.log[:cut]:
            if what in versions:
                old = [0] if what == "word" else [bytes(SECTOR_BYTES)]
                versions[what].setdefault(where, old).append(value)
            else:
                kind = "word" if what == "index synced" else "sector"
                versions[kind] = {each: [seen[-1]] for each, seen in versions[kind].items()}
        left = Disk(self.geometry)
        for where, seen in versions["word"].items():
            left.words[where] = dice.choice(seen)
        for where, seen in versions["sector"].items():
            left.sectors[where] = dice.choice(seen)
        return left


def opened(kind: type[SlotFile], disk: Disk) -> SlotFile:
    """A slot file on this disk."""
    file = kind(disk.geometry, disk)
    file._words = Words(disk)
    return file


class Run:
    """Random stores, loads and syncs, with what is promised at each entry of the log."""

    def __init__(self, kind: type[SlotFile], dice: random.Random, steps: int = 12) -> None:
        self.kind, self.dice, self.disk = kind, dice, Disk(SMALL)
        self.file = opened(kind, self.disk)
        self.stores: list[tuple[int, int, int, int, bytes]] = []
        """Begin and end in the log, number, slot and key."""
        self.syncs: list[tuple[int, int]] = []
        """End in the log, and the watermark."""
        self.disk.between = lambda: dice.random() < 0.5 and self.store()
        for _ in range(steps):
            dice.choice([self.store, self.store, self.load, self.sync])()

    def store(self) -> None:
        """Store one to three neighbours."""
        slot, began = self.dice.randrange(SMALL.slots), len(self.disk.log)
        keys = [self.dice.choice(KEYS) for _ in range(self.dice.randint(1, min(3, SMALL.slots - slot)))]
        number = self.file.store_run(slot, keys, [memoryview(content(key, SMALL.block_bytes)) for key in keys])
        for place, key in enumerate(keys, slot):
            self.stores.append((began, len(self.disk.log), number, place, key))

    def load(self) -> None:
        view = memoryview(bytearray(SMALL.block_bytes))
        for slot, key, group in self.file.entries()[:1]:
            self.file.load(slot, key, view, group)

    def sync(self) -> None:
        self.file.sync()
        self.syncs.append((len(self.disk.log), self.file.synced))

    def promised(self, cut: int, *, synced: bool) -> dict[int, bytes]:
        """Slot to key of the blocks that must be there: stored (and synced) before the cut, and not overwritten."""
        watermark = max((upto for end, upto in self.syncs if end <= cut), default=0)
        last = {slot: (number, end, key) for began, end, number, slot, key in self.stores if began < cut}
        return {slot: key for slot, (number, end, key) in last.items()
                if end <= cut and (number <= watermark or not synced)}


def wrongs(file: SlotFile, promised: dict[int, bytes], *, whole: bool) -> Iterator[str]:
    """Each law that the file breaks; with ``whole`` an entry alone promises its block."""
    there = {slot: key for slot, key, _ in file.entries()}
    for slot, key in itertools.product(range(SMALL.slots), KEYS):
        view = memoryview(bytearray(SMALL.block_bytes))
        ok = file.load(slot, key, view)
        if ok and bytes(view) != content(key, SMALL.block_bytes):
            yield "wrong bytes"
        if not ok and promised.get(slot) == key:
            yield "lost"
        if not ok and whole and there.get(slot) == key:
            yield "torn"


def broken_by_kills(kind: type[SlotFile], seed: int, cases: int) -> set[str]:
    """The laws that are broken if a process dies after any write."""
    dice, found = random.Random(seed), set[str]()
    for _ in range(cases // 25):
        run = Run(kind, dice)
        for _ in range(25):
            cut = dice.randrange(len(run.disk.log) + 1)
            file = opened(kind, run.disk.killed(cut))
            found.update(wrongs(file, run.promised(cut, synced=False), whole=True))
    return found


def broken_by_power_losses(kind: type[SlotFile], seed: int, cases: int) -> set[str]:
    """The laws that are broken if the power fails after any write."""
    dice, found = random.Random(seed), set[str]()
    for _ in range(cases // 25):
        run = Run(kind, dice)
        for _ in range(25):
            cut = dice.randrange(len(run.disk.log) + 1)
            file = opened(kind, run.disk.powerless(cut, dice))
            found.update(wrongs(file, run.promised(cut, synced=True), whole=False))
    return found


def broken_by_misplacement(kind: type[SlotFile]) -> set[str]:
    """The laws that are broken if the disk exchanges what stands at two places."""
    file, found = opened(kind, disk := Disk(SMALL)), set[str]()
    a, b = KEYS[:2]
    file.store(0, a, memoryview(content(a, SMALL.block_bytes)))
    file.store(1, b, memoryview(content(b, SMALL.block_bytes)))
    words = list(disk.words)
    for at in set(range(ENTRY_WORDS)) - {slot_file.USE}:
        disk.words[at], disk.words[ENTRY_WORDS + at] = words[ENTRY_WORDS + at], words[at]
    if file.entries():
        found.add("an entry of another slot")
    disk.words[:] = words
    disk.words[slot_file.SUM] = words[ENTRY_WORDS + slot_file.SUM]  # a's entry with b's sum, and b's bytes
    disk.words[slot_file.CHECK] = file._check(0, disk.words[:ENTRY_WORDS])
    disk.write(0, [memoryview(content(b, SMALL.block_bytes))])
    if file.load(0, a, memoryview(bytearray(SMALL.block_bytes))):
        found.add("bytes of another key")
    return found


class NoClear(SlotFile):
    """The entry of the block before stays valid while the next one is written."""

    def _clear(self, at: int) -> None:
        pass


class NoSeed(SlotFile):
    """Neither the slot nor the key is part of a check."""

    def _sum(self, key: bytes, group: int, view: memoryview) -> int:
        return xxh3_64_intdigest(view)

    def _check(self, slot: Any, words: Any) -> Any:
        return check_of(0, [*words[:5], words[slot_file.SUM]])


class SumAfterCheck(SlotFile):
    """The entry is valid before it has its sum."""

    def _check(self, slot: Any, words: Any) -> Any:
        return check_of(slot, words[:5])

    def _publish(self, slot: int, at: int, words: list[int], total: int) -> None:
        super()._publish(slot, at, words, 0)
        self._words[at + slot_file.SUM] = total


class ShortKey(SlotFile):
    """A key is known by its first 64 bits."""

    def _key_words(self, key: bytes, group: int) -> list[int]:
        return super()._key_words(key[:8], group)

    def _sum(self, key: bytes, group: int, view: memoryview) -> int:
        return super()._sum(key[:8], group, view)
