"""A live target as a feed and as controls, across lost connections.

The feed reads in a task of its own, so that a console that draws does not delay the reading; between the two is a small
bounded queue. When the console does not keep up, the reading stops, and what then falls out of the daemon's ring is a
gap like any other. A receiver that cannot afford to fold every event asks for the facts instead (``refresh``).

Law of this file: after a reconnect the receiver's state is exact again: by the missed events themselves, or by a gap
and a snapshot.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from kvbm_console.client.access import Access
from kvbm_console.client.connection import Client
from kvbm_console.client.control import MAX_FREEZE_NS, ControlSession
from kvbm_console.client.subscription import Ended, Subscription
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError
from kvbm_console.core.events import Event
from kvbm_console.core.ids import ResetMode, Site, SlotState
from kvbm_console.core.instructions import BreakpointVerdict, DrainAnswer, ResetAnswer
from kvbm_console.stream.feed import (
    Connected,
    Disconnected,
    EventsArrived,
    FeedItem,
    Heartbeat,
    PastSeen,
    SnapshotTaken,
)
from kvbm_console.wire.batches import MSGPACK

BACK_OFF_S_MIN: Final = 0.1
BACK_OFF_S_MAX: Final = 5.0
"""A daemon that comes back is found within five seconds; one that does not costs a try in that time."""
JITTER: Final = 0.25
"""Share by which each wait varies, so that fifty consoles do not come back in one instant."""
QUEUE_ITEMS_MAX: Final = 64
"""Batches between reading and drawing: some tens of thousands of events at most."""

NO_SLOT: Final = "tokens.computed < 0"
"""Leaves every slot out of a status document of which none is wanted."""


class LiveFeed:
    """A ``stream.feed.Feed`` on a live target. One iteration at a time; a new one begins with a snapshot.

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
        """Whether batches come undecoded, as ``BatchArrived``; may be changed at any time."""
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
                queue.put_nowait(None)  # who waits for an item learns that none will come

        reader.add_done_callback(ended)
        try:
            while not (reader.done() and queue.empty()):
                item = await queue.get()
                if item is not None:
                    yield item
            reader.result()  # it ends only by an error of ours
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
        """One connection, to its end; returns why it ended."""
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
        """Read a stream until it ends, and say why, or until another one takes its place at the same event."""
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
        """A new subscription whose snapshot stands exactly where the old one was left."""
        fresh = client.subscribe(incarnation=self._incarnation, encoding=self._encoding)
        try:
            taken = await anext(fresh)
            if not isinstance(taken, SnapshotTaken):
                raise ConnectionLost(f"{self.target} answered a subscription without a snapshot")
            state = taken.state
            while (stream.position or 0) < state.seq:  # what was published before the snapshot
                item = await anext(stream)
                if isinstance(item, Ended):
                    fresh.cancel()
                    return item.reason
                await queue.put(item)
            rest: list[Event] = []
            while state.seq < (stream.position or 0):  # the daemon may send one that it has made a little earlier
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

    After a lost connection the session is the same owner's again, and the daemon arms what was disabled because the
    lease was lost. A daemon that began again is told the breakpoints anew. What somebody has muted or removed
    meanwhile stays so in either case.

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
        """The breakpoints that were set here, by id."""

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
        """What was set before the connection was lost: the same daemon knows it, another one is told."""
        if same:
            found = (await client.status())["breakpoints"]
            self.saw({int(entry["id"]): bool(entry["enabled"]) for entry in found})
        elif self._mine:
            old = list(self._mine.values())
            alone = [
                msgspec.structs.replace(spec, id=0, depends_on=0, enabled=spec.enabled and not spec.depends_on)
                for spec in old
            ]
            verdicts = await session.replace_breakpoints(alone)
            numbers = {spec.id: verdict.id for spec, verdict in zip(old, verdicts, strict=True)}
            self._mine = {
                numbers[spec.id]: msgspec.structs.replace(
                    spec, id=numbers[spec.id], depends_on=numbers.get(spec.depends_on, 0)
                )
                for spec in old
            }
            if any(spec.depends_on for spec in old):
                await session.replace_breakpoints(list(self._mine.values()))

    def saw(self, enabled: Mapping[int, bool]) -> None:
        """The breakpoints of the target as they were last, by id: what others muted or removed is not armed anew."""
        self._mine = {
            number: msgspec.structs.replace(spec, enabled=enabled[number])
            for number, spec in self._mine.items() if number in enabled
        }

    async def aclose(self) -> None:
        """End the session; what it holds goes on."""
        async with self._opening:
            await self._close()

    async def _close(self) -> None:
        session, client = self._session, self._client
        self._session = self._client = None
        if session is not None:
            await session.close()
        if client is not None:
            await client.close()

    async def add_breakpoint(self, spec: BreakpointSpec) -> BreakpointVerdict:
        """Set one more breakpoint of this session."""
        verdict = await (await self._live()).add_breakpoint(spec)
        self._mine[verdict.id] = msgspec.structs.replace(spec, id=verdict.id)
        return verdict

    async def remove_breakpoint(self, breakpoint_id: int) -> None:
        """Remove one breakpoint, whoever owns it."""
        await (await self._live()).remove_breakpoint(breakpoint_id)
        self._mine.pop(breakpoint_id, None)

    async def enable_breakpoint(self, breakpoint_id: int, enabled: bool) -> None:
        """Arm or mute one breakpoint, whoever owns it."""
        await (await self._live()).enable_breakpoint(breakpoint_id, enabled)
        if breakpoint_id in self._mine:
            self._mine[breakpoint_id] = msgspec.structs.replace(self._mine[breakpoint_id], enabled=enabled)

    async def continue_hold(
        self, hold: int | None, until: SlotState | None = None, until_site: Site | None = None
    ) -> str:
        """Release one hold, or all when None."""
        return await (await self._live()).continue_hold(hold, until, until_site)

    async def step(self, hold: int) -> str:
        """Release the hold and stop the same slot at its next site."""
        return await (await self._live()).step(hold)

    async def step_pipeline(self) -> str:
        """Let one candidate through its evaluation, while the pipeline is closed."""
        return await (await self._live()).step_pipeline()

    async def skip(self, hold: int) -> str:
        """Resolve the held slot's candidates to no work, and release the hold."""
        return await (await self._live()).skip(hold)

    async def freeze(self, max_hold_ns: int = MAX_FREEZE_NS) -> str:
        """Close the pipeline and pause the engines, for this long at most."""
        return await (await self._live()).freeze(max_hold_ns)

    async def thaw(self) -> str:
        """End a freeze."""
        return await (await self._live()).thaw()

    async def run_for(self, duration_ns: int, max_hold_ns: int = MAX_FREEZE_NS) -> str:
        """Go on for this much engine time, then freeze again."""
        return await (await self._live()).run_for(duration_ns, max_hold_ns)

    async def reset(self, mode: ResetMode = ResetMode.LOGICAL) -> ResetAnswer:
        """Forget everything in all tiers at once."""
        return await (await self._live()).reset(mode)

    async def drain(self, deadline_ns: int) -> DrainAnswer:
        """Take no new request until all that is in flight has ended or the time is over; then reset."""
        return await (await self._live()).drain(deadline_ns)

    async def disarm(self) -> None:
        """Mute every breakpoint and release every hold."""
        await (await self._live()).disarm()
        self._mine = {number: msgspec.structs.replace(spec, enabled=False) for number, spec in self._mine.items()}

    async def retry_now(self) -> None:
        """Reconnect at once instead of waiting for the back-off."""
        if self._feed is not None:
            self._feed.retry_now()
