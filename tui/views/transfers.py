"""Transfers: routes with their rates and latencies, then every open candidate and what ended just now.

Law of this file: open ones first, the worst of them on top; skipped ones fold to one row; a queue time and a wire time
are never added up in silence.
"""

from bisect import bisect_left
from itertools import pairwise
from typing import Final

from kvbm_console.analysis.lints import Level
from kvbm_console.core.expression import Schema

from ..contracts import Table
from ..desk import SLOT, TRANSFERS, Desk
from ..draw import bars, table, words
from ..draw.frame import Hint
from ..draw.spans import Line, Row, Span
from ..draw.table import Column
from ..model.filters import TRANSFERS as SCHEMA
from ..model.lives import Transfer
from ..model.mirror import Mirror
from ..model.numbers import count, cut, duration, flow, spoken
from ..model.series import resample
from .moves import MOVES, moved
from .page import Page
from .sections import kept, known_routes, route_numbers
from .transfer_rows import SORTS, STAMPS, TransferRow, block_bytes, columns_of, since, telling, transfer_rows

HISTOGRAM_LOW_NS: Final = 100_000
HISTOGRAM_HIGH_NS: Final = 1_000_000_000


class Transfers(Page):
    """View 5."""

    @property
    def schema(self) -> Schema | None:
        """The fields of its filter."""
        return SCHEMA

    def __init__(self) -> None:
        self.selected: int | None = None
        """The chosen candidate."""
        self.top = 0
        self.page = 10
        self.numbers: list[int] = []
        self.sort = 0
        self.reverse = False
        self._columns: tuple[tuple[int, str, frozenset[str]], list[Column[TransferRow]]] = ((0, "", frozenset()), [])
        """The columns for a width, an incarnation and its stamps: stamps are added and do not go again."""
        self._kept: table.Kept[TransferRow] = table.Kept()

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Routes, the list, and the stamps of the chosen transfer."""
        mirror = desk.mirror
        rows, skipped = transfer_rows(desk, SORTS[self.sort], reverse=self.reverse)
        self.numbers = [row.transfer.candidate for row in rows]
        state, looked = desk.mirror.state, desk.mirror.coverage.looked
        assert state is not None
        routes = kept(desk, state, "routes", (width, looked), lambda: self._routes(desk, width))
        lines = [self._summary(desk, rows, width), *routes]
        before = self._columns[0]
        stamps = telling(rows) | (before[2] if before[1] == mirror.incarnation else frozenset())
        shape = width, mirror.incarnation, stamps
        if before != shape:
            self._columns, self._kept = (shape, columns_of(desk, width, stamps)), table.Kept()
        places = table.layout(self._columns[1], width)
        if desk.tall:
            lines.append(Line())
        lines.append(table.header(places, sorts=_SORT_OF))
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
            shown = [Row().put(f" No transfer {word}, {len(mirror.ended)} ended.", "muted").line()]
        lines += [*shown, *fold]
        if feet:
            lines += [Line()] * (height - len(lines) - len(feet))
        return [*lines, *feet]

    def _summary(self, desk: Desk, rows: list[TransferRow], width: int) -> Line:
        open_ = len(desk.mirror.transfers)
        faults = sum(row.level is Level.FAULT for row in rows)
        slow = sum(row.level is Level.CAUTION for row in rows)
        text = f"{count(open_)} open" + (f", {faults} fault" if faults else "") + (f", {slow} slow" if slow else "")
        row = Row().put(" TRANSFERS", "title").put(f"   {text}", "muted")
        if self.sort or self.reverse:
            row.put("  sorted by ", "muted").put(SORTS[self.sort] + (" reversed" if self.reverse else ""), "text")
        wanted = desk.filters.get(TRANSFERS)
        if wanted is not None:
            row.put(f"   / {cut(wanted.text, max(8, width - row.x - 20))}", "text")
            row.put(f"   {len(rows)} match", "muted")
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
        each = block_bytes(desk)
        for route in known_routes(desk):
            known = mirror.flows.routes.get(route)
            queued, moving = route_numbers(desk, route)
            p50, p99 = known.times(now) if known is not None else (None, None)
            row = Row().put(" ").spans([words.route(route, desk.glyphs)]).right(str(queued), 16).right(str(moving), 23)
            rate = flow(known.blocks.rate(now) if known is not None else 0, each, " " if wide else "")
            row.right(rate, rate_end).right(duration(p50), rate_end + 6).right(duration(p99), rate_end + 12)
            if known is not None:
                row.to(spark_at).spans(bars.trend(resample(known.blocks.last(60, now), 12), desk.glyphs))
                row.to(latency_at).spans(_histogram(known.latencies.window(now), cells, desk))
            lines.append(row.line("", width - 1))
        return lines

    def _line(
        self, desk: Desk, number: int, row: TransferRow, places: list[tuple[Column[TransferRow], int, int]], width: int
    ) -> Line:
        chosen = row.transfer.candidate == self.selected
        built = Row().put(desk.glyphs.select if chosen else " ", "selbar").spans(
            words.mark(None if row.level is Level.HELD else row.level, desk.glyphs))
        if row.transfer.open:
            table.cells(places, row, built)
        else:
            self._kept.cells(places, row, built, (row.transfer, desk.mirror.ranks, block_bytes(desk)))
        built.to(width - 1 if chosen else 0).zone(0, ("row", number), width)
        return built.line("sel" if chosen else "", width)

    def hints(self, desk: Desk) -> list[Hint]:
        """Keys of the list."""
        return [("enter", "its slot"), ("↑↓", "move"), ("/", "filter"), ("o", "sort"), ("t", "timeline"),
                ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """Move, open the slot."""
        if key in MOVES and self.numbers:
            at = self.numbers.index(self.selected) if self.selected in self.numbers else None
            self._choose(desk, moved(at, key, len(self.numbers), self.page))
        elif key.startswith("row:"):
            self._choose(desk, int(key[4:]))
        elif key == "o":
            self.sort = (self.sort + 1) % len(SORTS)
        elif key == "O":
            self.reverse = not self.reverse
        elif key.startswith("sort:") and key[5:] in SORTS:
            chosen = SORTS.index(key[5:])
            self.reverse = self.sort == chosen and not self.reverse
            self.sort = chosen
        elif key.startswith("candidate:"):
            self.selected = int(key[10:])
        elif key == "enter" and desk.selected is not None:
            desk.go(SLOT)
        elif key == "escape" and self.selected is not None and TRANSFERS not in desk.filters:
            self.selected = None
        else:
            return False
        return True

    def rows(self, desk: Desk) -> Table | None:
        """Every transfer of the list."""
        if desk.mirror.state is None:
            return None
        found, _ = transfer_rows(desk, SORTS[self.sort], reverse=self.reverse)
        stamps = ["planned_ns", *(field for _, field in STAMPS)]
        names = ["candidate", "operation", "request", "route", "status", "blocks", "age_ns", *stamps, "reason"]
        return names, [[
            str(row.transfer.candidate), _text(row.transfer.operation), row.transfer.request, row.transfer.route.label,
            row.transfer.status.label, str(row.transfer.blocks), str(row.age_ns),
            *[_text(getattr(row.transfer, field)) for field in stamps], row.reason,
        ] for row in found]

    def _choose(self, desk: Desk, at: int) -> None:
        if at >= len(self.numbers):
            return
        self.selected = self.numbers[at]
        transfer = find(desk.mirror, self.selected)
        if transfer is not None and transfer.request:
            desk.select(transfer.request)


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def find(mirror: Mirror, candidate: int) -> Transfer | None:
    """An open or recently ended transfer."""
    return mirror.transfer_of(candidate=candidate)


_SORT_OF: Final = {"STATUS": "need", "AGE": "age", "ROUTE": "route", "BLOCKS": "blocks", "REQUEST": "request"}
"""Header to the order that a click on it asks for."""


def _histogram(ordered: list[int], cells: int, desk: Desk) -> list[Span]:
    """How many took how long, from 100 µs to 1 s on a logarithmic scale; what is outside counts at its end."""
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
    return Row().put(cut(f"    {total} skipped in 10 s: {parts}", width - 1), "faint").line()


def _stamps(desk: Desk, transfer: Transfer, width: int) -> list[Line]:
    """The stamps of one transfer, and its time as a bar of queue, hold and wire."""
    row = Row().put(f" {transfer.label}", "strong").put("  planned 0", "muted")
    for name, field in STAMPS:
        value: int | None = getattr(transfer, field)
        text = since(value, transfer.planned_ns)
        row.put(f"  {name} ", "muted").put(text, "text" if value is not None else "faint")
    now = desk.now_ns
    end = transfer.ended_ns if transfer.ended_ns is not None else now
    begun = transfer.started_ns if transfer.started_ns is not None else end
    held = min(transfer.held(now), begun - transfer.planned_ns)
    queue = begun - transfer.planned_ns - held
    wire = end - begun if transfer.started_ns is not None else None
    told = f" queue {spoken(queue)}, " + (f"held {spoken(held)}, " if held else "") + f"wire {spoken(wire)}"
    cells = max(8, width - 8 - len(told) - 1)
    glyphs = desk.glyphs
    bar = bars.stack([(queue, glyphs.queued, "muted"), (held, glyphs.hatch, "hatch"),
                      (wire or 0, glyphs.wire, "fill.onboard" if transfer.route.is_load else "fill.g1")], cells)
    return [row.line("", width - 1), Row().to(7).spans(bar).to(7 + cells).put(told, "muted").line("", width - 1)]
