"""Finished requests: each value is recomputed from the recording by another way, and each can be found.

Law of this file: what the list shows is what ``analysis.requests`` tells of the same events.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.core import events as ev
from kvbm_console.core.ids import SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import Connected, EventsArrived, SnapshotTaken
from tests.tui.desks import desk_of, everything, screen
from tests.tui.script import MS, Script, connected
from tui.desk import FINISHED, SLOT, Desk
from tui.keys import press
from tui.model.mirror import Mirror
from tui.model.waits import queue_of, waits_for
from tui.views.finished import FinishedList

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def desk_on(name: str) -> tuple[Desk, Recording]:
    tape = Recording.open(RECORDINGS / f"{name}.mcap")
    items = [
        Connected("x", tape.incarnation, 1, False, None, True, tape.config, tape.clock_anchor_ns),
        SnapshotTaken(tape.state_at(tape.first_seq - 1)),
        *(EventsArrived(events) for events in tape.events(tape.first_seq)),
    ]
    desk = desk_of(items=items)
    press(desk, "d")
    return desk, tape


@pytest.mark.parametrize("name", ["thrash", "preempt-and-resume", "screens/run", "two-hosts", "clone"])
def test_the_list_tells_what_the_summaries_of_the_recording_tell(name: str) -> None:
    desk, tape = desk_on(name)
    requests = Requests()
    walk(evidence_of(tape), [requests])
    ended = {each.slot: each for each in requests.all if each.ended_ns is not None}
    view = desk.view
    assert isinstance(view, FinishedList)
    listed = view.listed(desk)
    assert {done.life.slot for done in listed} == set(ended)
    for done in listed:
        summary = ended[done.life.slot]
        assert done.took_ns == summary.time_ns(0)
        first = summary.first_token_ns
        assert done.ttft_ns == (None if first is None else first - summary.arrived_ns)
        assert done.preemptions == summary.preemptions
        if summary.admissions == 1 and not summary.lost_blocks and done.scored is not None:
            assert list(done.scored.hits) == summary.hits
    for size in ((80, 24), (120, 40), (200, 60)):
        assert all(done.life.request in everything(desk, *size) for done in listed[:5])


def test_the_slowest_and_the_fewest_hits_come_first_and_a_name_is_found() -> None:
    desk, _ = desk_on("screens/run")
    view = desk.view
    assert isinstance(view, FinishedList)
    screen(desk, 120, 40)
    while view.order.text != "slowest":
        press(desk, "o")
    took = [done.took_ns or 0 for done in view.listed(desk)]
    assert took == sorted(took, reverse=True)
    while view.order.text != "fewest hits":
        press(desk, "o")
    shares = [done.share for done in view.listed(desk) if done.share is not None]
    assert shares == sorted(shares)
    name = view.listed(desk)[-1].life.request
    for key in ("/", *name, "enter"):
        press(desk, key)
    found = view.listed(desk)
    assert found
    assert all(name in done.life.request for done in found)
    press(desk, "enter")
    assert desk.current == SLOT
    assert desk.selected == found[0].life.request


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_head_of_the_list_is_never_cut(width: int) -> None:
    desk, _ = desk_on("screens/run")
    desk.mirror.archive.forgotten = 1_932
    assert "sorted by last ended" in screen(desk, width, 24)[2]
    assert ("1,932 older forgotten" in screen(desk, width, 24)[2]) == (width > 60)
    for key in ("/", *"slot > 0 and age > 1ms and slot < 90000", "enter"):
        press(desk, "space" if key == " " else key)
    assert re.search(r" \d+ match\b", screen(desk, width, 24)[2])


def test_the_palette_finds_requests_by_name() -> None:
    desk, _ = desk_on("screens/run")
    view = desk.views[FINISHED]
    assert isinstance(view, FinishedList)
    name = view.listed(desk)[3].life.request
    for key in (":", *name):
        press(desk, key)
    assert any(name in row and "finished" in row for row in screen(desk, 120, 40))
    press(desk, "enter")
    assert (desk.current, desk.selected) == (SLOT, name)


def test_a_request_waits_for_its_place_in_the_queue_and_for_the_head_of_it() -> None:
    script = Script()
    script.pools()
    running = script.run("busy", 4)
    script.admit(script.open("filler", 52))
    head = script.open("first-one", 20)
    script.wait(MS)
    last = script.open("second-one", 2)
    desk = desk_of(script, items=[connected(), SnapshotTaken(CacheState()), EventsArrived(script.events)])
    mirror, mono = desk.mirror, desk.mono()
    assert mirror.facts.slots[running].state is SlotState.DECODING
    blocks = waits_for(mirror, mirror.facts.slots[head], mono)
    assert "first of" in blocks
    assert "free" in blocks
    waits = waits_for(mirror, mirror.facts.slots[last], mono)
    assert "in the queue; first" in waits
    assert "free" in waits


@pytest.mark.parametrize("path", [RECORDINGS / "screens" / "run.mcap", *RECORDINGS.glob("**/preempt-loop.mcap")],
                         ids=lambda path: path.stem)
def test_places_in_the_queue_are_the_order_of_the_admissions_that_follow(path: Path) -> None:
    """The screen knows the past alone, and the recording who was admitted next."""
    tape = Recording.open(path)
    events = [event for batch in tape.events() for event in batch]
    admitted: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, ev.PrefixScored):
            admitted[event.slot].append(event.seq)
    mirror, checked = Mirror(), 0
    mirror.take(connected(recording=True), 0)
    mirror.take(SnapshotTaken(tape.state_at(tape.first_seq - 1)), 0)
    for event in events:
        mirror.take(EventsArrived([event]), event.at_ns)
        if not isinstance(event, ev.IterationAdvanced):
            continue
        for source in {slot.source for slot in mirror.facts.slots.values()}:
            queue = queue_of(mirror, mirror.facts, source)
            places = {} if queue is None else queue.place
            following = {slot: next((seq for seq in admitted[slot] if seq > event.seq), None) for slot in places}
            known = [slot for slot in sorted(places, key=places.__getitem__) if following[slot] is not None]
            assert known == sorted(known, key=lambda slot: following[slot] or 0), event.seq
            checked += len(known) > 1
    assert checked > 100
