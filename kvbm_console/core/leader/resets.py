"""Reset and drain, and what an engine's event stream reports.

Law of this file: a reset is never refused and returns everything to the initial state at once, by the same path always;
places under a running copy are quarantined until every rank has reported it.
"""

from collections import Counter

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import HASH_BYTES, pack_ids, unpack_hashes
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import (
    EMPTY_HASH,
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
from kvbm_console.core.leader.aids import AidsBox
from kvbm_console.core.leader.ends import finish
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.holds import thaw
from kvbm_console.core.leader.pipeline import drop, end_candidate, skip
from kvbm_console.core.leader.watched_places import places_reported
from kvbm_console.core.tiers import PoolFacts

REPORTED_BLOCKS_MAX = 1_000_000
"""Blocks of one report of an event stream; engines send one step at a time."""


def reset_requested(leader: Decider, s: st.ResetRequested) -> ResetAnswer:
    """Reset now."""
    aborted = sum(slot.state not in (SlotState.FINISHING, SlotState.FINISHED) for slot in leader.state.slots.values())
    reset(leader, s.mode, s.by)
    quarantined = sum(len(pool.quarantined) for pool in leader.state.pools)
    return ResetAnswer(leader.state.epoch, aborted, quarantined)


def drain_requested(leader: Decider, s: st.DrainRequested) -> DrainAnswer:
    """Take nothing new; reset when the last live slot and the last copy have ended, or the time is over."""
    if s.deadline_ns <= 0:
        raise Refused(f"deadline_ns must be above 0, got {s.deadline_ns}")
    if leader.state.draining:
        raise Refused("the leader drains already")
    answer = DrainAnswer(leader.state.seq, len(leader.state.slots))
    leader.emit(ev.DrainBegun, s.deadline_ns, s.by)
    leader.ask(SetDeadline(leader.aids.deadline("drain", 0), s.deadline_ns, Clock.ENGINE))
    return answer


def finish_drain(leader: Decider) -> None:
    """At the end of a stimulus: a drain whose last slot and last copy are gone becomes the reset."""
    if leader.state.draining and not leader.state.slots and not leader.state.operations:
        reset(leader, ResetMode.LOGICAL)


def reset(leader: Decider, mode: ResetMode, by: str = "") -> None:
    """Release holds, candidates, staging and slots, quarantine what copies still touch, clear the pools."""
    leader.gate, leader.awake, leader.calls = None, None, False  # nobody is stopped on the way; armed again at the end
    leader.aids.loads.clear()  # nobody is woken: the engine forgets its requests
    leader.clear_deadline("drain", 0)
    leader.emit(ev.ResetBegun, mode, by)
    for hold in list(leader.state.holds.values()):
        leader.release_hold(hold, HoldEnd.CANCELLED, "reset")
    thaw(leader, HoldEnd.CANCELLED, "")
    _close_candidates(leader)
    for slot in list(leader.state.slots.values()):
        leader.release_staging(slot, ReleaseReason.RESET)
        leader.release_device_blocks(slot, ReleaseReason.RESET)
        finish(leader, slot, FinishReason.ABORTED if slot.reason is None else slot.reason)
    leader.emit(ev.ResetDone, mode, leader.state.epoch + 1)
    _start_aids_anew(leader)
    for pool in leader.state.pools:
        if pool.info.authority is Authority.ENGINE:
            leader.ask(ClearDevicePool(pool.info.source, pack_ids(sorted(pool.quarantined))))
        if mode is ResetMode.PHYSICAL:
            leader.ask(ZeroBlocks(pool.info.pool))


def _close_candidates(leader: Decider) -> None:
    for candidate in list(leader.state.candidates.values()):
        if candidate.candidate not in leader.state.candidates:
            continue
        if candidate.operation is None:
            skip(leader, candidate, SkipReason.SLOT_STOPPING)
            continue
        operation = leader.state.operations[candidate.operation]
        running = operation.started and operation.operation not in leader.aids.complete
        if running:
            told = tuple(sorted(operation.reported))
            for index, places in (
                (operation.source_pool, operation.sources), (operation.target_pool, operation.targets),
            ):
                leader.emit(ev.BlocksQuarantined, index, operation.operation, pack_ids(places), told)
        elif not operation.started and operation.operation not in leader.aids.undispatched:
            leader.ask(CancelTransfer(operation.operation))
        drop(leader, leader.state.pools[operation.target_pool], operation, operation.targets)
        end_candidate(leader, operation, CandidateStatus.CANCELLED)


def _start_aids_anew(leader: Decider) -> None:
    """Forget all policy state; breakpoint counts and deadlines' numbers go on."""
    old = leader.aids
    leader.box = AidsBox(leader.config.eviction)
    for pool in leader.state.pools:
        ours = pool.info.authority is Authority.LEADER
        leader.box.add_pool(len(pool) if ours else 0)
        if ours and pool.quarantined:
            leader.aids.pools[pool.info.pool].unused = 0
            leader.free_places(pool, [place for place in range(len(pool)) if place not in pool.quarantined])
    leader.look_at_pools()
    leader.aids.matches = old.matches
    leader.aids.logged = old.logged
    leader.aids.paused = old.paused
    leader.aids.iterations = old.iterations
    leader.aids.next_deadline = old.next_deadline
    leader.aids.deadlines = {number: what for number, what in old.deadlines.items() if what[0] == "expiry"}
    leader.aids.deadline_of = {f"{kind} {key}": number for number, (kind, key) in leader.aids.deadlines.items()}
    leader.rearm()


def blocks_reported(leader: Decider, s: st.BlocksReported) -> None:
    """An engine's event stream told what a pool stored and removed."""
    if not 0 <= s.pool < len(leader.state.pools):
        raise Refused(f"pool {s.pool} was not declared")
    if leader.state.pools[s.pool].info.authority is Authority.OBSERVED:
        places_reported(leader, leader.state.pools[s.pool], s)
        return
    if leader.state.pools[s.pool].info.authority is not Authority.STREAM:
        raise Refused(f"pool {s.pool} is not described by an event stream")
    stored = unpack_hashes(s.stored)
    if len(stored) > REPORTED_BLOCKS_MAX or EMPTY_HASH in stored:
        raise Refused(f"stored must be at most {REPORTED_BLOCKS_MAX} hashes, none 0, got {len(stored)}")
    if len(s.removed) % HASH_BYTES or len(s.removed) > REPORTED_BLOCKS_MAX * HASH_BYTES:
        raise Refused(f"removed must be at most {REPORTED_BLOCKS_MAX} hashes, got {len(s.removed)} bytes")
    pool = leader.state.pools[s.pool]
    capacity = pool.info.capacity_blocks
    if capacity is not None and len(stored) > capacity:
        raise Refused(f"stored {len(stored)} blocks do not fit a pool of {capacity}")
    if capacity is None or s.cleared or len(stored) <= _room_after(pool, capacity, s.removed):
        leader.emit(ev.BlocksSeen, s.pool, s.stored, s.removed, s.cleared)
    else:  # it was told of more than the pool holds: removals were lost, and what is known of it is void
        leader.emit(ev.BlocksSeen, s.pool, s.stored, b"", True)
        leader.emit(ev.SourceLost, pool.info.source, 0, 0, False)


def _room_after(pool: PoolFacts, capacity: int, removed: bytes) -> int:
    """Free places of a stream's pool when these hashes, each as often as it is named, have gone."""
    gone = Counter(unpack_hashes(removed))
    return capacity - pool.resident_blocks + sum(min(len(pool.places_of(key)), times) for key, times in gone.items())


def source_gapped(leader: Decider, s: st.SourceGapped) -> None:
    """Reports of this source were lost."""
    leader.emit(ev.SourceLost, s.source, s.first, s.last, False)


def source_restarted(leader: Decider, s: st.SourceRestarted) -> None:
    """The source began again: what its stream said is void."""
    if s.replaceable and all(pool.info.source != s.source for pool in leader.state.pools):
        return  # it had no pool, so nothing that is known of it is lost
    leader.emit(ev.SourceLost, s.source, 0, 0, True, s.gone, s.gone and s.replaceable)
