"""Chains of blocks in a pool that the leader decides: what is touched together, and what must stay because of another.

Law of this file: within a tier no block is evicted before one that continues it (I13).
"""

from collections.abc import Callable, Sequence

from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.tiers import READY, PoolFacts


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


def resident_with_prefix(leader: Decider, pool: PoolFacts, hashes: Sequence[int]) -> set[int]:
    """Those of these blocks and of all of their prefix that stand in a pool; ``with_prefix`` without order."""
    seen: set[int] = set()
    parent_of = leader.aids.parent_of.get
    for first in hashes:
        key: int | None = first
        while key is not None and key not in seen:
            seen.add(key)
            key = parent_of(key)
    resident = pool.by_hash
    return {key for key in seen if key in resident}


def with_prefix(leader: Decider, pool: PoolFacts, hashes: list[int], prompt: Sequence[int] = ()) -> list[int]:
    """Those of these blocks and of all of their prefix that stand in a pool, parents before children.

    A prefix is touched whenever its continuation is, so it is never colder and never evicted first (I13). ``prompt``:
    where these blocks may stand in a row, which is then looked at in bulk.
    """
    parent_of, resident = leader.aids.parent_of.get, pool.by_hash
    if list(map(parent_of, hashes[1:])) == hashes[:-1]:  # the usual case: one chain, in prompt order
        return list(filter(resident.__contains__, _whole(leader, hashes, prompt)))
    if list(map(parent_of, hashes[:-1])) == hashes[1:]:  # blocks that were given up, the deepest first
        return list(filter(resident.__contains__, _whole(leader, hashes[::-1], prompt)))
    order: dict[int, None] = {}
    for first in hashes:
        key: int | None = first
        path = []
        while key is not None and key not in order:
            path.append(key)
            key = parent_of(key)
        order.update(dict.fromkeys(reversed(path)))
    return [key for key in order if key in resident]


def _whole(leader: Decider, hashes: list[int], prompt: Sequence[int]) -> list[int]:
    """A chain in prompt order with all that is known to be in front of it."""
    if not hashes:
        return []
    parent_of = leader.aids.parent_of.get
    for known in (prompt, leader.last_chain):
        try:
            end = known.index(hashes[-1]) + 1
        except ValueError:
            continue
        whole = list(known[:end])
        parents = list(map(parent_of, whole))
        if whole[-len(hashes) :] == hashes and parents[0] is None and parents[1:] == whole[:-1]:
            return whole
    above = []
    key = parent_of(hashes[0])
    while key is not None:
        above.append(key)
        key = parent_of(key)
    above.reverse()
    leader.last_chain = [*above, *hashes]
    return leader.last_chain


def evictable(pool: PoolFacts) -> Callable[[int], bool]:
    """Whether the place of a hash may be evicted: readable and without a holder (I3)."""
    content, refs, place_of, away = pool.content, pool.refs, pool.by_hash, pool.quarantined

    def may_go(key: int) -> bool:
        place = place_of[key]
        return content[place] == READY and not refs[place] and place not in away

    return may_go
