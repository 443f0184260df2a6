"""Copies down: when they start and stop, what they choose, what makes room for them, and what they never do.

Law of this file: a copy makes no room by itself, and within a tier no block is evicted before one that continues it.
"""

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.ids import CandidateStatus, EvictRule, Route, Site, SkipReason, SlotState, Suspend
from kvbm_console.core.instructions import PinDeviceBlocks, StartTransfer

from .engine_model import BLOCK, WORD, hash_of
from .oracle import tiers_of
from .scenes import forget_g1, serve, stored
from .script import Script


def words(script: Script, pool: int) -> set[str]:
    return {WORD[key] for key in script.state.pools[pool].by_hash}


def prefilled(script: Script, name: str, word: str) -> None:
    script.arrive(name, word)
    assert script.admit(name)
    script.step()


def test_a_threshold_of_0_copies_every_new_full_block_once() -> None:
    script = Script(offload_threshold=0.0)
    prefilled(script, "a", "abcd")
    assert script.told(ev.CandidatePlanned)[0].route is Route.G1_G2
    script.move_all()
    assert words(script, 0) == {"a", "ab", "abc", "abcd"}
    planned = len(script.ever(ev.CandidatePlanned))
    script.step(3)
    assert script.slot("a").filled_blocks == 5, "the last block fills with generated tokens"
    script.move_all()
    assert len(words(script, 0)) == 5
    assert len(script.ever(ev.CandidatePlanned)) == planned + 1
    script.arrive("b", "abcd")
    script.admit("b")
    script.step(2)
    assert len(script.ever(ev.CandidatePlanned)) == planned + 1, "what is copied is not copied again"


def copied_at(threshold: float) -> int:
    """Blocks that are copied down when nine of twenty are cached, unsaved, and three more are taken."""
    script = Script(g1=20, g2=20, offload_threshold=threshold, offload_hysteresis=0.1)
    prefilled(script, "a", "abcdefghi")
    script.finish("a")
    prefilled(script, "b", "mn")
    script.move_all()
    return len(words(script, 0))


def test_changing_the_threshold_changes_the_result() -> None:
    copied = [copied_at(threshold) for threshold in (0.0, 0.5, 0.55, 0.6, 1.0)]
    assert copied == sorted(copied, reverse=True)
    assert copied[0] == 11, "write-through"
    assert copied[-1] == 0
    assert len(set(copied)) >= 4


def test_copying_stops_above_the_threshold_with_its_hysteresis() -> None:
    """Eight places are safe, below 0.5 of 20; four more make 12, which is 0.6 of them. Copies in flight count."""
    assert copied_at(0.5) == 4


def test_partial_blocks_are_never_copied() -> None:
    script = Script(offload_threshold=0.0)
    script.arrive("a", "", tail=3)
    script.admit("a")
    script.step()
    assert not script.ever(ev.CandidatePlanned)


def test_a_store_is_asked_for_once_the_iteration_that_filled_its_blocks_has_finished() -> None:
    script = Script(offload_threshold=0.0)
    script.arrive("a", "abcd")
    script.admit("a")
    script.schedule()
    assert not script.mover.queued
    script.complete()
    assert script.mover.queued


def twice(script: Script) -> None:
    """Two requests with one prompt, prefilled side by side: each hash stands in two places."""
    for name in ("a", "b"):
        script.arrive(name, "ab")
        assert script.admit(name)
    script.step()
    assert len(script.state.pools[script.device].places_of(hash_of("ab"))) == 2


def test_the_place_that_is_copied_is_the_one_that_was_planned() -> None:
    """The other place of the same hash is another's: it may be given away while the copy runs."""
    script = Script(g1=12, g2=16, offload_threshold=0.0)
    script.stop_at(Site.EVALUATE_WILL, request="a")
    twice(script)
    (order,) = script.mover.queued.values()
    assert unpack_ids(order.sources) == script.slot("b").device_blocks[:2]
    script.start(order.operation)
    assert script.preempt("a") == [], "no copy of its own runs"
    forget_g1(script)
    script.done(order.operation)


def test_a_candidate_that_was_overtaken_is_already_cached() -> None:
    script = Script(g1=12, g2=16, offload_threshold=0.0)
    script.stop_at(Site.EVALUATE_WILL, request="a")
    twice(script)
    script.move_all()
    assert words(script, 0) == {"a", "ab"}
    script.go_on()
    assert [event.reason for event in script.told(ev.CandidateSkipped)] == [SkipReason.ALREADY_CACHED]


def test_a_planned_block_whose_place_the_engine_reuses_meanwhile_is_source_evicted() -> None:
    """While a hold keeps the pipeline closed, the engine goes on and gives the planned places to another request."""
    script = Script(g1=9, g2=16, offload_threshold=0.0)
    script.arrive("still", "z")
    script.stop_at(Site.TRANSITION_DID, SlotState.PREFILLING, request="still", suspend=Suspend.PIPELINE)
    assert script.admit("still")
    script.step()
    prefilled(script, "a", "abcd")
    script.preempt("a")
    assert Route.G1_G2 in {event.route for event in script.ever(ev.CandidatePlanned) if event.slot is None}
    forget_g1(script)
    script.go_on()
    assert SkipReason.SOURCE_EVICTED in [event.reason for event in script.told(ev.CandidateSkipped)]
    script.move_all()


def test_copies_in_flight_count_as_safe() -> None:
    script = Script(g1=20, g2=20, offload_threshold=0.5, offload_hysteresis=0.1)
    prefilled(script, "a", "abcdefghi")
    script.finish("a")
    prefilled(script, "b", "mn")
    assert sum(order.blocks for order in script.mover.queued.values()) == 4
    prefilled(script, "c", "x")
    assert sum(order.blocks for order in script.mover.queued.values()) == 4, "ten places are safe, copies included"


def test_no_capacity_when_all_is_held_below_and_again_when_room_comes_up() -> None:
    script = stored("ab", g1=12, g2=2, staging_share=1.0)
    script.arrive("b", "ab")
    script.lookup("b")
    prefilled(script, "c", "xy")
    assert [event.reason for event in script.ever(ev.CandidateSkipped)] == [SkipReason.NO_CAPACITY]
    script.step(2)
    assert len(script.ever(ev.CandidateSkipped)) == 1, "not tried again before the pool below changes"
    script.abort("b")
    assert script.told(ev.CandidatePlanned), "room came up"
    script.move_all()
    assert words(script, 0) == {"x", "xy"}


def test_room_comes_up_when_a_load_is_cancelled() -> None:
    script = stored("ab", g1=12, g2=2, staging_share=1.0)
    script.arrive("b", "ab")
    script.admit("b")
    prefilled(script, "c", "xy")
    assert script.ever(ev.CandidateSkipped)[-1].reason is SkipReason.NO_CAPACITY
    script.abort("b")
    assert [event.status for event in script.told(ev.CandidateEnded)] == [CandidateStatus.CANCELLED]
    script.move_all()
    assert words(script, 0) == {"x", "xy"}


def test_room_comes_up_when_a_store_is_cancelled() -> None:
    script = Script(g1=12, g2=2, offload_threshold=0.0)
    prefilled(script, "a", "ab")
    prefilled(script, "b", "xy")
    assert script.ever(ev.CandidateSkipped)[-1].reason is SkipReason.NO_CAPACITY
    script.preempt("a")
    assert script.told(ev.CandidateEnded)[0].status is CandidateStatus.CANCELLED
    assert script.told(ev.CandidatePlanned), "its places are free again"
    script.move_all()
    assert len(words(script, 0)) == 2


def test_a_pool_that_can_give_some_places_gives_them() -> None:
    script = stored("ab", g1=12, g2=3, staging_share=0.34)
    script.arrive("b", "ab")
    assert script.lookup("b") == 4, "one block is staged, the other two places are free or cached"
    prefilled(script, "c", "xyz")
    script.move_all()
    assert {"x", "xy"} <= words(script, 0)
    assert "a" in words(script, 0), "what is staged stays"


def test_the_coldest_block_goes_first_and_never_above_the_capacity() -> None:
    script = Script(g1=16, g2=4, offload_threshold=0.0)
    for name, word in (("a", "ab"), ("b", "mn")):
        serve(script, name, word, steps=1)
    serve(script, "c", "x", steps=1)
    (evicted,) = script.ever(ev.BlocksEvicted)[-1:]
    assert evicted.rule is EvictRule.RECENCY
    assert words(script, 0) == {"a", "m", "mn", "x"}
    assert script.state.pools[0].resident_blocks == 4
    assert words(script, script.device) >= {"a", "ab", "m", "mn", "x"}, "eviction below never touches G1"


def test_under_pressure_g2_is_copied_to_g3() -> None:
    script = Script(g1=10, g2=6, g3=32, offload_threshold=0.6)
    for number, word in enumerate(("abcd", "mnop", "qrst", "uvwx")):
        serve(script, f"r{number}", word)
    assert {event.route for event in script.ever(ev.CandidatePlanned)} >= {Route.G1_G2, Route.G2_G3}
    assert words(script, 1)


def test_cached_blocks_that_nobody_holds_are_pinned_in_the_engine_while_they_are_copied() -> None:
    script = Script(g1=8, g2=16, offload_threshold=0.5)
    prefilled(script, "a", "ab")
    script.finish("a")
    prefilled(script, "b", "mnop")
    pinned = [one for one in script.asked if isinstance(one, PinDeviceBlocks)]
    started = [one for one in script.asked if isinstance(one, StartTransfer)]
    assert pinned
    assert started
    assert script.engine.withheld[""]
    script.move_all()
    assert "" not in script.engine.withheld


def test_a_slot_that_still_loads_is_not_copied_down() -> None:
    """If another part of its load failed, what is behind that is dropped: it must not be the source of a copy."""
    script = Script(g1=8, g2=6, g3=16, offload_threshold=0.0, staging_share=1.0)
    serve(script, "first", "abcdef")
    serve(script, "second", "mn", steps=1)
    forget_g1(script)
    script.arrive("b", "abcdef")
    script.admit("b")
    first, second = sorted(script.mover.queued)
    script.start(first)
    script.start(second)
    script.done(second)
    assert script.state_of("b") is SlotState.ONBOARDING
    assert not [one for one in script.state.candidates.values() if not one.route.is_load]
    script.fail(first, [0])
    script.move_all()


def test_the_prefix_of_what_is_staged_is_neither_colder_nor_evicted_first_i13() -> None:
    """The engine has the beginning of the prompt itself: only its continuation is staged, and pinned."""
    script = stored("abcd", g1=12, g2=6, staging_share=1.0)
    script.arrive("a", "ab")
    script.admit("a")
    script.move_all()
    script.step()
    script.arrive("b", "abcd")
    assert script.lookup("b") == 2 * BLOCK
    serve(script, "second", "mn", steps=1)
    serve(script, "third", "uv", steps=1)
    assert words(script, 0) >= {"a", "ab", "abc", "abcd"}, "nothing below a pinned block was evicted"
    script.abort("b")
    serve(script, "fourth", "xyz", steps=1)
    assert words(script, 0) & {"a", "ab", "abc", "abcd"} in ({"a"}, {"a", "ab"}, {"a", "ab", "abc"}), "deepest first"


def test_after_a_copy_that_failed_only_its_failed_blocks_are_given_up() -> None:
    """Blocks for which there was no room were never tried: they are copied when room comes up."""
    script = Script(g1=14, g2=3, offload_threshold=0.0)
    prefilled(script, "a", "abcde")
    (operation,) = script.mover.queued
    assert script.mover.queued[operation].blocks == 3
    script.start(operation)
    script.fail(operation, [1])
    mine = script.leader.memory.pools[script.device]
    given_up = script.slot("a").device_blocks[1]
    assert given_up not in (*mine.covered, *mine.planned)
    tried = {WORD[key] for event in script.ever(ev.CandidatePlanned)[1:] for key in unpack_hashes(event.hashes)}
    assert tried == {"abcd", "abcde"}
    script.move_all()


def test_a_block_that_waits_for_its_copy_down_is_not_evicted_for_one_from_above() -> None:
    """G2 has room for one of two prompts: the first goes on to G3 before the second takes its place."""
    script = Script(g1=16, g2=4, g3=32, offload_threshold=0.0)
    for name, word in (("a", "abcd"), ("b", "mnop")):
        script.arrive(name, word)
        assert script.admit(name)
    script.step(2)
    script.move_all()
    saved = tiers_of(script.state)
    assert saved["G3"] == {"a", "ab", "abc", "abcd", "m", "mn", "mno", "mnop"}
    assert saved["G2"] == {"m", "mn", "mno", "mnop"}
    assert SkipReason.SOURCE_EVICTED not in {event.reason for event in script.ever(ev.CandidateSkipped)}
