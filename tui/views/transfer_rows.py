"""Rows of the transfers: which ones, in which order, and what stands in each column.

Law of this file: what is open stands before what ended, and what ended does not change any more but for its age.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvbm_console.analysis.lints import Level
from kvbm_console.core.ids import CandidateStatus, Route
from kvbm_console.core.state import CacheState

from ..desk import TRANSFERS, Desk
from ..draw import words
from ..draw.spans import Span
from ..draw.table import Column
from ..model.lints import copy_level
from ..model.lives import Transfer
from ..model.mirror import Mirror
from ..model.numbers import S, count, cut, duration, plain, size, spoken
from ..model.waits import breakpoints_text, ranks_text, silent_ranks

ENDED_SHOWN_NS: Final = 10 * S
ROWS_MAX: Final = 200
ENDED_ROWS_MAX: Final = 60
"""Ended ones shown behind the open ones; a screen has no more."""
FAULT_NS: Final = 30 * S
"""A started copy of which a rank has been silent for so long is a fault."""


class TransferRow(msgspec.Struct):
    """One line of the list."""

    transfer: Transfer
    level: Level | None
    age_ns: int
    reason: str


_KEYS: Final[dict[str, Callable[[TransferRow], tuple[Any, ...]]]] = {
    "age": lambda row: (-row.age_ns,), "route": lambda row: (row.transfer.route, -row.age_ns),
    "blocks": lambda row: (-row.transfer.blocks, -row.age_ns), "request": lambda row: (row.transfer.request,),
}
SORTS: Final = ("need", *_KEYS)


def transfer_rows(
    desk: Desk, sort: str = "need", *, reverse: bool = False
) -> tuple[list[TransferRow], dict[str, int]]:
    """Rows to show, and the skipped ones of the last seconds by reason."""
    mirror, now = desk.mirror, desk.now_ns
    state = mirror.state
    assert state is not None
    wanted = desk.filters.get(TRANSFERS)
    before: dict[Route, int] = {}
    rows: list[TransferRow] = []
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
            skipped[transfer.reason.label] = skipped.get(transfer.reason.label, 0) + 1
            continue
        if len(rows) >= most:
            continue
        failed = transfer.status is CandidateStatus.FAILED
        word = "took" if transfer.status is CandidateStatus.COMPLETED else transfer.status.label + " after"
        reason = transfer.error or f"{word} {spoken(transfer.age(now))}"
        rows.append(TransferRow(transfer, Level.FAULT if failed else None, now - transfer.ended_ns, reason))
    if wanted is not None:
        rows = [row for row in rows if wanted.matches(row, state)]
    if sort in _KEYS:
        rows.sort(key=_KEYS[sort])
    if reverse:
        rows.reverse()
    return rows[:ROWS_MAX], skipped


def _open_row(mirror: Mirror, state: CacheState, transfer: Transfer, now: int, ahead: int) -> TransferRow:
    age = transfer.age(now)
    slot = state.slots.get(transfer.slot) if transfer.slot is not None else None
    level = copy_level(mirror, transfer, now)
    copy = state.operations.get(transfer.operation) if transfer.operation is not None else None
    if slot is not None and slot.hold is not None and transfer.started_ns is None:
        hold = state.holds[slot.hold]
        return TransferRow(transfer, Level.HELD, now - transfer.planned_ns,
                           f"parked, {breakpoints_text(hold.breakpoints)}")
    if copy is not None and copy.started:
        silent = silent_ranks(mirror, copy)
        if silent:
            level = Level.FAULT if age > FAULT_NS else level
            return TransferRow(transfer, level, age,
                               f"{ranks_text(silent)} silent, {len(copy.reported)} of {mirror.ranks}")
        return TransferRow(transfer, level, age, f"on the wire {duration(now - (transfer.started_ns or now))}")
    if transfer.enqueued_ns is None:
        return TransferRow(transfer, level, age, "planned")
    return TransferRow(transfer, level, age, f"{ahead} before it" if ahead else "next on its route")


_STATUS: Final = {
    CandidateStatus.PENDING_EVALUATION: "pending", CandidateStatus.PROMOTED: "promoted",
    CandidateStatus.COMPLETED: "completed", CandidateStatus.FAILED: "failed", CandidateStatus.CANCELLED: "cancelled",
    CandidateStatus.SKIPPED: "skipped",
}
_STATUS_ROLE: Final = {
    CandidateStatus.PENDING_EVALUATION: "muted", CandidateStatus.PROMOTED: "text", CandidateStatus.COMPLETED: "faint",
    CandidateStatus.FAILED: "fault", CandidateStatus.CANCELLED: "muted", CandidateStatus.SKIPPED: "faint",
}


def block_bytes(desk: Desk) -> int | None:
    """Bytes of one block by the geometry of the target that is connected now."""
    return desk.mirror.connected.block_bytes if desk.mirror.connected is not None else None


def columns_of(desk: Desk, width: int, stamps: frozenset[str]) -> list[Column[TransferRow]]:
    """The columns for a width, with those ``stamps`` that tell something.

    Columns are kept, so a cell asks the desk for what another target changes.
    """
    glyphs = desk.glyphs

    def status(row: TransferRow, cells: int) -> list[Span]:
        if row.level is Level.HELD:
            return [Span(glyphs.held, "heldbox"), Span(f" {_STATUS[row.transfer.status]}", "text")]
        one = row.transfer.status
        return [Span(f"{glyphs.candidate[one]} {_STATUS[one]}", _STATUS_ROLE[one])]

    def age(row: TransferRow, cells: int) -> list[Span]:
        return [Span(duration(row.age_ns), words.LEVEL_ROLE[row.level] if row.transfer.open else "faint")]

    def operation(row: TransferRow, cells: int) -> list[Span]:
        return [Span(row.transfer.label[-cells:], "text" if row.transfer.open else "muted")]

    def route(row: TransferRow, cells: int) -> list[Span]:
        return [words.route(row.transfer.route, glyphs)]

    def blocks(row: TransferRow, cells: int) -> list[Span]:
        return [Span(count(row.transfer.blocks), "text" if row.transfer.open else "muted")]

    def bytes_(row: TransferRow, cells: int) -> list[Span]:
        each = block_bytes(desk)
        return [Span(size(row.transfer.blocks * each if each else None), "muted")]

    def ranks(row: TransferRow, cells: int) -> list[Span]:
        return [Span(f"{len(row.transfer.ranks)}/{desk.mirror.ranks}", "muted")]

    def request(row: TransferRow, cells: int) -> list[Span]:
        if not row.transfer.request:
            return [Span("–", "faint")]
        return [words.request(row.transfer.request, cells, "text" if row.transfer.open else "muted")]

    def reason(row: TransferRow, cells: int) -> list[Span]:
        return [Span(cut(plain(row.reason), cells), "text" if row.level is not None else "muted")]

    found = [
        Column("STATUS", 11, status, gap=4), Column("AGE", 5, age, right=True, gap=1, ages=True),
        Column("OP", 6, operation, right=True), Column("ROUTE", 7, route),
        Column("BLOCKS", 6, blocks, right=True, from_width=66),
        Column("BYTES", 8, bytes_, right=True, gap=2, from_width=120),
        Column("RANKS", 5, ranks, right=True, gap=2, from_width=120),
        Column("REQUEST", 13 if width < 140 else 22, request, from_width=74),
    ]
    if width >= 180:
        found += [_stamp(name, field) for name, field in STAMPS if field in stamps]
    return [*found, Column("DETAIL", 0, reason, gap=2)]


STAMPS: Final = (
    ("enqueued", "enqueued_ns"), ("evaluated", "evaluated_ns"), ("promoted", "promoted_ns"),
    ("started", "started_ns"), ("ended", "ended_ns"),
)
"""The stamps after ``planned``, told as distances from it."""


def telling(rows: list[TransferRow]) -> frozenset[str]:
    """The stamps that are later than the plan in some row: the others say nothing but 0."""
    return frozenset(
        field for _, field in STAMPS
        if any((getattr(row.transfer, field) or 0) > row.transfer.planned_ns for row in rows)
    )


def since(at_ns: int | None, planned_ns: int) -> str:
    """A stamp as its distance from the plan: ``–`` before it, ``0`` in the same moment."""
    if at_ns is None:
        return "–"
    return f"+{duration(at_ns - planned_ns)}" if at_ns > planned_ns else "0"


def _stamp(name: str, field: str) -> Column[TransferRow]:
    def cell(row: TransferRow, cells: int) -> list[Span]:
        value: int | None = getattr(row.transfer, field)
        return [Span(since(value, row.transfer.planned_ns), "muted")]
    return Column(name, 9, cell, right=True, from_width=180)
