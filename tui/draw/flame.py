"""The layout of the prefix map: which boxes are drawn where, and the figures of a box.

Theory of operation
-------------------
The map is a flame graph. A box is a run of blocks, and its width is the number of requests that share it, or the number
of blocks behind it, all or those that are cached now. Its height is the number of its blocks, and its place from the
top is the position in the prompt.
Children stand below their parent in the order in which they were seen first, so the picture does not jump.

    ███████████████████ 128 blocks, 30 requests
    ████████████ ██████ 20 of them go on one way, 10 another

Children that would be narrower than a cell are folded into one box, ``+312 more``, which stands behind the others. It
is as tall as most of its ways are long, so that one long prompt does not decide the scale for all.
Everything that is not drawn is counted: blocks that nobody used in the window, blocks without a known place, and
requests that lie too deep.

Law of this file: the requests of a box are those of its children, of its fold, and those that end in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvbm_console.analysis.prefix_map import MapEviction, MapLoss, MapNode, MapUser, PrefixMap
from kvbm_console.core.ids import Tier
from kvbm_console.core.state import CacheState

from .bars import divide

REQUESTS: Final = "requests"
BLOCKS: Final = "blocks"
CACHED: Final = "cached blocks"
"""Leaves out prompts without a block in any tier: an event stream tells of all that were ever stored."""
STEPS: Final[tuple[int, ...]] = (1, 2, 3, 4, 5, 6, 8)
"""Blocks of a row of pixels, times a power of ten."""
FIT: Final = 0.9
"""Share of the requests whose whole path fits on the screen unless the scale is chosen, and into a fold."""
GONE: Final = 0
"""Stands for a tier where no tier has the block."""


class Box(msgspec.Struct, gc=False, eq=False):
    """A run of nodes without a branch, or the fold of narrow children."""

    nodes: list[MapNode]
    """The nodes of the run; the folded children, if ``folded``."""
    x: int
    end: int
    """Cells from ``x`` up to ``end``."""
    depth: int
    blocks: int
    """Blocks of the run; of a fold, those of its longest way but for the longest tenth."""
    weight: int
    """Requests, blocks, or cached blocks."""
    parent: "Box | None"
    folded: bool = False
    lies: bytes = b""
    """The nearest tier of each block, ``GONE`` for none; of a fold, of all its blocks in any order."""
    lost: frozenset[int] = frozenset()
    """Blocks of the run that begin a stretch of evicted blocks that were asked for again."""
    below: list["Box"] = []

    @property
    def key(self) -> tuple[int, bool]:
        """Its first hash and whether it is a fold: its name while the map grows around it."""
        return int.from_bytes(self.nodes[0].column[:8], "little"), self.folded

    @property
    def level(self) -> int:
        """Boxes above it."""
        return 0 if self.parent is None else self.parent.level + 1


class Layout(msgspec.Struct):
    """All boxes, those in front first, and what is not drawn."""

    boxes: list[Box]
    scale: int
    """Blocks in a row of pixels."""
    drawn_blocks: int
    folded_blocks: int
    unused_blocks: int
    """Blocks of the map that no request of the window used; by cached blocks, those with no cached block behind them.
    """
    unknown_blocks: int
    """Blocks in some tier whose place in a prompt is not known."""
    deepest: int
    deeper: int
    """Requests, or blocks, whose path goes on below the last row."""
    weight: int
    """Of all boxes of the first row together."""


_Weight = Callable[[MapNode], int]
"""The requests or the blocks of a node."""


class _Sizes:
    """The blocks behind each node; of these only ``cached`` ones if given."""

    def __init__(self, forest: PrefixMap, cached: set[int] | None) -> None:
        self.blocks: dict[int, int] = {}
        self.deepest: dict[int, int] = {}
        for node in reversed(list(forest.nodes())):
            blocks = node.blocks if cached is None else len(cached.intersection(node.hashes))
            deepest = node.depth + node.blocks
            for child in node.children.values():
                blocks += self.blocks[id(child)]
                deepest = max(deepest, self.deepest[id(child)])
            self.blocks[id(node)], self.deepest[id(node)] = blocks, deepest


def nearest(state: CacheState, hashes: Sequence[int]) -> bytes:
    """The nearest tier that has each block, ``GONE`` for none."""
    tiers = sorted({pool.info.tier for pool in state.shown_pools})
    known = [(int(tier), [pool.by_hash for pool in state.pools if pool.info.tier is tier]) for tier in tiers]
    if all(len(pools) == 1 for _, pools in known) and len(known) <= 2:
        first = known[0][1][0] if known else {}
        second = known[1][1][0] if len(known) > 1 else {}
        near, far = (known[0][0] if known else 0), (known[1][0] if len(known) > 1 else 0)
        return bytes([near if key in first else far if key in second else GONE for key in hashes])
    found = {}
    for tier, pools in reversed(known):
        for by_hash in pools:
            found.update(dict.fromkeys(by_hash.keys() & hashes, tier))
    return bytes([found.get(key, GONE) for key in hashes])


def lay_out(
    forest: PrefixMap, state: CacheState, cells: int, rows: int, *, by: str = REQUESTS, zoom: MapNode | None = None,
    scale: int | None = None, since_ns: int = 0,
) -> Layout:
    """The boxes for a screen of ``cells`` by ``rows`` pixels, below ``zoom`` if given; seams of losses ``since_ns``."""
    resident = set[int]().union(*(pool.by_hash for pool in state.pools))
    sizes = _Sizes(forest, resident if by == CACHED else None)

    def weight_of(node: MapNode) -> int:
        return node.uses if by == REQUESTS else sizes.blocks[id(node)]

    top = [zoom] if zoom is not None else list(forest.root.children.values())
    base = zoom.depth if zoom is not None else 0
    total = sum(map(weight_of, top))
    boxes = _row(top, 0, cells, total, None, weight_of, sizes, by)
    at = 0
    while at < len(boxes):
        box = boxes[at]
        at += 1
        if not box.folded:
            behind = list(box.nodes[-1].children.values())
            box.below = _row(behind, box.x, box.end, box.weight, box, weight_of, sizes, by)
            boxes += box.below
    ends = sorted(
        (end - base, weight) for box in boxes for end, weight in (
            _ends(box.nodes, weight_of, sizes) if box.folded
            else [(box.depth + box.blocks, 0 if box.below else box.weight)]
        )
    )
    deepest = ends[-1][0] if ends else 0
    scale = scale or _scale(ends, rows)
    for box in boxes:
        _fill(box, forest, state, since_ns)
    drawn = sum(box.blocks for box in boxes if not box.folded)
    folded = sum(len(box.lies) for box in boxes if box.folded)
    return Layout(
        boxes, scale, drawn, folded, len(forest.node_of) - drawn - folded if zoom is None else 0,
        len(resident - forest.node_of.keys()), deepest,
        sum(weight for end, weight in ends if end > scale * rows), total,
    )


def _row(
    nodes: Iterable[MapNode], x: int, end: int, weight: int, parent: Box | None, weight_of: _Weight, sizes: _Sizes,
    by: str,
) -> list[Box]:
    """The boxes of siblings within these cells."""
    siblings = [(node, weight_of(node)) for node in nodes]
    wide = [(node, size) for node, size in siblings if size * (end - x) >= weight > 0]
    narrow = [(node, size) for node, size in siblings if 0 < size * (end - x) < weight]
    rest = weight - sum(size for _, size in siblings)
    amounts = [*(size for _, size in wide), sum(size for _, size in narrow), max(0, rest)]
    widths = divide(amounts, end - x)
    boxes = []
    for (node, size), cells in zip(wide, widths, strict=False):
        if cells:
            boxes.append(_box(node, x, x + cells, size, parent, weight_of, by))
        else:
            narrow.append((node, size))
        x += cells
    if narrow:
        folded, depth = [node for node, _ in narrow], narrow[0][0].depth
        tall = _fitting(sorted(_ends(folded, weight_of, sizes))) - depth
        boxes.append(Box(
            folded, x, x + widths[len(wide)], depth, tall,
            sum(size for _, size in narrow), parent, folded=True, below=[],
        ))
    return boxes


def _box(node: MapNode, x: int, end: int, weight: int, parent: Box | None, weight_of: _Weight, by: str) -> Box:
    """A run: the node and those behind it, as long as there is one way and everybody goes it."""
    nodes = [node]
    while len(node.children) == 1:
        [child] = node.children.values()
        if (by == REQUESTS and weight_of(child) != weight) or not weight_of(child):
            break
        nodes.append(child)
        node = child
    return Box(nodes, x, end, nodes[0].depth, sum(each.blocks for each in nodes), weight, parent, below=[])


def _ends(nodes: Iterable[MapNode], weight_of: _Weight, sizes: _Sizes) -> list[tuple[int, int]]:
    """(end of the longest way through it, weight) of each node."""
    return [(sizes.deepest[id(node)], weight_of(node)) for node in nodes]


def _fitting(ends: list[tuple[int, int]]) -> int:
    """The first end by which ``FIT`` of the weight has ended, at least 1; the ends are sorted."""
    wanted, seen = FIT * sum(weight for _, weight in ends), 0
    for end, weight in ends:
        seen += weight
        if seen >= wanted:
            return max(1, end)
    return 1


def _scale(ends: list[tuple[int, int]], rows: int) -> int:
    """Blocks in a row of pixels, so that the paths of most requests fit."""
    least, power = _fitting(ends), 1
    while True:
        for step in STEPS:
            if step * power * rows >= least:
                return step * power
        power *= 10


def _fill(box: Box, forest: PrefixMap, state: CacheState, since_ns: int) -> None:
    """Find out where the blocks of a box lie, and where its seams are."""
    if box.folded:
        hashes: list[int] = []
        todo = list(box.nodes)
        while todo:
            node = todo.pop()
            hashes += node.hashes
            todo += node.children.values()
        box.lies = nearest(state, hashes)
        return
    hashes = [key for node in box.nodes for key in node.hashes]
    box.lies = nearest(state, hashes)
    if forest.lost.keys() & hashes:
        again = [key in forest.lost and forest.lost[key][1].at_ns >= since_ns for key in hashes]
        box.lost = frozenset(at for at, one in enumerate(again) if one and not (at and again[at - 1]))


# --- figures of a box ------------------------------------------------------------------------------------------------


class Culprit(msgspec.Struct, frozen=True):
    """Blocks that one request, or nobody, drove out of one tier."""

    tier: Tier
    request: str | None
    rule: str
    blocks: int
    last_ns: int
    lay_ns: int | None
    """Half of the blocks had lain there for no longer."""


class Figures(msgspec.Struct, frozen=True):
    """Users of the blocks of a box, their place, and their past."""

    blocks: int
    lies: dict[int, int]
    """Tier, or ``GONE``, to the blocks whose nearest place is there."""
    users: list[MapUser]
    last_ns: int
    culprits: list[Culprit]
    """Of the last eviction of each block from each tier; most blocks first."""
    lost_blocks: int
    """Blocks that were evicted, asked for again and missed."""
    lost_times: int
    """The same, each block as often as it happened."""
    last_loss: MapLoss | None


def figures(forest: PrefixMap, state: CacheState, box: Box, users: Mapping[MapNode, list[MapUser]]) -> Figures:
    """The figures of a run, or of a fold with all that is behind it; ``users`` are ``users_by_node``."""
    nodes = box.nodes
    hashes = [key for node in (_behind(nodes) if box.folded else nodes) for key in node.hashes]
    losses = [forest.lost[key] for key in forest.lost.keys() & hashes]
    return Figures(
        len(hashes), dict(Counter(nearest(state, hashes))), [
            user for node in (nodes if box.folded else nodes[-1:]) for user in users.get(node, ())],
        max(node.last_ns for node in nodes), _culprits(forest, hashes),
        len(losses), sum(times for times, _ in losses), max((loss for _, loss in losses), key=_seq, default=None),
    )


def _seq(loss: MapLoss) -> int:
    return loss.seq


def _behind(nodes: Sequence[MapNode]) -> list[MapNode]:
    found, todo = [], list(nodes)
    while todo:
        node = todo.pop()
        found.append(node)
        todo += node.children.values()
    return found


def _culprits(forest: PrefixMap, hashes: list[int]) -> list[Culprit]:
    groups: dict[tuple[Tier, str | None, str], list[tuple[MapEviction, int]]] = {}
    for gone in forest.evicted:
        for key in gone.keys() & hashes:
            eviction = gone[key]
            rule = "" if eviction.rule is None else eviction.rule.words
            groups.setdefault((eviction.tier, eviction.request, rule), []).append((eviction, key))
    culprits = []
    for (tier, request, rule), found in groups.items():
        lay = sorted(ns for ns in (eviction.lay_ns(key) for eviction, key in found) if ns is not None)
        last_ns = max(eviction.at_ns for eviction, _ in found)
        culprits.append(Culprit(tier, request, rule, len(found), last_ns, lay[(len(lay) - 1) // 2] if lay else None))
    return sorted(culprits, key=lambda each: (-each.blocks, each.tier, each.request or ""))
