"""Reset and drain, reports of another epoch, late and never (F24), and clones.

Law of this file: a reset is never refused, whatever runs; a place under a running copy is used by nobody before every
rank has reported it.
"""

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_ids, unpack_ids
from kvbm_console.core.describe import describe
from kvbm_console.core.ids import Condition, FinishReason, ResetMode, Site, SlotState
from kvbm_console.core.instructions import (
    CancelTransfer,
    ClearDevicePool,
    DrainAnswer,
    ResetAnswer,
    WakeRequest,
    ZeroBlocks,
)
from kvbm_console.core.snapshots import decode_facts, encode_facts

from .engine_model import BLOCK
from .oracle import tiers_of
from .scenes import serve, stored
from .script import Script


def facts(script: Script) -> bytes:
    """The facts without what only grows: order, time, numbers and totals."""
    state = decode_facts(encode_facts(script.state))
    for name in ("seq", "n", "at_ns", "iteration", "epoch", "next_slot", "next_candidate", "next_operation"):
        setattr(state, name, 0)
    state.totals = type(state.totals)()
    return encode_facts(state)


def busy(**config: object) -> Script:
    """A load that runs, one that waits, a store that runs, staging, a running and a finishing request."""
    script = stored("abcd", **{"g1": 24, **config})
    script.arrive("runs", "xy")
    script.admit("runs")
    script.step()
    script.start(max(script.mover.queued))
    script.arrive("loads", "abcd")
    script.admit("loads")
    script.start(max(script.mover.queued))
    script.arrive("waits", "abcd")
    script.admit("waits")
    script.arrive("staged", "abcd")
    script.lookup("staged")
    script.finish("runs", FinishReason.STOP)
    assert script.state_of("runs") is SlotState.FINISHING
    return script


@pytest.mark.parametrize("mode", ResetMode)
def test_a_reset_returns_to_the_initial_state_except_for_what_copies_touch(mode: ResetMode) -> None:
    script = busy()
    script.reset(mode)
    state = script.state
    for what in (state.slots, state.candidates, state.operations, state.batches, state.holds):
        assert not what
    assert state.epoch == 1
    assert script.told(ev.ResetDone)[0].epoch == 1
    assert len(state.late) == 2
    for pool in state.pools:
        assert pool.counts[Condition.CACHED] == pool.counts[Condition.REFERENCED] == 0
        assert pool.counts[Condition.QUARANTINED] == len(pool.quarantined) > 0
    assert not any(isinstance(one, WakeRequest) for one in script.asked), "the engine forgets its requests"
    assert sum(isinstance(one, CancelTransfer) for one in script.asked) == 1
    script.move_all()
    assert not state.late
    assert not any(pool.quarantined for pool in state.pools)
    fresh = Script(g1=24, g2=16, offload_threshold=0.0)
    assert facts(script) == facts(fresh)


def test_both_modes_lead_to_the_same_facts_and_only_one_zeroes() -> None:
    scripts = {}
    for mode in ResetMode:
        script = scripts[mode] = busy()
        script.reset(mode)
        assert [one.pool for one in script.asked if isinstance(one, ZeroBlocks)] == (
            [0, 1] if mode is ResetMode.PHYSICAL else []
        )
        script.move_all()
        serve(script, "again", "abcd")
    assert facts(scripts[ResetMode.LOGICAL]) == facts(scripts[ResetMode.PHYSICAL])


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_allocate_decode_reset_decode_is_the_same_in_both_modes(hosts: int) -> None:
    seen = []
    for mode in ResetMode:
        script = Script(g1=16, g2=16, offload_threshold=0.0, hosts=hosts)
        digests = []
        for name in ("before", "after"):
            script.arrive(name, "abcd")
            assert script.admit(name)
            script.step(6)
            script.move_all()
            digests.append((script.leader.digest(), script.leader.memory_digest()))
            script.reset(mode)
            digests.append((script.leader.digest(), script.leader.memory_digest()))
        seen.append((digests, [type(event) for event in script.events], script.zeroed))
    (logical, told, zeroed), (physical, told_too, zeroed_too) = seen
    assert [one[1] for one in logical] == [one[1] for one in physical]
    assert told == told_too
    assert (zeroed, zeroed_too) == ([], [0, 1, 0, 1])
    assert logical == physical, "the same commands, the same digests"


def test_after_a_reset_all_goes_on_as_from_the_beginning() -> None:
    script, fresh = busy(), Script(g1=24, g2=16, offload_threshold=0.0)
    script.reset()
    script.move_all()
    for one in (script, fresh):
        serve(one, "again", "abxy")
        serve(one, "and again", "abmn")
    assert tiers_of(script.state) == tiers_of(fresh.state)
    assert script.state.pools[0].hash_of == fresh.state.pools[0].hash_of, "place by place"


def test_a_finishing_request_keeps_its_reason_and_the_others_are_aborted() -> None:
    script = busy()
    script.reset()
    reasons = {event.slot: event.reason for event in script.told(ev.SlotMoved) if event.new is SlotState.FINISHED}
    assert sorted(reasons.values()) == sorted([FinishReason.STOP] + [FinishReason.ABORTED] * 3)
    assert script.state.totals.finished[FinishReason.STOP] == 3, "two of them before"


def drain(script: Script, deadline_ns: int = 10**9) -> DrainAnswer:
    result = script.tell(st.DrainRequested, deadline_ns, "ann@host", source=0)
    assert isinstance(result, DrainAnswer)
    return result


def test_a_drain_ends_with_the_last_copy_and_not_before() -> None:
    script = stored("abcd", g1=24)
    script.arrive("runs", "xy")
    script.admit("runs")
    script.step()
    assert script.state.operations
    answer = drain(script)
    assert (answer.seq, answer.live_requests) == (script.told(ev.DrainBegun)[0].seq, 1)
    script.arrive("late", "ab")
    assert "drains" in script.told(ev.StimulusRejected)[0].why
    script.finish("runs", FinishReason.STOP)
    assert script.state.draining
    assert not script.told(ev.ResetBegun), "a copy is in flight"
    script.move_all()
    assert not script.state.draining
    assert script.state.epoch == 1
    assert not script.state.late, "nothing was cut off"
    assert not any(pool.quarantined for pool in script.state.pools)
    serve(script, "after", "ab")


def test_a_drain_whose_time_is_over_quarantines_what_still_runs() -> None:
    script = busy()
    drain(script, 5)
    script.pass_deadline(max(script.deadlines))
    assert not script.state.draining
    assert script.state.epoch == 1
    assert not script.state.slots
    assert sum(len(pool.quarantined) for pool in script.state.pools) > 0
    reasons = [event.reason for event in script.told(ev.SlotMoved) if event.new is SlotState.FINISHED]
    assert reasons.count(FinishReason.ABORTED) == 3


def test_who_asked_is_on_the_record_and_the_answer_counts() -> None:
    script = busy()
    result = script.tell(st.ResetRequested, ResetMode.PHYSICAL, "ann@host", source=0)
    quarantined = sum(len(pool.quarantined) for pool in script.state.pools)
    assert result == ResetAnswer(1, 3, quarantined)
    assert quarantined > 0
    assert describe(script.told(ev.ResetBegun)[0]) == "physical by ann@host"
    drain(script, 2_000_000_000)
    assert describe(script.told(ev.DrainBegun)[0]) == "for 2 s by ann@host"
    assert describe(script.told(ev.ResetBegun)[0]) == "logical"


def test_the_engine_is_told_which_places_to_keep() -> None:
    script = busy()
    script.reset()
    (clear,) = [one for one in script.asked if isinstance(one, ClearDevicePool)]
    assert unpack_ids(clear.keep) == sorted(script.state.pools[script.device].quarantined)
    assert script.engine.withheld[""] == unpack_ids(clear.keep)


def test_a_report_after_a_reset_is_refused_by_epoch_counted_and_frees_the_places_f24() -> None:
    script = stored("abcd", g1=12, ranks=2)
    script.arrive("b", "abcd")
    script.admit("b")
    operation = script.operation_of("b")
    script.start(operation)
    script.done(operation, 0)
    script.reset()
    refused = script.state.totals.completions_refused
    assert len(script.state.pools[0].quarantined) == 4
    script.done(operation, 1)
    assert script.told(ev.CompletionRefused)[0].why == "older epoch"
    assert script.state.totals.completions_refused == refused + 1
    assert not script.state.pools[0].quarantined, "the other rank had reported before the reset"


def test_a_place_that_two_copies_read_is_kept_until_both_have_ended() -> None:
    script = stored("abcd", g1=12)
    for name in ("b", "c"):
        script.arrive(name, "abcd")
        script.admit(name)
    first, second = sorted(script.mover.queued)
    script.start(first)
    script.start(second)
    script.reset()
    kept = len(script.state.pools[0].quarantined)
    assert kept == 4
    script.done(second)
    assert len(script.state.pools[0].quarantined) == kept, "the first one still reads them"
    assert len(script.state.pools[script.device].quarantined) == 4
    script.done(first)
    assert not script.state.pools[0].quarantined
    assert not script.state.late


def test_a_report_that_comes_twice_is_refused_and_changes_nothing_f24() -> None:
    script = stored("abcd", ranks=2)
    script.arrive("b", "abcd")
    script.admit("b")
    operation = script.operation_of("b")
    script.start(operation)
    script.done(operation, 0)
    script.tell(st.TransferFinished, operation, 0, 0)
    assert script.told(ev.CompletionRefused)[0].why == "reported twice"
    assert operation in script.state.operations
    script.tell(st.TransferStarted, operation, 0)
    assert script.told(ev.CompletionRefused)[0].why == "started twice"
    script.done(operation, 1)
    script.tell(st.TransferFinished, operation, 0, 1)
    assert script.told(ev.CompletionRefused)[0].why == "not open"
    assert script.state.totals.completions_refused == 3


@pytest.mark.parametrize("kind", [st.TransferStarted, st.TransferFinished, st.TransferFailed])
def test_a_report_about_nothing_is_refused_f24(kind: type[st.Stimulus]) -> None:
    script = stored()
    fields = {st.TransferStarted: (), st.TransferFinished: (0,), st.TransferFailed: (0, "x", b"")}[kind]
    script.tell(kind, 99, 0, *fields)
    assert script.told(ev.CompletionRefused)[0].why == "not open"


@pytest.mark.parametrize(("rank", "failed", "why"), [
    (5, b"", "rank must be"), (-1, b"", "rank must be"), (0, pack_ids([4]), "failed blocks"),
    (0, pack_ids([-1]), "failed blocks"), (0, b"123", ""),
])
def test_an_impossible_report_is_rejected(rank: int, failed: bytes, why: str) -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.admit("b")
    operation = script.operation_of("b")
    script.tell(st.TransferFailed, operation, 0, rank, "x" * 10_000, failed)
    assert script.rejected
    assert why in script.why


def test_a_copy_that_never_ends_stays_visible_and_stops_nobody_else_f24() -> None:
    script = stored("abcd", g1=12)
    script.arrive("b", "abcd")
    script.admit("b")
    stuck = script.operation_of("b")
    script.start(stuck)
    script.arrive("c", "xy")
    script.admit("c")
    script.step(3)
    script.finish("c")
    for operation in list(script.mover.queued):
        script.start(operation)
        script.done(operation)
    (operation,) = script.state.operations.values()
    assert (operation.operation, operation.started) == (stuck, True)
    assert script.state.candidates[operation.candidate].started_ns is not None
    script.done(stuck)


def test_a_reset_while_everything_is_held_stops_at_nothing() -> None:
    script = busy()
    script.tell(st.Disarmed, "me", source=0)
    script.stop_at(Site.SKIP_DID)
    script.arrive("more", "qr")
    script.reset()
    assert not script.state.holds
    assert not script.told(ev.SlotHeld)
    assert script.leader.gate is not None, "breakpoints stay"


def test_a_drain_takes_nothing_new_and_ends_in_a_reset() -> None:
    script = stored("abcd")
    script.arrive("b", "abcd")
    script.admit("b")
    script.tell(st.DrainRequested, 10**9, source=0)
    assert script.state.draining
    script.tell(st.RequestArrived, "c", b"", 3, 1, 0, None)
    assert "drains" in script.why
    script.tell(st.DrainRequested, 10**9, source=0)
    assert "drains already" in script.why
    script.move_all()
    script.step(2)
    script.finish("b")
    script.move_all()
    assert script.state.epoch == 1
    assert not script.state.draining
    assert not script.deadlines
    script.arrive("c", "ab")


def test_a_drain_with_nothing_to_wait_for_is_a_reset() -> None:
    script = stored("abcd")
    script.tell(st.DrainRequested, 10**9, source=0)
    assert script.state.epoch == 1


def test_a_drain_aborts_the_rest_at_its_deadline() -> None:
    script = stored("abcd")
    script.arrive("b", "abcd")
    script.admit("b")
    script.tell(st.DrainRequested, 10**9, source=0)
    script.pass_deadline(max(script.deadlines))
    assert script.state.epoch == 1
    assert not script.state.slots
    assert script.state.totals.finished[FinishReason.ABORTED] == 1


@pytest.mark.parametrize("deadline_ns", [0, -1])
def test_a_drain_needs_a_deadline(deadline_ns: int) -> None:
    script = stored()
    script.tell(st.DrainRequested, deadline_ns, source=0)
    assert "above 0" in script.why


def test_a_drain_that_ends_while_everything_is_frozen_lets_the_engines_go_on() -> None:
    script = stored()
    script.tell(st.FreezeRequested, "me", 10**9, source=0)
    assert script.paused
    script.tell(st.DrainRequested, 10**9, source=0)
    assert script.state.epoch == 1
    assert not script.paused


# --- clones ---


def decoding(tail: int) -> Script:
    """A request whose last block holds ``tail`` computed tokens (0: it ends at a boundary)."""
    script = Script(g1=16, g2=16, offload_threshold=1.0)
    script.arrive("a", "ab", tail=1)
    script.admit("a")
    script.step(1 + (tail - 1) % BLOCK)
    assert script.slot("a").computed_tokens(script.state.iteration) % BLOCK == tail % BLOCK
    return script


@pytest.mark.parametrize("tail", range(BLOCK), ids=["at a boundary", "one after it", "between", "one before it"])
def test_clones_share_full_blocks_and_own_their_partial_one(tail: int) -> None:
    script = decoding(tail)
    parent = list(script.slot("a").device_blocks)
    full = script.slot("a").filled_blocks
    slots = script.clone("a", "a1", "a2")
    assert len(slots) == 2
    pool = script.state.pools[script.device]
    lists = [script.slot(name).device_blocks for name in ("a", "a1", "a2")]
    assert [ids[:full] for ids in lists] == [parent[:full]] * 3
    assert all(pool.refs[place] == 3 for place in parent[:full])
    own = [tuple(ids[full:]) for ids in lists]
    assert len(set(own)) == (3 if tail else 1)
    assert {script.state_of(name) for name in ("a", "a1", "a2")} == {script.state_of("a")}
    script.step(5)
    script.finish("a")
    script.step(2)
    assert all(pool.refs[place] == 2 for place in parent[:full])
    for name in ("a1", "a2"):
        script.finish(name)
    assert not any(pool.refs)


def test_a_clone_onto_a_used_request_is_refused_whole() -> None:
    script = decoding(0)
    script.arrive("b", "xy")
    before = facts(script)
    for clones in (("b",), ("c", "b"), ("c", "c"), ("",), ("x" * 300,)):
        script.tell(st.RequestCloned, "a", clones, b"")
        assert script.rejected, clones
        assert facts(script) == before
    script.tell(st.RequestCloned, "b", ("c",), b"")
    assert "cannot be cloned" in script.why
    assert facts(script) == before


@pytest.mark.parametrize("partial", [[], [0], [15, 15], [99], [14, 15]])
def test_wrong_partial_blocks_are_refused_and_change_nothing(partial: list[int]) -> None:
    script = decoding(2)
    before = facts(script)
    script.tell(st.RequestCloned, "a", ("c",), pack_ids(partial))
    assert script.rejected
    assert facts(script) == before


def test_out_of_blocks_nothing_is_told_and_nothing_changes() -> None:
    script = decoding(2)
    rest = script.engine.pool.free_blocks
    script.arrive("full", "", tail=rest * BLOCK - 1)
    script.admit("full")
    before = facts(script)
    assert script.clone("a", "c") == ()
    assert facts(script) == before


def test_a_block_that_a_clone_fills_is_its_own() -> None:
    script = decoding(3)
    script.clone("a", "c")
    script.step(2)
    assert script.slot("a").hashes[-1] != script.slot("c").hashes[-1]
    assert script.slot("a").hashes[:2] == script.slot("c").hashes[:2]
