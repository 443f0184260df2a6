"""Places in a recording as people write them: a number, a time, the end.

``4711``                    the event with this number
``90s``, ``1.5m``, ``2h``   the engine's clock, as the console shows it
``-60s``                    so long before the last event
``2026-11-21T15:00:00``     the wall's clock; with a zone, or local
``end``                     the last event

Law of this file: a time means the facts as of then, so it stands for the last event that is not later.
"""

import re
from bisect import bisect_right
from datetime import datetime
from typing import Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import decode_events
from kvbm_console.recording.reader import Recording

_TIME: Final = re.compile(r"(-?)(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS_NS: Final = {
    "ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": SECOND_NS, "m": 60 * SECOND_NS, "h": 3_600 * SECOND_NS,
}


class Place(msgspec.Struct, frozen=True):
    """One place. ``kind``: ``seq``, ``engine`` and ``back`` (from the end) in ns, ``wall`` since 1970, ``end``."""

    kind: str
    value: int = 0


def parse_place(text: str) -> Place:
    """The place that a text names. Raises ``UsageError``.

    >>> parse_place("-1.5s")
    Place(kind='back', value=1500000000)
    """
    text = text.strip()
    if text == "end":
        return Place("end")
    if text.isdecimal() and len(text) <= 18:
        return Place("seq", int(text))
    match = _TIME.fullmatch(text)
    if match is not None and len(text) <= 32:
        return Place("back" if match[1] else "engine", round(float(match[2]) * _UNITS_NS[match[3]]))
    try:
        if text[4:5] != "-":
            raise ValueError(text)
        return Place("wall", round(datetime.fromisoformat(text).timestamp() * SECOND_NS))
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"a place is a number, a time such as 90s, -60s or 2026-11-21T15:00:00, or end, not {text!r}"
        ) from None


def seq_of(recording: Recording, place: Place, *, following: bool = False) -> int:
    """The event at a place: for a time the last one not later or, with ``following``, the first one not earlier."""
    if place.kind == "end":
        return recording.last_seq
    if place.kind == "seq":
        return place.value
    at_ns = place.value
    if place.kind == "back":
        at_ns = last_ns(recording) - place.value
    elif place.kind == "wall":
        at_ns = place.value - recording.segments[0].about.clock_anchor_ns
    return seq_at(recording, at_ns - 1) + 1 if following else seq_at(recording, at_ns)


def last_ns(recording: Recording) -> int:
    """The engine's time of the last event."""
    return max((entry.last_ns for segment in recording.segments for entry in segment.entries), default=0)


def seq_at(recording: Recording, at_ns: int) -> int:
    """Number of the last event that is not later than ``at_ns``; one below the first when all are later."""
    places = [(segment, entry) for segment in recording.segments for entry in segment.entries]
    index = bisect_right(places, at_ns, key=lambda place: place[1].first_ns) - 1
    if index < 0:
        return recording.first_seq - 1
    segment, entry = places[index]
    found = entry.first_seq - 1
    for frame in segment.frames(entry):
        if frame.channel != fmt.EVENTS:
            continue
        if frame.publish_ns - segment.about.clock_anchor_ns <= at_ns:
            found = frame.end_seq - 1
            continue
        early = [event.seq for event in decode_events(frame, recording.path) if event.at_ns <= at_ns]
        return early[-1] if early else found
    return found
