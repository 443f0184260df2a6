"""The archive of lives and transfers that ended, and the names of older numbers.

Law of this file: the archive is bounded. The oldest entry goes, with every name under which it could be found.
"""

from collections import deque
from itertools import islice
from typing import Final

from kvbm_console.analysis.lives import Life, Transfer
from kvbm_console.core.events import CandidatePlanned, CandidatePromoted, Event, SlotCloned, SlotOpened
from kvbm_console.core.state import CacheState

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
        self.slots: dict[int, Life] = {}
        self.requests: dict[str, Life] = {}
        self.candidates: dict[int, Transfer] = {}
        self.operations: dict[int, Transfer] = {}

    def bury(self, life: Life) -> None:
        """Keep a finished life."""
        self.lives.append(life)
        self.slots[life.slot] = life
        self.requests[life.request] = life
        if len(self.lives) > PAST_MAX:
            oldest = self.lives.popleft()
            self.forgotten += 1
            self.slots.pop(oldest.slot, None)
            if self.requests.get(oldest.request) is oldest:
                del self.requests[oldest.request]

    def keep(self, transfer: Transfer) -> None:
        """Keep a transfer that ended."""
        self.transfers.append(transfer)
        self.candidates[transfer.candidate] = transfer
        if transfer.operation is not None:
            self.operations[transfer.operation] = transfer
        if len(self.transfers) > ENDED_MAX:
            oldest = self.transfers.popleft()
            self.candidates.pop(oldest.candidate, None)
            if oldest.operation is not None:
                self.operations.pop(oldest.operation, None)


NAMES_MAX: Final = 50_000
"""Requests, candidates and operations that are kept by number, each."""


class Names:
    """The slots that numbers of candidates and operations stand for, and the requests of slots, learnt from events."""

    def __init__(self, state: CacheState | None = None) -> None:
        self.requests: dict[int, str] = {}
        """Slot to request."""
        self._slots: dict[int, int | None] = {}
        """Candidate to slot."""
        self._candidates: dict[int, int] = {}
        """Operation to candidate."""
        if state is not None:
            self._slots = {number: known.slot for number, known in state.candidates.items()}
            self._candidates = {number: copy.candidate for number, copy in state.operations.items()}

    def learn(self, events: list[Event]) -> None:
        """Take over the names in these events; the oldest names go when there are too many."""
        for event in events:
            if isinstance(event, SlotOpened | SlotCloned):
                self.requests[event.slot] = event.request
            elif isinstance(event, CandidatePlanned):
                self._slots[event.candidate] = event.slot
            elif isinstance(event, CandidatePromoted):
                self._candidates[event.operation] = event.candidate
        for known in (self.requests, self._slots, self._candidates):
            for number in list(islice(known, max(0, len(known) - NAMES_MAX))):
                del known[number]

    def slot_of(self, candidate: int | None, operation: int | None) -> int | None:
        """The slot of a candidate or an operation; None where it is not known, or where no slot owns the blocks."""
        if candidate is None and operation is not None:
            candidate = self._candidates.get(operation)
        return None if candidate is None else self._slots.get(candidate)
