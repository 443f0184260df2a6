"""Faults around a daemon: a second one on the same place, a stale socket, SIGTERM under load."""

import asyncio
import os
import pty
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc.aio
import pytest

from kvbm_console.client import Client, Ended
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import KvbmConsoleError, UsageError
from kvbm_console.core.events import HoldReleased
from kvbm_console.core.ids import HoldEnd, SlotState
from kvbm_console.recording.files import DirectoryLock
from kvbm_console.recording.format import About
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import active_segments, recover_directory
from kvbm_console.recording.seal import write_draft
from kvbm_console.stream.feed import EventsArrived
from kvbm_console.stream.verbs import SetBreakpoint
from kvbm_console.wire.protocol import CLIENT_OPTIONS, method_path
from kvbm_console.wire.v1 import console_pb2 as pb
from server.options import Endpoint
from tests.server.daemons import ROOT, Mirror, Process, process, socket_directory, until

pytestmark = pytest.mark.fault
MAIN = "from kvbm_console.cli.main import main; main()"


def serve(*arguments: str) -> tuple[str, ...]:
    """The arguments of a process that runs ``kvbm-console serve``."""
    return ("-c", MAIN, "serve", *arguments)


def run_to_refusal(*arguments: str) -> str:
    """The one sentence with which a program refuses to start."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, check=False,
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    (sentence,) = done.stderr.strip().splitlines()
    return sentence


def started(child: Process) -> str:
    """Wait until a ``serve`` process says that it serves."""
    assert child.child.stderr is not None
    while line := child.child.stderr.readline():
        if "serving on" in line:
            return line
    raise AssertionError(f"the daemon ended with {child.child.wait()}")


# --- F18: a second daemon ---


def test_f18_a_second_daemon_is_refused_with_one_sentence() -> None:
    with socket_directory() as place:
        address, record = f"unix:{place}/d.sock", str(place / "rec")
        with process(*serve("--listen", address, "--record", record)) as child:
            started(child)
            sentence = run_to_refusal(*serve("--listen", address))
            assert f"a daemon is listening on {address} already" in sentence
            sentence = run_to_refusal(*serve("--listen", f"unix:{place}/other.sock", "--record", record))
            assert record in sentence
            assert stat.S_ISSOCK((place / "d.sock").stat().st_mode)  # the first one is not disturbed
            child.send(signal.SIGTERM)
            assert child.child.wait(10) == 0


def test_f18_a_second_daemon_on_the_same_port_is_refused_with_one_sentence() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        sentence = run_to_refusal(*serve("--listen", f"127.0.0.1:{port}"))
    assert sentence.endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")


@pytest.mark.parametrize("address", ["0.0.0.0:5000", "192.0.2.1:5000", "[::]:5000", "example.org:5000"])
def test_addresses_that_other_machines_reach_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="must be a Unix socket or a loopback address"):
        Endpoint(address)


def test_a_socket_whose_daemon_is_dead_is_taken_over_and_no_other_file_is() -> None:
    with socket_directory() as place:
        address = f"unix:{place}/d.sock"
        with process(*serve("--listen", address)) as child:
            started(child)
        assert (place / "d.sock").exists()  # it was killed
        with process(*serve("--listen", address)) as child:
            started(child)
            child.send(signal.SIGTERM)
            assert child.child.wait(10) == 0
        assert not (place / "d.sock").exists()
        (place / "letter.txt").write_text("dear reader")
        with pytest.raises(UsageError, match="there is a file that is no socket"):
            Endpoint(f"unix:{place}/letter.txt")
        assert (place / "letter.txt").read_text() == "dear reader"


@pytest.mark.fault
@pytest.mark.parametrize("victim", ["", "precious"])
def test_f18_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, victim: str) -> None:
    """Whoever may write in the directory would otherwise choose a file that we make with our rights."""
    target = tmp_path / "elsewhere"
    if victim:
        target.write_text(victim)
    for name in ("d.sock.lock", "lock", "000001-000000000000.mcap.tmp"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(UsageError, match=r"d\.sock\.lock is a symbolic link$"):
        Endpoint(f"unix:{tmp_path}/d.sock")
    with pytest.raises(UsageError, match=r"its file 'lock' is a symbolic link$"):
        DirectoryLock(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        write_draft(tmp_path / "000001-000000000000.mcap.tmp", About(), iter(()))
    assert (target.read_text() if target.exists() else "") == victim


@pytest.mark.fault
def test_f18_a_socket_that_another_program_listens_on_is_left_alone() -> None:
    with socket_directory() as directory, socket.socket(socket.AF_UNIX) as other:
        path = Path(directory) / "s"
        other.bind(str(path))
        other.listen(1)
        with pytest.raises(UsageError, match="another program listens there"):
            Endpoint(f"unix:{path}")
        assert path.exists()
        other.close()
        Endpoint(f"unix:{path}").close()
        assert not path.exists(), "a dead socket is in nobody's way"


@pytest.mark.fault
def test_the_directory_of_our_sockets_must_be_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_directory() as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
        ours = Path(directory) / "kvbm-console"
        ours.mkdir(0o700)
        Endpoint(f"unix:{ours}/default.sock").close()
        ours.chmod(0o777)
        with pytest.raises(UsageError, match="must be ours alone"):
            Endpoint(f"unix:{ours}/default.sock")



def test_a_socket_belongs_to_its_user_alone() -> None:
    with socket_directory() as place, process(*serve("--listen", f"unix:{place}/new/d.sock")) as child:
        started(child)
        assert stat.S_IMODE((place / "new").stat().st_mode) == 0o700
        assert stat.S_IMODE((place / "new" / "d.sock").stat().st_mode) == 0o600


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(UsageError, match="a path of at most 103 bytes"):
        Endpoint(f"unix:/tmp/{'x' * 120}")
    assert run_to_refusal("-c", MAIN, "status", f"unix:/tmp/{'x' * 120}").startswith(
        "kvbm-console: TARGET must have a path of at most 103 bytes")


# --- F19: SIGTERM under load ---


@pytest.mark.asyncio
async def test_f19_sigterm_under_load_ends_in_order() -> None:
    with socket_directory() as place:
        address, record = f"unix:{place}/d.sock", place / "rec"
        machine = ("--workload", "multiturn", "--speed", "max", "--listen", address, "--record", str(record))
        with process(*serve(*machine)) as child:
            await asyncio.to_thread(started, child)
            async with Client(address) as client, client.control("me") as session, client.subscribe() as stream:
                # A load stands still for as long as it is held; a decoding request may end before it does.
                await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.ONBOARDING, one_shot=True)))
                mirror, ends, ended = Mirror(), [], None
                begin = 0.0
                async for item in stream:
                    mirror.take(item)
                    if mirror.state is not None and mirror.state.holds and not begin:
                        begin = time.monotonic()
                        child.send(signal.SIGTERM)
                    if isinstance(item, EventsArrived):
                        ends += [event for event in item.events if isinstance(event, HoldReleased)]
                    if isinstance(item, Ended):
                        ended = item
            assert await asyncio.to_thread(child.child.wait, 10) == 0
            assert time.monotonic() - begin <= 5.0
        assert [event.why for event in ends] == [HoldEnd.SHUTDOWN]
        assert ended is not None
        assert ended.last_seq == (stream.position or 0) - 1
        assert not stream.lost
        recording = Recording.open(record)
        assert recording.last_seq == ended.last_seq
        assert mirror.state is not None
        assert not mirror.state.holds
        assert not (place / "d.sock").exists()


@pytest.mark.asyncio
async def test_f19_a_second_sigterm_ends_at_once() -> None:
    with socket_directory() as place:
        address = f"unix:{place}/d.sock"
        with process(*serve("--workload", "multiturn", "--speed", "max", "--listen", address)) as child:
            await asyncio.to_thread(started, child)
            # A subscriber that does not read keeps the orderly end waiting for its grace.
            async with grpc.aio.insecure_channel(address, CLIENT_OPTIONS) as channel, Client(address) as client:
                stalled = channel.unary_stream(method_path("Subscribe"))(pb.SubscribeRequest().SerializeToString())
                await stalled.read()
                async with client.subscribe() as stream:
                    async for _ in stream:
                        if stream.received > 60_000:
                            break
                    child.send(signal.SIGTERM)
                    async for item in stream:
                        if isinstance(item, Ended):
                            break
                begin = time.monotonic()
                child.send(signal.SIGTERM)
                assert await asyncio.to_thread(child.child.wait, 10) == -signal.SIGTERM
                assert time.monotonic() - begin <= 0.5
                stalled.cancel()


def on_a_terminal(directory: Path, *arguments: str) -> tuple[int, int]:
    """A process on a terminal of its own: its id, and the terminal's other end."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(directory)  # ``nohup`` writes a file there
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under ``nohup``
        os.execv(arguments[0], arguments)
    return child, terminal


def listening(address: str, child: int) -> None:
    """Return when a daemon listens there."""
    ends = time.monotonic() + 30
    while time.monotonic() < ends and not os.waitpid(child, os.WNOHANG)[0]:
        with socket.socket(socket.AF_UNIX) as one:
            if one.connect_ex(address) == 0:
                return
        time.sleep(0.02)  # no event tells when another process binds
    raise AssertionError("the daemon does not listen")


@pytest.mark.parametrize("before", [(), ("nohup",)])
def test_a_closed_terminal_ends_a_daemon_in_order_unless_it_is_to_go_on(before: tuple[str, ...]) -> None:
    with socket_directory() as place:
        address, record = str(place / "d.sock"), place / "rec"
        words = serve("--workload", "multiturn", "--listen", f"unix:{address}", "--record", str(record))
        program = (*(shutil.which(word) or word for word in before), sys.executable)
        child, terminal = on_a_terminal(place, *program, *words)
        try:
            listening(address, child)
            os.close(terminal)
            if before:
                listening(address, child)
                os.kill(child, signal.SIGTERM)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        assert status == (0 if before else 129)
        assert not Path(address).exists()
        assert Recording.open(record).last_seq
        assert not active_segments(record)


def test_a_daemon_whose_directory_was_removed_leaves_the_next_one_its_sockets() -> None:
    with socket_directory() as place:
        directory = place / "run"
        address = f"unix:{directory}/d.sock"
        with process(*serve("--listen", address)) as first:
            started(first)
            assert sorted(file.name for file in directory.iterdir()) == ["d.sock", "d.sock.lock", "d.sock.tap"]
            shutil.rmtree(directory)
            with process(*serve("--listen", address)) as second:
                started(second)
                first.send(signal.SIGTERM)
                assert first.child.wait(10) == 0
                sentence = run_to_refusal(*serve("--listen", address))
                assert f"a daemon is listening on {address} already" in sentence
                assert sorted(file.name for file in directory.iterdir()) == ["d.sock", "d.sock.lock", "d.sock.tap"]
                second.send(signal.SIGTERM)
                assert second.child.wait(10) == 0
            assert [file.name for file in directory.iterdir()] == ["d.sock.lock"]


def test_the_stale_lock_file_does_not_matter() -> None:
    with socket_directory() as place:
        Path(place / "d.sock.lock").write_text("")
        endpoint = Endpoint(f"unix:{place}/d.sock")
        endpoint.close()


# --- a disk that hangs ---

HANGING = """
import os, sys, time
from kvbm_console.recording import files
def stands(call):
    def waits(self, *arguments):
        while os.path.exists(GATE):
            time.sleep(0.01)
        return call(self, *arguments)
    return waits
GATE = sys.argv.pop(1)
for name in ("writev", "datasync", "truncate"):
    setattr(files.SegmentFile, name, stands(getattr(files.SegmentFile, name)))
from kvbm_console.cli.main import main
main()
"""


@pytest.mark.asyncio
async def test_a_daemon_whose_disk_hangs_serves_and_ends_in_time_and_says_what_is_written() -> None:
    with socket_directory() as place:
        address, gate, record = f"unix:{place}/d.sock", place / "gate", place / "rec"
        with process("-c", HANGING, str(gate), "serve", "--listen", address, "--workload", "multiturn",
                     "--record", str(record)) as child:
            started(child)
            async with Client(address, name="x") as client:
                before = (await until(client, lambda found: found["recorder"]["written_seq"] > 0))["recorder"]
                gate.touch()
                with pytest.raises(KvbmConsoleError, match="the disk has not answered yet"):
                    await client.record_rotate()
                head = before["written_seq"] + 500
                await until(client, lambda found: found["stream"]["head_seq"] > head)
                found = await until(client, lambda found: found["recorder"]["state"] == "degraded")
                assert found["recorder"]["written_seq"] < found["stream"]["head_seq"]
            began = time.monotonic()
            child.send(signal.SIGTERM)
            assert await asyncio.to_thread(child.child.wait, 10) == 0
            assert time.monotonic() - began < 6
            assert child.child.stdout is not None
            sentence = r"written up to event ([\d,]+),.* ([\d,]+) events not written because the disk does not answer"
            said = re.search(sentence, child.child.stdout.read())
            assert said is not None
            written, unwritten = (int(number.replace(",", "")) for number in said.groups())
            assert written + unwritten >= found["stream"]["head_seq"] - 1
        gate.unlink()
        recover_directory(record)
        assert Recording.open(record).last_seq >= before["written_seq"]


@pytest.mark.asyncio
async def test_a_daemon_ends_in_time_although_a_verb_on_the_recorder_waits_for_the_disk() -> None:
    with socket_directory() as place:
        address, gate = f"unix:{place}/d.sock", place / "gate"
        with process("-c", HANGING, str(gate), "serve", "--listen", address) as child:
            started(child)
            gate.touch()
            async with Client(address, name="x") as client:
                verb = asyncio.ensure_future(client.record_start(str(place / "rec")))
                await until(client, lambda _: any(place.glob("rec/*.active")))
                began = time.monotonic()
                child.send(signal.SIGTERM)
                assert await asyncio.to_thread(child.child.wait, 10) == 0
                assert time.monotonic() - began < 6
                with pytest.raises(KvbmConsoleError):
                    await verb


# --- a flood of connections ---

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
CONNECTIONS = 1_000
"""Measured: 1,250 a second take 0.1 of a core in the RPC library's own threads, and nothing of the loop's."""


def main_thread_s(pid: int) -> float:
    """The time of the processor that the loop's thread has taken."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.asyncio
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the time of a thread from /proc")
async def test_a_flood_of_connections_takes_nothing_of_the_loop_that_decides_for_engines() -> None:
    with socket_directory() as place:
        address = f"unix:{place}/d.sock"
        with process(*serve("--listen", address)) as child:
            started(child)

            async def connects(count: int) -> None:
                for _ in range(count):
                    _, writer = await asyncio.open_unix_connection(f"{place}/d.sock")
                    writer.write(PREFACE)
                    writer.transport.abort()

            async with Client(address, name="x") as client:
                await client.hello()
                before = main_thread_s(child.pid)
                await asyncio.gather(*(connects(CONNECTIONS // 10) for _ in range(10)))
                await client.hello()
                assert main_thread_s(child.pid) - before <= 0.1 * CONNECTIONS / 1_000
