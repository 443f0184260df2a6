"""The events that the log pages over: the kept events, and older events that the console has asked for.

``near`` are the events that the history keeps; with a filter those of them that match, looked at once. ``far`` is a
stretch of older events from the daemon's ring or from the recording: all matches from ``far_lo`` up to ``far_hi``.

Law of this file: both are bounded. A stretch has no hole, and two stretches that do not touch are never joined.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal, overload

from kvbm_console.core.events import Event

from .coverage import SeenGap
from .events import nameless
from .filters import Filter
from .history import History

FAR_MAX: Final = 20_000
"""Older events kept: as many as the log keeps. The end that the reader leaves gives way."""
CHUNK_EVENTS: Final = 4_096
"""Events of a question: as many as a daemon gives at once, some milliseconds of work."""
NAMELESS_MAX: Final = CHUNK_EVENTS
"""Events that wait for a name; older events are likelier to get a name."""
Way = Literal["oldest", "older", "newer"]
Stretch = Callable[[int, int], Awaitable[tuple[list[Event], int]]]
"""(events from the first number up to the second, as far as there are any; number of the oldest available event)."""


class Joined(Sequence[Event]):
    """Two stretches of events one behind the other."""

    def __init__(self, far: Sequence[Event], count: int, near: Sequence[Event]) -> None:
        self._far, self._count, self._near = far, count, near

    def __len__(self) -> int:
        return self._count + len(self._near)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        return self._far[at] if at < self._count else self._near[at - self._count]


class Trail:
    """The events of one target that the log can show. ``look`` it before each use."""

    def __init__(self) -> None:
        self.gaps: list[SeenGap] = []
        """Older events that the recording does not have."""
        self.wanted: Filter | None = None
        self.oldest: int | None = None
        """The oldest available event; None before the first question."""
        self.failed = ""
        """The error of the last question; empty if it was answered."""
        self._clear()

    def _clear(self) -> None:
        self.near: Sequence[Event] = ()
        self.near_first = 0
        self.far: deque[Event] = deque()
        self.far_lo = self.far_hi = 0
        self.examined = 0
        """Events to which the filter was applied."""
        self._matched: deque[Event] = deque(maxlen=FAR_MAX)
        self._looked = -1
        self._nameless: list[Event] = []
        """Older events that did not match, and may match once their request is known."""

    def look(self, history: History, wanted: Filter | None) -> None:
        """Take the new events of the log; another filter begins anew."""
        log = history.log
        if wanted is not self.wanted:
            self.wanted = wanted
            self._clear()
        first = log[0].seq if log else history.next_seq
        if wanted is None:
            self.near, self.near_first = log, first
            return
        fresh = []
        for event in reversed(log):
            if event.seq <= self._looked:
                break
            fresh.append(event)
        else:  # the first look, or the log has lost events since the last look
            self._matched.clear()
            self.near_first = first
        if fresh:
            self._looked = fresh[0].seq
            self.examined += len(fresh)
            full = len(self._matched) == FAR_MAX
            self._matched.extend(e for e in reversed(fresh) if wanted.matches(e, history.state, history))
            if full or len(self._matched) == FAR_MAX:
                self.near_first = self._matched[0].seq
        self.near = self._matched

    # --- shown events ------------------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """True if no event is missing between the older events and the kept events."""
        return self.far_hi > self.far_lo and self.far_hi >= self.near_first

    def events(self, at: int | None) -> Sequence[Event]:
        """The stretch for a reader at event ``at``, None for the newest."""
        if self.joined:
            return Joined(self.far, bisect_left(self.far, self.near_first, key=_seq), self.near)
        return self.far if at is not None and at < self.far_hi and self.far else self.near

    def event(self, seq: int) -> Event | None:
        """An older event, by its number."""
        index = bisect_left(self.far, seq, key=_seq)
        return self.far[index] if index < len(self.far) and self.far[index].seq == seq else None

    def covers(self, seq: int) -> bool:
        """True if this number lies within the known older events."""
        return self.far_lo <= seq < min(self.far_hi, self.near_first)

    def first_known(self, at: int | None) -> int:
        """The first number of the stretch without a hole, for a reader at ``at``."""
        return self.far_lo if self.far_hi > self.far_lo and self.events(at) is not self.near else self.near_first

    def complete(self, at: int | None) -> bool:
        """True if no older event is available."""
        return self.oldest is not None and self.first_known(at) <= self.oldest

    # --- asking ------------------------------------------------------------------------------------------------------

    async def find(self, history: History, stretch: Stretch, way: Way, at: int | None, rows: int) -> None:
        """Ask for older events until ``rows`` more matches are known, or nothing is left that way."""
        wanted, names, before = self.wanted, history.names, len(self.far)
        if way == "oldest":
            _, self.oldest = await stretch(0, 0)
            self.far.clear()
            self.far_lo = self.far_hi = self.oldest
            before = 0
        elif self.far_hi <= self.far_lo or (way == "older" and self.events(at) is self.near):
            self.far.clear()
            self.far_lo = self.far_hi = self.near_first
            before = 0
        while self.wanted is wanted and history.names is names:
            first = max(0, self.far_lo - CHUNK_EVENTS) if way == "older" else self.far_hi
            last = self.far_lo if way == "older" else min(self.far_hi + CHUNK_EVENTS, self.near_first)
            if first >= last:
                return
            events, oldest = await stretch(first, last)
            if self.wanted is not wanted or history.names is not names:
                return
            self.oldest = oldest
            if not self._take(history, events, way, max(first, oldest), max(last, oldest)):
                return
            if len(self.far) - before >= rows or (self.complete(at) if way == "older" else self.joined):
                return

    def _take(self, history: History, events: list[Event], way: Way, first: int, last: int) -> bool:
        """Take all events from ``first`` up to ``last``; False when there is nothing that way."""
        history.names.learn(events)
        wanted = self.wanted
        matches = [e for e in events if wanted is None or wanted.matches(e, history.state, history)]
        self.examined += len(events)
        if wanted is not None:
            matches += self._named_now(history, events, wanted)
        if way == "older":
            if first >= self.far_lo:
                return False
            self.far = deque(sorted([*matches, *self.far], key=_seq))
            self.far_lo = first
            while len(self.far) > FAR_MAX:
                self.far_hi = self.far.pop().seq
        else:
            if first > self.far_hi:  # the daemon forgot the events between
                self.far.clear()
                self.far_lo = self.far_hi = first
            if last <= self.far_hi:
                return False
            self.far.extend(event for event in matches if event.seq >= self.far_hi)
            self.far_hi = last
            while len(self.far) > FAR_MAX:
                self.far_lo = self.far.popleft().seq + 1
        return True

    def _named_now(self, history: History, events: list[Event], wanted: Filter) -> list[Event]:
        """The earlier nameless events that match, now that their request is known."""
        again = self._nameless
        found = [event for event in again if wanted.matches(event, history.state, history)]
        left = [
            event for event in [*events, *again]
            if nameless(event, history) and not wanted.matches(event, history.state, history)
        ]
        self._nameless = left[:NAMELESS_MAX]
        return found


def _seq(event: Event) -> int:
    return event.seq


def index_at(events: Sequence[Event], seq: int) -> int:
    """The index of the last event that is not behind ``seq``, -1 without one."""
    return bisect_right(events, seq, key=_seq) - 1


def backwards(events: Sequence[Event], seq: int | None) -> Iterator[Event]:
    """Events from ``seq``, None for the newest, back to the oldest."""
    if seq is None:
        yield from reversed(events)
        return
    for at in range(index_at(events, seq), -1, -1):
        yield events[at]
