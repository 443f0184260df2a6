"""Hits on a tape: where a breakpoint took effect in the recorded run, and where one that is set now would have.

Law of this file: a specification is matched by what the events themselves tell, without folding; what it asks for
beyond that (a condition, a tier of an eviction's pool) is refused when it is set, never ignored.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator
from fnmatch import translate
from re import compile as compile_pattern
from typing import TYPE_CHECKING, Final

from kvbm_console.core import events as ev
from kvbm_console.core.breakpoints import Moment
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.ids import CandidateStatus, Route, Site, SlotState
from kvbm_console.core.state import CacheState

if TYPE_CHECKING:
    from ..contracts import Tape
    from .mirror import Mirror

HITS_MAX: Final = 20_000
"""Hits kept of one tape; the rest is counted. A breakpoint that hits more often is not looked at one by one."""
_C = CandidateStatus


class Tracker:
    """Requests and candidates by number, as far as events name them; begins with the facts of a place."""

    def __init__(self, state: CacheState | None) -> None:
        self.requests: dict[int, str] = {}
        self.candidates: dict[int, tuple[int | None, Route]] = {}
        self.operations: dict[int, int] = {}
        self.states: dict[int, SlotState] = {}
        if state is not None:
            self.requests = {number: slot.request for number, slot in state.slots.items()}
            self.states = {number: slot.state for number, slot in state.slots.items()}
            self.candidates = {number: (known.slot, known.route) for number, known in state.candidates.items()}
            self.operations = {number: copy.candidate for number, copy in state.operations.items()}

    def slot(self, event: Event) -> int | None:
        """The slot that an event is about."""
        slot = getattr(event, "slot", None)
        if isinstance(slot, int):
            return slot
        candidate = getattr(event, "candidate", None)
        if candidate is None:
            candidate = self.operations.get(getattr(event, "operation", -1))
        return self.candidates[candidate][0] if candidate in self.candidates else None

    def moments(self, event: Event) -> Iterator[Moment]:
        """What a gate would have been asked at this event; then remember what the event tells."""
        match event:
            case ev.SlotOpened() | ev.SlotCloned():
                self.requests[event.slot] = event.request
                self.states[event.slot] = SlotState.INITIALIZED
            case ev.SlotMoved():
                for site in (Site.TRANSITION_WILL, Site.TRANSITION_DID):
                    yield self._moment(site, event.slot, event.old, event.new)
                self.states[event.slot] = event.new
            case ev.SlotClosed():
                yield self._moment(Site.REQUEST_FINISH, event.slot)
                self.requests.pop(event.slot, None)
                self.states.pop(event.slot, None)
            case ev.CandidatePlanned():
                self.candidates[event.candidate] = (event.slot, event.route)
            case ev.CandidateEnqueued():
                yield from self._about(event.candidate, (Site.CANDIDATE_ENQUEUE,), _C.PENDING_EVALUATION)
            case ev.CandidateEvaluated():
                sites = (Site.EVALUATE_WILL, Site.EVALUATE_DID)
                yield from self._about(event.candidate, sites, _C.PENDING_EVALUATION)
            case ev.CandidatePromoted():
                self.operations[event.operation] = event.candidate
                yield from self._about(event.candidate, (Site.PROMOTE_WILL,), _C.PENDING_EVALUATION)
            case ev.OperationStarted():
                candidate = self.operations.get(event.operation)
                yield from self._about(candidate, (Site.DISPATCH_WILL,), _C.PROMOTED)
            case ev.CandidateSkipped():
                yield from self._about(event.candidate, (Site.SKIP_DID,), _C.SKIPPED)
                self.candidates.pop(event.candidate, None)
            case ev.CandidateEnded():
                yield from self._about(event.candidate, (Site.COMPLETE_WILL,), _C.PROMOTED)
                self.candidates.pop(event.candidate, None)
            case _:
                return

    def _about(self, candidate: int | None, sites: tuple[Site, ...], status: CandidateStatus) -> Iterator[Moment]:
        if candidate is None or candidate not in self.candidates:
            return
        slot, route = self.candidates[candidate]
        for site in sites:
            moment = self._moment(site, -1 if slot is None else slot)
            moment.route, moment.tier, moment.candidate, moment.status = route, route.target, candidate, status
            yield moment

    def _moment(self, site: Site, slot: int, old: SlotState | None = None, new: SlotState | None = None) -> Moment:
        state = self.states.get(slot, SlotState.INITIALIZED)
        return Moment(site, slot, self.requests.get(slot, ""), old or state, new or state)


_ON_TAPE: Final = frozenset(Site) - {Site.EVICT_WILL, Site.CALL_WILL, Site.CALL_DID}
"""Sites that events tell of by themselves."""


def on_tape(spec: BreakpointSpec) -> Callable[[Moment], bool]:
    """The test of a specification on a tape; raises UsageError for what events do not tell."""
    if spec.site not in _ON_TAPE:
        raise UsageError(f"{spec.site.label} cannot be found on a recording; its hits of that run are shown anyway")
    if spec.condition:
        raise UsageError("a condition needs the facts of each moment; on a recording leave `when` out")
    request = None if spec.request == "*" else compile_pattern(translate(spec.request)).match

    def matches(moment: Moment) -> bool:
        return (
            moment.site is spec.site
            and (spec.to_state is None or moment.new is spec.to_state)
            and (spec.from_state is None or moment.old is spec.from_state)
            and (spec.route is None or moment.route is spec.route)
            and (spec.tier is None or moment.tier is spec.tier)
            and (spec.status is None or moment.status is spec.status)
            and (request is None or request(moment.request) is not None)
        )

    return matches


def count_hits(spec: BreakpointSpec, mirror: "Mirror", events: Iterable[Event]) -> int:
    """How often a specification would have matched in events that this console has folded."""
    matches = on_tape(spec)
    tracker = Tracker(None)
    for life in (*mirror.past, *mirror.lives.values()):
        tracker.requests[life.slot] = life.request
    for transfer in (*mirror.ended, *mirror.transfers.values()):
        tracker.candidates[transfer.candidate] = (transfer.slot, transfer.route)
        if transfer.operation is not None:
            tracker.operations[transfer.operation] = transfer.candidate
    found = 0
    for event in events:
        moments = list(tracker.moments(event))
        found += any(map(matches, moments))
    return found


class Hits:
    """The hits on one tape, in order. ``complete`` when it was read to its end for the present specifications."""

    def __init__(self) -> None:
        self.specs: list[BreakpointSpec] = []
        self.seqs: list[int] = []
        self.dropped = 0
        self.complete = False
        self.generation = 0
        """Grows whenever the specifications change: a search for older ones ends."""

    def change(self, specs: list[BreakpointSpec]) -> None:
        """Look for others from now on; raises UsageError when one cannot be found on a tape."""
        for spec in specs:
            on_tape(spec)
        self.specs = specs
        self.generation += 1
        self.seqs, self.dropped, self.complete = [], 0, False

    async def search(self, tape: "Tape", state: CacheState | None, breathe: Callable[[], Awaitable[None]]) -> bool:
        """Read the whole tape; False when the specifications changed meanwhile."""
        generation = self.generation
        tests = [on_tape(spec) for spec in self.specs if spec.enabled]
        tracker = Tracker(state)
        seqs: list[int] = []
        dropped = 0
        for events in tape.events():
            for event in events:
                hit = type(event) is ev.BreakpointHit
                if tests:
                    for moment in tracker.moments(event):
                        hit = hit or any(test(moment) for test in tests)
                if hit and len(seqs) < HITS_MAX:
                    seqs.append(event.seq)
                elif hit:
                    dropped += 1
            await breathe()
            if generation != self.generation:
                return False
        self.seqs, self.dropped, self.complete = seqs, dropped, True
        return True

    def next(self, seq: int) -> int | None:
        """The first hit behind ``seq``."""
        index = bisect_right(self.seqs, seq)
        return self.seqs[index] if index < len(self.seqs) else None

    def previous(self, seq: int) -> int | None:
        """The last hit in front of ``seq``."""
        index = bisect_left(self.seqs, seq)
        return self.seqs[index - 1] if index else None
