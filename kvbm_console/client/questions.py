"""One question, one answer: what every call that is no stream goes through, and what a stream asks first.

Law of this file: every question has a bound in time, because a daemon may be frozen as well as gone.
"""

from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvbm_console.client.errors import translating
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.wire.protocol import ROLE_OF, method_path, version
from kvbm_console.wire.v1 import console_pb2 as pb

ANSWER_S: Final = 10.0
"""A daemon answers within milliseconds; one that is busy with a snapshot of a million blocks within a second."""
M = TypeVar("M", bound=Message)


async def ask(channel: Any, target: str, method: str, request: Message, kind: type[M]) -> M:
    """The answer. Raises ``ConnectionLost``, ``Refused`` or ``UsageError``."""
    call = channel.unary_unary(method_path(method))
    with translating(target):
        data = await call(request.SerializeToString(), timeout=ANSWER_S)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ConnectionLost(f"{target} answers something that is not ours") from None


async def require_role(channel: Any, target: str, name: str, method: str) -> None:
    """Raise ``Refused`` unless this endpoint grants us what a stream that we write to needs.

    It would say so itself, but a stream that is refused while its first message is on its way may lose the reason: the
    transport then tells of an internal error, one time in fifty. A question has no such race.
    """
    reply = await ask(channel, target, "Hello", pb.HelloRequest(protocol=version(), client=name), pb.HelloReply)
    if reply.role < ROLE_OF[method]:
        needed, has = (pb.Role.Name(role).removeprefix("ROLE_").lower() for role in (ROLE_OF[method], reply.role))
        raise Refused(f"{method} needs the role {needed}; this endpoint grants {has}")
