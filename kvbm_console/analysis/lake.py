"""The lake: blocks, lookups, copies and requests of many engines as Parquet files, for questions in SQL.

    LAKE/blocks/day=2026-11-23/engine=prod-3/9f21c0-00000004.parquet
         lookups/...      transfers/...      requests/...

A file holds the rows of ``CHUNK_EVENTS`` events of one run of one engine, on one day of the wall's clock (UTC). Its
name follows from its events, so rows that are made again replace themselves (``lake_files``).

Law of this file: the stored rows of a block less its evicted rows are the places that hold it, after every event.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.analysis.admissions import FirstMisses
from kvbm_console.analysis.lake_questions import TABLES
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY, PoolFacts
from kvbm_console.stream.feed import GapSeen

CHUNK_EVENTS: Final = 250_000
"""Events of a file: a few megabytes, and about a minute of a busy engine."""
DAY_NS: Final = 86_400 * SECOND_NS
_WHOLE: Final = (
    ev.PoolKnown, ev.BlocksDropped, ev.BlocksQuarantined, ev.SourceLost, ev.DeviceBlocksReplaced, ev.ResetDone,
)
"""Rare events that change blocks in ways of their own: all places are compared before and after."""


Block = tuple[int, str, int]
"""A pool, its tier, and the hash of a block there."""
Write = Callable[[str, int, int, list[list[Any]]], None]
"""Takes (table, chunk, day, columns) of a file, as far as its events were seen."""


class LiveRequest(msgspec.Struct):
    """The part of a live request that its slot does not keep."""

    first_token_ns: int | None = None
    lost_blocks: int = 0
    """Prompt blocks that were found, and whose load failed."""


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
        self._rows: dict[tuple[str, int], list[list[Any]]] = {}
        """(table, day) to the columns of the chunk."""
        self._chunk = 0
        self._seq = 0
        """The event that is folded now."""
        self._known: Counter[Block] = Counter()
        """Places that hold each block, as the rows so far tell."""
        self._misses = FirstMisses()
        self._live: defaultdict[int, LiveRequest] = defaultdict(LiveRequest)
        self._waits: set[int] = set()
        """Live slots whose arrival was seen and that have no first token."""
        self.every = self._next
        self.before = {
            ev.BlocksEvicted: self._evicted, ev.SlotClosed: self._closed, ev.CandidateEnded: self._copied,
        }
        self.after = {
            ev.BlocksFilled: self._filled, ev.BlocksReady: self._ready, ev.BlocksSeen: self._seen,
            ev.LookupAnswered: self._looked_up, ev.PrefixScored: self._scored, ev.HitsLost: self._lost,
            ev.SlotOpened: self._opened, ev.SlotMoved: self._moved,
            **dict.fromkeys(_WHOLE, self._compare),
        }

    def _next(self, e: ev.Event, state: CacheState) -> None:
        self._seq = e.seq
        if e.seq // CHUNK_EVENTS != self._chunk:
            self.flush()
            self._rows.clear()
            if self._began is not None and self._began <= self._chunk * CHUNK_EVENTS:
                self._whole(self._chunk)
            self._chunk = e.seq // CHUNK_EVENTS

    def flush(self) -> None:
        """Write the rows of the present chunk; they are written again with those that follow."""
        for (table, day), columns in self._rows.items():
            self._write(table, self._chunk, day, columns)

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Blocks that are there already, and those that came and went in a gap, are told as of now."""
        self._misses.keep(state.slots)
        self._waits.clear()  # their first token may have come in the gap
        for slot in self._live.keys() - state.slots.keys():
            del self._live[slot]
        self._seq, at_ns = state.seq, state.at_ns
        if self._began is None:
            self._began = state.seq
        if not self._rows:
            self._chunk = state.seq // CHUNK_EVENTS
        self._tell(at_ns, _resident(state.pools))

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """Write the last chunk."""
        self.flush()

    # --- blocks ---

    def _block(self, at_ns: int, op: str, pool: int, tier: str, hashes: Iterable[int], slot: int | None) -> None:
        columns = self._columns("blocks", at_ns)
        keys, change = list(hashes), 1 if op == "stored" else -1
        for key in keys:
            self._known[pool, tier, key] += change
        for column, value in zip(columns, (self._seq, self._anchor_ns + at_ns, op, tier, None, slot), strict=True):
            column += keys if value is None and column is columns[4] else [value] * len(keys)

    def _columns(self, table: str, at_ns: int) -> list[list[Any]]:
        key = table, (self._anchor_ns + at_ns) // DAY_NS
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = [[] for _ in TABLES[table]]
        return found

    def _filled(self, e: ev.BlocksFilled, state: CacheState) -> None:
        hashes, at, tier = unpack_hashes(e.hashes), 0, _tier(state.pools[e.pool])
        if not e.slots:
            self._block(e.at_ns, "stored", e.pool, tier, hashes, None)
        for slot, count in zip(e.slots, e.counts, strict=True):
            self._block(e.at_ns, "stored", e.pool, tier, hashes[at : at + count], slot)
            at += count

    def _evicted(self, e: ev.BlocksEvicted, state: CacheState) -> None:
        pool = state.pools[e.pool]
        content = [place for place in unpack_ids(e.ids) if pool.content[place] == READY]
        self._block(e.at_ns, "evicted", e.pool, _tier(pool), map(pool.hash_of.__getitem__, content), e.for_slot)

    def _ready(self, e: ev.BlocksReady, state: CacheState) -> None:
        pool = state.pools[e.pool]
        operation = state.operations.get(e.operation)
        slot = None if operation is None else state.candidates[operation.candidate].slot
        content = [place for place in unpack_ids(e.ids) if pool.content[place] == READY]
        self._block(e.at_ns, "stored", e.pool, _tier(pool), map(pool.hash_of.__getitem__, content), slot)

    def _seen(self, e: ev.BlocksSeen, state: CacheState) -> None:
        if e.cleared:
            self._tell(e.at_ns, _resident(state.pools))
            return
        pool = state.pools[e.pool]
        keys = {*unpack_hashes(e.stored), *unpack_hashes(e.removed)}
        now = _resident([pool], keys)
        before = {(e.pool, _tier(pool), key) for key in keys}
        self._tell(e.at_ns, now, Counter({block: self._known[block] for block in before if self._known[block]}))

    def _compare(self, e: ev.Event, state: CacheState) -> None:
        self._tell(e.at_ns, _resident(state.pools))

    def _tell(self, at_ns: int, now: Counter[Block], before: Counter[Block] | None = None) -> None:
        known = +self._known if before is None else before
        for op, change in (("evicted", known - now), ("stored", now - known)):
            for (pool, tier, key), count in change.items():
                self._block(at_ns, op, pool, tier, [key] * count, None)

    # --- lookups, copies, requests ---

    def _looked_up(self, e: ev.LookupAnswered, state: CacheState) -> None:
        self._misses.looked_up(e)

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        slot = state.slots[e.slot]
        miss = self._misses.scored(e, slot)
        missed = (None, 0, None) if miss is None else (miss.key, miss.blocks, miss.why.label)
        self._row("lookups", e.at_ns, (e.slot, slot.request, e.prompt_blocks, *e.hits, *missed))

    def _lost(self, e: ev.HitsLost, state: CacheState) -> None:
        self._live[e.slot].lost_blocks += e.blocks

    def _opened(self, e: ev.SlotOpened, state: CacheState) -> None:
        self._waits.add(e.slot)

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        if e.new is SlotState.DECODING and e.slot in self._waits:
            self._waits.discard(e.slot)
            self._live[e.slot].first_token_ns = self._anchor_ns + e.at_ns

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        slot, course = state.slots[e.slot], self._live.pop(e.slot, LiveRequest())
        self._misses.closed(e.slot)
        self._waits.discard(e.slot)
        self._row("requests", e.at_ns, (
            e.slot, slot.request, self._anchor_ns + slot.opened_ns, course.first_token_ns, slot.prompt_tokens,
            slot.prompt_blocks, slot.preemptions, course.lost_blocks,
            None if slot.reason is None else slot.reason.label,
        ))

    def _copied(self, e: ev.CandidateEnded, state: CacheState) -> None:
        copy = state.candidates[e.candidate]
        began, ended = copy.started_ns, e.at_ns
        if copy.operation is None:
            return  # it was cancelled before, so nothing was copied
        places = len(state.operations[copy.operation].targets)
        owner = None if copy.owner is None else state.slots.get(copy.owner)
        self._row("transfers", ended, (
            copy.owner, copy.request if owner is None else owner.request, copy.route.label,
            places or len(copy.hashes),  # a connector's copy names no places
            None if began is None else began - copy.planned_ns, None if began is None else ended - began,
            e.status.label,
        ))

    def _row(self, table: str, at_ns: int, values: Sequence[Any]) -> None:
        columns = self._columns(table, at_ns)
        for column, value in zip(columns, (self._seq, self._anchor_ns + at_ns, *values), strict=True):
            column.append(value)


def _tier(pool: PoolFacts) -> str:
    return pool.info.tier.label


def _resident(pools: Iterable[PoolFacts], keys: Iterable[int] | None = None) -> Counter[Block]:
    """How many places of each pool hold each block, or each of ``keys``."""
    found: Counter[Block] = Counter()
    for pool in pools:
        for key in pool.by_hash if keys is None else keys:
            count = sum(pool.content[place] == READY for place in pool.places_of(key))
            if count:
                found[pool.info.pool, _tier(pool), key] = count
    return found
