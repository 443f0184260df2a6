"""The pipeline: candidates are evaluated, promoted or skipped, dispatched, and ended when every rank has reported.

Law of this file: a candidate goes as far as it can at once, and stands still only where its slot is held. What is
called here is called by ``settle``, to quiescence, at the end of every stimulus: no pump, no polling.
"""

from collections import deque
from collections.abc import Collection
from itertools import repeat

from kvbm_console.core import events as ev
from kvbm_console.core.candidates import CandidateFacts, OperationFacts
from kvbm_console.core.columns import gather, pack_hashes, pack_ids
from kvbm_console.core.ids import (
    Authority,
    CandidateStatus,
    ReleaseReason,
    Site,
    SkipReason,
    Tier,
    WaitPoint,
)
from kvbm_console.core.instructions import PinDeviceBlocks, ReleaseDeviceBlocks, StartTransfer, WakeRequest
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.prefixes import chains
from kvbm_console.core.leader.room import copies_further, to_evict
from kvbm_console.core.leader.sources import admitted, choose, pools_of
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts


def _slot(leader: Decider, candidate: CandidateFacts) -> SlotFacts | None:
    return None if candidate.slot is None else leader.state.slots.get(candidate.slot)


def _strike(leader: Decider, site: Site, candidate: CandidateFacts) -> None:
    """A candidate passes a site, each once: when its hold ends it goes on from there."""
    if leader.gate is None or not leader.gate.candidates:
        return
    slot = _slot(leader, candidate)
    if slot is None:
        return
    struck = leader.aids.struck.get(candidate.candidate, 0)
    if not struck >> site & 1:
        leader.aids.struck[candidate.candidate] = struck | 1 << site
        leader.strike(site, slot, slot.state, slot.state, candidate)


def _waits(leader: Decider, candidate: CandidateFacts, point: WaitPoint) -> bool:
    slot = _slot(leader, candidate)
    return slot is not None and leader.held_at(slot, point)


def enqueue(leader: Decider, candidate: CandidateFacts) -> None:
    """A planned candidate waits for its evaluation, at the end of this stimulus."""
    leader.emit(ev.CandidateEnqueued, candidate.candidate)
    leader.aids.pending.append(candidate.candidate)
    _strike(leader, Site.CANDIDATE_ENQUEUE, candidate)


# --- evaluate, promote, dispatch ---


def advance(leader: Decider, candidate: CandidateFacts) -> None:
    """Take a pending candidate as far as it goes: to promoted, skipped, or a hold."""
    choice = None
    if candidate.found is None:
        if _waits(leader, candidate, WaitPoint.EVALUATE):
            return
        _strike(leader, Site.EVALUATE_WILL, candidate)
        if _waits(leader, candidate, WaitPoint.EVALUATE):
            return
        sources, _, filtered = choice = choose(leader, candidate)
        leader.emit(ev.CandidateEvaluated, candidate.candidate, len(sources), filtered)
        if not sources:
            skip(leader, candidate, filtered or SkipReason.ALREADY_CACHED)
            return
        _strike(leader, Site.EVALUATE_DID, candidate)
    if not _waits(leader, candidate, WaitPoint.PROMOTE):
        _strike(leader, Site.PROMOTE_WILL, candidate)
    if not _waits(leader, candidate, WaitPoint.PROMOTE):
        # What was found may have changed while the slot was held: then choose again.
        sources, hashes, filtered = choice or choose(leader, candidate)
        if not sources:
            skip(leader, candidate, filtered or SkipReason.ALREADY_CACHED)
        elif candidate.route.is_load and candidate.slot is not None:
            _promote(leader, candidate, sources, candidate.targets, hashes)
        else:
            _make_room_and_promote(leader, candidate, sources, hashes)


def _make_room_and_promote(leader: Decider, candidate: CandidateFacts, sources: list[int], hashes: list[int]) -> None:
    """Take free places of the target, evict for the others; what does not fit is left for another time."""
    source, target = pools_of(leader, candidate)
    mine = leader.aids.pools[target.info.pool]
    missing = len(hashes) - mine.room
    if missing > 0:
        victims, rule = to_evict(leader, target, missing, hashes)
        room = mine.room + len(victims)
        sources, hashes = sources[:room], hashes[:room]
        if victims:
            _strike(leader, Site.EVICT_WILL, candidate)
            if _waits(leader, candidate, WaitPoint.PROMOTE):
                return
            leader.box.policies[target.info.pool].gave_up(len(victims))
            leader.evict(target, victims, candidate.slot, rule)
    if not hashes:
        if not candidate.route.is_load:
            leader.aids.pools[source.info.pool].blocked = True
        skip(leader, candidate, SkipReason.NO_CAPACITY)
        return
    targets = mine.take(len(hashes))
    _promote(leader, candidate, sources, targets, hashes)


def _promote(
    leader: Decider, candidate: CandidateFacts, sources: list[int], targets: list[int], hashes: list[int]
) -> None:
    source, target = pools_of(leader, candidate)
    number = leader.state.next_operation
    batch = leader.aids.batch_of.setdefault(candidate.candidate, candidate.candidate)
    thrash = 0
    if candidate.route.is_load:
        since = leader.at_ns - leader.config.thrash_window_ns
        thrash = sum(map(since.__lt__, gather(source.stored_at, sources)))
    leader.emit(ev.BlocksReserved, target.info.pool, number, pack_ids(targets), pack_hashes(hashes))
    leader.emit(
        ev.CandidatePromoted, candidate.candidate, number, batch, source.info.pool, target.info.pool,
        pack_ids(sources), pack_ids(targets), thrash,
        leader.returned(hashes, source, target) if candidate.route.is_load else ev.NOTHING_RETURNED,
    )
    leader.aids.pending.remove(candidate.candidate)
    leader.aids.undispatched.append(number)
    leader.aids.taken(source, sources)
    if not candidate.route.is_load and source.info.authority is Authority.LEADER:
        copies_further(leader, source)
    if candidate.slot is None and source.info.authority is Authority.ENGINE:
        leader.ask(PinDeviceBlocks(source.info.source, pack_ids(sources)))
        leader.aids.fences[number] = (source.info.source, "", sources)
    if target.info.authority is Authority.LEADER:
        for chain in chains(leader.aids.parent_of, hashes):
            leader.box.policies[target.info.pool].insert(chain, leader.at_ns)
        leader.aids.saved(source, _all_places(source, sources, hashes))
    _strike(leader, Site.DISPATCH_WILL, leader.state.candidates[candidate.candidate])


def _all_places(pool: PoolFacts, places: list[int], hashes: list[int]) -> list[int]:
    """Every place of these hashes; one of each is in ``places``."""
    if not pool.copies or pool.copies.keys().isdisjoint(hashes):
        return places
    return [place for key in hashes for place in pool.places_of(key)]


def dispatch(leader: Decider, operation: OperationFacts) -> None:
    candidate = leader.state.candidates[operation.candidate]
    if _waits(leader, candidate, WaitPoint.DISPATCH):
        return
    leader.aids.undispatched.remove(operation.operation)
    leader.aids.issued.append(operation.operation)
    leader.ask(
        StartTransfer(
            operation.operation, operation.epoch, candidate.route, pack_ids(operation.sources),
            pack_ids(operation.targets), len(operation.targets), operation.batch, leader.config.ranks,
        )
    )


# --- ends ---


def skip(leader: Decider, candidate: CandidateFacts, reason: SkipReason) -> None:
    """Resolve a pending candidate to no work; a slot that waited for it goes on without."""
    slot = _slot(leader, candidate)
    source, _ = pools_of(leader, candidate)
    leader.aids.pending.remove(candidate.candidate)
    leader.emit(ev.CandidateSkipped, candidate.candidate, reason)
    _forget_plan(leader, source, candidate, [])
    if leader.config.by_order and not candidate.route.is_load and source.info.authority is Authority.LEADER:
        leader.unblock_above(source)  # who waits for its copy waits no longer
    if candidate.slot is None and candidate.route.is_load:
        leader.aids.prefetch.ended(candidate.candidate, candidate.hashes, ())
    _strike(leader, Site.SKIP_DID, candidate)
    _end_batch(leader, candidate)
    if slot is not None and candidate.route.is_load:
        _lose(leader, slot, candidate.first_block or 0)
        _end_load(leader, slot)


def end_operation(leader: Decider, operation: OperationFacts) -> None:
    """Every rank has reported: what arrived is ready, what did not is dropped, and all references are given back."""
    candidate = leader.state.candidates[operation.candidate]
    slot = _slot(leader, candidate)
    if _waits(leader, candidate, WaitPoint.COMPLETION):
        return
    _strike(leader, Site.COMPLETE_WILL, candidate)
    if _waits(leader, candidate, WaitPoint.COMPLETION):
        return
    leader.aids.complete.remove(operation.operation)
    target = leader.state.pools[operation.target_pool]
    if candidate.route.is_load and slot is not None and candidate.first_block is not None:
        good = _good_prefix(leader, slot, candidate.first_block, operation)
        kept, lost = operation.targets[:good], operation.targets[good:]
    elif operation.failed:
        kept = [place for at, place in enumerate(operation.targets) if at not in operation.failed]
        lost = [place for at, place in enumerate(operation.targets) if at in operation.failed]
    else:
        kept, lost = list(operation.targets), []
    if kept:
        leader.emit(ev.BlocksReady, target.info.pool, operation.operation, pack_ids(kept))
    if lost:
        drop(leader, target, operation, lost)
    if candidate.slot is None and candidate.route.is_load:
        leader.aids.prefetch.ended(candidate.candidate, candidate.hashes, [target.hash_of[place] for place in kept])
    if slot is not None and candidate.route.is_load and operation.failed and candidate.first_block is not None:
        _lose(leader, slot, candidate.first_block + min(operation.failed))
    end_candidate(
        leader, operation, CandidateStatus.FAILED if operation.failed else CandidateStatus.COMPLETED
    )
    _save_ready(leader, target, kept)
    leader.mark_dirty(target)


def _save_ready(leader: Decider, pool: PoolFacts, places: list[int]) -> None:
    """Newly readable places that have no copy below are unsaved."""
    lower = leader.below(pool)
    if lower is not None:
        below, hashes = lower.by_hash, gather(pool.hash_of, places)
        leader.aids.unsaved(pool, [place for place, key in zip(places, hashes, strict=True) if key not in below])


def _good_prefix(leader: Decider, slot: SlotFacts, first: int, operation: OperationFacts) -> int:
    """Leading blocks of a load that are usable: none behind the first block that failed in any part of the load."""
    good = min(operation.failed, default=len(operation.targets))
    lost_at = leader.aids.lost_at.get(slot.slot)
    return good if lost_at is None else max(0, min(good, lost_at - first))


def drop(leader: Decider, pool: PoolFacts, operation: OperationFacts, places: list[int]) -> None:
    """Places of a copy that did not arrive hold nothing."""
    hashes = [pool.hash_of[place] for place in places]
    leader.emit(ev.BlocksDropped, pool.info.pool, operation.operation, pack_ids(places), ReleaseReason.FAILED)
    leader.gave_up(pool, places, hashes)


def end_candidate(leader: Decider, operation: OperationFacts, status: CandidateStatus) -> None:
    """A promoted candidate ends: its operation gives back its references, and what waited for that goes on."""
    candidate = leader.state.candidates[operation.candidate]
    slot = _slot(leader, candidate)
    source = leader.state.pools[operation.source_pool]
    target = leader.state.pools[operation.target_pool]
    leader.emit(ev.CandidateEnded, candidate.candidate, status)
    if not candidate.route.is_load:
        _ended_down(leader, source, target, operation)
    leader.aids.let_go(source, operation.sources)
    leader.aids.let_go(target, operation.targets)
    leader.unblock_above(source)
    leader.unblock_above(target)
    # A load of an engine that is watched may fail although its source places are not known.
    failed = {place for at, place in enumerate(operation.sources) if at in operation.failed}
    _forget_plan(leader, source, candidate, operation.sources, failed)
    _end_batch(leader, candidate)
    if slot is not None and candidate.route.is_load:
        _end_load(leader, slot)
    fence = leader.aids.fences.pop(operation.operation, None)
    if fence is not None:
        leader.ask(ReleaseDeviceBlocks(fence[0], fence[1], pack_ids(fence[2])))


def _ended_down(leader: Decider, source: PoolFacts, target: PoolFacts, operation: OperationFacts) -> None:
    """A copy down has ended: so many blocks are safe, and whether another one runs."""
    aids, index = leader.aids, source.info.pool
    aids.pools[index].copied(len(operation.sources))
    if index in aids.busy and not any(
        one.source_pool == index and one.target_pool == target.info.pool for one in leader.state.operations.values()
    ):
        aids.busy[index][-1][1] = leader.at_ns


def _forget_plan(
    leader: Decider, source: PoolFacts, candidate: CandidateFacts, copied: list[int], failed: Collection[int] = ()
) -> None:
    """Places that were planned to be copied are unsaved again unless a copy of them stands below by now.

    Those whose copy ``failed`` are not: a dead disk would be asked for ever; nor those that are used too rarely to be
    admitted below. A block that is used again is copied again (``lookups.assign``, ``lookups.stage``).
    """
    if candidate.route.is_load:
        return
    planned = leader.aids.pools[source.info.pool].planned
    number = candidate.candidate
    places = copied
    whole = len(copied) == len(candidate.hashes) and not source.copies
    if not whole or list(map(planned.get, copied)).count(number) != len(copied):
        places = [place for place, other in planned.items() if other == number]
    deque(map(planned.pop, places, repeat(None)), 0)
    lower = leader.below(source)
    if lower is not None:
        below, hashes = lower.by_hash, gather(source.hash_of, places)
        if not all(map(below.__contains__, hashes)):
            leader.aids.unsaved(
                source,
                [
                    place for place, key in zip(places, hashes, strict=True)
                    if source.content[place] == READY and key not in below and place not in failed
                    and admitted(leader, lower, key)
                ],
            )
    leader.mark_dirty(source)


def _end_batch(leader: Decider, candidate: CandidateFacts) -> None:
    batch = leader.aids.batch_of.pop(candidate.candidate, candidate.candidate)
    leader.aids.drawn_from.pop(candidate.candidate, None)
    leader.aids.struck.pop(candidate.candidate, None)
    if batch in leader.state.batches and batch not in leader.aids.batch_of.values():
        leader.emit(ev.BatchEnded, batch)


def _lose(leader: Decider, slot: SlotFacts, block: int) -> None:
    """Block ``block`` of a load is not coming: take back its hits and those behind it, and the computed position."""
    if slot.slot not in leader.aids.loads:
        return
    before = leader.aids.lost_at.get(slot.slot)
    if before is not None and before <= block:
        return
    leader.aids.lost_at[slot.slot] = block
    pool = leader.state.pools[slot.device_pool if slot.device_pool is not None else -1]
    stale = [place for place in slot.device_blocks[block:before] if pool.content[place] == READY]
    if stale:
        hashes = [pool.hash_of[place] for place in stale]
        leader.emit(ev.BlocksDropped, pool.info.pool, -1, pack_ids(stale), ReleaseReason.FAILED)
        leader.gave_up(pool, stale, hashes)
    for part in leader.aids.loads.get(slot.slot, ()):
        low = max(part.first, block)
        high = part.first + part.count if before is None else min(part.first + part.count, before)
        counted = min(high, slot.prompt_blocks) - min(low, slot.prompt_blocks)
        if high > low:
            position = block * leader.block_tokens_of(slot.source)
            leader.emit(ev.HitsLost, slot.slot, Tier(part.tier), max(0, counted), position)


def _end_load(leader: Decider, slot: SlotFacts) -> None:
    """When the last load that a slot waits for has ended, give back the staging and wake the engine."""
    if slot.slot not in leader.aids.loads:
        return
    open_loads = [number for number in slot.outstanding if leader.state.candidates[number].route.is_load]
    if not open_loads:
        leader.aids.loads.pop(slot.slot, None)
        leader.aids.lost_at.pop(slot.slot, None)
        leader.release_staging(slot, ReleaseReason.LOADED)
        leader.ask(WakeRequest(slot.source, slot.request))
