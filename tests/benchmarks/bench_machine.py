"""Figures of ``simulate`` under virtual time, as the command runs it: by a ledger, which counts and publishes nothing.

Law of this file: a load is fixed (shape, rate, shared prefixes, sizes), because simulated speed depends on all of them.
Half of each prompt is its tenant's. The reference of a plain run is the device pool alone, which allocates, stores and
releases as many blocks for as many requests. A leader that publishes stands beside the ledger, and the cost of tiers
beside the leader without them. Every other run has a run of its own kind beside it. BLIS, on like loads
and a machine like the one on which the targets were set: 3,080 / 1,220 requests a second without / with a host tier,
135 / 97 with prompts of 16,384 tokens, 1,111 / 47 with outputs of 2,048. ``peers`` measures BLIS and DynoSim beside it.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.planning.meter import Meter, StatsLine
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import build_ledger, build_rig, counted
from kvbm_console.simulator.device_pool import DevicePool
from kvbm_console.simulator.simulated import EngineTotals
from kvbm_console.simulator.workloads import Capacities, Request
from tests.benchmarks.harness import Figure, Target, measure

BLOCK_TOKENS: Final = 16
TENANTS: Final = 50
ROUNDS: Final = 3


class Load(msgspec.Struct, frozen=True):
    """What arrives, and on what; lengths in tokens."""

    requests: int = 300
    prompt: int = 1_280
    output: int = 64
    per_second: float = 20.0
    g1_blocks: int = 4_096
    g2_blocks: int = 16_384


SHORT: Final = Load()
LONG_PROMPTS: Final = Load(requests=60, prompt=16_384, per_second=5.0, g1_blocks=16_384, g2_blocks=65_536)
LONG_OUTPUTS: Final = Load(requests=80, output=2_048, per_second=2.0, g1_blocks=8_192, g2_blocks=32_768)


class Steady:
    """A ``Workload`` of requests of one shape, evenly spaced, from tenants in turn."""

    name = "steady"
    endless = False
    capacities = Capacities(BLOCK_TOKENS, 4_096, 16_384, 0, 8_192)

    def __init__(self, load: Load) -> None:
        blocks, more = load.prompt // BLOCK_TOKENS, load.output // BLOCK_TOKENS
        shared = blocks // 2
        own = blocks - shared
        tenants = [tuple(range(1 + at * shared, 1 + (at + 1) * shared)) for at in range(TENANTS)]
        key = 1 + TENANTS * shared
        self.requests = []
        for at in range(load.requests):
            hashes = tenants[at * 7 % TENANTS] + tuple(range(key, key + own))
            outputs = tuple(range(key + own, key + own + more))
            key += own + more
            self.requests.append(Request(
                f"request-{at:06}", round(at * SECOND_NS / load.per_second), hashes, outputs, load.prompt, load.output,
            ))

    def begin(self, block_tokens: int) -> None:
        """As ``Workload.begin``."""
        assert block_tokens == BLOCK_TOKENS

    def arrivals(self) -> Iterator[Request]:
        """As ``Workload.arrivals``."""
        return iter(self.requests)

    def finished(self, request: Request, at_ns: int) -> None:
        """Nothing follows."""


def _line(line: StatsLine) -> None:
    """Takes the stats lines, which the command tells as well."""


class Run:
    """A load that is simulated again and again; counts are those of the last time.

    By a ledger, as the command does, unless ``leader`` asks for one that publishes.
    """

    def __init__(self, load: Load, *, tiers: bool, leader: bool = False) -> None:
        self.load = load
        self.leader = leader
        self.workload = Steady(load)
        self.options = SimulateOptions(
            trace=self.workload.name, total_kv_blocks=load.g1_blocks, kv_cpu_blocks=load.g2_blocks if tiers else 0
        )
        self.steps = self.filled = self.moved = 0
        """Iterations, blocks computed, blocks copied."""
        self()

    def __call__(self) -> None:
        """Simulate to the end."""
        engine = self._with_leader() if self.leader or not counted(self.options) else self._with_ledger()
        assert engine.finished == self.load.requests
        self.steps = engine.iterations
        self.filled = (engine.prefill_tokens + engine.output_tokens) // BLOCK_TOKENS

    def _with_leader(self) -> EngineTotals:
        rig = build_rig(self.options, self.workload, Meter(stats_every=self.options.stats_every, stats=_line))
        rig.run_to_end()
        self.moved = sum(rig.leader.state.totals.moved_blocks.values())
        return rig.engine.totals

    def _with_ledger(self) -> EngineTotals:
        ledger = build_ledger(self.options, self.workload, _line)
        ledger.run_to_end()
        measures = ledger.measures()
        self.moved = sum(measures.totals.moved_blocks.values())
        return measures.engine

    def pool_alone(self) -> None:
        """As many blocks for as many requests through the device pool."""
        pool = DevicePool(self.load.g1_blocks)
        for request in self.workload.requests:
            hashes = request.hashes + request.output_hashes
            prefix = pool.match(hashes)
            ids = pool.allocate(len(hashes) - len(prefix), prefix) or []
            pool.store(ids, hashes[len(prefix):])
            pool.release(prefix + ids)


def _per_request(name: str, load: Load, tiers: bool, per_second: int) -> Figure:
    run = Run(load, tiers=tiers)
    return measure(
        name, run, load.requests, "the device pool alone", run.pool_alone, load.requests,
        Target(ns=SECOND_NS / per_second), rounds=ROUNDS, turns=2,
    )


def tiers_off() -> Figure:
    """Only G1."""
    return _per_request("simulate a request, tiers off", SHORT, False, 8_000)


def tiers_on() -> Figure:
    """With a host tier."""
    return _per_request("simulate a request, tiers on", SHORT, True, 5_500)


def through_the_leader() -> Figure:
    """Only G1, by a leader that decides nothing: what ``--check``, several hosts and records of requests get."""
    run, ledger = Run(SHORT, tiers=False, leader=True), Run(SHORT, tiers=False)
    return measure(
        "simulate a request through the leader, tiers off", run, SHORT.requests, "by the ledger", ledger,
        SHORT.requests, Target(ns=SECOND_NS / 3_080), rounds=ROUNDS, turns=2,
    )


def tiers_through_the_leader() -> Figure:
    """With a host tier, by a leader that publishes: for ``--check``, several hosts and records of requests."""
    run, ledger = Run(SHORT, tiers=True, leader=True), Run(SHORT, tiers=True)
    return measure(
        "simulate a request through the leader, tiers on", run, SHORT.requests, "by the ledger", ledger,
        SHORT.requests, Target(ns=SECOND_NS / 1_220), rounds=ROUNDS, turns=2,
    )


def long_prompts_off() -> Figure:
    """1,024 blocks of prompt in a request."""
    return _per_request("simulate a 16,384-token prompt, tiers off", LONG_PROMPTS, False, 600)


def long_prompts_on() -> Figure:
    """The same with a host tier."""
    return _per_request("simulate a 16,384-token prompt, tiers on", LONG_PROMPTS, True, 400)


def long_outputs() -> Figure:
    """Per block filled, so that it tells what an iteration costs."""
    run, short = Run(LONG_OUTPUTS, tiers=False), Run(SHORT, tiers=False)
    return measure(
        "simulate 2,048-token outputs, a block filled", run, run.filled, "64-token outputs", short, short.filled,
        Target(ratio=1.5), rounds=ROUNDS, turns=2,
    )


def tiers_per_step() -> Figure:
    """What the host tier adds to an iteration that a leader decides."""
    run, without = Run(SHORT, tiers=True, leader=True), Run(SHORT, tiers=False, leader=True)
    return measure(
        "simulate an iteration with tiers", run, run.steps, "without", without, without.steps, Target(ratio=1.6),
        rounds=ROUNDS, turns=2,
    )


def tiers_per_block() -> Figure:
    """What the host tier adds, by the blocks that it moves: figure minus reference is that time."""
    run, without = Run(SHORT, tiers=True, leader=True), Run(SHORT, tiers=False, leader=True)
    return measure(
        "simulate with tiers, a block moved", run, run.moved, "the same requests without", without, run.moved,
        Target(extra_ns=1_000), rounds=ROUNDS, turns=2,
    )


BENCHES: Final = {
    "simulate a request, tiers off": tiers_off, "simulate a request, tiers on": tiers_on,
    "simulate a request through the leader, tiers off": through_the_leader,
    "simulate a request through the leader, tiers on": tiers_through_the_leader,
    "simulate a 16,384-token prompt, tiers off": long_prompts_off,
    "simulate a 16,384-token prompt, tiers on": long_prompts_on,
    "simulate 2,048-token outputs, a block filled": long_outputs,
    "simulate an iteration with tiers": tiers_per_step, "simulate with tiers, a block moved": tiers_per_block,
}
