"""The reference of the pool's figures: a block pool of the usual kind, with an object per block and a linked free list.

It does what vLLM's block pool does, in the same order: a free block is unlinked when it is touched and linked at the
end when its last holder leaves; a block keeps its hash until it is handed out again; a request gives its blocks back
tail first. Silent: it tells nobody anything.

Law of this file: written as such pools are, with slots, and with the checks that they make and no others, so that a
ratio against it flatters nobody.
"""

from collections.abc import Iterable, Sequence
from typing import Final


class Block:
    """One place; ``before`` and ``behind`` are its neighbours in the free list."""

    __slots__ = ("_hash", "before", "behind", "null", "number", "refs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.refs = 0
        self._hash: int | None = None
        self.null = False
        self.before: Block | None = None
        self.behind: Block | None = None

    @property
    def hash(self) -> int | None:
        """What is in it, when it is full."""
        return self._hash

    @hash.setter
    def hash(self, value: int) -> None:
        assert self._hash is None
        self._hash = value

    def forget(self) -> None:
        """It holds nothing any more."""
        self._hash = None


class FreeList:
    """Doubly linked, with an end on each side that is no block."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.count = len(blocks)
        self.first, self.last = Block(-1), Block(-1)
        at = self.first
        for block in blocks:
            at.behind, block.before = block, at
            at = block
        at.behind, self.last.before = self.last, at

    def take(self, count: int) -> list[Block]:
        """The first ``count`` blocks."""
        taken: list[Block] = []
        at = self.first.behind
        for _ in range(count):
            assert at is not None
            taken.append(at)
            behind = at.behind
            at.before = at.behind = None
            at = behind
        if at is not None:
            self.first.behind, at.before = at, self.first
        self.count -= count
        return taken

    def unlink(self, block: Block) -> None:
        """Take one out of the middle."""
        before, behind = block.before, block.behind
        assert before is not None
        assert behind is not None
        before.behind, behind.before = behind, before
        block.before = block.behind = None
        self.count -= 1

    def append(self, blocks: Iterable[Block]) -> None:
        """Link them at the end, in this order."""
        at = self.last.before
        assert at is not None
        for block in blocks:
            block.before, at.behind = at, block
            at = block
            self.count += 1
        at.behind, self.last.before = self.last, at


class LinkedPool:
    """Allocation, release, prefix cache."""

    def __init__(self, capacity: int) -> None:
        self.blocks: Final = [Block(number) for number in range(capacity)]
        self.free = FreeList(self.blocks)
        self.cached: dict[int, Block | dict[int, Block]] = {}

    def allocate(self, count: int) -> list[Block]:
        """``count`` blocks with one holder; what they held is forgotten."""
        if count > self.free.count:
            raise ValueError(f"cannot allocate {count} blocks")
        taken = self.free.take(count)
        for block in taken:
            self._evict(block)
            assert block.refs == 0
            block.refs += 1
        return taken

    def _evict(self, block: Block) -> bool:
        key = block.hash
        if key is None:
            return False
        there = self.cached.get(key)
        if there is block:
            del self.cached[key]
        elif isinstance(there, dict):
            there.pop(block.number, None)
            if not there:
                del self.cached[key]
        block.forget()
        return True

    def store(self, blocks: Sequence[Block], hashes: Sequence[int]) -> None:
        """These blocks are full."""
        for block, key in zip(blocks, hashes, strict=True):
            if block.null:
                continue
            block.hash = key
            there = self.cached.get(key)
            if there is None:
                self.cached[key] = block
            elif isinstance(there, dict):
                there[block.number] = block
            else:
                self.cached[key] = {there.number: there, block.number: block}

    def match(self, hashes: Sequence[int]) -> list[Block]:
        """The longest prefix that is here."""
        found: list[Block] = []
        for key in hashes:
            there = self.cached.get(key)
            if there is None:
                break
            found.append(next(iter(there.values())) if isinstance(there, dict) else there)
        return found

    def touch(self, blocks: Sequence[Block]) -> None:
        """One more holder each."""
        for block in blocks:
            if block.refs == 0 and not block.null:
                self.free.unlink(block)
            block.refs += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """One holder less each; tail first to the end of the free list."""
        gone = list(reversed(blocks))
        for block in gone:
            block.refs -= 1
        self.free.append([block for block in gone if block.refs == 0 and not block.null])
