"""From the messages of one publisher to the stimuli of a leader.

The numbers of the messages show losses: a step forward is a loss, a step back is a new incarnation. A first number
above 0 is a late join. Each message becomes a report for each pool that it changes. A pool is declared at its first
message, by (data-parallel rank, group, medium).

Messages that wait together and change one and the same pool become one report, because a report costs three times as
much as the blocks of a message. Such a report has the time of its last message. What one message changes and a later
one changes back is told by two reports.

Law of this file: the leader hears of every message that did not arrive, could not be read or did not fit, as a gap of
this source. So no count that may be wrong is shown as certain.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import xxhash

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.events import PoolKnown
from kvbm_console.core.ids import EMPTY_HASH, Authority, Measure, Tier
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.batch import (
    DEFAULT_MEDIUM,
    EMPTIED_MEDIA,
    BadPayload,
    Batch,
    CacheEvent,
    Cleared,
    PoolKey,
    Removed,
    Stored,
    StoredMark,
    decode,
    tier_of,
)
from kvbm_console.engines.kv_events.ghosts import Ghosts

POOLS_MAX: Final = 64
"""Pools of one publisher: ranks times groups times media. A hybrid model on 8 ranks with a host tier has 48."""
POOL_BLOCKS_MAX: Final = 2**22
"""Resident blocks of one pool: 64 million tokens of 16, ten times the largest host tier."""
TIME_MAX_S: Final = 4.5e9
"""Seconds since 1970 in the year 2112; a larger number is no time."""
JOIN_S: Final = 0.05
"""The longest time between the first and the last message of a report."""
JOIN_BLOCKS_MAX: Final = 4_096
"""Blocks of a report that takes no further message."""
SEQ_MAX: Final = 2**62
"""A number beyond this is no count of messages."""


class StreamCounts(msgspec.Struct):
    """Counts of one publisher. Times are nanoseconds on the service's clock."""

    batches: int = 0
    events: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    unknown_events: int = 0
    malformed_events: int = 0
    bad_payloads: int = 0
    """Messages that could not be decoded."""
    lost_batches: int = 0
    """Messages that never came, not even by replay."""
    gaps: int = 0
    doubts: int = 0
    """Absences of the publisher after which no replay was possible."""
    replayed_batches: int = 0
    duplicate_batches: int = 0
    restarts: int = 0
    refused_blocks: int = 0
    """Blocks beyond the limits of this program."""
    last_seq: int = -1
    last_batch_ns: int | None = None
    """The time of the last message. Engines send messages only when they step, so age alone is no fault."""


class SourceStatus(msgspec.Struct):
    """The state and the counts of the connection."""

    connected: bool = False
    """True if any publisher is connected; several may connect if we bind."""
    connects: int = 0
    disconnects: int = 0
    messages: int = 0
    bad_messages: int = 0
    """Messages that were not [topic, number, payload]."""
    replays: int = 0
    replays_failed: int = 0


class _Report:
    """Changes to one pool, in the order of a report: removed, then stored."""

    __slots__ = ("chains", "gone", "marks", "new", "parents", "removed", "seen", "stored")

    def __init__(self) -> None:
        self.chains: list[int] = []
        self.parents: list[int] = []
        self.marks: list[StoredMark] = []
        """Marks of ``stored``, by their position there."""
        self.stored: list[int] = []
        self.removed: list[int] = []
        self.new: set[int] = set()
        """The blocks of ``stored``."""
        self.gone: set[int] = set()
        """The blocks that earlier messages removed."""
        self.seen = 0
        """The blocks of ``removed`` that are in ``gone``."""

    def add(self, event: Stored) -> None:
        """A chain was stored."""
        if event.hashes:
            self.stored += event.hashes
            self.chains.append(len(event.hashes))
            self.parents.append(event.parent or EMPTY_HASH)
            self.new.update(event.hashes)

    def go_on(self) -> None:
        """Another message follows."""
        self.gone.update(self.removed[self.seen :])
        self.seen = len(self.removed)

    def mark(self, marks: tuple[StoredMark, ...]) -> None:
        """The marks of a chain that comes next."""
        base = len(self.stored)
        self.marks += [StoredMark(base + at, content, context) for at, content, context in marks]


_NOTHING: Final = _Report()


def _joined(events: list[CacheEvent]) -> Iterator[CacheEvent]:
    """The events, with removals in a row from one place as one: vLLM sends an event for each block."""
    last: Removed | None = None
    for event in events:
        if type(event) is Removed:
            if last is not None and event.medium == last.medium and event.group == last.group:
                last.hashes.extend(event.hashes)
                continue
            if last is not None:
                yield last
            last = Removed(event.hashes[:], event.medium, event.group)
            continue
        if last is not None:
            yield last
            last = None
        yield event
    if last is not None:
        yield last


class EventStream:
    """A publisher as a source of the leader. ``dp_rank`` is the rank of messages that name none."""

    def __init__(
        self, dispatcher: Dispatcher, source: int, *, dp_rank: int = 0, label: str = "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.source = source
        self.label = label
        """The publisher's address, as screens show it."""
        self.dp_rank = dp_rank
        self.counts = StreamCounts()
        self._dispatcher = dispatcher
        self._pools: dict[PoolKey, int] = {}
        self._contexts = False
        """True once a block had a LoRA, a salt, an image or a session."""
        self._ghosts = defaultdict[int, Ghosts](Ghosts)
        """The evicted blocks of each pool."""
        self.next_seq = 0
        """The expected number of a message."""
        self._last_digest = 0
        self.away = False
        """True while an engine that connected to us has no connection."""
        self._gone = False
        self._cleared = set[int]()
        """Ranks without a report since their last clear, so another clear would change nothing."""
        self._unseen_below = False
        """True if messages were lost before a clear of the device, so tiers that no event named yet may have blocks."""
        self._wall = wall
        self._open: dict[PoolKey, _Report] = {}
        """The reports that were not sent yet."""
        self._open_since: float | None = None
        """The publisher's time of the first message of these reports, None if unknown."""
        self._ts: float | None = None
        """The same of the current message."""
        self._before = False
        """True while these reports have changes of messages in front of the current one."""
        self._origin: int | None = None
        """The publisher's time of the batch, in ns since 1970; None if unknown."""
        self._age_ns: int | None = 0
        """The time since then by our clock, None if unknown."""

    # --- messages ---

    def missing(self, seq: int) -> tuple[int, int] | None:
        """(first, last) of the messages missing before ``seq``; None if ``seq`` is the next number or lower."""
        return (self.next_seq, seq - 1) if seq > self.next_seq else None

    def is_last(self, seq: int, payload: bytes) -> bool:
        """True if this is the last accepted message, byte for byte, which proves the same incarnation."""
        return seq == self.next_seq - 1 and xxhash.xxh3_64_intdigest(payload) == self._last_digest

    def accept(self, seq: int, payload: bytes, *, replayed: bool = False, more: bool = False) -> None:
        """Take a message, after the loss or the restart that its number shows. Repeated messages of a replay are left
        out. With ``more`` the caller takes a further message or calls ``flush`` before anybody else looks."""
        self._accept(seq, payload, replayed)
        if not more:
            self.flush()

    def flush(self) -> None:
        """Report what the messages so far have changed."""
        if self._open:
            reports, self._open, self._before, self._open_since = self._open, {}, False, self._ts
            for place, report in reports.items():
                self._send(place, report)

    def _accept(self, seq: int, payload: bytes, replayed: bool) -> None:
        counts = self.counts
        if seq > SEQ_MAX:
            counts.bad_payloads += 1
            self._gap(self.next_seq, self.next_seq)
            return
        if self._gone:
            self.restart()
        if seq < self.next_seq:
            if replayed:
                counts.duplicate_batches += 1
                return
            self.restart()
        try:
            batches = decode(payload)
        except BadPayload:
            batches = None
        gap = self.missing(seq)
        if gap is not None and not (gap == (0, 0) and batches and batches[0].pool):
            self.lose(*gap)
        self.next_seq = seq + 1
        counts.last_seq = seq
        counts.last_batch_ns = self._dispatcher.clock()
        counts.batches += 1
        counts.replayed_batches += replayed
        self._last_digest = xxhash.xxh3_64_intdigest(payload)
        if batches is None:
            counts.bad_payloads += 1
            self._gap(seq, seq)
            return
        for batch in batches:
            self._apply(seq, batch, replayed)

    def lose(self, first: int, last: int) -> None:
        """Report messages that will not come any more."""
        self.counts.lost_batches += last - first + 1
        self._gap(first, last)

    def doubt(self) -> None:
        """The publisher was away, and its messages of that time are unknown."""
        if self.counts.batches:
            self.counts.doubts += 1
            self._gap(self.next_seq, self.next_seq)

    @property
    def has_ended(self) -> bool:
        """True if the publisher has ended, and no message came since."""
        return self._gone

    def gone(self) -> None:
        """The publisher has ended, and its blocks are gone with it."""
        if not self._gone:
            self.flush()
            self._gone = True
            self._begin()
            self._dispatcher.submit_from(self.source, None, st.SourceRestarted, True)

    def restart(self) -> None:
        """The publisher began again, and its earlier blocks are gone."""
        self.flush()
        self.counts.restarts += 1
        self._gone = False
        self._begin()
        self._dispatcher.submit_from(self.source, None, st.SourceRestarted)

    def _begin(self) -> None:
        self.next_seq = 0
        self._ghosts.clear()
        self._cleared.clear()
        self._unseen_below = False

    def _gap(self, first: int, last: int) -> None:
        self.flush()
        self._cleared.clear()
        self.counts.gaps += 1
        self._dispatcher.submit_from(self.source, None, st.SourceGapped, first, last)

    def measure(self, values: dict[Measure, int]) -> None:
        """Report the engine's own metrics, or none if they cannot be read any more."""
        self._dispatcher.submit_from(
            self.source, None, st.MeasuresReported, tuple(values), tuple(values.values())
        )

    def block_tokens(self) -> int | None:
        """Tokens of a block of the device; None before its first block."""
        state = self._dispatcher.leader.state
        return next((state.pools[pool].info.block_tokens for (_, _, medium), pool in self._pools.items()
                     if tier_of(medium) is Tier.G1), None)

    def resident_blocks(self) -> dict[str, int]:
        """Blocks by medium, over all ranks and groups."""
        blocks_of: dict[str, int] = {}
        for (_, _, medium), pool in sorted(self._pools.items()):
            blocks = self._dispatcher.leader.state.pools[pool].resident_blocks
            blocks_of[medium] = blocks_of.get(medium, 0) + blocks
        return blocks_of

    # --- a batch ---

    def _apply(self, seq: int, batch: Batch, replayed: bool) -> None:
        counts = self.counts
        counts.events += len(batch.events)
        counts.unknown_events += batch.unknown
        counts.malformed_events += batch.malformed
        self._begin_batch(batch.ts, replayed)
        if batch.lost:
            self._gap(seq, seq)
        rank = self.dp_rank if batch.dp_rank is None else batch.dp_rank
        taken = [self._take(rank, event) for event in _joined(batch.events)]
        if batch.malformed or not all(taken):
            self._gap(seq, seq)
        blocks = sum(len(report.stored) + len(report.removed) for report in self._open.values())
        if len(self._open) > 1 or blocks > JOIN_BLOCKS_MAX:
            self.flush()  # of several pools each report is of one message, so that their changes stay in order

    def _begin_batch(self, ts: float | None, replayed: bool) -> None:
        """Know the time of a batch, and report the changes before it if it comes too late to join them."""
        ts = ts if ts is not None and 0 < ts < TIME_MAX_S else None
        if self._open:
            since = self._open_since
            if ts is None or since is None or abs(ts - since) > JOIN_S:
                self.flush()
        self._before, self._ts = bool(self._open), ts
        if not self._open:
            self._open_since = ts
        for report in self._open.values():
            report.go_on()
        if ts is not None:
            self._origin, self._age_ns = round(ts * 1e9), round((self._wall() - ts) * 1e9)
        else:
            self._origin, self._age_ns = None, None if replayed else 0

    def _take(self, rank: int, event: CacheEvent) -> bool:
        """Add an event to the open reports; False for blocks of one pool too many."""
        if isinstance(event, Cleared):
            self.flush()
            self._clear(rank, event)
            return True
        place = rank, event.group, event.medium
        if isinstance(event, Stored):
            if place not in self._pools and not self._declare(place, event.block_tokens):
                self.counts.refused_blocks += len(event.hashes)
                return not event.hashes
            if self._may_restate(place, event):
                self._gap(self.counts.last_seq, self.counts.last_seq)
            report = self._report_of(place)
            if not report.gone.isdisjoint(event.hashes):
                report = self._next_report(place)
            if event.marks and not self._contexts:
                self._contexts = any(mark.context for mark in event.marks)
            if self._contexts:  # content is of use only beside a context
                report.mark(event.marks or event.opening())
            report.add(event)
            return True
        if place not in self._pools:
            self.counts.removed_blocks += len(event.hashes)
            return True  # no block was stored in this pool while we listened
        report = self._report_of(place)
        if not report.new.isdisjoint(event.hashes):
            report = self._next_report(place)
        report.removed += event.hashes
        return True

    def _report_of(self, place: PoolKey) -> _Report:
        """The open report of a pool."""
        report = self._open.get(place)
        if report is None:
            if self._before:
                self.flush()
            report = self._open[place] = _Report()
        return report

    def _next_report(self, place: PoolKey) -> _Report:
        """A new report of a pool: a report tells what is gone before what is new."""
        self._send(place, self._open.pop(place))
        report = self._open[place] = _Report()
        return report

    def _may_restate(self, place: PoolKey, event: Stored) -> bool:
        """True if the device already holds the beginning of an announced prompt, which puts its counts in doubt."""
        # With ``kv_cache_report_mode`` full these are the same blocks again, else new copies, and no event tells which.
        if event.parent is not None or len(event.hashes) < 2 or tier_of(event.medium) is not Tier.G1:
            return False
        state = self._dispatcher.leader.state
        held, first = state.pools[self._pools[place]].by_hash, event.hashes[0]
        report = self._open.get(place, _NOTHING)
        if (first not in held and first not in report.new) or self.source in state.lost_sources:
            return False
        return all((key in held and key not in report.removed) or key in report.new for key in event.hashes)

    def _send(self, place: PoolKey, report: _Report) -> None:
        pool = self._pools[place]
        counts = self.counts
        counts.removed_blocks += len(report.removed)
        resident = self._dispatcher.leader.state.pools[pool].resident_blocks
        full = resident + len(report.stored) > POOL_BLOCKS_MAX
        if full:
            counts.refused_blocks += len(report.stored)
            kept, report = report, _Report()
            report.removed = kept.removed
        counts.stored_blocks += len(report.stored)
        if report.stored or report.removed:
            self._cleared.clear()
            self._report(pool, report, resident)
        if full:
            self._gap(counts.last_seq, counts.last_seq)

    def _report(self, pool: int, report: _Report, resident: int) -> None:
        ghosts, age_ns = self._ghosts[pool], self._age_ns
        did_ns = None if age_ns is None else self._dispatcher.clock() - age_ns
        stored, removed = report.stored, report.removed
        if removed:
            ghosts.evict(removed, did_ns, resident)
        gone = pack_hashes(removed) if removed else b""
        columns: tuple[Any, ...]
        if stored:
            columns = pack_hashes(stored), gone, False, b"", ""
            columns += pack_ids(report.chains), pack_hashes(report.parents)
            again, marks = ghosts.find(stored, did_ns), report.marks
            if marks:  # columns that are empty in most reports are not made
                columns += (
                    pack_ids([mark.at for mark in marks]), pack_hashes([mark.content for mark in marks]),
                    tuple([mark.context for mark in marks]),
                )
            else:
                columns += b"", b"", ()
            columns += (*zip(*again, strict=True), tuple(again.values()), age_ns) if again else ((), (), (), age_ns)
        else:
            columns = b"", gone, False, b"", "", b"", b"", b"", b"", (), (), (), (), age_ns
        self._dispatcher.submit_from(self.source, self._origin, st.BlocksReported, pool, *columns)

    def _clear(self, rank: int, event: Cleared) -> None:
        """Empty the pools that are surely empty. If the rank has others, nothing is certain of this source."""
        # With SimpleCPUOffloadConnector the event may mean the host alone, so the device is doubtful then, too.
        self.counts.clears += 1
        if rank in self._cleared:
            return
        if not self._pools:
            self._declare((rank, 0, DEFAULT_MEDIUM), 0)  # a clear needs a pool that it empties
        if not event.everywhere and self.source in self._dispatcher.leader.state.lost_sources:
            self._unseen_below = True
        doubtful = False
        for (pool_rank, _, medium), pool in self._pools.items():
            if pool_rank != rank:
                continue
            if event.everywhere or medium in EMPTIED_MEDIA:
                self._ghosts[pool].clear()
                self._dispatcher.submit_from(self.source, self._origin, st.BlocksReported, pool, b"", b"", True)
            else:
                doubtful = True
        if doubtful:
            self._gap(self.counts.last_seq, self.counts.last_seq)
        self._cleared.add(rank)

    # --- pools ---

    def _declare(self, place: PoolKey, block_tokens: int) -> bool:
        """Declare a pool to the leader; False when there are too many."""
        if len(self._pools) >= POOLS_MAX:
            return False
        rank, group, medium = place
        outcome = self._dispatcher.submit_from(
            self.source, self._origin, st.PoolDeclared, rank, group, tier_of(medium), medium, None,
            block_tokens or self._block_tokens(group), Authority.STREAM,
        )
        for event in outcome.events:
            if isinstance(event, PoolKnown):
                self._pools[place] = event.pool
        if self._unseen_below and medium not in EMPTIED_MEDIA:
            self._gap(self.counts.last_seq, self.counts.last_seq)
        return place in self._pools

    def _block_tokens(self, group: int) -> int:
        """The block size for a placeholder, which has none: that of the same group on another medium, or of any."""
        state = self._dispatcher.leader.state
        known = {place[1]: state.pools[pool].info.block_tokens for place, pool in self._pools.items()}
        return known.get(group) or next(iter(known.values()), self._dispatcher.leader.config.block_tokens)
