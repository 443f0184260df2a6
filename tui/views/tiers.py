"""Tiers: the contents of each pool, and the benefit of the tier.

Law of this file: the five conditions add up to the capacity. A hit rate stands beside the number of blocks that were
asked of this tier.
"""

from kvbm_console.core.ids import Authority, Condition, Tier, age_within
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

from ..desk import Desk, View
from ..draw import bars
from ..draw.frame import Hint
from ..draw.spans import BLANK, Line, Row, Span, beside, part
from ..draw.table import MOVES, moved
from ..draw.words import TIER_WORDS
from ..model.flows import TIERS as ALL_TIERS
from ..model.numbers import brief, count, cut, duration, per_second, percent, plain, tenth
from ..model.series import window_of, window_text
from ..model.sources import WATCHED, uncertain, watched
from .blocks import lives_section
from .engines import engines_section, legend
from .worth import curve_section, evictions_row

_ROLES = {
    Condition.REFERENCED: "", Condition.WRITING: "fill.onboard", Condition.CACHED: "", Condition.EMPTY: "todo",
    Condition.QUARANTINED: "caution",
}
_ORDER = (Condition.REFERENCED, Condition.WRITING, Condition.CACHED, Condition.QUARANTINED, Condition.EMPTY)


CHART_ROWS = 7
SCROLL_PAGE = 10
LOW_ROWS = 2
"""Occupancy and bound, below the pools."""
MAPS_FROM = 50
"""Rows of a screen that has room for maps of three rows beside the curve."""
MAP_ROWS = 16
"""Rows of a map beside other maps: more rows would only push its numbers away from its name."""
HIT_CELLS = 22
"""Room that the ages of blocks leave for the hit rate."""


MEDIA = {Tier.G1: "device", Tier.G2: "host", Tier.G3: "disk", Tier.G4: "remote"}


class Tiers(View):
    """View 6."""

    words = (
        TIER_WORDS, ("referenced", "in use by a live request"), ("writing", "being copied in"),
        ("cached", "kept for the next request that needs it"), ("hit", "found here, of the blocks asked for here"),
        ("thrash", "of the blocks evicted in the last minute, share that came back within the window"),
        ("again", "time from an eviction until a prompt asked for the block again; a short time means a small tier"),
        ("CURVE", "hits of an LRU cache as large as these tiers, over the prompts seen here, beginning with what the "
         "tiers held; 2x: this tier doubled"),
        ("evicted", "by the reason for the choice; asked again: a prompt needed the block later"),
        ("BOUND", "hit rate of the best possible eviction"),
    )

    def __init__(self) -> None:
        self.by_place = False
        self.top = 0
        self.spare = 0
        """Rows that do not fit, so the view scrolls by as many."""

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Real engines, then a section for each pool with places of its own; scrolled if the rows do not fit."""
        state = desk.mirror.facts
        if not state.pools:
            return [Row().put(" No pool is known yet.", "muted").line()]
        lines = engines_section(desk, state, width)
        pools = [pool for pool in state.shown_pools if pool.info.authority is not Authority.STREAM]
        if pools:
            lines += [BLANK] if lines and desk.tall else []
            curve = curve_section(desk, state, width - 1)
            lines += self._pools(desk, state, pools, width, height - len(lines) - len(curve) - desk.tall)
            lines += [*([BLANK] if desk.tall and curve else []), *curve]
        if any(pool.info.authority is Authority.STREAM for pool in state.pools):
            lines += [*([BLANK] if desk.tall else []), *lives_section(desk, state, width)]
        if watched(state) and len(lines) < height:
            lines.append(legend(width))
        self.spare = max(0, len(lines) - height)
        self.top = min(self.top, self.spare)
        return lines[self.top : self.top + height]

    def _pools(
        self, desk: Desk, state: CacheState, pools: list[PoolFacts], width: int, height: int
    ) -> list[Line]:
        """A section for each pool, side by side on a wide screen; then occupancy over ten minutes."""
        pools = sorted(pools, key=lambda pool: (pool.info.tier, pool.info.pool))
        gap = [BLANK] if desk.tall else []
        maps = 3 if desk.height >= MAPS_FROM else 1
        lines: list[Line] = []
        low = height < len(pools) * (maps + 4) + LOW_ROWS  # only then the rows lack room for the evictions
        if width >= 190 and len(pools) >= 2:
            pitch = width // len(pools)
            useful = max(-(-pool.capacity // (pitch - 4)) for pool in pools)
            maps = max(1, min(useful, MAP_ROWS, height - CHART_ROWS - 9))
            for index, pool in enumerate(pools):
                lines = beside(lines, self._pool(desk, state, pool, pitch - 2, maps, low=False), index * pitch)
            lines += gap
        else:
            for pool in pools:
                lines += [*self._pool(desk, state, pool, width - 1, maps, low=low and not desk.tall), *gap]
        left = height - len(lines)
        if desk.tall and left >= 8:
            number = 3 if width >= 180 else 2
            rows = min(CHART_ROWS if width < 180 else 2 * CHART_ROWS, left - 4)
            lines += occupancy_charts(desk, pools, width, number, rows)
        elif left >= 1:
            lines.append(_occupancy_row(desk, pools, width))
        if height - len(lines) > len(gap):
            lines += [*gap, _bound(width)]
        return lines

    def _pool(
        self, desk: Desk, state: CacheState, pool: PoolFacts, width: int, rows: int, *, low: bool
    ) -> list[Line]:
        capacity = state.capacity_of(pool)
        places = max(1, pool.capacity)
        cells = (width - 2) * rows
        per_cell = max(1, -(-places // cells))
        doubt, over = uncertain(state, pool.info.source), state.has_ended(pool.info.source)
        head = Row().put(" ").put(pool_name(pool, state), "stale" if over else "strong").to(11)
        head.put(f" {percent(pool.resident_blocks, capacity)}", "stale" if over else used_role(pool))
        head.put(f"  {count(pool.resident_blocks)}{'?' if doubt else ''}/{count(capacity)}",
                 "stale" if over else "caution" if doubt else "text")
        medium, rule = plain(pool.info.medium), _rule(desk, pool)
        decider = "engine" if pool.info.authority is Authority.OBSERVED else pool.info.authority.label
        told = (f"   {medium}, decided by the {decider}{rule}", f"   {medium}{rule}", f"   {medium}",
                "")
        if doubt:
            told = (f"   {medium}: reports were lost or unclear, counts are doubtful",
                    f"   {medium}: counts are doubtful", f"   {medium}: doubtful", "")
        if over:
            told = (f"   {medium}: its engine ended, nothing more is heard of it", f"   {medium}: its engine ended",
                    "   ended", "")
        cell = f"1 cell = {per_cell} block{'s' if per_cell > 1 else ''}"
        head.put(next(text for text in told if not text or head.x + len(text) + len(cell) + 2 <= width), "muted")
        if head.x + len(cell) + 2 <= width:
            head.right(cell, width - 1, "faint")
        lines = [head.line("" if desk.tall else "bar", width)]
        drawn = self._by_place(desk, pool, per_cell, cells) if self.by_place else _by_kind(desk, pool, cells)
        for row in range(rows):
            shown = part(drawn, row * (width - 2), (row + 1) * (width - 2))
            lines.append(Row().put(" ").spans(shown).line())
        tier = pool.info.tier
        again = [] if low else [evictions_row(desk, state, tier, width)]
        return [*lines, _conditions(desk, pool, width), _numbers(desk, pool, width, low=low), *again]

    def _by_place(self, desk: Desk, pool: PoolFacts, per_cell: int, cells: int) -> list[Span]:
        """Cells in the order of places, each showing the most pressing condition in it."""
        rank = {Condition.QUARANTINED: 4, Condition.WRITING: 3, Condition.REFERENCED: 2, Condition.CACHED: 1}
        spans: list[Span] = []
        for start in range(pool.info.first_place, len(pool), per_cell):
            found = max((pool.condition(block) for block in range(start, min(len(pool), start + per_cell))),
                        key=lambda condition: rank.get(condition, 0))
            spans.append(Span(desk.glyphs.map[found], _role(pool, found)))
        return spans[:cells]

    def hints(self, desk: Desk) -> list[Hint]:
        return [("o", "by kind" if self.by_place else "by place"), *([("↑↓", "scroll")] if self.spare else []),
                ("space", "play" if desk.recording else "pause view")]

    def press(self, desk: Desk, key: str) -> bool:
        """o changes the order of the map; the arrows scroll."""
        if key == "o":
            self.by_place = not self.by_place
        elif key in MOVES:
            self.top = moved(self.top, key, self.spare + 1, SCROLL_PAGE)
        else:
            return False
        return True


def _role(pool: PoolFacts, condition: Condition) -> str:
    return _ROLES[condition] or f"fill.{pool.info.tier.name.lower()}"


def _by_kind(desk: Desk, pool: PoolFacts, cells: int) -> list[Span]:
    parts = [(pool.counts[one], desk.glyphs.map[one], _role(pool, one)) for one in _ORDER]
    used = min(cells, pool.capacity) or cells
    return bars.stack(parts, used)


def _rule(desk: Desk, pool: PoolFacts) -> str:
    """The rule for keeping blocks, if the target reports it: in G1 the threshold of copying down, elsewhere the
    policy."""
    known = desk.mirror.connected.config if desk.mirror.connected is not None else None
    if known is None or pool.info.authority in WATCHED:
        return ""
    if pool.info.tier is Tier.G1:
        above = round(100 * known.offload_threshold)
        return f", copied down above {percent(above, 100)}" if above else ", all copied down"
    policy = known.eviction
    return f", {policy.policy}" + (f", half-life {policy.half_life_s:g} s" if policy.policy == "lrfu" else "")


def _bound(width: int) -> Line:
    """The optimal bound is known for a trace only."""
    row = Row().put(" BOUND", "title").put("   –", "text")
    row.put("   how far from optimal is known for a trace: ", "muted")
    return row.put("kvbm-console compare", "key").line("", width)


def _conditions(desk: Desk, pool: PoolFacts, width: int) -> Line:
    row = Row().put(" ")
    for condition in _ORDER:
        number = pool.counts[condition]
        if condition is Condition.QUARANTINED and not number:
            continue
        if row.x + 2 + len(condition.label) + 1 + len(count(number)) > width:
            continue
        row.put(f"{desk.glyphs.map[condition]} ", _role(pool, condition))
        row.put(f"{condition.label} ", "muted").put(f"{count(number)}  ", "text")
    if pool.info.capacity_blocks and not pool.counts[Condition.EMPTY] and not pool.counts[Condition.CACHED]:
        row.put("! nothing evictable", "caution")
    return row.line("", width)


def _numbers(desk: Desk, pool: PoolFacts, width: int, *, low: bool) -> Line:
    """Evictions, thrash, and the hit rate among the blocks that the nearer tiers did not have."""
    flows, now, tier = desk.mirror.flows, desk.now_ns, pool.info.tier
    evicted = flows.evicted.get(pool.info.pool)
    cells = 20 if width >= 110 else 8
    row = Row().put(" evict/s ", "muted").put(per_second(evicted.rate(now)) if evicted is not None else "0", "text")
    row.put(" ")
    if evicted is not None:
        row.spans(desk.trend(evicted.last(60, now), cells))
    row.to(19 + cells)
    state = desk.mirror.facts
    back, gone = flows.thrash_share(state, tier, now)
    share = f"{flows.about(now, 60)}{tenth(back, gone)} % of {brief(gone)}" if gone else "–"
    row.put("thrash ", "muted").put(share, "text")
    if low:
        half, _, blocks = _again_ages(state, pool)
        _put(row, "again", duration(half), (f" of {brief(blocks)}",) if blocks else (), width, HIT_CELLS)
    asked, hits = flows.hit_shares(now)
    here = asked - sum(hits[index] for index, one in enumerate(ALL_TIERS) if one < tier)
    found = hits[tier - 1]
    asked_here = (f" of {count(here)}{'' if tier is Tier.G1 else ' asked here'}", f" of {count(here)}",
                  f" of {brief(here)}") if here > 0 else ()
    _put(row, "hit", f"{tenth(found, here)} %" if here > 0 else "–", asked_here, width)
    fetched = _prefetched(state, pool)
    if fetched and row.x + len(fetched) + 3 <= width:
        row.put(f"   {fetched}", "caution" if state.totals.prefetch_limited else "muted")
    return row.line("", width)


def _put(row: Row, name: str, value: str, of: tuple[str, ...], width: int, spare: int = 1) -> None:
    """Append a named value with the first of ``of`` that leaves ``spare`` cells; nothing if the value does not fit."""
    if row.x + 2 + len(name) + 1 + len(value) > width:
        return
    row.put("  ").put(f"{name} ", "muted").put(value, "text")
    row.put(next((text for text in of if row.x + len(text) <= width - spare), ""), "muted")


def _again_ages(state: CacheState, pool: PoolFacts) -> tuple[int | None, int | None, int]:
    """How long ago its tier had evicted half, and 90 %, of the blocks that were asked for again; their number."""
    counts = state.totals.asked_again[pool.info.tier - 1]
    return age_within(counts, 0.5), age_within(counts, 0.9), sum(counts)


def _prefetched(state: CacheState, pool: PoolFacts) -> str:
    """The share of the blocks fetched ahead that was used, and the limit to probes. Empty but for the host tier."""
    precision = state.totals.prefetch_precision()
    if pool.info.tier is not Tier.G2 or precision is None:
        return ""
    return f"fetched {percent(round(100 * precision), 100)} used{', limited' if state.totals.prefetch_limited else ''}"


def _occupancy_row(desk: Desk, pools: list[PoolFacts], width: int) -> Line:
    seconds = window_of(desk.known_s)
    row = Row().put(" OCCUPANCY", "title").put(f" last {window_text(seconds)}", "muted")
    for pool in pools[:4]:
        gauge = desk.mirror.flows.occupancy.get(pool.info.pool)
        if gauge is not None:
            row.put(f"   {pool.info.tier.name} ", "muted")
            row.spans(desk.trend(gauge.last(seconds), 12, 1.0, pool.info.tier.name.lower()))
    return row.line("", width - 1)


def occupancy_charts(desk: Desk, pools: list[PoolFacts], width: int, number: int, rows: int) -> list[Line]:
    """The occupancy of the first pools, side by side in ``number`` equal parts of the width."""
    pitch = -(-(width + 1) // number)
    lines: list[Line] = []
    for index, pool in enumerate(pools[:number]):
        gauge = desk.mirror.flows.occupancy.get(pool.info.pool)
        values: list[float | None] = gauge.last(600) if gauge is not None else [None] * 600
        used = percent(pool.resident_blocks, desk.mirror.facts.capacity_of(pool))
        chart = bars.chart(f"{pool.info.tier.name} OCCUPANCY", used, values, desk.known_s, rows, pitch - 11,
                           desk.glyphs, pool.info.tier.name.lower())
        lines = beside(lines, chart, index * pitch)
    return lines


def pool_name(pool: PoolFacts, state: CacheState) -> str:
    """``G1 device``, for a stream the engine's name of the medium, and ``G1 e2 r1`` where several engines report."""
    info = pool.info
    if info.authority in WATCHED and any(
        other.info.tier is info.tier and other.info.authority is info.authority and other is not pool
        for other in state.pools
    ):
        return cut(f"{info.tier.name} e{info.source}" + (f" r{info.dp_rank}" if info.dp_rank else ""), 10)
    if pool.info.authority is Authority.STREAM:
        return cut(f"{pool.info.tier.name} {plain(pool.info.medium)}", 10)
    return f"{pool.info.tier.name} {MEDIA[pool.info.tier]}"


def used_role(pool: PoolFacts) -> str:
    """Caution when nearly nothing is left to give out."""
    capacity = pool.info.capacity_blocks
    free = pool.counts[Condition.EMPTY] + pool.counts[Condition.CACHED]
    return "caution" if capacity and free * 50 < capacity else "text"
