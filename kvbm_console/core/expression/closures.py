"""Trees and templates of log points compiled to closures: no ``eval``, no call into anything but the schema's getters.

Law of this file: a closure never raises on facts. An absent value is unequal to everything but ``none``, and neither
less nor greater, so ``not (a = b)`` is always ``a != b``. A template is checked when it is set; filling it in never
fails and is bounded in length.
"""

import operator
import re
from collections.abc import Callable
from fnmatch import translate
from typing import Any, Final

from kvbm_console.core.expression.schema import ExpressionError, Field, Getter, Kind, Schema, Test, short
from kvbm_console.core.expression.tree import And, Flag, Literal, Node, Not, Or, Other, Relation
from kvbm_console.core.ids import is_called


def compile_tree(node: Node, schema: Schema) -> Test:
    """The closure of a tree that was parsed with this schema."""
    match node:
        case Relation():
            return _comparison(schema.fields[node.field], node, schema)
        case Flag():
            return _truth(schema.fields[node.field].get)
        case Not():
            return _opposite(compile_tree(node.of, schema))
        case And():
            return _every([compile_tree(part, schema) for part in node.parts])
        case Or():
            return _either([compile_tree(part, schema) for part in node.parts])


def _truth(get: Getter) -> Test:
    return lambda item, state, moment: bool(get(item, state, moment))


def _opposite(test: Test) -> Test:
    return lambda item, state, moment: not test(item, state, moment)


def _every(tests: list[Test]) -> Test:
    if len(tests) == 2:
        first, second = tests
        return lambda item, state, moment: first(item, state, moment) and second(item, state, moment)

    def test(item: Any, state: Any, moment: Any) -> bool:
        for part in tests:  # noqa: SIM110 - a generator expression would cost twice as much
            if not part(item, state, moment):
                return False
        return True

    return test


def _either(tests: list[Test]) -> Test:
    if len(tests) == 2:
        first, second = tests
        return lambda item, state, moment: first(item, state, moment) or second(item, state, moment)

    def test(item: Any, state: Any, moment: Any) -> bool:
        for part in tests:  # noqa: SIM110
            if part(item, state, moment):
                return True
        return False

    return test


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}


def _comparison(field: Field, node: Relation, schema: Schema) -> Test:
    if isinstance(node.value, Other):
        return _with_other(field.get, node.operator, schema.fields[node.value.field].get)
    if node.operator == "~":
        return _glob(field, str(node.value.value))
    value = _raw(field, node.value)
    if field.name == "request" and isinstance(value, str) and node.operator in ("=", "!="):
        return _called(field, value, node.operator == "=")
    if field.many:
        return _many(field.get, node.operator, value)
    if node.operator in ("=", "!="):
        return _equal(field.get, value) if node.operator == "=" else _unequal(field.get, value)
    return _ordered(field, node.operator, value)


def _called(field: Field, name: str, wanted: bool) -> Test:
    """A request is also equal to the id that its client was given."""
    get = field.get
    if field.many:
        return lambda item, state, moment: any(is_called(value, name) for value in get(item, state, moment)) is wanted

    def test(item: Any, state: Any, moment: Any) -> bool:
        found = get(item, state, moment)
        return (found is not None and is_called(found, name)) is wanted

    return test


def _raw(field: Field, literal: Literal) -> Any:
    """The value in the form in which the getter returns it."""
    if literal.kind is Kind.WORD and literal.value is not None:
        return field.words[str(literal.value)]
    return literal.value


def _equal(get: Getter, value: Any) -> Test:
    return lambda item, state, moment: get(item, state, moment) == value


def _unequal(get: Getter, value: Any) -> Test:
    return lambda item, state, moment: get(item, state, moment) != value


def _ordered(field: Field, sign: str, value: Any) -> Test:
    get, compare = field.get, _ORDER[sign]
    if field.less is not None and field.greater is not None:  # whole numbers, so ``<=`` is ``<`` of the next number
        return field.less(value + (sign == "<=")) if sign in ("<", "<=") else field.greater(value - (sign == ">="))
    if field.optional:
        def test(item: Any, state: Any, moment: Any) -> bool:
            found = get(item, state, moment)
            return found is not None and compare(found, value)

        return test
    if sign == ">":  # the commonest signs without one more call
        return lambda item, state, moment: get(item, state, moment) > value
    if sign == "<":
        return lambda item, state, moment: get(item, state, moment) < value
    return lambda item, state, moment: compare(get(item, state, moment), value)


def _with_other(get: Getter, sign: str, other: Getter) -> Test:
    if sign == "=":
        return lambda item, state, moment: get(item, state, moment) == other(item, state, moment)
    if sign == "!=":
        return lambda item, state, moment: get(item, state, moment) != other(item, state, moment)
    compare = _ORDER[sign]

    def test(item: Any, state: Any, moment: Any) -> bool:
        left, right = get(item, state, moment), other(item, state, moment)
        return left is not None and right is not None and compare(left, right)

    return test


def _many(get: Getter, sign: str, value: Any) -> Test:
    if value is None:  # ``none`` tests for an empty tuple
        return (_opposite if sign == "=" else lambda test: test)(_truth(get))
    if sign == "=":
        return lambda item, state, moment: value in get(item, state, moment)
    if sign == "!=":
        return lambda item, state, moment: value not in get(item, state, moment)
    compare = _ORDER[sign]
    return lambda item, state, moment: any(compare(found, value) for found in get(item, state, moment))


def _glob(field: Field, pattern: str) -> Test:
    get = field.get
    if field.kind is Kind.WORD:
        wanted = re.compile(translate(pattern.lower())).match
        # A tuple: hashing a member of an enum is slower than comparing it with a few others.
        values = tuple(value for label, value in field.words.items() if wanted(label.lower()))
        if field.many:
            return lambda item, state, moment: any(found in values for found in get(item, state, moment))
        return lambda item, state, moment: get(item, state, moment) in values
    match = re.compile(translate(pattern)).match
    if field.many:
        return lambda item, state, moment: any(match(found) is not None for found in get(item, state, moment))

    def test(item: Any, state: Any, moment: Any) -> bool:
        found = get(item, state, moment)
        return found is not None and match(found) is not None

    return test


TEMPLATE_CHARS_MAX: Final = 256
MESSAGE_CHARS_MAX: Final = 512
"""A line for people; a request id may have 256 bytes, and every hit is recorded."""
_PART: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
_DURATIONS: Final = ((3_600 * 10**9, "h"), (60 * 10**9, "min"), (10**9, "s"), (10**6, "ms"), (10**3, "us"))

Fill = Callable[[Any, Any, Any], str]
"""``fill(item, state, moment)``: the message."""


def compile_template(text: str, schema: Schema) -> Fill:
    """A closure that fills in ``{field}``. ``{{`` and ``}}`` are braces. Raises ``ExpressionError``.

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
    """(names, values as text) of every field that has a value; a debugger shows them of a stopped slot."""
    found = [(name, field.get(item, state, moment), field) for name, field in schema.fields.items()]
    known = [(name, value_text(field, value)) for name, value, field in found if value is not None]
    return tuple(name for name, _ in known), tuple(text for _, text in known)
