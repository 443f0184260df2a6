"""What the desk needs from the rest: the session's actions, the transport of a recording, and views.

Law of this file: nothing here waits; what needs the target answers later, through ``Desk.tell``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import Event
from kvbm_console.core.expression import Schema
from kvbm_console.core.state import CacheState
from kvbm_console.stream.verbs import Verb

from .draw.frame import Hint
from .draw.spans import Line
from .hooks import Kept
from .model.places import Hits
from .model.trail import Way

if TYPE_CHECKING:
    from kvbm_console.analysis.explain import Explanation

    from .desk import Desk


class Missing(Protocol):
    """A gap of a recording, or one that a console saw."""

    @property
    def first(self) -> int:
        """The first event that is missing."""
        ...

    @property
    def last(self) -> int:
        """The last one."""
        ...

    @property
    def reason(self) -> str:
        """Why."""
        ...

    @property
    def count(self) -> int:
        """How many."""
        ...


class Tape(Protocol):
    """What came before a place on a recording, as ``recording.reader.Recording`` tells it."""

    @property
    def gaps(self) -> Sequence[Missing]:
        """The events that are not on it."""
        ...

    def state_at(self, seq: int) -> CacheState:
        """The facts after event ``seq``; raises RecordingError where they are unknown."""
        ...

    @property
    def first_seq(self) -> int:
        """The first event."""
        ...

    def events(self, first_seq: int | None = None) -> Iterator[list[Event]]:
        """Events from ``first_seq`` on, in batches."""
        ...


class TransportControls(Protocol):
    """The transport of a recording, as ``recording.playback.Playback`` has it."""

    @property
    def position_seq(self) -> int:
        """The last event that is applied."""
        ...

    @property
    def first_seq(self) -> int:
        """The first event of the recording."""
        ...

    @property
    def last_seq(self) -> int:
        """The last event of the recording."""
        ...

    @property
    def at_ns(self) -> int:
        """The target's time on the tape."""
        ...

    @property
    def playing(self) -> bool:
        """Whether it moves by itself."""
        ...

    @property
    def speed(self) -> float:
        """Recorded seconds for each second."""
        ...

    @property
    def recording(self) -> Tape:
        """The tape itself."""
        ...

    def toggle(self) -> None:
        """Play or pause."""
        ...

    def set_speed(self, speed: float) -> None:
        """Play so many times as fast; raises UsageError out of bounds."""
        ...

    def step(self, n: int = 1) -> None:
        """Move by so many events, back when negative."""
        ...

    def seek(self, seq: int) -> None:
        """Stand behind event ``seq``."""
        ...

    def seq_of(self, place: str, *, utc: bool = False) -> int:
        """The event at a place as people write it, which ``replay --at`` takes, too; raises UsageError.

        ``utc``: a time without a zone is of UTC, else local.
        """
        ...

    def density(self, cells: int) -> list[int]:
        """Events in each of ``cells`` equal parts of the recorded time."""
        ...


Table = tuple[list[str], list[list[str]]]
"""Names of columns, and rows of text: what is exported as CSV."""


class Actions(Protocol):
    """What the desk asks of the session."""

    paused: bool
    """Whether this view stands still."""
    buffered: int
    """Events kept meanwhile."""
    overflowed: bool
    """Whether more came than is kept."""
    playback: TransportControls | None
    """None on a live target."""

    explained: Explanation | None
    """The last explanation."""
    unexplained: str
    """Why there is none; empty while it is looked for."""
    hits: Hits
    """The hits on a recording."""

    @property
    def kept(self) -> Kept | None:
        """What this console records of the target; None when nobody asked for it."""
        ...

    @property
    def control(self) -> bool:
        """Whether the target lets this session act."""
        ...

    def pause(self, paused: bool) -> None:
        """Stop or go on drawing what arrives."""
        ...

    def ask(self, verb: Verb[Any]) -> None:
        """Carry out a verb on the target; its answer comes as a notice."""
        ...

    def why(self, request: str) -> None:
        """Explain what a request missed; the answer is shown when it is there."""
        ...

    def watch(self, specs: list[BreakpointSpec]) -> None:
        """Look for the hits of these on the recording."""
        ...

    def seek_hit(self, back: bool) -> None:
        """To the next or previous hit of the recording, as soon as it is found."""
        ...

    def seek_slot(self, slot: int) -> None:
        """To the next event of a slot on the recording."""
        ...

    def show_target(self, number: int) -> None:
        """Show another target of this console."""
        ...

    def look_back(self, way: Way, at: int | None, rows: int) -> None:
        """Ask for older events of the log, for a reader who stands at event ``at``; they are shown when they come."""
        ...

    def ask_recorder(self) -> None:
        """Ask where the recorder of the target writes; the answer is shown when it is there."""
        ...

    def retry(self) -> None:
        """Reconnect at once."""
        ...

    def copy(self, text: str) -> None:
        """Put text on the terminal's clipboard."""
        ...

    def export(self, name: str, table: Table | None) -> None:
        """Write what is shown as text and as a picture, and its rows as CSV."""
        ...

    def quit(self) -> None:
        """Leave the console."""
        ...


class View(Protocol):
    """One view. ``schema`` is what its filter may name, None when it has nothing to filter."""

    @property
    def schema(self) -> Schema | None:
        """The fields of its filter."""
        ...

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """At most ``height`` lines of at most ``width - 1`` text cells."""
        ...

    def hints(self, desk: Desk) -> list[Hint]:
        """Keys that work here and now, the most useful first."""
        ...

    def rows(self, desk: Desk) -> Table | None:
        """All rows of its list, also those that are not on the screen; None for a view without one."""
        ...

    def reveal(self, desk: Desk, event: Event) -> bool:
        """Show this event; False when it cannot be shown here."""
        ...

    def press(self, desk: Desk, key: str) -> bool:
        """Take a key; False when it means nothing here."""
        ...
