"""Recovery: what a writer that died left behind is made whole again, and nothing is guessed.

A torn tail is cut off: it was never acknowledged. Damage in front of valid frames is refused; a salvage keeps all
whole frames, puts a ``Gap`` where bytes were cut out, and leaves the damaged file beside it.

Law of this file: a byte is removed only when no valid frame follows it, or when the caller asked for a salvage.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.errors import CorruptRecording, RecordingError, UsageError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import parts_of
from kvbm_console.recording.files import DirectoryLock, SegmentFile, lock_file, sync_directory
from kvbm_console.recording.format import About, Frame, Gap
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
from kvbm_console.recording.segment import write_all

DAMAGED_SUFFIX: Final = ".damaged"

_OUR_NAME: Final = re.compile(r"(\d{6,12})-\d{12,19}\.(?:active|mcap|mcap\.tmp|salvage\.tmp|active\.damaged)")
"""Names that recorder, sealer and salvage give. A directory may hold other files, which are not ours to remove."""

Progress = Callable[[str, int, int], None]
"""(what, done, of): called now and then while something takes long."""


class Recovered(msgspec.Struct, frozen=True):
    """What became of one active segment."""

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
    """What a recorder found in its directory."""

    next_segment: int
    to_seal: list[Path]
    recovered: list[Recovered]


def prepare_directory(directory: Path) -> Leftovers:
    """Before a recorder begins, under its lock: drop drafts, recover active segments, leave damaged ones as they are.

    Raises ``OSError``.
    """
    recovered = recover_directory(directory, strict=False)
    numbers = [segment_number(path) for path in directory.iterdir()]
    to_seal = [one.path for one in recovered if one.outcome in ("whole", "truncated")]
    return Leftovers(max(numbers, default=0) + 1, to_seal, recovered)


class Prepared(msgspec.Struct, frozen=True):
    """A directory that is ours, recovered: what may take a second, done before the stream has to be met."""

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


def segment_number(path: Path) -> int:
    """The segment that a recorder's file belongs to, 0 for a file that no recorder has named.

    >>> segment_number(Path("run/000003-000004182377.mcap.tmp")), segment_number(Path("2024-holiday.mcap"))
    (3, 0)
    """
    match = _OUR_NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


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
        # Its description is gone, and no frame repeats it: what else is in it cannot be told from anything else.
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
        # The first keyframe of a segment repeats what the preamble said.
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
