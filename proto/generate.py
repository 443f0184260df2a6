"""Writes the contract's second half, ``kvbm_console/wire/v1`` and ``versions.json``.

The first half of ``console.proto`` is written by hand: the service and its messages. Everything below the line
``SCHEMA`` says what ``core/events.py``, ``stimuli.py``, ``config.py``, ``ids.py`` and ``stream/verbs.py`` say,
docstrings included, so a kind of event or a verb is declared only there:

    class SlotClosed(Event, tag=4):                  //: in Event:  SlotClosed slot_closed = 104;
        \"\"\"The slot has ended.\"\"\"                  =>  // The slot has ended.
        slot: int                                        message SlotClosed { int64 slot = 1; }

The number of a kind is 100 plus its tag, the number of a field its place. ``versions.json`` keeps a digest of the
schema for every minor version, and a changed schema under an old version is refused.

Only messages are generated. Server and client pass batches on as bytes, so they register and call methods by the
descriptors' names (``kvbm_console.wire.protocol``).

Law of this file: the committed files are exactly what ``python proto/generate.py`` writes; a test compares them.
"""

import ast
import hashlib
import inspect
import itertools
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from enum import IntEnum
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core import ids
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import FORMAT_MINOR, KIND_NUMBER_BASE, PROTOCOL_MINOR, SCHEMA_ID, AnyEvent, Event
from kvbm_console.core.stimuli import WIRE_NAMES, AnyStimulus, Stimulus
from kvbm_console.stream.verbs import VERBS

ROOT: Final = Path(__file__).resolve().parent.parent
PROTO: Final = "kvbm_console/wire/v1/console.proto"
VERSIONS_FILE: Final = ROOT / "proto" / "versions.json"
SCHEMA: Final = "// --- schema, generated from kvbm_console by `make proto`: do not edit below this line ---\n"
WIDTH: Final = 120
SCALARS: Final = {bool: "bool", int: "int64", float: "double", str: "string", bytes: "bytes"}
PROCESS_WORDS: Final = frozenset({"Clock", "Condition"})
"""Words that neither events nor stimuli carry."""
RESERVED: Final = {"SkipReason": {3: "BELOW_PRIORITY", 6: "WITHDRAWN", 7: "POLICY"}}
"""Values that were named once: the compiler refuses a new member that takes their number or name."""
COMMENTS: Final = {
    "Event": """One event of the encoding `protobuf`. The number of a kind is 100 plus its tag in the encoding
        `msgpack`; the number of a field is its place behind the common ones. Columns of block ids are little-endian
        int32, of sequence hashes little-endian uint64.""",
    "Stimulus": "One stimulus of the encoding `protobuf`, numbered like `Event`.",
}


def schema() -> str:
    """The generated half of the contract."""
    words = [word for word in ids.Word.__subclasses__() if word.__name__ not in PROCESS_WORDS]
    parts = [
        _requests(), *(_message(verb, 0) for verb in VERBS), _message(BreakpointSpec, 0), _union(Event, AnyEvent),
        _union(Stimulus, AnyStimulus), *map(_enum, words),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _requests() -> Iterator[str]:
    yield from _comment("One request of a session. Every request is answered by one reply with its `id`, in order.")
    yield "message ControlRequest {"
    yield "  int64 id = 1;"
    yield "  oneof verb {"
    for kind in sorted(VERBS, key=_tag):
        yield f"    {kind.__name__} {kind.verb} = {_tag(kind)};"
    yield "  }"
    yield "}"


def _tag(kind: type[msgspec.Struct]) -> int:
    return int(kind.__struct_config__.tag)  # type: ignore[arg-type]


def _name(kind: type[msgspec.Struct]) -> str:
    return WIRE_NAMES.get(kind, kind.__name__)


def _union(base: type[msgspec.Struct], union: Any) -> Iterator[str]:
    kinds = sorted(typing.get_args(union), key=_tag)
    yield from _comment(COMMENTS[base.__name__])
    yield f"message {base.__name__} {{"
    yield from _fields(base, 0)
    yield "  oneof kind {"
    for kind in kinds:
        yield f"    {_name(kind)} {_snake(_name(kind))} = {KIND_NUMBER_BASE + _tag(kind)};"
    yield "  }"
    for kind in kinds:
        yield ""
        yield from (f"  {line}" for line in _message(kind, len(base.__struct_fields__), "  "))
    yield "}"


def _message(kind: type[msgspec.Struct], common: int, indent: str = "") -> Iterator[str]:
    yield from _comment(kind.__doc__, indent)
    yield f"message {_name(kind)} {{"
    yield from _fields(kind, common, indent)
    yield "}"


def _fields(kind: type[msgspec.Struct], common: int, indent: str = "") -> Iterator[str]:
    hints, comments = typing.get_type_hints(kind), _attribute_docstrings(kind)
    for number, name in enumerate(kind.__struct_fields__[common:], 1):
        yield from (f"  {line}" for line in _comment(comments.get(name), indent + "  "))
        yield f"  {_type(hints[name])} {name} = {number};"


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return f"optional {_type(inner)}"
    if origin is tuple:
        return f"repeated {_type(arguments[0])}"
    return SCALARS.get(annotation) or str(annotation.__name__)


def _enum(word: type[IntEnum]) -> Iterator[str]:
    name, comments, reserved = word.__name__, _attribute_docstrings(word), RESERVED.get(word.__name__, {})
    prefix = _snake(name).upper()
    yield from _comment(word.__doc__)
    yield f"enum {name} {{"
    if reserved:
        names = ", ".join(f'"{prefix}_{member}"' for member in reserved.values())
        yield f"  reserved {', '.join(map(str, reserved))};"
        yield f"  reserved {names};"
    if 0 not in list(word):
        yield f"  {prefix}_UNSPECIFIED = 0;"
    for member in word:
        yield from (f"  {line}" for line in _comment(comments.get(member.name), "  "))
        yield f"  {prefix}_{member.name} = {int(member)};"
    yield "}"


def _comment(text: str | None, indent: str = "") -> Iterator[str]:
    """The first paragraphs of a docstring as comment lines; doctests are left out."""
    paragraphs = inspect.cleandoc(text or "").replace("``", "`").split("\n\n")
    paragraphs = [paragraph for paragraph in paragraphs if paragraph and not paragraph.startswith(">>>")]
    for at, paragraph in enumerate(paragraphs):
        if at:
            yield "//"
        yield from (f"// {line}" for line in textwrap.wrap(paragraph, WIDTH - len(indent) - 3, break_on_hyphens=False))


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """The string below each attribute of a class, by the attribute's name."""
    (body,) = (node.body for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body
               if isinstance(node, ast.ClassDef))
    found = {}
    for above, below in itertools.pairwise(body):
        target = above.target if isinstance(above, ast.AnnAssign) else above.targets[0] if isinstance(
            above, ast.Assign) else None
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[target.id] = str(below.value.value)
    return found


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def contract() -> str:
    """``console.proto`` as it should be: its hand-written half as it is, and the generated half."""
    by_hand, line, _ = (ROOT / "proto" / PROTO).read_text().partition(SCHEMA)
    if not line:
        raise SystemExit(f"{PROTO} lacks the line that begins its generated half: {SCHEMA}")
    return f"{by_hand}{SCHEMA}\n{schema()}"


def generate(target: Path) -> None:
    """Write the contract and its code below ``target``; exits with the compiler's status on an error."""
    protoc = import_module("grpc_tools.protoc")
    source = target / "proto" / PROTO
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(contract())
    builtin = str(resources.files("grpc_tools") / "_proto")
    paths = [f"-I{target / 'proto'}", f"-I{builtin}"]
    status = protoc.main(["protoc", *paths, f"--python_out={target}", f"--pyi_out={target}", PROTO])
    if status:
        raise SystemExit(status)


def digests() -> dict[str, str]:
    """Digest of the schema under the present minor version of the protocol and of the recording format.

    The protocol's digest covers the whole contract, the format's all that a batch can hold.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from kvbm_console.recording.format import FORMAT_MAJOR
    from kvbm_console.wire.protocol import PROTOCOL_MAJOR
    from kvbm_console.wire.v1 import console_pb2

    file = FileDescriptorProto.FromString(console_pb2.DESCRIPTOR.serialized_pb)
    declared = [line for message in file.message_type for line in _declared(message)]
    declared += [f"{enum.name} {value.name} {value.number}" for enum in file.enum_type for value in enum.value]
    declared += [f"{method.name} {method.input_type} {method.output_type}" for method in file.service[0].method]
    core = {"BreakpointSpec", "Event", "Stimulus", *(word.__name__ for word in ids.Word.__subclasses__())}
    batches = _digest(line for line in declared if re.split("[ .]", line, maxsplit=1)[0] in core)
    return {
        f"protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}": _digest(declared),
        f"recording format {FORMAT_MAJOR}.{FORMAT_MINOR}": batches,
        f"SCHEMA_ID {SCHEMA_ID}": batches,
    }


def _declared(message: Any, outer: str = "") -> Iterator[str]:
    """One line for each field of a message and of the messages in it, whatever their order in the file."""
    name = f"{outer}{message.name}"
    yield name
    for field in message.field:
        yield f"{name} {field.name} {field.number} {field.label} {field.type} {field.type_name} {field.proto3_optional}"
    for nested in message.nested_type:
        yield from _declared(nested, f"{name}.")


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]


def with_versions(known: dict[str, str], present: dict[str, str]) -> dict[str, str]:
    """The digests of all versions; exits when a version that is known has another schema at present."""
    for version, digest in present.items():
        if known.get(version, digest) != digest:
            raise SystemExit(f"the schema is not that of {version}: raise that version")
    return known | present


def main() -> None:
    """Write everything below the directory that the first argument names, or below the repository."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    if not target.is_dir():
        sys.exit(f"usage: python proto/generate.py [DIR]; DIR must be a directory, got {target}")
    generate(target)
    versions = with_versions(json.loads(VERSIONS_FILE.read_text()), digests())
    (target / VERSIONS_FILE.relative_to(ROOT)).write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
