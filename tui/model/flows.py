"""What flows: per route blocks a second and latencies, and the cache's counts over the last minute and ten minutes.

Law of this file: amounts come from events, one call each; only evictions come from differences of totals while the
facts are sampled.
"""

from typing import Final

from kvbm_console.core.ids import Authority, Route, Tier
from kvbm_console.core.state import CacheState

from .series import Gauge, Latencies, Sums, percentile

TIERS: Final = (Tier.G1, Tier.G2, Tier.G3, Tier.G4)


class RouteFlow:
    """One route: blocks that arrived per second, and how long transfers took."""

    __slots__ = ("blocks", "latencies", "moved_blocks", "route")

    def __init__(self, route: Route) -> None:
        self.route = route
        self.blocks = Sums()
        self.latencies = Latencies()
        self.moved_blocks = 0
        """Blocks since this console watches."""

    def ended(self, at_ns: int, blocks: int, took_ns: int) -> None:
        """A transfer of ``blocks`` arrived."""
        self.blocks.add(at_ns, blocks)
        self.latencies.add(at_ns, took_ns)
        self.moved_blocks += blocks

    def times(self, now_ns: int) -> tuple[int | None, int | None]:
        """(p50, p99) of the last minute."""
        ordered = self.latencies.window(now_ns)
        return percentile(ordered, 0.5), percentile(ordered, 0.99)


class Flows:
    """All series of one target."""

    def __init__(self) -> None:
        self.routes: dict[Route, RouteFlow] = {}
        self.asked = Sums()
        """Prompt blocks of admissions."""
        self.hits = {tier: Sums() for tier in TIERS}
        self.evicted: dict[int, Sums] = {}
        """Blocks evicted, by pool."""
        self.stored: dict[int, Sums] = {}
        """Blocks that became readable, by pool."""
        self.occupancy: dict[int, Gauge] = {}
        """Resident share from 0 to 1, by pool."""
        self.hit_rate = Gauge()
        """Share of the last minute, sampled once a second."""
        self.thrash = {tier: Sums() for tier in TIERS}
        """Blocks that came back too soon from this tier."""
        self.loaded = {tier: Sums() for tier in TIERS}
        """Blocks loaded from this tier."""
        self.events = Sums()
        self.tokens = Sums()

    def route(self, route: Route) -> RouteFlow:
        """The flow of a route, known from its first transfer on."""
        found = self.routes.get(route)
        if found is None:
            found = self.routes[route] = RouteFlow(route)
        return found

    def evictions(self, pool: int) -> Sums:
        """Evictions of one pool."""
        found = self.evicted.get(pool)
        if found is None:
            found = self.evicted[pool] = Sums()
        return found

    def stores(self, pool: int) -> Sums:
        """Blocks that became readable in one pool."""
        found = self.stored.get(pool)
        if found is None:
            found = self.stored[pool] = Sums()
        return found

    def evicted_between(self, before: CacheState, after: CacheState) -> None:
        """What was evicted between two snapshots whose events were not folded, for tiers with a single pool.

        Of an event stream every report is folded, so it is left out.
        """
        totals = zip(before.totals.evicted_blocks, after.totals.evicted_blocks, strict=True)
        for tier, (was, now) in zip(TIERS, totals, strict=True):
            pools = [pool.info.pool for pool in after.pools if pool.info.tier is tier]
            if now > was and len(pools) == 1 and after.pools[pools[0]].info.authority is not Authority.STREAM:
                self.evictions(pools[0]).add(after.at_ns, now - was)

    def sums(self) -> list[Sums]:
        """Every series of amounts, for what concerns all of them."""
        return [
            self.asked, self.events, self.tokens, *self.hits.values(), *self.thrash.values(), *self.loaded.values(),
            *self.evicted.values(), *self.stored.values(), *(flow.blocks for flow in self.routes.values()),
        ]

    def blank(self, at_ns: int) -> None:
        """A gap up to ``at_ns``: nothing is drawn there."""
        for series in self.sums():
            series.blank(at_ns)
        for gauge in (self.hit_rate, *self.occupancy.values()):
            gauge.blank(at_ns)

    def scored(self, at_ns: int, prompt_blocks: int, hits: tuple[int, int, int, int]) -> None:
        """An admission was scored."""
        self.asked.add(at_ns, prompt_blocks)
        for tier, blocks in zip(TIERS, hits, strict=True):
            if blocks:
                self.hits[tier].add(at_ns, blocks)

    def lost(self, at_ns: int, tier: Tier, blocks: int) -> None:
        """Hits were taken back."""
        self.hits[tier].add(at_ns, -blocks)

    def hit_shares(self, now_ns: int, seconds: int = 60) -> tuple[int, list[int]]:
        """(prompt blocks asked, hits by tier) over the last ``seconds``."""
        asked = int(self.asked.total(seconds, now_ns))
        return asked, [max(0, int(self.hits[tier].total(seconds, now_ns))) for tier in TIERS]
