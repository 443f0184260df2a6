"""Loads of coding sessions: recorded ones of callanjfox/kv-cache-tester, many at a time.

A file ``trace_0003.json`` there is a session of one person with an agent: for each request the seconds since the
session began and the ids of its prompt's blocks of 64 tokens, which name blocks within the session alone. Files with
odd numbers are left out, because ``learned`` was developed on them.

A load is so many sessions, chosen and begun at random by its seed. Of a session the first half hour counts. Sessions
with a prompt above ``PROMPT_BLOCKS_MAX`` are left out, since the smallest cache holds two of the longest prompts.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.planning.cache_only import References

TOKENS: Final = 64
"""Of one of their blocks."""
PER_BLOCK: Final = 8
"""Their blocks in one of ours, which has 512 tokens as those of the other traces."""
PROMPT_BLOCKS_MAX: Final = 400
HALF_HOUR_S: Final = 1_800.0
MIXES: Final = ((80, 10), (80, 20), (120, 10), (120, 20))
"""Sessions, and the minutes within which they begin."""


class Asked(msgspec.Struct):
    """A request. That of a subagent has requests of its own instead of blocks."""

    t: float = 0.0
    hash_ids: list[int] = []
    requests: list["Asked"] = []


class Session(msgspec.Struct):
    """A file."""

    requests: list[Asked]


def prompts(asked: list[Asked]) -> Iterator[tuple[float, list[int]]]:
    """Seconds and blocks of each request within the first half hour; the last of eight ids names a block."""
    for one in asked:
        if one.t <= HALF_HOUR_S and len(one.hash_ids) >= PER_BLOCK:
            yield one.t, list(dict.fromkeys(one.hash_ids[PER_BLOCK - 1 :: PER_BLOCK]))
        yield from prompts(one.requests)


def coding_sessions(place: Path, seed: int, sessions: int, minutes: int) -> References:
    """A load of files in ``place``."""
    dice, rows = random.Random(seed), list[tuple[float, int, list[int]]]()
    files = [path for path in sorted(place.glob("trace_*.json")) if int(path.stem.removeprefix("trace_")) % 2 == 0]
    dice.shuffle(files)
    chosen = 0
    for path in files:
        found = list(prompts(msgspec.json.decode(path.read_bytes(), type=Session).requests))
        if chosen < sessions and found and max(len(blocks) for _, blocks in found) <= PROMPT_BLOCKS_MAX:
            chosen, began = chosen + 1, dice.random() * 60 * minutes
            rows += [(began + at, chosen, blocks) for at, blocks in found]
    rows.sort(key=lambda row: row[:2])
    names: dict[tuple[int, int], int] = {}
    keys = [[names.setdefault((session, block), len(names) + 1) for block in blocks] for _, session, blocks in rows]
    times = [round(at * SECOND_NS) for at, _, _ in rows]
    return References("coding sessions", PER_BLOCK * TOKENS, list(map(str, range(len(rows)))), times, keys)
