"""Figures of bytes: copies in memory beside memcpy, copies to disk beside fio, the store of a batch, and the daemon's
share of a report.

Law of this file: both sides of a ratio move the same number of bytes between memory of the same age, in turns. Copies
in memory count the time of the processor, a worker's from the system's own account. Copies to disk count the wall's.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvbm_console.bytes.arena import Arena
from kvbm_console.bytes.memory import make_arena
from kvbm_console.bytes.orders import RankPool
from kvbm_console.bytes.ranks import Ranks
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.ids import Route, Tier
from kvbm_console.core.instructions import StartTransfer
from tests.benchmarks.harness import ROUNDS, Figure, Skipped, Target, measure

ARENA_BYTES: Final = 256 * 2**20
"""Far beyond the caches of a core."""
PASS_BYTES: Final = 64 * 2**20
NINETY: Final = Target(ratio=1 / 0.9)
"""At least 90 % of the speed of the reference."""
SMALL: Final = Target(ratio=1 / 0.85)
"""For blocks of 64 KiB, of which each call costs a good part."""
ORDER_BLOCKS: Final = 32
DEPTH: Final = 4
TURN_S: Final = 0.8
"""Time of each side's turn on the disk."""
DISK_ROUNDS: Final = 15


def arenas(size: int) -> tuple[Arena, Arena, list[int]]:
    """Two populated arenas of blocks of this size, and their descriptors; every block of the first holds itself + 1."""
    places = ARENA_BYTES // size
    descriptors = [make_arena(f"bench-{at}", places, size) for at in range(2)]
    first, second = (Arena(fd, places, size) for fd in descriptors)
    for arena in (first, second):
        arena.populate()
    first.keys[:] = np.arange(1, places + 1, dtype=np.uint64)
    return first, second, descriptors


def copy(size: int) -> Figure:
    """Scattered blocks to scattered places, beside one copy of as many bytes."""
    source, target, descriptors = arenas(size)
    count, dice = PASS_BYTES // size, np.random.default_rng(1)
    sources, targets = (dice.permutation(len(source.rows))[:count].tolist() for _ in range(2))
    keys = [place + 1 for place in sources]
    figure = measure(
        f"bytes G1>G2, {size >> 10} KiB, a block", lambda: target.copy(source, sources, targets, keys), count,
        "one memcpy", lambda: np.copyto(target.rows[:count], source.rows[:count]), count,
        SMALL if size <= 64 * KIB else NINETY,
    )
    for fd in descriptors:
        os.close(fd)
    return figure


def by_turns(
    name: str, work: Callable[[], float], reference: str, other: Callable[[], float], target: Target, rounds: int
) -> Figure:
    """A figure of two functions that say how many nanoseconds a block took."""
    work()
    other()
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(work())
        theirs.append(other())
    ratios = [mine / one for mine, one in zip(ours, theirs, strict=True)]
    return Figure(
        name, statistics.median(ours), reference, statistics.median(theirs), statistics.median(ratios), target,
        compared=False,
    )


def processor_ns(ranks: Ranks) -> int:
    """Time of the processor that the worker of rank 0 has had."""
    return int(Path(f"/proc/{ranks.processes[0]}/schedstat").read_text().split()[0])


class Worker:
    """The worker of a rank with two pools, told to copy scattered blocks in orders of 32, four at a time."""

    def __init__(self, size: int, lower: Tier, directory: Path) -> None:
        self.places, self.count = ARENA_BYTES // size, PASS_BYTES // size
        self.ranks = Ranks(
            [RankPool(0, lower, self.places), RankPool(1, Tier.G2 if lower is Tier.G3 else Tier.G1, self.places)], 1,
            size, directory, 16,
        )
        self.ranks.start()
        self._numbers = iter(range(1, 10**9))
        self._dice = np.random.default_rng(2)
        self._held: dict[int, int] = {}
        """The block in each lower place."""
        self.ranks.fill(1, range(self.places), range(1, self.places + 1))
        while not self.ranks.idle:
            self.ranks.wait(1.0)
        everything = list(range(self.places))
        self._run(1, 0, everything, everything)
        self._held = {place: place + 1 for place in everything}

    def down(self) -> int:
        """Copy a pass to the lower pool; the number of blocks."""
        chosen, to = (self._dice.permutation(self.places)[: self.count].tolist() for _ in range(2))
        self._run(1, 0, chosen, to)
        self._held |= {place: source + 1 for source, place in zip(chosen, to, strict=True)}
        return self.count

    def up(self) -> int:
        """Copy about a pass from the lower pool to the places where its blocks are from; the number of blocks.

        Nothing is compared, because the route says that it is no load."""
        chosen = self._dice.permutation(self.places).tolist()
        of = {self._held[place] - 1: place for place in chosen}  # each target once
        to = list(of)[: self.count]
        self._run(0, 1, [of[place] for place in to], to)
        return len(to)

    def _run(self, source_pool: int, target_pool: int, sources: list[int], targets: list[int]) -> None:
        held = {place: place + 1 for place in range(self.places)} if source_pool else self._held
        orders = [
            StartTransfer(
                next(self._numbers), 0, Route.G1_G2, pack_ids(sources[at : at + ORDER_BLOCKS]),
                pack_ids(targets[at : at + ORDER_BLOCKS]), len(sources[at : at + ORDER_BLOCKS]), 0, 1, source_pool,
                target_pool, pack_hashes([held[place] for place in sources[at : at + ORDER_BLOCKS]]),
            ) for at in range(0, len(sources), ORDER_BLOCKS)
        ]
        ranks, flying = self.ranks, list[int]()
        while orders or flying:
            while orders and len(flying) < DEPTH:
                order = orders.pop()
                flying.append(order.operation)
                ranks.copy(order)
            ranks.wait(1.0)
            for number in [number for number in flying if ranks.arrived(number)]:
                flying.remove(number)
                assert ranks.outcome(number) == [("", b"")]


def by_worker(size: int) -> Figure:
    """Copies in memory by a worker, beside a copy between its arenas in this process."""
    with tempfile.TemporaryDirectory() as directory:
        worker = Worker(size, Tier.G2, Path(directory))
        with closing(worker.ranks) as ranks:
            source, target = (Arena(ranks.arena(0, pool), worker.places, size) for pool in (1, 0))

            def work() -> float:
                began = processor_ns(ranks)
                count = worker.down()
                return (processor_ns(ranks) - began) / count

            def other() -> float:
                began = time.thread_time_ns()
                np.copyto(target.rows[: worker.count], source.rows[: worker.count])
                return (time.thread_time_ns() - began) / worker.count

            return by_turns(
                f"bytes G1>G2 by a worker, {size >> 10} KiB, a block", work, "one memcpy here", other, NINETY, ROUNDS)


def batch_store() -> Figure:
    """256 tokens of 128 KiB in 16 blocks, with one check and one change of the index, beside one copy."""
    tokens, size = 256, 16 * 128 * 1024
    source, target, descriptors = arenas(size)
    count = tokens // 16
    rows, keys = source.rows[:count], list(range(1, count + 1))
    targets = np.random.default_rng(3).permutation(len(target.rows))[:count].tolist()
    figure = measure(
        "bytes, batch store, a token of 128 KiB", lambda: target.store(targets, rows, keys), tokens,
        "one memcpy", lambda: np.copyto(target.rows[:count], rows), tokens, NINETY,
    )
    for fd in descriptors:
        os.close(fd)
    return figure


def report() -> Figure:
    """The daemon's thread from an order of one block to its report, 64 at a time, beside a message there and back."""
    pools = [RankPool(0, Tier.G2, 256), RankPool(1, Tier.G1, 256)]
    with tempfile.TemporaryDirectory() as directory, closing(Ranks(pools, 1, 4096, Path(directory), 16)) as ranks:
        ranks.start()
        ranks.fill(1, range(256), range(1, 257))
        orders = [
            StartTransfer(at, 0, Route.G1_G2, pack_ids([at]), pack_ids([at]), 1, 0, 1, 1, 0, pack_hashes([at + 1]))
            for at in range(64)
        ]

        def work() -> None:
            for order in orders:
                ranks.copy(order)
            while not ranks.idle:
                ranks.wait(1.0)
            for order in orders:
                ranks.outcome(order.operation)

        read, write = os.pipe()

        def other() -> None:
            os.write(write, b"x" * 64)
            os.read(read, 64)

        return measure(
            "bytes, the daemon's time for a report", work, 64, "64 bytes through a pipe", other, 1, Target(ns=10_000)
        )


def fio(directory: Path, size: int, way: str) -> float:
    """Nanoseconds a block of fio, four deep, into a file of its own as large as ours."""
    done = subprocess.run(
        ["fio", "--name=kvbm", f"--filename={directory / 'fio'}", f"--rw=rand{way}", f"--bs={size}", "--iodepth=4",
         "--ioengine=libaio", "--direct=1", f"--size={ARENA_BYTES}", f"--runtime={TURN_S}", "--time_based",
         "--output-format=json"],
        capture_output=True, check=True,
    )
    return size / float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"]) * 1e9


def disk(size: int, way: str) -> Figure:
    """Copies between memory and slots by a worker, with the sum of each block; beside fio."""
    if shutil.which("fio") is None:
        raise Skipped("fio is not installed")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        worker = Worker(size, Tier.G3, Path(directory))
        with closing(worker.ranks):

            def work() -> float:
                began, count = time.perf_counter_ns(), 0
                while time.perf_counter_ns() < began + TURN_S * 1e9:
                    count += worker.down() if way == "write" else worker.up()
                return (time.perf_counter_ns() - began) / count

            fio(Path(directory), size, "write")  # its file is made before the first measurement
            return by_turns(
                f"bytes {'G2>G3' if way == 'write' else 'G3>G2'}, {size >> 10} KiB, a block", work, "fio, 4 deep",
                partial(fio, Path(directory), size, way), NINETY, DISK_ROUNDS,
            )


KIB: Final = 1024
BENCHES: Final[dict[str, Callable[[], Figure]]] = {
    **{f"bytes G1>G2, {size} KiB": partial(copy, size * KIB) for size in (64, 256, 1024, 4096)},
    **{f"bytes G1>G2 by a worker, {size} KiB": partial(by_worker, size * KIB) for size in (256, 1024, 4096)},
    "bytes, batch store": batch_store,
    "bytes, report": report,
    **{f"bytes {way}, {size} KiB": partial(disk, size * KIB, way)
       for size in (256, 2048) for way in ("write", "read")},
}
