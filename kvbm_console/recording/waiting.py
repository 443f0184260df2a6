"""What waits for the recorder's writing thread: flushes, counted in bytes, and keyframes, in order.

A thread that lets go of the interpreter gets it back, beside a busy one, only after a whole switch interval of 5 ms,
and waking one costs more than what it has to do for a flush. So it is woken for what comes after a pause alone: behind
a write it rests for ``WRITE_GAP_S``, whatever comes meanwhile, and then takes all that waits in one write.

Law of this file: what is put is taken once, in order; ``put`` never waits.
"""

import queue
import threading
from typing import Final

import msgspec

from kvbm_console.wire.batches import EventChunk, StimulusChunk

WRITE_GAP_S: Final = 0.05
"""How much later a write comes than it might, at most: what a kill may take, where a power loss takes a second."""
HURRY_SHARE: Final = 4
"""When this part of what may wait does, the rest is over."""
BATCH_MAX: Final = 128
"""Flushes that one write takes, 6 buffers each: a system takes 1,024. With a write for each flush an engine at full
speed, that flushes every millisecond, lost two thirds of its events."""


class Chunks(msgspec.Struct, frozen=True, gc=False):
    """One flush."""

    stimuli: StimulusChunk | None
    events: EventChunk | None
    bytes: int


class Key(msgspec.Struct, frozen=True, gc=False):
    """A keyframe in front of event ``seq``; ``loss`` is the number of the loss that it ends."""

    seq: int
    at_ns: int
    facts: bytes
    aids: bytes
    loss: int
    rotate: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.facts) + len(self.aids)


Item = Chunks | Key | threading.Event | None
"""An event is set when all in front of it is done; None ends the thread."""


class WriteQueue:
    """Between the service's thread, that puts, and the writing one, that takes.

    ``bytes_max`` is what the service lets wait; without ``gap_s`` nothing rests.
    """

    def __init__(self, bytes_max: int, gap_s: float = WRITE_GAP_S) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._hurry_bytes = bytes_max // HURRY_SHARE
        self._gap_s = gap_s
        self._put_bytes = self._done_bytes = 0
        self._turn = 0
        """How many are to be done before the next rest."""

    @property
    def bytes(self) -> int:
        """What was put and is not done."""
        return self._put_bytes - self._done_bytes

    def put(self, item: Item) -> None:
        """Add to the end. Somebody waits for the ends and events: they end a rest."""
        if isinstance(item, Chunks):
            self._put_bytes += item.bytes
        waited_for = self.bytes > self._hurry_bytes if isinstance(item, Chunks | Key) else True
        self._items.put(item)
        if waited_for:
            self._hurry.set()

    def take(self, timeout_s: float | None) -> list[Item]:
        """At least one item, at most ``BATCH_MAX`` flushes; only the last one may be none. Raises ``queue.Empty``."""
        taken = [self._items.get(timeout=timeout_s)]
        while isinstance(taken[-1], Chunks) and len(taken) < BATCH_MAX and not self._items.empty():
            taken.append(self._items.get())
        return taken

    def forget(self, items: list[Item]) -> None:
        """They wait no more."""
        self._done_bytes += sum(item.bytes for item in items if isinstance(item, Chunks))

    def done(self, items: list[Item]) -> None:
        """They are written or counted; rest when they are the last of what waited at the end of the rest before."""
        self.forget(items)
        self._turn -= len(items)
        if self._gap_s and self._turn <= 0:
            # What comes during a write does not keep it from resting: beside a busy thread something always does.
            self._hurry.wait(self._gap_s)
            self._hurry.clear()
            self._turn = self._items.qsize()
