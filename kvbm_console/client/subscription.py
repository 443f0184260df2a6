"""One subscription: the stream of one connection as items, checked for holes.

Law of this file: received + lost = last - start, always, and an event that is neither is an error and not a shrug.
"""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from google.protobuf.message import DecodeError

from kvbm_console.client.questions import END, translating
from kvbm_console.core.columns import SparseBytes
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.snapshots import decode_facts
from kvbm_console.recording.decode import FOLD_ERRORS
from kvbm_console.stream.feed import BatchArrived, EventsArrived, GapSeen, Heartbeat, SnapshotTaken
from kvbm_console.wire.batches import MalformedBatch, UnreadBatch, events_of
from kvbm_console.wire.protocol import method_path
from kvbm_console.wire.v1 import console_pb2 as pb

SNAPSHOT_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Largest snapshot: a tier of 16 million places has 0.35 GB. It takes memory only where it is not zero."""


class Ended(msgspec.Struct, frozen=True):
    """The daemon ended in order; ``last_seq`` was its last event."""

    last_seq: int
    reason: str


StreamItem = SnapshotTaken | EventsArrived | BatchArrived | GapSeen | Heartbeat | Ended
"""The items of a subscription."""


class StreamItems:
    """Turns the messages of an event stream into items.

    ``position`` is the number of the next event (None before the first item), ``start`` where it began, ``received``
    and ``lost`` count. ``digest`` comes from the last heartbeat with a digest, with its position.
    While ``unread`` is set, batches are not decoded: they come as ``BatchArrived``.
    """

    def __init__(self, target: str, position: int | None = None) -> None:
        self.position = self.start = position
        self.received = 0
        self.lost = 0
        self.digest: tuple[int, int] | None = None
        self.unread = False
        self._target = target
        self._begin: pb.SnapshotBegin | None = None
        self._facts = SparseBytes(0)

    def _broken(self, what: str) -> ConnectionLost:
        return ConnectionLost(f"{self._target} sent {what}")

    def take(self, reply: pb.SubscribeReply) -> StreamItem | None:
        """The item that a message completes. Raises ``ConnectionLost`` for a message that does not follow the last, or
        cannot be read."""
        kind = reply.WhichOneof("item")
        if kind == "batch":
            return self._batch(reply.batch)
        if kind == "heartbeat":
            return self._beat(reply.heartbeat)
        if kind == "snapshot_begin":
            self._begin, size = reply.snapshot_begin, reply.snapshot_begin.total_bytes
            if size > SNAPSHOT_BYTES_MAX:
                raise self._broken(f"a snapshot of {size} bytes, above {SNAPSHOT_BYTES_MAX}")
            self._facts = SparseBytes(size)
        elif kind == "snapshot_part" and self._begin is not None:
            try:
                self._facts.write(reply.snapshot_part.data)
            except ValueError:
                raise self._broken("a snapshot without end") from None
        elif kind == "snapshot_end":
            return self._snapshot()
        elif kind == "gap":
            return self._gap(reply.gap)
        elif kind == "bye":
            return Ended(reply.bye.last_seq, reply.bye.reason)
        return None  # a kind of a newer minor version

    def _batch(self, batch: pb.EventBatch) -> EventsArrived | BatchArrived:
        try:
            item = BatchArrived(UnreadBatch(batch)) if self.unread else EventsArrived(events_of(batch))
        except MalformedBatch as error:
            raise self._broken(f"events that cannot be read ({error})") from None
        first = batch.first_seq
        if self.position is not None and first != self.position:
            raise self._broken(f"event {first} instead of {self.position}")
        if self.start is None:
            self.start = first
        self.position = first + batch.count
        self.received += batch.count
        return item

    def _gap(self, gap: pb.Gap) -> GapSeen:
        if self.position is not None and gap.first == self.position:
            self.lost += gap.last - gap.first + 1
            self.position = gap.last + 1
        elif self.position is not None:  # another incarnation: its numbers begin anew
            self.start = self.position = gap.last + 1
            self.received = self.lost = 0
        return GapSeen(gap.first, gap.last, gap.reason)

    def _snapshot(self) -> SnapshotTaken:
        begin, facts = self._begin, self._facts
        self._begin, self._facts = None, SparseBytes(0)
        if begin is None or not facts.full:
            raise self._broken("an incomplete snapshot")
        if self.position != begin.seq:
            if self.received or self.lost:
                raise self._broken(f"a snapshot at {begin.seq} instead of {self.position}")
            self.start = self.position = begin.seq  # the beginning of this stream, or another incarnation
        try:
            return SnapshotTaken(decode_facts(facts.view))
        except FOLD_ERRORS as error:
            raise self._broken(f"a snapshot that cannot be read ({error})") from None

    def _beat(self, beat: pb.Heartbeat) -> Heartbeat:
        if beat.HasField("digest"):
            self.digest = (beat.head_seq + 1, beat.digest)
        recorder = beat.recorder if beat.HasField("recorder") else None
        return Heartbeat(
            head_seq=beat.head_seq, at_ns=beat.at_ns, recorder=recorder.state if recorder else None,
            written_seq=recorder.written_seq if recorder else None,
            synced_seq=recorder.synced_seq if recorder else None,
            synced_age_ns=recorder.synced_age_ns if recorder else None,
            not_recorded=recorder.not_recorded if recorder else 0, subscribers=beat.subscribers,
            warnings=tuple(beat.warnings),
        )


class Subscription(StreamItems):
    """The stream as an asynchronous iterator; a context manager that ends it."""

    def __init__(self, channel: Any, target: str, request: pb.SubscribeRequest) -> None:
        super().__init__(target, request.after_seq + 1 if request.HasField("after_seq") else None)
        self._request = request
        self._channel = channel
        self._call: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the stream."""
        if self._call is not None:
            self._call.cancel()

    def __aiter__(self) -> AsyncIterator[StreamItem]:
        return self

    async def __anext__(self) -> StreamItem:
        """The next item. Raises ``StopAsyncIteration`` after ``Ended``, else ``ConnectionLost`` at the end."""
        if self._call is None:
            method = self._channel.unary_stream(method_path("Subscribe"), None, None)
            self._call = method(self._request.SerializeToString())
        while True:
            with translating(self._target):
                data = await self._call.read()
            if data is END:
                raise StopAsyncIteration
            try:
                reply = pb.SubscribeReply.FromString(data)
            except DecodeError:
                raise self._broken("a message that is not ours") from None
            item = self.take(reply)
            if item is not None:
                return item

    def _broken(self, what: str) -> ConnectionLost:
        self.cancel()
        return super()._broken(what)
