"""The host tier of an engine whose layers are in several groups, by the rules of vLLM's OffloadingConnector.

A leader knows a block below the device by its hash alone. A hybrid model has a block of the same hash in each group of
layers, and each is copied, found and evicted on its own. Here a key is the name of a block in its group
(``device_pool.in_group``), and a block of each group takes one place. The rules are these:

- A lookup goes through the groups until all agree: a group that sees all tokens needs the whole prefix, a group with a
  window the blocks of the window at the end. It waits for blocks that are being written, and for those that another
  request loads.
- A load reads what each group needs, as one copy. Nothing before it is offered for a copy down.
- With each step a request offers the full blocks that it has not offered, of all groups in one copy. With
  ``retention`` 0 a group with a window offers the window at the end of the prompt alone.
- A copy down stores all that is missing or nothing, and evicts nothing that is offered with it.
- No place on the device is kept for a copy. A copy whose places are given out again ends in the same step.
- Requests rule the order of eviction (``RequestLru``). Another policy hears of a request at its first use, with its
  whole prompt, as ours do inside vLLM (``tap/vllm_policy.py``).

Law of this file: sans-IO. It decides what is copied; ``ended`` and ``flushed`` meet in the caller, who knows the time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile

import msgspec

from kvbm_console.core.eviction.policy import TierPolicy
from kvbm_console.core.eviction.request_lru import RequestLru
from kvbm_console.core.tiers import window_blocks
from kvbm_console.simulator.config import is_kept
from kvbm_console.simulator.device_pool import HASH_BITS, NO_PLACE, in_group
from kvbm_console.simulator.work import Table


class HostCopy(msgspec.Struct, eq=False):
    """A copy of blocks of a request between device and host."""

    number: int
    request: str
    keys: list[int]
    is_load: bool
    places: list[list[int]]
    """The device places of a copy down, by group."""
    owner: "_Request"
    """The request itself: a later one may have its name."""
    done: bool = False

    @property
    def hashes(self) -> list[int]:
        """The hashes of its blocks."""
        return [key & (1 << HASH_BITS) - 1 for key in self.keys]


class Formed(msgspec.Struct, frozen=True):
    """A request of a step: its blocks in each group, and the tokens that are computed behind it."""

    name: str
    tables: Sequence[Table]
    anew: bool
    """True in its first step since it was admitted."""
    computed: int
    known: int
    """Tokens of the sequence that are known when the step is formed."""
    junction: int
    """See ``Work.junction``."""


class _Request:
    """A request, as the tier knows it."""

    __slots__ = (
        "asked", "copies", "held", "junction", "keys", "known", "least", "line", "local", "name", "number", "offered",
        "over", "places", "prompt",
    )

    def __init__(self, name: str, number: int, keys: list[Sequence[int]], prompt: int) -> None:
        self.name = name
        self.number = number
        self.keys = keys
        """Key of each block of the sequence, by group."""
        self.prompt = prompt
        self.known = prompt
        """Tokens that are known."""
        self.junction = 0
        self.local = 0
        """Blocks that the device had at the last lookup."""
        self.held: list[list[int]] = [[] for _ in keys]
        """Places of its blocks by group, also of those that a window has passed, while nobody else has them."""
        self.offer([0] * len(keys))
        self.copies: list[HostCopy] = []
        """Those that run."""
        self.line: list[int] = []
        """Its keys in their order, for a policy that hears of a whole prompt."""
        self.asked = 0
        """Keys of ``line`` that the policy heard of as its prompt."""
        self.places: dict[int, int] = {}
        """Key to its place in ``line``."""
        self.over: int | None = None
        """The tokens that it computed, once it has ended."""

    def offer(self, blocks: list[int]) -> None:
        """So many leading blocks of each group were offered from now on."""
        self.offered = blocks
        self.least = min(blocks)


class OffloadingTier:
    """See the module. ``windows`` and ``numbers`` are the ``groups`` and ``group_numbers`` of ``EngineConfig``, and
    ``retention`` is that for copies down. With ``prompt_only`` answers are not copied. ``make_order`` makes the order
    of eviction, and ``clock`` gives its time.
    """

    def __init__(
        self, blocks: int, block_tokens: int, windows: Sequence[int], *, numbers: Sequence[int] = (),
        retention: int | None = None, prompt_only: bool = False, make_order: Callable[[], TierPolicy] = RequestLru,
        clock: Callable[[], int] = lambda: 0,
    ) -> None:
        self.blocks = blocks
        self.evicted = 0
        """Blocks that made way for others so far."""
        self._size = block_tokens
        self._windows = list(windows)
        self._numbers = list(numbers) or list(range(len(self._windows)))
        self._lookup_order = sorted(range(len(windows)), key=lambda group: (windows[group] > 0, -windows[group]))
        self._retention, self._prompt_only = retention, prompt_only
        self._make_order, self._clock = make_order, clock
        self.clear()

    def clear(self) -> None:
        """Forget all blocks and requests."""
        self._here: set[int] = set()
        """Keys that are here or are being written."""
        self._writing: set[int] = set()
        self._readers: dict[int, int] = {}
        """Key to the number of loads that read it, if there are any."""
        self._idle: set[int] = set()
        """Keys that are neither read nor written."""
        self.order = self._make_order()
        self._requests: dict[str, _Request] = {}
        """Those that have not ended."""
        self._loading: set[int] = set()
        self._arrived = self._copies = 0
        self._given: set[int] = set()
        """Device places that were given out for the step that is being formed."""
        self._watched: dict[int, list[HostCopy]] = {}
        """Device place to the copies that read it and that end when it is given out."""
        self._ends: list[_Request] = []
        """Requests that ended since the last step."""
        self.flushed: list[HostCopy] = []
        """Copies that end in the step that was formed last."""

    def __len__(self) -> int:
        """Blocks that are here or on their way."""
        return len(self._here)

    def arrived(self, name: str, hashes: Sequence[int], prompt_tokens: int) -> None:
        """A request has come, with the hashes of its whole sequence."""
        self._arrived += 1
        keys = [in_group(number, hashes) for number in self._numbers]
        self._requests[name] = _Request(name, self._arrived, keys, prompt_tokens)

    def cloned(self, name: str, clone: str, hashes: Sequence[int]) -> None:
        """A further sequence of a request goes on behind its prompt, with the hashes of that sequence."""
        parent = self._requests[name]
        self.arrived(clone, hashes, parent.prompt)
        request = self._requests[clone]
        request.known, request.junction, request.local = parent.known, parent.junction, parent.local
        request.offer(list(parent.offered))

    # --- lookups and loads ---

    def looked_up(self, name: str, local: int, tokens: int) -> int | None:
        """Tokens that can be loaded behind ``local`` blocks of a sequence of so many tokens; None while they are
        written, or are loaded for another request."""
        request = self._requests[name]
        request.held = [[] for _ in request.keys]
        request.offer([0] * len(request.keys))
        request.local, request.known = local, tokens
        if request.copies:
            return None
        found = self._longest(request, tokens - 1)
        if found and not self._loading.isdisjoint(chain.from_iterable(self._loaded(request, found))):
            return None
        return None if found is None else max(0, found - local * self._size)

    def _longest(self, request: _Request, most: int) -> int | None:
        """The end of the longest prefix that every group has; None while a block that counts is being written."""
        size, local = self._size, request.local
        groups, hit, waits = list(self._lookup_order), 0, False
        while groups:
            again: list[int] = []
            slid = False
            for group in groups:
                keys, window = request.keys[group], self._windows[group]
                most = min(most, len(keys) * size)
                if most - local * size < size:
                    return 0
                end = min(-(-most // size), len(keys))
                if window:
                    count = self._run_to(keys[local:end], -(-window // size), self._load_blocks(window, most))
                else:
                    count = self._run_from(keys[local:end])
                if count == 0:
                    return 0
                waits |= count is None
                most = most if count is None else min(most, (local + count) * size)
                if most - local * size < size:
                    return 0
                if most - local * size < hit:
                    if waits:
                        waits, again = False, list(self._lookup_order)
                    elif slid and not again:
                        again = [other for other in self._lookup_order if self._windows[other]]
                slid |= window > 0
                hit = most - local * size
            groups = again
        return None if waits else most

    def _run_from(self, keys: Sequence[int]) -> int | None:
        """Leading keys that are here; None if one of them is being written."""
        found = list(takewhile(self._here.__contains__, keys))
        return len(found) if self._writing.isdisjoint(found) else None

    def _load_blocks(self, window: int, tokens: int) -> int:
        """Blocks that a load of a prefix of so many tokens needs: a part of the last one counts as a whole."""
        size = self._size
        return max(-(-window // size), -(-(window - 1 + -tokens % size) // size))

    def _run_to(self, keys: Sequence[int], need: int, need_at_end: int) -> int | None:
        """The end of the last run of ``need`` keys that are here, or of the leading run; None if one is being written.

        A run up to the last key must have ``need_at_end``.
        """
        run, waits, wanted = 0, False, need_at_end
        for at in range(len(keys) - 1, -1, -1):
            if keys[at] in self._here:
                run += 1
                waits |= keys[at] in self._writing
            else:
                run, waits, wanted = 0, False, need
            if run == wanted:
                return None if waits else at + run
        return None if waits else run

    def _loaded(self, request: _Request, end_tokens: int) -> list[Sequence[int]]:
        """The keys of each group that a load up to so many tokens reads."""
        end = -(-end_tokens // self._size)
        return [
            keys[max(request.local, end - self._load_blocks(window, end_tokens)) if window else request.local : end]
            for keys, window in zip(request.keys, self._windows, strict=True)
        ]

    def admitted(self, name: str, tables: Sequence[Table], loaded_tokens: int) -> HostCopy | None:
        """A request has these blocks. The result is its load of what ``looked_up`` found, if it takes that."""
        for table in tables:
            self._given.update(table.held)
        if not loaded_tokens:
            return None
        request = self._requests[name]
        end = -(-(request.local * self._size + loaded_tokens) // self._size)
        keys: list[int] = []
        for group, table in enumerate(tables):
            keys += self._use(request, group, max(request.local, table.passed), end)
        request.offer([end] * len(tables))
        for key in keys:
            self._readers[key] = self._readers.get(key, 0) + 1
        self._idle.difference_update(keys)
        self._loading.update(keys)
        return self._copy(request, keys, [], is_load=True)

    def _use(self, request: _Request, group: int, first: int, end: int) -> list[int]:
        keys = list(request.keys[group][first:end])
        self._used(request, keys, range(first, end))
        return keys

    def _used(self, request: _Request, keys: Sequence[int], places: Sequence[int]) -> None:
        """A request uses these keys, each with its place in the sequence."""
        if isinstance(self.order, RequestLru):
            self.order.used(request.number, keys, places)
        elif not request.line:
            blocks = request.prompt // self._size
            self._extend(request, chain.from_iterable(zip(*(keys[:blocks] for keys in request.keys), strict=True)))
            request.asked = len(request.line)
            self.order.use(request.line[:], self._clock())

    def _extend(self, request: _Request, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in request.places:
                request.places[key] = len(request.line)
                request.line.append(key)

    def _insert(self, request: _Request, keys: list[int]) -> None:
        """These keys become resident for a request."""
        if isinstance(self.order, RequestLru):
            self.order.insert(keys, None, self._clock())
            return
        self._extend(request, keys)
        line, resident, now_ns = request.line, self.order.resident, self._clock()
        for first, end in _runs(sorted(map(request.places.__getitem__, keys)), request.asked):
            beside = next((line[at] for at in range(first - 1, -1, -1) if line[at] in resident), None)
            if beside is None:  # the first is the newest, and the others are as old as it
                beside = line[first]
                self.order.insert([beside], None, now_ns)
                first += 1
            if first < end:
                self.order.insert(line[first:end], beside, now_ns)

    def _copy(self, request: _Request, keys: list[int], places: list[list[int]], *, is_load: bool) -> HostCopy:
        self._copies += 1
        copy = HostCopy(self._copies, request.name, keys, is_load, places, request)
        request.copies.append(copy)
        return copy

    # --- a step ---

    def is_calm(self, name: str, computed: int, blocks: int) -> bool:
        """True if a step after which a request has so many computed tokens and blocks offers nothing of it. ``formed``
        need not hear of it then."""
        request = self._requests[name]
        return computed // self._size <= request.least and len(request.held[0]) == blocks

    def has_offered(self, name: str) -> bool:
        """True if a request that decodes has offered all that it ever will."""
        request = self._requests[name]
        return self._prompt_only and request.prompt // self._size <= request.least

    def formed(self, requests: Sequence[Formed], preempted: Iterable[str], order: Sequence[str]) -> list[HostCopy]:
        """A step was formed of these requests, and others were preempted for it. ``order`` names requests that ended
        before it, as far as the order of their ends is known. The result are the copies down of this step."""
        due = self._take_places(requests)
        self.flushed = [
            copy for name in preempted if name in self._requests for copy in self._requests[name].copies
            if not copy.is_load
        ]
        for place in self._given & self._watched.keys():
            self.flushed += [copy for copy in self._watched[place] if copy not in self.flushed]
        copies = [self._offer(request, full) for request, full in due]
        turn = {name: at for at, name in enumerate(order)}
        ends = sorted(self._ends, key=lambda request: turn.get(request.name, len(turn)))
        for request in ends:
            full = self._full(request, request.over or 0)
            if full > request.least:
                copies.append(self._offer(request, full))
        if isinstance(self.order, RequestLru):
            for request in ends:
                self.order.finished(request.number, request.name)
            self.order.formed(order)
            self.order.begin()
        self._ends.clear()
        self._given.clear()
        return [copy for copy in copies if copy is not None]

    def _full(self, request: _Request, computed: int) -> int:
        """Leading blocks of a request that can be offered with so many computed tokens."""
        known = request.known if computed > request.known else computed
        return (request.prompt if self._prompt_only and known > request.prompt else known) // self._size

    def _take_places(self, requests: Sequence[Formed]) -> list[tuple[_Request, int]]:
        """Follow the places of all requests. A place behind a window that was given out again has other content.

        The result has the requests with blocks that are full and were not offered, and the number of full ones.
        """
        before: dict[_Request, list[int]] = {}
        due: list[tuple[_Request, int]] = []
        for part in requests:
            request = self._requests[part.name]
            request.known, request.junction = part.known, part.junction
            if part.anew:
                request.held = [[] for _ in request.keys]
            lengths = None
            for places, table in zip(request.held, part.tables, strict=True):
                if len(table.blocks) > len(places):
                    if lengths is None:
                        before[request] = lengths = [len(places) for places in request.held]
                    fresh = table.blocks[len(places) :]
                    places += fresh
                    self._given.update(fresh)
            full = self._full(request, part.computed)
            if full > request.least:
                due.append((request, full))
        self._given.discard(NO_PLACE)
        if not self._given or not any(self._windows):
            return due
        for request in chain(self._requests.values(), self._ends):
            ends = before.get(request)
            for group, window in enumerate(self._windows):
                places = request.held[group]
                end = len(places) if ends is None else ends[group]
                for at in range(request.offered[group], end) if window else ():
                    if places[at] in self._given:
                        places[at] = NO_PLACE
        return due

    def _offer(self, request: _Request, full: int) -> HostCopy | None:
        """Offer the full blocks of a request that were not offered."""
        keys: list[int] = []
        offers: list[Sequence[int]] = []
        ends = []
        for group, places in enumerate(request.held):
            end = min(full, len(places), len(request.keys[group]))
            ends.append(end)
            offers.append(self._kept(request, group, end))
            keys += [request.keys[group][at] for at in offers[group]]
        stored = self._store(request, keys, offers[0] if len(offers) == 1 else [*chain(*offers)]) if keys else []
        if stored is None:
            return None
        request.offer([max(before, end) for before, end in zip(request.offered, ends, strict=True)])
        if not stored:
            return None
        missing = set(stored)
        places_of = [
            [places[at] for at in offer if of[at] in missing]
            for of, places, offer in zip(request.keys, request.held, offers, strict=True)
        ]
        copy = self._copy(request, stored, places_of, is_load=False)
        for window, places in zip(self._windows, places_of, strict=True):
            if window or request.over is not None:
                self._watch(copy, places)
        if request.over is not None and not self._given.isdisjoint(chain.from_iterable(places_of)):
            self.flushed.append(copy)
        return copy

    def _kept(self, request: _Request, group: int, end: int) -> Sequence[int]:
        """The blocks of a group up to ``end`` that were not offered and that copies keep."""
        offer, window, size = range(request.offered[group], end), self._windows[group], self._size
        if not window:
            return offer
        tails = (request.prompt - 1) // size, request.junction // size
        places, need = request.held[group], window_blocks(window, size)
        return [at for at in offer if places[at] != NO_PLACE and is_kept(at, tails, need, self._retention, size)]

    def _store(self, request: _Request, keys: list[int], where: Sequence[int]) -> list[int] | None:
        """The keys that are missing, for which there is room now; None without room for all of them. ``where`` has the
        place of each in the sequence."""
        here, writing = self._here, self._writing
        missing = [key for key in keys if key not in here]
        used = keys
        if not writing.isdisjoint(keys):
            where = [at for key, at in zip(keys, where, strict=True) if key not in writing]
            used = [key for key in keys if key not in writing]
        self._used(request, used, where)
        over = len(missing) + len(here) - self.blocks
        if over > 0:
            offered = set(keys) if len(missing) < len(keys) else ()
            victims = self.order.victims(over, self._idle.__contains__, offered)
            if victims is None:
                return None
            self.order.forget(victims)
            here.difference_update(victims)
            self._idle.difference_update(victims)
            self.evicted += over
        self._insert(request, missing)
        here.update(missing)
        writing.update(missing)
        return missing

    def _watch(self, copy: HostCopy, places: Iterable[int]) -> None:
        for place in places:
            self._watched.setdefault(place, []).append(copy)

    # --- ends ---

    def ended(self, copy: HostCopy) -> None:
        """A copy has ended, a second time without effect."""
        if copy.done:
            return
        copy.done = True
        copy.owner.copies.remove(copy)
        if copy.is_load:
            self._loading.difference_update(copy.keys)
            for key in copy.keys:
                self._readers[key] -= 1
                if not self._readers[key]:
                    del self._readers[key]
                    self._idle.add(key)
        else:
            self._writing.difference_update(copy.keys)
            self._idle.update(copy.keys)
        for place in chain.from_iterable(copy.places) if self._watched else ():
            watching = self._watched.get(place, [])
            if copy in watching:
                watching.remove(copy)
                if not watching:
                    del self._watched[place]

    def finished(self, name: str, computed: int) -> HostCopy | None:
        """A request has ended, with so many computed tokens. ``formed`` then offers its last blocks. The result is its
        load, if one runs: nobody else may have the places meanwhile."""
        request = self._requests.pop(name)
        request.over = computed
        request.known = max(request.known, computed)
        self._ends.append(request)
        for copy in request.copies:
            for window, places in zip(self._windows, copy.places, strict=False):
                if not window:
                    self._watch(copy, places)
        return next((copy for copy in request.copies if copy.is_load), None)


def _runs(places: Sequence[int], alone: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of places in a row, which ascend. Those from ``alone`` on are runs of their own.

    >>> list(_runs([1, 2, 5, 6, 7, 8], 7))
    [(1, 3), (5, 7), (7, 8), (8, 9)]
    """
    at = 0
    while at < len(places):
        first = end = places[at]
        while at < len(places) and places[at] == end and (end == first or end < alone):
            at, end = at + 1, end + 1
        yield first, end
