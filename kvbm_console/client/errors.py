"""From the transport's errors to ours.

Law of this file: the caller reads one sentence that names the target, never a page of transport internals.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
import grpc.aio

from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, Refused, UsageError

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
    ("handshake failed", "shows no certificate that --tls-ca vouches for"),
    ("failed to connect to all addresses; last error: UNAVAILABLE", "hangs up; one that speaks TLS needs --tls-ca"),
    ("errors resolving", "names a host that is not found"),
)
"""What the transport says where somebody may listen, but not to us; the first that fits."""
END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]
"""What reading a finished stream answers."""


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
            return ConnectionLost(f"nobody listens on {target}")
    return ConnectionLost(f"the connection to {target} was lost" + (f": {text}" if _is_ours(text) else ""))


def _is_ours(text: str) -> bool:
    """Whether a text comes from a daemon and not from the transport."""
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
    except grpc.aio.InternalError:
        raise ConnectionLost(f"the connection to {target} was lost") from None
