"""What the benchmarks run on: the stimuli of a small engine, and the events that a leader makes of them.

Law of this file: deterministic, and made of ordinary traffic: arrivals, lookups, allocations, iterations, finishes.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Final

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.ids import Authority, FinishReason, Tier
from kvbm_console.core.leader import Leader

BLOCK_TOKENS: Final = 16
PLACES: Final = 4_096
CONFIG: Final = LeaderConfig(block_tokens=BLOCK_TOKENS)
SOURCE: Final = 1
PROMPT_BLOCKS: Final = 4
BATCH: Final = 8
"""Requests that run side by side."""


def traffic(batches: int | None, prompt_blocks: int, places: int) -> Iterator[st.Stimulus]:
    """``batches`` times eight requests (None: for ever): admitted, prefilled, decoded for a while, finished."""
    n = 0

    def make(kind: type[st.Stimulus], *fields: object) -> st.Stimulus:
        nonlocal n
        n += 1
        return kind(n - 1, (n - 1) * 1_000, SOURCE, None, *fields)  # 1 us apart

    yield make(st.PoolDeclared, 0, 0, Tier.G1, "GPU", places, BLOCK_TOKENS, Authority.ENGINE)
    iteration, place, key = 0, 0, 1
    for batch in count() if batches is None else range(batches):
        names = tuple(f"session-{batch:05}.{turn}" for turn in range(BATCH))
        ids, hashes = [], []
        for name in names:
            mine = [(place + block) % places for block in range(prompt_blocks + 1)]
            place += prompt_blocks + 1
            ids.append(mine)
            hashes.append([key + block for block in range(prompt_blocks)])
            key += prompt_blocks
            yield make(st.RequestArrived, name, pack_hashes(hashes[-1]), prompt_blocks * BLOCK_TOKENS, 8, 0, None)
            yield make(st.MatchRequested, name, 0)
            yield make(st.BlocksAllocated, name, pack_ids(mine), 0)
        iteration += 1
        positions = tuple(prompt_blocks * BLOCK_TOKENS for _ in names)
        yield make(st.IterationScheduled, iteration, 1, names, (), (), (), (), (), names, positions, (), (), b"",
                   BATCH, 0)
        filled = pack_ids([one for mine in ids for one in mine[:prompt_blocks]])
        yield make(st.IterationFinished, iteration, names, tuple(prompt_blocks for _ in names), filled,
                   pack_hashes([one for mine in hashes for one in mine]))
        iteration += 1
        yield make(st.IterationScheduled, iteration, 1, (), (), (), (), (), names, (), (), (), (), b"", BATCH, 0)
        for _ in range(6):
            iteration += 1
            yield make(st.IterationScheduled, iteration, 1, (), (), (), (), (), (), (), (), (), (), b"", BATCH, 0)
        for name, mine in zip(names, ids, strict=True):
            yield make(st.RequestFinished, name, pack_ids(mine), FinishReason.LENGTH)


def endless(places: int) -> Iterator[st.Stimulus]:
    """The same traffic without an end, on a pool of so many places."""
    return traffic(None, PROMPT_BLOCKS, places)


@lru_cache
def stimuli(batches: int, prompt_blocks: int = PROMPT_BLOCKS, places: int = PLACES) -> list[st.Stimulus]:
    """``batches`` times eight requests: admitted, prefilled, decoded for some iterations, finished."""
    return list(traffic(batches, prompt_blocks, places))


@lru_cache
def events(batches: int, prompt_blocks: int = PROMPT_BLOCKS, places: int = PLACES) -> list[Event]:
    """The events that a leader makes of them."""
    leader = Leader(CONFIG)
    return [event for stimulus in stimuli(batches, prompt_blocks, places) for event in leader.handle(stimulus).events]
