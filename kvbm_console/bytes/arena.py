"""An arena: the places of a pool on one rank, in memory that a daemon and its workers share.

Law of this file: the memory belongs to the daemon, so a worker that dies loses nothing. Beside each place stands the
hash of the block that it holds. A place that is being written has none.
"""

import mmap
from collections import deque
from collections.abc import Sequence
from ctypes import CDLL, c_size_t, c_void_p
from itertools import pairwise, repeat
from operator import sub
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbm_console.bytes.contents import Rows
from kvbm_console.bytes.memory import PAGE, arena_bytes

POPULATE_WRITE: Final = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14."""
NOTHING: Final = 0
"""The hash of a place that holds no block."""
SPOILT: Final = 0xA5
RUN_BLOCKS_MIN: Final = 4
"""Blocks in a run beyond which one call for all of them is faster than one for each."""
Keys = npt.NDArray[np.uint64]

_memmove = CDLL(None).memmove
_memmove.argtypes = (c_void_p, c_void_p, c_size_t)
_memmove.restype = None


class Arena:
    """An arena in the memory of this process. ``rows[place]`` are the bytes of a place, ``keys[place]`` its hash."""

    def __init__(self, fd: int, places: int, shard_bytes: int) -> None:
        size = arena_bytes(places, shard_bytes)
        self._map = mmap.mmap(fd, size)
        whole = np.frombuffer(self._map, np.uint8)
        self.shard_bytes = shard_bytes
        self.keys: Keys = whole[: places * 8].view(np.uint64)
        self._words = memoryview(self._map)[: places * 8].cast("Q")
        """The same memory, for a place at a time."""
        self.rows: Rows = whole[size - places * shard_bytes :].reshape(places, shard_bytes)
        self._base = self.rows.ctypes.data

    def populate(self) -> None:
        """Have the system give all pages now, so that no copy waits for them."""
        try:
            self._map.madvise(POPULATE_WRITE)
        except OSError:  # an older kernel: touch a byte of each page
            np.frombuffer(self._map, np.uint8)[::PAGE] |= 0

    def require(self, places: Sequence[int]) -> None:
        """Raise ``IndexError`` unless all places are here; one look for a batch."""
        if places and (min(places) < 0 or max(places) >= len(self.rows)):
            raise IndexError(f"a place is outside of the {len(self.rows)} of this pool")

    def store(self, places: Sequence[int], rows: Rows, keys: Sequence[int]) -> None:
        """Put ``rows[i]``, the block of ``keys[i]``, at ``places[i]``: one check and one change of the index."""
        self.require(places)
        self._forget(places)
        self.rows[places] = rows
        self._keep(places, keys)

    def copy(
        self, source: "Arena", sources: list[int], targets: list[int], keys: list[int]
    ) -> list[int]:
        """Copy blocks from another arena. The positions of those whose source does not hold their hash."""
        source.require(sources)
        self.require(targets)
        held, wrong = list(map(source._words.__getitem__, sources)), list[int]()
        if held != keys:
            wrong = [at for at, (one, key) in enumerate(zip(held, keys, strict=True)) if one != key]
            kept = sorted(set(range(len(keys))).difference(wrong))
            sources, targets, keys = ([column[at] for at in kept] for column in (sources, targets, keys))
        self._forget(targets)
        self._move(source, sources, targets)
        self._keep(targets, keys)
        return wrong

    def _forget(self, places: Sequence[int]) -> None:
        for place in places:
            self._words[place] = NOTHING

    def _keep(self, places: Sequence[int], keys: Sequence[int]) -> None:
        for place, key in zip(places, keys, strict=True):
            self._words[place] = key

    def _move(self, source: "Arena", sources: list[int], targets: list[int]) -> None:
        """The fastest way from Python: a call of numpy for each run of places on one side, if these runs are long, else
        a call of memmove for each block. Columns are lists, because a call of numpy behind a copy of megabytes finds
        its code out of the caches and takes as long as a block of 256 KiB."""
        count, to, since = len(targets), _runs(targets), _runs(sources)
        if min(to, since) * RUN_BLOCKS_MIN >= count:
            size, here, there = self.shard_bytes, self._base, source._base
            deque(map(_memmove, [place * size + here for place in targets], [place * size + there for place in sources],
                      repeat(size)), 0)
        elif to <= since:
            for at, end in pairwise(bounds(targets)):
                rows = self.rows[targets[at] : targets[at] + end - at]
                np.take(source.rows, sources[at:end], axis=0, out=rows, mode="clip")
        else:
            for at, end in pairwise(bounds(sources)):
                self.rows[targets[at:end]] = source.rows[sources[at] : sources[at] + end - at]

    def spoil(self, places: Sequence[int]) -> None:
        """Forget what these places hold, and make their first page differ from every block."""
        self.require(places)
        self._forget(places)
        self.rows[places, :PAGE] = SPOILT

    def zero(self) -> None:
        """Overwrite every place with zeroes."""
        self.keys[:] = NOTHING
        self.rows[:] = 0


def _runs(places: Sequence[int]) -> int:
    """The number of runs, in each of which places follow one another."""
    return len(places) - list(map(sub, places[1:], places)).count(1)


def bounds(places: Sequence[int]) -> list[int]:
    """The positions at which runs begin, and the end."""
    cuts = [at for at, (before, place) in enumerate(pairwise(places), 1) if place != before + 1]
    return [0, *cuts, len(places)]
