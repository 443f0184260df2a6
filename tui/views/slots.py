"""Slots: the live list, with trouble first and the selected slot's story below or beside it.

Law of this file: a row shows the reason for its place, and the selected row never moves by itself.
"""

from typing import Final

import msgspec

from kvbm_console.core.expression import SLOT as SLOT_FIELDS
from kvbm_console.core.expression import Field
from kvbm_console.core.expression.schema import Kind
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.core.state import CacheState

from ..desk import SLOT, SLOTS, Desk, View
from ..draw import table, words
from ..draw.frame import Hint
from ..draw.glyphs import Glyphs
from ..draw.spans import BLANK, Line, Row, Span, beside, fit
from ..draw.table import MOVES, Column, Order, Table, as_table, fields_of, moved
from ..draw.words import LIFE_WORDS, prompt_bar
from ..model.filters import with_fields
from ..model.numbers import brief, clauses, count, cut, duration, plain
from ..model.slots import SlotRow
from .blocks import prefix_section, queue_section
from .slot import slot_panel

SPLIT_WIDTH = 110
SPLIT_HEIGHT = 36
BESIDE_WIDTH = 160
PANEL_WIDTH = 75
PANEL_ROWS = 19


_S = SlotState
_RANK: Final = {
    _S.PREEMPTED: 3, _S.ONBOARD_STAGED: 3, _S.ONBOARDING: 3, _S.INITIALIZED: 4, _S.FINISHING: 4, _S.PREFILLING: 5,
    _S.SKIPPED_PREFILL: 6, _S.DECODING: 7, _S.SKIPPED_DECODE: 8, _S.FINISHED: 9,
}
"""Among slots without trouble: first those that wait for blocks or copies, then work by phase."""
_BEFORE_DECODE: Final = (
    _S.INITIALIZED, _S.ONBOARD_STAGED, _S.ONBOARDING, _S.PREFILLING, _S.SKIPPED_PREFILL,
)


def _need(row: SlotRow) -> tuple[int, int, int]:
    rank = int(row.level) if row.level is not None else _RANK[row.slot.state]
    return rank, row.slot.since_ns, row.slot.slot


def _tokens(row: SlotRow, size: int, glyphs: Glyphs) -> list[Span]:
    total, reached = row.slot.prompt_tokens, row.prompt.reached
    return [Span(brief(min(reached, total) if row.slot.state in _BEFORE_DECODE else reached), "text"),
            Span(f"/{brief(total)}", "muted")]


def _dense(number: int) -> list[Span]:
    """A count in a dense column: a known zero is a dot."""
    return [Span(brief(number), "text") if number else Span("·", "faint")]


def _blocks(tier: Tier) -> Column[SlotRow]:
    return Column(
        name=tier.name, width=5, right=True, from_width=112,
        cell=lambda row, size, glyphs: _dense(row.blocks(tier)),
        title=f"{tier.name.lower()}_blocks", value=lambda row: row.blocks(tier),
    )


NUMBER: Final[Column[SlotRow]] = Column(
    order="arrival", key=lambda row: (row.slot.slot,), title="slot", value=lambda row: row.slot.slot)
STATE: Final[Column[SlotRow]] = Column(
    name="STATE", width=17, gap=4, cell=lambda row, size, glyphs: words.state(row.slot.state, glyphs),
    order="need", key=_need, title="state", value=lambda row: row.slot.state.label)
AGE: Final[Column[SlotRow]] = Column(
    name="AGE", width=5, right=True,
    cell=lambda row, size, glyphs: [Span(duration(row.age_ns), words.LEVEL_ROLE[row.level])],
    order="age", key=lambda row: (row.slot.since_ns, row.slot.slot), title="age_ns", value=lambda row: row.age_ns,
    field=Field("age", Kind.DURATION, lambda slot, state, now: now - slot.since_ns,
                "How long it has been in its state."))
REQUEST: Final[Column[SlotRow]] = Column(
    name="REQUEST", gap=2, width=lambda width: 13 if width < 112 else min(26, 13 + max(0, width - 120) // 3),
    cell=lambda row, size, glyphs: [
        words.request(row.slot.request, size, "strong" if row.level is not None else "text")],
    order="request", key=lambda row: (row.slot.request,), title="request", value=lambda row: row.slot.request)
HELD: Final[Column[SlotRow]] = Column(title="held", value=lambda row: row.slot.hold is not None)
PROMPT: Final[Column[SlotRow]] = Column(
    name="PROMPT", gap=2, width=lambda width: 8 if width < 100 else 14, from_width=70,
    cell=lambda row, size, glyphs: prompt_bar(row.prompt, size, glyphs),
    title="prompt_tokens", value=lambda row: row.slot.prompt_tokens)
TOKENS: Final[Column[SlotRow]] = Column(
    name="TOKENS", width=11, right=True, gap=2, from_width=100, cell=_tokens,
    order="tokens", key=lambda row: (-row.slot.computed_tokens(row.state.iteration), row.slot.slot),
    title="computed_tokens", value=lambda row: row.prompt.reached)
G1, G2, G3 = (_blocks(tier) for tier in (Tier.G1, Tier.G2, Tier.G3))
OPS: Final[Column[SlotRow]] = Column(
    name="OPS", width=3, right=True, from_width=100,
    cell=lambda row, size, glyphs: _dense(len(row.slot.outstanding)),
    title="outstanding", value=lambda row: len(row.slot.outstanding))
PREEMPTIONS: Final[Column[SlotRow]] = Column(title="preemptions", value=lambda row: row.slot.preemptions)
WAITS: Final[Column[SlotRow]] = Column(
    name="WAITS FOR", gap=lambda width: 3 if width < 100 else 2, from_width=60,
    cell=lambda row, size, glyphs: [Span(clauses(row.waits, size), "text" if row.level is not None else "muted")],
    title="waits_for", value=lambda row: row.waits)
LIFETIME: Final[Column[SlotRow]] = Column(
    field=Field("lifetime", Kind.DURATION, lambda slot, state, now: now - slot.opened_ns, "How long it has existed."))

WAITS_LEAST: Final = 23
"""Cells that WAITS FOR keeps beside long names: ``op 12 silent on rank 1``."""
_LOWER: Final = (Tier.G2.name, Tier.G3.name)
SHOWN: Final = (STATE, AGE, REQUEST, PROMPT, TOKENS, G1, G2, G3, OPS, WAITS)
EXPORTED: Final = (NUMBER, REQUEST, STATE, AGE, HELD, TOKENS, PROMPT, G1, G2, G3, OPS, PREEMPTIONS, WAITS)
SCHEMA: Final = with_fields(SLOT_FIELDS, *fields_of((AGE, LIFETIME)))
"""Slots, with ages on the shown clock. The moment is the shown time of the target."""


class Slots(View):
    """View 2."""

    schema = SCHEMA
    needs_requests = "A slot is a request in the engine."
    words = (
        ("slot", "the record of a request, from its arrival until its last copy has ended"),
        ("PROMPT", "its prompt: blocks found in G1, G2, G3, then computed, then still to do"),
        ("OPS", "its copies that have not ended"), ("need", "those with trouble first, then those that wait"),
        *LIFE_WORDS,
    )

    def __init__(self) -> None:
        self.top = 0
        self.order = Order((*SHOWN, NUMBER))
        self.follow = False
        self.page = 1
        self._names = 0
        """Cells of the longest name that was shown."""

    # --- drawing -----------------------------------------------------------------------------------------------------

    def streamed(self, desk: Desk, width: int, height: int) -> list[Line]:
        lines = [*queue_section(desk, desk.mirror.facts, width), *([BLANK] if desk.tall else [])]
        return lines + prefix_section(desk, desk.mirror.facts, width, height - len(lines), drawn=False)

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The list, and where there is room the story of the selected slot."""
        wide = width >= BESIDE_WIDTH and desk.tall
        below = not wide and width >= SPLIT_WIDTH and desk.height >= SPLIT_HEIGHT
        chosen = desk.selected if desk.selected else self._first(desk)
        if wide and chosen is not None:
            at = width - PANEL_WIDTH
            rows = [_tinted(line, at - 1) for line in self._list(desk, at, height)]
            return beside(fit(rows, height), slot_panel(desk, chosen, PANEL_WIDTH, height), at)
        if below and chosen is not None and height > PANEL_ROWS + 6:
            listed = fit(self._list(desk, width, height - PANEL_ROWS - 1), height - PANEL_ROWS - 1)
            rule = Line((Span(desk.glyphs.rule * width, "rule"),))
            return [*listed, rule, *slot_panel(desk, chosen, width, PANEL_ROWS)]
        return self._list(desk, width, height)

    def _first(self, desk: Desk) -> str | None:
        state = desk.mirror.state
        if state is None:
            return None
        live = (number for number in self._numbers(desk) if number in state.slots)
        number = next(live, None)
        return state.slots[number].request if number is not None else None

    def _numbers(self, desk: Desk) -> list[int]:
        selected = self._selected(desk)
        return desk.order.update(
            desk.mirror, desk.mono(), None if self.follow else selected, self.order.text, self.order.sort,
            desk.filters.get(SLOTS),
        )

    def _selected(self, desk: Desk) -> int | None:
        state = desk.mirror.state
        return state.slot_of.get(desk.selected) if state is not None and desk.selected else None

    def _list(self, desk: Desk, width: int, height: int) -> list[Line]:
        state, mono = desk.mirror.facts, desk.mono()
        numbers = self._numbers(desk)
        lines = [self._summary(desk, width, desk.order.matched)]
        self.page = max(1, height - len(lines) - 1)
        selected = self._selected(desk)
        at = numbers.index(selected) if selected in numbers else None
        self.top = table.window(len(numbers), at, self.top, self.page)
        shown = numbers[self.top : self.top + self.page]
        places = self._places(state, shown, width)
        lines.append(table.header(places))
        if not numbers:
            return [*lines, self._empty(desk)]
        for number in shown:
            slot = state.slots.get(number)
            if slot is None:
                lines.append(_gone(desk, number, width))
                continue
            row = SlotRow(desk.mirror, slot, mono)
            lines.append(self._line(desk, row, places, width, chosen=number == selected))
        return lines

    def _places(self, state: CacheState, numbers: list[int], width: int) -> list[table.Place[SlotRow]]:
        """The columns. REQUEST takes what the tiers that are not there and WAITS FOR can spare, up to the longest name
        seen here; it never shrinks again, so that the columns stand still."""
        names = max((len(plain(state.slots[each].request)) for each in numbers if each in state.slots), default=0)
        self._names = max(self._names, names)
        tiers = {pool.info.tier for pool in state.shown_pools}
        columns = [column for column in SHOWN if column.name not in _LOWER or Tier[column.name] in tiers]
        places = table.layout(columns, width)
        spare = next((size for column, _, size in places if column is WAITS), 0) - WAITS_LEAST
        size = next(size for column, _, size in places if column is REQUEST)
        wanted = min(self._names, size + spare)
        if wanted <= size:
            return places
        grown = msgspec.structs.replace(REQUEST, width=wanted)
        return table.layout([grown if column is REQUEST else column for column in columns], width)

    def _line(
        self, desk: Desk, row: SlotRow, places: list[table.Place[SlotRow]], width: int, *, chosen: bool
    ) -> Line:
        text = Row().put(desk.glyphs.select if chosen else " ", "selbar")
        table.cells(places, row, desk.glyphs, text.spans(words.mark(row.level, desk.glyphs)))
        text.to(width - 1 if chosen else text.x)
        text.zone(0, ("select", row.slot.request), width)
        return text.line("sel" if chosen else "", width)

    def _summary(self, desk: Desk, width: int, matched: int) -> Line:
        state = desk.mirror.facts
        row = Row().put(" ").put(f"{count(len(state.slots))} live", "strong")
        if state.holds:
            row.put(f"  {len(state.holds)} held", "caution")
        row.put("  sorted by ", "muted").put(self.order.text, "text")
        if self.follow:
            row.put("  following", "muted")
        wanted = desk.filters.get(SLOTS)
        if wanted is not None:
            row.put("   / ", "text").put(cut(wanted.text, max(8, width - row.x - 14)), "text")
            row.put(f"   {count(matched)} match", "muted")
        return row.line("" if desk.tall else "bar", width)

    def _empty(self, desk: Desk) -> Line:
        state = desk.mirror.state
        wanted = desk.filters.get(SLOTS)
        if wanted is None or state is None:
            ended = len(desk.mirror.past)
            row = Row().put(" No live request.", "muted")
            if ended:
                row.put(f" {count(ended)} ended: ", "muted").put("d", "key")
            return row.line()
        row = Row().put(f" 0 of {count(len(state.slots))} match  ", "text").put(plain(wanted.text), "muted")
        return row.put("   esc", "key").put("  clear", "muted").line()

    def rows(self, desk: Desk) -> Table | None:
        """Every slot that the filter leaves."""
        state, mono = desk.mirror.state, desk.mono()
        if state is None:
            return None
        return as_table(EXPORTED, (
            SlotRow(desk.mirror, state.slots[number], mono)
            for number in self._numbers(desk) if number in state.slots))

    # --- keys --------------------------------------------------------------------------------------------------------

    def hints(self, desk: Desk) -> list[Hint]:
        hints = [("enter", "detail")]
        if desk.may_control:
            hints += [("b", "break here"), ("c", "continue"), ("s", "step")]
        return [*hints, ("/", "filter"), ("o", "sort"), ("f", "follow"),
                ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """Move, open, sort, follow."""
        if key in MOVES:
            self._move(desk, key)
        elif key == "enter":
            if desk.selected is None:
                desk.select(self._first(desk))
            if desk.selected is not None:
                desk.go(SLOT)
        elif self.order.press(key):
            return True
        elif key == "f":
            self.follow = not self.follow
        elif key == "escape" and desk.selected is not None and SLOTS not in desk.filters and not desk.crumbs:
            desk.select(None)
        else:
            return False
        return True

    def _move(self, desk: Desk, key: str) -> None:
        state = desk.mirror.state
        if state is None:
            return
        numbers = [number for number in self._numbers(desk) if number in state.slots]
        if not numbers:
            return
        selected = self._selected(desk)
        at = numbers.index(selected) if selected in numbers else None
        desk.select(state.slots[numbers[moved(at, key, len(numbers), self.page)]].request)


def _gone(desk: Desk, number: int, width: int) -> Line:
    """The row of a slot that ended since the last sort; the next sort takes it away."""
    life = desk.mirror.life_in(number)
    if life is None:
        return Line()
    row = Row().to(4).put(f"{desk.glyphs.state[SlotState.FINISHED]} finished", "state.finished").to(29)
    return row.spans([words.request(life.request, 13, "faint")]).line("", width)


def _tinted(line: Line, width: int) -> Line:
    """A row whose selection ends at ``width``: the tint is a part of its roles, and no ground of the whole row."""
    if not line.ground:
        return line
    row = Row().add(line).to(width).line()
    return Line(tuple(Span(text, f"{role}@{line.ground}") for text, role in row.spans), "", row.zones, row.cells)
