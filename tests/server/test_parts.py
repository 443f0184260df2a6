"""A task or thread of the daemon that ends: an event, a warning and a metric, and it runs again.

Law of this file: each part is ended by an exception from inside, and the test waits for the event that tells it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbm_console.client import Client
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.ids import Note
from kvbm_console.parts import RESTARTS_AT_ONCE, Parts
from kvbm_console.recording.verify import verify
from kvbm_console.stream.feed import EventsArrived, Heartbeat
from kvbm_console.wire.protocol import SERVICE
from server.daemon import Daemon
from tests.server.daemons import daemon_at

WHY = "RuntimeError: a bug of ours"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log of these ends is not what is looked at."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def failing(target: Any, name: str, times: int = 1) -> None:
    """The next ``times`` calls of a method raise."""
    real, left = getattr(target, name), [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("a bug of ours")
        return real(*args, **kwargs)

    setattr(target, name, call)


ENDS: dict[str, Callable[[Daemon], None]] = {
    "heartbeat": lambda daemon: failing(daemon.service.broadcaster, "beat"),
    "leases": lambda daemon: failing(daemon.service.leases, "expire"),
    "recorder": lambda daemon: failing(daemon.service.recorder._queue, "done"),  # type: ignore[union-attr]
    "recorder sync": lambda daemon: failing(daemon.service.recorder._syncer, "_pass"),  # type: ignore[union-attr]
    "recorder seal": lambda daemon: failing(daemon.service.recorder._sealer, "retain"),  # type: ignore[union-attr]
}


@asynccontextmanager
async def notes_of(daemon: Daemon) -> AsyncIterator[Callable[[], Any]]:
    """The notes about parts, as a subscriber gets them."""
    async with Client(daemon.address) as client, client.subscribe() as stream:

        async def notes() -> AsyncIterator[tuple[Note, str]]:
            async for item in stream:
                for event in item.events if isinstance(item, EventsArrived) else ():
                    if isinstance(event, ev.Noted) and event.note in (Note.PART_ENDED, Note.PART_RESTARTED):
                        yield event.note, event.detail

        found = notes()
        yield lambda: anext(found)


@pytest.mark.asyncio
@pytest.mark.parametrize("part", ENDS)
async def test_a_part_that_ends_is_told_and_runs_again(tmp_path: Path, part: str) -> None:
    async with daemon_at(None, record=tmp_path / "run", metrics="127.0.0.1:0") as daemon, notes_of(daemon) as note:
        ENDS[part](daemon)
        if part == "recorder seal":
            daemon.service.recorder._sealer.add(tmp_path / "nothing")  # type: ignore[union-attr]
        daemon.service.submit(st.NoteReported, Note.ENGINE_SUMMARY, "something to write")
        assert await note() == (Note.PART_ENDED, f"{part}: {WHY}")
        assert await note() == (Note.PART_RESTARTED, part)
        async with Client(daemon.address) as client:
            document = await client.status()
            row = next(row for row in document["parts"] if row["part"] == part)
            assert row == {"part": part, "healthy": True, "ended": 1, "restarted": 1, "why": WHY}
            assert document["warnings"] == [f"{part} ended and was restarted: {WHY}"]
            async with client.subscribe() as stream:
                async for item in stream:
                    if isinstance(item, Heartbeat):
                        assert item.warnings == tuple(document["warnings"])
                        break
        page = daemon._metrics_page()
        assert f'kvbm_part_healthy{{part="{part}"}} 1' in page
        assert f'kvbm_part_ended_total{{part="{part}"}} 1' in page
        assert "kvbm_questions_refused_total 0" in page
    report = verify(tmp_path / "run")
    assert report.ok, report


@pytest.mark.asyncio
@pytest.mark.parametrize("regardless", [False, True])
async def test_a_recorder_that_cannot_be_restarted_is_no_service(tmp_path: Path, regardless: bool) -> None:
    async with (
        daemon_at(None, record=tmp_path / "run", healthy_without_recorder=regardless) as daemon,
        notes_of(daemon) as note, grpc.aio.insecure_channel(daemon.address) as channel,
    ):
        recorder = daemon.service.recorder
        assert recorder is not None
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
        failing(recorder._queue, "done", times=RESTARTS_AT_ONCE + 1)
        for end in range(RESTARTS_AT_ONCE + 1):
            daemon.service.submit(st.NoteReported, Note.ENGINE_SUMMARY, "something to write")
            assert await note() == (Note.PART_ENDED, f"recorder: {WHY}")
            if end < RESTARTS_AT_ONCE:
                assert await note() == (Note.PART_RESTARTED, "recorder")
        status = recorder.status()
        assert (status.state, status.reason) == ("degraded", "its thread 'recorder' ended")
        assert daemon.service.parts.warnings() == [f"recorder ended: {WHY}"]
        if regardless:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        else:
            while (await watched.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
        daemon.service.parts._monotonic = lambda: 10**18  # a minute later
        assert await note() == (Note.PART_RESTARTED, "recorder")
        if not regardless:
            while (await watched.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
        assert await asyncio.to_thread(recorder.settle)
        watched.cancel()
    assert verify(tmp_path / "run").ok


@pytest.mark.asyncio
async def test_a_task_that_returns_has_not_failed() -> None:
    told: list[object] = []
    parts = Parts(lambda *args: told.append(args))

    async def done() -> None:
        return

    await parts.keep("a task", done)
    assert parts.is_healthy("a task")
    assert not told
    assert not parts.warnings()
