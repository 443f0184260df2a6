"""What it costs to name what is copied down: bounds on what is looked at, in keys and not in time."""

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.eviction.leaves import MayGo
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.eviction.pool_policy import PoolPolicy
from kvbm_console.core.leader import offloads
from kvbm_console.core.leader.memory import PoolMemory
from kvbm_console.core.leader.offloads import HELD_LEAST, owners_of
from kvbm_console.planning.options import CacheOptions
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.multiturn import Multiturn, Settings


@pytest.mark.parametrize("policy", ["simple_lru", "lrfu_auto"])
def test_a_backlog_of_copies_is_looked_at_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts fill the host tier faster than candidates of few blocks empty it: what one look has named is used
    up, and not named again for each candidate."""
    named = Counter[str]()
    coldest = PoolPolicy.coldest

    def counted(self: PoolPolicy, count: int, evictable: MayGo, now_ns: int) -> list[int]:
        keys = coldest(self, count, evictable, now_ns)
        named["keys"] += len(keys)
        return keys

    monkeypatch.setattr(PoolPolicy, "coldest", counted)
    chats = Settings(sessions=8, prompts=8, system=16_384, user=64, output=16, turns=1, seed=3, requests=12)
    rig = build(
        LeaderConfig(
            g2_blocks=4_000, g3_blocks=16_000, offload_batch_blocks=8, offload_law="order", offload_threshold=0.9,
            eviction=PolicyConfig(policy=policy),
        ),
        EngineConfig(g1_blocks=2_200, max_batch_tokens=8_192), Multiturn(chats),
        links=CacheOptions(total_kv_blocks=2_200, kv_transfer_bandwidth=10.0).links(),
    )
    rig.run_to_end()
    given_away = sum(one.given for one in rig.leader.memory.pools)
    assert given_away > 20_000
    assert named["keys"] <= 3 * given_away


def test_the_counts_of_covered_places_are_those_of_a_recount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests share prefixes, are preempted, load and end, and copies of blocks that they hold run meanwhile."""
    looks = Counter[str]()

    def checked(mine: PoolMemory, held: Mapping[int | None, int]) -> Iterator[int]:
        looks["all"] += 1
        looks["found"] += bool(held)
        assert held == Counter(map(mine.owner.get, mine.covered))
        return owners_of(mine, held)

    monkeypatch.setattr(offloads, "owners_of", checked)
    for seed in range(3):
        chats = Settings(sessions=12, prompts=3, system=512, user=64, output=48, turns=4, seed=seed, requests=60)
        rig = build(
            LeaderConfig(g2_blocks=300, g3_blocks=900, offload_law="order", offload_threshold=0.9),
            EngineConfig(g1_blocks=140 + 20 * seed, max_batch_tokens=2_048), Multiturn(chats),
        )
        rig.run_to_end()
        assert rig.leader.state.totals.preemptions
    assert looks["all"] > 200
    assert looks["found"] > 200


@given(some.lists(some.integers(0, 6) | some.none(), max_size=900))
@settings(max_examples=60)
def test_owners_come_in_the_order_of_their_first_places(owners: list[int | None]) -> None:
    mine = PoolMemory(covered=dict.fromkeys(range(len(owners))))
    mine.owner = {place: owner for place, owner in enumerate(owners) if owner is not None}
    counts = Counter(owners)
    assert list(owners_of(mine, counts)) == [
        owner for owner, count in counts.items() if count >= HELD_LEAST and owner is not None
    ]
