"""Figures of the recorder: what recording costs the thread that publishes."""

import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.recording.writer import Recorder
from kvbm_console.stream.broadcast import Broadcaster
from kvbm_console.stream.ring import Ring
from kvbm_console.wire.batches import EventChunk, StimulusChunk
from tests.benchmarks import samples
from tests.benchmarks.harness import Figure, Target, measure
from tests.recording.helpers import Disk, Log, recorder_of

BATCHES: Final = 40
FLUSHES: Final = 400
ROUNDS: Final = 7


class _Restamped:
    """Offers the same chunks again and again under numbers that go on, as a running leader's would."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seq = 0
        self.n = 0

    def offer(self, stimuli: StimulusChunk | None, events: EventChunk | None) -> None:
        """As ``Recorder.offer``."""
        if stimuli is not None:
            stimuli = msgspec.structs.replace(stimuli, first_n=self.n)
            self.n += stimuli.count
        if events is not None:
            events = msgspec.structs.replace(events, first_seq=self.seq)
            self.seq += events.count
        self.recorder.offer(stimuli, events)


def recorder_on() -> Figure:
    """Publish, encode, keep and record, per event, with nobody subscribed."""
    script = samples.stimuli(BATCHES)
    leader = Leader(samples.CONFIG)
    outcomes = [(stimulus, leader.handle(stimulus).events) for stimulus in script]
    count = sum(len(events) for _, events in outcomes)
    facts, memory = encode_facts(leader.state), leader.export()
    with tempfile.TemporaryDirectory() as directory:
        restamped: _Restamped | None = None

        def keyframe() -> tuple[int, bytes, bytes]:
            return (restamped.seq if restamped is not None else 0), facts, memory

        recorder = Recorder(Path(directory) / "run", config=samples.CONFIG, incarnation="bench", keyframe=keyframe)
        restamped = _Restamped(recorder)

        def work() -> None:
            # As under an event loop that has not come round: the flush is due, and full chunks do not wait for it.
            broadcaster = Broadcaster(
                Ring(), time.monotonic_ns, on_flush=restamped.offer, later=lambda delay_s, flush: None
            )
            for stimulus, events in outcomes:
                broadcaster.publish(stimulus, events)
            broadcaster.flush()

        def reference() -> None:
            kept: deque[tuple[int, int, int, int]] = deque(maxlen=100_000)
            for _, events in outcomes:
                for event in events:
                    kept.append((event.seq, event.at_ns, event.cause, 0))

        try:
            return measure(
                "recorder on", work, count, "deque.append of a tuple", reference, count, Target(ns=200, ratio=2)
            )
        finally:
            recorder.close()


def _p99_ns(*, full: bool) -> float:
    """The 99th percentile of handing over a flush of a hundred events, to a disk that takes it or to a full one."""
    with tempfile.TemporaryDirectory() as directory:
        log, disk = Log(), Disk()
        recorder = recorder_of(log, Path(directory), open_file=disk.open, seal=False)
        flushes = [log.flush(100) for _ in range(FLUSHES)]
        if full:
            disk.free = 5_000
        taken = []
        for stimuli, events in flushes:
            began = time.perf_counter_ns()
            recorder.offer(stimuli, events)
            taken.append(time.perf_counter_ns() - began)
            time.sleep(0.0005)  # as far apart as a busy daemon's, so that the writing thread comes between
        recorder.close()
        return sorted(taken)[len(taken) * 99 // 100]


def disk_full() -> Figure:
    """F5: what the engine's side notices of a disk that is full, at the 99th percentile; the best of some rounds."""
    rounds = [(_p99_ns(full=True), _p99_ns(full=False)) for _ in range(ROUNDS)]
    ours, reference = (min(column) for column in zip(*rounds, strict=True))
    return Figure("flush to a full disk, p99", ours, "to one that takes it", reference, ours / reference,
                  Target(ratio=1.1))


BENCHES: Final = {"recorder on": recorder_on, "disk full": disk_full}
