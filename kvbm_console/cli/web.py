"""``attach --serve-web``: the same console in a browser on this machine; each visitor gets a process of its own.

Law of this file: it listens on the loopback only, and answers only visitors who have shown the key of the address that
it printed, from pages that it has served itself. Every user of this machine reaches the loopback, a browser lets any
page in the world open a websocket to it, and a visitor may continue holds.
"""

import hmac
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from kvbm_console.cli.output import warn
from kvbm_console.core.errors import UsageError
from kvbm_console.extras import missing

HOST: Final = "127.0.0.1"
RUN_MAIN: Final = "from kvbm_console.cli.main import main; main()"
KEY_BYTES: Final = 24
DRIVER_VARIABLE: Final = "TEXTUAL_DRIVER"


def in_browser() -> bool:
    """Whether this process draws for a browser: its stdin and stdout are pipes of the server then."""
    return "WebDriver" in os.environ.get(DRIVER_VARIABLE, "")


def serve(port: int, arguments: Sequence[str]) -> None:
    """Serve ``kvbm-console attach`` with these arguments until it is told to end."""
    try:
        from aiohttp import web
        from textual_serve.server import Server
    except ImportError:
        raise missing("--serve-web", "web", "textual-serve") from None
    _require_free(port)
    ours = own_hosts(port)
    key, cookie = secrets.token_urlsafe(KEY_BYTES), f"kvbm-console-{port}"

    @web.middleware
    async def only_ours(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        origin = request.headers.get("Origin")
        if request.headers.get("Host") not in ours or origin not in (None, *(f"http://{host}" for host in ours)):
            raise web.HTTPForbidden(text="only pages of this server are answered\n")
        if _is_key(request.query.get("key"), key):  # once: the address that the browser remembers is without it
            reply = web.Response(status=303, headers={"Location": "/"})
            reply.set_cookie(cookie, key, httponly=True, samesite="Strict")
            return reply
        if not _is_key(request.cookies.get(cookie), key):
            raise web.HTTPForbidden(text="open the address that kvbm-console printed\n")
        return await handler(request)

    class Local(Server):  # type: ignore[misc,unused-ignore]
        """The server with the check in front."""

        async def _make_app(self) -> Any:
            app = await super()._make_app()
            app.middlewares.append(only_ours)
            return app

    # -P: without it Python looks for modules in the working directory first, and runs what it finds there.
    command = shlex.join([sys.executable, "-P", "-c", RUN_MAIN, "attach", *arguments])
    warn(f"the console is on http://{HOST}:{port}/?key={key}; ctrl-c ends it")
    Local(command, host=HOST, port=port, title="kvbm-console").serve()


def _is_key(shown: str | None, key: str) -> bool:
    return shown is not None and hmac.compare_digest(shown.encode("utf-8", "replace"), key.encode())


def own_hosts(port: int) -> tuple[str, ...]:
    """What a browser that looks at our own page sends as ``Host``."""
    return f"{HOST}:{port}", f"localhost:{port}"


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"--serve-web cannot listen on {HOST}:{port}: {error.strerror}") from None
