"""``explore leader``: silent on our leader, loud on every planted fault, and a finding is a run that can be had again.

Law of this file: the leader, the engine and the mover are those of the product; only a planted fault changes them.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.core.events import Noted
from kvbm_console.core.ids import Note
from kvbm_console.explore.leader import LeaderMachine, LeaderRelease
from kvbm_console.explore.leader_faults import FAULTS
from kvbm_console.explore.scenario import LEADER, PROFILES_OF, Scenario
from kvbm_console.explore.scenario import generate_for_leader as generate
from kvbm_console.explore.vllm import ScenarioRun
from kvbm_console.recording.positions import verdict_seq
from kvbm_console.recording.reader import Recording
from tests.cli.programs import DEADLINE_S, PROGRAM, environment

FULL_SEEDS = 1_500
"""Of each of seven profiles."""
CPU_S = 60.0


def play(profile: str, seed: int, *faults: str) -> ScenarioRun:
    return LeaderMachine(LeaderRelease(), {}, generate(profile, seed), faults).play()


def silent(seeds: int) -> None:
    steps = reads = moved = 0
    began = time.process_time()
    for profile in PROFILES_OF["leader"]:
        for seed in range(seeds):
            run = play(profile, seed)
            assert run.verdict is None, (profile, seed, run.verdict)
            steps, reads, moved = steps + run.steps, reads + run.reads, moved + run.moved_blocks
    runs = seeds * len(PROFILES_OF["leader"])
    print(f"{runs} runs, {steps} steps, {reads} reads, {time.process_time() - began:.0f} s of CPU time")
    assert steps > 200 * seeds
    assert reads > 1_000 * seeds
    assert moved > 100 * seeds


def test_nothing_is_found_in_our_leader() -> None:
    silent(3)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_nothing_is_found_in_our_leader_in_ten_thousand_runs() -> None:
    silent(FULL_SEEDS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_within_a_minute_of_cpu(fault: str) -> None:
    began = time.process_time()
    for seed in range(2_000):
        for profile in PROFILES_OF["leader"]:
            if play(profile, seed, fault).verdict is not None:
                return
        assert time.process_time() - began < CPU_S, fault


def test_a_block_of_an_unfinished_load_cannot_be_found_on_the_device() -> None:
    """A load of several copies: a part has come, and another request with this prefix is looked up."""
    assert play("abort", 462).verdict is None


def test_a_fault_is_gone_with_its_run() -> None:
    for fault in FAULTS:
        play("hits", 1, fault)
    assert play("hits", 1).verdict is None


@pytest.mark.parametrize("profile", PROFILES_OF["leader"])
def test_a_scenario_is_a_run_also_from_its_text(profile: str) -> None:
    scenario = generate(profile, 5)
    assert all(value in LEADER[name] for name, value in scenario.machine)
    again = Scenario.from_json(scenario.to_json())
    assert again == scenario
    one, other = (LeaderMachine(LeaderRelease(), {}, each).play() for each in (scenario, again))
    assert (one.steps, one.reads, one.moved_blocks, one.digest) == (
        other.steps, other.reads, other.moved_blocks, other.digest)


def explored(place: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [PROGRAM, "explore", "leader", *arguments], cwd=place, env=environment(place), capture_output=True,
        timeout=DEADLINE_S, text=True,
    )


def test_the_command_shrinks_and_records_what_it_finds(tmp_path: Path) -> None:
    done = explored(tmp_path, "--fault", "swapped-blocks", "--seeds", "0:2", "--profile", "press", "--workers", "1",
                    "--out", "found", "--format", "json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["release"] == "kvbm-console's leader"
    finding = next(one for one in document["findings"] if one["monitor"] == "right content")
    assert finding["shrunk"]
    assert len(finding["scenario"]["actions"]) <= 4
    recording = Recording.open(tmp_path / finding["recording"])
    last = [event for events in recording.events() for event in events][-1]
    assert isinstance(last, Noted)
    assert (last.note, last.seq) == (Note.VERDICT, verdict_seq(recording))
    assert last.detail == f"right content: {finding['sentence']}"
    space: dict[str, Any] = {"__name__": "reproduction"}
    exec((tmp_path / finding["directory"] / "test_reproduction.py").read_text(), space)
    with pytest.raises(AssertionError, match="wants"):
        space["test_reproduction"]()


def test_nothing_found_is_status_0_and_an_unknown_fault_one_sentence(tmp_path: Path) -> None:
    done = explored(tmp_path, "--seeds", "0:1", "--workers", "1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing found")
    refused = explored(tmp_path, "--fault", "rust")
    assert refused.returncode == 2
    assert "--fault must be one of swapped-blocks, " in refused.stderr
    assert "Traceback" not in refused.stderr
