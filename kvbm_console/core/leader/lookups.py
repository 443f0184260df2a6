"""Requests from arrival to admission: create, look up, stage, allocate.

Law of this file: lookup and allocation are two commits. A lookup holds the blocks that it found in staging. The engine
never reports an allocation that it refuses, so staging ends by allocation, abort, preemption or its deadline.
"""

from collections import Counter
from collections.abc import Sequence

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import gather, unpack_hashes, unpack_ids
from kvbm_console.core.config import REQUEST_ID_BYTES_MAX
from kvbm_console.core.errors import Refused
from kvbm_console.core.eviction.request_lru import RequestLru
from kvbm_console.core.ids import (
    EMPTY_HASH,
    Condition,
    EvictRule,
    MissReason,
    ReleaseReason,
    Route,
    Site,
    SlotState,
    WaitPoint,
)
from kvbm_console.core.instructions import FencedBlocks, MatchAnswer
from kvbm_console.core.leader import prefetch
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.filling import being_filled, copied_blocks, fill_spans
from kvbm_console.core.leader.holds import felt_pressure, held_at, strike
from kvbm_console.core.leader.memory import LoadPart
from kvbm_console.core.leader.pipeline import enqueue, fence, flush_copies
from kvbm_console.core.leader.slots import move
from kvbm_console.core.slots import WAITING_STATES, SlotFacts
from kvbm_console.core.tiers import READY, WRITING, PoolFacts


def check_arrival(decider: Decider, s: st.RequestArrived) -> list[int]:
    """The hashes of the prompt; refuses a request that cannot be opened for its own fields."""
    size = len(s.request.encode())
    if not 1 <= size <= REQUEST_ID_BYTES_MAX:
        raise Refused(f"request must be 1 to {REQUEST_ID_BYTES_MAX} bytes, got {size}")
    if decider.state.draining:
        raise Refused("the leader drains and takes no new request")
    if s.prompt_tokens < 1:
        raise Refused(f"prompt_tokens must be at least 1, got {s.prompt_tokens}")
    if s.output_limit < 0:
        raise Refused(f"output_limit must be at least 0, got {s.output_limit}")
    hashes = unpack_hashes(s.hashes)
    size = decider.block_tokens_of(s.source)
    if len(hashes) > s.prompt_tokens // size or EMPTY_HASH in hashes:
        raise Refused(f"{len(hashes)} hashes do not fit {s.prompt_tokens} prompt tokens")
    if len(set(hashes)) < len(hashes):  # the hash of a block is that of its whole prefix
        twice = next(key for key, count in Counter(hashes).items() if count > 1)
        raise Refused(f"hashes of request {s.request!r} must differ, got {twice:016x} twice")
    return hashes


def request_arrived(decider: Decider, s: st.RequestArrived) -> None:
    """``create_slot``."""
    if s.request in decider.state.slot_of:
        raise Refused(f"request {s.request!r} exists already")
    hashes = check_arrival(decider, s)
    open_slot(
        decider, s.request, s.source, hashes, s.prompt_tokens, s.output_limit, s.priority, s.session, s.sends,
        s.receives,
    )


def open_slot(
    decider: Decider, request: str, source: int, hashes: list[int], prompt_tokens: int, output_limit: int,
    priority: int, session: str | None, sends: str | None = None, receives: str | None = None,
) -> None:
    """As ``request_arrived``, for a request that was checked."""
    number = decider.state.next_slot
    decider.emit(
        ev.SlotOpened, number, request, source, decider.hashes(hashes), prompt_tokens, output_limit, priority, session,
        sends, receives,
    )
    slot = decider.state.slots[number]
    strike(decider, Site.TRANSITION_DID, slot, slot.state, slot.state)
    if decider.memory.parentless:
        decider.live_memory.show_chain(hashes)
    if decider.config.eviction.disk_admission > 1:
        decider.memory.name(hashes)
    prefetch.arrived(decider, slot)


def match_requested(decider: Decider, s: st.MatchRequested) -> MatchAnswer:
    """``get_num_new_matched_tokens``: continue the engine's prefix below G1 and hold the blocks found."""
    slot = decider.live(s.request)
    size = decider.config.block_tokens
    local = s.computed_tokens // size
    if slot.state not in WAITING_STATES or slot.end_block:
        raise Refused(f"request {s.request!r} is {slot.state.label} and cannot be looked up")
    if s.computed_tokens % size or not 0 <= local <= len(slot.hashes):
        raise Refused(f"computed_tokens {s.computed_tokens} is not a prefix of whole blocks of {s.request!r}")
    return match(decider, slot, local)


def match(decider: Decider, slot: SlotFacts, local: int) -> MatchAnswer:
    """As ``match_requested``, for a checked prefix of ``local`` blocks."""
    size, asynchronous = decider.config.block_tokens, decider.config.asynchronous
    if held_at(decider, slot, WaitPoint.LOOKUP):
        return MatchAnswer(None, asynchronous)
    if slot.last_answer is not None and slot.last_answer[0] is not None:
        felt_pressure(decider, slot)  # it was answered before, and the engine had no room for it
    if slot.outstanding:
        _answer(decider, slot, local, (0, 0, 0), None, MissReason.WRITING, None)
        return MatchAnswer(None, asynchronous)
    if slot.staged:
        if local == slot.local_blocks:
            return MatchAnswer(_found_blocks(decider, slot) * size, asynchronous)
        decider.release_staging(slot, ReleaseReason.UNUSED)
    if prefetch.must_wait(decider, slot):
        _answer(decider, slot, local, (0, 0, 0), None, MissReason.WRITING, None)
        return MatchAnswer(None, asynchronous)
    found, skipped, first_miss, why = _match(decider, slot, local)
    if found and decider.config.eviction.by_request and _being_loaded(decider, found):
        why, first_miss = MissReason.WRITING, local
    if why is MissReason.WRITING and not _stands_still(decider, slot.hashes[first_miss or 0]):
        _answer(decider, slot, local, (0, 0, 0), first_miss, why, None)
        return MatchAnswer(None, asynchronous)
    matched = [0, 0, 0]
    for pool, places in found:
        matched[pool.info.tier - 2] += len(places)
    if found:
        matched[found[0][0].info.tier - 2] += skipped
    tokens = sum(matched) * size
    _answer(decider, slot, local, (matched[0], matched[1], matched[2]), first_miss, why, tokens)
    if not tokens and slot.state is SlotState.ONBOARD_STAGED:
        move(decider, slot, SlotState.INITIALIZED)
    if tokens:
        _stage(decider, slot, local + skipped, found, tokens)
        if held_at(decider, slot, WaitPoint.LOOKUP):
            return MatchAnswer(None, asynchronous)
    return MatchAnswer(tokens, asynchronous and tokens > 0)


def _match(
    decider: Decider, slot: SlotFacts, local: int
) -> tuple[list[tuple[PoolFacts, list[int]]], int, int | None, MissReason]:
    """Places below G1 that continue the prefix, how many blocks before them need none, the first prompt block found
    nowhere, and why it was not."""
    total = slot.sequence_tokens(decider.state.iteration, decider.config.block_tokens)
    # At least one token must be left to compute, so a full match gives back its last block.
    limit = min(len(slot.hashes), (total - 1) // decider.config.block_tokens)
    if decider.config.lookup_window:
        return _match_window(decider, slot, local, limit)
    at = local
    found: list[tuple[PoolFacts, list[int]]] = []
    why = MissReason.NONE
    for pool in decider.lower_pools():
        room = int(decider.config.staging_share * len(pool)) - decider.memory.pools[pool.info.pool].staged_blocks
        wanted = min(limit, at + max(0, room))
        places = pool.ready_prefix(slot.hashes[at:wanted])
        at += len(places)
        if at < wanted and slot.hashes[at] in pool.by_hash and not prefetch.on_its_way(decider, pool, slot.hashes[at]):
            why = MissReason.WRITING
        if places:
            found.append((pool, places))
        if why is MissReason.WRITING:
            return found, 0, at, why
    return found, 0, *_first_miss(decider, slot, at, limit)


def _match_window(
    decider: Decider, slot: SlotFacts, local: int, limit: int
) -> tuple[list[tuple[PoolFacts, list[int]]], int, int | None, MissReason]:
    """As ``_match``, where the blocks of a window at the end of a prefix are enough. The longest such prefix is found.
    Without one, the blocks that follow the engine's own."""
    needed, pools = -(-decider.config.lookup_window // decider.config.block_tokens), decider.lower_pools()
    run: list[tuple[PoolFacts, int]] = []
    first = limit
    writing: int | None = None
    while first > local and len(run) < needed:
        first -= 1
        key = slot.hashes[first]
        here = next(((pool, place) for pool in pools if (place := pool.ready_place(key)) is not None), None)
        if here is None and any(key in pool.by_hash for pool in pools):
            writing = first
            here = pools[0], -1
        if here is None:
            run, writing = [], None
        else:
            run.append(here)
    if writing is not None:
        return [], 0, writing, MissReason.WRITING
    found: list[tuple[PoolFacts, list[int]]] = []
    for pool, place in reversed(run):
        if found and found[-1][0] is pool:
            found[-1][1].append(place)
        else:
            found.append((pool, [place]))
    skipped = first - local if run else 0
    return found, skipped, *_first_miss(decider, slot, local + skipped + len(run), limit)


def _first_miss(decider: Decider, slot: SlotFacts, at: int, limit: int) -> tuple[int | None, MissReason]:
    """The prompt block ``at`` that was not found, and why it was not."""
    if not slot.hashes:
        return None, MissReason.TOO_SHORT
    if at >= len(slot.hashes):
        return None, MissReason.NONE
    if at >= limit:
        return at, MissReason.BOUNDARY
    if any(pool.ready_place(slot.hashes[at]) is not None for pool in decider.lower_pools()):
        return at, MissReason.FILTERED  # it is there, but staging may hold no more of its pool
    return at, decider.memory.why_gone(slot.hashes[at])


def _being_loaded(decider: Decider, found: list[tuple[PoolFacts, list[int]]]) -> bool:
    """True if a load of another request reads one of these places: vLLM lets it bring the block to the device."""
    loads = [
        operation for operation in decider.state.operations.values()
        if decider.state.candidates[operation.candidate].route.is_load
    ]
    return any(
        operation.source_pool == pool.info.pool and not set(places).isdisjoint(operation.sources)
        for pool, places in found for operation in loads
    )


def _stands_still(decider: Decider, key: int) -> bool:
    """True if this block is being written for a held slot. No other slot waits for that (I12)."""
    for operation in decider.state.operations.values() if decider.state.holds else ():
        number = decider.state.candidates[operation.candidate].slot
        if number is None or decider.state.slots[number].hold is None:
            continue
        hashes = decider.state.pools[operation.target_pool].hash_of
        if any(hashes[place] == key for place in operation.targets):
            return True
    return False


def _answer(
    decider: Decider, slot: SlotFacts, local: int, matched: tuple[int, int, int], first_miss: int | None,
    why: MissReason, answer: int | None,
) -> None:
    """Report the answer if it differs from the last answer: engines that poll ask at every step."""
    if slot.last_answer != (answer, local, first_miss):
        decider.emit(
            ev.LookupAnswered, slot.slot, local, matched, first_miss, why, answer,
            decider.config.asynchronous and bool(answer),
        )


def _stage(
    decider: Decider, slot: SlotFacts, at: int, found: list[tuple[PoolFacts, list[int]]], tokens: int
) -> None:
    """Hold the blocks found from block ``at`` on."""
    for pool, places in found:
        used = slot.hashes[at : at + len(places)]
        at += len(places)
        decider.emit(
            ev.BlocksStaged, slot.slot, pool.info.pool, decider.ids(places), prefetch.found(decider, pool, used)
        )
        mine = decider.memory.pools[pool.info.pool]
        mine.staged_blocks += len(places)
        # A used block may be copied down again, if it was used too rarely before or its copies were given up.
        anew = decider.config.eviction.disk_admission > 1 or not mine.again.keys().isdisjoint(places)
        decider.live_memory.taken(pool, places)
        if anew:
            _offer_again(decider, pool, places)
    decider.set_staging_deadline(slot)
    if slot.state is not SlotState.ONBOARD_STAGED:
        move(decider, slot, SlotState.ONBOARD_STAGED, detail=tokens)


def _offer_again(decider: Decider, pool: PoolFacts, places: list[int]) -> None:
    """Those of these blocks that have no copy below, and none planned, may be copied down."""
    lower = decider.below(pool)
    if lower is not None:
        planned = decider.memory.pools[pool.info.pool].planned
        decider.unsaved(
            pool, [place for place in places if pool.hash_of[place] not in lower.by_hash and place not in planned]
        )


def _staged_blocks(slot: SlotFacts) -> int:
    return sum(len(places) for _, places in slot.staged)


def _found_blocks(decider: Decider, slot: SlotFacts) -> int:
    """Blocks that the last lookup found behind the engine's own: those staged, and those before the window."""
    if decider.config.lookup_window and slot.staged and slot.last_answer is not None:
        return (slot.last_answer[0] or 0) // decider.config.block_tokens
    return _staged_blocks(slot)


def blocks_allocated(decider: Decider, s: st.BlocksAllocated) -> FencedBlocks | None:
    """``update_state_after_alloc``: append device blocks, and at an admission score it and start the load.

    ``passed_blocks`` are the leading blocks that lie before the attention window as of now. Those that the request held
    are released before the ids are appended. The result then names the places that a running copy still uses.
    """
    slot = decider.live(s.request)
    if slot.state in (SlotState.FINISHING, SlotState.FINISHED):
        raise Refused(f"request {s.request!r} is {slot.state.label} and takes no blocks")
    pool = decider.device_pool(slot.source)
    ids = unpack_ids(s.block_ids)
    size = decider.config.block_tokens
    first = not slot.end_block
    external = s.external_tokens // size
    if s.external_tokens % size or not 0 <= external <= _found_blocks(decider, slot) or (external and not first):
        raise Refused(f"external_tokens {s.external_tokens} was not found for {s.request!r}")
    if slot.outstanding and first:
        raise Refused(f"request {s.request!r} still has copies running and cannot be admitted")
    _check_window(decider, slot, s.passed_blocks, external)
    held = max(0, slot.local_blocks - s.passed_blocks) if first else 0
    filling = being_filled(decider, pool, ids[:held], slot.hashes[s.passed_blocks :], s.passed_blocks)
    check_device_ids(decider, pool, slot, ids, held, s.passed_blocks, filling)
    if first and slot.local_blocks + external > s.passed_blocks + len(ids):
        raise Refused(f"{len(ids)} blocks do not hold {slot.local_blocks} reused and {external} external blocks")
    if first:
        fill_spans(decider, pool, filling)
        admit(decider, pool, slot, ids, slot.local_blocks, s.external_tokens, s.passed_blocks)
        return None
    fenced = pass_window(decider, slot, s.passed_blocks)
    if ids or fenced is None:
        assign(decider, pool, [slot], [len(ids)], ids, 0, 0)
    return fenced


def _check_window(decider: Decider, slot: SlotFacts, passed: int, external: int) -> None:
    """Refuse a window that goes back, passes blocks that are not full, or moves while a load or a hold runs."""
    if not slot.end_block:
        if not 0 <= passed <= slot.local_blocks + max(0, external - 1):  # of a load a block is left
            raise Refused(f"{passed} blocks before the window of {slot.request!r} were not found")
        return
    if passed == slot.passed_blocks:
        return
    if not slot.passed_blocks <= passed <= min(slot.filled_blocks, slot.end_block):
        raise Refused(
            f"the window of {slot.request!r} cannot pass {passed} blocks: {slot.passed_blocks} are passed and "
            f"{slot.filled_blocks} are full"
        )
    if slot.hold is not None or slot.slot in decider.memory.loads:
        raise Refused(f"the window of {slot.request!r} cannot move while the request is held or loads")


def pass_window(decider: Decider, slot: SlotFacts, passed: int) -> FencedBlocks | None:
    """The checked window of a slot has passed so many blocks. The result are the places that a running copy still uses,
    None if the window did not move."""
    count = passed - slot.passed_blocks
    if not count:
        return None
    if decider.config.eviction.by_request:
        flush_copies(decider, slot)
    fenced = fence(decider, slot, slot.device_blocks[:count])
    decider.release_passed(slot, count)
    return FencedBlocks(decider.ids(fenced))


def admit(
    decider: Decider, pool: PoolFacts, slot: SlotFacts, ids: list[int], reused: int, tokens: int, passed: int = 0
) -> None:
    """The first blocks of a slot, which were checked: ``reused`` blocks are its own prefix in G1, and those of
    ``tokens`` behind it are loaded. The first ``passed`` of all these lie before the window and have no place."""
    external = tokens // decider.config.block_tokens
    assign(decider, pool, [slot], [len(ids)], ids, reused, tokens, passed=passed)
    decider.memory.pools[pool.info.pool].gave(len(ids) - max(0, reused - passed), len(pool), decider.at_ns)
    _score(decider, slot, reused, external)
    if decider.config.eviction.by_request:
        first = max(passed, reused + external - _staged_blocks(slot)) if external else 0
        end = reused + external if external else 0
        for _, policy in request_policies(decider):
            policy.admitted(slot.slot, end, slot.hashes[first:end], first)
    if external:
        _load(decider, pool, slot, reused, external, tokens)
    elif slot.staged:
        decider.release_staging(slot, ReleaseReason.UNUSED)


def request_policies(decider: Decider) -> list[tuple[PoolFacts, RequestLru]]:
    """Lower tiers whose policies must be told what requests do."""
    policies = [(pool, decider.live_memory.policies[pool.info.pool].of_requests) for pool in decider.lower_pools()]
    return [(pool, policy) for pool, policy in policies if policy is not None]


def check_device_ids(
    decider: Decider, pool: PoolFacts, slot: SlotFacts, ids: list[int], prefix: int, passed: int = 0,
    filling: Sequence[tuple[SlotFacts, int, int]] = (),
) -> int:
    """Refuse ids that the slot cannot be given; returns how many leading ids are its own prefix in G1, from block
    ``passed`` on. The blocks of ``filling`` are about to be full."""
    capacity = pool.places_max
    if prefix > len(ids):
        raise Refused(f"{prefix} prefix blocks were reported but only {len(ids)} blocks allocated")
    if not ids:
        return prefix
    distinct = set(ids)
    if len(distinct) != len(ids) or not distinct.isdisjoint(slot.device_blocks):
        raise Refused(f"request {slot.request!r} was given a block twice")
    if not 0 <= min(ids) <= max(ids) < capacity:
        raise Refused(f"block ids must be from 0 to {capacity - 1}, got {min(ids)} to {max(ids)}")
    if max(ids) < len(pool) and _can_be_given(pool, slot, ids[:prefix], ids[prefix:], passed):
        return prefix
    soon = {place for other, first, end in filling for place in other.places(first, end)}
    for at, place in enumerate(ids[:prefix], passed):
        if place in soon:
            continue
        if place >= len(pool) or pool.hash_of[place] != slot.hashes[at] or pool.content[place] != READY:
            raise Refused(f"block {place} does not hold block {at} of {slot.request!r}")
    check_given(pool, ids[prefix:])
    return prefix


def check_given(pool: PoolFacts, places: list[int]) -> None:
    """Raise ``Refused`` for a place that is held, written or under quarantine; a place that is not known yet is free.
    """
    for place in places:
        if place < len(pool) and pool.condition(place) not in (Condition.EMPTY, Condition.CACHED):
            raise Refused(f"block {place} is still {pool.condition(place).label} and cannot be given away")


def _can_be_given(pool: PoolFacts, slot: SlotFacts, reused: list[int], fresh: list[int], passed: int) -> bool:
    """True if nothing is wrong with these places, which is found out faster than what is wrong."""
    if pool.quarantined or any(gather(pool.refs, fresh)):
        return False
    if gather(pool.hash_of, reused) != slot.hashes[passed : passed + len(reused)]:
        return False
    return WRITING not in gather(pool.content, fresh) and all(gather(pool.content, reused)) and (
        WRITING not in gather(pool.content, reused)
    )


def assign(
    decider: Decider, pool: PoolFacts, slots: list[SlotFacts], counts: list[int], ids: list[int], reused: int,
    external_tokens: int, *, at_once: bool = True, passed: int = 0,
) -> dict[int, int]:
    """Append checked device blocks to slots, ``at_once`` or over iterations that may be told together. The first
    ``passed`` blocks of a slot have no place.

    The old content of the blocks is evicted for the first slot. Returns its hashes by place, unless ``at_once``.
    """
    decider.took(pool, len(ids))
    held = max(0, reused - passed)
    lost = pool.filled(ids[held:])
    evicted = {} if at_once else dict(zip(lost, gather(pool.hash_of, lost), strict=True))
    if lost:
        decider.evict(pool, lost, slots[0].slot, EvictRule.REASSIGNED)
    decider.emit(
        ev.DeviceBlocksAssigned, pool.info.pool, tuple(slot.slot for slot in slots), tuple(counts),
        decider.ids(ids), reused, external_tokens, passed,
    )
    if held:
        decider.live_memory.taken(pool, ids[:held])
    lower = decider.below(pool)
    if lower is not None and held:
        # A block that is used again deserves a copy again.
        planned, below = decider.memory.pools[pool.info.pool].planned, lower.by_hash
        low, high = copied_blocks(decider, slots[0])
        again = ids[max(0, low - passed) : min(held, max(0, high - passed))]
        unsaved = [
            place for place, key in zip(again, gather(pool.hash_of, again), strict=True)
            if key not in below and place not in planned
        ]
        if decider.config.eviction.by_request:
            if not external_tokens:  # vLLM's connector does not offer what comes before a load
                decider.memory.pools[pool.info.pool].reused[slots[0].slot] = unsaved
        else:
            decider.unsaved(pool, unsaved)
    if lower is not None:
        mine = decider.memory.pools[pool.info.pool]
        mine.gave(len(ids) - held, len(pool), decider.at_ns, at_once=at_once)
        if mine.ordered and lost:
            decider.mark_dirty(pool)  # the next victims have changed
        at = 0
        for slot, count in zip(slots, counts, strict=True):
            decider.live_memory.assigned(pool, ids[at : at + count], slot.slot, ids[:held])
            at += count
    for slot in slots:
        decider.note_place(slot)
    return evicted


def _score(decider: Decider, slot: SlotFacts, reused: int, external: int) -> None:
    hits = [reused, 0, 0, 0]
    skipped = _found_blocks(decider, slot) - _staged_blocks(slot) if external else 0
    left, at = external - skipped, reused + skipped
    if skipped:
        hits[decider.state.pools[slot.staged[0][0]].info.tier - 1] += skipped
    for index, places in slot.staged:
        used = min(left, len(places))
        hits[decider.state.pools[index].info.tier - 1] += used
        decider.live_memory.policies[index].found(slot.hashes[at : min(at + used, slot.prompt_blocks)], decider.at_ns)
        left, at = left - used, at + used
    left = slot.prompt_blocks
    scored = []
    for count in hits:  # only prompt blocks count, in prefix order (BC-5)
        scored.append(min(count, left))
        left -= scored[-1]
    decider.score(
        slot, (scored[0], scored[1], scored[2], scored[3]), slot.hashes[reused : slot.prompt_blocks],
        decider.device_pool(slot.source),
    )
    for pool in decider.lower_pools():
        decider.live_memory.policies[pool.info.pool].use(slot.hashes[: slot.prompt_blocks], decider.at_ns)
        decider.live_memory.used(pool, slot.hashes)


def _load(decider: Decider, pool: PoolFacts, slot: SlotFacts, reused: int, external: int, tokens: int) -> None:
    """Plan one load per source tier, as one batch, and move the slot to onboarding."""
    decider.clear_deadline("staging", slot.slot)
    at, batch = reused + _found_blocks(decider, slot) - _staged_blocks(slot), decider.state.next_candidate
    parts: list[LoadPart] = []
    for index, places in slot.staged:
        count = min(external - (at - reused), len(places))
        if not count:
            continue
        first, end = max(at, slot.passed_blocks), at + count
        at = end
        if first >= end:
            continue  # it lies before the window
        tier = decider.state.pools[index].info.tier
        number = decider.state.next_candidate
        decider.emit(
            ev.CandidatePlanned, number, slot.slot, Route.of(tier, pool.info.tier),
            decider.hashes(slot.hashes[first:end]), decider.ids(slot.places(first, end)), first,
        )
        decider.memory.batch_of[number] = batch
        parts.append(LoadPart(number, tier, first, end - first))
    decider.memory.loads[slot.slot] = parts
    move(decider, slot, SlotState.ONBOARDING, detail=tokens)
    for part in parts:
        enqueue(decider, decider.state.candidates[part.candidate])
