"""Iterations taken together against the same machine stepped one by one, over random machines and loads.

Law of this file: every call of the engine except those that tell iterations, with its time, every latency, counter and
place, the order of reuse, what stands below and the report are the same. ``KVBM_FULL=1`` compares ten times as many.
"""

import os
import random
from typing import Any

import msgspec
import pytest

from kvbm_console.core import stimuli as st
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.core.leader import Outcome
from kvbm_console.planning.meter import Meter, StatsLine
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.report import make_report, measure
from kvbm_console.planning.run import simulate
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.link import DEFAULT_LINKS
from kvbm_console.simulator.scheduler import Scheduler
from tests.simulator.loads import cloned, engine_of, load_of

FULL = bool(os.environ.get("KVBM_FULL"))
FIRST_SEED = int(os.environ.get("KVBM_SEED", "1"))
FEW = [*range(FIRST_SEED, FIRST_SEED + (300 if FULL else 30)), 155]
"""155 alone of the first 240 shows an engine that takes the end of a copy for a moment like any other."""
TOGETHER = 25
MANY = range(FIRST_SEED + 1_000, FIRST_SEED + (4_000 if FULL else 1_400), TOGETHER)


class Machine:
    """One machine of a seed, its report, and what its engine and mover said beside iterations."""

    def __init__(self, seed: int, *, windows: bool, clones: bool = False) -> None:
        dice = random.Random(seed)
        block = dice.choice([1, 4, 16, 16, 16])
        load = load_of(dice, block)
        if clones:
            load = cloned(random.Random(f"clones of {seed}"), load)
        leader = LeaderConfig(
            block_tokens=block, g2_blocks=dice.choice([0, 0, 50, 300, 3_000]), g3_blocks=dice.choice([0, 0, 0, 100]),
            offload_threshold=dice.choice([0.0, 0.3, 0.5, 0.9, 0.9, 1.0]), asynchronous=dice.random() < 0.7,
            offload_batch_blocks=dice.choice([1, 4, 64]), offload_hysteresis=dice.choice([0.0, 0.05, 0.3]),
            eviction=PolicyConfig(policy=dice.choice(POLICIES)), offload_law="order" if seed % 3 else "total",
            offload_prompt_only=seed % 5 == 4, offload_link_busy="queue" if seed % 7 == 6 else "skip",
        )
        engine = engine_of(dice, load, block)
        if leader.g3_blocks and dice.random() < 0.7:
            leader = msgspec.structs.replace(
                leader, g2_blocks=dice.choice([20, 50, 300]), prefetch=dice.choice(["chain", "ngram", "session"]),
                prefetch_stop=dice.choice(["best_effort", "wait_complete", "timeout"]),
                prefetch_timeout_ns=dice.choice([1_000_000, 40_000_000]),
                eviction=PolicyConfig(policy=dice.choice(POLICIES), disk_admission=dice.choice([0, 0, 2])),
            )
        self.log: list[Any] = []
        self.iterations: list[int] = []
        self.meter = Meter(keep_records=True)
        self.rig = build(leader, engine, load, publish=self._publish, links=DEFAULT_LINKS)
        self.meter.watch(self.rig.leader.state)

        def begin() -> None:
            self.rig.engine.windows = windows

        self.meter.after_prefill = begin
        self.rig.run_to_end()
        self.meter.point("decode")

    def _publish(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        self.meter(stimulus, outcome)
        if isinstance(stimulus, st.IterationScheduled):
            self.iterations.append(stimulus.count)
            told: Any = [stimulus.new, stimulus.resumed, stimulus.skipped, stimulus.unskipped, stimulus.first_tokens,
                         stimulus.progressed, stimulus.positions]
            if not any(told):
                return
        elif isinstance(stimulus, st.IterationFinished) or (
            isinstance(stimulus, st.BlocksAllocated) and self._decodes(stimulus.request)
        ):
            return
        else:
            told = msgspec.to_builtins(stimulus)[2:]
        self.log.append((type(stimulus).__name__, stimulus.at_ns, told))

    def _decodes(self, request: str) -> bool:
        """Blocks that a running request is given are told alone or with the iterations, as it suits."""
        slot = self.rig.leader.state.slot_named(request)
        return slot is not None and slot.computed_tokens(self.rig.leader.state.iteration) > 0 and not slot.staged and (
            slot.first_iteration is not None
        )

    @property
    def report(self) -> bytes:
        """The document of ``simulate``."""
        options = SimulateOptions(trace="load", total_kv_blocks=1, kv_cpu_blocks=1)
        return msgspec.json.encode(make_report(options, None, [measure(self.rig, self.meter)]))


def facts_of(rig: Rig) -> dict[str, Any]:
    """All that the end of a run leaves, under names; only when device blocks became full is not told so finely."""
    pool, leader = rig.engine.scheduler.pool, rig.leader
    state, live = leader.state, leader.live_memory
    facts: dict[str, Any] = {
        "free order": pool.free_order(), "hashes": list(pool.hash_of), "references": pool.refs,
        "places of a hash": {key: pool.match([key]) for key in pool.hash_of if key},
        "engine": msgspec.to_builtins(rig.engine.totals), "links": rig.mover.statistics(),
        "totals": msgspec.to_builtins(state.totals), "epoch": state.epoch, "iteration": state.iteration,
        "next": (state.next_slot, state.next_candidate, state.next_operation), "late": state.late,
        "open": (state.slots, state.candidates, state.operations, state.batches),
        "history": [list(part.items()) for part in (live.memory.history, *live.memory.older)],
        "parents": live.memory.parent_of,
        "prefetch": msgspec.to_builtins(live.memory.prefetch), "named": live.memory.named,
    }
    for at, (here, mine) in enumerate(zip(state.pools, live.memory.pools, strict=True)):
        lower = here.info.source == 0
        facts[f"pool {at}"] = (
            list(here.hash_of), bytes(here.content), list(here.refs), here.by_hash, here.copies, here.counts,
            list(here.stored_at) if lower else None,
        )
        facts[f"memory {at}"] = (
            mine.free, mine.unused, list(mine.exposed), list(mine.covered), mine.planned, mine.staged_blocks,
            list(mine.loose), mine.given, mine.most_given, mine.wanted,
            mine.blocked, live.policies[at].export(),
        )
    return facts


@pytest.mark.parametrize("seed", FEW)
def test_windows_are_what_single_iterations_are(seed: int) -> None:
    compare(seed)


@pytest.mark.parametrize("seed", [*FEW[:10], 1356])
def test_windows_with_clones_are_what_single_iterations_are(seed: int) -> None:
    """In 1356 two copies of a block are evicted in one window."""
    window = compare(seed, clones=True)
    assert window.rig.engine.totals.cloned > 0 or seed != 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", MANY)
def test_windows_with_clones_are_what_single_iterations_are_on_hundreds_of_machines(first: int) -> None:
    cloned_of = preempted = 0
    for seed in range(first, first + TOGETHER):
        window = compare(seed, clones=True)
        cloned_of += window.rig.engine.totals.cloned
        preempted += window.rig.engine.totals.preemptions
    assert min(cloned_of, preempted) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", MANY)
def test_windows_are_what_single_iterations_are_on_hundreds_of_machines(first: int) -> None:
    together = preempted = moved = 0
    for seed in range(first, first + TOGETHER):
        window = compare(seed)
        together += sum(window.iterations) - len(window.iterations)
        preempted += window.rig.engine.totals.preemptions
        moved += sum(window.rig.leader.state.totals.moved_blocks.values())
    assert together > 20 * TOGETHER, "many iterations are taken together"
    assert preempted, "and yet something happens"
    assert moved > TOGETHER


@pytest.mark.parametrize("seed", FEW[:12])
def test_going_on_is_what_planning_every_request_anew_is(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    usual = Machine(seed, windows=False, clones=seed % 2 == 1)
    monkeypatch.setattr(Scheduler, "_go_on", lambda scheduler, plan: False)
    anew = Machine(seed, windows=False, clones=seed % 2 == 1)
    assert usual.log == anew.log
    assert usual.rig.dispatcher.n == anew.rig.dispatcher.n
    assert usual.rig.leader.digest() == anew.rig.leader.digest()
    assert usual.report == anew.report
    mine, theirs = facts_of(usual.rig), facts_of(anew.rig)
    for name, value in mine.items():
        assert theirs[name] == value, name


def test_whoever_looks_at_single_iterations_gets_them() -> None:
    lines: list[StatsLine] = []
    options = SimulateOptions(trace="multiturn:requests=6,sessions=2", total_kv_blocks=500)
    looked = simulate(msgspec.structs.replace(options, stats_every=10), stats=lines.append)
    assert [line.iteration for line in lines if line.point == "decode"][:-1] == list(
        range(10, lines[-2].iteration + 1, 10)
    )
    assert looked.document == simulate(options).document == simulate(options, windows=False).document


def compare(seed: int, *, clones: bool = False) -> Machine:
    """The machine of a seed with windows, after everything was found to be as without."""
    walker, window = Machine(seed, windows=False, clones=clones), Machine(seed, windows=True, clones=clones)
    for mine, theirs in zip(walker.log, window.log, strict=False):
        assert theirs == mine, "a call came at another time or said something else"
    assert len(window.log) == len(walker.log)
    assert window.meter.records == walker.meter.records
    assert (list(window.meter.times.ttft_ns), list(window.meter.times.latency_ns)) == (
        list(walker.meter.times.ttft_ns), list(walker.meter.times.latency_ns)
    )
    mine, theirs = facts_of(walker.rig), facts_of(window.rig)
    for name, value in mine.items():
        assert theirs[name] == value, name
    assert window.report == walker.report
    assert set(walker.iterations) <= {1}
    assert sum(window.iterations) == len(walker.iterations)
    return window
