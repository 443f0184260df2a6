"""Slots: the live list, what needs a person first, with the selected slot's story below or beside it.

Law of this file: a row says why it stands where it stands; the selected row never moves by itself.
"""

from kvbm_console.core.ids import SlotState, Tier

from ..desk import SLOT, SLOTS, Desk, View
from ..draw import table, words
from ..draw.frame import Hint
from ..draw.spans import Line, Row, Span
from ..draw.table import MOVES, Column, Table, moved
from ..draw.words import LIFE_WORDS, prompt_bar
from ..model.filters import SLOTS as SCHEMA
from ..model.numbers import brief, count, cut, duration, plain
from ..model.slots import SORTS, SlotRow, slot_row
from .slot import slot_panel

SPLIT_WIDTH = 110
SPLIT_HEIGHT = 36
BESIDE_WIDTH = 160
PANEL_WIDTH = 75
PANEL_ROWS = 19


class Slots(View):
    """View 2."""

    schema = SCHEMA
    needs_requests = "Slots are requests."
    words = (
        ("slot", "one request from its arrival until nothing of it is left"),
        ("PROMPT", "its prompt: blocks found in G1, G2, G3, then computed, then still to do"),
        ("OPS", "its copies that have not ended"), ("need", "those with trouble first, then those that wait"),
        *LIFE_WORDS,
    )

    def __init__(self) -> None:
        self.top = 0
        self.sort = 0
        self.reverse = False
        self.follow = False
        self.page = 1
        self.mini = _Cells()

    # --- drawing -----------------------------------------------------------------------------------------------------

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The list, and where there is room the story of the selected slot."""
        beside = width >= BESIDE_WIDTH and desk.tall
        below = not beside and width >= SPLIT_WIDTH and desk.height >= SPLIT_HEIGHT
        chosen = desk.selected if desk.selected else self._first(desk)
        if beside and chosen is not None:
            left = self._list(desk, width - PANEL_WIDTH, height)
            right = slot_panel(desk, chosen, PANEL_WIDTH, height)
            rows = []
            for index in range(height):
                row = Row().add(left[index] if index < len(left) else Line())
                ground = left[index].ground if index < len(left) else ""
                if ground:
                    row.to(width - PANEL_WIDTH - 1)
                    rows.append(_with_panel(row, ground, right[index] if index < len(right) else Line(),
                                            width - PANEL_WIDTH))
                    continue
                row.to(width - PANEL_WIDTH)
                rows.append(row.add(right[index] if index < len(right) else Line()).line())
            return rows
        if below and chosen is not None and height > PANEL_ROWS + 6:
            listed = self._list(desk, width, height - PANEL_ROWS - 1)
            listed += [Line()] * (height - PANEL_ROWS - 1 - len(listed))
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
            desk.mirror, desk.mono(), None if self.follow else selected, SORTS[self.sort], self.reverse,
            desk.filters.get(SLOTS),
        )

    def _selected(self, desk: Desk) -> int | None:
        state = desk.mirror.state
        return state.slot_of.get(desk.selected) if state is not None and desk.selected else None

    def _list(self, desk: Desk, width: int, height: int) -> list[Line]:
        state, mono = desk.mirror.state, desk.mono()
        assert state is not None
        numbers = self._numbers(desk)
        lines = [self._summary(desk, width, desk.order.matched)]
        places = table.layout(self.mini.columns(desk, width), width)
        lines.append(table.header(places, sorts=_SORT_OF))
        if not numbers:
            return [*lines, self._empty(desk)]
        self.page = max(1, height - len(lines))
        selected = self._selected(desk)
        at = numbers.index(selected) if selected in numbers else None
        self.top = table.window(len(numbers), at, self.top, self.page)
        for number in numbers[self.top : self.top + self.page]:
            slot = state.slots.get(number)
            if slot is None:
                lines.append(_gone(desk, number, width))
                continue
            row = slot_row(desk.mirror, slot, mono)
            lines.append(self._line(desk, row, places, width, chosen=number == selected))
        return lines

    def _line(
        self, desk: Desk, row: SlotRow, places: list[tuple[Column[SlotRow], int, int]], width: int, *, chosen: bool
    ) -> Line:
        text = Row().put(desk.glyphs.select if chosen else " ", "selbar")
        table.cells(places, row, text.spans(words.mark(row.level, desk.glyphs)))
        text.to(width - 1 if chosen else text.x)
        text.zone(0, ("select", row.slot.request), width)
        return text.line("sel" if chosen else "", width)

    def _summary(self, desk: Desk, width: int, matched: int) -> Line:
        state = desk.mirror.state
        assert state is not None
        row = Row().put(" ").put(f"{count(len(state.slots))} live", "strong")
        if state.holds:
            row.put(f"  {len(state.holds)} held", "caution")
        row.put("  sorted by ", "muted").put(SORTS[self.sort] + (" reversed" if self.reverse else ""), "text")
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
            return Row().put(" No live request.", "muted").line()
        row = Row().put(f" 0 of {count(len(state.slots))} match  ", "text").put(plain(wanted.text), "muted")
        return row.put("   esc", "key").put("  clear", "muted").line()

    def rows(self, desk: Desk) -> Table | None:
        """Every slot that the filter leaves."""
        state, mono = desk.mirror.state, desk.mono()
        if state is None:
            return None
        found = [slot_row(desk.mirror, state.slots[number], mono)
                 for number in self._numbers(desk) if number in state.slots]
        names = ["slot", "request", "state", "age_ns", "held", "computed_tokens", "prompt_tokens", "g1_blocks",
                 "g2_blocks", "g3_blocks", "outstanding", "preemptions", "waits_for"]
        return names, [[
            str(row.slot.slot), row.slot.request, row.slot.state.label, str(row.age_ns),
            "yes" if row.slot.hold is not None else "no", str(row.prompt.reached), str(row.slot.prompt_tokens),
            *[str(row.blocks.get(tier, 0)) for tier in (Tier.G1, Tier.G2, Tier.G3)], str(len(row.slot.outstanding)),
            str(row.slot.preemptions), row.waits,
        ] for row in found]

    # --- keys --------------------------------------------------------------------------------------------------------

    def hints(self, desk: Desk) -> list[Hint]:
        """Keys of the list."""
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
        elif key == "o":
            self.sort = (self.sort + 1) % len(SORTS)
        elif key == "O":
            self.reverse = not self.reverse
        elif key.startswith("sort:") and key[5:] in SORTS:
            chosen = SORTS.index(key[5:])
            self.reverse = self.sort == chosen and not self.reverse
            self.sort = chosen
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


_SORT_OF = {"STATE": "need", "AGE": "age", "REQUEST": "request", "TOKENS": "tokens"}
"""Header to the order that a click on it asks for."""

def _gone(desk: Desk, number: int, width: int) -> Line:
    """The row of a slot that ended since the last sort; the next sort takes it away."""
    life = desk.mirror.life_in(number)
    if life is None:
        return Line()
    row = Row().to(4).put(f"{desk.glyphs.state[SlotState.FINISHED]} finished", "state.finished").to(29)
    return row.spans([words.request(life.request, 13, "faint")]).line("", width)


def _with_panel(row: Row, ground: str, panel: Line, x: int) -> Line:
    """A row whose selection ends where the panel begins: the tint is a role there, not a ground."""
    tinted = Row()
    for span in row.line().spans:
        tinted.put(span.text, f"{span.role}@{ground}")
    return Row().add(Line(tinted.line().spans, "", row.line().zones)).to(x).add(panel).line()


class _Cells:
    """The columns of the list for a width."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], list[Column[SlotRow]]] = {}

    def columns(self, desk: Desk, width: int) -> list[Column[SlotRow]]:
        """The columns, priority by the width from which they are shown."""
        key = (width, desk.glyphs.ascii)
        found = self._known.get(key)
        if found is None:
            self._known.clear()
            found = self._known[key] = _columns(desk, width)
        return found


def _columns(desk: Desk, width: int) -> list[Column[SlotRow]]:
    glyphs = desk.glyphs
    names = 13 if width < 112 else min(26, 13 + max(0, width - 120) // 3)
    bar = 8 if width < 100 else 14

    def state(row: SlotRow, size: int) -> list[Span]:
        return words.state(row.slot.state, glyphs)

    def age(row: SlotRow, size: int) -> list[Span]:
        return [Span(duration(row.age_ns), words.LEVEL_ROLE[row.level])]

    def request(row: SlotRow, size: int) -> list[Span]:
        return [words.request(row.slot.request, size, "strong" if row.level is not None else "text")]

    def prompt(row: SlotRow, size: int) -> list[Span]:
        return prompt_bar(row.prompt, size, glyphs)

    def tokens(row: SlotRow, size: int) -> list[Span]:
        total, reached = row.slot.prompt_tokens, row.prompt.reached
        return [Span(brief(min(reached, total) if row.slot.state in _BEFORE_DECODE else reached), "text"),
                Span(f"/{brief(total)}", "muted")]

    def blocks(tier: Tier) -> "Column[SlotRow]":
        def cell(row: SlotRow, size: int) -> list[Span]:
            return [_dense(row.blocks.get(tier, 0))]
        return Column(tier.name, 4 if tier is not Tier.G1 else 5, cell, right=True, from_width=112)

    def ops(row: SlotRow, size: int) -> list[Span]:
        return [_dense(len(row.slot.outstanding))]

    def waits(row: SlotRow, size: int) -> list[Span]:
        return [Span(cut(row.waits, size), "text" if row.level is not None else "muted")]

    return [
        Column("STATE", 17, state, gap=4),
        Column("AGE", 5, age, right=True),
        Column("REQUEST", names, request, gap=2),
        Column("PROMPT", bar, prompt, gap=2, from_width=70),
        Column("TOKENS", 11, tokens, right=True, gap=2, from_width=100),
        blocks(Tier.G1), blocks(Tier.G2), blocks(Tier.G3),
        Column("OPS", 3, ops, right=True, from_width=100),
        Column("WAITS FOR", 0, waits, gap=3 if width < 100 else 2, from_width=60),
    ]


_BEFORE_DECODE = (
    SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, SlotState.PREFILLING,
    SlotState.SKIPPED_PREFILL,
)


def _dense(number: int) -> Span:
    """A count in a dense column: a known zero is a dot."""
    return Span(brief(number), "text") if number else Span("·", "faint")
