"""Attaching to a target that was running before: its past as the daemon still has it, and nothing invented."""

import asyncio
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvbm_console.analysis.lives import Life
from kvbm_console.client import LiveFeed
from kvbm_console.core.events import Event
from kvbm_console.core.ids import Note
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import Connected, Disconnected, EventsArrived, PastSeen, SnapshotTaken
from kvbm_console.stream.ring import Ring
from recordings.screens.tape import RUN
from tests.server.daemons import daemon_at
from tests.tui.desks import desk_of, everything
from tests.tui.script import S, ScriptedFeed, connected
from tui import source
from tui.model.history import take_past
from tui.model.mirror import Mirror
from tui.source import TargetSession


@cache
def there_from_the_beginning() -> Mirror:
    """The same for all tests that only look."""
    return whole(tape()[1])


@cache
def tape() -> tuple[Recording, list[Event]]:
    """A run with every kind of trouble that a cache has in fourteen seconds."""
    recording = Recording.open(RUN)
    return recording, [event for batch in recording.events(recording.first_seq) for event in batch]


def whole(events: list[Event]) -> Mirror:
    """Somebody who was there from the beginning."""
    mirror = Mirror()
    mirror.take(connected(), S)
    mirror.take(SnapshotTaken(tape()[0].state_at(tape()[0].first_seq - 1)), S)
    mirror.take(EventsArrived(events), S)
    return mirror


def late(events: list[Event], at: int, past: int) -> Mirror:
    """Somebody who came behind event ``at`` and was told this much of what was before."""
    mirror = Mirror()
    state: CacheState = tape()[0].state_at(events[at - 1].seq)
    mirror.take(connected(), S)
    assert len(list(take_past(mirror, PastSeen(events[max(0, at - past):at], state), S))) >= past // 400
    mirror.take(SnapshotTaken(decode_facts(encode_facts(state))), S)
    mirror.take(EventsArrived(events[at:]), S)
    assert mirror.broken is None
    return mirror


def stretches(life: Life, start_ns: int) -> list[tuple[int, object]]:
    """Its states from a moment on."""
    found = [(max(move.start_ns, start_ns), move.state) for move in life.moves]
    while len(found) > 1 and found[1][0] <= start_ns:
        found.pop(0)
    return found


@pytest.mark.parametrize("at", [9_000, 12_000, 15_000])
@pytest.mark.parametrize("past", [0, 500, 8_192])
def test_who_comes_late_knows_the_same_of_the_told_stretch(at: int, past: int) -> None:
    events = tape()[1]
    there, came = there_from_the_beginning(), late(events, at, past)
    assert came.state is not None
    assert there.state is not None
    assert encode_facts(came.state) == encode_facts(there.state)
    begin_ns = events[max(0, at - past)].at_ns if past else events[at - 1].at_ns
    lives = {life.slot: life for life in [*there.past, *there.lives.values()]}
    known = {life.slot: life for life in [*came.past, *came.lives.values()]}
    for number, life in lives.items():
        if life.opened_ns > begin_ns:
            assert stretches(known[number], begin_ns) == stretches(life, begin_ns)
            assert [event.seq for event in known[number].story] == [event.seq for event in life.story]
            assert [one.label for one in known[number].transfers] == [one.label for one in life.transfers]
        elif number in known and past:
            assert stretches(known[number], begin_ns) == stretches(life, begin_ns)
    ended = {one.candidate: one for one in there.ended}
    for one in came.ended:
        other = ended[one.candidate]
        mine = (one.route, one.blocks, one.operation, one.ended_ns, one.status)
        assert mine == (other.route, other.blocks, other.operation, other.ended_ns, other.status)
        assert one.request == other.request or (one.request == "" and lives[other.slot].opened_ns < begin_ns)
    assert [event.seq for event in came.log] == [event.seq for event in there.log][-len(came.log):]
    assert len(came.log) == min(20_000, len(events) - at + min(past, at))
    assert (came.decoding, came.hold_mono.keys()) == (there.decoding, there.hold_mono.keys())


def test_the_hit_rate_of_the_told_stretch_is_that_of_its_events() -> None:
    events = tape()[1]
    whole_asked, whole_hits = there_from_the_beginning().flows.hit_shares(events[-1].at_ns, 1)
    asked, hits = late(events, len(events), 8_192).flows.hit_shares(events[-1].at_ns, 1)
    assert (asked, hits) == (whole_asked, whole_hits)
    assert asked > 0


def test_who_comes_late_is_told_of_how_many_misses_the_reasons_are_known() -> None:
    events = tape()[1]
    desk = desk_of(items=[], late_ns=0)
    desk.mirror = late(events, len(events) - 2_000, 8_192)
    asked, hits = desk.mirror.flows.hit_shares(desk.now_ns)
    seen = sum(desk.mirror.fates.blocks) - sum(desk.mirror.fates.blocks[:4])
    text = everything(desk, 120, 40)
    assert 0 < seen < asked - sum(hits)
    assert f" misses  of {seen:,} seen of {asked - sum(hits):,}  " in text


def test_times_at_prices_of_a_part_of_the_run_are_marked() -> None:
    events = tape()[1]
    desk = desk_of(items=[], late_ns=0)
    desk.mirror = late(events, len(events) - 2_000, 8_192)
    assert re.search(r" ~\S+ for ~\S+ of copies", everything(desk, 120, 40))


def test_a_mirror_that_has_facts_learns_nothing_from_the_past() -> None:
    events = tape()[1][:4_000]
    mirror = whole(events)
    assert mirror.state is not None
    log, seq = len(mirror.log), mirror.next_seq
    assert list(take_past(mirror, PastSeen(events[:100], mirror.state), S)) == []
    assert (len(mirror.log), mirror.next_seq) == (log, seq)


@pytest.mark.asyncio
async def test_a_session_folds_the_past_before_its_first_snapshot() -> None:
    events = tape()[1]
    state = tape()[0].state_at(events[9_999].seq)
    feed = ScriptedFeed([connected(), PastSeen(events[6_000:10_000], state), SnapshotTaken(state)])
    session = TargetSession(feed, mono=lambda: S)

    async def breathe() -> None:
        await asyncio.sleep(0)

    task = asyncio.create_task(session.run(breathe))
    await feed.over.wait()
    assert len(session.mirror.log) == 4_000
    assert len(session.mirror.past) > 10
    assert session.mirror.gaps == type(session.mirror.gaps)(maxlen=session.mirror.gaps.maxlen)
    task.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize(("ring", "told"), [(None, 9_000), (4_096, 4_096)])
async def test_a_daemon_tells_as_much_of_its_past_as_it_has(ring: int | None, told: int) -> None:
    async with daemon_at(None, ring=Ring(ring) if ring else None) as daemon:
        for _ in range(12_000):
            daemon.service.submit(NoteReported, Note.CLOCK_STEPPED, "")
        items = LiveFeed(daemon.address, past=9_000).items()
        assert isinstance(await anext(items), Connected)
        past, snapshot = await anext(items), await anext(items)
        assert isinstance(past, PastSeen)
        assert isinstance(snapshot, SnapshotTaken)
        seqs = [event.seq for event in past.events]
        assert seqs == list(range(seqs[0], snapshot.state.seq))
        assert told // 2 < len(seqs) <= told
        await items.aclose()


@pytest.mark.asyncio
async def test_a_daemon_that_has_just_begun_has_no_past() -> None:
    async with daemon_at(None) as daemon:
        items = LiveFeed(daemon.address, past=9_000).items()
        kinds = [type(await anext(items)) for _ in range(2)]
        assert kinds[0] is Connected
        assert kinds[1] in (SnapshotTaken, PastSeen)
        assert Disconnected not in kinds
        await items.aclose()


@pytest.mark.asyncio
async def test_a_session_asks_about_the_recorder_only_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "ACCOUNTS_EVERY_S", 0.001)

    class Asked(ScriptedFeed):
        """A feed that can be asked, and notes it."""

        times = 0

        async def accounts(self) -> dict[str, object]:
            """As ``stream.feed.Accounting``."""
            self.times += 1
            answered.set()
            return {"recorder": {"path": "/rec/1.mcap", "bytes": 7}}

    answered, tasks = asyncio.Event(), []
    feed = Asked([connected(), SnapshotTaken(tape()[0].state_at(tape()[1][99].seq))])
    session = TargetSession(feed, mono=lambda: S)

    async def breathe() -> None:
        await asyncio.sleep(0)

    def spawn(work: Any, name: str) -> None:
        tasks.append(asyncio.create_task(work, name=name))

    session.attach(spawn, lambda text, role: None, lambda: None, lambda text: None, lambda name, table, picture: None)
    spawn(session.run(breathe), "feed")
    await feed.over.wait()
    assert feed.times == 0
    session.ask_recorder()
    await answered.wait()
    assert session.mirror.sources.recorder == ("/rec/1.mcap", 7)
    assert feed.times == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
