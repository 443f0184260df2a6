"""The exposition through an independent parser, the page over HTTP, the dashboard's queries against the real page."""

import asyncio
import contextlib
import gc
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as some
from prometheus_client.parser import text_string_to_metric_families

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.auto import RULES
from kvbm_console.core.eviction.policy import PolicyConfig, ghosts_max
from kvbm_console.core.eviction.ranked import unpacked
from kvbm_console.core.ids import Authority, CandidateStatus, EvictRule, Note, Route, SlotState, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import NoteReported, PoolDeclared
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.stream import EventStream
from kvbm_console.metrics import http
from kvbm_console.metrics.collect import Scrape, collect, scrape_of
from kvbm_console.metrics.exposition import Family, render
from kvbm_console.metrics.http import CONNECTIONS_MAX, MetricsServer
from kvbm_console.metrics.texts import HELP
from kvbm_console.recording.reader import Recording
from kvbm_console.service import LeaderService
from kvbm_console.simulator.embedded import default_engine_config, default_leader_config, parse_workload
from kvbm_console.simulator.link import TOKEN_BYTES
from server.daemon import Daemon
from server.options import DaemonOptions
from server.questions import CALL_NS, SAVINGS_NS, SHARE, Role
from tests.engines.payloads import batch, stored

ROOT: Final = Path(__file__).resolve().parents[2]
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


async def run_and_scrape(
    directory: Path, requests: int, enough: Callable[[Daemon], bool], engine: dict[str, int] | None = None,
    **changes: object,
) -> str:
    """The page of a daemon that records a simulated engine and follows a stream, as soon as there is ``enough``."""
    workload = parse_workload("multiturn", requests)
    options = DaemonOptions(
        config=default_leader_config(workload, **changes), listen=f"unix:{directory}/d.sock", workload=workload,
        engine=default_engine_config(workload, **(engine or {})), speed=None, record=directory / "r",
        handle_signals=False, metrics="127.0.0.1:0",
    )
    text = ""

    async def scrape(daemon: Daemon) -> None:
        nonlocal text
        assert daemon.metrics is not None
        try:
            while not enough(daemon):
                await daemon.service.changed.wait()
            await daemon.lints.turn()
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


@pytest_asyncio.fixture
async def real_page(tmp_path: Path) -> str:
    """A page on which everything ordinary has happened."""

    def enough(daemon: Daemon) -> bool:
        totals = daemon.service.state.totals
        return bool(sum(totals.finished) and totals.moved_blocks and totals.preemptions) and (
            daemon.service.leader.memory.prefetch.gauges()["used"] > 0
        )

    return await run_and_scrape(
        tmp_path, 150, enough, {"g1_blocks": 192}, g2_blocks=160, g3_blocks=512, prefetch="chain",
        eviction=PolicyConfig(policy="lrfu_auto"), offload_threshold=0.0,
    )


class OneStream:
    """As ``Streams`` for a stream that nobody serves."""

    def __init__(self, stream: EventStream) -> None:
        from kvbm_console.engines.kv_events.zmq_source import StreamRow

        self._row = StreamRow(stream.source, stream.label, stream.counts, False)

    def rows(self) -> list[Any]:
        return [self._row]

    async def run(self, keep: object = None) -> None:
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


class Account:
    """The true figures of the policies and copies, by reading a recording event by event."""

    def __init__(self, recording: Recording, last_seq: int) -> None:
        self.evicted: Counter[tuple[str, str]] = Counter()
        self.moved: Counter[tuple[str, str]] = Counter()
        self.stored: dict[str, set[int]] = {}
        self.prefetched = 0
        self._recording = recording
        self._last_seq = last_seq
        self._pools: dict[int, Tier] = {}
        self._promoted: dict[int, ev.CandidatePromoted] = {}
        self._guesses: set[int] = set()
        for events in recording.events():
            for event in events:
                if event.seq <= last_seq:
                    self._look(event)

    def _look(self, event: ev.Event) -> None:
        match event:
            case ev.PoolKnown():
                self._pools[event.pool] = event.tier
            case ev.BlocksEvicted():
                self.evicted[self._pools[event.pool].label, event.rule.label] += len(event.ids) // 4
            case ev.BlocksReserved():
                self.stored.setdefault(self._pools[event.pool].label, set()).update(unpack_hashes(event.hashes))
            case ev.CandidatePlanned(slot=None, route=Route.G3_G2):
                self._guesses.add(event.candidate)
            case ev.CandidatePromoted():
                self._promoted[event.candidate] = event
            case ev.CandidateEnded(status=CandidateStatus.COMPLETED):
                copy = self._promoted[event.candidate]
                blocks = len(copy.targets) // 4
                route = (self._pools[copy.source_pool].label, self._pools[copy.target_pool].label)
                self.moved[route] += blocks
                self.prefetched += blocks * (event.candidate in self._guesses)

    def leader(self) -> Leader:
        """Another leader that was told the same up to the same moment."""
        leader = Leader(self._recording.config)
        for stimuli in self._recording.stimuli():
            for stimulus in stimuli:
                if leader.state.seq <= self._last_seq:
                    leader.handle(stimulus)
        assert leader.state.seq == self._last_seq + 1
        return leader


@pytest.mark.asyncio
@pytest.mark.parametrize(("policy", "rules"), [
    ("lrfu_auto", {"reassigned", "recency"}), ("lfu", {"reassigned", "recency", "frequency"}),
])
async def test_policy_copy_and_prefetch_figures_are_those_of_the_recording(
    tmp_path: Path, policy: str, rules: set[str]
) -> None:
    def enough(daemon: Daemon) -> bool:
        counts = daemon.service.leader.memory.prefetch.gauges()
        return min(counts["evicted_unused"], counts["used"], daemon.service.state.totals.evicted_blocks[2]) > 0

    text = await run_and_scrape(
        tmp_path, 150, enough, {"g1_blocks": 192}, g2_blocks=160, g3_blocks=512, offload_threshold=0.0,
        prefetch="chain", eviction=PolicyConfig(policy=policy),
    )
    found = parse(text)

    def value(name: str, **labels: str) -> float:
        (sample,) = [one for has, one in found[name] if labels.items() <= has.items()]
        return sample

    account = Account(Recording.open(tmp_path / "r"), int(value("kvbm_stream_head_seq")))
    by_rule = {
        (has["tier"], has["rule"]): blocks for has, blocks in found["kvbm_policy_evicted_blocks_total"]
    }
    assert by_rule == account.evicted
    assert {rule for _, rule in by_rule} == rules
    for tier in ("g1", "g2", "g3"):
        evicted = sum(blocks for (where, _), blocks in by_rule.items() if where == tier)
        assert value("kvbm_evicted_blocks_total", tier=tier) == evicted
    block_bytes = TOKEN_BYTES * 16
    moved = {(has["source"], has["target"]): moved for has, moved in found["kvbm_moved_bytes_total"]}
    assert moved == {route: blocks * block_bytes for route, blocks in account.moved.items()}
    assert len(moved) >= 4

    other = account.leader()
    for pool in other.lower_pools():
        tier = pool.info.tier.label
        assert value("kvbm_policy_entries", tier=tier) == len(pool.by_hash)
        assert value("kvbm_tier_resident_bytes", tier=tier) == len(pool.by_hash) * block_bytes
        if policy == "lfu":
            assert "kvbm_policy_ghosts" not in found
            continue
        ranks: Any = other.live_memory.policies[pool.info.pool].export()["policy"]
        known = set(unpacked(ranks["keys"]))
        assert known >= account.stored[tier], "and prompts that were never stored there"
        assert value("kvbm_policy_ghosts", tier=tier) == len(known - pool.by_hash.keys())
        assert value("kvbm_policy_ghosts_max", tier=tier) == ghosts_max(len(pool))
        assert value("kvbm_policy_changes_total", tier=tier) == ranks["changes"]
        shown = [one for has, one in found["kvbm_policy_half_life_seconds"] if has["tier"] == tier]
        rule = RULES[ranks["current"]]
        assert shown == ([] if rule.half_life_s is None else [rule.half_life_s])

    guesses = other.memory.prefetch
    fetched, used = value("kvbm_prefetch_fetched_blocks_total"), value("kvbm_prefetch_used_blocks_total")
    assert fetched == account.prefetched
    assert used == fetched - len(guesses.unused) - guesses.evicted
    assert value("kvbm_prefetch_precision_ratio") == used / fetched
    assert value("kvbm_prefetch_coverage_ratio") == used / (used + guesses.from_disk)
    assert value("kvbm_prefetch_timeliness_ratio") == used / (used + guesses.late)
    assert value("kvbm_prefetch_wasted_bytes_total") == guesses.evicted * block_bytes


@pytest.mark.asyncio
async def test_an_undone_stimulus_is_not_counted_among_the_evictions() -> None:
    service = LeaderService(LeaderConfig(g2_blocks=8), lambda: 0)
    service.start()
    leader = service.leader
    leader.evictions[Tier.G2, EvictRule.RECENCY] = 3
    service.broadcaster.flush()
    service.keyframe()
    leader.evictions[Tier.G2, EvictRule.RECENCY] += 4  # a stimulus that ends in a bug
    assert service.dispatcher.recover is not None
    service.dispatcher.recover(NoteReported(0, 0, 0, None, Note.SHUTTING_DOWN, ""), RuntimeError("planted"))
    assert service.leader.evictions == {(Tier.G2, EvictRule.RECENCY): 3}


def test_a_scrape_does_the_same_work_however_many_blocks_there_are() -> None:
    def calls(blocks: int) -> int:
        leader = Leader(LeaderConfig(g2_blocks=20_000, eviction=PolicyConfig(policy="lrfu_auto")))
        leader.handle(PoolDeclared(0, 0, 0, None, 0, 0, Tier.G2, "CPU", 20_000, 16, Authority.LEADER))
        policy = leader.live_memory.policies[0]
        policy.use(list(range(1, blocks)), 0)
        policy.insert(list(range(1, blocks)), 0)
        policy.guard(range(1, blocks // 2), 1, 10**18)
        policy.forget(range(1, blocks, 3))
        count = 0

        def look(frame: object, kind: str, argument: object) -> None:
            nonlocal count
            count += kind in ("call", "c_call")

        gc.collect()
        gc.disable()  # what it would collect in between is work of others
        sys.setprofile(look)
        try:
            text = render(collect(scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=())))
        finally:
            sys.setprofile(None)
            gc.enable()
        (entries,) = parse(text)["kvbm_policy_entries"]
        assert entries[1] > blocks // 2
        return count

    calls(16)  # what is made once is made now
    assert calls(16_000) == calls(16)


def test_hits_in_pinned_blocks_are_a_count_of_their_tier() -> None:
    leader = Leader(LeaderConfig(g2_blocks=64))
    leader.handle(PoolDeclared(0, 0, 0, None, 0, 0, Tier.G2, "CPU", 64, 16, Authority.LEADER))
    policy = leader.live_memory.policies[0]
    policy.pin([1, 2, 3], 2, 0, 10)
    policy.found([1, 2, 3], 5)
    page = render(collect(scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=())))
    (sample,) = parse(page)["kvbm_pinned_hit_blocks_total"]
    assert (sample[0]["tier"], sample[1]) == ("g2", 2)


def test_no_counter_falls_when_a_load_fails() -> None:
    """Prometheus takes a counter that falls for a restart, and adds all of it anew."""
    recording = Recording.open(ROOT / "recordings" / "failed-load.mcap")
    assert recording.config is not None
    leader = Leader(recording.config)
    before: dict[tuple[str, str], float] = {}
    for stimuli in recording.stimuli():
        for stimulus in stimuli:
            leader.handle(stimulus)
            page = render(collect(scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=())))
            for name, samples in parse(page).items():
                for labels, value in samples if name.endswith("_total") else ():
                    series = name, str(labels)
                    assert value >= before.get(series, 0), series
                    before[series] = value
    lost = leader.state.totals.lost_blocks
    assert lost > 0
    for name, blocks in (("kvbm_lost_hit_blocks_total", lost),
                         ("kvbm_hit_blocks_total", sum(leader.state.totals.hit_blocks) + lost)):
        assert sum(value for series, value in before.items() if series[0] == name) == blocks


def test_admissions_after_a_preemption_have_counters_of_their_own() -> None:
    recording = Recording.open(ROOT / "recordings" / "cases" / "preempt-loop.mcap")
    assert recording.config is not None
    leader, preempted = Leader(recording.config), set[int]()
    asked, found = [0, 0], [0, 0]
    for stimuli in recording.stimuli():
        for stimulus in stimuli:
            for event in leader.handle(stimulus).events:
                if isinstance(event, ev.SlotMoved) and event.new is SlotState.PREEMPTED:
                    preempted.add(event.slot)
                elif isinstance(event, ev.PrefixScored):
                    assert event.readmitted == (event.slot in preempted)
                    asked[event.readmitted] += event.prompt_blocks
                    found[event.readmitted] += sum(event.hits)
    page = parse(render(collect(scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=()))))
    told = {name: sum(value for _, value in samples) for name, samples in page.items()}
    assert found[True] > 0
    assert [told["kvbm_prompt_blocks_total"], told["kvbm_readmitted_prompt_blocks_total"]] == asked
    assert [told["kvbm_hit_blocks_total"], told["kvbm_readmitted_hit_blocks_total"]] == found


def test_tokens_are_counted_by_the_size_of_the_engines_blocks() -> None:
    """A watched engine need not have the daemon's size. Hits of engines that differ are not added up."""
    leader = Leader(LeaderConfig(block_tokens=16))
    pages = []
    for source, size in ((1, 64), (2, 32)):
        leader.handle(PoolDeclared(
            source - 1, 0, source, None, 0, 0, Tier.G1, "GPU", 8, size, Authority.OBSERVED))
        leader.state.totals.hit_blocks[0] = 3
        pages.append(parse(render(collect(
            scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=())))))
    (first,) = [value for labels, value in pages[0]["kvbm_matched_tokens_total"] if labels["tier"] == "g1"]
    assert first == 3 * 64
    assert "kvbm_matched_tokens_total" not in pages[1]


def test_own_tiers_that_no_engine_uses_have_no_sample_beside_a_watched_engine() -> None:
    leader = Leader(LeaderConfig(g2_blocks=64, g3_blocks=128))
    for number, (tier, places) in enumerate(((Tier.G2, 64), (Tier.G3, 128))):
        leader.handle(PoolDeclared(number, 0, 0, None, 0, 0, tier, tier.label, places, 16, Authority.LEADER))

    def tiers() -> set[str]:
        page = render(collect(scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=())))
        return {labels["tier"] for name, samples in parse(page).items() for labels, _ in samples
                if name.startswith(("kvbm_tier_", "kvbm_evicted_", "kvbm_policy_")) and "tier" in labels}

    assert tiers() == {"g2", "g3"}
    leader.handle(PoolDeclared(2, 0, 1, None, 0, 0, Tier.G1, "GPU", 32, 16, Authority.OBSERVED))
    assert tiers() == {"g1"}


def test_what_only_an_event_stream_tells_is_left_out_rather_than_shown_as_zero() -> None:
    leader = Leader(LeaderConfig(g2_blocks=0, g3_blocks=0))
    leader.handle(PoolDeclared(0, 0, 1, None, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM))
    found = parse(render(collect(scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=()))))
    for name in (
        "kvbm_evicted_blocks_total", "kvbm_policy_evicted_blocks_total", "kvbm_policy_entries",
        "kvbm_policy_half_life_seconds", "kvbm_prefetch_fetched_blocks_total", "kvbm_prefetch_precision_ratio",
        "kvbm_prefetch_wasted_bytes_total", "kvbm_moved_bytes_total", "kvbm_tier_resident_bytes",
    ):
        assert name in HELP
        assert name not in found, name
    assert found["kvbm_tier_resident_blocks"] == [({"tier": "g1", "medium": "GPU"}, 0.0)]


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
    assert {name for name in used if name not in found} <= {
        "kvbm_candidate_blocks", "kvbm_oldest_candidate_seconds", "kvbm_policy_half_life_seconds",
    }


def test_each_help_says_what_a_bad_value_means() -> None:
    for name, text in HELP.items():
        assert len(text) > 40, name
        assert text.endswith("."), name
        assert re.search(
            r"above|grow|flat|near|high|many|fall|behind|1 when|0:|far|degraded|not\.|expired|1 never|any|full|as fast|"
            r"thousands|without up|all the time", text, re.IGNORECASE,
        ), name


def test_a_daemon_of_nothing_exposes_every_family() -> None:
    text = render(collect(Scrape(CacheState(), LeaderConfig(), 0, 0, 0, None, ())))
    assert [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")] == list(HELP)
    assert "kvbm_tier_resident_blocks " not in [line.split("{")[0] for line in text.splitlines() if line[0] != "#"]


def test_labels_and_values_survive_the_independent_parser() -> None:
    family = Family("kvbm_x", 'a "help" with \\ and\nlines')
    nasty = 'quote " backslash \\ line\nbreak {x="y"} ünï'
    family.add(1.5, {"publisher": nasty})
    family.add(2**53, {"publisher": ""})
    family.add(None, {"publisher": "unknown"})
    assert parse(render([family])) == {"kvbm_x": [({"publisher": nasty}, 1.5), ({"publisher": ""}, float(2**53))]}
    with pytest.raises(ValueError, match="no name for a metric"):
        Family("kvbm x", "")


@given(some.lists(some.text("\\xu01b\x1b\x01\t\n ?\ud800", max_size=8), max_size=6, unique=True))
def test_names_that_differ_are_labels_that_differ_and_print(names: list[str]) -> None:
    """No Prometheus takes a page with the same labels twice."""
    family = Family("kvbm_x", "help", [((("medium", name),), 1.0) for name in names])
    page = render([family])
    assert page.replace("\n", "").isprintable()
    told = parse(page).get("kvbm_x", [])
    assert len({labels["medium"] for labels, _ in told}) == len(names)
    assert len(set(page.splitlines())) == len(names) + 2


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


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.asyncio
async def test_connections_that_say_nothing_are_closed_and_keep_no_scraper_out() -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    server = MetricsServer("127.0.0.1:0", lambda: "up 1\n")
    await server.start()
    idle = []
    for number in range(4 * CONNECTIONS_MAX):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nX: ")
        idle.append((reader, writer))
        if number % CONNECTIONS_MAX == 0:
            assert await page(server.port) == (b"HTTP/1.1 200 OK", "up 1\n")
    assert await page(server.port) == (b"HTTP/1.1 200 OK", "up 1\n")
    for reader, _ in idle[: 3 * CONNECTIONS_MAX]:
        async with asyncio.timeout(2):  # well before the 5 s that a request may take
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "the oldest are closed"
    before = descriptors()
    await server.close()
    for _, writer in idle:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert not logged, "nothing is printed for any of them"
    # The listener, at most so many of its connections, and the other ends of all of them.
    assert before - descriptors() <= 1 + CONNECTIONS_MAX + len(idle)


@pytest.mark.asyncio
async def test_a_crowd_that_comes_at_once_closes_nobody_who_had_no_time_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request was a millisecond behind its connection, and others came in between (seed 5243 of the simulation)."""
    monkeypatch.setattr(http, "ASK_SECONDS_MIN", 60.0)
    server = MetricsServer("127.0.0.1:0", lambda: "up 1\n")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS_MAX + 8)]
    for _ in range(8 * CONNECTIONS_MAX):
        await asyncio.sleep(0)  # all that the server accepts
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.read()).endswith(b"up 1\n")
    await server.close()
    for _, one in [(reader, writer), *crowd]:
        one.transport.abort()


@pytest.mark.asyncio
async def test_answers_that_nobody_reads_are_given_up_and_keep_no_scraper_out_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "READ_SECONDS_MIN", 0.0)
    large = "# a page that no socket's buffer takes\n" * 500_000
    pages = [large] * CONNECTIONS_MAX + ["up 1\n"] * CONNECTIONS_MAX
    server = MetricsServer("127.0.0.1:0", lambda: pages.pop(0))
    await server.start()
    deaf = []
    for _ in range(CONNECTIONS_MAX):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await reader.read(1)  # it is being answered
        deaf.append(writer)
    assert await page(server.port) == (b"HTTP/1.1 200 OK", "up 1\n")
    async with asyncio.timeout(2):  # well before the 5 s that a reader has
        await server.close()
    for writer in deaf:
        writer.transport.abort()


@pytest.mark.asyncio
async def test_a_flood_of_scrapes_spends_a_bounded_share_of_the_loop() -> None:
    """Sixteen scrapers that ask again at once once took the loop from the engine."""
    role, work_ns, pages = Role(), 1_000_000, 0

    def made() -> str:
        nonlocal pages
        pages += 1
        end = time.thread_time_ns() + work_ns
        while time.thread_time_ns() < end:
            pass
        return "up 1\n"

    server = MetricsServer("127.0.0.1:0", made, partial(role.turn, "scraper"))
    await server.start()
    began = time.monotonic()
    for _ in range(10):
        assert await page(server.port) == (b"HTTP/1.1 200 OK", "up 1\n")

    async def scrapes() -> None:
        while True:
            with contextlib.suppress(OSError):
                await page(server.port)

    flood = [asyncio.ensure_future(scrapes()) for _ in range(2 * CONNECTIONS_MAX)]
    await asyncio.wait(flood, timeout=1.0)
    for one in flood:
        one.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    passed_ns = round((time.monotonic() - began) * 1e9)
    await server.close()
    lanes = 2
    assert pages * (work_ns + CALL_NS) <= lanes * (SAVINGS_NS + passed_ns // SHARE + 2 * work_ns)


@pytest.mark.asyncio
async def test_an_address_that_is_wrong_or_taken_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        MetricsServer("nowhere", str)
    first = MetricsServer("127.0.0.1:0", str)
    await first.start()
    with pytest.raises(UsageError, match="cannot serve metrics"):
        await MetricsServer(f"127.0.0.1:{first.port}", str).start()
    await first.close()
