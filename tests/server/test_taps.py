"""The socket for taps: a tap gets a reporter, and a peer that is no tap gets its connection closed.

Law of this file: a peer costs the daemon one bounded read and one place among the taps, and gives both back.
"""

import asyncio
import errno
import gc
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvbm_console import __version__
from kvbm_console.addresses import tap_path
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import LENGTH, Sender, TapAnswer, TapSettings
from server.taps import SETTINGS_MAX, TapListener
from tests.server.daemons import daemon_at, options_for, running, socket_directory

SETTINGS = TapSettings("elsewhere:1", "engine", 16, 100, serve=True, token_file="/nowhere", tls_ca="/nowhere",
                       version=__version__)


def frame(value: Any) -> bytes:
    data = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(data)) + data


async def answer(reader: asyncio.StreamReader) -> TapAnswer:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(size), type=TapAnswer)


def mode_of(path: str) -> int | None:
    """The permissions of a file; None without the file."""
    return stat.S_IMODE(Path(path).stat().st_mode) if Path(path).exists() else None


@asynccontextmanager
async def listening(**limits: Any) -> AsyncIterator[str]:
    """A listener whose daemon is not there; yields the path for taps."""
    with socket_directory() as place:
        taps = TapListener(f"unix:{place}/d.sock", **limits)
        taps.open()
        running = asyncio.ensure_future(taps.run())
        try:
            yield tap_path(f"unix:{place}/d.sock")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await taps.close()


@pytest.mark.asyncio
async def test_a_tap_gets_a_reporter_to_this_daemon_whatever_its_settings_name() -> None:
    async with daemon_at() as daemon:
        path = tap_path(daemon.address)
        assert mode_of(path) == 0o600
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(SETTINGS))
        assert (await answer(reader)).listens is True
        writer.write_eof()
        await reader.read()  # to the end of the reporter
        writer.close()
    assert mode_of(path) is None


@pytest.mark.asyncio
async def test_the_end_of_a_daemon_ends_its_reporters() -> None:
    async with daemon_at() as daemon:
        reader, writer = await asyncio.open_unix_connection(tap_path(daemon.address))
        writer.write(frame(SETTINGS))
        assert (await answer(reader)).listens is True
    await reader.read()  # to its end
    writer.close()


@pytest.mark.asyncio
async def test_a_tap_for_which_no_reporter_can_start_is_closed_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of the tap failed, and asyncio printed its traceback some time later."""
    async def no_descriptors(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    failed = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_descriptors)
    async with listening() as path:
        for _ in range(3):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(frame(SETTINGS))
            assert await reader.read() == b""
            writer.close()
    gc.collect()
    assert not failed
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "no reporter could be started for a tap: [Errno 24] Too many open files"
    ]


@pytest.mark.asyncio
async def test_taps_are_accepted_again_when_there_are_descriptors_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task ended with a traceback, began again after a second, and after minutes when it happened often."""
    loop = asyncio.get_running_loop()
    accept, refused = loop.sock_accept, list[int]()

    async def no_descriptors(listening: socket.socket) -> tuple[socket.socket, Any]:
        if len(refused) < 3:
            refused.append(errno.EMFILE)
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", no_descriptors)
    async with listening() as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(["no", "settings"]))
        assert await reader.read() == b""
        writer.close()
    assert len(refused) == 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "no tap could be accepted: [Errno 24] Too many open files"
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("sent", [
    LENGTH.pack(SETTINGS_MAX + 1), frame(["no", "settings"]), frame({"target": 7}), LENGTH.pack(3) + b"\xc1\xc1\xc1",
    LENGTH.pack(100) + b"short",
], ids=["too large", "a list", "wrong types", "no msgpack", "cut"])
async def test_a_peer_that_is_no_tap_is_closed(sent: bytes) -> None:
    async with listening() as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("settings", "said"), [
    (replace(SETTINGS, version="9.1"), "kvbm-console-tap 9.1, and the daemon"),
    ({"target": "", "name": "engine", "block_tokens": 16, "capacity_blocks": 4}, "of a version that is not told"),
    ({"block_tokens": 16, "version": "2.0", "name": 7, "more": [1]}, "kvbm-console-tap 2.0"),
], ids=["newer", "before versions", "other settings"])
async def test_a_tap_of_another_version_gets_one_sentence_and_no_reporter(
    settings: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as path:
        for _ in range(2):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(frame(settings))
            refused = await answer(reader)
            assert await reader.read() == b""
            writer.close()
    assert (refused.listens, refused.full) == (None, False)
    assert said in refused.refused
    assert f"Install kvbm-console-tap {__version__} in the engine's environment" in refused.refused
    assert [record.getMessage() for record in caplog.records if record.name == "kvbm_console.server"] == [
        f"a tap was refused: {refused.refused}"
    ]


def test_a_refused_tap_says_why_once_and_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    recorder = TapRecorder()
    sender = Sender(recorder, Flattener(), SETTINGS)
    for _ in range(2):
        sender._obey(TapAnswer(refused="the tap is another one"))
    assert [record.getMessage() for record in caplog.records] == ["kvbm-console: the tap is another one"]
    assert not recorder.on


@pytest.mark.asyncio
async def test_a_silent_peer_gives_its_place_back() -> None:
    async with listening(wait_s=0.0) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.asyncio
async def test_taps_beyond_the_bound_are_closed_and_others_stay() -> None:
    async with listening(most=1) as path:
        first = await asyncio.open_unix_connection(path)
        second = await asyncio.open_unix_connection(path)
        assert await second[0].read() == b""
        assert not first[0].at_eof()
        for _, writer in (first, second):
            writer.close()


@pytest.mark.asyncio
async def test_the_socket_of_a_dead_daemon_is_replaced() -> None:
    with socket_directory() as place:
        path = f"{place}/d.sock.tap"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        async with running(options_for(None, f"unix:{place}/d.sock")) as daemon:
            _, writer = await asyncio.open_unix_connection(tap_path(daemon.address))
            writer.close()
