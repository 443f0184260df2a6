"""Chains of blocks, and what of a pool that the leader decides may be evicted.

Law of this file: a chain is in prompt order, and a block is never in a chain behind that of a block which continues it.
"""

from collections.abc import Callable, Mapping, Sequence

from kvbm_console.core.tiers import READY, PoolFacts


def chains(parent_of: Mapping[int, int], hashes: Sequence[int]) -> list[list[int]]:
    """These blocks, each once, as chains in which each block is the parent of the next.

    >>> chains({2: 1, 3: 2, 9: 8}, [3, 9, 2])
    [[2, 3], [9]]
    """
    parents = list(map(parent_of.get, hashes))
    if parents[1:] == hashes[:-1]:  # the usual case: one chain
        return [list(hashes)] if hashes else []
    if parents[:-1] == hashes[1:]:  # blocks that were given up, the deepest first
        return [list(hashes[::-1])]
    parent = dict(zip(hashes, parents, strict=True))
    done: set[int] = set()
    found = []
    for key in hashes:
        chain = []
        at: int | None = key
        while at is not None and at in parent and at not in done:
            done.add(at)
            chain.append(at)
            at = parent[at]
        if chain:
            found.append(chain[::-1])
    return found


def evictable(pool: PoolFacts) -> Callable[[int], bool]:
    """Whether the place of a hash may be evicted: readable and without a holder (I3)."""
    content, refs, place_of, away = pool.content, pool.refs, pool.by_hash, pool.quarantined

    def may_go(key: int) -> bool:
        place = place_of[key]
        return content[place] == READY and not refs[place] and place not in away

    return may_go
