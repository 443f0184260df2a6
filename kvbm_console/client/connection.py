"""One connection to a daemon.

Law of this file: it knows every method of the contract and speaks none itself, because questions and streams do.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvbm_console.analysis.digest import Digest
from kvbm_console.analysis.fleet import DaemonSummary, Digested, Located
from kvbm_console.client.access import Access, open_channel
from kvbm_console.client.control import ControlSession
from kvbm_console.client.feeder import FeedClient
from kvbm_console.client.questions import ANSWER_S, ask, translating
from kvbm_console.client.subscription import Subscription
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import ConnectionLost, UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.ids import WaitPoint
from kvbm_console.recording.options import RecorderStatus, RecordingOptions
from kvbm_console.wire.batches import MSGPACK, events_of
from kvbm_console.wire.protocol import SERVICE, version
from kvbm_console.wire.v1 import console_pb2 as pb

NOTHING_SHOWN: Final = Access()
M = TypeVar("M", bound=Message)


class Hello(msgspec.Struct, frozen=True):
    """The daemon's identity, and the role that it grants."""

    program: str
    protocol: tuple[int, int]
    incarnation: str
    run: int
    control: bool
    """True if this connection may debug and feed."""
    target: str
    """A name for people."""
    clock_at_ns: int
    clock_wall_ns: int
    """The wall clock's time at the engine's time ``clock_at_ns``."""
    config: dict[str, Any]
    config_digest: int
    block_bytes: int | None
    lease_ttl_ns: int

    @property
    def leader_config(self) -> LeaderConfig | None:
        """The leader's configuration; None when a newer daemon has a field that we do not know."""
        try:
            return msgspec.convert(self.config, LeaderConfig)
        except msgspec.ValidationError:
            return None

    @property
    def clock_anchor_ns(self) -> int:
        """The wall clock, in nanoseconds since 1970, at the engine's time 0."""
        return self.clock_wall_ns - self.clock_at_ns


class Client:
    """A connection to ``target`` (``unix:PATH`` or ``HOST:PORT``), as an asynchronous context manager.

    ``access`` names the authority that a TLS daemon is trusted by, and the token that grants control over TCP.
    Connecting is lazy: the first call raises ``ConnectionLost`` when no daemon listens. Every method may raise
    ``ConnectionLost``, ``Refused`` or ``UsageError``.
    """

    def __init__(self, target: str, *, name: str = "client", access: Access | None = None) -> None:
        self.target = target
        self.name = name
        self._channel: Any = open_channel(target, access or NOTHING_SHOWN)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; sessions and subscriptions on it end."""
        await self._channel.close()

    # --- questions -------------------------------------------------------------------------------------------------

    async def hello(self) -> Hello:
        """Versions and identity. Raises ``Refused`` with both versions when the daemon speaks another major version."""
        reply = await self._ask("Hello", pb.HelloRequest(protocol=version(), client=self.name), pb.HelloReply)
        return Hello(
            program=reply.program, protocol=(reply.protocol.major, reply.protocol.minor),
            incarnation=reply.incarnation, run=reply.run, control=reply.role == pb.ROLE_CONTROL, target=reply.target,
            clock_at_ns=reply.clock_at_ns, clock_wall_ns=reply.clock_wall_ns,
            config=msgspec.json.decode(reply.config_json), config_digest=reply.config_digest,
            block_bytes=reply.block_bytes if reply.HasField("block_bytes") else None,
            lease_ttl_ns=reply.limits.lease_ttl_ns,
        )

    async def healthy(self) -> bool:
        """True if the daemon's health service (``grpc.health.v1``) says SERVING for our service."""
        call = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        with translating(self.target):
            data = await call(health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString(), timeout=ANSWER_S)
        reply = health_pb2.HealthCheckResponse.FromString(data)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def status(self, slot_filter: str = "") -> dict[str, Any]:
        """The documented ``status`` document, with the slots for which the expression holds (empty: all)."""
        reply = await self._query(pb.QueryRequest(status=pb.StatusQuery(slot_filter=slot_filter)))
        document: dict[str, Any] = msgspec.json.decode(reply.status_json)
        return document

    async def summary(self) -> tuple[DaemonSummary, Callable[[], Digest]]:
        """The daemon in a few kilobytes, with what decodes its digest. Raises ``UsageError`` if it is older than
        protocol 1.9."""
        reply = await self._query(pb.QueryRequest(summary=pb.SummaryQuery()))
        encoded = reply.summary_json
        return (
            msgspec.json.decode(encoded, type=DaemonSummary),
            lambda: msgspec.json.decode(encoded, type=Digested).digest,
        )

    async def find(self, hashes: Sequence[int], request: str = "") -> list[Located]:
        """The daemon's answer for each block and, if it is named, for the request, which stands last."""
        reply = await self._query(pb.QueryRequest(find=pb.FindQuery(hashes=hashes, request=request)))
        found = msgspec.json.decode(reply.found_json, type=list[Located])
        if len(found) != len(hashes) + bool(request):
            raise ConnectionLost(f"{self.target} answers something that is not ours")
        return found

    async def digest(self) -> tuple[int, int]:
        """(number of the next event, digest of the facts) as of now."""
        reply = await self._query(pb.QueryRequest(digest=pb.DigestQuery()))
        return reply.digest.seq, reply.digest.digest

    async def history(self, first_seq: int, limit: int = 0) -> tuple[list[Event], int]:
        """(past events from ``first_seq`` on, number of the oldest that the daemon has); 0 takes the most it gives."""
        reply = await self._query(pb.QueryRequest(history=pb.HistoryQuery(first_seq=first_seq, limit=limit)))
        events = [event for batch in reply.history.batches for event in events_of(batch)]
        return (events[:limit] if limit else events), reply.history.oldest_seq

    async def past(self, seq: int, most: int) -> list[Event]:
        """Up to ``most`` events right before event ``seq``, in order and without a hole, as far as the daemon has them.

        In as many questions as it takes; none when it has forgotten the last of them.
        """
        events: list[Event] = []
        at = max(0, seq - most)
        while at < seq:
            found, oldest = await self.history(at, limit=seq - at)
            if not found:
                break
            if found[0].seq != at:
                events = []
            events += found
            at = max(found[-1].seq + 1, oldest)
        events = [event for event in events if event.seq < seq]
        return events if events and events[-1].seq == seq - 1 else []

    async def slot_detail(self, which: int | str) -> tuple[dict[str, Any], tuple[str, ...]]:
        """(row of the status document, story) of a live slot, by number or by request; ``Refused`` if there is none."""
        request = pb.SlotDetailRequest(slot=which) if isinstance(which, int) else pb.SlotDetailRequest(request=which)
        reply = await self._ask("SlotDetail", request, pb.SlotDetailReply)
        row: dict[str, Any] = msgspec.json.decode(reply.slot_json)
        return row, tuple(reply.story)

    async def _query(self, request: pb.QueryRequest) -> pb.QueryReply:
        return await self._ask("Query", request, pb.QueryReply)

    async def _ask(self, method: str, request: Message, kind: type[M]) -> M:
        return await ask(self._channel, self.target, method, request, kind)

    # --- the recorder ----------------------------------------------------------------------------------------------

    async def record_start(self, directory: str, options: RecordingOptions | None = None) -> RecorderStatus:
        """Begin to record into a directory, or a new ``*.mcap``, of the daemon's machine.

        ``Refused`` when a recording is being written.
        """
        verb = pb.StartRecording(directory=directory)
        if options is not None:
            verb.segment_bytes, verb.segment_ns, verb.sync = options.segment_bytes, options.segment_ns, options.sync
            if options.keep_bytes is not None:
                verb.keep_bytes = options.keep_bytes
            if options.keep_ns is not None:
                verb.keep_ns = options.keep_ns
        return self._require(await self._recording(pb.RecordingRequest(start=verb)))

    async def record_stop(self) -> RecorderStatus:
        """End the recording; answered when it is written and synced. ``Refused`` when there is none."""
        return self._require(await self._recording(pb.RecordingRequest(stop=pb.StopRecording())))

    async def record_rotate(self) -> RecorderStatus:
        """Begin a new segment. ``Refused`` when nothing is recorded, or events are being lost."""
        return self._require(await self._recording(pb.RecordingRequest(rotate=pb.RotateRecording())))

    async def record_status(self) -> RecorderStatus | None:
        """The recorder as it is, None when nothing is recorded."""
        return await self._recording(pb.RecordingRequest(status=pb.RecorderQuery()))

    async def _recording(self, request: pb.RecordingRequest) -> RecorderStatus | None:
        reply = await self._ask("Recording", request, pb.RecordingReply)
        if not reply.HasField("recorder"):
            return None
        told = reply.recorder
        return RecorderStatus(
            told.state, told.written_seq, told.synced_seq, told.synced_age_ns, told.not_recorded, told.path,
            told.bytes, segment=told.segment, reason=told.reason or None, removed_segments=told.removed_segments,
        )

    def _require(self, status: RecorderStatus | None) -> RecorderStatus:
        if status is None:
            raise ConnectionLost(f"{self.target} answers without a recorder")
        return status

    # --- streams ---------------------------------------------------------------------------------------------------

    def subscribe(
        self, *, after_seq: int | None = None, incarnation: str = "", encoding: int = MSGPACK, digests: bool = False,
        history: bool = False,
    ) -> Subscription:
        """The event stream, as an asynchronous iterator and context manager.

        Without ``after_seq`` it begins with a snapshot of now, with ``history`` the oldest snapshot from which
        the daemon still has every event; with it, behind that event (-1: with the first), or with a gap and a
        snapshot when the daemon does not have it any more or ``incarnation`` is not its own.
        """
        if after_seq is not None and after_seq < -1:
            raise UsageError(f"after_seq must be at least -1, got {after_seq}")
        request = pb.SubscribeRequest(
            encoding=encoding, incarnation=incarnation, digests=digests, client=self.name,  # type: ignore[arg-type]
            history=history,
        )
        if after_seq is not None:
            request.after_seq = after_seq
        return Subscription(self._channel, self.target, request)

    def control(self, name: str | None = None, *, lease: bool = True, owner: str = "") -> ControlSession:
        """A debugger session, as an asynchronous context manager. ``owner`` takes up an earlier session that was lost.

        With ``lease`` its holds last as long as the session lives and shows it; without, its breakpoints belong to the
        daemon and outlive it.
        """
        return ControlSession(self._channel, self.target, name or self.name, lease=lease, owner=owner)

    def feed(
        self, name: str | None = None, *, moves: bool = False, pauses: bool = False,
        points: Sequence[WaitPoint] = (), settled: bool = False, rank: int | None = None,
    ) -> FeedClient:
        """An engine's feed, as an asynchronous context manager.

        ``moves``: this process moves the bytes of copies. ``pauses``: it stands still while ``paused`` is set.
        ``points``: where it can let a request stand still, empty for everywhere. ``settled``: with ``moves``, no copy
        of an earlier feed of this name runs any more. ``rank``: with ``moves``, of this rank alone.
        """
        return FeedClient(self._channel, self.target, name or self.name, moves=moves, pauses=pauses, points=points,
                          settled=settled, rank=rank)
