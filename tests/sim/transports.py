"""Sockets of asyncio over simulated connections: ``asyncio.open_connection`` in a simulated loop.

Law of this file: the protocol above hears what a real transport tells it, in the same order.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tests.sim.wires import End, EndOfFile

if TYPE_CHECKING:
    from tests.sim.loop import Loop

PAUSE_BYTES: Final = 65_536
"""More than this waits for the system: the writer is asked to pause."""


class Transport(asyncio.Transport):
    """One connection of a loop."""

    def __init__(self, loop: "Loop", end: End, protocol: Any) -> None:
        super().__init__()
        self._loop, self._end, self._protocol = loop, end, protocol
        self._unsent: deque[bytes] = deque()
        self._reading, self._paused, self._lost = True, False, False
        self._closing = False
        protocol.connection_made(self)
        end.notify = lambda: loop.call_soon(self._turn)
        loop.call_soon(self._turn)

    def _turn(self) -> None:
        while self._unsent and self._end.room and not self._lost:
            data = self._unsent.popleft()
            self._end.send(data, len(data))
        if self._closing and not self._unsent:
            self._gone(None)
        if self._paused and not self._unsent:
            self._paused = False
            self._protocol.resume_writing()
        while self._reading and not self._lost:
            item = self._end.read()
            if item is None:
                return
            if isinstance(item, EndOfFile):
                if item.reset:
                    self._gone(ConnectionResetError("Connection reset by peer"))
                else:
                    self._protocol.eof_received()
                    self._gone(None)
                return
            self._protocol.data_received(item)

    def _gone(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._end.close()
            self._loop.call_soon(self._protocol.connection_lost, error)

    # --- what asyncio asks for ---

    def write(self, data: Any) -> None:
        if not self._lost:
            self._unsent.append(bytes(data))
            self._turn()
            if sum(map(len, self._unsent)) > PAUSE_BYTES and not self._paused:
                self._paused = True
                self._protocol.pause_writing()

    def close(self) -> None:
        if not self._loop.process.dead:  # whose connections the system has closed
            self._closing = True
            self._loop.call_soon(self._turn)

    def abort(self) -> None:
        self._unsent.clear()
        self.close()

    def is_closing(self) -> bool:
        return self._closing or self._loop.process.dead

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._turn)

    def is_reading(self) -> bool:
        return self._reading

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._unsent))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default
