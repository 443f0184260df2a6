"""Misses: what became of the prompt blocks, over time and by culprit.

Law of this file: the bands of a column add up to the blocks that were asked for in its time.
"""

from itertools import groupby
from typing import Final

from kvbm_console.core.ids import Tier

from ..desk import Desk, View
from ..draw import bars
from ..draw.frame import Hint
from ..draw.spans import BLANK, Line, Row, Span
from ..draw.table import MOVES, Table, moved
from ..model.fates import Blame, Fate, Fates
from ..model.numbers import (
    UNKNOWN,
    S,
    brief,
    count,
    cut,
    cut_middle,
    duration,
    plain,
    plural,
    rest_shares,
    shares,
    size,
    spoken,
    tenth,
)
from ..model.series import window_text

NAMES: Final = {
    Fate.G1: ("G1", "found on the device"),
    Fate.G2: ("G2", "found in host memory"),
    Fate.G3: ("G3", "found on disk"),
    Fate.G4: ("G4", "found in remote storage"),
    Fate.UNUSABLE: ("not usable", "there, behind a missing block, or the last block of a prompt"),
    Fate.LATE: ("not in time", "on its way to a tier when it was asked for"),
    Fate.NOT_OFFLOADED: ("not offloaded", "evicted from the device before a lower tier had a copy"),
    Fate.EVICTED: ("evicted", "evicted from the last tier that had it"),
    Fate.UNSEEN: ("never seen", "not stored before, as far as this console saw"),
}
CHART_MAX: Final = 48
"""Rows of the chart; a screen of 60 rows is full then."""
ROLES: Final = {
    Fate.G1: "g1", Fate.G2: "g2", Fate.G3: "g3", Fate.G4: "g4", Fate.UNUSABLE: "initialized",
    Fate.LATE: "onboard", Fate.NOT_OFFLOADED: "caution", Fate.EVICTED: "seam", Fate.UNSEEN: "gone",
}
LETTERS: Final = "1234ultE."
"""A band without colours."""
MISSED: Final = (Fate.UNSEEN, Fate.EVICTED, Fate.NOT_OFFLOADED, Fate.LATE, Fate.UNUSABLE)
"""Fates that cost a computation, the most common first."""
WINDOWS_S: Final = (15, 30, 60, 120, 300, 600)
PAGE: Final = 10


def fates_row(desk: Desk, width: int) -> Line:
    """The misses of the last minute by their reasons, in percent of the blocks asked for.

    If this console did not see all of these misses, in percent of those that it saw, with their number.
    """
    series, now = desk.mirror.fates.series, desk.now_ns
    seen = [int(series[fate].total(60, now)) for fate in MISSED]
    asked, hits = desk.mirror.flows.hit_shares(now)
    missed = asked - sum(hits)
    row = Row().put(" misses  ", "muted")
    if not asked:
        return row.put(UNKNOWN, "text").line("", width)
    if sum(seen) != missed:
        row.put(f"of {count(sum(seen))} seen of {count(missed)}  ", "muted")
    parts = rest_shares(seen, asked) if sum(seen) == missed else shares(seen, sum(seen))[1]
    for fate, blocks, part in zip(MISSED, seen, parts, strict=True):
        text = f"{NAMES[fate][0]} "
        if blocks and row.x + len(text) + 16 < width:
            row.put(text, "muted").put(part, ROLES[fate] if fate is Fate.EVICTED else "text").put("  ")
    return row.put(" M", "key").put(" why", "muted").line("", width)


class Misses(View):
    """The panel behind ``M``."""

    needs_requests = "Misses are of requests: which blocks a prompt asked for, and which of them were there."
    words = (
        ("stay", "how long half of the blocks had lain in the tier before their eviction"),
        ("kept by", "the smallest LRU cache, of all tiers together, that would have kept them"),
        ("for", "the request that the room was made for"),
        ("times", "how often one of these blocks was missed"),
    )

    def __init__(self) -> None:
        self.at = 0
        self.open: Fate | None = None
        """The band whose culprits are listed."""
        self.top = 0
        self._count = 0

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The stacked chart, then the bands, or the culprits of one of them."""
        fates = desk.mirror.fates
        lines = [self._head(desk, fates, width)]
        if not fates.asked:
            return [*lines, Row().put(" No admission was seen yet.", "muted").line()]
        below = self._culprits(desk, fates, width) if self.open is not None else self._bands(desk, fates, width)
        room = height - 2 - desk.tall - min(len(below), max(11, height // 2))
        lines += [*chart(desk, width, max(3, min(room, CHART_MAX))), *([BLANK] if desk.tall else [])]
        left = height - len(lines)
        self.top = min(self.top, max(0, len(below) - left)) if self.open is not None else 0
        return [*lines, below[0], *below[1 + self.top :]][:height]

    def _head(self, desk: Desk, fates: Fates, width: int) -> Line:
        since = 0 if fates.since_ns is None else desk.now_ns - fates.since_ns
        hits = sum(fates.blocks[fate] for fate in (Fate.G1, Fate.G2, Fate.G3, Fate.G4))
        told = f"{plural(fates.asked, 'prompt block')} asked for in {spoken(since)}, {tenth(hits, fates.asked)} % found"
        row = Row().put(" FATE OF PROMPT BLOCKS", "title").put(f"   {told}", "text")
        if desk.mirror.coverage.passed:
            row.put("   sampled: admissions that were passed over are missing", "caution")
        return row.line("" if desk.tall else "bar", width)

    def _bands(self, desk: Desk, fates: Fates, width: int) -> list[Line]:
        shown = _shown(fates)
        self.at = min(self.at, max(0, len(shown) - 1))
        head = Row().put("     FATE", "faint").right("BLOCKS", 28, "faint").right("SHARE", 37, "faint").line("", width)
        lines = [head]
        for index, fate in enumerate(shown):
            name, meaning = NAMES[fate]
            row = Row().put(desk.glyphs.select if index == self.at else " ", "selbar")
            row.spans([_ink(desk, fate, 2)]).put(f"  {name}", "strong" if index == self.at else "text")
            row.right(count(fates.blocks[fate]), 28).right(f"{tenth(fates.blocks[fate], fates.asked)} %", 37)
            row.put(f"   {cut(meaning, width - 42)}", "muted").zone(0, ("row", index), width)
            lines.append(row.line("", width))
        return lines

    def _culprits(self, desk: Desk, fates: Fates, width: int) -> list[Line]:
        fate = self.open
        assert fate is not None
        if fate not in (Fate.EVICTED, Fate.NOT_OFFLOADED):
            return self._askers(fates, fate, width)
        blamed = fates.blamed(fate, desk.mirror.prefixes)
        self._count = len(blamed)
        head = Row().put(f" {NAMES[fate][0].upper()}", "title").put(f"   {_verdict(desk, blamed)}", "muted")
        names = Row().right("BLOCKS", 9, "faint").right("TIMES", 16, "faint").put("  FROM", "faint")
        names.put("  FOR", "faint").right("STAY", 54, "faint").right("AGO", 61, "faint").put("  KEPT BY", "faint")
        lines = [head.line("", width), names.line("", width)]
        for blame in blamed:
            row = Row().right(count(blame.blocks), 9).right(count(blame.times), 16).put(f"  {blame.tier.name}  ")
            row.put("  ").put(cut_middle(plain(blame.request), 20) if blame.request else "nobody's request", "text")
            row.right(duration(blame.stay_ns), 54).right(duration(max(0, desk.now_ns - blame.last_ns)), 61)
            row.put(f"  {_kept_by(desk, blame.kept_by)}", "text")
            lines.append(row.line("", width))
        if not blamed:
            text = " The evictions are older than what this console has seen."
            lines.append(Row().put(text, "muted").line("", width))
        return lines

    def _askers(self, fates: Fates, fate: Fate, width: int) -> list[Line]:
        askers = fates.askers[fate].most_common()
        self._count = len(askers)
        head = Row().put(f" {NAMES[fate][0].upper()}", "title")
        head.put("   by the request that asked, most blocks first", "muted")
        lines = [head.line("", width)]
        for request, blocks in askers:
            lines.append(Row().right(count(blocks), 9).put(f"  {cut_middle(plain(request), 40)}").line("", width))
        return lines

    def hints(self, desk: Desk) -> list[Hint]:
        return [
            ("↑↓", "scroll" if self.open is not None else "band"),
            ("enter", "bands" if self.open is not None else "culprits"), ("esc", "back"), ("e", "export"),
        ]

    def press(self, desk: Desk, key: str) -> bool:
        """The arrows choose a band, enter lists its culprits."""
        shown = _shown(desk.mirror.fates)
        if key in MOVES:
            if self.open is None:
                self.at = moved(self.at, key, len(shown), PAGE) if shown else 0
            else:
                self.top = moved(self.top, key, max(1, self._count), PAGE)
        elif key.startswith("row:") and int(key[4:]) < len(shown):
            self.at, self.open, self.top = int(key[4:]), shown[int(key[4:])], 0
        elif key == "enter" and shown:
            self.open, self.top = (shown[min(self.at, len(shown) - 1)] if self.open is None else None), 0
        elif key == "escape" and self.open is not None:
            self.open = None
        else:
            return False
        return True

    def rows(self, desk: Desk) -> Table | None:
        """The culprits of both kinds of eviction, else what each request asked for, by fate."""
        fates = desk.mirror.fates
        if self.open in (Fate.EVICTED, Fate.NOT_OFFLOADED):
            blamed = fates.blamed(self.open, desk.mirror.prefixes)
            return ["tier", "for", "blocks", "times", "median_stay_ns", "kept_by_blocks", "last_ns"], [
                [blame.tier.name, blame.request or "", str(blame.blocks), str(blame.times), _text(blame.stay_ns),
                 _text(blame.kept_by), str(blame.last_ns)] for blame in blamed]
        return ["fate", "request", "blocks"], [
            [NAMES[fate][0], request, str(blocks)]
            for fate in Fate for request, blocks in fates.askers[fate].most_common()]


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _shown(fates: Fates) -> list[Fate]:
    """Bands with blocks, in the order of the chart from its top."""
    return [fate for fate in reversed(Fate) if fates.blocks[fate]]


def _ink(desk: Desk, fate: Fate, cells: int) -> Span:
    return Span(("█" if desk.glyphs.pixels else LETTERS[fate]) * cells, ROLES[fate])


def window_s(desk: Desk) -> tuple[int, int]:
    """(seconds that the chart has room for, how many of them have passed): it fills from the left."""
    began_ns = desk.mirror.fates.since_ns
    passed = 1 if began_ns is None else desk.now_ns // S - began_ns // S + 1
    window = next((known for known in WINDOWS_S if known >= passed), WINDOWS_S[-1])
    return window, min(window, passed)


def chart(desk: Desk, width: int, rows: int) -> list[Line]:
    """Columns of time, each full: the share of each fate of the blocks asked for then; blank without admissions."""
    (seconds, passed), cells, series = window_s(desk), width - 8, desk.mirror.fates.series
    later = [0.0] * (seconds - passed)
    values = {
        fate: [*(value or 0.0 for value in each.last(passed, desk.now_ns)), *later] for fate, each in series.items()}
    columns: list[list[Fate | None]] = []
    for cell in range(cells):
        low, high = cell * seconds // cells, max(cell * seconds // cells + 1, (cell + 1) * seconds // cells)
        amounts = [int(sum(values[fate][low:high])) for fate in Fate]
        heights = bars.divide(amounts, rows)
        column: list[Fate | None] = [fate for fate, height in zip(Fate, heights, strict=True) for _ in range(height)]
        columns.append(column or [None] * rows)
    lines = []
    for row in range(rows):
        line = Row().right("100" if row == 0 else "0" if row == rows - 1 else "", 5, "faint").put(" ")
        for fate, run in groupby(column[rows - 1 - row] for column in columns):
            length = len(list(run))
            line.spans([Span(" " * length, "text") if fate is None else _ink(desk, fate, length)])
        lines.append(line.line("", width))
    axis = Row().to(6).put(f"−{window_text(passed)}", "faint")
    axis.right("now", max(axis.x + 4, 6 - (-passed * cells // seconds)), "faint")
    return [*lines, axis.line("", width)]


def _verdict(desk: Desk, blamed: list[Blame]) -> str:
    """One sentence on all of them."""
    blocks, needed = sum(blame.times for blame in blamed), max((blame.kept_by or 0 for blame in blamed), default=0)
    if not needed:
        return f"{plural(blocks, 'miss', 'misses')}"
    return f"{plural(blocks, 'miss', 'misses')}; {_kept_by(desk, needed)} would have kept all"


def _kept_by(desk: Desk, blocks: int | None) -> str:
    """The capacity, and the smallest tier that has it with those above it."""
    if blocks is None:
        return UNKNOWN
    about = "~" if desk.mirror.fates.curve.share < 1 else ""
    sizes, total, facts = [], 0, desk.mirror.facts
    for tier in Tier:
        own = sum(facts.capacity_of(pool) or 0 for pool in facts.pools if pool.info.tier is tier)
        total += own
        if own:
            sizes.append((total, tier))
    fits = next((tier for known, tier in sizes if known >= blocks), None)
    where = f", as many as G1 to {fits.name} have" if fits is not None and fits is not Tier.G1 else (
        ", as G1 has" if fits is Tier.G1 else f", {blocks / total:.1f}x of all tiers" if total else "")
    told = "" if desk.mirror.block_bytes is None else f" ({size(blocks * desk.mirror.block_bytes)})"
    return f"{about}{brief(blocks)} blocks{told}{where}"
