"""The leader: stimulus in, (result, events, instructions) out.

Law of this package: ``handle`` is synchronous and atomic. A stimulus is either refused with the facts unchanged, or it
is carried through to quiescence; the same stimuli always lead to the same events.

Handlers take a ``Decider`` and stand in files by subject. These are ``lookups``, ``iterations``, ``requests``,
``pools``, ``debugger``, ``resets``, and ``observed`` for engines that only report. ``shapes`` checks the form of their
reports. They lead to copies (``pipeline``, ``offloads``, ``prefetch``, ``victims``), to moves of slots (``slots``) and
to holds (``holds``).
"""

from collections.abc import Callable
from typing import Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import Lineage, Violation, audit, quick_audit
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import InvariantViolation, Refused
from kvbm_console.core.ids import Site
from kvbm_console.core.leader import (
    connectors,
    debugger,
    iterations,
    lookups,
    observed,
    pipeline,
    pools,
    requests,
    resets,
    shapes,
)
from kvbm_console.core.leader.decider import Decider, Outcome
from kvbm_console.core.leader.holds import pause_engines, strike
from kvbm_console.core.leader.memory import LiveMemory
from kvbm_console.core.leader.offloads import calm_blocks, plan_offloads
from kvbm_console.core.leader.pipeline import advance, dispatch, end_operation
from kvbm_console.core.leader.slots import close_slot
from kvbm_console.core.snapshots import decode_facts, digest
from kvbm_console.core.tiers import PoolFacts

__all__ = ["HANDLERS", "Leader", "Outcome"]

HANDLERS: Final[dict[type[st.Stimulus], Callable[[Decider, Any], Any]]] = {
    st.PoolDeclared: pools.pool_declared,
    st.RequestArrived: lookups.request_arrived,
    st.MatchRequested: lookups.match_requested,
    st.BlocksAllocated: lookups.blocks_allocated,
    st.IterationScheduled: iterations.iteration_scheduled,
    st.IterationFinished: iterations.iteration_finished,
    st.RequestPreempted: requests.request_preempted,
    st.RequestCloned: requests.request_cloned,
    st.RequestFinished: requests.request_finished,
    st.TransferStarted: pipeline.transfer_started,
    st.TransferFinished: pipeline.transfer_finished,
    st.TransferFailed: pipeline.transfer_failed,
    st.BlocksReported: pools.blocks_reported,
    st.BlocksRestored: pools.blocks_restored,
    st.SourceGapped: pools.source_gapped,
    st.MeasuresReported: pools.measures_reported,
    st.SourceRestarted: pools.source_restarted,
    st.BreakpointsReplaced: debugger.breakpoints_replaced,
    st.HoldContinued: debugger.hold_continued,
    st.SlotStepped: debugger.slot_stepped,
    st.Disarmed: debugger.disarmed,
    st.LeaseGranted: debugger.lease_granted,
    st.LeaseLost: debugger.lease_lost,
    st.DeadlinePassed: debugger.deadline_passed,
    st.ResetRequested: resets.reset_requested,
    st.DrainRequested: resets.drain_requested,
    st.NoteReported: debugger.noted,
    st.CallAnnounced: debugger.call_announced,
    st.LookupObserved: observed.not_watched,
    st.CopiesObserved: observed.not_watched,
    st.CopyBegun: connectors.copy_begun,
    st.CopyEnded: connectors.copy_ended,
    st.ConnectorReported: connectors.connector_reported,
    st.CallReported: connectors.call_reported,
    st.MismatchReported: observed.mismatch_reported,
    st.PlacesAudited: observed.not_watched,
    st.PipelineStepped: debugger.pipeline_stepped,
    st.RunForRequested: debugger.run_for_requested,
    st.CandidateSkipRequested: debugger.candidate_skip_requested,
    st.FreezeRequested: debugger.frozen,
    st.ThawRequested: debugger.thawed,
    st.BreakpointOverran: debugger.breakpoint_overran,
}
"""Stimulus type to its handler; a test proves that it is complete."""
_ROUTES: Final = {
    kind: (st.ENTRY_TAGS[kind], handler, "request" in kind.__struct_fields__) for kind, handler in HANDLERS.items()
}
"""Stimulus type to (its tag, its handler, True if it names a request)."""
_OF_THE_GATE: Final = (
    ev.BreakpointHit, ev.BreakpointStopped, ev.SlotHeld, ev.HoldDenied, ev.SlotCaptured, ev.Frozen, ev.HoldReleased,
)
"""Events that a breakpoint before the call may lead to; a refusal after them is no bug."""

_MATCH: Final = st.ENTRY_TAGS[st.MatchRequested]
_LOOKUP: Final = st.ENTRY_TAGS[st.LookupObserved]
_QUICK_MASK: Final = 15
"""Stimuli between two checks of the pools' counts, less one: a check costs a microsecond, a stimulus a few."""
_QUICK_POOLS: Final = 8
"""Pools of one such check. More pools, as of hundreds of publishers, have their turns in later checks."""
_ROUNDS: Final = 3
"""Rounds of planning. A copy into a pool may need room there, for which another block must be copied further down."""


class Leader(Decider):
    """The decider of one host.

    ``apply`` always checks, and the counts of eight pools in turn are verified after every 16th stimulus. With
    ``check``, those of all pools are after every one, and everything (the audit) after every ``audit_every``-th. A
    broken invariant raises ``InvariantViolation``.
    """

    def __init__(self, config: LeaderConfig, *, check: bool = False, audit_every: int = 1) -> None:
        super().__init__(config)
        self.check = check
        self.audit_every = audit_every
        self._handled = 0
        self._checked = 0
        """The pools in front of this one had their turn."""
        self._lineage = Lineage(loose=config.eviction.by_request)

    def handle(self, stimulus: st.Stimulus) -> Outcome:
        """Decide one stimulus. Never awaits; raises only on a bug of ours (``InternalError``, ``FoldError``)."""
        self.n = stimulus.n
        at_ns, now_ns = stimulus.at_ns, self.state.at_ns
        self.at_ns = at_ns if at_ns > now_ns else now_ns
        self.source = stimulus.source
        kind = type(stimulus)
        self.entry, handler, names_request = _ROUTES[kind]
        watched = self.watched and self.source in self.watched
        if watched:
            handler = observed.HANDLERS.get(kind, handler)
        self.events = []
        self.instructions = []
        request: str | None = stimulus.request if names_request else None  # type: ignore[attr-defined]
        result = None
        try:
            if self.gate is not None and request is not None:
                self._call_will(stimulus, request)
            if watched:
                shapes.check(self, stimulus)
            result = handler(self, stimulus)
        except (Refused, ValueError) as error:
            if any(type(event) not in _OF_THE_GATE for event in self.events):
                raise self.bug(f"{type(stimulus).__name__} was refused after its first event: {error}") from error
            self.emit(ev.StimulusRejected, self.entry, request, str(error))
        if request is not None and (self.gate is not None or self.memory.announced):
            self._call_did(stimulus, request)
        settle(self)
        if self.state.draining:
            resets.finish_drain(self)
            settle(self)
        events = self.events
        if events:
            self.recent.extend(events)
        if self.check:
            self._verify()
        elif not stimulus.n & _QUICK_MASK:
            self._verify(full=False)
        return Outcome(result, events, self.instructions)

    def _call_will(self, stimulus: st.Stimulus, request: str) -> None:
        """Only a lookup can stand still before it: the other entry points report events that have happened already."""
        slot = self.state.slot_named(request)
        if isinstance(stimulus, st.MatchRequested) and slot is not None and not self._announced(slot.slot):
            strike(self, Site.CALL_WILL, slot, slot.state, slot.state)

    def _call_did(self, stimulus: st.Stimulus, request: str) -> None:
        slot = self.state.slot_named(request)
        if slot is None or isinstance(stimulus, st.CallAnnounced):
            return
        announced = self._announced(slot.slot)
        self.memory.announced.pop(slot.slot, None)
        asks = isinstance(stimulus, st.MatchRequested)
        if slot.source in self.watched:
            # It asks before a lookup and tells everything else afterwards, so a lookup alone has a ``call.will``.
            if asks and self.gate is not None:
                self.memory.announced[slot.slot] = self.entry  # its report belongs to the same call
            announced |= not isinstance(stimulus, st.LookupObserved)
        if not announced and not asks:
            strike(self, Site.CALL_WILL, slot, slot.state, slot.state)
        strike(self, Site.CALL_DID, slot, slot.state, slot.state)

    def _announced(self, slot: int) -> bool:
        """True if this call has passed its ``call.will`` before: in the caller's task, or when the engine asked."""
        call = _MATCH if self.entry == _LOOKUP else self.entry
        return self.memory.announced.get(slot) == call

    def _verify(self, *, full: bool = True) -> None:
        self._handled += 1
        found: list[Violation] = quick_audit(self.state.pools if full else self._pools_in_turn())
        if full:
            found += self._lineage.saw(self.events, self.state)
        if not found and full and self._handled % self.audit_every == 0:
            found = audit(self.state)
        if found:
            story = () if found[0].slot is None else self.story(found[0].slot)
            raise InvariantViolation(found[0].rule, found[0].detail, story)

    def _pools_in_turn(self) -> list[PoolFacts]:
        pools = self.state.pools
        first = self._checked if self._checked < len(pools) else 0
        self._checked = first + _QUICK_POOLS
        return pools[first : self._checked]

    def calm_blocks(self, source: int) -> int | None:
        """See ``LeaderPort.calm_blocks``; asked between stimuli by an engine that would take iterations together."""
        return calm_blocks(self, source)

    def digest(self) -> int:
        """Digest of the facts."""
        return digest(self.state)

    def memory_digest(self) -> int:
        """Digest of the memory."""
        return self.live_memory.digest()

    def export(self) -> bytes:
        """The memory, for a complete keyframe."""
        return self.live_memory.export()

    @classmethod
    def restore(cls, config: LeaderConfig, facts: bytes | memoryview, memory: bytes | memoryview) -> "Leader":
        """The leader of a complete keyframe; it goes on exactly as the leader that wrote it."""
        leader = cls(config)
        leader.state = decode_facts(facts)
        leader.live_memory = LiveMemory.restore(memory, leader.state.pools)
        leader.look_at_pools()
        leader.rearm()
        return leader


def settle(decider: Decider) -> None:
    """Run everything that can run now: ended operations, candidates, copies, closing slots, new offloads."""
    memory = decider.memory
    rounds = 0 if decider.config.by_order else _ROUNDS - 1
    while memory.complete or memory.pending or memory.undispatched or memory.ending or memory.dirty:
        before = decider.state.seq
        for number in memory.complete[:]:
            end_operation(decider, decider.state.operations[number])
        for number in memory.pending[:]:
            if decider.state.pipeline_closed:
                break
            advance(decider, decider.state.candidates[number])
        for number in memory.undispatched[:]:
            dispatch(decider, decider.state.operations[number])
        for number in memory.ending[:]:
            close_slot(decider, decider.state.slots[number])
        if memory.dirty and rounds < _ROUNDS:
            rounds += 1
            dirty, memory.dirty = memory.dirty, []
            for index in dirty:
                plan_offloads(decider, decider.state.pools[index])
        if decider.state.seq == before:
            break
    if memory.paused or decider.state.engines_paused:
        pause_engines(decider)
