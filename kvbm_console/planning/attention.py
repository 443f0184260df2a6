"""The attention windows of the groups of layers of a recorded engine, which no event tells.

The requests of the first group tell the blocks that they give back, which bound its window from both sides. Of other
groups only the cached blocks are known, which bound their windows from above, and the blocks that are copied down.

Law of this file: the window of the engine lies within the bounds, whatever the requests do.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

UNBOUNDED: Final = 2**62
TOKENS_MAX: Final = 2**31 - 1
"""The size of a window that passes nothing, and of which not all blocks are kept."""


class AttentionWindow:
    """The size of the attention window, by the blocks that requests gave back.

    With ``computed`` tokens a request has passed ``floor((computed + 1 - window) / block)`` blocks. An admission bounds
    the size from both sides. An engine that schedules a step before the last one has ended gives blocks back later, so
    a prefill bounds the size from above alone. A decoding request is then late by a token.
    """

    def __init__(self) -> None:
        self.block_tokens = 0
        self.moves = 0
        self._least, self._most = 2, UNBOUNDED
        self._decoded_least, self._decoded_most = 2, UNBOUNDED
        """The size, or a token more if the engine is late."""

    @property
    def tokens(self) -> int:
        """The largest size that explains all moves; 0 without a move, or if no size does."""
        if not self.moves or self._decoded_least > self._decoded_most:
            return 0
        most = min(self._decoded_most, self._most) if self._decoded_least == 2 else self._decoded_most
        return next((size for size in (most, most - 1) if self._least <= size <= self._most), 0)

    def found(self, computed: int, blocks: int) -> None:
        """A request was admitted with so many computed tokens, and without places for its first blocks."""
        self._least = max(self._least, computed + 2 - (blocks + 1) * self.block_tokens)
        if blocks:
            self.moved(computed, blocks)

    def moved(self, computed: int, blocks: int) -> None:
        """A request with so many computed tokens has passed so many blocks."""
        self.moves += 1
        self._most = min(self._most, computed + 1 - blocks * self.block_tokens)

    def decoded(self, computed: int, before: int, blocks: int) -> None:
        """A decoding request has passed so many blocks, and had passed ``before`` blocks a token ago."""
        self.moves += 1
        self._decoded_least = max(self._decoded_least, computed + 1 - (before + 1) * self.block_tokens)
        self._decoded_most = min(self._decoded_most, computed + 1 - blocks * self.block_tokens)


class GroupWindow:
    """The largest size of the window of a group beside the first, by its cached blocks.

    An engine finds a prefix if each group has what it needs of it: all of its blocks, or those of the group's window.
    So a prefix that was found bounds the size if an earlier block of it was gone. A block that is gone while its
    request runs lies before the window.

    >>> window = GroupWindow(16)
    >>> window.changed([11, 12, 13], [11], cleared=False)
    >>> window.found([11, 12, 13])
    >>> window.most, window.tokens
    (33, 32)
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.most = UNBOUNDED
        self.gone: set[int] = set()
        """Blocks that had a copy at the last step and have none now."""
        self.stored: set[int] = set()
        """Blocks that were cached at some time."""
        self._copies: Counter[int] = Counter()

    @property
    def tokens(self) -> int | None:
        """The largest size, or the power of two less than a block below it, as the windows of models are.

        0 if nothing bounds it, and None if no size explains all that happened.
        """
        if self.most in (UNBOUNDED, 1):
            return 0 if self.most == UNBOUNDED else None
        power = 1 << self.most.bit_length() - 1
        return power if self.most - power < self.block_tokens else self.most

    def with_copies(self, copies: "GroupCopies") -> int | None:
        """As ``tokens``, by the copies of this group, too."""
        if not copies.sparse:
            return self.tokens
        self.most = min(self.most, copies.most * self.block_tokens + 1)
        return TOKENS_MAX if self.most == UNBOUNDED else self.tokens

    def changed(self, stored: Sequence[int], removed: Sequence[int], *, cleared: bool) -> None:
        """Blocks were forgotten, removed and stored."""
        if cleared:
            removed = list(self._copies.elements())
        self._copies.subtract(removed)
        self.gone.update(key for key in removed if self._copies[key] <= 0)
        self._copies.update(stored)
        self.stored.update(stored)
        self.gone.difference_update(stored)

    def found(self, prefix: Sequence[int]) -> None:
        """The engine found this prefix, and its request still holds what it sees of it."""
        run = 0
        while run < len(prefix) and self._copies[prefix[-run - 1]] > 0:
            run += 1
        if run < len(prefix):
            self.most = min(self.most, run * self.block_tokens + 1)

    def passed(self, computed: int, block: int) -> None:
        """A request with so many computed tokens has passed this block."""
        self.most = min(self.most, max(1, computed + 1 - (block + 1) * self.block_tokens))


class GroupCopies:
    """The blocks of a group that an engine copied to its host tier, of those that it offered of any group.

    With ``EngineConfig.retention`` 0 the copies of a group with a window end before the last token of the prompt, and
    begin the blocks of its window earlier.

    >>> copies = GroupCopies()
    >>> copies.copied(6, range(2, 7), range(3, 6)); copies.sparse, copies.most
    (True, 3)
    """

    def __init__(self) -> None:
        self._less = self._more = 0
        """Copies that had no block behind the end of the prompt although others had, and those that had one."""
        self._needed = 0
        """Most blocks before that end that it was seen to need."""
        self._begins = False
        """True if it left out the block before those."""

    @property
    def sparse(self) -> bool:
        """True if not all blocks of the group are copied."""
        return self._less > self._more  # a preempted request may keep a prefix that ends behind its prompt

    @property
    def most(self) -> int:
        """Most blocks in a row that a hit needs."""
        return self._needed if self._begins else UNBOUNDED

    def copied(self, end: int, offered: Sequence[int], mine: Sequence[int]) -> None:
        """A copy of these blocks of a request, whose prompt has ``end`` blocks before its last token."""
        if offered[-1] >= end:
            self._more += mine[-1] >= end
            self._less += mine[-1] < end
        if mine[-1] == min(end, offered[-1] + 1) - 1 and mine[-1] - mine[0] == len(mine) - 1:
            needed = end - mine[0]
            if needed >= self._needed:
                self._begins = (self._begins and needed == self._needed) or mine[0] > offered[0]
                self._needed = needed


class LayerGroups:
    """The groups of layers beside the first group of each engine. ``windows`` are those of their pools.

    >>> groups = LayerGroups()
    >>> groups.found(7, source=1, group=1, block_tokens=16)
    >>> groups.copied(1, 97, [11, 12, 13, 14, 15, 16], [13, 14, 15, 16, 15, 16])
    >>> groups.tokens(7), groups.copies_windows(1)
    (0, False)
    """

    def __init__(self) -> None:
        self.windows: dict[int, GroupWindow] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """Pool to its source and group."""
        self._copies: dict[tuple[int, int], GroupCopies] = {}
        """Source and group to its copies down."""

    def found(self, pool: int, *, source: int, group: int, block_tokens: int) -> None:
        """An engine has a further group, whose blocks are those of this pool."""
        self.windows[pool] = GroupWindow(block_tokens)
        self._places[pool] = source, group

    def number(self, source: int) -> int:
        """Further groups of an engine."""
        return [place[0] for place in self._places.values()].count(source)

    def copied(self, source: int, prompt_tokens: int, chain: Sequence[int], hashes: Sequence[int]) -> None:
        """A copy down of blocks of a request, those of a group after those of the group before, each in its order."""
        at = {key: place for place, key in enumerate(chain)}
        runs: list[list[int]] = []
        for key in hashes:
            place = at.get(key, -1)
            if place < 0:
                return
            if not runs or place <= runs[-1][-1]:
                runs.append([])
            runs[-1].append(place)
        pools = [pool for pool, (engine, _) in self._places.items() if engine == source]
        if not pools or len(runs) != 1 + len(pools):
            return  # this engine has one group, or a group has no block in it
        offered = sorted(set().union(*runs))
        end = (prompt_tokens - 1) // self.windows[pools[0]].block_tokens
        for group, run in enumerate(runs):
            self._copies.setdefault((source, group), GroupCopies()).copied(end, offered, run)

    def tokens(self, pool: int) -> int | None:
        """The window of a group: see ``GroupWindow.tokens``."""
        return self.windows[pool].with_copies(self._copies.get(self._places[pool], GroupCopies()))

    def copies_windows(self, source: int) -> bool:
        """True if an engine copies not all blocks of a group."""
        return any(copies.sparse for (engine, _), copies in self._copies.items() if engine == source)
