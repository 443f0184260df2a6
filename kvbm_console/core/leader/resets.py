"""Reset and drain.

Law of this file: a reset is never refused and returns everything to the initial state at once. Places under a running
copy are quarantined until every rank has reported the copy.
"""

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import (
    Authority,
    CandidateStatus,
    Clock,
    FinishReason,
    HoldEnd,
    ReleaseReason,
    ResetMode,
    SkipReason,
    SlotState,
)
from kvbm_console.core.instructions import (
    CancelTransfer,
    ClearDevicePool,
    DrainAnswer,
    ResetAnswer,
    SetDeadline,
    ZeroBlocks,
)
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.holds import end_hold, thaw
from kvbm_console.core.leader.memory import LiveMemory
from kvbm_console.core.leader.pipeline import drop, end_candidate, skip
from kvbm_console.core.leader.slots import finish


def reset_requested(decider: Decider, s: st.ResetRequested) -> ResetAnswer:
    """Reset now."""
    aborted = sum(slot.state not in (SlotState.FINISHING, SlotState.FINISHED) for slot in decider.state.slots.values())
    reset(decider, s.mode, s.by)
    quarantined = sum(len(pool.quarantined) for pool in decider.state.pools)
    return ResetAnswer(decider.state.epoch, aborted, quarantined)


def drain_requested(decider: Decider, s: st.DrainRequested) -> DrainAnswer:
    """Take nothing new; reset when the last live slot and the last copy have ended, or the time is over."""
    if s.deadline_ns <= 0:
        raise Refused(f"deadline_ns must be above 0, got {s.deadline_ns}")
    if decider.state.draining:
        raise Refused("the leader drains already")
    answer = DrainAnswer(decider.state.seq, len(decider.state.slots))
    decider.emit(ev.DrainBegun, s.deadline_ns, s.by)
    decider.ask(SetDeadline(decider.memory.deadline("drain", 0), s.deadline_ns, Clock.ENGINE))
    return answer


def finish_drain(decider: Decider) -> None:
    """At the end of a stimulus: a drain whose last slot and last copy are gone becomes the reset."""
    if decider.state.draining and not decider.state.slots and not decider.state.operations:
        reset(decider, ResetMode.LOGICAL)


def reset(decider: Decider, mode: ResetMode, by: str = "") -> None:
    """Release holds, candidates, staging and slots, quarantine the places that copies still touch, clear the pools."""
    # No slot is stopped on the way: the gate is built again at the end.
    decider.gate = None
    decider.memory.loads.clear()  # no slot is woken, because the engine forgets its requests
    decider.clear_deadline("drain", 0)
    decider.emit(ev.ResetBegun, mode, by)
    for hold in list(decider.state.holds.values()):
        end_hold(decider, hold, HoldEnd.CANCELLED, "reset")
    thaw(decider, HoldEnd.CANCELLED, "")
    _close_candidates(decider)
    for slot in list(decider.state.slots.values()):
        decider.release_staging(slot, ReleaseReason.RESET)
        decider.release_device_blocks(slot, ReleaseReason.RESET)
        finish(decider, slot, FinishReason.ABORTED if slot.reason is None else slot.reason)
    decider.emit(ev.ResetDone, mode, decider.state.epoch + 1)
    _start_memory_anew(decider)
    for pool in decider.state.pools:
        if pool.info.authority is Authority.ENGINE:
            decider.ask(ClearDevicePool(pool.info.source, pack_ids(sorted(pool.quarantined))))
        if mode is ResetMode.PHYSICAL:
            decider.ask(ZeroBlocks(pool.info.pool))


def _close_candidates(decider: Decider) -> None:
    for candidate in list(decider.state.candidates.values()):
        if candidate.candidate not in decider.state.candidates:
            continue
        if candidate.operation is None:
            skip(decider, candidate, SkipReason.SLOT_STOPPING)
            continue
        operation = decider.state.operations[candidate.operation]
        named = bool(operation.sources or operation.targets)  # the copy of a connector may hold none
        running = named and operation.started and operation.operation not in decider.memory.complete
        if running:
            ranks = tuple(sorted(operation.reported))
            for index, places in (
                (operation.source_pool, operation.sources), (operation.target_pool, operation.targets),
            ):
                decider.emit(ev.BlocksQuarantined, index, operation.operation, pack_ids(places), ranks)
        elif named and not operation.started and operation.operation not in decider.memory.undispatched:
            decider.ask(CancelTransfer(operation.operation))
        drop(decider, decider.state.pools[operation.target_pool], operation, operation.targets)
        end_candidate(decider, operation, CandidateStatus.CANCELLED)


def _start_memory_anew(decider: Decider) -> None:
    """Forget all policy state; breakpoint counts and deadlines' numbers go on."""
    old = decider.memory
    decider.live_memory = LiveMemory(decider.config.eviction)
    for pool in decider.state.pools:
        ours = pool.info.authority is Authority.LEADER
        decider.live_memory.add_pool(len(pool) if ours else 0)
        if ours and pool.quarantined:
            decider.memory.pools[pool.info.pool].unused = 0
            decider.free_places(pool, [place for place in range(len(pool)) if place not in pool.quarantined])
    decider.look_at_pools()
    decider.memory.matches = old.matches
    decider.memory.logged = old.logged
    decider.memory.paused = old.paused
    decider.memory.iterations = old.iterations
    decider.memory.next_deadline = old.next_deadline
    decider.memory.deadlines = {number: purpose for number, purpose in old.deadlines.items() if purpose[0] == "expiry"}
    decider.memory.deadline_of = {f"{kind} {key}": number for number, (kind, key) in decider.memory.deadlines.items()}
    decider.rearm()
