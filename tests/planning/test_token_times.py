"""Every time of a report, recounted token by token over random machines with tiers, preemptions and clones.

Law of this file: the recount reads the events and when iterations ended. It knows neither facts nor the meter, keeps
the time of every token of every request, and counts what the report says from these lists alone.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import FinishReason, SlotState
from kvbm_console.core.leader import Outcome
from kvbm_console.planning.meter import Meter, RequestRecord
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.report import make_report, measure, row_of
from kvbm_console.planning.run import simulate
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.link import DEFAULT_LINKS
from tests.simulator.loads import cloned, engine_of, load_of

TTFT_LIMIT_NS, GAP_LIMIT_NS = 60_000_000, 9_000_000


class Life(msgspec.Struct):
    """One sequence."""

    name: str
    arrived_ns: int
    prompt: int
    tokens: list[int]
    """When each was sampled."""
    shared: int = 0
    """Of a clone: tokens that it shares with the sequence that it was cloned from."""
    state: SlotState = SlotState.INITIALIZED
    hits: tuple[int, ...] = (0, 0, 0, 0)
    preemptions: int = 0
    finished_ns: int | None = None
    reason: FinishReason | None = None
    preempted_with: set[int] = msgspec.field(default_factory=set)
    """With how many tokens it was preempted."""


class Recount:
    """The fold."""

    def __init__(self) -> None:
        self.open: dict[int, Life] = {}
        self.ended: list[Life] = []
        self.asked, self.found = [0, 0], [0, 0]
        """Prompt blocks, and those found: at first admissions, and at those after a preemption."""
        self._began_ns, self._count = 0, 0
        self._ending: list[Life] = []

    def __call__(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        if isinstance(stimulus, st.IterationFinished) and self._count:
            self._sample(stimulus.at_ns)
        for event in outcome.events:
            self._fold(event)

    def _sample(self, at_ns: int) -> None:
        lasts_ns = (at_ns - self._began_ns) // self._count
        for number in range(1, self._count + 1):
            for life in self.open.values():
                if life.state is SlotState.DECODING:
                    life.tokens.append(self._began_ns + number * lasts_ns)
        for life in self._ending:
            life.tokens.append(at_ns)
        self._ending, self._count = [], 0

    def _fold(self, event: ev.Event) -> None:
        if isinstance(event, ev.SlotOpened):
            self.open[event.slot] = Life(event.request, event.at_ns, event.prompt_tokens, [])
        elif isinstance(event, ev.SlotCloned):
            parent = self.open[event.parent]
            self.open[event.slot] = Life(
                event.request, parent.arrived_ns, parent.prompt, list(parent.tokens), len(parent.tokens), parent.state,
                parent.hits,
            )
        elif isinstance(event, ev.PrefixScored):
            life = self.open[event.slot]
            self.asked[life.preemptions > 0] += event.prompt_blocks
            self.found[life.preemptions > 0] += sum(event.hits)
            if not life.preemptions:
                life.hits = event.hits
        elif isinstance(event, ev.HitsLost):
            life = self.open[event.slot]
            self.found[life.preemptions > 0] -= event.blocks
            if not life.preemptions:
                life.hits = tuple(
                    hits - event.blocks * (at == event.tier) for at, hits in enumerate(life.hits, start=1)
                )
        elif isinstance(event, ev.SlotMoved):
            life = self.open[event.slot]
            life.state = event.new
            if event.new is SlotState.PREEMPTED:
                life.preemptions += 1
                life.preempted_with.add(len(life.tokens))
            if event.reason is not None and life.finished_ns is None:
                life.finished_ns, life.reason = event.at_ns, event.reason
                self.ended.append(life)
        elif isinstance(event, ev.SlotClosed):
            del self.open[event.slot]
        elif isinstance(event, ev.IterationAdvanced):
            self._began_ns, self._count = event.at_ns, event.count
            for slot, position in zip(event.slots, event.positions, strict=True):
                life = self.open[slot]
                if position == life.prompt + len(life.tokens):  # all of the sequence so far
                    self._ending.append(life)

    # --- what a report says ---

    @property
    def completed(self) -> list[Life]:
        return [life for life in self.ended if life.reason is FinishReason.LENGTH]

    def document(self) -> dict[str, Any]:
        completed = self.completed
        gaps = [
            later - earlier for life in completed for at, (earlier, later) in enumerate(
                zip(life.tokens, life.tokens[1:], strict=False), start=1
            ) if at >= life.shared
        ]
        good = [
            life for life in completed if life.tokens[0] - life.arrived_ns <= TTFT_LIMIT_NS
            and life.tokens[-1] - life.tokens[0] <= GAP_LIMIT_NS * (len(life.tokens) - 1)
        ]
        return {
            "ttft_ms": spread([life.tokens[0] - life.arrived_ns for life in completed]),
            "latency_ms": spread([life.tokens[-1] - life.arrived_ns for life in completed]),
            "itl_ms": spread(gaps),
            "tpot_ms": spread([
                (life.tokens[-1] - life.tokens[0]) // (len(life.tokens) - 1)
                for life in completed if len(life.tokens) > 1
            ]),
            "output_tokens": sum(len(life.tokens) for life in completed),
            "goodput": len(good),
            "prompt_blocks": self.asked[0], "readmitted_prompt_blocks": self.asked[1],
            "readmitted_hit_blocks": self.found[1],
            "prefix_hit_rate": self.found[0] / self.asked[0] if self.asked[0] else None,
            "blis_cache_hit_rate": sum(self.found) / sum(self.asked) if sum(self.asked) else 0.0,
        }

    def rows(self, block: int) -> list[tuple[Any, ...]]:
        return [
            (life.name, life.arrived_ns, life.tokens[0] if life.tokens else None, life.finished_ns, life.prompt,
             *(hits * block for hits in life.hits[:3]), len(life.tokens), life.preemptions)
            for life in self.ended
        ]


def spread(values: Sequence[int]) -> dict[str, float | None]:
    """Mean, percentiles and maximum in milliseconds."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    least = {
        name: next(value for at, value in enumerate(ordered, start=1) if 100 * at >= share * len(ordered))
        for name, share in (("p50", 50), ("p90", 90), ("p99", 99))
    }
    return {name: value / 1e6 for name, value in
            {"mean": sum(ordered) / len(ordered), **least, "max": ordered[-1]}.items()}


def compare(seed: int) -> Recount:
    """The machine of a seed: its report and its rows are those of the recount."""
    dice = random.Random(seed)
    block = dice.choice([1, 4, 16, 16])
    load = load_of(dice, block)
    if dice.random() < 0.4:
        load = cloned(dice, load)
    engine = engine_of(dice, load, block)
    if dice.random() < 0.6:
        engine = msgspec.structs.replace(engine, g1_blocks=max(40, engine.g1_blocks // 8))
    leader = LeaderConfig(
        block_tokens=block, g2_blocks=dice.choice([0, 60, 400]), g3_blocks=dice.choice([0, 0, 200]),
        offload_threshold=dice.choice([0.0, 0.9]), asynchronous=dice.random() < 0.7, offload_law="order",
    )
    recount, records = Recount(), list[RequestRecord]()
    meter = Meter(ended=records.append)

    def publish(stimulus: st.Stimulus, outcome: Outcome) -> None:
        meter(stimulus, outcome)
        recount(stimulus, outcome)

    rig = build(leader, engine, load, publish=publish, check=seed % 4 == 0, links=DEFAULT_LINKS)
    meter.watch(rig.leader.state)
    rig.engine.windows = dice.random() < 0.5
    rig.run_to_end()
    options = SimulateOptions(
        trace="load", total_kv_blocks=1, kv_cpu_blocks=1, slo_ttft=TTFT_LIMIT_NS, slo_itl=GAP_LIMIT_NS,
    )
    told = make_report(options, None, [measure(rig, meter)])
    counted = recount.document()
    assert told["goodput"]["requests"] == counted.pop("goodput")
    produced = counted.pop("output_tokens")
    unopened = sum(len(request.clone_hashes) for request in load.requests if request.output_tokens == 1)
    assert produced <= told["output_tokens"] <= produced + unopened, "a clone with one token is never opened"
    assert {key: told[key] for key in counted} == counted
    rows = [row_of(0, record, block) for record in records]
    assert [tuple(value for key, value in row.items() if key not in ("instance", "reason")) for row in rows] == (
        recount.rows(block)
    )
    return recount


def test_a_report_says_what_a_recount_of_every_token_says() -> None:
    compare_all(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 1_300, 60))
def test_a_report_says_what_a_recount_says_on_hundreds_of_machines(first: int) -> None:
    compare_all(range(first, first + 60))


def compare_all(seeds: range) -> None:
    seen = dict.fromkeys(("preempted", "right after the prompt", "clones", "hits below"), 0)
    for seed in seeds:
        lives = compare(seed).ended
        seen["preempted"] += any(life.preemptions for life in lives)
        seen["right after the prompt"] += sum(1 in life.preempted_with for life in lives)
        seen["clones"] += any("#" in life.name for life in lives)
        seen["hits below"] += any(sum(life.hits[1:]) for life in lives)
    assert min(seen.values()) > 1, seen


@pytest.mark.parametrize("changes", [
    {"total_kv_blocks": 500}, {"total_kv_blocks": 60}, {"total_kv_blocks": 60, "check": True},
    {"total_kv_blocks": 60, "hosts": 2}, {"total_kv_blocks": 90, "instances": 3},
    {"total_kv_blocks": 60, "kv_cpu_blocks": 200, "kv_offload_threshold": 0.0},
])
def test_rows_and_times_do_not_depend_on_whether_there_is_a_leader(changes: dict[str, Any]) -> None:
    trace = "multiturn:requests=60,sessions=9,system=64,user=48,output=70,turns=3,think=0.2"
    options = SimulateOptions(trace=trace, slo_ttft=TTFT_LIMIT_NS, slo_itl=GAP_LIMIT_NS, **changes)
    told = []
    for leader, windows in ((False, True), (True, True), (True, False)):
        rows: list[dict[str, Any]] = []
        ran = simulate(
            options, leader=leader, windows=windows,
            ended=lambda instance, record, rows=rows: rows.append(row_of(instance, record, options.block_size)),
        )
        told.append((msgspec.json.encode(ran.document), rows))
    assert told[0] == told[1] == told[2]
    rows = told[0][1]
    assert len(rows) == 60
    assert {row["instance"] for row in rows} == set(range(options.instances))
