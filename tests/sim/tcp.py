"""Simulated stream sockets: listening, accepting, bytes both ways, and asyncio's transports on them.

A connection waits in the queue of its listener until it is accepted. One that finds the queue full is tried again after
1, 2 and 4 s, as TCP repeats its first packet. Bytes arrive after the connection's delay by the dice, and a sender stops
where its window is not read. A connection that is cut breaks on both sides. One that is half open swallows all bytes
and tells no side, because nothing here asks for keep-alives. A process has so many descriptors, and no more.

Law of this file: what was not lost with its connection arrives unchanged, once and in order.
"""

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tests.sim.loop import Loop
from tests.sim.scheduler import Namespace, Process

if TYPE_CHECKING:
    from tests.sim.machine import Machine

KNOCKS_S: Final = (1.0, 2.0, 4.0)
"""Pauses before the first packet of a connection is sent again."""
WINDOWS_BYTES: Final = (8_192, 262_144)
"""Bytes that a side takes before its program reads them; a page of metrics is larger than the first."""
BUFFER_BYTES: Final = 65_536
"""A transport with more bytes than these asks its protocol to pause, as asyncio's does."""


class SocketLink:
    """A connection. It has the attributes of ``network.Connection`` that faults and the end of a process use."""

    def __init__(self, sockets: "Tcp", client: Loop, server: "Listener") -> None:
        self.network = sockets.machine.network
        self.client, self.server = client, server
        self.name = f"{client.process.name}/{server.address}"
        self.up = True
        self.half_open = False
        self.harmed = False
        """A fault has met it."""
        self.delay_s = self.network.delay_s
        self.window = self.network.world.dice.choice(WINDOWS_BYTES)
        self.near, self.far = SocketEnd(self, client), SocketEnd(self, server.loop)
        self.near.other, self.far.other = self.far, self.near

    def delay(self) -> float:
        """How long the next bytes take."""
        return self.delay_s * (0.2 + self.network.world.dice.expovariate(1.0))

    def cut(self) -> None:
        """Both sides see the end, each after a while."""
        if self.up:
            self.up, self.harmed = False, True
            self.network.world.trace("cut", self.name)
            for end in (self.near, self.far):
                self.network.world.after(self.delay(), end.broke)

    def half_opened(self) -> None:
        """No byte arrives any more, and no side is told."""
        if self.up and not self.half_open:
            self.half_open = self.harmed = True
            self.network.world.trace("half open", self.name)


class SocketEnd:
    """A side of a connection, as a socket that does not block."""

    def __init__(self, link: SocketLink, loop: Loop) -> None:
        self.link = link
        self.loop = loop
        self.other: SocketEnd = self
        self.told: Callable[[], None] = lambda: None
        """Called when there is something to read, room to write, or an error."""
        self.ended = False
        """The other side has closed; what it sent before is received."""
        self.closed = False
        self._received = bytearray()
        self._unread = 0
        """Bytes on their way to the other side's program."""
        self._error: OSError | None = None
        self._last_ns = 0

    def send(self, data: bytes | bytearray) -> int:
        """The number of bytes that were accepted. Raises ``OSError``."""
        if self._error is not None:
            raise self._error
        accepted = bytes(data[: max(0, self.link.window - self._unread)])
        if accepted and not self.loop.process.dead:
            self._unread += len(accepted)
            self._travel(partial(self.other._arrive, accepted))
        return len(accepted)

    def receive(self) -> bytes:
        """Everything that is there. Raises ``OSError``."""
        data = bytes(self._received)
        self._received.clear()
        if data:
            self._travel(partial(self.other._was_read, len(data)))
        elif self._error is not None:
            raise self._error
        return data

    def close(self) -> None:
        """Give the descriptor back; the other side reads an end behind the last byte."""
        if self.closed or self.loop.process.dead:
            return
        self.closed = True
        self.link.server.left(self)
        self._travel(self.other._end)
        self.link.up = self.link.up and not self.other.closed

    def broke(self) -> None:
        """The connection is gone."""
        self._error = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        self._tell()

    def _travel(self, action: Callable[[], None]) -> None:
        """Let ``action`` happen on the other side, behind what is on its way there."""
        link, world = self.link, self.link.network.world
        if link.half_open or not link.up:
            return
        self._last_ns = max(self._last_ns, world.now + round(link.delay() * 1e9))
        world.after((self._last_ns - world.now) / 1e9, lambda: None if link.half_open else action())

    def _arrive(self, data: bytes) -> None:
        if self.closed:
            self._travel(self.other.broke)
            return
        self._received += data
        self._tell()

    def _was_read(self, count: int) -> None:
        self._unread -= count
        self._tell()

    def _end(self) -> None:
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        if not self.closed and not self.loop.process.dead:
            self.loop.call_soon(lambda: None if self.closed else self.told())

    # --- for coroutines of clients ---

    async def read(self) -> bytes:
        """Bytes as they come, and nothing at the end. Raises ``OSError``."""
        while not (data := self.receive()) and not self.ended:
            await self._change()
        return data

    async def write(self, data: bytes) -> None:
        """Send all of it. Raises ``OSError``."""
        while data := data[self.send(data) :]:
            await self._change()

    async def _change(self) -> None:
        changed = self.loop.create_future()
        self.told = lambda: None if changed.done() else changed.set_result(None)
        await changed

    # --- for the loop ---

    async def transport(self, factory: Callable[[], Any]) -> tuple["SocketTransport", Any]:
        """As ``connect_accepted_socket``."""
        protocol = factory()
        transport = SocketTransport(self, protocol)
        made = self.loop.create_future()
        self.loop.call_soon(protocol.connection_made, transport)
        self.loop.call_soon(transport.begin)
        self.loop.call_soon(lambda: None if made.done() else made.set_result(None))
        try:
            await made
        except BaseException:
            transport.close()
            raise
        return transport, protocol


class SocketTransport(asyncio.Transport):
    """As the transport of a selector loop."""

    def __init__(self, end: SocketEnd, protocol: Any) -> None:
        super().__init__({"socket": end})
        self._end = end
        self._protocol = protocol
        self._buffer = bytearray()
        self._closing = self._over = self._held = self._full = self._eof = False

    def begin(self) -> None:
        """Read from now on."""
        self._end.told = self._look
        self._look()

    def write(self, data: Any) -> None:
        if self._over:
            return
        self._buffer += data
        self._flush()
        if len(self._buffer) > BUFFER_BYTES and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def _look(self) -> None:
        if self._over:
            return
        if not (self._closing or self._held):
            try:
                data = self._end.receive()
            except OSError as error:
                self._lose(error)
                return
            if data:
                self._protocol.data_received(data)
            elif self._end.ended and not self._eof:
                self._eof = True
                if not self._protocol.eof_received():
                    self.close()
        self._flush()

    def _flush(self) -> None:
        if self._over or not self._buffer:
            return
        try:
            del self._buffer[: self._end.send(self._buffer)]
        except OSError as error:
            self._lose(error)
            return
        if self._full and len(self._buffer) <= BUFFER_BYTES // 4:
            self._full = False
            self._protocol.resume_writing()
        if self._closing and not self._buffer:
            self._lose(None)

    def _lose(self, error: OSError | None) -> None:
        if not self._over:
            self._over = self._closing = True
            self._buffer.clear()
            self._end.loop.call_soon(self._lost, error)

    def _lost(self, error: OSError | None) -> None:
        self._protocol.connection_lost(error)
        self._end.close()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._buffer:
                self._lose(None)

    def abort(self) -> None:
        self._lose(None)

    def is_closing(self) -> bool:
        return self._closing or self._end.loop.process.dead

    def pause_reading(self) -> None:
        self._held = True

    def resume_reading(self) -> None:
        if self._held:
            self._held = False
            self._end.loop.call_soon(self._look)


class Listener:
    """As a listening ``socket.socket``."""

    waits = True
    """``accept`` is a coroutine."""

    def __init__(self, sockets: "Tcp", address: tuple[str, int], loop: Loop, backlog: int) -> None:
        self.address = address
        self.loop = loop
        self.open: list[SocketEnd] = []
        """Connections that were accepted and not closed."""
        self._sockets = sockets
        self._backlog = backlog
        self._queue: deque[SocketLink] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def close(self) -> None:
        """Nobody listens any more, and those who wait are turned away."""
        if self._sockets.listeners.get(self.address) is self:
            del self._sockets.listeners[self.address]
        for link in self._queue:
            link.cut()
        self._queue.clear()

    async def accept(self) -> tuple[SocketEnd, tuple[str, int]]:
        """The next connection. Raises ``OSError`` without a free descriptor, also when nobody waits, as Linux does."""
        while True:
            self._sockets.machine.require_descriptor()
            if self._queue:
                end = self._queue.popleft().far
                self.open.append(end)
                return end, self.address
            self._waiting = self.loop.create_future()
            await self._waiting

    def knock(self, link: SocketLink) -> bool:
        """A connection wants in; False if the queue is full."""
        if len(self._queue) > self._backlog:
            return False
        self._queue.append(link)
        link.network.connections.append(link)  # type: ignore[arg-type]
        self.loop.call_soon(self._wake)
        return True

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def left(self, end: SocketEnd) -> None:
        """A side was closed."""
        if end in self.open:
            self.open.remove(end)


class Tcp:
    """All listeners of a machine."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.listeners: dict[tuple[str, int], Listener] = {}

    def module(self, running: Callable[[], Loop]) -> Namespace:
        """``socket``."""

        def create_server(address: tuple[str, int], *, family: int, backlog: int) -> Listener:
            self.machine.require_descriptor()
            if address in self.listeners:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            listener = self.listeners[address] = Listener(self, address, running(), backlog)
            return listener

        return Namespace(socket, {"create_server": create_server}, ("AF_INET", "AF_INET6"))

    def process_ended(self, process: Process) -> None:
        """The system closes its listeners; connections are cut by the network."""
        for listener in [each for each in self.listeners.values() if each.loop.process is process]:
            listener.close()

    def of(self, process: Process) -> int:
        """How many descriptors of a process are sockets of this kind."""
        mine = [each for each in self.listeners.values() if each.loop.process is process]
        return len(mine) + sum(len(each.open) for each in mine)

    async def connect(self, loop: Loop, address: tuple[str, int]) -> SocketEnd:
        """A connection of a client. Raises ``OSError``."""
        for pause_s in (*KNOCKS_S, None):
            await asyncio.sleep(self.machine.network.delay_s * (0.2 + self.machine.world.dice.expovariate(1.0)))
            listener = self.listeners.get(address)
            if listener is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            link = SocketLink(self, loop, listener)
            if listener.knock(link):
                return link.near
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
