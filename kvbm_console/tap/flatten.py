"""From queued records, which hold the engine's own objects, to plain values that can be sent.

A step of an engine names every request, and a message only the requests whose course changes. A decoding request that
goes on by one token is left out. The sender's thread runs this code, never the scheduler's thread.

Messages, each a list (times in nanoseconds on the monotonic clock of the machine):
``new``     time, request, hashes, prompt tokens, output limit, priority, session
``will``    time, request, computed tokens
``lookup``  time, request, computed tokens, tokens or null, asynchronous
``alloc``   time, request, block ids, external tokens, true if it holds before the step, hashes of the blocks behind
            its prompt that its window has passed
``step``    time, new, resumed, going on (each [request, block ids or null, computed, scheduled, its tokens]),
            preempted, skipped, unskipped, running, fills (each [request, first block, hashes, and their places if the
            engine's pool has named them, and those of them that it does not keep in its cache])
``fill``    time, fills
``copies``  time, loaded, sent, failed, failed block ids
``finish``  time, request, status, delayed, leading blocks with a hash if it ended before its time
``events``  time, [[kind, hashes, medium, group]]
``all``     time, [[request..., as in new], [block ids, computed, status, tokens, scheduled,
            hashes of full blocks, places of those that it does not keep]], 1 if the engine has formed a step,
            records dropped so far,
            cached places or null: [[ids, hashes] of the reported group, [[group, hashes]] of the others],
            blocks below the device or null: [[medium, hashes]]
``pool``    time, request that got places, their ids, [[group, hashes stored, hashes removed]] of the other groups,
            places and hashes of the reported group that became known
``copy``    time, the connector's number, request, source medium, target medium, hashes, blocks, bytes or null, true
            if it waits for a verdict
``copied``  time, the connector's number, status, nanoseconds in which bytes moved or null, reason of a failure
``found``   time, request, source of cache hits to tokens
``slow``    time, request, connector, method, nanoseconds of a call that blocked the engine
``window``  time, request, leading blocks that its attention window has passed since
``measured`` time, [[connector, method, calls, nanoseconds, longest]], figures by name
``reset``   time
``audit``   time, first place, hashes (0 without content of the reported group), holders, free places or null,
            hashes in the prefix cache or null, [[group, hashes]] of the other groups
``sanitized`` time, the fields of a finding of ``sanitize``
``cleared`` time, requests that are preempted: the engine forgot its prefix cache
``publish`` time, request, places, hashes: its next full blocks are in SGLang's tree, which has these places
``evict``   time, [[request that it is for, places]] that SGLang's tree gave up
``preempt`` time, request

A block that the window of a request has passed has the id of the engine's null block.

Law of this file: it reads the engine's objects and changes none. A hash is the last eight bytes of the engine's own, as
in its event stream.
"""

from typing import Any, Final

from kvbm_console.tap.recorder import LIVE_MAX, NULL_BLOCKS, Record, TapRecorder, medium_of_event

NAME_CHARS_MAX: Final = 256
GROUP_BYTES: Final = 4
"""An engine names a cached block by its hash, followed by the number of its group."""
_MASK: Final = 2**64 - 1


def hash_of(block_hash: Any) -> int:
    """The 64-bit form of an engine's block hash.

    >>> hash_of(b"\\0" * 31 + b"\\x07"), hash_of(-1)
    (7, 18446744073709551615)
    """
    if isinstance(block_hash, (bytes, bytearray)):
        return int.from_bytes(block_hash[-8:], "big") or 1
    if not isinstance(block_hash, int):
        block_hash = getattr(block_hash, "hash_value", block_hash)
        return hash_of(block_hash) if isinstance(block_hash, (bytes, int)) else hash(block_hash) & _MASK or 1
    return block_hash & _MASK or 1


def leading_nulls(ids: list[int], first_place: int = NULL_BLOCKS) -> int:
    """The number of blocks at the beginning for which the engine's null block stands, which is below its first place.

    >>> leading_nulls([0, 0, 7, 8]), leading_nulls([])
    (2, 0)
    """
    return next((at for at, place in enumerate(ids) if place >= first_place), len(ids))


def group_and_hash(key: Any) -> tuple[int, int]:
    """Group and hash in an engine's name of a cached block.

    >>> group_and_hash(b"\\0" * 31 + b"\\x07" + b"\\0\\0\\0\\x02")
    (2, 7)
    """
    if isinstance(key, (bytes, bytearray)):
        return int.from_bytes(key[-GROUP_BYTES:], "big"), hash_of(key[:-GROUP_BYTES])
    return int(getattr(key, "group_id", 0)), hash_of(getattr(key, "block_hash", key))


def halves(request: Any) -> tuple[str | None, str | None]:
    """The names under which a request's blocks go to another engine and come from another engine, see ``SlotOpened``.

    A router names the transfer for Mooncake and MoRI-IO. NIXL sends under the request id of the engine that prefilled
    it, which older releases share between both engines.
    """
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict):
        return None, None
    sends = receives = None
    if params.get("do_remote_decode"):
        sends = params.get("transfer_id") or request.request_id
    elif params.get("do_remote_prefill") or params.get("remote_request_id"):  # connectors clear the first with the load
        receives = params.get("transfer_id") or params.get("remote_request_id") or request.request_id
    return _cut(sends), _cut(receives)


def _cut(name: Any) -> str | None:
    return None if name is None else str(name)[:NAME_CHARS_MAX]


class Flattener:
    """Keeps the state of every live request that the next step is compared with.

    ``group`` is the group of blocks that is reported, ``block_tokens`` the size of its blocks. ``hash_tokens`` is the
    number of tokens in a request's hash. Without ``caching`` no later request finds a block of the device, so none is
    reported full. ``beside`` is true when other connectors load blocks: the connector does not hear of these blocks,
    so the pool reports them.
    """

    def __init__(
        self, *, group: int = 0, block_tokens: int = 16, hash_tokens: int | None = None, caching: bool = True,
        beside: bool = False, sparse: bool = False,
    ) -> None:
        self.group = group
        self._beside = beside
        self._sparse = sparse
        self._caching = caching
        self.block_tokens = block_tokens
        self.stride = max(1, block_tokens // (hash_tokens or block_tokens))
        self._requests: dict[str, Any] = {}
        self._next: dict[str, int] = {}
        """Position at which a request goes on by one token without being named."""
        self._target: dict[str, int] = {}
        """Position from which a request produces tokens: its tokens when it was scheduled first or again."""
        self._filled: dict[str, int] = {}
        """Leading blocks whose hashes were reported."""
        self._due: dict[str, int] = {}
        """Leading blocks that are full once the engine has their hashes."""
        self._active: set[str] = set()
        self._skipped: set[str] = set()
        self.pool_names = False
        """True if the engine's pool reports each block that gets its hash; else full blocks follow from positions."""
        self._told: list[list[Any]] = []
        """The fills that the pool has reported since the last step."""
        self._others: dict[int, tuple[int, int]] = {}
        """Places that hold cached blocks of groups that are not reported, to group and hash."""

    def messages(self, record: Record) -> list[Any]:
        """The messages of a record, a list for each; a record without a method here is already a message."""
        method = getattr(self, f"_{record[0]}", None)
        return [list(record)] if method is None else method(*record[1:])

    # --- one method for each kind ---

    def _new(self, now: int, request: Any) -> list[Any]:
        if len(self._requests) >= LIVE_MAX:
            return []
        self._requests[request.request_id] = request
        return [["new", now, *self._about(request)]]

    def _about(self, request: Any) -> list[Any]:
        prompt = request.num_prompt_tokens
        hashes = self._hashes(request, 0, prompt // self.block_tokens)
        session = getattr(request, "session_id", None)
        return [
            request.request_id, hashes, prompt, getattr(request, "max_tokens", 0) or 0,
            getattr(request, "priority", 0) or 0, _cut(session), *halves(request),
        ]

    def _hashes(self, request: Any, first: int, end: int) -> list[int]:
        """Hashes of the request's full blocks from ``first`` to ``end``, as far as the engine has made them."""
        stride = self.stride
        own = getattr(request, "block_hashes", None) or ()
        end = min(end, len(own) // stride)
        return [hash_of(own[(at + 1) * stride - 1]) for at in range(first, end)]

    def _lookup(self, now: int, request: str, computed: int, tokens: int | None, asynchronous: Any) -> list[Any]:
        return [["lookup", now, request, computed, tokens, bool(asynchronous)]]

    def _alloc(self, now: int, request: str, ids: Any, external: int) -> list[Any]:
        if ids and isinstance(ids[0], tuple):
            group, count = ids[self.group]
            ids = [block.block_id for block in group[:count]]
        places = self._ids(ids)
        return [["alloc", now, request, places, external, False, self._passed(request, places)]]

    def _ids(self, ids: Any) -> list[int]:
        """Block ids of the reported group; older engines had one group and no tuple."""
        if ids and not isinstance(ids[0], int):
            ids = ids[self.group]
        return list(ids or ())

    def _passed(self, name: str, places: list[int]) -> list[int]:
        """The hashes of a request's blocks behind its prompt that its window has passed."""
        request = self._requests.get(name)
        passed = leading_nulls(places)
        first = 0 if request is None else request.num_prompt_tokens // self.block_tokens
        return [] if request is None else self._hashes(request, first, passed)

    def _step(
        self, now: int, output: Any, preempted: tuple[str, ...], lengths: dict[str, int], ended: tuple[str, ...] = (),
    ) -> list[Any]:
        scheduled = output.num_scheduled_tokens
        drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
        new: list[Any] = []
        resumed: list[Any] = []
        going: list[Any] = []
        fills: list[Any] = []
        for name in preempted:
            self._forget(name)
        if not self.pool_names:
            self._fill(fills)
        for request in output.scheduled_new_reqs:
            name, computed = request.req_id, request.num_computed_tokens
            new.append(self._start(name, request.block_ids, computed, scheduled[name], lengths.get(name, 0)))
        cached = output.scheduled_cached_reqs
        again = getattr(cached, "resumed_req_ids", None) or ()
        expected, due, next_of = self._next, self._due, self._next.get
        size = self.block_tokens
        for name, ids, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if ids is None and next_of(name) == computed and scheduled[name] == 1:  # most requests of most steps
                expected[name] = computed = computed + 1
                if not computed % size:
                    due[name] = computed // size
                continue
            count = scheduled[name] - len(drafts.get(name, ()))  # a draft counts when the model has accepted it
            if name in again:
                resumed.append(self._start(name, ids, computed, count, lengths.get(name, 0)))
                continue
            going.append([name, None if ids is None else self._ids(ids), computed, count, 0])
            self._go_on(name, computed, count)
        self._fill(fills)
        skipped, unskipped = self._left_out(scheduled, preempted)
        step = ["step", now, new, resumed, going, list(preempted), skipped, unskipped, len(scheduled), fills]
        return [[*step, list(ended)] if ended else step]

    def _forget(self, name: str) -> None:
        for memory in (self._next, self._target, self._filled, self._due):
            memory.pop(name, None)

    def _start(self, name: str, ids: Any, computed: int, count: int, tokens: int) -> list[Any]:
        """The row of a request that is scheduled for the first time, or again after a preemption."""
        self._target[name] = tokens
        self._filled[name] = computed // self.block_tokens
        self._go_on(name, computed, count)
        return [name, self._ids(ids), computed, count, tokens]

    def _go_on(self, name: str, computed: int, count: int) -> None:
        after = computed + count
        if count == 1 and computed >= self._target.get(name, after):
            self._next[name] = after  # the request decodes, and this step names it as decoding
        else:
            self._next.pop(name, None)
        if after // self.block_tokens > self._filled.get(name, 0):
            self._due[name] = after // self.block_tokens

    def _fill(self, fills: list[Any]) -> None:
        """Add the full blocks whose hashes the engine has made since the last step."""
        if not self._caching or self.pool_names:
            self._due.clear()
            fills += filter(None, map(self._computed_here, self._told)) if self._beside else self._told
            self._told.clear()
        for name, end in list(self._due.items()):
            request = self._requests.get(name)
            first = self._filled.get(name, 0)
            hashes = [] if request is None else self._hashes(request, first, end)
            if hashes:
                fills.append([name, first, hashes])
                self._filled[name] = first + len(hashes)
            if request is None or first + len(hashes) >= end:
                del self._due[name]

    def _computed_here(self, fill: list[Any]) -> list[Any]:
        """The part of a fill that no other connector has loaded; its part reaches to the request's first step."""
        name, first, hashes, places, *unkept = fill
        skip = max(0, self._filled.get(name, 0) - first)
        return [name, first + skip, hashes[skip:], places[skip:], *unkept] if skip < len(hashes) else []

    def _left_out(self, scheduled: dict[str, int], preempted: tuple[str, ...]) -> tuple[list[str], list[str]]:
        names = scheduled.keys()
        if not preempted and not self._skipped and names == self._active:
            return [], []
        self._active.difference_update(preempted)
        self._skipped.difference_update(preempted)
        skipped = self._active - names
        unskipped = self._skipped & names
        self._skipped = (self._skipped | skipped) - unskipped
        self._active = set(names)
        return sorted(skipped), sorted(unskipped)

    def _finish(self, now: int, request: Any, delayed: bool, named: tuple[int, ...]) -> list[Any]:
        name = request.request_id
        fills: list[Any] = []
        self._fill(fills)
        known = self._requests.pop(name, None)
        self._forget(name)
        self._active.discard(name)
        self._skipped.discard(name)
        if known is None:
            return []
        status = getattr(request.status, "name", str(request.status))
        messages: list[Any] = [["fill", now, fills]] if fills else []
        return [*messages, ["finish", now, name, status, delayed, named[self.group] if named else 0]]

    def _events(self, now: int, events: Any) -> list[Any]:
        rows = []
        for event in events:
            hashes = [hash_of(key) for key in getattr(event, "block_hashes", None) or ()]
            rows.append([type(event).__name__, hashes, medium_of_event(event), getattr(event, "group_idx", None) or 0])
        return [["events", now, rows]]

    def _pool(self, now: int, request: str, rows: list[tuple[int, Any]]) -> list[Any]:
        """Places were allocated (no hash), or are cached under a hash from now on."""
        return [self._changed(now, request, rows)]

    def _named(self, now: int, request: str, first: int, rows: list[tuple[int, Any]], group: int = -1) -> list[Any]:
        """Blocks of a request, from its block ``first`` on, got their hashes, or are full and not kept in the cache of
        the engine's ``group``; the null block has none."""
        places: list[int] = []
        hashes: list[int] = []
        unkept: list[int] = []
        mine = self._requests.get(request) if self._sparse and group == self.group else None

        def tell(end: int) -> None:
            row = [request, end - len(places), list(hashes), list(places)]
            self._told.append([*row, list(unkept)] if unkept else row)
            for column in (places, hashes, unkept):
                column.clear()

        for at, (place, key) in enumerate(rows, first):
            of, content = (-1, 0) if key is None else group_and_hash(key)
            if key is None and mine is not None and place >= NULL_BLOCKS:
                of, content = group, next(iter(self._hashes(mine, at, at + 1)), 0)
                unkept.append(place)
            if of == self.group and content:
                places.append(place)
                hashes.append(content)
            elif places:
                tell(at)
        if places:
            tell(first + len(rows))
        message = self._changed(now, request, [row for row in rows if row[1] is not None])
        return [message] if message[4] or message[5] else []

    def _window(self, now: int, request: str, passed: int) -> list[Any]:
        """The window of a request moved. Blocks that got their hashes before are told before it, because it may have
        passed them: those of a load get them when the request goes on."""
        fills = [row for row in self._told if row[0] == request]
        self._told = [row for row in self._told if row[0] != request]
        return [*([["fill", now, fills]] if fills else []), ["window", now, request, passed]]

    def _changed(self, now: int, request: str, rows: list[tuple[int, Any]]) -> list[Any]:
        changes: dict[int, tuple[list[int], list[int]]] = {}
        taken: list[int] = []
        named: list[int] = []
        hashes: list[int] = []
        for place, key in rows:
            if place in self._others:
                group, removed = self._others.pop(place)
                changes.setdefault(group, ([], []))[1].append(removed)
            if key is None:
                taken.append(place)
                continue
            group, stored = group_and_hash(key)
            if group != self.group:
                self._others[place] = group, stored
                changes.setdefault(group, ([], []))[0].append(stored)
            elif self._beside:
                named.append(place)
                hashes.append(stored)
        return ["pool", now, request, taken, [[group, *both] for group, both in changes.items()], named, hashes]

    def _places(self, rows: list[tuple[int, Any]]) -> list[Any]:
        ids: list[int] = []
        hashes: list[int] = []
        others: dict[int, list[int]] = {}
        for place, key in rows:
            group, content = group_and_hash(key)
            if group == self.group:
                ids.append(place)
                hashes.append(content)
            else:
                self._others[place] = group, content
                others.setdefault(group, []).append(content)
        return [[ids, hashes], [[group, stored] for group, stored in others.items()]]

    def _all(
        self, now: int, rows: Any, steps: int, dropped: int, places: list[tuple[int, Any]] | None = None,
        below: list[tuple[str, dict[Any, int]]] | None = None,
    ) -> list[Any]:
        for memory in (self._requests, self._next, self._target, self._filled, self._due, self._active, self._skipped,
                       self._others, self._told):
            memory.clear()
        live = []
        for request, ids, computed, scheduled, state, tokens, named in rows[:LIVE_MAX]:
            name = request.request_id
            self._requests[name] = request
            self._target[name] = tokens
            blocks = self._ids(ids)
            full = named[self.group] if named else min(computed // self.block_tokens, len(blocks))
            hashes = self._hashes(request, 0, full) if self._caching else []
            self._filled[name] = len(hashes)
            if len(hashes) < full:
                self._due[name] = full
            status = getattr(state, "name", str(state))
            if scheduled:
                self._active.add(name)
            elif status == "RUNNING":
                self._skipped.add(name)
            kept = {place for place, _ in places or ()}
            unkept = [place for place in blocks[: len(hashes)] if place >= NULL_BLOCKS and place not in kept]
            row = [blocks, computed, status, tokens, scheduled, hashes]
            live.append([self._about(request), [*row, unkept] if unkept and self._sparse else row])
        lower = None if below is None else [
            [medium, [hash_of(key) for key, times in held.items() for _ in range(times)]] for medium, held in below
        ]
        return [["all", now, live, steps, dropped, None if places is None else self._places(places), lower]]

    def _copy(
        self, now: int, number: int, request: str, source: str, target: str, keys: list[Any], blocks: int,
        size_bytes: int | None, asks: bool,
    ) -> list[Any]:
        hashes = [group_and_hash(key)[1] for key in keys]
        return [["copy", now, number, request, source, target, hashes, blocks, size_bytes, asks]]

    def _cleared(self, now: int, preempted: list[str]) -> list[Any]:
        self._others.clear()
        return [["cleared", now, preempted]]

    def _audit(
        self, now: int, first: int, rows: list[tuple[Any, int]], free: int | None, cached: int | None
    ) -> list[Any]:
        hashes: list[int] = []
        others: dict[int, list[int]] = {}
        for key, _ in rows:
            group, content = (self.group, 0) if key is None else group_and_hash(key)
            if group != self.group:
                others.setdefault(group, []).append(content)
                content = 0
            hashes.append(content)
        return [["audit", now, first, hashes, [held for _, held in rows], free, cached, list(others.items())]]

    def _preempt(self, now: int, name: str) -> list[Any]:
        """A request lost its blocks outside of a step."""
        self._forget(name)
        self._active.discard(name)
        self._skipped.discard(name)
        return [["preempt", now, name]]

    def _sanitized(self, now: int, row: list[Any]) -> list[Any]:
        return [["sanitized", now, *row]]


def drain(recorder: TapRecorder, flattener: Flattener, most: int) -> list[Any]:
    """The messages of at most ``most`` records."""
    messages: list[Any] = []
    queue = recorder.queue
    flattener.pool_names = recorder.places_known
    for _ in range(min(most, len(queue))):
        try:
            record = queue.popleft()
        except IndexError:
            break  # the scheduler's thread cleared the queue meanwhile
        try:
            messages += flattener.messages(record)
        except Exception:
            recorder.failed()
    return messages
