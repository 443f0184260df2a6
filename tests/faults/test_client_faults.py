"""Faults of clients: killed or frozen while they hold a slot, a thousand that come and go, bytes that mean nothing."""

import asyncio
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError

from kvbm_console.client import Client
from kvbm_console.core import stimuli as st
from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.core.events import PROTOCOL_MINOR, HoldReleased
from kvbm_console.core.ids import HoldEnd
from kvbm_console.stream.feed import EventsArrived
from kvbm_console.wire.protocol import MESSAGE_BYTES_MAX, PROTOCOL_MAJOR, ROLE_OF, method_path
from kvbm_console.wire.v1 import console_pb2 as pb
from tests.server.daemons import Process, daemon_at, process, socket_directory, until

pytestmark = pytest.mark.fault
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
MULTITURN = "multiturn:seed=3"

HOLDER = """
import asyncio, sys
from kvbm_console.client import Client
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import SlotState
from kvbm_console.stream.verbs import SetBreakpoint

async def main():
    async with Client(sys.argv[1]) as client, client.control("holder") as session:
        await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.PREFILLING, one_shot=True)))
        print("armed")
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def held_by_a_process(client: Client, child: Process) -> int:
    """The number of the hold that a process of ours keeps."""
    assert await asyncio.to_thread(child.line) == "armed"
    status = await until(client, lambda status: bool(status["holds"]))
    return int(status["holds"][0]["id"])


async def released(client: Client, hold: int, number: int, child: Process) -> tuple[HoldReleased, float]:
    """Send a signal to the holder; the release of its hold and how many seconds that took."""
    async with client.subscribe() as stream:
        await anext(stream)
        begin = time.monotonic()
        child.send(number)
        async for item in stream:
            if isinstance(item, EventsArrived):
                for event in item.events:
                    if isinstance(event, HoldReleased) and event.hold == hold:
                        return event, time.monotonic() - begin
    raise AssertionError("the daemon ended")


@pytest.mark.asyncio
async def test_f10_a_client_that_is_killed_lets_go_within_a_second() -> None:
    async with daemon_at(MULTITURN, speed=2.0) as daemon, Client(daemon.address) as client:
        with process("-c", HOLDER, daemon.address) as child:
            hold = await held_by_a_process(client, child)
            event, took = await released(client, hold, signal.SIGKILL, child)
        assert (event.why, event.by) == (HoldEnd.LEASE_LOST, "holder-1")
        assert took <= 1.0
        (breakpoint_,) = (await client.status())["breakpoints"]
        assert not breakpoint_["enabled"]


@pytest.mark.asyncio
@pytest.mark.parametrize("ttl_s", [1, pytest.param(5, marks=SLOW)])
async def test_f11_a_client_that_is_frozen_lets_go_when_its_lease_ends(ttl_s: int) -> None:
    async with daemon_at(MULTITURN, speed=2.0, lease_ttl_ns=ttl_s * 10**9) as daemon, Client(daemon.address) as client:
        with process("-c", HOLDER, daemon.address) as child:
            hold = await held_by_a_process(client, child)
            event, took = await released(client, hold, signal.SIGSTOP, child)
            assert event.why is HoldEnd.LEASE_LOST
            assert took <= ttl_s + 0.5
            child.send(signal.SIGCONT)  # it wakes up and renews: alive again, its breakpoint stays disabled
            await until(client, lambda status: bool(daemon.service.leases.owners))
            assert not any(entry["enabled"] for entry in (await client.status())["breakpoints"])


DAEMON = """
import asyncio, sys
from server.daemon import run_daemon
from tests.server.daemons import options_for

asyncio.run(run_daemon(options_for(None, sys.argv[1]), on_ready=lambda d: print(d.address)))
"""


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.asyncio
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("count", [30, pytest.param(1_000, marks=SLOW)])
async def test_f8_clients_that_come_and_go_leave_nothing_behind(count: int) -> None:
    with socket_directory() as place, process("-c", DAEMON, f"unix:{place}/d.sock") as child:
        address = await asyncio.to_thread(child.line)

        async def visit() -> None:
            async with Client(address) as client:
                await client.hello()
                async with client.subscribe() as stream:
                    await anext(stream)

        async def settled(most: int, questions: int) -> int:
            """Descriptors once they are back, or after so many questions all of which were answered."""
            async with Client(address) as client:
                for _ in range(questions):
                    await client.status()
                    if descriptors(child.pid) - 1 <= most:
                        break
                return descriptors(child.pid) - 1

        for _ in range(20):
            await visit()
        before, memory = await settled(0, 100), resident_bytes(child.pid)
        for _ in range(count):
            await visit()
        for _ in range(0, count, 20):
            halves = [socket.socket(socket.AF_UNIX) for _ in range(20)]
            for half in halves:
                half.connect(address.removeprefix("unix:"))
            async with Client(address) as client:
                await client.status()
            for half in halves:
                half.close()
        assert await settled(before + 2, 2_000) <= before + 2
        assert resident_bytes(child.pid) - memory <= 10 * 1024 * 1024


REQUESTS: dict[str, Any] = {
    "Hello": pb.HelloRequest, "Subscribe": pb.SubscribeRequest, "SlotDetail": pb.SlotDetailRequest,
    "Query": pb.QueryRequest, "Control": pb.ControlRequest, "Feed": pb.FeedRequest,
    "Recording": pb.RecordingRequest,
}


def malformed(rng: random.Random, kind: Any) -> bytes:
    """Bytes that no parser takes for this message."""
    while True:
        data = rng.randbytes(rng.randint(1, 60))
        try:
            kind.FromString(data)
        except DecodeError:
            return data


async def status_of(channel: Any, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """How a daemon answers these bytes."""
    path = method_path(method)
    try:
        if method == "Subscribe":
            await channel.unary_stream(path)(data).read()
        elif method in ("Control", "Feed"):
            call = channel.stream_stream(path)()
            await call.write(data)
            await call.read()
            call.cancel()
        else:
            await channel.unary_unary(path)(data)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [240, pytest.param(10_000, marks=SLOW)])
async def test_f14_bytes_that_mean_nothing_are_answered_with_a_sentence(count: int) -> None:
    assert set(REQUESTS) == set(ROLE_OF)
    rng = random.Random(14)
    async with daemon_at(None) as daemon, Client(daemon.address) as client:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            for index in range(count):
                method = list(REQUESTS)[index % len(REQUESTS)]
                code, details = await status_of(channel, method, malformed(rng, REQUESTS[method]))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert details == f"the bytes are not a {REQUESTS[method].__name__}"
        await client.status()
        assert not daemon.service.broadcaster.subscribers


@pytest.mark.asyncio
async def test_f15_what_is_too_large_is_refused() -> None:
    async with daemon_at(None) as daemon, Client(daemon.address) as client:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            for method in REQUESTS:
                code, _ = await status_of(channel, method, bytes(10 * 1024 * 1024))
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, method
            long = pb.SlotDetailRequest(request="r" * 1024 * 1024).SerializeToString()
            assert len(long) < MESSAGE_BYTES_MAX
            code, details = await status_of(channel, "SlotDetail", long)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("a SlotDetail message has at most 262144 bytes, got 10485")
        with pytest.raises(UsageError, match="request has at most 256 bytes, got 257"):
            await client.slot_detail("r" * 257)
        async with client.feed("engine") as feed:
            with pytest.raises(UsageError, match="request must be at most 256 bytes"):
                await feed.submit(st.MatchRequested, "r" * 1024 * 1024, 0)
        assert [slot["request"] for slot in (await client.status())["slots"]] == []


@pytest.mark.asyncio
async def test_another_major_version_is_refused_by_naming_both() -> None:
    async with daemon_at(None) as daemon, grpc.aio.insecure_channel(daemon.address) as channel:
        request = pb.HelloRequest(protocol=pb.Version(major=7, minor=2), client="of the future")
        code, details = await status_of(channel, "Hello", request.SerializeToString())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == f"the daemon speaks protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, the client 7.2"


@pytest.mark.asyncio
async def test_a_method_without_a_role_is_closed_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with daemon_at(None) as daemon, Client(daemon.address) as client:
        monkeypatch.delitem(ROLE_OF, "Query")
        with pytest.raises(Refused, match="Query declares no role and is closed"):
            await client.status()
