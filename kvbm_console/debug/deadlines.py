"""Deadlines of the wall clock: the longest time that a hold may last.

Law of this file: a deadline that was set and not cleared is sent exactly once, however late the loop is.
"""

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """What ``call_later`` of an event loop returns."""

    def cancel(self) -> None:
        """Forget the call."""
        ...


class WallDeadlines:
    """Timers on the event loop's clock, which is monotonic: a step of the wall clock does not touch them.

    ``later(seconds, callback)`` is the loop's ``call_later``; ``passed(deadline)`` sends the stimulus.
    """

    def __init__(self, later: Callable[[float, Callable[[], None]], Timer], passed: Callable[[int], object]) -> None:
        self._later = later
        self._passed = passed
        self._timers: dict[int, Timer] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def set(self, deadline: int, after_ns: int) -> None:
        """Send this deadline after this time; a second ``set`` replaces the first."""
        self.clear(deadline)
        self._timers[deadline] = self._later(after_ns / 1e9, lambda: self._fire(deadline))

    def clear(self, deadline: int) -> None:
        """Forget a deadline; an unknown one is fine."""
        timer = self._timers.pop(deadline, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Forget all."""
        for deadline in list(self._timers):
            self.clear(deadline)

    def _fire(self, deadline: int) -> None:
        del self._timers[deadline]
        self._passed(deadline)
