"""A client's credentials: the certificate authority that it trusts, and its token.

Law of this file: a token travels over a Unix socket, inside this machine, or over TLS, and in no other way.
"""

import ipaddress
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import grpc
import grpc.aio
import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.wire.protocol import CLIENT_OPTIONS, TOKEN_BYTES_MAX, TOKEN_KEY, TOKEN_SCHEME

FILE_BYTES_MAX: Final = 1_000_000


class Access(msgspec.Struct, frozen=True):
    """``ca`` holds the certificates, in PEM form, of the authority that signed the daemon's, None for no TLS.
    ``token``: grants control over TCP."""

    ca: bytes | None = None
    token: str = ""

    @classmethod
    def load(cls, tls_ca: Path | None, token_file: Path | None) -> Self:
        """Read the certificates and the token from files. Raises ``UsageError`` naming the flag and the file."""
        token = ""
        if token_file is not None:
            token = _read("--token-file", token_file).decode("utf-8", "replace").strip()
            if not token or len(token.encode()) > TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable():
                raise UsageError(f"--token-file {token_file} must hold one line of printable ASCII characters")
            if token_file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"--token-file {token_file} must be readable by its owner alone (chmod 600)")
        ca = None
        if tls_ca is not None:
            ca = _read("--tls-ca", tls_ca)
            if b"-----BEGIN CERTIFICATE-----" not in ca:
                raise UsageError(f"--tls-ca {tls_ca} must be in PEM form")
        return cls(ca, token)


def _read(flag: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{flag} {path} must have at most {FILE_BYTES_MAX} bytes")
    return data


def open_channel(target: str, access: Access) -> Any:
    """A channel to a target. Raises ``UsageError`` when it would send the token in the clear."""
    local = target.startswith("unix:")
    # A daemon tells callers on its Unix socket apart by this name, so that each gets its turn.
    options = (*CLIENT_OPTIONS, ("grpc.primary_user_agent", f"kvbm-console-{secrets.token_hex(4)}"))
    if access.token and access.ca is None and not local and not _is_this_machine(target):
        raise UsageError(f"a token is sent to {target} over TLS only; name its authority with --tls-ca")
    if access.ca is not None and not local:
        channel: Any = grpc.aio.secure_channel(
            target, grpc.ssl_channel_credentials(root_certificates=access.ca), options=options
        )
    else:
        channel = grpc.aio.insecure_channel(target, options=options)
    return TokenChannel(channel, access.token) if access.token else channel


def _is_this_machine(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TokenChannel:
    """A channel whose calls all show the token."""

    def __init__(self, channel: Any, token: str) -> None:
        self._channel = channel
        self._metadata = ((TOKEN_KEY, TOKEN_SCHEME + token),)

    def _showing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: method(*args, metadata=self._metadata, **kwargs)

    def unary_unary(self, *how: Any) -> Callable[..., Any]:
        """As of ``grpc.aio.Channel``."""
        return self._showing(self._channel.unary_unary(*how))

    def unary_stream(self, *how: Any) -> Callable[..., Any]:
        """As of ``grpc.aio.Channel``."""
        return self._showing(self._channel.unary_stream(*how))

    def stream_stream(self, *how: Any) -> Callable[..., Any]:
        """As of ``grpc.aio.Channel``."""
        return self._showing(self._channel.stream_stream(*how))

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()
