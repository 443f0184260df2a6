"""Between typed structs and protobuf messages: one generic converter by field name.

The messages are generated from the structs (``proto/generate.py``), so names and types agree.

Law of this file: no function per kind. The plan of each kind is read once, at import, from the struct's types.
"""

import types
import typing
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import msgspec
from google.protobuf.message import Message

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import AnyEvent, Event
from kvbm_console.core.stimuli import AnyStimulus, Stimulus
from kvbm_console.wire.v1 import console_pb2 as pb

Put = Callable[[Any, Any], None]
Get = Callable[[Any], Any]


class FieldPlan(typing.NamedTuple):
    """How one field travels: ``put(message, value)`` and ``get(message) -> value``."""

    name: str
    put: Put
    get: Get


def _plain(name: str) -> tuple[Put, Get]:
    def put(message: Any, value: Any) -> None:
        setattr(message, name, value)

    def get(message: Any) -> Any:
        return getattr(message, name)

    return put, get


def _enum(name: str, kind: type[IntEnum]) -> tuple[Put, Get]:
    def put(message: Any, value: Any) -> None:
        setattr(message, name, int(value))

    def get(message: Any) -> Any:
        return kind(getattr(message, name))

    return put, get


def _repeated(name: str, item: Any, length: int | None) -> tuple[Put, Get]:
    if isinstance(item, type) and issubclass(item, msgspec.Struct):
        plan = plan_of(item)

        def put_items(message: Any, value: Any) -> None:
            items = getattr(message, name)
            for each in value:
                write(plan, each, items.add())

        def get_items(message: Any) -> Any:
            return tuple(item(*(field.get(each) for field in plan)) for each in getattr(message, name))

        return put_items, get_items

    def put(message: Any, value: Any) -> None:
        getattr(message, name).extend(value)

    def get(message: Any) -> Any:
        value = tuple(getattr(message, name))
        if length is not None and len(value) != length:
            raise ValueError(f"{name} must have {length} items, got {len(value)}")
        return value

    return put, get


def _optional(name: str, inner: tuple[Put, Get]) -> tuple[Put, Get]:
    inner_put, inner_get = inner

    def put(message: Any, value: Any) -> None:
        if value is not None:
            inner_put(message, value)

    def get(message: Any) -> Any:
        return inner_get(message) if message.HasField(name) else None

    return put, get


def _field(name: str, annotation: Any) -> tuple[Put, Get]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _optional(name, _field(name, inner))
    if origin is tuple:
        return _repeated(name, arguments[0], None if arguments[-1] is Ellipsis else len(arguments))
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return _enum(name, annotation)
    return _plain(name)


def plan_of(kind: type[msgspec.Struct], common: int = 0) -> tuple[FieldPlan, ...]:
    """The plan of a struct's fields behind the first ``common``."""
    hints = typing.get_type_hints(kind)
    return tuple(FieldPlan(name, *_field(name, hints[name])) for name in kind.__struct_fields__[common:])


def write(plan: tuple[FieldPlan, ...], value: Any, message: Any) -> None:
    """Fill a message from a struct."""
    for field in plan:
        field.put(message, getattr(value, field.name))


class KindPlan(typing.NamedTuple):
    """One kind: its name in the ``oneof`` and the plan of its own fields."""

    oneof: str
    kind: type[msgspec.Struct]
    fields: tuple[FieldPlan, ...]


class UnionConverter:
    """Converts every kind of a closed union to and from its message with a ``oneof kind``."""

    def __init__(self, base: type[msgspec.Struct], union: Any, descriptor: Any) -> None:
        common = len(base.__struct_fields__)
        name_of = {field.message_type.name: field.name for field in descriptor.oneofs_by_name["kind"].fields}
        plans = [
            KindPlan(name_of[kind.__name__], kind, plan_of(kind, common)) for kind in typing.get_args(union)
        ]
        self._common = plan_of(base)
        self._by_type = {plan.kind: plan for plan in plans}
        self._by_name = {plan.oneof: plan for plan in plans}

    def to_message(self, value: msgspec.Struct, message: Any) -> None:
        """Fill an empty ``Event`` or ``Stimulus`` message."""
        plan = self._by_type[type(value)]
        write(self._common, value, message)
        inner = getattr(message, plan.oneof)
        inner.SetInParent()  # a kind whose fields all have default values must still be chosen
        write(plan.fields, value, inner)

    def from_message(self, message: Message) -> Any:
        """The struct of a message; raises ValueError when it has no known kind or an unknown enum value."""
        name = message.WhichOneof("kind")
        if name is None:
            raise ValueError("the kind is missing or unknown")
        plan = self._by_name[name]
        inner = getattr(message, name)
        return plan.kind(*(f.get(message) for f in self._common), *(f.get(inner) for f in plan.fields))


EVENTS: Final = UnionConverter(Event, AnyEvent, pb.Event.DESCRIPTOR)
STIMULI: Final = UnionConverter(Stimulus, AnyStimulus, pb.Stimulus.DESCRIPTOR)
SPEC_PLAN: Final = plan_of(BreakpointSpec)


def spec_to_message(spec: BreakpointSpec) -> pb.BreakpointSpec:
    """A breakpoint as the contract states it."""
    message = pb.BreakpointSpec()
    write(SPEC_PLAN, spec, message)
    return message


def spec_from_message(message: pb.BreakpointSpec) -> BreakpointSpec:
    """The breakpoint; raises ``UsageError`` for a value out of bounds and ValueError for an unknown enum value."""
    return BreakpointSpec(*(field.get(message) for field in SPEC_PLAN))
