"""Sealing turns a finished active segment into a compressed, indexed MCAP file; retention removes the oldest segments.

The library writes ``.mcap.tmp``. Then the draft is read back with all CRCs, compared frame by frame and renamed, and
only then the active file goes. A crash between any two of these steps leaves the active file, or both files with a
whole ``.mcap``.

Retention removes the oldest segments when a directory is too large, the disk too full, or they are too old. A segment
may go before it is sealed, because sealing can fall behind for as long as an engine is busy. A wall clock that is set
makes no segment older or younger while a recorder runs; its first look takes the ages of older runs from it. Drafts and
files that a salvage set aside count as bytes and are not removed. A reader that has a segment open keeps it.

Law of this file: an active segment goes after its sealed twin was compared with it and is durable, or as the oldest.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final, cast

from mcap.writer import CompressionType, Writer

from kvbm_console.core.errors import CorruptRecording, RecordingError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import FILE_MODE, lock_file, sync_directory
from kvbm_console.recording.format import About, Frame, IndexEntry, segment_number
from kvbm_console.recording.options import Retention
from kvbm_console.recording.scan import Buffer, EntryBuilder, Scan, frames_between, map_file, scan
from kvbm_console.recording.segments import SealedSegment
from kvbm_console.recording.threads import Worker

CHUNK_BYTES: Final = 256 * 1024
"""Decompressed bytes of a chunk: a reader decompresses whole chunks, and four times as much gains 1 % of size."""
LIBRARY_CHUNK_BYTES: Final = 2 * fmt.FRAME_BYTES_MAX
"""The size is above every chunk of ours, so the library never ends a chunk and our index knows all chunks."""
SEAL_NICENESS: Final = 15
"""Measured: sealing in a thread raises the recorder's p99.9 to 3.9 ms, in a process of low priority to 94 us."""
SEAL_RETRY_S: Final = 5.0
"""A process that could not be started is tried again this often."""
RETAIN_WHILE_SEALING_S: Final = 1.0
"""A sealing beside a busy engine can take minutes; the directory is looked at this often meanwhile."""

_CHILD: Final = "import sys; from kvbm_console.recording.seal import main; sys.exit(main(*sys.argv[1:]))"


def never() -> bool:
    """Seal to the end, however long that takes."""
    return False


class GivenUp(Exception):
    """Raised when sealing was told to give up; the active segment is as it was."""


class SegmentBusy(RecordingError):
    """Raised when another process writes, recovers or seals a segment, or when it is gone."""


class _Output:
    """The library's output: no ``RawIOBase``, which it would wrap in a buffer, and no short writes."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(path, flags, FILE_MODE)
        self._size = 0

    def write(self, data: bytes) -> int:
        """Write all of it or raise ``OSError``."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes written."""
        return self._size

    def flush(self) -> None:
        """Nothing is kept back."""


def seal_segment(path: Path, give_up: Callable[[], bool] = never) -> Path:
    """Seal one active segment and remove it; returns the new file.

    Raises ``SegmentBusy``, ``OSError``, and ``CorruptRecording`` when it is damaged or was not recovered. Each frame
    asks ``give_up``, and raises ``GivenUp`` if that is true.
    """
    fd = lock_file(path)
    if fd is None:
        raise SegmentBusy(f"{path} is being written, or is gone")
    try:
        return _seal_locked(path, give_up)
    finally:
        os.close(fd)


def try_seal(path: Path, give_up: Callable[[], bool] = never) -> bool:
    """Seal if possible; a segment that stays active is sealed later. False when it stayed."""
    try:
        seal_segment(path, give_up)
    except (RecordingError, OSError, GivenUp):
        return False
    return True


def _seal_locked(path: Path, give_up: Callable[[], bool]) -> Path:
    sealed, draft = path.with_suffix(".mcap"), path.with_suffix(".mcap.tmp")
    if sealed.exists():
        # Only a rename makes this name, after the comparison: a crash came between it and the removal.
        path.unlink()
        return sealed
    buffer = map_file(path)
    found = scan(buffer, path.name)
    if found.end_offset != found.size:
        raise CorruptRecording(f"{path.name} was not recovered: byte {found.end_offset} does not begin a frame")
    frames = _all_frames(buffer, found, path.name, give_up)
    try:
        write_draft(draft, found.about, frames)
        _compare(draft, found, _all_frames(buffer, found, path.name, give_up))
        os.rename(draft, sealed)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        raise
    sync_directory(path.parent)
    path.unlink()
    return sealed


def _all_frames(buffer: Buffer, found: Scan, name: str, give_up: Callable[[], bool]) -> Iterator[Frame]:
    start = found.entries[0].offset if found.entries else found.end_offset
    for frame in frames_between(buffer, start, found.end_offset, name):
        if give_up():
            raise GivenUp(name)
        yield frame


def write_draft(draft: Path, about: About, frames: Iterator[Frame]) -> None:
    """Write a whole sealed segment and sync it. Raises ``OSError``."""
    output = _Output(draft)
    try:
        writer = Writer(
            cast(IO[bytes], output), chunk_size=LIBRARY_CHUNK_BYTES, compression=CompressionType.ZSTD,
            enable_data_crcs=True,
        )
        writer.start(fmt.PROFILE, f"{fmt.LIBRARY} {about.program}".strip())
        writer.add_metadata(fmt.ABOUT_NAME, fmt.about_metadata(about))
        for schema in fmt.schemas():
            writer.register_schema(schema.name, schema.encoding, schema.data)
        for channel in fmt.channels():
            writer.register_channel(channel.topic, channel.message_encoding, channel.schema_id)
        entries = _write_frames(writer, output, about, frames)
        writer.add_attachment(0, 0, fmt.INDEX_NAME, "application/msgpack", fmt.encode_index(entries))
        writer.finish()  # type: ignore[no-untyped-call]
        os.fdatasync(output.fd)
    finally:
        os.close(output.fd)


def _write_frames(writer: Writer, output: _Output, about: About, frames: Iterator[Frame]) -> list[IndexEntry]:
    builder = EntryBuilder(about.clock_anchor_ns)
    entries: list[IndexEntry] = []
    filled = 0

    def end_chunk() -> None:
        nonlocal filled
        if builder.frames:
            at = output.tell()
            writer.flush()  # type: ignore[no-untyped-call]
            entries.append(builder.take(at, output.tell() - at))
        filled = 0

    for frame in frames:
        keyframe = frame.channel == fmt.KEYFRAMES
        if keyframe or max(filled, len(frame.data)) >= CHUNK_BYTES:
            end_chunk()
        builder.add(frame)
        writer.add_message(
            frame.channel, frame.log_ns, frame.data, frame.publish_ns, sequence=frame.first_seq & fmt.SEQ_MASK
        )
        filled += len(frame.data)
        if keyframe:
            end_chunk()
    end_chunk()
    return entries


def _compare(draft: Path, found: Scan, frames: Iterator[Frame]) -> None:
    """Read the draft back with all CRCs. Raises ``CorruptRecording`` unless it says exactly the same."""
    segment = SealedSegment(draft)
    segment.verify_bytes()
    same = segment.about == found.about
    for entry in segment.entries:
        for ours in segment.frames(entry):
            theirs = next(frames, None)
            same = same and theirs is not None and _same(ours, theirs)
    if not same or next(frames, None) is not None:
        raise CorruptRecording(f"{draft.name} differs from the segment that it was sealed from")


def _same(sealed: Frame, active: Frame) -> bool:
    # Counts of stimuli are not kept; all else is.
    return (
        sealed.channel == active.channel and sealed.first_seq == active.first_seq and sealed.end_seq == active.end_seq
        and sealed.log_ns == active.log_ns and sealed.publish_ns == active.publish_ns and sealed.data == active.data
    )


# --- in another process ----------------------------------------------------------------------------------------------


class BackgroundSealer:
    """Seals segments in turn in a process of low priority, and keeps the directory within its retention.

    A segment that cannot be sealed stays active until the next start. A process that cannot be started (no
    descriptors, no memory) is tried again after ``SEAL_RETRY_S``; ``failure`` says why until then.

    Law of this class: its thread ends by ``stop`` alone.
    """

    def __init__(self, directory: Path, retention: Retention, paths: list[Path], growth: Callable[[], int]) -> None:
        """``growth()`` is how many bytes the segment being written may still take."""
        self._seal_failure: str | None = None
        self._retain_failure: str | None = None
        self.removed_segments = 0
        """Files of segments that retention has removed."""
        self._directory, self._retention, self._growth = directory, retention, growth
        self._ages = Ages()
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while a process starts and while files are removed; the writing and the sealing thread do both."""
        self._child: subprocess.Popen[bytes] | None = None
        self._sealing: Path | None = None
        self._stopping = threading.Event()
        self.worker = Worker("recorder-seal", self._run)
        for path in paths:
            self._queue.put(path)

    @property
    def failure(self) -> str | None:
        """Why segments are not sealed or not removed at the moment, None when they are."""
        return self._seal_failure or self._retain_failure

    def add(self, path: Path) -> None:
        """Add a segment to the queue."""
        self._queue.put(path)

    def retain(self, growth: int | None = None) -> bool:
        """Make room for ``growth`` more bytes; for any thread. A directory that refuses is tried again later.

        False when so many bytes do not fit although all that may go is gone.
        """
        keep = self._retention.keep_bytes
        try:
            with self._lock:
                wanted = self._growth() if growth is None else growth
                if self._sealing is not None:
                    wanted += self._sealing_bytes(self._sealing)
                removed = retain(
                    self._directory, self._retention, growth=wanted, ending=self._abandon, ages=self._ages,
                )
                self.removed_segments += len(removed)
                fits = keep is None or used_bytes(self._directory) + wanted <= keep
        except OSError as error:
            self._retain_failure = f"segments are not removed: {error.strerror or error}"
            return True
        self._retain_failure = None
        return fits

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the child, which loses nothing, and the thread; False when the disk did not let it within the time."""
        self._stopping.set()
        self._queue.put(None)
        if self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            try:
                if self._sealing is not None:
                    self._abandon(self._sealing.stem)
            finally:
                self._lock.release()
        return self.worker.join(timeout_s)

    def _sealing_bytes(self, path: Path) -> int:
        """Bytes that the draft of a segment may still take: at most as many as its source has."""
        sizes = [0, 0]
        for place, part in enumerate((path, path.with_suffix(".mcap.tmp"))):
            with contextlib.suppress(FileNotFoundError):
                sizes[place] = part.stat().st_size
        return max(0, sizes[0] - sizes[1])

    def _abandon(self, stem: str) -> None:
        """End the sealing of this segment if it is being sealed; the caller holds the lock."""
        child, path = self._child, self._sealing
        if child is None or path is None or path.stem != stem:
            return
        child.kill()
        child.wait()
        path.with_suffix(".mcap.tmp").unlink(missing_ok=True)

    def has_room(self, path: Path, growth: int) -> bool:
        """True if a draft of this segment and ``growth`` bytes fit beside all that is there. Otherwise the segment
        stays active. Raises ``OSError``."""
        keep = self._retention.keep_bytes
        if keep is None:
            return True
        return used_bytes(self._directory) + growth + self._sealing_bytes(path) <= keep

    def _run(self) -> None:
        path: Path | None = None
        while not self._stopping.is_set():
            self.retain()
            with contextlib.suppress(queue.Empty):
                path = path or self._queue.get(timeout=RETAIN_EVERY_S)
                if path is None:
                    return
            if path is None:
                continue
            try:
                self._seal(path)
            except Exception as error:  # the edge of a thread: a later segment must find it alive
                self._seal_failure = f"segments are not sealed: {getattr(error, 'strerror', None) or error}"
                self._stopping.wait(SEAL_RETRY_S)
            else:
                self._seal_failure = path = None

    def _seal(self, path: Path) -> None:
        # -P: the working directory is not searched for modules.
        command = [sys.executable, "-P", "-c", _CHILD, str(path), str(os.getpid())]
        with self._lock:
            if self._stopping.is_set() or not path.exists() or not self.has_room(path, self._growth()):
                return
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._sealing = path
        child = self._child
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(RETAIN_WHILE_SEALING_S)
                self.retain()
        finally:
            with self._lock:
                self._child = self._sealing = None


def main(path: str, parent: str) -> int:
    """Entry of the child process."""
    os.nice(SEAL_NICENESS)
    return 0 if try_seal(Path(path), orphaned(int(parent))) else 1


def orphaned(parent: int) -> Callable[[], bool]:
    """True as soon as this process is no longer a child of ``parent``.

    A sealing that outlives its recorder would add a draft that the next recorder of the directory has no room for.
    """
    return lambda: os.getppid() != parent


# --- retention --------------------------------------------------------------------------------------------------------


RETAIN_EVERY_S: Final = 60.0
"""Ages are looked at this often; bytes also at every rotation and around every sealing."""
FREE_SEGMENTS: Final = 2
"""A directory with retention keeps room for so many segments free, because sealing writes up to 0.82 of its source
before the source goes."""


def _files(directory: Path) -> dict[Path, os.stat_result]:
    """The recorder's files in this directory."""
    found: dict[Path, os.stat_result] = {}
    for path in directory.iterdir():
        if segment_number(path):
            with contextlib.suppress(FileNotFoundError):  # sealed or given up while the directory was listed
                found[path] = path.stat()
    return found


class Ages:
    """The time since segments ended, which a wall clock that is set does not change.

    The wall clock is asked for the age of a segment when it is found behind another for the first time. From then on
    the monotonic clock counts. A segment that ended since the last look is at most as old as that look.
    """

    def __init__(self) -> None:
        self._ended_ns: dict[str, int] = {}
        self._looked_ns: int | None = None

    def look(self, ended: Mapping[str, int]) -> dict[str, int]:
        """Ages in nanoseconds. ``ended`` has the wall time of the last write of every segment but the last."""
        now_ns, wall_ns, looked_ns = time.monotonic_ns(), time.time_ns(), self._looked_ns
        known = self._ended_ns
        self._looked_ns, self._ended_ns = now_ns, {}
        for stem, at_ns in ended.items():
            since_ns = known.get(stem)
            if since_ns is None:
                since_ns = now_ns - max(0, wall_ns - at_ns)
                if looked_ns is not None:
                    since_ns = max(since_ns, looked_ns)
            self._ended_ns[stem] = since_ns
        return {stem: now_ns - since_ns for stem, since_ns in self._ended_ns.items()}


def used_bytes(directory: Path) -> int:
    """Bytes of the recorder's files in this directory. Raises ``OSError``."""
    return sum(found.st_size for found in _files(directory).values())


def free_bytes(directory: Path) -> int:
    """Bytes that the disk still takes."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def retain(
    directory: Path, retention: Retention, *, growth: int = 0, ending: Callable[[str], None] = lambda stem: None,
    ages: Ages | None = None, free: Callable[[Path], int] = free_bytes,
) -> list[Path]:
    """Remove the oldest segments until the rest and ``growth`` more bytes fit; returns the removed files.

    Whole segments go, and never the last, so the rest has no hole. The caller holds the directory's lock and writes the
    last segment, if any segment is being written. ``ending`` is called with the name of each segment before it goes.
    ``ages`` has what earlier calls learnt. Raises ``OSError``.
    """
    if not retention.wanted:
        return []
    files = _files(directory)
    total = growth + sum(found.st_size for found in files.values())
    room = free(directory)
    segments: dict[str, list[Path]] = {}
    # An .active sorts before its sealed twin, which a crash between rename and removal left beside it. It goes first:
    # a recovery would bring an .active back that stands alone.
    for path in sorted(files):
        if path.suffix in (".active", ".mcap"):
            segments.setdefault(path.stem, []).append(path)
    removed: list[Path] = []
    ended = {stem: files[segments[stem][-1]].st_mtime_ns for stem in list(segments)[:-1]}
    for stem, age_ns in (ages or Ages()).look(ended).items():
        paths = segments[stem]
        old = retention.keep_ns is not None and age_ns > retention.keep_ns
        large = retention.keep_bytes is not None and total > retention.keep_bytes
        tight = room < FREE_SEGMENTS * retention.segment_bytes
        if not (old or large or tight):
            break
        ending(stem)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= files[path].st_size
            room += files[path].st_size
            removed.append(path)
    return removed
