"""Payloads of KV events as plain statements, with the forms in which the publisher wrote them.

The decoder of ``kv_events`` forgives: it maps signed and raw hashes to one form and skips fields that it does not need.
A judge needs the forms, so this file reads all fields and reports every fault instead of counting it.

Law of this file: a payload raises ``Unreadable`` or becomes a reading. A fault of one event hides no other event.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
import xxhash

from kvbm_console.core.errors import KvbmConsoleError
from kvbm_console.engines.kv_events.batch import FAILURES, PAYLOAD_BYTES_MAX
from kvbm_console.engines.kv_events.schemas import lmcache, trtllm, vllm

Hash = int | bytes | str
"""A hash as it was written; integers are taken modulo 2**64."""


EVERYWHERE: Final = "*"


class Unreadable(KvbmConsoleError):
    """Raised when a payload is no batch."""


class BadEvent(msgspec.Struct, frozen=True):
    """An event that is no statement, and the reason."""

    text: str


class Statement(msgspec.Struct, frozen=True):
    """A store, a removal, a move between media, or a clear. ``medium`` is None if the publisher names none.

    A removal from ``EVERYWHERE`` leaves no copy on any medium.
    """

    kind: Literal["stored", "removed", "moved", "cleared"]
    hashes: list[Hash] = []
    parent: Hash | None = None
    tokens: list[Any] = []
    """All tokens of all blocks."""
    block_size: int = 0
    medium: str | None = None
    group: int = 0
    source: str | None = None
    """The medium that a move leaves."""


class Reading(msgspec.Struct, frozen=True):
    """A batch: its data-parallel rank if it names one, and its events in order."""

    rank: int | None
    events: list[Statement | BadEvent]
    of_pool: bool = False
    """True for a shared pool, whose messages are numbered from 1."""


class _Stored(msgspec.Struct):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[Any]
    block_size: int
    medium: str | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


def read(payload: bytes) -> Reading:
    """The statements of a payload in msgpack or JSON. Raises ``Unreadable``."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise Unreadable(f"a payload of {len(payload)} bytes is above {PAYLOAD_BYTES_MAX}")
    try:
        if payload[:1] and payload[0] in trtllm.BEGINS:
            events = msgspec.json.decode(payload, type=list[dict[str, Any]])
            ranks = {event.get("attention_dp_rank") for event in events}
            return Reading(
                ranks.pop() if len(ranks) == 1 else None,
                [each for event in events for each in _read_event(event, _json_statements)],
            )
        if payload[:1] and payload[0] in lmcache.BEGINS:
            records = lmcache.read_header(payload).records
            return Reading(None, [each for record in records for each in _read_event(record, _record_statements)])
        rank, told = _envelope(msgspec.msgpack.decode(payload))
        if told and all(isinstance(event, dict) and "event_type" in event for event in told):
            return Reading(rank, [each for event in told for each in _read_event(event, _pool_statements)], True)
        return Reading(rank, [each for event in told for each in _read_event(event, _statements)])
    except (*FAILURES, TypeError, KeyError) as error:
        raise Unreadable(f"no batch of events: {error or type(error).__name__}") from None


def _envelope(batch: Any) -> tuple[int | None, list[Any]]:
    """(rank, events) of ``[ts, events, rank?]``, or of a map of the same. Raises ValueError."""
    if isinstance(batch, dict):
        rank = batch.get("data_parallel_rank", batch.get("attn_dp_rank"))
        parts = [batch.get("ts"), batch.get("events"), rank]
    elif isinstance(batch, list):
        parts = [*batch[:3], *[None] * (3 - len(batch))]
    else:
        raise ValueError(f"a batch is an array or a map, not {type(batch).__name__}")
    ts, events, rank = parts
    if not isinstance(ts, (int, float)) or not isinstance(events, list):
        raise ValueError("a batch begins with its time and the list of its events")
    return (rank if isinstance(rank, int) else None), events


def _read_event(event: Any, reader: Callable[[Any], list[Statement]]) -> list[Statement | BadEvent]:
    try:
        return [*reader(event)]
    except (*FAILURES, TypeError, KeyError) as error:
        return [BadEvent(str(error) if not isinstance(error, KeyError) else f"the field {error} is missing")]


def _statements(event: Any) -> list[Statement]:
    """The statement of an event of vLLM's schema, as a map with ``type`` or as an array."""
    if isinstance(event, list):
        kind, values = event[0], event[1:]
        names = [field[0] for field in vllm.KINDS[kind][0]] if kind in vllm.KINDS else []
        fields = dict(zip(names, values, strict=False))
    elif isinstance(event, dict):
        kind, fields = event["type"], event
    else:
        raise ValueError(f"an event is an array or a map, not {type(event).__name__}")
    if kind == "BlockStored":
        found = msgspec.convert(fields, _Stored)
        return [Statement("stored", [*found.block_hashes], found.parent_block_hash, found.token_ids, found.block_size,
                          found.medium, found.group_idx or 0)]
    if kind == "BlockRemoved":
        gone = msgspec.convert(fields, _Removed)
        return [Statement("removed", [*gone.block_hashes], medium=gone.medium, group=gone.group_idx or 0)]
    if kind == "AllBlocksCleared":
        return [Statement("cleared")]
    raise ValueError(f"the kind {str(kind)[:40]!r} is unknown")


class _PoolEvent(msgspec.Struct):
    event_type: str
    backend_id: str
    seq_hashes: list[int | bytes]
    object_key: str = ""
    medium: str | None = None
    parent_hash: int | bytes | None = None
    block_size: int | None = None
    token_ids: list[Any] | None = None


def _pool_statements(event: dict[str, Any]) -> list[Statement]:
    """The statement of an event of a shared pool (Mooncake RFC 1527); without a hash the key counts."""
    found = msgspec.convert(event, _PoolEvent)
    hashes: list[Hash] = [*found.seq_hashes] or [xxhash.xxh3_64_intdigest(found.object_key.encode())]
    if found.event_type == "stored":
        return [Statement("stored", hashes, found.parent_hash, found.token_ids or [], found.block_size or 0,
                          found.medium)]
    if found.event_type == "removed":
        return [Statement("removed", hashes, medium=found.medium)]
    if found.event_type == "cleared":
        return [Statement("cleared")]
    raise ValueError(f"the kind {found.event_type[:40]!r} is unknown")


def _record_statements(record: bytes) -> list[Statement]:
    """The statement of a record of LMCache's server."""
    told: dict[int, list[Any]] = {}
    for number, value in lmcache.fields(record):
        told.setdefault(number, []).append(value)
    kind, medium = (told.get(number, [b""])[0].decode() for number in (2, 3))
    hashes = told.get(5, [])
    if kind == "stored":
        tokens = [value for packed in told.get(7, []) for value in lmcache.numbers(packed)]
        parent = told[6][0] if 6 in told else None
        return [Statement("stored", hashes, parent, tokens, len(tokens) // max(1, len(hashes)), medium)]
    if kind == "removed":
        return [Statement("removed", hashes, medium=medium)]
    raise ValueError(f"the kind {kind[:40]!r} is unknown")


_LEVELS: Final = ("GPU", "CPU")


def _json_statements(event: dict[str, Any]) -> list[Statement]:
    """The statements of an event of TensorRT-LLM's schema, whose removals name no level."""
    data, group = event["data"], event.get("layer_group_id") or 0
    kind = data["type"]
    if kind == "created":
        return [Statement("cleared")]
    if kind == "removed":
        return [Statement("removed", list(data["block_hashes"]), medium=EVERYWHERE, group=group)]
    if kind == "updated":
        level = data.get("cache_level")
        if level is None or level["old_value"] == level["new_value"]:
            return []
        old, new = _LEVELS[level["old_value"]], _LEVELS[level["new_value"]]
        return [Statement("moved", [data["block_hash"]], medium=new, group=group, source=old)]
    if kind != "stored":
        raise ValueError(f"the kind {str(kind)[:40]!r} is unknown")
    made: list[Statement] = []
    parent = data.get("parent_hash")
    for block in data["blocks"]:
        tokens = block.get("tokens", [])
        medium = _LEVELS[block.get("cache_level") or 0]
        made.append(Statement("stored", [block["block_hash"]], parent, tokens, len(tokens), medium, group))
        parent = block["block_hash"]
    return made
