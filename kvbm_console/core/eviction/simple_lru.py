"""``simple_lru``: evict the block that was touched longest ago; deeper blocks first within one touch.

Law of this file: the order is a ring of touches, oldest first, in which only the last entry of each block lives; so a
touch of a whole prefix is two bulk operations, and a choice of victims is all or none.
"""

from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from itertools import compress
from itertools import count as numbers
from operator import eq
from typing import Any, Final

_SLACK: Final = 5_000
"""Dead entries that are carried before the ring is compacted, beside three per block: O(1) amortised."""


class SimpleLru:
    """Recency order over the blocks of one pool.

    ``order`` are keys that are resident already, coldest first.

    >>> order = SimpleLru()
    >>> order.touch([0, 1, 2], 0)
    >>> order.victims(2)
    [2, 1]
    """

    name = "simple_lru"

    def __init__(self, order: Iterable[int] = ()) -> None:
        self._ring: list[int] = list(order)
        self._at: dict[int, int] = dict(zip(self._ring, numbers()))
        self._head = 0

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._at.keys()

    def touch(self, keys: Sequence[int], at_ns: int = 0) -> None:
        """Blocks of one prefix, in prompt order, were just used (or stored); the deepest becomes the coldest."""
        ring = self._ring
        if len(ring) > 3 * len(self._at) + _SLACK:
            self._compact()
            ring = self._ring
        deepest_first = keys[::-1]
        self._at.update(zip(deepest_first, numbers(len(ring))))
        ring.extend(deepest_first)

    def forget(self, keys: Iterable[int]) -> None:
        """Blocks were given up."""
        at = self._at
        for key in keys:
            at.pop(key, None)

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` coldest evictable keys that are not protected, coldest first; None if there are fewer."""
        ring, live, head = self._ring, self._at.get, self._head
        while head < len(ring) and live(ring[head]) != head:
            head += 1
        self._head = head
        chosen: list[int] = []
        while len(chosen) < count and head < len(ring):
            # In chunks: a comprehension over what is asked for costs half of a loop that tests everything.
            end = head + max(count - len(chosen), 16)
            chosen += [
                key for place, key in enumerate(ring[head:end], head)
                if live(key) == place and key not in protected and (evictable is None or evictable(key))
            ]
            head = end
        return chosen[:count] if len(chosen) >= count else None

    def recency_agrees(self, victims: Collection[int]) -> bool:
        """Always: recency is all that there is."""
        return True

    def gauges(self) -> dict[str, float]:
        """Nothing beside what every policy tells."""
        return {}

    def export(self) -> Any:
        """The keys, coldest first."""
        ring = self._ring
        return list(compress(ring, map(eq, map(self._at.get, ring), numbers())))

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self._ring = list(exported)
        self._at = dict(zip(self._ring, numbers()))
        self._head = 0

    def _compact(self) -> None:
        self.restore(self.export())
