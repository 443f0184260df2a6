"""Warnings: problems that need a person, with counts, evidence and reasons.

Law of this file: a warning always names its limit, and enter goes to its subject.
"""

from typing import Final

from kvbm_console.analysis.lives import Transfer
from kvbm_console.core.expression import Field, Schema
from kvbm_console.core.expression.schema import YES_NO, Kind

from ..desk import LOG, SLOT, SLOTS, TRANSFERS, WARNINGS, Desk, View
from ..draw import table, words
from ..draw.frame import Hint
from ..draw.spans import BLANK, Line, Row, Span
from ..draw.table import MOVES, Column, Table, as_table, fields_of, moved
from ..model.lints import COPIES, MANY, TEXTS, Warning, copy_level, ended_text, fold, tally
from ..model.numbers import clauses, count, cut, plain, wrap


def _over(warning: Warning) -> bool:
    return warning.ended_ns is not None


LINT: Final[Column[Warning]] = Column(
    title="lint", value=lambda warning: warning.lint,
    field=Field("lint", Kind.TEXT, lambda warning, s, m: warning.lint, "The rule that found it.", ordered=False))
LEVEL: Final[Column[Warning]] = Column(
    title="level", value=lambda warning: warning.level.name.lower(),
    field=Field("level", Kind.WORD, lambda warning, s, m: int(warning.level), "Its level.",
                {"fault": 0, "held": 1, "caution": 2}, ordered=False))
SUBJECT: Final[Column[Warning]] = Column(
    gap=4, width=lambda width: 16 if width < 99 else 26,
    cell=lambda warning, size, glyphs: [Span(cut(plain(warning.who), size), "muted" if _over(warning) else "strong")],
    title="who", value=lambda warning: warning.who,
    field=Field("request", Kind.TEXT, lambda warning, s, m: warning.request or warning.who, "Its request or engine.",
                ordered=False))
STATE: Final[Column[Warning]] = Column(
    gap=2, width=lambda width: 20 if width < 99 else 26,
    cell=lambda warning, size, glyphs: [
        Span(cut(warning.what, size), "muted" if _over(warning) else words.LEVEL_ROLE[warning.level])],
    title="what", value=lambda warning: warning.what)
REASON: Final[Column[Warning]] = Column(
    gap=2, cell=lambda warning, size, glyphs: [
        Span(clauses(plain(ended_text(warning) or warning.because), size), "muted" if _over(warning) else "text")],
    title="because", value=lambda warning: warning.because)
SEQ: Final[Column[Warning]] = Column(title="seq", value=lambda warning: warning.seq)
ENDED: Final[Column[Warning]] = Column(
    title="ended", value=_over,
    field=Field("over", Kind.WORD, lambda warning, s, m: _over(warning), "Yes if the warning has ended.", YES_NO,
                ordered=False))

SHOWN: Final = (SUBJECT, STATE, REASON)
EXPORTED: Final = (LINT, LEVEL, SUBJECT, STATE, REASON, SEQ, ENDED)
SCHEMA: Final = Schema("a warning", fields_of((SUBJECT, LINT, LEVEL, ENDED)))


class Warnings(View):
    """The panel behind ``!``."""

    schema = SCHEMA
    words = (
        ("limit", "the value from which it is a warning"), ("evidence", "the measured value and its first event"),
    )

    def __init__(self) -> None:
        self.key: str | None = None
        """The chosen warning; it stays chosen while others come and go."""
        self.top = 0
        self.page = 1
        self.last_top = 0
        """The last row from which the list of lints can be shown."""

    def listed(self, desk: Desk) -> list[Warning]:
        """The problems that the filter leaves, worst first."""
        return fold(self._each(desk))

    def _each(self, desk: Desk) -> list[Warning]:
        """Every warning that the filter leaves; warnings of the same problem stay apart."""
        wanted = desk.filters.get(WARNINGS)
        return [warning for warning in desk.lints.unfolded(desk.mono()) if wanted is None or wanted.matches(warning)]

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The list, then the explanation of the chosen warning."""
        found = self.listed(desk)
        lines = [self._head(desk, found, width)]
        if not found:
            none = " 0 match   " if WARNINGS in desk.filters else " Nothing needs you."
            row = Row().put(none, "muted")
            if WARNINGS in desk.filters:
                row.put("esc", "key").put("  clear", "muted")
            lines += [row.line(), BLANK, Row().put(" WATCHED", "title").line("" if desk.tall else "bar", width)]
            return [*lines, *self._watched(width, height - len(lines))]
        at = self._at(found)
        detail = _detail(desk, found[at], width)
        self.page = max(3, height - 2 - min(len(detail) + 1, height // 2))
        self.top = table.window(len(found), at, self.top, self.page)
        for index, warning in enumerate(found[self.top : self.top + self.page], self.top):
            lines.append(_line(desk, warning, index, width, chosen=index == at))
        if len(found) > self.page:
            lines.append(Row().put(f" +{len(found) - self.page} more", "muted").line())
        room = height - len(lines)
        return [*lines, *([BLANK] if room > len(detail) else []), *detail][:height]

    def _watched(self, width: int, room: int) -> list[Line]:
        """All lints with their thresholds, shown when nothing is wrong; the list scrolls."""
        lines = _watched(width)
        self.page = max(1, room - 1)
        self.last_top = max(0, len(lines) - room)
        self.top = min(self.top, self.last_top)
        shown = lines[self.top : self.top + room]
        if self.last_top and shown:
            below = len(lines) - self.top - room + 1
            shown[-1] = Row().put(f" +{below} rows below  ↓" if self.top < self.last_top else " ↑", "muted").line()
            if self.top >= self.last_top:
                shown[-1] = lines[-1]
        return shown

    def _at(self, found: list[Warning]) -> int:
        return next((i for i, warning in enumerate(found) if warning.key == self.key), 0)

    def _head(self, desk: Desk, found: list[Warning], width: int) -> Line:
        row = Row().put(" WARNINGS", "title").put(f"   {tally(found)}", "muted")
        wanted = desk.filters.get(WARNINGS)
        if wanted is not None:
            row.put(f"   / {cut(plain(wanted.text), 30)}", "text").put(f"   {len(found)} match", "muted")
        return row.line("" if desk.tall else "bar", width)

    def hints(self, desk: Desk) -> list[Hint]:
        listed = bool(self.listed(desk))
        hints = [*([("enter", "go there")] if listed else []), ("↑↓", "choose" if listed else "scroll"),
                 ("/", "filter")]
        return [*hints, *([("c", "continue")] if desk.may_control else []), ("e", "export")]

    def press(self, desk: Desk, key: str) -> bool:
        """Choose a warning, or go to its subject."""
        found = self.listed(desk)
        if key in MOVES and found:
            self._choose(desk, found[moved(self._at(found), key, len(found), self.page)])
        elif key in MOVES and self.last_top:
            self.top = moved(self.top, key, self.last_top + 1, self.page)
        elif key.startswith("row:") and int(key[4:]) < len(found):
            chosen = found[int(key[4:])]
            if chosen.key == self.key:
                open_warning(desk, chosen)
            self._choose(desk, chosen)
        elif key == "enter" and found:
            open_warning(desk, found[self._at(found)])
        else:
            return False
        return True

    def _choose(self, desk: Desk, warning: Warning) -> None:
        self.key = warning.key
        if warning.request is not None:
            desk.select(warning.request)

    def rows(self, desk: Desk) -> Table | None:
        """Every warning of the list."""
        return as_table(EXPORTED, self._each(desk))


def open_warning(desk: Desk, warning: Warning) -> None:
    """Go to the subject of a warning."""
    if warning.key.endswith(MANY):
        desk.go(SLOTS)
    elif warning.request is not None:
        desk.select(warning.request)
        desk.event = warning.seq
        desk.go(SLOT)
    elif warning.action == COPIES:
        copy = _worst_copy(desk, warning)
        desk.go(TRANSFERS)
        if copy is not None:
            desk.view.press(desk, f"candidate:{copy.candidate}")
    elif warning.action[0].isdigit():
        desk.go(int(warning.action[0]) - 1)
        event = desk.mirror.event(warning.seq) if warning.seq is not None and desk.current == LOG else None
        if event is not None:
            desk.view.reveal(desk, event)


def _worst_copy(desk: Desk, warning: Warning) -> Transfer | None:
    """The oldest open copy that a warning about copies is about."""
    mirror, now_ns = desk.mirror, desk.now_ns
    marked = [copy for copy in mirror.transfers.values() if copy_level(mirror, copy, now_ns) is not None]
    meant = [copy for copy in marked if warning.who in (copy.route.arrow, f"op {copy.operation}")]
    return max(meant, key=lambda copy: copy.age(now_ns), default=None)


def _line(desk: Desk, warning: Warning, index: int, width: int, *, chosen: bool) -> Line:
    row = Row().put(desk.glyphs.select if chosen else " ", "selbar")
    row.spans(words.mark(None if _over(warning) else warning.level, desk.glyphs))
    table.cells(table.layout(SHOWN, width - 1), warning, desk.glyphs, row)
    row.zone(0, ("row", index), width)
    return row.to(width - 1 if chosen else row.x).line("sel" if chosen else "", width)


def _detail(desk: Desk, warning: Warning, width: int) -> list[Line]:
    """The chosen warning: evidence, threshold, reason and advice."""
    text = TEXTS[warning.lint]
    head = Row().put(f" {warning.lint.upper().replace('_', ' ')}", "title").put(f"   {plain(warning.who)}  ", "text")
    head.put(warning.what, words.LEVEL_ROLE[warning.level])
    lines = [head.line("" if desk.tall else "bar", width)]
    evidence = plain(warning.because) + (f"; since seq {count(warning.seq)}" if warning.seq is not None else "")
    parts = [("evidence", evidence), ("limit", text.threshold), ("why bad", text.bad), ("what to do", text.do)]
    for name, sentence in parts:
        for index, piece in enumerate(wrap(sentence, width - 15)):
            row = Row().put(f" {name if index == 0 else ''}", "muted").to(13)
            lines.append(row.put(piece, "text" if name != "limit" else "muted").line())
    return lines


def _watched(width: int) -> list[Line]:
    """Every lint with its threshold."""
    lines: list[Line] = []
    left = max(map(len, TEXTS)) + 3
    for lint, text in TEXTS.items():
        for index, piece in enumerate(wrap(text.threshold, width - 2 - left)):
            row = Row().put("" if index else f" {lint.replace('_', ' ')}", "text").to(left)
            lines.append(row.put(piece, "muted").line())
    return lines
