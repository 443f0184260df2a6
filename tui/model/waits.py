"""The reasons why a slot waits, as sentences: the library's answer (``analysis.waits``) with the times of this console.

Law of this file: nothing is guessed, and a slot that works waits for nothing.
"""

from typing import Final

import msgspec

from kvbm_console.analysis import waits
from kvbm_console.analysis.lives import Transfer
from kvbm_console.analysis.waits import Standstill, pinned
from kvbm_console.core.holds import HoldFacts
from kvbm_console.core.ids import OnTimeout, SlotState, WaitPoint
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState

from .mirror import Mirror
from .numbers import spoken
from .series import percentile

UNSCHEDULED: Final = (SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.PREEMPTED)
"""States of requests that wait for the engine to schedule them."""
OVERDUE: Final = 4
"""A copy older than so many times the usual is no longer told to take about the usual."""


def ends(hold: HoldFacts) -> str:
    """The verb for the end of a hold whose time is over."""
    return "resumes" if hold.on_timeout is OnTimeout.CONTINUE else "skips its copies"


def sooner(state: CacheState, hold: HoldFacts) -> str:
    """The events that may end a hold before its time is over, as a clause; empty when there are none."""
    reasons = []
    if state.slots[hold.slot].device_blocks:
        reasons.append("others need its blocks")
    if hold.owner in state.leases:
        reasons.append("its console is gone")
    return f"sooner if {' or '.join(reasons)}" if reasons else ""


def waits_for(mirror: Mirror, slot: SlotFacts, mono_ns: int) -> str:
    """The thing that a slot waits for, in a few words; empty when the slot works."""
    state = mirror.state
    if state is None:
        return ""
    text = waits.waits_for(state, slot, mirror.ranks)
    if slot.hold is None and slot.state in UNSCHEDULED and not slot.outstanding and not slot.device_blocks:
        return _in_queue(mirror, state, slot, text)
    if slot.hold is None or not state.holds[slot.hold].parked:
        return text
    return f"{text}, {max(0, mirror.hold_left_ns(slot.hold, mono_ns) or 0) // 1_000_000_000} s left"


class Queue(msgspec.Struct, frozen=True):
    """The requests of one engine that wait to be scheduled, in order, and the engine's deadlock if it has one."""

    place: dict[int, int]
    """Slot to its place, from 1."""
    head: SlotFacts
    still: Standstill | None


def queue_of(mirror: Mirror, state: CacheState, source: int) -> Queue | None:
    """The queue of an engine; None when nothing waits. Worked out once for the facts of a moment."""
    at, known = mirror.queues
    if at != (id(state), state.seq):
        known = {}
        mirror.queues = (id(state), state.seq), known
    if source not in known:
        waiting = [
            slot for slot in state.slots.values()
            if slot.source == source and slot.state in UNSCHEDULED and not slot.device_blocks
        ]
        waiting.sort(key=lambda slot: (slot.state is not SlotState.PREEMPTED, slot.slot))  # as an engine puts them
        known[source] = None if not waiting else Queue(
            {slot.slot: number for number, slot in enumerate(waiting, 1)}, waiting[0],
            waits.standstill(state, source),
        )
    found: Queue | None = known[source]
    return found


def _in_queue(mirror: Mirror, state: CacheState, slot: SlotFacts, text: str) -> str:
    """The place in the queue and the head of the queue, whose blocks come first; a circle is named as it is."""
    queue = queue_of(mirror, state, slot.source)
    if queue is None or slot.slot not in queue.place:
        return text
    if queue.still is not None:
        return f"{text}; deadlock: {waits.circle(queue.still)}"
    place = queue.place[slot.slot]
    if place == 1:
        return text if len(queue.place) == 1 else f"{text}; first of {len(queue.place)} in the queue"
    head = waits.waits_for(state, queue.head, mirror.ranks)
    return f"place {place} in the queue; first {queue.head.request}, which waits for {head}"


def _open(mirror: Mirror, slot: SlotFacts) -> list[Transfer]:
    return [mirror.transfers[number] for number in sorted(slot.outstanding) if number in mirror.transfers]


def sentences(mirror: Mirror, slot: SlotFacts, mono_ns: int) -> list[str]:
    """Sentences with the request, the thing and the time that it waits for, then with the blocks that it pins. Empty
    when the slot works."""
    state = mirror.state
    text = waits_for(mirror, slot, mono_ns)
    if state is None or not text:
        return []
    now = mirror.now_ns(mono_ns)
    lines: list[str] = []
    transfers = _open(mirror, slot)
    about = ""
    if transfers:
        flow = mirror.flows.routes.get(transfers[0].route)
        usual = percentile(flow.latencies.window(now), 50) if flow is not None else None
        route = transfers[0].route.words
        kind = "operation" if transfers[0].operation is not None else "candidate"
        number = transfers[0].operation if transfers[0].operation is not None else transfers[0].candidate
        about = f"{kind} {number} on {route}"
        if usual is not None:
            spent = transfers[0].age(now)
            late = spent > OVERDUE * usual
            about = f"{kind} {number} for {spoken(spent)} on {route}, where most take {spoken(usual)}" if late else (
                f"{kind} {number}, about {spoken(usual)} on {route}")
    if slot.hold is not None:
        point = state.holds[slot.hold].point
        after = about or {WaitPoint.SCHEDULE: "the next iteration", WaitPoint.LOOKUP: "the engine's next lookup"}.get(
            point, "nothing else"
        )
        lines.append(f"you; then {after}")
    else:
        lines.append(about or text)
        if about:
            lines.append(text)
    pins = pinned(state, slot)
    if pins:
        lines.append(f"pins {' and '.join(f'{blocks} {tier}' for tier, blocks in pins)} blocks until then")
    return lines
