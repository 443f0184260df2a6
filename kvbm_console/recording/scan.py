"""Reading the frames of a segment that is being written, or was left behind: whole, torn or damaged.

Law of this file: a frame counts when its lengths agree, its CRC is right and it begins where the frame before it ended.
Bytes behind the last such frame are a torn tail when no valid frame follows them, and damage when one does.
"""

import mmap
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

import msgspec
from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.records import Header, Metadata

from kvbm_console.core.errors import CorruptRecording, RecordingError, UsageError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.format import About, Frame, Gap, IndexEntry, SegmentEnd

Buffer = bytes | mmap.mmap

ENTRY_BYTES: Final = 256 * 1024
"""Frames that are read together: small enough that a seek reads little, large enough that the index stays small."""
CRC_WORK_FACTOR: Final = 4
"""The search for a frame behind damage computes CRCs of at most this many times the file. Otherwise the overlapping
lengths of a hostile file would make it quadratic."""


class NotARecording(RecordingError):
    """Raised for a file without our preamble: a foreign file, or a file that lost its first block with the power."""


class Torn(RecordingError):
    """Raised when a segment ends inside its preamble: the writer died before its first frame, so nothing is lost."""


def map_file(path: Path, size: int | None = None) -> Buffer:
    """The file's bytes, or the first ``size``; appended bytes are not seen. An empty file has empty bytes."""
    with path.open("rb") as file:
        size = file.seek(0, 2) if size is None else size
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


# --- the preamble ----------------------------------------------------------------------------------------------------


def read_preamble(buffer: Buffer, name: str) -> tuple[About, int]:
    """The description of the segment, and the offset of its first frame.

    Raises ``RecordingError`` for foreign files and other major versions, ``Torn`` when it ends too early, and
    ``CorruptRecording`` when a byte is wrong.
    """
    size = len(buffer)
    if buffer[: len(fmt.MAGIC)] != fmt.MAGIC[: min(size, len(fmt.MAGIC))]:
        raise NotARecording(f"{name} is not a recording: it does not begin as an MCAP file does")
    offset = len(fmt.MAGIC)
    limit = min(size, fmt.PREAMBLE_BYTES_MAX)
    about: About | None = None
    while True:
        if offset + fmt.RECORD_HEAD.size > limit:
            raise _short_preamble(buffer, name)
        opcode, length = fmt.RECORD_HEAD.unpack_from(buffer, offset)
        body = offset + fmt.RECORD_HEAD.size
        if body + length > limit:
            raise _short_preamble(buffer, name)
        if opcode == fmt.OP_CHECK:
            _require_preamble_check(buffer, offset, name)
            break
        if opcode in (Opcode.HEADER, Opcode.METADATA):
            about = read_about(opcode, bytes(buffer[body : body + length]), name) or about
        elif opcode not in (Opcode.SCHEMA, Opcode.CHANNEL):
            raise CorruptRecording(f"{name} is corrupt: its preamble has a record of kind {opcode:#x}")
        offset = body + length
    if about is None:
        raise RecordingError(f"{name} is not a recording: it has no metadata {fmt.ABOUT_NAME}")
    return about, offset + fmt.CHECK.size


def _short_preamble(buffer: Buffer, name: str) -> RecordingError:
    with memoryview(buffer) as view:
        follows = next_frame(buffer, view, 0, len(buffer))
    if follows is not None or len(buffer) >= fmt.PREAMBLE_BYTES_MAX:
        return CorruptRecording(f"{name} is corrupt: its preamble has no end")
    return Torn(f"{name} ends inside its preamble: nothing was recorded")


def _require_preamble_check(buffer: Buffer, offset: int, name: str) -> None:
    check = fmt.CHECK.unpack_from(buffer, offset) if offset + fmt.CHECK.size <= len(buffer) else None
    expected = fmt.encode_check(zlib.crc32(buffer[:offset]), offset, check[5] if check else 0, 0)
    if check is None or buffer[offset : offset + fmt.CHECK.size] != expected:
        raise CorruptRecording(f"{name} is corrupt: its preamble has a wrong check")


def read_about(opcode: int, body: bytes, name: str) -> About | None:
    """The description in a header (None, checks the profile) or metadata record. Raises ``RecordingError``."""
    try:
        stream = ReadDataStream(BytesIO(body))
        if opcode == Opcode.HEADER:
            profile = Header.read(stream).profile
            if profile != fmt.PROFILE:
                raise RecordingError(f"{name} is not a recording of ours: its MCAP profile is {profile[:40]!r}")
            return None
        metadata = Metadata.read(stream)
    except RecordingError:
        raise
    except Exception as error:  # the library lets struct.error, UnicodeDecodeError, MemoryError and others escape
        raise CorruptRecording(f"{name} is corrupt: a record of its preamble cannot be read ({error})") from None
    if metadata.name != fmt.ABOUT_NAME:
        return None
    return _about_of(metadata.metadata, name)


def _about_of(metadata: dict[str, str], name: str) -> About:
    version = metadata.get("format", "")
    major = version.partition(".")[0]
    if major != str(fmt.FORMAT_MAJOR):
        raise RecordingError(f"{name} has recording format {version[:20]!r}, this program reads {fmt.FORMAT_MAJOR}.x")
    try:
        return fmt.decode_about(metadata)
    except (msgspec.MsgspecError, UsageError, ValueError) as error:
        raise CorruptRecording(f"{name} is corrupt: its description cannot be read ({error})") from None


# --- frames ----------------------------------------------------------------------------------------------------------


def frame_at(buffer: Buffer, view: memoryview, offset: int, size: int) -> tuple[Frame, int] | None:
    """The valid frame that begins here and the offset behind it; None when there is none. Copies the data once."""
    head = fmt.MESSAGE_HEAD
    if offset + head.size + fmt.CHECK.size > size:
        return None
    opcode, length, channel, seq, log_ns, publish_ns = head.unpack_from(buffer, offset)
    if opcode != fmt.OP_MESSAGE or not fmt.MESSAGE_BODY_HEAD_BYTES <= length <= fmt.FRAME_BYTES_MAX:
        return None
    total = fmt.RECORD_HEAD.size + length
    check_at = offset + total
    if check_at + fmt.CHECK.size > size:
        return None
    check_op, body, magic, crc, checked, first_seq, count = fmt.CHECK.unpack_from(buffer, check_at)
    if (check_op, body, magic, checked) != (fmt.OP_CHECK, fmt.CHECK_BODY_BYTES, fmt.CHECK_MAGIC, total):
        return None
    end = check_at + fmt.CHECK.size
    if zlib.crc32(view[end - fmt.CHECK_TAIL.size : end], zlib.crc32(view[offset:check_at])) != crc:
        return None
    if seq != first_seq & fmt.SEQ_MASK:
        return None
    data = bytes(view[offset + head.size : check_at])
    return Frame(channel, first_seq, count, log_ns, publish_ns, data), end


def next_frame(buffer: Buffer, view: memoryview, start: int, size: int) -> int | None:
    """The offset of the first valid frame at or behind ``start``, None when there is none."""
    work = CRC_WORK_FACTOR * size
    at = start
    while (at := buffer.find(fmt.CHECK_MAGIC, at)) >= 0:
        check_at = at - fmt.RECORD_HEAD.size
        at += 1
        if check_at < start:
            continue
        if check_at + fmt.CHECK.size > size:
            return None
        opcode, body, _, _, checked, _, _ = fmt.CHECK.unpack_from(buffer, check_at)
        begin = int(check_at - checked)
        if opcode != fmt.OP_CHECK or body != fmt.CHECK_BODY_BYTES or begin < start or checked < fmt.MESSAGE_HEAD.size:
            continue
        message_op, length = fmt.RECORD_HEAD.unpack_from(buffer, begin)
        if message_op != fmt.OP_MESSAGE or length + fmt.RECORD_HEAD.size != checked:
            continue
        work -= checked
        if work < 0:
            return None
        if frame_at(buffer, view, begin, size) is not None:
            return begin
    return None


class EntryBuilder:
    """Collects the index entry of frames that are read together."""

    def __init__(self, anchor_ns: int, now_ns: int = 0) -> None:
        self._anchor_ns = anchor_ns
        self.now_ns = now_ns
        """Engine time of the last item so far."""
        self._clear()

    def _clear(self) -> None:
        self.frames = 0
        self._keyframe = self._complete = False
        self._first_seq = self._end_seq = self._events = self._stimuli = 0
        self._first_ns = self.now_ns
        self._gaps: list[Gap] = []

    def add(self, frame: Frame) -> None:
        """Add a frame. Raises ``msgspec.DecodeError`` for bytes that are no keyframe or mark."""
        if not self.frames:
            self._first_seq = frame.first_seq
            self._first_ns = max(self.now_ns, frame.log_ns - self._anchor_ns)
        self.frames += 1
        self._end_seq = frame.end_seq
        self.now_ns = max(self.now_ns, frame.publish_ns - self._anchor_ns)
        if frame.channel == fmt.EVENTS:
            self._events += frame.count
        elif frame.channel == fmt.STIMULI:
            self._stimuli += frame.count
        elif frame.channel == fmt.KEYFRAMES:
            self._keyframe = True
            self._complete = fmt.decode_keyframe(frame.data).complete
        elif frame.channel == fmt.MARKS:
            mark = fmt.decode_mark(frame.data)
            if isinstance(mark, Gap):
                self._gaps.append(mark)

    def take(self, offset: int, length: int) -> IndexEntry:
        """The entry of the frames added so far, which stand at ``offset``; begins a new entry."""
        entry = IndexEntry(
            offset, length, self._keyframe, self._complete, self._first_seq, self._end_seq, self._events, self._stimuli,
            self._first_ns, self.now_ns, tuple(self._gaps),
        )
        self._clear()
        return entry


class Scan(msgspec.Struct, frozen=True):
    """The result of a pass over an active segment."""

    about: About
    entries: list[IndexEntry]
    end_offset: int
    """Behind the last frame that counts."""
    size: int
    next_seq: int
    """Number of the event that would come next."""
    end: SegmentEnd | None
    """None when the writer did not close it."""
    resume_offset: int | None
    """The offset at which valid frames go on behind damage, None when there is no damage."""
    jump: bool
    """The damage is a valid frame that does not follow the frame before it."""
    unreadable: bool = False
    """The damage is a valid frame with wrong content."""

    @property
    def torn_bytes(self) -> int:
        """Bytes of an unfinished last frame, 0 for a damaged segment."""
        return self.size - self.end_offset if self.resume_offset is None else 0


def scan(buffer: Buffer, name: str) -> Scan:
    """Verify every frame from the front. Never raises for a torn tail or for damage behind the preamble."""
    about, start = read_preamble(buffer, name)
    with memoryview(buffer) as view:
        found = scan_frames(buffer, view, about, start)
        if found.end_offset == found.size:
            return found
        offset = found.end_offset
        resume = offset if found.jump else next_frame(buffer, view, offset + found.unreadable, found.size)
    return msgspec.structs.replace(found, resume_offset=resume)


def scan_frames(
    buffer: Buffer, view: memoryview, about: About, start: int, first_seq: int | None = None, now_ns: int = 0,
) -> Scan:
    """The frames from ``start`` on, which follow a good preamble, or frames up to event ``first_seq - 1``.

    ``now_ns`` is the engine's time at the last item before them. It does not search behind damage, so ``resume_offset``
    is None.
    """
    size = len(buffer)
    builder = EntryBuilder(about.clock_anchor_ns, now_ns)
    entries: list[IndexEntry] = []
    offset = entry_at = start
    next_seq = about.first_seq if first_seq is None else first_seq
    end: SegmentEnd | None = None
    jump = unreadable = False
    while end is None:
        found = frame_at(buffer, view, offset, size)
        if found is None:
            break
        frame, behind = found
        if frame.first_seq != next_seq:
            jump = True
            break
        large = frame.channel == fmt.KEYFRAMES or len(frame.data) >= ENTRY_BYTES  # a part of a keyframe
        if builder.frames and (large or offset - entry_at >= ENTRY_BYTES):
            entries.append(builder.take(entry_at, offset - entry_at))
            entry_at = offset
        try:
            builder.add(frame)
            mark = fmt.decode_mark(frame.data) if frame.channel == fmt.MARKS else None
        except (msgspec.MsgspecError, RecursionError):
            unreadable = True
            break
        end = mark if isinstance(mark, SegmentEnd) else None
        offset, next_seq = behind, frame.end_seq
        if frame.channel == fmt.KEYFRAMES:
            entries.append(builder.take(entry_at, offset - entry_at))
            entry_at = offset
    if builder.frames:
        entries.append(builder.take(entry_at, offset - entry_at))
    return Scan(about, entries, offset, size, next_seq, end, None, jump, unreadable)


def frames_between(buffer: Buffer, offset: int, end: int, name: str, *, at: int = 0) -> Iterator[Frame]:
    """The frames of a verified stretch, in order; ``at`` is where the buffer stands in its file.

    Raises ``CorruptRecording`` when the file changed since.
    """
    with memoryview(buffer) as view:
        while offset < end:
            try:
                found = frame_at(buffer, view, offset, end)
            except struct.error:
                found = None
            if found is None:
                raise CorruptRecording(f"{name} is corrupt at byte {at + offset}")
            frame, offset = found
            yield frame
