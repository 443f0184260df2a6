"""Sampling: above a share of a core facts come as snapshots; moves, holds and copies are still all there."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.analysis.lives import Life
from kvbm_console.core.events import Event, SlotHeld
from kvbm_console.core.ids import SlotState
from kvbm_console.core.snapshots import digest
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import BatchArrived, EventsArrived, FeedItem, Heartbeat, SnapshotTaken
from kvbm_console.wire.batches import UnreadBatch, pack_events
from kvbm_console.wire.v1 import console_pb2 as pb
from tests.tui.desks import Desk, FakeActions
from tests.tui.script import Mono, connected
from tui import source
from tui.keys import press
from tui.model import coverage as pace
from tui.model.coverage import SamplingPace
from tui.model.mirror import Mirror
from tui.source import TargetSession
from tui.views import all_views

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
NAMES = ("offload-pressure", "preempt-and-resume", "breakpoint-hold", "onboard-from-host")
S = 1_000_000_000


def begun(tape: Recording) -> Mirror:
    mirror = Mirror()
    mirror.take(connected(), 0)
    mirror.take(SnapshotTaken(tape.state_at(tape.first_seq)), 0)
    return mirror


def events_of(tape: Recording) -> list[Event]:
    return [event for batch in tape.events(tape.first_seq + 1) for event in batch]


def history(mirror: Mirror) -> dict[int, Any]:
    """A mirror's knowledge of slots: their moves, holds, copies and ends."""
    return {
        life.slot: (
            [(move.start_ns, move.state, move.seq) for move in life.moves],
            [(stay.hold, stay.start_ns, stay.end_ns) for stay in life.stays],
            [(one.candidate, one.operation, one.blocks, one.planned_ns, one.promoted_ns, one.started_ns, one.ended_ns)
             for one in life.transfers],
            life.closed_ns, life.lost,
        ) for life in [*mirror.lives.values(), *mirror.past]
    }


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(data=st.data())
def test_history_is_the_same_whether_events_are_folded_or_sampled(name: str, data: st.DataObject) -> None:
    tape = Recording.open(RECORDINGS / f"{name}.mcap")
    events = events_of(tape)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), min_size=1, max_size=6), label="cuts"))
    exact, sampled = begun(tape), begun(tape)
    exact.take(EventsArrived(events), 0)
    at = 0
    for index, cut in enumerate([*cuts, len(events)]):
        sampled.sampling = index % 2 == 0
        for first in range(at, cut, 50):
            sampled.take(EventsArrived(events[first : min(cut, first + 50)]), 0)
        at = cut
        if sampled.sampled:
            sampled.take(SnapshotTaken(tape.state_at(sampled.next_seq - 1)), 0)
    assert sampled.broken is None
    assert exact.state is not None
    assert sampled.state is not None
    assert digest(sampled.state) == digest(exact.state)
    assert sampled.lost_events == 0
    assert history(sampled) == history(exact)
    assert set(sampled.transfers) == set(exact.transfers)
    assert sampled.flows.hit_shares(sampled.state.at_ns) == exact.flows.hit_shares(exact.state.at_ns)
    moved = {route: flow.moved_blocks for route, flow in exact.flows.routes.items()}
    assert {route: flow.moved_blocks for route, flow in sampled.flows.routes.items()} == moved


def unread(events: list[Event]) -> BatchArrived:
    return BatchArrived(UnreadBatch(pb.EventBatch.FromString(pack_events(events).data)))


STEP = st.sampled_from(["fold", "look", "pass", "facts"])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(data=st.data())
def test_what_was_passed_over_is_counted_and_nothing_is_made_up_for_it(name: str, data: st.DataObject) -> None:
    tape = Recording.open(RECORDINGS / f"{name}.mcap")
    events = events_of(tape)
    exact, sampled = begun(tape), begun(tape)
    exact.take(EventsArrived(events), 0)
    at, passed = 0, 0
    while at < len(events):
        step, size = data.draw(STEP), data.draw(st.integers(1, 60))
        part = events[at : at + size]
        if step == "facts":
            if sampled.sampled:
                sampled.take(SnapshotTaken(tape.state_at(sampled.next_seq - 1)), 0)
            continue
        sampled.sampling, sampled.affords = step != "fold", step != "pass"
        before = sampled.coverage.passed
        sampled.take(unread(part) if data.draw(st.booleans()) else EventsArrived(part), 0)
        passed += 0 if sampled.coverage.passed == before else len(part)
        at += len(part)
    if sampled.sampled:
        sampled.take(SnapshotTaken(tape.state_at(sampled.next_seq - 1)), 0)
    assert (sampled.broken, sampled.lost_events, list(sampled.gaps)) == (None, 0, [])
    assert exact.state is not None
    assert sampled.state is not None
    now = exact.state.at_ns
    assert digest(sampled.state) == digest(exact.state)
    assert sampled.coverage.passed == passed == sum(one.count for one in sampled.coverage.stretches)
    assert sampled.log_total == exact.log_total == len(events)
    assert sum(sampled.density.counts) == sum(exact.density.counts)
    for flows in (sampled.flows, exact.flows):
        assert flows.asked.total(600, now) == exact.flows.asked.total(600, now)
        assert [one.total(600, now) for one in flows.hits.values()] == [
            one.total(600, now) for one in exact.flows.hits.values()]
        assert {route: one.moved_blocks for route, one in flows.routes.items() if one.moved_blocks} == {
            route: one.moved_blocks for route, one in exact.flows.routes.items() if one.moved_blocks}
    known = {life.slot: life for life in (*exact.past, *exact.lives.values())}
    times = [event.at_ns for event in events[:: max(1, len(events) // 60)]]
    for life in (*sampled.past, *sampled.lives.values()):
        whole = known[life.slot]
        assert {move.seq for move in life.moves} - {None} <= {move.seq for move in whole.moves}
        for when in times:
            ended = life.lost and life.closed_ns is not None and when >= life.closed_ns
            if when >= life.first_known_ns() and life.seen_at(when) and not ended:
                assert state_at(life, when) == state_at(whole, when)
    for transfer in sampled.transfers.values():
        assert transfer.candidate in sampled.state.candidates


def state_at(life: Life, when: int) -> SlotState | None:
    """The state at a time; of the moves of one instant the last."""
    index = life.at(when)
    return life.moves[index].state if index is not None else None


def test_without_passing_anything_over_nothing_is_an_estimate() -> None:
    tape = Recording.open(RECORDINGS / "offload-pressure.mcap")
    events, mirror = events_of(tape), begun(tape)
    mirror.sampling = True
    mirror.take(EventsArrived(events[:60]), 0)
    mirror.take(SnapshotTaken(tape.state_at(mirror.next_seq - 1)), 0)
    now = mirror.clock.now(0)
    assert (mirror.coverage.one_in(), mirror.flows.about(now)) == (None, "")
    tokens = mirror.flows.tokens.total(60, now)
    mirror.take(EventsArrived(events[60:100]), 0)
    mirror.affords = False
    mirror.take(EventsArrived(events[100:220]), 0)
    seen = mirror.flows.tokens.total(60, mirror.clock.now(0)) - tokens
    mirror.take(SnapshotTaken(tape.state_at(mirror.next_seq - 1)), 0)
    now = mirror.clock.now(0)
    assert (mirror.coverage.one_in(), mirror.flows.about(now)) == (2, "~")  # 100 of 220
    assert seen > 0
    assert mirror.flows.tokens.total(60, now) - tokens == pytest.approx(4 * seen)  # 40 stood for 160


def test_the_screen_says_what_was_passed_over() -> None:
    tape = Recording.open(RECORDINGS / "offload-pressure.mcap")
    events, mirror, mono = events_of(tape), begun(tape), Mono(0)
    desk = Desk(mirror, FakeActions(), mono, all_views())
    mirror.take(EventsArrived(events[:100]), 0)
    mirror.sampling = True
    mirror.take(EventsArrived(events[100:140]), 0)
    mirror.affords = False
    for first in (140, 160, 180):
        mirror.take(unread(events[first : first + 20]), 0)
    mirror.take(Heartbeat(mirror.next_seq - 1, mirror.clock.now(0), None, None, None, None, 0, 1), 0)
    mono.at_ns = 4 * S // 10
    assert desk.draw(80, 24)[0].text.startswith(" SAMPLED 1/2  ")
    assert desk.draw(120, 40)[0].text.startswith(" SAMPLED 1/2 0.4s ")  # 40 of 100
    press(desk, "9")
    first, last = events[140].seq, events[199].seq
    told = f"passed over 60: {first} to {last}; not lost"
    assert [line.text for line in desk.draw(120, 40)][-2].startswith(f" ░░ {told}")
    mirror.affords = True
    mirror.take(SnapshotTaken(tape.state_at(mirror.next_seq - 1)), mono.at_ns)
    mirror.take(EventsArrived(events[200:210]), 0)
    shown = [line.text for line in desk.draw(120, 40)]
    assert sum(told in text for text in shown) == 1
    assert told in shown[-12]
    press(desk, "4")
    assert "passed over" in "\n".join(line.text for line in desk.draw(200, 40)[:6])


@pytest.mark.parametrize("name", ["multiturn", "offload_lru"])
@pytest.mark.parametrize("step", [1, 7, 1_000])
def test_the_flow_of_event_streams_is_the_same_sampled(name: str, step: int) -> None:
    tape = Recording.open(RECORDINGS / "kv-events" / f"{name}.mcap")
    events = events_of(tape)
    exact, sampled = begun(tape), begun(tape)
    exact.take(EventsArrived(events), 0)
    sampled.sampling = True
    for first in range(0, len(events), step):
        sampled.take(EventsArrived(events[first : first + step]), 0)
        sampled.take(SnapshotTaken(tape.state_at(sampled.next_seq - 1)), 0)
    assert exact.state is not None

    def flow(mirror: Mirror) -> list[dict[int, float]]:
        at = events[-1].at_ns
        return [{pool: one.total(600, at) for pool, one in kind.items()}
                for kind in (mirror.flows.stored, mirror.flows.evicted)]

    assert flow(sampled) == flow(exact)
    assert sum(flow(exact)[1].values()) == sum(exact.state.totals.evicted_blocks) > 0


def test_the_screen_says_that_facts_are_sampled_and_how_old_they_are() -> None:
    tape = Recording.open(RECORDINGS / "offload-pressure.mcap")
    events, mirror, mono = events_of(tape), begun(tape), Mono(0)
    desk = Desk(mirror, FakeActions(), mono, all_views())
    mirror.sampling = True
    mirror.take(EventsArrived(events[:100]), 0)
    mirror.take(Heartbeat(mirror.next_seq - 1, mirror.clock.now(0), None, None, None, None, 0, 1), 0)
    mono.at_ns = 4 * S // 10
    assert desk.draw(120, 40)[0].text.startswith(" SAMPLED 0.4s ")
    mirror.take(SnapshotTaken(tape.state_at(mirror.next_seq - 1)), mono.at_ns)
    assert desk.draw(120, 40)[0].text.startswith(" LIVE ")


def test_a_snapshot_that_comes_twice_keeps_the_history() -> None:
    tape = Recording.open(RECORDINGS / "offload-pressure.mcap")
    events, mirror = events_of(tape), begun(tape)
    mirror.take(EventsArrived(events), 0)
    before = history(mirror)
    mirror.take(SnapshotTaken(tape.state_at(events[-1].seq)), 0)
    assert history(mirror) == before


def test_pace_samples_above_its_share_and_folds_again_well_below() -> None:
    one, now = SamplingPace(), 0
    def second(events: int, each_ns: int) -> bool:
        nonlocal now
        for _ in range(20):
            now += S // 20
            one.worked(events // 20, events // 20 * each_ns, now)
        return one.sampling
    assert not second(10_000, 5_000)  # 5 % of a core
    assert second(100_000, 5_000)  # 50 %
    assert second(100_000, 800)  # cheap now, because it samples: folding would cost 50 % again
    assert second(20_000, 800)  # folding would cost 10 %: between the two bounds it stays as it is
    assert not second(10_000, 800)
    assert not second(20_000, 5_000)
    assert not second(2_000, 100_000)  # dear, because the machine is crowded: sampling would save nothing
    assert second(100_000, 5_000)
    assert not second(0, 0)  # the flood is over: heartbeats alone say so


def test_snapshots_come_less_often_the_more_they_cost() -> None:
    cheap, dear = SamplingPace(), SamplingPace()
    cheap.snapshot(1_000_000, 0)
    dear.snapshot(12_500_000, 0)
    assert not cheap.due(pace.REFRESH_NS - 1)
    assert cheap.due(pace.REFRESH_NS)
    assert not dear.due(S)
    assert dear.due(2 * S)
    assert not cheap.due(pace.REFRESH_NS + 1)  # asked for already
    assert not cheap.due(pace.REFRESH_NS + 1, urgent=True)


def test_a_hold_does_not_wait_for_the_next_snapshot_but_holds_do_not_make_a_flood_of_them() -> None:
    one = SamplingPace()
    one.snapshot(1_000_000, 0)
    assert not one.due(pace.URGENT_NS, urgent=False)
    assert not one.due(pace.URGENT_NS - 1, urgent=True)
    assert one.due(pace.URGENT_NS, urgent=True)


class Tape:
    """A feed of a recording that can send the facts again."""

    def __init__(self, tape: Recording) -> None:
        self.tape = tape
        self.wanted = False
        self.refreshes = 0
        self.unread = False

    def refresh(self) -> None:
        self.wanted = True

    async def items(self) -> AsyncIterator[FeedItem]:
        yield connected()
        yield SnapshotTaken(self.tape.state_at(self.tape.first_seq))
        events = events_of(self.tape)
        for first in range(0, len(events), 10):
            batch = events[first : first + 10]
            yield unread(batch) if self.unread else EventsArrived(batch)
            if self.wanted:
                self.wanted = False
                self.refreshes += 1
                yield SnapshotTaken(self.tape.state_at(batch[-1].seq))
        for _ in range(40):  # nothing more happens: two seconds of heartbeats, which are all that is heard
            yield Heartbeat(self.tape.last_seq, 0, None, None, None, None, 0, 1)
            if self.wanted:
                self.wanted = False
                yield SnapshotTaken(self.tape.state_at(self.tape.last_seq))


async def breathe() -> None:
    await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_session_that_is_flooded_asks_for_facts_and_loses_nothing(
    kept: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "LOOK_SHARE", share)
    monkeypatch.setattr(pace, "SHARE_MAX", 0.0)
    monkeypatch.setattr(pace, "SHARE_BACK", 0.0)
    monkeypatch.setattr(pace, "RATE_MIN", 0)
    tape = Recording.open(RECORDINGS / "offload-pressure.mcap")
    feed, mono = Tape(tape), Mono(0)

    class Keeper:
        seqs: ClassVar[list[int]]

        def take(self, item: FeedItem, mirror: Mirror) -> None:
            assert not mirror.sampled
            if isinstance(item, EventsArrived):
                self.seqs += [event.seq for event in item.events]

    Keeper.seqs = []

    def tick() -> int:
        mono.at_ns += S // 20
        return mono.at_ns

    session = TargetSession(feed, mono=tick, keeper=Keeper() if kept else None)
    await session.run(breathe)
    mirror = session.mirror
    assert (mirror.broken, mirror.lost_events) == (None, 0)
    assert mirror.next_seq == tape.last_seq + 1
    if kept:  # who keeps what it sees folds every event, whatever it costs
        assert feed.refreshes == 0
        assert Keeper.seqs == list(range(tape.first_seq + 1, tape.last_seq + 1))
    else:
        assert feed.refreshes > 1
        assert (mirror.coverage.passed > 0) == (share == 0.0)
    assert not mirror.sampled, "behind the flood the facts are exact again"
    assert mirror.state is not None
    assert digest(mirror.state) == digest(tape.state_at(tape.last_seq))


@pytest.mark.asyncio
async def test_a_hold_that_is_passed_over_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOOK_SHARE", 0.0), ("SHARE_MAX", 0.0), ("SHARE_BACK", 0.0), ("RATE_MIN", 0),
                        ("REFRESH_NS", 3_600 * S), ("S", 3_600 * S)):
        monkeypatch.setattr(pace, name, value)
    tape = Recording.open(RECORDINGS / "breakpoint-hold.mcap")
    (held,) = [event.seq for event in events_of(tape) if isinstance(event, SlotHeld)]
    mono = Mono(0)

    def tick() -> int:
        mono.at_ns += S // 20
        return mono.at_ns

    session = TargetSession(Tape(tape), mono=tick)
    seen: list[tuple[int, int]] = []

    async def look() -> None:
        state = session.mirror.state
        if state is not None and state.holds:
            seen.append((session.mirror.next_seq, state.seq))

    await session.run(look)
    assert session.mirror.coverage.passed > 0
    assert seen[0][0] <= held + 11, "in the snapshot behind its batch of ten"


@pytest.mark.asyncio
@pytest.mark.parametrize("flooded", [False, True])
async def test_a_paused_view_catches_up_and_loses_nothing(flooded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(flooded)
    share_max = 0.0 if flooded else 1e9
    for name, value in (("LOOK_SHARE", 1.0), ("SHARE_MAX", share_max), ("SHARE_BACK", 0.0), ("RATE_MIN", 0)):
        monkeypatch.setattr(pace, name, value)
    tape = Recording.open(RECORDINGS / "thrash.mcap")
    mono = Mono(0)

    def tick() -> int:
        mono.at_ns += S // 20
        return mono.at_ns

    session = TargetSession(Tape(tape), mono=tick)
    mirror = session.mirror
    tasks: list[asyncio.Task[None]] = []

    def spawn(work: Awaitable[None], name: str) -> None:
        tasks.append(asyncio.ensure_future(work))

    def tell(text: str, role: str) -> None:
        raise AssertionError(text)

    session.attach(spawn, tell, lambda: None, lambda text: None, lambda name, table, picture: None)
    most = 0
    seen: tuple[int, int] | None = None

    async def press() -> None:
        nonlocal most, seen
        most = max(most, session.buffered)
        assert not session.overflowed
        if session.paused and seen is not None:
            assert (mirror.next_seq, mirror.version) == seen, "a paused view stands"
        if rng.random() < 0.15:
            session.pause(not session.paused)
        seen = (mirror.next_seq, mirror.version) if session.paused else None
        await asyncio.sleep(0)

    await session.run(press)
    session.pause(False)
    await asyncio.gather(*tasks)
    assert most > 30
    assert (mirror.broken, mirror.lost_events, mirror.next_seq) == (None, 0, tape.last_seq + 1)
    assert digest(mirror.facts) == digest(tape.state_at(tape.last_seq))
    assert (mirror.coverage.passed > 0) == flooded
    if not flooded:
        unpaused = begun(tape)
        unpaused.take(EventsArrived(events_of(tape)), 0)
        assert history(mirror) == history(unpaused)


def test_looking_at_events_keeps_to_its_share_over_the_snapshots() -> None:
    one = SamplingPace()
    one.sampling = True
    share = round(pace.LOOK_SHARE * pace.REFRESH_NS)
    one.snapshot(0, 0)
    one.worked(1, 7 * share // 2, 0)  # a single batch took more than three times what there is
    looks = []
    for number in range(1, 4):
        one.snapshot(0, number * pace.REFRESH_NS)
        looks.append(one.affords)
    assert looks == [False, False, True]


@pytest.mark.asyncio
async def test_keys_get_a_turn_once_some_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    work_ns, turns = 0, 0
    monkeypatch.setattr(source.time, "thread_time_ns", lambda: work_ns)

    async def turn() -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr(source, "_yield", turn)
    breath = source._Breath()
    for _ in range(10):
        work_ns += source.BREATH_NS // 4
        await breath()
    assert turns == 2
