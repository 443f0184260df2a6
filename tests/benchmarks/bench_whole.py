"""Figures of whole processes: what observers cost an engine, and how soon a console shows something.

Law of this file: real processes, sockets and terminals. The engine of ``observers`` is simulated at full speed, so what
is compared is the processor's time of its whole process: decisions, publishing, ten streams and the recorder's thread.
It is that of a long run less that of a short one: starting, connecting and sealing are no part of it.
"""

import contextlib
import os
import pty
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.benchmarks.harness import Figure, Target
from tests.tui.pty_bench import PROGRAM, ROOT, daemon

SHORT: Final = 150
LONG: Final = 750
SUBSCRIBERS: Final = 10
STARTS: Final = 5
DRAWN: Final = b"ev/s"
"""Part of the console's first line with values."""
LIMIT_S: Final = 60.0
SAME: Final = ("requests", "slots", "candidates", "hits")
"""Lines of the summary that do not depend on who looks on."""


@contextlib.contextmanager
def _on_terminal(*command: str) -> Iterator[int]:
    """A program on a pty; gives the end to read from. Ended behind the block."""
    ours, theirs = pty.openpty()
    surroundings = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*PROGRAM, *command], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=surroundings,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _drain(end: int, stop: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not stop.is_set():
            if select.select([end], [], [], 0.1)[0]:
                os.read(end, 65_536)


@contextlib.contextmanager
def _observers(address: str) -> Iterator[None]:
    """Ten subscribers and a console."""
    tails = [
        subprocess.Popen([*PROGRAM, "tail", address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        for _ in range(SUBSCRIBERS)
    ]
    stop = threading.Event()
    try:
        with _on_terminal("attach", address) as end:
            reader = threading.Thread(target=_drain, args=(end, stop))
            reader.start()
            try:
                yield
            finally:
                stop.set()
                reader.join()
    finally:
        for tail in tails:
            tail.kill()
            tail.wait()


def _run(requests: int, observed: bool) -> tuple[float, list[str]]:
    """Seconds of the processor until the work is done, and what the summary says of the work."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place:
        address = f"unix:{place}/d.sock"
        command = [
            *PROGRAM, "serve", "--workload", f"multiturn:requests={requests}", "--speed", "max", "--exit-when-done",
            "--listen", address, *(["--record", f"{place}/run"] if observed else []),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        with _observers(address) if observed else contextlib.nullcontext():
            summary = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, summary
    return usage.ru_utime + usage.ru_stime, [line for line in summary.splitlines() if line.startswith(SAME)]


def observers() -> Figure:
    """A run with a console, a recorder and ten subscribers beside the same run alone; both do the same work."""
    took = []
    for observed in (False, True):
        short, _ = _run(SHORT, observed)
        long, said = _run(LONG, observed)
        took.append(((long - short) * 1e9 / (LONG - SHORT), said))
    (bare, said), (ours, said_too) = took
    assert said == said_too, "observers changed what happened"
    return Figure("observed: a request", ours, "unobserved", bare, ours / bare, Target(ratio=1.02))


def first_frame() -> Figure:
    """From the start of ``attach`` to a drawn line with values, on a daemon that works."""
    taken, bare = [], []
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place:
        address = f"unix:{place}/d.sock"
        serve = (*PROGRAM, "serve", "--workload", "multiturn", "--listen", address)
        with daemon(Path(place), *serve):
            for _ in range(STARTS):
                began = time.perf_counter_ns()
                with _on_terminal("attach", address) as end:
                    _wait_for(end)
                    taken.append(time.perf_counter_ns() - began)
                began = time.perf_counter_ns()
                subprocess.run([sys.executable, "-c", "pass"], check=True)
                bare.append(time.perf_counter_ns() - began)
    ours, reference = min(taken), min(bare)  # of the others a neighbour has a part
    return Figure("first frame of attach", ours, "python -c pass", reference, ours / reference, Target(ns=0.6e9),
                  compared=False)


def _wait_for(end: int) -> None:
    kept, until = b"", time.monotonic() + LIMIT_S
    while DRAWN not in kept:
        left = until - time.monotonic()
        if left <= 0 or not select.select([end], [], [], left)[0]:
            raise AssertionError("the console did not draw")
        kept = kept[-64:] + os.read(end, 65_536)


BENCHES: Final = {"first frame of attach": first_frame, "observed, a request": observers}
