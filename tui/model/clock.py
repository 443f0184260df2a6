"""The target's clock as this console knows it, and how far behind the console is.

Law of this file: ages come from the target's own time. Between two pieces of news it is advanced by the local monotonic
clock, slower when the heartbeats show that the target is slower (a simulated engine may stand still), never faster (a
guess would run ahead of one that runs at ten times the wall), and by one second at most: without news ages stop.
"""

from collections import deque
from typing import Final

SECOND_NS: Final = 1_000_000_000
AHEAD_MAX_NS: Final = SECOND_NS
"""How far the clock runs on without a heartbeat; they come every half second."""
BEATS_MAX: Final = 256
"""Heartbeats whose head has not been applied yet; two minutes of them."""
RATE_WINDOW_NS: Final = 2 * SECOND_NS
RATE_STEP_NS: Final = RATE_WINDOW_NS // 200
"""Batches within this time count as one."""
BATCHES_MAX: Final = 512


class TargetClock:
    """``at_ns`` of the target, estimated between its reports. ``mono_ns`` is the local monotonic clock throughout."""

    __slots__ = ("_at", "_beat_at", "_beat_mono", "_floor", "_mono", "_pace", "live")

    def __init__(self) -> None:
        self.live = False
        """Whether local time advances it; never on a recording."""
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


class Progress:
    """Events per second of local time, and the lag behind the head that heartbeats tell of."""

    __slots__ = ("_batches", "_beats", "_recent", "_since")

    def __init__(self) -> None:
        self._batches: deque[tuple[int, int]] = deque()
        """(time, events) of the last ones, BATCHES_MAX at most."""
        self._recent = 0
        """Events of those."""
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
        return self._recent * SECOND_NS / RATE_WINDOW_NS

    def lag_events(self, next_seq: int) -> int:
        """Events between what is applied and the last head told."""
        return max(0, self._beats[-1][1] + 1 - next_seq) if self._beats else 0

    def lag_ns(self, next_seq: int, mono_ns: int) -> int:
        """How long ago the oldest head that is not applied was told; 0 when nothing is missing."""
        for at, head in self._beats:
            if head >= next_seq:
                return mono_ns - at
        return 0

    def silence_ns(self, mono_ns: int) -> int | None:
        """Since the last heartbeat, or since the connection began; None before one.

        A target that stops before its first heartbeat is as silent as one that stops after it.
        """
        since = self._beats[-1][0] if self._beats else self._since
        return None if since is None else mono_ns - since
