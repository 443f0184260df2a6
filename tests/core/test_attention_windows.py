"""Attention windows of an engine that asks: its requests give back their first blocks while they run.

Law of this file: the engine reuses a place as soon as the answer lets it, so a wrong answer ends in two owners.
"""

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.ids import Condition, ReleaseReason, SlotState
from kvbm_console.core.instructions import FencedBlocks

from .engine_model import BLOCK, hashes_of
from .scenes import forget_g1, stored
from .script import Script


def prefilled(word: str = "abcd", **config: float) -> Script:
    script = Script(g1=8, g2=8, **config)
    script.arrive("a", word)
    assert script.admit("a")
    script.step()
    return script


def moved(script: Script, count: int, passed: int) -> list[int]:
    """The window of "a" passes ``count`` further blocks, ``passed`` in all; the places that the answer fences."""
    request = script.engine.requests["a"]
    ids, request.ids = request.ids[:count], request.ids[count:]
    script.engine.withhold("a", ids)
    answer = script.tell_withheld(
        st.BlocksAllocated, "a", b"", 0, False, (), b"", passed,
        give=lambda answer: [place for place in ids if place not in unpack_ids(answer.ids)],
    )
    assert isinstance(answer, FencedBlocks)
    return unpack_ids(answer.ids)


def test_blocks_before_the_window_are_cached_and_given_to_others() -> None:
    script = prefilled(offload_threshold=1.0)
    assert moved(script, 2, 2) == []
    slot = script.slot("a")
    assert (slot.passed_blocks, slot.end_block, slot.filled_blocks) == (2, 5, 4)
    (released,) = script.told(ev.DeviceBlocksReleased)
    assert (released.why, unpack_ids(released.ids)) == (ReleaseReason.PAST_WINDOW, [0, 1])
    assert script.state.pools[script.device].counts[Condition.CACHED] == 2
    script.arrive("b", "ab")
    script.lookup("b")
    script.allocate("b")
    assert script.slot("b").device_blocks[:2] == [0, 1]


@pytest.mark.parametrize("ends", ["done", "preempt", "finish"])
def test_a_place_that_a_copy_reads_comes_back_when_the_copy_ends(ends: str) -> None:
    """Each window names its own blocks of the copy, and the end of the copy gives all of them back."""
    script = prefilled(offload_threshold=0.0)
    (operation,) = script.mover.queued
    script.start(operation)
    assert moved(script, 1, 1) == [0]
    assert moved(script, 2, 3) == [1, 2]
    if ends == "preempt":
        assert script.preempt("a") == [3]
    elif ends == "finish":
        assert script.finish("a")
    assert script.released == []
    script.done(operation)
    assert sorted(place for _, places in script.released for place in places if place < 4) == (
        [0, 1, 2] if ends == "done" else [0, 1, 2, 3]
    )
    assert script.engine.withheld == {}


def test_a_request_is_admitted_with_the_blocks_of_its_window_alone() -> None:
    script = prefilled(offload_threshold=1.0)
    script.finish("a")
    script.arrive("b", "abcd")
    engine, request = script.engine, script.engine.requests["b"]
    assert script.lookup("b") == 0
    prefix = engine.local_prefix(request)
    new = engine.pool.allocate(1, prefix[2:])
    assert new is not None
    script.bytes.overwrite(script.device, new)
    request.ids, request.reused, request.stored = prefix[2:] + new, 4, 4
    request.computed = 4 * BLOCK
    script.tell(st.BlocksAllocated, "b", pack_ids(request.ids), 0, False, (), b"", 2)
    slot = script.slot("b")
    assert (slot.passed_blocks, slot.device_blocks, slot.hits) == (2, request.ids, (4, 0, 0, 0))


def test_what_lies_before_the_window_is_found_below_and_not_loaded() -> None:
    script = stored()
    forget_g1(script)
    script.arrive("b", "abcd")
    assert script.lookup("b") == 4 * BLOCK
    engine, request = script.engine, script.engine.requests["b"]
    new = engine.pool.allocate(3)
    assert new is not None
    script.bytes.overwrite(script.device, new)
    request.ids, request.computed, request.loading = new, 4 * BLOCK, True
    script.tell(st.BlocksAllocated, "b", pack_ids(new), 4 * BLOCK, False, (), b"", 2)
    slot = script.slot("b")
    assert (slot.state, slot.passed_blocks, slot.hits) == (SlotState.ONBOARDING, 2, (0, 4, 0, 0))
    (operation,) = script.state.operations.values()
    assert operation.targets == new[:2]
    pool = script.state.pools[operation.source_pool]
    assert [pool.hash_of[place] for place in operation.sources] == slot.hashes[2:4]


@pytest.mark.parametrize(("passed", "why"), [
    (5, "cannot pass 5 blocks: 1 are passed and 4 are full"),
    (0, "cannot pass 0 blocks: 1 are passed and 4 are full"),
])
def test_a_window_that_cannot_be_is_refused(passed: int, why: str) -> None:
    script = prefilled(offload_threshold=1.0)
    moved(script, 1, 1)
    script.tell(st.BlocksAllocated, "a", b"", 0, False, (), b"", passed)
    assert why in script.why


def test_blocks_that_were_not_found_cannot_lie_before_the_window() -> None:
    script = Script(g1=8, g2=8)
    script.arrive("a", "abcd")
    script.lookup("a")
    script.tell(st.BlocksAllocated, "a", pack_ids([0, 1, 2]), 0, False, (), b"", 2)
    assert "2 blocks before the window of 'a' were not found" in script.why


def test_the_window_of_a_held_request_does_not_move() -> None:
    """A copy of its blocks may wait for the hold, and would read places that others have."""
    script = prefilled(offload_threshold=1.0)
    script.stop_at(to=SlotState.DECODING)
    script.step()
    slot = script.slot("a")
    assert slot.hold is not None
    script.tell(st.BlocksAllocated, "a", b"", 0, False, (), b"", 1)
    assert "cannot move while the request is held or loads" in script.why
    assert slot.passed_blocks == 0


def test_places_given_to_another_group_lose_what_the_first_group_had() -> None:
    """The groups of layers share the places of the device, and the leader follows the first group."""
    script = prefilled(offload_threshold=1.0)
    script.finish("a")
    script.tell(st.BlocksReported, script.device, b"", b"", False, pack_ids([1, 7]), "b")
    (evicted,) = script.told(ev.BlocksEvicted)
    assert (unpack_ids(evicted.ids), unpack_hashes(evicted.hashes)) == ([1], hashes_of("abcd")[1:2])
    assert script.state.pools[script.device].counts[Condition.CACHED] == 3


@pytest.mark.parametrize(("stored", "cleared", "place", "why"), [
    ("", False, 0, "block 0 is still referenced and cannot be given away"),
    ("", False, 8, "from 0 to 7"),
    ("b", False, 6, "is not described by an event stream"),
    ("", True, 6, "is not described by an event stream"),
])
def test_an_engine_that_asks_tells_of_another_group_only_free_places(
    stored: str, cleared: bool, place: int, why: str
) -> None:
    script = prefilled(offload_threshold=1.0)
    script.tell(
        st.BlocksReported, script.device, pack_hashes(hashes_of(stored)), b"", cleared, pack_ids([place]), "b"
    )
    assert why in script.why
