"""Rows as Arrow tables, one for each kind of row: for parquet files, and for notebooks.

Law of this file: rows become columns in groups as they come, and every table exists, even an empty table.
"""

import types
import typing
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


class TableRows(Consumer):
    """The base of whatever takes rows as Arrow tables. Raises ``UsageError`` when pyarrow is missing."""

    wants_events = True

    def __init__(self, feature: str) -> None:
        self._arrow: Any = need("pyarrow", "parquet", "pyarrow", feature)
        self.rows = dict.fromkeys(TABLES, 0)
        self.schemas = {name: self._schema(kind) for name, kind in TABLES.items()}
        self._waiting: dict[str, list[msgspec.Struct]] = {name: [] for name in TABLES}

    def take(self, name: str, table: Any) -> None:
        """The next rows of a table."""
        raise NotImplementedError

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
            schema = self.schemas[table]
            columns = [[getattr(row, name) for row in waiting] for name in schema.names]
            arrays = [self._arrow.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            self.take(table, self._arrow.Table.from_arrays(arrays, schema=schema))

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
        """Hand over the waiting rows."""
        for name in self._waiting:
            self._flush(name)
