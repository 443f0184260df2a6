"""Unix sockets of a simulated process, ``select``, and the processes that are given one: reporters of taps.

Law of this file: a call that would wait in reality gives the baton away, or raises ``BlockingIOError``.
"""

import asyncio
import select
import socket
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from kvbm_console.reporter import __main__ as reporter
from kvbm_console.tap.sender import TapSettings
from tests.sim.scheduler import Namespace, Process, Thread
from tests.sim.wires import WINDOW_BYTES, End, EndOfFile

if TYPE_CHECKING:
    from tests.sim.loop import Loop
    from tests.sim.machine import Machine

EMPTY_MAX: Final = 2_000
"""Looks of a thread at its sockets that find nothing and do not wait: more of them are a thread that spins."""


class Socket:
    """As ``socket.socket(AF_UNIX)``; all are made by ``Sockets``."""

    waits = False

    def __init__(self, sockets: "Sockets", end: End | None = None) -> None:
        self._sockets = sockets
        self._path = ""
        self._waiting: list[Socket] = []
        self._left = b""
        self._given = False
        """Another process has it."""
        self.closed = False
        self.notify: Callable[[], None] = lambda: None
        """Called when there may be something to do."""
        self._take(end)

    def _take(self, end: End | None) -> None:
        self.end = end
        if end is not None:
            end.notify = lambda: self.notify()

    # --- what the program asks ---

    def connect(self, path: str) -> None:
        """Connect to a listening process at once, as Unix sockets do. Raises ``ConnectionRefusedError``."""
        wires = self._sockets.machine.wires
        found = wires.listeners.get(path)
        if found is None:
            raise ConnectionRefusedError(111, "Connection refused")
        self._take(wires.join(wires.world.process, *found, path))

    def bind(self, path: str) -> None:
        """Listen there, once ``listen`` is called."""
        self._path = path

    def listen(self, backlog: int) -> None:
        """Take connections."""
        wires = self._sockets.machine.wires

        def accept(end: End) -> None:
            self._waiting.append(Socket(self._sockets, end))
            self.notify()

        wires.listen(wires.world.process, self._path, accept)

    def accept(self) -> tuple["Socket", str]:
        """The next connection."""
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.pop(0), ""

    def setblocking(self, flag: bool) -> None:
        """No call of a simulated socket blocks."""

    def fileno(self) -> int:
        """A number under which another process may have it."""
        return self._sockets.number_of(self)

    @property
    def readable(self) -> bool:
        """True if ``recv`` has an answer."""
        return bool(self._left) or (self.end is not None and self.end.readable)

    @property
    def writable(self) -> bool:
        """True if ``send`` takes something."""
        return self.end is not None and (self.end.room or self._over())

    def _over(self) -> bool:
        return self.end is not None and bool(self.end.arrived) and isinstance(self.end.arrived[-1][0], EndOfFile)

    def send(self, data: Any) -> int:
        """Send as much as there is room for."""
        assert self.end is not None
        if self._over():
            raise BrokenPipeError(32, "Broken pipe")
        if not self.end.room:
            raise BlockingIOError
        part = bytes(data[:WINDOW_BYTES])
        self.end.send(part, len(part))
        return len(part)

    def recv(self, size: int) -> bytes:
        """What has arrived; empty at the end."""
        assert self.end is not None
        if not self._left:
            item = self.end.read()
            if item is None:
                raise BlockingIOError
            if isinstance(item, EndOfFile):
                if item.reset:
                    raise ConnectionResetError(104, "Connection reset by peer")
                return b""
            self._left = item
        data, self._left = self._left[:size], self._left[size:]
        return data

    def close(self) -> None:
        """No more from us, unless another process has it."""
        self.closed = True
        if self._path:
            self._sockets.machine.wires.unlisten(self._path)
        if self.end is not None and not self._given:
            self.end.close()

    def detached(self) -> End | None:
        """The connection, for a transport."""
        return self.end

    def give(self, process: Process) -> "Socket":
        """Let another process have it."""
        assert self.end is not None
        self._given = True
        self.end.process = process
        given = Socket(self._sockets, self.end)
        given._left = self._left
        return given

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SocketPath:
    """The path of a socket."""

    def __init__(self, sockets: "Sockets", path: str) -> None:
        self._sockets, self._path = sockets, path

    def unlink(self, missing_ok: bool = False) -> None:
        """Nobody finds it any more."""
        self._sockets.machine.wires.unlisten(self._path)

    def lstat(self) -> SimpleNamespace:
        """Tells the socket of one listener from that of another. Raises ``FileNotFoundError``."""
        found = self._sockets.machine.wires.listeners.get(self._path)
        if found is None:
            raise FileNotFoundError(2, "No such file or directory", self._path)
        return SimpleNamespace(st_dev=0, st_ino=id(found[0]))

    def __str__(self) -> str:
        return self._path


class ReporterProcess:
    """A process that was given a socket, as ``subprocess.Popen`` and asyncio's transport show it."""

    def __init__(self, machine: "Machine", command: tuple[str, ...]) -> None:
        machine.world.require_alive()
        if machine.no_processes:
            raise OSError(24, "Too many open files")
        number, settings = command[4], msgspec.json.decode(command[5], type=TapSettings)
        sockets = machine.sockets
        sockets.reporters += 1
        begins_s = machine.wires.dice.uniform(0.05, 0.4)

        async def main() -> None:
            await asyncio.sleep(begins_s)  # the interpreter starts
            await reporter.main(int(number), settings, once="--once" in command)

        self.settings = settings
        self.once = "--once" in command
        self.began_ns = machine.world.now
        self.parent = machine.world.process
        self.loop = machine.loop(f"reporter-{sockets.reporters}", main)
        self.process = self.loop.process
        sockets.adopt(int(number), self.process)
        sockets.children.append(self)
        self._killed = False

    @property
    def returncode(self) -> int | None:
        """None while it lives."""
        return None if not self.process.dead else -9 if self._killed else 0

    def poll(self) -> int | None:
        """As ``returncode``."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of it, in a thread."""
        thread = self.loop.thread
        assert thread is not None
        if not self.process.dead:
            thread.join(timeout)
        if not self.process.dead:
            raise subprocess.TimeoutExpired("reporter", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """As ``kill -9``, also of a frozen process."""
        if not self.process.dead:
            self._killed = True
            self.process.kill()

    def terminate(self) -> None:
        """A frozen process does not hear of it before it is thawed."""
        if not self.process.frozen:
            self.process.kill()

    # --- asyncio's transport ---

    def get_pid(self) -> int:
        return self.process.pid

    def get_returncode(self) -> int | None:
        return self.returncode

    async def _wait(self) -> int | None:
        loop: Any = asyncio.get_running_loop()
        ended = loop.create_future()
        if not self.process.dead:
            self.process.on_death.append(lambda: loop.call_soon(self._ended, ended))
            await ended
        return self.returncode

    @staticmethod
    def _ended(future: "asyncio.Future[None]") -> None:
        if not future.done():
            future.set_result(None)


class Sockets:
    """All Unix sockets of a machine."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.reporters = 0
        self.children: list[ReporterProcess] = []
        self.empty = 0
        """Looks in a row that found nothing and did not wait."""
        self._numbers: dict[int, Socket] = {}
        self._last_number = 100

    def number_of(self, one: Socket) -> int:
        """A number for a socket."""
        self._last_number += 1
        self._numbers[self._last_number] = one
        return self._last_number

    def adopt(self, number: int, process: Process) -> None:
        """A process begins with this descriptor."""
        self._numbers[number] = self._numbers[number].give(process)

    def _new(self, *_: Any, fileno: int | None = None) -> Socket:
        return Socket(self) if fileno is None else self._numbers.pop(fileno)

    def _pair(self) -> tuple[Socket, Socket]:
        wires = self.machine.wires
        ends: list[End] = []
        mine = wires.join(wires.world.process, wires.world.process, ends.append)
        return Socket(self, mine), Socket(self, ends[0])

    def _select(
        self, readers: list[Socket], writers: list[Socket], _: object, timeout: float
    ) -> tuple[list[Socket], list[Socket], list[Socket]]:
        world = self.machine.world
        found = [each for each in readers if each.readable], [each for each in writers if each.writable]
        if not any(found) and timeout:
            waiters: list[Thread] = []
            for each in (*readers, *writers):
                each.notify = lambda: world.wake(waiters)
            world.wait(waiters, timeout)
            found = [each for each in readers if each.readable], [each for each in writers if each.writable]
            self.empty = 0
        else:
            self.empty = 0 if any(found) else self.empty + 1
            if self.empty > EMPTY_MAX:
                self.empty = 0
                self.machine.spinning(world.process.name)
                world.pause(timeout or 0.1)
            world.preempt()
        return *found, []

    # --- modules ---

    def socket_module(self) -> Namespace:
        """``socket``."""
        return Namespace(
            socket, {"socket": self._new, "socketpair": self._pair}, ("AF_UNIX", "SOCK_STREAM")
        )

    def select_module(self) -> Namespace:
        """``select``."""
        return Namespace(select, {"select": self._select})

    def subprocess_module(self) -> Namespace:
        """``subprocess`` of who starts a reporter."""
        return Namespace(
            subprocess, {"Popen": lambda command, **_: self.process(*command)},
            ("DEVNULL", "TimeoutExpired"),
        )

    def process(self, *command: str) -> ReporterProcess:
        """Start a reporter."""
        return ReporterProcess(self.machine, command)

    def path(self, text: str) -> SocketPath:
        """As ``Path``, of a socket."""
        return SocketPath(self, text)

    # --- what a loop asks ---

    async def until(self, loop: "Loop", one: Socket, action: Callable[[], Any]) -> Any:
        """The result of an action of a socket, as soon as it has one."""
        while True:
            try:
                return action()
            except BlockingIOError:
                waiting = loop.create_future()
                one.notify = lambda waiting=waiting: loop.call_soon(ReporterProcess._ended, waiting)  # type: ignore[misc]
                await waiting
