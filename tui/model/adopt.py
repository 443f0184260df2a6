"""Lives and transfers brought in line with a snapshot: what went on while no events were seen.

Law of this file: only what the facts say is taken. How something ended unseen is not known and is told so, and between
the last event that was seen and the first thing that the facts know of, there is nothing.
"""

from typing import TYPE_CHECKING

from kvbm_console.core.ids import SlotState
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState

from .lives import Life, Move, Stay, Transfer

if TYPE_CHECKING:
    from .mirror import Mirror


def adopt(mirror: "Mirror", state: CacheState, seen_ns: int, mono_ns: int) -> None:
    """Take over facts; history is known up to ``seen_ns``."""
    for number in [number for number in mirror.lives if number not in state.slots]:
        life = mirror.lives.pop(number)
        life.close(seen_ns, lost=True)
        mirror.archive.bury(life)
    for number, slot in state.slots.items():
        life = mirror.lives.get(number) or Life(number, slot.request, slot.opened_ns)
        mirror.lives[number] = life
        _stand(life, slot, state, seen_ns)
    _transfers(mirror, state, seen_ns)
    mirror.decoding = sum(slot.state is SlotState.DECODING for slot in state.slots.values())
    mirror.hold_mono = {
        number: mirror.hold_mono.get(number, mono_ns - max(0, state.at_ns - hold.since_ns))
        for number, hold in state.holds.items()
    }
    if state.frozen is None:
        mirror.frozen_mono = None
    elif mirror.frozen_mono is None:
        mirror.frozen_mono = mono_ns - max(0, state.at_ns - state.frozen.since_ns)


def _stand(life: Life, slot: SlotFacts, state: CacheState, seen_ns: int) -> None:
    """One life as it stands now."""
    if not life.moves or life.state is not slot.state or slot.since_ns > life.moves[-1].start_ns:
        unseen = seen_ns if life.moves and slot.since_ns > seen_ns else None
        life.add(Move(slot.since_ns, slot.state, None, unseen_ns=unseen))
    hold = state.holds.get(slot.hold) if slot.hold is not None else None
    current = life.held_now()
    if current is not None and (hold is None or current.hold != hold.hold):
        current.end_ns = seen_ns
    if hold is not None and (current is None or current.hold != hold.hold):
        life.stays.append(Stay(hold.hold, hold.since_ns, hold.point, hold.breakpoints))


def _transfers(mirror: "Mirror", state: CacheState, seen_ns: int) -> None:
    """The open candidates; those that are gone ended unseen."""
    for number in [number for number in mirror.transfers if number not in state.candidates]:
        gone = mirror.transfers.pop(number)
        gone.lost, gone.ended_ns = True, max(seen_ns, gone.planned_ns)
        owner = mirror.lives.get(gone.slot) if gone.slot is not None else None
        if owner is not None:
            owner.changes += 1
    for number, facts in state.candidates.items():
        known = mirror.transfers.get(number)
        if known is None:
            slot = state.slots.get(facts.slot) if facts.slot is not None else None
            known = Transfer(number, facts.slot, slot.request if slot else "", facts.route, len(facts.hashes),
                             facts.planned_ns)
            mirror.transfers[number] = known
            if facts.slot in mirror.lives:
                mirror.lives[facts.slot].transfers.append(known)
        known.status, known.operation, known.found = facts.status, facts.operation, facts.found
        known.enqueued_ns, known.evaluated_ns = facts.enqueued_ns, facts.evaluated_ns
        known.promoted_ns, known.started_ns = facts.promoted_ns, facts.started_ns
    mirror.by_operation = {}
    for operation, copy in state.operations.items():
        known = mirror.transfers[copy.candidate]
        known.blocks = copy.blocks
        known.ranks = set(copy.reported)
        mirror.ranks = max(mirror.ranks, len(known.ranks), *(rank + 1 for rank in known.ranks), 1)
        mirror.by_operation[operation] = known
