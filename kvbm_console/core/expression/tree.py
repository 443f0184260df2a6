"""The tree of an expression, and its one canonical spelling.

Law of this file: ``parse(show(tree)) == tree`` for every tree that fits the schema.
"""

from typing import Final

import msgspec

from kvbm_console.core.expression.schema import UNITS, Kind


class Literal(msgspec.Struct, frozen=True):
    """A value as it is compared. It is an int in base units, a text, or the label of a word, and None for ``none``."""

    kind: Kind
    value: int | str | None


class Other(msgspec.Struct, frozen=True):
    """The value of another field."""

    field: str


class Relation(msgspec.Struct, frozen=True):
    """``field operator value``."""

    field: str
    operator: str
    value: Literal | Other


class Flag(msgspec.Struct, frozen=True):
    """A field that is yes or no, alone."""

    field: str


class Not(msgspec.Struct, frozen=True):
    """The opposite."""

    of: "Node"


class And(msgspec.Struct, frozen=True):
    """Every part holds; at least two parts."""

    parts: tuple["Node", ...]


class Or(msgspec.Struct, frozen=True):
    """Some part holds; at least two parts."""

    parts: tuple["Node", ...]


Node = Relation | Flag | Not | And | Or


def show(node: Node) -> str:
    """The canonical spelling.

    >>> show(Not(Or((Flag("held"), Relation("age", ">=", Literal(Kind.DURATION, 1_500_000))))))
    'not (held or age >= 1500 us)'
    """
    match node:
        case Relation():
            return f"{node.field} {node.operator} {_show_value(node.value)}"
        case Flag():
            return node.field
        case Not():
            return f"not {_inside(node.of)}"
        case And():
            return " and ".join(_inside(part) for part in node.parts)
        case Or():
            return " or ".join(show(part) if isinstance(part, And) else _inside(part) for part in node.parts)


def _inside(node: Node) -> str:
    return f"({show(node)})" if isinstance(node, And | Or) else show(node)


def _show_value(value: Literal | Other) -> str:
    if isinstance(value, Other):
        return value.field
    if value.value is None:
        return "none"
    if isinstance(value.value, str):
        return value.value if value.kind is Kind.WORD else quote(value.value)
    return _show_number(value.kind, value.value)


_SHOWN_UNITS: Final = {
    kind: sorted(((factor, unit) for unit, factor in UNITS[kind].items() if unit.isascii()), reverse=True)
    for kind in (Kind.DURATION, Kind.SIZE)
}


def _show_number(kind: Kind, value: int) -> str:
    if kind not in _SHOWN_UNITS or value == 0:
        return str(value)
    for factor, unit in _SHOWN_UNITS[kind]:
        if value % factor == 0:
            return f"{value // factor} {unit}"
    raise AssertionError("the smallest unit divides everything")


def quote(text: str) -> str:
    r"""A text in quotes.

    >>> quote('say "hi"')
    '"say \\"hi\\""'
    """
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
