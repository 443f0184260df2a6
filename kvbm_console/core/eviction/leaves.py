"""Which resident blocks a pool evicts next: the leaves of their tree of prefixes, the lowest rank first.

Theory of operation
-------------------
A block is of no use without its prefix, so no block is evicted before a resident block that continues it (I13). Only a
leaf may go, and when it has gone its parent may be a leaf. So a heap of the leaves is enough to choose victims, and a
prompt has one leaf, however long it is. If the leaf stays, all of its prefix stays, and is not looked at.

Most blocks are continued by one block. Such blocks stand in one list, a run, and are added, looked at and removed
together. A run ends in a leaf, or in a block that several runs continue.

A rank only grows while a block is resident. So a use does nothing here: an entry that comes to the top with an old rank
goes back with the new one.

Example: 1 <- 2 <- 3 and 2 <- 4 are resident, and 4 has the lowest rank. The runs are [1, 2], [3] and [4], and the
leaves are 3 and 4. The first victim is 4, and then 3. After these 2 is a leaf, with its own rank among those of other
leaves.

Law of this file: a choice changes nothing that a later choice could see. The runs follow from the resident blocks and
their parents alone, whatever the order in which they came.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import filterfalse, groupby, repeat
from typing import Any, Final, Protocol

from kvbm_console.core.eviction.ranked import Ranked

Entry = tuple[float, int, int, int]
"""(rank, stamp, key) of a leaf when it was entered, and the number of the entry."""
_HEAP_SLACK: Final = 1_000
"""Dead entries that are carried before the heap is built anew, beside three for each leaf."""
_LOOK_FIRST: Final = 16
"""Blocks of a run that are looked at together; when all go, four times as many come next."""


class MayGo(Protocol):
    """Which resident blocks a choice of victims may take."""

    def __call__(self, key: int) -> bool:
        """True if this block may be taken."""

    def leading(self, keys: Sequence[int]) -> int:
        """How many of these blocks, from the first on, may be taken before one that may not."""


def chains(parent_of: Mapping[int, int], hashes: Sequence[int]) -> list[list[int]]:
    """These blocks, each once, as chains in which each block is the parent of the next.

    >>> chains({2: 1, 3: 2, 9: 8}, [3, 9, 2])
    [[2, 3], [9]]
    """
    parents = list(map(parent_of.get, hashes))
    if parents[1:] == hashes[:-1]:  # the usual case: one chain
        return [list(hashes)] if hashes else []
    if parents[:-1] == hashes[1:]:  # blocks that were given up, the deepest first
        return [list(hashes[::-1])]
    parent = dict(zip(hashes, parents, strict=True))
    done: set[int] = set()
    found = []
    for key in hashes:
        chain = []
        at: int | None = key
        while at is not None and at in parent and at not in done:
            done.add(at)
            chain.append(at)
            at = parent[at]
        if chain:
            found.append(chain[::-1])
    return found


class BlockRun:
    """Blocks in prompt order. Each but the last is continued by the next, and by no other resident block."""

    __slots__ = ("front", "keys")

    def __init__(self, keys: list[int], front: int | None) -> None:
        self.keys = keys
        self.front = front
        """The block that the first one continues, resident or not; None if unknown."""


class ResidentTree:
    """The resident blocks as runs, by ``parent_of``."""

    def __init__(self, parent_of: Mapping[int, int]) -> None:
        self._parent_of = parent_of
        self.run_of: dict[int, BlockRun] = {}
        """Each resident key to its run."""
        self.behind: dict[int, set[BlockRun]] = {}
        """Key, resident or not, to the runs that continue it. Of a resident key these are at least two."""

    def is_leaf(self, key: int) -> bool:
        """True if this block is resident and no resident block continues it."""
        run = self.run_of.get(key)
        return run is not None and run.keys[-1] == key and key not in self.behind

    def next_of(self, run: BlockRun, at: int) -> list[tuple[BlockRun, int]]:
        """The blocks that continue the block ``at`` of this run, each as its run and place there, in order."""
        if at + 1 < len(run.keys):
            return [(run, at + 1)]
        return [(other, 0) for other in sorted(self.behind.get(run.keys[at], ()), key=lambda other: other.keys[0])]

    def add(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """These keys are resident. Returns those that may be no leaves any more, and those that are leaves now."""
        fresh = list(filterfalse(self.run_of.__contains__, keys))
        fronts = [] if len(fresh) == len(keys) else self.relate(keys)
        ends = []
        for chain in chains(self._parent_of, fresh):
            for piece in self._pieces(chain):
                front = self._parent_of.get(piece[0])
                if front is not None:
                    fronts.append(front)
                self._add(piece, front)
                ends.append(piece[-1])
        return fronts, list(filter(self.is_leaf, ends))

    def relate(self, keys: Iterable[int]) -> list[int]:
        """The parents of these keys may have become known. Returns those that may be no leaves any more."""
        fronts = []
        for key in keys:
            run = self.run_of.get(key)
            if run is not None and run.front is None and run.keys[0] == key:
                run.front = self._parent_of.get(key)
                if run.front is not None:
                    fronts.append(run.front)
                    self._hang(run)
        return fronts

    def remove(self, keys: Iterable[int]) -> list[int]:
        """These keys are not resident any more. Returns the leaves that this has made."""
        parts: dict[BlockRun, list[int]] = {}
        for run, part in groupby(keys, self.run_of.get):
            if run is not None:
                parts.setdefault(run, []).extend(part)
        ends, fronts = list[int](), dict[int, None]()
        for run, gone in parts.items():
            last = run.keys[-len(gone):]
            if gone in (last[::-1], last):
                del run.keys[-len(gone):]
            else:
                ends += self._cut_out(run, set(gone))
            deque(map(self.run_of.__delitem__, gone), 0)
            if run.keys:
                ends.append(run.keys[-1])
            elif run.front is not None:
                self.behind[run.front].remove(run)
                fronts[run.front] = None
        for front in fronts:
            if not self.behind[front]:
                del self.behind[front]
                ends.append(front)
            elif front in self.run_of:
                self._join(front)
        return list(filter(self.is_leaf, dict.fromkeys(ends)))

    def _pieces(self, chain: list[int]) -> Iterator[list[int]]:
        """The parts of this chain behind whose ends other resident blocks follow."""
        first = 0
        if not self.behind.keys().isdisjoint(chain):
            for at, key in enumerate(chain[:-1], 1):
                if key in self.behind:
                    yield chain[first:at]
                    first = at
        yield chain[first:]

    def _add(self, piece: list[int], front: int | None) -> None:
        """A new run, or more of the run that ends with ``front``."""
        host = None if front is None else self.run_of.get(front)
        if host is not None and host.keys[-1] == front and front not in self.behind:
            host.keys += piece
            self.run_of.update(dict.fromkeys(piece, host))
        else:
            run = BlockRun(piece, front)
            self.run_of.update(dict.fromkeys(piece, run))
            self._hang(run)
        self._join(piece[-1])

    def _hang(self, run: BlockRun) -> None:
        """This run stands behind its front, which ends its own run."""
        if run.front is None:
            return
        self.behind.setdefault(run.front, set()).add(run)
        host = self.run_of.get(run.front)
        if host is None:
            return
        if host.keys[-1] != run.front:
            at = host.keys.index(run.front) + 1
            rest = BlockRun(host.keys[at:], run.front)
            del host.keys[at:]
            self.run_of.update(dict.fromkeys(rest.keys, rest))
            self.behind[run.front].add(rest)
        self._join(run.front)

    def _join(self, key: int) -> None:
        """If one run alone continues this resident key, both are one run."""
        runs, host = self.behind.get(key, ()), self.run_of[key]
        if len(runs) != 1 or host in runs:  # hashes that continue each other in a circle have no leaf
            return
        (rest,) = runs
        del self.behind[key]
        if len(rest.keys) <= len(host.keys):
            host.keys += rest.keys
            self.run_of.update(dict.fromkeys(rest.keys, host))
            return
        rest.keys, rest.front = host.keys + rest.keys, host.front
        self.run_of.update(dict.fromkeys(host.keys, rest))
        if host.front is not None:
            self.behind[host.front].remove(host)
            self.behind[host.front].add(rest)

    def _cut_out(self, run: BlockRun, gone: set[int]) -> list[int]:
        """Leave in this run the blocks in front of all that go. What follows one of those is a run of its own. Returns
        the ends of these runs."""
        front: int | None = None
        first = part = list[int]()
        parts = list[tuple[int, list[int]]]()
        for key in run.keys:
            if key in gone:
                part, front = [], key
            else:
                if not part and front is not None:
                    parts.append((front, part))
                part.append(key)
        run.keys = first
        for front, part in parts:
            rest = BlockRun(part, front)
            self.run_of.update(dict.fromkeys(part, rest))
            self.behind[front] = {rest}
        return [part[-1] for _, part in parts]


class LeafOrder:
    """The leaves of a tree by a rank that only grows, and what they leave behind when they go.

    ``policy`` says when keys were used last, and ranks them unless ``by_recency``.
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

    def enter(self, leaves: Iterable[int]) -> None:
        """These keys are leaves now."""
        live = self._live
        for key in leaves:
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
        self, count: int, may_go: MayGo, level_of: Callable[[int], int] | None = None, levels: Iterable[int] = (),
    ) -> list[int]:
        """The next ``count`` keys that may go, or as many as there are, each behind all that continues it.

        With ``level_of``, those of level 0 go first, then those of each of ``levels``, which are in order. Keys of
        other levels stay.
        """
        if self._rules != self._policy.rules:
            self._rebuild()
        run_of, behind = self._tree.run_of, self._tree.behind
        taken: list[int] = []
        ends: dict[BlockRun, int] = {}  # run to how many of its first blocks are not taken
        left: dict[int, int] = {}  # block that several runs continue to how many of these are not taken
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
            run = run_of[entry[2]]
            end = ends.get(run, len(run.keys))
            bound = self._lowest()
            if opened and (bound is None or opened[0] < bound):
                bound = opened[0]
            part, stays = self._part(run.keys, end, bound, count - len(taken), may_go)
            if level_of is not None:
                for at, key in enumerate(part):
                    if level_of(key) > level:
                        higher.append((*self._rank(key), key, 0))
                        part, stays = part[:at], True
                        break
            taken += part
            end = ends[run] = end - len(part)
            above = run.keys[end - 1] if end else run.front
            if stays or above is None or above not in run_of:
                continue
            if not end:
                left[above] = left.get(above, len(behind[above])) - 1
            if not left.get(above):
                heappush(opened, (*self._rank(above), above, 0))
        for entry in passed:
            heappush(self._heap, entry)
        return taken

    def _part(
        self, keys: list[int], end: int, bound: Entry | None, most: int, may_go: MayGo
    ) -> tuple[list[int], bool]:
        """Blocks in front of ``end``, deepest first, that go before the leaf ``bound``, and whether there are no more
        because the next one may not go."""
        part, size = list[int](), _LOOK_FIRST
        while len(part) < most and end:
            looked = keys[max(0, end - min(size, most - len(part))) : end][::-1]
            lower = len(looked) if bound is None else self._lower(looked, bound)
            going = may_go.leading(looked[:lower])
            part += looked[:going]
            if going < len(looked):
                return part, going < lower
            end, size = end - going, 4 * size
        return part, False

    def _lower(self, keys: list[int], bound: Entry) -> int:
        """How many of the keys, from the first on, do not rank above this leaf."""
        ranks: list[Any] = list(map(self._policy.stamp, keys))
        highest: Any = bound[1]
        if not (self._by_recency or self._policy.is_recency):
            ranks, highest = list(zip(map(self._policy.rank, keys), ranks, strict=True)), bound[:2]
        return len(keys) if max(ranks) <= highest else next(at for at, rank in enumerate(ranks) if rank > highest)

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
