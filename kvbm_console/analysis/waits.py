"""What a slot waits for, and when nobody of an engine can go on: its wait-for graph, read from facts.

A request that waits for device blocks waits for those who hold them. While a request computes or a copy runs, that ends
by itself. When no request computes and no copy runs, only the free blocks are left: if the first request of the queue
wants more than these, nobody goes on any more. For example 16 blocks, a loaded request ``b`` with 9 of them, and ``a``
in front of it that wants 13: ``a`` waits for blocks that ``b`` holds, and ``b`` waits behind ``a``.

Law of this file: diagnosis and console ask here; a slot that a person holds is no part of a deadlock.
"""

from typing import Final

import msgspec

from kvbm_console.core.ids import Authority, Condition, SlotState, Tier
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

_S = SlotState
WORKING: Final = (_S.PREFILLING, _S.DECODING, _S.SKIPPED_PREFILL, _S.SKIPPED_DECODE)
"""States of requests that the engine runs."""
QUEUED: Final = (_S.INITIALIZED, _S.ONBOARD_STAGED, _S.ONBOARDING, _S.PREEMPTED)
NAMES_TOLD: Final = 2
"""Requests named in a sentence; further ones are counted."""


class Standstill(msgspec.Struct, frozen=True):
    """A deadlock of one engine: ``waiting[0]`` wants more device blocks than are free, and the others wait behind."""

    source: int
    waiting: tuple[SlotFacts, ...]
    wanted: int
    free: int
    capacity: int

    @property
    def head(self) -> SlotFacts:
        """The first of the queue."""
        return self.waiting[0]


def available(pool: PoolFacts) -> int:
    """Places that can be given out: empty and cached ones."""
    return pool.counts[Condition.EMPTY] + pool.counts[Condition.CACHED]


def below(state: CacheState, pool: PoolFacts) -> PoolFacts | None:
    """The pool that this one is copied down to; None where the leader copies nothing out of it."""
    if pool.info.authority not in (Authority.ENGINE, Authority.LEADER):
        return None
    lower = [
        one for one in state.pools if one.info.authority is Authority.LEADER and one.info.tier > pool.info.tier
    ]
    return min(lower, key=lambda one: one.info.tier, default=None)


def free_blocks(state: CacheState, slot: SlotFacts) -> tuple[int, int] | None:
    """(device blocks wanted for the rest of the prompt, available ones); None when the pool is not known."""
    pool = state.pool_of(Tier.G1, slot.source)
    if pool is None or pool.info.capacity_blocks is None:
        return None
    wanted = -(-slot.prompt_tokens // pool.info.block_tokens) - max(slot.local_blocks, len(slot.device_blocks))
    return max(0, wanted), available(pool)


def blocks_text(wanted: int, free: int) -> str:
    """``13 G1 blocks, 4 free``."""
    return f"{wanted:,} G1 block{'' if wanted == 1 else 's'}, {free:,} free"


def standstill(state: CacheState, source: int) -> Standstill | None:
    """Why no request of this engine can go on; None while one can, or while a person or a lost report may be why."""
    waiting: list[SlotFacts] = []
    for slot in state.slots.values():
        if slot.source != source:
            continue
        if slot.state in WORKING or slot.hold is not None:
            return None
        if slot.state in QUEUED:
            waiting.append(slot)
    stopped = state.frozen is not None or state.pipeline_closed or state.all_held or state.engines_paused
    if not waiting or stopped or source in state.lost_sources or _copies_run(state, source):
        return None
    # An engine puts preempted requests in front of those that never ran.
    waiting.sort(key=lambda slot: (slot.state is not _S.PREEMPTED, slot.slot))
    head = waiting[0]
    blocks, pool = free_blocks(state, head), state.pool_of(Tier.G1, source)
    if blocks is None or pool is None:
        return None
    wanted, free = blocks
    free -= _own_prefix(pool, head)
    if wanted <= free:
        return None
    return Standstill(source, tuple(waiting), wanted, free, len(pool))


def _copies_run(state: CacheState, source: int) -> bool:
    """Whether the end of a copy may give blocks back to this engine."""
    for operation in state.operations.values():
        slot = state.candidates[operation.candidate].slot
        pools = (state.pools[operation.source_pool], state.pools[operation.target_pool])
        if any(pool.info.source == source for pool in pools) or (
            slot is not None and slot in state.slots and state.slots[slot].source == source
        ):
            return True
    return False


def _own_prefix(pool: PoolFacts, slot: SlotFacts) -> int:
    """Cached blocks that hold the slot's own prefix: it would use them, so nobody can give them to it as free ones."""
    if slot.device_blocks:
        return 0
    found = (pool.ready_place(key) for key in slot.hashes[: slot.local_blocks])
    return sum(place is not None and not pool.refs[place] for place in found)


def circle(still: Standstill) -> str:
    """The wait-for graph in one sentence."""
    head, rest = still.head, still.waiting[1:]
    if still.wanted > still.capacity:
        told = f"{head.request} wants {still.wanted:,} G1 blocks, the tier has {still.capacity:,}"
    else:
        told = f"{head.request} wants {blocks_text(still.wanted, still.free)}"
    holders = sorted((slot for slot in rest if slot.device_blocks), key=lambda slot: -len(slot.device_blocks))
    behind = [f"{slot.request} (holds {len(slot.device_blocks):,})" for slot in holders[:NAMES_TOLD]]
    others = len(rest) - len(behind)
    if others:
        behind.append(f"{others:,} more" if behind else f"{others:,}")
    if behind:
        told += f"; behind it wait{'s' if len(rest) == 1 else ''} {' and '.join(behind)}"
    return f"0 running, {len(still.waiting):,} waiting: {told}"
