"""The driver: lets an embedded engine live in virtual time, paced to the wall by sleeping only.

Law of this file: the speed decides how long is slept between events, and nothing else; the events are the same at any.
"""

import time
from collections.abc import Callable
from typing import Final

import anyio
import anyio.lowlevel

from kvbm_console.engines.embedded import Rig
from kvbm_console.service import LeaderService

SLICE_NS: Final = 2_000_000
"""How long the engine may keep the loop: a subscriber or a control message waits at most this much longer."""
LAG_NS_MAX: Final = 1_000_000_000
"""An engine that is later than this does not catch up: after a suspended machine nobody wants an hour in a burst."""


class Pace:
    """Which virtual time it is by the wall, at a speed; moved when time stood still."""

    def __init__(self, speed: float | None, virtual_ns: int, wall: Callable[[], int] = time.monotonic_ns) -> None:
        self._speed = speed
        self._wall = wall
        self.restart(virtual_ns)

    def restart(self, virtual_ns: int) -> None:
        """It is this virtual time now."""
        self._virtual_ns = virtual_ns
        self._wall_ns = self._wall()

    def due_ns(self) -> int | None:
        """Virtual time by the wall, None when nothing is waited for."""
        if self._speed is None:
            return None
        return self._virtual_ns + int((self._wall() - self._wall_ns) * self._speed)

    def wait_s(self, virtual_ns: int) -> float:
        """Seconds of the wall until this virtual time; 0 when it has come."""
        due = self.due_ns()
        if due is None or self._speed is None:
            return 0.0
        if due - virtual_ns > LAG_NS_MAX * self._speed:
            self.restart(virtual_ns)
        return max(0.0, (virtual_ns - due) / self._speed / 1e9)


async def drive(rig: Rig, service: LeaderService, speed: float | None) -> None:
    """Run the engine until every request has ended. Waits while only held requests are left: time stands still."""
    pace = Pace(speed, rig.now_ns)
    while not rig.done:
        rig.run(pace.due_ns(), SLICE_NS)
        next_ns = rig.next_ns
        if rig.only_held or (next_ns is None and not rig.done):
            service.broadcaster.flush()
            if not rig.touched:
                await service.changed.wait()
            pace.restart(rig.now_ns)
            continue
        wait_s = 0.0 if next_ns is None else pace.wait_s(next_ns)
        if wait_s > 0:
            with anyio.move_on_after(wait_s):
                await service.changed.wait()
        else:
            await anyio.lowlevel.checkpoint()
