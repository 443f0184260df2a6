"""Columns: sequences of block ids and of sequence hashes as little-endian bytes.

Law of this file: one form everywhere. An id column is int32 and a hash column uint64, both little-endian, in memory, on
the wire and on disk. So encoding is a memcpy and comparing is a memcmp.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, TypeVar

ID_BYTES: Final = 4
HASH_BYTES: Final = 8
Ids = Annotated[bytes, "ids"]
"""A column of block ids."""
Hashes = Annotated[bytes, "hashes"]
"""A column of sequence hashes."""
Indices = Annotated[bytes, "indices"]
"""A column of positions within the event, as int32."""
_SWAP: Final = sys.byteorder == "big"


def _pack(code: str, numbers: Iterable[int]) -> bytes:
    column = array(code, numbers)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def _unpack(code: str, column: bytes | list[int]) -> list[int]:
    if isinstance(column, list):
        return column
    numbers = array(code, column)
    if _SWAP:
        numbers.byteswap()
    return numbers.tolist()


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
    return _unpack("i", column)


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """A column of sequence hashes; raises OverflowError for a hash that is not a uint64."""
    return _pack("Q", hashes)


def unpack_hashes(column: bytes | list[int]) -> list[int]:
    """The hashes of a column, which is a list where nothing is published.

    Raises ValueError when its length is not a multiple of eight.
    """
    return _unpack("Q", column)


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
    return [column[place] for place in ids]
