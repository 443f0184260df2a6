"""Figures of recordings: writing with real keyframes, sealed size, a window, opening at the end, the worst seek.

The run is the samples' traffic on a pool of 100,000 places, whose facts are as large as those of a host with a full
cache. ``KVBM_BENCH_EVENTS=10000000`` makes the promised ten million events, which takes some minutes; by default it is
a fifth: what opening and seeking cost hardly depends on it, since only the index grows.
"""

import atexit
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvbm_console.core.events import BlocksEvicted, BlocksFilled, Event
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.info import info_of
from kvbm_console.recording.playback import Playback
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.seal import seal_segment
from kvbm_console.recording.writer import Recorder
from kvbm_console.wire.batches import EventChunk, StimulusChunk, pack_events, pack_stimuli
from tests.benchmarks import samples
from tests.benchmarks.harness import Figure, Target

EVENTS: Final = int(os.environ.get("KVBM_BENCH_EVENTS", "2_000_000"))
WINDOWED: Final = 1_000_000
PLACES: Final = 100_000
FLUSH: Final = 1_000
"""Events of one flush under load."""
WRITTEN: Final = 300_000
SIZED: Final = 300_000
ROUNDS: Final = 5
SEEKS: Final = 12
"""The seeks with the longest way from their keyframe are measured."""
EVENT_BYTES: Final = 20
NAMED_BYTES: Final = 10
"""What a named block may add to an event's sealed size."""


class _Run:
    """A leader that decides the samples' traffic again and again, with places, names and hashes that go on."""

    def __init__(self) -> None:
        self.leader = Leader(samples.CONFIG)

    def flushes(self, events: int) -> Iterator[tuple[StimulusChunk, EventChunk]]:
        """Chunks of at least so many events."""
        stimuli: list[Stimulus] = []
        decided: list[Event] = []
        for stimulus in samples.endless(PLACES):
            stimuli.append(stimulus)
            decided += self.leader.handle(stimulus).events
            if len(decided) >= FLUSH:
                yield pack_stimuli(stimuli), pack_events(decided)
                stimuli, decided = [], []
                if self.leader.state.seq >= events:
                    return

    def keyframe(self) -> tuple[int, bytes, bytes]:
        """As a service's."""
        return self.leader.state.seq, encode_facts(self.leader.state), self.leader.export()


@lru_cache
def tape(events: int, *, with_stimuli: bool = True) -> Path:
    """A recording of so many events, made once and sealed, as a daemon leaves it."""
    place = tempfile.TemporaryDirectory(prefix="kvbm-bench-")
    atexit.register(place.cleanup)
    directory = Path(place.name)
    run = _Run()
    recorder = Recorder(
        directory, config=samples.CONFIG, incarnation="bench", keyframe=run.keyframe, sync_interval_s=None, seal=False
    )
    for number, (stimuli, chunk) in enumerate(run.flushes(events)):
        recorder.offer(stimuli if with_stimuli else None, chunk)
        if number % 100 == 0:
            recorder.settle(60.0)
    recorder.settle(60.0)
    assert recorder.status().not_recorded == 0
    recorder.close()
    for path in sorted(directory.glob("*.active")):
        seal_segment(path)
    return directory


def timed(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median nanoseconds of one call, of this process's processors: all threads, and not those of neighbours."""
    taken = []
    for _ in range(rounds):
        began = time.process_time_ns()
        work()
        taken.append(time.process_time_ns() - began)
    return statistics.median(taken)


def raw(directory: Path) -> Callable[[], object]:
    """Reads every byte of a recording, as it is."""
    return lambda: [path.read_bytes() for path in directory.glob("*.mcap")]


def write() -> Figure:
    """From encoded chunks to the file, keyframes taken, encoded and written; until the last one is there."""
    run = _Run()
    chunks = list(run.flushes(WRITTEN))
    count = run.leader.state.seq
    keyframes = position = 0

    def keyframe() -> tuple[int, bytes, bytes]:
        nonlocal keyframes
        keyframes += 1
        return position, encode_facts(run.leader.state), run.leader.export()

    def ours() -> None:
        nonlocal position
        position = 0
        with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as place:
            recorder = Recorder(
                Path(place) / "run", config=samples.CONFIG, incarnation="bench", keyframe=keyframe, seal=False,
                queue_bytes=2**40,
            )
            for stimuli, events in chunks:
                position = events.first_seq + events.count
                recorder.offer(stimuli, events)
            assert recorder.settle(60.0)
            assert recorder.written_seq == count - 1
            recorder.close()

    def theirs() -> None:
        with tempfile.TemporaryFile(buffering=0) as file:
            for stimuli, events in chunks:
                file.write(stimuli.data)
                file.write(events.data)

    ns, reference_ns = timed(ours) / count, timed(theirs) / count
    assert keyframes > ROUNDS
    return Figure("write, keyframes included", ns, "bare writes of the bytes", reference_ns, ns / reference_ns,
                  Target(ns=2_000))


def _sealed(name: str, *, with_stimuli: bool) -> Figure:
    directory = tape(SIZED, with_stimuli=with_stimuli)
    recording = Recording.open(directory)
    info = info_of(recording)
    named = sum(
        len(event.ids) // 4 for events in recording.events() for event in events
        if isinstance(event, BlocksFilled | BlocksEvicted)
    )
    plain = sum(len(frame.data) for frame in recording.frames() if frame.channel in (fmt.EVENTS, fmt.STIMULI))
    bound = EVENT_BYTES + NAMED_BYTES * named / info.events
    assert info.bytes_per_event is not None
    return Figure(name, info.bytes_per_event, "its bytes on the wire", plain / info.events,
                  info.bytes_per_event * info.events / plain,
                  Target(ratio=1) if with_stimuli else Target(ns=bound), unit="B")


def sealed_size() -> Figure:
    """Bytes of an event in a sealed recording, keyframes with it; the bound allows for named blocks."""
    return _sealed("sealed size of an event", with_stimuli=False)


def sealed_size_with_stimuli() -> Figure:
    """The same with the stimuli that caused them, as a daemon records."""
    return _sealed("sealed, with its stimuli", with_stimuli=True)


def window() -> Figure:
    """The events of 1 % of a million, decoded, in its middle."""
    directory = tape(WINDOWED)
    recording = Recording.open(directory)
    first, wanted = WINDOWED // 2, WINDOWED // 100

    def ours() -> None:
        got = 0
        for events in recording.events(first):
            got += len(events)
            if got >= wanted:
                return

    ns, reference_ns = timed(ours, 25), timed(raw(directory))
    return Figure("1 % window of a million events", ns, "every byte of the file", reference_ns, ns / reference_ns,
                  Target(ns=10_000_000))


def open_at_end() -> Figure:
    """Open the recording and have the facts at its end."""
    directory = tape(EVENTS)

    def ours() -> None:
        playback = Playback(Recording.open(directory))
        playback.seek(playback.last_seq)
        assert playback.at_end

    ns, reference_ns = timed(ours), timed(raw(directory))
    return Figure(f"open {EVENTS:,} events, show the end", ns, "every byte of the file", reference_ns,
                  ns / reference_ns, Target(ns=2_000_000_000))


def worst_seek() -> Figure:
    """The slowest of the seeks that have the longest way from a keyframe, without anything kept from before."""
    directory = tape(EVENTS)
    recording = Recording.open(directory)
    starts = [*recording.keyframe_seqs, recording.last_seq + 1]
    ways = sorted(((after - at, after - 1) for at, after in pairwise(starts)), reverse=True)
    worst = max(timed(partial(recording.state_at, seq), 3) for _, seq in ways[:SEEKS])
    shortest = timed(partial(recording.state_at, starts[len(starts) // 2]), 3)
    return Figure(f"worst seek in {EVENTS:,} events", worst, "the seek to a keyframe", shortest, worst / shortest,
                  Target(ns=300_000_000))


BENCHES: Final = {
    "write, keyframes included": write, "sealed size of an event": sealed_size,
    "sealed, with its stimuli": sealed_size_with_stimuli, "1 % window": window,
    "open at the end": open_at_end, "worst seek": worst_seek,
}
