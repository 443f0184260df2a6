"""Defects of the past, to be put back for a run: a simulation that does not find them again is worth nothing.

The names begin with the script of ``../shared/faults`` that found the defect, where one did. ``kinds`` are the faults
that draw a defect out; a hunt may leave the choice of faults to the seeds instead, and takes longer.

Law of this file: a mutant undoes one mending and nothing else.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import anyio.lowlevel
import msgspec

from kvbm_console.analysis.export import chrome, jsonl
from kvbm_console.cli import output, web
from kvbm_console.core import stimuli as st
from kvbm_console.core.ids import FinishReason
from kvbm_console.debug.leases import Leases, WallDeadlines
from kvbm_console.debug.sessions import Sessions
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events import stream, zmq_source
from kvbm_console.metrics import exposition, http
from kvbm_console.metrics.http import MetricsServer
from kvbm_console.parts import Parts
from kvbm_console.recording import files, reader, recover, seal, threads, writer
from kvbm_console.recording import format as fmt
from kvbm_console.recording import verify as verification
from kvbm_console.recording.files import SegmentFile
from kvbm_console.recording.threads import Syncer, Worker
from kvbm_console.simulator.driver import Turns
from kvbm_console.stream import broadcast
from kvbm_console.stream.broadcast import Broadcaster
from kvbm_console.stream.ring import Ring
from kvbm_console.tap import sender
from server import daemon, feeding
from server import recording as recording_method
from server.daemon import Daemon
from server.feeding import RequestNames
from server.questions import Lane
from tui.model import numbers

status, tail = (importlib.import_module(f"kvbm_console.cli.{name}") for name in ("status", "tail"))

Planted = Callable[[], AbstractContextManager[object]]


class Mutant(msgspec.Struct, frozen=True):
    """One defect. ``planted`` puts it back for the time of a block."""

    name: str
    laws: tuple[str, ...]
    """The laws of which the defect breaks one."""
    kinds: tuple[str, ...]
    """Empty where the seed is to draw its own faults."""
    planted: Planted
    first: int = 0
    within: int = 8
    """So many seeds from ``first`` on find it at most, where only ``kinds`` of faults happen."""
    quick: bool = True
    """Whether the ordinary tests hunt it."""


MUTANTS: Final[list[Mutant]] = []


def mutant(name: str, laws: str, kinds: str, **how: Any) -> Callable[[Callable[[], Iterator[None]]], None]:
    """Enter a defect into the list."""

    def enter(planting: Callable[[], Iterator[None]]) -> None:
        planted = contextlib.contextmanager(planting)
        MUTANTS.append(Mutant(name, tuple(laws.split()), tuple(kinds.split()), planted, **how))

    return enter


def instead(target: Any, name: str, value: Any) -> Any:
    """Another value for a name of a class or module."""
    return mock.patch.object(target, name, value)


# --- the directory ---------------------------------------------------------------------------------------------------


class _AnyName:
    def fullmatch(self, name: str) -> dict[int, str] | None:
        if not name.endswith((".tmp", ".active", ".mcap")):
            return None
        digits = name.partition("-")[0]
        return {1: digits if digits.isdigit() else "1"}


@mutant("r01-foreign-files-are-removed", "foreign", "daemon_killed")
def _() -> Iterator[None]:
    with instead(fmt, "_OUR_NAME", _AnyName()):
        yield


@mutant("r01-foreign-files-stop-readers", "recorded acknowledged", "client_killed", quick=False)
def _() -> Iterator[None]:
    with instead(reader, "segment_number", lambda path: 1):
        yield


@mutant("r02-keep-removes-sealed-segments-only", "keep", "sealer_starved", first=2)
def _() -> Iterator[None]:
    real = seal.retain

    def only_sealed(directory: Path, retention: Any, **how: Any) -> list[Path]:
        class Sealed:
            def __truediv__(self, name: str) -> Path:
                return directory / name

            def iterdir(self) -> Iterator[Path]:
                newest = max((path.name for path in directory.iterdir() if path.suffix == ".active"), default="")
                return (path for path in directory.iterdir() if path.suffix == ".mcap" or path.name == newest)

        how.setdefault("free", seal.free_bytes)
        free = how.pop("free")
        return real(Sealed(), retention, free=lambda _: free(directory), **how)  # type: ignore[arg-type]

    real_room = seal.BackgroundSealer.retain

    def always_fits(self: seal.BackgroundSealer, growth: int | None = None) -> bool:
        real_room(self, growth)
        return True

    with instead(seal, "retain", only_sealed), instead(seal.BackgroundSealer, "retain", always_fits):
        yield


@mutant("r70-a-segment-below-its-keyframe-ends-with-every-flush", "work", "segments_are_small", first=3)
def _() -> Iterator[None]:
    with instead(writer.Recorder, "_segment_limit", property(lambda self: self._segment_bytes)):
        yield


@mutant("a-sealing-outlives-its-recorder", "keep", "daemon_killed sealer_starved", first=2)
def _() -> Iterator[None]:
    with instead(seal, "orphaned", lambda parent: seal.never):
        yield


@mutant("r33-ages-of-segments-follow-the-wall-clock", "acknowledged", "wall_clock_set", first=1)
def _() -> Iterator[None]:
    def look(self: seal.Ages, ended: Mapping[str, int]) -> dict[str, int]:
        return {stem: writer.time.time_ns() - at_ns for stem, at_ns in ended.items()}

    with instead(seal.Ages, "look", look):
        yield


@mutant("r03-nobody-notices-a-removed-file", "acknowledged said heals", "directory_removed segment_cut", first=4)
def _() -> Iterator[None]:
    with instead(SegmentFile, "check", lambda self, size: None), instead(SegmentFile, "moved", lambda self: False):
        yield


@mutant("r03-a-moved-directory-takes-the-rest-along", "acknowledged", "directory_moved", first=44)
def _() -> Iterator[None]:
    with instead(SegmentFile, "moved", lambda self: False):
        yield


@mutant("r13-verify-judges-the-last-run-alone", "told", "daemon_killed")
def _() -> Iterator[None]:
    def nothing_found(path: Path, run: str, progress: Any) -> verification.VerifyReport:
        return verification.VerifyReport(str(path), True, None, 0, 0, 0, 0, 0, 0, 0, 0, None, run=run)

    with instead(verification, "_earlier", nothing_found):
        yield


@mutant("r13-a-segment-that-is-gone-is-no-finding", "told", "daemon_killed")
def _() -> Iterator[None]:
    with instead(verification, "MISSING", "never"):
        yield


# --- the recorder ----------------------------------------------------------------------------------------------------


@mutant("r37-a-thread-dies-and-nobody-is-told", "said", "a_thread_dies")
def _() -> Iterator[None]:
    def run(self: Worker) -> None:
        with contextlib.suppress(Exception):
            self._work()

    with instead(Worker, "_run", run):
        yield


@mutant("r37-the-sealer-dies-without-descriptors", "edge said", "no_processes")
def _() -> Iterator[None]:
    def run(self: seal.BackgroundSealer) -> None:
        while not self._stopping.is_set():
            self.retain()
            path = self._queue.get()
            if path is None:
                return
            self._seal(path)

    with instead(seal.BackgroundSealer, "_run", run), instead(Worker, "_run", lambda self: self._work()):
        yield


@mutant("r37-a-dead-thread-is-not-restarted", "heals said", "a_thread_dies", quick=False)
def _() -> Iterator[None]:
    with instead(writer.Recorder, "restart", lambda self, name: None), instead(Parts, "_end", lambda *_: None):
        yield


@mutant("what-a-dead-thread-held-is-not-counted", "counted recorded acknowledged", "a_thread_dies",
        first=3, quick=False)
def _() -> Iterator[None]:
    real = writer.Recorder.restart

    def restart(self: writer.Recorder, name: str) -> None:
        self._taken = []
        real(self, name)

    with instead(writer.Recorder, "restart", restart):
        yield


@mutant("r35-a-keyframe-is-one-frame-however-large", "heals recorded acknowledged said", "daemon_killed")
def _() -> Iterator[None]:
    # The limit of a frame is as small as the other bounds of a run: its keyframes reach 30 kB.
    with instead(fmt, "FRAME_BYTES_MAX", 15_000), instead(fmt, "PACKED_FROM_BYTES", 2**30):
        yield


@mutant("r38-a-refused-rotation-is-never-asked-again", "heals", "no_descriptors", first=3)
def _() -> Iterator[None]:
    def waits(self: writer.Recorder) -> bool:
        return self._rotating or self._rotation_refused is not None

    with instead(writer.Recorder, "_rotation_waits", waits):
        yield


@mutant("a-segment-that-has-grown-stands-in-the-way", "heals", "no_descriptors", first=18, quick=False)
def _() -> Iterator[None]:
    with instead(writer.Recorder, "_makes_way", lambda self, size: False):
        yield


@mutant("r04-a-full-disk-is-never-tried-again", "heals", "disk_is_full writes_fail")
def _() -> Iterator[None]:
    with instead(writer.Recorder, "_probe", lambda self: None):
        yield


@mutant("a-gap-is-not-told", "recorded acknowledged", "disk_is_full writes_fail", first=1, quick=False)
def _() -> Iterator[None]:
    def silent(self: writer.Recorder, segment: Any, last: int) -> None:
        self._next_seq = last + 1

    with instead(writer.Recorder, "_append_gap", silent):
        yield


@mutant("losses-are-not-counted", "counted", "disk_is_full writes_fail", first=1, quick=False)
def _() -> Iterator[None]:
    real = writer.Recorder.status

    def status(self: writer.Recorder) -> Any:
        self._lost = 0
        return real(self)

    with instead(writer.Recorder, "status", status):
        yield


@mutant("what-a-full-disk-took-stays-torn", "recorded acknowledged", "disk_is_full writes_are_short",
        first=9, quick=False)
def _() -> Iterator[None]:
    # Either defence alone keeps the file right: who finds the file longer than it was left begins another.
    with instead(SegmentFile, "truncate", lambda self, size: None), instead(SegmentFile, "check", lambda *_: None):
        yield


@mutant("a-short-write-is-taken-for-a-whole-one", "recorded acknowledged said heals", "writes_are_short", quick=False)
def _() -> Iterator[None]:
    def once(file: SegmentFile, buffers: Any) -> int:
        file.writev(buffers)
        return sum(map(len, buffers))

    with instead(files, "write_all", once), instead(SegmentFile, "check", lambda *_: None):
        yield


@mutant("events-are-acknowledged-before-they-are-written", "acknowledged", "daemon_killed_at_the_disk")
def _() -> Iterator[None]:
    real = writer.Recorder._write_chunks

    def eager(self: writer.Recorder, batch: Any) -> None:
        self.written_seq = max(
            [self.written_seq, *(c.events.first_seq + c.events.count - 1 for c in batch if c.events is not None)]
        )
        real(self, batch)

    with instead(writer.Recorder, "_write_chunks", eager):
        yield


@mutant("a-file-whose-sync-failed-is-synced-again", "acknowledged", "syncs_fail power_fails", first=168, quick=False)
def _() -> Iterator[None]:
    def forgiving(self: Syncer, file: Any, written: int, error: OSError) -> None:
        self.failures += 1

    with instead(Syncer, "_fail", forgiving):
        yield


@mutant("events-are-acknowledged-without-a-sync", "acknowledged", "power_fails")
def _() -> Iterator[None]:
    with instead(SegmentFile, "datasync", lambda self: None):
        yield


@mutant("names-are-not-synced", "acknowledged recorded", "power_fails", first=1, quick=False)
def _() -> Iterator[None]:
    with instead(threads, "sync_directory", lambda path: None), instead(seal, "sync_directory", lambda path: None):
        yield


@mutant("the-name-of-a-new-directory-is-not-synced", "acknowledged", "power_fails", first=57, within=1, quick=False)
def _() -> Iterator[None]:
    with instead(files, "sync_directory", lambda directory: None):
        yield


@mutant("a-segment-goes-before-its-sealed-twin-is-durable", "acknowledged recorded", "power_fails",
        first=1, quick=False)
def _() -> Iterator[None]:
    with (
        instead(seal, "sync_directory", lambda path: None),
        instead(seal, "os", _Os("fdatasync")),
    ):
        yield


class _Os:
    """``os`` of the run but for one call that does nothing."""

    def __init__(self, without: str) -> None:
        self._without = without

    def __getattr__(self, name: str) -> Any:
        if name == self._without:
            return lambda *_: None
        return getattr(recover.os, name)


@mutant("r34-a-disk-that-hangs-is-not-told", "said", "disk_hangs", quick=False)
def _() -> Iterator[None]:
    with instead(writer.Recorder, "_hanging", lambda self: None):
        yield


# --- the loop --------------------------------------------------------------------------------------------------------


@mutant("r34-the-loop-waits-for-the-disk", "engines", "disk_hangs disk_is_slow")
def _() -> Iterator[None]:
    real = writer.Recorder.offer

    def waiting(self: writer.Recorder, stimuli: Any, events: Any) -> None:
        real(self, stimuli, events)
        if stimuli is not None:
            self.settle(1.0)

    with instead(writer.Recorder, "offer", waiting):
        yield


@mutant("rec-start-asks-the-disk-on-the-loop", "engines", "disk_is_slow", quick=False)
def _() -> Iterator[None]:
    async def at_once(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    class Anyio:
        class to_thread:
            run_sync = staticmethod(at_once)

    with instead(recording_method, "anyio", Anyio):
        yield


@mutant("nothing-is-released-at-the-end", "end", "client_frozen", quick=False)
def _() -> Iterator[None]:
    real = Daemon._end_engine

    async def end(self: Daemon, engine: Any) -> Any:
        with instead(self.service, "release_all", lambda: None), instead(Sessions, "close", lambda *_: None):
            return await real(self, engine)

    with instead(Daemon, "_end_engine", end), instead(Sessions, "close", lambda *_: None):
        yield


# --- readers ---------------------------------------------------------------------------------------------------------


@mutant("r24-a-loss-is-not-told-to-its-reader", "readers", "client_frozen", first=2)
def _() -> Iterator[None]:
    real = Ring.read

    def silent(self: Ring, cursor: Any) -> Any:
        if cursor.position < self.first_seq:
            cursor.position = self.first_seq
        return real(self, cursor)

    with instead(Ring, "read", silent):
        yield


@mutant("r24-readers-are-never-forgotten", "rooms", "client_killed connection_cut", first=2, quick=False)
def _() -> Iterator[None]:
    with instead(Broadcaster, "unsubscribe", lambda self, subscriber: None):
        yield


# --- engines ---------------------------------------------------------------------------------------------------------


@mutant("r22-two-engines-share-a-name", "engines", "client_killed", first=1)
def _() -> Iterator[None]:
    with instead(RequestNames, "translated", lambda self, stimulus, state: stimulus):
        yield


@mutant("r23-pools-of-former-lives-stay", "rooms", "client_killed connection_cut", first=1)
def _() -> Iterator[None]:
    with instead(feeding, "abandon", _abandon_for_good):
        yield


def _abandon_for_good(dispatcher: Dispatcher, source: int) -> None:
    leader = dispatcher.leader
    for slot in [slot for slot in leader.state.slots.values() if slot.source == source]:
        if source not in leader.watched:
            dispatcher.submit_from(
                source, None, st.RequestFinished, slot.request, b"", FinishReason.ABORTED
            )
    dispatcher.submit_from(source, None, st.SourceRestarted, True, False)


@mutant("r36-behind-a-keyframe-that-does-not-fit-nothing-is-recorded", "grows", "keyframes_do_not_fit", first=6)
def _() -> Iterator[None]:
    with instead(writer.Recorder, "_may_grow", lambda self: False):
        yield


# --- observers -------------------------------------------------------------------------------------------------------


@mutant("calls-that-are-given-up-at-once-take-no-turns", "share", "callers_flood", first=1, quick=False)
def _() -> Iterator[None]:
    with instead(daemon, "start_paced", lambda server: server.start()):
        yield


@mutant("r27-the-loop-has-one-turn-between-two-slices", "share", "callers_flood")
def _() -> Iterator[None]:
    async def take(self: Turns) -> None:
        await anyio.lowlevel.checkpoint()

    with instead(Turns, "take", take):
        yield


@mutant("r25-flushes-to-many-readers-come-as-often", "share", "readers_flood", first=3, quick=False)
def _() -> Iterator[None]:
    with instead(broadcast, "GAP_NS_PER_READER", 0):
        yield


@mutant("r28-questions-wait-for-nothing", "share", "questions_flood", first=1, quick=False)
def _() -> Iterator[None]:
    async def turn(self: Lane, caller: str) -> None:
        return

    with instead(Lane, "turn", turn):
        yield


# --- debuggers -------------------------------------------------------------------------------------------------------


@mutant("r62-breakpoints-of-the-dead-take-all-room", "rooms", "client_killed")
def _() -> Iterator[None]:
    with instead(Sessions, "_make_room", lambda self, owner, count: None):
        yield


@mutant("r61-a-lease-never-ends-by-itself", "holds", "connection_half_open client_frozen", first=7, quick=False)
def _() -> Iterator[None]:
    with instead(Leases, "expire", lambda self: None):
        yield


@mutant("r60-a-lost-lease-is-not-told-to-the-leader", "holds", "client_killed", first=1, quick=False)
def _() -> Iterator[None]:
    def drop(self: Leases, owner: str) -> None:
        self._until.pop(owner, None)

    with instead(Leases, "drop", drop):
        yield


@mutant("r61-a-hold-lasts-for-ever", "holds", "client_frozen", first=4, quick=False)
def _() -> Iterator[None]:
    with instead(WallDeadlines, "set", lambda self, deadline, after_ns: None):
        yield


@mutant("r33-leases-run-on-the-wall-clock", "holds", "wall_clock_set client_frozen")
def _() -> Iterator[None]:
    real = Leases.__init__

    def init(self: Leases, clock: Any, **how: Any) -> None:
        real(self, writer.time.time_ns, **how)

    with instead(Leases, "__init__", init):
        yield


# --- event streams ---------------------------------------------------------------------------------------------------


@mutant("r51-a-publisher-fills-pools-without-bound", "streams", "publisher_grows", first=20, within=2)
def _() -> Iterator[None]:
    with instead(stream, "POOLS_MAX", 2**60), instead(stream, "POOL_BLOCKS_MAX", 2**60):
        yield


@mutant("r51-a-number-at-the-end-of-its-range-ends-the-stream", "edge streams", "publisher_numbers_end",
        first=20, within=2)
def _() -> Iterator[None]:
    with instead(stream, "SEQ_MAX", 2**64):
        yield


@mutant("r52-behind-a-large-message-nothing-is-heard", "streams", "publisher_sends_too_much publisher_sends_junk",
        first=20, within=2)
def _() -> Iterator[None]:
    with instead(zmq_source.ZmqSource, "_connect_again", lambda self: None):
        yield


@mutant("connections-without-a-handshake-count-as-lost", "streams", "publisher_is_proxied", first=15, within=2,
        quick=False)
def _() -> Iterator[None]:
    def follow(self: zmq_source.ZmqSource, event: int) -> None:
        self.status.disconnects += event == zmq_source.zmq.EVENT_DISCONNECTED
        self.status.connected = self.status.connects > self.status.disconnects

    with instead(zmq_source.ZmqSource, "_follow_ours", follow):
        yield


@mutant("a-machine-that-is-gone-is-never-noticed", "streams", "stream_half_open publisher_loses_power",
        first=20, within=2, quick=False)
def _() -> Iterator[None]:
    with instead(zmq_source, "KEEPALIVE_IDLE_S", 7_200):
        yield


@mutant("blocks-of-a-publishers-former-life-stay", "streams", "publisher_killed", first=7, within=2, quick=False)
def _() -> Iterator[None]:
    def restart(self: stream.EventStream) -> None:
        self.flush()
        self.counts.restarts += 1
        self._gone = False
        self._begin()

    with instead(stream.EventStream, "restart", restart):
        yield


@mutant("a-loss-of-messages-is-not-told", "streams", "stream_cut publisher_frozen", first=7, within=2, quick=False)
def _() -> Iterator[None]:
    with instead(stream.EventStream, "_gap", lambda self, first, last: self.flush()):
        yield


@mutant("a-replay-brings-messages-twice", "streams", "stream_cut daemon_killed", first=12, within=2, quick=False)
def _() -> Iterator[None]:
    real = stream.EventStream.accept

    def accept(
        self: stream.EventStream, seq: int, payload: bytes, *, replayed: bool = False, more: bool = False
    ) -> None:
        real(self, seq, payload, replayed=replayed, more=more)
        if replayed:
            self._apply(seq, stream.decode(payload)[0], replayed)
            self.flush()

    with instead(stream.EventStream, "accept", accept):
        yield


# --- taps ------------------------------------------------------------------------------------------------------------


@mutant("r50-a-tap-ends-with-its-daemon", "taps", "daemon_killed reporter_killed", first=6, within=2)
def _() -> Iterator[None]:
    def once(self: sender.Sender) -> None:
        with contextlib.suppress(Exception):
            self._begin()
            self._exchange()
        self._end()

    with instead(sender.Sender, "_run", once):
        yield


@mutant("r50-a-frozen-reporter-stays", "taps", "reporter_frozen_at_the_end", within=2)
def _() -> Iterator[None]:
    real = sender.Sender._end

    def end(self: sender.Sender) -> None:
        self.process = None
        real(self)

    with instead(sender.Sender, "_end", end):
        yield


# --- the page of metrics ---------------------------------------------------------------------------------------------


@mutant("r63-silent-connections-take-all-room", "metrics", "silent_scrapers", first=1)
def _() -> Iterator[None]:
    with instead(MetricsServer, "_close_oldest", lambda self: False):
        yield


@mutant("r63-silent-connections-take-all-descriptors", "metrics", "silent_scrapers", first=3)
def _() -> Iterator[None]:
    with instead(http, "CONNECTIONS_MAX", 100_000):
        yield


@mutant("answers-that-nobody-reads-take-all-room", "metrics", "scrapers_never_read", first=1, quick=False)
def _() -> Iterator[None]:
    with instead(MetricsServer, "_close_oldest", _close_oldest_silent):
        yield


def _close_oldest_silent(self: MetricsServer) -> bool:
    oldest = next(iter(self._silent), None)
    if oldest is None:
        return False
    self._closing.add(oldest)
    del self._silent[oldest]
    oldest.cancel()
    return True


@mutant("a-port-without-descriptors-never-accepts-again", "metrics", "silent_scrapers no_descriptors", first=3,
        quick=False)
def _() -> Iterator[None]:
    with instead(http, "ACCEPT_RETRY_S", 3_600.0):
        yield


# --- what people see --------------------------------------------------------------------------------------------------


@mutant("r40-names-reach-the-terminal-as-they-are", "shown", "hostile_names", first=3)
def _() -> Iterator[None]:
    with instead(output, "safe", str), instead(status, "safe", str), instead(tail, "safe", str):
        yield


@mutant("r40-a-label-of-metrics-is-not-printable", "shown metrics", "hostile_names", first=10)
def _() -> Iterator[None]:
    def escape(text: str, *, quotes: bool = True) -> str:
        escaped = text.replace("\\", r"\\").replace("\n", r"\n")
        return escaped.replace('"', r"\"") if quotes else escaped

    with instead(exposition, "_escape", escape):
        yield


@mutant("r40-labels-of-metrics-read-alike", "shown", "hostile_names", first=0)
def _() -> Iterator[None]:
    def alike(text: str) -> str:
        return text if text.replace("\n", "").isprintable() else "?"

    with instead(exposition, "_readable", alike):
        yield


@mutant("r40-the-console-draws-names-as-they-are", "shown", "hostile_names", first=3)
def _() -> Iterator[None]:
    with instead(numbers, "_CELLS", {}):
        yield


@mutant("r40-exports-have-names-as-they-are", "shown", "hostile_names", first=3, quick=False)
def _() -> Iterator[None]:
    def raw(document: Any) -> str:
        return msgspec.json.encode(document).decode()

    with instead(jsonl, "json_text", raw), instead(chrome, "json_text", raw):
        yield


# --- the console in a browser ----------------------------------------------------------------------------------------


@mutant("r41-whoever-reaches-the-port-is-let-in", "web", "strangers_visit", first=3)
def _() -> Iterator[None]:
    with instead(web, "_is_key", lambda shown, key: True):
        yield


@mutant("r41-pages-of-other-origins-are-let-in", "web", "strangers_visit", first=3)
def _() -> Iterator[None]:
    with instead(web, "gate", _without("Origin", None)):
        yield


@mutant("r41-other-hosts-are-let-in", "web", "strangers_visit", first=3, quick=False)
def _() -> Iterator[None]:
    with instead(web, "gate", _without("Host", "localhost:8000")):
        yield


def _without(header: str, value: str | None) -> Any:
    """A gate that does not look at this header."""
    real = web.gate

    def gate(port: int, key: str) -> Any:
        only_ours = real(port, key)

        async def blind(request: Any, handler: Any) -> Any:
            headers = request.headers.copy()
            headers.pop(header, None)
            if value is not None:
                headers[header] = value
            return await only_ours(request.clone(headers=headers), handler)

        return blind

    return gate


@mutant("r41-files-of-the-working-directory-are-run", "web", "strangers_visit", first=3, quick=False)
def _() -> Iterator[None]:
    real = web.visitor_command

    with instead(web, "visitor_command", lambda arguments: real(arguments).replace(" -P ", " ")):
        yield
