"""Simulated connections of the system, TCP and Unix: what a process sees of them below its libraries.

The kernel of a process takes what arrives, also while the process is frozen, until ``WINDOW_BYTES`` wait in it. A
process that ends closes its connections behind what it has sent. A connection that is cut loses what is on its way. One
that is half open loses everything. An end hears of it after the time of its keep-alive, and then the other one does
when it sends.

Law of this file: what was not lost with its connection arrives unchanged, once and in order.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tests.sim.scheduler import Process, World

WINDOW_BYTES: Final = 8_192
"""Of one direction; a real one has some hundred KiB, more than a run sends."""
KEEPALIVE_S: Final = 7_200.0 + 9 * 75.0
"""Of a Linux that nobody has told otherwise."""
AGAIN_S: Final = 1.0
"""The system sends again what nobody has confirmed."""
DELAY_S: Final = 150e-6


class EndOfFile:
    """What is read behind the last byte; ``reset`` when the connection was cut."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


class End:
    """One end of a connection. ``notify`` is called when there is something to read, room to write, or an end."""

    def __init__(self, link: "Link", process: Process) -> None:
        self.link = link
        self.process = process
        self.peer: End
        self.notify: Callable[[], None] = lambda: None
        self.keepalive_s = KEEPALIVE_S
        self.closed = False
        """We have closed it."""
        self.arrived: deque[tuple[Any, int]] = deque()
        self.pending = 0
        """Bytes that are on their way to us or wait for us to read them."""
        self._last_ns = 0

    @property
    def room(self) -> bool:
        """Whether the system takes more to send."""
        return self.peer.pending < WINDOW_BYTES

    @property
    def readable(self) -> bool:
        """Whether ``read`` finds something."""
        return bool(self.arrived)

    def send(self, item: Any, size: int) -> None:
        """An item is on its way; it waits in the system when there is no room."""
        if not self.closed:
            self.peer.pending += size
            self._travel(item, size)

    def read(self) -> Any:
        """The next item, None when there is none yet; an ``EndOfFile`` stays."""
        if not self.arrived:
            return None
        item, size = self.arrived[0]
        if isinstance(item, EndOfFile):
            return item
        self.arrived.popleft()
        before = self.pending
        self.pending -= size
        if before >= WINDOW_BYTES > self.pending and not self.link.half_open:
            self.link.later(self.peer.told)
        return item

    def close(self) -> None:
        """No more from us; the peer reads what is on its way, and then the end."""
        if not self.closed:
            self.closed = True
            self._travel(EndOfFile(reset=False), 0)
            self.link.left()

    def lost(self) -> None:
        """The connection is no more, and we are told."""
        if not self.closed and not (self.arrived and isinstance(self.arrived[-1][0], EndOfFile)):
            self.arrived.append((EndOfFile(reset=True), 0))
            self.told()
            if self.link.half_open and self.pending:  # what was sent to us is sent again
                self.link.wires.world.after(AGAIN_S, self.peer.lost)

    def told(self) -> None:
        """Wake the process."""
        if not self.closed and not self.process.dead:
            self.notify()

    def _travel(self, item: Any, size: int) -> None:
        link = self.link
        if link.half_open and self.peer.closed:
            link.later(self.lost)  # the network is whole again, and that end is no more
        if not link.up or link.half_open:
            return
        world = link.wires.world
        self._last_ns = max(self._last_ns, world.now + round(link.wires.delay() * 1e9))
        world.after((self._last_ns - world.now) / 1e9, lambda: self.peer._arrive(item, size))

    def _arrive(self, item: Any, size: int) -> None:
        if self.link.up and not self.link.half_open and not self.closed:
            self.arrived.append((item, size))
            self.told()


class Link:
    """A connection."""

    def __init__(self, wires: "Wires", near: Process, far: Process, name: str) -> None:
        self.wires = wires
        self.name = name
        self.up = True
        self.half_open = False
        self.ends = End(self, near), End(self, far)
        self.ends[0].peer, self.ends[1].peer = self.ends[1], self.ends[0]
        wires.links.append(self)

    def later(self, action: Callable[[], None]) -> None:
        """After the delay of the connection."""
        self.wires.world.after(self.wires.delay(), action)

    def left(self) -> None:
        """An end was closed."""
        if all(end.closed for end in self.ends) and self in self.wires.links:
            self.wires.links.remove(self)

    def cut(self) -> None:
        """Both ends are told, each after a while."""
        if self.up:
            self.up = False
            self.wires.world.trace("cut", self.name)
            for end in self.ends:
                self.later(end.lost)

    def half_opened(self) -> None:
        """Nothing arrives any more, and no end is told before its keep-alive tells it."""
        if self.up and not self.half_open:
            self.half_open = True
            self.wires.world.trace("half open", self.name)
            for end in self.ends:
                self.wires.world.after(end.keepalive_s, end.lost)


class Wires:
    """All connections of a run, and the addresses at which somebody listens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dice = random.Random(f"{world.seed} wires")
        self.links: list[Link] = []
        self.listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self.dark: set[str] = set()
        """Addresses of machines that answer nothing."""
        self.numbers = 0

    def delay(self) -> float:
        """How long the next thing takes."""
        return DELAY_S * (0.2 + self.dice.expovariate(1.0))

    def listen(self, process: Process, address: str, accept: Callable[[End], None]) -> None:
        """Take connections; ``accept`` is called when one is there. Raises ``OSError`` when somebody listens there."""
        if address in self.listeners:
            raise OSError(98, "Address already in use")
        self.listeners[address] = process, accept

    def unlisten(self, address: str) -> None:
        """Nobody listens there any more."""
        self.listeners.pop(address, None)

    def connect(self, process: Process, address: str, done: Callable[[End | None], None]) -> None:
        """Connect, and call ``done`` with our end, or with None when nobody listens; never when nobody answers."""
        def arrive() -> None:
            if address in self.dark:
                return
            found = self.listeners.get(address)
            mine = None if found is None else self.join(process, *found, address)
            self.world.after(self.delay(), lambda: None if process.dead else done(mine))

        self.world.after(self.delay(), arrive)

    def join(
        self, process: Process, listener: Process, accept: Callable[[End], None], address: str = "pair"
    ) -> End:
        """A connection that is there at once; returns our end."""
        self.numbers += 1
        link = Link(self, process, listener, f"{process.name}/{address}/{self.numbers}")
        mine, theirs = link.ends
        if process.dead:
            mine.close()
        accept(theirs)
        return mine

    def process_ended(self, process: Process) -> None:
        """The system closes what the process has left open."""
        for address in [address for address, (owner, _) in self.listeners.items() if owner is process]:
            del self.listeners[address]
        for link in list(self.links):
            for end in link.ends:
                if end.process is process:
                    end.close()
