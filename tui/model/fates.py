"""Fates: what became of each prompt block that an admission asked for, and what would have kept those that missed.

Theory of operation
-------------------
An admission asks for the blocks of its prompt. The leading ones are hits of a tier. Each other block is in one class:

    some tier has it, and it is being written       not in time
    some tier has it                                not usable: a block in front of it is missing, or it is the last
    it was evicted, last from device memory         not offloaded: nothing below had a copy
    it was evicted, last from a lower tier          evicted
    none of these                                   never seen

The same admissions go through a sampled LRU stack (``core.curves``). The depth of a block there is the number of blocks
that would have kept it. A request that ends puts its prompt and its answer on top, as an engine frees its blocks.

Events that were passed over, because facts were sampled, have no fate here. The totals of the facts have their hits.

Law of this file: the classes of an admission add up to its prompt blocks.
"""

from collections import Counter
from enum import IntEnum
from itertools import islice
from typing import Final

import msgspec

from kvbm_console.analysis.prefix_map import PrefixMap
from kvbm_console.core import events as ev
from kvbm_console.core.columns import ID_BYTES
from kvbm_console.core.curves import NEVER, SampledCurve
from kvbm_console.core.ids import EvictRule, Tier
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import WRITING

from .series import Sums

ASKERS_MAX: Final = 2_000
"""Requests that are kept of each fate; then the half with fewer blocks goes."""
SAMPLES: Final = 4_096
"""Blocks that the curve follows: each costs a microsecond at an admission."""
NEEDED_MAX: Final = 20_000
"""Missed blocks whose depth is kept; the oldest go first."""


class Fate(IntEnum):
    """The fate of a prompt block. The first four are hits."""

    G1 = 0
    G2 = 1
    G3 = 2
    G4 = 3
    UNUSABLE = 4
    LATE = 5
    NOT_OFFLOADED = 6
    EVICTED = 7
    UNSEEN = 8


class Blame(msgspec.Struct, frozen=True):
    """Blocks that were evicted for one request, or for nobody, and asked for again."""

    request: str | None
    tier: Tier
    blocks: int
    times: int
    stay_ns: int | None
    """Half of the blocks had lain in the tier for no longer."""
    kept_by: int | None
    """The smallest LRU cache, in blocks, that would have kept all those whose depth is known."""
    last_ns: int
    """When one of them was asked for last."""


class Fates:
    """The fates of the admissions that were folded."""

    def __init__(self) -> None:
        self.series = {fate: Sums() for fate in Fate}
        self.blocks = [0] * len(Fate)
        """Blocks by fate."""
        self.askers: dict[Fate, Counter[str]] = {fate: Counter() for fate in Fate}
        """Blocks by fate and by the request that asked."""
        self.curve = SampledCurve(SAMPLES)
        self.since_ns: int | None = None
        """The first admission; None before it."""
        self.evicted: dict[Tier, Counter[EvictRule]] = {tier: Counter() for tier in Tier}
        """Blocks evicted by the rule that chose them."""
        self._needed: dict[int, int] = {}

    @property
    def asked(self) -> int:
        """Prompt blocks of first admissions."""
        return sum(self.blocks)

    def scored(
        self, e: ev.PrefixScored, slot: SlotFacts, missed: list[int], gone: list[int], state: CacheState,
        forest: PrefixMap,
    ) -> None:
        """An admission missed these blocks, of which no tier had those ``gone``; ``state`` are the facts before."""
        prompt = slot.hashes[: e.prompt_blocks]
        if e.readmitted:
            self.curve.store(prompt)
            return
        if self.since_ns is None:
            self.since_ns = e.at_ns
        blocks = [*e.hits, *self._missed(missed, gone, state, forest)]
        # The prompt of a slot that began unseen may be longer than its hashes.
        blocks[Fate.UNSEEN] += e.prompt_blocks - sum(blocks)
        for fate in Fate:
            number = blocks[fate]
            if number:
                self.series[fate].add(e.at_ns, number)
                self.blocks[fate] += number
                self._asked(fate, slot.request, number)
        depths = self.curve.add(prompt)
        if missed:
            wanted = set(missed)
            self._needed.update((key, depth) for key, depth in depths if depth != NEVER and key in wanted)
            if len(self._needed) > NEEDED_MAX:
                for key in list(islice(self._needed, NEEDED_MAX // 4)):
                    del self._needed[key]

    def adopt(self, state: CacheState) -> None:
        """The history begins at these facts: the curve begins with the blocks that the tiers hold."""
        if self.since_ns is None:
            pools = list(state.living(state.pools))

            def recency(key: int) -> tuple[int, int]:
                there = ((pool, pool.by_hash.get(key)) for pool in pools)
                return max((-pool.info.tier, pool.stored_at[place]) for pool, place in there if place is not None)

            self.curve.hold(set().union(*(pool.by_hash for pool in pools)), recency)

    def took(self, e: ev.BlocksEvicted, state: CacheState) -> None:
        """A tier gave blocks up."""
        self.evicted[state.pools[e.pool].info.tier][e.rule] += len(e.ids) // ID_BYTES

    def closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        """A request ended; ``state`` are the facts before."""
        slot = state.slots.get(e.slot)
        if slot is not None:
            self.curve.store(slot.hashes)

    def _missed(self, missed: list[int], gone: list[int], state: CacheState, forest: PrefixMap) -> list[int]:
        """Blocks that are unusable, late, not offloaded, evicted, and never seen."""
        evictions = [eviction for eviction in map(forest.eviction_of, gone) if eviction is not None]
        bare = sum(eviction.tier is Tier.G1 for eviction in evictions)
        late = 0
        if len(gone) < len(missed):
            away = set(gone)
            late = sum(self._is_late(state, key) for key in missed if key not in away)
        return [len(missed) - len(gone) - late, late, bare, len(evictions) - bare, len(gone) - len(evictions)]

    def _is_late(self, state: CacheState, key: int) -> bool:
        places = [(pool, place) for pool in state.pools for place in pool.places_of(key)]
        return all(pool.content[place] == WRITING for pool, place in places)

    def _asked(self, fate: Fate, request: str, blocks: int) -> None:
        askers = self.askers[fate]
        askers[request] += blocks
        if len(askers) > ASKERS_MAX:
            self.askers[fate] = Counter(dict(askers.most_common(ASKERS_MAX // 2)))

    def blamed(self, fate: Fate, forest: PrefixMap) -> list[Blame]:
        """The requests that drove out the blocks of this fate, those with most blocks first."""
        groups: dict[tuple[str | None, Tier], list[int]] = {}
        for key, (_, loss) in forest.lost.items():
            eviction = loss.eviction
            if (eviction.tier is Tier.G1) == (fate is Fate.NOT_OFFLOADED):
                groups.setdefault((eviction.request, eviction.tier), []).append(key)
        found = []
        for (request, tier), keys in groups.items():
            losses = [forest.lost[key] for key in keys]
            stays = sorted(
                ns for key, (_, loss) in zip(keys, losses, strict=True)
                if (ns := loss.eviction.lay_ns(key)) is not None)
            needed = [self._needed[key] for key in keys if key in self._needed]
            found.append(Blame(
                request, tier, len(keys), sum(times for times, _ in losses),
                stays[(len(stays) - 1) // 2] if stays else None, max(needed, default=None),
                max(loss.at_ns for _, loss in losses),
            ))
        return sorted(found, key=lambda blame: (-blame.times, -blame.blocks, blame.request or ""))
