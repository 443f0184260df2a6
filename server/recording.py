"""The ``Recording`` method: begin, rotate and end the recording of a running daemon.

Work on the disk runs in a thread. Only the first keyframe is taken on the loop, between two stimuli, and flushes wait
in memory until the recorder has its first file. Verbs run one at a time. A verb that has begun ends even when its
caller leaves, because a directory would otherwise stay locked without a recorder.

Law of this file: the stream never waits, and at every moment at most one recorder gets the flushes. A path that ends in
``.mcap`` becomes one sealed file, here as everywhere (``place``).
"""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
import msgspec

from kvbm_console.core.errors import Refused
from kvbm_console.recording.options import RecorderStatus, RecordingOptions
from kvbm_console.recording.output import RecordingPath, require_new
from kvbm_console.recording.recover import Prepared, prepare
from kvbm_console.recording.writer import Recorder
from kvbm_console.service import LeaderService
from kvbm_console.wire.v1 import console_pb2 as pb

from .access import Context
from .guard import Malformed, parse, require_text

PATH_BYTES_MAX: Final = 4_096
"""The kernel's own limit of a path."""
SEAL_S: Final = 4.0
"""Sealing before the answer to ``stop``: a client waits ten seconds. The next recorder seals a segment that is left."""
ANSWER_S: Final = 8.0
"""A verb that takes longer waits for the disk, and its caller is told so before it stops waiting by itself."""


def recorder_message(status: RecorderStatus) -> pb.RecorderStatus:
    """The status of a recorder as a message."""
    return pb.RecorderStatus(
        state=status.state, written_seq=status.written_seq, synced_seq=status.synced_seq,
        synced_age_ns=status.synced_age_ns, not_recorded=status.not_recorded, path=str(status.path),
        bytes=status.bytes, segment=status.segment, reason=status.reason or "",
        removed_segments=status.removed_segments,
    )


class RecordingMethod:
    """Serves the verbs on the recorder of a service."""

    def __init__(self, service: LeaderService, program: str, target: str) -> None:
        self._service = service
        self._program = program
        self._target = target
        self._one = asyncio.Lock()
        self._running: set[asyncio.Task[bytes]] = set()

    async def serve(self, data: bytes, _context: Context) -> bytes:
        """One verb; the answer is the recorder as it is then. ``Refused`` when the disk takes too long."""
        request = parse("Recording", pb.RecordingRequest, data)
        task = asyncio.ensure_future(self._carry_out(request))
        self._running.add(task)
        task.add_done_callback(self._ended)
        done, _ = await asyncio.wait({task}, timeout=ANSWER_S)
        if not done:
            raise Refused(f"the disk has not answered yet: {request.WhichOneof('verb')} is carried out when it does")
        return task.result()

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as seen, because the caller may have left

    async def _carry_out(self, request: pb.RecordingRequest) -> bytes:
        verb = request.WhichOneof("verb")
        async with self._one:
            if verb == "start":
                status: RecorderStatus | None = await self._start(request.start)
            elif verb == "stop":
                status = await self._stop()
            elif verb == "rotate":
                status = await self._rotate()
            elif verb == "status":
                recorder = self._service.recorder
                status = None if recorder is None else recorder.status()
            else:
                raise Malformed("verb must be start, stop, rotate or status")
        reply = pb.RecordingReply()
        if status is not None:
            reply.recorder.CopyFrom(recorder_message(status))
        return bytes(reply.SerializeToString())

    async def _start(self, verb: pb.StartRecording) -> RecorderStatus:
        service = self._service
        require_text("directory", verb.directory, PATH_BYTES_MAX)
        path = Path(verb.directory)
        if not path.is_absolute():
            raise Malformed(f"directory must be an absolute path, got {verb.directory!r}")
        options = _options(verb)
        if service.recorder is not None:
            raise Refused(f"a recording is being written to {service.recorder.status().path}; stop it first")
        place = RecordingPath(path)
        ready = await anyio.to_thread.run_sync(_prepared, place, path)
        if service.broadcaster.closing:
            ready.lock.release()
            raise Refused("the daemon is ending")
        taken = [service.await_recorder()]
        make = partial(
            Recorder, place.directory, config=service.config, incarnation=service.incarnation,
            keyframe=lambda: taken.pop() if taken else service.keyframe(), facts=service.facts,
            clock_anchor_ns=service.started_wall_ns - service.started_at_ns, program=self._program,
            labels={"target": self._target, **service.labels}, prepared=ready, **options.settings() | place.settings,
        )
        try:
            recorder = await anyio.to_thread.run_sync(make)
        except BaseException:
            service.attach(None)
            raise
        status = recorder.status()
        service.place = place
        service.attach(recorder)
        if service.broadcaster.closing:  # the daemon has ended before this recorder was attached
            await anyio.to_thread.run_sync(recorder.close)
        return status

    async def _stop(self) -> RecorderStatus:
        service = self._service
        service.broadcaster.flush()
        recorder, service.recorder = service.recorder, None
        if recorder is None:
            raise Refused("nothing is being recorded")
        until = time.monotonic() + SEAL_S
        await anyio.to_thread.run_sync(recorder.close, lambda: time.monotonic() >= until)
        status = recorder.status()
        if service.place is not None and service.place.file is not None:
            made = await anyio.to_thread.run_sync(service.place.finish)
            if made is not None:
                status = msgspec.structs.replace(status, path=str(made))
        return status

    async def _rotate(self) -> RecorderStatus:
        service = self._service
        service.broadcaster.flush()
        recorder: Any = service.recorder
        if recorder is None:
            raise Refused("nothing is being recorded")
        if service.place is not None and service.place.file is not None:
            raise Refused(f"{service.place.file} is one segment: record to a directory to begin others")
        if not recorder.rotate():
            raise Refused(f"the recorder is {recorder.status().state}: it rotates by itself when the disk takes it")
        if not await anyio.to_thread.run_sync(recorder.settle):
            raise Refused("the disk has not answered yet: the recorder rotates when it does")
        settled: RecorderStatus = recorder.status()
        return settled


def _prepared(place: RecordingPath, path: Path) -> Prepared:
    """The directory of a place, locked and recovered. Raises ``UsageError``."""
    if place.file is not None:
        require_new(path)
    return prepare(place.directory)


def _options(verb: pb.StartRecording) -> RecordingOptions:
    """The options of the request; the rest takes its defaults. Raises ``UsageError``."""
    numbers = ("segment_bytes", "segment_ns", "keep_bytes", "keep_ns")
    said: dict[str, Any] = {name: getattr(verb, name) for name in numbers if verb.HasField(name)}
    if verb.sync:
        said["sync"] = verb.sync
    return RecordingOptions(**said)
