"""One contract for the four sources of a daemon's events: its memory, its files, its own stream, and a broker.

Law of this file: each source gives every event once and in order as of where it begins, and the same facts at the end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from kvbm_console.client import Client
from kvbm_console.client.broker import Broker, broker_address
from kvbm_console.client.event_stream import PublishedEvents
from kvbm_console.client.subscription import Ended
from kvbm_console.core.events import Event
from kvbm_console.core.snapshots import decode_facts, digest
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from kvbm_console.stream.ring import Ring
from kvbm_console.wire.batches import unpack_events
from server.daemon import Daemon
from tests.server.brokers import nats_server
from tests.server.daemons import daemon_at, finished, published

LOAD: Final = "multiturn:requests=40,sessions=6,system=64,turns=3"
Told = tuple[CacheState, list[Event]]
"""The facts with which a source begins, and its events."""


async def memory(daemon: Daemon, files: Path, broker: str) -> Told:
    base, ring = daemon.service.oldest_snapshot(), daemon.service.ring
    events = [event for data in ring.data_since(base.seq) for event in unpack_events(data) if event.seq >= base.seq]
    return decode_facts(base.facts), events


async def file(daemon: Daemon, files: Path, broker: str) -> Told:
    recorder = daemon.service.recorder
    assert recorder is not None
    while recorder.status().written_seq < daemon.service.state.seq - 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    recording = Recording.open(files)
    keyframe = recording.keyframe(recording.first_seq)
    assert keyframe is not None
    return decode_facts(keyframe.facts), [event for events in recording.events(keyframe.seq) for event in events]


async def stream(daemon: Daemon, files: Path, broker: str) -> Told:
    async with Client(daemon.address) as client, client.subscribe(history=True) as items:
        found, events = None, list[Event]()
        async for item in items:
            if isinstance(item, SnapshotTaken):
                found = item.state
            elif isinstance(item, EventsArrived):
                events += item.events
            if found is not None and found.seq + len(events) == daemon.service.state.seq:
                return found, events
    raise AssertionError("the stream ended too early")


async def at_broker(daemon: Daemon, files: Path, broker: str) -> Told:
    found, events = None, list[Event]()
    async with Broker(broker_address(broker, "fleet"), "test") as asked:
        published_events = PublishedEvents(asked, "one")
        while found is None or found.seq + len(events) < daemon.service.state.seq:
            async for item in published_events.items():
                assert not isinstance(item, Ended)
                if isinstance(item, SnapshotTaken):
                    found = item.state
                elif isinstance(item, EventsArrived):
                    events += item.events
    return found, events


@pytest.mark.asyncio
@pytest.mark.parametrize("source", [memory, file, stream, at_broker])
async def test_a_source_gives_every_event_once_and_the_facts(
    source: Callable[[Daemon, Path, str], Awaitable[Told]], tmp_path: Path
) -> None:
    with nats_server(tmp_path / "broker") as server:
        address, files = f"nats://{server.address}", tmp_path / "run"
        async with daemon_at(LOAD, target="one", speed=None, ring=Ring(100_000), record=files,
                             fleet=broker_address(address, "fleet"), fleet_events=True) as daemon:
            await published(daemon, lambda: finished(daemon) == 40)
            daemon.service.broadcaster.flush()
            state, whole = daemon.service.state, await memory(daemon, files, address)
            assert len(whole[1]) > 1_000
            facts, events = await source(daemon, files, address)
            assert [event.seq for event in events] == list(range(facts.seq, state.seq))
            first = max(facts.seq, whole[0].seq)  # a file may begin before the oldest snapshot in memory
            assert events[first - facts.seq :] == whole[1][first - whole[0].seq :]
            for event in events:
                facts.apply(event)
            assert digest(facts) == digest(state)
