"""Sealed and active segments, open for reading; an active segment may still be written.

A sealed segment is read by our own code and not by the library. The library's readers accept lengths of up to 4 GiB,
decompress whatever they are told to, and verify neither the summary's CRC nor an attachment's.

A follower of an active segment takes whole verified frames only. When the writer has begun the next segment, the one
before it has its last event. When a segment was sealed meanwhile, its sealed twin says the same and more.

Law of this file: nothing is decompressed beyond its limit, and frames that were seen stay where they are.
"""

import errno
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.records import AttachmentIndex

from kvbm_console.core.errors import CorruptRecording, RecordingError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.format import About, Frame, IndexEntry, SegmentEnd, segment_number
from kvbm_console.recording.scan import (
    ENTRY_BYTES,
    Buffer,
    frames_between,
    map_file,
    next_frame,
    read_about,
    read_preamble,
    scan_frames,
)

FOOTER: Final = struct.Struct("<BQQQI")
"""Opcode, length, summary start, summary offset start, CRC of the summary and of the fields before it."""
FOOTER_LENGTH: Final = FOOTER.size - fmt.RECORD_HEAD.size
DATA_END: Final = struct.Struct("<BQI")
MESSAGE_FIELDS: Final = struct.Struct("<HIQQ")
CHUNK_HEAD: Final = struct.Struct("<QQQI")
"""First time, last time, declared size, CRC of the decompressed records."""
COMPRESSION: Final = "zstd"


class SealedSegment:
    """An open ``.mcap`` segment. Raises ``RecordingError`` for a foreign, ``CorruptRecording`` for a damaged file."""

    sealed: Final = True
    torn_bytes: Final = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._buffer = map_file(path)
            self.size = len(self._buffer)
            self.about = _read_about(self._buffer, path.name)
            self._summary_start = _require_summary(self._buffer, path.name)
            self.entries = _read_index(self._buffer, self._summary_start, path.name)
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from None
        except _ESCAPES as error:
            raise CorruptRecording(f"{path.name} is corrupt: {error}") from None

    @property
    def next_seq(self) -> int:
        """Number of the event behind the last event."""
        return self.entries[-1].end_seq if self.entries else self.about.first_seq

    def frames(self, entry: IndexEntry) -> Iterator[Frame]:
        """The frames of one entry, in order. Raises ``CorruptRecording``."""
        try:
            messages = _messages(_read_chunk(self._buffer, entry.offset))
            yield from _frames_of(messages, entry)
        except _ESCAPES as error:
            raise CorruptRecording(f"{self.path.name} is corrupt at byte {entry.offset}: {error}") from None

    def verify_bytes(self) -> None:
        """Check the CRC over the whole data section. Raises ``CorruptRecording``."""
        at = self._summary_start - DATA_END.size
        opcode, length, crc = DATA_END.unpack_from(self._buffer, at)
        with memoryview(self._buffer) as view, view[:at] as data:
            if (opcode, length) != (Opcode.DATA_END, 4) or zlib.crc32(data) != crc:
                raise CorruptRecording(f"{self.path.name} is corrupt: the CRC over its data is wrong")


class _Bad(Exception):
    """Damage found inside this file; callers outside see a ``CorruptRecording``."""


_ESCAPES: Final = (
    _Bad, struct.error, zstandard.ZstdError, msgspec.MsgspecError, ValueError, IndexError, OverflowError, MemoryError,
    EOFError, RecursionError,
)
"""All that parsing hostile bytes has been seen to raise."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise _Bad(message)


def sealed_about(buffer: Buffer, name: str) -> About | None:
    """The description of a sealed segment, None when damaged. Raises ``RecordingError`` for foreign files."""
    try:
        return _read_about(buffer, name)
    except (CorruptRecording, *_ESCAPES):
        return None


def chunk_messages(buffer: Buffer, offset: int, name: str) -> list[Frame]:
    """The messages of the chunk at ``offset``, without counts and upper halves. Raises ``CorruptRecording``."""
    try:
        return _messages(_read_chunk(buffer, offset))
    except _ESCAPES as error:
        raise CorruptRecording(f"{name} is corrupt at byte {offset}: {error}") from None


def _messages(records: bytes) -> list[Frame]:
    """The messages of a chunk as frames without their counts and without the upper half of their numbers."""
    messages: list[Frame] = []
    at = 0
    while at < len(records):
        opcode, length = fmt.RECORD_HEAD.unpack_from(records, at)
        at += fmt.RECORD_HEAD.size
        _require(length <= len(records) - at, "a record is longer than its chunk")
        if opcode == Opcode.MESSAGE:
            _require(length >= fmt.MESSAGE_BODY_HEAD_BYTES, "a message is shorter than its head")
            channel, seq, log_ns, publish_ns = MESSAGE_FIELDS.unpack_from(records, at)
            data = records[at + MESSAGE_FIELDS.size : at + length]
            messages.append(Frame(channel, seq, 0, log_ns, publish_ns, data))
        else:
            _require(opcode in (Opcode.SCHEMA, Opcode.CHANNEL), f"a chunk has a record of kind {opcode:#x}")
        at += length
    return messages


def _read_about(buffer: Buffer, name: str) -> About:
    if buffer[: len(fmt.MAGIC)] != fmt.MAGIC:
        raise RecordingError(f"{name} is not a recording: it does not begin as an MCAP file does")
    at = len(fmt.MAGIC)
    for _ in range(2):  # the header and our metadata come first
        _require(at + fmt.RECORD_HEAD.size <= len(buffer), "it ends inside its header")
        opcode, length = fmt.RECORD_HEAD.unpack_from(buffer, at)
        at += fmt.RECORD_HEAD.size
        _require(length <= min(fmt.PREAMBLE_BYTES_MAX, len(buffer) - at), "its header claims too many bytes")
        if opcode not in (Opcode.HEADER, Opcode.METADATA):
            break
        about = read_about(opcode, bytes(buffer[at : at + length]), name)
        if about is not None:
            return about
        at += length
    raise RecordingError(f"{name} is not a recording: it has no metadata {fmt.ABOUT_NAME}")


def _require_summary(buffer: Buffer, name: str) -> int:
    """Check magic, footer and the CRC of the summary; returns where the summary begins."""
    if buffer[-len(fmt.MAGIC) :] != fmt.MAGIC:
        raise CorruptRecording(f"{name} is corrupt: it does not end as an MCAP file does")
    footer_at = len(buffer) - len(fmt.MAGIC) - FOOTER.size
    _require(footer_at > len(fmt.MAGIC), "it is shorter than a footer")
    opcode, length, start, _, crc = FOOTER.unpack_from(buffer, footer_at)
    _require((opcode, length) == (Opcode.FOOTER, FOOTER_LENGTH), "its footer is damaged")
    _require(len(fmt.MAGIC) + DATA_END.size <= start <= footer_at, "its summary is outside the file")
    _require(footer_at - start <= fmt.SUMMARY_BYTES_MAX, "its summary is above the limit")
    with memoryview(buffer) as view, view[start : footer_at + FOOTER.size - 4] as summary:
        _require(zlib.crc32(summary) == crc, "the CRC of its summary is wrong")
    return int(start)


def _read_index(buffer: Buffer, summary_start: int, name: str) -> list[IndexEntry]:
    at, end = summary_start, len(buffer) - len(fmt.MAGIC) - FOOTER.size
    while at + fmt.RECORD_HEAD.size <= end:
        opcode, length = fmt.RECORD_HEAD.unpack_from(buffer, at)
        at += fmt.RECORD_HEAD.size
        _require(length <= end - at, "a record of its summary is too long")
        if opcode == Opcode.ATTACHMENT_INDEX:
            found = AttachmentIndex.read(ReadDataStream(BytesIO(buffer[at : at + length])))
            if found.name == fmt.INDEX_NAME:
                return _index_entries(buffer, found, summary_start)
        at += length
    raise RecordingError(f"{name} has no attachment {fmt.INDEX_NAME}")


def _index_entries(buffer: Buffer, place: AttachmentIndex, summary_start: int) -> list[IndexEntry]:
    _require(place.length <= fmt.SUMMARY_BYTES_MAX, "its index is above the limit")
    _require(place.offset + place.length <= summary_start and place.length > 13, "its index is outside the file")
    record = bytes(buffer[place.offset : place.offset + place.length])
    opcode, length = fmt.RECORD_HEAD.unpack_from(record)
    _require((opcode, length) == (Opcode.ATTACHMENT, place.length - fmt.RECORD_HEAD.size), "its index is damaged")
    (crc,) = struct.unpack_from("<I", record, len(record) - 4)
    _require(zlib.crc32(record[fmt.RECORD_HEAD.size : -4]) == crc, "the CRC of its index is wrong")
    _require(place.data_size <= len(record) - 12, "its index is damaged")
    entries = fmt.decode_index(record[len(record) - 4 - place.data_size : -4])
    for before, entry in pairwise(entries):
        _require(entry.first_seq == before.end_seq, f"events {before.end_seq} and following are not in its index")
    for entry in entries:
        _require(0 <= entry.offset < summary_start and entry.first_seq <= entry.end_seq, "its index is damaged")
    return entries


def _read_chunk(buffer: Buffer, offset: int) -> bytes:
    """The decompressed records of one chunk, after its lengths and before its content is trusted."""
    opcode, length = fmt.RECORD_HEAD.unpack_from(buffer, offset)
    at = offset + fmt.RECORD_HEAD.size
    end = at + length
    _require(opcode == Opcode.CHUNK and end <= len(buffer), "there is no chunk")
    _, _, declared, crc = CHUNK_HEAD.unpack_from(buffer, at)
    at += CHUNK_HEAD.size
    (name_length,) = struct.unpack_from("<I", buffer, at)
    _require(name_length == len(COMPRESSION), "a chunk has another compression")
    _require(buffer[at + 4 : at + 4 + name_length] == COMPRESSION.encode(), "a chunk has another compression")
    at += 4 + name_length
    (data_length,) = struct.unpack_from("<Q", buffer, at)
    at += 8
    _require(at + data_length == end, "a chunk's lengths contradict each other")
    _require(0 < declared <= fmt.FRAME_BYTES_MAX + 4096, f"a chunk claims {declared} bytes")
    compressed: Any = buffer[at:end]
    _require(zstandard.frame_content_size(compressed) == declared, "a chunk is not as large as it claims")
    records = zstandard.ZstdDecompressor().decompress(compressed)
    _require(len(records) == declared and zlib.crc32(records) == crc, "the CRC of a chunk is wrong")
    return records


def _frames_of(messages: list[Frame], entry: IndexEntry) -> Iterator[Frame]:
    """The upper halves of the numbers come from the entry, the counts from the following bytes."""
    seqs = [entry.first_seq + (message.first_seq - entry.first_seq & fmt.SEQ_MASK) for message in messages]
    seqs.append(entry.end_seq)
    _require(seqs == sorted(seqs), "the numbers of a chunk are out of order")
    for index, message in enumerate(messages):
        yield Frame(
            message.channel, seqs[index], seqs[index + 1] - seqs[index], message.log_ns, message.publish_ns,
            message.data,
        )


# --- active segments --------------------------------------------------------------------------------------------------


WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Read at once: little beside the caches of a processor."""
WINDOW_BYTES_MAX: Final = fmt.FRAME_BYTES_MAX + WINDOW_BYTES
"""Read at once when a frame needs it: above the largest frame and the entry in front of it, so that every read gets
further."""


class ActiveSegment:
    """An open ``.active`` segment, every frame verified. Later frames are seen after a ``refresh``.

    The file is read and never mapped. A writer on a full disk takes the beginning of a frame back, and access to a page
    that is gone kills the process.
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
        """Take the new frames; returns whether any came. Raises ``OSError`` when the file is gone."""
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
        """Verify and index the next window of bytes; returns whether it held a frame."""
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
        """True if a valid frame follows the bytes that do not count."""
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
    """The segment with its new frames, and whether any came; its sealed twin when it was sealed meanwhile."""
    if isinstance(segment, SealedSegment):
        return segment, False
    try:
        return segment, segment.refresh()
    except FileNotFoundError:
        try:
            twin = SealedSegment(segment.path.with_suffix(".mcap"))
        except RecordingError:
            return segment, False  # removed with its directory: the frames seen so far stay
        return twin, True
    except OSError:
        return segment, False


def newer_segments(last: Path, incarnation: str) -> list[Segment]:
    """The segments of the same run that stand behind ``last`` in its directory."""
    paths: dict[str, Path] = {}
    for suffix in (".active", ".mcap"):  # a crash between rename and removal leaves both; the sealed file is whole
        ours = (path for path in last.parent.glob(f"*{suffix}") if segment_number(path))
        paths |= {path.stem: path for path in ours if path.stem > last.stem}
    found: list[Segment] = []
    for _, path in sorted(paths.items()):
        try:
            segment = open_segment(path)
        except (RecordingError, OSError):
            # Begun this moment, sealed this moment, or damaged: the segments behind it are opened later.
            return found
        if segment.about.incarnation == incarnation and segment.entries:
            found.append(segment)
    return found
