"""Copies of an engine that is only watched: what its connector loads and stores, as candidates that run already.

Law of this file: nothing is planned or asked for; a copy begins when the engine says so and ends when it says so.
"""

from collections.abc import Sequence

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.candidates import OperationFacts
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_ids
from kvbm_console.core.ids import Authority, CandidateStatus, Route, SlotState, Tier
from kvbm_console.core.leader.aids import LoadPart
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.pipeline import drop, end_candidate, end_operation
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts


def lower_of(leader: Decider, source: int) -> PoolFacts | None:
    """Where this engine's connector keeps blocks."""
    for pool in leader.state.pools:
        if pool.info.source == source and pool.info.authority is Authority.STREAM and pool.info.tier is not Tier.G1:
            return pool
    return None


def load(
    leader: Decider, pool: PoolFacts, lower: PoolFacts | None, slot: SlotFacts, reused: int, external: int, tokens: int
) -> None:
    """The engine loads ``external`` blocks from below: a copy that runs until the connector says that it ended."""
    if slot.state is not SlotState.ONBOARD_STAGED:
        leader.move(slot, SlotState.ONBOARD_STAGED, detail=tokens)
    hashes = slot.hashes[reused : reused + external]
    targets = slot.device_blocks[reused : reused + len(hashes)]
    if lower is None or not hashes:
        leader.move(slot, SlotState.ONBOARDING, detail=tokens)
        return
    leader.aids.loads[slot.slot] = [
        LoadPart(leader.state.next_candidate, int(lower.info.tier), reused, len(hashes))
    ]
    number = _plan(leader, slot, Route.of(lower.info.tier, pool.info.tier), hashes, targets, reused)
    leader.move(slot, SlotState.ONBOARDING, detail=tokens)
    operation = leader.state.next_operation
    leader.emit(ev.BlocksReserved, pool.info.pool, operation, pack_ids(targets), pack_hashes(hashes))
    _promote(leader, number, lower, pool, [], targets)


def _plan(
    leader: Decider, slot: SlotFacts, route: Route, hashes: list[int], targets: list[int], first: int
) -> int:
    number = leader.state.next_candidate
    leader.emit(
        ev.CandidatePlanned, number, slot.slot, route, pack_hashes(hashes), pack_ids(targets if route.is_load else []),
        first,
    )
    return number


def _promote(
    leader: Decider, number: int, source: PoolFacts, target: PoolFacts, sources: list[int], targets: list[int]
) -> None:
    """The engine copies already. Places of a pool that is known by hash alone are not named."""
    operation, candidate = leader.state.next_operation, leader.state.candidates[number]
    leader.emit(ev.CandidateEnqueued, number)
    leader.emit(ev.CandidateEvaluated, number, len(sources) or len(targets), None)
    leader.emit(
        ev.CandidatePromoted, number, operation, number, source.info.pool, target.info.pool, pack_ids(sources),
        pack_ids(targets), 0,
        leader.returned(candidate.hashes, source, target) if candidate.route.is_load else ev.NOTHING_RETURNED,
    )
    leader.aids.batch_of[number] = number
    leader.emit(ev.OperationStarted, operation)


# --- copies that ended ---


def copies_observed(leader: Decider, s: st.CopiesObserved) -> None:
    """Loads and stores of these requests ended."""
    lost = set(unpack_ids(s.failed_ids))
    for request in s.loaded:
        slot = leader.state.slot_named(request)
        for operation in copies_of(leader, request, loads=True):
            failed = [at for at, place in enumerate(operation.targets) if place in lost]
            report(leader, operation, failed=request in s.failed or bool(failed), places=failed)
            if slot is not None and slot.state is SlotState.FINISHING:
                discard(leader, operation)
    for request in s.sent:
        for operation in copies_of(leader, request, loads=False):
            report(leader, operation, failed=False)


def copies_of(leader: Decider, request: str, *, loads: bool | None) -> list[OperationFacts]:
    slot = leader.state.slot_named(request)
    if slot is None:
        return []
    found = [leader.state.candidates[number] for number in sorted(slot.outstanding)]
    return [
        leader.state.operations[candidate.operation] for candidate in found
        if candidate.operation is not None and (loads is None or candidate.route.is_load is loads)
    ]


def report(leader: Decider, operation: OperationFacts, *, failed: bool, places: Sequence[int] = ()) -> None:
    error = "the connector could not load it" if failed else ""
    leader.emit(ev.OperationReported, operation.operation, 0, not failed, error, pack_ids(places))
    if operation.operation not in leader.aids.complete:
        leader.aids.complete.append(operation.operation)


def discard(leader: Decider, operation: OperationFacts) -> None:
    """A load ended after its request: the engine never names what it brought."""
    leader.aids.complete.remove(operation.operation)
    drop(leader, leader.state.pools[operation.target_pool], operation, operation.targets)
    end_candidate(leader, operation, CandidateStatus.FAILED if operation.failed else CandidateStatus.COMPLETED)


def close_copies(leader: Decider, slot: SlotFacts) -> None:
    """Copies whose end was not seen: the engine does not wait for them any more."""
    for operation in copies_of(leader, slot.request, loads=None):
        target = leader.state.pools[operation.target_pool]
        if operation.operation in leader.aids.complete:
            leader.aids.complete.remove(operation.operation)
        if operation.targets:
            drop(leader, target, operation, operation.targets)
        leader.aids.loads.pop(slot.slot, None)
        end_candidate(leader, operation, CandidateStatus.CANCELLED)


def end_load(leader: Decider, slot: SlotFacts) -> None:
    """A slot that computes has what it waited for: a load inside the step ends with it."""
    for operation in copies_of(leader, slot.request, loads=True):
        report(leader, operation, failed=False)
        end_operation(leader, operation)


def store(leader: Decider, slot: SlotFacts) -> None:
    lower = lower_of(leader, slot.source)
    if slot.device_pool is None or lower is None or slot.outstanding:
        return
    pool = leader.state.pools[slot.device_pool]
    places = [place for place in slot.device_blocks[: slot.filled_blocks] if pool.content[place] == READY]
    if places:
        hashes = [pool.hash_of[place] for place in places]
        number = _plan(leader, slot, Route.of(pool.info.tier, lower.info.tier), hashes, [], 0)
        _promote(leader, number, pool, lower, places, [])
