"""Files of breakpoints. ``break save`` and a daemon with ``--breakpoints`` write them, and ``break load`` reads them.

A JSON object ``{"breakpoints": [...]}``; every entry has the keys of the ``status`` document that state a breakpoint,
with words as labels. A key that is left out has its default.

Law of this file: a file that is not understood is refused with one sentence that names the file, the entry and the key.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import compile_condition, compile_log
from kvbm_console.core.ids import Word
from kvbm_console.files import read_bounded, replacing

FILE_BYTES_MAX: Final = 1_000_000
"""256 breakpoints with the longest conditions."""
BREAKPOINTS_MAX: Final = 256
_HINTS: Final = get_type_hints(BreakpointSpec)
_RUNTIME: Final = frozenset({"owner", "description", "hits", "message"})
"""Keys of the ``status`` document that do not state a breakpoint."""


def spec_entry(spec: BreakpointSpec) -> dict[str, Any]:
    """A breakpoint as an entry of a file: its id, and the fields that differ from the default."""
    plain = BreakpointSpec()
    document: dict[str, Any] = {"id": spec.id}
    for name in BreakpointSpec.__struct_fields__[1:]:
        value = getattr(spec, name)
        if value != getattr(plain, name):
            document[name] = value.label if isinstance(value, Word) else value
    return document


def spec_from_document(document: dict[str, Any]) -> BreakpointSpec:
    """The breakpoint of an entry. Raises ``UsageError`` with the key that is wrong."""
    fields: dict[str, Any] = {}
    for name, value in document.items():
        if name in _RUNTIME:
            continue
        if name not in _HINTS:
            raise UsageError(f"{name} is no key of a breakpoint")
        fields[name] = _value(name, value)
    spec = BreakpointSpec(**fields)
    for name, text, compile_one in (("condition", spec.condition, compile_condition), ("log", spec.log, compile_log)):
        if text:
            try:
                compile_one(text)
            except UsageError as error:
                raise UsageError(f"{name}, {error}") from None
    return spec


def _value(name: str, value: Any) -> Any:
    kinds = get_args(_HINTS[name]) or (_HINTS[name],)
    word = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Word)), None)
    if value is None and (type(None) in kinds or name == "depends_on"):
        return None if type(None) in kinds else 0
    if word is not None:
        try:
            return word.labelled(str(value))
        except KeyError:
            raise UsageError(
                f"{name} must be one of {', '.join(member.label for member in word)}, got {value!r}"
            ) from None
    if kinds == (int,) and isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)  # identifiers are strings in JSON
    if kinds != (type(value),):
        raise UsageError(f"{name} must be of type {kinds[0].__name__}, got {value!r}")
    return value


def read_specs(path: Path) -> list[BreakpointSpec]:
    """The breakpoints of a file with their ids there, each dependency before its dependents."""
    try:
        document = msgspec.json.decode(read_bounded(path, FILE_BYTES_MAX), type=dict[str, list[dict[str, Any]]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a file of breakpoints: {error}") from None
    if set(document) != {"breakpoints"}:
        raise UsageError(f"{path}: the only key must be breakpoints, got {', '.join(sorted(document)) or 'none'}")
    entries = document["breakpoints"]
    if len(entries) > BREAKPOINTS_MAX:
        raise UsageError(f"{path}: breakpoints must be at most {BREAKPOINTS_MAX}, got {len(entries)}")
    specs = []
    for at, entry in enumerate(entries, 1):
        try:
            spec = spec_from_document(entry)
        except (UsageError, TypeError) as error:
            raise UsageError(f"{path}: breakpoint {at}: {error}") from None
        specs.append(msgspec.structs.replace(spec, id=spec.id or -at))
    return _ordered(path, specs)


def _ordered(path: Path, specs: list[BreakpointSpec]) -> list[BreakpointSpec]:
    ids = {spec.id for spec in specs}
    if len(ids) != len(specs):
        raise UsageError(f"{path}: an id of a breakpoint stands twice")
    placed: dict[int, BreakpointSpec] = {}
    waiting = list(specs)
    while waiting:
        ready = [spec for spec in waiting if spec.depends_on in placed or spec.depends_on not in ids]
        if not ready:
            raise UsageError(f"{path}: breakpoint {waiting[0].id} depends on itself, by way of others")
        placed.update((spec.id, spec) for spec in ready)
        waiting = [spec for spec in waiting if spec.id not in placed]
    return list(placed.values())


def renumbered(spec: BreakpointSpec, numbers: dict[int, int]) -> BreakpointSpec:
    """The breakpoint of a file as a new breakpoint; ``numbers`` maps ids of the file to those given out before."""
    return msgspec.structs.replace(spec, id=0, depends_on=numbers.get(spec.depends_on, 0))


def write_specs(path: Path, specs: Sequence[BreakpointSpec]) -> None:
    """Write a file that ``read_specs`` reads. A reader sees the old file or the new file, never half of it.

    Raises as ``replacing`` does.
    """
    document = {"breakpoints": [spec_entry(spec) for spec in specs]}
    with replacing(path) as draft:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
