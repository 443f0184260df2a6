"""One real session in a terminal multiplexer: attach, filter, break, see the hold, continue, replay, quit.

Law of this file: keys are typed as a person would, and each is typed when the screen shows what it answers to.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import PROGRAM, environment, serving

DEADLINE_S = 100
"""Far more than a crowded machine takes; nothing waits so long that works."""
pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Screen:
    """A tmux server of its own with one window."""

    def __init__(self, directory: Path, columns: int, rows: int) -> None:
        self.directory = directory
        self.socket = str(directory / "tmux.sock")
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), "sh")

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self.socket, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=True,
            cwd=self.directory, env={**environment(self.directory), "TERM": "xterm-256color"},
        )
        return done.stdout

    def text(self) -> str:
        """The text on the screen."""
        return self._tmux("capture-pane", "-p")

    def until(self, *wanted: str) -> str:
        """Look until all of these are on the screen."""
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            text = self.text()
            if all(one in text for one in wanted):
                return text
        raise AssertionError((wanted, self.text()))

    def type(self, *keys: str) -> None:
        """Press keys, named as tmux names them."""
        self._tmux("send-keys", *keys)

    def say(self, text: str) -> None:
        """Type characters as they are."""
        self._tmux("send-keys", "-l", text)

    def close(self) -> None:
        """End the server and what runs in it."""
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    """A window of 120 by 40."""
    one = Screen(tmp_path, 120, 40)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.timeout(400)
def test_a_whole_session(tmp_path: Path, screen: Screen) -> None:
    with serving(tmp_path, "--workload", "multiturn", "--speed", "1", "--record", str(tmp_path / "run")) as daemon:
        screen.say(f"{PROGRAM} attach; echo left $((40 + 1))\n")
        screen.until("LIVE", "NEEDS YOU", "G1 device")
        screen.type("2")
        screen.until("sorted by need")
        screen.say("/")
        screen.say("state = decoding or held")
        screen.type("Enter")
        screen.until("/ state = decoding or held", "match")
        screen.say("b")
        screen.until(" break to ")
        screen.type("C-u")
        screen.say("to decoding once max 100s")
        screen.until("ok, would have hit")
        screen.type("Enter")
        screen.until("‖1")  # the badge stays, the announcement beside it leaves after some seconds
        screen.say("H")
        screen.until("HELD", "resumes in", "WAITS FOR")
        held = daemon.json("holds")
        assert len(held) == 1
        screen.say("c")
        screen.until(f"hold {held[0]['id']}: continued")
        assert daemon.json("holds") == []
        screen.say("!")
        screen.until("WARNINGS")
        screen.say("q")
        screen.until("left 41")
        daemon.stop()
    screen.say(f"clear; {PROGRAM} replay run; echo left $((40 + 2))\n")
    screen.until("REPLAY", "END", "FINDINGS")
    screen.say("1C")
    screen.until("hit 1 of 1")
    screen.say("..")
    screen.until("‖1")
    screen.say("H")
    screen.until("HELD")
    screen.say("CC")
    screen.until("no hit in front of")
    screen.say("q")
    text = screen.until("left 42")
    assert "Traceback" not in text
    assert "REPLAY" not in text
