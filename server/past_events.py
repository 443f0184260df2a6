"""Events of this run that the ring has forgotten, from the recorder's files.

    ring forgot 400..911     files have 0..1,203     frames(400, 912) -> [400..655] [656..911]

Law of this file: frames follow each other without a hole. Where the files have one, there are no more frames.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import anyio.to_thread

from kvbm_console.core.errors import KvbmConsoleError
from kvbm_console.core.events import Event
from kvbm_console.recording.reader import Recording
from kvbm_console.service import LeaderService
from kvbm_console.wire.batches import pack_events
from kvbm_console.wire.frames import batch_frame

LOOK_AGAIN_S: Final = 0.05
WRITTEN_S: Final = 5.0
"""An event that the ring forgot long ago is in the files, unless the disk is slower than that."""


class PastEvents:
    """Reads the files of the service's recorder, if it has one."""

    def __init__(self, service: LeaderService) -> None:
        self._service = service
        self._recording: Recording | None = None
        self._batches: Iterator[list[Event]] = iter(())
        self._next = -1
        """The number of the next event of ``_batches``, -1 if it is not known."""

    async def frames(self, first: int, end: int, size: int) -> tuple[list[bytes], int]:
        """Frames of about ``size`` bytes with the events from ``first`` on and before ``end``, and the number of the
        event behind them. No frame if the files do not have event ``first``."""
        waited_s = 0.0
        while True:
            recorder = self._service.recorder
            if recorder is None:
                return [], first
            path = Path(recorder.status().path)
            found = await anyio.to_thread.run_sync(self._read, path, first, end, size)
            status = recorder.status()
            if found[0] or status.state != "recording" or status.written_seq >= first or waited_s >= WRITTEN_S:
                return found
            await asyncio.sleep(LOOK_AGAIN_S)
            waited_s += LOOK_AGAIN_S

    def _read(self, path: Path, first: int, end: int, size: int) -> tuple[list[bytes], int]:
        made: list[bytes] = []
        try:
            if self._next != first:
                self._open(path, first)
            self._next = -1
            for events in self._batches:
                wanted = [event for event in events if event.seq < end]
                if not wanted or wanted[0].seq != first:
                    break
                made.append(batch_frame(pack_events(wanted).data))
                first = wanted[-1].seq + 1
                if len(wanted) < len(events):
                    break
                if first == end or sum(map(len, made)) >= size:
                    self._next = first
                    break
        except (KvbmConsoleError, OSError):
            self._recording = None  # files of this run were damaged or removed meanwhile
        return made, first

    def _open(self, path: Path, first: int) -> None:
        if self._recording is None:
            self._recording = Recording.of_daemon(path, self._service.incarnation)
        else:
            self._recording.refresh()
        self._batches = iter(()) if self._recording is None else self._recording.events(first)
