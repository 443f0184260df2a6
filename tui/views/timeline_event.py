"""The event under the cursor of the timeline: which ones there are to walk to, and what is said of the chosen one.

Law of this file: a cause or an effect that is not kept is told as the stimulus alone, never as the nearest event.
"""

from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.events import Event

from ..desk import Desk
from ..draw import words
from ..draw.spans import Line, Row
from ..model.causes import cause_of, effect_of
from ..model.lives import Life
from ..model.marks import distance, seq_at
from ..model.numbers import S, count, cut, duration, plain
from ..model.wording import describe, entry_name

RETRY_NS: Final = S
"""How often an effect that is not there yet is looked for again."""


def steps(life: Life) -> list[tuple[int, int]]:
    """(seq, time) of everything of a life that the cursor can stand on."""
    known = {event.seq: event.at_ns for event in life.story}
    known.update({move.seq: move.start_ns for move in life.moves if move.seq is not None})
    return sorted(known.items())


def find(desk: Desk, life: Life, seq: int) -> Event | None:
    """An event of a life: its story reaches further back than the log."""
    return desk.mirror.event(seq) or next((event for event in life.story if event.seq == seq), None)


class Traced(msgspec.Struct):
    """Cause and effect of one event, kept: looking for them each frame would cost a frame."""

    seq: int
    cause: Event | None
    effect: Event | None
    mono_ns: int


class EventFeet:
    """The last rows of the timeline."""

    def __init__(self) -> None:
        self._traced: Traced | None = None

    def _trace(self, desk: Desk, event: Event) -> Traced:
        known, mono = self._traced, desk.mono()
        if known is None or known.seq != event.seq:
            known = Traced(event.seq, cause_of(event, desk.mirror), effect_of(event, desk.mirror), mono)
        elif known.effect is None and mono - known.mono_ns >= RETRY_NS:
            known = Traced(event.seq, known.cause, effect_of(event, desk.mirror), mono)
        self._traced = known
        return known

    def lines(self, desk: Desk, cursor_ns: int | None, width: int) -> list[Line]:
        """What stands under the cursor: the change, then its cause and effect."""
        life = desk.mirror.life_of(desk.selected) if desk.selected else None
        if life is None or cursor_ns is None:
            hint = "choose a row with ↑ ↓, then n for its next event" if life is None else "n N walk its events"
            row = Row().put(f" {desk.glyphs.keys(hint)}", "faint")
            _mark(desk, row, None, desk.now_ns)
            return [row.line("", width - 1), Line()]
        event = find(desk, life, desk.event) if desk.event is not None else None
        if event is None or event.at_ns != cursor_ns:
            return [self._between(desk, life, cursor_ns, width), Line()]
        first, second = Row().put(" "), Row().put(" ")
        if width >= 100:
            first.put(f"−{duration(desk.now_ns - cursor_ns)}", "strong")
            first.put(f"  {desk.times.text(cursor_ns, millis=True)}  ", "text")
        first.put("seq ", "muted").put(f"{count(event.seq)}  ", "muted")
        first.spans([words.request(life.request, 20, "strong")]).put("  ")
        if type(event) is ev.SlotMoved:
            first.spans(words.state(event.old, desk.glyphs)).put(" → ", "muted")
            first.spans(words.state(event.new, desk.glyphs))
        else:
            first.put(f"{type(event).__name__}  ", "text")
            first.put(cut(plain(describe(event, desk.mirror)), max(0, width - 2 - first.x)), "muted")
        _mark(desk, first, event.seq, cursor_ns)
        traced = self._trace(desk, event)
        second.put("cause  ", "muted")
        if traced.cause is not None:
            second.put(f"{type(traced.cause).__name__} {count(traced.cause.seq)}", "text")
        else:
            second.put(f"stimulus {count(event.cause)}", "text")
        if type(event) is ev.SlotMoved:
            second.put(f"  {entry_name(event.entry)}, iteration {count(event.iteration)}", "muted")
        effect = traced.effect
        second.put("   effect  ", "muted")
        second.put("–" if effect is None else f"{type(effect).__name__} {count(effect.seq)}  ", "text")
        if effect is not None and width >= 100:
            second.put(cut(plain(describe(effect, desk.mirror)), max(0, width - second.x - 2)), "muted")
        return [first.line("", width - 1), second.line("", width - 1)]

    def _between(self, desk: Desk, life: Life, cursor_ns: int, width: int) -> Line:
        """The cursor stands between two events: in which state, and since when."""
        row = Row().put(" ")
        if width >= 100:
            row.put(f"−{duration(desk.now_ns - cursor_ns)}", "strong")
            row.put(f"  {desk.times.text(cursor_ns, millis=True)}  ", "text")
        row.spans([words.request(life.request, 20, "strong")])
        index = life.at(cursor_ns)
        if index is not None and not life.seen_at(cursor_ns):
            row.put("  not seen here: these events were passed over", "muted")
        elif index is not None:
            move = life.moves[index]
            row.put("  in ", "muted").spans(words.state(move.state, desk.glyphs))
            row.put(f" for {duration(cursor_ns - move.start_ns)}", "muted")
        _mark(desk, row, None, cursor_ns)
        return row.line("", width - 1)


def _mark(desk: Desk, row: Row, seq: int | None, at_ns: int) -> None:
    """The distance from the latest mark."""
    mark = desk.marks.latest
    if mark is not None:
        here = seq if seq is not None else seq_at(desk.mirror, at_ns)
        row.put("   ").put(distance(mark, here, at_ns), "text")
