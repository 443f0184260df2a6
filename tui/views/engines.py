"""Engines: the reports of each real engine by its name, with blocks by medium, their use, losses and restarts.

Law of this file: a doubtful count has a question mark, and an unknown count is a dash. An engine that ended stays in
grey until a new engine takes its number.
"""

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from kvbm_console.core.eviction.auto import FOR_EVER_S
from kvbm_console.core.ids import Authority
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.stream.publishers import measure_texts

from ..desk import Desk
from ..draw.spans import Line, Row
from ..model.numbers import UNKNOWN, count, cut, cut_middle, per_second, percent, plain, plural, spoken, tenth
from ..model.series import Sums
from ..model.sources import TapCost, pools_of, uncertain, watched

NAME_WIDTH = 32
BLOCKS_WIDTH = 12
"""Cells of a count of blocks with its capacity; a longer text leaves the capacity out, which stands above."""
TREND_CELLS = 12


class Piece(NamedTuple):
    """A few words of a row that may move to the next row."""

    text: str
    role: str = "muted"


def engines_section(desk: Desk, state: CacheState, width: int) -> list[Line]:
    """Every engine with its pools; nothing on a target that no real engine has reported to."""
    numbers = watched(state)
    if not numbers:
        return []
    head = Row().put(" ENGINES", "title").put(f"   {count(len(numbers))}", "muted")
    for name, end, least in _COLUMNS:
        if width > least:
            head.right(name, end, "faint")
    lines = [head.line("" if desk.tall else "bar", width)]
    for source in numbers:
        lines += _engine(desk, state, source, width)
    return lines


_COLUMNS = (("blocks", 37, 0), ("reusable", 47, 0), ("only here", 58, 0), ("stored/s", 68, 69), ("evict/s", 77, 78))
"""Name and end of each column, and the width up to which the column is left out."""


def engine_name(desk: Desk, source: int) -> str:
    """The engine's name from the daemon, else its number; a recording has numbers only."""
    told = desk.mirror.sources.told.get(source)
    return plain(told.name) if told is not None and told.name else f"engine {source}"


def rank_of(state: CacheState, source: int) -> int | None:
    """The engine's data-parallel rank; None without a rank, and for an engine that reports for several ranks."""
    ranks = {pool.info.dp_rank for pool in pools_of(state, source)}
    return ranks.pop() if len(ranks) == 1 else None


def _engine(desk: Desk, state: CacheState, source: int, width: int) -> list[Line]:
    over = state.has_ended(source)
    pieces = [Piece(cut_middle(engine_name(desk, source), NAME_WIDTH), "strong")]
    rank = rank_of(state, source)
    if rank is not None:
        pieces.append(Piece(f"rank {rank}", "text"))
    twin = state.tapped_as(source)
    if twin is not None:
        pieces.append(Piece(f"the same engine as {cut_middle(engine_name(desk, twin), NAME_WIDTH)}, counted once"))
    pieces += _history(desk, state, source)
    lines = _wrapped(pieces, width, "stale" if over else "")
    numbers = _numbers(desk, state, source)
    lines += _wrapped(numbers, width, "stale" if over else "", indent=3) if numbers else []
    pools = pools_of(state, source)
    if any(pool.info.authority is Authority.OBSERVED for pool in pools):
        lines += _wrapped(_cost(desk, source), width, "stale" if over else "", indent=3)
        for pieces in _connectors(state, source):
            lines += _wrapped(pieces, width, "stale" if over else "", indent=3)
    return lines + [_pool(desk, state, pool, width, told=rank is None) for pool in pools]


def _history(desk: Desk, state: CacheState, source: int) -> list[Piece]:
    """The reliability of the engine's reports: losses, restarts, and the time since its last report."""
    seen, told = desk.mirror.sources.of(source), desk.mirror.sources.told.get(source)
    following = told.following if told is not None else None
    pieces = []
    if state.has_ended(source):
        pieces.append(Piece("ended, nothing more is heard of it"))
    elif uncertain(state, source):
        pieces.append(Piece("? reports lost or unclear: doubtful until a full clear or a restart", "caution"))
    gaps = max(seen.gaps, state.lost_sources.get(source, 0))
    restarts = seen.restarts
    if following is not None:
        lost = f", {plural(following.lost_batches, 'report')} lost" if following.lost_batches else ""
        gaps, restarts = following.gaps, following.restarts
        pieces.append(Piece((plural(gaps, "gap") if gaps else "no gap") + lost, "caution" if gaps else "muted"))
        pieces.append(Piece(f"incarnation {restarts + 1}", "caution" if restarts else "muted"))
        if not following.connected:
            pieces.append(Piece("not connected", "caution"))
    else:
        pieces.append(Piece(f"{plural(gaps, 'gap')} seen" if gaps else "no gap seen", "caution" if gaps else "muted"))
        if restarts:
            pieces.append(Piece(f"{plural(restarts, 'restart')} seen", "caution"))
    if seen.clears:
        pieces.append(Piece(f"cleared {seen.clears} ×"))
    if seen.last_ns is not None:
        pieces.append(Piece(f"last report {spoken(max(0, desk.now_ns - seen.last_ns))} ago"))
    return pieces


def measured_values(state: CacheState, source: int) -> dict[str, int]:
    """The engine's own numbers by label; empty if they are unknown."""
    known = state.measured.get(source)
    return {} if known is None else {measure.label: value for measure, value in known.values.items()}


def _numbers(desk: Desk, state: CacheState, source: int) -> list[Piece]:
    """The engine's own metrics, or the reason why they are unknown; nothing for a tapped engine."""
    pools = pools_of(state, source)
    if pools and not any(pool.info.authority is Authority.STREAM for pool in pools):
        return []
    texts = measure_texts(measured_values(state, source))
    if texts:
        return [Piece(text, "strong" if subject == "hits" else "text") for subject, text in texts]
    told = desk.mirror.sources.told.get(source)
    following = told.following if told is not None else None
    if state.has_ended(source) or following is None:
        return []
    if following.metrics is None:
        return [Piece("no metrics: attach to http://HOST:PORT, or add metrics=PORT to the address")]
    return [Piece(f"no metrics: {plain(following.metrics_error or 'none read yet')}", "caution")]


def _cost(desk: Desk, source: int) -> list[Piece]:
    """The cost of the tap to its engine, and its dropped reports."""
    told = desk.mirror.sources.told.get(source)
    cost = told.cost if told is not None else None
    if cost is None:
        why = "a recording does not hold" if desk.recording else "the daemon has not told"
        return [Piece(f"tap: {why} its cost")]
    call = f"{cost.call_ns / cost.calls / 1_000:.1f} µs a call" if cost.calls else f"{UNKNOWN} a call"
    part = f"{100 * cost.call_ns / cost.step_ns:.2f} % of a step" if cost.step_ns else f"{UNKNOWN} of a step"
    step = f"step {spoken(cost.step_ns // cost.steps)}" if cost.steps else f"step {UNKNOWN}"
    return [
        Piece(f"tap: {call}, {part}", "text"),
        Piece(f"{count(cost.dropped)} dropped", "caution" if cost.dropped else "muted"),
        Piece(plural(cost.errors, "error"), "caution" if cost.errors else "muted"),
        Piece(step), Piece(plural(cost.calls, "call")), *_audits(cost), *_checks(cost),
    ]


EVICTION = "eviction "
"""Beginning of the figures of our eviction policies in vLLM's host tier (``tap.vllm_policy``)."""
SLOW_CALL_NS = 100_000_000
"""A call into a connector that is shown as a caution: it delayed every running request by several steps."""


def _connectors(state: CacheState, source: int) -> Iterator[list[Piece]]:
    """The calls into each connector of a tapped engine, the longest call first, and the connectors' own figures."""
    known = state.connectors.get(source)
    if known is None:
        return
    rows = list(zip(known.connectors, known.methods, known.calls, known.total_ns, known.longest_ns, strict=True))
    for name in dict.fromkeys(known.connectors):
        mine = sorted((row for row in rows if row[0] == name), key=lambda row: -row[4])
        calls, total_ns = sum(row[2] for row in mine), sum(row[3] for row in mine)
        each = f"{spoken(total_ns // calls)} each" if calls else f"{UNKNOWN} each"
        _, method, _, _, longest_ns = mine[0]
        yield [
            Piece(f"{plain(name)}: {plural(calls, 'call')}, {each}", "text"),
            Piece(
                f"longest {spoken(longest_ns)} in {plain(method)}", "caution" if longest_ns >= SLOW_CALL_NS else "muted"
            ),
        ]
    figures = {name: value for name, value in zip(known.stats, known.values, strict=True) if isfinite(value)}
    policy = {name.removeprefix(EVICTION): figures.pop(name) for name in list(figures) if name.startswith(EVICTION)}
    if policy:
        yield _eviction(policy)
    if figures:
        yield [
            Piece(f"{plain(name)} {count(int(value)) if value == int(value) else f'{value:.3g}'}")
            for name, value in figures.items()
        ]


def _eviction(policy: dict[str, float]) -> list[Piece]:
    """The choice of our eviction policy in an engine's host tier, by its gauges."""
    half_life_s, weight, fits = policy.get("half_life_s"), policy.get("weight"), policy.get("fits")
    if fits is not None:
        rule = f"as learned in {plural(int(fits), 'fit')}" if fits else "by recency, until it has learned"
    elif not half_life_s and not weight:
        rule = "by recency"
    elif weight is not None and weight < 1:
        rule = f"by recency and uses, of which uses weigh {weight:g}"
    elif half_life_s is not None and half_life_s < FOR_EVER_S:
        rule = f"by uses, which count half after {half_life_s:g} s"
    else:
        rule = "by uses"
    pieces = [Piece(f"host tier evicts {rule}", "text")]
    if "changes" in policy:
        pieces.append(Piece(plural(int(policy["changes"]), "change")))
    if "ghosts" in policy:
        pieces.append(Piece(f"{count(int(policy['ghosts']))} of {count(int(policy['ghosts_max']))} evicted remembered"))
    return pieces


def _audits(cost: TapCost) -> list[Piece]:
    """The places of the engine's own pool that were compared with ours."""
    if cost.audited_places is None:
        return []
    wrong = cost.differing_places
    return [
        Piece(f"{plural(cost.audited_places, 'place')} audited"),
        Piece(f"{count(wrong)} differed", "fault" if wrong else "muted"),
    ]


def _checks(cost: TapCost) -> list[Piece]:
    """The blocks whose bytes were compared, of an engine with ``sanitize``."""
    if cost.checked_blocks is None:
        return []
    wrong = cost.mismatched_blocks
    return [
        Piece(f"bytes of {plural(cost.checked_blocks, 'block')} checked"),
        Piece(f"{count(wrong)} wrong", "fault" if wrong else "muted"),
    ]


def legend(width: int) -> Line:
    """The meaning of the shares."""
    text = " reusable: full blocks, each hash once; only here: on no nearer medium"
    more = "; whether the blocks in front of one are there, too, no report says"
    return Row().put(text + (more if width > len(text + more) else ""), "faint").line("", width)


def _wrapped(pieces: list[Piece], width: int, role: str, indent: int = 1) -> list[Line]:
    """Pieces in rows; pieces that do not fit go to the next row."""
    lines: list[Line] = []
    row = Row().put(" " * indent)
    start = row.x
    for piece in pieces:
        gap = 3 if row.x > start else 0
        if gap and row.x + gap + len(piece.text) > width - 1:
            lines.append(row.line("", width))
            row, gap = Row().put(" " * (indent + 2)), 0
            start = row.x
        row.put(" " * gap).put(cut(piece.text, max(1, width - 1 - row.x)), role or piece.role)
    return [*lines, row.line("", width)]


def medium_name(pool: PoolFacts, *, rank: bool) -> str:
    """``G2 CPU_PINNED``, with the rank where an engine speaks for several, the group where a model has some, and the
    attention window of its layers."""
    info = pool.info
    name = f"{info.tier.name} {plain(info.medium)}"
    name += (f" rank {info.dp_rank}" if rank else "") + (f" group {info.group}" if info.group else "")
    return name + (f" window {info.window}" if info.window else "")


def _pool(desk: Desk, state: CacheState, pool: PoolFacts, width: int, *, told: bool) -> Line:
    flows, now, source = desk.mirror.flows, desk.now_ns, pool.info.source
    over, doubt = state.has_ended(source), uncertain(state, source)
    role = "stale" if over else "caution" if doubt else "text"
    row = Row().put("   ").put(cut(medium_name(pool, rank=told), 26), "stale" if over else "text")
    mark = "?" if doubt else ""
    resident = pool.resident_blocks
    found, own = desk.mirror.sources.shares(state, pool)
    stored, evicted = flows.stored.get(pool.info.pool), flows.evicted.get(pool.info.pool)
    heard = desk.mirror.sources.of(source).last_ns is not None or (
        pool.info.authority is Authority.OBSERVED and len(desk.mirror.steps) > 0)

    def rate(of: Sums | None) -> str:
        """The text of a rate: 0 for an engine that has reported, unknown before its first report."""
        if over:
            return UNKNOWN
        told = per_second(of.rate(now) if of is not None else 0.0 if heard else None)
        return flows.about(now) + told if of is not None else told

    capacity = state.capacity_of(pool)
    whole = "" if capacity is None else f"/{count(capacity)}"
    held = count(resident) + mark
    values = (
        UNKNOWN if over else held + whole if len(held + whole) <= BLOCKS_WIDTH else held,
        UNKNOWN if over or found is None or not resident else percent(found, resident) + mark,
        UNKNOWN if over or own is None or not resident else f"{tenth(own, resident)} %{mark}",
        rate(stored), rate(evicted),
    )
    for value, (_, end, least) in zip(values, _COLUMNS, strict=True):
        if width > least:
            row.right(value, end, role)
    if width >= 80 + TREND_CELLS and stored is not None and not over:
        row.to(80).spans(desk.trend(stored.last(60, now), TREND_CELLS))
    return row.line("", width)
