"""Cause and effect: from an event to the one that led to it, and to the first one that it led to.

Events name the stimulus that they follow from, not the event; the links between events are the ids that they share. An
event follows from the one before it in the same stimulus that is about the same thing; else from the step before it in
the life of its hold, its candidate or its slot. A move of a slot follows from what opens that move, never from what
merely happened before it.

Law of this file: what lies before the events that are kept is not guessed: then there is no cause here.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvbm_console.core import events as ev
from kvbm_console.core.events import Event
from kvbm_console.core.ids import SlotState

from .wording import slot_of

if TYPE_CHECKING:
    from .mirror import Mirror

SCANNED_MAX: Final = 10_000
"""Events looked at for one step; half of what the log keeps."""
TRIED_MAX: Final = 64
"""Later events whose cause is asked for when an effect is looked for."""

Link = tuple[str, int]
_S = SlotState
_OPENS: Final[dict[SlotState, tuple[type[Event], ...]]] = {
    _S.ONBOARD_STAGED: (ev.BlocksStaged, ev.LookupAnswered),
    _S.ONBOARDING: (ev.DeviceBlocksAssigned, ev.CandidatePlanned),
    _S.PREFILLING: (ev.CandidateEnded, ev.HitsLost, ev.DeviceBlocksAssigned, ev.LookupAnswered),
}
"""The kinds of event that open a move into a state; other moves follow from the move before."""
_MOVES: Final = (ev.SlotMoved, ev.SlotOpened, ev.SlotCloned, ev.HoldReleased)


def links(event: Event, mirror: "Mirror") -> list[Link]:
    """What an event is about, the narrowest first."""
    found: list[Link] = []
    hold = getattr(event, "hold", None)
    if isinstance(hold, int):
        found.append(("hold", hold))
    candidate, operation = getattr(event, "candidate", None), getattr(event, "operation", None)
    transfer = mirror.transfer_of(candidate=candidate, operation=operation)
    if transfer is not None:
        found.append(("candidate", transfer.candidate))
    elif isinstance(candidate, int):
        found.append(("candidate", candidate))
    slot = slot_of(event, mirror)
    if slot is not None:
        found.append(("slot", slot))
    else:
        found += [("slot", number) for number in getattr(event, "slots", ())]
    return found


def cause_of(event: Event, mirror: "Mirror") -> Event | None:
    """The event that led to this one; None when it is not kept, or when a stimulus from outside did."""
    mine = links(event, mirror)
    wanted = set(mine)
    for before in _before(event, mirror.log):
        if before.cause != event.cause:
            break
        if wanted & set(links(before, mirror)):
            return before
    if type(event) is ev.SlotMoved:
        return _opener(event, mirror)
    for link in mine:
        for before in _before(event, mirror.log):
            if link in links(before, mirror):
                return before
    return None


def _opener(event: ev.SlotMoved, mirror: "Mirror") -> Event | None:
    """What opened a move: the last of its kinds since the move before, else that move."""
    kinds = _OPENS.get(event.new, ())
    for before in _before(event, mirror.log):
        if type(before) not in _MOVES and type(before) not in kinds:
            continue
        if slot_of(before, mirror) == event.slot:
            return before
    return None


def effect_of(event: Event, mirror: "Mirror") -> Event | None:
    """The first event that this one led to; None when there is none yet."""
    wanted = set(links(event, mirror))
    if not wanted:
        return None
    tried = 0
    for after in _after(event, mirror.log):
        if not wanted & set(links(after, mirror)):
            continue
        if cause_of(after, mirror) is event:
            return after
        tried += 1
        if tried >= TRIED_MAX:
            return None
    return None


def _before(event: Event, log: "deque[Event]") -> Iterator[Event]:
    """Events before this one, newest first."""
    skip = log[-1].seq - event.seq + 1 if log else 0
    start = max(0, skip) if log and log[-1].seq - log[0].seq + 1 == len(log) else 0  # no gap: the place is known
    for before in islice(reversed(log), start, start + SCANNED_MAX):
        if before.seq < event.seq:
            yield before


def _after(event: Event, log: "deque[Event]") -> Iterator[Event]:
    """Events after this one, oldest first."""
    if not log:
        return
    start = max(0, event.seq - log[0].seq + 1) if log[-1].seq - log[0].seq + 1 == len(log) else 0
    for after in islice(log, start, start + SCANNED_MAX):
        if after.seq > event.seq:
            yield after
