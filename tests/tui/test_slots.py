"""The shares of a prompt that the console draws are those that ``why`` tells.

Law of this file: after every admission of every request of every committed recording, and of runs of the simulated
engine, bar and explanation say the same number of blocks for every tier.
"""

from pathlib import Path

import pytest

from kvbm_console.analysis.explain.course import Course
from kvbm_console.analysis.walk import Evidence, Visitor, evidence_of, walk
from kvbm_console.core import events as ev
from kvbm_console.core.ids import SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from tests.analysis.evidence import evidence
from tests.recording.helpers import real_run
from tests.tui.desks import desk_of, everything
from tests.tui.script import Script
from tui.model.slots import prompt_of

RECORDINGS = Path(__file__).parents[2] / "recordings"
MADE = sorted(RECORDINGS.rglob("*.mcap"))
Blocks = tuple[int, ...]


class Drawn(Visitor):
    """Blocks by tier that the bar shows for each admission of each slot, as of the last event of that admission."""

    def __init__(self) -> None:
        super().__init__()
        self.bars: dict[int, list[Blocks]] = {}
        self.told: dict[int, list[Blocks]] = {}
        """The same as the moves of the slot tell it."""
        self.unknown: set[int] = set()
        """Slots whose beginning is not in the evidence."""
        self.after = {
            ev.PrefixScored: self._scored, ev.HitsLost: self._again, ev.SlotMoved: self._moved,
            ev.DeviceBlocksReleased: self._left,
        }

    def resumed(self, state: CacheState, gap: object) -> None:
        self.unknown |= set(state.slots)

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        self.bars.setdefault(e.slot, []).append(_bar(state, e.slot))
        self.told.setdefault(e.slot, []).append(())

    def _again(self, e: ev.HitsLost, state: CacheState) -> None:
        self.bars[e.slot][-1] = _bar(state, e.slot)
        self.told[e.slot][-1] = ()  # a move before the loss told of blocks that are taken back; the next is compared

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        slot = state.slots[e.slot]
        if e.slot in self.bars and slot.device_blocks:
            assert self.bars[e.slot][-1] == _bar(state, e.slot)
            size = prompt_of(state, slot).block_tokens
            self.told[e.slot][-1] = tuple(tokens // size for tokens in e.cached)
        elif e.new is SlotState.PREEMPTED:
            prompt = prompt_of(state, slot)
            assert (sum(prompt.found), prompt.computed, prompt.reached) == (0, 0, 0)

    def _left(self, e: ev.DeviceBlocksReleased, state: CacheState) -> None:
        slot = state.slots[e.slot]
        prompt = prompt_of(state, slot)
        assert sum(prompt.found) + prompt.computed + prompt.to_do == slot.prompt_tokens


def _bar(state: CacheState, slot: int) -> Blocks:
    prompt = prompt_of(state, state.slots[slot])
    return tuple(tokens // prompt.block_tokens for tokens in prompt.found)


def compare(of: Evidence, *, moves: bool) -> int:
    """Compares all admissions of known slots, and with ``moves`` their moves; the number of those with a hit."""
    drawn = Drawn()
    walk(of, (drawn,))
    courses = {slot: Course(slot, None) for slot in drawn.bars if slot not in drawn.unknown}
    walk(of, tuple(courses.values()))
    hits = 0
    for slot, course in courses.items():
        why = [tuple(scored.hits) for scored in course.scored]
        assert drawn.bars[slot] == why, f"slot {slot} of {of.name}"
        if moves:
            assert all(told in ((), found) for told, found in zip(drawn.told[slot], why, strict=True)), (slot, why)
        hits += sum(any(found) for found in why)
    return hits


@pytest.mark.parametrize("path", MADE, ids=lambda path: str(path.relative_to(RECORDINGS)))
def test_the_bar_of_every_request_is_what_why_tells(path: Path) -> None:
    compare(evidence_of(Recording.open(path)), moves=path.parent.name != "versions")


@pytest.mark.parametrize(("g1", "g2"), [(48, 96), (40, 16), (64, 0)])
def test_the_bar_of_a_simulated_run_is_what_why_tells(g1: int, g2: int) -> None:
    run = real_run(24, g1, g2)
    assert any(isinstance(event, ev.SlotMoved) and event.new is SlotState.PREEMPTED for event in run.all_events)
    assert compare(evidence(run.all_events, run.config), moves=True) > 10


def test_a_prefix_found_in_device_memory_is_no_computed_one() -> None:
    script = Script()
    script.pools()
    slot = script.open("chat-1", 6)
    script.admit(slot, (4, 0, 0, 0))
    script.move(slot, SlotState.PREFILLING)
    script.iterate((slot, script.state.slots[slot].prompt_tokens))
    desk = desk_of(script)
    desk.select("chat-1")
    desk.go(2)
    assert "G1 4   ▄ G2 0" in everything(desk), everything(desk)
    assert "computed 2" in everything(desk)
