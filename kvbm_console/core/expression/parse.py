"""Text to tree: characters to tokens (``scan``), tokens to a tree that fits a schema (``parse``), and completion.

Law of this file: every character belongs to a token or is refused with its column. A tree that comes out is well typed,
so evaluating it cannot fail. Depth, length and the number of comparisons are bounded while reading. A suggestion of
``complete`` is something that the parser takes at that place.
"""

import re
from fractions import Fraction
from typing import Final

import msgspec

from kvbm_console.core.expression.schema import (
    CHARS_MAX,
    DEPTH_MAX,
    NUMBER_MAX,
    TERMS_MAX,
    UNITS,
    WORD_CHARS_MAX,
    ExpressionError,
    Field,
    Kind,
    Schema,
    nearest,
    short,
)
from kvbm_console.core.expression.tree import And, Flag, Literal, Node, Not, Or, Other, Relation

KEYWORDS: Final = frozenset({"and", "or", "not"})
OPERATORS: Final = ("=", "!=", "<", "<=", ">", ">=", "~")
_PATTERN: Final = re.compile(
    r"""
      (?P<blank>  [ \t\r\n]+ )
    | (?P<route>  [Gg][1-4][ \t]*[>→][ \t]*[Gg][1-4](?![\w.\-]) )
    | (?P<number> -?[0-9]+(?:\.[0-9]+)? (?P<unit>[^\W\d_]+)? (?![\w.\-]) )
    | (?P<text>   "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' )
    | (?P<operator> != | <= | >= | [=<>~] )
    | (?P<open>   \( )
    | (?P<close>  \) )
    | (?P<word>   [\w*?\[\]][\w.*?\[\]\-:/@\#%+!]* )
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(msgspec.Struct, frozen=True):
    """One token. ``kind`` is a group of the pattern, or ``end``; ``column`` counts from 1."""

    kind: str
    text: str
    column: int
    unit: str = ""
    """Of a number: the unit that is written directly behind it."""


def scan(text: str) -> list[Token]:
    """The tokens of an expression, ``end`` last.

    >>> [token.text for token in scan("age > 10ms and held")]
    ['age', '>', '10ms', 'and', 'held', '']
    """
    if len(text) > CHARS_MAX:
        raise ExpressionError(CHARS_MAX + 1, f"an expression has at most {CHARS_MAX} characters, got {len(text)}")
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        found = _PATTERN.match(text, at)
        if found is None or found.lastgroup is None:
            raise ExpressionError(at + 1, _why_not(text, at))
        kind = next(name for name in _KINDS if found[name] is not None)
        piece = found[kind]
        if kind == "word" and piece.lower() in KEYWORDS:
            kind, piece = piece.lower(), piece.lower()
        elif kind == "text":
            piece = re.sub(r"\\(.)", r"\1", piece[1:-1], flags=re.DOTALL)
        if len(piece) > WORD_CHARS_MAX and kind != "blank":
            raise ExpressionError(at + 1, f"one word has at most {WORD_CHARS_MAX} characters, got {len(piece)}")
        if kind != "blank":
            tokens.append(Token(kind, piece, at + 1, found["unit"] or ""))
        at = found.end()
    tokens.append(Token("end", "", len(text) + 1))
    return tokens


_KINDS: Final = tuple(name for name in _PATTERN.groupindex if name != "unit")


def _why_not(text: str, at: int) -> str:
    if text[at] in "\"'":
        return f"the text that begins with {text[at]} has no end"
    if text[at] == "!":
        return "`!` is not an operator; write `not` or `!=`"
    return f"`{short(text[at])}` means nothing here"


_ALIASES: Final = {"true": "yes", "false": "no"}


def parse(text: str, schema: Schema) -> Node:
    """The tree of an expression; raises ``ExpressionError``.

    >>> from kvbm_console.core.expression.fields import SLOT
    >>> parse("state = onboarding", SLOT)
    Relation(field='state', operator='=', value=Literal(kind=<Kind.WORD: 'a word'>, value='onboarding'))
    """
    return _Parser(scan(text), schema).read()


class _Parser:
    """Recursive descent over ``or``, ``and``, ``not``, terms."""

    def __init__(self, tokens: list[Token], schema: Schema) -> None:
        self._tokens = tokens
        self._schema = schema
        self._at = 0
        self._depth = 0
        self._terms = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._next
        self._at += 1
        return token

    def read(self) -> Node:
        """The whole expression."""
        if self._next.kind == "end":
            raise ExpressionError(1, "an expression is missing")
        node = self._either()
        token = self._next
        if token.kind == "close":
            raise ExpressionError(token.column, "`)` closes nothing")
        if token.kind != "end":
            raise ExpressionError(token.column, self._unexpected(token))
        return node

    @staticmethod
    def _unexpected(token: Token) -> str:
        return f"expected `and`, `or` or the end, got `{short(token.text)}`"

    def _either(self) -> Node:
        parts = [self._every()]
        while self._next.kind == "or":
            self._take()
            parts.append(self._every())
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _every(self) -> Node:
        parts = [self._not()]
        while self._next.kind == "and":
            self._take()
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _not(self) -> Node:
        token = self._next
        if token.kind not in ("not", "open"):
            return self._term()
        self._take()
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ExpressionError(token.column, f"an expression is at most {DEPTH_MAX} deep")
        if token.kind == "not":
            node: Node = Not(self._not())
        else:
            node = self._either()
            if self._next.kind != "close":
                where = self._next
                if where.kind != "end":
                    raise ExpressionError(where.column, self._unexpected(where))
                raise ExpressionError(token.column, "this `(` is not closed")
            self._take()
        self._depth -= 1
        return node

    def _term(self) -> Node:
        token = self._take()
        self._terms += 1
        if self._terms > TERMS_MAX:
            raise ExpressionError(token.column, f"an expression has at most {TERMS_MAX} comparisons")
        if token.kind != "word":
            what = f"`{short(token.text)}`" if token.text else "nothing"
            raise ExpressionError(token.column, f"expected the name of a field, got {what}")
        field = self._schema.find(token.text, token.column)
        operator = self._next
        if operator.kind != "operator":
            if field.flag and operator.kind in ("and", "or", "close", "end"):
                return Flag(field.name)
            raise ExpressionError(
                operator.column, f"`{field.name}` is {field.kind.value} and needs one of {' '.join(OPERATORS)}"
            )
        self._take()
        value = self._next
        if value.kind == "operator":
            both = operator.text + value.text
            hint = "; write `=`" if both == "==" else ""
            raise ExpressionError(operator.column, f"`{both}` is not an operator{hint}")
        self._check_operator(field, operator)
        return Relation(field.name, operator.text, self._value(field, operator.text, self._take()))

    def _check_operator(self, field: Field, operator: Token) -> None:
        if operator.text in ("=", "!="):
            return
        if operator.text == "~":
            if field.kind not in (Kind.TEXT, Kind.WORD):
                raise ExpressionError(
                    operator.column, f"`~` matches text and words; `{field.name}` is {field.kind.value}"
                )
        elif field.kind is Kind.TEXT or not field.ordered:
            raise ExpressionError(
                operator.column, f"`{field.name}` is {field.kind.value} without an order; use = != or ~"
            )

    # --- values ---

    def _value(self, field: Field, operator: str, token: Token) -> Literal | Other:
        if token.kind in ("end", "and", "or", "not", "open", "close"):
            what = f"`{token.text}`" if token.text else "nothing"
            raise ExpressionError(token.column, f"expected {field.kind.value} for `{field.name}`, got {what}")
        if token.kind == "word":
            if token.text == "none":
                return self._none(field, operator, token)
            other = self._schema.fields.get(token.text)
            if other is not None and token.text.lower() not in field.words and operator != "~":
                return self._other(field, other, token)
        if operator == "~" or field.kind is Kind.TEXT:
            # A pattern, or a text without quotes: a request id that is a number is still a text.
            return Literal(Kind.TEXT, token.text)
        if field.kind is Kind.WORD:
            return self._word(field, token)
        return self._number(field, token)

    def _none(self, field: Field, operator: str, token: Token) -> Literal:
        if not field.optional or operator not in ("=", "!="):
            why = "always has a value" if not field.optional else "is compared with `none` by = or != only"
            raise ExpressionError(token.column, f"`{field.name}` {why}")
        return Literal(field.kind, None)

    def _other(self, field: Field, other: Field, token: Token) -> Other:
        same_words = field.kind is not Kind.WORD or field.words == other.words
        if field.kind is not other.kind or not same_words or field.many or other.many:
            raise ExpressionError(
                token.column,
                f"`{field.name}` is {field.kind.value} and cannot be compared with `{other.name}`, {other.kind.value}",
            )
        return Other(other.name)

    def _word(self, field: Field, token: Token) -> Literal:
        label = token.text.replace("→", ">").replace(" ", "").replace("\t", "")
        label = _ALIASES.get(label.lower(), label) if field.flag else label
        spelled = {label.lower(), re.sub(r"[- ]", "_", token.text.lower())}  # as typed, or as screens show it
        for known in field.words:
            if known.lower() in spelled:
                return Literal(Kind.WORD, known)
        raise ExpressionError(
            token.column, f"`{short(token.text)}` is no {field.name}; {nearest(label, field.words)}"
        )

    def _number(self, field: Field, token: Token) -> Literal:
        if token.kind != "number":
            raise ExpressionError(
                token.column, f"`{field.name}` is {field.kind.value}, `{short(token.text)}` is not"
            )
        unit = token.unit
        digits = token.text[: len(token.text) - len(unit)]
        column = token.column
        if not unit and self._next.kind == "word":
            column = self._next.column
            unit = self._take().text
        return Literal(field.kind, _whole(field, digits, unit, token.column, column))


def _whole(field: Field, digits: str, unit: str, column: int, unit_column: int) -> int:
    """The number in base units; refuses a unit of another kind and a number that is not whole or too large."""
    units = UNITS[field.kind]
    if unit and unit not in units:
        of = next((kind for kind, known in UNITS.items() if unit in known), None)
        what = f"`{unit}` is a unit of {of.value}" if of is not None else f"`{short(unit)}` is no unit"
        allowed = f"takes {', '.join(units)}" if units else "takes no unit"
        raise ExpressionError(unit_column, f"{what}; `{field.name}` is {field.kind.value} and {allowed}")
    if not unit and field.kind in (Kind.DURATION, Kind.SIZE) and Fraction(digits) != 0:
        raise ExpressionError(column, f"`{field.name}` is {field.kind.value}; write a unit, as {digits} "
                              f"{'ms' if field.kind is Kind.DURATION else 'MiB'}")
    value = Fraction(digits) * units.get(unit, 1)
    if abs(value) > NUMBER_MAX:
        raise ExpressionError(column, f"a number is at most {NUMBER_MAX}")
    if value != int(value):
        raise ExpressionError(column, f"{digits}{' ' + unit if unit else ''} is not a whole number of "
                              f"{_BASE[field.kind]}")
    return int(value)


_BASE: Final = {Kind.COUNT: "things", Kind.ID: "things", Kind.DURATION: "nanoseconds", Kind.SIZE: "bytes"}


def complete(text: str, schema: Schema) -> list[str]:
    """Words that may replace the last, unfinished word; empty when none can follow.

    >>> from kvbm_console.core.expression.fields import SLOT
    >>> complete("state = onb", SLOT)
    ['onboard_staged', 'onboarding']
    >>> complete("sta", SLOT)
    ['state']
    """
    try:
        tokens = scan(text)[:-1]
    except ExpressionError:
        return []
    typed = ""
    if tokens and tokens[-1].kind in ("word", "and", "or", "not") and not text[-1].isspace():
        typed = tokens.pop().text
    return [word for word in _next_words(tokens, schema) if word.lower().startswith(typed.lower()) and word != typed]


def _next_words(tokens: list[Token], schema: Schema) -> list[str]:
    last = tokens[-1] if tokens else None
    if last is None or last.kind in ("and", "or", "not", "open"):
        return [*sorted(schema.fields), "not"]
    before = tokens[-2] if len(tokens) > 1 else None
    if last.kind == "operator":
        field = schema.fields.get(before.text) if before is not None else None
        if field is None:
            return []
        optional = ["none"] if field.optional and last.text in ("=", "!=") else []
        same = [] if field.many else [
            other.name for other in schema.fields.values()
            if other is not field and other.kind is field.kind and other.words == field.words and not other.many
        ]
        return [*field.words, *optional, *sorted(same)]
    if last.kind == "word" and (before is None or before.kind != "operator"):
        field = schema.fields.get(last.text)
        if field is None:
            return []
        signs = [
            sign for sign in OPERATORS
            if sign in ("=", "!=") or (field.kind in (Kind.TEXT, Kind.WORD) if sign == "~" else
                                       field.kind is not Kind.TEXT and field.ordered)
        ]
        return [*signs, *(["and", "or"] if field.flag else [])]
    more = ["and", "or"]
    if last.kind == "number" and not last.unit and len(tokens) > 2:
        field = schema.fields.get(tokens[-3].text)
        more += list(UNITS.get(field.kind, {})) if field is not None else []
    return more
