"""Segment files being written, and the locks of files and directories.

Every call of the operating system that recording needs stands here, so that tests can make each of them fail. There is
no user-space buffer anywhere, because a call's bytes must survive the death of this process.

Law of this file: an append leaves all its frames in the file, and a refused append leaves the file as it was before.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvbm_console.core.errors import RecordingError, UsageError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.format import About, Frame, Gap
from kvbm_console.recording.scan import map_file, scan

LOCK_NAME: Final = "lock"
FILE_MODE: Final = 0o600
"""Request ids and timing are private."""
DIRECTORY_MODE: Final = 0o700


class SegmentFile:
    """One segment being written. Every method may raise ``OSError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        # Held for as long as the file is written: sealing and recovery take the same lock first.
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def check(self, size: int) -> None:
        """Raises ``OSError`` unless the file still has a name and exactly ``size`` bytes.

        The system accepts writes to a removed file, and writes behind a hole to a file that was cut.
        """
        found = os.fstat(self.fd)
        if found.st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was removed", str(self.path))
        if found.st_size != size:
            raise OSError(errno.EIO, f"the file was changed from {size} to {found.st_size} bytes", str(self.path))

    def moved(self) -> bool:
        """True if its path does not name it any more: it or its directory was moved, and what is appended goes along.

        A disk that does not tell has not moved it.
        """
        try:
            return os.stat(self.path).st_ino != os.fstat(self.fd).st_ino
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def writev(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Append; returns how many bytes were accepted, which may be fewer than there are."""
        return os.writev(self.fd, buffers)

    def truncate(self, size: int) -> None:
        """Cut the file and go on writing at its new end."""
        os.ftruncate(self.fd, size)
        os.lseek(self.fd, size, os.SEEK_SET)

    def datasync(self) -> None:
        """Make everything accepted so far survive a power loss."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Give the descriptor and the lock back; twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make creations, renames and removals in the directory survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_directory(directory: Path) -> None:
    """Make a directory with its parents so that their names survive a power loss. Raises ``OSError``."""
    path = (directory, *directory.parents)
    there = next(at for at, each in enumerate(path) if each.exists())
    for each in reversed(path[: there + 1]):
        each.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a parent that is only passed through is made by somebody else
            sync_directory(each.parent)  # also for the one that was there: an earlier sync of its name may have failed


class DirectoryLock:
    """The right to write in a recording directory; held until ``release`` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Create the directory if need be and take the lock. Raises ``UsageError`` when it cannot be had."""
        self._directory = directory
        try:
            _make_directory(directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(directory / LOCK_NAME, flags, FILE_MODE)
        except OSError as error:
            why = f"its file {LOCK_NAME!r} is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise UsageError(f"cannot record to {directory}: {why}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(f"cannot lock {directory}: {error.strerror}") from None
            raise UsageError(f"{directory} is being recorded to by another process") from None

    def renew(self) -> None:
        """Take the lock again where the directory was moved or removed meanwhile. Raises ``OSError``."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._directory / LOCK_NAME).st_ino == os.fstat(self._fd).st_ino:
                return
        try:
            again = DirectoryLock(self._directory)
        except UsageError as error:
            raise OSError(errno.EBUSY, str(error)) from None
        self.release()
        self._fd, again._fd = again._fd, -1

    def release(self) -> None:
        """Give the lock back; twice is fine. The file stays: removing it would race with the next holder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lock_file(path: Path) -> int | None:
    """A descriptor that holds the lock of a segment, None when its writer or sealer holds it or it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us may have unlinked it: then our descriptor is of a file that has no name any more.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
    os.close(fd)
    return None


# --- appending whole frames -------------------------------------------------------------------------------------------


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
        """The end of the file could not be restored, or another process changed the file: only a new segment helps."""
        self.changed = False
        """Another process has removed or cut the file: appended frames are gone."""
        self.moved = False
        """It stands elsewhere by now, whole: the next segment begins where readers look for it."""
        self.gaps: list[Gap] = []
        """Gaps that were written to it."""
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
        self.moved = self.file.moved()

    def survivors(self) -> int:
        """Cut a ``changed`` file behind its last whole frame; returns the number of the first event that is gone."""
        try:
            if self.file.moved():
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
