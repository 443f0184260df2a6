"""A GET from an engine's HTTP server, with bounds.

Law of this file: an answer is limited in bytes and time, and redirections are not followed.
"""

import http.client
from typing import Final
from urllib.parse import urlsplit

from kvbm_console.core.errors import ConnectionLost, UsageError

TIMEOUT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 4 * 2**20
"""SGLang's answer holds every argument of the server: some 20 kB."""


def split_server(url: str) -> tuple[str, int, bool]:
    """(host, port, TLS) of ``http://HOST:PORT``. Raises ``UsageError``."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise UsageError(f"an engine must be http://HOST:PORT, got {url!r}")
    tls = parts.scheme == "https"
    return parts.hostname, port or (443 if tls else 80), tls


def fetch(
    url: str, host: str, port: int, tls: bool, path: str, *, timeout_s: float = TIMEOUT_S,
    bytes_max: int = ANSWER_BYTES_MAX,
) -> tuple[int, bytes]:
    """(status, body) of a GET. Redirections are not followed. Raises ``ConnectionLost`` and ``UsageError``."""
    kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    connection = kind(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = answer.read(bytes_max + 1)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionLost(f"{url} does not answer: {error or type(error).__name__}") from None
    finally:
        connection.close()
    if len(body) > bytes_max:
        raise UsageError(f"{url}{path} answers with more than {bytes_max} bytes")
    return answer.status, body
