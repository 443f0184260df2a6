"""The expression language: conditions of breakpoints, and filters of lists, of ``tail``, of cuts and of exports.

Small, typed, total and without side effects. An expression is checked against the fields of its context when it is set,
and compiled once to a closure. It never reaches ``eval`` and cannot call anything.

Grammar
-------
::

    expression  = every { "or" every }
    every       = not { "and" not }
    not         = "not" not | "(" expression ")" | term
    term        = field operator value | field              (alone: a field that is yes or no)
    operator    = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"
    value       = number [ unit ] | word | route | text | "none" | field of the same kind
    number      = [ "-" ] digits [ "." digits ]
    unit        = "k" | "M"                                  (a number)
                | "ns" | "us" | "µs" | "ms" | "s" | "m" | "min" | "h"       (a duration)
                | "B" | "KiB" | "MiB" | "GiB" | "TiB" | "KB" | "MB" | "GB" | "TB"   (a size)
    route       = tier ( ">" | "→" ) tier
    text        = characters in double or single quotes, with a backslash before a quote or a backslash

``and`` binds closer than ``or``, ``not`` closer than both. ``~`` matches a glob (``*``, ``?``, ``[a-z]``) with the
whole text, or with the label of a word. A text of letters, digits and ``_ . * ? [ ] - : / @ # % + !`` needs no quotes.
Words (states, tiers, routes, statuses, reasons, sites, kinds) may be written in capitals and with ``-`` for ``_``. A
duration or a size needs a unit. A value that a slot or an event does not have is ``none``, which is unequal to every
other value, and neither less nor greater. A field that has several values (the slots of an event) compares when any of
them does.

Limits: 1,024 characters, 32 levels of parentheses and ``not``, 64 comparisons, 256 characters of one word. An error is
one sentence that begins with the column, counted from 1.

>>> slots = compile_slot_filter("state = onboarding and age > 10 ms")
>>> compile_slot_filter("tokns.computed > 4096")
Traceback (most recent call last):
...
kvbm_console.core.expression.schema.ExpressionError: column 1: a slot has no field `tokns.computed`; \
the nearest is `tokens.computed`

Law of this package: a compiled expression never raises on facts, and an unknown name is an error when the expression is
set.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvbm_console.core.expression.closures import Fill, compile_template, compile_tree, variables
from kvbm_console.core.expression.event_fields import EVENT, event_fields
from kvbm_console.core.expression.fields import CONDITION, SLOT, slot_fields
from kvbm_console.core.expression.parse import complete, parse
from kvbm_console.core.expression.schema import ExpressionError, Field, Schema, Test
from kvbm_console.core.expression.tree import Node, show

if TYPE_CHECKING:
    from kvbm_console.core.events import Event
    from kvbm_console.core.slots import SlotFacts
    from kvbm_console.core.state import CacheState

__all__ = [
    "CONDITION", "EVENT", "SLOT", "ExpressionError", "Field", "Node", "Schema", "compile_condition",
    "compile_event_filter", "compile_log", "compile_slot_filter", "complete", "fields_of", "parse", "show", "variables",
]

COMPILED_MAX = 512
"""Compiled conditions that are kept, twice the breakpoints that there may be, because the gate is built again at each
change."""


def compile_slot_filter(
    text: str, *, now: Callable[[], int] | None = None, block_bytes: int | None = None
) -> "Callable[[CacheState, SlotFacts], bool]":
    """``matches(state, slot)``. ``now`` is the engine's clock, None: the time of the last event.

    With ``block_bytes``, the bytes of one block, there is a field ``bytes``. Raises ``ExpressionError``.
    """
    schema = SLOT if now is None and block_bytes is None else Schema(SLOT.name, slot_fields(now, block_bytes))
    test = compile_tree(parse(text, schema), schema)
    return lambda state, slot: test(slot, state, None)


def compile_event_filter(
    text: str, *, block_bytes: int | None = None
) -> "Callable[[Event, CacheState | None], bool]":
    """``matches(event, state)``, with the state *before* the event, or None. Raises ``ExpressionError``."""
    schema = EVENT if block_bytes is None else Schema(EVENT.name, event_fields(block_bytes))
    test = compile_tree(parse(text, schema), schema)
    return lambda event, state: test(event, state, None)


@lru_cache(maxsize=COMPILED_MAX)
def compile_condition(text: str) -> Test:
    """``holds(slot, state, moment)``: the condition of a breakpoint. Raises ``ExpressionError``."""
    return compile_tree(parse(text, CONDITION), CONDITION)


@lru_cache(maxsize=COMPILED_MAX)
def compile_log(template: str) -> Fill:
    """``message(slot, state, moment)``: the message of a log point. Raises ``ExpressionError``."""
    return compile_template(template, CONDITION)


def fields_of(schema: Schema) -> list[tuple[str, str, str]]:
    """(name, kind, meaning) of every field, for help and editors."""
    return [(field.name, _kind(field), field.about) for field in schema.fields.values()]


def _kind(field: Field) -> Any:
    return "yes or no" if field.flag else field.kind.value
