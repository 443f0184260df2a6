"""The rule of one pool of the leader, which is a policy, the guards in front of it, and counts of the deciding rule.

Law of this file: a guard only takes keys out of the policy's reach, for a time that is known when it is set. It never
changes a rank. Pins are never evicted while they last. Together they hold at most ``GUARDED_SHARE`` of the pool, and
the oldest give way. A block with a priority is evicted only when no block with a lower priority is left. The pinned
blocks of a sequence are a prefix of it, because a block without its prefix is of no use. For the same reason a block is
not evicted before a block that continues it (I13), whatever the ranks say.
"""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import chain, filterfalse, islice
from typing import Any, Final

from kvbm_console.core.eviction import make_policy
from kvbm_console.core.eviction.policy import PolicyConfig, TierPolicy
from kvbm_console.core.eviction.ranked import Ranked
from kvbm_console.core.eviction.request_lru import RequestLru
from kvbm_console.core.eviction.simple_lru import SimpleLru

GUARDED_SHARE: Final = 0.5
"""More pins than half of a pool would leave the policy nothing to decide."""
PIN: Final = 2**31
"""The level of a pin, above every priority."""


class PoolPolicy:
    """The policy of one pool of ``capacity`` places, by hash; ``parent_of`` is the leader's map of prefixes."""

    def __init__(self, config: PolicyConfig, capacity: int, parent_of: Mapping[int, int] | None = None) -> None:
        self.policy = make_policy(config, capacity)
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
        self._recency = None if isinstance(self.policy, (SimpleLru, RequestLru)) else SimpleLru()
        """The choice of recency alone, beside a policy that is not always recency."""
        self._guards: dict[int, tuple[int, int]] = {}
        """Key to (level, until); in the order in which they were set."""
        self._parent_of = {} if parent_of is None else parent_of
        self._parent: dict[int, int] = {}
        """Resident key to its parent."""
        self._child: dict[int, int] = {}
        """Key to one of its resident children; most keys have a single child."""
        self._siblings: dict[int, set[int]] = {}
        """Key to its further children. Together with ``_child`` the inverse of ``_parent``."""
        self._family: dict[int, None] = {}
        """The rest of a family of which a choice has taken the deepest blocks, a block before all that continues it.
        Whoever chooses next from the same family begins here, so that a long prompt is not walked again and again."""

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
        self._link(keys)

    def ancestor(self, key: int) -> int | None:
        """The nearest resident block in front of this one, as far as its prefix is known."""
        resident, parent_of = self.policy.resident, self._parent_of.get
        above = parent_of(key)
        while above is not None and above not in resident:
            above = parent_of(above)
        return above

    def forget(self, keys: Collection[int]) -> None:
        """These blocks are not resident any more; guards stay until their time is over."""
        self.policy.forget(keys)
        if self._recency is not None:
            self._recency.forget(keys)
        self._unlink(keys)
        family = self._family
        if family:
            if list(islice(reversed(family), len(keys))) == keys:
                deque(map(family.pop, keys), 0)
            else:
                self._family = {}

    def held(self) -> None:
        """Some blocks that might go may not go any more."""
        self._family = {}

    def relate(self, keys: Iterable[int]) -> None:
        """The parents of these blocks have become known; it has no effect on those that are not resident."""
        self._link(list(filter(self.policy.resident.__contains__, keys)))

    def _link(self, keys: Iterable[int]) -> None:
        """Remember the parents of these keys, as far as they are known."""
        fresh = list(filterfalse(self._parent.__contains__, keys))
        parents: list[Any] = list(map(self._parent_of.get, fresh))
        if None in parents:
            fresh = [key for key, parent in zip(fresh, parents, strict=True) if parent is not None]
            parents = [parent for parent in parents if parent is not None]
        if self._family and not self._family.keys().isdisjoint(parents):
            self._family = {}
        self._parent.update(zip(fresh, parents, strict=True))
        first = list(map(self._child.setdefault, parents, fresh))
        if first != fresh:
            for key, parent, child in zip(fresh, parents, first, strict=True):
                if key != child:
                    self._siblings.setdefault(parent, set()).add(key)

    def _unlink(self, keys: Iterable[int]) -> None:
        for key in keys:
            parent = self._parent.pop(key, None)
            if parent is None:
                continue
            others = self._siblings.get(parent)
            if self._child[parent] != key:
                assert others is not None
                others.remove(key)
            elif others:
                self._child[parent] = others.pop()
            else:
                del self._child[parent]
            if others is not None and not others:
                del self._siblings[parent]

    def _children(self, key: int) -> list[int]:
        child = self._child.get(key)
        return [] if child is None else sorted([child, *self._siblings.get(key, ())])

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

    def coldest(self, count: int, evictable: Callable[[int], bool], now_ns: int) -> list[int]:
        """The next ``count`` keys in the order of ``choose``, or as many as there are; nothing is evicted."""
        self._expire(now_ns)
        chosen: dict[int, None] = {}

        def left(key: int) -> bool:
            return key not in chosen and evictable(key)

        if not self._guards:
            return self._whole(self.policy, count, evictable, evictable, ())
        for level in self._levels():
            victims = self._whole(self.policy, count - len(chosen), self._of_level(left, level), left, ())
            chosen.update(dict.fromkeys(victims))
            if len(chosen) == count:
                break
        return list(chosen)

    def choose(
        self, count: int, evictable: Callable[[int], bool], protected: Collection[int], now_ns: int, *,
        steady: bool = False,
    ) -> tuple[list[int], bool]:
        """The keys to evict, and whether recency alone would have chosen the same; ``gave_up`` says that they were.

        At most ``count``, children before parents; fewer only when no more are evictable, unprotected and not pinned.
        ``steady`` says that since the last such choice only blocks told by ``held`` have ceased to be evictable.
        """
        self._expire(now_ns)
        # Recency alone has no families to walk, and ``learned`` walks them itself.
        steady = steady and not self._guards and isinstance(self.policy, Ranked)
        chosen: dict[int, None] = {}
        same = 0

        def left(key: int) -> bool:
            return key not in chosen and evictable(key)

        may_follow = left if self._guards else evictable  # without levels nothing is chosen before
        for level in self._levels():
            of_level = self._of_level(may_follow, level)
            victims = self._rest_of_family(count, evictable, protected) if steady and self._family else []
            if not victims:
                victims = self._whole(
                    self.policy, count - len(chosen), of_level, may_follow, protected, keep_rest=steady
                )
            if self._recency is None or self.policy.is_recency:
                same += len(victims)
            else:
                by_recency = self._whole(self._recency, len(victims), of_level, may_follow, protected)
                same += len(set(victims).intersection(by_recency))
            chosen.update(dict.fromkeys(victims))
            if len(chosen) == count:
                break
        self._same = same
        return list(chosen), same == len(chosen)

    def gave_up(self, count: int) -> None:
        """So many of the keys that were last chosen are evicted."""
        self.evicted += count
        self.as_recency += min(self._same, count)

    def _whole(
        self, policy: TierPolicy, count: int, evictable: Callable[[int], bool], may_follow: Callable[[int], bool],
        protected: Collection[int], *, keep_rest: bool = False,
    ) -> list[int]:
        """As many as there are, up to ``count``, each with what continues it in front (I13).

        A rank alone does not say that of blocks that were stored one by one. A block whose continuation may not go
        stays.
        """
        order: dict[int, None] = {}
        if count <= 0:
            return []
        if isinstance(policy, RequestLru):
            return policy.victims(count, evictable, protected) or []
        stays: set[int | None] = set()
        child_of, siblings = self._child.get, self._siblings
        ask = 1 if keep_rest else count  # the family of the first victim is often long enough
        with closing(self._parts(policy, ask, lambda key: key not in stays and evictable(key), protected)) as parts:
            for key in chain.from_iterable(parts):
                child = child_of(key)
                if child in stays and key not in siblings:  # a long prompt whose end is being copied: no other look
                    stays.add(key)
                    continue
                if key in order or key in stays or key in protected or not evictable(key):
                    continue
                if child is None or (child in order and key not in siblings):  # as ranks mostly have it
                    order[key] = None
                else:
                    first = not order
                    self._add_family(key, order, stays, may_follow, protected)
                    if keep_rest and first and len(order) > count:
                        self._family = dict.fromkeys(reversed(order))
                if len(order) >= count:
                    return list(islice(order, count))
        return list(order)

    def _parts(
        self, policy: TierPolicy, ask: int, evictable: Callable[[int], bool], protected: Collection[int]
    ) -> Generator[list[int], None, None]:
        """Parts of the order of eviction, the first with about ``ask`` keys; keys may come twice."""
        if isinstance(policy, (SimpleLru, Ranked)):
            yield from policy.coldest_first(ask)
            return
        while True:  # its order depends on the keys that may go
            victims = policy.victims(ask, evictable, protected)
            if victims is None:
                there = sum(1 for key in policy.resident if key not in protected and evictable(key))
                victims = policy.victims(there, evictable, protected) or []
            yield victims
            if len(victims) < ask:
                return
            ask *= 2

    def _rest_of_family(
        self, count: int, evictable: Callable[[int], bool], protected: Collection[int]
    ) -> list[int]:
        """``count`` blocks of the family that was begun, if the policy still evicts from it; else none."""
        family = self._family
        if len(family) < count or any(map(family.__contains__, protected)):
            return []
        if self.policy.victims(1, evictable, protected) != [next(iter(family))]:
            return []
        return list(islice(reversed(family), count))

    def _add_family(
        self, victim: int, order: dict[int, None], stays: set[int | None], may_follow: Callable[[int], bool],
        protected: Collection[int],
    ) -> None:
        """Add a victim behind all blocks that continue it.

        If some of those may not go, all blocks from them up to the victim stay and are not looked at again.
        """
        family = [victim]
        child_of, siblings = self._child.get, self._siblings
        for key in family:
            first = child_of(key)
            if first is None:
                continue
            for child in self._children(key) if key in siblings else (first,):
                if child in order:
                    continue
                if child in stays or child in protected or not may_follow(child):
                    while child != victim:
                        child = self._parent[child]
                        stays.add(child)
                    return
                family.append(child)
        order.update(dict.fromkeys(reversed(family)))

    def _levels(self) -> list[int]:
        return [0, *sorted({level for level, _ in self._guards.values()} - {PIN})]

    def _of_level(self, evictable: Callable[[int], bool], level: int) -> Callable[[int], bool]:
        if not self._guards:
            return evictable
        guards = self._guards
        return lambda key: guards.get(key, (0, 0))[0] == level and evictable(key)

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
        self._link(self.policy.resident)
        self._guards = {key: (level, until_ns) for key, level, until_ns in exported["guards"]}
        self.evicted, self.as_recency = exported["evicted"], exported["as_recency"]
        self.not_admitted, self.references = exported.get("not_admitted", 0), exported.get("references", 0)
        self.pinned_hits = exported.get("pinned_hits", 0)
