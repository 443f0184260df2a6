"""What is over and still shown: lives that finished, and transfers that ended.

Law of this file: both are bounded, and the oldest one goes, with everything under which it could be found.
"""

from collections import deque
from typing import Final

from .lives import Life, Transfer

PAST_MAX: Final = 512
"""Finished lives kept for the timeline: ten screens of them."""
ENDED_MAX: Final = 2_048
"""Transfers that ended, kept for the transfers view and its percentiles."""


class Archive:
    """``lives`` and ``transfers`` in the order in which they ended."""

    def __init__(self) -> None:
        self.lives: deque[Life] = deque()
        """PAST_MAX at most."""
        self.transfers: deque[Transfer] = deque()
        """ENDED_MAX at most."""
        self.forgotten = 0
        """Lives that had to go."""
        self._slots: dict[int, Life] = {}
        self._requests: dict[str, Life] = {}
        self._candidates: dict[int, Transfer] = {}
        self._operations: dict[int, Transfer] = {}

    def bury(self, life: Life) -> None:
        """Keep a finished life."""
        self.lives.append(life)
        self._slots[life.slot] = life
        self._requests[life.request] = life
        if len(self.lives) > PAST_MAX:
            oldest = self.lives.popleft()
            self.forgotten += 1
            self._slots.pop(oldest.slot, None)
            if self._requests.get(oldest.request) is oldest:
                del self._requests[oldest.request]

    def keep(self, transfer: Transfer) -> None:
        """Keep a transfer that ended."""
        self.transfers.append(transfer)
        self._candidates[transfer.candidate] = transfer
        if transfer.operation is not None:
            self._operations[transfer.operation] = transfer
        if len(self.transfers) > ENDED_MAX:
            oldest = self.transfers.popleft()
            self._candidates.pop(oldest.candidate, None)
            if oldest.operation is not None:
                self._operations.pop(oldest.operation, None)

    def of_slot(self, slot: int) -> Life | None:
        """The life that a slot had."""
        return self._slots.get(slot)

    def of_request(self, request: str) -> Life | None:
        """The last finished life of a request."""
        return self._requests.get(request)

    def of_candidate(self, candidate: int) -> Transfer | None:
        """The transfer that a candidate was."""
        return self._candidates.get(candidate)

    def of_operation(self, operation: int) -> Transfer | None:
        """The transfer that an operation was."""
        return self._operations.get(operation)
