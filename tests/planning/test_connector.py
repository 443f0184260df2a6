"""Runs of an engine with a host tier of its own, whose connector decides about copies.

Law of this file: hits and copies are those of vLLM's own scheduler in ``recordings/vllm/mixed``, and iterations taken
together change no figure.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.planning.connector import ConnectorLedger
from kvbm_console.planning.meter import StatsLine
from kvbm_console.planning.options import OFFLOAD_PRESETS, SimulateOptions
from kvbm_console.planning.plan import changes_of
from kvbm_console.planning.recorded import CopyName, RecordedLoad, RecordedWorkload, read_run
from kvbm_console.planning.report import make_report, row_of, text_of
from kvbm_console.planning.run import build_ledger, simulate
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link import DEFAULT_LINKS, Fault
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.offloading_tier import HostCopy, OffloadingTier
from tests.simulator.loads import cloned, engine_of, load_of
from tests.tap.kept import run_of

CHATS = "multiturn:requests=60,sessions=9,system=64,user=48,output=70,turns=3,think=0.2"


def options_of(run: RecordedLoad) -> SimulateOptions:
    """The options of its recorded machine."""
    return SimulateOptions(trace=run.name, **run.option_fields())


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> RecordedLoad:
    """Three groups of layers, two of them with a window, and a host tier."""
    path = tmp_path_factory.mktemp("mixed")
    run_of("mixed").record(path, [64])
    return read_run(str(path))


def test_a_tap_tells_the_windows_and_what_is_kept_of_them(mixed: RecordedLoad) -> None:
    """The tap reports the group that sees all tokens, which is the second of vLLM's."""
    engine, leader = mixed.machine.engine, mixed.machine.leader
    assert (engine.groups, engine.group_numbers, engine.retention) == ((0, 64, 64), (1, 0, 2), 0)
    assert (leader.g2_blocks, leader.offload_window_only) == (100, True)
    assert mixed.notes == []


def test_recordings_without_those_are_read_for_them(mixed: RecordedLoad, tmp_path: Path) -> None:
    """Blocks that are gone bound the windows, and the copies tell that not all blocks go down."""
    run_of("mixed", older=True).record(tmp_path, [64])
    run = read_run(str(tmp_path))
    assert run.machine.engine == mixed.machine.engine
    assert run.machine.leader == mixed.machine.leader
    assert simulate(options_of(run)).document["prefix_hit_rate"] == run.hit_rate


def test_every_copy_of_such_an_engine_is_made_again(mixed: RecordedLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those down with the same blocks, and loads of as many blocks for the same requests."""
    made: list[tuple[CopyName, int]] = []
    start = ConnectorLedger._start

    def note(ledger: ConnectorLedger, copy: HostCopy) -> None:
        made.append((copy.request if copy.is_load else tuple(sorted(copy.hashes)), len(copy.keys)))
        start(ledger, copy)

    monkeypatch.setattr(ConnectorLedger, "_start", note)
    simulate(options_of(mixed))
    assert sorted(made, key=str) == sorted(((name, copy.blocks) for (name, _), copy in mixed.copies.items()), key=str)
    assert sum(isinstance(name, str) for name, _ in made) >= 3


def test_such_an_engine_can_have_another_policy_or_size_and_no_disk_tier(mixed: RecordedLoad) -> None:
    options = options_of(mixed)
    rates = {}
    for policy in ("lrfu_auto", "learned"):
        changed = msgspec.structs.replace(options, policy=msgspec.structs.replace(options.policy, policy=policy))
        rates[policy] = simulate(changed).document["prefix_hit_rate"]
    assert all(0.2 < rate < 0.6 for rate in rates.values())
    larger = simulate(msgspec.structs.replace(options, kv_cpu_blocks=2_000)).document
    assert larger["hit_blocks"]["G2"] > simulate(options).document["hit_blocks"]["G2"]
    with pytest.raises(UsageError, match="--kv-disk-blocks is not for an engine with several groups of layers"):
        simulate(msgspec.structs.replace(options, kv_disk_blocks=100))
    assert all(change.options.kv_disk_blocks == 0 for change in changes_of(options))
    assert {change.options.policy.policy for change in changes_of(options)} == set(POLICIES)


def test_records_of_such_a_run_are_those_of_its_requests(mixed: RecordedLoad) -> None:
    run = simulate(options_of(mixed), keep_records=True)
    assert sorted(record.request for record in run.records) == sorted(request.request for request in mixed.requests)
    assert sum(sum(record.hits) for record in run.records) <= sum(run.document["hit_blocks"].values())


def test_a_load_that_fails_is_computed(mixed: RecordedLoad) -> None:
    ledger = build_ledger(options_of(mixed), RecordedWorkload(mixed.name.partition(":")[2]))
    assert isinstance(ledger, ConnectorLedger)
    ledger.mover.faults = lambda order: Fault() if order.route.is_load else None
    ledger.run_to_end()
    totals = ledger.measures().totals
    assert totals.lost_blocks > 0
    assert totals.hit_blocks[1] == 0


# --- any trace ---


def test_the_preset_of_vllm_has_its_connector() -> None:
    """A trace that nobody recorded, with the connector that replays of vLLM have."""
    options = SimulateOptions(trace=CHATS, total_kv_blocks=90, kv_cpu_blocks=200, **OFFLOAD_PRESETS["vllm"])
    document = simulate(options).document
    assert document["settings"]["connector"] == "vllm"
    assert document["onboarded_blocks"] > 0
    machine = SimulatedMachine(leader=LeaderConfig(), engine=EngineConfig(g1_blocks=90), own_connector=True)
    recorded = msgspec.structs.replace(options, own_connector=False, machine=machine)
    assert simulate(recorded).document == document
    assert "connector    the host tier follows the rules of vLLM's OffloadingConnector" in text_of(document)


@pytest.mark.parametrize("flag", [{"check": True}, {"kv_disk_blocks": 300}, {"kv_offload_threshold": 0.5}])
def test_a_leader_decides_where_the_connector_lacks_what_is_asked_for(flag: dict[str, Any]) -> None:
    fields = {"trace": CHATS, "total_kv_blocks": 90, "kv_cpu_blocks": 200, **OFFLOAD_PRESETS["vllm"], **flag}
    document = simulate(SimulateOptions(**fields)).document
    assert "connector" not in document["settings"]
    assert document["thrash_rate"] is not None


def test_nobody_says_how_much_thrash_the_connector_has(mixed: RecordedLoad) -> None:
    """No leader counts what came back, so a zero would be a lie."""
    document = simulate(options_of(mixed)).document
    assert document["evicted_blocks"]["G2"] > 0
    assert {document[key] for key in ("thrash_blocks", "thrash_rate", "bc6_thrash_rate")} == {None}
    assert document["thrash"] is None
    assert "thrash  " not in text_of(document)


# --- iterations taken together ---


def told(seed: int, *, windows: bool) -> tuple[dict[str, Any], list[StatsLine], list[dict[str, Any]], int]:
    """The report, stats lines, rows of requests and wide plans of a machine."""
    dice = random.Random(seed)
    block = dice.choice([4, 16])
    load = load_of(dice, block)
    if seed % 4 == 0:
        load = cloned(dice, load)
    leader = LeaderConfig(
        block_tokens=block, g2_blocks=dice.choice([10, 40, 400]), offload_threshold=0.0,
        offload_prompt_only=seed % 5 > 0, asynchronous=seed % 3 > 0,
        eviction=PolicyConfig(policy=dice.choice(("simple_lru", "lrfu_auto", "learned")), used_at_end=True),
    )
    slower = dice.choice([1.0, 1e-2, 1e-4])
    links = [msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s * slower) for link in DEFAULT_LINKS]
    lines: list[StatsLine] = []
    rows: list[dict[str, Any]] = []
    ledger = ConnectorLedger(
        leader, links, engine_of(dice, load, block), load, stats_every=dice.choice([1, 7]), stats=lines.append,
        windows=windows, ended=lambda record: rows.append(row_of(0, record, block)),
    )
    wide = 0
    widen = ledger.engine._widen

    def note(plan: Any, lasts_ns: int) -> None:
        nonlocal wide
        widen(plan, lasts_ns)
        wide += plan.steps > 1

    ledger.engine._widen = note  # type: ignore[method-assign]
    ledger.run_to_end()
    ledger.point("decode")
    options = SimulateOptions(trace="load", total_kv_blocks=1, kv_cpu_blocks=1, own_connector=True,
                              kv_offload_threshold=0.0, slo_ttft=60_000_000, slo_itl=9_000_000)
    return make_report(options, None, [ledger.measures()]), lines, rows, wide


def test_iterations_taken_together_change_no_figure() -> None:
    """Copies that end early, clones, policies that are not vLLM's, and answers that are copied down are among them."""
    wide = 0
    for seed in range(120):
        together, apart = told(seed, windows=True), told(seed, windows=False)
        assert together[:3] == apart[:3], f"seed {seed}"
        assert apart[3] == 0
        wide += together[3]
    assert wide > 100


def test_a_request_that_has_more_to_offer_takes_each_iteration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadingTier, "has_offered", lambda tier, name: True)
    assert any(told(seed, windows=True)[:3] != told(seed, windows=False)[:3] for seed in range(0, 120, 5))
