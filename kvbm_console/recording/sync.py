"""The sync thread: makes what was written survive a power loss, once a second.

Law of this file: ``synced_seq`` names an event only when every file that holds it or an earlier one, and the directory
entry of each, has been made durable after it was written. A file whose sync failed is never synced again: the kernel
may have forgotten the very pages that it could not write, and a second call would lie.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from kvbm_console.recording.files import SegmentFile, sync_directory
from kvbm_console.recording.format import SyncFailed
from kvbm_console.recording.options import SYNC_INTERVAL_S
from kvbm_console.recording.worker import Worker


class Syncer:
    """Syncs the files of one recorder. ``written`` tells the last event that is in them.

    It syncs every ``interval_s``; with 0 only when woken (after every flush), with None at the end of a segment.
    """

    def __init__(
        self, directory: Path, first: SegmentFile, written: Callable[[], int], clock: Callable[[], int], *,
        interval_s: float | None = SYNC_INTERVAL_S, retired: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.synced_seq = written()
        self.synced_ns = clock()
        """When ``synced_seq`` was taken, on the monotonic clock."""
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

    def switched(self, new: SegmentFile) -> SyncFailed | None:
        """The recorder writes to ``new`` now. Returns what failed in the segment before, if anything did."""
        with self._lock:
            failed, self.failed = self.failed, None
            if failed is not None:
                self._files.pop().close()
            self._files.append(new)
            self._entries_synced = False
        self._wake.set()
        return failed

    def wake(self) -> None:
        """Sync now, without waiting for it; several wakes while one pass runs come to one more pass."""
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
        # The order matters: events up to this one are in files that are in the list when it is copied afterwards.
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
