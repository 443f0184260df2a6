"""Long explorations keep their finished chunks, and name what is not known."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.explore.vllm import Release
from tests.vllm import explore_long as module

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def chunks_of_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of its own."""
    monkeypatch.setattr(module, "STATE", tmp_path / "releases" / "state.jsonl")
    monkeypatch.setattr(module, "CHUNK", 1)


def test_each_chunk_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call runs the chunk that is left, and a verdict that is not known is named."""
    release = Release()
    monkeypatch.setitem(module.KINDS, "silent", (lambda *_: {
        "runs": 1, "steps": 9, "findings": {"x": 1}, "unknown": [["press", 0, "x", "a sentence"]]}, ("lru",)))
    for seeds in (range(1), range(2)):
        module.explore("silent", release, ("lru",), seeds, 1e9)
    assert [line["seeds"] for line in module.done("silent")] == [[0, 1], [1, 2]]
    assert module.wrong("silent") == [f"{release.version} lru press 0 x a sentence"] * 2
    header, rule, row = module.table("silent")
    assert header.count("|") == rule.count("|") == row.count("|")
    assert row.endswith("| 0 | 2 |")


def test_a_chunk_of_each_kind_is_as_it_should_be() -> None:
    release = Release()
    for kind, subject in (("silent", "lru"), ("tap", "connector")):
        module.explore(kind, release, (subject,), range(1), 1e9)
        (line,) = module.done(kind)
        assert (line["runs"], line["subject"]) == ({"silent": 10, "tap": 3}[kind], subject)
        assert module.wrong(kind) == []
