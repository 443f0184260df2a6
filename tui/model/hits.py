"""Hits on a tape: where a breakpoint took effect in the recorded run, and where those that are set now would have.

Law of this file: it keeps places and knows no rule of matching; that is the leader's, which is asked elsewhere.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final

from kvbm_console.core import events as ev
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState

if TYPE_CHECKING:
    from ..contracts import Tape

HITS_MAX: Final = 20_000
"""Hits kept of one tape; the rest is counted. A breakpoint that hits more often is not looked at one by one."""


class Tracker:
    """Which slot an event is about, as far as candidates and operations are known; begins with the facts of a place."""

    def __init__(self, state: CacheState | None) -> None:
        self._slots: dict[int, int | None] = {}
        self._candidates: dict[int, int] = {}
        if state is not None:
            self._slots = {number: known.slot for number, known in state.candidates.items()}
            self._candidates = {number: copy.candidate for number, copy in state.operations.items()}

    def slot(self, event: Event) -> int | None:
        """The slot that an event is about; events are given in their order."""
        if isinstance(event, ev.CandidatePlanned):
            self._slots[event.candidate] = event.slot
        elif isinstance(event, ev.CandidatePromoted):
            self._candidates[event.operation] = event.candidate
        slot = getattr(event, "slot", None)
        if isinstance(slot, int):
            return slot
        candidate = getattr(event, "candidate", None)
        if candidate is None:
            candidate = self._candidates.get(getattr(event, "operation", -1))
        return None if candidate is None else self._slots.get(candidate)


class Hits:
    """The hits on one tape, in order. ``complete`` when they are known for the present specifications."""

    def __init__(self) -> None:
        self.specs: list[BreakpointSpec] = []
        self.seqs: list[int] = []
        self.dropped = 0
        self.complete = False
        self.generation = 0
        """Grows whenever the specifications change: what was found for older ones is not taken."""

    def change(self, specs: list[BreakpointSpec]) -> None:
        """Look for others from now on."""
        self.specs = specs
        self.generation += 1
        self.seqs, self.dropped, self.complete = [], 0, False

    def take(self, seqs: Iterable[int]) -> None:
        """These are the hits; each place counts once."""
        found = sorted(set(seqs))
        self.seqs, self.dropped, self.complete = found[:HITS_MAX], max(0, len(found) - HITS_MAX), True

    def next(self, seq: int) -> int | None:
        """The first hit behind ``seq``."""
        index = bisect_right(self.seqs, seq)
        return self.seqs[index] if index < len(self.seqs) else None

    def previous(self, seq: int) -> int | None:
        """The last hit in front of ``seq``."""
        index = bisect_left(self.seqs, seq)
        return self.seqs[index - 1] if index else None


async def recorded_hits(tape: "Tape", breathe: Callable[[], Awaitable[None]]) -> list[int]:
    """Where breakpoints took effect in the run that was recorded."""
    found: list[int] = []
    for events in tape.events():
        found += [event.seq for event in events if type(event) is ev.BreakpointHit]
        await breathe()
    return found
