"""Blocks that a pool has from before the daemon began."""

from collections.abc import Callable
from typing import Any

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Authority, Condition, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.tiers import UNKNOWN_NS
from tests.core.eviction.trees import EVERYTHING

CONFIG = LeaderConfig(block_tokens=16, g2_blocks=4, g3_blocks=8)
Tell = Callable[..., list[ev.Event]]


def started(config: LeaderConfig = CONFIG) -> tuple[Leader, Tell]:
    """A leader with its pools 0 (G2) and 1 (G3), and the function that tells it a stimulus."""
    leader = Leader(config, check=True)
    numbers = iter(range(1_000))

    def tell(kind: type[Any], *fields: Any, source: int = 0) -> list[ev.Event]:
        return leader.handle(kind(next(numbers), 5, source, None, *fields)).events

    for tier, places in ((Tier.G2, config.g2_blocks), (Tier.G3, config.g3_blocks)):
        tell(st.PoolDeclared, 0, 0, tier, "MEDIUM", places, 16, Authority.LEADER)
    return leader, tell


def restore(tell: Tell, places: list[int], hashes: list[int], pool: int = 1, source: int = 0) -> list[ev.Event]:
    return tell(st.BlocksRestored, pool, pack_ids(places), pack_hashes(hashes), source=source)


def test_restored_blocks_can_be_read_and_their_age_is_unknown() -> None:
    leader, tell = started()
    reserved, ready = restore(tell, [5, 0, 3], [50, 10, 30])
    assert isinstance(reserved, ev.BlocksReserved)
    assert isinstance(ready, ev.BlocksReady)
    assert reserved.operation == ready.operation == ev.RESTORED
    assert unpack_ids(ready.ids) == [5, 0, 3]
    pool = leader.state.pools[1]
    assert pool.counts[Condition.CACHED] == 3
    assert [pool.by_hash[key] for key in (10, 30, 50)] == [0, 3, 5]
    assert {pool.stored_at[place] for place in (0, 3, 5)} == {UNKNOWN_NS}
    mine = leader.live_memory.memory.pools[1]
    assert mine.room == 5
    assert mine.take(5, at_ns=5) == [1, 2, 4, 6, 7], "the places that are left"
    assert leader.live_memory.policies[1].coldest(3, EVERYTHING, 0) == [50, 10, 30]


def test_the_prefix_of_a_restored_block_is_known_from_the_first_request_with_it() -> None:
    """A block is not given up before the block that continues it (I13)."""
    leader, tell = started()
    restore(tell, [0, 1, 2, 3], [1, 2, 3, 9])
    policy = leader.live_memory.policies[1]
    assert policy.coldest(2, EVERYTHING, 0) == [1, 2]
    tell(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 20, 16, Authority.ENGINE, source=1)
    tell(st.RequestArrived, "a", pack_hashes([1, 2, 3, 4]), 70, 10, 0, None, source=1)
    assert policy.coldest(3, EVERYTHING, 0) == [3, 2, 1]
    twin = Leader.restore(CONFIG, *keyframe(leader))
    assert twin.memory_digest() == leader.memory_digest()
    assert twin.live_memory.policies[1].coldest(3, EVERYTHING, 0) == [3, 2, 1]
    assert list(leader.live_memory.memory.parentless) == [9]


def keyframe(leader: Leader) -> tuple[bytes, bytes]:
    return encode_facts(leader.state), leader.export()


@pytest.mark.parametrize(
    ("places", "hashes", "more", "words"),
    [
        ([0], [1], {"pool": 0}, "pool 0 is not the lowest that the leader decides"),
        ([0], [1], {"pool": 7}, "pool 7 is not the lowest"),
        ([0], [1], {"source": 1}, "pool 1 is not the lowest that the leader decides, of source 0"),
        ([0, 1], [1], {}, "2 places must be as many different ones as their 1 hashes"),
        ([0, 0], [1, 2], {}, "must be as many different ones"),
        ([0, 1], [2, 2], {}, "must be as many different ones"),
        ([8], [1], {}, "places must be from 0 to 7 and hashes not 0, got 8 to 8"),
        ([-1], [1], {}, "places must be from 0 to 7"),
        ([0], [0], {}, "hashes not 0"),
    ],
)
def test_reports_that_cannot_be_are_refused(
    places: list[int], hashes: list[int], more: dict[str, int], words: str
) -> None:
    _, tell = started()
    (rejected,) = restore(tell, places, hashes, **more)
    assert isinstance(rejected, ev.StimulusRejected)
    assert words in rejected.why
    assert restore(tell, [], []) == []
    restore(tell, [2], [7])
    (again,) = restore(tell, [3], [8])
    assert isinstance(again, ev.StimulusRejected)
    assert "pool 1 was used before its blocks were restored" in again.why
