"""A mover for tests: it copies nothing before it is told to, and moves the bytes of the oracle when it does.

Law of this file: it knows orders only; an order of an older epoch runs out like any other.
"""

from kvbm_console.core.columns import unpack_ids
from kvbm_console.core.ids import Tier
from kvbm_console.core.instructions import StartTransfer

from .oracle import Bytes


class MoverModel:
    """Orders that wait, orders that run, and which ranks have reported."""

    def __init__(self, contents: Bytes, ranks: int) -> None:
        self.contents = contents
        self.ranks = ranks
        self.pools: dict[Tier, int] = {}
        self.queued: dict[int, StartTransfer] = {}
        self.running: dict[int, StartTransfer] = {}
        self.reported: dict[int, set[int]] = {}
        self.failed: dict[int, set[int]] = {}
        self.ended: list[StartTransfer] = []

    @property
    def orders(self) -> dict[int, StartTransfer]:
        """Everything that was ordered and has not ended."""
        return {**self.queued, **self.running}

    def queue(self, order: StartTransfer) -> None:
        assert order.operation not in self.queued
        assert order.operation not in self.reported
        self.queued[order.operation] = order

    def cancel(self, operation: int) -> None:
        assert operation in self.queued, f"operation {operation} cannot be cancelled any more"
        del self.queued[operation]

    def start(self, operation: int) -> StartTransfer:
        order = self.running[operation] = self.queued.pop(operation)
        self.reported[operation], self.failed[operation] = set(), set()
        self.contents.begin(operation, self.pools[order.route.source], unpack_ids(order.sources))
        return order

    def missing(self, operation: int) -> list[int]:
        """Ranks that have not reported."""
        return [rank for rank in range(self.ranks) if rank not in self.reported[operation]]

    def report(self, operation: int, rank: int, failed: set[int] | None) -> StartTransfer:
        """A rank has ended its part; ``failed`` None: nothing of it arrived."""
        order = self.running[operation]
        self.reported[operation].add(rank)
        self.failed[operation] |= set(range(order.blocks)) if failed is None else failed
        if not self.missing(operation):
            del self.running[operation]
            self.ended.append(order)
            pools = self.pools[order.route.source], self.pools[order.route.target]
            self.contents.end(operation, pools, unpack_ids(order.sources), unpack_ids(order.targets),
                              self.failed[operation])
        return order
