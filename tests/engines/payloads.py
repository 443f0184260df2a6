"""Batches as engines of different ages send them, and an independent recount of what they leave behind.

Law of this file: the recount uses neither the decoder nor the facts, only plain msgpack and dictionaries.
"""

from collections import Counter
from typing import Any

import msgspec

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
        _ts, events, rank = (*msgspec.msgpack.decode(payload), 0)[:3]
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.copies.clear()
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
        """What is left, without zeros."""
        left = {place: {key: count for key, count in here.items() if count} for place, here in self.copies.items()}
        return {place: here for place, here in left.items() if here}


def plain(value: Any) -> int:
    """The 64-bit number of a hash in any form."""
    number = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % 2**64
    return number or 1
