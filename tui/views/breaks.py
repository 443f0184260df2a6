"""Breakpoints and holds: the armed breakpoints, the held slots, and the blocks that each hold pins.

Law of this file: a hold tells when it resumes by itself, and the blocks that it pins until then.
"""

from typing import Final

from kvbm_console.analysis.waits import breakpoints_text, pinned
from kvbm_console.core.breakpoints import hold_budget
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.expression import Field, Schema
from kvbm_console.core.expression.fields import words as words_of
from kvbm_console.core.expression.schema import YES_NO, Kind
from kvbm_console.core.holds import BreakpointFacts, HoldFacts, stands_at
from kvbm_console.core.ids import BreakpointAction, Site, SlotState, Suspend, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.stream.verbs import EnableBreakpoint, RemoveBreakpoint

from ..debugging import ask_for_breakpoint
from ..desk import BREAKS, SLOT, Desk, View
from ..draw import bars, table, words
from ..draw.frame import Hint
from ..draw.spans import BLANK, Line, Row, Span, beside
from ..draw.table import MOVES, Column, Table, as_table, fields_of, moved
from ..model.breaks import NO_REQUESTS, spell
from ..model.events import beside_kind, entry_words, kind_words
from ..model.numbers import S, count, cut, duration, plain, plural, wrap
from ..model.slots import SlotRow
from ..model.stops import ASKED
from ..model.waits import ends, sooner

BREAKPOINTS_SHOWN = 10
HOLDS_SHOWN = 8
ENDED_SHOWN = 7
"""Rows for ended holds below the chosen hold, their title included."""
INSIDE_ROWS = 8
"""Rows that the chosen hold keeps before ended ones are shown."""
IN_FULL_ROWS = 3
WHEN_WIDTH = 72
WIDE = 120
"""Columns from which matches and conditions have room, and each hold names its place."""
EXAMPLES = (
    ("to onboarding once", "the next request that begins to load its prefix"),
    ("to preempted request chat-* max 10s", "each of that name that loses its blocks, for 10 s"),
    ("site evict.will tier G1 log", "every eviction of the device, told in the log"),
    ("site dispatch.will route G3_G1 when blocks > 64", "large loads from disk, before they begin"),
    ("to decoding when cached.g2 > 0 and tokens.prompt > 4000", "long prompts that host memory helped"),
)
"""Texts to type behind ``b``; a test parses each."""
WITH_TAP = "With the tap in the engine, breakpoints take effect."
_DEFAULTS = LeaderConfig()
"""The budget's numbers; a leader may be configured otherwise, so the share is told as a default."""


def _when_at(width: int) -> int:
    return 50 if width < WIDE else 72


def _match(known: BreakpointFacts) -> str:
    """The requests, states, tier and route to which the breakpoint is narrowed."""
    spec = known.spec
    text = plain(spec.request)
    if spec.from_state is not None:
        text += f" {spec.from_state.words}"
    if spec.to_state is not None:
        text += f" → {spec.to_state.words}"
    for scope in (spec.tier, spec.route):
        text += f" {scope.name.replace('_', '→')}" if scope is not None else ""
    return text


def _when(spec: BreakpointSpec) -> str:
    """The conditions that a match has to pass, and the other settings of the breakpoint."""
    return ", ".join(part for part in (
        spec.condition,
        spec.hit_condition and f"hits {spec.hit_condition}",
        spec.ignore_count and f"ignore {spec.ignore_count}",
        spec.one_shot and "once",
        spec.depends_on and f"after {spec.depends_on}",
        spec.suspend is not Suspend.SLOT and f"suspend {spec.suspend.label}",
    ) if part) or "–"


def _action(spec: BreakpointSpec) -> str:
    return f"hold {spec.max_hold_ns // S}s" if spec.action is BreakpointAction.HOLD else spec.action.label


NUMBER: Final[Column[BreakpointFacts]] = Column(
    name="#", width=3, right=True, cell=lambda known, size, glyphs: [Span(str(known.spec.id), "strong")],
    title="id", value=lambda known: known.spec.id,
    field=Field("id", Kind.ID, lambda known, s, m: known.spec.id, "Its number."))
ENABLED: Final[Column[BreakpointFacts]] = Column(
    name="ON", width=2, gap=2,
    cell=lambda known, size, glyphs: [Span("●", "ok") if known.enabled else Span("○", "faint")],
    title="enabled", value=lambda known: known.enabled,
    field=Field("enabled", Kind.WORD, lambda known, s, m: known.enabled, "Yes if the breakpoint is armed.", YES_NO,
                ordered=False))
SITE: Final[Column[BreakpointFacts]] = Column(
    name="SITE", width=16, cell=lambda known, size, glyphs: [Span(known.spec.site.label, "text")],
    title="site", value=lambda known: known.spec.site.label,
    field=Field("site", Kind.WORD, lambda known, s, m: known.spec.site, "The site that it watches.", words_of(Site),
                ordered=False))
MATCH: Final[Column[BreakpointFacts]] = Column(
    name="MATCH", width=lambda width: _when_at(width) - 28 if width >= WHEN_WIDTH else 0,
    cell=lambda known, size, glyphs: [Span(cut(_match(known), size), "text" if known.enabled else "muted")],
    title="match", value=lambda known: known.spec.describe(),
    field=Field("request", Kind.TEXT, lambda known, s, m: known.spec.request, "The requests that it matches.",
                ordered=False))
CONDITION: Final[Column[BreakpointFacts]] = Column(
    name="WHEN", gap=2, from_width=WHEN_WIDTH,
    cell=lambda known, size, glyphs: [Span(cut(plain(_when(known.spec)), size), "muted")],
    title="condition", value=lambda known: known.spec.condition)
HITS: Final[Column[BreakpointFacts]] = Column(
    name="HITS", width=6, gap=2, right=True, cell=lambda known, size, glyphs: [Span(count(known.hits), "text")],
    title="hits", value=lambda known: known.hits,
    field=Field("hits", Kind.COUNT, lambda known, s, m: known.hits, "How often it took effect."))
ACTION: Final[Column[BreakpointFacts]] = Column(
    name="ACTION", width=9, gap=2, cell=lambda known, size, glyphs: [Span(_action(known.spec), "text")],
    title="action", value=lambda known: known.spec.action.label,
    field=Field("action", Kind.WORD, lambda known, s, m: known.spec.action, "The action at a hit.",
                words_of(BreakpointAction), ordered=False))
OWNER: Final[Column[BreakpointFacts]] = Column(
    title="owner", value=lambda known: known.owner,
    field=Field("owner", Kind.TEXT, lambda known, s, m: known.owner, "The owner of the breakpoint.", ordered=False))
MESSAGE: Final[Column[BreakpointFacts]] = Column(title="message", value=lambda known: known.message)
TARGET: Final[Column[BreakpointFacts]] = Column(
    field=Field("to", Kind.WORD, lambda known, s, m: known.spec.to_state, "The state it waits for.",
                words_of(SlotState), ordered=False, optional=True))

SHOWN: Final = (NUMBER, ENABLED, SITE, MATCH, CONDITION, HITS, ACTION)
EXPORTED: Final = (NUMBER, ENABLED, SITE, MATCH, CONDITION, ACTION, HITS, OWNER, MESSAGE)
SCHEMA: Final = Schema("a breakpoint", fields_of((NUMBER, MATCH, SITE, TARGET, ACTION, OWNER, ENABLED, HITS)))


class Breaks(View):
    """View 7."""

    schema = SCHEMA
    words = (
        ("SITE", "where a request can be stopped: a move between states, a copy, an eviction"),
        ("HOLDS", "requests that stand still; each goes on by itself when its time is over"),
        ("allowed", "so many at most, so that a debugger never stops a service"),
    )

    def __init__(self) -> None:
        self.breakpoint: int | None = None
        """The chosen breakpoint."""
        self.on_holds = False
        """True if the arrow keys are in the list of holds."""
        self.top = 0

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Breakpoints, holds, and the chosen hold from inside."""
        state = desk.mirror.facts
        gap = [BLANK] if desk.tall else []
        lines = [self._head(desk, state, width), *self._breakpoints(desk, state, width), *gap]
        lines += [self._budget(desk, state), *self._holds(desk, state, width)]
        chosen = self._chosen_hold(desk, state)
        if chosen is not None:
            room = height - len(lines) - len(gap)
            ended = _ended(desk, width, max(0, min(ENDED_SHOWN, room - INSIDE_ROWS)))
            lines += [*gap, *_inside(desk, state, chosen, width, room - len(ended)), *ended]
        elif desk.mirror.ended_holds.last:
            lines += [*gap, *_ended(desk, width, height - len(lines) - len(gap))]
        elif not state.breakpoints and desk.may_control and not state.streams_only:
            lines += [*([BLANK] if height - len(lines) > len(EXAMPLES) + 1 else []), *_examples(desk, width)]
        return lines[:height]

    # --- breakpoints -------------------------------------------------------------------------------------------------

    def _head(self, desk: Desk, state: CacheState, width: int) -> Line:
        armed = sum(known.enabled for known in state.breakpoints.values())
        row = Row().put(" BREAKPOINTS", "title")
        row.put(f"   {armed} armed of {len(state.breakpoints)}" if state.breakpoints else "   none", "muted")
        target = desk.mirror.connected
        role = "control" if desk.may_control else "observe"
        if target is not None and not desk.recording:
            row.right(f"{plain(target.target)}, {role}", width - 1, "muted")
        return row.line("" if desk.tall else "bar", width)

    def _breakpoints(self, desk: Desk, state: CacheState, width: int) -> list[Line]:
        note = []
        if state.streams_only:
            note = [Row().put(f" {part}", "caution").line() for part in wrap(f"{NO_REQUESTS} {WITH_TAP}", width - 3)]
        if not state.breakpoints:
            text = " b sets a breakpoint on the selected slot, or on every slot that enters a state."
            return note or [Row().put(text if desk.may_control else " No breakpoint is set.", "muted").line()]
        places = table.layout(SHOWN, width)
        lines = [*note, table.header(places)]
        numbers = listed(desk, state)
        at = numbers.index(self.breakpoint) if self.breakpoint in numbers else None
        self.top = table.window(len(numbers), at, self.top, BREAKPOINTS_SHOWN)
        for number in numbers[self.top : self.top + BREAKPOINTS_SHOWN]:
            known = state.breakpoints[number]
            lines.append(self._breakpoint_line(desk, known, places, width))
            if number == self.breakpoint:
                lines += _in_full(known, width)
            if known.message:
                lines.append(Row().put(cut(f"      {plain(known.message)}", width - 2), "caution").line())
        more = len(numbers) - BREAKPOINTS_SHOWN
        if more > 0:
            lines.append(Row().put(f" +{more} more", "muted").line())
        wanted = desk.filters.get(BREAKS)
        if wanted is not None:
            lines.append(Row().put(f" {len(numbers)} of {len(state.breakpoints)} match  / ", "muted")
                         .put(cut(plain(wanted.text), 40), "text").put("   esc", "key").put("  clear", "muted").line())
        return lines

    def _breakpoint_line(
        self, desk: Desk, known: BreakpointFacts, places: list[table.Place[BreakpointFacts]], width: int
    ) -> Line:
        chosen = known.spec.id == self.breakpoint
        row = Row().put(desk.glyphs.select if chosen and not self.on_holds else " ", "selbar")
        table.cells(places, known, desk.glyphs, row).zone(0, ("row", known.spec.id), width)
        return row.to(width - 1 if chosen else row.x).line("sel" if chosen else "", width)

    # --- holds -------------------------------------------------------------------------------------------------------

    def _budget(self, desk: Desk, state: CacheState) -> Line:
        allowed = hold_budget(len(state.slots), _DEFAULTS.hold_budget_min, _DEFAULTS.hold_budget_share)
        text = f"{len(state.holds)} of {allowed} allowed (25 % of {len(state.slots)} live, at least 4, at most 64)"
        if state.totals.hold_denied:
            text += f", {count(state.totals.hold_denied)} refused"
        return desk.title("HOLDS", text)

    def _holds(self, desk: Desk, state: CacheState, width: int) -> list[Line]:
        if not state.holds:
            return [Row().put(" no slot is held", "muted").line()]
        lines: list[Line] = []
        mono = desk.mono()
        for hold in list(state.holds.values())[:HOLDS_SHOWN]:
            slot = state.slots[hold.slot]
            chosen = slot.request == desk.selected
            row = Row().put(desk.glyphs.select if chosen and self.on_holds else " ", "selbar")
            row.put(desk.glyphs.held, "heldbox").put(f" {hold.hold} ", "muted").to(6)
            row.spans([words.request(slot.request, 14, "strong")]).to(21).spans(words.state(slot.state, desk.glyphs))
            row.right(duration(desk.mirror.hold_age_ns(hold.hold, mono)), 44, "caution").put("  ")
            left = max(0, desk.mirror.hold_left_ns(hold.hold, mono) or 0)
            if hold.parked:
                role = "caution" if left > 5 * S else "fault"
                row.put(f"{ends(hold)} in {left // S} s ", role)
                row.spans(bars.level(left / hold.max_hold_ns, max(4, min(17, width - 2 - row.x)), desk.glyphs, role))
                if width >= WIDE:
                    point = stands_at(hold, slot.state, len(slot.outstanding)).label
                    row.put(f"   stands still at {point}, {breakpoints_text(hold.breakpoints)}", "muted")
            else:
                row.put(f"pending, stops at its next {hold.point.label}", "caution")
            row.zone(0, ("select", slot.request), width)
            lines.append(row.to(width - 1 if chosen else row.x).line("sel" if chosen else "", width))
        if len(state.holds) > HOLDS_SHOWN:
            lines.append(Row().put(f" +{len(state.holds) - HOLDS_SHOWN} more", "muted").line())
        return lines

    def _chosen_hold(self, desk: Desk, state: CacheState) -> HoldFacts | None:
        slot = state.slot_named(desk.selected) if desk.selected else None
        if slot is not None and slot.hold is not None:
            return state.holds[slot.hold]
        return next(iter(state.holds.values()), None)

    # --- keys --------------------------------------------------------------------------------------------------------

    def hints(self, desk: Desk) -> list[Hint]:
        if desk.recording:
            return [("c", "next hit"), ("C", "previous hit"), ("b", "look for"), ("u", "to the cursor"),
                    ("D", "forget those")]
        if not desk.may_control:
            return [("enter", "its slot")]
        hints = [("c", "continue"), ("s", "step"), ("b", "break"), ("D", "disarm all")]
        hints += [("u", "until…"), ("S", "step pipeline"), ("X", "skip candidate")]
        chosen = [("B", "arm/mute"), ("x", "delete"), ("enter", "edit")] if self.breakpoint is not None else []
        return [*hints[:2], *chosen, *hints[2:], ("tab", "list")]

    def press(self, desk: Desk, key: str) -> bool:
        """Choose a breakpoint, arm or mute it, delete it; enter goes to the held slot."""
        state = desk.mirror.state
        if state is None:
            return False
        numbers = listed(desk, state)
        if key in ("tab", "shift+tab"):
            self.on_holds = not self.on_holds
            hold = self._chosen_hold(desk, state)
            if self.on_holds and hold is not None:
                desk.select(state.slots[hold.slot].request)
        elif key in MOVES and self.on_holds:
            self._move_hold(desk, state, key)
        elif key in MOVES and numbers:
            at = numbers.index(self.breakpoint) if self.breakpoint in numbers else None
            self.breakpoint = numbers[moved(at, key, len(numbers), 5)]
        elif key.startswith("row:"):
            self.breakpoint = int(key[4:])
        elif key in ("B", "x") and desk.may_control and self.breakpoint in state.breakpoints:
            assert self.breakpoint is not None
            if key == "B":
                desk.actions.ask(EnableBreakpoint(self.breakpoint, not state.breakpoints[self.breakpoint].enabled))
            else:
                desk.actions.ask(RemoveBreakpoint(self.breakpoint))
                self.breakpoint = None
        elif key == "enter" and desk.may_control and not self.on_holds and self.breakpoint in state.breakpoints:
            ask_for_breakpoint(desk, spell(state.breakpoints[self.breakpoint].spec), self.breakpoint)
        elif key == "enter":
            hold = self._chosen_hold(desk, state)
            if hold is None:
                return False
            desk.select(state.slots[hold.slot].request)
            desk.go(SLOT)
        elif key == "escape" and self.breakpoint is not None:
            self.breakpoint = None
        else:
            return False
        return True

    def _move_hold(self, desk: Desk, state: CacheState, key: str) -> None:
        holds = list(state.holds.values())
        if holds:
            at = next((i for i, hold in enumerate(holds) if state.slots[hold.slot].request == desk.selected), None)
            desk.select(state.slots[holds[moved(at, key, len(holds), HOLDS_SHOWN)].slot].request)

    def rows(self, desk: Desk) -> Table | None:
        """Every breakpoint that the filter leaves."""
        state = desk.mirror.state
        if state is None:
            return None
        return as_table(EXPORTED, (state.breakpoints[number] for number in listed(desk, state)))


def _examples(desk: Desk, width: int) -> list[Line]:
    """Example breakpoints, for a person without experience of them."""
    lines = [desk.title("EXAMPLES", "to type behind b; a verdict stands below while typing")]
    for typed, meaning in EXAMPLES:
        row = Row().put(f" {typed}", "text")
        if width >= 110:
            lines.append(row.to(58).put(cut(meaning, width - 60), "muted").line("", width))
        else:
            lines += [row.line("", width), Row().put(f"     {cut(meaning, width - 7)}", "muted").line("", width)]
    return lines


def _in_full(known: BreakpointFacts, width: int) -> list[Line]:
    """The chosen breakpoint as typed text, with its owner."""
    text = plain(f"{spell(known.spec)}   by {known.owner}" + (" (away)" if known.away else ""))
    return [Row().put(f"      {line}", "muted").line() for line in wrap(text, max(20, width - 8))[:IN_FULL_ROWS]]


def listed(desk: Desk, state: CacheState) -> list[int]:
    """The breakpoints that the filter leaves."""
    wanted = desk.filters.get(BREAKS)
    return [number for number, known in state.breakpoints.items() if wanted is None or wanted.matches(known, state)]


def _ended(desk: Desk, width: int, height: int) -> list[Line]:
    """The holds that ended or were refused last, the newest first, each with the reason."""
    entries = list(reversed(desk.mirror.ended_holds.last))[: max(0, height - 1)]
    if not entries:
        return []
    lines = [desk.title("ENDED", "the newest first")]
    for entry in entries:
        row = Row().right("" if entry.hold is None else str(entry.hold), 4, "muted").put("  ")
        row.spans([words.request(entry.request, 14, "text")]).to(21)
        row.right(duration(max(0, desk.now_ns - entry.at_ns)), 26, "muted").put(" ago  ")
        if entry.hold is not None:
            row.put(f"held {duration(entry.held_ns)}, ", "muted")
        text = plain(entry.text) + (f" ({count(entry.times)} in a row)" if entry.times > 1 else "")
        row.put(cut(text, max(0, width - 2 - row.x)), "muted" if entry.why in ASKED else "caution")
        lines.append(row.line("", width))
    return lines


def _inside(desk: Desk, state: CacheState, hold: HoldFacts, width: int, height: int) -> list[Line]:
    """The breakpoints of a hold, the snapshot of its slot, and the events that led there."""
    slot = state.slots[hold.slot]
    info = SlotRow(desk.mirror, slot, desk.mono())
    pins = ", ".join(f"{blocks} {tier}" for tier, blocks in pinned(state, slot)) or "nothing"
    source = Row().put("      by ", "muted").put(breakpoints_text(hold.breakpoints), "text")
    source.put(f" at {hold.site.label}, {plain(hold.owner) or 'no owner'}", "muted").put(f"; pins {pins}", "caution")
    early = sooner(state, hold)
    fits = source.x + len(early) + 3 < width
    if early and fits:
        source.put(f"; {early}", "caution")
    left = [Row().put(" SNAPSHOT", "title").line()]
    pool = state.pools[slot.device_pool] if slot.device_pool is not None else None
    facts = [
        ("request", slot.request), ("tokens", f"{count(info.prompt.reached)} / {count(slot.prompt_tokens)}"),
        ("blocks", "  ".join(f"{tier.name} {blocks}" for tier in Tier if (blocks := info.blocks(tier))) or "none"),
        ("free G1", count(pool.counts[0] + pool.counts[1]) if pool is not None else "–"),
        ("operations", plural(len(slot.outstanding), "open one")), ("preempted", f"{slot.preemptions} ×"),
    ]
    left += [Row().put(f" {name}", "muted").to(12).put(cut(plain(text), 24), "text").line() for name, text in facts]
    life = desk.mirror.lives.get(hold.slot)
    right = [Row().put("CAUSE, newest first", "title").line()]
    name = 22 if width >= 110 else 15
    if life is not None:
        for event in reversed(life.story):
            row = Row()
            if width >= WIDE:
                row.right(duration(desk.now_ns - event.at_ns), 5, "muted").put("  ")
            row.put(cut(kind_words(type(event)), name).ljust(name + 1), "muted")
            row.put(cut(plain(beside_kind(event, desk.mirror)), max(0, width - 38 - 2 - row.x)), "text")
            right.append(row.line())
            entry = getattr(event, "entry", None)
            if entry is not None:
                told = f"{entry_words(entry)}, iter {count(getattr(event, 'iteration', 0))}"
                right.append(Row().to(7 if width >= WIDE else 0).put(told, "faint").line())
            if len(right) >= height:
                break
    above = [source.line("", width)]
    if early and not fits:
        above.append(Row().put(f"      {early}", "caution").line())
    return [*above, *beside(left, right[: max(1, height - len(above))], 37)][:height]
