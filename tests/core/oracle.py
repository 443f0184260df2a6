"""Oracles: what must be true after every stimulus, told from the outside.

Law of this file: nothing here asks the leader why. Bytes are moved by orders, holders are counted from the engine's
and the mover's own lists, and order is read off the events.
"""

from collections import Counter

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.ids import (
    Authority,
    CandidateStatus,
    Condition,
    MissReason,
    ReleaseReason,
    SlotState,
    Tier,
    WaitPoint,
)
from kvbm_console.core.instructions import Instruction, StartTransfer
from kvbm_console.core.leader import Leader, memory
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY

from .engine_model import PARENT, WORD, EngineModel


class Bytes:
    """What really stands in every place, moved only by the engine and the mover (I16, D2, D9)."""

    def __init__(self) -> None:
        self.at: dict[tuple[int, int], int] = {}
        self._garbage = 0
        self._seen: dict[int, list[int]] = {}

    def overwrite(self, pool: int, places: list[int]) -> None:
        """Somebody writes something else there."""
        for place in places:
            self._garbage -= 1
            self.at[pool, place] = self._garbage

    def write(self, pool: int, places: list[int], hashes: list[int]) -> None:
        for place, key in zip(places, hashes, strict=True):
            self.at[pool, place] = key

    def begin(self, operation: int, pool: int, sources: list[int]) -> None:
        """A copy starts: what it reads must not change until it ends."""
        self._seen[operation] = [self.at.get((pool, place), 0) for place in sources]

    def end(self, operation: int, pools: tuple[int, int], sources: list[int], targets: list[int], failed: set[int]
            ) -> None:
        """The last rank is done; what it could not copy is garbage."""
        now = [self.at.get((pools[0], place), 0) for place in sources]
        assert now == self._seen.pop(operation), f"the sources of operation {operation} changed while it ran"
        for at, (key, target) in enumerate(zip(now, targets, strict=True)):
            if at in failed:
                self.overwrite(pools[1], [target])
            else:
                self.at[pools[1], target] = key

    def check(self, state: CacheState) -> None:
        """Every place that may be read holds the content that its hash names."""
        for pool in state.pools:
            for place in range(len(pool)):
                if pool.content[place] == READY and place not in pool.quarantined:
                    real = self.at.get((pool.info.pool, place), 0)
                    assert real == pool.hash_of[place], (
                        f"{pool.info.tier.name} place {place} is said to hold {WORD.get(pool.hash_of[place])!r} "
                        f"and holds {WORD.get(real, real)!r}"
                    )


class Holders:
    """Who holds what, counted from the engine's lists, the mover's orders and the staging told by events."""

    def check(self, state: CacheState, engine: EngineModel, device: int, orders: dict[int, StartTransfer],
              staged: dict[int, list[tuple[int, list[int]]]], undispatched: list[int]) -> None:
        expected: dict[int, Counter[int]] = {pool.info.pool: Counter() for pool in state.pools}
        for request in engine.requests.values():
            expected[device].update(request.ids)
        for slot in state.slots.values():
            if slot.state is SlotState.FINISHING:
                expected[device].update(slot.device_blocks)
        for parts in staged.values():
            for index, ids in parts:
                expected[index].update(ids)
        for operation in state.operations.values():
            order = orders.get(operation.operation)
            if order is None:
                # Not issued, or every rank has reported and a hold keeps the end: only the facts know it.
                assert operation.operation in undispatched or operation.reported
                sources, targets = operation.sources, operation.targets
            else:
                sources, targets = unpack_ids(order.sources), unpack_ids(order.targets)
            expected[operation.source_pool].update(sources)
            expected[operation.target_pool].update(targets)
        for pool in state.pools:
            found = Counter({place: refs for place, refs in enumerate(pool.refs) if refs})
            assert found == +expected[pool.info.pool], (
                f"{pool.info.tier.name}: holders {dict(found)}, oracle {dict(+expected[pool.info.pool])}"
            )
        for name, request in engine.requests.items():
            slot = state.slot_named(name)
            assert slot is not None, f"the leader lost {name!r}"
            assert slot.device_blocks == request.ids, f"{name!r}: {slot.device_blocks}, the engine says {request.ids}"


class Fates:
    """Why a hash that stands nowhere is missing: its last copy was evicted, or dropped, from the lowest tier or not."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], int] = {}
        self.of: dict[int, MissReason] = {}

    def see(self, event: ev.Event, lowest: int) -> None:
        """``lowest`` is the pool from which nothing is copied down."""
        if isinstance(event, (ev.BlocksFilled, ev.BlocksReserved)):
            for place, key in zip(unpack_ids(event.ids), unpack_hashes(event.hashes), strict=True):
                self._at[event.pool, place] = key
        elif isinstance(event, ev.BlocksEvicted) or (
            isinstance(event, ev.BlocksDropped) and event.why is not ReleaseReason.EPOCH
        ):
            gone = [self._at.pop((event.pool, place)) for place in unpack_ids(event.ids)]
            why = MissReason.EVICTED if event.pool == lowest else MissReason.NOT_OFFLOADED
            self.of.update(dict.fromkeys(set(gone) - set(self._at.values()), why))
        elif isinstance(event, ev.ResetDone):  # a new life: nothing of the old one is known any more
            self._at.clear()
            self.of.clear()

    def check(self, leader: Leader) -> None:
        """What it remembers is right; it may have forgotten when its memory is full."""
        full = len(leader.memory.older) >= memory.HISTORY_PARTS - 1
        for key in PARENT.keys() | self.of.keys():
            if not any(key in pool.by_hash for pool in leader.state.pools):
                told, why = leader.memory.why_gone(key), self.of.get(key, MissReason.NEVER_STORED)
                forgotten = full and told is MissReason.NEVER_STORED
                assert told is why or forgotten, f"{WORD.get(key)!r} is missing because {why.name}, not {told.name}"


class StagingTold:
    """Staging as told by events."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[int, list[int]]]] = {}

    def see(self, event: ev.Event) -> None:
        if isinstance(event, ev.BlocksStaged):
            self.of.setdefault(event.slot, []).append((event.pool, unpack_ids(event.ids)))
        elif isinstance(event, ev.StagingReleased):
            del self.of[event.slot]
        elif isinstance(event, ev.SlotClosed):
            assert event.slot not in self.of, f"slot {event.slot} closed with staging (D10)"


class Statuses:
    """I6: every candidate reaches exactly one terminal status, once; a batch ends once, after its last member."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        self.planned: set[int] = set()
        self.batch_of: dict[int, int] = {}
        self.batches_ended: set[int] = set()

    def see(self, event: ev.Event) -> None:
        if isinstance(event, ev.CandidatePlanned):
            assert event.candidate not in self.planned
            self.planned.add(event.candidate)
        elif isinstance(event, ev.CandidatePromoted):
            self.batch_of[event.candidate] = event.batch
        elif isinstance(event, (ev.CandidateSkipped, ev.CandidateEnded)):
            status = "skipped" if isinstance(event, ev.CandidateSkipped) else event.status.label
            assert event.candidate not in self.ended, f"candidate {event.candidate} ended twice"
            self.ended[event.candidate] = status
        elif isinstance(event, ev.BatchEnded):
            assert event.batch not in self.batches_ended, f"batch {event.batch} ended twice"
            self.batches_ended.add(event.batch)
            members = [one for one, batch in self.batch_of.items() if batch == event.batch]
            assert members
            assert all(one in self.ended for one in members), f"batch {event.batch} ended before its members"

    def check(self, state: CacheState) -> None:
        assert self.planned - set(self.ended) == set(state.candidates)
        open_batches = {batch for one, batch in self.batch_of.items() if one in state.candidates}
        assert set(state.batches) >= open_batches


def check_holds(before: CacheState, after: CacheState, events: list[ev.Event], instructions: list[Instruction]) -> None:
    """I12: a slot whose hold lasted through the whole stimulus has passed no waitable point."""
    for number, hold in before.holds.items():
        now = after.holds.get(number)
        if now is None or not hold.parked:
            continue
        assert now.parked
        slot = before.slots[hold.slot]
        mine = {one for one, candidate in before.candidates.items() if candidate.slot == hold.slot}
        for event in events:
            if hold.point is WaitPoint.LOOKUP:
                assert not (isinstance(event, ev.LookupAnswered) and event.slot == hold.slot), "looked up while held"
            elif hold.point is WaitPoint.SCHEDULE:
                moved = isinstance(event, ev.SlotMoved) and event.slot == hold.slot
                assert not moved or event.new in (SlotState.SKIPPED_DECODE, SlotState.SKIPPED_PREFILL)
            elif hold.point in (WaitPoint.EVALUATE, WaitPoint.PROMOTE):
                assert not (isinstance(event, ev.CandidatePromoted) and event.candidate in mine), "promoted while held"
            elif hold.point is WaitPoint.COMPLETION:
                assert not (
                    isinstance(event, ev.CandidateEnded) and event.candidate in mine
                    and event.status is not CandidateStatus.CANCELLED
                ), "completed while held"
            elif hold.point is WaitPoint.RELEASE:
                assert not (isinstance(event, ev.SlotClosed) and event.slot == hold.slot), "closed while held"
        if hold.point is WaitPoint.DISPATCH:
            for instruction in instructions:
                assert not (
                    isinstance(instruction, StartTransfer) and after.operations[instruction.operation].candidate in mine
                ), f"{slot.request} was dispatched while held"


def check_freeze(before: CacheState, after: CacheState, events: list[ev.Event]) -> None:
    """While the pipeline is closed, from before a stimulus to after it, nothing is promoted."""
    if before.pipeline_closed and after.pipeline_closed:
        assert not [event for event in events if isinstance(event, ev.CandidatePromoted)], "promoted while frozen"


def check_memory(leader: Leader, ever_lost: set[int]) -> None:
    """The memory that summarises facts agrees with them: unsaved places, staged counts, free places, eviction order.

    ``ever_lost`` are hashes that a tier below G1 has evicted at some time.
    """
    state, memory = leader.state, leader.memory
    for pool, mine, policy in zip(state.pools, memory.pools, leader.live_memory.policies, strict=True):
        lower = leader.below(pool)
        exposed, covered = set(), set()
        if lower is not None:
            for place in range(len(pool)):
                key = pool.hash_of[place]
                if pool.content[place] == READY and key not in lower.by_hash and place not in mine.planned:
                    (covered if pool.refs[place] else exposed).add(place)
        # A block whose copy below was evicted has been given up: it is in neither set before it is used again.
        assert set(mine.exposed) <= exposed, f"{pool.info.tier.name} exposed {list(mine.exposed)}, facts {exposed}"
        assert set(mine.covered) <= covered, f"{pool.info.tier.name} covered {list(mine.covered)}, facts {covered}"
        missing = (exposed | covered) - set(mine.exposed) - set(mine.covered)
        if not leader.config.offload_window_only:  # else the others are in neither set
            assert lower is None or {pool.hash_of[place] for place in missing} <= ever_lost, f"forgotten {missing}"
        assert all(number in state.candidates for number in mine.planned.values())
        cached = {place for place in range(len(pool)) if pool.condition(place) is Condition.CACHED}
        assert set(mine.loose) == (cached if mine.ordered else set()), f"{pool.info.tier.name} loose, facts {cached}"
        staged = sum(len(ids) for slot in state.slots.values() for index, ids in slot.staged if index == pool.info.pool)
        assert mine.staged_blocks == staged
        if pool.info.authority is Authority.LEADER:
            empty = [
                place for place in range(len(pool))
                if not pool.content[place] and not pool.refs[place] and place not in pool.quarantined
            ]
            free = [*sorted(mine.free), *range(len(pool) - mine.unused, len(pool))]
            assert free == empty, f"{pool.info.tier.name} free {free}, facts {empty}"
            full = {pool.hash_of[place] for place in range(len(pool)) if pool.content[place]}
            assert set(policy.policy.resident) == full, f"{pool.info.tier.name} {policy.export()}, facts {full}"
    open_ones = set(state.candidates)
    assert set(memory.pending) == {one for one in open_ones if state.candidates[one].operation is None}
    assert set(memory.undispatched) <= set(state.operations)
    assert set(memory.complete) <= set(state.operations)
    assert set(memory.fences) <= set(state.operations)
    assert {slot.slot for slot in state.slots.values() if slot.state is SlotState.FINISHING} == set(memory.ending)
    for table in (memory.evaluated, memory.place_limit, memory.loads, memory.lost_at, memory.stepping, memory.until):
        assert set(table) <= set(state.slots), f"memory of a slot that is gone: {table}"
    for kind, key in memory.deadlines.values():
        gone = {
            "staging": key not in state.slots or not state.slots[key].staged, "wait": key not in state.slots,
            "hold": key not in state.holds, "expiry": key not in state.breakpoints,
        }
        assert not gone.get(kind), f"a deadline for what is gone: {kind} {key}"


def check_hits(state: CacheState) -> None:
    """I14: what was found and not lost is what is not computed, for every slot that prefills its prompt first."""
    for slot in state.slots.values():
        if slot.state is SlotState.ONBOARDING:
            found = slot.anchor_tokens // state.pools[slot.device_pool or 0].info.block_tokens
            assert min(found, slot.prompt_blocks) == sum(slot.hits), (
                f"{slot.request}: {slot.anchor_tokens} tokens are not computed, hits {slot.hits}"
            )
        assert min(slot.hits) >= 0


def tiers_of(state: CacheState) -> dict[str, set[str]]:
    """Words that may be read, by tier: what a person wants to see when a test fails."""
    return {
        Tier(pool.info.tier).name: {WORD[pool.hash_of[at]] for at in range(len(pool)) if pool.content[at] == READY}
        for pool in state.pools
    }
