"""Breakpoints and the gate: where a slot stops.

The order of evaluation is fixed: armed, enabled, dependency satisfied; site and state (the index); what it matches; its
condition; one more match; ignored matches and the hit condition; the rate of logs; the budget of holds; the action.

Law of this file: with nothing armed there is no gate (``Leader.gate is None``); a gate is pure matching over facts, and
what follows from a match is an event like any other, so decision replay reproduces every hold.
"""

import re
import sys
from collections.abc import Callable, Container
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
_LITERAL: Final = re.compile(r"[^*?\[]*")
"""What of a glob comes before its first wildcard."""
METER_EVERY: Final = 8
"""One evaluation of a condition in this many is timed, and counted as often."""

STEPPED: Final = frozenset(Site) - {Site.TRANSITION_WILL, Site.CALL_WILL, Site.CALL_DID}
"""Sites that a step stops at: not before a move, which follows in the same breath; calls are not the slot's doing."""


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
    since_ns: int | None = None
    """At a move: since when the slot was in the state that it leaves."""


Condition = Callable[[Any, Any, Any], bool]


class Armed:
    """One enabled breakpoint, compiled. A specification that does not compile fails at its first evaluation."""

    __slots__ = ("_named", "condition", "counts", "known", "literal", "message", "number", "plain", "seen", "spec")

    def __init__(self, known: BreakpointFacts) -> None:
        spec = known.spec
        self.known = known
        self.spec = spec
        self.number = spec.id
        self._named: Callable[[str], object] | None = None
        """Matches the request; compiled when it is asked first, which for most breakpoints is never."""
        self.literal = _literal(spec.request)
        """What the request has to begin with."""
        self.plain = spec.from_state is None and spec.route is None and spec.tier is None and spec.status is None
        self.condition: Condition | None = _compiled(compile_condition, spec.condition)
        self.message = _compiled(compile_log, spec.log)
        self.counts = hit_test(spec.hit_condition)
        self.seen = 0

    def matches(self, moment: Moment) -> bool:
        """Whether the specification matches, apart from site and new state, which the index has checked."""
        spec = self.spec
        if spec.request != "*":
            if self._named is None:
                self._named = request_match(spec.request)
            if self._named(moment.request) is None:
                return False
        if self.plain:
            return True
        return (
            (spec.from_state is None or spec.from_state is moment.old)
            and (spec.route is None or spec.route is moment.route)
            and (spec.tier is None or spec.tier is moment.tier)
            and (spec.status is None or spec.status is moment.status)
        )


def _literal(pattern: str) -> str:
    found = _LITERAL.match(pattern)
    return "" if found is None else found[0]


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
    """Whether the n-th match takes effect; None: always.

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


class Watched:
    """The breakpoints of one site and new state, by id, and a quick no for requests that none of them names.

    With ``everybody``, each request is named.
    """

    __slots__ = ("_literals", "armed", "everybody")

    def __init__(self, armed: list[Armed], *, everybody: bool = False) -> None:
        self.armed = armed
        self.everybody = everybody
        self._literals: list[_Literals | None] = [_ANY if everybody else None] * STATES
        """By old state; made when it is asked first: gates are built often, and most of their entries never asked."""

    def names(self, request: str, old: SlotState) -> bool:
        """Whether a breakpoint for this old state has a pattern with the literal beginning of this request."""
        literals = self._literals[old]
        if literals is None:
            texts = {one.literal for one in self.armed if one.spec.from_state is None or one.spec.from_state is old}
            literals = self._literals[old] = _by_length(texts)
        return _begins(request, literals)


def _above(text: str) -> str:
    """The lowest text above all that begin with ``text``; empty where there is none.

    >>> _above("chat-"), _above("a\U0010ffff"), _above("")
    ('chat.', 'b', '')
    """
    text = text.rstrip(chr(sys.maxunicode))
    return text[:-1] + chr(ord(text[-1]) + 1) if text else ""


def _by_length(texts: set[str]) -> "_Literals":
    lengths: dict[int, set[str]] = {}
    for text in texts:
        lengths.setdefault(len(text), set()).add(text)
    return tuple((length, frozenset(some)) for length, some in sorted(lengths.items()))


def _begins(request: str, literals: "_Literals") -> bool:
    """Whether the request begins with one of them: they have few different lengths, so a hundred cost a look-up or two.

    >>> _begins("chat-1", _by_length({"chat-", "api-"})), _begins("chat-1", _by_length({"chat-2"}))
    (True, False)
    """
    for length, texts in literals:  # noqa: SIM110 - a generator costs more than the question
        if request[:length] in texts:
            return True
    return False


_Literals = tuple[tuple[int, frozenset[str]], ...]
"""Literal beginnings of patterns, by their length."""
_ANY: Final[_Literals] = ((0, frozenset({""})),)
"""Every request begins with nothing."""
_EVERY_SLOT: Final = range(2**62)
STATES: Final = 16
"""Room for states in the table of a gate: a site is shifted by four bits."""
_CALLS: Final = (Site.CALL_WILL, Site.CALL_DID)
_CANDIDATES: Final = tuple(site for site in POINT_OF_SITE if site is not Site.REQUEST_FINISH)


class Gate:
    """The armed breakpoints, indexed by site and new state. Built anew whenever breakpoints change.

    A request keeps its name, so whether a breakpoint may name it is asked once, when its slot is opened: ``begin`` and
    ``end`` say no to nearly every request without a call of ours, ``seek`` knows. A site asks whether its slot is in
    ``sought``.

    ``stops`` are sites at which somebody asked some slot to stop, by a step or an until. ``meter`` is a clock of the
    shell in nanoseconds: with it, ``condition_ns`` sums up by breakpoint what conditions cost. The core decides
    nothing by it.
    """

    def __init__(
        self, breakpoints: dict[int, BreakpointFacts], meter: Callable[[], int] | None = None,
        condition_ns: dict[int, int] | None = None, stops: frozenset[Site] = frozenset(),
    ) -> None:
        self._breakpoints = breakpoints
        self._meter = meter
        self._condition_ns = {} if condition_ns is None else condition_ns
        index: dict[int, list[Armed]] = {}
        literals: set[str] = set()
        for number in sorted(breakpoints):
            known = breakpoints[number]
            if not known.enabled:
                continue
            armed = Armed(known)
            literals.add(armed.literal)
            states = (known.spec.to_state,) if known.spec.to_state is not None else tuple(SlotState)
            for state in states:
                index.setdefault(known.spec.site << 4 | state, []).append(armed)
        self.armed = bool(index)
        """Whether any breakpoint is enabled."""
        self.stops = bool(stops)
        """Whether somebody asked for some slot to stop; a superset: it may have stopped or ended meanwhile."""
        ends = {_above(text) for text in literals}
        self.everybody = self.stops or "" in ends
        """Whether every slot is sought."""
        self.begin, self.end = ("", "") if self.everybody or not literals else (min(literals), max(ends))
        """No other request than one from ``begin`` on and below ``end`` has to be sought."""
        self._literals = _by_length(literals)
        self._found: set[int] = set()
        self.sought: Container[int] = _EVERY_SLOT if self.everybody else self._found
        """The slots that a breakpoint may name, or somebody asked to stop."""
        everybody = Watched([], everybody=True)
        self.table: list[Watched | None] = [None] * (len(Site) * STATES)
        """By site << 4 | new state: the first question at every site, and nearly always the last."""
        for site in stops:
            self.table[site * STATES : (site + 1) * STATES] = [everybody] * STATES
        for at, watching in index.items():
            self.table[at] = Watched(watching, everybody=self.table[at] is not None)
        self.moves = [
            _either(will, did)
            for will, did in zip(self.row(Site.TRANSITION_WILL), self.row(Site.TRANSITION_DID), strict=True)
        ]
        """By new state, what watches a move before or after it: the commonest sites have one question together."""
        self.opens = self.table[Site.TRANSITION_DID << 4 | SlotState.INITIALIZED] is not None
        """Whether the first state of a slot is watched."""
        self.finishes = self._watched((Site.REQUEST_FINISH,))
        """Whether the ends of requests are watched."""
        self.calls = self._watched(_CALLS)
        """Whether a call site is watched: there are two for every stimulus, and they are hardly ever asked for."""
        self.candidates = self._watched(_CANDIDATES)
        """Whether a site of candidates is watched."""

    def seek(self, slot: "SlotFacts") -> None:
        """A slot is open: it is sought if a breakpoint has a pattern with the literal beginning of its request."""
        if self.begin <= slot.request < self.end and _begins(slot.request, self._literals):
            self._found.add(slot.slot)

    def lose(self, slot: int) -> None:
        """The slot is closed."""
        self._found.discard(slot)

    @property
    def awake(self) -> bool:
        """Whether any slot is sought."""
        return self.everybody or bool(self._found)

    def row(self, site: Site) -> list[Watched | None]:
        """The entries of one site, by new state."""
        return self.table[site * STATES : (site + 1) * STATES]

    def _watched(self, sites: tuple[Site, ...]) -> bool:
        return any(entry is not None for site in sites for entry in self.row(site))

    @property
    def sites(self) -> frozenset[Site]:
        """The sites that are watched."""
        return frozenset(site for site in Site if self._watched((site,)))

    def ask(
        self, moment: Moment, slot: "SlotFacts", state: "CacheState"
    ) -> tuple[list[Armed], list[tuple[int, str]]]:
        """(the breakpoints that match here, by id; those whose condition failed, with the reason)."""
        matched: list[Armed] = []
        failed: list[tuple[int, str]] = []
        watched = self.table[moment.site << 4 | moment.new]
        for armed in () if watched is None else watched.armed:
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


def _either(one: Watched | None, other: Watched | None) -> Watched | None:
    """What one of two sites watches."""
    if one is None or other is None:
        return one or other
    return Watched([*one.armed, *other.armed], everybody=one.everybody or other.everybody)


def hold_budget(live: int, minimum: int, share: float) -> int:
    """Slots that may be held at once: max(minimum, share of the live slots), at most 64."""
    return min(HOLDS_MAX, max(minimum, int(live * share)))
