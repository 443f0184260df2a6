"""Replays of an engine with several groups of layers and a host tier, whose own connector decides about copies.

Law of this file: hits and copies are those of vLLM's own scheduler in ``recordings/vllm/mixed``.
"""

from pathlib import Path

import msgspec
import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import POLICIES
from kvbm_console.planning.connector import ConnectorLedger
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.plan import changes_of
from kvbm_console.planning.recorded import CopyName, RecordedLoad, RecordedWorkload, read_run
from kvbm_console.planning.run import build_ledger, simulate
from kvbm_console.simulator.link import Fault
from kvbm_console.simulator.offloading_tier import HostCopy
from tests.tap.kept import run_of


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
