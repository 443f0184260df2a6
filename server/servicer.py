"""The RPC methods: questions and the event stream.

Each stream has one writer coroutine. A subscriber's loop reads the ring, writes and waits. Nothing here decides
anything, and the service never waits for one of these coroutines.

Law of this file: a subscriber gets every event exactly once, or a ``Gap`` that names those it did not get.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from kvbm_console.core.events import PROTOCOL_MINOR
from kvbm_console.service import LeaderService, Snapshot
from kvbm_console.stream.broadcast import WRITE_NS, Subscriber
from kvbm_console.stream.document import slot_row
from kvbm_console.stream.ring import Lost
from kvbm_console.wire import frames
from kvbm_console.wire.batches import MSGPACK, PROTOBUF
from kvbm_console.wire.protocol import (
    FOUND_HASHES_MAX,
    HISTORY_EVENTS_MAX,
    NAME_BYTES_MAX,
    PROTOCOL_MAJOR,
    SERVICE,
    SUBSCRIBERS_MAX,
    limits,
    version,
)
from kvbm_console.wire.v1 import console_pb2 as pb

from .access import AccessRules, Context
from .control import ControlMethod
from .feeding import FeedMethod
from .fleet import find, summary_of
from .guard import Malformed, guarded, parse, refuse, require_text
from .lints import LintWatch
from .questions import CALL_NS, Questions, Turn
from .recording import RecordingMethod, recorder_message

FELL_BEHIND: Final = "fell_behind"
NOT_KEPT: Final = "not_kept"
RESTARTED: Final = "restarted"
ENDING: Final = "the daemon is ending"

Serve = Callable[[Any, Context], Awaitable[None]]


class Identity(msgspec.Struct, frozen=True):
    """The part of ``Hello`` that is no fact of the service."""

    program: str
    target: str
    """A name for people: the workload, or the engine."""
    run: int = 0
    block_bytes: int | None = None


class ConsoleServicer:
    """The methods of ``Console`` on a service."""

    def __init__(
        self, service: LeaderService, identity: Identity, access: AccessRules | None = None,
        questions: Questions | None = None, watch: LintWatch | None = None,
    ) -> None:
        self._service = service
        self._watch = watch or LintWatch(service)
        self._questions = questions or Questions(lambda: service.exported_ns)
        self._access = access or AccessRules()
        self._identity = identity
        self._control = ControlMethod(service)
        self._feed = FeedMethod(service)
        self._recording = RecordingMethod(service, identity.program, identity.target)
        self._sessions: set[asyncio.Task[Any]] = set()
        """Handlers of feeds and control sessions that run now."""
        self._ending = False
        self.refused_subscribers = 0
        """Subscriptions that were refused because of ``SUBSCRIBERS_MAX``."""

    def handler(self) -> Any:
        """All methods, as bytes in and bytes out behind the guard."""
        unary: Callable[..., Any] = grpc.unary_unary_rpc_method_handler
        streams: Callable[..., Any] = grpc.stream_stream_rpc_method_handler
        behind: Callable[..., Any] = partial(guarded, access=self._access, questions=self._questions)
        return grpc.method_handlers_generic_handler(SERVICE, {
            "Hello": unary(behind("Hello", self.hello)),
            "SlotDetail": unary(behind("SlotDetail", self.slot_detail)),
            "Query": unary(behind("Query", self.query)),
            "Recording": unary(behind("Recording", self._recording.serve)),
            "Subscribe": grpc.unary_stream_rpc_method_handler(behind("Subscribe", self.subscribe)),
            "Control": streams(behind("Control", self._session(self._control.serve))),
            "Feed": streams(behind("Feed", self._session(self._feed.serve))),
        })

    def _session(self, serve: Serve) -> Serve:
        """Register a handler that can publish, so that the end of the daemon waits for the handler."""

        async def known(requests: Any, context: Context) -> None:
            task = asyncio.current_task()
            if self._ending or task is None:
                await refuse(context, grpc.StatusCode.UNAVAILABLE, ENDING)
            self._sessions.add(task)
            try:
                await serve(requests, context)
            finally:
                self._sessions.discard(task)

        return known

    async def end_sessions(self, grace_s: float) -> None:
        """End feeds and control sessions and wait until they have published their last."""
        self._ending = True
        for feed in self._service.feeds:
            feed.close()
        self._feed.close()
        if self._sessions:
            await asyncio.wait(self._sessions, timeout=grace_s / 2)
        for task in self._sessions:
            task.cancel()
        if self._sessions:
            await asyncio.wait(self._sessions, timeout=grace_s / 2)

    # --- questions ---------------------------------------------------------------------------------------------------

    async def hello(self, data: bytes, context: Context) -> bytes:
        """Versions and identity; refuses another major version by naming both."""
        request = parse("Hello", pb.HelloRequest, data)
        require_text("client", request.client, NAME_BYTES_MAX)
        if request.protocol.major != PROTOCOL_MAJOR:
            await refuse(
                context, grpc.StatusCode.FAILED_PRECONDITION,
                f"the daemon speaks protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, the client "
                f"{request.protocol.major}.{request.protocol.minor}",
            )
        service, identity = self._service, self._identity
        reply = pb.HelloReply(
            protocol=version(), program=identity.program, incarnation=service.incarnation, run=identity.run,
            role=self._access.role_of(context), limits=limits(service.leases.ttl_ns),  # type: ignore[arg-type]
            clock_at_ns=service.started_at_ns, clock_wall_ns=service.started_wall_ns,
            config_json=msgspec.json.encode(service.config).decode(), config_digest=service.config.digest(),
            target=identity.target,
        )
        if identity.block_bytes is not None:
            reply.block_bytes = identity.block_bytes
        return bytes(reply.SerializeToString())

    async def slot_detail(self, data: bytes, context: Context) -> bytes:
        """One slot and its last events; NOT_FOUND for a slot that is not live."""
        request = parse("SlotDetail", pb.SlotDetailRequest, data)
        require_text("request", request.request, NAME_BYTES_MAX)
        state = self._service.state
        by_number = request.WhichOneof("which") == "slot"
        slot = state.slots.get(request.slot) if by_number else state.slot_named(request.request)
        if slot is None:
            name = f"slot {request.slot}" if by_number else f"request {request.request!r}"
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"{name} is not live")
        reply = pb.SlotDetailReply(
            slot_json=msgspec.json.encode(slot_row(state, slot, self._service.at_ns)).decode(),
            story=self._service.leader.story(slot.slot),
        )
        return bytes(reply.SerializeToString())

    async def query(self, data: bytes, context: Context) -> bytes:
        """The status document, the digest, past events, the summary, or what there is of blocks and a request."""
        request = parse("Query", pb.QueryRequest, data)
        question = request.WhichOneof("what")
        reply = pb.QueryReply()
        if question == "status":
            reply.status_json = msgspec.json.encode(self._service.status(request.status.slot_filter)).decode()
        elif question == "digest":
            reply.digest.seq, reply.digest.digest = self._service.digest()
        elif question == "history":
            self._history(request.history, reply.history)
        elif question == "summary":
            self._watch.want()
            summary = summary_of(self._service, self._watch, self._identity.program, self._identity.target)
            reply.summary_json = msgspec.json.encode(summary).decode()
        elif question == "find":
            require_text("request", request.find.request, NAME_BYTES_MAX)
            hashes = request.find.hashes
            if len(hashes) > FOUND_HASHES_MAX:
                raise Malformed(f"find has at most {FOUND_HASHES_MAX} hashes, got {len(hashes)}")
            reply.found_json = msgspec.json.encode(find(self._service, hashes, request.find.request)).decode()
        else:
            raise Malformed("what must be status, digest, history, summary or find")
        return bytes(reply.SerializeToString())

    def _history(self, request: pb.HistoryQuery, reply: pb.HistoryReply) -> None:
        self._service.broadcaster.flush()
        ring = self._service.ring
        if request.first_seq < 0:
            raise Malformed(f"first_seq must be at least 0, got {request.first_seq}")
        most = min(request.limit or HISTORY_EVENTS_MAX, HISTORY_EVENTS_MAX)
        reply.oldest_seq = ring.first_seq
        reply.SetInParent()
        cursor = ring.cursor(min(max(request.first_seq, ring.first_seq), ring.next_seq))
        while cursor.received < most:
            item = ring.read(cursor)
            if not isinstance(item, bytes):
                break
            reply.batches.append(pb.EventBatch.FromString(frames.batch_of(item)))

    # --- the event stream ------------------------------------------------------------------------------------------

    async def subscribe(self, data: bytes, context: Context, turn: Turn) -> None:
        """The stream of a subscriber, until the subscriber leaves or the daemon ends."""
        request = parse("Subscribe", pb.SubscribeRequest, data)
        require_text("client", request.client, NAME_BYTES_MAX)
        require_text("incarnation", request.incarnation, NAME_BYTES_MAX)
        if request.encoding not in (MSGPACK, PROTOBUF):
            raise Malformed(f"encoding {request.encoding} is unknown")
        broadcaster = self._service.broadcaster
        if broadcaster.closing:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, ENDING)
        if len(broadcaster.subscribers) >= SUBSCRIBERS_MAX:
            self.refused_subscribers += 1
            await refuse(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {SUBSCRIBERS_MAX} subscribers, the most"
            )
        with turn.working():
            readers = broadcaster.flush()
            position, gap, snapshot = self._begin(request)
        turn.charge(WRITE_NS * readers)
        subscriber = broadcaster.subscribe(position, request.encoding, request.client)
        try:
            if gap is not None:
                await context.write(gap)
            if snapshot is not None:
                await self._write_snapshot(snapshot, turn, context)
            await self._follow(subscriber, turn, request.digests, context)
        finally:
            broadcaster.unsubscribe(subscriber)

    def _begin(self, request: pb.SubscribeRequest) -> tuple[int, bytes | None, Snapshot | None]:
        """(first position to read, gap to say, snapshot to send) of a new subscription."""
        ring = self._service.ring
        if request.HasField("after_seq"):
            wanted = request.after_seq + 1
            if request.incarnation in ("", self._service.incarnation):
                if not 0 <= wanted <= ring.next_seq:
                    raise Malformed(f"after_seq must be from -1 to {ring.next_seq - 1}, got {request.after_seq}")
                if wanted >= ring.first_seq:
                    return wanted, None, None
                snapshot = self._service.snapshot()
                return snapshot.seq, frames.gap_frame(wanted, snapshot.seq - 1, NOT_KEPT), snapshot
            snapshot = self._service.snapshot()
            gap = frames.gap_frame(0, snapshot.seq - 1, RESTARTED) if snapshot.seq else None
            return snapshot.seq, gap, snapshot
        snapshot = self._service.oldest_snapshot() if request.history else self._service.snapshot()
        return snapshot.seq, None, snapshot

    async def _follow(self, subscriber: Subscriber, turn: Turn, digests: bool, context: Context) -> None:
        """Send the stream. The work of digests in heartbeats is charged, and a reader that fell behind waits for a turn
        to get a snapshot, as a new subscriber does."""
        service = self._service
        while True:
            item = subscriber.read()
            if isinstance(item, Lost):
                with (await turn.again()).working():
                    snapshot = service.go_on_from(subscriber.cursor)
                await context.write(frames.gap_frame(item.first, snapshot.seq - 1, FELL_BEHIND))
                await self._write_snapshot(snapshot, turn, context)
            elif item is not None:
                await context.write(item)
            if subscriber.beats:
                subscriber.beats = 0
                for frame in self._heartbeat(subscriber, turn if digests else None):
                    await context.write(frame)
            if item is None and not service.ring.pending(subscriber.cursor):
                if service.broadcaster.closing:
                    await context.write(frames.bye_frame(service.ring.next_seq - 1, "the daemon ended"))
                    return
                await subscriber.wait()

    async def _write_snapshot(self, snapshot: Snapshot, turn: Turn, context: Context) -> None:
        """Write a snapshot, and charge its messages."""
        parts: Iterator[bytes] = frames.snapshot_frames(
            snapshot.seq, snapshot.at_ns, self._service.incarnation, snapshot.facts, snapshot.digest
        )
        written = 0
        for part in parts:
            await context.write(part)
            written += 1
        turn.charge(CALL_NS * written)

    def _heartbeat(self, subscriber: Subscriber, digests: Turn | None) -> list[bytes]:
        """The heartbeat. A heartbeat with a digest stands directly behind the last event that the digest covers.

        The digest is left out if too much was asked lately.
        """
        service = self._service
        ring, cursor = service.ring, subscriber.cursor
        tail: list[bytes] = []
        digest = None
        if digests is not None and (service.knows_digest or digests.has_savings):
            digests.charge(WRITE_NS * service.broadcaster.flush())
            if ring.first_seq <= cursor.position and ring.next_seq - cursor.position <= ring.chunk_events_max:
                while isinstance(item := subscriber.read(), bytes):
                    tail.append(item)
                with digests.further():
                    digest = service.digest()[1]
        recorder = None if service.recorder is None else recorder_message(service.recorder.status())
        beat = frames.heartbeat_frame(
            ring.next_seq - 1, service.at_ns, len(service.broadcaster.subscribers), recorder, digest,
            service.parts.warnings(),
        )
        return [*tail, beat]


