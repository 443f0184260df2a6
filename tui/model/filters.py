"""Filters of lists: the expression language over the columns of each list, or plain text over the request.

Each list has the schema of its filter beside its columns. The getters read the model of this console: ages run on the
shown clock, and ended candidates come from the history.

Law of this file: a filter is understood as a whole, or refused with the column of the mistake.
"""

from collections.abc import Callable
from fnmatch import translate
from re import compile as compile_pattern
from typing import Any, Final

from kvbm_console.core.expression import ExpressionError, Field, Schema, parse
from kvbm_console.core.expression.closures import compile_tree

FILTER_MAX: Final = 1_024
"""Characters of a filter: the language's own limit."""
_SIGNS: Final = frozenset("=<>~()\"'! ")
"""Characters that make a text an expression; plain text over the request has none of them."""

Test = Callable[[Any, Any, Any], bool]
"""``test(item, state, moment)``; the schema defines the moment."""


class FilterError(ValueError):
    """Raised when a filter is not understood; ``column`` counts from 0."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


class Filter:
    """A compiled filter.

    >>> from kvbm_console.core.expression.schema import Kind
    >>> names = Schema("a name", [Field("request", Kind.TEXT, lambda name, state, moment: name, "", ordered=False)])
    >>> Filter.parse("chat", names).matches("chat-1"), Filter.parse("request = rag*", names).matches("chat-1")
    (True, False)
    """

    def __init__(self, text: str, test: Test) -> None:
        self.text = text
        self._test = test

    def matches(self, item: Any, state: Any = None, moment: Any = None) -> bool:
        """True if an item of the list stays."""
        return self._test(item, state, moment)

    @classmethod
    def parse(cls, text: str, schema: Schema) -> "Filter":
        """Compile; raises FilterError."""
        plain = plain_text(text, schema)
        if plain is not None:
            return cls(text, _by_request(plain, schema))
        try:
            return cls(text, compile_tree(parse(text, schema), schema))
        except ExpressionError as error:
            raise FilterError(error.column - 1, error.message) from None


def plain_text(text: str, schema: Schema) -> str | None:
    """The text to look for in requests; None when the typed text is an expression.

    >>> from kvbm_console.core.expression import SLOT
    >>> plain_text("chat-04*", SLOT), plain_text("held", SLOT), plain_text("age > 1 s", SLOT)
    ('chat-04*', None, None)
    """
    text = text.strip()
    if not text or len(text) > FILTER_MAX or "request" not in schema.fields or _SIGNS & set(text):
        return None
    field = schema.fields.get(text)
    return None if text.lower() in ("not", "and", "or") or (field is not None and field.flag) else text


def _by_request(text: str, schema: Schema) -> Test:
    get = schema.fields["request"].get
    if any(character in text for character in "*?["):
        match = compile_pattern(translate(text)).match

        def globbed(item: Any, state: Any, moment: Any) -> bool:
            return any(match(name) is not None for name in _names(get(item, state, moment)))

        return globbed
    return lambda item, state, moment: any(text in name for name in _names(get(item, state, moment)))


def _names(found: Any) -> tuple[str, ...]:
    return found if isinstance(found, tuple) else (found or "",)


def with_fields(schema: Schema, *fields: Field) -> Schema:
    """A schema with some fields read in another way, or added."""
    known = schema.fields | {field.name: field for field in fields}
    return Schema(schema.name, list(known.values()))
