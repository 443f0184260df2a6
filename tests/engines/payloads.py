"""Batches as engines of different ages send them, and an independent recount of what they leave behind.

Law of this file: the recount uses neither the decoder nor the facts, only plain msgpack and dictionaries.
"""

from collections import Counter
from typing import Any

import msgspec
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from kvbm_console.engines.kv_events.batch import Batch, decode

Place = tuple[int, int, str]


def decode_batch(payload: bytes) -> Batch:
    """The only batch in a payload."""
    (found,) = decode(payload)
    return found


def batch(*events: Any, ts: float = 1.0, dp_rank: int | None = 0) -> bytes:
    """A payload of three elements, or of two without a rank."""
    return msgspec.msgpack.encode([ts, list(events)] if dp_rank is None else [ts, list(events), dp_rank])


def stored(*hashes: Any, parent: Any = None, size: int = 16, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """A store as newer engines send it: a map with ``type``."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent,
        "token_ids": list(range(size * len(hashes))), "block_size": size, "lora_id": None, "medium": medium,
        "lora_name": None, **more,
    }


def removed(*hashes: Any, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """A removal as newer engines send it."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **more}


def cleared() -> dict[str, Any]:
    """A clear as newer engines send it."""
    return {"type": "AllBlocksCleared"}


class Recount:
    """Copies by (rank, group, medium) and hash, one publisher."""

    def __init__(self) -> None:
        self.copies: dict[Place, Counter[int]] = {}

    def take(self, payload: bytes) -> None:
        """Fold a payload whose events are maps, and whose hashes may have any of the three forms."""
        if payload[:1] in (b"\x08", b"\x10"):
            payload = batch(*of_lmcache(payload))
        _ts, events, rank = (*msgspec.msgpack.decode(payload), 0)[:3]
        for event in events:
            if "event_type" in event:
                event = of_pool(event)
            if event["type"] == "AllBlocksCleared":
                for place in list(self.copies):
                    if place[0] == (rank or 0) and (event.get("everywhere") or place[2] in ("GPU", "CPU_PINNED")):
                        del self.copies[place]
                continue
            place = (rank or 0, event.get("group_idx") or 0, event.get("medium") or "GPU")
            here = self.copies.setdefault(place, Counter())
            for value in event["block_hashes"]:
                number = plain(value)
                if event["type"] == "BlockStored":
                    here[number] += 1
                elif here[number]:
                    here[number] -= 1

    def nonempty(self) -> dict[Place, dict[int, int]]:
        """The rest, without zeros."""
        left = {place: {key: count for key, count in here.items() if count} for place, here in self.copies.items()}
        return {place: here for place, here in left.items() if here}


def of_pool(event: dict[str, Any]) -> dict[str, Any]:
    """An event of Mooncake's pool as an event of an engine; a key that ends with a hash has that hash."""
    kind = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}[event["event_type"]]
    if kind == "AllBlocksCleared":
        return {"type": kind, "everywhere": True}
    hashes = event["seq_hashes"] or [bytes.fromhex(event["object_key"].split("@")[-1])]
    medium = {"cpu": "CPU", "disk": "DISK"}[event["medium"]]
    return {"type": kind, "block_hashes": hashes, "medium": f"{medium} REMOTE {event['backend_id']}"}


def lmcache_batch() -> Any:
    """The class of LMCache's ``KVEventBatch``, made with protobuf from its field numbers."""
    kinds = FieldDescriptorProto
    file = FileDescriptorProto(name="tests/lmcache.proto", package="tests.lmcache", syntax="proto3")
    record = file.message_type.add(name="KVEventRecord")
    for number, (name, kind, label) in enumerate((
        ("seq", kinds.TYPE_INT64, 1), ("kind", kinds.TYPE_STRING, 1), ("medium", kinds.TYPE_STRING, 1),
        ("model_name", kinds.TYPE_STRING, 1), ("block_hashes", kinds.TYPE_BYTES, 3),
        ("parent_block_hash", kinds.TYPE_BYTES, 1), ("token_ids", kinds.TYPE_INT64, 3),
    ), 1):
        record.field.add(name=name, number=number, type=kind, label=label)
    answer = file.message_type.add(name="KVEventBatch")
    for number, (name, kind) in enumerate((
        ("enabled", kinds.TYPE_BOOL), ("incarnation", kinds.TYPE_INT64), ("next_cursor", kinds.TYPE_INT64),
        ("lost", kinds.TYPE_BOOL),
    ), 1):
        answer.field.add(name=name, number=number, type=kind, label=1)
    records = ".tests.lmcache.KVEventRecord"
    answer.field.add(name="events", number=5, type=kinds.TYPE_MESSAGE, type_name=records, label=3)
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("tests.lmcache.KVEventBatch"))


LmcacheBatch = lmcache_batch()


def of_lmcache(payload: bytes) -> list[dict[str, Any]]:
    """The records of LMCache's server as events of an engine."""
    return [
        {"type": {"stored": "BlockStored", "removed": "BlockRemoved"}[record.kind], "medium": record.medium,
         "block_hashes": list(record.block_hashes)}
        for record in LmcacheBatch.FromString(payload).events
    ]


def plain(value: Any) -> int:
    """The 64-bit number of a hash in any form."""
    number = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % 2**64
    return number or 1
