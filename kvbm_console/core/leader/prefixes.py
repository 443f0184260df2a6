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
        key = parent_of(hashes[0]) if hashes else None
        if key is None:
            return list(filter(resident.__contains__, hashes))
        whole = _up_to(leader, prompt, hashes)
        if whole is None:
            above = []
            while key is not None:
                above.append(key)
                key = parent_of(key)
            above.reverse()
            whole = [*above, *hashes]
        return list(filter(resident.__contains__, whole))
    order: dict[int, None] = {}
    for first in hashes:
        key = first
        path = []
        while key is not None and key not in order:
            path.append(key)
            key = parent_of(key)
        order.update(dict.fromkeys(reversed(path)))
    return [key for key in order if key in resident]


def _up_to(leader: Decider, prompt: Sequence[int], hashes: list[int]) -> list[int] | None:
    """The prompt up to the end of ``hashes``, if it is their whole prefix as the leader knows it."""
    try:
        first = prompt.index(hashes[0])
    except ValueError:
        return None
    whole = list(prompt[: first + len(hashes)])
    parents = list(map(leader.aids.parent_of.get, whole[: first + 1]))
    return whole if whole[first:] == hashes and parents[1:] == whole[:first] and parents[0] is None else None


def evictable(pool: PoolFacts) -> Callable[[int], bool]:
    """Whether the place of a hash may be evicted: readable and without a holder (I3)."""
    content, refs, place_of, away = pool.content, pool.refs, pool.by_hash, pool.quarantined

    def may_go(key: int) -> bool:
        place = place_of[key]
        return content[place] == READY and not refs[place] and place not in away

    return may_go
