"""A real publisher in another process: late join, gap, replay, overrun, restart, gone and back, two of them, binding.

Law of this file: nothing sleeps; it waits until the follower has told its stream what the test is about.
"""

import asyncio
import itertools
import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from kvbm_console.client import Client
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import BlocksSeen, SourceLost
from kvbm_console.engines.kv_events import zmq_source
from kvbm_console.engines.kv_events.address import Publisher, parse_publishers
from kvbm_console.engines.kv_events.stream import EventStream
from kvbm_console.engines.kv_events.zmq_source import PAUSE_FACTOR, PAUSE_MOST_S, Streams, ZmqSource
from tests.engines.payloads import cleared, removed, stored
from tests.engines.test_stream import SOURCE, House, facts_of
from tests.server.daemons import daemon_at, until

CHILD = Path(__file__).with_name("publisher_child.py")
PATIENCE_S = 20.0


class Engine:
    """A publisher child. ``publish`` sends live, ``hide`` puts batches into its buffer as if the network lost them."""

    def __init__(self, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(settings)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        ports = self._answer()
        self.port: int = ports["port"]
        self.replay_port: int = ports["replay_port"]

    def _answer(self) -> dict[str, int]:
        assert self.process.stdout is not None
        answer: dict[str, int] = json.loads(self.process.stdout.readline())
        return answer

    def _do(self, what: str, batches: tuple[Any, ...], times: int = 1) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, "batches": batches, "times": times}) + "\n")
        self.process.stdin.flush()
        return self._answer()["next"]

    def publish(self, *batches: Any) -> int:
        """Send batches (lists of events, or hex of a payload); returns the next number."""
        return self._do("publish", batches)

    def flood(self, times: int, batch: Any) -> int:
        """Send one batch many times."""
        return self._do("publish", (batch,), times)

    def hide(self, *batches: Any) -> int:
        """Count and buffer batches that are never sent."""
        return self._do("hide", batches)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def publisher(self, *, replay: bool = True) -> Publisher:
        """Its address."""
        return Publisher(
            endpoint=f"tcp://127.0.0.1:{self.port}", topic="kv",
            replay=f"tcp://127.0.0.1:{self.replay_port}" if replay else None,
        )


class Following:
    """A source that follows, as a context; ``until`` waits for something to become true of it."""

    def __init__(self, publisher: Publisher, house: House, *, source: int = SOURCE, replay_idle_s: float = 0.3) -> None:
        self.house = house
        self.streams: list[EventStream] = []
        self._number = source
        self.source = ZmqSource(publisher, self._stream, replay_idle_s=replay_idle_s)
        self._context = zmq.asyncio.Context()

    def _stream(self, label: str) -> EventStream:
        self.streams.append(EventStream(self.house.dispatcher, self._number + len(self.streams), label=label))
        return self.streams[-1]

    @property
    def stream(self) -> EventStream:
        """The only publisher."""
        return self.streams[0]

    async def __aenter__(self) -> "Following":
        self.source.open(self._context)
        self._task = asyncio.ensure_future(self.source.run())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._context.destroy(linger=0)
        assert self._task.cancelled() or self._task.exception() is None

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait, looking whenever the loop comes round; fails when the follower ended."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                assert not self._task.done()
                await asyncio.sleep(0.001)

    async def joined(self) -> None:
        """Wait for the handshake, with the subscription behind it."""
        await self.until(lambda: self.source.status.connected)


async def reach(following: Following, engine: Engine, *batches: Any) -> int:
    """Publish until it is heard: a subscription needs a moment to reach the publisher. Returns the next number."""
    heard = following.source.status.messages
    async with asyncio.timeout(PATIENCE_S):
        while following.source.status.messages == heard:
            nxt = engine.publish(*batches)
            await asyncio.sleep(0.01)
    return nxt


@pytest.mark.asyncio
@pytest.mark.parametrize("topic_in_replay", [False, True])
async def test_late_join_with_replay_knows_everything(engines: Callable[..., Engine], topic_in_replay: bool) -> None:
    engine = engines(topic_in_replay=topic_in_replay)
    engine.publish([stored(1, 2)], [stored(3, medium="CPU")], [removed(1)])
    house = House()
    async with Following(engine.publisher(), house) as following:
        await following.until(lambda: following.stream.next_seq == 3)
        assert facts_of(house.dispatcher.leader.state) == {(0, 0, "GPU"): {2: 1}, (0, 0, "CPU"): {3: 1}}
        await reach(following, engine, [])
        engine.publish([stored(9)])
        await following.until(lambda: 9 in house.dispatcher.leader.state.pools[0].by_hash)
    assert house.dispatcher.leader.state.lost_sources == {}
    assert following.stream.counts.replayed_batches >= 3


@pytest.mark.asyncio
async def test_late_join_without_replay_is_in_doubt_until_a_clear(engines: Callable[..., Engine]) -> None:
    engine = engines()
    engine.publish([stored(1, 2)], [stored(3)])
    house = House()
    state = house.dispatcher.leader.state
    async with Following(engine.publisher(replay=False), house) as following:
        await reach(following, engine, [stored(4)])
        await following.until(lambda: following.stream.counts.batches > 0)
        assert state.lost_sources == {SOURCE: 1}
        engine.publish([cleared()], [stored(5)])
        await following.until(lambda: facts_of(state) == {(0, 0, "GPU"): {5: 1}})
    assert state.lost_sources == {}


@pytest.mark.asyncio
async def test_a_gap_is_filled_by_replay(engines: Callable[..., Engine]) -> None:
    engine = engines()
    house = House()
    async with Following(engine.publisher(), house) as following:
        await reach(following, engine, [])
        engine.publish([stored(1)])
        engine.hide([stored(2)], [removed(1)])
        end = engine.publish([stored(3)])
        await following.until(lambda: following.stream.next_seq == end)
    state = house.dispatcher.leader.state
    assert facts_of(state) == {(0, 0, "GPU"): {2: 1, 3: 1}}
    assert (state.lost_sources, house.of(SourceLost)) == ({}, [])
    assert following.stream.counts.replayed_batches >= 2


@pytest.mark.asyncio
async def test_a_buffer_that_has_wrapped_is_an_explicit_loss(engines: Callable[..., Engine]) -> None:
    engine = engines(buffer=2)
    house = House()
    async with Following(engine.publisher(), house) as following:
        await reach(following, engine, [])
        await following.until(lambda: following.stream.next_seq > 0)
        first = engine.publish([stored(1)])
        await following.until(lambda: following.stream.next_seq == first)
        engine.hide([stored(2)], [stored(3)], [stored(4)])
        end = engine.publish([stored(5)])
        await following.until(lambda: following.stream.next_seq == end)
    (lost,) = [one for one in house.of(SourceLost) if one.first >= first]
    assert (lost.first, lost.last) == (first, first + 1)
    assert house.dispatcher.leader.state.lost_sources == {SOURCE: len(house.of(SourceLost))}
    assert facts_of(house.dispatcher.leader.state) == {(0, 0, "GPU"): {1: 1, 4: 1, 5: 1}}


@pytest.mark.asyncio
async def test_messages_that_wait_become_fewer_events(engines: Callable[..., Engine]) -> None:
    engine, house = engines(), House(snapshots=False)
    async with Following(engine.publisher(replay=False), house) as following:
        await reach(following, engine, [stored(1)])
        counts, events = following.stream.counts, len(house.of(BlocksSeen))
        batches, blocks, gaps = counts.batches, counts.stored_blocks, counts.gaps
        engine.flood(300, [stored(7)])
        await following.until(lambda: counts.batches == batches + 300)
        assert (counts.stored_blocks, counts.gaps) == (blocks + 300, gaps)
        assert following.stream.resident_blocks()["GPU"] == counts.stored_blocks
        assert len(house.of(BlocksSeen)) - events <= 100


@pytest.mark.asyncio
async def test_a_gap_without_replay_is_a_loss_and_later_batches_are_taken(engines: Callable[..., Engine]) -> None:
    engine = engines()
    house = House()
    async with Following(engine.publisher(replay=False), house) as following:
        await reach(following, engine, [])
        await following.until(lambda: following.stream.next_seq > 0)
        before = len(house.of(SourceLost))
        engine.hide([stored(1)])
        end = engine.publish([stored(2)])
        await following.until(lambda: following.stream.next_seq == end)
    assert len(house.of(SourceLost)) == before + 1
    assert SOURCE in house.dispatcher.leader.state.lost_sources


@pytest.mark.asyncio
@pytest.mark.parametrize("replay", [True, False])
async def test_gone_and_back_with_numbers_from_zero(engines: Callable[..., Engine], replay: bool) -> None:
    engine = engines()
    house = House()
    state = house.dispatcher.leader.state
    async with Following(engine.publisher(replay=replay), house) as following:
        await reach(following, engine, [])
        engine.publish([stored(1, 2)], *[[] for _ in range(50)])
        await following.until(lambda: following.stream.next_seq > 50)
        engine.end()
        await following.until(lambda: not following.source.status.connected)
        again = engines(port=engine.port, replay_port=engine.replay_port)
        again.publish([stored(7)])  # mostly nobody is there to hear it yet
        await following.until(lambda: following.source.status.connects == 2)
        await reach(following, again, [stored(8)])
        await following.until(lambda: following.stream.counts.restarts == 1)
        await following.until(lambda: bool(state.pools[0].by_hash.get(8) is not None))
        found = facts_of(state)[(0, 0, "GPU")]
        assert 1 not in found
        assert (7 in found) is (SOURCE not in state.lost_sources)
        assert 7 in found or not replay


@pytest.mark.asyncio
async def test_back_and_silent_is_asked_who_it_is(engines: Callable[..., Engine]) -> None:
    engine = engines()
    house = House()
    async with Following(engine.publisher(), house) as following:
        await reach(following, engine, [stored(1)])
        await following.until(lambda: following.stream.next_seq > 0)
        engine.end()
        await following.until(lambda: not following.source.status.connected)
        again = engines(port=engine.port, replay_port=engine.replay_port)
        again.publish([stored(6)])
        await following.until(lambda: following.stream.counts.restarts == 1)
        await reach(following, again, [])  # it may have spoken in the moment between its answer and our subscription
        await following.until(lambda: 6 in house.dispatcher.leader.state.pools[0].by_hash)
    state = house.dispatcher.leader.state
    assert (facts_of(state), state.lost_sources) == ({(0, 0, "GPU"): {6: 1}}, {})


@pytest.mark.asyncio
async def test_back_and_silent_without_replay_is_in_doubt(engines: Callable[..., Engine]) -> None:
    """Nobody can say whether it is the same publisher, or what it said meanwhile."""
    engine = engines()
    house = House()
    async with Following(engine.publisher(replay=False), house) as following:
        await reach(following, engine, [cleared()])
        engine.publish([stored(1)])
        state = house.dispatcher.leader.state
        await following.until(lambda: bool(state.pools) and 1 in state.pools[0].by_hash)
        assert state.lost_sources == {}
        engine.end()
        await following.until(lambda: not following.source.status.connected)
        engines(port=engine.port, replay_port=engine.replay_port)
        await following.until(lambda: SOURCE in state.lost_sources)
        assert following.source.status.connects == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("replay", [True, False])
async def test_an_engine_that_was_killed_is_said_to_have_ended_and_may_come_back(
    engines: Callable[..., Engine], replay: bool
) -> None:
    engine = engines()
    house = House()
    state = house.dispatcher.leader.state
    async with Following(engine.publisher(replay=replay), house) as following:
        await reach(following, engine, [stored(1)])
        await following.until(lambda: bool(state.pools) and bool(state.pools[0].by_hash))
        engine.end()
        killed = time.monotonic()
        await following.until(lambda: state.has_ended(SOURCE))
        assert time.monotonic() - killed < 5
        assert state.pools[0].resident_blocks == 0
        again = engines(port=engine.port, replay_port=engine.replay_port)
        again.publish([stored(6)])
        await following.until(lambda: not state.has_ended(SOURCE))
        await following.until(lambda: (6 in state.pools[0].by_hash) is replay)
        assert (SOURCE in state.lost_sources) is not replay


@pytest.mark.asyncio
async def test_a_queue_that_overflows_loses_the_newest_and_says_which(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower stands still while more comes than the sockets hold: what is missing is told, and nothing is sure.
    """
    monkeypatch.setattr("kvbm_console.engines.kv_events.zmq_source.QUEUE_MESSAGES_MAX", 20)
    engine = engines(hwm=20)
    house = House(snapshots=False)
    block = stored(*range(1, 11), token_ids=list(range(60_000)))  # the network's own buffers hold few of them
    async with Following(engine.publisher(replay=False), house) as following:
        await reach(following, engine, [cleared()])
        state = house.dispatcher.leader.state
        await following.until(lambda: following.stream.next_seq > 0)
        async with following.source._taking:  # nothing is taken meanwhile
            last = engine.flood(200, [block])
        before = following.stream.counts.lost_batches
        engine.publish(*[[] for _ in range(5)])
        async with asyncio.timeout(PATIENCE_S):
            while following.stream.next_seq < last:
                engine.publish([])
                await asyncio.sleep(0.05)
        counts = following.stream.counts
        assert counts.lost_batches > before
        assert SOURCE in state.lost_sources
        assert counts.batches + counts.lost_batches == following.stream.next_seq


@pytest.mark.asyncio
async def test_another_incarnation_behind_a_higher_number_is_noticed(engines: Callable[..., Engine]) -> None:
    engine = engines()
    house = House()
    async with Following(engine.publisher(), house) as following:
        await reach(following, engine, [stored(1)])
        await following.until(lambda: following.stream.next_seq > 0)
        engine.end()
        await following.until(lambda: not following.source.status.connected)
        again = engines(port=engine.port, replay_port=engine.replay_port)
        again.publish([stored(6)], *[[] for _ in range(300)])  # far beyond what the first one had counted
        await following.until(lambda: following.source.status.connects == 2)
        await reach(following, again, [stored(8)])
        await following.until(lambda: 8 in house.dispatcher.leader.state.pools[0].by_hash)
    state = house.dispatcher.leader.state
    assert following.stream.counts.restarts == 1
    found = facts_of(state)[(0, 0, "GPU")]
    assert (set(found), found[6], state.lost_sources) == ({6, 8}, 1, {})


@pytest.mark.asyncio
async def test_a_replay_that_is_never_answered_ends_in_a_loss(engines: Callable[..., Engine]) -> None:
    engine = engines()
    silent = socket.create_server(("127.0.0.1", 0))  # accepts and says nothing
    publisher = Publisher(
        endpoint=f"tcp://127.0.0.1:{engine.port}", topic="kv", replay=f"tcp://127.0.0.1:{silent.getsockname()[1]}",
    )
    house = House()
    with silent:
        async with Following(publisher, house, replay_idle_s=0.05) as following:
            await reach(following, engine, [])
            await following.until(lambda: following.stream.next_seq > 0)
            engine.hide([stored(1)])
            end = engine.publish([stored(2)])
            await following.until(lambda: following.stream.next_seq == end)
    assert following.source.status.replays_failed >= 1
    assert SOURCE in house.dispatcher.leader.state.lost_sources


@pytest.mark.asyncio
async def test_two_publishers_are_two_sources(engines: Callable[..., Engine]) -> None:
    one, two = engines(), engines()
    one.publish([stored(1)])
    two.publish([stored(1, 2)], [removed(1)])
    house = House()
    async with (
        Following(one.publisher(), house) as first, Following(two.publisher(), house, source=SOURCE + 1) as second,
    ):
        await first.until(lambda: first.stream.next_seq == 1)
        await second.until(lambda: second.stream.next_seq == 2)
    pools = house.dispatcher.leader.state.pools
    assert sorted((pool.info.source, pool.resident_blocks) for pool in pools) == [(SOURCE, 1), (SOURCE + 1, 1)]


@pytest.mark.asyncio
async def test_we_bind_and_engines_connect_each_with_its_topic(engines: Callable[..., Engine]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    house = House()
    (publisher,) = parse_publishers(f"zmq://127.0.0.1:{port}?bind=1")
    async with Following(publisher, house) as following:
        one = engines(connect=f"tcp://127.0.0.1:{port}", topic="kv@pod0@model")
        two = engines(connect=f"tcp://127.0.0.1:{port}", topic="kv@pod1@model")
        await reach(following, one, [stored(1)])
        async with asyncio.timeout(PATIENCE_S):
            while len(following.streams) < 2:
                two.publish([stored(2)])
                await asyncio.sleep(0.01)
    assert {stream.label for stream in following.streams} == {"kv@pod0@model", "kv@pod1@model"}
    assert all(stream.counts.restarts == 0 for stream in following.streams)


@pytest.mark.asyncio
async def test_of_engines_that_connect_to_us_the_dead_one_is_told_within_5_s(engines: Callable[..., Engine]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    house = House()
    state = house.dispatcher.leader.state
    (publisher,) = parse_publishers(f"zmq://127.0.0.1:{port}?bind=1")
    async with Following(publisher, house) as following:
        made = []
        for at in range(2):
            made.append(engines(connect=f"tcp://127.0.0.1:{port}", topic=f"pod{at}"))
            async with asyncio.timeout(PATIENCE_S):
                while len(following.streams) == at:
                    made[at].publish([stored(at + 1)])
                    await asyncio.sleep(0.01)
        dead, alive = following.streams
        made[0].end()
        began = time.monotonic()
        await following.until(lambda: dead.away)
        await following.until(lambda: state.has_ended(dead.source))
        assert time.monotonic() - began < 5
        assert (alive.away, state.has_ended(alive.source)) == (False, False)
        again = engines(connect=f"tcp://127.0.0.1:{port}", topic="pod0")
        async with asyncio.timeout(PATIENCE_S):
            while dead.away:
                again.publish([stored(7)])
                await asyncio.sleep(0.01)
        assert not state.has_ended(dead.source)
        assert dead.counts.restarts == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("bound", [False, True])
async def test_each_publisher_has_its_own_word_on_being_connected(engines: Callable[..., Engine], bound: bool) -> None:
    """Of two engines one dies: by addresses of their own, and at one address where we bind."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    house, numbers = House(), itertools.count(SOURCE)
    if bound:
        publishers = parse_publishers(f"zmq://127.0.0.1:{port}?bind=1")
        made = [engines(connect=f"tcp://127.0.0.1:{port}", topic=f"pod{at}") for at in range(2)]
    else:
        made = [engines(), engines()]
        publishers = [one.publisher() for one in made]
    streams = Streams(publishers, house.dispatcher, lambda: next(numbers))
    streams.open()
    running = asyncio.ensure_future(streams.run())

    async def told(*expected: bool) -> None:
        while [row["connected"] for row in sorted(streams.documents(), key=lambda row: row["name"])] != list(expected):
            for one in made:
                if one.process.poll() is None:
                    one.publish([stored(1)])
            assert not running.done()
            await asyncio.sleep(0.01)

    made.sort(key=lambda one: one.port)
    async with asyncio.timeout(PATIENCE_S):
        await told(True, True)
        made[0].end()
        await told(False, True)
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.asyncio
async def test_an_engine_that_may_be_back_without_a_message_is_uncertain_and_not_ended(
    engines: Callable[..., Engine]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    house = House()
    (publisher,) = parse_publishers(f"zmq://127.0.0.1:{port}?bind=1")
    async with Following(publisher, house) as following:
        one = engines(connect=f"tcp://127.0.0.1:{port}", topic="pod0")
        async with asyncio.timeout(PATIENCE_S):
            while not following.streams:
                one.publish([stored(1)])
                await asyncio.sleep(0.01)
        connects = following.source.status.connects
        engines(connect=f"tcp://127.0.0.1:{port}", topic="pod0")  # and says nothing
        await following.until(lambda: following.source.status.connects > connects)
        one.end()
        await following.until(lambda: following.stream.counts.doubts == 1)
        assert not house.dispatcher.leader.state.has_ended(following.stream.source)


@pytest.mark.asyncio
async def test_garbage_is_counted_and_the_stream_goes_on(engines: Callable[..., Engine]) -> None:
    engine = engines()
    house = House()
    async with Following(engine.publisher(), house) as following:
        await reach(following, engine, [stored(1)])
        await following.until(lambda: following.stream.next_seq > 0)
        end = engine.publish("ff00ff", [stored(2)])
        await following.until(lambda: following.stream.next_seq == end)
    assert following.stream.counts.bad_payloads == 1
    assert SOURCE in house.dispatcher.leader.state.lost_sources


@pytest.mark.asyncio
async def test_an_address_that_is_taken_is_refused_in_one_sentence() -> None:
    house = House()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        source = ZmqSource(
            Publisher(endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}", bind=True),
            lambda label: EventStream(house.dispatcher, SOURCE, label=label),
        )
        context = zmq.asyncio.Context()
        with pytest.raises(UsageError, match=r"cannot bind tcp://127\.0\.0\.1"):
            source.open(context)
        context.destroy(linger=0)


@pytest.mark.parametrize(("text", "expected"), [
    ("zmq://h:5557", [("tcp://h:5557", None, "", False, 0)]),
    ("zmq:h:5557", [("tcp://h:5557", None, "", False, 0)]),
    ("tcp://[::1]:5557?topic=kv", [("tcp://[::1]:5557", None, "kv", False, 0)]),
    ("zmq://h:5557?replay=5558", [("tcp://h:5557", "tcp://h:5558", "", False, 0)]),
    ("zmq://h:5557?replay=other:1&ranks=2", [
        ("tcp://h:5557", "tcp://other:1", "", False, 0), ("tcp://h:5558", "tcp://other:2", "", False, 1),
    ]),
    ("zmq://*:5557", [("tcp://*:5557", None, "", True, 0)]),
])
def test_addresses(text: str, expected: list[tuple[Any, ...]]) -> None:
    assert [
        (one.endpoint, one.replay, one.topic, one.bind, one.dp_rank) for one in parse_publishers(text)
    ] == expected


@pytest.mark.parametrize("text", [
    "", "zmq", "zmq:", "zmq://h", "zmq://h:0", "zmq://h:65536", "zmq://h:x", "zmq://:5557", "http://h:5557",
    "zmq://h:5557/path", "zmq://h:5557?ranks=0", "zmq://h:5557?ranks=65", "zmq://h:65535?ranks=2",
    "zmq://h:5557?what=1", "zmq://h:5557?bind=2", "zmq://h:5557?replay=x", "zmq://*:5557?replay=5558",
    "zmq://h:5557?topic=" + "t" * 300, "zmq://h:5557?replay=65535&ranks=2", "zmq://user@h:5557",
])
def test_addresses_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_publishers(text)


@pytest.mark.asyncio
async def test_between_two_replays_the_publisher_has_four_times_as_long_for_its_engine(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, house = engines(), House()
    asked: list[tuple[float, float]] = []
    fetch = zmq_source.fetch_replay

    async def timed(*arguments: Any, **options: Any) -> zmq_source.Replay:
        began = time.monotonic()
        replay = await fetch(*arguments, **options)
        asked.append((began, time.monotonic()))
        return replay

    monkeypatch.setattr(zmq_source, "fetch_replay", timed)
    async with Following(engine.publisher(), house) as following:
        await following.joined()
        engine.hide(*([stored(number)] for number in range(200)))
        async with following.source._taking:
            for _ in range(3):
                found = await following.source._fetch(0)
                assert len(found.messages) == 200
    assert len(asked) >= 3
    for (began, ended), (again, _) in itertools.pairwise(asked):
        assert again - ended >= min(PAUSE_FACTOR * (ended - began), PAUSE_MOST_S)


@pytest.mark.asyncio
async def test_a_message_that_is_too_large_costs_what_it_held_and_not_the_stream(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ ends the connection at a message above its limit, and never connects again by itself."""
    monkeypatch.setattr(zmq_source, "PAYLOAD_BYTES_MAX", 100_000)
    monkeypatch.setattr(zmq_source, "RECONNECT_S", 0.05)
    engine = engines()
    house = House()
    state = house.dispatcher.leader.state
    async with Following(engine.publisher(replay=False), house) as following:
        await reach(following, engine, [stored(1)])
        await following.until(lambda: following.stream.counts.batches > 0)
        engine.publish([stored(*range(100, 60_000))])
        await following.until(lambda: following.source.status.disconnects > 0)
        await following.joined()
        await reach(following, engine, [stored(2)])
        await following.until(lambda: 2 in state.pools[0].by_hash)
    assert state.lost_sources, "what the large one held is not known"


@pytest.mark.asyncio
async def test_connections_that_end_before_a_handshake_do_not_count_against_a_later_one(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy whose engine is not there yet takes connections and closes them."""
    monkeypatch.setattr(zmq_source, "RECONNECT_S", 600.0)
    taken: list[int] = []
    proxy = await asyncio.start_server(lambda _, writer: (taken.append(1), writer.close())[1], "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    house = House()
    async with Following(Publisher(endpoint=f"tcp://127.0.0.1:{port}", topic="kv"), house) as following:
        await following.until(lambda: len(taken) >= 2)
        proxy.close()
        engine = engines(port=port)
        await following.joined()
        await reach(following, engine, [stored(1)])
        assert (following.source.status.connected, following.source.status.connects) == (True, 1)


def test_a_machine_that_is_gone_is_noticed_within_seconds() -> None:
    """We send nothing to a publisher, so only probes of the system find out."""
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as place:
        sub = context.socket(zmq.SUB)
        zmq_source.subscribe(sub, Publisher(endpoint=f"tcp://127.0.0.1:{place.getsockname()[1]}"))
        options = (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT)
        idle, every, count = map(sub.getsockopt, options)
        context.destroy(linger=0)
    assert 0 < idle + every * count <= 20


@pytest.mark.asyncio
@pytest.mark.parametrize("part", ["_take_all", "_watch"])
async def test_a_follower_that_fails_is_told_and_follows_again(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = engines()
    engine.publish([stored(1)])
    real, failures = getattr(ZmqSource, part), [RuntimeError("a bug of ours")]

    async def failing(self: ZmqSource, *args: Any) -> None:
        if failures:
            raise failures.pop()
        await real(self, *args)

    monkeypatch.setattr(ZmqSource, part, failing)
    async with (
        daemon_at(None, publishers=(engine.publisher(),), config=LeaderConfig(g2_blocks=0, g3_blocks=0)) as daemon,
        Client(daemon.address) as client,
    ):
        document = await until(client, lambda document: document["tiers"]["g1"]["resident_blocks"] == 1)
        (row,) = [row for row in document["parts"] if row["part"].startswith("publisher")]
        assert (row["healthy"], row["ended"], row["restarted"]) == (True, 1, 1)
        assert row["why"] == "RuntimeError: a bug of ours"


@pytest.mark.asyncio
async def test_many_publishers_together_leave_the_loop_its_turns() -> None:
    """Each has more messages than a turn can take."""
    house, publishers = House(snapshots=False, check=False), []
    context = zmq_source.new_context(200)
    pubs = [zmq.Socket.shadow(context.socket(zmq.PUB)) for _ in range(100)]
    for pub in pubs:
        pub.set_hwm(0)
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        publishers.append(Publisher(endpoint=f"tcp://127.0.0.1:{port}"))
    streams = Streams(publishers, house.dispatcher, itertools.count(SOURCE).__next__)
    streams.open()
    running = asyncio.ensure_future(streams.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not all(source.status.connected for source in streams.sources):  # noqa: ASYNC110  nothing tells
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # a subscription follows the handshake
            payload = msgspec.msgpack.encode([1.0, [stored(1, 2), removed(1), removed(2)], 0])
            for number in range(200):
                for pub in pubs:
                    pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])
            turns, began = [], time.thread_time()
            while sum(source.status.messages for source in streams.sources) < 20_000:
                await asyncio.sleep(0)
                turns.append(time.thread_time() - began)
                began += turns[-1]
        assert statistics.median(turns) < 4 * zmq_source.SLICE_S
    finally:
        running.cancel()
        await asyncio.wait([running])
        context.destroy(linger=0)


def test_a_message_that_waits_takes_the_memory_of_its_bytes() -> None:
    """Each comes alone, as those of an engine do, and nobody reads."""
    context = zmq_source.new_context(1)
    pub, sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
    seen = zmq.Socket.shadow(context.socket(zmq.SUB))
    try:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        for each in (sub, seen):
            zmq_source.subscribe(each, Publisher(endpoint=f"tcp://127.0.0.1:{port}"))
        plain = zmq.Socket.shadow(pub)
        while not seen.poll(10):
            plain.send(b"begin")
        before = _resident_bytes()
        for number in range(3_000):
            plain.send_multipart([b"kv", number.to_bytes(8, "big"), bytes(600)])
            while seen.recv_multipart()[1:2] != [number.to_bytes(8, "big")]:
                pass
        assert _resident_bytes() - before < 3_000 * 3_000
    finally:
        seen.close(linger=0)
        context.destroy(linger=0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.asyncio
async def test_hundreds_of_publishers_are_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than libzmq and a process have sockets for by themselves."""
    publishers = [Publisher(endpoint=f"tcp://127.0.0.1:{port}", topic="kv") for port in range(1, 401)]
    streams = Streams(publishers, House().dispatcher, itertools.count(SOURCE).__next__)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, before[1]))
    try:
        streams.open()
        streams.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2_512, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1_024, 1_500))
    with pytest.raises(UsageError, match=r"400 publishers need 2,000 open files.* may have 1,500: .*--shard"):
        streams.open()
