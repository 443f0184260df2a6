"""Parquet: a directory with one table for each kind of row, for SQL.

``requests``, ``states``, ``holds``, ``transfers``, ``tiers``, ``engine``, ``events``, ``gaps``. Columns have the names
of the rows; times are nanoseconds of the engine.

Law of this file: rows are written in groups as they come, so that memory does not grow with the recording.
"""

import types
import typing
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.analysis.export.rows import (
    Consumer,
    EngineSample,
    EventRow,
    HoldSpan,
    StateSpan,
    TierSample,
    TransferSpan,
)
from kvbm_console.analysis.requests import RequestSummary
from kvbm_console.extras import need
from kvbm_console.stream.feed import GapSeen

GROUP_ROWS: Final = 50_000
"""Rows of one group: some megabytes before compression."""


class RequestRow(msgspec.Struct, frozen=True):
    """A request's summary as columns."""

    slot: int
    request: str
    session: str | None
    arrived_ns: int
    first_token_ns: int | None
    ended_ns: int | None
    time_ns: int
    prompt_tokens: int
    prompt_blocks: int
    scored_blocks: int
    hits_g1: int
    hits_g2: int
    hits_g3: int
    hits_g4: int
    lost_blocks: int
    admissions: int
    preemptions: int
    held_ns: int
    reason: str | None
    complete: bool
    states: str


class _GapRow(msgspec.Struct, frozen=True):
    """Missing events."""

    at_ns: int
    first: int
    last: int
    reason: str


TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "requests": RequestRow, "states": StateSpan, "holds": HoldSpan, "transfers": TransferSpan, "tiers": TierSample,
    "engine": EngineSample, "events": EventRow, "gaps": _GapRow,
}
"""Every table is written, even an empty table, because a query needs the table to exist."""


class ParquetTables(Consumer):
    """Writes rows as tables into a directory. Raises ``UsageError`` when the library is missing."""

    wants_events = True

    def __init__(self, directory: Path) -> None:
        self._arrow: Any = need("pyarrow", "parquet", "pyarrow", "--to parquet")
        parquet: Any = need("pyarrow.parquet", "parquet", "pyarrow", "--to parquet")
        self.rows = dict.fromkeys(TABLES, 0)
        self._schemas = {name: self._schema(kind) for name, kind in TABLES.items()}
        self._waiting: dict[str, list[msgspec.Struct]] = {name: [] for name in TABLES}
        self._writers = {
            name: parquet.ParquetWriter(str(directory / f"{name}.parquet"), schema, compression="zstd")
            for name, schema in self._schemas.items()
        }

    def _schema(self, kind: type[msgspec.Struct]) -> Any:
        arrow = self._arrow
        columns = {int: arrow.int64(), str: arrow.string(), bool: arrow.bool_()}
        fields = []
        for name, hint in typing.get_type_hints(kind).items():
            optional = isinstance(hint, types.UnionType)
            plain = next(part for part in typing.get_args(hint) if part is not type(None)) if optional else hint
            fields.append(arrow.field(name, columns[plain], nullable=optional))
        return arrow.schema(fields)

    def _put(self, table: str, row: msgspec.Struct) -> None:
        waiting = self._waiting[table]
        waiting.append(row)
        self.rows[table] += 1
        if len(waiting) >= GROUP_ROWS:
            self._flush(table)

    def _flush(self, table: str) -> None:
        waiting, self._waiting[table] = self._waiting[table], []
        if waiting:
            schema = self._schemas[table]
            columns = [[getattr(row, name) for row in waiting] for name in schema.names]
            arrays = [self._arrow.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            self._writers[table].write_table(self._arrow.Table.from_arrays(arrays, schema=schema))

    def state(self, row: StateSpan) -> None:
        """Into ``states``."""
        self._put("states", row)

    def hold(self, row: HoldSpan) -> None:
        """Into ``holds``."""
        self._put("holds", row)

    def transfer(self, row: TransferSpan) -> None:
        """Into ``transfers``."""
        self._put("transfers", row)

    def tier(self, row: TierSample) -> None:
        """Into ``tiers``."""
        self._put("tiers", row)

    def engine(self, row: EngineSample) -> None:
        """Into ``engine``."""
        self._put("engine", row)

    def event(self, row: EventRow) -> None:
        """Into ``events``."""
        self._put("events", row)

    def gap(self, gap: GapSeen, at_ns: int) -> None:
        """Into ``gaps``."""
        self._put("gaps", _GapRow(at_ns, gap.first, gap.last, gap.reason))

    def request(self, summary: RequestSummary, until_ns: int) -> None:
        """Into ``requests``."""
        g1, g2, g3, g4 = summary.hits
        self._put("requests", RequestRow(
            summary.slot, summary.request, summary.session, summary.arrived_ns, summary.first_token_ns,
            summary.ended_ns, summary.time_ns(until_ns), summary.prompt_tokens, summary.prompt_blocks,
            summary.scored_blocks, g1, g2, g3, g4, summary.lost_blocks, summary.admissions, summary.preemptions,
            summary.held_ns, summary.reason, summary.complete, " > ".join(summary.states),
        ))

    def close(self) -> None:
        """Write the waiting rows and end the files."""
        for name, writer in self._writers.items():
            self._flush(name)
            writer.close()
