"""Playback: a recording as a tape. Play, pause, step, seek; the console folds its items as it does live.

``Playback`` is the tape and knows neither clock nor screen; ``RecordingFeed`` moves it along the wall's clock and is
what a console reads. Both belong to one thread.

Law of this file: at every moment the receiver's facts are ``Recording.state_at(position_seq)``.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

import anyio

from kvbm_console.core.config import SECOND_NS, require
from kvbm_console.core.events import Event
from kvbm_console.core.snapshots import copied_facts, decode_facts, sparse_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.decode import fold
from kvbm_console.recording.positions import parse_position, seq_of
from kvbm_console.stream.feed import Connected, EventsArrived, FeedItem, GapSeen, SnapshotTaken
from kvbm_console.stream.tape import RunTape

TICK_S: Final = 1 / 30
"""The console draws at most this often, so more often would only cost."""
TICK_EVENTS_MAX: Final = 50_000
"""Most events of one tick, about 50 ms of folding: however fast the tape runs, keys are answered."""
SPEED_MAX: Final = 1_000_000.0
FOLLOW_NS: Final = 100_000_000
"""Interval at which a growing tape is read again: a person notices no delay, and a read takes 1 ms."""
CHECKPOINT_EVENTS: Final = 2_048
"""A seek keeps the facts at most this far in front of its target, so that steps back from there fold only so much."""
CHECKPOINT_BYTES_MAX: Final = 64 * 1024 * 1024
"""The memory that kept facts may take; those not used for longest go first."""


class Playback:
    """A tape over one recording. ``position_seq`` is the last event that is applied; it begins at the first event.

    Numbers outside of the recording are moved to its ends. A number inside a gap is moved to the last number of the
    gap, from which the facts are known again.
    """

    def __init__(self, recording: RunTape, *, follow: bool = False) -> None:
        self.recording = recording
        self.follow = follow
        """True if the recording is still being written and is read again."""
        self._live = False
        self.first_seq = recording.first_seq
        self.last_seq = recording.last_seq
        self.playing = False
        self.closed = False
        """True if the feed of this tape ends."""
        self.speed = 1.0
        self.on_change: Callable[[], None] = lambda: None
        """Called when there is something to take, or playing began."""
        self._checkpoints: OrderedDict[int, memoryview] = OrderedDict()
        self._checkpoint_bytes = 0
        self._state = CacheState()
        self._ahead: Iterator[list[Event]] = iter(())
        self._buffer: list[Event] = []
        self._density: list[int] = []
        self._tape_ns = 0
        self._outbox: list[FeedItem] = []
        self._jumped = True
        self.seek(self.first_seq)

    def close(self) -> None:
        """End the feed of this tape."""
        self.closed = True
        self.on_change()

    # --- position ---

    @property
    def position_seq(self) -> int:
        """The last event that is applied; the first number minus 1 when no event is applied."""
        return self._state.seq - 1

    @property
    def at_ns(self) -> int:
        """The engine's time on the tape."""
        return max(self._tape_ns, self._state.at_ns)

    @property
    def at_end(self) -> bool:
        """True if nothing follows."""
        return self.position_seq >= self.last_seq

    @property
    def state(self) -> CacheState:
        """The facts at the position. Read only."""
        return self._state

    def seq_of(self, place: str, *, utc: bool = False) -> int:
        """The event at a place as ``recording.positions`` describes it. Raises ``UsageError``."""
        return seq_of(self.recording, parse_position(place, utc=utc))

    def density(self, cells: int) -> list[int]:
        """Events in each of ``cells`` equal parts of the recorded time. Asked at every draw, so the last is kept."""
        if len(self._density) != cells:
            self._density = self.recording.density(cells)
        return self._density

    # --- keys ---

    def play(self) -> None:
        """Go on. At the end of a followed tape, events are then shown as they are written."""
        self.playing = self.follow or not self.at_end
        self._live = self.follow and self.at_end
        self.on_change()

    def pause(self) -> None:
        """Stand still."""
        self.playing = False
        self.on_change()

    def toggle(self) -> None:
        """Play or pause. At the end of a tape that does not grow, play from its beginning."""
        if self.playing:
            self.pause()
            return
        if self.at_end and not self.follow:
            self.seek(self.first_seq)
        self.play()

    def set_speed(self, speed: float) -> None:
        """Recorded seconds for each second. Raises ``UsageError`` outside of 0 (excluded) to a million."""
        require(0.0 < speed <= SPEED_MAX, "speed", f"above 0 and at most {SPEED_MAX:.0f}", speed)
        self.speed = speed
        self.on_change()

    def step(self, n: int = 1) -> None:
        """Move by so many events, back when negative. A gap on the way counts as one step."""
        if n < 0:
            self.seek(self.position_seq + n)
            return
        stepped: list[Event] = []
        for _ in range(n):
            event = self._forward()
            if event is not None:
                stepped.append(event)
                continue
            self._deliver(stepped)
            stepped = []
            self._cross_gap()
        self._deliver(stepped)
        self._tape_ns = self._state.at_ns
        self.on_change()

    def seek(self, seq: int) -> None:
        """Stand behind event ``seq``."""
        seq = max(min(seq, self.last_seq), min(self.first_seq, self.last_seq))
        self._stand(self._state_at(self._known(seq)))
        self._tape_ns = self._state.at_ns
        self._live = self.follow and self.at_end
        self._jumped = True
        self._outbox.clear()
        self.on_change()

    # --- for the feed ---

    def refresh(self) -> None:
        """Read the new events. At the end of a playing tape they are shown at once, whatever the speed."""
        at_end = self.at_end
        if not self.follow or not self.recording.refresh():
            return
        self.first_seq, self.last_seq = self.recording.first_seq, self.recording.last_seq
        self._density = []
        if self.position_seq < self.first_seq - 1:  # the oldest events were forgotten
            self.seek(self.first_seq)
        self._live |= at_end
        if not self._buffer:
            self._ahead = self.recording.events(self._state.seq)

    def advance(self, elapsed_ns: int) -> None:
        """Apply the events of ``elapsed_ns`` of wall time, if playing."""
        if not self.playing:
            return
        self._tape_ns = max(self._tape_ns, self._state.at_ns) + round(elapsed_ns * self.speed)
        events: list[Event] = []
        while len(events) < TICK_EVENTS_MAX:
            event = self._forward(None if self._live else self._tape_ns)
            if event is not None:
                events.append(event)
                continue
            if self._peek() is not None or self.at_end:
                break
            self._deliver(events)
            events = []
            self._cross_gap()
        else:
            self._tape_ns = self._state.at_ns
        self._deliver(events)
        if self.at_end:
            self.playing = self.follow
            self._live = self.follow
            self._tape_ns = self._state.at_ns

    def take(self) -> list[FeedItem]:
        """The items for a receiver since the last call; the state in a snapshot is the receiver's own."""
        items, self._outbox = self._outbox, []
        if self._jumped:
            self._jumped = False
            items.append(SnapshotTaken(copied_facts(self._state)))
        return items

    # --- inside ---

    def _peek(self) -> Event | None:
        """The next event if it is here; None at the end and in front of a gap."""
        if not self._buffer:
            self._buffer = next(self._ahead, [])[::-1]
        return self._buffer[-1] if self._buffer and self._buffer[-1].seq == self._state.seq else None

    def _forward(self, until_ns: int | None = None) -> Event | None:
        """Apply the next event if it is here and not later than this."""
        event = self._peek()
        if event is None or (until_ns is not None and event.at_ns > until_ns):
            return None
        self._buffer.pop()
        fold(self._state, [event], self.recording.path)
        return event

    def _deliver(self, events: list[Event]) -> None:
        # A snapshot that is still to be taken will contain them.
        if events and not self._jumped:
            self._outbox.append(EventsArrived(events))

    def _cross_gap(self) -> None:
        """Go on behind the gap at the position; when no keyframe follows, the tape ends here."""
        if self.at_end:
            return
        missing = self._state.seq
        known = self.recording.next_keyframe(missing + 1)
        if known is None:
            self.last_seq = self.position_seq
            return
        self._stand(self._state_at(known - 1))
        reasons = [gap.reason for gap in self.recording.gaps if gap.first <= missing <= gap.last]
        self._outbox.append(GapSeen(missing, known - 1, reasons[0] if reasons else "events are missing"))
        self._jumped = True

    def _stand(self, state: CacheState) -> None:
        self._state = state
        self._ahead = self.recording.events(state.seq)
        self._buffer = []

    def _state_at(self, seq: int) -> CacheState:
        start = self.recording.keyframe_before(seq + 1)
        kept = max((at for at in self._checkpoints if at <= seq + 1), default=None)
        if kept is None or (start is not None and start >= kept):
            return self.recording.state_at(seq, self._keeper(seq))
        self._checkpoints.move_to_end(kept)
        return self.recording.advance(decode_facts(self._checkpoints[kept]), seq, self._keeper(seq))

    def _keeper(self, seq: int) -> Callable[[CacheState], None]:
        """Keeps the facts of one place on the way to ``seq``, close in front of it."""

        def keep(passed: CacheState) -> None:
            if passed.seq <= seq < passed.seq + CHECKPOINT_EVENTS:
                self._keep(passed)

        return keep

    def _known(self, seq: int) -> int:
        """``seq``, or where the facts are known again when it lies in or behind a gap."""
        start = self.recording.keyframe_before(seq + 1)
        for gap in self.recording.gaps:
            if gap.count and gap.first <= seq and (start is None or start <= gap.first):
                following = self.recording.next_keyframe(seq + 1)
                return gap.first - 1 if following is None else following - 1
        return seq

    def _keep(self, state: CacheState) -> None:
        if any(abs(at - state.seq) < CHECKPOINT_EVENTS // 2 for at in self._checkpoints):
            return
        facts = sparse_facts(state)
        self._checkpoints[state.seq] = facts
        self._checkpoint_bytes += len(facts)
        while self._checkpoint_bytes > CHECKPOINT_BYTES_MAX and len(self._checkpoints) > 1:
            _, oldest = self._checkpoints.popitem(last=False)
            self._checkpoint_bytes -= len(oldest)


class RecordingFeed:
    """A playback as a ``stream.feed.Feed``. Only one feed reads a playback."""

    def __init__(
        self, playback: Playback, *, clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.playback = playback
        self._clock = clock
        self._sleep = sleep

    async def items(self) -> AsyncIterator[FeedItem]:
        """``Connected``, the facts at the position, then whatever the tape comes to, until the playback is closed."""
        recording = self.playback.recording
        run = [*recording.runs].index(recording.incarnation) + 1
        changed = anyio.Event()

        def wake() -> None:
            changed.set()

        self.playback.on_change = wake
        yield Connected(
            recording.name, recording.incarnation, run, False, recording.block_bytes, True, recording.config,
            recording.clock_anchor_ns,
        )
        before_ns = looked_ns = self._clock()
        while not self.playback.closed:
            for item in self.playback.take():
                yield item
            if self.playback.follow and self._clock() - looked_ns >= FOLLOW_NS:
                looked_ns = self._clock()
                self.playback.refresh()
            if self.playback.playing:
                await self._sleep(TICK_S)
                now_ns = self._clock()
                self.playback.advance(now_ns - before_ns)
                before_ns = now_ns
                continue
            with anyio.move_on_after(FOLLOW_NS / SECOND_NS if self.playback.follow else None):
                await changed.wait()
            changed = anyio.Event()
            before_ns = self._clock()
