"""``make bench-tui``: the console in a terminal of its own, fed from a recorded run at a steady rate.

The console is a process of its own on a pty. It decodes a recording as its client decodes the stream, folds it and
draws; this process reads what it writes, presses ``?`` every so often, and stops the time until the help is there.

Law of this file: nothing is timed inside the console but its own frames; figures are of whole processes.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import resource
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import Connected, Disconnected, EventsArrived, FeedItem, Heartbeat, SnapshotTaken

ROOT: Final = Path(__file__).resolve().parents[2]
RATE: Final = 100_000
"""Events a second that arrive."""
WARM_S: Final = 1.5
"""Start-up and the first drawing are not part of a figure."""
SECONDS: Final = 8.0
KEYS: Final = 12
"""Presses of each case."""
TICK_S: Final = 1 / 60
HELP: Final = b"EVERYWHERE"
REQUESTS: Final = 8_000
"""Requests of the recorded run: about a million events."""


class Flood:
    """A feed that gives a recording's events at a rate, whatever the receiver does; ``mode`` is what happens then."""

    def __init__(self, path: Path, rate: int, mode: str) -> None:
        self.recording = Recording.open(path)
        self.rate, self.mode = rate, mode
        self.events = 0
        self.seconds = 0.0
        """How long it took to give them."""

    async def items(self) -> AsyncIterator[FeedItem]:
        """As ``stream.feed.Feed``."""
        recording = self.recording
        yield Connected("flood", recording.incarnation, 1, True, 131_072)
        yield SnapshotTaken(recording.state_at(recording.first_seq))
        began = time.monotonic()
        for events in recording.events(recording.first_seq + 1):
            yield EventsArrived(events)
            self.events += len(events)
            self.seconds = time.monotonic() - began
            yield Heartbeat(events[-1].seq, events[-1].at_ns, None, None, None, None, 0, 1)
            if self.mode != "flood" and self.events > self.rate // 2:
                break
            ahead = self.events / self.rate - (time.monotonic() - began)
            if self.rate and ahead > TICK_S:
                await asyncio.sleep(ahead)
        if self.mode == "gone":
            yield Disconnected("the daemon closed the connection", 3600.0)
        await asyncio.Event().wait()


def child(path: str, rate: str, mode: str, report: str) -> None:
    """The console itself; writes its counts to ``report`` on SIGUSR1."""
    from tui.app import ConsoleApp
    from tui.source import Session

    feed = Flood(Path(path), int(rate), mode)
    app = ConsoleApp(Session(feed), theme="dark")

    def tell(*_: object) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        state = {
            "cpu_s": usage.ru_utime + usage.ru_stime, "frames": app.frames, "events": feed.events,
            "feed_s": feed.seconds, "wall_s": time.monotonic(), "rss_mb": _rss_mb(),
            "requests": app.session.mirror.state.totals.slots_opened if app.session.mirror.state else 0,
        }
        draft = Path(report).with_suffix(".draft")
        draft.write_text(json.dumps(state))
        draft.rename(report)

    signal.signal(signal.SIGUSR1, tell)
    app.run()


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Terminal:
    """A console on a pty, its output read all the time."""

    def __init__(self, path: Path, columns: int, rows: int, rate: int, mode: str, scratch: Path) -> None:
        self.report = scratch / "report.json"
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        surroundings = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.pty_bench", "child", str(path), str(rate), mode, str(self.report)],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=surroundings, start_new_session=True,
        )
        os.close(theirs)
        self.bytes = 0

    def read(self, until: bytes | None, limit_s: float) -> float | None:
        """Read until these bytes came, or for so long; returns the time it took, None when they did not come."""
        began = time.monotonic()
        kept = b""
        while (left := limit_s - (time.monotonic() - began)) > 0:
            if not select.select([self.ours], [], [], left)[0]:
                break
            part = os.read(self.ours, 65_536)
            self.bytes += len(part)
            kept = kept[-64:] + part
            if until is not None and until in kept:
                return time.monotonic() - began
        return None

    def state(self) -> dict[str, Any]:
        """The console's counts now."""
        self.report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not self.report.exists():
            self.read(None, 0.01)
        found: dict[str, Any] = json.loads(self.report.read_text())
        return found

    def keys(self, number: int) -> list[float]:
        """Times from a press of ``?`` to the help on the screen, in seconds; one that never came counts as 10 s."""
        found = []
        for _ in range(number):
            self.read(None, 0.15)
            os.write(self.ours, b"?")
            found.append(self.read(HELP, 10.0) or 10.0)
            os.write(self.ours, b"?")
        return found

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.ours)


@contextlib.contextmanager
def console(path: Path, columns: int, rows: int, rate: int, mode: str, scratch: Path) -> Iterator[Terminal]:
    """A console that has drawn its first frames."""
    terminal = Terminal(path, columns, rows, rate, mode, scratch)
    try:
        if terminal.read(b"LIVE", 20.0) is None:
            raise AssertionError("the console did not draw")
        yield terminal
    finally:
        terminal.close()


def record(directory: Path, requests: int) -> Path:
    """A run of the simulated engine, recorded."""
    target = directory / "run"
    program = [sys.executable, "-c", "from kvbm_console.cli.main import main; main()"]
    subprocess.run(
        [*program, "serve", "--workload", f"multiturn:requests={requests}", "--speed", "max", "--exit-when-done",
         "--record", str(target), "--listen", f"unix:{directory}/d.sock"], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, cwd=ROOT,
    )
    return target


def steady(path: Path, columns: int, rows: int, view: bytes, scratch: Path) -> dict[str, float]:
    """Frames a second and the share of a core while events arrive at the full rate."""
    with console(path, columns, rows, RATE, "flood", scratch) as terminal:
        os.write(terminal.ours, view)
        terminal.read(None, WARM_S)
        before = terminal.state()
        terminal.read(None, SECONDS)
        after = terminal.state()
        wall = after["wall_s"] - before["wall_s"]
        return {
            "frames_s": (after["frames"] - before["frames"]) / wall,
            "core": (after["cpu_s"] - before["cpu_s"]) / wall,
            "events_s": (after["events"] - before["events"]) / wall,
        }


def main() -> None:
    """All figures, one line each; the argument is the number of requests of the recorded run."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else REQUESTS
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        path = record(scratch, requests)
        total = Recording.open(path)
        print(f"a run of {total.last_seq - total.first_seq + 1:,} events; {RATE:,} a second are offered")
        for columns, rows, want in ((160, 50, 30), (200, 200, 20)):
            for view, label in ((b"1", "overview"), (b"2", "slots"), (b"4", "timeline")):
                got = steady(path, columns, rows, view, scratch)
                print(f"{columns}x{rows} {label:<9} {got['frames_s']:5.1f} frames/s (wanted {want})  "
                      f"{got['core']:4.0%} of a core (wanted 25 %)  {got['events_s']:>9,.0f} events/s taken",
                      flush=True)
        for mode in ("flood", "frozen", "gone"):
            with console(path, 160, 50, RATE, mode, scratch) as terminal:
                terminal.read(None, WARM_S)
                found = sorted(terminal.keys(KEYS))
                print(f"key to screen, daemon {mode:<7} median {statistics.median(found) * 1e3:4.0f} ms  "
                      f"worst of {KEYS} {found[-1] * 1e3:4.0f} ms (wanted 100)", flush=True)
        with console(path, 160, 50, 10_000_000, "flood", scratch) as terminal:
            sizes = []
            while not sizes or sizes[-1][0] < total.last_seq * 0.97:
                terminal.read(None, 2.0)
                state = terminal.state()
                sizes.append((state["events"], state["rss_mb"], state["requests"]))
                if len(sizes) > 3 and sizes[-1][0] == sizes[-2][0]:
                    break
            middle = sizes[len(sizes) // 2]
            print(f"memory after {middle[2]:,} requests {middle[1]:.0f} MB, after {sizes[-1][2]:,} "
                  f"{sizes[-1][1]:.0f} MB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:6])
    else:
        main()
