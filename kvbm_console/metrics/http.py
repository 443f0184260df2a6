"""A small HTTP server for one page, ``GET /metrics``, on the daemon's own loop.

Each connection waits for a turn before it is answered, and later connections wait in the kernel's queue. So scrapers
spend a bounded share of the loop's time, however often they ask.

With ``tls`` the connections are encrypted and, with ``token``, a request must show it (``Authorization: Bearer``).

Law of this file: a request is bounded in bytes and time, the answer is one page, and nothing else can be asked.
"""

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from kvbm_console.core.errors import UsageError
from kvbm_console.metrics.exposition import CONTENT_TYPE

REQUEST_BYTES_MAX: Final = 8_192
"""Bytes of the head of a request; Prometheus sends some 300."""
REQUEST_SECONDS_MAX: Final = 5.0
CONNECTIONS_MAX: Final = 16
"""Connections at once. For one more, the oldest that has not asked in time is closed; where all have asked, the oldest
that has not read its answer in time. So connections that say or read nothing cost few descriptors and keep no scraper
out for longer than ``READ_SECONDS_MIN``."""
ASK_SECONDS_MIN: Final = 0.1
"""Time to ask that is given to every connection. A request follows its connection at once, or its handshake."""
READ_SECONDS_MIN: Final = 1.0
"""Time to read an answer that is given to every connection; a page takes milliseconds."""
ACCEPT_RETRY_S: Final = 0.1
"""Pause before the next try when no descriptor is free for a connection."""


class MetricsServer:
    """Serves ``page`` at ``listen`` (``HOST:PORT``) between ``start`` and ``close``.

    ``turn`` is awaited for each connection, and its ``working`` surrounds the work that is charged to it. Without
    ``turn`` no connection waits.
    """

    def __init__(
        self, listen: str, page: Callable[[], str], turn: Callable[[], Awaitable[Any]] | None = None, *,
        tls: ssl.SSLContext | None = None, token: str = "",
    ) -> None:
        host, _, port = listen.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and int(port) <= 65_535):
            raise UsageError(f"metrics must be HOST:PORT with a port up to 65535, got {listen!r}")
        self._host, self._port = host.strip("[]"), int(port)
        self._listen = listen
        self._page = page
        self._turn = turn
        self._tls = tls
        self._token = token.encode()
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], float] = {}
        """The connections that have not asked yet, the oldest first, and when each was accepted, on the loop's
        clock."""
        self._unread: dict[asyncio.Task[None], float] = {}
        """Those that have not read their answer, and when each was answered, on the loop's clock."""
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
            await self._time_to_ask()
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # the client has left again, or there is no descriptor
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            try:
                turn = None if self._turn is None else await self._turn()
            except BaseException:
                connection.close()
                raise
            opened: list[asyncio.BaseTransport] = []
            task = loop.create_task(self._answer(connection, opened, turn))
            self._answering.add(task)
            # A task that is cancelled before its first step never comes to its end.
            task.add_done_callback(partial(self._ended, connection, opened))
            await asyncio.sleep(0)  # so that it makes others way before the next connection is accepted

    async def _time_to_ask(self) -> None:
        """Wait until the connection that would make way has had its time."""
        loop = asyncio.get_running_loop()
        while self._silent and len(self._answering) - len(self._closing) >= CONNECTIONS_MAX:
            left_s = next(iter(self._silent.values())) + ASK_SECONDS_MIN - loop.time()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    def _ended(
        self, connection: socket.socket, opened: list[asyncio.BaseTransport], task: asyncio.Task[None]
    ) -> None:
        self._answering.discard(task)
        if not opened:
            connection.close()

    async def _answer(self, connection: socket.socket, opened: list[asyncio.BaseTransport], turn: Any) -> None:
        """Answer a connection. The handshake is part of its time, so a silent one keeps no other waiting."""
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        crowded = len(self._answering) - len(self._closing) > CONNECTIONS_MAX and not self._close_oldest()
        self._silent[task] = asyncio.get_running_loop().time()
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                reader, writer = await self._open(connection)
                opened.append(writer.transport)
                head = b"" if crowded else await reader.readuntil(b"\r\n\r\n")
            self._silent.pop(task, None)
            self._unread[task] = asyncio.get_running_loop().time()
            if crowded:
                writer.write(_response("503 Service Unavailable", "too many scrapers at once\n"))
            else:
                with contextlib.nullcontext() if turn is None else turn.working():
                    writer.write(self._respond(head))
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:  # by ``close`` or by a crowd; asyncio would log the stream of a cancelled task
            if writer is not None:
                writer.transport.abort()
        finally:
            if writer is not None:
                await self._part(writer)
            self._silent.pop(task, None)
            self._unread.pop(task, None)
            self._closing.discard(task)

    async def _open(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=REQUEST_BYTES_MAX)
        transport, protocol = await loop.connect_accepted_socket(
            partial(asyncio.StreamReaderProtocol, reader), connection, ssl=self._tls
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _part(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(TimeoutError, OSError, asyncio.CancelledError):
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                await writer.wait_closed()
        writer.transport.abort()

    def _close_oldest(self) -> bool:
        """Close the oldest connection that waits for its client; False if none does, or not long enough."""
        oldest = next(iter(self._silent), None)
        if oldest is None:
            oldest = next(iter(self._unread), None)
            if oldest is None or oldest.get_loop().time() - self._unread[oldest] < READ_SECONDS_MIN:
                return False
        self._closing.add(oldest)
        self._silent.pop(oldest, None)
        self._unread.pop(oldest, None)
        oldest.cancel()
        return True

    def _respond(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET /metrics\n")
        if words[1].split(b"?")[0] != b"/metrics":
            return _response("404 Not Found", "only GET /metrics\n")
        if self._token and not _shows(head, self._token):
            return _response("401 Unauthorized", "show the token: Authorization: Bearer TOKEN\n")
        return _response("200 OK", self._page(), head_only=words[0] == b"HEAD")


def _shows(head: bytes, token: bytes) -> bool:
    """True if the head of a request shows this token."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        scheme, _, shown = value.strip().partition(b" ")
        if name.strip().lower() == b"authorization" and scheme.lower() == b"bearer":
            return hmac.compare_digest(shown.strip(), token)
    return False


def _response(status: str, text: str, *, head_only: bool = False) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)
