"""Admissions: the block at which a prompt began to miss, for the digest, the lake, the prefix map and the console.

The hits of an admission are the leading blocks of the prompt, so the first miss is the block behind them. It counts as
a miss of the cache unless the look-up says that nothing could have been found there.

Law of this file: an admission has one first miss, whoever asks.
"""

from collections.abc import Container
from typing import Final, NamedTuple

from kvbm_console.core import events as ev
from kvbm_console.core.ids import MissReason
from kvbm_console.core.slots import SlotFacts

NO_MISS: Final = frozenset({MissReason.NONE, MissReason.BOUNDARY, MissReason.TOO_SHORT})
"""Reasons for which the rest of a prompt is computed although no block of the cache is missing."""


def first_miss(e: ev.PrefixScored, slot: SlotFacts) -> int | None:
    """The place in the prompt of the first block that no tier had; None if all had one, or if its hash is unknown."""
    at = sum(e.hits)
    return at if at < min(e.prompt_blocks, len(slot.hashes)) else None


class FirstMiss(NamedTuple):
    """The first block that a prompt missed, the blocks from there on, and the reason in the look-up."""

    key: int
    blocks: int
    why: MissReason


class FirstMisses:
    """The first misses of admissions, with the reasons of the look-ups before them."""

    def __init__(self) -> None:
        self._why: dict[int, MissReason] = {}
        """Live slot to the reason in its last look-up."""

    def looked_up(self, e: ev.LookupAnswered) -> None:
        """Remember the reason."""
        self._why[e.slot] = e.why

    def scored(self, e: ev.PrefixScored, slot: SlotFacts) -> FirstMiss | None:
        """The first miss of this admission; None if its prompt missed nothing that could have been reused."""
        at, why = first_miss(e, slot), self._why.get(e.slot, MissReason.UNKNOWN_AFTER_GAP)
        return None if at is None or why in NO_MISS else FirstMiss(slot.hashes[at], e.prompt_blocks - at, why)

    def closed(self, slot: int) -> None:
        """Forget a slot that ended."""
        self._why.pop(slot, None)

    def keep(self, live: Container[int]) -> None:
        """Forget all slots but these, after a gap."""
        self._why = {slot: why for slot, why in self._why.items() if slot in live}
