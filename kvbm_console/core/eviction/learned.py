"""``learned``: evict the block whose place is worth least, by what the load has shown so far.

Theory of operation
-------------------
Known blocks, resident or evicted, form a tree of prefixes. A node is a chain of blocks that were always used together.
A use of a prompt walks the tree, divides a node where the prompt leaves it, and adds what is new.

A node at which several sessions part, and every node above it, is shared. Its class is the number of its uses and the
gap before the last one. The nodes below belong to one session. Their class is the turn of the session and the gap
before it, also for blocks that are new in this turn, because they come back when the session does.

``Returns`` learns for each class at which ages its blocks come back, and says what a place with such a block is worth
at its age. A node climbs a ladder of ages (``RUNGS``), and on every rung its worth is read again. So a heap of the
leaves has the next victims on top. Within a node the deepest block goes first.

Until the first fit all worths are equal, and the node that was used longest ago goes first, as under ``simple_lru``.

Example: chats pause for a minute between turns and end after five turns. After some chats the policy keeps a chat in
its second turn for minutes, and gives up one in its fifth turn at once.

Law of this file: blocks leave from the leaves of the tree, as far as they may. A choice of victims changes nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, filterfalse, groupby, islice
from typing import Any, Final

from kvbm_console.core.eviction.policy import ghosts_max
from kvbm_console.core.eviction.ranked import packed, unpacked
from kvbm_console.core.eviction.returns import BOUNDS, RUNGS, Returns, rung_of, session_class, shared_class

FIRST_FIT: Final = 1_000
"""References before the first fit."""
FIT_EVERY: Final = 5_000
"""References between two fits; the first ones follow each other faster."""
EARLY_SHARE: Final = 4
"""A fit comes when there were a quarter more references, at least ``FIRST_FIT`` and at most ``FIT_EVERY``."""
CLIMB_EVERY: Final = 128
"""References between two looks at the ladder: a look costs as much as 30 references."""
AWAITED_FITS: Final = 2
"""So many fits long a block that came back without a use is kept before all others."""
TICK_NS: Final = 1_000
"""The clock moves on by so much at each use, so that a load without times has an order at least."""
KEPT_GHOSTS: Final = 7 / 8
"""Share of the ghosts that is kept when their bound is reached."""
_HEAP_SLACK: Final = 1_000
"""Dead heap entries that are carried before the heap is built anew, beside three per node."""


class Node:
    """A chain of blocks that were always used together."""

    __slots__ = ("asked", "awaited", "busy", "children", "counted", "end", "entry", "fan", "gone", "held",
                 "keys", "kind", "last", "number", "parent", "real", "rung", "turn", "uses")

    def __init__(self, keys: list[int], parent: "Node | None") -> None:
        self.keys = keys
        self.parent = parent
        self.children: dict[int, Node] = {}
        """First key to the node."""
        self.fan = 0
        """Children that are real."""
        self.real = len(keys) > 1
        """False for a lone block without continuation. It is often the partial end of a prompt and starts nothing."""
        self.held = 0
        """Resident keys."""
        self.busy = 0
        """Children that hold resident keys, themselves or below."""
        self.end = 0
        """No key from here on is resident."""
        self.asked = 0
        """So many leading keys were asked for by requests. The others were stored as what follows them."""
        self.last = 0
        """Time of the last use."""
        self.number = 0
        """Of the last use: the nodes of one use are numbered deepest first."""
        self.uses = 0
        self.turn = 1
        self.kind = 0
        """Class."""
        self.rung = 0
        self.counted = False
        """True for the one of several nodes with the same class and use that is counted on the ladder."""
        self.gone = False
        """True if some of its blocks were evicted since the last use."""
        self.awaited = 0
        """Above 0 if it came back without a use, as a prefetch does: its use is near, whatever was learnt."""
        self.entry = 0
        """Number of its live entry in the heap, else 0."""

    @property
    def occupied(self) -> bool:
        """True if it holds resident keys, itself or below."""
        return bool(self.held or self.busy)


Entry = tuple[float, int, int, Node]
"""(worth, number of the use, number of the entry, node)"""


class Learned:
    """See the head of this file."""

    name = "learned"
    is_recency = False

    def __init__(self, capacity: int) -> None:
        self.ghosts_max = ghosts_max(capacity)
        self.returns = Returns()
        self._root = Node([], None)
        self._node: dict[int, Node] = {}
        """Known key to its node."""
        self._held: dict[int, None] = {}
        """The resident keys."""
        self._nodes: dict[Node, None] = {}
        self._ladder: list[deque[tuple[int, Node]]] = [deque() for _ in range(RUNGS)]
        """(number, node) on each rung, the oldest first; an entry with another number than its node's is dead."""
        self._top = 0
        """No higher rung has entries."""
        self._heap: list[Entry] = []
        self._entries = self._numbers = 0
        """Entries and uses of nodes so far, which number them."""
        self._now = 0
        self._references = 0
        self._climb_at = 0
        self._fit_at = FIRST_FIT
        self._prune_at = self.ghosts_max
        """Ghosts at which the next ones are forgotten."""

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._held.keys()

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """See ``EvictionPolicy.touch``."""
        used = self._use(list(keys), at_ns)
        fresh = list(filterfalse(self._held.__contains__, keys))
        self._hold(fresh)
        # A block that is known under another prefix comes into a node that was not used.
        self._enter(dict.fromkeys((*used, *map(self._node.__getitem__, fresh))))
        self._turn_over()

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """See ``TierPolicy.use``; keys that are not resident are remembered."""
        self._enter(self._use(list(keys), at_ns))
        self._turn_over()

    def insert(self, keys: Sequence[int], beside: int | None, at_ns: int) -> None:
        """See ``TierPolicy.insert``. Keys that no request has asked for belong to the session of ``beside``."""
        fresh = list(filterfalse(self._node.__contains__, keys))
        if fresh:
            self._now = max(self._now, at_ns)
            above = self._root if beside is None else self._node.get(beside, self._root)
            if above is self._root or beside is None or not self._put_behind(above, beside, fresh):
                node = Node(fresh, above)
                self._add(node)
                self._used(node, session_class(1, 0) if above is self._root else above.kind, above.turn, counted=False)
                node.asked = 0
        self._hold(filterfalse(self._held.__contains__, keys))
        nodes = dict.fromkeys(map(self._node.__getitem__, keys))
        for node in nodes:
            if node.gone:
                node.awaited = AWAITED_FITS
        self._enter(nodes)

    def forget(self, keys: Iterable[int]) -> None:
        """These blocks are not resident any more."""
        held = self._held
        for node, group in groupby(filter(held.__contains__, keys), self._node.__getitem__):
            for key in group:
                if key in held:
                    del held[key]
                    node.held -= 1
            own, end = node.keys, node.end
            while end and own[end - 1] not in held:
                end -= 1
            node.end, node.gone = end, True
            if not node.occupied:
                self._vacate(node)
        if len(self._node) - len(held) > self._prune_at:
            self._prune()

    # --- the tree ---

    def _use(self, keys: list[int], at_ns: int) -> list[Node]:
        """Learn from a use of these blocks; returns their nodes, deepest first."""
        now = self._now = max(self._now + TICK_NS, at_ns)
        self._references += len(keys)
        if self._references >= self._climb_at:
            self._climb_at = self._references + CLIMB_EVERY
            self._climb(now)
        path, known = self._match(keys)
        fresh = keys[known:]
        if fresh and not (self._node.keys().isdisjoint(fresh) and len(set(fresh)) == len(fresh)):
            strays = list(dict.fromkeys(filter(self._node.__contains__, fresh)))
            fresh = [key for key in dict.fromkeys(fresh) if key not in self._node]
            for node in dict.fromkeys(map(self._node.__getitem__, strays)):
                if node not in path:  # the same block under another prefix: only its time counts
                    self._used(node, node.kind, node.turn, counted=False)
                    self._enter([node])
        shared, turn, gap_ns = self._session(path, bool(fresh), now)
        before: tuple[int, int] | None = None
        for node in path:
            rung = rung_of(now - node.last)
            if node.counted and rung > node.rung:
                self.returns.climbed(node.kind, node.rung, rung)
                node.rung = rung
            if before != (node.kind, node.last):
                before = node.kind, node.last
                self.returns.again(node.kind, rung)
        kinds = [shared_class(node.uses + 1, now - node.last) for node in path[:shared]]
        session = session_class(turn, gap_ns)
        kinds += [session] * (len(path) - shared)
        if fresh:
            node = self._grow(path[-1] if path else self._root, fresh)
            if not path or node is not path[-1]:
                path.append(node)
                kinds.append(session)
        deeper = -1
        for at in range(len(path) - 1, -1, -1):
            self._used(path[at], kinds[at], 1 if at < shared else turn, counted=kinds[at] != deeper)
            deeper = kinds[at]
        path.reverse()
        return path

    def _session(self, path: list[Node], grows: bool, now: int) -> tuple[int, int, int]:
        """How many leading nodes are shared, the turn of the session behind them, and the gap before it."""
        shared = 0
        for at, node in enumerate(path):
            if node.fan > 1:
                shared = at + 1
        if path and grows and path[-1].fan:
            shared = len(path)
        if shared == len(path):
            return shared, 1, 0
        return shared, path[-1].turn + 1, now - path[-1].last

    def _match(self, keys: list[int]) -> tuple[list[Node], int]:
        """The nodes of the known prefix, the last of which ends where it ends, and its length."""
        node, at, path = self._root, 0, list[Node]()
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            own = child.keys
            if own != keys[at : at + len(own)]:
                same = 1
                while at + same < len(keys) and same < len(own) and own[same] == keys[at + same]:
                    same += 1
                path.append(self._divide(child, same))
                return path, at + same
            path.append(child)
            at += len(own)
            node = child
        return path, at

    def _divide(self, tail: Node, size: int) -> Node:
        """A new node takes the first keys of this one, which keeps its place on the ladder."""
        parent = tail.parent
        assert parent is not None
        head = Node(tail.keys[:size], parent)
        tail.keys = tail.keys[size:]
        parent.children[head.keys[0]] = head
        tail.parent = head
        head.children[tail.keys[0]] = tail
        head.last, head.uses, head.turn, head.kind = tail.last, tail.uses, tail.turn, tail.kind
        tail.real = len(tail.keys) > 1 or bool(tail.children)
        head.real, head.fan = True, int(tail.real)
        self._node.update(dict.fromkeys(head.keys, head))
        self._nodes[head] = None
        head.held = sum(map(self._held.__contains__, head.keys))
        tail.held -= head.held
        head.gone, head.awaited = tail.gone, tail.awaited
        head.asked, tail.asked = min(tail.asked, size), max(tail.asked - size, 0)
        head.end, tail.end = min(tail.end, size), max(tail.end - size, 0)
        head.busy = int(tail.occupied)
        if not tail.held:
            tail.entry = 0
        return head

    def _grow(self, node: Node, keys: list[int]) -> Node:
        """Put unknown keys behind a node: into it if nothing continues it, else into a new one, which is returned."""
        if node.parent is not None and not node.children:
            self._starts(node)
            node.keys += keys
            self._node.update(dict.fromkeys(keys, node))
            return node
        node = Node(keys, node)
        self._add(node)
        return node

    def _add(self, node: Node) -> None:
        """A new node of unknown keys behind its parent."""
        parent = node.parent
        assert parent is not None
        self._starts(parent)
        parent.children[node.keys[0]] = node
        parent.fan += node.real
        self._nodes[node] = None
        self._node.update(dict.fromkeys(node.keys, node))

    def _starts(self, node: Node) -> None:
        """Something continues this node."""
        if node.parent is not None and not node.real:
            node.real = True
            node.parent.fan += 1

    def _put_behind(self, node: Node, beside: int, keys: list[int]) -> bool:
        """Put unknown keys directly behind this key of a node, if no request has asked for what stands there.

        An answer may be stored from its end, block by block, always beside the end of the prompt.
        """
        place = node.keys.index(beside) + 1
        if place == len(node.keys) and node.children:
            # The newest of them. A policy from a keyframe knows its children in another order.
            unasked = (child for child in node.children.values() if not child.asked)
            node = max(unasked, key=lambda child: child.number, default=node)
            place = 0 if node.parent is not None and not node.asked else place
        if place < node.asked or node.children:
            return False
        assert node.parent is not None
        self._starts(node)
        del node.parent.children[node.keys[0]]
        node.keys[place:place] = keys
        node.parent.children[node.keys[0]] = node
        self._node.update(dict.fromkeys(keys, node))
        return True

    def _used(self, node: Node, kind: int, turn: int, counted: bool) -> None:
        """A use of this node, which begins on the lowest rung."""
        self._numbers += 1
        node.number, node.last, node.rung, node.entry = self._numbers, self._now, 0, 0
        node.uses += 1
        node.kind, node.turn, node.counted = kind, turn, counted
        node.asked, node.gone, node.awaited = len(node.keys), False, 0
        self._ladder[0].append((node.number, node))
        if counted:
            self.returns.began(kind)

    def _climb(self, now: int) -> None:
        """Every node to the rung of its age. Higher rungs come first, so each rung stays in order of age."""
        ladder, top = self._ladder, self._top
        for rung in range(min(top, RUNGS - 2), -1, -1):
            row = ladder[rung]
            bound = now - BOUNDS[rung + 1]
            while row:
                number, node = row[0]
                if node.number == number:
                    if node.last > bound:
                        break
                    higher = rung_of(now - node.last)
                    if node.counted:
                        self.returns.climbed(node.kind, rung, higher)
                    node.rung, node.entry = higher, 0
                    ladder[higher].append((number, node))
                    self._top = max(self._top, higher)
                    if node.held and not node.busy:
                        self._push(node)
                row.popleft()

    def _prune(self) -> None:
        """Forget the ghosts that were used longest ago, children before parents."""
        excess = len(self._node) - len(self._held) - int(self.ghosts_max * KEPT_GHOSTS)
        for node in sorted(self._nodes, key=lambda node: node.number):
            if excess <= 0:
                break
            parent, gone = node.parent, node.keys[node.end :]
            if node.children or not gone or parent is None:
                continue
            excess -= len(gone)
            for key in gone:
                del self._node[key]
            if node.end:
                node.keys = node.keys[: node.end]
                continue
            del parent.children[gone[0]], self._nodes[node]
            parent.fan -= node.real
            node.number = 0  # its entries on the ladder are dead
        self._prune_at = max(self.ghosts_max, len(self._node) - len(self._held) + self.ghosts_max // 8)

    # --- residence ---

    def _hold(self, keys: Iterable[int]) -> None:
        """These known keys become resident."""
        held = self._held
        for node, group in groupby(keys, self._node.__getitem__):
            own = dict.fromkeys(group)
            was = node.occupied
            held.update(own)
            node.held += len(own)
            node.end = len(node.keys)
            if not was:
                above = node.parent
                while above is not None:
                    above.busy += 1
                    above.entry = 0
                    if above.held or above.busy > 1:
                        break
                    above = above.parent

    def _vacate(self, node: Node) -> None:
        """Nothing at or below this node is resident any more."""
        node.entry = 0
        above = node.parent
        while above is not None:
            above.busy -= 1
            if above.held and not above.busy:
                self._push(above)
            if above.held or above.busy:
                return
            above = above.parent

    # --- the order ---

    def _worth(self, node: Node) -> float:
        if node.awaited:
            return math.inf
        return self.returns.worths(node.kind)[node.rung] if self.returns.fits else 0.0

    def _push(self, node: Node) -> None:
        self._entries += 1
        node.entry = self._entries
        heappush(self._heap, (self._worth(node), node.number, self._entries, node))

    def _enter(self, nodes: Iterable[Node]) -> None:
        """Put those of these nodes into the heap that are leaves with resident keys."""
        for node in nodes:
            if node.held and not node.busy:
                self._push(node)

    def _turn_over(self) -> None:
        """Fit when it is time, and build the heap anew after a fit or when it carries too many dead entries."""
        if self._references >= self._fit_at:
            self._fit_at = self._references + min(max(self._references // EARLY_SHARE, FIRST_FIT), FIT_EVERY)
            self.returns.fit()
            for node in self._nodes:
                if node.awaited:
                    node.awaited -= 1
        elif len(self._heap) <= 3 * len(self._nodes) + _HEAP_SLACK:
            return
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = []
        for node in self._nodes:
            if node.held and not node.busy:
                self._entries += 1
                node.entry = self._entries
                self._heap.append((self._worth(node), node.number, self._entries, node))
        heapify(self._heap)

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` keys of the least worth that may go, what continues them first; None when there are fewer."""
        chosen: dict[int, None] = {}

        def may_go(key: int) -> bool:
            return key not in protected and (evictable is None or evictable(key))

        heap, passed, freed = self._heap, list[Entry](), list[Entry]()
        left: dict[Node, int] = {}
        """Node to its children that still hold blocks without the chosen ones."""
        while len(chosen) < count and (heap or freed):
            if freed and (not heap or freed[0] < heap[0]):
                node = heappop(freed)[3]
            else:
                entry = heappop(heap)
                node = entry[3]
                if node.entry != entry[2]:
                    continue
                passed.append(entry)
            if not self._give(node, chosen, count, may_go):
                continue
            above = node.parent
            while above is not None:
                left[above] = left.get(above, above.busy) - 1
                if not left[above] and above.held:
                    heappush(freed, (self._worth(above), above.number, 0, above))
                if left[above] or above.held:
                    break
                above = above.parent
        for entry in passed:
            heappush(heap, entry)
        if len(chosen) < count:  # blocks whose continuation may not go
            nodes = sorted(self._nodes, key=lambda node: (self._worth(node), node.number))
            held = filter(self._held.__contains__, (key for node in nodes for key in node.keys[node.end - 1 :: -1]))
            rest = filter(may_go, filterfalse(chosen.__contains__, held))
            chosen.update(dict.fromkeys(list(islice(rest, count - len(chosen)))))
        return list(chosen) if len(chosen) == count else None

    def _give(self, node: Node, chosen: dict[int, None], count: int, may_go: Callable[[int], bool]) -> bool:
        """Choose blocks of this node, deepest first, up to ``count`` of all; False if some of its blocks stay."""
        held, keys = self._held, node.keys
        for at in range(node.end - 1, -1, -1):
            key = keys[at]
            if key in held:
                if len(chosen) >= count or not may_go(key):
                    return False
                chosen[key] = None
        return True

    def gauges(self) -> dict[str, float]:
        """Ghosts and their bound, nodes of the tree, and fits so far."""
        return {
            "ghosts": len(self._node) - len(self._held), "ghosts_max": self.ghosts_max, "nodes": len(self._nodes),
            "fits": self.returns.fits,
        }

    # --- keyframes ---

    def export(self) -> Any:
        """The nodes by their last use, as columns, and what was learnt."""
        nodes = sorted(self._nodes, key=lambda node: node.number)
        index = {node: at for at, node in enumerate(nodes)}
        keys = list(chain.from_iterable(node.keys for node in nodes))
        return {
            "keys": packed(keys), "resident": bytes(map(self._held.__contains__, keys)),
            "sizes": [len(node.keys) for node in nodes],
            "parents": [index.get(node.parent, -1) if node.parent else -1 for node in nodes],
            **{column: [getattr(node, column) for node in nodes] for column in _COLUMNS},
            "clock": [self._now, self._references, self._climb_at, self._fit_at, self._numbers, self._prune_at],
            "returns": self.returns.export(),
        }

    def restore(self, exported: Any) -> None:
        """Take over exported columns."""
        (
            self._now, self._references, self._climb_at, self._fit_at, self._numbers, self._prune_at,
        ) = exported["clock"]
        self.returns.restore(exported["returns"])
        keys, at = unpacked(exported["keys"]), 0
        nodes = []
        for size in exported["sizes"]:
            node = Node(keys[at : at + size], None)
            self._node.update(dict.fromkeys(node.keys, node))
            self._nodes[node] = None
            nodes.append(node)
            at += size
        for column in _COLUMNS:
            for node, value in zip(nodes, exported[column], strict=True):
                setattr(node, column, value)
        for node, parent in zip(nodes, exported["parents"], strict=True):
            node.parent = self._root if parent < 0 else nodes[parent]
            node.parent.children[node.keys[0]] = node
            node.parent.fan += node.real
            self._ladder[node.rung].append((node.number, node))
            self._top = max(self._top, node.rung)
        self._hold(key for key, here in zip(keys, exported["resident"], strict=True) if here)
        for node in nodes:
            while node.end and node.keys[node.end - 1] not in self._held:
                node.end -= 1
        self._rebuild()


_COLUMNS: Final = ("asked", "awaited", "gone", "last", "number", "uses", "turn", "kind", "rung", "counted", "real")
