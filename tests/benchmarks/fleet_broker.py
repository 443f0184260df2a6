"""``python -m tests.benchmarks.fleet_broker 1000``: a view of a fleet at a real NATS broker, and its share of a core.

One process publishes the summaries of all daemons, each every two seconds and with a full digest, and answers their
questions. So the figures are those of the looking side, which looks and draws as the screen does. It fetches the last
summary of each daemon at each look, and the summaries that came are counted.
"""

import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from kvbm_console.analysis.digest import MISSING_MAX, Digest
from kvbm_console.analysis.fleet import DaemonSummary, Located
from kvbm_console.client.broker import (
    Broker,
    FleetAnswer,
    FleetQuestion,
    PublishedSummary,
    broker_address,
    keep_summaries,
)
from kvbm_console.client.brokered import BrokeredFleet
from server.publisher import LOOKED_S
from tests.server.brokers import nats_server
from tui.fleet import SUMMED_A_SECOND, FleetDesk

ROUNDS = 15
SCREEN = 200, 60
HOLDERS = 4


def summary_of(at: int) -> PublishedSummary:
    """A daemon whose digest is full; fifty kinds of loads."""
    chance, digest = random.Random(at % 50), Digest(prompt_blocks=1_000, hits=[300, 200, 100, 0])
    for _ in range(MISSING_MAX):
        digest.missing.add(chance.getrandbits(60), chance.randint(1, 500), "evicted")
    for _ in range(100):
        digest.latency.add(chance.randint(10**6, 10**9))
        digest.first_token.add(chance.randint(10**6, 10**8))
    told = DaemonSummary(
        f"prod-{at}", "bench", "x", 1, 1, True, 0, slots={"decoding": 3}, tiers={"g1": (100, 512)}, digest=digest
    )
    return PublishedSummary(told, f"10.0.0.1:{at}", "bench", LOOKED_S)


async def publish(url: str, count: int, ready: Connection) -> None:
    """Publish until killed."""
    address = broker_address(url, "broker")
    async with Broker(address, "bench") as broker:
        await keep_summaries(broker)
        client = broker.client

        async def asked(message: Any) -> None:
            if message.reply:
                hashes = msgspec.msgpack.decode(message.data, type=FleetQuestion).hashes
                for at in range(count):
                    tiers = ["g1"] if at < HOLDERS else []
                    answer = FleetAnswer(f"prod-{at}", [Located(tiers=tiers) for _ in hashes])
                    await client.publish(message.reply, msgspec.msgpack.encode(answer))

        await client.subscribe(address.questions, cb=asked)
        messages = [(address.subject(f"prod-{at}", "sum"), msgspec.msgpack.encode(summary_of(at)))
                    for at in range(count)]
        for subject, data in messages:
            await client.publish(subject, data)
        await client.flush()
        ready.send(len(messages[0][1]))
        began, sent = time.monotonic(), 0
        while True:
            while sent < (time.monotonic() - began) * count / LOOKED_S:
                await client.publish(*messages[sent % count])
                sent += 1
            await asyncio.sleep(0.01)


@contextmanager
def measured(what: str) -> Iterator[None]:
    """Print wall and processor time of the block."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    print(f"{what}: {time.perf_counter() - wall:.3f} s, {time.process_time() - cpu:.3f} s of processor", flush=True)


async def look(url: str, count: int) -> None:
    """Look at the fleet, ask it, and go on looking."""
    heard = 0

    class Counting(BrokeredFleet):
        def _fresh_at(self, subject: str, data: bytes, heard_s: float) -> None:
            nonlocal heard
            heard += 1
            super()._fresh_at(subject, data, heard_s)

    fleet = Counting(broker_address(url, "broker"))
    with measured("all rows"):
        await fleet.__aenter__()
    print(f"{len(fleet.rows)} rows")
    with measured("who-has"):
        found = await fleet.find([1])
    print(f"{len(found)} answers, {sum(bool(answers[0].tiers) for answers in found.values())} have it")
    wall, cpu, heard = time.perf_counter(), time.process_time(), 0
    desk = FleetDesk()
    for _ in range(ROUNDS):
        desk.report = await fleet.look(count / SUMMED_A_SECOND)
        desk.draw(*SCREEN)
        await asyncio.sleep(LOOKED_S)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{ROUNDS} looks: {heard / wall:.0f} summaries a second, {100 * cpu / wall:.1f} % of a core, "
          f"{1e3 * cpu / max(1, heard):.3f} ms a summary")
    await fleet.__aexit__()


def main() -> None:
    """Measure a fleet of the size in the first argument."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place, nats_server(Path(place) / "broker") as server:
        mine, theirs = spawn.Pipe()
        url = f"nats://{server.address}"
        publisher = spawn.Process(target=_publish, args=(url, count, theirs), daemon=True)
        publisher.start()
        print(f"summaries of {mine.recv():,} bytes")
        asyncio.run(look(url, count))
        publisher.kill()


def _publish(url: str, count: int, ready: Connection) -> None:
    asyncio.run(publish(url, count, ready))


if __name__ == "__main__":
    main()
