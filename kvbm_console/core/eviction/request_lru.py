"""``simple_lru`` with ``used_at_end``: the LRU of vLLM's host tier, in which a request uses its blocks as one.

All blocks that a request stores or loads have the rank of its first use, and a deeper block is colder within a rank.
When the request ends, each of these blocks is used anew, the deepest first. A block that the request found on the
device, and that a load continues, is not used.

Law of this file: a rank changes only by a use, and a use counts once for each request. The order of eviction is that of
the ranks, whatever continues what. A choice gives all victims or none.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from itertools import count, islice
from operator import ge, gt, itemgetter
from typing import Any, Final

_PLACES: Final = 32
"""Bits of a rank for the place: it is the number of a use, shifted by so many bits, less the place in the prefix."""


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


class _Bucket:
    """The keys that have a rank of one use, each with that rank."""

    __slots__ = ("coldest", "is_sorted", "ranks")

    def __init__(self, above: int) -> None:
        self.ranks: dict[int, int] = {}
        """The coldest last, if it ``is_sorted``. Requests use most keys in that order."""
        self.coldest = above
        """The rank of the last key, ``above`` all others without one."""
        self.is_sorted = True


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
        self._buckets: dict[int, _Bucket] = {}
        """Number of a use to its bucket. A choice goes through them from the first on."""
        self._numbers: list[int] = []
        """Those of the buckets, in order."""
        self._coming: dict[int, int] = {}
        """Keys that are offered and not resident, with the rank that they will have."""
        self._uses: dict[int, _Use] = {}
        """Live request to what it has used."""
        self._ended: list[tuple[int, str]] = []
        """Requests that ended since an iteration was formed, with their names."""
        self._due: list[tuple[int, list[int]]] = []
        """Uses by the ends of requests: a number, and keys with the places 0, 1 and so on. Copies of the last iteration
        come before them."""
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
        self._use(use, loaded, range(at, at + len(loaded)))

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
            used = [(key, at) for at, key in enumerate(offer, first) if key not in written]
            self._use(use, [key for key, _ in used], [at for _, at in used])

    def offered_with(self, keys: Iterable[int]) -> set[int]:
        """These keys, and all that their requests offered with them in the last iteration."""
        return {other for key in keys for other in self._offers.get(key, (key,))}

    def used(self, owner: int, keys: Sequence[int], places: Sequence[int]) -> None:
        """A request uses these keys, each with its place in the prefix."""
        self._use(self._uses.setdefault(owner, _Use(0, 0)), keys, places)

    def _first_rank(self, use: _Use) -> int:
        if not use.number:
            self._next += 1
            use.number = self._next
        return use.number << _PLACES

    def _use(self, use: _Use, keys: Sequence[int], places: Sequence[int]) -> None:
        if not keys:
            return
        first = self._first_rank(use)
        if not use.seen.keys().isdisjoint(keys):
            # What it used before counts again only if it was given up since, so that it is copied here anew.
            again = [
                (key, place) for key, place in zip(keys, places, strict=True)
                if key not in use.seen or key not in self._rank
            ]
            keys, places = [key for key, _ in again], [place for _, place in again]
        use.seen.update(zip(keys, places, strict=True))
        coming, raised = self._coming, dict(zip(keys, [first - place for place in places], strict=True))
        if self._rank.keys().isdisjoint(keys) and coming.keys().isdisjoint(keys):  # the most frequent case
            coming.update(raised)
            return
        absent = [key for key in raised if key not in self._rank]
        coming.update({key: max(raised[key], coming.get(key, 0)) for key in absent})
        self._raise(raised, absent)

    def _raise(self, raised: dict[int, int], absent: Collection[int]) -> None:
        """Give these keys their ranks, but those that are ``absent``, and those that have a higher rank."""
        for key in absent:
            del raised[key]
        ranks = self._rank
        if any(map(ge, map(ranks.__getitem__, raised), raised.values())):
            raised = {key: rank for key, rank in raised.items() if ranks[key] < rank}
        self._take_out(raised)
        self._put(raised)

    def _place(self, keys: dict[int, int]) -> None:
        """Give these keys, which are resident from now on, their ranks."""
        self._take_out([key for key in keys if key in self._rank])
        self._put(keys)

    def _put(self, keys: dict[int, int]) -> None:
        """Make these keys, which are not resident, resident with their ranks."""
        self._rank.update(keys)
        for number, some in _by_use(keys):
            bucket = self._buckets.get(number)
            if bucket is None:
                bucket = self._buckets[number] = _Bucket((number << _PLACES) + 1)
                insort(self._numbers, number)
            told = list(some.values())
            bucket.is_sorted &= told[0] < bucket.coldest and all(map(gt, told, told[1:]))
            bucket.ranks.update(some)
            bucket.coldest = told[-1]

    def _take_out(self, keys: Iterable[int]) -> None:
        """Take resident keys out of their buckets, and out of the ranks."""
        for number, some in _by_use({key: self._rank.pop(key) for key in keys}):
            ranks = self._buckets[number].ranks
            if len(some) == len(ranks):
                del self._buckets[number]
                del self._numbers[bisect_left(self._numbers, number)]
            else:
                deque(map(ranks.pop, some), maxlen=0)

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
            keys = sorted(seen, key=seen.__getitem__)
            if len(set(seen.values())) < len(keys):
                # Blocks of several groups of layers at one place: their numbers stand above the 64 bits of the hash.
                keys.sort(key=lambda key: (seen[key], key >> 64))
            self._next += 1
            self._due.append((self._next, keys))
        self._ended.clear()

    def begin(self) -> None:
        """An iteration is being formed: the ends that the last one saw count from now on."""
        for number, keys in self._due:
            raised = dict(zip(keys, count(number << _PLACES, -1), strict=False))
            absent = [key for key in raised if key not in self._rank]
            for key in absent:
                self._coming.pop(key, None)
            self._raise(raised, absent)
        self._due.clear()
        self._offers.clear()

    # --- TierPolicy ---

    def touch(self, keys: Sequence[int], at_ns: int = 0) -> None:
        """These blocks are used or stored by nobody in particular."""
        self._next += 1
        self._place(dict(zip(keys, count(self._next << _PLACES, -1), strict=False)))

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """Nothing: a request that only names its blocks does not use them."""

    def insert(self, keys: Sequence[int], beside: int | None, at_ns: int) -> None:
        """See ``TierPolicy.insert``. The blocks have the rank of the request that offered them."""
        self._next += 1
        ranks = map(self._coming.pop, keys, count(self._next << _PLACES, -1))
        self._place(dict(zip(keys, ranks, strict=True)))

    def forget(self, keys: Iterable[int]) -> None:
        """Blocks were given up."""
        self._take_out(dict.fromkeys(filter(self._rank.__contains__, keys)))

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` coldest evictable keys that are not protected, coldest first; None if there are fewer."""
        chosen: list[int] = []
        for number in self._numbers:
            if len(chosen) >= count:
                break
            keys: Iterable[int] = reversed(self._sorted(self._buckets[number]))
            if protected:
                keys = (key for key in keys if key not in protected)
            chosen += islice(filter(evictable, keys) if evictable else keys, count - len(chosen))
        return chosen if len(chosen) == max(0, count) else None

    def _sorted(self, bucket: _Bucket) -> dict[int, int]:
        """The keys of a bucket, the coldest last."""
        if not bucket.is_sorted:
            bucket.ranks = dict(sorted(bucket.ranks.items(), key=itemgetter(1, 0), reverse=True))
            bucket.is_sorted = True
        # A dictionary steps over what was taken out at its end each time, until an item is popped there.
        key, bucket.coldest = bucket.ranks.popitem()
        bucket.ranks[key] = bucket.coldest
        return bucket.ranks

    def gauges(self) -> dict[str, float]:
        """No counts of its own."""
        return {}

    def export(self) -> Any:
        """The ranks, and what requests use."""
        return {
            "ranks": _told(self._rank), "coming": _told(self._coming),
            "uses": [[owner, use.number, use.next, sorted(use.seen.items())] for owner, use in self._uses.items()],
            "offers": sorted([key, *offer] for key, offer in self._offers.items()),
            "ended": [list(one) for one in self._ended],
            "due": [[key, number, -place] for number, keys in self._due for place, key in enumerate(keys)],
            "next": self._next,
        }

    def restore(self, exported: Any) -> None:
        """Take over exported columns."""
        ranks, self._rank, self._coming = _ranks(exported["ranks"]), {}, _ranks(exported["coming"])
        self._buckets, self._numbers = {}, []
        self._place(dict(sorted(ranks.items(), key=itemgetter(1), reverse=True)))
        self._uses = {
            owner: _Use(number, first, [(key, place) for key, place in seen])
            for owner, number, first, seen in exported["uses"]
        }
        self._offers = {key: tuple(offer) for key, *offer in exported["offers"]}
        self._ended, self._next = [(owner, name) for owner, name in exported["ended"]], exported["next"]
        due: dict[int, list[int]] = {}
        for key, number, *_ in exported["due"]:  # the first edition had a number for each key
            due.setdefault(number, []).append(key)
        self._due = list(due.items())


def _by_use(ranks: dict[int, int]) -> Iterable[tuple[int, dict[int, int]]]:
    """These keys by the use that gave their ranks. Most often that is one."""
    if not ranks:
        return ()
    first, last = (-(-rank >> _PLACES) for rank in (min(ranks.values()), max(ranks.values())))
    if first == last:
        return ((first, ranks),)
    uses: dict[int, dict[int, int]] = {}
    for key, rank in ranks.items():
        uses.setdefault(-(-rank >> _PLACES), {})[key] = rank
    return uses.items()


def _told(ranks: dict[int, int]) -> list[list[int]]:
    """Key, number of its use and the place in the prefix, negative, of each rank."""
    numbers = ((key, -(-rank >> _PLACES), rank) for key, rank in ranks.items())
    return sorted([key, number, rank - (number << _PLACES)] for key, number, rank in numbers)


def _ranks(told: list[list[int]]) -> dict[int, int]:
    return {key: (number << _PLACES) + place for key, number, place in told}
