"""How a slot leaves: it gives its blocks back, is finished, closed, and forgotten.

Law of this file: a slot leaves the facts only when it owns nothing (I8).
"""

from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_ids
from kvbm_console.core.ids import FinishReason, ReleaseReason, SlotState
from kvbm_console.core.instructions import ReleaseDeviceBlocks
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.holds import cancel_hold
from kvbm_console.core.slots import SlotFacts


def close_slot(leader: Decider, slot: SlotFacts) -> None:
    """A finishing slot whose last copy has ended gives its blocks back and leaves the facts, unless it is held.

    A hold of a copy passes to the release, where the slot stands still when no copy of it is left.
    """
    if slot.outstanding:
        return
    if slot.hold is not None:
        leader.park(slot)
        return
    leader.aids.ending.remove(slot.slot)
    places = list(slot.device_blocks)
    leader.release_device_blocks(slot, ReleaseReason.FINISHED)
    if places:
        leader.ask(ReleaseDeviceBlocks(slot.source, slot.request, pack_ids(places)))
    finish(leader, slot, slot.reason)


def finish(leader: Decider, slot: SlotFacts, reason: FinishReason | None) -> None:
    """The slot owns nothing any more: finished, closed, forgotten. A hold that is left ends as cancelled."""
    cancel_hold(leader, slot, "finished")
    leader.move(slot, SlotState.FINISHED, reason=reason)
    forget_slot(leader, slot)
    leader.emit(ev.SlotClosed, slot.slot)


def forget_slot(leader: Decider, slot: SlotFacts) -> None:
    """Aids of a slot that is closed. What was staged for it is gone, and so is the deadline of that."""
    for memory in (leader.aids.evaluated, leader.aids.place_limit, leader.aids.loads, leader.aids.lost_at):
        memory.pop(slot.slot, None)
    aids = leader.aids
    if aids.stepping or aids.until or aids.until_site:
        wanted = [memory.pop(slot.slot, None) for memory in (aids.stepping, aids.until, aids.until_site)]
        if leader.gate is not None and wanted != [None, None, None]:
            leader.rearm()
    gate = leader.awake
    if gate is not None and not gate.everybody:
        gate.lose(slot.slot)
        leader.wake()
    leader.aids.announced.pop(slot.slot, None)
    leader.aids.returning.pop(slot.slot, None)
    leader.aids.pressed.pop(slot.slot, None)
    leader.aids.prefetch.forget(slot.slot)
    if leader.config.prefetch_stop == "timeout":
        leader.clear_deadline("wait", slot.slot)
