"""A small HTTP server for one page, ``GET /metrics``, on the daemon's own loop.

Each connection waits for a turn before it is answered, and later connections wait in the kernel's queue. So scrapers
spend a bounded share of the loop's time, however often they ask.

Law of this file: a request is bounded in bytes and time, the answer is one page, and nothing else can be asked.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from kvbm_console.core.errors import UsageError
from kvbm_console.metrics.exposition import CONTENT_TYPE

REQUEST_BYTES_MAX: Final = 8_192
"""Bytes of the head of a request; Prometheus sends some 300."""
REQUEST_SECONDS_MAX: Final = 5.0
CONNECTIONS_MAX: Final = 16
"""Connections at once. For one more, the oldest that has not asked yet is closed; where all have asked, it is turned
away. So connections that say nothing cost few descriptors and keep no scraper out."""
ACCEPT_RETRY_S: Final = 0.1
"""Pause before the next try when no descriptor is free for a connection."""


class MetricsServer:
    """Serves ``page`` at ``listen`` (``HOST:PORT``) between ``start`` and ``close``.

    ``turn`` is awaited for each connection, and its ``working`` surrounds the work that is charged to it. Without
    ``turn`` no connection waits.
    """

    def __init__(
        self, listen: str, page: Callable[[], str], turn: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        host, _, port = listen.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and int(port) <= 65_535):
            raise UsageError(f"metrics must be HOST:PORT with a port up to 65535, got {listen!r}")
        self._host, self._port = host.strip("[]"), int(port)
        self._listen = listen
        self._page = page
        self._turn = turn
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """The connections that have not asked yet, the oldest first."""
        self._closing: set[asyncio.Task[None]] = set()
        """The connections that made way and have not ended."""
        self.port = 0
        """The port, after ``start``."""

    async def start(self) -> None:
        """Listen. Raises ``UsageError``."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._socket = socket.create_server((self._host, self._port), family=family, backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise UsageError(f"cannot serve metrics at {self._listen}: {error.strerror or error}") from None
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(self._socket))

    async def close(self) -> None:
        """Stop listening, and end the open connections."""
        tasks = set(self._answering)
        if self._accepting is not None:
            tasks.add(self._accepting)
            self._accepting = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # aborted transports close their sockets in the next turn
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # the client has left again, or there is no descriptor
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            try:
                turn = None if self._turn is None else await self._turn()
                reader = asyncio.StreamReader(limit=REQUEST_BYTES_MAX)
                transport, protocol = await loop.connect_accepted_socket(
                    partial(asyncio.StreamReaderProtocol, reader), connection
                )
            except BaseException as error:
                connection.close()
                if isinstance(error, OSError):
                    continue
                raise
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            task = loop.create_task(self._answer(reader, writer, turn))
            self._answering.add(task)
            # A task that is cancelled before its first step never comes to its end.
            task.add_done_callback(partial(self._ended, transport))

    def _ended(self, transport: asyncio.Transport, task: asyncio.Task[None]) -> None:
        transport.abort()
        self._answering.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: Any) -> None:
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        crowded = len(self._answering) - len(self._closing) > CONNECTIONS_MAX and not self._close_oldest()
        self._silent[task] = writer
        try:
            if crowded:
                writer.write(_response("503 Service Unavailable", "too many scrapers at once\n"))
            else:
                async with asyncio.timeout(REQUEST_SECONDS_MAX):
                    head = await reader.readuntil(b"\r\n\r\n")
                self._silent.pop(task, None)
                with contextlib.nullcontext() if turn is None else turn.working():
                    writer.write(self._respond(head))
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # only ``close`` cancels, and asyncio would log a stream whose task was cancelled
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self._silent.pop(task, None)
            self._closing.discard(task)

    def _close_oldest(self) -> bool:
        """Close the oldest connection that has not asked; False if all have."""
        oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        self._closing.add(oldest)
        self._silent.pop(oldest).transport.abort()  # it reads the end of its request
        return True

    def _respond(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET /metrics\n")
        if words[1].split(b"?")[0] != b"/metrics":
            return _response("404 Not Found", "only GET /metrics\n")
        return _response("200 OK", self._page(), head_only=words[0] == b"HEAD")


def _response(status: str, text: str, *, head_only: bool = False) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)
