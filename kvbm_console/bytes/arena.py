"""An arena: the places of a pool on one rank, in memory that a daemon and its workers share.

Law of this file: the memory belongs to the daemon, so a worker that dies loses nothing. Beside each place stands the
hash of the block that it holds. A place that is being written has none.
"""

import mmap
from collections import deque
from collections.abc import Sequence
from ctypes import CDLL, c_size_t, c_void_p
from itertools import repeat
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
Places = npt.NDArray[np.int32]
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
        self.rows: Rows = whole[size - places * shard_bytes :].reshape(places, shard_bytes)
        self._base = self.rows.ctypes.data

    def populate(self) -> None:
        """Have the system give all pages now, so that no copy waits for them."""
        try:
            self._map.madvise(POPULATE_WRITE)
        except OSError:  # an older kernel: touch a byte of each page
            np.frombuffer(self._map, np.uint8)[::PAGE] |= 0

    def require(self, places: Places) -> None:
        """Raise ``IndexError`` unless all places are here; one look for a batch."""
        if places.size and (int(places.min()) < 0 or int(places.max()) >= len(self.rows)):
            raise IndexError(f"a place is outside of the {len(self.rows)} of this pool")

    def store(self, places: Places, rows: Rows, keys: Keys) -> None:
        """Put ``rows[i]``, the block of ``keys[i]``, at ``places[i]``: one check and one change of the index."""
        self.require(places)
        self.keys[places] = NOTHING
        first = _run(places)
        if first is None:
            self.rows[places] = rows
        else:
            self.rows[first : first + len(places)] = rows
        self.keys[places] = keys

    def copy(self, source: "Arena", sources: Places, targets: Places, keys: Keys) -> list[int]:
        """Copy blocks from another arena. The positions of those whose source does not hold their hash."""
        source.require(sources)
        self.require(targets)
        wrong: list[int] = np.flatnonzero(source.keys[sources] != keys).tolist()
        if wrong:
            kept = np.ones(len(sources), np.bool_)
            kept[wrong] = False
            sources, targets, keys = sources[kept], targets[kept], keys[kept]
        self.keys[targets] = NOTHING
        self._move(source, sources, targets)
        self.keys[targets] = keys
        return wrong

    def _move(self, source: "Arena", sources: Places, targets: Places) -> None:
        """The fastest way from Python: numpy where one side is a run, else a call of memmove for each block."""
        to = _run(targets)
        if to is not None and len(targets) > 1:
            np.take(source.rows, sources, axis=0, out=self.rows[to : to + len(targets)], mode="clip")
            return
        since = _run(sources)
        if since is not None and len(sources) > 1:
            self.rows[targets] = source.rows[since : since + len(sources)]
            return
        size = self.shard_bytes
        here = (targets.astype(np.int64) * size + self._base).tolist()
        there = (sources.astype(np.int64) * size + source._base).tolist()
        deque(map(_memmove, here, there, repeat(size)), 0)

    def spoil(self, places: Places) -> None:
        """Forget what these places hold, and make their first page differ from every block."""
        self.require(places)
        self.keys[places] = NOTHING
        self.rows[places, :PAGE] = SPOILT

    def zero(self) -> None:
        """Overwrite every place with zeroes."""
        self.keys[:] = NOTHING
        self.rows[:] = 0


def _run(places: Places | Sequence[int]) -> int | None:
    """The first place if they ascend one by one, else None."""
    count = len(places)
    if not count:
        return None
    first, last = int(places[0]), int(places[-1])
    if last - first != count - 1 or (count > 2 and bool((np.diff(places) != 1).any())):
        return None
    return first
