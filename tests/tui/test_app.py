"""The application on a headless terminal: keys, controls, pause, losses, redraws."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from kvbm_console.core import events as ev
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import SlotState
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import Disconnected, EventsArrived, FeedItem, GapSeen, SnapshotTaken
from kvbm_console.stream.verbs import ContinueHold, Verb
from tests.tui.script import Mono, RecordedControls, S, Script, ScriptedFeed, connected, opening, story
from tui import source
from tui.app import FRAME_S, ConsoleApp, choose_ascii, choose_theme, key_name
from tui.source import TargetSession


class Console:
    """A running console with its feed, controls and clock."""

    def __init__(self, script: Script, items: list[FeedItem] | None = None) -> None:
        self.script = script
        self.mono = Mono()
        self.feed = ScriptedFeed(items if items is not None else opening(script))
        self.controls = RecordedControls()
        self.session = TargetSession(self.feed, self.controls, mono=self.mono)
        self.app = ConsoleApp(self.session)
        self.pilot: Pilot[int]

    def row(self, y: int) -> str:
        self.app.draw()
        return self.app.canvas.lines[y].text

    def text(self) -> str:
        self.app.draw()
        return "\n".join(line.text for line in self.app.canvas.lines)

    async def send_events(self, since: int) -> None:
        """Deliver what the script made since event ``since``."""
        await self.feed.send(EventsArrived(self.script.events[since:]))


@asynccontextmanager
async def running(
    script: Script | None = None, size: tuple[int, int] = (80, 24), items: list[FeedItem] | None = None
) -> AsyncIterator[Console]:
    console = Console(script or story(), items)
    async with console.app.run_test(size=size) as pilot:
        console.pilot = pilot
        await console.feed.over.wait()
        console.app.draw()
        yield console


@pytest.mark.asyncio
async def test_the_mirror_of_a_running_console_is_the_leader() -> None:
    async with running() as console:
        state = console.session.mirror.state
        assert state is not None
        assert digest(state) == digest(console.script.state)
        assert console.row(0).startswith(" LIVE  chat-prod  run 7")


@pytest.mark.asyncio
async def test_every_view_and_help_by_keys() -> None:
    async with running() as console:
        for key, word in zip("123456789", (
            "NEEDS YOU", "sorted by need", "STORY", "whole run", "TRANSFERS", "referenced", "BREAKPOINTS", "RECORDER",
            "LOG",
        ), strict=True):
            await console.pilot.press(key)
            assert word in console.text()
        await console.pilot.press("question_mark")
        assert "EVERYWHERE" in console.text()
        await console.pilot.press("escape")
        assert "EVERYWHERE" not in console.text()


@pytest.mark.asyncio
async def test_move_open_and_come_back() -> None:
    async with running() as console:
        await console.pilot.press("2", "down", "enter")
        assert "agent-0003.2   slot 2" in console.text()
        await console.pilot.press("escape")
        assert "sorted by need" in console.text()
        await console.pilot.press("j", "k", "G", "g", "pagedown", "pageup", "o")
        assert "sorted by age" in console.text()


@pytest.mark.asyncio
async def test_filter_prompt_replaces_the_key_row_only() -> None:
    async with running() as console:
        await console.pilot.press("2")
        before = console.text().splitlines()[3:-2]
        await console.pilot.press("slash")
        assert console.text().splitlines()[3:-2] == before
        await console.pilot.press(*"rag")
        assert console.row(-2).startswith(" / rag")
        await console.pilot.press("enter")
        assert "/ rag   1 match" in console.row(2)


@pytest.mark.asyncio
async def test_controls_are_called_and_answer_in_the_key_row() -> None:
    async with running() as console:
        await console.pilot.press("2", "g", "c")
        await console.controls.called.wait()
        await console.pilot.pause()
        assert console.controls.calls == [ContinueHold(1)]
        assert console.row(-1).strip() == "hold 1: continued"
        console.controls.called.clear()
        await console.pilot.press("b", "enter")
        await console.controls.called.wait()
        await console.pilot.pause()
        assert "breakpoint 3 set: transition.did agent-0003.2 → finishing" in console.row(-1)


@pytest.mark.asyncio
async def test_a_refused_call_is_told_and_nothing_breaks() -> None:
    async with running() as console:
        console.controls.fails = Refused("hold 1 is not yours")
        await console.pilot.press("2", "g", "c")
        await console.controls.called.wait()
        await console.pilot.pause()
        assert console.row(-1).strip() == "hold 1 is not yours"
        await console.pilot.press("4")
        assert "whole run" in console.text()


@pytest.mark.asyncio
async def test_a_call_that_never_answers_blocks_nothing() -> None:
    class Frozen(RecordedControls):
        async def ask(self, verb: Verb[Any]) -> Any:
            await asyncio.Event().wait()

    console = Console(story())
    console.session.controls = Frozen()
    async with console.app.run_test(size=(80, 24)) as pilot:
        console.pilot = pilot
        await console.feed.over.wait()
        await pilot.press("2", "g", *(["c"] * (source.CALLS_MAX + 1)))
        assert "has not answered the calls before" in console.row(-1)
        await pilot.press("4")
        assert "whole run" in console.text()


@pytest.mark.asyncio
async def test_pause_freezes_the_view_and_loses_nothing() -> None:
    async with running() as console:
        await console.pilot.press("space")
        shown = console.text().splitlines()[2:-1]
        since = len(console.script.events)
        console.script.run("new-0009.1", 4)
        await console.send_events(since)
        assert console.row(0).startswith(" PAUSED ")
        assert f"+{len(console.script.events) - since} buffered" in console.row(0)
        assert console.text().splitlines()[2:-1] == shown
        await console.pilot.press("space")
        await console.pilot.pause()
        assert console.session.mirror.state is not None
        assert digest(console.session.mirror.state) == digest(console.script.state)
        assert console.session.buffered == 0


@pytest.mark.asyncio
async def test_a_pause_that_outgrows_the_reel_says_so_and_ends_exact() -> None:
    async with running() as console:
        reel = console.session.reel
        assert reel is not None
        await console.pilot.press("space")
        reel.bytes_max = reel.bytes + 500
        since = len(console.script.events)
        console.script.run("new-0009.1", 4)
        console.script.run("new-0010.1", 4)
        await console.send_events(since)
        assert console.row(0).startswith(" PAUSED full ")
        console.feed.first = [connected(), console.script.snapshot(), console.script.heartbeat()]
        await console.pilot.press("space")
        console.feed.over.clear()
        await console.feed.send(console.script.heartbeat())
        await console.feed.over.wait()
        assert console.feed.subscriptions == 2
        assert console.session.mirror.state is not None
        assert digest(console.session.mirror.state) == digest(console.script.state)
        assert console.session.mirror.lost_events > 0


@pytest.mark.asyncio
async def test_a_connection_that_comes_back_during_a_pause_loses_nothing() -> None:
    async with running() as console:
        await console.pilot.press("space")
        for number in (9, 10):
            since = len(console.script.events)
            console.script.run(f"new-{number:04}.1", 4)
            await console.send_events(since)
            await console.feed.send(Disconnected("socket closed", 3.0), connected())
        await console.feed.send(Disconnected("socket closed", 5.0))
        assert console.row(0).startswith(" PAUSED ")
        await console.pilot.press("space")
        await console.pilot.pause()
        mirror = console.session.mirror
        assert digest(mirror.facts) == digest(console.script.state)
        assert mirror.lost_events == 0
        assert console.feed.subscriptions == 1
        assert console.row(0).startswith(" RETRY 5s ")


@pytest.mark.asyncio
async def test_an_event_that_does_not_fit_asks_for_a_snapshot() -> None:
    async with running() as console:
        wrong = ev.SlotClosed(console.script.state.seq + 5, console.script.at_ns, 0, 0)
        console.feed.first = [connected(), console.script.snapshot(), console.script.heartbeat()]
        await console.feed.send(EventsArrived([wrong]))
        await console.pilot.pause()
        assert console.feed.subscriptions == 2
        assert console.session.mirror.broken is None
        assert console.row(0).startswith(" LIVE ")


@pytest.mark.asyncio
async def test_a_loss_and_a_lost_connection_are_on_the_screen() -> None:
    async with running() as console:
        seq = console.script.state.seq
        console.script.run("new-0009.1", 4)
        await console.feed.send(GapSeen(seq, console.script.state.seq - 1, "ring overrun"), console.script.snapshot())
        lost = console.script.state.seq - seq
        assert f"lost {lost}" in console.row(0)
        await console.feed.send(Disconnected("socket closed", 3.0))
        assert console.row(0).startswith(" RETRY 3s ")
        assert "Daemon gone 0 s ago" in console.row(2)
        await console.pilot.press("r")
        await console.controls.called.wait()
        assert console.controls.calls == [("saw", {1: True}), ("retry",)], "what stood there last, then the key"
        await console.feed.send(connected(), console.script.snapshot(), console.script.heartbeat())
        assert console.row(0).startswith(" LIVE ")


@pytest.mark.asyncio
async def test_one_frame_is_one_refresh_however_many_events() -> None:
    async with running() as console:
        await console.pilot.press("9")
        frames, since = console.app.frames, len(console.script.events)
        for index in range(600):
            slot = console.script.open(f"burst-{index}", 2)
            console.script.move(slot, SlotState.FINISHED)
            console.script.emit(ev.SlotClosed, slot)
        events, began = console.script.events[since:], time.monotonic()
        await console.feed.send(*[EventsArrived([event]) for event in events])
        assert len(events) > 1_500
        assert console.app.frames - frames <= 4 + (time.monotonic() - began) / FRAME_S


@pytest.mark.asyncio
async def test_only_changed_rows_are_drawn() -> None:
    async with running() as console:
        await console.pilot.press("2")
        console.app.draw()
        drawn = console.app.canvas.rows_drawn
        console.app.draw()
        assert console.app.canvas.rows_drawn == drawn
        await console.pilot.press("down")
        assert 0 < console.app.canvas.rows_drawn - drawn <= 3


@pytest.mark.asyncio
async def test_export_writes_text_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with running() as console:
        await console.pilot.press("2", "e")
        name = f"kvbm-console-slots-{console.script.state.seq - 1}"
        assert f"written: {name}.txt, .svg, .csv with 3 rows" in console.row(-1)
    assert "agent-0003.2" in (tmp_path / f"{name}.txt").read_text(encoding="utf-8")
    assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.asyncio
async def test_copy_takes_the_selected_request() -> None:
    async with running() as console:
        await console.pilot.press("2", "down", "y")
        assert console.app.clipboard == "agent-0003.2"


@pytest.mark.asyncio
async def test_resize_fits_again() -> None:
    async with running() as console:
        for size in ((120, 40), (52, 14), (200, 50)):
            await console.pilot.resize_terminal(*size)
            console.app.draw()
            assert len(console.app.canvas.lines) == size[1]


@pytest.mark.asyncio
async def test_mouse_opens_tabs_and_scrolls() -> None:
    async with running() as console:
        await console.pilot.click(offset=(13, 1))
        assert "sorted by need" in console.text()
        await console.pilot.click(offset=(30, 4))
        assert console.app.desk.selected == "agent-0003.2"


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_quit(key: str) -> None:
    async with running() as console:
        await console.pilot.press(key)
        await console.pilot.pause()
    assert console.app.return_value == 0


@pytest.mark.asyncio
async def test_a_broken_feed_ends_the_console_with_an_error() -> None:
    class Broken:
        async def items(self) -> AsyncIterator[FeedItem]:
            yield connected()
            yield SnapshotTaken(CacheState())
            raise RuntimeError("a bug")

    app = ConsoleApp(TargetSession(Broken()))
    with pytest.raises(RuntimeError, match="a bug"):
        async with app.run_test() as pilot:
            await pilot.pause()


def test_theme_is_chosen_once() -> None:
    assert choose_theme(None, False, {"TERM": "xterm-256color"}) == "dark"
    assert choose_theme(None, False, {"TERM": "linux"}) == "ansi"
    assert choose_theme("light", False, {"TERM": "linux"}) == "light"
    assert choose_theme(None, False, {"TERM": "vt100"}) == choose_theme(None, False, {"TERM": "xterm-mono"}) == "none"
    assert choose_theme(None, False, {"TERM": "a terminal that nobody knows"}) == "ansi"
    assert choose_ascii(False, {"TERM": "linux"})
    assert not choose_ascii(False, {"TERM": "xterm-256color"})
    assert not choose_ascii(False, {})
    assert choose_ascii(True, {"TERM": "xterm-256color"})
    assert choose_theme("light", True, {}) == "none"
    assert choose_theme(None, False, {"TERM": "xterm-256color", "NO_COLOR": "1"}) == "none"


def test_key_names() -> None:
    from textual.events import Key

    assert key_name(Key("question_mark", "?")) == "?"
    assert key_name(Key("space", " ")) == "space"
    assert key_name(Key("ctrl+p", "\x10")) == "ctrl+p"
    assert key_name(Key("D", "D")) == "D"


def test_live_clock_advances_ages() -> None:
    script = story()
    console = Console(script)
    for item in opening(script):
        console.session.mirror.take(item, console.mono.at_ns)
    before = console.session.mirror.now_ns(console.mono.at_ns)
    assert console.session.mirror.now_ns(console.mono.at_ns + S // 2) == before + S // 2
