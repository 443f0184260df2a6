"""Breakpoints and the gate: where a slot stops.

A breakpoint is evaluated in a fixed order. First it must be enabled, its dependency satisfied, and its site and state
those of the moment. Then its pattern and its condition must match, which counts one more match. The ignored matches and
the hit condition decide whether that match takes effect. The rate of logs and the budget of holds limit the action.

Law of this file: with nothing armed there is no gate (``Leader.gate is None``). A gate only matches facts, and every
effect of a match is an event, so decision replay reproduces every hold.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvbm_console.core.config import HIT_CONDITION
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import compile_condition, compile_log
from kvbm_console.core.holds import POINT_OF_SITE, BreakpointFacts
from kvbm_console.core.ids import CandidateStatus, Route, Site, SlotState, Tier, request_match

if TYPE_CHECKING:
    from kvbm_console.core.slots import SlotFacts
    from kvbm_console.core.state import CacheState

HOLDS_MAX: Final = 64
"""However many slots are live, more holds than this would be an outage and not a debugging session (rule 4)."""
METER_EVERY: Final = 8
"""One evaluation of a condition in this many is timed, and counted as often."""

STEPPED: Final = frozenset(Site) - {Site.TRANSITION_WILL, Site.CALL_WILL, Site.CALL_DID}
"""Sites that a step stops at. It does not stop before a move, which follows at once, nor at calls, which the engine
makes."""


class Moment(msgspec.Struct):
    """The facts of a site that is passed, as the gate needs them."""

    site: Site
    slot: int
    request: str
    old: SlotState
    new: SlotState
    route: Route | None = None
    tier: Tier | None = None
    candidate: int | None = None
    status: CandidateStatus | None = None
    since_ns: int | None = None
    """At a move: since when the slot was in the state that it leaves."""


Condition = Callable[[Any, Any, Any], bool]


class Armed:
    """An enabled breakpoint, compiled. A specification that does not compile fails at its first evaluation."""

    __slots__ = ("_named", "condition", "counts", "known", "message", "number", "seen", "spec")

    def __init__(self, known: BreakpointFacts) -> None:
        spec = known.spec
        self.known = known
        self.spec = spec
        self.number = spec.id
        self._named: Callable[[str], object] | None = None
        """Matches the request; compiled when it is asked first, which for most breakpoints is never."""
        self.condition: Condition | None = _compiled(compile_condition, spec.condition)
        self.message = _compiled(compile_log, spec.log)
        self.counts = hit_test(spec.hit_condition)
        self.seen = 0

    def matches(self, moment: Moment) -> bool:
        """True if the specification matches, apart from site and new state, which the index has checked."""
        spec = self.spec
        if spec.request != "*":
            if self._named is None:
                self._named = request_match(spec.request)
            if self._named(moment.request) is None:
                return False
        return (
            (spec.from_state is None or spec.from_state is moment.old)
            and (spec.route is None or spec.route is moment.route)
            and (spec.tier is None or spec.tier is moment.tier)
            and (spec.status is None or spec.status is moment.status)
        )


def _compiled(compile_one: Callable[[str], Any], text: str) -> Any:
    if not text:
        return None
    try:
        return compile_one(text)
    except UsageError as error:
        message = str(error)

        def fail(*_: Any) -> bool:
            raise UsageError(message)

        return fail


def hit_test(text: str) -> Callable[[int], bool] | None:
    """A test that is true if the n-th match takes effect, or None if every match does.

    >>> [n for n in range(1, 8) if hit_test("%3")(n)], [n for n in range(1, 5) if hit_test(">=3")(n)]
    ([3, 6], [3, 4])
    """
    found = HIT_CONDITION.fullmatch(text)
    if found is None:
        return None
    sign, number = found[1], int(found[2])
    if sign == "==":
        return lambda n: n == number
    return (lambda n: n >= number) if sign == ">=" else (lambda n: n % number == 0)


_CANDIDATES: Final = frozenset(POINT_OF_SITE) - {Site.REQUEST_FINISH}


class Gate:
    """The armed breakpoints by site and new state. Built anew whenever breakpoints change.

    ``stops`` are sites at which a client asked some slot to stop, by a step or an until. ``meter`` is a clock of the
    shell in nanoseconds: with it, ``condition_ns`` sums up the cost of conditions by breakpoint. The core decides
    nothing by it.
    """

    def __init__(
        self, breakpoints: dict[int, BreakpointFacts], meter: Callable[[], int] | None = None,
        condition_ns: dict[int, int] | None = None, stops: frozenset[Site] = frozenset(),
    ) -> None:
        self._breakpoints = breakpoints
        self._meter = meter
        self._condition_ns = {} if condition_ns is None else condition_ns
        self._armed: dict[tuple[Site, SlotState], list[Armed]] = {}
        for number in sorted(breakpoints):
            known = breakpoints[number]
            if known.enabled:
                armed = Armed(known)
                for state in SlotState if known.spec.to_state is None else (known.spec.to_state,):
                    self._armed.setdefault((known.spec.site, state), []).append(armed)
        self._stops = stops
        self.sites = stops | {site for site, _ in self._armed}
        """The sites that are watched."""
        self.candidates = not _CANDIDATES.isdisjoint(self.sites)
        """True if a site of candidates is watched."""

    def watches(self, site: Site, new: SlotState) -> bool:
        """True if a breakpoint or a stop is set at this site for slots that are then in this state."""
        return site in self._stops or (site, new) in self._armed

    def ask(
        self, moment: Moment, slot: "SlotFacts", state: "CacheState"
    ) -> tuple[list[Armed], list[tuple[int, str]]]:
        """(the breakpoints that match here, by id; those whose condition failed, with the reason)."""
        matched: list[Armed] = []
        failed: list[tuple[int, str]] = []
        for armed in self._armed.get((moment.site, moment.new), ()):
            if not armed.matches(moment) or not armed.known.enabled:
                continue
            if armed.spec.depends_on:
                first = self._breakpoints.get(armed.spec.depends_on)
                if first is None or not first.hits:
                    continue
            if armed.condition is not None:
                try:
                    if not self._holds(armed, slot, state, moment):
                        continue
                except Exception as error:  # whatever it is: a condition never raises into the leader
                    failed.append((armed.number, f"condition: {error}"))
                    continue
            matched.append(armed)
        return matched, failed

    def _holds(self, armed: Armed, slot: "SlotFacts", state: "CacheState", moment: Moment) -> bool:
        assert armed.condition is not None
        if self._meter is None:
            return armed.condition(slot, state, moment)
        armed.seen += 1
        if armed.seen % METER_EVERY != 1:
            return armed.condition(slot, state, moment)
        began = self._meter()
        found = armed.condition(slot, state, moment)
        spent = (self._meter() - began) * METER_EVERY
        self._condition_ns[armed.number] = self._condition_ns.get(armed.number, 0) + spent
        return found


def hold_budget(live: int, minimum: int, share: float) -> int:
    """Slots that may be held at once: max(minimum, share of the live slots), at most 64."""
    return min(HOLDS_MAX, max(minimum, int(live * share)))
