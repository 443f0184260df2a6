"""LMCache's server: its log of stored and evicted chunks, over gRPC (``SubscribeKvEvents``, from 0.5.6).

The server keeps its last records (``--kv-event-log-size``). A subscription begins behind a cursor and goes on with the
records as they come. After a break the next subscription begins behind the last cursor, so no record is missed while
the log still has it. The server says if it has not. An incarnation, which each answer names, tells a new server.

A subscription is for one model. Subscriptions of one instance replace each other, so we choose our number at random.

Law of this file: the taker gets each answer once, or hears of the loss.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Final

from kvbm_console.core.errors import ConnectionLost, NotFound, UsageError
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.capture import CaptureFrame
from kvbm_console.engines.kv_events.pull_source import Taker
from kvbm_console.engines.kv_events.schemas.lmcache import Header, read_header, request
from kvbm_console.engines.kv_events.stream import SourceStatus
from kvbm_console.wire.byte_stream import byte_stream

METHOD: Final = "/lmcache.mp.ObservabilityService/SubscribeKvEvents"
EVENTS_MAX: Final = 256
"""Records of an answer. A record has the tokens of a chunk, some kilobytes."""
AWAY_S: Final = 2.0
"""The pause between two subscriptions."""


class LmcacheSource:
    """Follows an LMCache server until cancelled; see ``ZmqSource`` for the arguments."""

    def __init__(
        self, publisher: Publisher, taker: Callable[[str], Any], *,
        on_frame: Callable[[CaptureFrame], None] | None = None, wall: Callable[[], float] = time.time,
    ) -> None:
        self.publisher = publisher
        self.status = SourceStatus()
        self._taker: Taker = taker(publisher.topic)
        self.takers: list[Any] = [self._taker]
        self._on_frame, self._wall = on_frame, wall
        self._instance = random.SystemRandom().randrange(2**62)
        self._incarnation: int | None = None
        self._cursor = 0
        self._catching_up = True
        """True until an answer is not full: its records have no time, and are as old as the log."""

    def open(self, context: object) -> None:
        """Nothing is opened before the first subscription."""

    def close(self) -> None:
        """Nothing stays open when ``run`` has ended."""

    async def run(self) -> None:
        """Follow the server. Raises ``UsageError`` if it keeps no events."""
        while True:
            try:
                await self._subscribe()
            except ConnectionLost:
                pass  # the next subscription begins behind the last cursor
            except NotFound as error:
                raise UsageError(f"{error}; LMCache has events from 0.5.6 on, with --transport grpc") from None
            finally:
                self.status.disconnects += self.status.connected
                self.status.connected = False
            await asyncio.sleep(AWAY_S)

    async def _subscribe(self) -> None:
        asked = request(self._instance, self.publisher.topic, self._cursor, EVENTS_MAX)
        async for payload in byte_stream(self.publisher.label, METHOD, asked):
            self.status.connects += not self.status.connected
            self.status.connected = True
            try:
                header = read_header(payload)
            except ValueError:
                self.status.bad_messages += 1
                self._taker.doubt()
                continue
            if not header.enabled:
                raise UsageError(f"{self.publisher.label} keeps no KV events: its --kv-event-log-size must be above 0")
            if not self._same(header):
                return
            self._take(header, payload)

    def _same(self, header: Header) -> bool:
        """False for another incarnation, whose records are asked for from the beginning."""
        if self._incarnation in (None, header.incarnation):
            self._incarnation = header.incarnation
            return True
        self._incarnation, self._cursor, self._catching_up = header.incarnation, 0, True
        self._taker.restart()
        return False

    def _take(self, header: Header, payload: bytes) -> None:
        self._cursor = header.next_cursor
        if not header.records and not header.lost:
            return
        self.status.messages += 1
        seq = self._taker.next_seq
        if self._on_frame is not None:
            self._on_frame(CaptureFrame(self._wall(), self.publisher.topic.encode(), seq, payload))
        self._taker.accept(seq, payload, replayed=self._catching_up)
        self._catching_up = self._catching_up and len(header.records) >= EVENTS_MAX
