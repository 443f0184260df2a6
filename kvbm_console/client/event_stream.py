"""The events of a daemon that it published at a broker (``serve --fleet-events``).

A reader begins at a snapshot, wherever in the stream it starts, and stays with one run of the daemon. Messages that the
broker has twice are dropped by the numbers of their events.

Law of this file: as of a subscription, every event comes once and in order, or a ``GapSeen`` names it.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

from google.protobuf.message import DecodeError

from kvbm_console.client.broker import EVENTS, Broker
from kvbm_console.client.subscription import Ended, StreamItem, StreamItems
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.extras import need
from kvbm_console.stream.feed import GapSeen, SnapshotTaken
from kvbm_console.wire.v1 import console_pb2 as pb

FETCH: Final = 64
"""Messages that are asked for at once, of at most 256 KiB each."""
LENGTH_BITS: Final = 28
"""Bits of a length in front of a part: far above the part of a message."""
QUIET_S: Final = 1.0
"""The broker has no further message for so long: the present end of the stream."""


class PublishedEvents(StreamItems):
    """The last run that a daemon published, from its oldest snapshot in the stream, or from message ``start`` on.

    ``ended`` is the daemon's farewell, None while it lives or if it was killed.
    """

    def __init__(self, broker: Broker, daemon: str, start: int | None = None) -> None:
        super().__init__(f"{daemon} at {broker.address.shown}")
        self.incarnation = ""
        self.ended: Ended | None = None
        self.clock_anchor_ns = 0
        """The broker's clock, in nanoseconds since 1970, at the engine's time 0, as far as a message tells it."""
        self._exact = False
        """True while the receiver's facts are exact: it needs no snapshot."""
        self._broker = broker
        self._subject = broker.address.subject(daemon, "ev")
        self._first = start

    async def items(self, *, follow: bool = False) -> AsyncIterator[StreamItem | None]:
        """The items up to the present end of the stream; called again, those that came since.

        With ``follow`` it goes on, with None whenever nothing more has come for a while.
        A run that begins anew comes with a ``SnapshotTaken``, without a gap. Raises ``ConnectionLost`` or ``Refused``.
        """
        async for data, published_ns in self._messages(follow):
            if not data:
                yield None
            for reply in _replies(data, self._target):
                if not self._is_wanted(reply, published_ns):
                    continue
                item = self.take(reply)
                if item is None or (isinstance(item, SnapshotTaken) and self._exact):
                    continue
                if isinstance(item, Ended):
                    self.ended = item
                self._exact = not isinstance(item, GapSeen)
                yield item

    def _is_wanted(self, reply: pb.SubscribeReply, published_ns: int) -> bool:
        """False for what stands before the first snapshot, and for what came already."""
        kind = reply.WhichOneof("item")
        if kind == "snapshot_begin" and reply.snapshot_begin.incarnation != self.incarnation:
            self.incarnation, self.ended, self._exact = reply.snapshot_begin.incarnation, None, False
            self.clock_anchor_ns = published_ns - reply.snapshot_begin.at_ns
            self.position = self.start = None  # another run: its numbers begin anew
            self.received = self.lost = 0
        elif not self.incarnation:
            return False
        elif kind == "batch":
            return self.position is None or reply.batch.first_seq >= self.position
        elif kind == "gap":
            return self.position is None or reply.gap.first >= self.position
        return True

    async def _messages(self, follow: bool) -> AsyncIterator[tuple[bytes, int]]:
        """Messages with their times; one without data where nothing more has come for ``QUIET_S``."""
        api: Any = need("nats.js.api", "nats", "nats-py")
        broker, start = self._broker, self._first
        where = {"deliver_policy": api.DeliverPolicy.ALL} if start is None else {
            "deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": start,
        }
        with broker.asking("read events"):
            consumer = await broker.jetstream.pull_subscribe(
                self._subject, stream=EVENTS, config=api.ConsumerConfig(ack_policy=api.AckPolicy.NONE, **where),
            )
            pending = (await consumer.consumer_info()).num_pending
        while pending or follow:
            try:
                with broker.asking("read events"):  # a request for several would wait until they have come
                    messages = await consumer.fetch(min(FETCH, pending) or 1, timeout=QUIET_S)
            except ConnectionLost:
                if pending or broker.lost.is_set():
                    raise
                yield b"", 0
                continue
            for message in messages:
                told = message.metadata
                pending, self._first = told.num_pending, told.sequence.stream + 1
                yield message.data, round(told.timestamp.timestamp() * SECOND_NS)


def _replies(data: bytes, target: str) -> list[pb.SubscribeReply]:
    """The messages of ``Subscribe`` in a message of the broker."""
    found, at = [], 0
    try:
        while at < len(data):
            size = shift = 0
            while True:
                byte = data[at]
                at += 1
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
                if shift > LENGTH_BITS:
                    raise DecodeError
            if not 0 < size <= len(data) - at:
                raise DecodeError
            found.append(pb.SubscribeReply.FromString(data[at : at + size]))
            at += size
    except (IndexError, DecodeError):
        raise ConnectionLost(f"{target} published a message that is not ours") from None
    return found
