"""A tape: a run that can be read at any place, from a file or from a program's memory.

Law of this file: facts and events of a place are the same whoever holds the tape. A stretch without events is a gap.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState


class TapeGap(Protocol):
    """Events ``first`` to ``last`` that the tape does not have."""

    @property
    def first(self) -> int:
        """The first missing event."""
        ...

    @property
    def last(self) -> int:
        """The last missing event."""
        ...

    @property
    def count(self) -> int:
        """The number of missing events."""
        ...

    @property
    def reason(self) -> str:
        """Why they are missing."""
        ...


class RunTape(Protocol):
    """One run. Times are the engine's, numbers those of events. Every error is a ``RecordingError``."""

    @property
    def path(self) -> Path:
        """The place that errors name."""
        ...

    @property
    def name(self) -> str:
        """A short name for a status row."""
        ...

    @property
    def runs(self) -> Sequence[str]:
        """The incarnations that lie where this run lies, in order."""
        ...

    @property
    def incarnation(self) -> str:
        """The identity of the run."""
        ...

    @property
    def config(self) -> LeaderConfig | None:
        """The leader's configuration; None when unknown."""
        ...

    @property
    def clock_anchor_ns(self) -> int | None:
        """The wall clock, in nanoseconds since 1970, at the engine's time 0; None when unknown."""
        ...

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block; None when unknown."""
        ...

    @property
    def first_seq(self) -> int:
        """The first event whose effect on the facts is known."""
        ...

    @property
    def last_seq(self) -> int:
        """The last event."""
        ...

    @property
    def first_ns(self) -> int:
        """The time of the first event."""
        ...

    @property
    def last_ns(self) -> int:
        """The time of the last event."""
        ...

    @property
    def gaps(self) -> Sequence[TapeGap]:
        """All gaps, in order."""
        ...

    def refresh(self) -> bool:
        """Look for new events. Returns whether the tape has changed."""
        ...

    def seq_at(self, at_ns: int) -> int:
        """The last event not later than ``at_ns``; the first number minus 1 when all are later."""
        ...

    def density(self, cells: int) -> list[int]:
        """Events in each of ``cells`` equal parts of the time."""
        ...

    def events(self, first_seq: int | None = None) -> Iterator[list[Event]]:
        """Events from ``first_seq`` on, by default all, in ordered batches. A gap lies between two batches."""
        ...

    def keyframe_before(self, seq: int) -> int | None:
        """The number of the event that the last facts not behind event ``seq`` precede."""
        ...

    def next_keyframe(self, seq: int) -> int | None:
        """The first event at or behind ``seq`` that kept facts precede."""
        ...

    def state_at(self, seq: int, visit: Callable[[CacheState], None] | None = None) -> CacheState:
        """The facts after event ``seq``; ``visit`` as in ``advance``. Raises ``RecordingError``."""
        ...

    def advance(self, state: CacheState, seq: int, visit: Callable[[CacheState], None] | None = None) -> CacheState:
        """Fold ``state`` forward to event ``seq``; ``visit`` sees it after every batch. Raises ``RecordingError``."""
        ...
