"""The order of a daemon's events at a broker, whatever its client keeps across reconnects.

A client of NATS keeps what it sent while the connection is away, and sends it when the connection is back, which may be
long after the sender gave up and sent the message again. So a message may be stored late, twice, or behind those that
followed it.

Law of this file: a reader has every event once and in order. A publisher with several messages under way breaks it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbm_console.client.broker import BrokerAddress
from kvbm_console.client.event_stream import PublishedEvents
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.ids import Note
from kvbm_console.core.snapshots import digest
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.service import LeaderService
from server import event_publisher
from server.event_publisher import EventPublisher
from tests.server.daemons import Mirror

DEDUPED = 4
"""Ids that this broker remembers. NATS remembers those of two minutes."""


class Network:
    """A broker, and what its clients still keep."""

    def __init__(self, dice: Random, faults: float) -> None:
        self.dice = dice
        self.faults = faults
        """The share of the messages that are kept, and of those whose answer is lost."""
        self.stored: list[bytes] = []
        self.ids: list[str] = []
        self.kept: list[tuple[str, bytes]] = []
        self.late = 0

    def store(self, name: str, data: bytes) -> bool:
        """True if the broker remembered that it has this message."""
        if name in self.ids[-DEDUPED:]:
            return True
        self.ids.append(name)
        self.stored.append(data)
        return False

    async def publish(self, subject: str, data: bytes, headers: dict[str, str], stream: str) -> Any:
        """Stored and answered, stored and not answered, or kept by the client, and stored later."""
        name = headers["Nats-Msg-Id"]
        await asyncio.sleep(0)
        fate = self.dice.random()
        if self.kept and self.dice.random() < 0.3:
            self.late += 1
            self.store(*self.kept.pop(0))
        if fate < self.faults:
            self.kept.append((name, data))
            raise TimeoutError
        duplicate = self.store(name, data)
        if fate < 2 * self.faults:
            raise TimeoutError
        return SimpleNamespace(duplicate=duplicate, seq=len(self.stored))


class Connection:
    """The part of ``Broker`` that a publisher uses."""

    def __init__(self, network: Network) -> None:
        self.lost = asyncio.Event()
        self.jetstream = network

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ConnectionLost("no answer") from None


class Reader(PublishedEvents):
    """Reads what the broker has stored."""

    def __init__(self, network: Network) -> None:
        super().__init__(cast(Any, SimpleNamespace(address=BrokerAddress("nats://here", "here"))), "one")
        self.network = network

    async def _messages(self, follow: bool) -> AsyncIterator[tuple[bytes, int]]:
        for data in self.network.stored:
            yield data, 0


class Hasty(EventPublisher):
    """Has up to 16 messages under way, and sends those again that were not answered."""

    async def _publish(self, broker: Any) -> None:
        assert self._subscriber is not None
        while not (self._bye and not self._queue):
            while len(self._queue) < 16 and not self._bye and self._service.ring.pending(self._subscriber.cursor):
                self._fill(self._subscriber)
            if not self._queue:
                self._fill(self._subscriber)
            several = list(self._queue)
            done = await asyncio.gather(*(self._store(broker, *one) for one in several), return_exceptions=True)
            self._queue.clear()
            self._queue.extend(one for one, result in zip(several, done, strict=True) if result is not None)
            if not self._queue:
                await self._wait(broker, self._subscriber)


async def is_exact(
    kind: type[EventPublisher], seed: int, monkeypatch: pytest.MonkeyPatch, *, faults: float = 0.1
) -> bool:
    """Publish some hundred events through a bad network. True if a reader has all of them and the facts."""
    dice = Random(seed)
    network, service = Network(dice, faults), LeaderService(LeaderConfig(), lambda: 0)

    async def kept(broker: object) -> object:
        return "stream"

    monkeypatch.setattr(event_publisher, "Broker", lambda address, name: Connection(network))
    monkeypatch.setattr(event_publisher, "keep_events", kept)
    publisher = kind(BrokerAddress("nats://here", "here"), service, "one")
    publisher.begin()
    for _ in range(60):
        for _ in range(dice.randrange(1, 8)):
            service.submit(NoteReported, Note.CLOCK_STEPPED, "x" * dice.randrange(200))
        service.broadcaster.flush()
        for _ in range(dice.randrange(6)):
            await asyncio.sleep(0)
    service.close()
    await publisher.finish()
    for one in network.kept:
        network.store(*one)
    mirror, reader = Mirror(), Reader(network)
    try:
        async for item in reader.items():
            mirror.take(item)
    except (AssertionError, ConnectionLost):
        return False
    assert len(network.stored) > 30
    ended = reader.ended is not None and reader.ended.last_seq == service.state.seq - 1
    return ended and reader.received == service.state.seq - (reader.start or 0) and (
        mirror.digest == digest(service.state)
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RETRY_S", (0, 0)), ("GATHER_S", 0.0), ("MESSAGE_BYTES", 400), ("FINISH_S", 20.0)):
        monkeypatch.setattr(event_publisher, name, value)


@pytest.mark.asyncio
@pytest.mark.fault
@pytest.mark.parametrize("seed", range(12))
async def test_every_event_comes_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await is_exact(EventPublisher, seed, monkeypatch)


@pytest.mark.asyncio
async def test_several_messages_under_way_lose_events(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all([await is_exact(Hasty, seed, monkeypatch, faults=0.0) for seed in range(4)])
    assert not all([await is_exact(Hasty, seed, monkeypatch) for seed in range(4)])
