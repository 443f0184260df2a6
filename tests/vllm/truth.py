"""A leader that watches through the tap, compared with the scheduler itself after every step.

Law of this file: nothing is compared with what the tap says; both sides are read where they are kept.
"""

from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import RequestStatus

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.ids import Authority, SlotState
from kvbm_console.core.state import CacheState
from tests.vllm.engine import BLOCK, Engine

STATES = {
    RequestStatus.WAITING: {SlotState.INITIALIZED, SlotState.ONBOARD_STAGED},
    RequestStatus.WAITING_FOR_REMOTE_KVS: {SlotState.ONBOARDING},
    RequestStatus.PREEMPTED: {SlotState.PREEMPTED, SlotState.ONBOARD_STAGED},
}


def short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def compare(engine: Engine, state: CacheState, scheduled: set[str]) -> None:
    """Every request, every block of the device, and who holds it."""
    scheduler = engine.scheduler
    live = {slot.request: slot for slot in state.slots.values() if slot.state is not SlotState.FINISHING}
    requests = {name: one for name, one in scheduler.requests.items() if not one.is_finished()}
    assert live.keys() == requests.keys()
    for name, request in requests.items():
        slot = live[name]
        blocks = scheduler.kv_cache_manager.get_block_ids(name)[0]
        assert slot.device_blocks == blocks, name
        if request.status is RequestStatus.RUNNING:
            prefills = request.num_computed_tokens <= slot_target(slot, request)
            assert slot.computed_tokens(state.iteration) == request.num_computed_tokens, name
            if name in scheduled:
                assert slot.state in (SlotState.PREFILLING, SlotState.DECODING), name
                if not prefills:
                    assert slot.state is SlotState.DECODING, name
            else:
                assert slot.state in (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE), name
        else:
            loaded = slot.state is SlotState.ONBOARDING and not slot.outstanding  # and there is no room to go on
            assert loaded or slot.state in STATES[request.status], (name, slot.state, request.status)
    (pool,) = (pool for pool in state.pools if pool.info.authority is Authority.OBSERVED)
    loaded = {
        place for slot in state.slots.values() if slot.state is SlotState.ONBOARDING for place in slot.device_blocks
    }
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        if block.is_null:
            continue
        theirs = 0 if block.block_hash is None else short(get_block_hash(block.block_hash))
        ours = pool.hash_of[block.block_id]
        # What a load brings is named at its start here, and by the engine when the request is scheduled again.
        assert ours == theirs or (theirs == 0 and block.block_id in loaded), block.block_id
    theirs_held = {
        block.block_id: block.ref_cnt for block in scheduler.kv_cache_manager.block_pool.blocks
        if block.ref_cnt and not block.is_null
    }
    assert Counter(place for slot in state.slots.values() for place in slot.device_blocks) == theirs_held


def slot_target(slot: Any, request: Any) -> int:
    """Tokens that were known when it was scheduled first or again: up to there it prefills."""
    return max(request.num_prompt_tokens, request.num_tokens if slot.preemptions else 0)


def removed_by_engine(engine: Engine, medium: str) -> list[int]:
    """Hashes that the engine's own events say to have left a medium, since the beginning."""
    return [
        short(one) if isinstance(one, bytes) else one & (2**64 - 1)
        for batch in engine.batches for event in batch.events
        if type(event).__name__ == "BlockRemoved" and event.medium == medium for one in event.block_hashes
    ]


def evicted(events: list[ev.Event], state: CacheState) -> list[tuple[int, int | None]]:
    """(hash, slot that caused it) of every eviction from the device."""
    return [
        (key, event.for_slot) for event in events
        if isinstance(event, ev.BlocksEvicted) and state.pools[event.pool].info.authority is Authority.OBSERVED
        for key in unpack_hashes(event.hashes)
    ]


__all__ = ["BLOCK", "compare", "evicted", "removed_by_engine", "short"]
