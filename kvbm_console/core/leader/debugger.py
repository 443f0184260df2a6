"""The debugger's side: breakpoints, continue, step, leases, deadlines.

Law of this file: who stopped and who continued is an event; a lost race is answered ``already_continued``.
"""

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import HoldEnd, Note, ReleaseReason, ResetMode, Site, SlotState, WaitPoint
from kvbm_console.core.instructions import BreakpointVerdict
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.resets import reset

BREAKPOINTS_MAX = 256
"""All owners together; each costs one comparison at its site, and nobody reads a longer list."""
OWNER_BYTES_MAX = 128


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
        if spec.id == 0:
            spec = msgspec.structs.replace(spec, id=number)
            number += 1
        elif spec.id in (known.id for known in specs) or spec.id >= leader.state.next_breakpoint:
            raise Refused(f"breakpoint id {spec.id} was not given out or stands twice")
        elif spec.id in leader.state.breakpoints and leader.state.breakpoints[spec.id].owner != s.owner:
            raise Refused(f"breakpoint {spec.id} belongs to {leader.state.breakpoints[spec.id].owner}")
        specs.append(spec)
    leader.emit(ev.BreakpointsChanged, s.owner, tuple(specs))
    kept = set(leader.state.breakpoints)
    leader.aids.matches = {known: seen for known, seen in leader.aids.matches.items() if known in kept}
    leader.rearm()
    return tuple(BreakpointVerdict(spec.id, True, "") for spec in specs)


def hold_continued(leader: Decider, s: st.HoldContinued) -> None:
    """Release one hold or all; with ``until``, stop that slot again when it enters the state."""
    if s.hold is None:
        _release_all(leader, HoldEnd.CONTINUED, s.by)
        return
    hold = leader.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    if s.until is not None:
        leader.aids.until[hold.slot] = (s.until, s.by)
    leader.release_hold(hold, HoldEnd.CONTINUED, s.by)
    leader.rearm()


def slot_stepped(leader: Decider, s: st.SlotStepped) -> None:
    """Release the hold and stop the slot at its next move."""
    hold = leader.state.holds.get(s.hold)
    if hold is None:
        raise Refused("already_continued")
    leader.aids.stepping[hold.slot] = s.by
    leader.release_hold(hold, HoldEnd.STEPPED, s.by)
    leader.rearm()


def disarmed(leader: Decider, s: st.Disarmed) -> None:
    """Mute every breakpoint and release every hold; always works."""
    _mute(leader)
    _release_all(leader, HoldEnd.DISARMED, s.by)


def _mute(leader: Decider) -> None:
    owners = dict.fromkeys(known.owner for known in leader.state.breakpoints.values() if known.enabled)
    for owner in owners:
        specs = tuple(
            msgspec.structs.replace(known.spec, enabled=False)
            for known in leader.state.breakpoints.values() if known.owner == owner
        )
        leader.emit(ev.BreakpointsChanged, owner, specs)
    leader.aids.stepping.clear()
    leader.aids.until.clear()
    leader.rearm()


def _release_all(leader: Decider, why: HoldEnd, by: str) -> None:
    for hold in list(leader.state.holds.values()):
        leader.release_hold(hold, why, by)


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
        leader.emit(ev.LeaseChanged, s.owner, True)


def lease_lost(leader: Decider, s: st.LeaseLost) -> None:
    """The owner is gone: its breakpoints are disabled, not deleted, and its holds go on."""
    if not leader.state.leases.get(s.owner):
        return
    leader.emit(ev.LeaseChanged, s.owner, False)
    for hold in list(leader.state.holds.values()):
        if hold.owner == s.owner:
            leader.release_hold(hold, HoldEnd.LEASE_LOST, s.owner)
    for memory in (leader.aids.stepping, leader.aids.until):
        for slot in [slot for slot, by in memory.items() if s.owner in by]:
            del memory[slot]
    leader.rearm()


def deadline_passed(leader: Decider, s: st.DeadlinePassed) -> None:
    """Staging goes back to its pool, a hold expires, a drain ends; an unknown deadline came too late and is ignored."""
    kind, key = leader.aids.deadlines.pop(s.deadline, ("", 0))
    if kind == "hold" and key in leader.state.holds:
        leader.release_hold(leader.state.holds[key], HoldEnd.EXPIRED, "")
    elif kind == "staging" and key in leader.state.slots:
        slot = leader.state.slots[key]
        if slot.device_blocks or not slot.staged:
            return
        leader.release_staging(slot, ReleaseReason.DEADLINE)
        if slot.state is SlotState.ONBOARD_STAGED:
            leader.move(slot, SlotState.INITIALIZED)
    elif kind == "drain" and leader.state.draining:
        reset(leader, ResetMode.LOGICAL)


def noted(leader: Decider, s: st.Noted) -> None:
    """Put it on the record; a process that shuts down lets every slot go first."""
    if s.note is Note.SHUTTING_DOWN:
        _mute(leader)
        _release_all(leader, HoldEnd.SHUTDOWN, "")
    leader.emit(ev.Noted, s.note, s.detail)
