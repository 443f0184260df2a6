"""A small filter for lists: text or a pattern over the request, and simple comparisons joined by ``and``.

Law of this file: what is not understood is refused with the column of the mistake; nothing is ever ignored.
"""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

Value = str | int | bool | None
FILTER_MAX: Final = 200
"""Characters of a filter; it is typed by hand."""
_UNITS: Final = {
    "": 1, "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000, "min": 60_000_000_000,
    "h": 3_600_000_000_000, "k": 1_000, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
}
_TERM: Final = re.compile(
    r"\s*(?P<not>not\s+)?(?P<field>[a-z_]+)\s*(?P<op>!=|<=|>=|=|<|>|~)\s*(?P<value>\"[^\"]*\"|\S.*?)\s*$"
)
_NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*)$")


class FilterError(ValueError):
    """Raised when a filter is not understood; ``column`` counts from 0."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


class Filter:
    """A compiled filter over items with named fields.

    >>> wanted = Filter.parse("state = decoding and age > 10 ms", ("state", "age", "request"))
    >>> wanted.matches({"state": "decoding", "age": 12_000_000, "request": "a"})
    True
    """

    def __init__(self, text: str, tests: list[Callable[[Mapping[str, Value]], bool]]) -> None:
        self.text = text
        self._tests = tests

    def matches(self, item: Mapping[str, Value]) -> bool:
        """Whether every term holds."""
        return all(test(item) for test in self._tests)

    @classmethod
    def parse(cls, text: str, fields: tuple[str, ...]) -> "Filter":
        """Compile; raises FilterError."""
        if len(text) > FILTER_MAX:
            raise FilterError(FILTER_MAX, f"a filter has at most {FILTER_MAX} characters")
        tests: list[Callable[[Mapping[str, Value]], bool]] = []
        start = 0
        for part in re.split(r"(\s+and\s+)", text):
            if part.strip() == "and" and part != text:
                start += len(part)
                continue
            if not part.strip():
                raise FilterError(start, "a term is missing")
            tests.append(_term(part, start, fields))
            start += len(part)
        return cls(text, tests)


def _term(part: str, start: int, fields: tuple[str, ...]) -> Callable[[Mapping[str, Value]], bool]:
    found = _TERM.match(part)
    if found is None:
        if re.search(r"[=<>~]", part):
            raise FilterError(start, "expected a field, an operator and a value")
        return _request(part.strip())
    field, op, value = found["field"], found["op"], found["value"].strip('"')
    if field not in fields:
        near = get_close_matches(field, fields, 1)
        hint = f"; nearest is `{near[0]}`" if near else f"; fields are {', '.join(fields)}"
        raise FilterError(start + found.start("field"), f"no field `{field}`{hint}")
    test = _comparison(field, op, value, start + found.start("value"))
    if found["not"]:
        return lambda item: not test(item)
    return test


def _request(text: str) -> Callable[[Mapping[str, Value]], bool]:
    pattern = text.strip('"')
    if any(character in pattern for character in "*?["):
        return lambda item: fnmatchcase(str(item.get("request") or ""), pattern)
    return lambda item: pattern in str(item.get("request") or "")


def _comparison(field: str, op: str, text: str, column: int) -> Callable[[Mapping[str, Value]], bool]:
    if op == "~":
        return lambda item: fnmatchcase(str(item.get(field) or ""), text)
    number = _NUMBER.match(text)
    wanted: float | None = None
    if number is not None:
        unit = number[2].lower()
        if unit in _UNITS:
            wanted = float(number[1]) * _UNITS[unit]
    if op in ("=", "!="):
        def equal(item: Mapping[str, Value]) -> bool:
            value = item.get(field)
            if isinstance(value, bool):
                return (text in ("yes", "true")) is value
            if isinstance(value, int) and wanted is not None:
                return value == wanted
            return str(value or "").lower() == text.replace("→", ">").lower()
        return equal if op == "=" else lambda item: not equal(item)
    if wanted is None:
        raise FilterError(column, f"`{text}` is not a number")
    limit = wanted
    def compare(item: Mapping[str, Value]) -> bool:
        value = item.get(field)
        if value is None or isinstance(value, str):
            return False
        if op == "<":
            return value < limit
        if op == "<=":
            return value <= limit
        return value > limit if op == ">" else value >= limit
    return compare
