"""The event loop of a simulated process: asyncio's tasks, timers and futures on the simulated clock.

Law of this file: callbacks run in the order in which asyncio runs them; only time and the outside are simulated.
"""

import asyncio
import heapq
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final

from anyio._backends import _asyncio as anyio_tasks

from tests.sim.scheduler import Killed, Process, Thread, World
from tests.sim.transports import Transport

TURN_S: Final = 30e-6
"""A turn of the loop that had something to do takes about as long."""
EVENT_S: Final = 120e-6
"""An event of the RPC library takes so much longer, where such events are counted."""


UNWIND_MAX: Final = 100
"""So many awaits in blocks that are left are passed over."""


class NumberedTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class Loop(asyncio.AbstractEventLoop):
    """Runs in a thread of its process, see ``start``."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.tasks: list[NumberedTask] = []
        self.serving = False
        """Engines depend on it now: it must not wait for anything but its own events."""
        self.waited_ns = 0
        """The longest time for which a callback of a serving loop stood still, but for freezes of its process."""
        self.disk_calls: list[str] = []
        """Calls that the thread of a serving loop made to the disk."""
        self.one_event_a_turn = False
        """The RPC library's events come one a turn, as they do where its thread waits for the loop."""
        self._factory: Callable[..., NumberedTask] = lambda loop, coro, **_: NumberedTask(coro, loop=loop)
        self._events: deque[asyncio.Handle] = deque()
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = 0
        self._sleeping: list[Thread] = []
        self._stopped = False
        self.thread: Thread | None = None
        self.wires: Any = None
        """The connections of its machine."""
        self.sockets: Any = None
        """The Unix sockets of its machine."""

    # --- what asyncio asks for ---

    def time(self) -> float:
        return self.world.now / 1e9

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._stopped

    def is_closed(self) -> bool:
        return self._stopped

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self._sleeping:
            self.world.wake(self._sleeping)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def deliver(self, callback: Any, *args: Any) -> None:
        """An event of the RPC library. Its thread hands over the next one when the loop has taken the last."""
        if not self.one_event_a_turn:
            self.call_soon(callback, *args)
            return
        self._events.append(asyncio.Handle(callback, args, self, None))
        if self._sleeping:
            self.world.wake(self._sleeping)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, handle))
        if self._sleeping:
            self.world.wake(self._sleeping)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> NumberedTask:
        task = self._factory(self, coro)
        if name is not None:
            task.set_name(name)
        self._numbers += 1
        task.number = self._numbers
        self.tasks.append(task)
        if len(self.tasks) > 256:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def get_task_factory(self) -> Any:
        return self._factory

    def set_task_factory(self, factory: Any) -> None:
        self._factory = factory

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self.process.dead and not isinstance(error, Killed):
            self.world.fail(f"{self.process.name}: {context.get('message')}: {type(error).__name__}: {error}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    async def shutdown_asyncgens(self) -> None:
        return

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str | None = None, port: int | None = None, *,
        sock: Any = None, **_: Any,
    ) -> tuple[Any, Any]:
        end = None if sock is None else sock.detached()
        if end is None:
            future = self.create_future()
            self.wires.connect(
                self.process, f"tcp://{host}:{port}", lambda found: self.call_soon(self._finish, future, found, None)
            )
            end = await future
        if end is None:
            raise ConnectionRefusedError(111, "Connection refused")
        protocol = protocol_factory()
        return Transport(self, end, protocol), protocol

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        if sock.waits:
            connection: tuple[Any, Any] = await sock.accept()
            return connection
        accepted: tuple[Any, Any] = await self.sockets.until(self, sock, sock.accept)
        return accepted

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], sock: Any, *, ssl: None = None, **_: Any
    ) -> Any:
        return await sock.transport(protocol_factory)

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        data: bytes = await self.sockets.until(self, sock, lambda: sock.recv(nbytes))
        return data

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        while data:
            sent = await self.sockets.until(self, sock, lambda data=data: sock.send(data))  # type: ignore[misc]
            data = data[sent:]

    async def subprocess_exec(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], program: str, *arguments: str, **_: Any
    ) -> tuple[Any, Any]:
        return self.sockets.process(program, *arguments), protocol_factory()

    # --- life ---

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run ``main`` in a thread of the process; the thread ends with it."""
        self.thread = Thread(lambda: self._run(main), f"{self.process.name}-loop", process=self.process)
        self.thread.loop = self
        self.thread.start()

    def in_thread(self, work: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """As ``anyio.to_thread.run_sync``."""
        future = self.create_future()

        def run() -> None:
            try:
                result, error = work(*args), None
            except Killed:
                raise
            except BaseException as raised:
                result, error = None, raised
            self.call_soon(self._finish, future, result, error)

        Thread(run, f"{self.process.name}-worker", process=self.process).start()
        return future

    @staticmethod
    def _finish(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main())
            task.add_done_callback(self._ended)
            while not self._stopped:
                self._turn()
        finally:
            self._abandon()
            asyncio._set_running_loop(None)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._stopped = True
        if not task.cancelled() and task.exception() is not None and not self.process.dead:
            error = task.exception()
            self.world.fail(f"{self.process.name} ended: {type(error).__name__}: {error}")

    def _turn(self) -> None:
        world = self.world
        now = self.time()
        while self._timers and self._timers[0][0] <= now:
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)
        took_s = TURN_S
        if self._events:
            self._ready.append(self._events.popleft())
            took_s += EVENT_S
        if not self._ready:
            while self._timers and self._timers[0][2].cancelled():
                heapq.heappop(self._timers)
            timeout = None if not self._timers else max(0.0, self._timers[0][0] - now) + 1e-9
            world.wait(self._sleeping, timeout)
            return
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                before = world.now - self.process.frozen_ns
                handle._run()
                if self.serving:
                    self.waited_ns = max(self.waited_ns, world.now - self.process.frozen_ns - before)
        world.require_alive(self.process)
        if self._stopped:
            return
        world.pause(took_s * (0.5 + world.dice.random()))

    def _abandon(self) -> None:
        """End every task as far as a dead process can: nothing of it is seen outside."""
        self._stopped = True
        self.process.end("ended")
        for task in self.tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                unwind(task.get_coro())
            # The scope of a task that did not end keeps the task, and so the whole run, in this table for ever.
            anyio_tasks._task_states.pop(task, None)


def unwind(coroutine: Any) -> None:
    """Leave every block of a coroutine, also those that would wait while they are left. One that has not begun is
    closed, and so are the coroutines that it was given to await."""
    if has_not_begun(coroutine):
        for given in coroutine.cr_frame.f_locals.values():
            for inner in (given, getattr(given, "coro", None)):  # a task of anyio, from 4.14 on, is given a handle
                if has_not_begun(inner):
                    unwind(inner)
        coroutine.close()
        return
    for _ in range(UNWIND_MAX):
        try:
            coroutine.throw(Killed())
        except BaseException:
            return


def has_not_begun(coroutine: Any) -> bool:
    """True for a coroutine of Python that was made, and neither awaited nor closed."""
    return inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
