"""Engines that publish KV events at ZeroMQ sockets: honest ones that keep a device cache, and a hostile one.

An honest publisher does what vLLM's does. It tells each block that its cache takes and loses, numbers its messages from
0 in each life, keeps the last of them for replays, and answers those between two messages. It drops what does not fit
into the queue of a subscriber. Some engines connect to the daemon instead, and none of those can replay.

The hostile one does what ``r51`` and ``r52`` do: too many pools, blocks and topics, numbers at the end of their range,
payloads that are none. Faults choose when.

Law of this file: a publisher knows nothing of the daemon, and a run without publishers has none of their dice.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import xxhash
import zmq

from kvbm_console.engines.kv_events import stream, zmq_source
from kvbm_console.engines.kv_events.address import Publisher as Address
from tests.engines.payloads import batch, cleared, removed, stored
from tests.sim.wires import End
from tests.sim.zeromq import JUNK, Context, Socket

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.run import Simulation

SHARE: Final = 0.25
"""Of the seeds that choose their own faults: so many have publishers."""
MESSAGE_BYTES_MAX: Final = 6_000
"""Instead of 16 MiB, so that a large message is cheap."""
QUEUE_MAX: Final = 40
"""Messages that wait in the daemon's socket, instead of 10,000."""
POOLS_MAX: Final = 6
POOL_BLOCKS_MAX: Final = 120
TOPICS_MAX: Final = 4
END: Final = b"\xff" * 8
PAUSES_S: Final = (0.05, 0.6, 3.5)
"""Between the end of a publisher and its next life: noticed or not, and longer than the time after which it is gone."""

HEARD_S: Final = 13.0
"""A publisher to which nothing happens for so long is heard of: five seconds until the daemon connects again, a step of
libzmq's own pauses, a replay that fails."""
KEEPALIVE_S: Final = 20.0
"""A connection that carries nothing is found out by then."""

Cache = dict[str, dict[int, int]]
"""Copies by medium and hash."""


class Told:
    """The messages of one life of a publisher: when each was sent, and the cache behind it."""

    def __init__(self) -> None:
        self.sent_ns: list[int] = []
        self.caches: list[Cache] = []


class Publisher:
    """An honest engine's publisher."""

    hostile = False
    binds = "tcp://*:7000"
    """The address at which the daemon binds for engines that connect."""

    def __init__(self, streams: "Streams", number: int) -> None:
        self.streams, self.simulation = streams, streams.simulation
        self.name = f"publisher-{number}"
        self.dice = dice = random.Random(f"{self.simulation.seed} {self.name}")
        self.bound = dice.random() < 0.15
        """The daemon binds, and we connect."""
        self.topic = f"kv@{self.name}" if self.bound else dice.choice(("", "kv"))
        self.endpoint = self.binds if self.bound else f"tcp://10.0.0.{number + 1}:5557"
        self.replay = None if self.bound or dice.random() < 0.2 else f"tcp://10.0.0.{number + 1}:5558"
        self.keeps = dice.choice((5, 30, 400))
        self.pace_s = dice.choice((0.04, 0.1, 0.4))
        self.capacity = dice.choice((6, 40))
        self.host_tier = dice.random() < 0.2
        self.high_water = dice.choice((4, 50))
        self.newer = dice.random() < 0.5
        """It sends the topic in replays, and hashes as bytes."""
        self.lives: list[Told] = []
        self.well_ns = 0
        """Since when nothing keeps it from being heard."""
        self.begin()

    def address(self) -> Address:
        """The address that the daemon is given."""
        return Address(endpoint=self.endpoint, replay=self.replay, topic="" if self.bound else self.topic,
                       bind=self.bound)

    def begin(self) -> None:
        """Start the engine."""
        self.loop = self.simulation.machine.loop(f"{self.name}.{len(self.lives)}", self._main)
        self.process = self.loop.process
        self.well(0.0)

    def well(self, in_s: float) -> None:
        """Something keeps it from being heard until then."""
        self.well_ns = max(self.well_ns, self.simulation.world.now + round(in_s * 1e9))

    def kill(self) -> None:
        """As ``kill -9``; it is started again."""
        if not self.process.dead:
            self.process.kill()
            self.begin_again(self.dice.choice(PAUSES_S))

    def begin_again(self, in_s: float) -> None:
        """Start again later; another start that was asked for meanwhile is enough."""
        def begin() -> None:
            if self.process.dead and not self.simulation.monitors.closing:
                self.begin()

        self.well(in_s)
        self.simulation.world.after(in_s, begin)

    # --- its process ---

    async def _main(self) -> None:
        context = Context(self.simulation.machine.wires, self.loop)
        self.pub = pub = context.socket(zmq.PUB)
        pub.setsockopt(zmq.SNDHWM, self.high_water)
        (pub.connect if self.bound else pub.bind)(self.endpoint)
        self.told = Told()
        self.lives.append(self.told)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self.keeps)
        self.cache: Cache = {"GPU": {}}
        self.seen: list[int] = []
        if self.replay is not None:
            router = context.socket(zmq.ROUTER)
            router.bind(self.replay)
            answering = asyncio.ensure_future(self._answer(router))
        while not self.simulation.monitors.closing:
            await asyncio.sleep(self.pace_s * (0.2 + self.dice.expovariate(1.0)))
            await self.publish(self._events())
        if self.replay is not None:
            answering.cancel()

    async def publish(self, events: Sequence[Any]) -> None:
        """Send the next message."""
        told, wall_s = self.told, self.simulation.world.wall_ns() / 1e9
        payload = batch(*events, ts=wall_s)
        seq = len(told.caches)
        told.sent_ns.append(self.simulation.world.now)
        told.caches.append({medium: dict(held) for medium, held in self.cache.items() if held})
        self.streams.know(self, payload, len(self.lives) - 1, seq)
        self.buffer.append((seq, payload))
        await self.pub.send_multipart([self.topic.encode(), seq.to_bytes(8, "big"), payload])

    async def _answer(self, router: Socket) -> None:
        head = [self.topic.encode()] if self.newer else []
        while True:
            sender, _, start = await router.recv_multipart()
            for seq, payload in list(self.buffer):
                if seq >= int.from_bytes(start, "big"):
                    await router.send_multipart([sender, b"", *head, seq.to_bytes(8, "big"), payload])
            await router.send_multipart([sender, b"", *head, END, b""])

    def _events(self) -> list[Any]:
        dice = self.dice
        if dice.random() < 0.04:
            self.cache["GPU"] = {}
            return [cleared(), *self._store("GPU")]
        if self.host_tier and dice.random() < 0.2:
            return self._store("CPU")
        return self._store("GPU")

    def _store(self, medium: str) -> list[Any]:
        """Store a short chain, or an earlier block once more, after the oldest blocks have made room."""
        dice, held = self.dice, self.cache.setdefault(medium, {})
        if self.seen and dice.random() < 0.3:
            keys = [dice.choice(self.seen)]
        else:
            keys = [dice.randrange(1, 2**63) for _ in range(dice.randrange(1, 4))]
            self.seen = [*self.seen[-60:], *keys]
        events = []
        while held and sum(held.values()) + len(keys) > self.capacity:
            oldest = next(iter(held))
            held[oldest] -= 1
            if not held[oldest]:
                del held[oldest]
            events.append(removed(self._form(oldest), medium=medium))
        parent = None if not held or dice.random() < 0.5 else self._form(next(reversed(held)))
        for key in keys:
            held[key] = held.get(key, 0) + 1
        return [*events, stored(*map(self._form, keys), parent=parent, medium=medium)]

    def _form(self, key: int) -> int | bytes:
        return key.to_bytes(32, "big") if self.newer else key

    # --- what faults make it do, in its process ---

    def does(self, action: Callable[[], Any]) -> None:
        """Let its process do something, now or when it is thawed."""
        async def do() -> None:
            if self.lives and hasattr(self, "pub"):
                await action()

        if not self.process.dead:
            self.loop.call_soon(lambda: self.loop.create_task(do()))

    async def oversize(self) -> None:
        """One message above what the daemon takes: a step that stored a long prompt, with its tokens."""
        (event,) = self._store("GPU")[-1:]
        self.cache["GPU"] = {}
        del event["parent_block_hash"]
        for key in event["block_hashes"]:
            number = int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key
            self.cache["GPU"][number] = 1
        await self.publish([cleared(), {**event, "token_ids": list(range(MESSAGE_BYTES_MAX))}])

    async def junk(self) -> None:
        """Data that is no ZeroMQ, on every connection."""
        for talk in self.pub.talks:
            talk.end.send(JUNK, 20)


class Hostile(Publisher):
    """It says what it likes. Nothing of its residency is judged."""

    hostile = True
    binds = "tcp://*:7001"

    async def numbers(self) -> None:
        """Numbers at the end of their range; then on with the old ones, or on a new connection."""
        for number in self.dice.sample((2**62 - 1, 2**62 + 1, 2**63, 2**64 - 2, 2**64 - 1), 3):
            await self.pub.send_multipart([self.topic.encode(), number.to_bytes(8, "big"), batch(stored(1))])
            await asyncio.sleep(0.005)
            if self.dice.random() < 0.5:
                for talk in self.pub.talks:
                    talk.end.link.cut()
            await self.publish(self._events())

    async def growth(self) -> None:
        """New blocks for ever, on media without end; from new publishers where the daemon binds."""
        dice = self.dice
        for turn in range(12):
            medium = f"m{turn}" if dice.random() < 0.5 else "GPU"
            payload = batch(stored(*(dice.randrange(1, 2**63) for _ in range(30)), medium=medium, token_ids=[]))
            topic = f"{self.topic}{turn if self.bound else ''}".encode()
            await self.pub.send_multipart([topic, len(self.told.caches).to_bytes(8, "big"), payload])
            await self.publish(self._events())
            await asyncio.sleep(0.01)

    async def garbage(self) -> None:
        """Payloads that are none, and messages of other parts."""
        dice, topic = self.dice, self.topic.encode()
        whole = batch(stored(1, 2, 3), removed(2), cleared(), stored(b"x" * 32))
        for _ in range(20):
            data = bytearray(whole)
            for _ in range(dice.randrange(1, 5)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            number = len(self.told.caches).to_bytes(8, "big")
            for parts in ([topic], [topic, b""], [topic, b"1", b"x"], [topic] * 9, [topic, number, bytes(data)]):
                await self.pub.send_multipart(parts)
            self.told.caches.append({})
            self.told.sent_ns.append(self.simulation.world.now)
            await asyncio.sleep(0.005)


class Streams:
    """All publishers of a run, none where the seed has drawn none."""

    def __init__(self, simulation: "Simulation", kinds: Sequence[str]) -> None:
        self.simulation = simulation
        self.dice = dice = random.Random(f"{simulation.seed} publishers")
        drawn = dice.random() < SHARE
        self.kinds: list[str] = []
        """The kinds of faults that a seed adds to those that it has drawn."""
        if not kinds and drawn:
            self.kinds = sorted(dice.sample(sorted(STREAM_KINDS), dice.randrange(1, 4)))
        self.take_part = bool(STREAM_KINDS.keys() & {*kinds, *self.kinds})
        self.all: list[Publisher] = []
        self.index: dict[int, tuple[Publisher, int, int]] = {}
        """Digest of a payload to its publisher, the number of its life and its own number."""

    def begin(self) -> None:
        """Start the publishers."""
        if self.take_part:
            self.all = [Publisher(self, number) for number in range(self.dice.randrange(1, 4))]
            self.all.append(Hostile(self, len(self.all)))

    def know(self, publisher: Publisher, payload: bytes, life: int, seq: int) -> None:
        """A message was published."""
        self.index[xxhash.xxh3_64_intdigest(payload)] = publisher, life, seq

    def addresses(self) -> tuple[Address, ...]:
        """The addresses that the daemon follows, each once."""
        return tuple(dict.fromkeys(publisher.address() for publisher in self.all))

    def one(self) -> Publisher:
        """Any of them, more often an honest one."""
        return self.dice.choice(self.all)

    def hostile(self) -> Hostile:
        """The one that is."""
        found = self.all[-1]
        assert isinstance(found, Hostile)
        return found

    def heal(self) -> None:
        """No fault any more."""
        self.simulation.machine.wires.dark.clear()

    @property
    def calm_s(self) -> float:
        """The time that a run with publishers needs beyond that of others."""
        if {"stream_half_open", "publisher_loses_power"} & set(self.simulation.faults.happened):
            return HEARD_S + KEEPALIVE_S
        return HEARD_S if self.take_part else 0.0

    def power_lost(self) -> None:
        """All of them were killed."""
        for publisher in self.all:
            publisher.begin_again(1.0)


@contextlib.contextmanager
def small_streams() -> Iterator[None]:
    """Limits of streams that a run reaches."""
    with (
        mock.patch.object(zmq_source, "PAYLOAD_BYTES_MAX", MESSAGE_BYTES_MAX),
        mock.patch.object(zmq_source, "QUEUE_MESSAGES_MAX", QUEUE_MAX),
        mock.patch.object(zmq_source, "TOPICS_MAX", TOPICS_MAX),
        mock.patch.object(stream, "POOLS_MAX", POOLS_MAX),
        mock.patch.object(stream, "POOL_BLOCKS_MAX", POOL_BLOCKS_MAX),
    ):
        yield


# --- faults ----------------------------------------------------------------------------------------------------------


def _of(faults: "Faults") -> Streams:
    return faults.simulation.streams


def _link(faults: "Faults") -> Any:
    """A connection that leaves the machine: one between a tap and its reporter ends with one of them alone."""
    streams = _of(faults)
    up = [link for link in faults.simulation.machine.wires.links if link.up and "tcp://" in link.name]
    return streams.dice.choice(up) if up else None


def publisher_killed(faults: "Faults") -> None:
    """As ``kill -9``."""
    _of(faults).one().kill()


def publisher_frozen(faults: "Faults") -> None:
    """As ``SIGSTOP`` for a time."""
    streams = _of(faults)
    publisher, seconds = streams.one(), streams.dice.choice((0.4, 4.0))
    publisher.process.freeze(seconds)
    publisher.well(seconds)


def publisher_is_proxied(faults: "Faults") -> None:
    """A proxy takes the connections of a publisher that is not there, and closes them."""
    publisher, machine = _of(faults).one(), faults.simulation.machine
    if publisher.bound or publisher.process.dead:
        return
    publisher.process.kill()
    proxy = machine.process("proxy")
    machine.wires.listen(proxy, publisher.endpoint, End.close)
    seconds = _of(faults).dice.choice((0.5, 2.0))
    machine.world.after(seconds, lambda: proxy.end("ended"))
    publisher.begin_again(seconds + 0.01)


def publisher_sends_too_much(faults: "Faults") -> None:
    """One message above the daemon's limit."""
    publisher = _of(faults).one()
    publisher.does(publisher.oversize)


def publisher_sends_junk(faults: "Faults") -> None:
    """Data that is no ZeroMQ."""
    publisher = _of(faults).one()
    publisher.does(publisher.junk)


def publisher_numbers_end(faults: "Faults") -> None:
    """Numbers at the end of their range."""
    hostile = _of(faults).hostile()
    hostile.does(hostile.numbers)


def publisher_grows(faults: "Faults") -> None:
    """Pools, blocks and topics without end."""
    hostile = _of(faults).hostile()
    hostile.does(hostile.growth)


def publisher_sends_garbage(faults: "Faults") -> None:
    """Payloads that are none."""
    hostile = _of(faults).hostile()
    hostile.does(hostile.garbage)


def stream_cut(faults: "Faults") -> None:
    """A connection between the daemon and an engine is lost."""
    if (link := _link(faults)) is not None:
        link.cut()


def stream_half_open(faults: "Faults") -> None:
    """A connection carries nothing any more, and nobody is told."""
    if (link := _link(faults)) is not None:
        link.half_opened()


def publisher_loses_power(faults: "Faults") -> None:
    """The machine of a publisher is gone with its connections, and nobody is told; it comes back with a new life."""
    streams, wires = _of(faults), faults.simulation.machine.wires
    publisher, seconds = streams.one(), streams.dice.choice((1.0, 4.0))
    places = {publisher.endpoint, publisher.replay or publisher.endpoint}
    wires.dark |= places
    for link in list(wires.links):
        if publisher.process in (link.ends[0].process, link.ends[1].process):
            link.half_opened()
    publisher.process.kill()
    faults.simulation.world.after(seconds, lambda: wires.dark.difference_update(places))
    publisher.begin_again(seconds)


STREAM_KINDS: Final[dict[str, Callable[["Faults"], None]]] = {
    kind.__name__: kind for kind in (
        publisher_killed, publisher_frozen, publisher_is_proxied, publisher_sends_too_much, publisher_sends_junk,
        publisher_numbers_end, publisher_grows, publisher_sends_garbage, stream_cut, stream_half_open,
        publisher_loses_power,
    )
}
"""Faults of a run with publishers."""
