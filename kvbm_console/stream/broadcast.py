"""The broadcaster collects published events, flushes them as chunks into the ring, and wakes the readers.

A flush happens at once when the last flush is older than the gap. Otherwise it waits for the loop's next turn, so that
all events of one turn go out together. It waits longer while recent flushes have been more frequent than one per gap.
The gap follows the cost of the last fan-out and the number of readers, between 0.5 ms and 20 ms. Under load it is at
its bound. At a thousand events a second each event is on the wire at once. At a million they are sent in chunks that
are worth their fixed cost.

The broadcaster limits the average flush rate. A fixed minimum gap would penalise a publisher driven by the same loop.
Asyncio timers fire up to 1 ms late, so every event would arrive just after a flush and wait a full gap.

Law of this file: ``publish`` never waits and never fails for a reader's sake. Readers come to the ring by themselves.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvbm_console.core.events import Event
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.stream.ring import Cursor, Lost, Ring
from kvbm_console.wire.batches import MSGPACK, EventChunk, StimulusChunk, pack_events, pack_stimuli

FLUSH_EVENTS_MAX: Final = 4_096
"""A chunk of this size has long paid for its fixed cost; a larger chunk only adds delay."""
GAP_NS_MIN: Final = 500_000
"""Half the distance of a thousand evenly spaced events a second, so that jitter does not make them wait."""
BUSY_STIMULI: Final = 4
"""A flush of more stimuli shows load, under which larger chunks are worth more. The gap behind it is at its bound, and
nothing shortens it."""
CREDIT_NS: Final = 1_000_000
"""The most time by which a late flush may shorten the gaps behind it."""
GAP_NS_MAX: Final = 20_000_000
"""A console draws at most 30 times a second, so 20 ms of delay are not seen."""
WRITE_NS: Final = 120_000
"""Processor time of a write to a reader."""
GAP_NS_PER_READER: Final = 8_000_000
"""From three readers on this bound is above ``GAP_NS_MAX``, and fan-out takes at most 1.5 % of the loop's own time. It
is a second for 128 readers."""
GAP_PER_FAN_OUT: Final = 4
"""Fan-out to one reader takes at most a fifth of the time. With every further reader the gap grows by as much again, up
to its bound, so more readers wait longer and the engine does not."""

OnFlush = Callable[[StimulusChunk | None, EventChunk | None], None]
Later = Callable[[float, Callable[[], None]], object]


class Subscriber:
    """One reader: its cursor and the flag that wakes it. Made by ``Broadcaster.subscribe``."""

    def __init__(self, owner: "Broadcaster", cursor: Cursor, name: str) -> None:
        self.cursor = cursor
        self.name = name
        self.beats = 0
        """Heartbeats that are due."""
        self.took_at = -1
        """Number of the flush behind which it took its last frame."""
        self._owner = owner
        self._wake = asyncio.Event()
        self._fan_out = 0
        """Number of the flush that woke the reader, until the reader has caught up."""

    async def wait(self) -> None:
        """Wait until there is a frame to read, a heartbeat is due, or the stream closes."""
        while not (self._owner.closing or self.beats or self._owner.ring.pending(self.cursor)):
            self._wake.clear()
            self._owner.idle[self] = None
            try:
                await self._wake.wait()
            finally:
                self._owner.idle.pop(self, None)

    def read(self) -> bytes | Lost | None:
        """The next frame, a loss, or None when it has everything."""
        frame = self._owner.ring.read(self.cursor)
        if frame is not None:
            self.took_at = self._owner.flushes
        elif self._fan_out:
            self._owner.caught_up(self._fan_out)
            self._fan_out = 0
        return frame

    def wake(self, fan_out: int = 0) -> None:
        """Let ``wait`` check its conditions again."""
        self._fan_out = fan_out or self._fan_out
        self._wake.set()


class Broadcaster:
    """Passes the events of a publisher to any number of readers.

    ``clock`` is monotonic nanoseconds. ``later(seconds, callback)`` is the event loop's ``call_later``. Without a
    loop it is None, and only ``publish`` and ``flush`` flush. ``on_flush`` gets each flush's chunks once. ``strain``
    is the clock's time for each second of the loop's own time.
    """

    def __init__(
        self, ring: Ring, clock: Callable[[], int], *, on_flush: OnFlush | None = None, later: Later | None = None
    ) -> None:
        self.ring = ring
        self.closing = False
        self.flushes = 0
        self.gap_ns = GAP_NS_MIN
        self.later = later
        self.strain: Callable[[], float] = lambda: 1.0
        self.idle: dict[Subscriber, None] = {}
        """Subscribers that wait for the next flush, in the order in which they are woken."""
        self.subscribers: dict[Subscriber, None] = {}
        self._clock = clock
        self._on_flush = on_flush
        self._stimuli: list[Stimulus] = []
        self._events: list[Event] = []
        self._events_max = min(FLUSH_EVENTS_MAX, ring.chunk_events_max)
        self._last_ns = clock() - GAP_NS_MAX
        self._earned_ns = self._last_ns
        """Time of the last flush if flushes were exactly a gap apart; a pause earns a credit."""
        self._floor_ns = GAP_NS_MIN
        self._look_at = 0
        """Pending items before ``publish`` asks for a flush: full chunks while a flush is scheduled, else none."""
        self._outstanding = self._woken = self._readers = 0
        self._scheduled = self._due_ns = 0
        """Number of the last flush that was left to the loop, and its time."""

    @property
    def next_seq(self) -> int:
        """Number of the next event to be published."""
        return self.ring.next_seq + len(self._events)

    @property
    def pending_stimuli(self) -> Sequence[Stimulus]:
        """Stimuli that are published and not flushed yet."""
        return self._stimuli

    # --- the publisher's side ---

    def publish(self, stimulus: Stimulus, events: Sequence[Event]) -> None:
        """Take one stimulus with the events that it caused. The objects must not change afterwards."""
        # A single comparison per stimulus: we check which of the two lists is full only where that list grows.
        self._stimuli.append(stimulus)
        if events:
            pending = self._events
            pending.extend(events)
            if len(pending) >= self._look_at:
                self._look()
        elif len(self._stimuli) >= self._look_at:
            self._look()

    def _look(self) -> None:
        if self._look_at or len(self._events) >= self._events_max or len(self._stimuli) >= FLUSH_EVENTS_MAX:
            self.flush()
            return
        gap_ns, now_ns = max(self.gap_ns, self._floor_ns), self._clock()
        if now_ns - self._last_ns >= gap_ns:
            self.flush()
        elif self.later is not None:
            self._look_at = self._events_max
            self._scheduled += 1
            self._due_ns = max(now_ns, self._earned_ns + gap_ns)
            self.later((self._due_ns - now_ns) / 1e9, partial(self._flush_scheduled, self._scheduled))

    def _flush_scheduled(self, number: int) -> None:
        if number == self._scheduled and self._look_at:
            self._look_at = 0
            self.flush()

    def flush_if_due(self) -> None:
        """Flush now where the loop's next turn would. A publisher on the loop calls it before it waits, so that its own
        flush is not taken for the work of clients."""
        if self._look_at and self._clock() >= self._due_ns:
            self._flush_scheduled(self._scheduled)

    def flush(self) -> int:
        """Encode the pending events once, and hand them to the ring, to ``on_flush`` and to the waiting readers.

        Returns the number of readers to whom it will be written: those that it woke, and those that read older chunks.
        """
        stimuli, events = self._stimuli, self._events
        if not stimuli and not events:
            return 0
        self._stimuli, self._events = [], []
        lag = self._lag()
        self._finish_fan_out(lag)
        self.flushes += 1
        self._count_flush(len(stimuli))
        event_chunk = pack_events(events) if events else None
        if event_chunk is not None and len(events) <= self._events_max:
            self.ring.append(event_chunk)
        else:  # more events in one stimulus than the ring wants in one chunk
            for at in range(0, len(events), self._events_max):
                self.ring.append(pack_events(events[at : at + self._events_max]))
        if events:
            self._wake_readers(lag)
        if self._on_flush is not None:
            self._on_flush(pack_stimuli(stimuli) if stimuli else None, event_chunk)
        return self._readers if events else 0

    def _count_flush(self, stimuli: int) -> None:
        """Count a flush of ``stimuli`` and compute the earliest time of the next."""
        now_ns = self._last_ns = self._clock()
        if stimuli > BUSY_STIMULI:
            self._floor_ns, self._earned_ns = self._gap_ns_max(), now_ns
        else:
            earned_ns = self._earned_ns + max(self.gap_ns, self._floor_ns)
            self._floor_ns, self._earned_ns = GAP_NS_MIN, min(now_ns, max(earned_ns, now_ns - CREDIT_NS))

    def _wake_readers(self, lag: int) -> None:
        woken, self.idle = self.idle, {}
        self._outstanding += len(woken)
        self._woken, self._readers = len(woken), len(woken) + lag
        for subscriber in woken:
            subscriber.wake(self.flushes)

    # --- how long a fan-out takes ---

    def caught_up(self, fan_out: int) -> None:
        """A reader that the flush of this number woke has read everything."""
        if fan_out == self.flushes and self._outstanding > 0:
            self._outstanding -= 1
            if not self._outstanding:
                self._set_gap()

    def _lag(self) -> int:
        """Readers that took a frame since the last flush and do not wait for this one.

        They cost as many writes as those that wait. A reader that takes nothing costs nothing.
        """
        if len(self.idle) == len(self.subscribers):
            return 0
        return sum(reader.took_at == self.flushes and reader not in self.idle for reader in self.subscribers)

    def _finish_fan_out(self, lag: int) -> None:
        """Measure the fan-out at the next flush. A reader that lags makes it at least as long as the time since."""
        if self._outstanding:
            self._outstanding = 0
            self._set_gap()
        elif lag and not self.idle:  # nobody has caught up for a whole gap
            self._readers = lag
            self.gap_ns = self._gap_ns_max()

    def _set_gap(self) -> None:
        took = (self._clock() - self._last_ns) * self._readers // max(self._woken, 1)
        self.gap_ns = min(self._gap_ns_max(), max(GAP_NS_MIN, GAP_PER_FAN_OUT * self._readers * took))

    def _gap_ns_max(self) -> int:
        return round(self.strain() * max(GAP_NS_MAX, GAP_NS_PER_READER * self._readers))

    # --- the readers' side ---

    def subscribe(self, position: int, encoding: int = MSGPACK, name: str = "") -> Subscriber:
        """A reader of the events from ``position`` on."""
        subscriber = Subscriber(self, self.ring.cursor(position, encoding), name)
        self.subscribers[subscriber] = None
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Forget a reader."""
        self.subscribers.pop(subscriber, None)
        self.idle.pop(subscriber, None)
        self._readers = min(self._readers, len(self.subscribers))
        self.gap_ns = min(self.gap_ns, self._gap_ns_max())

    def beat(self) -> None:
        """A heartbeat is due for every reader. An unread heartbeat stands for all later ones."""
        for subscriber in self.subscribers:
            subscriber.beats = 1
            subscriber.wake()

    def close(self) -> None:
        """Flush, and let every reader see that this was the end."""
        self.flush()
        self.closing = True
        for subscriber in self.subscribers:
            subscriber.wake()
