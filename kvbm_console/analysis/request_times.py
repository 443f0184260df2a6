"""Arrival and first token of each live request.

No event tells the end of an iteration. An engine samples the first token at the end of the iteration that computes the
prompt to its end. The next iteration begins there, and moves the request to decoding or out of the iteration:

    SlotMoved 7 prefilling
    IterationAdvanced 7 at 512     its prompt has 512 tokens
    SlotMoved 7 preempted          the first token came here, and the request decodes much later

A request of several sequences arrives once, and its clones are opened when its prompt is computed. Each clone counts as
a request that arrived with the first sequence, and has the first token that came before the clone was opened.

Law of this file: a first token that may have come unseen is not told.
"""

from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.ids import SlotState
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState

_BEFORE_DECODING: Final = frozenset(
    {SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, SlotState.PREFILLING}
)


class LiveTimes(msgspec.Struct):
    """Times of a request, in nanoseconds of the engine."""

    arrived_ns: int
    """Of a clone the arrival of its first sequence; if that is not known, the time at which the clone was opened."""
    prompt_tokens: int
    seen: bool
    """True if the arrival is in the evidence."""
    waits: bool
    """True if the first token has certainly not come."""
    first_token_ns: int | None = None

    def moved(self, e: ev.SlotMoved) -> bool:
        """True if the first token came right before this move of the slot."""
        if not self.waits or not first_token_came(e, self.prompt_tokens):
            return False
        self.waits, self.first_token_ns = False, e.at_ns
        return True

    def resumed(self, slot: SlotFacts, iteration: int) -> None:
        """Earlier moves were not seen; these are the facts of the slot."""
        self.waits = self.waits and _waits(slot, iteration)


def arrived(e: ev.SlotOpened) -> LiveTimes:
    """The times of a request that arrives."""
    return LiveTimes(e.at_ns, e.prompt_tokens, seen=True, waits=True)


def cloned(e: ev.SlotCloned, parent: LiveTimes | None) -> LiveTimes:
    """The times of a clone; without those of its parent neither arrival nor first token are known."""
    return unseen(e.at_ns) if parent is None else msgspec.structs.replace(parent)


def unseen(opened_ns: int) -> LiveTimes:
    """The times of a slot about which no more is known."""
    return LiveTimes(opened_ns, 0, seen=False, waits=False)


def found(slot: SlotFacts, parent: LiveTimes | None) -> LiveTimes:
    """The times of a slot that is there when the evidence begins; ``parent`` are those of its parent, if that lives."""
    arrived_ns = slot.opened_ns if parent is None else parent.arrived_ns
    return LiveTimes(arrived_ns, slot.prompt_tokens, seen=False, waits=True)


def first_token_came(e: ev.SlotMoved, prompt_tokens: int) -> bool:
    """True if the iteration before this move sampled the first token of a slot that waited for it."""
    return e.old is SlotState.PREFILLING and (e.new is SlotState.DECODING or e.computed_tokens >= prompt_tokens)


def _waits(slot: SlotFacts, iteration: int) -> bool:
    """True if the first token has certainly not come. Preempted slots may have had it before."""
    if slot.state is SlotState.SKIPPED_PREFILL:
        return not slot.preemptions and slot.computed_tokens(iteration) < slot.prompt_tokens
    return not slot.preemptions and slot.state in _BEFORE_DECODING


class RequestTimes:
    """The times of live requests. ``of`` maps a slot to them; each method takes what happened to the slot."""

    def __init__(self) -> None:
        self.of: dict[int, LiveTimes] = {}

    def resumed(self, state: CacheState) -> None:
        """The evidence begins, or goes on behind a gap."""
        known, self.of = self.of, {}
        for slot in state.slots.values():  # a parent stands before its clones
            parent = None if slot.parent is None else self.of.get(slot.parent)
            times = self.of[slot.slot] = known.get(slot.slot) or found(slot, parent)
            times.resumed(slot, state.iteration)

    def opened(self, e: ev.SlotOpened | ev.SlotCloned) -> LiveTimes:
        """A request arrived, or was cloned; its times."""
        times = self.of[e.slot] = arrived(e) if isinstance(e, ev.SlotOpened) else cloned(e, self.of[e.parent])
        return times

    def moved(self, e: ev.SlotMoved) -> bool:
        """True if the first token of the slot came right before this move."""
        return self.of[e.slot].moved(e)

    def closed(self, e: ev.SlotClosed) -> LiveTimes:
        """A request is gone; its times."""
        return self.of.pop(e.slot)
