"""Copies, tiers and calls of vLLM's own connectors, against the connectors' own accounting after every step."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from vllm.v1.metrics.stats import PrefixCacheStats

from kvbm_console.core import events as ev
from kvbm_console.core.ids import CandidateStatus, SlotState, Tier
from kvbm_console.tap import copies
from kvbm_console.tap import vllm as binding
from tests.vllm.copied import Published, blocks_shown, ended, of_offloading, of_simple, shown, sizes_are_right
from tests.vllm.engine import BLOCK, PAGE, Engine, named, offloading
from tests.vllm.test_tap import Kept, watching, workload
from tests.vllm.truth import compare

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps start no thread and no process."""
    monkeypatch.setattr(binding, "Sender", Kept)


def tiered(directory: Path, chunks: int) -> dict[str, Any]:
    """OffloadingConnector with a small host tier and a directory below it."""
    return offloading(
        chunks, spec_name="TieringOffloadingSpec",
        secondary_tiers=[
            {"type": "fs", "root_dir": str(directory / "tier"), "n_read_threads": 1, "n_write_threads": 1},
        ],
    )


def simple(blocks: int, **more: Any) -> dict[str, Any]:
    """SimpleCPUOffloadConnector with a host tier of so many blocks."""
    return {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": blocks * PAGE, **more}}


def observed(directory: Path, connector: dict[str, Any], place: str, **options: Any) -> tuple[Engine, Any]:
    """An engine with the tap around its connector or at its scheduler, and the engine's own connector."""
    if place == "connector":
        engine = Engine(directory, named(connector), **options)
        return engine, engine.connector._tapped
    engine = Engine(directory, connector, hook={}, **options)
    return engine, engine.connector


PLACES = pytest.mark.parametrize("place", ["connector", "scheduler"])


@PLACES
@pytest.mark.parametrize(
    ("more", "options"), [
        ({}, {}), ({"eviction_policy": "arc"}, {}), ({}, {"workers": 3}), ({}, {"layers": 4}),
        ({}, {"blocks": 20, "running": 8}), ({"offload_prompt_only": False}, {}),
    ], ids=["lru", "arc", "three workers", "four layers", "pressed", "answers, too"],
)
def test_jobs_of_the_offloading_connector(
    tmp_path: Path, more: dict[str, Any], options: dict[str, Any], place: str
) -> None:
    options = {"blocks": 48, "running": 4, **options}
    layers, workers = options.get("layers", 1), options.get("workers", 1)
    engine, theirs = observed(tmp_path, offloading(40 * layers * workers, **more), place, **options)
    watch = watching(engine.tap)
    seen: Counter[str] = Counter()
    for output in engine.run(workload(2, 6, 4)):
        watch.pump()
        state = watch.leader.state
        assert shown(state) == of_offloading(theirs)
        sizes_are_right(state, layers, workers)
        compare(engine, state, set(output.num_scheduled_tokens))
        seen.update(candidate.route.label for candidate in state.candidates.values())
        seen["ended"] += sum(candidate.for_slot is not None and candidate.for_slot not in state.slots
                             for candidate in state.candidates.values())
    watch.pump()
    assert watch.rejected == []
    assert watch.recorder.errors == 0
    assert seen["G1>G2"] > 20
    assert seen["G2>G1"] > 0
    assert (seen["ended"] > 0) is ("offload_prompt_only" in more)  # the last store is ordered after the request's end
    totals = watch.leader.state.totals
    assert not watch.leader.state.candidates
    assert totals.sized_blocks == totals.moved_blocks
    assert totals.moved_bytes == {
        label: blocks * PAGE * layers * workers for label, blocks in totals.moved_blocks.items()
    }
    assert watch.mirror.totals == totals


def test_bytes_are_those_that_a_real_worker_copied(tmp_path: Path) -> None:
    """Torch tensors stand for the device. The worker counts each byte that it moves, and the engine publishes it."""
    from tests.vllm.tensors import Model

    layers = 4
    connector = offloading(40 * layers, spec_name="TensorSpec", spec_module_path="tests.vllm.tensors", delay=2)
    engine = Engine(tmp_path, named(connector), blocks=48, running=4, layers=layers)
    model, published = Model(engine), Published()
    watch = watching(engine.connector)
    update = engine.scheduler.update_from_output

    def update_and_publish(*args: Any) -> Any:
        outputs = update(*args)
        published.take(outputs)
        return outputs

    engine.scheduler.update_from_output = update_and_publish  # type: ignore[method-assign]
    compared = 0
    for _ in engine.run(workload(2, 6, 4)):
        watch.pump()
        totals = watch.leader.state.totals
        assert totals.moved_bytes.get("G1>G2", 0) == published.totals["vllm:kv_offload_store_bytes"]
        assert totals.moved_bytes.get("G2>G1", 0) == published.totals["vllm:kv_offload_load_bytes"]
        compared += all(totals.moved_bytes.get(label) for label in ("G1>G2", "G2>G1"))
    model.connector.shutdown()
    assert compared > 20
    assert model.wrong == []
    stats = watch.recorder.watch.stats
    assert {name: stats[name] for name in published.totals} == dict(published.totals)


def test_jobs_between_the_tiers_of_the_offloading_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks go from the host to a directory and come back; a request's hits are of the tier that had them."""
    engine = Engine(tmp_path, named(tiered(tmp_path, 40)), blocks=48, running=3)
    watch = watching(engine.connector)
    sources: Counter[str] = Counter()
    record = PrefixCacheStats.record

    def record_and_keep(stats: Any, *args: Any, hits_by_source: Any = None, **more: Any) -> Any:
        sources.update({source.value: tokens for source, tokens in (hits_by_source or {}).items()})
        return record(stats, *args, hits_by_source=hits_by_source, **more)

    monkeypatch.setattr(PrefixCacheStats, "record", record_and_keep)
    seen: Counter[str] = Counter()
    for output in engine.run(workload(5, 6, 4)):
        watch.pump()
        state = watch.leader.state
        tiers = shown(state)
        assert tiers == of_offloading(engine.connector._tapped)
        compare(engine, state, set(output.num_scheduled_tokens))
        seen.update(label for label, _, _ in tiers)
        time.sleep(0)  # the directory's threads get a turn
    watch.pump()
    assert watch.rejected == []
    assert watch.recorder.errors == 0
    totals = watch.leader.state.totals
    assert totals.moved_blocks["G2>G4"] > 0
    assert totals.moved_blocks["G4>G2"] > 0
    assert totals.moved_bytes["G4>G2"] >= totals.moved_blocks["G4>G2"] * PAGE
    print(sources, totals.hit_blocks, totals.moved_blocks, totals.preemptions, seen)
    found = totals.hit_blocks[Tier.G2 - 1] * BLOCK, totals.hit_blocks[Tier.G4 - 1] * BLOCK
    assert found == (sources["host"], sources["disk"])
    assert sources["disk"] > 0
    engine.scheduler.shutdown()


@PLACES
@pytest.mark.parametrize("more", [{}, {"lazy_offload": True}], ids=["eager", "lazy"])
def test_copies_of_the_simple_connector(tmp_path: Path, more: dict[str, Any], place: str) -> None:
    engine, theirs = observed(tmp_path, simple(60, **more), place, blocks=40, running=4)
    watch = watching(engine.tap)
    pool = engine.scheduler.kv_cache_manager.block_pool
    seen: Counter[str] = Counter()
    named_requests = 0
    for _ in engine.run(workload(2, 6, 4)):
        watch.pump()
        state = watch.leader.state
        assert blocks_shown(state) == of_simple(theirs, pool)
        sizes_are_right(state, 1)
        seen.update(candidate.route.label for candidate in state.candidates.values())
        named_requests += sum(bool(candidate.request) for candidate in state.candidates.values())
    watch.pump()
    assert watch.rejected == []
    assert watch.recorder.errors == 0
    assert seen["G1>G2"] > 5
    assert seen["G2>G1"] > 0
    assert (named_requests > 0) is not bool(more)  # the lazy connector stores blocks of no request
    totals = watch.leader.state.totals
    assert totals.moved_bytes == {label: blocks * PAGE for label, blocks in totals.moved_blocks.items()}
    assert watch.recorder.watch.stats["vllm:simple_kv_offload_load_blocks_total"] == totals.moved_blocks["G2>G1"]


def test_each_child_of_a_multi_connector(tmp_path: Path) -> None:
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"connectors": [offloading(40), simple(60)]}}
    engine = Engine(tmp_path, named(multi, medium="CPU"), blocks=48, running=4)
    watch = watching(engine.connector)
    pool = engine.scheduler.kv_cache_manager.block_pool
    one, other = engine.connector._tapped._connectors
    compared = 0
    for _ in engine.run(workload(2, 6, 4)):
        watch.pump()
        theirs = of_simple(other, pool)
        for (label, _, hashes), count in of_offloading(one).items():
            for key in hashes:
                theirs[label, key] += count
        ours = blocks_shown(watch.leader.state)
        assert {key: n for key, n in ours.items() if key[0] == "G1>G2"} == {
            key: n for key, n in theirs.items() if key[0] == "G1>G2"
        }
        compared += bool(ours)
    watch.pump()
    assert watch.rejected == []
    assert compared > 20
    assert {connector for connector, _ in watch.recorder.watch.calls} == {
        "MultiConnector", "OffloadingConnector", "SimpleCPUOffloadConnector",
    }
    assert {name.partition(" ")[0] for name in watch.recorder.watch.stats} >= {"SimpleCPUOffloadConnector"}


def test_a_reset_gives_up_the_open_stores(tmp_path: Path) -> None:
    engine = Engine(tmp_path, named(offloading(60)), blocks=48, running=4, load_steps=6)
    watch = watching(engine.connector)
    resets = 0
    for _ in engine.run(workload(2, 6, 3)):
        watch.pump()
        assert shown(watch.leader.state) == of_offloading(engine.connector._tapped)
        stores = {label for label, _, _ in of_offloading(engine.connector._tapped)}
        if stores == {"G1>G2"} and resets < 3 and engine.steps % 7 == 0:
            finish = engine.finish

            def reset_behind(output: Any, finish: Any = finish) -> None:
                nonlocal resets
                finish(output)
                engine.finish = finish  # type: ignore[method-assign]
                resets += engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

            engine.finish = reset_behind  # type: ignore[method-assign]
    watch.pump()
    assert resets
    assert ended(watch.leader.state, CandidateStatus.CANCELLED) > 0
    assert watch.rejected == []


def test_a_daemon_that_comes_late_is_told_the_open_copies(tmp_path: Path) -> None:
    engine = Engine(tmp_path, named(offloading(40)), blocks=48, running=4, load_steps=5)
    watch = None
    begun = 0
    for _ in engine.run(workload(2, 6, 4)):
        if watch is None:
            open_now = of_offloading(engine.connector._tapped)
            if engine.steps > 20 and any(label == "G1>G2" for label, _, _ in open_now):
                watch = watching(engine.connector)
            continue
        watch.pump()
        if not watch.leader.state.slots:
            continue
        begun += not begun and bool(watch.leader.state.candidates)
        assert shown(watch.leader.state) == of_offloading(engine.connector._tapped)
    assert watch is not None
    assert begun
    assert watch.rejected == []


def test_a_call_that_blocks_the_engine_is_told_with_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the tap stands for a connector that takes its time."""
    engine = Engine(tmp_path, named(offloading(40)), blocks=48, running=4)
    watch = watching(engine.connector)
    late = 0
    half = engine.connector._tapped.connector_scheduler
    ask = half.get_num_new_matched_tokens
    monkeypatch.setattr(copies, "_now", lambda: time.monotonic_ns() + late)

    def slow(request: Any, *args: Any, **more: Any) -> Any:
        nonlocal late
        late += 3_000_000_000 if request.request_id == "s1t1" else 0
        return ask(request, *args, **more)

    half.get_num_new_matched_tokens = slow
    blocked: list[ev.CallBlocked] = []
    for _ in engine.run(workload(2, 3, 2)):
        watch.pump()
        blocked += [event for event in watch.events if isinstance(event, ev.CallBlocked)]
    assert {(event.request, event.connector, event.method) for event in blocked} == {
        ("s1t1", "OffloadingConnector", "get_num_new_matched_tokens")
    }
    assert all(event.took_ns >= 3_000_000_000 and event.slot is not None for event in blocked)
    calls, total, longest = watch.recorder.watch.calls["OffloadingConnector", "get_num_new_matched_tokens"]
    assert longest >= 3_000_000_000 <= total
    assert calls >= 6
    watch.take([watch.recorder.watch.measured()])
    (facts,) = watch.leader.state.connectors.values()
    row = facts.methods.index("get_num_new_matched_tokens")
    assert (facts.calls[row], facts.total_ns[row], facts.longest_ns[row]) == (calls, total, longest)


def test_the_content_of_a_tier_that_no_event_tells_is_unknown(tmp_path: Path) -> None:
    """A MultiConnector reports no event without ``--kv-events-config``; with it the content is known."""
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"connectors": [offloading(40)]}}
    for number, events in enumerate((False, True)):
        directory = tmp_path / str(number)
        directory.mkdir()
        engine = Engine(directory, named(multi, medium="CPU"), blocks=48, running=4, events=events)
        watch = watching(engine.connector)
        for _ in engine.run(workload(2, 6, 4)):
            watch.pump()
        watch.pump()
        (host,) = (pool for pool in watch.leader.state.pools if pool.info.medium == "CPU")
        assert host.silent is not events
        assert bool(host.resident_blocks) is events
        assert watch.leader.state.totals.hit_blocks[Tier.G2 - 1] > 0
        assert watch.leader.state.totals.moved_blocks["G1>G2"] > 0


def test_failed_loads_count_their_good_blocks(tmp_path: Path) -> None:
    connector = {**named(offloading(60)), "kv_load_failure_policy": "recompute"}
    engine = Engine(tmp_path, connector, blocks=32, running=5, fail_every=3)
    watch = watching(engine.connector)
    for _ in engine.run(workload(3, 8, 4), aborts=0.02):
        watch.pump()
        theirs = of_offloading(engine.connector._tapped)
        ours = shown(watch.leader.state)
        assert {key: n for key, n in ours.items() if key[0] == "G1>G2"} == {
            key: n for key, n in theirs.items() if key[0] == "G1>G2"
        }
    totals = watch.leader.state.totals
    assert ended(watch.leader.state, CandidateStatus.FAILED) > 0
    assert totals.moved_bytes == {label: blocks * PAGE for label, blocks in totals.moved_blocks.items()}
    assert all(slot.state is not SlotState.ONBOARDING for slot in watch.leader.state.slots.values())


