"""Iterations: what changes, what is refused whole, and how positions and skipped iterations are counted.

Law of this file: an iteration with one impossible line changes nothing.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.ids import FinishReason, SlotState
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.state import CacheState

from .engine_model import BLOCK, hashes_of
from .script import Script

LISTS = ("new", "resumed", "preempted", "skipped", "unskipped", "first_tokens", "progressed", "positions", "appended",
         "appended_counts", "appended_ids")


def scheduled(script: Script, iteration: int, count: int = 1, **lists: Any) -> bool:
    """Tell an iteration line by line; whether it was taken."""
    fields = [lists.get(name, b"" if name == "appended_ids" else ()) for name in LISTS]
    script.tell(st.IterationScheduled, iteration, count, *fields, 1, 0)
    return not script.rejected


def finished(script: Script, iteration: int, requests: tuple[str, ...], counts: tuple[int, ...], ids: list[int],
             hashes: list[int]) -> bool:
    script.tell(st.IterationFinished, iteration, requests, counts, pack_ids(ids), pack_hashes(hashes))
    return not script.rejected


def running(state: SlotState = SlotState.DECODING, **config: Any) -> Script:
    """Two requests, "a" in the wanted state and "b" waiting; a decoding "a" has a place for one more token."""
    script = Script(g1=16, g2=0, **config)
    script.arrive("a", "ab")
    script.admit("a")
    script.arrive("b", "xy")
    if state is SlotState.PREFILLING:
        script.schedule(only=["a"], chunk=BLOCK)
        script.complete()
        return script
    script.step(2, only=["a"])
    return script


IMPOSSIBLE: list[tuple[SlotState, dict[str, Any], str]] = [
    (SlotState.DECODING, {"new": ("a",)}, "cannot start to prefill"),
    (SlotState.DECODING, {"new": ("b",)}, "cannot start to prefill"),
    (SlotState.DECODING, {"new": ("nobody",)}, "not known"),
    (SlotState.DECODING, {"skipped": ("b",)}, "cannot be left out"),
    (SlotState.DECODING, {"skipped": ("a", "a")}, "twice"),
    (SlotState.DECODING, {"unskipped": ("a",)}, "was not left out"),
    (SlotState.DECODING, {"first_tokens": ("a",)}, "first token"),
    (SlotState.PREFILLING, {"first_tokens": ("a", "a")}, "twice"),
    (SlotState.PREFILLING, {"first_tokens": ("a",), "skipped": ("a",)}, "takes part"),
    (SlotState.PREFILLING, {"progressed": ("a",), "positions": (8,), "skipped": ("a",)}, "takes part"),
    (SlotState.PREFILLING, {"progressed": ("a",), "positions": (8,), "preempted": ("a",)}, "takes part"),
    (SlotState.DECODING, {"skipped": ("a",), "preempted": ("a",)}, "takes part"),
    (SlotState.DECODING, {"preempted": ("a", "a")}, "twice"),
    (SlotState.DECODING, {"preempted": ("nobody",)}, "not known"),
    (SlotState.PREFILLING, {"progressed": ("a",), "positions": (3,)}, "cannot reach position 3"),
    (SlotState.PREFILLING, {"progressed": ("a",), "positions": (99,)}, "room for 12"),
    (SlotState.PREFILLING, {"progressed": ("a",), "positions": ()}, "0 positions"),
    (SlotState.PREFILLING, {"progressed": ("b",), "positions": (0,)}, "computes nothing"),
    (SlotState.DECODING, {"appended": ("a",), "appended_counts": (2,), "appended_ids": pack_ids([9])}, "do not match"),
    (SlotState.DECODING, {"appended": ("a",), "appended_counts": (1,), "appended_ids": pack_ids([0])}, "twice"),
    (SlotState.DECODING, {"appended": ("a", "a"), "appended_counts": (1, 1), "appended_ids": pack_ids([8, 9])},
     "stands twice"),
    (SlotState.DECODING, {"appended": ("b",), "appended_counts": (1,), "appended_ids": pack_ids([9])}, "no device"),
    (SlotState.DECODING, {"appended": ("a",), "appended_counts": (1,), "appended_ids": pack_ids([99])}, "from 0 to 15"),
    (SlotState.DECODING, {"appended": ("a", "b"), "appended_counts": (3, -1), "appended_ids": pack_ids([8, 9])},
     "do not match"),
]


@pytest.mark.parametrize(("state", "lists", "why"), IMPOSSIBLE)
def test_one_impossible_line_refuses_the_whole_iteration(state: SlotState, lists: dict[str, Any], why: str) -> None:
    script = running(state)
    events, number = len(script.events), script.engine.iteration + 1
    assert not scheduled(script, number, **lists)
    assert why in script.why
    assert len(script.events) == events + 1
    assert script.state_of("a") is state


def test_a_finishing_request_is_not_preempted() -> None:
    script = Script(g1=16, offload_threshold=0.0)
    script.arrive("a", "ab")
    script.admit("a")
    script.step()
    script.start(0)
    assert script.finish("a")
    script.arrive("b", "x")
    assert not scheduled(script, 2, preempted=("a",))
    assert "finishing" in script.why
    script.move_all()


@pytest.mark.parametrize(("iteration", "count"), [(2, 1), (4, 1), (3, 0), (3, -1)])
def test_iterations_follow_each_other(iteration: int, count: int) -> None:
    script = running()
    assert script.engine.iteration == 2
    assert not scheduled(script, iteration, count)
    assert "does not follow iteration 2" in script.why


def test_a_token_without_a_place_is_refused_and_nothing_changes() -> None:
    script = running()
    slot = script.slot("a")
    room = len(slot.device_blocks) * BLOCK
    assert slot.computed_tokens(2) == room - 1
    assert not scheduled(script, 3, 2), "two iterations at once need two places"
    assert scheduled(script, 3)
    assert script.slot("a").computed_tokens(3) == room
    assert not scheduled(script, 4)
    assert "no place for its next token" in script.why
    assert scheduled(script, 4, skipped=("a",)), "left out, it needs none"


def test_a_block_that_comes_with_the_iteration_is_a_place() -> None:
    script = running()
    assert scheduled(script, 3)
    new = script.engine.pool.allocate(1)
    assert new is not None
    script.engine.requests["a"].ids = script.engine.requests["a"].ids + new
    script.bytes.overwrite(script.device, new)
    assert scheduled(script, 4, appended=("a",), appended_counts=(1,), appended_ids=pack_ids(new))


def test_several_iterations_at_once_are_the_same_as_one_by_one() -> None:
    one, all_at_once = running(), running()
    for script in (one, all_at_once):
        new = script.grow(script.engine.requests["a"], 16)
        assert new
        script.tell(st.BlocksAllocated, "a", pack_ids(new), 0)
    for number in range(3, 6):
        assert scheduled(one, number)
    assert scheduled(all_at_once, 3, 3)
    for script in (one, all_at_once):
        assert script.state.iteration == 5
        assert script.slot("a").computed_tokens(5) == 14
    assert all_at_once.told(ev.IterationAdvanced)[0].count == 3


@given(hs.integers(1, 20), hs.integers(1, 20), hs.integers(0, 3))
def test_several_iterations_fold_as_their_parts(a: int, b: int, early: int) -> None:
    """apply(a + b) is apply(a), apply(b): positions, blocks given in the order of need, blocks that became full."""
    script = running()
    script.step(early, only=["a"])
    whole, parts = (decode_facts(encode_facts(script.state)) for _ in range(2))
    fold_decoding(whole, a + b)
    fold_decoding(parts, a)
    fold_decoding(parts, b)
    for state in (whole, parts):
        state.seq = state.n = 0
    assert encode_facts(whole) == encode_facts(parts)


def fold_decoding(state: CacheState, count: int) -> None:
    """The events of ``count`` iterations at once in which slot 0 decodes."""
    slot = state.slots[0]
    first, last = state.iteration + 1, state.iteration + count
    more = -(-(slot.computed_tokens(state.iteration) + count) // BLOCK) - len(slot.device_blocks)
    given_ids = list(range(len(slot.device_blocks) + 1, len(slot.device_blocks) + 1 + more))
    ids = slot.device_blocks + given_ids
    full = (slot.computed_tokens(state.iteration) + count) // BLOCK - slot.filled_blocks
    places = ids[slot.filled_blocks : slot.filled_blocks + full]
    hashes = [1_000 + place for place in places]
    if more:
        state.apply(ev.DeviceBlocksAssigned(
            state.seq, state.at_ns, first, 0, (0,) * more, (1,) * more, pack_ids(given_ids), 0, 0
        ))
    state.apply(ev.IterationAdvanced(state.seq, state.at_ns, first, last, count, 1, 0, (), ()))
    if full:
        state.apply(ev.BlocksFilled(
            state.seq, state.at_ns, first, 0, (0,) * full, (1,) * full, pack_ids(places), pack_hashes(hashes)
        ))


def test_a_request_is_given_blocks_and_fills_them_again_and_again_within_several_iterations() -> None:
    script = running()
    new = script.engine.pool.allocate(2)
    assert new is not None
    script.engine.requests["a"].ids = script.engine.requests["a"].ids + new
    script.bytes.overwrite(script.device, new)
    twice: dict[str, Any] = {"appended": ("a", "a"), "appended_counts": (1, 1), "appended_ids": pack_ids(new)}
    assert scheduled(script, 3, 2 * BLOCK, **twice)
    slot = script.slot("a")
    first = slot.filled_blocks
    places = slot.device_blocks[first : first + 2]
    script.engine.pool.store(places, [71, 72])
    script.bytes.at.update({(script.device, places[0]): 71, (script.device, places[1]): 72})
    assert finished(script, 2 + 2 * BLOCK, ("a", "a"), (1, 1), places, [71, 72])
    assert slot.filled_blocks == first + 2
    assert slot.hashes[first : first + 2] == [71, 72]


@pytest.mark.parametrize(("requests", "counts", "ids", "hashes", "why"), [
    (("a",), (1,), [0], [7], "another content"),
    (("a",), (1,), [1], hashes_of("a"), "next blocks"),
    (("a",), (2,), [0], hashes_of("a"), "do not match"),
    (("a",), (1,), [0], [], "do not match"),
    (("a", "a"), (1, 0), [0], hashes_of("a"), "next blocks"),
    (("a", "a"), (1, 1), [0, 1], hashes_of("ab"), "computed tokens"),
    (("a",), (2,), [0, 1], hashes_of("ab"), "computed tokens"),
    (("nobody",), (1,), [0], hashes_of("a"), "not known"),
])
def test_blocks_that_cannot_be_full_are_refused(requests: tuple[str, ...], counts: tuple[int, ...], ids: list[int],
                                                hashes: list[int], why: str) -> None:
    script = Script(g1=16, g2=0)
    script.arrive("a", "ab")
    script.admit("a")
    script.schedule(chunk=BLOCK)
    assert not finished(script, 1, requests, counts, ids, hashes)
    assert why in script.why


def test_an_iteration_that_was_not_formed_cannot_finish() -> None:
    script = running()
    assert not finished(script, 3, (), (), [], [])
    assert "was not formed yet" in script.why


def test_a_request_that_is_left_out_becomes_skipped_and_comes_back() -> None:
    script = running()
    script.step(only=[])
    assert script.state_of("a") is SlotState.SKIPPED_DECODE
    computed = script.slot("a").computed_tokens(3)
    script.step(2, only=[])
    assert script.slot("a").computed_tokens(5) == computed
    script.step(only=["a"])
    assert script.state_of("a") is SlotState.DECODING
    assert script.slot("a").skipped_iterations == 3
    assert script.slot("a").computed_tokens(6) == computed + 1


@pytest.mark.parametrize("how", ["finish", "preempt", "copies"])
def test_iterations_skipped_are_counted_to_the_end(how: str) -> None:
    script = Script(g1=16, offload_threshold=0.0) if how == "copies" else running()
    if how == "copies":
        script.arrive("a", "ab")
        script.admit("a")
        script.step(3)
        script.start(0)
    script.step(only=["a"])
    script.step(2, only=[])
    if how == "preempt":
        script.preempt("a")
        assert script.slot("a").skipped_iterations == 2
        return
    script.finish("a")
    script.move_all()
    (moved,) = [event for event in script.ever(ev.SlotMoved) if event.new is SlotState.FINISHED]
    assert (moved.first_iteration, moved.skipped_iterations) == (1, 2)
    assert script.state.totals.finished[FinishReason.STOP] == 1


def test_a_preempted_request_in_the_list_is_processed_first() -> None:
    script = running()
    ids = list(script.slot("a").device_blocks)
    script.engine.withhold("a", ids)
    script.engine.preempted(script.engine.requests["a"])
    assert scheduled(script, 3, preempted=("a",))
    script.engine.give_back("a", ids)
    assert script.state_of("a") is SlotState.PREEMPTED
    assert not script.slot("a").device_blocks
    assert scheduled(script, 4, preempted=("a",)), "told twice is told once"


def test_admitted_again_and_preempted_before_it_was_scheduled() -> None:
    script = running()
    script.preempt("a")
    assert script.admit("a")
    script.preempt("a")
    assert script.state_of("a") is SlotState.PREEMPTED
    assert not script.slot("a").device_blocks
    assert script.state.totals.preemptions == 1
    assert script.admit("a")
    script.step()
    assert script.state_of("a") is SlotState.PREFILLING


# --- I15: no more tokens than the sequence may have ---


def test_a_sequence_ends_at_its_limit_i15() -> None:
    script = Script(g1=8, g2=0)
    script.arrive("a", "ab", tail=2, out=1)
    script.admit("a")
    script.step(2)
    before = msgspec.json.encode(script.slot("a"))
    assert not scheduled(script, 3)
    assert script.why == "request 'a' has all of its 11 tokens", "there would be a place"
    assert msgspec.json.encode(script.slot("a")) == before


def test_before_its_first_token_a_sequence_is_its_prompt_i15() -> None:
    script = Script(g1=8, g2=0)
    script.arrive("a", "ab", tail=2)
    script.admit("a")
    assert not scheduled(script, 1, new=("a",), progressed=("a",), positions=(11,))
    assert script.why == "request 'a' cannot reach position 11 of 10 tokens"
    assert scheduled(script, 1, new=("a",), progressed=("a",), positions=(10,))


def test_an_engine_that_does_not_tell_its_limit_has_none_i15() -> None:
    script = Script(g1=40, g2=0)
    script.arrive("a", "ab", out=0)
    script.admit("a")
    script.step(100)
    assert script.slot("a").token_limit > 2**40
    script.tell(st.RequestArrived, "b", b"", 3, -1, 0, None)
    assert script.why == "output_limit must be at least 0, got -1"


def test_the_audit_finds_a_sequence_beyond_its_limit_i15() -> None:
    script = Script(g1=8, g2=0)
    script.arrive("a", "ab", tail=1, out=1)
    script.admit("a")
    script.step(2)
    facts = script.mirror
    assert audit(facts) == []
    facts.apply(ev.IterationAdvanced(facts.seq, script.now, 99, facts.iteration + 1, 1, 1, 0, (0,), (11,)))
    assert [(found.rule, found.slot) for found in audit(facts)] == [("I15", 0)]
