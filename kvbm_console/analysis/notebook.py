"""A recording for notebooks: its rows as Arrow tables, its facts at a place, and its explanations.

``kvbm_console.open`` makes one. ``docs/notebooks.md`` lists what it has, which is a promise: nothing is renamed or
removed.

Law of this file: it asks the same functions as the commands, and has no logic of its own.
"""

from pathlib import Path
from typing import Any

import msgspec

from kvbm_console.analysis.diagnosis import Diagnosis, diagnose
from kvbm_console.analysis.diff import Difference, diff
from kvbm_console.analysis.explain import Explanation, explain, grouped
from kvbm_console.analysis.export.rows import EventRow, Rows
from kvbm_console.analysis.export.tables import TableRows
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import Evidence, evidence_of, walk
from kvbm_console.core.state import CacheState
from kvbm_console.recording.positions import parse_position, seq_of
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.document import status_document


class RunMoment(msgspec.Struct, frozen=True):
    """The facts of a run behind event ``seq``."""

    seq: int
    at_ns: int
    """The engine's time."""
    state: CacheState
    """The facts themselves. Read only; its fields may change from version to version."""
    incarnation: str

    @property
    def document(self) -> dict[str, Any]:
        """The document of ``status --format json``, whose keys are listed in JSON.md."""
        return status_document(
            self.state, at_ns=self.at_ns, incarnation=self.incarnation, subscribers=0, recorder=None
        )

    @property
    def slots(self) -> list[dict[str, Any]]:
        """The live slots of the document."""
        slots: list[dict[str, Any]] = self.document["slots"]
        return slots

    @property
    def tiers(self) -> dict[str, dict[str, Any]]:
        """The tiers of the document, by name."""
        tiers: dict[str, dict[str, Any]] = self.document["tiers"]
        return tiers


class RecordedRun:
    """One run of a recording. Tables are read once, when they are first asked for, and stay in memory.

    A table is a ``pyarrow.Table``: pandas, polars and DuckDB take it. Times are nanoseconds of the engine.
    """

    def __init__(self, path: Path, run: str | None = None) -> None:
        self.recording = Recording.open(path, run)
        self.evidence: Evidence = evidence_of(self.recording)
        self._tables: dict[str, Any] = {}

    def __repr__(self) -> str:
        events = f"events {self.first_seq} to {self.last_seq}"
        return f"<run {self.recording.incarnation} of {self.recording.path}, {events}>"

    @property
    def first_seq(self) -> int:
        """The number of its first event."""
        return self.recording.first_seq

    @property
    def last_seq(self) -> int:
        """The number of its last event."""
        return self.recording.last_seq

    # --- tables ---

    @property
    def requests(self) -> Any:
        """A row for each request: arrival, first token, end, hits by tier, preemptions, states."""
        return self._table("requests")

    @property
    def states(self) -> Any:
        """A row for each stretch that a request spent in a state."""
        return self._table("states")

    @property
    def holds(self) -> Any:
        """A row for each hold of a breakpoint."""
        return self._table("holds")

    @property
    def copies(self) -> Any:
        """A row for each copy between tiers, with its six times and how it ended."""
        return self._table("transfers")

    @property
    def tiers(self) -> Any:
        """The places of each pool by condition, sampled when they change, at most every millisecond."""
        return self._table("tiers")

    @property
    def engine(self) -> Any:
        """A row for each iteration of the engine: requests that run and wait."""
        return self._table("engine")

    @property
    def gaps(self) -> Any:
        """A row for each stretch of missing events."""
        return self._table("gaps")

    @property
    def events(self) -> Any:
        """A row for each event, with its kind, request and text."""
        return self._table("events")

    # --- questions ---

    def at(self, place: int | str) -> RunMoment:
        """The facts at a place: the number of an event, or a text as ``replay --at`` takes it (``"1.5s"``, ``"end"``).

        Raises ``UsageError`` for a wrong text, ``RecordingError`` for a place outside or in a gap.
        """
        seq = place if isinstance(place, int) else seq_of(self.recording, parse_position(place))
        state = self.recording.state_at(seq)
        return RunMoment(seq, state.at_ns, state, self.recording.incarnation)

    def why(self, request: str) -> Explanation:
        """Why a request missed its blocks and where its time went, as ``why`` tells it. Raises ``NotFound``."""
        return grouped(explain(self.evidence, request))

    def doctor(self) -> Diagnosis:
        """The problems that need a person, as ``doctor`` lists them."""
        return diagnose(self.evidence)

    def diff(self, other: "RecordedRun") -> Difference:
        """This run beside another, as ``rec diff`` tells it."""
        return diff(self.evidence, other.evidence)

    # --- inside ---

    def _table(self, name: str) -> Any:
        if name not in self._tables:
            taker = _EventTables() if name == "events" else _RowTables()
            requests = Requests()
            walk(self.evidence, (requests, Rows(taker, requests)))
            taker.close()
            self._tables |= taker.tables()
        return self._tables[name]


class _RowTables(TableRows):
    """Keeps every table but that of events, whose texts are most of the work."""

    wants_events = False

    def __init__(self) -> None:
        super().__init__("a table")
        self._parts: dict[str, list[Any]] = {name: [] for name in self.schemas}

    def take(self, name: str, table: Any) -> None:
        self._parts[name].append(table)

    def tables(self) -> dict[str, Any]:
        """The whole tables."""
        return {name: self._joined(name) for name in self._parts if name != "events"}

    def _joined(self, name: str) -> Any:
        parts = self._parts[name]
        return self._arrow.concat_tables(parts) if parts else self.schemas[name].empty_table()


class _EventTables(_RowTables):
    """Keeps the table of events alone."""

    wants_events = True

    def _put(self, table: str, row: msgspec.Struct) -> None:
        if isinstance(row, EventRow):
            super()._put(table, row)

    def tables(self) -> dict[str, Any]:
        return {"events": self._joined("events")}
