"""The files of a lake: recordings are added whole, or followed while they are written.

A file is written beside its place and then renamed, so a reader sees whole files. ``LAKE/whole`` has, for each run, the
chunks whose files are complete: those stay as they are, also when the run is added again after its oldest segments were
removed. All other files are made again from the recording and so replace themselves.

``serve --lake`` follows the daemon's own recording in a process of low priority. The process may be killed at any time
and begins again. It goes on to the end of the recording when the daemon is gone.

Law of this file: however often a writer is killed and begins again, each row is in the lake once.
"""

import contextlib
import fcntl
import os
import re
import select
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from kvbm_console.analysis.lake import EVICTED, MOVE_NUMBERS, NO_SLOT, BlockRows, LakeRows, TableRows
from kvbm_console.analysis.lake_questions import NO_NAME, TABLES, TEXTS
from kvbm_console.analysis.walk import Evidence, Progress, Walker, walk
from kvbm_console.core.errors import RecordingError
from kvbm_console.core.ids import Tier
from kvbm_console.core.unreadable import UNREADABLE
from kvbm_console.extras import need
from kvbm_console.files import replacing
from kvbm_console.recording.reader import Items, Recording

EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
LOOK_S: Final = 2.0
"""A recording that grows is read this often."""
WRITE_S: Final = 60.0
"""Rows of the last chunk come into the lake at least this often."""
NICENESS: Final = 19
_KINDS: Final = range(2 * max(Tier) + 2)
_OPS: Final = ["evicted" if kind & EVICTED else "stored" for kind in _KINDS]
_TIERS: Final = [Tier(kind // 2).label if kind // 2 else None for kind in _KINDS]
"""The texts of each kind of a move."""
_ESCAPED: Final = re.compile(rf"[^\w.~-]|^_(?={NO_NAME.removeprefix('_')}$)")
"""Characters of a name that are written as in URLs. Letters of all alphabets stay: escaped they take three times as
many bytes, and a folder's name has room for 255."""


class Added(msgspec.Struct, frozen=True):
    """A recording that was added to a lake."""

    path: str
    engine: str
    rows: dict[str, int]
    files: int
    bytes: int


class LakeFiles:
    """The files of one run of one engine. Raises ``UsageError`` when pyarrow is missing, ``RecordingError`` when the
    list of its complete files cannot be read, and ``OSError``."""

    def __init__(self, lake: Path, engine: str, incarnation: str) -> None:
        self._arrow: Any = need("pyarrow", "lake", "pyarrow", "a lake")
        self._compute: Any = need("pyarrow.compute", "lake", "pyarrow", "a lake")
        self._parquet: Any = need("pyarrow.parquet", "lake", "pyarrow", "a lake")
        self._lake = lake
        self._place = _folder(lake, engine)
        self._incarnation = incarnation
        self._whole_at = lake / "whole" / self._place / f"{incarnation}.json"
        self._whole()  # refused before a long recording is read
        self.rows: dict[Path, tuple[str, int]] = {}
        """File to its table and its rows."""

    def write(self, table: str, chunk: int, day: int, rows: TableRows) -> None:
        """Write a file, unless it is there and complete."""
        when = date.fromordinal(EPOCH_DAY + day).isoformat()
        path = self._lake / table / f"day={when}" / self._place / f"{self._incarnation}-{chunk:08}.parquet"
        self.rows[path] = table, len(rows)
        with self._alone() as whole:
            if chunk not in whole or not path.exists():
                self._write(path, table, rows)

    def _write(self, path: Path, table: str, rows: TableRows) -> None:
        schema = _schema(self._arrow, table)
        columns = self._spread(rows) if isinstance(rows, BlockRows) else [
            self._arrow.array(column, type=field.type) for column, field in zip(rows.columns, schema, strict=True)
        ]
        made = self._arrow.Table.from_arrays(columns, schema=schema)
        _replace(path, lambda draft: self._parquet.write_table(made, str(draft), compression="zstd"))

    def _spread(self, rows: BlockRows) -> list[Any]:
        """The columns of ``blocks``, with the numbers of a move at each of its rows."""
        arrow, compute = self._arrow, self._compute
        seqs, times, kinds, slots, counts = (
            self._numbers(rows.moves[at::MOVE_NUMBERS], arrow.int64()) for at in range(MOVE_NUMBERS)
        )
        ends = compute.cumulative_sum(counts).cast(arrow.int32())
        slots = compute.if_else(compute.equal(slots, NO_SLOT), arrow.scalar(None, arrow.int64()), slots)
        seqs, times, ops, tiers, slots = (
            compute.run_end_decode(arrow.RunEndEncodedArray.from_arrays(ends, column)) for column in (
                seqs, times, arrow.array(_OPS).take(kinds), arrow.array(_TIERS).take(kinds), slots)
        )
        return [seqs, times, ops, tiers, self._numbers(rows.hashes, arrow.uint64()), slots]

    def _numbers(self, numbers: "array[int]", kind: Any) -> Any:
        return self._arrow.Array.from_buffers(kind, len(numbers), [None, self._arrow.py_buffer(numbers)])

    def whole(self, chunk: int) -> None:
        """All files of this chunk are complete."""
        with self._alone() as whole:
            if chunk not in whole:
                told = msgspec.json.encode(sorted({*whole, chunk}))
                _replace(self._whole_at, lambda draft: draft.write_bytes(told))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[set[int]]:
        """No other writer of this engine works inside the block, which gets the complete chunks of all of them."""
        # ``lake add`` beside ``serve --lake``: what the first has read of a chunk must not replace the whole chunk.
        self._whole_at.parent.mkdir(parents=True, exist_ok=True)
        place = os.open(self._whole_at.parent, os.O_RDONLY)
        try:
            fcntl.flock(place, fcntl.LOCK_EX)
            yield self._whole()
        finally:
            os.close(place)

    def _whole(self) -> set[int]:
        try:
            return set(msgspec.json.decode(self._whole_at.read_bytes(), type=list[int]))
        except FileNotFoundError:
            return set()
        except UNREADABLE as error:
            raise RecordingError(f"{self._whole_at} is no list of complete files ({error}); without it they are made "
                                 "again, as far as the recording still has their events") from None

    def added(self, name: str, engine: str) -> Added:
        """The files so far."""
        counts = dict.fromkeys(TABLES, 0)
        for table, rows in self.rows.values():
            counts[table] += rows
        return Added(name, engine, counts, len(self.rows), sum(path.stat().st_size for path in self.rows))


def _folder(lake: Path, engine: str) -> str:
    """The folder of an engine in each table."""
    with contextlib.suppress(UnicodeEncodeError):
        before = f"engine={quote(engine, safe='')}"
        if os.path.exists(lake / "whole" / before):
            return before  # an older lake's: its files are replaced, not written beside
    return f"engine={_ESCAPED.sub(_escaped, engine)}"


def _escaped(character: re.Match[str]) -> str:
    # A name in bytes that are no UTF-8 (of a file) has them as text, because DuckDB refuses such a folder.
    return "".join(f"%{byte:02X}" for byte in character[0].encode(errors="backslashreplace"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        write(draft)


def _schema(arrow: Any, table: str) -> Any:
    kinds = {"hash": arrow.uint64(), "miss_hash": arrow.uint64()}
    kinds |= dict.fromkeys(TEXTS, arrow.string())
    return arrow.schema([arrow.field(name, kinds.get(name, arrow.int64())) for name in TABLES[table]])


def add(
    evidence: Evidence, lake: Path, engine: str, incarnation: str, anchor_ns: int, progress: Progress | None = None
) -> Added:
    """Add the rows of a run. Raises as ``LakeFiles`` and ``walk`` do."""
    files = LakeFiles(lake, engine, incarnation)
    walk(evidence, [LakeRows(anchor_ns, files.write, files.whole)], progress=progress, what="add")
    return files.added(evidence.name, engine)


def follow(
    recording: Recording, lake: Path, engine: str, ended: Callable[[float], bool], *, write_s: float = WRITE_S
) -> Added:
    """Add the rows of a run while it is recorded, until it is closed, or what was written when ``ended`` became true
    is read. ``ended(seconds)`` waits at most so long.

    Raises as ``LakeFiles`` and ``Walker`` do.
    """
    files = LakeFiles(lake, engine, recording.incarnation)
    rows = LakeRows(recording.clock_anchor_ns, files.write, files.whole)
    walker, items = Walker([rows], recording.name), Items()
    over, written_s = False, time.monotonic()
    while True:
        for item in items.new(recording):
            walker.take(item)
        if over or recording.finished:
            break
        if time.monotonic() - written_s >= write_s:
            rows.flush()
            written_s = time.monotonic()
        over = ended(LOOK_S)
        recording.refresh()
    for item in items.end(recording):
        walker.take(item)
    walker.end()
    return files.added(recording.name, engine)


def main(path: str, run: str, lake: str, engine: str) -> int:
    """Entry of the process behind ``serve --lake``; the recording has ended when standard input does."""
    os.nice(NICENESS)
    over = False
    while True:
        try:
            recording = Recording.open(Path(path), run)
            break
        except RecordingError:  # its first frame is not written yet
            if over:
                raise
            over = _input_ended(LOOK_S)
    follow(recording, Path(lake), engine, _input_ended)
    return 0


def _input_ended(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])
