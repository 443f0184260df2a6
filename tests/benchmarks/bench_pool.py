"""Figures of the pools: allocate, store and release through events, beside a silent linked-list pool.

Law of this file: *through events* means the whole way of a decision: the engine's pool decides, the event with its
columns is built, and ``CacheState.apply`` folds it, as a leader's does. The reference decides alone, without telling.
"""

import gc
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.columns import gather, pack_hashes, pack_ids, unpack_ids
from kvbm_console.core.ids import Authority, EvictRule, ReleaseReason, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY, PoolFacts, PoolInfo
from kvbm_console.simulator.device_pool import DevicePool
from tests.benchmarks.harness import Figure, Target, measure
from tests.benchmarks.linked_pool import LinkedPool

PLACES: Final = 4_096
LONG: Final = 2_048
"""Blocks of one call."""
PROMPT_BLOCKS: Final = 512
"""8,192 tokens."""
PAIRS: Final = 64
"""Requests that each take one block in the same iteration, and give it back one by one."""
MEMORY_BLOCKS: Final = 1_000_000
BLOCK_TOKENS: Final = 16
SPREAD: Final = 0x9E3779B97F4A7C15
"""Odd, so that multiples of it are different hashes all over the range."""
FINISHED: Final = ReleaseReason.FINISHED
REFERENCE: Final = "a silent linked pool"


class Evented:
    """A device pool whose decisions become facts by events."""

    def __init__(self, places: int, slots: int = 1) -> None:
        self.pool = DevicePool(places)
        self.state = CacheState()
        self.kept = 0
        self.emit(ev.PoolKnown, 0, 1, 0, 0, Tier.G1, "GPU", places, BLOCK_TOKENS, Authority.ENGINE)
        for slot in range(slots):
            self.emit(ev.SlotOpened, slot, f"request-{slot}", 1, b"", 16, 8, 0, None)

    def emit(self, kind: Callable[..., ev.Event], *fields: Any) -> None:
        """Build and fold one event."""
        state = self.state
        state.apply(kind(state.seq, 0, 0, *fields))

    def allocate(self, counts: Sequence[int]) -> list[list[int]]:
        """Blocks for slots 0, 1, ...: evictions, then one event for all."""
        facts = self.state.pools[0]
        parts = [self.pool.allocate(count) or [] for count in counts]
        ids = [block for part in parts for block in part] if len(parts) > 1 else parts[0]
        lost = facts.filled(ids)
        if lost:
            hashes = pack_hashes(gather(facts.hash_of, lost))
            self.emit(ev.BlocksEvicted, 0, pack_ids(lost), hashes, 0, EvictRule.REASSIGNED)
        self.emit(ev.DeviceBlocksAssigned, 0, tuple(range(len(counts))), tuple(counts), pack_ids(ids), 0, 0)
        return parts

    def store(self, ids: list[int], hashes: list[int]) -> None:
        """The blocks of slot 0 are full."""
        self.pool.store(ids, hashes)
        self.emit(ev.BlocksFilled, 0, (0,), (len(ids),), pack_ids(ids), pack_hashes(hashes))
        self.state.slots[0].hashes.clear()  # of one prompt after the other: only the pool is measured

    def release(self, slot: int, ids: list[int]) -> None:
        """A slot gives all its blocks back."""
        self.emit(ev.DeviceBlocksReleased, slot, pack_ids(ids), FINISHED)
        self.pool.release(ids)


def _cycle(pool: DevicePool, prompts: list[list[int]]) -> None:
    for hashes in prompts:
        ids = pool.allocate(len(hashes))
        assert ids is not None
        pool.store(ids, hashes)
        pool.release(ids)


def _linked_cycle(pool: LinkedPool, prompts: list[list[int]]) -> None:
    for hashes in prompts:
        blocks = pool.allocate(len(hashes))
        pool.store(blocks, hashes)
        pool.release(blocks)


def _evented_cycle(pool: Evented, prompts: list[list[int]]) -> None:
    for hashes in prompts:
        (ids,) = pool.allocate([len(hashes)])
        pool.store(ids, hashes)
        pool.release(0, ids)


def prompts_of(seed: int) -> list[list[int]]:
    """Hashes of prompts that are new whenever they come round again: they are more than the pool holds."""
    rng = Random(seed)
    return [[rng.getrandbits(64) | 1 for _ in range(PROMPT_BLOCKS)] for _ in range(4 * PLACES // PROMPT_BLOCKS)]


def unhashed_alone() -> Figure:
    """Blocks that nobody can find again, as of a prompt that is not cached; vLLM has been seen at 4.0 M blocks/s."""
    mine, theirs = DevicePool(PLACES), LinkedPool(PLACES)
    return measure(
        "pool, 2,048 unhashed blocks, a block", lambda: mine.release(mine.allocate(LONG) or []), LONG,
        REFERENCE, lambda: theirs.release(theirs.allocate(LONG)), LONG, Target(ratio=1 / 1.2),
    )


def unhashed() -> Figure:
    """The same through events."""
    mine, theirs = Evented(PLACES), LinkedPool(PLACES)

    def work() -> None:
        (ids,) = mine.allocate([LONG])
        mine.release(0, ids)

    return measure(
        "pool, unhashed, through events", work, LONG, REFERENCE, lambda: theirs.release(theirs.allocate(LONG)), LONG,
        Target(ratio=1 / 1.2),
    )


def hashed_alone() -> Figure:
    """Each call evicts as many cached blocks as it takes, and stores them under other hashes."""
    mine, theirs, prompts = DevicePool(PLACES), LinkedPool(PLACES), prompts_of(1)
    count = len(prompts) * PROMPT_BLOCKS
    return measure(
        "pool, hashed, evicting and storing, a block", lambda: _cycle(mine, prompts), count, REFERENCE,
        lambda: _linked_cycle(theirs, prompts), count, Target(ns=500),
    )


def hashed() -> Figure:
    """The same through events: four of them, each naming every block."""
    mine, theirs, prompts = Evented(PLACES), LinkedPool(PLACES), prompts_of(1)
    count = len(prompts) * PROMPT_BLOCKS
    return measure(
        "pool, hashed, through events", lambda: _evented_cycle(mine, prompts), count, REFERENCE,
        lambda: _linked_cycle(theirs, prompts), count, Target(ns=500),
    )


def singles() -> Figure:
    """One block for each of many requests, as when they decode; vLLM has been seen at 1.44 M pairs/s."""
    mine, theirs = Evented(PLACES, PAIRS), LinkedPool(PLACES)
    counts = [1] * PAIRS

    def work() -> None:
        for slot, ids in enumerate(mine.allocate(counts)):
            mine.release(slot, ids)

    def reference() -> None:
        for blocks in [theirs.allocate(1) for _ in counts]:
            theirs.release(blocks)

    return measure(
        "pool, one block taken and given back, events", work, PAIRS, REFERENCE, reference, PAIRS, Target(ratio=2)
    )


def _traced(make: Callable[[], object]) -> tuple[object, int]:
    """What ``make`` returns, and the bytes that it holds."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _full_pool() -> PoolFacts:
    pool = PoolFacts(PoolInfo(0, 0, 0, 0, Tier.G2, "CPU_PINNED", MEMORY_BLOCKS, BLOCK_TOKENS, Authority.LEADER))
    for at in range(0, MEMORY_BLOCKS, PROMPT_BLOCKS):
        ids = unpack_ids(pack_ids(range(at, min(at + PROMPT_BLOCKS, MEMORY_BLOCKS))))
        pool.store(ids, [(place + 1) * SPREAD % 2**64 for place in ids], READY, at)
    return pool


def memory() -> Figure:
    """Of a full pool of a million blocks, its index with it."""
    pool, total = _traced(_full_pool)
    assert isinstance(pool, PoolFacts)
    assert pool.counts[1] == MEMORY_BLOCKS
    index, index_bytes = _traced(lambda: {at * SPREAD % 2**64: at for at in range(MEMORY_BLOCKS // 10)})
    assert isinstance(index, dict)
    reference = index_bytes / len(index)
    return Figure("memory of a block, with the index", total / MEMORY_BLOCKS, "a dict of hashes alone", reference,
                  total / MEMORY_BLOCKS / reference, Target(ns=160), unit="B")


def columns() -> Figure:
    """What is true of each place, without the index."""
    info = PoolInfo(0, 0, 0, 0, Tier.G2, "CPU_PINNED", MEMORY_BLOCKS, BLOCK_TOKENS, Authority.LEADER)
    _, total = _traced(lambda: PoolFacts(info))
    reference = sys.getsizeof(array("Q", bytes(8 * MEMORY_BLOCKS)))
    return Figure("memory of a block, columns", total / MEMORY_BLOCKS, "its hash alone", reference / MEMORY_BLOCKS,
                  total / reference, Target(ns=32), unit="B")


BENCHES: Final = {
    "pool, unhashed": unhashed_alone, "pool, unhashed, through events": unhashed, "pool, hashed": hashed_alone,
    "pool, hashed, through events": hashed, "pool, one block": singles, "memory of a block, with the index": memory,
    "memory of a block, columns": columns,
}
