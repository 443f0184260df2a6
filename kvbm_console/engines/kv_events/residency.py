"""What a publisher's blocks come to, without a leader: which hashes are on which medium, and how many copies.

Used where no facts are kept (a capture that runs beside an engine). A leader keeps the same in its pools, and a test
compares the two.

Law of this file: a hash that was stored twice is gone after two removals, and a count is never below zero: a removal
of what was not there is counted as such.
"""

from typing import Final

import msgspec

from kvbm_console.engines.kv_events.decoder import Batch, Cleared, Stored

RESIDENT_MAX: Final = 2**22
"""Blocks of one publisher: 64 million tokens, ten times the largest host tier; more is counted as dropped."""


class Place(msgspec.Struct, frozen=True, gc=False, order=True):
    """One (data-parallel rank, group, medium) of a publisher."""

    dp_rank: int
    group: int
    medium: str


class Residency:
    """Copies of each hash at each place. ``apply`` folds one batch in order."""

    def __init__(self) -> None:
        self.places: dict[Place, dict[int, int]] = {}
        self.resident: int = 0
        """Copies in all, over all places."""
        self.unmatched = 0
        """Removals of blocks that were not there, which is normal after a late join."""
        self.dropped = 0
        """Stores beyond ``RESIDENT_MAX``."""

    def apply(self, batch: Batch) -> None:
        """Fold the events of a batch."""
        rank = batch.dp_rank or 0
        for event in batch.events:
            if isinstance(event, Cleared):
                self.clear()
                continue
            copies = self.places.setdefault(Place(rank, event.group, event.medium), {})
            if isinstance(event, Stored):
                self._store(copies, event.hashes)
            else:
                self._remove(copies, event.hashes)

    def clear(self) -> None:
        """Everything of the publisher is gone."""
        for copies in self.places.values():
            copies.clear()
        self.resident = 0

    def counts(self) -> dict[Place, int]:
        """Copies at each place, by place."""
        return {place: sum(copies.values()) for place, copies in sorted(self.places.items())}

    def _store(self, copies: dict[int, int], hashes: list[int]) -> None:
        room = RESIDENT_MAX - self.resident
        if len(hashes) > room:
            self.dropped += len(hashes) - room
            hashes = hashes[:room]
        for block in hashes:
            copies[block] = copies.get(block, 0) + 1
        self.resident += len(hashes)

    def _remove(self, copies: dict[int, int], hashes: list[int]) -> None:
        for block in hashes:
            left = copies.get(block, 0) - 1
            if left < 0:
                self.unmatched += 1
                continue
            self.resident -= 1
            if left:
                copies[block] = left
            else:
                del copies[block]
