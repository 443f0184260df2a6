"""Events as JSON documents: the contract of ``tail --format jsonl`` and of ``rec export --to jsonl``.

Law of this file: ``seq``, ``at_ns`` and ``kind`` first, then the event's fields under their names. Everything that is
an identifier is a string, hashes are 16 hexadecimal digits, words are labels, and what is absent is null.
"""

import typing
from enum import Enum
from typing import Any, Final

import msgspec

from kvbm_console.core.columns import HASH_BYTES, unpack_hashes, unpack_ids
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import AnyEvent, Event
from kvbm_console.core.ids import Word
from kvbm_console.core.stimuli import ENTRY_NAMES

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
        value = value[: HASH_BYTES * (limit + 1)]  # of a column of thousands a row tells a few
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
