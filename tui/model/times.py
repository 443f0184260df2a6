"""What a wall clock showed when something happened on the target: what other logs are compared with.

A target tells once what the wall showed at the time 0 of its own clock. That holds while its clock runs with the wall:
a simulated engine may run faster, and a machine that slept stood still. Live, every heartbeat is compared with the wall
here; on a recording the anchor is what the recorder wrote.

Law of this file: a time of day is only told while it is one; else it is the engine's own time, and says so.
"""

from datetime import UTC, datetime, tzinfo
from typing import Final

from .numbers import S, clock

APART_NS: Final = 5 * S
"""Between this wall and the target's: machines whose logs are compared are less apart, and a simulated engine on a busy
machine soon is more."""
DRIFT_NS: Final = 2 * S
"""The same apart, since the first heartbeat: heartbeats come late by less."""


class Times:
    """Times of the target as people write them. ``utc``: in UTC and with a ``Z``, else as the wall here shows them."""

    def __init__(self, *, utc: bool = False) -> None:
        self.utc = utc
        self._zone: tzinfo | None = UTC if utc else None
        self._anchor: int | None = None
        self._beat: object = None
        self._first: int | None = None
        self.wall = False
        """Whether the target's times are times of day."""

    def look(self, anchor_ns: int | None, recording: bool, beat: object, beat_ns: int, wall_ns: int) -> None:
        """What is known now: the anchor, and the last heartbeat with the target's time in it, just before ``wall_ns``.

        ``beat`` is the heartbeat itself, None before the first one: a newer one is another object.
        """
        if anchor_ns != self._anchor:
            self._anchor, self._first, self._beat = anchor_ns, None, None
            self.wall = anchor_ns is not None and recording
        if anchor_ns is None or recording or beat is None or beat is self._beat:
            return
        self._beat = beat
        apart = anchor_ns + beat_ns - wall_ns
        if self._first is None:
            self._first = apart
        self.wall = abs(apart) <= APART_NS and abs(apart - self._first) <= DRIFT_NS

    def _at(self, at_ns: int) -> datetime | None:
        if not self.wall or self._anchor is None:
            return None
        try:
            return datetime.fromtimestamp((self._anchor + at_ns) // S, self._zone)
        except (OverflowError, OSError, ValueError):
            return None  # an anchor of a far century

    def text(self, at_ns: int, *, millis: bool = False) -> str:
        """``HH:MM:SS``, and ``.mmm`` for events: the time of day, else the time since the engine began."""
        at = self._at(at_ns)
        if at is None:
            return clock(at_ns, millis=millis)
        text = f"{at:%H:%M:%S}"
        if millis:
            assert self._anchor is not None
            text += f".{(self._anchor + at_ns) // 1_000_000 % 1_000:03}"
        return text + ("Z" if self.utc else "")

    def head(self, at_ns: int, *, date: bool = False) -> str:
        """For the status row: a time that is none of day is named."""
        at = self._at(at_ns)
        if at is None:
            return f"engine {clock(at_ns)}"
        return f"{at:%Y-%m-%d} {self.text(at_ns)}" if date else self.text(at_ns)

    def whole(self, at_ns: int) -> str:
        """Date and time to the microsecond with its zone, and the engine's own time behind it."""
        engine = f"engine {at_ns // S:,}.{at_ns // 1_000 % 1_000_000:06} s"
        at = self._at(at_ns)
        if at is None:
            return engine
        assert self._anchor is not None
        aware = at if at.tzinfo is not None else at.astimezone()
        micros = (self._anchor + at_ns) // 1_000 % 1_000_000
        return f"{aware:%Y-%m-%d %H:%M:%S}.{micros:06} {'UTC' if self.utc else f'{aware:%z}'}, {engine}"
