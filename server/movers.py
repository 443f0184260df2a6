"""The feeds that move bytes, each for some ranks, and those whose stream broke while their copies may still write.

Law of this file: every rank of a copy is moved by one feed or fails. A broken stream says nothing about the bytes.
Places of open copies stay reserved until the pidfd of the mover's process says that it has ended, or until the mover
comes back and promises that no earlier copy runs.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from kvbm_console.core.instructions import StartTransfer
from kvbm_console.dispatch import Mover
from kvbm_console.wire.protocol import process_began


class RankMovers:
    """The feeds that move bytes, by rank. As a ``Mover`` it gives each order to all of them.

    ``fail(operation, epoch, rank, why)`` reports the part of a rank that no feed moves.
    """

    def __init__(self, ranks: int, fail: Callable[[int, int, int, str], None]) -> None:
        self.ranks = frozenset(range(ranks))
        self._fail = fail
        self._of: dict[int, Mover] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, ranks: AbstractSet[int], feed: Mover) -> None:
        """This feed moves the bytes of these ranks, which no other does."""
        self._of.update(dict.fromkeys(ranks, feed))

    def remove(self, feed: Mover) -> None:
        """This feed has ended."""
        self._of = {rank: one for rank, one in self._of.items() if one is not feed}

    def taken(self, ranks: AbstractSet[int]) -> list[int]:
        """Those of the ranks that have a feed."""
        return sorted(ranks & self._of.keys())

    def start(self, order: StartTransfer) -> None:
        """Copy, over there."""
        for feed in dict.fromkeys(self._of.values()):
            feed.start(order)
        for rank in sorted(self.ranks - self._of.keys()):
            self._fail(order.operation, order.epoch, rank, f"no feed moves the bytes of rank {rank}")

    def cancel(self, operation: int) -> None:
        """Do not start that copy."""
        for feed in dict.fromkeys(self._of.values()):
            feed.cancel(operation)

    def zero(self, pool: int) -> None:
        """Overwrite a pool, over there."""
        for feed in dict.fromkeys(self._of.values()):
            feed.zero(pool)


class MoverProcess:
    """The process of a mover, watched from the time when its feed was opened."""

    def __init__(self, process: int, began: int) -> None:
        self.process = process
        self._pidfd = -1
        if process > 0 and began > 0:
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(process)
                if process_began(process) != began:  # another machine's or namespace's number
                    self.close()

    @property
    def known(self) -> bool:
        """True if the end of the process will be noticed."""
        return self._pidfd >= 0

    def when_ended(self, action: Callable[[], None]) -> None:
        """Call ``action`` once, as soon as the process has ended."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._pidfd)
            self.close()
            action()

        loop.add_reader(self._pidfd, ended)

    def close(self) -> None:
        """Watch it no more."""
        if self._pidfd >= 0:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class LostMover:
    """A mover without a stream. ``finish`` ends its copies and its engine; it is called once, by ``settle``."""

    def __init__(
        self, name: str, ranks: AbstractSet[int], process: MoverProcess, finish: Callable[[], None]
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.process = process
        self._finish: Callable[[], None] | None = finish
        if process.known:
            process.when_ended(self.settle)

    @property
    def settled(self) -> bool:
        """True if none of its copies runs any more."""
        return self._finish is None

    @property
    def why(self) -> str:
        """Why its places stay reserved."""
        runs = f"its process {self.process.process} runs" if self.process.known else "its process is not known here"
        return f"its stream broke and {runs}, so its copies may still write and their places stay reserved"

    def settle(self) -> None:
        """None of its copies runs any more."""
        finish, self._finish = self._finish, None
        self.process.close()
        if finish is not None:
            finish()
