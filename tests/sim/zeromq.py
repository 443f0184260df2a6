"""The names of pyzmq for a simulated process: sockets as libzmq 4.3 has them, over simulated connections.

Theory of operation. A connection begins with a greeting of both sides. Only then does a socket use it. So a
subscription reaches a publisher some time behind the subscriber's ``HANDSHAKE_SUCCEEDED``, and messages of that time
are lost. A PUB drops what does not fit into its queue of a subscriber. A SUB stops reading when its own queue is full,
so that of its publisher fills up next.

These habits of libzmq have been looked at with a real one (4.3.5), because the program depends on them:

- A lost connection is made again after 0.1 s, then after twice the time, up to ``RECONNECT_IVL_MAX``.
- A message above ``MAXMSGSIZE``, or data that is no ZeroMQ, ends a connection for good: nobody connects again.
- ``connect`` to an address that is connected does nothing, also when that connection was given up.
- ``DISCONNECTED`` also follows a connection that ended before its handshake.
- ``disconnect`` drops what the socket holds of that connection, and no event tells it. A lost connection leaves it.

Law of this file: a socket does what libzmq does, and knows nothing of the program that uses it.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import zmq

from tests.sim.loop import Loop
from tests.sim.scheduler import Namespace
from tests.sim.wires import End, EndOfFile, Wires

GREETING: Final = "greeting"
JUNK: Final = "junk"
"""Data that is no ZeroMQ."""
HANDSHAKE_S: Final = 30.0
RECONNECT_FIRST_S: Final = 0.1
HIGH_WATER: Final = 1_000
"""Messages of a queue, by default."""
PASSED: Final = (
    "SUB", "PUB", "DEALER", "ROUTER", "RCVHWM", "SNDHWM", "MAXMSGSIZE", "TCP_KEEPALIVE", "TCP_KEEPALIVE_IDLE",
    "TCP_KEEPALIVE_INTVL", "TCP_KEEPALIVE_CNT", "IPV6", "RECONNECT_IVL_MAX", "SUBSCRIBE", "SRCFD", "ZMQError",
    "Again", "DONTWAIT", "EVENT_ACCEPTED", "EVENT_HANDSHAKE_SUCCEEDED", "EVENT_DISCONNECTED",
)


class Frame:
    """A part of a message that was asked for without a copy; ``more`` parts follow."""

    def __init__(self, data: bytes, number: int, more: bool) -> None:
        self.bytes = data
        self.more = more
        self._number = number

    def get(self, option: int) -> int:
        """The descriptor of its connection."""
        assert option == zmq.SRCFD
        return self._number


class Inbox:
    """Where a coroutine waits for messages."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """There may be something now."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Until something may be there."""
        self._waiting = self._loop.create_future()
        await self._waiting


class Monitor:
    """The socket that tells the events of another."""

    def __init__(self, loop: Loop, wanted: int) -> None:
        self._wanted = wanted
        self._events: deque[list[bytes]] = deque()
        self._inbox = Inbox(loop)

    def tell(self, event: int, value: int) -> None:
        """An event has happened."""
        if event & self._wanted:
            self._events.append([struct.pack("=hi", event, value), b""])
            self._inbox.tell()

    async def recv_multipart(self) -> list[bytes]:
        """The next event."""
        while not self._events:
            await self._inbox.wait()
        return self._events.popleft()

    def close(self, linger: int | None = None) -> None:
        """No event any more."""
        self._wanted = 0


class Talk:
    """A connection of a socket: the greeting, and messages in both directions."""

    def __init__(self, socket: "Socket", end: End, session: "Session | None") -> None:
        self.socket, self.end, self.session = socket, end, session
        self.number = socket.context.new_number()
        self.greeted = self.over = False
        self.queue: deque[list[bytes]] = session.queue if session is not None else deque()
        """Messages that the socket has not handed over yet."""
        self.out: deque[tuple[Any, int]] = deque()
        self.topics: set[bytes] = set()
        """What the other side has subscribed to."""
        keepalive = socket.options.get(zmq.TCP_KEEPALIVE) == 1
        idle_s, each_s, count = (
            socket.options.get(option, default) for option, default in (
                (zmq.TCP_KEEPALIVE_IDLE, 7_200), (zmq.TCP_KEEPALIVE_INTVL, 75), (zmq.TCP_KEEPALIVE_CNT, 9))
        )
        end.keepalive_s = idle_s + each_s * count if keepalive else 10.0**6
        end.notify = lambda: socket.loop.call_soon(self.turn)
        end.send(GREETING, 64)
        socket.loop.call_later(HANDSHAKE_S, self._late)
        socket.loop.call_soon(self.turn)

    def turn(self) -> None:
        """Read what has arrived, and write what has room."""
        while not self.over and len(self.queue) < self.socket.receives_at_most:
            item = self.end.read()
            if item is None:
                break
            if isinstance(item, EndOfFile):
                self.fail(again=True)
            else:
                self._take(item)
        while self.out and self.end.room and self.greeted and not self.over:
            self.end.send(*self.out.popleft())

    def _take(self, item: Any) -> None:
        socket = self.socket
        if item == JUNK:
            self.fail(again=False)
        elif item == GREETING:
            self.greeted = True
            socket.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
            if socket.kind == zmq.SUB:
                self.end.send(("subscribe", socket.options.get(zmq.SUBSCRIBE, b"")), 10)
            if self.session is not None:
                self.out.extend(self.session.unsent)
                self.session.unsent.clear()
        elif item[0] == "subscribe":
            self.topics.add(item[1])
        elif max(map(len, item[1])) > socket.options.get(zmq.MAXMSGSIZE, 1 << 60):
            self.fail(again=False)
        else:
            self.queue.append(item[1])
            socket.inbox.tell()

    def send(self, parts: list[bytes]) -> bool:
        """Queue a message; False when it was dropped."""
        if len(self.out) >= self.socket.options.get(zmq.SNDHWM, HIGH_WATER):
            return False
        self.out.append((("message", parts), sum(map(len, parts)) + 9))
        self.socket.loop.call_soon(self.turn)
        return True

    def fail(self, *, again: bool) -> None:
        """The connection is over, for a reason after which libzmq connects again, or for another one."""
        if not self.over:
            self.leave()
            self.socket.tell(zmq.EVENT_DISCONNECTED, self.number)
            if self.session is not None:
                self.session.ended(again=again)

    def leave(self) -> None:
        """Close it; what the socket holds of it may still be read."""
        self.over = True
        self.end.close()

    def _late(self) -> None:
        if not self.greeted and not self.over:
            self.fail(again=True)


class Session:
    """An address that a socket connects to, and its connections one after the other."""

    def __init__(self, socket: "Socket", endpoint: str) -> None:
        self.socket, self.endpoint = socket, endpoint
        self.queue: deque[list[bytes]] = deque()
        self.unsent: deque[tuple[Any, int]] = deque()
        self.talk: Talk | None = None
        self.left = False
        self._wait_s = RECONNECT_FIRST_S
        self._connect()

    def _connect(self) -> None:
        if not self.left:
            socket = self.socket
            socket.context.wires.connect(
                socket.loop.process, self.endpoint, lambda end: (socket.loop.call_soon(self._connected, end), None)[1]
            )

    def _connected(self, end: End | None) -> None:
        if self.left:
            if end is not None:
                end.close()
        elif end is None:
            self._again()
        else:
            self._wait_s = RECONNECT_FIRST_S
            self.talk = Talk(self.socket, end, self)
            self.socket.talks.append(self.talk)

    def ended(self, *, again: bool) -> None:
        """Its connection is over."""
        self.talk = None
        if again:
            self._again()

    def _again(self) -> None:
        most_s = self.socket.options.get(zmq.RECONNECT_IVL_MAX, 0) / 1e3 or RECONNECT_FIRST_S
        wait_s = self._wait_s + self.socket.context.wires.dice.random() * RECONNECT_FIRST_S
        self._wait_s = min(2 * self._wait_s, most_s)
        self.socket.loop.call_later(wait_s, self._connect)

    def leave(self) -> None:
        """Disconnect, and drop what came from there."""
        self.left = True
        self.queue.clear()
        if self.talk is not None and not self.talk.over:
            self.talk.leave()


class Socket:
    """As ``zmq.asyncio.Socket``."""

    def __init__(self, context: "Context", kind: int) -> None:
        self.context, self.kind = context, kind
        self.loop = context.loop
        self.options: dict[int, Any] = {}
        self.closed = False
        self.inbox = Inbox(self.loop)
        self.talks: list[Talk] = []
        self._sessions: dict[str, Session] = {}
        self._bound: list[str] = []
        self._monitor: Monitor | None = None
        self._turns = 0

    @property
    def receives_at_most(self) -> int:
        """Messages of one connection that wait here."""
        found: int = self.options.get(zmq.RCVHWM, HIGH_WATER)
        return found

    def setsockopt(self, option: int, value: Any) -> None:
        """An option of connections that are made from now on."""
        self.options[option] = value

    def get_monitor_socket(self, events: int) -> Monitor:
        """A socket that tells these events."""
        self._monitor = Monitor(self.loop, events)
        return self._monitor

    def disable_monitor(self) -> None:
        """Tell no event any more."""
        self._monitor = None

    def tell(self, event: int, value: int) -> None:
        """An event has happened."""
        if self._monitor is not None:
            self._monitor.tell(event, value)

    def connect(self, endpoint: str) -> None:
        """Connect, and again whenever the connection is lost; nothing when this was asked for before."""
        if endpoint not in self._sessions:
            self._sessions[endpoint] = Session(self, endpoint)

    def disconnect(self, endpoint: str) -> None:
        """Undo ``connect``."""
        session = self._sessions.pop(endpoint, None)
        if session is None:
            raise zmq.ZMQError(2)
        session.leave()

    def bind(self, endpoint: str) -> None:
        """Take connections. Raises ``ZMQError`` when somebody else does."""
        try:
            self.context.wires.listen(
                self.loop.process, endpoint, lambda end: (self.loop.call_soon(self._accepted, end), None)[1]
            )
        except OSError as error:
            raise zmq.ZMQError(error.errno) from None
        self._bound.append(endpoint)

    def _accepted(self, end: End) -> None:
        if self.closed:
            end.close()
            return
        talk = Talk(self, end, None)
        self.talks.append(talk)
        self.tell(zmq.EVENT_ACCEPTED, talk.number)

    def _next(self) -> tuple[list[bytes], Talk] | None:
        """The next message, from one connection after the other."""
        self.talks = [talk for talk in self.talks if talk.queue or not talk.over]
        for at in range(len(self.talks)):
            talk = self.talks[(at + self._turns) % len(self.talks)]
            if talk.queue:
                self._turns += at + 1
                if not talk.over:
                    self.loop.call_soon(talk.turn)
                return talk.queue.popleft(), talk
        return None

    def take(self, copy: bool) -> list[Any] | None:
        """The next message that is there; of a ROUTER with the number of its sender in front."""
        found = self._next()
        if found is None:
            return None
        parts, talk = found
        if self.kind == zmq.ROUTER:
            return [b"%d" % talk.number, *parts]
        return parts if copy else [Frame(part, talk.number, at < len(parts)) for at, part in enumerate(parts, 1)]

    async def recv_multipart(self, copy: bool = True) -> list[Any]:
        """The next message."""
        while (found := self.take(copy)) is None:
            await self.inbox.wait()
        return found

    async def send_multipart(self, parts: list[bytes]) -> None:
        """Send; a PUB and a ROUTER drop what has no room."""
        if self.kind == zmq.PUB:
            for talk in self.talks:
                if any(parts[0].startswith(topic) for topic in talk.topics):
                    talk.send(parts)
        elif self.kind == zmq.ROUTER:
            for talk in self.talks:
                if b"%d" % talk.number == parts[0] and not talk.over:
                    talk.send(parts[1:])
        else:
            for session in self._sessions.values():
                item = ("message", parts), sum(map(len, parts)) + 9
                if session.talk is not None and session.talk.greeted:
                    session.talk.send(parts)
                else:
                    session.unsent.append(item)

    def close(self, linger: int | None = None) -> None:
        """Close every connection."""
        self.closed = True
        for endpoint in self._bound:
            self.context.wires.unlisten(endpoint)
        for endpoint in list(self._sessions):
            self._sessions.pop(endpoint).leave()
        for talk in list(self.talks):
            talk.leave()

    def subscribers(self) -> Iterator[Talk]:
        """The connections that have subscribed."""
        return (talk for talk in self.talks if talk.topics and not talk.over)


class Shadow:
    """As ``zmq.Socket.shadow``: the same socket, which never waits."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._frames: list[Frame] = []

    def recv(self, flags: int = 0, copy: bool = True) -> Frame:
        """The next part of a message. Raises ``Again`` if there is none."""
        assert not copy
        if not self._frames:
            assert flags == zmq.DONTWAIT
            self._frames = self._socket.take(copy) or []
            if not self._frames:
                raise zmq.Again
        return self._frames.pop(0)


class Context:
    """As ``zmq.asyncio.Context``, of the process that makes it."""

    def __init__(self, wires: Wires, loop: Loop) -> None:
        self.wires, self.loop = wires, loop
        self._sockets: list[Socket] = []
        self._numbers = 10

    def new_number(self) -> int:
        """A descriptor."""
        self._numbers += 1
        return self._numbers

    def socket(self, kind: int) -> Socket:
        """A new one."""
        self._sockets = [each for each in self._sockets if not each.closed]
        self._sockets.append(Socket(self, kind))
        return self._sockets[-1]

    def set(self, option: int, value: int) -> None:
        """An option that changes nothing here."""

    def destroy(self, linger: int | None = None) -> None:
        """Close every socket."""
        for socket in self._sockets:
            socket.close()


def zmq_module(wires: Wires, running: Callable[[], Loop]) -> Namespace:
    """``zmq``, with ``zmq.asyncio``."""
    context = Namespace(None, {"Context": lambda: Context(wires, running())})
    return Namespace(zmq, {"asyncio": context, "Socket": Namespace(None, {"shadow": Shadow})}, PASSED)
