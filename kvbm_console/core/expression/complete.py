"""Completion for editors and shells: what may stand at the end of what was typed.

Law of this file: a suggestion is something that the parser takes at that place.
"""

from kvbm_console.core.expression.scan import OPERATORS, Token, scan
from kvbm_console.core.expression.schema import UNITS, ExpressionError, Kind, Schema


def complete(text: str, schema: Schema) -> list[str]:
    """Words that may stand in place of the last, unfinished one; empty when nothing can be said.

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
