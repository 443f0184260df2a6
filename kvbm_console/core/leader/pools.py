"""Pools are declared: by us at the start, by engines and event streams when they come.

Law of this file: one leader either decides for engines or watches them, never both.
"""

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.instructions import PoolAnswer
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.tiers import CAPACITY_MAX, GONE


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
        if info.authority is decided and leader.state.lost_sources.get(info.source) != GONE:
            raise Refused("one leader either decides for engines or watches them: iterations are counted in one row")
        if (info.source, info.dp_rank, info.group, info.tier) == (s.source, s.dp_rank, s.group, s.tier) and (
            info.authority is not Authority.STREAM or info.medium == s.medium  # a stream's media may share a tier
        ):
            raise Refused(f"source {s.source} has declared its {s.tier.name} pool before")
    number = len(leader.state.pools)
    leader.emit(
        ev.PoolKnown, number, s.source, s.dp_rank, s.group, s.tier, s.medium, capacity,
        s.block_tokens, s.authority,
    )
    leader.box.add_pool(capacity or 0 if s.authority is Authority.LEADER else 0)
    if s.tier is Tier.G1 and s.authority is Authority.ENGINE:
        _count_iterations_apart(leader, s.source)
    leader.look_at_pools()
    return PoolAnswer(number)


def _count_iterations_apart(leader: Decider, source: int) -> None:
    """From the second engine on, each has iterations of its own; those of the first one have been the leader's."""
    engines = {
        pool.info.source for pool in leader.state.pools
        if pool.info.tier is Tier.G1 and pool.info.authority is Authority.ENGINE
    }
    if len(engines) > 1:
        own = leader.aids.iterations
        leader.aids.iterations = {
            engine: own.get(engine, 0) if own or engine == source else leader.state.iteration
            for engine in sorted(engines)
        }
