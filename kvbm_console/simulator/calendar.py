"""Virtual time: a calendar of discrete events.

Law of this file: time moves only from one entry to the next. Entries run in the order (time, order of entering), so the
same work gives the same order of events at any speed of the wall's clock.
"""

import heapq
from collections.abc import Callable
from typing import Any, Protocol

from kvbm_console.core.errors import InternalError
from kvbm_console.core.stimuli import DeadlinePassed
from kvbm_console.dispatch import Dispatcher


class CalendarPace(Protocol):
    """Tells which virtual time corresponds to the wall's time now."""

    def __call__(self) -> int:
        """Virtual nanoseconds; may be behind or ahead of the calendar."""
        ...


class Calendar:
    """Entries at virtual nanoseconds.

    ``now_ns`` is the time of the entry that runs or ran last. ``pace`` is set while a driver sleeps until the next
    entry: then ``clock`` moves with the wall, but never past that entry.

    >>> calendar, seen = Calendar(), []
    >>> _ = calendar.at(20, lambda: seen.append("b")); _ = calendar.at(10, lambda: seen.append("a"))
    >>> calendar.run_next(), calendar.now_ns, seen
    (True, 10, ['a'])
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.waiting = False
        """True if the next entry is due and not ready, so that time stands still within the entries of one time."""
        self.pace: CalendarPace | None = None
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._felt: list[tuple[int, int]] = []
        self._live: set[int] = set()
        self._ready: dict[int, Callable[[], bool]] = {}
        self._tickets = 0
        self._running = False

    def at(
        self, at_ns: int, action: Callable[[], None], *, felt: bool = True, ready: Callable[[], bool] | None = None
    ) -> int:
        """Enter ``action`` at a time that is not past; returns a ticket for ``cancel``.

        An entry that is not ``felt`` changes nothing that the current iteration could see. Time stands still at an
        entry that is not ``ready`` (``waiting``).
        """
        if at_ns < self.now_ns:
            raise InternalError(f"an entry at {at_ns} ns lies before now, {self.now_ns} ns")
        ticket = self._tickets = self._tickets + 1
        self._live.add(ticket)
        if ready is not None:
            self._ready[ticket] = ready
        heapq.heappush(self._heap, (at_ns, ticket, action))
        if felt:
            heapq.heappush(self._felt, (at_ns, ticket))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Forget an entry; an entry that ran or is unknown is ignored."""
        self._live.discard(ticket)
        self._ready.pop(ticket, None)

    @property
    def next_ns(self) -> int | None:
        """The time of the next entry, None when there is none."""
        return self._first_ns(self._heap)

    @property
    def remembered(self) -> int:
        """Entries in memory, those that ran or were cancelled and are not let go of yet among them."""
        return len(self._heap) + len(self._felt)

    @property
    def next_felt_ns(self) -> int | None:
        """The time of the next entry that an iteration under way would feel, None when there is none."""
        return self._first_ns(self._felt)

    def _first_ns(self, heap: list[Any]) -> int | None:
        """The time of the first entry of a heap that is to come; entries that ran or were cancelled are removed."""
        live = self._live
        while heap and heap[0][1] not in live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def __len__(self) -> int:
        """Entries that are still to come."""
        return len(self._live)

    def clock(self) -> int:
        """The time to stamp a stimulus with: ``now_ns``, moved with the wall while a driver sleeps."""
        if self.pace is not None and not self._running:
            coming = self.next_ns
            if coming is not None:
                self.now_ns = max(self.now_ns, min(self.pace(), coming))
        return self.now_ns

    def run_next(self, until_ns: int | None = None) -> bool:
        """Move to the next entry's time and run every entry of that time, also those that are entered meanwhile.

        False: there is none, or none up to ``until_ns``, and nothing is done; or not all of that time were ready, and
        the next call goes on with those.
        """
        coming = self._first_ns(self._heap)
        if coming is None or (until_ns is not None and coming > until_ns):
            return False
        self.now_ns = coming
        self.waiting = False
        self._running = True
        heap, live, ready = self._heap, self._live, self._ready
        try:
            while heap and heap[0][0] == coming:
                ticket = heap[0][1]
                if ready and ticket in ready:
                    self.waiting = not ready[ticket]()
                    if self.waiting:
                        return False
                    del ready[ticket]
                _, ticket, action = heapq.heappop(heap)
                if ticket in live:
                    live.remove(ticket)
                    action()
        finally:
            self._running = False
        if self._felt:
            self._first_ns(self._felt)  # removes past entries, also when no caller reads ``next_felt_ns``
        return True


class EngineDeadlines:
    """``Deadlines`` on the engine's clock."""

    def __init__(self, calendar: Calendar, dispatcher: Dispatcher) -> None:
        self._calendar = calendar
        self._dispatcher = dispatcher
        self._tickets: dict[int, int] = {}

    def __len__(self) -> int:
        """Deadlines that are set."""
        return len(self._tickets)

    def set(self, deadline: int, after_ns: int) -> None:
        """Send ``DeadlinePassed(deadline)`` after this much virtual time; setting it again moves it."""
        self.clear(deadline)
        self._tickets[deadline] = self._calendar.at(
            self._dispatcher.at_ns + after_ns, lambda: self._passed(deadline)
        )

    def clear(self, deadline: int) -> None:
        """Forget a deadline; an unknown deadline is ignored."""
        ticket = self._tickets.pop(deadline, None)
        if ticket is not None:
            self._calendar.cancel(ticket)

    def _passed(self, deadline: int) -> None:
        del self._tickets[deadline]
        self._dispatcher.submit(DeadlinePassed, deadline)
