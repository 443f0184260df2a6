"""The course of one slot: its look-ups with what stood where, its admissions, and the parts of its time.

Law of this file: time is cut at events and every piece has a name, so that the pieces add up to the whole.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from kvbm_console.analysis import lives
from kvbm_console.analysis.explain.model import Clone, Part, Spent, Wait
from kvbm_console.analysis.lives import Lives, Transfer
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.waits import serves
from kvbm_console.core import events as ev
from kvbm_console.core.describe import mismatch
from kvbm_console.core.ids import Authority, SlotState, Tier
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY, WRITING, PoolFacts, window_blocks
from kvbm_console.stream.feed import GapSeen

QUEUE, LOOKUP, HOLD, TRANSFER_QUEUE, WIRE, COMPUTE, SKIPPED, RELEASE, UNKNOWN = (
    "queue", "lookup", "hold", "transfer queue", "wire", "compute", "skipped", "release", "unknown",
)
"""The parts of a request's time. ``queue`` is admission and scheduling, ``lookup`` blocks that another request still
writes, ``transfer queue`` and ``wire`` its copies before and after they start. ``skipped`` are iterations that left it
out, ``release`` is the end of a finished request without a copy, and ``unknown`` is a gap."""
WRONG_MAX: Final = 64
"""Mismatches kept per request: each names a copy, and a first mismatch is enough to begin with."""
LOOKUPS_MAX: Final = 1_000
"""Answers kept of one request; only changes are recorded, so hardly any request has ten."""


class Stood(msgspec.Struct, frozen=True):
    """The places of a block at the time of its look-up."""

    ready: tuple[Tier, ...] = ()
    writing: tuple[Tier, ...] = ()
    operation: int | None = None
    """The copy that writes the block."""
    for_slot: int | None = None
    """The slot of that copy."""


class Looked(msgspec.Struct, frozen=True):
    """One answer, and where the blocks behind the match stood: ``stood[i]`` is prompt block ``local_blocks + i``."""

    event: ev.LookupAnswered
    stood: tuple[Stood, ...]
    staged_blocks: dict[Tier, int]
    """Places of each tier that staging held already."""
    capacity: dict[Tier, int]
    watched: bool = False
    """True if the engine decided itself, and no leader."""
    groups: tuple[tuple[int, int, int], ...] = ()
    """Further groups of layers: number, attention window (0 without one), and blocks of the longest prefix that the
    group had on the device."""


class Scored(msgspec.Struct):
    """An admission as it was scored; ``hits`` change when a load fails."""

    event: ev.PrefixScored
    looked: Looked | None
    asked_again: int
    after_preemption: bool
    hits: list[int]
    lost: list[tuple[ev.HitsLost, str, int | None]] = []
    """(event, the mover's error, operation) of blocks that did not arrive."""


class Course(Visitor):
    """Follows one slot, up to ``now_ns`` if it is live and the engine's time is past the last event."""

    def __init__(self, number: int, now_ns: int | None = None) -> None:
        super().__init__()
        self.number = number
        self._now_ns = now_ns
        self.slot: SlotFacts | None = None
        """Its facts, as they were last seen."""
        self.block_tokens = 0
        self.complete = False
        self.looked: list[Looked] = []
        self.scored: list[Scored] = []
        self.asked_again = 0
        self.state: SlotState | None = None
        """The last state that it entered."""
        self.ended_ns: int | None = None
        self.clone: Clone | None = None
        self.clones: list[str] = []
        """Requests that were cloned from it."""
        self.wrong_bytes: list[str] = []
        self._copies: dict[int, Transfer] = {}
        """Its copies by candidate, also those that ended."""
        self._lives = Lives()
        """Its open copies; other slots are left out."""
        self._finishing_ns: int | None = None
        self._parts: dict[str, int] = {}
        self._since_ns = 0
        self._from_ns = 0
        self._doing = QUEUE
        self._preempted = False
        self._pending_answer = False
        self.before = {ev.SlotClosed: self._closed}
        self.after = {
            ev.SlotOpened: self._opened, ev.SlotCloned: self._opened, ev.SlotMoved: self._moved,
            ev.LookupAnswered: self._answered, ev.PrefixScored: self._scored, ev.HitsLost: self._lost,
            ev.CandidatePlanned: self._planned, ev.CandidatePromoted: self._promoted,
            ev.OperationStarted: self._started, ev.OperationReported: self._reported,
            ev.CandidateSkipped: self._candidate_over, ev.CandidateEnded: self._candidate_over,
            ev.SlotHeld: self._touched, ev.HoldParked: self._touched_all, ev.HoldReleased: self._touched,
            ev.Frozen: self._touched_all, ev.Thawed: self._touched_all, ev.ContentMismatched: self._mismatched,
        }

    # --- begin, gap, end ---------------------------------------------------------------------------------------------

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """The slot may be there already, or still, or not any more."""
        slot = state.slots.get(self.number)
        if slot is None:
            if self.slot is not None and self.ended_ns is None and gap is not None:
                self._parts[UNKNOWN] = self._parts.get(UNKNOWN, 0) + state.at_ns - self._since_ns
                self._since_ns = self.ended_ns = state.at_ns
            return
        if self.slot is None:
            self._from_ns = self._since_ns = slot.opened_ns
            self.clone = _clone(state, slot, None)
            self.clones = [other.request for other in state.slots.values() if other.parent == self.number]
        self.slot = slot
        self.block_tokens = _block_tokens(state, slot)
        self._parts[UNKNOWN] = self._parts.get(UNKNOWN, 0) + state.at_ns - self._since_ns
        self._since_ns = state.at_ns
        self._enter(slot.state, slot.since_ns)
        for number in sorted(slot.outstanding):
            facts = state.candidates[number]
            copy = self._copies.setdefault(number, Transfer(
                number, self.number, slot.request, facts.route, len(facts.hashes), facts.planned_ns, state.seq
            ))
            copy.operation, copy.started_ns, copy.status = facts.operation, facts.started_ns, facts.status
            self._lives.transfers[number] = copy
            if copy.operation is not None:
                self._lives.by_operation[copy.operation] = copy
        self._doing = self._now(state)

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """Whatever it was doing, it does until the evidence ends."""
        if self.slot is not None and self.ended_ns is None and state is not None:
            self._mark(max(state.at_ns, self._now_ns or 0))

    def _opened(self, e: ev.SlotOpened | ev.SlotCloned, state: CacheState) -> None:
        if isinstance(e, ev.SlotCloned) and e.parent == self.number:
            self.clones.append(e.request)
        if e.slot == self.number:
            self.slot = state.slots[e.slot]
            self.clone = _clone(state, self.slot, e.seq)
            self.block_tokens = _block_tokens(state, self.slot)
            self.complete = True
            self._from_ns = self._since_ns = e.at_ns
            self._enter(self.slot.state, e.at_ns)
            self._doing = self._now(state)

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        if e.slot == self.number:
            self._mark(e.at_ns)
            self.ended_ns = e.at_ns

    # --- where its time goes -----------------------------------------------------------------------------------------

    def _mark(self, at_ns: int) -> None:
        self._parts[self._doing] = self._parts.get(self._doing, 0) + at_ns - self._since_ns
        self._since_ns = at_ns

    def _touch(self, at_ns: int, state: CacheState) -> None:
        if self.number in state.slots:  # a connector may tell of a load when its request has ended
            self._mark(at_ns)
            self._doing = self._now(state)

    def _touched(self, e: ev.SlotHeld | ev.HoldReleased, state: CacheState) -> None:
        if e.slot == self.number:
            self._touch(e.at_ns, state)

    def _touched_all(self, e: ev.HoldParked | ev.Frozen | ev.Thawed, state: CacheState) -> None:
        self._touch(e.at_ns, state)

    def _now(self, state: CacheState) -> str:
        slot = state.slots[self.number]
        if state.frozen is not None or (slot.hold is not None and state.holds[slot.hold].parked):
            return HOLD
        match slot.state:
            case SlotState.PREFILLING | SlotState.DECODING:
                return COMPUTE
            case SlotState.SKIPPED_PREFILL | SlotState.SKIPPED_DECODE:
                return SKIPPED
            case SlotState.ONBOARDING:
                return self._copying(state, slot, loads_only=True) or QUEUE
            case SlotState.FINISHING:
                return self._copying(state, slot, loads_only=False) or RELEASE
            case SlotState.INITIALIZED | SlotState.PREEMPTED if self._pending_answer:
                return self._loading_below() or LOOKUP
        return QUEUE

    def _loading_below(self) -> str | None:
        """The part that its open loads from a lower tier take, while its lookup has no answer."""
        waits = None
        for copy in self._lives.transfers.values():
            if not copy.route.is_load:
                continue
            waits = TRANSFER_QUEUE
            if copy.started_ns is not None:
                return WIRE
        return waits

    def _copying(self, state: CacheState, slot: SlotFacts, *, loads_only: bool) -> str | None:
        """The part that its open copies take: on the wire as soon as a copy is; None without an open copy."""
        waits = None
        for number in slot.outstanding:
            candidate = state.candidates[number]
            if loads_only and not candidate.route.is_load:
                continue
            waits = TRANSFER_QUEUE
            if candidate.started_ns is not None:
                return WIRE
        return waits

    # --- moves, look-ups, admissions ---------------------------------------------------------------------------------

    def _enter(self, state: SlotState, at_ns: int) -> None:
        self.state = state
        if state is SlotState.FINISHING and self._finishing_ns is None:
            self._finishing_ns = at_ns

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        if e.slot == self.number:
            self._enter(e.new, e.at_ns)
            if e.new is SlotState.PREEMPTED:
                self._preempted, self._pending_answer, self.asked_again = True, False, 0
            self._touch(e.at_ns, state)

    def _answered(self, e: ev.LookupAnswered, state: CacheState) -> None:
        if e.slot != self.number:
            return
        self._pending_answer = e.answer is None
        self.asked_again += e.answer is None
        slot = state.slots[e.slot]
        others = _further_groups(state, slot)
        pools = [pool for pool in state.pools if serves(state, pool, slot.source) and pool not in others]
        stood = tuple(_stood(state, key, pools) for key in slot.hashes[e.local_blocks : slot.prompt_blocks])
        staged: dict[Tier, int] = {}
        for other in state.slots.values():
            for index, places in other.staged:
                if state.pools[index] in pools:
                    tier = state.pools[index].info.tier
                    staged[tier] = staged.get(tier, 0) + len(places)
        capacity = {pool.info.tier: pool.capacity for pool in pools}
        watched = any(
            pool.info.source == slot.source and pool.info.authority is Authority.OBSERVED for pool in state.pools
        )
        groups = tuple(
            (pool.info.group, pool.info.window, _longest(pool, slot.hashes[: slot.prompt_blocks]))
            for pool in others if pool.info.window is not None
        )
        looked = Looked(e, stood, staged, capacity, watched, groups)
        if len(self.looked) < LOOKUPS_MAX:
            self.looked.append(looked)
        else:
            self.looked[-1] = looked
        self._touch(e.at_ns, state)

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        if e.slot != self.number:
            return
        answered = [lookup for lookup in self.looked if lookup.event.answer is not None]
        looked = answered[-1] if answered and answered[-1].event.seq > self._last_scored_seq else None
        self.scored.append(Scored(e, looked, self.asked_again, self._preempted, list(e.hits), []))
        self.asked_again = 0

    @property
    def _last_scored_seq(self) -> int:
        return self.scored[-1].event.seq if self.scored else -1

    def _lost(self, e: ev.HitsLost, state: CacheState) -> None:
        if e.slot != self.number or not self.scored:
            return
        self.scored[-1].hits[e.tier - 1] -= e.blocks
        loads = [copy for copy in self._copies.values() if copy.route.source is e.tier]
        failed = next((
            f"rank {copy.error_rank} reported: {copy.error or 'no reason'}" for copy in reversed(loads)
            if copy.error_rank is not None
        ), "")
        self.scored[-1].lost.append((e, failed, loads[-1].operation if loads else None))

    def _mismatched(self, e: ev.ContentMismatched, state: CacheState) -> None:
        """A store may end behind its request, so that the name has to do."""
        mine = self.slot is not None and e.request == self.slot.request
        if (e.slot == self.number or (e.slot is None and mine)) and len(self.wrong_bytes) < WRONG_MAX:
            self.wrong_bytes.append(f"{mismatch(e)} (event {e.seq:,})")

    # --- its copies --------------------------------------------------------------------------------------------------

    def _planned(self, e: ev.CandidatePlanned, state: CacheState) -> None:
        below = e.slot is None and e.for_slot == self.number and e.route.is_load
        if e.slot == self.number or below:  # a tier below the host loads before the request's own load
            self._copies[e.candidate] = lives.planned(self._lives, e)
            self._touch(e.at_ns, state)

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        if e.candidate in self._lives.transfers:
            lives.promoted(self._lives, e)

    def _started(self, e: ev.OperationStarted, state: CacheState) -> None:
        if e.operation in self._lives.by_operation:
            lives.started(self._lives, e)
            self._touch(e.at_ns, state)

    def _reported(self, e: ev.OperationReported, state: CacheState) -> None:
        if e.operation in self._lives.by_operation:
            lives.reported(self._lives, e)

    def _candidate_over(self, e: ev.CandidateSkipped | ev.CandidateEnded, state: CacheState) -> None:
        if e.candidate in self._lives.transfers:
            lives.FOLD[type(e)](self._lives, e)
            self._touch(e.at_ns, state)

    # --- what came out -----------------------------------------------------------------------------------------------

    def spent(self) -> Spent:
        """The parts of its time, and the copies that it waited for, longest first."""
        parts = sorted(
            (Part(what, ns) for what, ns in self._parts.items() if ns), key=lambda part: (-part.ns, part.what)
        )
        until = self._since_ns
        waits = [
            Wait(
                operation=None if copy.operation is None else str(copy.operation), candidate=str(copy.candidate),
                route=copy.route.label, blocks=copy.blocks, status=copy.status.label, seq=copy.seq,
                queue_ns=(copy.started_ns or copy.ended_ns or until) - copy.planned_ns,
                wire_ns=None if copy.started_ns is None else (copy.ended_ns or until) - copy.started_ns,
            )
            for copy in self._copies.values() if self._waited_for(copy)
        ]
        return Spent(
            from_ns=self._from_ns, until_ns=until, ended=self.ended_ns is not None, complete=self.complete,
            parts=tuple(parts),
            waits=tuple(sorted(waits, key=lambda wait: -(wait.queue_ns + (wait.wire_ns or 0)))),
        )

    def _waited_for(self, copy: Transfer) -> bool:
        """Loads, and stores that were open when it finished; other stores run beside its iterations."""
        finishing = self._finishing_ns
        return copy.route.is_load or (
            finishing is not None and (copy.ended_ns is None or copy.ended_ns > finishing)
        )


def _clone(state: CacheState, slot: SlotFacts, seq: int | None) -> Clone | None:
    """The blocks that a clone shares with its parent now, as far as the parent is known."""
    if slot.parent is None:
        return None
    parent = state.slots.get(slot.parent)
    shared = None
    if parent is not None:
        pairs = zip(slot.device_blocks, parent.device_blocks, strict=False)
        shared = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs),
                      min(len(slot.device_blocks), len(parent.device_blocks)))
    return Clone(
        parent=None if parent is None else parent.request, parent_slot=str(slot.parent), seq=seq, at_ns=slot.opened_ns,
        shared_blocks=shared, own_blocks=None if shared is None else len(slot.device_blocks) - shared,
    )


def _block_tokens(state: CacheState, slot: SlotFacts) -> int:
    pool = state.pool_of(Tier.G1, slot.source) or (state.pools[0] if state.pools else None)
    return pool.info.block_tokens if pool is not None else 0


def _further_groups(state: CacheState, slot: SlotFacts) -> list[PoolFacts]:
    """The device pools of the groups of layers beside the one whose blocks the slot has."""
    devices = [pool for pool in state.pools if pool.info.source == slot.source and pool.info.tier is Tier.G1]
    whole = any(pool.info.authority is not Authority.STREAM for pool in devices)
    return [pool for pool in devices if whole and pool.info.authority is Authority.STREAM]


def _longest(pool: PoolFacts, hashes: Sequence[int]) -> int:
    """Blocks of the longest prefix of which a group has what it needs: all of it, or the window at its end."""
    window = pool.info.window or 0
    need = window_blocks(window, pool.info.block_tokens) or len(hashes)
    run = longest = 0
    for at, key in enumerate(hashes, 1):
        run = run + 1 if key in pool.by_hash else 0
        if run >= min(need, at):
            longest = at
        elif not window:
            break
    return longest


def _stood(state: CacheState, key: int, pools: Sequence[PoolFacts]) -> Stood:
    """The tiers of these pools that have a block."""
    ready: set[Tier] = set()
    writing: set[Tier] = set()
    operation = for_slot = None
    for pool in pools:
        for place in pool.places_of(key):
            if pool.content[place] == READY:
                ready.add(pool.info.tier)
            elif pool.content[place] == WRITING:
                writing.add(pool.info.tier)
                operation, for_slot = _writer(state, pool, place)
    return Stood(tuple(sorted(ready)), tuple(sorted(writing)), operation, for_slot)


def _writer(state: CacheState, pool: PoolFacts, place: int) -> tuple[int | None, int | None]:
    for operation in state.operations.values():
        if operation.target_pool == pool.info.pool and place in operation.targets:
            return operation.operation, state.candidates[operation.candidate].slot
    return None, None
