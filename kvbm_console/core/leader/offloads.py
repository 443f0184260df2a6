"""Offloads: which blocks are copied down, and when (BC-2).

Law of this file: a copy does not make room, so pressure is measured on what would be *lost*. Safe places are empty, or
cached with a ready or in-flight copy below; copying starts when their share falls below 1 - threshold.
"""

import math
from itertools import chain
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.ids import Authority, Condition, Route, SlotState
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.pipeline import enqueue
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts

PLENTY: Final = 2**31
"""Blocks of which there are always fewer."""


def plan_offloads(leader: Decider, pool: PoolFacts) -> None:
    """Copy down under pressure (BC-2): the coldest unsaved blocks, while too little of the pool is safe."""
    lower = leader.below(pool)
    mine = leader.aids.pools[pool.info.pool]
    if lower is None or mine.blocked or not (mine.exposed or mine.covered):
        return
    batch = leader.config.offload_batch_blocks
    wanted = pressure(leader, pool)
    # Four candidates at once keep a link busy; more would only hold source places for longer.
    room = min(wanted, 4 * batch - len(mine.planned))
    if room <= 0:
        return
    chosen = _coldest(leader, pool, room)
    for owner, places in chosen.items():
        for at in range(0, len(places), batch):
            _plan(leader, pool, lower, owner, places[at : at + batch])


def pressure(leader: Decider, pool: PoolFacts) -> int:
    """How many blocks should be copied down now; 0 when enough places are empty or safely evictable."""
    mine = leader.aids.pools[pool.info.pool]
    unsaved = len(mine.exposed) + len(mine.covered)
    threshold = leader.config.offload_threshold
    if threshold == 0.0:
        return unsaved
    safe = _safe_places(leader, pool)
    capacity = len(pool)
    if safe >= (1.0 - threshold) * capacity:
        return 0
    return max(0, int((1.0 - threshold + leader.config.offload_hysteresis) * capacity) - safe)


def _safe_places(leader: Decider, pool: PoolFacts) -> int:
    mine = leader.aids.pools[pool.info.pool]
    safe = pool.counts[Condition.EMPTY] + pool.counts[Condition.CACHED] - len(mine.exposed)
    # A cached block that is being copied is held by its operation alone, and as good as safe.
    return safe + sum(
        1 for place, number in mine.planned.items()
        if pool.refs[place] == 1 and leader.state.candidates[number].slot is None
    )


def calm_blocks(leader: Decider, source: int) -> int | None:
    """Blocks that decoding requests may be given before a block that becomes full makes the leader copy down.

    Each block that is given away makes at most one place less safe, and nothing else that decoding does changes the
    answer. None when somebody watches, holds or waits: then every iteration is a chance to act.
    """
    state, aids = leader.state, leader.aids
    if leader.gate is not None or state.holds or state.frozen is not None or state.draining or state.breakpoints:
        return None
    if aids.dirty or aids.pending or aids.undispatched or aids.complete or aids.announced:
        return None
    pool = leader.device_pool(source)
    lower = leader.below(pool)
    mine = aids.pools[pool.info.pool]
    if lower is None or mine.blocked or 4 * leader.config.offload_batch_blocks <= len(mine.planned):
        return PLENTY
    return max(-1, _safe_places(leader, pool) - math.ceil((1.0 - leader.config.offload_threshold) * len(pool)))


def _coldest(leader: Decider, pool: PoolFacts, count: int) -> dict[int | None, list[int]]:
    """The coldest unsaved places, those that nobody holds first, grouped by the live slot that holds them (or None)."""
    mine = leader.aids.pools[pool.info.pool]
    ours = pool.info.authority is Authority.LEADER
    chosen: dict[int | None, list[int]] = {}
    held: dict[int, set[int]] = {}
    taken = 0
    for place in chain(mine.exposed, mine.covered):
        if place in mine.planned or pool.content[place] != READY:
            continue
        owner = None if ours or not pool.refs[place] else _holder(leader, pool, place, held)
        if owner is not None and leader.state.slots[owner].state is SlotState.ONBOARDING:
            continue  # if another part of its load fails, what is behind that is dropped
        chosen.setdefault(owner, []).append(place)
        taken += 1
        if taken == count:
            break
    return chosen


def _holder(leader: Decider, pool: PoolFacts, place: int, held: dict[int, set[int]]) -> int | None:
    """A live slot that holds this device place and is not about to lose it. ``held``: blocks of slots asked before."""
    owner = leader.aids.pools[pool.info.pool].owner
    number = owner.get(place)
    slot = None if number is None else leader.state.slots.get(number)
    if slot is not None and place in _blocks_of(pool, slot, held):
        return slot.slot
    for other in leader.state.slots.values():
        if place in _blocks_of(pool, other, held):
            owner[place] = other.slot
            return other.slot
    return None


def _blocks_of(pool: PoolFacts, slot: SlotFacts, held: dict[int, set[int]]) -> set[int]:
    blocks = held.get(slot.slot)
    if blocks is None:
        blocks = held[slot.slot] = set(slot.device_blocks) if slot.device_pool == pool.info.pool else set()
    return blocks


def _plan(leader: Decider, pool: PoolFacts, lower: PoolFacts, owner: int | None, places: list[int]) -> None:
    mine = leader.aids.pools[pool.info.pool]
    number = leader.state.next_candidate
    slot = None if owner is None else leader.state.slots[owner]
    first = None
    if slot is not None:
        position = dict(zip(slot.device_blocks, range(len(slot.device_blocks)), strict=True))
        at = [position[place] for place in places]
        order = sorted(range(len(places)), key=at.__getitem__)
        places = [places[i] for i in order]
        first = min(at)
        leader.aids.evaluated[slot.slot] = max(leader.aids.evaluated.get(slot.slot, 0), max(at) + 1)
    leader.emit(
        ev.CandidatePlanned, number, owner, Route.of(pool.info.tier, lower.info.tier),
        pack_hashes(pool.hash_of[place] for place in places), b"", first,
    )
    leader.aids.drawn_from[number] = pool.info.pool
    for place in places:
        mine.planned[place] = number
    leader.aids.saved(pool, places)
    enqueue(leader, leader.state.candidates[number])


def plan_last_offload(leader: Decider, slot: SlotFacts) -> None:
    """A slot finishes: under pressure its unsaved blocks are copied while it still holds them."""
    if slot.device_pool is None or not slot.device_blocks:
        return
    pool = leader.state.pools[slot.device_pool]
    lower = leader.below(pool)
    mine = leader.aids.pools[pool.info.pool]
    batch = leader.config.offload_batch_blocks
    room = 4 * batch - len(mine.planned)
    if lower is None or mine.blocked or not mine.covered or room <= 0 or pressure(leader, pool) <= 0:
        return
    places = [place for place in slot.device_blocks if place in mine.covered and pool.refs[place] == 1]
    if places:
        places = places[:room]
        for at in range(0, len(places), batch):
            _plan(leader, pool, lower, slot.slot, places[at : at + batch])
