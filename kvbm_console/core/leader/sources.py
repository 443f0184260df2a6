"""Which pools, places and hashes a candidate moves between, and what may enter the disk tier.

Law of this file: it looks and counts, and changes no fact.
"""

from typing import Any, Final

from kvbm_console.core.candidates import CandidateFacts
from kvbm_console.core.columns import gather
from kvbm_console.core.ids import SkipReason, Tier
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import READY, PoolFacts

_G3: Final = Tier.G3


def _slot(leader: Decider, candidate: CandidateFacts) -> SlotFacts | None:
    return None if candidate.slot is None else leader.state.slots.get(candidate.slot)


def pools_of(leader: Decider, candidate: CandidateFacts) -> tuple[PoolFacts, PoolFacts]:
    """The source and the target pool of a candidate."""
    drawn_from = leader.aids.drawn_from.get(candidate.candidate)
    if drawn_from is not None:
        source_pool: PoolFacts | None = leader.state.pools[drawn_from]
        if candidate.route.is_load:
            target_pool = leader.state.pool_of(candidate.route.target)
        else:
            target_pool = leader.below(leader.state.pools[drawn_from])
    else:
        slot = _slot(leader, candidate)
        source = 0 if slot is None else slot.source
        source_pool = leader.state.pool_of(candidate.route.source, source)
        target_pool = leader.state.pool_of(candidate.route.target, source)
    if source_pool is None or target_pool is None:
        raise leader.bug(f"candidate {candidate.candidate} has no pools for {candidate.route.label}", candidate.slot)
    return source_pool, target_pool


def choose(leader: Decider, candidate: CandidateFacts) -> tuple[list[int], list[int], SkipReason | None]:
    """Source places and hashes that can be moved, and the reason that left out the others."""
    source, target = pools_of(leader, candidate)
    if candidate.route.is_load:
        if candidate.slot is None:
            return _prefetchable(candidate, source, target)
        slot = leader.state.slots[candidate.slot]
        staged = [place for index, places in slot.staged if index == source.info.pool for place in places]
        return staged[: len(candidate.hashes)], candidate.hashes, None
    sources: list[int] = []
    hashes: list[int] = []
    filtered: SkipReason | None = None
    planned, number = leader.aids.pools[source.info.pool].planned, candidate.candidate
    place_of, content, below = source.by_hash, source.content, target.by_hash
    if below.keys().isdisjoint(candidate.hashes) and not _filters(leader, target):
        places: list[Any] = list(map(place_of.get, candidate.hashes))
        if list(map(planned.get, places)).count(number) == len(places) == bytes(gather(content, places)).count(READY):
            return places, candidate.hashes, None  # the usual case, asked in bulk
    for key in candidate.hashes:
        # A hash may stand in several places; only those of the plan are held by the slot, or known to be free.
        place = place_of.get(key)
        if place is not None and planned.get(place) != number:
            place = next((other for other in source.places_of(key) if planned.get(other) == number), None)
        if key in below:
            filtered = filtered or SkipReason.ALREADY_CACHED
        elif place is None or content[place] != READY:
            filtered = SkipReason.SOURCE_EVICTED
        elif not admitted(leader, target, key):
            filtered = SkipReason.BELOW_FREQUENCY
            leader.box.policies[target.info.pool].not_admitted += 1
        else:
            sources.append(place)
            hashes.append(key)
    return sources, hashes, filtered


def _prefetchable(
    candidate: CandidateFacts, source: PoolFacts, target: PoolFacts
) -> tuple[list[int], list[int], SkipReason | None]:
    """Places and hashes of a prefetch that are still in the source alone; nothing behind one that left."""
    sources: list[int] = []
    hashes: list[int] = []
    filtered: SkipReason | None = None
    for key in candidate.hashes:
        place = source.ready_place(key)
        if key in target.by_hash:
            filtered = SkipReason.ALREADY_CACHED
        elif place is None:
            return sources, hashes, SkipReason.SOURCE_EVICTED
        else:
            sources.append(place)
            hashes.append(key)
    return sources, hashes, filtered


def admitted(leader: Decider, pool: PoolFacts, key: int) -> bool:
    """Whether a block has been used often enough to be written to this pool: the disk tier may ask for several uses."""
    return not _filters(leader, pool) or leader.aids.named.get(key, 0) >= leader.config.eviction.disk_admission


def _filters(leader: Decider, pool: PoolFacts) -> bool:
    return leader.config.eviction.disk_admission > 1 and pool.tier is _G3
