"""A drain from its beginning to its end, as a client sees it.

Law of this file: the remaining requests are read from the facts right before the reset that ends the drain, so they are
exact. If events were lost, they are None and never a guess.
"""

from collections.abc import Callable

import msgspec

from kvbm_console.client.connection import Client
from kvbm_console.client.control import ControlSession
from kvbm_console.client.subscription import Ended, Subscription
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.events import Event, ResetBegun, ResetDone
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import EventsArrived, GapSeen, Heartbeat, SnapshotTaken
from kvbm_console.stream.verbs import Drain


class Remaining(msgspec.Struct, frozen=True):
    """A request that was live when a drain gave up."""

    request: str
    state: str
    copies: int
    """Operations of the request that had not ended."""


class DrainReport(msgspec.Struct, frozen=True):
    """The outcome of a drain."""

    drained: bool
    """True if nothing was in flight at the end."""
    epoch: int
    """Epoch of the reset at the end."""
    live_requests: int
    """Live requests at the beginning."""
    waited_ns: int | None
    """Duration in the engine's time; None when the event of the beginning was lost."""
    remaining: tuple[Remaining, ...] | None
    """The requests that the reset ended; None when events were lost."""
    remaining_copies: int | None
    """Copies that had not ended; their places are quarantined until they do. None when events were lost."""


class DrainProgress(msgspec.Struct, frozen=True):
    """The progress of a drain."""

    live_requests: int
    copies: int
    left_ns: int | None
    """The engine's time until the drain ends in any case; None when the event of the beginning was lost."""


async def drain(client: Client, name: str, for_ns: int, tell: Callable[[DrainProgress], None]) -> DrainReport:
    """Drain the target and wait for the end. ``tell`` is called with every batch and heartbeat.

    A caller that stops waiting leaves the target draining. Raises ``Refused`` when it drains already or only watches.
    """
    incarnation = (await client.hello()).incarnation
    async with (
        client.subscribe(incarnation=incarnation) as items, client.control(name, lease=False) as session,
    ):
        return await _Waiting(items, for_ns, tell).until_the_end(session)


class _Waiting:
    def __init__(self, items: Subscription, for_ns: int, tell: Callable[[DrainProgress], None]) -> None:
        self._items = items
        self._for_ns = for_ns
        self._tell = tell
        self._state = CacheState()
        self._began_ns: int | None = None
        self._live = 0
        self._seq = 0
        """Number of the event that began the drain."""
        self._left: tuple[tuple[Remaining, ...], int] | None = None
        """The requests and copies in flight when the reset began."""

    async def until_the_end(self, session: ControlSession) -> DrainReport:
        first = await anext(self._items)  # subscribe before the drain begins, otherwise the snapshot may show its end
        if not isinstance(first, SnapshotTaken):
            raise ConnectionLost("the daemon answered a subscription without a snapshot")
        self._state = first.state
        answer = await session.ask(Drain(self._for_ns))
        self._seq, self._live = answer.seq, answer.live_requests
        async for item in self._items:
            match item:
                case SnapshotTaken():
                    self._state = item.state
                    if item.state.seq > self._seq and not item.state.draining:  # the drain ended in a gap
                        return self._report(item.state.epoch)
                    self._progress(item.state.at_ns)
                case EventsArrived():
                    for event in item.events:
                        if self._fold(event):
                            return self._report(self._state.epoch)
                    self._progress(self._state.at_ns)
                case Heartbeat():
                    self._progress(max(self._state.at_ns, item.at_ns))
                case Ended():
                    raise ConnectionLost(f"the daemon ended while it drained: {item.reason}")
                case GapSeen():
                    self._left = None
                case _:
                    pass
        raise ConnectionLost("the daemon ended the stream while it drained")

    def _fold(self, event: Event) -> bool:
        """Apply an event; True when the event ends the drain."""
        if event.seq == self._seq:
            self._began_ns = event.at_ns
        if isinstance(event, ResetBegun) and event.seq > self._seq:
            self._left = _in_flight(self._state)
        self._state.apply(event)
        return isinstance(event, ResetDone) and event.seq > self._seq

    def _progress(self, at_ns: int) -> None:
        if self._state.draining:
            left_ns = None if self._began_ns is None else max(0, self._began_ns + self._for_ns - at_ns)
            self._tell(DrainProgress(len(self._state.slots), len(self._state.operations), left_ns))

    def _report(self, epoch: int) -> DrainReport:
        waited_ns = None if self._began_ns is None else self._state.at_ns - self._began_ns
        if self._left is None:
            return DrainReport(False, epoch, self._live, waited_ns, None, None)
        remaining, copies = self._left
        return DrainReport(not remaining and not copies, epoch, self._live, waited_ns, remaining, copies)


def _in_flight(state: CacheState) -> tuple[tuple[Remaining, ...], int]:
    return tuple(
        Remaining(slot.request, slot.state.label, len(slot.outstanding)) for slot in state.slots.values()
    ), len(state.operations)
