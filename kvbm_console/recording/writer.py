"""The recorder: hands encoded chunks to a thread that appends them to segments.

``offer`` runs on the service's thread and neither waits nor fails. When the disk does, or when the thread falls behind,
chunks are dropped and counted to the event. The recording goes on with a ``Gap`` and a complete keyframe, so later
events can be folded and replayed.

Promises: ``kill -9`` loses nothing with a number up to ``written_seq``, a power loss nothing up to ``synced_seq``.

Law of this file: an event counts once, as written or as not recorded. ``written_seq`` moves only after the whole frame
is in the file.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zstandard

from kvbm_console.core.config import SECOND_NS, LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import OpenFile, SegmentFile, SegmentWriter
from kvbm_console.recording.format import About, Frame, Gap, Keyframe, Mark, SegmentEnd
from kvbm_console.recording.options import (
    KEEP_ALL,
    SEGMENT_BYTES,
    SEGMENT_NS,
    SYNC_INTERVAL_S,
    RecorderStatus,
    Retention,
)
from kvbm_console.recording.recover import Prepared, active_segments, prepare
from kvbm_console.recording.seal import BackgroundSealer, never, try_seal
from kvbm_console.recording.threads import WRITE_GAP_S, Chunks, Item, Key, Syncer, Worker, WriteQueue
from kvbm_console.wire.batches import EventChunk, StimulusChunk

QUEUE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes that may wait for the thread: about a million events. Beyond it chunks are dropped and counted."""
RETRY_S: Final = 0.25
"""A full disk is tried again this often."""
TOO_LARGE_RETRY_S: Final = 60.0
"""A keyframe that no frame can hold is tried again this often: each try exports the whole state."""
KEYFRAME_EVENTS_MIN: Final = 50_000
KEYFRAME_EVENTS_MAX: Final = 150_000
"""Bounds of the spacing of keyframes. With a fold of a million events a second the longest seek stays near 150 ms."""
KEYFRAME_BYTES_PER_EVENT: Final = 8
"""Compressed bytes that keyframes may add to an event. Facts may add more where the longest seek needs that. Memory,
which only a rerun needs, may add more where complete keyframes would be further apart than ``COMPLETE_EVENTS_MAX``. The
keyframes in between have facts only."""
COMPLETE_EVENTS_MAX: Final = 600_000
"""A cut, which reruns from the complete keyframe in front of it, then takes half a minute at most."""
KEYFRAMES_PER_SEGMENT: Final = 4
"""A segment holds at least so many times the bytes of its keyframe, unless ``keep`` leaves less."""
KEEP_SHARE_PERCENT: Final = 30
"""A segment takes this part of ``keep``, so that an active segment, a sealed segment and its draft fit."""
KEEP_SHARE_MAX_PERCENT: Final = 45
"""A segment with a larger keyframe takes at most this part, so that two unsealed segments fit."""
KEEP_PER_MARKS: Final = 256
"""1/256 of ``keep`` is left for the marks of a segment."""
ROTATION_RETRY_S: Final = 5.0
"""A rotation that the disk refused is tried again this often; the old segment goes on meanwhile."""

FRAME_HEAD_BYTES: Final = fmt.MESSAGE_HEAD.size + fmt.CHECK.size
HANG_S: Final = 5.0
"""A call that the disk has not answered for so long is reported; no event is lost until the queue is full."""
CLOSE_TIMEOUT_S: Final = 3.0
"""A hanging disk must not keep the daemon from ending; events not written by then are lost, as after a kill."""

TakeKeyframe = Callable[[], tuple[int, fmt.Bytes, bytes]]
"""(number of the next event, facts, memory) of the leader, as of now. A mirror of a leader has no memory."""
TakeFacts = Callable[[], tuple[int, fmt.Bytes]]
"""(number of the next event, facts), as of now: memory takes a hundred times as long to export."""


_Entry = tuple[int, int, int, int, bytes]
"""(channel, count, first time, last time, data) of a frame that has no number yet."""


def _entries(chunks: Chunks) -> Iterator[_Entry]:
    stimuli, events = chunks.stimuli, chunks.events
    if stimuli is not None:
        yield fmt.STIMULI, stimuli.count, stimuli.base_ns, stimuli.last_ns, stimuli.data
    if events is not None:
        yield fmt.EVENTS, events.count, events.base_ns, events.last_ns, events.data


class FrameTooLarge(OSError):
    """Raised for a keyframe of pools that are too large for the format."""

    patience_s = TOO_LARGE_RETRY_S


class KeepReached(OSError):
    """Raised where the next bytes would exceed ``keep`` although all older segments are removed."""

    patience_s = TOO_LARGE_RETRY_S


class SegmentOver(KeepReached):
    """Raised where the next bytes would leave no room for the keyframe of the next segment."""

    patience_s = ROTATION_RETRY_S


def _reason_of(error: Exception) -> str:
    """The reason that a person reads: the system's words, or a bug's."""
    if isinstance(error, OSError):
        return error.strerror or os.strerror(error.errno or 0)
    return f"{type(error).__name__}: {error}"


class Recorder:
    """Records one run of a leader into ``directory``. See the module for its promises.

    Everything below the number that ``keyframe`` returns first must have been published before. Raises ``UsageError``
    when the directory cannot be written or is being recorded to.
    """

    def __init__(
        self, directory: Path, *, config: LeaderConfig, incarnation: str, keyframe: TakeKeyframe,
        clock_anchor_ns: int | None = None, labels: Mapping[str, str] | None = None, program: str = "",
        segment_bytes: int = SEGMENT_BYTES, segment_ns: int = SEGMENT_NS, keyframe_events: int | None = None,
        sync_interval_s: float | None = SYNC_INTERVAL_S, queue_bytes: int = QUEUE_BYTES_MAX, seal: bool = True,
        open_file: OpenFile = SegmentFile, clock: Callable[[], int] = time.monotonic_ns,
        retention: Retention = KEEP_ALL, prepared: Prepared | None = None, facts: TakeFacts | None = None,
    ) -> None:
        """Without ``facts`` every keyframe is complete."""
        self.directory = directory
        self.retention = retention
        self._take_keyframe = keyframe
        self._take_facts = facts
        self._segment_bytes, self._segment_ns = segment_bytes, segment_ns
        self._queue_bytes = queue_bytes
        self._fixed_spacing = keyframe_events
        self._open_file, self._clock, self._seal, self._sync_interval_s = open_file, clock, seal, sync_interval_s
        ready = prepare(directory) if prepared is None else prepared
        self._lock, left = ready.lock, ready.left
        try:
            seq, first_facts, memory = keyframe()
            anchor = time.time_ns() if clock_anchor_ns is None else clock_anchor_ns
            self._segment = SegmentWriter(directory, About(
                program=program, incarnation=incarnation, segment=left.next_segment, first_seq=seq,
                clock_anchor_ns=anchor, config=config, labels=dict(labels or {}),
            ), open_file)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise UsageError(f"cannot record to {directory}: {error.strerror}") from None
            raise
        # The service's thread writes these.
        self._head = seq
        self._last_ns = 0
        self._dropped = self._since_keyframe = self._since_complete = self._keys_sent_bytes = self._healed_loss = 0
        self._overflowing = self._rotating = False
        """A rotation was asked for and is neither done nor refused; the writing thread clears it."""
        self._segment_began_ns = self._rotation_failed_ns = self._refused_ns = clock()
        self._rotation_patience_ns = 0
        self._rotation_refused: str | None = None
        """Why the last rotation failed; the old segment goes on meanwhile."""
        self._keyframe_refused: str | None = None
        """Why the last keyframe was left out; new events follow the keyframe before."""
        self._closed = self._durable = self._sealed = self._released = False
        self.unsealed: list[Path] = []
        """Segments that ``close`` left active."""
        # The writing thread writes these; the service's thread only reads them.
        self._next_seq = seq
        self._log_ns = self._last_publish_ns = anchor
        self.written_seq = seq - 1
        """The last event that survives a ``kill -9``; the first number minus 1 at the beginning."""
        self._spacing = self._complete_spacing = keyframe_events or KEYFRAME_EVENTS_MIN
        self._keys_done_bytes = 0
        self._asked_ns: int | None = None
        """Time of the request that the disk has not answered yet."""
        self._loss = self._healable_loss = self._lost = self._tried_ns = 0
        self._down = False
        self._patience_s = RETRY_S
        self._reason: str | None = None
        self._begin(first_facts, memory, left.to_seal)

    def _begin(self, facts: fmt.Bytes, memory: bytes, to_seal: list[Path]) -> None:
        self._granted = 0
        """Up to this size of the segment retention has made room."""
        self._written_keyframes = self._keyframe_bytes = self._memory_bytes = 0
        """Keyframes of this run; bytes of the last, and compressed bytes of the last memory."""
        self._complete_bytes = 0, 0
        """Bytes of the last complete keyframe, and of a segment's file up to its end if it is the first in there.
        Both threads read them, so they change together."""
        self._sealer = BackgroundSealer(
            self.directory, self.retention, to_seal if self._seal else [],
            lambda: max(0, self._segment_limit - self._segment.size),
        )
        # A sync after every flush needs a write after every flush.
        self._queue = WriteQueue(self._queue_bytes, 0.0 if self._sync_interval_s == 0 else WRITE_GAP_S)
        self._syncer = Syncer(
            self.directory, self._segment.file, lambda: self.written_seq, self._clock,
            interval_s=self._sync_interval_s, retired=self._sealer.add if self._seal else lambda path: None,
        )
        self._put_key(Key(self._head, 0, facts, memory, 0, False))
        self._taken: list[Item] = []
        """The work of the writing thread."""
        self._worker = Worker("recorder", self._run)
        self.workers = {
            "recorder": self._worker, "recorder sync": self._syncer.worker, "recorder seal": self._sealer.worker,
        }
        """Its threads by name; ``restart`` restarts an ended thread."""

    # --- the service's thread ----------------------------------------------------------------------------------------

    def offer(self, stimuli: StimulusChunk | None, events: EventChunk | None) -> None:
        """Take the chunks of one flush; they are recorded or counted as lost. Never waits, never raises."""
        if self._closed:
            return
        head = self._head
        if events is not None:
            self._head = max(head, events.first_seq + events.count)
            self._last_ns = max(self._last_ns, events.last_ns)
            # Chunks that do not follow each other (a recorder started between two flushes) are healed like a loss.
            self._overflowing |= events.first_seq != head
        loss = self._loss
        self._overflowing |= not self._has_room(self._queue_bytes)
        if loss != self._healed_loss or self._overflowing:
            self._dropped += self._head - head
            if self._healable_loss == loss and self._has_room(self._queue_bytes // 2) and not self._key_waits():
                self._send_keyframe(loss, self._rotation_is_due())  # it costs a keyframe anyway
            return
        size = (len(stimuli.data) if stimuli else 0) + (len(events.data) if events else 0)
        self._queue.put(Chunks(stimuli, events, size))
        if events is not None:
            self._since_keyframe += events.count
            self._since_complete += events.count
        if self._keyframes_wait() or self._key_waits():
            return
        due = self._since_keyframe >= self._spacing
        if not self._rotation_waits() and self._rotation_is_due(self._keyframe_bytes if due else 0):
            self._send_keyframe(loss, True)
        elif due:
            self._send_keyframe(loss, False, complete=self._since_complete >= self._complete_spacing)

    def status(self) -> RecorderStatus:
        """The watermarks and counts as of now."""
        synced_seq = self._syncer.synced_seq
        failed, hanging = self._syncer.failed, self._hanging()
        losing = self._down or self._overflowing or failed is not None or self._loss != self._healed_loss
        ended = next((f"its thread {name!r} ended" for name, worker in self.workers.items() if worker.ended), None)
        reason = ended or hanging or (failed.error if failed else self._reason if losing else self._hindrance())
        segment = self._segment
        path = segment.path.with_suffix(".mcap") if self._sealed else segment.path
        return RecorderStatus(
            "closed" if self._closed else "degraded" if losing or reason else "recording", self.written_seq, synced_seq,
            max(0, self._clock() - self._syncer.synced_ns), self._dropped + self._lost, str(path), segment.size,
            segment.about.segment, reason, self._syncer.failures, self._sealer.removed_segments,
        )

    @property
    def unwritten(self) -> int:
        """Events that were offered and are neither written nor counted as lost."""
        return min(self._queue.events, self._head - self._next_seq)

    def _hanging(self) -> str | None:
        """The call that the disk has not answered."""
        now_ns = self._clock()
        for call, since_ns in (("write", self._asked_ns), ("sync", self._syncer.asked_ns)):
            if since_ns is not None and now_ns - since_ns >= HANG_S * SECOND_NS:
                return f"the disk has not answered a {call} for more than {HANG_S:g} s"
        return None

    def restart(self, name: str) -> None:
        """Begin one of ``workers`` again after it ended. The current work of the writing thread is lost, and
        counted."""
        worker = self.workers[name]
        if worker is self._worker:
            taken, self._taken = self._taken, []
            self._lose(RuntimeError(worker.ended))
            self._lost += sum(
                item.events.count for item in taken
                if isinstance(item, Chunks) and item.events is not None and item.events.first_seq >= self._next_seq
            )
            self._rotating = False
            self._keys_done_bytes += sum(item.size for item in taken if isinstance(item, Key))
            self._queue.forget(taken)
        worker.restart()

    def _hindrance(self) -> str | None:
        """The reason why the directory is not as asked for although no event is lost."""
        if self._keyframe_refused is not None:
            return f"no keyframe is written, so replays begin at the last one: {self._keyframe_refused}"
        if self._rotation_refused is not None:
            return f"no new segment can begin: {self._rotation_refused}"
        return self._misfit() or self._sealer.failure

    def _misfit(self) -> str | None:
        """The sentence that ``keep`` has no room for a segment and the beginning of the next; None if it has.

        An eighth of a keyframe is for the flushes that are written while the rotation is on its way.
        """
        keep, (_, first) = self.retention.keep_bytes, self._complete_bytes
        if keep is None or self._segment_limit + first + first // 8 + keep // KEEP_PER_MARKS <= keep:
            return None
        return f"keep is {keep} bytes, less than two segments with keyframes of {first} bytes"

    def settle(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until all offered chunks are written or counted, then for a sync; False when the disk takes longer.

        For tools and tests: a service never waits for its recorder.
        """
        passed = threading.Event()
        self._queue.put(passed)
        return passed.wait(timeout_s) and self._syncer.sync(timeout_s)

    def end(self) -> None:
        """Write all offered chunks, end the segment, sync; bounded in time. ``close`` is still to come."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        written = self._worker.join(CLOSE_TIMEOUT_S)
        self._durable = written and self._syncer.stop(CLOSE_TIMEOUT_S)

    def close(self, give_up: Callable[[], bool] = never) -> None:
        """``end``, seal each segment that is left until ``give_up`` says so, give the directory back.

        Where the disk did not let it end, nothing else is asked of the disk.

        Sealing takes about 20 ms of CPU for each MB. An unsealed segment stays as it is: it is whole and readable, and
        the next recorder in the directory or ``rec index`` seals it.
        """
        self.end()
        if self._released:
            return
        self._released = True
        stopped = self._sealer.stop(CLOSE_TIMEOUT_S)
        if self._durable and self._seal:
            with contextlib.suppress(OSError):  # a directory that was removed holds nothing to seal
                self.unsealed = [
                    path for path in active_segments(self.directory)
                    if not (self._sealer.has_room(path, 0) and try_seal(path, give_up))
                ]
                self._sealed = self._segment.path not in self.unsealed
        if self._durable and stopped:
            self._sealer.retain(0)
        self._lock.release()

    def rotate(self) -> bool:
        """Begin a new segment; everything published must have been offered. False while events are being lost."""
        if self._closed or self._overflowing or self._loss != self._healed_loss:
            return False
        return self._send_keyframe(self._loss, True)

    def _has_room(self, limit: int) -> bool:
        return self._queue.bytes <= limit

    @property
    def _segment_limit(self) -> int:
        """Bytes at which a segment ends.

        It is the size that was asked for, and at least some of its keyframe, since each rotation costs an export of
        the whole state. ``keep`` has room for a segment, the segment before and the draft of its sealing, or for two
        segments where keyframes are too large for three.
        """
        keep, (keyframe, opening) = self.retention.keep_bytes, self._complete_bytes
        wanted = max(self._segment_bytes, KEYFRAMES_PER_SEGMENT * keyframe)
        if keep is None:
            return max(wanted, 2 * keyframe)
        wanted = min(wanted, keep * KEEP_SHARE_PERCENT // 100)
        return max(wanted, min(2 * opening, keep * KEEP_SHARE_MAX_PERCENT // 100), opening + opening // 8)

    def _rotation_is_due(self, growth: int = 0) -> bool:
        """True if the segment is over, or would be with ``growth`` more bytes."""
        if self._syncer.failed is not None or self._segment.broken or self._segment.moved:
            return True
        known = any(self._complete_bytes)  # the limit follows from the first keyframe, which may just be on its way
        return (
            (known and self._segment.size + self._queue.bytes + growth >= self._segment_limit)
            or self._clock() - self._segment_began_ns >= self._segment_ns
        )

    def _key_waits(self) -> bool:
        """True if keyframes that are on their way are as large as flushes that may wait beside them."""
        return self._keys_sent_bytes - self._keys_done_bytes > self._queue_bytes // 2

    def _rotation_waits(self) -> bool:
        """True if a rotation is on its way, or was refused a moment ago."""
        refused = self._rotation_refused is not None
        return self._rotating or (refused and self._clock() - self._rotation_failed_ns < self._rotation_patience_ns)

    def _keyframes_wait(self) -> bool:
        """True if the last keyframe was too large for a frame and the segment may still grow without a keyframe."""
        if self._keyframe_refused is None or self._clock() - self._refused_ns >= TOO_LARGE_RETRY_S * SECOND_NS:
            return False
        return self._may_grow()

    def _may_grow(self) -> bool:
        """True if this segment may exceed its limit; False where that would exceed ``keep``."""
        return self.retention.keep_bytes is None or self._segment.size < self._segment_limit

    def _send_keyframe(self, loss: int, rotate: bool, *, complete: bool = True) -> bool:
        if complete or self._take_facts is None:
            seq, facts, memory = self._take_keyframe()
        else:
            seq, facts = self._take_facts()
            memory = b""
        if seq != self._head:
            return False  # taken between two flushes: the next keyframe will fit
        self._rotating |= rotate
        self._put_key(Key(seq, self._last_ns, facts, memory, loss, rotate))
        self._healed_loss = loss
        self._overflowing = False
        self._since_keyframe = 0
        if memory:
            self._since_complete = 0
        return True

    def _put_key(self, key: Key) -> None:
        self._keys_sent_bytes += key.size
        self._queue.put(key)

    # --- the writing thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                items = self._queue.take(RETRY_S if self._down else None)
            except queue.Empty:
                self._probe()
                continue
            self._taken = items
            last = items[-1]
            chunks = [item for item in items if isinstance(item, Chunks)]
            if chunks:
                self._write_chunks(chunks)
            if last is None:
                break
            if isinstance(last, Key):
                self._write_keyframe(last)
            if self._down:
                self._probe()
            if isinstance(last, threading.Event):
                last.set()
            self._taken = []
            self._done(items)
        self._finish()

    def _done(self, items: list[Item]) -> None:
        self._keys_done_bytes += sum(item.size for item in items if isinstance(item, Key))
        self._queue.done(items)

    def _write_chunks(self, batch: Sequence[Chunks]) -> None:
        if not self._down:
            try:
                self._append([entry for chunks in batch for entry in _entries(chunks)])
            except Exception as error:  # the edge of a thread: a bug or no memory is a loss, stated as any other
                if len(batch) > 1:
                    for chunks in batch:  # as much as still fits
                        self._write_chunks([chunks])
                    return
                self._lose(error)
        if self._down:
            self._lost += sum(chunks.events.count for chunks in batch if chunks.events is not None)
        elif self._sync_interval_s == 0:
            self._syncer.wake()

    def _write_keyframe(self, item: Key) -> None:
        try:
            if item.loss != self._loss:
                return  # taken before the last failure; the next keyframe is on its way
            rotated = (item.rotate or self._segment.broken) and self._rotate(item)
            if not rotated:
                about = None if self._written_keyframes else self._segment.about
                self._append_keyframe(self._segment, item, self._frames_of(item, about))
            self._down = False
            self._reason = self._keyframe_refused = None
            self._space(item)
        except FrameTooLarge as error:
            if self._down or not self._written_keyframes or item.seq != self._next_seq or not self._may_grow():
                self._lose(error)
            else:  # no event is lost: new events follow the keyframe before
                self._keyframe_refused, self._refused_ns = _reason_of(error), self._clock()
        except Exception as error:  # as above
            self._lose(error)
        finally:
            if item.rotate:
                self._rotating = False

    def _space(self, item: Key) -> None:
        """Set the distance of keyframes from now on, by the size of this keyframe."""
        if self._fixed_spacing is not None:
            return
        compress = zstandard.ZstdCompressor(level=1).compress
        if item.memory:
            self._memory_bytes = len(compress(item.memory))
            wanted = self._memory_bytes // KEYFRAME_BYTES_PER_EVENT
            self._complete_spacing = max(KEYFRAME_EVENTS_MIN, min(wanted, COMPLETE_EVENTS_MAX))
        wanted = (len(compress(item.facts)) + self._memory_bytes) // KEYFRAME_BYTES_PER_EVENT
        self._spacing = max(KEYFRAME_EVENTS_MIN, min(wanted, KEYFRAME_EVENTS_MAX))

    def _frames_of(self, item: Key, about: About | None) -> list[_Entry]:
        """The frames of a keyframe. Raises ``FrameTooLarge``."""
        if item.size > fmt.KEYFRAME_BYTES_MAX:
            raise FrameTooLarge(0, f"a keyframe of {item.size} bytes is above the limit of {fmt.KEYFRAME_BYTES_MAX}")
        keyframe = Keyframe(item.seq, bool(item.memory), item.facts, item.memory, about)
        return [(channel, 0, item.at_ns, item.at_ns, data) for channel, data in fmt.encode_keyframe(keyframe)]

    def _append_keyframe(self, segment: SegmentWriter, item: Key, frames: list[_Entry]) -> None:
        """A gap if something is missing in front of it, then the keyframe."""
        if item.seq > self._next_seq:
            self._append_gap(segment, item.seq - 1)
        self._append(frames, segment)
        self._written_keyframes += 1
        self._keyframe_bytes = sum(len(data) for *_, data in frames)
        if item.memory or not any(self._complete_bytes):
            self._complete_bytes = self._keyframe_bytes, self._begin_bytes(segment.about, frames)

    def _begin_bytes(self, about: About, frames: list[_Entry]) -> int:
        """Bytes of the file with which a segment begins: its preamble and these frames."""
        return len(fmt.encode_preamble(about)) + sum(len(data) + FRAME_HEAD_BYTES for *_, data in frames)

    def _append_gap(self, segment: SegmentWriter, last: int) -> None:
        gap = Gap(self._next_seq, last, self._reason or "the writer fell behind")
        self._append_mark(segment, gap)
        segment.gaps.append(gap)

    def _append_mark(self, segment: SegmentWriter, mark: Mark) -> None:
        count = mark.count if isinstance(mark, Gap) else 0
        self._append([(fmt.MARKS, count, 0, 0, fmt.encode_item(mark))], segment)

    def _append(self, entries: Iterable[_Entry], segment: SegmentWriter | None = None) -> None:
        segment = segment or self._segment
        anchor = segment.about.clock_anchor_ns
        seq, log_ns, publish_ns = self._next_seq, self._log_ns, self._last_publish_ns
        frames = []
        for channel, count, base_ns, last_ns, data in entries:
            if len(data) + fmt.MESSAGE_BODY_HEAD_BYTES > fmt.FRAME_BYTES_MAX:
                raise FrameTooLarge(0, f"a frame of {len(data)} bytes is above the limit of {fmt.FRAME_BYTES_MAX}")
            log_ns = max(log_ns, anchor + base_ns)
            publish_ns = max(publish_ns, log_ns, anchor + last_ns)
            frame = Frame(channel, seq, count, log_ns, publish_ns, data)
            frames.append(frame)
            seq = frame.end_seq
        if segment is self._segment and any(frame.channel != fmt.MARKS for frame in frames):
            self._make_room(sum(len(frame.data) + FRAME_HEAD_BYTES for frame in frames))
        with self._asking():
            segment.append(*frames)
        self._next_seq, self._log_ns, self._last_publish_ns = seq, log_ns, publish_ns
        if segment is self._segment:
            self.written_seq = self._next_seq - 1

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Around a call that a disk may never answer."""
        self._asked_ns = self._clock()
        try:
            yield
        finally:
            self._asked_ns = None

    def _make_room(self, size: int) -> None:
        """Let older segments make way for so many bytes. Raises ``KeepReached``."""
        keep, segment = self.retention.keep_bytes, self._segment
        if keep is None:
            return
        next_one = self._complete_bytes[1] + keep // KEEP_PER_MARKS
        if 2 * next_one <= keep < segment.size + size + next_one:  # a rotation was refused again and again
            if (misfit := self._misfit()) is not None:
                raise KeepReached(0, misfit)
            raise SegmentOver(0, f"no new segment can begin: {self._rotation_refused or 'the writer fell behind'}")
        if segment.size + size <= self._granted:
            return
        for wanted in (max(size, self._segment_limit - segment.size), size):
            if self._retained(wanted + keep // KEEP_PER_MARKS):
                self._granted = segment.size + wanted
                return
        raise self._keep_reached()

    def _retained(self, size: int) -> bool:
        with self._asking():
            return self._sealer.retain(size)

    def _keep_reached(self) -> KeepReached:
        return KeepReached(0, self._misfit() or (
            f"keep is {self.retention.keep_bytes} bytes, and files that may not be removed take too many of them"
        ))

    def _makes_way(self, size: int) -> bool:
        """True if this segment may be removed for the next, which begins with ``size`` bytes: ``keep`` fits two."""
        return 2 * size <= (self.retention.keep_bytes or 0)

    def _rotate(self, item: Key) -> bool:
        """Begin the next segment with this keyframe. False when the disk refuses and the old segment can go on."""
        began = self._next_seq
        about = msgspec.structs.replace(
            self._segment.about, segment=self._segment.about.segment + 1, first_seq=began
        )
        try:
            frames = self._frames_of(item, about)
            size, fits = 0, True
            if not self._segment.broken:
                keep = self.retention.keep_bytes or 0
                size = self._begin_bytes(about, frames) + keep // KEEP_PER_MARKS
                fits = self._retained(max(size, self._segment_limit)) or self._retained(size)
                if not fits and not self._makes_way(size):
                    raise self._keep_reached()
            self._lock.renew()
            with self._asking():
                new = SegmentWriter(self.directory, about, self._open_file)
            try:
                if fits:
                    self._append_keyframe(new, item, frames)
                else:
                    self._take_place(new, item, frames, size)
            except BaseException:
                self._next_seq = began
                new.discard()
                raise
        except OSError as error:
            if self._segment.broken or self._syncer.failed is not None:
                raise
            self._rotation_refused, self._rotation_failed_ns = _reason_of(error), self._clock()
            patience_s = error.patience_s if isinstance(error, KeepReached) else ROTATION_RETRY_S
            self._rotation_patience_ns = int(patience_s * SECOND_NS)
            return False
        self._rotation_refused = None
        self._granted = 0
        self._segment_began_ns = self._clock()
        old, self._segment = self._segment, new
        self.written_seq = self._next_seq - 1
        # The old segment is whole without it: a reader also goes on when the next segment begins at this segment's end.
        with contextlib.suppress(OSError):
            end = SegmentEnd(began - 1, True)
            old.append(Frame(fmt.MARKS, began, 0, self._log_ns, self._last_publish_ns, fmt.encode_item(end)))
        failed = None
        while not self._syncer.switched(new.file, failed):
            failed = self._syncer.failed
            assert failed is not None
            with contextlib.suppress(OSError):
                self._append_mark(new, failed)
        return True

    def _take_place(self, new: SegmentWriter, item: Key, frames: list[_Entry], size: int) -> None:
        """Begin the next segment in place of this one. While rotations were refused, this one or its keyframe has grown
        beyond what was left for the next: it is the oldest now, and goes."""
        old, fits = self._segment, self._retained(size)
        try:
            old.file.check(old.size)
        except OSError:
            old.broken = old.changed = True  # if the next cannot begin, what was acknowledged is counted as lost
        if not fits:
            raise self._keep_reached()
        try:
            self._append_keyframe(new, item, frames)
        except OSError:
            if not old.changed:
                raise
            with contextlib.suppress(OSError):
                old.file.truncate(0)  # a full disk does not have the room of a removed file that is still open
            self._append_keyframe(new, item, frames)

    def _lose(self, error: Exception) -> None:
        self._down = True
        self._loss += 1
        self._reason = _reason_of(error)
        self._tried_ns = self._clock()
        self._patience_s = RETRY_S
        if isinstance(error, FrameTooLarge | KeepReached):
            self._patience_s = error.patience_s
        if self._segment.changed:
            # Acknowledged events are gone. They are counted now, and the next segment begins with a gap over them.
            self._segment.changed = False
            survivor = self._segment.survivors()
            self._lost += self._next_seq - survivor - sum(
                max(0, gap.last + 1 - max(gap.first, survivor)) for gap in self._segment.gaps  # counted already
            )
            self._next_seq = survivor
            self.written_seq = survivor - 1

    def _probe(self) -> None:
        """Try whether the disk takes a gap; if so, ask for the keyframe that ends the loss."""
        now_ns = self._clock()
        if self._healable_loss == self._loss or now_ns - self._tried_ns < self._patience_s * SECOND_NS:
            return
        self._tried_ns = now_ns
        try:
            if not self._segment.broken:
                self._append_gap(self._segment, self._head - 1)
        except OSError:
            return
        self._healable_loss = self._loss

    def _finish(self) -> None:
        with contextlib.suppress(OSError):
            if self._head > self._next_seq:
                self._append_gap(self._segment, self._head - 1)
            self._append_mark(self._segment, SegmentEnd(self._next_seq - 1, False))


class RecorderNotes:
    """Tells the stream the losses of its own recorder: begin and reason, and at the end the number of lost events.

    A recording is read when its daemon is gone, so both ends of a loss are events like any other. The first is usually
    part of the loss; the second stands behind the gap and counts exactly what the gap counts. ``look`` is called about
    ten times a second, outside of any publication. ``submit`` is the dispatcher's.
    """

    def __init__(self, submit: Callable[..., object]) -> None:
        self._submit = submit
        self._recorder: Recorder | None = None
        self._degraded = False
        self._told_count = 0

    def look(self, recorder: Recorder | None) -> None:
        """Submit ``NoteReported`` when the recorder began to lose events, or ended to."""
        if recorder is not self._recorder:
            if self._degraded and self._recorder is not None:
                self._end(self._recorder.status().not_recorded, "stopped")
            self._recorder, self._told_count = recorder, 0
        if recorder is None:
            return
        status = recorder.status()
        degraded = status.state == "degraded"
        if not self._degraded and (degraded or status.not_recorded > self._told_count):
            self._degraded = True
            self._submit(NoteReported, Note.RECORDER_DEGRADED, status.reason or "the writer fell behind")
        if degraded:
            # With nothing to publish no other call would find out whether the disk takes events again.
            recorder.offer(None, None)
        elif self._degraded:
            self._end(status.not_recorded, "recording again")

    def _end(self, not_recorded: int, how: str) -> None:
        lost, self._told_count = not_recorded - self._told_count, not_recorded
        self._degraded = False
        self._submit(NoteReported, Note.RECORDER_RESUMED, f"{how}; {lost:,} events were not recorded")
