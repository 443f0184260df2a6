"""Overview: the losses, the warnings, the hit rate, the tiers, the traffic of each route, and the slots.

Law of this file: the order of sections is fixed. When they do not fit, the least useful go first: counts of states fold
to one row, then trends go, then routes without traffic.
"""

from kvbm_console.analysis.lints import Level
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.core.slots import WAITING_STATES
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

from ..desk import Desk, View
from ..draw import bars, words
from ..draw.frame import Hint
from ..draw.glyphs import FILL, ORDER, state_role
from ..draw.spans import BLANK, Line, Row, beside, fit
from ..draw.words import TIER_WORDS
from ..model.lints import Warning, copy_level, ended_text, tally
from ..model.numbers import S, clauses, count, cut, duration, flow, per_second, percent, plain, shares, spoken, tenth
from ..model.slots import SlotRow
from ..model.sources import blocks_only, uncertain
from .blocks import history_section, lives_section
from .engines import engines_section
from .misses import chart, fates_row, window_s
from .tiers import occupancy_charts, pool_name, used_role
from .transfers import known_routes, route_numbers
from .warnings import open_warning
from .worth import worth_section

WINDOW_S = 60
"""The window of the hit rate."""
NEEDS_ROWS = 3
"""Rows that warnings have, whether there are any: so nothing below them moves when a warning comes or goes."""
FATES_MIN = 4
"""Fewer rows of the fates of prompt blocks tell no shares."""
FATES_MAX = 16
HISTORY_MIN = 8
"""Fewer rows have no room for the charts of an engine that is followed by its stream."""
SIDE = 76
"""The start of the second column."""
THIRD = 131


def cache_section(desk: Desk, state: CacheState, width: int, *, trends: bool = True) -> list[Line]:
    """The hit rate of the last minute with its denominator, its parts, and a bar of them."""
    asked, hits = desk.mirror.flows.hit_shares(desk.now_ns)
    total, parts, miss = shares(hits, asked)
    tiers = [tier for tier in (Tier.G1, Tier.G2, Tier.G3, Tier.G4) if hits[tier - 1] or tier is not Tier.G4]
    denominator = f"of {count(asked)} prompt blocks" if asked else "no prompt yet"
    lines = [desk.title("CACHE", f"hit rate, last {min(WINDOW_S, desk.known_s)} s, {denominator}")]
    row = Row().put(" ").put(f"{total} %" if asked else "–", "strong").to(9)
    tail = Row()
    for tier in tiers:
        tail.put(f"{tier.name} ", "muted").put(parts[tier - 1], "text").put("  ")
    tail.put("miss ", "muted").put(miss, "text")
    cells = max(0, width - 38 - row.x - 2) if width >= 71 else 0
    if trends and cells:
        row.spans(desk.trend(desk.mirror.flows.hit_rate.last(60), cells, 1.0)).put("   ")
    row.add(tail.line())
    lines.append(row.line("", width))
    stack = [
        (hits[tier - 1], desk.glyphs.prompt[tier], f"fill.{tier.name.lower()}") for tier in Tier
    ]
    stack.append((max(0, asked - sum(hits)), desk.glyphs.miss, "track"))
    bar = bars.stack(stack, width - 1) if asked else bars.level(None, width - 1, desk.glyphs, "track")
    lines.append(Row().put(" ").spans(bar).line())
    return [*lines, fates_row(desk, width) if desk.mirror.fates.asked else BLANK]


def tiers_section(desk: Desk, state: CacheState, width: int, *, trends: bool = True) -> list[Line]:
    """Occupancy, evictions and thrash of every pool."""
    bar, spark = (16, 12) if width >= 79 else (10, 8)
    end = 11 + bar
    head = Row().put(" TIERS", "title").right("used", end + 6, "faint").right("blocks", end + 21, "faint")
    head.right("evict/s", end + 30, "faint").right("thrash", end + 38, "faint")
    if trends:
        head.to(end + 40).put("60 s", "faint")
    lines = [head.line("" if desk.tall else "bar")]
    for pool in sorted(state.shown_pools, key=lambda pool: (pool.info.tier, pool.info.pool)):
        lines.append(_tier_line(desk, state, pool, bar, spark if trends else 0))
    return lines


def _tier_line(desk: Desk, state: CacheState, pool: PoolFacts, bar: int, spark: int) -> Line:
    flows, now, tier = desk.mirror.flows, desk.now_ns, pool.info.tier
    capacity, resident = state.capacity_of(pool), pool.resident_blocks
    end = 11 + bar
    over, doubt = state.has_ended(pool.info.source), uncertain(state, pool.info.source)
    row = Row().put(" ").put(pool_name(pool, state), "stale" if over else "text").to(11)
    row.spans(bars.level(resident / capacity if capacity else None, bar, desk.glyphs, tier.name.lower()))
    row.right(percent(resident, capacity), end + 6, used_role(pool))
    row.right(f"{count(resident)}{'?' if doubt else ''}/{count(capacity)}", end + 21,
              "stale" if over else "caution" if doubt else "text")
    if over:
        return row.to(end + 23).put("its engine ended", "stale").line()
    evicted = flows.evicted.get(pool.info.pool)
    row.right(per_second(evicted.rate(now)) if evicted is not None else "0", end + 30, "text")
    back, gone = flows.thrash_share(state, tier, now)
    share = f"{flows.about(now, 60)}{tenth(back, gone)} %" if gone else "–"
    row.right(share, end + 38, "text" if gone else "muted")
    gauge = flows.occupancy.get(pool.info.pool)
    if spark and gauge is not None:
        row.to(end + 40).spans(desk.trend(gauge.last(60), spark, 1.0, tier.name.lower()))
    return row.line()


def flows_section(
    desk: Desk, state: CacheState, width: int, *, trends: bool = True, busy_only: bool = False
) -> list[Line]:
    """Rate, queue and latencies of every route; ``busy_only`` leaves out routes without traffic."""
    head = Row().put(" FLOWS", "title")
    for name, end in (("rate", 21), ("queued", 29), ("moving", 37), ("p50", 45), ("p99", 53)):
        head.right(name, end, "faint")
    if trends:
        head.to(55).put("60 s", "faint")
    lines = [head.line("" if desk.tall else "bar")]
    mirror, now = desk.mirror, desk.now_ns
    slow = {copy.route for copy in mirror.transfers.values() if copy_level(mirror, copy, now) is not None}
    for route in known_routes(desk):
        known = mirror.flows.routes.get(route)
        if busy_only and known is None:
            continue
        queued, moving = route_numbers(desk, route)
        p50, p99 = known.times(now) if known is not None else (None, None)
        row = Row().put(" ").spans([words.route(route)])
        row.right(flow(known.blocks.rate(now) if known else 0, mirror.block_bytes), 21)
        row.right(count(queued), 29, "caution" if route in slow else "text").right(count(moving), 37)
        row.right(duration(p50), 45).right(duration(p99), 53, "caution" if route in slow else "text")
        if trends and known is not None:
            row.to(55).spans(desk.trend(known.blocks.last(60, now), 16))
        lines.append(row.line("", width))
    if len(lines) == 1:
        lines.append(Row().put(" no transfer yet", "muted").line())
    return lines


def slots_section(
    desk: Desk, state: CacheState, margin: int, cells: int, pitch: int, *, folded: bool = False
) -> list[Line]:
    """Slots by state, as a bar and as counts ``pitch`` cells apart; ``folded`` has the counts in one row."""
    numbers = dict.fromkeys(SlotState, 0)
    for slot in state.slots.values():
        numbers[slot.state] += 1
    waiting = sum(numbers[state] for state in WAITING_STATES)
    held = len(state.holds)
    told = f"{count(len(state.slots))} live, {count(waiting)} waiting" + (f", {held} held" if held else "")
    head = desk.title("SLOTS", told)
    lines = [head if margin else Line(tuple(head.spans[1:]), head.ground)]
    parts = [(numbers[one], _bar_char(desk, one), FILL[one]) for one in ORDER]
    lines.append(Row().to(margin).spans(bars.stack(parts, cells)).line())
    pairs = [(one, numbers[one]) for one in ORDER]
    if folded:
        row = Row().to(margin)
        for one, number in pairs:
            if number:
                row.put(desk.glyphs.state[one], state_role(one)).put(f" {number}  ", "strong")
        return [*lines, row.line()]
    across = max(1, (cells + 2) // pitch)
    for start in range(0, len(pairs), across):
        row = Row().to(margin)
        for index, (one, number) in enumerate(pairs[start : start + across]):
            row.to(margin + index * pitch).put(desk.glyphs.state[one], state_role(one))
            row.put(f" {number:>2} ", "strong" if number else "faint").put(one.words, "muted" if number else "faint")
        lines.append(row.line())
    return lines


def _bar_char(desk: Desk, state: SlotState) -> str:
    if desk.glyphs.ascii:
        return desk.glyphs.life[state]
    return {SlotState.PREFILLING: "▆"}.get(state, desk.glyphs.life[state])


def engine_section(desk: Desk, state: CacheState, cells: int) -> list[Line]:
    """Step time, tokens in a second of the engine's clock, events in a step."""
    mirror, now = desk.mirror, desk.now_ns
    step = mirror.step_ns()
    head = desk.title("ENGINE", f"step {spoken(step)}, {count(state.running)} of {count(len(state.slots))} scheduled")
    lines = [Line(tuple(head.spans[1:]), head.ground)]
    tokens, events = mirror.flows.tokens, mirror.flows.events
    rate = events.rate(now)
    each = "–" if step is None or rate is None else f"{per_second(rate * step / S)}/step"
    for name, series, told in (
        ("tokens/s", tokens, mirror.flows.about(now) + per_second(tokens.rate(now))), ("events", events, each),
    ):
        row = Row().put(name, "muted").to(10)
        row.spans(desk.trend(series.last(60, now), cells))
        lines.append(row.right(told, 10 + cells + 8).line())
    return lines


def waiting_section(desk: Desk, state: CacheState, rows: int, width: int, *, with_state: bool) -> list[Line]:
    """The requests that have waited longest, with the thing that each waits for."""
    mono = desk.mono()
    waiting = [slot for slot in state.slots.values() if slot.hold is not None or slot.state not in
             (SlotState.PREFILLING, SlotState.DECODING, SlotState.FINISHED)]
    waiting.sort(key=lambda slot: (slot.since_ns, slot.slot))
    head = desk.title("WAITING LONGEST", "" if waiting else "no request")
    lines = [head if with_state else Line(tuple(head.spans[1:]), head.ground)]
    names = min(24, max((len(slot.request) for slot in waiting[:rows]), default=0))
    for slot in waiting[:rows]:
        row_data = SlotRow(desk.mirror, slot, mono)
        held = slot.hold is not None
        row = Row().put(" " if with_state else "")
        row.put(desk.glyphs.held if held else desk.glyphs.state[slot.state],
                "heldbox" if held else state_role(slot.state)).put(" ")
        role = "fault" if row_data.level is Level.FAULT else "text"
        start = row.x
        row.right(duration(row_data.age_ns), start + 5, role).put("  ")
        row.spans([words.request(slot.request, names)]).to(start + 7 + names + 2)
        if with_state:
            row.put(slot.state.words, "caution" if held else state_role(slot.state)).to(start + 7 + names + 18)
        row.put(cut(row_data.waits, max(0, width - row.x)), "muted").zone(0, ("open", slot.request), width)
        lines.append(row.line())
    return lines


def charts_section(desk: Desk, state: CacheState, width: int, number: int, rows: int) -> list[Line]:
    """Occupancy of the near pools and the hit rate, side by side."""
    flows = desk.mirror.flows
    pitch = -(-(width + 1) // number)
    asked, hits = flows.hit_shares(desk.now_ns)
    rate = bars.chart("HIT RATE", f"{shares(hits, asked)[0]} %" if asked else "–", flows.hit_rate.last(600),
                      desk.known_s, rows, pitch - 11, desk.glyphs)
    pools = sorted(state.shown_pools, key=lambda pool: pool.info.tier)[: number - 1]
    return beside(occupancy_charts(desk, pools, width, number, rows), rate, len(pools) * pitch)


def nothing_yet(desk: Desk, state: CacheState) -> list[Line]:
    """The rows of a target without a request."""
    target = desk.mirror.connected
    name = f"{target.target}, run {target.run}" if target is not None and target.run else (
        target.target if target is not None else "–")
    if desk.recording:
        seq = max(0, state.seq - 1)
        here = f" No live request at seq {count(seq)} of {plain(name)}, iteration {count(state.iteration)}."
        return [
            Row().put(here).line(),
            Row().put(" space", "key").put(" plays, ", "muted").put(".", "key").put(" steps on, ", "muted")
            .put(":seek", "key").put(" goes anywhere.", "muted").line(),
        ]
    if all(pool.info.tier is not Tier.G1 for pool in state.pools):
        return [
            Row().put(f" No engine has connected to {plain(name)} yet.").line(),
            Row().put(" An engine with the tap in its environment connects: ", "muted")
            .put("KVBM_TAP=unix:PATH vllm serve MODEL", "key").line(),
        ]
    return [
        Row().put(f" No request yet. Connected to {plain(name)}, iteration {count(state.iteration)}.").line(),
        Row().put(" Waiting for the first request. To see a working target: ", "muted").put("kvbm-console demo", "key")
        .line(),
    ]


class Overview(View):
    """View 1."""

    words = (
        ("hit rate", "share of the prompt blocks asked for that some tier had; the rest is computed"),
        TIER_WORDS, ("lag", "events published that this console has not shown yet"),
        ("lost", "events that never came here"),
        ("rec", "age of the newest event that is safe on disk; off means no recorder"),
        ("queued", "copies that wait for their link; moving copies are on it"),
        ("evict/s", "blocks a second that gave their place to others"),
        ("thrash", "of the blocks evicted in the last minute, share that came back within the window"),
        ("misses", "why prompt blocks were computed, in percent of those asked for; M lists the culprits"),
        ("PAYS", "prefill time that the hits of a tier saved, against the time of its copies"),
        ("p50 p99", "half, and 99 of 100, of the copies took no longer"),
    )

    def __init__(self) -> None:
        self.at = 0
        """The warning that ``enter`` opens."""
        self._chart: tuple[tuple[object, ...], list[Line]] = ((), [])

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Sections from top to bottom, in one, two or three columns."""
        state = desk.mirror.facts
        if not state.slots and not state.totals.slots_opened:
            if blocks_only(state):
                gap = [BLANK] if desk.tall else []
                rows = [*self._needs(desk, width), *gap, *engines_section(desk, state, width)]
                lives = lives_section(desk, state, width)
                if len(rows) + len(gap) + len(lives) <= height:
                    rows += [*gap, *lives]
                left = height - len(rows) - len(gap)
                return rows if left < HISTORY_MIN else [*rows, *gap, *history_section(desk, state, width, left)]
            return nothing_yet(desk, state)
        gap = [BLANK] if desk.tall else []
        needs = self._needs(desk, width)
        if width >= 180:
            rows = self._three(desk, state, width, height - len(needs) - len(gap))
        elif width >= 118:
            rows = self._two(desk, state, width, height - len(needs) - len(gap))
        else:
            rows = self._one(desk, state, width, height - len(needs) - len(gap))
        return [*needs, *gap, *rows]

    def hints(self, desk: Desk) -> list[Hint]:
        hints = [("enter", "open")] if desk.warnings else []
        if desk.mirror.state is not None and desk.mirror.state.holds and desk.may_control:
            hints.append(("c", "continue"))
        hints += [(":", "commands"), ("space", "pause view" if not desk.recording else "play"), ("!", "warnings")]
        hints.append(("e", "export"))
        return hints

    def press(self, desk: Desk, key: str) -> bool:
        """Up and down choose a warning, enter opens its subject."""
        last = max(0, min(len(desk.warnings), NEEDS_ROWS) - 1)
        if key in ("down", "j"):
            self.at = min(last, self.at + 1)
        elif key in ("up", "k"):
            self.at = max(0, self.at - 1)
        elif key == "enter" and desk.warnings:
            open_warning(desk, desk.warnings[min(self.at, len(desk.warnings) - 1)])
        elif key.startswith("row:") and int(key[4:]) < len(desk.warnings):
            self.at = int(key[4:])
            open_warning(desk, desk.warnings[self.at])
        else:
            return False
        return True

    # --- layouts -----------------------------------------------------------------------------------------------------

    def _one(self, desk: Desk, state: CacheState, width: int, height: int) -> list[Line]:
        gap = [BLANK] if desk.tall else []
        for saving in range(4):
            flows = flows_section(desk, state, width - 1, trends=saving < 2, busy_only=saving >= 3)
            parts = [
                cache_section(desk, state, width - 1, trends=saving < 2),
                tiers_section(desk, state, width - 1, trends=saving < 2),
                worth_section(desk, state, width - 1), flows,
                slots_section(desk, state, 1, width - 2, 26, folded=saving >= 1),
            ]
            others = sum(map(len, parts)) - len(flows) + len(gap) * (len(parts) - 1)
            if saving == 3:  # the routes in use change, their rows do not
                parts[3] = fit(flows, max(2, min(1 + len(known_routes(desk)), height - others)))
            elif others + len(flows) > height:
                continue
            rows = [line for part in parts for line in [*part, *gap]]
            break
        left = height - len(rows)
        if left >= 3:
            rows += waiting_section(desk, state, min(left - 1, 6), width - 1, with_state=True)
        return rows

    def _columns(self, desk: Desk, state: CacheState, cells: int, pitch: int, sparks: int) -> list[Line]:
        """Two columns: cache, tiers and flows, then slots and engine."""
        return desk.paced("columns", lambda: self._numbers(desk, state, cells, pitch, sparks))

    def _numbers(self, desk: Desk, state: CacheState, cells: int, pitch: int, sparks: int) -> list[Line]:
        gap = [BLANK] if desk.tall else []
        left = [
            *cache_section(desk, state, 71), *gap, *tiers_section(desk, state, 71), *gap,
            *worth_section(desk, state, 71), *gap, *flows_section(desk, state, 71),
        ]
        right = slots_section(desk, state, 0, cells, pitch)
        engine_at = 3 + len(gap) + 4 + len(gap) if desk.tall else len(right)
        right += [BLANK] * max(len(gap), engine_at - len(right))
        return beside(left, [*right, *engine_section(desk, state, sparks)], SIDE)

    def _two(self, desk: Desk, state: CacheState, width: int, height: int) -> list[Line]:
        gap = [BLANK] if desk.tall else []
        rows = [*self._columns(desk, state, 43, 22, 20)]
        left = height - len(rows)
        chart_rows = 5 if left >= 16 else 0
        waiting = min(6, left - len(gap) - 1 - (chart_rows + 1 + len(gap) if chart_rows else 0))
        if waiting >= 2:
            rows += [*gap, *fit(waiting_section(desk, state, waiting, width - 1, with_state=True), waiting + 1)]
        if chart_rows:
            rows += [*gap, *self._history(desk, state, width, 2, chart_rows)]
        return rows + self._fates(desk, width, height - len(rows), gap)

    def _three(self, desk: Desk, state: CacheState, width: int, height: int) -> list[Line]:
        gap = [BLANK] if desk.tall else []
        rows = self._columns(desk, state, 50, 26, 26)
        waiting = waiting_section(desk, state, max(12, len(rows) - 1), width - THIRD - 1, with_state=False)
        rows = [*beside(rows, waiting, THIRD), *gap, *self._history(desk, state, width, 3, 6)]
        return rows + self._fates(desk, width, height - len(rows), gap)

    def _history(self, desk: Desk, state: CacheState, width: int, number: int, rows: int) -> list[Line]:
        return desk.paced("charts", lambda: charts_section(desk, state, width, number, rows))

    def _fates(self, desk: Desk, width: int, height: int, gap: list[Line]) -> list[Line]:
        """The fate of prompt blocks over time, in the rows that are left; drawn anew when it has changed."""
        rows = min(height - len(gap) - 2, FATES_MAX)
        if rows < FATES_MIN:
            return []
        mirror = desk.mirror
        key = (mirror.incarnation, mirror.places, desk.now_ns // S, window_s(desk), mirror.fates.asked, rows, width)
        if key != self._chart[0]:
            self._chart = key, chart(desk, width, rows)
        head = desk.title("PROMPT BLOCKS", "the tier that had them, or why they missed;")
        told = Row().add(head).put(" M", "key").put(" who evicted them", "muted").line(head.ground)
        return [*gap, told, *self._chart[1]]

    # --- warnings ----------------------------------------------------------------------------------------------------

    def _needs(self, desk: Desk, width: int) -> list[Line]:
        shown = desk.warnings[:NEEDS_ROWS]
        head = Row().add(desk.title("NEEDS YOU", tally(desk.warnings)))
        if len(desk.warnings) > len(shown):
            head.put(f"   +{len(desk.warnings) - len(shown)} more ", "muted").put("!", "key")
        lines = [head.line(desk.title("").ground)]
        name_width = min(28, max((len(w.who) for w in shown), default=0))
        state_width = min(28, max((len(w.what) for w in shown), default=0))
        for index, warning in enumerate(shown):
            lines.append(_warning_line(desk, warning, width, name_width, state_width, index == self.at and index > 0))
        self.at = min(self.at, max(0, len(shown) - 1))
        return fit(lines, 1 + NEEDS_ROWS)


def _warning_line(desk: Desk, warning: Warning, width: int, name: int, state: int, chosen: bool) -> Line:
    over = warning.ended_ns is not None
    row = Row().put(desk.glyphs.select if chosen else " ", "selbar")
    row.spans(words.mark(None if over else warning.level, desk.glyphs)).put(" ")
    row.spans([words.request(warning.who, name, "muted" if over else "strong")]).to(4 + name + 2)
    row.put(cut(warning.what, state), "muted" if over else words.LEVEL_ROLE[warning.level]).to(4 + name + 2 + state + 2)
    key, word = warning.action
    usable = key not in ("c", "C") or desk.may_control
    wide = width >= 110 and usable
    room = (width - 20 if wide else width - 1) - row.x - (2 if wide else 0)
    row.put(clauses(plain(ended_text(warning) or warning.because), room), "muted" if over else "text")
    if wide and not over:
        row.to(width - 20).put(key, "key").put(f"  {word}", "muted")
    row.zone(0, ("row", desk.warnings.index(warning)), width)
    return row.line("", width)
