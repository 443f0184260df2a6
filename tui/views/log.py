"""Log: events as text, newest last, back to the oldest event that the daemon or the recording has.

A row shows time, seq, kind, subject and the rest in one phrase. Wide rows add the stimulus, then the fields themselves.
The chosen event stands whole below the list.

Law of this file: scrolling up stops following and shows the number of newer events. Gaps are rows of their own and
never vanish. The end of the list says that it is the end.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvbm_console.core.events import Event, SlotMoved
from kvbm_console.core.ids import Word
from kvbm_console.stream.document import field_text
from kvbm_console.stream.feed import why_lost

from ..desk import LOG, SLOT, Desk, View
from ..draw.frame import Hint
from ..draw.spans import Line, Row, fit
from ..draw.table import Table
from ..draw.words import request
from ..model.coverage import SeenGap, Stretch
from ..model.events import EVENTS, STEADY, beside_kind, concerns, describe, entry_words, kind_role, kind_words
from ..model.filters import Filter
from ..model.numbers import count, cut, per_second, plain, plural, spoken
from ..model.trail import Trail, backwards, index_at

CAUSE_FROM = 120
"""Columns from which a row tells its stimulus, and the iteration of a move."""
FIELDS_FROM = 180
"""Columns from which a row has its fields, too."""
_TOLD = frozenset({"seq", "at_ns", "cause"})
"""Fields that have a place of their own."""
STRETCHES_LOOKED_AT = 512
"""Stretches of passed-over events that are considered for one screen."""
FOLD_RATE = 200
"""Events a second above which equal events in a row fold while following, because no person reads so many."""
KIND_CELLS = 22
"""The longest kind: ``device blocks assigned``."""
FOOT_ROWS = 5
"""Rows of the chosen event below the list, at most."""


def event_table(desk: Desk, events: Iterable[Event]) -> Table:
    """Events as rows for a file."""
    names = ["seq", "at_ns", "cause", "kind", "request", "text"]
    return names, [[
        str(event.seq), str(event.at_ns), str(event.cause), type(event).__name__, concerns(event, desk.mirror),
        describe(event, desk.mirror),
    ] for event in events]


def fields(event: Event, limit: int) -> Iterator[tuple[str, str]]:
    """Name and value of each field of the event as filters spell them, each value within ``limit`` characters."""
    for name in type(event).__struct_fields__:
        if name not in _TOLD:
            yield name, plain(field_text(name, getattr(event, name), limit)) or "–"


def worded(event: Event, limit: int) -> Iterator[tuple[str, str]]:
    """The same in words."""
    for name, told in fields(event, limit):
        value = getattr(event, name)
        words = value if isinstance(value, tuple) else (value,)
        if name == "entry":
            told = cut(entry_words(value), limit)
        elif words and all(isinstance(word, Word) for word in words):
            told = cut(", ".join(word.words for word in words), limit)
        yield name.replace("_", " "), told


def event_line(desk: Desk, event: Event, width: int, *, chosen: bool = False, folded: int = 0) -> Line:
    """Time, seq, kind, subject and text. ``folded`` equal events right before it share the row."""
    wide = width >= 100
    subject = concerns(event, desk.mirror)
    row = Row().put(desk.glyphs.select if chosen else " ", "selbar")
    row.put(desk.times.text(event.at_ns, millis=True), "muted")
    newest = desk.mirror.log[-1].seq if desk.mirror.log else event.seq
    row.right(count(event.seq), row.x + (11 if wide else max(5, 1 + len(count(max(newest, event.seq))))), "faint")
    row.put("  " if wide else " ")
    kind = row.x
    row.put(cut(kind_words(type(event)), KIND_CELLS), kind_role(event, desk.mirror))
    row.to(kind + KIND_CELLS + (2 if wide else 1))
    if subject:
        row.spans([request(subject, 20 if wide else 13, "strong" if subject == desk.selected else "text")])
        row.to(row.x + 2 if wide else row.x + 1)
        row.zone(0, ("select", subject), width)
    if folded:
        row.put(f"+{count(folded)}  ", "text")
    told = describe(event, desk.mirror) if wide else beside_kind(event, desk.mirror)
    row.put(cut(plain(told), max(0, width - 1 - row.x)), "muted")
    _rest(row, event, width)
    row.zone(0, ("row", event.seq), row.x)
    return row.to(width - 1 if chosen else row.x).line("sel" if chosen else "", width)


def _rest(row: Row, event: Event, width: int) -> None:
    """Add the details for which a wide screen has room."""
    if width < CAUSE_FROM:
        return
    iteration = event.iteration if isinstance(event, SlotMoved) else None
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
        for name, value in worded(event, 24):
            told += ("  " if told else "") + f"{name} {value}"
            if len(told) > room:
                break
        row.put(cut(told, room), "faint")


def event_foot(desk: Desk, event: Event, width: int, rows: int) -> list[Line]:
    """The whole chosen event in at most ``rows`` lines: its time by both clocks, its stimulus, and every field."""
    head = Row().put(f" seq {count(event.seq)}  ", "text").put(type(event).__name__, "strong")
    subject = concerns(event, desk.mirror)
    if subject:
        head.put("  ").spans([request(subject, 40, "text")])
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


class Passed(msgspec.Struct, frozen=True):
    """Stretches of passed-over events with no shown event between them."""

    first: int
    last: int
    count: int


class Folded(msgspec.Struct, frozen=True):
    """Events of steady kinds in a row, with how often each kind came; ``seq`` is the newest."""

    seq: int
    first: int
    kinds: tuple[tuple[str, int], ...]

    def and_before(self, event: Event) -> "Folded":
        """The same with the event in front of them."""
        counts = dict(self.kinds)
        kind = kind_words(type(event))
        counts[kind] = counts.get(kind, 0) + 1
        return Folded(self.seq, event.seq, tuple(counts.items()))

    @property
    def text(self) -> str:
        """``iteration advanced 3, blocks filled 1``."""
        kinds = sorted(self.kinds, key=lambda pair: -pair[1])
        return ", ".join(f"{name} {count(times)}" for name, times in kinds)


Shown = list[tuple[Event | SeenGap | Passed | Folded, int]]
"""Rows, each with the number of equal events that share it."""


class Log(View):
    """View 9."""

    schema = EVENTS
    words = (
        ("seq", "number of the event; none is missing between two"),
        ("kind", "what became true; a chosen event has its class name below, which filters take"),
        ("stimulus", "number of the call that caused it: events with an equal number happened at once"),
        ("op", "a copy; a candidate is a planned copy"),
        ("+00:", "time since the engine began, where the time of day is not known"),
    )

    def __init__(self) -> None:
        self.last_seq: int | None = None
        """The event on the last row; None while following."""
        self.page = 10
        self._found: list[int] = []
        """Seqs of the rows on the screen."""
        self._to_oldest = False
        """True if the reader waits for the oldest page."""
        self.folds = False
        """True if events of steady kinds share a row."""
        self.sought: Filter | None = None
        """The last filter: ``n`` and ``N`` find its matches when the list is whole again."""

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The newest events, or the events up to the place where the reader stopped."""
        self.page = max(1, height - 2)
        trail = self._trail(desk)
        self._hold_on(trail)
        chosen = desk.mirror.event(desk.event) if desk.event is not None else None
        foot = event_foot(desk, chosen, width, min(FOOT_ROWS, height // 3)) if chosen is not None else []
        rate = desk.rate or 0.0
        fold = self.last_seq is None and rate > FOLD_RATE
        events = self._shown(desk, height - 1 - len(foot), fold)
        self._found = _seqs(events)
        self._ask(desk, trail)
        row = Row().put(" LOG", "title").put("   following" if self.last_seq is None else "   stopped", "muted")
        wanted = desk.filters.get(LOG)
        if wanted is not None:
            self.sought = wanted
            row.put(f"   / {cut(wanted.text, width // 2)}", "text")
        elif self.sought is not None:
            row.put(f"   n N {cut(self.sought.text, width // 3)}", "text")
        if self.folds:
            row.put("   z folded", "text")
        newer = self._newer(desk)
        right = f"{count(newer)} newer  G" if newer else f"{per_second(rate)} a second" + (
            ", +n: n like it before" if fold else "")
        kept = _kept_text(desk) + ("; going to the oldest" if self._to_oldest and not trail.failed else "")
        if row.x + 3 + len(kept) + 2 + len(right) < width:
            row.put(f"   {kept}", "muted")
        row.right(right, width - 1, "caution" if newer else "muted")
        lines = [row.line("" if desk.tall else "bar", width)]
        if not events and wanted is not None:
            return [*lines, *self._none(desk, trail, width)]
        if self._at_top(trail):
            lines.append(Row().put(cut(f" {_end_text(desk, trail)}", width - 1), "muted").line())
            del events[height - 2 - len(foot) :]
            self._found = _seqs(events)
        for item, more in events:
            if isinstance(item, SeenGap | Passed):
                lines.append(_band(desk, item, width))
            elif isinstance(item, Folded):
                lines.append(_folded_line(desk, item, width))
            else:
                lines.append(event_line(desk, item, width, chosen=item.seq == desk.event, folded=more))
        return [*fit(lines, height - len(foot)), *foot]

    def _trail(self, desk: Desk) -> Trail:
        """The events to page over now."""
        trail = desk.mirror.trail
        trail.look(desk.mirror, desk.filters.get(LOG))
        return trail

    def _hold_on(self, trail: Trail) -> None:
        """Keep the reader's place as long as its events are kept; then move the place to the oldest events."""
        if self._to_oldest and trail.oldest is not None and (
            trail.near_first <= trail.oldest or trail.far_lo <= trail.oldest < trail.far_hi
        ):
            self._to_oldest = False
            events = trail.events(trail.oldest)
            self.last_seq = events[min(self.page, len(events)) - 1].seq if events else None
        events = trail.events(self.last_seq)
        if self.last_seq is not None and events:
            self.last_seq = max(self.last_seq, events[min(self.page, len(events)) - 1].seq)

    def _ask(self, desk: Desk, trail: Trail) -> None:
        """Ask for older events before the reader reaches them, and for newer events of a stretch that stands alone."""
        if trail.failed:
            return
        if self._to_oldest:
            desk.actions.look_back("oldest", None, self.page)
            return
        events = trail.events(self.last_seq)
        if (not self._found or index_at(events, self._found[0]) < self.page) and not trail.complete(self.last_seq):
            desk.actions.look_back("older", self.last_seq, 2 * self.page)
        elif events is trail.far and self._found and index_at(events, self._found[-1]) >= len(events) - self.page:
            desk.actions.look_back("newer", self.last_seq, 2 * self.page)

    def _at_top(self, trail: Trail) -> bool:
        """True if the first row is the first event that is known, and nothing older will come."""
        if not self._found or not (trail.failed or trail.complete(self.last_seq)):
            return False
        return self._found[0] == trail.events(self.last_seq)[0].seq

    def _none(self, desk: Desk, trail: Trail, width: int) -> list[Line]:
        """The reach of the search, for a filter that matches nothing."""
        which = f"{count(trail.examined)} events around here" if self.last_seq is not None else (
            f"the newest {plural(trail.examined, 'event')}")
        row = Row().put(f" 0 of {which} match   ", "text").put("esc", "key").put("  clear", "muted")
        if not desk.mirror.log:
            return [row.line("", width)]
        told = (_kept_text(desk), _end_text(desk, trail))
        return [row.line("", width), *(Row().put(cut(f" {text}", width - 1), "muted").line() for text in told)]

    def _newer(self, desk: Desk) -> int:
        if self.last_seq is None or not desk.mirror.log:
            return 0
        return max(0, desk.mirror.log[-1].seq - self.last_seq)

    def _shown(self, desk: Desk, rows: int, fold: bool) -> Shown:
        """The last ``rows`` events that match, each with the number of equal events that were folded into its row.

        Gaps and passed-over events stand at their place. If too few rows stand before the place of the reader, the
        place moves on to the rows behind it.
        """
        found = self._before(desk, self.last_seq, rows, fold)
        if self.last_seq is not None and len(found) < rows:
            events = desk.mirror.trail.events(self.last_seq)
            at = min(len(events) - 1, index_at(events, self.last_seq) + rows - len(found))
            if events and events[at].seq > self.last_seq:
                self.last_seq = events[at].seq
                found = self._before(desk, self.last_seq, rows, fold)
        return found

    def _before(self, desk: Desk, newest: int | None, rows: int, fold: bool) -> Shown:
        """The last ``rows`` events that match, up to the event ``newest``."""
        trail = desk.mirror.trail
        marks: list[SeenGap | Stretch] = [gap for gap in desk.mirror.gaps if newest is None or gap.last <= newest]
        marks += desk.mirror.coverage.before(newest, STRETCHES_LOOKED_AT)
        marks = [mark for mark in marks if not trail.covers(mark.first)]
        marks += [gap for gap in trail.gaps if trail.covers(gap.first) and (newest is None or gap.last <= newest)]
        marks.sort(key=lambda mark: mark.first)
        found: Shown = []
        for event in backwards(trail.events(newest), newest):
            while marks and marks[-1].first > event.seq:
                _add(found, marks.pop())
            last, more = found[-1] if found else (None, 0)
            if self.folds and type(event) in STEADY and event.seq != desk.event:
                if isinstance(last, Folded):
                    found[-1] = last.and_before(event), 0
                else:
                    found.append((Folded(event.seq, event.seq, ((kind_words(type(event)), 1),)), 0))
            elif fold and last is not None and _alike(desk, event, last):
                found[-1] = last, more + 1
            else:
                found.append((event, 0))
            if len(found) > rows:
                break
        return list(reversed(found[:rows]))

    def hints(self, desk: Desk) -> list[Hint]:
        return [("↑↓", "move"), ("G", "newest"), ("/", "filter"), ("[ ]", "cause, effect"), ("enter", "its slot"),
                ("z", "unfold" if self.folds else "fold"), ("n N", "match"),
                ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """Choose a row and scroll; G follows again."""
        if not desk.mirror.log:
            return False
        trail = self._trail(desk)
        trail.failed = ""
        match key:
            case "n" | "N" if self.sought is not None and LOG not in desk.filters:
                self._find(desk, trail, self.sought, -1 if key == "N" else 1)
            case "up" | "k" | "N" | "down" | "j" | "n":
                self._step(desk, trail, -1 if key in ("up", "k", "N") else 1)
            case "z":
                self.folds = not self.folds
            case "pageup" | "pagedown":
                self._scroll(trail, self.page if key == "pagedown" else -self.page)
            case "g" | "home":
                self._scroll(trail, -len(trail.events(self.last_seq)))
                self._to_oldest = not trail.complete(self.last_seq)
                return True
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
        self._to_oldest = False
        return True

    def _step(self, desk: Desk, trail: Trail, step: int) -> None:
        """The next or previous event that the filter leaves."""
        here = desk.event
        if here is None:
            found = desk.mirror.event(self._found[-1]) if self._found else None
        else:
            events = trail.events(here)
            at = index_at(events, here - (step < 0)) + (step > 0)
            found = events[at] if 0 <= at < len(events) else None
        if found is not None:
            self._choose(desk, found)

    def _find(self, desk: Desk, trail: Trail, sought: Filter, step: int) -> None:
        """The next or previous match of the last filter, in the whole list."""
        here = desk.event if desk.event is not None else self._found[-1] + 1 if self._found else 0
        events = trail.events(here)
        at = index_at(events, here - (step < 0)) + (step > 0)
        places = range(at, len(events)) if step > 0 else range(at, -1, -1)
        mirror = desk.mirror
        found = next((events[i] for i in places if sought.matches(events[i], mirror.state, mirror)), None)
        if found is not None:
            self._choose(desk, found)
            return
        where = "later" if step > 0 else "earlier"
        desk.tell(f"no {where} match among {plural(len(places), 'event')}; / finds all that there are", "muted")

    def _choose(self, desk: Desk, event: Event) -> None:
        desk.event = event.seq
        subject = concerns(event, desk.mirror)
        if subject and desk.mirror.life_of(subject) is not None:
            desk.select(subject)
        if not self._found or event.seq < self._found[0]:
            self._scroll_to(desk, event.seq, self.page)
        elif event.seq > self._found[-1]:
            self._scroll_to(desk, event.seq, 0)
        elif self.last_seq is None:
            self.last_seq = self._found[-1]

    def _scroll(self, trail: Trail, step: int) -> None:
        events = trail.events(self.last_seq)
        here = len(events) - 1 if self.last_seq is None else index_at(events, self.last_seq)
        self._stand(trail, events, here + step)

    def _scroll_to(self, desk: Desk, seq: int, below: int) -> None:
        """Scroll so that the event stands ``below`` rows above the last row."""
        trail = self._trail(desk)
        events = trail.events(seq)
        at = index_at(events, seq)
        last = max(at, min(len(events) - 1, max(at + below // 2, self.page - 1)))
        self.last_seq = events[last].seq if events else seq
        if at < 0 or events[at].seq != seq:
            desk.tell(f"seq {count(seq)} is hidden by the filter of the log; esc clears it", "muted")

    def _stand(self, trail: Trail, events: Sequence[Event], at: int) -> None:
        """Put the event of this index on the last row, or the nearest event with a page before it."""
        if not events:
            return
        at = min(len(events) - 1, max(at, self.page - 1))
        newest = at == len(events) - 1 and events is not trail.far
        self.last_seq = None if newest else events[at].seq

    def reveal(self, desk: Desk, event: Event) -> bool:
        """Put the event in the middle of the screen and keep it there; False when it is not known."""
        if desk.mirror.event(event.seq) is None:
            return False
        self._scroll_to(desk, event.seq, self.page)
        desk.event = event.seq
        return True

    def proposal(self, desk: Desk) -> str:
        """A breakpoint at the chosen move."""
        event = desk.mirror.event(desk.event) if desk.event is not None else None
        return f"from {event.old.label} to {event.new.label}" if isinstance(event, SlotMoved) else ""

    def rows(self, desk: Desk) -> Table | None:
        """All events that are known and that the filter leaves, oldest first."""
        return event_table(desk, self._trail(desk).events(self.last_seq))


def _seqs(rows: Shown) -> list[int]:
    return [item.seq for item, _ in rows if not isinstance(item, SeenGap | Passed)]


def _end_text(desk: Desk, trail: Trail) -> str:
    """The reason why the list ends with its oldest event."""
    if trail.failed:
        return f"older events cannot be had: {trail.failed}"
    if trail.oldest is None or (not trail.complete(None) and trail.far_lo > trail.oldest):
        return "looking for older ones"
    if desk.recording:
        return "nothing older: the recording begins here"
    return f"nothing older than event {count(trail.oldest)} in the daemon, its recording or this console"


def _kept_text(desk: Desk) -> str:
    """The number of kept events and the time that they span."""
    log = desk.mirror.log
    if not log:
        return "no event yet"
    return f"{count(len(log))} kept, {spoken(log[-1].at_ns - log[0].at_ns)}"


def _alike(desk: Desk, event: Event, other: Event | SeenGap | Passed | Folded) -> bool:
    """True if two events differ in their numbers alone."""
    return not isinstance(other, SeenGap | Passed | Folded) and type(event) is type(other) and (
        getattr(event, "pool", None) == getattr(other, "pool", None)
        and concerns(event, desk.mirror) == concerns(other, desk.mirror)
    )


def _add(found: Shown, mark: SeenGap | Stretch) -> None:
    """Append a mark, going back in time; stretches with no shown event between them share a row."""
    last = found[-1][0] if found else None
    if isinstance(mark, SeenGap):
        found.append((mark, 0))
    elif isinstance(last, Passed):
        found[-1] = Passed(mark.first, last.last, last.count + mark.count), 0
    else:
        found.append((Passed(mark.first, mark.last, mark.count), 0))


def _mark_text(mark: SeenGap | Passed) -> str:
    span = f"{count(mark.count)}: {count(mark.first)} to {count(mark.last)}"
    if isinstance(mark, SeenGap):
        return f"gap {span}, {why_lost(mark.reason)}; state from the snapshot "
    return f"passed over {span}; not lost: tail and recordings have them "


def _folded_line(desk: Desk, item: Folded, width: int) -> Line:
    """Events of steady kinds on one row, in the columns of an event."""
    wide = width >= 100
    row = Row().to(1 + len(desk.times.text(0, millis=True)))
    row.right(count(item.seq), row.x + (11 if wide else 10), "faint")
    row.put("  " if wide else " ").put(cut(f"{desk.glyphs.todo} {item.text}", width - 1 - row.x), "faint")
    return row.zone(0, ("row", item.seq), width).line("", width)


def _band(desk: Desk, mark: SeenGap | Passed, width: int) -> Line:
    text = f"{desk.glyphs.gap * 2} {_mark_text(mark)}"
    return Row().put(" ").put(text + desk.glyphs.gap * max(0, width - 2 - len(text)), "gap").line("", width)
