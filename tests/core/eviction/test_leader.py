"""Policies in the leader: they rule the lower tiers, keep chains whole, survive a keyframe, and say who decided."""

import json
import random
from pathlib import Path

import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import BlocksEvicted, PrefixScored
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.core.eviction.pool_policy import PIN, PoolPolicy
from kvbm_console.core.ids import EvictRule, SkipReason, Tier
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.planning.traces import parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from tests.core.eviction.trees import EVERYTHING, Where

CHATS = "multiturn:requests=26,sessions=6,system=64,user=48,output=24,turns=4,seed=7"


class Watch:
    """Keeps what was evicted by whom, and checks pools against their policies after every stimulus."""

    def __init__(self) -> None:
        self.leader: Leader | None = None
        self.rules: set[EvictRule] = set()
        self.scored: list[PrefixScored] = []
        self.log: list[Stimulus] = []
        self.hashes: dict[int, frozenset[int]] = {}

    def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self.log.append(stimulus)
        for event in outcome.events:
            if isinstance(event, BlocksEvicted):
                self.rules.add(event.rule)
            elif isinstance(event, PrefixScored):
                self.scored.append(event)
        if self.leader is not None:
            self._check(self.leader)

    def _check(self, leader: Leader) -> None:
        """A policy knows what its pool holds; and I13: what stands beside its parent never stays without it."""
        parent_of = leader.memory.parent_of
        for pool in leader.lower_pools():
            before = self.hashes.get(pool.info.pool, frozenset())
            now = frozenset(pool.by_hash)
            assert leader.live_memory.policies[pool.info.pool].policy.resident == now
            for key in now & before:
                parent = parent_of.get(key)
                assert parent not in before or parent in now, f"{pool.info.tier.name} lost the parent of {key:016x}"
            self.hashes[pool.info.pool] = now


def run(
    eviction: PolicyConfig, *, hosts: int = 1, g1: int = 48, g2: int = 40, g3: int = 0, trace: str = CHATS,
    threshold: float = 0.0,
) -> tuple[Rig, Watch]:
    watch = Watch()
    config = LeaderConfig(g2_blocks=g2, g3_blocks=g3, offload_threshold=threshold, eviction=eviction)
    rig = build(
        config, EngineConfig(g1_blocks=g1), parse_trace(trace), publish=watch, check=True, audit_every=20, hosts=hosts
    )
    watch.leader = rig.leader
    rig.run_to_end()
    return rig, watch


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_facts_memory_and_chains(name: str) -> None:
    rig, watch = run(PolicyConfig(policy=name))
    assert rig.engine.totals.finished == 26
    assert rig.leader.state.totals.evicted_blocks[Tier.G2 - 1] > 0
    decided_otherwise = EvictRule.FREQUENCY in watch.rules
    assert decided_otherwise == (name not in ("simple_lru", "lrfu_auto", "learned")), "the last two have no history yet"
    gauges = rig.leader.live_memory.policies[1 if rig.leader.state.pools[1].info.tier is Tier.G2 else 0].gauges()
    assert gauges["evicted"] == rig.leader.state.totals.evicted_blocks[Tier.G2 - 1]
    assert (gauges["evicted_as_recency"] < gauges["evicted"]) == decided_otherwise


@pytest.mark.parametrize("threshold", [0.0, 0.9])
@pytest.mark.parametrize("trace", [CHATS, CHATS.replace("output=24", "output=80") + ",think=0.01,ramp=0.01"])
def test_a_policy_sees_each_prompt_once_per_admission(trace: str, threshold: float) -> None:
    """References are what the hit rate counts (BC-5): a store, a look-up that waits and a load are no use."""
    rig, watch = run(PolicyConfig(policy="lrfu_auto"), g3=60, trace=trace, threshold=threshold)
    assert (rig.leader.state.totals.preemptions > 0) == (trace != CHATS)
    assert len(watch.scored) >= rig.engine.totals.finished == 26
    policies = [rig.leader.live_memory.policies[pool.info.pool] for pool in rig.leader.lower_pools()]
    asked = sum(event.prompt_blocks for event in watch.scored)
    assert [policy.gauges()["references"] for policy in policies] == [asked, asked]


def test_lrfu_auto_keeps_in_a_tier_what_a_scan_would_push_out(tmp_path: Path) -> None:
    """Twelve documents of eight blocks in turn, between each two a prompt that never comes again: too much for both."""
    lines = []
    for number in range(400):
        fresh = 1_000_000 + 24 * number
        ids = [100 * (number // 2 * 7 % 12) + block for block in range(8)] if number % 2 else range(fresh, fresh + 24)
        request = {"timestamp": 2_000 * number, "input_length": 512 * len(ids) + 5, "output_length": 2}
        lines.append(json.dumps({**request, "hash_ids": [*ids, 5_000_000 + number]}))
    trace = tmp_path / "scan.jsonl"
    trace.write_text("\n".join(lines) + "\n")
    hits = {}
    for name in ("simple_lru", "lrfu_auto", "learned"):
        config = LeaderConfig(
            g2_blocks=150, block_tokens=512, offload_threshold=0.0, eviction=PolicyConfig(policy=name)
        )
        rig = build(config, EngineConfig(g1_blocks=64), parse_trace(f"mooncake:{trace}"))
        rig.run_to_end()
        hits[name] = rig.leader.state.totals.hit_blocks[Tier.G2 - 1]
    assert hits["simple_lru"] == 0
    for name in ("lrfu_auto", "learned"):
        assert hits[name] > 1_000, "of 1,600 references to the documents"


@pytest.mark.parametrize("name", ["adaptive_lru", "lrfu_auto", "learned"])
def test_hosts_agree_under_every_policy(name: str) -> None:
    """Digests of facts and memory are compared after every stimulus."""
    rig, _ = run(PolicyConfig(policy=name, pin_tail_tokens=16, pin_ttl_s=0.5), hosts=2, g3=60,
                 trace=CHATS.replace("requests=26", "requests=9"))
    assert rig.engine.totals.finished == 9


@pytest.mark.parametrize("name", ["simple_lru", "adaptive_lru", "lrfu_auto", "learned"])
def test_a_leader_restored_from_its_keyframe_goes_on_identically(name: str) -> None:
    config = LeaderConfig(g2_blocks=40, offload_threshold=0.0, eviction=PolicyConfig(policy=name))
    _, watch = run(config.eviction)
    whole = Leader(config)
    restored: Leader | None = None
    for number, stimulus in enumerate(watch.log):
        expected = whole.handle(stimulus).events
        if restored is not None:
            assert restored.handle(stimulus).events == expected
        if number == len(watch.log) // 2:
            restored = Leader.restore(config, encode_facts(whole.state), whole.export())
            assert restored.export() == whole.export()
    assert restored is not None
    assert restored.memory_digest() == whole.memory_digest()


def test_a_configuration_from_before_there_were_policies_is_recency() -> None:
    assert LeaderConfig().eviction.policy == "simple_lru"


def test_pinned_sequences_stay_while_their_time_lasts() -> None:
    def kept(**settings: float) -> tuple[int, int]:
        rig, _ = run(PolicyConfig(policy="simple_lru", **settings))  # type: ignore[arg-type]
        totals = rig.leader.state.totals
        return totals.evicted_blocks[Tier.G2 - 1], totals.skipped[SkipReason.NO_CAPACITY]

    free, refused = kept()
    pinned, refused_with_pins = kept(pin_tail_tokens=64, pin_ttl_s=1e6)
    assert pinned < free
    assert refused_with_pins >= refused
    assert kept(pin_tail_tokens=64, pin_ttl_s=0.0) == (free, refused)


# --- the guards alone ---


def touch(policy: PoolPolicy, keys: list[int], at_ns: int) -> None:
    """A request asks for these blocks, and those that are not there are stored."""
    fresh = [key for key in keys if key not in policy.policy.resident]
    policy.use(keys, at_ns)
    if fresh:
        policy.insert(fresh, at_ns)


def guarded() -> PoolPolicy:
    policy = PoolPolicy(PolicyConfig(), 20)
    for at in range(5):
        touch(policy, [10 * at, 10 * at + 1], at)
    return policy


def test_a_guard_ends_with_its_time() -> None:
    policy = guarded()
    policy.guard([0, 1], PIN, 100)
    assert policy.choose(2, EVERYTHING, 99) == ([11, 10], True)
    assert policy.choose(2, EVERYTHING, 100) == ([1, 0], True)


def test_pins_are_never_evicted_and_what_is_left_is_given() -> None:
    policy = guarded()
    policy.guard([0, 1], PIN, 100)
    policy.guard([10, 11], PIN, 100)
    policy.guard([20, 21], PIN, 100)
    assert policy.choose(10, EVERYTHING, 0) == ([31, 30, 41, 40], True)
    policy.gave_up(3)
    assert policy.gauges()["evicted"] == policy.gauges()["evicted_as_recency"] == 3, "of those chosen, so many went"
    assert policy.choose(2, Where(lambda key: key < 30), 0) == ([], True)


def test_priorities_are_given_up_from_the_lowest() -> None:
    policy = guarded()
    policy.guard([0, 1], 2, 100)
    policy.guard([10, 11], 1, 100)
    assert policy.choose(7, EVERYTHING, 0)[0] == [21, 20, 31, 30, 41, 40, 11]
    assert policy.choose(9, EVERYTHING, 0)[0] == [21, 20, 31, 30, 41, 40, 11, 10, 1]


def test_pins_hold_at_most_half_of_a_pool_and_the_deepest_of_the_oldest_gives_way() -> None:
    policy = PoolPolicy(PolicyConfig(), 10)
    touch(policy, [1, 2, 3, 4], 0)
    policy.guard([1, 2, 3, 4], PIN, 100)
    touch(policy, [1, 2, 30, 40], 1)
    policy.guard([1, 2, 30, 40], PIN, 100)
    assert policy.choose(10, EVERYTHING, 0)[0] == [4]
    assert policy.gauges()["guarded"] == 5


def test_a_guard_is_never_shortened_or_lowered() -> None:
    policy = guarded()
    policy.guard([0], PIN, 50)
    policy.guard([0, 1], 1, 100)
    assert policy.choose(10, EVERYTHING, 60)[0] == [11, 10, 21, 20, 31, 30, 41, 40, 1]
    assert policy.choose(1, Where(lambda key: key == 0), 99)[0] == []


def test_who_decided_is_counted() -> None:
    policy = PoolPolicy(PolicyConfig(policy="lfu"), 10)
    touch(policy, [1], 0)
    touch(policy, [1], 1)
    touch(policy, [2], 2)
    touch(policy, [3], 3)
    assert policy.choose(1, EVERYTHING, 3) == ([2], False)
    policy.gave_up(1)
    policy.forget([2])
    assert policy.choose(2, EVERYTHING, 3) == ([3, 1], True)
    policy.gave_up(2)
    assert (policy.gauges()["evicted"], policy.gauges()["evicted_as_recency"]) == (3, 2)


def test_a_child_goes_before_its_parent_whatever_their_ranks() -> None:
    """The parent was stored after its child had become popular, which keeps its place."""
    parent_of = {2: 1, 3: 2, 4: 2}
    policy = PoolPolicy(PolicyConfig(policy="lfu"), 10, parent_of)
    for at in range(3):
        touch(policy, [2, 3], at)
    touch(policy, [2, 4], 4)
    touch(policy, [1, 2, 3], 5)
    touch(policy, [9], 6)
    touch(policy, [9], 7)
    assert policy.choose(3, EVERYTHING, 7)[0] == [4, 9, 3]
    assert policy.choose(9, EVERYTHING, 7)[0] == [4, 9, 3, 2, 1]
    assert policy.choose(3, Where(lambda key: key != 3), 7)[0] == [4, 9]
    policy.forget([4, 3, 2, 1])
    assert policy.choose(9, EVERYTHING, 7)[0] == [9]


def test_a_block_without_a_guard_waits_for_its_guarded_continuation() -> None:
    pool = PoolPolicy(PolicyConfig(policy="lfu"), 8, {2: 1, 3: 2})
    touch(pool, [3], 0)
    touch(pool, [3], 1)
    touch(pool, [1, 2], 2)
    for at_ns in (3, 4, 5):
        touch(pool, [9], at_ns)
    pool.guard([3], 1, 10**18)
    pool.guard([9], 1, 10**18)
    chosen, _ = pool.choose(4, EVERYTHING, 5)
    assert sorted(chosen) == [1, 2, 3, 9]
    assert chosen.index(3) < chosen.index(2) < chosen.index(1)


def test_one_of_two_continuations_that_were_stored_together_goes_without_the_other() -> None:
    pool = PoolPolicy(PolicyConfig(policy="learned"), 8, {2: 1, 3: 1})
    pool.insert([1, 2], 0)
    pool.insert([3], 0)
    assert pool.choose(2, Where(lambda key: key != 2), 1)[0] == [3]


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_told_to_go_next_is_what_goes(name: str) -> None:
    """Else what is copied down in time is not what is evicted, and a store waits for ever for a place."""
    for seed in range(20):
        dice = random.Random(seed)
        parent_of = {key: dice.randrange(key) for key in range(1, 60)}
        pool = PoolPolicy(PolicyConfig(policy=name), 60, parent_of)
        for at_ns in range(60):
            chain = [dice.randrange(60)]
            while chain[-1] in parent_of:
                chain.append(parent_of[chain[-1]])
            pool.use(chain[::-1], at_ns)
            if dice.random() < 0.7:
                pool.insert(chain[dice.randrange(len(chain))::-1], at_ns)
        may_go = Where(frozenset(range(60)).difference(dice.sample(range(60), 10)).__contains__)
        for count in (1, 5, 20, 60):
            assert pool.coldest(count, may_go, 60) == pool.choose(count, may_go, 60)[0]


def test_a_long_prefix_whose_end_stays_is_walked_once() -> None:
    """A document of 2,000 blocks that was stored backwards, so that its first block is the oldest."""
    pool = PoolPolicy(PolicyConfig(), 2_000, {key: key - 1 for key in range(1, 2_000)})
    for key in range(2_000):
        pool.use([key], key)
        pool.insert([key], key)
    asked = 0

    def evictable(key: int) -> bool:
        nonlocal asked
        asked += 1
        return key != 1_999

    assert pool.coldest(500, Where(evictable), 2_000) == []
    assert pool.choose(500, Where(evictable), 2_000)[0] == []
    assert asked < 8_000


@pytest.mark.parametrize("name", ["simple_lru", "lfu", "lrfu", "lrfu_auto"])
def test_a_prompt_whose_end_is_being_copied_is_passed_without_a_question(name: str) -> None:
    """The last block of a cold prompt is held, so all others stay; the victims come from the next prompt."""
    pool = PoolPolicy(PolicyConfig(policy=name), 3_000, {key: key - 1 for key in range(1, 3_000) if key % 1_000})
    for first in (0, 1_000, 2_000):
        prompt = list(range(first, first + 1_000))
        pool.use(prompt, first)
        pool.insert(prompt, first)
    asked = 0

    def evictable(key: int) -> bool:
        nonlocal asked
        asked += 1
        return key != 999

    assert pool.choose(100, Where(evictable), 3_000)[0] == list(range(1_999, 1_899, -1))
    assert asked < 400


def test_a_store_of_hashes_that_continue_each_other_in_a_circle_ends() -> None:
    pool = PoolPolicy(PolicyConfig(), 4, {1: 3, 2: 1, 3: 2})
    pool.insert([1], 0)
    assert pool.policy.resident == {1}
