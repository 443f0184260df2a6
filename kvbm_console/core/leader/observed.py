"""Watched engines: they have decided already, and their reports become true.

A tap beside a real engine's scheduler tells of lookups, allocations, iterations and copies in the order of its calls.
Nothing is planned here: slots move as reported. When a block is given to another request, its old content counts as
evicted for that request.

Law of this file: no report is refused because it does not fit the facts. When a report contradicts our
state, the report wins. The source is marked as lossy, so its counts are shown as uncertain.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import HASH_BYTES, pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import (
    EMPTY_HASH,
    Authority,
    CandidateStatus,
    Condition,
    EvictRule,
    FinishReason,
    MissReason,
    ReleaseReason,
    Route,
    SlotState,
    Tier,
    WaitPoint,
)
from kvbm_console.core.instructions import AuditAnswer, FencedBlocks, FinishAnswer, IterationMetadata, MatchAnswer
from kvbm_console.core.leader import lookups
from kvbm_console.core.leader.connectors import cancel_told, remember
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.filling import being_filled, fills, link_chain
from kvbm_console.core.leader.holds import cancel_hold, held_at
from kvbm_console.core.leader.memory import LoadPart
from kvbm_console.core.leader.pipeline import drop, end_candidate, end_operation
from kvbm_console.core.leader.requests import preempt
from kvbm_console.core.leader.shapes import check_report
from kvbm_console.core.leader.slots import finish, move
from kvbm_console.core.slots import WAITING_STATES, OperationFacts, SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts

_S = SlotState
ENDED: Final = (_S.FINISHING, _S.FINISHED)
_BEGINS: Final = (_S.INITIALIZED, _S.ONBOARD_STAGED, _S.ONBOARDING, _S.PREEMPTED)
_DECODES: Final = (_S.DECODING, _S.SKIPPED_DECODE)
_SKIPPED_OF: Final = {_S.PREFILLING: _S.SKIPPED_PREFILL, _S.DECODING: _S.SKIPPED_DECODE}
_BACK_OF: Final = {skipped: back for back, skipped in _SKIPPED_OF.items()}


def not_watched(decider: Decider, s: st.LookupObserved | st.CopiesObserved | st.PlacesAudited) -> None:
    """Refuse a stimulus that only a watched engine sends."""
    raise Refused(f"source {s.source} has declared no device pool that is only watched")


def mismatch_reported(decider: Decider, s: st.MismatchReported) -> None:
    """Put a worker's finding on the record. The request may have ended, and the facts stay."""
    if len(s.hashes) != HASH_BYTES:
        raise Refused(f"hashes must be one hash of {HASH_BYTES} bytes, not {len(s.hashes)} bytes")
    slot = decider.state.slot_of.get(s.request)
    decider.emit(
        ev.ContentMismatched, slot, s.source, s.request, s.rank, s.group, s.hashes, s.kind, s.stage, s.place, s.below,
        s.copy, s.writer, s.edge, s.taken,
    )


def request_arrived(decider: Decider, s: st.RequestArrived) -> None:
    """A request arrives; an open request of the same name ends before it."""
    before = decider.state.slot_named(s.request)
    if before is not None:
        contradicted(decider, s.source)
        _abort(decider, before)
    lookups.request_arrived(decider, s)
    slot = decider.state.slot_of.get(s.request)
    if slot is not None:
        remember(decider, s.request, slot)


def match_requested(decider: Decider, s: st.MatchRequested) -> MatchAnswer:
    """The engine is about to look this request up: ``tokens`` is None when it shall ask again, else 0."""
    slot = _waiting(decider, s.request)
    return MatchAnswer(None if held_at(decider, slot, WaitPoint.LOOKUP) else 0, False)


def lookup_observed(decider: Decider, s: st.LookupObserved) -> None:
    """The connector's answer to a lookup."""
    slot = _waiting(decider, s.request)
    _has_gone_on(decider, slot)
    size = decider.block_tokens_of(s.source)
    local, found = s.computed_tokens // size, (s.tokens or 0) // size
    matched = [0, 0, 0]
    if s.tier is not Tier.G1:
        matched[s.tier - 2] = found
    at = local + found
    first_miss, why = (None, MissReason.WRITING) if s.tokens is None else _missed(decider, slot, at, size)
    if slot.last_answer != (s.tokens, local, first_miss):
        decider.emit(
            ev.LookupAnswered, slot.slot, local, (matched[0], matched[1], matched[2]), first_miss, why, s.tokens,
            s.asynchronous,
        )
    if s.tokens and slot.state is not _S.ONBOARD_STAGED:
        move(decider, slot, _S.ONBOARD_STAGED, detail=s.tokens)
    elif not s.tokens and slot.state is _S.ONBOARD_STAGED:
        move(decider, slot, _S.INITIALIZED)


def _has_gone_on(decider: Decider, slot: SlotFacts) -> None:
    """End a hold for which the engine has not waited: the daemon's answer took longer than a tap gives it."""
    if slot.hold is not None:
        hold = decider.state.holds[slot.hold]
        if hold.parked and hold.point is WaitPoint.LOOKUP:
            cancel_hold(decider, slot, "looked up before its engine heard of the hold")


def _missed(decider: Decider, slot: SlotFacts, at: int, size: int) -> tuple[int | None, MissReason]:
    if not slot.hashes:
        return None, MissReason.TOO_SHORT
    if at >= len(slot.hashes):
        return None, MissReason.NONE
    if at >= (slot.prompt_tokens - 1) // size:
        return at, MissReason.BOUNDARY
    if slot.source in decider.state.lost_sources:
        return at, MissReason.UNKNOWN_AFTER_GAP
    return at, decider.memory.why_gone(slot.hashes[at])


def _waiting(decider: Decider, request: str) -> SlotFacts:
    """The slot of a request that the engine looks up: its preemption is reported at the end of the step only."""
    slot = decider.live(request)
    if slot.state in ENDED:
        raise Refused(f"request {request!r} is {slot.state.label} already")
    if slot.state not in WAITING_STATES:
        close_copies(decider, slot)
        preempt(decider, slot)
    elif slot.end_block:
        decider.release_device_blocks(slot, ReleaseReason.REASSIGNED)
    return slot


# --- allocations ---


def blocks_allocated(decider: Decider, s: st.BlocksAllocated) -> None:
    """All device blocks of the request as of now; at an admission it is scored, and its load begins."""
    slot = decider.live(s.request)
    if slot.state in ENDED:
        raise Refused(f"request {s.request!r} is {slot.state.label} already")
    _has_gone_on(decider, slot)
    pool = decider.device_pool(slot.source)
    ids, passed = unpack_ids(s.block_ids), s.passed_blocks
    if slot.end_block and not _window_moved(decider, slot, ids, passed):
        contradicted(decider, slot.source)
        close_copies(decider, slot)  # its load fills the places that it gives back
        decider.release_device_blocks(slot, ReleaseReason.REASSIGNED)
    known = slot.device_blocks
    if passed + len(ids) == slot.end_block:
        return
    if slot.end_block:
        append(decider, pool, [slot], [len(ids) - len(known)], ids[len(known) :])
        return
    if slot.state not in WAITING_STATES:  # its blocks went to others, and its preemption was not reported
        contradicted(decider, slot.source)
        close_copies(decider, slot)
        preempt(decider, slot)
    size = pool.info.block_tokens
    most = slot.most_tokens(_S.PREFILLING)
    if slot.local_blocks * size + s.external_tokens > most:
        contradicted(decider, slot.source)
    reused = min(slot.local_blocks, passed + len(ids), most // size)
    behind = ids[max(0, len(slot.hashes) - passed) : max(0, reused - passed)]
    if any(place >= len(pool) or pool.content[place] != READY for place in behind):
        reused = min(reused, len(slot.hashes))
    known_hashes = min(reused, len(slot.hashes))
    if (checked := _make_reusable(decider, pool, slot, ids, passed, known_hashes)) < known_hashes:
        reused = checked
    tokens = min(s.external_tokens, (passed + len(ids) - reused) * size, most - reused * size)
    external = tokens // size
    lower = lower_of(decider, slot.source)
    new = ids[max(0, reused - passed) :]
    if lower is None:  # a load that is seen fills its places anew, also a place that held the same content
        there = _told_before(pool, slot, new, max(reused, passed), reused + external)
        new = [place for place in new if place not in there]
    give_up(decider, pool, slot, new)
    beyond = passed - len(slot.hashes)
    decider.emit(
        ev.DeviceBlocksAssigned, pool.info.pool, (slot.slot,), (len(ids),), pack_ids(ids), reused, tokens, passed,
        pack_hashes(unpack_hashes(s.passed_hashes)[-beyond:]) if beyond > 0 else b"",
    )
    hits = [min(reused, slot.prompt_blocks), 0, 0, 0]
    found = _found(external, s.found, size, Tier.G2 if lower is None else lower.info.tier)
    left = slot.prompt_blocks - hits[0]
    for tier, blocks in found:
        hits[tier - 1] += min(blocks, left)
        left -= min(blocks, left)
    decider.score(slot, (hits[0], hits[1], hits[2], hits[3]), slot.hashes[reused : slot.prompt_blocks], pool)
    if s.external_tokens:
        load(decider, pool, lower, slot, reused, found, s)


def _found(external: int, tokens: Sequence[int], size: int, usual: Tier) -> list[tuple[Tier, int]]:
    """The tiers that served the external blocks, with their blocks, in the order of the tiers.

    >>> _found(5, (32, 0, 48), 16, Tier.G2), _found(5, (), 16, Tier.G2)
    ([(<Tier.G2: 2>, 2), (<Tier.G4: 4>, 3)], [(<Tier.G2: 2>, 5)])
    """
    found = [(tier, count // size) for tier, count in zip((Tier.G2, Tier.G3, Tier.G4), tokens, strict=False) if count]
    if sum(blocks for _, blocks in found) != external:
        found = [(usual, external)] if external else []
    return found


def _window_moved(decider: Decider, slot: SlotFacts, ids: list[int], passed: int) -> bool:
    """Release the blocks that the window of the slot has passed. False if its blocks do not begin as they are known."""
    count, known = passed - slot.passed_blocks, slot.device_blocks
    if not 0 <= count <= len(known) or ids[: len(known) - count] != known[count:]:
        return False
    loading = {place for operation in copies_of(decider, slot.request, loads=True) for place in operation.targets}
    if not loading.isdisjoint(known[:count]):
        return False  # it computes nothing before its load has ended
    if count:
        decider.release_passed(slot, count)
    return True


def _told_before(pool: PoolFacts, slot: SlotFacts, places: list[int], first: int, end: int) -> set[int]:
    """Those of a slot's blocks from ``first`` to ``end``, at these places, that the engine's pool has named already."""
    loaded = zip(places, slot.hashes[first:end], strict=False)
    return {place for place, key in loaded if place < len(pool) and pool.hash_of[place] == key}


def _make_reusable(
    decider: Decider, pool: PoolFacts, slot: SlotFacts, ids: list[int], passed: int, reused: int
) -> int:
    """Make the facts agree with the engine: the first ``reused`` blocks hold the request's prefix. Those from block
    ``passed`` on are at the places ``ids``.

    Returns the number of leading blocks that can be reused. A place that was never given out ends them."""
    ids, hashes = ids[: max(0, reused - passed)], slot.hashes[passed:reused]
    wrong = _unlike(pool, ids, hashes)
    if wrong:
        _end_loads_into(decider, pool, wrong)
        fill_for(decider, pool, ids, hashes, passed)
        wrong = _unlike(pool, ids, hashes)
    if not wrong:
        return reused
    contradicted(decider, slot.source)
    fit = next((at for at, place in enumerate(ids) if place >= len(pool)), len(ids))
    wrong = _unlike(pool, ids[:fit], hashes[:fit])
    if wrong:
        give_up(decider, pool, slot, [place for place, _ in wrong])
        places = pack_ids(place for place, _ in wrong)
        decider.emit(ev.BlocksReserved, pool.info.pool, ev.TOLD, places, pack_hashes(key for _, key in wrong))
        decider.emit(ev.BlocksReady, pool.info.pool, ev.TOLD, places)
    return passed + fit if fit < len(ids) else reused


def _unlike(pool: PoolFacts, ids: list[int], hashes: list[int]) -> list[tuple[int, int]]:
    """(place, its hash in the prefix) of the places that hold other content."""
    return [
        (place, key) for place, key in zip(ids, hashes, strict=True)
        if place >= len(pool) or pool.hash_of[place] != key or pool.content[place] != READY
    ]


def _end_loads_into(decider: Decider, pool: PoolFacts, told: list[tuple[int, int]]) -> None:
    """End the loads of these blocks for other requests.

    An engine whose load ends inside the step names the blocks at once, so a request of the same step may reuse them."""
    loaded = {place for place, key in told if place < len(pool) and pool.hash_of[place] == key}
    for operation in list(decider.state.operations.values()):
        if operation.target_pool == pool.info.pool and not loaded.isdisjoint(operation.targets):
            report(decider, operation, failed=False)
            end_operation(decider, operation)


# --- ends ---


def request_preempted(decider: Decider, s: st.RequestPreempted) -> FencedBlocks:
    """The engine took the blocks back."""
    slot = decider.live(s.request)
    if slot.state in ENDED or (slot.state is _S.PREEMPTED and not slot.end_block):
        raise Refused(f"request {s.request!r} is {slot.state.label} already")
    close_copies(decider, slot)
    return preempt(decider, slot)


def request_finished(decider: Decider, s: st.RequestFinished) -> FinishAnswer:
    """The request ended; with ``delayed`` its blocks stay until they are stored."""
    slot = decider.live(s.request)
    if slot.state in ENDED:
        raise Refused(f"request {s.request!r} is {slot.state.label} already")
    if s.delayed:
        store(decider, slot)
        if not slot.outstanding:
            decider.memory.delayed.add(slot.slot)
    _give_up_unnamed(decider, slot, unpack_ids(s.block_ids))
    return _finish(decider, slot, s.reason)


def _give_up_unnamed(decider: Decider, slot: SlotFacts, named: list[int]) -> None:
    """An engine gives loaded blocks their hashes when it takes the request up again.

    If the request ends before that, no lookup finds them: only the blocks ``named`` by the engine are kept.
    """
    if slot.state is not _S.ONBOARDING or slot.device_pool is None or slot.outstanding:
        return
    pool = decider.state.pools[slot.device_pool]
    loaded = set(slot.places(slot.local_blocks, slot.end_block)).difference(named)
    places = sorted(place for place in loaded if pool.content[place] == READY)
    if places:
        hashes = [pool.hash_of[place] for place in places]
        decider.emit(ev.BlocksDropped, pool.info.pool, ev.TOLD, pack_ids(places), ReleaseReason.FINISHED)
        decider.gave_up(pool, places, hashes)


def _finish(decider: Decider, slot: SlotFacts, reason: FinishReason) -> FinishAnswer:
    cancel_hold(decider, slot, "aborted" if reason is FinishReason.ABORTED else "finished")
    if slot.outstanding or slot.slot in decider.memory.delayed:
        move(decider, slot, _S.FINISHING, reason=reason)
        decider.memory.ending.append(slot.slot)
        return FinishAnswer(True)
    decider.release_device_blocks(slot, ReleaseReason.FINISHED)
    finish(decider, slot, reason)
    return FinishAnswer(False)


def _abort(decider: Decider, slot: SlotFacts) -> None:
    """The request is over, and its copies with it: nothing more is heard of them."""
    close_copies(decider, slot)
    decider.memory.delayed.discard(slot.slot)
    if slot.state not in ENDED:
        _finish(decider, slot, FinishReason.ABORTED)
    elif slot.slot in decider.memory.ending:
        decider.memory.ending.remove(slot.slot)
        decider.release_device_blocks(slot, ReleaseReason.FINISHED)
        finish(decider, slot, slot.reason)


def source_restarted(decider: Decider, s: st.SourceRestarted) -> None:
    """The engine began again, or is gone: its requests and copies ended, and the content of its pools is void."""
    cancel_told(decider, s.source)
    for slot in [slot for slot in decider.state.slots.values() if slot.source == s.source]:
        _abort(decider, slot)
    decider.emit(ev.SourceLost, s.source, 0, 0, True, True, s.gone and s.replaceable)
    if not s.gone:
        decider.emit(ev.SourceLost, s.source, 0, 0, True)


# --- places that are told apart from requests: a reset, other groups, the whole pool ---


def places_reported(decider: Decider, pool: PoolFacts, s: st.BlocksReported) -> None:
    """The prefix cache was reset, places were given out, or the content of places is reported."""
    check_report(pool, s)
    places, stored = unpack_ids(s.places), unpack_hashes(s.stored)
    if stored and s.request:
        _published(decider, pool, s.request, places, stored)
    elif stored:
        _know(decider, pool, dict(zip(places, stored, strict=True)), whole=s.cleared)
    elif s.cleared:
        if any(pool.refs) and pool.info.source not in decider.state.lost_sources:
            decider.emit(ev.SourceLost, pool.info.source, 0, 0, False)  # it resets only when no request holds a block
        _forget(decider, pool, [place for place, key in enumerate(pool.hash_of) if key and not pool.refs[place]])
    else:
        given_out(decider, pool, places, s.request)


def _published(decider: Decider, pool: PoolFacts, request: str, places: list[int], hashes: list[int]) -> None:
    """The engine added full blocks of a request to its cache. A place that the cache has already replaces the copy
    that the request computed itself."""
    slot = decider.state.slot_named(request)
    first = 0 if slot is None else slot.filled_blocks
    own = [] if slot is None else slot.places(first, first + len(places))
    if slot is None or len(own) != len(places):
        contradicted(decider, pool.info.source)
        return
    for replaced, run in groupby(range(len(places)), lambda at: own[at] != places[at]):
        part = list(run)
        ids, keys = places[part[0] : part[-1] + 1], hashes[part[0] : part[-1] + 1]
        if not replaced and fills(pool, slot, ids, keys):
            _fill(decider, pool, [slot], [len(ids)], ids, keys)
        elif replaced and slot.filled_blocks == first + part[0] and _holds(pool, slot, ids, keys):
            given_back = own[part[0] : part[-1] + 1]
            decider.emit(ev.DeviceBlocksReplaced, slot.slot, slot.filled_blocks, pack_ids(ids))
            decider.live_memory.taken(pool, ids)
            decider.live_memory.let_go(pool, given_back)
        else:
            contradicted(decider, pool.info.source)
            return


def _holds(pool: PoolFacts, slot: SlotFacts, ids: list[int], hashes: list[int]) -> bool:
    """True if these places hold these blocks, which are the slot's next ones, and the slot has none of the places."""
    known = slot.hashes[slot.filled_blocks : slot.filled_blocks + len(ids)]
    fits = slot.filled_blocks <= len(slot.hashes) and len(set(ids)) == len(ids)
    return fits and hashes[: len(known)] == known and set(ids).isdisjoint(slot.device_blocks) and all(
        place < len(pool) and pool.hash_of[place] == key and pool.content[place] == READY
        for place, key in zip(ids, hashes, strict=True)
    )


def given_out(decider: Decider, pool: PoolFacts, places: list[int], request: str) -> None:
    """Places were given out for another group, or without a report of the request."""
    slot = decider.state.slot_named(request)
    evicted = [
        place for place in dict.fromkeys(places)
        if place < len(pool) and pool.content[place] == READY and not pool.refs[place]
    ]
    if evicted:
        decider.evict(pool, evicted, None if slot is None else slot.slot, EvictRule.REASSIGNED)


def _know(decider: Decider, pool: PoolFacts, told: dict[int, int], *, whole: bool) -> None:
    if whole:
        _forget(decider, pool, [
            place for place, key in enumerate(pool.hash_of)
            if key and not pool.refs[place] and told.get(place) != key
        ])
    known = len(pool)
    new = {
        place: key for place, key in told.items()
        if place >= known or not (pool.content[place] or pool.refs[place])
    }
    if new:
        places, hashes = pack_ids(new), pack_hashes(new.values())
        decider.emit(ev.BlocksReserved, pool.info.pool, ev.TOLD, places, hashes)
        decider.emit(ev.BlocksReady, pool.info.pool, ev.TOLD, places)


def _forget(decider: Decider, pool: PoolFacts, places: list[int]) -> None:
    if places:
        hashes = [pool.hash_of[place] for place in places]
        decider.emit(ev.BlocksDropped, pool.info.pool, ev.TOLD, pack_ids(places), ReleaseReason.RESET)
        decider.gave_up(pool, places, hashes)


# --- audits: the engine's own pool beside the facts ---


def places_audited(decider: Decider, s: st.PlacesAudited) -> AuditAnswer:
    """Compare a part of the engine's pool with the facts. A difference is an event, and marks the source as lossy."""
    if not 0 <= s.pool < len(decider.state.pools) or decider.state.pools[s.pool].info.source != s.source:
        raise Refused(f"pool {s.pool} is not one of source {s.source}")
    pool = decider.state.pools[s.pool]
    hashes, holders = unpack_hashes(s.hashes), unpack_ids(s.references)
    if pool.info.authority is not Authority.OBSERVED:
        wrong = [(0, key) for key in hashes if key not in pool.by_hash]
        details = [f"hash {key:x} of group {pool.info.group} is not known here" for _, key in wrong]
        ids = b""
    else:
        if len(holders) != len(hashes) or not 0 <= s.first <= pool.places_max - len(hashes):
            raise Refused(f"{len(hashes)} hashes do not fit {len(holders)} holders from place {s.first} on")
        loading = _loading(decider, pool)
        found = list(_differing(decider, pool, loading, s, hashes, holders))
        wrong = [(place, hashes[place - s.first]) for place, _ in found]
        details, ids = [detail for _, detail in found], pack_ids(place for place, _ in wrong)
        if (free := _free_places(pool)) is not None and s.free not in (None, free):
            details.append(f"{s.free} places are free in the engine, {free} here")
        if not loading and s.cached not in (None, cached := _cached(decider, pool)):
            details.append(f"{s.cached} hashes are cached in the engine, {cached} here")
    if details:
        decider.emit(ev.AuditDiffered, s.pool, ids, pack_hashes(key for _, key in wrong), details[0])
        contradicted(decider, s.source)
    return AuditAnswer(len(details))


def _loading(decider: Decider, pool: PoolFacts) -> set[int]:
    """Places of running loads. The engine names a loaded block when its request goes on, the facts when it begins."""
    state = decider.state
    slots = (slot for slot in state.slots.values() if slot.device_pool == pool.info.pool)
    loading = {place for slot in slots if slot.state is _S.ONBOARDING for place in slot.device_blocks}
    return loading.union(*(copy.targets for copy in state.operations.values() if copy.target_pool == pool.info.pool))


def _differing(
    decider: Decider, pool: PoolFacts, loading: set[int], s: st.PlacesAudited, hashes: list[int], holders: list[int]
) -> Iterator[tuple[int, str]]:
    """(place, sentence) of each place that differs. Without ``free`` others may hold places, too."""
    mine = [slot for slot in decider.state.slots.values() if slot.device_pool == pool.info.pool]
    known = len(pool)
    for place, (theirs, held) in enumerate(zip(hashes, holders, strict=True), s.first):
        ours, refs = (pool.hash_of[place], pool.refs[place]) if place < known else (EMPTY_HASH, 0)
        if ours != theirs and (theirs or place not in loading):
            yield place, f"place {place} holds {theirs:x} in the engine, {ours:x} here"
        elif refs != held:
            refs = sum(place in slot.device_blocks for slot in mine)  # a copy is no holder in the engine
            if refs > held or (s.free is not None and refs != held):
                yield place, f"place {place} has {held} holders in the engine, {refs} here"


def _cached(decider: Decider, pool: PoolFacts) -> int:
    """Hashes on the device in all groups of this engine."""
    return sum(
        len(other.by_hash) for other in decider.state.pools
        if other.info.tier is pool.info.tier and other.info.source == pool.info.source
    )


def _free_places(pool: PoolFacts) -> int | None:
    """Places that no request holds; None without a capacity."""
    if pool.info.capacity_blocks is None:
        return None
    free = pool.counts[Condition.EMPTY] + pool.counts[Condition.CACHED]
    # A tap before protocol 1.12 declares vLLM's null block as a place.
    return free if pool.info.first_place else free - 1


# --- copies ---


def lower_of(decider: Decider, source: int) -> PoolFacts | None:
    """The pool in which this engine's connector keeps blocks."""
    for pool in decider.state.pools:
        if pool.info.source == source and pool.info.authority is Authority.STREAM and pool.info.tier is not Tier.G1:
            return pool
    return None


def load(
    decider: Decider, pool: PoolFacts, lower: PoolFacts | None, slot: SlotFacts, reused: int,
    found: list[tuple[Tier, int]], s: st.BlocksAllocated,
) -> None:
    """The engine loads the blocks that were ``found``: a copy that runs until the connector says that it ended."""
    tokens, external = s.external_tokens, sum(blocks for _, blocks in found)
    if slot.state is not SlotState.ONBOARD_STAGED:
        move(decider, slot, SlotState.ONBOARD_STAGED, detail=tokens)
    hashes, told = slot.hashes[reused : reused + external], unpack_hashes(s.hashes)
    if len(told) == external > len(hashes) and told[: len(hashes)] == hashes:
        hashes = told
    first = max(reused, slot.passed_blocks)  # what lies before the window is found and not loaded
    end = reused + len(hashes)
    hashes, targets = hashes[first - reused :], slot.places(first, end)
    if lower is None or not hashes:
        move(decider, slot, SlotState.ONBOARDING, detail=tokens)
        return
    # A connector tells how many blocks came from a tier and not which, so the tiers stand in their order.
    at, parts = reused, []
    for tier, blocks in found:
        count = min(blocks, end - at)
        parts.append(LoadPart(decider.state.next_candidate, int(tier), at, count))
        at += count
    decider.memory.loads[slot.slot] = parts
    number = _plan(decider, slot, Route.of(lower.info.tier, pool.info.tier), hashes, targets, first)
    move(decider, slot, SlotState.ONBOARDING, detail=tokens)
    operation = decider.state.next_operation
    decider.emit(ev.BlocksReserved, pool.info.pool, operation, pack_ids(targets), pack_hashes(hashes))
    _promote(decider, number, lower, pool, [], targets, started=not s.awaits_start)


def _plan(
    decider: Decider, slot: SlotFacts, route: Route, hashes: list[int], targets: list[int], first: int
) -> int:
    number = decider.state.next_candidate
    decider.emit(
        ev.CandidatePlanned, number, slot.slot, route, pack_hashes(hashes), pack_ids(targets if route.is_load else []),
        first,
    )
    return number


def _promote(
    decider: Decider, number: int, source: PoolFacts, target: PoolFacts, sources: list[int], targets: list[int], *,
    started: bool = True,
) -> None:
    """The engine copies already, or its connector tells that later. Places of a pool that is known by hash alone are
    not named."""
    operation, candidate = decider.state.next_operation, decider.state.candidates[number]
    decider.emit(ev.CandidateEnqueued, number)
    decider.emit(ev.CandidateEvaluated, number, len(sources) or len(targets), None)
    decider.emit(
        ev.CandidatePromoted, number, operation, number, source.info.pool, target.info.pool, pack_ids(sources),
        pack_ids(targets), 0,
        decider.returned(candidate.hashes, source, target) if candidate.route.is_load else ev.NOTHING_RETURNED,
    )
    decider.memory.batch_of[number] = number
    if started:
        decider.emit(ev.OperationStarted, operation)


# --- copies that ended ---


def copies_observed(decider: Decider, s: st.CopiesObserved) -> None:
    """Loads and stores of these requests ended."""
    lost = set(unpack_ids(s.failed_ids))
    for request in s.loaded:
        slot = decider.state.slot_named(request)
        for operation in copies_of(decider, request, loads=True):
            failed = [at for at, place in enumerate(operation.targets) if place in lost]
            report(decider, operation, failed=request in s.failed or bool(failed), places=failed)
            if slot is not None and slot.state is SlotState.FINISHING:
                discard(decider, operation)
    for request in s.sent:
        slot = decider.state.slot_named(request)
        if slot is not None:
            decider.memory.delayed.discard(slot.slot)
        for operation in copies_of(decider, request, loads=False):
            report(decider, operation, failed=False)


def copies_of(decider: Decider, request: str, *, loads: bool | None) -> list[OperationFacts]:
    slot = decider.state.slot_named(request)
    if slot is None:
        return []
    found = [decider.state.candidates[number] for number in sorted(slot.outstanding)]
    return [
        decider.state.operations[candidate.operation] for candidate in found
        if candidate.operation is not None and (loads is None or candidate.route.is_load is loads)
    ]


def report(decider: Decider, operation: OperationFacts, *, failed: bool, places: Sequence[int] = ()) -> None:
    error = "the connector could not load it" if failed else ""
    decider.emit(ev.OperationReported, operation.operation, 0, not failed, error, pack_ids(places))
    if operation.operation not in decider.memory.complete:
        decider.memory.complete.append(operation.operation)


def discard(decider: Decider, operation: OperationFacts) -> None:
    """A load ended after its request: the engine never names the loaded blocks."""
    decider.memory.complete.remove(operation.operation)
    drop(decider, decider.state.pools[operation.target_pool], operation, operation.targets)
    end_candidate(decider, operation, CandidateStatus.FAILED if operation.failed else CandidateStatus.COMPLETED)


def close_copies(decider: Decider, slot: SlotFacts) -> None:
    """Copies whose end was not seen: the engine does not wait for them any more."""
    for operation in copies_of(decider, slot.request, loads=None):
        target = decider.state.pools[operation.target_pool]
        if operation.operation in decider.memory.complete:
            decider.memory.complete.remove(operation.operation)
        if operation.targets:
            drop(decider, target, operation, operation.targets)
        decider.memory.loads.pop(slot.slot, None)
        end_candidate(decider, operation, CandidateStatus.CANCELLED)


def end_load(decider: Decider, slot: SlotFacts) -> None:
    """A slot that computes waits for no load: a load inside the step ends with it."""
    for operation in copies_of(decider, slot.request, loads=True):
        report(decider, operation, failed=False)
        end_operation(decider, operation)


def store(decider: Decider, slot: SlotFacts) -> None:
    lower = lower_of(decider, slot.source)
    if slot.device_pool is None or lower is None or slot.outstanding:
        return
    pool = decider.state.pools[slot.device_pool]
    places = [place for place in slot.places(0, slot.filled_blocks) if pool.content[place] == READY]
    if places:
        hashes = [pool.hash_of[place] for place in places]
        number = _plan(decider, slot, Route.of(pool.info.tier, lower.info.tier), hashes, [], 0)
        _promote(decider, number, pool, lower, places, [])


# --- steps, and the device blocks that go from one request to another in them ---


def contradicted(decider: Decider, source: int) -> None:
    """A report does not fit our state, so reports were lost on the way."""
    if source not in decider.state.lost_sources:
        decider.emit(ev.SourceLost, source, 0, 0, False)


def give_up(decider: Decider, pool: PoolFacts, slot: SlotFacts, ids: Sequence[int]) -> None:
    """These places are the slot's now. Other slots that still list them have lost them, and their content is evicted
    for this slot."""
    known = len(pool)
    held = {place for place in ids if place < known and pool.refs[place]}
    if held:
        for operation in list(decider.state.operations.values()):
            if operation.source_pool == pool.info.pool and not held.isdisjoint(operation.sources):
                report(decider, operation, failed=False)
                end_operation(decider, operation)
        for other in decider.state.slots.values():
            if other.device_pool == pool.info.pool and not held.isdisjoint(other.device_blocks):
                close_copies(decider, other)
                decider.release_device_blocks(other, ReleaseReason.REASSIGNED)
    lost = [place for place in ids if place < known and pool.hash_of[place] != EMPTY_HASH]
    if lost:
        decider.evict(pool, lost, slot.slot, EvictRule.REASSIGNED)


def append(
    decider: Decider, pool: PoolFacts, slots: list[SlotFacts], counts: list[int], ids: list[int]
) -> None:
    at = 0
    for slot, count in zip(slots, counts, strict=True):
        give_up(decider, pool, slot, ids[at : at + count])
        at += count
    decider.emit(
        ev.DeviceBlocksAssigned, pool.info.pool, tuple(slot.slot for slot in slots), tuple(counts), pack_ids(ids), 0, 0
    )


def iteration_scheduled(decider: Decider, s: st.IterationScheduled) -> IterationMetadata:
    """The engine formed a step. Its own number is not used, because all engines share one row of iterations."""
    state = decider.state
    for request in s.preempted:
        slot = state.slot_named(request)
        if slot is not None and slot.state not in ENDED and (slot.state is not _S.PREEMPTED or slot.end_block):
            close_copies(decider, slot)
            preempt(decider, slot)
    first = state.iteration + 1
    for request in (*s.new, *s.resumed):
        slot = state.slot_named(request)
        if slot is not None and slot.state in _BEGINS and slot.device_blocks:
            end_load(decider, slot)
            move(decider, slot, _S.PREFILLING, iteration=first)
    _move_all(decider, s.unskipped, _BACK_OF, first)
    _move_all(decider, s.first_tokens, {_S.PREFILLING: _S.DECODING}, first)
    _move_all(decider, s.skipped, _SKIPPED_OF, first)
    _append_all(decider, s)
    _advance(decider, s)
    return IterationMetadata(state.iteration, ())


def _move_all(decider: Decider, requests: Sequence[str], moves: dict[SlotState, SlotState], iteration: int) -> None:
    for request in requests:
        slot = decider.state.slot_named(request)
        if slot is not None and slot.state in moves:
            move(decider, slot, moves[slot.state], iteration=iteration)


def _append_all(decider: Decider, s: st.IterationScheduled) -> None:
    ids = unpack_ids(s.appended_ids)
    slots: list[SlotFacts] = []
    counts: list[int] = []
    taken: list[int] = []
    at = 0
    for request, count in zip(s.appended, s.appended_counts, strict=True):
        part = ids[at : at + count]
        at += count
        slot = decider.state.slot_named(request)
        if slot is None or slot.state in ENDED or not set(part).isdisjoint([*slot.device_blocks, *taken]):
            contradicted(decider, s.source)
            continue
        slots.append(slot)
        counts.append(count)
        taken += part
    if slots:
        append(decider, decider.device_pool(s.source), slots, counts, taken)


def _advance(decider: Decider, s: st.IterationScheduled) -> None:
    """Emit the reported positions, and those of slots that other engines' iterations would advance."""
    state = decider.state
    reported = dict(zip(s.progressed, s.positions, strict=True))
    last = state.iteration + s.count
    slots: list[int] = []
    positions: list[int] = []
    for slot in state.slots.values():
        position = reported.get(slot.request)
        if position is None:
            if slot.state is not _S.DECODING:
                continue
            position = slot.computed_tokens(state.iteration) + (s.count if slot.source == s.source else 0)
        room = slot.end_block * decider.block_tokens_of(slot.source)
        most = slot.token_limit if slot.state in _DECODES else slot.most_tokens(_S.PREFILLING)
        position = min(position, room, most)  # after lost reports the blocks are not all known
        expected = slot.anchor_tokens
        if slot.state is _S.DECODING:
            expected += last - slot.anchor_iteration
        if position != expected:
            slots.append(slot.slot)
            positions.append(position)
    decider.emit(
        ev.IterationAdvanced, last, s.count, s.running, s.waiting, tuple(slots), tuple(positions), s.ended
    )


def iteration_finished(decider: Decider, s: st.IterationFinished) -> None:
    """Blocks are full and carry the engine's own hashes."""
    ids, hashes = unpack_ids(s.block_ids), unpack_hashes(s.hashes)
    pool = decider.device_pool(s.source)
    slots: list[SlotFacts] = []
    counts: list[int] = []
    filled: list[int] = []
    at = 0
    for request, count in zip(s.requests, s.counts, strict=True):
        part = range(at, at + count)
        at += count
        slot = decider.state.slot_named(request)
        if slot is not None:
            part = part[_filled_before(pool, slot, ids[part.start : part.stop], hashes[part.start : part.stop]) :]
            if count and not part:
                continue
        if slot is not None and fills(pool, slot, [ids[i] for i in part], [hashes[i] for i in part]):
            slots.append(slot)
            counts.append(len(part))
            filled += part
        else:
            contradicted(decider, s.source)
    if filled:
        _fill(decider, pool, slots, counts, [ids[i] for i in filled], [hashes[i] for i in filled])
    _drop_unkept(decider, pool, unpack_ids(s.unkept))


def _drop_unkept(decider: Decider, pool: PoolFacts, places: list[int]) -> None:
    """The requests that hold these places go on with them, and no lookup finds them."""
    full = [place for place in places if place < len(pool) and pool.content[place] == READY]
    known = [place for place in full if pool.refs[place] <= 1]
    if known != full:  # requests share only blocks that a lookup found or that were cloned
        contradicted(decider, pool.info.source)
    if known:
        hashes = [pool.hash_of[place] for place in known]
        decider.emit(ev.BlocksDropped, pool.info.pool, ev.TOLD, pack_ids(known), ReleaseReason.NOT_KEPT)
        decider.gave_up(pool, known, hashes)


def fill_for(decider: Decider, pool: PoolFacts, ids: list[int], hashes: list[int], passed: int) -> None:
    """These blocks, from block ``passed`` of a prefix on, are used again with these hashes, so the slots that fill them
    were scheduled to. No prompt tells the hash of a block of an answer, so it comes from the prefix that shares the
    block."""
    for slot, first, end in being_filled(decider, pool, ids, hashes, passed):
        _fill(decider, pool, [slot], [end - first], slot.places(first, end), slot.hashes[first:end])
    for at, place in enumerate(ids):
        if place >= len(pool) or pool.hash_of[place]:
            continue
        for slot in decider.state.slots.values():
            if (
                slot.device_pool == pool.info.pool and slot.places(passed + at, passed + at + 1) == [place]
                and slot.filled_blocks == len(slot.hashes) == passed + at and slot.hashes[passed:] == hashes[:at]
            ):
                _fill(decider, pool, [slot], [1], [place], [hashes[at]])
                break


def _fill(
    decider: Decider, pool: PoolFacts, slots: list[SlotFacts], counts: list[int], ids: list[int], keys: list[int]
) -> None:
    decider.emit(
        ev.BlocksFilled, pool.info.pool, tuple(slot.slot for slot in slots), tuple(counts), pack_ids(ids),
        pack_hashes(keys),
    )
    for slot, count in zip(slots, counts, strict=True):
        link_chain(decider, slot, slot.filled_blocks - count, slot.filled_blocks)


def _filled_before(pool: PoolFacts, slot: SlotFacts, ids: list[int], hashes: list[int]) -> int:
    """How many of these, at their beginning, are known to be full: ``fill_for`` has told them."""
    last = slot.places(0, slot.filled_blocks)
    if not ids or ids[0] not in last:
        return 0
    known = last[last.index(ids[0]) :][: len(ids)]
    all_match = ids[: len(known)] == known and all(
        pool.hash_of[place] == key for place, key in zip(known, hashes, strict=False)
    )
    return len(known) if all_match else 0


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
    st.PlacesAudited: places_audited,
    st.SourceRestarted: source_restarted,
}
"""Stimulus type to its handler for an engine that is only watched; the others are as for every source."""
