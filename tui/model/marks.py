"""Bookmarks: places in time that a person wants to come back to, and the distance from one to here.

Law of this file: a distance is told in time and in events; events that are not known to have happened are not counted.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import msgspec

from .numbers import count, spoken

if TYPE_CHECKING:
    from .mirror import Mirror

MARKS_MAX: Final = 64
"""Bookmarks of one console; the oldest goes."""


class Mark(msgspec.Struct, frozen=True):
    """A place: the last event that had happened, and the time of the target."""

    seq: int
    at_ns: int
    note: str = ""
    """What stood there: a request, or nothing."""


class Marks:
    """The bookmarks of one console, in the order of time."""

    def __init__(self) -> None:
        self.places: list[Mark] = []
        self.latest: Mark | None = None
        """What distances are measured from."""
        self._set: list[Mark] = []

    def toggle(self, mark: Mark) -> bool:
        """Set a mark, or take away the one that is there; returns whether it is set now."""
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
        """The mark before this place, or the last one when there is none: pressed again it goes through all."""
        before = [mark for mark in self.places if (mark.at_ns, mark.seq) < (at_ns, seq)]
        return before[-1] if before else self.places[-1] if self.places else None


def seq_at(mirror: "Mirror", at_ns: int) -> int | None:
    """The last event that had happened at a time; None when the log does not reach so far."""
    log = mirror.log
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
