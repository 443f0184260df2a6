"""Batches: events and stimuli as the bytes that ring, wire and recording share.

Law of this file: a batch is encoded once and passed on as the same bytes. Reading checks the writer's promises (count,
numbers without a hole), because the bytes may come from a stranger.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, cast

import msgspec
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from kvbm_console.core.errors import KvbmConsoleError
from kvbm_console.core.events import SCHEMA_ID, AnyEvent, Event, UnknownKind
from kvbm_console.core.stimuli import AnyStimulus, Stimulus
from kvbm_console.wire import convert
from kvbm_console.wire.frames import varint
from kvbm_console.wire.v1 import console_pb2 as pb

BATCH_BYTES_MAX: Final = 64 * 1024 * 1024
"""No batch is larger: a flush holds at most 4,096 events, and a recording's frames have the same bound."""
BATCH_COUNT_MAX: Final = 1_000_000
"""Bound for the count that a batch claims, checked before anything is allocated for it."""

MSGPACK: Final = int(pb.ENCODING_MSGPACK)
PROTOBUF: Final = int(pb.ENCODING_PROTOBUF)

_EVENTS_TAG: Final = bytes([pb.EventBatch.PAYLOAD_FIELD_NUMBER << 3 | 2])
_STIMULI_TAG: Final = bytes([pb.StimulusBatch.PAYLOAD_FIELD_NUMBER << 3 | 2])
"""The number of the payload and wire type 2; only the items of the other encoding stand behind it in a message."""
_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[AnyEvent])
_event = msgspec.msgpack.Decoder(AnyEvent)
_raw_items = msgspec.msgpack.Decoder(list[msgspec.Raw])
_heads = msgspec.msgpack.Decoder(list[Any])
_stimuli = msgspec.msgpack.Decoder(list[AnyStimulus])


class MalformedBatch(KvbmConsoleError):
    """Raised when bytes are not a batch, or not the batch that they claim to be."""


class NewerSchema(MalformedBatch):
    """Raised when stimuli of a newer schema cannot be read, so decisions cannot be replayed."""


class EventChunk(msgspec.Struct, frozen=True, gc=False):
    """An encoded ``EventBatch``: events ``first_seq`` to ``first_seq + count - 1``."""

    first_seq: int
    count: int
    base_ns: int
    last_ns: int
    data: bytes

    @property
    def last_seq(self) -> int:
        """Number of the last event."""
        return self.first_seq + self.count - 1


class UnreadBatch:
    """A batch of which only the head was read: ``count`` events from ``first_seq`` on, of times up to ``last_ns``.

    ``read`` decodes the events; ``may_have`` excludes kinds without decoding.
    """

    __slots__ = ("_batch", "base_ns", "count", "first_seq", "last_ns")

    def __init__(self, batch: pb.EventBatch) -> None:
        """Take a parsed batch. Raises ``MalformedBatch`` when its head cannot be true."""
        self.first_seq, self.count = batch.first_seq, batch.count
        self.base_ns, self.last_ns = batch.base_ns, batch.last_ns
        self._batch = batch
        _require_count(batch)

    @property
    def last_seq(self) -> int:
        """Number of the last event."""
        return self.first_seq + self.count - 1

    @property
    def data(self) -> bytes:
        """The batch as it came."""
        return self._batch.SerializeToString()

    def read(self) -> list[Event]:
        """The events. Raises ``MalformedBatch``."""
        return events_of(self._batch)

    def may_have(self, kinds: Sequence[type[Event]]) -> bool:
        """False only when no event is of these kinds; costs a fraction of decoding."""
        if self._batch.encoding != MSGPACK or self._batch.schema_id > SCHEMA_ID:
            return True
        seq = _common(_encoder.encode(self.first_seq), _encoder.encode(self.last_seq))
        payload = self._batch.payload
        return any(payload.startswith(seq, head.end()) for kind in kinds for head in _heads_in(kind)(payload))


def _common(first: bytes, last: bytes) -> bytes:
    """The common prefix of two encoded numbers, which all numbers between them share; empty for unequal lengths."""
    if len(first) != len(last):
        return b""
    return first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), len(first))]


@cache
def _heads_in(kind: type[Event]) -> Callable[[bytes], Iterator["re.Match[bytes]"]]:
    """Finds where encoded events of this kind may begin: the length of the array, and the tag.

    By an expression, which looks for a constant in half the time of ``in``; only few other bytes read alike.
    """
    fields = len(kind.__struct_fields__) + 1
    length = bytes([0x90 | fields]) if fields < 16 else b"\xdc" + fields.to_bytes(2, "big")
    return re.compile(re.escape(length + _encoder.encode(kind.__struct_config__.tag))).finditer


class StimulusChunk(msgspec.Struct, frozen=True, gc=False):
    """An encoded ``StimulusBatch``: stimuli ``first_n`` to ``first_n + count - 1``."""

    first_n: int
    count: int
    base_ns: int
    last_ns: int
    data: bytes


def pack_events(events: Sequence[Event], lost_before: int = 0, encoding: int = MSGPACK) -> EventChunk:
    """Encode at least one event; they are contiguous. ``lost_before`` events were lost directly before them."""
    first, last = events[0], events[-1]
    batch = pb.EventBatch(
        first_seq=first.seq, count=len(events), base_ns=first.at_ns, last_ns=last.at_ns, schema_id=SCHEMA_ID,
        lost_before=lost_before, encoding=cast(Any, encoding),
    )
    if encoding == MSGPACK:
        data = _with_payload(batch, _EVENTS_TAG, _encoder.encode(events))
    else:
        for event in events:
            convert.EVENTS.to_message(event, batch.events.add())
        data = batch.SerializeToString()
    return EventChunk(first.seq, len(events), first.at_ns, last.at_ns, data)


def pack_stimuli(stimuli: Sequence[Stimulus], encoding: int = MSGPACK) -> StimulusChunk:
    """Encode at least one stimulus; they are contiguous."""
    first, last = stimuli[0], stimuli[-1]
    batch = pb.StimulusBatch(
        first_n=first.n, count=len(stimuli), base_ns=first.at_ns, last_ns=last.at_ns, schema_id=SCHEMA_ID,
        encoding=cast(Any, encoding),
    )
    if encoding == MSGPACK:
        data = _with_payload(batch, _STIMULI_TAG, _encoder.encode(stimuli))
    else:
        for stimulus in stimuli:
            convert.STIMULI.to_message(stimulus, batch.stimuli.add())
        data = batch.SerializeToString()
    return StimulusChunk(first.n, len(stimuli), first.at_ns, last.at_ns, data)


def _with_payload(head: Any, tag: bytes, payload: bytes) -> bytes:
    """The message with its last field, byte for byte as generated code would write it, but copied once, not thrice."""
    return b"".join((head.SerializeToString(), tag, varint(len(payload)), payload))


def event_chunk(data: bytes) -> EventChunk:
    """The head of an encoded batch, without its events. Raises ``MalformedBatch``."""
    batch = _parse(pb.EventBatch, data)
    return EventChunk(batch.first_seq, batch.count, batch.base_ns, batch.last_ns, data)


def unpack_events(data: bytes) -> list[Event]:
    """The events of an encoded batch of either encoding. Raises ``MalformedBatch``."""
    return events_of(_parse(pb.EventBatch, data))


def unpack_stimuli(data: bytes) -> list[Stimulus]:
    """The stimuli of an encoded batch of either encoding. Raises ``MalformedBatch``."""
    return stimuli_of(_parse(pb.StimulusBatch, data))


def events_of(batch: pb.EventBatch) -> list[Event]:
    """The events of a parsed batch. Raises ``MalformedBatch``."""
    events: list[Event] = _decode(batch, _events, convert.EVENTS, batch.events)
    _require(len(events) == batch.count, f"{batch.count} events were announced and {len(events)} came")
    for seq, event in enumerate(events, batch.first_seq):
        if event.seq != seq:  # not by _require: the sentence alone would cost as much as decoding the event
            raise MalformedBatch(f"event {seq} is missing")
    return events


def stimuli_of(batch: pb.StimulusBatch) -> list[Stimulus]:
    """The stimuli of a parsed batch. Raises ``MalformedBatch``."""
    stimuli: list[Stimulus] = _decode(batch, _stimuli, convert.STIMULI, batch.stimuli)
    _require(len(stimuli) == batch.count, f"{batch.count} stimuli were announced and {len(stimuli)} came")
    for n, stimulus in enumerate(stimuli, batch.first_n):
        if stimulus.n != n:
            raise MalformedBatch(f"stimulus {n} is missing")
    return stimuli


def recoded(data: bytes, encoding: int) -> EventChunk:
    """The same events in another encoding."""
    batch = _parse(pb.EventBatch, data)
    return pack_events(events_of(batch), batch.lost_before, encoding)


def _parse(kind: Any, data: bytes) -> Any:
    _require(len(data) <= BATCH_BYTES_MAX, f"a batch has at most {BATCH_BYTES_MAX} bytes, not {len(data)}")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise MalformedBatch("the bytes are not a batch") from None


def _require_count(batch: Any) -> None:
    _require(0 < batch.count <= BATCH_COUNT_MAX, f"a batch has 1 to {BATCH_COUNT_MAX} items, not {batch.count}")


def _decode(batch: Any, decoder: Any, converter: convert.UnionConverter, typed: Any) -> list[Any]:
    _require_count(batch)
    try:
        if batch.encoding == MSGPACK:
            return _decode_msgpack(batch, decoder)
        if batch.encoding == PROTOBUF:
            return [converter.from_message(item) for item in typed]
    except (msgspec.MsgspecError, ValueError, KvbmConsoleError, RecursionError) as error:
        raise MalformedBatch(f"a batch cannot be read: {error}") from None
    raise MalformedBatch(f"encoding {batch.encoding} is unknown")


def _decode_msgpack(batch: Any, decoder: Any) -> list[Any]:
    """The items. In a newer schema an unknown event is an ``UnknownKind``, and a batch of stimuli is refused."""
    try:
        return cast(list[Any], decoder.decode(batch.payload))
    except msgspec.ValidationError as error:
        if batch.schema_id <= SCHEMA_ID:
            raise
        if decoder is not _events:
            raise NewerSchema(f"schema {batch.schema_id} is newer than {SCHEMA_ID}: {error}") from None
    items = _raw_items.decode(batch.payload)
    _require(len(items) <= BATCH_COUNT_MAX, f"a batch has at most {BATCH_COUNT_MAX} items")
    return [_known_or_not(item) for item in items]


def _known_or_not(item: msgspec.Raw) -> Event:
    try:
        return cast(Event, _event.decode(item))
    except msgspec.ValidationError:
        kind, seq, at_ns, cause = _heads.decode(item)[:4]
        return UnknownKind(*msgspec.convert((seq, at_ns, cause, kind), tuple[int, int, int, int]))


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise MalformedBatch(message)

# --- for containers that describe themselves ---


EVENT_BATCH: Final = str(pb.EventBatch.DESCRIPTOR.full_name)
STIMULUS_BATCH: Final = str(pb.StimulusBatch.DESCRIPTOR.full_name)
WIRE_PACKAGE: Final = str(pb.DESCRIPTOR.package)
_TYPED_ITEMS: Final = ("events", "stimuli")
"""Fields that only the other encoding fills. With them the set has 21 KB, twice in every segment, else 1 KB."""


def descriptor_set() -> bytes:
    """A serialised ``FileDescriptorSet`` of both batches in their msgpack encoding, for readers in any language."""
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    batches = [message for message in file.message_type if message.name in ("EventBatch", "StimulusBatch")]
    for message in batches:
        fields = [field for field in message.field if field.name not in _TYPED_ITEMS]
        del message.field[:]
        message.field.extend(fields)
    kept = _reachable(file, batches)
    messages = [message for message in file.message_type if message.name in kept]
    enums = [enum for enum in file.enum_type if enum.name in kept]
    small = FileDescriptorProto(
        name=file.name, package=file.package, syntax=file.syntax, message_type=messages, enum_type=enums
    )
    return FileDescriptorSet(file=[small]).SerializeToString(deterministic=True)


def _reachable(file: FileDescriptorProto, roots: list[DescriptorProto]) -> set[str]:
    """Names of the messages and enums of ``file`` that the roots need, themselves included."""
    known = {message.name: message for message in file.message_type}
    kept: set[str] = set()
    open_names = [message.name for message in roots]
    while open_names:
        name = open_names.pop()
        if name in kept:
            continue
        kept.add(name)
        if name in known:
            open_names += [field.type_name.rsplit(".", 1)[-1] for field in known[name].field if field.type_name]
    return kept
