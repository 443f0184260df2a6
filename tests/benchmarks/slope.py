"""The slope of a service's memory: ``python -m tests.benchmarks.slope [--events N] [--eviction NAME]``.

The recorded service of ``tests/server/test_memory_bounds.py`` runs on virtual time, with all bounds low. Python takes
every object from the native allocator, so one number has all bytes in use, those of libraries included. The allocator
counts the freed pieces that it caches for each size and thread as in use. These caches fill for hours, so they are off.
Garbage in cycles is collected before each look: Python leaves it for millions of events, until it is a quarter of what
lives long. The lowest number of a window is a floor, which requests in flight do not move. A line is fitted through the
floors.

Law of this file: the result has its error, twice the standard error of the fit.
"""

import argparse
import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Final

from tests.server.test_memory_bounds import BOUNDS, machine, run_to

WARM_EVENTS: Final = 250_000
WINDOW_EVENTS: Final = 250_000
SAMPLE_EVENTS: Final = 10_000
PER_EVENTS: Final = 100_000_000
NEEDED: Final = {
    "PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
"""The environment of a process whose every byte is counted, and no cached one."""


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]


def bytes_in_use() -> int:
    """Bytes that the native allocator has given out."""
    native = ctypes.CDLL(None)
    native.mallinfo2.restype = _Mallinfo
    told = native.mallinfo2()
    return int(told.uordblks + told.hblkhd)


def fit(floors: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(slope, twice its standard error) of the least-squares line through these points."""
    count = len(floors)
    middle_x, middle_y = (sum(values) / count for values in zip(*floors, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in floors)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in floors) / spread
    rest = sum((y - middle_y - slope * (x - middle_x)) ** 2 for x, y in floors)
    return slope, 2 * sqrt(rest / (count - 2) / spread)


def main() -> int:
    """Run, and print the floors and the slope behind each floor from the third one on."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.slope", description="The slope of memory.")
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--eviction", default="lrfu_auto")
    said = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in NEEDED.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.benchmarks.slope", *sys.argv[1:]],
                  {**os.environ, **NEEDED})
    for module, name, bound in BOUNDS:
        setattr(module, name, bound)
    floors: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as directory, machine(Path(directory), said.eviction) as (service, rig):
        run_to(service, rig, WARM_EVENTS)
        assert service.recorder is not None
        while service.state.seq < said.events:
            first, samples = service.state.seq, list[int]()
            while service.state.seq < first + WINDOW_EVENTS:
                run_to(service, rig, service.state.seq + SAMPLE_EVENTS)
                while not service.recorder.settle():
                    print("the disk is slow", file=sys.stderr)
                gc.collect()
                samples.append(bytes_in_use())
            floors.append((first, min(samples)))
            told = ""
            if len(floors) > 2:
                slope, error = (part * PER_EVENTS / 1e6 for part in fit(floors))
                told = f"   {slope:+.2f} +- {error:.2f} MB per 10^8 events"
            print(f"{first:>12,} events  {floors[-1][1]:,} bytes{told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
