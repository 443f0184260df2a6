"""Reading recordings: any segment, any run of a directory, and the facts at any event.

A directory may hold several runs; one run is one incarnation, its segments continue each other. Opening reads
descriptions and indexes only; events are decoded when they are asked for.

Law of this file: nothing is skipped silently. Events that are missing lie inside a gap that ``gaps`` names, and facts
behind a gap are told only from the next keyframe on.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvbm_console.core.errors import CorruptRecording, KvbmConsoleError, NotFound, RecordingError
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import (
    decode_events,
    decode_keyframe,
    decode_state,
    decode_stimuli,
    fold,
    parts_of,
    unpack,
    unpacked_frames,
)
from kvbm_console.recording.format import (
    Frame,
    Gap,
    IndexEntry,
    Keyframe,
    Mark,
    SegmentEnd,
    Unpacker,
    segment_number,
)
from kvbm_console.recording.recover import active_segments
from kvbm_console.recording.scan import Torn
from kvbm_console.recording.segments import Segment, newer_segments, open_segment, refreshed
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

Item = SnapshotTaken | EventsArrived | GapSeen
"""Evidence in order. After a gap comes the next snapshot, or the end."""

MISSING: Final = "a segment is missing"
"""Reason of a gap between two segments of which the first ends with a rotation: the segment behind it was removed."""
PAUSED: Final = "nothing was recorded in between"
"""Reason of a gap between two segments of which the first was closed: recording was stopped and started again."""

OPEN_ATTEMPTS: Final = 3
"""A directory that is being recorded to seals one segment at a time: the second listing has its twin."""


class Recording:
    """One run, open for reading. Not thread-safe."""

    def __init__(
        self, path: Path, segments: list[Segment], runs: list[str], unreadable: Mapping[Path, str] | None = None
    ) -> None:
        self.path = path
        self.segments = segments
        self.runs = runs
        self.unreadable: Mapping[Path, str] = unreadable or {}
        """Damaged segments of the directory that stand in front of this run, with their errors."""
        about = segments[0].about
        self.config = about.config
        self.clock_anchor_ns = about.clock_anchor_ns
        """The wall clock, in nanoseconds since 1970, at the engine's time 0."""
        self.incarnation = about.incarnation
        self._index()

    def _index(self) -> None:
        segments = self.segments
        self._places = [(segment, entry) for segment in segments for entry in segment.entries]
        self._starts = [entry.first_seq for _, entry in self._places]
        self._keyframes = [index for index, (_, entry) in enumerate(self._places) if entry.keyframe]
        self.keyframe_seqs = [self._places[index][1].first_seq for index in self._keyframes]
        """Numbers of the events that keyframes precede, ascending."""
        self.gaps = _gaps(segments)
        self.first_seq = self.keyframe_seqs[0] if self.keyframe_seqs else segments[0].about.first_seq
        """The first event whose effect on the facts is known, which is the event behind the first keyframe."""
        self.last_seq = segments[-1].next_seq - 1

    @classmethod
    def open(cls, path: Path, run: str | None = None) -> "Recording":
        """A directory (its last run, or the run with this incarnation) or a file.

        Raises ``RecordingError``, and ``NotFound`` when it holds no such run.
        """
        if path.is_dir():
            return _open_directory(path, run)
        if not path.exists():
            raise RecordingError(f"{path} does not exist")
        segment = open_segment(path)
        held = segment.about.incarnation
        if run not in (None, held):
            raise NotFound(f"{path} holds the run {held!r} and not {run!r}")
        return cls(path, [segment], [held])

    @classmethod
    def of_daemon(cls, segment: Path, run: str) -> "Recording | None":
        """The whole run of a recorder that tells to write this segment; None when it is not on this machine or cannot
        be read."""
        try:
            return cls.open(segment.parent, run)
        except (KvbmConsoleError, OSError):
            return None

    def refresh(self) -> bool:
        """Read the new frames of the last segment, and newer segments. Returns whether the recording has grown.

        Everything that was known stays as it is; segments that were sealed or removed meanwhile stay readable.
        """
        last, grown = refreshed(self.segments[-1])
        newer = newer_segments(last.path, self.incarnation)
        if newer:
            # The writer begins a segment after the last event of the segment before, which is complete only now.
            last, more = refreshed(last)
            grown |= more
        if not grown and not newer:
            return False
        self.segments = [*self.segments[:-1], last, *newer]
        self._index()
        return True

    # --- identity ---

    @property
    def events_count(self) -> int:
        """Events that are in the recording: those in gaps do not count."""
        return sum(entry.events for _, entry in self._places)

    @property
    def entries(self) -> list[IndexEntry]:
        """The runs of frames that are read together, of all segments, in order."""
        return [entry for _, entry in self._places]

    @property
    def name(self) -> str:
        """The name of the file or the directory."""
        return self.path.name

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block, None in a recording whose writer did not know."""
        text = self.segments[0].about.labels.get(fmt.BLOCK_BYTES, "")
        return int(text) if text.isdecimal() and len(text) <= 18 else None

    @property
    def first_ns(self) -> int:
        """The engine's time of the first event."""
        return self._places[0][1].first_ns if self._places else 0

    @property
    def last_ns(self) -> int:
        """The engine's time of the last event."""
        return max((entry.last_ns for _, entry in self._places), default=0)

    @property
    def finished(self) -> bool:
        """True if the run was closed on purpose."""
        end = _end_of(self.segments[-1])
        return end is not None and not end.more

    @property
    def cut_off(self) -> bool:
        """True if the last segment ends with a rotation, so that the segment behind it was removed."""
        end = _end_of(self.segments[-1])
        return end is not None and end.more

    def seq_at(self, at_ns: int) -> int:
        """Number of the last event not later than ``at_ns``; the first number minus 1 when all are later."""
        index = bisect_right(self._places, at_ns, key=lambda place: place[1].first_ns) - 1
        if index < 0:
            return self.first_seq - 1
        segment, entry = self._places[index]
        found = entry.first_seq - 1
        for frame in segment.frames(entry):
            if frame.channel != fmt.EVENTS:
                continue
            if frame.publish_ns - segment.about.clock_anchor_ns <= at_ns:
                found = frame.end_seq - 1
                continue
            early = [event.seq for event in decode_events(frame, self.path) if event.at_ns <= at_ns]
            return early[-1] if early else found
        return found

    def density(self, cells: int) -> list[int]:
        """Events in each of ``cells`` equal parts of the engine's time, from heads of frames: no event is decoded."""
        counts = [0] * cells
        entries = [(segment, entry) for segment, entry in self._places if entry.events]
        if not entries or not cells:
            return counts
        begin = entries[0][1].first_ns
        span = max(1, entries[-1][1].last_ns - begin + 1)
        coarse = len(entries) >= 4 * cells
        for segment, entry in entries:
            if coarse:
                counts[min(cells - 1, (entry.first_ns - begin) * cells // span)] += entry.events
                continue
            anchor = segment.about.clock_anchor_ns
            for frame in segment.frames(entry):
                if frame.channel == fmt.EVENTS:
                    _spread(counts, frame, begin + anchor, span)
        return counts

    # --- content ---

    def frames(self, first_seq: int | None = None) -> Iterator[Frame]:
        """All frames in the order in which they were written, from the entry that holds ``first_seq`` on.

        Two segments have a ``Gap`` of ours between them if the second does not go on where the first ends. A
        packed keyframe is one frame.
        """
        return unpacked_frames(self._frames(first_seq), self.path)

    def _frames(self, first_seq: int | None) -> Iterator[Frame]:
        end_seq: int | None = None
        before: Segment | None = None
        for segment, entry in self._from(first_seq):
            if end_seq is not None and before is not None and entry.first_seq > end_seq:
                yield _missing(end_seq, entry, segment.about.clock_anchor_ns, _gap_reason(before))
            yield from segment.frames(entry)
            before, end_seq = segment, entry.end_seq

    def events(self, first_seq: int | None = None) -> Iterator[list[Event]]:
        """Events from ``first_seq`` on, by default all, in ordered batches. A gap lies between two batches."""
        for segment, entry in self._from(first_seq):
            if not entry.events:
                continue  # a keyframe on the way has megabytes
            for frame in segment.frames(entry):
                if frame.channel == fmt.EVENTS and (first_seq is None or frame.end_seq > first_seq):
                    events = decode_events(frame, self.path)
                    skipped = 0 if first_seq is None else max(0, first_seq - frame.first_seq)
                    yield events[skipped:] if skipped else events

    def _from(self, first_seq: int | None) -> list[tuple[Segment, IndexEntry]]:
        """The entries from the entry with ``first_seq`` on; all entries when None."""
        return self._places[0 if first_seq is None else max(0, bisect_right(self._starts, first_seq) - 1) :]

    def stimuli(self) -> Iterator[list[Stimulus]]:
        """All stimuli, in batches, in order."""
        for frame in self.frames():
            if frame.channel == fmt.STIMULI:
                yield decode_stimuli(frame, self.path)

    def keyframe(self, seq: int, *, complete: bool = False) -> Keyframe | None:
        """The last keyframe that is not behind event ``seq``, None when there is none. Raises ``CorruptRecording``."""
        index = bisect_right(self.keyframe_seqs, seq)
        for place in reversed(self._keyframes[:index]):
            if self._places[place][1].complete or not complete:
                return self._keyframe_at(place)
        return None

    def _keyframe_at(self, place: int) -> Keyframe:
        """The keyframe of this entry; the parts of a packed keyframe stand in the entries in front of the entry."""
        segment, entry = self._places[place]
        keyframe = _keyframe_of(segment, entry)
        if not keyframe.parts:
            return keyframe
        first, found = place, 0
        while found < keyframe.parts and first and self._places[first - 1][0] is segment:
            more = sum(1 for _ in parts_of(segment.frames(self._places[first - 1][1])))
            if not more:
                break
            first, found = first - 1, found + more
        # Read again, because together the parts may take more memory than what they hold.
        parts = (part for _, each in self._places[first:place] for part in parts_of(segment.frames(each)))
        unpacker = Unpacker()
        for part in islice(parts, max(0, found - keyframe.parts), None):
            unpacker.add(part)
        return unpack(keyframe, unpacker, segment.path)

    def keyframe_before(self, seq: int) -> int | None:
        """Number of the event that the last keyframe not behind event ``seq`` precedes."""
        index = bisect_right(self.keyframe_seqs, seq)
        return self.keyframe_seqs[index - 1] if index else None

    def next_keyframe(self, seq: int) -> int | None:
        """Number of the first event at or behind ``seq`` that a keyframe precedes."""
        index = bisect_left(self.keyframe_seqs, seq)
        return self.keyframe_seqs[index] if index < len(self.keyframe_seqs) else None

    def state_at(self, seq: int, visit: Callable[[CacheState], None] | None = None) -> CacheState:
        """The facts after event ``seq``; ``first_seq - 1`` gives those before the first event. ``visit`` as below.

        Raises ``RecordingError`` when ``seq`` is outside, or behind a gap and in front of the next keyframe.
        """
        if not self.first_seq - 1 <= seq <= self.last_seq:
            raise RecordingError(f"{self.path} has events {self.first_seq} to {self.last_seq}, not {seq}")
        keyframe = self.keyframe(seq + 1)
        if keyframe is None:
            raise RecordingError(f"{self.path} has no keyframe in front of event {seq}")
        return self.advance(decode_state(keyframe, self.path), seq, visit)

    def advance(self, state: CacheState, seq: int, visit: Callable[[CacheState], None] | None = None) -> CacheState:
        """Fold ``state`` forward to event ``seq``; ``visit`` is called with it after every batch on the way.

        Raises ``RecordingError`` when a gap lies between.
        """
        if state.seq <= seq:
            for events in self.events(state.seq):
                if events[0].seq != state.seq:
                    break
                fold(state, events if events[-1].seq <= seq else events[: seq + 1 - events[0].seq], self.path)
                if visit is not None:
                    visit(state)
                if state.seq > seq:
                    break
        if state.seq != seq + 1:
            raise RecordingError(f"the facts at event {seq} are unknown: it lies in a gap, or behind one")
        return state


# --- helpers ---------------------------------------------------------------------------------------------------------


def _keyframe_of(segment: Segment, entry: IndexEntry) -> Keyframe:
    for frame in segment.frames(entry):
        if frame.channel == fmt.KEYFRAMES:
            return decode_keyframe(frame, segment.path)
    raise CorruptRecording(f"{segment.path.name}: there is no keyframe at event {entry.first_seq}")


def _end_of(segment: Segment) -> SegmentEnd | None:
    """The mark that ends a segment, None when its writer was killed."""
    mark: Mark | None = None
    for frame in segment.frames(segment.entries[-1]) if segment.entries else ():
        mark = fmt.decode_mark(frame.data) if frame.channel == fmt.MARKS else None
    return mark if isinstance(mark, SegmentEnd) else None


def _gap_reason(before: Segment) -> str:
    """The reason why the next segment does not go on where this segment ends."""
    end = _end_of(before)
    return PAUSED if end is not None and not end.more else MISSING


def _missing(first_seq: int, following: IndexEntry, anchor_ns: int, reason: str) -> Frame:
    """The gap in front of a segment that does not go on where the segment before it ends."""
    gap = Gap(first_seq, following.first_seq - 1, reason)
    at = anchor_ns + following.first_ns
    return Frame(fmt.MARKS, first_seq, gap.count, at, at, fmt.encode_item(gap))


def _spread(counts: list[int], frame: Frame, begin_ns: int, span_ns: int) -> None:
    """Add the events of a batch to the cells between its first and last time, evenly."""
    cells = len(counts)
    first = max(0, min(cells - 1, (frame.log_ns - begin_ns) * cells // span_ns))
    last = max(first, min(cells - 1, (frame.publish_ns - begin_ns) * cells // span_ns))
    share, rest = divmod(frame.count, last - first + 1)
    for cell in range(first, last + 1):
        counts[cell] += share + (cell - first < rest)


# --- opening ---------------------------------------------------------------------------------------------------------


def _open_directory(directory: Path, run: str | None) -> Recording:
    for _ in range(OPEN_ATTEMPTS - 1):
        try:
            segments, unreadable = _open_segments(directory)
            break
        except _Moved:
            continue  # sealed or removed between listing and opening: its successor is listed now
    else:
        segments, unreadable = _open_segments(directory)
    if not segments:
        for error in unreadable.values():
            raise error
        raise RecordingError(f"{directory} holds no recording")
    runs = list(dict.fromkeys(segment.about.incarnation for segment in segments))
    wanted = runs[-1] if run is None else run
    if wanted not in runs:
        raise NotFound(f"{directory} holds no run {wanted!r}, but {', '.join(runs)}")
    ours = [segment for segment in segments if segment.about.incarnation == wanted]
    following = [segment.path.stem for segment in segments if segment.path.stem > ours[-1].path.stem]
    for path, error in unreadable.items():
        # A damaged segment names no run. In front of this run, or behind the next run, it belongs to another run.
        if ours[0].path.stem < path.stem and not (following and following[0] < path.stem):
            raise error
    return Recording(directory, ours, runs, {path: str(error) for path, error in unreadable.items()})


class _Moved(RecordingError):
    """Raised when a segment was sealed, or removed, after the directory was listed."""


def _open_segments(directory: Path) -> tuple[list[Segment], dict[Path, RecordingError]]:
    """The segments of a directory, and the error of each segment that cannot be opened.

    Beside the files that a recorder has named others are passed over; a directory without these is one into which
    whole recordings were put.
    """
    files = list(directory.glob("*.mcap"))
    sealed = {path.stem: path for path in files if segment_number(path)}
    # A crash between rename and removal leaves both files, of which the sealed file is whole.
    active = {path.stem: path for path in active_segments(directory) if path.stem not in sealed}
    if not sealed and not active:
        sealed = {path.stem: path for path in files}
    segments: list[Segment] = []
    unreadable: dict[Path, RecordingError] = {}
    for _, path in sorted({**active, **sealed}.items()):
        try:
            segments.append(open_segment(path))
        except Torn:
            continue  # the writer died before its first frame: there is nothing in it
        except RecordingError as error:
            if not path.exists():
                raise _Moved(str(error)) from None
            unreadable[path] = error
    return segments, unreadable


def _gaps(segments: list[Segment]) -> list[Gap]:
    """Stated gaps, with adjacent gaps merged, and the missing events between two segments."""
    gaps: list[Gap] = []
    before: Segment | None = None
    for segment in segments:
        found: list[Any] = [gap for entry in segment.entries for gap in entry.gaps]
        if before is not None and segment.about.first_seq > before.next_seq:
            found.insert(0, Gap(before.next_seq, segment.about.first_seq - 1, _gap_reason(before)))
        for gap in found:
            if gaps and gaps[-1].last + 1 == gap.first and gaps[-1].reason == gap.reason:
                gaps[-1] = Gap(gaps[-1].first, gap.last, gap.reason, gaps[-1].bytes + gap.bytes)
            else:
                gaps.append(gap)
        before = segment
    return gaps


class Items:
    """The items of a recording that may still be growing: ``new`` gives those that came since it was last called."""

    def __init__(self) -> None:
        self._known = False
        """True while the facts behind the last item are known."""
        self._lost: GapSeen | None = None
        """The gap in which the last item lies; it ends with the next keyframe."""
        self._seen: int | None = None
        """Number behind the last event that was taken, or is missing; None before the first."""

    def new(self, recording: Recording) -> Iterator[Item]:
        """The items up to the last frame of now. Raises ``CorruptRecording``."""
        old = self._seen
        for frame in recording.frames(None if old is None else max(0, old - 1)):
            if frame.channel == fmt.KEYFRAMES:
                if not self._known and (self._seen is None or frame.first_seq >= self._seen):
                    yield from self._keyframe(recording, decode_keyframe(frame, recording.path))
            elif old is not None and frame.end_seq <= old:
                continue
            elif frame.channel == fmt.EVENTS:
                yield from self._events(decode_events(frame, recording.path))
            elif frame.channel == fmt.MARKS:
                mark = fmt.decode_mark(frame.data)
                if isinstance(mark, fmt.Gap) and mark.count:
                    self._lost = GapSeen(mark.first if self._lost is None else self._lost.first, mark.last, mark.reason)
                    self._known, self._seen = False, mark.last + 1

    def _keyframe(self, recording: Recording, keyframe: Keyframe) -> Iterator[Item]:
        if self._lost is not None:
            yield GapSeen(self._lost.first, max(self._lost.last, keyframe.seq - 1), self._lost.reason)
        self._lost, self._known, self._seen = None, True, keyframe.seq
        yield SnapshotTaken(decode_state(keyframe, recording.path))

    def _events(self, events: list[Event]) -> Iterator[Item]:
        if self._known and events[0].seq != self._seen:
            assert self._seen is not None, "facts are known behind a keyframe"
            self._known, self._lost = False, GapSeen(self._seen, events[0].seq - 1, "events are missing")
        self._seen = events[-1].seq + 1
        if self._known:
            yield EventsArrived(events)
        elif self._lost is not None:
            self._lost = GapSeen(self._lost.first, events[-1].seq, self._lost.reason)

    def end(self, recording: Recording) -> Iterator[Item]:
        """Nothing follows: the gap at the end. Raises ``RecordingError`` when there were no facts at all."""
        if self._lost is not None:
            yield self._lost
        elif not self._known:
            raise RecordingError(f"{recording.path} has no keyframe: its facts are unknown")


def items_of(recording: Recording) -> Iterator[Item]:
    """The items of a recording. Raises ``RecordingError`` when it holds no facts at all."""
    items = Items()
    yield from items.new(recording)
    yield from items.end(recording)
