"""Events in words, and the links between them: the subject of an event, its phrase, its cause and its first effect.

The phrases are the core's. The console adds its own knowledge, such as a transfer that has ended.

Events name the stimulus that they follow from, not the event; the links between events are the ids that they share.
An event follows from the event before it in the same stimulus that is about the same thing. Otherwise it follows from
the step before it in the life of its hold, its candidate or its slot. A move of a slot follows from the event that
opens that move, never from an unrelated event before it.

Law of this file: an event whose cause is older than the log has no cause here, because causes are never guessed.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import HASH_BYTES
from kvbm_console.core.describe import describe as core_describe
from kvbm_console.core.events import Event
from kvbm_console.core.expression import EVENT, Field
from kvbm_console.core.expression.fields import words
from kvbm_console.core.expression.schema import Kind
from kvbm_console.core.ids import CandidateStatus, Route, SlotState, Tier
from kvbm_console.core.stimuli import ENTRY_TAGS, Stimulus

from .filters import with_fields
from .history import History
from .numbers import count, duration, plural

SCANNED_MAX: Final = 10_000
"""Events looked at for one step; half of the events that the log keeps."""
TRIED_MAX: Final = 64
"""Later events whose causes are determined in the search for an effect."""
_STIMULI: Final = {tag: kind for kind, tag in ENTRY_TAGS.items()}


def concerns(event: ev.Event, history: History) -> str:
    """The request that the event is about; empty for an event about no request or several."""
    slot = slot_of(event, history)
    if slot is None:
        return ""
    life = history.life_in(slot)
    return life.request if life is not None else history.names.requests.get(slot, f"slot {slot}")


def slot_of(event: ev.Event, history: History) -> int | None:
    """The slot that the event is about."""
    slot = getattr(event, "slot", None)
    if isinstance(slot, int):
        return slot
    if isinstance(event, ev.DeviceBlocksAssigned):
        return event.slots[0] if len(event.slots) == 1 else None
    if isinstance(event, ev.BlocksEvicted):
        return event.for_slot
    candidate = getattr(event, "candidate", None)
    if candidate is not None:
        transfer = history.transfer_of(candidate=candidate)
        return transfer.slot if transfer is not None else history.names.slot_of(candidate, None)
    operation = getattr(event, "operation", None)
    if operation is not None:
        transfer = history.transfer_of(operation=operation)
        return transfer.slot if transfer is not None else history.names.slot_of(None, operation)
    return None


def nameless(event: ev.Event, history: History) -> bool:
    """True if the event is about a slot or a copy whose request is unknown."""
    several: tuple[int, ...] | None = getattr(event, "slots", None)
    if several is not None:
        return any(history.life_in(slot) is None and slot not in history.names.requests for slot in several)
    slot = slot_of(event, history)
    if slot is None:
        return getattr(event, "candidate", getattr(event, "operation", None)) is not None
    return history.life_in(slot) is None and slot not in history.names.requests


@lru_cache(maxsize=256)
def kind_words(kind: type[Event] | type[Stimulus]) -> str:
    """The kind in words: ``blocks evicted``. The class name is what filters and files take."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


def describe(event: ev.Event, history: History) -> str:
    """The phrase beside the kind."""
    phrase = PHRASES.get(type(event))
    return phrase(event, history) if phrase is not None else core_describe(event, history.state)


def beside_kind(event: ev.Event, history: History) -> str:
    """The phrase for a narrow place beside the kind: the kind's first word is not said again."""
    return describe(event, history).removeprefix(f"{kind_words(type(event)).split()[0]} ")


def entry_words(entry: int) -> str:
    """The stimulus that a move came from, in words: ``match requested``."""
    kind = _STIMULI.get(entry)
    return f"entry {entry}" if kind is None else kind_words(kind)


def _opened(e: ev.SlotOpened, history: History) -> str:
    return f"{count(e.prompt_tokens)} tokens, {plural(len(e.hashes) // HASH_BYTES, 'full block')}"


def _moved(e: ev.SlotMoved, history: History) -> str:
    text = f"{e.old.words} → {e.new.words}"
    if e.detail:
        text += f", {count(e.detail)} tokens"
    if e.reason is not None and e.new in (SlotState.FINISHING, SlotState.FINISHED):
        text += f", {e.reason.words}"
    return text


def _ended(e: ev.CandidateEnded, history: History) -> str:
    transfer = history.transfer_of(candidate=e.candidate)
    if transfer is None:
        return core_describe(e, history.state)
    took = duration(transfer.age(e.at_ns))
    text = f"op {transfer.label} {transfer.route.arrow}, {plural(transfer.blocks, 'block')}"
    return f"{text}, {took}" if e.status is CandidateStatus.COMPLETED else f"{text}, {e.status.words}, {took}"


def _skipped(e: ev.CandidateSkipped, history: History) -> str:
    transfer = history.transfer_of(candidate=e.candidate)
    if transfer is None:
        return core_describe(e, history.state)
    return f"{e.reason.words}, {transfer.route.arrow}, {plural(transfer.blocks, 'block')}"


def _started(e: ev.OperationStarted, history: History) -> str:
    transfer = history.transfer_of(operation=e.operation)
    if transfer is None:
        return core_describe(e, history.state)
    return f"op {e.operation} {transfer.route.arrow}, {plural(transfer.blocks, 'block')}"


def _rejected(e: ev.StimulusRejected, history: History) -> str:
    return f"{entry_words(e.entry)}: {e.why}"


PHRASES: Final[dict[type[ev.Event], Callable[[Any, History], str]]] = {
    ev.SlotOpened: _opened,
    ev.SlotMoved: _moved,
    ev.CandidateEnded: _ended,
    ev.CandidateSkipped: _skipped,
    ev.OperationStarted: _started,
    ev.StimulusRejected: _rejected,
}
"""Kinds whose phrase differs from the core's."""


_COPIES: Final = (
    ev.CandidatePlanned, ev.CandidateSkipped, ev.CandidatePromoted, ev.OperationStarted, ev.CandidateEnded,
)
_TROUBLE: Final[dict[type[ev.Event], str]] = {
    ev.StimulusRejected: "caution", ev.CompletionRefused: "caution", ev.HitsLost: "caution", ev.SourceLost: "caution",
    ev.CallBlocked: "caution", ev.InvariantViolated: "fault", ev.ContentMismatched: "fault", ev.AuditDiffered: "fault",
    ev.BlocksQuarantined: "caution",
}
_HOLDS: Final = (
    ev.BreakpointHit, ev.SlotHeld, ev.HoldParked, ev.HoldReleased, ev.HoldDenied, ev.BreakpointStopped, ev.Frozen,
    ev.Thawed,
)
_LOOKUPS: Final = (ev.LookupAnswered, ev.BlocksStaged, ev.StagingReleased, ev.PrefixScored)
STEADY: Final = frozenset({
    ev.IterationAdvanced, ev.BlocksFilled, ev.BlocksReady, ev.BlocksReserved, ev.BlocksEvicted, ev.BlocksDropped,
    ev.BlocksSeen, ev.DeviceBlocksAssigned, ev.DeviceBlocksReleased, ev.DeviceBlocksReplaced, ev.CandidateEnqueued,
    ev.CandidateEvaluated, ev.OperationReported, ev.BatchEnded, ev.EngineMeasured, ev.ConnectorMeasured,
})
"""Kinds that every iteration and every copy brings. A log without them still tells the life of each request."""


def kind_role(event: ev.Event, history: History) -> str:
    """The colour of a kind: trouble, a hold, the state that a slot enters, a copy up or down, a look-up."""
    kind = type(event)
    if kind in _TROUBLE:
        return _TROUBLE[kind]
    if isinstance(event, ev.CandidateEnded) and event.status is CandidateStatus.FAILED:
        return "fault"
    if isinstance(event, ev.SlotMoved):
        return f"state.{event.new.label}"
    if kind in _HOLDS:
        return "held"
    if kind in _LOOKUPS:
        return "state.onboard_staged"
    if kind in _COPIES:
        route = _event_route(event, None, history)
        return "state.onboarding" if route is not None and route.is_load else "muted"
    return "faint" if kind in STEADY else "text"


Link = tuple[str, int]
_S = SlotState
_OPENS: Final[dict[SlotState, tuple[type[Event], ...]]] = {
    _S.ONBOARD_STAGED: (ev.BlocksStaged, ev.LookupAnswered),
    _S.ONBOARDING: (ev.DeviceBlocksAssigned, ev.CandidatePlanned),
    _S.PREFILLING: (ev.CandidateEnded, ev.HitsLost, ev.DeviceBlocksAssigned, ev.LookupAnswered),
}
"""The kinds of event that open a move into a state; other moves follow from the move before."""
_MOVES: Final = (ev.SlotMoved, ev.SlotOpened, ev.SlotCloned, ev.HoldReleased)


def links(event: Event, history: History) -> list[Link]:
    """The things that an event is about, the narrowest first."""
    found: list[Link] = []
    hold = getattr(event, "hold", None)
    if isinstance(hold, int):
        found.append(("hold", hold))
    candidate, operation = getattr(event, "candidate", None), getattr(event, "operation", None)
    transfer = history.transfer_of(candidate=candidate, operation=operation)
    if transfer is not None:
        found.append(("candidate", transfer.candidate))
    elif isinstance(candidate, int):
        found.append(("candidate", candidate))
    slot = slot_of(event, history)
    if slot is not None:
        found.append(("slot", slot))
    else:
        found += [("slot", number) for number in getattr(event, "slots", ())]
    return found


def cause_of(event: Event, history: History) -> Event | None:
    """The event that led to this event; None when it is not kept, or when a stimulus from outside did."""
    mine = links(event, history)
    wanted = set(mine)
    for before in _before(event, history.log):
        if before.cause != event.cause:
            break
        if wanted & set(links(before, history)):
            return before
    if type(event) is ev.SlotMoved:
        return _opener(event, history)
    for link in mine:
        for before in _before(event, history.log):
            if link in links(before, history):
                return before
    return None


def _opener(event: ev.SlotMoved, history: History) -> Event | None:
    """The event that opened a move: the last of its kinds since the move before, else that move."""
    kinds = _OPENS.get(event.new, ())
    for before in _before(event, history.log):
        if type(before) not in _MOVES and type(before) not in kinds:
            continue
        if slot_of(before, history) == event.slot:
            return before
    return None


def effect_of(event: Event, history: History) -> Event | None:
    """The first event that this event led to; None without an effect so far."""
    wanted = set(links(event, history))
    if not wanted:
        return None
    tried = 0
    for after in _after(event, history.log):
        if not wanted & set(links(after, history)):
            continue
        if cause_of(after, history) is event:
            return after
        tried += 1
        if tried >= TRIED_MAX:
            return None
    return None


def _before(event: Event, log: "deque[Event]") -> Iterator[Event]:
    """Events before this one, newest first."""
    skip = log[-1].seq - event.seq + 1 if log else 0
    start = max(0, skip) if log and log[-1].seq - log[0].seq + 1 == len(log) else 0  # no gap: the place is known
    for before in islice(reversed(log), start, start + SCANNED_MAX):
        if before.seq < event.seq:
            yield before


def _after(event: Event, log: "deque[Event]") -> Iterator[Event]:
    """Events after this one, oldest first."""
    if not log:
        return
    start = max(0, event.seq - log[0].seq + 1) if log[-1].seq - log[0].seq + 1 == len(log) else 0
    for after in islice(log, start, start + SCANNED_MAX):
        if after.seq > event.seq:
            yield after


# --- the filter of the log --------------------------------------------------------------------------------------------


def _event_slot(event: Any, state: Any, history: History) -> tuple[int, ...]:
    several = getattr(event, "slots", None)
    if several is not None:
        return tuple(several)
    slot = slot_of(event, history)
    return () if slot is None else (slot,)


def _event_request(event: Any, state: Any, history: History) -> tuple[str, ...]:
    named = getattr(event, "request", None)
    if named:
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


EVENTS: Final = with_fields(
    EVENT,
    Field("request", Kind.TEXT, _event_request, "The requests that it is about.", ordered=False, many=True,
          optional=True),
    Field("slot", Kind.ID, _event_slot, "The slots that it is about.", many=True, optional=True),
    Field("route", Kind.WORD, _event_route, "The route of its candidate.", words(Route), ordered=False, optional=True),
    Field("tier", Kind.WORD, _event_tiers, "The tiers that it is about.", words(Tier), many=True, optional=True),
    Field("operation", Kind.ID, _event_number("operation"), "Its operation.", optional=True),
    Field("candidate", Kind.ID, _event_number("candidate"), "Its candidate.", optional=True),
)
"""Events of the log. The moment is the mirror: it knows of candidates and requests that the facts no longer have."""
