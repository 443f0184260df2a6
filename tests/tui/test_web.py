"""``attach --serve-web`` with a real server and a client that speaks as a browser does.

Law of this file: nothing waits for time; what the page or the console says is read until it is there.
"""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from kvbm_console.cli.web import DRIVER_VARIABLE, visitor_command
from tests.cli.programs import PROGRAM, Daemon, environment, run, serving

DEADLINE_S = 100
ENDS_S = 12
"""Far above the two seconds that are promised, and below the 22 s of a server that waits for its heartbeat to fail."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with serving(tmp_path, "--workload", "multiturn", "--speed", "4") as one:
        yield one


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listening(port: int) -> None:
    """Knock until somebody opens."""
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return
        os.sched_yield()
    raise AssertionError(f"nobody listens on {port}")


class Served(NamedTuple):
    """A console in a browser's reach."""

    process: subprocess.Popen[str]
    address: str
    """As it was printed, with the key."""

    @property
    def host(self) -> str:
        """The ``Host`` of its pages."""
        return self.address.removeprefix("http://").split("/")[0]

    @property
    def key(self) -> str:
        """The key that lets a visitor in."""
        return self.address.partition("?key=")[2]

    @property
    def cookie(self) -> str:
        """The cookie of a visitor who showed the key."""
        return f"kvbm-console-{self.host.rpartition(':')[2]}={self.key}"

    def connect(self, head: str, *lines: str) -> socket.socket:
        """A connection that has sent a request with this first line and these headers."""
        host, _, port = self.host.rpartition(":")
        visitor = socket.create_connection((host, int(port)), DEADLINE_S)
        visitor.sendall("\r\n".join((head, f"Host: {self.host}", *lines, "", "")).encode("latin-1"))
        return visitor


@contextmanager
def served(daemon: Daemon, *args: str, directory: Path | None = None) -> Iterator[Served]:
    """A console in a browser's reach; ends with it."""
    port = free_port()
    process = subprocess.Popen(
        [PROGRAM, "attach", "--serve-web", str(port), *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=directory or daemon.directory, env=environment(daemon.directory), text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        address = re.search(r"http://\S+\?key=[\w-]+", process.stderr.readline())
        assert address is not None
        assert any("Press Ctrl+C" in line for line in process.stdout), "the server did not start"
        listening(port)  # it says so a little before it listens
        yield Served(process, address[0])
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=DEADLINE_S)


@contextmanager
def web(daemon: Daemon, *args: str, directory: Path | None = None) -> Iterator[str]:
    """As ``served``; the address that it printed."""
    with served(daemon, *args, directory=directory) as console:
        yield console.address


class Page:
    """A terminal in a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def until(self, *wanted: str) -> None:
        """Read until all of these were drawn."""
        seen = ""
        async with asyncio.timeout(DEADLINE_S):
            while not all(word in seen for word in wanted):
                message = await self.socket.receive()
                assert message.type is aiohttp.WSMsgType.BINARY or message.type is aiohttp.WSMsgType.TEXT, message
                if message.type is aiohttp.WSMsgType.BINARY:
                    seen += message.data.decode(errors="replace")

    async def type(self, keys: str) -> None:
        """Press keys."""
        await self.socket.send_str(json.dumps(["stdin", keys]))


@asynccontextmanager
async def page(address: str) -> AsyncIterator[Page]:
    """The page is loaded, then the websocket that it names."""
    host = address.removeprefix("http://").split("/")[0]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        async with browser.get(address) as reply:
            assert reply.status == 200
            assert reply.url.query_string == ""
            text = await reply.text()
        assert "kvbm-console" in text
        found = re.search(r"ws://[^\"'\s]+/ws", text)
        assert found is not None
        async with browser.ws_connect(
            f"{found[0]}?width=120&height=40", origin=f"http://{host}", max_msg_size=0
        ) as socket:
            yield Page(socket)


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_the_console_in_a_browser_shows_the_daemon_and_answers_keys(daemon: Daemon) -> None:
    with web(daemon, "--read-only") as address:
        async with page(address) as console:
            await console.until("LIVE", "read-only", "G1 device")
            await console.type("2")
            await console.until("sorted by need")
            await console.type("?")
            await console.until("EVERYWHERE")
        site = address.split("?")[0]
        async with aiohttp.ClientSession() as browser:
            for headers in ({"Origin": "https://elsewhere.example"}, {"Host": "elsewhere.example"}):
                async with browser.get(address, headers=headers, allow_redirects=False) as reply:
                    assert reply.status == 403, "a page of another origin has the key, and is not let in with it"
            for path in ("", "ws", "static/css/xterm.css", "?key=", "?key=guessed", "ws?key=\udcff"):
                async with browser.get(site + path, allow_redirects=False) as reply:
                    assert reply.status == 403, "another user of this machine reaches the port, and knows no key"


def test_the_log_has_no_key(daemon: Daemon) -> None:
    with served(daemon, "--read-only") as console:
        key, mine = console.key, f"Cookie: {console.cookie}"
        requests = (
            (f"GET /?key={key} HTTP/1.1",), (f"GET /?k%65y={key} HTTP/1.1",),
            (f"GET /ws?width=9&key={key} HTTP/1.1", mine),
            ("GET / HTTP/1.1", f"Referer: {console.address}"), ("GET / HTTP/1.1", mine), (f"GET /key={key} HTTP/1.1",),
            ("GET / HTTP/1.1", f"{mine}\x01"), (f"GET /?key={key}\x01 HTTP/1.1",),  # no HTTP: the parser quotes them
            (f"GET /?key={key} HTTP/9.1",), (f"GET http://[/?key={key} HTTP/1.1",),
        )
        answers = []
        for request in requests:
            with console.connect(*request, "Connection: close") as visitor, visitor.makefile("rb") as answer:
                answers.append(int(answer.read().split()[1]))
        console.process.terminate()
        log, errors = console.process.communicate(timeout=DEADLINE_S)
    assert answers == [303, 303, 303, 403, 200, 403, 400, 400, 400, 400]
    assert key not in log + errors
    assert re.findall(r'"(.+)" (\d+)', log) == [
        ("GET /", "303"), ("GET /", "303"), ("GET /ws", "303"), ("GET /", "403"), ("GET /", "200"), ("GET -", "403"),
        *[("UNKNOWN -", "400")] * 4,
    ]


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_modules_of_the_working_directory_are_not_run(daemon: Daemon, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "click.py").write_text("open('executed', 'w')\nraise ImportError('mine')\n")
    with web(daemon, "--read-only", directory=hostile) as address:
        async with page(address) as console:
            await console.until("LIVE", "read-only")
    assert not (hostile / "executed").exists()


def test_a_visitor_does_not_outlive_a_server_that_was_killed(daemon: Daemon) -> None:
    surroundings = environment(daemon.directory) | {DRIVER_VARIABLE: "textual.drivers.web_driver:WebDriver"}
    with subprocess.Popen(
        visitor_command(["--read-only", "--theme", "none"]), shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, cwd=daemon.directory, env=surroundings, start_new_session=True,
    ) as visitor:
        assert visitor.stdin is not None
        assert visitor.stdout is not None
        drawn = b""
        while b"read-only" not in drawn:
            more = os.read(visitor.stdout.fileno(), 65_536)
            assert more, drawn
            drawn += more
        visitor.stdout.close()
        visitor.stdin.close()
        try:
            visitor.wait(30)
        finally:
            if visitor.returncode is None:
                os.killpg(visitor.pid, signal.SIGKILL)


def test_a_server_ends_at_once_beside_visitors_that_do_not_answer(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack, served(daemon, "--read-only") as console:
        for wanted in (b"read-only", b"101 Switching Protocols"):  # the other's process has just begun
            silent = stack.enter_context(console.connect(
                "GET /ws?width=120&height=40 HTTP/1.1", f"Cookie: {console.cookie}", "Connection: Upgrade",
                "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            ))
            seen = b""
            while wanted not in seen:
                more = silent.recv(65_536)
                assert more, seen
                seen += more
        own = console.process.pid
        began = [os.pidfd_open(int(pid)) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
        assert began
        console.process.terminate()
        log, errors = console.process.communicate(timeout=ENDS_S)
        assert (console.process.returncode, errors, "Traceback" in log) == (0, "", False)
        for process in began:
            ended = select.poll()
            ended.register(process, select.POLLIN)
            assert ended.poll(DEADLINE_S * 1000), "a visitor's process outlives the server"
            os.close(process)


def test_a_port_that_is_taken_is_one_sentence(daemon: Daemon) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run(daemon.directory, "attach", "--serve-web", str(port))
    assert (done.returncode, done.stderr) == (
        2, f"kvbm-console: --serve-web cannot listen on 127.0.0.1:{port}: Address already in use\n")


def test_every_visitor_would_record_into_the_same_directory(daemon: Daemon) -> None:
    done = run(daemon.directory, "attach", "--serve-web", "8000", "--record", "seen")
    assert done.returncode == 2
    assert "--record does not go with --serve-web" in done.stderr


def test_without_the_extra_it_is_one_sentence(daemon: Daemon, tmp_path: Path) -> None:
    hide = "import sys; sys.modules['textual_serve'] = None; from kvbm_console.cli.main import main; main()"
    done = subprocess.run(
        [str(Path(PROGRAM).parent / "python"), "-c", hide, "attach", "--serve-web"], capture_output=True, text=True,
        cwd=tmp_path, env=environment(tmp_path), timeout=DEADLINE_S, check=False,
    )
    assert done.returncode == 2
    assert "pip install '.[web]'" in done.stderr
    assert "Traceback" not in done.stderr
