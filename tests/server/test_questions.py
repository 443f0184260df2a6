"""Questions take turns: how much of the loop's time they get, in which order, and who never waits for them."""

import asyncio
import contextlib
import gc
import os
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from kvbm_console.client import Client
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import Authority, Note, Tier
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.stream.broadcast import WRITE_NS
from kvbm_console.stream.feed import SnapshotTaken
from kvbm_console.stream.ring import Ring
from kvbm_console.stream.verbs import Disarm, RenewLease, SetBreakpoint
from server.daemon import RPC_NICE, thread_ids
from server.questions import (
    ASKING_SHARE,
    CALL_NS,
    CALLER_NS,
    CALLER_WAITING_MAX,
    SAVINGS_NS,
    SHARE,
    STRAIN_MAX,
    STRAIN_NS,
    Lane,
    OwnTime,
    Questions,
    Role,
    TooMany,
    Turn,
    waited_ns,
)
from tests.server.daemons import daemon_at, process, socket_directory

NICEST = 19
"""The lowest priority of Linux; the tests may run at it."""
WORK_NS = 1_000_000
MAIN = "from kvbm_console.cli.main import main; main()"


async def flooded(role: Role, answered: Counter[str], end: float) -> None:
    """Sixteen questions of a caller in flight, each of ``WORK_NS``, until ``end`` on the monotonic clock."""

    async def asks() -> None:
        while True:
            turn = await role.turn("flood")
            with turn.working(calls=0):
                turn.charge(WORK_NS)
            answered["flood"] += 1
            await asyncio.sleep(0)

    floods = [asyncio.ensure_future(asks()) for _ in range(16)]
    await asyncio.wait(floods, timeout=end - time.monotonic())
    for flood in floods:
        flood.cancel()
    await asyncio.gather(*floods, return_exceptions=True)


def bound_ns(lanes: int, seconds: float) -> int:
    """The time that so many lanes may spend, with the last question of each."""
    return lanes * (SAVINGS_NS + round(seconds * 1e9) // SHARE + 2 * WORK_NS)


@pytest.mark.asyncio
async def test_a_flood_spends_its_savings_and_its_share_and_no_more() -> None:
    role, answered, began = Role(), Counter[str](), time.monotonic()
    await flooded(role, answered, began + 0.5)
    assert CALLER_NS <= answered.total() * WORK_NS <= bound_ns(2, time.monotonic() - began)


@pytest.mark.asyncio
async def test_a_caller_that_asks_little_is_answered_at_once_beside_a_flood() -> None:
    role, answered = Role(), Counter[str]()
    await flooded(role, answered, time.monotonic() + 0.2)
    waiting = asyncio.ensure_future(role.turn("flood"))
    await asyncio.sleep(0)
    assert not waiting.done()
    for _ in range(5):
        asked = asyncio.ensure_future(role.turn("a person"))
        await asyncio.sleep(0)
        assert asked.done(), "no turn of the flood came between"
        with asked.result().working():
            pass
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.asyncio
async def test_connections_take_turns_whatever_each_has_in_flight() -> None:
    lane, order = Lane(time.monotonic_ns), list[str]()

    async def asks_once(caller: str) -> None:
        await lane.turn(caller)
        order.append(caller)

    lane.charge(SAVINGS_NS + 1_000_000)
    waiting = [asyncio.ensure_future(asks_once(caller)) for caller in ("a", "a", "a", "a", "b", "c")]
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["a", "b", "c", "a", "a"]


@pytest.mark.asyncio
async def test_a_question_beyond_the_limit_of_its_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.questions.REFUSED_AFTER_S", 0.0)
    lane = Lane(time.monotonic_ns)
    lane.charge(10**15)
    waiting = [asyncio.ensure_future(lane.turn("a")) for _ in range(CALLER_WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(TooMany, match=f"{CALLER_WAITING_MAX} of this connection"):
        await lane.turn("a")
    assert lane.refused == 1
    questions = Questions()
    questions.observers._many = lane
    assert questions.refused == 1
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.asyncio
async def test_answers_to_a_flood_are_as_many_as_its_share_allows() -> None:
    answered = Counter[str]()

    async def flood(client: Client, end: float) -> None:
        while time.monotonic() < end:
            await client.digest()
            answered["digest"] += 1

    async with daemon_at("multiturn:requests=0", speed=None) as daemon, Client(daemon.address) as client:
        began = time.monotonic()
        await asyncio.gather(*(flood(client, began + 1.0) for _ in range(16)))
        assert answered.total() - 16 <= bound_ns(2, time.monotonic() - began) // CALL_NS


@pytest.mark.asyncio
async def test_verbs_and_feeds_wait_for_no_question() -> None:
    async with (
        daemon_at(None) as daemon, Client(daemon.address) as client, client.control("shell") as shell,
        client.feed("engine") as engine,
    ):
        for lane in (daemon.questions.controllers._few, daemon.questions.controllers._many):
            lane.charge(10**15)
        asked = asyncio.ensure_future(client.status())
        await shell.ask(SetBreakpoint(BreakpointSpec(request="x")))
        await shell.ask(RenewLease())
        await shell.ask(Disarm())
        await engine.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 24, 16, Authority.ENGINE)
        assert not asked.done()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_turn_is_charged_what_it_took_and_not_what_was_expected() -> None:
    role = Role()
    for _ in range(1_000):
        turn = await role.turn("a")
        assert isinstance(turn, Turn)
        with turn.working(calls=0):
            pass
    assert role._few.has_savings


@pytest.mark.asyncio
async def test_work_for_a_long_stream_falls_to_the_lane_in_which_its_caller_is_by_then() -> None:
    """A client that asked much paid for the digests of its streams out of the lane of those that ask little."""
    role = Role()
    turn = await role.turn("stream")
    with turn.working(calls=0):
        pass
    role.count("stream", 2 * CALLER_NS)
    turn.charge(SAVINGS_NS + WORK_NS)
    assert role._few.has_savings
    assert not role._many.has_savings
    assert not turn.has_savings


@pytest.mark.asyncio
async def test_a_caller_whose_flush_exports_the_memory_is_not_charged_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane would save up for 1.2 s of exporting for more than a minute, and leave all other callers unanswered."""
    async with daemon_at(None) as daemon:
        service, role = daemon.service, daemon.questions.controllers
        export, exported = service.leader.export, []

        def slow() -> bytes:
            end_ns = time.thread_time_ns() + 2 * SAVINGS_NS
            while time.thread_time_ns() < end_ns:
                pass
            exported.append(True)
            return export()

        monkeypatch.setattr(service.leader, "export", slow)
        turn = await role.turn("reader")
        service.submit(NoteReported, Note.VERDICT, "")
        service.submit(NoteReported, Note.VERDICT, "")  # waits for the next turn of the loop
        service._stimulus_bytes = service.ring.bytes_max
        with turn.working():
            service.broadcaster.flush()
        assert exported
        assert role._few.has_savings
        assert role.lane("reader") is role._few


@pytest.mark.asyncio
async def test_a_collection_of_garbage_is_charged_to_nobody() -> None:
    """It walks every object of the daemon. Who was served then was not answered for as long as a lane saves that up."""
    role = Role()
    objects = [[number] for number in range(400_000)]
    for work in ("working", "further"):
        turn = await role.turn("a")
        began_ns = time.thread_time_ns()
        with getattr(turn, work)():
            gc.collect()
        assert time.thread_time_ns() - began_ns > 4 * CALL_NS
        assert role._lately("a") < 4 * CALL_NS, work
    assert len(objects) == 400_000


def test_time_in_which_the_thread_waits_for_a_processor_earns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two percent of the wall were a fifth of a daemon that got a tenth of a core."""
    wall_ns, waited_ns = 0, 0
    monkeypatch.setattr("server.questions.time", SimpleNamespace(monotonic_ns=lambda: wall_ns))
    monkeypatch.setattr("server.questions.waited_ns", lambda: waited_ns)
    lane = Lane(OwnTime())
    lane.charge(SAVINGS_NS + 750_000_000 // SHARE)
    wall_ns, waited_ns = 1_000_000_000, 900_000_000
    assert not lane.has_savings
    wall_ns, waited_ns = 1_700_000_000, 900_000_000
    assert lane.has_savings


def test_to_ask_how_long_the_thread_waited_takes_little_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other threads of a daemon an answer took 2 ms. Fifty a second cost an engine a tenth of its time."""
    wall_ns, asked = 0, 0

    def slow() -> int:
        nonlocal wall_ns, asked
        wall_ns, asked = wall_ns + 2_000_000, asked + 1
        return 0

    monkeypatch.setattr("server.questions.time", SimpleNamespace(monotonic_ns=lambda: wall_ns))
    monkeypatch.setattr("server.questions.waited_ns", slow)
    own = OwnTime()
    while wall_ns < 60_000_000_000:
        wall_ns += 1_000_000
        own()
    assert 50 <= asked <= 2 + wall_ns // ASKING_SHARE // 2_000_000


def test_an_answer_of_the_system_that_takes_long_takes_no_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits for six tenths of the time, and one answer takes 100 ms. Nobody asks, so a question may be
    answered at any time."""
    wall_ns, waited_ns, takes_ns = 0, 0, 100_000_000

    def slow() -> int:
        nonlocal wall_ns
        wall_ns += takes_ns
        return waited_ns

    monkeypatch.setattr("server.questions.time", SimpleNamespace(monotonic_ns=lambda: wall_ns))
    monkeypatch.setattr("server.questions.waited_ns", slow)
    lane = Lane(OwnTime())
    takes_ns = 0
    while wall_ns < 100_000_000_000:
        wall_ns, waited_ns = wall_ns + 1_000_000, waited_ns + 600_000
        assert lane.has_savings, wall_ns


def test_the_strain_of_a_thread_is_the_walls_time_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_ns = waited_ns = 0
    monkeypatch.setattr("server.questions.time", SimpleNamespace(monotonic_ns=lambda: wall_ns))
    monkeypatch.setattr("server.questions.waited_ns", lambda: waited_ns)
    own = OwnTime()
    assert own.strain() == 1.0
    for share, strain in ((0.0, 1.0), (0.5, 2.0), (0.99, STRAIN_MAX), (0.0, 1.0)):
        wall_ns, waited_ns = wall_ns + STRAIN_NS, waited_ns + round(share * STRAIN_NS)
        assert own.strain() == pytest.approx(strain)
        wall_ns += STRAIN_NS // 2
        assert own.strain() == pytest.approx(strain), "too short a time tells nothing"
        wall_ns += STRAIN_NS // 2
        own()


def test_a_thread_that_waits_is_told_so() -> None:
    before = waited_ns()
    assert before >= 0
    assert waited_ns() >= before


@pytest.mark.asyncio
async def test_a_subscription_pays_for_the_readers_that_its_flush_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 subscriptions at once flushed 64 times, and each flush was written to all that were there before."""
    async with daemon_at() as daemon, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(daemon.address, name="readers"))
        broadcaster = daemon.service.broadcaster
        for _ in range(8):
            await anext(await stack.enter_async_context(client.subscribe()))
        while len(broadcaster.idle) < 8:  # noqa: ASYNC110  # nothing tells that a reader has begun to wait
            await asyncio.sleep(0)
        charged = list[int]()
        monkeypatch.setattr(Turn, "charge", lambda turn, took_ns: charged.append(took_ns))
        monkeypatch.setattr(broadcaster, "later", lambda seconds, flush: None)  # nothing else flushes
        published = broadcaster.next_seq
        for pool in range(2):
            daemon.service.dispatcher.submit(st.PoolDeclared, 0, pool, Tier.G1, "GPU", 24, 16, Authority.ENGINE)
        assert broadcaster.next_seq > broadcaster.ring.next_seq > published
        await anext(await stack.enter_async_context(client.subscribe()))
        assert 8 * WRITE_NS in charged


@pytest.mark.asyncio
async def test_a_reader_that_fell_behind_waits_for_a_turn_to_get_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is always too slow got a snapshot each time, and nobody paid for it."""
    waits, may = asyncio.Event(), asyncio.Event()
    real = Turn.again

    async def again(turn: Turn) -> Turn:
        waits.set()
        await may.wait()
        return await real(turn)

    monkeypatch.setattr(Turn, "again", again)
    async with daemon_at(ring=Ring(events_max=64)) as daemon, Client(daemon.address, name="slow") as client, \
            client.subscribe() as stream:
        first = await anext(stream)
        assert isinstance(first, SnapshotTaken)
        service = daemon.service
        for _ in range(500):
            service.submit(NoteReported, Note.ENGINE_SUMMARY, "more than the ring keeps")
            service.broadcaster.flush()
        await waits.wait()
        spent = Role.count
        counted = list[int]()
        monkeypatch.setattr(Role, "count", lambda role, caller, took: (counted.append(took), spent(role, caller, took)))
        may.set()
        while not isinstance(await anext(stream), SnapshotTaken):
            pass
        assert stream.position > 400
        await published_charge(counted)


async def published_charge(counted: list[int]) -> None:
    """Until the messages of the snapshot were charged."""
    while not any(took >= CALL_NS for took in counted):  # noqa: ASYNC110  # nothing tells that a write has ended
        await asyncio.sleep(0)


@pytest.mark.skipif(not thread_ids(), reason="this system does not list threads")
def test_threads_of_the_rpc_library_give_way_to_the_loop() -> None:
    """They had the same priority whatever the daemon's: of one that ran at -10 renewals took 100 ms."""
    main = f"import os; os.nice(3); {MAIN}"
    with socket_directory() as place, process("-c", main, "serve", "--listen", f"unix:{place}/d.sock") as daemon:
        assert daemon.child.stderr is not None
        assert "serving on" in daemon.child.stderr.readline()
        threads = [int(name) for name in os.listdir(f"/proc/{daemon.pid}/task")]
        nice = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        mine = nice.pop(daemon.pid)
        assert mine == min(NICEST, os.getpriority(os.PRIO_PROCESS, 0) + 3)
        assert Counter(nice.values())[min(NICEST, mine + RPC_NICE)] >= 5
