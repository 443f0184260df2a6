"""Requests of several sequences in workloads and traces, through engine and leader.

Law of this file: the leader audits itself after every stimulus, and a clone shares full blocks and nothing else.
"""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import SlotState
from kvbm_console.core.leader import Outcome
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import simulate
from kvbm_console.recording.verify import verify
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.hashing import clone_hashes, generated_hashes
from kvbm_console.simulator.multiturn import Multiturn, parse_settings
from kvbm_console.simulator.traces import MooncakeTrace
from kvbm_console.simulator.workloads import Request
from tests.server.daemons import daemon_at, published
from tests.simulator.loads import cloned, engine_of, load_of


class Watch:
    """Looks at every clone when it is opened, and remembers who ended how."""

    def __init__(self) -> None:
        self.rig: Rig | None = None
        self.opened: Counter[str] = Counter()
        self.clones: list[ev.SlotCloned] = []
        self.finished = 0

    def __call__(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        for event in outcome.events:
            if isinstance(event, ev.SlotCloned):
                self._look(event)
            elif isinstance(event, ev.SlotOpened):
                self.opened[event.request] += 1
            elif isinstance(event, ev.SlotMoved) and event.new is SlotState.FINISHED:
                self.finished += 1

    def _look(self, event: ev.SlotCloned) -> None:
        assert self.rig is not None
        self.clones.append(event)
        state, size = self.rig.leader.state, self.rig.leader.config.block_tokens
        parent, clone = state.slots[event.parent], state.slots[event.slot]
        computed = parent.computed_tokens(state.iteration)
        full = computed // size
        assert event.request.startswith(f"{parent.request}#")
        assert clone.device_blocks[:full] == parent.device_blocks[:full]
        assert len(clone.device_blocks) == len(parent.device_blocks) == full + (computed % size > 0)
        assert set(clone.device_blocks[full:]).isdisjoint(parent.device_blocks)
        assert clone.computed_tokens(state.iteration) == computed >= parent.prompt_tokens


def run(load: Any, leader: LeaderConfig, engine: EngineConfig, **options: Any) -> tuple[Rig, Watch]:
    watch = Watch()
    rig = watch.rig = build(leader, engine, load, publish=watch, check=True, audit_every=10, **options)
    rig.run_to_end()
    return rig, watch


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
@pytest.mark.parametrize("g2_blocks", [0, 50])
def test_clones_share_full_blocks_and_all_sequences_end(seed: int, g2_blocks: int) -> None:
    dice = random.Random(seed)
    block = dice.choice([1, 4, 16])
    load = cloned(dice, load_of(dice, block))
    rig, watch = run(
        load, LeaderConfig(block_tokens=block, g2_blocks=g2_blocks, offload_threshold=0.0),
        engine_of(dice, load, block), hosts=1 + seed % 2,
    )
    totals = rig.engine.totals
    assert len(watch.clones) == totals.cloned > 0
    assert watch.finished == sum(watch.opened.values()) + totals.cloned
    lost = totals.refused + totals.too_large
    tokens = sum(request.output_tokens * (1 + len(request.clone_hashes)) for request in load.requests)
    assert totals.output_tokens == tokens or lost, "whoever is preempted before it is cloned, too"
    assert not rig.leader.state.slots
    assert rig.engine.scheduler.pool.free_blocks == rig.engine.config.g1_blocks


def test_tiers_on_and_off_open_the_same_clones() -> None:
    options = SimulateOptions(trace="multiturn:requests=40,sessions=6,n=3", total_kv_blocks=400)
    off = simulate(options).document
    on = simulate(msgspec.structs.replace(options, kv_cpu_blocks=300)).document
    alone = simulate(options, leader=True).document
    assert off == alone
    assert off["requests_cloned"] == on["requests_cloned"] == 80
    assert off["requests_completed"] == on["requests_completed"] == 120


def one(name: str, prompt: int, output: int, n: int, at_ns: int = 0) -> Request:
    """In blocks of 4 tokens, with a prompt of its own."""
    hashes = tuple(generated_hashes(0, ord(name), prompt // 4))
    own = (prompt + output) // 4 - len(hashes)
    last = hashes[-1] if hashes else 0
    return Request(
        name, at_ns, hashes, tuple(generated_hashes(last, 1, own)), prompt, output,
        clone_hashes=clone_hashes(last, 1, own, n),
    )


class Few:
    """These requests; counts whose end it is told of."""

    name, endless = "few", False

    def __init__(self, *requests: Request) -> None:
        self.requests = requests
        self.ended: list[str] = []

    def begin(self, block_tokens: int) -> None:
        """Nothing to prepare."""

    def arrivals(self) -> Any:
        """All of them."""
        return iter(self.requests)

    def finished(self, request: Request, at_ns: int) -> None:
        """Remember it."""
        self.ended.append(request.request)


def small(g1_blocks: int, max_running: int = 8) -> EngineConfig:
    return EngineConfig(g1_blocks=g1_blocks, max_running=max_running, max_batch_tokens=64)


def test_the_end_of_a_request_is_that_of_its_last_sequence() -> None:
    load = Few(one("a", 10, 3, 4), one("b", 8, 1, 3))
    rig, watch = run(load, LeaderConfig(block_tokens=4), small(40))
    assert sorted(load.ended) == ["a", "b"]
    assert [event.request for event in watch.clones] == ["a#2", "a#3", "a#4"], "b ends with its first tokens"
    assert (rig.engine.totals.finished, rig.engine.totals.output_tokens) == (2, 4 * 3 + 3)


def test_an_admission_counts_the_blocks_and_the_seats_of_the_clones() -> None:
    rig, watch = run(Few(one("a", 6, 2, 3), one("b", 6, 2, 3, 1)), LeaderConfig(block_tokens=4), small(6))
    assert rig.engine.totals.preemptions == 0, "two prompts fit into 6 blocks, and not with their clones"
    assert len(watch.clones) == 4
    rig, watch = run(Few(one("a", 4, 9, 3), one("b", 4, 2, 3, 1)), LeaderConfig(block_tokens=4), small(100, 5))
    at = {event.request: event.at_ns for event in watch.clones}
    assert at["b#2"] > at["a#2"], "six sequences do not fit into five seats"
    for few in (Few(one("a", 6, 2, 6)), Few(one("a", 6, 2, 9))):
        rig, watch = run(few, LeaderConfig(block_tokens=4), small(6, 8))
        assert rig.engine.totals.too_large == 1, "not even alone"
        assert few.ended == ["a"]


def test_a_workload_of_one_sequence_is_what_it_was_before() -> None:
    usual, several = Multiturn(parse_settings("seed=3")), Multiturn(parse_settings("seed=3,n=4"))
    usual.begin(16)
    several.begin(16)
    for mine, theirs in zip(usual.arrivals(), several.arrivals(), strict=True):
        assert msgspec.structs.replace(theirs, clone_hashes=()) == mine
        assert len(theirs.clone_hashes) == 3
        sequences = {mine.output_hashes, *theirs.clone_hashes}
        assert len(sequences) == 4 or not mine.output_hashes
        assert {len(one) for one in sequences} == {len(mine.output_hashes)}
    assert several.name == "multiturn:n=4,seed=3"
    for value in ("0", "65"):
        with pytest.raises(UsageError, match=f"multiturn n must be from 1 to 64, got {value}"):
            parse_settings(f"n={value}")


def test_a_trace_may_ask_for_several_sequences(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 600, "hash_ids": [1, 2]}
    path.write_text("".join(json.dumps({**line, **more}) + "\n" for more in ({}, {"n": 3})))
    trace = MooncakeTrace(path)
    trace.begin(512)
    plain, several = trace.arrivals()
    assert (plain.clone_hashes, len(several.clone_hashes)) == ((), 2)
    assert len({several.output_hashes, *several.clone_hashes}) == 3
    report = simulate(SimulateOptions(trace=f"mooncake:{path}", total_kv_blocks=50, block_size=512)).document
    assert (report["requests_arrived"], report["requests_cloned"], report["requests_completed"]) == (2, 2, 4)
    path.write_text(json.dumps({**line, "n": 65}))
    with pytest.raises(UsageError, match=r"line 1: Expected `int` <= 64 - at `\$.n`"):
        list(trace.arrivals())


@pytest.mark.asyncio
async def test_a_daemon_serves_clones_and_a_rerun_is_equal(tmp_path: Path) -> None:
    async with daemon_at("multiturn:sessions=4,n=3", record=tmp_path / "r", speed=None) as daemon:
        state = daemon.service.state
        await published(daemon, lambda: any(slot.parent is not None for slot in state.slots.values()))
        await published(daemon, lambda: sum(state.totals.finished) > 20)
    report = verify(tmp_path / "r")
    assert report.first_difference is None
    assert report.stimuli > 0
