"""A live target as a feed and as controls, across lost connections.

The feed reads in a task of its own, so drawing does not delay reading. Between the two is a small bounded queue. When
the console does not keep up, the reading stops, and events that fall out of the daemon's ring are a gap. A receiver
that cannot afford to fold every event asks for the facts instead (``refresh``).

Law of this file: after a reconnect the receiver's state is exact again, by the missed events or by a gap and a
snapshot.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from kvbm_console.client.access import Access
from kvbm_console.client.connection import Client
from kvbm_console.client.control import ControlSession
from kvbm_console.client.subscription import Ended, Subscription
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError
from kvbm_console.core.events import Event
from kvbm_console.stream.feed import (
    Connected,
    Disconnected,
    EventsArrived,
    FeedItem,
    GapSeen,
    Heartbeat,
    PastSeen,
    SnapshotTaken,
)
from kvbm_console.stream.verbs import (
    A,
    Disarm,
    EnableBreakpoint,
    RemoveBreakpoint,
    ReplaceBreakpoints,
    SetBreakpoint,
    Verb,
)
from kvbm_console.wire.batches import MSGPACK

BACK_OFF_S_MIN: Final = 0.1
BACK_OFF_S_MAX: Final = 5.0
"""A daemon that comes back is found within five seconds; a daemon that does not costs a try in that time."""
JITTER: Final = 0.25
"""Share by which each wait varies, so that fifty consoles do not come back in one instant."""
QUEUE_ITEMS_MAX: Final = 64
"""Batches between reading and drawing: some tens of thousands of events at most."""

NO_SLOT: Final = "tokens.computed < 0"
"""Leaves every slot out of a status document of which none is wanted."""


class LiveFeed:
    """A ``stream.feed.Feed`` on a live target. One iteration at a time; a new iteration begins with a snapshot.

    ``rng`` only spreads the waits between tries. With ``past`` the first snapshot of a target comes behind that many
    events before it, as far as the daemon still has them.
    """

    def __init__(
        self, target: str, *, name: str = "console", encoding: int = MSGPACK, rng: random.Random | None = None,
        access: Access | None = None, past: int = 0,
    ) -> None:
        self.target = target
        self._access = access
        self.name = name
        self._past = past
        self._past_due = False
        self._encoding = encoding
        self._rng = rng or random.Random()
        self._retry = asyncio.Event()
        self._incarnation = ""
        self._position: int | None = None
        self._failures = 0
        self._refresh = False
        self.unread = False
        """True if batches come undecoded, as ``BatchArrived``; may be changed at any time."""
        self._connection: Client | None = None

    async def accounts(self) -> dict[str, Any]:
        """``engines``, ``publishers`` and ``recorder`` of the status document, over the connection of the feed."""
        client = self._connection
        if client is None:
            raise ConnectionLost(f"{self.target} is not connected")
        status = await client.status(NO_SLOT)
        return {key: status.get(key) or [] for key in ("engines", "publishers", "recorder")}

    async def between(self, first: int, last: int) -> tuple[list[Event], int]:
        """Past events from ``first`` up to ``last``, as far as the daemon has them, and the number of its oldest."""
        client = self._connection
        if client is None:
            raise ConnectionLost(f"{self.target} is not connected")
        events, oldest = await client.history(first, limit=max(1, last - first))
        return [event for event in events if event.seq < last], oldest

    async def remembered(self, until: int) -> AsyncIterator[FeedItem]:
        """The oldest facts that the daemon has, and all events behind them up to event ``until``."""
        client = self._connection
        if client is None:
            raise ConnectionLost(f"{self.target} is not connected")
        async with client.subscribe(history=True, encoding=self._encoding) as stream:
            async for item in stream:
                if isinstance(item, Ended):
                    raise ConnectionLost(f"{self.target} ended the stream: {item.reason}")
                if isinstance(item, EventsArrived):
                    known = [event for event in item.events if event.seq < until]
                    if known:
                        yield EventsArrived(known)
                elif isinstance(item, SnapshotTaken | GapSeen):
                    yield item
                if stream.position is not None and stream.position >= until:
                    return
        raise ConnectionLost(f"{self.target} ended the stream")

    def refresh(self) -> None:
        """Yield a snapshot soon, in its place among the events: none is left out and none comes twice."""
        self._refresh = True

    def retry_now(self) -> None:
        """Do not wait any longer before the next try."""
        self._retry.set()

    async def items(self) -> AsyncIterator[FeedItem]:
        """Items until the iterator is closed; connects again whenever the connection is lost."""
        queue: asyncio.Queue[FeedItem | None] = asyncio.Queue(QUEUE_ITEMS_MAX)
        self._position = None
        self._failures = 0
        reader = asyncio.create_task(self._run(queue), name="kvbm-feed")

        def ended(_: object) -> None:
            if queue.empty():
                queue.put_nowait(None)  # wakes the consumer, because no item will come

        reader.add_done_callback(ended)
        try:
            while not (reader.done() and queue.empty()):
                item = await queue.get()
                if item is not None:
                    yield item
            reader.result()  # the task ends only by an error of ours
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _run(self, queue: "asyncio.Queue[FeedItem | None]") -> None:
        while True:
            try:
                reason = await self._follow(queue)
            except KvbmConsoleError as error:
                reason = str(error)
            self._connection = None
            wait_s = self._back_off_s()
            await queue.put(Disconnected(reason, wait_s))
            self._retry.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._retry.wait()
            except TimeoutError:
                pass

    async def _follow(self, queue: "asyncio.Queue[FeedItem | None]") -> str:
        """Follow a connection to its end; returns the reason."""
        async with Client(self.target, name=self.name, access=self._access) as client:
            hello = await client.hello()
            self._connection = client
            await queue.put(Connected(
                target=hello.target, incarnation=hello.incarnation, run=hello.run, control=hello.control,
                block_bytes=hello.block_bytes, config=hello.leader_config, clock_anchor_ns=hello.clock_anchor_ns,
            ))
            resumes = self._position is not None and hello.incarnation == self._incarnation
            self._incarnation = hello.incarnation
            self._past_due = not resumes and self._past > 0
            stream = client.subscribe(
                after_seq=self._position - 1 if self._position is not None and resumes else None,
                incarnation=hello.incarnation, encoding=self._encoding,
            )
            self._refresh = False
            while True:
                async with stream:
                    following = await self._pump(client, stream, queue)
                if isinstance(following, str):
                    return following
                stream = following

    async def _pump(
        self, client: Client, stream: Subscription, queue: "asyncio.Queue[FeedItem | None]"
    ) -> Subscription | str:
        """Read a stream until another stream takes its place at the same event, or to its end; returns the reason."""
        async for item in stream:
            self._failures = 0
            if isinstance(item, Ended):
                return item.reason
            if self._past_due and isinstance(item, SnapshotTaken):
                self._past_due = False
                events = await client.past(item.state.seq, self._past)
                if events:
                    await queue.put(PastSeen(events, item.state))
            await queue.put(item)
            stream.unread = self.unread
            self._position = stream.position
            if self._refresh and self._position is not None:
                self._refresh = False
                return await self._renew(client, stream, queue)
        raise ConnectionLost(f"{self.target} ended the stream")

    async def _renew(
        self, client: Client, stream: Subscription, queue: "asyncio.Queue[FeedItem | None]"
    ) -> Subscription | str:
        """A new subscription whose snapshot stands exactly where the old subscription was left."""
        fresh = client.subscribe(incarnation=self._incarnation, encoding=self._encoding)
        try:
            taken = await anext(fresh)
            if not isinstance(taken, SnapshotTaken):
                raise ConnectionLost(f"{self.target} answered a subscription without a snapshot")
            state = taken.state
            while (stream.position or 0) < state.seq:  # events published before the snapshot
                item = await anext(stream)
                if isinstance(item, Ended):
                    fresh.cancel()
                    return item.reason
                await queue.put(item)
            rest: list[Event] = []
            while state.seq < (stream.position or 0):  # the daemon may send a snapshot that is a little older
                item = await anext(fresh)
                if isinstance(item, EventsArrived):
                    known = (stream.position or 0) - item.events[0].seq
                    for event in item.events[:known]:
                        state.apply(event)
                    rest = item.events[known:]
                elif not isinstance(item, Heartbeat):
                    raise ConnectionLost(f"{self.target} lost events right behind a snapshot")
        except StopAsyncIteration:
            fresh.cancel()
            raise ConnectionLost(f"{self.target} ended the stream") from None
        except BaseException:
            fresh.cancel()
            raise
        await queue.put(taken)
        if rest:
            await queue.put(EventsArrived(rest))
        self._position = fresh.position
        return fresh

    def _back_off_s(self) -> float:
        wait_s = min(BACK_OFF_S_MAX, BACK_OFF_S_MIN * 2.0**min(self._failures, 16))
        self._failures += 1
        return wait_s * (1 + JITTER * (2 * self._rng.random() - 1))


class LiveControls:
    """``stream.feed.Controls`` on a live target: a session with a lease, opened at first use and again when lost.

    After a lost connection the session has the same owner again, and the daemon arms the breakpoints that the lost
    lease had disabled. A daemon that began again is told the breakpoints anew. A breakpoint that another session has
    muted or removed meanwhile stays so in either case.

    ``feed`` is told by ``retry_now``. Close it with ``aclose``, or leave it to the daemon to see that it is gone.
    """

    def __init__(
        self, target: str, *, name: str = "console", feed: LiveFeed | None = None, access: Access | None = None
    ) -> None:
        self.target = target
        self._access = access
        self.name = name
        self._feed = feed
        self._client: Client | None = None
        self._session: ControlSession | None = None
        self._opening = asyncio.Lock()
        self._owner = ""
        self._incarnation = ""
        self._mine: dict[int, BreakpointSpec] = {}
        """Breakpoints set by these controls, by id."""

    async def _live(self) -> ControlSession:
        async with self._opening:
            if self._session is None or not self._session.alive:
                await self._close()
                client = Client(self.target, name=self.name, access=self._access)
                try:
                    incarnation = (await client.hello()).incarnation
                    same = incarnation == self._incarnation
                    session = client.control(self.name, owner=self._owner if same else "")
                    await session.open()
                    same = same and session.owner == self._owner
                    self._incarnation, self._owner = incarnation, session.owner
                    await self._say_again(client, session, same)
                except BaseException:
                    await client.close()
                    raise
                self._client, self._session = client, session
            return self._session

    async def _say_again(self, client: Client, session: ControlSession, same: bool) -> None:
        """Restore the breakpoints that were set before the connection was lost, unless the same daemon still
        has them."""
        if same:
            found = (await client.status())["breakpoints"]
            self.saw({int(entry["id"]): bool(entry["enabled"]) for entry in found})
        elif self._mine:
            old = list(self._mine.values())
            alone = [
                msgspec.structs.replace(spec, id=0, depends_on=0, enabled=spec.enabled and not spec.depends_on)
                for spec in old
            ]
            verdicts = await session.ask(ReplaceBreakpoints(tuple(alone)))
            numbers = {spec.id: verdict.id for spec, verdict in zip(old, verdicts, strict=True)}
            self._mine = {
                numbers[spec.id]: msgspec.structs.replace(
                    spec, id=numbers[spec.id], depends_on=numbers.get(spec.depends_on, 0)
                )
                for spec in old
            }
            if any(spec.depends_on for spec in old):
                await session.ask(ReplaceBreakpoints(tuple(self._mine.values())))

    def saw(self, enabled: Mapping[int, bool]) -> None:
        """The target's breakpoints as they were last, by id. Breakpoints that others muted or removed are not
        armed anew."""
        self._mine = {
            number: msgspec.structs.replace(spec, enabled=enabled[number])
            for number, spec in self._mine.items() if number in enabled
        }

    async def aclose(self) -> None:
        """End the session; its held slots go on."""
        async with self._opening:
            await self._close()

    async def _close(self) -> None:
        session, client = self._session, self._client
        self._session = self._client = None
        if session is not None:
            await session.close()
        if client is not None:
            await client.close()

    async def ask(self, verb: Verb[A]) -> A:
        """Carry out a verb on the session, which is opened first when it is lost."""
        answer = await (await self._live()).ask(verb)
        self._remember(verb, answer)
        return answer

    def _remember(self, verb: Verb[Any], answer: Any) -> None:
        """Update our record of the session's breakpoints from a verb and its answer."""
        match verb:
            case SetBreakpoint():
                self._mine[answer.id] = msgspec.structs.replace(verb.spec, id=answer.id)
            case RemoveBreakpoint():
                self._mine = {
                    number: spec for number, spec in self._mine.items() if verb.breakpoint not in (None, number)
                }
            case EnableBreakpoint() if verb.breakpoint in self._mine:
                spec = self._mine[verb.breakpoint]
                self._mine[verb.breakpoint] = msgspec.structs.replace(spec, enabled=verb.enabled)
            case Disarm():
                self.saw(dict.fromkeys(self._mine, False))

    async def retry_now(self) -> None:
        """Reconnect at once instead of waiting for the back-off."""
        if self._feed is not None:
            self._feed.retry_now()
