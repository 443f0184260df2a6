"""What one observer costs an engine, and a debugger beside it: ``python -m tests.benchmarks.observers``.

A machine that others use makes events a second useless, and events per second of processor vary by a tenth from one
second to the next. So the figure is of the processor's time of the loop's thread: the time inside the engine's slices
without that inside flushes, against what these would have had of the same time without the flood. What else the thread
does without a flood is taken from the turns without one, by the wall: the flood's process shares both cores, so the
thread has less time in the turns with it. Time of exports is left out, since they come every few seconds whoever looks.
Whatever slows the machine slows all of these. What other threads take (connections of the RPC library, 0.1 ms each)
costs an engine nothing while a core is free, and is not counted.

The flood goes on and off in turns of two seconds on one daemon, and each turn is compared with the two beside it. The
first half of a turn is left out: a flood begins with what its lane has saved up, and its last answers come later. The
result is the median over all pairs with its 95 % confidence interval, which needs no assumption about the noise.

A debugger renews its lease in half as many further pairs, which begin when its session is open. Its work comes at fixed
times. In the pairs of the cost it would take a larger share of a thread that has less of the processor, because the
flood's process shares both cores, and that is not the flood's work. A pair has at most 50 renewals, so a 99th
percentile of fewer than four such pairs is nearly their maximum.

Options: names of floods, ``--pairs N``.
"""

import asyncio
import math
import os
import struct
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
import msgspec

from kvbm_console.client import Client, ControlSession
from kvbm_console.client.access import Access
from kvbm_console.service import LeaderService
from kvbm_console.simulator.embedded import Rig, default_engine_config, default_leader_config, parse_workload
from kvbm_console.stream.broadcast import Broadcaster
from kvbm_console.stream.verbs import RenewLease
from kvbm_console.wire.protocol import method_path
from kvbm_console.wire.v1 import console_pb2 as pb
from server.daemon import Daemon, run_daemon
from server.options import DaemonOptions

ROOT: Final = Path(__file__).resolve().parents[2]
TURN_S: Final = 2.0
WARM_S: Final = 6.0
"""Until the tiers are full."""
SAMPLE_S: Final = 0.05
RENEW_S: Final = 0.02
SAMPLE: Final = struct.Struct("<qqq")
"""Monotonic clock, processor time of the loop's thread, the engine's."""
IN_FLIGHT: Final = 16
STREAMS: Final = {"reader": 1, "readers": 10, "digests": 64}
FLOODS: Final = (
    "none", "reader", "readers", "status", "digest", "history", "snapshot", "digests", "connections", "scrapes",
    "leavers",
)
"""``none`` goes on and off, too, and does nothing: what the method itself finds."""


class Cost(msgspec.Struct, frozen=True):
    """The cost of a flood: parts of the engine's time, and renewals in milliseconds."""

    flood: str
    pairs: int
    asked: int
    median: float
    low: float
    high: float
    """The 95 % confidence interval of the median."""
    renewals: int
    p99_ms: float
    p99_off_ms: float

    def line(self) -> str:
        """One row."""
        return (
            f"{self.flood:12} costs {self.median:+6.1%} ({self.low:+6.1%} to {self.high:+6.1%}, {self.pairs} pairs), "
            f"{self.asked:7,} asked; p99 of {self.renewals} renewals {self.p99_ms:5.1f} ms, {self.p99_off_ms:5.1f} ms "
            "without"
        )


# --- the daemon's process --------------------------------------------------------------------------------------------


class _Timed:
    """Processor time inside some calls."""

    def __init__(self) -> None:
        self.took_ns = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*arguments, **named)
            finally:
                self.took_ns += time.thread_time_ns() - began

        return timed


async def _daemon(place: Path) -> None:
    """An engine at full speed that says how much of the processor it got."""
    engine, inside, exports, flushes = _Timed(), _Timed(), _Timed(), [0]
    LeaderService._take_base = exports.around(LeaderService._take_base)  # type: ignore[method-assign]
    Broadcaster.flush = inside.around(Broadcaster.flush)  # type: ignore[method-assign]
    run = Rig.run

    def slice_of(*arguments: Any) -> None:
        before = inside.took_ns
        run(*arguments)
        flushes[0] += inside.took_ns - before

    Rig.run = engine.around(slice_of)  # type: ignore[method-assign]
    workload = parse_workload("multiturn")
    options = DaemonOptions(
        workload=workload, listen="127.0.0.1:0", speed=None, token_file=place / "token", metrics="127.0.0.1:0",
        config=default_leader_config(workload, g2_blocks=2_048, g3_blocks=8_192),
        engine=default_engine_config(workload, g1_blocks=512),
    )

    def ready(daemon: Daemon) -> None:
        assert daemon.metrics is not None
        samples = os.open(place / "samples", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        loop = asyncio.get_running_loop()

        def sample() -> None:
            took_ns = engine.took_ns - flushes[0]
            os.write(samples, SAMPLE.pack(time.monotonic_ns(), time.thread_time_ns() - exports.took_ns, took_ns))
            loop.call_later(SAMPLE_S, sample)

        sample()
        print(daemon.address, daemon.metrics.port, flush=True)

    await run_daemon(options, on_ready=ready)


# --- the flood's process ---------------------------------------------------------------------------------------------


async def _flood(kind: str, address: str, port: int) -> None:
    """Ask as fast as answers come while the last line of stdin is ``on``; print how often that was at its end."""
    on, asked = asyncio.Event(), 0
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
    once = _once(kind, channel, address, port)

    async def asks() -> None:
        nonlocal asked
        while True:
            await on.wait()
            try:
                took = await once(on)
                asked += took
            except (grpc.RpcError, OSError):
                await asyncio.sleep(0.001)

    flood = [asyncio.create_task(asks()) for _ in range(STREAMS.get(kind, IN_FLIGHT))]
    assert flood
    while line := await lines.readline():
        on.set() if line == b"on\n" else on.clear()
    print(asked, flush=True)
    os._exit(0)  # calls are in flight, for whose answers the RPC library would wait


def _once(
    kind: str, channel: grpc.aio.Channel, address: str, port: int
) -> Callable[[asyncio.Event], Awaitable[int]]:
    query = channel.unary_unary(method_path("Query"), None, None)
    subscribe = channel.unary_stream(method_path("Subscribe"), None, None)
    questions = {
        "status": pb.QueryRequest(status=pb.StatusQuery()),
        "digest": pb.QueryRequest(digest=pb.DigestQuery()),
        "history": pb.QueryRequest(history=pb.HistoryQuery(first_seq=0, limit=4_096)),
    }

    async def asks(on: asyncio.Event) -> int:
        await query(questions[kind].SerializeToString())
        return 1

    async def snapshot(on: asyncio.Event) -> int:
        call = subscribe(pb.SubscribeRequest(client="flood").SerializeToString())
        await call.read()
        call.cancel()
        return 1

    async def stream(on: asyncio.Event) -> int:
        asked = pb.SubscribeRequest(client="flood", digests=kind == "digests")
        call, read = subscribe(asked.SerializeToString()), 0
        while on.is_set() and await call.read():  # the end of a stream is false
            read += 1
        call.cancel()
        return read

    async def leavers(on: asyncio.Event) -> int:
        call = query(questions["status"].SerializeToString())
        await asyncio.sleep(0)  # the call begins
        await asyncio.sleep(0.001)
        call.cancel()
        return 1

    async def connections(on: asyncio.Event) -> int:
        host, _, number = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(number))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        writer.transport.abort()
        return 1

    async def scrapes(on: asyncio.Event) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
        return 1

    async def none(on: asyncio.Event) -> int:
        await asyncio.sleep(TURN_S)
        return 0

    own = {
        "snapshot": snapshot, "connections": connections, "scrapes": scrapes, "none": none, "leavers": leavers,
        **dict.fromkeys(STREAMS, stream),
    }
    return own.get(kind, asks)


# --- measuring -------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the order statistics between which the true one lies with 95 % (binomial, no assumptions)."""
    ordered, count = sorted(values), len(values)
    below, tail = -1, 0.0
    while (tail := tail + math.comb(count, below + 1) * 0.5**count) <= 0.025:
        below += 1
    below = max(below, 0)
    middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    return middle, ordered[below], ordered[count - 1 - below]


class Spent(NamedTuple):
    """Seconds between two moments: of the wall, of the processor in the loop's thread, and of it in the engine."""

    wall: float
    thread: float
    engine: float


def _spent(samples: Sequence[tuple[int, int, int]], begin_s: float, end_s: float) -> Spent:
    inside = [one for one in samples if begin_s * 1e9 <= one[0] <= end_s * 1e9]
    return Spent(*((end - begin) / 1e9 for begin, end in zip(inside[0], inside[-1], strict=True)))


def cost_of(before: Spent, flood: Spent, behind: Spent) -> float:
    """Share of the engine's time that the flood took, by the turns without it before and behind.

    >>> cost_of(Spent(1.0, 0.9, 0.8), Spent(1.0, 0.5, 0.38), Spent(1.0, 0.9, 0.8))
    0.05
    """
    other = (before.thread + behind.thread - before.engine - behind.engine) / (before.wall + behind.wall)
    return round(1 - flood.engine / (flood.thread - other * flood.wall), 6)


async def _renew(session: ControlSession, latencies: list[tuple[float, float]], over: asyncio.Event) -> None:
    while not over.is_set():
        began = time.monotonic()
        await session.ask(RenewLease())
        latencies.append((began, (time.monotonic() - began) * 1e3))
        await asyncio.sleep(RENEW_S)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, not a number of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else math.nan


async def measure(flood: str, pairs: int) -> Cost:
    """What one flood costs."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as name:
        place = Path(name)
        token = place / "token"
        token.touch(0o600)
        token.write_text("t" * 32)
        child = [sys.executable, "-m", "tests.benchmarks.observers"]
        start = partial(asyncio.create_subprocess_exec, *child, cwd=ROOT, stdin=PIPE, stdout=PIPE)
        daemon = await start("--daemon", name)
        asker: Process | None = None
        try:
            assert daemon.stdout is not None
            address, port = (await daemon.stdout.readline()).decode().split()
            asker = await start("--flood", flood, address, port)
            await asyncio.sleep(WARM_S)
            turns = await _turns(asker, pairs)
            latencies: list[tuple[float, float]] = []
            over = asyncio.Event()
            debugger = Client(address, name="debugger", access=Access.load(None, token))
            async with debugger as client, client.control("d", lease=True) as session:
                renewals = asyncio.create_task(_renew(session, latencies, over))
                renewed = await _turns(asker, -(-pairs // 2))
                over.set()
                await renewals
            out, _ = await asker.communicate(b"")
            samples = list(SAMPLE.iter_unpack((place / "samples").read_bytes()))
        finally:
            for process in (daemon, asker):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
    spent = [_spent(samples, begin, begin + TURN_S / 2) for begin in turns]
    costs = [cost_of(*spent[at - 1 : at + 2]) for at in range(1, len(spent) - 1, 2)]
    during = [[took for at, took in latencies if any(b <= at < b + TURN_S / 2 for b in begins)]
              for begins in (renewed[1::2], renewed[::2])]
    median, low, high = interval(costs)
    return Cost(
        flood, len(costs), int(out or 0), median, low, high, len(during[0]), p99(during[0]), p99(during[1])
    )


async def _turns(asker: Process, pairs: int) -> list[float]:
    """Where the measured half of each turn begins; off and on in turns, off at both ends."""
    assert asker.stdin is not None
    turns: list[float] = []
    for turn in range(2 * pairs + 1):
        asker.stdin.write(b"on\n" if turn % 2 else b"off\n")
        await asker.stdin.drain()
        await asyncio.sleep(TURN_S / 2)
        turns.append(time.monotonic())
        await asyncio.sleep(TURN_S / 2 + SAMPLE_S)
    return turns


def main(arguments: list[str]) -> None:
    """Measure the floods named, all by default."""
    if arguments[:1] == ["--daemon"]:
        asyncio.run(_daemon(Path(arguments[1])))
        return
    if arguments[:1] == ["--flood"]:
        asyncio.run(_flood(arguments[1], arguments[2], int(arguments[3])))
        return
    pairs = 30
    if "--pairs" in arguments:
        at = arguments.index("--pairs")
        pairs = int(arguments[at + 1])
        del arguments[at : at + 2]
    for flood in arguments:
        if flood not in FLOODS:
            sys.exit(f"a flood must be one of {', '.join(FLOODS)}, got {flood!r}")
    for flood in arguments or FLOODS:
        print(asyncio.run(measure(flood, pairs)).line(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
