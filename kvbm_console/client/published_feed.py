"""The console's feed of a daemon that publishes its events at a broker, for those who have no route to it.

A reader begins at the daemon's last snapshot in the stream and folds what came since, so it joins in the middle. Then
it follows. The daemon's summary tells whether it lives. Nobody can act on a daemon through the broker.

Law of this file: events behind the first snapshot come once and in order, also over a lost connection, or a gap or a
newer snapshot tells.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from kvbm_console.client.broker import Broker, BrokerAddress
from kvbm_console.client.brokered import BrokeredFleet
from kvbm_console.client.event_stream import PublishedEvents
from kvbm_console.client.subscription import Ended
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.recording.decode import FOLD_ERRORS
from kvbm_console.stream.feed import (
    Connected,
    Disconnected,
    EventsArrived,
    FeedItem,
    GapSeen,
    Heartbeat,
    PastSeen,
    SnapshotTaken,
)

RETRY_S: Final = 1.0
BEAT_S: Final = 0.5
"""As often as a daemon tells that it lives."""
LOOK_S: Final = 10.0
"""The summary of a daemon that always has events is looked at so often."""


class PublishedFeed:
    """A ``stream.feed.Feed`` of the daemon that ``address`` names. The first snapshot comes behind at most ``past``
    events before it."""

    def __init__(self, address: BrokerAddress, past: int = 0) -> None:
        self.target = f"{address.daemon} at {address.shown}"
        self._address = address
        self._past = past

    async def items(self) -> AsyncIterator[FeedItem]:
        """Items until the iterator is closed; connects again whenever the connection is lost."""
        while True:
            try:
                async with BrokeredFleet(self._address) as summaries, Broker(self._address, "console") as broker:
                    async for item in self._joined(summaries, broker):
                        yield item
            except KvbmConsoleError as error:
                yield Disconnected(str(error), RETRY_S)
            await asyncio.sleep(RETRY_S)

    async def _joined(self, summaries: BrokeredFleet, broker: Broker) -> AsyncIterator[FeedItem]:
        """Connect to the stream in its middle and follow it."""
        await summaries.refresh()
        keyframe = next((row.keyframe for row in summaries.rows), None)
        events = PublishedEvents(broker, self._address.daemon, keyframe)
        state: CacheState | None = None
        past: deque[Event] = deque(maxlen=self._past)
        async for item in events.items():
            if isinstance(item, SnapshotTaken):
                state = item.state
                past.clear()
            elif isinstance(item, GapSeen):
                state = None
            elif isinstance(item, EventsArrived) and state is not None:
                try:
                    for event in item.events:
                        state.apply(event)
                except FOLD_ERRORS as error:
                    raise ConnectionLost(f"{self.target} has events that do not fit its facts ({error})") from None
                past.extend(item.events)
        if state is None:
            raise ConnectionLost(f"{self._address.shown} has no events of a daemon {self._address.daemon}")
        yield self._connected(events)
        if past:
            yield PastSeen(list(past), state)
        at_ns = state.at_ns
        yield SnapshotTaken(state)
        async for following in self._following(summaries, events, at_ns):
            yield following

    async def _following(
        self, summaries: BrokeredFleet, events: PublishedEvents, at_ns: int
    ) -> AsyncIterator[FeedItem]:
        """The items from now on, with heartbeats while the daemon lives."""
        run, gone, beat_s, looked_s = events.incarnation, False, 0.0, time.monotonic()
        if events.ended is not None:
            gone = True
            yield Disconnected(events.ended.reason, None)
        async for item in events.items(follow=True):
            if isinstance(item, Ended):
                gone = True
                yield Disconnected(item.reason, None)
                continue
            if item is None and not gone:
                await summaries.refresh()
                silent = next((row.error for row in summaries.rows), "it has left the fleet")
                if silent:
                    gone = True
                    yield Disconnected(silent, None)
            elif item is not None:
                if gone or events.incarnation != run:  # it lives again, as another run or behind a silence
                    run, gone = events.incarnation, False
                    yield self._connected(events)
                if isinstance(item, SnapshotTaken):
                    at_ns = item.state.at_ns
                elif isinstance(item, EventsArrived):
                    at_ns = item.events[-1].at_ns
                yield item
            if not gone and time.monotonic() - beat_s >= BEAT_S:
                beat_s = time.monotonic()
                if beat_s - looked_s >= LOOK_S:
                    looked_s = beat_s
                    await summaries.refresh()
                yield _beat(summaries, (events.position or 0) - 1, at_ns)

    def _connected(self, events: PublishedEvents) -> Connected:
        return Connected(
            target=self.target, incarnation=events.incarnation, run=0, control=False, block_bytes=None,
            clock_anchor_ns=events.clock_anchor_ns,
        )


def _beat(summaries: BrokeredFleet, head_seq: int, at_ns: int) -> Heartbeat:
    """A heartbeat with what the daemon's last summary tells of its recorder and its parts."""
    summary = next((row.summary for row in summaries.rows), None)
    recorder, warnings = (None, ()) if summary is None else (
        summary.recorder, tuple(problem.what for problem in summary.problems if problem.lint == "part"),
    )
    return Heartbeat(head_seq, at_ns, recorder, None, None, None, 0, 0, warnings)
