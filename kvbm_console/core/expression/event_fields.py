"""The fields of an event, as ``tail``, exports and the log filter on them.

Law of this file: the state is that *before* the event, or None without a fold, in which case fields of the facts are
absent.
"""

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final, get_args

from kvbm_console.core import events as ev
from kvbm_console.core.describe import describe
from kvbm_console.core.expression.fields import words
from kvbm_console.core.expression.schema import YES_NO, Field, Kind, Schema
from kvbm_console.core.ids import (
    BreakpointAction,
    CandidateStatus,
    EvictRule,
    FinishReason,
    HoldEnd,
    MissReason,
    Note,
    ReleaseReason,
    ResetMode,
    Route,
    Site,
    SkipReason,
    SlotState,
    Tier,
    WaitPoint,
    Word,
)
from kvbm_console.core.stimuli import ENTRY_NAMES

_KINDS: Final = {kind.__name__: kind for kind in get_args(ev.AnyEvent)}
_REASONS: Final[tuple[type[Word], ...]] = (
    SkipReason, MissReason, ReleaseReason, EvictRule, FinishReason, HoldEnd, ResetMode, Note,
)
_REASON_WORDS: Final = {member.label: member.label for kind in _REASONS for member in kind}
_REASON_FIELDS: Final = ("reason", "why", "filtered", "rule", "mode", "note")
_LABELS: Final[dict[type, dict[int, str]]] = {kind: {int(member): member.label for member in kind} for kind in _REASONS}
_STATUS_OF: Final[dict[type[ev.Event], CandidateStatus]] = {
    ev.CandidatePlanned: CandidateStatus.PENDING_EVALUATION, ev.CandidateEnqueued: CandidateStatus.PENDING_EVALUATION,
    ev.CandidateEvaluated: CandidateStatus.PENDING_EVALUATION, ev.CandidateSkipped: CandidateStatus.SKIPPED,
    ev.CandidatePromoted: CandidateStatus.PROMOTED, ev.OperationStarted: CandidateStatus.PROMOTED,
    ev.OperationReported: CandidateStatus.PROMOTED,
}
_ID_BYTES, _HASH_BYTES = 4, 8


def _slots(event: Any, state: Any, _moment: Any) -> tuple[int, ...]:
    slot = getattr(event, "slot", None)
    if slot is not None:
        return (slot,)
    named = getattr(event, "slots", None)
    if named is not None:
        return tuple(named)
    candidate = _candidate_facts(event, state)
    return () if candidate is None or candidate.slot is None else (candidate.slot,)


def _requests(event: Any, state: Any, _moment: Any) -> tuple[str, ...]:
    request = getattr(event, "request", None)
    if request is not None:
        return (request,)
    if state is None:
        return ()
    known = state.slots
    return tuple(known[number].request for number in _slots(event, state, None) if number in known)


def _candidate(event: Any, state: Any, _moment: Any) -> int | None:
    number = getattr(event, "candidate", None)
    if number is None and state is not None:
        operation = state.operations.get(getattr(event, "operation", None))
        number = None if operation is None else operation.candidate
    return number


def _candidate_facts(event: Any, state: Any) -> Any:
    number = None if state is None else _candidate(event, state, None)
    return None if number is None else state.candidates.get(number)


def _operation(event: Any, state: Any, _moment: Any) -> int | None:
    number = getattr(event, "operation", None)
    if number is not None:
        return int(number)
    candidate = _candidate_facts(event, state)
    return None if candidate is None else candidate.operation


def _route(event: Any, state: Any, _moment: Any) -> Route | None:
    route: Route | None = getattr(event, "route", None)
    if route is None:
        candidate = _candidate_facts(event, state)
        route = None if candidate is None else candidate.route
    return route


def _tiers(event: Any, state: Any, _moment: Any) -> tuple[Tier, ...]:
    tier = getattr(event, "tier", None)
    if tier is not None:
        return (tier,)
    pool = getattr(event, "pool", None)
    if pool is not None and state is not None and 0 <= pool < len(state.pools):
        return (state.pools[pool].info.tier,)
    route = _route(event, state, None)
    return () if route is None else (route.source, route.target)


def _blocks(event: Any, _state: Any, _moment: Any) -> int | None:
    for name, size in (("targets", _ID_BYTES), ("ids", _ID_BYTES), ("hashes", _HASH_BYTES)):
        column = getattr(event, name, None)
        if column:
            return len(column) // size
    if type(event) is ev.CandidateEvaluated:
        return event.found
    if type(event) is ev.BlocksSeen:
        return (len(event.stored) + len(event.removed)) // _HASH_BYTES
    if type(event) is ev.HitsLost:
        return event.blocks
    return None


def _tokens(event: Any, _state: Any, _moment: Any) -> int | None:
    for name in ("computed_tokens", "answer", "external_tokens", "prompt_tokens", "position"):
        value = getattr(event, name, None)
        if value is not None:
            return int(value)
    return None


def _reason(event: Any, _state: Any, _moment: Any) -> str | None:
    for name in _REASON_FIELDS:
        value = getattr(event, name, None)
        if isinstance(value, IntEnum) and type(value) in _LABELS:
            return _LABELS[type(value)][value]
    return None


def _status(event: Any, _state: Any, _moment: Any) -> CandidateStatus | None:
    if type(event) is ev.CandidateEnded:
        return event.status
    return _STATUS_OF.get(type(event))


def _text(event: Any, state: Any, _moment: Any) -> str:
    return describe(event, state)


def _attribute(name: str) -> Callable[[Any, Any, Any], Any]:
    return lambda event, state, moment: getattr(event, name, None)


def _texts(*names: str) -> Callable[[Any, Any, Any], tuple[str, ...]]:
    def get(event: Any, _state: Any, _moment: Any) -> tuple[str, ...]:
        found: Iterator[Any] = (getattr(event, name, None) for name in names)
        return tuple(value for value in found if isinstance(value, str) and value)

    return get


def _breakpoints(event: Any, _state: Any, _moment: Any) -> tuple[int, ...]:
    numbers = getattr(event, "breakpoints", None)
    if numbers is None:
        number = getattr(event, "breakpoint", None)
        return () if number is None else (number,)
    return tuple(numbers)


def event_fields(block_bytes: int | None = None) -> list[Field]:
    """Fields of an event."""
    word, number = Kind.WORD, Kind.ID
    fields = [
        Field("kind", word, lambda e, s, m: type(e), "The kind of the event.", _KINDS, ordered=False),
        Field("seq", number, lambda e, s, m: e.seq, "Its number."),
        Field("time", Kind.DURATION, lambda e, s, m: e.at_ns, "When it became true, on the engine's clock."),
        Field("cause", number, lambda e, s, m: e.cause, "The number of the stimulus that led to it."),
        Field("request", Kind.TEXT, _requests, "The requests that it is about.", ordered=False, many=True,
              optional=True),
        Field("slot", number, _slots, "The slots that it is about.", many=True, optional=True),
        Field("tier", word, _tiers, "The tiers that it is about.", words(Tier), many=True, optional=True),
        Field("route", word, _route, "The route of its candidate.", words(Route), ordered=False, optional=True),
        Field("blocks", Kind.COUNT, _blocks, "How many blocks it names.", optional=True),
        Field("tokens", Kind.COUNT, _tokens, "How many tokens it names.", optional=True),
        Field("reason", word, _reason, "Why.", _REASON_WORDS, ordered=False, optional=True),
        Field("status", word, _status, "The candidate's status after it.", words(CandidateStatus), ordered=False,
              optional=True),
        Field("operation", number, _operation, "Its operation.", optional=True),
        Field("candidate", number, _candidate, "Its candidate.", optional=True),
        Field("from", word, _attribute("old"), "The state that a slot left.", words(SlotState), ordered=False,
              optional=True),
        Field("to", word, _attribute("new"), "The state that a slot entered.", words(SlotState), ordered=False,
              optional=True),
        Field("entry", word, lambda e, s, m: ENTRY_NAMES.get(getattr(e, "entry", -1)), "The entry point of a move.",
              {name: name for name in ENTRY_NAMES.values()}, ordered=False, optional=True),
        Field("site", word, _attribute("site"), "The site of a hit or a hold.", words(Site), ordered=False,
              optional=True),
        Field("point", word, _attribute("point"), "Where a hold stands still.", words(WaitPoint), ordered=False,
              optional=True),
        Field("action", word, _attribute("action"), "The action of a hit.", words(BreakpointAction), ordered=False,
              optional=True),
        Field("breakpoint", number, _breakpoints, "The breakpoints of a hit or a hold.", many=True, optional=True),
        Field("hold", number, _attribute("hold"), "The hold.", optional=True),
        Field("by", Kind.TEXT, _texts("by", "owner"), "Its client or owner.", ordered=False, many=True, optional=True),
        Field("ok", word, _attribute("ok"), "Yes if the rank could copy.", YES_NO, ordered=False, optional=True),
        Field("text", Kind.TEXT, _text, "Its line of text.", ordered=False),
    ]
    if block_bytes is not None:
        def size(event: Any, state: Any, moment: Any) -> int | None:
            count = _blocks(event, state, moment)
            return None if count is None else count * block_bytes

        fields.append(Field("bytes", Kind.SIZE, size, "Bytes of the blocks that it names.", optional=True))
    return fields


EVENT: Final = Schema("an event", event_fields())
