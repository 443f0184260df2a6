"""A slot moves from state to state, and leaves: it gives its blocks back, is finished, closed and forgotten.

Law of this file: a slot leaves the facts only when it owns nothing (I8).
"""

from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core.ids import FinishReason, ReleaseReason, Site, SlotState
from kvbm_console.core.instructions import ReleaseDeviceBlocks
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.holds import cancel_hold, park, strike
from kvbm_console.core.slots import SlotFacts

_SKIPPED: Final = (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE)
_MOVING: Final = (SlotState.PREFILLING, SlotState.DECODING)


def move(
    decider: Decider, slot: SlotFacts, new: SlotState, *, detail: int = 0, iteration: int | None = None,
    reason: FinishReason | None = None,
) -> None:
    """Move a slot, asking the gate before and after; the counts of the finish event are added here."""
    old, since_ns = slot.state, slot.since_ns
    # A slot that comes back after its own hold has left it out does not arrive anywhere: it was there before.
    back = decider.memory.returning.pop(slot.slot, False) and new in _MOVING
    if not back:
        strike(decider, Site.TRANSITION_WILL, slot, old, new, None, since_ns)
    now = decider.last_iteration(slot.source)
    first = skipped = None
    if new is SlotState.FINISHED:
        first = slot.first_iteration
        skipped = slot.skipped_iterations
        if old in _SKIPPED:
            skipped += now - slot.skipped_since + 1
    decider.emit(
        ev.SlotMoved, slot.slot, old, new, decider.entry, now if iteration is None else iteration,
        slot.computed_tokens(decider.state.iteration), decider.memory.evaluated.get(slot.slot, 0),
        decider.state.found_tokens(slot), len(slot.outstanding), detail, first, skipped, reason,
    )
    if old is SlotState.DECODING or new is SlotState.DECODING:
        decider.note_place(slot)
    if not back:
        strike(decider, Site.TRANSITION_DID, slot, old, new, None, since_ns)


def close_slot(decider: Decider, slot: SlotFacts) -> None:
    """A finishing slot whose last copy has ended gives its blocks back and leaves the facts, unless it is held.

    A hold of a copy passes to the release, where the slot stands still when no copy of it is left.
    """
    if slot.outstanding or slot.slot in decider.memory.delayed:
        return
    if slot.hold is not None:
        park(decider, slot)
        return
    decider.memory.ending.remove(slot.slot)
    places = list(slot.device_blocks)
    decider.release_device_blocks(slot, ReleaseReason.FINISHED)
    if places:
        decider.ask(ReleaseDeviceBlocks(slot.source, slot.request, decider.ids(places)))
    finish(decider, slot, slot.reason)


def finish(decider: Decider, slot: SlotFacts, reason: FinishReason | None) -> None:
    """The slot owns nothing any more: finished, closed, forgotten. A hold that is left ends as cancelled."""
    cancel_hold(decider, slot, "finished")
    move(decider, slot, SlotState.FINISHED, reason=reason)
    forget_slot(decider, slot)
    decider.emit(ev.SlotClosed, slot.slot)


def forget_slot(decider: Decider, slot: SlotFacts) -> None:
    """Memory of a slot that is closed. Its staged blocks and their deadline are gone already."""
    for table in (decider.memory.evaluated, decider.memory.place_limit, decider.memory.loads, decider.memory.lost_at):
        table.pop(slot.slot, None)
    memory = decider.memory
    if memory.stepping or memory.until or memory.until_site:
        wanted = [table.pop(slot.slot, None) for table in (memory.stepping, memory.until, memory.until_site)]
        if decider.gate is not None and wanted != [None, None, None]:
            decider.rearm()
    decider.memory.announced.pop(slot.slot, None)
    decider.memory.returning.pop(slot.slot, None)
    decider.memory.pressed.pop(slot.slot, None)
    decider.memory.prefetch.forget(slot.slot)
    if decider.config.prefetch_stop == "timeout":
        decider.clear_deadline("wait", slot.slot)
