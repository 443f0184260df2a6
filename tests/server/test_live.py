"""A live target across lost connections: the daemon that comes back, another one, the reader that sleeps."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from kvbm_console.client import LiveControls, LiveFeed
from kvbm_console.client.live import BACK_OFF_S_MAX, BACK_OFF_S_MIN, JITTER, QUEUE_ITEMS_MAX
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.core.ids import Note, SlotState
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.service import SNAPSHOT_REUSE_EVENTS
from kvbm_console.stream.feed import (
    BatchArrived,
    Connected,
    Disconnected,
    EventsArrived,
    FeedItem,
    Heartbeat,
    SnapshotTaken,
)
from kvbm_console.stream.ring import Ring
from kvbm_console.stream.verbs import ContinueHold, Disarm, EnableBreakpoint, RemoveBreakpoint, SetBreakpoint, StepSlot
from server.access import AccessRules
from server.daemon import Daemon
from server.guard import guarded
from server.questions import Questions
from tests.faults.chaos import chaos
from tests.server.daemons import Mirror, daemon_at, options_for, published, running, socket_directory


async def next_of(items: AsyncIterator[FeedItem], kind: type[FeedItem], mirror: Mirror) -> FeedItem:
    """The next item of a kind; what comes before it is folded."""
    async for item in items:
        mirror.take(item)
        if isinstance(item, kind):
            return item
    raise AssertionError("the feed ended")


async def caught_up(items: AsyncIterator[FeedItem], daemon: Daemon, mirror: Mirror) -> None:
    """Fold until the mirror has everything that was published."""
    daemon.service.broadcaster.flush()
    while mirror.state is None or mirror.state.seq < daemon.service.state.seq:
        mirror.take(await anext(items))
    assert mirror.digest == daemon.service.digest()[1]


def note(daemon: Daemon, count: int) -> None:
    """Publish some events."""
    for _ in range(count):
        daemon.service.submit(NoteReported, Note.CLOCK_STEPPED, "")


@pytest.mark.asyncio
async def test_the_first_items_are_connected_and_a_snapshot() -> None:
    async with daemon_at(None, target="here") as daemon:
        items = LiveFeed(daemon.address).items()
        first, second = await anext(items), await anext(items)
        assert isinstance(first, Connected)
        assert (first.target, first.control, first.recording) == ("here", True, False)
        assert first.config == daemon.service.config
        assert first.clock_anchor_ns == daemon.service.started_wall_ns - daemon.service.started_at_ns
        assert isinstance(second, SnapshotTaken)
        await items.aclose()
        await published_subscribers(daemon, 0)


async def published_subscribers(daemon: Daemon, count: int) -> None:
    """Until the daemon has this many subscribers; every publication and heartbeat looks again."""
    while len(daemon.service.broadcaster.subscribers) != count:
        note(daemon, 1)
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_daemon_that_comes_back_as_another_begins_anew() -> None:
    with socket_directory() as place:
        address = f"unix:{place}/d.sock"
        feed = LiveFeed(address, rng=random.Random(1))
        items, mirror = feed.items(), Mirror()
        gone = await anext(items)
        assert isinstance(gone, Disconnected)
        assert gone.reason == f"no daemon listens on {address}"
        assert gone.retry_in_s is not None
        incarnations = []
        for _ in range(2):
            async with running(options_for(None, address)) as daemon:
                feed.retry_now()
                found = await next_of(items, Connected, mirror)
                assert isinstance(found, Connected)
                incarnations.append(found.incarnation)
                mirror.state = None
                note(daemon, 50)
                await caught_up(items, daemon, mirror)
            ended = await next_of(items, Disconnected, mirror)
            assert isinstance(ended, Disconnected)
            assert ended.reason == "the daemon ended"
        assert len(set(incarnations)) == 2
        await items.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("ring_events", [64, 100_000])
async def test_after_a_lost_connection_the_state_is_exact_again(ring_events: int) -> None:
    async with daemon_at(None, ring=Ring(ring_events)) as daemon, chaos(daemon.address) as proxy:
        feed, mirror = LiveFeed(proxy.address), Mirror()
        items = feed.items()
        note(daemon, 40)
        await caught_up(items, daemon, mirror)
        snapshots = mirror.snapshots
        for _ in range(3):
            proxy.reset()
            await next_of(items, Disconnected, mirror)
            note(daemon, 500)
            feed.retry_now()
            await next_of(items, Connected, mirror)
            await caught_up(items, daemon, mirror)
        if ring_events == 64:
            assert [gap.reason for gap in mirror.gaps] == ["not_kept"] * 3
            assert mirror.snapshots == snapshots + 3
        else:
            assert (mirror.gaps, mirror.snapshots) == ([], snapshots)  # what was missed came as itself
        await items.aclose()


@pytest.mark.asyncio
async def test_a_reader_that_sleeps_is_told_what_it_missed() -> None:
    async with daemon_at(None, ring=Ring(64)) as daemon:
        feed, mirror = LiveFeed(daemon.address), Mirror()
        items = feed.items()
        await next_of(items, SnapshotTaken, mirror)
        for _ in range(QUEUE_ITEMS_MAX * 40):
            note(daemon, 100)
            await asyncio.sleep(0)
        await caught_up(items, daemon, mirror)
        assert sum(gap.count for gap in mirror.gaps) > 0
        await items.aclose()


@pytest.mark.asyncio
async def test_heartbeats_come_without_events() -> None:
    async with daemon_at(None) as daemon:
        items, mirror = LiveFeed(daemon.address).items(), Mirror()
        beat = await next_of(items, Heartbeat, mirror)
        assert isinstance(beat, Heartbeat)
        assert (beat.head_seq, beat.recorder, beat.subscribers) == (daemon.service.state.seq - 1, None, 1)
        await items.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("unread", [False, True])
async def test_the_facts_can_be_had_again_in_their_place_among_the_events(unread: bool) -> None:
    async with daemon_at(None) as daemon:
        feed, batches = LiveFeed(daemon.address), 0
        feed.unread = unread
        items = feed.items()
        mirror, following, taken = Mirror(), None, 0
        while taken < 8:
            note(daemon, 37)  # so few that the daemon sends a snapshot that it has made before, and so many that not
            if taken % 4 == 3:
                note(daemon, 5_000)
            item = await anext(items)
            if isinstance(item, BatchArrived):
                assert item.batch.first_seq == following
                item, batches = EventsArrived(item.batch.read()), batches + 1
            if isinstance(item, SnapshotTaken):
                assert following in (None, item.state.seq)  # neither a hole nor an event twice
                following = item.state.seq
                taken += 1
            elif isinstance(item, EventsArrived):
                assert item.events[0].seq == following
                following = item.events[-1].seq + 1
                feed.refresh()
            mirror.take(item)
        assert (batches > 0) == unread
        feed.unread = False
        await caught_up(items, daemon, mirror)
        assert mirror.gaps == []
        await items.aclose()


@pytest.mark.asyncio
async def test_a_reader_that_comes_costs_the_leader_its_facts_and_not_its_memory(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of policies for evicted blocks takes seconds to write down on a large machine."""
    async with daemon_at(None) as daemon:
        exported: list[int] = []
        leader, export = daemon.service.leader, daemon.service.leader.export
        monkeypatch.setattr(leader, "export", lambda: exported.append(1) or export())
        for _ in range(3):
            note(daemon, 2 * SNAPSHOT_REUSE_EVENTS)
            items, mirror = LiveFeed(daemon.address).items(), Mirror()
            await next_of(items, SnapshotTaken, mirror)
            await caught_up(items, daemon, mirror)
            await items.aclose()
        assert exported == []


def test_waits_grow_to_a_cap_and_vary() -> None:
    feed = LiveFeed("unix:/nowhere", rng=random.Random(7))
    waits = [feed._back_off_s() for _ in range(40)]
    assert BACK_OFF_S_MIN * (1 - JITTER) <= waits[0] <= BACK_OFF_S_MIN * (1 + JITTER)
    assert all(wait <= BACK_OFF_S_MAX * (1 + JITTER) for wait in waits)
    assert min(waits[20:]) >= BACK_OFF_S_MAX * (1 - JITTER)
    assert len({round(wait, 6) for wait in waits[20:]}) > 10


@pytest.mark.asyncio
async def test_controls_open_a_session_at_first_use_and_again_when_it_was_lost() -> None:
    with socket_directory() as place:
        address = f"unix:{place}/d.sock"
        controls = LiveControls(address, name="me")
        with pytest.raises(ConnectionLost, match="no daemon listens"):
            await controls.ask(Disarm())
        async with running(options_for(None, address)) as daemon:
            verdict = await controls.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING)))
            assert (verdict.id, verdict.verified) == (1, True)
            assert daemon.service.leases.owners == {"me-1"}
            assert await controls.ask(ContinueHold(None)) == "continued 0"
            with pytest.raises(Refused, match="no hold 3"):
                await controls.ask(StepSlot(3))
            await controls.ask(EnableBreakpoint(1, False))
            await controls.ask(RemoveBreakpoint(1))
        async with running(options_for(None, address)) as daemon:
            while True:  # the old session is lost; how soon that is known is the transport's affair
                try:
                    await controls.ask(Disarm())
                    break
                except ConnectionLost:
                    pass
            assert daemon.service.leases.owners == {"me-1"}
            await controls.aclose()
            await published(daemon, lambda: not daemon.service.leases.owners)


@pytest.mark.asyncio
async def test_who_leaves_while_he_is_told_something_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A write to him fails, which gRPC knows to be no mistake of the method's; the log has nothing of it."""
    class Caller:
        def peer(self) -> str:
            return "unix:"

        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
            raise AssertionError(f"nobody is there to be told: {sentence}")

    async def follow(request: bytes, context: object, turn: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    with pytest.raises(grpc.aio.InternalError):
        await guarded("Subscribe", follow, AccessRules(), Questions())(b"", Caller())  # type: ignore[arg-type]
    assert not caplog.records
