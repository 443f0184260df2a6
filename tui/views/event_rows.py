"""One event as a row of the log, and the chosen one whole.

Law of this file: a row tells its time, its seq, its kind, whom it concerns, and the rest in one phrase; wide rows add
the stimulus that caused it, then the fields themselves. Whatever a row cuts stands whole below the list.
"""

from collections.abc import Iterable, Iterator

from kvbm_console.core.events import Event
from kvbm_console.stream.event_document import field_text

from ..contracts import Table
from ..desk import Desk
from ..draw.spans import Line, Row
from ..draw.words import request
from ..model.numbers import count, cut, plain
from ..model.wording import concerns, describe

CAUSE_FROM = 120
"""Columns from which a row tells its stimulus, and the iteration where it knows one."""
FIELDS_FROM = 180
"""Columns from which a row has its fields, too."""
LINES_MAX = 1_024
"""Rows kept; about ten screens."""
_TOLD = frozenset({"seq", "at_ns", "cause"})
"""Fields that have a place of their own."""


def event_table(desk: Desk, events: Iterable[Event]) -> Table:
    """Events as rows for a file."""
    names = ["seq", "at_ns", "cause", "kind", "request", "text"]
    return names, [[
        str(event.seq), str(event.at_ns), str(event.cause), type(event).__name__, concerns(event, desk.mirror),
        describe(event, desk.mirror),
    ] for event in events]


def fields(event: Event, limit: int) -> Iterator[tuple[str, str]]:
    """Name and value of what the event says, each value within ``limit`` characters."""
    for name in type(event).__struct_fields__:
        if name not in _TOLD:
            yield name, plain(field_text(name, getattr(event, name), limit)) or "–"


def event_line(desk: Desk, event: Event, width: int, *, chosen: bool = False, folded: int = 0) -> Line:
    """Time, seq, kind, subject and text. ``folded`` more of its kind stood right before it."""
    wide = width >= 100
    who = concerns(event, desk.mirror)
    row = Row().put(desk.glyphs.select if chosen else " ", "selbar")
    row.put(desk.times.text(event.at_ns, millis=True), "muted")
    row.right(count(event.seq), row.x + (11 if wide else 10), "faint")
    row.put("  " if wide else " ")
    kind = row.x
    row.put(cut(type(event).__name__, 20 if wide else 18), "text").to(kind + (22 if wide else 19))
    if who:
        row.spans([request(who, 20 if wide else 13, "strong" if who == desk.selected else "text")])
        row.to(row.x + 2 if wide else row.x + 1)
        row.zone(0, ("select", who), width)
    if folded:
        row.put(f"+{count(folded)}  ", "text")
    row.put(cut(plain(describe(event, desk.mirror)), max(0, width - 1 - row.x)), "muted")
    _rest(row, event, width)
    row.zone(0, ("row", event.seq), row.x)
    return row.to(width - 1 if chosen else row.x).line("sel" if chosen else "", width)


class EventLines:
    """Rows of events, kept: what one says does not change, and most of a screen was on the one before."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Line] = {}

    def line(self, desk: Desk, event: Event, width: int, *, choice: int | None = None, folded: int = 0) -> Line:
        """The row of an event; that of the event ``choice`` stands out."""
        chosen = event.seq == choice
        key = (desk.mirror.incarnation, event.seq, folded, width, desk.selected, chosen, desk.times.wall)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= LINES_MAX:
                self._known.clear()
            found = self._known[key] = event_line(desk, event, width, chosen=chosen, folded=folded)
        return found


def _rest(row: Row, event: Event, width: int) -> None:
    """What wide screens have room for, as far as it fits."""
    if width < CAUSE_FROM:
        return
    iteration = getattr(event, "iteration", None) if type(event).__name__ == "SlotMoved" else None
    tail = f"stimulus {count(event.cause)}"
    if iteration is not None:
        tail = f"iteration {count(iteration)}  {tail}"
    end = width - 1
    if width >= FIELDS_FROM:
        end = CAUSE_FROM
    if row.x + 2 + len(tail) <= end:
        row.right(tail, end, "faint")
    if width >= FIELDS_FROM:
        row.to(max(row.x, CAUSE_FROM) + 2)
        told, room = "", max(0, width - 1 - row.x)
        for name, value in fields(event, 24):
            told += f"  {name} {value}" if told else f"{name} {value}"
            if len(told) > room:
                break
        row.put(cut(told, room), "faint")


def event_foot(desk: Desk, event: Event, width: int, rows: int) -> list[Line]:
    """The chosen event whole: when by both clocks, its stimulus, and every field; at most ``rows`` lines."""
    head = Row().put(f" seq {count(event.seq)}  ", "text").put(type(event).__name__, "strong")
    who = concerns(event, desk.mirror)
    if who:
        head.put("  ").spans([request(who, 40, "text")])
    head.put(f"  {cut(plain(describe(event, desk.mirror)), max(0, width - 4 - head.x))}", "muted")
    lines = [head.line("" if desk.tall else "bar", width)]
    pieces = [("at", desk.times.whole(event.at_ns)), ("stimulus", count(event.cause)), *fields(event, width - 24)]
    row = Row().put(" ")
    for name, value in pieces:
        if row.x > 1 and row.x + len(name) + 1 + len(value) > width - 1:
            lines.append(row.line())
            row = Row().put(" ")
        row.put(f"{name} ", "faint").put(value, "text").put("  ")
    return [*lines, row.line()][:rows]
