"""The spine of a history: the part that is small however many requests there are, as bytes.

Trends, the lints with what they have seen, the ended holds and the gaps would cost a fold of everything before a place.
Their bytes at some places are kept instead. A seek takes the spine at a place in front, and folds only the events from
there. Lives, copies and the log are not in it: a seek folds them from a stretch of fixed length before its target. The
lives of the lanes reach further back, because the few kinds of events that make them are read by themselves.

Example: a recording has 2,000,000 events and spines at 0, 8,192, 16,384 and so on. A seek to 1,000,000 shows the
lives of the last ``STRETCH_EVENTS``. It therefore begins with the spine at 983,040, goes on to 984,000, lets go of
the lives so far, and folds the rest.

Law of this file: the history of a place is the same from whichever spine a seek began.
"""

import pickle
from bisect import bisect_right
from typing import Any, Final, Protocol

import zstandard

from .history import History

STRETCH_EVENTS: Final = 16_000
"""Events before a place whose lives, copies and log a seek shows: about 0.15 s of folding."""
LANES_EVENTS: Final = 96_000
"""Events before the stretch of which a seek reads the lives alone: six times as many, in about a tenth of a second."""
EVERY_EVENTS: Final = 8_192
"""Events between two spines at first: some hundredths of a second of folding, for 30 KB."""
SPINES_MAX: Final = 512
"""Spines of a recording; then every other goes. 512 take about 15 MB, and cover 4,000,000 events at first."""
FIELDS: Final = (
    "flows", "density", "watch", "stuck", "pending", "slow", "ended_holds", "steps", "gaps", "lost_events", "tick_ns",
    "ranks",
)
"""The attributes of a mirror that are its spine. The lints are in it twice, and stay the same objects."""


class Spines(Protocol):
    """The spines of a tape."""

    def spine_before(self, seq: int) -> tuple[int, bytes] | None:
        """The last kept spine not behind event ``seq``, with the event that it precedes; None without one."""
        ...


def spine_of(mirror: History) -> bytes:
    """The spine of a mirror, as bytes that only this process reads."""
    values = [getattr(mirror, name) for name in FIELDS]
    return zstandard.compress(pickle.dumps((values, mirror.sources.seen), pickle.HIGHEST_PROTOCOL), 1)


def values_of(data: bytes) -> tuple[dict[str, Any], dict[int, Any]]:
    """The attributes of a spine by name, and the counts of sources."""
    values, seen = pickle.loads(zstandard.decompress(data))
    return dict(zip(FIELDS, values, strict=True)), seen


class KeptSpines:
    """The spines of a recording, while it is read through once."""

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._data: list[bytes] = []
        self._every = EVERY_EVENTS
        self._read = -1
        """The event up to which the recording was read."""

    def look(self, mirror: History) -> None:
        """Keep the spine of this mirror if the last kept spine is far enough behind."""
        self._read = mirror.next_seq
        if self._seqs and mirror.next_seq - self._seqs[-1] < self._every:
            return
        self._seqs.append(mirror.next_seq)
        self._data.append(spine_of(mirror))
        if len(self._seqs) > SPINES_MAX:
            self._every *= 2
            del self._seqs[1::2], self._data[1::2]

    def spine_before(self, seq: int) -> tuple[int, bytes] | None:
        """The last kept spine not behind event ``seq``; None when the recording was not read so far."""
        index = bisect_right(self._seqs, seq) - 1 if seq <= self._read else -1
        return (self._seqs[index], self._data[index]) if index >= 0 else None
