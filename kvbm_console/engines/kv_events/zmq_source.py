"""Publishers over ZeroMQ: subscribe, notice missing messages, request their replay, and go on.

The live stream is a SUB socket. Old batches come from the engine's ROUTER through a DEALER, because a REQ would fail on
the second reply. A replay begins with the batch before the missing messages, whose bytes prove that the publisher is
still the same incarnation. While a replay runs, live messages wait in the socket's bounded queue.

Law of this file: every wait has a bound. The taker gets every message of an incarnation once and in order, or hears of
its loss. The silence or nonsense of a publisher does not touch another publisher.
"""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final

import anyio
import msgspec
import xxhash

from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Note
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.exposition import ScrapedRank, Scraper, ScrapeStatus
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.batch import PAYLOAD_BYTES_MAX
from kvbm_console.engines.kv_events.capture import CaptureFrame
from kvbm_console.engines.kv_events.lmcache_source import LmcacheSource
from kvbm_console.engines.kv_events.pull_source import PullSource
from kvbm_console.engines.kv_events.stream import EventStream, SourceStatus, StreamCounts
from kvbm_console.extras import missing
from kvbm_console.stream.publishers import queue_note

try:
    import zmq
    import zmq.asyncio
    from zmq.utils.monitor import parse_monitor_message
except ImportError:  # pragma: no cover - the extra is installed wherever tests run
    raise missing("an event stream", "engines", "pyzmq") from None

RECONNECT_S: Final = 5.0
"""The longest time between two attempts to connect."""
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_EVERY_S: Final = 3
KEEPALIVE_PROBES: Final = 3
"""A connection to a machine that is gone ends after 19 s. We send nothing, and by default Linux asks after two hours
only."""
QUEUE_MESSAGES_MAX: Final = 10_000
"""Messages that wait in the socket: as many as an engine keeps for a replay. Further messages are lost, and their loss
is noticed."""
REPLAY_IDLE_S: Final = 2.0
"""Silence after which a replay has failed; an engine answers from memory, between two of its steps."""
REPLAY_TOTAL_S: Final = 30.0
REPLAY_MESSAGES_MAX: Final = 200_000
"""Messages of a replay; engines keep 10,000 batches."""
REPLAY_BYTES_MAX: Final = 512 * 2**20
TOPICS_MAX: Final = 256
"""Publishers that may connect to an address of ours."""
REPLAY_COOLDOWN_S: Final = 10.0
"""Time without replays after a failed replay, because each request for a replay holds up the live stream."""
PAUSE_FACTOR: Final = 4
PAUSE_MOST_S: Final = 2.0
"""The pause after a replay lasts ``PAUSE_FACTOR`` times the replay, and at most this long. vLLM answers from the thread
that publishes, and an engine waits while the queue of that thread is full. So replays take at most a fifth of that
thread. A request names only its first batch, so a replay cannot be split into smaller pieces."""
SLICE_S: Final = 0.002
"""Time for the messages of one publisher in a turn of the loop, which no other publisher has. Questions need some turns
for an answer, and messages that are taken together cost less."""
GATHER_S: Final = 0.05
"""An engine that works publishes a hundred times a second. Messages that come within this time behind another are taken
together, because waking up for each takes a third of what a message costs."""
END_MARKER: Final = b"\xff" * 8
"""The number -1 of 8 bytes, with which a replay ends; its payload is empty."""
SEQ_BYTES: Final = 8
AWAY_S: Final = 2.0
"""A publisher that is away for longer is reported. Broken connections come back within a tenth of a second."""
PROBE_S: Final = 1.0
PUBLISHER_FILES: Final = 5
"""Open files of a publisher: its socket, two ends of a monitor, a connection, and a replay."""
ZERO_COPY_RECV: Final = 10
"""An option of libzmq's contexts without a name in pyzmq. With it each message that waits keeps the 8 KiB into which it
was read, so a daemon without enough processor took 80 MB for a publisher instead of 10."""
OTHER_FILES: Final = 512
"""Open files beside those of publishers: clients, taps, segments."""


def new_context(publishers: int) -> "zmq.asyncio.Context":
    """A context with sockets for so many publishers; ``destroy(linger=0)`` closes all of them.

    Raises ``UsageError`` if the process may not have so many open files.
    """
    # An engine on many machines has more publishers than Linux allows files by default, and libzmq sockets.
    least = PUBLISHER_FILES * publishers
    soft, hard = (1 << 30 if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if hard < least:
        raise UsageError(
            f"{publishers:,} publishers need {least:,} open files, and this process may have {hard:,}: raise its limit "
            "(ulimit -n), or follow a part of them (--shard)"
        )
    if soft < least + OTHER_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(least + OTHER_FILES, hard), hard))
    context = zmq.asyncio.Context()
    context.max_sockets = least + OTHER_FILES
    context.set(ZERO_COPY_RECV, 0)
    return context


_Message = tuple[bytes, int, bytes, int | None]
"""Topic, number, payload, and the connection by which it came if we bind."""


class _Line:
    """The taker of a publisher's messages, and the messages of the last replay."""

    __slots__ = ("connection", "replayed", "taker")

    def __init__(self, taker: EventStream) -> None:
        self.taker = taker
        self.connection: int | None = None
        """If we bind: the connection of its newest message, None once that is closed."""
        self.replayed: dict[int, int] = {}
        """Digests of the replayed messages, because the live stream may repeat the newest of them."""

    def has(self, seq: int, payload: bytes) -> bool:
        """True if the replay has brought this message, byte for byte."""
        return seq < self.taker.next_seq and self.replayed.get(seq) == _digest(payload)


class Replay(msgspec.Struct):
    """The replies to a request for a replay, unchanged; the last of them is the end marker if ``complete``."""

    replies: list[list[bytes]]
    complete: bool


class _Replayed(msgspec.Struct):
    """The messages of a replay. ``complete`` is true once the end marker came."""

    messages: list[tuple[int, bytes]]
    complete: bool


def subscribe(sub: Any, publisher: Publisher) -> None:
    """Make a SUB socket listen to a publisher. Raises ``UsageError`` for an unusable address."""
    sub.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    sub.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
    sub.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sub.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    sub.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
    sub.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    sub.setsockopt(zmq.IPV6, 1)
    sub.setsockopt(zmq.RECONNECT_IVL_MAX, round(RECONNECT_S * 1e3))
    sub.setsockopt(zmq.SUBSCRIBE, publisher.topic.encode())
    try:
        if publisher.bind:
            sub.bind(publisher.endpoint)
        else:
            sub.connect(publisher.endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if publisher.bind else "connect to"
        raise UsageError(f"cannot {verb} {publisher.endpoint}: {error.strerror}") from None


async def fetch_replay(
    context: "zmq.asyncio.Context", address: str, start: int, *, idle_s: float = REPLAY_IDLE_S
) -> Replay:
    """The replies to a request for the messages from ``start`` on, up to the end marker or the limits."""
    # Each request has its own socket, so that no late reply to an earlier request is mixed in.
    replay = Replay([], False)
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        dealer.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.connect(address)
        await dealer.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big")])
        size = 0
        async with asyncio.timeout(REPLAY_TOTAL_S):
            while len(replay.replies) < REPLAY_MESSAGES_MAX and size < REPLAY_BYTES_MAX:
                async with asyncio.timeout(idle_s):
                    parts = await dealer.recv_multipart()
                replay.replies.append(parts)
                size += len(parts[-1])
                if parts[-2:] == [END_MARKER, b""]:
                    replay.complete = True
                    break
    except (TimeoutError, zmq.ZMQError):
        pass
    finally:
        dealer.close(linger=0)
    return replay


class ZmqSource:
    """Follows an address until cancelled.

    An address that we connect to has one publisher. If we bind, several engines may connect, each with its own topic,
    and none of them can replay. ``taker`` makes the taker of a publisher at its first message, or at the start if we
    connect. ``on_frame`` gets each message unchanged, before the taker.
    """

    def __init__(
        self, publisher: Publisher, taker: Callable[[str], EventStream], *,
        on_frame: Callable[[CaptureFrame], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time,
        replay_idle_s: float = REPLAY_IDLE_S, turn: asyncio.Lock | None = None,
    ) -> None:
        self.publisher = publisher
        self.status = SourceStatus()
        self._context: Any = None
        self._sub: Any = None
        self._monitor: Any = None
        self._make_taker = taker
        self.takers: list[EventStream] = []
        """The takers of all publishers that have sent a message."""
        self._lines: dict[bytes, _Line] = {}
        if not publisher.bind:
            self._lines[b""] = self._new_line(publisher.topic)
        self._on_frame = on_frame
        self._monotonic, self._wall = monotonic, wall
        self._replay_idle_s = replay_idle_s
        self._turn = asyncio.Lock() if turn is None else turn
        """Held for a turn of the loop, by one of the sources that share it."""
        self._no_replay_before = 0.0
        self._pause_until = 0.0
        self._connections: set[int] = set()
        """If we bind: the open connections."""
        self._looking: asyncio.Task[None] | None = None
        self._gone = False
        """True if the takers know that their publisher has ended."""
        self._taking = asyncio.Lock()
        """Held while a live message or a replay is taken."""

    def open(self, context: "zmq.asyncio.Context") -> None:
        """Connect or bind; messages wait in the socket from now on. Raises ``UsageError`` for an unusable address."""
        sub = context.socket(zmq.SUB)
        try:
            self._monitor = sub.get_monitor_socket(
                zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            subscribe(sub, self.publisher)
        except BaseException:
            sub.disable_monitor()
            sub.close(linger=0)
            raise
        self._context, self._sub = context, sub

    async def run(self) -> None:
        """Follow the publishers, after ``open``. A call after a failure opens a new socket."""
        if self._sub.closed:
            self.status.connected = False
            self._connections.clear()
            self.open(self._context)
        taking, watching = asyncio.ensure_future(self._take_all(self._sub)), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((taking, watching), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in (taking, watching):
                task.cancel()
            await asyncio.wait((taking, watching))
            self.close()
        for task in (taking, watching):
            if not task.cancelled():
                task.result()

    def close(self) -> None:
        """Close the socket; may be called again."""
        if self._sub is not None and not self._sub.closed:
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
            self._sub.close(linger=0)

    async def _watch(self) -> None:
        """Keep ``status.connected`` up to date, and check the incarnation of a publisher that comes back."""
        away: asyncio.Task[None] | None = None
        status, bound = self.status, self.publisher.bind
        try:
            while True:
                try:
                    async with asyncio.timeout(None if status.connected or bound else RECONNECT_S):
                        report = parse_monitor_message(await self._monitor.recv_multipart())
                except TimeoutError:
                    self._connect_again()
                    continue
                event = report["event"]
                status.connects += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if bound:
                    self._follow_connection(event, int(report["value"]))
                    status.connected = bool(self._connections)
                    continue
                self._follow_ours(event)
                if away is not None and status.connected:
                    away.cancel()
                    away = None
                if event == zmq.EVENT_DISCONNECTED and away is None:
                    away = asyncio.create_task(self._miss(), name="kv-events-away")
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and status.connects > 1:
                    async with self._taking:
                        await self._is_back()
        finally:
            for task in (away, self._looking):
                if task is not None:
                    task.cancel()

    def _follow_ours(self, event: int) -> None:
        """Follow the connection to the engine that we connect to."""
        # ZeroMQ also tells the end of a connection that had no handshake, so ends are not weighed against beginnings.
        self.status.disconnects += self.status.connected and event == zmq.EVENT_DISCONNECTED
        self.status.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _follow_connection(self, event: int, connection: int) -> None:
        """Follow the connections of engines that connect to us."""
        if event == zmq.EVENT_ACCEPTED:
            self._connections.add(connection)
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.discard(connection)
            for line in self._lines.values():
                if line.connection == connection:
                    line.connection, line.taker.away = None, True
            self._look_for_ended()

    def _look_for_ended(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._find_ended(), name="kv-events-away")

    async def _find_ended(self) -> None:
        """Report engines that connected to us and stay away: as ended, unless they may be back without a message yet.

        A connection is known by its messages alone, so a silent one may be that of any engine."""
        doubted: set[int] = set()
        while True:
            await asyncio.sleep(AWAY_S)
            async with self._taking:
                lines = self._lines.values()
                missing = [
                    line.taker for line in lines
                    if line.connection not in self._connections and not line.taker.has_ended
                ]
                silent = self._connections - {line.connection for line in lines}
                for taker in missing:
                    taker.away = True
                    if not silent:
                        taker.gone()
                    elif taker.source not in doubted:
                        doubted.add(taker.source)
                        taker.doubt()
                if not missing or not silent:
                    return

    async def _is_back(self) -> None:
        if self._gone:
            self._gone = False
            for line in self._lines.values():
                line.taker.restart()
        if self._may_replay():
            await self._catch_up(self._lines[b""])
        else:
            self._doubt()

    async def _miss(self) -> None:
        """Report a publisher that stays away: as ended if its port is closed, else as uncertain."""
        await asyncio.sleep(AWAY_S)
        doubted = False
        while True:
            closed = await self._refuses()
            async with self._taking:
                if closed:
                    self._gone = True
                    for line in self._lines.values():
                        line.taker.gone()
                    return
                if not doubted:
                    doubted = True
                    self._doubt()
            await asyncio.sleep(PROBE_S)

    async def _refuses(self) -> bool:
        """True if the publisher's port is closed. A machine that does not answer proves nothing."""
        host, _, port = self.publisher.endpoint.removeprefix("tcp://").rpartition(":")
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        return False

    def _connect_again(self) -> None:
        # ZeroMQ gives up a connection for good that sent more than ``PAYLOAD_BYTES_MAX``, or data that is not ZeroMQ.
        with contextlib.suppress(zmq.ZMQError):  # there is no connection to end
            self._sub.disconnect(self.publisher.endpoint)
        self._sub.connect(self.publisher.endpoint)

    def _doubt(self) -> None:
        """Mark all publishers as uncertain: one was away, and no replay shows its messages or its incarnation."""
        for line in self._lines.values():
            line.taker.doubt()

    # --- messages ---

    async def _take_all(self, sub: Any) -> None:
        if self._may_replay():
            async with self._taking:
                await self._catch_up(self._lines[b""])  # a quiet engine publishes nothing until its next step
        # The same socket without asyncio's futures, which took a quarter of the time of a batch.
        plain: Any = zmq.Socket.shadow(sub)
        frames: Any = None
        while True:
            if frames is None:
                frames = await sub.recv_multipart(copy=False)
            async with self._turn:
                apart, frames = self._take_waiting(plain, frames)
                await asyncio.sleep(0)  # others have their turn
            if apart is not None:
                async with self._taking:
                    await self._take_behind(*apart)
            elif frames is None:
                await asyncio.sleep(GATHER_S)
            if frames is None:
                frames = self._next(plain)

    def _take_waiting(self, plain: Any, frames: Any) -> tuple[_Message | None, Any]:
        """Take this message and those that wait, for ``SLICE_S`` at most.

        Returns a message that must wait for a replay, and the frames of the next message that was not taken.
        """
        ends = self._monotonic() + SLICE_S
        apart = None
        while frames is not None and apart is None:
            message = self._message(frames)
            if message is not None:
                if self._taking.locked() or self._is_behind(message):
                    apart = message
                else:
                    self._take(*message)
            frames = None if apart is not None else self._next(plain)
            if self._monotonic() >= ends:
                break
        self._flush()
        return apart, frames

    def _next(self, plain: Any) -> Any:
        """The frames of the next message; None if none waits."""
        try:
            frames = [plain.recv(zmq.DONTWAIT, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more:  # half the time of ``recv_multipart``, which asks the socket for an option each time
            frames.append(plain.recv(copy=False))
        return frames

    def _message(self, frames: Any) -> _Message | None:
        """The message in these frames; None if they are none of a publisher."""
        parts = [frame.bytes for frame in frames]
        # If we bind: a frame knows by which connection it came.
        connection = frames[-1].get(zmq.SRCFD) if self.publisher.bind else None
        self.status.messages += 1
        if len(parts) != 3 or len(parts[1]) != SEQ_BYTES:
            self.status.bad_messages += 1
            return None
        return parts[0], int.from_bytes(parts[1], "big"), parts[2], connection

    def _flush(self) -> None:
        """Report what was taken, before others have their turn."""
        for taker in self.takers:
            taker.flush()

    def _line_of(self, topic: bytes) -> _Line | None:
        """The line of a message, None when there are too many."""
        key = topic if self.publisher.bind else b""
        line = self._lines.get(key)
        if line is None and len(self._lines) < TOPICS_MAX:
            line = self._lines[key] = self._new_line(topic.decode(errors="replace"))
        return line

    def _new_line(self, topic: str) -> _Line:
        self.takers.append(self._make_taker(topic))
        return _Line(self.takers[-1])

    def _is_behind(self, message: _Message) -> bool:
        """True if messages in front of this one may be had by a replay."""
        topic, seq, payload, _ = message
        line = self._line_of(topic)
        return line is not None and seq != line.taker.next_seq and self._may_replay() and not line.has(seq, payload)

    async def _take_behind(self, topic: bytes, seq: int, payload: bytes, connection: int | None) -> None:
        """Take a message behind those that a replay brings."""
        line = self._line_of(topic)
        if line is not None and self._is_behind((topic, seq, payload, connection)):
            if seq < line.taker.next_seq:
                line.taker.restart()
            await self._catch_up(line)
        self._take(topic, seq, payload, connection)
        self._flush()

    def _take(self, topic: bytes, seq: int, payload: bytes, connection: int | None) -> None:
        line = self._line_of(topic)
        if line is None:
            self.status.bad_messages += 1
            return
        if connection is not None:
            line.connection, line.taker.away = connection, False
            if connection not in self._connections:  # the message waited in the socket while its connection closed
                self._look_for_ended()
        if not line.has(seq, payload):
            line.replayed = {}  # live messages come in order, so no replayed message comes again
            self._hand_over(line, topic, seq, payload, replayed=False)

    def _hand_over(self, line: _Line, topic: bytes, seq: int, payload: bytes, *, replayed: bool) -> None:
        if self._on_frame is not None:
            self._on_frame(CaptureFrame(self._wall(), topic, seq, payload))
        line.taker.accept(seq, payload, replayed=replayed, more=not replayed)

    # --- replay ---

    def _may_replay(self) -> bool:
        return (
            self.publisher.replay is not None and not self.publisher.bind
            and self._monotonic() >= self._no_replay_before
        )

    async def _catch_up(self, line: _Line) -> None:
        """Replay from the next message on and hand the messages over; the taker hears of missing messages."""
        taker = line.taker
        taker.flush()
        want = taker.next_seq
        replay = await self._fetch(max(0, want - 1))
        first = replay.messages[0] if replay.messages else None
        if want > 0 and first is None and not replay.complete:
            taker.doubt()
        if want > 0 and (replay.complete if first is None else first[0] == want - 1 and not taker.is_last(*first)):
            taker.restart()  # the message before is gone or has other bytes, so this is a new incarnation
            replay = await self._fetch(0)
        turn_ends = self._monotonic() + SLICE_S
        for seq, payload in replay.messages:
            if seq >= taker.next_seq:
                self._hand_over(line, self.publisher.topic.encode(), seq, payload, replayed=True)
            if self._monotonic() >= turn_ends:
                await asyncio.sleep(0)
                turn_ends = self._monotonic() + SLICE_S
        line.replayed = {seq: _digest(payload) for seq, payload in replay.messages}

    async def _fetch(self, start: int) -> _Replayed:
        """The messages from ``start`` on."""
        await asyncio.sleep(max(0.0, self._pause_until - self._monotonic()))
        began = self._monotonic()
        self.status.replays += 1
        assert self.publisher.replay is not None
        replay = await fetch_replay(self._context, self.publisher.replay, start, idle_s=self._replay_idle_s)
        messages: list[tuple[int, bytes]] = []
        last = start - 1
        for parts in replay.replies[: -1 if replay.complete else None]:
            seq = int.from_bytes(parts[-2], "big") if len(parts) > 1 and len(parts[-2]) == SEQ_BYTES else -1
            if seq <= last:
                self.status.bad_messages += 1  # a replay goes forward
                continue
            last = seq
            messages.append((seq, parts[-1]))  # from the end: older engines send no topic
        ended = self._monotonic()
        self._pause_until = ended + min(PAUSE_FACTOR * (ended - began), PAUSE_MOST_S)
        if not replay.complete:
            self.status.replays_failed += 1
            self._no_replay_before = self._monotonic() + REPLAY_COOLDOWN_S
        return _Replayed(messages, replay.complete)


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


AnySource = ZmqSource | PullSource | LmcacheSource


def source_of(
    publisher: Publisher, taker: Callable[[str], EventStream], *,
    on_frame: Callable[[CaptureFrame], None] | None = None, turn: asyncio.Lock | None = None,
) -> AnySource:
    """The source that follows an address. Those of a loop share its ``turn``."""
    match publisher.endpoint.partition(":")[0]:
        case "http" | "https":
            return PullSource(publisher, taker, on_frame=on_frame)
        case "grpc":
            return LmcacheSource(publisher, taker, on_frame=on_frame)
        case _:
            return ZmqSource(publisher, taker, on_frame=on_frame, turn=turn)


# --- all the publishers of a daemon ---

Keep = Callable[[str, Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Runs a task under a name (``LeaderService.keep``)."""


class StreamRow(msgspec.Struct, frozen=True):
    """A publisher as screens and metrics show it."""

    source: int
    label: str
    counts: StreamCounts
    connected: bool
    page: ScrapeStatus | None = None
    """The engine's own metrics page; None if its address is unknown."""


def _measures(state: CacheState, source: int) -> dict[str, int]:
    """The engine's own numbers by label, without unknown numbers."""
    known = state.measured.get(source)
    return {} if known is None else {measure.label: value for measure, value in known.values.items()}


class Streams:
    """Follows ``publishers``; each gets its own source from ``new_source``."""

    def __init__(self, publishers: Sequence[Publisher], dispatcher: Dispatcher, new_source: Callable[[], int]) -> None:
        self._dispatcher, self._new_source = dispatcher, new_source
        self._context: Any = None
        self._publishers = publishers
        self._turn = asyncio.Lock()
        self.sources = [self._source(publisher) for publisher in publishers]
        self.scrapers = [
            Scraper(url, partial(self._ranks, url))
            for url in dict.fromkeys(publisher.metrics for publisher in publishers) if url is not None
        ]
        """The readers of the engines' own metrics, one for each page."""

    def _source(self, publisher: Publisher) -> AnySource:
        def taker(topic: str) -> EventStream:
            label = f"{publisher.label} {topic}" if publisher.bind else publisher.label
            source = self._new_source()
            self._dispatcher.submit(NoteReported, Note.ENGINE_SUMMARY, queue_note(source, publisher.queue_batches_max))
            return EventStream(self._dispatcher, source, dp_rank=publisher.dp_rank, label=label)

        return source_of(publisher, taker, turn=self._turn)

    def _ranks(self, url: str) -> Iterator[ScrapedRank]:
        """The publishers that the metrics at ``url`` describe. Of engines that connect to us no rank is known."""
        for publisher, source in zip(self._publishers, self.sources, strict=True):
            if publisher.metrics == url and len(source.takers) == 1:
                taker = source.takers[0]
                yield ScrapedRank(publisher.dp_rank, taker.measure, taker.block_tokens)

    def rows(self) -> list[StreamRow]:
        """Every publisher that has sent a message."""
        pages = {scraper.status.url: scraper.status for scraper in self.scrapers}
        return [
            StreamRow(
                taker.source, taker.label, taker.counts, source.status.connected and not taker.away,
                pages.get(publisher.metrics or ""),
            )
            for publisher, source in zip(self._publishers, self.sources, strict=True) for taker in source.takers
        ]

    def documents(self) -> list[dict[str, Any]]:
        """The publishers as rows of the status document."""
        state = self._dispatcher.leader.state
        return [
            {
                "source": str(row.source), "name": row.label, "connected": row.connected,
                "batches": row.counts.batches, "gaps": row.counts.gaps, "lost_batches": row.counts.lost_batches,
                "restarts": row.counts.restarts, "last_batch_ns": row.counts.last_batch_ns,
                "ended": state.has_ended(row.source),
                "metrics": None if row.page is None else row.page.url,
                "metrics_error": None if row.page is None or not row.page.error else row.page.error,
                "measures": _measures(state, row.source),
            }
            for row in self.rows()
        ]

    def open(self) -> None:
        """Connect or bind all publishers. Raises ``UsageError``."""
        self._context = new_context(len(self._publishers))
        try:
            for source in self.sources:
                source.open(self._context)
        except BaseException:
            self.close()
            raise

    async def run(self, keep: Keep | None = None) -> None:
        """Follow all publishers until cancelled, then close the sockets. ``keep(name, run)`` runs each of them."""
        try:
            async with anyio.create_task_group() as group:
                for publisher, source in zip(self._publishers, self.sources, strict=True):
                    if keep is None:
                        group.start_soon(source.run)
                    else:
                        group.start_soon(keep, f"publisher {publisher.label}", source.run)
                for scraper in self.scrapers:
                    if keep is None:
                        group.start_soon(scraper.run)
                    else:
                        group.start_soon(keep, f"metrics {scraper.status.url}", scraper.run)
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets; may be called again."""
        for source in self.sources:
            source.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
