"""One event as a row of the log.

Law of this file: a row tells its time, its seq, its kind, whom it concerns, and the rest in one phrase.
"""

from collections.abc import Iterable

from kvbm_console.core.events import Event

from ..contracts import Table
from ..desk import Desk
from ..draw.spans import Line, Row
from ..draw.words import request
from ..model.numbers import clock, count, cut, plain
from ..model.wording import concerns, describe


def event_table(desk: Desk, events: Iterable[Event]) -> Table:
    """Events as rows for a file."""
    names = ["seq", "at_ns", "cause", "kind", "request", "text"]
    return names, [[
        str(event.seq), str(event.at_ns), str(event.cause), type(event).__name__, concerns(event, desk.mirror),
        describe(event, desk.mirror),
    ] for event in events]


def event_line(desk: Desk, event: Event, width: int, *, chosen: bool = False) -> Line:
    """Time, seq, kind, subject and text."""
    wide = width >= 100
    who = concerns(event, desk.mirror)
    row = Row().put(desk.glyphs.select if chosen else " ", "selbar").put(clock(event.at_ns, millis=True), "muted")
    row.right(count(event.seq), row.x + (11 if wide else 10), "faint")
    row.put("  " if wide else " ").put(cut(type(event).__name__, 20 if wide else 18), "text").to(48 if wide else 43)
    if who:
        row.spans([request(who, 20 if wide else 13, "strong" if who == desk.selected else "text")])
        row.to(row.x + 2 if wide else row.x + 1)
        row.zone(0, ("select", who), width)
    row.put(cut(plain(describe(event, desk.mirror)), max(0, width - 1 - row.x)), "muted")
    row.zone(0, ("row", event.seq), row.x)
    return row.to(width - 1 if chosen else row.x).line("sel" if chosen else "", width)
