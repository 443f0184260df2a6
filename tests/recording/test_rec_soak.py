"""F30: a long run at full speed: memory and descriptors stay where they are after the beginning.

The whole machine (simulated engine, leader, ring, recorder with retention, a subscriber that folds) takes a tenth of
the time that the stream alone takes, so there are two: one drives everything, one drives 10^8 encoded events through
ring and recorder. ``KVBM_SOAK_EVENTS`` sets another number for the second, a fiftieth of which is the first's.
"""

import gc
import os
import statistics
import time
from pathlib import Path

import msgspec
import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.leader import memory
from kvbm_console.core.snapshots import digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.options import Retention
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.writer import Recorder
from kvbm_console.service import LeaderService
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.embedded import default_engine_config, default_leader_config, embed, parse_workload
from kvbm_console.stream.broadcast import Broadcaster
from kvbm_console.stream.ring import Lost, Ring
from kvbm_console.wire.batches import EventChunk, StimulusChunk, unpack_events
from kvbm_console.wire.frames import batch_of
from tests.recording.helpers import Log

EVENTS = int(os.environ.get("KVBM_SOAK_EVENTS", "100_000_000"))
MACHINE_PART = 50
SAMPLES = 40
HOUR_EVENTS = 36_000_000
"""An hour of an engine with 10,000 events a second, which is a large one."""
HOUR_BYTES = 1_000_000
NOISE_BYTES = 6_000_000
"""What the allocator and the mapped files of a short run move by themselves."""
DESCRIPTORS = 4
"""A rotation holds the old file, the new one and the directory for a moment, a sealing its child."""

pytestmark = [
    pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(7_200),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc"),
]


class Meter:
    """Resident memory and descriptors at even distances of a run."""

    def __init__(self, events: int) -> None:
        self._step = events // SAMPLES
        self._next = self._step
        self.samples: list[tuple[int, int, int]] = []

    def look(self, events: int) -> None:
        """Sample when it is time."""
        if events >= self._next:
            self._next += self._step
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.samples.append((events, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))))

    def check(self) -> None:
        """Compare the second quarter with the last one."""
        quarter = len(self.samples) // 4
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        events = statistics.median(one[0] for one in late) - statistics.median(one[0] for one in early)
        grown = statistics.median(one[1] for one in late) - statistics.median(one[1] for one in early)
        print(f"{events:,.0f} events later: {grown / 1e6:+.2f} MB, descriptors {early[0][2]} to {late[-1][2]}")
        assert grown <= HOUR_BYTES * events / HOUR_EVENTS + NOISE_BYTES
        assert max(one[2] for one in late) <= max(one[2] for one in early) + DESCRIPTORS


def test_f30_the_whole_machine_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the leader remembers of blocks that are gone has a bound that this run would reach only near its end: with a
    # tenth of it, every memory is at its bound before the first quarter is over.
    monkeypatch.setattr(memory, "HISTORY_PART", memory.HISTORY_PART // 10)
    monkeypatch.setattr(memory, "LEFT_MAX", memory.LEFT_MAX // 10)
    events = EVENTS // MACHINE_PART
    workload = parse_workload("multiturn:seed=11")
    calendar = Calendar()
    service = LeaderService(default_leader_config(workload), calendar.clock)
    service.recorder = Recorder(
        tmp_path, config=service.config, incarnation=service.incarnation, keyframe=service.keyframe,
        facts=service.facts, segment_bytes=4_000_000, retention=Retention(keep_bytes=12_000_000),
    )
    service.start()
    rig = embed(service.dispatcher, calendar, default_engine_config(workload), workload)
    reader = service.broadcaster.subscribe(0)
    mirror = CacheState()
    meter = Meter(events)
    while service.state.seq < events:
        rig.run(calendar.clock() + 1_000_000_000)
        service.broadcaster.flush()
        while (frame := reader.read()) is not None:
            assert not isinstance(frame, Lost)
            for event in unpack_events(batch_of(frame)):
                mirror.apply(event)
        if not service.recorder._has_room(8_000_000):
            assert service.recorder.settle(60.0)  # as fast as the disk: one that falls behind would count a loss
        meter.look(service.state.seq)
    assert digest(mirror) == service.digest()[1]
    assert service.recorder.status().not_recorded == 0
    service.recorder.close()
    meter.check()


def test_f30_ring_and_recorder_do_not_grow(tmp_path: Path) -> None:
    log = Log()
    flushes = [log.flush(1_000, "x" * 30) for _ in range(20)]
    facts, memory = encode_facts(log.state), log.memory
    head = 0
    recorder = Recorder(
        tmp_path, config=LeaderConfig(), incarnation="soak", keyframe=lambda: (head, facts, memory),
        segment_bytes=50_000_000, retention=Retention(keep_bytes=400_000_000, segment_bytes=50_000_000),
    )
    ring, meter = Ring(), Meter(EVENTS)
    reader = Broadcaster(ring, time.monotonic_ns).subscribe(0)
    stimuli_seen = 0
    while head < EVENTS:
        for stimuli, events in flushes:
            # The bytes are old ones under new numbers: nobody decodes them here.
            first, stimuli_seen = head, stimuli_seen + stimuli.count
            head += events.count
            chunk = msgspec.structs.replace(events, first_seq=first)
            ring.append(EventChunk(first, chunk.count, chunk.base_ns, chunk.last_ns, chunk.data))
            recorder.offer(StimulusChunk(stimuli_seen, stimuli.count, 0, 0, stimuli.data), chunk)
        while (frame := reader.read()) is not None:
            assert not isinstance(frame, Lost)
        if not recorder._has_room(8_000_000):
            assert recorder.settle(60.0)  # as fast as the disk: a recorder that falls behind would count a loss
        meter.look(head)
    assert (reader.cursor.received, reader.cursor.lost) == (head, 0)
    assert recorder.settle(60.0)
    status = recorder.status()
    assert (status.written_seq, status.not_recorded) == (head - 1, 0)
    recorder.close()
    assert Recording.open(tmp_path).last_seq == head - 1
    meter.check()
