"""Captures: files with the unchanged messages of KV-event streams, which need no console.

A file repeats ``>dIII`` (time of receipt in seconds since 1970, lengths of topic, number and payload), topic, number (8
bytes, big-endian) and payload. Topic, number and payload come from the message. ``Listener`` writes such a file beside
an engine. ``CaptureStreams`` feeds a file to a leader on the file's own clock.

Law of this file: bytes are kept undecoded, so that a capture can show an error of a decoder. No network library is
needed.
"""

import math
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from kvbm_console.core.config import SECOND_NS, LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.batch import BadPayload, decode
from kvbm_console.engines.kv_events.stream import EventStream

FILE_NAME: Final = "frames.bin"
HEADER: Final = struct.Struct(">dIII")
SEQ_BYTES: Final = 8
TOPIC_BYTES_MAX: Final = 1_024
PAYLOAD_BYTES_MAX: Final = 64 * 2**20
"""A longer payload in a file is damage; live sockets accept a quarter of it."""


class CaptureFrame(msgspec.Struct, frozen=True, gc=False):
    """A message of a stream. ``received`` is in seconds since 1970."""

    received: float
    topic: bytes
    seq: int
    payload: bytes


def pack_frame(frame: CaptureFrame) -> bytes:
    """The bytes of a frame in a file."""
    return b"".join((
        HEADER.pack(frame.received, len(frame.topic), SEQ_BYTES, len(frame.payload)), frame.topic,
        frame.seq.to_bytes(SEQ_BYTES, "big"), frame.payload,
    ))


def read_frames(path: Path) -> Iterator[CaptureFrame]:
    """The frames of a capture in order; ``path`` is the file or the directory that holds it.

    A last frame that was cut off by the end of the recorder is left out. Raises ``UsageError`` with one sentence when
    the file is not a capture.
    """
    if path.is_dir():
        path = path / FILE_NAME
    with path.open("rb") as file:
        at = 0
        while header := file.read(HEADER.size):
            if len(header) < HEADER.size:
                if at == 0:
                    raise UsageError(f"{path} is no capture of KV events: it ends within its first frame")
                return
            received, topic_bytes, seq_bytes, payload_bytes = HEADER.unpack(header)
            if seq_bytes != SEQ_BYTES or topic_bytes > TOPIC_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
                raise UsageError(f"{path} is no capture of KV events: there is no frame at byte {at}")
            body = file.read(topic_bytes + seq_bytes + payload_bytes)
            if len(body) < topic_bytes + seq_bytes + payload_bytes:
                if at == 0:
                    raise UsageError(f"{path} is no capture of KV events: it ends within its first frame")
                return
            seq = int.from_bytes(body[topic_bytes : topic_bytes + seq_bytes], "big")
            yield CaptureFrame(received, body[:topic_bytes], seq, body[topic_bytes + seq_bytes :])
            at += HEADER.size + len(body)


class CaptureWriter:
    """Writes frames to ``directory``/frames.bin, and refuses to overwrite a capture.

    Raises ``UsageError`` when the directory cannot be written. Call ``flush`` after each burst, because only flushed
    frames survive a ``kill -9``.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.frames = 0
        self.bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("xb")
        except FileExistsError:
            raise UsageError(f"{self.path} exists already; choose another directory") from None
        except OSError as error:
            raise UsageError(f"cannot capture to {directory}: {error.strerror}") from None

    def write(self, frame: CaptureFrame) -> None:
        """Append one frame."""
        data = pack_frame(frame)
        self._file.write(data)
        self.frames += 1
        self.bytes += len(data)

    def flush(self) -> None:
        """Give the written frames to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


class Listener(EventStream):
    """Writes the messages of a publisher to a capture, and folds them with its own leader.

    Give ``writer.write`` to the source as ``on_frame``, so that every message is in the file before its fold.
    """

    def __init__(self, directory: Path) -> None:
        self.writer = CaptureWriter(directory)
        super().__init__(Dispatcher(Leader(LeaderConfig()), time.monotonic_ns), 1)

    def gone(self) -> None:
        """Keep the last blocks of a publisher that has ended, because they are the result of the capture."""


# --- a capture as streams of a leader ---


class CaptureStreams:
    """The publishers in a capture. Each pair of topic and data-parallel rank is a publisher with its own numbers.

    ``take`` moves ``now_ns`` to the time of the frame, since the first frame, and hands the frame to its stream. Give
    ``lambda: streams.now_ns`` to the dispatcher as its clock.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.first_received: float | None = None
        """Seconds since 1970 of the first frame."""
        self.streams: dict[tuple[bytes, int], EventStream] = {}
        self._last_rank: dict[bytes, int] = {}

    def take(self, frame: CaptureFrame, dispatcher: Dispatcher, new_source: Callable[[], int]) -> None:
        """Take the next frame of the capture."""
        self._move_clock(frame.received)
        rank = self._rank(frame)
        stream = self.streams.get((frame.topic, rank))
        if stream is None:
            label = frame.topic.decode(errors="replace")
            stream = EventStream(
                dispatcher, new_source(), dp_rank=rank, label=label, wall=self._wall)
            self.streams[frame.topic, rank] = stream
        stream.accept(frame.seq, frame.payload)

    def _rank(self, frame: CaptureFrame) -> int:
        """The rank of the payload's first batch; for an unreadable payload, the topic's last rank."""
        try:
            batches = decode(frame.payload)
        except BadPayload:
            return self._last_rank.get(frame.topic, 0)
        rank = batches[0].dp_rank if batches else None
        self._last_rank[frame.topic] = rank or 0
        return rank or 0

    def _wall(self) -> float:
        return (self.first_received or 0.0) + self.now_ns / SECOND_NS

    def _move_clock(self, received: float) -> None:
        if not math.isfinite(received) or not 0 <= received < 1e10:
            return
        if self.first_received is None:
            self.first_received = received
        self.now_ns = max(self.now_ns, round((received - self.first_received) * SECOND_NS))
