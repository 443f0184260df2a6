"""Chains: what an event stream tells of its blocks beside their hashes, and how long these blocks lived.

Theory of operation
-------------------
A stream names the block in front of each chain of stored blocks. ``parent_of`` keeps that parent for each place of the
pool, so the resident blocks form a forest:

    stored: a b c, in front of them nothing      parent_of: a 0, b a, c b
    stored: d e, in front of them b              parent_of: d b, e d          b has two continuations: c and d

Two prompts with equal tokens have different hashes if their LoRA, salt or images differ. A mark keeps the digest of the
tokens of such a block, so equal tokens under another context can be found.

Law of this file: a place that is empty has no parent, and only hashes of the pool have marks.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvbm_console.core.columns import copied, numpy, zeros
from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import EMPTY_HASH

LIVES: Final = 64
"""Classes of lifetimes, whose times are int64: class k counts blocks that lived for less than 2**k ns, and no shorter
class."""
_AGES_NS: Final = array("q", [1 << index for index in range(LIVES - 1)])
"""The least age of each class but the first."""


class BlockMark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A digest of a block's tokens without their context (0 if unknown), and the context as words ``name=value``."""

    content: int
    context: str


class Chains:
    """The parents, marks and lives of the blocks of one pool. Only ``CacheState.apply`` writes them."""

    __slots__ = ("again", "lived", "marks", "parent_of", "stored_blocks")

    def __init__(self) -> None:
        numpy()  # now, so that no report waits for its import
        self.parent_of = zeros("Q", 0)
        """The hash in front of the block of each place; 0 at the beginning of a prompt, and if unknown."""
        self.marks: dict[int, BlockMark] = {}
        self.stored_blocks = 0
        """Blocks that were stored since the pool exists."""
        self.lived = [0] * LIVES
        """Evicted blocks of known lifetime by its class."""
        self.again: dict[tuple[int, int], int] = {}
        """Blocks that were stored again: (less than so many ns, less than so many evictions) after their eviction."""

    def grow(self, places: int) -> None:
        """Room for this number of places."""
        self.parent_of = copied(self.parent_of, places)

    def copy(self) -> "Chains":
        """A copy that shares nothing with this one."""
        other = Chains()
        other.parent_of, other.marks = copied(self.parent_of), dict(self.marks)
        other.stored_blocks, other.lived, other.again = self.stored_blocks, list(self.lived), dict(self.again)
        return other

    def clear(self) -> None:
        """Forget the blocks and keep the counts of earlier lives."""
        self.parent_of = zeros("Q", len(self.parent_of))
        self.marks.clear()

    def mark(self, stored: Sequence[int], at: Sequence[int], contents: Sequence[int], contexts: Sequence[str]) -> None:
        """The stored blocks at these positions have marks."""
        for position, content, context in zip(at, contents, contexts, strict=True):
            if not 0 <= position < len(stored):
                raise FoldError(f"block {position} of {len(stored)} stored blocks is marked")
            self.marks[stored[position]] = BlockMark(content, context)

    def count_lives(self, ages_ns: Any) -> None:
        """Count evicted blocks by how long they lived, an array of numpy's."""
        classes = numpy().searchsorted(numpy().asarray(_AGES_NS), ages_ns, side="right")
        for index, blocks in enumerate(numpy().bincount(classes).tolist()):
            self.lived[index] += blocks

    def count_again(self, within_ns: Sequence[int], within_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Count blocks that were stored again."""
        for ns, evictions, count in zip(within_ns, within_blocks, blocks, strict=True):
            self.again[ns, evictions] = self.again.get((ns, evictions), 0) + count

    def again_within(self, ns: int) -> int:
        """Blocks that were stored again in less than this time after their eviction; ``ns`` is one of
        ``AGE_BOUNDS_NS``."""
        return sum(count for (within, _), count in self.again.items() if within <= ns)

    def lived_within(self, share: float) -> int | None:
        """The smallest bound in ns below which this share of the evicted blocks lived; None without an eviction."""
        wanted, seen = share * sum(self.lived), 0
        for index, count in enumerate(self.lived):
            seen += count
            if seen and seen >= wanted:
                return int(2**index)
        return None


def fronts_of(stored: list[int], counts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The hash in front of each of these blocks, which are chains of ``counts`` blocks behind ``parents``.

    >>> fronts_of([5, 6, 7], [2, 1], [0, 6])
    [0, 5, 6]
    """
    if len(counts) == len(parents) == 1 and counts[0] == len(stored):  # the most frequent case by far
        return [parents[0], *stored[:-1]]
    if sum(counts) != len(stored) or len(counts) != len(parents) or min(counts, default=1) < 1:
        raise FoldError(f"{len(counts)} chains behind {len(parents)} parents do not hold {len(stored)} blocks")
    fronts = [EMPTY_HASH, *stored[:-1]]
    at = 0
    for count, parent in zip(counts, parents, strict=True):
        fronts[at] = parent
        at += count
    return fronts
