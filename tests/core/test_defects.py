"""The defects of earlier implementations, D1 to D11: none of them may come back.

Law of this file: where a defect can be planted, it is, and the same story that passes without it fails.
"""

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import (
    CandidateStatus,
    Condition,
    MissReason,
    ReleaseReason,
    Site,
    SkipReason,
    SlotState,
    WaitPoint,
)
from kvbm_console.core.instructions import FinishAnswer
from kvbm_console.core.leader import memory as memory_module
from kvbm_console.core.leader import pipeline, requests
from kvbm_console.core.leader.decider import Decider

from .engine_model import BLOCK
from .scenes import serve, stored
from .script import Script


def story(**how: object) -> Script:
    """A copy down, a load, a preemption and two finishes while copies run."""
    script = stored("abcd", **{"g1": 12, **how})
    script.arrive("b", "abcd")
    script.admit("b")
    script.move_all()
    script.step(2)
    script.arrive("c", "abxy")
    script.admit("c")
    script.step()
    for operation in list(script.mover.queued):
        script.start(operation)
    script.preempt("c")
    script.finish("b")
    script.arrive("filler", "", tail=script.engine.pool.free_blocks * BLOCK - 1)
    script.admit("filler")
    script.move_all()
    return script


def test_d1_nobody_listens_and_nothing_changes() -> None:
    """With and without a subscriber (here: mirror, twin and checks) the events are the same."""
    listened, alone = story(), story(twin=False, checks=False)
    assert listened.events == alone.events
    assert listened.leader.digest() == alone.leader.digest()


def test_d2_complete_at_promotion_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    promote = pipeline._promote

    def complete_at_promotion(leader: Decider, candidate: object, sources: list[int], targets: list[int],
                              hashes: list[int]) -> None:
        promote(leader, candidate, sources, targets, hashes)  # type: ignore[arg-type]
        number = leader.state.next_operation - 1
        target = leader.state.operations[number].target_pool
        leader.emit(ev.BlocksReady, target, number, leader.events[-1].targets)  # type: ignore[attr-defined]

    story()
    monkeypatch.setattr(pipeline, "_promote", complete_at_promotion)
    with pytest.raises(AssertionError, match="is said to hold"):
        story()


def test_d3_a_skip_that_never_closes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped candidate ends at once, so its slot can leave finishing."""
    def tell() -> Script:
        script = Script(offload_threshold=0.0)
        script.stop_at(Site.EVALUATE_WILL, request="a")
        script.arrive("a", "ab")
        script.admit("a")
        script.step()
        assert script.abort("a") is False
        assert [event.reason for event in script.told(ev.CandidateSkipped)] == [SkipReason.SLOT_STOPPING]
        assert not script.state.slots
        return script

    tell()
    monkeypatch.setattr(requests, "skip", lambda leader, candidate, reason: None)
    with pytest.raises(AssertionError):
        tell()


def test_d4_every_terminal_status_is_an_event() -> None:
    script = story()
    ended = script.statuses.ended
    assert set(ended) == script.statuses.planned
    told = {event.candidate: event.status.label for event in script.ever(ev.CandidateEnded)}
    told.update((event.candidate, "skipped") for event in script.ever(ev.CandidateSkipped))
    assert told == ended
    assert sum(script.state.totals.candidates_ended) == len(ended)
    assert script.state.totals.candidates_ended[CandidateStatus.COMPLETED] > 0


def test_d5_a_hook_can_wait_before_the_change() -> None:
    script = stored()
    script.stop_at(Site.DISPATCH_WILL)
    script.arrive("b", "abcd")
    script.admit("b")
    (hold,) = script.state.holds.values()
    assert (hold.point, hold.parked) == (WaitPoint.DISPATCH, True)
    assert not script.mover.queued, "the copy was not asked for"
    script.go_on()
    assert script.mover.queued


def test_d6_every_event_has_seq_time_and_cause_and_every_move_its_iteration() -> None:
    script = story()
    assert [event.seq for event in script.events] == list(range(len(script.events)))
    assert [event.at_ns for event in script.events] == sorted(event.at_ns for event in script.events)
    assert {event.cause for event in script.events} <= {stimulus.n for stimulus in script.stimuli}
    moves = script.ever(ev.SlotMoved)
    assert [event.iteration for event in moves] == sorted(event.iteration for event in moves)
    assert max(event.iteration for event in moves) == script.state.iteration
    assert all(event.entry in {stimulus.__struct_config__.tag for stimulus in script.stimuli} for event in moves)


def test_d7_what_the_leader_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "HISTORY_PART", 2)
    monkeypatch.setattr(memory_module, "HISTORY_PARTS", 3)
    script = Script(g1=6, g2=2, offload_threshold=0.0)
    for number, word in enumerate(("abcd", "efgh", "ijkl", "mnop")):
        serve(script, f"r{number}", word, steps=1)
    memory = script.leader.memory
    parts = [memory.history, *memory.older]
    assert len(parts) == 3
    assert all(len(part) <= 4 for part in parts), "one call of four blocks closes a part"
    lost = [key for event in script.ever(ev.BlocksEvicted) for key in unpack_hashes(event.hashes)]
    resident = {key for pool in script.state.pools for key in pool.by_hash}
    gone = [key for key in lost if key not in resident]
    assert memory.why_gone(gone[0]) is MissReason.NEVER_STORED, "long ago, forgotten"
    assert memory.why_gone(gone[-1]) is MissReason.NOT_OFFLOADED, "G1 was the last to give it up"
    assert script.leader.recent.maxlen is not None
    script.tell(st.TransferFailed, 0, 0, 0, "x" * 10_000, b"")
    resident = {key for pool in script.state.pools for key in pool.by_hash}
    assert set(memory.parent_of) <= resident


def test_d8_check_and_change_are_one_step() -> None:
    """Nothing can come between the evaluation of a candidate and its promotion: one stimulus carries both."""
    script = story()
    evaluated = {event.candidate: event.cause for event in script.ever(ev.CandidateEvaluated)}
    for event in script.ever(ev.CandidatePromoted):
        assert evaluated[event.candidate] == event.cause


def test_d9_finished_while_a_copy_runs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> Script:
        script = Script(g1=6, offload_threshold=0.0)
        script.arrive("a", "abcd")
        script.admit("a")
        script.step()
        script.start(0)
        delayed = script.finish("a")
        script.arrive("b", "wxyz")
        if script.admit("b"):
            script.step()
        script.done(0)
        assert delayed
        return script

    script = tell()
    assert script.released[0][0] == "a"
    monkeypatch.setattr(requests, "FinishAnswer", lambda delay_free: FinishAnswer(False))
    with pytest.raises(AssertionError):
        tell()


def test_d9_a_fence_that_is_not_told_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    story()
    monkeypatch.setattr(requests, "_fence", lambda leader, slot: [])
    with pytest.raises(AssertionError):
        story()


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_d10_staged_pins_that_are_not_released_are_caught(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> Script:
        script = stored()
        script.arrive("b", "abcd")
        script.lookup("b")
        assert script.state.pools[0].counts[Condition.REFERENCED] == 4
        getattr(script, how)("b")
        assert script.state.pools[0].counts[Condition.REFERENCED] == 0
        return script

    why = {event.why for event in tell().ever(ev.StagingReleased)}
    assert why == {ReleaseReason.PREEMPTED if how == "preempt" else ReleaseReason.FINISHED}
    monkeypatch.setattr(Decider, "release_staging", lambda self, slot, why: None)
    with pytest.raises((AssertionError, FoldError)):
        tell()


def test_d11_a_preemption_is_an_event_at_its_time() -> None:
    script = Script()
    script.arrive("a", "ab")
    script.admit("a")
    script.step(2)
    at_ns = script.now
    script.preempt("a")
    (moved,) = script.told(ev.SlotMoved)
    assert (moved.new, moved.iteration) == (SlotState.PREEMPTED, 2)
    assert moved.at_ns > at_ns
    assert moved.entry == 7
    assert script.state.totals.preemptions == 1
    assert unpack_ids(script.told(ev.DeviceBlocksReleased)[0].ids) == [0, 1, 2]
    script.arrive("b", "x")
    script.admit("b")
    script.step()
    assert script.state_of("a") is SlotState.PREEMPTED, "long before it resumes"


def test_finishing_lasts_until_the_last_rank() -> None:
    script = Script(offload_threshold=0.0, ranks=2)
    script.arrive("a", "ab")
    script.admit("a")
    script.step()
    script.start(0)
    assert script.finish("a")
    script.done(0, 0)
    assert script.state_of("a") is SlotState.FINISHING
    assert not script.released
    script.done(0, 1)
    assert not script.state.slots
    assert script.released == [("a", [0, 1, 2])]


def test_settling_ends_although_everything_depends_on_everything() -> None:
    script = Script(g1=12, g2=3, g3=4, offload_threshold=0.0, offload_batch_blocks=1)
    for number in range(6):
        serve(script, f"r{number}", "abcdefgh"[number:][:4] or "z")
    assert not script.mover.orders
