"""Slots: opened, moved, given blocks and closed.

Law of this file: a slot changes here alone, and the same event references its blocks in a pool.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.errors import FoldError
from kvbm_console.core.holds import POINT_OF_SITE, POINT_OF_STATE
from kvbm_console.core.ids import ReleaseReason, SlotState, WaitPoint, age_class
from kvbm_console.core.slots import SlotFacts, check_move

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState

_SKIPPED: Final = frozenset({SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE})


def _slot_opened(state: "CacheState", e: ev.SlotOpened) -> None:
    if e.slot != state.next_slot or e.request in state.slot_of:
        raise FoldError(f"slot {e.slot} of request {e.request!r} cannot open")
    hashes = unpack_hashes(e.hashes)
    state.slots[e.slot] = SlotFacts(
        slot=e.slot, request=e.request, source=e.source, state=SlotState.INITIALIZED, since_ns=e.at_ns,
        opened_ns=e.at_ns, hashes=hashes, prompt_tokens=e.prompt_tokens, output_limit=e.output_limit,
        priority=e.priority, session=e.session, prompt_blocks=len(hashes), sends=e.sends, receives=e.receives,
    )
    state.slot_of[e.request] = e.slot
    state.next_slot = e.slot + 1
    state.totals.slots_opened += 1


def _slot_cloned(state: "CacheState", e: ev.SlotCloned) -> None:
    parent = state.known_slot(e.parent)
    if e.slot != state.next_slot or e.request in state.slot_of:
        raise FoldError(f"clone {e.slot} of request {e.request!r} cannot open")
    ids = unpack_ids(e.ids)
    state.slots[e.slot] = SlotFacts(
        slot=e.slot, request=e.request, source=parent.source, state=parent.state, since_ns=e.at_ns,
        opened_ns=e.at_ns, hashes=list(parent.hashes), prompt_tokens=parent.prompt_tokens,
        output_limit=parent.output_limit, priority=parent.priority, session=parent.session,
        prompt_blocks=parent.prompt_blocks, parent=e.parent, anchor_tokens=parent.computed_tokens(state.iteration),
        anchor_iteration=state.iteration, evaluated_blocks=parent.evaluated_blocks, device_pool=parent.device_pool,
        device_blocks=ids, filled_blocks=parent.filled_blocks, cached=parent.cached,
        first_iteration=parent.first_iteration, skipped_since=state.iteration, passed_blocks=parent.passed_blocks,
    )
    state.device_pool_of(parent).ref(ids)
    state.slot_of[e.request] = e.slot
    state.next_slot = e.slot + 1
    state.totals.slots_opened += 1


def _slot_moved(state: "CacheState", e: ev.SlotMoved) -> None:
    slot = state.known_slot(e.slot)
    old, new = e.old, e.new
    if slot.state is not old:
        raise FoldError(f"slot {e.slot} is {slot.state.label}, not {old.label}")
    check_move(old, new)
    slot.state = new
    slot.since_ns = e.at_ns
    slot.anchor_tokens = e.computed_tokens
    slot.anchor_iteration = state.iteration
    slot.evaluated_blocks = e.evaluated_blocks
    slot.cached = e.cached
    if slot.hold is not None:
        _repoint(state, slot)
    if new in _SKIPPED:
        slot.skipped_since = e.iteration
    elif old in _SKIPPED:
        # A slot that is back in an iteration takes part in it. Otherwise it was left out of the last formed iteration.
        back = new is SlotState.PREFILLING or new is SlotState.DECODING
        slot.skipped_iterations += e.iteration - slot.skipped_since + (not back)
    if new is SlotState.PREFILLING:
        if slot.first_iteration is None:
            slot.first_iteration = e.iteration
    elif new is SlotState.PREEMPTED:
        state.totals.preemptions += 1
        state.totals.requests_preempted += slot.preemptions == 0
        slot.preemptions += 1
        slot.last_answer = None
        slot.local_blocks = 0
    if e.reason is not None and slot.reason is None:
        slot.reason = e.reason
        state.totals.finished[e.reason] += 1


def _repoint(state: "CacheState", slot: SlotFacts) -> None:
    """A pending hold whose slot moved on waits at the next point of its new state, unless its site fixes one."""
    assert slot.hold is not None
    hold = state.holds[slot.hold]
    point = POINT_OF_STATE[slot.state]
    if hold.parked or hold.site in POINT_OF_SITE or hold.point is WaitPoint.CALL or point is None:
        return
    hold.point = point
    if point is WaitPoint.SCHEDULE:
        state.standing.add(slot.request)
    else:
        state.standing.discard(slot.request)


def _slot_closed(state: "CacheState", e: ev.SlotClosed) -> None:
    slot = state.known_slot(e.slot)
    if slot.state is not SlotState.FINISHED or slot.device_blocks or slot.staged or slot.outstanding or slot.hold:
        raise FoldError(f"slot {e.slot} is {slot.state.label} and still owns something")
    del state.slots[e.slot]
    del state.slot_of[slot.request]


def _lookup_answered(state: "CacheState", e: ev.LookupAnswered) -> None:
    slot = state.known_slot(e.slot)
    slot.local_blocks = e.local_blocks
    slot.last_answer = (e.answer, e.local_blocks, e.first_miss)


def _blocks_staged(state: "CacheState", e: ev.BlocksStaged) -> None:
    ids = unpack_ids(e.ids)
    state.known_pool(e.pool).ref(ids)
    slot = state.known_slot(e.slot)
    slot.staged = [*slot.staged, (e.pool, ids)]
    state.totals.prefetch_used_blocks += e.prefetched


def _staging_released(state: "CacheState", e: ev.StagingReleased) -> None:
    slot = state.known_slot(e.slot)
    for index, ids in slot.staged:
        state.pools[index].unref(ids)
    slot.staged = []


def _device_blocks_assigned(state: "CacheState", e: ev.DeviceBlocksAssigned) -> None:
    ids, pool = unpack_ids(e.ids), state.known_pool(e.pool)
    if sum(e.counts) != len(ids) or len(e.counts) != len(e.slots):
        raise FoldError(f"{len(ids)} blocks do not match counts of {sum(e.counts)}")
    pool.ref(ids)
    size, at = pool.info.block_tokens, 0
    for number, count in zip(e.slots, e.counts, strict=True):
        slot = state.known_slot(number)
        if not (slot.device_blocks or slot.passed_blocks):
            slot.device_pool = e.pool
            slot.passed_blocks = e.passed_blocks
            slot.hashes += unpack_hashes(e.passed_hashes)
            slot.filled_blocks = max(e.reused + e.external_tokens // size, e.passed_blocks)
            slot.anchor_tokens = e.reused * size + e.external_tokens
            slot.anchor_iteration = state.iteration
        slot.device_blocks += ids[at : at + count]
        at += count
        if e.reused > len(slot.hashes):  # reused blocks of an earlier answer, which the slot has not filled itself
            slot.hashes += [pool.hash_of[place] for place in slot.places(len(slot.hashes), e.reused)]


def _device_blocks_released(state: "CacheState", e: ev.DeviceBlocksReleased) -> None:
    slot = state.known_slot(e.slot)
    ids = unpack_ids(e.ids)
    if e.why is ReleaseReason.PAST_WINDOW:
        if slot.device_blocks[: len(ids)] != ids:
            raise FoldError(f"the window of slot {e.slot} cannot pass {len(ids)} blocks that are not its first ones")
        del slot.device_blocks[: len(ids)]
        slot.passed_blocks += len(ids)
        slot.filled_blocks = max(slot.filled_blocks, slot.passed_blocks)
    else:
        gone = set(ids)
        slot.device_blocks = [block for block in slot.device_blocks if block not in gone]
        slot.passed_blocks = slot.passed_blocks if slot.device_blocks else 0
        slot.filled_blocks = min(slot.filled_blocks, slot.end_block)
    state.device_pool_of(slot).unref(ids)


def _device_blocks_replaced(state: "CacheState", e: ev.DeviceBlocksReplaced) -> None:
    slot, ids = state.known_slot(e.slot), unpack_ids(e.ids)
    pool = state.device_pool_of(slot)
    end = e.first + len(ids)
    own = slot.places(e.first, end)
    if len(own) != len(ids) or not set(ids).isdisjoint(slot.device_blocks) or len(pool.filled(ids)) != len(ids):
        raise FoldError(f"slot {e.slot} cannot use {len(ids)} other blocks from block {e.first} on")
    pool.ref(ids)
    pool.unref(own)
    first = e.first - slot.passed_blocks
    slot.device_blocks[first : first + len(ids)] = ids
    slot.filled_blocks = max(slot.filled_blocks, end)
    slot.hashes += [pool.hash_of[place] for place in slot.places(len(slot.hashes), end)]


def _iteration_advanced(state: "CacheState", e: ev.IterationAdvanced) -> None:
    state.iteration = e.iteration
    state.running = e.running
    state.waiting = e.waiting
    for number, position in zip(e.slots, e.positions, strict=True):
        slot = state.known_slot(number)
        slot.anchor_tokens = position
        slot.anchor_iteration = e.iteration


def _prefix_scored(state: "CacheState", e: ev.PrefixScored) -> None:
    slot = state.known_slot(e.slot)
    slot.hits = e.hits
    if e.readmitted:
        return
    state.totals.prompt_blocks += e.prompt_blocks
    for tier, blocks in enumerate(e.hits):
        state.totals.hit_blocks[tier] += blocks
    for tier, within_ns, blocks in zip(e.again_tiers, e.again_within_ns, e.again_blocks, strict=True):
        state.totals.asked_again[tier - 1][age_class(within_ns)] += blocks


def _hits_lost(state: "CacheState", e: ev.HitsLost) -> None:
    slot = state.known_slot(e.slot)
    hits = list(slot.hits)
    hits[e.tier - 1] -= e.blocks
    slot.hits = (hits[0], hits[1], hits[2], hits[3])
    slot.anchor_tokens = e.position
    slot.anchor_iteration = state.iteration
    if slot.device_pool is not None:
        position = e.position // state.pools[slot.device_pool].info.block_tokens
        slot.filled_blocks = max(position, slot.passed_blocks)
    if not e.readmitted:
        state.totals.hit_blocks[e.tier - 1] -= e.blocks
        state.totals.lost_blocks += e.blocks


FOLDS: Final[dict[type[ev.Event], Callable[["CacheState", Any], None]]] = {
    ev.SlotOpened: _slot_opened,
    ev.SlotCloned: _slot_cloned,
    ev.SlotMoved: _slot_moved,
    ev.SlotClosed: _slot_closed,
    ev.LookupAnswered: _lookup_answered,
    ev.BlocksStaged: _blocks_staged,
    ev.StagingReleased: _staging_released,
    ev.DeviceBlocksAssigned: _device_blocks_assigned,
    ev.DeviceBlocksReleased: _device_blocks_released,
    ev.DeviceBlocksReplaced: _device_blocks_replaced,
    ev.IterationAdvanced: _iteration_advanced,
    ev.PrefixScored: _prefix_scored,
    ev.HitsLost: _hits_lost,
}
