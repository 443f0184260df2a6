"""The LRU curve of a stream's admissions, sampled in bounded memory, and its points around the tiers of now.

An admission asks for the blocks of its prompt and stores them; one after a preemption stores them, and asks for
nothing. A request that ends stores its prompt and its answer, because an engine then frees these blocks together.

Law of this file: a point without an admission, or of a capacity that is not known, does not exist.
"""

from collections.abc import Mapping
from typing import Final

from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core import events as ev
from kvbm_console.core.curves import SAMPLES_MAX, SampledCurve, SampledRate
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.state import CacheState

SCALES: Final = (0.5, 1.0, 2.0, 4.0)
"""Capacities of a tier, in its present ones."""


class CurveFold(Visitor):
    """Makes the curve of a stream of events. An admission that was not seen is not in it."""

    def __init__(self, samples: int = SAMPLES_MAX) -> None:
        super().__init__()
        self.curve = SampledCurve(samples)
        self.after = {ev.PrefixScored: self._scored}
        self.before = {ev.SlotClosed: self._closed}

    def points(self, state: CacheState) -> Mapping[tuple[Tier, float], SampledRate]:
        """Tier and scale to the hit rate of one LRU cache as large as the nearer tiers and this one at that scale.

        Pools of event streams are left out, because a stream names no request. The host tier of a tapped engine, whose
        blocks a stream names too, is not.
        """
        tapped = {pool.info.source for pool in state.pools if pool.info.authority is Authority.OBSERVED}
        points: dict[tuple[Tier, float], SampledRate] = {}
        nearer = 0
        for tier in Tier:
            pools = state.counted([
                pool for pool in state.pools
                if pool.info.tier is tier and (
                    pool.info.authority is not Authority.STREAM or (tier is not Tier.G1 and pool.info.source in tapped)
                )
            ])
            capacities = [state.capacity_of(pool) for pool in pools]
            if None in capacities:
                break  # it is nearer than all further ones, so their places in the curve are not known
            own = sum(capacity or 0 for capacity in capacities)
            for scale in SCALES if own else ():
                rate = self.curve.at(nearer + round(scale * own))
                if rate is not None:
                    points[tier, scale] = rate
            nearer += own
        return points

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        prompt = state.slots[e.slot].hashes[: e.prompt_blocks]
        if e.readmitted:
            self.curve.store(prompt)
        else:
            self.curve.add(prompt)

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        slot = state.slots[e.slot]
        if slot.anchor_tokens:  # else it left without an admission, and its prompt was never stored
            self.curve.store(slot.hashes)
