"""The KV events of LMCache's server (0.5.6), in protobuf: ``lmcache.mp.KVEventBatch``.

    KVEventBatch   1 enabled   2 incarnation   3 next_cursor   4 lost   5 events
    KVEventRecord  1 seq   2 kind   3 medium   4 model_name   5 block_hashes   6 parent_block_hash   7 token_ids

A field is a key (its number and its wire type) and a value: a varint, or a length and so many bytes. The first byte of
a batch is the key of ``enabled`` (08) or of ``incarnation`` (10). Example: ``08 01 10 05 18 02`` is an enabled server
of incarnation 5, whose next cursor is 2.

A record is a chunk of the server's memory. The hashes are LMCache's own, of chunks of 256 tokens or as configured.

Law of this file: see ``batch``. Unknown fields are skipped.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.engines.kv_events.batch import (
    BLOCK_TOKENS_MAX,
    FAILURES,
    MEDIUM_BYTES_MAX,
    Batch,
    CacheEvent,
    Removed,
    Stored,
    check_count,
    known_medium,
    normal_hash,
)

BEGINS: Final = (0x08, 0x10)
"""The keys of the fields 1 and 2, both varints."""
_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
_VARINT_BYTES_MAX: Final = 10


class Header(msgspec.Struct):
    """The state of the server's log that a batch tells."""

    enabled: bool = False
    incarnation: int = 0
    next_cursor: int = 0
    lost: bool = False
    records: list[bytes] = []


def decode(payload: bytes) -> list[Batch]:
    """The batch in a payload. Raises ``BadPayload`` and ``batch.FAILURES``."""
    header = read_header(payload)
    check_count(len(header.records))
    events: list[CacheEvent] = []
    unknown = malformed = 0
    for record in header.records:
        try:
            event = _event(record)
        except FAILURES:
            malformed += 1
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return [Batch(None, 0, events, unknown, malformed, lost=header.lost)]


def read_header(payload: bytes) -> Header:
    """The fields of a batch, with its records undecoded. Raises ValueError."""
    header = Header()
    for number, value in fields(payload):
        if number == 5 and isinstance(value, bytes):
            header.records.append(value)
        elif isinstance(value, int):
            if number == 1:
                header.enabled = bool(value)
            elif number == 2:
                header.incarnation = value
            elif number == 3:
                header.next_cursor = value
            elif number == 4:
                header.lost = bool(value)
    return header


def request(instance: int, model: str, cursor: int, most: int) -> bytes:
    """A ``SubscribeKvEventsRequest``: the events of ``model`` after ``cursor``, at most so many in an answer."""
    name = model.encode()
    return b"".join((
        b"\x08", _varint(instance), b"\x12", _varint(len(name)), name, b"\x18", _varint(cursor), b"\x20",
        _varint(most),
    ))


def _event(record: bytes) -> CacheEvent | None:
    """The event of a record; None for an unknown kind. Raises ``FAILURES``."""
    kind = medium = ""
    hashes: list[int] = []
    parent: int | None = None
    tokens = 0
    for number, value in fields(record):
        if isinstance(value, bytes):
            if number == 2:
                kind = value.decode()
            elif number == 3:
                medium = value.decode()
            elif number == 5:
                hashes.append(normal_hash(value))
            elif number == 6:
                parent = normal_hash(value)
            elif number == 7:  # packed varints: each ends with a byte below 128
                tokens += sum(byte < 0x80 for byte in value)
        elif number == 7:
            tokens += 1
    if kind not in ("stored", "removed"):
        return None
    medium = known_medium(medium or "CPU")
    if len(medium.encode()) > MEDIUM_BYTES_MAX or not medium.isprintable():
        raise ValueError("medium is too long or has characters that do not print")
    if kind == "removed":
        return Removed(hashes, medium, 0)
    size = tokens // max(1, len(hashes))
    if size > BLOCK_TOKENS_MAX:
        raise ValueError(f"a chunk of {size} tokens")
    return Stored(hashes, parent, size, medium, 0)


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field; values of fixed length are left out. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, at = _read_varint(data, at)
        elif wire in (_I64, _I32):
            size = 8 if wire == _I64 else 4
        else:
            raise ValueError(f"a field of wire type {wire}")
        if at + size > len(data):
            raise ValueError("a field ends beyond its message")
        if wire == _BYTES:
            yield key >> 3, data[at : at + size]
        at += size


def numbers(packed: int | bytes) -> list[int]:
    """The values of a repeated field of integers, packed or single. Raises ValueError."""
    if isinstance(packed, int):
        return [packed]
    found, at = list[int](), 0
    while at < len(packed):
        value, at = _read_varint(packed, at)
        found.append(value)
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, place behind it). Raises ValueError."""
    value = shift = 0
    for byte in data[at : at + _VARINT_BYTES_MAX]:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise ValueError("a number without its end")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
