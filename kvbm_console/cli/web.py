"""``attach --serve-web``: a console in a browser of this machine, a process of its own for each visitor.

Every user of the machine reaches the port, and so does each page that a browser shows. A visitor is let in who shows
the key of the printed address, or the cookie that remembers it, from our own page.

Law of this file: nothing is answered before ``gate`` has let the request in, and no visitor's process runs a file of
the working directory.
"""

import hmac
import os
import secrets
import select
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.cli.output import warn
from kvbm_console.core.errors import UsageError
from kvbm_console.extras import missing

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

HOST: Final = "127.0.0.1"
KEY_BYTES: Final = 24
LEAVE_S: Final = 5
"""For a console that writes into a closed pipe while it ends; it needs a fraction of a second."""
DRIVER_VARIABLE: Final = "TEXTUAL_DRIVER"
RUN_MAIN: Final = "from kvbm_console.cli.main import main; main()"


def in_browser() -> bool:
    """True when this process draws for a browser: its stdin and stdout are then pipes of the server."""
    return "WebDriver" in os.environ.get(DRIVER_VARIABLE, "")


def leave_with_server() -> None:
    """End this visitor's process when the server is gone, in order, or after ``LEAVE_S`` in any case.

    The server tells a process to end only while it lives itself. Behind a killed server the console would follow the
    daemon for ever, and draw for nobody.
    """
    def watch() -> None:
        gone = select.poll()
        gone.register(sys.stdin.fileno(), 0)  # the console reads what comes; a poll for nothing still tells a hang-up
        gone.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVE_S)
        os._exit(1)

    threading.Thread(target=watch, name="kvbm-server-gone", daemon=True).start()


def serve(port: int, arguments: Sequence[str]) -> None:
    """Serve ``kvbm-console attach`` with these arguments until it is told to end."""
    try:
        from kvbm_console.cli.web_server import VisitorServer
    except ImportError:
        raise missing("--serve-web", "web", "textual-serve") from None
    _require_free(port)
    key = secrets.token_urlsafe(KEY_BYTES)
    warn(f"the console is on http://{HOST}:{port}/?key={key}; ctrl-c ends it")
    VisitorServer(visitor_command(arguments), HOST, port, gate(port, key)).serve()


def visitor_command(arguments: Sequence[str]) -> str:
    """The command line of a visitor's process, for a shell."""
    # -P: otherwise Python looks for modules in the working directory first, and runs the files of that directory.
    return shlex.join([sys.executable, "-P", "-c", RUN_MAIN, "attach", *arguments])


def gate(port: int, key: str) -> "Middleware":
    """An aiohttp middleware that lets in who shows the key, or the cookie that remembers it, from our own page.

    It raises ``HTTPForbidden`` for everyone else.
    """
    from aiohttp import web

    ours, cookie = own_hosts(port), f"kvbm-console-{port}"

    @web.middleware
    async def only_ours(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        origin = request.headers.get("Origin")
        if request.headers.get("Host") not in ours or origin not in (None, *(f"http://{host}" for host in ours)):
            raise web.HTTPForbidden(text="only pages of this server are answered\n")
        if _is_key(request.query.get("key"), key):  # redirect: the browser then remembers the address without key
            reply = web.Response(status=303, headers={"Location": "/"})
            reply.set_cookie(cookie, key, httponly=True, samesite="Strict")
            return reply
        if not _is_key(request.cookies.get(cookie), key):
            raise web.HTTPForbidden(text="open the address that kvbm-console printed\n")
        return await handler(request)

    return only_ours


def _is_key(shown: str | None, key: str) -> bool:
    return shown is not None and hmac.compare_digest(shown.encode("utf-8", "replace"), key.encode())


def own_hosts(port: int) -> tuple[str, ...]:
    """The ``Host`` headers of a browser that shows our own page."""
    return f"{HOST}:{port}", f"localhost:{port}"


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"--serve-web cannot listen on {HOST}:{port}: {error.strerror}") from None
