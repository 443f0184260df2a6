"""How ``simulate`` grows: with requests, with the length of prompts, and in memory.

Law of this file: growth is a figure beside the smallest of its own kind in the same run, and the table shows every
point of it. ``KVBM_FULL=1`` measures more points, and memory over 100,000 requests instead of 20,000.
"""

import os
import statistics
import subprocess
import sys
import time
from functools import cache
from typing import Final

import msgspec

from tests.benchmarks.bench_machine import BLOCK_TOKENS, LONG_PROMPTS, SHORT, Load, Run
from tests.benchmarks.harness import Figure, Target

FULL: Final = bool(os.environ.get("KVBM_FULL"))
REQUESTS: Final = (1_000, 2_000, 4_000, 8_000, 16_000) if FULL else (1_000, 4_000, 16_000)
PROMPTS: Final = (1_024, 2_048, 4_096, 8_192, 16_384) if FULL else (1_024, 4_096, 16_384)
BLOCKS: Final = 60_000
"""Prompt blocks that a point of the second table simulates, whatever their length."""
MEMORY_REQUESTS: Final = 100_000 if FULL else 20_000
GENERATED: Final = "multiturn:sessions=50,system=64,user=48,output=24,turns=4,requests={requests}"


class Point(msgspec.Struct, frozen=True):
    """One size: seconds of the processor, requests, and prompt blocks."""

    size: int
    seconds: float
    requests: int
    blocks: int


def _point(size: int, load: Load) -> Point:
    run = Run(load, tiers=False)
    began = time.thread_time_ns()
    run()
    seconds = (time.thread_time_ns() - began) / 1e9
    return Point(size, seconds, load.requests, load.requests * (load.prompt // BLOCK_TOKENS))


@cache
def by_requests() -> list[Point]:
    """The short load, more and more of it. The smallest also once after the largest: a neighbour slows both."""
    points = [_point(count, msgspec.structs.replace(SHORT, requests=count)) for count in REQUESTS]
    return [_calmer(points[0], _point(REQUESTS[0], msgspec.structs.replace(SHORT, requests=REQUESTS[0]))), *points[1:]]


@cache
def by_prompt() -> list[Point]:
    """As many blocks in longer and longer prompts, at the same tokens a second and on the same device."""
    def load(tokens: int) -> Load:
        return msgspec.structs.replace(
            LONG_PROMPTS, requests=BLOCKS * BLOCK_TOKENS // tokens, prompt=tokens,
            per_second=LONG_PROMPTS.per_second * LONG_PROMPTS.prompt / tokens,
        )

    points = [_point(tokens, load(tokens)) for tokens in PROMPTS]
    return [_calmer(points[0], _point(PROMPTS[0], load(PROMPTS[0]))), *points[1:]]


def _calmer(one: Point, other: Point) -> Point:
    return msgspec.structs.replace(one, seconds=statistics.mean((one.seconds, other.seconds)))


def linear_in_requests() -> Figure:
    """A request among the most and among the fewest."""
    first, last = by_requests()[0], by_requests()[-1]
    return _growth(
        f"simulate a request of {last.size:,}", last.seconds / last.requests, f"a request of {first.size:,}",
        first.seconds / first.requests, 1.25,
    )


def linear_in_prompt() -> Figure:
    """A block of the longest and of the shortest prompts."""
    first, last = by_prompt()[0], by_prompt()[-1]
    return _growth(
        f"simulate a block of {last.size:,}-token prompts", last.seconds / last.blocks,
        f"{first.size:,}-token prompts", first.seconds / first.blocks, 1 / 0.8,
    )


def _growth(name: str, seconds: float, reference: str, reference_s: float, most: float) -> Figure:
    return Figure(name, seconds * 1e9, reference, reference_s * 1e9, seconds / reference_s, Target(ratio=most))


def memory() -> Figure:
    """The largest resident set of ``simulate`` over generated requests, beside a tenth of them."""
    name = f"simulate {MEMORY_REQUESTS:,} generated requests, resident"
    large, small = resident_bytes(MEMORY_REQUESTS), resident_bytes(MEMORY_REQUESTS // 10)
    target = Target(ns=150e6)
    return Figure(name, large, f"{MEMORY_REQUESTS // 10:,} of them", small, large / small, target, unit="B")


def resident_bytes(requests: int) -> int:
    """What ``simulate`` needs at most, in a process of its own.

    By ``VmHWM``: the ``ru_maxrss`` of a child begins with that of the process that started it.
    """
    code = (
        "import sys\n"
        "from kvbm_console.planning.options import SimulateOptions\n"
        "from kvbm_console.planning.run import simulate\n"
        "simulate(SimulateOptions(trace=sys.argv[1], total_kv_blocks=2048, kv_cpu_blocks=8192))\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    command = [sys.executable, "-c", code, GENERATED.format(requests=requests)]
    return 1_024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def growth_table() -> list[list[str]]:
    """Every point of both growths."""
    rows = [["simulate", "seconds", "requests/s", "prompt blocks/s", "a block, of the first"]]
    for what, points in (("requests", by_requests()), ("tokens of prompt", by_prompt())):
        first = points[0].seconds / points[0].blocks
        rows += [
            [f"{point.size:,} {what}", f"{point.seconds:.2f}", f"{point.requests / point.seconds:,.0f}",
             f"{point.blocks / point.seconds:,.0f}", f"{point.seconds / point.blocks / first:.2f}x"]
            for point in points
        ]
    return rows


BENCHES: Final = {
    f"simulate a request of {REQUESTS[-1]:,}": linear_in_requests,
    f"simulate a block of {PROMPTS[-1]:,}-token prompts": linear_in_prompt,
    f"simulate {MEMORY_REQUESTS:,} generated requests, resident": memory,
}
TABLES: Final = {"simulate growth": growth_table}
