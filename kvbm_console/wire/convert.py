"""A generic converter between typed structs and protobuf messages, by field name.

The messages are generated from the structs (``proto/generate.py``), so names and types agree.

Law of this file: no function per kind. The plan of each kind is read once, at import, from the struct's types.
"""

import types
import typing
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf.message import Message

from kvbm_console.core import instructions as ins
from kvbm_console.core.errors import Refused
from kvbm_console.core.events import KIND_NUMBER_BASE, AnyEvent, Event
from kvbm_console.core.stimuli import AnyStimulus, Stimulus
from kvbm_console.wire.v1 import console_pb2 as pb

S = TypeVar("S", bound=msgspec.Struct)
Put = Callable[[Any, Any], None]
Get = Callable[[Any], Any]


class FieldPlan(typing.NamedTuple):
    """The converters of a field: ``put(message, value)`` and ``get(message) -> value``."""

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


def _nested(name: str, kind: type[msgspec.Struct]) -> tuple[Put, Get]:
    plan = plan_of(kind)

    def put(message: Any, value: Any) -> None:
        write(plan, value, getattr(message, name))

    def get(message: Any) -> Any:
        return kind(*(field.get(getattr(message, name)) for field in plan))

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
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _nested(name, annotation)
    return _plain(name)


@cache
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
        name_of = {field.number: field.name for field in descriptor.oneofs_by_name["kind"].fields}
        plans = [
            KindPlan(name_of[KIND_NUMBER_BASE + int(kind.__struct_config__.tag)], kind, plan_of(kind, common))
            for kind in typing.get_args(union)
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


def struct_to_message(value: msgspec.Struct) -> Any:
    """The message of the same name."""
    message = getattr(pb, type(value).__name__)()
    write(plan_of(type(value)), value, message)
    return message


def struct_from_message(kind: type[S], message: Any) -> S:
    """The struct; raises ``UsageError`` for a value out of bounds and ValueError for an unknown enum value."""
    return kind(*(field.get(message) for field in plan_of(kind)))


# --- answers: structs in the oneof of a reply ---

_ANSWERS: Final[dict[str, type[msgspec.Struct]]] = {
    "verdict": ins.BreakpointVerdict, "reset": ins.ResetAnswer, "drain": ins.DrainAnswer,
}
"""Of ``ControlReply``."""
_RESULTS: Final[dict[str, type[msgspec.Struct]]] = {
    "match": ins.MatchAnswer, "fenced": ins.FencedBlocks, "finish": ins.FinishAnswer,
    "metadata": ins.IterationMetadata, "clones": ins.CloneAnswer,
    "audit": ins.AuditAnswer,
}
"""Of ``Answer``."""
_NAMES: Final = {kind: name for answers in (_ANSWERS, _RESULTS) for name, kind in answers.items()}


def _choose(message: Any, value: msgspec.Struct) -> None:
    inner = getattr(message, _NAMES[type(value)])
    inner.SetInParent()  # an answer whose fields all have default values must still be chosen
    write(plan_of(type(value)), value, inner)


def control_reply(number: int, answer: Any) -> pb.ControlReply:
    """The reply to request ``number``: a sentence, a struct of ``_ANSWERS`` or a tuple of verdicts."""
    reply = pb.ControlReply(id=number)
    if isinstance(answer, str):
        reply.done = answer
    elif isinstance(answer, tuple):
        reply.verdicts.verdicts.extend(map(struct_to_message, answer))
        reply.verdicts.SetInParent()
    else:
        _choose(reply, answer)
    return reply


def control_answer(reply: pb.ControlReply) -> Any:
    """The answer in a reply that does not refuse."""
    name = reply.WhichOneof("answer")
    if name == "verdicts":
        return tuple(struct_from_message(ins.BreakpointVerdict, verdict) for verdict in reply.verdicts.verdicts)
    value = getattr(reply, name or "done")
    return struct_from_message(_ANSWERS[name], value) if name in _ANSWERS else value


def feed_answer(result: Any) -> pb.Answer:
    """The answer to an engine's call with this result; empty for a call without a result."""
    answer = pb.Answer()
    if isinstance(result, ins.PoolAnswer):
        answer.pool = result.pool
    elif isinstance(result, msgspec.Struct):
        _choose(answer, result)
    return answer


def feed_result(answer: pb.Answer) -> Any:
    """The result in an answer, its ``Refused``, or None for a call without a result."""
    name = answer.WhichOneof("result")
    if name in _RESULTS:
        return struct_from_message(_RESULTS[name], getattr(answer, name))
    if name == "pool":
        return ins.PoolAnswer(answer.pool)
    return Refused(answer.rejected) if name == "rejected" else None
