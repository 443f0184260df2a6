"""The text of kvbm_console/cli/JSON.md: the JSON of every command, key by key.

Law of this file: keys, types and words come from the types of ``cli.documents`` and of the library, nothing else.
"""

import ast
import inspect
import types
import typing
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.cli import documents

FILE: Final = Path(__file__).resolve().parents[2] / "kvbm_console" / "cli" / "JSON.md"
HEAD: Final = """# The JSON of every command

`--format json` prints one document on one line of stdout. Identifiers are strings, absent values are `null`, words are
the lower-case labels that the screens show, times are nanoseconds (`_ns`), blocks and tokens are counts. New keys may
be added; no key is renamed or removed. `[]` stands for each entry of a list, `*` for each key of an object.

This file is generated from the types (`make docs`), and `tests/cli/test_documents.py` compares the types with the
output of every command.
"""


def text() -> str:
    """The whole file."""
    by_kind: dict[str, tuple[Any, list[str]]] = {}
    for command, kind in documents.documents().items():
        by_kind.setdefault(repr(kind), (kind, []))[1].append(command)
    lines = [HEAD]
    for kind, commands in by_kind.values():
        lines += [f"## {', '.join(f'`{command}`' for command in commands)}", ""]
        for one in _kinds(kind):
            lines += [_about(one), "", "| key | type | says |", "|---|---|---|", *_rows(one, ""), ""]
    lines += ["## Commands whose keys stand elsewhere", ""]
    lines += [f"- `{command}`: {words}" for command, words in documents.ELSEWHERE.items()]
    lines += ["", "## Commands without a document", ""]
    lines += [f"- `{command}`: {why}" for command, why in documents.INTERACTIVE.items()]
    return "\n".join(lines) + "\n"


def _kinds(kind: Any) -> list[Any]:
    """The documents of a command that has several; a document that may be null is one."""
    several = [one for one in typing.get_args(kind) if typing.get_origin(kind) is types.UnionType]
    return [kind] if type(None) in several or not several else several


def _about(kind: Any) -> str:
    struct = _struct(kind)
    many = "A list. " if typing.get_origin(kind) is list else ""
    null = "Null, or: " if type(None) in typing.get_args(kind) else ""
    return many + null + _words(struct.__doc__ or "")


def _words(text: str) -> str:
    return " ".join(text.strip().split("\n\n")[0].split()).replace("|", "\\|").replace("``", "`")


def _struct(kind: Any) -> Any:
    """The object inside lists and unions; None where there is none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for one in typing.get_args(kind) if (found := _struct(one)) is not None), None)


def _rows(kind: Any, prefix: str, above: tuple[Any, ...] = ()) -> list[str]:
    """A row for each key; an object inside an object of its own kind is not opened a second time."""
    struct = _struct(kind)
    hints, told = typing.get_type_hints(struct), _told(struct)
    config = struct.__struct_config__
    rows = [] if config.tag_field is None else [f"| `{prefix}{config.tag_field}` | {type_words(type(config.tag))} | "
                                                f"Always `{config.tag}`. |"]
    for field in msgspec.structs.fields(struct):
        its = hints[field.name]
        key = f"{prefix}{field.encode_name}"
        rows.append(f"| `{key}` | {type_words(its)} | {told.get(field.name, '')} |")
        inner = _struct(its)
        if inner is not None and inner not in (struct, *above):
            rows += _rows(its, f"{key}{_step(its)}.", (struct, *above))
    return rows


def _step(kind: Any) -> str:
    """How a key goes on inside a list or an object."""
    origins = [typing.get_origin(one) for one in (kind, *typing.get_args(kind))]
    return "[]" if list in origins or tuple in origins else ".*" if dict in origins else ""


def type_words(kind: Any) -> str:
    """A type as JSON knows it: ``integer or null``, ``list of string``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return "any"
    if origin in (types.UnionType, typing.Union):
        return " or ".join("absent" if one is msgspec.UnsetType else type_words(one) for one in args)
    if origin in (list, tuple):
        return f"list of {type_words(args[0])}"
    if origin is dict:
        return f"object of {type_words(args[1])}"
    if origin is typing.Literal:
        return "string"
    if origin is typing.Annotated:
        return type_words(args[0])
    if issubclass(kind, Enum):
        return type_words(type(next(iter(kind)).value))
    names = {str: "string", int: "integer", bool: "true or false", float: "number", type(None): "null"}
    return names.get(kind, "object")


@cache
def _told(struct: Any) -> dict[str, str]:
    """Field to the docstring below it."""
    found = {}
    for base in reversed(struct.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        (body,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(body, ast.ClassDef)
        for one, after in zip(body.body, body.body[1:], strict=False):
            if (isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)):
                found[one.target.id] = _words(str(after.value.value))
    return found
