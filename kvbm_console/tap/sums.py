"""Sums of blocks: their bytes as they were stored, in a table of fixed size.

Theory of operation
-------------------
A block's key becomes 64 bits (``tag_of``), and a sampled block's bytes become a sum (``sum_of``). The table has rows of
``WAYS`` slots, and a product of the tag chooses the row. A slot is a tag and a sum, 16 bytes. A full row forgets the
slot that was written longest ago. A key may have several sums: a tier that has a block does not write it again, and a
recomputed block may differ in a bit. Bytes are right if their sum is one of them.

Example: block a was stored with sum 7, and again with sum 9 after a recompute. ``sums(a)`` is ``[7, 9]``.

Law of this file: a sum that is not known is never a mismatch, and the memory has a limit from the start.
"""

import mmap
import zlib
from collections.abc import Callable
from typing import Final

SUMS_MAX: Final = 2**20
"""Sums that are kept: 16 MiB, for 2 TiB of blocks of 2 MiB."""
WAYS: Final = 8
_MASK: Final = 2**64 - 1
_SPREAD: Final = 0x9E3779B97F4A7C15
"""An odd number near 2**64 divided by the golden ratio: its products spread tags over rows."""
_GROUP_BYTES: Final = 4

Sum = Callable[[memoryview], int]


def chosen_sum() -> tuple[str, Sum]:
    """Name and function of the sum: xxh3 of 64 bits if xxhash is installed, else the CRC-32 of the standard library."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return "crc32", zlib.crc32
    return "xxh3", xxh3_64_intdigest


def tag_of(key: bytes) -> int:
    """64 bits of a key, which is a hash followed by the number of a group; never 0.

    >>> tag_of(bytes(31) + b"\\x07" + bytes(4))
    7
    """
    block = int.from_bytes(key[-8 - _GROUP_BYTES : -_GROUP_BYTES], "big")
    return (block + int.from_bytes(key[-_GROUP_BYTES:], "big") * _SPREAD) & _MASK or 1


class SumTable:
    """At most ``capacity`` sums, a power of two that is at least ``WAYS``. Untouched parts take no memory."""

    def __init__(self, capacity: int = SUMS_MAX) -> None:
        self._shift = 64 - (capacity // WAYS).bit_length() + 1
        self._tags = memoryview(mmap.mmap(-1, 8 * capacity)).cast("Q")
        self._sums = memoryview(mmap.mmap(-1, 8 * capacity)).cast("Q")
        self.kept = self.forgotten = 0

    def _row(self, tag: int) -> int:
        return ((tag * _SPREAD & _MASK) >> self._shift) * WAYS

    def sums(self, tag: int) -> list[int]:
        """The sums of a block, the newest last; empty if none is known."""
        first = self._row(tag)
        tags = self._tags[first : first + WAYS].tolist()
        return [self._sums[first + at] for at, other in enumerate(tags) if other == tag]

    def add(self, tag: int, value: int) -> None:
        """The block was stored with this sum."""
        if value in self.sums(tag):
            return
        first = self._row(tag)
        if self._tags[first]:  # the row is full: its slots are in the order of their writing, from the end
            self.forgotten += 1
        else:
            self.kept += 1
        for column, new in ((self._tags, tag), (self._sums, value)):
            column[first : first + WAYS - 1] = column[first + 1 : first + WAYS]
            column[first + WAYS - 1] = new

    @property
    def size_bytes(self) -> int:
        """Memory of the table when all of it is touched."""
        return self._tags.nbytes + self._sums.nbytes
