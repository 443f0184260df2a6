"""A process that stores blocks in three threads until it is killed (arguments: directory, seed, bytes of a block).

It tells each store on its standard output before it begins and after it has ended.
"""

import itertools
import os
import random
import struct
import sys
import threading
from pathlib import Path

from kvbm_console.bytes.slot_file import SlotFile, SlotGeometry
from tests.bytes.slots import IDENTITY, content

SLOTS = 24
THREADS = 3
TOLD = struct.Struct("<?HQ")
"""True for the end of a store, its slot, and the number that its key has."""


def key_of(slot: int, number: int) -> bytes:
    """The key of a store."""
    return slot.to_bytes(2, "big") * 12 + number.to_bytes(8, "big")


def main() -> None:
    """Store until killed."""
    directory, seed, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    file = SlotFile.open(directory, SlotGeometry(SLOTS, size), IDENTITY, sync_s=0.02)

    def work(thread: int) -> None:
        dice = random.Random(seed * THREADS + thread)
        for number in itertools.count(seed << 32):
            slot = dice.randrange(thread, SLOTS, THREADS)
            block = memoryview(content(key_of(slot, number), size))
            os.write(1, TOLD.pack(False, slot, number))
            file.store(slot, key_of(slot, number), block)
            os.write(1, TOLD.pack(True, slot, number))

    for thread in range(THREADS):
        threading.Thread(target=work, args=(thread,)).start()


if __name__ == "__main__":
    main()
