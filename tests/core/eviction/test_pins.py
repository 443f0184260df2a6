"""Pins: a budget of places for each sequence that finishes, closed under prefixes, never more than half of a pool."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core.eviction.policy import PRESETS, PolicyConfig
from kvbm_console.core.eviction.pool_policy import GUARDED_SHARE, PIN, PoolPolicy
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import simulate

CHATS = "multiturn:requests=80,sessions=16,prompts=2,think=4,user=400,turns=4,output=32"
"""More chats than the host tier holds, so that what is kept of each decides the hits."""


@cache
def hit_rate(pin_tail_tokens: int) -> float:
    """Of chats whose lower tier holds a part of them, with everything else equal."""
    document = simulate(SimulateOptions(
        trace=CHATS, total_kv_blocks=80, kv_cpu_blocks=190, block_size=64, kv_offload_threshold=0.0, stats_every=0,
        policy=PolicyConfig(policy="adaptive_lru", pin_tail_tokens=pin_tail_tokens),
    )).document
    assert document["policy"]["gauges"]["G2"]["guarded"] <= 95
    assert (document["policy"]["gauges"]["G2"]["guarded"] > 0) == (pin_tail_tokens > 0)
    return float(document["prefix_hit_rate"])


def test_the_number_of_pinned_tokens_acts_and_is_no_switch() -> None:
    tokens = (0, 64, 128, 256, 512, 100_000)
    assert len({hit_rate(number) for number in tokens}) == len(tokens)


def test_some_places_for_each_chat_beat_none_and_beat_all_for_the_last_ones() -> None:
    assert hit_rate(128) > hit_rate(0) + 0.01
    assert hit_rate(128) > hit_rate(100_000) + 0.03


def test_presets_differ_in_their_pins_alone_too() -> None:
    assert hit_rate(PRESETS["chat"]["pin_tail_tokens"]) != hit_rate(PRESETS["document"]["pin_tail_tokens"])


SEQUENCES = some.lists(
    some.tuples(some.integers(0, 3), some.integers(1, 12), some.integers(1, 5), some.integers(0, 6)), max_size=25
)
"""(which sequence, its blocks, the budget, the time since the last one): sequences share their first three blocks."""


@settings(max_examples=60)
@given(SEQUENCES, some.integers(4, 30))
def test_what_is_pinned_is_closed_under_prefixes_bounded_and_grows_by_its_budget(
    ends: list[tuple[int, int, int, int]], capacity: int
) -> None:
    policy = PoolPolicy(PolicyConfig(), capacity)
    now_ns = 0
    for which, length, budget, later in ends:
        now_ns += later
        keys = [block if block < 3 else 100 * which + block for block in range(1, length + 1)]
        parent_of = dict(zip(keys[1:], keys, strict=False))
        before = pinned(policy, now_ns)
        policy.pin(keys, budget, now_ns, now_ns + 10)
        after = pinned(policy, now_ns)
        assert len(after - before) <= budget
        assert len(after) <= GUARDED_SHARE * capacity
        assert all(parent in after for key, parent in parent_of.items() if key in after)
        first = next((at for at, key in enumerate(keys) if key not in before), length)
        if first + budget <= GUARDED_SHARE * capacity:
            assert after.issuperset(keys[: first + budget])


def pinned(policy: PoolPolicy, now_ns: int) -> set[int]:
    return {key for key, level, until_ns in policy.export()["guards"] if level == PIN and until_ns > now_ns}


@pytest.mark.parametrize("grown", [2, 5])
def test_a_sequence_whose_growth_fits_into_the_budget_is_pinned_to_its_end(grown: int) -> None:
    policy = PoolPolicy(PolicyConfig(), 100)
    for length in range(grown, 4 * grown + 1, grown):
        policy.pin(list(range(1, length + 1)), grown, 0, 10)
        assert pinned(policy, 0) == set(range(1, length + 1))


@pytest.mark.parametrize(("tokens", "ttl_s", "share"), [(100_000, 6e4, 1.0), (100_000, 1e-3, 0.0), (0, 60.0, 0.0)])
def test_hits_in_pinned_blocks_are_all_that_was_found_while_it_was_pinned(
    tokens: int, ttl_s: float, share: float
) -> None:
    """The host tier has room for all, and a chat goes on behind its last turn: what is found has been pinned."""
    document = simulate(SimulateOptions(
        trace=CHATS, total_kv_blocks=80, kv_cpu_blocks=4_000, block_size=64, kv_offload_threshold=0.0, stats_every=0,
        policy=PolicyConfig(policy="adaptive_lru", pin_tail_tokens=tokens, pin_ttl_s=ttl_s),
    )).document
    assert document["hit_blocks"]["G2"] > 500
    assert document["policy"]["gauges"]["G2"]["pinned_hits"] == share * document["hit_blocks"]["G2"]


def test_a_part_that_is_pinned_is_a_part_of_the_hits_and_is_kept_by_a_keyframe() -> None:
    policy = PoolPolicy(PolicyConfig(), 100)
    policy.pin([1, 2, 3], 2, 0, 10)
    policy.guard([7], 5, 10)
    policy.found([1, 2, 3, 7], 5)
    policy.found([1], 10)
    assert policy.gauges()["pinned_hits"] == 2, "neither a priority nor a pin of before"
    other = PoolPolicy(PolicyConfig(), 100)
    other.restore(policy.export())
    assert other.gauges() == policy.gauges()
