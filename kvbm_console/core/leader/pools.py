"""Pools: declared by us at the start, by engines and event streams when they come, and the reports of streams.

Law of this file: one leader either decides for engines or watches them, never both.
"""

from collections import Counter
from typing import Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import HASH_BYTES, ID_BYTES, unpack_hashes, unpack_ids
from kvbm_console.core.config import BLOCK_TOKENS_MAX
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import (
    AGE_BOUNDS_NS,
    EMPTY_HASH,
    NUMBER_MAX,
    Authority,
    Tier,
)
from kvbm_console.core.instructions import (
    PoolAnswer,
)
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.lookups import check_given
from kvbm_console.core.leader.observed import given_out, places_reported
from kvbm_console.core.leader.shapes import check_report
from kvbm_console.core.tiers import CAPACITY_MAX, REPLACEABLE, PoolFacts

REPORTED_BLOCKS_MAX: Final = 1_000_000
"""Blocks of one report of an event stream; engines send one step at a time."""

CONTEXT_CHARS_MAX: Final = 256
"""Characters of the context of a block: names of a LoRA and a session, digests of a salt and an image."""

FIRST_PLACE_MAX: Final = 64
"""Lowest place of a pool: engines keep one block for padding."""

AGE_MAX_NS: Final = 2**62
"""An age beyond this is no time: 146 years."""

WINDOW_MAX: Final = 2**31 - 1
"""Tokens of an attention window."""
_AGE_BOUNDS: Final = frozenset(AGE_BOUNDS_NS)
_NOTHING_MORE: Final = (b"", b"", b"", b"", (), (), (), ())
"""The columns of a report that stores nothing, from ``chains`` on."""


def pool_declared(decider: Decider, s: st.PoolDeclared) -> PoolAnswer:
    """A pool exists; a second pool of the same source, rank, group and tier, or another block size, is refused."""
    capacity = s.capacity_blocks
    if s.block_tokens != decider.config.block_tokens and s.authority in (Authority.LEADER, Authority.ENGINE):
        raise Refused(f"block_tokens {s.block_tokens} is not the configured {decider.config.block_tokens}")
    if not 0 < s.block_tokens <= BLOCK_TOKENS_MAX:
        raise Refused(f"block_tokens must be from 1 to {BLOCK_TOKENS_MAX}, got {s.block_tokens}")
    if capacity is not None and not 0 < capacity <= CAPACITY_MAX:
        raise Refused(f"capacity_blocks must be from 1 to {CAPACITY_MAX}, got {capacity}")
    if s.first_place and s.authority is not Authority.OBSERVED:
        raise Refused(f"first_place must be 0 in a pool whose places no tap tells, got {s.first_place}")
    if not 0 <= s.first_place <= FIRST_PLACE_MAX:
        raise Refused(f"first_place must be from 0 to {FIRST_PLACE_MAX}, got {s.first_place}")
    if s.window is not None and (s.window == 1 or not 0 <= s.window <= WINDOW_MAX):
        raise Refused(f"window must be 0 or from 2 to {WINDOW_MAX}, got {s.window}")
    ours = s.authority is Authority.LEADER
    if ours and (s.source or s.dp_rank or s.group or s.tier is Tier.G1 or capacity is None):
        raise Refused("a pool that the leader decides is below G1, of source 0, rank 0, group 0, and has a capacity")
    device = s.authority in (Authority.ENGINE, Authority.OBSERVED)
    if device and s.tier is not Tier.G1:
        raise Refused(f"an engine's own pool is G1; a pool of {s.tier.name} is described by its reports of blocks")
    decided = {Authority.ENGINE: Authority.OBSERVED, Authority.OBSERVED: Authority.ENGINE}.get(s.authority)
    for pool in decider.state.pools:
        info = pool.info
        if info.authority is decided and not decider.state.has_ended(info.source):
            raise Refused("one leader either decides for engines or watches them: iterations are counted in one row")
        if device and info.source == s.source and info.authority is s.authority:
            raise Refused(f"source {s.source} has declared its G1 pool before")
        if (info.source, info.dp_rank, info.group, info.tier) == (s.source, s.dp_rank, s.group, s.tier) and (
            info.authority is not Authority.STREAM or info.medium == s.medium  # a stream's media may share a tier
        ):
            raise Refused(f"source {s.source} has declared its {s.tier.name} pool before")
    replaced = None if ours else _replaceable(decider, s)
    number = len(decider.state.pools) if replaced is None else replaced
    decider.emit(
        ev.PoolKnown, number, s.source, s.dp_rank, s.group, s.tier, s.medium, capacity,
        s.block_tokens, s.authority, s.silent, s.first_place, s.window,
    )
    if replaced is None:
        decider.live_memory.add_pool(capacity or 0 if ours else 0)
    else:
        decider.live_memory.replace_pool(number)
    if s.tier is Tier.G1 and s.authority is Authority.ENGINE:
        _count_iterations_apart(decider, s.source, replaced is not None)
    decider.look_at_pools()
    return PoolAnswer(number)


def _replaceable(decider: Decider, s: st.PoolDeclared) -> int | None:
    """The index of a pool that nothing needs any more: its engine ended, so the new pool takes over the index.

    Otherwise every life of an engine that crashes and reconnects would leave a pool in the facts for good.
    """
    drawn_from = decider.memory.drawn_from.values()
    found = [
        pool.info for pool in decider.state.pools
        if decider.state.lost_sources.get(pool.info.source) == REPLACEABLE
        and not decider.state.in_use(pool) and pool.info.pool not in drawn_from
    ]
    place = (s.dp_rank, s.group, s.tier)
    alike = [info.pool for info in found if (info.dp_rank, info.group, info.tier) == place]
    return min(alike or [info.pool for info in found], default=None)


def _count_iterations_apart(decider: Decider, source: int, successor: bool) -> None:
    """From the second engine on, each has iterations of its own; those of the first engine have been the leader's.

    The ``successor`` of an engine that ended counts from its own beginning, too.
    """
    engines = {
        pool.info.source for pool in decider.state.pools
        if pool.info.tier is Tier.G1 and pool.info.authority is Authority.ENGINE
    }
    if len(engines) > 1 or successor:
        own = decider.memory.iterations
        decider.memory.iterations = {
            engine: own.get(engine, 0) if own or engine == source else decider.state.iteration
            for engine in sorted(engines)
        }


def blocks_reported(decider: Decider, s: st.BlocksReported) -> None:
    """An engine's event stream reported stored and removed blocks of a pool."""
    pools = decider.state.pools
    if not 0 <= s.pool < len(pools) or pools[s.pool].info.source != s.source:
        raise Refused(f"source {s.source} has declared no pool {s.pool}")
    if pools[s.pool].info.authority is Authority.OBSERVED:
        places_reported(decider, pools[s.pool], s)
        return
    if pools[s.pool].info.authority is Authority.ENGINE and s.places and not (s.stored or s.cleared):
        _given_out(decider, pools[s.pool], s)
        return
    if pools[s.pool].info.authority is not Authority.STREAM:
        raise Refused(f"pool {s.pool} is not described by an event stream")
    stored = unpack_hashes(s.stored)
    if len(stored) > REPORTED_BLOCKS_MAX or EMPTY_HASH in stored:
        raise Refused(f"stored must be at most {REPORTED_BLOCKS_MAX} hashes, none 0, got {len(stored)}")
    if len(s.removed) % HASH_BYTES or len(s.removed) > REPORTED_BLOCKS_MAX * HASH_BYTES:
        raise Refused(f"removed must be at most {REPORTED_BLOCKS_MAX} hashes, got {len(s.removed)} bytes")
    if s.age_ns is not None and abs(s.age_ns) > AGE_MAX_NS:
        raise Refused(f"age_ns must be from -{AGE_MAX_NS} to {AGE_MAX_NS}, got {s.age_ns}")
    pool = pools[s.pool]
    more: tuple[Any, ...] = _NOTHING_MORE
    if stored:
        _check_chains(s, len(stored))
        more = (
            s.chains, s.parents, s.marked, s.contents, s.contexts, s.again_within_ns, s.again_within_blocks,
            s.again_blocks,
        )
    more += (s.age_ns,)
    capacity = pool.info.capacity_blocks
    if capacity is not None and len(stored) > capacity:
        raise Refused(f"stored {len(stored)} blocks do not fit a pool of {capacity}")
    if capacity is None or s.cleared or len(stored) <= _room_after(pool, capacity, s.removed):
        decider.emit(ev.BlocksSeen, s.pool, s.stored, s.removed, s.cleared, *more)
    else:  # it was told of more than the pool holds: removals were lost, and the facts of it are void
        decider.emit(ev.BlocksSeen, s.pool, s.stored, b"", True, *more)
        decider.emit(ev.SourceLost, pool.info.source, 0, 0, False)


def _given_out(decider: Decider, pool: PoolFacts, s: st.BlocksReported) -> None:
    """An engine that asks gave places to one of its groups of layers, of which only the first has slots here."""
    check_report(pool, s)
    places = unpack_ids(s.places)
    check_given(pool, places)
    given_out(decider, pool, places, s.request)


def _check_chains(s: st.BlocksReported, stored: int) -> None:
    """Refuse columns that do not fit the stored blocks or each other."""
    if len(s.chains) == ID_BYTES:  # the most frequent case by far
        if int.from_bytes(s.chains, "little") != stored or len(s.parents) != HASH_BYTES:
            raise Refused(f"a chain does not fit {stored} stored blocks")
    elif s.chains or s.parents:
        counts = unpack_ids(s.chains)
        if not counts or sum(counts) != stored or min(counts) < 1 or len(s.parents) != HASH_BYTES * len(counts):
            raise Refused(f"{len(counts)} chains do not fit {stored} stored blocks")
    if not (s.marked or s.contents or s.contexts or s.again_blocks or s.again_within_ns or s.again_within_blocks):
        return
    if s.marked:
        at = unpack_ids(s.marked)
        if not 0 <= min(at) <= max(at) < stored:
            raise Refused(f"marked must be from 0 to {stored - 1}, got {min(at)} to {max(at)}")
    if not HASH_BYTES * len(s.marked) == ID_BYTES * len(s.contents) == HASH_BYTES * ID_BYTES * len(s.contexts):
        raise Refused("marked, contents and contexts must have one entry for each marked block")
    if any(len(context) > CONTEXT_CHARS_MAX for context in s.contexts):
        raise Refused(f"a context must be at most {CONTEXT_CHARS_MAX} characters")
    if s.again_blocks or s.again_within_ns or s.again_within_blocks:
        if not len(s.again_within_ns) == len(s.again_within_blocks) == len(s.again_blocks):
            raise Refused("the columns of blocks stored again must be of one length")
        for ns, evictions, count in zip(s.again_within_ns, s.again_within_blocks, s.again_blocks, strict=True):
            if ns not in _AGE_BOUNDS or evictions.bit_count() != 1 or count < 1:
                raise Refused("blocks stored again need a bound of AGE_BOUNDS_NS, a power of two and a count")


def blocks_restored(decider: Decider, s: st.BlocksRestored) -> None:
    """A pool of the leader has blocks from before the daemon began."""
    pools = decider.state.pools
    ours = [pool for pool in pools if pool.info.authority is Authority.LEADER]
    if s.source or not ours or s.pool != ours[-1].info.pool:
        raise Refused(f"pool {s.pool} is not the lowest that the leader decides, of source 0")
    pool, mine = ours[-1], decider.live_memory.memory.pools[s.pool]
    if mine.unused != len(pool):
        raise Refused(f"pool {s.pool} was used before its blocks were restored")
    ids, hashes = unpack_ids(s.ids), unpack_hashes(s.hashes)
    if len(ids) != len(hashes) or len(set(ids)) != len(ids) or len(set(hashes)) != len(hashes):
        raise Refused(f"{len(ids)} places must be as many different ones as their {len(hashes)} hashes")
    if ids and not (min(ids) >= 0 and max(ids) < len(pool) and EMPTY_HASH not in hashes):
        raise Refused(f"places must be from 0 to {len(pool) - 1} and hashes not 0, got {min(ids)} to {max(ids)}")
    if ids:
        decider.emit(ev.BlocksReserved, s.pool, ev.RESTORED, s.ids, s.hashes)
        decider.emit(ev.BlocksReady, s.pool, ev.RESTORED, s.ids)
        decider.live_memory.restored(s.pool, ids, hashes, decider.at_ns)


def measures_reported(decider: Decider, s: st.MeasuresReported) -> None:
    """An engine's own metrics."""
    if len(s.measures) != len(s.values) or len(set(s.measures)) != len(s.measures):
        raise Refused(f"{len(s.measures)} measures do not match {len(s.values)} values")
    if any(not 0 <= value <= NUMBER_MAX for value in s.values):
        raise Refused(f"a measure must be from 0 to {NUMBER_MAX}, got {min(s.values)} to {max(s.values)}")
    known = decider.state.measured.get(s.source)
    if s.measures or known is not None:
        decider.emit(ev.EngineMeasured, s.source, s.measures, s.values)


def _room_after(pool: PoolFacts, capacity: int, removed: bytes) -> int:
    """Free places of a stream's pool when these hashes, each as often as it is named, have gone."""
    gone = Counter(unpack_hashes(removed))
    return capacity - pool.resident_blocks + sum(min(len(pool.places_of(key)), times) for key, times in gone.items())


def source_gapped(decider: Decider, s: st.SourceGapped) -> None:
    """Reports of this source were lost."""
    decider.emit(ev.SourceLost, s.source, s.first, s.last, False)


def source_restarted(decider: Decider, s: st.SourceRestarted) -> None:
    """The source began again: the reports of its stream are void."""
    if s.replaceable and all(pool.info.source != s.source for pool in decider.state.pools):
        return  # it had no pool, so nothing that is known of it is lost
    decider.emit(ev.SourceLost, s.source, 0, 0, True, s.gone, s.gone and s.replaceable)
