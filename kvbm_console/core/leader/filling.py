"""Blocks become full: of an iteration that has ended, or of one that is being formed.

Law of this file: a block that is full has the hash of its slot's sequence, and none had a hash at its place before.
"""

import sys
from collections.abc import Sequence
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core.ids import EMPTY_HASH
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.tiers import PoolFacts, window_blocks

UNBOUNDED: Final = sys.maxsize


def fill(
    decider: Decider, pool: PoolFacts, spans: list[tuple[SlotFacts, int, int]], ids: list[int], hashes: list[int]
) -> None:
    """These checked device blocks are full: those of each of ``spans`` (slot, first block, end) in turn."""
    slots, counts = tuple([slot.slot for slot, _, _ in spans]), tuple([end - first for _, first, end in spans])
    decider.emit(ev.BlocksFilled, pool.info.pool, slots, counts, decider.ids(ids), decider.hashes(hashes))
    lower = decider.below(pool)
    reused = decider.memory.pools[pool.info.pool].reused
    if reused:
        for slot, _, _ in spans:
            _reuse(decider, pool, slot.slot)
    if decider.config.eviction.disk_admission > 1:  # prompts were counted when they arrived
        for slot, first, end in spans:
            decider.memory.name(slot.hashes[max(first, slot.prompt_blocks) : end])
    if lower is not None:
        for slot, first, end in spans:
            link_chain(decider, slot, first, end)
        if decider.config.offload_prompt_only or decider.config.offload_window_only:
            ids, hashes = _to_copy(decider, spans, ids), _to_copy(decider, spans, hashes)
        below = lower.by_hash
        if not below.keys().isdisjoint(hashes):
            ids = [place for place, key in zip(ids, hashes, strict=True) if key not in below]
        decider.live_memory.filled(pool, ids)
        decider.mark_dirty(pool)


def iteration_ended(decider: Decider, pool: PoolFacts) -> None:
    """Reused blocks without a copy below are unsaved as of now, behind those of slots whose blocks became full."""
    for slot in list(decider.memory.pools[pool.info.pool].reused):
        _reuse(decider, pool, slot)


def _reuse(decider: Decider, pool: PoolFacts, slot: int) -> None:
    mine, lower = decider.memory.pools[pool.info.pool], decider.below(pool)
    places = mine.reused.pop(slot, ())
    if lower is not None:
        decider.unsaved(pool, [
            place for place in places
            if place not in mine.planned and pool.hash_of[place] and pool.hash_of[place] not in lower.by_hash
        ])


def _to_copy(decider: Decider, spans: list[tuple[SlotFacts, int, int]], values: list[int]) -> list[int]:
    """Of the values of the blocks of these spans, those of blocks that may be copied down."""
    kept: list[int] = []
    at = 0
    for slot, first, end in spans:
        low, high = copied_blocks(decider, slot)
        kept += values[at + max(0, low - first) : at + max(0, min(end, high) - first)]
        at += end - first
    return kept


def copied_blocks(decider: Decider, slot: SlotFacts) -> tuple[int, int]:
    """The first block and the end of those of a slot that may be copied down."""
    config = decider.config
    if config.offload_window_only and config.lookup_window:
        end = max(0, slot.prompt_tokens - 1) // config.block_tokens
        return max(0, end - window_blocks(config.lookup_window, config.block_tokens)), end
    return 0, slot.prompt_blocks if config.offload_prompt_only else UNBOUNDED


def link_chain(decider: Decider, slot: SlotFacts, first: int, end: int) -> None:
    """Remember the parent of each of these blocks, so that a prefix is touched with its continuation."""
    hashes = slot.hashes
    first = max(first, 1)
    decider.memory.parent_of.update(zip(hashes[first:end], hashes[first - 1 : end - 1], strict=True))
    if decider.memory.parentless:
        decider.live_memory.show_chain(hashes[:end])


def being_filled(
    decider: Decider, pool: PoolFacts, ids: Sequence[int], hashes: Sequence[int], passed: int
) -> list[tuple[SlotFacts, int, int]]:
    """A prefix has these places and hashes from its block ``passed`` on. The slots, each with the first block and the
    end of those of its next blocks that must become full for that.

    An engine may name the blocks of a prompt when it forms the iteration that computes them. A request of the same
    iteration then uses them already.
    """
    if all(0 <= place < len(pool) and pool.hash_of[place] for place in ids):
        return []
    spans: list[tuple[SlotFacts, int, int]] = []
    covered: set[int] = set()
    for at, place, key in reversed(list(zip(range(passed, passed + len(ids)), ids, hashes, strict=False))):
        for slot in decider.state.slots.values() if place not in covered else ():
            first = slot.filled_blocks
            if slot.device_pool != pool.info.pool or slot.places(at, at + 1) != [place] or first > at:
                continue
            places, keys = slot.places(first, at + 1), slot.hashes[first : at + 1]
            if keys[-1:] == [key] and fills(pool, slot, places, keys):
                spans.append((slot, first, at + 1))
                covered.update(places)
                break
    return spans


def fill_spans(decider: Decider, pool: PoolFacts, spans: Sequence[tuple[SlotFacts, int, int]]) -> None:
    """These blocks count as full."""
    for slot, first, end in spans:
        fill(decider, pool, [(slot, first, end)], slot.places(first, end), slot.hashes[first:end])


def fills(pool: PoolFacts, slot: SlotFacts, ids: Sequence[int], hashes: Sequence[int]) -> bool:
    """True if these are the next blocks of the slot, empty so far, and of its own content."""
    first = slot.filled_blocks
    known = slot.hashes[first : first + len(ids)]
    return (
        bool(ids) and first <= len(slot.hashes) and slot.places(first, first + len(ids)) == ids
        and hashes[: len(known)] == known
        and EMPTY_HASH not in hashes and not any(pool.hash_of[place] for place in ids)
    )
