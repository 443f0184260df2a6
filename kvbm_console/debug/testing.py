"""Breakpoints in tests: the way to write a deterministic race test.

A race is two things that happen in an order that a test cannot choose. With a breakpoint it can: the slot stands still
at the site, the test does the other thing, and lets it go on. Nothing sleeps, nothing is retried::

    async def test_a_preemption_between_dispatch_and_completion(service):
        with breakpoint(service, site="complete.will") as bp:
            engine.start()                                   # whatever makes the load happen, in a task
            hold = await bp.hit()                            # the copy has arrived, and is not applied yet
            service.submit(RequestPreempted, hold.request)   # ... which is when the race would bite
            bp.go_on()
        assert audit(service.state) == []

Without an event loop, for a simulated engine: run the machine, then look at ``bp.holds``.

Law of this file: when the block is left, by whatever way, the breakpoint is gone and nothing that it held still waits.
"""

from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec

from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.core.events import SlotHeld, StimulusRejected
from kvbm_console.core.ids import (
    BreakpointAction,
    CandidateStatus,
    OnTimeout,
    Route,
    Site,
    SlotState,
    Suspend,
    Tier,
    WaitPoint,
    Word,
)
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import Dispatcher

_numbers = count(1)
_NAMES: Final = {
    "to": "to_state", "from_": "from_state", "when": "condition", "hits": "hit_condition", "ignore": "ignore_count",
    "once": "one_shot", "after": "depends_on",
}
"""Short names, as the flags of ``break set`` have them."""
_WORDS: Final[dict[str, type[Word]]] = {
    "site": Site, "to_state": SlotState, "from_state": SlotState, "tier": Tier, "route": Route,
    "status": CandidateStatus, "action": BreakpointAction, "suspend": Suspend, "on_timeout": OnTimeout,
}


class Held(msgspec.Struct, frozen=True):
    """One hold, as it was when it began."""

    hold: int
    slot: int
    request: str
    state: SlotState
    site: Site
    point: WaitPoint


def breakpoint(leader: Any, **fields: Any) -> "Breakpoint":
    """A breakpoint on an embedded leader for the time of a ``with`` block.

    ``leader`` is a ``LeaderService``, a ``Dispatcher``, a ``Rig`` or a bare ``Leader``. The fields are those of
    ``BreakpointSpec``, words also as labels, and ``to``, ``from_``, ``when``, ``hits``, ``ignore``, ``once``, ``after``
    as short names. Raises ``UsageError`` for a field or a word that does not exist.
    """
    given: dict[str, Any] = {}
    for short, value in fields.items():
        name = _NAMES.get(short, short)
        if name not in BreakpointSpec.__struct_fields__:
            raise UsageError(f"{short} is no field of a breakpoint")
        if name in _WORDS and isinstance(value, str):
            try:
                value = _WORDS[name].labelled(value)
            except KeyError:
                labels = ", ".join(word.label for word in _WORDS[name])
                raise UsageError(f"{short} must be one of {labels}, got {value!r}") from None
        given[name] = value
    return Breakpoint(leader, BreakpointSpec(**given))


class Breakpoint:
    """A breakpoint for the time of a block. ``holds`` are all holds that it began, oldest first; ``number`` is its
    id."""

    def __init__(self, leader: Any, spec: BreakpointSpec) -> None:
        self._target = leader
        self._spec = spec
        self._owner = f"test-{next(_numbers)}"
        self._given = 0
        self._news = anyio.Event()
        self._stop: Callable[[], None] = lambda: None
        self.number = 0
        self.holds: list[Held] = []

    # --- the block ---

    def __enter__(self) -> Self:
        self._stop = _listen(self._target, self._saw)
        try:
            outcome = self._tell(st.BreakpointsReplaced, self._owner, (self._spec,))
            verdict = outcome.result[0] if isinstance(outcome.result, tuple) else None
            if verdict is None or not verdict.verified:
                raise Refused(verdict.message if verdict is not None else _why(outcome))
            self.number = verdict.id
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._tell(st.BreakpointsReplaced, self._owner, ())
            self.go_on()
        finally:
            self._stop()

    # --- a test's calls ---

    async def hit(self) -> Held:
        """The next hold of this breakpoint, in order; waits for it. Bound the wait with ``anyio.fail_after``."""
        while self._given == len(self.holds):
            self._news = anyio.Event()
            await self._news.wait()
        self._given += 1
        return self.holds[self._given - 1]

    def go_on(self, hold: Held | None = None) -> None:
        """Release this hold, or all that this breakpoint began. A hold that has ended already is no error."""
        for held in self.holds if hold is None else [hold]:
            if held.hold in self._state.holds:
                self._tell(st.HoldContinued, held.hold, self._owner, None)

    def step(self, hold: Held) -> None:
        """Release the hold and stop the same slot at its next site; that hold is this breakpoint's too."""
        self._tell(st.SlotStepped, hold.hold, self._owner)

    # --- the leader ---

    @property
    def _state(self) -> CacheState:
        return _leader_of(self._target).state

    def _tell(self, kind: Callable[..., st.Stimulus], *fields: Any) -> Outcome:
        dispatcher = _dispatcher_of(self._target)
        if dispatcher is not None:
            return dispatcher.submit(kind, *fields)
        leader: Leader = self._target
        return leader.handle(kind(leader.state.n + 1, leader.state.at_ns, 0, None, *fields))

    def _saw(self, outcome: Outcome) -> None:
        for event in outcome.events:
            if isinstance(event, SlotHeld) and (self.number in event.breakpoints or event.owner == self._owner):
                slot = self._state.slots.get(event.slot)
                self.holds.append(Held(
                    event.hold, event.slot, slot.request if slot is not None else "",
                    slot.state if slot is not None else SlotState.FINISHED, event.site, event.point,
                ))
                self._news.set()


def _dispatcher_of(target: Any) -> Dispatcher | None:
    if isinstance(target, Dispatcher):
        return target
    found = getattr(target, "dispatcher", None)
    return found if isinstance(found, Dispatcher) else None


def _leader_of(target: Any) -> Leader:
    dispatcher = _dispatcher_of(target)
    found = target if dispatcher is None else dispatcher.leader
    if not isinstance(found, Leader):
        raise UsageError(f"a breakpoint needs a leader, a service, a dispatcher or a rig, got {type(target).__name__}")
    return found


def _listen(target: Any, saw: Callable[[Outcome], None]) -> Callable[[], None]:
    """Call ``saw`` with every outcome until the returned function is called."""
    dispatcher = _dispatcher_of(target)
    if dispatcher is None:
        return _listen_to_leader(_leader_of(target), saw)
    before = dispatcher.publish

    def publish(stimulus: st.Stimulus, outcome: Outcome) -> None:
        if before is not None:
            before(stimulus, outcome)
        saw(outcome)

    dispatcher.publish = publish

    def stop() -> None:
        dispatcher.publish = before

    return stop


def _listen_to_leader(leader: Leader, saw: Callable[[Outcome], None]) -> Callable[[], None]:
    handle = leader.handle

    def listened(stimulus: st.Stimulus) -> Outcome:
        outcome = handle(stimulus)
        saw(outcome)
        return outcome

    leader.handle = listened  # type: ignore[method-assign]

    def stop() -> None:
        del leader.handle  # the method of the class again

    return stop


def _why(outcome: Outcome) -> str:
    return next((event.why for event in outcome.events if isinstance(event, StimulusRejected)), "refused")
