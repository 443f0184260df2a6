"""One active segment: appends whole frames, or nothing.

Law of this file: after an append the file holds all its frames, after a refused one it ends where it ended before. So
what was counted as written is there, and what is there is readable.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbm_console.core.errors import RecordingError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import SegmentFile
from kvbm_console.recording.format import About, Frame
from kvbm_console.recording.scan import map_file, scan

OpenFile = Callable[[Path], SegmentFile]


def write_all(file: SegmentFile, buffers: Sequence[bytes]) -> int:
    """Write every byte, however many calls that takes; returns how many there were. Raises ``OSError``."""
    views: list[bytes | memoryview] = [buffer for buffer in buffers if buffer]
    total = sum(map(len, views))
    left = total
    while left:
        accepted = file.writev(views)
        if accepted <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))
        left -= accepted
        views = _rest(views, accepted)
    return total


def _rest(views: Sequence[bytes | memoryview], accepted: int) -> list[bytes | memoryview]:
    rest: list[bytes | memoryview] = []
    for view in views:
        if accepted >= len(view):
            accepted -= len(view)
            continue
        rest.append(memoryview(view)[accepted:] if accepted else view)
        accepted = 0
    return rest


class SegmentWriter:
    """A new active segment in ``directory``, with its preamble written. Raises ``OSError``, and then leaves no file."""

    def __init__(self, directory: Path, about: About, open_file: OpenFile = SegmentFile) -> None:
        self.about = about
        self.path = directory / f"{fmt.segment_name(about.segment, about.first_seq)}.active"
        self.file = open_file(self.path)
        self.broken = False
        """The end of the file could not be restored, or somebody else changed the file: only a new segment helps."""
        self.changed = False
        """Somebody else has removed or cut the file: frames that were appended are gone."""
        try:
            self.size = write_all(self.file, [fmt.encode_preamble(about)])
        except OSError:
            self.discard()
            raise

    def append(self, *frames: Frame) -> None:
        """Append the frames, in one write as far as the system takes it. Raises ``OSError``, then nothing is there."""
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        try:
            self.file.check(self.size)
        except OSError:
            self.broken = self.changed = True
            raise
        try:
            self.size += write_all(self.file, [part for frame in frames for part in fmt.encode_frame(frame)])
        except BaseException:
            try:
                self.file.truncate(self.size)
            except OSError:
                self.broken = True
            raise

    def survivors(self) -> int:
        """Cut a ``changed`` file behind its last whole frame; returns the number of the first event that is gone."""
        try:
            if os.stat(self.path).st_ino != os.fstat(self.file.fd).st_ino:
                return self.about.first_seq
            found = scan(map_file(self.path), self.path.name)
            self.file.truncate(found.end_offset)
        except (RecordingError, OSError):
            return self.about.first_seq
        return found.next_seq

    def discard(self) -> None:
        """Close and remove the file, as far as the system lets us."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
