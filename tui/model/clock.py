"""The target's clock, the lag of this console, and the time of day of an event.

Between two reports the console advances the target's time by the local monotonic clock. It advances at most as fast as
the heartbeats show (a simulated engine may stand still). It runs at most one second ahead, so ages stop without
reports. A
faster guess would run ahead of an engine that runs at ten times the wall.

A target reports once the wall-clock time at the time 0 of its own clock. That anchor holds while the target's
clock runs with the wall. A simulated engine may run faster, and a suspended machine stops its clock. Live, every
heartbeat is compared with the local wall clock; on a recording the anchor comes from the recorder.

Law of this file: ages come from the target's own time, and a time of day appears only while it is right.
"""

from collections import deque
from datetime import UTC, datetime, tzinfo
from typing import Final

from .numbers import S, clock

AHEAD_MAX_NS: Final = S
"""Time that the clock runs on without a heartbeat; heartbeats come every half second."""
BEATS_MAX: Final = 256
"""Heartbeats whose head has not been applied yet, for two minutes."""
RATE_WINDOW_NS: Final = 2 * S
RATE_STEP_NS: Final = RATE_WINDOW_NS // 200
"""Batches within this time count as a single batch."""
BATCHES_MAX: Final = 512
APART_NS: Final = 5 * S
"""Limit between this wall clock and the target's. Machines whose logs are compared are less apart, and a simulated
engine on a busy machine soon is more."""
BEATS_LATE: Final = 8
"""Heartbeats of which at least one comes in time, however busy the machine is."""
DRIFT_NS: Final = 2 * S
"""The same apart, since the first heartbeat: heartbeats come late by less."""


class TargetClock:
    """``at_ns`` of the target, estimated between its reports. ``mono_ns`` is the local monotonic clock throughout."""

    __slots__ = ("_at", "_beat_at", "_beat_mono", "_floor", "_mono", "_pace", "live")

    def __init__(self) -> None:
        self.live = False
        """True if local time advances it; never on a recording."""
        self.reset()

    def reset(self) -> None:
        """Forget everything: another incarnation, or a seek."""
        self._at = 0
        self._mono = 0
        self._beat_at: int | None = None
        self._beat_mono = 0
        self._floor = 0
        self._pace = 1.0

    def event(self, at_ns: int, mono_ns: int = 0) -> None:
        """An event of this time was applied."""
        if at_ns >= self._at:
            self._floor = self.now(mono_ns)
            self._at, self._mono = at_ns, mono_ns

    def beat(self, at_ns: int, mono_ns: int) -> None:
        """A heartbeat told the target's time."""
        shown = self.now(mono_ns)
        if self._beat_at is not None and mono_ns > self._beat_mono:
            self._pace = min(1.0, max(0.0, (at_ns - self._beat_at) / (mono_ns - self._beat_mono)))
        self._beat_at, self._beat_mono = at_ns, mono_ns
        self.event(at_ns, mono_ns)
        self._floor = max(self._floor, shown)

    def now(self, mono_ns: int) -> int:
        """The target's time now, never less than the last event's and never going back."""
        if not self.live or self._beat_at is None:
            return self._at
        ahead = min(AHEAD_MAX_NS, max(0, mono_ns - self._mono))
        return max(self._at + int(ahead * self._pace), self._floor)


class FeedProgress:
    """Events per second of local time, and the lag behind the head that heartbeats tell of."""

    __slots__ = ("_batches", "_beats", "_recent", "_since")

    def __init__(self) -> None:
        self._batches: deque[tuple[int, int]] = deque()
        """(time, events) of the last batches, BATCHES_MAX at most."""
        self._recent = 0
        """Events of these batches."""
        self._beats: deque[tuple[int, int]] = deque(maxlen=BEATS_MAX)
        self._since: int | None = None
        """When the connection began."""

    def arrived(self, events: int, mono_ns: int) -> None:
        """A batch was taken."""
        batches = self._batches
        self._recent += events
        if batches and 0 <= mono_ns - batches[-1][0] < RATE_STEP_NS:
            mono_ns, events = batches[-1][0], events + batches.pop()[1]
        batches.append((mono_ns, events))
        if len(batches) > BATCHES_MAX:
            self._recent -= batches.popleft()[1]

    def beat(self, head_seq: int, mono_ns: int) -> None:
        """A heartbeat told the head."""
        self._beats.append((mono_ns, head_seq))

    def applied(self, next_seq: int) -> None:
        """Everything before ``next_seq`` is applied."""
        beats = self._beats
        while len(beats) > 1 and beats[0][1] < next_seq:
            beats.popleft()

    def reset(self, mono_ns: int | None = None) -> None:
        """A new connection."""
        self._since = mono_ns
        self._batches.clear()
        self._recent = 0
        self._beats.clear()

    def rate(self, mono_ns: int) -> float:
        """Events per second over the last two seconds."""
        batches, edge = self._batches, mono_ns - RATE_WINDOW_NS
        while batches and batches[0][0] < edge:
            self._recent -= batches.popleft()[1]
        return self._recent * S / RATE_WINDOW_NS

    def lag_events(self, next_seq: int) -> int:
        """Events between the last applied event and the last reported head."""
        return max(0, self._beats[-1][1] + 1 - next_seq) if self._beats else 0

    def lag_ns(self, next_seq: int, mono_ns: int) -> int:
        """How long ago the oldest head that is not applied was told; 0 when nothing is missing."""
        for at, head in self._beats:
            if head >= next_seq:
                return mono_ns - at
        return 0

    def silence_ns(self, mono_ns: int) -> int | None:
        """Time since the last heartbeat, or since the connection began; None before a connection.

        A target that stops before its first heartbeat counts as silent, too.
        """
        since = self._beats[-1][0] if self._beats else self._since
        return None if since is None else mono_ns - since


class Times:
    """Times of the target as people write them. ``utc``: in UTC and with a ``Z``, else as the wall here shows them."""

    def __init__(self, *, utc: bool = False) -> None:
        self.utc = utc
        self._zone: tzinfo | None = UTC if utc else None
        self._anchor: int | None = None
        self._lately: deque[int] = deque(maxlen=BEATS_LATE)
        """How far the target's time was before this wall clock at the last heartbeats."""
        self._over = False
        """True once the times proved to be no times of day: then they stay so."""
        self._beat: object = None
        self._first: int | None = None
        self.wall = False
        """True if the target's times are times of day."""

    def look(self, anchor_ns: int | None, recording: bool, beat: object, beat_ns: int, wall_ns: int) -> None:
        """Take the anchor, and the last heartbeat with the target's time in it, which arrived just before ``wall_ns``.

        ``beat`` is the heartbeat itself, None before the first heartbeat; a newer heartbeat is another object.
        """
        if anchor_ns != self._anchor:
            self._anchor, self._first, self._beat, self._over = anchor_ns, None, None, False
            self._lately.clear()
            self.wall = anchor_ns is not None and recording
        if anchor_ns is None or recording or beat is None or beat is self._beat:
            return
        self._beat = beat
        apart = anchor_ns + beat_ns - wall_ns
        self._lately.append(apart)
        if self._first is None:
            self._first = apart
        best = max(self._lately)  # a busy machine brings heartbeats late, and never early
        before, self.wall = self.wall, not self._over and abs(best) <= APART_NS and abs(best - self._first) <= DRIFT_NS
        self._over = self._over or (before and not self.wall)

    def _at(self, at_ns: int) -> datetime | None:
        if not self.wall or self._anchor is None:
            return None
        try:
            return datetime.fromtimestamp((self._anchor + at_ns) // S, self._zone)
        except (OverflowError, OSError, ValueError):
            return None  # an anchor of a far century

    def text(self, at_ns: int, *, millis: bool = False) -> str:
        """``HH:MM:SS``, and ``.mmm`` for events: the time of day, else with a ``+`` the time since the engine began."""
        at = self._at(at_ns)
        if at is None:
            return f"+{clock(at_ns, millis=millis)}"
        text = f"{at:%H:%M:%S}"
        if millis:
            assert self._anchor is not None
            text += f".{(self._anchor + at_ns) // 1_000_000 % 1_000:03}"
        return text + ("Z" if self.utc else "")

    def head(self, at_ns: int, *, date: bool = False) -> str:
        """The time for the status row; a time that is no time of day is named ``engine``."""
        at = self._at(at_ns)
        if at is None:
            return f"engine {self.text(at_ns)}"
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
