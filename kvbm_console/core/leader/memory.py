"""The leader's memory: everything beside the facts that its decisions need.

Law of this file: memory is rebuilt by rerunning stimuli, never folded, and no event tells them. They are plain
containers in deterministic order, so that a keyframe can carry them and a restored leader goes on identically.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import repeat
from typing import Any, Final

import msgspec
import xxhash

from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.eviction.pool_policy import PoolPolicy
from kvbm_console.core.ids import Authority, MissReason, Site, SlotState
from kvbm_console.core.leader.foresight import PrefetchMemory
from kvbm_console.core.tiers import READY, PoolFacts

HISTORY_PARTS: Final = 8
HISTORY_PART: Final = 25_000
"""Hashes whose fate is remembered to explain a miss, in 8 parts of 25,000. They take 18 MB at most, and last longer
than any tier keeps a block. Parts are forgotten whole: to forget each hash as it comes back costs as much as to
remember it."""
NAMED_MAX: Final = 400_000
"""Blocks whose uses are counted for admission to the disk tier: 40 MB at most, and as many as a large disk tier has."""


LEFT_MAX: Final = 65_536
"""Evictions of a pool whose time is remembered, at least this many and at most twice as many. They take 15 MB a pool at
most and cover some seconds of a pool that thrashes. Halves are forgotten whole, as parts of the history are."""


COPIES_COUNTED: Final = 256
"""Blocks by which the speed of copies down is known; a quarter of them tells it first, which are one copy or more."""
TURN_PARTS: Final = 8
"""Copies down must end within this part of a turn: as long as the pool turns no slower than the link copies, they never
withhold a larger part of its places."""
COPY_LEAST: Final = 8
"""Fewer blocks are not worth the events of a copy, which are ten, whatever its size."""


class PoolMemory(msgspec.Struct):
    """The leader's memory of one pool."""

    free: list[int] = []
    """Empty places of a pool that the leader decides, as far as they were used before: a heap, of which the lowest is
    used first."""
    unused: int = 0
    """The last so many places of such a pool were never used: empty, too, and above all in ``free``."""
    order: list[int] = []
    """Only in keyframes that were written before there were policies: the places by recency, coldest first."""
    capacity_blocks: int = 0
    """Places that the leader decides; the capacity of its policy."""
    ranks: Any = None
    """Export of the policy, while memory is encoded or decoded; live in ``LiveMemory.policies``."""
    exposed: dict[int, None] = {}
    """Full places without a copy below and without a holder, coldest first: the next eviction loses them."""
    bereft: dict[int, None] = {}
    """Full places of a pool that the leader decides whose copy below was evicted there: copied again when they are to
    be evicted here."""
    covered: dict[int, None] = {}
    """Full places without a copy below that have a holder, in the order in which they were filled."""
    planned: dict[int, int] = {}
    """Place to the open candidate that will copy it down."""
    owner: dict[int, int] = {}
    """Device place to the slot that it was last assigned to."""
    staged_blocks: int = 0
    blocked: bool = False
    """The last copy down found no room; not tried again before the lower pool changes."""
    ordered: bool = False
    """True if ``loose`` is kept: of an engine's pool with a tier below, where the order of eviction rules offloads."""
    loose: dict[int, None] = {}
    """Full places without a holder, in the order in which the engine reuses them."""
    given: int = 0
    """Places that were given away so far."""
    reused: dict[int, list[int]] = {}
    """Slot to places without a copy below that it was given again. As of the end of the iteration they are unsaved."""
    behind: int = 0
    """Places that were given away since copies down began to run, less the blocks that these copied."""
    most_given: int = 0
    """The most that were given away at once, or ``behind``, since ``turned``."""
    most_given_before: int = 0
    """The same, in the turn before: a turn gives away as many places as the pool has."""
    turned: int = 0
    """``given`` where the current turn began."""
    looked: int = 0
    """``given`` when the next victims of the policy were last looked at."""
    wanted: int = 0
    """So many further victims must become safe, because a copy from above waits for their places."""
    left: dict[int, int] = {}
    """Sequence hash to when it was last evicted here."""
    left_before: dict[int, int] = {}
    """The half of ``left`` that is forgotten next."""
    next: dict[int, None] = {}
    """Sequence hashes that the policy would evict next, when it was last looked at: their copies below go last."""
    again: dict[int, int] = {}
    """Full places that have become ``bereft``, and ``given`` at that time. They do not become ``bereft`` again before
    they are used or the pool has given away as many places as it has. So copies are at most two for each block that
    comes."""
    unsafe: list[int] = []
    """Sequence hashes of ``next`` that had no copy below and are to be copied, coldest first."""
    turned_ns: int = 0
    turn_ns: int = -1
    """When the current turn began, and how long the turn before took; -1 in the first turn."""
    copied_blocks: int = 0
    copied_ns: int = 0
    copied_until_ns: int = 0
    """Blocks of the last copies down, the time that these took one after the other, and the end of the last."""

    @property
    def room(self) -> int:
        """How many places the leader may fill."""
        return len(self.free) + self.unused

    def leave(self, hashes: Sequence[int], at_ns: int) -> None:
        """These blocks were evicted."""
        if len(self.left) + len(hashes) < LEFT_MAX:
            self.left.update(dict.fromkeys(hashes, at_ns))
            return
        for key in hashes:  # block by block, so that forgetting depends on the blocks and not on the calls
            self.left[key] = at_ns
            if len(self.left) >= LEFT_MAX:
                self.left_before, self.left = self.left, {}

    def left_later(self, key: int, at_ns: int) -> None:
        """This block, whose eviction was told early, was evicted only now."""
        for part in (self.left, self.left_before):
            if key in part:
                part[key] = at_ns
                return

    def left_at(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Those of the blocks whose eviction is remembered, each with its time, in any order."""
        left, before = self.left, self.left_before
        times = [(key, left[key]) for key in filter(left.__contains__, hashes)]
        if before:
            times += [(key, before[key]) for key in filter(before.__contains__, hashes) if key not in left]
        return times

    def came_back(self, hashes: Sequence[int], since_ns: int) -> int:
        """How many of these blocks were evicted after ``since_ns``; they are here again, so each counts once."""
        known = self.left_at(hashes)
        keys = [key for key, _ in known]
        _drop(self.left, keys)
        _drop(self.left_before, keys)
        return sum(at_ns > since_ns for _, at_ns in known)

    def take(self, count: int, at_ns: int) -> list[int]:
        """The lowest ``count`` empty places; there must be so many."""
        free = self.free
        if count < len(free):
            taken = [heappop(free) for _ in range(count)]
        else:
            taken = sorted(free)
            free.clear()
        first = self.capacity_blocks - self.unused
        fresh = range(first, first + count - len(taken))
        self.unused -= len(fresh)
        self.gave(count, self.capacity_blocks, at_ns)
        return [*taken, *fresh]

    def gave(self, count: int, capacity: int, at_ns: int, *, at_once: bool = True) -> None:
        """So many places were given away, ``at_once`` or over iterations that may be told together."""
        self.given += count
        if self.planned:
            self.behind += count
        else:
            self.behind = count if at_once else 0
        if self.given - self.turned >= capacity:
            self.most_given_before, self.most_given, self.turned = self.most_given, 0, self.given
            self.turn_ns, self.turned_ns = at_ns - self.turned_ns, at_ns
        self.most_given = max(self.most_given, self.behind)

    def copied(self, count: int) -> None:
        """A copy down of so many blocks has ended."""
        self.behind = max(0, self.behind - count)

    def took(self, count: int, started_ns: int, at_ns: int) -> None:
        """A copy down of so many blocks has succeeded. Later copies count more."""
        if self.copied_blocks >= COPIES_COUNTED:
            self.copied_blocks, self.copied_ns = self.copied_blocks // 2, self.copied_ns // 2
        self.copied_blocks += count
        self.copied_ns += at_ns - max(started_ns, self.copied_until_ns)
        self.copied_until_ns = at_ns

    def in_time(self) -> int | None:
        """How many blocks can be copied down in a part of a turn (``TURN_PARTS``); None while that is not known."""
        if self.turn_ns < 0 or self.copied_blocks < COPIES_COUNTED // 4 or not self.copied_ns:
            return None
        return self.turn_ns * self.copied_blocks // (TURN_PARTS * self.copied_ns)

    def give_back(self, places: Iterable[int]) -> None:
        """These places are empty."""
        deque(map(heappush, repeat(self.free), places), 0)


class LoadPart(msgspec.Struct):
    """One candidate of a slot's load: ``count`` blocks from prompt block ``first``, found in ``tier``."""

    candidate: int
    tier: int
    first: int
    count: int


class LeaderMemory(msgspec.Struct):
    """The whole memory of one leader."""

    pools: list[PoolMemory] = []
    eviction: PolicyConfig = PolicyConfig()
    parent_of: dict[int, int] = {}
    """Sequence hash to the hash of its prefix without the last block, for every hash that is resident somewhere. Empty
    without a tier below: only there a prefix is kept for the sake of its continuation."""
    parentless: dict[int, None] = {}
    """Restored blocks whose prefix no request has shown yet."""
    history: dict[int, int] = {}
    """Sequence hash to the ``MissReason`` for which it was last given up. A hash that has come back may still stand
    here, because ``why_gone`` is called for absent hashes only."""
    pending: list[int] = []
    """Candidates to evaluate or promote."""
    undispatched: list[int] = []
    """Operations whose copy was not asked for yet."""
    complete: list[int] = []
    """Operations that every rank has reported and that were not ended yet."""
    ending: list[int] = []
    """Slots in ``finishing``."""
    delayed: set[int] = set()
    """Slots in ``finishing`` whose engine keeps the blocks until its connector says that they were sent."""
    dirty: list[int] = []
    """Pools to look at for offloads at the end of this stimulus."""
    batch_of: dict[int, int] = {}
    """Open candidate to its batch."""
    drawn_from: dict[int, int] = {}
    """Open offload candidate to the pool whose blocks it copies down."""
    busy: dict[int, list[list[int]]] = {}
    """Pool of the leader to the times [from, to] of its copies into the pool below. ``to`` is -1 while they run. Times
    that ended over a second ago are forgotten."""
    loads: dict[int, list[LoadPart]] = {}
    """Slot to the parts of the load that is running for it."""
    told_copies: dict[int, dict[int, int]] = {}
    """Watched engine to its connector's open copies, by the connector's number, with the operation of each."""
    told_waiting: dict[int, dict[int, tuple[int, int | None]]] = {}
    """Slot to the operations of its connector's copies that wait for the end of its hold, with blocks and bytes."""
    watched: dict[str, int] = {}
    """Requests of watched engines to their slots, also for a while after their end."""
    lost_at: dict[int, int] = {}
    """Slot to the first prompt block whose load failed."""
    fences: dict[int, tuple[int, str, list[int]]] = {}
    """Operation to (source, request, device places) that its end gives back to the engine."""
    evaluated: dict[int, int] = {}
    """Slot to the leading blocks that the pipeline has looked at."""
    place_limit: dict[int, int] = {}
    """Decoding slot to the last iteration for whose token it has a place."""
    flushed: dict[int, int] = {}
    """Operation that was ended before its ranks reported to the reports that are still to come."""
    deadlines: dict[int, tuple[str, int]] = {}
    """Deadline to (``staging``, slot), (``hold``, hold), (``expiry``, breakpoint), (``wait``, slot), (``prefetch``,
    session), or ``drain``, ``freeze`` and ``run_for`` with 0."""
    deadline_of: dict[str, int] = {}
    """``kind key`` of a purpose to its deadline."""
    next_deadline: int = 1
    matches: dict[int, int] = {}
    """Breakpoint to its matches, ignored matches included."""
    stepping: dict[int, str] = {}
    """Slot that stops at its next site to the client that asked."""
    until: dict[int, tuple[SlotState, str]] = {}
    """Slot that stops when it enters a state to (state, client that asked)."""
    announced: dict[int, int] = {}
    """Slot to the entry point whose ``call.will`` was asked in the caller's task."""
    issued: list[int] = []
    """Operations asked for since the last iteration was formed."""
    until_site: dict[int, tuple[Site, str]] = {}
    """Slot that stops at a site to (site, client that asked)."""
    struck: dict[int, int] = {}
    """Open candidate to the sites that it has passed, one bit each: a hold that ends does not pass its site again."""
    returning: dict[int, bool] = {}
    """Slots that their own hold has left out, and that come back at the next chance."""
    logged: dict[int, tuple[int, int]] = {}
    """Breakpoint to (begin of a second of engine time, messages in it)."""
    pressed: dict[int, int] = {}
    """Unheld slot to when it was last preempted or refused, and would have fitted if nothing were held."""
    used_at_end: list[list[int]] = []
    """Blocks of each request that ended since the last iteration was formed, if its end uses them."""
    paused: list[int] = []
    """Engines that were asked to pause."""
    iterations: dict[int, int] = {}
    """Engine to the last iteration that it formed, as it numbers them; empty while there is one engine, whose numbers
    are those of the facts."""
    prefetch: PrefetchMemory = msgspec.field(default_factory=PrefetchMemory)
    named: dict[int, int] = {}
    """Sequence hash to how many requests have named or computed it; only with admission to the disk tier by count."""
    early: list[int] = []
    """Of iterations that were told at once: when they began, how many they are, the pool that gave their blocks."""
    early_of: dict[int, int] = {}
    """Evicted hash to by how many of these iterations it was evicted too early."""
    run_for: tuple[str, int] = ("", 0)
    """(client that asked, longest freeze) of the run that ends with the deadline ``run_for``."""
    older: list[dict[int, int]] = []
    """Earlier parts of ``history``, the newest first."""

    def name(self, hashes: Sequence[int]) -> None:
        """One more request has named or computed these blocks."""
        named = self.named
        for key in hashes:
            named[key] = named.get(key, 0) + 1
        if len(named) > NAMED_MAX:
            # All counts are halved, so that blocks that were popular long ago make way.
            self.named = {key: count // 2 for key, count in named.items() if count > 1}

    def deadline(self, kind: str, key: int) -> int:
        """A new deadline for this purpose."""
        number = self.next_deadline
        self.next_deadline += 1
        self.deadlines[number] = (kind, key)
        self.deadline_of[f"{kind} {key}"] = number
        return number

    def drop_deadline(self, kind: str, key: int) -> int | None:
        """Forget the deadline of this purpose; its number, or None."""
        if not self.deadline_of:
            return None
        number = self.deadline_of.pop(f"{kind} {key}", None)
        if number is not None:
            del self.deadlines[number]
        return number

    def take_deadline(self, number: int) -> tuple[str, int]:
        """Forget a deadline that has come; its purpose, empty for an unknown deadline."""
        kind, key = self.deadlines.pop(number, ("", 0))
        self.deadline_of.pop(f"{kind} {key}", None)
        return kind, key

    def remember(self, hashes: list[int], why: MissReason) -> None:
        """These hashes are resident nowhere any more."""
        history = self.history
        history.update(dict.fromkeys(hashes, why))
        if len(history) >= HISTORY_PART:
            self.older = [history, *self.older[: HISTORY_PARTS - 2]]
            self.history = {}
        _drop(self.parent_of, hashes)
        _drop(self.parentless, hashes)

    def why_gone(self, key: int) -> MissReason:
        """Why a hash that is resident nowhere is missing."""
        for part in (self.history, *self.older):
            why = part.get(key)
            if why is not None:
                return MissReason(why)
        return MissReason.NEVER_STORED


def _drop(table: dict[int, Any], keys: Sequence[int]) -> None:
    """Forget these keys, as far as they are known."""
    if table:
        deque(map(table.pop, keys, repeat(None)), 0)


class LiveMemory:
    """The memory with its eviction policies, ready to decide. Exports to bytes and restores from them."""

    def __init__(self, eviction: PolicyConfig | None = None, memory: LeaderMemory | None = None) -> None:
        self.memory = memory or LeaderMemory(eviction=eviction or PolicyConfig())
        self._held: dict[int, Counter[int | None]] = {}
        """Pool to the answer of ``held_of``, kept up to date from the first question on."""
        self.policies = [
            PoolPolicy(self.memory.eviction, pool.capacity_blocks, self.memory.parent_of) for pool in self.memory.pools
        ]
        for pool, policy in zip(self.memory.pools, self.policies, strict=True):
            if pool.ranks is not None:
                policy.restore(pool.ranks)
                pool.ranks = None

    def add_pool(self, places: int) -> None:
        """A pool was declared; ``places`` that the leader may fill (0 when it does not decide the pool)."""
        self.memory.pools.append(PoolMemory(unused=places, capacity_blocks=places))
        self.policies.append(PoolPolicy(self.memory.eviction, places, self.memory.parent_of))

    def grow(self, index: int, places: int) -> None:
        """A pool that the leader decides has so many further places."""
        pool = self.memory.pools[index]
        pool.unused += places
        pool.capacity_blocks += places
        self.policies[index].capacity += places

    def restored(self, index: int, places: list[int], hashes: list[int], at_ns: int) -> None:
        """A pool that was never used has these blocks, the least recently used first."""
        pool, end = self.memory.pools[index], max(places) + 1
        pool.free = sorted(set(range(end)).difference(places))
        pool.unused = pool.capacity_blocks - end
        self.policies[index].insert(hashes[::-1], at_ns)
        self.memory.parentless = dict.fromkeys(hashes)

    def show_chain(self, hashes: Sequence[int]) -> None:
        """A request has this prefix: restored blocks in it have parents from now on."""
        memory = self.memory
        shown = [(at, key) for at, key in enumerate(hashes) if key in memory.parentless]
        for at, key in shown:
            del memory.parentless[key]
            if at:
                memory.parent_of[key] = hashes[at - 1]
        keys = [key for _, key in shown]
        for policy in self.policies if keys else ():
            policy.relate(keys)

    def replace_pool(self, index: int) -> None:
        """An engine's pool took over the index of a pool that is forgotten."""
        self.memory.pools[index] = PoolMemory()
        self._held.pop(index, None)
        self.policies[index] = PoolPolicy(self.memory.eviction, 0, self.memory.parent_of)

    # --- places that are held, let go, saved and unsaved ---

    def taken(self, pool: PoolFacts, places: list[int]) -> None:
        """These places have a holder now. Those without a copy below become ``covered``."""
        mine = self.memory.pools[pool.info.pool]
        if mine.ordered:
            _drop(mine.loose, places)
        if mine.exposed:
            refs = pool.refs
            covered = [place for place in filter(mine.exposed.__contains__, reversed(places)) if refs[place]]
            _drop(mine.exposed, covered)
            mine.covered.update(dict.fromkeys(covered))
            self._count(pool, covered, 1)

    def assigned(self, pool: PoolFacts, places: list[int], slot: int, reused: list[int]) -> None:
        """These device places were given to this slot; ``reused`` of them may be ``covered``."""
        owner = self.memory.pools[pool.info.pool].owner
        owner.update(zip(places, repeat(slot)))
        if reused:
            self._held.pop(pool.info.pool, None)

    def held_of(self, pool: PoolFacts) -> Mapping[int | None, int]:
        """Slot to how many covered places were last assigned to it."""
        counts = self._held.get(pool.info.pool)
        if counts is None:
            mine = self.memory.pools[pool.info.pool]
            counts = self._held[pool.info.pool] = Counter(map(mine.owner.get, mine.covered))
        return counts

    def _count(self, pool: PoolFacts, places: Sequence[int], change: int) -> None:
        """These places were added to the covered places (1) or left them (-1)."""
        counts = self._held.get(pool.info.pool)
        if counts is None or not places:
            return
        for slot, count in Counter(map(self.memory.pools[pool.info.pool].owner.get, places)).items():
            left = counts[slot] + change * count
            if left:
                counts[slot] = left
            else:
                del counts[slot]

    def used(self, pool: PoolFacts, hashes: list[int]) -> None:
        """A request asks for these blocks: each deserves a copy again."""
        again = self.memory.pools[pool.info.pool].again
        if again:
            _drop(again, [pool.by_hash[key] for key in filter(pool.by_hash.__contains__, hashes)])

    def let_go(self, pool: PoolFacts, places: list[int]) -> None:
        """These places have a holder less: those without any, and without a copy below, are ``exposed``."""
        mine, refs, content = self.memory.pools[pool.info.pool], pool.refs, pool.content
        if not (mine.ordered or mine.covered):
            return
        free = [place for place in reversed(places) if not refs[place]]
        if mine.ordered:
            mine.loose.update(dict.fromkeys([place for place in free if content[place] == READY]))
        if mine.covered:
            exposed = list(filter(mine.covered.__contains__, free))
            _drop(mine.covered, exposed)
            mine.exposed.update(dict.fromkeys(exposed))
            self._count(pool, exposed, -1)

    def filled(self, pool: PoolFacts, places: list[int]) -> None:
        """These places have a holder, are full and have no copy below."""
        self.memory.pools[pool.info.pool].covered.update(dict.fromkeys(places))
        self._count(pool, places, 1)

    def unsaved(self, pool: PoolFacts, places: list[int]) -> None:
        """These full places have no copy below."""
        mine, refs = self.memory.pools[pool.info.pool], pool.refs
        covered = [place for place in places if refs[place]]
        if covered:
            covered = [place for place in covered if place not in mine.covered]
            mine.covered.update(dict.fromkeys(covered))
            self._count(pool, covered, 1)
            places = [place for place in places if not refs[place]]
        mine.exposed.update(dict.fromkeys(places))

    def saved(self, pool: PoolFacts, places: list[int]) -> None:
        """These places have a copy below."""
        mine = self.memory.pools[pool.info.pool]
        _drop(mine.exposed, places)
        self._uncover(pool, places)
        _drop(mine.bereft, places)

    def _uncover(self, pool: PoolFacts, places: list[int]) -> None:
        covered = self.memory.pools[pool.info.pool].covered
        if covered and not covered.keys().isdisjoint(places):
            gone = list(filter(covered.__contains__, places))
            _drop(covered, gone)
            self._count(pool, gone, -1)

    def evicted(self, pool: PoolFacts, places: list[int]) -> None:
        """These places lost their content."""
        mine = self.memory.pools[pool.info.pool]
        _drop(mine.exposed, places)
        self._uncover(pool, places)
        _drop(mine.planned, places)
        _drop(mine.bereft, places)
        _drop(mine.again, places)
        if mine.ordered:
            _drop(mine.loose, places)

    # --- keyframes ---

    def export(self) -> bytes:
        """Canonical bytes: equal memory, equal bytes."""
        for pool, policy in zip(self.memory.pools, self.policies, strict=True):
            pool.ranks = policy.export()
        try:
            return msgspec.msgpack.encode(self.memory)
        finally:
            for pool in self.memory.pools:
                pool.ranks = None  # columns of every remembered block: as large as the policies themselves

    @classmethod
    def restore(cls, data: bytes | memoryview, pools: Sequence[PoolFacts] = ()) -> "LiveMemory":
        """The memory of ``export``. Raises ``msgspec.DecodeError`` on anything else.

        ``pools`` are those of the facts that belong to them; memory from before there were policies names places, which
        only the facts can translate.
        """
        memory = msgspec.msgpack.decode(data, type=LeaderMemory)
        memory.deadline_of = {f"{kind} {key}": number for number, (kind, key) in memory.deadlines.items()}
        unranked = [pool.ranks is None for pool in memory.pools]
        live = cls(memory=memory)
        for facts, pool, old in zip(pools, live.memory.pools, unranked, strict=False):
            if old and facts.info.authority is Authority.LEADER:
                pool.capacity_blocks = len(facts)
                policy = PoolPolicy(live.memory.eviction, pool.capacity_blocks, live.memory.parent_of)
                if pool.order:
                    policy.insert([facts.hash_of[place] for place in reversed(pool.order)], 0)
                live.policies[facts.info.pool] = policy
            pool.order = []
        return live

    def digest(self) -> int:
        """xxh3_64 of the export."""
        return xxhash.xxh3_64_intdigest(self.export())
