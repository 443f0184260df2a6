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

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final

import msgspec

from kvbm_console.core.eviction.policy import TierPolicy
from kvbm_console.core.eviction.request_lru import RequestLru
from kvbm_console.core.tiers import window_blocks
from kvbm_console.simulator.config import is_kept
from kvbm_console.simulator.device_pool import HASH_BITS, NO_PLACE, in_group
from kvbm_console.simulator.work import Table

_WRITING: Final = -1


class HostCopy(msgspec.Struct, eq=False):
    """A copy of blocks of a request between device and host."""

    number: int
    request: str
    keys: list[int]
    is_load: bool
    places: list[list[int]]
    """The device places of a copy down, by group."""
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
        "copies", "held", "junction", "keys", "known", "line", "local", "number", "offered", "over", "places", "prompt",
    )

    def __init__(self, number: int, keys: list[Sequence[int]], prompt: int) -> None:
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
        self.offered = [0] * len(keys)
        """Leading blocks of each group that were offered."""
        self.copies: list[HostCopy] = []
        """Those that run."""
        self.line: list[int] = []
        """Its keys in their order, for a policy that hears of a whole prompt."""
        self.places: dict[int, int] = {}
        """Key to its place in ``line``."""
        self.over: int | None = None
        """The tokens that it computed, once it has ended."""


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
        self._readers: dict[int, int] = {}
        """Key to the loads that read it, -1 while it is written."""
        self.order = self._make_order()
        self._requests: dict[str, _Request] = {}
        self._loading: set[int] = set()
        self._arrived = self._copies = 0
        self._given: set[int] = set()
        """Device places that were given out for the step that is being formed."""
        self._watched: dict[int, list[HostCopy]] = {}
        """Device place to the copies that read it and that end when it is given out."""
        self._ends: list[str] = []
        """Requests that ended since the last step."""
        self.flushed: list[HostCopy] = []
        """Copies that end in the step that was formed last."""

    def __len__(self) -> int:
        """Blocks that are here or on their way."""
        return len(self._readers)

    def arrived(self, name: str, hashes: Sequence[int], prompt_tokens: int) -> None:
        """A request has come, with the hashes of its whole sequence."""
        self._arrived += 1
        keys = [in_group(number, hashes) for number in self._numbers]
        self._requests[name] = _Request(self._arrived, keys, prompt_tokens)

    # --- lookups and loads ---

    def looked_up(self, name: str, local: int, tokens: int) -> int | None:
        """Tokens that can be loaded behind ``local`` blocks of a sequence of so many tokens; None while they are
        written, or are loaded for another request."""
        request = self._requests[name]
        request.held = [[] for _ in request.keys]
        request.offered = [0] * len(request.keys)
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
        count, waits = 0, False
        for key in keys:
            if key not in self._readers:
                break
            count += 1
            waits |= self._readers[key] == _WRITING
        return None if waits else count

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
            if keys[at] in self._readers:
                run += 1
                waits |= self._readers[keys[at]] == _WRITING
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
            request.offered[group] = end
        for key in keys:
            self._readers[key] += 1
        self._loading.update(keys)
        return self._copy(name, request, keys, [], is_load=True)

    def _use(self, request: _Request, group: int, first: int, end: int) -> list[int]:
        keys = list(request.keys[group][first:end])
        self._used(request, zip(keys, range(first, end), strict=True))
        return keys

    def _used(self, request: _Request, keys: Iterable[tuple[int, int]]) -> None:
        """A request uses these keys, each with its place in the sequence."""
        if isinstance(self.order, RequestLru):
            self.order.used(request.number, keys)
        elif not request.line:
            blocks = request.prompt // self._size
            self._extend(request, chain.from_iterable(zip(*(keys[:blocks] for keys in request.keys), strict=True)))
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
        line, places, resident = request.line, request.places, self.order.resident
        for key in sorted(keys, key=places.__getitem__):
            before = next((line[place] for place in range(places[key] - 1, -1, -1) if line[place] in resident), None)
            self.order.insert([key], before, self._clock())

    def _copy(
        self, name: str, request: _Request, keys: list[int], places: list[list[int]], *, is_load: bool
    ) -> HostCopy:
        self._copies += 1
        copy = HostCopy(self._copies, name, keys, is_load, places)
        request.copies.append(copy)
        return copy

    # --- a step ---

    def formed(self, requests: Sequence[Formed], preempted: Iterable[str], order: Sequence[str]) -> list[HostCopy]:
        """A step was formed of these requests, and others were preempted for it. ``order`` names requests that ended
        before it, as far as the order of their ends is known. The result are the copies down of this step."""
        self._take_places(requests)
        self.flushed = [
            copy for name in preempted if name in self._requests for copy in self._requests[name].copies
            if not copy.is_load
        ]
        for place in self._given & self._watched.keys():
            self.flushed += [copy for copy in self._watched[place] if copy not in self.flushed]
        copies = [self._offer(part.name, part.computed) for part in requests]
        turn = {name: at for at, name in enumerate(order)}
        ends = sorted(self._ends, key=lambda name: turn.get(name, len(turn)))
        copies += [self._offer(name, self._requests[name].over or 0) for name in ends]
        if isinstance(self.order, RequestLru):
            for name in ends:
                self.order.finished(self._requests[name].number, name)
            self.order.formed(order)
            self.order.begin()
        for name in ends:
            if not self._requests[name].copies:
                del self._requests[name]
        self._ends.clear()
        self._given.clear()
        return [copy for copy in copies if copy is not None]

    def _take_places(self, requests: Sequence[Formed]) -> None:
        """Follow the places of all requests. A place behind a window that was given out again has other content."""
        before: dict[str, list[int]] = {}
        for part in requests:
            request = self._requests[part.name]
            request.known, request.junction = part.known, part.junction
            if part.anew:
                request.held = [[] for _ in request.keys]
            before[part.name] = lengths = [len(places) for places in request.held]
            for places, table, length in zip(request.held, part.tables, lengths, strict=True):
                fresh = table.blocks[length:]
                places += fresh
                self._given.update(fresh)
            if all(len(places) == length for places, length in zip(request.held, lengths, strict=True)):
                del before[part.name]
        self._given.discard(NO_PLACE)
        if not self._given or not any(self._windows):
            return
        for name, request in self._requests.items():
            ends = before.get(name)
            for group, window in enumerate(self._windows):
                places = request.held[group]
                end = len(places) if ends is None else ends[group]
                for at in range(request.offered[group], end) if window else ():
                    if places[at] in self._given:
                        places[at] = NO_PLACE

    def _offer(self, name: str, computed: int) -> HostCopy | None:
        """Offer the blocks of a request that are full with so many computed tokens."""
        request, size = self._requests[name], self._size
        full = min(computed, request.known, request.prompt if self._prompt_only else computed) // size
        if full <= min(request.offered):
            return None
        tails = (request.prompt - 1) // size, request.junction // size
        keys: list[int] = []
        where: list[tuple[int, int]] = []
        ends = []
        for group, places in enumerate(request.held):
            need, end = window_blocks(self._windows[group], size), min(full, len(places), len(request.keys[group]))
            ends.append(end)
            for at in range(request.offered[group], end):
                if places[at] != NO_PLACE and is_kept(at, tails, need, self._retention, size):
                    keys.append(request.keys[group][at])
                    where.append((group, at))
        stored = self._store(request, keys, where) if keys else []
        if stored is None:
            return None
        request.offered = [max(before, end) for before, end in zip(request.offered, ends, strict=True)]
        if not stored:
            return None
        missing, places_of = set(stored), [list[int]() for _ in request.held]
        for key, (group, at) in zip(keys, where, strict=True):
            if key in missing:
                places_of[group].append(request.held[group][at])
        copy = self._copy(name, request, stored, places_of, is_load=False)
        for window, places in zip(self._windows, places_of, strict=True):
            if window or request.over is not None:
                self._watch(copy, places)
        if request.over is not None and not self._given.isdisjoint(chain.from_iterable(places_of)):
            self.flushed.append(copy)
        return copy

    def _store(self, request: _Request, keys: list[int], where: list[tuple[int, int]]) -> list[int] | None:
        """The keys that are missing, for which there is room now; None without room for all of them."""
        readers = self._readers
        missing = [key for key in keys if key not in readers]
        self._used(request, [
            (key, at) for key, (_, at) in zip(keys, where, strict=True) if readers.get(key) != _WRITING
        ])
        over = len(missing) + len(readers) - self.blocks
        if over > 0:
            victims = self.order.victims(over, lambda key: not readers[key], set(keys))
            if victims is None:
                return None
            self.order.forget(victims)
            for key in victims:
                del readers[key]
            self.evicted += over
        self._insert(request, missing)
        readers.update(dict.fromkeys(missing, _WRITING))
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
        request = self._requests[copy.request]
        request.copies.remove(copy)
        for key in copy.keys:
            self._readers[key] = self._readers[key] - 1 if copy.is_load else 0
        if copy.is_load:
            self._loading.difference_update(copy.keys)
        for place in chain.from_iterable(copy.places):
            watching = self._watched.get(place, [])
            if copy in watching:
                watching.remove(copy)
                if not watching:
                    del self._watched[place]
        if request.over is not None and not request.copies and copy.request not in self._ends:
            del self._requests[copy.request]

    def finished(self, name: str, computed: int) -> bool:
        """A request has ended, with so many computed tokens. ``formed`` then offers its last blocks. True if a load
        runs, into places that nobody else may have meanwhile."""
        request = self._requests[name]
        request.over = computed
        request.known = max(request.known, computed)
        self._ends.append(name)
        for copy in request.copies:
            for window, places in zip(self._windows, copy.places, strict=False):
                if not window:
                    self._watch(copy, places)
        return any(copy.is_load for copy in request.copies)
