"""The rule of one pool of the leader, which is a policy, the guards in front of it, and counts of the deciding rule.

Law of this file: a guard only takes keys out of the policy's reach, for a time that is known when it is set. It never
changes a rank. Pins are never evicted while they last. Together they hold at most ``GUARDED_SHARE`` of the pool, and
the oldest give way. A block with a priority is evicted only when no block with a lower priority is left. The pinned
blocks of a sequence are a prefix of it, because a block without its prefix is of no use. For the same reason a block is
not evicted before a block that continues it (I13), whatever the ranks say.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from kvbm_console.core.eviction import make_policy
from kvbm_console.core.eviction.learned import Learned
from kvbm_console.core.eviction.learned_victims import LearnedVictims
from kvbm_console.core.eviction.leaves import LeafOrder, MayGo, ResidentTree
from kvbm_console.core.eviction.policy import PolicyConfig, TierPolicy
from kvbm_console.core.eviction.ranked import Ranked, Recency
from kvbm_console.core.eviction.request_lru import RequestLru
from kvbm_console.core.eviction.simple_lru import SimpleLru

GUARDED_SHARE: Final = 0.5
"""More pins than half of a pool would leave the policy nothing to decide."""
PIN: Final = 2**31
"""The level of a pin, above every priority."""


class PoolPolicy:
    """The policy of one pool of ``capacity`` places, by hash; ``parent_of`` is the leader's map of prefixes."""

    def __init__(self, config: PolicyConfig, capacity: int, parent_of: Mapping[int, int] | None = None) -> None:
        policy = make_policy(config, capacity)
        self.policy: TierPolicy = Recency(capacity) if isinstance(policy, SimpleLru) else policy
        self.capacity = capacity
        self.references = 0
        """Blocks that requests have asked for: prompts, each once per admission."""
        self.evicted = 0
        self.as_recency = 0
        """Of these, recency alone would have chosen so many too."""
        self.not_admitted = 0
        """Blocks that were to be written here and were used too rarely for that."""
        self.pinned_hits = 0
        """Prompt blocks of admissions that were found here while they were pinned."""
        self._same = 0
        """Of the keys that were chosen last, recency alone would have chosen so many too."""
        self._recency = Recency(capacity) if isinstance(self.policy, Learned) else None
        """Recency beside a policy that has no stamps."""
        self._guards: dict[int, tuple[int, int]] = {}
        """Key to (level, until); in the order in which they were set."""
        self._parent_of = {} if parent_of is None else parent_of
        self._tree = ResidentTree(self._parent_of)
        self._order, self._by_recency = self._orders()

    def _orders(self) -> tuple[LeafOrder | None, LeafOrder | None]:
        """The orders of the leaves by the policy and by recency; None for a policy with an order of its own, and where
        recency always decides."""
        policy = self.policy
        if isinstance(policy, RequestLru):
            return None, None
        if self._recency is not None:
            self._recency.leave_order()
            return None, LeafOrder(self._tree, self._recency)
        assert isinstance(policy, Ranked)
        policy.leave_order()
        return (
            LeafOrder(self._tree, policy),
            None if isinstance(policy, Recency) else LeafOrder(self._tree, policy, by_recency=True),
        )

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """A request asks for these blocks, its prompt in order, whether they are resident or not."""
        self.references += len(keys)
        self.use_again(keys, at_ns)

    def use_again(self, keys: Sequence[int], at_ns: int) -> None:
        """A request that has asked for these blocks uses them once more."""
        self.policy.use(keys, at_ns)
        if self._recency is not None:
            self._recency.use(keys, at_ns)

    @property
    def of_requests(self) -> RequestLru | None:
        """The policy, if it must be told what requests do."""
        return self.policy if isinstance(self.policy, RequestLru) else None

    def found(self, keys: Iterable[int], at_ns: int) -> None:
        """An admission found these blocks of its prompt here."""
        if self._guards:
            guards = map(self._guards.get, keys)
            self.pinned_hits += sum(guard is not None and guard[0] == PIN and guard[1] > at_ns for guard in guards)

    def insert(self, keys: Sequence[int], at_ns: int) -> None:
        """These blocks of one prefix, in prompt order, become resident, beside their nearest resident ancestor.

        That is no use: a store says nothing of who will ask. What continues an ancestor is older than the ancestor, so
        this place is also newer than that of all that continues these blocks.
        """
        beside = self.ancestor(keys[0])
        self.policy.insert(keys, beside, at_ns)
        if self._recency is not None:
            self._recency.insert(keys, beside, at_ns)
        parents, leaves = self._tree.add(keys)
        self._leave(parents)
        self._enter(leaves)

    def ancestor(self, key: int) -> int | None:
        """The nearest resident block in front of this one, as far as its prefix is known."""
        resident, parent_of = self.policy.resident, self._parent_of.get
        above, seen, steps = parent_of(key), key, 1
        while above is not None and above not in resident:
            if above == seen:  # two requests can name hashes that continue each other in a circle
                return None
            if not steps & (steps - 1):
                seen = above
            above, steps = parent_of(above), steps + 1
        return above

    def forget(self, keys: Collection[int]) -> None:
        """These blocks are not resident any more; guards stay until their time is over."""
        self.policy.forget(keys)
        if self._recency is not None:
            self._recency.forget(keys)
        self._leave(keys)
        self._enter(self._tree.remove(keys))

    def relate(self, keys: Iterable[int]) -> None:
        """The parents of these blocks have become known; it has no effect on those that are not resident."""
        self._leave(self._tree.relate(keys))

    def _enter(self, leaves: Collection[int]) -> None:
        for order in (self._order, self._by_recency):
            if order is not None:
                order.enter(leaves)

    def _leave(self, keys: Collection[int]) -> None:
        for order in (self._order, self._by_recency):
            if order is not None:
                order.leave(keys)

    def guard(self, keys: Sequence[int], level: int, until_ns: int) -> None:
        """Keep these blocks, parents before children, from eviction until then; a higher or later guard stays."""
        guards = self._guards
        # Deepest first: when guards give way, no prefix loses its guard before its continuation does.
        for key in reversed(keys):
            before = guards.pop(key, (0, 0))
            guards[key] = (max(level, before[0]), max(until_ns, before[1]))
        excess = len(guards) - int(GUARDED_SHARE * self.capacity)
        if excess > 0:
            for key in list(islice(guards, excess)):
                del guards[key]

    def pin(self, keys: Sequence[int], budget: int, now_ns: int, until_ns: int) -> None:
        """Pin of this sequence, until then, what is pinned already and at most ``budget`` blocks behind it.

        The last ``budget`` blocks of a sequence of which the rest is pinned are pinned whole; of one that has grown by
        more, those that follow the pinned prefix: no others have their whole prefix.
        """
        pinned = 0
        for key in keys:
            level, until = self._guards.get(key, (0, 0))
            if level != PIN or until <= now_ns:
                break
            pinned += 1
        self.guard(keys[: pinned + budget], PIN, until_ns)

    def coldest(self, count: int, evictable: MayGo, now_ns: int) -> list[int]:
        """The next ``count`` keys in the order of ``choose``, or as many as there are; nothing is evicted."""
        self._expire(now_ns)
        return self._next(count, evictable)

    def choose(self, count: int, evictable: MayGo, now_ns: int) -> tuple[list[int], bool]:
        """The keys to evict, and whether recency alone would have chosen the same; ``gave_up`` says that they were.

        At most ``count``, children before parents; fewer only when no more are evictable and not pinned.
        """
        self._expire(now_ns)
        chosen = self._next(count, evictable)
        if self._by_recency is None or self.policy.is_recency:
            self._same = len(chosen)
        else:
            by_recency = self._by_recency.coldest(len(chosen), evictable, *self._levels())
            self._same = len(set(chosen).intersection(by_recency))
        return chosen, self._same == len(chosen)

    def gave_up(self, count: int) -> None:
        """So many of the keys that were last chosen are evicted."""
        self.evicted += count
        self.as_recency += min(self._same, count)

    def _next(self, count: int, evictable: MayGo) -> list[int]:
        if count <= 0:
            return []
        if self._order is not None:
            return self._order.coldest(count, evictable, *self._levels())
        if isinstance(self.policy, RequestLru):
            return self.policy.victims(count, evictable) or []
        assert isinstance(self.policy, Learned)
        return LearnedVictims(self.policy, self._tree, count, evictable).choose(*self._levels())

    def _levels(self) -> tuple[Callable[[int], int] | None, list[int]]:
        """The level of each key, and those above 0 from which blocks may go, in order."""
        guards = self._guards
        if not guards:
            return None, []
        levels = sorted({level for level, _ in guards.values()} - {0, PIN})
        return lambda key: guards.get(key, (0, 0))[0], levels

    def _expire(self, now_ns: int) -> None:
        if self._guards:
            self._guards = {key: guard for key, guard in self._guards.items() if guard[1] > now_ns}

    def gauges(self) -> dict[str, float]:
        """The policy's own, ranked blocks, references, evictions, those that recency would have chosen too, guards, and
        hits in pinned blocks."""
        return {
            **self.policy.gauges(), "entries": len(self.policy.resident), "references": self.references,
            "evicted": self.evicted,
            "evicted_as_recency": self.as_recency,
            "guarded": len(self._guards), "not_admitted": self.not_admitted, "pinned_hits": self.pinned_hits,
        }

    # --- keyframes ---

    def export(self) -> Any:
        """Plain values in canonical order; without a hit in a pinned block as before there was a count of them."""
        pinned = {"pinned_hits": self.pinned_hits} if self.pinned_hits else {}
        return {
            "policy": self.policy.export(), "recency": None if self._recency is None else self._recency.export(),
            "guards": [[key, level, until_ns] for key, (level, until_ns) in self._guards.items()],
            "evicted": self.evicted, "as_recency": self.as_recency, "not_admitted": self.not_admitted,
            "references": self.references, **pinned,
        }

    def restore(self, exported: Any) -> None:
        """Take over exported columns."""
        self.policy.restore(exported["policy"])
        if self._recency is not None:
            self._recency.restore(exported["recency"])
        self._tree = ResidentTree(self._parent_of)
        self._order, self._by_recency = self._orders()
        _, leaves = self._tree.add(list(self.policy.resident))
        self._enter(leaves)
        self._guards = {key: (level, until_ns) for key, level, until_ns in exported["guards"]}
        self.evicted, self.as_recency = exported["evicted"], exported["as_recency"]
        self.not_admitted, self.references = exported.get("not_admitted", 0), exported.get("references", 0)
        self.pinned_hits = exported.get("pinned_hits", 0)
