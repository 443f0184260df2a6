"""Lints about work without worth: copied twice, staged for nothing, stored and never loaded, planned and not needed.

Law of this file: a share is judged only from a least number on, and both stand in the text. Each daemon of a merged
recording is judged by itself.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvbm_console.analysis.lints.lint import EVIDENCE_MAX, Finding, Lint, plural
from kvbm_console.analysis.waits import Way, daemon_of, daemon_of_copy, daemon_of_slot, way_of
from kvbm_console.core import events as ev
from kvbm_console.core.columns import ID_BYTES, unpack_hashes
from kvbm_console.core.ids import ReleaseReason, SkipReason, Tier
from kvbm_console.core.state import CacheState

DUPLICATE_BLOCKS: Final = 64
DUPLICATE_PERCENT: Final = 5
STAGED_LEAST: Final = 3
STAGED_PERCENT: Final = 5
NEVER_LOADED_BLOCKS: Final = 1_000
NEVER_LOADED_PERCENT: Final = 1
ALREADY_CACHED_LEAST: Final = 100
ALREADY_CACHED_PERCENT: Final = 50
LINK_BUSY_LEAST: Final = 20
LINK_BUSY_PERCENT: Final = 10


class _Part:
    """Events of a daemon, and those of them that were in vain."""

    __slots__ = ("evidence", "part", "whole")

    def __init__(self) -> None:
        self.whole = 0
        self.part = 0
        self.evidence: list[int] = []

    def count(self, e: ev.Event, in_vain: bool) -> None:
        """Count another one."""
        self.whole += 1
        if in_vain:
            self.part += 1
            if len(self.evidence) < EVIDENCE_MAX:
                self.evidence.append(e.seq)


class Duplicate(Lint):
    """Blocks copied to where they stood already, or were on their way to."""

    name = "duplicate"
    threshold = "5 % of the blocks that were copied, and 64 of them, stood in the target already or were on their way"
    bad = "the link carries the same bytes twice"
    do = "let requests that share a prefix wait for the first one's load"
    whole_run = True

    def __init__(self) -> None:
        super().__init__()
        self._copied: dict[Way, int] = {}
        self._twice: dict[Way, int] = {}
        self._evidence: dict[Way, list[int]] = {}
        self.before = {ev.BlocksReserved: self._reserved}
        self.after = {ev.CandidatePromoted: self._promoted}
        self._waiting: tuple[int, int] = (-1, 0)

    def _reserved(self, e: ev.BlocksReserved, state: CacheState) -> None:
        pool = state.pools[e.pool]
        again = sum(1 for key in unpack_hashes(e.hashes) if key in pool.by_hash)
        self._waiting = (e.operation, again)

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        way = way_of(state, state.candidates[e.candidate])
        self._copied[way] = self._copied.get(way, 0) + e.blocks
        operation, again = self._waiting
        if operation == e.operation and again:
            self._twice[way] = self._twice.get(way, 0) + again
            kept = self._evidence.setdefault(way, [])
            if len(kept) < EVIDENCE_MAX:
                kept.append(e.seq)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """Per route of a daemon, over all of the evidence."""
        for way, twice in sorted(self._twice.items()):
            copied = self._copied[way]
            if twice >= DUPLICATE_BLOCKS and 100 * twice >= DUPLICATE_PERCENT * copied:
                evidence = self._evidence[way]
                yield self.finding(
                    way[0].words, f"{plural(twice, 'block')} copied twice",
                    _share(twice, copied, "blocks copied"), seq=evidence[0], evidence=evidence, until_ns=at_ns,
                    count=twice, weight=twice,
                )


class Staged(Lint):
    """Matches that were held and never used."""

    name = "staged"
    threshold = "3 stagings, and 5 % of all, ended by their deadline"
    bad = "places below are pinned for requests that are not admitted in time"
    do = "admit less or give the device tier more blocks; a longer staging_deadline_ns only hides it"
    whole_run = True

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, _Part] = {}
        """By daemon."""
        self.after = {ev.StagingReleased: self._released}

    def _released(self, e: ev.StagingReleased, state: CacheState) -> None:
        mine = self._of.setdefault(daemon_of_slot(state, state.slots[e.slot]), _Part())
        mine.count(e, e.why is ReleaseReason.DEADLINE)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """Per daemon, over all of the evidence."""
        for _, late in sorted(self._of.items()):
            if late.part >= STAGED_LEAST and 100 * late.part >= STAGED_PERCENT * late.whole:
                yield self.finding(
                    "staging", f"{late.part:,} never onboarded",
                    f"{_share(late.part, late.whole, 'stagings')} ended by their deadline", seq=late.evidence[0],
                    evidence=late.evidence, until_ns=at_ns, count=late.part, weight=late.part,
                )


class NeverLoaded(Lint):
    """Tiers that take and never give."""

    name = "never_loaded"
    threshold = (
        "1,000 blocks stored in a tier and fewer than 1 % of them ever loaded, although the device evicted as many"
    )
    bad = "copying down costs bandwidth and pays nothing back"
    do = "make the tier larger than the time between two uses needs, store less, or do without it"
    whole_run = True

    def __init__(self) -> None:
        super().__init__()
        self._stored: Counter[tuple[Tier, int]] = Counter()
        """By tier and daemon, as all of these; a merged recording has several daemons."""
        self._loaded: Counter[tuple[Tier, int]] = Counter()
        self._first: dict[tuple[Tier, int], int] = {}
        self._evicted: Counter[int] = Counter()
        """Blocks that the devices of a daemon evicted: a block is loaded only after that."""
        self.after = {
            ev.CandidatePromoted: self._promoted, ev.BlocksReady: self._ready, ev.BlocksEvicted: self._gone,
        }

    def _gone(self, e: ev.BlocksEvicted, state: CacheState) -> None:
        tier, daemon = _place(e.pool, state)
        if tier is Tier.G1:
            self._evicted[daemon] += len(e.ids) // ID_BYTES

    def _ready(self, e: ev.BlocksReady, state: CacheState) -> None:
        key = _place(e.pool, state)
        if key[0] is not Tier.G1:
            self._stored[key] += len(e.ids) // ID_BYTES
            self._first.setdefault(key, e.seq)

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        key = _place(e.source_pool, state)
        if key[0] is not Tier.G1 and state.pools[e.target_pool].info.tier is Tier.G1:
            self._loaded[key] += e.blocks

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """Per tier, over all of the evidence."""
        for (tier, daemon), stored in sorted(self._stored.items()):
            loaded = self._loaded[tier, daemon]
            evicted = self._evicted[daemon]
            if min(stored, evicted) >= NEVER_LOADED_BLOCKS and 100 * loaded < NEVER_LOADED_PERCENT * stored:
                yield self.finding(
                    tier.name, f"{plural(stored, 'block')} stored", f"{plural(loaded, 'block')} of them loaded",
                    seq=self._first[tier, daemon], until_ns=at_ns, count=stored, weight=stored,
                )


class AlreadyCached(Lint):
    """Candidates that were planned for nothing."""

    name = "already_cached"
    threshold = "half of the candidates that ended, and 100 of them, were skipped as already cached"
    bad = "planning looks at the same blocks again and again"
    do = "look at what plans them; a higher offload_threshold plans less"
    whole_run = True

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, _Part] = {}
        """By daemon."""
        self.before = {ev.CandidateSkipped: self._skips, ev.CandidateEnded: self._ends}

    def _skips(self, e: ev.CandidateSkipped, state: CacheState) -> None:
        self._count(e, state, e.reason is SkipReason.ALREADY_CACHED)

    def _ends(self, e: ev.CandidateEnded, state: CacheState) -> None:
        self._count(e, state, False)

    def _count(self, e: ev.CandidateSkipped | ev.CandidateEnded, state: CacheState, cached: bool) -> None:
        candidate = state.candidates[e.candidate]
        self._of.setdefault(daemon_of_copy(state, candidate), _Part()).count(e, cached)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """Per daemon, over all of the evidence."""
        for _, cached in sorted(self._of.items()):
            if cached.part >= ALREADY_CACHED_LEAST and 100 * cached.part >= ALREADY_CACHED_PERCENT * cached.whole:
                yield self.finding(
                    "candidates", f"{cached.part:,} skipped as already cached",
                    _share(cached.part, cached.whole, "candidates that ended"), seq=cached.evidence[0],
                    evidence=cached.evidence, until_ns=at_ns, count=cached.part, weight=cached.part,
                )


class LinkBusy(Lint):
    """Copies down that were skipped, because their link is slower than the pool gives its places away."""

    name = "link_busy"
    threshold = "10 % of the copies down of a route, and 20 of them, were skipped as link busy"
    bad = "the tier below gets a part of the blocks, and the others are computed again when they are asked for"
    do = (
        "copy fewer blocks with a higher --kv-offload-threshold or --disk-admission, use a faster disk or link, or ask "
        "compare whether the tier pays"
    )
    whole_run = True
    view = "tiers"

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[Way, _Part] = {}
        self.before = {ev.CandidateSkipped: self._skips}
        self.after = {ev.CandidatePromoted: self._promoted}

    def _skips(self, e: ev.CandidateSkipped, state: CacheState) -> None:
        candidate = state.candidates.get(e.candidate)
        if candidate is not None and e.reason is SkipReason.LINK_BUSY:
            self._of.setdefault(way_of(state, candidate), _Part()).count(e, True)

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        self._of.setdefault(way_of(state, state.candidates[e.candidate]), _Part()).count(e, False)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """Per route of a daemon, over all of the evidence."""
        for (route, _), busy in sorted(self._of.items()):
            if busy.part >= LINK_BUSY_LEAST and 100 * busy.part >= LINK_BUSY_PERCENT * busy.whole:
                yield self.finding(
                    route.words, f"{busy.part:,} skipped as link busy", _share(busy.part, busy.whole, "copies"),
                    seq=busy.evidence[0], evidence=busy.evidence, until_ns=at_ns, count=busy.part, weight=busy.part,
                )


def _place(pool: int, state: CacheState) -> tuple[Tier, int]:
    """The tier and the daemon of a pool."""
    return state.pools[pool].info.tier, daemon_of(state, pool)


def _share(part: int, whole: int, of_what: str) -> str:
    """A share with its denominator."""
    return f"{100 * part / whole:.1f} % of {whole:,} {of_what}"
