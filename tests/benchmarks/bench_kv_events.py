"""Figures of the event streams: a batch decoded, and a batch taken into the facts of a leader with a large pool."""

import random
from typing import Any, Final

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.stream import EventStream
from tests.benchmarks.harness import Figure, Target, measure
from tests.engines.payloads import batch, decode_batch, removed, stored

CHAINS: Final = 30
CHAIN_BLOCKS: Final = 20
POOL_BLOCKS: Final = 200_000
TARGET_NS: Final = 3_333
"""300,000 blocks a second."""


def _busy(rng: random.Random) -> tuple[bytes, int]:
    """A step that stores chains and evicts as many blocks one by one, as an engine under pressure does."""
    chains: list[Any] = [
        stored(*(rng.getrandbits(64) for _ in range(CHAIN_BLOCKS)), extra_keys=[None] * CHAIN_BLOCKS, group_idx=0)
        for _ in range(CHAINS)
    ]
    singles = [removed(rng.getrandbits(64)) for _ in range(CHAINS * CHAIN_BLOCKS)]
    return batch(*singles, *chains), 2 * CHAINS * CHAIN_BLOCKS


def decode() -> Figure:
    """Per block, tokens skipped unread."""
    payload, blocks = _busy(random.Random(1))
    return measure(
        "KV events, decode a block", lambda: decode_batch(payload), blocks, "the same as plain values",
        lambda: msgspec.msgpack.decode(payload), blocks, Target(ns=TARGET_NS),
    )


def into_facts() -> Figure:
    """Per block: decode, report, fold; the pool stays at its size."""
    rng = random.Random(2)
    dispatcher = Dispatcher(Leader(LeaderConfig()), lambda: 0)
    stream = EventStream(dispatcher, 1)
    stream.accept(0, batch(stored(*range(1, POOL_BLOCKS + 1))))
    keys = [rng.getrandbits(64) | 1 for _ in range(CHAIN_BLOCKS * CHAINS)]
    there = batch(*[stored(*keys[at : at + CHAIN_BLOCKS]) for at in range(0, len(keys), CHAIN_BLOCKS)])
    gone = batch(*[removed(key) for key in keys])
    seq = 1

    def work() -> None:
        nonlocal seq
        stream.accept(seq, there)
        stream.accept(seq + 1, gone)
        seq += 2

    def reference() -> None:
        decode_batch(there)
        decode_batch(gone)

    return measure(
        "KV events, a block into facts", work, 2 * len(keys), "decode alone", reference, 2 * len(keys),
        Target(ns=TARGET_NS),
    )


BENCHES: Final = {"KV events, decode a block": decode, "KV events, a block into facts": into_facts}
