"""Sampling: above a share of a core facts come as snapshots; moves, holds and copies are still all there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core.events import Event
from kvbm_console.core.snapshots import digest
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, FeedItem, Heartbeat, SnapshotTaken
from tests.tui.desks import Desk, FakeActions
from tests.tui.script import Mono, connected
from tui.model import pace
from tui.model.mirror import Mirror
from tui.model.pace import Pace
from tui.source import Session
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
    """What a mirror knows of slots: their moves, holds, copies and ends."""
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
    one, now = Pace(), 0
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
    cheap, dear = Pace(), Pace()
    cheap.snapshot(1_000_000, 0)
    dear.snapshot(50_000_000, 0)
    assert not cheap.due(pace.REFRESH_NS - 1)
    assert cheap.due(pace.REFRESH_NS)
    assert not dear.due(S)
    assert dear.due(2 * S)
    assert not cheap.due(pace.REFRESH_NS + 1)  # asked for already


class Tape:
    """A feed of a recording that can send the facts again."""

    def __init__(self, tape: Recording) -> None:
        self.tape = tape
        self.wanted = False
        self.refreshes = 0

    def refresh(self) -> None:
        self.wanted = True

    async def items(self) -> AsyncIterator[FeedItem]:
        yield connected()
        yield SnapshotTaken(self.tape.state_at(self.tape.first_seq))
        events = events_of(self.tape)
        for first in range(0, len(events), 10):
            batch = events[first : first + 10]
            yield EventsArrived(batch)
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
async def test_a_session_that_is_flooded_asks_for_facts_and_loses_nothing(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "SHARE_MAX", 0.0)
    monkeypatch.setattr(pace, "SHARE_BACK", 0.0)
    monkeypatch.setattr(pace, "RATE_MIN", 0)
    tape = Recording.open(RECORDINGS / "offload-pressure.mcap")
    feed, mono = Tape(tape), Mono(0)

    class Keeper:
        seqs: ClassVar[list[int]] = []

        def take(self, item: FeedItem, mirror: Mirror) -> None:
            assert not mirror.sampled
            if isinstance(item, EventsArrived):
                self.seqs += [event.seq for event in item.events]

    def tick() -> int:
        mono.at_ns += S // 20
        return mono.at_ns

    session = Session(feed, mono=tick, keeper=Keeper() if kept else None)
    await session.run(breathe)
    mirror = session.mirror
    assert (mirror.broken, mirror.lost_events) == (None, 0)
    assert mirror.next_seq == tape.last_seq + 1
    if kept:  # who keeps what it sees folds every event, whatever it costs
        assert feed.refreshes == 0
        assert Keeper.seqs == list(range(tape.first_seq + 1, tape.last_seq + 1))
    else:
        assert feed.refreshes > 1
    assert not mirror.sampled, "behind the flood the facts are exact again"
    assert mirror.state is not None
    assert digest(mirror.state) == digest(tape.state_at(tape.last_seq))
