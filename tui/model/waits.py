"""What a slot waits for: one thing, named.

Law of this file: the answer is read from facts; what cannot be known is not guessed, and a slot that works waits for
nothing.
"""

from typing import Final

from kvbm_console.analysis.waits import Standstill, blocks_text, free_blocks, standstill
from kvbm_console.core.holds import HoldFacts
from kvbm_console.core.ids import OnTimeout, SlotState, Tier, WaitPoint
from kvbm_console.core.slots import OperationFacts, SlotFacts
from kvbm_console.core.state import CacheState

from .lives import Transfer
from .mirror import Mirror
from .numbers import spoken
from .series import percentile

_S = SlotState
OVERDUE: Final = 4
"""A copy older than so many times the usual is no longer told to take about the usual."""


def silent_ranks(mirror: Mirror, copy: OperationFacts) -> list[int]:
    """Ranks that have not reported a started copy although another has."""
    if not copy.started or not copy.reported:
        return []
    return [rank for rank in range(mirror.ranks) if rank not in copy.reported]


def ranks_text(ranks: list[int]) -> str:
    """``rank 1`` or ``ranks 1, 3``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks[:4]))


def transfer_wait(mirror: Mirror, transfer: Transfer) -> str:
    """What an open transfer of a slot waits for."""
    state = mirror.state
    route = transfer.route.label.replace(">", "→")
    if transfer.operation is None or state is None or transfer.operation not in state.operations:
        return f"evaluation on {route}"
    copy = state.operations[transfer.operation]
    silent = silent_ranks(mirror, copy)
    if silent:
        return f"op {transfer.operation} silent on {ranks_text(silent)}"
    return f"op {transfer.operation} on {route}" if copy.started else f"op {transfer.operation} queued on {route}"


def breakpoints_text(breakpoints: tuple[int, ...]) -> str:
    """``breakpoint 2`` or ``breakpoints 2, 3``."""
    if not breakpoints:
        return "a step"
    return f"breakpoint{'s' if len(breakpoints) > 1 else ''} " + ", ".join(map(str, breakpoints))


def ends(hold: HoldFacts) -> str:
    """What follows by itself when its time is over."""
    return "resumes" if hold.on_timeout is OnTimeout.CONTINUE else "skips its copies"


def sooner(state: CacheState, hold: HoldFacts) -> str:
    """What may end a hold before its time is over, as a clause; empty when nothing of itself does."""
    reasons = []
    if state.slots[hold.slot].device_blocks:
        reasons.append("others need its blocks")
    if hold.owner in state.leases:
        reasons.append("its console is gone")
    return f"sooner if {' or '.join(reasons)}" if reasons else ""


def _open(mirror: Mirror, slot: SlotFacts) -> list[Transfer]:
    return [mirror.transfers[number] for number in sorted(slot.outstanding) if number in mirror.transfers]


def waits_for(mirror: Mirror, slot: SlotFacts, mono_ns: int) -> str:
    """A few words; empty when the slot works."""
    state = mirror.state
    if state is None:
        return ""
    if slot.hold is not None:
        hold = state.holds[slot.hold]
        if not hold.parked:
            return f"{breakpoints_text(hold.breakpoints)}, stops at {hold.point.label}"
        left = mirror.hold_left_ns(slot.hold, mono_ns) or 0
        return f"{breakpoints_text(hold.breakpoints)}, {max(0, left) // 1_000_000_000} s left"
    match slot.state:
        case _S.PREFILLING | _S.DECODING | _S.FINISHED:
            return ""
        case _S.SKIPPED_PREFILL:
            return "token budget"
        case _S.SKIPPED_DECODE:
            return "next iteration"
        case _S.FINISHING | _S.ONBOARDING:
            return _waits_for_copies(mirror, slot)
        case _S.ONBOARD_STAGED | _S.PREEMPTED | _S.INITIALIZED:
            return _waits_for_blocks(mirror, state, slot)


def _waits_for_copies(mirror: Mirror, slot: SlotFacts) -> str:
    transfers = _open(mirror, slot)
    if not transfers and slot.state is _S.ONBOARDING and mirror.state is not None:
        still = standstill(mirror.state, slot.source)
        if still is not None:
            return _in_deadlock(still, slot)
    if not transfers:
        return "next iteration" if slot.state is _S.ONBOARDING else "release of its blocks"
    if len(transfers) > 1 and all(transfer.operation is not None for transfer in transfers):
        names = " ".join(str(transfer.operation) for transfer in transfers[:2])
        more = f" +{len(transfers) - 2}" if len(transfers) > 2 else ""
        return f"ops {names}{more} on {transfers[0].route.label.replace('>', '→')}"
    return transfer_wait(mirror, transfers[0])


def _waits_for_blocks(mirror: Mirror, state: CacheState, slot: SlotFacts) -> str:
    if slot.state is _S.PREEMPTED and slot.outstanding:
        transfers = _open(mirror, slot)
        if transfers:
            return transfer_wait(mirror, transfers[0]) + " to end"
    still = standstill(state, slot.source)
    if still is not None:
        return _in_deadlock(still, slot)
    blocks = free_blocks(state, slot)
    if blocks is not None and blocks[0] > blocks[1]:
        return blocks_text(*blocks)
    if slot.state is _S.ONBOARD_STAGED:
        return "device blocks"
    return "first scheduling" if slot.state is _S.INITIALIZED else "next scheduling"


def _in_deadlock(still: Standstill, slot: SlotFacts) -> str:
    """The place of a slot among requests of which none can go on."""
    if slot is still.head:
        return blocks_text(still.wanted, still.free)
    return f"{still.head.request}, which wants {blocks_text(still.wanted, still.free)}"


def sentences(mirror: Mirror, slot: SlotFacts, mono_ns: int) -> list[str]:
    """Who, then what, then how long; then what it keeps from others. Empty when the slot works."""
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
        usual = percentile(flow.latencies.window(now), 0.5) if flow is not None else None
        route = transfers[0].route.label.replace(">", "→")
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
    pins = pinned(mirror, slot)
    if pins:
        lines.append(f"pins {' and '.join(f'{blocks} {tier}' for tier, blocks in pins)} blocks until then")
    return lines


def pinned(mirror: Mirror, slot: SlotFacts) -> list[tuple[str, int]]:
    """(tier, blocks) that the slot keeps others from using: its staging and device blocks."""
    state = mirror.state
    if state is None:
        return []
    places: dict[Tier, set[tuple[int, int]]] = {}
    for index, ids in slot.staged:
        places.setdefault(state.pools[index].info.tier, set()).update((index, block) for block in ids)
    for number in slot.outstanding:
        candidate = state.candidates.get(number)
        if candidate is not None and candidate.operation is not None:
            copy = state.operations[candidate.operation]
            for index, ids in ((copy.source_pool, copy.sources), (copy.target_pool, copy.targets)):
                places.setdefault(state.pools[index].info.tier, set()).update((index, block) for block in ids)
    if slot.device_pool is not None:
        places.setdefault(Tier.G1, set()).update((slot.device_pool, block) for block in slot.device_blocks)
    return [(tier.name, len(blocks)) for tier, blocks in sorted(places.items(), reverse=True) if blocks]
