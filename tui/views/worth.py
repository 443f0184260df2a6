"""Does a tier pay, and is it too small: seconds against seconds, and the miss-ratio curve with "you are here".

Law of this file: an estimate has ``~`` or its error, and a figure without data is a dash.
"""

from typing import Final

import msgspec

from kvbm_console.core.curves import SampledRate
from kvbm_console.core.ids import EvictRule, Tier, age_within
from kvbm_console.core.state import CacheState

from ..desk import Desk
from ..draw.spans import Line, Row
from ..model.fates import Fate
from ..model.numbers import brief, count, duration, plural, spoken, tenth
from ..model.worth import TierWorth, worth_of

CURVE_ROWS: Final = 6
RULES: Final = {
    EvictRule.REASSIGNED: "place given to another", EvictRule.RECENCY: "used longest ago",
    EvictRule.STREAM: "by the engine", EvictRule.FREQUENCY: "used least",
}
AROUND: Final = 2
"""The chart ends at this many times all tiers."""


def worth_section(desk: Desk, state: CacheState, width: int) -> list[Line]:
    """Whether each lower tier pays: blocks down and back, tokens that need not be computed, seconds of both sides."""
    found = worth_of(state, desk.mirror.prices)
    if not found:
        return []
    if not desk.tall:
        return [next((line for line in (_short(found, prices) for prices in PRICES) if line.width <= width),
                     _short(found, ""))]
    lines = [desk.title("DOES IT PAY", "since the run began, at the prices seen here")]
    for worth in found:
        row = Row().put(f" {worth.tier.name} ", "muted").put(worth.verdict, _role(worth))
        told = f"   {brief(worth.down_blocks)} down {brief(worth.back_blocks)} back"
        if worth.found_tokens:
            saved, copying = _seconds(worth)
            paid = f"{saved} for {copying} of copies"
            full = f"{told}, {brief(worth.found_tokens)} tokens found: {paid}"
            told = full if row.x + len(full) < width else f"{told}, {paid}"
        lines.append(row.put(told, "text").line("", width))
    return lines


PRICES: Final = (", {} for {} of copies", ", {} for {}", "")
"""Forms of the seconds saved and spent, the longest first."""


def _short(found: list[TierWorth], prices: str) -> Line:
    """All tiers in a row."""
    row = Row().put(" PAYS", "title")
    for worth in found:
        row.put(f"   {worth.tier.name} ", "muted").put(worth.verdict, _role(worth))
        row.put(prices.format(*_seconds(worth)) if worth.found_tokens else "", "text")
    return row.line("bar")


def _seconds(worth: TierWorth) -> tuple[str, str]:
    """Saved, and spent on copies; ``~`` before estimates."""
    about = "~" if worth.about else ""
    saved, copying = (
        duration(None) if ns is None else about + duration(int(ns)) for ns in (worth.saved_ns, worth.copying_ns))
    return saved, copying


def _role(worth: TierWorth) -> str:
    if worth.saved_ns is None or worth.copying_ns is None or not worth.down_blocks:
        return "muted"
    return "ok" if worth.verdict == "pays" else "caution"


# --- the curve -------------------------------------------------------------------------------------------------------


class _Point(msgspec.Struct, frozen=True):
    """The hit rate of an LRU cache as large as a tier and all nearer ones, and with this tier doubled."""

    tier: Tier
    capacity: int
    rate: SampledRate
    doubled: SampledRate


def points_of(desk: Desk, state: CacheState) -> list[_Point]:
    """A point for each tier whose capacity is known, near tiers first."""
    curve, total, points = desk.mirror.fates.curve, 0, []
    for tier in Tier:
        own = sum(state.capacity_of(pool) or 0 for pool in state.living(state.pools) if pool.info.tier is tier)
        total += own
        here, doubled = curve.at(total), curve.at(total + own)
        if own and here is not None and doubled is not None:
            points.append(_Point(tier, total, here, doubled))
    return points


def curve_section(desk: Desk, state: CacheState, width: int) -> list[Line]:
    """Is a tier too small: the hit rate against capacity, with the present tiers on it and what doubling brings."""
    fates = desk.mirror.fates
    points = points_of(desk, state)
    if not points:
        return []
    since = 0 if fates.since_ns is None else desk.now_ns - fates.since_ns
    basis = f"% found by LRU over {plural(fates.asked, 'prompt block')} of {spoken(since)}"
    if desk.mirror.coverage.passed:
        basis += "; sampled: passed over admissions are missing"
    lines = [desk.title("CURVE", basis)]
    row = Row().put(" ")
    for point in points:
        name = point.tier.name if point is points[0] else f"+{point.tier.name}"
        told = Row().put(f"{name} ", "muted").put(_percent(point.rate.hit_rate), "text")
        told.put(f"{_error(point.rate)} 2x ", "muted")
        gain = point.doubled.hit_rate - point.rate.hit_rate
        told.put(f"+{_percent(gain)}", "caution" if gain >= 0.05 else "text")
        if row.x + told.x <= width:
            row.add(told.line()).put("   ")
    hits = sum(fates.blocks[fate] for fate in (Fate.G1, Fate.G2, Fate.G3, Fate.G4))
    measured = tenth(hits, fates.asked)
    if row.x + len(measured) + 9 < width:
        row.put("measured ", "muted").put(measured, "text")
    lines.append(row.line("", width))
    return [*lines, *_chart(desk, points, width)] if desk.tall else lines


def _percent(share: float) -> str:
    return f"{int(1_000 * share + 1e-9) / 10:.1f}"


def _error(rate: SampledRate) -> str:
    return f" ±{_percent(rate.error + 0.00099)}" if rate.error else ""


def _chart(desk: Desk, points: list[_Point], width: int) -> list[Line]:
    """The curve as columns, and below it the capacities of the tiers."""
    cells = min(width - 8, 120)
    most = AROUND * points[-1].capacity
    capacities = [max(1, (cell + 1) * most // cells) for cell in range(cells)]
    levels = [int(rate * CURVE_ROWS * 8) for rate in desk.mirror.fates.curve.hit_rates(capacities)]
    here = {min(cells - 1, max(0, point.capacity * cells // most - 1)) for point in points}
    lines = []
    for row in range(CURVE_ROWS):
        base = (CURVE_ROWS - 1 - row) * 8
        line = Row().right("100" if row == 0 else "0" if row == CURVE_ROWS - 1 else "", 5, "faint").put(" ")
        for cell, level in enumerate(levels):
            text = desk.glyphs.eighths[min(8, level - base) - 1] if level > base else " "
            line.put(text, "text" if cell in here else "trend")
        lines.append(line.line("", width))
    marks = Row()
    for point in points:
        cell = 6 + min(cells - 1, max(0, point.capacity * cells // most - 1))
        text = f"{desk.glyphs.cursor_top} {'you are here: all tiers' if point is points[-1] else point.tier.name}"
        if marks.x <= cell:
            marks.to(cell).put(text, "text").put(f" {brief(point.capacity)}  ", "muted")
    marks.right(f"{AROUND}x {brief(most)}", 6 + cells, "faint") if marks.x < cells - 8 else marks
    return [*lines, marks.line("", width)]


# --- evictions -------------------------------------------------------------------------------------------------------


def evictions_row(desk: Desk, state: CacheState, tier: Tier, width: int) -> Line:
    """The evictions of a tier by cause, and by how soon a prompt asked for the block again; narrow, fewer ages."""
    return next((line for line in (
        _evictions(desk, state, tier, parts) for parts in (2, 1, 0)
    ) if line.width < width), _evictions(desk, state, tier, -1))


def _evictions(desk: Desk, state: CacheState, tier: Tier, parts: int) -> Line:
    """The row with as many ages, at most 2; below 0 without the causes, too."""
    causes, evicted = desk.mirror.fates.evicted[tier], state.totals.evicted_blocks[tier - 1]
    row = Row().put(" evicted ", "muted").put(count(evicted), "text")
    for rule, blocks in causes.most_common() if parts >= 0 else ():
        row.put(f"  {RULES[rule]} ", "muted").put(brief(blocks), "text")
    unknown = evicted - sum(causes.values())
    if unknown and parts >= 0:
        row.put("  cause not seen ", "muted").put(brief(unknown), "text")
    again = state.totals.asked_again[tier - 1]
    row.put("   asked again ", "muted")
    if not sum(again):
        return row.put("–", "text").line()
    row.put(count(sum(again)), "text").put(f", {tenth(sum(again), evicted)} %" if evicted else "", "text")
    if parts >= 1:
        row.put(": half within ", "muted").put(duration(age_within(again, 0.5)), "text")
    if parts == 2:
        row.put(", 90 % within ", "muted").put(duration(age_within(again, 0.9)), "text")
    return row.line()
