"""Sessions turn the requests of a debugger client into stimuli.

The core replaces all breakpoints of an owner at once; clients set, remove and mute single breakpoints. This file is
the bridge. It reads the facts and submits in one go, without waiting in between, so two clients never lose each
other's change.

Law of this file: a request is answered after its events exist. Nothing here changes facts.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import Refused
from kvbm_console.core.events import StimulusRejected
from kvbm_console.core.holds import points_of
from kvbm_console.core.ids import Authority, BreakpointAction, HoldEnd, ResetMode, Site, SlotState, Suspend, WaitPoint
from kvbm_console.core.instructions import BreakpointVerdict, DrainAnswer, ResetAnswer
from kvbm_console.core.leader import Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import (
    BreakpointsReplaced,
    CandidateSkipRequested,
    Disarmed,
    DrainRequested,
    FreezeRequested,
    HoldContinued,
    PipelineStepped,
    ResetRequested,
    RunForRequested,
    SlotStepped,
    ThawRequested,
)
from kvbm_console.debug.leases import Leases
from kvbm_console.dispatch import Dispatcher
from kvbm_console.stream.verbs import A, Verb

DRAIN_NS_MAX: Final = 24 * 3_600 * 10**9
"""A day: requests that take longer do not end by themselves."""
DAEMON_OWNER: Final = "daemon"
"""Owner of breakpoints that outlive the shell command that set them."""
SESSION_NAME_BYTES_MAX: Final = 64
"""A name is for people, in lists and in the record."""
BREAKPOINTS_MAX: Final = 256
"""More breakpoints than a person reads. The gate's index stays small, and a replacement stays a small stimulus."""


class Session:
    """One client's debugger session.

    ``owner`` is the name under which its breakpoints and holds appear. ``by`` is its name on the record: the owner,
    or the session's own name when its breakpoints belong to the daemon.
    """

    def __init__(self, owner: str, *, lease: bool, by: str = "") -> None:
        self.owner = owner
        self.lease = lease
        self.by = by or owner


class Sessions:
    """Opens sessions and carries out their requests. Every method raises ``Refused`` with one sentence."""

    def __init__(self, dispatcher: Dispatcher, leases: Leases) -> None:
        self._dispatcher = dispatcher
        self._leases = leases
        self._opened = 0
        self.disarmed_by = ""
        """The reason why no breakpoint is taken; empty when breakpoints are taken."""

    @property
    def _state(self) -> CacheState:
        return self._dispatcher.leader.state

    def open(self, name: str, *, lease: bool, owner: str = "") -> Session:
        """A new session. A lease keeps its holds while it renews; without a lease its breakpoints are the daemon's.

        ``owner`` is that of an earlier session of the same name: with its lease gone it is taken up again, and
        what that disabled is armed again unless another session has muted it meanwhile. Otherwise the session
        gets a new owner.
        """
        if not name or len(name.encode()) > SESSION_NAME_BYTES_MAX or not name.isprintable():
            raise Refused(f"name must be 1 to {SESSION_NAME_BYTES_MAX} printable bytes, got {name[:80]!r}")
        if not lease:
            return Session(DAEMON_OWNER, lease=False, by=name)
        back = self._was_opened(name, owner) and owner not in self._leases.owners
        if not back:
            self._opened += 1
            owner = f"{name}-{self._opened}"
        self._leases.renew(owner, back=back)
        return Session(owner, lease=True)

    def _was_opened(self, name: str, owner: str) -> bool:
        number = owner.removeprefix(f"{name}-")
        return owner != number and number.isascii() and number.isdigit() and 0 < int(number) <= self._opened

    def carry_out(self, session: Session, verb: Verb[A]) -> A:
        """Carry out a verb by the method of its name, which takes the verb's fields; returns its answer."""
        method: Callable[..., A] = getattr(self, verb.verb)
        return method(session, *msgspec.structs.astuple(verb))

    def renew(self, session: Session) -> str:
        """Keep the lease of a session that is alive."""
        if session.lease:
            self._leases.renew(session.owner)
        return "renewed"

    def close(self, session: Session) -> None:
        """End the session and its lease."""
        if session.lease:
            self._leases.drop(session.owner)

    # --- breakpoints ---

    def _specs(self, owner: str) -> list[BreakpointSpec]:
        """The specifications of an owner's breakpoints. Setting them again leaves each armed or muted as it is."""
        return [known.spec for known in self._state.breakpoints.values() if known.owner == owner]

    def _replace(self, by: Session, owner: str, specs: Sequence[BreakpointSpec]) -> tuple[BreakpointVerdict, ...]:
        who = "" if by.by == owner else by.by
        result = _accepted(self._dispatcher.submit(BreakpointsReplaced, owner, tuple(specs), who)).result
        self._continue_left_holds()
        return result if isinstance(result, tuple) else ()

    def _continue_left_holds(self) -> None:
        """Release holds that a lost lease left to others whose breakpoints are removed now."""
        known, here = self._state.breakpoints, {DAEMON_OWNER, *self._leases.owners}
        for hold in list(self._state.holds.values()):
            owners = {hold.owner, *(known[number].owner for number in hold.breakpoints if number in known)}
            if hold.breakpoints and owners.isdisjoint(here):
                self._dispatcher.submit(HoldContinued, hold.hold, DAEMON_OWNER, None, None)

    def _owner_of(self, breakpoint_id: int) -> str:
        known = self._state.breakpoints.get(breakpoint_id)
        if known is None:
            raise Refused(f"there is no breakpoint {breakpoint_id}")
        return known.owner

    def set(self, session: Session, spec: BreakpointSpec) -> BreakpointVerdict:
        """Set one more breakpoint of this session, or with the id of a breakpoint its new form."""
        self._require_armed()
        if spec.id and self._owner_of(spec.id) != session.owner:
            raise Refused(f"breakpoint {spec.id} belongs to {self._owner_of(spec.id)}")
        if not spec.id:
            self._make_room(session.owner, 1)
            if len(self._state.breakpoints) >= BREAKPOINTS_MAX:
                raise Refused(f"there are {BREAKPOINTS_MAX} breakpoints already, which is the most")
        others = [known for known in self._specs(session.owner) if known.id != spec.id or not spec.id]
        return self._judged(spec, self._replace(session, session.owner, [*others, spec])[-1])

    def _make_room(self, owner: str, count: int) -> None:
        """Remove breakpoints of sessions that ended, those that ended first, while ``count`` more have no room.

        They are disabled since their lease was lost. A session that comes back says its own again.
        """
        state = self._state
        while len(state.breakpoints) + count > BREAKPOINTS_MAX:
            left = (
                known.owner for known in state.breakpoints.values()
                if known.owner not in (owner, DAEMON_OWNER) and known.owner not in self._leases.owners
            )
            ended = next(left, None)
            if ended is None:
                return
            self._dispatcher.submit(BreakpointsReplaced, ended, (), DAEMON_OWNER)

    def _require_armed(self) -> None:
        if self.disarmed_by:
            raise Refused(f"this daemon takes no breakpoints and no freeze: {self.disarmed_by} is set")

    def replace(self, session: Session, specs: Sequence[BreakpointSpec]) -> tuple[BreakpointVerdict, ...]:
        """All breakpoints of this session are now these; saying it twice changes nothing."""
        self._require_armed()
        self._make_room(session.owner, len(specs) - len(self._specs(session.owner)))
        verdicts = self._replace(session, session.owner, specs)
        return tuple(self._judged(spec, verdict) for spec, verdict in zip(specs, verdicts, strict=True))

    def _judged(self, spec: BreakpointSpec, verdict: BreakpointVerdict) -> BreakpointVerdict:
        """The verdict of the leader, and then of the attached engines."""
        missing = self._missing(spec) if verdict.verified else ""
        return BreakpointVerdict(verdict.id, False, missing) if missing else verdict

    def _missing(self, spec: BreakpointSpec) -> str:
        """Why this breakpoint cannot work with the attached engines, as a sentence; empty when it can."""
        if self._state.streams_only:
            return "only event streams report here and they name no request; a tap in an engine lets it take effect"
        engines = self._dispatcher.engines.values()
        if not engines:
            return ""
        if spec.action is BreakpointAction.FREEZE or (
            spec.action is BreakpointAction.HOLD and spec.suspend is Suspend.ALL
        ):
            return "" if self.can_freeze else "no engine that is attached can be paused"
        points = points_of(spec)
        offered = {point for engine in engines for point in getattr(engine, "points", WaitPoint)}
        if spec.action is not BreakpointAction.HOLD or not points or points & offered:
            return ""
        names = ", ".join(sorted(point.label for point in points))
        return f"no engine that is attached can let a request stand still at {names}"

    @property
    def can_freeze(self) -> bool:
        """True if an engine is attached that can be paused."""
        return any(getattr(engine, "pausable", True) for engine in self._dispatcher.engines.values())

    def remove(self, session: Session, breakpoint_id: int | None) -> str:
        """Remove a breakpoint of any owner, or all when None."""
        if breakpoint_id is None:
            count = len(self._state.breakpoints)
            for owner in sorted({known.owner for known in self._state.breakpoints.values()}):
                self._replace(session, owner, [])
            return f"removed {count}"
        owner = self._owner_of(breakpoint_id)
        self._replace(session, owner, [spec for spec in self._specs(owner) if spec.id != breakpoint_id])
        return "removed"

    def enable(self, session: Session, breakpoint_id: int, enabled: bool) -> str:
        """Arm or mute a breakpoint of any owner."""
        owner = self._owner_of(breakpoint_id)
        # We mute first, because arming a breakpoint that disabled itself would change nothing.
        for value in (False, True)[: 1 + enabled]:
            self._replace(session, owner, [
                msgspec.structs.replace(spec, enabled=value) if spec.id == breakpoint_id else spec
                for spec in self._specs(owner)
            ])
        return "armed" if enabled else "muted"

    # --- holds ---

    def _lost_race(self, hold: int) -> str | None:
        """The answer for a hold that has ended already; None for a live hold. Raises ``Refused`` for a number
        that never was."""
        if hold in self._state.holds:
            return None
        if 0 < hold < self._state.next_hold:
            return "already_continued"
        raise Refused(f"there is no hold {hold}")

    def continue_hold(
        self, session: Session, hold: int | None, until: SlotState | None = None, until_site: Site | None = None
    ) -> str:
        """Release one hold, or all when None; with ``until`` each slot stops once more at that state or site."""
        if hold is None:
            count = len(self._state.holds)
            self._dispatcher.submit(HoldContinued, None, session.by, until, until_site)
            return f"continued {count}"
        lost = self._lost_race(hold)
        if lost is None:
            self._dispatcher.submit(HoldContinued, hold, session.by, until, until_site)
        return lost or HoldEnd.CONTINUED.label

    def step(self, session: Session, hold: int) -> str:
        """Release a hold and stop the same slot at its next site."""
        lost = self._lost_race(hold)
        if lost is None:
            self._dispatcher.submit(SlotStepped, hold, session.by)
        return lost or HoldEnd.STEPPED.label

    def skip(self, session: Session, hold: int) -> str:
        """Resolve the held slot's candidates to no work, and release the hold."""
        lost = self._lost_race(hold)
        if lost is None:
            _accepted(self._dispatcher.submit(CandidateSkipRequested, hold, session.by))
        return lost or HoldEnd.SKIPPED.label

    # --- everything ---

    def step_pipeline(self, session: Session) -> str:
        """Let one candidate through its evaluation, while the pipeline is closed."""
        _accepted(self._dispatcher.submit(PipelineStepped, session.by))
        return "stepped"

    def freeze(self, session: Session, max_hold_ns: int) -> str:
        """Close the pipeline and pause the engines, for ``max_hold_ns`` at most."""
        self._require_armed()
        if not self.can_freeze:
            raise Refused("no engine that is attached can be paused")
        _accepted(self._dispatcher.submit(FreezeRequested, session.by, max_hold_ns))
        return "frozen"

    def thaw(self, session: Session) -> str:
        """End a freeze; a lost race is answered ``already_thawed``."""
        if self._state.frozen is None:
            return "already_thawed"
        self._dispatcher.submit(ThawRequested, session.by)
        return "thawed"

    def run_for(self, session: Session, duration_ns: int, max_hold_ns: int) -> str:
        """Go on for this much engine time, then freeze for ``max_hold_ns`` at most."""
        self._require_armed()
        if not self.can_freeze:
            raise Refused("no engine that is attached can be paused")
        _accepted(self._dispatcher.submit(RunForRequested, duration_ns, session.by, max_hold_ns))
        return "running"

    def reset(self, session: Session, mode: ResetMode) -> ResetAnswer:
        """Forget the content of all tiers at once."""
        self._require_own("reset")
        result = _accepted(self._dispatcher.submit(ResetRequested, mode, session.by)).result
        assert isinstance(result, ResetAnswer)
        return result

    def drain(self, session: Session, deadline_ns: int) -> DrainAnswer:
        """Take nothing new; reset when all that is in flight has ended, after ``deadline_ns`` at the latest."""
        self._require_own("drained")
        if not 0 < deadline_ns <= DRAIN_NS_MAX:
            raise Refused(f"deadline_ns must be from 1 to {DRAIN_NS_MAX}, got {deadline_ns}")
        result = _accepted(self._dispatcher.submit(DrainRequested, deadline_ns, session.by)).result
        assert isinstance(result, DrainAnswer)
        return result

    def _require_own(self, what: str) -> None:
        """Raise ``Refused`` for watched engines, because their caches and requests are their own."""
        state = self._state
        foreign = [pool for pool in state.pools if pool.info.authority in (Authority.OBSERVED, Authority.STREAM)]
        if foreign:
            raise Refused(f"an engine that is only watched cannot be {what}: its cache is its own")

    def disarm(self, session: Session) -> str:
        """Mute every breakpoint and release every hold."""
        count = len(self._state.holds)
        self._dispatcher.submit(Disarmed, session.by)
        return f"disarmed, released {count}"


def _accepted(outcome: Outcome) -> Outcome:
    """The outcome. Raises ``Refused`` with the leader's sentence."""
    for event in outcome.events:
        if isinstance(event, StimulusRejected):
            raise Refused(event.why)
    return outcome
