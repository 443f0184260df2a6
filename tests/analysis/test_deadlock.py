"""A deadlock is one fault that says its wait-for graph; an engine that can go on, or that a person stops, has none."""

from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.lints import Finding, Level
from kvbm_console.analysis.waits import standstill
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli.status import drawn, fold
from kvbm_console.client import Client
from kvbm_console.client.past import live_evidence
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.leader.decider import Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.multiturn import Multiturn, Settings
from tests.analysis.deadlocks import deadlocked, stands_still
from tests.analysis.tale import MS, S
from tests.server.daemons import daemon_at
from tests.tap.kept import NAMES, run_of

EXAMPLES = max(12, settings.default.max_examples // 8)
"""An example is a whole run of an engine, looked at after every stimulus."""

STAMPED: Final = frozenset({"n", "at_ns", "source", "origin_ns"})
"""Fields of a stimulus that whoever submits it does not say."""


def told(**options: Any) -> list[Finding]:
    return list(diagnose(deadlocked(**options)).findings)


def test_a_loaded_request_behind_a_head_that_wants_more_is_one_fault() -> None:
    (finding,) = told()
    assert (finding.lint, finding.level) == ("deadlock", Level.FAULT)
    assert finding.what == "deadlock 12s"
    assert finding.because == (
        "0 running, 8 waiting: head wants 13 G1 blocks, 7 free; behind it wait loaded (holds 9) and 6 more"
    )
    assert finding.until_ns is None


def test_a_head_that_fits_no_tier_says_so() -> None:
    (finding,) = told(wanted=40, others=0)
    assert finding.because == (
        "0 running, 2 waiting: head wants 40 G1 blocks, the tier has 16; behind it waits loaded (holds 9)"
    )


@pytest.mark.parametrize("options", [{"loads": True}, {"wanted": 6}, {"wait_ns": 4 * S}])
def test_while_a_copy_runs_or_the_head_fits_there_is_none(options: dict[str, int]) -> None:
    assert [one for one in told(**options) if one.lint == "deadlock"] == []


def test_a_request_that_is_held_waits_for_a_person() -> None:
    assert [one for one in told(held=True) if one.lint == "deadlock"] == []


def test_a_deadlock_that_an_abort_resolves_is_told_with_its_end() -> None:
    (finding,) = [one for one in told(aborted=True) if one.lint == "deadlock"]
    assert finding.until_ns is not None
    assert finding.what == "deadlock 12s"
    assert finding.count == 8


def longest_ns(stimuli: list[list[Event]], source: int) -> int:
    """The longest standstill of an engine, looked at after every stimulus."""
    state, since_ns, longest = CacheState(), None, 0
    for events in stimuli:
        for event in events:
            state.apply(event)
        if standstill(state, source) is None:
            since_ns = None
            continue
        since_ns = state.at_ns if since_ns is None else since_ns
        longest = max(longest, state.at_ns - since_ns)
    return longest


@settings(max_examples=EXAMPLES, deadline=None)
@given(some.integers(0, 2**16), some.integers(10, 64), some.sampled_from([0, 8, 40]), some.integers(2, 8))
def test_no_simulated_engine_stands_still_for_any_time(seed: int, g1: int, g2: int, running: int) -> None:
    config = LeaderConfig(block_tokens=16, g2_blocks=g2, offload_threshold=0.6)
    found: list[list[Event]] = []

    def publish(stimulus: Stimulus, outcome: Outcome) -> None:
        found.append(list(outcome.events))

    load = Settings(
        sessions=4, prompts=2, system=48, user=40, output=30, turns=2, think=0.2, requests=8, seed=seed
    )
    build(config, EngineConfig(g1_blocks=g1, max_batch_tokens=96, max_running=running), Multiturn(load),
          publish=publish).run_to_end()
    assert longest_ns(found, 1) == 0


@pytest.mark.parametrize("name", NAMES)
def test_no_run_of_the_real_scheduler_stands_still(name: str) -> None:
    assert longest_ns(run_of(name).events, 1) < 100 * MS


@pytest.mark.asyncio
async def test_a_recording_a_daemon_and_the_console_tell_the_same_deadlock(tmp_path: Path) -> None:
    run = stands_still()
    run.record(tmp_path / "run", [7])
    (recorded,) = diagnose(evidence_of(Recording.open(tmp_path / "run"))).findings
    async with daemon_at(config=run.config) as daemon:
        dispatcher, now_ns = daemon.service.dispatcher, 0
        dispatcher.clock = daemon.service.clock = lambda: now_ns
        for told in run.stimuli:
            now_ns = told.at_ns
            fields = [getattr(told, name) for name in told.__struct_fields__ if name not in STAMPED]
            dispatcher.submit_from(told.source, None, type(told), *fields)
        daemon.service.broadcaster.flush()
        async with Client(daemon.address) as client:
            evidence = await live_evidence(client)
            overview = drawn(await fold(client))
    (live,) = diagnose(evidence).findings
    assert (live.level, live.what, live.because) == (recorded.level, recorded.what, recorded.because)
    assert overview[0].startswith(" NEEDS YOU   1 fault")
    assert recorded.what in overview[1]
    assert recorded.because[:40] in overview[1]
