"""``W``: what would have spared a request its trouble, searched in another process and shown.

Law of this file: the panel shows what ``why --what-if`` answers, and a search that is stopped leaves no process.
"""

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import pytest

from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli import attach
from kvbm_console.cli.attach import what_if_searcher
from kvbm_console.client import Client
from kvbm_console.planning.recorded import read_run
from kvbm_console.planning.what_if import Counterfactual, Trouble, what_if
from kvbm_console.recording.playback import Playback, RecordingFeed
from kvbm_console.recording.reader import Recording
from tests.server.daemons import daemon_at, published
from tests.tui.desks import FakeActions, desk_of
from tests.tui.script import Mono
from tests.tui.test_look_back import Console
from tui.desk import WHAT_IF
from tui.keys import press
from tui.model.numbers import size
from tui.source import TargetSession

RECORDINGS: Final = Path(__file__).resolve().parents[2] / "recordings"


@cache
def answer(name: str, request: str) -> Counterfactual:
    """The library's answer for a request of a committed recording."""
    path = RECORDINGS / f"{name}.mcap"
    return what_if(read_run(str(path)), explain(evidence_of(Recording.open(path)), request))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize(("name", "request_id"), [("offload-pressure", "chat.1"), ("preempt-and-resume", "long-b")])
def test_every_remedy_is_on_the_screen_with_its_figures(name: str, request_id: str, width: int) -> None:
    actions = FakeActions()
    actions.spared = answer(name, request_id)
    desk = desk_of(actions=actions)
    desk.go(WHAT_IF)
    rows = [line.text.rstrip() for line in desk.draw(width, 40)]
    text = " ".join(" ".join(rows).split())
    assert max(map(len, rows)) <= width
    assert any(trouble.remedies for trouble in actions.spared.troubles)
    for trouble in actions.spared.troubles:
        for remedy in trouble.remedies:
            parts = remedy.flags.split(" --")
            row = next(row for row in rows if parts[0] in row and size(remedy.memory_bytes) in row)
            assert f" {remedy.outcome.hits} " in row
            assert all(f"--{part}" in text for part in parts[1:])
        assert " ".join(trouble.inevitable.split()) in text
    table = desk.view.rows(desk)
    assert table is not None
    assert [row[1] for row in table[1]] == [
        remedy.flags for trouble in actions.spared.troubles for remedy in trouble.remedies]


def test_a_request_without_trouble_and_one_that_nothing_helps_are_told() -> None:
    actions = FakeActions()
    desk = desk_of(actions=actions)
    desk.go(WHAT_IF)
    actions.spared = msgspec.structs.replace(answer("offload-pressure", "chat.1"), troubles=[])
    assert "missed nothing that had been stored" in "\n".join(line.text for line in desk.draw(80, 24))
    first = Trouble("miss", "found 0 of 3 blocks", [], 1, None, None, "the other blocks are asked for the first time")
    actions.spared = msgspec.structs.replace(actions.spared, troubles=[first])
    text = "\n".join(line.text for line in desk.draw(80, 24))
    assert "nothing that was tried avoids it (1 replay)" in text
    assert first.inevitable in text


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def ended(console: Console) -> None:
    for task in console.tasks:
        task.cancel()
    await asyncio.gather(*console.tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_replay_searches_beside_the_screen_and_shows_the_answer() -> None:
    path = RECORDINGS / "preempt-and-resume.mcap"
    playback = Playback(Recording.open(path))
    console = Console(TargetSession(
        RecordingFeed(playback), None, playback, mono=Mono(), what_if=what_if_searcher(path=path)))
    await console.until(lambda: console.session.mirror.state is not None)
    console.desk.select("long-b")
    press(console.desk, "W")
    assert console.session.replays
    assert "esc  stop" in "\n".join(line.text for line in console.desk.draw(80, 24))
    task = console.session._replays
    assert task is not None
    await task
    found = console.session.spared
    assert found is not None
    assert found.troubles == answer("preempt-and-resume", "long-b").troubles
    await ended(console)


@pytest.mark.asyncio
async def test_escape_ends_the_search_and_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command tells its progress and never ends, so only a kill ends it."""
    monkeypatch.setattr(attach, "RUN_MAIN", (
        "import os, sys, time; print(f'replay {os.getpid()}: --num 1', file=sys.stderr, flush=True); time.sleep(600)"))
    path = RECORDINGS / "preempt-and-resume.mcap"
    playback = Playback(Recording.open(path))
    console = Console(TargetSession(
        RecordingFeed(playback), None, playback, mono=Mono(), what_if=what_if_searcher(path=path)))
    session = console.session
    await console.until(lambda: session.mirror.state is not None)
    console.desk.select("long-b")
    press(console.desk, "W")
    await console.until(lambda: session.spared_text.startswith("replay "))
    child = int(session.spared_text.split()[1].rstrip(":"))
    assert session.spared_text in "\n".join(line.text for line in console.desk.draw(80, 24))
    assert alive(child)
    task = session._replays
    assert task is not None
    press(console.desk, "escape")
    assert (console.desk.current, session.replays) == (WHAT_IF, False)
    assert "stopped" in "\n".join(line.text for line in console.desk.draw(80, 24))
    await asyncio.gather(task, return_exceptions=True)
    assert not alive(child)
    press(console.desk, "escape")
    assert console.desk.current != WHAT_IF
    await ended(console)


@pytest.mark.asyncio
@pytest.mark.parametrize("source", ["recording", pytest.param("ring", marks=pytest.mark.slow)])
async def test_of_a_live_daemon_its_recording_is_replayed_else_its_ring(source: str, tmp_path: Path) -> None:
    """The recording has a segment that ended before, so its newest file alone would not have the request."""
    place = tmp_path / "run"
    async with daemon_at(
        "multiturn:requests=12", record=place if source == "recording" else None, speed=None
    ) as daemon:
        state = daemon.service.state
        await published(daemon, lambda: state.totals.slots_opened == 12 and not state.slots)
        if source == "recording":
            async with Client(daemon.address) as client:
                await client.record_rotate()
        found = await what_if_searcher("--target", daemon.address)("s002-t1", lambda text: None)
    assert found.alike
    assert (str(place) in found.trace) == (source == "recording")
    if source == "recording":
        again = what_if(read_run(str(place)), explain(evidence_of(Recording.open(place)), "s002-t1"))
        assert (found.replayed, found.troubles) == (again.replayed, again.troubles)
