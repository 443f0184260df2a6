"""Places of an engine that is only watched, told apart from its requests: a reset, other groups, the whole pool.

Law of this file: a place that a slot holds is told by its slot; only the others change here.
"""

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import EMPTY_HASH, EvictRule, ReleaseReason
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.tiers import READY, PoolFacts

TOLD = -1
"""The operation of blocks that an engine says to hold and that nobody has seen it write."""


def places_reported(leader: Decider, pool: PoolFacts, s: st.BlocksReported) -> None:
    """The prefix cache was reset, places were given out, or this is what they hold."""
    places, stored = unpack_ids(s.places), unpack_hashes(s.stored)
    if s.removed or EMPTY_HASH in stored or (stored and len(stored) != len(places)):
        raise Refused(f"{len(stored)} hashes do not fit {len(places)} places of pool {pool.info.pool}")
    capacity = pool.places_max
    if places and not 0 <= min(places) <= max(places) < capacity:
        raise Refused(f"block ids must be from 0 to {capacity - 1}, got {min(places)} to {max(places)}")
    if stored:
        _know(leader, pool, dict(zip(places, stored, strict=True)), whole=s.cleared)
    elif s.cleared:
        if any(pool.refs) and pool.info.source not in leader.state.lost_sources:
            leader.emit(ev.SourceLost, pool.info.source, 0, 0, False)  # it resets only when no request holds a block
        _forget(leader, pool, [place for place, key in enumerate(pool.hash_of) if key and not pool.refs[place]])
    else:
        _given_out(leader, pool, places, s.request)


def _given_out(leader: Decider, pool: PoolFacts, places: list[int], request: str) -> None:
    """For blocks of another group, or in a way that no report of the request has told."""
    slot = leader.state.slot_named(request)
    lost = [
        place for place in places if place < len(pool) and pool.content[place] == READY and not pool.refs[place]
    ]
    if lost:
        leader.evict(pool, lost, None if slot is None else slot.slot, EvictRule.REASSIGNED)


def _know(leader: Decider, pool: PoolFacts, told: dict[int, int], *, whole: bool) -> None:
    if whole:
        _forget(leader, pool, [
            place for place, key in enumerate(pool.hash_of)
            if key and not pool.refs[place] and told.get(place) != key
        ])
    known = len(pool)
    new = {
        place: key for place, key in told.items()
        if place >= known or not (pool.content[place] or pool.refs[place])
    }
    if new:
        places, hashes = pack_ids(new), pack_hashes(new.values())
        leader.emit(ev.BlocksReserved, pool.info.pool, TOLD, places, hashes)
        leader.emit(ev.BlocksReady, pool.info.pool, TOLD, places)


def _forget(leader: Decider, pool: PoolFacts, places: list[int]) -> None:
    if places:
        hashes = [pool.hash_of[place] for place in places]
        leader.emit(ev.BlocksDropped, pool.info.pool, TOLD, pack_ids(places), ReleaseReason.RESET)
        leader.gave_up(pool, places, hashes)
