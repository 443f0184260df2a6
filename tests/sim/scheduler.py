"""The simulated machine: one clock, threads that move one at a time, and dice that decide which one is next.

Theory of operation. Each simulated thread is a real thread that holds a gate. At every moment exactly one of them
holds the baton. A thread gives the baton away where it would wait in reality: for an event, a lock, a queue, a disk or
a timer. The thread that gives the baton away picks the next one itself: a timer that is due, else a ready thread by the
dice, else time jumps to the next timer. So a run is a function of its seed, and a second of waiting costs nothing.

A process groups threads. A killed process raises ``Killed`` in each of its threads at its next simulated call, and what
such a call would have done is not done. A frozen process keeps its ready threads aside until it is thawed.

Law of this file: no real clock, and no real wait but for the baton.
"""

import heapq
import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import xxhash

BEGIN_NS: Final = 10**12
"""The monotonic clock at the beginning; away from zero, because a machine has booted before."""
WALL_NS: Final = 1_767_225_600 * 10**9
"""The wall clock at the beginning: 2026-01-01."""
READ_NS: Final = 500
"""A look at the clock takes as long, so that a loop that waits for time to pass ends."""
PREEMPT_SHARE: Final = 0.08
"""How often a thread loses the baton after it has woken another one."""


class Killed(BaseException):
    """Raised in the threads of a process that was killed."""


class Stuck(AssertionError):
    """Raised when every thread waits and no timer is left."""


class Timer:
    """An action at a moment; ``cancelled`` ones are passed over."""

    __slots__ = ("action", "cancelled")

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.cancelled = False


class Process:
    """Threads that die and freeze together. ``name`` appears in the trace."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.parent: Process | None = None
        self.frozen_ns = self._frozen_at = 0
        """How long it was frozen, and since when it is."""
        self.dead = False
        self.frozen = False
        self.threads: list[Thread] = []
        self.parked: list[Thread] = []
        self.on_death: list[Callable[[], None]] = []
        """The end of a process, as the system handles it: close its descriptors and connections."""
        world.processes.append(self)
        self.pid = 1 + len(world.processes)

    def kill(self) -> None:
        """As ``kill -9``."""
        self.end("killed")

    def end(self, how: str) -> None:
        """The process is no more, in order or not; what it has left in the system is given back."""
        if self.dead:
            return
        self.world.trace(self.name, how)
        self.dead, self.frozen = True, False
        for thread in self.threads:
            if thread.started and not thread.over and thread is not self.world.current:
                self.world.make_ready(thread)
        self.parked.clear()
        for action in self.on_death:
            action()

    def freeze(self, seconds: float) -> None:
        """As ``SIGSTOP``, and ``SIGCONT`` after this time."""
        if self.dead or self.frozen:
            return
        self.world.trace("freeze", self.name)
        self.frozen = True
        self._frozen_at = self.world.now
        self.world.after(seconds, self.thaw)

    def thaw(self) -> None:
        """Go on."""
        if self.frozen:
            self.frozen = False
            self.frozen_ns += self.world.now - self._frozen_at
            parked, self.parked = self.parked, []
            for thread in parked:
                thread.queued = False
                self.world.make_ready(thread)


class Thread:
    """As ``threading.Thread``."""

    def __init__(
        self, target: Callable[[], object], name: str = "", daemon: bool = True, process: Process | None = None
    ) -> None:
        world = the_world()
        self.process = process or world.process
        self.name = name
        self.started = self.over = self.queued = False
        self.woken = False
        self.joiners: list[Thread] = []
        self.gate = threading.Lock()
        self.gate.acquire()
        self.wait_number = 0
        """Which wait it is in: a timer of an older one does nothing."""
        self.loop: Any = None
        """The event loop that it runs, if it runs one."""
        self._target = target
        self._world = world
        self.process.threads.append(self)
        self._real = threading.Thread(target=self._run, name=f"sim-{name}", daemon=True)

    def start(self) -> None:
        """Make it ready; it runs when the dice say so."""
        self._world.require_alive(self.process)
        self.started = True
        self._real.start()
        self._world.make_ready(self)

    def _run(self) -> None:
        self.gate.acquire()
        try:
            if not self.process.dead:
                self._target()
        except Killed:
            pass
        except BaseException as error:
            self._world.fail(f"the thread {self.name} of {self.process.name} ended: {type(error).__name__}: {error}")
        finally:
            self.over = True
            for joiner in self.joiners:
                self._world.make_ready(joiner, woken=True)
            self._world.hand_over(self)

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.started and not self.over

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        if not self.over:
            self._world.wait(self.joiners, timeout)


class World:
    """Clock, threads and dice of one run. ``trace`` keeps a digest of everything that happened, and lines if wanted."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.now = BEGIN_NS
        self.wall_offset = WALL_NS - BEGIN_NS
        self.current: Thread | None = None
        self.failures: list[str] = []
        """A failure that no monitor expects: an exception that reached the edge of a thread or a loop."""
        self.lines: list[str] | None = [] if keep_trace else None
        self.traced = 0
        self.processes: list[Process] = []
        self.system = Process(self, "system")
        self._trace = xxhash.xxh3_64()
        self._timers: list[tuple[int, int, Timer]] = []
        self._timer_number = 0
        self._ready: list[Thread] = []
        self.closing = False
        self._until = BEGIN_NS
        self._done: Callable[[], bool] = lambda: False
        self._main_gate = threading.Lock()
        self._main_gate.acquire()

    # --- time ---------------------------------------------------------------------------------------------------------

    def monotonic_ns(self, look_ns: int = READ_NS) -> int:
        """As ``time.monotonic_ns``."""
        self.now += look_ns
        return self.now

    def wall_ns(self, look_ns: int = READ_NS) -> int:
        """As ``time.time_ns``."""
        return self.monotonic_ns(look_ns) + self.wall_offset

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return (self.now - BEGIN_NS) / 1e9

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Run an action later, as the system's: it must not wait."""
        timer = Timer(action)
        self._timer_number += 1
        heapq.heappush(self._timers, (self.now + max(0, round(seconds * 1e9)), self._timer_number, timer))
        return timer

    def trace(self, *words: object) -> None:
        """Something happened."""
        text = " ".join(map(str, words))
        self.traced += 1
        self._trace.update(f"{self.now} {text}\n".encode())
        if self.lines is not None:
            self.lines.append(f"{self.seconds:12.6f}  {text}")

    @property
    def digest(self) -> str:
        """Of all that was traced."""
        return self._trace.hexdigest()

    def fail(self, sentence: str) -> None:
        """Something happened that must never."""
        self.trace("FAILED", sentence)
        self.failures.append(sentence)

    # --- threads ------------------------------------------------------------------------------------------------------

    @property
    def process(self) -> Process:
        """Of the thread that runs."""
        return self.system if self.current is None else self.current.process

    def require_alive(self, process: Process | None = None) -> None:
        """Raise ``Killed`` in a dead process."""
        if (process or self.process).dead:
            raise Killed

    def run(self, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let everything run for this long, or until ``done``; for the test's own thread. Whether it is done."""
        assert self.current is None
        self._until, self._done = self.now + round(seconds * 1e9), done
        self._pick(None)
        return done()

    def make_ready(self, thread: Thread, *, woken: bool = False) -> None:
        """Let a thread run when the dice say so."""
        if thread.over or thread.queued:
            return
        thread.woken = thread.woken or woken
        thread.wait_number += 1
        thread.queued = True
        if thread.process.frozen:
            thread.process.parked.append(thread)
        else:
            self._ready.append(thread)

    def wait(self, waiters: "list[Thread] | deque[Thread]", timeout: float | None) -> bool:
        """Give the baton away until somebody wakes us; False when the time was over first."""
        me = self.current
        if me is None:
            raise Stuck("the test's own thread would wait")
        self.require_alive(me.process)
        me.woken = False
        waiters.append(me)
        number = me.wait_number
        timer = None
        if timeout is not None:
            timer = self.after(timeout, lambda: self.make_ready(me) if me.wait_number == number else None)
        self.hand_over(me)
        if timer is not None:
            timer.cancelled = True
        if me in waiters:
            waiters.remove(me)
        self.require_alive(me.process)
        return me.woken

    def wake(self, waiters: "list[Thread] | deque[Thread]", count: int | None = None) -> None:
        """Wake those that wait."""
        for thread in list(waiters)[:count]:
            waiters.remove(thread)
            self.make_ready(thread, woken=True)

    def pause(self, seconds: float) -> None:
        """The running thread waits for time to pass."""
        me = self.current
        if me is not None:
            self.wait([], seconds)

    def preempt(self) -> None:
        """The running thread may lose the baton here, as anywhere."""
        me = self.current
        if me is not None and self._ready and self.dice.random() < PREEMPT_SHARE:
            self.require_alive(me.process)
            self.make_ready(me)
            self.hand_over(me)
            self.require_alive(me.process)

    def hand_over(self, me: Thread) -> None:
        """Give the baton to the next thread; returns when it is back."""
        self._pick(me)

    def _pick(self, me: Thread | None) -> None:
        target = self._next()
        if target is me and target is not None and not target.over:
            return
        self.current = target
        (self._main_gate if target is None else target.gate).release()
        if me is None:
            self._main_gate.acquire()
        elif not me.over:
            me.gate.acquire()

    def _next(self) -> Thread | None:
        """The next thread; None is the test's own."""
        while True:
            timers = self._timers
            if self.closing:
                timers = []
            elif self._done() or self.failures:
                return None
            if timers and timers[0][0] <= self.now:
                self._fire()
                continue
            if self._ready:
                at = self.dice.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                thread = self._ready.pop(at)
                if thread.process.frozen:
                    thread.process.parked.append(thread)
                    continue
                thread.queued = False
                self.current = thread
                return thread
            if not timers or timers[0][0] > self._until:
                self.now = self.now if self.closing else max(self.now, self._until)
                return None
            self.now = timers[0][0]

    def _fire(self) -> None:
        timer = heapq.heappop(self._timers)[2]
        if not timer.cancelled:
            before, self.current = self.current, None
            try:
                timer.action()
            except Exception as error:  # otherwise it would end whichever thread picks, and the run would stand still
                self.fail(f"a timer ended: {type(error).__name__}: {error}")
            self.current = before

    def close(self) -> None:
        """Kill every process and let every thread end; for the test's own thread."""
        self.closing = True
        for process in self.processes:
            process.end("closed")
        self._pick(None)


_world: World | None = None


def the_world() -> World:
    """The one that runs."""
    assert _world is not None
    return _world


def set_world(world: World | None) -> None:
    """Make a world the one that runs."""
    global _world
    _world = world


# --- what stands in for ``threading``, ``queue`` and ``time`` --------------------------------------------------------


class Event:
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._world = the_world()
        self._process = self._world.process
        self._set = False
        self._waiters: list[Thread] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake who waits."""
        self._world.require_alive(self._process)
        self._set = True
        self._world.wake(self._waiters)
        self._world.preempt()

    def clear(self) -> None:
        """Not set any more."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is set."""
        self._world.require_alive(self._process)
        if not self._set:
            self._world.wait(self._waiters, timeout)
        return self._set


class Lock:
    """As ``threading.Lock``."""

    def __init__(self) -> None:
        self._world = the_world()
        self._held = False
        self._waiters: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; False when it cannot be had in time."""
        until = self._world.now + timeout * 1e9 if timeout >= 0 else None
        while self._held:
            self._world.require_alive()
            left = None if until is None else (until - self._world.now) / 1e9
            if not blocking or (left is not None and left <= 0):
                return False
            self._world.wait(self._waiters, left)
        self._held = True
        return True

    def release(self) -> None:
        """Give it back."""
        self._held = False
        self._world.wake(self._waiters, 1)

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue:
    """As ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._world = the_world()
        self._process = self._world.process
        self._items: deque[Any] = deque()
        self._waiters: deque[Thread] = deque()

    @classmethod
    def __class_getitem__(cls, _: object) -> "type[SimpleQueue]":
        return cls

    def put(self, item: Any) -> None:
        """Add to the end."""
        self._world.require_alive(self._process)
        self._items.append(item)
        self._world.wake(self._waiters, 1)
        self._world.preempt()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The first item. Raises ``queue.Empty``."""
        self._world.require_alive(self._process)
        until = None if timeout is None else self._world.now + timeout * 1e9
        while not self._items:
            left = None if until is None else (until - self._world.now) / 1e9
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._world.wait(self._waiters, left)
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether there is nothing."""
        return not self._items

    def qsize(self) -> int:
        """How many there are."""
        return len(self._items)


class Namespace:
    """A module in the place of another: these names, and of the real one only those that are listed."""

    def __init__(self, real: Any, names: dict[str, Any], passed: tuple[str, ...] = ()) -> None:
        self.__dict__.update({name: getattr(real, name) for name in passed})
        self.__dict__.update(names)


def threading_module() -> Namespace:
    """``threading``."""
    return Namespace(threading, {"Thread": Thread, "Event": Event, "Lock": Lock})


def queue_module() -> Namespace:
    """``queue``."""
    return Namespace(queue, {"SimpleQueue": SimpleQueue}, ("Empty",))


def time_module(world: World, look_ns: int = READ_NS, **other: Callable[[], int]) -> Namespace:
    """``time``, with ``other`` clocks by their names. A look at the clock takes ``look_ns``. Work takes no processor
    time, but where ``other`` clocks say so."""

    def monotonic_ns() -> int:
        return world.monotonic_ns(look_ns)

    def wall_ns() -> int:
        return world.wall_ns(look_ns)

    return Namespace(None, {
        "monotonic_ns": monotonic_ns, "monotonic": lambda: monotonic_ns() / 1e9,
        "perf_counter_ns": monotonic_ns, "perf_counter": lambda: monotonic_ns() / 1e9,
        "time_ns": wall_ns, "time": lambda: wall_ns() / 1e9, "thread_time_ns": lambda: world.now // 1000,
        "thread_time": lambda: world.now / 1e12, "process_time": lambda: world.now / 1e12, "sleep": world.pause,
        **other,
    })
