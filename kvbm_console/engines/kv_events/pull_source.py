"""TensorRT-LLM's events: no stream, but an address that answers with the events since the last request.

``POST /kv_cache_events`` empties the engine's queue, so each event comes to one asker. Each event has a number, which
rises by one for each data-parallel rank. A hole in these numbers shows events that another asker took, or that did not
fit in the queue (``event_buffer_max_size``).

    POST -> [{"event_id": 7, ...}, {"event_id": 8, ...}]     POST -> []     POST -> [{"event_id": 11, ...}]
    events 9 and 10 never came

Law of this file: the taker gets each answer once, or hears of the loss. Every wait has a bound.
"""

import asyncio
import http.client
import time
from collections.abc import Callable
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.batch import PAYLOAD_BYTES_MAX
from kvbm_console.engines.kv_events.capture import CaptureFrame
from kvbm_console.engines.kv_events.stream import SourceStatus

PATH: Final = "/kv_cache_events"
EVERY_S: Final = 0.5
"""The pause after an answer. An engine keeps some thousand events, and a busy engine makes some hundred a second."""
AWAY_S: Final = 2.0
"""The pause after a failure."""
TIMEOUT_S: Final = 10.0
"""The longest wait for an answer: some releases collect events for two seconds before they answer."""


class Taker(Protocol):
    """Takes the messages of a publisher, and hears of losses; ``EventStream`` is one."""

    next_seq: int

    def accept(self, seq: int, payload: bytes, *, replayed: bool = False) -> None:
        """Take a message."""

    def lose(self, first: int, last: int) -> None:
        """Hear of messages that will not come, or of as many events."""

    def doubt(self) -> None:
        """Hear of a time whose messages are unknown."""

    def gone(self) -> None:
        """Hear that the publisher has ended."""

    def restart(self) -> None:
        """Hear that the publisher began again."""


class _Numbered(msgspec.Struct):
    event_id: int
    attention_dp_rank: int | None = None


_NUMBERS: Final = msgspec.json.Decoder(list[_Numbered])


class PullSource:
    """Follows a TensorRT-LLM server until cancelled; see ``ZmqSource`` for the arguments."""

    def __init__(
        self, publisher: Publisher, taker: Callable[[str], Any], *,
        on_frame: Callable[[CaptureFrame], None] | None = None, wall: Callable[[], float] = time.time,
        every_s: float = EVERY_S,
    ) -> None:
        self.publisher = publisher
        self.status = SourceStatus()
        self._taker: Taker = taker("")
        self.takers: list[Any] = [self._taker]
        self._on_frame, self._wall, self._every_s = on_frame, wall, every_s
        self._next: dict[int, int] = {}
        """Data-parallel rank to the expected number of its next event."""

    def open(self, context: object) -> None:
        """Nothing is opened before the first request."""

    def close(self) -> None:
        """Nothing stays open between two requests."""

    async def run(self) -> None:
        """Follow the server."""
        while True:
            try:
                payload = await asyncio.to_thread(self._request)
            except ConnectionRefusedError:
                self._away()
                self._taker.gone()
                self._next.clear()
            except (OSError, http.client.HTTPException, ValueError):
                self._away()
                self._taker.doubt()  # the engine may have given events away in an answer that did not arrive
            else:
                self.status.connects += not self.status.connected
                self.status.connected = True
                self.take(payload)
            await asyncio.sleep(self._every_s if self.status.connected else AWAY_S)

    def take(self, payload: bytes) -> None:
        """Hand an answer over, after the loss or the restart that its numbers show."""
        try:
            numbers = _NUMBERS.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            self.status.bad_messages += 1
            self._taker.doubt()
            return
        if not numbers:
            return
        self.status.messages += 1
        if any(event.event_id < self._next.get(event.attention_dp_rank or 0, 0) for event in numbers):
            self._taker.restart()
            self._next.clear()
        lost = 0
        for event in numbers:
            rank = event.attention_dp_rank or 0
            lost += max(0, event.event_id - self._next.get(rank, 0))
            self._next[rank] = event.event_id + 1
        if lost:
            self._taker.lose(numbers[0].event_id, numbers[0].event_id + lost - 1)
        seq = self._taker.next_seq
        if self._on_frame is not None:
            self._on_frame(CaptureFrame(self._wall(), b"", seq, payload))
        self._taker.accept(seq, payload, replayed=self.status.messages == 1)  # events have no time, these are old

    def _away(self) -> None:
        self.status.disconnects += self.status.connected
        self.status.connected = False

    def _request(self) -> bytes:
        """The body of an answer. Raises OSError, HTTPException or ValueError."""
        parts = urlsplit(self.publisher.endpoint)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", PATH, headers={"Accept": "application/json"})
            answer = connection.getresponse()
            body = answer.read(PAYLOAD_BYTES_MAX + 1)
        finally:
            connection.close()
        if answer.status != 200 or len(body) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"status {answer.status}, {len(body)} bytes")
        return body
