"""Facts of the debugger, and where a slot can stand still.

Law of this file: a hold waits at a waitable point, never at a line of code. The site determines the point, or else the
state of the slot does.
"""

from typing import Final

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import HoldEnd, OnTimeout, Site, SlotState, Suspend, WaitPoint

_W = WaitPoint
POINT_OF_STATE: Final[dict[SlotState, WaitPoint | None]] = {
    SlotState.INITIALIZED: _W.LOOKUP,
    SlotState.ONBOARD_STAGED: _W.LOOKUP,
    SlotState.PREEMPTED: _W.LOOKUP,
    SlotState.PREFILLING: _W.SCHEDULE,
    SlotState.SKIPPED_PREFILL: _W.SCHEDULE,
    SlotState.DECODING: _W.SCHEDULE,
    SlotState.SKIPPED_DECODE: _W.SCHEDULE,
    SlotState.ONBOARDING: _W.DISPATCH,
    SlotState.FINISHING: _W.RELEASE,
    SlotState.FINISHED: None,
}
"""The waitable point that a slot reaches next from each state, or None when it can only be logged."""

POINT_OF_SITE: Final[dict[Site, WaitPoint]] = {
    Site.CANDIDATE_ENQUEUE: _W.EVALUATE,
    Site.EVALUATE_WILL: _W.EVALUATE,
    Site.EVALUATE_DID: _W.PROMOTE,
    Site.PROMOTE_WILL: _W.PROMOTE,
    Site.SKIP_DID: _W.PROMOTE,
    Site.EVICT_WILL: _W.PROMOTE,
    Site.DISPATCH_WILL: _W.DISPATCH,
    Site.COMPLETE_WILL: _W.COMPLETION,
    Site.REQUEST_FINISH: _W.RELEASE,
}
"""Sites whose waitable point does not depend on the state."""


def wait_point(site: Site, state: SlotState) -> WaitPoint | None:
    """The point at which a slot in ``state`` (after the move) stands still when ``site`` stops it, or None.

    >>> wait_point(Site.TRANSITION_DID, SlotState.ONBOARDING).label
    'dispatch'
    """
    return POINT_OF_SITE[site] if site in POINT_OF_SITE else POINT_OF_STATE[state]


OF_A_COPY: Final = frozenset({_W.EVALUATE, _W.PROMOTE, _W.DISPATCH, _W.COMPLETION})
"""Points at which a copy of the slot stands still, while the request itself goes on: also beyond its end."""

_ENDED: Final[dict[HoldEnd, str]] = {
    HoldEnd.CONTINUED: "continued by {by}",
    HoldEnd.STEPPED: "stepped by {by}",
    HoldEnd.SKIPPED: "its copies were skipped by {by}",
    HoldEnd.EXPIRED: "its longest time was over",
    HoldEnd.LEASE_LOST: "the lease of {by} was lost",
    HoldEnd.CANCELLED: "the request was {by}",
    HoldEnd.DISARMED: "disarmed by {by}",
    HoldEnd.PRESSURE: "made way for {by}, which needs its blocks",
    HoldEnd.SHUTDOWN: "the daemon shut down",
}


def ended_text(why: HoldEnd, by: str) -> str:
    """Why a hold ended, as a clause.

    >>> ended_text(HoldEnd.CANCELLED, "preempted"), ended_text(HoldEnd.CONTINUED, "ann-1")
    ('the request was preempted', 'continued by ann-1')
    """
    if why is HoldEnd.CANCELLED and not by:  # recordings of before
        return "the request ended or was preempted"
    return _ENDED[why].format(by=by or "somebody")


_LOST_RACES: Final = {
    "already_continued": "it has ended already",
    "already_thawed": "nothing is frozen",
}
"""Answers of the daemon to a verb that came too late, with the words that a person reads."""


def answer_text(answer: str, reason: str = "") -> str:
    """The daemon's answer to a verb in words. ``reason`` is why the hold ended, where known.

    >>> answer_text("already_continued", "continued by ann-1"), answer_text("stepped")
    ('it has ended already: continued by ann-1', 'stepped')
    """
    text = _LOST_RACES.get(answer)
    if text is None:
        return answer
    return f"{text}: {reason}" if reason else text


def points_of(spec: BreakpointSpec) -> frozenset[WaitPoint]:
    """The points at which slots that this breakpoint holds may come to stand still."""
    if spec.site in POINT_OF_SITE:
        return frozenset({POINT_OF_SITE[spec.site]})
    states = SlotState if spec.to_state is None else (spec.to_state,)
    return frozenset(point for point in map(POINT_OF_STATE.__getitem__, states) if point is not None)


class BreakpointFacts(msgspec.Struct, array_like=True):
    """The leader's record of a breakpoint."""

    spec: BreakpointSpec
    owner: str
    enabled: bool
    hits: int = 0
    """Times that it took effect."""
    message: str = ""
    """Why the breakpoint was disabled without a request, or the client that muted it; empty when neither."""
    away: bool = False
    """True if the owner's lease is lost and no client has changed it since. It is as before when the owner comes
    back."""

    @property
    def armed_at_home(self) -> bool:
        """True if the breakpoint would be armed if its owner were here."""
        return self.spec.enabled and not self.message and not (self.spec.one_shot and self.hits)


class HoldFacts(msgspec.Struct, array_like=True):
    """A slot that waits, or will at its next waitable point."""

    hold: int
    slot: int
    site: Site
    point: WaitPoint
    breakpoints: tuple[int, ...]
    owner: str
    since_ns: int
    max_hold_ns: int
    parked: bool = False
    """True if the slot has reached the point and stands still; until then the hold is pending."""
    suspend: Suspend = Suspend.SLOT
    on_timeout: OnTimeout = OnTimeout.CONTINUE


def stands_at(hold: HoldFacts, state: SlotState, copies: int) -> WaitPoint:
    """The point at which a held slot in ``state`` with so many open copies waits.

    The hold of a copy passes to the release of the blocks when the slot has finished and no copy is left.
    """
    finished = state is SlotState.FINISHING and not copies
    return WaitPoint.RELEASE if finished and hold.point in OF_A_COPY else hold.point


class FreezeFacts(msgspec.Struct, array_like=True):
    """Everything stands still."""

    by: str
    since_ns: int
    max_hold_ns: int
