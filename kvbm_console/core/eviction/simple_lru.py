"""``simple_lru``: evict the place that was touched longest ago; deeper blocks first within one touch.

Law of this file: the order is static between touches, ties are broken totally, and a choice of victims is all or none.
"""

from collections.abc import Callable, Collection, Iterable


class SimpleLru:
    """Recency order over the places of one pool, O(1) per touch.

    >>> order = SimpleLru()
    >>> order.touch([0, 1, 2])
    >>> order.victims(2, lambda place: True, ())
    [2, 1]
    """

    def __init__(self, order: Iterable[int] = ()) -> None:
        self._order: dict[int, None] = dict.fromkeys(order)

    def __len__(self) -> int:
        return len(self._order)

    def touch(self, places: Collection[int]) -> None:
        """Places of one prefix, in prompt order, were just used (or inserted); the deepest becomes the coldest."""
        order = self._order
        for place in reversed(list(places)):
            order.pop(place, None)
            order[place] = None

    def forget(self, places: Iterable[int]) -> None:
        """Places were given up."""
        for place in places:
            self._order.pop(place, None)

    def victims(self, count: int, evictable: Callable[[int], bool], protected: Collection[int]) -> list[int] | None:
        """The ``count`` coldest evictable places that are not protected, coldest first; None if there are fewer."""
        chosen: list[int] = []
        if count <= 0:
            return chosen
        for place in self._order:
            if evictable(place) and place not in protected:
                chosen.append(place)
                if len(chosen) == count:
                    return chosen
        return None

    def export(self) -> list[int]:
        """The order, coldest first; ``SimpleLru(order)`` restores it."""
        return list(self._order)
