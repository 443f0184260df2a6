"""Requests whose attention window moves, told by hand.

Law of this file: each message is one that vLLM's scheduler was seen to cause. Block 0 is vLLM's null block.
"""

from typing import Any

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Authority, Condition, ReleaseReason, SlotState, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.dispatch import Dispatcher, start_leader
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from tests.tap.watching import Watching

BLOCK = 16
PROMPT = [71, 72, 73, 74]


def watching(medium: str = "", places: int = 12) -> Watching:
    settings = TapSettings("", "vllm", BLOCK, places, medium=medium, first_place=1)
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), settings)
    tell(watch, ["all", [], 1, 0, [[], []], [["CPU", PROMPT]] if medium else None])
    return watch


def tell(watch: Watching, *messages: list[Any]) -> None:
    watch.events = []
    watch.take([[message[0], watch.now, *message[1:]] for message in messages])


def step(*, new: list[Any] = [], going: list[Any] = [], fills: list[Any] = []) -> list[Any]:  # noqa: B006
    return ["step", new, [], going, [], [], [], len(new) + len(going), fills]


def start(watch: Watching, name: str = "a") -> SlotFacts:
    """A request with a prompt of four blocks and a token; the first step computes all of it."""
    places = [1, 2, 3, 4, 5]
    tell(watch, ["new", name, PROMPT, 65, 400, 0, None], ["lookup", name, 0, 0, False], ["alloc", name, places, 0])
    tell(watch, step(new=[[name, places, 0, 65, 65]], fills=[[name, 0, PROMPT, [1, 2, 3, 4]]]))
    slot = watch.leader.state.slot_named(name)
    assert slot is not None
    return slot


def allocated(watch: Watching, ids: list[int], passed: int) -> None:
    watch.dispatcher.submit_from(
        watch.source, None, st.BlocksAllocated, "a", pack_ids(ids), 0, False, (), b"", passed)


def certain(watch: Watching) -> bool:
    state = watch.leader.state
    return watch.rejected == [] and state.lost_sources == {} and watch.mirror.totals == state.totals


def test_blocks_before_the_window_go_back_to_the_cache_while_the_request_runs() -> None:
    watch = watching()
    slot = start(watch)
    tell(watch, ["window", "a", 2], step(going=[["a", None, 65, 1, 0]]))
    assert certain(watch)
    assert (slot.passed_blocks, slot.device_blocks, slot.filled_blocks) == (2, [3, 4, 5], 4)
    assert slot.computed_tokens(watch.leader.state.iteration) == 66
    (released,) = [event for event in watch.events if isinstance(event, ev.DeviceBlocksReleased)]
    assert released.why is ReleaseReason.PAST_WINDOW
    (pool,) = watch.leader.state.pools
    assert pool.counts[Condition.CACHED] == 2
    assert [pool.hash_of[place] for place in (1, 2)] == PROMPT[:2]
    assert decode_facts(encode_facts(watch.leader.state)).slots[slot.slot] == slot
    tell(watch, ["finish", "a", "FINISHED_LENGTH_CAPPED", False, 0])
    assert certain(watch)
    assert not any(pool.refs)


def test_another_request_is_given_a_place_that_the_window_has_passed_in_the_same_step() -> None:
    watch = watching(places=5)
    slot = start(watch)
    tell(watch, ["window", "a", 2], ["new", "b", [81], 20, 4, 0, None], ["lookup", "b", 0, 0, False],
         ["pool", "b", [2, 1], []], ["alloc", "b", [2, 1], 0],
         step(new=[["b", [2, 1], 0, 20, 20]], going=[["a", None, 65, 1, 0]]))
    assert certain(watch)
    assert slot.device_blocks == [3, 4, 5]
    (evicted,) = [event for event in watch.events if isinstance(event, ev.BlocksEvicted)]
    other = watch.leader.state.slot_named("b")
    assert other is not None
    assert (other.device_blocks, evicted.for_slot) == ([2, 1], other.slot)


def test_a_prompt_is_found_from_its_window_on() -> None:
    """A lookup needs the blocks of the window alone, so the blocks before it count as found and have no places."""
    watch = watching()
    start(watch)
    tell(watch, ["finish", "a", "FINISHED_LENGTH_CAPPED", False, 0])
    tell(watch, ["new", "b", PROMPT, 70, 4, 0, None], ["lookup", "b", 64, 0, False], ["alloc", "b", [0, 0, 3, 4, 6], 0],
         step(new=[["b", [0, 0, 3, 4, 6], 64, 6, 70]]))
    slot = watch.leader.state.slot_named("b")
    assert slot is not None
    assert certain(watch)
    assert (slot.passed_blocks, slot.device_blocks, slot.filled_blocks, slot.hits) == (2, [3, 4, 6], 4, (4, 0, 0, 0))


def test_what_lies_before_the_window_is_found_below_and_not_loaded() -> None:
    watch = watching("CPU")
    tell(watch, ["new", "a", PROMPT, 70, 4, 0, None], ["lookup", "a", 0, 64, True],
         ["copy", 7, "a", "CPU", "GPU", PROMPT[2:], 2, None, False], ["alloc", "a", [0, 0, 3, 4, 6], 64], step())
    slot = watch.leader.state.slot_named("a")
    assert slot is not None
    assert certain(watch)
    assert (slot.state, slot.passed_blocks, slot.device_blocks) == (SlotState.ONBOARDING, 2, [3, 4, 6])
    (operation,) = watch.leader.state.operations.values()
    assert operation.targets == [3, 4]
    tell(watch, ["copied", 7, "completed", 1_000], ["copies", ["a"], [], [], []],
         step(new=[["a", [0, 0, 3, 4, 6], 64, 6, 70]]))
    assert certain(watch)
    assert (slot.state, slot.hits) == (SlotState.PREFILLING, (0, 4, 0, 0))


def test_a_window_may_pass_all_blocks_of_a_request_for_a_moment() -> None:
    """Chunked attention gives all blocks back at the end of a chunk, before the next block is allocated."""
    watch = watching()
    tell(watch, ["new", "a", PROMPT, 96, 40, 0, None], ["lookup", "a", 0, 0, False], ["alloc", "a", [1, 2, 3, 4], 0],
         step(new=[["a", [1, 2, 3, 4], 0, 64, 96]], fills=[["a", 0, PROMPT, [1, 2, 3, 4]]]))
    slot = watch.leader.state.slot_named("a")
    assert slot is not None
    tell(watch, ["window", "a", 4])
    assert (slot.passed_blocks, slot.device_blocks) == (4, [])
    tell(watch, step(going=[["a", [5, 6], 64, 32, 0]], fills=[["a", 4, [75], [5]]]))
    assert certain(watch)
    assert (slot.passed_blocks, slot.device_blocks, slot.filled_blocks, slot.hashes[4:]) == (4, [5, 6], 5, [75])
    tell(watch, ["finish", "a", "FINISHED_ABORTED", False, 5])
    assert certain(watch)
    assert not watch.leader.state.slots


def test_who_begins_to_listen_late_knows_what_the_window_has_passed() -> None:
    """Also blocks of the answer, whose hashes the facts need because later blocks continue them."""
    hashes = [*PROMPT, 75, 76, 77]
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), TapSettings("", "vllm", BLOCK, 12, first_place=1))
    about = ["a", PROMPT, 65, 90, 0, None, None, None]
    tell(watch, ["all", [[about, [[0, 0, 0, 0, 0, 6, 7, 8], 113, "RUNNING", 65, 1, hashes]]], 1, 0,
                 [[[1, 6, 7], [71, 76, 77]], []], None])
    slot = watch.leader.state.slot_named("a")
    assert slot is not None
    assert certain(watch)
    assert (slot.passed_blocks, slot.device_blocks, slot.hashes, slot.filled_blocks) == (5, [6, 7, 8], hashes, 7)
    assert slot.computed_tokens(watch.leader.state.iteration) == 113
    assert watch.leader.state.pools[0].counts[Condition.CACHED] == 1


def test_a_request_that_lost_its_blocks_finds_an_answer_behind_its_prompt() -> None:
    """Another request has computed it. The tap tells the hashes of the blocks before the window."""
    watch = watching()
    start(watch)
    tell(watch, ["window", "a", 2], step(going=[["a", None, 65, 1, 0]]))
    tell(watch, ["preempt", "a"])
    slot = watch.leader.state.slot_named("a")
    assert slot is not None
    assert (slot.passed_blocks, slot.device_blocks) == (0, [])
    watch.dispatcher.submit_from(
        watch.source, None, st.BlocksReported, 0, pack_hashes([76, 77]), b"", False, pack_ids([7, 8]))
    tell(watch, ["lookup", "a", 7 * BLOCK, 0, False], ["alloc", "a", [0, 0, 0, 0, 0, 7, 8, 9], 0, False, [75]])
    tell(watch, ["step", [], [["a", [0, 0, 0, 0, 0, 7, 8, 9], 7 * BLOCK, 5, 117]], [], [], [], [], 1, []])
    assert certain(watch)
    assert (slot.passed_blocks, slot.device_blocks, slot.hashes) == (5, [7, 8, 9], [*PROMPT, 75, 76, 77])


@pytest.mark.parametrize(("passed", "ids", "doubted"), [
    (1, [3, 4, 5], True),  # the window goes back
    (3, [3, 4, 5], True),  # its blocks are not those that follow
    (9, [], True),  # it passes blocks that were never allocated
    (2, [3, 4, 5, 6], False),
])
def test_a_window_that_does_not_fit_the_facts_makes_them_doubtful(passed: int, ids: list[int], doubted: bool) -> None:
    watch = watching()
    start(watch)
    tell(watch, ["window", "a", 2])
    allocated(watch, ids, passed)
    assert bool(watch.leader.state.lost_sources) is doubted


def test_blocks_before_the_window_need_hashes() -> None:
    watch = watching()
    tell(watch, ["new", "a", [71], 20, 40, 0, None], ["lookup", "a", 16, 0, False])
    allocated(watch, [3], 2)
    assert watch.rejected == ["2 blocks before the window of 'a' need hashes, 1 have none"]


def test_blocks_that_got_their_hashes_before_the_window_moved_are_told_before_it() -> None:
    """A load of vLLM 0.11 is named when its request goes on, and in the same call the window passes a part of it."""
    flattener = Flattener(block_tokens=BLOCK)
    flattener.pool_names = True

    def key(content: int) -> bytes:
        return content.to_bytes(32, "big") + bytes(4)

    for name, place in (("a", 3), ("b", 4)):
        assert flattener.messages(("named", 0, name, 0, [(place, key(70 + place))])) == []
    assert flattener.messages(("window", 1, "a", 1)) == [["fill", 1, [["a", 0, [73], [3]]]], ["window", 1, "a", 1]]
    assert flattener.messages(("window", 2, "a", 2)) == [["window", 2, "a", 2]]


def test_a_window_cannot_pass_a_block_that_is_being_loaded() -> None:
    """The place would be a target of the load and, given out again, a block of the request twice."""
    watch = watching("CPU")
    tell(watch, ["new", "a", PROMPT, 70, 4, 0, None], ["lookup", "a", 0, 64, True],
         ["copy", 7, "a", "CPU", "GPU", PROMPT, 4, None, False], ["alloc", "a", [1, 2, 3, 4, 5], 64], step())
    assert certain(watch)
    allocated(watch, [3, 4, 5, 1], 2)
    assert watch.rejected == []
    assert watch.leader.state.lost_sources
    assert audit(watch.leader.state) == []


def test_a_clone_shares_the_full_blocks_that_the_window_has_not_passed() -> None:
    watch = watching()
    slot = start(watch)
    tell(watch, ["window", "a", 2], step(going=[["a", None, 65, 1, 0]]))
    watch.dispatcher.submit_from(watch.source, None, st.RequestCloned, "a", ("b",), pack_ids([9]))
    clone = watch.leader.state.slot_named("b")
    assert clone is not None
    assert certain(watch)
    assert (slot.device_blocks, clone.device_blocks, clone.passed_blocks) == ([3, 4, 5], [3, 4, 9], 2)
    assert audit(watch.leader.state) == []


def test_full_blocks_that_the_engine_does_not_keep_are_held_and_not_cached() -> None:
    """With vLLM's default retention only the window at the end of a prompt is kept, here its last two blocks."""
    watch = watching()
    places = [1, 2, 3, 4, 5]
    tell(watch, ["new", "a", PROMPT, 65, 400, 0, None], ["lookup", "a", 0, 0, False], ["alloc", "a", places, 0])
    tell(watch, step(new=[["a", places, 0, 65, 65]], fills=[["a", 0, PROMPT, [1, 2, 3, 4], [1, 2]]]))
    (pool,) = watch.leader.state.pools
    slot = watch.leader.state.slot_named("a")
    assert slot is not None
    assert certain(watch)
    assert [pool.hash_of[place] for place in places] == [0, 0, 73, 74, 0]
    assert (slot.filled_blocks, slot.hashes, slot.device_blocks) == (4, PROMPT, places)
    (dropped,) = [event for event in watch.events if isinstance(event, ev.BlocksDropped)]
    assert dropped.why is ReleaseReason.NOT_KEPT
    tell(watch, ["window", "a", 2], step(going=[["a", None, 65, 1, 0]]))
    assert certain(watch)
    assert (pool.counts[Condition.EMPTY], pool.counts[Condition.CACHED]) == (9, 0)
    tell(watch, ["finish", "a", "FINISHED_LENGTH_CAPPED", False, 0])
    assert (pool.counts[Condition.EMPTY], pool.counts[Condition.CACHED]) == (10, 2)
    assert audit(watch.leader.state) == []


def test_a_block_of_an_answer_that_is_not_kept_has_its_place_in_the_sequence() -> None:
    watch = watching()
    slot = start(watch)
    for position in range(65, 80):
        tell(watch, step(going=[["a", None, position, 1, 0]]))
    tell(watch, step(going=[["a", [6], 80, 1, 0]], fills=[["a", 4, [75], [5], [5]]]))
    (pool,) = watch.leader.state.pools
    assert certain(watch)
    assert (slot.filled_blocks, slot.hashes) == (5, [*PROMPT, 75])
    assert pool.hash_of[5] == 0
    assert slot.computed_tokens(watch.leader.state.iteration) == 81


def test_the_whole_report_tells_what_is_not_kept() -> None:
    watch = watching()
    about = ["a", PROMPT, 65, 400, 0, None]
    tell(watch, ["all", [[about, [[1, 2, 3, 4, 5], 65, "RUNNING", 65, True, PROMPT, [1, 2]]]], 1, 0,
                 [[[3, 4], [73, 74]], []], None])
    (pool,) = watch.leader.state.pools
    assert watch.rejected == []
    assert [pool.hash_of[place] for place in range(1, 6)] == [0, 0, 73, 74, 0]


def test_an_engine_that_asks_keeps_all_of_its_blocks() -> None:
    dispatcher = Dispatcher(Leader(LeaderConfig()), lambda: 0)
    start_leader(dispatcher)
    port = dispatcher.port(1)
    port.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 8, 16, Authority.ENGINE)
    refused = port.submit(st.IterationFinished, 0, (), (), b"", b"", pack_ids([0]))
    (event,) = refused.events
    assert isinstance(event, ev.StimulusRejected)
    assert event.why == "an engine that asks keeps all of its full blocks"
