"""``serve --otlp``: the timelines of requests, sent to an OpenTelemetry collector while they happen.

The exporter reads the ring as one more subscriber and folds its own facts on a thread. The leader neither waits for the
collector nor knows of it. An exporter that falls behind loses events and says so in the traces. A collector that is
slow or gone loses spans, which are counted (``kvbm_otlp_spans_total``).

Law of this file: no failure here ends or delays the daemon.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from kvbm_console.analysis.export.rows import Rows
from kvbm_console.analysis.export.spans import SpanConsumer
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import Walker
from kvbm_console.core.config import require
from kvbm_console.core.snapshots import decode_facts
from kvbm_console.recording.reader import Item
from kvbm_console.service import LeaderService, Snapshot
from kvbm_console.stream.broadcast import Subscriber
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken
from kvbm_console.stream.ring import Lost
from kvbm_console.wire.batches import unpack_events
from kvbm_console.wire.frames import batch_of

log = logging.getLogger("kvbm_console.server")

QUEUE_SPANS_MAX: Final = 16_384
"""Spans in the queue: about as many as a busy engine ends in ten seconds, 2 kB each."""
BATCH_SPANS: Final = 512
BATCH_MS: Final = 1_000
POST_TIMEOUT_S: Final = 2.0
"""A collector in reach answers within this; a daemon that ends waits no longer."""
PATH: Final = "/v1/traces"
"""The path of a collector by the OTLP specification, if the endpoint names no path."""


def traces_url(endpoint: str) -> str:
    """The address that spans are posted to. Raises ``UsageError`` unless it is an HTTP address."""
    try:
        parts = urlsplit(endpoint)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    require(fits, "otlp", "http://HOST:PORT or https://HOST:PORT of a collector", endpoint)
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH


class CountingExporter(SpanExporter):
    """Posts spans and counts them by outcome."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Post a batch; a failure is counted and told once, until the next success."""
        try:
            result = self._inner.export(spans)
        except Exception as error:  # a connection that breaks in a way that the exporter does not know
            result = SpanExportResult.FAILURE
            log.debug("spans were not sent: %s", error)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        else:
            if self.failed == 0:
                log.warning("the collector does not take spans; they are dropped and counted")
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Give up the batches that are being tried again."""
        self._inner.shutdown()


class SpanExport:
    """Follows a service and exports spans. ``run`` until cancelled, then ``finish``."""

    def __init__(
        self, service: LeaderService, endpoint: str, target: str, *,
        exporter: Callable[[str], SpanExporter] | None = None,
    ) -> None:
        url = traces_url(endpoint)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it tells each failed try; we count, tell once
        self.exporter = CountingExporter((exporter or _posting)(url))
        self._service = service
        self._provider = TracerProvider(
            resource=Resource.create({
                "service.name": "kvbm-console", "service.instance.id": service.incarnation, "kvbm.target": target,
            }),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(
            self.exporter, max_queue_size=QUEUE_SPANS_MAX, max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=BATCH_MS,
        ))
        self._consumer = SpanConsumer(
            self._provider.get_tracer("kvbm_console"), service.started_wall_ns - service.started_at_ns
        )
        self._walker = self._new_walker()
        self._subscriber: Subscriber | None = None
        self._thread = anyio.CapacityLimiter(1)
        self._broken = False

    def counts(self) -> dict[str, int]:
        """Spans by outcome: ``ended`` were made, and ``exported`` and ``failed`` of them have left."""
        return {"ended": self._consumer.ended, "exported": self.exporter.exported, "failed": self.exporter.failed}

    def _new_walker(self) -> Walker:
        requests = Requests(self._consumer.request)
        return Walker((Rows(self._consumer, requests), requests), "the stream")

    async def run(self) -> None:
        """Export spans as they end, until cancelled."""
        broadcaster = self._service.broadcaster
        snapshot = self._service.snapshot()
        self._subscriber = broadcaster.subscribe(snapshot.seq, name="otlp")
        await self._take(snapshot)
        while not self._broken:
            await self._drain()
            await self._subscriber.wait()
            self._subscriber.beats = 0

    async def finish(self) -> None:
        """Export the remaining spans, within a bound of time."""
        if self._subscriber is not None and not self._broken:
            await self._drain()
            self._service.broadcaster.unsubscribe(self._subscriber)
            await self._in_thread(self._walker.end)
        with anyio.move_on_after(POST_TIMEOUT_S):
            await anyio.to_thread.run_sync(self._provider.shutdown, abandon_on_cancel=True)

    async def _drain(self) -> None:
        subscriber = self._subscriber
        assert subscriber is not None
        while not self._broken and (item := subscriber.read()) is not None:
            if isinstance(item, Lost):
                snapshot = self._service.go_on_from(subscriber.cursor)
                await self._take(GapSeen(item.first, snapshot.seq - 1, "the exporter fell behind"))
                await self._take(snapshot)
            else:
                await self._take(item)

    async def _take(self, item: bytes | GapSeen | Snapshot) -> None:
        await self._in_thread(lambda: self._walker.take(_decoded(item)))

    async def _in_thread(self, work: Callable[[], Any]) -> None:
        try:
            with anyio.CancelScope(shield=True):  # a cancelled thread would go on beside us
                await anyio.to_thread.run_sync(work, limiter=self._thread)
        except Exception:
            log.exception("spans are not exported any more: the export has a bug")
            self._broken = True


def _decoded(item: bytes | GapSeen | Snapshot) -> Item:
    if isinstance(item, bytes):
        return EventsArrived(unpack_events(batch_of(item)))
    return SnapshotTaken(decode_facts(item.facts)) if isinstance(item, Snapshot) else item


def _posting(url: str) -> SpanExporter:
    return OTLPSpanExporter(endpoint=url, timeout=POST_TIMEOUT_S)
