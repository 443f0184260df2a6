"""What rules one pool of the leader: a policy, the guards that stand before it, and the count of who decided.

Law of this file: a guard only takes keys out of the policy's reach, for a time that is known when it is set; it never
changes a rank. Pins are never evicted while they last, and together they hold at most ``GUARDED_SHARE`` of the pool,
the oldest ones giving way; a priority is given up only when nothing of a lower one is left.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, Final

from kvbm_console.core.eviction.policy import EvictionPolicy, PolicyConfig, make_policy
from kvbm_console.core.eviction.simple_lru import SimpleLru

GUARDED_SHARE: Final = 0.5
"""More pins than half of a pool would leave the policy nothing to decide."""
PIN: Final = 2**31
"""The level of a pin, above every priority."""


class PoolPolicy:
    """The policy of one pool of ``capacity`` places, by sequence hash."""

    def __init__(self, config: PolicyConfig, capacity: int) -> None:
        self.policy: EvictionPolicy = make_policy(config, capacity)
        self.capacity = capacity
        self.evicted = 0
        self.as_recency = 0
        """Of these, recency alone would have chosen so many too."""
        self._recency = None if isinstance(self.policy, SimpleLru) else SimpleLru()
        self._guards: dict[int, tuple[int, int]] = {}
        """Key to (level, until); in the order in which they were set."""

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """These blocks, parents before children, were used or stored."""
        self.policy.touch(keys, at_ns)
        if self._recency is not None:
            self._recency.touch(keys, at_ns)

    def forget(self, keys: Collection[int]) -> None:
        """These blocks are not resident any more; guards stay until their time is over."""
        self.policy.forget(keys)
        if self._recency is not None:
            self._recency.forget(keys)

    def guard(self, keys: Sequence[int], level: int, until_ns: int) -> None:
        """Keep these blocks, parents before children, from eviction until then; a higher or later guard stays."""
        guards = self._guards
        # Deepest first: when guards have to give way, a prefix is never without one that its continuation has.
        for key in reversed(keys):
            before = guards.pop(key, (0, 0))
            guards[key] = (max(level, before[0]), max(until_ns, before[1]))
        excess = len(guards) - int(GUARDED_SHARE * self.capacity)
        if excess > 0:
            for key in list(islice(guards, excess)):
                del guards[key]

    def choose(
        self, count: int, evictable: Callable[[int], bool], protected: Collection[int], now_ns: int
    ) -> tuple[list[int] | None, bool]:
        """The keys to evict, and whether recency alone would have chosen the same.

        None when there are fewer than ``count`` that are evictable and not protected; when only pins stand in the way,
        as many as there are.
        """
        self._expire(now_ns)
        levels = [0, *sorted({level for level, _ in self._guards.values()} - {PIN})]
        for level in levels:
            victims = self.policy.victims(count, self._below(evictable, level), protected)
            if victims is not None:
                break
        if victims is None and self._guards:
            free = self._below(evictable, level)
            count = min(count, sum(1 for key in self.policy.resident if key not in protected and free(key)))
            victims = self.policy.victims(count, free, protected)
        if victims is None:
            return None, True
        agrees = True
        self.evicted += len(victims)
        same = len(victims)
        if self._recency is not None:
            others = self._recency.victims(count, self._below(evictable, level), protected) or ()
            same = len(set(victims).intersection(others))
            agrees = same == len(victims)
        self.as_recency += same
        return victims, agrees

    def _below(self, evictable: Callable[[int], bool], level: int) -> Callable[[int], bool]:
        if not self._guards:
            return evictable
        guards = self._guards
        return lambda key: guards.get(key, (0, 0))[0] <= level and evictable(key)

    def _expire(self, now_ns: int) -> None:
        if self._guards:
            self._guards = {key: guard for key, guard in self._guards.items() if guard[1] > now_ns}

    def gauges(self) -> dict[str, float]:
        """The policy's own, evictions, those that recency would have chosen too, and guarded blocks."""
        return {
            **self.policy.gauges(), "evicted": self.evicted, "evicted_as_recency": self.as_recency,
            "guarded": len(self._guards),
        }

    # --- keyframes ---

    def export(self) -> Any:
        """Plain values in canonical order."""
        return {
            "policy": self.policy.export(), "recency": None if self._recency is None else self._recency.export(),
            "guards": [[key, level, until_ns] for key, (level, until_ns) in self._guards.items()],
            "evicted": self.evicted, "as_recency": self.as_recency,
        }

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self.policy.restore(exported["policy"])
        if self._recency is not None:
            self._recency.restore(exported["recency"])
        self._guards = {key: (level, until_ns) for key, level, until_ns in exported["guards"]}
        self.evicted, self.as_recency = exported["evicted"], exported["as_recency"]
