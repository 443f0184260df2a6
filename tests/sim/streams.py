"""The monitor of event streams: a daemon knows what a publisher holds, or says that it does not.

Law of this file: it asks nothing that moves the simulation.
"""

from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core.ids import EMPTY_HASH, Authority
from kvbm_console.service import LeaderService
from tests.sim.publishers import HEARD_S, POOL_BLOCKS_MAX, POOLS_MAX, TOPICS_MAX, Cache, Publisher

if TYPE_CHECKING:
    from tests.sim.run import Simulation

BEHIND_S: Final = 3.0
"""A message of a publisher that is well is taken by then, also behind a replay and its pause."""


class StreamLaws:
    """Of one simulation. ``violated`` gets a sentence for each broken law."""

    def __init__(self, simulation: "Simulation", violated: Any) -> None:
        self.simulation, self.world = simulation, simulation.world
        self._violated = violated
        self._based: set[int] = set()
        self._counted: dict[int, int] = {}
        """Taker to the messages that its former lives have brought or lost."""

    def _takers(self, service: LeaderService) -> list[Any]:
        life = self.simulation.life
        daemon = None if life is None else life.daemon
        if daemon is None or daemon.service is not service or daemon.streams is None:
            return []
        return [taker for source in daemon.streams.sources for taker in source.takers]

    def sample(self, service: LeaderService, parts: list[tuple[str, int]]) -> None:
        """Look at every source as it is now."""
        for name, _ in parts:
            if name.startswith("publisher"):
                self._violated("streams", f"the follower of {name} ended")
        for taker in self._takers(service):
            self._look_at_count(taker)
            pools = [pool for pool in service.state.pools
                     if pool.info.source == taker.source and pool.info.authority is Authority.STREAM]
            if len(pools) > POOLS_MAX:
                self._violated("streams", f"{taker.label} has {len(pools)} pools")
            if max((pool.resident_blocks for pool in pools), default=0) > POOL_BLOCKS_MAX:
                self._violated("streams", f"{taker.label} has a pool with more than {POOL_BLOCKS_MAX} blocks")
            self._look_at_residency(service, taker, pools)
        takers = self._takers(service)
        if len(takers) > (TOPICS_MAX + 1) * len(self.simulation.streams.all):
            self._violated("streams", f"{len(takers)} publishers are followed")

    def _look_at_count(self, taker: Any) -> None:
        """Received + replayed + lost is what was published, in each life of a publisher."""
        counts, key = taker.counts, id(taker)
        if key not in self._based:
            self._based.add(key)
            real = taker._begin

            def begin() -> None:
                self._counted[key] = counts.batches + counts.lost_batches
                real()

            taker._begin = begin
            self._counted[key] = counts.batches + counts.lost_batches - taker.next_seq if not counts.restarts else 0
            if counts.restarts:
                self._based.discard(key)
                taker._begin = real
                return
        seen = counts.batches + counts.lost_batches - self._counted[key]
        if seen != taker.next_seq:
            self._violated("streams", f"of {taker.next_seq} messages of {taker.label} {seen} came or are told as lost")

    def _look_at_residency(self, service: LeaderService, taker: Any, pools: list[Any]) -> None:
        """Of a source that is not uncertain the blocks are those behind the last message that was taken."""
        if taker.source in service.state.lost_sources or not taker.next_seq:
            return
        held: Cache = {}
        for pool in pools:
            here = held.setdefault(pool.info.medium, {})
            for key in pool.hash_of:
                if key != EMPTY_HASH:
                    here[key] = here.get(key, 0) + 1
        held = {medium: here for medium, here in held.items() if here}
        found = self.simulation.streams.index.get(taker._last_digest)
        if found is None or found[0].hostile:
            return
        publisher, life, seq = found
        expected = publisher.lives[life].caches[seq]
        if taker.counts.gaps:  # a medium that no message has named since is not shown at all
            expected = {medium: blocks for medium, blocks in expected.items() if any(
                pool.info.medium == medium for pool in pools)}
        if taker.next_seq != seq + 1:
            self._violated("streams", f"message {seq} of {publisher.name} was taken for {taker.next_seq - 1}")
        elif held != expected:
            self._violated("streams", f"behind message {seq} of life {life} of {publisher.name} its blocks are "
                           f"{_short(expected)}, and {_short(held)} are shown as certain")

    def after_calm(self, service: LeaderService) -> None:
        """A publisher to which nothing has happened for some time is followed up to its last messages."""
        heard: dict[str, tuple[int, int]] = {}
        life = self.simulation.life
        daemon = None if life is None else life.daemon
        rows = {row.source: row for row in daemon.streams.rows()} if daemon is not None and daemon.streams else {}
        for taker in self._takers(service):
            found = self.simulation.streams.index.get(taker._last_digest)
            if found is not None and taker.next_seq == found[2] + 1:
                publisher = found[0]
                heard[publisher.name] = found[1], found[2]
                if not rows[taker.source].connected and self.world.now - publisher.well_ns > HEARD_S * 1e9:
                    self._violated("streams", f"{publisher.name} is followed, and is shown as not connected")
        for publisher in self.simulation.streams.all:
            if not publisher.hostile and self.world.now - publisher.well_ns > HEARD_S * 1e9:
                self._require_heard(publisher, *heard.get(publisher.name, (-1, -1)))

    def _require_heard(self, publisher: Publisher, life: int, seq: int) -> None:
        told = publisher.lives[-1]
        if life != len(publisher.lives) - 1:
            seq = -1
        late = [at for at in told.sent_ns[seq + 1 :] if self.world.now - at > BEHIND_S * 1e9]
        if late:
            self._violated("streams", f"{publisher.name} has sent {len(told.sent_ns)} messages in its life "
                           f"{len(publisher.lives) - 1}, and is heard of up to message {seq} of life {life}")


def _short(cache: Cache) -> str:
    return ", ".join(
        f"{medium} {sorted(key % 10_000 for key in held)}" for medium, held in sorted(cache.items())
    )[:200] or "none"
