"""Events in words: whom an event concerns, and what it says beside its kind.

Law of this file: the phrases are the core's; only where this console knows more than the facts (what a transfer was,
after it ended) it says more.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import HASH_BYTES
from kvbm_console.core.describe import describe as core_describe
from kvbm_console.core.ids import CandidateStatus, Route, SlotState
from kvbm_console.core.stimuli import ENTRY_NAMES

from .numbers import count, duration, plural

if TYPE_CHECKING:
    from .mirror import Mirror


def concerns(event: ev.Event, mirror: "Mirror") -> str:
    """The request that the event is about; empty when it is about none or several."""
    slot = slot_of(event, mirror)
    if slot is None:
        return ""
    life = mirror.life_in(slot)
    return life.request if life is not None else mirror.trail.names.get(slot, f"slot {slot}")


def slot_of(event: ev.Event, mirror: "Mirror") -> int | None:
    """The slot that the event is about."""
    slot = getattr(event, "slot", None)
    if isinstance(slot, int):
        return slot
    if isinstance(event, ev.DeviceBlocksAssigned):
        return event.slots[0] if len(event.slots) == 1 else None
    if isinstance(event, ev.BlocksEvicted):
        return event.for_slot
    candidate = getattr(event, "candidate", None)
    if candidate is not None:
        transfer = mirror.transfer_of(candidate=candidate)
        return transfer.slot if transfer is not None else mirror.trail.slot_of(candidate, None)
    operation = getattr(event, "operation", None)
    if operation is not None:
        transfer = mirror.transfer_of(operation=operation)
        return transfer.slot if transfer is not None else mirror.trail.slot_of(None, operation)
    return None


def nameless(event: ev.Event, mirror: "Mirror") -> bool:
    """Whether the event is about a slot or a copy of which it is not known whose it is."""
    several: tuple[int, ...] | None = getattr(event, "slots", None)
    if several is not None:
        return any(mirror.life_in(slot) is None and slot not in mirror.trail.names for slot in several)
    slot = slot_of(event, mirror)
    if slot is None:
        return getattr(event, "candidate", getattr(event, "operation", None)) is not None
    return mirror.life_in(slot) is None and slot not in mirror.trail.names


def describe(event: ev.Event, mirror: "Mirror") -> str:
    """The phrase beside the kind."""
    phrase = PHRASES.get(type(event))
    return phrase(event, mirror) if phrase is not None else core_describe(event, mirror.state)


def entry_name(entry: int) -> str:
    """The entry point that a move came from."""
    return ENTRY_NAMES.get(entry, f"entry {entry}")


def _route(route: Route) -> str:
    return f"{'↑' if route.is_load else '↓'} {route.source.name}→{route.target.name}"


def _opened(e: ev.SlotOpened, mirror: "Mirror") -> str:
    return f"{count(e.prompt_tokens)} tokens, {plural(len(e.hashes) // HASH_BYTES, 'full block')}"


def _moved(e: ev.SlotMoved, mirror: "Mirror") -> str:
    text = f"{e.old.label} → {e.new.label}"
    if e.detail:
        text += f", {count(e.detail)} tokens"
    if e.reason is not None and e.new in (SlotState.FINISHING, SlotState.FINISHED):
        text += f", {e.reason.label}"
    return text


def _ended(e: ev.CandidateEnded, mirror: "Mirror") -> str:
    transfer = mirror.transfer_of(candidate=e.candidate)
    if transfer is None:
        return core_describe(e, mirror.state)
    took = duration(transfer.age(e.at_ns))
    what = f"op {transfer.label} {_route(transfer.route)}, {plural(transfer.blocks, 'block')}"
    return f"{what}, {took}" if e.status is CandidateStatus.COMPLETED else f"{what}, {e.status.label}, {took}"


def _skipped(e: ev.CandidateSkipped, mirror: "Mirror") -> str:
    transfer = mirror.transfer_of(candidate=e.candidate)
    if transfer is None:
        return core_describe(e, mirror.state)
    return f"{e.reason.label}, {_route(transfer.route)}, {plural(transfer.blocks, 'block')}"


def _started(e: ev.OperationStarted, mirror: "Mirror") -> str:
    transfer = mirror.transfer_of(operation=e.operation)
    if transfer is None:
        return core_describe(e, mirror.state)
    return f"op {e.operation} {_route(transfer.route)}, {plural(transfer.blocks, 'block')}"


PHRASES: Final[dict[type[ev.Event], Callable[[Any, "Mirror"], str]]] = {
    ev.SlotOpened: _opened,
    ev.SlotMoved: _moved,
    ev.CandidateEnded: _ended,
    ev.CandidateSkipped: _skipped,
    ev.OperationStarted: _started,
}
"""Kinds that this console tells differently."""
