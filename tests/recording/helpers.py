"""What the tests of recordings share: a disk that fails on request, small event logs, real runs.

Law of this file: a fault is injected where the system call would be; nothing of the recorder is replaced.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event, Noted
from kvbm_console.core.ids import Note
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import NoteReported, Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import SegmentFile, SegmentWriter
from kvbm_console.recording.format import Frame
from kvbm_console.recording.scan import frames_between, map_file, scan
from kvbm_console.recording.writer import Recorder
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.multiturn import Multiturn, Settings
from kvbm_console.wire.batches import EventChunk, StimulusChunk, pack_events, pack_stimuli


class Disk:
    """What the files of one recorder meet. Set an attribute, and the next call meets it."""

    def __init__(self) -> None:
        self.free: int | None = None
        """Bytes that still fit, None: any number."""
        self.short: int | None = None
        """Most bytes that one call accepts."""
        self.write_error: int | None = None
        self.sync_error: int | None = None
        self.truncate_error: int | None = None
        self.gate = threading.Event()
        """While it is clear, writes and syncs stand still."""
        self.gate.set()
        self.writes = 0
        """Calls so far."""
        self.synced: dict[Path, int] = {}
        """Bytes of each file that a power loss cannot take."""

    def open(self, path: Path) -> "FaultyFile":
        """What ``Recorder(open_file=...)`` wants."""
        return FaultyFile(path, self)


class FaultyFile(SegmentFile):
    """A segment on a ``Disk``."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.disk = disk
        super().__init__(path)

    def writev(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Accept what the disk lets through; a full one accepts a beginning first, as real ones do."""
        disk = self.disk
        disk.writes += 1
        disk.gate.wait()
        if disk.write_error is not None:
            raise OSError(disk.write_error, os.strerror(disk.write_error))
        data = b"".join(buffers)
        limits = [limit for limit in (disk.free, disk.short, len(data)) if limit is not None]
        accepted = min(limits)
        if accepted <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(self.fd, data[:accepted])
        if disk.free is not None:
            disk.free -= written
        return written

    def truncate(self, size: int) -> None:
        """Give the space back."""
        if self.disk.truncate_error is not None:
            raise OSError(self.disk.truncate_error, os.strerror(self.disk.truncate_error))
        if self.disk.free is not None:
            self.disk.free += os.fstat(self.fd).st_size - size
        super().truncate(size)

    def datasync(self) -> None:
        """Remember how far it came."""
        size = os.fstat(self.fd).st_size
        self.disk.gate.wait()
        if self.disk.sync_error is not None:
            raise OSError(self.disk.sync_error, os.strerror(self.disk.sync_error))
        super().datasync()
        self.disk.synced[self.path] = size


class FakeClock:
    """Monotonic nanoseconds that move when told."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        """Now."""
        return self.now_ns


class Log:
    """A run that is only notes, just as a leader would decide it: cheap, and every event number has other facts."""

    def __init__(self) -> None:
        self.state = CacheState()
        self.memory = Leader(LeaderConfig()).export()
        self.n = 0
        self.events: list[Event] = []

    def keyframe(self) -> tuple[int, bytes, bytes]:
        """As ``LeaderService.keyframe``."""
        return self.state.seq, encode_facts(self.state), self.memory

    def flush(self, count: int, text: str = "note") -> tuple[StimulusChunk, EventChunk]:
        """The chunks of ``count`` more stimuli with one event each."""
        stimuli: list[Stimulus] = []
        events: list[Event] = []
        for _ in range(count):
            at_ns = 1_000 * self.n
            stimuli.append(NoteReported(self.n, at_ns, 0, None, Note.ENGINE_SUMMARY, text))
            event = Noted(self.state.seq, at_ns, self.n, Note.ENGINE_SUMMARY, text)
            events.append(event)
            self.state.apply(event)
            self.n += 1
        self.events += events
        return pack_stimuli(stimuli), pack_events(events)


def recorder_of(log: Log, directory: Path, **options: Any) -> Recorder:
    """A recorder of a log, without a timer of its own for syncs."""
    usual: dict[str, Any] = {
        "config": LeaderConfig(), "incarnation": "run", "clock_anchor_ns": 10**18, "keyframe": log.keyframe,
    }
    return Recorder(directory, **{**usual, "sync_interval_s": None, **options})


def write_active(directory: Path, log: Log, sizes: Sequence[int], *, end: bool = True) -> Path:
    """An active segment with these flushes, made without threads; returns its path."""
    directory.mkdir(exist_ok=True)
    about = fmt.About(incarnation="run", clock_anchor_ns=10**18)
    segment = SegmentWriter(directory, about)
    seq, facts, memory = log.keyframe()

    def put(channel: int, first_seq: int, count: int, ns: int, data: bytes) -> None:
        segment.append(Frame(channel, first_seq, count, about.clock_anchor_ns + ns, about.clock_anchor_ns + ns, data))

    put(fmt.KEYFRAMES, seq, 0, 0, fmt.encode_item(fmt.Keyframe(seq, True, facts, memory, about)))
    for size in sizes:
        stimuli, events = log.flush(size)
        put(fmt.STIMULI, events.first_seq, stimuli.count, stimuli.base_ns, stimuli.data)
        put(fmt.EVENTS, events.first_seq, events.count, events.base_ns, events.data)
    if end:
        last_seq = log.state.seq - 1
        put(fmt.MARKS, last_seq + 1, 0, log.state.at_ns, fmt.encode_item(fmt.SegmentEnd(last_seq, False)))
    segment.file.close()
    return segment.path


def frames_of(path: Path) -> list[Frame]:
    """Every whole frame of an active segment."""
    buffer = map_file(path)
    found = scan(buffer, path.name)

    start = found.entries[0].offset if found.entries else found.end_offset
    return list(frames_between(buffer, start, found.end_offset, path.name))


def frame_ends(path: Path) -> list[int]:
    """Offsets behind the preamble and behind every frame."""
    buffer = map_file(path)
    found = scan(buffer, path.name)
    offset = found.entries[0].offset
    ends = [offset]
    for frame in frames_of(path):
        offset += fmt.MESSAGE_HEAD.size + len(frame.data) + fmt.CHECK.size
        ends.append(offset)
    return ends


class Run:
    """The stimuli of a real run, the events that they cause and a digest of the facts after each stimulus."""

    def __init__(self, config: LeaderConfig, stimuli: list[Stimulus], events: list[list[Event]]) -> None:
        self.config = config
        self.stimuli = stimuli
        self.events = events

    @property
    def all_events(self) -> list[Event]:
        """In order."""
        return [event for events in self.events for event in events]

    def state_after(self, seq: int) -> CacheState:
        """The facts after event ``seq``, folded from nothing."""
        state = CacheState()
        for event in self.all_events[: seq + 1]:
            state.apply(event)
        return state

    def record(
        self, directory: Path, flush_sizes: Sequence[int], on_flush: Callable[[Recorder], None] | None = None,
        **options: Any,
    ) -> Recorder:
        """Rerun it into a recorder with flushes of so many stimuli, again and again; returns the closed recorder."""
        leader = Leader(self.config)
        recorder = Recorder(
            directory, config=self.config, incarnation="run",
            keyframe=lambda: (leader.state.seq, encode_facts(leader.state), leader.export()),
            **{"clock_anchor_ns": 10**18, "sync_interval_s": None, **options},
        )
        at = turn = 0
        while at < len(self.stimuli):
            stimuli = self.stimuli[at : at + flush_sizes[turn % len(flush_sizes)]]
            events = [event for stimulus in stimuli for event in leader.handle(stimulus).events]
            recorder.offer(pack_stimuli(stimuli), pack_events(events) if events else None)
            at, turn = at + len(stimuli), turn + 1
            if on_flush is not None:
                on_flush(recorder)
        recorder.close()
        return recorder


@cache
def real_run(requests: int = 24, g1_blocks: int = 48, g2_blocks: int = 96) -> Run:
    """Some multi-turn chats through leader and simulated engine, with offloads, loads and preemptions."""
    config = LeaderConfig(block_tokens=16, g2_blocks=g2_blocks, offload_threshold=0.6)
    stimuli: list[Stimulus] = []
    events: list[list[Event]] = []

    def publish(stimulus: Stimulus, outcome: Outcome) -> None:
        stimuli.append(stimulus)
        events.append(list(outcome.events))

    settings = Settings(sessions=6, prompts=2, system=96, user=60, output=40, turns=3, think=0.2, requests=requests)
    engine = EngineConfig(g1_blocks=g1_blocks, max_batch_tokens=128, max_running=8)
    build(config, engine, Multiturn(settings), publish=publish).run_to_end()
    return Run(config, stimuli, events)
