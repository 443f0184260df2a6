"""The lake: blocks, lookups, copies and requests of many engines as Parquet files, for questions in SQL.

    LAKE/blocks/day=2026-11-23/engine=prod-3/9f21c0-00000004.parquet
         lookups/...      transfers/...      requests/...

A file holds the rows of ``CHUNK_EVENTS`` events of one run of one engine, on one day of the wall's clock (UTC). Its
name follows from its events, so rows that are made again replace themselves (``lake_files``).

Law of this file: the stored rows of a block less its evicted rows are the places that hold it, after every event.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Final

from kvbm_console.analysis.admissions import FirstMisses, SeenHits
from kvbm_console.analysis.lake_questions import TABLES
from kvbm_console.analysis.request_times import RequestTimes
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core import events as ev
from kvbm_console.core.columns import array_of_hashes, gather, unpack_hashes, unpack_ids
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import ReleaseReason, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY, PoolFacts
from kvbm_console.stream.feed import GapSeen

CHUNK_EVENTS: Final = 250_000
"""Events of a file: a few megabytes, and about a minute of a busy engine."""
DAY_NS: Final = 86_400 * SECOND_NS
_WHOLE: Final = (ev.PoolKnown, ev.SourceLost, ev.ResetDone)
"""Rare events that change blocks in ways of their own: all places are compared before and after."""


Block = tuple[int, Tier, int]
"""A pool, its tier, and the hash of a block there."""


class FileRows:
    """The rows of a file of any table but ``blocks``."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.rows: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[list[Any]]:
        """The values by column."""
        return [*map(list, zip(*self.rows, strict=True))] or [[] for _ in TABLES[self.table]]


class BlockRows:
    """The rows of a file of ``blocks``. Events move blocks by dozens, so most of what a row tells is its neighbour's.

    ``moves`` has five numbers for all blocks of an event: seq, at_ns, kind, slot and the number of their rows. A kind
    is twice the tier, and 1 more for blocks that went; ``NO_SLOT`` is null. ``hashes`` has the hash of each row.
    """

    def __init__(self) -> None:
        self.moves = array("q")
        self.hashes = array("Q")

    def __len__(self) -> int:
        return len(self.hashes)


TableRows = FileRows | BlockRows
Write = Callable[[str, int, int, TableRows], None]
"""Takes (table, chunk, day, rows) of a file, as far as its events were seen."""
MOVE_NUMBERS: Final = 5
NO_SLOT: Final = -(2**63)
_BEFORE_ALL_NS: Final = -(2**63)
STORED: Final = 0
EVICTED: Final = 1
"""The last bit of a kind."""


def rows_of(table: str) -> TableRows:
    """No rows of this table yet."""
    return BlockRows() if table == "blocks" else FileRows(table)


class LakeRows(Visitor):
    """Makes the rows of the tables. ``anchor_ns`` is the wall's time at the engine's time 0.

    ``whole`` is called with a chunk after its files were written, if all of its events were seen.
    """

    def __init__(self, anchor_ns: int, write: Write, whole: Callable[[int], None]) -> None:
        super().__init__()
        self._anchor_ns = anchor_ns
        self._write = write
        self._whole = whole
        self._began: int | None = None
        """The first event that was seen."""
        self._rows: dict[tuple[str, int], TableRows] = {}
        """(table, day) to the rows of the chunk."""
        self._chunk = 0
        self._chunk_ends = CHUNK_EVENTS
        """The first event behind the chunk."""
        self._blocks = BlockRows()
        """Those of ``_rows`` of the day that ends at ``_day_ends_ns`` of the engine."""
        self._day_ends_ns = _BEFORE_ALL_NS
        self._state: CacheState | None = None
        """The facts behind the rows so far; those before a gap stay as they were."""
        self._known: Counter[Block] = Counter()
        """Places that held the blocks which the present event may change, if it changes them in a way of its own."""
        self._misses = FirstMisses()
        self._times = RequestTimes()
        self._lost_blocks = Counter[int]()
        """Live slot to its hits in rows of ``lookups`` whose load failed."""
        self._seen_hits = SeenHits()
        self.before = {
            ev.BlocksEvicted: self._evicted, ev.BlocksDropped: self._dropped, ev.SlotClosed: self._closed,
            ev.CandidateEnded: self._copied, ev.BlocksSeen: self._sees, **dict.fromkeys(_WHOLE, self._changes),
        }
        self.after = {
            ev.BlocksFilled: self._filled, ev.BlocksReady: self._ready, ev.BlocksSeen: self._seen,
            ev.LookupAnswered: self._looked_up, ev.PrefixScored: self._scored, ev.HitsLost: self._lost,
            ev.SlotOpened: self._opened, ev.SlotCloned: self._opened, ev.SlotMoved: self._moved,
            **dict.fromkeys(_WHOLE, self._changed),
        }

    def _go_on(self, seq: int) -> None:
        """Event ``seq`` is behind the chunk: end that, and make the rows of the event's."""
        self._write_rows()
        self._rows.clear()
        self._day_ends_ns = _BEFORE_ALL_NS
        if self._began is not None and self._began <= self._chunk * CHUNK_EVENTS:
            self._whole(self._chunk)
        self._begin(seq)

    def _begin(self, seq: int) -> None:
        self._chunk = seq // CHUNK_EVENTS
        self._chunk_ends = (self._chunk + 1) * CHUNK_EVENTS

    def flush(self) -> None:
        """Write the rows of the present chunk; they are written again with those that follow."""
        if self._state is not None and self._state.seq > self._chunk_ends:
            self._go_on(self._state.seq - 1)  # no event of the next chunk has made a row
        self._write_rows()

    def _write_rows(self) -> None:
        for (table, day), rows in self._rows.items():
            if rows:
                self._write(table, self._chunk, day, rows)

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Blocks that are there already, and those that came and went in a gap, are told as of now."""
        self._misses.keep(state.slots)
        self._seen_hits.keep(state.slots)
        self._times.resumed(state)
        for slot in self._lost_blocks.keys() - state.slots.keys():
            del self._lost_blocks[slot]
        if self._began is None:
            self._began = state.seq
        if not self._rows:
            self._begin(state.seq)
        self._known = Counter() if self._state is None else _resident(self._state.pools)
        self._state, self._day_ends_ns = state, _BEFORE_ALL_NS
        self._tell(state.seq, state.at_ns, _resident(state.pools))

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """Write the last chunk."""
        self.flush()

    # --- blocks ---

    def _block(self, seq: int, at_ns: int, kind: int, hashes: Sequence[int], slot: int | None) -> None:
        if not hashes:
            return
        if at_ns >= self._day_ends_ns:
            self._next_day(at_ns)
        rows = self._blocks
        rows.hashes.extend(hashes)
        rows.moves.extend((seq, self._anchor_ns + at_ns, kind, NO_SLOT if slot is None else slot, len(hashes)))

    def _next_day(self, at_ns: int) -> None:
        day = (self._anchor_ns + at_ns) // DAY_NS
        rows = self._rows.setdefault(("blocks", day), BlockRows())
        assert isinstance(rows, BlockRows)
        self._blocks, self._day_ends_ns = rows, (day + 1) * DAY_NS - self._anchor_ns

    def _filled(self, e: ev.BlocksFilled, state: CacheState) -> None:
        if e.seq >= self._chunk_ends:
            self._go_on(e.seq)
        hashes, at, kind = array_of_hashes(e.hashes), 0, 2 * state.pools[e.pool].info.tier + STORED
        if not e.slots:
            self._block(e.seq, e.at_ns, kind, hashes, None)
        for slot, count in zip(e.slots, e.counts, strict=True):
            self._block(e.seq, e.at_ns, kind, hashes[at : at + count], slot)
            at += count

    def _evicted(self, e: ev.BlocksEvicted, state: CacheState) -> None:
        self._gone(e, unpack_ids(e.ids), e.for_slot, state)

    def _dropped(self, e: ev.BlocksDropped, state: CacheState) -> None:
        if e.why is not ReleaseReason.EPOCH:  # that frees places, and takes no content
            self._gone(e, list(dict.fromkeys(unpack_ids(e.ids))), None, state)

    def _gone(
        self, e: ev.BlocksEvicted | ev.BlocksDropped, places: list[int], slot: int | None, state: CacheState
    ) -> None:
        """Before these places lose their content."""
        if e.seq >= self._chunk_ends:
            self._go_on(e.seq)
        pool = state.pools[e.pool]
        hash_of, content = pool.hash_of, pool.content
        hashes = [hash_of[place] for place in places if content[place] == READY]
        self._block(e.seq, e.at_ns, 2 * pool.info.tier + EVICTED, hashes, slot)

    def _ready(self, e: ev.BlocksReady, state: CacheState) -> None:
        if e.seq >= self._chunk_ends:
            self._go_on(e.seq)
        pool = state.pools[e.pool]
        operation = state.operations.get(e.operation)
        slot = None if operation is None else state.candidates[operation.candidate].slot
        hashes = gather(pool.hash_of, unpack_ids(e.ids))
        self._block(e.seq, e.at_ns, 2 * pool.info.tier + STORED, hashes, slot)

    def _sees(self, e: ev.BlocksSeen, state: CacheState) -> None:
        self._known = _seen(e, state)

    def _seen(self, e: ev.BlocksSeen, state: CacheState) -> None:
        if e.seq >= self._chunk_ends:
            self._go_on(e.seq)
        self._tell(e.seq, e.at_ns, _seen(e, state))

    def _changes(self, e: ev.Event, state: CacheState) -> None:
        self._known = _resident(state.pools)

    def _changed(self, e: ev.Event, state: CacheState) -> None:
        if e.seq >= self._chunk_ends:
            self._go_on(e.seq)
        self._tell(e.seq, e.at_ns, _resident(state.pools))

    def _tell(self, seq: int, at_ns: int, now: Counter[Block]) -> None:
        for op, change in ((EVICTED, self._known - now), (STORED, now - self._known)):
            for (_, tier, key), count in change.items():
                self._block(seq, at_ns, 2 * tier + op, [key] * count, None)

    # --- lookups, copies, requests ---

    def _looked_up(self, e: ev.LookupAnswered, state: CacheState) -> None:
        self._misses.looked_up(e, state)

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        if e.readmitted:
            return
        slot = state.slots[e.slot]
        self._seen_hits.scored(slot)
        miss = self._misses.scored(e, slot)
        why = None if miss is None or miss.why is None else miss.why.label
        missed = (None, 0, why) if miss is None else (miss.key, miss.blocks, why)
        self._row("lookups", e, (e.slot, slot.request, e.prompt_blocks, *e.hits, *missed))

    def _lost(self, e: ev.HitsLost, state: CacheState) -> None:
        if not e.readmitted and e.slot in self._seen_hits:
            self._lost_blocks[e.slot] += e.blocks

    def _opened(self, e: ev.SlotOpened | ev.SlotCloned, state: CacheState) -> None:
        self._times.opened(e)

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        self._times.moved(e)

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        slot, times, anchor_ns = state.slots[e.slot], self._times.closed(e), self._anchor_ns
        self._misses.closed(e.slot)
        self._seen_hits.closed(e.slot)
        self._row("requests", e, (
            e.slot, slot.request, anchor_ns + times.arrived_ns,
            None if times.first_token_ns is None else anchor_ns + times.first_token_ns, slot.prompt_tokens,
            slot.prompt_blocks, slot.preemptions, self._lost_blocks.pop(e.slot, 0),
            None if slot.reason is None else slot.reason.label,
        ))

    def _copied(self, e: ev.CandidateEnded, state: CacheState) -> None:
        copy = state.candidates[e.candidate]
        began, ended = copy.started_ns, e.at_ns
        if copy.operation is None:
            return  # it was cancelled before, so nothing was copied
        operation = state.operations[copy.operation]
        owner = None if copy.owner is None else state.slots.get(copy.owner)
        self._row("transfers", e, (
            copy.owner, copy.request if owner is None else owner.request, copy.route.label,
            operation.blocks or len(copy.hashes),  # a connector's copy names no places
            None if began is None else began - copy.planned_ns, None if began is None else ended - began,
            e.status.label,
        ))

    def _row(self, table: str, e: ev.Event, values: tuple[Any, ...]) -> None:
        if e.seq >= self._chunk_ends:
            self._go_on(e.seq)
        at_ns = self._anchor_ns + e.at_ns
        key = table, at_ns // DAY_NS
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = FileRows(table)
        assert isinstance(rows, FileRows)
        rows.rows.append((e.seq, at_ns, *values))


def _seen(e: ev.BlocksSeen, state: CacheState) -> Counter[Block]:
    """The places of the blocks that this event tells about."""
    if e.cleared:
        return _resident(state.pools)
    return _resident([state.pools[e.pool]], {*unpack_hashes(e.stored), *unpack_hashes(e.removed)})


def _resident(pools: Iterable[PoolFacts], keys: Set[int] | None = None) -> Counter[Block]:
    """How many places of each pool hold each block, or each of ``keys``."""
    found: Counter[Block] = Counter()
    for pool in pools:
        number, tier, content = pool.info.pool, pool.info.tier, pool.content
        for key in pool.by_hash if keys is None else keys & pool.by_hash.keys():
            if content[pool.by_hash[key]] == READY:
                found[number, tier, key] = 1
            for place in pool.copies.get(key, ()):
                found[number, tier, key] += content[place] == READY
    return found
