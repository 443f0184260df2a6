"""``sanitize`` under vLLM's own OffloadingConnector: real bytes, and a model that knows what it must read."""

import contextlib
import logging
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.sanitize.checker import Corrupt
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.sanitizing import ATTACHED, pairs_of
from tests.vllm.engine import PAGE, Engine, named, offloading
from tests.vllm.features import Kept, workload
from tests.vllm.tensors import Model

pytestmark = pytest.mark.timeout(600)
LAYERS = 4
CHUNKS = 40
FAULTS = ["lost-flush", "swapped-blocks", "torn-copy"]
PLANTED = {"lost-flush": "ignored-flush"}
"""Kinds of findings to the worker's own name of the fault."""


@pytest.fixture(autouse=True)
def unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps start no thread and no process; findings are not printed."""
    monkeypatch.setattr(binding, "Sender", Kept)
    logging.getLogger("kvbm_console.sanitize").setLevel(logging.CRITICAL)


def machine(
    directory: Path, fault: str = "", *, per_chunk: int = 1, chunks: int = CHUNKS, delay: int = 2,
    sanitize: dict[str, Any] | None = None, **options: Any,
) -> tuple[Engine, Model]:
    """An engine with its worker. ``sanitize`` is the tap's setting; None: the connector runs without a tap."""
    connector = offloading(
        chunks * LAYERS, spec_name="TensorSpec", spec_module_path="tests.vllm.tensors", fault=fault, delay=delay,
        blocks_per_chunk=per_chunk,
    )
    connector["kv_load_failure_policy"] = "recompute"
    if sanitize is not None:
        connector = named(connector, sanitize=sanitize)
    engine = Engine(directory, connector, **{"blocks": 48, "running": 4, "layers": LAYERS, **options})
    return engine, Model(engine)


def run(engine: Engine, model: Model, seed: int = 2) -> None:
    """A load that presses, to its end."""
    for _ in engine.run(workload(seed, 6, 4)):
        pass
    model.connector.shutdown()


def findings(engine: Engine, model: Model) -> list[Any]:
    """What came through the engine's own metadata, and what the shutdown found."""
    told = [row[0] for row in engine.connector._marker.waiting]
    return told + [finding.kind for finding in model.connector._sanitizer.checker.findings]


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_worker_is_never_called_wrong(tmp_path: Path, seed: int, per_chunk: int) -> None:
    engine, model = machine(tmp_path, sanitize={"sample": 1.0}, per_chunk=per_chunk)
    run(engine, model, seed)
    checker = model.connector._sanitizer.checker
    assert model.wrong == []
    assert model.rows > 1_000
    assert findings(engine, model) == []
    assert checker.checked > 50
    assert checker.unknown == 0
    assert model.connector._sanitizer.errors == engine.connector._recorder.errors == 0
    assert engine.connector._marker.totals[:2] == (checker.checked, 0) or engine.connector._marker.totals[0] > 0


@pytest.mark.parametrize("seed", range(6))
def test_aborts_resets_and_small_tiers_raise_no_false_alarm(tmp_path: Path, seed: int) -> None:
    """Machines and copies of any size, requests that are aborted, and resets of both caches between steps."""
    dice = random.Random(seed)
    per_chunk = dice.choice((1, 2, 3))
    engine, model = machine(
        tmp_path, sanitize={"sample": 1.0, "action": dice.choice(("report", "recompute"))}, per_chunk=per_chunk,
        chunks=per_chunk * dice.choice((6, 12, 40)), delay=dice.choice((0, 1, 2, 5)), blocks=dice.choice((20, 28, 48)),
        running=dice.choice((2, 4, 8)), tokens=dice.choice((64, 256)),
    )
    finish, resets = engine.finish, 0

    def finish_and_reset(output: Any) -> None:
        nonlocal resets
        finish(output)
        if dice.random() < 0.05:
            with contextlib.suppress(RuntimeError):  # refused while a load is in flight, as vLLM's text says
                engine.scheduler.reset_prefix_cache(
                    reset_running_requests=dice.random() < 0.6, reset_connector=dice.random() < 0.6)
                resets += 1

    engine.finish = finish_and_reset  # type: ignore[method-assign]
    for _ in engine.run(workload(seed, 5, 3), aborts=dice.choice((0.0, 0.05, 0.2))):
        pass
    model.connector.shutdown()
    checker = model.connector._sanitizer.checker
    assert resets
    assert checker.checked > 0
    assert (checker.mismatches, checker.unknown, model.wrong) == (0, 0, [])
    assert model.connector._sanitizer.errors == engine.connector._recorder.errors == 0


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_of_the_worker_is_named(tmp_path: Path, kind: str) -> None:
    """Its model reads wrong rows, so the fault does harm; the first finding names it."""
    engine, model = machine(tmp_path, PLANTED.get(kind, kind), sanitize={"sample": 1.0})
    run(engine, model)
    found = findings(engine, model)
    assert found
    assert set(found) == {kind}
    if kind == "lost-flush":
        (_, stage, request, *_, sentence) = next(iter(engine.connector._marker.waiting))
        assert stage == "copy"
        assert request in sentence
        assert "whose flush was ordered in step" in sentence


def test_every_group_of_a_hybrid_model_is_checked(tmp_path: Path) -> None:
    """Full attention and a window of 64 tokens: blocks of both groups, and no false alarm."""
    engine, model = machine(tmp_path, sanitize={"sample": 1.0}, chunks=2 * CHUNKS, blocks=64, groups=("full", "window"))
    run(engine, model)
    checker = model.connector._sanitizer.checker
    assert {group for _, _, group in checker.ledger.contents} == {0, 1}
    assert checker.checked > 100
    assert (checker.mismatches, checker.unknown, model.wrong) == (0, 0, [])


@pytest.mark.parametrize("kind", FAULTS)
def test_recompute_keeps_wrong_bytes_from_the_model(tmp_path: Path, kind: str) -> None:
    """Without it the same run reads wrong rows. With it each of them is computed again before it is read."""
    fault = PLANTED.get(kind, kind)
    reported, harmed = machine(tmp_path, fault, sanitize={"sample": 1.0, "action": "report"})
    run(reported, harmed)
    assert harmed.wrong
    engine, model = machine(tmp_path, fault, sanitize={"sample": 1.0, "action": "recompute"})
    run(engine, model)
    assert findings(engine, model)
    assert model.wrong == []
    assert sorted(engine.finished) == sorted(reported.finished)


def test_stop_raises_the_sentence_into_the_engine(tmp_path: Path) -> None:
    engine, model = machine(tmp_path, "torn-copy", sanitize={"sample": 1.0, "action": "stop"})
    with pytest.raises(Corrupt, match="missing edge: the report of store"):
        run(engine, model)


def test_the_tap_changes_no_step_and_no_metadata_of_the_connector(tmp_path: Path) -> None:
    """The same steps without a tap, with it, and with ``sanitize``; orders travel through a pickle."""
    steps = []
    for sanitize in (None, {}, {"sample": 1.0}):
        engine, model = machine(tmp_path, sanitize=sanitize or None)
        told = []
        for output in engine.run(workload(5, 4, 3)):
            metadata = output.kv_connector_metadata
            orders = getattr(pickle.loads(pickle.dumps(metadata)), ATTACHED, None)
            assert (orders is not None) == bool(sanitize)
            told.append((
                output.num_scheduled_tokens, sorted(metadata.store_jobs), sorted(metadata.load_jobs),
                metadata.jobs_to_flush,
            ))
        assert model.wrong == []
        steps.append(told)
    assert steps[0] == steps[1] == steps[2]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_sample_is_the_same_at_store_and_load(tmp_path: Path, share: float) -> None:
    """Each checked load finds its store: nothing is unknown, and the share is about as wanted."""
    whole, every = machine(tmp_path, sanitize={"sample": 1.0})
    run(whole, every)
    engine, model = machine(tmp_path, sanitize={"sample": share})
    run(engine, model)
    checker = model.connector._sanitizer.checker
    assert checker.unknown == checker.mismatches == 0
    assert 0 < checker.checked < every.connector._sanitizer.checker.checked * min(0.9, 3 * share)


@pytest.mark.parametrize(("told", "sentence"), [
    ({"sample": 2}, '"sample" of "sanitize" must be above 0 and at most 1, and not 2.'),
    ({"sample": "1 %"}, "must be above 0 and at most 1, and not '1 %'."),
    ({"action": "pray"}, '"action" of "sanitize" must be report, recompute or stop, and not \'pray\'.'),
    ({"share": 1}, 'takes an object with "sample" and "action"'),
])
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, told: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="sanitize") as caught:
        machine(tmp_path, sanitize=told)
    assert sentence in str(caught.value)


def test_recompute_is_refused_where_the_engine_would_fail_the_request(tmp_path: Path) -> None:
    connector = named(offloading(CHUNKS), sanitize={"action": "recompute"})
    with pytest.raises(ValueError, match='needs "kv_load_failure_policy": "recompute"'):
        Engine(tmp_path, connector)


def test_another_connector_is_refused_by_name(tmp_path: Path) -> None:
    connector = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
                 "kv_connector_extra_config": {"cpu_bytes_to_use": 40 * PAGE}}
    with pytest.raises(ValueError, match="knows the workers of OffloadingConnector, and not those of SimpleCPU"):
        Engine(tmp_path, named(connector, sanitize={}))


def test_pages_of_a_chunk_follow_the_order_of_the_blocks() -> None:
    assert pairs_of([3, 4, 5], [9, 2], [3], [3], 2) == [(3, 19, 0), (4, 4, 0), (5, 5, 0)]
