"""Whole programs: simulating a part of the shared trace, folding what that recorded, following publishers.

These figures decide what a clever path is worth: it stays where it buys a quarter of one of them. All others are
guidance. The reference is a fixed mix of dict, list and msgpack work without code of ours, so a ratio compares two
commits on one machine. Without the shared trace (``KVBM_SHARED``) a generated load stands in, under another name.

Law of this file: a program runs as the command runs it, to its end.
"""

import random
from functools import cache
from typing import Final

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import AnyEvent, Event
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.stream import EventStream
from kvbm_console.planning.meter import Meter, StatsLine
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import build_rig, open_trace
from kvbm_console.simulator.embedded import Rig
from tests.benchmarks.harness import Figure, Target, measure
from tests.conftest import shared_directory
from tests.engines.payloads import batch, removed, stored

LONG_BLOCKS: Final = SimulateOptions(
    trace="", limit=300, block_size=512, total_kv_blocks=1_200, kv_cpu_blocks=2_400, kv_disk_blocks=6_000,
)
SHORT_BLOCKS: Final = SimulateOptions(
    trace="", limit=60, block_size=16, total_kv_blocks=16_000, kv_cpu_blocks=32_000, kv_disk_blocks=80_000,
)
"""Pools of a size at which all three tiers evict, or nearly so; 16-token blocks cost 32 times as much a request."""
PUBLISHERS: Final = 64
STEPS: Final = 20
CHAIN_BLOCKS: Final = 8
RESIDENT_BLOCKS: Final = 2_000
NUMBERS: Final = 20_000
"""What one reference works on."""


def _trace() -> tuple[str, str]:
    """A trace and its name in the table."""
    place = shared_directory()
    path = None if place is None else place / "traces" / "mooncake_conversation_trace.jsonl"
    if path is not None and path.is_file():
        return f"mooncake:{path}", "the shared trace"
    return "multiturn:sessions=50,system=2048,user=512,output=256,turns=8", "a generated load"


def _discard(line: StatsLine) -> None:
    """The command prints stats lines; here nobody reads them."""


def _rig(options: SimulateOptions) -> Rig:
    options = msgspec.structs.replace(options, trace=_trace()[0])
    return build_rig(options, open_trace(options), Meter(stats_every=options.stats_every, stats=_discard))


def yardstick() -> object:
    """Dicts, lists and msgpack, some milliseconds."""
    table = {key * 7: key for key in range(NUMBERS)}
    found = [table[key] for key in range(0, 7 * NUMBERS, 7)]
    for key in found:
        del table[key * 7]
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found))


def _simulate(options: SimulateOptions) -> Figure:
    return measure(
        f"simulate {_trace()[1]}, {options.block_size}-token blocks, a request", lambda: _rig(options).run_to_end(),
        options.limit or 1, "a fixed mix of dicts and lists", yardstick, NUMBERS, Target(ns=0.1e9), rounds=3, turns=1,
    )


@cache
def recorded() -> tuple[bytes, bytes, int]:
    """Facts before the run with 16-token blocks, its events as msgpack, and how many they are."""
    rig = _rig(SHORT_BLOCKS)
    facts = encode_facts(rig.leader.state)
    events: list[Event] = []
    rig.dispatcher.publish = lambda stimulus, outcome: events.extend(outcome.events)
    rig.run_to_end()
    return facts, msgspec.msgpack.encode(events), len(events)


def fold() -> Figure:
    """Per event, from bytes."""
    facts, data, count = recorded()
    decoder = msgspec.msgpack.Decoder(list[AnyEvent])

    def work() -> None:
        apply = decode_facts(facts).apply
        for event in decoder.decode(data):
            apply(event)

    return measure("fold a recording, an event", work, count, "a fixed mix of dicts and lists", yardstick, NUMBERS,
                   Target(ns=20_000), rounds=3, turns=1)


def follow() -> Figure:
    """Per batch of publishers that store and remove as many blocks."""
    rng = random.Random(3)
    dispatcher = Dispatcher(Leader(LeaderConfig()), lambda: 0)
    streams = [EventStream(dispatcher, source) for source in range(1, PUBLISHERS + 1)]
    for stream in streams:
        stream.accept(0, batch(stored(*(rng.getrandbits(63) | 1 for _ in range(RESIDENT_BLOCKS)))))
    chains = [[rng.getrandbits(63) | 1 for _ in range(CHAIN_BLOCKS)] for _ in range(STEPS)]
    there = [batch(stored(*chain)) for chain in chains]
    gone = [batch(*map(removed, chain)) for chain in chains]
    seq = 1

    def work() -> None:
        nonlocal seq
        for coming, going in zip(there, gone, strict=True):
            for stream in streams:
                stream.accept(seq, coming)
                stream.accept(seq + 1, going)
            seq += 2

    return measure("follow 64 publishers, a batch", work, 2 * STEPS * PUBLISHERS, "a fixed mix of dicts and lists",
                   yardstick, NUMBERS, Target(ns=200_000), rounds=3, turns=1)


BENCHES: Final = {
    "whole: simulate, 512-token blocks": lambda: _simulate(LONG_BLOCKS),
    "whole: simulate, 16-token blocks": lambda: _simulate(SHORT_BLOCKS),
    "whole: fold a recording": fold, "whole: follow publishers": follow,
}
