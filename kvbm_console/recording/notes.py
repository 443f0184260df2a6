"""What the stream says about its own recorder: that it lost events, why, and how many when it is whole again.

A recorder knows that it is degraded, but a recording is read when its daemon is gone: so both ends of a loss are events
like any other. The first is usually part of what is lost, the second stands behind the gap and counts exactly what
the gap counts.

Law of this file: what one recorder lost is told once, in full, and never before it is known.
"""

from collections.abc import Callable
from typing import Any, Protocol

from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import Noted
from kvbm_console.wire.batches import EventChunk, StimulusChunk


class Watched(Protocol):
    """What is asked of a recorder."""

    def offer(self, stimuli: StimulusChunk | None, events: EventChunk | None) -> None:
        """As ``Recorder.offer``."""
        ...

    def status(self) -> Any:
        """A ``RecorderStatus``."""
        ...


class RecorderNotes:
    """``look`` is called about ten times a second, outside of any publication. ``submit`` is the dispatcher's."""

    def __init__(self, submit: Callable[..., object]) -> None:
        self._submit = submit
        self._recorder: Watched | None = None
        self._degraded = False
        self._told = 0

    def look(self, recorder: Watched | None) -> None:
        """Submit ``Noted`` when the recorder began to lose events, or ended to."""
        if recorder is not self._recorder:
            if self._degraded and self._recorder is not None:
                self._end(self._recorder.status().not_recorded, "stopped")
            self._recorder, self._told = recorder, 0
        if recorder is None:
            return
        status = recorder.status()
        degraded = status.state == "degraded"
        if not self._degraded and (degraded or status.not_recorded > self._told):
            self._degraded = True
            self._submit(Noted, Note.RECORDER_DEGRADED, status.reason or "the writer fell behind")
        if degraded:
            # With nothing to publish nobody else would ask whether the disk takes events again.
            recorder.offer(None, None)
        elif self._degraded:
            self._end(status.not_recorded, "recording again")

    def _end(self, not_recorded: int, how: str) -> None:
        lost, self._told = not_recorded - self._told, not_recorded
        self._degraded = False
        self._submit(Noted, Note.RECORDER_RESUMED, f"{how}; {lost:,} events were not recorded")
