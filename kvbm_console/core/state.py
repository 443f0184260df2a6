"""Facts: the places of blocks, their holders, the waiting slots. One state, one mutator.

Law of this file: ``CacheState.apply(event)`` is the only way in which facts change. The leader, the console's mirror,
replay and every test use it. So folding a leader's events from any snapshot gives the leader's digest (I10). Apply
checks the conditions of its consistency and raises ``FoldError``; it never decides.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.errors import FoldError
from kvbm_console.core.folding import APPLY
from kvbm_console.core.holds import BreakpointFacts, FreezeFacts, HoldFacts
from kvbm_console.core.ids import (
    AGE_BOUNDS_NS,
    Authority,
    CandidateStatus,
    Condition,
    FinishReason,
    HoldEnd,
    Measure,
    Route,
    SkipReason,
    Suspend,
    Tier,
)
from kvbm_console.core.slots import CandidateFacts, ConnectorFacts, OperationFacts, SlotFacts
from kvbm_console.core.tiers import GONE, EngineFacts, PoolFacts

ALIKE_LEAST: Final = 32
ALIKE_SHARE: Final = 0.9
ALIKE_SAMPLE: Final = 1_000
"""Blocks of a device that are compared with another device, and the share of them that must be there: see
``tapped_as``."""


class Totals(msgspec.Struct, array_like=True):
    """Counts since the incarnation began; a reset keeps them. Blocks where the name says blocks, else occurrences."""

    slots_opened: int = 0
    finished: list[int] = msgspec.field(default_factory=lambda: [0] * len(FinishReason))
    """Requests by ``FinishReason``."""
    preemptions: int = 0
    requests_preempted: int = 0
    """Requests that were preempted at least once."""
    prompt_blocks: int = 0
    """Prompt blocks of first admissions: the denominator of every hit rate (BC-5). Recordings before format 1.16 count
    admissions after a preemption, too."""
    hit_blocks: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    """Of these, found in G1 to G4; blocks of failed loads are taken back."""
    lost_blocks: int = 0
    """Hits taken back because their load failed."""
    evicted_blocks: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    """Blocks evicted from G1 to G4."""
    moved_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    """Blocks whose copy completed, by the label of their route."""
    thrash_blocks: int = 0
    """Blocks onboarded within the window after their offload (BC-6); the screens show ``thrash``."""
    candidates_ended: list[int] = msgspec.field(default_factory=lambda: [0] * len(CandidateStatus))
    """Candidates by terminal status."""
    skipped: list[int] = msgspec.field(default_factory=lambda: [0] * 9)
    """Skipped candidates by reason; see ``count_skip``."""
    rejected: int = 0
    completions_refused: int = 0
    violations: int = 0
    breakpoint_hits: int = 0
    holds: int = 0
    holds_ended: list[int] = msgspec.field(default_factory=lambda: [0] * len(HoldEnd))
    hold_denied: int = 0
    returned_blocks: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    """Blocks that came back to G1 to G4 by a copy within the thrash window after their eviction."""
    asked_again: list[list[int]] = msgspec.field(default_factory=lambda: [[0] * len(AGE_BOUNDS_NS) for _ in range(4)])
    """Prompt blocks of admissions that G1 to G4 had evicted, by ``AGE_BOUNDS_NS`` since then."""

    prefetch_used_blocks: int = 0
    """Blocks that were fetched ahead and found by a lookup in the host tier; fetched are those moved from G3 to G2."""
    prefetch_limits: int = 0
    """How often prefetch was limited to probes because too few of the fetched blocks were used."""
    prefetch_limited: bool = False
    """True if prefetch is limited now."""
    sized_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    """Of ``moved_blocks``, those whose bytes the connector of a watched engine told."""
    moved_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes of ``sized_blocks``, by the label of their route."""

    def count_skip(self, reason: SkipReason) -> None:
        """One more candidate was skipped. The list grows with a reason, so older facts keep their digests."""
        self.skipped.extend([0] * (reason + 1 - len(self.skipped)))
        self.skipped[reason] += 1

    def skips(self) -> dict[str, int]:
        """Label of each reason to its skipped candidates."""
        return {reason.label: sum(self.skipped[reason : reason + 1]) for reason in SkipReason}

    def bytes_moved(self, label: str, block_bytes: int | None) -> int | None:
        """Bytes that were copied along a route. A block whose bytes were not told has ``block_bytes``; the result is
        None if these are unknown, too."""
        rest = self.moved_blocks.get(label, 0) - self.sized_blocks.get(label, 0)
        told = self.moved_bytes.get(label, 0)
        return told if not rest else None if block_bytes is None else told + rest * block_bytes

    def prefetch_precision(self) -> float | None:
        """Share of the blocks fetched ahead that a lookup found; None where nothing was fetched."""
        fetched = self.moved_blocks.get(Route.G3_G2.label, 0)
        return self.prefetch_used_blocks / fetched if fetched else None

    def thrash(self, tier: Tier | None = None) -> float | None:
        """Blocks brought back within the window after their eviction per block evicted, of a tier or of all.

        The one formula of thrash. None where nothing was evicted. ``thrash_blocks`` / copies down is BC-6.
        """
        index = slice(None) if tier is None else slice(tier - 1, tier)
        evicted = sum(self.evicted_blocks[index])
        return sum(self.returned_blocks[index]) / evicted if evicted else None


class CacheState:
    """The facts of one leader.

    ``seq`` is the number of the next event, ``n`` the cause of the last event, ``at_ns`` its time. ``slot_of`` maps a
    request to its slot, ``standing`` holds the requests whose hold is at the schedule point; both are derived.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.n = -1
        self.at_ns = 0
        self.epoch = 0
        self.iteration = 0
        self.running = 0
        self.waiting = 0
        self.draining = False
        self.pools: list[PoolFacts] = []
        self.slots: dict[int, SlotFacts] = {}
        self.candidates: dict[int, CandidateFacts] = {}
        self.operations: dict[int, OperationFacts] = {}
        self.batches: dict[int, set[int]] = {}
        self.late: dict[int, set[int]] = {}
        """Operations of an older epoch that still run: the ranks that have reported."""
        self.holds: dict[int, HoldFacts] = {}
        self.breakpoints: dict[int, BreakpointFacts] = {}
        self.frozen: FreezeFacts | None = None
        self.leases: dict[str, bool] = {}
        self.lost_sources: dict[int, int] = {}
        """Sources of which reports were lost since they were last known whole: how often, ``GONE`` or
        ``REPLACEABLE`` for a source that ended. Their counts are no facts."""
        self.measured: dict[int, EngineFacts] = {}
        """The metrics of the engines that tell them, by source."""
        self.connectors: dict[int, ConnectorFacts] = {}
        """Source to the last report of its connectors."""
        self.totals = Totals()
        self.next_slot = 0
        self.next_candidate = 0
        self.next_operation = 0
        self.next_hold = 1
        self.next_breakpoint = 1
        self.slot_of: dict[str, int] = {}
        self.standing: set[str] = set()

    # --- questions -------------------------------------------------------------------------------

    def pool_of(self, tier: Tier, source: int = 0) -> PoolFacts | None:
        """The pool of this tier that serves ``source``: its own pool, else the leader's."""
        shared = None
        for pool in self.pools:
            if pool.info.tier is tier:
                if pool.info.source == source:
                    return pool
                if pool.info.source == 0:
                    shared = pool
        return shared

    def slot_named(self, request: str) -> SlotFacts | None:
        """The live slot of a request."""
        number = self.slot_of.get(request)
        return None if number is None else self.slots[number]

    def found_tokens(self, slot: SlotFacts) -> tuple[int, int, int, int]:
        """Tokens of the prompt that the last admission found in G1 to G4, those of failed loads taken back."""
        hits = slot.hits
        if slot.device_pool is None or not any(hits):
            return hits
        size = self.pools[slot.device_pool].info.block_tokens
        return hits[0] * size, hits[1] * size, hits[2] * size, hits[3] * size

    @property
    def streams_only(self) -> bool:
        """True if only event streams report, which name blocks and no requests."""
        if self.slots or self.totals.slots_opened:
            return False
        engines = {pool.info.authority for pool in self.pools if pool.info.source}
        return engines == {Authority.STREAM} or (not engines and bool(self.measured))

    def capacity_of(self, pool: PoolFacts) -> int | None:
        """Places of a pool. A stream's pool has the number of its engine's metrics, if only one group has places there.
        """
        info = pool.info
        known = self.measured.get(info.source)
        measure = {Tier.G1: Measure.CAPACITY_BLOCKS, Tier.G2: Measure.HOST_CAPACITY_BLOCKS}.get(info.tier)
        if info.capacity_blocks is not None or known is None or measure is None:
            return info.capacity_blocks
        theirs = [other.info for other in self.pools if other.info.source == info.source]
        alone = [other.tier for other in theirs].count(info.tier) == 1 and not any(other.group for other in theirs)
        return known.values.get(measure) if alone else None

    @property
    def shown_pools(self) -> list[PoolFacts]:
        """The pools that people are told about: all but the leader's own tiers while no engine uses them.

        They serve an engine of authority ``ENGINE`` alone. Beside engines that are only watched, empty tiers of ours
        would look like theirs.
        """
        found = {pool.info.authority for pool in self.pools}
        if Authority.ENGINE in found or not (found - {Authority.LEADER} or self.measured):
            return self.pools
        return [
            pool for pool in self.pools
            if pool.info.authority is not Authority.LEADER or pool.counts[Condition.EMPTY] != pool.capacity
        ]

    def living(self, pools: Sequence[PoolFacts]) -> Sequence[PoolFacts]:
        """Those of engines that go on; all of them where every engine ended, so that the last stays readable. Tiers
        that no engine uses are left out."""
        shown = self.shown_pools
        pools = pools if shown is self.pools else [pool for pool in pools if pool in shown]
        return [pool for pool in pools if not self.has_ended(pool.info.source)] or pools

    def counted(self, pools: Sequence[PoolFacts]) -> Sequence[PoolFacts]:
        """The living pools that hold each block once, so that their counts may be added.

        A stream's pool is left out if a tap reports the same engine (``tapped_as``), or if it is a part of a shared
        pool whose own publisher reports, too. Engines name such a medium ``CPU REMOTE pool``, as its publisher does.
        """
        streams = {pool.info.source for pool in self.pools
                   if pool.info.authority is Authority.STREAM and not self.has_ended(pool.info.source)}
        shared = streams - {pool.info.source for pool in self.pools if not pool.info.remote}
        media = {pool.info.medium for pool in self.pools if pool.info.source in shared}
        tapped = {source: self.tapped_as(source) for source in streams}
        tiers = {(pool.info.source, pool.info.tier) for pool in self.pools if pool.info.authority is Authority.OBSERVED}
        return [
            pool for pool in self.living(pools)
            if pool.info.authority is not Authority.STREAM or not (
                (tapped.get(pool.info.source), pool.info.tier) in tiers
                or (pool.info.medium in media and pool.info.source not in shared)
            )
        ]

    def tapped_as(self, source: int) -> int | None:
        """The tapped engine whose device has the same blocks as this stream's, so that both are one engine.

        Neither side names the other. A device changes with each step, so both must agree in most of their hashes. Few
        blocks prove nothing, because engines with one seed of hashes may serve the same prompt.
        """
        devices = (pool for pool in self.pools if pool.info.source == source and pool.info.tier is Tier.G1)
        mine = next((pool for pool in devices if pool.info.authority is Authority.STREAM), None)
        if mine is None or len(mine.by_hash) < ALIKE_LEAST or self.has_ended(source):
            return None
        sample = list(islice(mine.by_hash, ALIKE_SAMPLE))
        for pool in self.pools:
            info = pool.info
            if info.authority is not Authority.OBSERVED or info.tier is not Tier.G1 or self.has_ended(info.source):
                continue
            sizes = len(mine.by_hash), len(pool.by_hash)
            found = sum(key in pool.by_hash for key in sample)
            if info.group == mine.info.group and min(sizes) >= ALIKE_SHARE * max(sizes) and (
                found >= ALIKE_SHARE * len(sample)
            ):
                return info.source
        return None

    def has_ended(self, source: int) -> bool:
        """True if no more reports come from a source."""
        return self.lost_sources.get(source, 0) <= GONE

    def in_use(self, pool: PoolFacts) -> bool:
        """True if places of this pool are held, written, or kept apart, or a slot or a copy names it."""
        index, counts = pool.info.pool, pool.counts
        return bool(
            counts[Condition.REFERENCED] or counts[Condition.WRITING] or counts[Condition.QUARANTINED]
        ) or any(
            slot.device_pool == index or any(staged == index for staged, _ in slot.staged)
            for slot in self.slots.values()
        ) or any(index in (operation.source_pool, operation.target_pool) for operation in self.operations.values())

    @property
    def all_held(self) -> bool:
        """True if there are live slots and a hold stops each of them."""
        return bool(self.slots) and all(
            slot.hold is not None and self.holds[slot.hold].parked for slot in self.slots.values()
        )

    @property
    def engines_paused(self) -> bool:
        """True if engines form no iterations: everything is frozen, or a hold suspends all."""
        return self.frozen is not None or (
            bool(self.holds) and any(hold.suspend is Suspend.ALL for hold in self.holds.values())
        )

    @property
    def pipeline_closed(self) -> bool:
        """True if no candidate is evaluated or promoted."""
        return self.frozen is not None or (
            bool(self.holds) and any(hold.suspend is not Suspend.SLOT for hold in self.holds.values())
        )

    # --- the only mutator ------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Fold one event. Raises ``FoldError`` when it is not next or does not fit; then discard this state."""
        seq = self.seq
        if event.seq != seq:
            raise FoldError(f"event {event.seq} does not follow event {seq - 1}")
        at_ns = event.at_ns
        if at_ns < self.at_ns:
            raise FoldError(f"event {seq} is at {at_ns} ns, before {self.at_ns} ns")
        APPLY[type(event)](self, event)
        self.seq = seq + 1
        self.at_ns = at_ns
        self.n = event.cause

    def known_slot(self, number: int) -> SlotFacts:
        """The slot of this number. Raises ``FoldError`` when it is not live."""
        try:
            return self.slots[number]
        except KeyError:
            raise FoldError(f"no slot {number}") from None

    def known_pool(self, index: int) -> PoolFacts:
        """The pool of this index. Raises ``FoldError`` when there is none."""
        if not 0 <= index < len(self.pools):
            raise FoldError(f"no pool {index}")
        return self.pools[index]

    def device_pool_of(self, slot: SlotFacts) -> PoolFacts:
        """The pool of a slot's device blocks. Raises ``FoldError`` when it has none."""
        if slot.device_pool is None:
            raise FoldError(f"slot {slot.slot} has no device blocks")
        return self.pools[slot.device_pool]
