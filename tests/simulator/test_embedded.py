"""The whole machine: default workloads, the real trace, several hosts, faults, resets, and what must never differ."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import InternalError, UsageError
from kvbm_console.core.ids import CandidateStatus, FinishReason, ResetMode, Route, SlotState
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.leader import Outcome
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import HostsDiverged
from kvbm_console.simulator.embedded import Rig, build, default_engine_config, default_leader_config, parse_workload
from kvbm_console.simulator.link import Fault
from kvbm_console.simulator.port import StimulusPort
from kvbm_console.simulator.scheduler import Scheduler
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Request, Workload

TIGHT = "multiturn:sessions=10,turns=3,think=0.1,ramp=0.02,user=120,output=40,requests=40"
"""More than its pools of ``TIGHT_BLOCKS`` can hold: every kind of pressure within a second or two of virtual time."""
TIGHT_BLOCKS = 160


class Tape:
    """All stimuli and events, folded as they come."""

    def __init__(self) -> None:
        self.stimuli: list[st.Stimulus] = []
        self.events: list[ev.Event] = []
        self.state = CacheState()

    def keep(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        self.stimuli.append(stimulus)
        self.events.extend(outcome.events)
        for event in outcome.events:
            self.state.apply(event)

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode([self.stimuli, self.events])

    def states(self) -> set[SlotState]:
        return {event.new for event in self.events if isinstance(event, ev.SlotMoved)}


def tight(tape: Tape | None = None, *, hosts: int = 1, check: bool = True, text: str = TIGHT, **changes: object) -> Rig:
    workload = parse_workload(text)
    numbers = {"g2_blocks": 4 * TIGHT_BLOCKS, "g3_blocks": 12 * TIGHT_BLOCKS, **changes}
    return build(
        default_leader_config(workload, **numbers), default_engine_config(workload, g1_blocks=TIGHT_BLOCKS), workload,
        publish=None if tape is None else tape.keep, hosts=hosts, check=check,
    )


def usual(workload: Workload, tape: Tape, **changes: object) -> Rig:
    return build(
        default_leader_config(workload, **changes), default_engine_config(workload), workload, publish=tape.keep,
        check=True,
    )


def all_given_back(rig: Rig) -> bool:
    return rig.engine.scheduler.pool.audit([]) == []


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_ten_seconds_of_the_default_chats_show_everything(seed: int) -> None:
    tape = Tape()
    usual(parse_workload(f"multiturn:seed={seed}"), tape).run_to_end(10_000_000_000)
    routes = {
        event.route for event in tape.events if isinstance(event, ev.CandidatePlanned)
    }
    ended = [event.status for event in tape.events if isinstance(event, ev.CandidateEnded)]
    assert {Route.G1_G2, Route.G2_G1} <= routes
    assert ended.count(CandidateStatus.COMPLETED) > 20
    assert tape.states() | {SlotState.INITIALIZED} == set(SlotState)
    assert not [event for event in tape.events if isinstance(event, ev.StimulusRejected)]


def test_a_run_to_the_end_leaves_nothing_behind_and_folds_to_the_same_facts() -> None:
    tape = Tape()
    rig = tight(tape)
    rig.run_to_end()
    state = rig.leader.state
    assert rig.done
    assert not state.slots
    assert not state.operations
    assert not state.candidates
    assert all_given_back(rig)
    assert state.totals.preemptions > 0
    assert state.totals.moved_blocks[Route.G2_G1.label] > 0
    assert state.totals.rejected == state.totals.violations == state.totals.completions_refused == 0
    assert digest(tape.state) == rig.leader.digest()
    assert rig.engine.totals.finished == 40 == state.totals.slots_opened


def test_two_runs_with_one_seed_are_byte_identical() -> None:
    tapes = [Tape(), Tape(), Tape()]
    for tape, text in zip(tapes, (TIGHT, TIGHT, TIGHT + ",seed=1"), strict=True):
        tight(tape, text=text).run_to_end()
    assert tapes[0].encoded() == tapes[1].encoded()
    assert tapes[0].encoded() != tapes[2].encoded()


@given(cuts=hs.lists(hs.integers(1, 40_000_000), min_size=1, max_size=30))
@settings(max_examples=5)
def test_slicing_a_run_changes_nothing(cuts: list[int]) -> None:
    whole, sliced = Tape(), Tape()
    text = TIGHT.replace("requests=40", "requests=12")
    tight(whole, text=text).run_to_end()
    rig = tight(sliced, text=text)
    at_ns = 0
    for cut in cuts:
        at_ns += cut
        rig.run(at_ns, wall_budget_ns=1)
    rig.run_to_end()
    assert whole.encoded() == sliced.encoded()


def test_an_iteration_that_the_leader_refuses_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = Scheduler.announce

    def announced(self: Scheduler, plan: Plan, iteration: int) -> None:
        announce(self, plan, iteration + (iteration == 40))

    monkeypatch.setattr(Scheduler, "announce", announced)
    with pytest.raises(InternalError, match="the leader refused a call of the engine") as raised:
        tight(check=False).run_to_end()
    assert "iteration 41 (count" in str(raised.value)


@pytest.mark.parametrize("call", [
    lambda port, work: port.looked_up("nobody", 0),
    lambda port, work: port.admitted(work, 0, 0),
    lambda port, work: port.appended(work, [1]),
    lambda port, work: port.cloned(work, [work], []),
    lambda port, work: port.filled(1, [work], [1], [1], [7]),
    lambda port, work: port.preempted(work),
    lambda port, work: port.finished("nobody", [], FinishReason.LENGTH),
])
def test_no_refused_call_of_the_engine_goes_unnoticed(call: Callable[[StimulusPort, Work], object]) -> None:
    rig = tight(check=False)
    work = Work(Request("nobody", 0, (7,), (), 20, 4))
    with pytest.raises(InternalError, match="the leader refused a call of the engine"):
        call(StimulusPort(rig.dispatcher.port(1)), work)
    assert rig.leader.state.totals.rejected == 1


def test_without_lower_tiers_nothing_is_moved() -> None:
    tape = Tape()
    rig = tight(tape, g2_blocks=0, g3_blocks=0)
    rig.run_to_end()
    assert not [event for event in tape.events if isinstance(event, ev.CandidatePlanned)]
    assert rig.engine.totals.finished == 40


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_agree_after_every_stimulus(hosts: int) -> None:
    rig = tight(hosts=hosts, text=TIGHT.replace("requests=40", "requests=10"))
    rig.run_to_end()
    first, *others = [rig.leader, *rig.dispatcher.more_hosts]
    assert all(other.digest() == first.digest() for other in others)


@pytest.mark.fault
def test_f23_a_host_altered_at_a_random_step_is_found_at_that_very_step() -> None:
    for seed in range(3):
        rng = random.Random(seed)
        rig = tight(hosts=3, check=False, text=TIGHT.replace("requests=40", "requests=10"))
        step, host = rng.randrange(20, 200), rng.randrange(1, 3)
        while rig.dispatcher.n < step:
            rig.run(rig.next_ns)
        state = rig.dispatcher.more_hosts[host - 1].state
        alteration = rng.choice(["refs", "computed", "totals"])
        if alteration == "refs":
            state.pools[0].refs[0] += 1
        elif alteration == "computed":
            next(iter(state.slots.values())).anchor_tokens += 1
        else:
            state.totals.hit_blocks[1] += 1
        n = rig.dispatcher.n
        with pytest.raises(HostsDiverged) as caught:
            rig.run_to_end()
        assert (caught.value.host, caught.value.n) == (host, n), (seed, alteration)


@pytest.mark.parametrize("changes", [
    {"asynchronous": False}, {"ranks": 3}, {"offload_threshold": 0.0}, {"offload_batch_blocks": 1},
    {"staging_deadline_ns": 1_000_000},
])
def test_other_configurations_run_to_the_end(changes: dict[str, object]) -> None:
    tape = Tape()
    rig = tight(tape, **changes)
    rig.run_to_end()
    assert rig.engine.totals.finished == 40
    assert rig.leader.state.totals.rejected == 0
    assert all_given_back(rig)
    assert digest(tape.state) == rig.leader.digest()


def test_the_threshold_of_offloading_matters() -> None:
    moved = []
    for threshold in (0.0, 0.5, 0.9, 1.0):
        rig = tight(check=False, offload_threshold=threshold)
        rig.run_to_end()
        moved.append(rig.leader.state.totals.moved_blocks.get(Route.G1_G2.label, 0))
    assert len(set(moved)) == 4
    assert moved[0] == max(moved)


def test_synchronous_loads_make_steps_longer() -> None:
    ends = []
    for asynchronous in (True, False):
        rig = tight(check=False, asynchronous=asynchronous, text="multiturn:sessions=1,turns=1,requests=1")
        rig.run_to_end()
        ends.append(rig.now_ns)
    assert ends[0] == ends[1], "without a load there is nothing to charge"
    rig = tight(check=False, asynchronous=False)
    charged = 0
    take = rig.mover.take_latency_ns

    def counting() -> int:
        nonlocal charged
        charged += rig.mover.pending_latency_ns()
        return take()

    rig.engine._take_latency_ns = counting
    rig.run_to_end()
    assert charged > 0
    assert rig.mover.pending_latency_ns() == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_copies_cost_hits_and_nothing_else(asynchronous: bool) -> None:
    rng = random.Random(4)

    def faults(order: StartTransfer) -> Fault | None:
        if rng.random() < 0.4:
            return Fault(blocks=tuple(sorted(rng.sample(range(order.blocks), rng.randint(0, order.blocks)))))
        return None

    tape = Tape()
    rig = tight(tape, asynchronous=asynchronous)
    rig.mover.faults = faults
    rig.run_to_end()
    assert rig.engine.totals.finished == 40
    assert rig.leader.state.totals.lost_blocks > 0
    assert rig.leader.state.totals.rejected == 0
    assert all_given_back(rig)
    assert digest(tape.state) == rig.leader.digest()


def test_a_copy_that_is_never_reported_is_noticed_as_a_stuck_engine() -> None:
    rig = tight(check=False)
    rig.mover.faults = lambda order: None if order.route.is_load else Fault(silent=True)
    with pytest.raises(InternalError, match="stuck at"):
        rig.run_to_end()


@pytest.mark.parametrize("mode", list(ResetMode))
def test_a_reset_in_the_middle_is_survived(mode: ResetMode) -> None:
    tape = Tape()
    rig = tight(tape)
    for at_ns in (700_000_000, 1_100_000_000):
        rig.run_to_end(at_ns)
        rig.dispatcher.submit(st.ResetRequested, mode)
        assert not rig.leader.state.slots
    rig.run_to_end()
    totals = rig.engine.totals
    assert totals.forgotten > 0
    assert totals.finished + totals.forgotten == 40
    assert rig.leader.state.epoch == 2
    assert all_given_back(rig)
    assert digest(tape.state) == rig.leader.digest()


def test_a_held_slot_stands_still_while_the_others_run() -> None:
    tape = Tape()
    rig = tight(tape)
    rig.dispatcher.submit(
        st.BreakpointsReplaced, "me", (BreakpointSpec(to_state=SlotState.ONBOARD_STAGED, one_shot=True),)
    )
    rig.run_to_end()
    assert rig.only_held
    [hold] = rig.leader.state.holds.values()
    slot = rig.leader.state.slots[hold.slot]
    assert slot.state is SlotState.ONBOARD_STAGED
    assert not slot.device_blocks, "it takes no room from the others, so their pressure does not end its hold"
    assert rig.engine.totals.finished >= 25, "all sessions but the held one went on"
    at_ns = rig.now_ns
    rig.run_to_end()
    assert rig.now_ns == at_ns
    rig.dispatcher.submit(st.HoldContinued, hold.hold, "me", None)
    rig.run_to_end()
    assert rig.done
    assert rig.engine.totals.finished == 40


def test_an_endless_workload_needs_an_end() -> None:
    rig = tight(text="multiturn")
    with pytest.raises(UsageError, match="multiturn never ends"):
        rig.run_to_end()


def test_progress_is_told() -> None:
    told: list[int] = []
    tight(check=False).run_to_end(progress=told.append)
    assert told[-1] == 40


@pytest.mark.timeout(400)  # 20 s of CPU: a minute beside others
def test_the_first_requests_of_the_real_trace(mooncake_trace: Path) -> None:
    """600 requests, cheap invariants after every stimulus, the full audit after every 50th, onboarding beyond 300."""
    tape = Tape()
    workload = parse_workload(f"mooncake:{mooncake_trace}", 600)
    rig = usual(workload, tape, g2_blocks=2_048, g3_blocks=4_096)
    rig.run_to_end()
    totals = rig.leader.state.totals
    assert rig.engine.totals.finished == 600
    assert totals.moved_blocks[Route.G2_G1.label] > 300
    assert totals.rejected == totals.violations == totals.completions_refused == 0
    assert all_given_back(rig)
    assert digest(tape.state) == rig.leader.digest()
    late = {
        event.slot for event in tape.events if isinstance(event, ev.SlotMoved) and event.new is SlotState.ONBOARDING
    }
    assert any(slot >= 300 for slot in late)


def test_a_bad_line_in_the_middle_of_a_trace_names_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
    path.write_text(good + "{}\n")
    workload = parse_workload(f"mooncake:{path}")
    with pytest.raises(UsageError, match=r"bad\.jsonl line 2: "):
        usual(workload, Tape()).run_to_end()
