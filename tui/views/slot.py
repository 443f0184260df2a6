"""Slot: the life and the operations of one request on one axis, its prompt, its waits, its story.

Law of this file: states and operations share the axis. A wait names the request, then the thing, then the time.
"""

from itertools import accumulate, pairwise

from kvbm_console.analysis.lives import Life, Transfer
from kvbm_console.analysis.waits import breakpoints_text
from kvbm_console.core.events import Event
from kvbm_console.core.ids import Tier
from kvbm_console.core.slots import SlotFacts

from ..debugging import stops_next
from ..desk import Desk, View
from ..draw import bars, words
from ..draw.frame import Hint
from ..draw.lifeline import Lifelines, Window, runs, tick_ns, transfer_codes
from ..draw.spans import BLANK, Line, Row, Span, beside
from ..draw.table import Table, moved
from ..draw.words import LIFE_WORDS, prompt_bar
from ..model.events import beside_kind, concerns, describe, kind_words
from ..model.numbers import S, count, cut, duration, plain, plural, spoken
from ..model.slots import SlotRow, limits, prompt_of
from ..model.waits import ends, sentences, sooner
from .blocks import prefix_section
from .log import event_table

STORY_PAGE = 8
LIFE_LEFT = 24
"""The start of the axis."""
NAME_CELLS = 40
NEWS_NS = 60 * S
"""How long the end of a hold is told in the head."""
SIDE = 64
"""The start of the story beside the prompt."""
WIDE_FROM = 112
"""Columns from which the story fits beside the prompt, and the head fits in a row with a name of 13 cells."""
_LIFELINES = Lifelines()


class SlotView(View):
    """View 3."""

    needs_requests = "A slot is one request."
    words = (
        ("LIFE", "its states over time, below them its copies"), ("queued", "the copy waits; on the wire it moves"),
        ("to do", "prompt blocks that are neither found nor computed"), *LIFE_WORDS,
    )

    def __init__(self) -> None:
        self.scroll = 0

    def streamed(self, desk: Desk, width: int, height: int) -> list[Line]:
        return prefix_section(desk, desk.mirror.facts, width, height, drawn=True)

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The selected request, or the request with the most need."""
        request = desk.shown_request()
        if request is None:
            return [Row().put(" No live request. Choose one in 2 Slots, 4 Timeline or d Finished.", "muted").line()]
        return slot_panel(desk, request, width, height, self.scroll, chosen=self._chosen(desk, request))

    def _chosen(self, desk: Desk, request: str) -> int | None:
        """The chosen event when it belongs to the story; it keeps its row while newer events arrive above it."""
        life = desk.mirror.life_of(request)
        if life is None or desk.event is None:
            return None
        at = next((i for i, event in enumerate(reversed(life.story)) if event.seq == desk.event), None)
        if at is None:
            return None
        self.scroll = at
        return desk.event

    def hints(self, desk: Desk) -> list[Hint]:
        here = "stop the next one here" if stops_next(desk) else "break here"
        hints = [("b", here), ("c", "continue"), ("s", "step")] if desk.may_control else []
        return [*hints, ("t", "timeline"), ("↑↓", "story"), ("[ ]", "cause, effect"), ("w", "why"), ("n", "next slot"),
                ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """Scroll the story; n and N walk the list."""
        request = desk.shown_request()
        life = desk.mirror.life_of(request) if request is not None else None
        last = max(0, len(life.story) - 1) if life is not None else 0
        if key in ("down", "j", "up", "k", "pagedown", "pageup", "G", "end"):
            chosen = desk.event is not None and request is not None and self._chosen(desk, request) is not None
            if chosen or key not in ("down", "j"):
                self.scroll = moved(self.scroll, key, last + 1, STORY_PAGE)
            self._choose(desk, life)
        elif key in ("g", "home"):
            self.scroll = 0
            desk.event = None
        elif key == "escape" and desk.event is not None:
            desk.event, self.scroll = None, 0
        elif key in ("n", "N"):
            self._next(desk, request, 1 if key == "n" else -1)
        else:
            return False
        return True

    def _choose(self, desk: Desk, life: Life | None) -> None:
        if life is not None and life.story:
            desk.event = life.story[len(life.story) - 1 - min(self.scroll, len(life.story) - 1)].seq

    def reveal(self, desk: Desk, event: Event) -> bool:
        """True if the event belongs to the story of a request; its row is then chosen."""
        name = concerns(event, desk.mirror)
        life = desk.mirror.life_of(name) if name else None
        return life is not None and any(known.seq == event.seq for known in life.story)

    def rows(self, desk: Desk) -> Table | None:
        """The story, oldest first."""
        request = desk.shown_request()
        life = desk.mirror.life_of(request) if request is not None else None
        if life is None:
            return None
        return event_table(desk, life.story)

    def _next(self, desk: Desk, request: str | None, step: int) -> None:
        state = desk.mirror.state
        if state is None:
            return
        names = [state.slots[number].request for number in desk.order.numbers or state.slots if number in state.slots]
        if names:
            at = names.index(request) if request in names else -step
            desk.select(names[(at + step) % len(names)])
            self.scroll = 0


def slot_panel(
    desk: Desk, request: str, width: int, height: int, scroll: int = 0, *, chosen: int | None = None
) -> list[Line]:
    """The head, life, prompt, waits and story of a request in ``width`` by ``height``."""
    life = desk.mirror.life_of(request)
    state = desk.mirror.state
    if life is None or state is None:
        return [Row().put(f" {plain(request)} is not known here any more.", "muted").line()]
    slot = state.slots.get(life.slot)
    wide = width >= WIDE_FROM
    one_row = width >= WIDE_FROM + max(0, min(NAME_CELLS, len(life.request)) - words.REQUEST_MIN)
    lines = _head_wide(desk, life, slot, width) if one_row else _head(desk, life, slot, width)
    lines += _other_half(desk, life, width)
    lines.append(BLANK)
    room = 3 if height < 30 else max(3, min(12, height - 28 + 3))
    lines += _life(desk, life, width, room)
    lines.append(BLANK)
    if wide:
        left = _prompt(desk, life, slot, SIDE - 3)
        left += [BLANK, *_waits(desk, slot, SIDE - 3)]
        right = _story(desk, life, width - SIDE, max(1, height - len(lines)), scroll, 0, chosen)
        return [*lines, *beside(left, right, SIDE)][:height]
    lines += _prompt(desk, life, slot, width - 1)
    lines += [BLANK, *_waits(desk, slot, width - 1), BLANK]
    lines += _story(desk, life, width, max(2, height - len(lines)), scroll, 1, chosen)
    return lines[:height]


# --- head ------------------------------------------------------------------------------------------------------------


def _head(desk: Desk, life: Life, slot: SlotFacts | None, width: int) -> list[Line]:
    told = f"   slot {life.slot}, arrived {_arrived(desk, life)}"
    if slot is not None and slot.preemptions:
        told += f", preempted {slot.preemptions} ×"
    name = words.request(life.request, min(NAME_CELLS, max(words.REQUEST_MIN, width - len(told) - 3)), "strong")
    row = Row().put(" ").spans([name]).put(told, "muted")
    return [row.line("", width - 1), _standing(desk, life, slot, Row().put(" "), width, "   ", 10)]


def _head_wide(desk: Desk, life: Life, slot: SlotFacts | None, width: int) -> list[Line]:
    row = Row().put(" ").spans([words.request(life.request, NAME_CELLS, "strong")])
    row.put(f"  arrived {_arrived(desk, life)}    ", "muted")
    return [_standing(desk, life, slot, row, width, "  ", 8)]


def _arrived(desk: Desk, life: Life) -> str:
    """The age of the request, and its arrival as a time of day."""
    return f"{duration(desk.now_ns - life.opened_ns)} ago, {desk.times.text(life.opened_ns, millis=True)}"


def _standing(desk: Desk, life: Life, slot: SlotFacts | None, row: Row, width: int, gap: str, bar: int) -> Line:
    """The present state of the slot: held with its countdown, or its state, age and wait."""
    glyphs, mono, state = desk.glyphs, desk.mono(), desk.mirror.state
    if slot is None or state is None:
        ended = duration(desk.now_ns - (life.closed_ns or 0))
        how = "its end was not seen" if life.lost else f"finished {ended} ago"
        return _went_on(desk, life, row.put(f"{glyphs.state[life.state]} {how}", "muted"), width, gap)
    if slot.hold is None:
        info = SlotRow(desk.mirror, slot, mono)
        row.spans(words.state(slot.state, glyphs)).put(f" {duration(info.age_ns)}", words.LEVEL_ROLE[info.level])
        row.put(gap).put(info.waits, "text" if info.level is not None else "muted")
        return _went_on(desk, life, row, width, gap if info.waits else "")
    hold = state.holds[slot.hold]
    age = desk.mirror.hold_age_ns(hold.hold, mono)
    left = max(0, desk.mirror.hold_left_ns(hold.hold, mono) or 0)
    row.put(f"{glyphs.held} HELD {duration(age)}", "heldbox").put(gap + "in ", "muted")
    row.spans(words.state(slot.state, glyphs)).put(f" at {breakpoints_text(hold.breakpoints)}", "muted").put(gap)
    if not hold.parked:
        return row.put(f"will stop at its next {hold.point.label}", "caution").line("", width - 1)
    row.put(f"{ends(hold)} in {left // S} s ", "caution" if left > 5 * S else "fault")
    row.spans(bars.level(left / hold.max_hold_ns, bar, glyphs, "caution" if left > 5 * S else "fault"))
    if desk.may_control:
        row.put("  c", "key", ("key", "c")).put(" continue" if width >= 100 else "", "muted")
        if width >= 140:
            row.put("  s", "key", ("key", "s")).put(" step", "muted").put("  u", "key", ("key", "u"))
            row.put(" until…", "muted")
            if slot.outstanding:
                row.put("  X", "key", ("key", "X")).put(" skip candidate", "muted")
    early = sooner(state, hold)
    if row.x + len(early) + 3 < width:
        row.put(f"   {early}", "muted")
    return row.line("", width - 1)


def _went_on(desk: Desk, life: Life, row: Row, width: int, gap: str) -> Line:
    """The row with the reason why the last hold of this request ended, for NEWS_NS after its end."""
    ended = next((
        entry for entry in reversed(desk.mirror.ended_holds.last)
        if entry.request == life.request and entry.hold is not None
    ), None)
    if ended is not None and desk.now_ns - ended.at_ns <= NEWS_NS:
        ago = duration(max(0, desk.now_ns - ended.at_ns))
        text = f"hold {ended.hold} ended {ago} ago after {duration(ended.held_ns)}: {plain(ended.text)}"
        row.put(gap).put(cut(text, max(0, width - 2 - row.x)), "caution")
    return row.line("", width - 1)


def _other_half(desk: Desk, life: Life, width: int) -> list[Line]:
    """The half of this request in another engine; no line for a request that has one engine."""
    lines = []
    for verb, name, other in (
        ("prefilled", life.receives, desk.mirror.halves.prefill_of(life)),
        ("decoded", life.sends, desk.mirror.halves.decode_of(life)),
    ):
        if name is None:
            continue
        row = Row().put(f" {verb} by another engine", "text")
        if other is None:
            row.put(f", not known here; its blocks go by the name {cut(plain(name), NAME_CELLS)}", "muted")
        else:
            row = Row().put(f" {verb} by{words.engine(other.source) or ' another engine'} as ", "text")
            row.spans([words.request(other.request, NAME_CELLS, "strong")])
            end = other.closed_ns if other.closed_ns is not None else desk.now_ns
            row.put(f", slot {other.slot}, {duration(end - other.first_known_ns())}", "muted")
            row.put("" if other.closed_ns is not None else " so far", "muted")
            row.zone(0, ("select", other.request), row.x)
        lines.append(row.line("", width - 1))
    return lines


# --- life ------------------------------------------------------------------------------------------------------------


def _life(desk: Desk, life: Life, width: int, room: int) -> list[Line]:
    now = desk.now_ns
    end = life.closed_ns if life.closed_ns is not None else now
    prefill = desk.mirror.halves.prefill_of(life)
    start = min(half.first_known_ns() for half in (life, prefill) if half is not None)
    cells = max(8, width - 8 - LIFE_LEFT)
    span = max(end - start, 1_000_000)
    window = Window(start, -(-span // cells), cells, end)
    glyphs = desk.glyphs
    head = Row().put(" LIFE", "title").put(f"   {spoken(span)}, 1 cell = {spoken(window.cell_ns)}   ", "muted")
    head.put(f"queued {glyphs.queued}  wire {glyphs.wire}  held {glyphs.hatch}", "muted")
    lines = [head.line("", width - 1)]
    if prefill is None:
        lines.append(_states_line(desk, life, window, "states", width))
    else:
        lines.append(_states_line(desk, prefill, window, "prefill" + words.engine(prefill.source), width))
        lines.append(_states_line(desk, life, window, "decode" + words.engine(life.source), width))
    shown = _choose(life, room)
    for transfer in shown:
        lines.append(_transfer_line(desk, life, transfer, window, width))
    if len(life.transfers) > len(shown):
        lines.append(Row().put(f" +{len(life.transfers) - len(shown)} earlier", "faint").line())
    lines.append(_axis(window, width, closed=life.closed_ns is not None))
    return lines


def _states_line(desk: Desk, life: Life, window: Window, name: str, width: int) -> Line:
    codes, busy = _LIFELINES.codes(life, window, limits(desk.mirror))
    end = life.closed_ns if life.closed_ns is not None else desk.now_ns
    row = Row().put(f" {name}", "muted").to(LIFE_LEFT).spans(runs(codes, busy, desk.glyphs))
    return row.right(duration(end - life.first_known_ns()), width - 1, "muted").line()


def _choose(life: Life, room: int) -> list[Transfer]:
    """The transfers to show: open ones, then the latest."""
    found = sorted(life.transfers, key=lambda transfer: (not transfer.open, -transfer.planned_ns))
    return sorted(found[:room], key=lambda transfer: transfer.planned_ns)


def _transfer_line(desk: Desk, life: Life, transfer: Transfer, window: Window, width: int) -> Line:
    row = Row().put(f" {transfer.label.ljust(4)} ", "muted").spans([words.route(transfer.route)])
    row.right(str(transfer.blocks), 19, "text").to(LIFE_LEFT)
    wire = "fill.onboard" if transfer.route.is_load else "fill.copy"
    row.spans(runs(transfer_codes(transfer, life, window), set(), desk.glyphs, wire))
    if transfer.open and transfer.started_ns is None and life.held_now() is not None:
        row.right("parked", width - 1, "caution")
    elif transfer.lost:
        row.right("?", width - 1, "faint")
    elif transfer.reason is not None:
        row.right("skipped", width - 1, "faint")
    else:
        row.right(duration(transfer.age(desk.now_ns)), width - 1, "text" if transfer.open else "muted")
    return row.line("", width)


def _axis(window: Window, width: int, *, closed: bool) -> Line:
    row = Row()
    step = tick_ns(window.cell_ns)
    word = "end" if closed else "now"
    stop = LIFE_LEFT + window.cells - len(word) - 1
    at = 0
    while True:
        x = LIFE_LEFT + at // window.cell_ns
        text = "0s" if at == 0 else duration(at) if step % S else f"{at // S}s" if at < 120 * S else duration(at)
        if x + len(text) > stop:
            break
        row.to(x).put(text, "faint")
        at += step
    return row.right(word, LIFE_LEFT + window.cells, "faint").line("", width - 1)


# --- prompt, waits, story --------------------------------------------------------------------------------------------


def _prompt(desk: Desk, life: Life, slot: SlotFacts | None, width: int) -> list[Line]:
    if slot is None or desk.mirror.state is None:
        return [Row().put(" PROMPT", "title").put("   not kept after its end", "muted").line()]
    head = Row().put(" PROMPT", "title")
    head.put(f"   {count(slot.prompt_tokens)} tokens, {plural(slot.prompt_blocks, 'full block')}", "muted")
    prompt = prompt_of(desk.mirror.state, slot)
    bar = Row().put(" ").spans(prompt_bar(prompt, width - 1, desk.glyphs))
    ends = [tokens // prompt.block_tokens for tokens in accumulate((*prompt.found, prompt.computed, prompt.to_do))]
    *found, computed, to_do = (end - begin for begin, end in pairwise((0, *ends)))
    present = {pool.info.tier for pool in desk.mirror.state.shown_pools}
    generated = max(0, prompt.reached - slot.prompt_tokens)
    for gap in ("   ", "  ", " "):  # the widest legend that fits whole
        legend = Row().put(" ")
        for tier in (Tier.G1, Tier.G2, Tier.G3):
            known = str(found[tier - 1]) if tier in present else "–"
            legend.put(desk.glyphs.prompt[tier], f"fill.{tier.name.lower()}").put(f" {tier.name} {known}{gap}", "muted")
        legend.put(f"{desk.glyphs.computed} computed {computed}", "computed")
        legend.put(f"{gap}{desk.glyphs.todo} to do {to_do}", "muted")
        if generated:
            legend.put(f"{gap}+{count(generated)}{' generated' if gap == '   ' else ' gen'}", "muted")
        if legend.x <= width:
            break
    return [head.line("", width), bar.line(), legend.line("", width)]


def _waits(desk: Desk, slot: SlotFacts | None, width: int) -> list[Line]:
    lines = [Row().put(" WAITS FOR", "title").line()]
    told = sentences(desk.mirror, slot, desk.mono()) if slot is not None else []
    for index, sentence in enumerate(told or ["nothing"]):
        pins = sentence.startswith("pins") and slot is not None and slot.hold is not None
        role = "caution" if pins else "text" if told and index == 0 else "muted"
        lines.append(Row().put(" ").put(cut(sentence, width - 1), role).line())
    return lines


def _story(
    desk: Desk, life: Life, width: int, height: int, scroll: int, margin: int, chosen: int | None
) -> list[Line]:
    head = Row().put(" " * margin).put("STORY", "title").put("   newest first", "muted")
    if scroll:
        head.put(f", {scroll} newer above", "muted")
    if chosen is not None:
        head.put(f"   seq {count(chosen)}", "text")
    lines = [head.line()]
    now = desk.now_ns
    for event in list(reversed(life.story))[scroll : scroll + max(0, height - 1)]:
        row = Row().put(" " * margin).right(duration(now - event.at_ns), margin + 5, "muted").put("  ")
        room = width - margin
        name = 22 if room >= 50 else 15
        told = describe(event, desk.mirror) if room >= 70 else beside_kind(event, desk.mirror)
        row.put(cut(kind_words(type(event)), name).ljust(name + 1), "muted")
        line = row.put(cut(plain(told), max(0, width - 1 - row.x)), "text").line()
        if event.seq == chosen:
            line = Row().spans([Span(span.text, f"{span.role}@sel") for span in line.spans]).line()
        lines.append(line)
    return lines
