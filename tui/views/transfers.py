"""Transfers: routes with their rates and latencies, then open candidates, then recently ended candidates.

Law of this file: open transfers come first with the worst on top, and skipped candidates fold to one row. Queue time
and wire time are never added up.
"""

from bisect import bisect_left
from itertools import pairwise
from typing import Final

import msgspec

from kvbm_console.analysis.lints import Level
from kvbm_console.analysis.lives import Transfer
from kvbm_console.analysis.waits import breakpoints_text, ranks_text, silent_ranks
from kvbm_console.core.expression import Field, Schema
from kvbm_console.core.expression.fields import words as words_of
from kvbm_console.core.expression.schema import YES_NO, Kind
from kvbm_console.core.ids import CandidateStatus, Route, Site
from kvbm_console.core.state import CacheState

from ..desk import SLOT, TRANSFERS, Desk, View
from ..draw import bars, table, words
from ..draw.frame import Hint
from ..draw.glyphs import Glyphs
from ..draw.spans import Line, Row, Span
from ..draw.table import MOVES, Column, Order, Table, as_table, fields_of, moved
from ..model.lints import copy_level
from ..model.mirror import Mirror
from ..model.numbers import S, count, cut, duration, flow, plain, size, spoken
from .blocks import tiers_section

ENDED_SHOWN_NS: Final = 10 * S
ROWS_MAX: Final = 200
ENDED_ROWS_MAX: Final = 60
"""Ended transfers shown behind the open transfers; a screen has no more."""
FAULT_NS: Final = 30 * S
"""A started copy of which a rank has been silent for so long is a fault."""
HISTOGRAM_LOW_NS: Final = 100_000
HISTOGRAM_HIGH_NS: Final = 1_000_000_000


class TransferLine(msgspec.Struct):
    """One line of the list."""

    mirror: Mirror
    transfer: Transfer
    level: Level | None
    age_ns: int
    reason: str

    @property
    def role(self) -> str:
        """The role of its values: open transfers stand out."""
        return "text" if self.transfer.open else "muted"


def transfer_rows(
    desk: Desk, order: "table.Order[TransferLine]"
) -> tuple[list[TransferLine], dict[str, int]]:
    """The rows to show, and the number of skipped candidates of the last seconds by reason."""
    mirror, now = desk.mirror, desk.now_ns
    state = mirror.facts
    wanted = desk.filters.get(TRANSFERS)
    before: dict[Route, int] = {}
    rows: list[TransferLine] = []
    for transfer in mirror.transfers.values():
        ahead = before.get(transfer.route, 0)
        before[transfer.route] = ahead + 1
        rows.append(_open_row(mirror, state, transfer, now, ahead))
    rows.sort(key=lambda row: (9 if row.level is None else int(row.level), -row.age_ns))
    skipped: dict[str, int] = {}
    most = len(rows) + ENDED_ROWS_MAX
    for transfer in reversed(mirror.ended):
        if transfer.ended_ns is None or now - transfer.ended_ns > ENDED_SHOWN_NS:
            break
        if transfer.status is CandidateStatus.SKIPPED and transfer.reason is not None:
            skipped[transfer.reason.words] = skipped.get(transfer.reason.words, 0) + 1
            continue
        if len(rows) >= most:
            continue
        failed = transfer.status is CandidateStatus.FAILED
        word = "took" if transfer.status is CandidateStatus.COMPLETED else transfer.status.words + " after"
        reason = transfer.error or f"{word} {spoken(transfer.age(now))}"
        rows.append(TransferLine(mirror, transfer, Level.FAULT if failed else None, now - transfer.ended_ns, reason))
    if wanted is not None:
        rows = [row for row in rows if wanted.matches(row, state)]
    order.sort(rows)
    return rows[:ROWS_MAX], skipped


def _open_row(mirror: Mirror, state: CacheState, transfer: Transfer, now: int, ahead: int) -> TransferLine:
    age = transfer.age(now)
    slot = state.slots.get(transfer.slot) if transfer.slot is not None else None
    level = copy_level(mirror, transfer, now)
    copy = state.operations.get(transfer.operation) if transfer.operation is not None else None
    if slot is not None and slot.hold is not None and transfer.started_ns is None:
        hold = state.holds[slot.hold]
        return TransferLine(mirror, transfer, Level.HELD, now - transfer.planned_ns,
                           f"parked, {breakpoints_text(hold.breakpoints)}")
    if copy is not None and copy.started:
        silent = silent_ranks(copy, mirror.ranks)
        if silent:
            level = Level.FAULT if age > FAULT_NS else level
            return TransferLine(mirror, transfer, level, age,
                               f"silent on {ranks_text(silent)}, {len(copy.reported)} of {mirror.ranks} reported")
        return TransferLine(mirror, transfer, level, age,
                           f"on the wire {duration(now - (transfer.started_ns or now))}")
    if transfer.enqueued_ns is None:
        return TransferLine(mirror, transfer, level, age, "planned")
    return TransferLine(mirror, transfer, level, age, f"{ahead} before it" if ahead else "next on its route")


_STATUS: Final = {
    CandidateStatus.PENDING_EVALUATION: "pending", CandidateStatus.PROMOTED: "promoted",
    CandidateStatus.COMPLETED: "completed", CandidateStatus.FAILED: "failed", CandidateStatus.CANCELLED: "cancelled",
    CandidateStatus.SKIPPED: "skipped",
}
_STATUS_ROLE: Final = {
    CandidateStatus.PENDING_EVALUATION: "muted", CandidateStatus.PROMOTED: "text", CandidateStatus.COMPLETED: "faint",
    CandidateStatus.FAILED: "fault", CandidateStatus.CANCELLED: "muted", CandidateStatus.SKIPPED: "faint",
}


def since(at_ns: int | None, planned_ns: int) -> str:
    """A stamp as its distance from the plan: ``–`` before it, ``0`` in the same moment."""
    if at_ns is None:
        return "–"
    return f"+{duration(at_ns - planned_ns)}" if at_ns > planned_ns else "0"


def _status(row: TransferLine, cells: int, glyphs: Glyphs) -> list[Span]:
    status = row.transfer.status
    if row.level is Level.HELD:
        return [Span(glyphs.held, "heldbox"), Span(f" {_STATUS[status]}", "text")]
    return [Span(f"{glyphs.candidate[status]} {_STATUS[status]}", _STATUS_ROLE[status])]


def _request(row: TransferLine, cells: int, glyphs: Glyphs) -> list[Span]:
    name = row.transfer.request
    return [words.request(name, cells, row.role) if name else Span("–", "faint")]


def _bytes(row: TransferLine, cells: int, glyphs: Glyphs) -> list[Span]:
    each = row.mirror.block_bytes
    return [Span(size(row.transfer.blocks * each if each else None), "muted")]


def _stamp(name: str) -> Column[TransferLine]:
    """A stamp behind ``planned``, as its distance from the plan."""
    return Column(
        name=name, width=9, right=True, from_width=180, title=f"{name}_ns",
        cell=lambda row, cells, glyphs: [Span(since(_stamp_ns(row.transfer, name), row.transfer.planned_ns), "muted")],
        value=lambda row: _stamp_ns(row.transfer, name))


def _stamp_ns(transfer: Transfer, name: str) -> int | None:
    at_ns: int | None = getattr(transfer, f"{name}_ns")
    return at_ns


CANDIDATE: Final[Column[TransferLine]] = Column(
    title="candidate", value=lambda row: row.transfer.candidate,
    field=Field("candidate", Kind.ID, lambda row, s, m: row.transfer.candidate, "Its candidate."))
STATUS: Final[Column[TransferLine]] = Column(
    name="STATUS", width=11, gap=4, cell=_status, order="need", title="status",
    value=lambda row: row.transfer.status.label,
    field=Field("status", Kind.WORD, lambda row, s, m: row.transfer.status, "Its status.", words_of(CandidateStatus),
                ordered=False))
AGE: Final[Column[TransferLine]] = Column(
    name="AGE", width=5, right=True, ages=True,
    cell=lambda row, cells, glyphs: [
        Span(duration(row.age_ns), words.LEVEL_ROLE[row.level] if row.transfer.open else "faint")],
    order="age", key=lambda row: (-row.age_ns,), title="age_ns", value=lambda row: row.age_ns,
    field=Field("age", Kind.DURATION, lambda row, s, m: row.age_ns, "Since it was planned, or since it ended."))
OPERATION: Final[Column[TransferLine]] = Column(
    name="OP", width=6, right=True, cell=lambda row, cells, glyphs: [Span(row.transfer.label[-cells:], row.role)],
    title="operation", value=lambda row: row.transfer.operation,
    field=Field("operation", Kind.ID, lambda row, s, m: row.transfer.operation, "Its operation.", optional=True))
ROUTE: Final[Column[TransferLine]] = Column(
    name="ROUTE", width=7, cell=lambda row, cells, glyphs: [words.route(row.transfer.route)],
    order="route", key=lambda row: (row.transfer.route, -row.age_ns), title="route",
    value=lambda row: row.transfer.route.label,
    field=Field("route", Kind.WORD, lambda row, s, m: row.transfer.route, "From where to where.", words_of(Route),
                ordered=False))
BLOCKS: Final[Column[TransferLine]] = Column(
    name="BLOCKS", width=6, right=True, from_width=66,
    cell=lambda row, cells, glyphs: [Span(count(row.transfer.blocks), row.role)],
    order="blocks", key=lambda row: (-row.transfer.blocks, -row.age_ns), title="blocks",
    value=lambda row: row.transfer.blocks,
    field=Field("blocks", Kind.COUNT, lambda row, s, m: row.transfer.blocks, "Blocks that move."))
BYTES: Final[Column[TransferLine]] = Column(
    name="BYTES", width=8, right=True, gap=2, from_width=120, cell=_bytes)
RANKS: Final[Column[TransferLine]] = Column(
    name="RANKS", width=5, right=True, gap=2, from_width=120,
    cell=lambda row, cells, glyphs: [Span(f"{len(row.transfer.ranks)}/{row.mirror.ranks}", "muted")])
REQUEST: Final[Column[TransferLine]] = Column(
    name="REQUEST", width=lambda width: 13 if width < 140 else 22, from_width=74, cell=_request,
    order="request", key=lambda row: (row.transfer.request,), title="request",
    value=lambda row: row.transfer.request,
    field=Field("request", Kind.TEXT, lambda row, s, m: row.transfer.request, "The request whose blocks move.",
                ordered=False))
PLANNED: Final[Column[TransferLine]] = Column(title="planned_ns", value=lambda row: row.transfer.planned_ns)
STAMPS: Final = tuple(map(_stamp, ("enqueued", "evaluated", "promoted", "started", "ended")))
DETAIL: Final[Column[TransferLine]] = Column(
    name="DETAIL", gap=2,
    cell=lambda row, cells, glyphs: [Span(cut(plain(row.reason), cells), "text" if row.level is not None else "muted")],
    title="reason", value=lambda row: row.reason,
    field=Field("reason", Kind.TEXT, lambda row, s, m: row.reason, "The text of its last column.", ordered=False))

SHOWN: Final = (STATUS, AGE, OPERATION, ROUTE, BLOCKS, BYTES, RANKS, REQUEST, *STAMPS, DETAIL)
EXPORTED: Final = (CANDIDATE, OPERATION, REQUEST, ROUTE, STATUS, BLOCKS, AGE, PLANNED, *STAMPS, DETAIL)
SCHEMA: Final = Schema("a transfer", [
    *fields_of((REQUEST, ROUTE, STATUS, AGE, BLOCKS, OPERATION, CANDIDATE)),
    Field("open", Kind.WORD, lambda row, s, m: row.transfer.open, "Yes if the transfer has not ended.",
          YES_NO, ordered=False),
    Field("moving", Kind.WORD, lambda row, s, m: row.transfer.open and row.transfer.started_ns is not None,
          "Yes if the copy has begun.", YES_NO, ordered=False),
    Field("held", Kind.WORD, lambda row, s, m: row.transfer.held_since_ns is not None, "Yes if the slot is held.",
          YES_NO, ordered=False),
    Field("slow", Kind.WORD, lambda row, s, m: row.level is not None, "Yes if the transfer is marked.",
          YES_NO, ordered=False),
    *fields_of((DETAIL,)),
])


def telling(rows: list[TransferLine], known: frozenset[str] = frozenset()) -> frozenset[str]:
    """The headings of stamps that are later than the plan in some row, and the ``known`` headings; other stamps would
    be 0 in every row."""
    return known | {
        column.name for column in STAMPS if column.name not in known
        and any((_stamp_ns(row.transfer, column.name) or 0) > row.transfer.planned_ns for row in rows)
    }


class Transfers(View):
    """View 5."""

    schema = SCHEMA
    needs_requests = "Transfers are copies for requests."
    words = (
        ("queued", "waits for its link; a moving copy is on it"), ("p50 p99", "half, and 99 of 100, took no longer"),
        ("promoted", "decided: places are reserved, the copy runs or waits for its link"),
        ("skipped", "decided against; the reason says why"), ("RANKS", "workers that reported, of all"),
        ("OP", "number of the copy"),
    )

    def __init__(self) -> None:
        self.selected: int | None = None
        """The chosen candidate."""
        self.top = 0
        self.page = 10
        self.numbers: list[int] = []
        self.order = Order(SHOWN)
        self._shape: tuple[int, str, frozenset[str]] = (0, "", frozenset())
        """The width, the incarnation and its shown stamps; a stamp that was shown stays."""
        self._kept: table.KeptRows[TransferLine] = table.KeptRows()

    def streamed(self, desk: Desk, width: int, height: int) -> list[Line]:
        return tiers_section(desk, desk.mirror.facts, width)

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Routes, the list, and the stamps of the chosen transfer."""
        mirror = desk.mirror
        rows, skipped = transfer_rows(desk, self.order)
        self.numbers = [row.transfer.candidate for row in rows]
        lines = [self._summary(desk, rows, width), *desk.paced("routes", lambda: self._routes(desk, width))]
        stamps = telling(rows, self._shape[2] if self._shape[1] == mirror.incarnation else frozenset())
        shape = width, mirror.incarnation, stamps
        if self._shape != shape:
            self._shape, self._kept = shape, table.KeptRows()
        places = table.layout([c for c in SHOWN if c not in STAMPS or c.name in stamps], width)
        if desk.tall:
            lines.append(Line())
        lines.append(table.header(places))
        chosen = next((row for row in rows if row.transfer.candidate == self.selected), None)
        feet = _stamps(desk, chosen.transfer, width) if chosen is not None else []
        fold = [_folded(skipped, width)] if skipped else []
        self.page = max(1, height - len(lines) - len(feet) - len(fold))
        at = self.numbers.index(self.selected) if self.selected in self.numbers else None
        self.top = table.window(len(rows), at, self.top, self.page)
        shown = [
            self._line(desk, number, row, places, width)
            for number, row in enumerate(rows[self.top : self.top + self.page], self.top)
        ]
        if not rows:
            word = "match" if TRANSFERS in desk.filters else "open"
            shown = [Row().put(f" No transfer {word}, {count(len(mirror.ended))} ended.", "muted").line()]
        lines += [*shown, *fold]
        if feet:
            lines += [Line()] * (height - len(lines) - len(feet))
        return [*lines, *feet]

    def _summary(self, desk: Desk, rows: list[TransferLine], width: int) -> Line:
        open_ = len(desk.mirror.transfers)
        faults = sum(row.level is Level.FAULT for row in rows)
        slow = sum(row.level is Level.CAUTION for row in rows)
        text = f"{count(open_)} open" + (f", {faults} fault" if faults else "") + (f", {slow} slow" if slow else "")
        row = Row().put(" TRANSFERS", "title").put(f"   {text}", "muted")
        if self.order.text != "need":
            row.put("  sorted by ", "muted").put(self.order.text, "text")
        wanted = desk.filters.get(TRANSFERS)
        if wanted is not None:
            row.put(f"   / {cut(wanted.text, max(8, width - row.x - 20))}", "text")
            row.put(f"   {count(len(rows))} match", "muted")
        return row.line("" if desk.tall else "bar", width)

    def _routes(self, desk: Desk, width: int) -> list[Line]:
        cells = 24 if width >= 120 else 16
        wide = width >= 100
        rate_end = 36 if wide else 33
        head = Row().put(" ROUTE", "faint").right("queued", 16, "faint").right("moving", 23, "faint")
        head.right("rate", rate_end, "faint").right("p50", rate_end + 6, "faint").right("p99", rate_end + 12, "faint")
        spark_at = rate_end + 14
        latency_at = spark_at + 14
        head.to(spark_at).put("60 s", "faint").to(latency_at).put("100µs", "faint")
        head.to(latency_at + (cells - 4) // 2).put("latency", "faint").right("1s", latency_at + cells, "faint")
        lines = [head.line("", width - 1)]
        mirror, now = desk.mirror, desk.now_ns
        each = desk.mirror.block_bytes
        for route in known_routes(desk):
            known = mirror.flows.routes.get(route)
            queued, moving = route_numbers(desk, route)
            p50, p99 = known.times(now) if known is not None else (None, None)
            row = Row().put(" ").spans([words.route(route)]).right(count(queued), 16).right(count(moving), 23)
            rate = flow(known.blocks.rate(now) if known is not None else 0, each, " " if wide else "")
            row.right(rate, rate_end).right(duration(p50), rate_end + 6).right(duration(p99), rate_end + 12)
            if known is not None:
                row.to(spark_at).spans(desk.trend(known.blocks.last(60, now), 12))
                row.to(latency_at).spans(_histogram(known.latencies.window(now), cells, desk))
            lines.append(row.line("", width - 1))
        return lines

    def _line(
        self, desk: Desk, number: int, row: TransferLine, places: list[table.Place[TransferLine]], width: int
    ) -> Line:
        chosen = row.transfer.candidate == self.selected
        built = Row().put(desk.glyphs.select if chosen else " ", "selbar").spans(
            words.mark(None if row.level is Level.HELD else row.level, desk.glyphs))
        if row.transfer.open:
            table.cells(places, row, desk.glyphs, built)
        else:
            key = row.transfer, desk.mirror.ranks, desk.mirror.block_bytes
            self._kept.cells(places, row, desk.glyphs, built, key)
        built.to(width - 1 if chosen else 0).zone(0, ("row", number), width)
        return built.line("sel" if chosen else "", width)

    def hints(self, desk: Desk) -> list[Hint]:
        return [("enter", "its slot"), ("↑↓", "move"), ("/", "filter"), ("o", "sort"), ("t", "timeline"),
                ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """Move, open the slot."""
        if key in MOVES and self.numbers:
            at = self.numbers.index(self.selected) if self.selected in self.numbers else None
            self._choose(desk, self.numbers[moved(at, key, len(self.numbers), self.page)])
        elif key.startswith("row:") and int(key[4:]) < len(self.numbers):
            self._choose(desk, self.numbers[int(key[4:])])
        elif self.order.press(key):
            return True
        elif key.startswith("candidate:"):
            self._choose(desk, int(key[10:]))
        elif key == "enter" and desk.selected is not None:
            desk.go(SLOT)
        elif key == "escape" and self.selected is not None and TRANSFERS not in desk.filters:
            self.selected = None
        else:
            return False
        return True

    def proposal(self, desk: Desk) -> str:
        """A breakpoint at the next site of the chosen transfer."""
        transfer = desk.mirror.transfer_of(candidate=self.selected)
        if transfer is None:
            return ""
        site = Site.COMPLETE_WILL if transfer.started_ns is not None else (
            Site.EVALUATE_WILL if transfer.status is CandidateStatus.PENDING_EVALUATION else Site.DISPATCH_WILL)
        request = f" request {transfer.request}" if transfer.request else ""
        return f"site {site.label} route {transfer.route.label}{request}"

    def rows(self, desk: Desk) -> Table | None:
        """Every transfer of the list."""
        if desk.mirror.state is None:
            return None
        found, _ = transfer_rows(desk, self.order)
        return as_table(EXPORTED, found)

    def _choose(self, desk: Desk, candidate: int) -> None:
        """Choose a transfer, and its request for all views."""
        self.selected = candidate
        transfer = desk.mirror.transfer_of(candidate=self.selected)
        if transfer is not None and transfer.request:
            desk.select(transfer.request)


def _histogram(ordered: list[int], cells: int, desk: Desk) -> list[Span]:
    """Counts of latencies from 100 µs to 1 s on a logarithmic scale; values outside count in the cell at that end."""
    if not ordered:
        return []
    ratio = HISTOGRAM_HIGH_NS / HISTOGRAM_LOW_NS
    edges = [bisect_left(ordered, HISTOGRAM_LOW_NS * ratio ** (cell / cells)) for cell in range(1, cells)]
    counts = [high - low for low, high in pairwise([0, *edges, len(ordered)])]
    values: list[float | None] = [float(number) if number else None for number in counts]
    return [Span(span.text, "trend") for span in bars.trend(values, desk.glyphs)]


def _folded(skipped: dict[str, int], width: int) -> Line:
    total = sum(skipped.values())
    parts = ", ".join(f"{reason} {number}" for reason, number in sorted(skipped.items(), key=lambda kv: -kv[1]))
    return Row().put(cut(f"    {count(total)} skipped in 10 s: {parts}", width - 1), "faint").line()


def _stamps(desk: Desk, transfer: Transfer, width: int) -> list[Line]:
    """The stamps of one transfer, and its time as a bar of queue, hold and wire."""
    row = Row().put(f" {transfer.label}", "strong").put("  planned 0", "muted")
    for column in STAMPS:
        at_ns = _stamp_ns(transfer, column.name)
        text = since(at_ns, transfer.planned_ns)
        row.put(f"  {column.name} ", "muted").put(text, "text" if at_ns is not None else "faint")
    now = desk.now_ns
    end = transfer.ended_ns if transfer.ended_ns is not None else now
    begun = transfer.started_ns if transfer.started_ns is not None else end
    held = min(transfer.held(now), begun - transfer.planned_ns)
    queue = begun - transfer.planned_ns - held
    wire = end - begun if transfer.started_ns is not None else None
    parts = f" queue {spoken(queue)}, " + (f"held {spoken(held)}, " if held else "") + f"wire {spoken(wire)}"
    cells = max(8, width - 8 - len(parts) - 1)
    glyphs = desk.glyphs
    bar = bars.stack([(queue, glyphs.queued, "muted"), (held, glyphs.hatch, "hatch"),
                      (wire or 0, glyphs.wire, "fill.onboard" if transfer.route.is_load else "fill.copy")], cells)
    return [row.line("", width - 1), Row().to(7).spans(bar).to(7 + cells).put(parts, "muted").line("", width - 1)]


def known_routes(desk: Desk) -> list[Route]:
    """The routes between the pools that exist, and every route that was used; near routes first."""
    state = desk.mirror.state
    tiers = {pool.info.tier for pool in state.shown_pools} if state is not None else set()
    usual = [Route.G1_G2, Route.G2_G1, Route.G2_G3, Route.G3_G1, Route.G3_G2]
    seen = set(desk.mirror.flows.routes) | {transfer.route for transfer in desk.mirror.transfers.values()}
    wanted = {route for route in usual if route.source in tiers and route.target in tiers} | seen
    return [route for route in usual if route in wanted] + sorted(wanted - set(usual))


def route_numbers(desk: Desk, route: Route) -> tuple[int, int]:
    """(queued, moving) transfers of a route now."""
    here = [transfer for transfer in desk.mirror.transfers.values() if transfer.route is route]
    moving = sum(transfer.started_ns is not None for transfer in here)
    return len(here) - moving, moving
