"""Captures: frames of a KV-event stream as they came, in one file that needs no console.

A file is repeated ``>dIII`` (time of receipt in seconds since 1970, lengths of topic, number and payload), then topic,
number (8 bytes, big-endian) and payload, exactly as they stood in the message.

Law of this file: bytes are kept as they came, undecoded, so that a capture can show what a decoder got wrong.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from kvbm_console.core.errors import UsageError

FILE_NAME: Final = "frames.bin"
HEADER: Final = struct.Struct(">dIII")
SEQ_BYTES: Final = 8
TOPIC_BYTES_MAX: Final = 1_024
PAYLOAD_BYTES_MAX: Final = 64 * 2**20
"""A longer payload in a file is damage; live sockets accept a quarter of it."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message. ``received`` in seconds since 1970."""

    received: float
    topic: bytes
    seq: int
    payload: bytes


def pack_frame(frame: Frame) -> bytes:
    """The bytes of one frame in a file."""
    return b"".join((
        HEADER.pack(frame.received, len(frame.topic), SEQ_BYTES, len(frame.payload)), frame.topic,
        frame.seq.to_bytes(SEQ_BYTES, "big"), frame.payload,
    ))


def read_frames(path: Path) -> Iterator[Frame]:
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
            yield Frame(received, body[:topic_bytes], seq, body[topic_bytes + seq_bytes :])
            at += HEADER.size + len(body)


class CaptureWriter:
    """Writes frames to ``directory``/frames.bin; refuses to write over a capture that is there.

    Raises ``UsageError`` when the directory cannot be written. ``flush`` after each burst: what was flushed survives a
    ``kill -9``.
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

    def write(self, frame: Frame) -> None:
        """Append one frame."""
        data = pack_frame(frame)
        self._file.write(data)
        self.frames += 1
        self.bytes += len(data)

    def flush(self) -> None:
        """Give what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
