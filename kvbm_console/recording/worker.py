"""The threads of a recorder.

Law of this file: a thread that ends without being asked to says why, and can begin again.
"""

import logging
import threading
from collections.abc import Callable

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
        except BaseException as error:  # the edge of a thread: a bug is told to whoever watches it
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
