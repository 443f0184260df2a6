"""The publishers in a capture, fed to a leader on the capture's own clock.

Law of this file: it needs no network library: a capture can be read wherever this program runs.
"""

import math
from collections.abc import Callable

from kvbm_console.core.config import SECOND_NS
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.capture import Frame
from kvbm_console.engines.kv_events.decoder import BadPayload, decode_batch
from kvbm_console.engines.kv_events.stream import EventStream


class CaptureStreams:
    """The publishers in a capture: told apart by topic and data-parallel rank, as each counts for itself.

    ``take`` moves ``now_ns`` to the time of the frame (since the first one) and hands the frame to its stream; give
    ``lambda: streams.now_ns`` to the dispatcher as its clock.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.first_received: float | None = None
        """Seconds since 1970 of the first frame."""
        self.streams: dict[tuple[bytes, int], EventStream] = {}
        self._last_rank: dict[bytes, int] = {}

    def take(self, frame: Frame, dispatcher: Dispatcher, new_source: Callable[[], int]) -> None:
        """One frame of the capture, in its order."""
        self._move_clock(frame.received)
        rank = self._rank(frame)
        stream = self.streams.get((frame.topic, rank))
        if stream is None:
            label = frame.topic.decode(errors="replace")
            stream = EventStream(dispatcher, new_source(), dp_rank=rank, label=label)
            self.streams[frame.topic, rank] = stream
        stream.accept(frame.seq, frame.payload)

    def _rank(self, frame: Frame) -> int:
        """Of the payload; one that cannot be read belongs to the publisher that spoke last under this topic."""
        try:
            rank = decode_batch(frame.payload).dp_rank
        except BadPayload:
            return self._last_rank.get(frame.topic, 0)
        self._last_rank[frame.topic] = rank or 0
        return rank or 0

    def _move_clock(self, received: float) -> None:
        if not math.isfinite(received) or not 0 <= received < 1e10:
            return
        if self.first_received is None:
            self.first_received = received
        self.now_ns = max(self.now_ns, round((received - self.first_received) * SECOND_NS))
