"""The machine under simulation: which names of the program stand for simulated things, and its processes.

The program is not changed and not told. Its modules ask ``os``, ``threading``, ``time`` and the like under their own
global names; for the time of a run these names are others (``SEAMS``). A test proves that the list is complete.

Law of this file: nothing that decides is replaced, only clocks, threads, files, sockets and processes.
"""

import contextlib
import errno
import gc
import importlib
import inspect
import logging
import os
import resource
import secrets
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import anyio.to_thread

from kvbm_console.recording import seal
from kvbm_console.service import LeaderService
from server.daemon import Daemon
from server.options import DaemonOptions
from tests.sim import disk as disks
from tests.sim.disk import Disk, SimPath
from tests.sim.loop import Loop
from tests.sim.network import Channel, Connection, Network, Server
from tests.sim.scheduler import (
    Namespace,
    Process,
    Thread,
    World,
    queue_module,
    set_world,
    threading_module,
    time_module,
)
from tests.sim.sockets import Sockets
from tests.sim.tcp import Tcp
from tests.sim.wires import Wires
from tests.sim.zeromq import zmq_module

RECORDING: Final = "kvbm_console.recording."
TAP: Final = "kvbm_console.tap."
SEAMS: Final[dict[str, tuple[str, ...]]] = {
    RECORDING + "files": ("fcntl", "os"),
    RECORDING + "output": ("os", "shutil"),
    RECORDING + "recover": ("os",),
    RECORDING + "scan": ("mmap",),
    RECORDING + "seal": ("os", "queue", "subprocess", "threading", "time", "Path"),
    RECORDING + "segments": ("os",),
    RECORDING + "threads": ("queue", "threading"),
    RECORDING + "writer": ("os", "queue", "threading", "time"),
    "kvbm_console.client.connection": ("open_channel",),
    "kvbm_console.client.feeder": ("time",),
    "kvbm_console.engines.kv_events.stream": ("time",),
    "kvbm_console.engines.kv_events.zmq_source": ("resource", "time", "zmq"),
    "kvbm_console.metrics.collect": ("resource", "time"),
    "kvbm_console.metrics.http": ("socket",),
    "kvbm_console.simulator.driver": ("time",),
    "kvbm_console.simulator.simulated": ("time",),
    "kvbm_console.parts": ("time",),
    "kvbm_console.service": ("secrets", "time"),
    TAP + "connector": ("_now",),
    TAP + "recorder": ("time",),
    TAP + "sender": ("select", "socket", "subprocess", "threading", "time"),
    "kvbm_console.reporter.__main__": ("socket",),
    "server.taps": ("os", "socket", "Path"),
    "server.daemon": ("Endpoint", "grpc", "time"),
    "server.lints": ("time",),
    "server.questions": ("time", "waited_ns"),
    "server.recording": ("Path", "time"),
}
"""Module to its global names that stand for something simulated during a run. What stands for a name in one module
alone is in ``names`` under the name of both."""
TAPS_ADDRESS: Final = "127.0.0.1:7400"
"""The address at which a tap that starts its reporter itself finds the daemon."""
OUTSIDE: Final = frozenset({
    "os", "fcntl", "shutil", "mmap", "queue", "subprocess", "threading", "time", "secrets", "socket", "signal",
    "random", "tempfile", "select", "resource",
})
"""Modules of the standard library through which the outside comes in."""


class Machine:
    """World, disk and network of one run, and the processes on them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.disk = Disk(world)
        self.network = Network(world)
        self.wires = Wires(world)
        self.sockets, self.tcp = Sockets(self), Tcp(self)
        self.daemons = 0
        self.descriptors_max: int | None = None
        """Of a process; None for no limit."""
        self.disk.no_descriptor = self.no_descriptor
        self.no_processes = False
        """No process can be started: descriptors have run out."""
        self.spinning: Callable[[str], None] = lambda name: None
        """Called with the name of a process when a thread of it asks its sockets again and again and never waits."""
        self.sealing_s = 0.0
        self.sealed_for_nobody: list[str] = []
        """Sealing processes that began behind the death of their daemon and sealed all the same."""
        """The time that a sealing process waits for the processor, beside a busy engine."""
        self.step_s = 0.0
        """The time that a step of the embedded engine takes; 0 where its work takes none."""
        self.answer_s = 0.0
        """The time that an answer takes, in the same way."""
        self.stepped_ns = self._answered_ns = 0

    def process(self, name: str) -> Process:
        """A new one."""
        process = Process(self.world, name)
        process.on_death.append(lambda: self.disk.close_files_of(process))
        process.on_death.append(lambda: self.network.process_ended(process))
        process.on_death.append(lambda: self.wires.process_ended(process))
        process.on_death.append(lambda: self.tcp.process_ended(process))
        return process

    def descriptors(self, process: Process) -> int:
        """How many a process has."""
        served = [each for each in self.network.connections if isinstance(each, Connection) and each.up]
        calls = sum(each.server.loop.process is process for each in served)
        return self.disk.descriptors(process) + self.tcp.of(process) + calls

    def no_descriptor(self) -> bool:
        """True if the running process has reached its limit."""
        limit = self.descriptors_max
        return limit is not None and self.descriptors(self.world.process) >= limit

    def require_descriptor(self) -> None:
        """Raise ``OSError`` when the running process may have no further one."""
        if self.disk.open_error == errno.EMFILE or self.no_descriptor():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def loop(self, name: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Loop:
        """A process with an event loop that runs ``main``."""
        loop = Loop(self.world, self.process(name))
        loop.wires, loop.sockets = self.wires, self.sockets
        loop.start(main)
        return loop

    # --- what stands for the outside ---

    def names(self) -> dict[str, Any]:
        """The simulated thing behind each name of ``SEAMS``; MODULE.NAME is that of this module alone."""
        return {
            "os": disks.os_module(), "fcntl": disks.fcntl_module(), "mmap": disks.mmap_module(),
            "shutil": disks.shutil_module(), "queue": queue_module(), "threading": threading_module(),
            "time": time_module(self.world), "waited_ns": lambda: 0, "Path": SimPath, "subprocess": self._subprocess(),
            "secrets": Namespace(secrets, {"token_hex": lambda n: f"{self.world.dice.getrandbits(8 * n):0{2 * n}x}"}),
            "grpc": Namespace(None, {"aio": Namespace(None, {"server": self._server})}),
            "kvbm_console.metrics.http.socket": self.tcp.module(self._running),
            "resource": Namespace(
                resource, {"getrusage": lambda who: _Usage(), "getrlimit": lambda which: (-1, -1)},
                ("RUSAGE_SELF", "RLIMIT_NOFILE"),
            ),
            "server.lints.time": time_module(self.world, look_ns=0),
            "Endpoint": lambda listen, **_: Endpoint(self, listen), "open_channel": self._channel,
            "kvbm_console.simulator.simulated.time": time_module(self.world, perf_counter_ns=self._engine_clock),
            "server.questions.time": time_module(self.world, thread_time_ns=self._answer_clock),
            "zmq": zmq_module(self.wires, self._running), "socket": self.sockets.socket_module(),
            "select": self.sockets.select_module(), TAP + "connector._now": self.world.monotonic_ns,
            TAP + "sender.subprocess": self.sockets.subprocess_module(),
            "server.taps.Path": self.sockets.path, "server.taps.os": Namespace(None, {"umask": lambda mask: mask}),
        }

    def _engine_clock(self) -> int:
        """The clock by which a slice ends. The engine looks at it behind each step, and the step has taken its time."""
        if self.step_s:
            self.world.pause(self.step_s)
            self.stepped_ns += round(self.step_s * 1e9)
        return self.world.now

    def _answer_clock(self) -> int:
        """The processor time of the loop's thread. Two looks surround an answer, and each takes half of its time."""
        if not self.answer_s:
            return self.world.now // 1000
        self.world.pause(self.answer_s / 2)
        self._answered_ns += round(self.answer_s / 2 * 1e9)
        return self._answered_ns

    def _running(self) -> Loop:
        loop = None if self.world.current is None else self.world.current.loop
        assert isinstance(loop, Loop)
        return loop

    def _server(self, **_: Any) -> Server:
        return Server(self.network, self._running())

    def _channel(self, target: str, _: object) -> Channel:
        return Channel(self.network, target, self._running())

    def _subprocess(self) -> Namespace:
        return Namespace(
            subprocess, {"Popen": lambda command, **_: Child(self, *command[-2:])}, ("DEVNULL", "TimeoutExpired")
        )

    async def run_sync(self, work: Callable[..., Any], *args: Any, **_: Any) -> Any:
        """As ``anyio.to_thread.run_sync``, which leaves the thread alone when its caller is cancelled."""
        return await self._running().in_thread(work, *args)


class _Usage:
    """The answer of ``getrusage``."""

    ru_maxrss = 100_000


class Endpoint:
    """As ``server.options.Endpoint``."""

    def __init__(self, machine: Machine, listen: str) -> None:
        self.address = listen
        self._machine = machine

    def bind(self, server: Server) -> None:
        for address in (self.address, TAPS_ADDRESS):
            self._machine.network.servers[address] = server

    def close(self) -> None:
        for address in (self.address, TAPS_ADDRESS):
            self._machine.network.servers.pop(address, None)


class Child:
    """The sealing process, as ``subprocess.Popen`` shows it."""

    numbers = 0

    def __init__(self, machine: Machine, path: str, parent: str) -> None:
        machine.world.require_alive()
        if machine.no_processes or machine.no_descriptor():
            raise OSError(24, "Too many open files")
        machine.daemons += 1
        self._machine = machine
        self._process = machine.process(f"sealer-{machine.daemons}")
        self._process.parent = machine.world.process
        self._returncode: int | None = None
        self._thread = Thread(lambda: self._work(path, int(parent)), self._process.name, process=self._process)
        self._thread.start()

    def _work(self, path: str, parent: int) -> None:
        if self._machine.sealing_s:
            self._machine.world.pause(self._machine.sealing_s)
        is_orphan = self._process.parent is not None and self._process.parent.dead
        self._returncode = 0 if seal.try_seal(SimPath(path), seal.orphaned(parent)) else 1  # type: ignore[arg-type]
        if is_orphan and self._returncode == 0:
            self._machine.sealed_for_nobody.append(self._process.name)
        self._process.end("ended")

    def poll(self) -> int | None:
        if self._process.dead and self._returncode is None:
            self._returncode = -9
        return self._returncode if self._process.dead else None

    def wait(self, timeout: float | None = None) -> int | None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("seal", timeout or 0.0)
        return self.poll()

    def kill(self) -> None:
        self._process.kill()


_CLOCKS: Final = ("monotonic_ns", "time_ns", "monotonic", "perf_counter_ns", "time")


def _defaults(world: World) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """(keyword defaults of a function, name, real clock, simulated one) wherever a clock was bound at import."""
    simulated = time_module(world)
    clocks = {getattr(time, name): getattr(simulated, name) for name in _CLOCKS}
    for module in SEAMS:
        found = importlib.import_module(module)
        for holder in [found, *(each for _, each in inspect.getmembers(found, inspect.isclass))]:
            if holder is not found and holder.__module__ != module:
                continue
            for function in vars(holder).values():
                for name, value in (getattr(function, "__kwdefaults__", None) or {}).items():
                    if callable(value) and value in clocks:
                        yield function.__kwdefaults__, name, value, clocks[value]


class Swapped:
    """Positional defaults of a function, replaced for a time."""

    def __init__(self, function: Any, clocks: dict[Any, Any]) -> None:
        self.function, self.before = function, function.__defaults__
        function.__defaults__ = tuple(
            clocks.get(value, value) if callable(value) else value for value in self.before
        )

    def back(self) -> None:
        self.function.__defaults__ = self.before


def _positional(world: World) -> list[Swapped]:
    simulated = time_module(world)
    clocks = {getattr(time, name): getattr(simulated, name) for name in _CLOCKS}
    swapped = []
    for module in SEAMS:
        found = importlib.import_module(module)
        for holder in [found, *(each for _, each in inspect.getmembers(found, inspect.isclass))]:
            if holder is not found and holder.__module__ != module:
                continue
            for function in vars(holder).values():
                defaults = getattr(function, "__defaults__", None) or ()
                if inspect.isfunction(function) and any(callable(v) and v in clocks for v in defaults):
                    swapped.append(Swapped(function, clocks))
    return swapped


@contextlib.contextmanager
def machine(seed: int, *, keep_trace: bool = False) -> Iterator[Machine]:
    """A machine on which the program runs; the program is as before when the block is left."""
    world = World(seed, keep_trace=keep_trace)
    set_world(world)
    made = Machine(world)
    disks.set_disk(made.disk)
    disks.Node.numbers = 0
    names = made.names()
    before: list[tuple[Any, str, Any]] = []
    for module, replaced in SEAMS.items():
        found = importlib.import_module(module)
        for name in replaced:
            before.append((found, name, getattr(found, name)))
            setattr(found, name, names[key if (key := f"{module}.{name}") in names else name])
    kept = [(defaults, name, real) for defaults, name, real, _ in _defaults(world)]
    for defaults, name, _, simulated in list(_defaults(world)):
        defaults[name] = simulated
    swapped = _positional(world)
    run_sync = anyio.to_thread.run_sync
    anyio.to_thread.run_sync = made.run_sync  # type: ignore[assignment]
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # What a collector finds late runs its last blocks, which look at the clock, wherever the run is by then.
    gc.collect()
    gc.disable()
    try:
        yield made
    finally:
        gc.enable()
        world.close()
        logging.disable(level)
        anyio.to_thread.run_sync = run_sync
        for each in swapped:
            each.back()
        for defaults, name, real in kept:
            defaults[name] = real
        for found, name, real in reversed(before):
            setattr(found, name, real)
        disks.set_disk(None)
        set_world(None)


class Life:
    """One life of the daemon: a process, from its start to its end. ``daemon`` is None until it is ready."""

    def __init__(self, machine: Machine, options: Callable[[], DaemonOptions]) -> None:
        machine.daemons += 1
        self.machine = machine
        self.daemon: Daemon | None = None
        self.ended = False
        """It ended in order."""
        self.error: BaseException | None = None
        self.summary: Any = None
        self.on_service: Callable[[LeaderService], None] = lambda service: None
        self._options = options
        self.loop = machine.loop(f"daemon-{machine.daemons}", self._main)
        self.process = self.loop.process

    @property
    def service(self) -> LeaderService | None:
        """While it is ready."""
        return None if self.daemon is None or self.process.dead else self.daemon.service

    async def _main(self) -> None:
        try:
            daemon = Daemon(self._options())
            self.on_service(daemon.service)
            self.summary = await daemon.run(self._ready)
        except Exception as error:
            self.error = error
        else:
            self.ended = True
        self.loop.serving = False

    def _ready(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.loop.serving = True
        self.machine.world.trace(self.process.name, "is ready")
