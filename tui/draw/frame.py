"""The frame around every view: status row, tabs, keys, and the transport of a recording.

Law of this file: the first row of the screen tells its losses and its lag. A narrow screen drops parts in a fixed
order, and never the pill, the target, the losses, the recorder and the badges.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

from ..model.numbers import count, cut, cut_middle, duration, per_second, plain, plural
from .glyphs import Glyphs
from .spans import Action, Line, Row

TABS: Final = (
    ("Overview", "Overview"), ("Slots", "Slots"), ("Slot", "Slot"), ("Timeline", "Time"),
    ("Transfers", "Transfers"), ("Tiers", "Tiers"), ("Breakpoints", "Breaks"), ("Record", "Rec"), ("Log", "Log"),
    ("Prefixes", "Map"),
)
"""Names of the views, and the short form below 100 columns."""
TAB_KEYS: Final = "123456789p"
TABS_WIDE: Final = 105
"""Columns from which the long names fit."""
NAMES: Final = (*(long for long, _ in TABS), "Warnings", "Why", "Finished", "Misses", "What-if")
"""Names of all views, for files and help."""
NAME_SHARE: Final = 4
"""A name takes this part of the row before anything else is dropped for it: 20 cells of 80, 30 of 120."""
NAME_MIN: Final = 5
"""Cells of a name that still tells two targets apart."""
NAME_MAX: Final = 40


class StatusRow(msgspec.Struct):
    """The contents of the status row."""

    pill: str
    pill_role: str
    target: str
    note: str
    """``read-only`` or ``observe``; empty with control."""
    run: int
    iteration: int | None
    clock: str
    """The target's time; empty when unknown."""
    socket: str
    rate: float | None
    lag: int | None
    lost: int | None
    lost_age_ns: int | None
    recorder: str | None
    """``recording``, ``degraded``, ``here`` when this console alone records, None without a recorder, ``unknown``
    before the first heartbeat."""
    synced_age_ns: int | None
    not_recorded: int
    buffered: int
    faults: int
    cautions: int
    holds: int


_DROPS: Final = ("socket", "clock", "iteration", "age", "synced", "run", "rate", "lag", "note")
_LAST: Final = 3
"""So many of those at the end go only when a name of ``NAME_MIN`` cells leaves no room for them: below 80 columns."""


def status_line(status: StatusRow, width: int) -> Line:
    """Row 1. A long name is cut in its middle, so that the pill, the losses and the recorder stay."""
    name = plain(status.target)
    size = min(len(name), width // NAME_SHARE)
    for dropped in range(len(_DROPS) + 1):
        keep = set(_DROPS[dropped:])
        left, right = _left(status, cut_middle(name, size), keep), _right(status, keep)
        free = width - 1 - left.x - 2 - right.x
        if free >= (0 if dropped < len(_DROPS) - _LAST else NAME_MIN - size):
            break
    left = _left(status, cut_middle(name, min(NAME_MAX, max(NAME_MIN, size + free))), keep)
    row = Row().add(left.line())
    return row.to(max(row.x + 2, width - 1 - right.x)).add(right.line()).line("bar", width)


def _left(status: StatusRow, name: str, keep: set[str]) -> Row:
    row = Row().put(f" {status.pill} ", status.pill_role).put(" ").put(name, "strong")
    if status.note and "note" in keep:
        row.put(f" {status.note}", "muted")
    if status.run and "run" in keep:
        row.put(f"  run {status.run}", "muted")
    if status.iteration is not None and "iteration" in keep:
        row.put(f"  iteration {count(status.iteration)}", "muted")
    if status.clock and "clock" in keep:
        row.put(f"  {status.clock}", "muted")
    if status.socket and "socket" in keep:
        row.put(f"  {status.socket}", "faint")
    return row


def _right(status: StatusRow, keep: set[str]) -> Row:
    row = Row()
    if status.buffered:
        row.put(f"+{count(status.buffered)}", "caution").put(" buffered  ", "muted")
    if "rate" in keep:
        row.put(per_second(status.rate), "text").put(" ev/s  ", "muted")
    if "lag" in keep:
        row.put("lag ", "muted").put(count(status.lag), "caution" if (status.lag or 0) > 10_000 else "text")
    fresh = status.lost_age_ns is not None and status.lost_age_ns < 300_000_000_000
    row.put("  lost " if "lag" in keep else "lost ", "muted")
    row.put(count(status.lost), "caution" if status.lost and fresh else "text")
    if status.lost and status.lost_age_ns is not None and "age" in keep:
        row.put(f" {duration(status.lost_age_ns)} ago", "faint")
    _recorder(row, status, keep)
    badges = [
        (f"!!{status.faults}", "mark.fault", status.faults), (f"!{status.cautions}", "mark.caution", status.cautions),
        (f"‖{status.holds}", "held", status.holds),
    ]
    shown = [(text, role) for text, role, number in badges if number]
    if shown:
        row.put(" ")
    for text, role in shown:
        row.put(" ").put(text, role, ("badge", text))
    return row


def _recorder(row: Row, status: StatusRow, keep: set[str]) -> None:
    row.put("  rec ", "muted")
    if status.recorder is None:
        row.put("off", "muted")
    elif status.recorder == "here":
        row.put("here", "text")
    elif status.recorder == "degraded":
        row.put(f"DEGRADED {count(status.not_recorded)}", "mark.fault")
    elif status.synced_age_ns is None:
        row.put("–", "text")
    else:
        seconds = status.synced_age_ns / 1e9
        text = f"{int(seconds * 10) / 10:.1f}s" if seconds < 10 else duration(status.synced_age_ns)
        if "synced" in keep:
            row.put("synced ", "muted")
        row.put(text, "text")
        if "synced" in keep:
            row.put(" ago", "muted")


def targets_line(names: Sequence[str], current: int, width: int) -> Line:
    """The row of targets above the status row; the target on the screen stands out."""
    row = Row().put(" ")
    for index, name in enumerate(names):
        text = f" {cut_middle(plain(name), 24)} "
        if row.x + len(text) > width - 12:
            row.put(f" +{len(names) - index}", "muted")
            break
        row.put(text, "tabsel" if index == current else "tab", ("target", index))
    return row.right("{ }", width - 1, "key").line("bar", width)


@lru_cache(maxsize=64)
def tabs_line(current: int, width: int, recording: bool) -> Line:
    """Row 2; the current view stands out."""
    short = width < TABS_WIDE
    row = Row()
    gap = 1 if short else 2
    if not short:
        row.put(" ")
    for index, (long_name, short_name) in enumerate(TABS):
        if index:
            row.put(" " * gap)
        name = short_name if short else long_name
        if recording and index == 7:
            name = "Play" if short else "Replay"
        if width < 80 and index != current:
            name = ""
        text = f"{TAB_KEYS[index]} {name}".rstrip()
        if index == current:
            row.put(text, "tabsel", ("view", index))
        else:
            start = row.x
            row.put(text[0], "faint").put(text[1:], "tab").zone(start, ("view", index))
    return row.line("", width)


Hint = tuple[str, str]
"""A key and the word for its effect."""

NAMED_KEYS: Final = {
    "←": "left", "→": "right", "←→": "left", "left/right": "left", "space": "space", "enter": "enter", "[ ]": "[",
}


@lru_cache(maxsize=64)
def keys_line(hints: tuple[Hint, ...], width: int, *, last: tuple[Hint, ...] = (("?", "help"), ("q", "quit"))) -> Line:
    """The last row: keys of the view on the left as far as they fit, help and quit on the right."""
    right = Row()
    for index, (key, word) in enumerate(last):
        start = right.put("  " if index else "").x
        right.put(key, "key").put(f" {word}", "muted").zone(start, ("key", key))
    row = Row().put(" ")
    for index, (key, word) in enumerate(hints):
        text = f"{key} {word}"
        if row.x + len(text) + (2 if index else 0) + 2 + right.x > width - 2:
            break
        row.put("  " if index else "")
        start = row.x
        row.put(key, "key").put(f" {word}", "muted").zone(start, ("key", NAMED_KEYS.get(key, key)))
    return row.to(width - 2 - right.x).add(right.line()).line("bar", width)


class Transport(msgspec.Struct):
    """The contents of the transport row of a recording."""

    state: str
    clock: str
    seq: int
    first_seq: int
    last_seq: int
    hits: int
    marks: list[tuple[int, str, str]]
    """(seq, character, role) on the bar."""


def transport_line(transport: Transport, width: int, glyphs: Glyphs) -> Line:
    """The row above the keys on a recording; a click on its bar seeks."""
    row = Row().put(" ").put(transport.state, "strong").put(f"  {transport.clock}", "text")
    row.put("  seq ", "muted").put(count(transport.seq), "text").put(f" of {count(transport.last_seq)}  ", "muted")
    tail = f"  {plural(transport.hits, 'hit')}" if transport.hits else ""
    cells = width - 1 - row.x - len(tail)
    if cells >= 8:
        bar_at(row, transport, cells, glyphs)
    row.put(tail, "muted")
    return row.line("bar", width)


def bar_at(row: Row, transport: Transport, cells: int, glyphs: Glyphs) -> None:
    """The bar of a recording, ``cells`` wide, appended to a row."""
    first, span = transport.first_seq, max(1, transport.last_seq - transport.first_seq)
    here = min(cells - 1, max(0, (transport.seq - first) * (cells - 1) // span))
    start = row.x
    texts = [(glyphs.full, "computed") if cell < here else (glyphs.track, "track") for cell in range(cells)]
    for seq, character, role in transport.marks:
        texts[min(cells - 1, max(0, (seq - first) * (cells - 1) // span))] = (character, role)
    texts[here] = (glyphs.knob, "strong")
    for text, role in texts:
        row.put(text, role)
    row.zone(start, ("seek", start, cells))


def notice_line(text: str, role: str, width: int, hint: Hint | None = None) -> Line:
    """A sentence in place of the keys, and perhaps the key that answers it."""
    tail = len(hint[0]) + len(hint[1]) + 4 if hint is not None else 0
    row = Row().put(" ").put(cut(text, width - 2 - tail), role)
    if hint is not None:
        start = row.put("   ").x
        row.put(hint[0], "key").put(f" {hint[1]}", "muted").zone(start, ("key", hint[0]))
    return row.line("bar", width)


def message_line(text: str, action: Action | None, width: int, role: str = "caution") -> Line:
    """A sentence on the first body row."""
    row = Row().put(" ").put(cut(text, width - 2), role)
    if action is not None:
        row.zone(1, action)
    return row.line("", width)
