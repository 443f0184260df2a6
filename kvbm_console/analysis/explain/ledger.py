"""The ledger of blocks: everything that happened to the content of some sequence hashes.

Law of this file: the ledger records and does not judge. An entry names the event; a gap is an entry too.
"""

from typing import Final

import msgspec

from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.waits import available, below, daemons, serves
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.ids import CandidateStatus, ReleaseReason, SkipReason, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import WRITING
from kvbm_console.stream.feed import GapSeen

ENTRIES_PER_HASH_MAX: Final = 4_096
"""A block that comes and goes more often keeps its newest entries; the oldest are forgotten."""
STORED: Final = frozenset({"filled", "ready", "seen", "known"})
"""Entries after which the content can be read somewhere."""
GONE: Final = frozenset({"evicted", "dropped", "unkept", "reset", "unseen"})
"""Entries after which a place has lost it."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An event of one hash. ``left`` are the tiers where the hash could be read afterwards."""

    what: str
    seq: int
    at_ns: int
    kind: str
    """Kind of the event; empty for a gap and for blocks that were resident at a snapshot."""
    tier: Tier | None = None
    left: tuple[Tier, ...] = ()
    slot: int | None = None
    """The slot of the block, or the slot that wanted the room."""
    operation: int | None = None
    candidate: int | None = None
    why: str = ""
    copies_of: tuple[int, ...] = ()
    """The slots that had computed the copied blocks, for an eviction that made room for a copy."""
    room: tuple[Tier, int] | None = None
    """The tier that the pool of an eviction is copied down to, and the available places there."""


def _room_below(state: CacheState, pool: int) -> tuple[Tier, int] | None:
    lower = below(state, state.pools[pool])
    return None if lower is None else (lower.info.tier, available(lower))


class BlockLedger(Visitor):
    """Entries of ``wanted`` hashes in the pools that serve the engine ``source``, and the names of all slots."""

    def __init__(self, wanted: set[int], source: int) -> None:
        super().__init__()
        self.wanted = wanted
        self.source = source
        self.entries: dict[int, list[Entry]] = {key: [] for key in wanted}
        self.requests: dict[int, str] = {}
        """Slot to request, of all slots that the evidence names."""
        self.known_from = 0
        """Number of the first event whose effect is known."""
        self._planned: dict[int, list[int]] = {}
        """Open candidate to its wanted hashes."""
        self._operation_of: dict[int, int] = {}
        self._failures: dict[int, str] = {}
        """Candidate to the error of its mover."""
        self._owners: dict[tuple[int, int], int] = {}
        """(pool, place) to the slot that computed the last block stored there."""
        self._making_room: list[tuple[int, int]] = []
        """(cause, hash) evicted for a copy that is not named yet."""
        self.before = {
            ev.BlocksEvicted: self._evicted, ev.BlocksDropped: self._dropped, ev.ResetDone: self._reset,
            ev.SlotOpened: self._opened, ev.SlotCloned: self._opened, ev.CandidateEnded: self._ended,
            ev.OperationReported: self._reported,
        }
        self.after = {
            ev.BlocksFilled: self._filled, ev.BlocksReserved: self._reserved, ev.BlocksReady: self._ready,
            ev.CandidatePlanned: self._planned_for, ev.CandidateEvaluated: self._evaluated,
            ev.CandidateSkipped: self._skipped, ev.CandidatePromoted: self._promoted, ev.BlocksSeen: self._seen,
        }

    def name(self, slot: int | None) -> str | None:
        """The request of a slot."""
        return None if slot is None else self.requests.get(slot, f"slot {slot}")

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Note the blocks that are resident at the beginning, or again after a gap."""
        if gap is None:
            self.known_from = state.seq
        for slot in state.slots.values():
            self.requests[slot.slot] = slot.request
        for key in self.wanted:
            left = self._residency(state, key)
            if gap is not None:
                self._put(key, Entry(
                    what="gap", seq=gap.last, at_ns=state.at_ns, kind="", left=left,
                    why=f"events {gap.first} to {gap.last} are not in the evidence",
                ))
            elif left:
                self._put(key, Entry(what="known", seq=state.seq, at_ns=state.at_ns, kind="", left=left))
        self._planned = {
            candidate.candidate: [key for key in candidate.hashes if key in self.wanted]
            for candidate in state.candidates.values()
        }
        self._operation_of = {copy.candidate: copy.operation for copy in state.operations.values()}

    def _put(self, key: int, entry: Entry) -> None:
        entries = self.entries[key]
        entries.append(entry)
        if len(entries) > ENTRIES_PER_HASH_MAX:
            del entries[0]

    def _mine(self, column: bytes) -> list[int]:
        return [key for key in unpack_hashes(column) if key in self.wanted]

    def _serves(self, pool: int, state: CacheState) -> bool:
        return serves(state, state.pools[pool], self.source)

    def _residency(self, state: CacheState, key: int) -> tuple[Tier, ...]:
        """The tiers where the engine can read this hash, nearest first."""
        return tuple(sorted({
            pool.info.tier for pool in state.pools
            if pool.ready_place(key) is not None and serves(state, pool, self.source)
        }))

    # --- events ------------------------------------------------------------------------------------------------------

    def _opened(self, e: ev.SlotOpened | ev.SlotCloned, state: CacheState) -> None:
        self.requests[e.slot] = e.request

    def _filled(self, e: ev.BlocksFilled, state: CacheState) -> None:
        ids, hashes = unpack_ids(e.ids), unpack_hashes(e.hashes)
        tier = state.pools[e.pool].info.tier
        at = 0
        for slot, count in zip(e.slots, e.counts, strict=True):
            for place in ids[at : at + count]:
                self._owners[e.pool, place] = slot
            for key in hashes[at : at + count]:
                if key in self.wanted and self._serves(e.pool, state):
                    self._put(key, Entry(
                        what="filled", seq=e.seq, at_ns=e.at_ns, kind="BlocksFilled", tier=tier,
                        left=self._residency(state, key), slot=slot,
                    ))
            at += count

    def _reserved(self, e: ev.BlocksReserved, state: CacheState) -> None:
        for key in self._mine(e.hashes) if self._serves(e.pool, state) else ():
            self._put(key, Entry(
                what="writing", seq=e.seq, at_ns=e.at_ns, kind="BlocksReserved", tier=state.pools[e.pool].info.tier,
                left=self._residency(state, key), operation=e.operation,
            ))

    def _ready(self, e: ev.BlocksReady, state: CacheState) -> None:
        pool = state.pools[e.pool]
        for place in unpack_ids(e.ids):
            key = pool.hash_of[place]
            if key in self.wanted and self._serves(e.pool, state):
                self._put(key, Entry(
                    what="ready", seq=e.seq, at_ns=e.at_ns, kind="BlocksReady", tier=pool.info.tier,
                    left=self._residency(state, key), operation=e.operation,
                ))

    def _left_without(self, state: CacheState, pool: int, places: list[int], key: int) -> tuple[Tier, ...]:
        """The tiers where the hash can still be read when these places are gone."""
        gone = set(places)
        left = set()
        for other in state.pools:
            for place in other.places_of(key) if serves(state, other, self.source) else ():
                if other.content[place] != WRITING and not (other.info.pool == pool and place in gone):
                    left.add(other.info.tier)
        return tuple(sorted(left))

    def _evicted(self, e: ev.BlocksEvicted, state: CacheState) -> None:
        places: list[int] | None = None
        for key in self._mine(e.hashes) if self._serves(e.pool, state) else ():
            if e.for_slot is None:
                self._making_room.append((e.cause, key))
            places = unpack_ids(e.ids) if places is None else places
            self._put(key, Entry(
                what="evicted", seq=e.seq, at_ns=e.at_ns, kind="BlocksEvicted", tier=state.pools[e.pool].info.tier,
                left=self._left_without(state, e.pool, places, key), slot=e.for_slot, why=e.rule.label,
                room=_room_below(state, e.pool),
            ))

    def _dropped(self, e: ev.BlocksDropped, state: CacheState) -> None:
        if e.why is ReleaseReason.EPOCH or not self._serves(e.pool, state):
            return
        pool = state.pools[e.pool]
        places = unpack_ids(e.ids)
        candidate = state.operations[e.operation].candidate if e.operation in state.operations else None
        for place in places:
            key = pool.hash_of[place]
            if key in self.wanted and e.why is ReleaseReason.RESET:
                self._put(key, Entry(
                    what="reset", seq=e.seq, at_ns=e.at_ns, kind="BlocksDropped", tier=pool.info.tier,
                    left=self._left_without(state, e.pool, places, key), why="prefix cache",
                ))
            elif key in self.wanted and e.why is ReleaseReason.NOT_KEPT:
                self._put(key, Entry(
                    what="unkept", seq=e.seq, at_ns=e.at_ns, kind="BlocksDropped", tier=pool.info.tier,
                    left=self._left_without(state, e.pool, places, key), slot=self._owners.get((e.pool, place)),
                ))
            elif key in self.wanted:
                self._put(key, Entry(
                    what="dropped", seq=e.seq, at_ns=e.at_ns, kind="BlocksDropped", tier=pool.info.tier,
                    left=self._left_without(state, e.pool, places, key), candidate=candidate,
                    operation=None if e.operation < 0 else e.operation,
                    why=self._failures.get(-1 if candidate is None else candidate, ""),
                ))

    def _reset(self, e: ev.ResetDone, state: CacheState) -> None:
        for key in self.wanted:
            if self._residency(state, key):
                self._put(key, Entry(what="reset", seq=e.seq, at_ns=e.at_ns, kind="ResetDone", why=e.mode.label))
        self._planned.clear()

    def _seen(self, e: ev.BlocksSeen, state: CacheState) -> None:
        if not self._serves(e.pool, state):
            return
        tier = state.pools[e.pool].info.tier
        stored = set(self._mine(e.stored))
        gone = self.wanted if e.cleared else set(self._mine(e.removed))
        for key in sorted(stored | gone):
            left = self._residency(state, key)
            if key in stored:
                self._put(key, Entry(
                    what="seen", seq=e.seq, at_ns=e.at_ns, kind="BlocksSeen", tier=tier, left=left
                ))
            elif self.entries[key] and tier in self.entries[key][-1].left:
                self._put(key, Entry(
                    what="unseen", seq=e.seq, at_ns=e.at_ns, kind="BlocksSeen", tier=tier, left=left,
                    why="cleared" if e.cleared else "stream",
                ))

    # --- candidates that would copy it down ---------------------------------------------------------------------------

    def _planned_for(self, e: ev.CandidatePlanned, state: CacheState) -> None:
        if e.route.is_load or (e.candidate - self.source + 1) % daemons(state, self.source):
            return
        mine = self._mine(e.hashes)
        if mine:
            self._planned[e.candidate] = mine
            self._note(e, state, "planned", e.route.label)

    def _evaluated(self, e: ev.CandidateEvaluated, state: CacheState) -> None:
        if e.filtered is not None and e.filtered is not SkipReason.ALREADY_CACHED:
            self._note(e, state, "filtered", e.filtered.label)

    def _skipped(self, e: ev.CandidateSkipped, state: CacheState) -> None:
        self._note(e, state, "skipped", e.reason.label)
        self._planned.pop(e.candidate, None)

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        self._operation_of[e.candidate] = e.operation
        owners: dict[int, None] = {}
        sources, targets = unpack_ids(e.sources), unpack_ids(e.targets)
        # The places of a followed engine are known on one side only, so no owner passes on to the copy.
        for source, target in zip(sources, targets, strict=bool(sources and targets)):
            owner = self._owners.get((e.source_pool, source))
            if owner is not None:
                self._owners[e.target_pool, target] = owner
                owners[owner] = None
        for cause, key in self._making_room:
            entries = self.entries[key]
            if cause == e.cause and entries and entries[-1].what == "evicted" and entries[-1].operation is None:
                entries[-1] = msgspec.structs.replace(entries[-1], operation=e.operation, copies_of=tuple(owners))
        self._making_room = []
        self._note(e, state, "promoted", f"op {e.operation}")

    def _reported(self, e: ev.OperationReported, state: CacheState) -> None:
        if not e.ok:
            candidate = state.operations[e.operation].candidate
            self._failures[candidate] = f"rank {e.rank} reported: {e.error or 'no reason'}"

    def _ended(self, e: ev.CandidateEnded, state: CacheState) -> None:
        if e.status is not CandidateStatus.COMPLETED:
            self._note(e, state, "ended", e.status.label)
        self._planned.pop(e.candidate, None)
        self._operation_of.pop(e.candidate, None)
        self._failures.pop(e.candidate, None)

    def _note(
        self, e: ev.CandidatePlanned | ev.CandidateEvaluated | ev.CandidateSkipped | ev.CandidatePromoted
        | ev.CandidateEnded, state: CacheState, what: str, why: str,
    ) -> None:
        for key in self._planned.get(e.candidate, ()):
            self._put(key, Entry(
                what=what, seq=e.seq, at_ns=e.at_ns, kind=type(e).__name__, left=self._residency(state, key),
                candidate=e.candidate, operation=self._operation_of.get(e.candidate), why=why,
            ))
