"""Exports: a recording for other programs.

``jsonl`` for scripts, ``chrome`` and ``perfetto`` for trace viewers, ``parquet`` for SQL, ``html`` to send. Libraries
that only one format needs are extras of the package and are imported when that format is written.

Law of this package: a file takes its name only when it is complete, and nothing is overwritten.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Final

import msgspec

from kvbm_console.analysis.export.rows import Consumer, Rows
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import Evidence, Progress, walk
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from kvbm_console.analysis.export.jsonl import EventFilter

__all__ = ["FORMATS", "Exported", "export", "write_lines", "written"]

FORMATS: Final = {"jsonl": ".jsonl", "chrome": ".json", "perfetto": ".pftrace", "parquet": "", "html": ".html"}
"""Format to the ending that its files usually have; parquet is a directory."""


class Exported(msgspec.Struct, frozen=True):
    """A finished export; ``items`` are its lines, trace events, packets or rows."""

    path: str
    format: str
    items: int
    bytes: int


def export(
    evidence: Evidence, form: str, path: Path, progress: Progress | None = None, wanted: "EventFilter | None" = None
) -> Exported:
    """Write the evidence to a new file, or directory for parquet; ``wanted`` chooses events of JSON lines.

    Raises ``UsageError`` (the name is taken, a library is missing), ``RecordingError``, ``OSError``.
    """

    def write(draft: Path) -> int:
        if form == "parquet":
            draft.mkdir()
            return _tables(evidence, draft, progress)
        with draft.open("xb") as file:
            return _stream(evidence, form, file, progress, wanted)

    return written(form, path, write)


def written(form: str, path: Path, write: Callable[[Path], int]) -> Exported:
    """The export that ``write`` makes under another name, and whose items it returns. Raises as ``export``."""
    if path.exists():
        raise UsageError(f"{path} exists already; nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a directory")
    # A killed export leaves its directory, which stands in nobody's way.
    with TemporaryDirectory(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent) as place:
        draft = Path(place) / path.name
        items = write(draft)
        draft.rename(path)
    return Exported(str(path), form, items, _size(path))


def write_lines(
    evidence: Evidence, file: IO[bytes], progress: Progress | None = None, wanted: "EventFilter | None" = None
) -> int:
    """JSON lines to an open file."""
    from kvbm_console.analysis.export.jsonl import write_jsonl

    return write_jsonl(evidence, file, progress, wanted)


def _stream(
    evidence: Evidence, form: str, file: IO[bytes], progress: Progress | None, wanted: "EventFilter | None"
) -> int:
    if form == "jsonl":
        return write_lines(evidence, file, progress, wanted)
    if form == "html":
        from kvbm_console.analysis.export.html import write_html

        return write_html(evidence, file, progress)
    trace = _TRACES[form](file)
    _tell(evidence, trace, progress)
    return int(trace.written)  # type: ignore[attr-defined]


def _chrome(file: IO[bytes]) -> Consumer:
    from kvbm_console.analysis.export.chrome import ChromeTrace

    return ChromeTrace(file)


def _perfetto(file: IO[bytes]) -> Consumer:
    from kvbm_console.analysis.export.perfetto import PerfettoTrace

    return PerfettoTrace(file)


_TRACES: Final[dict[str, Callable[[IO[bytes]], Consumer]]] = {"chrome": _chrome, "perfetto": _perfetto}


def _tables(evidence: Evidence, directory: Path, progress: Progress | None) -> int:
    from kvbm_console.analysis.export.parquet import ParquetTables

    tables = ParquetTables(directory)
    _tell(evidence, tables, progress)
    return sum(tables.rows.values())


def _tell(evidence: Evidence, consumer: Consumer, progress: Progress | None) -> None:
    requests = Requests()
    try:
        walk(evidence, (requests, Rows(consumer, requests)), progress=progress, what="export")
    finally:
        consumer.close()


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
