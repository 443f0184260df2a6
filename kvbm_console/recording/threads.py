"""The threads of a recorder: how they run, the queue of the writing thread, and the sync thread.

A thread that releases the interpreter beside a busy thread gets it back only after a switch interval of 5 ms. Waking it
costs more than its work for a flush. So behind each write the writing thread rests for ``WRITE_GAP_S`` and then takes
all waiting flushes in a single write.

The sync thread makes written events survive a power loss, once a second. ``synced_seq`` names an event only when all
files up to that event, and their directory entries, were made durable after the write. A file whose sync failed is
never synced again. The kernel may have forgotten the pages that it could not write, so a second call would lie.

Law of this file: an item is taken once, in order, ``put`` never waits, and a thread that ends by itself says why.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.recording.files import SegmentFile, sync_directory
from kvbm_console.recording.format import Bytes, SyncFailed
from kvbm_console.recording.options import SYNC_INTERVAL_S
from kvbm_console.wire.batches import EventChunk, StimulusChunk

log = logging.getLogger("kvbm_console.recording")


class Worker:
    """A thread that runs ``work`` until it returns."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.ended: str | None = None
        """Why it ended without being asked to; None while it runs, and when it returned."""
        self._work = work
        self._begin()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"kvbm-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the edge of a thread: a bug is kept in ``ended``
            log.exception("the thread %s ended", self.name)
            self.ended = f"{type(error).__name__}: {error}"

    def restart(self) -> None:
        """Begin again after it ended."""
        self._thread.join()
        self.ended = None
        self._begin()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; False when it takes longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


# --- the queue of the writing thread ----------------------------------------------------------------------------------


WRITE_GAP_S: Final = 0.05
"""The longest delay of a write. A kill loses at most this time, while a power loss takes a second."""
HURRY_SHARE: Final = 4
"""The rest ends when 1/4 of the bytes that may wait do wait."""
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
    facts: Bytes
    memory: bytes
    loss: int
    rotate: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.facts) + len(self.memory)


Item = Chunks | Key | threading.Event | None
"""An event is set when all in front of it is done; None ends the thread."""


class WriteQueue:
    """The queue between the service's thread, which puts, and the writing thread, which takes.

    ``bytes_max`` is the limit of waiting bytes; without ``gap_s`` the thread never rests.
    """

    def __init__(self, bytes_max: int, gap_s: float = WRITE_GAP_S) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._hurry_bytes = bytes_max // HURRY_SHARE
        self._gap_s = gap_s
        self._put_bytes = self._done_bytes = self._put_events = self._done_events = 0
        self._turn = 0
        """Items to be done before the next rest."""

    @property
    def bytes(self) -> int:
        """Bytes that were put and are not done."""
        return self._put_bytes - self._done_bytes

    @property
    def events(self) -> int:
        """Events that were put and are not done."""
        return self._put_events - self._done_events

    def put(self, item: Item) -> None:
        """Add to the end. An event or the end wakes the thread, because a caller waits for it."""
        if isinstance(item, Chunks):
            self._put_bytes += item.bytes
            self._put_events += item.events.count if item.events is not None else 0
        waited_for = self.bytes > self._hurry_bytes if isinstance(item, Chunks | Key) else True
        self._items.put(item)
        if waited_for:
            self._hurry.set()

    def take(self, timeout_s: float | None) -> list[Item]:
        """At least one item, at most ``BATCH_MAX`` flushes; only the last may be no flush. Raises ``queue.Empty``."""
        items = [self._items.get(timeout=timeout_s)]
        while isinstance(items[-1], Chunks) and len(items) < BATCH_MAX and not self._items.empty():
            items.append(self._items.get())
        return items

    def forget(self, items: list[Item]) -> None:
        """The items wait no more."""
        chunks = [item for item in items if isinstance(item, Chunks)]
        self._done_bytes += sum(item.bytes for item in chunks)
        self._done_events += sum(item.events.count for item in chunks if item.events is not None)

    def done(self, items: list[Item]) -> None:
        """The items are written or counted. Rest after the last item that waited at the end of the rest before."""
        self.forget(items)
        self._turn -= len(items)
        if self._gap_s and self._turn <= 0:
            # Items that come during a write do not prevent the rest, because beside a busy thread some always come.
            self._hurry.wait(self._gap_s)
            self._hurry.clear()
            self._turn = self._items.qsize()


# --- the sync thread --------------------------------------------------------------------------------------------------


class Syncer:
    """Syncs the files of one recorder. ``written`` returns the last event in the files.

    It syncs every ``interval_s``; with 0 only when woken (after every flush), with None at the end of a segment.
    """

    def __init__(
        self, directory: Path, first: SegmentFile, written: Callable[[], int], clock: Callable[[], int], *,
        interval_s: float | None = SYNC_INTERVAL_S, retired: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.synced_seq = written()
        self.synced_ns = clock()
        """The monotonic time at which ``synced_seq`` was taken."""
        self.failed: SyncFailed | None = None
        """Set when the current segment is over because of it; ``switched`` clears it."""
        self.failures = 0
        self.asked_ns: int | None = None
        """Start of the pass that the disk has not let end yet."""
        self._directory = directory
        self._written = written
        self._clock = clock
        self._interval_s = interval_s or None
        self._retired = retired
        self._files = [first]
        self._entries_synced = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: list[threading.Event] = []
        self._stopping = False
        self.worker = Worker("recorder-sync", self._run)

    def switched(self, new: SegmentFile, told: SyncFailed | None) -> bool:
        """The recorder writes to ``new`` now, in which it has ``told`` of the failed sync before it.

        False if another sync has failed: no sync of ``new`` may pass events of which it does not tell.
        """
        with self._lock:
            if self.failed is not told:
                return False
            if told is not None:
                self.failed = None
                self._files.pop().close()
            self._files.append(new)
            self._entries_synced = False
        self._wake.set()
        return True

    def wake(self) -> None:
        """Sync now, without waiting for it; several wakes during a pass cause a single further pass."""
        self._wake.set()

    def sync(self, timeout_s: float) -> bool:
        """Wait for a pass that begins after this call; False when it takes longer."""
        done = threading.Event()
        with self._lock:
            self._waiting.append(done)
        self._wake.set()
        return done.wait(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Sync a last time, close every file, end the thread; False when the disk did not let it within the time."""
        self._stopping = True
        self._wake.set()
        if not self.worker.join(timeout_s):
            return False
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        return True

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            with self._lock:
                waiting, self._waiting = self._waiting, []
            self._timed_pass()
            for done in waiting:
                done.set()
        self._timed_pass()

    def _timed_pass(self) -> None:
        self.asked_ns = self._clock()
        try:
            self._pass()
        finally:
            self.asked_ns = None

    def _pass(self) -> None:
        # The order matters: events up to this number are in files of the list, which is copied afterwards.
        written = self._written()
        with self._lock:
            if self.failed is not None:
                return
            files = list(self._files)
            entries_synced = self._entries_synced
        if written == self.synced_seq and entries_synced and len(files) == 1:
            self.synced_ns = self._clock()
            return
        for file in files:
            try:
                file.datasync()
            except OSError as error:
                self._fail(file, written, error)
                return
        if not entries_synced:
            try:
                sync_directory(self._directory)
            except OSError as error:
                self._fail(files[-1], written, error)
                return
        with self._lock:
            if files[-1] is self._files[-1]:
                self._entries_synced = True
            old, self._files = files[:-1], self._files[len(files) - 1 :]
        self.synced_ns = self._clock()
        self.synced_seq = written
        for file in old:
            file.close()
            self._retired(file.path)

    def _fail(self, file: SegmentFile, written: int, error: OSError) -> None:
        with self._lock:
            self.failures += 1
            if file is self._files[-1]:
                self.failed = SyncFailed(self.synced_seq + 1, written, error.strerror or str(error))
                return
            # An older segment: it is finished and readable, only not known to be durable.
            self._files.remove(file)
        file.close()
        self._retired(file.path)
