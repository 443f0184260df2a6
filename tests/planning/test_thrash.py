"""Thrash is one number: a fold of events that knows nothing of the leader's memory, and every place that tells it.

Law of this file: thrash is what came back by a copy within the window after its eviction, per block evicted. A block
that comes from G3 to G1 comes back to G2 too.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import AGE_BOUNDS_NS, Tier, age_class, age_within
from kvbm_console.core.leader import Outcome
from kvbm_console.core.leader.memory import LEFT_MAX, PoolMemory
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.metrics.collect import Scrape, collect
from kvbm_console.planning.options import STEP_NS, THRASH_STEPS, SimulateOptions
from kvbm_console.planning.run import engine_config, open_trace, simulate
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.embedded import build
from kvbm_console.stream.document import status_document
from tui.model.flows import Flows

RECORDINGS = Path(__file__).parents[2] / "recordings"
CHATS = "multiturn:requests=70,sessions=16,prompts=2,think=1.5,user=200,turns=6,output=32"
WINDOWS_NS = (1_000_000, SECOND_NS, 20 * SECOND_NS)


class Fold:
    """Evictions and returns by tier, and the prompt blocks that were asked for again, from events alone."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self.evicted = [0] * 4
        self.returned = [0] * 4
        self.asked = [0] * 4
        self.ages: list[list[int]] = [[] for _ in range(4)]
        self._pools: dict[int, ev.PoolKnown] = {}
        self._left: dict[int, dict[int, int]] = {}
        self._reserved: dict[int, list[int]] = {}

    def add(self, events: Iterable[ev.Event]) -> "Fold":
        for event in events:
            if isinstance(event, ev.PoolKnown):
                self._pools[event.pool], self._left[event.pool] = event, {}
            elif isinstance(event, ev.BlocksEvicted):
                hashes = unpack_hashes(event.hashes)
                self.evicted[self._pools[event.pool].tier - 1] += len(hashes)
                self._left[event.pool].update(dict.fromkeys(hashes, event.at_ns))
            elif isinstance(event, ev.BlocksReserved):
                self._reserved[event.operation] = unpack_hashes(event.hashes)
            elif isinstance(event, ev.CandidatePromoted):
                self._promoted(event)
            elif isinstance(event, ev.PrefixScored):
                for tier, blocks in zip(event.again_tiers, event.again_blocks, strict=True):
                    self.asked[tier - 1] += blocks
            elif isinstance(event, ev.ResetDone):
                self._left = {pool: {} for pool in self._left}
        return self

    def _promoted(self, event: ev.CandidatePromoted) -> None:
        source, target = self._pools[event.source_pool], self._pools[event.target_pool]
        for pool, left in self._left.items():
            if target.tier <= self._pools[pool].tier < source.tier:
                for key in self._reserved[event.operation]:
                    at_ns = left.pop(key, None)
                    if at_ns is not None and event.at_ns - at_ns < self.window_ns:
                        self.returned[self._pools[pool].tier - 1] += 1


def options(**said: Any) -> SimulateOptions:
    return SimulateOptions(**{
        "trace": CHATS, "total_kv_blocks": 80, "kv_cpu_blocks": 100, "kv_disk_blocks": 700, "block_size": 32,
        "kv_offload_threshold": 0.0, "stats_every": 0, **said,
    })


@cache
def reported(window_ns: int) -> dict[str, Any]:
    return simulate(options(thrash_window=window_ns)).document


def run(said: SimulateOptions) -> tuple[CacheState, Fold]:
    """The machine of ``simulate`` with its events."""
    fold = Fold(said.thrash_window_ns)

    def publish(_stimulus: Stimulus, outcome: Outcome) -> None:
        fold.add(outcome.events)

    rig = build(said.leader_config(), engine_config(said), open_trace(said), publish=publish, links=said.links())
    rig.run_to_end()
    return rig.leader.state, fold


@pytest.mark.parametrize("window_ns", WINDOWS_NS)
def test_simulate_status_metrics_and_facts_tell_what_a_fold_of_the_events_tells(window_ns: int) -> None:
    said = options(thrash_window=window_ns)
    state, fold = run(said)
    report = reported(window_ns)
    total = sum(fold.returned) / sum(fold.evicted)
    assert report["thrash_blocks"] == sum(fold.returned)
    assert report["thrash_rate"] == state.totals.thrash() == total
    assert {tier: part["thrash_blocks"] for tier, part in report["thrash"].items()} == dict(
        zip(("G1", "G2", "G3"), fold.returned, strict=False)
    )
    assert [report["thrash"][tier]["asked_again_blocks"] for tier in ("G1", "G2", "G3")] == fold.asked[:3]
    check_all(state, fold, said.leader_config())


def check_all(state: CacheState, fold: Fold, config: Any) -> None:
    """Status and metrics of these facts."""
    document = status_document(
        state, at_ns=state.at_ns, incarnation="", subscribers=0, recorder=None,
        thrash_window_ns=config.thrash_window_ns,
    )
    families = {family.name: family.samples for family in collect(Scrape(
        state=state, config=config, at_ns=state.at_ns, subscribers=0, ring_bytes=0, recorder=None, streams=(),
    ))}
    for name, counts in (("kvbm_thrash_blocks_total", fold.returned), ("kvbm_evicted_blocks_total", fold.evicted)):
        assert [value for _, value in families[name]][:4] == counts or sum(
            value for _, value in families[name]
        ) == sum(counts)
    assert families["kvbm_thrash_window_seconds"][0][1] == fold.window_ns / 1e9
    assert document["thrash"]["thrash_blocks"] == sum(fold.returned)
    assert document["thrash"]["evicted_blocks"] == sum(fold.evicted)
    for tier in Tier:
        row = document["tiers"][tier.label]
        assert (row["thrash_blocks"], row["evicted_blocks"]) == (fold.returned[tier - 1], fold.evicted[tier - 1])
        assert row["thrash_rate"] == (row["thrash_blocks"] / row["evicted_blocks"] if row["evicted_blocks"] else None)
        assert row["thrash_rate"] is None or row["thrash_rate"] <= 1
        assert row["asked_again_blocks"] == fold.asked[tier - 1]


@pytest.mark.parametrize("name", ["thrash", "onboard-from-host", "offload-pressure", "preempt-and-resume"])
def test_doctor_tells_of_a_recording_what_a_fold_of_its_events_tells(name: str) -> None:
    path = RECORDINGS / f"{name}.mcap"
    recording = Recording.open(path)
    fold = Fold(recording.config.thrash_window_ns)
    for batch in recording.events():
        fold.add(batch)
    told = json.loads(CliRunner().invoke(cli, ["doctor", str(path), "--format", "json"]).stdout)
    assert (told["evicted_blocks"], told["thrash_blocks"]) == (sum(fold.evicted), sum(fold.returned))
    assert told["thrash_rate"] == (sum(fold.returned) / sum(fold.evicted) if sum(fold.evicted) else None)
    assert (name == "thrash") == (told["thrash_blocks"] > 0)
    check_all(recording.state_at(recording.last_seq), fold, recording.config)


def test_the_console_counts_the_same_in_its_last_minute() -> None:
    flows, fold = Flows(), Fold(SECOND_NS)
    recording = Recording.open(RECORDINGS / "thrash.mcap")
    fold.window_ns = recording.config.thrash_window_ns
    for batch in recording.events():
        fold.add(batch)
        for event in batch:
            if isinstance(event, ev.CandidatePromoted):
                flows.came_back(event.at_ns, event.returned)
            elif isinstance(event, ev.BlocksEvicted):
                flows.evicted[event.pool].add(event.at_ns, len(event.ids) // 4)
    state = recording.state_at(recording.last_seq)
    assert state.at_ns < 60 * SECOND_NS
    for tier in (Tier.G1, Tier.G2):
        assert flows.thrash_share(state, tier, state.at_ns) == (fold.returned[tier - 1], fold.evicted[tier - 1])


def test_a_longer_window_counts_no_less_and_the_default_follows_from_the_step() -> None:
    counts = [reported(window_ns)["thrash_blocks"] for window_ns in WINDOWS_NS]
    assert counts == sorted(set(counts))
    assert counts[-1] > 0
    assert options().thrash_window_ns == THRASH_STEPS * STEP_NS == THRASH_STEPS * engine_config(options()).step_base_ns
    assert options().leader_config().thrash_window_ns == SECOND_NS


def test_hosts_agree_on_what_came_back() -> None:
    said = options(trace=CHATS.replace("requests=70", "requests=16"), total_kv_blocks=40, kv_cpu_blocks=30)
    document = simulate(said).document
    with_hosts = simulate(options(
        trace=said.trace, total_kv_blocks=40, kv_cpu_blocks=30, hosts=2,
    )).document
    assert json.dumps(with_hosts) == json.dumps(document)
    assert document["thrash_blocks"] > 0


def test_without_a_lower_tier_nothing_can_come_back() -> None:
    document = simulate(options(kv_cpu_blocks=0, kv_disk_blocks=0)).document
    assert (document["thrash_blocks"], document["thrash_rate"], document["thrash"]) == (0, None, None)


# --- ages and the memory of evictions ---


@given(some.lists(some.integers(0, 2 * 10**15), min_size=1), some.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_the_share_of_ages_within_a_bound_is_that_share(ages: list[int], share: float) -> None:
    counts = [0] * len(AGE_BOUNDS_NS)
    for age in ages:
        counts[age_class(age)] += 1
        assert age <= AGE_BOUNDS_NS[age_class(age)] or age > AGE_BOUNDS_NS[-1]
    bound = age_within(counts, share)
    assert bound is not None
    capped = [min(age, AGE_BOUNDS_NS[-1]) for age in ages]
    assert sum(age <= bound for age in capped) >= share * len(ages)
    below = max((other for other in AGE_BOUNDS_NS if other < bound), default=0)
    assert sum(0 < age <= below or age <= AGE_BOUNDS_NS[0] for age in capped) < share * len(ages) or below == 0
    assert age_within([0] * len(AGE_BOUNDS_NS), share) is None


def test_the_memory_of_evictions_is_bounded_and_the_oldest_half_is_forgotten() -> None:
    memory = PoolMemory()
    for at in range(0, 4 * LEFT_MAX, 1_000):
        memory.leave(range(at, at + 1_000), at)
        assert len(memory.left) + len(memory.left_before) <= 2 * LEFT_MAX + 1_000
    last = 4 * LEFT_MAX // 1_000 * 1_000
    assert memory.left_at([last]) == [(last, last)]
    assert memory.left_at([5]) == []
    assert memory.came_back([last, last + 1, 5], last - 1) == 2
    assert memory.came_back([last, last + 1], last - 1) == 0, "an eviction counts once"
