"""Daemons for tests: on the test's own loop, or as processes; always over real sockets.

Law of this file: everything is started in the test's body by a context manager and ends with it; waits are for events.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from kvbm_console.client import Client, Subscription
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.simulator.embedded import default_engine_config, default_leader_config, parse_workload
from kvbm_console.simulator.workloads import Workload
from kvbm_console.stream.feed import EventsArrived, FeedItem, GapSeen, SnapshotTaken
from server.daemon import Daemon
from server.options import DaemonOptions

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A directory with a short name: a socket's path has at most 103 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as name:
        yield Path(name)


def certificate_in(place: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, or for these hosts, that signs itself, and its key."""
    openssl = which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = place / "cert.pem", place / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2",
         "-subj", "/CN=localhost", "-addext", f"subjectAltName={names}"],
        check=True, capture_output=True,
    )
    key.chmod(0o600)
    return cert, key


def options_for(workload: Workload | str | None, listen: str, **changes: Any) -> DaemonOptions:
    """Options with the workload's own sizes."""
    changes.setdefault("handle_signals", False)
    if isinstance(workload, str):
        workload = parse_workload(workload)
    if workload is None:
        changes.setdefault("config", LeaderConfig(g2_blocks=64, g3_blocks=64))
        return DaemonOptions(listen=listen, **changes)
    changes.setdefault("config", default_leader_config(workload))
    changes.setdefault("engine", default_engine_config(workload))
    return DaemonOptions(workload=workload, listen=listen, **changes)


@asynccontextmanager
async def running(options: DaemonOptions) -> AsyncIterator[Daemon]:
    """A daemon on this loop; ends in order with the block."""
    daemon = Daemon(options)
    ready = asyncio.Event()
    task = asyncio.create_task(daemon.run(lambda _: ready.set()))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield daemon
    finally:
        waiting.cancel()
        daemon.stop()
        await task


@asynccontextmanager
async def daemon_at(workload: Workload | str | None = None, **changes: Any) -> AsyncIterator[Daemon]:
    """A daemon on a Unix socket of its own."""
    with socket_directory() as place:
        async with running(options_for(workload, f"unix:{place}/d.sock", **changes)) as daemon:
            yield daemon


async def published(daemon: Daemon, condition: Callable[[], bool]) -> None:
    """Until the condition holds, looked at after every publication of a daemon on this loop."""
    while not condition():
        await daemon.service.changed.wait()


def finished(daemon: Daemon) -> int:
    """Requests that ended; 0 while a copy runs, since copies outlast the last request."""
    state = daemon.service.state
    return 0 if state.operations or state.slots else sum(state.totals.finished)


class Mirror:
    """Folds a stream as a console does and keeps the law of the stream at every item."""

    def __init__(self) -> None:
        self.state: CacheState | None = None
        self.gaps: list[GapSeen] = []
        self.snapshots = 0

    def take(self, item: FeedItem | object) -> None:
        """Fold one item; after a gap the next item must be a snapshot."""
        if isinstance(item, SnapshotTaken):
            self.state = item.state
            self.snapshots += 1
        elif isinstance(item, EventsArrived):
            if self.state is not None:
                for event in item.events:
                    self.state.apply(event)
        elif isinstance(item, GapSeen):
            self.gaps.append(item)
            self.state = None

    @property
    def digest(self) -> int:
        """Digest of the mirrored facts."""
        assert self.state is not None
        return digest(self.state)


async def follow_until(stream: Subscription, mirror: Mirror, done: Callable[[], bool]) -> None:
    """Fold items until ``done``; the test's own timeout is the bound."""
    async for item in stream:
        mirror.take(item)
        position, start = stream.position, stream.start
        assert position is not None
        assert start is not None
        assert stream.received + stream.lost == position - start
        if done():
            return
    raise AssertionError("the stream ended too early")


class Process:
    """A daemon, or another program of ours, as a process of its own."""

    def __init__(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE", "PYTHONUNBUFFERED": "1"}
        self.child = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdin=stdin, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.child.pid

    def line(self) -> str:
        """The next line that it prints; fails with its errors when it has ended."""
        assert self.child.stdout is not None
        text = self.child.stdout.readline()
        if not text:
            assert self.child.stderr is not None
            raise AssertionError(f"the process ended with {self.child.wait()}: {self.child.stderr.read()}")
        return text.strip()

    def send(self, number: int) -> None:
        """A signal."""
        self.child.send_signal(number)

    def end(self) -> None:
        """Kill it, if it lives, and close its pipes."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    """A process that ends with the block."""
    child = Process(*arguments)
    try:
        yield child
    finally:
        child.end()


async def until(client: Client, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The status document as soon as the condition holds, asked again after every heartbeat or batch of events."""
    async with client.subscribe() as stream:
        async for _ in stream:
            document = await client.status()
            if condition(document):
                return document
    raise AssertionError("the daemon ended")
