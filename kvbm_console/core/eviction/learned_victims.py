"""Victims of a tier in the order of ``learned``, each behind all blocks that continue it (I13).

``learned`` has a tree of its own with the prefixes that requests have asked for. Blocks that were stored before their
prefix was known stand elsewhere in it, so the resident tree of the tier has the last word.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from operator import eq

from kvbm_console.core.eviction.learned import Learned
from kvbm_console.core.eviction.leaves import BlockRun, MayGo, ResidentTree


class LearnedVictims:
    """One choice of at most ``count`` victims."""

    def __init__(self, policy: Learned, tree: ResidentTree, count: int, evictable: MayGo) -> None:
        self._policy = policy
        self._tree = tree
        self._count = count
        self._evictable = evictable
        self._taken: dict[int, None] = {}
        self._ends: dict[BlockRun, int] = {}
        """Run to how many of its first blocks are not taken."""
        self._stays: set[int] = set()
        """Blocks behind which one stays, of those that may go on this level."""

    def choose(self, level_of: Callable[[int], int] | None, levels: Iterable[int]) -> list[int]:
        """The victims of level 0, then those of each of ``levels``, as in ``LeafOrder.coldest``."""
        for level in (0, *levels):

            def may_go(key: int, level: int = level) -> bool:
                return (
                    key not in self._taken and self._evictable(key) and (level_of is None or level_of(key) <= level)
                )

            self._stays = set()
            for victims in self._by_worth(may_go):
                at = 0
                while at < len(victims) and len(self._taken) < self._count:
                    together = self._take_end_of_run(victims, at)
                    if not together:
                        self._take_family(victims[at], may_go)
                    at += together or 1
                if len(self._taken) >= self._count:
                    return list(islice(self._taken, self._count))
        return list(self._taken)

    def _by_worth(self, may_go: Callable[[int], bool]) -> Iterator[list[int]]:
        """All keys that may go in the order of ``learned``, in parts; keys may come twice."""
        ask = self._count - len(self._taken)
        while (victims := self._policy.victims(ask, may_go)) is not None:
            yield victims
            ask *= 2
        yield self._policy.victims(sum(map(may_go, self._policy.resident)), may_go) or []

    def _take_end_of_run(self, victims: list[int], first: int) -> int:
        """Take the victims from ``first`` on that are the end of what is left of a run. Returns how many."""
        run = self._tree.run_of[victims[first]]
        end = self._ends.get(run, len(run.keys))
        if not end or run.keys[end - 1] != victims[first] or victims[first] in self._tree.behind:
            return 0
        most = min(first + self._count - len(self._taken), len(victims))
        wanted, left = map(victims.__getitem__, range(first, most)), map(run.keys.__getitem__, range(end - 1, -1, -1))
        count = sum(1 for _ in takewhile(bool, map(eq, wanted, left)))
        self._taken.update(dict.fromkeys(victims[first : first + count]))
        self._ends[run] = end - count
        return count

    def _take_family(self, victim: int, may_go: Callable[[int], bool]) -> None:
        """Take a block behind all blocks that continue it. If one of those may not go, all in front of it stay."""
        taken = self._taken
        if victim in taken or victim in self._stays:
            return
        run = self._tree.run_of[victim]
        family = [(run, run.keys.index(victim))]
        for place in family:
            for child in self._tree.next_of(*place):
                key = child[0].keys[child[1]]
                if key in taken:
                    continue
                if key == victim or key in self._stays or not may_go(key):  # itself in a circle; see ``ancestor``
                    self._stay(*place)
                    return
                family.append(child)
        for run, at in reversed(family):
            taken[run.keys[at]] = None
            self._ends[run] = at

    def _stay(self, run: BlockRun, at: int) -> None:
        """The block ``at`` of this run and all in front of it stay."""
        self._stays.update(run.keys[: at + 1])
        while run.front not in self._stays and run.front in self._tree.run_of:
            run = self._tree.run_of[run.front]
            self._stays.update(run.keys)
