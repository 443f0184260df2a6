"""The tap between real processes: an engine, its reporter, and a daemon that comes late, is killed or frozen."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.client import Client
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.ids import Authority, FinishReason, Route, Site, SlotState
from kvbm_console.stream.verbs import ContinueHold, SetBreakpoint
from kvbm_console.tap import sender
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import Sender, TapSettings
from server.daemon import Daemon
from tests.cli.test_install import unpacked_tap
from tests.server.daemons import daemon_at, options_for, published, running, socket_directory
from tests.tap.fake_engine import BLOCK

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(30))
HELD = "held-1a2b3c4d"
"""As an engine calls the request whose client knows it as ``held``."""


ALONE = """
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

HERE = {"msgspec", "kvbm_console", "tests", "xxhash"}  # the last is the fake engine's
sys.path.insert(0, sys.argv.pop())


class Nothing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in HERE and top not in sys.stdlib_module_names and PathFinder.find_spec(top):
            raise ModuleNotFoundError(f"the engine's environment has no {name}", name=name)


sys.meta_path.insert(0, Nothing())
import runpy

runpy.run_module("tests.tap.engine_child", run_name="__main__", alter_sys=True)
"""
"""The engine's environment when it has msgspec alone; the process beside it has its own."""


class Child:
    """The engine's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def do(self, **order: Any) -> dict[str, Any]:
        """Give an order, wait for its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        await self.process.stdin.drain()
        line = await self.process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)  # type: ignore[no-any-return]


@asynccontextmanager
async def engine(
    target: str, *, tap: Path | None = None, module: str = "tests.tap.engine_child", **settings: Any
) -> AsyncIterator[Child]:
    """An engine whose tap reports to ``target``; ``tap``: the only distribution beside msgspec in its environment."""
    program = ["-m", module] if tap is None else ["-c", ALONE]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, json.dumps({"target": target, **settings}), *([] if tap is None else [str(tap)]),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )
    try:
        yield Child(process)
    except BaseException:
        process.kill()  # it may step for ever
        raise
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def requests(daemon: Daemon) -> dict[str, Any]:
    return {slot.request: slot for slot in daemon.service.state.slots.values()}


@pytest.mark.asyncio
async def test_requests_become_slots_and_an_engine_that_ends_leaves_nothing_live() -> None:
    async with daemon_at(config=LeaderConfig()) as daemon:
        async with engine(daemon.address) as child:
            await child.do(listened=True)
            await child.do(add=[["one", PROMPT, 40], ["two", [*PROMPT, 7], 40]], steps=6)
            await published(daemon, lambda: {one.state for one in requests(daemon).values()} == {SlotState.DECODING})
            state = daemon.service.state
            assert set(requests(daemon)) == {"one", "two"}
            assert state.lost_sources == {}
            (pool,) = (one for one in state.pools if one.info.authority is Authority.OBSERVED)
            assert pool.resident_blocks > 0
            assert state.totals.hit_blocks[0] == len(PROMPT) // 4  # they came in one step, with one beginning
            told = await child.do(until="two")
            assert told["dropped"] == told["errors"] == 0
            while not (rows := daemon.service.costs()) or not rows[0]["calls"]:
                await child.do(steps=1)  # told once a second
            assert rows[0]["name"] == "child"
            assert rows[0]["call_ns"] > 0
            assert rows[0]["dropped"] == rows[0]["errors"] == 0
            await published(daemon, lambda: sum(daemon.service.state.totals.finished) == 2)
            await child.do(add=[["three", PROMPT, 4000]], steps=2)
            found = daemon.service.state.totals.hit_blocks
            shared = len(PROMPT) // 4
            await published(daemon, lambda: found[0] > shared)  # scored when admitted, after it was seen to arrive
            assert found[0] == 2 * shared
            assert "three" in requests(daemon)
        await published(daemon, lambda: not daemon.service.state.slots)
        assert pool.resident_blocks == 0
        assert pool.info.source in daemon.service.state.lost_sources


@pytest.mark.asyncio
async def test_the_engines_side_needs_msgspec_alone_and_one_that_is_killed_is_said_to_have_ended(
    tmp_path: Path
) -> None:
    tap = unpacked_tap(tmp_path)
    async with daemon_at(config=LeaderConfig()) as daemon:
        async with engine(daemon.address, tap=tap) as child:
            told = await child.do(listened=True)
            assert told["from"].startswith(str(tap))
            told = await child.do(add=[["one", PROMPT, 400]], steps=6)
            assert told["errors"] == 0
            state = daemon.service.state
            await published(daemon, lambda: {one.state for one in requests(daemon).values()} == {SlotState.DECODING})
            (pool,) = (one for one in state.pools if one.info.authority is Authority.OBSERVED)
            child.process.kill()
            async with asyncio.timeout(5):
                await published(daemon, lambda: daemon.service.state.has_ended(pool.info.source))
            assert state.totals.finished[FinishReason.ABORTED] == 1
        doctor = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from kvbm_console.cli.main import main; main()", "doctor",
            "--target", daemon.address, "--format", "json", stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await doctor.communicate()
        found = {one["lint"]: one["what"] for one in json.loads(said)["findings"]}
        assert found["engine_ended"] == "ended with 1 live request"


@pytest.mark.asyncio
async def test_a_breakpoint_at_the_lookup_holds_one_request_and_others_go_on() -> None:
    async with (
        daemon_at(config=LeaderConfig()) as daemon, engine(daemon.address) as child, Client(daemon.address) as client,
        client.control() as control,
    ):
        await child.do(listened=True)
        verdict = await control.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_WILL, request="held")))
        assert verdict.verified
        never = await control.ask(SetBreakpoint(BreakpointSpec(site=Site.PROMOTE_WILL, request="*")))
        assert not never.verified
        assert "promote" in never.message
        await child.do(gated=True)
        told = await child.do(add=[[HELD, PROMPT, 4], ["free", PROMPT, 4]], until="free")
        assert told["finished"] == ["free"]
        await published(daemon, lambda: bool(daemon.service.state.holds))
        (hold,) = daemon.service.state.holds.values()
        assert daemon.service.state.slots[hold.slot].request == HELD
        told = await child.do(steps=50, held_back=True)  # the tap hears of the hold in one of these steps
        assert told["finished"] == ["free"]
        await control.ask(ContinueHold(hold.hold))
        told = await child.do(until=HELD)
        assert told["finished"] == ["free", HELD]


@asynccontextmanager
async def serving(*, block_tokens: int = 4) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A daemon in a process of its own, which the block may kill or stop, and its address."""
    with socket_directory() as place:
        target = f"unix:{place}/d.sock"
        daemon = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "kvbm-console"), "serve", "--listen", target, "--g2-blocks", "0",
            "--g3-blocks", "0", "--block-tokens", str(block_tokens), stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert daemon.stderr is not None
        try:
            assert b"serving on" in await daemon.stderr.readline()
            yield daemon, target
        finally:
            if daemon.returncode is None:
                os.kill(daemon.pid, signal.SIGKILL)
            await daemon.wait()
            await daemon.stderr.read()  # its reporter has this file, too, and ends with it


@asynccontextmanager
async def held_load(target: str, child: Child, **spec: Any) -> AsyncIterator[Client]:
    """Two requests load from a lower tier, and a breakpoint holds the load of one."""
    async with Client(target) as client, client.control(lease=False) as control:
        await child.do(listened=True)
        told = await control.ask(
            SetBreakpoint(BreakpointSpec(site=Site.DISPATCH_WILL, route=Route.G3_G2, request="held", **spec))
        )
        assert told.verified
        await child.do(loads_gated=True)
        await child.do(add=[["held", PROMPT, 100_000], ["free", PROMPT, 100_000]], steps=2)
        told = await child.do(load=["held", "free"], loaded="free")
        assert told["loads"] == ["free"]
        await child.do(load_held=True)
        yield client


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["continued", "drained", "its longest time"])
async def test_a_breakpoint_holds_one_requests_load_from_a_lower_tier(how: str) -> None:
    async with daemon_at(config=LeaderConfig()) as daemon, engine(daemon.address, tier=True) as child:
        spec = {"max_hold_ns": 2 * 10**8} if how == "its longest time" else {}
        async with held_load(daemon.address, child, **spec) as client, client.control() as control:
            if how != "its longest time":
                await published(daemon, lambda: bool(daemon.service.state.holds))
                (hold,) = daemon.service.state.holds.values()
                assert daemon.service.state.slots[hold.slot].request == "held"
                told = await child.do(steps=50)
                assert told["loads"] == ["free"]
            if how == "continued":
                await control.ask(ContinueHold(hold.hold))
            told = await child.do(**({"drain": True} if how == "drained" else {}), loaded="held")
            assert told["loads"] == ["free", "held"]
            assert told["errors"] == 0
            await published(daemon, lambda: not daemon.service.state.operations)
            assert daemon.service.state.totals.moved_blocks == {"G3>G2": 0}  # the tier has none of these blocks


@pytest.mark.fault
@pytest.mark.asyncio
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_held_load_begins_within_a_second_when_the_daemon_dies(how: signal.Signals) -> None:
    """A daemon that stands still is given a second more than the hold's longest time."""
    async with serving() as (daemon, target), engine(target, tier=True) as child:
        most_s = 30 if how is signal.SIGKILL else 1
        async with held_load(target, child, max_hold_ns=most_s * 10**9):
            pass
        os.kill(daemon.pid, how)
        began = asyncio.get_running_loop().time()
        told = await child.do(loaded="held")
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < (1.0 if how is signal.SIGKILL else most_s + 1.5)
        assert told["errors"] == 0


@pytest.mark.fault
@pytest.mark.asyncio
async def test_a_daemon_that_comes_late_is_told_of_what_lives_and_its_death_is_not_felt() -> None:
    with socket_directory() as place:
        target = f"unix:{place}/d.sock"
        async with engine(target) as child:
            told = await child.do(add=[["early", PROMPT, 100_000]], steps=20)
            assert (told["on"], told["queue"], told["dropped"]) == (False, 0, 0)
            async with running(options_for(None, target, config=LeaderConfig())) as daemon:
                await child.do(listened=True)
                await child.do(steps=3)
                await published(daemon, lambda: "early" in requests(daemon))
                assert daemon.service.state.lost_sources  # what was before it came is not known
            await child.do(listened=False)
            told = await child.do(add=[["late", PROMPT, 3]], until="late")
            assert told["errors"] == 0
            assert told["queue"] == 0


@pytest.mark.fault
@pytest.mark.asyncio
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_held_request_goes_on_when_the_daemon_dies_or_freezes(how: signal.Signals) -> None:
    async with serving() as (daemon, target), engine(target) as child:
        async with Client(target) as client, client.control(lease=False) as control:
            await child.do(listened=True)
            spec = BreakpointSpec(site=Site.CALL_WILL, request="held", max_hold_ns=10**9)
            await control.ask(SetBreakpoint(spec))
            await child.do(gated=True)
            await child.do(add=[["held", PROMPT, 2]], steps=200)
        os.kill(daemon.pid, how)
        told = await child.do(until="held")
        assert told["errors"] == 0


@pytest.mark.fault
@pytest.mark.asyncio
@pytest.mark.parametrize("how", [
    pytest.param(None, marks=pytest.mark.slow), pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP,
])
async def test_the_end_of_an_engine_waits_for_no_daemon(how: signal.Signals | None) -> None:
    """``how`` the daemon is before the engine ends. The engine's process ends without waiting for the tap's thread."""
    async with serving() as (daemon, target), engine(target, leaves=True) as child:
        await child.do(listened=True)
        await child.do(add=[["one", PROMPT, 100_000]], steps=20)
        if how is not None:
            os.kill(daemon.pid, how)
        told = await child.do(add=[["two", PROMPT, 100_000]], steps=200)
        assert told["errors"] == 0
        ending = await child.do(end=True)
        told_at = asyncio.get_running_loop().time()
        await child.process.wait()
        gone_s = asyncio.get_running_loop().time() - told_at
        print(f"\nthe call took {ending['shutdown_s'] * 1e3:.3f} ms, the process ended {gone_s * 1e3:.0f} ms after it")
        assert ending["shutdown_s"] < 0.1
        assert gone_s < 2


@pytest.mark.fault
def test_a_reporter_that_is_frozen_is_killed_at_the_end_of_its_tap() -> None:
    begun = threading.Event()

    class Frozen(Sender):
        reporter: subprocess.Popen[bytes]

        def _started(self) -> socket.socket:
            mine = super()._started()
            assert self.process is not None
            self.reporter = self.process
            self.reporter.send_signal(signal.SIGSTOP)
            begun.set()
            return mine

    recorder = TapRecorder()
    sender = Frozen(recorder, Flattener(block_tokens=BLOCK), TapSettings("127.0.0.1:1", "engine", BLOCK, 64))
    sender.start()
    try:
        assert begun.wait(10)
        recorder.ending = True
        sender.join(10)
        assert sender.reporter.poll() == -signal.SIGKILL
    finally:
        sender.reporter.kill()
        sender.reporter.wait()


class _Looked(Exception):
    """Raised instead of a wait; the argument is its time."""


def test_a_sender_without_room_waits_for_its_reporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen daemon must not keep a core busy with looks at a socket that takes nothing."""
    recorder = TapRecorder()
    sent = Sender(recorder, Flattener(block_tokens=BLOCK), TapSettings("unix:/none", "engine", BLOCK, 64))
    recorder.put(("cleared", 0, []))

    def look(readers: object, writers: object, _: object, timeout: float) -> None:
        raise _Looked(timeout)

    monkeypatch.setattr(sender.select, "select", look)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        sent._socket = mine
        sent._unsent += bytes(sender.UNSENT_MAX)
        with pytest.raises(_Looked) as looked:
            sent._exchange()
    assert looked.value.args == (sender.PAUSE_S,)
    assert recorder.queue


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_daemon_of_its_own_is_started_where_none_listens() -> None:
    with socket_directory() as place:
        target = f"unix:{place}/d.sock"
        async with engine(target, serve=True) as child:
            await child.do(listened=True)
            await child.do(add=[["one", PROMPT, 4000]], steps=10)
            async with Client(target) as client:
                document = await client.status()
                assert document["slots"] or (await client.status())["slots"]
