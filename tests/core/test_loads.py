"""Loads: from the allocation to the wake, well or not, with several tiers and ranks, and across every interruption.

Law of this file: what does not arrive is taken back (hits, position, places); what runs keeps its own references.
"""

from typing import Any

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.ids import CandidateStatus, ReleaseReason, Route, Site, SkipReason, SlotState
from kvbm_console.core.instructions import CancelTransfer, ReleaseDeviceBlocks, StartTransfer, WakeRequest

from .engine_model import BLOCK
from .scenes import stored, two_tiers
from .script import Script


def loading(script: Script, name: str = "b", word: str = "abcd") -> int:
    """A request whose load waits for the mover; its operation."""
    script.arrive(name, word)
    assert script.admit(name)
    assert script.state_of(name) is SlotState.ONBOARDING
    return script.operation_of(name)


def asked(script: Script, kind: type) -> list[Any]:
    return [one for one in script.asked if type(one) is kind]


def test_the_life_of_a_load_event_by_event() -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.lookup("b")
    script.allocate("b")
    assert [type(event) for event in script.last] == [
        ev.DeviceBlocksAssigned, ev.PrefixScored, ev.CandidatePlanned, ev.SlotMoved, ev.CandidateEnqueued,
        ev.CandidateEvaluated, ev.BlocksReserved, ev.CandidatePromoted,
    ]
    (order,) = asked(script, StartTransfer)
    assert (order.route, order.blocks, order.ranks) == (Route.G2_G1, 4, 1)
    operation = script.operation_of("b")
    script.start(operation)
    assert [type(event) for event in script.last] == [ev.OperationStarted]
    script.done(operation)
    assert [type(event) for event in script.last] == [
        ev.OperationReported, ev.BlocksReady, ev.CandidateEnded, ev.BatchEnded, ev.StagingReleased,
    ]
    assert script.woken == ["b"]
    assert script.state_of("b") is SlotState.ONBOARDING, "until it is scheduled"
    script.step()
    assert script.state_of("b") is SlotState.PREFILLING
    assert script.slot("b").cached == (0, 4 * BLOCK, 0, 0)


def test_completed_means_that_the_copy_has_ended_d2() -> None:
    script = stored()
    operation = loading(script)
    assert script.ever(ev.BlocksReady)[-1].operation != operation
    script.start(operation)
    assert operation in script.state.operations
    assert not script.told(ev.CandidateEnded)
    script.done(operation)
    assert script.told(ev.CandidateEnded)[0].status is CandidateStatus.COMPLETED


def test_an_operation_ends_when_every_rank_has_reported() -> None:
    script = stored(ranks=2)
    operation = loading(script)
    script.start(operation)
    script.done(operation, 1)
    assert script.state.operations[operation].reported == {1}
    assert not script.woken
    script.done(operation, 0)
    assert operation not in script.state.operations
    assert script.woken == ["b"]


def test_the_error_of_one_rank_fails_the_operation_and_counts_as_its_report() -> None:
    script = stored(ranks=2)
    operation = loading(script)
    script.start(operation)
    script.fail(operation, [2], 0)
    assert not script.woken, "the other rank still copies"
    script.done(operation, 1)
    assert script.told(ev.CandidateEnded)[0].status is CandidateStatus.FAILED
    assert script.slot("b").computed_tokens(script.state.iteration) == 2 * BLOCK


def test_a_load_from_two_tiers_is_two_candidates_of_one_batch() -> None:
    script = two_tiers()
    script.arrive("b", "abcdef")
    script.admit("b")
    first, second = asked(script, StartTransfer)
    assert [first.route, second.route] == [Route.G2_G1, Route.G3_G1]
    assert first.batch == second.batch
    script.start(second.operation)
    script.done(second.operation)
    assert not script.told(ev.BatchEnded), "a batch is in flight until all its members have ended"
    assert not script.woken
    script.start(first.operation)
    script.done(first.operation)
    assert script.told(ev.BatchEnded)
    assert script.woken == ["b"]
    script.step()
    assert script.slot("b").hits == (0, 4, 2, 0)


@pytest.mark.parametrize("failed", range(4))
def test_a_failed_block_takes_back_the_hits_and_the_position_behind_it(failed: int) -> None:
    script = stored()
    operation = loading(script)
    script.start(operation)
    script.fail(operation, [failed])
    (lost,) = script.told(ev.HitsLost)
    assert (lost.blocks, lost.position) == (4 - failed, failed * BLOCK)
    slot = script.slot("b")
    assert slot.hits == (0, failed, 0, 0)
    assert script.state.totals.hit_blocks == [0, failed, 0, 0]
    assert script.state.totals.lost_blocks == 4 - failed
    assert script.engine.requests["b"].computed == failed * BLOCK
    assert not slot.staged
    script.step()
    assert script.state_of("b") is SlotState.PREFILLING
    script.move_all()
    assert script.slot("b").filled_blocks == 4


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_a_failure_in_one_tier_drops_what_the_other_brought_behind_it(first_to_end: int) -> None:
    script = two_tiers()
    script.arrive("b", "abcdef")
    script.admit("b")
    operations = sorted(script.mover.queued)
    for operation in operations:
        script.start(operation)
    order = operations if first_to_end == 0 else operations[::-1]
    for operation in order:
        if operation == operations[0]:
            script.fail(operation, [1])
        else:
            script.done(operation)
    assert [(event.tier.name, event.blocks) for event in script.ever(ev.HitsLost)] == [("G2", 3), ("G3", 2)]
    assert script.slot("b").hits == (0, 1, 0, 0)
    assert script.engine.requests["b"].computed == BLOCK
    script.step()
    script.move_all()


def test_the_second_failure_takes_back_only_what_was_left() -> None:
    script = two_tiers()
    script.arrive("b", "abcdef")
    script.admit("b")
    first, second = sorted(script.mover.queued)
    script.start(first)
    script.start(second)
    script.fail(second, [1])
    script.fail(first, [2])
    assert script.slot("b").hits == (0, 2, 0, 0)
    assert script.state.totals.lost_blocks == 4
    assert script.state.totals.hit_blocks[1:3] == [2, 0]


def test_an_onboard_candidate_that_is_skipped_goes_on_without() -> None:
    script = stored()
    script.stop_at(Site.EVALUATE_WILL)
    script.arrive("b", "abcd")
    script.admit("b")
    (hold,) = script.state.holds
    script.tell(st.CandidateSkipRequested, hold, "me", source=0)
    assert script.told(ev.CandidateSkipped)[0].reason is SkipReason.OPERATOR
    assert script.told(ev.HitsLost)[0].blocks == 4
    assert script.woken == ["b"]
    assert script.engine.requests["b"].computed == 0
    script.step()
    assert script.state_of("b") is SlotState.PREFILLING


@pytest.mark.parametrize("how", ["preempt", "abort", "finish"])
def test_what_was_not_started_is_cancelled_and_wakes_nobody(how: str) -> None:
    script = stored()
    operation = loading(script)
    getattr(script, how)("b")
    assert [one.operation for one in asked(script, CancelTransfer)] == [operation]
    assert not asked(script, WakeRequest)
    assert not script.told(ev.HitsLost)
    assert [event.status for event in script.told(ev.CandidateEnded)] == [CandidateStatus.CANCELLED]
    assert script.told(ev.StagingReleased)[0].why is not ReleaseReason.LOADED
    assert not script.mover.orders


def test_what_was_started_runs_out_and_keeps_its_places_d9() -> None:
    script = stored()
    operation = loading(script)
    script.start(operation)
    places = list(script.slot("b").device_blocks)
    fenced = script.preempt("b")
    assert fenced == places[:4]
    assert script.state_of("b") is SlotState.PREEMPTED
    assert len(script.slot("b").outstanding) == 1
    assert all(script.state.pools[script.device].refs[place] == 1 for place in fenced)
    script.done(operation)
    assert len(asked(script, ReleaseDeviceBlocks)) == 1
    assert script.released == [("b", fenced)]
    assert not script.woken, "nobody waits for this load any more"


def test_a_finish_during_a_load_waits_for_it() -> None:
    script = stored()
    operation = loading(script)
    script.start(operation)
    assert script.finish("b") is True
    assert script.state_of("b") is SlotState.FINISHING
    script.done(operation)
    assert "b" not in script.state.slot_of
    assert script.released[-1][0] == "b"


def test_a_load_that_ended_for_a_preempted_request_is_found_in_g1_by_content() -> None:
    script = stored()
    operation = loading(script)
    script.start(operation)
    script.preempt("b")
    script.done(operation)
    pool = script.state.pools[script.device]
    assert sum(1 for key in script.engine.requests["b"].hashes if pool.ready_place(key) is not None) == 4


def test_two_requests_load_the_same_source() -> None:
    script = stored(g1=16)
    first = loading(script, "b")
    second = loading(script, "c")
    source = script.state.pools[0]
    assert max(source.refs) == 4, "two in staging, two in operations"
    script.start(first)
    script.start(second)
    script.fail(first)
    script.done(second)
    assert not any(source.refs)
    script.step()


def test_synchronous_loads_take_the_same_path() -> None:
    script = stored(asynchronous=False)
    script.arrive("b", "abcd")
    assert script.lookup("b") == 4 * BLOCK
    assert script.told(ev.LookupAnswered)[0].asynchronous is False
    script.allocate("b")
    script.move_all()
    assert script.woken == ["b"]


def test_thrash_is_counted_within_the_window_only() -> None:
    for window, thrash in ((10**9, 4), (0, 0)):
        script = stored(thrash_window_ns=window)
        loading(script)
        assert script.state.totals.thrash_blocks == thrash
