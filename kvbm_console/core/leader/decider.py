"""The decider that handlers write with: facts, memory, the gate, and the two verbs ``emit`` and ``ask``.

Law of this file: a handler checks everything and then emits, so ``Refused`` is raised only before the first event. An
event is applied to the facts the moment it is emitted, so later decisions of the same stimulus see it.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse
from typing import Concatenate, Final, ParamSpec

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.breakpoints import STEPPED, Gate, Moment
from kvbm_console.core.columns import gather, pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.describe import describe, slots_of
from kvbm_console.core.errors import InternalError, Refused
from kvbm_console.core.ids import (
    AGE_BOUNDS_NS,
    Authority,
    Clock,
    EvictRule,
    MissReason,
    ReleaseReason,
    Site,
    SlotState,
    Tier,
    age_class,
)
from kvbm_console.core.instructions import ClearDeadline, Instruction, Result, SetDeadline
from kvbm_console.core.leader.memory import LeaderMemory, LiveMemory
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

STORY_EVENTS_MAX: Final = 4_096
"""Events kept to tell the story of a slot when something goes wrong: a few hundred kilobytes."""
NO_LIMIT: Final = 2**62
"""An iteration that is never reached."""
P = ParamSpec("P")


class Outcome(msgspec.Struct):
    """The outcome of a stimulus: the caller's result, the events that became true, and instructions to the shell."""

    result: Result | None
    events: list[ev.Event]
    instructions: list[Instruction]


class Decider:
    """Facts, memory and gate of one host, with the verbs that handlers use."""

    def __init__(self, config: LeaderConfig, state: CacheState | None = None, live: LiveMemory | None = None) -> None:
        self.config = config
        self.state = state or CacheState()
        self.memory: LeaderMemory
        """The leader's memory beside the facts, that of ``live_memory``."""
        self.live_memory = live or LiveMemory(config.eviction)
        self.least_limit = 0
        """At most the smallest ``memory.place_limit``: derived, and put right when an iteration reaches it."""
        self.safe_places: dict[int, int] = {}
        """Engine's pool to at least how many places it can give away before a block is lost. Derived by
        ``offloads``, which looks again when it falls below the reserve."""
        self.in_order: set[int] = set()
        """Engine's pools whose ``exposed`` places stand in the order of ``loose``. Derived by ``offloads``."""
        self._below_of: list[PoolFacts] = []
        self._below: list[PoolFacts | None] = []
        self._lower: list[PoolFacts] = []
        """Results of ``look_at_pools`` and the pools that they belong to, read a dozen times per request."""
        self.gate: Gate | None = None
        self.watched: frozenset[int] = frozenset()
        """Sources that are only watched: derived from the pools."""
        self.observer: Callable[[Moment, SlotFacts], None] | None = None
        """Called at every watched site before its breakpoints are; it decides nothing."""
        self.meter: Callable[[], int] | None = None
        """A clock of the shell that measures the cost of conditions; no decision depends on it."""
        self.condition_ns: dict[int, int] = {}
        self.evictions: Counter[tuple[Tier, EvictRule]] = Counter()
        """Blocks given up by tier and deciding rule, for metrics; no aid, so a restored leader counts from 0."""
        self.lost_hits: Counter[Tier] = Counter()
        """Hits taken back by tier, likewise."""
        self.readmitted_blocks = self.readmitted_hits = 0
        """Prompt blocks of admissions after a preemption, and those found in any tier when they were admitted,
        likewise."""
        self.n = 0
        self.at_ns = 0
        self.source = 0
        self.entry = 0
        self.events: list[ev.Event] = []
        self.instructions: list[Instruction] = []
        self.recent: deque[ev.Event] = deque(maxlen=STORY_EVENTS_MAX)
        self.look_at_pools()
        self.rearm()

    @property
    def live_memory(self) -> LiveMemory:
        """The memory with its eviction policies, ready to decide."""
        return self._live_memory

    @live_memory.setter
    def live_memory(self, live: LiveMemory) -> None:
        self._live_memory = live
        self.memory = live.memory  # asked for some hundred times per request

    def ids(self, places: Iterable[int]) -> bytes:
        """A column of block ids for an event or an instruction."""
        return pack_ids(places)

    def hashes(self, keys: Iterable[int]) -> bytes:
        """A column of sequence hashes."""
        return pack_hashes(keys)

    # --- the two verbs ---------------------------------------------------------------------------

    def emit(self, kind: Callable[Concatenate[int, int, int, P], ev.Event], *args: P.args, **kwargs: P.kwargs) -> None:
        """Make an event true: build it with the next seq, apply it, and add it to the outcome."""
        state = self.state
        event = kind(state.seq, self.at_ns, self.n, *args, **kwargs)
        state.apply(event)
        self.events.append(event)

    def ask(self, instruction: Instruction) -> None:
        """Ask the shell; executed after this stimulus, in order."""
        self.instructions.append(instruction)

    def look_at_pools(self) -> None:
        """Find the watched sources and the pool below each pool, after a change of the pools."""
        self.safe_places.clear()
        self.in_order.clear()
        pools = self._below_of = self.state.pools
        watched = [pool for pool in pools if pool.info.authority is Authority.OBSERVED]
        ours = [pool for pool in pools if pool.info.authority is Authority.LEADER]
        self.watched = frozenset(pool.info.source for pool in watched)
        self._lower = sorted(ours, key=lambda pool: pool.info.tier)
        # The leader copies no blocks of a watched pool.
        self._below = [
            None if pool in watched else next((lower for lower in ours if lower.info.tier > pool.info.tier), None)
            for pool in pools
        ]
        if self.config.by_order:
            for pool, mine, lower in zip(pools, self.memory.pools, self._below, strict=False):
                mine.ordered = pool.info.authority is Authority.ENGINE and lower is not None

    # --- look-ups that refuse --------------------------------------------------------------------

    def live(self, request: str) -> SlotFacts:
        """The slot of a request that is not finished; refuses an unknown request."""
        number = self.state.slot_of.get(request)
        if number is None:
            raise Refused(f"request {request!r} is not known")
        return self.state.slots[number]

    def device_pool(self, source: int) -> PoolFacts:
        """The G1 pool of an engine; refuses when it has declared none."""
        pool = self.state.pool_of(Tier.G1, source)
        if pool is not None and pool.info.authority is Authority.STREAM:  # of another group of layers
            pool = next((own for own in self.state.pools if own.info.source == source
                         and own.info.authority in (Authority.ENGINE, Authority.OBSERVED)), None)
        if pool is None:
            raise Refused(f"source {source} has declared no G1 pool of its own")
        return pool

    def block_tokens_of(self, source: int) -> int:
        """Tokens in a block of this engine: an engine that is only watched has a size of its own."""
        return self.device_pool(source).info.block_tokens if source in self.watched else self.config.block_tokens

    def below(self, pool: PoolFacts) -> PoolFacts | None:
        """The pool that receives copies down from this pool: the next lower tier that the leader decides."""
        if self._below_of is not self.state.pools:
            self.look_at_pools()
        return self._below[pool.info.pool]

    def in_time(self, pool: PoolFacts) -> int | None:
        """How many blocks of this pool can be copied down in time, without end if copies queue; None if not known."""
        return self.memory.pools[pool.info.pool].in_time() if self.config.offload_link_busy == "skip" else sys.maxsize

    def lower_pools(self) -> Sequence[PoolFacts]:
        """The pools that the leader decides, nearest first."""
        if self._below_of is not self.state.pools:
            self.look_at_pools()
        return self._lower

    def last_iteration(self, source: int) -> int:
        """The last iteration that this engine formed, as it numbers them."""
        own = self.memory.iterations
        return own.get(source, 0) if own else self.state.iteration

    # --- slots -----------------------------------------------------------------------------------

    def note_place(self, slot: SlotFacts) -> None:
        """Remember up to which iteration a decoding slot has a place for its token, and may have one (I15)."""
        if slot.state is SlotState.DECODING and slot.source not in self.watched:
            room = slot.end_block * self.config.block_tokens
            if slot.output_limit and slot.prompt_tokens + slot.output_limit < room:
                room = slot.prompt_tokens + slot.output_limit
            limit = slot.anchor_iteration + room - slot.anchor_tokens
            self.memory.place_limit[slot.slot] = limit
            if limit < self.least_limit:
                self.least_limit = limit
        else:
            self.memory.place_limit.pop(slot.slot, None)

    def release_device_blocks(self, slot: SlotFacts, why: ReleaseReason) -> None:
        """The slot gives up all device blocks, deepest first."""
        if not slot.end_block:
            return
        assert slot.device_pool is not None
        pool = self.state.pools[slot.device_pool]
        places = list(slot.device_blocks)
        self.emit(ev.DeviceBlocksReleased, slot.slot, self.ids(places), why)
        self.live_memory.let_go(pool, places)
        if self.memory.pools[pool.info.pool].ordered:
            self.mark_dirty(pool)  # the blocks that its request held can be evicted now

    def release_passed(self, slot: SlotFacts, count: int) -> None:
        """The slot gives up its first ``count`` device blocks, which its attention window has passed."""
        assert slot.device_pool is not None
        pool, places = self.state.pools[slot.device_pool], slot.device_blocks[:count]
        self.emit(ev.DeviceBlocksReleased, slot.slot, self.ids(places), ReleaseReason.PAST_WINDOW)
        self.live_memory.let_go(pool, places)
        if self.memory.pools[pool.info.pool].ordered:
            self.mark_dirty(pool)

    def release_staging(self, slot: SlotFacts, why: ReleaseReason) -> None:
        """The slot gives up its staged blocks, and with them their deadline."""
        if not slot.staged:
            return
        self.clear_deadline("staging", slot.slot)
        for index, places in slot.staged:
            mine = self.memory.pools[index]
            mine.staged_blocks -= len(places)
            mine.blocked = False
        staged = slot.staged
        self.emit(ev.StagingReleased, slot.slot, why)
        for index, places in staged:
            self.live_memory.let_go(self.state.pools[index], places)
            self.unblock_above(self.state.pools[index])

    # --- places ----------------------------------------------------------------------------------

    def evict(self, pool: PoolFacts, places: list[int], for_slot: int | None, rule: EvictRule) -> None:
        """Give up the content of places that have no holder."""
        hashes = gather(pool.hash_of, places)
        self.emit(ev.BlocksEvicted, pool.info.pool, self.ids(places), self.hashes(hashes), for_slot, rule)
        self.evictions[pool.info.tier, rule] += len(places)
        if self.lower_pools() or pool.info.source in self.watched:
            self.memory.pools[pool.info.pool].leave(hashes, self.at_ns)
        self.gave_up(pool, places, hashes)

    def returned(self, hashes: Sequence[int], source: PoolFacts, target: PoolFacts) -> tuple[int, int, int, int]:
        """Of the blocks that are copied up, how many G1 to G4 had evicted within the thrash window.

        A copy from G3 to G1 brings a block back to G2 as well: had it not left G2, it would have come from there.
        """
        counts = [0, 0, 0, 0]
        since_ns = self.at_ns - self.config.thrash_window_ns
        for pool in self.state.pools:
            if target.info.tier <= pool.info.tier < source.info.tier and pool.info.source in (0, target.info.source):
                counts[pool.info.tier - 1] += self.memory.pools[pool.info.pool].came_back(hashes, since_ns)
        return counts[0], counts[1], counts[2], counts[3]

    def asked_again(self, hashes: Sequence[int], device: PoolFacts) -> dict[tuple[int, int], int]:
        """(tier, class of the age) to a count of these blocks, which an admission did not find in ``device``.

        Counted are blocks that the tier evicted so long ago and does not hold.
        """
        counts: dict[tuple[int, int], int] = {}
        for pool in (device, *self.lower_pools()):
            resident, left = pool.by_hash, self.memory.pools[pool.info.pool].left_at(hashes)
            for at_ns, count in Counter(at_ns for key, at_ns in left if key not in resident).items():
                of = int(pool.info.tier), age_class(self.at_ns - at_ns)
                counts[of] = counts.get(of, 0) + count
        return dict(sorted(counts.items()))

    def score(self, slot: SlotFacts, hits: tuple[int, int, int, int], again: Sequence[int], device: PoolFacts) -> None:
        """An admission committed; ``again`` are prompt blocks that were not found in ``device``."""
        if slot.preemptions:
            self.readmitted_blocks += slot.prompt_blocks
            self.readmitted_hits += sum(hits)
            self.emit(ev.PrefixScored, slot.slot, slot.prompt_blocks, hits, readmitted=True)
            return
        asked = self.asked_again(again, device)
        self.emit(
            ev.PrefixScored, slot.slot, slot.prompt_blocks, hits, tuple(tier for tier, _ in asked),
            tuple(AGE_BOUNDS_NS[age] for _, age in asked), tuple(asked.values()),
        )

    def gave_up(self, pool: PoolFacts, places: list[int], hashes: list[int]) -> None:
        """Memory after places lost their content: free places, order, unsaved blocks above, reasons of later misses."""
        self.live_memory.evicted(pool, places)
        index = pool.info.pool
        if pool.info.authority is Authority.LEADER:
            self.live_memory.policies[index].forget(hashes)
            if pool.info.tier is Tier.G2:
                self.memory.prefetch.gave_up(hashes)
            self.free_places(pool, [place for place in places if place not in pool.quarantined])
        # A copy that was evicted below is not made again: the block is as cold above. It counts as given up, until it
        # is used again (``lookups.assign``) or, in a pool of ours, to be evicted there too (``room``).
        self._bereave_above(pool, hashes)
        gone = hashes
        for other in self.state.pools:
            gone = list(filterfalse(other.by_hash.__contains__, gone))
        # Two copies at once: the hash is gone with the last of them, as it would be one after the other.
        gone = list(dict.fromkeys(reversed(gone)))[::-1]
        if gone:
            lowest = self.below(pool) is None
            self.memory.remember(gone, MissReason.EVICTED if lowest else MissReason.NOT_OFFLOADED)

    def _bereave_above(self, pool: PoolFacts, hashes: list[int]) -> None:
        """Pools of ours may hold blocks whose copy in ``pool`` was given up; see ``PoolMemory.again``."""
        if not self.config.by_order:
            return
        for other in self._lower:
            if self.below(other) is pool and not other.by_hash.keys().isdisjoint(hashes):
                mine, place_of = self.memory.pools[other.info.pool], other.by_hash
                places = [place_of[key] for key in hashes if key in place_of]
                turn = mine.given - len(other)
                fresh = [place for place in places if mine.again.get(place, turn) <= turn]
                mine.bereft.update(dict.fromkeys(fresh))
                mine.again.update(dict.fromkeys(fresh, mine.given))

    def free_places(self, pool: PoolFacts, places: list[int]) -> None:
        """Places of a pool that the leader decides may be used again."""
        self.memory.pools[pool.info.pool].give_back(places)

    def unblock_above(self, pool: PoolFacts) -> None:
        """Room may have come up in ``pool``: pools that are copied down to it are looked at again."""
        for other in self.state.pools:
            if self.below(other) is pool:
                self.memory.pools[other.info.pool].blocked = False
                self.mark_dirty(other)

    def unsaved(self, pool: PoolFacts, places: list[int]) -> None:
        """These full places have no copy below."""
        self.live_memory.unsaved(pool, places)
        if 0 in gather(pool.refs, places):
            self.safe_places.pop(pool.info.pool, None)
            self.in_order.discard(pool.info.pool)

    def took(self, pool: PoolFacts, places: int) -> None:
        """So many places of an engine's pool, empty or cached, have a holder now."""
        index = pool.info.pool
        if index in self.safe_places:
            self.safe_places[index] -= places

    def mark_dirty(self, pool: PoolFacts) -> None:
        """Look at this pool for offloads at the end of the stimulus."""
        if pool.info.pool not in self.memory.dirty:
            self.memory.dirty.append(pool.info.pool)

    # --- the gate and holds ----------------------------------------------------------------------

    def rearm(self) -> None:
        """Build the gate anew; None when no breakpoint is armed, so that a site costs one comparison."""
        gate = Gate(self.state.breakpoints, self.meter, self.condition_ns, self.stops())
        self.gate = gate if gate.sites else None

    def stops(self) -> frozenset[Site]:
        """Sites at which a client asked a slot to stop."""
        sites = {site for site, _ in self.memory.until_site.values()}
        if self.memory.until:
            sites.add(Site.TRANSITION_DID)
        return STEPPED | sites if self.memory.stepping else frozenset(sites)

    def set_staging_deadline(self, slot: SlotFacts) -> None:
        """Start (again) the time that a match may stay staged."""
        self.clear_deadline("staging", slot.slot)
        if slot.hold is not None:
            return  # it does not run while the slot is held
        number = self.memory.deadline("staging", slot.slot)
        self.ask(SetDeadline(number, self.config.staging_deadline_ns, Clock.ENGINE))

    def clear_deadline(self, kind: str, key: int) -> None:
        """Drop the deadline of this purpose, if any."""
        number = self.memory.drop_deadline(kind, key)
        if number is not None:
            self.ask(ClearDeadline(number))

    # --- reporting errors -------------------------------------------------------------------------

    def story(self, slot: int) -> tuple[str, ...]:
        """The recent events about one slot, oldest first, as text."""
        return tuple(
            f"{event.seq} {type(event).__name__} {describe(event)}" for event in [*self.recent, *self.events]
            if slot in slots_of(event)
        )

    def bug(self, message: str, slot: int | None = None) -> InternalError:
        """An error of ours, with the story of the slot that it concerns."""
        return InternalError(message, () if slot is None else self.story(slot))
