"""Interceptor hooks: code of an embedding program around every entry point, which breakpoints can pause.

A program that awaits the leader (an asyncio engine, an embedded use, a test) calls it through ``HookedPort``. Its
interceptors run before and after each call, in the caller's own task. A breakpoint at ``call.will`` or ``call.did``
makes that task wait until the hold is released. Only that request's call waits; the leader and all other calls go on.

Law of this file: the engine side trusts no other process to let it go. The wait ends when the hold ends, and at the
latest one grace period after the hold's own limit.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Concatenate, Final, ParamSpec, Protocol

import anyio

from kvbm_console.core.ids import Site
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import ENTRY_NAMES, ENTRY_TAGS, CallAnnounced, Stimulus
from kvbm_console.dispatch import Dispatcher

P = ParamSpec("P")

GRACE_S: Final = 1.0
"""Grace period after a hold's own limit, the most that a frozen daemon costs an engine."""


class Interceptor(Protocol):
    """A link of the chain. Its exception reaches the caller, and the call is not made."""

    async def will_call(self, entry: str, request: str) -> None:
        """Runs before the entry point ``entry`` is called for ``request``."""
        ...

    async def finished_call(self, entry: str, request: str, outcome: Outcome) -> None:
        """Runs after the entry point has returned, in reverse order of registration."""
        ...


class HookedPort:
    """The leader for callers that can wait. ``changed`` returns when something was published.

    >>> port = HookedPort(dispatcher, source=1, changed=service.changed.wait)   # doctest: +SKIP
    >>> answer = await port.call(MatchRequested, "chat-1", 0)                   # doctest: +SKIP
    """

    def __init__(
        self, dispatcher: Dispatcher, source: int, changed: Callable[[], Awaitable[None]],
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        self._dispatcher = dispatcher
        self._source = source
        self._changed = changed
        self.interceptors = tuple(interceptors)

    async def call(
        self, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus], *args: P.args, **kwargs: P.kwargs
    ) -> Outcome:
        """Call an entry point with its interceptors and breakpoints. The first argument is the request."""
        request = args[0] if args and isinstance(args[0], str) else None
        tag = ENTRY_TAGS[kind] if isinstance(kind, type) and kind in ENTRY_TAGS else None
        if request is None or tag is None:
            return self._dispatcher.submit_from(self._source, None, kind, *args, **kwargs)
        entry = ENTRY_NAMES[tag]
        for interceptor in self.interceptors:
            await interceptor.will_call(entry, request)
        leader = self._dispatcher.leader
        if leader.gate is not None and request in leader.state.slot_of:
            self._dispatcher.submit_from(self._source, None, CallAnnounced, request, tag)
            await self._wait(request, Site.CALL_WILL)
        outcome = self._dispatcher.submit_from(self._source, None, kind, *args, **kwargs)
        if leader.state.holds:
            await self._wait(request, Site.CALL_DID)
        for interceptor in reversed(self.interceptors):
            await interceptor.finished_call(entry, request, outcome)
        return outcome

    async def _wait(self, request: str, site: Site) -> None:
        """Wait until this site no longer holds the request."""
        state = self._dispatcher.leader.state
        slot = state.slot_named(request)
        if slot is None or slot.hold is None or state.holds[slot.hold].site is not site:
            return
        number = slot.hold
        limit_s = state.holds[number].max_hold_ns / 1e9 + GRACE_S
        with anyio.move_on_after(limit_s):
            while number in self._dispatcher.leader.state.holds:
                await self._changed()
