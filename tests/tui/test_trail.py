"""The log's past: every event that can be had is on it once, a filter searches all of it, and it stays small."""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tui.model.trail as trailing
from kvbm_console.client.live import LiveFeed
from kvbm_console.core import events as ev
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.events import Event
from kvbm_console.core.ids import Note
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from kvbm_console.stream.ring import Ring
from tests.server.daemons import daemon_at, finished, published
from tests.tui.desks import FakeActions, desk_of, screen
from tests.tui.script import MS, Mono, Script, connected
from tests.tui.test_replay import command, replaying
from tui.desk import LOG, Desk
from tui.keys import press
from tui.model.events import EVENTS
from tui.model.filters import Filter
from tui.model.mirror import Mirror
from tui.model.trail import Trail, Way

EVERY_SEVENTH = "kind = Noted"


class Remembering(FakeActions):
    """Answers what the log asks at once, from the last events of a script, as a daemon's ring does."""

    def __init__(self, script: Script, most: int) -> None:
        super().__init__()
        self.script, self.most = script, most
        self.mirror: Mirror
        self.broken = False

    async def stretch(self, first: int, last: int) -> tuple[list[Event], int]:
        if self.broken:
            raise ConnectionLost("the target is gone")
        events = self.script.events
        oldest = max(0, len(events) - self.most)
        return list(events[max(first, oldest) : last]), oldest

    def look_back(self, way: Way, at: int | None, rows: int) -> None:
        trail = self.mirror.trail
        try:
            asyncio.run(trail.find(self.mirror, self.stretch, way, at, rows))
        except ConnectionLost as error:
            trail.failed = str(error)


def flow(desk: Desk, script: Script, events: int) -> None:
    """So many more events arrive, one in seven about a candidate."""
    first = len(script.events)
    while len(script.events) < first + events:
        script.wait(10 * MS)
        if len(script.events) % 7 == 3:
            script.emit(ev.Noted, Note.ENGINE_SUMMARY, "seven")
        else:
            script.iterate()
    desk.mirror.take(EventsArrived(script.events[first:]), desk.mono())


def log_of(events: int, *, kept: int, remembered: int) -> tuple[Desk, Script, Remembering]:
    """A log of so many events, of which the console keeps some and the daemon remembers more."""
    script = Script()
    script.pools()
    script.open("chat-1")
    actions = Remembering(script, remembered)
    desk = desk_of(mono=Mono(), late_ns=0, actions=actions, items=[
        connected(), SnapshotTaken(CacheState()), EventsArrived(list(script.events))])
    actions.mirror = desk.mirror
    desk.mirror.log = deque(desk.mirror.log, maxlen=kept)
    flow(desk, script, events - len(script.events))
    desk.current = LOG
    return desk, script, actions


def rows_of(desk: Desk) -> list[int]:
    """Numbers of the events on the screen."""
    desk.draw(80, 24)
    desk.draw(80, 24)
    found: list[int] = desk.views[LOG]._found  # type: ignore[attr-defined]
    return found


def test_g_goes_to_the_oldest_event_of_the_daemon_and_says_that_it_is() -> None:
    desk, script, _ = log_of(3_000, kept=200, remembered=2_500)
    press(desk, "g")
    assert rows_of(desk)[0] == 500
    text = "\n".join(screen(desk, 80, 24))
    assert "nothing older than event 500 in the daemon, its recording or this console" in text
    flow(desk, script, 400)  # the daemon forgets them, the reader keeps them
    assert rows_of(desk)[0] == 500
    press(desk, "G")
    assert rows_of(desk)[-1] == script.state.seq - 1


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal events in a row are rows of their own."""
    monkeypatch.setattr("tui.views.log.FOLD_RATE", 10**9)


@pytest.mark.usefixtures("one_by_one")
def test_paging_meets_every_event_once_up_and_down() -> None:
    desk, script, _ = log_of(2_000, kept=150, remembered=1_800)
    seen = [rows_of(desk)]
    while seen[-1][0] > 200:
        press(desk, "pageup")
        seen.append(rows_of(desk))
    up = sorted(set(itertools.chain(*seen)))
    assert up == list(range(200, 2_000))
    assert all(after[-1] >= before[0] - 1 for before, after in itertools.pairwise(seen)), "no page leaves one out"
    seen = [rows_of(desk)]
    while seen[-1][-1] < 1_999:
        press(desk, "pagedown")
        seen.append(rows_of(desk))
    assert sorted(set(itertools.chain(*seen))) == list(range(200, 2_000))
    assert len(seen) < 140
    assert script.state.seq == 2_000


@pytest.mark.usefixtures("one_by_one")
def test_a_filter_searches_all_that_can_be_had() -> None:
    desk, _, _ = log_of(2_000, kept=100, remembered=1_700)
    desk.filters[LOG] = Filter.parse(f"{EVERY_SEVENTH} and seq < 420", EVENTS)
    assert rows_of(desk) == [seq for seq in range(300, 420) if seq % 7 == 3]
    assert "nothing older" in "\n".join(screen(desk, 80, 24))
    desk.filters[LOG] = Filter.parse(EVERY_SEVENTH, EVENTS)
    press(desk, "g")
    wanted = [seq for seq in range(300, 2_000) if seq % 7 == 3]
    seen = rows_of(desk)
    assert seen == wanted[: len(seen)]
    desk.filters[LOG] = Filter.parse("kind = SlotHeld", EVENTS)
    desk.draw(80, 24)
    text = "\n".join(screen(desk, 80, 24))
    assert "0 of 1,700 events around here match" in text, text


def test_a_filter_finds_events_of_requests_that_this_console_never_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names stand in events that are older than those that are asked for first."""
    monkeypatch.setattr(trailing, "CHUNK_EVENTS", 8)
    script = Script()
    script.pools()
    slot = script.run("old", 4)
    script.offload(slot)
    script.finish(slot)
    about = [event.seq for event in script.events if "old" in named(event, script)]
    for _ in range(30):
        script.iterate()
    actions = Remembering(script, 10_000)
    desk = desk_of(mono=Mono(), late_ns=0, actions=actions, items=[connected(), script.snapshot()])
    actions.mirror = desk.mirror
    desk.current = LOG
    flow(desk, script, 40)
    desk.filters[LOG] = Filter.parse("request = old", EVENTS)
    assert rows_of(desk) == about
    desk.filters[LOG] = Filter.parse("kind = OperationStarted or kind = CandidateEnded", EVENTS)
    wanted = [e.seq for e in script.events if isinstance(e, ev.OperationStarted | ev.CandidateEnded)]
    assert rows_of(desk) == wanted, "once each"


def named(event: Event, script: Script) -> str:
    """The request of an event of a run of one request and one copy."""
    alone = (ev.SlotOpened, ev.SlotMoved, ev.SlotClosed, ev.PrefixScored, ev.DeviceBlocksAssigned, ev.BlocksFilled,
             ev.DeviceBlocksReleased, ev.CandidatePlanned, ev.CandidateEnqueued, ev.CandidateEvaluated,
             ev.BlocksReserved, ev.CandidatePromoted, ev.OperationStarted, ev.OperationReported, ev.BlocksReady,
             ev.CandidateEnded)
    if isinstance(event, ev.IterationAdvanced) and event.slots:
        return "old"
    return "old" if isinstance(event, alone) else ""


def test_a_target_that_does_not_answer_is_told_and_asked_again_with_the_next_key() -> None:
    desk, _, actions = log_of(1_000, kept=100, remembered=900)
    actions.broken = True
    press(desk, "g")
    assert rows_of(desk)[0] == 900
    assert "older events cannot be had: the target is gone" in "\n".join(screen(desk, 80, 24))
    actions.broken = False
    press(desk, "g")
    assert rows_of(desk)[0] == 100


STEPS = st.lists(st.sampled_from(["flow", "oldest", "older", "newer", "filter", "all", "near"]), max_size=14)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(30, 300), st.integers(50, 900))
def test_a_stretch_has_no_hole_and_both_stay_small(steps: list[str], kept: int, remembered: int) -> None:
    most, trailing.FAR_MAX = trailing.FAR_MAX, 120
    chunk, trailing.CHUNK_EVENTS = trailing.CHUNK_EVENTS, 64
    try:
        desk, script, actions = log_of(600, kept=kept, remembered=remembered)
        trail, wanted = desk.mirror.trail, None
        at: int | None = None
        for step in steps:
            if step == "flow":
                flow(desk, script, 90)
            elif step in ("filter", "all"):
                wanted = Filter.parse(EVERY_SEVENTH, EVENTS) if step == "filter" else None
            elif step == "near":
                at = None
            trail.look(desk.mirror, wanted)
            if step in ("oldest", "older", "newer"):
                actions.look_back(step, at, 10)  # type: ignore[arg-type]
                at = trail.far[len(trail.far) // 2].seq if trail.far else at
            for place in (None, at):
                whole(trail, script, place)
    finally:
        trailing.FAR_MAX, trailing.CHUNK_EVENTS = most, chunk


def whole(trail: Trail, script: Script, at: int | None) -> None:
    """A reader at this place pages over everything between its ends that the filter leaves."""
    events: Sequence[Event] = trail.events(at)
    seqs = [event.seq for event in events]
    assert len(trail.far) <= trailing.FAR_MAX
    if seqs:
        assert seqs == [seq for seq in range(seqs[0], seqs[-1] + 1) if trail.wanted is None or seq % 7 == 3]
    if trail.events(None) is not trail.near or not trail.far:
        assert not seqs or trail.first_known(None) <= trail.events(None)[0].seq
    assert all(event is script.events[event.seq] for event in events)


@pytest.mark.asyncio
async def test_a_live_console_asks_the_ring_of_its_daemon() -> None:
    async with daemon_at("multiturn:requests=40,seed=5", speed=None, ring=Ring(events_max=2_000)) as daemon:
        await published(daemon, lambda: finished(daemon) == 40)
        feed = LiveFeed(daemon.address)
        with pytest.raises(ConnectionLost, match="is not connected"):
            await feed.between(0, 10)
        items = feed.items()
        async for item in items:
            if isinstance(item, SnapshotTaken):
                break
        first, last = daemon.service.ring.first_seq, daemon.service.ring.next_seq
        assert first > 0
        nothing, oldest = await feed.between(0, 0)
        assert (nothing, oldest) == ([], first)
        events, oldest = await feed.between(first - 50, first + 100)
        assert ([event.seq for event in events], oldest) == (list(range(first, first + 100)), first)
        events, _ = await feed.between(last - 20, last + 50)
        assert [event.seq for event in events] == list(range(last - 20, last))
        await items.aclose()  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_a_recording_is_paged_and_searched_back_to_its_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.model.seeks.STRETCH_EVENTS", 200)
    async with replaying("gap.mcap") as replay:
        mirror, tape = replay.session.mirror, replay.recording
        await command(replay, "seek end")
        await replay.at(tape.last_seq)
        await replay.pilot.press("9")
        assert mirror.log[0].seq > tape.first_seq
        await replay.pilot.press("g")
        while "the recording begins here" not in replay.text():
            await replay.pilot.pause()
        first = next(iter(tape.events()))[0]
        assert f" {first.seq:,} " in replay.text()
        await replay.pilot.press("G")
        opened = next(e for batch in tape.events() for e in batch if type(e).__name__ == "SlotOpened")
        await replay.pilot.press("slash", *"seq", "space", "less_than_sign", "space", *str(opened.seq + 1), "enter")
        while f" {opened.seq:,} " not in replay.text():
            await replay.pilot.pause()
        await replay.pilot.press("escape", "g")
        (gap,) = tape.gaps
        for _ in range(200):
            if f"gap {gap.count:,}" in replay.text() or "gap 1" in replay.text():
                break
            await replay.pilot.press("pagedown")
        assert "gap" in replay.text()
