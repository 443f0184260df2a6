"""``explore`` on vLLM's real scheduler: silent on the newest release, and not on planted faults.

Law of this file: every fault that can be named is found, each within its limit of CPU time.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.explore import report
from kvbm_console.explore.scenario import PROFILES, Scenario, generate
from kvbm_console.explore.shadow import FAULTS
from kvbm_console.explore.vllm import CONNECTOR_FAULTS, Machine, Release, Run
from kvbm_console.tap import recorder as recording
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.flatten import drain
from tests.vllm.engine import tap
from tests.vllm.test_tap import Kept

pytestmark = pytest.mark.timeout(600)
SEEDS = int(os.environ.get("KVBM_EXPLORE_SEEDS", "10"))
"""Of each profile, for the effect of the tap; 3,334 for 10,000 of each connector and way."""
OFFLOADING: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
ARC: dict[str, Any] = {**OFFLOADING, "kv_connector_extra_config": {"eviction_policy": "arc"}}
SIMPLE: dict[str, Any] = {"kv_connector": "SimpleCPUOffloadConnector"}
MULTI: dict[str, Any] = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{**one, "kv_role": "kv_both"} for one in (OFFLOADING, SIMPLE)]},
}
SYNC: dict[str, Any] = {**OFFLOADING, "kv_connector_extra_config": {"sync_load_budget_bytes": 2**20}}
CONNECTORS = {"lru": OFFLOADING, "arc": ARC, "sync": SYNC, "simple": SIMPLE, "multi": MULTI}


@pytest.fixture(scope="module")
def release() -> Release:
    return Release()


def play(release: Release, connector: dict[str, Any], profile: str, seed: int, *faults: str) -> Run:
    return Machine(release, connector, generate(profile, seed), faults).play()


@pytest.mark.parametrize("connector", CONNECTORS.values(), ids=CONNECTORS)
def test_nothing_is_found_in_this_release(release: Release, connector: dict[str, Any]) -> None:
    steps = reads = moved = 0
    for profile in PROFILES:
        if profile == "reset" and connector in (SIMPLE, MULTI):
            continue  # below: its reset is a finding
        for seed in range(20):
            run = play(release, connector, profile, seed)
            assert run.verdict is None, (profile, seed, run.verdict)
            steps, reads, moved = steps + run.steps, reads + run.reads, moved + run.moved_blocks
    assert steps > 5_000
    assert reads > 50_000
    assert moved > 500


@pytest.mark.parametrize("fault", [*FAULTS, *CONNECTOR_FAULTS])
def test_a_planted_fault_is_found_within_a_minute_of_cpu(release: Release, fault: str) -> None:
    connector = SYNC if fault == "late-sync-load" else OFFLOADING
    began = time.process_time()
    for seed in range(2_000):
        for profile in PROFILES:
            if play(release, connector, profile, seed, fault).verdict is not None:
                print(f"{fault}: {time.process_time() - began:.2f} s")
                return
        assert time.process_time() - began < 60, fault


def test_a_reset_of_simple_cpu_offload_says_that_the_device_was_cleared(release: Release) -> None:
    """Its CPU pool publishes AllBlocksCleared, which names no medium. A release in which this fails has mended it."""
    verdicts = [play(release, SIMPLE, "reset", seed).verdict for seed in range(60)]
    assert {one.signature for one in verdicts if one is not None} == {"truth of answers: device events"}


def test_a_scenario_is_a_run(release: Release) -> None:
    first, again = (play(release, OFFLOADING, "press", 7) for _ in range(2))
    assert (first.steps, first.reads, first.moved_blocks, first.pairs) == (
        again.steps, again.reads, again.moved_blocks, again.pairs)


class Tapped(Machine):
    """A machine whose tap is listened to in one of these ways."""

    def __init__(self, release: Release, connector: dict[str, Any], scenario: Scenario, way: str) -> None:
        super().__init__(release, tap(connector), scenario)
        self.way, self.sender = way, self.connector.sender
        if way != "nobody listens":
            self.sender.recorder.listen()

    def step(self) -> bool:
        happened = super().step()
        recorder, steps = self.sender.recorder, self.run.steps
        if self.way == "read at once" or (self.way == "killed" and steps < 10):
            drain(recorder, self.sender.flattener, 10_000)
        elif self.way == "killed" and steps == 10:
            recorder.off()
        return happened


@pytest.mark.parametrize("way", ["nobody listens", "read at once", "frozen", "killed"])
@pytest.mark.parametrize("connector", [OFFLOADING, SIMPLE], ids=["lru", "simple"])
def test_the_tap_changes_nothing_that_the_engine_decides(
    release: Release, connector: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token, place, preemption, copy and flush is that of the engine alone. ``frozen``: nothing is taken from the
    tap's queue, which is made short, so that it is full and drops."""
    monkeypatch.setattr(binding, "Sender", Kept)
    monkeypatch.setattr(recording, "QUEUE_MAX", 50)
    dropped = 0
    for profile in ("press", "abort", "reset"):
        for seed in range(SEEDS):
            scenario = generate(profile, seed)
            alone = Machine(release, connector, scenario).play()
            machine = Tapped(release, connector, scenario, way)
            tapped = machine.play()
            assert (tapped.digest, tapped.steps) == (alone.digest, alone.steps), (profile, seed)
            assert (tapped.verdict is None) == (alone.verdict is None)
            dropped += machine.sender.recorder.dropped
    assert (dropped > 0) == (way == "frozen")


def test_a_reproduction_fails_with_the_fault_and_passes_without(release: Release, tmp_path: Path) -> None:
    scenario = next(
        one for one in (generate("abort", seed) for seed in range(200))
        if Machine(release, OFFLOADING, one, ("ignored-flush",)).play().verdict is not None
    )
    for faults in (("ignored-flush",), ()):
        source = report.reproduction(scenario, OFFLOADING, faults, f"vLLM {release.version}", "right content")
        space: dict[str, Any] = {"__name__": "reproduction"}
        exec(compile(source, "reproduction", "exec"), space)
        if faults:
            with pytest.raises(AssertionError, match="did not wait for store"):
                space["test_reproduction"]()
        else:
            space["test_reproduction"]()
