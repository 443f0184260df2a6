"""Names of requests where several engines feed one daemon: honest engines may use the same name at the same time.

vLLM's ``LLM.generate`` numbers its requests from 0, so the second engine's request "0" is called "0@2" here, after the
number of its source, for as long as it lives. A request whose name is free keeps it.

Law of this file: a stimulus of one engine never reaches a slot of another, and an engine is asked by its own names.
"""

from typing import Any, Final

import msgspec

from kvbm_console.core import stimuli as st
from kvbm_console.core.state import CacheState

ONE: Final = ("request",)
MANY: Final = (
    "requests", "clones", "new", "resumed", "preempted", "skipped", "unskipped", "first_tokens", "progressed",
    "appended", "loaded", "sent", "failed",
)
"""Fields of stimuli that name requests."""


class RequestNames:
    """The names of one engine's requests, there and here."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._here: dict[str, str] = {}
        self._there: dict[str, str] = {}

    @property
    def differ(self) -> bool:
        """Whether any request has another name here."""
        return bool(self._here)

    def translated(self, stimulus: st.Stimulus, state: CacheState) -> st.Stimulus:
        """The stimulus with the names that are used here; the same object where they are the engine's own."""
        if isinstance(stimulus, st.RequestArrived):
            self._arrives(stimulus.request, state)
        elif isinstance(stimulus, st.RequestCloned):
            for clone in stimulus.clones:
                self._arrives(clone, state)
        changed: dict[str, Any] = {}
        for field in stimulus.__struct_fields__:
            if field in ONE:
                name = getattr(stimulus, field)
                if (here := self._name(name, state)) is not name:
                    changed[field] = here
            elif field in MANY and (names := getattr(stimulus, field)):
                mapped = tuple(self._name(name, state) for name in names)
                if mapped != names:
                    changed[field] = mapped
        return msgspec.structs.replace(stimulus, **changed) if changed else stimulus

    def there(self, name: str) -> str:
        """The engine's own name of a request."""
        return self._there.get(name, name)

    def _name(self, name: str, state: CacheState) -> str:
        here = self._here.get(name)
        if here is not None:
            return here
        slot = state.slot_named(name)
        return name if slot is None or slot.source == self._source else self._other(name)

    def _arrives(self, name: str, state: CacheState) -> None:
        """Choose the name of a new request, and forget those of requests that have ended."""
        if self._here:
            self._here = {there: here for there, here in self._here.items() if state.slot_named(here) is not None}
        if name not in self._here and (here := self._name(name, state)) is not name:
            self._here[name] = here
        self._there = {here: there for there, here in self._here.items()}

    def _other(self, name: str) -> str:
        return f"{name}@{self._source}"
