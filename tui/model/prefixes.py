"""Prefixes: the resident blocks of an engine's event stream as a forest, with runs of blocks that do not branch as one.

Theory of operation
-------------------
A stream names the block in front of each chain. Its blocks therefore form trees, and a tree is drawn by runs:

    a - b - c - d            a, b           2 blocks, 3 below it
            `- e                |- c, d     2 blocks
                                `- e        1 block

A block in several tiers counts once, for the nearest tier. A block whose parent is gone is the root of a tree that
``continues`` an evicted prefix. Parents of a broken stream may form a circle, and no root leads to such blocks.

Law of this file: each resident block is in one run, or counted in ``unreachable``.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

PREFIX_BLOCKS_MAX: Final = 200_000
"""Blocks of an engine that are drawn; a forest of so many takes a fifth of a second."""


class PrefixRun(msgspec.Struct, gc=False):
    """Blocks in a row without a branch. ``depth`` counts the blocks in front of it."""

    first: int
    last: int
    blocks: int
    depth: int
    tier: Tier
    """The nearest tier of its first block."""
    stored_ns: int
    """When its newest block was stored, or ``UNKNOWN_NS``."""
    context: str
    continues: bool
    """True if the block in front of it is known and gone."""
    total: int = 0
    """Its blocks and all blocks behind it."""
    next: list["PrefixRun"] = []
    """The runs that continue it, the largest first."""


class PrefixForest(msgspec.Struct):
    """The trees of an engine, the largest first."""

    roots: list[PrefixRun]
    blocks: int
    unreachable: int

    def runs(self) -> Iterator[PrefixRun]:
        """All runs; those in front come first."""
        todo = list(reversed(self.roots))
        while todo:
            run = todo.pop()
            yield run
            todo += reversed(run.next)


def streamed_pools(state: CacheState, source: int) -> list[PoolFacts]:
    """The pools of a stream, near tiers first. Of a model with several groups the first group stands for all."""
    pools = [pool for pool in state.pools if pool.info.source == source and pool.info.authority is Authority.STREAM]
    groups = {pool.info.group for pool in pools}
    return sorted((pool for pool in pools if pool.info.group == min(groups)), key=lambda pool: pool.info.tier)


def prefix_forest(state: CacheState, source: int) -> PrefixForest | None:
    """The resident blocks of a source as trees; None if there are too many."""
    pools = streamed_pools(state, source)
    if sum(len(pool.by_hash) for pool in pools) > PREFIX_BLOCKS_MAX:
        return None
    fronts: dict[int, int] = {}
    place_of: dict[int, tuple[PoolFacts, int]] = {}
    for pool in pools:
        parent_of = pool.chains.parent_of if pool.chains is not None else ()
        for key, place in pool.by_hash.items():
            if not fronts.get(key):
                fronts[key] = parent_of[place] if parent_of else 0
            place_of.setdefault(key, (pool, place))
    behind: dict[int, list[int]] = {}
    for key, front in fronts.items():
        if front in fronts and front != key:
            behind.setdefault(front, []).append(key)
    starts = [key for key, front in fronts.items() if front not in fronts]
    runs: list[PrefixRun] = []
    roots = [_grow(start, 0, fronts, behind, place_of, runs) for start in starts]
    for run in reversed(runs):
        run.total = run.blocks + sum(child.total for child in run.next)
        run.next.sort(key=lambda child: -child.total)
    roots.sort(key=lambda run: -run.total)
    reached = sum(run.blocks for run in runs)
    return PrefixForest(roots, len(fronts), len(fronts) - reached)


def _grow(
    start: int, depth: int, fronts: dict[int, int], behind: dict[int, list[int]],
    place_of: dict[int, tuple[PoolFacts, int]], runs: list[PrefixRun],
) -> PrefixRun:
    """The tree that begins with a block; its runs are appended, those in front first."""
    root: PrefixRun | None = None
    todo: list[tuple[int, int, PrefixRun | None]] = [(start, depth, None)]
    while todo:
        key, depth, before = todo.pop()
        pool, place = place_of[key]
        marks = pool.chains.marks if pool.chains is not None else {}
        mark = marks.get(key)
        run = PrefixRun(
            key, key, 1, depth, pool.info.tier, pool.stored_at[place], mark.context if mark is not None else "",
            before is None and fronts[key] != 0, next=[],
        )
        while len(behind.get(run.last, ())) == 1:
            key = behind[run.last][0]
            if key in marks and marks[key].context:
                break  # another image or session begins here
            pool, place = place_of[key]
            run.last, run.blocks = key, run.blocks + 1
            run.stored_ns = max(run.stored_ns, pool.stored_at[place])
        runs.append(run)
        if before is None:
            root = run
        else:
            before.next.append(run)
        todo += [(key, depth + run.blocks, run) for key in behind.get(run.last, ())]
    assert root is not None
    return root
