"""The simulated network: channels and servers with the interface of ``grpc.aio``, and connections that misbehave.

A message arrives after the connection's delay by the dice, in order within a call; calls of one connection and
connections of one client overtake each other. A writer waits when ``WINDOW_BYTES`` of its messages are not read yet, as
gRPC's flow control lets it. A connection that is cut ends its calls on both sides. One that is half open swallows every
message both ways until the keep-alive of its side finds that out.

Law of this file: what was not lost with its connection arrives unchanged, once and in order.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from kvbm_console.wire.protocol import STREAMS_MAX
from tests.sim.loop import Loop
from tests.sim.scheduler import Process, World

WINDOW_BYTES: Final = 16_384
"""Of a call; a real one has 256 KiB and the sockets' buffers, more than a run publishes."""
KEEPALIVE_S: Final = 40.0
"""30 s of silence and 10 s without an answer: ``wire.protocol.SERVER_OPTIONS``."""
END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]


class Connection:
    """Between one client process and one server."""

    def __init__(self, network: "Network", client: Loop, server: "Server", name: str) -> None:
        self.network = network
        self.client, self.server = client, server
        self.name = name
        self.up = True
        self.half_open = False
        self.delay_s = network.delay_s
        self.calls: list[Call] = []
        self.streams = 0
        """Calls that the server knows and has not ended, also those that their caller has given up."""
        self.unsent: deque[Callable[[], None]] = deque()
        """Calls beyond ``STREAMS_MAX``, which the client keeps."""

    def delay(self) -> float:
        """How long the next message takes."""
        dice = self.network.world.dice
        return self.delay_s * (0.2 + dice.expovariate(1.0))

    def cut(self) -> None:
        """Both sides see the end, each after a while."""
        if self.up:
            self.up = False
            self.network.world.trace("cut", self.name)
            for call in self.calls:
                call.lost()

    def half_opened(self) -> None:
        """No message arrives any more, and no side is told before its keep-alive tells it."""
        if self.up and not self.half_open:
            self.half_open = True
            self.network.world.trace("half open", self.name)
            self.network.world.after(KEEPALIVE_S, self.cut)


class Pipe:
    """Messages in one direction of one call."""

    def __init__(self, connection: Connection, reader: Loop, writer: Loop) -> None:
        self.connection = connection
        self.reader, self.writer = reader, writer
        self.arrived: deque[Any] = deque()
        self.unread = 0
        self.closed = False
        self.error: BaseException | None = None
        self._last_ns = 0
        self._reading: asyncio.Future[None] | None = None
        self._writing: deque[asyncio.Future[None]] = deque()

    def send(self, item: Any) -> None:
        """A message, or ``END``, or an error, on its way."""
        world = self.connection.network.world
        if self.connection.half_open or not self.connection.up:
            return
        arrives_ns = max(self._last_ns, world.now + round(self.connection.delay() * 1e9))
        self._last_ns = arrives_ns
        world.after((arrives_ns - world.now) / 1e9, lambda: self._arrive(item))

    def _arrive(self, item: Any) -> None:
        if self.connection.half_open or self.closed:
            return
        self.arrived.append(item)
        self._tell_reader()

    def _tell_reader(self) -> None:
        if not self.reader.process.dead:
            self.reader.deliver(self._wake_reader)

    def _wake_reader(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    async def write(self, data: bytes) -> None:
        """Send, after what was sent before has room."""
        while self.unread >= WINDOW_BYTES and not self.closed:
            room = self.writer.create_future()
            self._writing.append(room)
            await room
        if self.closed:
            raise self.error or asyncio.CancelledError
        self.unread += len(data)
        self.send(data)

    async def read(self) -> Any:
        """The next message or ``END``; raises what was sent as an error."""
        while not self.arrived:
            if self.closed:
                return self._over()
            self._reading = self.reader.create_future()
            await self._reading
        item = self.arrived.popleft()
        if isinstance(item, bytes):
            self.unread -= len(item)
            self._credit()
            return item
        self.close(item if isinstance(item, BaseException) else None)
        return self._over()

    def _over(self) -> Any:
        if self.error is not None:
            raise self.error
        return END

    def _credit(self) -> None:
        if self._writing and self.unread < WINDOW_BYTES and not self.connection.half_open:
            world = self.connection.network.world
            world.after(self.connection.delay(), self._tell_writer)

    def _tell_writer(self) -> None:
        if not self.writer.process.dead:
            self.writer.deliver(self._wake_writer)

    def _wake_writer(self) -> None:
        while self._writing:
            room = self._writing.popleft()
            if not room.done():
                room.set_result(None)

    def close(self, error: BaseException | None = None) -> None:
        """Nothing comes any more."""
        if not self.closed:
            self.closed, self.error = True, error
            self._tell_reader()
            self._tell_writer()


def lost() -> grpc.aio.AioRpcError:
    """The error of a call on a lost connection."""
    return status_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def status_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """A status as the library raises it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class Call:
    """One call: the client's side is this object, the server's side is its ``context``."""

    def __init__(self, connection: Connection, method: str, user: str, controls: bool) -> None:
        self.connection = connection
        self.controls = controls
        self.method = method
        self.there = Pipe(connection, connection.server.loop, connection.client)
        self.back = Pipe(connection, connection.client, connection.server.loop)
        self.context = Context(self, user)
        self.task: asyncio.Task[Any] | None = None
        self.over = False
        connection.calls.append(self)

    def begin(self, request: bytes | None) -> None:
        """The server hears of it after the delay."""
        connection = self.connection
        if not connection.up:
            self.back.close(status_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"))
            return
        if connection.server.loop.one_event_a_turn and connection.streams >= STREAMS_MAX:
            connection.unsent.append(lambda: self.over or self.begin(request))
        elif not connection.half_open:
            connection.streams += 1
            connection.network.world.after(connection.delay(), lambda: self._arrive(request))

    def _arrive(self, request: bytes | None) -> None:
        server = self.connection.server
        if not self.connection.half_open and not server.loop.process.dead:
            server.arrived(self, request)

    def destroyed(self) -> None:
        """The server has ended it."""
        connection = self.connection
        connection.streams -= 1
        while connection.unsent and connection.streams < STREAMS_MAX:
            connection.unsent.popleft()()

    # --- the client's side ---

    async def write(self, data: bytes) -> None:
        await self.there.write(data)

    async def read(self) -> Any:
        return await self.back.read()

    def cancel(self) -> None:
        """The client leaves."""
        if not self.over:
            self.over = True
            self.there.closed = self.back.closed = True
            connection = self.connection
            if connection.up and not connection.half_open:
                connection.network.world.after(connection.delay(), self._left)
        if self in self.connection.calls:
            self.connection.calls.remove(self)

    # --- both ---

    def lost(self) -> None:
        """The connection is gone."""
        world = self.connection.network.world
        self.over = True
        world.after(self.connection.delay(), lambda: (self.there.close(lost()), self.back.close(lost())))
        world.after(self.connection.delay(), self._left)

    def _left(self) -> None:
        loop = self.connection.server.loop
        if not loop.process.dead:
            loop.deliver(self._cancel_task)

    def _cancel_task(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()


class Context:
    """As ``grpc.aio.ServicerContext``."""

    def __init__(self, call: Call, user: str) -> None:
        self._call = call
        self._metadata = (("user-agent", user),)

    async def read(self) -> Any:
        try:
            return await self._call.there.read()
        except grpc.aio.AioRpcError:
            return END

    async def write(self, data: bytes) -> None:
        try:
            await self._call.back.write(data)
        except grpc.aio.AioRpcError:
            raise asyncio.CancelledError from None
        loop = self._call.connection.server.loop
        if loop.one_event_a_turn:  # the library tells each message that it has taken
            taken = loop.create_future()
            loop.deliver(lambda: taken.done() or taken.set_result(None))
            await taken

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._call.back.send(status_error(code, details))
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return "unix:" if self._call.controls else "ipv4:192.0.2.1:50051"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


class Server:
    """As ``grpc.aio.Server``, made in the process that serves."""

    def __init__(self, network: "Network", loop: Loop) -> None:
        self.network = network
        self.loop = loop
        self.handlers: list[Any] = []
        self.listening = False
        self.connections: list[Connection] = []
        self.calls: list[Call] = []
        self._pending: deque[tuple[Call, bytes | None]] = deque()
        """Calls that the loop has not asked for."""
        self._asked: asyncio.Future[tuple[Call, bytes | None]] | None = None

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        return

    async def start(self) -> None:
        self.listening = True
        if self.loop.one_event_a_turn:
            self.loop.create_task(self._server_main_loop())

    def arrived(self, call: Call, request: bytes | None) -> None:
        """A call is there. Where events are counted, the loop gets it when it asks for the next one."""
        if not self.loop.one_event_a_turn:
            self.loop.deliver(self.accept, call, request)
            return
        self._pending.append((call, request))
        if self._asked is not None:
            self.loop.deliver(self._publish, self._asked)
            self._asked = None

    def _publish(self, asked: "asyncio.Future[tuple[Call, bytes | None]]") -> None:
        asked.set_result(self._pending.popleft())

    async def _server_main_loop(self) -> None:
        """As the library does, also for calls that were given up meanwhile."""
        while True:
            asked = self.loop.create_future()
            if self._pending:
                self.loop.deliver(self._publish, asked)
            else:
                self._asked = asked
            self.accept(*await asked)

    async def stop(self, grace: float | None) -> None:
        """No new call; those that run have this long."""
        self.listening = False
        running = [call.task for call in self.calls if call.task is not None and not call.task.done()]
        if running:
            await asyncio.wait(running, timeout=grace)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=1.0)
        for connection in self.connections:
            connection.cut()

    def accept(self, call: Call, request: bytes | None) -> None:
        """A call has arrived."""
        if call.over:
            call.destroyed()
            return
        if not self.listening:
            call.destroyed()
            call.back.send(status_error(grpc.StatusCode.UNAVAILABLE, "the server is shut down"))
            return
        handler = None
        for each in self.handlers:
            handler = handler or each.service(_Details(call.method))
        call.task = self.loop.create_task(self._serve(call, handler, request))
        call.task.add_done_callback(lambda _: call.destroyed())
        self.calls = [each for each in self.calls if each.task is not None and not each.task.done()]
        self.calls.append(call)

    async def _serve(self, call: Call, handler: Any, request: bytes | None) -> None:
        context: Any = call.context
        try:
            if handler.unary_unary is not None:
                call.back.send(await handler.unary_unary(request, context))
                call.back.send(END)
            elif handler.unary_stream is not None:
                await handler.unary_stream(request, context)
                call.back.send(END)
            else:
                await handler.stream_stream(None, context)
                call.back.send(END)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            return


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class Channel:
    """As ``grpc.aio.Channel``: connects when first used, and anew after its connection is lost."""

    numbers = 0

    def __init__(self, network: "Network", address: str, loop: Loop) -> None:
        self._network = network
        self._address = address
        self._loop = loop
        self._closed = False
        self.controls = True
        """It comes through the Unix socket of its own user, who may control; else from afar and without a token."""
        self.connection: Connection | None = None
        network.numbers += 1
        self._user = f"sim-{network.numbers}"

    def _connect(self) -> Connection | None:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        connection = self.connection
        if connection is None or not connection.up:
            server = self._network.servers.get(self._address)
            if server is None or server.loop.process.dead or not server.listening:
                return None
            connection = Connection(self._network, self._loop, server, f"{self._loop.process.name}/{self._user}")
            server.connections.append(connection)
            self._network.connections.append(connection)
            self.connection = connection
        return connection

    def _call(self, method: str, request: bytes | None) -> Any:
        connection = self._connect()
        if connection is None:
            return _Refused()
        call = Call(connection, method, self._user, self.controls)
        call.begin(request)
        return call

    def unary_unary(self, method: str, *_: Any) -> Callable[..., Any]:
        async def ask(request: bytes, timeout: float | None = None, **_: Any) -> bytes:  # noqa: ASYNC109
            call = self._call(method, request)
            try:
                async with asyncio.timeout(timeout):
                    reply = await call.read()
            except TimeoutError:
                raise status_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            finally:
                call.cancel()
            if reply is END:
                raise lost()
            return bytes(reply)

        return ask

    def unary_stream(self, method: str, *_: Any) -> Callable[..., Any]:
        return lambda request, **_: self._call(method, request)

    def stream_stream(self, method: str, *_: Any) -> Callable[..., Any]:
        return lambda **_: self._call(method, None)

    async def close(self) -> None:
        self._closed = True
        if self.connection is not None:
            self.connection.cut()


class _Refused:
    """A call to a place where nobody listens."""

    async def write(self, data: bytes) -> None:
        raise status_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")

    async def read(self) -> Any:
        raise status_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")

    def cancel(self) -> None:
        return


class Network:
    """All connections of a run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.delay_s = 300e-6
        self.numbers = 0
        self.servers: dict[str, Server] = {}
        self.connections: list[Connection] = []

    def process_ended(self, process: Process) -> None:
        """The system closes its sockets."""
        self.connections = [each for each in self.connections if each.up]
        for connection in self.connections:
            if process in (connection.client.process, connection.server.loop.process):
                connection.cut()
