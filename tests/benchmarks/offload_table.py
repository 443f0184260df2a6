"""When to copy down: thresholds and laws side by side, as the table in ``docs/offloading.md``.

``python -m tests.benchmarks.offload_table`` prints it, and with ``-v`` each load; ``--loads N`` takes the first N
generated loads of 50. A hit rate is that of ``simulate``: of first admissions.

A run is chaotic: another step time by a thousandth changes who is preempted, and the hit rate by points. With
``--step-times N`` a cell is the mean over N step times, each 0.2 % from the next, and a last line tells how much
write-through differs from itself.

``--bar POINTS`` judges the default against write-through on each generated load. It takes further step times, each
0.05 % from the next, until the mean difference plus two standard errors is at most so many points, or 39 are over. The
exit status is 1 if a load is not within the bar then.

Law of this file: a row is a function of its load; without the shared trace its rows are missing.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, median, stdev
from typing import Any, Final

import msgspec

from kvbm_console.planning.meter import Meter
from kvbm_console.planning.options import COMPAT_BANDWIDTH, OFFLOAD_THRESHOLD, STEP_NS, SimulateOptions
from kvbm_console.planning.run import build_rig, open_trace
from tests.conftest import shared_directory

RULES: Final[dict[str, dict[str, Any]]] = {
    "write-through": {"kv_offload_threshold": 0.0},
    "0.5": {"kv_offload_threshold": 0.5},
    "0.7": {"kv_offload_threshold": 0.7},
    "0.9": {"kv_offload_threshold": 0.9},
    "original": {"kv_offload_threshold": 0.9, "kv_offload_law": "total"},
    "no tiers": {"kv_cpu_blocks": 0, "kv_disk_blocks": 0},
}
TRACE_SIZES: Final = (
    (512, 2_000, 20_000, 2_000), (512, 1_000, 4_000, 1_000), (1_024, 4_000, 40_000, 1_000), (512, 8_000, 0, 1_000),
)
"""Device, host and disk in blocks, and the requests."""
GENERATED: Final = 50
RUNS_LEAST: Final = 5
RUNS_MOST: Final = 39


class Outcome(msgspec.Struct, frozen=True):
    """One run."""

    hit_rate: float
    down_bytes: int
    preemptions: int


def loads(count: int = GENERATED) -> Iterator[tuple[str, SimulateOptions]]:
    """Name and options of each load; generated ones have names that begin with their kind."""
    shared = shared_directory()
    trace = None if shared is None else shared / "traces" / "mooncake_conversation_trace.jsonl"
    if trace is not None and trace.exists():
        for device, host, disk, limit in TRACE_SIZES:
            title = f"shared trace, {limit:,} requests, {device:,} / {host:,} / {disk:,} blocks of 512 tokens"
            yield title, SimulateOptions(
                trace=f"mooncake:{trace}", limit=limit, block_size=512, total_kv_blocks=device, kv_cpu_blocks=host,
                kv_disk_blocks=disk, stats_every=0, kv_transfer_bandwidth=COMPAT_BANDWIDTH,
            )
    yield "the demo's chats, 1,000 requests, 512 / 1,024 / 4,096 blocks", SimulateOptions(
        trace="multiturn:requests=1000", total_kv_blocks=512, kv_cpu_blocks=1_024, kv_disk_blocks=4_096,
        max_num_batched_tokens=256, stats_every=0, kv_transfer_bandwidth=COMPAT_BANDWIDTH,
    )
    for seed in range(count):
        yield generated(seed)


def generated(seed: int) -> tuple[str, SimulateOptions]:
    """Chats of a seed; each fifth load asks several questions about each of a few long documents."""
    dice = random.Random(f"offload/{seed}")
    if seed % 5 == 4:
        kind, system = "documents", dice.choice([4_096, 16_384, 65_536])
        sessions, prompts, turns = dice.randint(4, 8), dice.randint(6, 12), dice.randint(1, 2)
        user, output, requests = 64, 32, 80
    else:
        kind, system = "chats", dice.choice([0, 256, 1_024])
        sessions, prompts, turns = dice.randint(10, 40), dice.randint(1, 6), dice.randint(3, 8)
        user, output, requests = dice.choice([60, 240, 500]), dice.choice([64, 160]), 250
    context = (system + turns * (user + output) * 3 // 2) // 16 + 2
    device = int(context * dice.uniform(2, 5))
    host = int(device * dice.uniform(1, 4))
    settings = f"sessions={sessions},prompts={prompts},system={system},user={user},output={output},turns={turns}"
    return kind, SimulateOptions(
        trace=f"multiturn:{settings},think={dice.choice([0.5, 1, 5])},requests={requests},seed={seed}",
        total_kv_blocks=device, kv_cpu_blocks=host, kv_disk_blocks=dice.choice([0, 2, 5, 10]) * host, stats_every=0,
        kv_transfer_bandwidth=dice.choice([100.0, 10.0, 1.0]),
    )


def run(options: SimulateOptions) -> Outcome:
    """Run one cell."""
    rig = build_rig(options, open_trace(options), Meter(stats_every=0))
    rig.dispatcher.publish = lambda stimulus, outcome: None
    rig.run_to_end()
    totals = rig.leader.state.totals
    moved = sum(totals.moved_blocks.get(route, 0) for route in ("G1>G2", "G2>G3", "G1>G3"))
    return Outcome(
        100 * sum(totals.hit_blocks) / max(1, totals.prompt_blocks), moved * options.block_bytes, totals.preemptions,
    )


def timed(options: SimulateOptions, count: int) -> list[SimulateOptions]:
    """The options with so many step times around the usual one."""
    if count == 1:
        return [options]
    steps = range(-(count // 2), count - count // 2)
    return [msgspec.structs.replace(options, step_base=round(STEP_NS * (1 + 0.002 * at))) for at in steps]


def averaged(outcomes: Sequence[Outcome]) -> Outcome:
    """Mean rates, and mean counts rounded."""
    return Outcome(
        mean(one.hit_rate for one in outcomes),
        round(mean(one.down_bytes for one in outcomes)), round(mean(one.preemptions for one in outcomes)),
    )


class Judged(msgspec.Struct, frozen=True):
    """How many points the default lies below write-through on a load: the mean over ``runs`` step times, and its
    standard error."""

    runs: int
    below: float
    error: float


def judge(asked: tuple[SimulateOptions, float]) -> Judged:
    """Compare the default with write-through until it is known to be within the bar."""
    options, bar = asked
    default = {"kv_offload_threshold": OFFLOAD_THRESHOLD}
    below: list[float] = []
    while True:
        at = (len(below) + 1) // 2 * (-1 if len(below) % 2 else 1)
        one, other = (
            run(msgspec.structs.replace(options, step_base=round(STEP_NS * (1 + 0.0005 * at)), **rule))
            for rule in (RULES["write-through"], default)
        )
        below.append(one.hit_rate - other.hit_rate)
        if len(below) < RUNS_LEAST:
            continue
        error = stdev(below) / len(below) ** 0.5
        if mean(below) + 2 * error <= bar or len(below) == RUNS_MOST:
            return Judged(len(below), mean(below), error)


def judge_all(count: int, bar: float) -> int:
    """Judge the generated loads and print each; the exit status."""
    kept = 0
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        asked = [(generated(seed)[1], bar) for seed in range(count)]
        for seed, judged in enumerate(pool.map(judge, asked)):
            kept += judged.below <= bar
            print(f"load {seed}: {judged.below:.2f} +- {judged.error:.2f} points below write-through, "
                  f"over {judged.runs} step times", flush=True)
    print(f"{kept} of {count} loads are at most {bar:g} points below on the mean")
    return int(kept < count)


def cells(outcomes: list[Outcome]) -> str:
    """Hit rate, GB copied down and preemptions of one row."""
    return " | ".join(
        f"{one.hit_rate:.2f} %, {one.down_bytes / 1e9:,.1f}, {one.preemptions:,}" for one in outcomes
    )


def main() -> int:
    """Print the table, and how far the default is from write-through."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loads", type=int, default=GENERATED)
    parser.add_argument("--step-times", type=int, default=1)
    parser.add_argument("--bar", type=float)
    parser.add_argument("-v", action="store_true")
    said = parser.parse_args()
    if said.bar is not None:
        return judge_all(said.loads, said.bar)
    named = list(loads(said.loads))
    asked = [
        one for _, options in named for rule in RULES.values()
        for one in timed(msgspec.structs.replace(options, **rule), said.step_times)
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = []
        for outcome in pool.map(run, asked):
            found.append(outcome)
            print(f"{len(found)} of {len(asked)}: {cells([outcome])}", file=sys.stderr, flush=True)
    each = [found[at : at + said.step_times] for at in range(0, len(found), said.step_times)]
    means = list(map(averaged, each))
    rows = [means[at : at + len(RULES)] for at in range(0, len(means), len(RULES))]
    print("| load: hit rate, GB copied down, preemptions | " + " | ".join(RULES) + " |")
    print("|---" * (len(RULES) + 1) + "|")
    groups: dict[str, list[list[Outcome]]] = {}
    for (name, _), row in zip(named, rows, strict=True):
        groups.setdefault(name, []).append(row)
    for name, group in groups.items():
        shown = [
            Outcome(
                mean(one.hit_rate for one in of),
                sum(one.down_bytes for one in of), sum(one.preemptions for one in of),
            )
            for of in zip(*group, strict=True)
        ]
        title = name if len(group) == 1 else f"{len(group)} loads of {name}: mean, sum, sum"
        print(f"| {title} | {cells(shown)} |")
    default = list(RULES).index(f"{OFFLOAD_THRESHOLD:g}" if OFFLOAD_THRESHOLD else "write-through")
    for name, at in zip(RULES, range(len(RULES) - 1), strict=False):
        below = max(row[0].hit_rate - row[at].hit_rate for row in rows)
        more = [row[at].preemptions - row[-1].preemptions for row in rows]
        mark = " (the default)" if at == default else ""
        print(f"\n{name}{mark}: at most {below:.2f} points below write-through; "
              f"more preemptions than without tiers on {sum(one > 0 for one in more)} of {len(rows)} loads, "
              f"{sum(row[at].preemptions for row in rows):,} of {sum(row[-1].preemptions for row in rows):,} in all")
    if said.step_times > 1:
        differ = [max(one.hit_rate for one in of) - min(one.hit_rate for one in of) for of in each[:: len(RULES)]]
        print(f"\nwrite-through differs from itself by {median(differ):.2f} points (median), {max(differ):.2f} at most")
    if said.v:
        for (name, options), row in zip(named, rows, strict=True):
            print(f"{name}: {cells(row)}  {options.trace} {options.total_kv_blocks} {options.kv_cpu_blocks} "
                  f"{options.kv_disk_blocks} {options.kv_transfer_bandwidth}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
