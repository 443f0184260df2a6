"""The base of visitors. The console's lints import this module, because ``walk`` imports the file layer.

Law of this file: a visitor sees an event only while the facts around it are known, and never changes them.
"""

from collections.abc import Callable, Iterable
from typing import Any

from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

Handler = Callable[[Any, CacheState], None]


class Visitor:
    """Base of the visitors of a walk. ``before`` and ``after`` map a kind of event to its handlers."""

    def __init__(self) -> None:
        self.before: dict[type[Event], Handler] = {}
        self.after: dict[type[Event], Handler] = {}
        self.every: Handler | None = None
        """Called before each event, whatever its kind, in front of ``before``."""

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """The facts are known from here on; ``gap`` was lost in front of it, None at the beginning."""

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """The evidence ends; ``state`` is None when it ends in ``gap``."""


def merged(maps: Iterable[dict[type[Event], Handler]]) -> dict[type[Event], list[Handler]]:
    """Kind of event to the handlers of all visitors, in their order."""
    handlers: dict[type[Event], list[Handler]] = {}
    for by_kind in maps:
        for kind, handler in by_kind.items():
            handlers.setdefault(kind, []).append(handler)
    return handlers
