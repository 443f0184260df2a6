"""Figures of publishing under load: latency and share of a core at fixed rates, and our way beside vLLM's.

Law of this file: events come in bursts of a millisecond, as from an engine, into the broadcaster of a running event
loop; every subscriber is a task that reads frames until it has every event, or the figure fails. Latency is from the
burst to the frame in the subscriber's hands. The reference is the loop's own lateness while that goes on: a bare timer
per millisecond, which on a busy machine is most of the figure.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

import msgspec
import zmq

from kvbm_console.core.events import Event
from kvbm_console.core.leader import Leader
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.stream.broadcast import FLUSH_EVENTS_MAX, Broadcaster, Subscriber
from kvbm_console.stream.ring import Lost, Ring
from kvbm_console.wire.batches import pack_events
from tests.benchmarks import samples
from tests.benchmarks.harness import Figure, Target, measure

BURST_NS: Final = 1_000_000
FULL_RATE: Final = 1_000_000
SHORT_NS: Final = 300_000_000
LONG_NS: Final = 1_500_000_000
ROUNDS: Final = 3


class Load(msgspec.Struct):
    """What a run at a fixed rate showed, in nanoseconds."""

    latencies: list[int]
    lateness: list[int]
    cpu_ns: int
    events: int

    def quantile(self, hundredth: int, of: list[int]) -> float:
        """The latency that so many of a hundred keep."""
        return statistics.quantiles(of, n=100)[hundredth - 1]


async def _load(events: list[Event], stimulus: Stimulus, per_burst: int, gap_ns: int, subscribers: int) -> Load:
    loop = asyncio.get_running_loop()
    broadcaster = Broadcaster(Ring(next_seq=events[0].seq), time.monotonic_ns, later=loop.call_later)
    load = Load([], [], 0, len(events))
    sent: list[int] = []
    last = events[-1].seq + 1
    first = events[0].seq

    async def read(reader: Subscriber) -> None:
        while reader.cursor.position < last:
            await reader.wait()
            while (frame := reader.read()) is not None:
                assert not isinstance(frame, Lost), f"{frame.count} events were lost"
                at = (reader.cursor.position - 1 - first) // per_burst
                load.latencies.append(time.monotonic_ns() - sent[at])

    began, cpu = time.monotonic_ns(), time.process_time_ns()
    async with asyncio.TaskGroup() as group:
        for number in range(subscribers):
            group.create_task(read(broadcaster.subscribe(first, name=str(number))))
        await asyncio.sleep(0)
        for burst, at in enumerate(range(0, len(events), per_burst)):
            due = began + burst * gap_ns
            await asyncio.sleep(max(0, due - time.monotonic_ns()) / 1e9)
            load.lateness.append(time.monotonic_ns() - due)
            sent.append(time.monotonic_ns())
            broadcaster.publish(stimulus, events[at : at + per_burst])
    load.cpu_ns = time.process_time_ns() - cpu
    return load


@lru_cache
def _events(count: int) -> list[Event]:
    """So many contiguous events of ordinary traffic."""
    leader, made = Leader(samples.CONFIG), []
    for stimulus in samples.endless(samples.PLACES):
        made += leader.handle(stimulus).events
        if len(made) >= count:
            return made[:count]
    raise AssertionError("the traffic does not end")


def _run(rate: int, subscribers: int) -> Load:
    """The best of some runs, by its 99th percentile: the others had a neighbour."""
    spaced = rate < FULL_RATE // 10
    gap_ns = 1_000_000_000 // rate if spaced else BURST_NS
    per_burst = 1 if spaced else rate * BURST_NS // 1_000_000_000
    events = _events(per_burst * ((LONG_NS if spaced else SHORT_NS) // gap_ns))
    stimulus = samples.stimuli(1)[0]
    loads = [asyncio.run(_load(events, stimulus, per_burst, gap_ns, subscribers)) for _ in range(ROUNDS)]
    return min(loads, key=lambda load: load.quantile(99, load.latencies))


def _latency(name: str, rate: int, subscribers: int, hundredth: int, target_ns: float) -> Figure:
    load = _run(rate, subscribers)
    ours, bare = load.quantile(hundredth, load.latencies), load.quantile(hundredth, load.lateness)
    return Figure(name, ours, "a timer's lateness", bare, ours / bare, Target(ns=target_ns), compared=False)


def _share(subscribers: int) -> Figure:
    """The processor's time of one event, its readers' with it: 500 ns are half a core at a million a second."""
    load = _run(FULL_RATE, subscribers)
    events = _events(load.events)
    began = time.process_time_ns()
    for at in range(0, len(events), FLUSH_EVENTS_MAX):
        pack_events(events[at : at + FLUSH_EVENTS_MAX])
    encode = (time.process_time_ns() - began) / load.events
    ours = load.cpu_ns / load.events
    return Figure(f"1 M/s to {subscribers}, of a core", ours, "one batch encode", encode, ours / encode, Target(ns=500))


def beside_vllm() -> Figure:
    """Batches as the stimuli make them, to one subscriber; the reference encodes and sends each batch by itself."""
    script, leader = samples.stimuli(40), Leader(samples.CONFIG)
    outcomes = [(stimulus, leader.handle(stimulus).events) for stimulus in script]
    outcomes = [(stimulus, events) for stimulus, events in outcomes if events]
    count = sum(len(events) for _, events in outcomes)
    encoder = msgspec.msgpack.Encoder()
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher, context.socket(zmq.SUB) as subscriber:
        publisher.bind("inproc://events")
        subscriber.connect("inproc://events")
        subscriber.subscribe(b"")

        def work() -> None:
            broadcaster = Broadcaster(Ring(), time.monotonic_ns, later=lambda delay_s, flush: None)
            reader = broadcaster.subscribe(0)
            for stimulus, events in outcomes:
                broadcaster.publish(stimulus, events)
            broadcaster.flush()
            while reader.read() is not None:
                pass
            assert reader.cursor.received == count

        def reference() -> None:
            for seq, (stimulus, events) in enumerate(outcomes):
                payload = encoder.encode((stimulus.at_ns, events, 0))
                publisher.send_multipart((b"", seq.to_bytes(8, "big"), payload))

        return measure("publish an event, beside vLLM's way", work, count, "msgspec and ZMQ PUB per batch", reference,
                       count, Target(ratio=0.1))


BENCHES: Final[dict[str, Callable[[], Figure]]] = {
    "publish, beside vLLM": beside_vllm,
    "1 M/s to 1, p99": partial(_latency, "1 M/s to 1, p99", FULL_RATE, 1, 99, 20e6),
    "1 M/s to 10, p99": partial(_latency, "1 M/s to 10, p99", FULL_RATE, 10, 99, 20e6),
    "1 M/s to 10, of a core": partial(_share, 10),
    "100 k/s to 100, p99": partial(_latency, "100 k/s to 100, p99", FULL_RATE // 10, 100, 99, 50e6),
    "1,000/s evenly to 1, p50": partial(_latency, "1,000/s evenly to 1, p50", 1_000, 1, 50, 0.5e6),
}
