"""One tolerant decoder for the KV-event batches of vLLM, SGLang, Dynamo's publishers and the mocker.

A payload is ``[ts, events, dp_rank?]`` (or, as some commits sent it, a map of the same) in msgpack. An event is a map
with ``type`` or an array that begins with its type; fields were added at the end over the years, so what is not needed
is skipped unread and what is missing has a default. A block's hash is an unsigned or signed 64-bit integer or raw
bytes, of which the last eight count, as the engine's own integer form has it.

Law of this file: no payload raises anything but ``BadPayload``, none takes more memory than a small multiple of its own
size, and an event that could not be read is counted, never guessed.
"""

from typing import Any, Final

import msgspec

from kvbm_console.core.errors import KvbmConsoleError
from kvbm_console.core.ids import EMPTY_HASH, Tier

PAYLOAD_BYTES_MAX: Final = 16 * 2**20
"""One batch is one engine step: a prefill of a million tokens takes 5 MB with its token ids."""
EVENTS_MAX: Final = 65_536
"""Events of one batch: a step that evicts a million tokens sends one removal for each block of 16."""
BLOCKS_MAX: Final = 1_000_000
"""Blocks of one batch, the limit of a report to the leader."""
FIELDS_MAX: Final = 64
"""Fields of one event, a few times what the newest engine sends."""
MEDIUM_BYTES_MAX: Final = 64
GROUP_MAX: Final = 1_024
RANK_MAX: Final = 65_535
BLOCK_TOKENS_MAX: Final = 65_536
DEFAULT_MEDIUM: Final = "GPU"
"""What engines meant before they named a medium."""
_MASK: Final = 2**64 - 1
_REPLACED_EMPTY: Final = 1
"""A real hash of 0 becomes this: the core writes 0 for a place without content."""

TIER_OF_MEDIUM: Final[dict[str, Tier]] = {
    "GPU": Tier.G1, "CPU": Tier.G2, "CPU_PINNED": Tier.G2, "CPU_TIER1": Tier.G2, "CPU_TIER2": Tier.G2,
    "DISK": Tier.G3, "STORAGE": Tier.G4, "EXTERNAL": Tier.G4,
}
"""Where each medium belongs; a name that is not here is kept verbatim and shown with G4, the tier we know least of."""


class BadPayload(KvbmConsoleError):
    """Raised when a payload is no batch at all: its whole content is lost."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A chain of blocks was stored. ``block_tokens`` is 0 in a placeholder, which names blocks and nothing else."""

    hashes: list[int]
    parent: int | None
    block_tokens: int
    medium: str
    group: int


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One copy of each of these blocks is gone from the medium."""

    hashes: list[int]
    medium: str
    group: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The publisher holds nothing any more, on any medium."""


CacheEvent = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One engine step. ``unknown`` events are of kinds that we do not know, ``malformed`` ones of kinds that we do."""

    ts: float
    dp_rank: int | None
    events: list[CacheEvent]
    unknown: int = 0
    malformed: int = 0

    @property
    def blocks(self) -> int:
        """Blocks stored and removed: the measure of flow, since one event may hold a chain."""
        return sum(len(event.hashes) for event in self.events if not isinstance(event, Cleared))


# --- the wire: only what is needed is typed; Raw skips the rest without making objects of it ---

_Hash = int | bytes
_Skipped = msgspec.Raw
_NONE: Final = msgspec.Raw(b"\xc0")


class _StoredMap(msgspec.Struct, tag="BlockStored", tag_field="type", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: _Skipped = _NONE
    block_size: int = 0
    lora_id: _Skipped = _NONE
    medium: str | None = None
    lora_name: _Skipped = _NONE
    extra_keys: _Skipped = _NONE
    group_idx: int | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _BatchMap(msgspec.Struct, gc=False):
    events: _Skipped
    ts: float = 0.0
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


_MAPS: Final = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_ARRAYS: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_BATCH_MAP: Final = msgspec.msgpack.Decoder(_BatchMap)
_ALL_MAPS: Final = msgspec.msgpack.Decoder(list[_StoredMap | _RemovedMap | _ClearedMap])
_ALL_ARRAYS: Final = msgspec.msgpack.Decoder(list[_StoredArray | _RemovedArray | _ClearedArray])
_LIST: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TIME: Final = msgspec.msgpack.Decoder(float)
_RANK: Final = msgspec.msgpack.Decoder(int | None)
_NAME: Final = msgspec.msgpack.Decoder(str)
_FIELDS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_KINDS: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_FAILURES: Final = (msgspec.DecodeError, ValueError, RecursionError, UnicodeDecodeError)
"""All that decoding can raise: not msgpack, other types, nested too deep, text that is none."""


def decode_batch(payload: bytes) -> Batch:
    """The batch in a payload. Raises ``BadPayload`` with the reason; nothing else, whatever the bytes are."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadPayload(f"a payload of {len(payload)} bytes is above {PAYLOAD_BYTES_MAX}")
    try:
        ts, events, dp_rank = _envelope(payload)
        count = _array_length(events)
        if count > EVENTS_MAX:
            raise BadPayload(f"a batch of {count} events is above {EVENTS_MAX}")
        batch = _decode_events(ts, events, dp_rank)
    except _FAILURES as error:
        raise BadPayload(f"not a batch of KV events: {error}") from None
    if batch.blocks > BLOCKS_MAX:
        raise BadPayload(f"a batch of {batch.blocks} blocks is above {BLOCKS_MAX}")
    return batch


def tier_of(medium: str) -> Tier:
    """The tier of a medium."""
    return TIER_OF_MEDIUM.get(medium, Tier.G4)


def normal_hash(value: _Hash) -> int:
    """One form for three: unsigned, signed, and the last eight of raw bytes, big-endian. Raises ValueError.

    >>> normal_hash(-1) == normal_hash(b"\\xff" * 32) == normal_hash(2**64 - 1)
    True
    """
    if isinstance(value, bytes):
        if len(value) < 8:
            raise ValueError(f"a hash of {len(value)} bytes is below 8")
        number = int.from_bytes(value[-8:], "big")
    else:
        number = value & _MASK
    return _REPLACED_EMPTY if number == EMPTY_HASH else number


def _envelope(payload: bytes) -> tuple[float, bytes, int | None]:
    """Time, the raw events, the data-parallel rank."""
    if not payload:
        raise BadPayload("an empty payload")
    if not _is_array(payload[0]):
        whole = _BATCH_MAP.decode(payload)
        rank = whole.data_parallel_rank if whole.data_parallel_rank is not None else whole.attn_dp_rank
        return whole.ts, bytes(whole.events), _checked_rank(rank)
    if not 2 <= _array_length(payload) <= FIELDS_MAX:
        raise BadPayload(f"a batch of {_array_length(payload)} elements; 2 or 3 were expected")
    parts = _LIST.decode(payload)
    # A third element that is no rank is a field that we do not know: it is skipped, as any later one.
    third = parts[2] if len(parts) > 2 and not _is_container(bytes(parts[2])[0]) else _NONE
    return _TIME.decode(parts[0]), bytes(parts[1]), _checked_rank(_RANK.decode(third))


def _checked_rank(rank: int | None) -> int | None:
    if rank is not None and not 0 <= rank <= RANK_MAX:
        raise BadPayload(f"a data-parallel rank of {rank}")
    return rank


def _decode_events(ts: float, raw: bytes, dp_rank: int | None) -> Batch:
    """All at once when every event is as expected, else one by one."""
    if not _array_length(raw):
        return Batch(ts, dp_rank, [])
    header = {0xDC: 3, 0xDD: 5}.get(raw[0], 1)
    decoder = _ALL_ARRAYS if _is_array(raw[header]) else _ALL_MAPS
    try:
        return Batch(ts, dp_rank, [_checked(event) for event in decoder.decode(raw)])
    except _FAILURES:
        pass
    events: list[CacheEvent] = []
    unknown = malformed = 0
    for one in _LIST.decode(raw):
        piece = bytes(one)
        try:
            events.append(_checked((_ARRAYS if _is_array(piece[0]) else _MAPS).decode(piece)))
        except _FAILURES:
            if _is_unknown(piece):
                unknown += 1
            else:
                malformed += 1
    return Batch(ts, dp_rank, events, unknown, malformed)


def _checked(event: Any) -> CacheEvent:
    """Our form of an event of the wire. Raises ValueError when a value is out of bounds."""
    kind = type(event)
    if kind is _ClearedMap or kind is _ClearedArray:
        return Cleared()
    group = event.group_idx or 0
    if not 0 <= group <= GROUP_MAX:
        raise ValueError(f"group_idx {group}")
    medium = event.medium or DEFAULT_MEDIUM
    if len(medium.encode()) > MEDIUM_BYTES_MAX or not medium.isprintable():
        raise ValueError("medium is too long or has characters that do not print")
    hashes = [
        value if type(value) is int and 0 < value <= _MASK else normal_hash(value) for value in event.block_hashes
    ]
    if kind is _RemovedMap or kind is _RemovedArray:
        return Removed(hashes, medium, group)
    if not 0 <= event.block_size <= BLOCK_TOKENS_MAX:
        raise ValueError(f"block_size {event.block_size}")
    parent = event.parent_block_hash
    return Stored(hashes, None if parent is None else normal_hash(parent), event.block_size, medium, group)


def _is_unknown(piece: bytes) -> bool:
    """Whether this is an event of a kind that we do not know, rather than a broken one of a kind that we do."""
    try:
        if _is_array(piece[0]):
            if not 1 <= _array_length(piece) <= FIELDS_MAX:
                return False
            kind = _NAME.decode(_LIST.decode(piece)[0])
        else:
            if not _map_length(piece) <= FIELDS_MAX:
                return False
            kind = _NAME.decode(_FIELDS.decode(piece)["type"])
    except (*_FAILURES, KeyError):
        return False
    return kind not in _KINDS


def _is_array(first: int) -> bool:
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _is_container(first: int) -> bool:
    return 0x80 <= first <= 0x9F or first in (0xDC, 0xDD, 0xDE, 0xDF)


def _array_length(data: bytes) -> int:
    """The length that an array's header claims, before anything of that size is made."""
    first = data[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F
    if first == 0xDC and len(data) >= 3:
        return int.from_bytes(data[1:3], "big")
    if first == 0xDD and len(data) >= 5:
        return int.from_bytes(data[1:5], "big")
    raise BadPayload("an array was expected")


def _map_length(data: bytes) -> int:
    """The length that a map's header claims. Raises ValueError when it is no map."""
    first = data[0]
    if 0x80 <= first <= 0x8F:
        return first & 0x0F
    if first in (0xDE, 0xDF):
        return int.from_bytes(data[1 : 3 if first == 0xDE else 5], "big")
    raise ValueError("a map was expected")
