"""Segments open for reading, of which the last one may still be written.

A follower takes whole verified frames only. When the writer has begun the next segment, the one before it has its last
event; when a segment was sealed meanwhile, its sealed twin says the same and more.

Law of this file: frames that were seen stay where they are; a refresh only adds behind them.
"""

import errno
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.errors import CorruptRecording, RecordingError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.format import Frame, IndexEntry, SegmentEnd
from kvbm_console.recording.recover import segment_number
from kvbm_console.recording.scan import ENTRY_BYTES, frames_between, next_frame, read_preamble, scan_frames
from kvbm_console.recording.sealed import SealedSegment

WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Read at once: little beside the caches of a processor."""
WINDOW_BYTES_MAX: Final = fmt.FRAME_BYTES_MAX + WINDOW_BYTES
"""Read at once when a frame needs it: above the largest frame and the entry in front of it, so that every read gets
further."""


class ActiveSegment:
    """An open ``.active`` segment, every frame verified. What is appended later is seen after a ``refresh``.

    It is read and never mapped: a writer on a full disk takes the beginning of a frame back, and a page that is gone
    kills whoever looks at it.
    """

    sealed: Final = False

    def __init__(self, path: Path) -> None:
        """Raises ``RecordingError``, ``Torn`` when the writer died before its first frame."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
            self.size = os.fstat(self._fd).st_size
            preamble = self._read(0, fmt.PREAMBLE_BYTES_MAX)
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from None
        self.about, self._end_offset = read_preamble(preamble, path.name)
        self.entries: list[IndexEntry] = []
        self.next_seq = self.about.first_seq
        self.end: SegmentEnd | None = None
        self._damage_from: int | None = None
        """From where a valid frame would mean damage; behind all that counts, None when nothing was left over."""
        try:
            while self._take(self.size):
                pass
            damaged = self._is_damaged()
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from None
        if damaged:
            raise CorruptRecording(
                f"{path.name} is corrupt at byte {self._end_offset}: valid frames follow; "
                "'kvbm-console rec recover --salvage' keeps what is whole"
            )

    @property
    def torn_bytes(self) -> int:
        """Bytes behind the last whole frame."""
        return self.size - self._end_offset

    def frames(self, entry: IndexEntry) -> Iterator[Frame]:
        """The frames of one entry, in order. Raises ``CorruptRecording``."""
        try:
            data = self._read(entry.offset, entry.length)
        except OSError as error:
            raise RecordingError(f"cannot read {self.path}: {error.strerror}") from None
        return frames_between(data, 0, entry.length, self.path.name, at=entry.offset)

    def refresh(self) -> bool:
        """Take the frames that came since; whether there are any. Raises ``OSError`` when the file is gone."""
        if self.end is not None:
            return False
        if os.stat(self.path).st_ino != os.fstat(self._fd).st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        self.size = max(self._end_offset, os.fstat(self._fd).st_size)
        grown = False
        while self._take(self.size):
            grown = True
        return grown

    def _read(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0 and (part := os.pread(self._fd, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, size: int) -> bool:
        """Verify and index what follows, a window of it; whether that was anything."""
        open_entry = bool(self.entries) and not self.entries[-1].keyframe and self.entries[-1].length < ENTRY_BYTES
        kept = self.entries[:-1] if open_entry else self.entries
        base, first_seq = self._end_offset, self.next_seq
        if open_entry:
            base, first_seq = self.entries[-1].offset, self.entries[-1].first_seq
        now_ns = kept[-1].last_ns if kept else 0
        for window in (WINDOW_BYTES, WINDOW_BYTES_MAX):
            if self.end is not None or self._end_offset >= size:
                return False
            data = self._read(base, min(window, size - base))
            with memoryview(data) as view:
                found = scan_frames(data, view, self.about, 0, first_seq, now_ns)
            self._damage_from = base + found.end_offset if found.jump else base + found.end_offset + found.unreadable
            if base + found.end_offset > self._end_offset:
                break
            if base + len(data) >= size:
                return False
        else:
            return False
        self._end_offset = base + found.end_offset
        self.entries = kept + [msgspec.structs.replace(entry, offset=base + entry.offset) for entry in found.entries]
        self.next_seq, self.end = found.next_seq, found.end
        return True

    def _is_damaged(self) -> bool:
        """Whether a valid frame follows what does not count."""
        at = self._end_offset if self._damage_from is None else self._damage_from
        while at < self.size:
            data = self._read(at, WINDOW_BYTES_MAX)
            with memoryview(data) as view:
                if next_frame(data, view, 0, len(data)) is not None:
                    return True
            if at + len(data) >= self.size or len(data) <= fmt.FRAME_BYTES_MAX:
                return False
            at += len(data) - fmt.FRAME_BYTES_MAX
        return False


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
        ours = (path for path in last.parent.glob(f"*{suffix}") if segment_number(path))
        paths |= {path.stem: path for path in ours if path.stem > last.stem}
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
