"""A real daemon on a real socket: hello, questions, the stream, a debugger session, an engine that feeds."""

import asyncio
import contextlib
import subprocess
import sys

import grpc
import grpc.aio
import pytest

from kvbm_console.client import Client, Ended, FeedClient
from kvbm_console.client.live import LiveFeed
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_ids
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, Refused, UsageError
from kvbm_console.core.events import PROTOCOL_MINOR
from kvbm_console.core.ids import Authority, CandidateStatus, FinishReason, ResetMode, Route, SlotState, Tier
from kvbm_console.core.instructions import FinishAnswer, MatchAnswer, StartTransfer, ZeroBlocks
from kvbm_console.stream.feed import SnapshotTaken
from kvbm_console.stream.verbs import ContinueHold, Disarm, EnableBreakpoint, RemoveBreakpoint, SetBreakpoint
from kvbm_console.wire.batches import MSGPACK, PROTOBUF
from kvbm_console.wire.protocol import PROTOCOL_MAJOR, method_path, process_began
from kvbm_console.wire.v1 import console_pb2 as pb
from server.daemon import Daemon
from tests.server.daemons import (
    Mirror,
    daemon_at,
    follow_until,
    options_for,
    published,
    running,
    socket_directory,
    until,
)

MULTITURN = "multiturn:seed=3"


@pytest.mark.asyncio
async def test_hello_status_and_digest() -> None:
    identity = {"program": "9.9", "target": "a machine", "block_bytes": 4096}
    async with daemon_at(MULTITURN, **identity) as daemon, Client(daemon.address) as client:
        hello = await client.hello()
        assert hello.protocol == (PROTOCOL_MAJOR, PROTOCOL_MINOR)
        assert (hello.program, hello.control, hello.target) == ("9.9", True, "a machine")
        assert hello.incarnation == daemon.service.incarnation
        assert hello.config_digest == daemon.options.config.digest()
        assert hello.block_bytes == 4096
        status = await client.status()
        assert set(status) == {
            "slots", "tiers", "transfers", "breakpoints", "holds", "ended_holds", "frozen", "stream", "recorder",
            "engines", "publishers", "prefetch", "thrash", "parts", "warnings",
        }
        seq, digest = await client.digest()
        assert seq >= 0
        assert 0 <= digest < 2**64


@pytest.mark.asyncio
@pytest.mark.parametrize("encoding", [MSGPACK, PROTOBUF], ids=["msgpack", "protobuf"])
async def test_a_mirror_has_the_leaders_digest_at_heartbeats(encoding: int) -> None:
    async with daemon_at(MULTITURN, speed=2.0) as daemon, Client(daemon.address) as client:
        mirror, compared = Mirror(), [0]
        async with client.subscribe(encoding=encoding, digests=True) as stream:

            def done() -> bool:
                if stream.digest is not None:
                    assert stream.digest == (stream.position, mirror.digest)
                    stream.digest = None
                    compared[0] += 1
                return compared[0] >= 2 and stream.received > 300

            await follow_until(stream, mirror, done)
        assert mirror.snapshots == 1
        assert stream.lost == 0


@pytest.mark.asyncio
async def test_resuming_continues_without_a_snapshot_and_history_has_the_same_events() -> None:
    async with daemon_at(MULTITURN, speed=None) as daemon, Client(daemon.address) as client:
        mirror = Mirror()
        async with client.subscribe() as stream:
            await follow_until(stream, mirror, lambda: stream.received >= 2_000)
            position = stream.position
        assert position is not None
        async with client.subscribe(after_seq=position - 1, incarnation=daemon.service.incarnation) as again:
            await follow_until(again, mirror, lambda: again.received >= 500)
            assert (again.start, again.lost, mirror.snapshots) == (position, 0, 1)
        past, oldest = await client.history(position, 10)
        assert [event.seq for event in past] == list(range(position, position + 10))
        assert oldest == daemon.service.ring.first_seq


@pytest.mark.asyncio
async def test_another_incarnation_is_a_gap_and_a_snapshot() -> None:
    async with daemon_at(MULTITURN, speed=None) as daemon, Client(daemon.address) as client:
        await until(client, lambda status: status["stream"]["head_seq"] > 10_000)
        mirror = Mirror()
        async with client.subscribe(after_seq=3, incarnation="of another run") as stream:
            await follow_until(stream, mirror, lambda: mirror.state is not None)
        assert [gap.reason for gap in mirror.gaps] == ["restarted"]
        with pytest.raises(UsageError, match="after_seq must be from -1 to"):
            async with client.subscribe(after_seq=2**40, incarnation=daemon.service.incarnation) as stream:
                await anext(stream)


@pytest.mark.asyncio
async def test_a_session_holds_a_slot_while_the_others_run() -> None:
    async with daemon_at(MULTITURN, speed=4.0) as daemon, Client(daemon.address, name="me") as client:
        async with client.control() as session:
            assert session.owner == "me-1"
            verdict = await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.PREFILLING, one_shot=True)))
            assert verdict.verified
            status = await until(client, lambda status: bool(status["holds"]))
            (hold,) = status["holds"]
            assert (hold["owner"], hold["site"], hold["breakpoints"]) == ("me-1", "transition.did", [str(verdict.id)])
            head = status["stream"]["head_seq"]
            status = await until(client, lambda status: status["stream"]["head_seq"] > head + 200)
            assert [entry["id"] for entry in status["holds"]] == [hold["id"]]
            row, story = await client.slot_detail(int(hold["slot"]))
            assert row["hold"] == hold["id"]
            assert any("SlotHeld" in line for line in story)
            assert await session.ask(ContinueHold(int(hold["id"]))) == "continued"
            assert await session.ask(ContinueHold(int(hold["id"]))) == "already_continued"
            with pytest.raises(Refused, match="no hold 12345"):
                await session.ask(ContinueHold(12345))
        await published(daemon, lambda: not daemon.service.leases.owners)
        assert daemon.service.state.leases == {}


@pytest.mark.asyncio
async def test_any_session_may_change_any_breakpoint_and_the_shells_outlive_theirs() -> None:
    async with daemon_at(None) as daemon, Client(daemon.address) as client:
        async with client.control("shell", lease=False) as shell:
            first = await shell.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.ONBOARDING)))
            second = await shell.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING)))
        async with client.control("me") as session:
            third = await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.PREEMPTED)))
            await session.ask(EnableBreakpoint(first.id, False))
            await session.ask(RemoveBreakpoint(second.id))
            listed = (await client.status())["breakpoints"]
            assert [(entry["id"], entry["owner"], entry["enabled"]) for entry in listed] == [
                (str(first.id), "daemon", False), (str(third.id), "me-1", True),
            ]
            with pytest.raises(Refused, match="no breakpoint 99"):
                await session.ask(RemoveBreakpoint(99))
            await session.ask(Disarm())
            assert not any(entry["enabled"] for entry in (await client.status())["breakpoints"])
            assert await session.ask(RemoveBreakpoint()) == "removed 2"


@pytest.mark.asyncio
async def test_tcp_grants_observe_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream is begun: one that is refused while its first message is on its way may lose the reason."""
    async with running(options_for(MULTITURN, "127.0.0.1:0")) as daemon, Client(daemon.address) as client:
        monkeypatch.setattr(client._channel, "stream_stream", None)
        assert not (await client.hello()).control
        assert (await client.status())["stream"]["incarnation"] == daemon.service.incarnation
        with pytest.raises(Refused, match="needs the role control; this endpoint grants observe"):
            async with client.control("me"):
                pass
        with pytest.raises(Refused, match="needs the role control"):
            async with client.feed("engine"):
                pass


@pytest.mark.asyncio
async def test_nobody_listens() -> None:
    with socket_directory() as place:
        async with Client(f"unix:{place}/none.sock") as client:
            with pytest.raises(ConnectionLost, match="no daemon listens on unix:"):
                await client.hello()


@pytest.mark.asyncio
async def test_the_end_of_a_daemon_is_told_with_its_last_event() -> None:
    async with daemon_at(MULTITURN, speed=None) as daemon, Client(daemon.address) as client:
        mirror = Mirror()
        async with client.subscribe() as stream:
            async for item in stream:
                mirror.take(item)
                if stream.received > 100:
                    daemon.stop()
                if isinstance(item, Ended):
                    assert item.last_seq == (stream.position or 0) - 1
                    break
        assert mirror.state is not None
        assert mirror.digest == daemon.service.digest()[1]
        assert daemon.service.ring.next_seq == daemon.service.state.seq


@pytest.mark.asyncio
async def test_an_engine_feeds_from_elsewhere() -> None:
    async with daemon_at(None) as daemon, Client(daemon.address) as client:
        async with client.feed("engine") as feed:
            assert feed.source == 1
            await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
            await feed.submit(st.RequestArrived, "r-1", pack_hashes([1, 2, 3]), 50, 10, 0, None)
            assert await feed.submit(st.MatchRequested, "r-1", 0) == MatchAnswer(0, False)
            await feed.submit(st.BlocksAllocated, "r-1", pack_ids([0, 1, 2, 3]), 0)
            with pytest.raises(Refused, match="'r-2' is not known"):
                await feed.submit(st.MatchRequested, "r-2", 0)
            (slot,) = (await client.status())["slots"]
            assert (slot["request"], slot["state"]) == ("r-1", "initialized")
            finished = await feed.submit(st.RequestFinished, "r-1", pack_ids([0, 1, 2, 3]), FinishReason.STOP)
            assert finished == FinishAnswer(False)
            await feed.submit(st.RequestArrived, "r-3", pack_hashes([1, 2]), 40, 10, 0, None)
        status = await until(client, lambda status: not status["slots"])  # its engine is gone: aborted
        assert status["stream"]["head_seq"] > 0
        assert daemon.service.state.totals.finished[FinishReason.ABORTED] == 1


@pytest.mark.asyncio
async def test_a_feed_learns_which_requests_stand_still() -> None:
    async with (
        daemon_at(None) as daemon, Client(daemon.address) as client, client.control("me") as session,
        client.feed("engine") as feed,
    ):
        await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.PREFILLING)))
        await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
        await feed.submit(st.RequestArrived, "r-1", pack_hashes([1, 2, 3]), 50, 10, 0, None)
        await feed.submit(st.MatchRequested, "r-1", 0)
        await feed.submit(st.BlocksAllocated, "r-1", pack_ids([0, 1, 2, 3]), 0)
        await feed.submit(
            st.IterationScheduled, 1, 1, ("r-1",), (), (), (), (), (), ("r-1",), (48,), (), (), b"", 1, 0
        )
        await until(client, lambda status: bool(status["holds"]))
        assert daemon.service.state.standing == {"r-1"}
        await feed.submit(st.IterationFinished, 1, (), (), b"", b"")  # answered behind the news
        assert feed.standing == {"r-1"}
        await session.ask(ContinueHold(None))
        await feed.submit(st.IterationFinished, 1, (), (), b"", b"")
        assert feed.standing == frozenset()


@pytest.mark.asyncio
async def test_a_feed_that_says_what_it_may_not_is_ended_with_a_sentence() -> None:
    async with daemon_at(None) as daemon, Client(daemon.address) as client:
        async with client.feed("engine") as feed:
            with pytest.raises(UsageError, match="capacity_blocks must be from 0 to"):
                await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 2**40, 16, Authority.ENGINE)
        async with client.feed("engine") as feed:
            with pytest.raises(UsageError, match="stimulus must be an entry point of engines"):
                await feed.submit(st.Disarmed, "me")
        assert daemon.service.state.seq >= 2
        await asyncio.wait_for(client.status(), 5)


@pytest.mark.asyncio
async def test_a_feed_that_is_wrong_right_behind_its_opening_is_ended() -> None:
    """One in four got no status: the reply to its opening was still being written, and the library ended no call then.
    """
    async with daemon_at(None) as daemon, grpc.aio.insecure_channel(daemon.address) as channel:
        for _ in range(40):
            stream = channel.stream_stream(method_path("Feed"))()
            with contextlib.suppress(grpc.aio.AioRpcError):  # the status may be there before the message
                await stream.write(pb.FeedRequest(open=pb.OpenFeed(name="engine")).SerializeToString())
                await stream.write(b"\xff")
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await stream.read() is not grpc.aio.EOF:
                    pass
            assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT


CONFIG = LeaderConfig(g2_blocks=64, offload_threshold=0.0)
"""Every new block is copied to the host tier."""


async def fill_two_blocks(feed: FeedClient) -> None:
    """A request whose first two blocks are filled, so that they are copied down."""
    await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
    await feed.submit(st.RequestArrived, "r-1", pack_hashes([1, 2]), 40, 10, 0, None)
    await feed.submit(st.MatchRequested, "r-1", 0)
    await feed.submit(st.BlocksAllocated, "r-1", pack_ids([0, 1, 2]), 0)
    await feed.submit(st.IterationScheduled, 1, 1, ("r-1",), (), (), (), (), (), ("r-1",), (40,), (), (), b"", 1, 0)
    await feed.submit(st.IterationFinished, 1, ("r-1",), (2,), pack_ids([0, 1]), pack_hashes([1, 2]))


@pytest.mark.asyncio
async def test_two_engines_feed_one_daemon_and_number_their_iterations_themselves() -> None:
    async with (
        daemon_at(None) as daemon, Client(daemon.address) as client,
        client.feed("rank 0") as zero, client.feed("rank 1") as one,
    ):
        for name, feed in (("r-0", zero), ("r-1", one)):
            await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
            await feed.submit(st.RequestArrived, name, pack_hashes([]), 10, 99, 0, None)
            await feed.submit(st.MatchRequested, name, 0)
            await feed.submit(st.BlocksAllocated, name, pack_ids([0, 1, 2]), 0)
            scheduled = await feed.submit(
                st.IterationScheduled, 1, 1, (name,), (), (), (), (), (), (name,), (10,), (), (), b"", 1, 0
            )
            assert scheduled.iteration == 1
            for number, first in ((2, (name,)), (3, ())):
                await feed.submit(
                    st.IterationScheduled, number, 1, (), (), (), (), (), first, (), (), (), (), b"", 1, 0
                )
                await feed.submit(st.IterationFinished, number, (), (), b"", b"")
        await zero.submit(st.IterationScheduled, 4, 5, (), (), (), (), (), (), (), (), (), (), b"", 1, 0)
        slots = {slot["request"]: slot["computed_tokens"] for slot in (await client.status())["slots"]}
        assert slots == {"r-0": 10 + 2 + 5, "r-1": 10 + 2}
        assert daemon.service.state.totals.rejected == 0


@pytest.mark.asyncio
async def test_an_engine_that_moves_bytes_is_asked_to_and_reports() -> None:
    async with (
        daemon_at(None, config=CONFIG) as daemon, Client(daemon.address) as client,
        client.feed("engine", moves=True) as feed,
    ):
        with pytest.raises(Refused, match="moved by another feed"):
            async with client.feed("another", moves=True):
                pass
        await fill_two_blocks(feed)
        orders = feed.orders()
        order = await anext(orders)
        assert isinstance(order, StartTransfer)
        assert (order.route, unpack_ids(order.sources), order.blocks) == (Route.G1_G2, [0, 1], 2)
        await feed.submit(st.TransferStarted, order.operation, order.epoch)
        await feed.submit(st.TransferFinished, order.operation, order.epoch, 0)
        assert (await client.status())["tiers"]["g2"]["resident_blocks"] == 2
        assert daemon.service.state.operations == {}


@pytest.mark.asyncio
async def test_copies_of_an_engine_that_moves_no_bytes_are_modelled() -> None:
    async with (
        daemon_at(None, config=CONFIG) as daemon, Client(daemon.address) as client, client.feed("engine") as feed,
    ):
        await fill_two_blocks(feed)
        await published(daemon, lambda: daemon.service.state.totals.moved_blocks == {"G1>G2": 2})


async def lose_a_mover(client: Client, daemon: Daemon, process: int) -> None:
    """A mover of this process opens a feed, gets a copy, and its stream breaks."""
    feed = client.feed("engine", moves=True)
    feed._open.process, feed._open.process_began = process, process_began(process)
    async with feed:
        await fill_two_blocks(feed)
        assert len(daemon.service.state.operations) == 1
    await published(daemon, lambda: not daemon.service.feeds)
    assert len(daemon.service.state.operations) == 1, "it may still write"


def has_failed(daemon: Daemon) -> bool:
    state = daemon.service.state
    failed = state.totals.candidates_ended[CandidateStatus.FAILED] == 1
    return failed and not (state.slots or state.operations or state.candidates)


@pytest.mark.asyncio
async def test_copies_of_a_mover_fail_when_its_process_has_ended_and_not_before() -> None:
    async with daemon_at(None, config=CONFIG) as daemon, Client(daemon.address) as client:
        mover = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
        try:
            await lose_a_mover(client, daemon, mover.pid)
            with pytest.raises(Refused, match=f"'engine' may still copy: its stream broke and its process {mover.pid}"):
                async with client.feed("engine", moves=True):
                    pass
            assert any("places stay reserved" in text for text in daemon.service.parts.warnings())
        finally:
            mover.kill()
        await published(daemon, lambda: has_failed(daemon))
        await mover.wait()
        async with client.feed("engine", moves=True):
            pass


@pytest.mark.asyncio
async def test_a_mover_that_nobody_knows_must_come_back_and_say_that_its_copies_ended() -> None:
    async with daemon_at(None, config=CONFIG) as daemon, Client(daemon.address) as client:
        await lose_a_mover(client, daemon, 0)
        with pytest.raises(Refused, match="may still copy: its stream broke and its process is not known here"):
            async with client.feed("another", moves=True, settled=True):
                pass
        async with client.feed("engine", moves=True, settled=True):
            assert has_failed(daemon)


@pytest.mark.asyncio
async def test_a_mover_that_has_stopped_its_copies_says_so() -> None:
    async with daemon_at(None, config=CONFIG) as daemon, Client(daemon.address) as client:
        async with client.feed("engine", moves=True) as feed:
            await fill_two_blocks(feed)
            await feed.copies_stopped()
            await published(daemon, lambda: has_failed(daemon))
        assert not daemon.service.parts.warnings()


TWO_RANKS = LeaderConfig(g2_blocks=64, offload_threshold=0.0, ranks=2)


async def ordered(mover: FeedClient) -> StartTransfer:
    """The next order of a mover, which is a copy."""
    order = await anext(mover.orders())
    assert isinstance(order, StartTransfer)
    return order


@pytest.mark.asyncio
async def test_each_rank_may_have_a_mover_of_its_own() -> None:
    async with (
        daemon_at(None, config=TWO_RANKS) as daemon, Client(daemon.address) as client, client.feed("engine") as engine,
        client.feed("rank 0", moves=True, rank=0) as zero, client.feed("rank 1", moves=True, rank=1) as one,
    ):
        for settings, words in (({}, "the bytes of rank 0 are moved by another feed"),
                                ({"rank": 1}, "the bytes of rank 1 are moved by another feed"),
                                ({"rank": 2}, "rank must be from 0 to 1, got 2")):
            with pytest.raises(KvbmConsoleError, match=words):
                async with client.feed("another", moves=True, **settings):  # type: ignore[arg-type]
                    pass
        await fill_two_blocks(engine)
        state, order = daemon.service.state, await ordered(zero)
        assert await ordered(one) == order
        for rank, mover in enumerate((zero, one)):
            await mover.submit(st.TransferStarted, order.operation, order.epoch)
            with pytest.raises(Refused, match=f"rank must be {rank} on this feed, got {1 - rank}"):
                await mover.submit(st.TransferFinished, order.operation, order.epoch, 1 - rank)
            assert len(state.operations) == 1
            await mover.submit(st.TransferFinished, order.operation, order.epoch, rank)
        assert (state.operations, state.totals.moved_blocks) == ({}, {"G1>G2": 2})
        assert state.totals.completions_refused == 0


@pytest.mark.asyncio
async def test_movers_zero_their_pools_behind_the_copies_of_a_physical_reset() -> None:
    async with (
        daemon_at(None, config=TWO_RANKS) as daemon, Client(daemon.address) as client, client.feed("engine") as engine,
        client.feed("rank 0", moves=True, rank=0) as zero, client.feed("rank 1", moves=True, rank=1) as one,
    ):
        await fill_two_blocks(engine)
        order = await ordered(zero)
        await zero.submit(st.TransferStarted, order.operation, order.epoch)
        daemon.service.submit(st.ResetRequested, ResetMode.PHYSICAL)
        assert await ordered(one) == order
        for mover in (zero, one):
            orders = mover.orders()
            assert [await anext(orders) for _ in range(2)] == [ZeroBlocks(0), ZeroBlocks(1)]


@pytest.mark.asyncio
async def test_a_lost_mover_of_a_rank_keeps_its_part_alone() -> None:
    async with (
        daemon_at(None, config=TWO_RANKS) as daemon, Client(daemon.address) as client, client.feed("engine") as engine,
    ):
        state = daemon.service.state
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
        try:
            async with client.feed("rank 0", moves=True, rank=0) as zero:
                lost = client.feed("rank 1", moves=True, rank=1)
                lost._open.process, lost._open.process_began = process.pid, process_began(process.pid)
                async with lost:
                    await fill_two_blocks(engine)
                    order = await ordered(zero)
                await zero.submit(st.TransferFinished, order.operation, order.epoch, 0)
            await published(daemon, lambda: len(daemon.service.feeds) == 1)  # the daemon has seen both feeds end
            async with client.feed("rank 0", moves=True, rank=0):
                pass
            await published(daemon, lambda: len(daemon.service.feeds) == 1)
            with pytest.raises(Refused, match="'rank 1' may still copy"):
                async with client.feed("both", moves=True):
                    pass
            assert state.operations[order.operation].reported == {0}, "rank 1 may still write"
        finally:
            process.kill()
        await published(daemon, lambda: not state.operations)
        await process.wait()
        assert state.totals.candidates_ended[CandidateStatus.FAILED] == 1
        assert state.slots, "the engine is another feed"


@pytest.mark.asyncio
async def test_a_rank_without_a_mover_fails_its_part_at_once() -> None:
    async with (
        daemon_at(None, config=TWO_RANKS) as daemon, Client(daemon.address) as client, client.feed("engine") as engine,
        client.feed("rank 0", moves=True, rank=0) as zero,
    ):
        await fill_two_blocks(engine)
        order = await ordered(zero)
        await published(daemon, lambda: daemon.service.state.operations[order.operation].reported == {1})
        await zero.submit(st.TransferStarted, order.operation, order.epoch)
        await zero.submit(st.TransferFinished, order.operation, order.epoch, 0)
        state = daemon.service.state
        assert (state.operations, state.totals.candidates_ended[CandidateStatus.FAILED]) == ({}, 1)
        assert state.totals.completions_refused == 0


@pytest.mark.asyncio
async def test_a_feed_tells_what_watching_its_engines_costs() -> None:
    async with daemon_at() as daemon:
        feed = LiveFeed(daemon.address)
        with pytest.raises(ConnectionLost, match="is not connected"):
            await feed.accounts()
        async with Client(daemon.address) as client, client.feed("vllm-a") as engine:
            await engine.tell_cost(calls=10, dropped=2, call_ns=30, steps=4, step_ns=500, errors=1)
            items = feed.items()
            async for item in items:
                if isinstance(item, SnapshotTaken):
                    break
            told = {"engines": []}
            while not told["engines"]:  # the cost is on its way
                told = await feed.accounts()
            assert told == {"recorder": [], "publishers": [], "engines": [{
                "source": "1", "name": "vllm-a", "calls": 10, "dropped": 2, "call_ns": 30, "steps": 4, "step_ns": 500,
                "errors": 1,
            }]}
            checks = {"checked_blocks": 40, "mismatched_blocks": 0, "unknown_blocks": 1, "check_ns": 70}
            await engine.tell_cost(10, 2, 30, 4, 500, 1, *checks.values())
            while told["engines"][0].keys().isdisjoint(checks):
                told = await feed.accounts()
            assert told["engines"][0].items() >= checks.items()
            await items.aclose()
