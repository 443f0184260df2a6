"""The mirror: its facts are the leader's, and the history beside them is bounded and invents nothing."""

from pathlib import Path

import pytest

from kvbm_console.analysis.lives import MOVES_MAX, STORY_MAX
from kvbm_console.analysis.waits import pinned
from kvbm_console.analysis.waits import waits_for as waits_of
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.ids import Authority, Measure, Route, SlotState, Tier
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import Disconnected, EventsArrived, GapSeen, SnapshotTaken
from tests.tui.desks import desk_of, everything, screen
from tests.tui.script import BLOCK, MS, S, Script, connected, opening, story
from tui.keys import press
from tui.model.history import HISTORY, LOG_MAX, PAST_MAX
from tui.model.mirror import Mirror
from tui.model.waits import sentences, waits_for

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def folded(script: Script, mono: int = 0) -> Mirror:
    mirror = Mirror()
    for item in opening(script):
        mirror.take(item, mono)
    return mirror


def test_facts_are_the_leaders() -> None:
    script = story()
    mirror = folded(script)
    assert mirror.state is not None
    assert digest(mirror.state) == digest(script.state)


WITHOUT_GAPS = [path for path in sorted(RECORDINGS.glob("*.mcap")) if not Recording.open(path).gaps]


@pytest.mark.parametrize("path", WITHOUT_GAPS, ids=lambda path: path.stem)
def test_facts_of_recordings_are_the_leaders_whatever_the_batches(path: Path) -> None:
    recording = Recording.open(path)
    mirror = Mirror()
    mirror.take(connected(recording=True), 0)
    mirror.take(SnapshotTaken(CacheState()), 0)
    for events in recording.events():
        state = mirror.state
        assert state is not None
        if events[0].seq != state.seq:
            mirror.take(GapSeen(state.seq, events[0].seq - 1, "not recorded"), 0)
            mirror.take(SnapshotTaken(recording.state_at(events[0].seq - 1)), 0)
        for size in (1, 7, len(events)):
            part, events = events[:size], events[size:]
            if part:
                mirror.take(EventsArrived(part), 0)
    assert mirror.broken is None
    assert mirror.state is not None
    assert digest(mirror.state) == digest(recording.state_at(recording.last_seq))
    assert set(mirror.lives) == set(mirror.state.slots)
    assert set(mirror.transfers) == set(mirror.state.candidates)
    assert mirror.decoding == sum(slot.state is SlotState.DECODING for slot in mirror.state.slots.values())


def test_lives_have_every_move_and_end() -> None:
    mirror = folded(story())
    done = next(life for life in mirror.past if life.request == "chat-0001.1")
    assert [move.state.label for move in done.moves] == ["initialized", "prefilling", "decoding", "finished"]
    assert done.closed_ns is not None
    assert not done.lost
    assert done.moves[1].start_ns - done.moves[0].start_ns == 5 * MS


def test_transfers_keep_their_stamps_and_rates() -> None:
    mirror = folded(story())
    ended = mirror.ended[0]
    assert (ended.started_ns or 0) - ended.planned_ns == MS
    assert (ended.ended_ns or 0) - (ended.started_ns or 0) == 3 * MS
    flow = mirror.flows.routes[Route.G1_G2]
    assert flow.moved_blocks == 7
    assert flow.times(mirror.now_ns(0)) == (4 * MS, 4 * MS)
    asked, hits = mirror.flows.hit_shares(mirror.now_ns(0))
    assert asked == 6 + 5 + 7
    assert hits == [0, 0, 0, 0]


def test_held_time_is_left_out_of_latencies() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    candidate = script.plan(slot, 2)
    hold = script.hold(slot)
    script.wait(500 * MS)
    script.release(hold, 500 * MS)
    operation = script.promote(candidate)
    script.start(operation)
    script.wait(2 * MS)
    script.complete(operation)
    mirror = folded(script)
    assert mirror.ended[-1].age(0) == 2 * MS
    life = mirror.lives[slot]
    assert life.held_ns(0, script.at_ns) == 500 * MS


def test_a_gap_is_remembered_and_not_interpolated() -> None:
    script = story()
    cut = len(script.events) - 20
    mirror = Mirror()
    mirror.take(connected(), 0)
    mirror.take(SnapshotTaken(CacheState()), 0)
    mirror.take(EventsArrived(script.events[:cut]), 0)
    before_ns = script.events[cut - 1].at_ns
    mirror.take(GapSeen(cut, len(script.events) - 1, "ring overrun"), 5 * S)
    mirror.take(script.snapshot(), 5 * S)
    assert mirror.state is not None
    assert digest(mirror.state) == digest(script.state)
    assert mirror.lost_events == 20
    assert (mirror.gaps[0].start_ns, mirror.gaps[0].end_ns) == (before_ns, script.at_ns - 100 * MS)
    assert mirror.lost_age_ns(7 * S) == 2 * S
    assert set(mirror.lives) == set(script.state.slots)


def test_a_slot_that_vanished_in_a_gap_has_an_unknown_end() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    mirror = folded(script)
    seen_ns = script.at_ns
    script.wait(S)
    script.finish(slot)
    mirror.take(GapSeen(mirror.state.seq if mirror.state else 0, script.state.seq - 1, "ring overrun"), 0)
    mirror.take(script.snapshot(), 0)
    assert mirror.past[-1].lost
    assert mirror.past[-1].closed_ns == seen_ns


def test_a_snapshot_that_skips_events_without_a_gap_is_told_as_a_loss() -> None:
    script = story()
    mirror = Mirror()
    mirror.take(connected(), 0)
    mirror.take(SnapshotTaken(CacheState()), 0)
    mirror.take(EventsArrived(script.events[:10]), 0)
    mirror.take(script.snapshot(), 0)
    assert mirror.lost_events == len(script.events) - 10


def test_another_incarnation_begins_anew() -> None:
    mirror = folded(story())
    mirror.take(Disconnected("gone", 1.0), 0)
    mirror.take(connected(incarnation="two"), 0)
    assert mirror.state is None
    assert not mirror.lives
    assert mirror.lost_events == 0


def test_an_event_that_does_not_fit_is_told_and_stops_the_fold() -> None:
    script = story()
    mirror = folded(script)
    mirror.take(EventsArrived([ev.SlotClosed(script.state.seq + 3, script.at_ns, 0, 0)]), 0)
    assert mirror.broken is not None
    assert "does not fit" in mirror.broken


def test_history_is_bounded() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    for _ in range(MOVES_MAX):
        script.wait(MS)
        script.move(slot, SlotState.SKIPPED_DECODE)
        script.move(slot, SlotState.DECODING)
    for index in range(PAST_MAX + 10):
        other = script.open(f"b{index}", 1)
        script.move(other, SlotState.FINISHED)
        script.emit(ev.SlotClosed, other)
    mirror = folded(script)
    life = mirror.lives[slot]
    assert len(life.moves) <= MOVES_MAX
    assert life.dropped > 0
    assert len(life.story) == STORY_MAX
    assert len(mirror.past) == PAST_MAX
    assert mirror.log.maxlen == LOG_MAX
    assert mirror.log_total == len(script.events)


def test_what_a_slot_waits_for_is_one_thing() -> None:
    script = story()
    mirror = folded(script)
    assert mirror.state is not None
    told = {slot.request: waits_for(mirror, slot, 0) for slot in mirror.state.slots.values()}
    assert told == {
        "rag-0002.7": "", "agent-0003.2": "breakpoint 1, 30 s left", "chat-0004.1": "first scheduling",
    }
    held = mirror.state.slots[script.state.slot_of["agent-0003.2"]]
    assert sentences(mirror, held, 0) == ["you; then the next iteration", "pins 8 G1 blocks until then"]
    assert pinned(mirror.state, held) == [("G1", 8)]


def test_a_silent_rank_is_named() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    operation = script.promote(script.plan(slot, 2))
    script.start(operation)
    script.emit(ev.OperationReported, operation, 0, True, "", b"")
    script.emit(ev.OperationReported, operation, 2, True, "", b"")
    script.move(slot, SlotState.FINISHING)
    mirror = folded(script)
    assert mirror.state is not None
    assert waits_for(mirror, mirror.state.slots[slot], 0) == f"op {operation} silent on rank 1"


def test_blocks_wanted_and_free_are_told() -> None:
    script = Script()
    script.pools()
    first = script.open("big", 60)
    script.admit(first)
    waiting = script.open("next", 10, 0)
    mirror = folded(script)
    assert mirror.state is not None
    assert waits_for(mirror, mirror.state.slots[waiting], 0) == "10 G1 blocks, 3 free"


def test_tokens_are_counted_from_prefills_and_decodes() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    prompt = script.state.slots[slot].prompt_tokens
    script.iterate(count=10)
    mirror = folded(script)
    assert mirror.flows.tokens.total(60, script.at_ns) == prompt + 10
    assert prompt == 4 * BLOCK + 5


def test_every_kind_of_history_is_an_event() -> None:
    assert all(issubclass(kind, ev.Event) for kind in HISTORY)
    assert Tier.G1 in {pool.info.tier for pool in story().state.pools}


def test_a_request_waits_for_a_seat_while_the_engine_runs_as_many_as_it_may() -> None:
    script = Script()
    script.pools()
    script.emit(ev.EngineMeasured, 1, (Measure.RUNNING_MOST,), (2,))
    first = script.run("chat.1")
    waiting = script.open("chat.2")
    assert waits_of(script.state, script.state.slots[waiting]) == "first scheduling"
    script.run("chat.3")
    assert waits_of(script.state, script.state.slots[waiting]) == "a seat, all 2 are taken"
    script.move(first, SlotState.PREEMPTED)
    assert waits_of(script.state, script.state.slots[waiting]) == "first scheduling"
    assert waits_of(script.state, script.state.slots[first]) == "next scheduling"


def test_the_capacity_of_a_tapped_host_tier_is_the_one_that_the_tap_tells() -> None:
    """Its blocks come with an event stream, which tells no capacity."""
    script = Script()
    script.emit(ev.PoolKnown, 0, 1, 0, 0, Tier.G2, "CPU", None, BLOCK, Authority.STREAM)
    script.emit(ev.PoolKnown, 1, 1, 0, 0, Tier.G1, "GPU", 64, BLOCK, Authority.OBSERVED)
    script.emit(ev.EngineMeasured, 1, (Measure.HOST_CAPACITY_BLOCKS, Measure.RUNNING_MOST), (400, 16))
    script.emit(ev.BlocksSeen, 0, pack_hashes(range(1, 101)), b"", False)
    script.run("chat.1")
    desk = desk_of(script)
    (line,) = [line for line in screen(desk) if line.startswith(" G2 CPU")]
    assert "25 %" in line
    assert "100/400" in line
    press(desk, "6")
    tiers = everything(desk, 120, 50)
    assert "at most 16 running" in tiers
    assert "G2 CPU                     100/400" in tiers
