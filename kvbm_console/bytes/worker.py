"""The process of one rank: it maps the arenas, carries out orders and answers them. Started by ``bytes.ranks``.

Law of this file: an order is answered when its bytes are there, not before. The process ends when the daemon closes
the socket.
"""

import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from kvbm_console.bytes.arena import NOTHING, Arena, bounds
from kvbm_console.bytes.contents import BlockContents
from kvbm_console.bytes.orders import (
    LAST_WORDS,
    PART_BLOCKS,
    RECEIVE_BYTES,
    AnyOrder,
    CheckOrder,
    CopyOrder,
    FillOrder,
    RankFound,
    RankReply,
    RankSetup,
    SpoilOrder,
    ZeroOrder,
)
from kvbm_console.bytes.slot_file import SlotFile, SlotFileRefused, SlotGeometry, SlotIdentity
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids

DESCRIPTORS_MAX: Final = 16
DISK_THREADS: Final = 8
"""Reads and writes of the disk at the same time: more than the disk is to have, because each thread also takes the sum
of its block and waits for a core."""
RUN_BYTES: Final = 2**20
"""One call moves neighbours of at most this size: larger calls gain nothing, and the threads share what is left."""
FILL_BYTES: Final = 8 * 2**20
"""Blocks are computed in batches of about this size."""
Answer = tuple[str, list[int]]
"""Why blocks failed, and their positions."""
DONE: Final[Answer] = ("", [])
OTHER_BLOCK: Final = "the source holds another block"
OTHER_BYTES: Final = "the bytes are not those of the block"


class RankWorker:
    """The pools of a rank. Each method carries out one kind of order."""

    def __init__(self, setup: RankSetup, descriptors: list[int]) -> None:
        self.fresh = setup.fresh
        self._setup = setup
        self.contents = BlockContents(setup.rank, setup.shard_bytes)
        self.arenas: dict[int, Arena] = {}
        self.files: dict[int, SlotFile] = {}
        self._disk = ThreadPoolExecutor(DISK_THREADS, "kvbm-disk")
        self._running: set[Future[None]] = set()
        for pool in setup.pools:
            if pool.in_memory:
                self.arenas[pool.pool] = Arena(descriptors.pop(0), pool.places, setup.shard_bytes)
                if setup.fresh:
                    self.arenas[pool.pool].populate()
            else:
                about = setup.identity
                self.files[pool.pool] = SlotFile.open(
                    Path(setup.directory), SlotGeometry(pool.places, setup.shard_bytes),
                    SlotIdentity("simulated", "bytes", about.layout, about.block_tokens, setup.rank, about.ranks,
                                 "xxh3_64", "0"),
                )
        self.run_blocks = max(1, RUN_BYTES // setup.shard_bytes)
        """Blocks that one call moves."""
        self._batch = max(1, FILL_BYTES // setup.shard_bytes)
        # A mapping of its own is aligned to pages.
        scratch = np.frombuffer(mmap.mmap(-1, self._batch * setup.shard_bytes), np.uint8)
        self._scratch = scratch.reshape(self._batch, setup.shard_bytes)

    def found(self) -> Iterator[RankFound]:
        """The blocks that the files have from before."""
        for pool, file in self.files.items():
            entries = [(slot, int.from_bytes(key, "little")) for slot, key, _ in file.entries()]
            for at in range(0, len(entries), PART_BLOCKS):
                slots, keys = zip(*entries[at : at + PART_BLOCKS], strict=True)
                yield RankFound(pool, pack_ids(slots), pack_hashes(keys))

    def carry_out(self, order: AnyOrder) -> Answer:
        """Carry out an order in memory; the answer when it is done."""
        return _CARRY_OUT[type(order)](self, order)

    def begin(self, order: CopyOrder, done: Callable[[RankReply], None]) -> None:
        """Begin a copy from or to a file: ``done`` is called in another thread when its last block has ended."""
        copy = _DiskCopy(self, order, done)
        for _ in range(min(DISK_THREADS, len(copy.keys))):
            task = self._disk.submit(copy.run)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def settle(self) -> None:
        """Wait for all copies that run."""
        wait(list(self._running))

    def _copy(self, order: CopyOrder) -> Answer:
        source, target = self.arenas[order.source_pool], self.arenas[order.target_pool]
        targets, keys = unpack_ids(order.targets), unpack_hashes(order.keys)
        wrong = target.copy(source, unpack_ids(order.sources), targets, keys)
        if wrong:
            return OTHER_BLOCK, wrong
        return self._compared(target, targets, keys) if order.compare else DONE

    def _fill(self, order: FillOrder) -> Answer:
        arena, places, keys = self.arenas[order.pool], unpack_ids(order.places), unpack_hashes(order.keys)
        for at in range(0, len(places), self._batch):
            part = keys[at : at + self._batch]
            rows = self._scratch[: len(part)]
            self.contents.write(rows, part)
            arena.store(places[at : at + self._batch], rows, part)
        return DONE

    def _check(self, order: CheckOrder) -> Answer:
        return self._compared(self.arenas[order.pool], unpack_ids(order.places), unpack_hashes(order.keys))

    def _compared(self, arena: Arena, places: list[int], keys: list[int]) -> Answer:
        wrong = self.contents.differing(arena.rows, places, keys)
        return (OTHER_BYTES, wrong) if wrong else DONE

    def _spoil(self, order: SpoilOrder) -> Answer:
        self.arenas[order.pool].spoil(unpack_ids(order.places))
        return DONE

    def _zero(self, order: ZeroOrder) -> Answer:
        self.settle()
        (self.arenas.get(order.pool) or self.files[order.pool]).zero()
        return DONE


class _DiskCopy:
    """A copy from or to a file, block by block in the threads of the disk."""

    def __init__(self, worker: RankWorker, order: CopyOrder, done: Callable[[RankReply], None]) -> None:
        self._order = order
        self._contents = worker.contents
        self._done = done
        self._began_ns = time.monotonic_ns()
        self._sources, self._targets = unpack_ids(order.sources), unpack_ids(order.targets)
        self.keys: list[int] = unpack_hashes(order.keys)
        self._file = worker.files.get(order.source_pool) or worker.files[order.target_pool]
        self._loads = order.source_pool in worker.files
        self._arena = worker.arenas[order.target_pool if self._loads else order.source_pool]
        self._runs = iter(list(self._neighbours(worker.run_blocks)))
        """Each run is taken once: the interpreter's lock makes a step of it whole."""
        self._left = len(self.keys)
        self._counting = threading.Lock()
        self._error = ""
        self._failed: list[int] = []

    def run(self) -> None:
        """Move runs that no other thread has taken, until there are none; the last to end answers."""
        move, moved = self._load if self._loads else self._store, 0
        for run in self._runs:
            parts = [run]
            for part in parts:
                try:
                    error = move(part)
                except OSError as failure:
                    error = failure.strerror or str(failure)
                if error and len(part) > 1:
                    parts += [range(block, block + 1) for block in part]  # a failed block takes no neighbour along
                elif error:
                    self._error = self._error or error
                    self._failed.append(part[0])
            moved += len(run)
        with self._counting:
            self._left -= moved
            if self._left or not moved:
                return
        for slot in reversed(self._sources if self._loads else self._targets):
            self._file.touch(slot)  # what continues a block is older than the block
        self._done(RankReply(
            self._order.number, self._error, pack_ids(sorted(self._failed)), time.monotonic_ns() - self._began_ns
        ))

    def _neighbours(self, blocks_max: int) -> Iterator[range]:
        """The blocks in runs, whose places on disk follow each other."""
        for begin, end in pairwise(bounds(self._sources if self._loads else self._targets)):
            for at in range(begin, end, blocks_max):
                yield range(at, min(at + blocks_max, end))

    def _store(self, run: range) -> str:
        places, keys = self._sources[run.start : run.stop], self.keys[run.start : run.stop]
        if self._arena.keys[places].tolist() != keys:
            return OTHER_BLOCK
        self._file.store_run(
            self._targets[run.start], _bytes_of(keys), [memoryview(self._arena.rows[place]) for place in places]
        )
        return ""

    def _load(self, run: range) -> str:
        places, keys = self._targets[run.start : run.stop], self.keys[run.start : run.stop]
        self._arena.keys[places] = NOTHING
        rows = [self._arena.rows[place] for place in places]
        if not self._file.load_run(self._sources[run.start], _bytes_of(keys), [memoryview(row) for row in rows]):
            return "the slot has no whole block of this hash"
        self._arena.keys[places] = keys
        if self._order.compare and not all(map(self._contents.is_block, rows, keys)):
            return OTHER_BYTES
        return ""


def _bytes_of(keys: list[int]) -> list[bytes]:
    """Hashes as keys of a slot file."""
    return [key.to_bytes(8, "little") for key in keys]


_CARRY_OUT: Final[dict[type[Any], Callable[[RankWorker, Any], Answer]]] = {
    CopyOrder: RankWorker._copy, FillOrder: RankWorker._fill, CheckOrder: RankWorker._check,
    SpoilOrder: RankWorker._spoil, ZeroOrder: RankWorker._zero,
}


def serve(channel: socket.socket) -> None:
    """Carry out orders until the other side closes."""
    encode = msgspec.msgpack.Encoder().encode
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, RECEIVE_BYTES, DESCRIPTORS_MAX)
        began_ns = time.monotonic_ns()
        worker = RankWorker(msgspec.msgpack.decode(data, type=RankSetup), descriptors)
        for fd in descriptors:
            os.close(fd)
        if worker.fresh:
            for found in worker.found():
                channel.send(encode([found]))
        channel.send(encode([RankReply(0, "", b"", time.monotonic_ns() - began_ns)]))
        orders = msgspec.msgpack.Decoder(list[AnyOrder])

        def answer(reply: RankReply) -> None:
            channel.send(msgspec.msgpack.encode([reply]))

        received = memoryview(bytearray(RECEIVE_BYTES))
        while size := channel.recv_into(received):
            replies = []
            for order in orders.decode(received[:size]):
                if isinstance(order, CopyOrder) and {order.source_pool, order.target_pool} & worker.files.keys():
                    worker.begin(order, answer)
                    continue
                began_ns = time.monotonic_ns()
                error, failed = worker.carry_out(order)
                replies.append(RankReply(order.number, error, pack_ids(failed), time.monotonic_ns() - began_ns))
            if replies:
                channel.send(encode(replies))
    except (BrokenPipeError, ConnectionResetError):
        return  # the daemon has gone
    except Exception as error:
        words = str(error) if isinstance(error, SlotFileRefused) else f"{type(error).__name__}: {error}"
        channel.send(encode([RankReply(LAST_WORDS, words, b"", 0)]))
        os._exit(1)  # without waiting for copies: nobody would hear of them


def main() -> None:
    """Serve on the descriptor that the command line names."""
    serve(socket.socket(fileno=int(sys.argv[1])))
