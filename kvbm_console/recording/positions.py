"""Positions in a recording as people write them: a number, a time, the end.

    4711                  the event with this number
    90s, 1.5m, 2h         the engine's clock, as the console shows it
    -60s                  so long before the last event
    2026-11-21T15:00:00   the wall's clock; with a zone, or local
    15:00:03              this time of the day on which the recording begins, or of the next day if it lasts until then
    end                   the last event
    #seq=4711&slot=5      the link of a page that rec export --to html made: event 4711

Law of this file: a time means the facts as of then, so it stands for the last event that is not later.
"""

import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Noted
from kvbm_console.core.ids import Note
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.tape import RunTape

_TIME: Final = re.compile(r"(-?)(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_LINK: Final = re.compile(r"(?:[^#]{0,4096})#seq=(\d{1,18})(?:&slot=(\d{1,18}))?")
_TIME_OF_DAY: Final = re.compile(r"\d{1,2}:\d{2}.*")
_UNITS_NS: Final = {
    "ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": SECOND_NS, "m": 60 * SECOND_NS, "h": 3_600 * SECOND_NS,
}


class Position(msgspec.Struct, frozen=True):
    """A parsed position. ``kind`` is the unit of ``value``: ``seq``, ``engine`` or ``back`` (from the end) in ns,
    ``wall`` in ns since 1970, ``day`` in ns since midnight in ``zone`` (None for local), or ``end``."""

    kind: str
    value: int = 0
    zone: tzinfo | None = None
    slot: int | None = None
    """The slot that a page's link names."""


def parse_position(text: str, *, utc: bool = False) -> Position:
    """The place that a text names; raises ``UsageError``. ``utc``: a wall's time without a zone is of UTC, else local.

    >>> parse_position("-1.5s")
    Position(kind='back', value=1500000000, zone=None, slot=None)
    """
    text = text.strip()
    if text == "end":
        return Position("end")
    if text.isdecimal() and len(text) <= 18:
        return Position("seq", int(text))
    link = _LINK.fullmatch(text)
    if link is not None:
        return Position("seq", int(link[1]), slot=None if link[2] is None else int(link[2]))
    match = _TIME.fullmatch(text)
    if match is not None and len(text) <= 32:
        return Position("back" if match[1] else "engine", round(float(match[2]) * _UNITS_NS[match[3]]))
    zone = UTC if utc else None
    try:
        if _TIME_OF_DAY.fullmatch(text):
            of_day = time.fromisoformat(text.rjust(len(text) + (text[1] == ":"), "0"))
            seconds = (of_day.hour * 60 + of_day.minute) * 60 + of_day.second
            return Position("day", seconds * SECOND_NS + of_day.microsecond * 1_000, of_day.tzinfo or zone)
        if text[4:5] != "-":
            raise ValueError(text)
        at = datetime.fromisoformat(text)
        return Position("wall", _since_1970(at if at.tzinfo else at.replace(tzinfo=zone)) + at.microsecond * 1_000)
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"a place is a number, a time such as 90s, -60s, 15:00:03 or 2026-11-21T15:00:00, or end, not {text!r}"
        ) from None


def seq_of(tape: RunTape, place: Position, *, following: bool = False) -> int:
    """The event at a place: for a time the last event not later or, with ``following``, the first event not earlier.

    Raises ``UsageError`` for a time of day on a tape without one.
    """
    if place.kind == "end":
        return tape.last_seq
    if place.kind == "seq":
        return place.value
    at_ns = place.value
    if place.kind == "back":
        at_ns = tape.last_ns - place.value
    elif place.kind in ("wall", "day"):
        if tape.clock_anchor_ns is None:
            raise UsageError(f"{tape.name} does not tell the time of day; a place is a number or a time such as -60s")
        wall_ns = place.value - tape.clock_anchor_ns
        at_ns = wall_ns if place.kind == "wall" else _on_its_day(tape, place, tape.clock_anchor_ns)
    return tape.seq_at(at_ns - 1) + 1 if following else tape.seq_at(at_ns)


def verdict_seq(recording: Recording) -> int | None:
    """The verdict in the last batches of a recording of ``explore``; None without a verdict."""
    last = next((entry for entry in reversed(recording.entries) if entry.events), None)
    if last is None:
        return None
    found = [
        event.seq for events in recording.events(last.first_seq) for event in events
        if isinstance(event, Noted) and event.note is Note.VERDICT
    ]
    return found[-1] if found else None


def _since_1970(at: datetime) -> int:
    """Nanoseconds of its whole second: a float holds no microseconds of today."""
    return int(at.replace(microsecond=0).timestamp()) * SECOND_NS


def _on_its_day(tape: RunTape, place: Position, anchor_ns: int) -> int:
    """The engine's time at the first such time of day since the beginning, if the tape lasts until then."""
    begin = datetime.fromtimestamp((anchor_ns + tape.first_ns) // SECOND_NS, place.zone)
    midnight = begin.replace(hour=0, minute=0, second=0, microsecond=0)
    of_day = timedelta(seconds=place.value // SECOND_NS)
    days = [midnight + timedelta(days=day) + of_day for day in (0, 1)]
    found = [_since_1970(at) + place.value % SECOND_NS - anchor_ns for at in days]
    return found[1] if found[0] < tape.first_ns and found[1] <= tape.last_ns else found[0]
