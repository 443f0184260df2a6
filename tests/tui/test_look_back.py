"""Looking back while live: the screen of a moment is the replay's screen of that moment, whoever kept the events.

Law of this file: every view is compared as text. Two consoles on the same events keep facts and spines at different
places, and a third never seeks at all.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from kvbm_console import service
from kvbm_console.cli.keep import SeenKeeper
from kvbm_console.client import LiveFeed
from kvbm_console.core.events import Event
from kvbm_console.core.snapshots import digest
from kvbm_console.recording.playback import Playback, RecordingFeed
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import (
    BatchArrived,
    Connected,
    Disconnected,
    EventsArrived,
    FeedItem,
    GapSeen,
    SnapshotTaken,
)
from kvbm_console.wire.batches import UnreadBatch, pack_events
from kvbm_console.wire.v1 import console_pb2 as pb
from tests.server.daemons import daemon_at, published
from tests.tui.script import Mono, S
from tui import keys
from tui.app import ConsoleApp
from tui.desk import HELP, LOG, RECORD, TIMELINE, Desk
from tui.keys import press
from tui.model import history, reel, seeks, spine
from tui.source import TargetSession
from tui.views import all_views

RECORDINGS: Final = Path(__file__).resolve().parents[2] / "recordings"
TAPES: Final = sorted(
    path for folder in (".", "kv-events", "vllm") for path in (RECORDINGS / folder).glob("*.mcap"))
SIZES: Final = ((80, 24), (120, 40), (200, 60))
FINDINGS_ROWS: Final = 20
"""More rows for the view whose findings are of the whole tape: a crowded machine adds some, and pushes others off."""


class Live:
    """A recording as a live target sends it, in pieces of a random size, read and unread."""

    def __init__(self, tape: Recording, rng: random.Random) -> None:
        self.tape, self.rng = tape, rng
        self.ended = asyncio.Event()

    async def items(self) -> AsyncIterator[FeedItem]:
        tape = self.tape
        yield Connected(
            tape.name, tape.incarnation, 1, False, tape.block_bytes, config=tape.config,
            clock_anchor_ns=tape.clock_anchor_ns)
        state = tape.state_at(tape.first_seq - 1)
        yield SnapshotTaken(state)
        seq = tape.first_seq
        for events in tape.events(seq):
            if events[0].seq != seq:
                reason = next(gap.reason for gap in tape.gaps if gap.first <= seq <= gap.last)
                known = tape.next_keyframe(seq + 1)
                assert known is not None
                yield GapSeen(seq, known - 1, reason)
                yield SnapshotTaken(tape.state_at(known - 1))
                events, seq = [event for event in events if event.seq >= known], known
            while events:
                some = events[: self.rng.randint(1, 90)]
                events = events[len(some) :]
                seq = some[-1].seq + 1
                unread = self.rng.random() < 0.5
                yield BatchArrived(UnreadBatch(pb.EventBatch.FromString(pack_events(some).data))) if unread else (
                    EventsArrived(some))
        self.ended.set()
        await asyncio.Event().wait()


class Console:
    """A session and its desk, without a terminal."""

    def __init__(self, session: TargetSession) -> None:
        self.session = session
        self.desk = Desk(session.mirror, session, session.mono, all_views(), wall=lambda: 0)
        self.tasks: list[asyncio.Task[None]] = []
        session.attach(self.spawn, self.desk.tell, lambda: None, lambda text: None, lambda name, table, picture: None)
        self.spawn(session.run(), "feed")

    def spawn(self, work: Awaitable[None], name: str) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0)

    async def seek(self, seq: int) -> None:
        """Stand behind event ``seq`` of the tape that is shown."""
        playback, mirror = self.desk.actions.playback, self.desk.mirror
        assert playback is not None
        places = mirror.places
        playback.seek(seq)
        wanted = playback.position_seq
        await self.until(lambda: mirror.places != places and mirror.facts.seq == wanted + 1)

    def screens(self) -> dict[tuple[int, tuple[int, int]], list[str]]:
        """The body of every view at every size, less the rows that tell of the tape and not of the moment."""
        found = {}
        for view in range(HELP):
            for size in SIZES:
                self.desk.current = view
                height = size[1] + (FINDINGS_ROWS if view == RECORD else 0)
                rows = [line.text.rstrip() for line in self.desk.draw(size[0], height)][2 : -2]
                if view == TIMELINE:
                    rows = rows[2 if size[1] >= 36 else 1 :]  # the minimap of the whole tape
                if view == RECORD:
                    rows = rows[next((at for at, row in enumerate(rows) if "TOTALS" in row), len(rows)) :][:6]
                found[view, size] = rows
        return found


@asynccontextmanager
async def consoles(tape: Recording, rng: random.Random) -> AsyncIterator[tuple[Console, Console]]:
    """(a console that follows the tape as a live target, a console on the tape as a recording that is indexed)."""
    live = Console(TargetSession(Live(tape, rng), mono=Mono()))
    playback = Playback(tape)
    replay = Console(TargetSession(RecordingFeed(playback), None, playback, mono=Mono()))
    try:
        feed = live.session.feed
        assert isinstance(feed, Live)
        await live.until(feed.ended.is_set)
        await replay.until(lambda: replay.session.index.complete)
        yield live, replay
    finally:
        tasks = [*live.tasks, *replay.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def back(console: Console) -> None:
    """Go back from live."""
    press(console.desk, "left")
    await console.until(lambda: console.desk.looks_back)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)
async def test_the_screen_of_a_moment_is_the_replays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(path.stem)
    monkeypatch.setattr(seeks, "STRETCH_EVENTS", 150)
    monkeypatch.setattr(reel, "EVERY_EVENTS", 70)
    monkeypatch.setattr(reel, "PIECE_BYTES", 1_000)
    monkeypatch.setattr(spine, "EVERY_EVENTS", 110)
    tape = Recording.open(path)
    async with consoles(tape, rng) as (live, replay):
        await back(live)
        seqs = [rng.randint(tape.first_seq, tape.last_seq) for _ in range(3)]
        for seq in [*seqs, tape.first_seq, tape.last_seq]:
            await live.seek(seq)
            await replay.seek(seq)
            assert digest(live.desk.mirror.facts) == digest(replay.desk.mirror.facts)
            shown, wanted = live.screens(), replay.screens()
            for place, rows in wanted.items():
                different = [pair for pair in zip(shown[place], rows, strict=True) if pair[0] != pair[1]]
                assert not different, (place, seq, different)


async def both_at(live: Console, played: Console, moments: Iterable[int]) -> AsyncIterator[int]:
    """Play one console to each of these events, and let the other one look back to it."""
    await back(live)
    playback = played.session.playback
    assert playback is not None
    for seq in sorted(moments):
        playback.step(seq - playback.position_seq)
        await played.until(lambda: played.desk.mirror.facts.seq == playback.position_seq + 1)
        await live.seek(playback.position_seq)
        yield seq


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["thrash", "preempt-and-resume", "stuck-slot", "gap"])
async def test_a_seek_shows_what_playing_from_the_beginning_shows(name: str) -> None:
    tape = Recording.open(RECORDINGS / f"{name}.mcap")
    rng = random.Random(name)
    async with consoles(tape, rng) as (live, played):
        async for _ in both_at(live, played, rng.sample(range(tape.first_seq, tape.last_seq), 3)):
            for _ in range(2):  # rows move at most once a second, and a warning has two seconds to come and five to go
                for console in (live, played):
                    console.desk.draw(80, 24)
                    mono = console.session.mono
                    assert isinstance(mono, Mono)
                    mono.at_ns += 3 * S
            shown, wanted = live.screens(), played.screens()
            assert {place: rows for place, rows in shown.items() if rows != wanted[place]} == {}


@pytest.mark.asyncio
async def test_right_returns_to_live_and_so_does_playing_to_the_end() -> None:
    tape = Recording.open(RECORDINGS / "thrash.mcap")
    async with consoles(tape, random.Random(1)) as (live, _):
        desk, now = live.desk, live.session.mirror
        press(desk, "right")
        assert not desk.looks_back
        await back(live)
        past = desk.actions
        assert past.playback is not None
        assert desk.draw(80, 24)[0].text.startswith(" LIVE −")
        press(desk, "X")
        assert "the past cannot be stopped" in desk.draw(80, 24)[-1].text
        press(desk, "right")
        assert desk.mirror is now
        assert past.playback.closed
        await back(live)
        assert desk.actions is not past
        playback = desk.actions.playback
        assert playback is not None
        playback.seek(tape.last_seq)
        playback.play()
        desk.draw(80, 24)
        assert desk.mirror is now
        assert live.session.past is None


@pytest.mark.asyncio
@pytest.mark.parametrize("gone", [True, False], ids=["gone", "paused"])
async def test_warnings_of_a_target_that_tells_no_more_are_there_again_after_a_look_back(gone: bool) -> None:
    async with consoles(Recording.open(RECORDINGS / "thrash.mcap"), random.Random(1)) as (live, _):
        desk, mono = live.desk, live.session.mono
        assert isinstance(mono, Mono)
        for _ in range(2):
            desk.draw(80, 24)
            mono.at_ns += 3 * S
        shown = [warning.key for warning in desk.warnings]
        if gone:
            live.session.mirror.take(Disconnected("socket closed", None), mono.at_ns)
        else:
            press(desk, "space")
        await back(live)
        desk.draw(80, 24)
        press(desk, "right")
        screen = "\n".join(line.text for line in desk.draw(80, 24))
        assert shown
        assert [warning.key for warning in desk.warnings] == shown
        assert "NEEDS YOU   1 caution" in screen


@pytest.mark.asyncio
async def test_a_look_back_does_not_hide_that_the_target_is_silent_or_gone() -> None:
    async with consoles(Recording.open(RECORDINGS / "thrash.mcap"), random.Random(1)) as (live, _):
        desk, mono, now = live.desk, live.session.mono, live.session.mirror
        assert isinstance(mono, Mono)
        await back(live)
        assert desk.draw(80, 24)[0].text.startswith(" LIVE −3.01s ")
        mono.at_ns += 4 * S
        assert desk.draw(80, 24)[0].text.startswith(" STALE 4s −3.01s ")
        now.take(Disconnected("socket closed", 3.0), mono.at_ns)
        rows = [line.text for line in desk.draw(80, 24)]
        assert rows[0].startswith(" RETRY 3s −3.01s ")
        assert rows[2].startswith(f" Daemon gone 0 s ago. Shown: seq {desk.mirror.facts.seq - 1:,}, ")
        assert rows[2].rstrip().endswith("Next try in 3 s.  r  now")
        press(desk, "r")
        assert "trying now" in desk.draw(80, 24)[-1].text
        for _ in range(2):
            press(desk, "right")
        assert desk.mirror is now
        assert "this is live" not in desk.draw(80, 24)[-1].text
        assert "nothing newer is known; ← goes back" in desk.draw(80, 24)[-1].text


@pytest.mark.asyncio
async def test_keys_count_from_the_moment_that_was_asked_for_and_no_other_moment_is_shown(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeks, "SLICE_EVENTS", 100)
    monkeypatch.setattr(keys, "NEAR_NS", 2 * S)
    tape = Recording.open(RECORDINGS / "screens" / "run.mcap")
    async with consoles(tape, random.Random(5)) as (live, replay):
        desk, now_ns = live.desk, live.session.mirror.facts.at_ns
        for key in ("left", "left", "right", "left"):
            press(desk, key)  # the first of these moments is not reached yet
        await live.until(lambda: desk.looks_back)
        for console, pressed in ((live, ("right", "left", "left")), (replay, ("right", "right", "left"))):
            shown = console.desk
            for key in pressed:
                playback, before = shown.actions.playback, shown.mirror.facts.seq
                assert playback is not None
                press(shown, key)
                wanted, seen = playback.position_seq + 1, set[int]()
                while shown.mirror.facts.seq != wanted:
                    seen.add(shown.mirror.facts.seq)
                    await asyncio.sleep(0)
                assert seen == {before}
                assert shown.mirror.facts.at_ns == playback.state.at_ns
        playback = desk.actions.playback
        assert playback is not None
        assert now_ns - 7 * S < playback.at_ns <= now_ns - 6 * S


@pytest.mark.asyncio
async def test_the_events_of_the_past_are_spread_over_their_time() -> None:
    tape = Recording.open(RECORDINGS / "screens" / "run.mcap")
    async with consoles(tape, random.Random(6)) as (live, _):
        kept = live.session.reel
        assert kept is not None
        pieces = sum(1 for _ in kept._pieces())
        counts = kept.density(10 * pieces)
        assert sum(counts) == kept.last_seq - kept.first_seq + 1
        assert 0 not in counts  # something happens in every 50 ms of this run


@pytest.mark.asyncio
async def test_lost_events_are_not_told_as_kept() -> None:
    tape = Recording.open(RECORDINGS / "gap.mcap")
    lost = sum(gap.count for gap in tape.gaps)
    async with consoles(tape, random.Random(7)) as (live, _):
        live.desk.current = RECORD
        shown = "\n".join(line.text for line in live.desk.draw(120, 40))
        assert lost
        assert f", {tape.last_seq - tape.first_seq + 1 - lost:,} events, 0 % of" in shown


@pytest.mark.asyncio
async def test_the_memory_is_bounded_and_the_oldest_events_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reel, "EVERY_EVENTS", 1_000)
    tape = Recording.open(RECORDINGS / "screens" / "run.mcap")
    live = Console(TargetSession(Live(tape, random.Random(2)), mono=Mono()))
    kept = live.session.reel
    feed = live.session.feed
    assert kept is not None
    assert isinstance(feed, Live)
    kept.bytes_max = 200_000
    try:
        first = None
        while not feed.ended.is_set():
            await asyncio.sleep(0)
            assert kept.bytes <= kept.bytes_max
            first = kept.first_seq if first is None and kept.begun else first
        assert first is not None
        assert kept.first_seq > first
        live.desk.current = RECORD
        shown = "\n".join(line.text for line in live.desk.draw(120, 40))
        assert f"{kept.last_seq - kept.first_seq + 1:,} events" in shown
        press(live.desk, "left")
        await live.until(lambda: live.desk.looks_back)
        for _ in range(3):
            press(live.desk, "shift+left")
        assert "keeps nothing older" in live.desk.draw(120, 40)[-1].text
        mirror = live.desk.mirror
        await live.until(lambda: mirror.facts.seq == kept.first_seq + 1 or mirror.facts.seq == kept.first_seq)
        assert digest(mirror.facts) == digest(tape.state_at(mirror.facts.seq - 1))
    finally:
        for task in live.tasks:
            task.cancel()
        await asyncio.gather(*live.tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_looking_back_at_a_daemon_shows_what_its_console_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeks, "STRETCH_EVENTS", 400)
    monkeypatch.setattr(reel, "EVERY_EVENTS", 300)
    keeper = SeenKeeper(tmp_path / "seen.mcap")
    async with daemon_at("multiturn") as daemon:
        live = Console(TargetSession(LiveFeed(daemon.address), mono=Mono(), keeper=keeper))
        kept = live.session.reel
        assert kept is not None
        await live.until(lambda: kept.last_seq - kept.first_seq > 1_500)
        press(live.desk, "left")
        await live.until(lambda: live.desk.looks_back)
        rng = random.Random(3)
        seqs = [rng.randint(kept.first_seq, kept.last_seq) for _ in range(4)]
        shown = []
        for seq in seqs:
            await live.seek(seq)
            assert live.desk.draw(80, 24)[0].text.startswith(" LIVE −")
            shown.append(live.screens())
        press(live.desk, "space")  # plays, while the daemon goes on
        for task in live.tasks:
            task.cancel()
        await asyncio.gather(*live.tasks, return_exceptions=True)
    keeper.close()
    playback = Playback(Recording.open(tmp_path / "seen.mcap"))
    replay = Console(TargetSession(RecordingFeed(playback), None, playback, mono=Mono()))
    await replay.until(lambda: replay.session.index.complete)
    for seq, screens in zip(seqs, shown, strict=True):
        await replay.seek(seq)
        for place, rows in replay.screens().items():
            assert screens[place] == rows, (place, seq)
    for task in replay.tasks:
        task.cancel()
    await asyncio.gather(*replay.tasks, return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("source", ["recording", "ring"])
async def test_moments_before_the_console_connected_are_the_replays(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeks, "STRETCH_EVENTS", 400)
    monkeypatch.setattr(reel, "EVERY_EVENTS", 300)
    monkeypatch.setattr(service, "SNAPSHOT_REUSE_EVENTS", 100)
    path = tmp_path / "run"
    async with daemon_at("multiturn", record=path) as daemon:
        await published(daemon, lambda: daemon.service.state.seq > 2_000)
        live = Console(TargetSession(LiveFeed(daemon.address), mono=Mono()))
        if source == "ring":
            async def elsewhere() -> None:
                return None
            monkeypatch.setattr(live.session, "_recorded", elsewhere)
        kept, mirror = live.session.reel, live.session.mirror
        assert kept is not None
        await live.until(lambda: kept.begun and mirror.heartbeat is not None)
        begin = kept.first_seq
        assert begin > 1_500
        until = kept.first_ns
        press(live.desk, "left")
        while live.desk.actions.playback is None or live.desk.actions.playback.recording is kept:
            await live.until(lambda: live.desk.actions is live.session.past and not live.session._asking)
            press(live.desk, "shift+left")
        await live.until(lambda: live.desk.actions is live.session.past)
        playback = live.desk.actions.playback
        tape = playback.recording
        assert isinstance(tape, Recording) == (source == "recording")
        assert tape.first_seq == 0
        assert tape.last_ns >= until
        await live.until(lambda: live.desk.actions.index.complete or not live.desk.actions.index.walks)
        rng = random.Random(4)
        seqs = sorted(rng.randint(tape.first_seq, begin - 1) for _ in range(4))
        shown = []
        for seq in seqs:
            await live.seek(seq)
            assert live.desk.draw(80, 24)[0].text.startswith(" LIVE −")
            shown.append(live.screens())
        for _ in range(3):
            press(live.desk, "shift+left")
        assert "the run begins here" in live.desk.draw(80, 24)[-1].text
        playback.seek(tape.seq_at(until - 1))
        press(live.desk, "right")
        if live.desk.looks_back:
            await live.until(lambda: live.desk.actions is live.session.past)
        for task in live.tasks:
            task.cancel()
        await asyncio.gather(*live.tasks, return_exceptions=True)
    playback = Playback(Recording.open(path))
    replay = Console(TargetSession(RecordingFeed(playback), None, playback, mono=Mono()))
    await replay.until(lambda: replay.session.index.complete)
    for seq, screens in zip(seqs, shown, strict=True):
        await replay.seek(seq)
        for place, rows in replay.screens().items():
            assert screens[place] == rows, (place, seq)
    for task in replay.tasks:
        task.cancel()
    await asyncio.gather(*replay.tasks, return_exceptions=True)


class Ring(Live):
    """A target whose ring begins at event 100. It answers once ``answers`` is set."""

    def __init__(self, tape: Recording, rng: random.Random) -> None:
        super().__init__(tape, rng)
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def items(self) -> AsyncIterator[FeedItem]:
        tape = self.tape
        yield Connected(tape.name, tape.incarnation, 1, False, tape.block_bytes, config=tape.config)
        yield SnapshotTaken(tape.state_at(299))
        yield EventsArrived([event for events in tape.events(300) for event in events])
        self.ended.set()
        await asyncio.Event().wait()

    async def between(self, first: int, last: int) -> tuple[list[Event], int]:
        return [], 100

    async def remembered(self, until: int) -> AsyncIterator[FeedItem]:
        self.asked.set()
        await self.answers.wait()
        yield SnapshotTaken(self.tape.state_at(119))
        for events in self.tape.events(120):
            yield EventsArrived([event for event in events if event.seq < until])


@pytest.mark.asyncio
async def test_the_end_of_the_past_is_told_with_its_reason() -> None:
    tape = Recording.open(RECORDINGS / "thrash.mcap")
    live = Console(TargetSession(Ring(tape, random.Random(1)), mono=Mono()))
    feed, desk = live.session.feed, live.desk
    assert isinstance(feed, Ring)
    feed.answers.set()
    await live.until(feed.ended.is_set)
    for _ in range(3):
        press(desk, "shift+left")
        await live.until(lambda: desk.actions is live.session.past and not live.session._asking)
    assert desk.actions.playback is not None
    assert desk.actions.playback.recording.first_seq == 120
    assert digest(desk.mirror.facts) == digest(tape.state_at(desk.mirror.facts.seq - 1))
    assert "the ring begins at event 120, the recording is elsewhere" in desk.draw(80, 24)[-1].text
    desk.actions.playback.seek(299)
    desk.actions.playback.play()
    desk.draw(80, 24)
    await live.until(lambda: desk.actions is live.session.past)
    assert desk.actions.playback.recording is live.session.reel
    for task in live.tasks:
        task.cancel()
    await asyncio.gather(*live.tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_late_answer_about_the_past_moves_nobody_who_has_moved_on() -> None:
    tape = Recording.open(RECORDINGS / "thrash.mcap")
    live = Console(TargetSession(Ring(tape, random.Random(1)), mono=Mono()))
    feed, kept = live.session.feed, live.session.reel
    assert isinstance(feed, Ring)
    assert kept is not None
    await live.until(feed.ended.is_set)
    await live.until(lambda: kept.begun)
    live.session.go_back(tape.last_ns, live.desk.show)
    await live.until(lambda: live.desk.looks_back and feed.asked.is_set())
    await live.seek(700)
    feed.answers.set()
    await live.until(lambda: not live.session._asking)
    assert live.session.past is not None
    playback = live.session.past.playback
    assert playback is not None
    assert (playback.recording, playback.position_seq) == (kept, 700)
    for task in live.tasks:
        task.cancel()
    await asyncio.gather(*live.tasks, return_exceptions=True)


class Forgetful(LiveFeed):
    """A feed whose daemon remembers nothing older than event 1,200."""

    async def between(self, first: int, last: int) -> tuple[list[Event], int]:
        events, oldest = await super().between(max(first, 1_200), last)
        return [event for event in events if 1_200 <= event.seq < last], max(1_200, oldest)


@pytest.mark.asyncio
@pytest.mark.parametrize("keeps", [True, False])
async def test_the_log_goes_back_through_console_daemon_and_recording(
    tmp_path: Path, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LOG_MAX", 300)
    async with daemon_at("multiturn", record=tmp_path / "run") as daemon:
        await published(daemon, lambda: daemon.service.state.seq > 1_500)
        live = Console(TargetSession(Forgetful(daemon.address), mono=Mono()))
        mirror = live.session.mirror
        if not keeps:
            live.session.reel = None
        await live.until(lambda: mirror.heartbeat is not None and mirror.next_seq > 1_600)
        live.desk.current = LOG
        trail = mirror.trail
        live.desk.draw(120, 40)
        press(live.desk, "g")
        text = ""
        while "nothing older than event 0" not in text:
            text = "\n".join(line.text for line in live.desk.draw(120, 40))
            await live.until(lambda: not live.session.looking)
            assert not trail.failed
        wanted = [event for events in Recording.open(tmp_path / "run").events(0) for event in events]
        assert len(trail.far) > 30
        assert [*trail.far] == wanted[: len(trail.far)]
        for task in live.tasks:
            task.cancel()
        await asyncio.gather(*live.tasks, return_exceptions=True)


def test_the_targets_of_a_console_share_its_memory() -> None:
    tape = Recording.open(RECORDINGS / "thrash.mcap")
    sessions = [TargetSession(Live(tape, random.Random(number)), mono=Mono()) for number in range(4)]
    ConsoleApp(sessions[0], more=sessions[1:])
    kept = [session.reel.bytes_max for session in sessions if session.reel is not None]
    assert kept == [reel.REEL_BYTES_MAX // 4] * 4


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["thrash", "preempt-and-resume", "breakpoint-hold", "gap"])
async def test_the_lanes_of_a_moment_reach_further_back_than_its_stretch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeks, "STRETCH_EVENTS", 150)
    monkeypatch.setattr(reel, "EVERY_EVENTS", 70)
    monkeypatch.setattr(spine, "EVERY_EVENTS", 110)
    tape = Recording.open(RECORDINGS / f"{name}.mcap")
    rng = random.Random(name)
    async with consoles(tape, rng) as (live, played):
        async for _ in both_at(live, played, rng.sample(range(tape.first_seq + 200, tape.last_seq), 4)):
            lanes = [
                {(life.slot, life.request, life.closed_ns): [(move.start_ns, move.state) for move in life.moves]
                 for life in (*console.desk.mirror.past, *console.desk.mirror.lives.values())}
                for console in (live, played)
            ]
            assert lanes[0] == lanes[1]
            for console in (live, played):
                console.desk.views, console.desk.current = all_views(), TIMELINE
                press(console.desk, "z")
            shown, wanted = (
                [line.text for line in console.desk.draw(120, 40)][4:-2] for console in (live, played))
            assert shown == wanted
