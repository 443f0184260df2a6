"""Places on the tape: bookmarks of a person, and hits of breakpoints.

Law of this file: a distance counts time and known events only. Hits are places; the rule of matching is the leader's.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.stream.tape import RunTape

from .history import History
from .numbers import count, spoken

MARKS_MAX: Final = 64
"""Bookmarks of a console; the oldest goes."""
HITS_MAX: Final = 20_000
"""Hits kept of one tape; the rest is counted. No person looks at more hits of a breakpoint."""


class Mark(msgspec.Struct, frozen=True):
    """A place: the last event that had happened, and the time of the target."""

    seq: int
    at_ns: int
    note: str = ""
    """The request that was selected there; may be empty."""


class Marks:
    """The bookmarks of one console, in the order of time."""

    def __init__(self) -> None:
        self.places: list[Mark] = []
        self.latest: Mark | None = None
        """The mark from which distances are measured."""
        self._set: list[Mark] = []

    def toggle(self, mark: Mark) -> bool:
        """Set a mark, or remove the mark at its place; returns True if it is set now."""
        there = next((known for known in self.places if (known.seq, known.at_ns) == (mark.seq, mark.at_ns)), None)
        if there is not None:
            self.places.remove(there)
            self._set.remove(there)
            self.latest = self._set[-1] if self._set else None
            return False
        self._set.append(mark)
        if len(self._set) > MARKS_MAX:
            self.places.remove(self._set.pop(0))
        self.places.append(mark)
        self.places.sort(key=lambda known: (known.at_ns, known.seq))
        self.latest = mark
        return True

    def next_from(self, seq: int, at_ns: int) -> Mark | None:
        """The mark before this place, else the last mark, so repeated presses go through all marks."""
        before = [mark for mark in self.places if (mark.at_ns, mark.seq) < (at_ns, seq)]
        return before[-1] if before else self.places[-1] if self.places else None


def seq_at(history: History, at_ns: int) -> int | None:
    """The last event that had happened at a time; None when the log does not reach so far."""
    log = history.log
    if not log or at_ns < log[0].at_ns:
        return None
    index = bisect_left(log, at_ns + 1, key=lambda event: event.at_ns)
    return log[index - 1].seq


def distance(mark: Mark, seq: int | None, at_ns: int) -> str:
    """``Δ 4.31 s, 1,204 events``.

    >>> distance(Mark(10, 0), 1_214, 4_310_000_000)
    'Δ 4.31 s, 1,204 events'
    """
    text = f"Δ {spoken(abs(at_ns - mark.at_ns))}"
    if seq is None:
        return text
    events = abs(seq - mark.seq)
    return f"{text}, {count(events)} {'event' if events == 1 else 'events'}"


class TapeHits:
    """The hits on one tape, in order. ``complete`` when they are known for the present specifications."""

    def __init__(self) -> None:
        self.specs: list[BreakpointSpec] = []
        self.seqs: list[int] = []
        self.dropped = 0
        self.complete = False
        self.generation = 0
        """Grows whenever the specifications change, so results for older specifications are ignored."""

    def change(self, specs: list[BreakpointSpec]) -> None:
        """Look for the hits of other breakpoints from now on."""
        self.specs = specs
        self.generation += 1
        self.seqs, self.dropped, self.complete = [], 0, False

    def take(self, seqs: Iterable[int]) -> None:
        """These are the hits; each place counts once."""
        found = sorted(set(seqs))
        self.seqs, self.dropped, self.complete = found[:HITS_MAX], max(0, len(found) - HITS_MAX), True

    def next(self, seq: int) -> int | None:
        """The first hit behind ``seq``."""
        index = bisect_right(self.seqs, seq)
        return self.seqs[index] if index < len(self.seqs) else None

    def previous(self, seq: int) -> int | None:
        """The last hit in front of ``seq``."""
        index = bisect_left(self.seqs, seq)
        return self.seqs[index - 1] if index else None


async def recorded_hits(tape: RunTape, breathe: Callable[[], Awaitable[None]]) -> list[int]:
    """The events at which breakpoints took effect in the recorded run."""
    found: list[int] = []
    for events in tape.events():
        found += [event.seq for event in events if type(event) is ev.BreakpointHit]
        await breathe()
    return found
