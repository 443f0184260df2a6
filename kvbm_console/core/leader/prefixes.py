"""Chains of blocks in a pool that the leader decides: what is touched together, and what must stay because of another.

Law of this file: within a tier no block is evicted before one that continues it (I13).
"""

from collections.abc import Sequence

from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.tiers import PoolFacts


def held_hashes(leader: Decider, pool: PoolFacts) -> list[int]:
    """What staging and operations hold in a pool: it cannot be evicted, so its prefix must not be either (I13)."""
    held = [
        pool.hash_of[places[0]] for slot in leader.state.slots.values() for index, places in slot.staged
        if index == pool.info.pool
    ]
    for operation in leader.state.operations.values():
        if operation.source_pool == pool.info.pool:
            held += [pool.hash_of[place] for place in operation.sources]
        if operation.target_pool == pool.info.pool:
            held += [pool.hash_of[place] for place in operation.targets]
    return held


def places_with_prefix(leader: Decider, pool: PoolFacts, hashes: Sequence[int]) -> list[int]:
    """Where these blocks and all of their prefix stand in a pool, parents before children.

    A prefix is touched whenever its continuation is, so it is never colder and never evicted first (I13).
    """
    order: dict[int, None] = {}
    parent_of = leader.aids.parent_of
    for first in hashes:
        key: int | None = first
        path = []
        while key is not None and key not in order:
            path.append(key)
            key = parent_of.get(key)
        order.update(dict.fromkeys(reversed(path)))
    return [pool.by_hash[key] for key in order if key in pool.by_hash]
