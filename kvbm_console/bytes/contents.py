"""The bytes that a block must hold: a function of its hash and of the rank, so that any block can be checked.

Law of this file: two blocks of different hash or rank differ in every word. A block that is shifted within itself
differs nearly everywhere.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Rows = npt.NDArray[np.uint8]
"""A row for each block."""
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)


class BlockContents:
    """The contents of blocks of ``shard_bytes``, a multiple of 8, on one rank.

    >>> contents, rows = BlockContents(0, 64), np.zeros((2, 64), np.uint8)
    >>> contents.write(rows, [5, 6]); contents.differing(rows, [0, 1], [5, 6]), contents.differing(rows, [0, 1], [5, 5])
    ([], [1])
    """

    def __init__(self, rank: int, shard_bytes: int) -> None:
        self._seed = rank
        first, second = (np.uint64(factor) for factor in _MIX)
        words = np.arange(1, shard_bytes // 8 + 1, dtype=np.uint64) * first
        self._pattern = (words ^ (words >> np.uint64(31))) * second

    def _word(self, key: int) -> Any:
        return np.uint64(xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), self._seed))

    def write(self, rows: Rows, keys: Sequence[int]) -> None:
        """Make ``rows[i]`` what the block of ``keys[i]`` holds."""
        words = rows.view(np.uint64)
        for at, key in enumerate(keys):
            np.bitwise_xor(self._pattern, self._word(key), out=words[at])

    def differing(self, rows: Rows, places: Sequence[int], keys: Sequence[int]) -> list[int]:
        """The positions at which ``rows[places[i]]`` is not the block of ``keys[i]``, byte for byte."""
        return [
            at for at, (place, key) in enumerate(zip(places, keys, strict=True)) if not self.is_block(rows[place], key)
        ]

    def is_block(self, row: Rows, key: int) -> bool:
        """True if these bytes are the block of ``key``. Threads may ask at the same time."""
        return bool(np.array_equal(row.view(np.uint64) ^ self._word(key), self._pattern))
