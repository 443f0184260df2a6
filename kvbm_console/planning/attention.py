"""The attention windows of the groups of layers of a recorded engine, which no event tells.

The requests of the first group tell the blocks that they give back, which bound its window from both sides. Of other
groups only the cached blocks are known, which bound their windows from above.

Law of this file: the window of the engine lies within the bounds, whatever the requests do.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

UNBOUNDED: Final = 2**62


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

    def changed(self, stored: Sequence[int], removed: Sequence[int], *, cleared: bool) -> None:
        """Blocks were forgotten, removed and stored."""
        if cleared:
            removed = list(self._copies.elements())
        self._copies.subtract(removed)
        self.gone.update(key for key in removed if self._copies[key] <= 0)
        self._copies.update(stored)
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
