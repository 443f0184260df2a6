"""Shadow caches: each has the hits of its full-sized namesake, in batches of any size, also after a keyframe."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core.eviction import auto, make_policy
from kvbm_console.core.eviction.policy import EvictionPolicy, PolicyConfig
from kvbm_console.core.eviction.ranked import unpacked
from kvbm_console.core.eviction.shadows import AdaptiveShadow, LrfuShadow, RecencyShadow, Shadow
from kvbm_console.planning.cache_only import replay
from tests.core.eviction.generated import references_named
from tests.core.eviction.trees import SECOND_NS, chain, steps

CAPACITY = 7
Touch = tuple[list[int], list[int], int]


class Stamps(dict[int, int]):
    """The column that shadows share."""

    def touch(self, keys: list[int], at_ns: int) -> Touch:
        first = max(at_ns, max(self.values(), default=-1) + 1)
        deepest_first = keys[::-1]
        own = list(range(first, first + len(keys)))
        self.update(zip(deepest_first, own, strict=True))
        return deepest_first, own, at_ns


def shadow_of(name: str, stamps: Stamps) -> Shadow:
    return {
        "simple_lru": lambda: RecencyShadow(CAPACITY), "lfu": lambda: AdaptiveShadow(CAPACITY, stamps, 0.0, 1.0),
        "adaptive_lru": lambda: AdaptiveShadow(CAPACITY, stamps, 0.7, 300.0),
        "lrfu": lambda: LrfuShadow(CAPACITY, stamps, 300.0),
    }[name]()


def block_hits(policy: EvictionPolicy, keys: list[int], at_ns: int) -> int:
    """Hits of one touch, and the evictions after it, without any protection."""
    hits = sum(key in policy.resident for key in keys)
    policy.touch(keys, at_ns)
    excess = len(policy.resident) - CAPACITY
    if excess > 0:
        policy.forget(policy.victims(excess) or ())
    return hits


@pytest.mark.parametrize("name", ["simple_lru", "lfu", "adaptive_lru", "lrfu"])
@settings(max_examples=40)
@given(touches=some.lists(steps, min_size=1, max_size=60))
def test_a_shadow_counts_what_its_namesake_would(name: str, touches: list[tuple[int, list[int]]]) -> None:
    stamps, now = Stamps(), 0
    shadow, policy = shadow_of(name, stamps), make_policy(PolicyConfig(policy=name), CAPACITY)
    for gap, path in touches:
        now += gap * SECOND_NS
        keys = chain(path)
        assert shadow.use([stamps.touch(keys, now)]) == block_hits(policy, keys, now)


def test_sums_of_any_age_stay_finite() -> None:
    """A thousand half-lives between two touches, again and again."""
    stamps = Stamps()
    shadow, policy = LrfuShadow(CAPACITY, stamps, 3.0), make_policy(PolicyConfig(policy="lrfu", half_life_s=3.0), 7)
    for number in range(200):
        at_ns = number * (3_000 if number % 3 else 1) * SECOND_NS
        now = max([at_ns, *stamps.values()])
        keys = [number % 5, 10 + number % 11]
        assert shadow.use([stamps.touch(keys, now)]) == block_hits(policy, keys, now)


@pytest.mark.parametrize("name", ["simple_lru", "lfu", "adaptive_lru", "lrfu"])
@settings(max_examples=40)
@given(touches=some.lists(steps, min_size=2, max_size=60), sizes=some.lists(some.integers(1, 5), min_size=60),
       cut=some.integers(0, 20))
def test_a_restored_shadow_goes_on_identically(
    name: str, touches: list[tuple[int, list[int]]], sizes: list[int], cut: int
) -> None:
    """Also when the stamps are ahead of it, in the middle of a batch."""
    stamps, now = Stamps(), 0
    one, other = shadow_of(name, stamps), shadow_of(name, stamps)
    batch: list[Touch] = []
    wanted = iter(sizes)
    size = next(wanted)
    for number, (gap, path) in enumerate(touches):
        now += gap * SECOND_NS
        batch.append(stamps.touch(chain(path), now))
        if number >= cut:
            exported = msgspec.msgpack.encode(one.export())
            other = shadow_of(name, stamps)
            other.restore(msgspec.msgpack.decode(exported))
            assert msgspec.msgpack.encode(other.export()) == exported
        if len(batch) == size:
            hits = one.use(batch)
            if number >= cut:
                assert other.use(batch) == hits
                assert other.export() == one.export()
            batch, size = [], next(wanted)


def test_the_whole_policy_goes_on_identically_from_any_keyframe() -> None:
    """With shadows that look in batches, and changes of the rule."""
    refs = references_named("default-a")
    capacity = 500
    whole, restored = auto.LrfuAuto(capacity), auto.LrfuAuto(capacity)
    for number, (at_ns, keys) in enumerate(zip(refs.at_ns, refs.keys, strict=True)):
        if number % 197 == 50:
            exported = msgspec.msgpack.encode(whole.export())
            restored = auto.LrfuAuto(capacity)
            restored.restore(msgspec.msgpack.decode(exported))
            assert msgspec.msgpack.encode(restored.export()) == exported
        for policy in (whole, restored):
            policy.touch(keys, at_ns)
            excess = len(policy.resident) - capacity
            if excess > 0:
                policy.forget(policy.victims(excess, None, set(keys)) or ())
        if number > 50:
            assert whole.resident == restored.resident
    assert whole.gauges()["changes"] >= 1


def test_what_the_sample_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    refs = references_named("chat-a")
    policy = auto.LrfuAuto(200)
    policy._sample_max = 100
    replay(refs, policy, 200)
    assert len(policy._sample) <= 100 + policy._batch_keys + max(map(len, refs.keys))
    for shadow in policy._shadows[1:]:
        values, resident = shadow.export()[:2]
        assert set(unpacked(values[0])) <= set(policy._sample)
        assert len(values[1]) == len(unpacked(values[0]))
        assert set(unpacked(resident)) <= set(policy._sample)
