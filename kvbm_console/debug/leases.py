"""Leases: a session's right to keep slots waiting, for as long as it shows that it is alive.

Law of this file: time is the wall's monotonic clock, handed in; nobody holds a slot longer than ``ttl_ns`` after the
last sign of life. What follows from a lost lease is decided by the core, which is told by a stimulus.
"""

from collections.abc import Callable
from typing import Final

LEASE_TTL_NS: Final = 5_000_000_000
"""A console that is stopped for this long is taken for gone; renewed every second, so four may be late."""
LEASE_RENEW_S: Final = 1.0
"""How often a client renews."""


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
        """Who holds a lease."""
        return frozenset(self._until)

    def renew(self, owner: str, *, back: bool = False) -> None:
        """``owner`` shows that it is alive; one without a lease gets it. ``back``: it had one, and is here again."""
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

    def next_expiry_ns(self) -> int | None:
        """When ``expire`` has something to do, None when there is no lease."""
        return min(self._until.values(), default=None)
