"""An engine's side of ``Feed``: calls go out in order, answers come back in order, orders come in between.

An engine that awaits its connector calls it through ``HookedFeed``. A breakpoint at ``call.will`` or ``call.did`` makes
the call wait here, in the engine's own task; no other call waits.

Law of this file: ``submit`` answers exactly as the leader's entry point did, or raises ``Refused`` with its sentence.
Calls are handled in the order of ``submit``. A hook waits by the engine's own monotonic clock. A waiting call goes on
at once when the daemon is gone, and at the hold's own limit when the daemon stands still.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Self, TypeVar

from google.protobuf.message import DecodeError

from kvbm_console.client.questions import END, require_role, translating
from kvbm_console.core import instructions as ins
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, Refused
from kvbm_console.core.ids import Route, Site, WaitPoint
from kvbm_console.core.stimuli import ENTRY_TAGS, CallAnnounced, Stimulus
from kvbm_console.wire.batches import pack_stimuli
from kvbm_console.wire.convert import feed_result
from kvbm_console.wire.protocol import method_path, process_began
from kvbm_console.wire.v1 import console_pb2 as pb

ORDERS_MAX: Final = 65_536
"""Orders an engine may leave unread; the daemon has the same bound on its side."""

P = ParamSpec("P")
Order = (
    ins.WakeRequest | ins.ReleaseDeviceBlocks | ins.PinDeviceBlocks | ins.ClearDevicePool | ins.StartTransfer
    | ins.CancelTransfer | ins.ZeroBlocks
)
"""The leader's orders to an engine outside the engine's calls."""


class Hold(NamedTuple):
    """A hold of a request of this engine."""

    hold: int
    site: Site
    max_hold_ns: int


class FeedClient:
    """A feed, as an asynchronous context manager.

    ``source`` is this engine's index. ``standing`` are the requests that must be left out of iterations now;
    ``computed_tokens`` of a request is its position after its last wake. ``orders`` yields the leader's orders.
    """

    def __init__(
        self, channel: Any, target: str, name: str, *, moves: bool, pauses: bool = False,
        points: Sequence[WaitPoint] = (), settled: bool = False, rank: int | None = None,
    ) -> None:
        self.source = 0
        self.incarnation = ""
        self.standing: frozenset[str] = frozenset()
        self.held: dict[str, Hold] = {}
        """The holds of this engine's requests."""
        self.lookups: tuple[str, ...] = ()
        """Globs of requests whose lookup may be held; a watched engine asks before such a lookup."""
        self.copies: tuple[str, ...] = ()
        """Globs of requests whose copies may be held; an engine that can wait asks before such a copy."""
        self.paused = False
        """True if the leader asks for no iteration to be formed."""
        self.computed_tokens: dict[str, int] = {}
        self._channel = channel
        self._target = target
        self._open = pb.OpenFeed(name=name, moves=moves, pauses=pauses, settled=settled, rank=rank)
        if moves:
            self._open.process, self._open.process_began = os.getpid(), process_began(os.getpid())
        self._open.points.extend(int(point) for point in points)  # type: ignore[misc]
        self._call: Any = None
        self._n = 0
        self._answers: deque[asyncio.Future[Any]] = deque()
        self._orders: deque[Order] = deque()
        self._news = asyncio.Event()
        self._opened: asyncio.Future[None]
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._ended: KvbmConsoleError | None = None
        self._holds_changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await require_role(self._channel, self._target, self._open.name, "Feed")
        self._opened = asyncio.get_running_loop().create_future()
        self._call = self._channel.stream_stream(method_path("Feed"), None, None)()
        self._reader = asyncio.create_task(self._read(), name="kvbm-feed-read")
        try:
            with translating(self._target):
                request = pb.FeedRequest(open=self._open)
                await self._call.write(request.SerializeToString())
            await self._opened
        except ConnectionLost:
            await self._close()
            raise (self._ended or ConnectionLost(f"no daemon listens on {self._target}")) from None
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._end(ConnectionLost(f"the feed to {self._target} is closed"))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()

    # --- calls -----------------------------------------------------------------------------------------------------

    async def submit(
        self, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """One entry point, named by its stimulus; returns its result. Raises ``Refused`` or ``ConnectionLost``."""
        (result,) = await self.submit_all([kind(0, time.monotonic_ns(), 0, None, *args, **kwargs)])
        if isinstance(result, Refused):
            raise result
        return result

    async def submit_all(self, stimuli: list[Stimulus]) -> list[Any]:
        """Several calls in one message, with their results. The result of a refused call is its ``Refused``."""
        loop = asyncio.get_running_loop()
        async with self._writing:
            if self._ended is not None:
                raise self._ended
            futures: list[asyncio.Future[Any]] = [loop.create_future() for _ in stimuli]
            for stimulus in stimuli:
                stimulus.n = self._n
                self._n += 1
            batch = pb.StimulusBatch.FromString(pack_stimuli(stimuli).data)
            self._answers.extend(futures)
            with translating(self._target):
                await self._call.write(pb.FeedRequest(batch=batch).SerializeToString())
        return list(await asyncio.gather(*futures))

    async def copies_stopped(self) -> None:
        """Only with ``moves``: none of our copies runs any more, and none begins. Copies that were not reported have
        failed, and the feed ends. Without this, their places stay reserved until this process has ended."""
        async with self._writing:
            if self._ended is not None:
                raise self._ended
            with translating(self._target):
                await self._call.write(pb.FeedRequest(stopped=pb.CopiesStopped()).SerializeToString())

    async def tell_cost(
        self, calls: int, dropped: int, call_ns: int, steps: int, step_ns: int, errors: int,
        checked: int | None = None, mismatched: int | None = None, unknown: int | None = None,
        check_ns: int | None = None, *, audited: int | None = None, differing: int | None = None,
    ) -> None:
        """The cost of watching for the engine since it began, and the blocks that ``sanitize`` compared, if it runs.

        ``audited`` are the places that audits compared. Raises ``ConnectionLost``."""
        cost = pb.FeedCost(
            calls=calls, dropped=dropped, call_ns=call_ns, steps=steps, step_ns=step_ns, errors=errors,
            checked_blocks=checked, mismatched_blocks=mismatched, unknown_blocks=unknown, check_ns=check_ns,
            audited_places=audited, differing_places=differing,
        )
        async with self._writing:
            if self._ended is not None:
                raise self._ended
            with translating(self._target):
                await self._call.write(pb.FeedRequest(cost=cost).SerializeToString())

    async def orders(self) -> AsyncIterator[Order]:
        """The leader's orders, in order, until the feed ends (then ``ConnectionLost``)."""
        while True:
            while self._orders:
                yield self._orders.popleft()
            if self._ended is not None:
                raise self._ended
            self._news.clear()
            await self._news.wait()

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            with translating(self._target):
                while (data := await self._call.read()) is not END:
                    self._take(pb.FeedReply.FromString(data))
                    if len(self._orders) > ORDERS_MAX:
                        self._end(ConnectionLost(f"{ORDERS_MAX} orders were left unread"))
                        return
            self._end(ConnectionLost(f"{self._target} ended the feed"))
        except DecodeError:
            self._end(ConnectionLost(f"{self._target} answers something that is not ours"))
        except KvbmConsoleError as error:
            self._end(error)

    def _take(self, reply: pb.FeedReply) -> None:
        kind = reply.WhichOneof("item")
        if kind == "answers":
            for answer in reply.answers.answers:
                future = self._answers.popleft()
                if not future.done():
                    future.set_result(feed_result(answer))
        elif kind == "opened":
            self.source, self.incarnation = reply.opened.source, reply.opened.incarnation
            self._opened.set_result(None)
        elif kind == "standing":
            self.standing = frozenset(reply.standing.requests)
            self._news.set()
        elif kind == "held":
            self.held = {
                one.request: Hold(one.hold, Site(one.site), one.max_hold_ns) for one in reply.held.held
            }
            self._changed()
        elif kind == "lookups":
            self.lookups = tuple(reply.lookups.globs)
            self._changed()
        elif kind == "copies":
            self.copies = tuple(reply.copies.globs)
            self._changed()
        elif kind in ("pause", "resume"):
            self.paused = kind == "pause"
            self._news.set()
        else:
            order = self._order(reply)
            if order is not None:
                self._orders.append(order)
                self._news.set()

    def _order(self, reply: pb.FeedReply) -> Order | None:
        kind = reply.WhichOneof("item")
        if kind == "wake":
            self.computed_tokens[reply.wake.request] = reply.wake.computed_tokens
            return ins.WakeRequest(self.source, reply.wake.request)
        if kind == "release":
            return ins.ReleaseDeviceBlocks(self.source, reply.release.request, reply.release.ids)
        if kind == "pin":
            return ins.PinDeviceBlocks(self.source, reply.pin.ids)
        if kind == "clear":
            return ins.ClearDevicePool(self.source, reply.clear.keep)
        if kind == "start":
            order = reply.start
            return ins.StartTransfer(
                order.operation, order.epoch, Route(order.route), order.sources, order.targets, order.blocks,
                order.batch, order.ranks, order.source_pool, order.target_pool, order.hashes,
            )
        if kind == "zero":
            return ins.ZeroBlocks(reply.zero.pool)
        return ins.CancelTransfer(reply.cancel.operation) if kind == "cancel" else None

    def _end(self, why: KvbmConsoleError) -> None:
        if self._ended is None:
            self._ended = why
        for future in [*self._answers, self._opened]:
            if not future.done():
                future.set_exception(self._ended)
                future.exception()  # marks the error as seen, because the waiter may be gone
        self._answers.clear()
        self._news.set()
        self._changed()

    def _changed(self) -> None:
        self._holds_changed.set()
        self._holds_changed = asyncio.Event()

    @property
    def alive(self) -> bool:
        """True if calls can be made."""
        return self._ended is None

    async def changed(self) -> None:
        """Wait until the held requests or the globs of lookups change, or the feed ends."""
        if self._ended is None:
            await self._holds_changed.wait()


# --- for engines that await ---


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
                pass  # the request is not known yet, so it cannot be held
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
        """Wait until this site no longer holds the request, the daemon is gone, or the hold's own limit is over."""
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
