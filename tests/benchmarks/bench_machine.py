"""Figures of the whole machine: leader, engine, links and deadlines under virtual time, unobserved.

Law of this file: the load is fixed (shape, rate, shared prefixes, sizes), because simulated speed depends on all of
them. Half of each prompt is its tenant's. The reference is the device pool alone: it allocates, stores and releases
as many blocks for as many requests.
"""

from collections.abc import Iterator
from typing import Final

from kvbm_console.core.config import SECOND_NS, LeaderConfig
from kvbm_console.core.device_pool import DevicePool
from kvbm_console.engines.config import EngineConfig
from kvbm_console.engines.embedded import build
from kvbm_console.engines.workloads import Capacities, Request
from tests.benchmarks.harness import Figure, Target, measure

BLOCK_TOKENS: Final = 16
PROMPT_BLOCKS: Final = 80
OUTPUT_TOKENS: Final = 64
TENANTS: Final = 50
PER_SECOND: Final = 20
REQUESTS: Final = 300
G1_BLOCKS: Final = 4_096
G2_BLOCKS: Final = 16_384
ROUNDS: Final = 3


class Steady:
    """``requests`` of 1,280 prompt and 64 output tokens, evenly spaced, from tenants in turn."""

    name = "steady"
    endless = False
    capacities = Capacities(BLOCK_TOKENS, G1_BLOCKS, G2_BLOCKS, 0, 8_192)

    def __init__(self, requests: int) -> None:
        shared = PROMPT_BLOCKS // 2
        own, more = PROMPT_BLOCKS - shared, OUTPUT_TOKENS // BLOCK_TOKENS
        tenants = [tuple(range(1 + at * shared, 1 + (at + 1) * shared)) for at in range(TENANTS)]
        key = 1 + TENANTS * shared
        self.requests = []
        for at in range(requests):
            hashes = tenants[at * 7 % TENANTS] + tuple(range(key, key + own))
            outputs = tuple(range(key + own, key + own + more))
            key += own + more
            self.requests.append(Request(
                f"request-{at:06}", at * SECOND_NS // PER_SECOND, hashes, outputs, PROMPT_BLOCKS * BLOCK_TOKENS,
                OUTPUT_TOKENS,
            ))

    def begin(self, block_tokens: int) -> None:
        """As ``Workload.begin``."""
        assert block_tokens == BLOCK_TOKENS

    def arrivals(self) -> Iterator[Request]:
        """As ``Workload.arrivals``."""
        return iter(self.requests)

    def finished(self, request: Request, at_ns: int) -> None:
        """Nothing follows."""


def run_machine(workload: Steady, g2_blocks: int) -> int:
    """Simulate to the end; the requests that finished."""
    rig = build(
        LeaderConfig(block_tokens=BLOCK_TOKENS, g2_blocks=g2_blocks), EngineConfig(g1_blocks=G1_BLOCKS), workload
    )
    rig.run_to_end()
    return rig.engine.totals.finished


def _simulate(name: str, g2_blocks: int, target: Target) -> Figure:
    workload = Steady(REQUESTS)
    assert run_machine(workload, g2_blocks) == REQUESTS

    def pool_alone() -> None:
        pool = DevicePool(G1_BLOCKS)
        for request in workload.requests:
            hashes = request.hashes + request.output_hashes
            prefix = pool.match(hashes)
            ids = pool.allocate(len(hashes) - len(prefix), prefix) or []
            pool.store(ids, hashes[len(prefix):])
            pool.release(prefix + ids)

    return measure(
        name, lambda: run_machine(workload, g2_blocks), REQUESTS, "the device pool alone", pool_alone, REQUESTS,
        target, rounds=ROUNDS, turns=2,
    )


def tiers_off() -> Figure:
    """Only G1. BLIS: 3,080 requests a second."""
    return _simulate("simulate a request, tiers off", 0, Target(ns=SECOND_NS / 8_000))


def tiers_on() -> Figure:
    """With a host tier. BLIS: 1,220 requests a second."""
    return _simulate("simulate a request, tiers on", G2_BLOCKS, Target(ns=SECOND_NS / 5_500))


BENCHES: Final = {"simulate a request, tiers off": tiers_off, "simulate a request, tiers on": tiers_on}
