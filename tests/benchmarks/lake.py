"""``python -m tests.benchmarks.lake 100``: every question to a lake of so many million events, with time and memory.

The lake has 64 engines on four days, in files of about 240,000 events. Their rows are those of a recorded run of the
simulated engine, written again and again: each copy with hashes, names, numbers and times of its own. Four engines at a
time meet the same prompts, so a prefix lies on several. Each question is the command in a process of its own. The
result is compared with the same question to the run alone where it must be a multiple. ``LAKE=DIR`` keeps the lake, and
asks one that is there again. In front of that the run is added to a lake, beside the same run only decoded, and decoded
and folded.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from kvbm_console.analysis.lake import DAY_NS
from kvbm_console.analysis.lake_files import add
from kvbm_console.analysis.lake_questions import QUESTIONS, TABLES
from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.core.config import SECOND_NS
from kvbm_console.recording.reader import Recording

RUN = Path(__file__).resolve().parents[2] / "recordings" / "screens" / "run.mcap"
ENGINES = 64
ALIKE = 4
"""Engines that meet the same prompts, one after the other."""
LATER_NS = 37_000_000
DAYS = 4
COPY_NS = 14 * SECOND_NS
"""The time of the recorded run."""
COPIES = 15
"""Copies of a file."""
SECONDS_MAX = 10.0
BYTES_MAX = 2 << 30
NEVER = (1 << 64) - 59
"""An odd number near 2 to the power of 64: its multiples are keys that share no low bits."""


class RowsOfRun:
    """The rows of the recorded run by table."""

    def __init__(self, place: Path) -> None:
        recording = Recording.open(RUN)
        add(evidence_of(recording), place, "once", recording.incarnation, recording.clock_anchor_ns)
        self.tables = {table: pyarrow.parquet.read_table(_files(place, table)) for table in TABLES}
        self.events = recording.last_seq + 1 - recording.first_seq
        self.began_ns = recording.clock_anchor_ns // DAY_NS * DAY_NS
        self.moved_ns = self.began_ns - recording.clock_anchor_ns

    def copy(self, table: str, engine: int, number: int, at_ns: int) -> Any:
        """A copy of a table's rows at this time of the first day."""
        changed = self.tables[table]
        key = ((engine // ALIKE) << 32 | number + 1) * NEVER % (1 << 64)
        for at, name in enumerate(TABLES[table]):
            column = changed.column(at)
            if name in ("hash", "miss_hash"):
                column = pyarrow.compute.bit_wise_xor(column, pyarrow.scalar(key, pyarrow.uint64()))
            elif name == "request":
                column = pyarrow.compute.binary_join_element_wise(column, f"{engine}-{number}", "-")
            elif name in ("at_ns", "opened_ns", "first_token_ns"):
                column = pyarrow.compute.add(column, self.moved_ns + at_ns)
            elif name in ("seq", "slot"):
                column = pyarrow.compute.add(column, number * self.events)
            changed = changed.set_column(at, changed.schema.field(at), column)
        return changed


def _files(place: Path, table: str) -> list[str]:
    return sorted(map(str, (place / table).glob("*/*/*.parquet")))


def write(rows: RowsOfRun, place: Path, copies: int) -> None:
    """Write a lake of so many copies of the run."""
    for engine in range(ENGINES):
        mine = copies // ENGINES + (engine < copies % ENGINES)
        for numbers in _chunks(mine):
            day = numbers[0] * DAYS // max(1, mine)
            for table in TABLES:
                parts = [
                    rows.copy(table, engine, number, day * DAY_NS + number * COPY_NS + engine % ALIKE * LATER_NS)
                    for number in numbers
                ]
                when = datetime.fromtimestamp((rows.began_ns + day * DAY_NS) / SECOND_NS, UTC).date().isoformat()
                folder = place / table / f"day={when}" / f"engine=prod-{engine}"
                folder.mkdir(parents=True, exist_ok=True)
                pyarrow.parquet.write_table(
                    pyarrow.concat_tables(parts), folder / f"run-{numbers[0] // COPIES:08}.parquet", compression="zstd"
                )


def _chunks(copies: int) -> Iterator[range]:
    for start in range(0, copies, COPIES):
        yield range(start, min(copies, start + COPIES))


def ask(place: Path, question: str, block: str | None = None) -> tuple[list[list[Any]], float, float, int]:
    """The rows of an answer, its seconds by the wall and of the processor, and the most memory of its process in
    bytes."""
    asked = [sys.executable, "-P", "-c", "from kvbm_console.cli.main import main; main()", "lake", "ask", str(place),
             question, "--format", "json", *(["--hash", block] if block else [])]
    began = time.monotonic()
    with subprocess.Popen(asked, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert not process.returncode
    wall_s = time.monotonic() - began
    return json.loads(said)["rows"], wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1_024


def measure(place: Path, events: int) -> bool:
    """Write, ask, print; True if every question kept its bounds."""
    once, many = place / "once", place / "many"
    rows, began = RowsOfRun(once), time.monotonic()
    copies = -(-events // rows.events)
    if not many.exists():
        write(rows, many, copies)
    size = sum(path.stat().st_size for path in many.rglob("*.parquet"))
    counts = {table: copies * held.num_rows for table, held in rows.tables.items()}
    print(f"{copies * rows.events:,} events in {len(list(many.rglob('*.parquet'))):,} files of {size / 1e6:,.0f} MB, "
          f"written in {time.monotonic() - began:.0f} s: "
          + ", ".join(f"{count:,} {table}" for table, count in counts.items()), flush=True)
    key = rows.copy("lookups", 0, 0, 0).column("miss_hash").drop_null()[0].as_py()
    kept = True
    for question in QUESTIONS:
        block = f"{key:016x}" if question == "who-has" else None
        answer, seconds, busy_s, most = ask(many, question, block)
        kept &= seconds <= SECONDS_MAX and most <= BYTES_MAX
        print(f"{question:16} {seconds:6.2f} s, {busy_s:6.2f} s of processor, {most / 1e6:6,.0f} MB, "
              f"{len(answer)} rows", flush=True)
        if question in ("hit-rate", "times"):  # rows of sums begin with the sum over all
            alone, *_ = ask(once, question)
            assert answer[0][1] == copies * alone[0][1], (answer[0], alone[0])
    return kept


def cost_us(read: Callable[[Recording], object]) -> float:
    """Microseconds of the processor that an event of the recorded run takes, the least of five times."""
    least = float("inf")
    for _ in range(5):
        recording = Recording.open(RUN)
        began = time.process_time()
        read(recording)
        least = min(least, (time.process_time() - began) * 1e6 / (recording.last_seq + 1 - recording.first_seq))
    return least


def print_cost(place: Path) -> None:
    """Print the time that the rows of an event take, beside the time that reading it takes."""
    numbers = itertools.count()

    def added(recording: Recording) -> None:
        add(evidence_of(recording), place / f"{next(numbers)}", "a", recording.incarnation, recording.clock_anchor_ns)

    decoded = cost_us(lambda recording: deque(evidence_of(recording).items(), maxlen=0))
    folded = cost_us(lambda recording: walk(evidence_of(recording), []))
    print(f"lake add: {cost_us(added):.2f} us of processor an event; decoded alone {decoded:.2f}, decoded and folded "
          f"{folded:.2f}", flush=True)


def main() -> None:
    """Measure a lake of the millions of events in the first argument."""
    events = int(float(sys.argv[1] if len(sys.argv) > 1 else 1) * 1e6)
    kept_at = os.environ.get("LAKE")
    with tempfile.TemporaryDirectory(prefix="kvbm-") as scratch:
        print_cost(Path(scratch) / "cost")
        kept = measure(Path(kept_at or scratch), events)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
