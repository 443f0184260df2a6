"""Requests from admission to the end: preempt, clone, finish.

Law of this file: preempt and finish never wait. They drop the slot's references, skip candidates that are not promoted
and cancel copies that are not started. Started copies run out, because they hold references of their own.
"""

from collections.abc import Sequence

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_ids
from kvbm_console.core.config import REQUEST_ID_BYTES_MAX, SECOND_NS
from kvbm_console.core.errors import Refused
from kvbm_console.core.eviction.pool_policy import PIN
from kvbm_console.core.holds import OF_A_COPY
from kvbm_console.core.ids import (
    CandidateStatus,
    EvictRule,
    FinishReason,
    ReleaseReason,
    Site,
    SkipReason,
    SlotState,
    WaitPoint,
)
from kvbm_console.core.instructions import CancelTransfer, CloneAnswer, FencedBlocks, FinishAnswer
from kvbm_console.core.leader import prefetch
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.filling import copied_blocks
from kvbm_console.core.leader.holds import cancel_hold, felt_pressure, strike
from kvbm_console.core.leader.lookups import check_device_ids, request_policies
from kvbm_console.core.leader.offloads import plan_last_offload
from kvbm_console.core.leader.pipeline import drop, end_candidate, fence, flush_copies, skip
from kvbm_console.core.leader.slots import finish, move
from kvbm_console.core.slots import SlotFacts


def request_preempted(decider: Decider, s: st.RequestPreempted) -> FencedBlocks:
    """The scheduler takes the device blocks back; the result are those a running copy still uses."""
    slot = decider.live(s.request)
    again = slot.state is SlotState.PREEMPTED and not slot.end_block
    if again or slot.state in (SlotState.FINISHING, SlotState.FINISHED):
        raise Refused(f"request {s.request!r} is {slot.state.label} and cannot be preempted")
    return preempt(decider, slot)


def preempt(decider: Decider, slot: SlotFacts) -> FencedBlocks:
    """As ``request_preempted``, for a slot that was checked."""
    felt_pressure(decider, slot)
    cancel_hold(decider, slot, "preempted")
    if decider.config.eviction.by_request:
        flush_copies(decider, slot)
    _stop_candidates(decider, slot, cancel_stores=True)
    decider.release_staging(slot, ReleaseReason.PREEMPTED)
    fenced = _fence(decider, slot)
    decider.release_device_blocks(slot, ReleaseReason.PREEMPTED)
    if slot.state is not SlotState.PREEMPTED:  # it is when it was admitted again and never scheduled since
        move(decider, slot, SlotState.PREEMPTED)
    return FencedBlocks(decider.ids(fenced))


def _ends_with_its_hold(decider: Decider, slot: SlotFacts, reason: FinishReason) -> bool:
    """True if a request that finishes stays held: its copy stands still, and with it the release of its blocks."""
    if slot.hold is None or reason is FinishReason.ABORTED:
        return False
    return decider.state.holds[slot.hold].point in OF_A_COPY


def _stop_candidates(decider: Decider, slot: SlotFacts, *, cancel_stores: bool) -> None:
    """Skip the slot's candidates that are pending and not held; cancel its loads, and its stores if asked, that have
    not started.

    No request waits for the load any more, so its end wakes none.
    """
    held = slot.hold is not None and decider.state.holds[slot.hold].point in (WaitPoint.EVALUATE, WaitPoint.PROMOTE)
    decider.memory.loads.pop(slot.slot, None)
    decider.memory.lost_at.pop(slot.slot, None)
    for number in sorted(slot.outstanding):
        candidate = decider.state.candidates[number]
        if candidate.operation is None:
            if not held:
                skip(decider, candidate, SkipReason.SLOT_STOPPING)
            continue
        operation = decider.state.operations[candidate.operation]
        if operation.started or operation.reported or not (cancel_stores or candidate.route.is_load):
            continue
        if operation.operation in decider.memory.undispatched:
            decider.memory.undispatched.remove(operation.operation)
        else:
            decider.ask(CancelTransfer(operation.operation))
        target = decider.state.pools[operation.target_pool]
        drop(decider, target, operation, operation.targets)
        end_candidate(decider, operation, CandidateStatus.CANCELLED)


def _fence(decider: Decider, slot: SlotFacts) -> list[int]:
    """Device places of the slot that its running operations still use; their ends give them back to the engine."""
    return fence(decider, slot, slot.device_blocks)


def request_finished(decider: Decider, s: st.RequestFinished) -> FinishAnswer:
    """Finish or abort; the blocks stay allocated while copies of them run or a hold withholds them."""
    slot = decider.live(s.request)
    if slot.state in (SlotState.FINISHING, SlotState.FINISHED):
        raise Refused(f"request {s.request!r} is {slot.state.label} already")
    returned = unpack_ids(s.block_ids)
    if returned and returned != slot.device_blocks and set(returned) != set(slot.device_blocks):
        raise Refused(f"request {s.request!r} does not hold the {len(returned)} blocks it is said to give back")
    return end(decider, slot, s.reason)


def end(decider: Decider, slot: SlotFacts, reason: FinishReason) -> FinishAnswer:
    """As ``request_finished``, for a slot that was checked."""
    if not _ends_with_its_hold(decider, slot, reason):
        cancel_hold(decider, slot, "aborted" if reason is FinishReason.ABORTED else "finished")
    if decider.config.eviction.by_request:
        flush_copies(decider, slot)
    _stop_candidates(decider, slot, cancel_stores=False)
    decider.release_staging(slot, ReleaseReason.FINISHED)
    if reason is not FinishReason.ABORTED:
        _guard(decider, slot)
        prefetch.ended(decider, slot)
        if not decider.config.eviction.by_request:
            plan_last_offload(decider, slot)
    if decider.config.eviction.by_request:
        over = SlotState.FINISHING, SlotState.FINISHED
        idle = all(other is slot or other.state in over for other in decider.state.slots.values())
        for _, policy in request_policies(decider):
            policy.finished(slot.slot, slot.request)
            if idle:
                policy.formed()  # vLLM forms an empty iteration when only ended requests are left
    elif decider.config.eviction.used_at_end:
        keys = slot.hashes[: slot.prompt_blocks] if decider.config.offload_prompt_only else slot.hashes
        decider.memory.used_at_end.append(keys[:])
    strike(decider, Site.REQUEST_FINISH, slot, slot.state, SlotState.FINISHING)
    if slot.outstanding or slot.hold is not None:
        move(decider, slot, SlotState.FINISHING, reason=reason)
        decider.memory.ending.append(slot.slot)
        return FinishAnswer(True)
    decider.release_device_blocks(slot, ReleaseReason.FINISHED)
    finish(decider, slot, reason)
    return FinishAnswer(False)


def use_formed(
    decider: Decider, slots: Sequence[int], positions: Sequence[int], ended: Sequence[str]
) -> None:
    """An iteration was formed, in which these slots compute their prompts up to these positions. ``ended`` is that of
    ``IterationScheduled``."""
    if not decider.config.eviction.by_request:
        if decider.memory.used_at_end:
            _use_ended(decider)
        return
    for purpose in [purpose for purpose in decider.memory.deadline_of if purpose.startswith("staging ")]:
        # vLLM holds no block for a request that it does not admit, and looks up anew.
        decider.release_staging(decider.state.slots[int(purpose.partition(" ")[2])], ReleaseReason.UNUSED)
    for pool, policy in request_policies(decider):
        policy.begin()
        written = {
            pool.hash_of[place] for operation in decider.state.operations.values()
            if operation.target_pool == pool.info.pool for place in operation.targets
        }
        for number, position in zip(slots, positions, strict=True):
            slot = decider.state.slots[number]
            low, high = copied_blocks(decider, slot)
            policy.offered(number, slot.hashes, low, min(high, position // decider.config.block_tokens), written)
        policy.formed(ended)


def _use_ended(decider: Decider) -> None:
    """Behind the admissions of an iteration the blocks of requests that ended before it are used again."""
    ended, decider.memory.used_at_end = decider.memory.used_at_end, []
    for keys in ended:
        for pool in decider.lower_pools():
            decider.live_memory.policies[pool.info.pool].use_again(keys, decider.at_ns)


def _guard(decider: Decider, slot: SlotFacts) -> None:
    """Keep the blocks of a request that ends well in the lower tiers for a while, if its priority or a pin says so."""
    eviction = decider.config.eviction
    if slot.priority > 0:
        until_ns = decider.at_ns + round(eviction.priority_ttl_s * SECOND_NS)
        for pool in decider.lower_pools():
            decider.live_memory.policies[pool.info.pool].guard(slot.hashes, min(slot.priority, PIN - 1), until_ns)
    if eviction.pin_tail_tokens:
        until_ns = decider.at_ns + round(eviction.pin_ttl_s * SECOND_NS)
        budget = -(-eviction.pin_tail_tokens // decider.config.block_tokens)
        for pool in decider.lower_pools():
            decider.live_memory.policies[pool.info.pool].pin(slot.hashes, budget, decider.at_ns, until_ns)


def request_cloned(decider: Decider, s: st.RequestCloned) -> CloneAnswer:
    """Open clones that share the parent's full blocks; each has its own partial last block."""
    parent = decider.live(s.request)
    if not parent.end_block or parent.state in (SlotState.ONBOARDING, SlotState.PREEMPTED, SlotState.FINISHING):
        raise Refused(f"request {s.request!r} is {parent.state.label} and cannot be cloned")
    partial = unpack_ids(s.partial_ids)
    shared = parent.places(0, parent.filled_blocks)
    tail = len(parent.device_blocks) - len(shared)
    if tail > 1:
        raise Refused(f"request {s.request!r} has {tail} blocks that are not full; a clone can copy one")
    if len(partial) != tail * len(s.clones):
        raise Refused(f"{len(s.clones)} clones need {tail * len(s.clones)} partial blocks, got {len(partial)}")
    if len(set(s.clones)) != len(s.clones) or any(clone in decider.state.slot_of for clone in s.clones):
        raise Refused("a clone needs a request id of its own")
    if any(not 1 <= len(clone.encode()) <= REQUEST_ID_BYTES_MAX for clone in s.clones):
        raise Refused(f"request must be 1 to {REQUEST_ID_BYTES_MAX} bytes")
    pool = decider.device_pool(parent.source)
    check_device_ids(decider, pool, parent, partial, 0)
    decider.took(pool, len(partial))
    lost = [place for place in partial if place < len(pool) and pool.hash_of[place]]
    if lost:
        decider.evict(pool, lost, parent.slot, EvictRule.REASSIGNED)
    opened = []
    for at, clone in enumerate(s.clones):
        number = decider.state.next_slot
        ids = [*shared, *partial[at * tail : (at + 1) * tail]]
        decider.emit(ev.SlotCloned, number, parent.slot, clone, decider.ids(ids))
        decider.live_memory.taken(pool, shared)
        decider.note_place(decider.state.slots[number])
        opened.append(number)
    return CloneAnswer(tuple(opened))
