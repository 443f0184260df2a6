"""Places of a pool that an event stream describes by hashes alone: which one a block is said to stand in.

Law of this file: called by apply only; which places are free is derived from what has content, so a state from a
snapshot chooses the same ones.
"""

import heapq

from kvbm_console.core.ids import EMPTY_HASH
from kvbm_console.core.tiers import FREE, PoolFacts


def take_free(pool: PoolFacts, count: int) -> list[int]:
    """The lowest places without content; the pool grows when it must.

    The caller fills them. O(count * log places), except for the first time after a snapshot or a clear.
    """
    if pool.spare is None:
        pool.spare_from = len(pool.content.rstrip(b"\0"))
        pool.spare = [place for place in range(pool.spare_from) if not pool.content[place]]
    spare = pool.spare
    reused = [heapq.heappop(spare) for _ in range(min(count, len(spare)))]
    fresh = range(pool.spare_from, pool.spare_from + count - len(reused))
    pool.spare_from = fresh.stop
    return [*reused, *fresh]


def forget_copy(pool: PoolFacts, sequence_hash: int) -> bool:
    """Remove the latest of the copies of this hash; whether there was one. O(log places), however many there are."""
    first = pool.by_hash.get(sequence_hash)
    if first is None:
        return False
    others = pool.copies.get(sequence_hash)
    if others is None:
        block = first
        del pool.by_hash[sequence_hash]
    else:
        block = others.pop()
        if not others:
            del pool.copies[sequence_hash]
    before = pool.condition(block)
    pool.hash_of[block] = EMPTY_HASH
    pool.content[block] = FREE
    pool.stored_at[block] = 0
    pool.recount(block, before)
    if pool.spare is not None:
        heapq.heappush(pool.spare, block)
    return True
