"""What of the stream was looked at while facts are sampled, and what was passed over.

Behind every snapshot events are looked at for as long as there is time for it; the rest, up to the next snapshot, is
*passed over*: counted from the heads of its batches, and never decoded. So history has no holes but these stretches,
and each of them ends with facts.

Law of this file: a stretch that was passed over is told with its numbers and times; nothing of it is lost, and nothing
is made up for it.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

STRETCHES_MAX: Final = 4_096
"""Stretches remembered for log and timeline: some minutes of a flood."""
RECENT: Final = 8
"""Snapshots over which the share that is looked at is told: about two seconds."""


class Stretch(msgspec.Struct):
    """Events ``first`` to ``last``, from ``start_ns`` to ``end_ns`` of the target's time, were passed over."""

    first: int
    last: int
    start_ns: int
    end_ns: int

    @property
    def count(self) -> int:
        """How many."""
        return self.last - self.first + 1


class Coverage:
    """``passing`` is true from the first event that is passed over to the next snapshot."""

    def __init__(self) -> None:
        self.stretches: deque[Stretch] = deque(maxlen=STRETCHES_MAX)
        self.passing = False
        self.passed = 0
        """Events that were passed over so far."""
        self.looked = 0
        """Events that were looked at so far."""
        self._taken = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)

    def took(self, events: int) -> None:
        """So many events were looked at."""
        self._taken += events
        self.looked += events

    def passed_over(self, first: int, count: int, seen_ns: int, end_ns: int) -> None:
        """The events from ``first`` on were not looked at; what was before them is known up to ``seen_ns``."""
        self.passed += count
        if self.passing:
            stretch = self.stretches[-1]
            stretch.last, stretch.end_ns = first + count - 1, end_ns
        else:
            self.passing = True
            self.stretches.append(Stretch(first, first + count - 1, seen_ns, end_ns))

    def snapshot(self, end_ns: int) -> float:
        """Facts came: a stretch ends. Returns how many events stand for one that was looked at since the last ones."""
        passed = 0
        if self.passing:
            stretch = self.stretches[-1]
            stretch.end_ns, passed = max(stretch.end_ns, end_ns), stretch.count
        taken = self._taken
        self._recent.append((taken, passed))
        self.passing, self._taken = False, 0
        return (taken + passed) / taken if taken else 1.0

    def between(self, start_ns: int, end_ns: int) -> Iterator[Stretch]:
        """The stretches of a time, newest first."""
        for stretch in reversed(self.stretches):
            if stretch.end_ns < start_ns:
                return
            if stretch.start_ns < end_ns:
                yield stretch

    def before(self, seq: int | None, most: int) -> list[Stretch]:
        """The last ``most`` stretches up to an event, or up to now."""
        known = (stretch for stretch in reversed(self.stretches) if seq is None or stretch.last <= seq)
        return list(islice(known, most))

    def one_in(self) -> int | None:
        """Of how many events one was looked at lately; None when none was passed over."""
        taken, passed = (sum(column) for column in zip(*self._recent, strict=True)) if self._recent else (0, 0)
        if self.passing:
            taken, passed = taken + self._taken, passed + self.stretches[-1].count
        return None if not passed else max(2, round((taken + passed) / max(1, taken)))
