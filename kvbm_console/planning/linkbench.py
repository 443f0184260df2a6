"""The worker of ``bench links``: times of copies in memory, and of reads and writes of a file.

It runs in a process of its own, because copies hold the interpreter's lock and a disk that hangs must not hang the
command. It prints the median and the 90th percentile of each kind, depth and size as a line of JSON.

Law of this file: memory is touched before it is measured, and the file has no name while it is used, so nothing is left
behind however the process ends. Imports are the standard library's.
"""

import contextlib
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

SIZES: Final = tuple(2**power for power in range(15, 23))
"""From 32 KiB, a block of a small model, to 4 MiB."""
AREA: Final = 128 * 2**20
"""Bytes that are copied between, and of the file: above the caches of a processor."""
DEPTH: Final = 4
DIRECT: Final = getattr(os, "O_DIRECT", 0)


def touched(size: int) -> mmap.mmap:
    """Memory that is there, page by page."""
    memory = mmap.mmap(-1, size)
    memory[:: mmap.PAGESIZE] = b"\1" * (size // mmap.PAGESIZE)
    return memory


def median(act: Callable[[int], None], size: int, seconds: float, depth: int) -> dict[str, Any]:
    """Nanoseconds of one copy of this size at this depth, and how many were measured."""
    places, dice = AREA // size, random.Random(size)
    took: list[float] = []
    with ThreadPoolExecutor(depth) as pool:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or len(took) < 3:
            offsets = [dice.randrange(places) * size for _ in range(2 * depth)]
            began = time.perf_counter_ns()
            if depth == 1:
                for offset in offsets:
                    act(offset)
            else:
                list(pool.map(act, offsets))
            took.append((time.perf_counter_ns() - began) / len(offsets))
    took.sort()
    return {"p50_ns": round(statistics.median(took)), "p90_ns": round(took[len(took) * 9 // 10]), "rounds": len(took)}


def copies(seconds: float) -> None:
    """Copies in memory."""
    source, target = memoryview(touched(AREA)), memoryview(touched(AREA))
    for size in SIZES:
        def act(offset: int, size: int = size) -> None:
            target[offset : offset + size] = source[AREA - size - offset : AREA - offset]

        tell("memcpy", 1, size, median(act, size, seconds, 1))


def disk(directory: str, seconds: float) -> None:
    """Reads and writes of a nameless file of ``AREA`` bytes, past the page cache where the file system can."""
    with tempfile.TemporaryFile(dir=directory) as made:
        os.posix_fallocate(made.fileno(), 0, AREA)
        memory = memoryview(touched(AREA))
        for at in range(0, AREA, SIZES[-1]):
            os.pwrite(made.fileno(), memory[at : at + SIZES[-1]], at)
        os.fsync(made.fileno())
        file, direct = made.fileno(), False
        with contextlib.suppress(OSError):
            file, direct = os.open(f"/proc/self/fd/{made.fileno()}", os.O_RDWR | DIRECT), bool(DIRECT)
        for kind in ("disk-read", "disk-write"):
            for depth in (1, DEPTH):
                for size in SIZES:
                    def act(offset: int, size: int = size, kind: str = kind, file: int = file) -> None:
                        part = memory[offset : offset + size]
                        if kind == "disk-read":
                            done = os.preadv(file, [part], offset)
                        else:
                            done = os.pwritev(file, [part], offset)
                        if done != size:
                            raise OSError(f"{kind} of {size} bytes moved {done}")

                    tell(kind, depth, size, {**median(act, size, seconds, depth), "direct": direct})
                    os.fdatasync(file)
        if file != made.fileno():
            os.close(file)


def tell(kind: str, depth: int, size: int, row: dict[str, Any]) -> None:
    """One measurement on stdout."""
    print(json.dumps({"kind": kind, "depth": depth, "size_bytes": size, "direct": False, **row}), flush=True)


def main() -> None:
    """Arguments: seconds for each measurement, and a directory or nothing."""
    seconds = float(sys.argv[1])
    copies(seconds)
    for directory in sys.argv[2:]:
        disk(directory, seconds)


if __name__ == "__main__":
    main()
