"""The debugger's side: breakpoints, continue, step, leases, deadlines.

Law of this file: who stopped and who continued is an event; a lost race is answered ``already_continued``.
"""

from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import MAX_HOLD_NS_MAX, BreakpointSpec
from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.core.expression import compile_condition, compile_log
from kvbm_console.core.ids import (
    BreakpointEnd,
    Clock,
    HoldEnd,
    Note,
    ReleaseReason,
    ResetMode,
    Site,
    SlotState,
    WaitPoint,
)
from kvbm_console.core.instructions import BreakpointVerdict, SetDeadline
from kvbm_console.core.leader import prefetch
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.holds import expire_hold, freeze, skip_candidates, thaw
from kvbm_console.core.leader.pipeline import advance
from kvbm_console.core.leader.resets import reset

BREAKPOINTS_MAX = 256
"""All owners together; each costs one comparison at its site, and nobody reads a longer list."""
OWNER_BYTES_MAX = 128
RUN_FOR_MAX_NS: Final = 3_600 * 10**9
"""Engine time of one run; whoever wants more continues."""


def breakpoints_replaced(leader: Decider, s: st.BreakpointsReplaced) -> tuple[BreakpointVerdict, ...]:
    """The breakpoints of an owner are now these; ids that it had before keep their hits."""
    if not 1 <= len(s.owner.encode()) <= OWNER_BYTES_MAX:
        raise Refused(f"owner must be 1 to {OWNER_BYTES_MAX} bytes, got {len(s.owner.encode())}")
    others = sum(1 for known in leader.state.breakpoints.values() if known.owner != s.owner)
    if others + len(s.specs) > BREAKPOINTS_MAX:
        raise Refused(f"breakpoints must be at most {BREAKPOINTS_MAX}, got {others + len(s.specs)}")
    specs: list[BreakpointSpec] = []
    number = leader.state.next_breakpoint
    for spec in s.specs:
        check_spec(spec)
        known = leader.state.breakpoints.get(spec.id)
        if spec.id == 0:
            spec = msgspec.structs.replace(spec, id=number)
            number += 1
        elif spec.id in (earlier.id for earlier in specs) or not 0 < spec.id < leader.state.next_breakpoint:
            raise Refused(f"breakpoint id {spec.id} was not given out or stands twice")
        elif known is not None and known.owner != s.owner:
            raise Refused(f"breakpoint {spec.id} belongs to {known.owner}")
        specs.append(spec)
    before = dict(leader.state.breakpoints)
    leader.emit(ev.BreakpointsChanged, s.owner, tuple(specs), s.by)
    kept = set(leader.state.breakpoints)
    leader.aids.matches = {known: seen for known, seen in leader.aids.matches.items() if known in kept}
    leader.aids.logged = {known: rate for known, rate in leader.aids.logged.items() if known in kept}
    for spec in specs:
        earlier_one = before.pop(spec.id, None)
        if earlier_one is None or earlier_one.spec != spec:
            leader.clear_deadline("expiry", spec.id)
            if spec.enabled:
                leader.ask(SetDeadline(leader.aids.deadline("expiry", spec.id), spec.expires_ns, Clock.WALL))
    for gone in before.keys() - kept:
        leader.clear_deadline("expiry", gone)
    leader.rearm()
    return tuple(_verdict(leader, spec) for spec in specs)


def check_spec(spec: BreakpointSpec) -> None:
    """Refuse what can never be evaluated: an expression or a template that does not compile."""
    for field, text, compile_one in (
        ("condition", spec.condition, compile_condition), ("log", spec.log, compile_log),
    ):
        if text:
            try:
                compile_one(text)
            except UsageError as error:
                raise Refused(f"{field}, {error}") from None


def _verdict(leader: Decider, spec: BreakpointSpec) -> BreakpointVerdict:
    if spec.depends_on == spec.id:
        return BreakpointVerdict(spec.id, False, "it depends on itself and never takes effect")
    if spec.depends_on and spec.depends_on not in leader.state.breakpoints:
        return BreakpointVerdict(spec.id, False, f"breakpoint {spec.depends_on}, on which it depends, does not exist")
    return BreakpointVerdict(spec.id, True, "")


def breakpoint_overran(leader: Decider, s: st.BreakpointOverran) -> None:
    """A breakpoint costs too much: it is disabled with the reason."""
    _stop(leader, s.breakpoint, BreakpointEnd.OVERRUN, s.message)


def _stop(leader: Decider, number: int, why: BreakpointEnd, message: str) -> None:
    known = leader.state.breakpoints.get(number)
    if known is not None and (known.enabled or (known.away and known.armed_at_home)):
        leader.emit(ev.BreakpointStopped, number, why, message)
        leader.rearm()


# --- holds ---


def hold_continued(leader: Decider, s: st.HoldContinued) -> None:
    """Release one hold or all; with ``until``, stop that slot again when it enters the state or passes the site."""
    if s.hold is None:
        for each in list(leader.state.holds.values()):
            _arm_until(leader, each.slot, s)
            leader.release_hold(each, HoldEnd.CONTINUED, s.by)
        leader.rearm()
        return
    hold = leader.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    _arm_until(leader, hold.slot, s)
    leader.release_hold(hold, HoldEnd.CONTINUED, s.by)
    leader.rearm()


def _arm_until(leader: Decider, slot: int, s: st.HoldContinued) -> None:
    if s.until is not None:
        leader.aids.until[slot] = (s.until, s.by)
    if s.until_site is not None:
        leader.aids.until_site[slot] = (s.until_site, s.by)


def slot_stepped(leader: Decider, s: st.SlotStepped) -> None:
    """Release the hold and stop the slot at its next site."""
    hold = leader.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    leader.aids.stepping[hold.slot] = s.by
    leader.release_hold(hold, HoldEnd.STEPPED, s.by)
    leader.rearm()


def candidate_skip_requested(leader: Decider, s: st.CandidateSkipRequested) -> None:
    """The held slot's candidates that are not promoted resolve to no work, and the slot goes on."""
    hold = leader.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    slot = leader.state.slots[hold.slot]
    if all(leader.state.candidates[number].operation is not None for number in slot.outstanding):
        raise Refused(f"request {slot.request!r} has no candidate that could be skipped")
    leader.release_hold(hold, HoldEnd.SKIPPED, s.by)
    skip_candidates(leader, slot)


def pipeline_stepped(leader: Decider, s: st.PipelineStepped) -> None:
    """Let the first candidate that can go on through its evaluation, while the pipeline is closed."""
    if not leader.state.pipeline_closed:
        raise Refused("the pipeline is not closed: nothing is frozen and no hold suspends it")
    for number in leader.aids.pending:
        candidate = leader.state.candidates[number]
        slot = None if candidate.slot is None else leader.state.slots.get(candidate.slot)
        if slot is None or slot.hold is None or leader.state.holds[slot.hold].point not in _OF_THE_PIPELINE:
            advance(leader, candidate)
            return
    raise Refused("no candidate waits that could go on")


_OF_THE_PIPELINE: Final = (WaitPoint.EVALUATE, WaitPoint.PROMOTE)


# --- everything ---


def frozen(leader: Decider, s: st.Frozen) -> None:
    """Everything stands still."""
    _check_max_hold(s.max_hold_ns)
    if leader.state.frozen is not None:
        raise Refused(f"already frozen by {leader.state.frozen.by}")
    freeze(leader, s.by, s.max_hold_ns)


def thawed(leader: Decider, s: st.Thawed) -> None:
    """What was frozen goes on."""
    if not thaw(leader, HoldEnd.CONTINUED, s.by):
        raise Refused("already_thawed")


def run_for_requested(leader: Decider, s: st.RunForRequested) -> None:
    """Go on for a while of engine time, and freeze again."""
    _check_max_hold(s.max_hold_ns)
    if not 0 < s.duration_ns <= RUN_FOR_MAX_NS:
        raise Refused(f"duration_ns must be above 0 and at most {RUN_FOR_MAX_NS}, got {s.duration_ns}")
    thaw(leader, HoldEnd.CONTINUED, s.by)
    leader.aids.run_for = (s.by, s.max_hold_ns)
    leader.ask(SetDeadline(leader.aids.deadline("run_for", 0), s.duration_ns, Clock.ENGINE))


def _check_max_hold(max_hold_ns: int) -> None:
    if not 0 < max_hold_ns <= MAX_HOLD_NS_MAX:
        raise Refused(f"max_hold_ns must be above 0 and at most {MAX_HOLD_NS_MAX}, got {max_hold_ns}")


def disarmed(leader: Decider, s: st.Disarmed) -> None:
    """Mute every breakpoint and release every hold; always works."""
    _mute(leader, s.by)
    _release_all(leader, HoldEnd.DISARMED, s.by)


def _mute(leader: Decider, by: str) -> None:
    owners = dict.fromkeys(known.owner for known in leader.state.breakpoints.values() if known.enabled or known.away)
    for owner in owners:
        specs = tuple(
            msgspec.structs.replace(known.spec, enabled=False)
            for known in leader.state.breakpoints.values() if known.owner == owner
        )
        leader.emit(ev.BreakpointsChanged, owner, specs, by)
    leader.aids.stepping.clear()
    leader.aids.until.clear()
    leader.aids.until_site.clear()
    leader.rearm()


def _release_all(leader: Decider, why: HoldEnd, by: str) -> None:
    for hold in list(leader.state.holds.values()):
        leader.release_hold(hold, why, by)
    thaw(leader, why, by)


def call_announced(leader: Decider, s: st.CallAnnounced) -> None:
    """The site ``call.will`` for a caller that waits in its own task; a hold stands still at once."""
    slot = leader.live(s.request)
    if s.entry not in st.ENTRY_NAMES:
        raise Refused(f"entry {s.entry} is not an entry point")
    leader.aids.announced[slot.slot] = s.entry
    if leader.gate is not None:
        leader.strike(Site.CALL_WILL, slot, slot.state, slot.state)
        leader.held_at(slot, WaitPoint.CALL)


def lease_granted(leader: Decider, s: st.LeaseGranted) -> None:
    """The owner is alive."""
    if not leader.state.leases.get(s.owner):
        leader.emit(ev.LeaseChanged, s.owner, True, s.back)
        leader.rearm()


def lease_lost(leader: Decider, s: st.LeaseLost) -> None:
    """The owner is gone: its breakpoints are disabled, not deleted, and what nobody else holds goes on."""
    if not leader.state.leases.get(s.owner):
        return
    known = leader.state.breakpoints
    concerned = [
        hold for hold in leader.state.holds.values()
        if hold.owner == s.owner or any(known[at].owner == s.owner for at in hold.breakpoints if at in known)
    ]
    leader.emit(ev.LeaseChanged, s.owner, False)
    for hold in concerned:  # a hold of several owners ends with the last of them
        if all(number not in known or known[number].away for number in hold.breakpoints):
            leader.release_hold(hold, HoldEnd.LEASE_LOST, s.owner)
    if leader.state.frozen is not None and leader.state.frozen.by == s.owner:
        thaw(leader, HoldEnd.LEASE_LOST, s.owner)
    aids = leader.aids
    aids.stepping = {slot: by for slot, by in aids.stepping.items() if by != s.owner}
    aids.until = {slot: asked for slot, asked in aids.until.items() if asked[1] != s.owner}
    aids.until_site = {slot: asked for slot, asked in aids.until_site.items() if asked[1] != s.owner}
    leader.rearm()


def deadline_passed(leader: Decider, s: st.DeadlinePassed) -> None:
    """Staging goes back to its pool, a hold or a breakpoint expires, a session may be back, a drain or a run ends.

    An unknown deadline came too late and is ignored.
    """
    kind, key = leader.aids.take_deadline(s.deadline)
    if kind == "hold" and key in leader.state.holds:
        expire_hold(leader, leader.state.holds[key])
    elif kind == "expiry":
        known = leader.state.breakpoints.get(key)
        if known is not None:
            _stop(leader, key, BreakpointEnd.EXPIRED, f"after {known.spec.expires_ns / 1e9:g} s")
    elif kind == "freeze":
        thaw(leader, HoldEnd.EXPIRED, "")
    elif kind == "run_for":
        freeze(leader, *leader.aids.run_for)
    elif kind == "staging" and key in leader.state.slots:
        slot = leader.state.slots[key]
        if slot.device_blocks or not slot.staged:
            return
        leader.release_staging(slot, ReleaseReason.DEADLINE)
        if slot.state is SlotState.ONBOARD_STAGED:
            leader.move(slot, SlotState.INITIALIZED)
    elif kind == "prefetch":
        prefetch.due(leader, key)
    elif kind == "drain" and leader.state.draining:
        reset(leader, ResetMode.LOGICAL)


def noted(leader: Decider, s: st.Noted) -> None:
    """Put it on the record; a process that shuts down lets every slot go first."""
    if s.note is Note.SHUTTING_DOWN:
        _mute(leader, "")
        _release_all(leader, HoldEnd.SHUTDOWN, "")
    leader.emit(ev.Noted, s.note, s.detail)
