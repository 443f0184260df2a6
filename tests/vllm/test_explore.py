"""``explore`` on vLLM's real scheduler: silent on the newest release, and not on planted faults.

Law of this file: every fault that can be named is found, each within its limit of CPU time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.core.events import StimulusRejected
from kvbm_console.explore import recorded, report, tapped
from kvbm_console.explore.scenario import BLOCK, PROFILES, Arrive, CacheReset, Scenario, generate
from kvbm_console.explore.vllm import Machine, Release, ScenarioRun
from kvbm_console.recording.positions import verdict_seq
from kvbm_console.recording.reader import Recording
from kvbm_console.tap import recorder as recording
from kvbm_console.testing import assert_replays
from tests.benchmarks.bench_explore import RATIO_MAX
from tests.vllm import explore_long
from tests.vllm.explore_faults import MEANINGS, first_hit
from tests.vllm.explore_known import (
    AGAIN,
    CLEARED,
    CONNECTORS,
    DISPLACED,
    LMCACHE,
    MULTI,
    NOT_REMOVED,
    OFFLOADING,
    OWN_RESERVATION,
    SIMPLE,
    TIERS,
    TOLD_AS_CACHED,
    TWICE,
    UNCOUNTED,
    known,
)
from tests.vllm.explore_speed import measured
from tests.vllm.explore_tapped import PLACES, Beside, Listened, decided

pytestmark = pytest.mark.timeout(600)
DAEMONS = int(os.environ.get("KVBM_EXPLORE_DAEMONS", "2"))
"""Runs beside a daemon that is stopped, and as many beside a daemon that is killed, with the tap at the scheduler and
at the connector in turn."""
NEEDS_LMCACHE = "needs lmcache: pip install --no-deps lmcache aiofile caio"
SEEDS = range(2)
"""Of each profile, for the effect of the tap. ``explore_long`` runs thousands of them."""


@pytest.fixture(scope="module")
def release() -> Release:
    return Release()


def play(release: Release, connector: dict[str, Any], profile: str, seed: int, *faults: str) -> ScenarioRun:
    return Machine(release, connector, generate(profile, seed), faults).play()


@pytest.mark.parametrize("name", CONNECTORS)
def test_nothing_is_found_in_this_release_beyond_what_is_known(release: Release, name: str) -> None:
    """Every adapter and every shape of a machine: full and windowed layers, several ranks, failing loads."""
    steps = reads = moved = 0
    for profile in PROFILES:
        for seed in range(8):
            scenario = generate(profile, seed)
            if name in ("simple", "multi") and scenario.option("groups") == "window":
                continue  # SimpleCPUOffloadConnector refuses a model without full attention
            run = Machine(release, CONNECTORS[name], scenario).play()
            if run.verdict is not None:
                assert run.verdict.signature in known(name, profile), (profile, seed, run.verdict)
            steps, reads, moved = steps + run.steps, reads + run.reads, moved + run.moved_blocks
    assert steps > 4_000
    assert reads > 40_000
    assert moved > 500


@pytest.mark.parametrize("name", ["lru", "simple", "tiers", "nixl", "lmcache"])
def test_an_adapter_conforms(release: Release, name: str) -> None:
    """Its copies are real, a scenario is a run, and a worker that copies or reports badly is found through it."""
    connector = LMCACHE if name == "lmcache" else CONNECTORS[name]
    if name == "lmcache":
        pytest.importorskip("lmcache", reason=NEEDS_LMCACHE)
    for seed in range(3):
        first, again = (play(release, connector, "hits", seed) for _ in range(2))
        assert (first.digest, first.steps, first.moved_blocks) == (again.digest, again.steps, again.moved_blocks)
        assert first.moved_blocks
    for fault in ("first-source", "hasty-load", "torn-copy", "lost-load-report"):
        assert any(play(release, connector, "hits", seed, fault).verdict for seed in range(40)), fault


def test_lmcache_keeps_locks_of_an_aborted_lookup_and_cannot_end_a_failed_load(release: Release) -> None:
    """The findings in LMCache 0.5.6, and nothing else. A release in which this fails has mended one."""
    pytest.importorskip("lmcache", reason=NEEDS_LMCACHE)
    locked, crash = "no leak: host references", "no crash: AssertionError in scheduler._update_from_kv_xfer_finished"
    allowed = {"abort": {locked}, "reset": {locked}, "ranks": {locked}, "failures": {locked, crash, TOLD_AS_CACHED}}
    found = set()
    for profile, shape in PROFILES.items():
        for seed in range(10) if "groups" not in shape.machine else ():
            verdict = play(release, LMCACHE, profile, seed).verdict
            if verdict is not None:
                assert verdict.signature in allowed.get(profile, ()), (profile, seed, verdict)
                found.add(verdict.signature)
    assert {locked, crash} <= found


@pytest.mark.parametrize("profile", [name for name, shape in PROFILES.items() if shape.machine])
def test_faults_are_found_in_every_shape_of_a_machine(release: Release, profile: str) -> None:
    for fault in ("swapped-blocks", "hasty-store", "connector-no-flush"):
        verdicts = (play(release, OFFLOADING, profile, seed, fault).verdict for seed in range(400))
        assert any(verdict and verdict.signature not in known("lru", profile) for verdict in verdicts), fault


def test_a_request_whose_load_failed_waits_for_its_own_reservation(release: Release) -> None:
    """Two requests and a reset, in an idle engine. A release in which this fails has mended the finding."""
    scenario = Scenario(22, 1, 1, 256, (
        Arrive(32, "a", ((61, 16),), 1), CacheReset(39, True, False),
        Arrive(39, "b", ((61, 135), (62, 125), (63, 61)), 1)), (2,), (("fails", 1),))
    verdict = Machine(release, OFFLOADING, scenario).play().verdict
    assert verdict is not None
    assert verdict.signature == OWN_RESERVATION


def test_a_request_whose_loads_all_fail_is_loaded_again_without_end(release: Release) -> None:
    """``recompute`` asks the connector again, which offers the same block. A release in which this fails has mended it.
    """
    scenario = Scenario(3, 1, 1, 256, (
        Arrive(0, "a", ((21, 16),), 1), Arrive(12, "b", ((21, 16),), 1)), (2,), (("fails", 1),))
    for connector, load in ((OFFLOADING, scenario), (TIERS, scenario), (MULTI, scenario),
                            (SIMPLE, generate("failures", 246))):
        verdict = Machine(release, connector, load).play().verdict
        assert verdict is not None
        assert verdict.signature == AGAIN


def test_chunks_that_a_request_brings_from_files_displace_each_other(release: Release) -> None:
    """Four requests, of which the third never runs. Its chunks get the age of its first promotion, so the idle chunks
    of the fourth, which ends later, outlast them. Seven of eleven places of the host are left for eight chunks. A
    release in which this fails has mended it."""
    scenario = Scenario(10, 11, 1, 128, (
        Arrive(10, "a", ((41, 107), (42, 21)), 1), Arrive(11, "b", ((21, 64),), 1),
        Arrive(16, "c", ((41, 107), (42, 21)), 1), Arrive(16, "d", ((1, 1), (2, 64)), 1)), (4,))
    verdict = Machine(release, TIERS, scenario).play().verdict
    assert verdict is not None
    assert verdict.signature == DISPLACED
    assert "for request c," in verdict.sentence


def test_a_loaded_request_with_a_sliding_window_needs_more_than_its_reservation(release: Release) -> None:
    """Two loads are admitted with 5 blocks left, 4 are reserved for the first, and it needs 6. A release in which this
    fails has mended the finding."""
    scenario = Scenario(36, 37, 3, 32, (
        Arrive(7, "a", ((0, 16), (31, 125)), 7), Arrive(12, "b", ((0, 2), (1, 61)), 3),
        Arrive(12, "c", ((0, 16), (31, 119), (32, 9)), 2), Arrive(12, "d", ((0, 16), (31, 80), (32, 1)), 1)),
        (2,), (("groups", "full+window+window"), ("windows", "all")))
    verdict = Machine(release, SIMPLE, scenario).play().verdict
    assert verdict is not None
    assert verdict.signature == UNCOUNTED
    assert "request c (preempted) holds 24 blocks" in verdict.sentence


def test_two_resets_before_a_step_end_the_engine(release: Release) -> None:
    """A store is in flight. A release in which this fails has mended the finding."""
    scenario = Scenario(8, 8, 1, 64, (
        Arrive(0, "a", ((1, 32),), 9), CacheReset(4, False, True), CacheReset(4, False, True)), (20,))
    verdict = Machine(release, OFFLOADING, scenario).play().verdict
    assert verdict is not None
    assert verdict.signature == TWICE


def test_a_request_that_waits_for_slow_copies_is_not_told_to_ask_again_without_end(release: Release) -> None:
    """Copies of eight steps, one after another: lookup, store, file and load. It was a false alarm."""
    assert play(release, TIERS, "hybrid", 96).verdict is None


def test_the_engine_refuses_a_machine_and_the_search_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("kvbm-console"), "explore", "vllm", "--connector", json.dumps(SIMPLE),
         "--seeds", "0:8", "--profile", "hybrid", "--workers", "1", "--format", "json"],
        capture_output=True, text=True, timeout=500, cwd=tmp_path,
    )
    report = json.loads(done.stdout)
    assert sum(report["left_out"].values()) + report["runs"] == 8
    assert all(reason.startswith("groups window: ") for reason in report["left_out"])


@pytest.mark.parametrize("fault", MEANINGS)
def test_a_planted_fault_is_found_within_a_minute_of_cpu(release: Release, fault: str) -> None:
    assert first_hit(release, fault) is not None


def test_a_reset_of_simple_cpu_offload_says_that_the_device_was_cleared(release: Release) -> None:
    """Its CPU pool publishes AllBlocksCleared, which names no medium. A release in which this fails has mended it."""
    verdicts = [play(release, SIMPLE, "reset", seed).verdict for seed in range(60)]
    assert {one.signature for one in verdicts if one is not None} == {CLEARED, NOT_REMOVED}


def test_a_scenario_is_a_run(release: Release) -> None:
    first, again = (play(release, OFFLOADING, "press", 7) for _ in range(2))
    assert (first.steps, first.reads, first.moved_blocks, first.pairs) == (
        again.steps, again.reads, again.moved_blocks, again.pairs)


@pytest.mark.parametrize("name", CONNECTORS)
def test_our_leader_follows_every_scenario_through_the_tap(release: Release, name: str, tmp_path: Path) -> None:
    """So a finding has its recording: nothing is refused, and rerunning it decides the same."""
    for profile in (profile for profile, shape in PROFILES.items() if not shape.machine):
        for seed in range(3):
            told: list[dict[str, Any]] = []
            machine = tapped.Tapped(release, CONNECTORS[name], generate(profile, seed), (), told.append)
            machine.play()
            machine.tell_rest()
            path = recorded.record(told, {"monitor": "x", "sentence": "y"}, tmp_path / f"{profile}-{seed}.mcap", name)
            made = Recording.open(path)
            assert not any(isinstance(one, StimulusRejected) for batch in made.events() for one in batch)
            assert machine.run.verdict is not None or made.state_at(made.last_seq).slots == {}
            assert_replays(path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CONNECTORS)
def test_the_tap_changes_nothing_that_the_engine_decides(release: Release, name: str, place: str) -> None:
    """Every token, place, preemption, copy and flush is that of the engine alone."""
    compared = Beside(release, CONNECTORS[name], place)
    for profile in ("press", "abort", "reset"):
        for seed in SEEDS:
            assert not compared.differing(generate(profile, seed)), (profile, seed)
    assert not compared.errors
    assert {way for way, count in compared.dropped.items() if count} == {"full"}


def test_a_long_exploration_runs_each_chunk_once_and_tells_what_is_not_known(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call runs the chunk that is left."""
    monkeypatch.setattr(explore_long, "STATE", tmp_path / "state.jsonl")
    monkeypatch.setattr(explore_long, "CHUNK", 1)
    for seeds in (range(1), range(2)):
        explore_long.explore("tap", release, ("connector",), seeds, 1e9)
    assert [line["seeds"] for line in explore_long.done("tap")] == [[0, 1], [1, 2]]
    assert explore_long.wrong("tap") == []
    monkeypatch.setitem(explore_long.KINDS, "silent", (lambda *_: {
        "runs": 1, "steps": 9, "findings": {"x": 1}, "unknown": [["press", 0, "x", "a sentence"]]}, ("lru",)))
    explore_long.explore("silent", release, ("lru",), range(1), 1e9)
    assert explore_long.wrong("silent") == [f"{release.version} lru press 0 x a sentence"]
    assert list(explore_long.table("silent"))[-1].endswith("| 0 | 1 |")


def test_a_step_costs_little_more_than_the_scheduler_alone(release: Release) -> None:
    """Connector, worker, memory and monitors are the difference."""
    ours, theirs = measured(release, 10)
    print(f"{1e9 / ours:,.0f} steps a second and core, {1e9 / theirs:,.0f} alone: {ours / theirs:.2f} x")
    assert ours / theirs < RATIO_MAX


@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_daemon_that_stops_or_dies_changes_nothing_that_the_engine_decides(
    release: Release, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """A real daemon and a real reporter. The daemon gets the signal in the middle of each run."""
    listening = threading.Event()
    listen = recording.TapRecorder.listen

    def listened(self: Any) -> None:
        listen(self)
        listening.set()

    monkeypatch.setattr(recording.TapRecorder, "listen", listened)
    with ExitStack() as stack:
        for seed in range(DAEMONS):
            scenario, place = generate("press", seed), ("scheduler", "connector")[seed % 2]
            alone = Machine(release, OFFLOADING, scenario).play()
            if not seed or how is signal.SIGKILL:  # a daemon that was stopped goes on, for the next engine
                process, target = stack.enter_context(daemon())
            listening.clear()
            machine = Listened(release, OFFLOADING, scenario, place, daemon=target)
            assert listening.wait(60)
            step, half = machine.step, alone.steps // 2

            def told(machine: Machine = machine, step: Any = step, half: int = half, process: Any = process) -> bool:
                if machine.run.steps == half:
                    process.send_signal(how)
                happened: bool = step()
                return happened

            machine.step = told  # type: ignore[method-assign]
            watched = machine.play()
            process.send_signal(signal.SIGCONT)
            assert decided(watched) == decided(alone), (how, place, seed)
            assert machine.sender.recorder.calls


@contextmanager
def daemon() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon that listens for an engine, and its address."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place:
        target = f"unix:{place}/d.sock"
        process = subprocess.Popen(
            [Path(sys.executable).with_name("kvbm-console"), "serve", "--listen", target, "--g2-blocks", "0",
             "--g3-blocks", "0", "--block-tokens", str(BLOCK)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        assert process.stderr is not None
        try:
            assert "serving on" in process.stderr.readline()
            yield process, target
        finally:
            process.kill()
            process.wait()


def test_the_command_finds_shrinks_and_records(tmp_path: Path) -> None:
    """From the command line to the recording, through the processes of a search."""
    done = subprocess.run(
        [Path(sys.executable).with_name("kvbm-console"), "explore", "vllm", "--fault", "hasty-load", "--seeds", "0:4",
         "--profile", "hits", "--workers", "1", "--first", "--out", tmp_path, "--format", "json"],
        capture_output=True, text=True, timeout=500,
    )
    assert done.returncode == 1, done.stderr
    finding = json.loads(done.stdout)["findings"][0]
    assert (finding["monitor"], finding["shrunk"]) == ("right content", True)
    made = Recording.open(Path(finding["recording"]))
    assert verdict_seq(made) == made.last_seq


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
