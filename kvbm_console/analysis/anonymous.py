"""Evidence without names: requests and sessions are hashed before anything is told of them.

    chat.1, session chat  ->  r-5d0c71ab, s-0b2e9f13       the same name gives the same hash within one export

Texts that engines and people wrote are kept only if no name occurs in them. The salt is thrown away, so that a name
that can be guessed cannot be compared with its hash.

Law of this file: names are replaced in facts and events, so no sentence made from them later can contain one.
"""

import secrets
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec
import xxhash

from kvbm_console.analysis.walk import Evidence
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import Event
from kvbm_console.core.snapshots import renamed_facts
from kvbm_console.recording.reader import Item
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken

NAMES: Final = {"request": "r", "session": "s", "sends": "x", "receives": "x"}
"""Fields that hold a name, with the letter in front of its hash."""
OWNERS: Final = ("owner", "by")
"""Fields that name a client, often ``user@host``."""
WITHHELD: Final = "(withheld)"
NAMES_MAX: Final = 20_000
"""With more names every free text is withheld, because each text is compared with each name."""


def anonymous(evidence: Evidence) -> Evidence:
    """The same evidence with hashed names."""
    names: set[str] = set()
    for item in evidence.items():
        parts = item.events if isinstance(item, EventsArrived) else _named(item)
        for part in parts:
            names |= {value for field in NAMES if isinstance(value := getattr(part, field, None), str) and value}
    mask = _Mask(names)
    return Evidence(
        evidence.name, evidence.config, evidence.events, lambda: mask.items(evidence.items()), evidence.remembered,
        evidence.finished, evidence.now_ns,
    )


def _named(item: Item) -> list[Any]:
    if not isinstance(item, SnapshotTaken):
        return []
    return [*item.state.slots.values(), *item.state.candidates.values()]


class _Mask:
    """Replaces names. ``names`` are all that occur."""

    def __init__(self, names: set[str]) -> None:
        salt = secrets.token_bytes(16)
        self._names = names
        self.hashed: Callable[[str, str], str] = lru_cache(None)(
            lambda letter, name: f"{letter}-{xxhash.xxh3_64_hexdigest(salt + name.encode())[:10]}"
        )
        self._kept: Callable[[str], bool] = lru_cache(4_096)(
            lambda text: len(names) <= NAMES_MAX and not any(name in text for name in names)
        )

    def items(self, items: Iterator[Item]) -> Iterator[Item]:
        """The items with hashed names."""
        for item in items:
            if isinstance(item, SnapshotTaken):
                yield SnapshotTaken(renamed_facts(item.state, self._value))
            elif isinstance(item, EventsArrived):
                yield EventsArrived([self._event(event) for event in item.events])
            else:
                yield item

    def _event(self, event: Event) -> Event:
        changes: dict[str, Any] = {}
        for field in type(event).__struct_fields__:
            value = getattr(event, field)
            masked = self._value(field, value)
            if masked is not value:
                changes[field] = masked
        return msgspec.structs.replace(event, **changes) if changes else event

    def _value(self, field: str, value: Any) -> Any:
        if isinstance(value, BreakpointSpec):
            return self._spec(value)
        if isinstance(value, tuple) and value and isinstance(value[0], str | BreakpointSpec):
            return tuple(self._value(field, one) for one in value)
        if not isinstance(value, str) or not value:
            return value
        if field in NAMES:
            return self.hashed(NAMES[field], value)
        if field in OWNERS:
            return self.hashed("c", value) if "@" in value or not self._kept(value) else value
        return value if self._kept(value) else WITHHELD

    def _spec(self, spec: BreakpointSpec) -> BreakpointSpec:
        """A breakpoint without its texts: a glob or an expression may hold a part of a name."""
        glob = spec.request if spec.request == "*" else self.hashed("glob", spec.request)
        texts = {field: WITHHELD for field in ("name", "condition", "log") if getattr(spec, field)}
        return msgspec.structs.replace(spec, request=glob, **texts)
