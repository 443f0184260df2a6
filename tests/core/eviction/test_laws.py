"""Laws of all policies on random prefix trees: the theorem, monotone hits, the bound, an oracle."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core.eviction import auto
from kvbm_console.core.eviction.leaves import chains
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.core.eviction.pool_policy import PoolPolicy
from kvbm_console.core.eviction.ranked import AdaptiveLru, FrequencyBased, Lfu, Lrfu, Ranked
from kvbm_console.planning.cache_only import References, replay
from tests.core.eviction.trees import ALL, SECOND_NS, Where, make, paths, steps, traces
from tests.core.eviction.trees import chain as chain_of


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30)
@given(refs=traces(), capacity=some.integers(6, 20))
def test_a_parent_is_never_evicted_before_its_child(name: str, refs: References, capacity: int) -> None:
    policy = make(name, capacity, refs)
    parent = {}
    for at_ns, keys in zip(refs.at_ns, refs.keys, strict=True):
        parent.update(zip(keys[1:], keys, strict=False))
        policy.touch(keys, at_ns)
        excess = len(policy.resident) - capacity
        if excess > 0:
            victims = policy.victims(excess, None, keys)
            assert victims is not None
            for victim in victims:
                policy.forget([victim])
                orphans = [key for key in policy.resident if key in parent and parent[key] not in policy.resident]
                assert not orphans, f"{victim} went before its children {orphans}"


@settings(max_examples=30)
@given(refs=traces())
def test_the_theorem_holds_while_the_half_life_changes(refs: References) -> None:
    capacity = 10
    policy = auto.LrfuAuto(capacity)
    parent = {}
    for number, (at_ns, keys) in enumerate(zip(refs.at_ns, refs.keys, strict=True)):
        parent.update(zip(keys[1:], keys, strict=False))
        policy.touch(keys, at_ns)
        policy._follow(number * 5 % len(auto.RULES))
        excess = len(policy.resident) - capacity
        if excess > 0:
            policy.forget(policy.victims(excess, None, keys) or ())
        assert all(parent[key] in policy.resident for key in policy.resident if key in parent)


@settings(max_examples=30)
@given(refs=traces())
def test_hits_of_recency_grow_with_the_capacity(refs: References) -> None:
    hits = [replay(refs, make("simple_lru", capacity), capacity).hits for capacity in range(6, 40, 3)]
    assert hits == sorted(hits)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30)
@given(refs=traces(), capacity=some.integers(6, 20))
def test_no_policy_is_above_belady(name: str, refs: References, capacity: int) -> None:
    bound = replay(refs, make("belady", capacity, refs), capacity).hits
    assert replay(refs, make(name, capacity), capacity).hits <= bound


@settings(max_examples=40)
@given(refs=traces(most=7), capacity=some.integers(2, 4))
def test_belady_is_the_best_of_all_choices(refs: References, capacity: int) -> None:
    """Every way to evict is tried on small traces of short prompts."""
    short = References(refs.trace, 1, refs.names, refs.at_ns, [keys[:2] for keys in refs.keys])
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for keys in short.keys:
        following: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            run = next((at for at, key in enumerate(keys) if key not in resident), len(keys))
            full = resident | set(keys)
            for left in _subsets(sorted(full - set(keys)), max(0, len(full) - capacity)):
                state = full - set(left)
                following[state] = max(following.get(state, 0), hits + run)
        best = following
    assert replay(short, make("belady", capacity, short), capacity).hits == max(best.values())


def _subsets(keys: list[int], count: int) -> list[tuple[int, ...]]:
    from itertools import combinations

    return list(combinations(keys, count))


class _Oracle:
    """The four ranked policies, computed from the whole history at each question."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.touches: list[tuple[list[int], int]] = []
        self.since: dict[int, int] = {}
        """Resident key to the touch that made it resident."""

    def rank(self, key: int) -> tuple[float, int, int]:
        mine = [
            (number, at_ns / SECOND_NS, keys.index(key)) for number, (keys, at_ns) in enumerate(self.touches)
            if key in keys
        ]
        last, seconds, depth = mine[-1]
        while_resident = sum(number >= self.since[key] for number, _, _ in mine)
        value = {
            "lfu": lambda: float(while_resident),
            "frequency_based": lambda: float(len(mine)),
            "adaptive_lru": lambda: 0.7 * seconds - 300.0 / (while_resident + 1),
            "lrfu": lambda: math.log2(math.fsum(2.0 ** (at / 300.0) for _, at, _ in mine)),
        }[self.name]()
        return (round(value, 6), last, -depth)


@pytest.mark.parametrize("name", ["lfu", "frequency_based", "adaptive_lru", "lrfu"])
@settings(max_examples=40)
@given(steps=some.lists(steps, min_size=1, max_size=25))
def test_ranked_policies_choose_what_an_oracle_chooses(name: str, steps: list[tuple[int, list[int]]]) -> None:
    capacity, now = 8, 0
    policy = {
        "lfu": lambda: Lfu(capacity), "frequency_based": lambda: FrequencyBased(capacity),
        "adaptive_lru": lambda: AdaptiveLru(capacity, 0.3, 1_000.0), "lrfu": lambda: Lrfu(capacity, 300.0),
    }[name]()
    oracle = _Oracle(name)
    for number, (gap, path) in enumerate(steps):
        now += gap * SECOND_NS
        keys = chain_of(path)
        policy.touch(keys, now)
        oracle.touches.append((keys, now))
        for key in keys:
            oracle.since.setdefault(key, number)
        excess = len(policy.resident) - capacity
        if excess > 0:
            chosen = policy.victims(excess, None, keys)
            others = sorted((key for key in oracle.since if key not in keys), key=oracle.rank)
            assert chosen is not None
            assert [oracle.rank(key) for key in chosen] == [oracle.rank(key) for key in others[:excess]]
            policy.forget(chosen)
            for key in chosen:
                del oracle.since[key]
    assert set(policy.resident) == set(oracle.since)


@pytest.mark.parametrize("fresh", [lambda: Lfu(8), lambda: FrequencyBased(8), lambda: Lrfu(8, 300.0)])
def test_a_block_that_comes_back_beside_its_ancestor_is_named_once(fresh: Callable[[], Ranked]) -> None:
    """Beside the same ancestor it has the stamp that it had before it was forgotten."""
    policy = fresh()
    policy.insert([1], None, 0)
    for _ in range(2):
        policy.insert([2, 3], 1, 0)
        assert policy.victims(3) is not None
        policy.forget([2, 3])
    policy.insert([2, 3], 1, 0)
    assert sorted(policy.victims(3) or ()) == [1, 2, 3]
    assert policy.victims(4) is None


_VERBS = some.sampled_from(["use", "store", "store backwards", "evict"])
_STEPS = some.lists(some.tuples(_VERBS, paths, some.integers(1, 9)), max_size=40)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(taken=_STEPS, data=some.data())
def test_a_tier_keeps_chains_whole_and_gives_all_that_may_go(
    name: str, taken: list[tuple[str, list[int], int]], data: some.DataObject
) -> None:
    """Blocks are stored in any order and some are held; all may go but what continues in a block that stays (I13)."""
    parent_of: dict[int, int] = {}
    pool = PoolPolicy(PolicyConfig(policy=name), 20, parent_of)
    resident, references = set[int](), 0
    for now, (verb, path, count) in enumerate(taken):
        keys = chain_of(path)
        parent_of.update(zip(keys[1:], keys, strict=False))
        if verb == "use":
            pool.use(keys, now * SECOND_NS)
            references += len(keys)
        elif verb == "evict":
            held = data.draw(some.sets(some.sampled_from(sorted(resident)), max_size=3)) if resident else set()
            kept = {above for key in held for above in _prefix(parent_of, key)}
            victims, _ = pool.choose(count, not_in(held.union(keys)), now * SECOND_NS)
            kept |= {above for key in resident.intersection(keys) for above in _prefix(parent_of, key)}
            assert len(victims) == len(set(victims)) == min(count, len(resident - kept))
            assert kept.isdisjoint(victims)
            for victim in victims:
                resident.remove(victim)
                assert not [key for key in resident if parent_of.get(key) == victim], "it went before its child"
            pool.forget(victims)
        else:
            new = [key for key in keys if key not in resident]
            for part in ([new] if verb == "store" else [[key] for key in reversed(new)]):
                for chain in chains(parent_of, part):
                    pool.insert(chain, now * SECOND_NS)
            resident |= set(new)
        assert pool.policy.resident == resident
    assert pool.gauges()["references"] == references


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "learned"])
@settings(max_examples=30)
@given(seed=some.integers(0, 2**32))
def test_the_victims_are_the_lowest_leaves_one_after_the_other(name: str, seed: int) -> None:
    """Also after uses, evictions, stores in any order, a change of the rule, and a restore."""
    dice = random.Random(seed)
    parent_of = {key: key - 1 for key in range(400) if key % 40}
    parent_of |= {key: 40 * dice.randrange(key // 40) + dice.randrange(40) for key in range(40, 400, 40)}
    pool = PoolPolicy(PolicyConfig(policy=name), 200, parent_of)
    for now in range(150):
        first, verb = 40 * dice.randrange(10), dice.random()
        keys = _prefix(parent_of, first + dice.randrange(40))[::-1]
        if verb < 0.4:
            held = set(dice.sample(range(400), dice.choice([0, 3])))
            chosen, _ = pool.choose(dice.randint(1, 30), not_in(held), now * SECOND_NS)
            assert chosen == lowest_leaves(pool, parent_of, len(chosen), held)
            pool.forget(chosen[: dice.choice([len(chosen), 1])])
        elif verb < 0.7:
            pool.use(keys, now * SECOND_NS)
        elif verb < 0.75:
            exported, pool = pool.export(), PoolPolicy(PolicyConfig(policy=name), 200, parent_of)
            pool.restore(exported)
        else:
            new = [key for key in keys if key not in pool.policy.resident]
            for part in [new] if dice.random() < 0.5 else [new[-10:], new[:-10]]:
                for chain in chains(parent_of, part):
                    pool.insert(chain, now * SECOND_NS)


def lowest_leaves(pool: PoolPolicy, parent_of: dict[int, int], count: int, held: set[int]) -> list[int]:
    """The order of eviction, found anew for each victim. Of equal ranks the parent of the last victim goes first."""
    policy, chosen = pool.policy, list[int]()
    assert isinstance(policy, Ranked)
    resident = set(policy.resident)
    for _ in range(count):
        above = {parent_of.get(key) for key in resident}
        last = parent_of.get(chosen[-1]) if chosen else None
        leaves = (key for key in resident if key not in above and key not in held)
        chosen.append(min(leaves, key=lambda key: (policy.rank(key), policy.stamp(key), key != last, key)))
        resident.remove(chosen[-1])
    return chosen


def not_in(keys: set[int]) -> Where:
    return Where(lambda key: key not in keys)


def _prefix(parent_of: dict[int, int], key: int) -> list[int]:
    prefix = [key]
    while prefix[-1] in parent_of:
        prefix.append(parent_of[prefix[-1]])
    return prefix


@settings(max_examples=30)
@given(some.lists(paths, max_size=30))
def test_pinned_keys_are_passed_over_by_every_policy(taken: list[list[int]]) -> None:
    for name in POLICIES:
        policy = make(name, 8)
        for at, path in enumerate(taken):
            policy.touch(chain_of(path), at)
        odd = [key for key in policy.resident if key % 2]
        even = len(policy.resident) - len(odd)
        assert set(policy.victims(even, lambda key: not key % 2) or ()) == set(policy.resident) - set(odd)
        assert policy.victims(even + 1, lambda key: not key % 2) is None
