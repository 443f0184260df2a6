"""Slots: opened, moved, given blocks and closed.

Law of this file: a slot changes here and nowhere else; what it owns is referenced in a pool by the same event.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import ID_BYTES, id_of, read_ids, unpack_hashes, unpack_ids
from kvbm_console.core.errors import FoldError
from kvbm_console.core.holds import POINT_OF_SITE, POINT_OF_STATE
from kvbm_console.core.ids import SlotState, WaitPoint, age_class
from kvbm_console.core.slots import TRANSITIONS, SlotFacts, check_move

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState

_SKIPPED: Final = frozenset({SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE})
_INITIALIZED, _PREFILLING, _PREEMPTED = SlotState.INITIALIZED, SlotState.PREFILLING, SlotState.PREEMPTED
_FINISHED = SlotState.FINISHED


def _slot_opened(state: "CacheState", e: ev.SlotOpened) -> None:
    if e.slot != state.next_slot or e.request in state.slot_of:
        raise FoldError(f"slot {e.slot} of request {e.request!r} cannot open")
    hashes = unpack_hashes(e.hashes)
    at_ns = e.at_ns
    state.slots[e.slot] = SlotFacts(  # in the order of the fields: a name costs as much as a value
        e.slot, e.request, e.source, _INITIALIZED, at_ns, at_ns, hashes, e.prompt_tokens, e.output_limit, e.priority,
        e.session, len(hashes),
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
        first_iteration=parent.first_iteration, skipped_since=state.iteration,
    )
    state.device_pool_of(parent).ref(ids)
    state.slot_of[e.request] = e.slot
    state.next_slot = e.slot + 1
    state.totals.slots_opened += 1


def _slot_moved(state: "CacheState", e: ev.SlotMoved) -> None:
    try:
        slot = state.slots[e.slot]  # half of what a call costs
    except KeyError:
        slot = state.known_slot(e.slot)
    old, new = e.old, e.new
    if slot.state is not old:
        raise FoldError(f"slot {e.slot} is {slot.state.label}, not {old.label}")
    if new not in TRANSITIONS[old]:
        check_move(old, new)
    slot.state = new
    slot.since_ns = e.at_ns
    slot.anchor_tokens = e.computed_tokens
    slot.anchor_iteration = state.iteration
    if e.evaluated_blocks != slot.evaluated_blocks:
        slot.evaluated_blocks = e.evaluated_blocks
    slot.cached = e.cached
    if slot.hold is not None:
        _repoint(state, slot)
    if new in _SKIPPED:
        slot.skipped_since = e.iteration
    elif old in _SKIPPED:
        # Back in an iteration: that one is not skipped. Otherwise the last one that was formed is.
        back = new is _PREFILLING or new is SlotState.DECODING
        slot.skipped_iterations += e.iteration - slot.skipped_since + (not back)
    if new is _PREFILLING:
        if slot.first_iteration is None:
            slot.first_iteration = e.iteration
    elif new is _PREEMPTED:
        state.totals.preemptions += 1
        state.totals.requests_preempted += slot.preemptions == 0
        slot.preemptions += 1
        slot.last_answer = None
        slot.local_blocks = 0
    reason = e.reason
    if reason is not None and slot.reason is None:
        slot.reason = reason
        state.totals.finished[reason] += 1


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
    slot = state.slots.get(e.slot) or state.known_slot(e.slot)
    if slot.state is not _FINISHED or slot.device_blocks or slot.staged or slot.outstanding or slot.hold:
        raise FoldError(f"slot {e.slot} is {slot.state.label} and still owns something")
    del state.slots[e.slot]
    del state.slot_of[slot.request]


def _lookup_answered(state: "CacheState", e: ev.LookupAnswered) -> None:
    slot = state.slots.get(e.slot) or state.known_slot(e.slot)
    slot.local_blocks = e.local_blocks
    slot.last_answer = (e.answer, e.local_blocks, e.first_miss)


def _blocks_staged(state: "CacheState", e: ev.BlocksStaged) -> None:
    ids = unpack_ids(e.ids)
    state.known_pool(e.pool).ref(ids, e.ids)
    slot = state.known_slot(e.slot)
    slot.staged = [*slot.staged, (e.pool, ids)]
    state.totals.prefetch_used_blocks += e.prefetched


def _staging_released(state: "CacheState", e: ev.StagingReleased) -> None:
    slot = state.known_slot(e.slot)
    for index, ids in slot.staged:
        state.pools[index].unref(ids)
    slot.staged = []


def _device_blocks_assigned(state: "CacheState", e: ev.DeviceBlocksAssigned) -> None:
    ids, counts, slots, index = read_ids(e.ids), e.counts, e.slots, e.pool
    pool = state.known_pool(index)
    if sum(counts) != len(ids) or len(counts) != len(slots):
        raise FoldError(f"{len(ids)} blocks do not match counts of {sum(counts)}")
    pool.ref(ids, e.ids)
    size, iteration, known = pool.info.block_tokens, state.iteration, state.slots
    filled, computed = e.reused + e.external_tokens // size, e.reused * size + e.external_tokens
    at = 0
    for number, count in zip(slots, counts):  # noqa: B905 (compared above)
        try:
            slot = known[number]
        except KeyError:
            slot = state.known_slot(number)
        held = slot.device_blocks
        if not held:
            if slot.device_pool != index:  # to write a field takes as long as to read three
                slot.device_pool = index
            if slot.filled_blocks != filled:
                slot.filled_blocks = filled
            if slot.anchor_tokens != computed:
                slot.anchor_tokens = computed
            if slot.anchor_iteration != iteration:
                slot.anchor_iteration = iteration
        if count == 1:
            held.append(ids[at])
            at += 1
        else:
            held += ids if count == len(ids) else ids[at : at + count]
            at += count


def _device_blocks_released(state: "CacheState", e: ev.DeviceBlocksReleased) -> None:
    try:
        slot = state.slots[e.slot]  # half of what a call costs
    except KeyError:
        slot = state.known_slot(e.slot)
    column, index, held = e.ids, slot.device_pool, slot.device_blocks
    pool = state.device_pool_of(slot) if index is None else state.pools[index]
    if len(held) == 1 and len(column) == ID_BYTES:  # what decoding gives back
        held.clear()
        if slot.filled_blocks:
            slot.filled_blocks = 0
        pool.unref_one(id_of[column])
        return
    ids = read_ids(column)
    if len(ids) == len(held):
        held.clear()
        slot.filled_blocks = 0
    else:
        gone = set(ids)
        held[:] = [block for block in held if block not in gone]
        slot.filled_blocks = min(slot.filled_blocks, len(held))
    pool.unref(ids, column)


def _iteration_advanced(state: "CacheState", e: ev.IterationAdvanced) -> None:
    state.iteration = e.iteration
    state.running = e.running
    state.waiting = e.waiting
    if e.slots or e.positions:
        for number, position in zip(e.slots, e.positions, strict=True):
            slot = state.known_slot(number)
            slot.anchor_tokens = position
            slot.anchor_iteration = e.iteration


def _prefix_scored(state: "CacheState", e: ev.PrefixScored) -> None:
    slot = state.slots.get(e.slot) or state.known_slot(e.slot)
    hits = slot.hits = e.hits
    state.totals.prompt_blocks += e.prompt_blocks
    if any(hits):
        found = state.totals.hit_blocks
        for tier, blocks in enumerate(hits):
            found[tier] += blocks
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
        slot.filled_blocks = e.position // state.pools[slot.device_pool].info.block_tokens
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
    ev.IterationAdvanced: _iteration_advanced,
    ev.PrefixScored: _prefix_scored,
    ev.HitsLost: _hits_lost,
}
