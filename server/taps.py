"""The socket for taps, beside the daemon's own: an engine's side that has neither gRPC nor protobuf connects here.

    engine: tap thread --- unix:PATH.tap --- reporter process --- unix:PATH (gRPC) --- daemon

A tap connects and sends its settings as one frame. The daemon starts a reporter (``kvbm_console.reporter``) and
hands it the connection, so the daemon's process decodes no record. The reporter ends with the tap or with the daemon.

Law of this file: a peer costs the daemon one read of at most ``SETTINGS_MAX`` bytes and one process of ``TAPS_MAX``.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from kvbm_console.addresses import tap_path
from kvbm_console.tap.sender import LENGTH, TapAnswer, TapSettings, TapVersion, skew_of

from .options import SOCKET_UMASK, FileId, file_id, remove_own

log = logging.getLogger("kvbm_console.server")

SETTINGS_MAX: Final = 65_536
SETTINGS_WAIT_S: Final = 5.0
TAPS_MAX: Final = 64
"""Taps of one daemon: an engine has one per rank of data parallelism. Further connections are closed."""
ACCEPT_RETRY_S: Final = 0.1
"""A pause where no connection can be accepted, because descriptors come back at some later time."""
END_S: Final = 1.0
"""Time in which reporters may end by themselves; then they are killed."""


class TapListener:
    """Accepts at most ``most`` taps for the daemon at ``unix:PATH`` and keeps their reporters.

    A tap must send its settings within ``wait_s`` seconds.
    """

    def __init__(self, address: str, *, most: int = TAPS_MAX, wait_s: float = SETTINGS_WAIT_S) -> None:
        self._address = address
        self._most, self._wait_s = most, wait_s
        self._path = Path(tap_path(address))
        self._taps: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._bound: FileId | None = None
        self._warned = ""
        """The last sentence about a tap without a reporter, so that a tap that asks again is logged once."""

    def open(self) -> None:
        """Listen. The daemon holds the lock of its own path, so a file that lies here is of a dead daemon."""
        self._path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(SOCKET_UMASK)
        try:
            listening.bind(str(self._path))
        finally:
            os.umask(before)
        listening.listen(TAPS_MAX)
        self._bound = file_id(self._path)
        listening.setblocking(False)
        self._socket = listening

    async def run(self) -> None:
        """Accept taps until cancelled."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptors: the tap waits, or tries again
                self._warn(f"no tap could be accepted: {error}")
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if len(self._taps) >= self._most:
                connection.close()
                continue
            task = asyncio.create_task(self._tap(connection), name="tap")
            self._taps.add(task)
            task.add_done_callback(self._taps.discard)

    async def close(self) -> None:
        """End the reporters and give the path back."""
        for task in self._taps:
            task.cancel()
        await asyncio.gather(*self._taps, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            remove_own(self._path, self._bound)

    async def _tap(self, connection: socket.socket) -> None:
        """Read the settings of a tap, start its reporter, and wait for the reporter's end."""
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(self._wait_s):
                    settings = await self._settings(connection)
            except _OtherVersion as error:
                await self._refuse(connection, str(error))
                return
            except (OSError, ValueError, TimeoutError):
                return
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "kvbm_console.reporter", str(connection.fileno()),
                    msgspec.json.encode(settings).decode(), "--once", pass_fds=(connection.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
                )
            except OSError as error:  # no descriptors or no processes: the tap tries again
                self._warn(f"no reporter could be started for a tap: {error}")
                return
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(END_S):
                            await process.wait()
                    process.kill()

    def _warn(self, sentence: str) -> None:
        if sentence != self._warned:
            self._warned = sentence
            log.warning("%s", sentence)

    async def _refuse(self, connection: socket.socket, sentence: str) -> None:
        self._warn(f"a tap was refused: {sentence}")
        data = msgspec.msgpack.encode(TapAnswer(refused=sentence))
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._wait_s):
                await asyncio.get_running_loop().sock_sendall(connection, LENGTH.pack(len(data)) + data)

    async def _settings(self, connection: socket.socket) -> TapSettings:
        """The settings of a tap, with this daemon as their target. Raises ``ValueError`` for anything else."""
        (size,) = LENGTH.unpack(await _exactly(connection, LENGTH.size))
        if size > SETTINGS_MAX:
            raise ValueError(f"the settings of a tap have at most {SETTINGS_MAX} bytes, got {size}")
        frame = await _exactly(connection, size)
        try:
            skew = skew_of(msgspec.msgpack.decode(frame, type=TapVersion))
        except msgspec.MsgspecError as error:
            raise ValueError(f"a peer sent no settings: {error}") from error
        if skew:  # before the settings are read, because another version may have others
            raise _OtherVersion(skew)
        given = msgspec.msgpack.decode(frame, type=TapSettings)
        return replace(given, target=self._address, serve=False, token_file="", tls_ca="")


class _OtherVersion(Exception):
    """A tap of another version; the text is the sentence about it."""


async def _exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise ValueError("a tap ended before its settings")
        data += part
    return data
