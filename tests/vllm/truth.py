"""A leader that watches through the tap, compared with the scheduler itself after every step.

Law of this file: nothing is compared with what the tap says; both sides are read where they are kept.
"""

from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import RequestStatus

from kvbm_console.analysis.waits import available
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


class Differs(AssertionError):
    """Both sides differ; the text says in which point, ours first."""


def same(point: str, ours: Any, theirs: Any) -> None:
    """Raises ``Differs`` unless both sides are equal."""
    if ours == theirs:
        return
    if isinstance(ours, Counter) and isinstance(theirs, Counter):
        ours, theirs = dict(ours - theirs), dict(theirs - ours)
    raise Differs(f"{point}: {ours} shown, {theirs} in the engine")


def short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def cached(block: Any) -> tuple[int, int]:
    """Group and hash of a block of the engine's prefix cache."""
    return get_group_id(block.block_hash), short(get_block_hash(block.block_hash))


class Witness:
    """Sees each block that the engine evicts, with the request that it allocates for at that moment."""

    def __init__(self, engine: Engine) -> None:
        manager = engine.scheduler.kv_cache_manager
        pool = manager.block_pool
        self._request = ""
        self.names: dict[int, str] = {}
        """Slot to request, of every slot that was ever opened."""
        self.evicted: list[tuple[int, int, str]] = []
        """Group, hash and request of each eviction since the last look."""
        allocate, evict = manager.allocate_slots, pool._maybe_evict_cached_block

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._request = request.request_id
            try:
                return allocate(request, *args, **kwargs)
            finally:
                self._request = ""

        def maybe_evict(block: Any) -> Any:
            known = None if block.block_hash is None else cached(block)
            done = evict(block)
            if done and known is not None:
                self.evicted.append((*known, self._request))
            return done

        manager.allocate_slots, pool._maybe_evict_cached_block = allocate_slots, maybe_evict


def device_pool(state: CacheState, source: int = 1) -> PoolFacts:
    """The device's pool of the group that requests are reported with."""
    (pool,) = (
        pool for pool in state.pools if pool.info.authority is Authority.OBSERVED and pool.info.source == source
    )
    return pool


def compare(engine: Engine, state: CacheState, scheduled: set[str], *, source: int = 1, beside: bool = False) -> None:
    """Every request, every block of the device in each group, and how many requests hold it.

    ``beside``: the tap stands beside a connector that loads blocks, so the places of a load are not known yet."""
    scheduler = engine.scheduler
    pool = device_pool(state, source)
    told = pool.info.group
    mine = [slot for slot in state.slots.values() if slot.source == source]
    live = {slot.request: slot for slot in mine if slot.state is not SlotState.FINISHING}
    requests = {name: one for name, one in scheduler.requests.items() if not one.is_finished()}
    same("live requests", sorted(live), sorted(requests))
    unknown: set[int] = set()
    for name, request in requests.items():
        slot = live[name]
        blocks = list(scheduler.kv_cache_manager.get_block_ids(name)[told])
        if beside and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            unknown.update(blocks)
            continue
        held = [place for place in blocks if place]
        same(f"blocks before the window of {name}", slot.passed_blocks, len(blocks) - len(held))
        same(f"blocks of {name} ({request.status.name})", slot.device_blocks, held)
        if request.status is RequestStatus.RUNNING:
            # Drafts are counted here when the model has accepted them, and by the engine until it has refused them.
            computed = request.num_computed_tokens - engine.scheduled_drafts.get(name, 0)
            prefills = computed <= slot_target(slot, request)
            same(f"computed tokens of {name}", slot.computed_tokens(state.iteration), computed)
            expected = (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE)
            if name in scheduled:
                expected = (SlotState.PREFILLING if prefills else SlotState.DECODING, SlotState.DECODING)
        else:
            loaded = slot.state is SlotState.ONBOARDING and not slot.outstanding  # and there is no room to go on
            expected = (slot.state,) if loaded else tuple(STATES[request.status])
        if slot.state not in expected:
            raise Differs(f"state of {name}: {slot.state.label} shown, {request.status.name} in the engine")
    compare_places(engine, state, pool, unknown)


def compare_places(engine: Engine, state: CacheState, pool: PoolFacts, unknown: set[int]) -> None:
    """Every place: what it holds, in which group; and how many hold it."""
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    told, source = pool.info.group, pool.info.source
    mine = [slot for slot in state.slots.values() if slot.source == source]
    loaded = {place for slot in mine if slot.state is SlotState.ONBOARDING for place in slot.device_blocks} | unknown
    # A load goes on after the abort of its request, into blocks that the engine will never name.
    loaded.update(*(copy.targets for copy in state.operations.values() if copy.target_pool == pool.info.pool))
    others: dict[int, Counter[int]] = {}
    for block in blocks:
        group, theirs = (told, 0) if block.block_hash is None else cached(block)
        if group != told:
            others.setdefault(group, Counter())[theirs] += 1
            theirs = 0
        ours = pool.hash_of[block.block_id] if block.block_id < len(pool) else 0
        # What a load brings is named at its start here, and by the engine when the request is scheduled again.
        if not (theirs == 0 and block.block_id in loaded) and block.block_id not in unknown:
            same(f"content of place {block.block_id}", f"{ours:x}", f"{theirs:x}")
    for other in state.pools:
        if other.info.tier is Tier.G1 and other is not pool and other.info.source == source:
            held = Counter({key: len(other.places_of(key)) for key in other.by_hash})
            same(f"content of group {other.info.group}", held, others.pop(other.info.group, Counter()))
    same("groups", {}, others)
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    theirs_held = Counter(
        block.block_id for held in managers[told].req_to_blocks.values() for block in held
        if not block.is_null and block.block_id not in unknown
    )
    if len(managers) == 1:
        for block in blocks:  # a connector may hold blocks, too
            if not block.is_null and theirs_held[block.block_id] > block.ref_cnt:
                raise Differs(f"place {block.block_id} has more holders than references in the engine itself")
    same("references", Counter(
        place for slot in mine for place in slot.device_blocks if place not in unknown), theirs_held)
    if pool.info.capacity_blocks is not None:
        same("capacity", pool.info.capacity_blocks, sum(not block.is_null for block in blocks))
        same("first place", pool.info.first_place, min(block.block_id for block in blocks if not block.is_null))
        if not loaded and sum(block.ref_cnt > 0 for block in blocks if not block.is_null) == len(theirs_held):
            same("free places", available(pool), engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def compare_evictions(witness: Witness, events: list[ev.Event], state: CacheState, source: int = 1) -> int:
    """The evictions since the last look, each with the request that caused it. Returns their number."""
    pool = device_pool(state, source)
    theirs = Counter((key, name) for group, key, name in witness.evicted if group == pool.info.group)
    witness.evicted = []
    witness.names |= {event.slot: event.request for event in events if isinstance(event, ev.SlotOpened)}
    ours = Counter(
        (key, "" if slot is None else witness.names[slot]) for key, slot in evicted(events, state, source)
    )
    same("evictions", ours, theirs)
    return theirs.total()


def compare_below(engine: Engine, state: CacheState, source: int = 1) -> int:
    """The media below the device, against the events that the engine has published. Returns their blocks."""
    stored: dict[str, Counter[int]] = {}
    for batch in engine.batches:
        for event in batch.events:
            medium = getattr(event, "medium", None)
            if medium not in (None, "GPU"):
                for key in event.block_hashes:
                    name = short(key) if isinstance(key, bytes) else key & (2**64 - 1)
                    stored.setdefault(medium, Counter())[name] += 1 if type(event).__name__ == "BlockStored" else -1
    for pool in state.pools:
        if pool.info.tier is not Tier.G1 and pool.info.source == source:
            held = Counter({key: len(pool.places_of(key)) for key in pool.by_hash})
            same(f"content of {pool.info.medium}", held, +stored.pop(pool.info.medium, Counter()))
    same("media", {}, {medium: held for medium, held in stored.items() if +held})
    return sum(pool.resident_blocks for pool in state.pools if pool.info.tier is not Tier.G1)


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


def evicted(events: list[ev.Event], state: CacheState, source: int = 1) -> list[tuple[int, int | None]]:
    """(hash, slot that caused it) of every eviction from the device."""
    pool = device_pool(state, source).info.pool
    return [
        (key, event.for_slot) for event in events if isinstance(event, ev.BlocksEvicted) and event.pool == pool
        for key in unpack_hashes(event.hashes)
    ]


__all__ = ["BLOCK", "compare", "evicted", "removed_by_engine", "short"]
