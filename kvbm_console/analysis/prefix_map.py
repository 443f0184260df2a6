"""The prefix map: all prompts as a forest of blocks, with who used each stretch and what happened to it.

Theory of operation
-------------------
Prompts that begin alike have equal hashes, so they are paths in a forest. A node is a run of blocks without a branch. A
prompt follows the nodes whose columns are the beginning of the rest of its own column. If it leaves a node in the
middle, the node is split there:

    a b c d          one node, 1 request
    a b x            a b (2 requests), below it c d (1 request) and x (1 request)

Columns are compared as bytes, a whole run at a time, so a prompt costs its number of nodes and not of blocks. New
blocks cost an entry of a dictionary each. Event streams name the block in front of each chain instead of prompts; the
chain then hangs below that block.

A request counts for every node of its path from its arrival until ``WINDOW_NS`` after its end. Evictions are kept by
hash: the event, and when the block was stored. An admission that misses such a block is its loss.

The map does not know where a block lies now. The facts have it, so it is never out of date.

A block has one place in the forest, because its hash tells all blocks in front of it. An engine or a stream that names
it at another place tells something wrong: that part of its chain is left out.

Law of this file: every block of a prompt is in one node. At most ``BLOCKS_MAX`` blocks are kept beside those of live
requests, and what is forgotten is counted.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Final

import msgspec

from kvbm_console.analysis.admissions import first_miss
from kvbm_console.core import events as ev
from kvbm_console.core.columns import HASH_BYTES, gather, pack_hashes, unpack_hashes, unpack_ids
from kvbm_console.core.ids import EvictRule, Tier
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

WINDOW_NS: Final = 600_000_000_000
"""Ten minutes, as the longest trend on any screen."""
BLOCKS_MAX: Final = 150_000
"""Blocks in the map, 28 MB. With more, those that were used longest ago are forgotten down to ``KEPT``."""
EVICTED_MAX: Final = 100_000
"""Evicted blocks that are remembered of each tier, 12 MB; the oldest go first."""
KEPT: Final = 0.8
ENDED_MAX: Final = 20_000
"""Ended requests of the window: 30 a second."""
LOSSES_MAX: Final = 50_000
"""Blocks that were asked for again; the oldest go first."""


class MapNode:
    """A run of blocks that no known prompt leaves or enters in between."""

    __slots__ = ("children", "column", "depth", "first_ns", "last_ns", "parent", "uses")

    def __init__(
        self, parent: "MapNode | None", column: bytes | bytearray, depth: int, at_ns: int, uses: int = 0,
    ) -> None:
        self.parent = parent
        self.column = bytearray(column)
        """The hashes of its blocks."""
        self.depth = depth
        """Blocks in front of it."""
        self.first_ns = at_ns
        self.last_ns = at_ns
        """When a request with it arrived or was admitted last, or when it was stored last."""
        self.uses = uses
        """Requests of the window whose prompts or answers contain it."""
        self.children: dict[bytes, MapNode] = {}
        """The first hash of each node behind it to the node."""

    @property
    def blocks(self) -> int:
        """Its blocks."""
        return len(self.column) // HASH_BYTES

    @property
    def hashes(self) -> list[int]:
        """Their hashes."""
        return unpack_hashes(bytes(self.column))

    def path(self) -> Iterator["MapNode"]:
        """The node and all nodes in front of it."""
        node: MapNode | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class MapUser:
    """A request and the last node of its path. ``ended_ns`` is None while it lives."""

    __slots__ = ("begun_ns", "ended_ns", "node", "request", "slot")

    def __init__(self, slot: int, request: str, node: MapNode, begun_ns: int) -> None:
        self.slot = slot
        self.request = request
        self.node = node
        self.begun_ns = begun_ns
        self.ended_ns: int | None = None


class MapEviction(msgspec.Struct, frozen=True, gc=False):
    """One eviction event, for the blocks that it took."""

    seq: int
    at_ns: int
    tier: Tier
    request: str | None
    """The request that wanted the room; None if none did, or if it is not known."""
    rule: EvictRule | None
    """None for an event stream, which tells no rule."""
    hashes: bytes
    stored_ns: Sequence[int]
    """When each of its blocks had been stored there, below 0 if unknown."""

    def lay_ns(self, key: int) -> int | None:
        """How long this block had lain in the tier; None if unknown."""
        stored_ns = self.stored_ns[unpack_hashes(self.hashes).index(key)]
        return self.at_ns - stored_ns if stored_ns >= 0 else None


class MapLoss(msgspec.Struct, frozen=True, gc=False):
    """The blocks that one admission missed because of one eviction."""

    seq: int
    at_ns: int
    request: str
    """Empty for an event stream, which names no request."""
    eviction: MapEviction


class PrefixMap:
    """The forest. ``root`` has no blocks; its children begin prompts."""

    def __init__(self, window_ns: int = WINDOW_NS, blocks_max: int = BLOCKS_MAX) -> None:
        self.window_ns = window_ns
        self.blocks_max = blocks_max
        self.root = MapNode(None, b"", 0, 0)
        self.node_of: dict[int, MapNode] = {}
        """Hash to its node."""
        self.users: dict[int, MapUser] = {}
        """Live slot to its request."""
        self.ended: deque[MapUser] = deque()
        """Requests of the window that ended, the oldest first."""
        self.evicted: tuple[dict[int, MapEviction], ...] = ({}, {}, {}, {})
        """For G1 to G4: hash to its last eviction."""
        self.lost: dict[int, tuple[int, MapLoss]] = {}
        """Hash to the number of its losses and the last of them."""
        self.orphans: dict[int, int] = {}
        """First hash of a tree to the block in front of it, which is not known."""
        self.since_ns: int | None = None
        """The time from which on requests are counted; None before the first."""
        self.forgotten_blocks = 0
        self._limit = blocks_max
        self.at_ns = 0
        self.version = 0
        """Grows with every change of a node."""

    # --- requests ----------------------------------------------------------------------------------------------------

    def opened(self, slot: int, request: str, column: bytes, at_ns: int) -> None:
        """A request arrived with these full prompt blocks."""
        self._pass(at_ns)
        if slot in self.users:
            self.closed(slot, at_ns)
        node = self._follow(self.root, column, at_ns)
        self.users[slot] = MapUser(slot, request, node, at_ns)
        for each in node.path():
            each.uses += 1
            each.last_ns = at_ns
        self.root.uses += 1

    def cloned(self, slot: int, request: str, parent: int, at_ns: int) -> None:
        """A request continues another request's blocks."""
        known = self.users.get(parent)
        node = self.root if known is None else known.node
        column = b"".join(bytes(each.column) for each in reversed(list(node.path())))
        self.opened(slot, request, column, at_ns)

    def filled(self, slot: int, column: bytes, at_ns: int) -> None:
        """Blocks behind all known blocks of a request became full: its answer."""
        user = self.users.get(slot)
        if user is None:
            return
        node = user.node
        is_end = node is not self.root and node.uses <= 1 and not node.children
        if is_end and len(self._new_part(column)) == len(column):
            self._own(node, column)
            node.column += column
            node.last_ns = at_ns
            return
        user.node = end = self._follow(node, column, at_ns)
        for each in end.path():
            each.last_ns = at_ns
            if each is node:
                return
            each.uses += 1

    def closed(self, slot: int, at_ns: int) -> None:
        """A request ended; it stays in the window."""
        user = self.users.pop(slot, None)
        if user is not None:
            user.ended_ns = at_ns
            self.ended.append(user)
            self._pass(at_ns)

    def _pass(self, at_ns: int) -> None:
        """Time has come to ``at_ns``: requests leave the window."""
        self.at_ns = max(self.at_ns, at_ns)
        if self.since_ns is None:
            self.since_ns = at_ns
        ended, edge = self.ended, self.at_ns - self.window_ns
        while ended and ((ended[0].ended_ns or 0) < edge or len(ended) > ENDED_MAX):
            self._leave(ended.popleft())

    def _leave(self, user: MapUser) -> None:
        self.version += 1
        self.root.uses -= 1
        for node in user.node.path():
            node.uses -= 1

    # --- what happened to blocks -------------------------------------------------------------------------------------

    def evict(self, eviction: MapEviction, hashes: Sequence[int]) -> None:
        """A tier gave these blocks up."""
        gone = self.evicted[eviction.tier - 1]
        for key in hashes:
            gone[key] = eviction
        if len(gone) > EVICTED_MAX:
            for key in list(islice(gone, len(gone) // 4)):
                del gone[key]

    def missed(self, seq: int, at_ns: int, request: str, hashes: Sequence[int]) -> None:
        """An admission did not find these blocks anywhere: what was evicted of them is a loss."""
        if not any(self.evicted):
            return  # an engine that has just begun reports millions of blocks
        lost = self.lost
        losses: dict[int, MapLoss] = {}
        for key in hashes:
            eviction = self.eviction_of(key)
            if eviction is not None:
                loss = losses.get(eviction.seq)
                if loss is None:
                    loss = losses[eviction.seq] = MapLoss(seq, at_ns, request, eviction)
                times = lost[key][0] if key in lost else 0
                lost[key] = times + 1, loss
        if len(lost) > LOSSES_MAX:
            for key in list(islice(lost, len(lost) // 4)):
                del lost[key]

    def eviction_of(self, key: int) -> MapEviction | None:
        """The last eviction of a block, of any tier."""
        found = [gone[key] for gone in self.evicted if key in gone]
        return max(found, key=lambda eviction: eviction.seq) if found else None

    def cleared(self) -> None:
        """All tiers were emptied: no policy evicted these blocks."""
        for gone in self.evicted:
            gone.clear()

    # --- chains of event streams -------------------------------------------------------------------------------------

    def hang(self, parent: int, column: bytes, at_ns: int) -> None:
        """A stream stored a chain of blocks behind the block ``parent``, 0 for the beginning of a prompt.

        If that block is not known, the chain begins a tree of its own.
        """
        node = self.node_of.get(parent) if parent else self.root
        first = int.from_bytes(column[:HASH_BYTES], "little")
        orphan = node is None and first not in self.node_of
        if node is None:
            node = self.root
        elif node is not self.root:
            index = node.hashes.index(parent) + 1
            node = self._split(node, index) if index < node.blocks else node
        end = self._follow(node, column, at_ns)
        for each in end.path():
            each.last_ns = at_ns
        if orphan:
            self.orphans[first] = parent
        if self.orphans:
            for key in [first for first, front in self.orphans.items() if front in self.node_of]:
                self._adopt_orphan(key)

    def _adopt_orphan(self, first: int) -> None:
        """The block in front of a tree is known now: the tree belongs behind it."""
        front, node = self.orphans.pop(first), self.node_of.get(first)
        parent = self.node_of[front]
        if node is None or node.parent is not self.root or _is_behind(parent, node):
            return  # it was forgotten meanwhile, or broken parents form a circle
        index = parent.hashes.index(front) + 1
        self._move(node, self._split(parent, index) if index < parent.blocks else parent)

    def _move(self, node: MapNode, parent: MapNode) -> None:
        """Put a tree of the root behind another node."""
        first = bytes(node.column[:HASH_BYTES])
        del self.root.children[first]
        parent.children[first] = node
        node.parent = parent
        for each in parent.path():
            each.uses += node.uses
        deeper = parent.depth + parent.blocks - node.depth
        todo = [node]
        while todo:
            each = todo.pop()
            each.depth += deeper
            todo += each.children.values()

    # --- the forest --------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[MapNode]:
        """All nodes; those in front come first."""
        todo = list(reversed(self.root.children.values()))
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.children.values())

    def path_of(self, request: str) -> list[MapNode]:
        """The nodes of a request of the window, the last one first; of several with the name the newest."""
        everyone = (*reversed(self.users.values()), *reversed(self.ended))
        return next((list(user.node.path()) for user in everyone if user.request == request), [])

    def users_by_node(self) -> dict[MapNode, list[MapUser]]:
        """Node to the requests of the window that have it, those that live first, then the last that ended."""
        found: dict[MapNode, list[MapUser]] = {}
        for user in (*reversed(self.users.values()), *reversed(self.ended)):
            for node in user.node.path():
                found.setdefault(node, []).append(user)
        return found

    def _follow(self, node: MapNode, column: bytes, at_ns: int) -> MapNode:
        """The node at whose end this column ends, behind ``node``; what is not there yet is made."""
        offset, end = 0, len(column)
        while offset < end:
            child = node.children.get(column[offset : offset + HASH_BYTES])
            if child is None and self.orphans:
                child = self._orphan_in(node, column, offset, at_ns)
            if child is None:
                return self._add(node, column[offset:], at_ns)
            size = len(child.column)
            if column[offset : offset + size] != child.column:
                common = _common(child.column, column, offset)
                child = self._split(child, common)
                size = common * HASH_BYTES
            node = child
            offset += size
        self.version += 1
        return node

    def _add(self, parent: MapNode, column: bytes, at_ns: int) -> MapNode:
        """Make a node behind another one, of the part of the column that is new."""
        column = self._new_part(column)
        if not column:
            return parent
        node = MapNode(parent, column, parent.depth + parent.blocks, at_ns)
        parent.children[column[:HASH_BYTES]] = node
        self._own(node, column)
        return node

    def _orphan_in(self, node: MapNode, column: bytes, offset: int, at_ns: int) -> MapNode | None:
        """Put a tree that this column contains where it belongs, and make the blocks in front of it.

        Returns the node that comes next on the way, None if there is no such tree.
        """
        hashes = unpack_hashes(column[offset:])
        at = next((index for index, key in enumerate(hashes) if key in self.orphans), None)
        if at is None:
            return None
        tree, before = self.node_of.get(hashes[at]), column[offset : offset + at * HASH_BYTES]
        if tree is not None and (_is_behind(node, tree) or len(self._new_part(before)) < len(before)):
            return None  # broken parents form a circle, or the blocks in front of the tree are elsewhere
        del self.orphans[hashes[at]]
        if tree is None or tree.parent is not self.root:
            return None
        front = self._add(node, before, at_ns)
        if hashes[at] in self.node_of:  # else there was no room for both, and the older one was forgotten
            self._move(tree, front)
        return front if at else tree

    def _new_part(self, column: bytes) -> bytes:
        """The column up to the first block that has a place already."""
        hashes = unpack_hashes(column)
        if self.node_of.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes):
            return column
        new: set[int] = set()
        for key in hashes:
            if key in new or key in self.node_of:
                break
            new.add(key)
        return column[: len(new) * HASH_BYTES]

    def _own(self, node: MapNode, column: bytes) -> None:
        """These blocks belong to the node."""
        self.version += 1
        node_of = self.node_of
        for key in unpack_hashes(column):
            node_of[key] = node
        if len(self.node_of) > self._limit:
            self._forget(node)

    def _split(self, node: MapNode, blocks: int) -> MapNode:
        """Cut a node behind so many blocks; returns the front part. The rest stays the same object."""
        parent = node.parent
        assert parent is not None
        size = blocks * HASH_BYTES
        front = MapNode(parent, node.column[:size], node.depth, node.first_ns, node.uses)
        front.last_ns = node.last_ns
        del node.column[:size]
        node.depth += blocks
        node.parent = front
        first = bytes(front.column[:HASH_BYTES])
        parent.children[first] = front
        front.children[bytes(node.column[:HASH_BYTES])] = node
        self.node_of.update(zip(front.hashes, repeat(front)))
        self.version += 1
        return front

    def _forget(self, kept: MapNode) -> None:
        """Forget ends of the forest that were used longest ago; ``kept`` and what is in front of it stay."""
        goal = int(self.blocks_max * KEPT)
        spared = set(map(id, kept.path()))
        while self.ended and sum(node.blocks for node in self.nodes() if node.uses or id(node) in spared) > goal:
            for _ in range(1 + len(self.ended) // 8):
                self._leave(self.ended.popleft())
        ends = sorted(
            (node for node in self.nodes() if not node.children and not node.uses and id(node) not in spared),
            key=lambda node: node.last_ns, reverse=True,
        )
        while ends and len(self.node_of) > goal:
            node = ends.pop()
            parent = node.parent
            assert parent is not None
            for key in node.hashes:
                del self.node_of[key]
                self.orphans.pop(key, None)
            self.forgotten_blocks += node.blocks
            del parent.children[bytes(node.column[:HASH_BYTES])]
            if parent.parent is not None and not parent.children and not parent.uses and id(parent) not in spared:
                ends.append(parent)
        self._limit = max(self.blocks_max, len(self.node_of) * 5 // 4)


def _is_behind(node: MapNode, front: MapNode) -> bool:
    """True if ``front`` is the node or stands in front of it."""
    return any(each is front for each in node.path())


def _common(front: bytearray, column: bytes, offset: int) -> int:
    """Blocks that both have in front; at least one and not all of ``front``, or ``column`` ends there."""
    low, high = 1, min(len(front), len(column) - offset) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        size = middle * HASH_BYTES
        if front[:size] == column[offset : offset + size]:
            low = middle
        else:
            high = middle - 1
    return low


# --- the fold --------------------------------------------------------------------------------------------------------


def opened(forest: PrefixMap, e: ev.SlotOpened) -> None:
    """A request arrived."""
    forest.opened(e.slot, e.request, bytes_of(e.hashes), e.at_ns)


def cloned(forest: PrefixMap, e: ev.SlotCloned) -> None:
    """A request continues another one."""
    forest.cloned(e.slot, e.request, e.parent, e.at_ns)


def closed(forest: PrefixMap, e: ev.SlotClosed) -> None:
    """A request ended."""
    forest.closed(e.slot, e.at_ns)


def filled(forest: PrefixMap, e: ev.BlocksFilled, state: CacheState) -> None:
    """Blocks became full; ``state`` are the facts before."""
    column, at = bytes_of(e.hashes), 0
    for number, count in zip(e.slots, e.counts, strict=True):
        slot = state.slots.get(number)
        at += count
        beyond = 0 if slot is None else slot.filled_blocks + count - len(slot.hashes)
        if beyond > 0:
            forest.filled(number, column[(at - beyond) * HASH_BYTES : at * HASH_BYTES], e.at_ns)


def evicted(forest: PrefixMap, e: ev.BlocksEvicted, state: CacheState) -> None:
    """A tier gave blocks up; ``state`` are the facts before."""
    pool = state.pools[e.pool]
    owner = None if e.for_slot is None else state.slots.get(e.for_slot)
    request = None if owner is None else owner.request
    stored_ns = array("q", gather(pool.stored_at, unpack_ids(e.ids)))
    forest.evict(MapEviction(
        e.seq, e.at_ns, pool.info.tier, request, e.rule, bytes_of(e.hashes), stored_ns), unpack_hashes(e.hashes))


def missed_blocks(e: ev.PrefixScored, slot: SlotFacts) -> list[int]:
    """The hashes of the prompt's blocks from the first miss on, as far as they are known."""
    at = first_miss(e, slot)
    return [] if at is None else slot.hashes[at : e.prompt_blocks]


def seen(forest: PrefixMap, e: ev.BlocksSeen, state: CacheState) -> None:
    """A stream told of blocks; ``state`` are the facts before."""
    pool = state.pools[e.pool]
    if e.removed:
        hashes = [key for key in unpack_hashes(e.removed) if key in pool.by_hash]
        stored_ns = array("q", [pool.stored_at[pool.by_hash[key]] for key in hashes])
        forest.evict(
            MapEviction(e.seq, e.at_ns, pool.info.tier, None, None, pack_hashes(hashes), stored_ns), hashes)
    if not e.stored or pool.info.group != min(
        other.info.group for other in state.pools if other.info.source == pool.info.source
    ):
        return
    again = absent(state, unpack_hashes(e.stored))
    if again:
        forest.missed(e.seq, e.at_ns, "", again)
    column, at = bytes_of(e.stored), 0
    for count, parent in zip(unpack_ids(e.chains), unpack_hashes(e.parents), strict=True):
        forest.hang(parent, column[at : at + count * HASH_BYTES], e.at_ns)
        at += count * HASH_BYTES


def adopt(forest: PrefixMap, state: CacheState, at_ns: int) -> None:
    """Take over facts after a stretch without events: live requests, and blocks that streams have described."""
    if forest.since_ns is None:
        forest.since_ns = state.at_ns
    for number in [number for number in forest.users if number not in state.slots]:
        forest.closed(number, at_ns)
    for number, slot in sorted(state.slots.items()):
        user = forest.users.get(number)
        known = 0 if user is None else user.node.depth + user.node.blocks
        if user is None or user.request != slot.request:
            forest.opened(number, slot.request, pack_hashes(slot.hashes), slot.opened_ns)
        elif known < len(slot.hashes):
            forest.filled(number, pack_hashes(slot.hashes[known:]), at_ns)
    for pool in state.pools:
        if pool.chains is not None and pool.by_hash:
            _adopt_chains(forest, pool)


def _adopt_chains(forest: PrefixMap, pool: PoolFacts) -> None:
    """Hang the chains of a stream's pool that the map does not have; of a larger pool the newest that it can hold."""
    new = _newest(forest, pool)
    behind: dict[int, list[int]] = {}
    for key, parent in new.items():
        behind.setdefault(parent, []).append(key)
    todo = [(parent, key) for key, parent in new.items() if parent not in new]
    while todo:
        parent, key = todo.pop()
        chain = [key]
        while len(behind.get(chain[-1], ())) == 1 and chain[-1] != behind[chain[-1]][0]:
            chain.append(behind[chain[-1]][0])
        stored_ns = pool.stored_at[pool.by_hash[key]]
        forest.hang(parent, pack_hashes(chain), max(0, stored_ns))
        todo += [(chain[-1], following) for following in behind.get(chain[-1], ())]


def _newest(forest: PrefixMap, pool: PoolFacts) -> dict[int, int]:
    """The blocks of a pool that the map does not have, each with the hash in front of it.

    Of more than the map holds it would forget the oldest one by one. So these are left out, but for those that stand in
    front of newer ones."""
    assert pool.chains is not None
    parent_of, by_hash, node_of = pool.chains.parent_of, pool.by_hash, forest.node_of
    most = forest.blocks_max
    if len(by_hash) <= most:
        return {key: parent_of[place] for key, place in by_hash.items() if key not in node_of}
    times = list(map(pool.stored_at.__getitem__, by_hash.values()))
    since = sorted(times)[-most]
    newest = [item for item, at in zip(by_hash.items(), times, strict=True) if at >= since][-most:]
    found = {}
    for key, place in newest:
        while key not in found and key not in node_of:
            found[key] = front = parent_of[place]
            if front not in by_hash:
                break
            key, place = front, by_hash[front]
    forest.forgotten_blocks += sum(key not in found and key not in node_of for key in by_hash)
    return found


def absent(state: CacheState, hashes: list[int]) -> list[int]:
    """Those of these blocks that no tier has, and that are not on their way there."""
    for pool in state.pools:
        by_hash = pool.by_hash
        hashes = [key for key in hashes if key not in by_hash]
    return hashes


def bytes_of(column: bytes | list[int]) -> bytes:
    """The column as bytes; it is a list where nothing is published."""
    return pack_hashes(column) if isinstance(column, list) else column
