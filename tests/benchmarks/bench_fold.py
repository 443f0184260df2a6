"""Figures of the fold: events into facts, with every check that ``CacheState.apply`` makes.

Law of this file: three mixes, because a mean over one of them says nothing about another. ``fold, small events`` are
requests of one block, so that an event names one slot and at most two blocks: its cost is that of the event.
``fold, blocks`` are prompts of 8,192 tokens: its cost is that of the block, and an item is one block named by one
event. ``fold, ordinary`` is what the other benchmarks run on.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from kvbm_console.core.columns import ID_BYTES
from kvbm_console.core.events import AnyEvent, Event
from kvbm_console.core.folding import APPLY
from kvbm_console.core.state import CacheState
from tests.benchmarks import samples
from tests.benchmarks.harness import Figure, Target, measure

BATCHES: Final = 20
LONG_PROMPT_BLOCKS: Final = 512


def blocks_named(events: list[Event]) -> int:
    """Blocks that these events name: each is one operation on a place."""
    return sum(len(getattr(event, "ids", b"")) for event in events) // ID_BYTES


def _fold(name: str, events: list[Event], items: int, target: Target) -> Figure:
    data = msgspec.msgpack.encode(events)
    decoder = msgspec.msgpack.Decoder(list[AnyEvent])

    def work() -> None:
        apply = CacheState().apply
        for event in events:
            apply(event)

    return measure(name, work, items, "msgpack decode alone", lambda: decoder.decode(data), items, target)


def fold_small() -> Figure:
    """At most two blocks an event."""
    events = samples.events(BATCHES, prompt_blocks=1)
    return _fold("fold, small events", events, len(events), Target(ns=1_000))


def fold_ordinary() -> Figure:
    """Four blocks a request, eight requests an iteration."""
    events = samples.events(BATCHES)
    return _fold("fold, ordinary", events, len(events), Target(ns=2_000))


def fold_blocks() -> Figure:
    """Per block, of long prompts that evict each other."""
    events = samples.events(3, prompt_blocks=LONG_PROMPT_BLOCKS, places=(LONG_PROMPT_BLOCKS + 1) * samples.BATCH)
    return _fold("fold, blocks", events, blocks_named(events), Target(ns=200))


def dispatch() -> Figure:
    """Events of any kind from bytes to the handler that the table names, which does nothing."""
    events = samples.events(BATCHES)
    data = msgspec.msgpack.encode(events)
    decoder = msgspec.msgpack.Decoder(list[AnyEvent])
    nothing: dict[type[Event], Callable[[CacheState, Event], None]] = dict.fromkeys(APPLY, lambda state, event: None)
    state = CacheState()

    def work() -> None:
        for event in decoder.decode(data):
            nothing[type(event)](state, event)

    count = len(events)
    return measure(
        "decode and dispatch an event", work, count, "msgpack decode alone", lambda: decoder.decode(data), count,
        Target(ns=1e9 / 3e6),
    )


BENCHES: Final = {
    "decode and dispatch": dispatch, "fold, small events": fold_small, "fold, ordinary": fold_ordinary,
    "fold, blocks": fold_blocks,
}
