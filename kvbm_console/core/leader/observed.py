"""Engines that are only watched: they have decided already, and what they report becomes true.

A tap beside a real engine's scheduler tells of lookups, allocations, iterations and copies in the order of its calls.
Nothing is planned here: slots move as reported, and what a block held before it was given to another request was
evicted, for that request.

Law of this file: a report that does not fit what is known is no reason to refuse it. What it contradicts is given up,
and the source is marked as one of which reports were lost, so no count of it is shown as certain.
"""

from collections.abc import Callable
from typing import Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import HASH_BYTES, pack_hashes, pack_ids, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import FinishReason, MissReason, ReleaseReason, SlotState, Tier, WaitPoint
from kvbm_console.core.instructions import FencedBlocks, FinishAnswer, MatchAnswer
from kvbm_console.core.leader import lookups
from kvbm_console.core.leader.ends import finish
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.holds import cancel_hold
from kvbm_console.core.leader.requests import preempt
from kvbm_console.core.leader.watched_copies import close_copies, copies_observed, load, lower_of, store
from kvbm_console.core.leader.watched_places import TOLD
from kvbm_console.core.leader.watched_steps import (
    ENDED,
    append,
    check_ids,
    contradicted,
    fill_for,
    give_up,
    iteration_finished,
    iteration_scheduled,
)
from kvbm_console.core.slots import WAITING_STATES, SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts

_S = SlotState


def not_watched(leader: Decider, s: st.LookupObserved | st.CopiesObserved) -> None:
    """Only of an engine that is watched."""
    raise Refused(f"source {s.source} has declared no device pool that is only watched")


def mismatch_reported(leader: Decider, s: st.MismatchReported) -> None:
    """Put a worker's finding on the record. The request may have ended, and the facts stay."""
    if len(s.hashes) != HASH_BYTES:
        raise Refused(f"hashes must be one hash of {HASH_BYTES} bytes, not {len(s.hashes)} bytes")
    slot = leader.state.slot_of.get(s.request)
    leader.emit(
        ev.ContentMismatched, slot, s.source, s.request, s.rank, s.group, s.hashes, s.kind, s.stage, s.place, s.below,
        s.copy, s.writer, s.edge, s.taken,
    )


def request_arrived(leader: Decider, s: st.RequestArrived) -> None:
    """A request; one of the same name whose end was not seen ends before it."""
    before = leader.state.slot_named(s.request)
    if before is not None and before.source == s.source:
        contradicted(leader, s.source)
        close_copies(leader, before)
        if before.state not in ENDED:
            _finish(leader, before, FinishReason.ABORTED)
    lookups.request_arrived(leader, s)


def match_requested(leader: Decider, s: st.MatchRequested) -> MatchAnswer:
    """The engine is about to look this request up: ``tokens`` is None when it shall ask again, else 0."""
    slot = _waiting(leader, s.request)
    return MatchAnswer(None if leader.held_at(slot, WaitPoint.LOOKUP) else 0, False)


def lookup_observed(leader: Decider, s: st.LookupObserved) -> None:
    """What the connector answered."""
    slot = _waiting(leader, s.request)
    size = leader.block_tokens_of(s.source)
    local, found = s.computed_tokens // size, (s.tokens or 0) // size
    matched = [0, 0, 0]
    if s.tier is not Tier.G1:
        matched[s.tier - 2] = found
    at = local + found
    first_miss, why = (None, MissReason.WRITING) if s.tokens is None else _missed(leader, slot, at, size)
    if slot.last_answer != (s.tokens, local, first_miss):
        leader.emit(
            ev.LookupAnswered, slot.slot, local, (matched[0], matched[1], matched[2]), first_miss, why, s.tokens,
            s.asynchronous,
        )
    if s.tokens and slot.state is not _S.ONBOARD_STAGED:
        leader.move(slot, _S.ONBOARD_STAGED, detail=s.tokens)
    elif not s.tokens and slot.state is _S.ONBOARD_STAGED:
        leader.move(slot, _S.INITIALIZED)


def _missed(leader: Decider, slot: SlotFacts, at: int, size: int) -> tuple[int | None, MissReason]:
    if not slot.hashes:
        return None, MissReason.TOO_SHORT
    if at >= len(slot.hashes):
        return None, MissReason.NONE
    if at >= (slot.prompt_tokens - 1) // size:
        return at, MissReason.BOUNDARY
    if slot.source in leader.state.lost_sources:
        return at, MissReason.UNKNOWN_AFTER_GAP
    return at, leader.aids.why_gone(slot.hashes[at])


def _waiting(leader: Decider, request: str) -> SlotFacts:
    """The slot of a request that the engine looks up: its preemption is reported at the end of the step only."""
    slot = leader.live(request)
    if slot.state in ENDED:
        raise Refused(f"request {request!r} is {slot.state.label} already")
    if slot.state not in WAITING_STATES:
        close_copies(leader, slot)
        preempt(leader, slot)
    elif slot.device_blocks:
        leader.release_device_blocks(slot, ReleaseReason.REASSIGNED)
    return slot


# --- allocations ---


def blocks_allocated(leader: Decider, s: st.BlocksAllocated) -> None:
    """All device blocks of the request as of now; at an admission it is scored, and its load begins."""
    slot = leader.live(s.request)
    if slot.state in ENDED:
        raise Refused(f"request {s.request!r} is {slot.state.label} already")
    pool = leader.device_pool(slot.source)
    ids = unpack_ids(s.block_ids)
    check_ids(pool, slot, ids)
    known = slot.device_blocks
    if known and ids[: len(known)] != known:
        contradicted(leader, slot.source)
        leader.release_device_blocks(slot, ReleaseReason.REASSIGNED)
        known = slot.device_blocks
    if len(ids) == len(known):
        return
    if known:
        append(leader, pool, [slot], [len(ids) - len(known)], ids[len(known) :])
        return
    size = pool.info.block_tokens
    reused = min(slot.local_blocks, len(ids), len(slot.hashes))
    external = min(s.external_tokens // size, len(ids) - reused)
    _make_reusable(leader, pool, slot, ids, reused)
    lower = lower_of(leader, slot.source)
    # A load that is seen fills its places anew, also where one has held the same content.
    there = _told_before(pool, slot, ids, reused, external) if lower is None else set()
    give_up(leader, pool, slot, ids[reused:] if not there else [place for place in ids[reused:] if place not in there])
    leader.emit(
        ev.DeviceBlocksAssigned, pool.info.pool, (slot.slot,), (len(ids),), pack_ids(ids), reused,
        min(s.external_tokens, (len(ids) - reused) * size),
    )
    hits = [min(reused, slot.prompt_blocks), 0, 0, 0]
    if external:
        tier = Tier.G2 if lower is None else lower.info.tier
        hits[tier - 1] = min(external, slot.prompt_blocks - hits[0])
    leader.score(slot, (hits[0], hits[1], hits[2], hits[3]), slot.hashes[reused : slot.prompt_blocks], pool)
    if s.external_tokens:
        load(leader, pool, lower, slot, reused, external, s.external_tokens)


def _told_before(pool: PoolFacts, slot: SlotFacts, ids: list[int], reused: int, external: int) -> set[int]:
    """Places of loaded blocks that the engine's pool has named already."""
    loaded = zip(ids[reused : reused + external], slot.hashes[reused:], strict=False)
    return {place for place, key in loaded if place < len(pool) and pool.hash_of[place] == key}


def _make_reusable(leader: Decider, pool: PoolFacts, slot: SlotFacts, ids: list[int], reused: int) -> None:
    """The engine says that these blocks hold the request's prefix: so they do."""
    wrong = _unlike(pool, slot, ids, reused)
    if wrong:
        fill_for(leader, pool, ids[:reused], slot.hashes[:reused])
        wrong = _unlike(pool, slot, ids, reused)
    if not wrong:
        return
    contradicted(leader, slot.source)
    give_up(leader, pool, slot, [place for place, _ in wrong])
    if place_above := [place for place, _ in wrong if place >= len(pool)]:
        raise Refused(f"block {place_above[0]} is reused and was never given to anybody")
    places, hashes = pack_ids(place for place, _ in wrong), pack_hashes(key for _, key in wrong)
    leader.emit(ev.BlocksReserved, pool.info.pool, TOLD, places, hashes)
    leader.emit(ev.BlocksReady, pool.info.pool, TOLD, places)


def _unlike(pool: PoolFacts, slot: SlotFacts, ids: list[int], reused: int) -> list[tuple[int, int]]:
    """(place, hash it should hold) of what is not known to hold the prefix."""
    return [
        (place, key) for place, key in zip(ids[:reused], slot.hashes[:reused], strict=True)
        if place >= len(pool) or pool.hash_of[place] != key or pool.content[place] != READY
    ]


# --- ends ---


def request_preempted(leader: Decider, s: st.RequestPreempted) -> FencedBlocks:
    """The engine took the blocks back."""
    slot = leader.live(s.request)
    if slot.state in ENDED or (slot.state is _S.PREEMPTED and not slot.device_blocks):
        raise Refused(f"request {s.request!r} is {slot.state.label} already")
    close_copies(leader, slot)
    return preempt(leader, slot)


def request_finished(leader: Decider, s: st.RequestFinished) -> FinishAnswer:
    """The request ended; with ``delayed`` its blocks stay until they are stored."""
    slot = leader.live(s.request)
    if slot.state in ENDED:
        raise Refused(f"request {s.request!r} is {slot.state.label} already")
    if s.delayed:
        store(leader, slot)
    _give_up_unnamed(leader, slot, unpack_ids(s.block_ids))
    return _finish(leader, slot, s.reason)


def _give_up_unnamed(leader: Decider, slot: SlotFacts, named: list[int]) -> None:
    """An engine gives loaded blocks their hashes when it takes the request up again. If the request ends before that,
    no lookup finds them: only the blocks ``named`` by the engine are kept."""
    if slot.state is not _S.ONBOARDING or slot.device_pool is None or slot.outstanding:
        return
    pool = leader.state.pools[slot.device_pool]
    loaded = set(slot.device_blocks[slot.local_blocks :]).difference(named)
    places = sorted(place for place in loaded if pool.content[place] == READY)
    if places:
        hashes = [pool.hash_of[place] for place in places]
        leader.emit(ev.BlocksDropped, pool.info.pool, TOLD, pack_ids(places), ReleaseReason.FINISHED)
        leader.gave_up(pool, places, hashes)


def _finish(leader: Decider, slot: SlotFacts, reason: FinishReason) -> FinishAnswer:
    cancel_hold(leader, slot, "aborted" if reason is FinishReason.ABORTED else "finished")
    if slot.outstanding:
        leader.move(slot, _S.FINISHING, reason=reason)
        leader.aids.ending.append(slot.slot)
        return FinishAnswer(True)
    leader.release_device_blocks(slot, ReleaseReason.FINISHED)
    finish(leader, slot, reason)
    return FinishAnswer(False)


def source_restarted(leader: Decider, s: st.SourceRestarted) -> None:
    """The engine began again, or is gone: its requests and copies ended, and what it held is void."""
    for slot in [slot for slot in leader.state.slots.values() if slot.source == s.source]:
        close_copies(leader, slot)
        if slot.state not in ENDED:
            _finish(leader, slot, FinishReason.ABORTED)
        elif slot.slot in leader.aids.ending:
            leader.aids.ending.remove(slot.slot)
            leader.release_device_blocks(slot, ReleaseReason.FINISHED)
            finish(leader, slot, slot.reason)
    leader.emit(ev.SourceLost, s.source, 0, 0, True, True, s.gone and s.replaceable)
    if not s.gone:
        leader.emit(ev.SourceLost, s.source, 0, 0, True)


HANDLERS: Final[dict[type[st.Stimulus], Callable[[Decider, Any], Any]]] = {
    st.RequestArrived: request_arrived,
    st.MatchRequested: match_requested,
    st.LookupObserved: lookup_observed,
    st.BlocksAllocated: blocks_allocated,
    st.IterationScheduled: iteration_scheduled,
    st.IterationFinished: iteration_finished,
    st.RequestPreempted: request_preempted,
    st.RequestFinished: request_finished,
    st.CopiesObserved: copies_observed,
    st.SourceRestarted: source_restarted,
}
"""Stimulus type to its handler for an engine that is only watched; the others are as for every source."""
