"""Figures of bytes: copies in memory beside memcpy, copies to disk beside fio, the store of a batch, and the daemon's
share of a report.

Law of this file: both sides of a ratio move the same number of bytes between memory of the same age, in turns. Copies
in memory count the time of the processor, a worker's from the system's own account. Copies to disk count the wall's.
"""

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final, Literal

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
TURN_S: Final = 0.25
"""Time of each side's turn on the disk: short, because other programs and virtual machines use the disk as well."""
DISK_ROUNDS: Final = 41


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
    """A figure of two functions that say how many nanoseconds a block took. Who is first changes with each round."""
    work()
    other()
    ours, theirs = [], []
    for at in range(rounds):
        if at % 2:
            ours.append(work())
            theirs.append(other())
        else:
            theirs.append(other())
            ours.append(work())
    ratios = [mine / one for mine, one in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Figure(
        name, statistics.median(ours), reference, statistics.median(theirs), median, target, compared=False,
        half=(low, high),
    )


def processor_ns(ranks: Ranks) -> int:
    """Time of the processor that the worker of rank 0 has had."""
    return int(Path(f"/proc/{ranks.processes[0]}/schedstat").read_text().split()[0])


class Worker:
    """The worker of a rank with two pools, told to copy scattered blocks to scattered places in orders of 32 blocks,
    four at a time. Each place of a pool has one place of the other, to which and from which it is copied."""

    def __init__(self, size: int, lower: Tier, directory: Path) -> None:
        self.places, dice = ARENA_BYTES // size, np.random.default_rng(2)
        self.ranks = Ranks(
            [RankPool(0, lower, self.places), RankPool(1, Tier.G2 if lower is Tier.G3 else Tier.G1, self.places)], 1,
            size, directory, 16,
        )
        self.ranks.start()
        self._numbers = iter(range(1, 10**9))
        lower_places, upper_places = (dice.permutation(self.places).tolist() for _ in range(2))
        self.ranks.fill(1, upper_places, [place + 1 for place in upper_places])
        while not self.ranks.idle:
            self.ranks.wait(1.0)
        step = min(ORDER_BLOCKS, self.places // DEPTH)  # so that no place is in two orders at once
        self._orders = cycle([
            (pack_ids(lower_places[at : at + step]), pack_ids(upper_places[at : at + step]),
             pack_hashes([place + 1 for place in upper_places[at : at + step]]), step)
            for at in range(0, self.places, step)
        ])
        self.copy("down", blocks=self.places)

    def copy(self, way: Literal["down", "up"], *, blocks: int = 0, until_ns: int = 0) -> int:
        """Copy so many blocks, or until this time; the number of blocks. Nothing is compared, because the route says
        that it is no load."""
        ranks, flying, ordered = self.ranks, list[int](), 0
        while flying or ordered < blocks or time.perf_counter_ns() < until_ns:
            while len(flying) < DEPTH and (ordered < blocks or time.perf_counter_ns() < until_ns):
                lower, upper, keys, count = next(self._orders)
                pools = (1, 0, upper, lower) if way == "down" else (0, 1, lower, upper)
                order = StartTransfer(
                    next(self._numbers), 0, Route.G1_G2, pools[2], pools[3], count, 0, 1, pools[0], pools[1], keys
                )
                ranks.copy(order)
                flying.append(order.operation)
                ordered += count
            ranks.wait(1.0)
            for number in [number for number in flying if ranks.arrived(number)]:
                flying.remove(number)
                assert ranks.outcome(number) == [("", b"")]
        return ordered


def by_worker(size: int) -> Figure:
    """Copies in memory by a worker, beside a copy between its arenas in this process."""
    with tempfile.TemporaryDirectory() as directory:
        worker = Worker(size, Tier.G2, Path(directory))
        with closing(worker.ranks) as ranks:
            source, target = (Arena(ranks.arena(0, pool), worker.places, size) for pool in (1, 0))
            count = PASS_BYTES // size

            def work() -> float:
                began = processor_ns(ranks)
                worker.copy("down", blocks=count)
                return (processor_ns(ranks) - began) / count

            def other() -> float:
                began = time.thread_time_ns()
                np.copyto(target.rows[:count], source.rows[:count])
                return (time.thread_time_ns() - began) / count

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


class Fio:
    """fio, four deep, in a file as large as ours that has all its blocks. It is stopped outside of its turns, and the
    system counts the bytes that it moves: so neither its start nor its pauses are in a turn."""

    def __init__(self, directory: Path, size: int, way: str) -> None:
        path = directory / "fio"
        with path.open("wb") as file:
            for _ in range(ARENA_BYTES // 2**20):
                file.write(os.urandom(2**20))
            os.fsync(file.fileno())
        self._size, self._counter = size, f"{way}_bytes:"
        self._process = subprocess.Popen(
            ["fio", "--thread", "--name=kvbm", f"--filename={path}", f"--rw=rand{way}", f"--bs={size}", "--iodepth=4",
             "--ioengine=libaio", "--direct=1", f"--size={ARENA_BYTES}", "--runtime=1d", "--time_based",
             f"--output={os.devnull}"],
        )
        self._proc = Path(f"/proc/{self._process.pid}")
        while not self._moved():
            assert self._process.poll() is None, "fio has ended"
            os.sched_yield()
        self._stop()

    def turn(self) -> float:
        """Nanoseconds a block."""
        before, began = self._moved(), time.perf_counter_ns()
        self._process.send_signal(signal.SIGCONT)
        while time.perf_counter_ns() < began + TURN_S * 1e9 or self._moved() == before:
            time.sleep(TURN_S / 100)
        self._stop()
        return (time.perf_counter_ns() - began) / (self._moved() - before) * self._size

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _moved(self) -> int:
        words = (self._proc / "io").read_text().split()
        return int(words[words.index(self._counter) + 1])

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        while "State:\tT" not in (self._proc / "status").read_text():
            os.sched_yield()


def disk(size: int, way: Literal["write", "read"]) -> Figure:
    """Copies between memory and slots by a worker, with the sum of each block; beside fio."""
    if shutil.which("fio") is None:
        raise Skipped("fio is not installed")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        worker = Worker(size, Tier.G3, Path(directory))
        with closing(worker.ranks), closing(Fio(Path(directory), size, way)) as fio:

            def work() -> float:
                began = time.perf_counter_ns()
                count = worker.copy("down" if way == "write" else "up", until_ns=int(began + TURN_S * 1e9))
                return (time.perf_counter_ns() - began) / count

            return by_turns(
                f"bytes {'G2>G3' if way == 'write' else 'G3>G2'}, {size >> 10} KiB, a block", work, "fio, 4 deep",
                fio.turn, NINETY, DISK_ROUNDS,
            )


KIB: Final = 1024
WAYS: Final[tuple[Literal["write"], Literal["read"]]] = ("write", "read")
BENCHES: Final[dict[str, Callable[[], Figure]]] = {
    **{f"bytes G1>G2, {size} KiB": partial(copy, size * KIB) for size in (64, 256, 1024, 4096)},
    **{f"bytes G1>G2 by a worker, {size} KiB": partial(by_worker, size * KIB) for size in (256, 1024, 4096)},
    "bytes, batch store": batch_store,
    "bytes, report": report,
    **{f"bytes {way}, {size} KiB": partial(disk, size * KIB, way)
       for size in (256, 2048) for way in WAYS},
}
