"""Iterations: the engine formed one, the engine finished one.

Law of this file: lists name changes only, and all of them are checked before the first event.
"""

from itertools import islice

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import EMPTY_HASH, SlotState
from kvbm_console.core.instructions import IterationMetadata
from kvbm_console.core.leader.decider import NO_LIMIT, Decider
from kvbm_console.core.leader.filling import fill, iteration_ended
from kvbm_console.core.leader.holds import park
from kvbm_console.core.leader.lookups import assign, check_device_ids
from kvbm_console.core.leader.requests import preempt, use_formed
from kvbm_console.core.leader.slots import move
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import PoolFacts

_S = SlotState
_MAY_START = (_S.INITIALIZED, _S.ONBOARD_STAGED, _S.ONBOARDING, _S.PREEMPTED)
_TAKES_PART = (_S.PREFILLING, _S.DECODING)
_SKIPPED_OF = {_S.PREFILLING: _S.SKIPPED_PREFILL, _S.DECODING: _S.SKIPPED_DECODE}
_BACK_OF = {skipped: back for back, skipped in _SKIPPED_OF.items()}


class Appended(msgspec.Struct):
    slots: list[SlotFacts] = []
    counts: list[int] = []
    ids: list[int] = []
    more: dict[int, int] = {}
    """Slot to its new blocks."""


def iteration_scheduled(decider: Decider, s: st.IterationScheduled) -> IterationMetadata:
    """``build_connector_metadata``: move slots, append blocks, advance positions."""
    state = decider.state
    several = bool(decider.memory.iterations)
    before = decider.last_iteration(s.source)
    if s.count < 1 or (s.iteration != before + 1 and before and _has_slots(decider, s.source)):
        raise Refused(f"iteration {s.iteration} (count {s.count}) does not follow iteration {before}")
    last = state.iteration + s.count if several else s.iteration + s.count - 1
    moves: list[tuple[SlotFacts, SlotState]] = []
    if s.new or s.progressed or s.first_tokens or s.resumed or s.preempted or s.skipped or s.unskipped or s.positions:
        _check_lists(decider, s)
        moves = _check_moves(decider, s)
    appended = _check_appended(decider, s)
    if s.progressed or s.positions:
        _check_positions(decider, s, appended, {slot.slot: new for slot, new in moves})
    _check_places(decider, s, appended, last)
    for request in s.preempted:
        slot = decider.live(request)
        if slot.state is not _S.PREEMPTED:
            preempt(decider, slot)
    for slot, new in moves:
        move(decider, slot, new, iteration=s.iteration)
        if slot.hold is not None and new in _BACK_OF and slot.request in state.standing:
            park(decider, slot)
    if appended.ids:
        pool = decider.device_pool(appended.slots[0].source)
        lost = assign(decider, pool, appended.slots, appended.counts, appended.ids, 0, 0, at_once=False)
        if s.count > 1 and lost:
            remember_early(decider, pool, appended, last - s.count, s.count, lost)
    slots = tuple([decider.live(request).slot for request in s.progressed])
    if several:
        slots = _advance_beside_others(decider, s, last, slots)
    else:
        decider.emit(ev.IterationAdvanced, last, s.count, s.running, s.waiting, slots, s.positions, s.ended)
    for number in slots:
        if state.slots[number].state is _S.DECODING:
            decider.note_place(state.slots[number])
    use_formed(decider, slots, s.positions, s.ended)
    issued = decider.memory.issued
    if issued:
        decider.memory.issued = []
    return IterationMetadata(s.iteration + s.count - 1, tuple(issued))


def _has_slots(decider: Decider, source: int) -> bool:
    slots = decider.state.slots
    return any(slot.source == source for slot in slots.values()) if decider.memory.iterations else bool(slots)


def _advance_beside_others(
    decider: Decider, s: st.IterationScheduled, last: int, slots: tuple[int, ...]
) -> tuple[int, ...]:
    """Several engines, each with numbers of its own: the leader counts the iterations of all of them.

    An iteration computes a token of every decoding slot by itself; those of other engines are told to stay where they
    are. The slots whose position was told.
    """
    others = [slot for slot in decider.state.slots.values() if slot.source != s.source]
    standing = [slot for slot in others if slot.state is _S.DECODING]
    positions = tuple(slot.computed_tokens(decider.state.iteration) for slot in standing)
    waiting = sum(not slot.device_blocks for slot in others)
    slots += tuple(slot.slot for slot in standing)
    decider.emit(
        ev.IterationAdvanced, last, s.count, s.running + len(others) - waiting, s.waiting + waiting, slots,
        s.positions + positions, s.ended,
    )
    decider.memory.iterations[s.source] = s.iteration + s.count - 1
    return slots


def _check_lists(decider: Decider, s: st.IterationScheduled) -> None:
    """No request stands twice in a list, or in two lists that contradict each other.

    Only ``appended`` may repeat a request, when several iterations are told at once: it is in the order of handing out.
    """
    started = (*s.new, *s.resumed)
    for names in (started, s.preempted, s.skipped, s.unskipped, s.first_tokens, s.progressed):
        if len(names) > 1 and len(set(names)) != len(names):
            raise Refused("a request stands twice in a list of the iteration")
    if not (s.skipped or s.preempted):
        return
    taking_part = {*started, *s.unskipped, *s.first_tokens, *s.progressed}
    for request in (*s.skipped, *s.preempted):
        if request in taking_part or (request in s.preempted and request in (*s.skipped, *s.appended)):
            raise Refused(f"request {request!r} is left out of the iteration and takes part in it")
    for request in s.preempted:
        if decider.live(request).state in (_S.FINISHING, _S.FINISHED):
            raise Refused(f"request {request!r} is {decider.live(request).state.label} and cannot be preempted")


def _check_moves(decider: Decider, s: st.IterationScheduled) -> list[tuple[SlotFacts, SlotState]]:
    """The moves of this iteration, in the order of the lists; refuses an impossible move."""
    moves: list[tuple[SlotFacts, SlotState]] = []
    for request in (*s.new, *s.resumed):
        slot = decider.live(request)
        if slot.state is _S.PREFILLING:
            continue
        loading = slot.state is _S.ONBOARDING and slot.slot in decider.memory.loads
        if slot.state not in _MAY_START or loading or not slot.end_block:
            raise Refused(f"request {request!r} is {slot.state.label} and cannot start to prefill")
        moves.append((slot, _S.PREFILLING))
    for request in s.unskipped:
        slot = decider.live(request)
        if slot.state not in _BACK_OF:
            raise Refused(f"request {request!r} is {slot.state.label} and was not left out")
        moves.append((slot, _BACK_OF[slot.state]))
    unskipped = set(s.unskipped)
    for request in s.first_tokens:
        slot = decider.live(request)
        if slot.state is not _S.PREFILLING and not (slot.state is _S.SKIPPED_PREFILL and request in unskipped):
            raise Refused(f"request {request!r} is {slot.state.label} and cannot produce its first token")
        moves.append((slot, _S.DECODING))
    for request in s.skipped:
        slot = decider.live(request)
        if slot.state not in _SKIPPED_OF:
            raise Refused(f"request {request!r} is {slot.state.label} and cannot be left out")
        moves.append((slot, _SKIPPED_OF[slot.state]))
    return moves


def _check_appended(decider: Decider, s: st.IterationScheduled) -> Appended:
    """The blocks appended to running requests; refuses ids that cannot be given to them."""
    if not (s.appended or s.appended_counts or s.appended_ids):
        return Appended()
    ids = unpack_ids(s.appended_ids)
    fits = len(s.appended) == len(s.appended_counts) and sum(s.appended_counts) == len(ids)
    if not fits or min(s.appended_counts, default=1) < 1:
        raise Refused(f"{len(ids)} appended blocks do not match counts {s.appended_counts}")
    if s.count == 1 and len(s.appended) > 1 and len(set(s.appended)) != len(s.appended):
        raise Refused("a request stands twice in a list of the iteration")
    slots = [decider.live(request) for request in s.appended]
    at = 0
    more: dict[int, int] = {}
    for slot, count in zip(slots, s.appended_counts, strict=True):
        if not slot.end_block:
            raise Refused(f"request {slot.request!r} has no device blocks to append to")
        check_device_ids(decider, decider.device_pool(slot.source), slot, ids[at : at + count], 0)
        at += count
        number = slot.slot
        more[number] = more.get(number, 0) + count
    if len(ids) > 1 and len(set(ids)) != len(ids):
        raise Refused("a block was appended twice in one iteration")
    if len(slots) > 1 and len({slot.source for slot in slots}) > 1:
        raise Refused("an iteration appends blocks of one engine")
    return Appended(slots, list(s.appended_counts), ids, more)


def _check_positions(
    decider: Decider, s: st.IterationScheduled, appended: Appended, moves: dict[int, SlotState]
) -> None:
    """Positions of requests that take part go forward and have places."""
    if len(s.progressed) != len(s.positions):
        raise Refused(f"{len(s.progressed)} progressed requests have {len(s.positions)} positions")
    more = appended.more
    for request, position in zip(s.progressed, s.positions, strict=True):
        slot = decider.live(request)
        room = (slot.end_block + more.get(slot.slot, 0)) * decider.config.block_tokens
        computed = slot.computed_tokens(decider.state.iteration)
        state = moves.get(slot.slot, slot.state)
        if state not in _TAKES_PART:
            raise Refused(f"request {request!r} is {slot.state.label} and computes nothing")
        if not computed <= position <= room:
            raise Refused(
                f"request {request!r} cannot reach position {position} from {computed} with room for {room}"
            )
        if computed < position > slot.most_tokens(state):
            raise Refused(f"request {request!r} cannot reach position {position} of {slot.most_tokens(state)} tokens")


def _check_places(decider: Decider, s: st.IterationScheduled, appended: Appended, last: int) -> None:
    """Every token of a decoding slot has a place up to iteration ``last``, and is within its limit (I15)."""
    if last <= decider.least_limit and not (s.first_tokens or s.unskipped or s.skipped or s.preempted):
        return
    size, more = decider.config.block_tokens, appended.more
    out = {decider.live(request).slot for request in (*s.skipped, *s.preempted)}
    limits = decider.memory.place_limit
    if last > decider.least_limit:
        for number, limit in limits.items():
            if limit < last and number not in out:
                slot = decider.state.slots[number]
                if slot.source != s.source:
                    continue  # it stays where it is
                _check_token(slot, last - slot.anchor_iteration, size, more.get(number, 0))
        decider.least_limit = min(limits.values(), default=NO_LIMIT)
    for request in (*s.first_tokens, *s.unskipped):
        slot = decider.live(request)
        if slot.state is _S.SKIPPED_PREFILL and request not in s.first_tokens:
            continue
        if slot.slot not in out:
            _check_token(slot, s.count, size, more.get(slot.slot, 0))


def _check_token(slot: SlotFacts, tokens: int, size: int, more: int) -> None:
    """Refuse ``tokens`` computed after the slot's anchor that have no place, or that its sequence may not have."""
    computed = slot.anchor_tokens + tokens
    if computed > (slot.end_block + more) * size:
        raise Refused(f"request {slot.request!r} has no place for its next token")
    if computed > slot.token_limit:
        raise Refused(f"request {slot.request!r} has all of its {slot.token_limit} tokens")


def remember_early(
    decider: Decider, pool: PoolFacts, appended: Appended, before: int, count: int, lost: dict[int, int]
) -> None:
    """Date evictions of iterations that are told at once.

    A later iteration evicts the blocks that it needs, and its begin is known only when all of them have ended.
    ``before`` is the iteration in front of them, and ``lost`` maps evicted places to their hashes.
    """
    size = decider.config.block_tokens
    block = {slot.slot: slot.end_block - appended.more[slot.slot] for slot in appended.slots}
    later: dict[int, int] = {}
    ids = iter(appended.ids)
    for slot, blocks in zip(appended.slots, appended.counts, strict=True):
        for place in islice(ids, blocks):
            later[place] = block[slot.slot] * size - slot.computed_tokens(before)
            block[slot.slot] += 1
    decider.memory.early = [decider.at_ns, count, pool.info.pool]
    decider.memory.early_of = {key: later[place] for place, key in lost.items() if later[place]}


def date_early(decider: Decider) -> None:
    """The iterations have ended, all equally long: date the evictions of the later iterations."""
    (since_ns, count, pool), early = decider.memory.early, decider.memory.early_of
    lasts_ns = (decider.at_ns - since_ns) // count
    for key, later in early.items():
        decider.memory.pools[pool].left_later(key, since_ns + later * lasts_ns)
    decider.memory.early, decider.memory.early_of = [], {}


def iteration_finished(decider: Decider, s: st.IterationFinished) -> None:
    """Blocks are full and carry their hashes; from now on they may be copied.

    In the order in which they became full: after several iterations a request may stand there several times.
    """
    formed = decider.last_iteration(s.source)
    if decider.memory.early:
        date_early(decider)
    _take_filled(decider, s, formed)
    iteration_ended(decider, decider.device_pool(s.source))


def _take_filled(decider: Decider, s: st.IterationFinished, formed: int) -> None:
    if s.unkept:
        raise Refused("an engine that asks keeps all of its full blocks")
    if not (s.block_ids or s.hashes or s.requests or s.counts) and s.iteration <= formed:
        return
    ids, hashes = unpack_ids(s.block_ids), unpack_hashes(s.hashes)
    if len(ids) != len(hashes) or len(s.requests) != len(s.counts) or sum(s.counts) != len(ids):
        raise Refused(f"{len(ids)} filled blocks do not match {len(hashes)} hashes and counts {s.counts}")
    if s.iteration > formed:
        raise Refused(f"iteration {s.iteration} was not formed yet")
    slots = [decider.live(request) for request in s.requests]
    if len(slots) > 1 and len({slot.source for slot in slots}) > 1:
        raise Refused("an iteration fills blocks of one engine")
    spans = _check_filled(decider, slots, s.counts, ids, hashes)
    if not ids:
        return
    pool = decider.device_pool(slots[0].source)
    if pool.filled(ids):
        raise Refused("a filled block has content already")
    fill(decider, pool, spans, ids, hashes)


def _check_filled(
    decider: Decider, slots: list[SlotFacts], counts: tuple[int, ...], ids: list[int], hashes: list[int]
) -> list[tuple[SlotFacts, int, int]]:
    """Which blocks of each slot, from and up to; refuses blocks that are not next, not computed or of other content."""
    size, iteration = decider.config.block_tokens, decider.state.iteration
    at = 0
    filled: dict[int, int] = {}
    spans: list[tuple[SlotFacts, int, int]] = []
    for slot, count in zip(slots, counts, strict=True):
        first = filled.get(slot.slot, slot.filled_blocks)
        end = filled[slot.slot] = first + count
        spans.append((slot, first, end))
        computed = slot.computed_tokens(iteration)
        if end * size > computed:
            raise Refused(f"request {slot.request!r} fills {end} blocks with {computed} computed tokens")
        told, content = ids[at : at + count], hashes[at : at + count]
        if slot.places(first, end) != told or not count:
            raise Refused(f"request {slot.request!r} does not fill its next blocks with {told}")
        known = slot.hashes[first:end]
        fresh = len(known)  # those of the prompt were looked at when it arrived
        if content[:fresh] != known or EMPTY_HASH in content[fresh:]:
            raise Refused(f"request {slot.request!r} fills block {first} with another content than its prompt")
        at += count
    return spans
