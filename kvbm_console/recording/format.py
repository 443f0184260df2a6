"""The layout of a recording: records, frames, marks, limits. Bytes in, bytes out; no files here.

A recording is a directory of segments. A segment that is being written is ``<n>-<first_seq>.active``, a finished one
``<n>-<first_seq>.mcap``. An active segment is a valid beginning of an MCAP file (profile ``kvbm``)::

    preamble = magic, Header, Metadata, Schema*, Channel*, Check
    frame    = Message, Check
    Message  = <B op=5> <Q length> <H channel> <I seq & 2^32-1> <Q log_time> <Q publish_time> <data>
    Check    = <B op=0x81> <Q 24> <4s "KVBC"> <I crc32> <I length of what it checks> <Q first_seq> <I count>

A Check covers the Message record in front of it (the preamble's covers the whole preamble) and its own last three
fields. ``count`` is the number of items: events or stimuli of a batch, events missing in a gap, 0 for keyframes and
other marks. ``first_seq`` is the number of the first event in or behind the frame. So every frame begins where the
frame before it ended (``Frame.end_seq``), and a missing frame is found without decoding.

``log_time`` is the wall clock at the engine's time 0 plus the time of the first item, ``publish_time`` plus that of the
last item. Neither ever decreases.

A keyframe of more than ``PACKED_FROM_BYTES`` is packed: facts and memory as one zstd body, cut into parts that each fit
into a frame. The parts are marks, which a reader of format 1.2 passes over, directly in front of the keyframe's frame.
That frame has ``parts`` and, as its facts, a snapshot of a version that a reader of 1.2 refuses by its number.

Law of this file: a reader believes no length before it has been compared with what is there, and no byte before its
CRC was.
"""

import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import zstandard
from mcap.data_stream import RecordBuilder
from mcap.records import Channel, Header, Metadata, Schema
from mcap.writer import MCAP0_MAGIC

from kvbm_console.core.columns import SparseBytes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import FORMAT_MINOR
from kvbm_console.core.snapshots import packed_elsewhere
from kvbm_console.wire.batches import EVENT_BATCH, STIMULUS_BATCH, WIRE_PACKAGE, descriptor_set

FORMAT_MAJOR: Final = 1
"""Raised when an older reader would read something wrong; such a reader refuses and names both."""
PROFILE: Final = "kvbm"
LIBRARY: Final = "kvbm-console"
ABOUT_NAME: Final = "kvbm.recording"
INDEX_NAME: Final = "kvbm.index"
MAGIC: Final = MCAP0_MAGIC

FRAME_BYTES_MAX: Final = 48 * 1024 * 1024
"""Largest frame, and largest chunk when decompressed. A hostile file that claims more is refused before anything is
allocated for it (F22)."""
PACKED_FROM_BYTES: Final = 4 * 1024 * 1024
"""From this many bytes of facts and memory on a keyframe is packed. Hashes do not compress, everything else does, so a
keyframe of 28 MB takes 14."""
PART_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a part of a packed keyframe."""
KEYFRAME_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Largest facts and memory of a keyframe together, unpacked: facts of ``POOLS_BLOCKS_MAX`` places are 0.7 GB."""
WINDOW_BYTES_MAX: Final = 8 * 1024 * 1024
"""Largest zstd window of a packed keyframe, which takes so much memory while it is unpacked. Ours have 512 KiB."""
PREAMBLE_BYTES_MAX: Final = 1024 * 1024
"""A preamble has about 4 KB, half of it the schema."""
SUMMARY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Summary and index of a sealed segment: 200 bytes a chunk, and a segment of 256 MB has a few hundred."""
POOL_BLOCKS_MAX: Final = 2**24
"""Largest pool that is folded from a file. 16 million blocks of 16 tokens are far beyond a host's memory. A place costs
21 bytes, and a hostile event of 40 bytes could otherwise ask for two thousand million places."""
POOLS_BLOCKS_MAX: Final = 2**25
"""Places of all pools of a recording together: 0.7 GB."""

EVENTS: Final = 1
STIMULI: Final = 2
KEYFRAMES: Final = 3
MARKS: Final = 4
TOPICS: Final[dict[int, str]] = {EVENTS: "events", STIMULI: "stimuli", KEYFRAMES: "keyframes", MARKS: "marks"}

OP_MESSAGE: Final = 0x05
OP_CHECK: Final = 0x81
CHECK_MAGIC: Final = b"KVBC"
RECORD_HEAD: Final = struct.Struct("<BQ")
MESSAGE_HEAD: Final = struct.Struct("<BQHIQQ")
CHECK: Final = struct.Struct("<BQ4sIIQI")
CHECK_TAIL: Final = struct.Struct("<IQI")
CHECK_BODY_BYTES: Final = CHECK.size - RECORD_HEAD.size
MESSAGE_BODY_HEAD_BYTES: Final = MESSAGE_HEAD.size - RECORD_HEAD.size
SEQ_MASK: Final = 0xFFFF_FFFF
CRC_PART_BYTES: Final = 4_096
"""CPython lets go of the interpreter for a CRC of more than 5 KiB."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a segment, in its preamble and, for a damaged preamble, again in its first keyframe."""

    major: int = FORMAT_MAJOR
    minor: int = FORMAT_MINOR
    wire: str = WIRE_PACKAGE
    program: str = ""
    """Version of the program that wrote it."""
    incarnation: str = ""
    """Identity of the run; segments of the same run continue each other."""
    segment: int = 1
    first_seq: int = 0
    clock_anchor_ns: int = 0
    """Wall clock, in nanoseconds since 1970, at the engine's time 0."""
    config: LeaderConfig = LeaderConfig()
    labels: dict[str, str] = {}
    """Free words of the recording's owner, for example the workload."""


BLOCK_BYTES: Final = "block_bytes"
"""The label with the bytes of one block."""


def block_label(block_bytes: int | None) -> dict[str, str]:
    """The label that tells the bytes of one block, none where they are unknown."""
    return {} if block_bytes is None else {BLOCK_BYTES: str(block_bytes)}


if TYPE_CHECKING:
    Bytes: TypeAlias = bytes | memoryview
else:
    Bytes = memoryview  # what is read is a view; msgspec has no decoder for both


class Keyframe(msgspec.Struct, frozen=True):
    """Full facts before event ``seq``. A complete keyframe has the leader's memory too, so decisions replay from it."""

    seq: int
    complete: bool
    facts: Bytes
    memory: Bytes = msgspec.field(name="aids")
    about: About | None = None
    parts: int = 0
    """Packed: so many marks ``KeyframePart`` in front of this frame hold facts and memory."""
    facts_bytes: int = 0
    memory_bytes: int = msgspec.field(name="aids_bytes", default=0)
    """Unpacked sizes of a packed keyframe."""


class KeyframePart(msgspec.Struct, frozen=True, tag="keyframe_part"):
    """One part of the packed keyframe whose frame follows."""

    data: bytes


class Gap(msgspec.Struct, frozen=True, tag="gap"):
    """Events ``first`` to ``last`` are missing (``last = first - 1``: only stimuli, keyframes or marks are)."""

    first: int
    last: int
    reason: str
    bytes: int = 0
    """Damaged bytes that were cut out, after a salvage."""

    @property
    def count(self) -> int:
        """The number of missing events."""
        return self.last - self.first + 1


class SyncFailed(msgspec.Struct, frozen=True, tag="sync_failed"):
    """The disk refused to make events ``first`` to ``last`` durable: a power loss may still take them."""

    first: int
    last: int
    error: str


class SegmentEnd(msgspec.Struct, frozen=True, tag="segment_end"):
    """The segment was closed on purpose behind this event. With ``more`` the run goes on in the next segment."""

    last_seq: int
    more: bool


Mark = Gap | SyncFailed | SegmentEnd | KeyframePart


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame as it was written. ``count`` as in its Check; a sealed segment does not keep that of stimuli (0)."""

    channel: int
    first_seq: int
    count: int
    log_ns: int
    publish_ns: int
    data: bytes
    keyframe: Keyframe | None = None
    """A keyframe that was unpacked, or is still to be encoded; then there are no data."""

    @property
    def end_seq(self) -> int:
        """Number of the first event behind this frame; stimuli are numbered apart."""
        return self.first_seq if self.channel == STIMULI else self.first_seq + self.count


class IndexEntry(msgspec.Struct, frozen=True, array_like=True):
    """A run of frames that is read together: one chunk of a sealed segment, about as much of an active one.

    A keyframe that can be started from is an entry of its own (``keyframe``; with memory if ``complete``). Times are
    the engine's clock, those of an entry without items are those of the entry before it.
    """

    offset: int
    length: int
    keyframe: bool
    complete: bool
    first_seq: int
    end_seq: int
    events: int
    stimuli: int
    first_ns: int
    last_ns: int
    gaps: tuple[Gap, ...] = ()
    """The gaps inside, so that a reader knows them without reading the entry."""


_encoder: Final = msgspec.msgpack.Encoder()
_keyframes: Final = msgspec.msgpack.Decoder(Keyframe)
_marks: Final = msgspec.msgpack.Decoder(Mark)
_index: Final = msgspec.msgpack.Decoder(list[IndexEntry])
_about: Final = msgspec.json.Decoder(About)


# --- writing ---------------------------------------------------------------------------------------------------------


def encode_item(item: Keyframe | Mark) -> bytes:
    """The data of a keyframe or mark frame."""
    return _encoder.encode(item)


def encode_keyframe(keyframe: Keyframe) -> list[tuple[int, bytes]]:
    """The frames of a keyframe as (channel, data), its parts first; ``Unpacker`` is the inverse."""
    size = len(keyframe.facts) + len(keyframe.memory)
    if size < PACKED_FROM_BYTES:
        return [(KEYFRAMES, encode_item(keyframe))]
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    body = memoryview(packer.compress(keyframe.facts) + packer.compress(keyframe.memory) + packer.flush())
    parts = [bytes(body[at : at + PART_BYTES]) for at in range(0, len(body), PART_BYTES)]
    head = msgspec.structs.replace(
        keyframe, facts=packed_elsewhere(), memory=b"", parts=len(parts), facts_bytes=len(keyframe.facts),
        memory_bytes=len(keyframe.memory),
    )
    return [*((MARKS, encode_item(KeyframePart(part))) for part in parts), (KEYFRAMES, encode_item(head))]


def divided(frame: Frame) -> list["Frame"]:
    """The frames as which the keyframe is written, because a keyframe may be larger than a frame."""
    if frame.channel != KEYFRAMES or (frame.keyframe is None and len(frame.data) < PACKED_FROM_BYTES):
        return [frame]
    return [
        msgspec.structs.replace(frame, channel=channel, data=data, keyframe=None)
        for channel, data in encode_keyframe(frame.keyframe or decode_keyframe(frame.data))
    ]


def encode_index(entries: Sequence[IndexEntry]) -> bytes:
    """The attachment ``kvbm.index``."""
    return _encoder.encode(list(entries))


def segment_name(segment: int, first_seq: int) -> str:
    """File name without its ending; sorts by segment.

    >>> segment_name(3, 4182377)
    '000003-000004182377'
    """
    return f"{segment:06d}-{first_seq:012d}"


_OUR_NAME: Final = re.compile(r"(\d{6,12})-\d{12,19}\.(?:active|mcap|mcap\.tmp|salvage\.tmp|active\.damaged)")
"""Names that recorder, sealer and salvage give. A directory may hold other files, which are not ours to remove."""


def segment_number(path: Path) -> int:
    """The segment that a recorder's file belongs to, 0 for a file that no recorder has named.

    >>> segment_number(Path("run/000003-000004182377.mcap.tmp")), segment_number(Path("2024-holiday.mcap"))
    (3, 0)
    """
    match = _OUR_NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def about_metadata(about: About) -> dict[str, str]:
    """The preamble's metadata: one JSON document, and the numbers that a foreign tool may want by themselves."""
    metadata = {
        "format": f"{about.major}.{about.minor}",
        "incarnation": about.incarnation,
        "config_digest": f"{about.config.digest():016x}",
        "about": msgspec.json.encode(about, order="sorted").decode(),
    }
    # The container has no CRC over metadata.
    metadata["crc32"] = _metadata_crc(metadata)
    return metadata


def _metadata_crc(metadata: dict[str, str]) -> str:
    parts = sorted(f"{key}={value}\n" for key, value in metadata.items() if key != "crc32")
    return f"{zlib.crc32(''.join(parts).encode()):08x}"


def schemas() -> list[Schema]:
    """The schemas of batches; keyframes and marks are self-describing msgpack."""
    described = descriptor_set()
    return [
        Schema(id=1, name=EVENT_BATCH, encoding="protobuf", data=described),
        Schema(id=2, name=STIMULUS_BATCH, encoding="protobuf", data=described),
    ]


def channels() -> list[Channel]:
    """The four channels, in the order of their numbers."""
    return [
        Channel(
            id=number, topic=topic, message_encoding="protobuf" if number in (EVENTS, STIMULI) else "msgpack",
            metadata={}, schema_id=number if number in (EVENTS, STIMULI) else 0,
        )
        for number, topic in TOPICS.items()
    ]


def encode_preamble(about: About) -> bytes:
    """Everything in front of the first frame."""
    builder = RecordBuilder()
    Header(profile=PROFILE, library=f"{LIBRARY} {about.program}".strip()).write(builder)
    Metadata(name=ABOUT_NAME, metadata=about_metadata(about)).write(builder)
    for schema in schemas():
        schema.write(builder)
    for channel in channels():
        channel.write(builder)
    body = MAGIC + bytes(builder.end())  # type: ignore[no-untyped-call]
    return body + encode_check(zlib.crc32(body), len(body), about.first_seq, 0)


def encode_check(crc: int, length: int, first_seq: int, count: int) -> bytes:
    """A Check behind ``length`` bytes with this CRC."""
    tail = CHECK_TAIL.pack(length, first_seq, count)
    return CHECK.pack(OP_CHECK, CHECK_BODY_BYTES, CHECK_MAGIC, zlib.crc32(tail, crc), length, first_seq, count)


def _crc32(data: bytes, crc: int) -> int:
    """``zlib.crc32`` in parts so short that it does not let go of the interpreter (``waiting`` says why)."""
    view = memoryview(data)
    for first in range(0, len(data), CRC_PART_BYTES):
        crc = zlib.crc32(view[first : first + CRC_PART_BYTES], crc)
    return crc


def encode_frame(frame: Frame) -> list[bytes]:
    """The buffers of one frame, for one ``writev``. The data is not copied."""
    head = MESSAGE_HEAD.pack(
        OP_MESSAGE, MESSAGE_BODY_HEAD_BYTES + len(frame.data), frame.channel, frame.first_seq & SEQ_MASK,
        frame.log_ns, frame.publish_ns,
    )
    crc = _crc32(frame.data, zlib.crc32(head))
    return [head, frame.data, encode_check(crc, len(head) + len(frame.data), frame.first_seq, frame.count)]


# --- reading ---------------------------------------------------------------------------------------------------------


def _decoded(decoder: Any, data: bytes | str) -> Any:
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:  # of text in it; no DecodeError by itself
        raise msgspec.DecodeError(f"text that is not UTF-8: {error.reason}") from None


def decode_keyframe(data: bytes) -> Keyframe:
    """The keyframe in a frame's data. Raises ``msgspec.DecodeError``."""
    keyframe: Keyframe = _decoded(_keyframes, data)
    return keyframe


class Unpacker:
    """A packed keyframe whose parts come one by one. It takes memory for what they hold, not for what they claim."""

    def __init__(self) -> None:
        self.parts = 0
        """Parts that have come."""
        self._whole = SparseBytes(0)
        self._writer: zstandard.ZstdDecompressionWriter | None = None
        self._refused = ""
        """Why the parts are no keyframe."""

    def add(self, part: bytes) -> None:
        """Unpack the next part. ``keyframe`` tells the errors, since no keyframe needs the parts that none follows."""
        self.parts += 1
        if self._refused:
            return
        try:
            if self._writer is None:
                size = zstandard.frame_content_size(part)
                if not 0 <= size <= KEYFRAME_BYTES_MAX:
                    raise ValueError
                self._whole = SparseBytes(size)
                unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
                self._writer = unpacker.stream_writer(self._whole)  # type: ignore[arg-type]  # it writes and no more
            self._writer.write(part)
        except ValueError:
            self._refused = "its parts are not as large as it claims"
        except zstandard.ZstdError as error:
            self._refused = f"its parts cannot be unpacked: {error}"

    def keyframe(self, head: Keyframe) -> Keyframe:
        """The whole keyframe, behind its last part. Raises ``msgspec.DecodeError`` when the parts do not fit."""
        size, found = head.facts_bytes + head.memory_bytes, self._whole.view
        if min(head.facts_bytes, head.memory_bytes) < 0 or size > KEYFRAME_BYTES_MAX:
            raise msgspec.DecodeError(f"it claims {size} bytes, above the limit of {KEYFRAME_BYTES_MAX}")
        if self.parts != head.parts:
            raise msgspec.DecodeError(f"it has {self.parts} of its {head.parts} parts")
        if self._refused:
            raise msgspec.DecodeError(self._refused)
        if len(found) != size:
            raise msgspec.DecodeError("its parts are not as large as it claims")
        if not self._whole.full:
            raise msgspec.DecodeError("its parts cannot be unpacked: they end too early")
        return msgspec.structs.replace(
            head, facts=found[: head.facts_bytes], memory=found[head.facts_bytes :], parts=0, facts_bytes=0,
            memory_bytes=0,
        )


def decode_mark(data: bytes) -> Mark | None:
    """The mark in a frame's data, None for a kind of a newer minor version. Raises ``msgspec.DecodeError``."""
    try:
        mark: Mark = _decoded(_marks, data)
        return mark
    except msgspec.ValidationError:
        return None


def decode_index(data: bytes) -> list[IndexEntry]:
    """The entries of ``kvbm.index``. Raises ``msgspec.DecodeError``."""
    entries: list[IndexEntry] = _decoded(_index, data)
    return entries


def decode_about(metadata: dict[str, str]) -> About:
    """The description in a preamble's metadata. Raises ``msgspec.DecodeError`` or ``ValueError`` when it is damaged."""
    if metadata.get("crc32") != _metadata_crc(metadata):
        raise ValueError("its checksum is wrong")
    about: About = _decoded(_about, metadata.get("about", ""))
    return about
