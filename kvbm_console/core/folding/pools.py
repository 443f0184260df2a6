"""Pools: places that fill, empty and are kept apart, by our decision or as an engine reports.

Law of this file: a place changes here only together with its hash and condition (`PoolFacts` keeps the counts).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.chains import fronts_of
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import COUNTERS, EMPTY_HASH, Authority, Condition, ReleaseReason
from kvbm_console.core.tiers import (
    GONE,
    READY,
    REPLACEABLE,
    UNKNOWN_NS,
    WRITING,
    EngineFacts,
    PoolFacts,
    PoolInfo,
    forget_copies,
    lift,
    quarantine,
    store_copies,
)

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState


def _pool_known(state: "CacheState", e: ev.PoolKnown) -> None:
    if not 0 <= e.pool <= len(state.pools):
        raise FoldError(f"pool {e.pool} does not follow pool {len(state.pools) - 1}")
    pool = PoolFacts(
        PoolInfo(
            e.pool, e.source, e.dp_rank, e.group, e.tier, e.medium, e.capacity_blocks, e.block_tokens,
            e.authority, e.first_place, e.window,
        )
    )
    pool.silent = e.silent
    if e.pool == len(state.pools):
        state.pools.append(pool)
        return
    before = state.pools[e.pool]
    source = before.info.source
    if state.lost_sources.get(source) != REPLACEABLE or state.in_use(before):
        raise FoldError(f"pool {e.pool} of source {source} is not to be forgotten")
    state.pools[e.pool] = pool
    if all(other.info.source != source for other in state.pools):
        del state.lost_sources[source]


def _blocks_filled(state: "CacheState", e: ev.BlocksFilled) -> None:
    ids, hashes = unpack_ids(e.ids), unpack_hashes(e.hashes)
    state.known_pool(e.pool).store(ids, hashes, READY, e.at_ns)
    at = 0
    for number, count in zip(e.slots, e.counts, strict=True):
        slot = state.known_slot(number)
        slot.filled_blocks += count
        beyond = slot.filled_blocks - len(slot.hashes)
        if beyond > 0:
            slot.hashes += hashes[at + count - beyond : at + count]
        at += count


def _blocks_evicted(state: "CacheState", e: ev.BlocksEvicted) -> None:
    pool = state.known_pool(e.pool)
    ids = unpack_ids(e.ids)
    pool.evict(ids)
    state.totals.evicted_blocks[pool.info.tier - 1] += len(ids)


def _blocks_reserved(state: "CacheState", e: ev.BlocksReserved) -> None:
    pool, ids = state.known_pool(e.pool), unpack_ids(e.ids)
    if pool.info.capacity_blocks is None:
        pool.require_known(ids)
    pool.store(ids, unpack_hashes(e.hashes), WRITING, e.at_ns)


def _blocks_ready(state: "CacheState", e: ev.BlocksReady) -> None:
    state.known_pool(e.pool).make_ready(unpack_ids(e.ids), UNKNOWN_NS if e.operation == ev.RESTORED else e.at_ns)


def _blocks_dropped(state: "CacheState", e: ev.BlocksDropped) -> None:
    pool = state.known_pool(e.pool)
    if e.why is ReleaseReason.EPOCH:
        lift(pool, e.operation)
        state.late.pop(e.operation, None)
    else:
        pool.forget(unpack_ids(e.ids))


def _blocks_quarantined(state: "CacheState", e: ev.BlocksQuarantined) -> None:
    quarantine(state.known_pool(e.pool), unpack_ids(e.ids), e.operation)
    state.late[e.operation] = set(e.reported)


def _blocks_seen(state: "CacheState", e: ev.BlocksSeen) -> None:
    """Cleared, then removed, then stored. A hash that is stored twice has two places, and is gone after two."""
    pool = state.known_pool(e.pool)
    pool.silent = pool.silent and not (e.stored or e.removed)  # what is reset was told by nobody yet
    did_ns = UNKNOWN_NS if e.age_ns is None else e.at_ns - e.age_ns
    if e.cleared:
        pool.clear()
        _known_again(state, pool.info.source)
    if e.removed:
        evicted = forget_copies(pool, unpack_hashes(e.removed), did_ns)
        state.totals.evicted_blocks[pool.info.tier - 1] += evicted
    if e.stored:
        stored, chains = unpack_hashes(e.stored), pool.chains
        assert chains is not None
        fronts = [EMPTY_HASH] * len(stored)
        if e.chains:
            fronts = fronts_of(stored, unpack_ids(e.chains), unpack_hashes(e.parents))
        store_copies(pool, stored, fronts, did_ns)
        if e.marked:
            chains.mark(stored, unpack_ids(e.marked), unpack_hashes(e.contents), e.contexts)
        if e.again_blocks:
            chains.count_again(e.again_within_ns, e.again_within_blocks, e.again_blocks)


def _engine_measured(state: "CacheState", e: ev.EngineMeasured) -> None:
    if not e.measures:
        state.measured.pop(e.source, None)
        return
    values = dict(zip(e.measures, e.values, strict=True))
    known = state.measured.get(e.source)
    if known is None or any(values.get(counter, 0) < first for counter, first in known.first.items()
                            if counter in COUNTERS):
        known = EngineFacts(e.at_ns, values, e.at_ns, values)  # a counter that went back belongs to a new process
    state.measured[e.source] = EngineFacts(e.at_ns, values, known.first_ns, known.first)


def _known_again(state: "CacheState", source: int) -> None:
    """A publisher clears all its pools one after the other: with the last of them nothing is unknown any more."""
    if source in state.lost_sources and not any(
        pool.resident_blocks for pool in _stream_pools(state, source)
    ):
        del state.lost_sources[source]


def _stream_pools(state: "CacheState", source: int) -> list[PoolFacts]:
    return [
        pool for pool in state.pools if pool.info.source == source and pool.info.authority is Authority.STREAM
    ]


def _source_lost(state: "CacheState", e: ev.SourceLost) -> None:
    if e.gone or e.restarted:
        state.measured.pop(e.source, None)
    if e.gone:
        for pool in state.pools:
            if pool.info.source == e.source and pool.info.authority is not Authority.LEADER:
                pool.forget([place for place in range(len(pool)) if pool.condition(place) is Condition.CACHED])
        state.connectors.pop(e.source, None)
        state.lost_sources[e.source] = REPLACEABLE if e.replaceable else GONE
        return
    if not e.restarted:
        if not state.has_ended(e.source):
            state.lost_sources[e.source] = state.lost_sources.get(e.source, 0) + 1
        return
    for pool in _stream_pools(state, e.source):
        pool.clear()  # the engine that filled it is gone
    state.lost_sources.pop(e.source, None)


def _prefetch_limited(state: "CacheState", e: ev.PrefetchLimited) -> None:
    state.totals.prefetch_limited = e.limited
    state.totals.prefetch_limits += e.limited


FOLDS: Final[dict[type[ev.Event], Callable[["CacheState", Any], None]]] = {
    ev.PoolKnown: _pool_known,
    ev.BlocksFilled: _blocks_filled,
    ev.BlocksEvicted: _blocks_evicted,
    ev.BlocksReserved: _blocks_reserved,
    ev.BlocksReady: _blocks_ready,
    ev.BlocksDropped: _blocks_dropped,
    ev.BlocksQuarantined: _blocks_quarantined,
    ev.BlocksSeen: _blocks_seen,
    ev.SourceLost: _source_lost,
    ev.PrefetchLimited: _prefetch_limited,
    ev.EngineMeasured: _engine_measured,
}
