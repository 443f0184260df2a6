"""From the tap's messages to stimuli of a leader that only watches.

A session begins with ``all``, the engine as it is; earlier messages are ignored. Requests that were live before the
session are reported as they are. After dropped records all requests are reported, and the source is marked as lossy.

Law of this file: nothing here waits or knows a socket. It keeps of each live request only the facts that the next
message needs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Authority, CandidateStatus, FinishReason, Measure, Note, Tier
from kvbm_console.core.instructions import AuditAnswer, PoolAnswer
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import MEDIUM_OF, Dispatcher
from kvbm_console.engines.kv_events.batch import tier_of
from kvbm_console.tap.flatten import leading_nulls
from kvbm_console.tap.recorder import DISK
from kvbm_console.tap.sender import TapSettings

REASONS: Final = {
    "FINISHED_STOPPED": FinishReason.STOP, "FINISHED_REPETITION": FinishReason.STOP,
    "FINISHED_LENGTH_CAPPED": FinishReason.LENGTH, "FINISHED_ABORTED": FinishReason.ABORTED,
    "FINISHED_IGNORED": FinishReason.TOO_LARGE, "FINISHED_ERROR": FinishReason.ERROR,
}
"""vLLM's names for the end of a request; an unknown name counts as an error."""
REPAIR_EVERY_NS: Final = 10_000_000_000
"""Time between two whole reports because of audits: if they do not help, they must not cost much."""
POOLS_MAX: Final = 16
"""Media that one connector may name."""
STATUSES: Final = {
    "completed": CandidateStatus.COMPLETED, "failed": CandidateStatus.FAILED, "cancelled": CandidateStatus.CANCELLED,
}
DEVICE: Final = ""
"""The device's pool, among the pools by medium."""
GROUP: Final = "#"
"""Prefix of the pool, among the pools by medium, of a group whose blocks are not reported with requests."""
_RUNS: Final = "RUNNING"
NO_PLACE: Final = 0
"""The engine's null block, in the place of a block that the window of its request has passed."""
SOURCES: Final = {"disk": "STORAGE", "p2p": "EXTERNAL"}
"""A connector's source of cache hits to its medium. Other sources, such as ``host``, are the connector's own medium.
Hits of a disk are those of this machine's disk if the engine has named one."""


class _Request(msgspec.Struct):
    """The known facts of a live request."""

    prompt: int
    target: int = 0
    """Position from which the request produces tokens."""
    blocks: list[int] = []
    filled: int = 0
    """Leading blocks whose content was reported."""
    local: int = 0
    prefilling: bool = False
    allocated: tuple[list[int], int] | None = None
    """Blocks and external tokens of an allocation that is reported with the next step."""
    found: dict[str, int] = {}
    passed_hashes: list[int] = []
    """Hashes of the blocks of an allocation that its window has passed, from the end of its prompt on."""
    """External tokens by the source that the connector names."""


class Call(msgspec.Struct, frozen=True):
    """A stimulus to submit; ``asks`` names the request whose verdict it fetches, and ``copy`` is the number of the load
    that the verdict is for if it is no lookup. ``medium`` names the pool that it declares.

    A copy goes from the pool of ``medium`` to the pool of ``target``.
    """

    stimulus: st.Stimulus
    asks: str = ""
    medium: str = ""
    target: str = ""
    copy: int | None = None


class Translator:
    """One engine's messages, in order. ``take_calls`` gives the stimuli to submit."""

    def __init__(self, settings: TapSettings) -> None:
        self._settings = settings
        self._requests: dict[str, _Request] = {}
        self._allocated: list[str] = []
        """Requests without blocks that got some, which the next step reports, in the order of their allocations. A
        request may share blocks that a running, resumed or new request got just before in the same step."""
        self._taken: list[tuple[str, list[int]]] = []
        """(request, places) that were allocated in this step."""
        self._named: dict[int, int] = {}
        """Places that are cached since this step, with their hashes. A place that no request fills was loaded."""
        self.pools: dict[str, int] = {}
        """Index of the pool of each medium below the device, and of ``DEVICE``, as the leader has answered."""
        self._loads: dict[str, Call] = {}
        """Requests to the loads that were ordered in this step, which begin with their allocations."""
        self._open: set[int] = set()
        """The connector's open copies."""
        self._untold: set[int] = set()
        """Copies that a report of the whole engine has not named yet."""
        self._delayed: set[str] = set()
        """Ended requests whose blocks are still being sent."""
        self.started = False
        self.wants_all = False
        """True if a message did not fit, so the engine should report everything again."""
        self._dropped = 0
        self._at = 0
        self.calls: list[Call] = []
        self.cost: tuple[int, ...] | None = None
        self.audited: int | None = None
        """Places that audits compared since the engine began; None before the first audit."""
        self.differing = 0
        """Places in which the engine and the facts differed."""
        self._repaired_ns: int | None = None

    def begin(self) -> None:
        """Begin a session with a daemon: declare the pools."""
        self._requests.clear()
        self._allocated.clear()
        self._taken.clear()
        self._named.clear()
        self._loads.clear()
        self._open.clear()
        self._untold.clear()
        self.pools.clear()
        self._delayed.clear()
        self.started = False
        settings = self._settings
        capacity = None if settings.others else settings.capacity_blocks
        self._call(
            st.PoolDeclared, settings.dp_rank, settings.group, Tier.G1, MEDIUM_OF[Tier.G1], capacity,
            settings.block_tokens, Authority.OBSERVED, False, settings.first_place,
            settings.windows.get(settings.group),
        )
        for group, size in settings.others.items():
            self.calls.append(Call(self._stimulus(
                st.PoolDeclared, settings.dp_rank, group, Tier.G1, MEDIUM_OF[Tier.G1], None, size, Authority.STREAM,
                False, 0, settings.windows.get(group),
            ), medium=f"{GROUP}{group}"))
            self.pools[f"{GROUP}{group}"] = -1
        if settings.medium and settings.caching:
            self.declare(settings.medium, silent=settings.silent)
        limits = {
            Measure.CAPACITY_BLOCKS: settings.capacity_blocks if settings.others else None,
            Measure.HOST_CAPACITY_BLOCKS: settings.host_blocks,
            Measure.RUNNING_MOST: settings.running_most, Measure.STEP_TOKENS_MOST: settings.step_tokens_most,
            Measure.RETENTION_TOKENS: settings.retention,
        }
        known = {measure: value for measure, value in limits.items() if value is not None}
        if known:
            self._call(st.MeasuresReported, tuple(known), tuple(known.values()))

    def declare(self, medium: str, *, silent: bool = False) -> None:
        """Declare the pool of a medium below the device, where the connector inside keeps blocks. ``silent``: the
        content of the pool is unknown until an event names it."""
        self.calls.append(Call(self._stimulus(
            st.PoolDeclared, self._settings.dp_rank, 0, tier_of(medium), medium, None, self._settings.block_tokens,
            Authority.STREAM, silent,
        ), medium=medium))
        self.pools[medium] = -1

    def take(self, message: list[Any]) -> None:
        """Translate a message. A malformed message raises nothing and sets ``wants_all``."""
        if message[0] == "cost":
            self.cost = tuple(message[1:])
            return
        if not self.started and message[0] != "all":
            return
        self._at = message[1]
        try:
            _TAKERS[message[0]](self, *message[2:])
        except (KeyError, TypeError, ValueError, IndexError):
            self.wants_all = True

    def take_calls(self) -> list[Call]:
        """The calls since the last call of this method."""
        calls, self.calls = self.calls, []
        return calls

    def placed(self, call: Call) -> st.Stimulus:
        """The stimulus of a call, with the index of its pool; earlier calls must have their answers."""
        if isinstance(call.stimulus, (st.BlocksReported, st.PlacesAudited)):
            call.stimulus.pool = self.pools[call.medium]
        if isinstance(call.stimulus, st.CopyBegun):
            call.stimulus.source_pool = self.pools[call.medium]
            call.stimulus.target_pool = self.pools[call.target]
        return call.stimulus

    def answered(self, call: Call, result: Any) -> None:
        """Take the leader's result of a call."""
        if isinstance(result, PoolAnswer):
            self.pools[call.medium] = result.pool
        if isinstance(result, AuditAnswer) and result.differing:
            self.differing += result.differing
            now = call.stimulus.origin_ns or 0
            if self._repaired_ns is None or now - self._repaired_ns >= REPAIR_EVERY_NS:
                self._repaired_ns, self.wants_all = now, True

    # --- helpers ---

    def _stimulus(self, kind: Callable[..., st.Stimulus], *fields: Any) -> st.Stimulus:
        return kind(0, self._at, 0, None, *fields)

    def _call(self, kind: Callable[..., st.Stimulus], *fields: Any) -> None:
        self.calls.append(Call(self._stimulus(kind, *fields)))

    # --- one method for each message ---

    def _new(
        self, name: str, hashes: list[int], prompt: int, output: int, priority: int, session: str | None,
        sends: str | None = None, receives: str | None = None,
    ) -> None:
        self._requests[name] = _Request(prompt)
        self._call(
            st.RequestArrived, name, pack_hashes(hashes), prompt, output, priority, session, sends, receives
        )

    def _will(self, name: str, computed: int) -> None:
        self.calls.append(Call(self._stimulus(st.MatchRequested, name, computed), asks=name))

    def _lookup(self, name: str, computed: int, tokens: int | None, asynchronous: bool) -> None:
        request = self._requests[name]
        request.local = computed
        request.blocks, request.allocated = [], None
        tier = tier_of(self._settings.medium) if self._settings.medium else Tier.G1
        self._call(st.LookupObserved, name, computed, tokens, asynchronous, tier)

    def _alloc(
        self, name: str, ids: list[int], external: int, at_once: bool = False, passed_hashes: Iterable[int] = ()
    ) -> None:
        """Blocks of a request, which are reported with the next step, or at once if no other request can share them."""
        request = self._requests[name]
        request.passed_hashes = list(passed_hashes)
        if at_once:
            self._allocate(name, request, ids, external)
            return
        request.allocated = ids, external
        self._allocated.append(name)

    def _allocate(self, name: str, request: _Request, ids: list[int], external: int) -> None:
        request.allocated = None
        if not request.blocks:
            request.filled = max((request.local + external) // self._settings.block_tokens, self._passed(ids))
        request.blocks = list(ids)
        begun, size = self._loads.pop(name, None) if external else None, self._settings.block_tokens
        beyond = (request.local + external) // size > request.prompt // size
        passed = self._passed(ids)
        self._call(
            st.BlocksAllocated, name, pack_ids(ids[passed:]), external, begun is not None,
            self._tiers(request, external),
            begun.stimulus.hashes if beyond and begun is not None and isinstance(begun.stimulus, st.CopyBegun) else b"",
            passed, pack_hashes(request.passed_hashes),
        )
        request.found, request.passed_hashes = {}, []
        if begun is not None:
            self.calls.append(begun)

    def _passed(self, ids: list[int]) -> int:
        """The number of leading blocks that have no place, because the window of their request has passed them."""
        return leading_nulls(ids, self._settings.first_place)

    def _window(self, name: str, passed: int) -> None:
        """The engine has taken back the blocks that the window of a request has passed."""
        request = self._requests[name]
        if request.allocated is None and self._passed(request.blocks) < passed <= len(request.blocks):
            request.blocks = [NO_PLACE] * passed + request.blocks[passed:]
            request.filled = max(request.filled, passed)
            self._tell_blocks(name, request)

    def _tell_blocks(self, name: str, request: _Request) -> None:
        """Report the blocks of a running request as they are now."""
        passed = self._passed(request.blocks)
        self._call(st.BlocksAllocated, name, pack_ids(request.blocks[passed:]), 0, False, (), b"", passed)

    def _tiers(self, request: _Request, external: int) -> tuple[int, ...]:
        """External tokens from G2, G3 and G4; empty if the connector does not tell all of them."""
        if not external or sum(request.found.values()) != external:
            return ()
        tokens = [0, 0, 0]
        for source, count in request.found.items():
            medium = SOURCES.get(source, self._settings.medium)
            if source == "disk" and any(tier_of(known) is Tier.G3 for known in self.pools):
                medium = DISK
            tokens[tier_of(medium) - Tier.G2] += count
        return tuple(tokens)

    def _found(self, name: str, found: dict[str, int]) -> None:
        self._requests[name].found = found

    def _copy(
        self, number: int, request: str, source: str, target: str, hashes: list[int], blocks: int,
        size_bytes: int | None, asks: bool = False,
    ) -> None:
        """A copy of the connector. A load is reported with the allocation of its request."""
        self._untold.discard(number)
        if number in self._open or tier_of(source) is tier_of(target):
            return
        if not self._pool_of(source) or not self._pool_of(target):
            return
        self._open.add(number)
        begun = self._stimulus(
            st.CopyBegun, number, request, 0, 0, pack_hashes(hashes), blocks, size_bytes, asks
        )
        call = Call(
            begun, asks=request if asks else "", medium=self._key(source), target=self._key(target),
            copy=number if asks else None,
        )
        if self._key(target) == DEVICE and request:
            self._loads[request] = call
        else:
            self.calls.append(call)

    def _key(self, medium: str) -> str:
        return DEVICE if medium == MEDIUM_OF[Tier.G1] else medium

    def _pool_of(self, medium: str) -> bool:
        """True if the medium has a pool. The content of a medium that only copies name is unknown."""
        if self._key(medium) == DEVICE:
            return True
        if medium not in self.pools and len(self.pools) < POOLS_MAX and self._settings.caching:
            self.declare(medium, silent=True)
        return medium in self.pools

    def _copied(self, number: int, status: str, wire_ns: int | None = None, error: str = "") -> None:
        if number in self._open:
            self._open.discard(number)
            self._call(st.CopyEnded, number, STATUSES[status], wire_ns, error)

    def _slow(self, request: str, connector: str, method: str, took_ns: int) -> None:
        self._call(st.CallReported, request, connector, method, took_ns)

    def _measured(self, rows: list[Any], stats: dict[str, float]) -> None:
        columns = tuple(zip(*rows, strict=True)) or ((), (), (), (), ())
        self._call(st.ConnectorReported, *columns, tuple(stats), tuple(map(float, stats.values())))

    def _step(
        self, new: list[Any], resumed: list[Any], going: list[Any], preempted: list[str], skipped: list[str],
        unskipped: list[str], running: int, fills: list[Any], ended: Sequence[str] = (),
    ) -> None:
        filled = {key for row in fills for key in row[2]}
        if loaded := {place: key for place, key in self._named.items() if key not in filled}:
            self._report(DEVICE, loaded.values(), places=loaded)
        self._named.clear()
        progressed: dict[str, int] = {}
        starting = {row[0]: row for row in (*new, *resumed)}
        in_order = dict.fromkeys([*self._allocated, *starting])
        self._allocated.clear()
        # A reset preempts all requests. Those that get blocks again in this step have reported it by their lookups.
        preempted = [name for name in preempted if name not in in_order]
        fills = self._fill_known(fills)  # a request that starts may use blocks that get their hashes in this step
        reported = self._report_shared(in_order, starting, going)
        for name in in_order:
            fills = self._fill_known(fills)
            self._admit(name, starting.get(name))
        for name, _, computed, count, tokens in starting.values():
            request = self._requests[name]
            request.target = tokens or request.prompt
            progressed[name] = computed + count
            request.prefilling = True
        first: list[str] = []
        appended: dict[str, list[int]] = {}
        for name, ids, computed, count, _ in going:
            request = self._requests[name]
            if ids and name not in reported:
                appended[name] = ids
                request.blocks += ids
            progressed[name] = computed + count
            if request.prefilling and computed >= request.target:
                request.prefilling = False
                first.append(name)
        for name in preempted:
            lost = self._requests.get(name)
            if lost is not None and lost.blocks:  # else a reset has preempted it, and its next lookup may be known
                lost.blocks, lost.local, lost.prefilling = [], 0, False
        self._call(
            st.IterationScheduled, 0, 1, tuple(row[0] for row in new), tuple(row[0] for row in resumed),
            tuple(preempted), tuple(skipped), tuple(unskipped), tuple(first), tuple(progressed),
            tuple(progressed.values()), tuple(appended), tuple(map(len, appended.values())),
            pack_ids(place for ids in appended.values() for place in ids), running,
            max(0, len(self._requests) - running), tuple(ended),
        )
        self.calls += self._loads.values()  # of requests whose allocation was not reported
        self._loads.clear()
        for number in sorted(self._untold):
            self._copied(number, "cancelled")
        self._untold.clear()
        self._fill(fills)
        for name, places in self._taken:
            self._report(DEVICE, places=places, request=name)
        self._taken.clear()

    def _admit(self, name: str, row: list[Any] | None) -> None:
        """Report the blocks that a request got in this step; ``row`` is None when the request does not compute."""
        request = self._requests.get(name)
        if request is None:
            return
        ids, external = request.allocated or (request.blocks, 0)
        if not self._settings.medium:
            if row is None:
                return  # another connector loads blocks, and their number is known when the request computes
            external = max(0, row[2] - request.local)
        if row is not None and len(row[1]) >= len(ids):
            ids = row[1]
        if request.allocated is not None or ids != request.blocks:
            self._allocate(name, request, ids, external)

    def _report_shared(self, admitted: Iterable[str], starting: dict[str, Any], going: list[Any]) -> set[str]:
        """Report new blocks of running requests that a request admitted in the same step shares.

        Returns the names of these running requests, whose blocks must precede the admitted request's."""
        taken = {place for row in starting.values() for place in row[1]}
        for name in admitted:
            request = self._requests.get(name)
            if request is not None and request.allocated is not None:
                taken.update(request.allocated[0])
        taken.difference_update(range(self._settings.first_place))
        if not taken:
            return set()
        sharing: set[str] = set()
        for name, ids, *_ in going:
            if ids and not taken.isdisjoint(ids):
                request = self._requests[name]
                request.blocks += ids
                self._tell_blocks(name, request)
                sharing.add(name)
        return sharing

    def _fill_known(self, fills: list[Any]) -> list[Any]:
        """Report the fills whose places are known to be the request's blocks. Returns the other fills."""
        later: list[Any] = []
        known: list[Any] = []
        for row in fills:
            name, first, hashes, *places = row
            request = self._requests.get(name)
            fits = request is not None and places and request.blocks[first : first + len(hashes)] == places[0]
            (known if fits else later).append(row)
        self._fill(known)
        return later

    def _fill(self, fills: list[Any]) -> None:
        rows = [(name, self._requests[name].blocks[first : first + len(hashes)], hashes, more[1] if more[1:] else ())
                for name, first, hashes, *more in fills if name in self._requests]
        rows = [row for row in rows if row[2] and len(row[1]) == len(row[2])]
        for name, _, hashes, _ in rows:
            self._requests[name].filled += len(hashes)
        if rows:
            self._call(
                st.IterationFinished, 0, tuple(row[0] for row in rows), tuple(len(row[1]) for row in rows),
                pack_ids(place for row in rows for place in row[1]), pack_hashes(key for row in rows for key in row[2]),
                pack_ids(place for row in rows for place in row[3]),
            )

    def _copies(self, loaded: list[str], sent: list[str], failed: list[str], invalid: list[int]) -> None:
        self._delayed.difference_update(sent)
        self._call(st.CopiesObserved, tuple(loaded), tuple(sent), tuple(failed), pack_ids(invalid))

    def _finish(self, name: str, status: str, delayed: bool, named: int = 0) -> None:
        request = self._requests.pop(name)
        if delayed:
            self._delayed.add(name)
        self._call(
            st.RequestFinished, name, pack_ids(request.blocks[self._passed(request.blocks) : named]),
            REASONS.get(status, FinishReason.ERROR), delayed,
        )

    def _events(self, rows: list[Any]) -> None:
        for kind, hashes, medium, _ in rows:
            if kind == "AllBlocksCleared":
                self._clear()
            elif self._has(medium):
                if hashes and kind == "BlockStored":
                    self._report(medium, hashes)
                elif hashes and kind == "BlockRemoved":
                    self._report(medium, (), hashes)

    def _has(self, medium: str) -> bool:
        """True if this medium is below the device and has a pool; a new medium gets a pool while there is room."""
        if medium in ("", "GPU") or not self._settings.caching:
            return False
        if medium not in self.pools and len(self.pools) < POOLS_MAX:
            self.declare(medium)
        return medium in self.pools

    def _clear(self) -> None:
        for medium in self.pools:
            if medium and not medium.startswith(GROUP):
                self._report(medium, cleared=True)

    def _report(
        self, medium: str, stored: Iterable[int] = (), removed: Iterable[int] = (), *, cleared: bool = False,
        places: Iterable[int] = (), request: str = "",
    ) -> None:
        self.calls.append(Call(self._stimulus(
            st.BlocksReported, 0, pack_hashes(stored), pack_hashes(removed), cleared, pack_ids(places), request
        ), medium=medium))

    def _pool(
        self, request: str, taken: list[int], changes: list[Any], named: Iterable[int] = (),
        hashes: Iterable[int] = (),
    ) -> None:
        """Places were allocated. Their former content in the reported group is gone once the step is reported."""
        if taken:
            self._taken.append((request, taken))
            if request in self._requests and not self._requests[request].blocks:
                self._allocated.append(request)
            for place in taken:
                self._named.pop(place, None)
        self._named.update(zip(named, hashes, strict=True))
        for group, stored, removed in changes:
            self._report(f"{GROUP}{group}", stored, removed)

    def _publish(self, name: str, places: list[int], hashes: list[int]) -> None:
        """The engine added the next full blocks of a request to its cache, and the request uses the cache's places."""
        request = self._requests[name]
        request.blocks[request.filled : request.filled + len(places)] = places
        request.filled += len(places)
        self._report(DEVICE, hashes, places=places, request=name)

    def _evict(self, rows: list[Any]) -> None:
        """The engine's cache gave up these places, for the request of each row."""
        for name, places in rows:
            self._report(DEVICE, places=places, request=name)

    def _preempt(self, name: str) -> None:
        request = self._requests[name]
        if request.blocks:
            self._call(st.RequestPreempted, name)
            request.blocks, request.local, request.prefilling = [], 0, False

    def _cleared(self, preempted: list[str]) -> None:
        """The engine forgot its prefix cache; requests that ran until then were preempted for it."""
        for name in preempted:
            request = self._requests.get(name)
            if request is not None and request.blocks:
                self._call(st.RequestPreempted, name)
                request.blocks, request.local, request.prefilling = [], 0, False
        self._named.clear()
        for group in self._settings.others:
            self._report(f"{GROUP}{group}", cleared=True)
        self._report(DEVICE, cleared=True)
        if self._settings.uncertain:
            self._call(st.SourceGapped, 0, 0)

    def _sanitized(
        self, kind: str, stage: str, request: str, rank: int, group: int, key: int, place: int, below: int, copy: int,
        writer: str, edge: str, taken: str, _: str,
    ) -> None:
        self._call(
            st.MismatchReported, request, rank, group, pack_hashes((key,)), kind, stage, place, below, copy, writer,
            edge, taken,
        )

    def _audit(
        self, first: int, hashes: list[int], holders: list[int], free: int | None, cached: int | None,
        others: list[Any],
    ) -> None:
        """A part of the engine's pool as it was after the last step."""
        if self._settings.uncertain:
            return
        self.audited = (self.audited or 0) + len(hashes)
        self.calls.append(Call(self._stimulus(
            st.PlacesAudited, 0, first, pack_hashes(hashes), pack_ids(holders), free, cached
        ), medium=DEVICE))
        for group, held in others:
            if f"{GROUP}{group}" in self.pools:
                self.calls.append(Call(self._stimulus(
                    st.PlacesAudited, 0, 0, pack_hashes(held), b""
                ), medium=f"{GROUP}{group}"))

    def _reset(self) -> None:
        """Nothing: a connector whose cache is reset reports the removed blocks by its own events, if it has any."""

    def _all(
        self, rows: list[Any], steps: int, dropped: int, places: list[Any] | None = None,
        below: list[Any] | None = None,
    ) -> None:
        """The whole state of the engine. Known requests that it does not contain ended unseen."""
        settings = self._settings
        unseen = self.started or ((rows or steps) and (places is None or (settings.medium and below is None)))
        lost = max(0, dropped - self._dropped - 1)
        self._dropped = dropped
        self._taken.clear()
        self._named.clear()
        self.started, self.wants_all = True, False
        for name in self._allocated:
            if name in self._requests:
                self._requests[name].allocated = None  # the step was lost, and this message reports the present blocks
        self._allocated.clear()
        self._untold = set(self._open)
        if places is not None:
            own = {place for about, row in rows for place in row[0][min(len(about[1]), len(row[5])) :]}
            self._know_places(places[0], places[1], own)
        for medium, hashes in below or ():
            if self._has(medium):
                self._report(medium, hashes, cleared=True)
        live = {row[0][0] for row in rows}
        for name in [name for name in self._requests if name not in live]:
            self._finish(name, "FINISHED_ABORTED", False)
        if self._delayed:  # the report of their end may be lost
            self._copies([], sorted(self._delayed), [], [])
        running = 0
        at_work: dict[str, int] = {}
        for about, (blocks, computed, status, tokens, scheduled, hashes, *unkept) in rows:
            name = about[0]
            if name not in self._requests:
                self._new(*about)
            request = self._requests[name]
            running += bool(scheduled)
            if not blocks:
                if request.blocks:
                    self._call(st.RequestPreempted, name)
                    request.blocks, request.local, request.prefilling = [], 0, False
                continue
            if not request.blocks:
                request.local = min(len(about[1]), len(hashes)) * self._settings.block_tokens
                self._call(st.LookupObserved, name, request.local, 0, False, Tier.G1)
            if request.blocks != blocks:
                request.passed_hashes = hashes[len(about[1]) : self._passed(blocks)]
                self._allocate(name, request, blocks, 0)
            self._fill([[name, request.filled, hashes[request.filled :]]])
            if unkept:
                self._call(st.IterationFinished, 0, (), (), b"", b"", pack_ids(unkept[0]))
            if status == _RUNS or scheduled:
                request.target, request.prefilling = tokens, computed <= request.prompt
                at_work[name] = computed
        self._at_work(at_work, running, len(rows))
        if unseen or settings.uncertain or (places is None and settings.others):
            self._call(st.SourceGapped, 0, lost)

    def _know_places(self, cached: list[Any], others: list[Any], own: set[int]) -> None:
        """The whole prefix cache, as it is now, except the places in ``own``, which requests report themselves."""
        known = {place: key for place, key in zip(*cached, strict=True) if place not in own}
        if known:
            self._report(DEVICE, known.values(), cleared=True, places=known)
        stored = dict(others)
        for group in self._settings.others:
            self._report(f"{GROUP}{group}", stored.get(group, ()), cleared=True)

    def _at_work(self, computed: dict[str, int], running: int, live: int) -> None:
        """Two steps that give the positions of these requests: all prefill in the first, some produce in the second."""
        prompts = {name: min(at, self._requests[name].prompt) for name, at in computed.items()}
        begun = tuple(name for name, at in computed.items() if at > prompts[name])
        for new, first, positions in ((tuple(computed), (), prompts), ((), begun, computed)):
            if positions:
                self._call(
                    st.IterationScheduled, 0, 1, new, (), (), (), (), first, tuple(positions),
                    tuple(positions.values()), (), (), b"", running, max(0, live - running),
                )


_TAKERS: Final[dict[str, Callable[..., None]]] = {
    "new": Translator._new, "will": Translator._will, "lookup": Translator._lookup, "alloc": Translator._alloc,
    "step": Translator._step, "fill": Translator._fill, "copies": Translator._copies, "finish": Translator._finish,
    "events": Translator._events, "all": Translator._all, "reset": Translator._reset,
    "cleared": Translator._cleared, "pool": Translator._pool, "sanitized": Translator._sanitized,
    "publish": Translator._publish, "evict": Translator._evict, "preempt": Translator._preempt,
    "copy": Translator._copy, "copied": Translator._copied, "found": Translator._found, "slow": Translator._slow,
    "measured": Translator._measured, "window": Translator._window, "audit": Translator._audit,
}


class Watching:
    """A checked leader in this process that watches an engine, without a thread or a socket. ``now`` is its clock."""

    def __init__(self, settings: TapSettings, config: LeaderConfig | None = None) -> None:
        self.translator = Translator(settings)
        self.source = 1
        self.now = 0
        self.leader = Leader(config or LeaderConfig(), check=True)
        self.dispatcher = Dispatcher(self.leader, lambda: self.now)

    def begin(self) -> None:
        """Declare the engine's pools."""
        self.translator.begin()
        self._submit()

    def take(self, messages: list[Any]) -> None:
        """Submit messages, as the process beside the engine gets them."""
        for message in messages:
            self.translator.take(message)
        self._submit()

    def note(self, note: Note, detail: str) -> None:
        """Submit a note of the watching program."""
        self.dispatcher.submit(st.NoteReported, note, detail)

    def _submit(self) -> None:
        for call in self.translator.take_calls():
            stimulus = self.translator.placed(call)
            kind: Any = type(stimulus)
            fields = [getattr(stimulus, name) for name in kind.__struct_fields__[4:]]
            done = self.dispatcher.submit_from(self.source, stimulus.at_ns, kind, *fields)
            self.translator.answered(call, done.result)

