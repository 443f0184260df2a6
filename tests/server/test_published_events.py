"""The event stream at a real NATS broker that is killed, frozen and restarted empty.

Law of this file: what a reader got and what it was told as lost are all that was published, and its facts are exact.
"""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.client import broker as brokers
from kvbm_console.client.broker import EVENTS, Broker, BrokerAddress, broker_address, keep_events
from kvbm_console.client.event_stream import PublishedEvents
from kvbm_console.client.published_feed import PublishedFeed
from kvbm_console.core.errors import ConnectionLost, Refused, UsageError
from kvbm_console.core.snapshots import digest
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import Connected, Disconnected, EventsArrived, Heartbeat, PastSeen, SnapshotTaken
from kvbm_console.stream.ring import Ring
from kvbm_console.wire.frames import varint
from kvbm_console.wire.v1 import console_pb2 as pb
from server import event_publisher
from server.daemon import Daemon
from tests.server.brokers import NatsServer, Partition, nats_server
from tests.server.daemons import Mirror, daemon_at, finished, published

LOAD = "multiturn:requests={},sessions=6,system=64,turns=3"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, small messages, and a snapshot every few hundred events."""
    monkeypatch.setattr(event_publisher, "RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(event_publisher, "GATHER_S", 0.005)
    monkeypatch.setattr(event_publisher, "MESSAGE_BYTES", 4_096)
    monkeypatch.setattr(event_publisher, "KEYFRAME_EVENTS", 900)
    monkeypatch.setattr(event_publisher, "FINISH_S", 10.0)
    monkeypatch.setattr(brokers, "ANSWER_S", 0.3)
    monkeypatch.setattr(brokers, "CLOSE_S", 0.1)


def at(server: NatsServer) -> BrokerAddress:
    return broker_address(f"nats://{server.address}", "fleet")


def events_of(daemon: Daemon) -> event_publisher.EventPublisher:
    assert daemon.events is not None
    return daemon.events


async def read(address: BrokerAddress, start: int | None = None, name: str = "one") -> tuple[PublishedEvents, Mirror]:
    """Read to the present end of the stream."""
    mirror = Mirror()
    async with Broker(address, "test") as broker:
        events = PublishedEvents(broker, name, start)
        async for item in events.items():
            mirror.take(item)
    return events, mirror


@contextlib.asynccontextmanager
async def frozen_under(server: NatsServer, requests: int, **changes: Any) -> AsyncIterator[Daemon]:
    """A daemon that has begun to publish, and whose broker stands still."""
    async with daemon_at(
        LOAD.format(requests), target="one", fleet=at(server), fleet_events=True, speed=None, **changes
    ) as daemon:
        await published(daemon, lambda: daemon.service.state.seq > 100)
        server.send(signal.SIGSTOP)
        yield daemon


def is_exact(daemon: Daemon, events: PublishedEvents, mirror: Mirror) -> None:
    """The reader has, or was told as lost, every event, and has the daemon's facts."""
    state = daemon.service.state
    assert events.ended is not None
    assert events.ended.last_seq == state.seq - 1
    assert events.received + events.lost == state.seq - (events.start or 0)
    assert mirror.digest == digest(state)


@pytest.mark.asyncio
@pytest.mark.fault
@pytest.mark.parametrize(("kills", "requests"), [(3, 60), pytest.param(20, 400, marks=pytest.mark.slow)])
async def test_events_are_exact_through_a_broker_that_is_killed(tmp_path: Path, kills: int, requests: int) -> None:
    chance = random.Random(7)
    with nats_server(tmp_path) as server:
        address = at(server)
        async with daemon_at(LOAD.format(requests), target="one", fleet=address, fleet_events=True,
                             speed=20.0) as daemon:
            for _ in range(kills):
                seq = daemon.service.state.seq
                await published(daemon, lambda seq=seq: daemon.service.state.seq > seq)  # type: ignore[misc]
                await asyncio.sleep(chance.uniform(0, 0.2))
                server.kill()
                await asyncio.sleep(chance.uniform(0, 0.1))
                server.start()
            await published(daemon, lambda: finished(daemon) == requests)
        events, mirror = await read(address)
        is_exact(daemon, events, mirror)
        assert (events.start, events.lost) == (0, 0), "the ring held all that the broker missed"
        keyframe = events_of(daemon).keyframe
        assert keyframe is not None
        later, facts = await read(address, keyframe)
        is_exact(daemon, later, facts)
        assert later.received < events.received, "who comes in the middle reads less"


@pytest.mark.asyncio
@pytest.mark.fault
@pytest.mark.parametrize(
    ("daemons", "kills", "requests"), [(2, 3, 20), pytest.param(16, 20, 60, marks=pytest.mark.slow)]
)
async def test_the_events_of_each_of_many_daemons_are_exact(
    tmp_path: Path, daemons: int, kills: int, requests: int
) -> None:
    chance = random.Random(9)
    with nats_server(tmp_path) as server:
        address = at(server)
        async with contextlib.AsyncExitStack() as stack:
            many = [
                await stack.enter_async_context(daemon_at(
                    LOAD.format(requests), target=f"prod-{number}", fleet=address, fleet_events=True, speed=4.0
                )) for number in range(daemons)
            ]
            for _ in range(kills):
                await asyncio.sleep(chance.uniform(0, 0.3))
                server.kill()
                await asyncio.sleep(chance.uniform(0, 0.1))
                server.start()
            for daemon in many:
                await published(daemon, lambda daemon=daemon: finished(daemon) == requests)  # type: ignore[misc]
        for number, daemon in enumerate(many):
            events, mirror = await read(address, name=f"prod-{number}")
            is_exact(daemon, events, mirror)
            assert events.lost == 0


@pytest.mark.asyncio
@pytest.mark.fault
async def test_what_a_partition_kept_back_comes_late_and_changes_nothing(tmp_path: Path) -> None:
    """Messages of the connection that was given up arrive beside those of the new one."""
    with nats_server(tmp_path) as server:
        async with Partition(server) as between:
            cut = broker_address(f"nats://{between.address}", "fleet")
            async with daemon_at(LOAD.format(400), target="one", fleet=cut, fleet_events=True, speed=20.0) as daemon:
                mine = events_of(daemon)
                await published(daemon, lambda: daemon.service.state.seq > 200)
                while not mine.resent:
                    between.whole.clear()
                    while not mine._trouble:  # noqa: ASYNC110  nothing tells
                        await asyncio.sleep(0.01)
                    between.whole.set()
                    while mine._trouble:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
        events, mirror = await read(at(server))
        is_exact(daemon, events, mirror)
        assert events.lost == 0


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_frozen_broker_costs_stated_events_and_the_daemon_nothing(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        async with frozen_under(server, 60, ring=Ring(events_max=512)) as daemon:
            await published(daemon, lambda: finished(daemon) == 60)
            server.send(signal.SIGCONT)
        events, mirror = await read(at(server))
        is_exact(daemon, events, mirror)
        assert events.lost > 0
        assert mirror.gaps


@pytest.mark.asyncio
@pytest.mark.fault
async def test_with_a_recorder_a_frozen_broker_costs_no_event(tmp_path: Path) -> None:
    """The ring forgets ten times what it holds, and the recorder's files have it."""
    with nats_server(tmp_path / "broker") as server:
        async with frozen_under(server, 120, ring=Ring(events_max=512), record=tmp_path / "run") as daemon:
            await published(daemon, lambda: finished(daemon) == 120)
            assert daemon.service.ring.forgotten > 5_000
            server.send(signal.SIGCONT)
        events, mirror = await read(at(server))
        is_exact(daemon, events, mirror)
        assert events.lost == 0
        assert not mirror.gaps


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_broker_that_comes_back_while_the_daemon_ends_gets_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nats_server(tmp_path) as server:
        async with frozen_under(server, 60) as daemon:
            await published(daemon, lambda: not daemon.service.parts.is_healthy(event_publisher.PART))
            close = daemon.service.broadcaster.close

            def closed() -> None:
                """The last flush: what is told behind it reaches nobody where the loop has much to do."""
                close()
                monkeypatch.setattr(daemon.service.broadcaster, "flush", lambda: None)
                server.send(signal.SIGCONT)

            monkeypatch.setattr(daemon.service.broadcaster, "close", closed)
        events, mirror = await read(at(server))
        is_exact(daemon, events, mirror)


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_broker_that_forgot_everything_gets_a_snapshot(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        address = at(server)
        async with daemon_at(LOAD.format(60), target="one", fleet=address, fleet_events=True, speed=20.0) as daemon:
            while events_of(daemon).keyframe is None:
                await daemon.service.changed.wait()
            server.kill()
            server.start("empty")
            await published(daemon, lambda: finished(daemon) == 60)
        events, mirror = await read(address)
        is_exact(daemon, events, mirror)
        assert (events.start or 0) > 0


@pytest.mark.asyncio
async def test_a_run_is_never_joined_to_another_and_becomes_a_recording(tmp_path: Path) -> None:
    with nats_server(tmp_path / "broker") as server:
        address = at(server)
        runs = []
        for requests in (20, 10):
            async with daemon_at(LOAD.format(requests), target="one", fleet=address, fleet_events=True,
                                 speed=None) as daemon:
                await published(daemon, lambda: finished(daemon) == requests)  # noqa: B023
            runs.append(daemon)
        async with Broker(address, "test") as raw:  # what the window of duplicates let through is dropped by number
            message = await raw.jetstream.get_last_msg(EVENTS, address.subject("one", "ev"))
            await raw.jetstream.publish(address.subject("one", "ev"), message.data)
        events, mirror = await read(address)
        is_exact(runs[1], events, mirror)
        assert events.incarnation == runs[1].service.incarnation
        out = tmp_path / "gone.mcap"

        def dump(daemon: str) -> Any:
            target = f"nats://{server.address}?daemon={daemon}"
            return CliRunner().invoke(cli, ["rec", "dump", str(out), "--last", "24h", "--target", target])

        done = await asyncio.to_thread(dump, "one")
        assert done.exit_code == 0, done.output
        recording = Recording.open(out)
        assert recording.incarnation == events.incarnation
        assert digest(recording.state_at(recording.last_seq)) == digest(runs[1].service.state)
        out.unlink()
        done = await asyncio.to_thread(dump, "two")
        assert (done.exit_code, len(done.stderr.splitlines())) == (3, 1), done.output
        assert "has no events of a daemon two" in done.stderr


@pytest.mark.asyncio
async def test_a_broker_without_room_is_one_sentence(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        server.kill()
        server.room = "1GB"
        server.start("small")
        async with Broker(at(server), "test") as broker:
            with pytest.raises(Refused, match=r"refuses to make the stream KVBM_EV \(insufficient storage"):
                await keep_events(broker)


def message(*replies: pb.SubscribeReply) -> bytes:
    parts = [reply.SerializeToString() for reply in replies]
    return b"".join(piece for part in parts for piece in (varint(len(part)), part))


BEGIN = pb.SubscribeReply(snapshot_begin=pb.SnapshotBegin(total_bytes=4, incarnation="i"))
PART, END = pb.SubscribeReply(snapshot_part=pb.SnapshotPart(data=b"junk")), pb.SubscribeReply(
    snapshot_end=pb.SnapshotEnd())


@pytest.mark.parametrize(("data", "sentence"), [
    (bytes(range(256)), "one at .* published a message that is not ours"),
    (b"\xff" * 900_000, "one at .* published a message that is not ours"),
    (bytes(900_000), "one at .* published a message that is not ours"),
    (message(BEGIN, PART, END)[:-1], "one at .* published a message that is not ours"),
    (message(BEGIN, PART, END), "one at .* sent a snapshot that cannot be read"),
    (message(BEGIN, pb.SubscribeReply(batch=pb.EventBatch(count=3, payload=b"junk"))),
     "one at .* sent events that cannot be read"),
], ids=["random", "a length without end", "no length", "cut", "snapshot", "events"])
def test_a_message_of_a_stranger_is_one_sentence(data: bytes, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def messages(self: PublishedEvents, follow: bool) -> AsyncIterator[tuple[bytes, int]]:
        yield data, 1

    async def read_it() -> None:
        events = PublishedEvents(Broker(broker_address("nats://127.0.0.1", "test"), "test"), "one")
        async for _ in events.items():
            pass

    monkeypatch.setattr(PublishedEvents, "_messages", messages)
    with pytest.raises(ConnectionLost, match=sentence):
        asyncio.run(read_it())


def test_the_flag_and_the_address_of_a_daemon_have_one_sentence_each() -> None:
    with pytest.raises(UsageError, match=r"must be nats://.*, and daemon=NAME behind \? or &, got 'nats://h/blue'"):
        broker_address("nats://h/blue", "--target", daemon=True)
    assert broker_address("nats://h/blue?creds=x&daemon=a.b", "--target", daemon=True).daemon == "a.b"
    done = CliRunner().invoke(cli, ["serve", "--fleet-events"], prog_name="kvbm-console")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "fleet-events must be given with --fleet" in done.stderr


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_console_joins_in_the_middle_and_follows_through_every_fault(tmp_path: Path) -> None:
    """A broker that is killed, a daemon that ends, and one that begins again under its name."""
    with nats_server(tmp_path) as server:
        address = at(server)
        mirror = Mirror()
        told: list[Any] = []
        async with contextlib.AsyncExitStack() as stack:
            daemon = await stack.enter_async_context(daemon_at(
                LOAD.format(80), target="one", fleet=address, fleet_events=True, speed=20.0
            ))
            await published(daemon, lambda: daemon.service.state.seq > 2_500 and events_of(daemon).keyframe is not None)
            feed = PublishedFeed(broker_address(f"nats://{server.address}?daemon=one", "fleet", daemon=True), past=100)
            items = feed.items()

            async def until(condition: Callable[[], bool]) -> None:
                while not condition():
                    item = await anext(items)
                    told.append(item)
                    mirror.take(item)

            await until(lambda: mirror.state is not None)
            connected, past, snapshot = told[:3]
            assert isinstance(connected, Connected)
            assert (connected.incarnation, connected.control) == (daemon.service.incarnation, False)
            assert isinstance(past, PastSeen)
            assert isinstance(snapshot, SnapshotTaken)
            assert past.events[-1].seq == snapshot.state.seq - 1 > 1_000, "it did not begin at the beginning"
            await until(lambda: any(isinstance(each, EventsArrived) for each in told))
            server.kill()
            await until(lambda: isinstance(told[-1], Disconnected))
            assert "broker" in told[-1].reason
            server.start()
            await until(lambda: sum(mirror.state.totals.finished) == 80)
            assert not mirror.gaps
            assert daemon.service.state.seq >= mirror.state.seq
            await stack.aclose()
            await until(lambda: isinstance(told[-1], Disconnected) and told[-1].retry_in_s is None)
            assert mirror.digest == digest(daemon.service.state)
        async with daemon_at(LOAD.format(10), target="one", fleet=address, fleet_events=True, speed=None) as later:
            await published(later, lambda: finished(later) == 10)
            await until(lambda: mirror.state.seq == later.service.state.seq)
            assert [each.incarnation for each in told if isinstance(each, Connected)][-1] == later.service.incarnation
            assert mirror.digest == digest(later.service.state)
            await until(lambda: isinstance(told[-1], Heartbeat) and told[-1].head_seq == later.service.state.seq - 1)
        await items.aclose()


@pytest.mark.asyncio
async def test_a_heartbeat_tells_of_the_recorder_and_the_parts_of_the_daemon(tmp_path: Path) -> None:
    with nats_server(tmp_path / "broker") as server:
        async with daemon_at(
            LOAD.format(10), target="one", fleet=at(server), fleet_events=True, speed=None, record=tmp_path / "run"
        ) as daemon:
            daemon.service.parts.known(["taps"])
            daemon.service.parts.troubled("taps", "a test")
            await published(daemon, lambda: finished(daemon) == 10)
            feed = PublishedFeed(broker_address(f"nats://{server.address}?daemon=one", "fleet", daemon=True))
            items = feed.items()
            async for item in items:
                if isinstance(item, Heartbeat):
                    assert (item.recorder, item.warnings) == ("recording", ("taps: a test",))
                    break
            await items.aclose()
