"""All the publishers that one daemon follows, as sources of its leader.

Law of this file: an address that cannot be used is refused by ``open``, before anything is followed; while they run,
one publisher's silence or nonsense does not touch another.
"""

import math
from collections.abc import Callable, Sequence

import anyio
import msgspec
import zmq.asyncio

from kvbm_console.core.config import SECOND_NS
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.capture import Frame
from kvbm_console.engines.kv_events.decoder import BadPayload, decode_batch
from kvbm_console.engines.kv_events.stream import EventStream, StreamCounts
from kvbm_console.engines.kv_events.zmq_source import SourceStatus, ZmqSource


class StreamRow(msgspec.Struct, frozen=True):
    """One publisher as screens and metrics show it."""

    source: int
    label: str
    counts: StreamCounts
    status: SourceStatus


class Streams:
    """Follows ``publishers``; each gets a source of its own from ``new_source``."""

    def __init__(self, publishers: Sequence[Publisher], dispatcher: Dispatcher, new_source: Callable[[], int]) -> None:
        self._dispatcher, self._new_source = dispatcher, new_source
        self._context: zmq.asyncio.Context | None = None
        self.sources = [self._source(publisher) for publisher in publishers]

    def _source(self, publisher: Publisher) -> ZmqSource:
        def taker(topic: str) -> EventStream:
            label = f"{publisher.label} {topic}" if publisher.bind else publisher.label
            return EventStream(self._dispatcher, self._new_source(), dp_rank=publisher.dp_rank, label=label)

        return ZmqSource(publisher, taker)

    def rows(self) -> list[StreamRow]:
        """Every publisher that was heard of."""
        return [
            StreamRow(taker.source, taker.label, taker.counts, source.status)
            for source in self.sources for taker in source.takers if isinstance(taker, EventStream)
        ]

    def open(self) -> None:
        """Connect or bind all. Raises ``UsageError``."""
        self._context = zmq.asyncio.Context()
        try:
            for source in self.sources:
                source.open(self._context)
        except BaseException:
            self.close()
            raise

    async def run(self) -> None:
        """Follow all until cancelled, then give the sockets back."""
        try:
            async with anyio.create_task_group() as group:
                for source in self.sources:
                    group.start_soon(source.run)
        finally:
            self.close()

    def close(self) -> None:
        """Give the sockets back; may be called again."""
        for source in self.sources:
            source.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


class CaptureStreams:
    """The publishers in a capture: told apart by topic and data-parallel rank, as each counts for itself.

    ``take`` moves ``now_ns`` to the time of the frame (since the first one) and hands the frame to its stream; give
    ``lambda: streams.now_ns`` to the dispatcher as its clock.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.first_received: float | None = None
        """Seconds since 1970 of the first frame."""
        self.streams: dict[tuple[bytes, int], EventStream] = {}
        self._last_rank: dict[bytes, int] = {}

    def take(self, frame: Frame, dispatcher: Dispatcher, new_source: Callable[[], int]) -> None:
        """One frame of the capture, in its order."""
        self._move_clock(frame.received)
        rank = self._rank(frame)
        stream = self.streams.get((frame.topic, rank))
        if stream is None:
            label = frame.topic.decode(errors="replace")
            stream = EventStream(dispatcher, new_source(), dp_rank=rank, label=label)
            self.streams[frame.topic, rank] = stream
        stream.accept(frame.seq, frame.payload)

    def _rank(self, frame: Frame) -> int:
        """Of the payload; one that cannot be read belongs to the publisher that spoke last under this topic."""
        try:
            rank = decode_batch(frame.payload).dp_rank
        except BadPayload:
            return self._last_rank.get(frame.topic, 0)
        self._last_rank[frame.topic] = rank or 0
        return rank or 0

    def _move_clock(self, received: float) -> None:
        if not math.isfinite(received) or not 0 <= received < 1e10:
            return
        if self.first_received is None:
            self.first_received = received
        self.now_ns = max(self.now_ns, round((received - self.first_received) * SECOND_NS))
