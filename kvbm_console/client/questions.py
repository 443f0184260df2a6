"""Single questions to a daemon, and our errors for those of the transport.

Law of this file: every question has a bound in time, because a daemon may be frozen as well as gone. The caller reads
one sentence that names the target, never a page of transport internals.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, Refused, UsageError
from kvbm_console.wire.protocol import ROLE_OF, method_path, version
from kvbm_console.wire.v1 import console_pb2 as pb

ANSWER_S: Final = 10.0
"""A daemon answers within milliseconds, or within a second while it is busy with a snapshot of a million blocks."""
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
    """Raise ``Refused`` unless this endpoint grants the role that a stream of ``method`` needs.

    The daemon would refuse the stream itself. But 1 in 50 streams that are refused while their first message is
    under way loses the reason, and the transport reports an internal error. A question has no such race.
    """
    reply = await ask(channel, target, "Hello", pb.HelloRequest(protocol=version(), client=name), pb.HelloReply)
    if reply.role < ROLE_OF[method]:
        needed, has = (pb.Role.Name(role).removeprefix("ROLE_").lower() for role in (ROLE_OF[method], reply.role))
        raise Refused(f"{method} needs the role {needed}; this endpoint grants {has}")

# --- the transport's errors ---


_KIND: Final[dict[grpc.StatusCode, type[KvbmConsoleError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.PERMISSION_DENIED: Refused,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.NOT_FOUND: Refused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Refused,
    grpc.StatusCode.UNIMPLEMENTED: Refused,
}
_TLS: Final = (
    ("WRONG_VERSION_NUMBER", "does not speak TLS, so --tls-ca is not for it"),
    ("Hostname Verification Check failed", "shows a certificate for other hosts"),
    ("certificate has expired", "shows a certificate that has expired"),
    ("certificate is not yet valid", "shows a certificate that is not valid yet"),
    ("handshake failed", "shows no certificate that --tls-ca vouches for"),
    ("failed to connect to all addresses; last error: UNAVAILABLE", "hangs up; a daemon with TLS needs --tls-ca"),
    ("errors resolving", "names a host that is not found"),
)
"""Errors of the transport at an address where another server may listen. The first that fits is used."""
END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]
"""The answer of reading a finished stream."""


def translated(target: str, code: grpc.StatusCode | None, details: str | None) -> KvbmConsoleError:
    """Our error for a status."""
    text = (details or "").strip().splitlines()[0] if details else ""
    kind = _KIND.get(code) if code is not None else None
    if kind is not None:
        return kind(text or f"{target} refused with {code}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ConnectionLost(f"{target} did not answer in time")
    if code is grpc.StatusCode.UNAVAILABLE:
        for word, why in () if target.startswith("unix:") else _TLS:
            if word in text:
                return ConnectionLost(f"{target} {why}")
        if "connect" in text.lower():
            return ConnectionLost(f"no daemon listens on {target}")
    return ConnectionLost(f"the connection to {target} was lost" + (f": {text}" if _is_ours(text) else ""))


def _is_ours(text: str) -> bool:
    """True if a text comes from a daemon and not from the transport."""
    return text.startswith("the daemon") or text.endswith("says why")


@contextmanager
def translating(target: str) -> Iterator[None]:
    """Turn transport errors inside the block into ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise translated(target, error.code(), error.details()) from None
    except grpc.aio.UsageError:
        raise ConnectionLost(f"the connection to {target} is closed") from None
    except (grpc.aio.InternalError, asyncio.InvalidStateError):  # the latter: the call has ended, and a write follows
        raise ConnectionLost(f"the connection to {target} was lost") from None
