"""A leader that watches through the tap, compared with the scheduler itself after every step.

Law of this file: nothing is compared with what the tap says; both sides are read where they are kept.
"""

from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import RequestStatus

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.ids import Authority, SlotState, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from tests.vllm.engine import BLOCK, Engine

STATES = {
    RequestStatus.WAITING: {SlotState.INITIALIZED, SlotState.ONBOARD_STAGED},
    RequestStatus.WAITING_FOR_REMOTE_KVS: {SlotState.ONBOARDING},
    RequestStatus.PREEMPTED: {SlotState.PREEMPTED, SlotState.ONBOARD_STAGED},
}


def short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def compare(engine: Engine, state: CacheState, scheduled: set[str]) -> None:
    """Every request, every block of the device in each group, and who holds it."""
    scheduler = engine.scheduler
    (pool,) = (pool for pool in state.pools if pool.info.authority is Authority.OBSERVED)
    told = pool.info.group
    live = {slot.request: slot for slot in state.slots.values() if slot.state is not SlotState.FINISHING}
    requests = {name: one for name, one in scheduler.requests.items() if not one.is_finished()}
    assert live.keys() == requests.keys()
    for name, request in requests.items():
        slot = live[name]
        blocks = scheduler.kv_cache_manager.get_block_ids(name)[told]
        assert slot.device_blocks == blocks, name
        if request.status is RequestStatus.RUNNING:
            # Drafts are counted here when the model has accepted them, and by the engine until it has refused them.
            computed = request.num_computed_tokens - engine.scheduled_drafts.get(name, 0)
            prefills = computed <= slot_target(slot, request)
            assert slot.computed_tokens(state.iteration) == computed, name
            if name in scheduled:
                assert slot.state in (SlotState.PREFILLING, SlotState.DECODING), name
                if not prefills:
                    assert slot.state is SlotState.DECODING, name
            else:
                assert slot.state in (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE), name
        else:
            loaded = slot.state is SlotState.ONBOARDING and not slot.outstanding  # and there is no room to go on
            assert loaded or slot.state in STATES[request.status], (name, slot.state, request.status)
    compare_places(engine, state, pool)


def compare_places(engine: Engine, state: CacheState, pool: PoolFacts) -> None:
    """Every place: what it holds, in which group; and how many hold it."""
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    told = pool.info.group
    loaded = {
        place for slot in state.slots.values() if slot.state is SlotState.ONBOARDING for place in slot.device_blocks
    }
    others: dict[int, Counter[int]] = {}
    for block in blocks:
        group = told if block.block_hash is None else get_group_id(block.block_hash)
        theirs = 0 if block.block_hash is None else short(get_block_hash(block.block_hash))
        if group != told:
            others.setdefault(group, Counter())[theirs] += 1
            theirs = 0
        ours = pool.hash_of[block.block_id] if block.block_id < len(pool) else 0
        # What a load brings is named at its start here, and by the engine when the request is scheduled again.
        assert ours == theirs or (theirs == 0 and block.block_id in loaded), block.block_id
    for other in state.pools:
        if other.info.tier is Tier.G1 and other is not pool:
            held = Counter({key: len(other.places_of(key)) for key in other.by_hash})
            assert held == others.pop(other.info.group, Counter()), other.info.group
    assert not others
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    theirs_held = Counter(
        block.block_id for held in managers[told].req_to_blocks.values() for block in held if not block.is_null
    )
    if len(managers) == 1:
        assert theirs_held == {block.block_id: block.ref_cnt for block in blocks if block.ref_cnt and not block.is_null}
    assert Counter(place for slot in state.slots.values() for place in slot.device_blocks) == theirs_held


def slot_target(slot: Any, request: Any) -> int:
    """Tokens that were known when it was scheduled first or again: up to there it prefills."""
    return max(request.num_prompt_tokens, request.num_tokens if slot.preemptions else 0)


def removed_by_engine(engine: Engine, medium: str, group: int = 0, block_tokens: int = BLOCK) -> list[int]:
    """Hashes of whole blocks that the engine's own events say to have left a group on a medium, since the beginning."""
    found: list[int] = []
    parts: set[int] = set()
    for batch in engine.batches:
        for event in batch.events:
            if getattr(event, "medium", None) != medium or (event.group_idx or 0) != group:
                continue
            keys = [short(one) if isinstance(one, bytes) else one & (2**64 - 1) for one in event.block_hashes]
            if type(event).__name__ == "BlockRemoved":
                found += keys
            elif event.block_size not in (0, block_tokens):
                parts.update(keys)  # a second name of a block, for its beginning
    return [key for key in found if key not in parts]


def evicted(events: list[ev.Event], state: CacheState) -> list[tuple[int, int | None]]:
    """(hash, slot that caused it) of every eviction from the device."""
    return [
        (key, event.for_slot) for event in events
        if isinstance(event, ev.BlocksEvicted) and state.pools[event.pool].info.authority is Authority.OBSERVED
        for key in unpack_hashes(event.hashes)
    ]


__all__ = ["BLOCK", "compare", "evicted", "removed_by_engine", "short"]
