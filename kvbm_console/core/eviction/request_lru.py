"""``simple_lru`` with ``used_at_end``: the LRU of vLLM's host tier, in which a request uses its blocks as one.

All blocks that a request stores or loads have the rank of its first use, and a deeper block is colder within a rank.
When the request ends, each of these blocks is used anew, the deepest first. A block that the request found on the
device, and that a load continues, is not used.

Law of this file: a rank changes only by a use, and a use counts once for each request. The order of eviction is that of
the ranks, whatever continues what. A choice gives all victims or none.
"""

from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final

_PLACES: Final = 32
"""Bits of a rank for the place: it is the number of a use, shifted by so many bits, less the place in the prefix."""
_SLACK: Final = 1_000
"""Dead entries of the heap before it is made anew, beside one per block."""


class _Use:
    """Blocks that a request has used."""

    __slots__ = ("next", "number", "seen")

    def __init__(self, number: int, first: int, seen: Iterable[tuple[int, int]] = ()) -> None:
        self.number = number
        """The rank of its first use, 0 before that."""
        self.next = first
        """Leading blocks that it has offered for a copy down, or loaded."""
        self.seen = dict(seen)
        """Key to its place in the prefix."""


class RequestLru:
    """See the module. ``admitted``, ``offered``, ``finished`` and ``formed`` tell it what requests do.

    >>> order = RequestLru()
    >>> order.admitted(1, 0, []); order.offered(1, [10, 11], 0, 2); order.insert([10, 11], None, 0)
    >>> order.admitted(2, 0, []); order.offered(2, [10, 12], 0, 2); order.insert([12], 10, 0)
    >>> order.victims(3)
    [11, 12, 10]
    """

    name = "simple_lru"
    is_recency = True

    def __init__(self) -> None:
        self._rank: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._chosen: list[tuple[int, int]] = []
        """Entries that the last choice took off the heap."""
        self._coming: dict[int, int] = {}
        """Keys that are offered and not resident, with the rank that they will have."""
        self._uses: dict[int, _Use] = {}
        """Live request to what it has used."""
        self._ended: list[tuple[int, str]] = []
        """Requests that ended since an iteration was formed, with their names."""
        self._due: list[tuple[int, int]] = []
        """Keys that the ends of requests use, each with its rank. Copies of the last iteration come before them."""
        self._offers: dict[int, tuple[int, ...]] = {}
        """Key to those that were offered with it in the iteration that was formed last."""
        self._next = 0

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._rank.keys()

    # --- requests ---

    def admitted(self, owner: int, first: int, loaded: Sequence[int], at: int = 0) -> None:
        """A request goes on behind ``first`` blocks that need no copy; it loads the keys from its block ``at`` on."""
        use = self._uses.setdefault(owner, _Use(0, 0))
        use.next = first
        self._use(use, zip(loaded, count(at), strict=False))

    def offered(
        self, owner: int, keys: Sequence[int], first: int, end: int, written: Collection[int] = ()
    ) -> None:
        """A request computes up to block ``end`` of its keys, of which those from ``first`` on may be copied here. Keys
        that are being ``written`` are not used."""
        use = self._uses.get(owner)
        if use is not None and use.next < end:
            first, use.next = max(first, use.next), end
            offer = tuple(keys[first:end])
            self._offers.update(dict.fromkeys(offer, offer))
            self._use(use, [(key, at) for at, key in enumerate(offer, first) if key not in written])

    def offered_with(self, keys: Iterable[int]) -> set[int]:
        """These keys, and all that their requests offered with them in the last iteration."""
        return {other for key in keys for other in self._offers.get(key, (key,))}

    def used(self, owner: int, keys: Iterable[tuple[int, int]]) -> None:
        """A request uses these keys, each with its place in the prefix."""
        self._use(self._uses.setdefault(owner, _Use(0, 0)), keys)

    def _use(self, use: _Use, keys: Iterable[tuple[int, int]]) -> None:
        for key, place in keys:
            if not use.number:
                self._next += 1
                use.number = self._next
            # What it used before counts again only if it was given up since, so that it is copied here anew.
            if key not in use.seen or key not in self._rank:
                use.seen[key] = place
                self._raise(key, (use.number << _PLACES) - place)

    def _raise(self, key: int, rank: int) -> None:
        ranks = self._rank if key in self._rank else self._coming
        if ranks.get(key, rank) <= rank:
            ranks[key] = rank
            if ranks is self._rank:
                self._push(key, rank)

    def finished(self, owner: int, name: str = "") -> None:
        """A request has ended."""
        if owner in self._uses:
            self._ended.append((owner, name))

    def formed(self, order: Sequence[str] = ()) -> None:
        """An iteration was formed: behind its uses those of the requests that ended before it, in this order of names,
        then in that of their ends."""
        place = {name: at for at, name in enumerate(order)}
        for owner, _ in sorted(self._ended, key=lambda one: place.get(one[1], len(place))):
            seen = self._uses.pop(owner).seen
            # Blocks of several groups of layers at one place: their numbers stand above the 64 bits of the hash.
            for key in sorted(seen, key=lambda key: (seen[key], key >> 64), reverse=True):
                self._next += 1
                self._due.append((key, self._next))
        self._ended.clear()

    def begin(self) -> None:
        """An iteration is being formed: the ends that the last one saw count from now on."""
        for key, number in self._due:
            if key in self._rank:
                self._raise(key, number << _PLACES)
            else:
                self._coming.pop(key, None)
        self._due.clear()
        self._offers.clear()

    # --- TierPolicy ---

    def touch(self, keys: Sequence[int], at_ns: int = 0) -> None:
        """These blocks are used or stored by nobody in particular."""
        self._next += 1
        for place, key in enumerate(keys):
            self._rank[key] = (self._next << _PLACES) - place
            self._push(key, self._rank[key])

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """Nothing: a request that only names its blocks does not use them."""

    def insert(self, keys: Sequence[int], beside: int | None, at_ns: int) -> None:
        """See ``TierPolicy.insert``. The blocks have the rank of the request that offered them."""
        self._next += 1
        for place, key in enumerate(keys):
            self._rank[key] = self._coming.pop(key, (self._next << _PLACES) - place)
            self._push(key, self._rank[key])

    def forget(self, keys: Iterable[int]) -> None:
        """Blocks were given up."""
        for key in keys:
            self._rank.pop(key, None)

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` coldest evictable keys that are not protected, coldest first; None if there are fewer."""
        ranks, heap = self._rank, self._heap
        for entry in self._chosen:  # those that stayed after all
            if ranks.get(entry[1]) == entry[0]:
                heappush(heap, entry)
        chosen: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        last = None
        while heap and len(chosen) < count:
            entry = heappop(heap)
            key = entry[1]
            if ranks.get(key) != entry[0] or entry == last:
                continue
            last = entry
            taken = key not in protected and (evictable is None or evictable(key))
            (chosen if taken else passed).append(entry)
        for entry in passed:
            heappush(heap, entry)
        self._chosen = chosen
        return [key for _, key in chosen] if len(chosen) == max(0, count) else None

    def _push(self, key: int, rank: int) -> None:
        heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._rank) + _SLACK:
            self._make_heap()

    def _make_heap(self) -> None:
        self._heap = [(rank, key) for key, rank in self._rank.items()]
        heapify(self._heap)
        self._chosen = []

    def gauges(self) -> dict[str, float]:
        """No counts of its own."""
        return {}

    def export(self) -> Any:
        """The ranks, and what requests use."""
        return {
            "ranks": _told(self._rank), "coming": _told(self._coming),
            "uses": [[owner, use.number, use.next, sorted(use.seen.items())] for owner, use in self._uses.items()],
            "offers": sorted([key, *offer] for key, offer in self._offers.items()),
            "ended": [list(one) for one in self._ended], "due": [list(one) for one in self._due], "next": self._next,
        }

    def restore(self, exported: Any) -> None:
        """Take over exported columns."""
        self._rank, self._coming = _ranks(exported["ranks"]), _ranks(exported["coming"])
        self._make_heap()
        self._uses = {
            owner: _Use(number, first, [(key, place) for key, place in seen])
            for owner, number, first, seen in exported["uses"]
        }
        self._offers = {key: tuple(offer) for key, *offer in exported["offers"]}
        self._ended, self._next = [(owner, name) for owner, name in exported["ended"]], exported["next"]
        self._due = [(key, number) for key, number in exported["due"]]


def _told(ranks: dict[int, int]) -> list[list[int]]:
    """Key, number of its use and the place in the prefix, negative, of each rank."""
    numbers = ((key, -(-rank >> _PLACES), rank) for key, rank in ranks.items())
    return sorted([key, number, rank - (number << _PLACES)] for key, number, rank in numbers)


def _ranks(told: list[list[int]]) -> dict[int, int]:
    return {key: (number << _PLACES) + place for key, number, place in told}
