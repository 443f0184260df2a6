"""Prefetch: blocks of the disk tier are copied to the host tier before a lookup asks for them.

Law of this file: a predictor only names hashes. The pipeline decides on its copies and makes room as for every other
copy, as candidates without a slot. Fetched blocks that are under way or unused hold at most ``staging_share`` of the
host tier. Content is found by its hash alone, so a wrong guess costs bandwidth and room, and never an answer. When less
than a quarter of the fetched blocks is used, only probes are fetched until half of these are used.

Three predictors. ``chain``: the hashes of a prompt are known when it arrives, so while it queues behind others its
continuation below the host tier is fetched. ``ngram``: the blocks that followed the last block of this prompt before. A
hash names its whole prefix, so one block of context says as much as three. ``session``: a session that has ended a turn
usually comes back after about the same time. Its blocks are fetched when half of that time has passed.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from kvbm_console.core import events as ev
from kvbm_console.core.config import BATCH_LEAST
from kvbm_console.core.ids import Clock, Route, SlotState, Tier
from kvbm_console.core.instructions import SetDeadline
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.foresight import GAP_WEIGHT, SESSION_BLOCKS_MAX, SESSIONS_MAX, EndedTurn
from kvbm_console.core.leader.pipeline import enqueue
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import PoolFacts

# --- occasions ---


def arrived(decider: Decider, slot: SlotFacts) -> None:
    """A request has come: guess, and learn from its prompt."""
    pools = _tiers(decider)
    if pools is None:
        return
    ahead, predictor = decider.memory.prefetch, decider.config.prefetch
    if predictor == "chain":
        if _queues(decider, slot):
            # At least one token is computed, so the lookup never takes the last block of a prompt that ends with it.
            usable = (slot.prompt_tokens - 1) // decider.config.block_tokens
            numbers = _fetch(decider, *pools, [slot.hashes[:usable]])
            if numbers:
                ahead.waits[slot.slot] = numbers
                ahead.arrived_ns[slot.slot] = decider.at_ns
    elif predictor == "ngram":
        _fetch(decider, *pools, ahead.likely(slot.hashes))
        ahead.learn(slot.hashes)
    elif slot.session is not None:
        before = ahead.sessions.pop(slot.session, None)
        if before is not None:
            decider.clear_deadline("prefetch", before.number)
            gap = decider.at_ns - before.ended_ns
            ahead.gap_ns = gap if not ahead.gap_ns else ahead.gap_ns + (gap - ahead.gap_ns) // GAP_WEIGHT


def ended(decider: Decider, slot: SlotFacts) -> None:
    """A request has ended well: its session may come back."""
    if decider.config.prefetch != "session" or slot.session is None or _tiers(decider) is None:
        return
    ahead = decider.memory.prefetch
    known = ahead.sessions.pop(slot.session, None)
    if known is not None:
        decider.clear_deadline("prefetch", known.number)
    number, ahead.next_session = ahead.next_session, ahead.next_session + 1
    ahead.sessions[slot.session] = EndedTurn(number, slot.hashes[-SESSION_BLOCKS_MAX:], decider.at_ns)
    for name in list(islice(ahead.sessions, max(0, len(ahead.sessions) - SESSIONS_MAX))):
        decider.clear_deadline("prefetch", ahead.sessions.pop(name).number)
    if ahead.gap_ns:
        decider.ask(SetDeadline(decider.memory.deadline("prefetch", number), max(1, ahead.gap_ns // 2), Clock.ENGINE))


def due(decider: Decider, number: int) -> None:
    """A session that ended some time ago will probably be back soon."""
    pools = _tiers(decider)
    session = next((known for known in decider.memory.prefetch.sessions.values() if known.number == number), None)
    if pools is not None and session is not None:
        _fetch(decider, *pools, [session.hashes])


def must_wait(decider: Decider, slot: SlotFacts) -> bool:
    """True if a lookup of this slot is answered only later, by the stop rule of the configuration."""
    ahead, rule = decider.memory.prefetch, decider.config.prefetch_stop
    if rule == "best_effort" or slot.slot not in ahead.waits:
        return False
    if rule == "wait_complete":
        return True
    left_ns = ahead.arrived_ns[slot.slot] + decider.config.prefetch_timeout_ns - decider.at_ns
    if left_ns > 0 and f"wait {slot.slot}" not in decider.memory.deadline_of:
        # The lookup is repeated when the time is over, also without any other stimulus until then.
        decider.ask(SetDeadline(decider.memory.deadline("wait", slot.slot), left_ns, Clock.ENGINE))
    return left_ns > 0


def on_its_way(decider: Decider, pool: PoolFacts, key: int) -> bool:
    """True if this block is being fetched into this pool: a lookup takes it from below instead."""
    if key not in decider.memory.prefetch.asked:
        return False
    lower = decider.below(pool)
    return lower is not None and lower.ready_place(key) is not None


def found(decider: Decider, pool: PoolFacts, hashes: Sequence[int]) -> int:
    """A lookup has found these blocks in a pool; how many of them stand there because they were fetched ahead."""
    if pool.info.tier is Tier.G3:
        decider.memory.prefetch.found_below(hashes)
    elif pool.info.tier is Tier.G2:
        return decider.memory.prefetch.found(hashes)
    return 0


# --- the fetched blocks ---


def _tiers(decider: Decider) -> tuple[PoolFacts, PoolFacts] | None:
    """Host and disk tier, if there are both and something is to be fetched."""
    if decider.config.prefetch == "none":
        return None
    pools = {pool.info.tier: pool for pool in decider.lower_pools()}
    return (pools[Tier.G2], pools[Tier.G3]) if Tier.G2 in pools and Tier.G3 in pools else None


def prefetches(decider: Decider) -> bool:
    """True if this leader has a predictor and both tiers that it needs."""
    return _tiers(decider) is not None


def _queues(decider: Decider, slot: SlotFacts) -> bool:
    """True if another request waits before this request: else its lookup comes before any copy could end."""
    return any(
        other.state in (SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.PREEMPTED)
        for other in decider.state.slots.values() if other is not slot
    )


def _fetch(decider: Decider, host: PoolFacts, disk: PoolFacts, ways: Iterable[Sequence[int]]) -> list[int]:
    """Plan to copy up the blocks of these prefixes that only the disk tier holds; returns the candidates."""
    ahead, config = decider.memory.prefetch, decider.config
    used, judged = ahead.recent_used, ahead.recent_used + ahead.recent_wasted
    if ahead.judge():
        decider.emit(ev.PrefetchLimited, ahead.limited, used, judged)
    room = ahead.room(int(config.staging_share * len(host)) - len(ahead.asked) - len(ahead.unused))
    wanted: dict[int, None] = {}
    for way in ways:
        for key in way:
            if len(wanted) >= room:
                break
            if key in host.by_hash or key in ahead.asked or key in wanted or _on_device(decider, key):
                continue
            if disk.ready_place(key) is None:
                break  # the blocks behind an absent block cannot be used
            wanted[key] = None
    numbers = []
    most = min(BATCH_LEAST, config.offload_batch_blocks)  # in small copies, so that a lookup finds the first ones early
    for at in range(0, len(wanted), most):
        part = list(wanted)[at : at + most]
        number = decider.state.next_candidate
        decider.emit(ev.CandidatePlanned, number, None, Route.G3_G2, decider.hashes(part), b"", None)
        decider.memory.drawn_from[number] = disk.info.pool
        ahead.asked.update(dict.fromkeys(part, number))
        enqueue(decider, decider.state.candidates[number])
        numbers.append(number)
    return numbers


def _on_device(decider: Decider, key: int) -> bool:
    return any(key in pool.by_hash for pool in decider.state.pools if pool.info.tier is Tier.G1)
