"""Leases and deadlines: how long a session, and each hold, may keep slots waiting.

A lease is a session's right to keep slots waiting for as long as the session shows that it is alive. A stimulus
reports a lost lease or a deadline, and the core decides the consequences.

Law of this file: time is the wall's monotonic clock, handed in. No slot is held longer than ``ttl_ns`` after the last
sign of life. A deadline that was set and not cleared is sent exactly once, however late the loop is.
"""

import asyncio
from collections.abc import Callable
from typing import Final

LEASE_TTL_NS: Final = 5_000_000_000
"""A console that is stopped for this long is taken for gone; renewed every second, so four may be late."""
LEASE_RENEW_S: Final = 1.0
"""Period of a client's renewals."""


class Leases:
    """Owners that are alive. ``granted(owner, back)`` and ``lost(owner)`` tell the core; ``expire`` calls ``lost`` too.

    >>> now, said = [0], []
    >>> leases = Leases(lambda: now[0], granted=lambda o, _: said.append(f"+{o}"), lost=lambda o: said.append(f"-{o}"))
    >>> leases.renew("console-1"); now[0] = LEASE_TTL_NS; leases.expire(); said
    ['+console-1', '-console-1']
    """

    def __init__(
        self, clock: Callable[[], int], *, granted: Callable[[str, bool], object], lost: Callable[[str], object],
        ttl_ns: int = LEASE_TTL_NS,
    ) -> None:
        self.ttl_ns = ttl_ns
        self._clock = clock
        self._granted = granted
        self._lost = lost
        self._until: dict[str, int] = {}

    @property
    def owners(self) -> frozenset[str]:
        """The owners of leases."""
        return frozenset(self._until)

    def renew(self, owner: str, *, back: bool = False) -> None:
        """Renew the lease of ``owner``, or grant it. ``back`` says that the owner had lost its lease and is
        here again."""
        new = owner not in self._until
        self._until[owner] = self._clock() + self.ttl_ns
        if new:
            self._granted(owner, back)

    def drop(self, owner: str) -> None:
        """``owner`` said goodbye, or its socket closed. An owner without a lease is fine."""
        if self._until.pop(owner, None) is not None:
            self._lost(owner)

    def expire(self) -> None:
        """Drop the leases whose time has passed."""
        now = self._clock()
        for owner in [owner for owner, until in self._until.items() if until <= now]:
            self.drop(owner)


# --- deadlines ---


class WallDeadlines:
    """Timers on the event loop's clock, which is monotonic: a step of the wall clock does not touch them.

    ``later(seconds, callback)`` is the loop's ``call_later``; ``passed(deadline)`` sends the stimulus.
    """

    def __init__(
        self, later: Callable[[float, Callable[[], None]], asyncio.TimerHandle], passed: Callable[[int], object]
    ) -> None:
        self._later = later
        self._passed = passed
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def set(self, deadline: int, after_ns: int) -> None:
        """Send this deadline after this time; a second ``set`` replaces the first."""
        self.clear(deadline)
        self._timers[deadline] = self._later(after_ns / 1e9, lambda: self._fire(deadline))

    def clear(self, deadline: int) -> None:
        """Forget a deadline; an unknown deadline is no error."""
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
