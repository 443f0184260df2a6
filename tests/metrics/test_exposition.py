"""The exposition through an independent parser, the page over HTTP, the dashboard's queries against the real page."""

import asyncio
import contextlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.state import CacheState
from kvbm_console.engines.embedded import default_engine_config, default_leader_config
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.stream import EventStream
from kvbm_console.engines.workloads import parse_workload
from kvbm_console.metrics.collect import View, collect
from kvbm_console.metrics.exposition import Family, render
from kvbm_console.metrics.http import CONNECTIONS_MAX, MetricsServer
from kvbm_console.metrics.texts import HELP
from server.daemon import Daemon
from server.options import DaemonOptions
from tests.kv_events.payloads import batch, stored

Samples = dict[str, list[tuple[dict[str, str], float]]]
FUNCTIONS: Final = {
    "sum", "max", "min", "rate", "increase", "by", "on", "group_left", "and", "or",
}


def parse(text: str) -> Samples:
    """Samples by full name, through the parser of the Prometheus project."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


async def page(port: int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[bytes, str]:
    """Status line and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(10):
            answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body.decode()


@pytest_asyncio.fixture
async def real_page(tmp_path: Path) -> str:
    """The page of a daemon whose simulated engine ran to its end, that recorded, and that followed a stream."""
    workload = parse_workload("multiturn", 60)
    options = DaemonOptions(
        config=default_leader_config(workload), listen=f"unix:{tmp_path}/d.sock", workload=workload,
        engine=default_engine_config(workload), speed=None, record=tmp_path / "r", handle_signals=False,
        metrics="127.0.0.1:0",
    )
    text = ""

    async def scrape(daemon: Daemon) -> None:
        nonlocal text
        assert daemon.metrics is not None
        try:
            totals = daemon.service.state.totals
            while not (sum(totals.finished) and totals.moved_blocks and totals.preemptions):
                await daemon.service.changed.wait()
            _status, text = await page(daemon.metrics.port)
        finally:
            daemon.stop()

    tasks: list[asyncio.Task[None]] = []

    def ready(daemon: Daemon) -> None:
        publisher = Publisher(endpoint="tcp://127.0.0.1:9")
        stream = EventStream(daemon.service.dispatcher, daemon.service.new_source(), label=publisher.label)
        stream.accept(2, batch(stored(1, 2)))
        daemon.streams = OneStream(stream)  # type: ignore[assignment]
        tasks.append(asyncio.ensure_future(scrape(daemon)))

    await Daemon(options).run(ready)
    await tasks[0]
    return text


class OneStream:
    """As ``Streams`` for a stream that nobody serves."""

    def __init__(self, stream: EventStream) -> None:
        from kvbm_console.engines.kv_events.streams import StreamRow
        from kvbm_console.engines.kv_events.zmq_source import SourceStatus

        self._row = StreamRow(stream.source, stream.label, stream.counts, SourceStatus())

    def rows(self) -> list[Any]:
        return [self._row]

    async def run(self) -> None:
        """Nothing to follow."""

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.asyncio
async def test_the_page_of_a_real_run(real_page: str) -> None:
    found = parse(real_page)
    assert set(HELP) == {line.split()[2] for line in real_page.splitlines() if line.startswith("# HELP")}

    def value(name: str, **labels: str) -> float:
        (sample,) = [one for has, one in found[name] if labels.items() <= has.items()]
        return sample

    assert value("kvbm_prompt_blocks_total") > 0
    assert value("kvbm_tier_capacity_blocks", tier="g2") > 0
    capacity = value("kvbm_tier_capacity_blocks", tier="g2")
    conditions = [one for has, one in found["kvbm_tier_blocks"] if has["tier"] == "g2"]
    assert sum(conditions) == capacity
    assert value("kvbm_moved_blocks_total", source="g1", target="g2") > 0
    assert value("kvbm_recorder_state", state="recording") == 1
    assert value("kvbm_stream_uncertain", source="2") == 1
    assert value("kvbm_stream_lost_batches_total", publisher="127.0.0.1:9") == 2
    assert "h2d" not in real_page
    assert "d2h" not in real_page


@pytest.mark.asyncio
async def test_every_query_of_the_dashboard_is_answered_by_the_real_page(real_page: str) -> None:
    found = parse(real_page)
    declared = {line.split()[2] for line in real_page.splitlines() if line.startswith("# TYPE")}
    dashboard = json.loads((files("kvbm_console.metrics") / "grafana.json").read_text())
    queries = [(target["expr"], target["legendFormat"]) for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 25
    used: set[str] = set()
    for query, legend in queries:
        names = set(re.findall(r"kvbm_\w+", query))
        assert names, query
        assert names <= declared, query
        used |= names
        kept: set[str] = set()
        for group, name in re.findall(r"by \(([^)]*)\) \((?:\w+\()?(kvbm_\w+)", query):
            labels = {label.strip() for label in group.split(",")}
            kept |= labels
            for has, _value in found.get(name, []):
                assert labels <= set(has), f"{query}: {name} has {sorted(has)}"
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept, query
        for matcher in re.findall(r"\{(\w+)=\"(\w+)\"\}", query):
            assert any(matcher in has.items() for name in names for has, _ in found[name]), query
        for name in re.findall(r"(?:rate|increase)\((\w+)", query):
            assert name.endswith("_total"), query
        words = set(re.findall(r"[a-z_]+", re.sub(r"kvbm_\w+|\[\$\w+\]|\{[^}]*\}|by \([^)]*\)", "", query)))
        assert words <= FUNCTIONS, query
    # Nothing to show yet is possible for what did not happen in the run, and for nothing else.
    assert {name for name in used if name not in found} <= {"kvbm_candidate_blocks", "kvbm_oldest_candidate_seconds"}


def test_each_help_says_what_a_bad_value_means() -> None:
    for name, (kind, text) in HELP.items():
        assert len(text) > 40, name
        assert text.endswith("."), name
        assert re.search(
            r"above|grow|flat|near|high|many|fall|behind|1 when|0:|far|degraded|not\.|expired|1 never|any|full|as fast|"
            r"thousands|without up|all the time", text, re.IGNORECASE,
        ), (name, kind)


def test_a_daemon_of_nothing_exposes_every_family() -> None:
    text = render(collect(View(CacheState(), LeaderConfig(), 0, 0, 0, None, ())))
    assert [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")] == list(HELP)
    assert "kvbm_tier_resident_blocks " not in [line.split("{")[0] for line in text.splitlines() if line[0] != "#"]


def test_labels_and_values_survive_the_independent_parser() -> None:
    family = Family("kvbm_x", "gauge", 'a "help" with \\ and\nlines')
    nasty = 'quote " backslash \\ line\nbreak {x="y"} ünï'
    family.add(1.5, {"publisher": nasty})
    family.add(2**53, {"publisher": ""})
    family.add(None, {"publisher": "unknown"})
    assert parse(render([family])) == {"kvbm_x": [({"publisher": nasty}, 1.5), ({"publisher": ""}, float(2**53))]}
    with pytest.raises(ValueError, match="no name for a counter"):
        Family("kvbm_x", "counter", "")


@pytest.mark.asyncio
@pytest.mark.parametrize(("request_", "status"), [
    (b"GET /metrics?name[]=x HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
    (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
    (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
    (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
    (b"\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
    (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n", b""),
])
async def test_requests(request_: bytes, status: bytes) -> None:
    server = MetricsServer("127.0.0.1:0", lambda: "up 1\n")
    await server.start()
    try:
        found = await page(server.port, request_)
    except ConnectionError:
        found = (b"", "")
    await server.close()
    assert found[0] == status
    if status.endswith(b"OK"):
        assert found[1] == ("up 1\n" if request_.startswith(b"GET") else "")


@pytest.mark.asyncio
async def test_too_many_scrapers_are_turned_away() -> None:
    server = MetricsServer("127.0.0.1:0", lambda: "up 1\n")
    await server.start()
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS_MAX)]
    status, _ = await page(server.port)
    assert status == b"HTTP/1.1 503 Service Unavailable"
    await server.close()
    for _, writer in idle:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.asyncio
async def test_an_address_that_is_wrong_or_taken_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        MetricsServer("nowhere", str)
    first = MetricsServer("127.0.0.1:0", str)
    await first.start()
    with pytest.raises(UsageError, match="cannot serve metrics"):
        await MetricsServer(f"127.0.0.1:{first.port}", str).start()
    await first.close()
