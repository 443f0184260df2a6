"""Miss-ratio curves against replays through LRU caches, one replay for each capacity."""

import json
from collections import OrderedDict
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core.curves import NEVER, LruCurve, SampledCurve, Stack
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.planning.cache_only import References, policy_named, replay

prompts = st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=40)


def replayed(requests: list[list[int]], capacity: int) -> int:
    """Hits of a plain LRU cache: the lookup first, then all blocks, tail first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for keys in requests:
        for key in keys:
            if key not in cache:
                break
            hits += 1
        for key in reversed(keys[:capacity] if len(set(keys)) > capacity else keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@given(prompts)
def test_the_curve_is_a_replay_at_every_capacity(requests: list[list[int]]) -> None:
    requests = [list(dict.fromkeys(keys)) for keys in requests]
    curve = LruCurve()
    for keys in requests:
        curve.add(keys)
    assert curve.references == sum(map(len, requests))
    for capacity in range(1, 16):
        assert curve.hits(capacity) == replayed(requests, capacity), capacity


@given(prompts, st.integers(1, 5))
def test_a_key_of_several_blocks_counts_as_these_blocks(requests: list[list[int]], most: int) -> None:
    def size(key: int) -> int:
        return key % most + 1

    coarse, fine = LruCurve(), LruCurve()
    for keys in requests:
        coarse.add(keys, [size(key) for key in keys])
        fine.add([(key, index) for key in keys for index in range(size(key))])
    assert coarse.references == fine.references
    assert [coarse.hits(n) for n in range(1, 70)] == [fine.hits(n) for n in range(1, 70)]


@given(prompts, st.sets(st.integers(0, 12)))
def test_depths_are_places_in_the_order_of_the_last_use(requests: list[list[int]], forgotten: set[int]) -> None:
    stack, order = Stack(), list[int]()
    for number, keys in enumerate(requests):
        expected = [order.index(key) + 1 if key in order else NEVER for key in keys]
        assert stack.touch(keys) == expected
        order = list(dict.fromkeys([*keys, *order]))
        if number == len(requests) // 2:
            stack.forget(forgotten & set(order))
            order = [key for key in order if key not in forgotten]
        assert stack.blocks == len(stack) == len(order)


def chats(seed: int, sessions: int, turns: int) -> list[list[int]]:
    """Requests of sessions that take turns in any order, each with one of few system prompts in front."""
    random = Random(seed)
    prompts = [[random.getrandbits(64) for _ in range(random.randrange(4, 20))] for _ in range(5)]
    open_chats = [list(random.choice(prompts)) for _ in range(sessions)]
    requests = []
    for _ in range(turns):
        chat = open_chats[min(random.randrange(sessions), random.randrange(sessions))]
        chat.extend(random.getrandbits(64) for _ in range(random.randrange(1, 30)))
        requests.append(list(chat))
    return requests


def test_many_touches_are_renumbered_and_nothing_changes() -> None:
    requests = chats(1, 300, 4_000)
    curve = LruCurve()
    for keys in requests:
        curve.add(keys)
    names = [str(number) for number in range(len(requests))]
    references = References("chats", 16, names, list(range(len(requests))), requests)
    for capacity in (700, 5_000, 40_000):
        policy = policy_named("simple_lru", PolicyConfig(), capacity, references)
        assert curve.hits(capacity) == replay(references, policy, capacity).hits


def test_a_small_load_is_sampled_whole_and_exact() -> None:
    requests = chats(2, 20, 100)
    exact, sampled = LruCurve(), SampledCurve()
    for keys in requests:
        exact.add(keys)
        sampled.add(keys)
    assert sampled.share == 1.0
    for capacity in (1, 10, 50, 100, 127):
        estimate = sampled.at(capacity)
        assert estimate is not None
        assert estimate.error == 0.0
        assert estimate.hit_rate == pytest.approx(exact.hit_rate(capacity))


def test_the_sampled_curve_is_right_within_its_error() -> None:
    inside, bounds = 0, []
    for seed in range(4):
        requests = chats(seed, 200, 3_000)
        exact, sampled = LruCurve(), SampledCurve(2_048)
        for keys in requests:
            exact.add(keys)
            sampled.add(keys)
        assert sampled.share < 0.1
        for capacity in (500, 2_000, 5_000, 10_000, 20_000, 40_000):
            estimate, truth = sampled.at(capacity), exact.hit_rate(capacity)
            assert estimate is not None
            assert truth is not None
            inside += abs(estimate.hit_rate - truth) <= estimate.error
            bounds.append(estimate.error)
    assert inside >= 22, "22 of 24 are within an error of two standard deviations"
    assert sorted(bounds)[12] < 0.05, "and the error says something"


@settings(max_examples=20)
@given(st.integers(0, 1_000))
def test_a_sampled_curve_keeps_its_bound(seed: int) -> None:
    sampled = SampledCurve(64)
    for keys in chats(seed, 20, 60):
        sampled.add(keys)
        assert len(sampled._keys) == len(sampled._stack) <= 64


def test_many_points_of_a_sampled_curve_are_its_points() -> None:
    sampled = SampledCurve(256)
    for keys in chats(3, 50, 500):
        sampled.add(keys)
    sizes = [1, 64, 100, 500, 3_000, 10_000, 10**9]
    points = [sampled.at(size) for size in sizes]
    assert sampled.hit_rates(sizes) == pytest.approx([point.hit_rate for point in points if point is not None])


def test_nothing_asked_for_has_no_rate() -> None:
    assert SampledCurve().hit_rates([1]) == []
    assert SampledCurve().at(100) is None
    assert LruCurve().hit_rate(100) is None


def test_the_shared_trace_is_the_replay_at_its_capacities(mooncake_trace: Path) -> None:
    keys = [json.loads(line)["hash_ids"] for line in mooncake_trace.read_text().splitlines()]
    names = [str(number) for number in range(len(keys))]
    references = References("trace", 512, names, list(range(len(keys))), keys)
    curve, sampled = LruCurve(), SampledCurve()
    for prompt in keys:
        curve.add(prompt)
        sampled.add(prompt)
    for capacity in (1_000, 20_000):
        policy = policy_named("simple_lru", PolicyConfig(), capacity, references)
        assert curve.hits(capacity) == replay(references, policy, capacity).hits
        estimate = sampled.at(capacity)
        assert estimate is not None
        assert estimate.hit_rate == pytest.approx(curve.hits(capacity) / references.total, abs=estimate.error)
