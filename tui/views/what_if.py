"""What if: the least change that would have spared a request its misses, its preemption or its long wait.

Law of this file: it shows the document of ``why --what-if`` and adds nothing.
"""

from typing import TYPE_CHECKING

from ..desk import Desk, View
from ..draw import words
from ..draw.frame import Hint
from ..draw.spans import BLANK, Line, Row
from ..draw.table import MOVES, Table, moved, text_of
from ..model.numbers import MS, UNKNOWN, S, count, cut_middle, duration, plain, plural, size, wrap

if TYPE_CHECKING:
    from kvbm_console.planning.what_if import Counterfactual, Remedy, Trouble

PAGE = 5


class WhatIf(View):
    """The panel behind ``W``."""

    needs_requests = "This finds what would have spared a request its misses or its wait."
    words = (
        ("miss", "a block that more memory would have kept; others are asked for the first time"),
        ("long wait", "a first token later than twice the median of the recording"),
        ("when", "the latest moment for the change; memory and policies are fixed from the start"),
        ("inevitable", "from this event on no change that was tried helps"),
    )

    def __init__(self) -> None:
        self.top = 0
        self._rows = 0

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The answer, or how far the search is."""
        found = desk.actions.spared
        if found is None:
            name = cut_middle(plain(desk.selected or ""), width - 33)
            lines = [desk.title("WHAT WOULD HAVE AVOIDED IT", name)]
            text = wrap(plain(desk.actions.spared_text), width - 3)
            lines += [Row().put(f" {piece}", "text").line() for piece in text]
            if desk.actions.replays:
                lines.append(Row().put(" each line is a replay of the whole recording   ", "muted").put("esc", "key")
                             .put("  stop", "muted").line())
            return lines
        lines = self._lines(desk, found, width)
        self._rows, self.top = len(lines), max(0, min(self.top, len(lines) - height))
        return lines[self.top : self.top + height]

    def _lines(self, desk: Desk, found: "Counterfactual", width: int) -> list[Line]:
        name = words.request(found.request, width - 33)
        head = Row().put(" WHAT WOULD HAVE AVOIDED IT", "title").put(f"   {name.text}", "strong")
        lines = [head.line("" if desk.tall else "bar", width), _replayed(found, width)]
        for note in found.notes:
            lines += [Row().put(f" {'note:' if at == 0 else '     '} {piece}", "muted").line()
                      for at, piece in enumerate(wrap(plain(note), width - 9))]
        if not found.troubles:
            text = " It missed nothing that had been stored, was not preempted and did not wait long."
            lines += [BLANK, *[Row().put(f" {piece}", "text").line() for piece in wrap(text.strip(), width - 3)]]
        for trouble in found.troubles:
            lines += [BLANK, *_trouble(desk, trouble, width)]
        return lines

    def hints(self, desk: Desk) -> list[Hint]:
        if desk.actions.replays:
            return [("esc", "stop")]
        return [("↑↓", "scroll"), ("W", "search again"), ("w", "why"), ("esc", "back"), ("e", "export")]

    def press(self, desk: Desk, key: str) -> bool:
        """Scroll, or stop the search."""
        if key == "escape":
            return desk.actions.stop_replays()
        if key in MOVES and self._rows:
            self.top = moved(self.top, key, self._rows, PAGE)
            return True
        return False

    def rows(self, desk: Desk) -> Table | None:
        """Every remedy of every trouble."""
        found = desk.actions.spared
        if found is None:
            return None
        names = ["trouble", "change", "more_blocks", "memory_bytes", "hits", "preemptions", "ttft_ms", "latest_ns"]
        return names, [[
            trouble.kind, remedy.flags, str(remedy.more_blocks), str(remedy.memory_bytes), str(remedy.outcome.hits),
            str(remedy.outcome.preemptions), text_of(remedy.outcome.ttft_ms), text_of(remedy.latest_ns),
        ] for trouble in found.troubles for remedy in trouble.remedies]


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else duration(round(value * MS))


def _replayed(found: "Counterfactual", width: int) -> Line:
    """The outcome of the replay without a change, which the remedies are compared with."""
    today = found.replayed
    row = Row().put(" as it was   ", "muted").put(f"{count(today.hits)} blocks found", "text")
    row.put(f"   {plural(today.preemptions, 'preemption')}   first token after {_ms(today.ttft_ms)}", "text")
    if not found.alike:
        row.put(f"   recorded: {count(found.recorded_hits)} found", "caution")
    return row.line("", width)


def _trouble(desk: Desk, trouble: "Trouble", width: int) -> list[Line]:
    lines = []
    for at, piece in enumerate(wrap(plain(trouble.text), width - 4 - len(trouble.kind))):
        row = Row().put(f" {trouble.kind.upper()}", "title") if at == 0 else Row().put(" " * (1 + len(trouble.kind)))
        lines.append(row.put(f"   {piece}", "caution").line("" if desk.tall else "bar", width))
    if not trouble.remedies:
        text = f" nothing that was tried avoids it ({plural(trouble.tried, 'replay')})"
        lines.append(Row().put(text, "muted").line("", width))
    else:
        room = width - 1 - 51
        head = Row().put("   CHANGE", "faint").right("MEMORY", room + 12, "faint").right("FOUND", room + 20, "faint")
        lines.append(head.right("FIRST TOKEN", room + 33, "faint").put("  WHEN", "faint").line("", width))
        for at, remedy in enumerate(trouble.remedies):
            lines += _remedy(desk, remedy, room, least=at == 0)
    for at, piece in enumerate(wrap(plain(trouble.inevitable), width - 15)):
        lines.append(Row().put(f" {'inevitable' if at == 0 else ''}", "muted").to(13).put(piece, "text").line())
    return lines


def _remedy(desk: Desk, remedy: "Remedy", room: int, *, least: bool) -> list[Line]:
    first, *rest = wrap(remedy.flags, room - 2)
    row = Row().put(desk.glyphs.select if least else " ", "selbar").put(f"  {first}", "strong" if least else "text")
    row.right(size(remedy.memory_bytes) if remedy.memory_bytes else "none", room + 12)
    row.right(count(remedy.outcome.hits), room + 20).right(_ms(remedy.outcome.ttft_ms), room + 33)
    row.put("  from the start" if remedy.latest_ns is None else f"  until {remedy.latest_ns / S:.3f} s", "muted")
    return [row.line(), *[Row().put(f"     {piece}", "strong" if least else "text").line() for piece in rest]]
