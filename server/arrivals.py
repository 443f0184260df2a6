"""New calls take turns before the RPC library hands them over, so that calls that leave at once cost an engine little.

A call costs the loop's thread much before any code of ours sees it. A caller that began 4,000 calls a second and gave
each up took 40 % of an engine. The library hands over the next call when the loop asks for one. So the loop asks as
often as a lane allows, 52 times a second, and calls wait inside the library. A connection has ``STREAMS_MAX`` of them
there at most, and those that were given up count.

Law of this file: it delays calls that begin. Calls that run, as the session of a debugger or the feed of an engine, are
not touched.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

from .questions import Lane

SAVED: Final = 200
"""Calls that may begin at once, for example all subscriptions through a proxy."""
BEGIN_NS: Final = 300_000
"""Cost of a call that begins and is given up."""
ACCEPTING: Final = "_server_main_loop"
"""The name of the library's coroutine that asks for the next call."""

Turns = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


class Paced(Coroutine[Any, Any, Any]):
    """A coroutine that, each time it goes on, first waits for a turn."""

    def __init__(self, inner: Coroutine[Any, Any, Any], turn: Turns) -> None:
        self._steps = self._run(inner, turn)

    @staticmethod
    def _run(inner: Coroutine[Any, Any, Any], turn: Turns) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        try:
            while True:
                waits_for = inner.send(None) if error is None else inner.throw(error)
                error = None
                try:
                    yield waits_for
                    yield from turn().__await__()
                except GeneratorExit:
                    raise
                except BaseException as raised:
                    error = raised
        except StopIteration as end:
            return end.value
        finally:
            inner.close()

    def send(self, value: Any) -> Any:
        """Go on."""
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an exception, for example a cancellation."""
        return self._steps.throw(*error)

    def close(self) -> None:
        """End."""
        self._steps.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps


async def start_paced(server: Any, lane: Lane | None = None) -> None:
    """Start the RPC server, with turns in ``lane`` for the calls that come."""
    loop = asyncio.get_running_loop()
    lane, paced = lane or Lane(savings_ns=SAVED * BEGIN_NS, expected_ns=BEGIN_NS), False

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal paced
        if getattr(coroutine, "__name__", "") == ACCEPTING:
            paced = True
            coroutine = Paced(coroutine, lambda: lane.turn(""))
        return asyncio.Task(coroutine, loop=loop, **options) if before is None else before(loop, coroutine, **options)

    before: Any = loop.get_task_factory()
    loop.set_task_factory(make)
    try:
        await server.start()
    finally:
        loop.set_task_factory(before)
    if not paced:
        log.warning("this version of the RPC library has no %s, so new calls take no turns", ACCEPTING)
