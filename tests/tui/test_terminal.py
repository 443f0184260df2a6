"""The console on a real terminal: whatever ends it, the terminal is as it was; the daemon does not notice (F20).

Law of this file: nothing waits for time. What the console has drawn is read from the terminal until it is there.
"""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_console.core.errors import RecordingError
from kvbm_console.recording.reader import Recording
from tests.cli.programs import PROGRAM, Daemon, environment, serving
from tui.terminal import GONE

DEADLINE_S = 100
LEAVE_SCREEN = b"\x1b[?1049l"
ENTER_SCREEN = b"\x1b[?1049h"
MOUSE_OFF = b"\x1b[?1000l"
SHOW_CURSOR = b"\x1b[?25h"


class Attached:
    """``attach`` on a pty of its own, under a shell's job control when asked."""

    def __init__(
        self, directory: Path, *args: str, hears_of_hangup: bool = True, errors: int | None = None
    ) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.theirs)
        self.drawn = b""
        self._open = [self.theirs, self.ours]
        self.process = subprocess.Popen(
            [PROGRAM, *(args or ("attach",))], stdin=self.theirs, stdout=self.theirs,
            stderr=self.theirs if errors is None else errors,
            cwd=directory, env={
                **environment(directory), "TERM": "xterm-256color", "COLORTERM": "truecolor",
                "COLUMNS": "80", "LINES": "24",  # as a parent with readline exports them: they must not hide a resize
            },
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if hears_of_hangup else None,
        )

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, *wanted: bytes) -> None:
        """Read until all of these have been written since the last call."""
        seen = b""
        ends = time.monotonic() + DEADLINE_S
        while not all(one in seen for one in wanted):
            if not select.select([self.ours], [], [], max(0, ends - time.monotonic()))[0]:
                raise AssertionError((wanted, seen[-2_000:]))
            try:
                part = os.read(self.ours, 65_536)
            except OSError:
                raise AssertionError(("the terminal was closed", wanted, seen[-2_000:])) from None
            seen += part
            self.drawn += part

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self.ours, keys)

    def leave(self) -> int:
        """Wait for its end; reads what it still writes."""
        ends = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < ends:
            if select.select([self.ours], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self.drawn += os.read(self.ours, 65_536)
        while select.select([self.ours], [], [], 0)[0]:
            part = os.read(self.ours, 65_536)
            if not part:
                break
            self.drawn += part
        return self.process.wait(1)

    def restored(self) -> None:
        """The terminal is as it was: line discipline, main screen, cursor, no mouse."""
        assert termios.tcgetattr(self.theirs)[:4] == self.before[:4]
        assert self.drawn.rindex(LEAVE_SCREEN) > self.drawn.rindex(ENTER_SCREEN)
        assert self.drawn.rindex(SHOW_CURSOR) > self.drawn.rindex(ENTER_SCREEN)
        assert self.drawn.rindex(MOUSE_OFF) > self.drawn.rindex(b"\x1b[?1000h")

    def close(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        """The terminal is gone: its window was closed, its connection broke."""
        for one in self._open:
            os.close(one)
        self._open = []


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a workload that does not end."""
    with serving(tmp_path, "--workload", "multiturn", "--speed", "4") as one:
        yield one


@contextlib.contextmanager
def attached(
    daemon: Daemon, *args: str, hears_of_hangup: bool = True, errors: int | None = None, also: tuple[bytes, ...] = ()
) -> Iterator[Attached]:
    """A console that has drawn a live target, and ``also``."""
    console = Attached(daemon.directory, *args, hears_of_hangup=hears_of_hangup, errors=errors)
    try:
        console.until(b"LIVE", b"TIERS", *also)
        yield console
    finally:
        console.close()


@pytest.mark.fault
@pytest.mark.parametrize("how", [
    "q", "ctrl+c", "SIGTERM", "SIGHUP",
    pytest.param("SIGINT", marks=pytest.mark.slow), pytest.param("SIGQUIT", marks=pytest.mark.slow),
])
def test_f20_the_terminal_is_restored_and_the_daemon_goes_on(daemon: Daemon, how: str) -> None:
    with attached(daemon) as console:
        if how.startswith("SIG"):
            console.process.send_signal(getattr(signal, how))
        else:
            console.type(b"q" if how == "q" else b"\x03")
        console.leave()
        console.restored()
        assert b"Traceback" not in console.drawn
    before = daemon.json("status")["stream"]["head_seq"]
    daemon.output("tail", "--count", "5")
    assert daemon.json("status")["stream"]["head_seq"] > before
    assert daemon.process.poll() is None


def test_it_draws_on_the_terminal_though_its_errors_go_to_a_file(daemon: Daemon, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as file, attached(daemon, errors=file.fileno()) as console:
        console.type(b"q")
        assert console.leave() == 0
        console.restored()
    assert (tmp_path / "errors").read_bytes() == b""


@pytest.mark.fault
@pytest.mark.parametrize("told", [True, False], ids=["with SIGHUP", "without"])
def test_f20_a_terminal_that_is_gone_ends_the_console_and_keeps_what_it_recorded(
    daemon: Daemon, tmp_path: Path, told: bool
) -> None:
    with attached(daemon, "attach", "--record", "seen.mcap", hears_of_hangup=told) as console:
        console.hang_up()
        assert console.process.wait(DEADLINE_S) == GONE
    assert Recording.open(tmp_path / "seen.mcap").last_seq > 0
    assert daemon.process.poll() is None


def recorded(place: Path) -> int:
    """The last event of a recording that is being written; 0 before the first."""
    with contextlib.suppress(RecordingError):
        return Recording.open(place).last_seq
    return 0


@pytest.mark.fault
def test_f20_a_terminal_that_takes_nothing_keeps_nobody_from_ending_the_console(daemon: Daemon, tmp_path: Path) -> None:
    with attached(daemon, "attach", "--record", "seen") as console:
        head = daemon.json("status")["stream"]["head_seq"]
        drawn = os.open(os.ttyname(console.theirs), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with contextlib.suppress(BlockingIOError):
            while True:  # until not one more byte fits
                os.write(drawn, b"x")
        os.close(drawn)
        ends = time.monotonic() + DEADLINE_S
        while recorded(tmp_path / "seen") <= head + 1_000:
            assert time.monotonic() < ends, "it did not go on following"
            daemon.output("tail", "--count", "1000")
        console.process.send_signal(signal.SIGTERM)
        assert console.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.fault
def test_f20_killed_for_good_leaves_no_hold_behind(daemon: Daemon) -> None:
    """A kill -9 cannot restore a terminal; what it held goes on."""
    with attached(daemon) as console:
        console.type(b"b\x15to decoding once max 100s\r")
        daemon.until("SlotHeld")
        console.process.kill()
        console.process.wait()
        daemon.until("HoldReleased")
    assert daemon.json("holds") == []


@pytest.mark.fault
def test_f20_suspended_and_resumed(daemon: Daemon) -> None:
    with attached(daemon) as console:
        console.type(b"\x1a")
        console.until(LEAVE_SCREEN)
        stopped = os.waitid(os.P_PID, console.process.pid, os.WSTOPPED)
        assert stopped is not None
        assert termios.tcgetattr(console.theirs)[3] == console.before[3]
        console.process.send_signal(signal.SIGCONT)
        console.until(ENTER_SCREEN, b"LIVE", b"Overview", b"CACHE", b"help")  # also what did not change meanwhile
        console.type(b"q")
        console.leave()
        console.restored()


@pytest.mark.fault
def test_f20_resized_small_and_large(daemon: Daemon) -> None:
    with attached(daemon) as console:
        console.resize(52, 14)
        console.until(b"Needs 60x16, has 52x14")
        console.resize(200, 60)
        console.until(b"WAITING LONGEST")
        console.type(b"q")
        assert console.leave() == 0
        console.restored()


@pytest.mark.fault
def test_f20_disconnected_it_says_so_and_still_answers(daemon: Daemon) -> None:
    with attached(daemon) as console:
        daemon.process.send_signal(signal.SIGKILL)
        console.until(b"RETRY")
        console.type(b"9")
        console.until(b"LOG")
        console.type(b"q")
        console.leave()
        console.restored()


@pytest.mark.fault
def test_a_frozen_daemon_is_stale_and_keys_are_answered(daemon: Daemon) -> None:
    with attached(daemon) as console:
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            console.until(b"STALE")
            console.type(b"?")
            console.until(b"EVERYWHERE")
            console.type(b"q")
            console.leave()
            console.restored()
        finally:
            daemon.process.send_signal(signal.SIGCONT)


def test_two_targets_are_tabs(daemon: Daemon, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with serving(other, "--workload", "multiturn:seed=5", "--speed", "4"):
        address = f"unix:{other}/kvbm-console/default.sock"
        own = f"unix:{tmp_path}/kvbm-console/default.sock"
        with attached(daemon, "attach", own, address, also=(b"{ }",)) as console:
            console.type(b"}")
            console.until(b"LIVE")
            console.type(b"q")
            assert console.leave() == 0


@pytest.mark.parametrize("place", ["seen", "seen.mcap"])
def test_what_is_seen_is_recorded_and_can_be_replayed(daemon: Daemon, tmp_path: Path, place: str) -> None:
    from kvbm_console.recording.reader import Recording

    with attached(daemon, "attach", "--record", place) as console:
        console.type(b"9")
        console.until(b"slot moved")
        console.type(b"q")
        assert console.leave() == 0
    recording = Recording.open(tmp_path / place)
    assert (tmp_path / place).is_file() is place.endswith(".mcap")
    assert not (tmp_path / "seen.mcap.parts").exists()
    assert recording.last_seq > recording.first_seq
    assert recording.state_at(recording.last_seq).seq == recording.last_seq + 1
    assert not recording.gaps
