"""The workers of all ranks, as the daemon sees them: orders go out, replies come in, and the dead are replaced.

Law of this file: a worker is dead when its pidfd says so, not when its socket breaks. Until then its copies may still
write. An order is kept until it is answered, and told again to the next worker of the rank, in order. Only copies
that a worker took with it are not: they have failed on this rank. A silent worker is warned of, and its copies end only
with its process.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.bytes.memory import (
    PAGE,
    arena_bytes,
    make_arena,
    require_memory,
    require_room,
    slot_bytes,
)
from kvbm_console.bytes.orders import (
    LAST_WORDS,
    MESSAGE_BYTES,
    PART_BLOCKS,
    RECEIVE_BYTES,
    AnyOrder,
    CheckOrder,
    CopyOrder,
    FillOrder,
    RankFound,
    RankIdentity,
    RankPool,
    RankReply,
    RankSetup,
    SpoilOrder,
    ZeroOrder,
)
from kvbm_console.core.columns import HASH_BYTES, ID_BYTES, pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.errors import UsageError
from kvbm_console.core.instructions import StartTransfer

WORKER: Final = "from kvbm_console.bytes.worker import main; main()"
START_S: Final = 120.0
"""Time for all workers to have their memory from the system."""
SILENT_S: Final = 5.0
"""A worker that owes an answer and gives none for so long is warned of."""
KILL_S: Final = 60.0
"""And after this time it is killed, so that its copies end."""
LOOK_S: Final = 0.5
CLOSE_S: Final = 2.0
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 10.0
"""Pauses before a worker that died without an answer is replaced; each is twice the last."""
WELL: Final = ("", b"")
"""The outcome of a rank whose part went well."""
CROWD: Final = 4_096
"""Unanswered orders of a rank beyond which the engine waits."""
RANKS_MAX: Final = 64
"""Each is a process."""


class BytesReport(msgspec.Struct):
    """The work of the workers and its findings. Counts of blocks and bytes are over all ranks."""

    moved_bytes: int = 0
    compared_blocks: int = 0
    wrong_blocks: int = 0
    """Blocks that a request would have used and that were not what they must be: reused prefixes."""
    failed_blocks: int = 0
    """Blocks of copies that did not arrive, or not as they must be; their copies have failed."""
    misused_places: int = 0
    """Places that were given away, filled or written while a copy used them."""
    deaths: int = 0

    @property
    def sound(self) -> bool:
        """True if no wrong byte was used and no place was used under a running copy."""
        return not (self.wrong_blocks or self.misused_places)


class _RankCopy:
    """An operation while its bytes move."""

    __slots__ = ("errors", "failed", "left", "lost", "order", "sources", "targets")

    def __init__(self, order: StartTransfer) -> None:
        self.order = order
        self.sources = unpack_ids(order.sources)
        self.targets = unpack_ids(order.targets)
        self.left = 0
        """Unanswered orders of all ranks."""
        self.failed: dict[int, set[int]] = {}
        """Failed blocks by rank."""
        self.errors: dict[int, str] = {}
        self.lost: set[int] = set()
        """Ranks whose failure has been told."""


class _Pending:
    """An order that a rank has not answered."""

    __slots__ = ("at", "blocks", "copy", "encoded", "kind")

    def __init__(self, kind: type, encoded: msgspec.Raw, blocks: int, copy: _RankCopy | None, at: int) -> None:
        self.kind = kind
        self.encoded = encoded
        self.blocks = blocks
        self.copy = copy
        self.at = at
        """Position of its first block in the copy."""


class _Rank:
    def __init__(self, rank: int, arenas: list[int]) -> None:
        self.rank = rank
        self.arenas = arenas
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None
        self.pidfd = -1
        self.ready = False
        self.pending: dict[int, _Pending] = {}
        self.outbox: deque[msgspec.Raw] = deque()
        self.heard = 0.0
        """When it answered last, or began to owe an answer."""
        self.warned = False
        self.killed = False
        self.pause_s = 0.0
        self.starts = 0.0
        """When its next worker is started, while it has none."""
        self.last_words = ""
        self.found: dict[int, list[tuple[int, int]]] = {}
        """Pool to the places and hashes that its slot file had at the start, the least recently used first."""

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


class Ranks:
    """The ranks of one engine. ``pools`` are the leader's, each rank holding ``shard_bytes`` of every block.

    ``ended(name, why)`` and ``begun(name)`` are called when a worker died and when it was replaced. ``trouble(name,
    why)`` is called when it does not answer, or when a reused prefix is wrong, and ``lost(operation, epoch, rank,
    why)`` when a rank can no longer finish a copy. ``command`` starts a worker, with the number of a descriptor behind
    it.
    """

    def __init__(
        self, pools: Sequence[RankPool], ranks: int, shard_bytes: int, directory: Path, block_tokens: int, *,
        command: Sequence[str] | None = None,
    ) -> None:
        if not 1 <= ranks <= RANKS_MAX:
            raise UsageError(f"--ranks must be from 1 to {RANKS_MAX} with --bytes, got {ranks}")
        if shard_bytes % PAGE:
            raise UsageError(
                f"--bytes must have blocks of a multiple of {PAGE} bytes on each rank, got {shard_bytes}: change "
                "--block-size, --kv-geometry or --ranks"
            )
        self.pools = {pool.pool: pool for pool in pools}
        self.shard_bytes = shard_bytes
        self.report = BytesReport()
        self.ended: Callable[[str, str], None] = lambda name, why: None
        self.begun: Callable[[str], None] = lambda name: None
        self.trouble: Callable[[str, str], None] = lambda name, why: None
        self.lost: Callable[[int, int, int, str], None] = lambda operation, epoch, rank, why: None
        self._directory = directory
        self._identity = RankIdentity(f"page-first {shard_bytes}", block_tokens, ranks)
        self._command = command or (sys.executable, "-P", "-c", WORKER)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[RankFound | RankReply]).decode
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._numbers = 0
        self._copies: dict[int, _RankCopy] = {}
        self._zeroing: set[int] = set()
        self._reading: dict[int, Counter[int]] = {pool.pool: Counter() for pool in pools}
        """Of each pool: how many running copies read a place."""
        self._writing: dict[int, set[int]] = {pool.pool: set() for pool in pools}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._moved: asyncio.Event | None = None
        self._watched: dict[int, bool] = {}
        """Descriptors that the loop watches, and whether for room to write."""
        self._closed = False
        self._last_death = ""
        on_disk = sum(slot_bytes(pool.places, shard_bytes) for pool in pools if not pool.in_memory)
        homes = [directory / f"rank-{rank}" for rank in range(ranks)]
        require_room(directory, on_disk * sum(not (home / "index").exists() for home in homes))
        in_memory = [pool for pool in pools if pool.in_memory]
        require_memory(ranks * sum(arena_bytes(pool.places, shard_bytes) for pool in in_memory))
        self._ranks = [
            _Rank(rank, [make_arena(f"kvbm-{pool.tier.name}-{rank}", pool.places, shard_bytes) for pool in in_memory])
            for rank in range(ranks)
        ]

    # --- life ---

    def start(self) -> None:
        """Start all workers and wait until they have their memory. Raises ``UsageError`` with the reason of one that
        cannot."""
        for one in self._ranks:
            self._spawn(one, fresh=True)
        until = time.monotonic() + START_S
        while not all(one.ready for one in self._ranks):
            if self._last_death:
                self.close()
                raise UsageError(f"--bytes: {self._last_death}")
            if time.monotonic() > until:
                self.close()
                raise UsageError(f"--bytes must have its memory from the system within {START_S:.0f} s")
            self.wait(LOOK_S)

    def close(self) -> None:
        """End all workers, and give the memory back when they have ended. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for one in self._ranks:
            self._unwatch(one)
            if one.channel is not None:
                one.channel.close()
        until = time.monotonic() + CLOSE_S
        for one in self._ranks:
            if one.process is not None:
                try:
                    one.process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    one.process.kill()
                    one.process.wait()
                os.close(one.pidfd)
            for fd in one.arenas:
                os.close(fd)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this loop watch the workers from now on, instead of ``wait``."""
        self._loop = loop
        self._moved = asyncio.Event()
        for one in self._ranks:
            self._watch(one)
        loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        if not self._closed and self._loop is not None:
            self._look()
            self._loop.call_later(LOOK_S, self._look_again)

    async def moved(self) -> None:
        """Return when a worker has answered, has died or was replaced, at the latest after a moment."""
        assert self._moved is not None, "attach comes first"
        try:
            async with asyncio.timeout(LOOK_S):
                await self._moved.wait()
        except TimeoutError:
            pass
        self._moved.clear()

    # --- state ---

    def found(self, pool: int) -> tuple[list[int], list[int]]:
        """Places and hashes of the blocks that every rank had in this pool at the start, the least recently used
        first. A block that is there twice is found at its latest place."""
        first, *others = [one.found.get(pool, []) for one in self._ranks]
        everywhere = set(first).intersection(*others)
        place_of = {key: place for place, key in first if (place, key) in everywhere}
        latest = [(place, key) for place, key in first if place_of.get(key) == place]
        return [place for place, _ in latest], [key for _, key in latest]

    @property
    def crowded(self) -> bool:
        """True if a rank is so far behind that the engine must wait."""
        return any(len(one.pending) > CROWD for one in self._ranks) or bool(self._zeroing)

    @property
    def idle(self) -> bool:
        """True if no rank owes an answer."""
        return not any(one.pending for one in self._ranks)

    @property
    def names(self) -> list[str]:
        """``rank 0`` and so on."""
        return [one.name for one in self._ranks]

    @property
    def processes(self) -> list[int | None]:
        """The process of each rank; None while it has none."""
        return [None if one.process is None else one.process.pid for one in self._ranks]

    def arena(self, rank: int, pool: int) -> int:
        """The descriptor of an arena, for who looks at its bytes."""
        at = [one.pool for one in self.pools.values() if one.in_memory].index(pool)
        return self._ranks[rank].arenas[at]

    # --- orders ---

    def copy(self, order: StartTransfer) -> None:
        """Begin a copy on every rank."""
        copy = self._copies[order.operation] = _RankCopy(order)
        self._claim(copy)
        if order.blocks <= PART_BLOCKS:
            self._order(
                CopyOrder(0, order.source_pool, order.target_pool, order.sources, order.targets, order.hashes,
                          order.route.is_load),
                order.blocks, copy,
            )
            return
        for at in range(0, order.blocks, PART_BLOCKS):
            self._order(
                CopyOrder(
                    0, order.source_pool, order.target_pool,
                    order.sources[at * ID_BYTES : (at + PART_BLOCKS) * ID_BYTES],
                    order.targets[at * ID_BYTES : (at + PART_BLOCKS) * ID_BYTES],
                    order.hashes[at * HASH_BYTES : (at + PART_BLOCKS) * HASH_BYTES], order.route.is_load,
                ),
                min(PART_BLOCKS, order.blocks - at), copy, at,
            )

    def arrived(self, operation: int) -> bool:
        """True if every rank has ended its part of a copy, well or not."""
        return not self._copies[operation].left

    def outcome(self, operation: int) -> list[tuple[str, bytes] | None]:
        """The error and the failed blocks of each rank of an arrived copy, which is forgotten. Empty error: it went
        well. None: its failure was told by ``lost``."""
        copy = self._copies.pop(operation)
        if not (copy.failed or copy.lost):
            return [WELL] * copy.order.ranks
        return [
            None if rank in copy.lost
            else (copy.errors.get(rank, ""), pack_ids(sorted(copy.failed.get(rank, ()))))
            for rank in range(copy.order.ranks)
        ]

    def fill(self, pool: int, places: Sequence[int], hashes: Sequence[int]) -> None:
        """These places have been computed."""
        self._require_unused(pool, places)
        for at in range(0, len(places), PART_BLOCKS):
            ids, keys = places[at : at + PART_BLOCKS], hashes[at : at + PART_BLOCKS]
            self._order(FillOrder(0, pool, pack_ids(ids), pack_hashes(keys)), len(ids))

    def check(self, pool: int, places: Sequence[int], hashes: Sequence[int]) -> None:
        """A request uses these places as the blocks of these hashes: compare them."""
        self.report.misused_places += len(self._writing[pool].intersection(places))
        for at in range(0, len(places), PART_BLOCKS):
            ids, keys = places[at : at + PART_BLOCKS], hashes[at : at + PART_BLOCKS]
            self._order(CheckOrder(0, pool, pack_ids(ids), pack_hashes(keys)), len(ids))

    def spoil(self, pool: int, places: Sequence[int]) -> None:
        """These places were given to a request, which has computed nothing in them yet."""
        self._require_unused(pool, places)
        for at in range(0, len(places), PART_BLOCKS):
            ids = places[at : at + PART_BLOCKS]
            self._order(SpoilOrder(0, pool, pack_ids(ids)), len(ids))

    def zero(self, pool: int) -> None:
        """Overwrite a pool; ``crowded`` until every rank has."""
        self._order(ZeroOrder(0, pool), 0)
        self._zeroing.add(self._numbers)

    def _order(self, order: AnyOrder, blocks: int, copy: _RankCopy | None = None, at: int = 0) -> None:
        self._numbers += 1
        order.number = self._numbers
        encoded = msgspec.Raw(self._encode(order))
        now = time.monotonic()
        for one in self._ranks:
            if not one.pending:
                one.heard = now
            one.pending[order.number] = _Pending(type(order), encoded, blocks, copy, at)
            one.outbox.append(encoded)
        if copy is not None:
            copy.left += len(self._ranks)

    # --- places under a copy ---

    def _claim(self, copy: _RankCopy) -> None:
        order, sources, targets = copy.order, copy.sources, copy.targets
        written = self._writing[order.source_pool]
        if written:
            self.report.misused_places += len(written.intersection(sources))
        self._require_unused(order.target_pool, targets)
        reading = self._reading[order.source_pool]
        for place in sources:
            reading[place] += 1
        self._writing[order.target_pool].update(targets)

    def _release(self, copy: _RankCopy) -> None:
        order = copy.order
        reading = self._reading[order.source_pool]
        for place in copy.sources:
            if reading[place] == 1:
                del reading[place]
            else:
                reading[place] -= 1
        self._writing[order.target_pool].difference_update(copy.targets)

    def _require_unused(self, pool: int, places: Sequence[int]) -> None:
        writing, reading = self._writing[pool], self._reading[pool]
        if writing or reading:
            self.report.misused_places += sum([place in writing or place in reading for place in places])

    # --- sockets ---

    def flush(self) -> None:
        """Send what is ordered, as far as the sockets take it."""
        for one in self._ranks:
            if one.outbox and one.ready:
                self._send(one)

    def _send(self, one: _Rank) -> None:
        assert one.channel is not None
        while one.outbox:
            batch: list[msgspec.Raw] = []
            size = 0
            while one.outbox and size < MESSAGE_BYTES:
                size += len(memoryview(one.outbox[0]))
                batch.append(one.outbox.popleft())
            try:
                one.channel.send(self._encode(batch))
            except OSError as error:
                one.outbox.extendleft(reversed(batch))
                if isinstance(error, BlockingIOError):
                    self._want_room(one)
                return  # else the worker has gone, and its pidfd will say so
        self._want_room(one)

    def _want_room(self, one: _Rank) -> None:
        """Have the loop tell when the socket takes more, if messages wait."""
        if self._loop is None or one.channel is None:
            return
        fd = one.channel.fileno()
        if bool(one.outbox) != self._watched.get(fd, False):
            self._watched[fd] = bool(one.outbox)
            if one.outbox:
                self._loop.add_writer(fd, self._send, one)
            else:
                self._loop.remove_writer(fd)

    def wait(self, seconds: float) -> None:
        """Send, and take what comes within this time: returns after the first that came."""
        self.flush()
        poll = select.poll()
        of: dict[int, _Rank] = {}
        for one in self._ranks:
            if one.channel is not None and one.process is not None:
                of[one.pidfd] = one
                poll.register(one.pidfd, select.POLLIN)
                if one.channel.fileno() >= 0:
                    of[one.channel.fileno()] = one
                    poll.register(one.channel, select.POLLIN | (select.POLLOUT if one.outbox and one.ready else 0))
        came = poll.poll(seconds * 1000)
        for fd, what in came:
            one = of[fd]
            if fd == one.pidfd:
                self._died(one)
            elif one.channel is not None and fd == one.channel.fileno():
                if what & ~select.POLLOUT:
                    self._receive(one)
                else:
                    self._send(one)
        self._look()

    def _receive(self, one: _Rank) -> None:
        assert one.channel is not None
        while True:
            try:
                size = one.channel.recv_into(self._received)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:  # it has closed, and may still be alive
                self._unwatch_channel(one)
                one.channel.close()
                return
            one.heard = time.monotonic()
            one.pause_s = 0.0
            if one.warned:
                one.warned = False
                self.begun(one.name)
            for reply in self._decode(self._received[:size]):
                if isinstance(reply, RankFound):
                    pairs = zip(unpack_ids(reply.places), unpack_hashes(reply.keys), strict=True)
                    one.found.setdefault(reply.pool, []).extend(pairs)
                else:
                    self._answered(one, reply)
            if self._moved is not None:
                self._moved.set()

    def _answered(self, one: _Rank, reply: RankReply) -> None:
        if reply.number == LAST_WORDS:
            one.last_words = reply.error
            return
        if reply.number == 0:
            one.ready = True
            self._send(one)
            return
        pending = one.pending.pop(reply.number)
        failed = unpack_ids(reply.failed) if reply.failed else []
        report = self.report
        if pending.kind is CopyOrder:
            assert pending.copy is not None
            self._copied(one, pending, pending.copy, reply.error, failed)
        elif pending.kind is CheckOrder:
            report.compared_blocks += pending.blocks
            report.wrong_blocks += len(failed)
            if failed:
                self.trouble(one.name, f"{len(failed)} blocks of a reused prefix: {reply.error}")
        elif pending.kind is ZeroOrder and not any(reply.number in other.pending for other in self._ranks):
            self._zeroing.discard(reply.number)

    def _copied(self, one: _Rank, pending: _Pending, copy: _RankCopy, error: str, failed: list[int]) -> None:
        report = self.report
        report.moved_bytes += (pending.blocks - len(failed)) * self.shard_bytes
        if copy.order.route.is_load:
            report.compared_blocks += pending.blocks
        if failed:
            report.failed_blocks += len(failed)
            copy.failed.setdefault(one.rank, set()).update(pending.at + block for block in failed)
            copy.errors.setdefault(one.rank, error)
        self._part_ended(copy)

    def _part_ended(self, copy: _RankCopy) -> None:
        copy.left -= 1
        if not copy.left:
            self._release(copy)

    # --- life and death of a worker ---

    def _spawn(self, one: _Rank, *, fresh: bool) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = RankSetup(
            one.rank, self.shard_bytes, tuple(self.pools.values()), fresh,
            str(self._directory / f"rank-{one.rank}"), self._identity,
        )
        with theirs:
            one.process = subprocess.Popen(
                [*self._command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )
        one.pidfd = os.pidfd_open(one.process.pid)
        mine.setblocking(False)
        one.channel = mine
        one.ready = one.warned = one.killed = False
        one.last_words = ""
        one.heard = time.monotonic()
        one.outbox = deque(pending.encoded for pending in one.pending.values())
        with contextlib.suppress(OSError):  # it ended at once; its pidfd says so
            socket.send_fds(mine, [self._encode(setup)], one.arenas)
        self._watch(one)

    def _died(self, one: _Rank) -> None:
        """The process has ended: take its last replies, fail its copies, and have a next one started."""
        assert one.process is not None
        status = one.process.wait()
        if one.channel is not None and one.channel.fileno() >= 0:
            self._receive(one)
        self._unwatch(one)
        if one.channel is not None:
            one.channel.close()
        os.close(one.pidfd)
        one.channel, one.process, one.pidfd, one.ready = None, None, -1, False
        one.outbox.clear()
        why = one.last_words or (
            f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        )
        self.report.deaths += 1
        self._last_death = f"{one.name} {why}"
        one.starts = time.monotonic() + one.pause_s
        one.pause_s = min(PAUSE_MAX_S, max(PAUSE_MIN_S, 2 * one.pause_s))
        if self._closed:
            return
        self.ended(one.name, why)
        for number, pending in list(one.pending.items()):
            if pending.copy is None:
                continue
            del one.pending[number]
            self._part_ended(pending.copy)
            order = pending.copy.order
            if one.rank not in pending.copy.lost:
                pending.copy.lost.add(one.rank)
                self.lost(order.operation, order.epoch, one.rank, f"its worker was {why}")
        if self._moved is not None:
            self._moved.set()
        if self._loop is not None:
            self._loop.call_later(max(0.0, one.starts - time.monotonic()), self._look)

    def _look(self) -> None:
        """Start the workers that are due; warn of those that are silent, and kill those that stay so."""
        now = time.monotonic()
        for one in self._ranks if not self._closed else ():
            if one.process is None:
                if now >= one.starts:
                    self._spawn(one, fresh=False)
                    self.begun(one.name)
            elif one.pending:
                quiet = now - one.heard
                if quiet >= SILENT_S and not one.warned:
                    one.warned = True
                    self.trouble(one.name, f"it has not answered for {quiet:.1f} s")
                elif quiet >= (KILL_S if one.ready else START_S) and not one.killed:
                    one.killed = True
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)

    # --- the loop ---

    def _watch(self, one: _Rank) -> None:
        if self._loop is not None and one.channel is not None:
            self._loop.add_reader(one.pidfd, self._died, one)
            self._loop.add_reader(one.channel.fileno(), self._receive, one)
            self._watched[one.channel.fileno()] = False

    def _unwatch(self, one: _Rank) -> None:
        self._unwatch_channel(one)
        if self._loop is not None and one.pidfd >= 0:
            self._loop.remove_reader(one.pidfd)

    def _unwatch_channel(self, one: _Rank) -> None:
        if self._loop is not None and one.channel is not None and one.channel.fileno() >= 0:
            fd = one.channel.fileno()
            self._loop.remove_reader(fd)
            if self._watched.pop(fd, False):
                self._loop.remove_writer(fd)

