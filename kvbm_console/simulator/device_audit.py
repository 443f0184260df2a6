"""The audit of the device pool: its rules, checked by walking and not by what it counts.

Law of this file: it reads the columns of a pool and shares no code with what keeps them up to date.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvbm_console.core.ids import EMPTY_HASH

if TYPE_CHECKING:
    from kvbm_console.simulator.device_pool import DevicePool


def audit_device_pool(pool: "DevicePool", holders: Iterable[Sequence[int]] | None) -> list[str]:
    """See ``DevicePool.audit``."""
    found: list[str] = []
    order, refs = pool.free_order(), pool.refs
    if len(set(order)) != len(order):
        found.append("a place is twice in the free order")
    if set(order) != {block for block in range(pool.capacity_blocks) if not refs[block]}:
        found.append("the free order is not the set of places without a holder")
    if len(order) != pool.free_blocks:
        found.append(f"{pool.free_blocks} places are counted free, {len(order)} are")
    if not _indexed(pool):
        found.append("the index of hashes is not what the places hold")
    if any(pool.hash_of[block] != EMPTY_HASH for block in pool._unhashed):
        found.append("a block with a hash is among those reused first")
    if pool._shared != _shared(refs):
        found.append("the numbers of places with several holders are not those counted")
    if holders is not None:
        counted = [0] * pool.capacity_blocks
        for ids in holders:
            for block in ids:
                counted[block] += 1
        if counted != refs:
            found.append("the holders of some place are not those counted")
    return found


def _indexed(pool: "DevicePool") -> bool:
    """Whether each hash is found at the places that hold it, and nowhere else."""
    standing: dict[int, list[int]] = {}
    for block, sequence_hash in enumerate(pool.hash_of):
        if sequence_hash != EMPTY_HASH:
            standing.setdefault(sequence_hash, []).append(block)
    indexed = {key: sorted([block, *pool._copies.get(key, ())]) for key, block in pool._index.items()}
    return indexed == standing and pool._copies.keys() <= pool._index.keys()


def _shared(refs: list[int]) -> list[int]:
    """How many places have so many holders, from two on."""
    counted = [0] * (max(1, max(refs)) + 1)
    for holders in refs:
        counted[holders] += holders > 1
    return counted
