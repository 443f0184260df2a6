"""The KV-event batches of vLLM, SGLang, Dynamo's publishers, the mocker and Mooncake's pool, in msgpack.

A payload is ``[ts, events, dp_rank?]`` or, as some commits sent it, a map of the same. An event is a map with ``type``
or an array that begins with its type. Fields were added at the end over the years, so a missing field has a default,
and a field without use here is skipped unread. A block's hash is an unsigned or signed 64-bit integer, or raw bytes.
The last eight bytes count, as in the engine's own integer form.

Tokens stay undecoded. Equal tokens are equal bytes in msgpack, so the bytes of a block's tokens are its content:

    token_ids  93 07 cd 01 2c 08    block_size 2    content of the first block: digest of 07 cd 01 2c

Only a block that begins a prompt or has keys of its own needs that digest. Blocks with a context have a ``StoredMark``.

Mooncake's master sends maps with ``event_type`` (RFC 1527). An event names an object of the pool, and often neither
tokens nor a block size. vLLM's keys end with the block's hash, so the pool's blocks have the engine's hashes.

Law of this file: see ``batch``. ``KINDS`` has the fields of each kind once, for both forms. A field beside the hashes
that has another shape is left out, and its event stays.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from operator import or_
from string import hexdigits
from typing import Any, Final

import msgspec
import xxhash

from kvbm_console.engines.kv_events.batch import (
    BLOCK_TOKENS_MAX,
    DEFAULT_MEDIUM,
    FAILURES,
    FIELDS_MAX,
    GROUP_MAX,
    MEDIUM_BYTES_MAX,
    RANK_MAX,
    REMOTE,
    TIER_OF_MEDIUM,
    BadPayload,
    Batch,
    CacheEvent,
    Cleared,
    Removed,
    Stored,
    StoredMark,
    check_count,
    is_array,
    known_medium,
    normal_hash,
    token_digests,
)

BEGINS: Final = (*range(0x80, 0xA0), *range(0xDC, 0xE0))
"""First bytes of maps and arrays in msgpack."""
_Hashes = list[int | bytes]
_NONE: Final = msgspec.Raw(b"\xc0")


_NUMBERS: Final = {int}
NAME_CHARS: Final = 64
"""Characters of the name of a LoRA or a session; ids of sessions have 36."""
IMAGE_CHARS: Final = 16
"""Characters of an image's digest, which is 64 long: so few tell 10**9 images apart."""
OWNER_CHARS: Final = 24
CONTEXT_CHARS: Final = 256
"""Characters of the context of a block: a LoRA, a salt, a session and the images that begin in a block."""


def _skipped(name: str) -> tuple[str, Any, Any]:
    """A field that is not decoded before its value is needed."""
    return name, msgspec.Raw, _NONE


def _stored(event: Any) -> Stored:
    if not 0 <= event.block_size <= BLOCK_TOKENS_MAX:
        raise ValueError(f"block_size {event.block_size}")
    parent, hashes = event.parent_block_hash, _hashes(event)
    if (
        len(event.lora_name) == 1 and event.cache_salt is event.session_id and event.lora_id == _NONE
        and len(event.extra_keys) <= 5 + len(hashes)
    ):  # no context, as for most chains
        if parent is None:
            return Stored(hashes, None, event.block_size, _medium(event), _group(event), (), event.token_ids)
        return Stored(hashes, normal_hash(parent), event.block_size, _medium(event), _group(event))
    return Stored(
        hashes, None if parent is None else normal_hash(parent), event.block_size, _medium(event), _group(event),
        _marks(event, len(hashes)),
    )


def _marks(event: Any, blocks: int) -> tuple[StoredMark, ...]:
    """The marks of a chain: of its first block, and of each block with keys of its own."""
    begins = event.parent_block_hash is None and blocks > 0
    lora, salt, session = _text(event.lora_name), _text(event.cache_salt), _text(event.session_id)
    lora = lora or _text(event.lora_id)
    context = [f"lora={_name(lora)}"] if lora else []
    if salt:
        context.append(f"salt=#{_short(salt.encode())}")
    keys = _keys(event, blocks, lora)
    contents = token_digests(event.token_ids, event.block_size, sorted({*([0] if begins else []), *keys}))
    context += keys.pop(0, [])
    if session:
        context.append(f"session={_name(session)}")
    marks = [StoredMark(0, contents.get(0, 0), _cut(context))] if blocks and (context or contents.get(0)) else []
    return (*marks, *(StoredMark(at, contents.get(at, 0), _cut(own)) for at, own in keys.items()))


def _keys(event: Any, blocks: int, lora: str) -> dict[int, list[str]]:
    """The words of each block with keys other than the LoRA's name, which each block repeats, by position."""
    try:
        told = _EXTRA.decode(event.extra_keys)
    except FAILURES:
        return {}
    found: dict[int, list[str]] = {}
    for at, own in enumerate(told[:blocks] if isinstance(told, list) else ()):
        if isinstance(own, list):
            words = [_word(key) for key in (own[1:] if lora and own[:1] == [lora] else own)]
            if words:
                found[at] = words
    return found


def _word(key: Any) -> str:
    """The word of an extra key as vLLM publishes it: an image with its position, a salt, a digest of embeddings."""
    if isinstance(key, list):
        return f"image={_name(str(key[0]))[:IMAGE_CHARS]}" if key else "image=?"
    if isinstance(key, bytes):
        return f"embeds=#{_short(key)}"
    return f"salt=#{_short(str(key).encode())}"


def _text(raw: Any) -> str:
    """The text or the number in a field, empty without it."""
    try:
        found = _PLAIN.decode(raw)
    except FAILURES:
        return ""
    return "" if found is None else str(found)


def _name(text: str) -> str:
    """A name as a word of a context: without blanks and other characters that do not print."""
    return "".join(char if char.isprintable() and not char.isspace() else "_" for char in text[:NAME_CHARS])


def _short(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF:08x}"


def _cut(words: list[str]) -> str:
    """The words of a context, as many as fit."""
    text = " ".join(words)
    while len(text) > CONTEXT_CHARS:
        text = text.rpartition(" ")[0]
    return text


def _removed(event: Any) -> Removed:
    hashes, medium = event.block_hashes, event.medium
    if (
        len(hashes) == 1 and type(hashes[0]) is int and 0 < hashes[0] < 2**64 and event.locality is event.ownership
        and (medium is None or medium == DEFAULT_MEDIUM)
    ):  # vLLM sends an event for each removed block, and this costs a third of the functions below
        return Removed(hashes, DEFAULT_MEDIUM, 0 if event.group_idx is None else _group(event))
    return Removed(_hashes(event), _medium(event), _group(event))


def _hashes(event: Any) -> list[int]:
    hashes: list[Any] = event.block_hashes
    if set(map(type, hashes)) == _NUMBERS and min(hashes) > 0 and max(hashes) < 2**64:
        return hashes
    return [value if type(value) is int and 0 < value < 2**64 else normal_hash(value) for value in event.block_hashes]


def _medium(event: Any) -> str:
    """The medium, with the words ``REMOTE`` and the owner of a tier that is not the publisher's own."""
    medium: str = event.medium or DEFAULT_MEDIUM
    if medium not in TIER_OF_MEDIUM:
        medium = known_medium(medium)
    if event.locality is not event.ownership:  # both are absent in all but remote tiers
        locality = _text(event.locality).upper()
        if locality == "REMOTE":
            medium += f" {REMOTE}"
        elif locality == "LOCAL" and medium == "STORAGE":
            medium = "DISK"  # files of this machine
        if owner := _name(_text(event.ownership))[:OWNER_CHARS]:
            medium += f" {owner}"
    if medium in TIER_OF_MEDIUM:
        return medium
    if len(medium.encode()) > MEDIUM_BYTES_MAX or not medium.isprintable():
        raise ValueError("medium is too long or has characters that do not print")
    return medium


def _group(event: Any) -> int:
    if event.group_idx is None:
        return 0
    group: int = event.group_idx
    if not 0 <= group <= GROUP_MAX:
        raise ValueError(f"group_idx {group}")
    return group


_PLACE: Final = [("medium", str | None, None), ("group_idx", int | None, None)]
_OWNER: Final = [_skipped("locality"), _skipped("ownership")]
KINDS: Final[dict[str, tuple[list[Any], Callable[[Any], CacheEvent]]]] = {
    "BlockStored": ([
        ("block_hashes", _Hashes), ("parent_block_hash", int | bytes | None, None), _skipped("token_ids"),
        ("block_size", int, 0), _skipped("lora_id"), _PLACE[0], _skipped("lora_name"), _skipped("extra_keys"),
        _PLACE[1], _skipped("kv_cache_spec_kind"), _skipped("kv_cache_spec_sliding_window"), *_OWNER,
        _skipped("session_id"), _skipped("lookahead_token_ids"), _skipped("cache_salt"),
    ], _stored),
    "BlockRemoved": ([("block_hashes", _Hashes), *_PLACE, *_OWNER], _removed),
    "AllBlocksCleared": ([], lambda event: Cleared(everywhere=False)),
}
"""Kind to its fields, in the order of the array form, and the function that makes the event (raises ``ValueError``)."""
_MAKE: Final[dict[type, Callable[[Any], CacheEvent]]] = {}
"""Type of the wire to the function that makes the event."""


_UNUSED: Final = frozenset({"kv_cache_spec_kind", "kv_cache_spec_sliding_window", "lookahead_token_ids"})
"""Fields without use here, which only the array form needs for the places of those behind them."""


def _form(**options: Any) -> tuple[Any, Any]:
    """Decoders of an event and of a list of events in the array form or the map form."""
    kinds = []
    for kind, (fields, make) in KINDS.items():
        if "array_like" not in options:  # a name that is not declared costs nothing
            fields = [field for field in fields if field[0] not in _UNUSED]
        kinds.append(msgspec.defstruct(kind, fields, tag=kind, gc=False, **options))
        _MAKE[kinds[-1]] = make
    event: Any = reduce(or_, kinds)
    return msgspec.msgpack.Decoder(event), msgspec.msgpack.Decoder(list[event])


class _BatchMap(msgspec.Struct, gc=False):
    events: msgspec.Raw
    ts: float = 0.0
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


class _BatchArray(msgspec.Struct, gc=False, array_like=True):
    ts: float
    events: msgspec.Raw
    third: msgspec.Raw = _NONE


_ARRAYS: Final = _form(array_like=True)
_MAPS: Final = _form(tag_field="type")
_BATCH_MAP: Final = msgspec.msgpack.Decoder(_BatchMap)
_BATCH_ARRAY: Final = msgspec.msgpack.Decoder(_BatchArray)
_LIST: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_RANK: Final = msgspec.msgpack.Decoder(int | None)
_NAME: Final = msgspec.msgpack.Decoder(str)
_PLAIN: Final = msgspec.msgpack.Decoder(str | int | None)
_EXTRA: Final = msgspec.msgpack.Decoder()
_FIELDS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def decode(payload: bytes) -> list[Batch]:
    """The batch in a payload. Raises ``BadPayload`` and ``batch.FAILURES``."""
    ts, events, dp_rank = _envelope(payload)
    check_count(_array_length(events))
    return [_decode_events(ts, events, dp_rank)]


def _envelope(payload: bytes) -> tuple[float, bytes, int | None]:
    """Time, the raw events, the data-parallel rank."""
    if not is_array(payload[0]):
        batch = _BATCH_MAP.decode(payload)
        rank = batch.data_parallel_rank if batch.data_parallel_rank is not None else batch.attn_dp_rank
        return batch.ts, bytes(batch.events), _checked_rank(rank)
    if not 2 <= _array_length(payload) <= FIELDS_MAX:
        raise BadPayload(f"a batch of {_array_length(payload)} elements; 2 or 3 were expected")
    parts = _BATCH_ARRAY.decode(payload)
    # A third element that is no rank is an unknown field, which is skipped like any later field.
    third = parts.third if not _is_container(bytes(parts.third)[0]) else _NONE
    return parts.ts, bytes(parts.events), _checked_rank(_RANK.decode(third))


def _checked_rank(rank: int | None) -> int | None:
    if rank is not None and not 0 <= rank <= RANK_MAX:
        raise BadPayload(f"a data-parallel rank of {rank}")
    return rank


def _decode_events(ts: float, raw: bytes, dp_rank: int | None) -> Batch:
    if not _array_length(raw):
        return Batch(ts, dp_rank, [])
    if POOL_FIELD in raw:
        with suppress(*FAILURES):
            return _of_a_pool(ts, dp_rank, _POOL_EVENTS.decode(raw))
    header = {0xDC: 3, 0xDD: 5}.get(raw[0], 1)
    decoder = _ARRAYS[1] if is_array(raw[header]) else _MAPS[1]
    try:
        return Batch(ts, dp_rank, [_MAKE[type(event)](event) for event in decoder.decode(raw)])
    except FAILURES:
        pass  # an event is unknown or broken, so each event is decoded by itself
    events: list[CacheEvent] = []
    unknown = malformed = 0
    for raw_event in _LIST.decode(raw):
        piece = bytes(raw_event)
        try:
            event = (_ARRAYS if is_array(piece[0]) else _MAPS)[0].decode(piece)
            events.append(_MAKE[type(event)](event))
        except FAILURES:
            if _is_unknown(piece):
                unknown += 1
            else:
                malformed += 1
    return Batch(ts, dp_rank, events, unknown, malformed)


class _PoolEvent(msgspec.Struct, gc=False):
    """An event of a shared pool (Mooncake RFC 1527). It names an object, and the engine's hash if the key has it."""

    event_type: str
    backend_id: str
    seq_hashes: _Hashes = []
    object_key: str = ""
    medium: str | None = None
    parent_hash: int | bytes | None = None
    block_size: int | None = None


POOL_FIELD: Final = msgspec.msgpack.encode("event_type")
_POOL_EVENTS: Final = msgspec.msgpack.Decoder(list[_PoolEvent])
HASH_DIGITS: Final = 16
"""Hexadecimal digits of the least hash at the end of a key."""
MILLISECONDS_FROM: Final = 1e11
"""A time above this is in milliseconds: in seconds it would be the year 5138."""


def _of_a_pool(ts: float, dp_rank: int | None, told: list[_PoolEvent]) -> Batch:
    events: list[CacheEvent] = []
    unknown = malformed = 0
    for event in told:
        try:
            found = _pool_event(event)
        except ValueError:
            malformed += 1
            continue
        if found is None:
            unknown += 1
        else:
            events.append(found)
    seconds = ts / 1e3 if ts > MILLISECONDS_FROM else ts
    return Batch(seconds, dp_rank, events, unknown, malformed, _name(told[0].backend_id)[:OWNER_CHARS])


def _pool_event(event: _PoolEvent) -> CacheEvent | None:
    """The event of a pool; None for an unknown kind. Raises ``ValueError``."""
    if event.event_type == "cleared":
        return Cleared()
    if event.event_type not in ("stored", "removed"):
        return None
    medium = f"{known_medium(event.medium or 'CPU')} {REMOTE} {_name(event.backend_id)[:OWNER_CHARS]}"
    if len(medium.encode()) > MEDIUM_BYTES_MAX or not medium.isprintable():
        raise ValueError("medium is too long or has characters that do not print")
    hashes = [normal_hash(value) for value in event.seq_hashes] or [_hash_of_key(event.object_key)]
    if event.event_type == "removed":
        return Removed(hashes, medium, 0)
    size = event.block_size or 0
    if not 0 <= size <= BLOCK_TOKENS_MAX:
        raise ValueError(f"block_size {size}")
    return Stored(hashes, None if event.parent_hash is None else normal_hash(event.parent_hash), size, medium, 0)


def _hash_of_key(key: str) -> int:
    """The engine's hash at the end of an object's key (``...@HEX``), else a digest of the key. Raises ValueError."""
    if not key:
        raise ValueError("neither a hash nor a key")
    word = key.rpartition("@")[2]
    if len(word) >= HASH_DIGITS and len(word) % 2 == 0 and all(char in hexdigits for char in word):
        return normal_hash(bytes.fromhex(word))
    return normal_hash(xxhash.xxh3_64_intdigest(key.encode()))


def _is_unknown(piece: bytes) -> bool:
    """True for an event of an unknown kind, False for a broken event of a known kind."""
    try:
        if is_array(piece[0]):
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
