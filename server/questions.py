"""Turns for questions, so that no caller's questions cost an engine more than a small share of the loop's time.

A question (``Hello``, ``SlotDetail``, ``Query``, the beginning of a subscription) is answered on the thread that
decides for engines. Each role has two lanes: the first for callers that asked little lately, the second for those that
ask much. A lane saves up a share of the time that the thread has, and spends it on its questions, connection after
connection. Time in which the thread waits for a processor does not count: beside busy neighbours the engine has less
time, too. While a lane has savings, a question waits for nothing. A flood spends its own savings, moves to the other
lane, and waits there. A person's question beside the flood does not wait. The engine and the verbs of debuggers never
stand in a lane.

    savings 0.5 ms -> A asks (0.9 ms): at once, savings -0.4 ms
                      A asks, B asks, A asks: they wait in the order A, B, A
                      20 ms later: savings 0, the first of A is answered, and so on

A subscriber's first flush may be the one behind which the service exports the leader's memory. That takes up to a
second, which a lane would have to save up for a minute, and nobody of the role would be answered meanwhile. So this
time is charged to nobody (``apart``), and neither is a full collection of garbage, which falls to whoever is served
when it is due.

Law of this file: over any time a lane spends at most its savings and its share. A caller that asks once waits for at
most one question of every other caller of the lane.
"""

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import local
from time import thread_time_ns
from typing import Any, Final

import grpc
import grpc.aio

from kvbm_console.wire.v1 import console_pb2 as pb

SHARE: Final = 64
"""A lane gets the 64th part of the thread's time, 1.6 %."""
SAVINGS_NS: Final = 100_000_000
"""Work that a lane saves up: some hundred questions of a person or a script are answered at once."""
CALLER_NS: Final = 50_000_000
"""Work that a caller may ask for before it moves to the second lane: twice the most that ``status`` needs."""
CALLER_SHARE: Final = 200
"""Share of the wall's time by which that work is forgotten, 0.5 %: a caller that asks once a second stays below."""
ASKED_NS: Final = 20_000_000
"""The system is asked at most once in this time how long the thread waited."""
ASKING_SHARE: Final = 512
"""Asking takes at most this part of the thread's time. The answer takes 3 to 110 us, but meanwhile another thread may
take the interpreter's lock, and keep it for milliseconds."""
ASKED_LEAST_NS: Final = 2_000_000_000
"""The system is asked once in two seconds, however long an answer took. All that the thread has waited meanwhile is
subtracted at once. With an answer of 20 ms, which is one beside a keyframe that is encoded, the next question was due
10 s later. On a busy machine the lanes then lost what they earn in 7 s, and a ``status`` waited for so long."""
STRAIN_NS: Final = 200_000_000
"""The strain of a thread is measured over this time, in which the processor changes threads some twenty times."""
STRAIN_MAX: Final = 4.0
"""Bound of a strain: what waits for it is not late by more."""
CALLERS_MAX: Final = 1_024
"""Callers whose questions are remembered. Beyond it, the caller that asked longest ago is forgotten."""
CALL_NS: Final = 600_000
"""Cost of a call beside our own work, in the RPC library and in turns of the loop: 0.3 ms on an idle loop, 0.6 to 1 ms
beside an engine that fills the caches meanwhile."""
WAITING_MAX: Final = 512
"""Questions that wait in a lane: those take some ten seconds."""
CALLER_WAITING_MAX: Final = 128
"""Waiting questions of a connection. A proxy begins all subscriptions at once; a console has one or two."""
REFUSED_AFTER_S: Final = 1.0
"""A question beyond these limits is refused after a delay. Otherwise a caller that repeats it would cost as much as an
answered caller."""


def waited_ns() -> int:
    """Time in which the calling thread could run and had no processor; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class _Collected(local):
    """Full collections of garbage in a thread."""

    ns = 0
    began_ns = 0


_collected = _Collected()


def _collection(phase: str, info: dict[str, int]) -> None:
    if info["generation"] < 2:
        return  # what a question has allocated itself
    if phase == "start":
        _collected.began_ns = thread_time_ns()
    else:
        _collected.ns += thread_time_ns() - _collected.began_ns


gc.callbacks.append(_collection)


class OwnTime:
    """Monotonic nanoseconds of the calling thread without the time in which it waited for a processor.

    What the thread has waited since the system was last asked is not subtracted yet.
    """

    def __init__(self) -> None:
        self._strain = 1.0
        self._since_ns, self._since_waited_ns = time.monotonic_ns(), waited_ns()
        self._ask(time.monotonic_ns())

    def _ask(self, now_ns: int) -> None:
        self._waited_ns = waited_ns()
        took_ns = time.monotonic_ns() - now_ns
        self._ask_at_ns = now_ns + min(max(ASKED_NS, ASKING_SHARE * took_ns), ASKED_LEAST_NS)
        wall_ns = now_ns - self._since_ns
        if wall_ns >= STRAIN_NS:
            own_ns = wall_ns - (self._waited_ns - self._since_waited_ns)
            self._strain = min(STRAIN_MAX, max(1.0, wall_ns / max(own_ns, 1)))
            self._since_ns, self._since_waited_ns = now_ns, self._waited_ns

    def strain(self) -> float:
        """Time of the wall for each second of the thread's own time, from 1 to ``STRAIN_MAX``, lately."""
        self()
        return self._strain

    def __call__(self) -> int:
        now_ns = time.monotonic_ns()
        if now_ns >= self._ask_at_ns:
            self._ask(now_ns)
        return now_ns - self._waited_ns


class TooMany(Exception):
    """Raised for a question beyond the limits; its text goes to the caller."""


class Lane:
    """Questions that wait together. ``clock`` is nanoseconds of the time that is shared."""

    def __init__(
        self, clock: Callable[[], int] | None = None, *, savings_ns: int = SAVINGS_NS, expected_ns: int = CALL_NS,
    ) -> None:
        clock = clock or OwnTime()
        self.refused = 0
        """Questions that were refused."""
        self.expected_ns = expected_ns
        """Average time of the last questions. It is charged in advance and corrected when the answer is there."""
        self._clock = clock
        self._savings_ns = self._savings_ns_max = savings_ns
        self._at_ns = clock()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Caller to its questions; the caller whose turn is next stands first."""
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_savings(self) -> bool:
        """True if a question may be answered now."""
        self._save()
        return self._savings_ns > 0 and not self._count

    async def turn(self, caller: str) -> None:
        """Wait until a question of this caller may be answered. Raises ``TooMany``."""
        if self.has_savings:
            self._savings_ns -= self.expected_ns
            return
        mine = self._waiting.get(caller, ())
        if self._count >= WAITING_MAX or len(mine) >= CALLER_WAITING_MAX:
            self.refused += 1
            waiting = f"{self._count} questions wait, {len(mine)} of this connection"
            await asyncio.sleep(REFUSED_AFTER_S)
            raise TooMany(f"{waiting}; at most {WAITING_MAX} and {CALLER_WAITING_MAX} may")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._count += 1
        self._look_later()
        await turn  # the turn of a caller that has left is cancelled, and passed over

    def charge(self, took_ns: int) -> None:
        """Work was done for a question."""
        self._savings_ns -= took_ns

    def _save(self) -> None:
        now_ns = self._clock()
        self._savings_ns = min(self._savings_ns_max, self._savings_ns + (now_ns - self._at_ns) // SHARE)
        self._at_ns = now_ns

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0, 1 - self._savings_ns) * SHARE / 1e9, self._look)

    def _look(self) -> None:
        self._timer = None
        self._save()
        while self._count and self._savings_ns > 0:
            caller = next(iter(self._waiting))
            mine = self._waiting.pop(caller)
            turn = mine.popleft()
            self._count -= 1
            if mine:
                self._waiting[caller] = mine  # behind all others
            if not turn.done():
                turn.set_result(None)
                self._savings_ns -= self.expected_ns
        if self._count:
            self._look_later()


class Turn:
    """A question whose turn it is."""

    def __init__(self, role: "Role", lane: Lane, caller: str) -> None:
        self._role = role
        self._lane = lane
        self._caller = caller
        self._charged_ns = lane.expected_ns

    @contextlib.contextmanager
    def working(self, calls: int = 1) -> Iterator[None]:
        """Surrounds the answer, and charges its time and ``calls`` messages, without what the daemon did for itself."""
        began = self._spent_ns()
        try:
            yield
        finally:
            took = self._spent_ns() - began + calls * CALL_NS
            self._lane.expected_ns += (took - self._lane.expected_ns) // 8
            self._lane.charge(took - self._charged_ns)
            self._role.count(self._caller, took - self._charged_ns)

    async def again(self) -> "Turn":
        """Wait for another turn of the same caller. Raises ``TooMany``."""
        return await self._role.turn(self._caller)

    @contextlib.contextmanager
    def further(self) -> Iterator[None]:
        """Surrounds more work for the same question, and charges its time."""
        began = self._spent_ns()
        try:
            yield
        finally:
            self.charge(self._spent_ns() - began)

    def _spent_ns(self) -> int:
        return time.thread_time_ns() - self._role.apart() - _collected.ns

    def charge(self, took_ns: int) -> None:
        """More work for the same question. A stream lives long, so this falls to the lane in which its caller is now.
        """
        self._role.lane(self._caller).charge(took_ns)
        self._role.count(self._caller, took_ns)

    @property
    def has_savings(self) -> bool:
        """True if further work, which can be left out, may be done now."""
        return self._role.lane(self._caller).has_savings


class Role:
    """The lanes of a role. ``clock`` is nanoseconds of the time that is shared, and ``apart`` those of the thread's
    time that the daemon has spent for itself."""

    def __init__(self, clock: Callable[[], int] | None = None, apart: Callable[[], int] = lambda: 0) -> None:
        clock = clock or OwnTime()
        self.apart = apart
        self._clock = clock
        self._few = Lane(clock)
        self._many = Lane(clock)
        self._asked: dict[str, tuple[int, int]] = {}
        """Caller to (work that it has asked for and that is not forgotten yet, when that was counted)."""

    async def turn(self, caller: str) -> Turn:
        """Wait until a question of this caller may be answered. Raises ``TooMany``."""
        lane = self.lane(caller)
        self.count(caller, lane.expected_ns)
        await lane.turn(caller)
        return Turn(self, lane, caller)

    @property
    def refused(self) -> int:
        """Questions that were refused because too many waited."""
        return self._few.refused + self._many.refused

    def lane(self, caller: str) -> Lane:
        """The lane in which this caller's next question is answered."""
        return self._many if self._lately(caller) > CALLER_NS else self._few

    def count(self, caller: str, took_ns: int) -> None:
        """This caller asked for so much more work."""
        asked_ns = max(0, self._lately(caller) + took_ns)
        self._asked.pop(caller, None)
        if len(self._asked) >= CALLERS_MAX:
            del self._asked[next(iter(self._asked))]
        self._asked[caller] = asked_ns, self._clock()

    def _lately(self, caller: str) -> int:
        asked_ns, at_ns = self._asked.get(caller, (0, 0))
        return max(0, asked_ns - (self._clock() - at_ns) // CALLER_SHARE)


class Questions:
    """The callers of a daemon, by role. All share the time of the thread that makes this object."""

    def __init__(self, apart: Callable[[], int] = lambda: 0) -> None:
        self.own = OwnTime()
        self.observers = Role(self.own, apart)
        self.controllers = Role(self.own, apart)
        self.probes = Role(self.own, apart)
        """Of the services that tell health and the contract."""
        self.scrapers = Role(self.own, apart)
        """Of the page of metrics."""

    @property
    def refused(self) -> int:
        """Questions that were refused because too many waited."""
        return sum(role.refused for role in (self.observers, self.controllers, self.probes, self.scrapers))

    def of(self, role: int) -> Role:
        """Callers of a role of the contract."""
        return self.controllers if role == int(pb.ROLE_CONTROL) else self.observers


class PacedServices(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls of services that are not ours (health, reflection) take turns; ours do so behind the door."""

    def __init__(self, probes: Role, own: str) -> None:
        self._probes = probes
        self._own = f"/{own}/"

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Called for every call before its handler is looked up."""
        method = handler_call_details.method
        if method.startswith(self._own):
            return await continuation(handler_call_details)
        with (await self._probes.turn(method)).working():
            return await continuation(handler_call_details)
