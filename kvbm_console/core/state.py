"""Facts: what is where, who holds it, who waits. One state, one mutator.

Law of this file: ``CacheState.apply(event)`` is the only way in which facts change. The leader, the console's mirror,
replay and every test use it, so folding the events of a leader from any snapshot gives the leader's digest (I10).
Apply checks what it needs to stay consistent and raises ``FoldError``; it never decides.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.breakpoints import POINT_OF_SITE, POINT_OF_STATE, BreakpointFacts, FreezeFacts, HoldFacts
from kvbm_console.core.candidates import CandidateFacts, OperationFacts
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import (
    Authority,
    CandidateStatus,
    Condition,
    FinishReason,
    HoldEnd,
    ReleaseReason,
    SkipReason,
    SlotState,
    Suspend,
    Tier,
    WaitPoint,
)
from kvbm_console.core.slots import SlotFacts, check_move
from kvbm_console.core.tiers import READY, WRITING, PoolFacts, PoolInfo

_SKIPPED: Final = frozenset({SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE})
GONE: Final = -1
"""Of ``CacheState.lost_sources``: the source ended."""
_PREFILLING, _PREEMPTED = SlotState.PREFILLING, SlotState.PREEMPTED


class Totals(msgspec.Struct, array_like=True):
    """Counts since the incarnation began; a reset keeps them. Blocks where the name says blocks, else occurrences."""

    slots_opened: int = 0
    finished: list[int] = msgspec.field(default_factory=lambda: [0] * len(FinishReason))
    """Requests by ``FinishReason``."""
    preemptions: int = 0
    requests_preempted: int = 0
    """Requests that were preempted at least once."""
    prompt_blocks: int = 0
    """Prompt blocks of all admissions: the denominator of every hit rate (BC-5)."""
    hit_blocks: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    """Prompt blocks found in G1 to G4; blocks of failed loads are taken back."""
    lost_blocks: int = 0
    """Hits taken back because their load failed."""
    evicted_blocks: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    """Blocks evicted from G1 to G4."""
    moved_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    """Blocks whose copy completed, by the label of their route."""
    thrash_blocks: int = 0
    """Blocks onboarded within the window after their offload (BC-6)."""
    candidates_ended: list[int] = msgspec.field(default_factory=lambda: [0] * len(CandidateStatus))
    """Candidates by terminal status."""
    skipped: list[int] = msgspec.field(default_factory=lambda: [0] * len(SkipReason))
    """Skipped candidates by reason."""
    rejected: int = 0
    completions_refused: int = 0
    violations: int = 0
    breakpoint_hits: int = 0
    holds: int = 0
    holds_ended: list[int] = msgspec.field(default_factory=lambda: [0] * len(HoldEnd))
    hold_denied: int = 0


class CacheState:
    """The facts of one leader.

    ``seq`` is the number of the next event, ``n`` the cause of the last one, ``at_ns`` its time. ``slot_of`` maps a
    request to its slot, ``standing`` holds the requests whose hold is at the schedule point; both are derived.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.n = -1
        self.at_ns = 0
        self.epoch = 0
        self.iteration = 0
        self.running = 0
        self.waiting = 0
        self.draining = False
        self.pools: list[PoolFacts] = []
        self.slots: dict[int, SlotFacts] = {}
        self.candidates: dict[int, CandidateFacts] = {}
        self.operations: dict[int, OperationFacts] = {}
        self.batches: dict[int, set[int]] = {}
        self.late: dict[int, set[int]] = {}
        """Operations of an older epoch that still run: the ranks that have reported."""
        self.holds: dict[int, HoldFacts] = {}
        self.breakpoints: dict[int, BreakpointFacts] = {}
        self.frozen: FreezeFacts | None = None
        self.leases: dict[str, bool] = {}
        self.lost_sources: dict[int, int] = {}
        """Sources of which reports were lost since they were last known whole: how often, ``GONE`` for one that ended.
        Their counts are no facts."""
        self.totals = Totals()
        self.next_slot = 0
        self.next_candidate = 0
        self.next_operation = 0
        self.next_hold = 1
        self.next_breakpoint = 1
        self.slot_of: dict[str, int] = {}
        self.standing: set[str] = set()

    # --- questions -------------------------------------------------------------------------------

    def pool_of(self, tier: Tier, source: int = 0) -> PoolFacts | None:
        """The pool of this tier that serves ``source``: its own one, else the leader's."""
        shared = None
        for pool in self.pools:
            if pool.info.tier is tier:
                if pool.info.source == source:
                    return pool
                if pool.info.source == 0:
                    shared = pool
        return shared

    def slot_named(self, request: str) -> SlotFacts | None:
        """The live slot of a request."""
        number = self.slot_of.get(request)
        return None if number is None else self.slots[number]

    @property
    def all_held(self) -> bool:
        """Whether there are live slots and every one of them stands still in a hold."""
        return bool(self.slots) and all(
            slot.hold is not None and self.holds[slot.hold].parked for slot in self.slots.values()
        )

    @property
    def engines_paused(self) -> bool:
        """Whether engines form no iterations: everything is frozen, or a hold suspends all."""
        return self.frozen is not None or (
            bool(self.holds) and any(hold.suspend is Suspend.ALL for hold in self.holds.values())
        )

    @property
    def pipeline_closed(self) -> bool:
        """Whether no candidate is evaluated or promoted."""
        return self.frozen is not None or (
            bool(self.holds) and any(hold.suspend is not Suspend.SLOT for hold in self.holds.values())
        )

    # --- the only mutator ------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Fold one event. Raises ``FoldError`` when it is not the next one or does not fit; then discard this state."""
        seq, at_ns = self.seq, event.at_ns
        if event.seq != seq:
            raise FoldError(f"event {event.seq} does not follow event {seq - 1}")
        if at_ns < self.at_ns:
            raise FoldError(f"event {seq} is at {at_ns} ns, before {self.at_ns} ns")
        APPLY[type(event)](self, event)
        self.seq = seq + 1
        self.at_ns = at_ns
        self.n = event.cause

    def _slot(self, number: int) -> SlotFacts:
        try:
            return self.slots[number]
        except KeyError:
            raise FoldError(f"no slot {number}") from None

    def _pool(self, index: int) -> PoolFacts:
        if not 0 <= index < len(self.pools):
            raise FoldError(f"no pool {index}")
        return self.pools[index]

    def _device(self, slot: SlotFacts) -> PoolFacts:
        if slot.device_pool is None:
            raise FoldError(f"slot {slot.slot} has no device blocks")
        return self.pools[slot.device_pool]

    def _pool_known(self, e: ev.PoolKnown) -> None:
        if e.pool != len(self.pools):
            raise FoldError(f"pool {e.pool} does not follow pool {len(self.pools) - 1}")
        self.pools.append(
            PoolFacts(
                PoolInfo(
                    e.pool, e.source, e.dp_rank, e.group, e.tier, e.medium, e.capacity_blocks, e.block_tokens,
                    e.authority,
                )
            )
        )

    def _slot_opened(self, e: ev.SlotOpened) -> None:
        if e.slot != self.next_slot or e.request in self.slot_of:
            raise FoldError(f"slot {e.slot} of request {e.request!r} cannot open")
        hashes = unpack_hashes(e.hashes)
        self.slots[e.slot] = SlotFacts(
            slot=e.slot, request=e.request, source=e.source, state=SlotState.INITIALIZED, since_ns=e.at_ns,
            opened_ns=e.at_ns, hashes=hashes, prompt_tokens=e.prompt_tokens, output_limit=e.output_limit,
            priority=e.priority, session=e.session, prompt_blocks=len(hashes),
        )
        self.slot_of[e.request] = e.slot
        self.next_slot = e.slot + 1
        self.totals.slots_opened += 1

    def _slot_cloned(self, e: ev.SlotCloned) -> None:
        parent = self._slot(e.parent)
        if e.slot != self.next_slot or e.request in self.slot_of:
            raise FoldError(f"clone {e.slot} of request {e.request!r} cannot open")
        ids = unpack_ids(e.ids)
        self.slots[e.slot] = SlotFacts(
            slot=e.slot, request=e.request, source=parent.source, state=parent.state, since_ns=e.at_ns,
            opened_ns=e.at_ns, hashes=list(parent.hashes), prompt_tokens=parent.prompt_tokens,
            output_limit=parent.output_limit, priority=parent.priority, session=parent.session,
            prompt_blocks=parent.prompt_blocks, parent=e.parent, anchor_tokens=parent.computed_tokens(self.iteration),
            anchor_iteration=self.iteration, evaluated_blocks=parent.evaluated_blocks, device_pool=parent.device_pool,
            device_blocks=ids, filled_blocks=parent.filled_blocks, cached=parent.cached,
            first_iteration=parent.first_iteration, skipped_since=self.iteration,
        )
        pool = self._device(parent)
        pool.require_known(ids)
        pool.ref(ids)
        self.slot_of[e.request] = e.slot
        self.next_slot = e.slot + 1
        self.totals.slots_opened += 1

    def _slot_moved(self, e: ev.SlotMoved) -> None:
        slot = self._slot(e.slot)
        old, new = e.old, e.new
        if slot.state is not old:
            raise FoldError(f"slot {e.slot} is {slot.state.label}, not {old.label}")
        check_move(old, new)
        slot.state = new
        slot.since_ns = e.at_ns
        slot.anchor_tokens = e.computed_tokens
        slot.anchor_iteration = self.iteration
        slot.evaluated_blocks = e.evaluated_blocks
        slot.cached = e.cached
        if slot.hold is not None:
            self._repoint(slot)
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
            self.totals.preemptions += 1
            self.totals.requests_preempted += slot.preemptions == 0
            slot.preemptions += 1
            slot.last_answer = None
            slot.local_blocks = 0
        reason = e.reason
        if reason is not None and slot.reason is None:
            slot.reason = reason
            self.totals.finished[reason] += 1

    def _repoint(self, slot: SlotFacts) -> None:
        """A pending hold whose slot moved on waits at the next point of its new state, unless its site fixes one."""
        assert slot.hold is not None
        hold = self.holds[slot.hold]
        point = POINT_OF_STATE[slot.state]
        if hold.parked or hold.site in POINT_OF_SITE or hold.point is WaitPoint.CALL or point is None:
            return
        hold.point = point
        if point is WaitPoint.SCHEDULE:
            self.standing.add(slot.request)
        else:
            self.standing.discard(slot.request)

    def _slot_closed(self, e: ev.SlotClosed) -> None:
        slot = self._slot(e.slot)
        if slot.state is not SlotState.FINISHED or slot.device_blocks or slot.staged or slot.outstanding or slot.hold:
            raise FoldError(f"slot {e.slot} is {slot.state.label} and still owns something")
        del self.slots[e.slot]
        del self.slot_of[slot.request]

    def _lookup_answered(self, e: ev.LookupAnswered) -> None:
        slot = self._slot(e.slot)
        slot.local_blocks = e.local_blocks
        slot.last_answer = (e.answer, e.local_blocks, e.first_miss)

    def _blocks_staged(self, e: ev.BlocksStaged) -> None:
        ids = unpack_ids(e.ids)
        pool = self._pool(e.pool)
        pool.require_known(ids, e.ids)
        pool.ref(ids, e.ids)
        slot = self._slot(e.slot)
        slot.staged = [*slot.staged, (e.pool, ids)]

    def _staging_released(self, e: ev.StagingReleased) -> None:
        slot = self._slot(e.slot)
        for index, ids in slot.staged:
            self.pools[index].unref(ids)
        slot.staged = []

    def _device_blocks_assigned(self, e: ev.DeviceBlocksAssigned) -> None:
        ids, column, counts = unpack_ids(e.ids), e.ids, e.counts
        pool = self._pool(e.pool)
        pool.require_known(ids, column)
        if sum(counts) != len(ids) or len(counts) != len(e.slots):
            raise FoldError(f"{len(ids)} blocks do not match counts of {sum(counts)}")
        at = 0
        for number, count in zip(e.slots, counts):  # noqa: B905 (compared above)
            slot = self._slot(number)
            part = ids if count == len(ids) else ids[at : at + count]
            at += count
            if not slot.device_blocks:
                size = pool.info.block_tokens
                slot.device_pool = e.pool
                slot.filled_blocks = e.reused + e.external_tokens // size
                slot.anchor_tokens = e.reused * size + e.external_tokens
                slot.anchor_iteration = self.iteration
                slot.device_blocks = part
            else:
                slot.device_blocks.extend(part)
        pool.ref(ids, column)

    def _device_blocks_released(self, e: ev.DeviceBlocksReleased) -> None:
        column = e.ids
        slot, ids = self._slot(e.slot), unpack_ids(column)
        pool = self._device(slot)
        if len(ids) == len(slot.device_blocks):
            slot.device_blocks = []
            slot.filled_blocks = 0
        else:
            gone = set(ids)
            slot.device_blocks = [block for block in slot.device_blocks if block not in gone]
            slot.filled_blocks = min(slot.filled_blocks, len(slot.device_blocks))
        pool.unref(ids, column)

    def _blocks_filled(self, e: ev.BlocksFilled) -> None:
        ids, hashes = unpack_ids(e.ids), unpack_hashes(e.hashes)
        self._pool(e.pool).store(ids, hashes, READY, e.at_ns, (e.ids, e.hashes))
        at = 0
        for number, count in zip(e.slots, e.counts, strict=True):
            slot = self._slot(number)
            slot.filled_blocks += count
            beyond = slot.filled_blocks - len(slot.hashes)
            if beyond > 0:
                slot.hashes.extend(hashes[at + count - beyond : at + count])
            at += count

    def _blocks_evicted(self, e: ev.BlocksEvicted) -> None:
        pool = self._pool(e.pool)
        ids = unpack_ids(e.ids)
        pool.evict(ids, e.ids)
        self.totals.evicted_blocks[pool.info.tier - 1] += len(ids)

    def _blocks_reserved(self, e: ev.BlocksReserved) -> None:
        self._pool(e.pool).store(unpack_ids(e.ids), unpack_hashes(e.hashes), WRITING, e.at_ns, (e.ids, e.hashes))

    def _blocks_ready(self, e: ev.BlocksReady) -> None:
        self._pool(e.pool).make_ready(unpack_ids(e.ids), e.at_ns)

    def _blocks_dropped(self, e: ev.BlocksDropped) -> None:
        pool = self._pool(e.pool)
        if e.why is ReleaseReason.EPOCH:
            pool.lift(e.operation)
            self.late.pop(e.operation, None)
        else:
            pool.forget(unpack_ids(e.ids))

    def _blocks_quarantined(self, e: ev.BlocksQuarantined) -> None:
        self._pool(e.pool).quarantine(unpack_ids(e.ids), e.operation)
        self.late[e.operation] = set(e.reported)

    def _candidate_planned(self, e: ev.CandidatePlanned) -> None:
        self.candidates[e.candidate] = CandidateFacts(
            candidate=e.candidate, slot=e.slot, route=e.route, hashes=unpack_hashes(e.hashes),
            targets=unpack_ids(e.targets), first_block=e.first_block, status=CandidateStatus.PENDING_EVALUATION,
            planned_ns=e.at_ns,
        )
        self.next_candidate = e.candidate + 1
        if e.slot is not None:
            slot = self._slot(e.slot)
            slot.outstanding = {*slot.outstanding, e.candidate}

    def _candidate(self, number: int) -> CandidateFacts:
        try:
            return self.candidates[number]
        except KeyError:
            raise FoldError(f"no open candidate {number}") from None

    def _candidate_enqueued(self, e: ev.CandidateEnqueued) -> None:
        candidate = self._candidate(e.candidate)
        candidate.enqueued = True
        candidate.enqueued_ns = e.at_ns

    def _candidate_evaluated(self, e: ev.CandidateEvaluated) -> None:
        candidate = self._candidate(e.candidate)
        candidate.found = e.found
        candidate.evaluated_ns = e.at_ns

    def _close_candidate(self, number: int, status: CandidateStatus) -> None:
        candidate = self.candidates.pop(number)
        if candidate.slot is not None and candidate.slot in self.slots:
            slot = self.slots[candidate.slot]
            slot.outstanding = slot.outstanding - {number}
        self.totals.candidates_ended[status] += 1

    def _candidate_skipped(self, e: ev.CandidateSkipped) -> None:
        if self._candidate(e.candidate).status is not CandidateStatus.PENDING_EVALUATION:
            raise FoldError(f"candidate {e.candidate} was promoted and cannot be skipped")
        self._close_candidate(e.candidate, CandidateStatus.SKIPPED)
        self.totals.skipped[e.reason] += 1

    def _candidate_promoted(self, e: ev.CandidatePromoted) -> None:
        candidate = self._candidate(e.candidate)
        sources, targets = unpack_ids(e.sources), unpack_ids(e.targets)
        self.operations[e.operation] = OperationFacts(
            operation=e.operation, candidate=e.candidate, batch=e.batch, epoch=self.epoch,
            source_pool=e.source_pool, target_pool=e.target_pool, sources=sources, targets=targets,
        )
        self._pool(e.source_pool).ref(sources, e.sources)
        self._pool(e.target_pool).ref(targets, e.targets)
        candidate.status = CandidateStatus.PROMOTED
        candidate.operation = e.operation
        candidate.promoted_ns = e.at_ns
        self.batches.setdefault(e.batch, set()).add(e.candidate)
        self.totals.thrash_blocks += e.thrash
        self.next_operation = e.operation + 1

    def _operation_started(self, e: ev.OperationStarted) -> None:
        operation = self.operations[e.operation]
        operation.started = True
        self.candidates[operation.candidate].started_ns = e.at_ns

    def _operation_reported(self, e: ev.OperationReported) -> None:
        operation = self.operations[e.operation]
        operation.reported = {*operation.reported, e.rank}
        if not e.ok:
            failed = unpack_ids(e.failed) or range(max(len(operation.sources), len(operation.targets)))
            operation.failed = {*operation.failed, *failed}
            operation.error = e.error

    def _candidate_ended(self, e: ev.CandidateEnded) -> None:
        candidate = self._candidate(e.candidate)
        if candidate.operation is None:
            raise FoldError(f"candidate {e.candidate} has no operation that could end")
        operation = self.operations.pop(candidate.operation)
        self.pools[operation.source_pool].unref(operation.sources)
        self.pools[operation.target_pool].unref(operation.targets)
        self._close_candidate(e.candidate, e.status)
        if e.status in (CandidateStatus.COMPLETED, CandidateStatus.FAILED):
            # Of an engine that is watched only one side is known by place.
            moved = max(len(operation.sources), len(operation.targets)) - len(operation.failed)
            by_route = self.totals.moved_blocks
            by_route[candidate.route.label] = by_route.get(candidate.route.label, 0) + moved
        members = self.batches[operation.batch]
        members.discard(e.candidate)

    def _batch_ended(self, e: ev.BatchEnded) -> None:
        if self.batches.pop(e.batch):
            raise FoldError(f"batch {e.batch} still has members in flight")

    def _iteration_advanced(self, e: ev.IterationAdvanced) -> None:
        self.iteration = e.iteration
        self.running = e.running
        self.waiting = e.waiting
        if e.slots or e.positions:
            for number, position in zip(e.slots, e.positions, strict=True):
                slot = self._slot(number)
                slot.anchor_tokens = position
                slot.anchor_iteration = e.iteration

    def _prefix_scored(self, e: ev.PrefixScored) -> None:
        self._slot(e.slot).hits = e.hits
        self.totals.prompt_blocks += e.prompt_blocks
        found = self.totals.hit_blocks
        for tier, blocks in enumerate(e.hits):
            if blocks:
                found[tier] += blocks

    def _hits_lost(self, e: ev.HitsLost) -> None:
        slot = self._slot(e.slot)
        hits = list(slot.hits)
        hits[e.tier - 1] -= e.blocks
        slot.hits = (hits[0], hits[1], hits[2], hits[3])
        slot.anchor_tokens = e.position
        slot.anchor_iteration = self.iteration
        if slot.device_pool is not None:
            slot.filled_blocks = e.position // self.pools[slot.device_pool].info.block_tokens
        self.totals.hit_blocks[e.tier - 1] -= e.blocks
        self.totals.lost_blocks += e.blocks

    def _breakpoints_changed(self, e: ev.BreakpointsChanged) -> None:
        mine = {number: known for number, known in self.breakpoints.items() if known.owner == e.owner}
        for number in mine:
            del self.breakpoints[number]
        for spec in e.specs:
            known = mine.get(spec.id)
            if known is None:
                known = BreakpointFacts(spec, e.owner, spec.enabled)
            elif known.spec != spec:  # said again as it was is not armed again
                muted = known.spec.enabled and not spec.enabled and e.by not in ("", e.owner)
                known = BreakpointFacts(spec, e.owner, spec.enabled, known.hits, f"muted by {e.by}" if muted else "")
            self.breakpoints[spec.id] = known
            self.next_breakpoint = max(self.next_breakpoint, spec.id + 1)
        self.breakpoints = dict(sorted(self.breakpoints.items()))

    def _breakpoint_hit(self, e: ev.BreakpointHit) -> None:
        for number in e.breakpoints:
            known = self.breakpoints[number]
            known.hits += 1
            if known.spec.one_shot:
                known.enabled = False
        self.totals.breakpoint_hits += 1

    def _slot_held(self, e: ev.SlotHeld) -> None:
        slot = self._slot(e.slot)
        if slot.hold is not None:
            raise FoldError(f"slot {e.slot} is already held")
        slot.hold = e.hold
        self.holds[e.hold] = HoldFacts(
            e.hold, e.slot, e.site, e.point, e.breakpoints, e.owner, e.at_ns, e.max_hold_ns,
            suspend=e.suspend, on_timeout=e.on_timeout,
        )
        self.next_hold = e.hold + 1
        self.totals.holds += 1
        if e.point is WaitPoint.SCHEDULE:
            self.standing.add(slot.request)

    def _hold_parked(self, e: ev.HoldParked) -> None:
        self.holds[e.hold].parked = True

    def _hold_released(self, e: ev.HoldReleased) -> None:
        if self.holds.pop(e.hold, None) is None:
            raise FoldError(f"no hold {e.hold}")
        slot = self._slot(e.slot)
        slot.hold = None
        self.standing.discard(slot.request)
        self.totals.holds_ended[e.why] += 1

    def _hold_denied(self, e: ev.HoldDenied) -> None:
        self.totals.hold_denied += 1

    def _lease_changed(self, e: ev.LeaseChanged) -> None:
        mine = [known for known in self.breakpoints.values() if known.owner == e.owner]
        if not e.live:
            self.leases.pop(e.owner, None)
            for known in mine:
                known.enabled, known.away = False, True
            return
        self.leases[e.owner] = True
        for known in mine:
            if known.away and e.back:
                known.enabled, known.away = known.armed_at_home, False

    def _breakpoint_stopped(self, e: ev.BreakpointStopped) -> None:
        known = self.breakpoints.get(e.breakpoint)
        if known is None:
            raise FoldError(f"no breakpoint {e.breakpoint}")
        known.enabled = False
        known.message = f"{e.why.label}: {e.message}"

    def _slot_captured(self, e: ev.SlotCaptured) -> None:
        return

    def _frozen(self, e: ev.Frozen) -> None:
        self.frozen = FreezeFacts(e.by, e.at_ns, e.max_hold_ns)

    def _thawed(self, e: ev.Thawed) -> None:
        if self.frozen is None:
            raise FoldError("nothing is frozen")
        self.frozen = None

    def _reset_begun(self, e: ev.ResetBegun) -> None:
        self.draining = False

    def _reset_done(self, e: ev.ResetDone) -> None:
        if self.slots or self.candidates or self.operations or self.holds:
            raise FoldError("a reset left slots, candidates, operations or holds behind")
        for pool in self.pools:
            if pool.info.authority in (Authority.LEADER, Authority.ENGINE):
                pool.clear()  # what is only watched is not ours to reset: its engine still holds it
        self.batches.clear()
        self.epoch = e.epoch
        self.running = self.waiting = 0

    def _drain_begun(self, e: ev.DrainBegun) -> None:
        self.draining = True

    def _stimulus_rejected(self, e: ev.StimulusRejected) -> None:
        self.totals.rejected += 1

    def _completion_refused(self, e: ev.CompletionRefused) -> None:
        self.totals.completions_refused += 1
        if e.operation in self.late:
            self.late[e.operation].add(e.rank)

    def _invariant_violated(self, e: ev.InvariantViolated) -> None:
        self.totals.violations += 1

    def _blocks_seen(self, e: ev.BlocksSeen) -> None:
        """Cleared, then removed, then stored. A hash that is stored twice has two places, and is gone after two."""
        pool = self._pool(e.pool)
        if e.cleared:
            pool.clear()
            self._known_again(pool.info.source)
        evicted = sum(map(pool.forget_copy, unpack_hashes(e.removed)))
        self.totals.evicted_blocks[pool.info.tier - 1] += evicted
        stored = unpack_hashes(e.stored)
        if stored:
            places = pool.take_free(len(stored))
            pool.require_known(places)
            pool.store(places, stored, READY, e.at_ns)

    def _known_again(self, source: int) -> None:
        """A publisher clears all its pools one after the other: with the last of them nothing is unknown any more."""
        if source in self.lost_sources and not any(
            pool.resident_blocks for pool in self._stream_pools(source)
        ):
            del self.lost_sources[source]

    def _stream_pools(self, source: int) -> list[PoolFacts]:
        return [
            pool for pool in self.pools if pool.info.source == source and pool.info.authority is Authority.STREAM
        ]

    def _source_lost(self, e: ev.SourceLost) -> None:
        if e.gone:
            for pool in self.pools:
                if pool.info.source == e.source and pool.info.authority is not Authority.LEADER:
                    pool.forget([place for place in range(len(pool)) if pool.condition(place) is Condition.CACHED])
            self.lost_sources[e.source] = GONE
            return
        if not e.restarted:
            if self.lost_sources.get(e.source) != GONE:
                self.lost_sources[e.source] = self.lost_sources.get(e.source, 0) + 1
            return
        for pool in self._stream_pools(e.source):
            pool.clear()  # the engine that filled it is gone
        self.lost_sources.pop(e.source, None)

    def _noted(self, e: ev.Noted) -> None:
        return



_T = CacheState
APPLY: Final[dict[type[ev.Event], Callable[[CacheState, Any], None]]] = {
    ev.PoolKnown: _T._pool_known,
    ev.SlotOpened: _T._slot_opened,
    ev.SlotCloned: _T._slot_cloned,
    ev.SlotMoved: _T._slot_moved,
    ev.SlotClosed: _T._slot_closed,
    ev.LookupAnswered: _T._lookup_answered,
    ev.BlocksStaged: _T._blocks_staged,
    ev.StagingReleased: _T._staging_released,
    ev.DeviceBlocksAssigned: _T._device_blocks_assigned,
    ev.DeviceBlocksReleased: _T._device_blocks_released,
    ev.BlocksFilled: _T._blocks_filled,
    ev.BlocksEvicted: _T._blocks_evicted,
    ev.BlocksReserved: _T._blocks_reserved,
    ev.BlocksReady: _T._blocks_ready,
    ev.BlocksDropped: _T._blocks_dropped,
    ev.BlocksQuarantined: _T._blocks_quarantined,
    ev.CandidatePlanned: _T._candidate_planned,
    ev.CandidateEnqueued: _T._candidate_enqueued,
    ev.CandidateEvaluated: _T._candidate_evaluated,
    ev.CandidateSkipped: _T._candidate_skipped,
    ev.CandidatePromoted: _T._candidate_promoted,
    ev.OperationStarted: _T._operation_started,
    ev.OperationReported: _T._operation_reported,
    ev.CandidateEnded: _T._candidate_ended,
    ev.BatchEnded: _T._batch_ended,
    ev.IterationAdvanced: _T._iteration_advanced,
    ev.PrefixScored: _T._prefix_scored,
    ev.HitsLost: _T._hits_lost,
    ev.BreakpointsChanged: _T._breakpoints_changed,
    ev.BreakpointHit: _T._breakpoint_hit,
    ev.SlotHeld: _T._slot_held,
    ev.HoldParked: _T._hold_parked,
    ev.HoldReleased: _T._hold_released,
    ev.HoldDenied: _T._hold_denied,
    ev.LeaseChanged: _T._lease_changed,
    ev.ResetBegun: _T._reset_begun,
    ev.ResetDone: _T._reset_done,
    ev.DrainBegun: _T._drain_begun,
    ev.StimulusRejected: _T._stimulus_rejected,
    ev.CompletionRefused: _T._completion_refused,
    ev.InvariantViolated: _T._invariant_violated,
    ev.BlocksSeen: _T._blocks_seen,
    ev.SourceLost: _T._source_lost,
    ev.Noted: _T._noted,
    ev.BreakpointStopped: _T._breakpoint_stopped,
    ev.SlotCaptured: _T._slot_captured,
    ev.Frozen: _T._frozen,
    ev.Thawed: _T._thawed,
}
"""Event type to its handler; a test proves that it is complete."""
