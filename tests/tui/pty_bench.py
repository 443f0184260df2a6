"""``make bench-tui``: the console in a terminal of its own, attached to a daemon that gives a recorded run at a rate.

Three processes: the daemon (``flood``), the console on a pty, and this one, which reads what the console writes,
presses ``?`` every so often, and stops the time until the help is there. The daemon is frozen and killed for the keys.
The soak is a real simulated engine at full speed. A frame is what arrived at this end of the pty as one: the terminal
says that it knows synchronised output, so each is between its marks. Shares of a core are the console's CPU time over
the wall's; beside them stands what a plain loop cost in the same run, and how much of its time a loop that only counts
got, because a crowded machine runs everything slower.
The look back (``back_bench``) is measured in this process.

Law of this file: nothing is timed inside the console but its own frames; figures are of whole processes.
"""

import asyncio
import contextlib
import fcntl
import gc
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
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvbm_console.recording.reader import Recording
from tests.tui.back_bench import look_back_figures

ROOT: Final = Path(__file__).resolve().parents[2]
RATE: Final = 100_000
"""Events a second that arrive."""
WARM_S: Final = 2.5
"""Start-up, the first drawing and the decision to sample are not part of a figure."""
SECONDS: Final = 5.0
KEYS: Final = 12
"""Presses of each case."""
HELP: Final = b"EVERYWHERE"
TAPE_REQUESTS: Final = 12_000
"""Requests of the recorded run: 1.2 million events: the flood outlasts a figure, and ten minutes at 2,000 a second."""
REQUESTS: Final = 5_000
"""Requests of the soak."""
FRAME: Final = b"\x1b[?2026h"
"""How a frame begins on a terminal that knows synchronised output."""
ASKED: Final = b"\x1b[?2026$p"
ANSWER: Final = b"\x1b[?2026;2$y"
SAMPLE_S: Final = 2.0
SOAK_LINES: Final = 10
SOAK_LIMIT_S: Final = 7_200.0
PROGRAM: Final = (sys.executable, "-c", "from kvbm_console.cli.main import main; main()")


def child(address: str, report: str) -> None:
    """The console itself; writes its counts to ``report`` on SIGUSR1."""
    asyncio.run(_console(address, report))


async def _console(address: str, report: str) -> None:
    from kvbm_console.cli.attach import live_session
    from tui.app import ConsoleApp

    session = live_session(address)
    app = ConsoleApp(session, theme="dark")

    def tell(*_: object) -> None:
        usage, mirror = resource.getrusage(resource.RUSAGE_SELF), session.mirror
        state = {
            "cpu_s": usage.ru_utime + usage.ru_stime, "frames": app.frames, "wall_s": time.monotonic(),
            "events": mirror.log_total, "passed": mirror.coverage.passed, "lost": mirror.lost_events,
            "rss_mb": _rss_mb(),
            "requests": mirror.state.totals.slots_opened if mirror.state else 0,
            "gone": mirror.disconnected is not None,
        }
        draft = Path(report).with_suffix(".draft")
        draft.write_text(json.dumps(state))
        draft.rename(report)

    signal.signal(signal.SIGUSR1, tell)
    gc.freeze()
    await app.run_async()


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Terminal:
    """A console on a pty, its output read all the time."""

    def __init__(self, address: str, columns: int, rows: int, scratch: Path) -> None:
        self.report = scratch / "report.json"
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        surroundings = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.pty_bench", "child", address, str(self.report)],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=surroundings, start_new_session=True,
        )
        os.close(theirs)
        self.bytes = 0
        self.frames = 0
        """Frames that arrived here."""
        self._tail = b""

    def _see(self, part: bytes) -> None:
        """Count frames, and answer what a terminal is asked at its start."""
        self.bytes += len(part)
        whole = self._tail + part
        self.frames += whole.count(FRAME)
        if ASKED in whole:
            os.write(self.ours, ANSWER)
        keep = max(len(FRAME), len(ASKED)) - 1
        cut = max(whole.rfind(FRAME) + len(FRAME) if FRAME in whole else 0,
                  whole.rfind(ASKED) + len(ASKED) if ASKED in whole else 0, len(whole) - keep)
        self._tail = whole[cut:]

    def read(self, until: bytes | None, limit_s: float) -> float | None:
        """Read until these bytes came, or for so long; returns the time it took, None when they did not come."""
        began = time.monotonic()
        kept = b""
        while (left := limit_s - (time.monotonic() - began)) > 0:
            if not select.select([self.ours], [], [], left)[0]:
                break
            part = os.read(self.ours, 65_536)
            self._see(part)
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
            if self.process.poll() is not None:
                raise AssertionError(f"the console ended with {self.process.returncode}")
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
def daemon(scratch: Path, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A daemon that listens; it is ended behind the block."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise AssertionError(f"{command} did not listen")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


@contextlib.contextmanager
def flooded(
    path: Path, columns: int, rows: int, scratch: Path, rate: int = RATE
) -> Iterator[tuple[Terminal, "subprocess.Popen[bytes]"]]:
    """A console that has drawn its first frames, on a daemon that floods it."""
    address = f"unix:{scratch}/flood.sock"
    with daemon(scratch, sys.executable, "-m", "tests.tui.flood", str(path), str(rate), address) as source:
        terminal = Terminal(address, columns, rows, scratch)
        try:
            if terminal.read(b"ev/s", 20.0) is None:
                raise AssertionError("the console did not draw")
            yield terminal, source
        finally:
            terminal.close()


def record(directory: Path, requests: int) -> Path:
    """A run of the simulated engine, recorded."""
    target = directory / "run"
    subprocess.run(
        [*PROGRAM, "serve", "--workload", f"multiturn:requests={requests}", "--speed", "max", "--exit-when-done",
         "--record", str(target), "--listen", f"unix:{directory}/d.sock"], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, cwd=ROOT,
    )
    return target


def steady(path: Path, columns: int, rows: int, view: bytes, scratch: Path) -> dict[str, Any]:
    """Frames a second and the share of a core while events arrive at the full rate."""
    with flooded(path, columns, rows, scratch) as (terminal, source):
        os.write(terminal.ours, view)
        terminal.read(None, WARM_S)
        before, frames = terminal.state(), terminal.frames
        terminal.read(None, SECONDS)
        after, frames = terminal.state(), terminal.frames - frames
        assert source.stdout is not None
        if select.select([source.stdout], [], [], 0)[0]:
            raise AssertionError(f"the flood did not last for {SECONDS:g} s: {source.stdout.readline()!r}")
        wall = after["wall_s"] - before["wall_s"]
        return {
            "frames_s": frames / wall, "drawn_s": (after["frames"] - before["frames"]) / wall,
            "core": (after["cpu_s"] - before["cpu_s"]) / wall,
            "events_s": (after["events"] - before["events"]) / wall,
            "lost": after["lost"], "passed": after["passed"] - before["passed"],
            "seen_s": (after["events"] - before["events"] - after["passed"] + before["passed"]) / wall,
        }


def plain_ns() -> float:
    """The cost of one ``append`` on this machine at this moment, in CPU time."""
    return min(timeit.repeat("x.append(4)", "x=[]", number=200_000, repeat=5, timer=time.process_time)) / 200_000 * 1e9


def got_of_time() -> float:
    """The share of its time that a loop which only counts gets on this machine at this moment."""
    wall, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < 0.2:
        pass
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def draw_figures(path: Path, scratch: Path) -> None:
    """Frames and shares of a core, by size and view."""
    for columns, rows, want, cap in ((160, 50, 30, "wanted 25 %"), (200, 200, 20, "no bound")):
        for view, label in ((b"1", "overview"), (b"2", "slots"), (b"4", "timeline"), (b"5", "transfers")):
            got = steady(path, columns, rows, view, scratch)
            print(f"{columns}x{rows} {label:<9} {got['frames_s']:5.1f} frames/s (wanted {want})  "
                  f"{got['core']:4.0%} of a core ({cap})  {got['events_s']:>9,.0f} events/s counted, "
                  f"{got['seen_s']:,.0f} looked at, {got['lost']:,} lost; "
                  f"append {plain_ns():.0f} ns, {got_of_time():.0%} of the time", flush=True)


def key_figures(path: Path, scratch: Path) -> None:
    """How long a key takes while the daemon floods, is frozen, is gone."""
    for mode in ("flooding", "frozen", "gone"):
        with flooded(path, 160, 50, scratch) as (terminal, source):
            terminal.read(None, WARM_S)
            if mode != "flooding":
                source.send_signal(signal.SIGSTOP if mode == "frozen" else signal.SIGKILL)
                terminal.read(None, 3.0)
            found = sorted(terminal.keys(KEYS))
            print(f"key to screen, daemon {mode:<8} median {statistics.median(found) * 1e3:4.0f} ms  "
                  f"worst of {KEYS} {found[-1] * 1e3:4.0f} ms (wanted 100)", flush=True)


def soak(requests: int, scratch: Path) -> None:
    """Memory while this many requests pass through, from an engine that runs at full speed."""
    address = f"unix:{scratch}/soak.sock"
    command = [*PROGRAM, "serve", "--workload", f"multiturn:requests={requests}", "--speed", "max", "--listen", address]
    with daemon(scratch, *command):
        terminal = Terminal(address, 160, 50, scratch)
        try:
            terminal.read(b"ev/s", 20.0)
            began, told, highest = time.monotonic(), 0, 0.0
            while told < SOAK_LINES and time.monotonic() - began < SOAK_LIMIT_S:
                terminal.read(None, SAMPLE_S)
                state = terminal.state()
                highest = max(highest, state["rss_mb"])
                if state["requests"] >= requests * (told + 1) // SOAK_LINES:
                    told = state["requests"] * SOAK_LINES // requests
                    print(f"memory after {state['requests']:>7,} requests {state['rss_mb']:5.0f} MB, highest "
                          f"{highest:.0f} MB; {time.monotonic() - began:.0f} s, {state['lost']:,} events lost",
                          flush=True)
        finally:
            terminal.close()


def main() -> None:
    """All figures, one line each; the argument is the number of requests of the soak."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else REQUESTS
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        path = record(scratch, TAPE_REQUESTS)
        total = Recording.open(path)
        if total.gaps:
            raise AssertionError(f"the recorder did not keep up with the engine: {total.gaps}")
        print(f"a run of {total.last_seq - total.first_seq + 1:,} events; {RATE:,} a second are offered", flush=True)
        draw_figures(path, scratch)
        key_figures(path, scratch)
        asyncio.run(look_back_figures(path))
        soak(requests, scratch)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:4])
    else:
        main()
