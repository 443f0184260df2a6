"""Offloads: which blocks are copied down, and when (BC-2).

Theory of operation
-------------------
A copy down frees no place. It makes an eviction harmless, because the block can be onboarded again. So the question is
not how full a pool is, but which blocks the next evictions would lose.

A pool gives away its empty places first, then the places at the cold end of its order of eviction. For a device pool
this is the engine's order (``PoolMemory.loose``), for a pool of ours the policy's (``PoolPolicy.coldest``). A place is
safe when it is empty or has a ready or in-flight copy below. The first ``reserve`` places of the order must be safe.
``plan_offloads`` copies the unsafe places among them, and unsafe places a little behind, so that the next look comes
later.

The reserve is the share 1 - threshold of the pool, or more when copies lag. ``most_given`` is the most places by which
copies were behind the places given away, in the current turn or the last. A turn gives away as many places as the pool
has. Before its third turn ends, the lag of a device pool is not known, so its reserve is the whole pool.

When even all free places do not fill the reserve, blocks of running requests are copied, at least ``HELD_LEAST`` of a
request at once. A request that ends is copied whole, while its slot still holds the blocks. At most four candidates of
a pool are open at a time.

A copy withholds its places until it ends, so a link that is slower than the pool gives places away may not have many of
them. ``PoolMemory.in_time`` says how many blocks are copied in an eighth of the pool's last turn. ``pipeline`` promotes
no more and skips the others as ``link_busy``. Blocks of live requests are left alone on such a link (``_too_slow``).
Under ``offload_link_busy`` queue, nothing is skipped for a link.

Example: a device pool of 10 places with threshold 0.8 has a reserve of 2. A place is empty, and the engine reuses the
places a, b, c next. Only b has a copy below. One place of the order besides the empty place must be safe, and a is not,
so a is copied, and c with it. If evictions then run 3 places ahead of copies, the reserve grows to 3.

Older recordings have the ``offload_law`` total. It counts all safe places of the pool instead of the next ones, and
``pressure`` gives the number of blocks to copy.

Law of this file: under ``offload_law`` order, a saved block that is evicted late protects nothing and does not count.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import chain, compress, islice
from operator import indexOf
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import gather
from kvbm_console.core.config import BATCH_LEAST, BATCH_PARTS
from kvbm_console.core.ids import Authority, Condition, Route, SlotState
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.memory import COPY_LEAST, TURN_PARTS, PoolMemory
from kvbm_console.core.leader.pipeline import enqueue
from kvbm_console.core.leader.victims import Evictable
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts

HELD_LEAST: Final = COPY_LEAST
"""Blocks of a running request are copied so many at a time; the others when it ends."""

KNOWN_AFTER: Final = 3
"""Turns after which a device pool has seen how much is wanted at once. Documents over a slow link lost up to 2.4 points
of hits with 1, up to 2.3 with 2 and none with 3."""


def plan_offloads(decider: Decider, pool: PoolFacts) -> None:
    """Copy down under pressure (BC-2) the next victims, or the coldest unsaved blocks, by ``offload_law``."""
    lower = decider.below(pool)
    mine = decider.memory.pools[pool.info.pool]
    if lower is None or mine.blocked or not (mine.exposed or mine.covered):
        return
    batch = most_copied(decider, pool)
    room = most_planned(decider, pool) - len(mine.planned)
    if room <= 0:
        return
    chosen: dict[int | None, list[int]] = {}
    if not decider.config.by_order:
        room = min(room, pressure(decider, pool))
        if room > 0:
            chosen = _coldest(decider, pool, room)
    elif mine.ordered:
        chosen = _next_of_engine(decider, pool, room)
    elif mine.exposed:
        chosen = _next_of_policy(decider, pool, lower, room)
    for owner, places in chosen.items():
        for at in range(0, len(places), batch):
            _plan(decider, pool, lower, owner, places[at : at + batch])


def most_copied(decider: Decider, pool: PoolFacts) -> int:
    """The most blocks of one copy from this pool: a large copy costs little, and withholds its places for long."""
    lower = decider.below(pool)
    smaller = len(pool) if lower is None else min(len(pool), len(lower))
    return min(decider.config.offload_batch_blocks, max(BATCH_LEAST, smaller // BATCH_PARTS))


def most_planned(decider: Decider, pool: PoolFacts) -> int:
    """The most places whose copy may be open. Four copies keep a link busy; more only hold source places for longer.

    Until the speed of the link is known it is one copy, which withholds no larger part of the pool than later copies.
    """
    batch = most_copied(decider, pool)
    if decider.in_time(pool) is None:
        return min(batch, max(COPY_LEAST, len(pool) // TURN_PARTS))
    return 4 * batch


# --- by the order of eviction ---


def reserve(decider: Decider, pool: PoolFacts) -> int:
    """How many of the places that are given away next must be safe."""
    mine, capacity = decider.memory.pools[pool.info.pool], len(pool)
    if mine.ordered and mine.given < KNOWN_AFTER * capacity:
        return capacity
    share = math.ceil((1.0 - decider.config.offload_threshold) * capacity)
    return min(max(share, mine.most_given, mine.most_given_before), capacity)


def _further(decider: Decider, pool: PoolFacts) -> int:
    """So many places behind the reserve are made safe with it: they give a batch, and the next look comes later."""
    return max(most_copied(decider, pool), int(decider.config.offload_hysteresis * len(pool)))


def _next_of_engine(decider: Decider, pool: PoolFacts, room: int) -> dict[int | None, list[int]]:
    """The blocks that a device pool would lose next, and blocks of requests if even all free places are no reserve."""
    mine = decider.memory.pools[pool.info.pool]
    ahead = reserve(decider, pool) - pool.counts[Condition.EMPTY]
    if ahead <= 0:
        return {}
    loose, exposed = mine.loose, mine.exposed
    chosen: dict[int | None, list[int]] = {}
    if not exposed:
        decider.in_order.add(pool.info.pool)
    elif len(loose) <= ahead and pool.info.pool in decider.in_order:
        chosen[None] = list(islice(exposed, room))
        room -= len(chosen[None])
    elif decider.safe_places.get(pool.info.pool, 0) < ahead + pool.counts[Condition.EMPTY]:
        at = _first(decider, pool, mine, 2 * ahead)  # further than needed, so that the next look comes later
        if at < ahead:
            behind = islice(loose, at, ahead + _further(decider, pool))
            chosen[None] = list(islice(filter(exposed.__contains__, behind), room))
            room -= len(chosen[None])
        decider.safe_places[pool.info.pool] = at + pool.counts[Condition.EMPTY]
    if len(loose) < ahead and len(mine.covered) >= HELD_LEAST and room >= HELD_LEAST and not _too_slow(decider, pool):
        _add_held(decider, pool, mine, room, chosen)
    return chosen


def _add_held(
    decider: Decider, pool: PoolFacts, mine: PoolMemory, room: int, chosen: dict[int | None, list[int]]
) -> None:
    """Unsaved blocks of running requests that have a batch of them: to copy these takes no place from the engine."""
    covered, content = mine.covered, pool.content
    for number in owners_of(mine, decider.live_memory.held_of(pool)):
        slot = decider.state.slots.get(number)
        if slot is None or slot.device_pool != pool.info.pool or slot.state is SlotState.ONBOARDING:
            continue
        unsaved = filter(covered.__contains__, slot.device_blocks)
        places = list(islice((place for place in unsaved if content[place] == READY), max(room, HELD_LEAST)))
        if len(places) >= HELD_LEAST:
            chosen[number] = places[:room]
            room -= len(chosen[number])
            if not room:
                return


def _too_slow(decider: Decider, pool: PoolFacts) -> bool:
    """True if the link is too slow for blocks of live requests: the end of a request waits for its copies, with all of
    its blocks."""
    most = decider.in_time(pool)
    return most is not None and most < COPY_LEAST


def owners_of(mine: PoolMemory, held: Mapping[int | None, int]) -> Iterator[int]:
    """Slots with ``HELD_LEAST`` covered places or more, in the order of their first place; ``held`` counts these.

    The caller takes as many slots as it needs, and only the places up to theirs are looked at.
    """
    many = {number for number, count in held.items() if count >= HELD_LEAST}
    many.discard(None)
    for number in filter(many.__contains__, map(mine.owner.get, mine.covered)) if many else ():
        if number in many and number is not None:
            many.remove(number)
            yield number
            if not many:
                return


def _next_of_policy(decider: Decider, pool: PoolFacts, lower: PoolFacts, room: int) -> dict[int | None, list[int]]:
    """The blocks that the policy of a pool of ours would evict next and that have no copy below.

    The policy is asked from time to time.
    """
    mine = decider.memory.pools[pool.info.pool]
    # Copies into more than half of the places that the pool below can give would be evicted before their use.
    most = max(1, (lower.counts[Condition.EMPTY] + lower.counts[Condition.CACHED]) // 2)
    ahead, further = min(reserve(decider, pool), most) - pool.counts[Condition.EMPTY], _further(decider, pool)
    count = min(max(ahead, mine.wanted) + further, most)
    if ahead > 0 and mine.given - mine.looked >= min(further, ahead) // 2:
        _look(decider, pool, count)
    places = _unsafe(pool, mine, room)
    if mine.wanted and len(places) < room:
        _look(decider, pool, count)
        places = _unsafe(pool, mine, room)
    return {None: places} if places else {}


def _unsafe(pool: PoolFacts, mine: PoolMemory, room: int) -> list[int]:
    """The next places of the last look that are to be copied, without those used or evicted meanwhile."""
    places = list[int]()
    while mine.unsafe and len(places) < room:
        at = room - len(places)
        here = filter(pool.by_hash.__contains__, mine.unsafe[:at])
        places += filter(mine.exposed.__contains__, map(pool.by_hash.__getitem__, here))
        del mine.unsafe[:at]
    return places


def _look(decider: Decider, pool: PoolFacts, count: int) -> None:
    """Name the blocks that would be evicted next, and those of them that are to be copied.

    A look costs as much as it sees. Its finds are used up before the next look, unless the order has moved on.
    """
    mine, policy = decider.memory.pools[pool.info.pool], decider.live_memory.policies[pool.info.pool]
    keys = policy.coldest(min(count, pool.counts[Condition.CACHED]), Evictable(pool), decider.at_ns)
    mine.next = dict.fromkeys(keys)
    mine.unsafe = list(compress(keys, map(mine.exposed.__contains__, map(pool.by_hash.__getitem__, keys))))
    mine.looked, mine.wanted = mine.given, 0


# --- by the total, and write-through ---


def pressure(decider: Decider, pool: PoolFacts) -> int:
    """How many blocks should be copied down now; 0 when enough places are empty or safely evictable."""
    mine = decider.memory.pools[pool.info.pool]
    threshold = decider.config.offload_threshold
    if threshold == 0.0:
        return len(mine.exposed) + len(mine.covered)
    counts, capacity = pool.counts, len(pool.content)
    enough = (1.0 - threshold) * capacity
    safe = counts[Condition.EMPTY] + counts[Condition.CACHED] - len(mine.exposed)
    if safe >= enough:
        return 0
    if mine.planned:
        safe += _as_good_as_safe(decider, pool, mine.planned)
        if safe >= enough:
            return 0
    return max(0, int((1.0 - threshold + decider.config.offload_hysteresis) * capacity) - safe)


def _safe_places(decider: Decider, pool: PoolFacts) -> int:
    mine = decider.memory.pools[pool.info.pool]
    safe = pool.counts[Condition.EMPTY] + pool.counts[Condition.CACHED] - len(mine.exposed)
    return safe + _as_good_as_safe(decider, pool, mine.planned) if mine.planned else safe


def _as_good_as_safe(decider: Decider, pool: PoolFacts, planned: dict[int, int]) -> int:
    """A cached block that is being copied is held by its operation alone, and as good as safe."""
    candidates, refs = decider.state.candidates, pool.refs
    numbers = set(planned.values())
    nobodys = {number for number in numbers if candidates[number].slot is None}
    if len(nobodys) == len(numbers):
        return gather(refs, tuple(planned)).count(1)
    if not nobodys:
        return 0
    return sum(1 for place, number in planned.items() if refs[place] == 1 and number in nobodys)


def calm_blocks(decider: Decider, source: int) -> int | None:
    """Blocks that decoding requests may be given before a block that becomes full makes the leader copy down.

    Each block that is given away makes at most one place less safe, and the reserve larger by at most one while copies
    run. Nothing else that decoding does changes the answer before the pool's turn ends. None when a breakpoint is
    armed, a slot is held or a copy waits, because then every iteration is a chance to act.
    """
    state, memory = decider.state, decider.memory
    if decider.gate is not None or state.holds or state.frozen is not None or state.draining or state.breakpoints:
        return None
    if memory.dirty or memory.pending or memory.undispatched or memory.complete or memory.announced:
        return None
    pool = decider.device_pool(source)
    lower = decider.below(pool)
    mine = memory.pools[pool.info.pool]
    # An iteration that may end the pool's turn is taken alone, so that the next turn begins with it.
    most = max(-1, len(pool) - (mine.given - mine.turned) - 1)
    unknown = KNOWN_AFTER * len(pool) - mine.given
    if unknown > 0:  # the reserve changes there, too
        most = min(most, unknown - 1)
    if lower is None or mine.blocked or _room_is_taken(decider, pool, mine):
        return most
    if not decider.config.by_order:
        enough = math.ceil((1.0 - decider.config.offload_threshold) * len(pool))
        return max(-1, min(most, _safe_places(decider, pool) - enough))
    safe = _safe_in_order(decider, pool, mine)
    if mine.planned:  # each block that is given away makes the copies lag by one more, and the reserve may be that lag
        most = min(most, (safe - mine.behind) // 2)
    return max(-1, min(most, safe - reserve(decider, pool)))


def _room_is_taken(decider: Decider, pool: PoolFacts, mine: PoolMemory) -> bool:
    """True if no copy down is planned before one ends. A planned place that is not copied can be given away before."""
    most = most_planned(decider, pool)
    return most <= len(mine.planned) and most <= sum(1 for place in mine.planned if pool.refs[place])


def _safe_in_order(decider: Decider, pool: PoolFacts, mine: PoolMemory) -> int:
    """Places of a device pool that are given away before a block would be lost."""
    return pool.counts[Condition.EMPTY] + _first(decider, pool, mine, len(mine.loose))


def _first(decider: Decider, pool: PoolFacts, mine: PoolMemory, most: int) -> int:
    """How many loose places, at most ``most``, come before the first exposed place."""
    exposed, loose = mine.exposed, mine.loose
    if not exposed:
        return min(most, len(loose))
    try:
        if pool.info.pool in decider.in_order:
            return indexOf(islice(loose, most), next(iter(exposed)))
        return indexOf(map(exposed.__contains__, islice(loose, most)), True)
    except ValueError:
        return min(most, len(loose))


def _at(slot: SlotFacts, places: list[int]) -> int | None:
    """The index of these places among those of the slot, None unless they stand in a row."""
    blocks = slot.device_blocks
    try:
        first = blocks.index(places[0])
    except ValueError:
        return None
    return slot.passed_blocks + first if blocks[first : first + len(places)] == places else None


def _coldest(decider: Decider, pool: PoolFacts, count: int) -> dict[int | None, list[int]]:
    """The ``count`` coldest unsaved places that can be copied, those without a holder first.

    They are grouped by the live slot that holds them, or None.
    """
    mine = decider.memory.pools[pool.info.pool]
    planned, content, refs = mine.planned, pool.content, pool.refs
    ours = pool.info.authority is Authority.LEADER
    chosen: dict[int | None, list[int]] = {}
    held: dict[int, set[int]] = {}
    taken, slow = 0, _too_slow(decider, pool)
    # vLLM copies the blocks of live requests alone.
    for place in mine.covered if decider.config.eviction.by_request else chain(mine.exposed, mine.covered):
        if place in planned or content[place] != READY:
            continue
        owner = None if ours or not refs[place] else _holder(decider, pool, place, held)
        if owner is not None and (slow or decider.state.slots[owner].state is SlotState.ONBOARDING):
            continue  # of a load: if another part of it fails, the blocks behind it are dropped
        chosen.setdefault(owner, []).append(place)
        taken += 1
        if taken == count:
            break
    return chosen


def _holder(decider: Decider, pool: PoolFacts, place: int, held: dict[int, set[int]]) -> int | None:
    """A live slot that holds this device place and is not about to lose it. ``held``: blocks of slots asked before."""
    owner = decider.memory.pools[pool.info.pool].owner
    number = owner.get(place)
    slot = None if number is None else decider.state.slots.get(number)
    if slot is not None and place in _blocks_of(pool, slot, held):
        return slot.slot
    for other in decider.state.slots.values():
        if place in _blocks_of(pool, other, held):
            owner[place] = other.slot
            return other.slot
    return None


def _blocks_of(pool: PoolFacts, slot: SlotFacts, held: dict[int, set[int]]) -> set[int]:
    blocks = held.get(slot.slot)
    if blocks is None:
        blocks = held[slot.slot] = set(slot.device_blocks) if slot.device_pool == pool.info.pool else set()
    return blocks


def _plan(decider: Decider, pool: PoolFacts, lower: PoolFacts, owner: int | None, places: list[int]) -> None:
    mine = decider.memory.pools[pool.info.pool]
    places = _one_of_each(pool, places)
    number = decider.state.next_candidate
    slot = None if owner is None else decider.state.slots[owner]
    first = None
    if slot is not None:
        first = _at(slot, places)
        if first is not None:
            last = first + len(places) - 1
        else:
            position = dict(zip(slot.device_blocks, range(slot.passed_blocks, slot.end_block), strict=True))
            places = sorted(places, key=position.__getitem__)
            first, last = position[places[0]], position[places[-1]]
        decider.memory.evaluated[slot.slot] = max(decider.memory.evaluated.get(slot.slot, 0), last + 1)
    decider.emit(
        ev.CandidatePlanned, number, owner, Route.of(pool.info.tier, lower.info.tier),
        decider.hashes(gather(pool.hash_of, places)), b"", first,
    )
    decider.memory.drawn_from[number] = pool.info.pool
    mine.planned.update(dict.fromkeys(places, number))
    decider.live_memory.saved(pool, places)
    enqueue(decider, decider.state.candidates[number])


def _one_of_each(pool: PoolFacts, places: list[int]) -> list[int]:
    """Prompts that are computed at once leave a hash in several places: only one place is copied."""
    if not pool.copies or pool.copies.keys().isdisjoint(gather(pool.hash_of, places)):
        return places
    first_of: dict[int, int] = {}
    for place in places:
        first_of.setdefault(pool.hash_of[place], place)
    return list(first_of.values())


def plan_last_offload(decider: Decider, slot: SlotFacts) -> None:
    """A slot finishes: under pressure its unsaved blocks are copied while it still holds them."""
    if slot.device_pool is None or not slot.device_blocks:
        return
    pool = decider.state.pools[slot.device_pool]
    lower = decider.below(pool)
    mine = decider.memory.pools[pool.info.pool]
    batch = most_copied(decider, pool)
    room = most_planned(decider, pool) - len(mine.planned)
    if lower is None or mine.blocked or not mine.covered or room <= 0 or _too_slow(decider, pool):
        return
    if mine.ordered:
        if pool.counts[Condition.EMPTY] + len(mine.loose) >= reserve(decider, pool):
            return  # there is time to copy its blocks later
    elif pressure(decider, pool) <= 0:
        return
    refs = pool.refs
    places = [place for place in filter(mine.covered.__contains__, slot.device_blocks) if refs[place] == 1]
    if places:
        places = places[:room]
        for at in range(0, len(places), batch):
            _plan(decider, pool, lower, slot.slot, places[at : at + batch])
