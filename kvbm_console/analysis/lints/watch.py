"""The lints on a stream of events, for whoever folds one: the console, a service, a test.

Law of this file: the facts are folded here, between what the lints see before and after, so that nobody gets the order
wrong.
"""

from typing import Any

from kvbm_console.analysis.lints.model import Finding
from kvbm_console.analysis.lints.rule import Lint
from kvbm_console.analysis.visitor import Handler
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen


class Watch:
    """Folds events and shows them to lints."""

    def __init__(self, lints: list[Lint]) -> None:
        self.lints = lints
        self._before: dict[type[Event], list[Handler]] = {}
        self._after: dict[type[Event], list[Handler]] = {}
        for maps, merged in (
            ([lint.before for lint in lints], self._before), ([lint.after for lint in lints], self._after)
        ):
            for handlers in maps:
                for kind, handler in handlers.items():
                    merged.setdefault(kind, []).append(handler)

    def resumed(self, state: CacheState, gap: GapSeen | None = None) -> None:
        """The facts are known from here on; behind a gap, say which."""
        for lint in self.lints:
            lint.resumed(state, gap)

    def apply(self, state: CacheState, event: Event) -> None:
        """``state.apply(event)``, with the lints looking on. Raises ``FoldError`` as that does."""
        kind: type[Any] = type(event)
        for handler in self._before.get(kind, ()):
            handler(event, state)
        state.apply(event)
        for handler in self._after.get(kind, ()):
            handler(event, state)

    def findings(self, state: CacheState | None, at_ns: int) -> list[Finding]:
        """What was found so far, and what is wrong now; unranked."""
        return [finding for lint in self.lints for finding in lint.findings(state, at_ns)]
