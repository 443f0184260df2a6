"""The prefix map: a flame graph of the KV cache.

Law of this file: what is not drawn is told with its number. The picture is made anew when something has changed, at
most once a second while events come in.
"""

from itertools import groupby
from typing import Final

import msgspec

from kvbm_console.analysis.prefix_map import WINDOW_NS, MapNode, MapUser, PrefixMap
from kvbm_console.core.ids import Tier
from kvbm_console.core.state import CacheState

from ..desk import Desk, View
from ..draw.bars import divide
from ..draw.flame import BLOCKS, CACHED, GONE, REQUESTS, STEPS, Box, Figures, Layout, figures, lay_out
from ..draw.flame_svg import picture, shares_of
from ..draw.frame import Hint
from ..draw.spans import Line, Row, Span
from ..draw.table import Table
from ..model.numbers import S, count, cut, cut_middle, duration, plain, plural, size, spoken

LAYOUT_NS: Final = S
"""Least time between two layouts while events come in: one of 100,000 blocks takes 45 ms."""
GUTTER: Final = 6
"""Cells for positions in the prompt."""
PANEL_ROWS: Final = 7
FRESH_NS: Final = (15 * S, 120 * S)
"""Up to the first age a box is bright, from the second on dim."""
TIER_CODE: Final = {GONE: "gone", Tier.G1: "g1", Tier.G2: "g2", Tier.G3: "g3", Tier.G4: "g4"}
TEXTURE: Final = {"gone": "·", "g1": "█", "g2": "▓", "g3": "▒", "g4": "░", "seam": "━", "fold": "╱"}
ASCII_TEXTURE: Final = {"gone": ".", "g1": "1", "g2": "2", "g3": "3", "g4": "4", "seam": "!", "fold": "/"}
LABEL_MIN: Final = 4
_WAYS: Final = {"h": "left", "shift+tab": "left", "l": "right", "tab": "right", "j": "down", "k": "up"}
NAMES: Final = 4
CULPRITS: Final = 2


class _Drawn(msgspec.Struct):
    """A layout and the inputs that it was made from."""

    key: tuple[object, ...]
    facts: tuple[object, ...]
    mono_ns: int
    layout: Layout
    top_of: dict[int, tuple[int, int]]
    """Box (by identity) to its rows of pixels."""
    users: dict[MapNode, list[MapUser]]
    told: tuple[Box, Figures] | None = None
    """The figures of the box that was chosen last."""


class Prefixes(View):
    """The view behind ``p``."""

    words = (
        ("box", "blocks of a prompt in a row; every request below it shares them"),
        ("width", "requests of the last ten minutes with these blocks; o: blocks behind; in a stream cached blocks"),
        ("row", "position in the prompt, from the first block on top"),
        ("colour", "the nearest tier that has the block now; dark: none has it"),
        ("brightness", "bright: used in the last 15 s; dim: not for two minutes"),
        ("seam", "red: here a block was evicted, and a later request asked for it again"),
        ("+N more", "boxes narrower than a cell, together"),
    )

    def __init__(self) -> None:
        self.by: str | None = None
        """None until it is chosen: requests, and cached blocks where no request is known."""
        self.scale: int | None = None
        self.zoom: list[int] = []
        """The first hashes of the boxes that were zoomed into."""
        self.chosen: tuple[int, bool] | None = None
        self.panel = False
        self._drawn: _Drawn | None = None
        self._request: str | None = None

    # --- layout ------------------------------------------------------------------------------------------------------

    def _by(self, desk: Desk) -> str:
        return self.by or _default(desk)

    def _other(self, desk: Desk) -> str:
        return _default(desk) if self._by(desk) == BLOCKS else BLOCKS

    def _zoomed(self, forest: PrefixMap) -> MapNode | None:
        while self.zoom:
            node = forest.node_of.get(self.zoom[-1])
            if node is not None and int.from_bytes(node.column[:8], "little") == self.zoom[-1]:
                return node
            self.zoom.pop()
        return None

    def _layout(self, desk: Desk, cells: int, rows: int) -> _Drawn:
        mirror, forest = desk.mirror, desk.mirror.prefixes
        state, mono = mirror.facts, desk.mono()
        by = self._by(desk)
        key = (id(forest), cells, rows, by, self.scale, self._zoomed(forest), mirror.places)
        facts = (forest.version, state.seq)
        drawn = self._drawn
        if drawn is not None and drawn.key == key and (
            drawn.facts == facts or (desk.rate and 0 <= mono - drawn.mono_ns < LAYOUT_NS)
        ):
            return drawn
        layout = lay_out(
            forest, state, cells, rows, by=by, zoom=self._zoomed(forest), scale=self.scale,
            since_ns=desk.now_ns - WINDOW_NS)
        top_of = _rows_of(layout, self._zoomed(forest))
        self._drawn = drawn = _Drawn(key, facts, mono, layout, top_of, forest.users_by_node())
        return drawn

    def _chosen(self, desk: Desk, layout: Layout) -> Box | None:
        """The chosen box, else the box of the selected request, else the first."""
        if desk.selected != self._request:
            self._request = desk.selected
            path = set(desk.mirror.prefixes.path_of(desk.selected or ""))
            box = next((box for box in reversed(layout.boxes) if path.intersection(box.nodes)), None)
            self.chosen = None if box is None else box.key
        found = next((box for box in layout.boxes if box.key == self.chosen), None)
        return found or (layout.boxes[0] if layout.boxes else None)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Two rows about the picture, the picture, then the chosen box."""
        state, forest = desk.mirror.facts, desk.mirror.prefixes
        if not forest.node_of:
            return _nothing(state)
        low = min(PANEL_ROWS, height // 3) if self.panel else 2
        rows = max(4, height - 3 - low)
        pixels = desk.glyphs.pixels
        drawn = self._layout(desk, width - GUTTER - 1, rows * 2 if pixels else rows)
        layout = drawn.layout
        box = self._chosen(desk, layout)
        lines = [self._head(desk, layout, width), _missing(desk, layout, self._by(desk), width), _legend(desk, width)]
        grid = _paint(layout, drawn.top_of, box, desk.now_ns, width - GUTTER - 1, rows * 2 if pixels else rows)
        zoomed = self._zoomed(forest)
        base, each = (0 if zoomed is None else zoomed.depth), 2 if pixels else 1
        labels = _labels(layout, drawn.top_of, grid, each, self._by(desk))
        for row in range(rows):
            position = f"{count(base + row * each * layout.scale)}" if row % 4 == 0 else ""
            line = Row().right(position, GUTTER - 1, "faint").to(GUTTER)
            upper = grid[row * each]
            spans = _cells(upper, grid[row * each + 1] if pixels else upper, desk)
            line.spans(_overlaid(spans, labels.get(row, [])))
            lines.append(line.line("", width))
        self._zones(lines, layout, drawn.top_of, each, rows)
        if box is not None:
            if drawn.told is None or drawn.told[0] is not box:
                drawn.told = box, figures(forest, state, box, drawn.users)
            known = drawn.told[1]
            lines += (_panel if self.panel else _summary)(desk, box, known, width)[:low]
        return lines

    def _head(self, desk: Desk, layout: Layout, width: int) -> Line:
        forest, by = desk.mirror.prefixes, self._by(desk)
        told = f"{plural(forest.root.uses, 'request')} in {_window(desk)}" if forest.root.uses else _nobody(desk)
        row = Row().put(" PREFIXES", "title").put(f"   {told}", "text")
        each = layout.scale * (2 if desk.glyphs.pixels else 1)
        row.put(f"   width = {by}   1 row = {plural(each, 'block')}", "muted")
        if self.zoom:
            row.put(f"   zoomed in {len(self.zoom)}×, Z out", "caution")
        return row.line("" if desk.tall else "bar", width)

    def _zones(
        self, lines: list[Line], layout: Layout, top_of: dict[int, tuple[int, int]], each: int, rows: int,
    ) -> None:
        """Let a click choose a box."""
        first = len(lines) - rows
        for index, box in enumerate(layout.boxes):
            top, end = top_of[id(box)]
            for row in range(top // each, min(rows, -(-end // each))):
                line = lines[first + row]
                zone = Row().zone(GUTTER + box.x, ("row", index), GUTTER + box.end).line().zones
                lines[first + row] = line._replace(zones=(*line.zones, *zone))

    # --- keys --------------------------------------------------------------------------------------------------------

    def hints(self, desk: Desk) -> list[Hint]:
        return [
            ("h l", "beside"), ("↑↓", "in front, behind"), ("enter", "close" if self.panel else "details"),
            ("z", "zoom in"), *([("Z", "out")] if self.zoom else []),
            ("o", f"by {self._other(desk)}"),
            ("+ −", "scale"), ("0", "fit"), ("e", "export"),
        ]

    def press(self, desk: Desk, key: str) -> bool:
        """↑ ↓ h l choose a box, enter opens its figures, z zooms into it; ← → move through time."""
        if key in ("up", "down", "h", "j", "k", "l", "tab", "shift+tab"):
            self._move(_WAYS.get(key, key), desk)
        elif key == "enter":
            self.panel = not self.panel
        elif key == "escape" and (self.panel or self.zoom):
            if self.panel:
                self.panel = False
            else:
                self.zoom.pop()
        elif key == "z":
            box = self._here(desk)
            if box is not None and not box.folded and box.key[0] not in self.zoom:
                self.zoom.append(box.key[0])
                self.chosen = box.key
        elif key == "Z":
            self.zoom = self.zoom[:-1]
        elif key == "o":
            self.by = self._other(desk)
        elif key in ("+", "-", "=") and self._drawn is not None:
            self.scale = _step(self._drawn.layout.scale, finer=key != "-")
        elif key == "0":
            self.scale = None
        elif key.startswith("row:") and self._drawn is not None:
            boxes = self._drawn.layout.boxes
            box = boxes[int(key[4:])] if int(key[4:]) < len(boxes) else None
            if box is not None:
                self.panel = self.panel or box.key == self.chosen
                self.chosen = box.key
        else:
            return False
        return True

    def _here(self, desk: Desk) -> Box | None:
        return self._chosen(desk, self._drawn.layout) if self._drawn is not None else None

    def _move(self, way: str, desk: Desk) -> None:
        box = self._here(desk)
        if box is None or self._drawn is None:
            return
        if way == "up":
            target = box.parent
        elif way == "down":
            target = max(box.below, key=lambda each: each.end - each.x, default=None)
        else:
            level = [each for each in self._drawn.layout.boxes if each.level == box.level]
            level.sort(key=lambda each: each.x)
            at = next(index for index, each in enumerate(level) if each is box) + (1 if way == "right" else -1)
            target = level[at] if 0 <= at < len(level) else None
        if target is not None:
            self.chosen = target.key

    # --- files -------------------------------------------------------------------------------------------------------

    def picture(self, desk: Desk) -> str | None:
        """The whole map as SVG with titles."""
        state, forest = desk.mirror.facts, desk.mirror.prefixes
        target = desk.mirror.connected
        name = plain(target.target) if target is not None else ""
        return picture(
            forest, state, by=self._by(desk), zoom=self._zoomed(forest), now_ns=desk.now_ns,
            title=f"Prefixes of {name} at seq {count(state.seq - 1)}, width = {self._by(desk)}",
            since_ns=desk.now_ns - WINDOW_NS,
        )

    def rows(self, desk: Desk) -> Table | None:
        """Every node of the map, drawn or not, those in front first."""
        state, forest = desk.mirror.facts, desk.mirror.prefixes
        table, users = [], forest.users_by_node()
        for node in forest.nodes():
            box = Box([node], 0, 0, node.depth, node.blocks, node.uses, None, below=[])
            known = figures(forest, state, box, users)
            table.append([
                f"{node.hashes[0]:016x}", f"{node.hashes[-1]:016x}", str(node.depth), str(node.blocks), str(node.uses),
                *(str(known.lies.get(tier, 0)) for tier in (*Tier, GONE)), str(node.last_ns),
                str(sum(each.blocks for each in known.culprits)), str(known.lost_blocks), str(known.lost_times),
            ])
        return [
            "first_hash", "last_hash", "depth", "blocks", "requests", *(tier.name for tier in Tier), "in_no_tier",
            "last_used_ns", "evicted_blocks", "lost_blocks", "lost_times",
        ], table


def _nothing(state: CacheState) -> list[Line]:
    text = " No prompt is known yet." if not state.pools else " No prompt and no chain of blocks is known yet."
    return [Row().put(text, "muted").line()]


def _step(scale: int, *, finer: bool) -> int:
    """The next scale."""
    steps: list[int] = [step * 10**power for power in range(7) for step in STEPS]
    at = steps.index(scale) + (-1 if finer else 1)
    return steps[min(len(steps) - 1, max(0, at))]


def _rows_of(layout: Layout, zoom: MapNode | None) -> dict[int, tuple[int, int]]:
    """The rows of pixels of each box: at least one, and never above the end of its parent."""
    base = zoom.depth if zoom is not None else 0
    found: dict[int, tuple[int, int]] = {}
    for box in layout.boxes:
        least = found[id(box.parent)][1] if box.parent is not None else 0
        top = max(least, (box.depth - base) // layout.scale)
        end = max(top + 1, -(-(box.depth + box.blocks - base) // layout.scale))
        found[id(box)] = top, end
    return found


def _paint(
    layout: Layout, top_of: dict[int, tuple[int, int]], chosen: Box | None, now_ns: int, cells: int, rows: int,
) -> list[list[str]]:
    """The colour of each pixel, empty where nothing is."""
    grid = [[""] * cells for _ in range(rows)]
    for box in layout.boxes:
        top, end = top_of[id(box)]
        if top >= rows:
            continue
        age_ns = now_ns - max(node.last_ns for node in box.nodes)
        light = 2 if age_ns < FRESH_NS[0] else 1 if age_ns < FRESH_NS[1] else 0
        mark = "*" if box is chosen else ""
        wide = box.end - box.x - (1 if box.end - box.x > 2 else 0)
        if box.folded:
            parts = shares_of(box.lies)
            cells_of = divide([blocks for _, blocks in parts], wide)
            colours = [f"fold.{TIER_CODE[tier]}{mark}" for (tier, _), size in zip(parts, cells_of, strict=True)
                       for _ in range(size)]
            for row in range(top, min(end, rows)):
                grid[row][box.x : box.x + wide] = colours
            continue
        tall = end - top
        for row in range(top, min(end, rows)):
            first, last = (row - top) * box.blocks // tall, (row - top + 1) * box.blocks // tall
            tier = box.lies[min(len(box.lies) - 1, (first + last) // 2)]
            code = f"{TIER_CODE[tier]}.{light}{mark}"
            if box.lost and any(first <= lost < max(last, first + 1) for lost in box.lost):
                code = f"seam{mark}"
            grid[row][box.x : box.x + wide] = [code] * wide
    return grid


def _cells(upper: list[str], lower: list[str], desk: Desk) -> list[Span]:
    """A row of the screen from two rows of pixels, or from one where a cell is a pixel."""
    spans = []
    for (above, below), run in groupby(zip(upper, lower, strict=True)):
        cells = len(list(run))
        if not above and not below:
            spans.append(Span(" " * cells, "text"))
        elif not desk.glyphs.pixels:
            role = "seam" if above.startswith("seam") else "cursor" if above.endswith("*") else "text"
            spans.append(Span(_texture(above, desk) * cells, role))
        elif above == below and above.startswith("fold"):
            spans.append(Span("╱" * cells, f"map:hatch:{above}"))
        elif above == below:
            spans.append(Span("█" * cells, f"map:{above}:{above}"))
        elif not above:
            spans.append(Span("▄" * cells, f"map:{below}:"))
        else:
            spans.append(Span("▀" * cells, f"map:{above}:{below}"))
    return spans


def _texture(code: str, desk: Desk) -> str:
    name = code.partition(".")[0].rstrip("*")
    return (ASCII_TEXTURE if desk.glyphs.ascii else TEXTURE)[name]


def _labels(
    layout: Layout, top_of: dict[int, tuple[int, int]], grid: list[list[str]], each: int, by: str,
) -> dict[int, list[tuple[int, str, str]]]:
    """Row to (cell, text, role) of the labels in boxes that have a whole row of one colour."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    for box in layout.boxes:
        top, end = top_of[id(box)]
        room = box.end - box.x - 2
        row = -(-top // each)
        if room < LABEL_MIN or (row + 1) * each > min(end, len(grid)):
            continue
        code = grid[row * each][box.x]
        if any(grid[row * each + below][box.x] != code for below in range(each)):
            continue
        texts = (f"{count(box.blocks)} blocks ×{count(box.weight)}", f"{count(box.blocks)} ×{count(box.weight)}",
                 f"×{count(box.weight)}")
        if by != REQUESTS:
            behind = count(box.weight - (box.blocks if by == BLOCKS else len(box.lies) - box.lies.count(GONE)))
            texts = (f"{count(box.blocks)} blocks, {behind} behind", f"{count(box.blocks)} blocks", count(box.blocks))
        if box.folded:
            texts = (f"+{count(len(box.nodes))} more", f"+{count(len(box.nodes))}", "")
        text = next((text for text in texts if len(text) <= room), "")
        if text:
            role = f"map:label:{code}" if each == 2 else "strong"
            found.setdefault(row, []).append((box.x, f" {text} " if len(text) + 2 <= room + 1 else text, role))
    return found


def _overlaid(spans: list[Span], labels: list[tuple[int, str, str]]) -> list[Span]:
    """Spans with texts written over them."""
    if not labels:
        return spans
    cells = [(character, role) for text, role in spans for character in text]
    for at, text, role in labels:
        cells[at : at + len(text)] = [(character, role) for character in text]
    return [Span("".join(character for character, _ in run), role)
            for role, run in ((role, list(run)) for role, run in groupby(cells, key=lambda cell: cell[1]))]


# --- rows of words ---------------------------------------------------------------------------------------------------


def _default(desk: Desk) -> str:
    return CACHED if desk.mirror.facts.streams_only else REQUESTS


def _nobody(desk: Desk) -> str:
    return "no request is named" if desk.mirror.facts.streams_only else f"no request in {_window(desk)}"


def _window(desk: Desk) -> str:
    """The time in which requests are counted: ten minutes, or as long as the map is folded."""
    since_ns = desk.mirror.prefixes.since_ns
    known = 0 if since_ns is None else desk.now_ns - since_ns
    return "10 min" if known >= WINDOW_NS else spoken(known)


def _missing(desk: Desk, layout: Layout, by: str, width: int) -> Line:
    """The numbers of what is not drawn."""
    row = Row().put(f" {count(layout.drawn_blocks)} blocks drawn", "muted")
    forest, coverage = desk.mirror.prefixes, desk.mirror.coverage
    unused = "blocks of prompts that no tier has" if by == CACHED else f"unused in {_window(desk)}"
    deeper = plural(layout.deeper, "request" if forest.root.uses else "block")
    deeper += " goes deeper" if layout.deeper == 1 else " go deeper"
    told = [
        (layout.folded_blocks, f"{count(layout.folded_blocks)} folded", "muted"),
        (layout.unused_blocks, f"{count(layout.unused_blocks)} {unused}", "muted"),
        (layout.unknown_blocks, f"{count(layout.unknown_blocks)} cached, prompt unknown", "muted"),
        (layout.deeper, deeper, "muted"),
        (forest.forgotten_blocks, f"{count(forest.forgotten_blocks)} forgotten", "muted"),
        (desk.mirror.lost_events, "events were lost: uses may be missing", "caution"),
        (coverage.passed, "sampled: uses and evictions are missing", "caution"),
    ]
    for number, text, role in sorted(told, key=lambda each: each[2] != "caution"):
        if number and row.x + len(text) + 3 < width:
            row.put("  ·  ", "faint").put(text, role)
    return row.line("", width)


def _legend(desk: Desk, width: int) -> Line:
    row = Row().put(" ")
    for code, text in (("g1.2", "G1"), ("g2.2", "G2"), ("g3.2", "G3"), ("g4.2", "G4"), ("gone.2", "in no tier"),
                       ("seam", "evicted, asked for again" if width > 90 else "asked for again"),
                       ("fold.gone", "folded")):
        row.put("  " if row.x > 1 else "").spans(_cells([code] * 2, [code] * 2, desk))
        row.put(f" {text}", "muted")
    return row.line("", width)


def _lies(known: Figures) -> str:
    parts = [f"{Tier(tier).name} {count(blocks)}" for tier, blocks in sorted(known.lies.items()) if tier]
    if known.lies.get(GONE):
        parts.append(f"none {count(known.lies[GONE])}")
    return "  ".join(parts)


def _where(box: Box, known: Figures) -> str:
    if box.folded:
        return f"{plural(len(box.nodes), 'branch', 'branches')} folded, {plural(known.blocks, 'block')}"
    return f"{plural(known.blocks, 'block')}, {count(box.depth)} to {count(box.depth + box.blocks - 1)} of the prompt"


def _summary(desk: Desk, box: Box, known: Figures, width: int) -> list[Line]:
    """The chosen box in two rows."""
    now = desk.now_ns
    row = Row().put(f"{desk.glyphs.select}", "selbar").put(_where(box, known), "strong")
    row.put("   lies in ", "muted").put(_lies(known), "text")
    used = plural(len(known.users), "request") if known.users else _nobody(desk)
    second = Row().put(f" {used}", "text")
    second.put("   last used ", "muted").put(f"{duration(max(0, now - known.last_ns))} ago", "text")
    if known.culprits:
        evicted = sum(each.blocks for each in known.culprits)
        second.put("   evicted ", "muted").put(plural(evicted, "block"), "text")
    if known.lost_times:
        second.put("   asked for again ", "muted").put(f"{count(known.lost_blocks)}", "seam")
    return [row.line("", width), second.line("", width)]


def _panel(desk: Desk, box: Box, known: Figures, width: int) -> list[Line]:
    """The chosen box: who uses it, who evicted it, what its loss cost, how long it lay."""
    state, now = desk.mirror.facts, desk.now_ns
    tokens = next((pool.info.block_tokens for pool in state.pools), 0)
    row = Row().put(f"{desk.glyphs.select}", "selbar").put(_where(box, known), "strong")
    row.put(f"   {count(known.blocks * tokens)} tokens", "muted")
    if desk.mirror.block_bytes:
        row.put(f"   {size(known.blocks * desk.mirror.block_bytes)}", "muted")
    lines = [row.line("", width)]
    lines.append(Row().put(" lies in   ", "muted").put(_lies(known), "text").put("   last used ", "muted")
                 .put(f"{duration(max(0, now - known.last_ns))} ago", "text").line("", width))
    live = [user for user in known.users if user.ended_ns is None]
    names = ", ".join(cut_middle(plain(user.request), 20) for user in known.users[:NAMES])
    more = f" and {count(len(known.users) - NAMES)} more" if len(known.users) > NAMES else ""
    used = f"{plural(len(known.users), 'request')}, {count(len(live))} live: {names}{more}"
    used = used if known.users else _nobody(desk)
    lines.append(Row().put(" used by   ", "muted").put(cut(used, width - 13), "text").line("", width))
    for each in known.culprits[:CULPRITS]:
        who = f" for {cut_middle(plain(each.request), 20)}" if each.request else ""
        lay = "" if each.lay_ns is None else f"; median stay {spoken(each.lay_ns)}"
        ago = spoken(max(0, now - each.last_ns))
        told = f"{each.tier.name} {plural(each.blocks, 'block')}{who}, last {ago} ago{lay}"
        lines.append(Row().put(" evicted   ", "muted").put(cut(told, width - 13), "text").line("", width))
    if not known.culprits:
        lines.append(Row().put(" evicted   ", "muted").put("never, as far as this console saw", "text").line("", width))
    lines.append(_cost(known, tokens, now, width))
    return lines


def _cost(known: Figures, tokens: int, now: int, width: int) -> Line:
    row = Row().put(" its loss  ", "muted")
    loss = known.last_loss
    if loss is None:
        return row.put("none: no request asked for an evicted block", "text").line("", width)
    who = f" by {cut_middle(plain(loss.request), 20)}" if loss.request else ""
    return row.put(
        f"{plural(known.lost_blocks, 'block')} asked for again, {count(known.lost_times)} times: "
        f"{count(known.lost_times * tokens)} tokens computed again, last{who} {spoken(max(0, now - loss.at_ns))} ago",
        "text").line("", width)
