"""The console on recordings: after a seek or a step its facts are the recording's, and the past is on the screen."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.lints import LINTS
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli.replay import hit_finder
from kvbm_console.core.events import BreakpointHit
from kvbm_console.core.ids import Authority
from kvbm_console.core.snapshots import digest
from kvbm_console.recording.playback import Playback, RecordingFeed
from kvbm_console.recording.positions import parse_position, seq_of
from kvbm_console.recording.reader import Recording
from tests.tui.desks import run_command
from tests.tui.script import Mono
from tui.app import ConsoleApp
from tui.desk import LOG
from tui.keys import press
from tui.source import TargetSession

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


class Replay:
    """A console on a recording whose clock a test moves."""

    def __init__(self, name: str) -> None:
        self.recording = Recording.open(RECORDINGS / name)
        self.playback = Playback(self.recording)
        self.clock_ns = 0
        self.tick = asyncio.Event()
        feed = RecordingFeed(self.playback, clock=lambda: self.clock_ns, sleep=self._sleep)
        self.session = TargetSession(
            feed, None, self.playback, mono=Mono(),
            find_hits=hit_finder(RECORDINGS / name, self.recording.incarnation),
        )
        self.app = ConsoleApp(self.session)
        self.pilot: Pilot[int]

    async def _sleep(self, seconds: float) -> None:
        await self.tick.wait()
        self.tick.clear()

    async def at(self, seq: int) -> None:
        """Wait until the console has folded event ``seq``."""
        while self.session.mirror.state is None or self.session.mirror.state.seq != seq + 1:
            await self.pilot.pause()

    def same(self) -> bool:
        """Whether the console's facts are the recording's."""
        state = self.session.mirror.state
        return state is not None and digest(state) == digest(self.recording.state_at(state.seq - 1))

    def text(self) -> str:
        self.app.draw()
        return "\n".join(line.text for line in self.app.canvas.lines)


@asynccontextmanager
async def replaying(name: str) -> AsyncIterator[Replay]:
    replay = Replay(name)
    async with replay.app.run_test(size=(120, 40)) as pilot:
        replay.pilot = pilot
        await replay.at(replay.playback.first_seq)
        yield replay


async def command(replay: Replay, text: str) -> None:
    await replay.pilot.press("colon", *["space" if key == " " else key for key in text], "enter")


@pytest.mark.asyncio
async def test_seek_shows_the_facts_and_the_past() -> None:
    async with replaying("preempt-and-resume.mcap") as replay:
        last = replay.recording.last_seq
        await command(replay, f"seek {last - 20}")
        await replay.at(last - 20)
        assert replay.same()
        assert replay.session.mirror.log_total > 100
        await replay.pilot.press("4")
        assert "╍" in replay.text()
        assert " REPLAY " in replay.text()
        await command(replay, "seek 40")
        await replay.at(40)
        assert replay.same()


@pytest.mark.asyncio
async def test_seek_takes_every_place_that_the_command_line_takes() -> None:
    async with replaying("thrash.mcap") as replay:
        recording = replay.recording
        begun = datetime.fromtimestamp(recording.segments[0].about.clock_anchor_ns / 1e9)
        day = (begun + timedelta(seconds=1.5)).isoformat()
        for place in ("1.5s", "-900ms", "end", "1500000µs", day, "600", day[11:], "6,00", "999999"):
            run_command(replay.app.desk, f"seek {place}")
            wanted = seq_of(recording, parse_position(place.replace(",", "")))
            await replay.at(min(recording.last_seq, wanted))
            assert replay.same()
        run_command(replay.app.desk, "seek 60 parsecs")
        assert "a place is a number, a time such as 90s" in replay.text()
        assert replay.playback.position_seq == recording.last_seq


@pytest.mark.asyncio
async def test_the_timeline_is_never_blank_after_a_seek_and_a_tape_that_stands_has_no_rate() -> None:
    async with replaying("thrash.mcap") as replay:
        last = replay.recording.last_seq
        await replay.pilot.press("4")
        for at, keys in ((last, ["h"] * 30), (60, []), (last, ["+"] * 3 + ["h"] * 40), (300, ["h"] * 9),
                         (90, ["0"]), (last - 5, [])):
            places = replay.session.mirror.places
            run_command(replay.app.desk, f"seek {at}")
            while replay.session.mirror.places == places:
                await replay.pilot.pause()
            await replay.at(at)
            rows = replay.text().splitlines()
            names = [life.request for life in (*replay.session.mirror.lives.values(), *replay.session.mirror.past)]
            assert any(name in row for row in rows for name in names), (at, rows)
            assert any(character in row for row in rows[6:-4] for character in "░▒▁█▄╍┄·"), (at, rows)
            assert " 0 ev/s " in rows[0]
            for key in keys:
                press(replay.app.desk, key)
            replay.text()


@pytest.mark.asyncio
async def test_step_and_step_back() -> None:
    async with replaying("breakpoint-hold.mcap") as replay:
        await command(replay, "seek 50")
        await replay.at(50)
        await replay.pilot.press("full_stop")
        await replay.at(51)
        assert replay.same()
        await replay.pilot.press("comma", "comma")
        await replay.at(49)
        assert replay.same()
        assert "seq 49 of" in replay.text()


@pytest.mark.asyncio
async def test_play_folds_to_the_end() -> None:
    async with replaying("onboard-from-host.mcap") as replay:
        await command(replay, "speed 1000")
        await replay.pilot.press("space")
        assert replay.playback.playing
        assert " PLAY 1000× " in replay.text()
        while replay.playback.playing:
            replay.clock_ns += 1_000_000_000
            replay.tick.set()
            await replay.pilot.pause()
        await replay.at(replay.recording.last_seq)
        assert replay.same()
        assert " END " in replay.text()


@pytest.mark.asyncio
async def test_a_hold_of_the_recorded_run_is_shown_and_cannot_be_continued() -> None:
    async with replaying("breakpoint-hold.mcap") as replay:
        held = next(
            event.seq for events in replay.recording.events() for event in events
            if type(event).__name__ == "HoldParked"
        )
        await command(replay, f"seek {held}")
        await replay.at(held)
        assert "held" in replay.text()
        await replay.pilot.press("X")
        assert "X: not here, a recording cannot be stopped" in replay.text()


@pytest.mark.asyncio
async def test_a_recording_without_a_live_request_says_how_to_go_on() -> None:
    async with replaying("breakpoint-hold.mcap") as replay:
        text = replay.text()
        assert "No live request at seq" in text
        assert "space plays" in text
        assert "Waiting for the first request" not in text


@pytest.mark.asyncio
async def test_behind_a_gap_the_past_is_shown_with_the_gap_in_it() -> None:
    async with replaying("gap.mcap") as replay:
        (gap,) = [one for one in replay.recording.gaps if one.count]
        for place in (replay.playback.last_seq, gap.last + 5, replay.playback.last_seq):
            replay.playback.seek(place)
            await replay.at(place)
            assert replay.same()
            mirror = replay.session.mirror
            assert [(one.first, one.last) for one in mirror.gaps] == [(gap.first, gap.last)]
            assert mirror.lost_events == gap.count
            assert mirror.past or mirror.lives
            assert mirror.log[0].seq < gap.first < mirror.log[-1].seq
        await replay.pilot.press("4")
        assert f"gap {gap.count}" in replay.text()
        await replay.pilot.press("8")
        assert f"{gap.count} events, {gap.first} to {gap.last}" in replay.text()
        await replay.pilot.press("9", "pageup")
        assert f"gap {gap.count}: {gap.first} to {gap.last}" in replay.text()
        replay.playback.seek(gap.first - 1)
        await replay.at(gap.first - 1)
        assert not replay.session.mirror.gaps


@pytest.mark.asyncio
@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("kv-events/*.mcap")), ids=lambda path: path.stem)
async def test_what_an_engine_published_is_shown_in_every_view(path: Path) -> None:
    async with replaying(f"kv-events/{path.name}") as replay:
        last = replay.recording.last_seq
        await command(replay, f"seek {last}")
        await replay.at(last)
        assert replay.same()
        for view in range(1, 10):
            await replay.pilot.press(str(view))
            text = replay.text()
            assert ("An event stream names no request." in text) is (view in (2, 3, 4, 5))
            assert ("engine 1   rank 0   no gap seen" in text) is (view in (1, 6))
        await replay.pilot.press("6")
        state = replay.recording.state_at(last)
        rows = [row for row in replay.text().splitlines() if "lived" not in row]
        shown = [found for row in rows if (found := re.match(r"   (G\d) +(\S.*?) +(\d+)(?: |$)", row))]
        assert {(found[1], found[2], int(found[3])) for found in shown} == {
            (pool.info.tier.name, pool.info.medium, pool.resident_blocks) for pool in state.pools
            if pool.info.authority is Authority.STREAM
        }


@pytest.mark.asyncio
@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.mcap")), ids=lambda path: path.stem)
async def test_the_findings_of_a_recording_are_those_of_doctor(path: Path) -> None:
    async with replaying(path.name) as replay:
        await replay.pilot.press("8")
        index = replay.session.index
        while not index.complete:
            await replay.pilot.pause()
        wanted = [
            (one.lint, one.who, one.what, one.seq) for one in diagnose(evidence_of(replay.recording)).findings
            if LINTS[one.lint].on_stream
        ]
        assert [(one.lint, one.who, one.what, one.seq) for one in index.findings] == wanted
        assert index.hits == [
            event.seq for events in replay.recording.events() for event in events if isinstance(event, BreakpointHit)
        ]
        told = f"{len(wanted)} on the whole recording" if wanted else "nothing on this recording needs a person"
        assert told in replay.text()
        for number, (_, who, _, seq) in enumerate(wanted[:2]):
            await replay.pilot.press("8", *["up"] * 4, *["down"] * number)
            assert who in replay.text()
            places = replay.session.mirror.places
            await replay.pilot.press("enter")
            while replay.session.mirror.places == places:
                await replay.pilot.pause()
            assert replay.playback.position_seq >= seq
            request = index.findings[number].request
            if request is not None:
                assert replay.app.desk.selected == request
                assert request in replay.text()
            elif replay.app.desk.current == LOG:
                assert f" seq {seq:,}  " in replay.text(), "the event stands whole below the list"
