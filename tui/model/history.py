"""History: what each event adds to lives, transfers and series. Called just before the facts change.

Law of this file: one small function for each kind of event, found by its type; nothing here decides or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import HASH_BYTES, ID_BYTES
from kvbm_console.core.ids import CandidateStatus, SlotState

from .lives import Life, Move, Stay, Transfer

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState

    from .mirror import Mirror


def _tell(mirror: Mirror, slot: int | None, event: ev.Event) -> Life | None:
    """Add the event to the story of its slot."""
    life = mirror.lives.get(slot) if slot is not None else None
    if life is not None:
        life.story.append(event)
    return life


def _opened(mirror: Mirror, e: ev.SlotOpened) -> None:
    life = Life(e.slot, e.request, e.at_ns)
    life.add(Move(e.at_ns, SlotState.INITIALIZED, e.seq, cause=e.cause))
    life.story.append(e)
    mirror.lives[e.slot] = life


def _cloned(mirror: Mirror, e: ev.SlotCloned) -> None:
    life = Life(e.slot, e.request, e.at_ns)
    parent = mirror.lives.get(e.parent)
    state = parent.state if parent is not None else SlotState.INITIALIZED
    life.add(Move(e.at_ns, state, e.seq, cause=e.cause))
    life.story.append(e)
    mirror.decoding += state is SlotState.DECODING
    mirror.lives[e.slot] = life


def _moved(mirror: Mirror, e: ev.SlotMoved) -> None:
    mirror.decoding += (e.new is SlotState.DECODING) - (e.old is SlotState.DECODING)
    life = _tell(mirror, e.slot, e)
    if life is None:
        return
    life.add(Move(e.at_ns, e.new, e.seq, e.entry, e.iteration, e.detail, e.cause))


def _closed(mirror: Mirror, e: ev.SlotClosed) -> None:
    life = mirror.lives.pop(e.slot, None)
    if life is not None:
        life.story.append(e)
        life.close(e.at_ns)
        mirror.archive.bury(life)


def _of_slot(mirror: Mirror, e: Any) -> None:
    _tell(mirror, e.slot, e)


def _assigned(mirror: Mirror, e: ev.DeviceBlocksAssigned) -> None:
    if len(e.slots) == 1:
        _tell(mirror, e.slots[0], e)


def _evicted(mirror: Mirror, e: ev.BlocksEvicted) -> None:
    mirror.flows.evictions(e.pool).add(e.at_ns, len(e.ids) // ID_BYTES)
    _tell(mirror, e.for_slot, e)


def _filled(mirror: Mirror, e: ev.BlocksFilled) -> None:
    mirror.flows.stores(e.pool).add(e.at_ns, len(e.hashes) // HASH_BYTES)


def _ready(mirror: Mirror, e: ev.BlocksReady) -> None:
    mirror.flows.stores(e.pool).add(e.at_ns, len(e.ids) // ID_BYTES)


def _seen(mirror: Mirror, e: ev.BlocksSeen) -> None:
    if e.removed:
        mirror.flows.evictions(e.pool).add(e.at_ns, len(e.removed) // HASH_BYTES)
    if e.stored:
        mirror.flows.stores(e.pool).add(e.at_ns, len(e.stored) // HASH_BYTES)
    state = mirror.state
    if state is None or e.pool >= len(state.pools):
        return  # a pool that came while facts were sampled
    source = state.pools[e.pool].info.source
    seen = mirror.sources.of(source)
    seen.last_ns = e.at_ns
    if e.cleared and e.pool == next(pool.info.pool for pool in state.pools if pool.info.source == source):
        seen.clears += 1  # a publisher clears all its pools, one after the other


def _source_lost(mirror: Mirror, e: ev.SourceLost) -> None:
    if e.gone:
        return  # the facts say that it ended; such an event says that it restarted, too
    seen = mirror.sources.of(e.source)
    seen.restarts += e.restarted
    seen.gaps += not e.restarted


def _planned(mirror: Mirror, e: ev.CandidatePlanned) -> None:
    life = _tell(mirror, e.slot, e)
    transfer = Transfer(
        e.candidate, e.slot, life.request if life is not None else "", e.route, len(e.hashes) // HASH_BYTES, e.at_ns
    )
    mirror.transfers[e.candidate] = transfer
    if life is not None:
        life.transfers.append(transfer)
        life.changes += 1
        if life.held_now() is not None:
            transfer.held_since_ns = e.at_ns


def _enqueued(mirror: Mirror, e: ev.CandidateEnqueued) -> None:
    mirror.transfers[e.candidate].enqueued_ns = e.at_ns


def _evaluated(mirror: Mirror, e: ev.CandidateEvaluated) -> None:
    transfer = mirror.transfers[e.candidate]
    transfer.evaluated_ns = e.at_ns
    transfer.found = e.found
    _tell(mirror, transfer.slot, e)


def _end(mirror: Mirror, candidate: int, at_ns: int, status: CandidateStatus) -> Transfer:
    transfer = mirror.transfers.pop(candidate)
    if transfer.held_since_ns is not None:
        transfer.held_ns += at_ns - transfer.held_since_ns
        transfer.held_since_ns = None
    transfer.ended_ns = at_ns
    transfer.status = status
    mirror.archive.keep(transfer)
    life = mirror.lives.get(transfer.slot) if transfer.slot is not None else None
    if life is not None:
        life.changes += 1
    return transfer


def _skipped(mirror: Mirror, e: ev.CandidateSkipped) -> None:
    transfer = _end(mirror, e.candidate, e.at_ns, CandidateStatus.SKIPPED)
    transfer.reason = e.reason
    _tell(mirror, transfer.slot, e)


def _promoted_sampled(mirror: Mirror, e: ev.CandidatePromoted) -> Transfer:
    """Without the blocks that came back, which the totals of the next snapshot bring."""
    transfer = mirror.transfers[e.candidate]
    transfer.status = CandidateStatus.PROMOTED
    transfer.promoted_ns = e.at_ns
    transfer.operation = e.operation
    transfer.blocks = len(e.targets) // ID_BYTES
    mirror.by_operation[e.operation] = transfer
    _tell(mirror, transfer.slot, e)
    return transfer


def _promoted(mirror: Mirror, e: ev.CandidatePromoted) -> None:
    _promoted_sampled(mirror, e)
    mirror.flows.came_back(e.at_ns, e.returned)


def _started(mirror: Mirror, e: ev.OperationStarted) -> None:
    transfer = mirror.by_operation[e.operation]
    transfer.started_ns = e.at_ns
    life = _tell(mirror, transfer.slot, e)
    if life is not None:
        life.changes += 1


def _reported(mirror: Mirror, e: ev.OperationReported) -> None:
    transfer = mirror.by_operation[e.operation]
    transfer.ranks.add(e.rank)
    mirror.ranks = max(mirror.ranks, e.rank + 1)
    if not e.ok:
        transfer.error = e.error
        _tell(mirror, transfer.slot, e)


def _ended_sampled(mirror: Mirror, e: ev.CandidateEnded) -> Transfer:
    """Without its blocks, which the totals of the next snapshot bring."""
    transfer = _end(mirror, e.candidate, e.at_ns, e.status)
    if transfer.operation is not None:
        mirror.by_operation.pop(transfer.operation, None)
    if e.status is CandidateStatus.COMPLETED:
        mirror.flows.route(transfer.route).latencies.add(e.at_ns, transfer.age(e.at_ns))
    _tell(mirror, transfer.slot, e)
    return transfer


def _ended(mirror: Mirror, e: ev.CandidateEnded) -> None:
    transfer = _ended_sampled(mirror, e)
    if e.status is CandidateStatus.COMPLETED:
        mirror.flows.route(transfer.route).moved(e.at_ns, transfer.blocks)


def _advanced(mirror: Mirror, e: ev.IterationAdvanced) -> None:
    tokens = e.count * mirror.decoding
    slots = mirror.state.slots if mirror.state is not None else {}
    for number, position in zip(e.slots, e.positions, strict=True):
        slot = slots.get(number)
        if slot is not None:
            tokens += max(0, position - slot.anchor_tokens)
    mirror.flows.tokens.add(e.at_ns, tokens)
    mirror.steps.append((e.iteration, e.at_ns))


def _scored(mirror: Mirror, e: ev.PrefixScored) -> None:
    mirror.flows.scored(e.at_ns, e.prompt_blocks, e.hits)
    _tell(mirror, e.slot, e)


def _hits_lost(mirror: Mirror, e: ev.HitsLost) -> None:
    mirror.flows.lost(e.at_ns, e.tier, e.blocks)
    _tell(mirror, e.slot, e)


def _held(mirror: Mirror, e: ev.SlotHeld) -> None:
    life = _tell(mirror, e.slot, e)
    _note_hold(mirror, e)
    mirror.hold_mono[e.hold] = mirror.mono_ns
    if life is None:
        return
    life.changes += 1
    life.stays.append(Stay(e.hold, e.at_ns, e.point, e.breakpoints))
    for transfer in life.transfers:
        if transfer.open:
            transfer.held_since_ns = e.at_ns


def _parked(mirror: Mirror, e: ev.HoldParked) -> None:
    hold = mirror.state.holds.get(e.hold) if mirror.state is not None else None
    if hold is not None:
        _tell(mirror, hold.slot, e)


def _denied(mirror: Mirror, e: ev.HoldDenied) -> None:
    _note_hold(mirror, e)
    _tell(mirror, e.slot, e)


def _note_hold(mirror: Mirror, e: ev.SlotHeld | ev.HoldReleased | ev.HoldDenied) -> None:
    """See how a hold begins and ends, by the name of its request, which facts that are sampled may not have yet."""
    if mirror.state is not None:
        life = mirror.lives.get(e.slot)
        mirror.ended_holds.take(e, mirror.state, None if life is None else life.request)


def _released(mirror: Mirror, e: ev.HoldReleased) -> None:
    _note_hold(mirror, e)
    mirror.hold_mono.pop(e.hold, None)
    life = _tell(mirror, e.slot, e)
    if life is None:
        return
    life.changes += 1
    for stay in life.stays:
        if stay.hold == e.hold:
            stay.end_ns = e.at_ns
    for transfer in life.transfers:
        if transfer.held_since_ns is not None:
            transfer.held_ns += e.at_ns - transfer.held_since_ns
            transfer.held_since_ns = None


def _reset(mirror: Mirror, e: ev.ResetDone) -> None:
    mirror.decoding = 0
    mirror.transfers.clear()
    mirror.by_operation.clear()
    mirror.hold_mono.clear()
    mirror.frozen_mono = None


def _frozen(mirror: Mirror, e: ev.Frozen) -> None:
    mirror.frozen_mono = mirror.mono_ns


def _thawed(mirror: Mirror, e: ev.Thawed) -> None:
    mirror.frozen_mono = None


def _wanted(keep: Callable[[Mirror, Any], object]) -> Callable[[Mirror, Any], object]:
    """The same, for what should not wait for the next snapshot."""
    def take(mirror: Mirror, e: Any) -> None:
        keep(mirror, e)
        mirror.wants_facts = True

    return take


HISTORY: Final[dict[type[ev.Event], Callable[[Mirror, Any], object]]] = {
    ev.SlotOpened: _opened,
    ev.SlotCloned: _cloned,
    ev.SlotMoved: _moved,
    ev.SlotClosed: _closed,
    ev.LookupAnswered: _of_slot,
    ev.BlocksStaged: _of_slot,
    ev.StagingReleased: _of_slot,
    ev.DeviceBlocksAssigned: _assigned,
    ev.DeviceBlocksReleased: _of_slot,
    ev.BlocksEvicted: _evicted,
    ev.BlocksSeen: _seen,
    ev.BlocksFilled: _filled,
    ev.BlocksReady: _ready,
    ev.SourceLost: _source_lost,
    ev.CandidatePlanned: _planned,
    ev.CandidateEnqueued: _enqueued,
    ev.CandidateEvaluated: _evaluated,
    ev.CandidateSkipped: _skipped,
    ev.CandidatePromoted: _promoted,
    ev.OperationStarted: _started,
    ev.OperationReported: _reported,
    ev.CandidateEnded: _ended,
    ev.IterationAdvanced: _advanced,
    ev.PrefixScored: _scored,
    ev.HitsLost: _hits_lost,
    ev.BreakpointHit: _of_slot,
    ev.SlotHeld: _held,
    ev.HoldParked: _parked,
    ev.HoldReleased: _released,
    ev.HoldDenied: _denied,
    ev.Frozen: _frozen,
    ev.Thawed: _thawed,
    ev.ResetDone: _reset,
}
"""Event type to what it adds to the history; kinds that are not here change facts only."""

def urgent(state: CacheState) -> tuple[type[ev.Event], ...]:
    """What can happen to these facts that should not wait for the next snapshot, even where it is passed over.

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


def _same(*kinds: type[ev.Event]) -> dict[type[ev.Event], Callable[[Mirror, Any], object]]:
    """What these kinds add in any case."""
    return {kind: HISTORY[kind] for kind in kinds}


SKIMMED: Final[dict[type[ev.Event], Callable[[Mirror, Any], object]]] = {
    **_same(
        ev.SlotOpened, ev.SlotCloned, ev.SlotMoved, ev.SlotClosed, ev.CandidatePlanned, ev.CandidateSkipped,
        ev.OperationStarted, ev.BreakpointHit, ev.HoldDenied, ev.IterationAdvanced, ev.ResetDone,
        ev.BlocksFilled, ev.BlocksReady, ev.BlocksSeen, ev.SourceLost,
    ),
    ev.CandidatePromoted: _promoted_sampled, ev.CandidateEnded: _ended_sampled,
    ev.PrefixScored: _of_slot, ev.HitsLost: _of_slot,
    ev.SlotHeld: _wanted(_held), ev.HoldReleased: _wanted(_released), ev.Frozen: _wanted(_frozen),
    ev.Thawed: _wanted(_thawed),
}
"""What is taken from events that are looked at while facts are sampled: moves, holds and copies.

The rest (evictions by leaders, hits, blocks that moved, stamps of candidates, ranks) is brought by the next snapshot.
"""
