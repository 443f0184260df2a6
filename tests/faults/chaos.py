"""A proxy that breaks connections on purpose: between a client and a daemon, both on Unix sockets.

Law of this file: it passes on every byte unchanged until it is told to do otherwise.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 65_536


class ChaosProxy:
    """Passes bytes between ``address`` and a daemon. ``reset`` breaks connections, ``blackhole`` swallows bytes."""

    def __init__(self, upstream: str, path: Path) -> None:
        self.address = f"unix:{path}"
        self.blackhole = False
        self.refuse = False
        """Whether new connections are closed at once."""
        self.connections = 0
        self._path = path
        self._upstream = upstream.removeprefix("unix:")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def stop(self) -> None:
        """Break all connections and listen no more."""
        assert self._server is not None
        self._server.close()
        self.reset()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    def reset(self) -> None:
        """Break every connection, both ways, without a goodbye."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        if self.refuse:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._upstream)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if not self.blackhole:
                    writer.write(data)
                    await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()


@asynccontextmanager
async def chaos(upstream: str) -> AsyncIterator[ChaosProxy]:
    """A proxy in front of a daemon's Unix socket."""
    proxy = ChaosProxy(upstream, Path(upstream.removeprefix("unix:") + ".proxy"))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
