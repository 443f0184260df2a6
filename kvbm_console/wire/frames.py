"""Frames: the messages of the event stream as ready bytes, so that nothing is serialised once per subscriber.

Law of this file: a frame has the same bytes as the ``SubscribeReply`` that the generated code would write.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from kvbm_console.wire.v1 import console_pb2 as pb

SNAPSHOT_PART_BYTES: Final = 256 * 1024
"""Size of a snapshot's part, so small that batches of other subscribers are written between two parts."""

_BATCH_TAG: Final = bytes([pb.SubscribeReply.BATCH_FIELD_NUMBER << 3 | 2])
"""Wire type 2 (length-delimited) and the number of ``SubscribeReply.batch``."""


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def batch_frame(data: bytes) -> bytes:
    """An encoded ``EventBatch`` as an item of the stream: a few bytes in front of the same bytes."""
    return b"".join((_BATCH_TAG, varint(len(data)), data))


def batch_of(frame: bytes) -> bytes:
    """The ``EventBatch`` inside a frame that ``batch_frame`` made."""
    at = 1
    while frame[at] & 0x80:
        at += 1
    return frame[at + 1 :]


def gap_frame(first: int, last: int, reason: str) -> bytes:
    """Events ``first`` to ``last`` are not delivered."""
    gap = pb.Gap(first=first, last=last, count=last - first + 1, reason=reason)
    return pb.SubscribeReply(gap=gap).SerializeToString()


def snapshot_frames(seq: int, at_ns: int, incarnation: str, facts: bytes | memoryview, digest: int) -> Iterator[bytes]:
    """A snapshot whose next event is ``seq``: begin, parts, end."""
    begin = pb.SnapshotBegin(seq=seq, at_ns=at_ns, total_bytes=len(facts), incarnation=incarnation)
    yield pb.SubscribeReply(snapshot_begin=begin).SerializeToString()
    for at in range(0, len(facts), SNAPSHOT_PART_BYTES):
        part = pb.SnapshotPart(data=bytes(facts[at : at + SNAPSHOT_PART_BYTES]))
        yield pb.SubscribeReply(snapshot_part=part).SerializeToString()
    yield pb.SubscribeReply(snapshot_end=pb.SnapshotEnd(digest=digest)).SerializeToString()


def heartbeat_frame(
    head_seq: int, at_ns: int, subscribers: int, recorder: pb.RecorderStatus | None, digest: int | None,
    warnings: Sequence[str] = (),
) -> bytes:
    """The half-second sign of life, with the recorder's watermarks and the daemon's own problems."""
    beat = pb.Heartbeat(
        head_seq=head_seq, at_ns=at_ns, subscribers=subscribers, recorder=cast(Any, recorder), warnings=warnings
    )
    if digest is not None:
        beat.digest = digest
    return pb.SubscribeReply(heartbeat=beat).SerializeToString()


def bye_frame(last_seq: int, reason: str) -> bytes:
    """The daemon ends after event ``last_seq``."""
    return pb.SubscribeReply(bye=pb.Bye(last_seq=last_seq, reason=reason)).SerializeToString()
