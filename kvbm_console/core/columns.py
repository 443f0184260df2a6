"""Columns: sequences of block ids and of sequence hashes as little-endian bytes.

Law of this file: one form everywhere. An id column is int32, a hash column uint64, little-endian, in memory, on the
wire and on disk, so that encoding is a memcpy and comparing is a memcmp.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from struct import Struct
from struct import error as FormatError
from typing import Annotated, Any, Final, TypeVar

ID_BYTES: Final = 4
HASH_BYTES: Final = 8
Ids = Annotated[bytes, "ids"]
"""A column of block ids."""
Hashes = Annotated[bytes, "hashes"]
"""A column of sequence hashes."""
Indices = Annotated[bytes, "indices"]
"""A column of positions within the event, as int32."""
_SWAP: Final = sys.byteorder == "big"
_SHORT: Final = 16
"""Up to so many numbers a column is made and read by a format of its own."""
_ids: Final = [Struct(f"<{count}i") for count in range(_SHORT + 1)]
_hashes: Final = [Struct(f"<{count}Q") for count in range(_SHORT + 1)]
_read_ids: Final = {form.size: form.unpack for form in _ids}
_read_hashes: Final = {form.size: form.unpack for form in _hashes}

_ONES_MAX: Final = 16_384
"""Columns of one id that are kept: 3 MB at most. To find one takes half as long as to make or to read it."""


class _ColumnOf(dict[int, bytes]):
    """The column of one id, made and kept when it is asked for."""

    def __missing__(self, block: int) -> bytes:
        packed = _ids[1].pack(block)
        if len(self) < _ONES_MAX:
            self[block] = packed
        return packed


class _IdOf(dict[bytes, int]):
    """The id of a column of ``ID_BYTES``, read and kept when it is asked for."""

    def __missing__(self, column: bytes) -> int:
        (block,) = _ids[1].unpack(column)
        if len(self) < _ONES_MAX:
            self[column] = block
        return int(block)


_column_of: Final = _ColumnOf()
id_of: Final = _IdOf()

_SEEN_MAX: Final = 32
_SEEN_BYTES: Final = 16_384
_LONG: Final = 64
"""A column is read several times on its way from a caller through an event into the facts, and a long one is made
several times of the same numbers: numbers and bytes of the last ones are kept, up to ``_SEEN_BYTES`` each, so that it
is the same numbers and bytes again and no new ones. To find numbers again costs a comparison: from ``_LONG`` on."""


class _Seen:
    """The last columns of one kind."""

    __slots__ = ("numbers_of", "packed_of")

    def __init__(self) -> None:
        self.numbers_of: dict[bytes, list[int]] = {}
        self.packed_of: dict[tuple[int, int, int], tuple[list[int], bytes]] = {}
        """Length, first and last number to all of them, and their column."""

    def packed(self, numbers: list[int]) -> bytes | None:
        """The column of these numbers, if it was seen."""
        known = self.packed_of.get((len(numbers), numbers[0], numbers[-1]))
        return known[1] if known is not None and known[0] == numbers else None

    def keep(self, column: bytes, numbers: list[int]) -> None:
        """Remember both; nobody may change ``numbers`` any more."""
        if len(self.numbers_of) >= _SEEN_MAX:
            self.numbers_of.clear()
            self.packed_of.clear()
        if len(column) <= _SEEN_BYTES:
            self.numbers_of[column] = numbers
            if len(numbers) >= _LONG:
                self.packed_of[len(numbers), numbers[0], numbers[-1]] = numbers, column

    def pack(self, numbers: list[int], code: str) -> bytes:
        """The column of these numbers, by the code of ``array``; raises what that raises for one that does not fit."""
        if len(numbers) >= _LONG:
            known = self.packed(numbers)
            if known is not None:
                return known
        column = array(code, numbers)
        if _SWAP:
            column.byteswap()
        packed = column.tobytes()
        self.keep(packed, numbers.copy())
        return packed

    def read(self, column: bytes, code: str) -> list[int]:
        """The numbers of a column; raises ValueError when its length is not a multiple of the code's."""
        known = self.numbers_of.get(column)
        if known is None:
            numbers = array(code, column)
            if _SWAP:
                numbers.byteswap()
            known = numbers.tolist()
            self.keep(column, known)
        return known


_seen_ids: Final = _Seen()
_seen_hashes: Final = _Seen()


def pack_ids(ids: Iterable[int]) -> bytes:
    """A column of block ids.

    >>> unpack_ids(pack_ids([3, 1, 2]))
    [3, 1, 2]
    """
    items = ids if type(ids) is list else list(ids)
    count = len(items)
    if count <= _SHORT:
        try:
            return _column_of[items[0]] if count == 1 else _ids[count].pack(*items)
        except FormatError:
            pass  # what does not fit is told below
    try:
        return _seen_ids.pack(items, "I")  # the same bytes as of "i", in a third of the time
    except OverflowError:
        return _seen_ids.pack(items, "i")


def unpack_ids(column: bytes) -> list[int]:
    """The ids of a column; raises ValueError when its length is not a multiple of four."""
    read = _read_ids.get(len(column))
    if read is not None:
        return list(read(column))
    return _seen_ids.read(column, "i").copy()


def read_ids(column: bytes) -> list[int]:
    """As ``unpack_ids``, for one who neither changes nor keeps the list: others are given the same one.

    To copy a long list takes little time and writes to each of its numbers.
    """
    read = _read_ids.get(len(column))
    return _seen_ids.read(column, "i") if read is None else list(read(column))


def read_hashes(column: bytes) -> list[int]:
    """As ``unpack_hashes``, for one who neither changes nor keeps the list: others are given the same one."""
    read = _read_hashes.get(len(column))
    return _seen_hashes.read(column, "Q") if read is None else list(read(column))


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """A column of sequence hashes."""
    items = hashes if type(hashes) is list else list(hashes)
    if len(items) <= _SHORT:
        try:
            return _hashes[len(items)].pack(*items)
        except FormatError:
            pass  # what does not fit is told below
    return _seen_hashes.pack(items, "Q")


def unpack_hashes(column: bytes) -> list[int]:
    """The hashes of a column; raises ValueError when its length is not a multiple of eight."""
    read = _read_hashes.get(len(column))
    if read is not None:
        return list(read(column))
    return _seen_hashes.read(column, "Q").copy()


_Key = TypeVar("_Key")
_FIRST_PART: Final = 2
_GROWTH: Final = 16
"""A prefix is looked up in parts, each so many times as long as the one before: a miss is found soon, a long prefix at
once."""


def prefix_of(place_of: Mapping[_Key, int], keys: Sequence[_Key]) -> list[int]:
    """The places of the leading keys that have one.

    >>> prefix_of({"a": 5, "b": 3, "d": 1}, ["a", "b", "c", "d"])
    [5, 3]
    """
    found: list[int] = []
    at, size = 0, _FIRST_PART
    if len(keys) >= _LONG and keys[0] in place_of:
        try:
            return list(itemgetter(*keys)(place_of))  # all are there: half of what asking for each costs
        except KeyError:
            pass
    while at < len(keys):
        part: list[Any] = list(map(place_of.get, keys[at : at + size]))
        if None in part:
            return found + part[: part.index(None)]
        found += part
        at += size
        size *= _GROWTH
    return found


def gather(column: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """What stands at these places of a column, in their order; several times as fast as a loop over many.

    >>> gather([5, 6, 7], [2, 0]), gather([5], [0]), gather([], [])
    ((7, 5), (5,), ())
    """
    if len(ids) > 1:
        found: Any = itemgetter(*ids)(column)
        return found  # type: ignore[no-any-return]
    return (column[ids[0]],) if ids else ()
