"""The KV-event batches of vLLM, SGLang, Dynamo's publishers and the mocker, in msgpack.

A payload is ``[ts, events, dp_rank?]`` or, as some commits sent it, a map of the same. An event is a map with ``type``
or an array that begins with its type. Fields were added at the end over the years, so a missing field has a default,
and a field without use here is skipped unread. A block's hash is an unsigned or signed 64-bit integer, or raw bytes.
The last eight bytes count, as in the engine's own integer form.

Law of this file: see ``batch``. ``KINDS`` has the fields of each kind once, for both forms.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, Final

import msgspec

from kvbm_console.engines.kv_events.batch import (
    BLOCK_TOKENS_MAX,
    DEFAULT_MEDIUM,
    FAILURES,
    FIELDS_MAX,
    GROUP_MAX,
    MEDIUM_BYTES_MAX,
    RANK_MAX,
    BadPayload,
    Batch,
    CacheEvent,
    Cleared,
    Removed,
    Stored,
    check_count,
    normal_hash,
)

BEGINS: Final = (*range(0x80, 0xA0), *range(0xDC, 0xE0))
"""First bytes of maps and arrays in msgpack."""
_Hashes = list[int | bytes]
_NONE: Final = msgspec.Raw(b"\xc0")


def _skipped(name: str) -> tuple[str, Any, Any]:
    """A field that is skipped without making objects from its value."""
    return name, msgspec.Raw, _NONE


def _stored(event: Any) -> Stored:
    if not 0 <= event.block_size <= BLOCK_TOKENS_MAX:
        raise ValueError(f"block_size {event.block_size}")
    parent = event.parent_block_hash
    return Stored(
        _hashes(event), None if parent is None else normal_hash(parent), event.block_size, _medium(event), _group(event)
    )


def _removed(event: Any) -> Removed:
    return Removed(_hashes(event), _medium(event), _group(event))


def _hashes(event: Any) -> list[int]:
    return [value if type(value) is int and 0 < value < 2**64 else normal_hash(value) for value in event.block_hashes]


def _medium(event: Any) -> str:
    medium: str = event.medium or DEFAULT_MEDIUM
    if len(medium.encode()) > MEDIUM_BYTES_MAX or not medium.isprintable():
        raise ValueError("medium is too long or has characters that do not print")
    return medium


def _group(event: Any) -> int:
    group: int = event.group_idx or 0
    if not 0 <= group <= GROUP_MAX:
        raise ValueError(f"group_idx {group}")
    return group


_PLACE: Final = [("medium", str | None, None), ("group_idx", int | None, None)]
KINDS: Final[dict[str, tuple[list[Any], Callable[[Any], CacheEvent]]]] = {
    "BlockStored": ([
        ("block_hashes", _Hashes), ("parent_block_hash", int | bytes | None, None), _skipped("token_ids"),
        ("block_size", int, 0), _skipped("lora_id"), _PLACE[0], _skipped("lora_name"), _skipped("extra_keys"),
        _PLACE[1],
    ], _stored),
    "BlockRemoved": ([("block_hashes", _Hashes), *_PLACE], _removed),
    "AllBlocksCleared": ([], lambda event: Cleared()),
}
"""Kind to its fields, in the order of the array form, and the function that makes the event (raises ``ValueError``)."""
_MAKE: Final[dict[type, Callable[[Any], CacheEvent]]] = {}
"""Type of the wire to the function that makes the event."""


def _form(**options: Any) -> tuple[Any, Any]:
    """Decoders of an event and of a list of events in the array form or the map form."""
    kinds = []
    for kind, (fields, make) in KINDS.items():
        kinds.append(msgspec.defstruct(kind, fields, tag=kind, gc=False, **options))
        _MAKE[kinds[-1]] = make
    event: Any = reduce(or_, kinds)
    return msgspec.msgpack.Decoder(event), msgspec.msgpack.Decoder(list[event])


class _BatchMap(msgspec.Struct, gc=False):
    events: msgspec.Raw
    ts: float = 0.0
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


_ARRAYS: Final = _form(array_like=True)
_MAPS: Final = _form(tag_field="type")
_BATCH_MAP: Final = msgspec.msgpack.Decoder(_BatchMap)
_LIST: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TIME: Final = msgspec.msgpack.Decoder(float)
_RANK: Final = msgspec.msgpack.Decoder(int | None)
_NAME: Final = msgspec.msgpack.Decoder(str)
_FIELDS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def decode(payload: bytes) -> list[Batch]:
    """The batch in a payload. Raises ``BadPayload`` and ``batch.FAILURES``."""
    ts, events, dp_rank = _envelope(payload)
    check_count(_array_length(events))
    return [_decode_events(ts, events, dp_rank)]


def _envelope(payload: bytes) -> tuple[float, bytes, int | None]:
    """Time, the raw events, the data-parallel rank."""
    if not _is_array(payload[0]):
        batch = _BATCH_MAP.decode(payload)
        rank = batch.data_parallel_rank if batch.data_parallel_rank is not None else batch.attn_dp_rank
        return batch.ts, bytes(batch.events), _checked_rank(rank)
    if not 2 <= _array_length(payload) <= FIELDS_MAX:
        raise BadPayload(f"a batch of {_array_length(payload)} elements; 2 or 3 were expected")
    parts = _LIST.decode(payload)
    # A third element that is no rank is an unknown field, which is skipped like any later field.
    third = parts[2] if len(parts) > 2 and not _is_container(bytes(parts[2])[0]) else _NONE
    return _TIME.decode(parts[0]), bytes(parts[1]), _checked_rank(_RANK.decode(third))


def _checked_rank(rank: int | None) -> int | None:
    if rank is not None and not 0 <= rank <= RANK_MAX:
        raise BadPayload(f"a data-parallel rank of {rank}")
    return rank


def _decode_events(ts: float, raw: bytes, dp_rank: int | None) -> Batch:
    if not _array_length(raw):
        return Batch(ts, dp_rank, [])
    header = {0xDC: 3, 0xDD: 5}.get(raw[0], 1)
    decoder = _ARRAYS[1] if _is_array(raw[header]) else _MAPS[1]
    try:
        return Batch(ts, dp_rank, [_MAKE[type(event)](event) for event in decoder.decode(raw)])
    except FAILURES:
        pass  # an event is unknown or broken, so each event is decoded by itself
    events: list[CacheEvent] = []
    unknown = malformed = 0
    for raw_event in _LIST.decode(raw):
        piece = bytes(raw_event)
        try:
            event = (_ARRAYS if _is_array(piece[0]) else _MAPS)[0].decode(piece)
            events.append(_MAKE[type(event)](event))
        except FAILURES:
            if _is_unknown(piece):
                unknown += 1
            else:
                malformed += 1
    return Batch(ts, dp_rank, events, unknown, malformed)


def _is_unknown(piece: bytes) -> bool:
    """True for an event of an unknown kind, False for a broken event of a known kind."""
    try:
        if _is_array(piece[0]):
            if not 1 <= _array_length(piece) <= FIELDS_MAX:
                return False
            kind = _NAME.decode(_LIST.decode(piece)[0])
        else:
            if not _map_length(piece) <= FIELDS_MAX:
                return False
            kind = _NAME.decode(_FIELDS.decode(piece)["type"])
    except (*FAILURES, KeyError):
        return False
    return kind not in KINDS


def _is_array(first: int) -> bool:
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _is_container(first: int) -> bool:
    return 0x80 <= first <= 0x9F or first in (0xDC, 0xDD, 0xDE, 0xDF)


def _array_length(data: bytes) -> int:
    """The length that an array's header claims. Raises ``BadPayload`` when the data is no array."""
    first = data[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F
    if first == 0xDC and len(data) >= 3:
        return int.from_bytes(data[1:3], "big")
    if first == 0xDD and len(data) >= 5:
        return int.from_bytes(data[1:5], "big")
    raise BadPayload("an array was expected")


def _map_length(data: bytes) -> int:
    """The length that a map's header claims. Raises ValueError when the data is no map."""
    first = data[0]
    if 0x80 <= first <= 0x8F:
        return first & 0x0F
    if first in (0xDE, 0xDF):
        return int.from_bytes(data[1 : 3 if first == 0xDE else 5], "big")
    raise ValueError("a map was expected")
