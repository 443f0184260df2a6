"""The cache-only replay: its exact semantics on paper, and the known figures of the real trace."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.planning.cache_only import References, policy_named, references_of, replay
from kvbm_console.planning.traces import parse_trace
from tests.core.eviction.literal import Literal

KNOWN_AT_4000 = {
    "simple_lru": 8.653, "lfu": 8.572, "frequency_based": 12.811, "adaptive_lru": 9.721, "lrfu": 15.779,
    "belady": 32.053,
}
LRU_HITS = {250: 12_092, 1_000: 12_847, 4_000: 24_964, 16_000: 75_791, 64_000: 103_648}


def references(*keys: list[int], seconds: int = 1) -> References:
    at_ns = [number * seconds * 10**9 for number in range(len(keys))]
    return References("paper", 1, [f"r{number}" for number in range(len(keys))], at_ns, keys)


def run(refs: References, policy: str, capacity: int) -> list[int]:
    return replay(refs, policy_named(policy, PolicyConfig(), capacity, refs), capacity).hits_of


def test_a_hit_is_a_block_in_the_leading_run_probed_before_any_change() -> None:
    assert run(references([1, 2, 3], [1, 9, 3], [1, 2, 3]), "simple_lru", 10) == [0, 1, 3]


def test_the_tail_is_the_oldest_of_a_request() -> None:
    assert run(references([1, 2, 3], [4], [1, 2, 3]), "simple_lru", 3) == [0, 0, 2]


def test_own_blocks_are_never_evicted() -> None:
    """Block 1 is used often; under lfu the new blocks would go first, but they belong to the request."""
    refs = references([1], [1], [1], [2], [2], [3, 4], [3, 4])
    assert run(refs, "lfu", 2)[-1] == 2


def test_a_request_above_the_capacity_is_cut_to_its_leading_blocks() -> None:
    refs = references([1, 2, 3, 4], [1, 2, 3, 4])
    result = replay(refs, policy_named("simple_lru", PolicyConfig(), 2, refs), 2)
    assert (result.hits_of, result.cut_requests, result.references) == ([0, 2], 2, 8)
    assert run(refs, "belady", 2) == [0, 2]


def test_the_capacity_is_checked() -> None:
    with pytest.raises(UsageError, match="--total-kv-blocks"):
        run(references([1]), "simple_lru", 0)


def test_generated_chats_grow_over_their_own_prefix() -> None:
    refs = references_of(parse_trace("multiturn:requests=40,sessions=4"))
    assert len(refs.names) == 40
    assert list(refs.at_ns) == sorted(refs.at_ns)
    turns = [list(keys) for name, keys in zip(refs.names, refs.keys, strict=True) if name.startswith("s000-")]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(turns))
    assert replay(refs, policy_named("simple_lru", PolicyConfig(), 100_000, refs), 100_000).hits > 0


def test_a_workload_that_never_ends_is_refused() -> None:
    with pytest.raises(UsageError, match="--limit"):
        references_of(parse_trace("multiturn"))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"timestamp": 1, "input_length": 600, "hash_ids": [1]}', "hash_ids must have 2 ids"),
        ('{"timestamp": -1, "input_length": 6, "hash_ids": [1]}', "timestamp"),
        ('{"timestamp": 1, "input_length": 6, "hash_ids": [-1]}', "hash_ids"),
        ("{", "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(UsageError, match=what) as caught:
        references_of(parse_trace(f"mooncake:{path}"))
    assert "line 2" in str(caught.value)


@pytest.fixture(scope="module")
def real_trace(request: pytest.FixtureRequest) -> References:
    from tests.conftest import shared_directory

    place = shared_directory()
    path = None if place is None else place / "traces" / "mooncake_conversation_trace.jsonl"
    if path is None or not path.is_file():
        pytest.skip("needs the real trace in the shared data: set KVBM_SHARED")
    return references_of(parse_trace(f"mooncake:{path}"))


@pytest.mark.parametrize("policy", KNOWN_AT_4000)
def test_known_figures_of_the_real_trace(real_trace: References, policy: str) -> None:
    result = replay(real_trace, policy_named(policy, PolicyConfig(), 4_000, real_trace), 4_000)
    assert (result.requests, result.references) == (12_031, 288_500)
    assert 100 * result.hit_rate == pytest.approx(KNOWN_AT_4000[policy], abs=0.05)


@pytest.mark.parametrize("capacity", LRU_HITS)
def test_known_hits_of_recency_on_the_real_trace(real_trace: References, capacity: int) -> None:
    result = replay(real_trace, policy_named("simple_lru", PolicyConfig(), capacity, real_trace), capacity)
    assert result.hits == LRU_HITS[capacity]
    assert sum(result.hits_of) == result.hits
    assert result.cut_requests == 0


def test_the_published_formula_loses_to_recency_on_chats() -> None:
    refs = references_of(parse_trace("multiturn:requests=400"))
    recency = replay(refs, policy_named("simple_lru", PolicyConfig(), 1_000, refs), 1_000)
    assert replay(refs, Literal(), 1_000).hits < 0.7 * recency.hits
