"""Kinds of values, units, and the fields that a context lets an expression name.

Law of this file: an error names the column, counted from 1, in one sentence.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import UsageError

CHARS_MAX: Final = 1_024
"""Characters of an expression: it is typed by people, and travels with every breakpoint."""
DEPTH_MAX: Final = 32
"""Parentheses and ``not`` inside each other; keeps every walk over a tree far from the interpreter's own limit."""
TERMS_MAX: Final = 64
"""Comparisons of one expression: bounds the cost of a breakpoint at each site."""
WORD_CHARS_MAX: Final = 256
"""Characters of one word or text, as of a request id."""
LISTED_MAX: Final = 12
"""Valid names that an error lists in full when none of them is close."""
NUMBER_MAX: Final = 2**63 - 1
"""All facts fit into 64 bits."""


class ExpressionError(UsageError):
    """Raised when an expression is not understood; ``column`` counts from 1."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(f"column {column}: {message}")
        self.column = column
        self.message = message


class Kind(Enum):
    """The kind of a field's values. Two values are compared only when they are of the same kind."""

    COUNT = "a number"
    ID = "an identifier"
    DURATION = "a duration"
    SIZE = "a size"
    TEXT = "text"
    WORD = "a word"


_KIB: Final = 1_024
UNITS: Final[Mapping[Kind, Mapping[str, int]]] = {
    Kind.COUNT: {"k": 10**3, "M": 10**6},
    Kind.ID: {},
    Kind.DURATION: {
        "ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "m": 60 * 10**9,
        "h": 3_600 * 10**9,
    },
    Kind.SIZE: {
        "B": 1, "KiB": _KIB, "MiB": _KIB**2, "GiB": _KIB**3, "TiB": _KIB**4, "KB": 10**3, "kB": 10**3, "MB": 10**6,
        "GB": 10**9, "TB": 10**12,
    },
}
"""Units by kind, in the base unit: one, nanosecond, byte."""

Test = Callable[[Any, Any, Any], bool]
"""``test(item, state, moment)``."""
Getter = Callable[[Any, Any, Any], Any]
"""``get(item, state, moment)`` is the value or None. A ``many`` field has a tuple."""


class Field(msgspec.Struct, frozen=True):
    """One name that an expression may use."""

    name: str
    kind: Kind
    get: Getter
    about: str
    words: Mapping[str, Any] = {}
    """Labels of a field of words, with the values that ``get`` returns for them."""
    ordered: bool = True
    """True if ``<`` and its kin make sense; never for text."""
    optional: bool = False
    """True if ``get`` may return None; such a field may be compared with ``none``."""
    many: bool = False
    """True if ``get`` returns a tuple: a comparison holds when it holds for any of them."""
    less: Callable[[int], Test] | None = None
    """For a field that conditions ask often: the test ``below this number`` in one call instead of two or three."""
    greater: Callable[[int], Test] | None = None
    """The same for ``above this number``."""

    @property
    def flag(self) -> bool:
        """True if the value is yes or no, so the field may stand alone."""
        return self.words.keys() == YES_NO.keys()


YES_NO: Final[Mapping[str, Any]] = {"yes": True, "no": False}


class Schema:
    """The fields of one context, under their names."""

    def __init__(self, name: str, fields: list[Field]) -> None:
        self.name = name
        self.fields: dict[str, Field] = {field.name: field for field in fields}
        if len(self.fields) != len(fields):
            raise ValueError(f"a field of {name} stands twice")

    def find(self, name: str, column: int) -> Field:
        """The field of this name; refuses an unknown name with the nearest valid name."""
        field = self.fields.get(name)
        if field is None:
            raise ExpressionError(column, f"{self.name} has no field `{short(name)}`; {nearest(name, self.fields)}")
        return field


def nearest(text: str, known: Mapping[str, Any]) -> str:
    """The valid name that is closest to the typed text, or all when they are few and none is close.

    >>> nearest("onbording", {"onboarding": 1, "decoding": 2})
    'the nearest is `onboarding`'
    """
    lowered = {name.lower(): name for name in known}
    wanted = text.lower()[:WORD_CHARS_MAX]
    found = get_close_matches(wanted, lowered, 1, 0.6)
    if not found:  # users remember a part of a dotted name
        found = [name for name in lowered if wanted in name.split(".")][:1]
    if not found and len(known) <= LISTED_MAX:
        return f"there are {', '.join(known)}"
    return f"the nearest is `{lowered[(found or get_close_matches(wanted, lowered, 1, 0.0))[0]]}`"


def short(text: str) -> str:
    """A piece of the typed text, fit to be quoted in a sentence."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= 40 else clean[:39] + "…"
