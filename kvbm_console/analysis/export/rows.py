"""Rows: a recording as intervals and samples. Every format of an export is made of these.

Law of this file: an interval is told once, when it ends, with both its ends. An interval that is open at the end of the
evidence, or in front of a gap, ends there and is marked as open. Nothing is drawn across a gap.
"""

from typing import Final

import msgspec

from kvbm_console.analysis.lives import FOLD, Life, Lives, Move, Stay, Transfer
from kvbm_console.analysis.requests import Requests, RequestSummary
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core import events as ev
from kvbm_console.core.describe import describe, request_of, slot_of
from kvbm_console.core.ids import Condition
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

SAMPLE_NS: Final = 1_000_000
"""Tiers and the engine are sampled at most this often: a picture has fewer points than that."""


class StateSpan(msgspec.Struct, frozen=True):
    """A slot was in a state. ``open``: it still is."""

    slot: int
    request: str
    state: str
    begin_ns: int
    end_ns: int
    seq: int
    cause: int
    iteration: int
    computed_tokens: int
    open: bool


class HoldSpan(msgspec.Struct, frozen=True):
    """A slot was held."""

    hold: int
    slot: int
    request: str
    site: str
    begin_ns: int
    end_ns: int
    seq: int
    why: str | None
    """The reason of its end; None while it lasts."""


class TransferSpan(msgspec.Struct, frozen=True):
    """A candidate with its six stamps; ``ended_ns`` is None while it is open."""

    candidate: int
    operation: int | None
    batch: int | None
    slot: int | None
    request: str | None
    route: str
    blocks: int
    planned_ns: int
    enqueued_ns: int | None
    evaluated_ns: int | None
    promoted_ns: int | None
    started_ns: int | None
    ended_ns: int | None
    status: str
    reason: str | None
    thrash_blocks: int
    seq: int
    until_ns: int
    """Its end, or how far the evidence knows of it."""


class TierSample(msgspec.Struct, frozen=True):
    """The places of a pool by condition."""

    at_ns: int
    pool: int
    tier: str
    empty: int
    cached: int
    referenced: int
    writing: int
    quarantined: int


class EngineSample(msgspec.Struct, frozen=True):
    """The engine's own figures of an iteration."""

    at_ns: int
    iteration: int
    running: int
    waiting: int


class EventRow(msgspec.Struct, frozen=True):
    """One event in words."""

    seq: int
    at_ns: int
    cause: int
    kind: str
    slot: int | None
    request: str | None
    detail: str


class Consumer:
    """The base of the formats, which turn rows into a file. Each method is called in the order in which rows end;
    ``close`` once."""

    wants_events = False
    """True if ``event`` is called: describing every event is most of the work."""

    def opened(self, slot: int, request: str, at_ns: int) -> None:
        """A slot is there since ``at_ns``, and has not been told before, unless behind a gap."""

    def closed(self, slot: int, at_ns: int) -> None:
        """A slot is gone, or the evidence ends or has a gap; only copies of it may still be told."""

    def resumed(self, at_ns: int) -> None:
        """The evidence goes on behind a gap; slots that are there are opened next."""

    def state(self, row: StateSpan) -> None:
        """A state ended."""

    def hold(self, row: HoldSpan) -> None:
        """A hold ended."""

    def transfer(self, row: TransferSpan) -> None:
        """A candidate ended."""

    def tier(self, row: TierSample) -> None:
        """A sample of a pool."""

    def engine(self, row: EngineSample) -> None:
        """A sample of the engine."""

    def event(self, row: EventRow) -> None:
        """An event, if wanted."""

    def gap(self, gap: GapSeen, at_ns: int) -> None:
        """Events are missing; open rows were ended before this call."""

    def request(self, summary: RequestSummary, until_ns: int) -> None:
        """All requests, at the end, in the order of arrival."""

    def close(self) -> None:
        """Nothing follows."""


class Rows(Visitor):
    """Tells a consumer every row of a walk."""

    def __init__(self, consumer: Consumer, requests: Requests) -> None:
        super().__init__()
        self.consumer = consumer
        self.requests = requests
        self._lives = Lives()
        self._sampled: dict[int, tuple[int, list[int]]] = {}
        self._last_ns = 0
        self._state: CacheState | None = None
        self.before = {
            ev.SlotOpened: self._opens, ev.SlotCloned: self._opens, ev.SlotMoved: self._moves,
            ev.HoldReleased: self._released, ev.CandidateEnded: self._ended, ev.CandidateSkipped: self._ended,
            ev.SlotClosed: self._closed, **dict.fromkeys((ev.SlotHeld, ev.CandidatePlanned), self._folded),
        }
        self.after = {ev.CandidatePromoted: self._promoted, ev.IterationAdvanced: self._advanced}
        for kind in (ev.BlocksReady, ev.BlocksEvicted, ev.DeviceBlocksReleased, ev.DeviceBlocksAssigned,
                     ev.DeviceBlocksReplaced, ev.BlocksReserved, ev.BlocksDropped, ev.BlocksStaged,
                     ev.StagingReleased, ev.ResetDone, ev.BlocksFilled, ev.BlocksSeen):
            self.after[kind] = self._sample
        if consumer.wants_events:
            self.every = self._event

    # --- begin, gap, end ---------------------------------------------------------------------------------------------

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """End the rows that were open in front of a gap, and begin the rows of the present facts."""
        if gap is not None:
            self._close_all(state)
            self.consumer.gap(gap, self._last_ns)
            self.consumer.resumed(state.at_ns)
        self._state, self._last_ns = state, state.at_ns
        for slot in state.slots.values():
            self.consumer.opened(slot.slot, slot.request, slot.opened_ns)
            life = self._lives.found(slot)
            life.add(Move(
                max(slot.since_ns, state.at_ns) if gap is not None else slot.since_ns, slot.state, state.seq,
                iteration=state.iteration, cause=state.n, computed_tokens=slot.computed_tokens(state.iteration),
            ))
            if slot.hold is not None:
                hold = state.holds[slot.hold]
                life.stays.append(Stay(hold.hold, hold.since_ns, hold.point, hold.breakpoints, state.seq))
        transfers = self._lives.transfers
        self._lives.transfers = {
            number: transfers.get(number) or Transfer(
                number, facts.owner, "", facts.route, len(facts.hashes), facts.planned_ns, state.seq
            ) for number, facts in state.candidates.items()
        }
        for copy in state.operations.values():
            self._lives.transfers[copy.candidate].batch = copy.batch
        self._sampled.clear()
        for pool in state.pools:
            self._sample_pool(pool.info.pool, state, state.at_ns)

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """Tell the open rows, then the requests."""
        if state is not None:
            self._last_ns = state.at_ns
            for pool in state.pools:
                self._sample_pool(pool.info.pool, state, state.at_ns)
        self._close_all(None)
        if gap is not None:
            self.consumer.gap(gap, self._last_ns)
        for summary in self.requests.all:
            self.consumer.request(summary, self._last_ns)

    def _close_all(self, later: CacheState | None) -> None:
        """Tell the open rows. Copies that are still open behind a gap are told when they end."""
        state = self._state
        if state is None:
            return
        self._last_ns = max(self._last_ns, state.at_ns)
        open_lives = sorted(self._lives.lives.values(), key=lambda life: life.moves[-1].seq or 0)
        for life in open_lives:
            self._tell_state(life, self._last_ns, still=True)
        holds = [(life, stay) for life in open_lives if (stay := life.held_now()) is not None]
        for life, stay in sorted(holds, key=lambda hold: hold[1].seq or 0):
            self._tell_hold(life, stay, state, self._last_ns, None)
        for number in list(self._lives.transfers):
            if number in state.candidates and (later is None or number not in later.candidates):
                self._tell_transfer(self._lives.transfers[number], state, None)
        for life in open_lives:
            self.consumer.closed(life.slot, self._last_ns)
        self._lives.lives.clear()

    # --- events ------------------------------------------------------------------------------------------------------

    def _event(self, e: ev.Event, state: CacheState) -> None:
        self.consumer.event(EventRow(
            e.seq, e.at_ns, e.cause, type(e).__name__, slot_of(e, state), request_of(e, state), describe(e, state)
        ))

    def _folded(self, e: ev.Event, state: CacheState) -> None:
        FOLD[type(e)](self._lives, e)

    def _opens(self, e: ev.SlotOpened | ev.SlotCloned, state: CacheState) -> None:
        self.consumer.opened(e.slot, e.request, e.at_ns)
        self._folded(e, state)
        self._lives.lives[e.slot].moves[-1].iteration = state.iteration

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        self._folded(e, state)
        self.consumer.closed(e.slot, e.at_ns)

    def _moves(self, e: ev.SlotMoved, state: CacheState) -> None:
        self._tell_state(self._lives.lives[e.slot], e.at_ns, still=False)
        self._folded(e, state)

    def _tell_state(self, life: Life, end_ns: int, *, still: bool) -> None:
        move = life.moves[-1]
        self.consumer.state(StateSpan(
            life.slot, life.request, move.state.label, move.start_ns, end_ns, move.seq or 0, move.cause or 0,
            move.iteration, move.computed_tokens, still,
        ))

    def _released(self, e: ev.HoldReleased, state: CacheState) -> None:
        life = self._lives.lives[e.slot]
        for stay in life.stays:
            if stay.hold == e.hold:
                self._tell_hold(life, stay, state, e.at_ns, e.why.label)
        self._folded(e, state)

    def _tell_hold(self, life: Life, stay: Stay, state: CacheState, end_ns: int, why: str | None) -> None:
        self.consumer.hold(HoldSpan(
            stay.hold, life.slot, life.request, state.holds[stay.hold].site.label, stay.start_ns, end_ns,
            stay.seq or 0, why,
        ))

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        self._folded(e, state)
        self._sample(e, state)

    def _ended(self, e: ev.CandidateEnded | ev.CandidateSkipped, state: CacheState) -> None:
        self._last_ns = e.at_ns
        self._tell_transfer(FOLD[type(e)](self._lives, e), state, e.at_ns)

    def _tell_transfer(self, transfer: Transfer, state: CacheState, ended_ns: int | None) -> None:
        candidate = state.candidates[transfer.candidate]
        slot = None if candidate.owner is None else state.slots.get(candidate.owner)
        operation = None if candidate.operation is None else state.operations.get(candidate.operation)
        blocks = 0 if operation is None else operation.blocks  # those of all groups of layers
        status = candidate.status if ended_ns is None else transfer.status
        self.consumer.transfer(TransferSpan(
            transfer.candidate, candidate.operation, transfer.batch, candidate.owner,
            (candidate.request or None) if slot is None else slot.request, candidate.route.label,
            blocks or transfer.blocks, candidate.planned_ns, candidate.enqueued_ns, candidate.evaluated_ns,
            candidate.promoted_ns, candidate.started_ns, ended_ns, status.label,
            None if transfer.reason is None else transfer.reason.label, transfer.thrash, transfer.seq, self._last_ns,
        ))

    # --- samples -----------------------------------------------------------------------------------------------------

    def _advanced(self, e: ev.IterationAdvanced, state: CacheState) -> None:
        self.consumer.engine(EngineSample(e.at_ns, e.iteration, e.running, e.waiting))

    def _sample(self, e: ev.Event, state: CacheState) -> None:
        for pool in state.pools:
            before = self._sampled.get(pool.info.pool)
            if before is None or (e.at_ns - before[0] >= SAMPLE_NS and before[1] != pool.counts):
                self._sample_pool(pool.info.pool, state, e.at_ns)

    def _sample_pool(self, index: int, state: CacheState, at_ns: int) -> None:
        pool = state.pools[index]
        counts = list(pool.counts)
        self._sampled[index] = (at_ns, counts)
        self.consumer.tier(TierSample(
            at_ns, index, pool.info.tier.name, counts[Condition.EMPTY], counts[Condition.CACHED],
            counts[Condition.REFERENCED], counts[Condition.WRITING], counts[Condition.QUARANTINED],
        ))
