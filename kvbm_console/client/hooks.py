"""The engine's side of a hook: calls that breakpoints can pause, in a process that must not depend on the daemon.

An engine that awaits its connector calls it through ``HookedFeed``. A breakpoint at ``call.will`` or ``call.did`` makes
the call wait here, in the engine's own task; nobody else waits.

Law of this file: the engine's own monotonic clock has the last word. A daemon that is gone lets a waiting call go on at
once, one that stands still at the latest after the hold's own limit, and no answer is waited for longer than
``answer_s``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from kvbm_console.client.feeder import FeedClient
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.core.ids import Site
from kvbm_console.core.stimuli import ENTRY_TAGS, CallAnnounced, Stimulus

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_S: Final = 1.0
"""A living daemon answers within milliseconds; an engine that waits longer for a cache had better compute."""


class HookedFeed:
    """A ``FeedClient`` for an engine that can wait. ``waited`` counts the calls that a breakpoint has paused."""

    def __init__(self, feed: FeedClient, *, answer_s: float = ANSWER_S) -> None:
        self.feed = feed
        self.waited = 0
        self._answer_s = answer_s

    async def call(
        self, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """One entry point, with its breakpoints; the first argument is the request. Returns its result.

        Raises ``Refused`` by the leader and ``ConnectionLost`` when the daemon is gone or does not answer: then the
        engine goes on without it.
        """
        request = args[0] if args and isinstance(args[0], str) else None
        tag = ENTRY_TAGS.get(kind) if isinstance(kind, type) else None
        if request is not None and tag is not None:
            try:
                await self._bounded(self.feed.submit(CallAnnounced, request, tag))
            except Refused:
                pass  # the request is not known yet: nothing can be held
            else:
                await self._wait(request, Site.CALL_WILL)
        result = await self._bounded(self.feed.submit(kind, *args, **kwargs))
        if request is not None:
            await self._wait(request, Site.CALL_DID)
        return result

    async def _bounded(self, answer: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(answer, self._answer_s)
        except TimeoutError:
            raise ConnectionLost(f"the daemon did not answer within {self._answer_s:g} s") from None

    async def _wait(self, request: str, site: Site) -> None:
        """Until the request is not held by this site any more, the daemon is gone, or the hold's own limit is over."""
        held = self.feed.held.get(request)
        if held is None or held.site is not site:
            return
        self.waited += 1
        try:
            async with asyncio.timeout(held.max_hold_ns / 1e9):
                while self.feed.alive and self.feed.held.get(request) == held:
                    await self.feed.changed()
        except TimeoutError:
            return
