"""Vectors of an independent tiered cache: the shared file whole, and that the checker can fail."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.cli.main import cli
from kvbm_console.core.errors import UsageError
from kvbm_console.planning import vectors
from kvbm_console.planning.store import FifoPool, KVStore, StoreConfig
from kvbm_console.planning.vectors import VectorScenario, check_scenario, read_vectors

VARIANTS = Path(__file__).with_name("variants.json")


@pytest.fixture
def file(shared: Path) -> Path:
    path = shared / "vectors" / "tiered_cache.json"
    if not path.is_file():
        pytest.skip("needs the vectors in the shared data")
    return path


def run(*args: str) -> Any:
    return CliRunner().invoke(cli, ["simulate", "--vectors", *args], prog_name="kvbm-console")


def test_every_shared_vector_comes_out_as_it_must(file: Path) -> None:
    result = run(str(file), "--format", "json")
    document = json.loads(result.stdout)
    assert [line for line in document["lines"] if not line["ok"]] == []
    assert result.exit_code == 0
    assert document["vectors"] == 61
    kinds = [line["kind"] for line in document["lines"]]
    assert (kinds.count("normative"), kinds.count("bug_compat")) == (31, 12)


def test_every_variant_of_our_own_comes_out_as_it_must() -> None:
    """Scenarios of the same form that the shared file does not have: chunks, decoding, tiers, refusals, copies."""
    result = run(str(VARIANTS), "--format", "json")
    document = json.loads(result.stdout)
    assert [line for line in document["lines"] if not line["ok"]] == []
    assert (result.exit_code, document["failed"]) == (0, 0)
    kinds = [line["kind"] for line in document["lines"]]
    assert min(kinds.count("normative"), kinds.count("bug_compat")) >= 8
    named = {bug for one in json.loads(VARIANTS.read_bytes())["scenarios"] for bug in one["bug"].split()}
    assert named >= {"BUG-1", "BUG-2", "BUG-3", "BUG-4", "BUG-6", "BUG-7"}


def test_every_variant_can_fail(tmp_path: Path) -> None:
    """With one number of its last state changed, a normative one fails; as normative, one with a defect fails."""
    data = json.loads(VARIANTS.read_bytes())
    for scenario in data["scenarios"]:
        if scenario["status"] == "normative":
            scenario["ops"][-1]["state"]["misses"] += 1
        else:
            scenario["status"] = "normative"
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(data))
    lines = json.loads(run(str(changed), "--format", "json").stdout)["lines"]
    assert [line["name"] for line in lines if line["ok"]] == []


def test_what_is_not_understood_is_a_line_of_its_own(tmp_path: Path) -> None:
    config = {"gpu_blocks": 4, "block_size": 2}
    data = {
        "schema": "kv-vectors/1", "source": "here", "hash_vectors": [{"prev": "", "tokens": "x", "hash": ""}],
        "metric_vectors": [{"fn": "moon_phase", "expect": 1}, {"fn": "cache_hit_rate", "hits": "x", "expect": 0}, 7],
        "cli_vectors": [{"args": "--kv-cpu-blocks 5"}, {}],
        "scenarios": [
            {"name": "odd", "status": "normative", "config": config, "ops": [{"op": "fly"}]},
            {"name": "bad", "status": "normative", "config": {**config, "gpu_blocks": 0}, "ops": []},
            {"name": "shape", "status": "normative", "config": config, "ops": {}},
            {"name": "other", "status": "forbidden", "config": config, "ops": []}, {}, [],
            {"name": "good", "status": "normative", "config": config,
             "ops": [{"op": "lookup", "result": {"blocks": []}}]},
        ],
        "weather_vectors": [{"rain": True}],
    }
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(data))
    result = run(str(path))
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (1, "")
    assert lines[-1] == "14 vectors, 13 failed"
    assert [line for line in lines if line.startswith("ok")] == ["ok   normative  good"]
    said = "\n".join(lines)
    for words in ("operation 0 (fly) is not known", "gpu_blocks must be at least 1, got 0", "cannot be read",
                  "'forbidden' is neither", "'moon_phase' is not known", "it was refused with", "weather_vectors"):
        assert words in said


def test_a_changed_vector_fails_with_its_place(file: Path, tmp_path: Path) -> None:
    data = json.loads(file.read_bytes())
    data["scenarios"][0]["ops"][0]["state"]["hits"] += 1
    data["hash_vectors"][0]["hash"] = "00"
    data["metric_vectors"][0]["expect"] = 0.5
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(data))
    result = run(str(changed))
    assert result.exit_code == 1
    bad = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert len(bad) == 3
    assert bad[2].endswith("operation 0 (alloc r1): hits 0 is not 1")


def test_a_defect_that_we_had_too_would_be_seen(file: Path) -> None:
    """A bug_compat scenario fails when what was observed is what we do."""
    data = read_vectors(file)
    scenarios = [msgspec.json.decode(raw, type=VectorScenario) for raw in data.scenarios]
    normative = next(one for one in scenarios if one.status == "normative")
    assert check_scenario(msgspec.structs.replace(normative, status="bug_compat"))
    assert not check_scenario(normative)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "no file of vectors"), ('{"schema": "other/1"}', "kv-vectors/1"), ("[]", "no file of vectors")],
)
def test_another_file_is_refused_with_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    result = run(str(path))
    assert result.exit_code == 2
    assert words in result.stderr
    assert run(str(tmp_path / "absent.json")).exit_code == 2


def scenario(*ops: dict[str, Any], **config: Any) -> str:
    """The verdict on a scenario whose states do not matter."""
    return check_scenario(msgspec.convert(
        {"name": "own", "status": "normative", "config": {"gpu_blocks": 4, "block_size": 2, **config}, "ops": ops},
        VectorScenario,
    ))


def test_an_unknown_operation_and_status_are_failures() -> None:
    assert scenario({"op": "explode"}).endswith("is not known")
    assert "status" in check_scenario(VectorScenario("x", "maybe", StoreConfig(gpu_blocks=1, block_size=1), []))
    assert "output token" in scenario(
        {"op": "alloc", "req": "a", "input": [1, 2], "end": 2, "result": {"ok": True}}, {"op": "decode", "req": "a"}
    )


@pytest.mark.parametrize(
    ("mutant", "contract"),
    [("pays_with_own_prefix", "BC-3"), ("one_copy", "BC-9"), ("half_a_refusal", "BC-3"), ("over_capacity", "BC-10")],
)
def test_the_checker_catches_planted_defects(monkeypatch: pytest.MonkeyPatch, mutant: str, contract: str) -> None:
    """Each is one that the observed program has, or that a cache must never have; without it the scenario is well."""
    first, second = [10, 11, 20, 21, 30, 31, 40, 41], [90, 91]
    ops: list[dict[str, Any]] = [
        {"op": "admit", "req": "a", "input": first}, {"op": "mirror", "reqs": ["a"]}, {"op": "release", "req": "a"},
        {"op": "admit", "req": "x", "input": second}, {"op": "release", "req": "x"},
        {"op": "admit", "req": "y", "input": [80, 81]},
        {"op": "admit", "req": "b", "input": first[:6]},
        {"op": "release", "req": "b"}, {"op": "release", "req": "y"},
        {"op": "alloc", "req": "c", "input": second, "end": 2}, {"op": "mirror", "reqs": ["c"]},
        {"op": "alloc", "req": "d", "input": second, "end": 2}, {"op": "release", "req": "d"},
        {"op": "admit", "req": "e", "input": [1, 2, 3, 4, 5, 6]}, {"op": "lookup", "tokens": second},
        {"op": "admit", "req": "f", "input": [7] * 8},
    ]
    verdicts = [_verdict(ops)]
    _plant(monkeypatch, mutant)
    verdicts.append(_verdict(ops))
    assert verdicts[0] == ""
    assert contract in verdicts[1]


def _verdict(ops: list[dict[str, Any]]) -> str:
    """The first broken contract; states and results are not compared."""
    store = KVStore(StoreConfig(gpu_blocks=4, block_size=2, cpu_blocks=4))
    for entry in ops:
        operation = msgspec.convert(entry, vectors.Operation)
        before = store.state()
        try:
            result = vectors._RUN[operation.op](store, operation)
        except IndexError:
            return "BC-3: the prefix that was found is gone when it is claimed"
        broken = vectors._broken_contract(store, operation, result, before)
        if broken:
            return broken
    return ""


def _plant(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    if mutant == "pays_with_own_prefix":
        reload = FifoPool.reload
        monkeypatch.setattr(FifoPool, "reload", lambda self, hashes, prefix: reload(self, hashes, ()))
        monkeypatch.setattr(KVStore, "_continuation", _continuation_of_everything)
    elif mutant == "one_copy":
        monkeypatch.setattr(FifoPool, "_forget", _forget_every_copy)
    elif mutant == "half_a_refusal":
        allocate = KVStore.allocate

        def counts_first(self: KVStore, *args: Any) -> bool:
            ok = allocate(self, *args)
            self.misses += not ok
            return ok

        monkeypatch.setattr(KVStore, "allocate", counts_first)
    else:
        monkeypatch.setattr(KVStore, "_make_room", lambda self: None)


def _continuation_of_everything(self: KVStore, chain: list[int], first: int, prefix: list[int]) -> list[int]:
    return [key for key in chain[first:] if not self.pool.match([key]) and key in self.host.resident]


def _forget_every_copy(self: FifoPool, block: int) -> None:
    """One entry for a hash, and evicting any copy deletes it."""
    self._index.pop(self.hash_of[block], None)
    self._copies.pop(self.hash_of[block], None)
    self.hash_of[block] = 0


prompts = some.lists(some.integers(0, 2), min_size=1, max_size=9)


@settings(max_examples=60)
@given(some.data())
def test_contracts_hold_in_random_runs(data: some.DataObject) -> None:
    config = StoreConfig(
        gpu_blocks=data.draw(some.integers(2, 8)), block_size=data.draw(some.integers(1, 3)),
        cpu_blocks=data.draw(some.sampled_from([0, 1, 4])),
    )
    store = KVStore(config)
    names = some.sampled_from("abcd")
    for _ in range(data.draw(some.integers(1, 25))):
        verb = data.draw(some.sampled_from(["admit", "decode", "release", "mirror", "lookup"]))
        name = data.draw(names)
        if verb == "admit" and name in store.requests:
            continue
        if verb == "decode" and name not in store.requests:
            continue
        operation = vectors.Operation(
            verb, name, input=data.draw(prompts), output=[data.draw(some.integers(0, 2))], tokens=data.draw(prompts),
            reqs=[name], chunk=data.draw(some.integers(0, 4)),
        )
        before = store.state()
        result = vectors._RUN[verb](store, operation)
        assert not vectors._broken_contract(store, operation, result, before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpu_blocks", 0), ("block_size", 0), ("cpu_blocks", -1), ("bandwidth", 0), ("bandwidth", float("nan")),
     ("bandwidth", float("inf")), ("bandwidth", -1), ("base_latency", -1)],
)
def test_a_bad_configuration_names_its_field(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field.replace("_", "[-_]")):
        StoreConfig(**{"gpu_blocks": 1, "block_size": 1, "cpu_blocks": 1, field: value})  # type: ignore[arg-type]


def test_pending_is_read_without_effect_and_consumed_once() -> None:
    store = KVStore(StoreConfig(gpu_blocks=4, block_size=2, cpu_blocks=4, bandwidth=1, base_latency=10))
    store.admit("a", [1, 2, 3, 4])
    store.mirror(["a"])
    store.release("a")
    store.admit("b", [9] * 8)
    store.release("b")
    store.admit("c", [1, 2, 3, 4, 5])
    assert [store.pending(), store.pending(), store.consume(), store.consume(), store.pending()] == [24, 24, 24, 0, 0]
    assert store.real_thrash_rate == 1.0
