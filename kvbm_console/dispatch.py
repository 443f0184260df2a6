"""The only writer: stamps stimuli, hands them to the leader, publishes its events, carries out instructions.

Law of this file: every stimulus passes here exactly once and in order. It is stamped (``n`` contiguous, ``at_ns`` never
backwards), handled by every host, and published. Only then are the instructions of host 0 carried out, in the order in
which they were given. An instruction may cause a submit, for example when a mover answers at once. That submit is
handled on the spot, and its instructions queue up behind those that are waiting.
"""

from collections import deque
from collections.abc import Callable, Sequence, Set
from enum import Enum
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol

import msgspec

from kvbm_console.core import instructions as ins
from kvbm_console.core.errors import InternalError, UsageError
from kvbm_console.core.ids import Authority, Clock, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import PoolDeclared, Stimulus

if TYPE_CHECKING:
    from kvbm_console.core.leader import Leader, Outcome

P = ParamSpec("P")

MEDIUM_OF: Final[dict[Tier, str]] = {
    Tier.G1: "GPU", Tier.G2: "CPU_PINNED", Tier.G3: "DISK", Tier.G4: "STORAGE",
}
"""The name under which our own pools report their medium: the words that engines use on their event streams."""
MEMORY_EVERY: Final = 1_000
"""Stimuli between two comparisons of the memory of hosts. Its digest takes about as long as twenty stimuli."""


class HostsDiverged(InternalError):
    """Raised when two hosts that were fed the same stimuli disagree: names host, stimulus and the first differences.

    ``digests`` are those of host 0 and of the other host, None for an outcome.
    """

    def __init__(
        self, host: int, n: int, part: str, digests: tuple[int, int] | None, difference: list[str]
    ) -> None:
        shown = "" if digests is None else f"digest {digests[1]:016x} is not {digests[0]:016x}; "
        super().__init__(
            f"host {host} differs from host 0 in its {part} after stimulus {n}: {shown}on host 0 and there: "
            f"{'; '.join(difference)}"
        )
        self.host = host
        self.n = n
        self.part = part
        self.digests = digests
        self.difference = difference


class Mover(Protocol):
    """The mover of bytes. It reports started, then finished or failed per rank, by stimuli."""

    def start(self, order: ins.StartTransfer) -> None:
        """Begin (or queue) this copy."""
        ...

    def cancel(self, operation: int) -> None:
        """Do not start this copy; it is not reported any more."""
        ...

    def zero(self, pool: int) -> None:
        """Overwrite the bytes of a pool."""
        ...


class EngineSink(Protocol):
    """The leader's orders to an engine outside the engine's own calls."""

    def wake(self, request: str) -> None:
        """The request's load ended, well or not."""
        ...

    def release(self, request: str, ids: bytes) -> None:
        """These device blocks, withheld until now, may be reused."""
        ...

    def pin(self, ids: bytes) -> None:
        """A copy reads these cached device blocks: do not reuse them before ``release("", ids)``."""
        ...

    def clear(self, keep: bytes) -> None:
        """The leader was reset: forget the requests, clear the own pool, withhold ``keep`` until it is released."""
        ...

    def pause(self) -> None:
        """Form no iteration until ``resume``; a formed iteration ends."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Deadlines(Protocol):
    """A clock that sends ``DeadlinePassed``."""

    def set(self, deadline: int, after_ns: int) -> None:
        """Send the deadline after this time."""
        ...

    def clear(self, deadline: int) -> None:
        """Forget the deadline; an unknown deadline is no error."""
        ...


class LeaderPort:
    """All that an engine may know of the leader: the connector entry points, and the requests that stand still."""

    def __init__(self, dispatcher: "Dispatcher", source: int) -> None:
        self._dispatcher = dispatcher
        self._source = source

    @property
    def standing(self) -> Set[str]:
        """Requests that must be left out of iterations."""
        return self._dispatcher.leader.state.standing

    @property
    def held(self) -> Set[str]:
        """Requests that a hold keeps, at any site: other requests are preempted before them."""
        state = self._dispatcher.leader.state
        return {state.slots[hold.slot].request for hold in state.holds.values()}

    def submit(
        self, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus], *args: P.args, **kwargs: P.kwargs
    ) -> "Outcome":
        """Call the entry point of ``kind``, a stimulus; the answer is ``Outcome.result``."""
        dispatcher = self._dispatcher
        now_ns = dispatcher.clock()  # as ``stamp``, without a call for each call of an engine
        if now_ns > dispatcher.at_ns:
            dispatcher.at_ns = now_ns
        return dispatcher.take(kind(dispatcher.n, dispatcher.at_ns, self._source, None, *args, **kwargs))

    def computed_tokens(self, request: str) -> int:
        """The leader's computed position of a request (it goes back when a load failed), 0 for an unknown request."""
        state = self._dispatcher.leader.state
        slot = state.slot_named(request)
        return 0 if slot is None else slot.computed_tokens(state.iteration)

    def calm_blocks(self) -> int | None:
        """Blocks that decoding requests may be given while the leader does nothing when a block becomes full.

        -1 when it acts on the next full block already; None when each iteration must be reported.
        """
        return self._dispatcher.leader.calm_blocks(self._source)


class Dispatcher:
    """Stamps and orders stimuli for one leader, or for several hosts that must agree.

    ``clock`` tells the engine's time in nanoseconds. ``publish`` gets every stimulus with its outcome before any of
    its instructions runs; it must not submit. ``more_hosts`` are further leaders fed the same log. With
    ``compare_every`` above 0 their outcomes are compared after every stimulus, and their facts and memory by digest
    after so many (``compare_hosts``). ``HostsDiverged`` is raised at the first difference. The assembling code sets
    mover, engines and deadlines. An instruction without a receiver is counted in ``undelivered``. Not thread-safe, so
    all calls come from one thread.
    """

    def __init__(
        self, leader: "Leader", clock: Callable[[], int], *,
        publish: "Callable[[Stimulus, Outcome], None] | None" = None, more_hosts: "Sequence[Leader]" = (),
        compare_every: int = 0,
    ) -> None:
        self.leader = leader
        self.clock = clock
        self.publish = publish
        self.more_hosts = tuple(more_hosts)
        self.compare_every = compare_every
        self.mover: Mover | None = None
        self.engines: dict[int, EngineSink] = {}
        self.engine_deadlines: Deadlines | None = None
        self.wall_deadlines: Deadlines | None = None
        self.n = leader.state.n + 1
        """Number of the next stimulus."""
        self.at_ns = leader.state.at_ns
        """Stamp of the last stimulus."""
        self.undelivered = 0
        self.recover: Callable[[Stimulus, Exception], Outcome] | None = None
        """Called when host 0's leader raises; replaces ``leader`` by a sound leader and returns its events instead."""
        self._queue: deque[ins.Instruction] = deque()
        self._running = False
        self._check_configurations()

    def _check_configurations(self) -> None:
        mine = self.leader.config.digest()
        for host, other in enumerate(self.more_hosts, start=1):
            if other.config.digest() != mine:
                raise UsageError(
                    f"host {host} must have the configuration of host 0, "
                    f"got digest {other.config.digest():016x} instead of {mine:016x}"
                )

    def submit(
        self, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus], *args: P.args, **kwargs: P.kwargs
    ) -> "Outcome":
        """A stimulus of the daemon itself (source 0): ``submit(Noted, note, detail)``."""
        return self.submit_from(0, None, kind, *args, **kwargs)

    def submit_from(
        self, source: int, origin_ns: int | None, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus],
        *args: P.args, **kwargs: P.kwargs,
    ) -> "Outcome":
        """Stamp, handle, publish, carry out. ``origin_ns`` is the sender's own time, None when unknown."""
        return self.take(kind(self.n, self.stamp(), source, origin_ns, *args, **kwargs))

    def stamp(self) -> int:
        """The time of the next stimulus: now, and never before the last stimulus."""
        now_ns = self.clock()
        if now_ns > self.at_ns:
            self.at_ns = now_ns
        return self.at_ns

    def take(self, stimulus: Stimulus) -> "Outcome":
        """Handle, publish and carry out a stimulus that was numbered ``n`` and stamped just now."""
        self.n += 1
        try:
            outcome = self.leader.handle(stimulus)
        except Exception as error:
            if self.recover is None:
                raise
            outcome = self.recover(stimulus, error)
        if self.more_hosts:
            self._take_on_other_hosts(stimulus, outcome)
        if self.publish is not None:
            self.publish(stimulus, outcome)
        if outcome.instructions:
            self.carry_out(outcome.instructions)
        return outcome

    def carry_out(self, instructions: "Sequence[ins.Instruction]") -> None:
        """Carry out instructions behind those that are carried out now."""
        self._queue.extend(instructions)
        if not self._running:
            self._drain()

    def _take_on_other_hosts(self, stimulus: Stimulus, outcome: "Outcome") -> None:
        outcomes, every = [other.handle(stimulus) for other in self.more_hosts], self.compare_every
        if not every:
            return
        for host, theirs in enumerate(outcomes, start=1):
            if theirs != outcome:
                self.compare_hosts()  # what differs in the facts says more
                raise HostsDiverged(host, stimulus.n, "outcome", None, differences(plain(outcome), plain(theirs)))
        if not stimulus.n % every:
            self.compare_hosts(memory=every == 1 or not stimulus.n % MEMORY_EVERY)

    def compare_hosts(self, *, memory: bool = True) -> None:
        """Raise ``HostsDiverged`` for the first host whose facts, or with ``memory`` whose memory, have another digest
        than host 0's after the last stimulus."""
        if not self.more_hosts:
            return
        leader, n = self.leader, self.n - 1
        facts, mine = leader.digest(), leader.memory_digest() if memory else 0
        for host, other in enumerate(self.more_hosts, start=1):
            theirs = other.digest()
            if theirs != facts:
                found = differences(facts_tree(leader.state), facts_tree(other.state))
                raise HostsDiverged(host, n, "facts", (facts, theirs), found)
            theirs = other.memory_digest() if memory else 0
            if theirs != mine:
                trees = (msgspec.msgpack.decode(twin.export()) for twin in (leader, other))
                raise HostsDiverged(host, n, "memory", (mine, theirs), differences(*trees))

    def port(self, source: int) -> LeaderPort:
        """The entry points for the engine with this index (from 1)."""
        return LeaderPort(self, source)

    def _drain(self) -> None:
        self._running = True
        try:
            while self._queue:
                instruction = self._queue.popleft()
                _CARRY_OUT[type(instruction)](self, instruction)
        finally:
            self._running = False

    # --- one method per instruction ---

    def _start(self, order: ins.StartTransfer) -> None:
        if self.mover is None:
            self.undelivered += 1
        else:
            self.mover.start(order)

    def _cancel(self, order: ins.CancelTransfer) -> None:
        if self.mover is None:
            self.undelivered += 1
        else:
            self.mover.cancel(order.operation)

    def _zero(self, order: ins.ZeroBlocks) -> None:
        if self.mover is None:
            self.undelivered += 1
        else:
            self.mover.zero(order.pool)

    def _wake(self, order: ins.WakeRequest) -> None:
        engine = self.engines.get(order.source)
        if engine is None:
            self.undelivered += 1
        else:
            engine.wake(order.request)

    def _release(self, order: ins.ReleaseDeviceBlocks) -> None:
        engine = self.engines.get(order.source)
        if engine is None:
            self.undelivered += 1
        else:
            engine.release(order.request, order.ids)

    def _clear_pool(self, order: ins.ClearDevicePool) -> None:
        engine = self.engines.get(order.source)
        if engine is None:
            self.undelivered += 1
        else:
            engine.clear(order.keep)

    def _pin(self, order: ins.PinDeviceBlocks) -> None:
        engine = self.engines.get(order.source)
        if engine is None:
            self.undelivered += 1
        else:
            engine.pin(order.ids)

    def _pause(self, order: ins.PauseEngine) -> None:
        engine = self.engines.get(order.source)
        if engine is None:
            self.undelivered += 1
        else:
            engine.pause()

    def _resume(self, order: ins.ResumeEngine) -> None:
        engine = self.engines.get(order.source)
        if engine is None:
            self.undelivered += 1
        else:
            engine.resume()

    def _set_deadline(self, order: ins.SetDeadline) -> None:
        deadlines = self.engine_deadlines if order.clock is Clock.ENGINE else self.wall_deadlines
        if deadlines is None:
            self.undelivered += 1
        else:
            deadlines.set(order.deadline, order.after_ns)

    def _clear_deadline(self, order: ins.ClearDeadline) -> None:
        for deadlines in (self.engine_deadlines, self.wall_deadlines):
            if deadlines is not None:
                deadlines.clear(order.deadline)


_CARRY_OUT: Final[dict[type[ins.Instruction], Callable[[Dispatcher, Any], None]]] = {
    ins.StartTransfer: Dispatcher._start,
    ins.CancelTransfer: Dispatcher._cancel,
    ins.WakeRequest: Dispatcher._wake,
    ins.ReleaseDeviceBlocks: Dispatcher._release,
    ins.SetDeadline: Dispatcher._set_deadline,
    ins.ClearDeadline: Dispatcher._clear_deadline,
    ins.ZeroBlocks: Dispatcher._zero,
    ins.ClearDevicePool: Dispatcher._clear_pool,
    ins.PinDeviceBlocks: Dispatcher._pin,
    ins.PauseEngine: Dispatcher._pause,
    ins.ResumeEngine: Dispatcher._resume,
}
"""Instruction type to the method that carries it out; a test proves that it is complete."""


def start_leader(dispatcher: Dispatcher) -> None:
    """Declare the lower pools of the leader's configuration (source 0, authority leader); before any other stimulus."""
    config = dispatcher.leader.config
    for tier, blocks in ((Tier.G2, config.g2_blocks), (Tier.G3, config.g3_blocks)):
        if blocks:
            dispatcher.submit(PoolDeclared, 0, 0, tier, MEDIUM_OF[tier], blocks, config.block_tokens, Authority.LEADER)


# --- where two hosts, or a leader and its restored twin, disagree ---

DIFFERENCES_MAX: Final = 8
"""Differences in a report. Further differences follow from the first and do not help."""
ENTRIES_MAX: Final = 2
"""Differing entries of a list in a report, because a column is one place however many of its entries differ."""
_SHOWN_CHARS: Final = 120
_PARTS: Final = (
    "seq", "n", "at_ns", "epoch", "iteration", "running", "waiting", "draining", "slots", "candidates", "operations",
    "batches", "late", "holds", "breakpoints", "frozen", "leases", "lost_sources", "measured", "totals", "next_slot",
    "next_candidate", "next_operation", "next_hold", "next_breakpoint",
)
_COLUMNS: Final = ("hash_of", "content", "refs", "stored_at", "copies", "quarantined")


def facts_tree(state: CacheState) -> dict[str, Any]:
    """All facts as plain values by name; pools by tier, those of an engine with its source."""
    pools = {}
    for pool in state.pools:
        info = pool.info
        name = info.tier.name + (f" of source {info.source}" if info.source else "")
        name += f" rank {info.dp_rank}" if info.dp_rank else ""
        pools[name if name not in pools else f"{name} pool {info.pool}"] = {
            "info": plain(info), **{column: plain(getattr(pool, column)) for column in _COLUMNS},
        }
    return {**{name: plain(getattr(state, name)) for name in _PARTS}, "pools": pools}


def plain(value: Any) -> Any:
    """Structs as dicts by field, columns and tuples as lists, sets sorted, words as their labels."""
    if isinstance(value, Enum):
        return getattr(value, "label", value.name)
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple, memoryview)):
        return [plain(item) for item in value]
    return value


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """The places where two trees differ, in the order of the first tree; at most ``DIFFERENCES_MAX``.

    >>> differences({"a": [1, 2], "b": 1}, {"a": [1, 3], "b": 1})
    ['a[1]: 2 is not 3']
    """
    found: list[str] = []
    _compare(mine, theirs, path, found)
    return found


def _compare(mine: Any, theirs: Any, path: str, found: list[str]) -> None:
    if len(found) >= DIFFERENCES_MAX or (mine == theirs and repr(mine) == repr(theirs)):  # the order counts too
        return
    count = len(found)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            here = f"{path}.{key}" if path else str(key)
            if key in mine and key in theirs:
                _compare(mine[key], theirs[key], here, found)
            elif len(found) < DIFFERENCES_MAX:
                found.append(f"{here} exists only {'on host 0' if key in mine else 'there'}")
        if len(found) == count:
            found.append(f"{path} stands in another order: {_short(list(mine))} is not {_short(list(theirs))}")
        return
    if isinstance(mine, list) and isinstance(theirs, list):
        differing = [at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]]
        for index in differing[:ENTRIES_MAX]:
            _compare(mine[index], theirs[index], f"{path}[{index}]", found)
        if len(differing) > ENTRIES_MAX and len(found) < DIFFERENCES_MAX:
            found.append(f"{path} differs in {len(differing) - ENTRIES_MAX} more entries")
        if len(mine) != len(theirs) and len(found) < DIFFERENCES_MAX:
            found.append(f"{path} has {len(mine)} entries, not {len(theirs)}")
        return
    found.append(f"{path or 'value'}: {_short(mine)} is not {_short(theirs)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
