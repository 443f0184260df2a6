"""Breakpoints, holds and the gate: where a slot stops, and where it can stand still.

Law of this file: with nothing armed there is no gate (``Leader.gate is None``); a gate is pure matching over facts, and
what follows from a match is an event like any other, so decision replay reproduces every hold.
"""

from fnmatch import fnmatchcase
from typing import Final

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import CandidateStatus, Route, Site, SlotState, Tier, WaitPoint

HOLDS_MAX: Final = 64
"""However many slots are live, more holds than this would be an outage and not a debugging session (rule 4)."""

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
"""The waitable point that a slot reaches next from each state; None: it can only be logged."""

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
    """Where a slot in ``state`` (after the move) stands still when ``site`` stops it; None: nowhere.

    >>> wait_point(Site.TRANSITION_DID, SlotState.ONBOARDING).label
    'dispatch'
    """
    return POINT_OF_SITE[site] if site in POINT_OF_SITE else POINT_OF_STATE[state]


class BreakpointFacts(msgspec.Struct, array_like=True):
    """One breakpoint as the leader keeps it."""

    spec: BreakpointSpec
    owner: str
    enabled: bool
    hits: int = 0
    """Times that it took effect."""


class HoldFacts(msgspec.Struct, array_like=True):
    """One slot that waits, or will at its next waitable point."""

    hold: int
    slot: int
    site: Site
    point: WaitPoint
    breakpoints: tuple[int, ...]
    owner: str
    since_ns: int
    max_hold_ns: int
    parked: bool = False
    """Whether the slot has reached the point and stands still; until then the hold is pending."""


class Moment(msgspec.Struct):
    """What a site knows when it asks the gate."""

    site: Site
    slot: int
    request: str
    old: SlotState
    new: SlotState
    route: Route | None = None
    tier: Tier | None = None
    candidate: int | None = None
    status: CandidateStatus | None = None


class Gate:
    """The armed breakpoints, indexed by site and new state. Built anew whenever breakpoints change."""

    def __init__(self, breakpoints: dict[int, BreakpointFacts]) -> None:
        self._index: dict[int, list[BreakpointFacts]] = {}
        self.calls = False
        """Whether a call site is watched: entry points are the commonest sites, and hardly ever asked for."""
        for number in sorted(breakpoints):
            known = breakpoints[number]
            if not known.enabled:
                continue
            self.calls = self.calls or known.spec.site in (Site.CALL_WILL, Site.CALL_DID)
            states = (known.spec.to_state,) if known.spec.to_state is not None else tuple(SlotState)
            for state in states:
                self._index.setdefault(known.spec.site << 4 | state, []).append(known)

    @property
    def armed(self) -> bool:
        """Whether any breakpoint is enabled."""
        return bool(self._index)

    def watches(self, site: Site, new: SlotState) -> bool:
        """Whether a breakpoint could match at this site: the cheap question before ``ask``."""
        return (site << 4 | new) in self._index  # an int: hashing two members would cost ten times as much

    def ask(self, moment: Moment) -> list[BreakpointFacts]:
        """The breakpoints that match here, by id; the caller turns matches into hits."""
        found = self._index.get(moment.site << 4 | moment.new)
        if not found:
            return []
        return [known for known in found if matches(known.spec, moment)]


def matches(spec: BreakpointSpec, moment: Moment) -> bool:
    """Whether a specification matches, apart from site and new state, which the index has checked."""
    if spec.from_state is not None and spec.from_state is not moment.old:
        return False
    if spec.route is not None and spec.route is not moment.route:
        return False
    if spec.tier is not None and spec.tier is not moment.tier:
        return False
    return spec.request == "*" or fnmatchcase(moment.request, spec.request)


def hold_budget(live: int, minimum: int, share: float) -> int:
    """Slots that may be held at once: max(minimum, share of the live slots), at most 64."""
    return min(HOLDS_MAX, max(minimum, int(live * share)))

