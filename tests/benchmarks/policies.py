"""``python -m tests.benchmarks.policies``: hit rates of every policy over the same references, in one run.

A row is a load at a capacity. It has ``simple_lru``, ``learned``, the best other policy of this program, the best of
libCacheSim (``pip install libcachesim``; without it the columns are empty) and the optimum. Capacities are shares of
the load's distinct blocks. ``learned`` runs once with the ids of the load and once for each ``--relabel`` with other
ids, and its lowest hit rate counts. ``--trace SPEC`` adds a load, for example ``mooncake:FILE``. ``--coding DIR`` adds
loads of the sessions in the directory ``traces`` of callanjfox/kv-cache-tester. ``-v`` shows every policy.

A cache of libCacheSim may give up blocks of the prompt that it serves, or never take them. Blocks of a prompt that an
engine computes are in its memory, so ours may not. Their caches therefore run twice: with the capacity, and beside a
prompt of mean length (``beside``), which takes its places from theirs.

``learned`` was developed on ``CHOSEN_ON`` and on agentic sessions with odd numbers; all other loads are
held out. ``synthetic_trace.jsonl`` is Mooncake's synthetic trace.

Law of this file: a hit is a block in the leading run of resident blocks, for every policy. A prompt's blocks are
touched tail first, and libCacheSim's caches get exactly these touches.
"""

import argparse
import importlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, Final

import msgspec

from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.planning.cache_only import References, policy_named, references_of, replay
from kvbm_console.planning.traces import parse_trace
from tests.benchmarks.coding_sessions import MIXES, coding_sessions
from tests.conftest import shared_directory
from tests.core.eviction.generated import WORKLOADS, references_named

JUDGED: Final = "learned"
CHOSEN_ON: Final = (
    "chat-a", "chat-b", "chat-c", "agents-a", "agents-b", "agents-c", "default-a", "shared trace",
    "synthetic_trace.jsonl",
)
THEIRS: Final = (
    "LRU", "SLRU", "TwoQ", "ARC", "LIRS", "LFU", "LFUDA", "S3FIFO", "Sieve", "WTinyLFU", "LeCaR", "Cacheus",
)
"""Policies of libCacheSim."""
SHARES: Final = (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6)
"""Of the distinct blocks."""
PROMPTS_MIN: Final = 2
"""A capacity below so many of the longest prompt is left out. Below, it decides most who may give up own blocks."""
NEAR: Final = 0.5
"""Points from LRU to the optimum below which libCacheSim is not asked: no policy can be further ahead."""
GAP_MIN: Final = 5.0
"""Points between LRU and the optimum from which a row counts for the gap that is closed."""
ID_BITS: Final = 60


class Row(msgspec.Struct, frozen=True):
    """Hit rates in percent of one load at one capacity."""

    load: str
    capacity: int
    ours: dict[str, float]
    theirs: dict[str, float]
    beside: dict[str, float]
    """Theirs, with so many places less as a mean prompt has blocks."""
    relabelled: list[float]
    """Of ``JUDGED``, with its own ids first."""
    optimum: float
    reference_us: float
    """Of ``JUDGED``."""

    @property
    def judged(self) -> float:
        """The lowest over the labels."""
        return min(self.relabelled)

    @property
    def regret(self) -> float:
        """Points below the best other policy; negative: above it."""
        return max((*self.ours.values(), *self.theirs.values())) - self.judged

    @property
    def equal_regret(self) -> float:
        """Points below the best other policy, if a prompt has to be in memory beside theirs."""
        return max((*self.ours.values(), *self.beside.values())) - self.judged

    @property
    def own_regret(self) -> float:
        """Points below the best other policy of this program."""
        return max(self.ours.values()) - self.judged

    @property
    def closed(self) -> float | None:
        """Share of the way from LRU to the optimum, in percent; None where it is short."""
        gap = self.optimum - self.ours["simple_lru"]
        return None if gap <= GAP_MIN else 100 * (mean(self.relabelled) - self.ours["simple_lru"]) / gap

    def line(self) -> str:
        """A row of the table."""
        closed = "" if self.closed is None else f"{self.closed:.0f}"
        return (
            f"| {self.load} | {self.capacity:,} | {self.ours['simple_lru']:.1f} | {self.judged:.1f} "
            f"| {best_of(self.ours)} | {best_of(self.theirs)} | {best_of(self.beside)} | {self.optimum:.1f} "
            f"| {self.regret:+.1f} | {self.equal_regret:+.1f} | {closed} | {self.reference_us:.1f} |"
        )


def best_of(rates: dict[str, float]) -> str:
    """The highest rate with its policy, empty without any."""
    best = max(rates, key=rates.__getitem__, default=None)
    return "" if best is None else f"{rates[best]:.1f} {best}"


def relabelled(refs: References, seed: int) -> References:
    """The same references under random ids."""
    dice = random.Random(seed)
    names = {key: dice.getrandbits(ID_BITS) for keys in refs.keys for key in keys}
    return msgspec.structs.replace(refs, keys=[list(map(names.__getitem__, keys)) for keys in refs.keys])


def rate_of(name: str, refs: References, capacity: int) -> float:
    """Percent of the references that one of this program's policies finds."""
    return 100 * replay(refs, policy_named(name, PolicyConfig(), capacity, refs), capacity).hit_rate


def rate_of_theirs(library: Any, name: str, refs: References, capacity: int) -> float:
    """Percent of the references that a policy of libCacheSim finds."""
    cache, request = getattr(library, name)(cache_size=capacity), library.Request()
    request.obj_size = 1
    hits = 0
    for keys in refs.keys:
        for key in keys:
            request.obj_id = key
            if cache.find(request, False) is None:
                break
            hits += 1
        for key in reversed(keys):
            request.obj_id = key
            cache.get(request)
    return 100 * hits / refs.total


def row_of(load: str, labels: list[References], capacity: int, library: Any) -> Row:
    """Replay every policy."""
    refs = labels[0]
    ours = {name: rate_of(name, refs, capacity) for name in POLICIES if name != JUDGED}
    optimum = rate_of("belady", refs, capacity)
    asked = THEIRS if library and optimum - ours["simple_lru"] > NEAR else ()
    theirs, beside = (
        {name: rate_of_theirs(library, name, refs, places) for name in asked}
        for places in (capacity, capacity - round(refs.total / len(refs.keys)))
    )
    began = time.thread_time()
    judged = [rate_of(JUDGED, label, capacity) for label in labels]
    spent = time.thread_time() - began
    return Row(load, capacity, ours, theirs, beside, judged, optimum, 1e6 * spent / len(labels) / refs.total)


def loads(traces: list[str], names: list[str] | None, coding: Path | None) -> Iterator[tuple[str, References]]:
    """Every load by its name."""
    place = shared_directory()
    path = None if place is None else place / "traces" / "mooncake_conversation_trace.jsonl"
    if path is not None and path.is_file() and (names is None or "shared trace" in names):
        yield "shared trace", references_of(parse_trace(f"mooncake:{path}"))
    for spec in traces:
        yield spec.rpartition("/")[2] or spec, references_of(parse_trace(spec))
    if coding is not None:
        for seed, (sessions, minutes) in enumerate(MIXES):
            yield f"{sessions} sessions within {minutes} min", coding_sessions(coding, seed, sessions, minutes)
    for name in WORKLOADS:
        if names is None or name in names:
            yield name, references_named(name)


def capacities_of(refs: References) -> list[int]:
    """From far too small to more than half of everything."""
    distinct = len({key for keys in refs.keys for key in keys})
    least = PROMPTS_MIN * max(map(len, refs.keys))
    return [capacity for share in SHARES if (capacity := round(share * distinct)) >= least]


def summary(name: str, rows: list[Row]) -> str:
    """How the rows of some loads stand to the bars."""
    closed = [row.closed for row in rows if row.closed is not None]
    gap = f"{mean(closed):.1f} % of the gap closed over {len(closed)} rows" if closed else "no gap"
    worst, own = max(rows, key=lambda row: row.regret), max(rows, key=lambda row: row.own_regret)
    equal = max(rows, key=lambda row: row.equal_regret)
    return (
        f"{name}: {len(rows)} rows, {gap}; most below the best {worst.regret:.2f} ({worst.load}, {worst.capacity:,}), "
        f"beside a prompt {equal.equal_regret:.2f} ({equal.load}, {equal.capacity:,}), "
        f"below our own {own.own_regret:.2f} ({own.load}, {own.capacity:,}), "
        f"{sum(row.regret > 1.0 for row in rows)} and {sum(row.equal_regret > 1.0 for row in rows)} rows by more than "
        "a point; "
        f"{mean(row.reference_us for row in rows):.2f} us a reference"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], help="a further load, as simulate --trace takes it")
    parser.add_argument("--coding", type=Path, metavar="DIR", help="add loads of recorded coding sessions")
    parser.add_argument("--loads", help="names of loads, with commas (default: all)")
    parser.add_argument("--relabel", type=int, default=2, help="how often the ids are replaced (default: 2)")
    parser.add_argument("--no-peers", action="store_true", help="without libCacheSim")
    parser.add_argument("-v", action="store_true", help="every policy of every row")
    args = parser.parse_args()
    try:
        library = None if args.no_peers else importlib.import_module("libcachesim")
    except ImportError:
        library = None
        print("libcachesim is not installed: its columns are empty", file=sys.stderr)
    print(f"| load | blocks | LRU | {JUDGED} | best other of ours | best of libCacheSim | beside a prompt | optimum "
          "| below the best | beside a prompt | gap closed % | us |\n|---|---|---|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for name, refs in loads(args.trace, args.loads.split(",") if args.loads is not None else None, args.coding):
        labels = [refs, *(relabelled(refs, seed) for seed in range(args.relabel))]
        for capacity in capacities_of(refs):
            rows.append(row_of(name, labels, capacity, library))
            print(rows[-1].line(), flush=True)
            if args.v:
                every = {**rows[-1].ours, **rows[-1].theirs}
                print("  ".join(f"{policy} {rate:.1f}" for policy, rate in every.items()), file=sys.stderr)
    if not rows:
        raise SystemExit("no load of these names with a capacity of twice its longest prompt")
    for name, chosen in (("chosen on", True), ("held out", False)):
        part = [row for row in rows if (row.load in CHOSEN_ON) is chosen]
        if part:
            print(summary(name, part))


if __name__ == "__main__":
    main()
