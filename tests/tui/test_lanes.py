"""Lanes: as few as there can be, none with two requests at once, and counters that are what the facts were.

Law of this file: the counters are recomputed from the events by another way.
"""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.analysis.lives import Life, Move
from kvbm_console.core.ids import SlotState
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import Connected, EventsArrived, SnapshotTaken
from tests.tui.desks import desk_of, screen
from tests.tui.script import S, Script, connected
from tui.desk import TIMELINE
from tui.draw.lifeline import Lifelines, Window
from tui.keys import press
from tui.model.slots import limits
from tui.views.lanes import lane_cells, lanes_of, level_cells
from tui.views.timeline import Timeline

RUN = Path(__file__).resolve().parents[2] / "recordings" / "screens" / "run.mcap"
SPANS = some.lists(some.tuples(some.integers(0, 60), some.integers(1, 20), some.booleans()), max_size=40)


def life(number: int, start: int, length: int, live: bool) -> Life:
    one = Life(number, f"r{number}", start)
    one.add(Move(start, SlotState.DECODING, number))
    if not live:
        one.close(start + length)
    return one


@given(SPANS)
@settings(max_examples=200, deadline=None)
def test_lanes_are_as_many_as_requests_at_once(spans: list[tuple[int, int, bool]]) -> None:
    now = 100
    lives = [life(number, *span) for number, span in enumerate(spans)]
    lanes = lanes_of(lives, now)
    assert sorted(one.slot for lane in lanes for one in lane) == sorted(one.slot for one in lives)
    ends = {one.slot: now + 1 if one.closed_ns is None else one.closed_ns for one in lives}
    for lane in lanes:
        for before, after in itertools.pairwise(lane):
            assert ends[before.slot] <= after.opened_ns
    most = max((sum(one.opened_ns <= at < ends[one.slot] for one in lives) for at in range(now + 1)), default=0)
    assert len(lanes) == most


def test_the_whole_run_is_on_the_screen_and_every_cell_is_the_state_of_one_of_the_lane() -> None:
    tape = Recording.open(RUN)
    desk = desk_of(items=[
        Connected("x", tape.incarnation, 1, False, None, True, tape.config, tape.clock_anchor_ns),
        SnapshotTaken(tape.state_at(tape.first_seq - 1)),
        *(EventsArrived(events) for events in tape.events(tape.first_seq)),
    ])
    desk.go(TIMELINE)
    press(desk, "z")
    for size in ((80, 24), (120, 40), (200, 60)):
        text = "\n".join(screen(desk, *size))
        assert "177 requests in 12 lanes" in text
        assert "hit rate" in text or size[1] < 36
    view = desk.view
    assert isinstance(view, Timeline)
    window = view.window
    first = min(one.first_known_ns() for one in (*desk.mirror.lives.values(), *desk.mirror.past))
    assert window.start_ns <= first
    assert window.end_ns >= desk.now_ns
    alone, bounds = Lifelines(), limits(desk.mirror)
    for lane in lanes_of([*desk.mirror.lives.values(), *desk.mirror.past], desk.now_ns):
        codes, _ = lane_cells(lane, Lifelines(), window, bounds)
        each = [bytes(alone.codes(one, window, bounds)[0]) for one in lane]
        for cell, code in enumerate(codes):
            assert code in {known[cell] for known in each}
    gauge = desk.mirror.flows.occupancy[0]
    pool = desk.mirror.facts.pools[0]
    second = (tape.state_at(8_000).at_ns // S) * S
    at = next(event.seq for events in tape.events() for event in events if event.at_ns >= second)
    resident = tape.state_at(at - 1).pools[0].resident_blocks
    cells = level_cells(gauge, Window(second, S // 2, 2, desk.now_ns))
    assert cells == [pytest.approx(resident / (pool.info.capacity_blocks or 1))] * 2


def test_a_jam_is_a_track() -> None:
    script = Script()
    script.pools()
    for number in range(3):
        script.open(f"stuck-{number}", 2)
        script.wait(S)
    script.wait(6 * S + S // 10)  # the last cell is not only its beginning
    script.iterate()
    desk = desk_of(script, items=[connected(), SnapshotTaken(CacheState()), EventsArrived(script.events)])
    desk.go(TIMELINE)
    press(desk, "z")
    rows = screen(desk, 120, 40)
    row = next(row for row in rows if row.startswith(" waiting"))
    assert "at most 3" in row
    levels = [cell for cell in row[26:] if cell.strip()]
    assert [cell for at, cell in enumerate(levels) if not at or levels[at - 1] != cell] == ["▂", "▄", "▆"]


def test_nobody_is_said_to_have_waited_before_all_requests_are_known() -> None:
    script = Script()
    script.pools()
    for number in range(3):
        script.open(f"stuck-{number}", 2)
    script.wait(9 * S)
    script.iterate()
    begun_ns = script.state.at_ns
    facts = decode_facts(encode_facts(script.state))
    later = len(script.events)
    for _ in range(3):
        script.wait(S)
        script.iterate()
    desk = desk_of(script, items=[connected(), SnapshotTaken(facts), EventsArrived(script.events[later:])])
    desk.go(TIMELINE)
    press(desk, "z")
    row = next(row for row in screen(desk, 120, 40) if row.startswith(" waiting"))
    assert "at most 3" in row
    assert isinstance(desk.view, Timeline)
    window = desk.view.window
    assert window.start_ns < S
    assert row[26:].index("▆") == (begun_ns - window.start_ns) // window.cell_ns
