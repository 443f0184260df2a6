"""The connector of a watched engine: its copies, the time in its calls, and its own statistics.

A connector copies blocks by orders of its own, and a request does not wait for its stores. So a store is a candidate
without a slot: ``for_slot`` names the slot whose blocks are copied, also when the slot has ended. Such a copy holds no
places, because the engine decides by itself if it keeps a place that a copy still reads. A load is the load that the
allocation of its request began, and here it gets its size.

A tap around a lower tier may ask before a load begins. Then a breakpoint at ``dispatch.will`` holds the slot that the
load is for, and the operation starts with the end of the hold.

Example: step 7 orders the store of three blocks of request a. ``CopyBegun`` makes a candidate, an operation without
places, and an ``OperationStarted`` with 3 blocks and their bytes. Request a ends in step 8, and its slot closes. The
workers report the store in step 9, so ``CopyEnded`` ends the candidate.

Law of this file: the connector's own numbers are kept as they are, and nothing is inferred from a copy about the
content of a tier.
"""

import math
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import HASH_BYTES
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import Authority, CandidateStatus, Route, Site, WaitPoint
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.holds import held_at, strike
from kvbm_console.core.leader.pipeline import ERROR_CHARS_MAX, end_candidate
from kvbm_console.core.slots import OperationFacts
from kvbm_console.core.tiers import PoolFacts

NAMES_MAX: Final = 512
"""Methods and statistics of one report: connectors have some tens of each."""
COPIED_BLOCKS_MAX: Final = 1_048_576
"""Blocks of one copy: a prompt of sixteen million tokens. A copy that failed counts each of them."""
REQUESTS_MAX: Final = 4_096
"""Ended requests that are remembered, because a connector orders the last store of a request a step after its end."""


def remember(decider: Decider, request: str, slot: int) -> None:
    """The request has this slot, also for copies that begin after its end."""
    watched = decider.memory.watched
    watched.pop(request, None)
    watched[request] = slot
    if len(watched) > REQUESTS_MAX:
        del watched[next(iter(watched))]


def copy_begun(decider: Decider, s: st.CopyBegun) -> MatchAnswer | None:
    """A connector ordered a copy. If it ``asks``: ``tokens`` is None when the copy shall wait, else 0."""
    source, target = _pool(decider, s, s.source_pool), _pool(decider, s, s.target_pool)
    if source.info.tier is target.info.tier:
        raise Refused(f"a copy within {source.info.tier.name} has no route")
    if not 0 <= s.blocks <= COPIED_BLOCKS_MAX:
        raise Refused(f"blocks must be from 0 to {COPIED_BLOCKS_MAX}, got {s.blocks}")
    if len(s.hashes) > s.blocks * HASH_BYTES or len(s.hashes) % HASH_BYTES:
        raise Refused(f"{len(s.hashes)} bytes of hashes do not fit {s.blocks} blocks")
    if s.size_bytes is not None and s.size_bytes < 0:
        raise Refused(f"size_bytes must be at least 0, got {s.size_bytes}")
    told = decider.memory.told_copies.setdefault(s.source, {})
    if s.copy in told:
        raise Refused(f"copy {s.copy} has begun before")
    load = _waiting_load(decider, s.request, target)
    if load is not None:
        told[s.copy] = load.operation
        decider.emit(ev.OperationStarted, load.operation, s.blocks, s.size_bytes)
        return MatchAnswer(0, False) if s.asks else None
    state = decider.state
    number, operation = state.next_candidate, state.next_operation
    slot = state.slot_of.get(s.request, decider.memory.watched.get(s.request)) if s.request else None
    told[s.copy] = operation
    decider.emit(
        ev.CandidatePlanned, number, None, Route.of(source.info.tier, target.info.tier), s.hashes, b"", None, slot,
        s.request,
    )
    decider.emit(ev.CandidateEnqueued, number)
    decider.emit(ev.CandidateEvaluated, number, s.blocks, None)
    decider.emit(ev.CandidatePromoted, number, operation, number, source.info.pool, target.info.pool, b"", b"")
    decider.memory.batch_of[number] = number
    if s.asks and _held(decider, slot, number):
        assert slot is not None
        decider.memory.told_waiting.setdefault(slot, {})[operation] = s.blocks, s.size_bytes
        return MatchAnswer(None, False)
    decider.emit(ev.OperationStarted, operation, s.blocks, s.size_bytes)
    return MatchAnswer(0, False) if s.asks else None


def _held(decider: Decider, number: int | None, candidate: int) -> bool:
    """True if the slot that a load is for stands still at its dispatch."""
    slot = None if number is None else decider.state.slots.get(number)
    if slot is None:
        return False
    strike(decider, Site.DISPATCH_WILL, slot, slot.state, slot.state, decider.state.candidates[candidate])
    return held_at(decider, slot, WaitPoint.DISPATCH)


def _pool(decider: Decider, s: st.CopyBegun, index: int) -> PoolFacts:
    pools = decider.state.pools
    if not 0 <= index < len(pools) or pools[index].info.source != s.source:
        raise Refused(f"source {s.source} has no pool {index}")
    return pools[index]


def _waiting_load(decider: Decider, request: str, target: PoolFacts) -> OperationFacts | None:
    """The load of a request that was allocated and did not begin yet."""
    slot = decider.state.slot_named(request)
    if slot is None or target.info.authority is not Authority.OBSERVED:
        return None
    for number in sorted(slot.outstanding):
        candidate = decider.state.candidates[number]
        if candidate.route.is_load and candidate.operation is not None:
            operation = decider.state.operations[candidate.operation]
            if not operation.started:
                return operation
    return None


def copy_ended(decider: Decider, s: st.CopyEnded) -> None:
    """A connector's copy ended. A load ends with the report of its request, which also names the failed blocks."""
    if s.wire_ns is not None and s.wire_ns < 0:
        raise Refused(f"wire_ns must be at least 0, got {s.wire_ns}")
    number = decider.memory.told_copies.get(s.source, {}).pop(s.copy, None)
    operation = None if number is None else decider.state.operations.get(number)
    if operation is not None and decider.state.candidates[operation.candidate].slot is None:
        error = s.error[:ERROR_CHARS_MAX] or "the connector could not copy it"
        _end(decider, operation, s.status, error, s.wire_ns)


def _end(
    decider: Decider, operation: OperationFacts, status: CandidateStatus, error: str = "", wire_ns: int | None = None
) -> None:
    _stop_waiting(decider, operation)
    if status is not CandidateStatus.CANCELLED:
        failed = status is CandidateStatus.FAILED
        decider.emit(ev.OperationReported, operation.operation, 0, not failed, error if failed else "", b"", wire_ns)
    end_candidate(decider, operation, status)


def _stop_waiting(decider: Decider, operation: OperationFacts) -> None:
    """The engine did not wait for the end of the hold."""
    slot = decider.state.candidates[operation.candidate].for_slot
    waiting = {} if slot is None else decider.memory.told_waiting.get(slot, {})
    if operation.operation in waiting:
        blocks, size_bytes = waiting.pop(operation.operation)
        if not waiting and slot is not None:
            del decider.memory.told_waiting[slot]
        decider.emit(ev.OperationStarted, operation.operation, blocks, size_bytes)


def cancel_told(decider: Decider, source: int) -> None:
    """The engine ended or began again: its connector's copies are not reported any more."""
    for number in decider.memory.told_copies.pop(source, {}).values():
        operation = decider.state.operations.get(number)
        if operation is not None and decider.state.candidates[operation.candidate].slot is None:
            _end(decider, operation, CandidateStatus.CANCELLED)


def connector_reported(decider: Decider, s: st.ConnectorReported) -> None:
    """Figures of the connectors since their engine began. Those that are no number are left out: a mean of nothing."""
    rows = {len(s.connectors), len(s.methods), len(s.calls), len(s.total_ns), len(s.longest_ns)}
    if len(rows) > 1 or len(s.stats) != len(s.values):
        raise Refused("the columns of a report of connectors must have one length")
    if len(s.methods) > NAMES_MAX or len(s.stats) > NAMES_MAX:
        raise Refused(f"a report names at most {NAMES_MAX} methods and {NAMES_MAX} figures")
    stats, values = s.stats, s.values
    if any(map(math.isnan, values)):  # NaN differs from itself, so a rerun would tell of a difference
        told = [(stat, value) for stat, value in zip(stats, values, strict=True) if not math.isnan(value)]
        stats, values = tuple(stat for stat, _ in told), tuple(value for _, value in told)
    decider.emit(
        ev.ConnectorMeasured, s.source, s.connectors, s.methods, s.calls, s.total_ns, s.longest_ns, stats, values
    )


def call_reported(decider: Decider, s: st.CallReported) -> None:
    """A call blocked its engine."""
    slot = decider.state.slot_of.get(s.request)
    decider.emit(ev.CallBlocked, slot, s.source, s.request, s.connector, s.method, s.took_ns)
