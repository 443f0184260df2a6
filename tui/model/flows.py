"""Flows: blocks a second and latencies of each route, and the cache's counts over the last minute and ten minutes.

Law of this file: amounts come from events, one call each. While the facts are sampled, amounts come from differences of
totals. Amounts without a total are estimates, scaled up from the events that the console has read.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Final

from kvbm_console.core.ids import Authority, Measure, Route, Tier
from kvbm_console.core.state import CacheState

from .numbers import S
from .series import Estimate, Gauge, Latencies, Sums, percentile

TIERS: Final = (Tier.G1, Tier.G2, Tier.G3, Tier.G4)


class RouteFlow:
    """The blocks of a route that arrived per second, and the latencies of its transfers."""

    __slots__ = ("blocks", "latencies", "moved_blocks")

    def __init__(self) -> None:
        self.blocks = Sums()
        self.latencies = Latencies()
        self.moved_blocks = 0
        """Blocks since this console watches."""

    def moved(self, at_ns: int, blocks: int) -> None:
        """``blocks`` arrived."""
        self.blocks.add(at_ns, blocks)
        self.moved_blocks += blocks

    def times(self, now_ns: int) -> tuple[int | None, int | None]:
        """(p50, p99) of the last minute."""
        ordered = self.latencies.window(now_ns)
        return percentile(ordered, 50), percentile(ordered, 99)


class Flows:
    """All series of one target."""

    def __init__(self) -> None:
        self.routes: defaultdict[Route, RouteFlow] = defaultdict(RouteFlow)
        """Known from the first transfer on."""
        self.asked = Sums()
        """Prompt blocks of admissions."""
        self.hits = {tier: Sums() for tier in TIERS}
        self.evicted: defaultdict[int, Estimate] = defaultdict(Estimate)
        """Blocks evicted, by pool."""
        self.stored: defaultdict[int, Estimate] = defaultdict(Estimate)
        """Blocks that became readable, by pool."""
        self.occupancy: defaultdict[int, Gauge] = defaultdict(Gauge)
        """Resident share from 0 to 1, by pool."""
        self.measured: defaultdict[int, defaultdict[Measure, Gauge]] = defaultdict(partial(defaultdict, Gauge))
        """Levels of the engines' own metrics, by source; shares from 0 to 1, of which HIT_TOKENS is the hit rate."""
        self.hit_rate = Gauge()
        """Share of the last minute, sampled once a second."""
        self.thrash = {tier: Sums() for tier in TIERS}
        """Blocks that came back to this tier too soon after it had evicted them."""
        self.events = Sums()
        self.tokens = Estimate()
        self._estimated_ns: int | None = None

    def between(self, before: CacheState, after: CacheState, each: float) -> None:
        """Add the amounts between two snapshots; an event that was read in between stood for ``each``.

        Evictions are counted by tier, so a pool's own evictions are known where its tier has a single pool. Evictions
        of an event stream are estimates from the reports that were read.
        """
        was, now, at_ns = before.totals, after.totals, after.at_ns
        self.asked.add(at_ns, now.prompt_blocks - was.prompt_blocks)
        for index, tier in enumerate(TIERS):
            if now.hit_blocks[index] != was.hit_blocks[index]:
                self.hits[tier].add(at_ns, now.hit_blocks[index] - was.hit_blocks[index])
            if now.returned_blocks[index] != was.returned_blocks[index]:
                self.thrash[tier].add(at_ns, now.returned_blocks[index] - was.returned_blocks[index])
        for route in Route:
            blocks = now.moved_blocks.get(route.label, 0) - was.moved_blocks.get(route.label, 0)
            if blocks:
                self.routes[route].moved(at_ns, blocks)
        self.settle(at_ns, each)
        for source, known in after.measured.items():
            self.measure(known.at_ns, source, known.values)
        for tier, earlier, later in zip(TIERS, was.evicted_blocks, now.evicted_blocks, strict=True):
            pools = [pool.info.pool for pool in after.pools if pool.info.tier is tier]
            if later > earlier and len(pools) == 1 and after.pools[pools[0]].info.authority is not Authority.STREAM:
                self.evicted[pools[0]].add(at_ns, later - earlier)
        if each > 1.0:
            self._estimated_ns = at_ns

    def measure(self, at_ns: int, source: int, values: Mapping[Measure, int]) -> None:
        """An engine's own metrics; empty if they cannot be read any more."""
        gauges = self.measured[source]
        for measure in (Measure.RUNNING, Measure.WAITING):
            gauges[measure].set(at_ns, values.get(measure))
        used = values.get(Measure.USED_PPM)
        gauges[Measure.USED_PPM].set(at_ns, None if used is None else used / 1e6)
        asked, found = values.get(Measure.RECENT_QUERY_TOKENS), values.get(Measure.RECENT_HIT_TOKENS)
        gauges[Measure.HIT_TOKENS].set(at_ns, found / asked if asked and found is not None else None)

    def settle(self, at_ns: int = 0, each: float = 1.0) -> None:
        """Scale up the amounts since the last call: they stood for ``each`` times as much."""
        for series in (self.tokens, *self.stored.values(), *self.evicted.values()):
            series.settle(at_ns, each)

    def about(self, now_ns: int, seconds: int = 5) -> str:
        """``~`` before amounts of the last ``seconds`` that are partly estimates, else nothing."""
        at_ns = self._estimated_ns
        return "~" if at_ns is not None and now_ns - at_ns <= seconds * S else ""

    def sums(self) -> list[Sums]:
        """Every series of amounts."""
        return [
            self.asked, self.events, self.tokens, *self.hits.values(), *self.thrash.values(),
            *self.evicted.values(), *self.stored.values(), *(flow.blocks for flow in self.routes.values()),
        ]

    def blank(self, at_ns: int) -> None:
        """A gap up to ``at_ns``: nothing is drawn there."""
        for series in self.sums():
            series.blank(at_ns)
        measured = (gauge for gauges in self.measured.values() for gauge in gauges.values())
        for gauge in (self.hit_rate, *self.occupancy.values(), *measured):
            gauge.blank(at_ns)

    def came_back(self, at_ns: int, returned: tuple[int, int, int, int]) -> None:
        """Count the blocks that came back to each tier too soon after their eviction."""
        for tier, blocks in zip(TIERS, returned, strict=True):
            if blocks:
                self.thrash[tier].add(at_ns, blocks)

    def thrash_share(self, state: CacheState, tier: Tier, now_ns: int) -> tuple[int, int]:
        """(blocks that came back too soon, blocks evicted) of a tier in the last minute."""
        pools = [pool.info.pool for pool in state.pools if pool.info.tier is tier]
        evicted = sum(self.evicted[pool].total(60, now_ns) for pool in pools if pool in self.evicted)
        return int(self.thrash[tier].total(60, now_ns)), int(evicted)

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
