"""Steps of an engine that is only watched, and the device blocks that go from one request to another in them.

Law of this file: what was reported is true; what it contradicts is given up, and the source is marked as one of which
reports were lost.
"""

from collections.abc import Sequence
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import EMPTY_HASH, EvictRule, ReleaseReason, SlotState
from kvbm_console.core.instructions import IterationMetadata
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.iterations import link_chain
from kvbm_console.core.leader.pipeline import end_operation
from kvbm_console.core.leader.requests import preempt
from kvbm_console.core.leader.watched_copies import close_copies, end_load, report
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import PoolFacts

_S = SlotState
ENDED: Final = (_S.FINISHING, _S.FINISHED)
_BEGINS: Final = (_S.INITIALIZED, _S.ONBOARD_STAGED, _S.ONBOARDING, _S.PREEMPTED)
_SKIPPED_OF: Final = {_S.PREFILLING: _S.SKIPPED_PREFILL, _S.DECODING: _S.SKIPPED_DECODE}
_BACK_OF: Final = {skipped: back for back, skipped in _SKIPPED_OF.items()}


def contradicted(leader: Decider, source: int) -> None:
    """What was reported does not fit: reports were lost on the way."""
    if source not in leader.state.lost_sources:
        leader.emit(ev.SourceLost, source, 0, 0, False)


def check_ids(pool: PoolFacts, slot: SlotFacts, ids: list[int]) -> None:
    capacity = pool.places_max
    if len(set(ids)) != len(ids):
        raise Refused(f"request {slot.request!r} was given a block twice")
    if ids and not 0 <= min(ids) <= max(ids) < capacity:
        raise Refused(f"block ids must be from 0 to {capacity - 1}, got {min(ids)} to {max(ids)}")


def give_up(leader: Decider, pool: PoolFacts, slot: SlotFacts, ids: Sequence[int]) -> None:
    """These places are the slot's now: whoever still lists them has lost them, and their content is evicted for it."""
    known = len(pool)
    held = {place for place in ids if place < known and pool.refs[place]}
    if held:
        for operation in list(leader.state.operations.values()):
            if operation.source_pool == pool.info.pool and not held.isdisjoint(operation.sources):
                report(leader, operation, failed=False)
                end_operation(leader, operation)
        for other in leader.state.slots.values():
            if other.device_pool == pool.info.pool and not held.isdisjoint(other.device_blocks):
                close_copies(leader, other)
                leader.release_device_blocks(other, ReleaseReason.REASSIGNED)
    lost = [place for place in ids if place < known and pool.hash_of[place] != EMPTY_HASH]
    if lost:
        leader.evict(pool, lost, slot.slot, EvictRule.REASSIGNED)


def append(
    leader: Decider, pool: PoolFacts, slots: list[SlotFacts], counts: list[int], ids: list[int]
) -> None:
    at = 0
    for slot, count in zip(slots, counts, strict=True):
        give_up(leader, pool, slot, ids[at : at + count])
        at += count
    leader.emit(
        ev.DeviceBlocksAssigned, pool.info.pool, tuple(slot.slot for slot in slots), tuple(counts), pack_ids(ids), 0, 0
    )


def iteration_scheduled(leader: Decider, s: st.IterationScheduled) -> IterationMetadata:
    """The engine formed a step. Its own number of it is not used: several engines are counted in one row here."""
    state = leader.state
    for request in s.preempted:
        slot = state.slot_named(request)
        if slot is not None and slot.state not in ENDED and (slot.state is not _S.PREEMPTED or slot.device_blocks):
            close_copies(leader, slot)
            preempt(leader, slot)
    first = state.iteration + 1
    for request in (*s.new, *s.resumed):
        slot = state.slot_named(request)
        if slot is not None and slot.state in _BEGINS and slot.device_blocks:
            end_load(leader, slot)
            leader.move(slot, _S.PREFILLING, iteration=first)
    _move_all(leader, s.unskipped, _BACK_OF, first)
    _move_all(leader, s.first_tokens, {_S.PREFILLING: _S.DECODING}, first)
    _move_all(leader, s.skipped, _SKIPPED_OF, first)
    _append_all(leader, s)
    _advance(leader, s)
    return IterationMetadata(state.iteration, ())


def _move_all(leader: Decider, requests: Sequence[str], moves: dict[SlotState, SlotState], iteration: int) -> None:
    for request in requests:
        slot = leader.state.slot_named(request)
        if slot is not None and slot.state in moves:
            leader.move(slot, moves[slot.state], iteration=iteration)


def _append_all(leader: Decider, s: st.IterationScheduled) -> None:
    ids = unpack_ids(s.appended_ids)
    if len(s.appended) != len(s.appended_counts) or sum(s.appended_counts) != len(ids):
        raise Refused(f"{len(ids)} appended blocks do not match counts {s.appended_counts}")
    slots: list[SlotFacts] = []
    counts: list[int] = []
    taken: list[int] = []
    at = 0
    for request, count in zip(s.appended, s.appended_counts, strict=True):
        part = ids[at : at + count]
        at += count
        slot = leader.state.slot_named(request)
        if slot is None or slot.state in ENDED or not set(part).isdisjoint([*slot.device_blocks, *taken]):
            contradicted(leader, s.source)
            continue
        slots.append(slot)
        counts.append(count)
        taken += part
    if slots:
        pool = leader.device_pool(s.source)
        check_ids(pool, slots[0], taken)
        append(leader, pool, slots, counts, taken)


def _advance(leader: Decider, s: st.IterationScheduled) -> None:
    """Positions: what was reported, and whatever would else go on by itself because others' iterations count too."""
    state = leader.state
    told = dict(zip(s.progressed, s.positions, strict=True))
    last = state.iteration + s.count
    slots: list[int] = []
    positions: list[int] = []
    for slot in state.slots.values():
        position = told.get(slot.request)
        if position is None:
            if slot.state is not _S.DECODING:
                continue
            position = slot.computed_tokens(state.iteration) + (s.count if slot.source == s.source else 0)
        room = len(slot.device_blocks) * leader.block_tokens_of(slot.source)
        position = min(position, room, slot.most_tokens(slot.state))  # after lost reports the blocks are not all known
        expected = slot.anchor_tokens
        if slot.state is _S.DECODING:
            expected += last - slot.anchor_iteration
        if position != expected:
            slots.append(slot.slot)
            positions.append(position)
    leader.emit(ev.IterationAdvanced, last, s.count, s.running, s.waiting, tuple(slots), tuple(positions))


def iteration_finished(leader: Decider, s: st.IterationFinished) -> None:
    """Blocks are full and carry the engine's own hashes."""
    ids, hashes = unpack_ids(s.block_ids), unpack_hashes(s.hashes)
    if len(ids) != len(hashes) or len(s.requests) != len(s.counts) or sum(s.counts) != len(ids):
        raise Refused(f"{len(ids)} filled blocks do not match {len(hashes)} hashes and counts {s.counts}")
    pool = leader.device_pool(s.source)
    slots: list[SlotFacts] = []
    counts: list[int] = []
    filled: list[int] = []
    at = 0
    for request, count in zip(s.requests, s.counts, strict=True):
        part = range(at, at + count)
        at += count
        slot = leader.state.slot_named(request)
        if slot is not None:
            part = part[_filled_before(pool, slot, ids[part.start : part.stop], hashes[part.start : part.stop]) :]
            if count and not part:
                continue
        if slot is not None and _fills(pool, slot, [ids[i] for i in part], [hashes[i] for i in part]):
            slots.append(slot)
            counts.append(len(part))
            filled += part
        else:
            contradicted(leader, s.source)
    if filled:
        _fill(leader, pool, slots, counts, [ids[i] for i in filled], [hashes[i] for i in filled])


def fill_for(leader: Decider, pool: PoolFacts, ids: list[int], hashes: list[int]) -> None:
    """These blocks are used again as the prefix with these hashes: so whoever fills them has been scheduled to.

    An engine names a block when it gives it out, and a request of the same step may already use it.
    """
    for at in reversed(range(len(ids))):
        for slot in leader.state.slots.values():
            first = slot.filled_blocks
            if slot.device_pool != pool.info.pool or slot.device_blocks[at : at + 1] != [ids[at]] or first > at:
                continue
            places, keys = slot.device_blocks[first : at + 1], slot.hashes[first : at + 1]
            if keys[-1:] == [hashes[at]] and _fills(pool, slot, places, keys):
                _fill(leader, pool, [slot], [len(places)], places, keys)


def _fill(
    leader: Decider, pool: PoolFacts, slots: list[SlotFacts], counts: list[int], ids: list[int], keys: list[int]
) -> None:
    leader.emit(
        ev.BlocksFilled, pool.info.pool, tuple(slot.slot for slot in slots), tuple(counts), pack_ids(ids),
        pack_hashes(keys),
    )
    for slot, count in zip(slots, counts, strict=True):
        link_chain(leader, slot, slot.filled_blocks - count, slot.filled_blocks)


def _filled_before(pool: PoolFacts, slot: SlotFacts, ids: list[int], hashes: list[int]) -> int:
    """How many of these, at their beginning, are known to be full: ``fill_for`` has told them."""
    last = slot.device_blocks[: slot.filled_blocks]
    if not ids or ids[0] not in last:
        return 0
    known = last[last.index(ids[0]) :][: len(ids)]
    told = ids[: len(known)] == known and all(
        pool.hash_of[place] == key for place, key in zip(known, hashes, strict=False)
    )
    return len(known) if told else 0


def _fills(pool: PoolFacts, slot: SlotFacts, ids: list[int], hashes: list[int]) -> bool:
    """Whether these are the next blocks of the slot, empty so far, and of its own content."""
    first = slot.filled_blocks
    known = slot.hashes[first : first + len(ids)]
    return (
        bool(ids) and slot.device_blocks[first : first + len(ids)] == ids and hashes[: len(known)] == known
        and EMPTY_HASH not in hashes and not any(pool.hash_of[place] for place in ids)
    )
