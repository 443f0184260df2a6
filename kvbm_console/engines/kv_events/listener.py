"""A taker without a leader: writes the messages of one publisher to a capture and counts what they come to.

Law of this file: every message is in the file as it came, before anything is made of it.
"""

from pathlib import Path

import xxhash

from kvbm_console.engines.kv_events.capture import CaptureWriter, Frame
from kvbm_console.engines.kv_events.decoder import BadPayload, decode_batch
from kvbm_console.engines.kv_events.residency import Residency


class Listener:
    """Takes the messages of one publisher; give ``write`` to its source as ``on_frame``."""

    def __init__(self, directory: Path) -> None:
        self.writer = CaptureWriter(directory)
        self.residency = Residency()
        self.lost_batches = 0
        self.restarts = 0
        self.doubts = 0
        """Times that the publisher was away and could not be asked."""
        self.unreadable = 0
        """Messages or events that could not be read; they are in the file all the same."""
        self._next = 0
        self._digest = 0

    def write(self, frame: Frame) -> None:
        """Keep a message as it came."""
        self.writer.write(frame)

    # --- as a taker ---

    @property
    def next_seq(self) -> int:
        """The number that is expected."""
        return self._next

    def missing(self, seq: int) -> tuple[int, int] | None:
        """What ``seq`` shows to be missing."""
        return (self._next, seq - 1) if seq > self._next else None

    def is_last(self, seq: int, payload: bytes) -> bool:
        """Whether this is the message that was taken last."""
        return seq == self._next - 1 and xxhash.xxh3_64_intdigest(payload) == self._digest

    def accept(self, seq: int, payload: bytes, *, replayed: bool = False) -> None:
        """Count a message, and what was lost in front of it."""
        if seq < self._next:
            if replayed:
                return
            self.restart()
        self.lost_batches += seq - self._next
        self._next = seq + 1
        self._digest = xxhash.xxh3_64_intdigest(payload)
        try:
            batch = decode_batch(payload)
        except BadPayload:
            self.unreadable += 1
            return
        self.unreadable += batch.malformed
        self.residency.apply(batch)

    def doubt(self) -> None:
        """The publisher was away and cannot be asked what it said meanwhile."""
        self.doubts += self._next > 0

    def gone(self) -> None:
        """The publisher has ended: what it held last is what its capture comes to."""

    def restart(self) -> None:
        """The publisher began again."""
        self.restarts += 1
        self._next = 0
        self.residency.clear()
