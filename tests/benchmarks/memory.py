"""Bytes of a leader's memory by structure, for ``docs/memory.md``: ``python -m tests.benchmarks.memory``.

The embedded engine runs until every table has reached its bound, about 10^6 events. Each object is then counted once,
for the structure that comes first in the table. ``--g3 N`` sets the capacity of the disk tier, ``--events N`` the
length of the run.
"""

import argparse
import gc
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, Final

from kvbm_console.core.eviction.policy import DEFAULT_POLICY, PolicyConfig
from kvbm_console.core.leader import Leader
from kvbm_console.core.leader.memory import PoolMemory
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.simulator.embedded import build, default_engine_config, default_leader_config, parse_workload

_SHARED: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
"""Objects that others refer to and do not own."""
EVICTIONS: Final = ("left", "left_before")


def visit(root: object, seen: set[int], size: Callable[[object], int] = lambda _: 1) -> int:
    """The sum of the sizes of what ``root`` refers to and ``seen`` does not have, which then has it too."""
    total, waiting = 0, [root]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen and not isinstance(found, _SHARED):
            seen.add(id(found))
            total += size(found)
            waiting += gc.get_referents(found)
    return total


def bytes_of(parts: Iterable[object], seen: set[int]) -> int:
    """Bytes of these objects and of what they refer to, without objects that were counted before."""
    return sum(visit(part, seen, sys.getsizeof) for part in parts)


def rows(leader: Leader) -> Iterable[tuple[str, int, int]]:
    """(structure, entries, bytes) of all pools together."""
    live, seen = leader.live_memory, set[int]()
    memory, lower = live.memory, leader.lower_pools()
    rules: list[Any] = [live.policies[pool.info.pool] for pool in lower]

    def row(title: str, count: int, parts: Iterable[object]) -> tuple[str, int, int]:
        return title, count, bytes_of(parts, seen)

    def column(names: Iterable[str], pools: Iterable[PoolFacts | PoolMemory]) -> list[object]:
        return [getattr(pool, name) for pool in pools for name in names]

    blocks = sum(len(pool.by_hash) for pool in lower)
    yield row("resident block: facts", blocks, column(("hash_of", "content", "refs", "stored_at", "by_hash"), lower))
    yield row("resident block: prefixes", blocks, [memory.parent_of, *(
        getattr(rule._tree, name) for rule in rules for name in ("run_of", "behind")
    )])
    yield row("resident block: orders of the leaves", blocks, [
        getattr(order, name) for rule in rules for order in (rule._order, rule._by_recency)
        for name in ("_live", "_heap")
    ])
    yield row("resident block: keys of the policy", blocks, [rule.policy._queued for rule in rules])
    known = sum(len(rule.policy._stamp) for rule in rules)
    yield row("resident or evicted block: history of the policy", known, [rule.policy for rule in rules])
    left = column(EVICTIONS, memory.pools)
    yield row("time of an eviction", sum(map(len, left)), left)  # type: ignore[arg-type]
    fates = [memory.history, *memory.older]
    yield row("fate of a block that is resident nowhere", sum(map(len, fates)), fates)
    yield row("all else", 1, [leader])


def main() -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--g3", type=int, default=32_768)
    parser.add_argument("--events", type=int, default=1_000_000)
    said = parser.parse_args()
    workload = parse_workload("multiturn")
    config = default_leader_config(
        workload, g2_blocks=8_192, g3_blocks=said.g3, eviction=PolicyConfig(policy=DEFAULT_POLICY)
    )
    rig = build(config, default_engine_config(workload, g1_blocks=2_048), workload)
    while rig.leader.state.seq < said.events:
        rig.run(None, 100_000_000)
    print("| structure | entries | MB | bytes each |\n|---|---|---|---|")
    for title, count, size in rows(rig.leader):
        print(f"| {title} | {count:,} | {size / 1e6:.1f} | {size // max(1, count):,} |")
    exported = len(rig.leader.export())
    print(f"\nan export has {exported / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
