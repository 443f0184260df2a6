"""Traces that ``simulate`` and ``compare`` read beside the daemon's traces.

Law of this file: a line is used whole or refused with file, line number and error. The user is told the limits of a
kind of trace (``note``).

Azure (LLM inference traces): CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``, timestamps like
``2023-11-16 18:15:46.6805900``. BurstGPT: CSV with ``Timestamp,Model,Request tokens,Response tokens,...``, seconds.
Azure and BurstGPT have lengths and no ids of blocks, so every prompt is different and no block is reused.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.core.unreadable import UNREADABLE
from kvbm_console.planning.dynamo import DynamoRequestTrace
from kvbm_console.planning.lmcache import LMCACHE_NOTE, LMCacheTrace
from kvbm_console.planning.recorded import OPTION, RecordedWorkload
from kvbm_console.simulator.embedded import parse_workload
from kvbm_console.simulator.hashing import generated_hashes
from kvbm_console.simulator.traces import LINE_BYTES_MAX, TOKENS_MAX, TraceFile, check_file
from kvbm_console.simulator.workloads import Capacities, Request, Workload

KINDS: Final = (
    "FILE", "mooncake:FILE", "azure:FILE", "burstgpt:FILE", "dynamo:FILE", "lmcache:FILE", "recording:DIR|FILE.mcap",
    "multiturn[:key=value,...]",
)
NO_REUSE: Final = "the trace has lengths only, so no block is ever used again"
_EXAMPLES: Final = {"recording": "recording:run/", "dynamo": "dynamo:trace.jsonl", "lmcache": "lmcache:trace.lct"}
_AT_NS_MAX: Final = 2**62
"""More than a hundred years; the limit keeps nanoseconds within 64 bits."""


def named_trace(text: str) -> str:
    """``--trace`` with the format in front: a bare FILE gets the format that its first line shows.

    Raises ``UsageError`` for a file whose format is unknown or ambiguous.
    """
    bare = text
    while not Path(bare).exists() and (found := OPTION.fullmatch(bare)) is not None:
        bare = found[1]
    path = Path(bare)
    named = text.partition(":")[0] in (*_MARKS, "dynamo", "lmcache", "recording", "multiturn")
    if named or not (path.exists() or "/" in text or path.suffix):
        return text
    if path.is_dir() or path.suffix == ".mcap":
        return f"recording:{text}"
    if path.suffix == ".lct":
        return f"lmcache:{text}"
    check_file(path)
    with path.open("rb") as file:
        line = next((line for line in iter(lambda: file.readline(LINE_BYTES_MAX), b"") if line.strip()), b"")
    kinds = [kind for kind, columns in _MARKS.items() if columns <= _columns_of(line)]
    if len(kinds) == 1:
        return f"{kinds[0]}:{text}"
    finding = f"fits {' and '.join(kinds)}" if kinds else "is of no known format"
    raise UsageError(f"--trace {text}: the first line {finding}; name the format as {', '.join(KINDS[1:4])}")


def _columns_of(line: bytes) -> set[str]:
    """The keys of a JSON line, or the columns of a CSV header, in lower case; empty for neither."""
    try:
        text = line.decode("utf-8-sig")
        if text.lstrip().startswith("{"):
            return {f"{key}:" for key in msgspec.json.decode(text.encode(), type=dict[str, Any])}
        return {name.strip().lower() for name in next(csv.reader([text]), [])}
    except (*UNREADABLE, csv.Error):
        return set()


def parse_trace(text: str, limit: int | None = None) -> Workload:
    """The workload that ``--trace`` names. Raises ``UsageError`` with one sentence."""
    kind, _, rest = text.partition(":")
    if kind in ("azure", "burstgpt", "dynamo", "lmcache", "recording"):
        if not rest:
            example = _EXAMPLES.get(kind, f"{kind}:trace.csv")
            raise UsageError(f"--trace {kind}: must name a file, as in {example}")
        if limit is not None and limit < 1:
            raise UsageError(f"--limit must be at least 1, got {limit}")
        if kind == "dynamo":
            return DynamoRequestTrace(Path(rest), limit)
        if kind == "lmcache":
            return LMCacheTrace(Path(rest), limit)
        return RecordedWorkload(rest, limit) if kind == "recording" else LengthsTrace(kind, Path(rest), limit)
    if kind not in ("mooncake", "multiturn") or (kind == "mooncake" and not rest):
        raise UsageError(f"--trace must be one of {', '.join(KINDS)}, got {text!r}")
    return parse_workload(text, limit)


def note_of(workload: Workload) -> str | None:
    """The limits of this kind of trace, for the user."""
    if isinstance(workload, RecordedWorkload):
        return workload.note
    if isinstance(workload, LMCacheTrace):
        return LMCACHE_NOTE
    return NO_REUSE if isinstance(workload, LengthsTrace) else None


class LengthsTrace(TraceFile):
    """A ``Workload`` of recorded lengths and arrival times; every prompt has its own content."""

    capacities = Capacities(block_tokens=16, g1_blocks=16_384, g2_blocks=65_536, g3_blocks=0, batch_tokens=8_192)

    def __init__(self, kind: str, path: Path, limit: int | None = None) -> None:
        super().__init__(kind, path, limit)
        self.failed = 0
        """Skipped lines of requests without a token, which BurstGPT lists as failures."""
        self._columns, self._nanoseconds = _FORMATS[kind]
        self._block_tokens = self.capacities.block_tokens

    def begin(self, block_tokens: int) -> None:
        """Take any block size."""
        self._block_tokens = block_tokens
        self.failed = 0

    def arrivals(self) -> Iterator[Request]:
        """The requests in file order; the first one arrives at 0."""
        first: int | None = None
        latest = 0
        count = 0
        with self.path.open(encoding="utf-8", newline="") as lines:
            rows = self._rows(lines)
            time, prompt_tokens, output_tokens = columns = self._header(next(rows, (1, []))[1])
            for number, row in rows:
                if self.limit is not None and count >= self.limit:
                    return
                if not row:
                    continue
                if len(row) <= max(columns):
                    raise self.bad(number, f"must have {max(columns) + 1} fields, got {len(row)}")
                at_ns = self._time(row[time], number)
                prompt = self._tokens(row[prompt_tokens], number, self._columns[1], 1)
                output = self._tokens(row[output_tokens], number, self._columns[2], 0)
                first = at_ns if first is None else first
                if at_ns - first < latest:
                    raise self.bad(number, "timestamp is before that of the line above")
                latest = at_ns - first
                if not output:
                    self.failed += 1
                    continue
                yield self._request(count, latest, prompt, output)
                count += 1

    def _rows(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """Each row with the number of its line."""
        rows = csv.reader(lines)
        try:
            for row in rows:
                yield rows.line_num, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise self.bad(rows.line_num, str(error)) from None

    def _header(self, row: list[str]) -> list[int]:
        names = [name.strip().lstrip("\ufeff").lower() for name in row]
        try:
            return [names.index(column.lower()) for column in self._columns]
        except ValueError:
            raise self.bad(1, f"must have the columns {', '.join(self._columns)}, got {', '.join(row)!r}") from None

    def _time(self, text: str, number: int) -> int:
        try:
            at_ns = self._nanoseconds(text.strip())
        except ValueError:
            at_ns = -1
        if not 0 <= at_ns <= _AT_NS_MAX:
            raise self.bad(number, f"{self._columns[0]} must be a time, got {text!r}")
        return at_ns

    def _tokens(self, text: str, number: int, column: str, least: int) -> int:
        try:
            tokens = int(text)
        except ValueError:
            tokens = -1
        if not least <= tokens <= TOKENS_MAX:
            raise self.bad(number, f"{column} must be from {least} to {TOKENS_MAX}, got {text!r}")
        return tokens

    def _request(self, index: int, at_ns: int, prompt: int, output: int) -> Request:
        size = self._block_tokens
        hashes = generated_hashes(0, index, (prompt + output) // size)
        full = prompt // size
        return Request(
            request=f"r{index:05d}", arrival_ns=at_ns, hashes=tuple(hashes[:full]),
            output_hashes=tuple(hashes[full:]), prompt_tokens=prompt, output_tokens=output,
        )


def _azure_ns(text: str) -> int:
    """Nanoseconds of a time stamp with up to nine decimals; the traces have seven. Raises ``ValueError``."""
    main, _, decimals = text.split("+")[0].removesuffix("Z").partition(".")
    moment = datetime.strptime(main, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return int(moment.timestamp()) * SECOND_NS + int(decimals[:9].ljust(9, "0"))


def _decimal_ns(text: str) -> int:
    """Nanoseconds of a number of seconds. Raises ``ValueError``."""
    try:
        return int(Decimal(text) * SECOND_NS)
    except (InvalidOperation, OverflowError) as error:
        raise ValueError(text) from error


_FORMATS: Final[dict[str, tuple[tuple[str, str, str], Callable[[str], int]]]] = {
    "azure": (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_ns),
    "burstgpt": (("Timestamp", "Request tokens", "Response tokens"), _decimal_ns),
}
"""Kind of trace to its columns (time, prompt, output) and the function that reads its times."""
_MARKS: Final[dict[str, set[str]]] = {
    "mooncake": {"timestamp:", "input_length:", "output_length:", "hash_ids:"},
    **{kind: {column.lower() for column in columns} for kind, (columns, _) in _FORMATS.items()},
}
"""Format to the keys (with a colon) or columns that identify its first line. Our own traces are Mooncake lines with
more keys."""
