"""What every policy promises: scenarios, choices that are all or none, parameters, keyframes."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction import auto, make_policy
from kvbm_console.core.eviction.policy import (
    GHOSTS_MAX,
    GHOSTS_MIN,
    POLICIES,
    PRESETS,
    EvictionPolicy,
    PolicyConfig,
    ghosts_max,
)
from kvbm_console.core.eviction.ranked import FrequencyBased, Lrfu, unpacked
from kvbm_console.core.eviction.simple_lru import SimpleLru
from kvbm_console.core.tiers import CAPACITY_MAX
from kvbm_console.planning.cache_only import Belady, replay
from tests.core.eviction.literal import Literal
from tests.core.eviction.trees import SECOND_NS, make, paths, traces
from tests.core.eviction.trees import chain as chain_of


def one_pass(policy: EvictionPolicy) -> None:
    """1,000 blocks, one a second."""
    for key in range(1_000):
        policy.touch([key], key * SECOND_NS)


def oldest_first(policy: EvictionPolicy) -> bool:
    one_pass(policy)
    return policy.victims(50) == list(range(50))


def popular_outlives_neighbours(policy: EvictionPolicy) -> bool:
    one_pass(policy)
    for turn in range(4):
        policy.touch([500], (1_000 + turn) * SECOND_NS)
    return policy.victims(999) == [key for key in range(1_000) if key != 500]


def middle_goes_first(policy: EvictionPolicy) -> bool:
    for key in range(1_000):
        policy.touch([key], key * SECOND_NS)
        policy.touch([key % 51], key * SECOND_NS)
    gone = policy.victims(500)
    return gone is not None and min(gone) > 50 and max(gone) < 600


SCENARIOS = (oldest_first, popular_outlives_neighbours, middle_goes_first)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", POLICIES)
def test_scenarios(name: str, scenario: Any) -> None:
    assert scenario(make(name, 1_000))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_published_formula_fails_every_scenario(scenario: Any) -> None:
    assert not scenario(Literal())


@settings(max_examples=30)
@given(traces())
def test_the_published_formula_never_beats_belady(refs: Any) -> None:
    assert replay(refs, Literal(), 8).hits <= replay(refs, Belady(refs.keys), 8).hits


def test_the_published_formula_loses_to_recency() -> None:
    """A conversation that goes on while others come and go."""
    hits = {}
    for policy in (Literal(), make("simple_lru", 20)):
        found = 0
        for turn in range(200):
            for keys in ([1, 2, 3, 4, 100 + turn], [1, 2, 1_000 + turn, 2_000 + turn]):
                found += sum(key in policy.resident for key in keys)
                policy.touch(keys, turn * SECOND_NS)
                excess = len(policy.resident) - 20
                if excess > 0:
                    policy.forget(policy.victims(excess, None, keys) or ())
        hits[policy.name] = found
    assert hits["literal"] < 0.7 * hits["simple_lru"]


@pytest.mark.parametrize("name", POLICIES)
def test_victims_are_all_or_none_and_choosing_changes_nothing(name: str) -> None:
    policy = make(name, 10)
    policy.touch([1, 2, 3], 0)
    policy.touch([1, 2, 4], SECOND_NS)
    before = policy.export()
    assert policy.victims(5) is None
    assert policy.victims(4) == policy.victims(4)
    assert policy.victims(4, None, {3}) is None
    assert policy.victims(2, lambda key: key != 4, {3}) == [2, 1]
    assert policy.victims(0) == []
    assert policy.export() == before
    assert sorted(policy.victims(4) or ()) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_forgotten_is_not_resident(name: str) -> None:
    policy = make(name, 10)
    policy.touch([1, 2, 3], 0)
    policy.forget([3, 99])
    assert set(policy.resident) == {1, 2}
    assert policy.victims(3) is None
    policy.touch([1, 2, 3], 1)
    assert policy.victims(3) == [3, 2, 1]


@pytest.mark.parametrize("name", ["lfu", "frequency_based", "adaptive_lru", "lrfu", "lrfu_auto"])
def test_keyframes_of_older_recordings_are_read(name: str) -> None:
    """They had a row for each key."""
    policy = make(name, 6)
    for at in range(40):
        policy.touch([at % 9, 20 + at % 7], at * SECOND_NS)
        if at > 6:
            policy.forget([(at + 3) % 9])
    new = policy.export()
    keys, stamps = unpacked(new["keys"]), unpacked(new["stamps"])
    old = {name: value for name, value in new.items() if name not in ("keys", "stamps", "values", "resident", "before")}
    old["known"] = [
        [key, stamp, value, bool(here)]
        for key, stamp, value, here in zip(keys, stamps, new["values"], new["resident"], strict=True)
    ]
    if name == "lrfu_auto":
        old["uses"] = sorted(map(list, zip(keys, new["uses"], new["before"], strict=True)))
        old["sample"] = [list(pair) for pair in zip(*map(unpacked, new["sample"]), strict=True)]
        old["shadows"] = [
            shadow if not shadow or isinstance(shadow[0], int) else [
                [list(row) for row in zip(unpacked(shadow[0][0]), shadow[0][1], strict=True)], unpacked(shadow[1]),
                *shadow[2:],
            ] for shadow in new["shadows"]
        ]
    restored = make(name, 6)
    restored.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(old)))
    assert restored.export() == new


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25)
@given(data=some.data())
def test_an_exported_policy_goes_on_identically(name: str, data: some.DataObject) -> None:
    """Through msgpack, as a keyframe carries it."""
    steps = data.draw(some.lists(some.tuples(some.integers(0, 90), paths), max_size=40))
    cut = data.draw(some.integers(0, 40))
    policy, now = make(name, 6), 0
    for number, (gap, path) in enumerate(steps):
        if number == cut:
            data_of = msgspec.msgpack.encode(policy.export())
            policy = make(name, 6)
            policy.restore(msgspec.msgpack.decode(data_of))
            assert msgspec.msgpack.encode(policy.export()) == data_of
        now += gap * SECOND_NS
        keys = chain_of(path)
        policy.touch(keys, now)
        excess = len(policy.resident) - 6
        if excess > 0:
            chosen = policy.victims(excess, None, keys)
            assert chosen is not None
            policy.forget(chosen)
    uncut, now = make(name, 6), 0
    for gap, path in steps:
        now += gap * SECOND_NS
        keys = chain_of(path)
        uncut.touch(keys, now)
        excess = len(uncut.resident) - 6
        if excess > 0:
            uncut.forget(uncut.victims(excess, None, keys) or ())
    assert uncut.export() == policy.export()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("frequency_weight", (-0.1, 1.1, math.nan, math.inf)),
        ("frequency_credit_s", (-1.0, math.nan, math.inf)),
        ("half_life_s", (0.0, -1.0, math.nan, math.inf)),
        ("pin_tail_tokens", (-1, 2**31)),
        ("pin_ttl_s", (-1.0, math.nan)),
        ("policy", ("lru", "", "belady")),
    ],
)
def test_a_bad_parameter_is_named_at_construction(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=field) as caught:
            PolicyConfig(**{field: value})
        assert repr(value) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_presets_are_configurations() -> None:
    assert {name: PolicyConfig(**settings).policy for name, settings in PRESETS.items()} == {
        "chat": "adaptive_lru", "document": "adaptive_lru", "batch": "simple_lru",
    }


def test_the_ends_of_the_weight_are_recency_and_frequency() -> None:
    def order(weight: float) -> list[int] | None:
        policy = make_policy(PolicyConfig(policy="adaptive_lru", frequency_weight=weight), 10)
        for at, key in enumerate((1, 1, 1, 2, 2, 3)):
            policy.touch([key], at * SECOND_NS)
        return policy.victims(3)

    assert order(0.0) == [1, 2, 3]
    assert order(1.0) == [3, 2, 1]


def test_ghosts_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = FrequencyBased(1)
    assert policy.ghosts_max == ghosts_max(1) == GHOSTS_MIN
    assert ghosts_max(CAPACITY_MAX) == GHOSTS_MAX
    policy.ghosts_max = 100
    for key in range(1_000):
        policy.touch([key], key)
        policy.forget([key])
        assert policy.gauges()["ghosts"] <= 100
    policy.touch([999, 1], 1_000)  # 999 is remembered, 1 is not
    assert policy.victims(2) == [1, 999]


def test_history_survives_eviction_where_it_should() -> None:
    for name, survives in (("lfu", False), ("frequency_based", True), ("lrfu", True), ("adaptive_lru", False)):
        policy = make(name, 10)
        for at in range(5):
            policy.touch([1], at * SECOND_NS)
        policy.forget([1])
        policy.touch([1], 5 * SECOND_NS)
        policy.touch([2], 6 * SECOND_NS)
        assert policy.victims(1) == ([2] if survives else [1]), name


def test_half_life_says_how_long_a_touch_counts() -> None:
    """Five touches, then another block once, one half-life after another: the lead of log2(5) bits is used up."""
    for later, first in ((2.0, 2), (2.5, 1)):
        policy = Lrfu(10, 300.0)
        for _ in range(5):
            policy.touch([1], 0)
        policy.touch([2], round(later * 300 * SECOND_NS))
        assert policy.victims(1) == [first]


def test_auto_says_that_it_is_recency_without_history_and_follows_the_load() -> None:
    """A scan of blocks that are never used again makes room for popular ones only under a longer half-life."""
    policy = auto.LrfuAuto(340)
    assert policy.gauges()["half_life_s"] == 0.0
    now = 0
    for turn in range(400):
        for key in range(17 * 14):
            if key % 4 == turn % 4:
                policy.touch([key], now)
        policy.touch(list(range(10_000 + turn * 300, 10_300 + turn * 300)), now)
        now += SECOND_NS
        excess = len(policy.resident) - 340
        if excess > 0:
            policy.forget(policy.victims(excess) or ())
    gauges = policy.gauges()
    assert gauges.get("half_life_s", 9.0) > 1.0
    assert gauges["changes"] >= 1
    assert sum(key in policy.resident for key in range(17 * 14)) > 200


_KEYS = some.lists(some.integers(0, 9), max_size=5)
_VERBS = ["touch", "again", "use", "insert", "forget", "compact", "restore"]


@settings(max_examples=300)
@given(some.lists(some.tuples(some.sampled_from(_VERBS), _KEYS), max_size=30))
def test_recency_is_the_order_of_the_last_touches(steps: list[tuple[str, list[int]]]) -> None:
    """Beside a list: each key, deepest first, goes to its end; also where a prefix is touched again, or a key twice.

    What is used and not there stays away, and what is inserted stands directly below the one that it is beside.
    """
    policy, order, last = SimpleLru(), list[int](), list[int]()
    for verb, keys in steps:
        if verb in ("touch", "again"):
            last = keys if verb == "touch" else last
            policy.touch(last, 0)
            for key in reversed(last):
                order = [*(one for one in order if one != key), key]
        elif verb == "use":
            policy.use(keys, 0)
            for key in reversed(keys):
                order = [*(one for one in order if one != key), *([key] if key in order else [])]
        elif verb == "insert":
            new = [key for key in dict.fromkeys(keys) if key not in order]
            beside = next((key for key in keys if key in order), None)
            if new:
                policy.insert(new, beside, 0)
                place = len(order) if beside is None else order.index(beside)
                order[place:place] = reversed(new)
        elif verb == "forget":
            policy.forget(keys)
            order = [key for key in order if key not in keys]
        elif verb == "compact":
            policy._drop_dead()
        else:
            exported = policy.export()
            policy = SimpleLru()
            policy.restore(exported)
        assert policy.export() == order
        assert policy.resident == set(order)
        for count in range(len(order) + 2):
            may_go = [key for key in order if key not in keys and key % 3]
            chosen = policy.victims(count, lambda key: key % 3 > 0, keys)
            assert chosen == (may_go[:count] if count <= len(may_go) else None)
        assert policy._carried == sum(map(len, policy._touches.values()))
