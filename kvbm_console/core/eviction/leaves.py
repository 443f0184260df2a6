"""Which resident blocks a pool evicts next: the leaves of their tree of prefixes, the lowest rank first.

Theory of operation
-------------------
A block is of no use without its prefix, so no block is evicted before a resident block that continues it (I13). Only a
leaf may go, and when it has gone its parent may be a leaf. So a heap of the leaves is enough to choose victims, and a
prompt has one leaf, however long it is. If the leaf stays, all of its prefix stays, and is not looked at.

A rank only grows while a block is resident. So a use does nothing here: an entry that comes to the top with an old rank
goes back with the new one.

Example: 1 <- 2 <- 3 and 2 <- 4 are resident, and 4 has the lowest rank. The leaves are 3 and 4. The first victim is 4,
and then 3. After these 2 is a leaf, with its own rank among those of other leaves.

Law of this file: a choice changes nothing that a later choice could see.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import filterfalse, repeat
from typing import Any, Final

from kvbm_console.core.eviction.ranked import Ranked

Entry = tuple[float, int, int, int]
"""(rank, stamp, key) of a leaf when it was entered, and the number of the entry."""
_HEAP_SLACK: Final = 1_000
"""Dead entries that are carried before the heap is built anew, beside three for each leaf."""


class ResidentTree:
    """The resident blocks whose parents are known, by ``parent_of``; who is a parent of one of them is no leaf."""

    def __init__(self, parent_of: Mapping[int, int]) -> None:
        self._parent_of = parent_of
        self.parent: dict[int, int] = {}
        """Resident key to its parent, resident or not."""
        self.child: dict[int, int] = {}
        """Key to one of its resident children; most keys have a single child."""
        self.siblings: dict[int, set[int]] = {}
        """Key to its further children. Together with ``child`` the inverse of ``parent``."""

    def children(self, key: int) -> list[int]:
        """The resident children of a block, in order."""
        child = self.child.get(key)
        return [] if child is None else sorted([child, *self.siblings.get(key, ())])

    def add(self, keys: Iterable[int]) -> list[int]:
        """Remember the parents of these resident keys, as far as they are known. Returns the parents."""
        fresh = list(filterfalse(self.parent.__contains__, keys))
        parents: list[Any] = list(map(self._parent_of.get, fresh))
        if None in parents:
            fresh = [key for key, parent in zip(fresh, parents, strict=True) if parent is not None]
            parents = [parent for parent in parents if parent is not None]
        self.parent.update(zip(fresh, parents, strict=True))
        first = list(map(self.child.setdefault, parents, fresh))
        if first != fresh:
            for key, parent, child in zip(fresh, parents, first, strict=True):
                if key != child:
                    self.siblings.setdefault(parent, set()).add(key)
        return parents

    def remove(self, keys: Collection[int]) -> list[int]:
        """These keys are not resident any more. Returns their parents that have no child now, resident or not."""
        parents: list[Any] = list(map(self.parent.pop, keys, repeat(None)))
        if None not in parents and self.siblings.keys().isdisjoint(parents):  # mostly the end of one chain
            deque(map(self.child.__delitem__, parents), 0)
            return parents
        childless = []
        for key, parent in zip(keys, parents, strict=True):
            if parent is None:
                continue
            others = self.siblings.get(parent)
            if self.child[parent] != key:
                assert others is not None
                others.remove(key)
            elif others:
                self.child[parent] = others.pop()
            else:
                del self.child[parent]
                childless.append(parent)
            if others is not None and not others:
                del self.siblings[parent]
        return childless


class LeafOrder:
    """The leaves of a tree by a rank that only grows, and what they leave behind when they go.

    ``policy`` says which keys are resident and when they were used last, and ranks them unless ``by_recency``.
    """

    def __init__(self, tree: ResidentTree, policy: Ranked, *, by_recency: bool = False) -> None:
        self._tree = tree
        self._policy = policy
        self._by_recency = by_recency
        self._heap: list[Entry] = []
        self._live: dict[int, int] = {}
        """Leaf to the number of its live entry."""
        self._numbers = 0
        self._rules = policy.rules
        """Rules of the policy, by whose ranks the heap is in order."""

    def enter(self, keys: Iterable[int]) -> None:
        """These keys may be leaves now; those that are not resident, or have a child, are none."""
        child, resident, live = self._tree.child, self._policy.resident, self._live
        for key in filter(resident.__contains__, filterfalse(child.__contains__, keys)):
            if key not in live:
                self._numbers += 1
                live[key] = self._numbers
                heappush(self._heap, (*self._rank(key), key, self._numbers))

    def leave(self, keys: Iterable[int]) -> None:
        """These keys are no leaves any more."""
        deque(map(self._live.pop, keys, repeat(None)), 0)
        if len(self._heap) > 3 * len(self._live) + _HEAP_SLACK:
            self._rebuild()

    def coldest(
        self, count: int, may_go: Callable[[int], bool], level_of: Callable[[int], int] | None = None,
        levels: Iterable[int] = (),
    ) -> list[int]:
        """The next ``count`` keys that may go, or as many as there are, each behind all that continues it.

        With ``level_of``, those of level 0 go first, then those of each of ``levels``, which are in order. Keys of
        other levels stay.
        """
        if self._rules != self._policy.rules:
            self._rebuild()
        heap, parent_of, siblings, resident = (
            self._heap, self._tree.parent.get, self._tree.siblings, self._policy.resident
        )
        taken: list[int] = []
        left: dict[int, int] = {}  # block with several children to those that are not taken
        opened: list[Entry] = []  # leaves when all that is taken has gone
        passed: list[Entry] = []
        higher: list[Entry] = []
        level, further = 0, iter(levels)
        while len(taken) < count:
            entry = self._next(opened, passed)
            if entry is None:
                level = next(further, -1)
                if level < 0:
                    break
                opened, higher = higher, []
                heapify(opened)
                continue
            if not may_go(entry[2]):  # nor may all of its prefix
                continue
            bound = self._lowest()
            if opened and (bound is None or opened[0] < bound):
                bound = opened[0]
            run = self._run(entry[2], bound, count - len(taken))
            for at, key in enumerate(run):
                if level_of is not None and level_of(key) > level:
                    higher.append((*self._rank(key), key, 0))
                    taken += run[:at]
                    break
                if not may_go(key):
                    taken += run[:at]
                    break
            else:
                taken += run
                above = parent_of(run[-1])
                if above is not None and above in resident:
                    if above in siblings:
                        left[above] = left.get(above, len(siblings[above]) + 1) - 1
                    if not left.get(above):
                        heappush(opened, (*self._rank(above), above, 0))
        for entry in passed:
            heappush(heap, entry)
        return taken

    def _run(self, leaf: int, bound: Entry | None, most: int) -> list[int]:
        """This leaf, and the blocks that it continues as long as they have no other child and no higher rank than all
        other leaves."""
        policy = self._policy
        parent_of, siblings, resident, stamp = self._tree.parent.get, self._tree.siblings, policy.resident, policy.stamp
        run, above = [leaf], parent_of(leaf)
        if self._by_recency or policy.is_recency:
            newest: float = math.inf if bound is None else bound[1]
            while above in resident and above not in siblings and stamp(above) <= newest and len(run) < most:
                run.append(above)
                above = parent_of(above)
            return run
        rank = policy.rank
        highest = (math.inf, 0) if bound is None else bound[:2]
        while (
            above in resident and above not in siblings and len(run) < most and (rank(above), stamp(above)) <= highest
        ):
            run.append(above)
            above = parent_of(above)
        return run

    def _next(self, opened: list[Entry], passed: list[Entry]) -> Entry | None:
        """The lowest leaf of the heap and ``opened``, taken out; if of the heap, it is noted in ``passed``."""
        lowest = self._lowest()
        if lowest is None or (opened and opened[0] < lowest):
            return heappop(opened) if opened else None
        passed.append(heappop(self._heap))
        return lowest

    def _lowest(self) -> Entry | None:
        """The lowest leaf of the heap, which it stands in with its current rank."""
        heap, live = self._heap, self._live
        while heap:
            rank, stamp, key, number = entry = heap[0]
            if live.get(key) != number:
                heappop(heap)
            elif self._rank(key) != (rank, stamp):
                heapreplace(heap, (*self._rank(key), key, number))
            else:
                return entry
        return None

    def _rank(self, key: int) -> tuple[float, int]:
        return 0.0 if self._by_recency else self._policy.rank(key), self._policy.stamp(key)

    def _rebuild(self) -> None:
        """One entry for each leaf, with its current rank."""
        self._rules = self._policy.rules
        self._heap = [(*self._rank(key), key, number) for key, number in self._live.items()]
        heapify(self._heap)
