"""The debugger (breakpoints, holds, leases, freezes) and events of the whole cache (reset, drain, notes).

Law of this file: a hold and its slot name each other, and requests that stand at the schedule point are in
``standing``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.errors import FoldError
from kvbm_console.core.holds import BreakpointFacts, FreezeFacts, HoldFacts
from kvbm_console.core.ids import Authority, WaitPoint
from kvbm_console.core.slots import ConnectorFacts

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState


def _breakpoints_changed(state: "CacheState", e: ev.BreakpointsChanged) -> None:
    mine = {number: known for number, known in state.breakpoints.items() if known.owner == e.owner}
    for number in mine:
        del state.breakpoints[number]
    for spec in e.specs:
        known = mine.get(spec.id)
        if known is None:
            known = BreakpointFacts(spec, e.owner, spec.enabled)
        elif known.spec != spec:  # said again as it was is not armed again
            muted = known.spec.enabled and not spec.enabled and e.by not in ("", e.owner)
            known = BreakpointFacts(spec, e.owner, spec.enabled, known.hits, f"muted by {e.by}" if muted else "")
        state.breakpoints[spec.id] = known
        state.next_breakpoint = max(state.next_breakpoint, spec.id + 1)
    state.breakpoints = dict(sorted(state.breakpoints.items()))


def _breakpoint_hit(state: "CacheState", e: ev.BreakpointHit) -> None:
    for number in e.breakpoints:
        known = state.breakpoints[number]
        known.hits += 1
        if known.spec.one_shot:
            known.enabled = False
    state.totals.breakpoint_hits += 1


def _slot_held(state: "CacheState", e: ev.SlotHeld) -> None:
    slot = state.known_slot(e.slot)
    if slot.hold is not None:
        raise FoldError(f"slot {e.slot} is already held")
    slot.hold = e.hold
    state.holds[e.hold] = HoldFacts(
        e.hold, e.slot, e.site, e.point, e.breakpoints, e.owner, e.at_ns, e.max_hold_ns,
        suspend=e.suspend, on_timeout=e.on_timeout,
    )
    state.next_hold = e.hold + 1
    state.totals.holds += 1
    if e.point is WaitPoint.SCHEDULE:
        state.standing.add(slot.request)


def _hold_parked(state: "CacheState", e: ev.HoldParked) -> None:
    state.holds[e.hold].parked = True


def _hold_released(state: "CacheState", e: ev.HoldReleased) -> None:
    if state.holds.pop(e.hold, None) is None:
        raise FoldError(f"no hold {e.hold}")
    slot = state.known_slot(e.slot)
    slot.hold = None
    state.standing.discard(slot.request)
    state.totals.holds_ended[e.why] += 1


def _hold_denied(state: "CacheState", e: ev.HoldDenied) -> None:
    state.totals.hold_denied += 1


def _lease_changed(state: "CacheState", e: ev.LeaseChanged) -> None:
    mine = [known for known in state.breakpoints.values() if known.owner == e.owner]
    if not e.live:
        state.leases.pop(e.owner, None)
        for known in mine:
            known.enabled, known.away = False, True
        return
    state.leases[e.owner] = True
    for known in mine:
        if known.away and e.back:
            known.enabled, known.away = known.armed_at_home, False


def _breakpoint_stopped(state: "CacheState", e: ev.BreakpointStopped) -> None:
    known = state.breakpoints.get(e.breakpoint)
    if known is None:
        raise FoldError(f"no breakpoint {e.breakpoint}")
    known.enabled = False
    known.message = f"{e.why.label}: {e.message}"


def _slot_captured(state: "CacheState", e: ev.SlotCaptured) -> None:
    return


def _frozen(state: "CacheState", e: ev.Frozen) -> None:
    state.frozen = FreezeFacts(e.by, e.at_ns, e.max_hold_ns)


def _thawed(state: "CacheState", e: ev.Thawed) -> None:
    if state.frozen is None:
        raise FoldError("nothing is frozen")
    state.frozen = None


def _reset_begun(state: "CacheState", e: ev.ResetBegun) -> None:
    state.draining = False


def _reset_done(state: "CacheState", e: ev.ResetDone) -> None:
    if state.slots or state.candidates or state.operations or state.holds:
        raise FoldError("a reset left slots, candidates, operations or holds behind")
    for pool in state.pools:
        if pool.info.authority in (Authority.LEADER, Authority.ENGINE):
            pool.clear()  # a watched pool is not reset, because its engine still holds the blocks
    state.batches.clear()
    state.epoch = e.epoch
    state.running = state.waiting = 0


def _drain_begun(state: "CacheState", e: ev.DrainBegun) -> None:
    state.draining = True


def _stimulus_rejected(state: "CacheState", e: ev.StimulusRejected) -> None:
    state.totals.rejected += 1


def _invariant_violated(state: "CacheState", e: ev.InvariantViolated) -> None:
    state.totals.violations += 1


def _noted(state: "CacheState", e: ev.Noted) -> None:
    return


def _content_mismatched(state: "CacheState", e: ev.ContentMismatched) -> None:
    """The facts say where blocks should be; the bytes there are no fact."""


def _connector_measured(state: "CacheState", e: ev.ConnectorMeasured) -> None:
    state.connectors[e.source] = ConnectorFacts(
        e.connectors, e.methods, e.calls, e.total_ns, e.longest_ns, e.stats, e.values, e.at_ns
    )


def _call_blocked(state: "CacheState", e: ev.CallBlocked) -> None:
    """The time of a call is an account of the past."""


def _audit_differed(state: "CacheState", e: ev.AuditDiffered) -> None:
    """The facts stay as they are; a whole report mends them, and ``SourceLost`` marks them until then."""


FOLDS: Final[dict[type[ev.Event], Callable[["CacheState", Any], None]]] = {
    ev.BreakpointsChanged: _breakpoints_changed,
    ev.BreakpointHit: _breakpoint_hit,
    ev.SlotHeld: _slot_held,
    ev.HoldParked: _hold_parked,
    ev.HoldReleased: _hold_released,
    ev.HoldDenied: _hold_denied,
    ev.LeaseChanged: _lease_changed,
    ev.ResetBegun: _reset_begun,
    ev.ResetDone: _reset_done,
    ev.DrainBegun: _drain_begun,
    ev.StimulusRejected: _stimulus_rejected,
    ev.InvariantViolated: _invariant_violated,
    ev.Noted: _noted,
    ev.ContentMismatched: _content_mismatched,
    ev.ConnectorMeasured: _connector_measured,
    ev.CallBlocked: _call_blocked,
    ev.AuditDiffered: _audit_differed,
    ev.BreakpointStopped: _breakpoint_stopped,
    ev.SlotCaptured: _slot_captured,
    ev.Frozen: _frozen,
    ev.Thawed: _thawed,
}
