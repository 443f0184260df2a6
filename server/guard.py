"""The door of every RPC: role, size, form. Nothing behind it sees a byte that was not checked.

Messages are parsed here and not by gRPC, which answers UNKNOWN with internal text when a parser fails.

Law of this file: a refusal is a status with one sentence that tells the caller's mistake, and never our internals.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.wire.protocol import CONTROL_MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX, NAME_BYTES_MAX, ROLE_OF
from kvbm_console.wire.v1 import console_pb2 as pb

from .access import AccessRules, Context, WrongToken
from .questions import Questions, TooMany, Turn

END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]
"""The answer of ``context.read`` when the caller has closed its side."""
log = logging.getLogger("kvbm_console.server")

BYTES_MAX: Final = {"Feed": MESSAGE_BYTES_MAX}
"""Largest request of a method; all others have the limit of control messages."""
ANSWERED_AT_ONCE: Final = frozenset({"Hello", "SlotDetail", "Query"})
"""Questions whose answer is computed without waiting for anything."""
ROLE_NAMES: Final[dict[int, str]] = {int(pb.ROLE_OBSERVE): "observe", int(pb.ROLE_CONTROL): "control"}


class Malformed(Exception):
    """Raised for a request that does not have the form of the contract; its text goes to the caller."""


async def refuse(context: Context, code: grpc.StatusCode, sentence: str) -> NoReturn:
    """End the call with a status."""
    await context.abort(code, sentence)
    raise AssertionError("abort did not raise")


async def admit(method: str, context: Context, access: AccessRules, questions: Questions) -> Turn | None:
    """Refuse a caller whose role does not suffice, and every caller where the contract declares no role.

    Questions and refusals wait for their turn, which is returned; verbs and feeds have none. Raises ``TooMany``.
    """
    needed = ROLE_OF.get(method, 0)
    try:
        granted = access.role_of(context)
    except WrongToken:
        await questions.observers.turn(caller_of(context))
        await refuse(context, grpc.StatusCode.PERMISSION_DENIED, "the token is not that of this daemon")
    refused = needed == 0 or granted < needed
    turn = None
    if refused or needed == int(pb.ROLE_OBSERVE):
        turn = await questions.of(granted).turn(caller_of(context))
    if refused:
        name = ROLE_NAMES.get(needed)
        sentence = f"{method} needs the role {name}" if name else f"{method} declares no role and is closed"
        await refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"{sentence}; this endpoint grants "
                     f"{ROLE_NAMES[granted]}")
    return turn


def caller_of(context: Context) -> str:
    """The connection of a call; on a Unix socket, whose connections have one address, with the program's name."""
    peer = context.peer() or ""
    if not peer.startswith("unix:"):
        return peer
    metadata: Any = context.invocation_metadata() or ()
    agent = next((str(value) for key, value in metadata if key == "user-agent"), "")
    return f"{peer} {agent[:NAME_BYTES_MAX]}"


def parse(method: str, kind: type[Message], data: bytes) -> Any:
    """The message of a request. Raises ``Malformed``."""
    most = BYTES_MAX.get(method, CONTROL_MESSAGE_BYTES_MAX)
    if len(data) > most:
        raise Malformed(f"a {method} message has at most {most} bytes, got {len(data)}")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Malformed(f"the bytes are not a {kind.__name__}") from None


def require_text(field: str, text: str, most: int) -> None:
    """Raise ``Malformed`` unless a string from outside is within its limit."""
    size = len(text.encode())
    if size > most:
        raise Malformed(f"{field} has at most {most} bytes, got {size}")


def guarded(
    method: str, handle: Callable[..., Awaitable[Any]], access: AccessRules, questions: Questions
) -> Callable[[Any, Context], Awaitable[Any]]:
    """The handler behind the door. The first argument is passed on as it comes (bytes, or the request iterator).

    A question that is not answered at once gets its turn as a third argument.
    """

    async def behind_the_door(request: Any, context: Context) -> Any:
        try:
            turn = await admit(method, context, access, questions)
            if turn is None:
                return await handle(request, context)
            if method not in ANSWERED_AT_ONCE:
                return await handle(request, context, turn)
            with turn.working():
                return await handle(request, context)
        except (Malformed, UsageError) as error:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Refused as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TooMany as error:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            raise  # InternalError: a write to a caller that has just left, which gRPC handles
        except Exception:  # the edge of the process: the error goes to the log, not to the caller
            log.exception("%s failed", method)
            await refuse(context, grpc.StatusCode.INTERNAL, f"{method} failed; the daemon's log says why")

    return behind_the_door
