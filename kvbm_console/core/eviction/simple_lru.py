"""``simple_lru``: evict the block that was touched longest ago, deeper blocks first within a touch.

Law of this file: keys are ordered by their touch, oldest first, and within a touch deepest first. A key lives in the
last touch that names it. So a touch of a whole prefix is a single entry, which another touch of the same prefix moves
or replaces. A choice of victims gives all or none.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

_SLACK: Final = 5_000
"""Dead keys that touches carry before all are looked through, beside two per block: O(1) amortised."""
_ROW: Final = 256
"""Keys of one touch after ``restore``: an ``insert`` looks through a touch."""
_AT_ONCE: Final = 16
"""At least so many keys are looked at together: a comprehension costs half of a loop that tests everything."""


class SimpleLru:
    """Recency order over the blocks of one pool.

    ``order`` are keys that are resident already, coldest first.

    >>> order = SimpleLru()
    >>> order.touch([0, 1, 2], 0)
    >>> order.victims(2)
    [2, 1]
    """

    name = "simple_lru"
    is_recency = True

    def __init__(self, order: Iterable[int] = ()) -> None:
        self._touches: OrderedDict[int, list[int]] = OrderedDict()
        """Number of a touch to its keys, deepest first."""
        self._at: dict[int, int] = {}
        """Key to the touch in which it lives."""
        self._next = self._carried = self._passed = 0
        """Three counts: the number of the next touch, the keys that all touches name, and the leading keys of the
        oldest touch that live there no more."""
        self._newest = -1
        """The newest touch, while all of its keys are known to live in it."""
        self._beside = 0
        """Position in its touch of the key beside which others were put last."""
        self._gone: set[int] = set()
        """Forgotten keys that a touch may still name."""
        self._stand(list(order))

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._at.keys()

    def touch(self, keys: Sequence[int], at_ns: int = 0) -> None:
        """Blocks of one prefix, in prompt order, were just used (or stored); the deepest becomes the coldest."""
        if not keys:
            return
        at, number = self._at, self._next
        deepest_first = keys[::-1] if type(keys) is list else list(reversed(keys))
        before, known = at.get(keys[0]), len(at)
        again = before is not None and self._touches[before] == deepest_first
        if again and before == self._newest:
            return  # one request after the other with the same prefix
        if again and before is not None and self._replaced(before, deepest_first):
            return
        at.update(zip(deepest_first, repeat(number)))
        if len(at) - known != len(keys) and not again and len(set(keys)) != len(keys):
            deepest_first = list(dict.fromkeys(keys))[::-1]  # named twice: a key lives where it is named last
        self._touches[number] = deepest_first
        self._newest = number
        self._next = number + 1
        self._carried += len(deepest_first)
        if self._carried > 3 * len(at) + _SLACK:
            self._drop_dead()

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """See ``TierPolicy.use``; keys that are not resident are not remembered."""
        self.touch(list(filter(self._at.__contains__, keys)), at_ns)

    def insert(self, keys: Sequence[int], beside: int | None, at_ns: int) -> None:
        """See ``TierPolicy.insert``."""
        number = None if beside is None else self._at.get(beside)
        if beside is None or number is None:
            self.touch(keys, at_ns)
            return
        row = self._touches[number]
        dead = set() if self._gone.isdisjoint(keys) else set(keys).intersection(row)
        if dead:  # they were here before they were forgotten
            self._carried -= len(row)
            row[:] = [key for key in row if key not in dead]
            self._carried += len(row)
            self._passed = 0
        # The end of a prompt is stored first, so one block after the other is put beside the same ancestor.
        place = self._beside if self._beside < len(row) and row[self._beside] == beside else row.index(beside)
        row[place:place] = reversed(keys)
        self._beside = place + len(keys)
        self._at.update(zip(keys, repeat(number)))
        self._carried += len(keys)
        if self._carried > 3 * len(self._at) + _SLACK:
            self._drop_dead()

    def _drop_dead(self) -> None:
        """Forget the dead keys that touches carry."""
        live = self._at.get
        rows = ((number, [key for key in row if live(key) == number]) for number, row in self._touches.items())
        self._touches = OrderedDict((number, row) for number, row in rows if row)
        self._carried, self._passed = len(self._at), 0
        self._gone.clear()

    def _replaced(self, number: int, keys: list[int]) -> bool:
        """The keys of this touch are touched again.

        True if the touch was moved because all keys live in it, else it is dropped.
        """
        touches = self._touches
        if next(iter(touches)) == number:
            self._passed = 0
        try:
            if len(keys) > 1 and itemgetter(*keys)(self._at) == (number,) * len(keys):
                touches.move_to_end(number)
                self._newest = number
                return True
        except KeyError:
            pass  # a key was forgotten
        del touches[number]
        self._carried -= len(keys)
        return False

    def forget(self, keys: Iterable[int]) -> None:
        """Blocks were given up."""
        self._newest = -1
        keys = list(keys)
        deque(map(self._at.pop, keys, repeat(None)), 0)
        self._gone.update(keys)
        if len(self._gone) > 3 * len(self._at) + _SLACK:
            self._drop_dead()

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` coldest evictable keys that are not protected, coldest first; None if there are fewer."""
        chosen = list[int]()
        if count <= 0:
            return chosen
        for keys in self.coldest_first(count):
            chosen += [key for key in keys if key not in protected and (evictable is None or evictable(key))]
            if len(chosen) >= count:
                return chosen[:count]
        return None

    def coldest_first(self, at_first: int) -> Iterator[list[int]]:
        """All resident keys in parts of ``at_first`` keys or a few, coldest first; some parts are empty."""
        live, start, size = self._at.get, self._pass_dead(), max(at_first, _AT_ONCE)
        for number, keys in self._touches.items():
            while start < len(keys):
                # In parts, so that the keys behind the last victim are not read.
                seen = keys[start : start + size]
                part = [key for key in seen if live(key) == number]
                if 2 * len(part) < len(seen):  # else every choice passes the same dead keys again
                    keys[start : start + size] = part
                    self._carried -= len(seen) - len(part)
                    seen = part
                start += len(seen)
                yield part
            start = 0

    def _pass_dead(self) -> int:
        """The position of the oldest living key in the oldest touch."""
        live, touches = self._at.get, self._touches
        while touches:
            number = next(iter(touches))
            keys = touches[number]
            for at in range(self._passed, len(keys)):
                if live(keys[at]) == number:
                    self._passed = at
                    return at
            del touches[number]
            self._carried -= len(keys)
            self._passed = 0
        return 0

    def gauges(self) -> dict[str, float]:
        """No counts of its own."""
        return {}

    def export(self) -> Any:
        """The keys, coldest first."""
        live = self._at.get
        return [key for number, keys in self._touches.items() for key in keys if live(key) == number]

    def restore(self, exported: Any) -> None:
        """Take over exported columns."""
        self._at.clear()
        self._stand(list(exported))

    def _stand(self, keys: list[int]) -> None:
        """The resident keys stand in this order, as of touches of ``_ROW`` keys."""
        self._newest = -1
        self._touches = OrderedDict()
        for at in range(0, len(keys), _ROW):
            self._touches[self._next] = keys[at : at + _ROW]
            self._at.update(dict.fromkeys(keys[at : at + _ROW], self._next))
            self._next += 1
        self._carried, self._passed = len(keys), 0
