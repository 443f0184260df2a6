"""A sealed segment whose index or summary is missing or damaged, made whole again from its chunks.

Law of this file: every chunk that is kept had a right CRC; when one is not kept, the damaged file stays beside it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from mcap.opcode import Opcode

from kvbm_console.core.errors import CorruptRecording, RecordingError
from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import sync_directory
from kvbm_console.recording.format import Frame, Gap
from kvbm_console.recording.recover import DAMAGED_SUFFIX
from kvbm_console.recording.scan import Buffer, map_file
from kvbm_console.recording.seal import write_draft
from kvbm_console.recording.sealed import SealedSegment, chunk_messages, sealed_about
from kvbm_console.wire.batches import MalformedBatch, event_chunk, unpack_stimuli


class Reindexed(msgspec.Struct, frozen=True):
    """What became of one sealed segment. ``lost_bytes``: behind the last good chunk; 0 when all chunks were good."""

    path: str
    first_seq: int
    last_seq: int
    lost_bytes: int


def needs_index(path: Path) -> bool:
    """Whether a sealed segment cannot be opened as it is. Raises ``RecordingError`` for a foreign file."""
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
        """In order; afterwards ``lost_bytes`` is known."""
        at, size = len(fmt.MAGIC), len(self._buffer)
        while at + fmt.RECORD_HEAD.size <= size:
            opcode, length = fmt.RECORD_HEAD.unpack_from(self._buffer, at)
            if opcode == Opcode.DATA_END:
                return
            if at + fmt.RECORD_HEAD.size + length > size:
                break
            if opcode == Opcode.CHUNK:
                try:
                    found = [self._whole(one) for one in chunk_messages(self._buffer, at, self._name)]
                except (RecordingError, MalformedBatch, msgspec.MsgspecError):
                    break
                yield from found
            at += fmt.RECORD_HEAD.size + length
        self.lost_bytes = size - at

    def _whole(self, message: Frame) -> Frame:
        """The frame with its full number and its count, both read from what it holds."""
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
