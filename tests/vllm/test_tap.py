"""The tap in vLLM's real scheduler: every transition against the scheduler's own truth. Run by ``make test-vllm``."""

import copy
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import RequestStatus

from kvbm_console.core.ids import CandidateStatus, FinishReason, Measure, SlotState, Tier
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.flatten import drain
from tests.engines.test_stream import House
from tests.tap.watching import Watching
from tests.vllm.engine import BLOCK, PAGE, Engine, named, offloading, tap
from tests.vllm.features import Kept, workload
from tests.vllm.truth import compare, evicted, removed_by_engine, short

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps start no thread and no process."""
    monkeypatch.setattr(binding, "Sender", Kept)


MEASURED_STEPS = 300
Make = Callable[..., Engine]


@pytest.fixture(params=["connector", "scheduler"])
def make(request: pytest.FixtureRequest, unsent: None, tmp_path: Path) -> Make:
    """Makes an engine with a tap, at its connector or at its scheduler, around the connector ``inside`` if given."""
    def made(inside: dict[str, Any] | None = None, *, transfer: dict[str, Any] | None = None, **options: Any) -> Engine:
        at_scheduler = request.param == "scheduler"
        connector = inside if at_scheduler else tap(inside)
        return Engine(
            tmp_path, None if connector is None else {**connector, **(transfer or {})},
            hook={} if at_scheduler else None, **options,
        )

    return made


def watching(connector: Any) -> Watching:
    sender = connector.sender
    return Watching(sender.recorder, sender.flattener, sender.settings)


def drive(
    engine: Engine, watch: Watching, requests: list[Any], *, every: int = 1, aborts: float = 0.0
) -> dict[str, Any]:
    """Run to the end, comparing after each step; what was seen on the way."""
    seen: dict[str, Any] = {"states": Counter(), "evicted": []}
    for output in engine.run(requests, aborts=aborts):
        watch.pump()
        seen["evicted"] += evicted(watch.events, watch.leader.state)
        seen["states"].update(slot.state for slot in watch.leader.state.slots.values())
        if engine.steps % every == 0:
            compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
    watch.pump()
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    assert watch.recorder.errors == 0
    return seen


def test_alone_under_reuse_and_pressure(make: Make) -> None:
    engine = make(blocks=36)
    watch = watching(engine.tap)
    requests = workload(1, 6, 4)
    seen = drive(engine, watch, requests)
    state = watch.leader.state
    totals = state.totals
    assert totals.slots_opened == len(requests) == len(engine.finished)
    assert totals.preemptions > 0
    assert totals.hit_blocks[0] > 0
    # Each eviction is one that the engine's own events tell, and names who caused it.
    assert sorted(key for key, _ in seen["evicted"]) == sorted(removed_by_engine(engine, "GPU"))
    assert all(slot is not None for _, slot in seen["evicted"])
    assert watch.mirror.totals == totals


def test_hits_are_those_of_the_engines_own_metric(make: Make) -> None:
    """vLLM counts the admissions after a preemption apart, since most of them find what the request has computed."""
    engine = make(blocks=36)
    manager = engine.scheduler.kv_cache_manager
    kept = manager.prefix_cache_stats
    manager.make_prefix_cache_stats = lambda: kept  # the scheduler would begin anew with each step
    watch = watching(engine.tap)
    drive(engine, watch, workload(1, 6, 4))
    totals = watch.leader.state.totals
    assert kept.requests == totals.slots_opened
    assert kept.preempted_hits > 0
    assert totals.hit_blocks[0] * BLOCK == kept.hits > 0


def test_requests_of_one_step_use_each_others_blocks(make: Make) -> None:
    """A block is named when it is given out: the next request of the same step may already have it as its prefix."""
    engine = make(blocks=64, tokens=2048)
    watch = watching(engine.tap)
    drive(engine, watch, [(at // 4, name, *rest) for at, (_, name, *rest) in enumerate(workload(9, 8, 3))])
    assert watch.leader.state.totals.hit_blocks[0] > 0


def test_around_the_offloading_connector(make: Make) -> None:
    engine = make(offloading(40), blocks=48, running=4)
    watch = watching(engine.tap)
    requests = workload(2, 6, 4)
    seen = drive(engine, watch, requests)
    totals = watch.leader.state.totals
    assert totals.slots_opened == len(requests)
    assert seen["states"][SlotState.ONBOARDING] > 0
    assert totals.hit_blocks[Tier.G2 - 1] > 0
    assert totals.moved_blocks["G2>G1"] > 0
    assert sorted(key for key, _ in seen["evicted"]) == sorted(removed_by_engine(engine, "GPU"))
    (host,) = (pool for pool in watch.leader.state.pools if pool.info.medium == "CPU")
    stored: Counter[int] = Counter()
    for batch in engine.batches:
        for event in batch.events:
            if getattr(event, "medium", None) == "CPU":
                for key in event.block_hashes:
                    short = int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key & (2**64 - 1)
                    stored[short] += 1 if type(event).__name__ == "BlockStored" else -1
    assert Counter({key: len(host.places_of(key)) for key in host.by_hash}) == +stored


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_loads_aborts_and_preemptions(make: Make, policy: str) -> None:
    engine = make(
        offloading(60), transfer={"kv_load_failure_policy": policy}, blocks=32, running=5, fail_every=3
    )
    watch = watching(engine.tap)
    seen = drive(engine, watch, workload(3, 8, 4), aborts=0.02)
    totals = watch.leader.state.totals
    assert totals.finished[FinishReason.ABORTED] > 0
    assert (totals.finished[FinishReason.ERROR] > 0) is (policy == "fail")
    assert totals.candidates_ended[CandidateStatus.FAILED] > 0
    assert totals.preemptions > 0
    assert sorted(key for key, _ in seen["evicted"]) == sorted(removed_by_engine(engine, "GPU"))


@pytest.mark.parametrize("groups", [("full",), ("full", "window"), ("window", "window")], ids=str)
def test_a_reset_of_the_prefix_cache_is_seen(make: Make, groups: tuple[str, ...]) -> None:
    """As ``/reset_prefix_cache`` does it with running requests, which are preempted for it."""
    engine = make(blocks=48, running=4, groups=groups)
    watch = watching(engine.tap)
    emptied = 0
    for _, name, prompt, output in workload(6, 4, 3):
        engine.add(name, prompt, output)
    while engine.busy:
        formed = engine.form()
        watch.pump()
        compare(engine, watch.leader.state, set(formed.num_scheduled_tokens))
        engine.finish(formed)
        if engine.steps % 10 == 0 and engine.steps < 200:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            watch.pump()
            emptied += not any(pool.resident_blocks for pool in watch.leader.state.pools)
        assert engine.steps < 5_000
    watch.pump()
    assert emptied > 3
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    assert watch.leader.state.totals.preemptions > 0


@pytest.mark.parametrize(
    ("groups", "inside"), [
        (("full", "window"), None), (("window", "full", "window"), None), (("wide", "window"), None),
        (("full", "window"), offloading(60)),
    ], ids=str,
)
def test_all_groups_of_a_hybrid_model(
    make: Make, groups: tuple[str, ...], inside: dict[str, Any] | None
) -> None:
    engine = make(inside, blocks=14 + 10 * len(groups), running=8, groups=groups)
    watch = watching(engine.tap)
    seen = drive(engine, watch, workload(7, 8, 3))
    told = groups.index("wide" if "wide" in groups else "full")
    state = watch.leader.state
    assert state.totals.hit_blocks[0] > 0
    assert state.totals.preemptions > 0
    mine = Counter(key for key, _ in seen["evicted"])
    size = BLOCK * (2 if groups[told] == "wide" else 1)
    assert mine == Counter(removed_by_engine(engine, "GPU", told, size))
    assert sum(1 for _, slot in seen["evicted"] if slot is None) == 0
    devices = [pool.info for pool in state.pools if pool.info.tier is Tier.G1]
    assert sorted(info.group for info in devices) == list(range(len(groups)))
    assert all(info.capacity_blocks is None for info in devices)  # they share one
    (numbers,) = state.measured.values()
    assert numbers.values == {
        Measure.CAPACITY_BLOCKS: 14 + 10 * len(groups) - 1, Measure.RUNNING_MOST: 8, Measure.STEP_TOKENS_MOST: 256,
        Measure.RETENTION_TOKENS: 0, **({} if inside is None else {Measure.HOST_CAPACITY_BLOCKS: 60}),
    }
    assert {info.group: info.window for info in devices} == {
        group: 64 if kind == "window" else 0 for group, kind in enumerate(groups)
    }


def test_the_limits_of_the_engine_and_of_its_host_tier(make: Make) -> None:
    watch = watching(make(offloading(60), blocks=40, running=5).tap)
    state = watch.leader.state
    assert [state.capacity_of(pool) for pool in state.pools if pool.info.source] == [39, 60]
    (numbers,) = state.measured.values()
    assert (numbers.values[Measure.RUNNING_MOST], numbers.values[Measure.STEP_TOKENS_MOST]) == (5, 256)


@pytest.mark.parametrize("groups", [("window",), ("window", "window")], ids=str)
def test_a_window_alone_gives_back_the_blocks_that_it_has_passed(make: Make, groups: tuple[str, ...]) -> None:
    engine = make(blocks=40, running=5, groups=groups)
    watch = watching(engine.tap)
    requests = workload(8, 6, 3)
    drive(engine, watch, requests)
    assert watch.leader.state.totals.slots_opened == len(requests) == len(engine.finished)
    assert watch.leader.state.totals.hit_blocks[0] > 0
    assert not watch.leader.state.slots


def test_who_begins_to_listen_late_knows_what_each_window_has_passed(make: Make) -> None:
    """Also behind the prompt, and of a request that comes back after a preemption."""
    engine = make(blocks=14, running=5, groups=("window",))
    steps = engine.run([(0, f"s{at}", list(range(100 * at, 100 * at + 70)), 200) for at in range(3)])
    for _ in range(90):
        next(steps)
    watch = watching(engine.tap)
    seen = 0
    for output in steps:
        watch.pump()
        compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
        slots = watch.leader.state.slots.values()
        seen = max([seen, *(slot.passed_blocks - slot.prompt_blocks for slot in slots)])
    watch.pump()
    assert watch.rejected == []
    assert seen > 0
    assert watch.leader.state.totals.preemptions > 0


@pytest.mark.parametrize("groups", [("full",), ("full", "window")], ids=str)
def test_who_begins_to_listen_late_knows_the_whole_pool(
    make: Make, groups: tuple[str, ...]
) -> None:
    engine = make(blocks=60, groups=groups)
    watch: Watching | None = None
    compared = 0
    for output in engine.run(workload(9, 6, 4)):
        if engine.steps == 60:
            watch = watching(engine.tap)
        elif watch is not None:
            watch.pump()
            assert watch.leader.state.lost_sources == {}
            if watch.leader.state.pools[0].resident_blocks:
                compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
                compared += 1
    assert watch is not None
    assert watch.rejected == []
    assert compared > 20
    assert watch.leader.state.totals.hit_blocks[0] > 0


@pytest.mark.parametrize("inside", [None, offloading(40)], ids=["alone", "offloading"])
def test_without_prefix_caching_nothing_is_said_to_be_cached(
    make: Make, inside: dict[str, Any] | None
) -> None:
    engine = make(inside, blocks=36, caching=False)
    watch = watching(engine.tap)
    seen = drive(engine, watch, workload(11, 6, 3))
    state = watch.leader.state
    assert seen["evicted"] == []
    assert state.totals.evicted_blocks[0] == state.totals.hit_blocks[0] == 0
    assert (state.totals.hit_blocks[1] > 0) is (inside is not None)


def test_positions_with_speculative_decoding(make: Make) -> None:
    """Drafts that the model does not accept take a request's position back."""
    engine = make(blocks=40, drafts=3)
    watch = watching(engine.tap)
    seen = drive(engine, watch, workload(13, 6, 3))
    assert sorted(key for key, _ in seen["evicted"]) == sorted(removed_by_engine(engine, "GPU"))


@pytest.mark.parametrize("mode", ["incremental", "full"])
def test_the_event_stream_is_right_or_in_doubt(unsent: None, tmp_path: Path, mode: str) -> None:
    """In the full mode the blocks of each hit are announced once more."""
    engine = Engine(tmp_path, tap(), blocks=60)
    engine.extra = {"kv_cache_report_mode": mode}
    house = House()
    for _ in engine.run(workload(2, 6, 4)):
        pass
    for number, told in enumerate(engine.batches):
        house.stream.accept(number, msgspec.msgpack.encode(told))
    state = house.dispatcher.leader.state
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    truth = sum(block.block_hash is not None for block in blocks)
    assert truth
    right = sum(pool.resident_blocks for pool in state.pools) == truth
    assert (right, bool(state.lost_sources)) == (mode == "incremental", mode == "full")


def host_truth(engine: Engine) -> Counter[int]:
    """Hashes of the chunks that the offloading connector itself has ready in host memory."""
    policy = engine.connector._tapped.connector_scheduler.manager._policy
    return Counter(short(key[:-4]) for key, chunk in policy.chunks.items() if chunk.is_ready)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("make", [tap, named], ids=["inside", "named"])
def test_what_a_connector_keeps_is_known_without_the_engines_event_stream(
    unsent: None, tmp_path: Path, make: Any, late: bool
) -> None:
    connector = offloading(40)
    del connector["kv_connector_extra_config"]["self_describing_kv_events"]
    engine = Engine(tmp_path, make(connector), blocks=48, running=4, events=False)
    watch = None if late else watching(engine.tap)
    compared = 0
    truth: Counter[int] = Counter()
    finish = engine.finish

    def finish_and_look(output: Any) -> None:
        nonlocal truth
        finish(output)
        truth = host_truth(engine)  # the step's events are taken at its end

    engine.finish = finish_and_look  # type: ignore[method-assign]
    for _ in engine.run(workload(12, 6, 3)):
        if watch is None:
            watch = watching(engine.tap) if engine.steps == 50 else None
            continue
        watch.pump()
        state = watch.leader.state
        host = next((pool for pool in state.pools if pool.info.medium == "CPU"), None)
        if host is None or not state.slots:
            continue
        assert Counter({key: len(host.places_of(key)) for key in host.by_hash}) == truth
        compared += bool(host.resident_blocks)
    assert watch is not None
    watch.pump()
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    assert compared > 50
    assert watch.leader.state.totals.hit_blocks[1] > 0
    assert engine.batches == [] or not any(batch.events for batch in engine.batches)


def test_a_connector_under_its_own_name_stays_what_it_is_for_the_engine(unsent: None, tmp_path: Path) -> None:
    for name in ("OffloadingConnector", "ExampleConnector", "LMCacheConnectorV1"):
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=binding.__name__)
        plain = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        assert KVConnectorFactory.supports_hma_config(config) is KVConnectorFactory.supports_hma_config(plain)
    with pytest.raises(AttributeError, match="no connector 'Nothing'"):
        _ = binding.Nothing
    connector = {"kv_connector_module_path": binding.__name__, "kv_role": "kv_both"}
    engine = Engine(tmp_path, connector, blocks=48, running=4, kv_offloading_size=40 * PAGE / 2**30)
    assert engine.config.kv_transfer_config.kv_connector == "OffloadingConnector"
    watch = watching(engine.tap)
    drive(engine, watch, workload(2, 6, 4))
    assert watch.leader.state.totals.hit_blocks[1] > 0


def test_two_taps_in_one_process_ask_each_its_own_connector(unsent: None, tmp_path: Path) -> None:
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "connectors": [tap(offloading(40)), tap()]}}
    engine = Engine(tmp_path, multi, blocks=48, running=4)
    around, alone = engine.connector.sub_connectors
    assert type(around.build_kv_connector_stats()).__name__ == "OffloadingConnectorStats"
    assert alone.build_kv_connector_stats() is None


def test_ranks_of_a_dense_model_are_told_apart(unsent: None, tmp_path: Path) -> None:
    engine = Engine(tmp_path, tap(), blocks=48)
    config = copy.deepcopy(engine.config)
    config.parallel_config.data_parallel_rank, config.parallel_config.data_parallel_index = 0, 1
    cache = engine.scheduler.kv_cache_config
    settings = binding.KvbmTap(config, KVConnectorRole.SCHEDULER, cache).sender.settings
    assert (settings.name, settings.dp_rank) == ("vLLM rank 1", 1)


def test_inside_multi_connector(unsent: None, tmp_path: Path) -> None:
    """Nothing is told of the blocks that the other connector loads into; what stood there is known to be gone."""
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"connectors": [offloading(40), tap()]}}
    engine = Engine(tmp_path, multi, blocks=48, running=4)
    (mine,) = (one for one in engine.connector.sub_connectors if type(one).__name__ == "KvbmTap")
    watch = watching(mine)
    requests = workload(2, 6, 4)
    seen = []
    loads = 0
    for _ in engine.run(requests):
        watch.pump()
        seen += evicted(watch.events, watch.leader.state)
        manager = engine.scheduler.kv_cache_manager
        loading = {
            place for name, one in engine.scheduler.requests.items()
            if one.status is RequestStatus.WAITING_FOR_REMOTE_KVS for place in manager.get_block_ids(name)[0]
        }
        loads += bool(loading)
        told = watch.leader.state.pools[0].hash_of
        for block in manager.block_pool.blocks:
            if block.block_id not in loading and not block.is_null:
                theirs = 0 if block.block_hash is None else short(get_block_hash(block.block_hash))
                assert told[block.block_id] == theirs
    watch.pump()
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    assert loads
    assert sorted(key for key, _ in seen) == sorted(removed_by_engine(engine, "GPU"))
    assert all(slot is not None for _, slot in seen)
    assert watch.leader.state.totals.slots_opened == len(requests) == len(engine.finished)


def test_the_same_tokens_with_and_without(unsent: None, tmp_path: Path) -> None:
    """The engine decides as it would alone: the same steps, the same blocks, the same events."""
    plain, tapped = [], []
    for connector, log in ((offloading(40), plain), (tap(offloading(40)), tapped)):
        directory = tmp_path / str(len(log) + id(log))
        directory.mkdir()
        engine = Engine(directory, connector, blocks=48, running=4)
        for output in engine.run(workload(4, 5, 3)):
            log.append((dict(output.num_scheduled_tokens),
                        {name: engine.scheduler.kv_cache_manager.get_block_ids(name)
                         for name in engine.scheduler.requests if not engine.scheduler.requests[name].is_finished()}))
    assert plain == tapped


def test_with_the_event_stream_over_zeromq(unsent: None, tmp_path: Path) -> None:
    """vLLM's own publisher, a capture in another process, and what both say of the device in the end."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    engine = Engine(tmp_path, tap(offloading(40)), blocks=48, running=4,
                    publish=(f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}"))
    watch = watching(engine.tap)
    program = Path(sys.executable).with_name("kvbm-console")
    drive(engine, watch, workload(5, 5, 3), every=5)
    capture = subprocess.run(
        [program, "rec", "capture", f"zmq://127.0.0.1:{ports[0]}?replay={ports[1]}&topic=kv", "--out",
         tmp_path / "capture", "--batches", str(len(engine.batches))],
        capture_output=True, text=True, timeout=120,
    )
    assert capture.returncode == 0, capture.stderr
    made = subprocess.run(
        [program, "rec", "import", "kv-events", tmp_path / "capture", "--out", tmp_path / "made", "--format", "json"],
        capture_output=True, text=True, timeout=120,
    )
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert (found["lost_batches"], found["unknown_events"], found["malformed_events"]) == (0, 0, 0)
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    assert found["resident_blocks"]["GPU"] == sum(block.block_hash is not None for block in blocks)
    host = next(pool for pool in watch.leader.state.pools if pool.info.medium == "CPU")
    assert found["resident_blocks"]["CPU"] == host.resident_blocks
    assert subprocess.run([program, "rec", "verify", tmp_path / "made"], timeout=120).returncode == 0
    engine.scheduler.shutdown()


@pytest.mark.parametrize("groups", [("full",), ("full", "window"), ("window",)], ids=str)
def test_a_step_with_64_decodes_costs_less_than_a_twentieth_of_the_scheduler(
    unsent: None, tmp_path: Path, groups: tuple[str, ...]
) -> None:
    """The same steps of an engine with and of one without a tap, in turns: processor time of the scheduler's thread.

    The scheduler is the reference, because a bar in microseconds would judge the machine. The first deciles, because on
    a busy machine other processes run in the middle of most steps."""
    engines = []
    for name, hook in (("bare", None), ("tapped", {})):
        (tmp_path / name).mkdir()
        engine = Engine(tmp_path / name, None, hook=hook, groups=groups, blocks=4_000, running=64, tokens=8192)
        for number in range(64):
            engine.add(f"r{number}", [number + 1] * (40 + number), 380)
        engines.append(engine)
    bare, tapped = engines
    watch = watching(tapped.tap)
    took: tuple[list[int], list[int], list[float]] = [], [], []
    for at in range(20 + MEASURED_STEPS):
        calls, spent = watch.recorder.calls, watch.recorder.call_ns
        began = time.thread_time_ns()
        bare.step()
        between = time.thread_time_ns()
        tapped.step()
        took[0].append(between - began)
        took[1].append(time.thread_time_ns() - between)
        took[2].append((watch.recorder.call_ns - spent) / (watch.recorder.calls - calls))
        if at < 20:
            watch.pump()
        else:
            drain(watch.recorder, watch.flattener, 1_000)
    alone, watched, per_call = (quantiles(each[20:], n=10)[0] for each in took)
    per_step = watched - alone
    print(f"{groups}: {per_step / 1e3:.1f} us a step of {alone / 1e3:.0f} us, {per_call:.0f} ns a call")
    assert per_step < alone / 20


def test_a_window_whose_moves_cannot_be_seen_is_shown_as_not_certain(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release may name the method otherwise that moves a window."""
    monkeypatch.setattr("kvbm_console.tap.connector._WINDOW_CALL", "move_window")
    engine = make(blocks=40, running=5, groups=("window",))
    watch = watching(engine.tap)
    for _ in engine.run(workload(8, 6, 3)):
        watch.pump()
        assert watch.leader.state.lost_sources
    assert watch.rejected == []
