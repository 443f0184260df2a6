"""The pipeline: candidates are evaluated, promoted or skipped, dispatched, and ended when every rank has reported.

Law of this file: a candidate goes as far as it can at once, and stands still only where its slot is held. ``settle``
runs the pipeline to quiescence at the end of every stimulus, so there is no polling. A report of an older epoch, a
duplicate or a late report is refused and counted. It only frees the place that a reset had put under quarantine.
"""

from collections import deque
from collections.abc import Collection
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import gather, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.eviction.leaves import chains
from kvbm_console.core.ids import Authority, CandidateStatus, ReleaseReason, Site, SkipReason, Tier, WaitPoint
from kvbm_console.core.instructions import (
    CancelTransfer,
    PinDeviceBlocks,
    ReleaseDeviceBlocks,
    StartTransfer,
    WakeRequest,
)
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.holds import held_at, strike
from kvbm_console.core.leader.memory import COPY_LEAST
from kvbm_console.core.leader.victims import copies_further, to_evict
from kvbm_console.core.slots import CandidateFacts, OperationFacts, SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts

ERROR_CHARS_MAX: Final = 512
"""An error text comes from outside and is recorded with the event; longer texts are cut."""


def _slot(decider: Decider, candidate: CandidateFacts) -> SlotFacts | None:
    return None if candidate.slot is None else decider.state.slots.get(candidate.slot)


def _strike(decider: Decider, site: Site, candidate: CandidateFacts) -> None:
    """A candidate passes a site, each once: when its hold ends it goes on from there."""
    if decider.gate is None or not decider.gate.candidates:
        return
    slot = _slot(decider, candidate)
    if slot is None:
        return
    struck = decider.memory.struck.get(candidate.candidate, 0)
    if not struck >> site & 1:
        decider.memory.struck[candidate.candidate] = struck | 1 << site
        strike(decider, site, slot, slot.state, slot.state, candidate)


def _waits(decider: Decider, candidate: CandidateFacts, point: WaitPoint) -> bool:
    slot = _slot(decider, candidate)
    return slot is not None and held_at(decider, slot, point)


def enqueue(decider: Decider, candidate: CandidateFacts) -> None:
    """A planned candidate waits for its evaluation, at the end of this stimulus."""
    decider.emit(ev.CandidateEnqueued, candidate.candidate)
    decider.memory.pending.append(candidate.candidate)
    _strike(decider, Site.CANDIDATE_ENQUEUE, candidate)


# --- evaluate, promote, dispatch ---


def advance(decider: Decider, candidate: CandidateFacts) -> None:
    """Take a pending candidate as far as it goes: to promoted, skipped, or a hold."""
    choice = None
    if candidate.found is None:
        if _waits(decider, candidate, WaitPoint.EVALUATE):
            return
        _strike(decider, Site.EVALUATE_WILL, candidate)
        if _waits(decider, candidate, WaitPoint.EVALUATE):
            return
        sources, _, filtered = choice = choose(decider, candidate)
        decider.emit(ev.CandidateEvaluated, candidate.candidate, len(sources), filtered)
        if not sources:
            skip(decider, candidate, filtered or SkipReason.ALREADY_CACHED)
            return
        _strike(decider, Site.EVALUATE_DID, candidate)
    if not _waits(decider, candidate, WaitPoint.PROMOTE):
        _strike(decider, Site.PROMOTE_WILL, candidate)
    if not _waits(decider, candidate, WaitPoint.PROMOTE):
        # The source may have changed while the slot was held: then choose again.
        sources, hashes, filtered = choice or choose(decider, candidate)
        if not sources:
            skip(decider, candidate, filtered or SkipReason.ALREADY_CACHED)
        elif candidate.route.is_load and candidate.slot is not None:
            _promote(decider, candidate, sources, candidate.targets, hashes)
        else:
            _make_room_and_promote(decider, candidate, sources, hashes)


def _make_room_and_promote(decider: Decider, candidate: CandidateFacts, sources: list[int], hashes: list[int]) -> None:
    """Take free places of the target, evict for the others; blocks that do not fit are left for another time."""
    source, target = pools_of(decider, candidate)
    mine = decider.memory.pools[target.info.pool]
    if not candidate.route.is_load:
        most = _in_time(decider, source, target)
        if most is not None and most < len(hashes):
            decider.memory.pools[source.info.pool].blocked = True
            sources, hashes = sources[:most], hashes[:most]
            if not hashes:
                skip(decider, candidate, SkipReason.LINK_BUSY)
                return
    missing = len(hashes) - mine.room
    if missing > 0:
        victims, rule = to_evict(decider, target, missing, hashes)
        room = mine.room + len(victims)
        if room < len(hashes) and decider.config.eviction.by_request:
            room = 0  # all or nothing, as vLLM
        sources, hashes = sources[:room], hashes[:room]
        if victims:
            _strike(decider, Site.EVICT_WILL, candidate)
            if _waits(decider, candidate, WaitPoint.PROMOTE):
                return
            decider.live_memory.policies[target.info.pool].gave_up(len(victims))
            decider.evict(target, victims, candidate.slot, rule)
    if not hashes:
        if not candidate.route.is_load:
            decider.memory.pools[source.info.pool].blocked = True
        skip(decider, candidate, SkipReason.NO_CAPACITY)
        return
    targets = mine.take(len(hashes), decider.at_ns)
    _promote(decider, candidate, sources, targets, hashes)


def _in_time(decider: Decider, source: PoolFacts, target: PoolFacts) -> int | None:
    """How many further blocks the link can copy down in time; None if that is not known. An idle link has a copy.

    A copy withholds its places from the engine while it runs, so those in flight must be a small part of the pool.
    """
    most = decider.in_time(source)
    if most is None:
        return None
    return max(0, max(most, COPY_LEAST) - sum(
        len(operation.sources) for operation in decider.state.operations.values()
        if (operation.source_pool, operation.target_pool) == (source.info.pool, target.info.pool)
    ))


def _promote(
    decider: Decider, candidate: CandidateFacts, sources: list[int], targets: list[int], hashes: list[int]
) -> None:
    source, target = pools_of(decider, candidate)
    number = decider.state.next_operation
    batch = decider.memory.batch_of.setdefault(candidate.candidate, candidate.candidate)
    thrash = 0
    if candidate.route.is_load:
        since = decider.at_ns - decider.config.thrash_window_ns
        thrash = sum(map(since.__lt__, gather(source.stored_at, sources)))
    decider.emit(ev.BlocksReserved, target.info.pool, number, decider.ids(targets), decider.hashes(hashes))
    decider.emit(
        ev.CandidatePromoted, candidate.candidate, number, batch, source.info.pool, target.info.pool,
        decider.ids(sources), decider.ids(targets), thrash,
        decider.returned(hashes, source, target) if candidate.route.is_load else ev.NOTHING_RETURNED,
    )
    decider.memory.pending.remove(candidate.candidate)
    decider.memory.undispatched.append(number)
    decider.took(source, len(sources))
    decider.live_memory.taken(source, sources)
    if not candidate.route.is_load and source.info.authority is Authority.LEADER:
        copies_further(decider, source)
    if candidate.slot is None and source.info.authority is Authority.ENGINE:
        decider.ask(PinDeviceBlocks(source.info.source, decider.ids(sources)))
        decider.memory.fences[number] = (source.info.source, "", sources)
    if target.info.authority is Authority.LEADER:
        for chain in chains(decider.memory.parent_of, hashes):
            decider.live_memory.policies[target.info.pool].insert(chain, decider.at_ns)
        saved = _all_places(source, sources, hashes)
        if saved is not sources or source.info.authority is Authority.LEADER:  # else since it was planned
            decider.live_memory.saved(source, saved)
    _strike(decider, Site.DISPATCH_WILL, decider.state.candidates[candidate.candidate])


def _all_places(pool: PoolFacts, places: list[int], hashes: list[int]) -> list[int]:
    """Every place of these hashes; one of each is in ``places``."""
    if not pool.copies or pool.copies.keys().isdisjoint(hashes):
        return places
    return [place for key in hashes for place in pool.places_of(key)]


def dispatch(decider: Decider, operation: OperationFacts) -> None:
    candidate = decider.state.candidates[operation.candidate]
    if _waits(decider, candidate, WaitPoint.DISPATCH):
        return
    decider.memory.undispatched.remove(operation.operation)
    decider.memory.issued.append(operation.operation)
    hashes = gather(decider.state.pools[operation.target_pool].hash_of, operation.targets)
    decider.ask(
        StartTransfer(
            operation.operation, operation.epoch, candidate.route, decider.ids(operation.sources),
            decider.ids(operation.targets), len(operation.targets), operation.batch, decider.config.ranks,
            operation.source_pool, operation.target_pool, decider.hashes(hashes),
        )
    )


# --- the blocks of a candidate, and its pools ---


def pools_of(decider: Decider, candidate: CandidateFacts) -> tuple[PoolFacts, PoolFacts]:
    """The source and the target pool of a candidate."""
    drawn_from = decider.memory.drawn_from.get(candidate.candidate)
    if drawn_from is not None:
        source_pool: PoolFacts | None = decider.state.pools[drawn_from]
        if candidate.route.is_load:
            target_pool = decider.state.pool_of(candidate.route.target)
        else:
            target_pool = decider.below(decider.state.pools[drawn_from])
    else:
        slot = _slot(decider, candidate)
        source = 0 if slot is None else slot.source
        source_pool = decider.state.pool_of(candidate.route.source, source)
        target_pool = decider.state.pool_of(candidate.route.target, source)
    if source_pool is None or target_pool is None:
        raise decider.bug(f"candidate {candidate.candidate} has no pools for {candidate.route.label}", candidate.slot)
    return source_pool, target_pool


def choose(decider: Decider, candidate: CandidateFacts) -> tuple[list[int], list[int], SkipReason | None]:
    """Source places and hashes that can be moved, and the reason that left out the others."""
    source, target = pools_of(decider, candidate)
    if candidate.route.is_load:
        if candidate.slot is None:
            return _prefetchable(candidate, source, target)
        slot = decider.state.slots[candidate.slot]
        staged = [place for index, places in slot.staged if index == source.info.pool for place in places]
        if slot.passed_blocks or len(slot.staged) > 1:  # those before its window are not loaded
            wanted = set(candidate.hashes)
            staged = [place for place in staged if source.hash_of[place] in wanted]
        return staged[: len(candidate.hashes)], candidate.hashes, None
    planned, number = decider.memory.pools[source.info.pool].planned, candidate.candidate
    place_of, content, below = source.by_hash, source.content, target.by_hash
    if below.keys().isdisjoint(candidate.hashes) and not _filters(decider, target):
        found = list(map(place_of.get, candidate.hashes))
        ready = [place for place in found if place is not None and content[place] == READY]
        if len(ready) == len(found) == list(map(planned.get, ready)).count(number):  # the usual case
            return ready, candidate.hashes, None
    sources: list[int] = []
    hashes: list[int] = []
    filtered: SkipReason | None = None
    for key in candidate.hashes:
        # A hash may stand in several places; only those of the plan are held by the slot, or known to be free.
        place = place_of.get(key)
        if place is not None and planned.get(place) != number:
            place = next((other for other in source.places_of(key) if planned.get(other) == number), None)
        if key in below:
            filtered = filtered or SkipReason.ALREADY_CACHED
        elif place is None or content[place] != READY:
            filtered = SkipReason.SOURCE_EVICTED
        elif not admitted(decider, target, key):
            filtered = SkipReason.BELOW_FREQUENCY
            decider.live_memory.policies[target.info.pool].not_admitted += 1
        else:
            sources.append(place)
            hashes.append(key)
    return sources, hashes, filtered


def _prefetchable(
    candidate: CandidateFacts, source: PoolFacts, target: PoolFacts
) -> tuple[list[int], list[int], SkipReason | None]:
    """Places and hashes of a prefetch that are still in the source alone; nothing behind a block that left."""
    sources: list[int] = []
    hashes: list[int] = []
    filtered: SkipReason | None = None
    for key in candidate.hashes:
        place = source.ready_place(key)
        if key in target.by_hash:
            filtered = SkipReason.ALREADY_CACHED
        elif place is None:
            return sources, hashes, SkipReason.SOURCE_EVICTED
        else:
            sources.append(place)
            hashes.append(key)
    return sources, hashes, filtered


def admitted(decider: Decider, pool: PoolFacts, key: int) -> bool:
    """True if a block has been used often enough to be written to this pool: the disk tier may ask for several uses."""
    return not _filters(decider, pool) or decider.memory.named.get(key, 0) >= decider.config.eviction.disk_admission


def _filters(decider: Decider, pool: PoolFacts) -> bool:
    return decider.config.eviction.disk_admission > 1 and pool.info.tier is Tier.G3


# --- reports of the mover, rank by rank ---


def transfer_started(decider: Decider, s: st.TransferStarted) -> None:
    """The mover began to copy."""
    operation = _current(decider, s.operation, s.epoch, -1)
    if operation is None:
        return
    if operation.started:
        _refuse(decider, s.operation, s.epoch, -1, "started twice")
    else:
        decider.emit(ev.OperationStarted, s.operation)


def transfer_finished(decider: Decider, s: st.TransferFinished) -> None:
    """One rank has copied its part."""
    report(decider, s.operation, s.epoch, s.rank, True, "", b"")


def transfer_failed(decider: Decider, s: st.TransferFailed) -> None:
    """One rank could not copy; an error counts as a report."""
    report(decider, s.operation, s.epoch, s.rank, False, s.error[:ERROR_CHARS_MAX], s.failed)


def report(decider: Decider, number: int, epoch: int, rank: int, ok: bool, error: str, failed: bytes) -> None:
    """A rank has copied its part of an operation, or could not copy these of its blocks."""
    if not 0 <= rank < decider.config.ranks:
        raise Refused(f"rank must be from 0 to {decider.config.ranks - 1}, got {rank}")
    operation = _current(decider, number, epoch, rank)
    if operation is None:
        return
    if rank in operation.reported:
        _refuse(decider, number, epoch, rank, "reported twice")
        return
    if any(not 0 <= at < len(operation.targets) for at in unpack_ids(failed)):
        raise Refused(f"failed blocks of operation {number} must be from 0 to {len(operation.targets) - 1}")
    if not operation.started:
        decider.emit(ev.OperationStarted, number)
    decider.emit(ev.OperationReported, number, rank, ok, error, failed)
    if len(operation.reported) == decider.config.ranks:
        decider.memory.complete.append(number)


def _current(decider: Decider, number: int, epoch: int, rank: int) -> OperationFacts | None:
    """The open operation of this epoch; otherwise the report is refused and, if it was late, its places are freed."""
    operation = decider.state.operations.get(number)
    if number in decider.memory.flushed:
        decider.memory.flushed[number] -= rank >= 0
        if not decider.memory.flushed[number]:
            del decider.memory.flushed[number]
        return None
    if operation is not None and epoch == decider.state.epoch:
        if decider.state.pools[operation.target_pool].info.source not in decider.watched:
            return operation
        _refuse(decider, number, epoch, rank, "a connector's copy")
        return None
    _refuse(decider, number, epoch, rank, "older epoch" if epoch < decider.state.epoch else "not open")
    late = decider.state.late.get(number)
    if late is not None and len(late - {-1}) == decider.config.ranks:
        _lift(decider, number)
    return None


def _refuse(decider: Decider, number: int, epoch: int, rank: int, why: str) -> None:
    decider.emit(ev.CompletionRefused, number, epoch, rank, why)


def _lift(decider: Decider, number: int) -> None:
    """The last rank of an operation of an older epoch has reported: its places are free again."""
    for pool in decider.state.pools:
        if not any(number in keepers for keepers in pool.quarantined.values()):
            continue
        # Several copies may read one place: it is free when the last of them has ended.
        places = sorted(place for place, keepers in pool.quarantined.items() if keepers == [number])
        decider.emit(ev.BlocksDropped, pool.info.pool, number, decider.ids(places), ReleaseReason.EPOCH)
        if pool.info.authority is Authority.LEADER:
            decider.free_places(pool, places)
        else:
            decider.ask(ReleaseDeviceBlocks(pool.info.source, "", decider.ids(places)))


# --- ends ---


def skip(decider: Decider, candidate: CandidateFacts, reason: SkipReason) -> None:
    """Resolve a pending candidate to no work; a slot that waited for it goes on without."""
    slot = _slot(decider, candidate)
    source, _ = pools_of(decider, candidate)
    decider.memory.pending.remove(candidate.candidate)
    decider.emit(ev.CandidateSkipped, candidate.candidate, reason)
    _forget_plan(decider, source, candidate)
    if decider.config.by_order and not candidate.route.is_load and source.info.authority is Authority.LEADER:
        decider.unblock_above(source)  # a slot that waited for its copy goes on
    if candidate.slot is None and candidate.route.is_load:
        decider.memory.prefetch.ended(candidate.candidate, candidate.hashes, ())
    _strike(decider, Site.SKIP_DID, candidate)
    _end_batch(decider, candidate)
    if slot is not None and candidate.route.is_load:
        _lose(decider, slot, candidate.first_block or 0)
        _end_load(decider, slot)


def skip_candidates(decider: Decider, slot: SlotFacts) -> int:
    """Resolve the slot's candidates that are not promoted to no work; how many there were."""
    from kvbm_console.core.leader.pipeline import skip  # the pipeline is written in the frame, which is written in us

    waiting = [
        decider.state.candidates[number] for number in sorted(slot.outstanding)
        if decider.state.candidates[number].operation is None
    ]
    for candidate in waiting:
        if candidate.candidate in decider.state.candidates:
            skip(decider, candidate, SkipReason.OPERATOR)
    return len(waiting)


def end_operation(decider: Decider, operation: OperationFacts) -> None:
    """Every rank has reported: copied blocks are ready, failed blocks dropped, all references given back."""
    candidate = decider.state.candidates[operation.candidate]
    slot = _slot(decider, candidate)
    if _waits(decider, candidate, WaitPoint.COMPLETION):
        return
    _strike(decider, Site.COMPLETE_WILL, candidate)
    if _waits(decider, candidate, WaitPoint.COMPLETION):
        return
    decider.memory.complete.remove(operation.operation)
    target = decider.state.pools[operation.target_pool]
    if candidate.route.is_load and slot is not None and candidate.first_block is not None:
        good = _good_prefix(decider, slot, candidate.first_block, operation)
        kept, lost = operation.targets[:good], operation.targets[good:]
    elif operation.failed:
        kept = [place for at, place in enumerate(operation.targets) if at not in operation.failed]
        lost = [place for at, place in enumerate(operation.targets) if at in operation.failed]
    else:
        kept, lost = list(operation.targets), []
    if kept:
        decider.emit(ev.BlocksReady, target.info.pool, operation.operation, decider.ids(kept))
    if lost:
        drop(decider, target, operation, lost)
    if candidate.slot is None and candidate.route.is_load:
        decider.memory.prefetch.ended(candidate.candidate, candidate.hashes, [target.hash_of[place] for place in kept])
    if slot is not None and candidate.route.is_load and operation.failed and candidate.first_block is not None:
        _lose(decider, slot, candidate.first_block + min(operation.failed))
    end_candidate(
        decider, operation, CandidateStatus.FAILED if operation.failed else CandidateStatus.COMPLETED
    )
    _save_ready(decider, target, kept)
    decider.mark_dirty(target)


def _save_ready(decider: Decider, pool: PoolFacts, places: list[int]) -> None:
    """Newly readable places that have no copy below are unsaved."""
    lower = decider.below(pool)
    if lower is not None:
        below, hashes = lower.by_hash, gather(pool.hash_of, places)
        decider.unsaved(pool, [place for place, key in zip(places, hashes, strict=True) if key not in below])


def flush_copies(decider: Decider, slot: SlotFacts) -> None:
    """End the copies down of a slot that gives up blocks, so that these can be given out at once.

    vLLM's connector gives blocks back while it copies them, and ends a copy in the step that needs their places.
    """
    for number in sorted(slot.outstanding):
        candidate = decider.state.candidates[number]
        if candidate.operation is None or candidate.route.is_load:
            continue
        operation = decider.state.operations[candidate.operation]
        left = [rank for rank in range(decider.config.ranks) if rank not in operation.reported]
        if operation.operation in decider.memory.undispatched:
            decider.memory.undispatched.remove(operation.operation)
        elif operation.started:
            decider.memory.flushed[operation.operation] = len(left)
        else:
            decider.ask(CancelTransfer(operation.operation))
        if not operation.started:
            decider.emit(ev.OperationStarted, operation.operation)
        for rank in left:
            decider.emit(ev.OperationReported, operation.operation, rank, True, "", b"")
        decider.memory.complete.append(operation.operation)
        end_operation(decider, operation)


def _good_prefix(decider: Decider, slot: SlotFacts, first: int, operation: OperationFacts) -> int:
    """Leading blocks of a load that are usable: none behind the first block that failed in any part of the load."""
    good = min(operation.failed, default=len(operation.targets))
    lost_at = decider.memory.lost_at.get(slot.slot)
    return good if lost_at is None else max(0, min(good, lost_at - first))


def drop(decider: Decider, pool: PoolFacts, operation: OperationFacts, places: list[int]) -> None:
    """Places of a copy that did not arrive hold nothing."""
    hashes = [pool.hash_of[place] for place in places]
    decider.emit(ev.BlocksDropped, pool.info.pool, operation.operation, decider.ids(places), ReleaseReason.FAILED)
    decider.gave_up(pool, places, hashes)


def end_candidate(decider: Decider, operation: OperationFacts, status: CandidateStatus) -> None:
    """A promoted candidate ends: its operation gives back its references, and the slots that waited go on."""
    candidate = decider.state.candidates[operation.candidate]
    slot = _slot(decider, candidate)
    source = decider.state.pools[operation.source_pool]
    target = decider.state.pools[operation.target_pool]
    decider.emit(ev.CandidateEnded, candidate.candidate, status)
    if not candidate.route.is_load:
        if status is CandidateStatus.COMPLETED and candidate.started_ns is not None:
            decider.memory.pools[source.info.pool].took(
                len(operation.sources), candidate.started_ns, decider.at_ns
            )
        _ended_down(decider, source, target, operation)
    decider.live_memory.let_go(source, operation.sources)
    decider.live_memory.let_go(target, operation.targets)
    decider.unblock_above(source)
    decider.unblock_above(target)
    # A load of an engine that is watched may fail although its source places are not known.
    failed = {operation.sources[at] for at in operation.failed if at < len(operation.sources)}
    _forget_plan(decider, source, candidate, failed)
    _end_batch(decider, candidate)
    if slot is not None and candidate.route.is_load:
        _end_load(decider, slot)
    fence = decider.memory.fences.pop(operation.operation, None)
    if fence is not None:
        decider.ask(ReleaseDeviceBlocks(fence[0], fence[1], decider.ids(fence[2])))


def fence(decider: Decider, slot: SlotFacts, given_up: Collection[int]) -> list[int]:
    """The device places, among those that a slot gives up, that its running operations still use.

    The ends of the operations give them back to the engine.
    """
    fenced: dict[int, None] = {}
    for number in sorted(slot.outstanding):
        operation = decider.state.operations[decider.state.candidates[number].operation or 0]
        mine = operation.sources if operation.source_pool == slot.device_pool else operation.targets
        places = [place for place in mine if place in given_up and place not in fenced]
        if places:
            before = decider.memory.fences.get(operation.operation, (slot.source, slot.request, []))
            decider.memory.fences[operation.operation] = (*before[:2], [*before[2], *places])
            fenced.update(dict.fromkeys(places))
    return list(fenced)


def _ended_down(decider: Decider, source: PoolFacts, target: PoolFacts, operation: OperationFacts) -> None:
    """A copy down has ended: update the count of safe blocks, and note if another copy runs."""
    memory, index = decider.memory, source.info.pool
    memory.pools[index].copied(len(operation.sources))
    if index in memory.busy and not any(
        copy.source_pool == index and copy.target_pool == target.info.pool for copy in decider.state.operations.values()
    ):
        memory.busy[index][-1][1] = decider.at_ns


def _forget_plan(
    decider: Decider, source: PoolFacts, candidate: CandidateFacts, failed: Collection[int] = ()
) -> None:
    """Places that were planned to be copied are unsaved again unless a copy of them stands below by now.

    Places whose copy ``failed`` are not, because a dead disk would be asked for ever. Neither are places of blocks that
    are used too rarely to be admitted below. A block that is used again is copied again (``lookups.assign``,
    ``lookups.stage``).
    """
    if candidate.route.is_load:
        return
    planned = decider.memory.pools[source.info.pool].planned
    number = candidate.candidate
    places = [place for place, other in planned.items() if other == number]
    if len(places) == len(planned):
        planned.clear()
    else:
        deque(map(planned.pop, places), 0)
    lower = decider.below(source)
    if lower is not None:
        below, hash_of, content = lower.by_hash, source.hash_of, source.content
        places = [place for place in places if hash_of[place] not in below]
        if places:
            decider.unsaved(source, [
                place for place in places
                if content[place] == READY and place not in failed and admitted(decider, lower, hash_of[place])
            ])
    decider.mark_dirty(source)


def _end_batch(decider: Decider, candidate: CandidateFacts) -> None:
    batch = decider.memory.batch_of.pop(candidate.candidate, candidate.candidate)
    decider.memory.drawn_from.pop(candidate.candidate, None)
    decider.memory.struck.pop(candidate.candidate, None)
    if batch in decider.state.batches and batch not in decider.memory.batch_of.values():
        decider.emit(ev.BatchEnded, batch)


def _lose(decider: Decider, slot: SlotFacts, block: int) -> None:
    """Block ``block`` of a load is not coming: take back its hits and those behind it, and the computed position."""
    if slot.slot not in decider.memory.loads:
        return
    before = decider.memory.lost_at.get(slot.slot)
    if before is not None and before <= block:
        return
    decider.memory.lost_at[slot.slot] = block
    pool = decider.state.pools[slot.device_pool if slot.device_pool is not None else -1]
    end = slot.end_block if before is None else before
    stale = [place for place in slot.places(block, end) if pool.content[place] == READY]
    if stale:
        hashes = [pool.hash_of[place] for place in stale]
        decider.emit(ev.BlocksDropped, pool.info.pool, -1, decider.ids(stale), ReleaseReason.FAILED)
        decider.gave_up(pool, stale, hashes)
    for part in decider.memory.loads.get(slot.slot, ()):
        low = max(part.first, block)
        high = part.first + part.count if before is None else min(part.first + part.count, before)
        counted = min(high, slot.prompt_blocks) - min(low, slot.prompt_blocks)
        if high > low:
            position = block * decider.block_tokens_of(slot.source)
            again = slot.preemptions > 0
            decider.emit(ev.HitsLost, slot.slot, Tier(part.tier), max(0, counted), position, again)
            if not again:
                decider.lost_hits[Tier(part.tier)] += max(0, counted)


def _end_load(decider: Decider, slot: SlotFacts) -> None:
    """When the last load that a slot waits for has ended, give back the staging and wake the engine."""
    if slot.slot not in decider.memory.loads:
        return
    open_loads = [number for number in slot.outstanding if decider.state.candidates[number].route.is_load]
    if not open_loads:
        decider.memory.loads.pop(slot.slot, None)
        decider.memory.lost_at.pop(slot.slot, None)
        decider.release_staging(slot, ReleaseReason.LOADED)
        decider.ask(WakeRequest(slot.source, slot.request))
