"""Lookups and staging: what is found below G1, what is told, what is held, and when it is given back.

Law of this file: a lookup and the allocation after it are two commits; what the first one holds always comes back.
"""

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.ids import Authority, Clock, MissReason, ReleaseReason, Site, SlotState, Tier
from kvbm_console.core.snapshots import decode_facts, encode_facts

from .engine_model import BLOCK, hash_of, hashes_of
from .scenes import forget_g1, serve, stored, two_tiers
from .script import Script


def answered(script: Script) -> ev.LookupAnswered:
    return script.told(ev.LookupAnswered)[0]


def test_a_match_is_staged_and_told_once() -> None:
    script = stored()
    script.arrive("b", "abcd")
    assert script.lookup("b") == 4 * BLOCK
    assert script.state_of("b") is SlotState.ONBOARD_STAGED
    assert answered(script).matched == (4, 0, 0)
    assert sum(len(ids) for _, ids in script.slot("b").staged) == 4
    assert script.lookup("b") == 4 * BLOCK
    assert not script.told(ev.LookupAnswered), "a repeated call reports only changes"
    assert not script.told(ev.BlocksStaged)


def test_a_full_match_gives_back_its_last_block() -> None:
    script = stored()
    script.arrive("b", "abcd", tail=0)
    assert script.lookup("b") == 3 * BLOCK
    assert (answered(script).first_miss, answered(script).why) == (3, MissReason.BOUNDARY)


@pytest.mark.parametrize(("word", "tail", "miss", "why"), [
    ("abxd", 2, 2, MissReason.NEVER_STORED), ("abcd", 2, None, MissReason.NONE), ("", 2, None, MissReason.TOO_SHORT),
])
def test_the_first_miss_has_a_reason(word: str, tail: int, miss: int | None, why: MissReason) -> None:
    script = stored()
    script.arrive("b", word, tail=tail)
    script.lookup("b")
    assert (answered(script).first_miss, answered(script).why) == (miss, why)


def test_of_a_window_alone_is_copied_down_and_found() -> None:
    """A token sees two blocks, so only the last two of a prompt are copied, and are enough for the whole prefix."""
    script = stored(lookup_window=2 * BLOCK, offload_window_only=True)
    host, device = script.state.pools
    assert set(host.by_hash) == set(hashes_of("abcd")[2:])
    script.arrive("b", "abcd")
    assert script.lookup("b") == 4 * BLOCK
    assert answered(script).matched == (4, 0, 0)
    assert sum(len(ids) for _, ids in script.slot("b").staged) == 2
    script.admit("b")
    (load,) = [one for one in script.state.operations.values() if one.target_pool == device.info.pool]
    assert len(load.targets) == 2
    script.move_all()
    assert script.slot("b").hits == (0, 4, 0, 0)


def test_a_shorter_prefix_is_found_where_its_window_is_whole() -> None:
    script = stored(lookup_window=2 * BLOCK)
    script.arrive("b", "abcx")
    assert script.lookup("b") == 3 * BLOCK, "b and c are the window behind which x is computed"
    assert (answered(script).first_miss, answered(script).why) == (3, MissReason.NEVER_STORED)
    assert sum(len(ids) for _, ids in script.slot("b").staged) == 2


def test_less_than_a_window_is_found_only_from_the_beginning() -> None:
    script = stored(lookup_window=3 * BLOCK)
    script.arrive("b", "abxx")
    assert script.lookup("b") == 2 * BLOCK
    script.arrive("c", "xbcd")
    assert script.lookup("c") == 0


def test_a_block_that_left_g1_before_it_was_copied_was_not_offloaded() -> None:
    script = stored(offload_threshold=1.0)
    script.arrive("b", "abcd")
    assert script.lookup("b") == 0
    assert answered(script).why is MissReason.NOT_OFFLOADED


def test_a_block_that_was_evicted_below_is_missed_as_evicted() -> None:
    script = stored(g2=4)
    serve(script, "second", "mnop")
    forget_g1(script)
    script.arrive("b", "abcd")
    assert script.lookup("b") == 0
    assert answered(script).why is MissReason.EVICTED


def test_a_pending_write_answers_ask_again_until_it_is_ready() -> None:
    script = Script(g1=8, g2=16, offload_threshold=0.0)
    script.arrive("a", "abcd")
    script.admit("a")
    script.step()
    script.arrive("b", "abcd", tail=3)
    request = script.engine.requests["b"]
    assert script.tell(st.MatchRequested, "b", 0).tokens is None
    assert answered(script).why is MissReason.WRITING
    script.move_all()
    assert script.tell(st.MatchRequested, "b", 0).tokens == 4 * BLOCK
    script.abort(request.name)


def test_a_write_for_a_held_slot_makes_nobody_else_wait() -> None:
    script = Script(g1=8, g2=16, offload_threshold=0.0)
    script.arrive("a", "abcd")
    script.admit("a")
    script.step()
    for operation in list(script.mover.queued):
        script.start(operation)
    script.stop_at(Site.COMPLETE_WILL)
    for operation in list(script.mover.running):
        script.done(operation)
    assert script.slot("a").hold is not None
    script.arrive("b", "abcd")
    assert script.tell(st.MatchRequested, "b", 0).tokens == 0, "a held slot never stops another"


def test_a_slot_whose_own_copies_run_asks_again() -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.admit("b")
    script.start(script.operation_of("b"))
    script.preempt("b")
    assert script.lookup("b") is None
    script.move_all()
    assert script.lookup("b") is not None, "the re-match after a preemption really happens (D11)"


def test_staging_ends_by_allocation() -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.admit("b")
    assert script.slot("b").staged, "the load reads what is staged"
    script.move_all()
    assert not script.slot("b").staged
    assert [event.why for event in script.ever(ev.StagingReleased)] == [ReleaseReason.LOADED]


def test_staging_ends_by_an_admission_without_external_tokens() -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.lookup("b")
    script.allocate("b", external=0)
    assert [event.why for event in script.told(ev.StagingReleased)] == [ReleaseReason.UNUSED]
    script.step()
    assert script.state_of("b") is SlotState.PREFILLING


@pytest.mark.parametrize("how", ["preempt", "abort", "finish"])
def test_staging_ends_with_its_request_d10(how: str) -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.lookup("b")
    getattr(script, how)("b")
    assert [event.why for event in script.told(ev.StagingReleased)] == [
        ReleaseReason.PREEMPTED if how == "preempt" else ReleaseReason.FINISHED
    ]
    assert not any(script.state.pools[0].refs)


def test_staging_ends_by_its_deadline_and_the_next_lookup_looks_again() -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.lookup("b")
    ((deadline, (clock, due)),) = script.deadlines.items()
    assert clock is Clock.ENGINE
    assert due == script.now + 5 * SECOND_NS
    script.pass_deadline(deadline)
    assert script.state_of("b") is SlotState.INITIALIZED
    assert not script.slot("b").staged
    assert script.lookup("b") == 4 * BLOCK


def test_the_deadline_is_cleared_by_the_allocation() -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.admit("b")
    assert not script.deadlines


def test_the_deadline_does_not_run_while_the_slot_is_held_wherever_it_is_held() -> None:
    script = stored(g1=12)
    script.stop_at(Site.SKIP_DID)
    script.arrive("b", "abcdwxyz", tail=1)
    script.admit("b")
    script.move_all()
    script.breaks(BreakpointSpec(site=Site.EVALUATE_WILL), BreakpointSpec(site=Site.SKIP_DID))
    script.step()
    script.preempt("b")
    (hold,) = script.state.holds.values()
    assert hold.site is Site.SKIP_DID, "its candidate was skipped by the preemption"
    script.move_all()
    forget_g1(script, "another")
    assert script.lookup("b")
    assert script.slot("b").staged
    assert not [one for one, (clock, _) in script.deadlines.items() if clock is Clock.ENGINE]
    script.go_on()
    assert len([one for one, (clock, _) in script.deadlines.items() if clock is Clock.ENGINE]) == 1


def test_staging_holds_at_most_its_share_and_says_what_it_left_out() -> None:
    script = stored(g2=6, staging_share=0.5)
    script.arrive("b", "abcd")
    assert script.lookup("b") == 3 * BLOCK
    assert (answered(script).first_miss, answered(script).why) == (3, MissReason.FILTERED)
    script.arrive("c", "abcd")
    assert script.lookup("c") == 0, "the share is the pool's, not a request's"
    assert answered(script).why is MissReason.FILTERED


def test_a_chain_goes_on_in_g3_where_g2_ends() -> None:
    script = two_tiers()
    script.arrive("b", "abcdef")
    assert script.lookup("b") == 6 * BLOCK
    assert answered(script).matched == (4, 2, 0)
    assert [len(ids) for _, ids in script.slot("b").staged] == [4, 2]


def test_another_prefix_gives_staging_back_and_the_slot_waits_again() -> None:
    script = stored()
    script.arrive("b", "abcd")
    script.lookup("b")
    script.tell(st.MatchRequested, "b", 4 * BLOCK)
    assert [event.why for event in script.told(ev.StagingReleased)] == [ReleaseReason.UNUSED]
    assert script.state_of("b") is SlotState.INITIALIZED, "nothing is staged"


def test_hits_are_scored_once_when_the_admission_commits() -> None:
    script = stored()
    script.arrive("b", "abcdx")
    script.lookup("b")
    script.lookup("b")
    totals = script.state.totals
    assert totals.prompt_blocks == 4
    script.allocate("b")
    assert (totals.prompt_blocks, totals.hit_blocks) == (9, [0, 4, 0, 0])
    script.move_all()
    script.step()
    assert (totals.prompt_blocks, totals.hit_blocks) == (9, [0, 4, 0, 0])


@pytest.mark.parametrize(("kind", "fields", "why"), [
    (st.RequestArrived, ("a", pack_hashes(hashes_of("ab")), 9, 9, 0, None), "exists already"),
    (st.RequestArrived, ("", b"", 9, 9, 0, None), "1 to 256 bytes"),
    (st.RequestArrived, ("é" * 129, b"", 9, 9, 0, None), "1 to 256 bytes"),
    (st.RequestArrived, ("z", b"", 0, 9, 0, None), "at least 1"),
    (st.RequestArrived, ("z", pack_hashes(hashes_of("abc")), 9, 9, 0, None), "do not fit"),
    (st.RequestArrived, ("z", pack_hashes([0]), 9, 9, 0, None), "do not fit"),
    (st.RequestArrived, ("z", pack_hashes([5, 6, 5]), 99, 9, 0, None), "'z' must differ, got 0000000000000005 twice"),
    (st.RequestArrived, ("z", b"123", 9, 9, 0, None), ""),
    (st.MatchRequested, ("nobody", 0), "not known"),
    (st.MatchRequested, ("a", 3), "whole blocks"),
    (st.MatchRequested, ("a", -BLOCK), "whole blocks"),
    (st.MatchRequested, ("a", 99 * BLOCK), "whole blocks"),
    (st.BlocksAllocated, ("a", pack_ids([0, 0]), 0), "twice"),
    (st.BlocksAllocated, ("a", pack_ids([99]), 0), "from 0 to"),
    (st.BlocksAllocated, ("a", pack_ids([-1]), 0), "from 0 to"),
    (st.BlocksAllocated, ("a", pack_ids([0]), BLOCK), "was not found"),
    (st.BlocksAllocated, ("a", pack_ids([0]), -BLOCK), "was not found"),
    (st.BlocksAllocated, ("a", b"12345", 0), ""),
    (st.RequestPreempted, ("nobody",), "not known"),
    (st.PoolDeclared, (0, 0, Tier.G1, "GPU", 8, BLOCK, Authority.ENGINE), "declared"),
    (st.PoolDeclared, (1, 0, Tier.G1, "GPU", 8, BLOCK + 1, Authority.ENGINE), "block_tokens"),
    (st.PoolDeclared, (1, 0, Tier.G1, "GPU", 0, BLOCK, Authority.ENGINE), "capacity_blocks"),
    (st.PoolDeclared, (1, 0, Tier.G2, "CPU", 8, BLOCK, Authority.LEADER), "leader decides"),
])
def test_a_refused_stimulus_changes_nothing_but_the_count(kind: type[st.Stimulus], fields: tuple[object, ...],
                                                          why: str) -> None:
    script = Script(g1=8, g2=8)
    script.arrive("a", "ab")
    script.arrive("b", "ab")
    script.admit("b")
    before = script.state.totals.rejected
    facts = neutral(script)
    memory = script.leader.export()
    script.tell(kind, *fields)
    assert script.rejected
    assert why in script.why
    assert script.state.totals.rejected == before + 1
    assert neutral(script) == facts
    assert script.leader.export() == memory
    assert [type(event) for event in script.last] == [ev.StimulusRejected]


def neutral(script: Script) -> bytes:
    """The facts without what a refusal may change: seq, n, time and the count."""
    state = decode_facts(encode_facts(script.state))
    state.seq = state.n = state.at_ns = state.totals.rejected = 0
    return encode_facts(state)


def test_a_block_of_another_is_not_given_away_and_a_prefix_must_be_there() -> None:
    script = Script(g1=8, g2=8)
    script.arrive("a", "ab")
    script.admit("a")
    script.arrive("b", "xy")
    script.lookup("b")
    script.tell(st.BlocksAllocated, "b", pack_ids(script.slot("a").device_blocks[:1]), 0)
    assert "referenced and cannot be given away" in script.why
    script.tell(st.MatchRequested, "b", BLOCK)
    script.tell(st.BlocksAllocated, "b", pack_ids([5, 6, 7]), 0)
    assert "does not hold block 0" in script.why
    assert hash_of("x") not in script.state.pools[script.device].by_hash


@pytest.mark.parametrize("place", [-1, -(2**31)])
def test_a_reused_block_below_the_pool_is_refused(place: int) -> None:
    script = Script()
    serve(script, "a", "ab")
    script.arrive("b", "ab")
    script.lookup("b")
    script.tell(st.BlocksAllocated, "b", pack_ids([place, 5, 6]), 0)
    assert script.why == f"block ids must be from 0 to 15, got {place} to 6"
