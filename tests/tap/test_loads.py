"""Loads that a watched engine's connector makes, told by hand.

Law of this file: each message is one that vLLM's scheduler was seen to cause.
"""

from typing import Any

from kvbm_console.core import events as ev
from kvbm_console.core.ids import SlotState
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from tests.tap.watching import Watching

BLOCK = 16


def test_a_load_into_the_place_that_held_the_same_block_before_writes_it_anew() -> None:
    """A prompt of one whole block: its last token is computed, so the device's copy is no hit, and the load's is."""
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), TapSettings("", "vllm", BLOCK, 8, medium="CPU"))
    tell(watch, ["all", [], True, 0, [[], []], [["CPU", [77]]]])
    tell(watch, ["new", "a", [77], BLOCK, 1, 0, None], ["lookup", "a", 0, 0, False], ["alloc", "a", [1], 0])
    tell(watch, ["step", [["a", [1], 0, BLOCK, BLOCK]], [], [], [], [], [], 1, [["a", 0, [77]]]])
    tell(watch, ["finish", "a", "FINISHED_LENGTH_CAPPED", False, 0])
    tell(watch, ["new", "b", [77], BLOCK, 1, 0, None], ["lookup", "b", 0, BLOCK, True])
    tell(watch, ["alloc", "b", [1], BLOCK], ["step", [], [], [], [], [], [], 0, []])
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    (slot,) = watch.leader.state.slots.values()
    assert (slot.state, slot.device_blocks) == (SlotState.ONBOARDING, [1])
    assert [event for event in watch.events if isinstance(event, ev.BlocksEvicted)]


def test_a_request_of_the_same_step_reuses_blocks_that_a_load_inside_the_step_brings() -> None:
    """As with LMCache or ExampleConnector: vLLM names the loaded blocks at once, and the next request hits them."""
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), TapSettings("", "vllm", BLOCK, 8, medium="CPU"))
    tell(watch, ["all", [], True, 0, [[], []], [["CPU", [77]]]])
    tell(watch, ["new", "a", [77], 24, 1, 0, None], ["new", "b", [77], 24, 1, 0, None])
    tell(watch, ["lookup", "a", 0, BLOCK, False], ["alloc", "a", [1, 2], BLOCK],
         ["lookup", "b", BLOCK, 0, False], ["alloc", "b", [1, 3], 0],
         ["step", [["a", [1, 2], BLOCK, 8, 24], ["b", [1, 3], BLOCK, 8, 24]], [], [], [], [], [], 2, []])
    state = watch.leader.state
    assert watch.rejected == []
    assert state.lost_sources == {}
    assert state.totals.hit_blocks[:2] == [1, 1]
    assert [slot.device_blocks for slot in state.slots.values()] == [[1, 2], [1, 3]]
    assert not state.operations


def test_blocks_of_an_ended_request_stay_until_they_were_sent() -> None:
    """Older releases of OffloadingConnector keep all blocks of a request that ends, also without a prefix cache."""
    settings = TapSettings("", "vllm", BLOCK, 8, medium="CPU", caching=False)
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK, caching=False), settings)
    tell(watch, ["all", [], True, 0, [[], []], []])
    tell(watch, ["new", "a", [77], 24, 1, 0, None], ["lookup", "a", 0, 0, False], ["alloc", "a", [1, 2], 0])
    tell(watch, ["step", [["a", [1, 2], 0, 24, 24]], [], [], [], [], [], 1, []])
    tell(watch, ["finish", "a", "FINISHED_LENGTH_CAPPED", True, 0])
    (slot,) = watch.leader.state.slots.values()
    assert (slot.state, slot.device_blocks) == (SlotState.FINISHING, [1, 2])
    tell(watch, ["copies", [], ["a"], [], []])
    assert not watch.leader.state.slots
    assert watch.rejected == []


def test_the_blocks_of_an_ended_request_do_not_stay_for_ever() -> None:
    """The report of the end of the copy may be lost; the next report of the whole engine ends the request."""
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), TapSettings("", "vllm", BLOCK, 8))
    tell(watch, ["all", [], True, 0, [[], []], None])
    tell(watch, ["new", "a", [77], 24, 1, 0, None], ["lookup", "a", 0, 0, False], ["alloc", "a", [1, 2], 0])
    tell(watch, ["step", [["a", [1, 2], 0, 24, 24]], [], [], [], [], [], 1, []])
    tell(watch, ["finish", "a", "FINISHED_LENGTH_CAPPED", True, 0])
    assert watch.leader.state.slots
    tell(watch, ["all", [], True, 2, [[], []], None])
    assert not watch.leader.state.slots


def tell(watch: Watching, *messages: list[Any]) -> None:
    """Messages of one step."""
    watch.now += 1_000
    watch.take([[message[0], watch.now, *message[1:]] for message in messages])
    assert not watch.translator.wants_all
