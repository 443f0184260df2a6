"""What is handed to a session from outside: who runs its tasks, keeps what it sees, explains a request, finds hits.

Law of this file: shapes only.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.stream.feed import FeedItem

from .model.mirror import Mirror

if TYPE_CHECKING:
    from kvbm_console.analysis.explain import Explanation  # opens recordings: loaded when somebody asks


class Spawner(Protocol):
    """Runs a task that the application owns."""

    def __call__(self, work: Awaitable[None], name: str) -> None: ...


Explain = Callable[[str], Awaitable["Explanation"]]
"""Why a request missed what it missed; raises KvbmConsoleError with a sentence."""


FindHits = Callable[[Sequence[BreakpointSpec]], Awaitable[list[int]]]
"""The events behind which these breakpoints would have hit; raises KvbmConsoleError with a sentence."""


class Kept(msgspec.Struct, frozen=True):
    """What a console has recorded by now."""

    place: str
    events: int
    size_bytes: int
    missing: int = 0
    """Events that could not be written."""


class Keeper(Protocol):
    """Keeps what a session sees."""

    @property
    def kept(self) -> Kept:
        """What is recorded by now."""
        ...

    def take(self, item: FeedItem, mirror: Mirror) -> None:
        """An item that was folded just now."""
        ...
