"""Recovery: makes the segments of a killed writer whole, and rebuilds a damaged index.

A torn tail is cut off, because it was never acknowledged. Damage in front of valid frames is refused. A salvage keeps
all whole frames, puts a ``Gap`` where bytes were cut out, and leaves the damaged file beside it. A sealed segment whose
index or summary is damaged is written anew from its chunks with right CRCs.

Law of this file: a byte is removed only when no valid frame follows it, or when the caller asked for a salvage.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from mcap.opcode import Opcode

from kvbm_console.core.errors import CorruptRecording, RecordingError, UsageError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import parts_of
from kvbm_console.recording.files import DirectoryLock, SegmentFile, lock_file, sync_directory, write_all
from kvbm_console.recording.format import About, Frame, Gap, segment_number
from kvbm_console.recording.scan import (
    Buffer,
    NotARecording,
    Scan,
    Torn,
    frame_at,
    map_file,
    next_frame,
    read_preamble,
    scan,
)
from kvbm_console.recording.seal import write_draft
from kvbm_console.recording.segments import SealedSegment, chunk_messages, sealed_about
from kvbm_console.wire.batches import MalformedBatch, event_chunk, unpack_stimuli

DAMAGED_SUFFIX: Final = ".damaged"

Progress = Callable[[str, int, int], None]
"""(step, done, total): called now and then during a long step."""


class Recovered(msgspec.Struct, frozen=True):
    """The outcome of the recovery of one active segment."""

    path: Path
    outcome: str
    """``whole``, ``truncated``, ``removed`` (empty, or already sealed), ``salvaged``, ``set_aside`` (not even its
    description survived), ``busy`` or ``damaged``."""
    torn_bytes: int = 0
    first_seq: int = 0
    next_seq: int = 0
    gaps: tuple[Gap, ...] = ()
    error: str | None = None


class Leftovers(msgspec.Struct, frozen=True):
    """The leftovers that a recorder found in its directory."""

    next_segment: int
    to_seal: list[Path]
    recovered: list[Recovered]


def prepare_directory(directory: Path) -> Leftovers:
    """Drop drafts and recover active segments, under the lock of a recorder that begins. Damaged segments stay.

    Raises ``OSError``.
    """
    recovered = recover_directory(directory, strict=False)
    numbers = [segment_number(path) for path in directory.iterdir()]
    to_seal = [segment.path for segment in recovered if segment.outcome in ("whole", "truncated")]
    return Leftovers(max(numbers, default=0) + 1, to_seal, recovered)


class Prepared(msgspec.Struct, frozen=True):
    """A locked and recovered directory. Recovery may take a second, so it is done before the stream begins."""

    lock: DirectoryLock
    left: Leftovers


def prepare(directory: Path) -> Prepared:
    """Lock and recover a directory; for any thread. Raises ``UsageError``."""
    lock = DirectoryLock(directory)
    try:
        return Prepared(lock, prepare_directory(directory))
    except OSError as error:
        lock.release()
        raise UsageError(f"cannot record to {directory}: {error.strerror}") from None
    except BaseException:
        lock.release()
        raise


def active_segments(directory: Path) -> list[Path]:
    """The unsealed segments of a directory, in order. Raises ``OSError``."""
    return sorted(path for path in directory.glob("*.active") if segment_number(path))


def recover_directory(
    directory: Path, *, strict: bool = True, salvage: bool = False, progress: Progress | None = None
) -> list[Recovered]:
    """Remove drafts and recover every active segment; the caller holds the directory's lock.

    Files that no recorder has named stay as they are. Raises ``CorruptRecording`` for damage when ``strict`` and not
    ``salvage``, and ``OSError``.
    """
    ours = sorted(path for path in directory.iterdir() if segment_number(path))
    for draft in ours:
        if draft.suffix == ".tmp":
            draft.unlink()
    paths = active_segments(directory)
    results = []
    for done, path in enumerate(paths):
        if progress is not None:
            progress(path.name, done, len(paths))
        try:
            results.append(recover_segment(path, salvage=salvage))
        except RecordingError as error:
            if strict:
                raise
            results.append(Recovered(path, "damaged", error=str(error)))
    sync_directory(directory)
    return results


def recover_segment(path: Path, *, salvage: bool = False) -> Recovered:
    """Recover one active segment. Raises ``RecordingError`` when it is not ours or damaged, and ``OSError``."""
    fd = lock_file(path)
    if fd is None:
        return Recovered(path, "busy")
    try:
        if path.with_suffix(".mcap").exists():
            path.unlink()
            return Recovered(path, "removed")
        buffer = map_file(path)
        try:
            found = scan(buffer, path.name)
        except Torn:
            path.unlink()
            return Recovered(path, "removed", torn_bytes=len(buffer))
        except (NotARecording, CorruptRecording):
            if not salvage:
                raise
            return _salvage_or_set_aside(path, buffer)
        if found.resume_offset is not None:
            if not salvage:
                raise CorruptRecording(_damage(path.name, found))
            return _salvage_or_set_aside(path, buffer)
        return _cut_tail(path, fd, found)
    finally:
        os.close(fd)


def _damage(name: str, found: Scan) -> str:
    if found.jump:
        return (
            f"{name} is corrupt: behind event {found.next_seq - 1}, at byte {found.end_offset}, events are missing "
            "without a gap; a salvage keeps what is whole"
        )
    return (
        f"{name} is corrupt at byte {found.end_offset}: valid events follow at byte {found.resume_offset}; "
        "a salvage keeps what is whole"
    )


def _cut_tail(path: Path, fd: int, found: Scan) -> Recovered:
    if found.torn_bytes:
        os.ftruncate(fd, found.end_offset)
        os.fsync(fd)
    outcome = "truncated" if found.torn_bytes else "whole"
    return Recovered(path, outcome, found.torn_bytes, found.about.first_seq, found.next_seq)


# --- salvage ---------------------------------------------------------------------------------------------------------


def _salvage_or_set_aside(path: Path, buffer: Buffer) -> Recovered:
    try:
        return salvage_segment(path, buffer)
    except CorruptRecording as error:
        # Its description is gone, and no frame repeats it, so the rest of its content cannot be identified.
        os.rename(path, path.with_name(path.name + DAMAGED_SUFFIX))
        return Recovered(path, "set_aside", len(buffer), error=str(error))


def salvage_segment(path: Path, buffer: Buffer) -> Recovered:
    """Rewrite a damaged segment with everything that is whole; the old file stays as ``.damaged``.

    Raises ``RecordingError`` when not even its description survived.
    """
    about, start = _salvaged_preamble(path, buffer)
    draft = path.with_suffix(".salvage.tmp")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    out = SegmentFile(draft)
    gaps: list[Gap] = []
    next_seq = about.first_seq
    try:
        write_all(out, [fmt.encode_preamble(about)])
        for frame, cut_bytes in _with_all_parts(_whole_frames(buffer, start)):
            if frame.first_seq < next_seq:
                continue  # an older frame that damage brought here
            if cut_bytes or frame.first_seq > next_seq:
                gap = Gap(next_seq, frame.first_seq - 1, "damaged bytes were cut out", cut_bytes)
                gaps.append(gap)
                data = fmt.encode_item(gap)
                write_all(out, fmt.encode_frame(
                    Frame(fmt.MARKS, next_seq, gap.count, frame.log_ns, frame.publish_ns, data)
                ))
            write_all(out, fmt.encode_frame(frame))
            next_seq = frame.end_seq
        out.datasync()
    except BaseException:
        draft.unlink()
        raise
    finally:
        out.close()
    os.rename(path, path.with_name(path.name + DAMAGED_SUFFIX))
    os.rename(draft, path)
    sync_directory(path.parent)
    return Recovered(path, "salvaged", 0, about.first_seq, next_seq, tuple(gaps))


def _salvaged_preamble(path: Path, buffer: Buffer) -> tuple[About, int]:
    try:
        return read_preamble(buffer, path.name)
    except RecordingError as error:
        # The first keyframe of a segment repeats the preamble's metadata.
        for frame, _ in _whole_frames(buffer, 0):
            if frame.channel == fmt.KEYFRAMES:
                with contextlib.suppress(msgspec.MsgspecError):
                    about = fmt.decode_keyframe(frame.data).about
                    if about is not None:
                        return about, 0
        raise CorruptRecording(f"{path.name} cannot be salvaged: {error}") from None


def _with_all_parts(frames: Iterator[tuple[Frame, int]]) -> Iterator[tuple[Frame, int]]:
    """The frames without packed keyframes of which a part is lost."""
    parts = lost_bytes = 0
    for frame, cut_bytes in frames:
        there, parts = 0 if cut_bytes else parts, 0
        lost_bytes += cut_bytes
        if frame.channel == fmt.KEYFRAMES:
            with contextlib.suppress(msgspec.MsgspecError):
                if fmt.decode_keyframe(frame.data).parts > there:
                    continue
        elif parts_of([frame]):
            parts = there + 1
        yield frame, lost_bytes
        lost_bytes = 0


def _whole_frames(buffer: Buffer, start: int) -> Iterator[tuple[Frame, int]]:
    """Every valid frame from ``start`` on, with the number of damaged bytes in front of it."""
    size = len(buffer)
    with memoryview(buffer) as view:
        offset: int | None = start
        behind = start
        while offset is not None:
            found = frame_at(buffer, view, offset, size)
            if found is None:
                offset = next_frame(buffer, view, offset, size)
                continue
            frame, end = found
            yield frame, offset - behind
            offset = behind = end


# --- the index of a sealed segment ------------------------------------------------------------------------------------


class Reindexed(msgspec.Struct, frozen=True):
    """A sealed segment with a new index. ``lost_bytes`` stood behind the last good chunk; 0 when all chunks were
    good."""

    path: str
    first_seq: int
    last_seq: int
    lost_bytes: int


def needs_index(path: Path) -> bool:
    """True if a sealed segment cannot be opened as it is. Raises ``RecordingError`` for a foreign file."""
    try:
        SealedSegment(path)
    except CorruptRecording:
        return True
    except RecordingError:
        if sealed_about(map_file(path), path.name) is None:
            raise
        return True
    return False


def rebuild_index(path: Path) -> Reindexed:
    """Write the segment anew with an index over its good chunks. Raises ``RecordingError`` and ``OSError``."""
    buffer = map_file(path)
    about = sealed_about(buffer, path.name)
    if about is None:
        raise RecordingError(f"{path.name} cannot be indexed: its description is damaged")
    run = _Chunks(buffer, path.name, about.first_seq)
    draft = path.with_suffix(".mcap.tmp")
    try:
        write_draft(draft, about, run.frames())
        segment = SealedSegment(draft)
        segment.verify_bytes()
        if run.lost_bytes:
            os.rename(path, path.with_name(path.name + DAMAGED_SUFFIX))
        os.rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return Reindexed(str(path), about.first_seq, segment.next_seq - 1, run.lost_bytes)


class _Chunks:
    """The frames of a file without an index, as far as its chunks are good and follow each other."""

    def __init__(self, buffer: Buffer, name: str, first_seq: int) -> None:
        self._buffer = buffer
        self._name = name
        self._next_seq = first_seq
        self.lost_bytes = 0

    def frames(self) -> Iterator[Frame]:
        """The frames in order; afterwards ``lost_bytes`` is known."""
        at, size = len(fmt.MAGIC), len(self._buffer)
        while at + fmt.RECORD_HEAD.size <= size:
            opcode, length = fmt.RECORD_HEAD.unpack_from(self._buffer, at)
            if opcode == Opcode.DATA_END:
                return
            if at + fmt.RECORD_HEAD.size + length > size:
                break
            if opcode == Opcode.CHUNK:
                try:
                    found = [self._whole(message) for message in chunk_messages(self._buffer, at, self._name)]
                except (RecordingError, MalformedBatch, msgspec.MsgspecError):
                    break
                yield from found
            at += fmt.RECORD_HEAD.size + length
        self.lost_bytes = size - at

    def _whole(self, message: Frame) -> Frame:
        """The frame with its full number and its count, both read from its content."""
        count = 0
        if message.channel == fmt.EVENTS:
            count = event_chunk(message.data).count
        elif message.channel == fmt.STIMULI:
            count = len(unpack_stimuli(message.data))
        elif message.channel == fmt.MARKS:
            mark = fmt.decode_mark(message.data)
            count = mark.count if isinstance(mark, Gap) else 0
        if message.first_seq != self._next_seq & fmt.SEQ_MASK:
            raise CorruptRecording(f"{self._name}: event {self._next_seq} is missing")
        frame = msgspec.structs.replace(message, first_seq=self._next_seq, count=count)
        self._next_seq = frame.end_seq
        return frame
