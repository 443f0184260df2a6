"""Blocks: what an event stream tells without requests: queue, hit rate over time, prefixes, lifetimes and waste.

These sections stand in the views that need requests (``View.streamed``), and below the engines in view 6.

Law of this file: a number of the engine's own metrics and an estimate are named as such. An unknown number is a dash.
"""

from kvbm_console.core.ids import Measure
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import UNKNOWN_NS, PoolFacts
from kvbm_console.stream.publishers import hit_share, measure_texts

from ..desk import Desk
from ..draw import bars
from ..draw.spans import BLANK, Line, Row, beside
from ..model.numbers import UNKNOWN, count, cut, per_second, percent, plain, plural, spoken, tenth
from ..model.prefixes import PrefixForest, PrefixRun, prefix_forest, streamed_pools
from ..model.sources import uncertain, watched
from .engines import engine_name, measured_values, medium_name

CURVE = (1.25, 1.5, 2, 4, 8)
"""Sizes of a tier, as multiples of the present size, of which the curve tells."""
MAP_ROWS = 10
INDENT_MAX = 6
WASTE_NS = 50 * 10**9
"""A block that is stored again within this time of its eviction is waste; one of ``AGE_BOUNDS_NS``."""


def live_sources(state: CacheState) -> list[int]:
    """The engines that go on; all of them where every engine ended."""
    sources = watched(state)
    return [source for source in sources if not state.has_ended(source)] or sources


# --- the queue and the hit rate ---


def queue_section(desk: Desk, state: CacheState, width: int) -> list[Line]:
    """The requests of each engine by its own metrics: running, waiting, preempted, hit rate, first token."""
    lines = [desk.title("REQUESTS", "from the engine's own metrics; a stream names none of them")]
    head = Row().put(" ENGINE", "faint")
    for name, end in _QUEUE:
        head.right(name, end, "faint")
    lines.append(head.line("", width))
    for source in live_sources(state):
        values = measured_values(state, source)
        hits = hit_share(values)
        first = values.get("first_token_ns")
        row = Row().put(" ").put(cut(engine_name(desk, source), 20), "strong")
        texts = (
            *(count(values.get(name)) for name in ("running", "waiting", "preemptions")),
            UNKNOWN if "used_ppm" not in values else f"{tenth(values['used_ppm'], 1_000_000)} %",
            UNKNOWN if hits is None else f"{tenth(hits[0], hits[1])} %",
            UNKNOWN if first is None else spoken(first),
        )
        for text, (_, end) in zip(texts, _QUEUE, strict=True):
            row.right(text, end, "text")
        lines.append(row.line("", width))
    return lines


_QUEUE = (("running", 30), ("waiting", 39), ("preempted", 50), ("in use", 58), ("hit rate", 68), ("1st token", 79))


def history_section(desk: Desk, state: CacheState, width: int, height: int) -> list[Line]:
    """Hit rate and use over ten minutes, then running, waiting, stored and evicted over the last minutes, by engine.
    Engines without room are counted."""
    lines: list[Line] = []
    sources = live_sources(state)
    for at, source in enumerate(sources):
        engine = _history(desk, state, source, width, height)
        if lines and len(lines) + len(engine) + (at + 1 < len(sources)) > height:
            told = f" +{plural(len(sources) - at, 'engine')} without room"
            return [*lines[: height - 1], Row().put(told, "muted").line("", width)]
        lines += engine
    return lines[:height]


def _history(desk: Desk, state: CacheState, source: int, width: int, height: int) -> list[Line]:
    """The charts of one engine."""
    lines: list[Line] = []
    gauges = desk.mirror.flows.measured.get(source)
    values = measured_values(state, source)
    lines.append(Row().put(" ").put(cut(engine_name(desk, source), width - 2), "title").line("", width))
    hits = hit_share(values)
    rate = UNKNOWN if hits is None else f"{tenth(hits[0], hits[1])} %"
    used = UNKNOWN if "used_ppm" not in values else f"{tenth(values['used_ppm'], 1_000_000)} %"
    rows = 5 if height >= 30 else 3
    charts = []
    for title, value, measure in (("HIT RATE", rate, Measure.HIT_TOKENS), ("IN USE", used, Measure.USED_PPM)):
        gauge = gauges.get(measure) if gauges is not None else None
        shares = gauge.last(600) if gauge is not None else [None] * 600
        charts.append(bars.chart(title, value, shares, desk.known_s, rows, width // 2 - 10, desk.glyphs))
    lines += beside(charts[0], charts[1], width // 2)
    cells = max(10, width - 40)
    for name, measure in (("running", Measure.RUNNING), ("waiting", Measure.WAITING)):
        gauge = gauges.get(measure) if gauges is not None else None
        row = Row().put(f" {name}", "muted").to(11).right(count(values.get(name)), 20)
        if gauge is not None:
            row.to(22).spans(desk.trend(gauge.last(300), cells))
        lines.append(row.line("", width))
    for pool in streamed_pools(state, source):
        for name, flow in (("stored", desk.mirror.flows.stored), ("evicted", desk.mirror.flows.evicted)):
            sums = flow.get(pool.info.pool)
            row = Row().put(f" {pool.info.tier.name} {name}", "muted")
            row.to(11).right(per_second(sums.rate(desk.now_ns) if sums is not None else 0.0) + "/s", 20)
            if sums is not None:
                row.to(22).spans(desk.trend(sums.last(300, desk.now_ns), cells))
            lines.append(row.line("", width))
    return lines


# --- lifetimes, waste, the curve ---


def lives_section(desk: Desk, state: CacheState, width: int) -> list[Line]:
    """How long blocks lived, how many were stored again, and how many a larger tier would have kept."""
    lines = [desk.title("LIVES", "from a block's store to its eviction")]
    pools = [pool for source in watched(state) if not state.has_ended(source) for pool in streamed_pools(state, source)]
    for pool in pools:
        lines += _lives(desk, state, pool, width)
    if len(lines) == 1:
        return [*lines, Row().put(" No block is known yet.", "muted").line("", width)]
    if not any(kept_by(state, pool) for pool in pools):
        return lines
    text = " larger: an LRU tier of that size; a smaller tier is unknown"
    more = ", because hits on resident blocks are silent"
    lines.append(Row().put(text + (more if width > len(text + more) else ""), "faint").line("", width))
    return lines


def _lives(desk: Desk, state: CacheState, pool: PoolFacts, width: int) -> list[Line]:
    chains = pool.chains
    if chains is None:
        return []
    mark = "?" if uncertain(state, pool.info.source) else ""
    ended, stored, again = sum(chains.lived), chains.stored_blocks, sum(chains.again.values())
    half, most = chains.lived_within(0.5), chains.lived_within(0.9)
    row = Row().put("   ").put(cut(medium_name(pool, rank=False), 14), "text").to(17)
    if not ended:
        row.put("nothing evicted yet", "muted")
        return [row.line("", width)]
    row.put(f"half lived under {spoken(half)}, 90 % under {spoken(most)}{mark}", "text")
    row.put(f" of {plural(ended, 'eviction')}", "muted")
    lines = [row.line("", width)]
    soon = chains.again_within(WASTE_NS)
    row = Row().to(17).put(f"stored again {percent(again, stored)}{mark}", "caution" if 4 * again > stored else "text")
    told = f" of {count(stored)}, {count(soon)} within {spoken(WASTE_NS)}"
    more = " of the eviction"
    row.put(told + (more if row.x + len(told + more) < width else ""), "muted")
    lines.append(row.line("", width))
    kept = kept_by(state, pool)
    if kept:
        row = Row().to(17).put("larger", "muted")
        for factor, blocks in kept:
            row.put(f"  {factor:g}x ", "muted").put(f"{percent(blocks, stored)}{mark}", "text")
        lines.append(row.put(" kept", "muted").line("", width))
    return lines


def kept_by(state: CacheState, pool: PoolFacts) -> list[tuple[float, int]]:
    """(size as a multiple of the present size, stored blocks that an LRU tier of that size would have kept)."""
    chains = pool.chains
    size = state.capacity_of(pool) or pool.resident_blocks
    if chains is None or not chains.again or not size:
        return []
    return [
        (factor, sum(blocks for (_, evictions), blocks in chains.again.items() if evictions <= (factor - 1) * size))
        for factor in CURVE
    ]


def tiers_section(desk: Desk, state: CacheState, width: int) -> list[Line]:
    """The blocks that each tier stored and evicted, the hits below the device, and the lives of blocks."""
    lines = [desk.title("TIERS", "stores and evictions; a stream names no copy")]
    head = Row().put(" TIER", "faint")
    for name, end in (("blocks", 32), ("stored", 43), ("evicted", 54), ("stored/s", 63), ("evict/s", 72)):
        head.right(name, end, "faint")
    lines.append(head.line("", width))
    flows = desk.mirror.flows
    for source in live_sources(state):
        for pool in streamed_pools(state, source):
            chains, mark = pool.chains, "?" if uncertain(state, source) else ""
            rates = [flow.get(pool.info.pool) for flow in (flows.stored, flows.evicted)]
            row = Row().put(" ").put(cut(medium_name(pool, rank=False), 20), "text")
            row.right(count(pool.resident_blocks) + mark, 32)
            if chains is not None:
                row.right(count(chains.stored_blocks) + mark, 43).right(count(sum(chains.lived)) + mark, 54)
            for sums, end in zip(rates, (63, 72), strict=True):
                row.right(per_second(sums.rate(desk.now_ns)) if sums is not None else "0", end)
            lines.append(row.line("", width))
        below = [text for subject, text in measure_texts(measured_values(state, source)) if subject == "below"]
        lines += [Row().put(f" {text}", "text").line("", width) for text in below]
    return [*lines, *([BLANK] if desk.tall else []), *lives_section(desk, state, width)]


# --- prefixes ---


def prefix_section(desk: Desk, state: CacheState, width: int, height: int, *, drawn: bool) -> list[Line]:
    """The trees of prefixes of each engine: as a map if ``drawn``, then as a list."""
    lines: list[Line] = []
    sources = live_sources(state)
    for source in sources:
        forest = _forest(desk, state, source)
        room = max(4, height // max(1, len(sources)))
        if forest is None:
            lines.append(Row().put(" PREFIXES", "title").put("   too many blocks to draw", "muted").line("", width))
            continue
        branches = plural(len(forest.roots), "prefix", "prefixes")
        told = f"{branches} of {engine_name(desk, source)}, {plural(forest.blocks, 'block')}"
        if forest.unreachable:
            told += f", {count(forest.unreachable)} in circles of a broken stream"
        lines.append(desk.title("PREFIXES", cut(told, width - 14)))
        if drawn and forest.roots:
            lines += _map(desk, forest, width, min(MAP_ROWS, max(3, room // 3)))
            lines.append(Row().put(" width: blocks, with those behind; depth: position in the prompt", "faint")
                         .line("", width))
        lines += _list(desk, forest, width, max(2, room - len(lines)))
    return lines


def _forest(desk: Desk, state: CacheState, source: int) -> PrefixForest | None:
    """The forest, made again at most once a second: a large one takes a tenth of a second."""
    known = desk.forests.get(source)
    at = id(state), desk.mono() // 10**9 if not desk.recording else state.seq
    if known is None or known[0] != at:
        known = desk.forests[source] = at, prefix_forest(state, source)
    return known[1]


def _map(desk: Desk, forest: PrefixForest, width: int, rows: int) -> list[Line]:
    """A flame graph: each run as wide as its share of the blocks, its continuations below it."""
    lines = []
    level: list[tuple[int, int, PrefixRun]] = _divided(forest.roots, 1, width - 2)
    for _ in range(rows):
        if not level:
            break
        row = Row()
        below: list[tuple[int, int, PrefixRun]] = []
        for start, cells, run in level:
            label = cut(f" {count(run.blocks)}{' ' + run.context if run.context else ''}", cells - 1)
            label = label if cells >= 6 else ""
            row.to(start).put(label, "strong")
            row.put(desk.glyphs.prompt[run.tier] * (cells - len(label) - (cells > 2)), f"fill.{run.tier.label}")
            below += _divided(run.next, start, round(cells * (run.total - run.blocks) / run.total))
        lines.append(row.line("", width))
        level = below
    return lines


def _divided(runs: list[PrefixRun], start: int, cells: int) -> list[tuple[int, int, PrefixRun]]:
    """(start, cells, run) of runs beside each other; those below a cell are left out, the list counts them."""
    if not runs or cells < 1:
        return []
    shown = runs[:cells]
    placed = []
    for run, part in zip(shown, bars.divide([run.total for run in shown], cells), strict=True):
        if part:
            placed.append((start, part, run))
        start += part
    return placed


def _list(desk: Desk, forest: PrefixForest, width: int, rows: int) -> list[Line]:
    """The runs with the most blocks behind them, in the order of their trees."""
    if not forest.roots:
        return [Row().put(" No block is known yet.", "muted").line("", width)]
    runs = list(forest.runs())
    chosen = {id(run) for run in sorted(runs, key=lambda run: -run.total)[: max(1, rows - 2)]}
    head = Row().put(" PREFIX", "faint")
    for name, end in (("depth", 32), ("blocks", 40), ("behind", 48), ("branches", 57), ("newest", 66)):
        head.right(name, end, "faint")
    lines = [head.to(68).put("context", "faint").line("", width)]
    inside: dict[int, int] = {}
    for run in runs:
        level = inside.get(id(run), 0)
        inside |= {id(child): level + 1 for child in run.next}
        if id(run) not in chosen:
            continue
        row = Row().put(" " * (1 + min(INDENT_MAX, level)))
        row.put(desk.glyphs.prompt[run.tier], f"fill.{run.tier.label}").put(f" {run.first:016x}", "text")
        row.right(count(run.depth), 32, "faint").right(count(run.blocks), 40)
        row.right(count(run.total - run.blocks), 48).right(count(len(run.next)), 57)
        age = UNKNOWN if run.stored_ns == UNKNOWN_NS else spoken(max(0, desk.now_ns - run.stored_ns))
        row.right(age, 66, "muted").to(68)
        words = plain(run.context) + (" parent gone" if run.continues else "")
        lines.append(row.put(cut(words.strip(), max(0, width - 69)), "muted").line("", width))
    left = len(runs) - len(chosen)
    if left:
        lines.append(Row().put(f" +{count(left)} more runs", "muted").line("", width))
    return lines
