"""The thing that a slot waits for, and the deadlock of an engine, both read from facts.

A slot waits for the first of these that there is: a hold, its open copies, a seat, device blocks, the engine's
schedule. An engine has as many seats as requests it runs at once, which a tap tells. So ``waits_for`` gives one noun
phrase, which the console's lists and the findings of ``doctor`` quote.

A request that waits for device blocks waits for the requests that hold them. A computing request or a running copy ends
by itself. Without either, only the free blocks are left, so an engine whose first request wants more than these stands
still for ever. For example, of 16 blocks a loaded request ``b`` holds 9, and ``a`` in front of it wants 13. Then ``a``
waits for blocks that ``b`` holds, and ``b`` waits behind ``a``.

Law of this file: nothing is guessed, and a slot that a person holds is no part of a deadlock.
"""

from typing import Final

import msgspec

from kvbm_console.core.ids import Authority, Condition, Measure, Route, SlotState, Tier
from kvbm_console.core.slots import CandidateFacts, OperationFacts, SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

_S = SlotState
WORKING: Final = (_S.PREFILLING, _S.DECODING, _S.SKIPPED_PREFILL, _S.SKIPPED_DECODE)
"""States of requests that the engine runs."""
QUEUED: Final = (_S.INITIALIZED, _S.ONBOARD_STAGED, _S.ONBOARDING, _S.PREEMPTED)
NAMES_TOLD: Final = 2
"""Requests named in a sentence; further requests are counted."""


class Standstill(msgspec.Struct, frozen=True):
    """A deadlock of one engine: ``waiting[0]`` wants more device blocks than are free, and the others wait behind."""

    source: int
    waiting: tuple[SlotFacts, ...]
    wanted: int
    free: int
    capacity: int

    @property
    def head(self) -> SlotFacts:
        """The first of the queue."""
        return self.waiting[0]


def available(pool: PoolFacts) -> int:
    """Places that can be given out: the empty and the cached places."""
    return pool.counts[Condition.EMPTY] + pool.counts[Condition.CACHED]


def below(state: CacheState, pool: PoolFacts) -> PoolFacts | None:
    """The pool that ``pool`` is copied down to; None where the leader copies nothing out of ``pool``."""
    if pool.info.authority not in (Authority.ENGINE, Authority.LEADER):
        return None
    lower = (
        each for each in state.pools if each.info.authority is Authority.LEADER and each.info.tier > pool.info.tier
        and serves(state, each, pool.info.source)
    )
    return min(lower, key=lambda each: each.info.tier, default=None)


def serves(state: CacheState, pool: PoolFacts, source: int) -> bool:
    """True if the engine ``source`` may find blocks in ``pool``: in its own pools, and in those of its daemon's leader
    and streams, which are no other engine's alone."""
    info = pool.info
    return info.source == source or (
        info.authority in (Authority.LEADER, Authority.STREAM) and (info.source - source) % daemons(state, source) == 0
    )


def daemons(state: CacheState, source: int = 0) -> int:
    """How many daemons' facts stand here side by side: 1, but more in a merged recording. An engine whose pools are
    not known yet counts as the first of its daemon.

    A merge numbers engines, candidates and operations of its daemons in turns, so that the rest of a number tells the
    daemon. The leader's own tiers go to the daemon's first engine. First engines are numbered from 1 on, and the others
    with a gap in front (``MergedSource``).
    """
    last = 0
    for pool in state.pools:
        if pool.info.authority is Authority.LEADER:
            if not pool.info.source:
                return 1
            last = max(last, pool.info.source)
    if not last:
        return 1
    sources = {pool.info.source for pool in state.pools}
    while last + 1 in sources:
        last += 1
    return last if source in sources else max(last, source)


def daemon_of(state: CacheState, pool: int) -> int:
    """Which of the ``daemons`` a pool belongs to, from 0 on."""
    return (state.pools[pool].info.source - 1) % daemons(state)


def daemon_of_slot(state: CacheState, slot: SlotFacts) -> int:
    """Which of the ``daemons`` a slot belongs to, from 0 on."""
    return (slot.source - 1) % daemons(state)


def daemon_of_copy(state: CacheState, candidate: CandidateFacts) -> int:
    """Which of the ``daemons`` a candidate belongs to, from 0 on."""
    # The pool first: while the last of three daemons has not begun, fewer are known, and a number divides otherwise.
    if candidate.operation is not None:
        return daemon_of(state, state.operations[candidate.operation].source_pool)
    slot = None if candidate.slot is None else state.slots.get(candidate.slot)
    return candidate.candidate % daemons(state) if slot is None else daemon_of_slot(state, slot)


Way = tuple[Route, int]
"""A route of one of the ``daemons``."""


def way_of(state: CacheState, candidate: CandidateFacts) -> Way:
    """The route of a candidate, with its daemon."""
    return candidate.route, daemon_of_copy(state, candidate)


def free_blocks(state: CacheState, slot: SlotFacts) -> tuple[int, int] | None:
    """(device blocks wanted for the rest of the prompt, device blocks available); None when the pool is not known."""
    pool = state.pool_of(Tier.G1, slot.source)
    if pool is None or pool.info.capacity_blocks is None:
        return None
    wanted = -(-slot.prompt_tokens // pool.info.block_tokens) - max(slot.local_blocks, slot.end_block)
    return max(0, wanted), available(pool)


def blocks_text(wanted: int, free: int) -> str:
    """``13 G1 blocks, 4 free``."""
    return f"{wanted:,} G1 block{'' if wanted == 1 else 's'}, {free:,} free"


def breakpoints_text(breakpoints: tuple[int, ...]) -> str:
    """``breakpoint 2`` or ``breakpoints 2, 3``."""
    if not breakpoints:
        return "a step"
    return f"breakpoint{'s' if len(breakpoints) > 1 else ''} " + ", ".join(map(str, breakpoints))


def ranks_text(ranks: list[int]) -> str:
    """``rank 1`` or ``ranks 1, 3``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks[:4]))


def silent_ranks(copy: OperationFacts, ranks: int = 0) -> list[int]:
    """Ranks that have not reported a copy although another has. Without ``ranks``, the number of all ranks, an open
    copy that all known ranks have reported waits for the next rank."""
    if not copy.reported:
        return []
    known = max(copy.reported) + 1
    silent = [rank for rank in range(max(ranks, known)) if rank not in copy.reported]
    return silent or ([] if ranks else [known])


def waits_for(state: CacheState, slot: SlotFacts, ranks: int = 0) -> str:
    """The thing that the slot waits for, as a noun phrase; empty when it works. ``ranks`` as in ``silent_ranks``."""
    if slot.hold is not None:
        hold = state.holds[slot.hold]
        return breakpoints_text(hold.breakpoints) + ("" if hold.parked else f", stops at {hold.point.label}")
    match slot.state:
        case _S.PREFILLING | _S.DECODING | _S.FINISHED:
            return ""
        case _S.SKIPPED_PREFILL:
            return "token budget"
        case _S.SKIPPED_DECODE:
            return "next iteration"
    copies = [state.candidates[number] for number in sorted(slot.outstanding)]
    if copies and slot.state in (_S.FINISHING, _S.ONBOARDING, _S.PREEMPTED):
        more = f" and {len(copies) - 1:,} more" if len(copies) > 1 else ""
        return copy_text(state, copies[0], ranks) + more
    if slot.state is _S.FINISHING:
        return "release of its blocks"
    still = standstill(state, slot.source)
    if still is not None:
        blocks = blocks_text(still.wanted, still.free)
        return blocks if slot is still.head else f"{still.head.request}, which wants {blocks}"
    seats = _full_seats(state, slot.source)
    if seats is not None:
        return f"a seat, all {seats:,} are taken"
    if slot.state is _S.ONBOARDING:
        return "next iteration"
    wanted = free_blocks(state, slot)
    if wanted is not None and wanted[0] > wanted[1]:
        return blocks_text(*wanted)
    if slot.state is _S.ONBOARD_STAGED:
        return "device blocks"
    return "first scheduling" if slot.state is _S.INITIALIZED else "next scheduling"


def _full_seats(state: CacheState, source: int) -> int | None:
    """The requests that an engine runs at once, if it runs so many now; None if it does not, or nobody told."""
    known = state.measured.get(source)
    most = None if known is None else known.values.get(Measure.RUNNING_MOST)
    if most is None:
        return None
    running = sum(slot.source == source and slot.state in WORKING for slot in state.slots.values())
    return most if running >= most else None


def copy_text(state: CacheState, candidate: CandidateFacts, ranks: int = 0) -> str:
    """The open copy of a candidate, with the step that comes next."""
    route = candidate.route.words
    copy = state.operations.get(-1 if candidate.operation is None else candidate.operation)
    if copy is None:
        return f"candidate {candidate.candidate} on {route}, not promoted"
    silent = silent_ranks(copy, ranks)
    if silent:
        return f"op {copy.operation} silent on {ranks_text(silent)}"
    return f"op {copy.operation} on {route}" if copy.started else f"op {copy.operation} queued on {route}"


def pinned(state: CacheState, slot: SlotFacts) -> list[tuple[str, int]]:
    """(tier, blocks) that the slot keeps from others: its staging, its copies at both ends, its device blocks."""
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


def standstill(state: CacheState, source: int) -> Standstill | None:
    """The deadlock of this engine; None while a request can go on, or a person or a lost report may be the cause."""
    waiting: list[SlotFacts] = []
    for slot in state.slots.values():
        if slot.source != source:
            continue
        if slot.state in WORKING or slot.hold is not None:
            return None
        if slot.state in QUEUED:
            waiting.append(slot)
    stopped = state.frozen is not None or state.pipeline_closed or state.all_held or state.engines_paused
    if not waiting or stopped or source in state.lost_sources or _copies_run(state, source):
        return None
    # An engine puts preempted requests in front of those that never ran.
    waiting.sort(key=lambda slot: (slot.state is not _S.PREEMPTED, slot.slot))
    head = waiting[0]
    blocks, pool = free_blocks(state, head), state.pool_of(Tier.G1, source)
    if blocks is None or pool is None:
        return None
    wanted, free = blocks
    free -= _own_prefix(pool, head)
    if wanted <= free:
        return None
    return Standstill(source, tuple(waiting), wanted, free, pool.capacity)


def _copies_run(state: CacheState, source: int) -> bool:
    """True if the end of a copy may give blocks back to this engine."""
    for operation in state.operations.values():
        slot = state.candidates[operation.candidate].slot
        pools = (state.pools[operation.source_pool], state.pools[operation.target_pool])
        if any(pool.info.source == source for pool in pools) or (
            slot is not None and slot in state.slots and state.slots[slot].source == source
        ):
            return True
    return False


def _own_prefix(pool: PoolFacts, slot: SlotFacts) -> int:
    """Cached blocks that hold the slot's own prefix. The slot would use them, so they are not free for the slot."""
    if slot.device_blocks:
        return 0
    found = (pool.ready_place(key) for key in slot.hashes[: slot.local_blocks])
    return sum(place is not None and not pool.refs[place] for place in found)


def circle(still: Standstill) -> str:
    """The wait-for graph in one sentence."""
    head, rest = still.head, still.waiting[1:]
    if still.wanted > still.capacity:
        text = f"{head.request} wants {still.wanted:,} G1 blocks, the tier has {still.capacity:,}"
    else:
        text = f"{head.request} wants {blocks_text(still.wanted, still.free)}"
    holders = sorted((slot for slot in rest if slot.device_blocks), key=lambda slot: -len(slot.device_blocks))
    behind = [f"{slot.request} (holds {len(slot.device_blocks):,})" for slot in holders[:NAMES_TOLD]]
    others = len(rest) - len(behind)
    if others:
        behind.append(f"{others:,} more" if behind else f"{others:,}")
    if behind:
        text += f"; behind it wait{'s' if len(rest) == 1 else ''} {' and '.join(behind)}"
    return f"0 running, {len(still.waiting):,} waiting: {text}"
