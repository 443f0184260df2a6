"""A recording as a workload: replayed by its own machine it is the same run, event for event.

Law of this file: the machines are those of ``test_tiered``, and the recordings go through files. Hits of a real engine
are the engine's own.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.cli.main import cli
from kvbm_console.core import stimuli
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import (
    BlocksEvicted,
    BlocksSeen,
    CandidatePlanned,
    CandidatePromoted,
    Event,
    IterationAdvanced,
    OperationReported,
    SlotMoved,
    SlotOpened,
    StimulusRejected,
)
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import Authority, FinishReason, SlotState, Tier
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.planning.attention import UNBOUNDED, AttentionWindow
from kvbm_console.planning.measured import Equation, Measured
from kvbm_console.planning.meter import Meter
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.recorded import RecordedLoad, RecordedWorkload, _Reading, paced, read_run
from kvbm_console.planning.run import build_rig, simulate
from kvbm_console.planning.traces import named_trace
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.link_settings import LinkSetting
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.workloads import Capacities, GivenRequests, Request, Workload
from recordings.scenarios import SCENARIOS
from tests.planning.test_tiered import machine_of, windowed
from tests.recording.helpers import Run
from tests.server import hostile
from tests.server.hostile import World
from tests.simulator.loads import Load
from tests.tap.kept import NAMES, run_of

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16
FULL = bool(os.environ.get("KVBM_FULL"))
ABORTED = 0.25
"""Share of the requests whose client goes away."""


class Taking(Meter):
    """A meter that also keeps what a leader publishes."""

    def __init__(self) -> None:
        super().__init__()
        self.stimuli: list[Stimulus] = []
        self.events: list[list[Event]] = []

    def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """One stimulus with its events."""
        super().__call__(stimulus, outcome)
        self.stimuli.append(stimulus)
        self.events.append(list(outcome.events))


class LateLoad(Load):
    """A load whose followers never arrive in the nanosecond in which an iteration ends."""

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """The follower, at an odd time."""
        following = super().finished(request, at_ns)
        return following and msgspec.structs.replace(following, arrival_ns=following.arrival_ns + 137)


def recorded(machine: SimulatedMachine, load: Workload, directory: Path) -> list[Event]:
    """Run a load on a machine and record it; returns the events."""
    taking = Taking()
    rig = build(machine.leader, machine.engine, load, publish=taking, links=machine.links)
    taking.watch(rig.leader.state)
    rig.run_to_end()
    run = Run(machine.leader, taking.stimuli, taking.events)
    run.record(directory, [7, 40], labels=machine.labels())
    return run.all_events


def options_of(run: RecordedLoad, **changes: Any) -> SimulateOptions:
    return SimulateOptions(trace=run.name, **{**run.option_fields(), **changes})


def replayed(run: RecordedLoad) -> list[Event]:
    """The events of the replay, each iteration on its own as it was recorded."""
    taking = Taking()
    workload = RecordedWorkload(run.name.partition(":")[2])
    build_rig(options_of(run), workload, taking, windows=False).run_to_end()
    return [event for events in taking.events for event in events]


def aborting(dice: random.Random, load: Load) -> None:
    for at, request in enumerate(load.requests):
        if dice.random() < ABORTED:
            later = request.arrival_ns + dice.choice([0, 1_000, 3_000_137, 40_000_137, 400_000_137])
            load.requests[at] = msgspec.structs.replace(request, abort_ns=later)


def compare(seed: int, directory: Path, *, groups: int = 0) -> None:
    """Record the machine of a seed, replay the recording, and compare all events.

    With ``groups`` the layers of its model see windows, in so many groups.
    """
    drawn = windowed(machine_of(seed), seed, groups) if groups else machine_of(seed)
    load = drawn.load
    assert isinstance(load, Load)
    if not list(drawn.load.arrivals()):
        return
    load.__class__ = LateLoad
    # A clone that is never opened is in no recording: with one token to generate there is none.
    load.requests = [
        msgspec.structs.replace(one, output_tokens=max(2, one.output_tokens)) if one.clone_hashes else one
        for one in load.requests
    ]
    if seed % 4 == 1:
        aborting(random.Random(seed), load)
    engine = msgspec.structs.replace(drawn.engine, max_waiting=100_000, named_early=seed % 2 == 0)
    machine = SimulatedMachine(leader=drawn.leader, engine=engine, links=drawn.links)
    events = recorded(machine, load, directory)
    assert not any(isinstance(event, StimulusRejected) for event in events)
    run = read_run(str(directory))
    assert (run.exact, run.machine, run.notes) == (True, machine, [])
    assert replayed(run) == events
    assert simulate(options_of(run), windows=False).document["prefix_hit_rate"] == run.hit_rate


@pytest.mark.parametrize("seed", range(1, 14))
def test_a_recording_of_the_simulated_engine_is_replayed_event_for_event(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("seed", range(1, 7))
def test_a_recording_of_a_model_with_windows_is_replayed_event_for_event(
    seed: int, groups: int, tmp_path: Path
) -> None:
    compare(seed, tmp_path, groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(14, 400))
def test_hundreds_of_recordings_are_replayed_event_for_event(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


def test_clients_go_away_in_every_state(tmp_path: Path) -> None:
    """The machines above would not notice if no abort ever met a request that waits, computes or decodes."""
    states: set[SlotState] = set()
    for seed in (5, 9, 13, 17, 21):
        drawn = machine_of(seed)
        assert isinstance(drawn.load, Load)
        aborting(random.Random(seed), drawn.load)
        machine = SimulatedMachine(leader=drawn.leader, engine=drawn.engine, links=drawn.links)
        states |= {
            event.old for event in recorded(machine, drawn.load, tmp_path / str(seed))
            if isinstance(event, SlotMoved) and event.reason is FinishReason.ABORTED
        }
    assert {SlotState.INITIALIZED, SlotState.PREFILLING, SlotState.DECODING} <= states


PEOPLE = {
    "breakpoint-hold", "reset", "drain", "stuck-slot", "gap", "two-hosts", "late-rank", "two-ranks",
}
"""Recordings in which a person, a lost report or a second rank took part."""


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS if scenario.name not in PEOPLE])
def test_the_recordings_of_this_project_are_replayed_event_for_event(name: str) -> None:
    path = ROOT / "recordings" / f"{name}.mcap"
    run = read_run(str(path))
    assert replayed(run) == [event for batch in Recording.open(path).events() for event in batch]


# --- real engines ---


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_of_vllm_has_the_hits_of_vllm(name: str, tmp_path: Path) -> None:
    """To the block.

    In ``refused`` a load that fails ends its request, and in ``trouble`` every third load fails and is computed.
    """
    run_of(name).record(tmp_path, [64])
    run = read_run(str(tmp_path))
    assert not run.exact
    document = simulate(options_of(run)).document
    assert run.hit_rate is not None
    assert document["prefix_hit_rate"] == pytest.approx(run.hit_rate)
    assert document["requests_completed"] == len(run.requests) - document["requests_aborted"]


@pytest.mark.parametrize("name", ["alone", "early"])
def test_an_engine_that_forms_steps_early_leaves_out_a_request_that_ends(name: str, tmp_path: Path) -> None:
    """With a connector a request that a step works on is not preempted."""
    run_of(name).record(tmp_path, [64])
    run = read_run(str(tmp_path))
    early = name == "early"
    assert (run.machine.engine.early_steps, run.machine.engine.fenced_steps) == (early, early)
    assert simulate(options_of(run)).document["prefix_hit_rate"] == run.hit_rate


def test_an_engine_that_names_blocks_early_finds_them_in_the_same_step(tmp_path: Path) -> None:
    """Half of the requests of ``twins`` find blocks that their own step computes."""
    run_of("twins").record(tmp_path, [64])
    run = read_run(str(tmp_path))
    assert run.machine.engine.named_early
    assert simulate(options_of(run, check=True)).document["prefix_hit_rate"] == run.hit_rate
    late = msgspec.structs.replace(run.machine.engine, named_early=False)
    machine = msgspec.structs.replace(run.machine, engine=late)
    assert simulate(options_of(run, machine=machine)).document["prefix_hit_rate"] < run.hit_rate


@pytest.mark.parametrize("early", [True, False])
def test_a_recording_tells_whether_blocks_are_named_early(early: bool, tmp_path: Path) -> None:
    """Two requests with one prompt arrive together."""
    requests = [Request(name, 0, (1, 2, 3), (), 49, 2, None) for name in "ab"]
    machine = SimulatedMachine(leader=LeaderConfig(), engine=EngineConfig(g1_blocks=16, named_early=early))
    reading = _Reading()
    for event in recorded(machine, GivenRequests("twins", requests, Capacities(16, 16, 0, 0, 64)), tmp_path):
        reading.take(event)
    assert reading.named_early is early


def test_a_window_is_as_large_as_the_blocks_that_requests_gave_back_say(tmp_path: Path) -> None:
    """vLLM ran with a window of 64 tokens, which no event tells."""
    run_of("window", older=True).record(tmp_path, [64])
    run = read_run(str(tmp_path))
    assert run.machine.engine.groups == (64,)
    assert run.notes == ["all layers see a window of 64 tokens, by the blocks that requests gave back while they ran"]
    document = simulate(options_of(run, check=True)).document
    assert document["prefix_hit_rate"] == run.hit_rate


@pytest.mark.parametrize("first", range(1, 61 if FULL else 21, 20))
def test_the_window_of_a_further_group_lies_below_its_bound(first: int) -> None:
    """The simulated engine tells of such a group what a tap tells."""
    bounded = 0
    for seed in range(first, first + 20):
        drawn = windowed(machine_of(seed), seed, 2)
        window = max(drawn.engine.groups)
        load, taking = drawn.load, Taking()
        rig = build(
            drawn.leader, msgspec.structs.replace(drawn.engine, groups=(0, window)), load, publish=taking,
            links=drawn.links,
        )
        taking.watch(rig.leader.state)
        rig.run_to_end()
        reading = _Reading()
        for events in taking.events:
            for event in events:
                reading.take(event)
        (found,) = reading.groups.windows.values()
        assert window <= found.most, f"seed {seed}"
        bounded += found.most < UNBOUNDED
    assert bounded > 0


def test_a_further_group_of_blocks_sees_a_window(tmp_path: Path) -> None:
    """vLLM ran with 34 blocks, of which it keeps one, and with a group of layers that see a window of 64 tokens."""
    run_of("hybrid", older=True).record(tmp_path, [64])
    run = read_run(str(tmp_path))
    assert run.machine.engine.g1_blocks == 33
    assert run.machine.engine.groups == (0, 64)
    assert run.notes == [
        "group 1 of the layers sees a window of 64 tokens, by its blocks that were gone",
    ]
    document = simulate(options_of(run, check=True)).document
    assert document["prefix_hit_rate"] == run.hit_rate


def test_the_limits_that_a_tap_told_are_those_of_the_replay(tmp_path: Path) -> None:
    run_of("chats").record(tmp_path, [64])
    run = read_run(str(tmp_path))
    machine = run.machine
    assert (machine.engine.max_running, machine.engine.max_batch_tokens, machine.leader.g2_blocks) == (16, 256, 400)
    assert run.notes == []


def windows_of(rule: Callable[[int], int], steps: int, dice: random.Random, late: int) -> AttentionWindow:
    """The window of requests that find, prefill and decode; ``rule`` tells how many blocks a position has passed.

    A decoding request gives its blocks back ``late`` tokens late, and a prefill gives none back.
    """
    window = AttentionWindow()
    window.block_tokens = BLOCK
    for _ in range(20):
        at = BLOCK * dice.randint(0, 12)
        passed = rule(at)
        if at:
            window.found(at, passed)
        at += dice.randint(1, 100)
        if rule(at - late) > passed:
            passed = rule(at - late)
            window.moved(at, passed)
        for _ in range(steps):
            at += 1
            if rule(at - late) > passed:
                window.decoded(at, passed, rule(at - late))
                passed = rule(at - late)
    return window


@given(st.integers(2, 300), st.sampled_from([0, 1]), st.randoms(use_true_random=False))
def test_requests_that_decode_tell_the_size_of_their_window(size: int, late: int, dice: random.Random) -> None:
    def rule(at: int) -> int:
        return sum((block + 1) * BLOCK - 1 <= at - size for block in range(at // BLOCK))

    assert windows_of(rule, size + 2 * BLOCK, dice, late).tokens - size in {0, late}


@given(st.integers(2, 8), st.randoms(use_true_random=False))
def test_chunks_that_are_given_back_at_once_are_no_window(blocks: int, dice: random.Random) -> None:
    assert windows_of(lambda at: at // (blocks * BLOCK) * blocks, 2 * blocks * BLOCK, dice, 0).tokens == 0


def test_a_request_that_waits_for_blocks_tells_of_no_limit_of_seats(tmp_path: Path) -> None:
    """A quarter of the device is free, and the prompt that waits needs nearly all of it."""
    requests = [
        Request("a", 0, (1, 2), (3, 4, 5), 40, 45, None),
        Request("b", 50_000_000, tuple(range(10, 24)), (), 14 * BLOCK, 2, None),
    ]
    taking = Taking()
    load = GivenRequests("load", requests, Capacities(BLOCK, 16, 0, 0, 64))
    rig = build(LeaderConfig(), EngineConfig(g1_blocks=16), load, publish=taking)
    taking.watch(rig.leader.state)
    rig.run_to_end()
    Run(LeaderConfig(), taking.stimuli, taking.events).record(tmp_path, [64])
    run = read_run(str(tmp_path))
    assert not run.exact
    assert run.machine.engine.max_running == EngineConfig(g1_blocks=1).max_running


Seen = tuple[str, int, int, bool, int]


def loads_of(events: list[Event]) -> list[Seen]:
    """Request, iteration of the order, iteration of the end and success of each load, and its nanoseconds."""
    slots: dict[int, str] = {}
    planned: dict[int, str] = {}
    ordered: dict[int, tuple[str, int, int]] = {}
    loads: list[Seen] = []
    iteration = 0
    for event in events:
        if isinstance(event, SlotOpened):
            slots[event.slot] = event.request
        elif isinstance(event, IterationAdvanced):
            iteration = event.iteration
        elif isinstance(event, CandidatePlanned) and event.route.is_load and event.slot is not None:
            planned[event.candidate] = slots[event.slot]
        elif isinstance(event, CandidatePromoted) and event.candidate in planned:
            ordered[event.operation] = planned[event.candidate], iteration, event.at_ns
        elif isinstance(event, OperationReported) and event.operation in ordered:
            request, began, at_ns = ordered[event.operation]
            loads.append((request, began, iteration, event.ok, event.at_ns - at_ns))
    return sorted(loads)


def test_loads_end_and_fail_in_the_steps_in_which_they_did(tmp_path: Path) -> None:
    run_of("trouble").record(tmp_path, [64])
    run = read_run(str(tmp_path))
    real, again = loads_of(run_of("trouble").all_events), loads_of(replayed(run))
    assert [load[:4] for load in again] == [load[:4] for load in real]
    assert sum(not ok for *_, ok, _ in real) == sum(copy.fault is not None for copy in run.copies.values()) == 7
    assert len({load[4] for load in again}) > 5  # the link alone gives each the same time
    options = options_of(run)
    assert simulate(options).document == simulate(options, leader=True).document
    assert simulate(options).document["prefix_hit_rate"] == pytest.approx(run.hit_rate)


def test_another_link_changes_the_time_of_recorded_loads(tmp_path: Path) -> None:
    """The link of the loads on the command line wins. Another link leaves them their recorded times."""
    run_of("offload").record(tmp_path, [64])
    run = read_run(str(tmp_path))

    def times(**changes: Any) -> set[int]:
        taking = Taking()
        options = options_of(run, **changes)
        build_rig(options, RecordedWorkload(str(tmp_path)), taking, windows=False).run_to_end()
        return {load[4] for load in loads_of([event for events in taking.events for event in events])}

    assert {ns // 1_000_000 for ns in times(link=(LinkSetting("pcie-up", 1e12, 60_000_000),))} == {60}
    assert times(link=(LinkSetting("disk-read", 1e12, 60_000_000),)) == times()
    known = {copy.lasts_ns for copy in run.copies.values()}
    assert len(times()) > 1
    assert times() <= known


def test_a_simulated_recording_tells_no_time_of_a_copy(tmp_path: Path) -> None:
    """Its links tell them."""
    drawn = machine_of(2)
    recorded(SimulatedMachine(leader=drawn.leader, engine=drawn.engine, links=drawn.links), drawn.load, tmp_path)
    assert read_run(str(tmp_path)).copies == {}


def test_a_step_after_which_no_request_went_on_is_no_pause() -> None:
    """The step takes the model's time, not the measured one, unless the engine was idle behind it."""
    config = EngineConfig(g1_blocks=1, step_base_ns=1_000, prefill_token_ns=10, decode_request_ns=0)

    def paced_ns(lasts_ns: float) -> int:
        last = Equation(lasts_ns, 1.0, 5.0, 0.0, lasts_ns)
        return paced(Measured("recording", [], [], begun_ns=[0.0, lasts_ns], last_ones=[last]), config, 0)(
            round(lasts_ns)
        )

    assert (paced_ns(1_100.0), paced_ns(5_000.0)) == (1_050, 5_000)


def test_the_end_of_a_request_uses_its_blocks() -> None:
    """Two requests fill the host tier. The one that came first ends last, so its blocks stay if its end counts."""
    def first_victims(used_at_end: bool) -> tuple[int, ...]:
        policy = PolicyConfig(policy="simple_lru", used_at_end=used_at_end)
        leader = LeaderConfig(
            g2_blocks=4, offload_threshold=0.0, offload_law="order", offload_prompt_only=True,
            eviction=policy,
        )
        requests = [
            Request("long", 0, (1, 2), (3, 4), 33, 40), Request("short", 1, (11, 12), (), 33, 2),
            Request("late", 10**10, (21, 22), (), 33, 2),
        ]
        load = GivenRequests("given", requests, Capacities(16, 16, 4, 0, 512))
        taking = Taking()
        rig = build(leader, EngineConfig(g1_blocks=16), load, publish=taking)
        taking.watch(rig.leader.state)
        rig.run_to_end()
        return next(
            tuple(unpack_hashes(event.hashes)) for events in taking.events for event in events
            if isinstance(event, BlocksEvicted)
        )

    assert first_victims(used_at_end=False) == (2, 1)
    assert first_victims(used_at_end=True) == (12, 11)


def test_a_stream_is_a_workload_of_its_misses() -> None:
    """Each stored block of the stream is computed once by a device that never gives one up."""
    path = ROOT / "recordings" / "kv-events" / "multiturn.mcap"
    run = read_run(str(path))
    stored = {
        key for batch in Recording.open(path).events() for event in batch if isinstance(event, BlocksSeen)
        for key in unpack_hashes(event.stored)
    }
    assert {key for request in run.requests for key in (*request.hashes, *request.output_hashes)} == stored
    document = simulate(options_of(run, total_kv_blocks=100_000)).document
    assert document["prompt_blocks"] - sum(document["hit_blocks"].values()) <= len(stored)
    assert "a stream names stored blocks" in document["note"]


# --- the command ---


def kvbm(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="kvbm-console")


def test_the_command_takes_the_machine_of_the_recording() -> None:
    path = str(ROOT / "recordings" / "thrash.mcap")
    result = kvbm("simulate", "--trace", path, "--format", "json")
    document = msgspec.json.decode(result.stdout)
    run = read_run(path)
    assert document["hit_blocks"] == {"G1": run.hit_blocks[0], "G2": run.hit_blocks[1]}
    assert document["trace"] == f"recording:{path}"
    smaller = msgspec.json.decode(
        kvbm("simulate", "--trace", path, "--kv-cpu-blocks", "0", "--format", "json").stdout
    )
    assert smaller["hit_blocks"] == {"G1": 54}
    text = kvbm("simulate", "--trace", path).stdout
    assert text.startswith("taken        the machine of the recording, --total-kv-blocks 24, --block-size 16")
    rows = msgspec.json.decode(
        kvbm("compare", "--trace", path, "--policies", "simple_lru", "--workers", "1", "--format", "json").stdout
    )["cells"]
    assert [row["hits"] for row in rows] == [sum(run.hit_blocks)]


@pytest.mark.parametrize(("words", "said"), [
    (("--trace", "recording:nowhere"), "nowhere does not exist"),
    (("--trace", "recording:"), "--trace recording: must name a file, as in recording:run/"),
    (("--trace", f"recording:{ROOT}/recordings/thrash.mcap,engine=7"), "must name one of the engines 1"),
    (("--trace", f"recording:{ROOT}/recordings/thrash.mcap,engine=x"), "engine must be a number, got 'x'"),
    (("--trace", f"recording:{ROOT}/recordings/thrash.mcap", "--block-size", "24"),
     "--block-size must be a multiple of 16"),
])
def test_a_mistake_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    result = kvbm("simulate", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_larger_blocks_join_the_recorded_ones() -> None:
    run = read_run(str(ROOT / "recordings" / "thrash.mcap"))
    workload = RecordedWorkload(str(ROOT / "recordings" / "thrash.mcap"))
    workload.begin(64)
    for small, large in zip(run.requests, workload.arrivals(), strict=True):
        blocks = small.hashes + small.output_hashes
        assert large.hashes + large.output_hashes == blocks[3::4]
        assert len(large.hashes) == small.prompt_tokens // 64


def test_a_bare_recording_takes_its_engine_and_its_run(tmp_path: Path) -> None:
    path = ROOT / "recordings" / "thrash.mcap"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "one.mcap").write_bytes(path.read_bytes())
    identity = Recording.open(path).incarnation
    for bare in (path, tmp_path / "run"):
        assert named_trace(f"{bare},engine=1,run={identity}") == f"recording:{bare},engine=1,run={identity}"
        refused = CliRunner().invoke(cli, ["simulate", "--trace", f"{bare},engine=77"], prog_name="kvbm-console")
        assert refused.exit_code == 2
        assert "77" in refused.stderr
        assert "cannot be read" not in refused.stderr


def test_requests_of_impossible_lengths_are_left_out(tmp_path: Path) -> None:
    """An engine told of a prompt of 2^31 tokens, and a replay made a hash for each of its blocks."""
    world = World(random.Random(1), feeds=0)
    engine = world.open(Authority.ENGINE)
    world.submit(engine, stimuli.PoolDeclared(0, 0, 0, None, 0, 0, Tier.G1, "GPU", 64, 16, Authority.ENGINE))
    for name, prompt, output in (("long", 2**31, 8), ("endless", 20, 2**40), ("a", 40, 8)):
        world.submit(engine, stimuli.RequestArrived(0, 0, 0, None, name, b"", prompt, output, 0, None))
    Run(world.config, world.told, []).record(tmp_path / "all", [64])
    load = read_run(str(tmp_path / "all"))
    assert "requests of more than 16,777,216 tokens are left out, 1 of 3" in load.notes
    assert [request.request for request in load.requests] == ["endless", "a"], "the answer of this one did not begin"
    assert len(simulate(SimulateOptions(trace=load.name, **load.option_fields()), keep_records=True).records) == 2
    Run(world.config, world.told[:-2], []).record(tmp_path / "long", [64])
    with pytest.raises(UsageError, match="must have a request of at most 16,777,216 tokens"):
        read_run(str(tmp_path / "long"))


@pytest.mark.parametrize("seed", [315, 374, 1002, 1013, 1038])
def test_whatever_engines_told_their_requests_are_replayed(tmp_path: Path, seed: int) -> None:
    """Names that come again while copies run (315, 374), answers of 0 tokens and clones of requests that were too large
    (1002, 1013), and an engine with one group of layers beside one with several (1038)."""
    world = hostile.run(seed, 400 if seed > 1_000 else 300)
    Run(world.config, world.told, []).record(tmp_path, [64])
    engines = {pool.info.source for pool in world.mirror.pools if pool.info.source}
    replayed = 0
    for engine in sorted(engines):
        try:
            load = read_run(f"{tmp_path},engine={engine}")
        except UsageError:
            continue  # it told of no request, or of none that can be replayed
        simulate(SimulateOptions(trace=load.name, **load.option_fields()))
        replayed += 1
    assert replayed
