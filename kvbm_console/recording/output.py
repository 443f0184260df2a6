"""New recordings: the names that they may take, writing a sealed recording at once, and tapes of tests.

A path that ends in ``.mcap`` is one sealed file; any other path is a directory of segments. A recorder writes a file as
the only segment of ``FILE.mcap.parts`` beside it, and the file takes its name when the segment is sealed. A killed
process leaves the parts, which ``rec recover`` makes whole.

Law of this file: a file gets its name when it is whole, durable and was read back, and never takes another file's name.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import RecordingError, UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import fold
from kvbm_console.recording.files import sync_directory
from kvbm_console.recording.format import About, Frame, Keyframe
from kvbm_console.recording.seal import write_draft
from kvbm_console.recording.segments import SealedSegment
from kvbm_console.wire.batches import pack_events, pack_stimuli

FILE_SUFFIX: Final = ".mcap"
_SEGMENT_BYTES: Final = 1 << 50
_SEGMENT_NS: Final = 1 << 62
"""A file is one segment, however large and long."""


def require_new(path: Path, flag: str = "") -> None:
    """Raise ``UsageError``, which begins with the flag, unless a recording can get this name."""
    prefix = f"{flag} " if flag else ""
    if path.suffix != FILE_SUFFIX:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{prefix}{path} is a file: a recording is a new file *.mcap or a directory")
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{prefix}{path} is not empty; nothing is overwritten")
    else:
        for taken_name in (path, path.with_name(f"{path.name}.parts")):
            if taken_name.exists():
                raise UsageError(f"{prefix}{taken_name} exists already; nothing is overwritten")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{prefix}{path} must be in a directory that exists")


def segment_file(path: Path, first_seq: int) -> Path:
    """The file of a recording that is written at once; its directory is made."""
    if path.suffix == FILE_SUFFIX:
        return path
    path.mkdir(parents=True, exist_ok=True)
    return path / f"{fmt.segment_name(1, first_seq)}{FILE_SUFFIX}"


class RecordingPath:
    """The directory that a recorder writes to, for a path that a person named."""

    def __init__(self, path: Path) -> None:
        self.file = path if path.suffix == FILE_SUFFIX else None
        self.directory = path.with_name(f"{path.name}.parts") if self.file is not None else path

    @property
    def settings(self) -> dict[str, Any]:
        """Further arguments of a ``Recorder``, because the parts of a file are one segment."""
        return {} if self.file is None else {"segment_bytes": _SEGMENT_BYTES, "segment_ns": _SEGMENT_NS}

    def finish(self, number: int = 1) -> Path | None:
        """The recorder is closed: name the file, the second file of a place ``FILE-2.mcap``.

        Returns where the recording is; None when the parts stay, because they are not one sealed segment.
        """
        if self.file is None:
            return self.directory
        segments = sorted(self.directory.glob(f"*{FILE_SUFFIX}"))
        if len(segments) != 1 or any(self.directory.glob("*.active")):
            return None
        file = self.file if number == 1 else self.file.with_stem(f"{self.file.stem}-{number}")
        segments[0].rename(file)
        sync_directory(file.parent)  # else a power loss could take the new name, when the parts are gone already
        shutil.rmtree(self.directory)
        return file


# --- writing a sealed recording ---------------------------------------------------------------------------------------


class Made(msgspec.Struct, frozen=True):
    """A recording that was written. If ``complete``, it holds stimuli, so its decisions replay too."""

    path: str
    first_seq: int
    last_seq: int
    first_ns: int
    last_ns: int
    bytes: int
    complete: bool

    @property
    def events(self) -> int:
        """The number of events that it spans."""
        return self.last_seq - self.first_seq + 1


def write_recording(path: Path, about: About, frames: Iterable[Frame]) -> Made:
    """Write a sealed recording of one file, or a directory that holds this file (``place``).

    Raises ``UsageError``, ``RecordingError`` and ``OSError``.
    """
    require_new(path)
    found = path.exists()
    file = segment_file(path, about.first_seq)
    draft = file.with_name(file.name + ".tmp")
    complete = False

    def watched() -> Iterator[Frame]:
        nonlocal complete
        for frame in frames:
            complete |= frame.channel == fmt.STIMULI
            yield from fmt.divided(frame)

    try:
        write_draft(draft, about, watched())
        segment = SealedSegment(draft)
        segment.verify_bytes()
        os.link(draft, file)  # unlike a rename it never takes the place of a file that came meanwhile
    except FileExistsError:
        raise UsageError(f"{path} exists already; nothing is overwritten") from None
    finally:
        draft.unlink(missing_ok=True)
        if file.parent == path and not found:
            with contextlib.suppress(OSError):  # not empty: the recording is in it
                path.rmdir()
    sync_directory(file.parent)
    times = [entry for entry in segment.entries if entry.events] or segment.entries
    return Made(
        str(path), about.first_seq, segment.next_seq - 1, times[0].first_ns, times[-1].last_ns, segment.size, complete
    )


def keyframe_frame(about: About, keyframe: Keyframe, at_ns: int) -> Frame:
    """The first frame of a recording: it repeats the preamble's metadata. ``divided`` encodes it."""
    at = about.clock_anchor_ns + at_ns
    return Frame(fmt.KEYFRAMES, keyframe.seq, 0, at, at, b"", msgspec.structs.replace(keyframe, about=about))


def end_frame(about: About, last_seq: int, at_ns: int) -> Frame:
    """The last frame: closed on purpose."""
    at = about.clock_anchor_ns + at_ns
    return Frame(fmt.MARKS, last_seq + 1, 0, at, at, fmt.encode_item(fmt.SegmentEnd(last_seq, False)))


def event_frame(about: About, events: list[Event]) -> Frame:
    """A batch of events, encoded anew."""
    chunk = pack_events(events)
    anchor = about.clock_anchor_ns
    return Frame(fmt.EVENTS, chunk.first_seq, chunk.count, anchor + chunk.base_ns, anchor + chunk.last_ns, chunk.data)


def stimulus_frame(about: About, stimuli: Sequence[Stimulus], first_seq: int) -> Frame:
    """A batch of stimuli, encoded anew; ``first_seq`` is the next event's."""
    chunk = pack_stimuli(stimuli)
    anchor = about.clock_anchor_ns
    return Frame(fmt.STIMULI, first_seq, chunk.count, anchor + chunk.base_ns, anchor + chunk.last_ns, chunk.data)


def write_dump(path: Path, about: About, state: CacheState, batches: list[list[Event]], last_ns: int) -> Made:
    """Write what a daemon still remembers: facts and the events behind them. Without stimuli the state replays, but no
    decisions.

    It begins ``last_ns`` before the last event, or with the facts when those are younger. ``state`` is folded forward.
    """
    require_new(path)
    if not batches:
        raise RecordingError("there is nothing to dump: the daemon has published no event since its snapshot")
    begin_ns = batches[-1][-1].at_ns - last_ns
    kept: list[list[Event]] = []
    for events in batches:
        at = 0
        if not kept:
            # Whole stimuli only: between the events of a stimulus an invariant may be open.
            at = next(
                (i for i, event in enumerate(events) if event.at_ns >= begin_ns and event.cause != (
                    events[i - 1].cause if i else state.n)), len(events),
            )
            fold(state, events[:at], path)
        if at < len(events):
            kept.append(events[at:])
    about = msgspec.structs.replace(about, first_seq=state.seq)
    at_ns = state.at_ns if not kept else min(state.at_ns, kept[0][0].at_ns)

    def frames() -> Iterator[Frame]:
        yield keyframe_frame(about, Keyframe(state.seq, False, encode_facts(state), b""), at_ns)
        for events in kept:
            yield event_frame(about, events)
        last = kept[-1][-1] if kept else None
        yield end_frame(about, state.seq - 1 if last is None else last.seq, at_ns if last is None else last.at_ns)

    return write_recording(path, about, frames())


# --- tapes: all stimuli and events of a leader ------------------------------------------------------------------------


EVENTS_MAX: Final = 1_000_000
"""Events that one tape holds: some hundred megabytes."""
FLUSH_STIMULI: Final = 256
CLOCK_ANCHOR_NS: Final = 1_767_225_600 * 10**9
"""2026-01-01: time 0 of a test's engine, so that equal tests give equal recordings."""


class Tape:
    """The stimuli and events of one leader, from the facts that it began with."""

    def __init__(self, leader: Leader) -> None:
        self.config: LeaderConfig = leader.config
        self.begin = encode_facts(leader.state)
        self.memory = leader.export()
        self.stimuli: list[Stimulus] = []
        self.outcomes: list[list[Event]] = []
        """The events of each stimulus."""
        self.events: list[Event] = []
        self.not_taped = 0
        """Events behind the end of a full tape."""

    def take(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """Add a stimulus with its events."""
        if self.not_taped or len(self.events) + len(outcome.events) > EVENTS_MAX:
            self.not_taped += len(outcome.events)
            return
        self.stimuli.append(stimulus)
        self.outcomes.append(list(outcome.events))
        self.events += outcome.events

    def state_at_begin(self) -> CacheState:
        """The facts that it began with, as a new object."""
        return decode_facts(self.begin)

    def save(self, path: Path, name: str, *, program: str = "pytest", label: str = "test") -> Path:
        """Write it as a recording of one file. Raises ``UsageError`` when nothing happened or the name is taken."""
        if not self.events:
            raise UsageError(f"{name}: no event happened, so there is nothing to record")
        first_seq = self.state_at_begin().seq
        about = About(
            program=program, incarnation=name[-200:], clock_anchor_ns=CLOCK_ANCHOR_NS, config=self.config,
            first_seq=first_seq, labels={label: name},
        )
        write_recording(path, about, self._frames(about, first_seq))
        return path

    def _frames(self, about: About, first_seq: int) -> Iterator[Frame]:
        yield keyframe_frame(about, Keyframe(first_seq, True, self.begin, self.memory), self.stimuli[0].at_ns)
        next_seq = first_seq
        for at in range(0, len(self.stimuli), FLUSH_STIMULI):
            yield stimulus_frame(about, self.stimuli[at : at + FLUSH_STIMULI], next_seq)
            events = [event for caused in self.outcomes[at : at + FLUSH_STIMULI] for event in caused]
            if events:
                yield event_frame(about, events)
                next_seq = events[-1].seq + 1
        yield end_frame(about, next_seq - 1, self.stimuli[-1].at_ns)
