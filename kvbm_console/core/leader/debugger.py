"""The debugger's side: breakpoints, continue, step, leases, deadlines.

Law of this file: an event names the client of every stop and continue, and a lost race is answered
``already_continued``.
"""

from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import MAX_HOLD_NS_MAX, BreakpointSpec
from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.core.expression import compile_condition, compile_log
from kvbm_console.core.holds import HoldFacts
from kvbm_console.core.ids import (
    BreakpointEnd,
    Clock,
    HoldEnd,
    Note,
    OnTimeout,
    ReleaseReason,
    ResetMode,
    Site,
    SlotState,
    WaitPoint,
)
from kvbm_console.core.instructions import BreakpointVerdict, SetDeadline
from kvbm_console.core.leader import prefetch
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.holds import end_hold, freeze, held_at, strike, thaw
from kvbm_console.core.leader.pipeline import advance, skip_candidates
from kvbm_console.core.leader.resets import reset
from kvbm_console.core.leader.slots import move

BREAKPOINTS_MAX = 256
"""Breakpoints of all owners together. Each costs a comparison at its site, and a person does not read a longer list."""
OWNER_BYTES_MAX = 128
RUN_FOR_MAX_NS: Final = 3_600 * 10**9
"""Engine time of a run. A client that wants more time continues."""


def breakpoints_replaced(decider: Decider, s: st.BreakpointsReplaced) -> tuple[BreakpointVerdict, ...]:
    """The breakpoints of an owner are now these; ids that it had before keep their hits."""
    if not 1 <= len(s.owner.encode()) <= OWNER_BYTES_MAX:
        raise Refused(f"owner must be 1 to {OWNER_BYTES_MAX} bytes, got {len(s.owner.encode())}")
    others = sum(1 for known in decider.state.breakpoints.values() if known.owner != s.owner)
    if others + len(s.specs) > BREAKPOINTS_MAX:
        raise Refused(f"breakpoints must be at most {BREAKPOINTS_MAX}, got {others + len(s.specs)}")
    specs: list[BreakpointSpec] = []
    number = decider.state.next_breakpoint
    for spec in s.specs:
        check_spec(spec)
        known = decider.state.breakpoints.get(spec.id)
        if spec.id == 0:
            spec = msgspec.structs.replace(spec, id=number)
            number += 1
        elif spec.id in (earlier.id for earlier in specs) or not 0 < spec.id < decider.state.next_breakpoint:
            raise Refused(f"breakpoint id {spec.id} was not given out or stands twice")
        elif known is not None and known.owner != s.owner:
            raise Refused(f"breakpoint {spec.id} belongs to {known.owner}")
        specs.append(spec)
    before = dict(decider.state.breakpoints)
    decider.emit(ev.BreakpointsChanged, s.owner, tuple(specs), s.by)
    kept = set(decider.state.breakpoints)
    decider.memory.matches = {known: seen for known, seen in decider.memory.matches.items() if known in kept}
    decider.memory.logged = {known: rate for known, rate in decider.memory.logged.items() if known in kept}
    for spec in specs:
        earlier_one = before.pop(spec.id, None)
        if earlier_one is None or earlier_one.spec != spec:
            decider.clear_deadline("expiry", spec.id)
            if spec.enabled:
                decider.ask(SetDeadline(decider.memory.deadline("expiry", spec.id), spec.expires_ns, Clock.WALL))
    for gone in before.keys() - kept:
        decider.clear_deadline("expiry", gone)
    decider.rearm()
    return tuple(_verdict(decider, spec) for spec in specs)


def check_spec(spec: BreakpointSpec) -> None:
    """Refuse an expression or a template that does not compile."""
    for field, text, compile_one in (
        ("condition", spec.condition, compile_condition), ("log", spec.log, compile_log),
    ):
        if text:
            try:
                compile_one(text)
            except UsageError as error:
                raise Refused(f"{field}, {error}") from None


def _verdict(decider: Decider, spec: BreakpointSpec) -> BreakpointVerdict:
    if spec.depends_on == spec.id:
        return BreakpointVerdict(spec.id, False, "it depends on itself and never takes effect")
    if spec.depends_on and spec.depends_on not in decider.state.breakpoints:
        return BreakpointVerdict(spec.id, False, f"breakpoint {spec.depends_on}, on which it depends, does not exist")
    return BreakpointVerdict(spec.id, True, "")


def breakpoint_overran(decider: Decider, s: st.BreakpointOverran) -> None:
    """A breakpoint costs too much: it is disabled with the reason."""
    _stop(decider, s.breakpoint, BreakpointEnd.OVERRUN, s.message)


def _stop(decider: Decider, number: int, why: BreakpointEnd, message: str) -> None:
    known = decider.state.breakpoints.get(number)
    if known is not None and (known.enabled or (known.away and known.armed_at_home)):
        decider.emit(ev.BreakpointStopped, number, why, message)
        decider.rearm()


# --- holds ---


def hold_continued(decider: Decider, s: st.HoldContinued) -> None:
    """Release one hold or all; with ``until``, stop that slot again when it enters the state or passes the site."""
    if s.hold is None:
        for each in list(decider.state.holds.values()):
            _arm_until(decider, each.slot, s)
            end_hold(decider, each, HoldEnd.CONTINUED, s.by)
        decider.rearm()
        return
    hold = decider.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    _arm_until(decider, hold.slot, s)
    end_hold(decider, hold, HoldEnd.CONTINUED, s.by)
    decider.rearm()


def expire_hold(decider: Decider, hold: HoldFacts) -> None:
    """The longest time of a hold is over."""
    skips = hold.on_timeout is OnTimeout.SKIP_CANDIDATE
    end_hold(decider, hold, HoldEnd.EXPIRED, "")
    if skips:
        skip_candidates(decider, decider.state.slots[hold.slot])


def _arm_until(decider: Decider, slot: int, s: st.HoldContinued) -> None:
    if s.until is not None:
        decider.memory.until[slot] = (s.until, s.by)
    if s.until_site is not None:
        decider.memory.until_site[slot] = (s.until_site, s.by)


def slot_stepped(decider: Decider, s: st.SlotStepped) -> None:
    """Release the hold and stop the slot at its next site."""
    hold = decider.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    decider.memory.stepping[hold.slot] = s.by
    end_hold(decider, hold, HoldEnd.STEPPED, s.by)
    decider.rearm()


def candidate_skip_requested(decider: Decider, s: st.CandidateSkipRequested) -> None:
    """The held slot's candidates that are not promoted resolve to no work, and the slot goes on."""
    hold = decider.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    slot = decider.state.slots[hold.slot]
    if all(decider.state.candidates[number].operation is not None for number in slot.outstanding):
        raise Refused(f"request {slot.request!r} has no candidate that could be skipped")
    end_hold(decider, hold, HoldEnd.SKIPPED, s.by)
    skip_candidates(decider, slot)


def pipeline_stepped(decider: Decider, s: st.PipelineStepped) -> None:
    """Let the first candidate that can go on through its evaluation, while the pipeline is closed."""
    if not decider.state.pipeline_closed:
        raise Refused("the pipeline is not closed: nothing is frozen and no hold suspends it")
    for number in decider.memory.pending:
        candidate = decider.state.candidates[number]
        slot = None if candidate.slot is None else decider.state.slots.get(candidate.slot)
        if slot is None or slot.hold is None or decider.state.holds[slot.hold].point not in _OF_THE_PIPELINE:
            advance(decider, candidate)
            return
    raise Refused("no candidate waits that could go on")


_OF_THE_PIPELINE: Final = (WaitPoint.EVALUATE, WaitPoint.PROMOTE)


# --- everything ---


def frozen(decider: Decider, s: st.FreezeRequested) -> None:
    """Everything stands still."""
    _check_max_hold(s.max_hold_ns)
    if decider.state.frozen is not None:
        raise Refused(f"already frozen by {decider.state.frozen.by}")
    freeze(decider, s.by, s.max_hold_ns)


def thawed(decider: Decider, s: st.ThawRequested) -> None:
    """End the freeze."""
    if not thaw(decider, HoldEnd.CONTINUED, s.by):
        raise Refused("already_thawed")


def run_for_requested(decider: Decider, s: st.RunForRequested) -> None:
    """Go on for a while of engine time, and freeze again."""
    _check_max_hold(s.max_hold_ns)
    if not 0 < s.duration_ns <= RUN_FOR_MAX_NS:
        raise Refused(f"duration_ns must be above 0 and at most {RUN_FOR_MAX_NS}, got {s.duration_ns}")
    thaw(decider, HoldEnd.CONTINUED, s.by)
    decider.memory.run_for = (s.by, s.max_hold_ns)
    decider.ask(SetDeadline(decider.memory.deadline("run_for", 0), s.duration_ns, Clock.ENGINE))


def _check_max_hold(max_hold_ns: int) -> None:
    if not 0 < max_hold_ns <= MAX_HOLD_NS_MAX:
        raise Refused(f"max_hold_ns must be above 0 and at most {MAX_HOLD_NS_MAX}, got {max_hold_ns}")


def disarmed(decider: Decider, s: st.Disarmed) -> None:
    """Mute every breakpoint and release every hold; always works."""
    _mute(decider, s.by)
    _release_all(decider, HoldEnd.DISARMED, s.by)


def _mute(decider: Decider, by: str) -> None:
    owners = dict.fromkeys(known.owner for known in decider.state.breakpoints.values() if known.enabled or known.away)
    for owner in owners:
        specs = tuple(
            msgspec.structs.replace(known.spec, enabled=False)
            for known in decider.state.breakpoints.values() if known.owner == owner
        )
        decider.emit(ev.BreakpointsChanged, owner, specs, by)
    decider.memory.stepping.clear()
    decider.memory.until.clear()
    decider.memory.until_site.clear()
    decider.rearm()


def _release_all(decider: Decider, why: HoldEnd, by: str) -> None:
    for hold in list(decider.state.holds.values()):
        end_hold(decider, hold, why, by)
    thaw(decider, why, by)


def call_announced(decider: Decider, s: st.CallAnnounced) -> None:
    """The site ``call.will`` for a caller that waits in its own task; a hold stands still at once."""
    slot = decider.live(s.request)
    if s.entry not in st.ENTRY_NAMES:
        raise Refused(f"entry {s.entry} is not an entry point")
    decider.memory.announced[slot.slot] = s.entry
    if decider.gate is not None:
        strike(decider, Site.CALL_WILL, slot, slot.state, slot.state)
        held_at(decider, slot, WaitPoint.CALL)


def lease_granted(decider: Decider, s: st.LeaseGranted) -> None:
    """The owner is alive."""
    if not decider.state.leases.get(s.owner):
        decider.emit(ev.LeaseChanged, s.owner, True, s.back)
        decider.rearm()


def lease_lost(decider: Decider, s: st.LeaseLost) -> None:
    """The owner is gone. Its breakpoints are disabled, not deleted, and slots that no other owner holds go on."""
    if not decider.state.leases.get(s.owner):
        return
    known = decider.state.breakpoints
    concerned = [
        hold for hold in decider.state.holds.values()
        if hold.owner == s.owner or any(known[at].owner == s.owner for at in hold.breakpoints if at in known)
    ]
    decider.emit(ev.LeaseChanged, s.owner, False)
    for hold in concerned:  # a hold of several owners ends with the last of them
        if all(number not in known or known[number].away for number in hold.breakpoints):
            end_hold(decider, hold, HoldEnd.LEASE_LOST, s.owner)
    if decider.state.frozen is not None and decider.state.frozen.by == s.owner:
        thaw(decider, HoldEnd.LEASE_LOST, s.owner)
    memory = decider.memory
    memory.stepping = {slot: by for slot, by in memory.stepping.items() if by != s.owner}
    memory.until = {slot: asked for slot, asked in memory.until.items() if asked[1] != s.owner}
    memory.until_site = {slot: asked for slot, asked in memory.until_site.items() if asked[1] != s.owner}
    decider.rearm()


def deadline_passed(decider: Decider, s: st.DeadlinePassed) -> None:
    """Staging goes back to its pool, a hold or a breakpoint expires, a session may be back, a drain or a run ends.

    An unknown deadline came too late and is ignored.
    """
    kind, key = decider.memory.take_deadline(s.deadline)
    if kind == "hold" and key in decider.state.holds:
        expire_hold(decider, decider.state.holds[key])
    elif kind == "expiry":
        known = decider.state.breakpoints.get(key)
        if known is not None:
            _stop(decider, key, BreakpointEnd.EXPIRED, f"after {known.spec.expires_ns / 1e9:g} s")
    elif kind == "freeze":
        thaw(decider, HoldEnd.EXPIRED, "")
    elif kind == "run_for":
        freeze(decider, *decider.memory.run_for)
    elif kind == "staging" and key in decider.state.slots:
        slot = decider.state.slots[key]
        if slot.device_blocks or not slot.staged:
            return
        decider.release_staging(slot, ReleaseReason.DEADLINE)
        if slot.state is SlotState.ONBOARD_STAGED:
            move(decider, slot, SlotState.INITIALIZED)
    elif kind == "prefetch":
        prefetch.due(decider, key)
    elif kind == "drain" and decider.state.draining:
        reset(decider, ResetMode.LOGICAL)


def noted(decider: Decider, s: st.NoteReported) -> None:
    """Put it on the record; a process that shuts down lets every slot go first."""
    if s.note is Note.SHUTTING_DOWN:
        _mute(decider, "")
        _release_all(decider, HoldEnd.SHUTDOWN, "")
    decider.emit(ev.Noted, s.note, s.detail)
