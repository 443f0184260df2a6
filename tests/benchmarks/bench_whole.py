"""Figures of whole processes: what observers and a broker cost an engine, and how soon a console shows something.

Law of this file: real processes, sockets and terminals. The engines of ``observers`` are simulated at full speed and
run side by side, one with a console, a recorder and ten subscribers, one alone; both do the same work, to the last
count of their summaries. Of ``broker_gone`` one publishes summaries and events at a broker that stops answering before
the work begins. Their loops share one processor, so that a neighbour takes from both; all else has the others.
Compared are the processor's time of the whole process (decisions, publishing, eleven streams, the recorder's threads)
and the wall's, from the first to the last of the work: starting, connecting and sealing are no part of it.
"""

import asyncio
import contextlib
import os
import pty
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import nats

from kvbm_console.client import Client
from kvbm_console.stream.feed import Heartbeat
from tests.benchmarks.harness import Figure, Target
from tests.benchmarks.measured_engine import Taken
from tests.server.brokers import nats_server
from tests.tui.pty_bench import PROGRAM, ROOT, daemon

REQUESTS: Final = 300
PAIRS: Final = 6
"""Even: each side starts first as often as the other."""
SUBSCRIBERS: Final = 10
STARTS: Final = 5
DRAWN: Final = b"ev/s"
"""Part of the console's first line with values."""
LIMIT_S: Final = 60.0


@contextlib.contextmanager
def _on_terminal(*command: str) -> Iterator[int]:
    """A program on a pty; gives the end to read from. Ended behind the block."""
    ours, theirs = pty.openpty()
    surroundings = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*PROGRAM, *command], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=surroundings,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _drain(end: int, stop: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not stop.is_set():
            if select.select([end], [], [], 0.1)[0]:
                os.read(end, 65_536)


@contextlib.contextmanager
def _observers(address: str) -> Iterator[list[int]]:
    """Ten subscribers and a console, all of them there; gives the subscribers' process ids."""
    tails = [
        subprocess.Popen([*PROGRAM, "tail", address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        for _ in range(SUBSCRIBERS)
    ]
    stop = threading.Event()
    try:
        with _on_terminal("attach", address) as end:
            reader = threading.Thread(target=_drain, args=(end, stop))
            reader.start()
            try:
                asyncio.run(_all_there(address))
                yield [tail.pid for tail in tails]
            finally:
                stop.set()
                reader.join()
    finally:
        for tail in tails:
            tail.kill()
            tail.wait()


async def _all_there(address: str) -> None:
    """Until the heartbeats tell of ten subscribers, a console and ourselves."""
    async with asyncio.timeout(LIMIT_S), Client(address) as client, client.subscribe() as feed:
        async for item in feed:
            if isinstance(item, Heartbeat) and item.subscribers >= SUBSCRIBERS + 2:
                return
    raise AssertionError("the daemon ended before its work began")


def _engine(place: str, name: str, *flags: str) -> "subprocess.Popen[str]":
    """A ``measured_engine`` that can be connected to and waits for its line."""
    command = [
        sys.executable, "-m", "tests.benchmarks.measured_engine", f"multiturn:requests={REQUESTS}",
        f"unix:{place}/{name}.sock", *flags,
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _taken(process: "subprocess.Popen[str]") -> Taken:
    said, error = process.communicate()
    assert process.returncode == 0, error
    return msgspec.json.decode(said, type=Taken)


def _share(loops: list[int], others: list[int]) -> None:
    """Both loops (the processes' first threads) on one processor, the others on the rest."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) > 1:
        for one in loops:
            os.sched_setaffinity(one, processors[:1])
        for one in others:
            os.sched_setaffinity(one, processors[1:])


def _both(ours_first: bool, place: str, *flags: str) -> "tuple[subprocess.Popen[str], subprocess.Popen[str]]":
    """An engine with these flags and one without, which wait for their lines."""
    sides = {"ours": flags, "alone": ()}
    engines = {name: _engine(place, name, *sides[name]) for name in (sides if ours_first else reversed(sides))}
    return engines["ours"], engines["alone"]


def _run(ours: "subprocess.Popen[str]", alone: "subprocess.Popen[str]", others: list[int]) -> tuple[Taken, Taken]:
    """The times of both engines, which do the same work at the same time."""
    _share([ours.pid, alone.pid], others)
    for process in (ours, alone):
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    took, took_alone = _taken(ours), _taken(alone)
    assert took.did == took_alone.did, "what is beside an engine changed what happened"
    return took, took_alone


def _observed(ours_first: bool) -> tuple[Taken, Taken]:
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place:
        ours, alone = _both(ours_first, place, "--record", f"{place}/run")
        with _observers(f"unix:{place}/ours.sock") as tails:
            return _run(ours, alone, tails)


def _broker_gone(ours_first: bool) -> tuple[Taken, Taken]:
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place, nats_server(Path(place) / "nats") as broker:
        with _first_message(broker.address) as wait:
            ours, alone = _both(ours_first, place, "--fleet", f"nats://{broker.address}")
            wait()
        broker.send(signal.SIGSTOP)
        return _run(ours, alone, [])


@contextlib.contextmanager
def _first_message(address: str) -> Iterator[Callable[[], None]]:
    """Listens to a broker; the function waits until a daemon has published."""
    async def listen(listens: threading.Event) -> None:
        client = await nats.connect(f"nats://{address}")
        messages = await client.subscribe("kvbm.>")
        await client.flush()
        listens.set()
        await messages.next_msg(timeout=LIMIT_S)
        await client.close()

    listens = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        listening = thread.submit(asyncio.run, listen(listens))
        assert listens.wait(LIMIT_S)
        yield listening.result


@cache
def _pairs(pair: Callable[[bool], tuple[Taken, Taken]]) -> list[tuple[Taken, Taken]]:
    return [pair(number % 2 == 0) for number in range(PAIRS)]


def _figure(
    name: str, pair: Callable[[bool], tuple[Taken, Taken]], reference: str, clock: Callable[[Taken], int]
) -> Figure:
    pairs = [(clock(ours), clock(theirs)) for ours, theirs in _pairs(pair)]
    ours, theirs = (statistics.median(column) / REQUESTS for column in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    return Figure(name, ours, reference, theirs, ratio, Target(ratio=1.02))


def observers() -> Figure:
    """The processor's time of the whole process."""
    return _figure("observed: a request", _observed, "unobserved", lambda taken: taken.process_ns)


def observers_wall() -> Figure:
    """The wall's time of the engine's own progress."""
    return _figure("observed: a request, by the wall", _observed, "unobserved", lambda taken: taken.wall_ns)


def broker_gone() -> Figure:
    """The wall's time of the engine's own progress when nothing that it publishes is taken."""
    return _figure("broker gone: a request, by the wall", _broker_gone, "no broker", lambda taken: taken.wall_ns)


def first_frame() -> Figure:
    """From the start of ``attach`` to a drawn line with values, on a daemon that works."""
    taken, bare = [], []
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place:
        address = f"unix:{place}/d.sock"
        serve = (*PROGRAM, "serve", "--workload", "multiturn", "--listen", address)
        with daemon(Path(place), *serve):
            for _ in range(STARTS):
                began = time.perf_counter_ns()
                with _on_terminal("attach", address) as end:
                    _wait_for(end)
                    taken.append(time.perf_counter_ns() - began)
                began = time.perf_counter_ns()
                subprocess.run([sys.executable, "-c", "pass"], check=True)
                bare.append(time.perf_counter_ns() - began)
    ours, reference = min(taken), min(bare)  # of the others a neighbour has a part
    return Figure("first frame of attach", ours, "python -c pass", reference, ours / reference, Target(ns=0.6e9),
                  compared=False)


def _wait_for(end: int) -> None:
    kept, until = b"", time.monotonic() + LIMIT_S
    while DRAWN not in kept:
        left = until - time.monotonic()
        if left <= 0 or not select.select([end], [], [], left)[0]:
            raise AssertionError("the console did not draw")
        kept = kept[-64:] + os.read(end, 65_536)


BENCHES: Final = {
    "first frame of attach": first_frame, "observed, a request": observers,
    "observed, a request, by the wall": observers_wall, "broker gone, a request, by the wall": broker_gone,
}
