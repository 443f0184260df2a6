"""Values of every event and stimulus kind, generated from the structs' own types.

Law of this file: nothing here names a kind, so a new one is tested the day it is written.
"""

import types
import typing
from enum import IntEnum
from typing import Any

import msgspec
from hypothesis import strategies as st

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import AnyEvent
from kvbm_console.core.stimuli import AnyStimulus

EVENT_KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyEvent)
STIMULUS_KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyStimulus)

_INT = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
_SPEC = st.builds(
    BreakpointSpec, id=st.integers(0, 2**40), request=_TEXT.filter(bool), ignore_count=st.integers(0, 2**40),
    max_hold_ns=st.integers(1, 120 * 10**9), enabled=st.booleans(), one_shot=st.booleans(),
)


def value_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if a is type(None) else value_of(a) for a in arguments))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(value_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*(value_of(a) for a in arguments))
    if annotation is BreakpointSpec:
        return _SPEC
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return st.sampled_from(annotation)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: _INT, str: _TEXT, bytes: st.binary(max_size=24), bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }
    return plain[annotation]


def any_of(kind: type[msgspec.Struct], **fixed: Any) -> st.SearchStrategy[Any]:
    """Any value of a kind, with some fields fixed."""
    hints = typing.get_type_hints(kind)
    fields = {name: st.just(fixed[name]) if name in fixed else value_of(hints[name]) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


def least(kind: type[msgspec.Struct]) -> Any:
    """The plainest value of a kind."""
    return kind(*(_least(annotation) for name, annotation in typing.get_type_hints(kind).items()
                  if name in kind.__struct_fields__))


def _least(annotation: Any) -> Any:
    arguments = typing.get_args(annotation)
    if type(None) in arguments:
        return None
    if typing.get_origin(annotation) is tuple:
        return () if arguments[-1] is Ellipsis else tuple(_least(a) for a in arguments)
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return next(iter(annotation))
    return annotation()
