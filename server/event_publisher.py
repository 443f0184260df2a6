"""``serve --fleet-events``: the event stream at a broker, for those who come when the daemon is gone.

The messages are those of ``Subscribe``, each with its length, some of them together in one message of the broker. A
reader of the ring sends them one after the other and waits for each to be stored: a second message in flight could
overtake the first after a reconnect. The ring is the only queue. If the broker is away until the ring forgets, the
events come from the recorder's files. Where these do not have them, a ``Gap`` and a snapshot follow. A snapshot stands
in the stream every ``KEYFRAME_EVENTS``, and the summary tells where.

    snapshot at 0 | events 0..199 | events 200..431 | ... | snapshot at 100,004 | events 100,004.. | bye

Law of this file: the messages of a run in their order are the run's events, with a stated gap for those that are
missing. The service never waits for the broker.
"""

import asyncio
import random
from collections import deque
from typing import Any, Final

from kvbm_console.client.broker import EVENTS, Broker, BrokerAddress, keep_events
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.service import LeaderService, Snapshot
from kvbm_console.stream.broadcast import Subscriber
from kvbm_console.stream.ring import Lost
from kvbm_console.wire import frames
from kvbm_console.wire.frames import varint

from .past_events import PastEvents
from .publisher import RETRY_S

MESSAGE_BYTES: Final = 256 * 1024
GATHER_S: Final = 0.1
"""Events of this time travel together."""
KEYFRAME_EVENTS: Final = 100_000
"""A reader that comes later folds at most about so many events first."""
FINISH_S: Final = 1.0
PART: Final = "events at the broker"
FELL_BEHIND: Final = "the broker was away"


class EventPublisher:
    """Publishes the events of a service, from ``begin`` until ``finish``."""

    def __init__(self, broker: BrokerAddress, service: LeaderService, name: str) -> None:
        self.keyframe: int | None = None
        """Number of the message with which the last whole snapshot begins."""
        self.resent = 0
        """Messages that were sent again and that the broker had already."""
        self._broker = broker
        self._service = service
        self._name = name
        self._subject = broker.subject(name, "ev")
        self._queue: deque[tuple[str, bytes]] = deque()
        """Messages that are made and not yet stored, each with its id: a few, or a snapshot."""
        self._next: Snapshot | None = None
        """The snapshot that comes when the cursor is there."""
        self._since = 0
        """Position of the last snapshot."""
        self._stream: object = None
        """The stream that the last messages went to."""
        self._began_at = 0
        self._trouble = ""
        self._missed: Lost | None = None
        """Events that the ring has forgotten, and that come before all others."""
        self._past = PastEvents(service)
        self._bye = False
        self._subscriber: Subscriber | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to publish."""
        self._task = asyncio.ensure_future(self._service.keep(PART, self.run))

    async def finish(self) -> None:
        """The service is closed: send the rest and the ``Bye``, within a bound of time."""
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=FINISH_S)
            if not done:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def run(self) -> None:
        """Publish until the service is closed, on a new connection whenever the last one has failed."""
        service = self._service
        service.parts.known([PART])
        self._queue.clear()
        self._missed, self._next = None, service.snapshot()
        self._subscriber = service.broadcaster.subscribe(self._next.seq, name="broker")
        try:
            while not (self._bye and not self._queue):
                try:
                    async with Broker(self._broker, self._name) as broker:
                        stream = await keep_events(broker)
                        if self._stream is not None and stream != self._stream:  # it was lost: begin the new one
                            self.keyframe, self._next = None, self._snapshot_of_now()
                        self._stream = stream
                        await self._publish(broker)
                except (ConnectionLost, Refused) as error:
                    self._failed(str(error))
                    await asyncio.sleep(random.uniform(*RETRY_S))
        finally:
            service.broadcaster.unsubscribe(self._subscriber)

    async def _publish(self, broker: Broker) -> None:
        assert self._subscriber is not None
        while True:
            while self._queue:
                await self._store(broker, *self._queue[0])
                self._queue.popleft()
                self._works()
            if self._bye:
                return
            if self._missed is not None:
                await self._make_up(self._subscriber, self._missed)
                continue
            self._fill(self._subscriber)
            if not self._queue and self._missed is None:
                self._subscriber.beats = 0
                await self._wait(broker, self._subscriber)

    async def _wait(self, broker: Broker, subscriber: Subscriber) -> None:
        """Until there are events, and then a little longer: they travel together."""
        waits = [asyncio.ensure_future(subscriber.wait()), asyncio.ensure_future(broker.lost.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if broker.lost.is_set():
            raise ConnectionLost(f"the connection to the broker at {self._broker.shown} was lost")
        if not self._service.broadcaster.closing:
            await asyncio.sleep(GATHER_S)

    def _fill(self, subscriber: Subscriber) -> None:
        """Make the next messages: events, a gap with a snapshot, a snapshot that is due, or the end."""
        service, cursor = self._service, subscriber.cursor
        first, size = cursor.position, 0
        parts: list[bytes] = []
        while size < MESSAGE_BYTES and not (self._next is not None and cursor.position == self._next.seq):
            item = subscriber.read()
            if item is None:
                break
            if isinstance(item, Lost):
                self._put(f"{first}", parts)
                self._missed = item
                return
            parts.append(item)
            size += len(item)
        self._put(f"{first}", parts)
        if self._next is not None and cursor.position == self._next.seq:
            self._put_snapshot(self._next)
            self._next, self._since = None, cursor.position
        elif self._next is None and cursor.position - self._since >= KEYFRAME_EVENTS:
            self._next = self._snapshot_of_now()
        if not self._queue and service.broadcaster.closing and not service.ring.pending(cursor):
            self._bye = True
            self._put("bye", [frames.bye_frame(service.ring.next_seq - 1, "the daemon ended")])

    async def _make_up(self, subscriber: Subscriber, missed: Lost) -> None:
        """The next of the missed events, from the recorder's files; a gap with a snapshot if these do not have them."""
        cursor = subscriber.cursor
        parts, behind = await self._past.frames(missed.first, missed.last + 1, MESSAGE_BYTES)
        if parts:
            self._put(f"{missed.first}", parts)
            self._service.ring.made_up(cursor, behind - missed.first)
            self._missed = Lost(behind, missed.last) if behind <= missed.last else None
            if self._next is not None and self._next.seq < cursor.position:
                self._next = self._snapshot_of_now()
            return
        self._missed, self._next = None, self._service.go_on_from(cursor)
        self._put(f"{missed.first}:gap", [frames.gap_frame(missed.first, self._next.seq - 1, FELL_BEHIND)])

    def _snapshot_of_now(self) -> Snapshot:
        service = self._service
        service.broadcaster.flush()
        seq, facts = service.facts()
        return Snapshot(seq, 0, service.at_ns, facts)

    def _put_snapshot(self, snapshot: Snapshot) -> None:
        parts = frames.snapshot_frames(
            snapshot.seq, snapshot.at_ns, self._service.incarnation, snapshot.facts, snapshot.digest
        )
        for number, part in enumerate(parts):
            self._put(f"{snapshot.seq}:snapshot:{number}", [part])

    def _put(self, name: str, parts: list[bytes]) -> None:
        if parts:
            message = b"".join(piece for part in parts for piece in (varint(len(part)), part))
            self._queue.append((f"{self._service.incarnation}:{name}", message))

    async def _store(self, broker: Broker, name: str, data: bytes) -> None:
        with broker.asking("publish events"):
            answer: Any = await broker.jetstream.publish(
                self._subject, data, headers={"Nats-Msg-Id": name}, stream=EVENTS
            )
        if answer.duplicate:
            self.resent += 1
        if ":snapshot:" in name:
            if name.endswith(":snapshot:0"):
                self._began_at = answer.seq
            if len(self._queue) == 1:
                self.keyframe = self._began_at

    def _failed(self, why: str) -> None:
        if why != self._trouble and not self._service.broadcaster.closing:
            self._service.parts.troubled(PART, why)
        self._trouble = why

    def _works(self) -> None:
        """The broker takes messages. What is told of it when the service is closed would be an event behind the end."""
        if self._trouble and not self._service.broadcaster.closing:
            self._service.parts.begun(PART)
        self._trouble = ""
