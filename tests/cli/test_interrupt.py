"""Ctrl-c ends every long command: at once, with 130, without a traceback and without a process that is left.

Law of this file: real processes in a process group of their own, and the whole group is interrupted, as a terminal
does. A command is interrupted after a sign that its work has begun. All pipes are read to their end, which comes when
the last process that holds them is gone.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

import pytest

from tests.cli.programs import DEADLINE_S, PROGRAM, environment

RECORDINGS: Final = Path(__file__).resolve().parents[2] / "recordings"
TAPE: Final = str(RECORDINGS / "thrash.mcap")
ENDS_WITHIN_S: Final = 5.0
"""One second on a machine of one's own (measured: below 0.3 s); tests share their cores."""
BEGUN: Final = "the work has begun"
ENDLESS: Final = f'''
import sys
import kvbm_console.cli.output as told

def progress():
    def tell(what, done, total):
        print({BEGUN!r}, file=sys.stderr, flush=True)
        while True:
            pass
    return tell

told.progress = progress
from kvbm_console.cli.main import main
main()
'''
"""The program, whose work never ends after its first report of progress."""
HALF_WRITTEN: Final = f'''
import sys
import kvbm_console.recording.output as output

real = output.write_draft

def write_draft(draft, about, frames):
    def half():
        yield next(frames)
        print({BEGUN!r}, file=sys.stderr, flush=True)
        while True:
            pass
    real(draft, about, half())

output.write_draft = write_draft
from kvbm_console.cli.main import main
main()
'''
"""The program, which never comes to the second frame of a recording that it writes."""
HALF_DRAWN: Final = f'''
import sys

class Anything:
    def __getattr__(self, name):
        return self
    def __call__(self, *args, **more):
        return self

class Figure:
    def __init__(self, **more):
        pass
    def subplots(self):
        return Anything()
    def savefig(self, path, **more):
        with open(path, "wb") as file:
            file.write(b"<svg")
            file.flush()
            print({BEGUN!r}, file=sys.stderr, flush=True)
            while True:
                pass
'''
"""Stands for the plot library, which is an extra: a picture of which only the beginning is ever written."""
OUTCOMES: Final = {
    "merge into a file": ("rec", "merge", TAPE, TAPE, "--out", "out.mcap"),
    "merge into a directory": ("rec", "merge", TAPE, TAPE, "--out", "out"),
    "cut into a directory": ("rec", "cut", TAPE, "out"),
}
ENDLESS_WORKER: Final = f"""
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    from kvbm_console.simulator.traces import MooncakeTrace
    def lines(self, kind):
        with open({{fifo!r}}, "w") as begun:
            begun.write({BEGUN!r})
        while True:
            pass
    MooncakeTrace.lines = lines
"""
"""A start of Python that keeps a worker at the first line of its trace; the command itself runs as always."""
REQUEST: Final = '{"timestamp": 0, "input_length": 5, "output_length": 4, "hash_ids": [1]}'
TOLD: Final = f'''
import sys
import kvbm_console.cli.explore as explore

explore._progress = lambda: lambda report: report.runs and print({BEGUN!r}, file=sys.stderr, flush=True)
from kvbm_console.cli.main import main
main()
'''
"""The program, which says when a search has made its first run."""
LONG: Final = {
    "rec verify": ("rec", "verify", TAPE), "rec diff": ("rec", "diff", TAPE, TAPE), "why": ("why", "chat-0.0", TAPE),
    "doctor": ("doctor", TAPE), "export jsonl": ("rec", "export", TAPE, "--to", "jsonl", "--out", "out.jsonl"),
    "export chrome": ("rec", "export", TAPE, "--to", "chrome", "--out", "out.json"),
    "export perfetto": ("rec", "export", TAPE, "--to", "perfetto", "--out", "out.pftrace"),
    "export parquet": ("rec", "export", TAPE, "--to", "parquet", "--out", "out"),
}


class Running:
    """A command in a process group of its own, killed with it if the block leaves it running."""

    def __init__(self, directory: Path, *command: str) -> None:
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment(directory), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def interrupt(self, number: signal.Signals) -> tuple[int, str, float]:
        """Ctrl-c or SIGTERM: (exit status, stderr, seconds until the last process was gone)."""
        began = time.monotonic()
        if number is signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid, number)
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors.decode(), time.monotonic() - began


def alive(group: int) -> list[str]:
    """The processes of a group that live on; one that has closed its pipes is about to be gone, and is waited for."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = place.read_text().rpartition(")")
            if int(rest.split()[2]) == group:
                ending = os.pidfd_open(int(place.parent.name))
                try:
                    if not select.select([ending], [], [], ENDS_WITHIN_S)[0]:
                        found.append(name)
                finally:
                    os.close(ending)
    return found


def ended(running: Running, number: signal.Signals = signal.SIGINT) -> None:
    """Interrupt, and demand an end without a trace."""
    status, errors, seconds = running.interrupt(number)
    assert status == 128 + number, (status, errors)
    assert "Traceback" not in errors
    assert "leaked" not in errors
    assert seconds < ENDS_WITHIN_S
    assert alive(running.process.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_compare_ends_with_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    (tmp_path / "sitecustomize.py").write_text(ENDLESS_WORKER.format(fifo=str(fifo)))
    (tmp_path / "trace.jsonl").write_text(REQUEST)
    shown = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path)!r}; from kvbm_console.cli.main import main; main()"
    with Running(tmp_path, sys.executable, "-c", shown, "compare", "--trace", "mooncake:trace.jsonl", "--policies",
                 "simple_lru,lfu,lrfu,belady", "--total-kv-blocks", "40,80,160", "--workers", "2") as running:
        assert fifo.read_text().startswith(BEGUN)
        ended(running, number)


def test_a_terminated_run_leaves_the_requests_of_before(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("the requests of before")
    with Running(tmp_path, PROGRAM, "simulate", "--trace", "multiturn:requests=100000,sessions=8", "--total-kv-blocks",
                 "400", "--stats-every", "10", "--requests-out", "rows.csv") as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline()
        ended(running, signal.SIGTERM)
    assert (rows.read_text(), list(tmp_path.glob("rows*"))) == ("the requests of before", [rows])


def test_a_terminated_search_tells_its_findings(tmp_path: Path) -> None:
    with Running(tmp_path, sys.executable, "-c", TOLD, "explore", "leader", "--workers", "1", "--format",
                 "json") as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline().decode().strip() == BEGUN
        running.process.terminate()
        told, errors = running.process.communicate(timeout=DEADLINE_S)
    assert (running.process.returncode, json.loads(told)["interrupted"], b"Traceback" in errors) == (130, True, False)


def test_simulate_ends(tmp_path: Path) -> None:
    command = (PROGRAM, "simulate", "--trace", "multiturn:requests=100000,sessions=8", "--total-kv-blocks", "400",
               "--kv-cpu-blocks", "400", "--stats-every", "10")
    with Running(tmp_path, *command) as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline()
        ended(running)


def test_merge_ends(tmp_path: Path) -> None:
    with Running(tmp_path, PROGRAM, "rec", "merge", str(RECORDINGS / "screens" / "run.mcap"), TAPE) as running:
        assert running.process.stdout is not None
        assert running.process.stdout.read(10)  # it has much more to say than a pipe holds
        ended(running)


@pytest.mark.parametrize("name", LONG)
def test_work_on_a_recording_ends_and_leaves_no_file(name: str, tmp_path: Path) -> None:
    with Running(tmp_path, sys.executable, "-c", ENDLESS, *LONG[name]) as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline().decode().strip() == BEGUN
        ended(running)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_recording_that_is_half_written_leaves_no_file(name: str, tmp_path: Path) -> None:
    with Running(tmp_path, sys.executable, "-c", HALF_WRITTEN, *OUTCOMES[name]) as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline().decode().strip() == BEGUN
        assert any(tmp_path.rglob("*.tmp"))
        ended(running)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_killed_export_stands_in_nobodys_way(form: str, tmp_path: Path) -> None:
    """SIGTERM ends a command as ``kill -9`` does."""
    wanted = ("rec", "export", TAPE, "--to", form, "--out", "events")
    with Running(tmp_path, sys.executable, "-c", ENDLESS, *wanted) as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline().decode().strip() == BEGUN
        running.process.kill()
        running.process.wait(DEADLINE_S)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    with Running(tmp_path, PROGRAM, *wanted) as running:
        assert running.process.wait(DEADLINE_S) == 0
    assert (tmp_path / "events").exists()


def test_a_picture_that_is_half_drawn_leaves_the_one_of_before(tmp_path: Path) -> None:
    library = tmp_path / "library" / "matplotlib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("rcParams = {}\n\ndef use(name):\n    pass\n")
    (library / "figure.py").write_text(HALF_DRAWN)
    place = tmp_path / "here"
    place.mkdir()
    (place / "curves.svg").write_text("the picture of before")
    shown = f"import sys; sys.path.insert(0, {str(library.parent)!r}); from kvbm_console.cli.main import main; main()"
    with Running(place, sys.executable, "-c", shown, "compare", "--trace", "multiturn:requests=3", "--policies",
                 "simple_lru", "--cache-only", "--workers", "1", "--plot", "curves.svg") as running:
        assert running.process.stderr is not None
        assert any(line.decode().strip() == BEGUN for line in running.process.stderr)
        assert len(list(place.iterdir())) == 2
        ended(running)
    assert [file.read_text() for file in place.iterdir()] == ["the picture of before"]
