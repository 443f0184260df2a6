"""Room in a pool that the leader decides: the victims of a copy into it, and when that copy waits instead.

Law of this file: by the offload law ``order``, a block that would be lost is not evicted while it can still be copied
down. Blocks with a copy below go first. If there are not enough of them, the blocks in front are copied, and the copy
that wants their places waits. They are evicted all the same when the pool below is full, or when its link was busy for
nearly all of the last second. Waiting would then only lose warmer blocks above.

The pool below evicts the copies of blocks that are evicted next here only when it has nothing else. A block whose copy
was evicted there is copied again once until it is used, or all else here has gone. Else tiers of like size would copy
in circles without end.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from kvbm_console.core.columns import gather
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.eviction.leaves import chains
from kvbm_console.core.ids import Condition, EvictRule
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.tiers import READY, PoolFacts

SATURATED_NS: Final = 9 * SECOND_NS // 10
"""A link that has copied for so much of the last second cannot do more."""
_FURTHER: Final = 4
"""Blocks with a copy below are looked for among so many times the victims that are wanted."""


def to_evict(decider: Decider, pool: PoolFacts, missing: int, hashes: Sequence[int]) -> tuple[list[int], EvictRule]:
    """At most ``missing`` places to evict for these hashes, and whether recency alone would have chosen them too.

    A block that waits for its own copy down stays until that has ended, because it is about to be saved. So
    do the blocks that these hashes continue, with all of their prefix, and the prefixes of held blocks (I13). A policy
    of requests keeps the blocks that were offered with these, as vLLM does.
    """
    mine, policy = decider.memory.pools[pool.info.pool], decider.live_memory.policies[pool.info.pool]
    if policy.of_requests is not None:
        offered = policy.of_requests.offered_with(hashes)
        keys, _ = policy.choose(missing, Evictable(pool, stays=offered), decider.at_ns)
        return [pool.by_hash[key] for key in keys], EvictRule.RECENCY
    stays = {policy.ancestor(chain[0]) for chain in chains(decider.memory.parent_of, hashes)}
    cached = pool.counts[Condition.CACHED]
    may_go = Evictable(pool, mine.planned, stays, _following(decider, pool))
    keys, agrees = policy.choose(min(missing, cached), may_go, decider.at_ns)
    if not keys:
        keys, agrees = policy.choose(min(missing, cached), Evictable(pool, mine.planned, stays), decider.at_ns)
    places = [pool.by_hash[key] for key in keys]
    unsaved = not (mine.exposed.keys().isdisjoint(places) and mine.bereft.keys().isdisjoint(places))
    if (len(places) < missing or unsaved) and may_save(decider, pool):
        keys, _ = policy.choose(min(_FURTHER * missing, cached), may_go, decider.at_ns)
        places = _safe(decider, pool, keys)[:missing]
        if len(places) < missing:
            mine.wanted = max(mine.wanted, missing)
            decider.mark_dirty(pool)
    return places, EvictRule.RECENCY if agrees else EvictRule.FREQUENCY


def _following(decider: Decider, pool: PoolFacts) -> tuple[Mapping[int, None], Mapping[int, int]]:
    """The next victims of the pool above, and the blocks that it has: some of the victims may have gone."""
    above = next((above for above in decider.lower_pools() if decider.below(above) is pool), None)
    return ({}, {}) if above is None else (decider.memory.pools[above.info.pool].next, above.by_hash)


def may_save(decider: Decider, pool: PoolFacts) -> bool:
    """True if blocks of this pool that have no copy below can still get one."""
    if decider.below(pool) is None or not decider.config.by_order:
        return False
    busy = decider.memory.busy.get(pool.info.pool, ())
    if decider.memory.pools[pool.info.pool].blocked and not (busy and busy[-1][1] < 0):
        return False  # the pool below had no place to give, and no copy runs whose end may give one
    since, now = decider.at_ns - SECOND_NS, decider.at_ns
    return sum(max(0, (now if until < 0 else until) - max(first, since)) for first, until in busy) < SATURATED_NS


def copies_further(decider: Decider, pool: PoolFacts) -> None:
    """Copies of this pool into the pool below run from now on."""
    busy = decider.memory.busy.setdefault(pool.info.pool, [])
    while busy and 0 <= busy[0][1] <= decider.at_ns - SECOND_NS:
        del busy[0]
    if not busy or 0 <= busy[-1][1] < decider.at_ns:
        busy.append([decider.at_ns, -1])
    else:
        busy[-1][1] = -1


def _safe(decider: Decider, pool: PoolFacts, keys: Sequence[int]) -> list[int]:
    """The places of those keys, in the order of eviction, that have a copy below; no block that another block continues
    which stays (I13)."""
    mine, place_of, parent_of = decider.memory.pools[pool.info.pool], pool.by_hash, decider.memory.parent_of.get
    again = list(filter(mine.bereft.__contains__, map(place_of.__getitem__, keys)))
    decider.live_memory.saved(pool, again)
    decider.unsaved(pool, again)
    exposed = mine.exposed
    stay: set[int | None] = set()
    safe: list[int] = []
    for key in keys:
        place = place_of[key]
        if place in exposed or key in stay:
            stay.add(parent_of(key))
        else:
            safe.append(place)
    return safe


class Evictable:
    """Which blocks of a pool may go: those that are readable, without a holder (I3), and not ``planned`` to be copied.

    Those of ``stays`` stay. So do those of ``following``, which are hashes, as long as its second mapping has them.
    """

    def __init__(
        self, pool: PoolFacts, planned: Mapping[int, int] | None = None, stays: AbstractSet[int | None] = frozenset(),
        following: tuple[Mapping[int, None], Mapping[int, int]] = ({}, {}),
    ) -> None:
        self._content, self._refs, self._place_of, self._away = pool.content, pool.refs, pool.by_hash, pool.quarantined
        self._planned = {} if planned is None else planned
        self._stays = stays
        self._following, self._above = following

    def __call__(self, key: int) -> bool:
        place = self._place_of[key]
        return (
            self._content[place] == READY and not self._refs[place] and place not in self._away
            and place not in self._planned and key not in self._stays
            and not (key in self._following and key in self._above)
        )

    def leading(self, keys: Sequence[int]) -> int:
        """See ``MayGo``."""
        places = list(map(self._place_of.__getitem__, keys))
        if (
            not any(gather(self._refs, places)) and gather(self._content, places).count(READY) == len(places)
            and self._away.keys().isdisjoint(places) and self._planned.keys().isdisjoint(places)
            and self._stays.isdisjoint(keys) and self._following.keys().isdisjoint(keys)
        ):
            return len(keys)
        return next((at for at, key in enumerate(keys) if not self(key)), len(keys))
