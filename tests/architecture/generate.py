"""Writes the generated parts of docs/kinds.md (state diagram, table of all kinds), the table of all JSON, and the
reference of ``simulate``.

Law of this file: all come from the code alone (``slots.TRANSITIONS``, the three unions), so the document cannot tell
another story than the program. ``python -m tests.architecture.generate [--check]``.
"""

import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core import events, instructions, stimuli
from kvbm_console.core.ids import SlotState
from kvbm_console.core.slots import TRANSITIONS
from tests.architecture import json_table, planning_reference

DOCUMENT: Final = Path(__file__).resolve().parent.parent.parent / "docs" / "kinds.md"
_COMMON: Final = {
    "stimuli": ("n", "at_ns", "source", "origin_ns"), "events": ("seq", "at_ns", "cause"), "instructions": (),
}
_STOPS: Final = frozenset({"preempted", "finished", "finished, copies outstanding"})


def state_diagram() -> str:
    """Mermaid source of the slot's state machine."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> initialized"]
    for old, moves in TRANSITIONS.items():
        lines += [f"    {old.label} --> {new.label}: {why}" for new, why in moves.items() if why not in _STOPS]
    live = [state.label for state in SlotState if SlotState.FINISHED in TRANSITIONS[state]]
    preemptible = [state.label for state in SlotState if SlotState.PREEMPTED in TRANSITIONS[state]]
    lines += ["    finished --> [*]", "```", ""]
    lines.append(f'Besides, left out of the picture for its sake: {_words(preemptible)} → preempted ("preempted");')
    stoppable = [label for label in live if label != SlotState.FINISHING.label]
    lines.append(f'{_words(stoppable)} → finishing ("finished, copies outstanding") or finished ("finished").')
    return "\n".join(lines)


def _words(labels: list[str]) -> str:
    return ", ".join(labels[:-1]) + " and " + labels[-1]


def kinds_tables() -> str:
    """One table of all stimulus, event and instruction kinds with their fields and what they say."""
    parts = []
    for title, union, common in (
        ("Stimuli: what the core is told", stimuli.AnyStimulus, _COMMON["stimuli"]),
        ("Events: what became true", events.AnyEvent, _COMMON["events"]),
        ("Instructions: what the core asks of the shell", instructions.AnyInstruction, _COMMON["instructions"]),
    ):
        shared = ", ".join(f"`{field}`" for field in common)
        parts += [f"**{title}**" + (f" (each with {shared})" if shared else ""), "", "| tag | kind | fields | says |",
                  "|---:|---|---|---|"]
        kinds = sorted(typing.get_args(union), key=lambda kind: int(kind.__struct_config__.tag))
        parts += [_row(kind, common) for kind in kinds]
        parts.append("")
    return "\n".join(parts).rstrip()


def _row(kind: Any, common: tuple[str, ...]) -> str:
    fields = [
        f"{field.name}: {type_words(field.type)}"
        for field in msgspec.structs.fields(kind) if field.name not in common
    ]
    says = " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split()).replace("|", "\\|").replace("``", "`")
    return f"| {kind.__struct_config__.tag} | `{kind.__name__}` | {', '.join(fields) or '–'} | {says} |"


def type_words(annotation: Any) -> str:
    """A type as the table shows it: ``int or null``, ``bytes``, ``SlotState``, ``list of int``."""
    if annotation is type(None):
        return "null"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_words(args[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_words(arg) for arg in args)
    if origin is tuple:
        return f"list of {type_words(args[0])}" if args[-1] is Ellipsis else f"{len(args)} × {type_words(args[0])}"
    return str(annotation.__name__)


PARTS: Final = {"state diagram": state_diagram, "kinds": kinds_tables}


def regenerated(text: str) -> str:
    """The document with its generated parts made anew; raises ValueError when a pair of marks is missing."""
    for name, make in PARTS.items():
        pattern = re.compile(f"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"docs/kinds.md must have the marks of {name!r} once")
        body = make()
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> int:
    """Rewrite the documents, or with ``--check`` only say which of them are stale (exit 1)."""
    made = {DOCUMENT: regenerated(DOCUMENT.read_text(encoding="utf-8")), json_table.FILE: json_table.text(),
            planning_reference.FILE: planning_reference.text()}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} is stale: run make docs", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
