"""``serve --otlp`` against a real collector over HTTP: every request a trace, its states side by side and whole.

Law of this file: what the collector got is compared with the facts of the daemon that sent it.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import FinishReason
from kvbm_console.core.stimuli import RequestArrived, RequestFinished
from kvbm_console.service import LeaderService
from kvbm_console.simulator.embedded import default_engine_config, default_leader_config, parse_workload
from kvbm_console.stream.ring import Ring
from server.daemon import Daemon, run_daemon
from server.options import DaemonOptions
from server.spans import SpanExport, traces_url

REQUESTS: Final = 40


class Collector:
    """Takes OTLP over HTTP, as a collector does: one POST, one answer."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.posts = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                lengths = [int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")]
                body = await reader.readexactly(lengths[0])
                self.take(lines[0].split()[1], body)
                writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        self.posts += 1
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans


@contextlib.asynccontextmanager
async def collecting(status: int = 200) -> AsyncIterator[tuple[Collector, str]]:
    collector = Collector(status)
    server = await asyncio.start_server(collector.serve, "127.0.0.1", 0)
    try:
        yield collector, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def daemon_options(tmp_path: Path, otlp: str) -> DaemonOptions:
    workload = parse_workload("multiturn", REQUESTS)
    return DaemonOptions(
        config=default_leader_config(workload), listen=f"unix:{tmp_path}/d.sock", workload=workload,
        engine=default_engine_config(workload), speed=None, handle_signals=False, otlp=otlp, exit_when_done=True,
    )


@pytest.mark.asyncio
async def test_every_request_is_a_trace_and_its_states_fill_it(tmp_path: Path) -> None:
    async with collecting() as (collector, address):
        summary = await run_daemon(daemon_options(tmp_path, address))
    assert collector.paths == {"/v1/traces"}
    assert {one["service.name"] for one in collector.resources} == {"kvbm-console"}
    traces: dict[bytes, list[Any]] = defaultdict(list)
    for span in collector.spans:
        traces[span.trace_id].append(span)
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert len(roots) == len(traces) == REQUESTS == summary.requests_finished
    hits = [0, 0, 0, 0]
    for root in roots:
        told = attributes(root)
        assert told["kvbm.complete"] is True
        assert told["kvbm.finish_reason"] in ("length", "stop")
        for tier in range(4):
            hits[tier] += told[f"kvbm.hit_blocks.g{tier + 1}"]
        children = [span for span in traces[root.trace_id] if span.parent_span_id]
        assert all(span.parent_span_id == root.span_id for span in children)
        states = sorted(
            (span for span in children if "kvbm.computed_tokens" in attributes(span)),
            key=lambda span: attributes(span)["kvbm.seq"],
        )
        assert states[0].start_time_unix_nano == root.start_time_unix_nano
        assert states[-1].end_time_unix_nano == root.end_time_unix_nano
        for one, following in pairwise(states):
            assert one.end_time_unix_nano == following.start_time_unix_nano
        first_token = [event for event in root.events if event.name == "first token"]
        assert len(first_token) == 1
    assert {f"g{tier}": blocks for tier, blocks in enumerate(hits, 1) if blocks} == {
        tier: blocks for tier, blocks in summary.hits_by_tier.items() if blocks
    }
    assert any(span.name.startswith("copy ") for span in collector.spans)


@pytest.mark.asyncio
async def test_a_collector_that_refuses_ends_nothing_and_is_counted(tmp_path: Path) -> None:
    async with collecting(status=400) as (collector, address):
        daemon = Daemon(daemon_options(tmp_path, address))
        await daemon.run()
    assert daemon.spans is not None
    counts = daemon.spans.counts()
    assert collector.posts
    assert counts["exported"] == 0
    assert counts["failed"] == counts["ended"] > REQUESTS


@pytest.mark.asyncio
async def test_no_collector_ends_nothing(tmp_path: Path) -> None:
    summary = await run_daemon(daemon_options(tmp_path, "http://127.0.0.1:9"))
    assert summary.requests_finished == REQUESTS


class Kept(SpanExporter):
    """Keeps spans in memory."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


@pytest.mark.asyncio
async def test_an_exporter_that_falls_behind_says_what_it_lost() -> None:
    service = LeaderService(LeaderConfig(), clock=iter(range(10**6)).__next__, ring=Ring(8))
    service.start()

    def arrive(name: str) -> None:
        service.submit(RequestArrived, name, b"", 10, 1, 0, None)

    def finish(name: str) -> None:
        service.submit(RequestFinished, name, b"", FinishReason.STOP)
        service.broadcaster.flush()

    arrive("long")
    for number in range(8):  # more than the ring keeps, so that the next snapshot is a new one
        arrive(f"early-{number}")
        finish(f"early-{number}")
    kept = Kept()
    export = SpanExport(service, "http://127.0.0.1:9", "test", exporter=lambda url: kept)
    async with anyio.create_task_group() as group:
        group.start_soon(export.run)
        await asyncio.sleep(0)  # it has subscribed, and folds the first snapshot on its thread
        for number in range(40):  # without a pause for the reader: the ring forgets most of it
            arrive(f"short-{number}")
            finish(f"short-{number}")
        finish("long")
        group.cancel_scope.cancel()
    await export.finish()
    roots = {span.attributes["kvbm.request"]: span for span in kept.spans if span.parent is None and span.attributes}
    lost = [event for event in roots["long"].events if event.name == "events lost"]
    assert len(lost) == 1
    assert roots["long"].attributes is not None
    assert roots["long"].attributes["kvbm.complete"] is False
    assert len(roots) < 40


@pytest.mark.parametrize("bad", ["collector:4318", "ftp://collector", "http://", "", "http://[::1"])
def test_an_endpoint_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="otlp must be http"):
        traces_url(bad)


@pytest.mark.parametrize(("endpoint", "url"), [
    ("http://c:4318", "http://c:4318/v1/traces"), ("http://c:4318/", "http://c:4318/v1/traces"),
    ("https://c/in/v1/traces", "https://c/in/v1/traces"),
])
def test_an_endpoint_without_a_path_gets_the_one_of_the_specification(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url
