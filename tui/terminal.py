"""The terminal that the console writes to, which may be slow, stand still or be gone.

Law of this file: a terminal that takes no output costs frames, and never keys, feeds or an orderly end. The loss of the
terminal ends the console in order.
"""

import contextlib
import os
import queue
import sys
from collections.abc import Callable
from typing import IO, Any, Final

from textual.drivers.linux_driver import LinuxDriver

WAITING_MAX: Final = 4
"""Writes that may wait for the terminal before frames are left out."""
CLOSE_S: Final = 3.0
"""The time that a closing console waits for a stalled terminal to take the restoring codes."""
GONE: Final = 129
"""Exit status of a console that lost its terminal: that of SIGHUP."""


class Terminal(LinuxDriver):
    """Textual's driver, made safe: its writer ends with the first error, and then every write would wait for ever.
    Textual draws to stderr; this driver draws to stdout where stderr is no terminal (``2>errors``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        file = self._file if self._file.isatty() or sys.__stdout__ is None else sys.__stdout__
        self._file: Any = _Sink(file, self._hung_up)

    def _get_terminal_size(self) -> tuple[int, int]:
        """The terminal's own word. ``COLUMNS`` and ``LINES`` of the environment never change, so they would hide every
        resize; a parent process that has loaded readline exports both."""
        with contextlib.suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(self._file.fileno())
            if columns and rows:
                return columns, rows
        return super()._get_terminal_size()

    @property
    def behind(self) -> bool:
        """True if the terminal has not taken earlier writes."""
        writer = self._writer_thread
        return writer is not None and writer._queue.qsize() > WAITING_MAX

    def run_input_thread(self) -> None:
        """Read input as Textual does; the loss of the terminal ends the console in order."""
        try:
            super().run_input_thread()
        except OSError:
            self._hung_up()

    def _hung_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._app.exit, GONE, GONE)

    def close(self) -> None:
        """Let the writer finish, with a bound in time."""
        writer = self._writer_thread
        if writer is not None:
            with contextlib.suppress(queue.Full):
                writer._queue.put(None, timeout=CLOSE_S)
            writer.join(CLOSE_S)


class _Sink:
    """A file that goes on accepting text when its reader is gone."""

    def __init__(self, file: IO[str], hung_up: Callable[[], None]) -> None:
        self._file = file
        self._hung_up = hung_up
        self._gone = False

    def write(self, text: str) -> None:
        """Write to the terminal, while there is a terminal."""
        if not self._gone:
            try:
                self._file.write(text)
            except OSError:
                self._end()

    def flush(self) -> None:
        """Flush the terminal, while there is a terminal."""
        if not self._gone:
            try:
                self._file.flush()
            except OSError:
                self._end()

    def fileno(self) -> int:
        """The descriptor of the terminal."""
        return self._file.fileno()

    def _end(self) -> None:
        self._gone = True
        self._hung_up()
