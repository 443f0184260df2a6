"""The generated part of the debugger's reference: ``python -m tests.debug.reference`` writes it anew.

Law of this file: the tables are what the schemas say.
"""

import re
from pathlib import Path
from typing import Final

from kvbm_console.core.expression import CONDITION, EVENT, SLOT, Schema

DOCUMENT: Final = Path(__file__).resolve().parent.parent.parent / "kvbm_console" / "debug" / "REFERENCE.md"
_MARKS: Final = re.compile(r"(<!-- generated: fields -->\n).*?(<!-- end of fields -->)", re.DOTALL)
TITLES: Final = {
    "Fields of a slot": (SLOT, ()), "Further fields of a condition": (CONDITION, tuple(SLOT.fields)),
    "Fields of an event": (EVENT, ()),
}


def table(schema: Schema, leave_out: tuple[str, ...]) -> str:
    """A table of the fields; the tiers' ones once, for G1."""
    lines = ["| field | is | |", "|---|---|---|"]
    for name, field in schema.fields.items():
        if name in leave_out or re.match(r"tiers\.g[234]\.", name):
            continue
        kind = "yes or no" if field.flag else field.kind.value
        optional = ", or none" if field.optional else ""
        lines.append(f"| `{name}` | {kind}{optional} | {field.about} |")
    return "\n".join(lines)


def regenerated(text: str) -> str:
    """The document with its tables made anew."""
    parts = [f"### {title}\n\n{table(*of)}\n" for title, of in TITLES.items()]
    body = "\n".join(parts) + "\n`tiers.g2`, `tiers.g3` and `tiers.g4` have the same fields as `tiers.g1`.\n"
    return _MARKS.sub(lambda found: found[1] + "\n" + body + "\n" + found[2], text)


if __name__ == "__main__":
    DOCUMENT.write_text(regenerated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
