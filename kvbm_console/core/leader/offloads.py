"""Offloads: which blocks are copied down, and when (BC-2).

Law of this file: a copy does not make room, so pressure is measured on what would be *lost*. Safe places are empty, or
cached with a ready or in-flight copy below; copying starts when their share falls below 1 - threshold.
"""

import math
from collections.abc import Iterable
from itertools import chain, islice, repeat
from operator import ne
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import gather, pack_hashes
from kvbm_console.core.ids import Authority, Condition, Route, SlotState
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.pipeline import enqueue
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts

PLENTY: Final = 2**31
"""Blocks of which there are always fewer."""
_EMPTY, _CACHED = int(Condition.EMPTY), int(Condition.CACHED)
"""As plain integers: to find a member in its class takes longer than the comparison that needs it."""
_LEADER, _ONBOARDING = Authority.LEADER, SlotState.ONBOARDING


def plan_offloads(leader: Decider, pool: PoolFacts) -> None:
    """Copy down under pressure (BC-2): the coldest unsaved blocks, while too little of the pool is safe."""
    lower = leader.below(pool)
    mine = leader.aids.pools[pool.info.pool]
    if lower is None or mine.blocked or not (mine.exposed or mine.covered):
        return
    batch = leader.config.offload_batch_blocks
    # Four candidates at once keep a link busy; more would only hold source places for longer.
    room = 4 * batch - len(mine.planned)
    if room > 0:
        room = min(room, pressure(leader, pool))
    if room <= 0:
        return
    for owner, places in _coldest(leader, pool, room).items():
        for at in range(0, len(places), batch):
            _plan(leader, pool, lower, owner, places[at : at + batch])


def pressure(leader: Decider, pool: PoolFacts) -> int:
    """How many blocks should be copied down now; 0 when enough places are empty or safely evictable."""
    mine = leader.aids.pools[pool.info.pool]
    threshold = leader.config.offload_threshold
    if threshold == 0.0:
        return len(mine.exposed) + len(mine.covered)
    counts, capacity = pool.counts, len(pool.content)
    enough = (1.0 - threshold) * capacity
    safe = counts[_EMPTY] + counts[_CACHED] - len(mine.exposed)
    if safe >= enough:
        return 0
    if mine.planned:
        safe += _as_good_as_safe(leader, pool, mine.planned)
        if safe >= enough:
            return 0
    return max(0, int((1.0 - threshold + leader.config.offload_hysteresis) * capacity) - safe)


def _safe_places(leader: Decider, pool: PoolFacts) -> int:
    mine = leader.aids.pools[pool.info.pool]
    safe = pool.counts[_EMPTY] + pool.counts[_CACHED] - len(mine.exposed)
    return safe + _as_good_as_safe(leader, pool, mine.planned) if mine.planned else safe


def _as_good_as_safe(leader: Decider, pool: PoolFacts, planned: dict[int, int]) -> int:
    """A cached block that is being copied is held by its operation alone, and as good as safe."""
    candidates, refs = leader.state.candidates, pool.refs
    numbers = set(planned.values())
    nobodys = {number for number in numbers if candidates[number].slot is None}
    if len(nobodys) == len(numbers):
        return gather(refs, tuple(planned)).count(1)
    if not nobodys:
        return 0
    return sum(1 for place, number in planned.items() if refs[place] == 1 and number in nobodys)


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
    places = list(islice(chain(mine.exposed, mine.covered), count))
    if mine.planned.keys().isdisjoint(places) and bytes(gather(pool.content, places)).count(READY) == len(places):
        one = _one_owner(leader, pool, places)
        if one is not None:
            return one
    return _grouped(leader, pool, chain(mine.exposed, mine.covered), count)


def _one_owner(leader: Decider, pool: PoolFacts, places: list[int]) -> dict[int | None, list[int]] | None:
    """As ``_grouped`` of readable places, where nobody holds any or one slot has all in a row; None where not."""
    held = gather(pool.refs, places)
    if pool.info.authority is _LEADER or not any(held):
        return {None: places}
    if not all(held):
        return None
    owner = leader.aids.pools[pool.info.pool].owner
    number = owner.get(places[0])
    slot = None if number is None else leader.state.slots.get(number)
    if slot is None or slot.device_pool != pool.info.pool or slot.state is _ONBOARDING:
        return None
    if any(map(ne, map(owner.get, places), repeat(number))) or _at(slot, places) is None:
        return None
    return {number: places}


def _at(slot: SlotFacts, places: list[int]) -> int | None:
    """Where these places stand in a row among those of the slot."""
    blocks = slot.device_blocks
    if places[0] not in blocks:
        return None
    first = blocks.index(places[0])
    return first if blocks[first : first + len(places)] == places else None


def _grouped(leader: Decider, pool: PoolFacts, places: Iterable[int], count: int) -> dict[int | None, list[int]]:
    """The first ``count`` of these places that can be copied, by the slot that holds them, each looked at."""
    planned, content, refs = leader.aids.pools[pool.info.pool].planned, pool.content, pool.refs
    ours = pool.info.authority is _LEADER
    chosen: dict[int | None, list[int]] = {}
    held: dict[int, set[int]] = {}
    taken = 0
    for place in places:
        if place in planned or content[place] != READY:
            continue
        owner = None if ours or not refs[place] else _holder(leader, pool, place, held)
        if owner is not None and leader.state.slots[owner].state is _ONBOARDING:
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
        first = _at(slot, places)
        if first is not None:
            last = first + len(places) - 1
        else:
            position = dict(zip(slot.device_blocks, range(len(slot.device_blocks)), strict=True))
            places = sorted(places, key=position.__getitem__)
            first, last = position[places[0]], position[places[-1]]
        leader.aids.evaluated[slot.slot] = max(leader.aids.evaluated.get(slot.slot, 0), last + 1)
    leader.emit(
        ev.CandidatePlanned, number, owner, Route.of(pool.info.tier, lower.info.tier),
        pack_hashes(gather(pool.hash_of, places)), b"", first,
    )
    leader.aids.drawn_from[number] = pool.info.pool
    mine.planned.update(dict.fromkeys(places, number))
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
    refs = pool.refs
    places = [place for place in filter(mine.covered.__contains__, slot.device_blocks) if refs[place] == 1]
    if places:
        places = places[:room]
        for at in range(0, len(places), batch):
            _plan(leader, pool, lower, slot.slot, places[at : at + batch])
