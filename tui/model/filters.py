"""Filters of lists: the expression language over what each list shows, or plain text over the request.

A schema is the language's own, with getters that read what this console has: ages run on the shown clock, and what
became of a candidate after it ended is taken from the history beside the facts.

Law of this file: what is not understood is refused with the column of the mistake; nothing is ever ignored.
"""

from collections.abc import Callable
from fnmatch import translate
from re import compile as compile_pattern
from typing import Any, Final

from kvbm_console.analysis.lives import Life
from kvbm_console.core.expression import EVENT, SLOT, ExpressionError, Field, Schema, complete, parse
from kvbm_console.core.expression.closures import compile_tree
from kvbm_console.core.expression.fields import words
from kvbm_console.core.expression.schema import YES_NO, Kind
from kvbm_console.core.ids import BreakpointAction, CandidateStatus, Route, Site, SlotState, Tier

from .events import concerns, slot_of
from .history import History

FILTER_MAX: Final = 1_024
"""Characters of a filter: the language's own limit."""
_SIGNS: Final = frozenset("=<>~()\"'! ")
"""What no plain text over the request has; with one of them it is an expression."""

Test = Callable[[Any, Any, Any], bool]
"""``test(item, state, moment)``; what the moment is, the schema says."""


class FilterError(ValueError):
    """Raised when a filter is not understood; ``column`` counts from 0."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


class Filter:
    """A compiled filter.

    >>> wanted = Filter.parse("live and held", LIVES)
    >>> wanted.matches(Life(3, "chat-1", 0), None, 5)
    False
    >>> Filter.parse("chat", LIVES).matches(Life(3, "chat-1", 0), None, 5)
    True
    """

    def __init__(self, text: str, test: Test) -> None:
        self.text = text
        self._test = test

    def matches(self, item: Any, state: Any = None, moment: Any = None) -> bool:
        """Whether an item of the list stays."""
        return self._test(item, state, moment)

    @classmethod
    def parse(cls, text: str, schema: Schema) -> "Filter":
        """Compile; raises FilterError."""
        plain = plain_text(text, schema)
        if plain is not None:
            return cls(text, _by_request(plain, schema))
        try:
            return cls(text, compile_tree(parse(text, schema), schema))
        except ExpressionError as error:
            raise FilterError(error.column - 1, error.message) from None


def plain_text(text: str, schema: Schema) -> str | None:
    """The text to look for in requests, when that is what was typed; None for an expression.

    >>> plain_text("chat-04*", LIVES), plain_text("held", LIVES), plain_text("age > 1 s", LIVES)
    ('chat-04*', None, None)
    """
    text = text.strip()
    if not text or len(text) > FILTER_MAX or "request" not in schema.fields or _SIGNS & set(text):
        return None
    field = schema.fields.get(text)
    return None if text.lower() in ("not", "and", "or") or (field is not None and field.flag) else text


def _by_request(text: str, schema: Schema) -> Test:
    get = schema.fields["request"].get
    if any(character in text for character in "*?["):
        match = compile_pattern(translate(text)).match

        def globbed(item: Any, state: Any, moment: Any) -> bool:
            return any(match(name) is not None for name in _names(get(item, state, moment)))

        return globbed
    return lambda item, state, moment: any(text in name for name in _names(get(item, state, moment)))


def _names(found: Any) -> tuple[str, ...]:
    return found if isinstance(found, tuple) else (found or "",)


def completions(text: str, schema: Schema) -> list[str]:
    """Words that may stand at the end of what was typed."""
    return complete(text, schema)


# --- the lists -------------------------------------------------------------------------------------------------------


def _with(schema: Schema, name: str, *fields: Field) -> Schema:
    """A schema with some fields read in another way, or added."""
    known = schema.fields | {field.name: field for field in fields}
    return Schema(name, list(known.values()))


def _since(name: str, about: str, start: Callable[[Any], int]) -> Field:
    return Field(name, Kind.DURATION, lambda item, state, now: now - start(item), about)


SLOTS: Final = _with(
    SLOT, SLOT.name,
    _since("age", "How long it has been in its state.", lambda slot: int(slot.since_ns)),
    _since("lifetime", "How long it has existed.", lambda slot: int(slot.opened_ns)),
)
"""Slots. The moment is the shown time of the target."""


def _preemptions(life: Life, state: Any, now: Any) -> int:
    return sum(move.state is SlotState.PREEMPTED for move in life.moves)


def _life_age(life: Life, state: Any, now: int) -> int:
    end = now if life.closed_ns is None else life.closed_ns
    return end - (life.starts[-1] if life.starts else life.opened_ns)


LIVES: Final = Schema("a life", [
    Field("request", Kind.TEXT, lambda life, s, now: life.request, "The request's id.", ordered=False),
    Field("slot", Kind.ID, lambda life, s, now: life.slot, "The slot's number."),
    Field("state", Kind.WORD, lambda life, s, now: life.state, "Its last state.", words(SlotState), ordered=False),
    Field("age", Kind.DURATION, _life_age, "How long it has been, or was, in that state."),
    Field("lifetime", Kind.DURATION,
          lambda life, s, now: (life.closed_ns if life.closed_ns is not None else now) - life.opened_ns,
          "How long it has existed, or did."),
    Field("live", Kind.WORD, lambda life, s, now: life.closed_ns is None, "Whether it has not ended.", YES_NO,
          ordered=False),
    Field("held", Kind.WORD, lambda life, s, now: life.held_now() is not None, "Whether it is held.", YES_NO,
          ordered=False),
    Field("holds", Kind.COUNT, lambda life, s, now: len(life.stays), "How often it was held."),
    Field("preemptions", Kind.COUNT, _preemptions, "How often it was preempted."),
    Field("transfers", Kind.COUNT, lambda life, s, now: len(life.transfers), "Transfers of its blocks."),
])
"""Lives on the timeline. The moment is the shown time of the target."""

TRANSFERS: Final = Schema("a transfer", [
    Field("request", Kind.TEXT, lambda row, s, m: row.transfer.request, "The request whose blocks move.",
          ordered=False),
    Field("route", Kind.WORD, lambda row, s, m: row.transfer.route, "From where to where.", words(Route),
          ordered=False),
    Field("status", Kind.WORD, lambda row, s, m: row.transfer.status, "Its status.", words(CandidateStatus),
          ordered=False),
    Field("age", Kind.DURATION, lambda row, s, m: row.age_ns, "Since it was planned, or since it ended."),
    Field("blocks", Kind.COUNT, lambda row, s, m: row.transfer.blocks, "Blocks that move."),
    Field("operation", Kind.ID, lambda row, s, m: row.transfer.operation, "Its operation.", optional=True),
    Field("candidate", Kind.ID, lambda row, s, m: row.transfer.candidate, "Its candidate."),
    Field("open", Kind.WORD, lambda row, s, m: row.transfer.open, "Whether it has not ended.", YES_NO, ordered=False),
    Field("moving", Kind.WORD, lambda row, s, m: row.transfer.open and row.transfer.started_ns is not None,
          "Whether its copy has begun.", YES_NO, ordered=False),
    Field("held", Kind.WORD, lambda row, s, m: row.transfer.held_since_ns is not None, "Whether its slot is held.",
          YES_NO, ordered=False),
    Field("slow", Kind.WORD, lambda row, s, m: row.level is not None, "Whether it is marked.", YES_NO, ordered=False),
    Field("reason", Kind.TEXT, lambda row, s, m: row.reason, "What its last column says.", ordered=False),
])
"""Rows of transfers."""


def _event_slot(event: Any, state: Any, history: History) -> tuple[int, ...]:
    several = getattr(event, "slots", None)
    if several is not None:
        return tuple(several)
    slot = slot_of(event, history)
    return () if slot is None else (slot,)


def _event_request(event: Any, state: Any, history: History) -> tuple[str, ...]:
    named = getattr(event, "request", None)
    if named is not None:
        return (named,)
    several = getattr(event, "slots", None)
    if several is not None:
        lives = ((slot, history.life_in(slot)) for slot in several)
        names = (life.request if life is not None else history.names.requests.get(slot) for slot, life in lives)
        return tuple(name for name in names if name is not None)
    name = concerns(event, history)
    return (name,) if name else ()


def _event_transfer(event: Any, history: History) -> Any:
    candidate, operation = getattr(event, "candidate", None), getattr(event, "operation", None)
    if candidate is not None:
        return history.transfer_of(candidate=candidate)
    return history.transfer_of(operation=operation) if operation is not None else None


def _event_route(event: Any, state: Any, history: History) -> Route | None:
    known = _event_transfer(event, history)
    return getattr(event, "route", None) or (known.route if known is not None else None)


def _event_tiers(event: Any, state: Any, history: History) -> tuple[Tier, ...]:
    route = _event_route(event, state, history)
    if route is not None:
        return (route.source, route.target)
    found: tuple[Tier, ...] = EVENT.fields["tier"].get(event, state, None)
    return found


def _event_number(name: str) -> Callable[[Any, Any, Any], int | None]:
    def get(event: Any, state: Any, history: History) -> int | None:
        number = getattr(event, name, None)
        if number is not None:
            return int(number)
        known = _event_transfer(event, history)
        return getattr(known, name) if known is not None else None

    return get


EVENTS: Final = _with(
    EVENT, EVENT.name,
    Field("request", Kind.TEXT, _event_request, "The requests that it is about.", ordered=False, many=True,
          optional=True),
    Field("slot", Kind.ID, _event_slot, "The slots that it is about.", many=True, optional=True),
    Field("route", Kind.WORD, _event_route, "The route of its candidate.", words(Route), ordered=False, optional=True),
    Field("tier", Kind.WORD, _event_tiers, "The tiers that it is about.", words(Tier), many=True, optional=True),
    Field("operation", Kind.ID, _event_number("operation"), "Its operation.", optional=True),
    Field("candidate", Kind.ID, _event_number("candidate"), "Its candidate.", optional=True),
)
"""Events of the log. The moment is the mirror: it knows of candidates and requests that the facts no longer have."""

BREAKPOINTS: Final = Schema("a breakpoint", [
    Field("id", Kind.ID, lambda known, s, m: known.spec.id, "Its number."),
    Field("request", Kind.TEXT, lambda known, s, m: known.spec.request, "The requests that it matches.",
          ordered=False),
    Field("site", Kind.WORD, lambda known, s, m: known.spec.site, "Where it looks.", words(Site), ordered=False),
    Field("to", Kind.WORD, lambda known, s, m: known.spec.to_state, "The state it waits for.", words(SlotState),
          ordered=False, optional=True),
    Field("action", Kind.WORD, lambda known, s, m: known.spec.action, "What it does.", words(BreakpointAction),
          ordered=False),
    Field("owner", Kind.TEXT, lambda known, s, m: known.owner, "Who set it.", ordered=False),
    Field("enabled", Kind.WORD, lambda known, s, m: known.enabled, "Whether it is armed.", YES_NO, ordered=False),
    Field("hits", Kind.COUNT, lambda known, s, m: known.hits, "How often it took effect."),
])
"""The list of breakpoints."""

WARNINGS: Final = Schema("a warning", [
    Field("request", Kind.TEXT, lambda warning, s, m: warning.request or warning.who, "Who it is about.",
          ordered=False),
    Field("lint", Kind.TEXT, lambda warning, s, m: warning.lint, "The rule that found it.", ordered=False),
    Field("level", Kind.WORD, lambda warning, s, m: int(warning.level), "How bad.",
          {"fault": 0, "held": 1, "caution": 2}, ordered=False),
    Field("over", Kind.WORD, lambda warning, s, m: warning.ended_ns is not None, "Whether it has ended.", YES_NO,
          ordered=False),
])
"""The list of warnings."""
