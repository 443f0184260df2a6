"""Templates of log points: text with the values of fields in it.

Law of this file: a template is checked when it is set; filling it in never fails and is bounded in length.
"""

import re
from collections.abc import Callable
from typing import Any, Final

from kvbm_console.core.expression.schema import ExpressionError, Field, Kind, Schema, short

TEMPLATE_CHARS_MAX: Final = 256
MESSAGE_CHARS_MAX: Final = 512
"""A line for people; a request id may have 256 bytes, and every hit is recorded."""
_PART: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
_DURATIONS: Final = ((3_600 * 10**9, "h"), (60 * 10**9, "min"), (10**9, "s"), (10**6, "ms"), (10**3, "us"))

Fill = Callable[[Any, Any, Any], str]
"""``fill(item, state, moment)``: the message."""


def compile_template(text: str, schema: Schema) -> Fill:
    """What fills in ``{field}``; ``{{`` and ``}}`` are braces. Raises ``ExpressionError``.

    >>> from kvbm_console.core.expression.fields import SLOT
    >>> compile_template("{requst}", SLOT)
    Traceback (most recent call last):
    ...
    kvbm_console.core.expression.schema.ExpressionError: column 2: a slot has no field `requst`; \
the nearest is `request`
    """
    if len(text) > TEMPLATE_CHARS_MAX:
        raise ExpressionError(
            TEMPLATE_CHARS_MAX + 1, f"a template has at most {TEMPLATE_CHARS_MAX} characters, got {len(text)}"
        )
    if not text.isprintable():
        raise ExpressionError(1, "a template is printable text on one line")
    parts: list[str | Field] = []
    for found in _PART.finditer(text):
        piece, name = found[0], found[1]
        if name is not None:
            parts.append(schema.find(name.strip(), found.start() + 2))
        elif piece in "{}":
            raise ExpressionError(found.start() + 1, f"`{piece}` stands alone; a brace itself is `{piece * 2}`")
        else:
            parts.append(piece[0] if piece in ("{{", "}}") else piece)

    def fill(item: Any, state: Any, moment: Any) -> str:
        message = "".join(
            part if isinstance(part, str) else value_text(part, part.get(item, state, moment)) for part in parts
        )
        return message if len(message) <= MESSAGE_CHARS_MAX else message[: MESSAGE_CHARS_MAX - 1] + "…"

    return fill


def value_text(field: Field, value: Any) -> str:
    """A value as people read it.

    >>> value_text(Field("age", Kind.DURATION, lambda i, s, m: 0, ""), 1_500_000)
    '1.5 ms'
    """
    if value is None:
        return "none"
    if field.many:
        return ", ".join(_one(field, part) for part in value) or "none"
    return _one(field, value)


def _one(field: Field, value: Any) -> str:
    if field.kind is Kind.WORD:
        return next((label for label, known in field.words.items() if known == value), str(value))
    if field.kind is Kind.DURATION:
        for factor, unit in _DURATIONS:
            if abs(value) >= factor:
                return f"{value / factor:.3g} {unit}" if abs(value) < 1_000 * factor else f"{value // factor} {unit}"
        return f"{value} ns"
    return short(value) if isinstance(value, str) and not value.isprintable() else str(value)


def variables(item: Any, state: Any, moment: Any, schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names, values as text) of every field that has a value: what a debugger shows of a stopped slot."""
    found = [(name, field.get(item, state, moment), field) for name, field in schema.fields.items()]
    known = [(name, value_text(field, value)) for name, value, field in found if value is not None]
    return tuple(name for name, _ in known), tuple(text for _, text in known)
