"""Segments open for reading, of which the last one may still be written.

A follower takes whole verified frames only. When the writer has begun the next segment, the one before it has its last
event; when a segment was sealed meanwhile, its sealed twin says the same and more.

Law of this file: frames that were seen stay where they are; a refresh only adds behind them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.errors import CorruptRecording, RecordingError
from kvbm_console.recording.format import Frame, IndexEntry, SegmentEnd
from kvbm_console.recording.scan import frames_between, map_file, scan, scan_frames
from kvbm_console.recording.sealed import SealedSegment

REFRESH_BYTES_MAX: Final = 64 * 1024 * 1024
"""Read at once when a follower comes back: above the largest frame, so that it always gets further."""


class ActiveSegment:
    """An open ``.active`` segment, every frame verified. What is appended later is seen after a ``refresh``."""

    sealed: Final = False

    def __init__(self, path: Path) -> None:
        """Raises ``RecordingError``, ``Torn`` when the writer died before its first frame."""
        self.path = path
        try:
            self._buffer = map_file(path)
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from None
        found = scan(self._buffer, path.name)
        if found.resume_offset is not None:
            raise CorruptRecording(
                f"{path.name} is corrupt at byte {found.end_offset}: valid frames follow; "
                "'kvbm-console rec recover --salvage' keeps what is whole"
            )
        self.about, self.entries, self.size = found.about, found.entries, found.size
        self.torn_bytes = found.torn_bytes
        self.next_seq = found.next_seq
        self.end: SegmentEnd | None = found.end
        self._end_offset = found.end_offset

    def frames(self, entry: IndexEntry) -> Iterator[Frame]:
        """The frames of one entry, in order."""
        return frames_between(self._buffer, entry.offset, entry.offset + entry.length, self.path.name)

    def refresh(self) -> bool:
        """Take the frames that came since; whether there are any. Raises ``OSError`` when the file is gone."""
        if self.end is not None:
            return False
        last = self.entries[-1] if self.entries and not self.entries[-1].keyframe else None
        base = self._end_offset if last is None else last.offset
        # Read, not mapped: a writer on a full disk takes the beginning of a frame back, and the page with it.
        with self.path.open("rb") as file:
            file.seek(base)
            tail = file.read(REFRESH_BYTES_MAX)
        self.size = base + len(tail)
        if self.size <= self._end_offset:
            return False
        with memoryview(tail) as view:
            found = scan_frames(tail, view, self.about, 0, self.next_seq if last is None else last.first_seq)
        self.torn_bytes = found.torn_bytes
        if base + found.end_offset <= self._end_offset:
            return False
        self._end_offset = base + found.end_offset
        self._buffer = map_file(self.path, self._end_offset)
        kept = self.entries if last is None else self.entries[:-1]
        self.entries = kept + [msgspec.structs.replace(entry, offset=base + entry.offset) for entry in found.entries]
        self.next_seq, self.end = found.next_seq, found.end
        return True


Segment = ActiveSegment | SealedSegment


def open_segment(path: Path) -> Segment:
    """Open one segment by its name's ending. Raises ``RecordingError``."""
    return ActiveSegment(path) if path.suffix == ".active" else SealedSegment(path)


def refreshed(segment: Segment) -> tuple[Segment, bool]:
    """The segment with what came since, and whether something did; its sealed twin when it was sealed meanwhile."""
    if isinstance(segment, SealedSegment):
        return segment, False
    try:
        return segment, segment.refresh()
    except FileNotFoundError:
        try:
            twin = SealedSegment(segment.path.with_suffix(".mcap"))
        except RecordingError:
            return segment, False  # removed with its directory: what was seen stays
        return twin, True
    except OSError:
        return segment, False


def newer_segments(last: Path, incarnation: str) -> list[Segment]:
    """The segments of the same run that stand behind ``last`` in its directory."""
    paths: dict[str, Path] = {}
    for suffix in (".active", ".mcap"):  # a crash between rename and removal leaves both: the sealed one is whole
        paths |= {path.stem: path for path in last.parent.glob(f"*{suffix}") if path.stem > last.stem}
    found: list[Segment] = []
    for _, path in sorted(paths.items()):
        try:
            segment = open_segment(path)
        except (RecordingError, OSError):
            # Begun this moment, sealed this moment, or damaged: what is behind it is seen when it can be.
            return found
        if segment.about.incarnation == incarnation and segment.entries:
            found.append(segment)
    return found
