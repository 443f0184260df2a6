"""Places that a reset found under a running copy: neither free nor resident until the copy is reported.

Law of this file: called by apply only; a place is kept away as long as one of its copies runs.
"""

from collections.abc import Sequence

from kvbm_console.core.tiers import PoolFacts


def quarantine(pool: PoolFacts, ids: Sequence[int], operation: int) -> None:
    """This operation still writes or reads these places across a reset."""
    for block in ids:
        before = pool.condition(block)
        keepers = pool.quarantined.setdefault(block, [])
        if operation not in keepers:  # recordings of before have copies that name a place twice
            keepers.append(operation)
        pool.recount(block, before)


def lift(pool: PoolFacts, operation: int) -> None:
    """This operation of an older epoch has ended: free the places that no other one keeps."""
    for block in [block for block, keepers in pool.quarantined.items() if operation in keepers]:
        pool.quarantined[block].remove(operation)
        if not pool.quarantined[block]:
            before = pool.condition(block)
            del pool.quarantined[block]
            pool.recount(block, before)
