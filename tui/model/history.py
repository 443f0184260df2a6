"""History: lives, transfers and series, folded from events, from snapshots and from the past of a running target.

``HISTORY`` has one small function for each kind of event, called just before the facts change. ``adopt`` brings lives
and transfers in line with a snapshot after a stretch without events. It takes over the facts alone, so an end without
an event is marked as lost. ``take_past`` folds the events that a daemon still remembers from before this console
connected. Levels of tiers and tokens a second stay blank before the first snapshot: old events do not tell them.

Law of this file: nothing here decides or reads a clock, and the events of a gap are never invented.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from kvbm_console.analysis import lives as fold
from kvbm_console.analysis import prefix_map as prefixes
from kvbm_console.analysis.lives import Life, Lives, Move, Stay, Transfer
from kvbm_console.core import events as ev
from kvbm_console.core.columns import HASH_BYTES, ID_BYTES
from kvbm_console.core.events import CandidatePlanned, CandidatePromoted, Event, SlotCloned, SlotOpened
from kvbm_console.core.ids import CandidateStatus, SlotState
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.stream.ended import EndedHolds
from kvbm_console.stream.feed import PastSeen

from .clock import TargetClock
from .fates import Fates
from .flows import Flows
from .numbers import S
from .series import Density
from .sources import Sources
from .worth import Prices

LOG_MAX: Final = 20_000
"""Events kept for the log."""
STEPS_MAX: Final = 64
"""Iterations kept for the step time."""
PAST_EVENTS: Final = 8_192
"""Events of the past that the console asks for: seconds of a busy engine, minutes of an ordinary engine. Folding them
takes less than 0.1 s before the first picture."""
SLICE_EVENTS: Final = 400
"""Events of the past that are folded before keys get a turn."""
PAST_MAX: Final = 512
"""Finished lives kept for the timeline: ten screens."""
ENDED_MAX: Final = 2_048
"""Transfers that ended, kept for the transfers view and its percentiles."""
NAMES_MAX: Final = 50_000
"""Requests, candidates and operations that are kept by number, each."""


class Archive:
    """``lives`` and ``transfers`` in the order in which they ended."""

    def __init__(self) -> None:
        self.lives: deque[Life] = deque()
        """PAST_MAX at most."""
        self.transfers: deque[Transfer] = deque()
        """ENDED_MAX at most."""
        self.forgotten = 0
        """Lives that had to go."""
        self.slots: dict[int, Life] = {}
        self.requests: dict[str, Life] = {}
        self.candidates: dict[int, Transfer] = {}
        self.operations: dict[int, Transfer] = {}

    def bury(self, life: Life) -> Life | None:
        """Keep a finished life; the life that had to go for it."""
        self.lives.append(life)
        self.slots[life.slot] = life
        self.requests[life.request] = life
        if len(self.lives) <= PAST_MAX:
            return None
        oldest = self.lives.popleft()
        self.forgotten += 1
        self.slots.pop(oldest.slot, None)
        if self.requests.get(oldest.request) is oldest:
            del self.requests[oldest.request]
        return oldest

    def keep(self, transfer: Transfer) -> None:
        """Keep a transfer that ended."""
        self.transfers.append(transfer)
        self.candidates[transfer.candidate] = transfer
        if transfer.operation is not None:
            self.operations[transfer.operation] = transfer
        if len(self.transfers) > ENDED_MAX:
            oldest = self.transfers.popleft()
            self.candidates.pop(oldest.candidate, None)
            if oldest.operation is not None:
                self.operations.pop(oldest.operation, None)


class Names:
    """The slots that numbers of candidates and operations stand for, and the requests of slots, learnt from events."""

    def __init__(self, state: CacheState | None = None) -> None:
        self.requests: dict[int, str] = {}
        """Slot to request."""
        self._slots: dict[int, int | None] = {}
        """Candidate to slot."""
        self._candidates: dict[int, int] = {}
        """Operation to candidate."""
        if state is not None:
            self._slots = {number: known.slot for number, known in state.candidates.items()}
            self._candidates = {number: copy.candidate for number, copy in state.operations.items()}

    def learn(self, events: list[Event]) -> None:
        """Take over the names in these events; the oldest names go when there are too many."""
        for event in events:
            if isinstance(event, SlotOpened | SlotCloned):
                self.requests[event.slot] = event.request
            elif isinstance(event, CandidatePlanned):
                self._slots[event.candidate] = event.slot
            elif isinstance(event, CandidatePromoted):
                self._candidates[event.operation] = event.candidate
        for known in (self.requests, self._slots, self._candidates):
            for number in list(islice(known, max(0, len(known) - NAMES_MAX))):
                del known[number]

    def slot_of(self, candidate: int | None, operation: int | None) -> int | None:
        """The slot of a candidate or an operation; None where it is not known, or where no slot owns the blocks."""
        if candidate is None and operation is not None:
            candidate = self._candidates.get(operation)
        return None if candidate is None else self._slots.get(candidate)


class Halves:
    """The lives of requests that one engine prefills and another decodes, by the name of what is sent."""

    def __init__(self) -> None:
        self._senders: dict[str, Life] = {}
        self._receivers: dict[str, Life] = {}

    def add(self, life: Life) -> None:
        """Keep a life that begins."""
        if life.sends is not None:
            self._senders[life.sends] = life
        if life.receives is not None:
            self._receivers[life.receives] = life

    @property
    def known(self) -> bool:
        """True if a decode half is known."""
        return bool(self._receivers)

    def forget(self, life: Life) -> None:
        """Drop a life."""
        if life.sends is not None and self._senders.get(life.sends) is life:
            del self._senders[life.sends]
        if life.receives is not None and self._receivers.get(life.receives) is life:
            del self._receivers[life.receives]

    def prefill_of(self, life: Life) -> Life | None:
        """The prefill half of this decode half."""
        return None if life.receives is None else self._senders.get(life.receives)

    def decode_of(self, life: Life) -> Life | None:
        """The decode half of this prefill half."""
        return None if life.sends is None else self._receivers.get(life.sends)


class History(Lives):
    """The history of a target, folded from events. ``state`` is None before the first snapshot."""

    def __init__(self) -> None:
        self.state: CacheState | None = None
        self.clock = TargetClock()
        self.next_seq = 0
        """Number of the next event."""
        self.wants_facts = False
        """True if something happened, while sampling, that should not wait for the next snapshot."""
        super().__init__()

    def clear(self) -> None:
        """Forget everything that events told: another incarnation, or another place of a recording."""
        super().clear()
        self.archive = Archive()
        self.past = self.archive.lives
        """Lives that finished last."""
        self.halves = Halves()
        self.ended = self.archive.transfers
        """Transfers that ended last."""
        self.names = Names()
        """The slots of events that are older than the log."""
        self.flows = Flows()
        self.sources = Sources()
        self.log: deque[Event] = deque(maxlen=LOG_MAX)
        self.log_total = 0
        """Events that were folded, looked at or passed over."""
        self.lives_ns: int | None = None
        """The target's time from which on all lives are known."""
        self.density = Density()
        self.steps: deque[tuple[int, int]] = deque(maxlen=STEPS_MAX)
        """(iteration, at_ns) of the last advances."""
        self.decoding = 0
        """Slots that get a token from every iteration."""
        self.hold_mono: dict[int, int] = {}
        """Hold to local time of its beginning: its deadline runs on the wall clock."""
        self.ended_holds = EndedHolds()
        """Holds that ended or were refused while this console looked."""
        self.prefixes = prefixes.PrefixMap()
        """All prompts as a forest."""
        self.fates = Fates()
        """Fates of the prompt blocks of admissions."""
        self.prices = Prices()
        """The measured times of a prefilled token and of a copied block."""
        self.frozen_mono: int | None = None
        """Local time at which the target was frozen; None while it is not."""
        self.mono_ns = 0

    def life_begun(self, life: Life) -> None:
        """Keep its connection to a slot of another engine."""
        self.halves.add(life)

    def life_ended(self, life: Life) -> None:
        """Keep a finished life."""
        self.prices.life_ended(life)
        forgotten = self.archive.bury(life)
        if forgotten is not None:
            self.halves.forget(forgotten)
            self.lives_ns = max(self.lives_ns or 0, forgotten.closed_ns or 0)

    def transfer_ended(self, transfer: Transfer) -> None:
        """Keep a transfer that ended."""
        self.prices.transfer_ended(transfer)
        self.archive.keep(transfer)

    @property
    def facts(self) -> CacheState:
        """The facts, for callers that run only when there are some."""
        assert self.state is not None
        return self.state

    def life_of(self, request: str) -> Life | None:
        """The life of a request: the live slot, else the last finished slot."""
        if self.state is not None:
            number = self.state.slot_of.get(request)
            if number is not None and number in self.lives:
                return self.lives[number]
        return self.archive.requests.get(request)

    def life_in(self, slot: int) -> Life | None:
        """The life of a slot, live or finished."""
        return self.lives.get(slot) or self.archive.slots.get(slot)

    def transfer_of(self, candidate: int | None = None, operation: int | None = None) -> Transfer | None:
        """An open or recently ended transfer, by its candidate or its operation."""
        if candidate is not None:
            return self.transfers.get(candidate) or self.archive.candidates.get(candidate)
        if operation is not None:
            return self.by_operation.get(operation) or self.archive.operations.get(operation)
        return None


def _opened(history: History, e: ev.SlotOpened) -> None:
    fold.opened(history, e)
    prefixes.opened(history.prefixes, e)


def _closed(history: History, e: ev.SlotClosed) -> None:
    fold.closed(history, e)
    prefixes.closed(history.prefixes, e)
    if history.state is not None:
        history.fates.closed(e, history.state)


def _cloned(history: History, e: ev.SlotCloned) -> None:
    prefixes.cloned(history.prefixes, e)
    history.decoding += fold.cloned(history, e) is SlotState.DECODING


def _moved(history: History, e: ev.SlotMoved) -> None:
    history.decoding += (e.new is SlotState.DECODING) - (e.old is SlotState.DECODING)
    fold.moved(history, e)


def _of_slot(history: History, e: Any) -> None:
    history.tell(e.slot, e)


def _assigned(history: History, e: ev.DeviceBlocksAssigned) -> None:
    if len(e.slots) == 1:
        history.tell(e.slots[0], e)


def _evicted(history: History, e: ev.BlocksEvicted) -> None:
    history.flows.evicted[e.pool].add(e.at_ns, len(e.ids) // ID_BYTES)
    history.tell(e.for_slot, e)
    if history.state is not None:
        prefixes.evicted(history.prefixes, e, history.state)
        history.fates.took(e, history.state)


def _filled_exactly(history: History, e: ev.BlocksFilled) -> None:
    _filled(history, e)
    if history.state is not None:
        prefixes.filled(history.prefixes, e, history.state)


def _filled(history: History, e: ev.BlocksFilled) -> None:
    history.flows.stored[e.pool].add(e.at_ns, len(e.hashes) // HASH_BYTES)


def _ready(history: History, e: ev.BlocksReady) -> None:
    history.flows.stored[e.pool].add(e.at_ns, len(e.ids) // ID_BYTES)


def _seen(history: History, e: ev.BlocksSeen) -> None:
    did_ns = e.at_ns - max(0, e.age_ns or 0)
    if e.removed and e.age_ns is not None:
        history.flows.evicted[e.pool].add(did_ns, len(e.removed) // HASH_BYTES)
    if e.stored and e.age_ns is not None:
        history.flows.stored[e.pool].add(did_ns, len(e.stored) // HASH_BYTES)
    state = history.state
    if state is None or e.pool >= len(state.pools):
        return  # a pool that came while facts were sampled
    prefixes.seen(history.prefixes, e, state)
    source = state.pools[e.pool].info.source
    seen = history.sources.of(source)
    seen.last_ns = max(did_ns, seen.last_ns or did_ns)
    if e.cleared and e.pool == next(pool.info.pool for pool in state.pools if pool.info.source == source):
        seen.clears += 1  # a publisher clears all its pools, one after the other


def _measured(history: History, e: ev.EngineMeasured) -> None:
    history.flows.measure(e.at_ns, e.source, dict(zip(e.measures, e.values, strict=True)))


def _source_lost(history: History, e: ev.SourceLost) -> None:
    if e.gone:
        return  # the facts say that it ended; such an event says that it restarted, too
    seen = history.sources.of(e.source)
    seen.restarts += e.restarted
    seen.gaps += not e.restarted


def _promoted(history: History, e: ev.CandidatePromoted) -> None:
    fold.promoted(history, e)
    history.flows.came_back(e.at_ns, e.returned)


def _ended_sampled(history: History, e: ev.CandidateEnded) -> Transfer:
    """End a transfer without its blocks, because the totals of the next snapshot bring them."""
    transfer = fold.ended(history, e)
    if e.status is CandidateStatus.COMPLETED:
        history.flows.routes[transfer.route].latencies.add(e.at_ns, transfer.age(e.at_ns))
    return transfer


def _ended(history: History, e: ev.CandidateEnded) -> None:
    transfer = _ended_sampled(history, e)
    if e.status is CandidateStatus.COMPLETED:
        history.flows.routes[transfer.route].moved(e.at_ns, transfer.blocks)


def _advanced(history: History, e: ev.IterationAdvanced) -> None:
    tokens = e.count * history.decoding
    slots = history.state.slots if history.state is not None else {}
    for number, position in zip(e.slots, e.positions, strict=True):
        slot = slots.get(number)
        if slot is not None:
            tokens += max(0, position - slot.anchor_tokens)
    history.flows.tokens.add(e.at_ns, tokens)
    history.steps.append((e.iteration, e.at_ns))


def _admitted(history: History, e: ev.PrefixScored) -> None:
    life = history.tell(e.slot, e)
    if life is not None:
        life.scored = e


def _scored(history: History, e: ev.PrefixScored) -> None:
    if not e.readmitted:
        history.flows.scored(e.at_ns, e.prompt_blocks, e.hits)
    _admitted(history, e)
    state = history.state
    slot = None if state is None else state.slots.get(e.slot)
    if state is not None and slot is not None:
        missed = prefixes.missed_blocks(e, slot)
        gone = prefixes.absent(state, missed)
        history.fates.scored(e, slot, missed, gone, state, history.prefixes)
        if gone:
            history.prefixes.missed(e.seq, e.at_ns, slot.request, gone)


def _hits_lost(history: History, e: ev.HitsLost) -> None:
    if not e.readmitted:
        history.flows.lost(e.at_ns, e.tier, e.blocks)
    history.tell(e.slot, e)


def _held(history: History, e: ev.SlotHeld) -> None:
    fold.held(history, e)
    _note_hold(history, e)
    history.hold_mono[e.hold] = history.mono_ns


def _parked(history: History, e: ev.HoldParked) -> None:
    hold = history.state.holds.get(e.hold) if history.state is not None else None
    if hold is not None:
        history.tell(hold.slot, e)


def _denied(history: History, e: ev.HoldDenied) -> None:
    _note_hold(history, e)
    history.tell(e.slot, e)


def _note_hold(history: History, e: ev.SlotHeld | ev.HoldReleased | ev.HoldDenied) -> None:
    """See how a hold begins and ends, by the name of its request, which facts that are sampled may not have yet."""
    if history.state is not None:
        life = history.lives.get(e.slot)
        history.ended_holds.take(e, history.state, None if life is None else life.request)


def _released(history: History, e: ev.HoldReleased) -> None:
    _note_hold(history, e)
    history.hold_mono.pop(e.hold, None)
    fold.released(history, e)


def _reset(history: History, e: ev.ResetDone) -> None:
    fold.reset(history, e)
    history.decoding = 0
    history.hold_mono.clear()
    history.frozen_mono = None
    history.prefixes.cleared()


def _frozen(history: History, e: ev.Frozen) -> None:
    history.frozen_mono = history.mono_ns


def _thawed(history: History, e: ev.Thawed) -> None:
    history.frozen_mono = None


def _wanted(keep: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """A handler that does the same and asks for a snapshot at once."""
    def take(history: History, e: Any) -> None:
        keep(history, e)
        history.wants_facts = True

    return take


HISTORY: Final[dict[type[ev.Event], Callable[[Any, Any], object]]] = {
    **fold.FOLD,
    ev.SlotOpened: _opened, ev.SlotClosed: _closed, ev.SlotCloned: _cloned,
    ev.SlotMoved: _moved, ev.LookupAnswered: _of_slot, ev.BlocksStaged: _of_slot,
    ev.StagingReleased: _of_slot, ev.DeviceBlocksAssigned: _assigned, ev.DeviceBlocksReleased: _of_slot,
    ev.DeviceBlocksReplaced: _of_slot,
    ev.BlocksEvicted: _evicted, ev.BlocksSeen: _seen, ev.EngineMeasured: _measured,
    ev.BlocksFilled: _filled_exactly, ev.BlocksReady: _ready,
    ev.SourceLost: _source_lost, ev.CandidatePromoted: _promoted, ev.CandidateEnded: _ended,
    ev.IterationAdvanced: _advanced, ev.PrefixScored: _scored, ev.HitsLost: _hits_lost, ev.BreakpointHit: _of_slot,
    ev.SlotHeld: _held, ev.HoldParked: _parked, ev.HoldReleased: _released, ev.HoldDenied: _denied,
    ev.Frozen: _frozen, ev.Thawed: _thawed, ev.ResetDone: _reset,
}
"""Event type to the handler that adds it to the history; other kinds change facts only."""


def urgent(state: CacheState) -> tuple[type[ev.Event], ...]:
    """The kinds of event after which the console wants a new snapshot at once, even when it passes over them.

    Without a breakpoint nothing is held, without a hold none is released: looking for a kind costs a tenth of decoding.
    """
    kinds: list[type[ev.Event]] = [ev.BreakpointsChanged]
    if state.breakpoints or state.holds:
        kinds.append(ev.SlotHeld)
    if state.holds:
        kinds.append(ev.HoldReleased)
    if state.frozen is not None:
        kinds.append(ev.Thawed)
    return tuple(kinds)


def _same(*kinds: type[ev.Event]) -> dict[type[ev.Event], Callable[[Any, Any], object]]:
    """The handlers of these kinds, unchanged."""
    return {kind: HISTORY[kind] for kind in kinds}


SKIMMED: Final[dict[type[ev.Event], Callable[[Any, Any], object]]] = {
    **_same(
        ev.SlotOpened, ev.SlotCloned, ev.SlotMoved, ev.SlotClosed, ev.CandidatePlanned, ev.CandidateSkipped,
        ev.OperationStarted, ev.BreakpointHit, ev.HoldDenied, ev.IterationAdvanced, ev.ResetDone,
        ev.BlocksReady, ev.BlocksSeen, ev.SourceLost,
    ),
    ev.BlocksFilled: _filled,
    ev.CandidatePromoted: fold.promoted, ev.CandidateEnded: _ended_sampled,
    ev.PrefixScored: _admitted, ev.HitsLost: _of_slot,
    ev.SlotHeld: _wanted(_held), ev.HoldReleased: _wanted(_released), ev.Frozen: _wanted(_frozen),
    ev.Thawed: _wanted(_thawed),
}
"""The handlers for events that are read while facts are sampled: moves, holds and copies.

The rest (evictions by leaders, hits, blocks that moved, stamps of candidates, ranks) is brought by the next snapshot.
"""


def adopt(history: History, state: CacheState, seen_ns: int, mono_ns: int) -> None:
    """Take over facts; history is known up to ``seen_ns``."""
    if history.lives_ns is None:
        history.lives_ns = state.at_ns
    for number in [number for number in history.lives if number not in state.slots]:
        life = history.lives.pop(number)
        life.close(seen_ns, lost=True)
        history.life_ended(life)
    for number, slot in state.slots.items():
        life = history.lives.get(number) or history.found(slot)
        _stand(life, slot, state, seen_ns)
    _transfers(history, state, seen_ns)
    history.decoding = sum(slot.state is SlotState.DECODING for slot in state.slots.values())
    prefixes.adopt(history.prefixes, state, seen_ns)
    history.fates.adopt(state)
    history.hold_mono = {
        number: history.hold_mono.get(number, mono_ns - max(0, state.at_ns - hold.since_ns))
        for number, hold in state.holds.items()
    }
    if state.frozen is None:
        history.frozen_mono = None
    elif history.frozen_mono is None:
        history.frozen_mono = mono_ns - max(0, state.at_ns - state.frozen.since_ns)


LANES: Final[dict[type[ev.Event], Callable[[Any, Any], object]]] = {
    **{kind: fold.FOLD[kind] for kind in (ev.SlotOpened, ev.SlotCloned, ev.SlotMoved, ev.SlotClosed, ev.SlotHeld,
                                          ev.HoldReleased)},
    ev.PrefixScored: _admitted,
}
"""The handlers of the events that make lives, without their copies: a twentieth of all events or fewer."""


class PastLives(History):
    """The lives of live and of recently finished slots, folded without facts."""

    def resume(self, state: CacheState, seen_ns: int) -> None:
        """Go on with these facts; lives are known up to ``seen_ns``."""
        self.next_seq = state.seq
        adopt(self, state, seen_ns, 0)
        self.transfers.clear()
        for life in self.lives.values():
            life.transfers.clear()

    def fold(self, events: list[Event]) -> None:
        """Fold the lives of these events, which follow the last ones. Lives that began before the first stay out."""
        if self.lives_ns is None:
            self.lives_ns = events[0].at_ns
        known = LANES.get
        for event in events:
            keep = known(type(event))
            if keep is not None:
                keep(self, event)
        self.next_seq = events[-1].seq + 1


def _stand(life: Life, slot: SlotFacts, state: CacheState, seen_ns: int) -> None:
    """Bring a life in line with the facts of its slot."""
    if not life.moves or life.state is not slot.state or slot.since_ns > life.moves[-1].start_ns:
        unseen = seen_ns if life.moves and slot.since_ns > seen_ns else None
        life.add(Move(slot.since_ns, slot.state, None, unseen_ns=unseen))
        life.times.resumed(slot, state.iteration)
    hold = state.holds.get(slot.hold) if slot.hold is not None else None
    current = life.held_now()
    if current is not None and (hold is None or current.hold != hold.hold):
        current.end_ns = seen_ns
    if hold is not None and (current is None or current.hold != hold.hold):
        life.stays.append(Stay(hold.hold, hold.since_ns, hold.point, hold.breakpoints))


def _transfers(history: History, state: CacheState, seen_ns: int) -> None:
    """Bring transfers in line with the open candidates; a transfer without a candidate ended unseen."""
    for number in [number for number in history.transfers if number not in state.candidates]:
        gone = history.transfers.pop(number)
        gone.lost, gone.ended_ns = True, max(seen_ns, gone.planned_ns)
        owner = history.lives.get(gone.slot) if gone.slot is not None else None
        if owner is not None:
            owner.changes += 1
    for number, facts in state.candidates.items():
        known = history.transfers.get(number)
        if known is None:
            mine = facts.owner
            slot = state.slots.get(mine) if mine is not None else None
            known = Transfer(number, mine, slot.request if slot else facts.request, facts.route, len(facts.hashes),
                             facts.planned_ns)
            history.transfers[number] = known
            if mine in history.lives:
                history.lives[mine].transfers.append(known)
        known.status, known.operation, known.found = facts.status, facts.operation, facts.found
        known.enqueued_ns, known.evaluated_ns = facts.enqueued_ns, facts.evaluated_ns
        known.promoted_ns, known.started_ns = facts.promoted_ns, facts.started_ns
    history.by_operation = {}
    for operation, copy in state.operations.items():
        known = history.transfers[copy.candidate]
        known.blocks = copy.blocks
        known.ranks = set(copy.reported)
        history.ranks = max(history.ranks, len(known.ranks), *(rank + 1 for rank in known.ranks), 1)
        history.by_operation[operation] = known


def take_past(history: History, item: PastSeen, mono_ns: int) -> Iterator[None]:
    """Fold the events into a history that has no facts yet; a history with facts learns nothing from them.

    It stops after every ``SLICE_EVENTS``, so that keys get a turn.
    """
    events = item.events
    if history.state is not None or not events:
        return
    begin_ns = events[0].at_ns
    for slot in item.state.slots.values():
        if slot.opened_ns < begin_ns:
            history.found(slot)
    second, counted = begin_ns // S, 0
    for event in events:
        if event.at_ns // S != second:
            _tell_second(history, second, counted)
            second, counted = event.at_ns // S, 0
        counted += 1
        history.density.add(event.at_ns, 1)
        _keep(history, event, begin_ns)
        if event.seq % SLICE_EVENTS == 0:
            yield
    _tell_second(history, second, counted)
    history.hold_mono.clear()  # when they began by the local clock is worked out from the snapshot
    history.log.extend(events)
    history.log_total += len(events)
    history.clock.event(events[-1].at_ns, mono_ns)
    history.next_seq = events[-1].seq + 1


def _keep(history: History, event: ev.Event, begin_ns: int) -> None:
    if isinstance(event, ev.IterationAdvanced):
        history.steps.append((event.iteration, event.at_ns))  # its tokens depend on the slots that were decoding
        return
    if isinstance(event, ev.SlotMoved):
        life = history.lives.get(event.slot)
        if life is not None and not life.moves:
            life.add(Move(begin_ns, event.old, None))
    if isinstance(event, ev.HoldParked):
        for life in history.lives.values():  # the facts, which know whose hold it is, come later
            if any(stay.hold == event.hold for stay in life.stays):
                life.story.append(event)
        return
    keep = HISTORY.get(type(event))
    if keep is None:
        return
    try:
        keep(history, event)
    except KeyError:
        return  # the event is about a copy that was planned before the past begins


def _tell_second(history: History, second: int, events: int) -> None:
    """A second of the past is over."""
    at_ns = second * S
    flows = history.flows
    flows.events.add(at_ns, events)
    asked, hits = flows.hit_shares(at_ns)
    flows.hit_rate.set(at_ns, sum(hits) / asked if asked else None)
