"""Runs the installed program as users do: real processes, a real socket, no terminal.

Law of this file: nothing waits for time. A daemon is ready when it says so; what happens later is read from ``tail``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = str(Path(sys.executable).parent / "kvbm-console")
DEADLINE_S: Final = 60
"""Far beyond what any of these commands takes; a hang fails here and not in the whole run's timeout."""


def environment(directory: Path) -> dict[str, str]:
    """The environment of a user with a runtime and a state directory of his own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVBM_")}
    return {**kept, "XDG_RUNTIME_DIR": str(directory), "XDG_STATE_HOME": str(directory / "state"), "NO_COLOR": "1"}


def run(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [PROGRAM, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S, check=False,
        cwd=directory, env=environment(directory),
    )


def output(directory: Path, *args: str) -> str:
    """What a command that succeeds prints."""
    done = run(directory, *args)
    assert done.returncode == 0, (args, done.returncode, done.stdout, done.stderr)
    return done.stdout


class Daemon:
    """A running ``serve``; commands go to its socket by the default target."""

    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self.directory = directory
        self.process = process

    def output(self, *args: str) -> str:
        """What a command that succeeds prints."""
        return output(self.directory, *args)

    def json(self, *args: str) -> Any:
        """The JSON that a command prints."""
        return json.loads(self.output(*args, "--format", "json"))

    def until(self, kind: str, *more: str) -> dict[str, Any]:
        """Follow the events from the first one until there is one of this kind; returns it."""
        tail = subprocess.Popen(
            [PROGRAM, "tail", "--format", "jsonl", "--since", "0", *more], stdout=subprocess.PIPE, text=True,
            cwd=self.directory, env=environment(self.directory),
        )
        assert tail.stdout is not None
        try:
            for line in tail.stdout:
                event: dict[str, Any] = json.loads(line)
                if event["kind"] == kind:
                    return event
        finally:
            tail.terminate()
            tail.stdout.close()
            tail.wait(DEADLINE_S)
        raise AssertionError(f"the stream ended without {kind}")

    def stop(self) -> tuple[int, str, str]:
        """End it in an orderly way; exit status, rest of stdout, stderr."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def serving(directory: Path, *args: str) -> Iterator[Daemon]:
    """``serve`` with these flags on the default socket of ``directory``; killed if the body leaves it running."""
    process = subprocess.Popen(
        [PROGRAM, "serve", *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=directory, env=environment(directory),
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "serving" in line:
                break
        else:
            raise AssertionError(f"the daemon did not start: {process.communicate()}")
        yield Daemon(directory, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def on_terminal(directory: Path, *args: str, keys: bytes = b"", columns: int = 120, rows: int = 40) -> tuple[int, str]:
    """One command on a terminal of its own: (exit status, what it drew). ``keys`` are typed when it has drawn."""
    import fcntl
    import pty
    import re
    import select
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    surroundings = {**environment(directory), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [PROGRAM, *args], stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=surroundings,
        start_new_session=True,
    )
    os.close(theirs)
    drawn = bytearray()
    try:
        while select.select([ours], [], [], DEADLINE_S)[0]:
            try:
                part = os.read(ours, 65_536)
            except OSError:  # Linux answers EIO when the last process that had the terminal is gone
                break
            if not part:
                break
            drawn += part
            if keys and b"LIVE" in drawn:
                os.write(ours, keys)
                keys = b""
        status = process.wait(DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
    return status, re.sub(r"\x1b\[[0-9;?<>=]*[a-zA-Z]", "", drawn.decode(errors="replace"))
