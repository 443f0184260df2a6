"""Every reason why a block misses, brought about by hand, is named with its event."""

from typing import Any

import pytest

from kvbm_console.analysis.explain import Explanation, Missed, MissedRun, explain, grouped, only_block
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import MissReason, SlotState
from kvbm_console.core.stimuli import CandidateSkipRequested, MatchRequested
from tests.analysis.evidence import evidence
from tests.core.engine_model import hash_of
from tests.core.script import Script


def script(**options: Any) -> Script:
    """A leader that copies every full block down at once."""
    return Script(twin=False, checks=False, **{"offload_threshold": 0.0, **options})


def live(s: Script, name: str, word: str, **options: Any) -> None:
    """A request from arrival to its end, with every copy carried out."""
    s.arrive(name, word, **options)
    assert s.admit(name), name
    s.move_all()
    s.step(2)
    s.move_all()
    s.finish(name)
    s.move_all()


def why(s: Script, name: str, **options: Any) -> Explanation:
    return explain(evidence(s.events, s.config, **options), name)


def miss(s: Script, name: str, block: int, **options: Any) -> MissedRun:
    """The one miss of a block at the last admission or look-up."""
    runs = [run for run in why(s, name, **options).admissions[-1].misses if run.first == block]
    assert len(runs) == 1, runs
    return runs[0]


def event_of(s: Script, run: MissedRun) -> Any:
    """The deciding event, which is what the run says that it is."""
    assert run.seq is not None
    event = s.events[run.seq]
    assert type(event).__name__ == run.event
    return event


def test_a_first_request_misses_what_nobody_had_stored() -> None:
    s = script()
    live(s, "a", "wxyz")
    one = why(s, "a")
    assert [run.reason for run in one.admissions[0].misses] == [Missed.NEVER_STORED] * 4 + [Missed.TOO_SHORT]
    assert one.admissions[0].missed == 4
    assert one.admissions[0].misses[-1].tokens == 2


def test_a_prompt_shorter_than_a_block() -> None:
    s = script()
    live(s, "a", "", tail=3)
    (run,) = why(s, "a").admissions[0].misses
    assert (run.first, run.reason, run.tokens) == (None, Missed.TOO_SHORT, 3)
    assert "shorter than a block" in run.text


def test_a_full_match_gives_back_its_last_block() -> None:
    s = script()
    live(s, "a", "wx", tail=2)
    s.arrive("b", "wx", tail=0)
    assert s.admit("b")
    run = miss(s, "b", 1)
    assert run.reason is Missed.BOUNDARY
    assert [one.first for one in why(s, "b").admissions[0].misses] == [1]


def test_without_a_lower_tier_the_eviction_is_named_with_who_wanted_the_room() -> None:
    s = script(g1=5, g2=0)
    live(s, "a", "wxyz")
    live(s, "b", "klmn")
    s.arrive("c", "wxyz")
    assert s.admit("c")
    run = miss(s, "c", 0)
    assert (run.reason, run.tier, run.for_request, run.rule) == (Missed.EVICTED, "G1", "b", "reassigned")
    assert hash_of("w") in unpack_hashes(event_of(s, run).hashes)


def test_an_eviction_below_names_whose_copy_wanted_the_room() -> None:
    s = script(g1=5, g2=4)
    live(s, "a", "wxyz")
    live(s, "b", "klmn")
    live(s, "c", "pqrs")
    s.arrive("d", "wxyz")
    assert s.admit("d")
    run = miss(s, "d", 0)
    assert (run.reason, run.tier) == (Missed.EVICTED, "G2")
    assert "simple_lru, by recency" in run.text
    assert run.for_request == "b"
    assert hash_of("w") in unpack_hashes(event_of(s, run).hashes)
    assert any("evicted from G1" in line for line in run.also)


def test_evicted_before_a_copy_was_made() -> None:
    s = script(g1=5, g2=8, offload_threshold=1.0)  # never under pressure
    live(s, "a", "wxyz")
    live(s, "b", "klmn")
    s.arrive("c", "wxyz")
    assert s.admit("c")
    run = miss(s, "c", 0)
    assert (run.reason, run.tier, run.for_request) == (Missed.NOT_OFFLOADED, "G1", "b")
    assert "no copy of it was planned (offload_law total, offload_threshold 1)" in run.text
    assert run.text.endswith("dropped although G2 had 8 places to give")


def test_an_operator_skipped_the_copy() -> None:
    s = script(g1=8, g2=8, offload_threshold=0.5)
    s.stop_at(ev.Site.CANDIDATE_ENQUEUE, request="a")
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step()
    hold = s.slot("a").hold
    assert hold is not None
    s.tell(CandidateSkipRequested, hold, "me", source=0)
    s.abort("a")
    assert not s.mover.orders
    s.arrive("b", "abcdefg")
    assert s.admit("b")
    s.arrive("c", "wxyz")
    s.lookup("c")
    run = miss(s, "c", 0)
    assert (run.reason, run.filter) == (Missed.FILTERED, "operator")
    assert run.candidate is not None


def test_a_copy_under_way_is_in_flight() -> None:
    s = script(g1=6, g2=8)
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step()  # the store is ordered and not carried out
    operation = s.operation_of("a")
    s.start(operation)
    s.arrive("b", "wxyz")
    assert s.tell(MatchRequested, "b", 0).tokens is None  # an engine that has no prefix of its own
    one = why(s, "b")
    assert not one.admissions[-1].admitted
    assert one.admissions[-1].asked_again == 1
    run = miss(s, "b", 0)
    assert (run.reason, run.operation, run.for_request) == (Missed.IN_FLIGHT, str(operation), "a")
    assert type(event_of(s, run)) is ev.BlocksReserved


def test_staging_shortens_the_match() -> None:
    s = script(g1=14, g2=8, staging_share=0.25)
    live(s, "a", "wxyz")
    s.arrive("b", "abcdefghijklm")
    assert s.admit("b")  # takes every device block
    s.abort("b")
    s.arrive("c", "wxyz")
    assert s.lookup("c") == 8
    run = miss(s, "c", 2)
    assert (run.reason, run.filter, run.tier) == (Missed.FILTERED, "staging_share", "G2")
    assert "may hold 2 places there and others held 0" in run.text
    assert miss(s, "c", 3).reason is Missed.BEHIND_A_MISS


def test_a_prefix_that_the_engine_does_not_claim() -> None:
    s = script(g2=0)
    live(s, "a", "wxyz")
    s.arrive("b", "wxyz")
    s.tell(MatchRequested, "b", 0)
    run = miss(s, "b", 0)
    assert (run.reason, run.filter) == (Missed.FILTERED, "engine_prefix")
    behind = miss(s, "b", 2)
    assert behind.reason is Missed.BEHIND_A_MISS
    assert behind.text == "it was in G1, but block 0 in front of it missed"


def test_a_load_that_fails_takes_its_hits_back() -> None:
    s = script(g1=6, g2=8)
    live(s, "a", "wxyz")
    live(s, "b", "klmno")
    s.arrive("c", "wxyz")
    assert s.admit("c")
    operation = s.operation_of("c")
    s.start(operation)
    s.fail(operation, [1])
    s.move_all()
    admission = why(s, "c").admissions[-1]
    run = next(run for run in admission.misses if run.first == 1)
    assert run.reason is Missed.COPY_FAILED
    assert "link down" in run.text
    assert run.operation == str(operation)
    assert sum(admission.hits) + admission.missed == 4


def test_a_store_that_fails_is_named() -> None:
    s = script(g1=8, g2=8, offload_threshold=0.5)
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step()
    operation = s.operation_of("a")  # one block is copied, until half of the pool is safe
    s.start(operation)
    s.abort("a")
    s.fail(operation)
    assert not s.mover.orders
    s.arrive("b", "abcdefg")
    assert s.admit("b")
    s.arrive("c", "wxyz")
    s.lookup("c")
    run = miss(s, "c", 0)
    assert (run.reason, run.operation, run.for_request) == (Missed.NOT_OFFLOADED, str(operation), "b")
    assert "failed" in run.text
    assert any("its copy to G2 did not arrive" in line for line in run.also)


def test_a_reset_is_named() -> None:
    s = script()
    live(s, "a", "wxyz")
    s.reset()
    s.arrive("b", "wxyz")
    assert s.admit("b")
    run = miss(s, "b", 0)
    assert run.reason is Missed.RESET
    assert type(event_of(s, run)) is ev.ResetDone


# --- what cannot be known --------------------------------------------------------------------------------------------


def missed_story() -> Script:
    """Request c misses what b drove out of a device pool without a lower tier."""
    s = script(g1=5, g2=0)
    live(s, "a", "wxyz")
    live(s, "b", "klmn")
    s.arrive("c", "wxyz")
    assert s.admit("c")
    return s


def test_the_deciding_event_in_a_gap_cannot_be_known() -> None:
    s = missed_story()
    evicted = next(event.seq for event in s.events if isinstance(event, ev.BlocksEvicted))
    run = miss(s, "c", 0, gap=(evicted, evicted))
    assert run.reason is Missed.LOST_TO_A_GAP
    assert f"events {evicted} to {evicted}" in run.text
    assert "it was in G1" in run.text


def test_a_gap_behind_the_deciding_event_makes_it_uncertain_and_says_what_was_last_known() -> None:
    s = missed_story()
    evicted = next(event.seq for event in s.events if isinstance(event, ev.BlocksEvicted))
    opened = next(event.seq for event in s.events if isinstance(event, ev.SlotOpened) and event.request == "c")
    run = miss(s, "c", 0, gap=(evicted + 1, opened - 1))
    assert run.reason is Missed.LOST_TO_A_GAP
    assert "before that, evicted from G1 for b" in run.text


def test_before_the_evidence_begins_only_the_leaders_memory_is_quoted() -> None:
    s = missed_story()
    opened = next(event.seq for event in s.events if isinstance(event, ev.SlotOpened) and event.request == "c")
    unknown = miss(s, "c", 0, begin=opened)
    assert (unknown.reason, unknown.remembered) == (Missed.LOST_TO_A_GAP, None)
    memory = dict(s.leader.memory.history)
    assert memory[hash_of("w")] == MissReason.EVICTED
    told = miss(s, "c", 0, begin=opened, memory=memory)
    assert (told.reason, told.remembered) == (Missed.LOST_TO_A_GAP, "evicted")


# --- asking ----------------------------------------------------------------------------------------------------------


def test_one_block_alone_and_a_block_that_there_is_not() -> None:
    s = script()
    live(s, "a", "wxyz")
    one = only_block(grouped(why(s, "a")), 2)
    (run,) = one.admissions[0].misses
    assert (run.first, run.last, run.blocks, run.tokens) == (2, 2, 1, 4)
    assert [tail.reason for tail in only_block(why(s, "a"), 4).admissions[0].misses] == [Missed.TOO_SHORT]
    with pytest.raises(UsageError, match="block must be from 0 to 4 for a, got 5"):
        only_block(why(s, "a"), 5)


def test_neighbours_that_missed_alike_are_one_run() -> None:
    s = script()
    live(s, "a", "wxyz")
    runs = grouped(why(s, "a")).admissions[0].misses
    assert [(run.first, run.last, run.blocks, run.tokens) for run in runs] == [(0, 3, 4, 16), (None, None, 0, 2)]


def test_an_unknown_request_is_refused_with_names_that_there_are() -> None:
    s = script()
    live(s, "a", "wx")
    with pytest.raises(UsageError, match="test has no request 'nobody'; it has a"):
        why(s, "nobody")


def test_the_last_of_two_requests_of_one_name_is_explained() -> None:
    s = script()
    live(s, "a", "wx")
    live(s, "a", "wxyz")
    one = why(s, "a")
    assert one.occurrences == 2
    assert one.prompt_blocks == 4
    assert sum(one.admissions[0].hits) == 2


def test_a_preempted_request_has_two_admissions() -> None:
    s = script(g1=8, g2=0)
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step()
    s.preempt("a")
    live(s, "b", "klmnop")
    assert s.admit("a")
    one = why(s, "a")
    assert [admission.after_preemption for admission in one.admissions] == [False, True]
    assert one.state == SlotState.PREEMPTED.label
    lost = [run for run in one.admissions[1].misses if run.reason is Missed.EVICTED]
    assert {run.for_request for run in lost} == {"b"}
