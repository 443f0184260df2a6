"""Finished: the requests that ended last, as a list to sort and to search: the slowest, the first token, the hits.

Law of this file: a time or a share that was not seen is unknown and never zero.
"""

from functools import cached_property
from typing import Any, Final

from kvbm_console.analysis.lives import Life
from kvbm_console.core import events as ev
from kvbm_console.core.expression import Field
from kvbm_console.core.expression.schema import Kind
from kvbm_console.core.ids import FinishReason, SlotState, Tier

from ..desk import FINISHED, SLOT, Desk, View
from ..draw import table, words
from ..draw.frame import Hint
from ..draw.glyphs import Glyphs
from ..draw.spans import Line, Row, Span
from ..draw.table import MOVES, Column, Order, Table, as_table, fields_of, moved
from ..model.filters import with_fields
from ..model.numbers import count, cut, duration, plain, plural
from ..model.timeline import LIVES


class Done:
    """A finished request; each value is computed when it is first asked for."""

    def __init__(self, life: Life, now_ns: int) -> None:
        self.life, self.now_ns = life, now_ns

    @property
    def whole(self) -> bool:
        """True if it was seen from its arrival to its end."""
        life = self.life
        begun = life.times.seen and bool(life.moves) and life.moves[0].seq is not None
        return begun and not life.lost and not life.dropped

    @cached_property
    def took_ns(self) -> int | None:
        """From its arrival to its end."""
        life = self.life
        return None if life.lost or life.closed_ns is None else life.closed_ns - life.times.arrived_ns

    @cached_property
    def ttft_ns(self) -> int | None:
        """From its arrival to its first token."""
        times = self.life.times
        return None if times.first_token_ns is None or not self.whole else times.first_token_ns - times.arrived_ns

    def stay_ns(self, state: SlotState) -> int | None:
        """The time that it spent in a state."""
        life = self.life
        if not self.whole or life.closed_ns is None:
            return None
        ends = [*life.starts[1:], life.closed_ns]
        return sum(end - move.start_ns for move, end in zip(life.moves, ends, strict=True) if move.state is state)

    @cached_property
    def waited_ns(self) -> int | None:
        """From its arrival to its first prefill; None for a clone, whose prompt another slot computed."""
        moves = self.life.moves if self.whole and self.life.times.arrived_ns == self.life.opened_ns else []
        first = next((move.start_ns for move in moves if move.state is SlotState.PREFILLING), None)
        return None if first is None else first - self.life.opened_ns

    @property
    def held_ns(self) -> int:
        """The time for which breakpoints held it."""
        return sum((stay.end_ns or stay.start_ns) - stay.start_ns for stay in self.life.stays)

    @property
    def scored(self) -> ev.PrefixScored | None:
        """Its last admission."""
        return self.life.scored

    @cached_property
    def share(self) -> float | None:
        """The share of its prompt blocks that were found, from 0 to 1."""
        scored = self.scored
        return sum(scored.hits) / scored.prompt_blocks if scored is not None and scored.prompt_blocks else None

    def found(self, tier: Tier) -> int | None:
        """Blocks that were found in a tier."""
        return None if self.scored is None else self.scored.hits[tier - 1]

    @cached_property
    def preemptions(self) -> int:
        """How often it lost its device blocks."""
        return sum(move.state is SlotState.PREEMPTED for move in self.life.moves)

    @cached_property
    def reason(self) -> FinishReason | None:
        """How it ended; None if that is not known."""
        if self.life.lost:
            return None
        return next((e.reason for e in reversed(self.life.story) if isinstance(e, ev.SlotMoved) and e.reason), None)


def _ending(done: Done) -> str:
    return "?" if done.life.lost else "–" if done.reason is None else done.reason.words


def _time(value: int | None, role: str = "text") -> list[Span]:
    return [Span("–", "muted")] if value is None else [Span(duration(value), role)]


def _number(value: int | None) -> list[Span]:
    return [Span("–", "muted")] if value is None else [Span(count(value), "text")] if value else [Span("·", "faint")]


def _known(value: float | None) -> tuple[bool, float]:
    """The largest first, the unknown last."""
    return value is None, -(value or 0)


def _tier(tier: Tier) -> Column[Done]:
    return Column(
        name=tier.name, width=5, right=True, gap=2, from_width=110,
        cell=lambda done, size, glyphs: _number(done.found(tier)),
        title=f"{tier.name.lower()}_blocks", value=lambda done: done.found(tier))


def _share(done: Done, size: int, glyphs: Glyphs) -> list[Span]:
    return [Span("–" if done.share is None else f"{int(done.share * 100)} %", "text")]


ENDED: Final[Column[Done]] = Column(
    name="ENDED", width=6, right=True, cell=lambda done, size, glyphs: _time(
        None if done.life.closed_ns is None else done.now_ns - done.life.closed_ns, "muted"),
    order="last ended", key=lambda done: (-(done.life.closed_ns or 0),), title="ended_ns",
    value=lambda done: done.life.closed_ns)
REQUEST: Final[Column[Done]] = Column(
    name="REQUEST", gap=2, width=lambda width: 22 if width < 100 else 32 if width < 150 else 48,
    cell=lambda done, size, glyphs: [words.request(done.life.request, size, "text")],
    order="request", key=lambda done: (done.life.request,), title="request", value=lambda done: done.life.request)
TOOK: Final[Column[Done]] = Column(
    name="TOOK", width=6, right=True, gap=2, cell=lambda done, size, glyphs: _time(done.took_ns),
    order="slowest", key=lambda done: _known(done.took_ns), title="took_ns", value=lambda done: done.took_ns)
TTFT: Final[Column[Done]] = Column(
    name="TTFT", width=6, right=True, gap=2, cell=lambda done, size, glyphs: _time(done.ttft_ns),
    order="first token", key=lambda done: _known(done.ttft_ns), title="ttft_ns", value=lambda done: done.ttft_ns,
    field=Field("ttft", Kind.DURATION, lambda life, state, now: Done(life, now).ttft_ns,
                "From its arrival to its first token.", optional=True))
BLOCKS: Final[Column[Done]] = Column(
    name="BLOCKS", width=6, right=True, gap=2,
    cell=lambda done, size, glyphs: _number(None if done.scored is None else done.scored.prompt_blocks),
    title="prompt_blocks", value=lambda done: None if done.scored is None else done.scored.prompt_blocks)
HIT: Final[Column[Done]] = Column(
    name="HIT", width=5, right=True, gap=2, cell=_share,
    order="fewest hits", key=lambda done: (done.share is None, done.share or 0), title="hit_share",
    value=lambda done: done.share)
G1, G2, G3 = (_tier(tier) for tier in (Tier.G1, Tier.G2, Tier.G3))
PREEMPTED: Final[Column[Done]] = Column(
    name="PRE", width=4, right=True, gap=2, cell=lambda done, size, glyphs: _number(done.preemptions),
    order="preemptions", key=lambda done: (-done.preemptions,), title="preemptions",
    value=lambda done: done.preemptions)
REASON: Final[Column[Done]] = Column(
    name="END", gap=2, cell=lambda done, size, glyphs: [Span(cut(_ending(done), size), "muted")],
    title="reason", value=lambda done: "" if done.reason is None else done.reason.label)
WAITED: Final[Column[Done]] = Column(
    name="WAITED", width=7, right=True, gap=2, from_width=150, cell=lambda done, size, glyphs: _time(done.waited_ns),
    title="waited_ns", value=lambda done: done.waited_ns)
PREFILL: Final[Column[Done]] = Column(
    name="PREFILL", width=7, right=True, gap=2, from_width=150,
    cell=lambda done, size, glyphs: _time(done.stay_ns(SlotState.PREFILLING)),
    title="prefill_ns", value=lambda done: done.stay_ns(SlotState.PREFILLING))
DECODE: Final[Column[Done]] = Column(
    name="DECODE", width=7, right=True, gap=2, from_width=150,
    cell=lambda done, size, glyphs: _time(done.stay_ns(SlotState.DECODING)),
    title="decode_ns", value=lambda done: done.stay_ns(SlotState.DECODING))
HELD: Final[Column[Done]] = Column(
    name="HELD", width=6, right=True, gap=2, from_width=150,
    cell=lambda done, size, glyphs: _time(done.held_ns) if done.held_ns else [Span("·", "faint")],
    title="held_ns", value=lambda done: done.held_ns)
SHOWN: Final = (
    ENDED, REQUEST, TOOK, TTFT, WAITED, PREFILL, DECODE, HELD, BLOCKS, HIT, G1, G2, G3, PREEMPTED, REASON)
SCHEMA: Final = with_fields(LIVES, *fields_of((TTFT,)))

FILTER_MIN: Final = 8
"""Cells from which the text of a filter says anything."""


class FinishedList(View):
    """The view behind ``d``."""

    schema = SCHEMA
    needs_requests = "This list has the requests that ended last."
    words = (
        ("TOOK", "from the arrival to the end"), ("TTFT", "from the arrival to the first token"),
        ("WAITED", "from the arrival to the first prefill"),
        ("HIT", "blocks of the prompt that were found, at the last admission"),
        ("PRE", "how often it lost its device blocks and began again"),
    )

    def __init__(self) -> None:
        self.top, self.page = 0, 1
        self.order = Order((ENDED, TOOK, TTFT, HIT, PREEMPTED, REQUEST))

    def listed(self, desk: Desk) -> list[Done]:
        """The finished requests that the filter leaves, in the chosen order."""
        wanted, now, state = desk.filters.get(FINISHED), desk.now_ns, desk.mirror.state
        found = [
            Done(life, now) for life in desk.mirror.past if wanted is None or wanted.matches(life, state, now)]
        self.order.sort(found)
        return found

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The list, under the number of requests that it covers."""
        found, wanted = self.listed(desk), desk.filters.get(FINISHED)
        row = Row().put(" FINISHED", "title").put(f"   {plural(len(desk.mirror.past), 'request')}", "text")
        row.put("   sorted by ", "muted").put(self.order.text, "text")
        if wanted is not None:
            told = f"   {count(len(found))} match"
            room = min(30, width - row.x - len(told) - 6)
            row.put(f"   / {cut(plain(wanted.text), room)}" if room >= FILTER_MIN else "", "text").put(told, "muted")
        forgotten = f"   {count(desk.mirror.archive.forgotten)} older forgotten"
        if desk.mirror.archive.forgotten and row.x + len(forgotten) < width:
            row.put(forgotten, "muted")
        places = table.layout(SHOWN, width)
        lines = [row.line("" if desk.tall else "bar", width), table.header(places)]
        if not found:
            text = " 0 match   esc  clear" if wanted is not None else " No request has ended yet."
            return [*lines, Row().put(text, "muted").line()]
        self.page = max(1, height - 2)
        at = self._at(desk, found)
        self.top = table.window(len(found), at, self.top, self.page)
        for index, done in enumerate(found[self.top : self.top + self.page], self.top):
            line = Row().put(desk.glyphs.select if index == at else " ", "selbar")
            table.cells(places, done, desk.glyphs, line)
            line.to(width - 1 if index == at else line.x).zone(0, ("select", done.life.request), width)
            lines.append(line.line("sel" if index == at else "", width))
        return lines

    def _at(self, desk: Desk, found: list[Done]) -> int | None:
        return next((at for at, done in enumerate(found) if done.life.request == desk.selected), None)

    def rows(self, desk: Desk) -> Table | None:
        """Every finished request that the filter leaves."""
        return as_table(SHOWN, self.listed(desk))

    def hints(self, desk: Desk) -> list[Hint]:
        return [("enter", "detail"), ("w", "why"), ("/", "filter"), ("o", "sort"), ("t", "timeline")]

    def press(self, desk: Desk, key: str) -> bool:
        """Move, open, sort."""
        found: list[Any] = self.listed(desk)
        if key in MOVES and found:
            at = self._at(desk, found)
            desk.select(found[moved(at, key, len(found), self.page)].life.request)
        elif key == "enter" and found:
            if self._at(desk, found) is None:
                desk.select(found[0].life.request)
            desk.go(SLOT)
        else:
            return self.order.press(key)
        return True
