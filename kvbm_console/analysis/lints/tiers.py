"""Lints about tiers: full with nothing to evict, thrash, blocks dropped beside room.

Law of this file: a tier is judged by its own counts of places, never by arithmetic on other counters.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.analysis.lints.lint import EVIDENCE_MAX, MINUTE_NS, Finding, Lint, MinuteShare, plural, spoken
from kvbm_console.analysis.waits import available, below, daemon_of, daemons
from kvbm_console.core import events as ev
from kvbm_console.core.columns import ID_BYTES, unpack_hashes
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import Condition, SkipReason, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.stream.feed import GapSeen

FULL_LEAST_NS: Final = 2 * SECOND_NS
THRASH_PERCENT: Final = 10
THRASH_BLOCKS: Final = 100
DROPPED_BLOCKS: Final = 100
DROPPED_PERCENT: Final = 5
RULES: Final = (SkipReason.BELOW_FREQUENCY, SkipReason.OPERATOR)
"""Skip reasons of a rule that wants no copy."""
_TAKING: Final = (
    ev.DeviceBlocksAssigned, ev.BlocksReserved, ev.BlocksStaged, ev.CandidatePromoted, ev.SlotCloned,
    ev.DeviceBlocksReleased, ev.StagingReleased, ev.BlocksReady, ev.BlocksDropped, ev.CandidateEnded, ev.ResetDone,
    ev.BlocksQuarantined,
)
"""Events that may change whether a place can be given out."""


class Full(Lint):
    """A tier in which nothing is empty and nothing can be evicted."""

    name = "full"
    threshold = "no place of a tier empty or evictable for 2 s"
    bad = "nothing can be admitted or copied there, whatever the policy"
    do = "lower the batch, or give the tier more blocks"
    ends = True
    view = "tiers"

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[int, tuple[int, int]] = {}
        """Full pool to (since, seq)."""
        self.after = dict.fromkeys(_TAKING, self._look)

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """A tier that was full before a gap may have had room during the gap."""
        self._since = {
            pool.info.pool: (state.at_ns, state.seq) for pool in state.pools
            if pool.info.capacity_blocks and not available(pool)
        }

    def _look(self, e: ev.Event, state: CacheState) -> None:
        for pool in state.pools:
            index = pool.info.pool
            if available(pool) or not pool.info.capacity_blocks:
                since = self._since.pop(index, None)
                if since is not None and e.at_ns - since[0] >= FULL_LEAST_NS:
                    self.over(self._finding(pool, since, e.at_ns, e.at_ns))
            elif index not in self._since:
                self._since[index] = (e.at_ns, e.seq)

    def _finding(self, pool: PoolFacts, since: tuple[int, int], at_ns: int, until_ns: int | None) -> Finding:
        age = at_ns - since[0]
        held, writing = pool.counts[Condition.REFERENCED], pool.counts[Condition.WRITING]
        writes = f", {writing:,} writing" if writing else ""
        return self.finding(
            pool.info.tier.name, f"full {spoken(age)}",
            f"{held:,} referenced{writes}, nothing to evict; lower the batch" if until_ns is None
            else f"all {pool.capacity:,} places held, nothing to evict; lower the batch",
            seq=since[1], since_ns=since[0], until_ns=until_ns, weight=age,
        )

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Tiers that are full now."""
        for index, since in self._since.items():
            if at_ns - since[0] >= FULL_LEAST_NS:
                yield self._finding(state.pools[index], since, at_ns, None)


class Thrashing(Lint):
    """Blocks that come back right after they were evicted."""

    name = "thrash"
    threshold = (
        "of 100 or more blocks that a tier evicted in 60 s, more than 10 % came back within the window "
        "(--thrash-window)"
    )
    bad = "blocks are given up and fetched again: the copies cost more than they save"
    do = "the tier is too small for this reuse; compare capacities"
    ends = True
    view = "tiers"

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[Tier, int], MinuteShare] = {}
        """(tier, daemon) to its evictions; a merged recording has several daemons."""
        self._worst: dict[tuple[Tier, int], Finding] = {}
        self.after = {ev.BlocksEvicted: self._evicted, ev.CandidatePromoted: self._promoted}

    def _evicted(self, e: ev.BlocksEvicted, state: CacheState) -> None:
        self._of((state.pools[e.pool].info.tier, daemon_of(state, e.pool))).add(e.at_ns, len(e.ids) // ID_BYTES, 0)

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        for tier, blocks in zip(Tier, e.returned, strict=True):
            if blocks:
                key = tier, daemon_of(state, e.source_pool)
                window = self._of(key)
                window.add(e.at_ns, 0, blocks)
                self._judge(key, window, e)

    def _of(self, key: tuple[Tier, int]) -> MinuteShare:
        return self._windows.setdefault(key, MinuteShare())

    def _judge(self, key: tuple[Tier, int], window: MinuteShare, e: ev.Event) -> None:
        if window.above(THRASH_PERCENT, of=THRASH_BLOCKS):
            finding, worst = self._finding(key[0], window, e.seq, e.at_ns), self._worst.get(key)
            if worst is None or finding.weight > worst.weight:
                self._worst[key] = finding

    def _finding(
        self, tier: Tier, window: MinuteShare, seq: int, at_ns: int, *, lasts: bool = False
    ) -> Finding:
        seconds = -(-max(1, at_ns - window.since_ns) // SECOND_NS)
        return self.finding(
            tier.name, f"thrash {window.percent} %",
            f"{window.part:,} of {window.whole:,} blocks evicted in {seconds} s came back; too small for this reuse",
            seq=seq, since_ns=window.since_ns, until_ns=None if lasts else at_ns, count=window.part,
            weight=window.percent,
        )

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """A finding per tier: its last minute while the tier thrashes, and its worst minute afterwards."""
        for (tier, daemon), worst in sorted(self._worst.items()):
            window = self._windows[tier, daemon]
            lasts = state is not None and window.fresh(at_ns) and window.above(THRASH_PERCENT, of=THRASH_BLOCKS)
            yield self._finding(tier, window, worst.seq, at_ns, lasts=True) if lasts else worst


class _Dropped(msgspec.Struct):
    """Evictions of one pool."""

    evicted: int = 0
    dropped: int = 0
    since_ns: int = 0
    until_ns: int = 0
    evidence: list[int] = []
    copied: set[int] = set()
    """Hashes of the pool that have, or once had, a copy below, or that a rule keeps from a copy."""


class DroppedWithRoom(Lint):
    """Blocks evicted without ever having had a copy below, while the tier below had places to give."""

    name = "dropped_with_room"
    threshold = (
        "of the blocks that a tier evicted, 100 and 5 % never had a copy below while the tier below had places to give"
    )
    bad = "they are computed again when they are asked for, although the tier below could have kept them"
    do = (
        "copy down earlier with a lower --kv-offload-threshold and without --offload-preset original; look at a link "
        "that is always busy"
    )
    view = "tiers"

    def __init__(self) -> None:
        super().__init__()
        self._pools: dict[int, _Dropped] = {}
        self.before = {ev.BlocksEvicted: self._evicted}
        self.after = {
            ev.BlocksReserved: self._reserved, ev.CandidateEvaluated: self._evaluated,
            ev.CandidateSkipped: self._skipped,
        }

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Note the present copies, because copies made before the evidence or in a gap have no event."""
        for pool in state.pools:
            lower = below(state, pool)
            if lower is not None:
                self._of(pool).copied.update(pool.by_hash.keys() & lower.by_hash.keys())

    def _of(self, pool: PoolFacts) -> _Dropped:
        return self._pools.setdefault(pool.info.pool, _Dropped())

    def _reserved(self, e: ev.BlocksReserved, state: CacheState) -> None:
        target = state.pools[e.pool]
        hashes = unpack_hashes(e.hashes)
        for pool in state.pools:
            if below(state, pool) is target:
                self._of(pool).copied.update(filter(pool.by_hash.__contains__, hashes))

    def _evaluated(self, e: ev.CandidateEvaluated, state: CacheState) -> None:
        if e.filtered in RULES:
            self._ruled_out(e.candidate, state)

    def _skipped(self, e: ev.CandidateSkipped, state: CacheState) -> None:
        if e.reason in RULES:
            self._ruled_out(e.candidate, state)

    def _ruled_out(self, candidate: int, state: CacheState) -> None:
        known = state.candidates.get(candidate)
        for pool in state.pools if known is not None else ():
            if below(state, pool) is not None and (candidate - pool.info.source + 1) % daemons(state) == 0:
                self._of(pool).copied.update(filter(pool.by_hash.__contains__, known.hashes if known else ()))

    def _evicted(self, e: ev.BlocksEvicted, state: CacheState) -> None:
        pool = state.pools[e.pool]
        lower = below(state, pool)
        if lower is None:
            return
        mine, hashes = self._of(pool), unpack_hashes(e.hashes)
        mine.evicted += len(hashes)
        if available(lower):
            lost = sum(
                1 for key in hashes if key not in mine.copied and key not in lower.by_hash and key not in pool.copies
            )
            if lost:
                mine.dropped += lost
                mine.since_ns, mine.until_ns = mine.since_ns or e.at_ns, e.at_ns
                if len(mine.evidence) < EVIDENCE_MAX:
                    mine.evidence = [*mine.evidence, e.seq]
        mine.copied.difference_update(hashes)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """A finding per pool, over all of the evidence."""
        for index, evictions in sorted(self._pools.items()):
            if evictions.dropped < DROPPED_BLOCKS or 100 * evictions.dropped < DROPPED_PERCENT * evictions.evicted:
                continue
            pool = None if state is None else state.pools[index]
            goes_on = state is not None and at_ns - evictions.until_ns < MINUTE_NS
            yield self.finding(
                "a tier" if pool is None else pool.info.tier.name, f"{plural(evictions.dropped, 'block')} dropped",
                f"never copied, with room below; {evictions.dropped:,} of {evictions.evicted:,} evicted",
                seq=evictions.evidence[0], evidence=evictions.evidence, since_ns=evictions.since_ns,
                until_ns=None if goes_on else evictions.until_ns, count=evictions.dropped, weight=evictions.dropped,
            )
