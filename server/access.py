"""Roles by endpoint and token, and the credentials of a TLS endpoint.

The Unix socket grants control, TCP observe; a token grants control over TCP. Beyond the loopback a daemon serves no
client without TLS and a token.

Law of this file: secrets come from files that only their owner may read, are compared in constant time, and are never
printed.
"""

import hmac
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
import grpc.aio

from kvbm_console.core.errors import UsageError
from kvbm_console.wire.protocol import TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, TOKEN_KEY, TOKEN_SCHEME
from kvbm_console.wire.v1 import console_pb2 as pb

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext

PEM_BYTES_MAX: Final = 1_000_000
"""A chain of certificates has some kilobytes."""
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class WrongToken(Exception):
    """Raised for a caller with a wrong token, who is refused rather than let in with a lower role."""


class AccessRules:
    """The roles that an endpoint grants. With ``read_only`` no caller controls, whatever token it shows."""

    def __init__(self, token: str = "", *, read_only: bool = False) -> None:
        self._token = token.encode()
        self._read_only = read_only

    def role_of(self, context: Context) -> int:
        """The role of a caller. Raises ``WrongToken``."""
        peer = context.peer() or ""
        granted = int(pb.ROLE_CONTROL) if peer.startswith("unix:") else int(pb.ROLE_OBSERVE)
        shown = _shown(context)
        if shown is not None:
            if not self._token or not hmac.compare_digest(shown, self._token):
                raise WrongToken
            granted = int(pb.ROLE_CONTROL)
        return int(pb.ROLE_OBSERVE) if self._read_only else granted


def _shown(context: Context) -> bytes | None:
    """The token that a caller shows, None when it shows none."""
    metadata: Any = context.invocation_metadata() or ()
    for key, value in metadata:
        if key == TOKEN_KEY:
            text = value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")
            return text.removeprefix(TOKEN_SCHEME).encode()
    return None


def read_token(path: Path) -> str:
    """The token of a file: one line, readable by its owner alone. Raises ``UsageError``."""
    text = _read_secret("token-file", path, 4 * TOKEN_BYTES_MAX).decode("utf-8", "replace").strip()
    size = len(text.encode())
    if not TOKEN_BYTES_MIN <= size <= TOKEN_BYTES_MAX or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(
            f"token-file {path} must hold one line of {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} printable ASCII "
            f"characters without blanks, got {size}"
        )
    return text


def _read_secret(field: str, path: Path, most: int) -> bytes:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{field} {path} is no file")
        if mode & OTHERS:
            raise UsageError(
                f"{field} {path} must be readable by its owner alone (chmod 600), its mode is {mode & 0o777:o}"
            )
        return _read(field, path, most)
    except OSError as error:
        raise UsageError(f"{field} {path}: {error.strerror}") from None


def _read(field: str, path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{field} {path} must have at most {most} bytes")
    return data


def server_credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """The credentials of a TLS endpoint. Raises ``UsageError`` for files that are not PEM."""
    try:
        chain = _read("tls-cert", certificate, PEM_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"tls-cert {certificate}: {error.strerror}") from None
    secret = _read_secret("tls-key", key, PEM_BYTES_MAX)
    for field, path, data, mark in (
        ("tls-cert", certificate, chain, b"-----BEGIN CERTIFICATE-----"), ("tls-key", key, secret, b"PRIVATE KEY-----"),
    ):
        if mark not in data:
            raise UsageError(f"{field} {path} must be in PEM form")
    return grpc.ssl_server_credentials([(secret, chain)])


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The same for a server that is not gRPC's. Raises ``UsageError`` for files that do not fit each other."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or error
        raise UsageError(f"tls-cert {certificate} and tls-key {key} cannot be used: {why}") from None
    return context
