"""Miss-ratio curves: the hits of an LRU cache of every size, from one pass over what was asked for.

Theory of operation
-------------------
An LRU cache of n blocks holds the n blocks that were used last. Order all blocks by their last use, the latest on top:
this is the LRU stack. The depth of a block in it is the smallest cache that still holds the block (Mattson, 1970). So
one stack answers for all sizes.

    asked: [a b] [c] [a b]      stack before the last request, from the top: c a b
                                depths of a and b: 2 and 3, so a cache of 2 blocks hits a, a cache of 3 hits both

A request is atomic: its lookup comes first, and then its blocks go on top, the first block of the prompt topmost. So
the tail of a prompt leaves a cache before its head, as ``simple_lru`` evicts. A prefix has no holes, so a block is a
hit only if the blocks in front of it are hits. The largest depth so far counts.

``Stack`` keeps a row of bits for each touch, one bit for each block that lives in it. A Fenwick tree counts the living
blocks of all later touches. Blocks that follow each other in a prompt mostly follow each other in one row. Such a run
costs one walk down the tree, whatever its length.

``SampledCurve`` is the same with bounded memory (SHARDS, Waldspurger et al., FAST 2015). A multiplicative hash chooses
the blocks that it follows, and both depths and misses are scaled by the share of these blocks. If there are too many,
every second one is forgotten. Misses are counted and not hits: a prefix that everybody shares hardly ever misses, so
it does not matter whether the sample has it. Sixteen groups of the sample give the error.

Law of this file: ``LruCurve.hits`` is what a replay through ``simple_lru`` of that capacity counts, to the block.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from math import sqrt
from typing import Final, NamedTuple

NEVER: Final = 1 << 62
"""Depth of a key that was never touched: more than any capacity."""
SAMPLES_MAX: Final = 8_192
"""Keys that a sampled curve follows, 1 MB. The stated error is then about a percentage point."""
_SHIFT: Final = 32
"""A place is a touch and a position in it as one number, because a dict of numbers is smaller and faster."""
_POSITION: Final = (1 << _SHIFT) - 1
_ROWS_LEAST: Final = 1_024
"""Touches between two renumberings, beside one for each touch that still has living keys."""
_GROUPS: Final = 16
_FRACTION_BITS: Final = 6
"""Depths in one class of ``SampledCurve`` differ by less than 1/64."""
_MIXED_BITS: Final = 64
_MIXER: Final = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: neighbouring numbers, as traces have them, are spread evenly."""


class Stack:
    """The LRU stack of keys.

    >>> stack = Stack()
    >>> stack.touch("ab"), stack.touch("c"), stack.touch("ab") == [2, 3]
    ([4611686018427387904, 4611686018427387904], [4611686018427387904], True)
    """

    __slots__ = ("_at", "_next", "_rows", "_tree", "blocks")

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks in the stack."""
        self._at: dict[object, int] = {}
        self._rows: dict[int, int] = {}
        """Touch to the bits of the positions that live in it; position 0 is the first of the touch."""
        self._next = 1
        """Number of the next touch. Touches count from 1, as a Fenwick tree does."""
        self._tree = [0] * (_ROWS_LEAST + 1)

    def __len__(self) -> int:
        """Keys in the stack."""
        return len(self._at)

    def touch(self, keys: Sequence[object], sizes: Sequence[int] | None = None) -> list[int]:
        """Depth of each key before this touch, in blocks and including the key itself; ``NEVER`` if unknown.

        Then all keys go on top, the first one topmost. A key stands for as many blocks as ``sizes`` says: at least one,
        always the same number, and one if not given. A key of n blocks has the depth of its last block.
        """
        if len(set(keys)) != len(keys):
            return self._touch_once(keys, sizes)
        if self._next == len(self._tree):
            self._renumber()
        at = self._at.get
        depths: list[int] = []
        runs: list[tuple[int, int, int]] = []
        depth = start = 0
        expected = -1
        size = 1
        for index, key in enumerate(keys):
            place = at(key)
            if sizes is not None:
                size = sizes[index]
            if place is None:
                depths.append(NEVER)
                continue
            if place != expected:
                if expected >= 0:
                    runs.append((start >> _SHIFT, start & _POSITION, expected & _POSITION))
                start = place
                depth = self._above(place)
            depth += size
            expected = place + size
            depths.append(depth)
        if expected >= 0:
            runs.append((start >> _SHIFT, start & _POSITION, expected & _POSITION))
        for number, first, end in runs:
            self._clear(number, first, end)
        self._push(keys, sizes)
        return depths

    def forget(self, keys: Iterable[object]) -> None:
        """Take these keys of one block each out of the stack; what lies below them rises."""
        for key in keys:
            place = self._at.pop(key)
            self._clear(place >> _SHIFT, place & _POSITION, (place & _POSITION) + 1)

    def _touch_once(self, keys: Sequence[object], sizes: Sequence[int] | None) -> list[int]:
        """A touch that names keys twice: a key lives where it is named first."""
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        order = sorted(first.values())
        depths = self.touch([keys[index] for index in order], None if sizes is None else [sizes[i] for i in order])
        found = {keys[index]: depth for index, depth in zip(order, depths, strict=True)}
        return [found[key] for key in keys]

    def _push(self, keys: Sequence[object], sizes: Sequence[int] | None) -> None:
        total = len(keys) if sizes is None else sum(sizes)
        if not total:
            return
        number = self._next
        self._next += 1
        base = number << _SHIFT
        places = range(base, base + total) if sizes is None else accumulate(sizes, initial=base)
        self._at.update(zip(keys, places, strict=False))
        self._rows[number] = (1 << total) - 1
        self._add(number, total)

    def _above(self, place: int) -> int:
        """Blocks above this place."""
        number = place >> _SHIFT
        tree, below, index = self._tree, 0, number
        while index:
            below += tree[index]
            index &= index - 1
        return self.blocks - below + (self._rows[number] & ((1 << (place & _POSITION)) - 1)).bit_count()

    def _clear(self, number: int, first: int, end: int) -> None:
        """These positions of a touch live no more."""
        left = self._rows[number] & ~(((1 << (end - first)) - 1) << first)
        if left:
            self._rows[number] = left
        else:
            del self._rows[number]
        self._add(number, first - end)

    def _add(self, number: int, blocks: int) -> None:
        self.blocks += blocks
        tree, last = self._tree, len(self._tree)
        while number < last:
            tree[number] += blocks
            number += number & -number

    def _renumber(self) -> None:
        """Number the touches with living keys from 1 on: O(1) per touch on average."""
        new = {old: number for number, old in enumerate(self._rows, 1)}
        self._at = {key: new[place >> _SHIFT] << _SHIFT | place & _POSITION for key, place in self._at.items()}
        self._rows = {new[old]: row for old, row in self._rows.items()}
        self._tree = tree = [0] * (2 * len(new) + _ROWS_LEAST + 1)
        for number, row in self._rows.items():
            tree[number] = row.bit_count()
        for number in range(1, len(tree)):
            upper = number + (number & -number)
            if upper < len(tree):
                tree[upper] += tree[number]
        self._next = len(new) + 1


class LruCurve:
    """The exact curve: hits of LRU caches of all capacities, in blocks.

    >>> curve = LruCurve()
    >>> for keys in ("ab", "c", "ab"):
    ...     curve.add(keys)
    >>> curve.references, [curve.hits(capacity) for capacity in (1, 2, 3)]
    (5, [0, 1, 2])
    """

    def __init__(self) -> None:
        self.references = 0
        """Blocks asked for."""
        self._stack = Stack()
        self._more: dict[int, int] = {}
        """Capacity to the change there of the number of hits that one more block brings."""
        self._at: dict[int, int] = {}
        """Capacity to the hits that it brings beside those."""
        self._steps: tuple[list[int], list[int], list[int]] | None = None

    def add(
        self, keys: Sequence[object], sizes: Sequence[int] | None = None, *, asked: int | None = None
    ) -> None:
        """A request asks for these keys and stores them; see ``Stack.touch``.

        It asks for the first ``asked`` keys only, if that is given, and stores all.
        """
        depths = self._stack.touch(keys, sizes)[:asked]
        self._steps = None
        self.references += len(depths) if sizes is None else sum(sizes[:asked])
        at, more, deepest = self._at, self._more, 0
        for index, depth in enumerate(depths):
            if depth == NEVER:
                break
            size = 1 if sizes is None else sizes[index]
            if depth <= deepest:
                at[deepest] = at.get(deepest, 0) + size
                continue
            new = min(size, depth - deepest)
            if new < size:
                at[deepest] = at.get(deepest, 0) + size - new
            if new == 1:
                at[depth] = at.get(depth, 0) + 1
            else:
                more[depth - new + 1] = more.get(depth - new + 1, 0) + 1
                more[depth + 1] = more.get(depth + 1, 0) - 1
            deepest = depth

    def hits(self, capacity: int) -> int:
        """Hits of a cache of this many blocks."""
        capacities, hits, slopes = self._curve()
        index = bisect_right(capacities, capacity) - 1
        return hits[index] + slopes[index] * (capacity - capacities[index])

    def hit_rate(self, capacity: int) -> float | None:
        """Hits per reference; None without references."""
        return self.hits(capacity) / self.references if self.references else None

    @property
    def capacities(self) -> list[int]:
        """Capacities at which the curve bends, from 0 on. Between two of them it is straight, and after the last flat,
        except that a capacity itself may begin with a step."""
        return self._curve()[0]

    def _curve(self) -> tuple[list[int], list[int], list[int]]:
        """Capacities, the hits there, and the hits that each further block brings up to the next capacity."""
        if self._steps is None:
            at, more = self._at, self._more
            # A change of slope at n shows first in the hits of n, so the straight piece begins at n - 1.
            capacities = sorted({0, *at, *(capacity - 1 for capacity in more)})
            hits: list[int] = []
            slopes: list[int] = []
            value = slope = last = 0
            for capacity in capacities:
                value += slope * (capacity - last) + at.get(capacity, 0)
                slope += more.get(capacity + 1, 0)
                hits.append(value)
                slopes.append(slope)
                last = capacity
            self._steps = capacities, hits, slopes
        return self._steps


class SampledRate(NamedTuple):
    """A hit rate that is right within ``error`` in about 19 of 20 cases; both are shares."""

    hit_rate: float
    error: float


class SampledCurve:
    """The curve of at most ``samples`` keys, chosen by their hash. Keys are sequence hashes, or numbers of a trace."""

    def __init__(self, samples: int = SAMPLES_MAX) -> None:
        self.samples = samples
        self.references = 0
        """Blocks asked for, those outside the sample included."""
        self._stack = Stack()
        self._keys: set[int] = set()
        self._halvings = 0
        self._missed: dict[int, list[float]] = {}
        """Class of depth to the blocks, by group, that caches of less blocks miss. A class ends at ``_end``."""
        self._behind: tuple[list[int], list[list[float]]] | None = None

    @property
    def share(self) -> float:
        """Share of all keys that the sample follows."""
        return 2.0**-self._halvings

    def add(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """A request asks for these keys and stores them.

        Returns the keys of the sample with their depths, which are the capacities that would have kept them.
        """
        self.references += len(keys)
        chosen = self._chosen(keys)
        if not chosen:
            return []
        self._behind = None
        deepest = 0
        weight = 1 << self._halvings
        depths = self._stack.touch(chosen)
        for key, depth in zip(chosen, depths, strict=True):
            if depth > deepest:
                deepest = depth
            row = self._missed.setdefault(_class(deepest if deepest == NEVER else deepest * weight), [0.0] * _GROUPS)
            row[key % _GROUPS] += weight
        self._keep(chosen)
        return [(key, depth if depth == NEVER else depth * weight) for key, depth in zip(chosen, depths, strict=True)]

    def store(self, keys: Sequence[int]) -> None:
        """These keys are stored, or used again, and nobody asks for them: a request ends with its answer."""
        chosen = self._chosen(keys)
        if chosen:
            self._stack.touch(chosen)
            self._keep(chosen)

    def hold(self, keys: Collection[int], recency: Callable[[int], tuple[int, int]]) -> None:
        """These keys are there before the first reference. Keys of higher ``recency`` were used later.

        A key that had been evicted by then counts as missed at any capacity. So above what is held a rate is a lower
        bound.
        """
        while len(keys) >> self._halvings > self.samples:
            self._halvings += 1
        self.store(sorted(self._chosen(keys), key=recency, reverse=True))

    def _keep(self, chosen: list[int]) -> None:
        self._keys.update(chosen)
        while len(self._keys) > self.samples:
            self._halvings += 1
            kept = self._chosen(self._keys)
            self._stack.forget(self._keys.difference(kept))
            self._keys = set(kept)

    def at(self, capacity: int) -> SampledRate | None:
        """The hit rate of an LRU cache of this many blocks; None without references.

        The error has two parts: the spread of the misses among the groups, and the uncertainty of a sampled depth.
        """
        if not self.references:
            return None
        missed = self._missed_at(capacity)
        total = sum(missed)
        if not self._halvings:
            return SampledRate(1 - total / self.references, 0.0)
        mean = total / _GROUPS
        spread = _GROUPS / (_GROUPS - 1) * sum((group - mean) ** 2 for group in missed) * (1 - self.share)
        doubt = 2 / sqrt(max(1.0, capacity * self.share))
        shift = (
            sum(self._missed_at(int(capacity * (1 - doubt)))) - sum(self._missed_at(int(capacity * (1 + doubt))))
        ) / 2
        error = sqrt(4 * spread + shift**2) / self.references
        # A few blocks that the sample has by chance can miss more often than all references; no rate is below 0.
        return SampledRate(max(0.0, 1 - total / self.references), error)

    def hit_rates(self, capacities: Sequence[int]) -> list[float]:
        """The hit rates of caches of these sizes, without their errors; empty without references."""
        if not self.references:
            return []
        return [max(0.0, 1 - sum(self._missed_at(capacity)) / self.references) for capacity in capacities]

    def _chosen(self, keys: Iterable[int]) -> list[int]:
        if not self._halvings:
            return list(keys)
        limit = 1 << (_MIXED_BITS - self._halvings)
        return [key for key in keys if key * _MIXER % (1 << _MIXED_BITS) < limit]

    def _missed_at(self, capacity: int) -> list[float]:
        """Missed blocks by group."""
        if self._behind is None:
            ends: list[int] = []
            behind = [[0.0] * _GROUPS]
            for depths, row in sorted(self._missed.items(), reverse=True):
                ends.append(_end(depths))
                behind.append([before + more for before, more in zip(behind[-1], row, strict=True)])
            self._behind = ends[::-1], behind[::-1]
        ends, behind = self._behind
        return behind[bisect_right(ends, capacity)]


def _class(depth: int) -> int:
    """The class of a depth: its highest bits and how many bits are behind them. Classes are ordered as depths."""
    behind = max(0, depth.bit_length() - _FRACTION_BITS - 1)
    return (behind << _FRACTION_BITS) + (depth >> behind)


def _end(depths: int) -> int:
    """The middle of a class, so that classes neither raise nor lower a curve; exact below 128 blocks."""
    behind = max(0, (depths >> _FRACTION_BITS) - 1)
    first = (depths - (behind << _FRACTION_BITS)) << behind
    return first + ((1 << behind) - 1) // 2
