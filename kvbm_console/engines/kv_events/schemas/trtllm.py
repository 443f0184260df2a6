"""The KV-cache events of TensorRT-LLM, as its server and its Python API serialise them: a JSON list of events.

An event is ``{"event_id", "data": {"type": "created" | "stored" | "removed" | "updated", ...}, "window_size"?,
"attention_dp_rank"?, "layer_group_id"?}``. Block hashes are integers, or hexadecimal text in the newer cache manager.
Cache level 0 is the device, 1 the host. A move between levels is a single ``updated`` event. A removal names no level,
because the block is gone from all levels. The events have no time.

Law of this file: see ``batch``.
"""

from typing import Any, Final

import msgspec

from kvbm_console.engines.kv_events.batch import (
    BLOCK_TOKENS_MAX,
    FAILURES,
    GROUP_MAX,
    RANK_MAX,
    Batch,
    CacheEvent,
    Cleared,
    Removed,
    Stored,
    check_count,
    normal_hash,
)

BEGINS: Final = b"[ \t\r\n"
"""First bytes of a JSON array."""
MEDIA: Final = ("GPU", "CPU")
"""Media by cache level."""
_Hash = int | str


class _Block(msgspec.Struct):
    block_hash: _Hash
    tokens: list[msgspec.Raw] = []
    cache_level: int = 0


class _Diff(msgspec.Struct):
    old_value: int
    new_value: int


class _Created(msgspec.Struct, tag="created", tag_field="type"):
    pass


class _Stored(msgspec.Struct, tag="stored", tag_field="type"):
    blocks: list[_Block]
    parent_hash: _Hash | None = None


class _Removed(msgspec.Struct, tag="removed", tag_field="type"):
    block_hashes: list[_Hash]


class _Updated(msgspec.Struct, tag="updated", tag_field="type"):
    block_hash: _Hash
    cache_level: _Diff | None = None


class _Event(msgspec.Struct):
    data: _Created | _Stored | _Removed | _Updated
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


class _Kind(msgspec.Struct):
    type: str


class _Unknown(msgspec.Struct):
    data: _Kind


_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_EVENT: Final = msgspec.json.Decoder(_Event)
_UNKNOWN: Final = msgspec.json.Decoder(_Unknown)
_KINDS: Final = ("created", "stored", "removed", "updated")


def decode(payload: bytes) -> list[Batch]:
    """A batch for each run of events of a data-parallel rank, in order. Raises ``BadPayload`` and ``FAILURES``."""
    pieces = _LIST.decode(payload)
    check_count(len(pieces))
    batches: list[Batch] = []
    for piece in pieces:
        rank, events, unknown, malformed = _read(bytes(piece))
        last = batches[-1] if batches else None
        if last is None or (last.dp_rank != rank and not unknown and not malformed):
            batches.append(Batch(None, rank, events, unknown, malformed))
            continue
        last.events.extend(events)
        if unknown or malformed:
            batches[-1] = msgspec.structs.replace(
                last, unknown=last.unknown + unknown, malformed=last.malformed + malformed
            )
    return batches


def _read(piece: bytes) -> tuple[int, list[CacheEvent], int, int]:
    """(rank, events, unknown, malformed) of an event of the wire."""
    try:
        event = _EVENT.decode(piece)
        rank, group = event.attention_dp_rank or 0, event.layer_group_id or 0
        if not (0 <= rank <= RANK_MAX and 0 <= group <= GROUP_MAX):
            raise ValueError("rank or group out of bounds")
        return rank, _events(event.data, group), 0, 0
    except FAILURES:
        pass
    try:
        unknown = _UNKNOWN.decode(piece).data.type not in _KINDS
    except FAILURES:
        unknown = False
    return 0, [], int(unknown), int(not unknown)


def _events(data: Any, group: int) -> list[CacheEvent]:
    if isinstance(data, _Created):
        return [Cleared()]
    if isinstance(data, _Removed):
        hashes = [_normal(value) for value in data.block_hashes]
        return [Removed(hashes, medium, group) for medium in MEDIA]
    if isinstance(data, _Updated):
        level = data.cache_level
        if level is None or level.old_value == level.new_value:
            return []
        moved = [_normal(data.block_hash)]
        old, new = _medium(level.old_value), _medium(level.new_value)
        return [Removed(moved, old, group), Stored(moved, None, 0, new, group)]
    stored: list[CacheEvent] = []
    parent = None if data.parent_hash is None else _normal(data.parent_hash)
    for block in data.blocks:
        if len(block.tokens) > BLOCK_TOKENS_MAX:
            raise ValueError(f"a block of {len(block.tokens)} tokens")
        own = _normal(block.block_hash)
        stored.append(Stored([own], parent, len(block.tokens), _medium(block.cache_level), group))
        parent = own
    return stored


def _normal(value: _Hash) -> int:
    """The hash as a number. Hexadecimal text stands for raw bytes, and the last eight count. Raises ValueError."""
    return normal_hash(bytes.fromhex(value).rjust(8, b"\0") if isinstance(value, str) else value)


def _medium(level: int) -> str:
    return MEDIA[level] if 0 <= level < len(MEDIA) else f"LEVEL{level}"
