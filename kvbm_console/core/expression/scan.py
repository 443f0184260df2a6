"""From characters to tokens.

Law of this file: every character belongs to a token or is refused with its column; nothing is skipped but blanks.
"""

import re
from typing import Final

import msgspec

from kvbm_console.core.expression.schema import CHARS_MAX, WORD_CHARS_MAX, ExpressionError, short

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
