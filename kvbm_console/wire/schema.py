"""The contract of batches as bytes, for containers that describe themselves.

Law of this file: the schema that is written next to data is a part of the schema that the code was generated from.
"""

from typing import Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from kvbm_console.wire.v1 import console_pb2 as pb

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
