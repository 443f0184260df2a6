"""The feed of a console: the same items from a live daemon and from a recording.

Law of this file: a feed never hides anything. Lost events are a ``GapSeen``, a lost connection is a ``Disconnected``,
and after either the next ``SnapshotTaken`` is exact again.
"""

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.stream.verbs import A, Verb

if TYPE_CHECKING:
    from kvbm_console.wire.batches import UnreadBatch  # for type checkers only, so that a help text loads no protobuf


class Connected(msgspec.Struct, frozen=True):
    """A daemon answered, or a recording was opened."""

    target: str
    """Short name for the status row."""
    incarnation: str
    run: int
    """Number of this run as people count them; 0 when unknown."""
    control: bool
    """True if this session may set breakpoints and continue holds."""
    block_bytes: int | None
    """Bytes of one block by the configured geometry, None when unknown."""
    recording: bool = False
    config: LeaderConfig | None = None
    """The leader's configuration: policies, thresholds, bounds. None when it has a field of a newer version."""
    clock_anchor_ns: int | None = None
    """The wall clock, in nanoseconds since 1970, at the engine's time 0; None when unknown."""


class SnapshotTaken(msgspec.Struct, frozen=True):
    """Full facts; ``state.seq`` is the number of the next event. The receiver owns the state and folds into it."""

    state: CacheState


class PastSeen(msgspec.Struct, frozen=True):
    """The events right before the first snapshot, which follows.

    They are history and are not folded into facts. ``state`` is that of the snapshot, to be read and not changed.
    """

    events: list[Event]
    state: CacheState


class EventsArrived(msgspec.Struct, frozen=True):
    """The next events, in order and without a hole since the last item."""

    events: list[Event]


class BatchArrived(msgspec.Struct, frozen=True):
    """The next events, still encoded. A ``Refreshing`` feed yields them while its receiver wants them unread."""

    batch: "UnreadBatch"


_LOSSES: Final = {
    "fell_behind": "the reader fell behind", "not_kept": "the daemon no longer kept them",
    "restarted": "another run began",
}
"""The codes of a daemon for a gap of its stream, in words."""


def why_lost(reason: str) -> str:
    """Why events are missing, in words. The reasons that a recording gives are words already."""
    return _LOSSES.get(reason, reason)


class GapSeen(msgspec.Struct, frozen=True):
    """Events ``first`` to ``last`` were not delivered; a snapshot follows."""

    first: int
    last: int
    reason: str

    @property
    def count(self) -> int:
        """The number of lost events."""
        return self.last - self.first + 1


class Heartbeat(msgspec.Struct, frozen=True):
    """Sent every half second. ``written_seq`` and ``synced_seq`` are None when nothing is recorded."""

    head_seq: int
    """Number of the last published event, -1 before the first."""
    at_ns: int
    """The engine's clock now."""
    recorder: str | None
    """``recording``, ``degraded`` or None."""
    written_seq: int | None
    synced_seq: int | None
    synced_age_ns: int | None
    not_recorded: int
    """Events that the recorder had to drop."""
    subscribers: int
    warnings: tuple[str, ...] = ()
    """A sentence for each part of the daemon that ended, or was restarted lately."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection is gone. The next try is in ``retry_in_s``, None when it ended for good."""

    reason: str
    retry_in_s: float | None


FeedItem = (
    Connected | PastSeen | SnapshotTaken | EventsArrived | BatchArrived | GapSeen | Heartbeat | Disconnected
)
"""Everything that a feed yields."""


class Feed(Protocol):
    """A source of items. Iterating connects and, for a live target, reconnects until the iterator is closed."""

    def items(self) -> AsyncIterator[FeedItem]:
        """Items, the first one ``Connected`` or ``Disconnected``; after ``Connected`` comes a ``SnapshotTaken``,
        perhaps with a ``PastSeen`` before it.

        Only after a reconnect to the same incarnation that missed nothing, the next events follow without a snapshot.
        """
        ...


@runtime_checkable
class Refreshing(Protocol):
    """A feed that can send the facts again, for a receiver that cannot afford to fold every event."""

    unread: bool
    """True if events come as ``BatchArrived``, for a receiver that cannot even afford to decode every event."""

    def refresh(self) -> None:
        """Yield a ``SnapshotTaken`` soon, in its place among the events: none is left out and none comes twice."""
        ...


@runtime_checkable
class Accounting(Protocol):
    """A feed whose target answers questions beyond its events: names of engines, and the cost of watching them."""

    async def accounts(self) -> dict[str, Any]:
        """``engines`` and ``publishers`` of the status document (``stream.document``). Raises ``ConnectionLost``."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A feed whose target still has events that it has sent."""

    async def between(self, first: int, last: int) -> tuple[list[Event], int]:
        """Up to 4,096 events from ``first`` up to ``last`` that the target still has, and the number of its
        oldest event. Raises ``ConnectionLost``."""
        ...

    def remembered(self, until: int) -> AsyncIterator[FeedItem]:
        """The oldest facts that the target has, and all events behind them up to event ``until``.

        A gap comes before newer facts if the target forgets meanwhile. Raises ``ConnectionLost``.
        """
        ...


class Controls(Protocol):
    """A live target that a session may act on. ``ask`` raises ``Refused`` or ``ConnectionLost`` with a sentence."""

    async def ask(self, verb: Verb[A]) -> A:
        """Carry out a verb, and return its answer."""
        ...

    def saw(self, enabled: Mapping[int, bool]) -> None:
        """The target's breakpoints as they were last, by id. Breakpoints that others muted or removed are not
        armed anew."""
        ...

    async def retry_now(self) -> None:
        """Reconnect at once instead of waiting for the back-off."""
        ...
