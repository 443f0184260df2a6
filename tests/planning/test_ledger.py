"""The ledger against the leader whose place it takes, over random machines and loads, and as the command runs both.

Law of this file: the report, byte for byte, and every stats line are those of the full leader, with iterations taken
together and one by one. ``KVBM_FULL=1`` compares ten times as many machines.
"""

import os
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import InternalError
from kvbm_console.planning import run as run_module
from kvbm_console.planning.ledger import MachineLedger
from kvbm_console.planning.meter import Meter, StatsLine
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.report import InstanceMeasures, make_report, measure, row_of
from kvbm_console.planning.run import counted, simulate
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.device_pool import DevicePool
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.workloads import Request, Workload
from tests.simulator.loads import Load, cloned, engine_of, load_of

FULL = bool(os.environ.get("KVBM_FULL"))
FIRST_SEED = int(os.environ.get("KVBM_SEED", "1"))
TOGETHER = 20
FEW = range(FIRST_SEED, FIRST_SEED + 100, TOGETHER)
MANY = range(FIRST_SEED + 1_000, FIRST_SEED + (6_000 if FULL else 1_600), TOGETHER)

Told = tuple[bytes, list[StatsLine], list[dict[str, Any]]]
"""The report, the stats lines and the rows of requests."""


def document_of(part: InstanceMeasures) -> bytes:
    options = SimulateOptions(trace="load", total_kv_blocks=1, slo_ttft=60_000_000, slo_itl=9_000_000)
    return msgspec.json.encode(make_report(options, None, [part]))


def with_leader(engine: EngineConfig, load: Workload, block: int, every: int, *, windows: bool) -> Told:
    """Report and stats lines of the machine with a leader that verifies itself."""
    lines: list[StatsLine] = []
    rows: list[dict[str, Any]] = []
    meter = Meter(
        stats_every=every, stats=lines.append, ended=lambda record: rows.append(row_of(0, record, block))
    )
    rig = build(LeaderConfig(block_tokens=block), engine, load, publish=meter)
    meter.watch(rig.leader.state)

    def begin() -> None:
        rig.engine.windows = windows

    meter.after_prefill = begin
    rig.run_to_end()
    meter.point("decode")
    return document_of(measure(rig, meter)), lines, rows


def with_ledger(engine: EngineConfig, load: Workload, block: int, every: int, *, windows: bool) -> Told:
    """The same without one."""
    lines: list[StatsLine] = []
    rows: list[dict[str, Any]] = []
    ledger = MachineLedger(
        engine, load, block, stats_every=every, stats=lines.append, windows=windows,
        ended=lambda record: rows.append(row_of(0, record, block)),
    )
    ledger.run_to_end()
    ledger.point("decode")
    return document_of(ledger.measures()), lines, rows


def compare(seed: int, *, clones: bool = False) -> dict[str, Any]:
    """The report of the machine of a seed, which is the same four times."""
    dice = random.Random(seed)
    block = dice.choice([1, 4, 16, 16, 16])
    load = load_of(dice, block)
    if clones:
        load = cloned(dice, load)
    engine, every = engine_of(dice, load, block), dice.choice([1, 2, 7, 10, 64])
    document, lines, rows = with_leader(engine, load, block, every, windows=dice.random() < 0.5)
    for windows in (False, True):
        mine, told, ended = with_ledger(engine, load, block, every, windows=windows)
        assert told == lines
        assert ended == rows
        assert mine == document
    decoded: dict[str, Any] = msgspec.json.decode(document)
    return decoded


def compare_all(first: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + TOGETHER):
        document = compare(seed)
        for name in ("requests_too_large", "requests_refused", "preemptions"):
            seen[name] += document[name] > 0
        seen["hits"] += document["hit_blocks"]["G1"] > 0
        seen["evicted"] += document["evicted_blocks"]["G1"] > 0
    return seen


@pytest.mark.parametrize("first", FEW)
def test_the_ledger_counts_what_the_leader_counts(first: int) -> None:
    seen = compare_all(first)
    if FIRST_SEED == 1:
        assert min(seen[name] for name in ("requests_refused", "preemptions", "hits", "evicted")) > 0


def compare_clones(first: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + TOGETHER):
        document = compare(seed, clones=True)
        for name in ("requests_cloned", "requests_too_large", "preemptions"):
            seen[name] += document[name] > 0
        assert (document["preempted_fraction"] or 0) <= 1
        arrived = document["requests_arrived"] - document["requests_too_large"] - document["requests_refused"]
        assert document["requests_completed"] == arrived + document["requests_cloned"]
    return seen


@pytest.mark.parametrize("first", FEW[:3])
def test_the_ledger_counts_clones_as_the_leader_does(first: int) -> None:
    seen = compare_clones(first)
    if FIRST_SEED == 1:
        assert seen["requests_cloned"] > 10
        assert seen["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", MANY)
def test_the_ledger_counts_clones_as_the_leader_does_on_hundreds_of_machines(first: int) -> None:
    compare_clones(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", MANY)
def test_the_ledger_counts_what_the_leader_counts_on_hundreds_of_machines(first: int) -> None:
    compare_all(first)


@pytest.mark.parametrize("changes", [
    {"total_kv_blocks": 500}, {"total_kv_blocks": 60, "stats_every": 3}, {"total_kv_blocks": 12},
    {"total_kv_blocks": 90, "instances": 3, "cleanup": "incremental"}, {"total_kv_blocks": 70, "block_size": 5},
])
def test_simulate_says_the_same_without_a_leader(changes: dict[str, Any]) -> None:
    trace = "multiturn:requests=60,sessions=9,system=64,user=48,output=70,turns=3,think=0.2"
    options = SimulateOptions(trace=trace, **changes)
    assert counted(options)
    told: list[tuple[bytes, list[StatsLine]]] = []
    for leader in (False, True):
        lines: list[StatsLine] = []
        ran = simulate(options, stats=lines.append, leader=leader)
        told.append((msgspec.json.encode(ran.document), lines))
        assert ran.records == []
    assert told[0] == told[1]
    assert [line.point for line in told[0][1]][-2:] == ["decode", "cleanup"]


@pytest.mark.parametrize(("changes", "keep_records"), [
    ({"check": True}, False), ({"hosts": 2}, False), ({"cleanup": "none"}, False), ({}, True),
    ({"kv_cpu_blocks": 10, "check": True}, False), ({"kv_disk_blocks": 10}, True),
])
def test_whoever_looks_at_more_than_the_report_gets_a_leader(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], keep_records: bool
) -> None:
    def nobody(*args: Any, **named: Any) -> MachineLedger:
        raise AssertionError("a ledger was made")

    monkeypatch.setattr(run_module, "build_ledger", nobody)
    options = SimulateOptions(trace="multiturn:requests=3,sessions=1,output=4", total_kv_blocks=100, **changes)
    simulate(options, keep_records=keep_records)
    with pytest.raises(AssertionError, match="a ledger was made"):
        simulate(SimulateOptions(trace=options.trace, total_kv_blocks=100))


def test_what_a_leader_refuses_the_ledger_refuses() -> None:
    def one(name: str, prompt: int = 20, hashes: tuple[int, ...] = (1,), output: int = 3, at_ns: int = 0) -> Request:
        return Request(name, at_ns, hashes, (7, 8), prompt, output)

    load = Load(random.Random(1), [
        one("good", output=30), one("good"), one(""), one("x" * 2_000), one("none", 0, ()), one("zero", 20, (0,)),
        one("many", 20, (1, 2)), one("debt", output=-1), one("late", hashes=(5,), at_ns=900_000_000),
        one("good", at_ns=900_000_000),
    ], 0.0)
    engine = EngineConfig(g1_blocks=10)
    told = with_ledger(engine, load, 16, 1, windows=True)
    assert told == with_leader(engine, load, 16, 1, windows=True)
    assert msgspec.json.decode(told[0])["requests_refused"] == 7


def test_the_most_blocks_in_use_are_seen_where_a_preemption_follows_at_once() -> None:
    """Both need a second block in the same iteration: the first one gets the last, and the other gives its only one."""
    load = Load(random.Random(1), [Request("a", 0, (1,), (2,), 4, 5), Request("b", 0, (3,), (4,), 4, 5)], 0.0)
    engine = EngineConfig(g1_blocks=3)
    told = with_ledger(engine, load, 4, 1, windows=True)
    assert told == with_leader(engine, load, 4, 1, windows=True)
    document = msgspec.json.decode(told[0])
    assert (document["preemptions"], document["blocks_used_peak"]) == (1, 3)
    assert max(line.blocks_used for line in told[1]) == 2


def test_a_pool_that_loses_a_block_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    release = DevicePool.release

    def forgetful(pool: DevicePool, ids: Any) -> None:
        release(pool, ids[1:])

    monkeypatch.setattr(DevicePool, "release", forgetful)
    ledger = MachineLedger(EngineConfig(g1_blocks=200), load_of(random.Random(3), 16), 16)
    with pytest.raises(InternalError, match=r"still held|is stuck"):
        ledger.run_to_end()
