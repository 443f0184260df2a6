"""Log: events as text, newest last.

Law of this file: scrolling up stops following and says how many newer events there are; gaps are rows of their own and
never vanish from the list.
"""

from kvbm_console.core.events import Event
from kvbm_console.core.expression import Schema

from ..desk import LOG, Desk
from ..draw.frame import Hint
from ..draw.spans import Line, Row
from ..model.filters import EVENTS
from ..model.mirror import Gap
from ..model.numbers import count, cut, per_second
from .event_rows import event_line

SCANNED_MAX = 5_000
"""Events looked at for one filtered screen; further back a recording is the right tool."""
LINES_MAX = 1_024
"""Rows kept; about ten screens."""


class Log:
    """View 9."""

    schema: Schema | None = EVENTS

    def __init__(self) -> None:
        self.last_seq: int | None = None
        """The event on the last row; None while following."""
        self.page = 10
        self._lines: dict[tuple[int, int, str | None], Line] = {}

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The newest events, or those up to where the reader stopped."""
        self.page = max(1, height - 2)
        events = self._shown(desk, height - 1)
        row = Row().put(" LOG", "title").put("   following" if self.last_seq is None else "   stopped", "muted")
        wanted = desk.filters.get(LOG)
        if wanted is not None:
            row.put(f"   / {cut(wanted.text, width // 2)}", "text")
        rate = desk.mirror.progress.rate(desk.mono())
        newer = self._newer(desk)
        right = f"{count(newer)} newer  G" if newer else f"{per_second(rate)} a second"
        row.right(right, width - 1, "caution" if newer else "muted")
        lines = [row.line("" if desk.tall else "bar", width)]
        if not events and wanted is not None:
            return [*lines, Row().put(f" 0 of the last {count(SCANNED_MAX)} match   ", "muted").put("esc", "key")
                    .put("  clear", "muted").line()]
        for item in events:
            lines.append(_gap_line(desk, item, width) if isinstance(item, Gap) else self._line(desk, item, width))
        return lines

    def _line(self, desk: Desk, event: Event, width: int) -> Line:
        """The row of an event, kept: what it says does not change."""
        key = (event.seq, width, desk.selected)
        found = self._lines.get(key)
        if found is None:
            if len(self._lines) >= LINES_MAX:
                self._lines.clear()
            found = self._lines[key] = event_line(desk, event, width)
        return found

    def _newer(self, desk: Desk) -> int:
        if self.last_seq is None or not desk.mirror.log:
            return 0
        return max(0, desk.mirror.log[-1].seq - self.last_seq)

    def _shown(self, desk: Desk, rows: int) -> list[Event | Gap]:
        """The last ``rows`` events that match, gaps at their place."""
        wanted = desk.filters.get(LOG)
        gaps = {gap.last + 1: gap for gap in desk.mirror.gaps}
        found: list[Event | Gap] = []
        scanned = 0
        for event in reversed(desk.mirror.log):
            if self.last_seq is not None and event.seq > self.last_seq:
                continue
            scanned += 1
            if wanted is None or wanted.matches(event, desk.mirror.state, desk.mirror):
                found.append(event)
            if event.seq in gaps:
                found.append(gaps[event.seq])
            if len(found) >= rows or scanned >= SCANNED_MAX:
                break
        return list(reversed(found[:rows]))

    def hints(self, desk: Desk) -> list[Hint]:
        """Keys of the log."""
        return [("↑↓", "move"), ("G", "newest"), ("/", "filter"), ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """Scroll; G follows again."""
        log = desk.mirror.log
        if not log:
            return False
        newest, oldest = log[-1].seq, log[0].seq
        at = newest if self.last_seq is None else self.last_seq
        match key:
            case "up" | "k":
                at -= 1
            case "pageup":
                at -= self.page
            case "down" | "j":
                at += 1
            case "pagedown":
                at += self.page
            case "g" | "home":
                at = oldest + self.page
            case "G" | "end" | "f":
                at = newest
            case _:
                return False
        at = max(at, min(newest, oldest + self.page))
        self.last_seq = None if at >= newest else at
        return True


def _gap_line(desk: Desk, gap: Gap, width: int) -> Line:
    mark = desk.glyphs.gap * 2
    text = f"{mark} gap {count(gap.count)}: {count(gap.first)} to {count(gap.last)}, {gap.reason}; "
    text += "state from the snapshot "
    return Row().put(" ").put(text + desk.glyphs.gap * max(0, width - 2 - len(text)), "gap").line("", width)
