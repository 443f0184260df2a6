"""Admissions: the block at which a prompt began to miss, for the digest, the lake, the prefix map and the console.

The hits of an admission are the leading blocks of the prompt, so the first miss is the block behind them. It counts as
a miss of the cache unless the look-up says that nothing could have been found there.

Law of this file: an admission has one first miss, whoever asks.
"""

from collections.abc import Container, Mapping
from typing import Final, NamedTuple

from kvbm_console.core import events as ev
from kvbm_console.core.ids import Authority, MissReason
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState

NO_MISS: Final = frozenset({MissReason.NONE, MissReason.BOUNDARY, MissReason.TOO_SHORT})
"""Reasons for which the rest of a prompt is computed although no block of the cache is missing."""


def first_miss(e: ev.PrefixScored, slot: SlotFacts) -> int | None:
    """The place in the prompt of the first block that no tier had; None if all had one, or if its hash is unknown."""
    at = sum(e.hits)
    return at if at < min(e.prompt_blocks, len(slot.hashes)) else None


_REMEMBERED: Final = frozenset({MissReason.NEVER_STORED, MissReason.EVICTED})
"""Reasons that the leader takes from its memory of the blocks that it saw go."""


def _has_more(e: ev.LookupAnswered, state: CacheState) -> bool:
    """True if a watched engine has pools that only its stream tells of, such as a host tier, or if it did not take a
    block that stands in its device."""
    slot = state.slots[e.slot]
    pools = [pool for pool in state.pools if pool.info.source == slot.source]
    if e.first_miss is None or not any(pool.info.authority is Authority.OBSERVED for pool in pools):
        return False
    key = slot.hashes[e.first_miss]
    return any(pool.info.authority is Authority.STREAM or pool.ready_place(key) is not None for pool in pools)


class FirstMiss(NamedTuple):
    """The first block that a prompt missed, the blocks from there on, and the reason in the look-up; None if that does
    not know it."""

    key: int
    blocks: int
    why: MissReason | None


class FirstMisses:
    """The first misses of admissions, with the reasons of the look-ups before them."""

    def __init__(self) -> None:
        self._why: dict[int, MissReason | None] = {}
        """Live slot to the reason in its last look-up."""

    def looked_up(self, e: ev.LookupAnswered, state: CacheState) -> None:
        """Remember the reason, unless the leader only remembers a device and the engine has the block elsewhere."""
        self._why[e.slot] = None if e.why in _REMEMBERED and _has_more(e, state) else e.why

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


class SeenHits:
    """Tells whether the present hits of a slot were found while somebody looked.

    The hits of an admission in front of the evidence, or in a gap, are counted nowhere. A load of theirs that fails
    takes none back.
    """

    def __init__(self) -> None:
        self._preemptions: dict[int, int] = {}
        """Live slot to its preemptions before the admission that was seen; each further admission follows another."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._preemptions

    def scored(self, slot: SlotFacts) -> None:
        """The slot was admitted."""
        self._preemptions[slot.slot] = slot.preemptions

    def closed(self, slot: int) -> None:
        """Forget a slot that ended."""
        self._preemptions.pop(slot, None)

    def keep(self, live: Mapping[int, SlotFacts]) -> None:
        """Forget all slots but these, and those that were preempted unseen, after a gap."""
        self._preemptions = {
            slot: count for slot, count in self._preemptions.items()
            if slot in live and live[slot].preemptions == count
        }
