"""Log: events as text, newest last.

Law of this file: scrolling up stops following and says how many newer events there are; gaps are rows of their own and
never vanish from the list.
"""

from bisect import bisect_right
from itertools import islice

import msgspec

from kvbm_console.core.events import Event
from kvbm_console.core.expression import Schema

from ..contracts import Table
from ..desk import LOG, SLOT, Desk
from ..draw.frame import Hint
from ..draw.spans import Line, Row, fit
from ..model.coverage import Stretch
from ..model.filters import EVENTS
from ..model.gaps import Gap
from ..model.numbers import count, cut, per_second, plural, spoken
from ..model.wording import concerns
from .event_rows import EventLines, event_foot, event_table
from .page import Page

SCANNED_MAX = 5_000
"""Events looked at for one filtered screen; further back a recording is the right tool."""
STRETCHES_LOOKED_AT = 512
"""Stretches that were passed over, looked at for one screen."""
FOLD_RATE = 200
"""Events a second above which equal ones in a row are one while following: nobody reads that many."""
FOOT_ROWS = 5
"""Rows of the chosen event below the list, at most."""


class Passed(msgspec.Struct, frozen=True):
    """Stretches that were passed over, with nothing to show between them."""

    first: int
    last: int
    count: int


class Log(Page):
    """View 9."""

    @property
    def schema(self) -> Schema | None:
        """The fields of its filter."""
        return EVENTS

    def __init__(self) -> None:
        self.last_seq: int | None = None
        """The event on the last row; None while following."""
        self.page = 10
        self._lines = EventLines()
        self._found: list[int] = []
        """Seqs of the rows on the screen."""
        self._scanned = 0
        """Events that were looked at for them."""

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The newest events, or those up to where the reader stopped."""
        self.page = max(1, height - 2)
        self._hold_on(desk)
        chosen = desk.mirror.event(desk.event) if desk.event is not None else None
        foot = event_foot(desk, chosen, width, min(FOOT_ROWS, height // 3)) if chosen is not None else []
        rate = desk.rate or 0.0
        fold = self.last_seq is None and rate > FOLD_RATE
        events = self._shown(desk, height - 1 - len(foot), fold)
        self._found = [item.seq for item, _ in events if not isinstance(item, Gap | Passed)]
        row = Row().put(" LOG", "title").put("   following" if self.last_seq is None else "   stopped", "muted")
        wanted = desk.filters.get(LOG)
        if wanted is not None:
            row.put(f"   / {cut(wanted.text, width // 2)}", "text")
        newer = self._newer(desk)
        right = f"{count(newer)} newer  G" if newer else f"{per_second(rate)} a second" + (
            ", +n: n like it before" if fold else "")
        kept = _kept_text(desk)
        if row.x + 3 + len(kept) + 2 + len(right) < width:
            row.put(f"   {kept}", "muted")
        row.right(right, width - 1, "caution" if newer else "muted")
        lines = [row.line("" if desk.tall else "bar", width)]
        if not events and wanted is not None:
            return [*lines, *self._none(desk, width)]
        for item, more in events:
            if isinstance(item, Gap | Passed):
                lines.append(_band(desk, item, width))
            else:
                lines.append(self._lines.line(desk, item, width, choice=desk.event, folded=more))
        return [*fit(lines, height - len(foot)), *foot]

    def _hold_on(self, desk: Desk) -> None:
        """The place where the reader stopped is kept as long as its events are; then the oldest ones are shown."""
        log = desk.mirror.log
        if self.last_seq is not None and log:
            self.last_seq = max(self.last_seq, log[min(self.page, len(log)) - 1].seq)

    def _none(self, desk: Desk, width: int) -> list[Line]:
        """What was looked at for a filter that nothing matches, and where more is."""
        which = f"{count(self._scanned)} events around here" if self.last_seq is not None else (
            f"the newest {plural(self._scanned, 'event')}")
        row = Row().put(f" 0 of {which} match   ", "text").put("esc", "key").put("  clear", "muted")
        if not desk.mirror.log:
            return [row.line("", width)]
        more = f" {_kept_text(desk)}" + ("" if desk.recording else "; older ones: tail --since SEQ, or a recording")
        return [row.line("", width), Row().put(cut(more, width - 1), "muted").line()]

    def _newer(self, desk: Desk) -> int:
        if self.last_seq is None or not desk.mirror.log:
            return 0
        return max(0, desk.mirror.log[-1].seq - self.last_seq)

    def _shown(self, desk: Desk, rows: int, fold: bool) -> list[tuple[Event | Gap | Passed, int]]:
        """The last ``rows`` events that match, each with how many like it were folded into it.

        Gaps, and what was passed over, stand at their place. Where too few stand before the place of the reader, the
        place moves on to those behind it.
        """
        found = self._before(desk, self.last_seq, rows, fold)
        if self.last_seq is not None and len(found) < rows:
            wanted, missing, looked = desk.filters.get(LOG), rows - len(found), 0
            log, last = desk.mirror.log, self.last_seq
            for event in islice(log, bisect_right(log, last, key=lambda event: event.seq), None):
                looked += 1
                if wanted is None or wanted.matches(event, desk.mirror.state, desk.mirror):
                    last, missing = event.seq, missing - 1
                if not missing or looked >= SCANNED_MAX:
                    break
            if last != self.last_seq:
                self.last_seq = last
                found = self._before(desk, last, rows, fold)
            self._scanned += looked
        return found

    def _before(
        self, desk: Desk, newest: int | None, rows: int, fold: bool
    ) -> list[tuple[Event | Gap | Passed, int]]:
        """The last ``rows`` that match up to the event ``newest``."""
        wanted = desk.filters.get(LOG)
        marks: list[Gap | Stretch] = [gap for gap in desk.mirror.gaps if newest is None or gap.last <= newest]
        marks += desk.mirror.coverage.before(newest, STRETCHES_LOOKED_AT)
        marks.sort(key=lambda mark: mark.first)
        found: list[tuple[Event | Gap | Passed, int]] = []
        scanned = 0
        for event in reversed(desk.mirror.log):
            if newest is not None and event.seq > newest:
                continue
            while marks and marks[-1].first > event.seq:
                _add(found, marks.pop())
            scanned += 1
            if wanted is None or wanted.matches(event, desk.mirror.state, desk.mirror):
                last, more = found[-1] if found else (None, 0)
                if fold and last is not None and _alike(desk, event, last):
                    found[-1] = last, more + 1
                else:
                    found.append((event, 0))
            if len(found) > rows or scanned >= SCANNED_MAX:
                break
        self._scanned = scanned
        return list(reversed(found[:rows]))

    def hints(self, desk: Desk) -> list[Hint]:
        """Keys of the log."""
        return [("↑↓", "move"), ("G", "newest"), ("/", "filter"), ("[ ]", "cause, effect"), ("enter", "its slot"),
                ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """Choose a row and scroll; G follows again."""
        log = desk.mirror.log
        if not log:
            return False
        match key:
            case "up" | "k" | "N" | "down" | "j" | "n":
                self._step(desk, -1 if key in ("up", "k", "N") else 1)
            case "pageup" | "pagedown" | "g" | "home":
                self._scroll(desk, key)
            case "G" | "end" | "f":
                self.last_seq, desk.event = None, None
            case "enter" if desk.event is not None and desk.selected is not None:
                desk.go(SLOT)
            case "escape" if desk.event is not None and LOG not in desk.filters:
                desk.event = None
            case _ if key.startswith("row:"):
                event = desk.mirror.event(int(key[4:]))
                if event is not None:
                    self._choose(desk, event)
            case _:
                return False
        return True

    def _step(self, desk: Desk, step: int) -> None:
        """The next or previous event that the filter leaves."""
        wanted, mirror = desk.filters.get(LOG), desk.mirror
        here = desk.event
        if here is None:
            found = mirror.event(self._found[-1]) if self._found else None
        else:
            events = reversed(mirror.log) if step < 0 else iter(mirror.log)
            found = next((
                event for event in events if (event.seq < here if step < 0 else event.seq > here)
                and (wanted is None or wanted.matches(event, mirror.state, mirror))
            ), None)
        if found is not None:
            self._choose(desk, found)

    def _choose(self, desk: Desk, event: Event) -> None:
        desk.event = event.seq
        who = concerns(event, desk.mirror)
        if who and desk.mirror.life_of(who) is not None:
            desk.select(who)
        if not self._found or event.seq < self._found[0]:
            self._scroll_to(desk, event.seq, self.page)
        elif event.seq > self._found[-1]:
            self._scroll_to(desk, event.seq, 0)
        elif self.last_seq is None:
            self.last_seq = self._found[-1]

    def _scroll(self, desk: Desk, key: str) -> None:
        log = desk.mirror.log
        newest, oldest = log[-1].seq, log[0].seq
        at = newest if self.last_seq is None else self.last_seq
        at = {"pageup": at - self.page, "pagedown": at + self.page}.get(key, oldest + self.page)
        at = max(at, min(newest, oldest + self.page))
        self.last_seq = None if at >= newest else at

    def _scroll_to(self, desk: Desk, seq: int, below: int) -> None:
        """The event ``below`` rows above the last row."""
        self.last_seq = min(desk.mirror.log[-1].seq, max(seq + below // 2, desk.mirror.log[0].seq + self.page))
        if below and self.last_seq < seq:
            self.last_seq = seq

    def reveal(self, desk: Desk, event: Event) -> bool:
        """The event in the middle of the screen; it goes on standing there."""
        if desk.mirror.event(event.seq) is None:
            return False
        self._scroll_to(desk, event.seq, self.page)
        desk.event = event.seq
        return True

    def rows(self, desk: Desk) -> Table | None:
        """All events that are kept and that the filter leaves, oldest first."""
        wanted, mirror = desk.filters.get(LOG), desk.mirror
        return event_table(desk, (
            event for event in mirror.log if wanted is None or wanted.matches(event, mirror.state, mirror)))


def _kept_text(desk: Desk) -> str:
    """How much of the past is in this list."""
    log = desk.mirror.log
    if not log:
        return "no event yet"
    return f"{count(len(log))} kept, {spoken(log[-1].at_ns - log[0].at_ns)}"


def _alike(desk: Desk, event: Event, other: Event | Gap | Passed) -> bool:
    """Whether two events differ in their numbers alone."""
    return not isinstance(other, Gap | Passed) and type(event) is type(other) and (
        getattr(event, "pool", None) == getattr(other, "pool", None)
        and concerns(event, desk.mirror) == concerns(other, desk.mirror)
    )


def _add(found: list[tuple[Event | Gap | Passed, int]], mark: Gap | Stretch) -> None:
    """One more mark, going back; stretches with nothing to show between them are one row."""
    last = found[-1][0] if found else None
    if isinstance(mark, Gap):
        found.append((mark, 0))
    elif isinstance(last, Passed):
        found[-1] = Passed(mark.first, last.last, last.count + mark.count), 0
    else:
        found.append((Passed(mark.first, mark.last, mark.count), 0))


def _mark_text(mark: Gap | Passed) -> str:
    span = f"{count(mark.count)}: {count(mark.first)} to {count(mark.last)}"
    if isinstance(mark, Gap):
        return f"gap {span}, {mark.reason}; state from the snapshot "
    return f"passed over {span}; not lost: tail and recordings have them "


def _band(desk: Desk, mark: Gap | Passed, width: int) -> Line:
    text = f"{desk.glyphs.gap * 2} {_mark_text(mark)}"
    return Row().put(" ").put(text + desk.glyphs.gap * max(0, width - 2 - len(text)), "gap").line("", width)
