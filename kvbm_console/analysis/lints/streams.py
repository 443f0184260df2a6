"""Lints about engines that are followed by their event streams.

Law of this file: an engine is judged only by the reports that arrived.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.analysis.lints.lint import EVIDENCE_MAX, Finding, Level, Lint, MinuteShare, plural
from kvbm_console.core import events as ev
from kvbm_console.core.columns import HASH_BYTES
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import Authority, FinishReason, Note, SlotState, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import GONE
from kvbm_console.stream.publishers import queue_is_safe, queue_of

AGAIN_PERCENT: Final = 25
AGAIN_BLOCKS: Final = 100
AGAIN_NS: Final = 50 * SECOND_NS
"""One of ``AGE_BOUNDS_NS``, by which a stream's reports class the ages of evictions."""


def _blocks(source: int, state: CacheState) -> int:
    """Blocks that are shown of a source."""
    return sum(
        pool.resident_blocks for pool in state.pools
        if pool.info.source == source and pool.info.authority is Authority.STREAM
    )


class _Doubt(msgspec.Struct):
    """Reports of one source that are missing."""

    began: ev.SourceLost
    losses: int = 0
    evidence: list[int] = []


class ReportsLost(Lint):
    """Reports of an engine were lost or unclear, so its counts are doubtful until a full clear or a restart."""

    name = "reports_lost"
    threshold = (
        "any batch of an engine's event stream that never came or could not be read, or that clears a cache and does "
        "not tell which of its tiers"
    )
    bad = (
        "the content of the engine's cache is known only in part: its counts may be wrong until it clears its whole "
        "cache or restarts"
    )
    do = "give the engine a replay address and this program that address too; raise the engine's hwm and buffer_steps"
    ends = True
    view = "tiers"
    of_engine = True

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, _Doubt] = {}
        self.after = {ev.SourceLost: self._lost, ev.BlocksSeen: self._seen}

    def _lost(self, e: ev.SourceLost, state: CacheState) -> None:
        if e.restarted:
            self._settle(e.source, e.at_ns, state)
            return
        doubt = self._open.setdefault(e.source, _Doubt(e))
        doubt.losses += 1
        if e.seq != doubt.began.seq and len(doubt.evidence) < EVIDENCE_MAX:
            doubt.evidence = [*doubt.evidence, e.seq]

    def _seen(self, e: ev.BlocksSeen, state: CacheState) -> None:
        if e.cleared:
            self._settle(state.pools[e.pool].info.source, e.at_ns, state)

    def _settle(self, source: int, at_ns: int, state: CacheState) -> None:
        if source in self._open and source not in state.lost_sources:
            self.over(self._finding(source, self._open.pop(source), at_ns, state))

    def _finding(self, source: int, doubt: _Doubt, until_ns: int | None, state: CacheState) -> Finding:
        first = doubt.began
        still = "; known again"
        if until_ns is None:
            still = f"; its {_blocks(source, state):,} blocks may be wrong"
        return self.finding(
            f"engine {source}", f"{plural(doubt.losses, 'gap')} in its reports",
            f"from batch {first.first:,} to {first.last:,} at first{still}", seq=first.seq,
            evidence=doubt.evidence, since_ns=first.at_ns, until_ns=until_ns, count=doubt.losses,
            weight=doubt.losses,
        )

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Engines whose counts are doubtful. The facts also know sources that became doubtful before the evidence."""
        for source, losses in state.lost_sources.items():
            if losses <= GONE:
                continue
            doubt = self._open.get(source)
            if doubt is not None:
                yield self._finding(source, doubt, None, state)
                continue
            yield self.finding(
                f"engine {source}", f"{plural(losses, 'gap')} in its reports",
                f"before what is known here; its {_blocks(source, state):,} blocks may be wrong",
                seq=max(0, state.seq - 1), count=losses, weight=losses,
            )


class StoredAgain(Lint):
    """Blocks that an engine stores again soon after their eviction: it computes what it had a moment ago.

    Hits on resident blocks are silent in a stream, so the thrash of a followed engine shows in its stores alone.
    """

    name = "stored_again"
    threshold = (
        f"of {AGAIN_BLOCKS} or more blocks that a tier of a followed engine stored in 60 s, more than "
        f"{AGAIN_PERCENT} % had been evicted there less than {AGAIN_NS // SECOND_NS} s before"
    )
    bad = "prompts are computed anew although their blocks were there a moment ago"
    do = (
        "the tier is too small for this reuse; view 6 tells how many of these blocks a larger one would have kept. "
        "Give the engine more blocks, or a tier below"
    )
    ends = True
    view = "tiers"
    of_engine = True

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[int, dict[Tier, MinuteShare]] = {}
        """By source and tier."""
        self._worst: dict[int, Finding] = {}
        self.after = {ev.BlocksSeen: self._seen}

    def _seen(self, e: ev.BlocksSeen, state: CacheState) -> None:
        info = state.pools[e.pool].info
        if not e.stored or info.authority is not Authority.STREAM:
            return
        window = self._windows.setdefault(info.source, {}).setdefault(info.tier, MinuteShare())
        soon = zip(e.again_within_ns, e.again_blocks, strict=True)
        again = sum(blocks for within_ns, blocks in soon if within_ns <= AGAIN_NS)
        window.add(e.at_ns, len(e.stored) // HASH_BYTES, again)
        if again and window.above(AGAIN_PERCENT, of=AGAIN_BLOCKS):
            worst = self._worst.get(info.source)
            if worst is None or window.percent > worst.weight:
                self._worst[info.source] = self._finding(info.source, info.tier, window, e.seq, e.at_ns)

    def _finding(self, source: int, tier: Tier, window: MinuteShare, seq: int, until_ns: int | None) -> Finding:
        return self.finding(
            f"engine {source}", f"{tier.name} stored again {window.percent} %",
            f"{window.part:,} of {window.whole:,} blocks had just been evicted; too small for this reuse",
            seq=seq, since_ns=window.since_ns, until_ns=until_ns, count=window.part, weight=window.percent,
        )

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """A finding per engine: the last minute of its worst tier while that lasts, and its worst minute afterwards."""
        for source, worst in sorted(self._worst.items()):
            lasting = [
                (window.percent, tier) for tier, window in self._windows[source].items()
                if state is not None and not state.has_ended(source)
                and window.fresh(at_ns) and window.above(AGAIN_PERCENT, of=AGAIN_BLOCKS)
            ]
            if not lasting:
                yield worst
                continue
            _, tier = max(lasting)
            yield self._finding(source, tier, self._windows[source][tier], worst.seq, None)


class EngineEnded(Lint):
    """An engine ended and is not back. It was followed by its event stream, or tapped and had live requests."""

    name = "engine_ended"
    threshold = (
        "an engine whose event stream is followed has closed its port, or a tapped one ended with live requests"
    )
    bad = "it serves no request, and its cache is lost: later requests are computed anew"
    do = "look at the engine's log; it is followed again when it is back"
    ends = True
    view = "tiers"
    of_engine = True

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, tuple[ev.SourceLost, int]] = {}
        """Source to the event of its end, and the number of requests that ended with it."""
        self._aborted: dict[int, tuple[int, int]] = {}
        """Source to the time of its last aborted requests, and their number."""
        self.after = {ev.SlotMoved: self._moved, ev.SourceLost: self._lost, ev.PoolKnown: self._known}

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        if e.reason is FinishReason.ABORTED and e.new is SlotState.FINISHED:
            source = state.known_slot(e.slot).source
            at_ns, count = self._aborted.get(source, (e.at_ns, 0))
            self._aborted[source] = e.at_ns, count * (at_ns == e.at_ns) + 1

    def _lost(self, e: ev.SourceLost, state: CacheState) -> None:
        if e.gone:
            at_ns, aborted = self._aborted.pop(e.source, (e.at_ns, 0))
            aborted *= at_ns == e.at_ns
            if aborted or not _tapped(e.source, state):
                self._open[e.source] = e, aborted
        elif e.restarted and not state.has_ended(e.source):
            self._over(e.source, e.at_ns)

    def _known(self, e: ev.PoolKnown, state: CacheState) -> None:
        if e.authority is Authority.OBSERVED:  # a tap that comes again is another source
            for source in [source for source in self._open if _tapped(source, state)]:
                self._over(source, e.at_ns)

    def _over(self, source: int, at_ns: int) -> None:
        if source in self._open:
            self.over(self._finding(source, *self._open.pop(source), at_ns))

    def _finding(self, source: int, e: ev.SourceLost, aborted: int, until_ns: int | None) -> Finding:
        with_it = f" with {plural(aborted, 'live request')}" if aborted else ""
        return self.finding(
            f"engine {source}", f"ended{with_it}",
            "and is back" if until_ns is not None else "and is not back; its cache is lost", seq=e.seq,
            since_ns=e.at_ns, until_ns=until_ns, weight=1 + aborted,
        )

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Engines that are not back."""
        for source, (e, aborted) in self._open.items():
            yield self._finding(source, e, aborted, None)


class PublisherQueue(Lint):
    """The queue of an engine's publisher is small, or its size is not known: the stream itself does not tell."""

    name = "publisher_queue"
    threshold = (
        "a followed engine whose max_queue_size is below 10,000 batches; a note where the size is not known, because a "
        "stream does not tell it"
    )
    bad = (
        "vLLM's step waits while its publisher's queue is full (vllm-project/vllm#53859), and the thread that empties "
        "it answers replays, too"
    )
    do = (
        "set max_queue_size of kv_events_config to its default of 100,000; followed by its http:// address the engine "
        "tells its size"
    )
    ends = True
    view = "tiers"
    of_engine = True

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, tuple[int | None, ev.Noted]] = {}
        """Source to the batches that its publisher's queue holds, None for unknown, and the event with that number."""
        self.after = {ev.Noted: self._noted}

    def _noted(self, e: ev.Noted, state: CacheState) -> None:
        queue = queue_of(e.detail) if e.note is Note.ENGINE_SUMMARY else None
        if queue is not None:
            self._queues[queue[0]] = queue[1], e

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Every source that is followed and has not ended."""
        for source in sorted({p.info.source for p in state.pools if p.info.authority is Authority.STREAM}):
            size, summary = self._queues.get(source, (None, None))
            known_safe = size is not None and queue_is_safe(size)
            if known_safe or state.has_ended(source) or _tapped(source, state):  # a tap has no publisher
                continue
            seq, since_ns = (max(0, state.seq - 1), 0) if summary is None else (summary.seq, summary.at_ns)
            text = "queue size unknown" if size is None else f"queue of {size:,} batches"
            yield self.finding(
                f"engine {source}", text, "of its publisher: vLLM's step waits while it is full", seq=seq,
                level=Level.NOTE if size is None else None, since_ns=since_ns,
            )


def _tapped(source: int, state: CacheState) -> bool:
    return any(pool.info.source == source and pool.info.authority is Authority.OBSERVED for pool in state.pools)
