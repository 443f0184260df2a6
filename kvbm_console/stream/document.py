"""JSON documents of events and of a leader's state: documented, stable contracts.

The status document says how a leader stands now. Its keys are the type ``Status`` in ``cli/documents.py``, listed in
``cli/JSON.md``; new keys are only added. An event is ``seq``, ``at_ns`` and ``kind``, then its fields by name.

Ids are strings, hashes 16 hexadecimal digits, words their labels, and absent values null. Times are nanoseconds on the
engine's clock. The longest time of a hold runs on the wall, so ``deadline_ns`` of a hold is right at speed 1.

Law of this file: it reads facts and changes nothing.
"""

import typing
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from kvbm_console.core.columns import HASH_BYTES, unpack_hashes, unpack_ids
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import AnyEvent, Event
from kvbm_console.core.expression import compile_slot_filter
from kvbm_console.core.holds import BreakpointFacts, HoldFacts, stands_at
from kvbm_console.core.ids import Condition, Route, Tier, Word, age_within
from kvbm_console.core.slots import CandidateFacts, SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import ENTRY_NAMES
from kvbm_console.stream.ended import EndedHold

Document = dict[str, Any]


def status_document(
    state: CacheState, *, at_ns: int, incarnation: str, subscribers: int, recorder: Document | None,
    name: str = "", slot_filter: str = "", engines: Sequence[Document] = (), publishers: Sequence[Document] = (),
    ended_holds: Iterable[EndedHold] = (), thrash_window_ns: int | None = None, parts: Sequence[Document] = (),
    warnings: Sequence[str] = (),
) -> Document:
    """The document of facts as of ``at_ns``, the engine's clock now.

    With ``slot_filter`` only the slots for which that expression holds; a wrong expression raises ``ExpressionError``.
    """
    shown: Callable[[CacheState, SlotFacts], bool] = lambda state, slot: True  # noqa: E731
    if slot_filter:
        shown = compile_slot_filter(slot_filter, now=lambda: at_ns)
    return {
        "slots": [slot_row(state, slot, at_ns) for slot in state.slots.values() if shown(state, slot)],
        "tiers": {tier.label: tier_row(state, tier) for tier in Tier},
        "thrash": {
            "window_ns": thrash_window_ns, "evicted_blocks": sum(state.totals.evicted_blocks),
            "thrash_blocks": None if state.streams_only else sum(state.totals.returned_blocks),
            "thrash_rate": None if state.streams_only else state.totals.thrash(),
        },
        "prefetch": {
            "fetched_blocks": state.totals.moved_blocks.get(Route.G3_G2.label, 0),
            "used_blocks": state.totals.prefetch_used_blocks, "precision": state.totals.prefetch_precision(),
            "limits": state.totals.prefetch_limits, "limited": state.totals.prefetch_limited,
        },
        "transfers": [_transfer(candidate) for candidate in state.candidates.values()],
        "breakpoints": [_breakpoint(known) for known in state.breakpoints.values()],
        "holds": [_hold(state, hold, at_ns) for hold in state.holds.values()],
        "ended_holds": [_ended_hold(ended) for ended in ended_holds],
        "frozen": None if state.frozen is None else {
            "by": state.frozen.by, "since_ns": state.frozen.since_ns, "max_hold_ns": state.frozen.max_hold_ns,
        },
        "stream": {
            "name": name, "head_seq": state.seq - 1, "epoch": state.epoch, "incarnation": incarnation,
            "subscribers": subscribers,
        },
        "recorder": recorder,
        "engines": list(engines),
        "publishers": list(publishers),
        "parts": list(parts),
        "warnings": list(warnings),
    }


def slot_row(state: CacheState, slot: SlotFacts, at_ns: int) -> Document:
    """One slot of the document."""
    return {
        "slot": str(slot.slot),
        "request": slot.request,
        "state": slot.state.label,
        "since_ns": slot.since_ns,
        "age_ns": max(at_ns, state.at_ns) - slot.since_ns,
        "computed_tokens": slot.computed_tokens(state.iteration),
        "prompt_tokens": slot.prompt_tokens,
        "outstanding": len(slot.outstanding),
        "hold": _id(slot.hold),
    }


def tier_row(state: CacheState, tier: Tier) -> Document:
    """One tier of the document: the sum over the pools of all engines. Event streams tell neither use nor hits."""
    pools = state.counted([pool for pool in state.pools if pool.info.tier is tier])
    capacities = [state.capacity_of(pool) for pool in pools]
    known = [capacity for capacity in capacities if capacity is not None]
    told = not state.streams_only
    return {
        "capacity_blocks": sum(known) if len(known) == len(capacities) else None,
        "resident_blocks": sum(pool.resident_blocks for pool in pools),
        "referenced_blocks": sum(pool.counts[Condition.REFERENCED] for pool in pools) if told else None,
        "writing_blocks": sum(pool.counts[Condition.WRITING] for pool in pools) if told else None,
        "hits": state.totals.hit_blocks[tier - 1] if told else None,
        "lookups": state.totals.prompt_blocks if told else None,
        "uncertain": any(pool.info.source in state.lost_sources for pool in pools),
        "evicted_blocks": state.totals.evicted_blocks[tier - 1],
        "thrash_blocks": state.totals.returned_blocks[tier - 1] if told else None,
        "thrash_rate": state.totals.thrash(tier) if told else None,
        "asked_again_blocks": sum(state.totals.asked_again[tier - 1]) if told else None,
        "asked_again_p50_ns": age_within(state.totals.asked_again[tier - 1], 0.5),
        "asked_again_p90_ns": age_within(state.totals.asked_again[tier - 1], 0.9),
    }


def _transfer(candidate: CandidateFacts) -> Document:
    return {
        "operation": _id(candidate.operation),
        "candidate": str(candidate.candidate),
        "route": candidate.route.label,
        "blocks": len(candidate.hashes),
        "status": candidate.status.label,
    }


_BREAKPOINT: Final = (
    "id", "owner", "description", "enabled", "site", "request", "from_state", "to_state", "tier", "route", "action",
    "one_shot", "hits", "max_hold_ns", "name", "status", "condition", "ignore_count", "hit_condition", "log", "suspend",
    "depends_on", "on_timeout", "expires_ns", "persist", "message",
)
"""Keys of a breakpoint, in their order."""


def _breakpoint(known: BreakpointFacts) -> Document:
    spec = known.spec
    values = {
        **spec_document(spec), "owner": known.owner, "description": spec.describe(), "enabled": known.enabled,
        "hits": known.hits, "depends_on": _id(spec.depends_on or None), "message": known.message,
    }
    return {key: values[key] for key in _BREAKPOINT}


def _hold(state: CacheState, hold: HoldFacts, at_ns: int) -> Document:
    slot = state.slots[hold.slot]
    return {
        "id": str(hold.hold),
        "slot": str(hold.slot),
        "request": slot.request,
        "site": hold.site.label,
        "point": stands_at(hold, slot.state, len(slot.outstanding)).label,
        "owner": hold.owner,
        "breakpoints": [str(number) for number in hold.breakpoints],
        "pending": not hold.parked,
        "since_ns": hold.since_ns,
        "deadline_ns": hold.since_ns + hold.max_hold_ns,
        "suspend": hold.suspend.label,
        "on_timeout": hold.on_timeout.label,
        "age_ns": max(at_ns, state.at_ns) - hold.since_ns,
    }


def _ended_hold(ended: EndedHold) -> Document:
    return {
        "id": _id(ended.hold),
        "request": ended.request,
        "site": ended.site.label,
        "point": _label(ended.point),
        "at_ns": ended.at_ns,
        "held_ns": ended.held_ns,
        "why": "refused" if ended.why is None else ended.why.label,
        "by": ended.by,
        "text": ended.text,
        "times": ended.times,
    }


def _id(number: int | None) -> str | None:
    return None if number is None else str(number)


def _label(word: Word | None) -> str | None:
    return None if word is None else word.label


# --- events ---


COLUMNS: Final[dict[str, str]] = {
    name: hint.__metadata__[0]
    for kind in typing.get_args(AnyEvent)
    for name, hint in typing.get_type_hints(kind, include_extras=True).items() if hasattr(hint, "__metadata__")
}
"""Name of each column to ``ids``, ``hashes`` or ``indices``, as the fields of events declare it."""
IDENTIFIERS: Final = frozenset({
    "slot", "parent", "for_slot", "pool", "source_pool", "target_pool", "candidate", "operation", "batch", "hold", "id",
    "breakpoints", "slots", "source",
})


def event_document(event: Event) -> dict[str, Any]:
    """One event as a JSON object.

    >>> from kvbm_console.core.events import SlotClosed
    >>> event_document(SlotClosed(7, 1_000, 3, 12))
    {'seq': 7, 'at_ns': 1000, 'kind': 'SlotClosed', 'cause': 3, 'slot': '12'}
    """
    document: dict[str, Any] = {"seq": event.seq, "at_ns": event.at_ns, "kind": type(event).__name__}
    for field in type(event).__struct_fields__:
        if field not in ("seq", "at_ns"):
            document[field] = _value(field, getattr(event, field))
    return document


def spec_document(spec: BreakpointSpec) -> dict[str, Any]:
    """A breakpoint's specification as a JSON object."""
    return {field: _value(field, getattr(spec, field)) for field in BreakpointSpec.__struct_fields__}


def field_text(field: str, value: Any, limit: int = 80) -> str:
    """One field's value for people, cut behind ``limit`` characters: columns as lists, words as their labels.

    >>> field_text("ids", b"\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00")
    '1, 2'
    """
    if type(value) is int and field != "entry":
        text = str(value)
        return text if len(text) <= limit else text[: limit - 1] + "…"
    if isinstance(value, bytes):
        value = value[: HASH_BYTES * (limit + 1)]  # a row shows a few items of a long column
    elif isinstance(value, tuple | list):
        value = value[: limit + 1]
    told = _value(field, value)
    text = ", ".join(map(str, told)) if isinstance(told, list) else "–" if told is None else str(told)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _value(field: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, bytes):
        return _column(field, value)
    if isinstance(value, Word):
        return value.label
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, BreakpointSpec):
        return spec_document(value)
    if isinstance(value, tuple | list):
        return [_value(field, item) for item in value]
    if isinstance(value, int):
        if field == "entry":
            return ENTRY_NAMES.get(value, str(value))
        return str(value) if field in IDENTIFIERS else value
    if isinstance(value, msgspec.Struct):
        return {name: _value(name, getattr(value, name)) for name in value.__struct_fields__}
    raise TypeError(f"no JSON form for {type(value).__name__} in field {field}")


def _column(field: str, data: bytes) -> list[Any]:
    if COLUMNS[field] == "hashes":
        return [f"{value:016x}" for value in unpack_hashes(data)]
    return [value if COLUMNS[field] == "indices" else str(value) for value in unpack_ids(data)]
