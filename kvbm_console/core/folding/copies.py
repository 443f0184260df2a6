"""Copies: candidates, their operations and batches.

Law of this file: a candidate reaches one terminal status, once, and its operation holds its references until then.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import CandidateStatus
from kvbm_console.core.slots import CandidateFacts, OperationFacts

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState


def _candidate_planned(state: "CacheState", e: ev.CandidatePlanned) -> None:
    state.candidates[e.candidate] = CandidateFacts(
        candidate=e.candidate, slot=e.slot, route=e.route, hashes=unpack_hashes(e.hashes),
        targets=unpack_ids(e.targets), first_block=e.first_block, status=CandidateStatus.PENDING_EVALUATION,
        planned_ns=e.at_ns, for_slot=e.for_slot, request=e.request,
    )
    state.next_candidate = e.candidate + 1
    if e.slot is not None:
        slot = state.known_slot(e.slot)
        slot.outstanding = {*slot.outstanding, e.candidate}
        if e.route.is_load and e.first_block is not None and e.first_block <= len(slot.hashes):
            slot.hashes += state.candidates[e.candidate].hashes[len(slot.hashes) - e.first_block :]  # behind the prompt


def _candidate(state: "CacheState", number: int) -> CandidateFacts:
    try:
        return state.candidates[number]
    except KeyError:
        raise FoldError(f"no open candidate {number}") from None


def _candidate_enqueued(state: "CacheState", e: ev.CandidateEnqueued) -> None:
    candidate = _candidate(state, e.candidate)
    candidate.enqueued = True
    candidate.enqueued_ns = e.at_ns


def _candidate_evaluated(state: "CacheState", e: ev.CandidateEvaluated) -> None:
    candidate = _candidate(state, e.candidate)
    candidate.found = e.found
    candidate.evaluated_ns = e.at_ns


def _close_candidate(state: "CacheState", number: int, status: CandidateStatus) -> None:
    candidate = state.candidates.pop(number)
    if candidate.slot is not None and candidate.slot in state.slots:
        slot = state.slots[candidate.slot]
        slot.outstanding = slot.outstanding - {number}
    state.totals.candidates_ended[status] += 1


def _candidate_skipped(state: "CacheState", e: ev.CandidateSkipped) -> None:
    if _candidate(state, e.candidate).status is not CandidateStatus.PENDING_EVALUATION:
        raise FoldError(f"candidate {e.candidate} was promoted and cannot be skipped")
    _close_candidate(state, e.candidate, CandidateStatus.SKIPPED)
    state.totals.count_skip(e.reason)


def _candidate_promoted(state: "CacheState", e: ev.CandidatePromoted) -> None:
    candidate = _candidate(state, e.candidate)
    sources, targets = unpack_ids(e.sources), unpack_ids(e.targets)
    state.operations[e.operation] = OperationFacts(
        operation=e.operation, candidate=e.candidate, batch=e.batch, epoch=state.epoch,
        source_pool=e.source_pool, target_pool=e.target_pool, sources=sources, targets=targets,
    )
    state.known_pool(e.source_pool).ref(sources)
    state.known_pool(e.target_pool).ref(targets)
    candidate.status = CandidateStatus.PROMOTED
    candidate.operation = e.operation
    candidate.promoted_ns = e.at_ns
    state.batches.setdefault(e.batch, set()).add(e.candidate)
    state.totals.thrash_blocks += e.thrash
    for tier, blocks in enumerate(e.returned):
        state.totals.returned_blocks[tier] += blocks
    state.next_operation = e.operation + 1


def _operation_started(state: "CacheState", e: ev.OperationStarted) -> None:
    operation = state.operations[e.operation]
    operation.started = True
    operation.told_blocks, operation.size_bytes = e.blocks, e.size_bytes
    state.candidates[operation.candidate].started_ns = e.at_ns


def _operation_reported(state: "CacheState", e: ev.OperationReported) -> None:
    operation = state.operations[e.operation]
    operation.reported = {*operation.reported, e.rank}
    if e.wire_ns is not None:
        candidate = state.candidates[operation.candidate]
        candidate.started_ns = max(candidate.started_ns or 0, e.at_ns - e.wire_ns)
    if not e.ok:
        failed = unpack_ids(e.failed) or range(operation.blocks)
        operation.failed = {*operation.failed, *failed}
        operation.error = e.error


def _candidate_ended(state: "CacheState", e: ev.CandidateEnded) -> None:
    candidate = _candidate(state, e.candidate)
    if candidate.operation is None:
        raise FoldError(f"candidate {e.candidate} has no operation that could end")
    operation = state.operations.pop(candidate.operation)
    state.pools[operation.source_pool].unref(operation.sources)
    state.pools[operation.target_pool].unref(operation.targets)
    _close_candidate(state, e.candidate, e.status)
    if e.status in (CandidateStatus.COMPLETED, CandidateStatus.FAILED):
        moved = operation.blocks - len(operation.failed)
        totals, label = state.totals, candidate.route.label
        totals.moved_blocks[label] = totals.moved_blocks.get(label, 0) + moved
        if operation.size_bytes is not None:
            moved_bytes = operation.size_bytes * moved // max(1, operation.blocks)
            totals.sized_blocks[label] = totals.sized_blocks.get(label, 0) + moved
            totals.moved_bytes[label] = totals.moved_bytes.get(label, 0) + moved_bytes
    members = state.batches[operation.batch]
    members.discard(e.candidate)


def _batch_ended(state: "CacheState", e: ev.BatchEnded) -> None:
    if state.batches.pop(e.batch):
        raise FoldError(f"batch {e.batch} still has members in flight")


def _completion_refused(state: "CacheState", e: ev.CompletionRefused) -> None:
    state.totals.completions_refused += 1
    if e.operation in state.late:
        state.late[e.operation].add(e.rank)


FOLDS: Final[dict[type[ev.Event], Callable[["CacheState", Any], None]]] = {
    ev.CandidatePlanned: _candidate_planned,
    ev.CandidateEnqueued: _candidate_enqueued,
    ev.CandidateEvaluated: _candidate_evaluated,
    ev.CandidateSkipped: _candidate_skipped,
    ev.CandidatePromoted: _candidate_promoted,
    ev.OperationStarted: _operation_started,
    ev.OperationReported: _operation_reported,
    ev.CandidateEnded: _candidate_ended,
    ev.BatchEnded: _batch_ended,
    ev.CompletionRefused: _completion_refused,
}
