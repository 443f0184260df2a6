"""The daemon: puts the parts together, and ends in order.

At its end a daemon releases all holds, stops the engine, and ends feeds and control sessions. It then flushes, writes
and syncs the last events, sends ``Bye`` with the last number to every subscriber, and gives the address back. All of it
has a bound in time, and a second signal ends the process at once.

Law of this file: after ``Bye{last_seq}`` no event is published, and the recording ends with that very event.
"""

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from msgspec.structs import replace

from kvbm_console.core.stimuli import DeadlinePassed, Disarmed
from kvbm_console.debug.leases import WallDeadlines
from kvbm_console.engines.kv_events.address import names_of
from kvbm_console.extras import need
from kvbm_console.hosts import HostProcesses
from kvbm_console.metrics.collect import collect, scrape_of
from kvbm_console.metrics.exposition import render
from kvbm_console.metrics.http import MetricsServer
from kvbm_console.recording.format import block_label
from kvbm_console.recording.output import RecordingPath, require_new
from kvbm_console.recording.writer import Recorder
from kvbm_console.service import LeaderService
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.driver import drive
from kvbm_console.simulator.embedded import SOURCE, Rig, embed
from kvbm_console.simulator.link import TOKEN_BYTES, LinkMover
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.wire.protocol import SERVER_OPTIONS, SERVICE

from .access import AccessRules, read_token, server_credentials, tls_context
from .arrivals import start_paced
from .control import KeptBreakpoints
from .event_publisher import EventPublisher
from .lake import LakeWriter
from .lints import LintWatch
from .options import DaemonOptions, Endpoint, host_and_port, is_loopback
from .publisher import FleetPublisher
from .questions import PacedServices, Questions, Turn
from .servicer import ConsoleServicer, Identity
from .summary import Summary, summarise
from .taps import TapListener

if TYPE_CHECKING:
    from kvbm_console.engines.kv_events.zmq_source import Streams

    from .spans import SpanExport

STOP_GRACE_S: Final = 1.0
"""Time for subscribers to read their ``Bye``. With handlers and recorder the whole end stays below five seconds."""
HANDLERS_GRACE_S: Final = 1.0
"""Time for feeds and sessions to end by themselves."""
SYNC_GRACE_S: Final = 2.0
"""Time for the recorder to write and sync. The summary's watermarks show a disk that takes longer."""
SEAL_GRACE_S: Final = 3.5
"""From a signal to the moment where sealing is given up: the process ends within five seconds of the signal. A
segment that is left active is whole, and the summary names it."""
STUCK_DISK_S: Final = 0.5
"""Sealing asks whether to give up at each frame; a disk that takes longer for a frame is not waited for."""
RPC_NICE: Final = 5
"""The priority of the RPC library's threads is so much lower than that of the loop's thread."""
M_MMAP_THRESHOLD: Final = -3
"""The parameter of glibc's ``mallopt``."""
MAPPED_BYTES: Final = 1 << 20
"""Blocks of this size have a mapping of their own, which the system has back as soon as they are freed."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
DISARM_SIGNAL: Final = signal.SIGUSR1
"""Mutes every breakpoint and releases every hold, for when no client gets through."""
DISARM_VARIABLE: Final = "KVBM_CONSOLE_DISARM"
"""In the environment of a daemon, other than 0: it takes no breakpoint and no freeze."""


class WallTimer:
    """The wall's monotonic clock for a mover: copies of engines that move no bytes take the time of the link model."""

    def __init__(self, clock: Callable[[], int], loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock
        self._loop = loop

    @property
    def now_ns(self) -> int:
        """Now."""
        return self._clock()

    def at(self, at_ns: int, action: Callable[[], None]) -> int:
        """Run ``action`` at this time."""
        self._loop.call_later(max(0.0, (at_ns - self._clock()) / 1e9), action)
        return 0


class Daemon:
    """A daemon. ``service`` and ``rig`` may be read; ``stop`` asks for the end."""

    def __init__(self, options: DaemonOptions) -> None:
        self.options = options
        credentials = None
        if options.tls_cert is not None and options.tls_key is not None:
            credentials = server_credentials(options.tls_cert, options.tls_key)
        token = "" if options.token_file is None else read_token(options.token_file)
        self._access = AccessRules(token, read_only=options.read_only)
        remote = credentials is not None and bool(token)
        metrics = None if options.metrics is None else self._metrics_server(options.metrics, token, remote=remote)
        self.endpoint = Endpoint(options.listen, credentials=credentials, remote=remote)
        try:
            self.rig: Rig | None = None
            self.hosts: HostProcesses | None = None
            self.streams: Streams | None = None
            self._made: Path | None = None
            """The file of the sealed recording."""
            self.metrics = metrics
            self.spans: SpanExport | None = None
            self.taps = TapListener(self.address) if self.address.startswith("unix:") else None
            self.service = self._assemble()
            self.lints = LintWatch(self.service)
            self.lints.always = metrics is not None
            self._prepare_debugger()
            self._prepare_spans()
        except BaseException:
            self.endpoint.close()
            self._end_processes()
            raise
        self.questions = Questions(lambda: self.service.exported_ns)
        self.service.broadcaster.strain = self.questions.own.strain
        self.publisher = None if options.fleet is None else FleetPublisher(
            options.fleet, self.service, self.lints, self.questions, program=options.program, name=options.target,
            address=lambda: self.address, keyframe=lambda: None if self.events is None else self.events.keyframe,
        )
        self.events = None if self.publisher is None or options.fleet is None or not options.fleet_events else (
            EventPublisher(options.fleet, self.service, self.publisher.name)
        )
        self.lake = None if options.lake is None or options.record is None else LakeWriter(
            self.service.incarnation, options.record, options.lake, options.target or options.record.name
        )
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._seal_until = math.inf
        """On the monotonic clock; a run that ends by itself seals to the end."""

    @property
    def address(self) -> str:
        """The address that it listens on, as clients write it."""
        return self.endpoint.address

    def _metrics_server(self, listen: str, token: str, *, remote: bool) -> MetricsServer:
        """The server of the metrics: plain on the loopback, behind TLS and the token elsewhere."""
        host, _ = host_and_port("metrics", listen, remote=remote)
        secret: dict[str, Any] = {}
        if not is_loopback(host):
            assert self.options.tls_cert is not None
            assert self.options.tls_key is not None
            secret = {"tls": tls_context(self.options.tls_cert, self.options.tls_key), "token": token}

        def turn() -> Awaitable[Turn]:
            return self.questions.scrapers.turn("scraper")

        return MetricsServer(listen, self._metrics_page, turn, **secret)

    def _metrics_page(self) -> str:
        service = self.service
        rig = self.rig
        return render(collect(scrape_of(
            service.leader, at_ns=service.at_ns,
            block_bytes=self.options.block_bytes if rig is None else rig.mover.block_bytes,
            subscribers=len(service.broadcaster.subscribers), ring_bytes=service.ring.bytes,
            recorder=None if service.recorder is None else service.recorder.status(),
            streams=() if self.streams is None else self.streams.rows(),
            parts=service.parts.rows(), questions_refused=self.questions.refused,
            taps=service.costs(), spans={} if self.spans is None else self.spans.counts(),
            lints=self.lints.active, lints_passed_over=self.lints.passed_over, curve=self.lints.curve,
        )))

    def _end_processes(self) -> None:
        """End the workers of the ranks and the further hosts."""
        if self.rig is not None:
            self.rig.close()
        if self.hosts is not None:
            self.hosts.close()

    def summary(self) -> Summary:
        """The summary of the run as of now."""
        summary = summarise(self.service)
        if self.rig is not None and self.rig.ranks is not None:
            summary = replace(summary, carried=self.rig.ranks.report)
        if summary.recorder is None or self._made is None:
            return summary
        return replace(summary, recorder=replace(summary.recorder, path=str(self._made)))

    def stop(self, *, soon: bool = False) -> None:
        """Ask for an orderly end; may be called often. For the loop's thread. ``soon``: within five seconds."""
        if soon and not self._hurried.is_set():
            self._seal_until = time.monotonic() + SEAL_GRACE_S
            self._hurried.set()
        self._stopping.set()

    # --- assembly ----------------------------------------------------------------------------------------------------

    def _assemble(self) -> LeaderService:
        options = self.options
        kept: dict[str, Any] = {
            "check": options.check, "lease_ttl_ns": options.lease_ttl_ns, "ring": options.ring,
            "name": self._target(),
        }
        if options.workload is None or options.engine is None:
            begin = time.monotonic_ns()
            service = LeaderService(options.config, lambda: time.monotonic_ns() - begin, **kept)
            self._add_hosts(service)
            self._record(service)
            service.start()
            return service
        calendar = Calendar()
        service = LeaderService(options.config, calendar.clock, **kept)
        service.labels = SimulatedMachine(
            leader=options.config, engine=options.engine, links=tuple(options.links)
        ).labels()
        self._add_hosts(service)
        self._record(service)
        service.start()
        service.new_source(SOURCE)
        self.rig = embed(
            service.dispatcher, calendar, options.engine, options.workload, links=options.links,
            with_bytes=options.with_bytes, warm=True,
        )
        ranks = self.rig.ranks
        if ranks is not None:
            parts = service.parts
            parts.known(ranks.names)
            ranks.ended, ranks.trouble, ranks.begun = parts.ended, parts.troubled, parts.begun
        if options.stage is not None:
            options.stage(self.rig)
        return service

    def _add_hosts(self, service: LeaderService) -> None:
        """Start the further hosts; their configurations are compared before the first stimulus."""
        if self.options.hosts > 1:
            self.hosts = hosts = HostProcesses(self.options.config, self.options.hosts, check=self.options.check)
            hosts.rerun, hosts.ended = service.leader_after, service.parts.ended
            service.parts.known(hosts.names)
            service.hosts = hosts

    def _prepare_debugger(self) -> None:
        """Set the breakpoints that are kept from run to run; none when the environment disarms the daemon."""
        if os.environ.get(DISARM_VARIABLE, "0") not in ("", "0"):
            self.service.sessions.disarmed_by = DISARM_VARIABLE
        elif self.options.breakpoints is not None:
            kept = KeptBreakpoints(self.options.breakpoints, self.service)
            kept.load()
            self.service.listeners.append(kept.look)

    def _prepare_spans(self) -> None:
        """Start the exporter; only a daemon that exports spans needs OpenTelemetry."""
        if self.options.otlp is not None:
            need("opentelemetry.exporter.otlp.proto.http", "otlp", "OpenTelemetry", "--otlp")
            from .spans import SpanExport

            self.spans = SpanExport(self.service, self.options.otlp, self._target())

    def _record(self, service: LeaderService) -> None:
        """Begin to record before the first stimulus, so that decision replay can begin there, too."""
        if self.options.record is not None:
            service.place = place = RecordingPath(self.options.record)
            if place.file is not None:
                require_new(self.options.record, "--record")
            service.recorder = Recorder(
                place.directory, config=service.config, incarnation=service.incarnation,
                keyframe=service.keyframe, facts=service.facts,
                clock_anchor_ns=service.started_wall_ns - service.started_at_ns, program=self.options.program,
                labels={"target": self._target(), **block_label(self.options.block_bytes), **service.labels},
                **self.options.recording.settings() | place.settings,
            )

    def _target(self) -> str:
        workload = self.options.workload
        streams = names_of(self.options.publishers)
        return self.options.target or (workload.name if workload is not None else streams or "engines by feed")

    def _server(self) -> tuple[grpc.aio.Server, ConsoleServicer, Any]:
        options = self.options
        paced = PacedServices(self.questions.probes, SERVICE)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(paced,))
        servicer = ConsoleServicer(
            self.service, Identity(options.program, self._target(), options.run, options.block_bytes), self._access,
            self.questions, self.lints,
        )
        server.add_generic_rpc_handlers((servicer.handler(),))
        probe: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(probe, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self.endpoint.bind(server)
        return server, servicer, probe

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: "Callable[[Daemon], None] | None" = None) -> Summary:
        """Serve until ``stop``, a signal, or (when asked for) the end of the work. Returns the final summary."""
        try:
            self._handle_signals()
            self._open_streams()
            if self.metrics is not None:
                await self.metrics.start()
            if self.taps is not None:
                self.taps.open()
            before = thread_ids()
            server, servicer, probe = self._server()
            await probe.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
            await start_paced(server)
            give_way(thread_ids() - before)
            try:
                await self._serve(servicer, probe, on_ready)
            finally:
                self.service.close()
                if self.events is not None:
                    await self.events.finish()
                if self.taps is not None:
                    await self.taps.close()
                await server.stop(STOP_GRACE_S)
        finally:
            self.endpoint.close()
            self._end_processes()
            if self.streams is not None:
                self.streams.close()
            if self.metrics is not None:
                await self.metrics.close()
            await self._seal()
            if self.lake is not None:
                await self.lake.finish(lambda: self._seal_until)
            self._ignore_signals()
        return self.summary()

    async def _seal(self) -> None:
        """Seal the recording while the loop still takes signals; a disk that hangs does not keep us."""
        recorder = self.service.recorder
        if recorder is None:
            return
        sealing = asyncio.ensure_future(
            anyio.to_thread.run_sync(self._close_recorder, recorder, abandon_on_cancel=True))
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait((sealing, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not sealing.done():
            await asyncio.wait([sealing], timeout=max(0.0, self._seal_until - time.monotonic()) + STUCK_DISK_S)
        if sealing.done():
            self._made = sealing.result()
        sealing.cancel()

    def _close_recorder(self, recorder: Recorder) -> Path | None:
        """Seal, and name the file of a recording that is one file; runs in a thread, because the disk may hang."""
        recorder.close(lambda: time.monotonic() >= self._seal_until)
        place = self.service.place
        return place.finish() if place is not None and place.file is not None else None

    def _handle_signals(self) -> None:
        if self.options.handle_signals:
            loop = asyncio.get_running_loop()
            for number in SIGNALS:
                loop.add_signal_handler(number, self._signalled)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as ``nohup`` asks
                # A closing terminal may tell it twice, by the kernel and by the shell, so it never ends at once.
                loop.add_signal_handler(signal.SIGHUP, lambda: self.stop(soon=True))
            loop.add_signal_handler(DISARM_SIGNAL, lambda: self.service.submit(Disarmed, "signal"))

    def _ignore_signals(self) -> None:
        if self.options.handle_signals:
            for number in (*SIGNALS, signal.SIGHUP, DISARM_SIGNAL):
                asyncio.get_running_loop().remove_signal_handler(number)

    async def _serve(
        self, servicer: ConsoleServicer, probe: Any,
        on_ready: "Callable[[Daemon], None] | None",
    ) -> None:
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as group:
            await group.start(self.service.run)
            group.start_soon(self._tell_health, probe)
            if self.taps is not None:
                group.start_soon(self.service.keep, "taps", self.taps.run)
            if self.spans is not None:
                group.start_soon(self.service.keep, "spans", self.spans.run)
            group.start_soon(self.service.keep, "lints", self.lints.run)
            if self.lake is not None:
                group.start_soon(self.service.keep, "lake", self.lake.run)
            if self.events is not None:
                self.events.begin()
            if self.publisher is not None:
                group.start_soon(self.service.keep, "fleet", self.publisher.run)
            if self.rig is None:
                self._engine_clock_is_the_wall(loop)
            engine = asyncio.ensure_future(self._drive())
            if on_ready is not None:
                on_ready(self)
            try:
                stopped = asyncio.ensure_future(self._stopping.wait())
                differ = asyncio.ensure_future(self._hosts_differ())
                await asyncio.wait((engine, stopped, differ), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                differ.cancel()
                failed = await self._end_engine(engine)
            await self._drain(servicer, probe)
            if self.hosts is not None and failed is None:
                await self.hosts.caught_up(self._hurried)
                failed = self.hosts.diverged
            group.cancel_scope.cancel()
        if self.spans is not None:
            await self.spans.finish()
        if failed is not None:
            raise failed

    async def _hosts_differ(self) -> None:
        """Return when a further host has another result than ours."""
        if self.hosts is None:
            await asyncio.Event().wait()
        else:
            self.hosts.attach(asyncio.get_running_loop())
            await self.hosts.found.wait()

    async def _tell_health(self, probe: Any) -> None:
        """Keep the health service's answer right: a recorder that was asked for and is dead is no service."""
        parts, changed = self.service.parts, asyncio.Event()
        parts.on_change = changed.set
        while not self.options.healthy_without_recorder:
            await changed.wait()
            changed.clear()
            status = health_pb2.HealthCheckResponse
            healthy = parts.is_healthy("recorder")
            await probe.set(SERVICE, status.SERVING if healthy else status.NOT_SERVING)

    def _engine_clock_is_the_wall(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run deadlines and modelled copies on the wall's monotonic clock, because no engine is embedded."""
        dispatcher, options = self.service.dispatcher, self.options
        dispatcher.engine_deadlines = WallDeadlines(
            loop.call_later, lambda deadline: dispatcher.submit(DeadlinePassed, deadline)
        )
        dispatcher.mover = LinkMover(
            WallTimer(self.service.clock, loop), dispatcher,
            options.block_bytes or TOKEN_BYTES * options.config.block_tokens, links=options.links,
            asynchronous=options.config.asynchronous,
        )

    def _open_streams(self) -> None:
        """Open sockets to the engines' event streams. Only a daemon that follows streams needs ZeroMQ."""
        if self.options.publishers:
            from kvbm_console.engines.kv_events.zmq_source import Streams

            self.streams = Streams(self.options.publishers, self.service.dispatcher, self.service.new_source)
            self.service.publishers = self.streams.documents
            self.streams.open()

    async def _drive(self) -> None:
        """Drive the embedded engine or the event streams; then wait for ever, or return with ``exit_when_done``."""
        if self.streams is not None:
            await self.streams.run(self.service.keep)
        if self.rig is not None:
            if self.rig.ranks is not None:
                self.rig.ranks.attach(asyncio.get_running_loop())
            broadcaster = self.service.broadcaster
            await drive(
                self.rig, speed=self.options.speed, changed=self.service.changed.wait, flush=broadcaster.flush_if_due
            )
            broadcaster.flush()
            if self.options.exit_when_done:
                return
        await asyncio.Event().wait()

    async def _end_engine(self, engine: "asyncio.Future[None]") -> BaseException | None:
        """Release all holds, then stop the engine; returns the exception with which the engine failed."""
        if engine.done() and engine.exception() is not None:
            return engine.exception()  # a bug that --check has raised: the leader is not asked again
        self.service.release_all()
        engine.cancel()
        try:
            await engine
        except asyncio.CancelledError:
            if not engine.cancelled():
                raise
        except Exception as error:
            return error
        return None

    def _signalled(self) -> None:
        """The first signal asks for an end in order; the next signal ends the process at once."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        self.stop(soon=True)

    async def _drain(self, servicer: ConsoleServicer, probe: Any) -> None:
        """End sessions and feeds, then flush, write and sync their last events."""
        await probe.enter_graceful_shutdown()
        await servicer.end_sessions(HANDLERS_GRACE_S)
        self.service.broadcaster.flush()
        recorder = self.service.recorder
        if recorder is not None:
            with anyio.move_on_after(SYNC_GRACE_S):
                await anyio.to_thread.run_sync(recorder.end, abandon_on_cancel=True)


def map_large_blocks() -> None:
    """Give large blocks a mapping of their own, where the C library is glibc.

    By default glibc raises its threshold to the largest block that was freed, so keyframes and tables that have grown
    leave holes in the heap. At 600,000 events a recorded daemon takes 270 MB instead of 330.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(M_MMAP_THRESHOLD, MAPPED_BYTES)


def thread_ids() -> set[int]:
    """The threads of this process, as the system numbers them; none where it does not tell."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def give_way(threads: set[int]) -> None:
    """Lower the priority of the RPC library's threads, which the threads that they start inherit.

    On a machine of two cores a flood of connections took 5 to 6 % from the loop's thread, which decides for engines,
    by waking these threads on its core. With this priority it takes 3 to 4 %, and renewals of leases keep their p99.
    At 10 it takes 1 %, and renewals take up to 250 ms.
    """
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, mine + RPC_NICE)


async def run_daemon(options: DaemonOptions, *, on_ready: Callable[[Daemon], None] | None = None) -> Summary:
    """Run a daemon to its end. ``on_ready`` is called once it can be connected to.

    Raises ``UsageError`` when it may not listen or record at the given places.
    """
    map_large_blocks()
    return await Daemon(options).run(on_ready)
