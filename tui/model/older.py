"""Older: the past of a live target from before this console looked, or from before its reel begins.

    the daemon's recording, where it can be read from here    a tape as it is, and it grows
    the daemon's ring, from the oldest facts that it has      a second reel, folded in slices from what it still sends

The tape with the older beginning is taken. A moment on it is drawn as a replay of this tape draws it.

Law of this file: what cannot be had is told with its reason. Nothing is asked of a target before somebody goes there.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from kvbm_console.stream.feed import Remembering
from kvbm_console.stream.tape import RunTape

from .mirror import Mirror
from .reel import Reel

RING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Memory for what a ring still had: of 262,144 events with their facts about half."""
NO_RECORDING: Final = "nothing is recorded"
FAR_RECORDING: Final = "the recording is elsewhere"


class Older(msgspec.Struct, frozen=True):
    """The older tape, None if there is none, and why nothing is known before its beginning."""

    run: str
    tape: RunTape | None
    edge: str

    def reaches(self, reel: Reel) -> bool:
        """True if it is of the same run and no event between it and the reel was forgotten since."""
        hole = isinstance(self.tape, Reel) and self.tape.next_seq < reel.first_seq
        return self.run == reel.incarnation and not hole


async def older_than(
    reel: Reel, feed: Remembering, recorded: RunTape | None, missing: str, breathe: Callable[[], Awaitable[None]]
) -> Older:
    """Look for a tape that begins before the reel. ``missing`` is why there is no recording; may be empty.

    Raises ``KvbmConsoleError`` if the target does not answer.
    """
    _, ring_seq = await feed.between(0, 0)
    if recorded is not None and recorded.first_seq <= min(ring_seq, reel.first_seq - 1):
        return Older(reel.incarnation, recorded, _edge(recorded.first_seq, "the recording begins"))
    tape = await _from_ring(reel, feed, breathe) if ring_seq < reel.first_seq else None
    missing = missing if recorded is None else f"the recording at {recorded.first_seq:,}"
    begins = ring_seq if tape is None else tape.first_seq
    return Older(reel.incarnation, tape, _edge(begins, "the ring begins", missing))


def _edge(seq: int, begins: str, missing: str = "") -> str:
    if seq == 0:
        return "the run begins here"
    return f"nothing older: {begins} at event {seq:,}" + (f", {missing}" if missing else "")


async def _from_ring(reel: Reel, feed: Remembering, breathe: Callable[[], Awaitable[None]]) -> Reel | None:
    """The events in front of the reel that the target still has; None if it has no facts there."""
    tape, mirror, until = Reel(RING_BYTES_MAX, eager=True), Mirror(), reel.first_seq
    connected = reel.connected
    assert connected is not None
    tape.add(connected, _no_clock)
    mirror.take(connected, 0)
    async for item in feed.remembered(until):
        tape.add(item, _no_clock)
        mirror.take(item, 0)
        tape.look(mirror, _no_clock)
        await breathe()
    return tape if tape.begun and tape.first_seq < until else None


def _no_clock() -> int:
    return 0
