"""The HTTP server of ``attach --serve-web``: pages, a process for each visitor, and a log.

It needs the extra ``web``, so it is imported where it is used.

Law of this file: the log quotes no address and no header of a visitor, because these hold the key.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError
from textual_serve.server import Server

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

LINE: Final = "%(asctime)s %(message)s"
SHUTDOWN_S: Final = 0.5
"""For the process of a visitor to end, which needs a fraction of it. The server leaves after twice as long at most."""
ROUTE: Final = "kvbm-route"
"""Item of a request: the pattern of ours that its address matches, None if it matches none."""


class VisitorServer(Server):  # type: ignore[misc,unused-ignore]
    """A server that runs ``command`` for each visitor whom ``gate`` lets in."""

    def __init__(self, command: str, host: str, port: int, gate: "Middleware") -> None:
        super().__init__(command, host=host, port=port, title="kvbm-console")
        self._gate = gate
        self._visitors: set[asyncio.Transport] = set()

    async def _make_app(self) -> Any:
        app = await super()._make_app()
        app.middlewares.extend((note_route, self._gate))
        return app

    def initialize_logging(self) -> None:
        """As in every server."""
        # The library's own handler prints the variables of a traceback, among them the key.
        logging.basicConfig(level=logging.INFO, format=LINE, stream=sys.stdout)
        logging.getLogger("aiohttp.server").addFilter(quotes_no_request)

    def serve(self, debug: bool = False) -> None:
        """Answer visitors until SIGINT or SIGTERM, then end within about two seconds, whatever they do."""
        self.initialize_logging()
        web.run_app(
            self._make_app(), host=self.host, port=self.port, print=None, access_log_class=RouteLog,
            shutdown_timeout=SHUTDOWN_S,
        )

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """As in every server."""
        visitor = request.transport
        if visitor is not None:
            self._visitors.add(visitor)
        try:
            return await super().handle_websocket(request)
        finally:
            self._visitors.discard(visitor)

    async def on_shutdown(self, app: web.Application) -> None:
        """Cut off all visitors. Their processes are then told to end."""
        # The library waits for each handler, and a handler waits for its visitor. One that is silent, or takes nothing
        # of what is written to it, ends it only when the heartbeat has failed, after 22 s.
        for visitor in self._visitors:
            visitor.abort()


class RouteLog(AbstractAccessLogger):
    """A line for each request with the pattern that its address matches, ``-`` if none."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """As in every access log."""
        self.logger.info('%s "%s %s" %s %s', request.remote, request.method, request.get(ROUTE) or "-",
                         response.status, response.body_length)


@web.middleware
async def note_route(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware that sets ``ROUTE``: the access log cannot ask, as a request that is no HTTP has no route."""
    resource = request.match_info.route.resource
    request[ROUTE] = None if resource is None else resource.canonical
    return await handler(request)


def quotes_no_request(record: logging.LogRecord) -> bool:
    """False for a refused request that is no HTTP: the error quotes it. ``RouteLog`` has a line for it, too."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
