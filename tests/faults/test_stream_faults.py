"""Faults of readers: one that stalls, too many at once, a burst, and none of them changes what is decided."""

import asyncio
import time
from collections.abc import Callable

import grpc.aio
import pytest

from kvbm_console.client import Client
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.recording.writer import Recorder
from kvbm_console.service import LeaderService
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.embedded import default_engine_config, default_leader_config, embed, parse_workload
from kvbm_console.stream.broadcast import Subscriber
from kvbm_console.stream.ring import Lost, Ring
from kvbm_console.wire.protocol import SUBSCRIBERS_MAX, method_path
from kvbm_console.wire.v1 import console_pb2 as pb
from tests.server.daemons import Mirror, daemon_at, follow_until, socket_directory

pytestmark = pytest.mark.fault
TEXT = "x" * 200
MIB = 1024 * 1024


def quantile(values: list[int], share: float) -> int:
    """The value below which this share lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def publish(service: LeaderService, count: int) -> list[int]:
    """Publish events and return how long each took."""
    took = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        service.submit(NoteReported, Note.CLOCK_STEPPED, TEXT)
        took.append(time.perf_counter_ns() - begin)
    return took


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rounds", "seconds"), [(300, 0.0), pytest.param(3_000, 60.0, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_f7_a_stalled_subscriber_costs_nobody_anything(rounds: int, seconds: float) -> None:
    burst = 100
    async with daemon_at(None, ring=Ring(20_000, 4 * MIB)) as daemon, Client(daemon.address) as client:
        service = daemon.service
        healthy = client.subscribe()
        received = asyncio.Event()

        async def read() -> None:
            async for _ in healthy:
                received.set()

        async def caught_up() -> None:
            while healthy.position != service.state.seq:
                received.clear()
                service.broadcaster.flush()
                await received.wait()

        reader = asyncio.create_task(read())
        await caught_up()
        alone = []
        for _ in range(rounds // 3):
            alone += publish(service, burst)
            await caught_up()
        # Without our client's small window: what the transport itself hides from a reader that stopped.
        channel = grpc.aio.insecure_channel(daemon.address)
        stalled = channel.unary_stream(method_path("Subscribe"))(pb.SubscribeRequest().SerializeToString())
        while not pb.SubscribeReply.FromString(await stalled.read()).HasField("snapshot_end"):
            pass
        (cursor,) = [s.cursor for s in service.broadcaster.subscribers if s.name == ""]
        beside: list[int] = []
        begin = time.monotonic()
        while len(beside) < rounds * burst or time.monotonic() - begin < seconds:
            beside += publish(service, burst)
            await caught_up()
        event_bytes = service.ring.bytes / service.ring.events
        assert cursor.received * event_bytes <= 8 * MIB
        assert service.state.seq * event_bytes > 5 * MIB + cursor.received * event_bytes / 2
        assert (healthy.lost, healthy.received) == (0, service.state.seq - (healthy.start or 0))
        assert quantile(beside, 0.99) <= 4 * quantile(alone, 0.99) + 100_000
        if cursor.position < service.ring.first_seq:  # it has fallen out: now it reads on
            start = cursor.start
            gaps = got = 0
            while start + gaps + got < service.state.seq:
                reply = pb.SubscribeReply.FromString(await stalled.read())
                got += reply.batch.count
                gaps += reply.gap.count
            assert gaps > 0
            assert got + gaps == service.state.seq - start
        else:
            assert not seconds, "the long test must make it fall out"
        stalled.cancel()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await channel.close()


@pytest.mark.asyncio
async def test_f9_the_cap_of_subscribers() -> None:
    async with daemon_at(None) as daemon, Client(daemon.address) as client:
        streams = [client.subscribe() for _ in range(200)]

        async def first(stream: object) -> object:
            try:
                return await anext(stream)  # type: ignore[call-overload]
            except Refused as error:
                return error

        answers = list[object]()
        for part in (streams[:SUBSCRIBERS_MAX], streams[SUBSCRIBERS_MAX:]):  # more at once are refused as questions
            answers += await asyncio.gather(*(first(stream) for stream in part))
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert len(refused) == 200 - SUBSCRIBERS_MAX
        assert str(refused[0]) == f"there are {SUBSCRIBERS_MAX} subscribers, the most"
        accepted = [stream for stream, answer in zip(streams, answers, strict=True) if not isinstance(answer, Refused)]
        head = daemon.service.state.seq
        publish(daemon.service, 50)

        async def rest(stream: object) -> None:
            await follow_until(stream, Mirror(), lambda: stream.position >= head + 50)  # type: ignore[arg-type,attr-defined]

        await asyncio.gather(*(rest(stream) for stream in accepted))
        # The daemon may note a blocked loop meanwhile, which is an event, too.
        assert all(stream.received == stream.position - stream.start >= 50 for stream in accepted)
        accepted[0].cancel()
        while len(daemon.service.broadcaster.subscribers) == SUBSCRIBERS_MAX:
            await client.status()
        async with client.subscribe() as again:
            await anext(again)


@pytest.mark.asyncio
async def test_f17_a_burst_through_a_small_ring_is_an_exact_gap_and_a_snapshot() -> None:
    async with daemon_at(None, ring=Ring(64)) as daemon, Client(daemon.address) as client:
        mirror = Mirror()
        async with client.subscribe() as stream:
            await follow_until(stream, mirror, lambda: mirror.snapshots == 1)
            publish(daemon.service, 100_000)
            # The daemon itself says so when its loop was blocked: the head may move once more.
            await follow_until(
                stream, mirror, lambda: stream.position == daemon.service.state.seq and mirror.state is not None
            )
            head = daemon.service.state.seq
            assert stream.received + stream.lost == head - (stream.start or 0)
            assert stream.lost == sum(gap.count for gap in mirror.gaps) >= 100_000 - 64
            assert {gap.reason for gap in mirror.gaps} == {"fell_behind"}
            assert mirror.snapshots == 1 + len(mirror.gaps)
            assert mirror.digest == daemon.service.digest()[1]
            assert daemon.service.ring.events <= 64


def run_beside(subscribers: int, recorded: bool, slow: bool) -> tuple[list[int], float]:
    """Digests after every 40th stimulus of a seeded machine, with readers beside it; and how long it took."""
    workload = parse_workload("multiturn:seed=5")
    calendar = Calendar()
    config: LeaderConfig = default_leader_config(workload)
    service = LeaderService(config, calendar.clock, ring=Ring(2_000))
    digests: list[int] = []
    readers: list[Subscriber] = []
    with socket_directory() as place:
        if recorded:
            service.recorder = Recorder(
                place, config=config, incarnation=service.incarnation, keyframe=service.keyframe, seal=False
            )
        service.start()
        rig = embed(service.dispatcher, calendar, default_engine_config(workload), workload)

        def look() -> None:
            if service.dispatcher.n % 40 == 0:
                digests.append(service.digest()[1])
            for index, reader in enumerate(readers):
                if not slow or index % 2 or service.dispatcher.n % 997 == 0:
                    item = reader.read()
                    if isinstance(item, Lost):
                        service.ring.skip_to(reader.cursor, service.ring.next_seq)

        service.listeners.append(look)
        readers += [service.broadcaster.subscribe(service.ring.next_seq, index % 2) for index in range(subscribers)]
        begin = time.perf_counter()
        rig.run_to_end(4_000_000_000)
        took = time.perf_counter() - begin
        service.close()
        if service.recorder is not None:
            service.recorder.close()
    for reader in readers:
        while service.ring.read(reader.cursor) is not None:
            pass
        assert reader.cursor.received + reader.cursor.lost == service.ring.next_seq - reader.cursor.start
    return digests, took


@pytest.mark.parametrize(
    ("subscribers", "recorded", "slow"),
    [(1, False, False), (50, False, True), (0, True, False), (50, True, True)],
)
def test_f28_nobody_who_looks_changes_what_is_decided(
    subscribers: int, recorded: bool, slow: bool, alone: "Callable[[], tuple[list[int], float]]"
) -> None:
    digests, took = alone()
    beside, took_beside = run_beside(subscribers, recorded, slow)
    assert beside == digests
    assert len(digests) > 40
    print(f"{subscribers} subscribers, recorder {recorded}: {took_beside / took:.2f} times the time alone")


@pytest.fixture(scope="module")
def alone() -> Callable[[], tuple[list[int], float]]:
    """The run without anybody beside it, made once."""
    known: list[tuple[list[int], float]] = []

    def run() -> tuple[list[int], float]:
        if not known:
            known.append(run_beside(0, False, False))
        return known[0]

    return run
