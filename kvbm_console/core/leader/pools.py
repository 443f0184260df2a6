"""Pools are declared: by us at the start, by engines and event streams when they come.

Law of this file: one leader either decides for engines or watches them, never both.
"""

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.instructions import PoolAnswer
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.tiers import CAPACITY_MAX, REPLACEABLE


def pool_declared(leader: Decider, s: st.PoolDeclared) -> PoolAnswer:
    """A pool exists; a second one for the same place in the house, or another block size, is refused."""
    capacity = s.capacity_blocks
    if s.block_tokens != leader.config.block_tokens and s.authority in (Authority.LEADER, Authority.ENGINE):
        raise Refused(f"block_tokens {s.block_tokens} is not the configured {leader.config.block_tokens}")
    if capacity is not None and not 0 < capacity <= CAPACITY_MAX:
        raise Refused(f"capacity_blocks must be from 1 to {CAPACITY_MAX}, got {capacity}")
    ours = s.authority is Authority.LEADER
    if ours and (s.source or s.dp_rank or s.group or s.tier is Tier.G1 or capacity is None):
        raise Refused("a pool that the leader decides is below G1, of source 0, rank 0, group 0, and has a capacity")
    decided = {Authority.ENGINE: Authority.OBSERVED, Authority.OBSERVED: Authority.ENGINE}.get(s.authority)
    for pool in leader.state.pools:
        info = pool.info
        if info.authority is decided and not leader.state.has_ended(info.source):
            raise Refused("one leader either decides for engines or watches them: iterations are counted in one row")
        if (info.source, info.dp_rank, info.group, info.tier) == (s.source, s.dp_rank, s.group, s.tier) and (
            info.authority is not Authority.STREAM or info.medium == s.medium  # a stream's media may share a tier
        ):
            raise Refused(f"source {s.source} has declared its {s.tier.name} pool before")
    replaced = None if ours else _replaceable(leader, s)
    number = len(leader.state.pools) if replaced is None else replaced
    leader.emit(
        ev.PoolKnown, number, s.source, s.dp_rank, s.group, s.tier, s.medium, capacity,
        s.block_tokens, s.authority,
    )
    if replaced is None:
        leader.box.add_pool(capacity or 0 if ours else 0)
    else:
        leader.box.replace_pool(number)
    if s.tier is Tier.G1 and s.authority is Authority.ENGINE:
        _count_iterations_apart(leader, s.source, replaced is not None)
    leader.look_at_pools()
    return PoolAnswer(number)


def _replaceable(leader: Decider, s: st.PoolDeclared) -> int | None:
    """The index of a pool that nothing needs any more: its engine ended, so the new pool takes over the index.

    Otherwise every life of an engine that crashes and reconnects would leave a pool in the facts for good.
    """
    drawn_from = leader.aids.drawn_from.values()
    found = [
        pool.info for pool in leader.state.pools
        if leader.state.lost_sources.get(pool.info.source) == REPLACEABLE
        and not leader.state.in_use(pool) and pool.info.pool not in drawn_from
    ]
    place = (s.dp_rank, s.group, s.tier)
    alike = [info.pool for info in found if (info.dp_rank, info.group, info.tier) == place]
    return min(alike or [info.pool for info in found], default=None)


def _count_iterations_apart(leader: Decider, source: int, successor: bool) -> None:
    """From the second engine on, each has iterations of its own; those of the first one have been the leader's.

    The ``successor`` of an engine that ended counts from its own beginning, too.
    """
    engines = {
        pool.info.source for pool in leader.state.pools
        if pool.info.tier is Tier.G1 and pool.info.authority is Authority.ENGINE
    }
    if len(engines) > 1 or successor:
        own = leader.aids.iterations
        leader.aids.iterations = {
            engine: own.get(engine, 0) if own or engine == source else leader.state.iteration
            for engine in sorted(engines)
        }
