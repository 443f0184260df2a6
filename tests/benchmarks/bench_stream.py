"""Figures of the stream: encoding, and publishing to 1, 10 and 100 subscribers."""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvbm_console.core.events import Event
from kvbm_console.stream.broadcast import Broadcaster
from kvbm_console.stream.ring import Ring
from kvbm_console.wire.batches import pack_events
from tests.benchmarks import samples
from tests.benchmarks.harness import Figure, Target, measure

BATCH_EVENTS: Final = 1_000
"""A flush under load; the fixed cost of a batch has paid for itself from about 100 events on."""


def batches() -> list[list[Event]]:
    """Contiguous batches of events."""
    events = samples.events(120)
    return [events[at : at + BATCH_EVENTS] for at in range(0, len(events) - BATCH_EVENTS, BATCH_EVENTS)]


def encode() -> Figure:
    """One event in a batch, ready for ring, wire and file."""
    batch = batches()[0]
    encoder = msgspec.msgpack.Encoder()
    return measure(
        "encode", lambda: pack_events(batch), BATCH_EVENTS, "bare msgpack encode", lambda: encoder.encode(batch),
        BATCH_EVENTS, Target(ratio=1.5),
    )


def _publish(subscribers: int, target: Target) -> Callable[[], Figure]:
    def bench() -> Figure:
        parts = batches()
        total = sum(len(part) for part in parts)
        stimulus = samples.stimuli(1)[0]

        def work() -> None:
            broadcaster = Broadcaster(Ring(next_seq=0), time.monotonic_ns)
            readers = [broadcaster.subscribe(0) for _ in range(subscribers)]
            for part in parts:
                broadcaster.publish(stimulus, part)
                broadcaster.flush()
                for reader in readers:
                    while reader.read() is not None:
                        pass
            broadcaster.flush()
            for reader in readers:
                while reader.read() is not None:
                    pass
                assert (reader.cursor.received, reader.cursor.lost) == (total, 0)

        def alone() -> None:
            for part in parts:
                pack_events(part)

        return measure(
            f"publish to {subscribers}", work, total, "one batch encode", alone, total, target
        )

    return bench


BENCHES: Final = {
    "encode": encode,
    "publish to 1": _publish(1, Target(ratio=1.5)),
    "publish to 10": _publish(10, Target(ratio=1.5)),
    "publish to 100": _publish(100, Target(ratio=3)),
}
