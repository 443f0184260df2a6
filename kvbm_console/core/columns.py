"""Columns: sequences of block ids and of sequence hashes as little-endian bytes, and the facts of a pool's places.

Law of this file: one form everywhere. An id column is int32 and a hash column uint64, both little-endian, in memory, on
the wire and on disk. So encoding is a memcpy and comparing is a memcmp.

A column of facts begins as zeros. A large one is mapped, so that it takes memory only where something else than zero
was written. ``used`` lets a walk pass over the rest.
"""

import mmap
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

ID_BYTES: Final = 4
HASH_BYTES: Final = 8
Ids = Annotated[bytes, "ids"]
"""A column of block ids."""
Hashes = Annotated[bytes, "hashes"]
"""A column of sequence hashes."""
Indices = Annotated[bytes, "indices"]
"""A column of positions within the event, as int32."""
Column: TypeAlias = memoryview
"""A fact of each place of a pool. A slice of it is no copy."""
MAPPED_FROM_BYTES: Final = 2**20
"""A column of so many bytes is mapped. A smaller one costs little, and a mapping takes pages and a system call."""
PART_PLACES: Final = 2**14
"""Places that ``used`` looks at together; 128 KiB of the widest column."""
BULK_LEAST: Final = 64
"""From so many places on numpy is faster than a loop: each of its calls takes a microsecond or more."""
_SWAP: Final = sys.byteorder == "big"
_WIDTH: Final = {"B": 1, "I": 4, "q": 8, "Q": 8}
_ZEROS: Final = bytes(8 * PART_PLACES)


def _pack(code: str, numbers: Iterable[int]) -> bytes:
    column = array(code, numbers)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def pack_ids(ids: Iterable[int]) -> bytes:
    """A column of block ids; raises OverflowError for an id that is not an int32.

    >>> unpack_ids(pack_ids([3, 1, 2]))
    [3, 1, 2]
    """
    return _pack("i", ids)


def unpack_ids(column: bytes | list[int]) -> list[int]:
    """The ids of a column, which is a list where nothing is published.

    Raises ValueError when its length is not a multiple of four.
    """
    if isinstance(column, list):
        return column
    numbers = array("i", column)
    if _SWAP:
        numbers.byteswap()
    return numbers.tolist()


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """A column of sequence hashes; raises OverflowError for a hash that is not a uint64."""
    return _pack("Q", hashes)


def unpack_hashes(column: bytes | list[int]) -> list[int]:
    """The hashes of a column, which is a list where nothing is published.

    Raises ValueError when its length is not a multiple of eight.
    """
    return column if isinstance(column, list) else array_of_hashes(column).tolist()


def array_of_hashes(column: bytes) -> "array[int]":
    """The hashes of a column as an array.

    Raises ValueError when its length is not a multiple of eight.
    """
    numbers = array("Q", column)
    if _SWAP:
        numbers.byteswap()
    return numbers


_Key = TypeVar("_Key")


def prefix_of(place_of: Mapping[_Key, int], keys: Sequence[_Key]) -> list[int]:
    """The places of the leading keys that have one.

    >>> prefix_of({"a": 5, "b": 3, "d": 1}, ["a", "b", "c", "d"])
    [5, 3]
    """
    found: list[int] = []
    for key in keys:
        place = place_of.get(key)
        if place is None:
            break
        found.append(place)
    return found


def gather(column: Sequence[int], ids: Sequence[int]) -> list[int]:
    """The values of a column at these places, in their order.

    >>> gather([5, 6, 7], [2, 0])
    [7, 5]
    """
    if len(ids) < 3:
        return [column[place] for place in ids]
    return list(itemgetter(*ids)(column))  # of many places twice as fast as a comprehension


def zeros(code: Literal["B", "I", "q", "Q"], places: int) -> Column:
    """A column of so many zeros, of uint8, uint32, int64 or uint64.

    >>> zeros("q", 3).tolist()
    [0, 0, 0]
    """
    size = _WIDTH[code] * places
    if size < max(1, MAPPED_FROM_BYTES):
        return memoryview(bytearray(size)).cast(code)
    # Private, because a process that is forked must not write into the facts of its parent.
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).cast(code)


def copied(column: Column, places: int | None = None) -> Column:
    """A copy of the column, with zeros behind it up to ``places``."""
    copy = zeros(column.format, len(column) if places is None else places)  # type: ignore[arg-type]
    for at in used(column):
        copy[at] = column[at]
    return copy


@cache
def numpy() -> Any:
    """The library. Most commands never need it here, and its import takes a tenth of a second."""
    import numpy

    return numpy


def places_array(places: Sequence[int]) -> Any:
    """Places as numpy takes them for ``write_at`` and ``read_at``."""
    return numpy().fromiter(places, numpy().intp, len(places))


def write_at(column: Column, places: Any, values: "int | array[int]") -> None:
    """Write a value for each of the places of ``places_array``, or the same one for all.

    >>> column = zeros("Q", 4)
    >>> write_at(column, places_array([3, 1]), array("Q", [7, 5]))
    >>> column.tolist()
    [0, 5, 0, 7]
    """
    numpy().asarray(column)[places] = values


def read_at(column: Column, places: Any) -> Any:
    """The values at the places of ``places_array``, as numpy's array."""
    return numpy().asarray(column)[places]


class SparseBytes:
    """Bytes of a known number that come piece by piece. Those that are zero take no memory.

    >>> found = SparseBytes(5)
    >>> for piece in (b"ab", bytes(2), b"c"):
    ...     found.write(piece)
    >>> found.full, found.view.hex()
    (True, '6162000063')
    """

    def __init__(self, size: int) -> None:
        self.view: memoryview = zeros("B", size)
        self._written = 0

    @property
    def full(self) -> bool:
        """True if all have come."""
        return self._written == len(self.view)

    def write(self, piece: bytes | memoryview) -> None:
        """Add the next bytes. Raises ``ValueError`` beyond the number."""
        whole = memoryview(piece).cast("B")
        if len(whole) > len(self.view) - self._written:
            raise ValueError(f"there are more than {len(self.view)} bytes")
        for at in range(0, len(whole), len(_ZEROS)):
            part = whole[at : at + len(_ZEROS)]
            if not _ZEROS.startswith(part):
                self.view[self._written : self._written + len(part)] = part
            self._written += len(part)


def used(*columns: Column) -> Iterator[slice]:
    """The stretches of places that hold all values other than zero of these columns, in their order.

    >>> column = zeros("q", 3 * PART_PLACES)
    >>> column[PART_PLACES] = 7
    >>> list(used(column)) == [slice(PART_PLACES, 2 * PART_PLACES)]
    True
    """
    places = len(columns[0])
    for first in range(0, places, PART_PLACES):
        at = slice(first, min(first + PART_PLACES, places))
        for column in columns:
            if not _ZEROS.startswith(column[at].tobytes()):
                yield at
                break
