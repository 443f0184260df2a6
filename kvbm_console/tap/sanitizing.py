"""``sanitize`` around a connector: the scheduler's half names blocks, the worker's half fingerprints them.

A worker knows places and slots, and no content hash. So the scheduler's half attaches ``Orders`` to the metadata that
the connector sends to its workers. A worker's findings come back beside the connector's own worker metadata, so the
engine carries both through every executor and rank.

The engine's binding gives the connector's ``register_kv_caches`` a worker that is a ``CheckedWorker``.

Law of this file: the connector inside gets its own metadata unchanged. An error of ours is counted and swallowed. Only
``action: stop`` raises into the engine.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.tap.flatten import group_and_hash, hash_of

if TYPE_CHECKING:
    from kvbm_console.sanitize.checker import Checker
    from kvbm_console.sanitize.ledger import Orders

ACTIONS: Final = ("report", "recompute", "stop")
ATTACHED: Final = "kvbm_orders"
"""The attribute of the connector's metadata that carries ours."""
WATCHED_MAX: Final = 4_096
"""Source places of stores that are remembered, to name the request that got them next."""
KNOWN_MAX: Final = 32_768
"""Stores that are remembered: half the size of a worker's ledger, so a worker never forgets first."""
WAITING_MAX: Final = 256
"""Findings that wait until a daemon listens."""
TELL_EVERY_NS: Final = 1_000_000_000
"""Interval at which a worker tells its counters while nothing is wrong."""
ERRORS_MAX: Final = 100
_log = logging.getLogger("kvbm_console.sanitize")


@dataclass(frozen=True)
class Options:
    """``"sanitize": {"sample": 0.01, "action": "report"}`` of the connector's configuration."""

    sample: float = 0.01
    """The share of content hashes that are checked."""
    action: str = "report"


def options_of(extra: dict[str, Any]) -> Options | None:
    """The settings in the configuration, None without any. Raises ``ValueError`` with one sentence."""
    settings = extra.get("sanitize")
    if settings is None:
        return None
    if not isinstance(settings, dict) or not settings.keys() <= {"sample", "action"}:
        raise ValueError(f'"sanitize" takes an object with "sample" and "action", and not {settings!r}.')
    sample, action = settings.get("sample", 0.01), settings.get("action", "report")
    if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not 0 < sample <= 1:
        raise ValueError(f'"sample" of "sanitize" must be above 0 and at most 1, and not {sample!r}.')
    if action not in ACTIONS:
        raise ValueError(f'"action" of "sanitize" must be report, recompute or stop, and not {action!r}.')
    return Options(float(sample), action)


def pairs_of(places: Any, chunks: Any, sizes: Any, firsts: Any, per_chunk: int) -> list[tuple[int, int, int]]:
    """(device place, host slot, group) of each block of a copy. A slot is a page of a chunk of ``per_chunk`` pages.

    The first block of a group may begin inside its chunk.

    >>> pairs_of([7, 8, 9, 4], [20, 21, 5], [3, 1], [1, 0], 2)
    [(7, 41, 0), (8, 42, 0), (9, 43, 0), (4, 10, 1)]
    """
    pairs = []
    places, chunks = [int(place) for place in places], [int(chunk) for chunk in chunks]
    at = chunk = 0
    for group, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        if not size:
            continue
        skipped = first % per_chunk
        for index in range(size):
            row, page = divmod(index + skipped, per_chunk)
            pairs.append((places[at + index], chunks[chunk + row] * per_chunk + page, group))
        at += size
        chunk += -(-(size + skipped) // per_chunk)
    return pairs


# --- the scheduler's half ---


class Marker:
    """Names the sampled blocks of each copy that a connector orders."""

    def __init__(self, sample: float, sizes: list[int], hash_tokens: int, groups: list[int]) -> None:
        """``sizes`` are the tokens in a block of each of the engine's groups, and ``hash_tokens`` are the tokens of a
        hash. ``groups`` are the engine's numbers of the connector's groups."""
        from kvbm_console.sanitize.checker import sampled
        from kvbm_console.sanitize.ledger import Orders

        self._sampled: Callable[[int, float], bool] = sampled
        self._orders = Orders
        self._sample = sample
        self._sizes = sizes
        self._strides = [sizes[group] // hash_tokens for group in groups]
        self._groups = groups
        self._steps = 0
        self._known: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._watched: OrderedDict[int, None] = OrderedDict()
        self.waiting: deque[list[Any]] = deque(maxlen=WAITING_MAX)
        """Findings that no daemon has received."""
        self.counts: dict[int, tuple[int, int, int, int]] = {}
        """Rank to the blocks that it checked, its mismatches, blocks without a known store, and nanoseconds spent."""

    def mark(self, live: dict[str, Any], blocks: Any, output: Any, metadata: Any) -> None:
        """Attach the orders of a step to the metadata of the connector. ``blocks`` are those of the engine's pool."""
        self._steps += 1
        given = list(self._reallocated(output, metadata)) if self._watched else []
        orders = self._orders(self._steps, given=given, flush=[int(job) for job in metadata.jobs_to_flush or ()])
        for number, job in metadata.load_jobs.items():
            request = live.get(job.req_id)
            if request is not None:
                self._mark_load(orders, number, request.block_hashes, job.dst_spec)
        for number, job in metadata.store_jobs.items():
            self._mark_store(orders, number, blocks, job.src_spec)
        setattr(metadata, ATTACHED, orders)

    def _mark_load(self, orders: "Orders", number: int, hashes: Any, spec: Any) -> None:
        rows = []
        at = 0
        for group, (size, first) in enumerate(zip(spec.group_sizes, spec.block_indices, strict=True)):
            stride = self._strides[group]
            for index in range(size):
                last = (first + index + 1) * stride - 1
                key = hash_of(hashes[last]) if last < len(hashes) else None
                if key is not None and self._sampled(key, self._sample):
                    rows.append((at + index, key))
                    if (key, group) in self._known:
                        orders.known[key, group] = self._known[key, group]
            at += size
        if rows:
            orders.blocks[number] = rows

    def _mark_store(self, orders: "Orders", number: int, blocks: Any, spec: Any) -> None:
        rows = []
        for at, place in enumerate(spec.block_ids.tolist()):
            named = blocks[place].block_hash
            if named is None:
                continue
            engine_group, key = group_and_hash(named)
            if engine_group in self._groups and self._sampled(key, self._sample):
                rows.append((at, key))
                _remember(self._known, (key, self._groups.index(engine_group)), number, KNOWN_MAX)
                _remember(self._watched, place, None, WATCHED_MAX)
        if rows:
            orders.blocks[number] = rows

    def _reallocated(self, output: Any, metadata: Any) -> Iterator[tuple[int, str]]:
        """Watched places that requests got in this step, except the places of a prefix that was hit."""
        places: list[tuple[Any, str]] = []
        for request in output.scheduled_new_reqs:
            for group, size in zip(request.block_ids, self._sizes, strict=False):
                places.append((group[request.num_computed_tokens // size :], request.req_id))
        cached = output.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            places += ((group, name) for group in groups or ())
        places += ((job.dst_spec.block_ids.tolist(), job.req_id) for job in metadata.load_jobs.values())
        for group, name in places:
            for place in group:
                if place in self._watched:
                    yield place, name

    def forget(self) -> None:
        """The connector's cache was reset."""
        self._known.clear()

    def heard(self, meta: "WorkerMeta") -> None:
        """Take findings and counters of workers."""
        self.counts.update(meta.counts)
        for row in meta.findings:
            self.waiting.append(row)
            _log.error("%s", row[-1])

    @property
    def totals(self) -> tuple[int, ...]:
        """The counters of all ranks together."""
        return tuple(sum(column) for column in zip(*self.counts.values(), strict=True)) or (0, 0, 0, 0)


def _remember(table: "OrderedDict[Any, Any]", key: Any, value: Any, most: int) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


class WorkerMeta:
    """A connector's worker metadata with findings and counters beside it."""

    def __init__(self, inner: Any, findings: list[list[Any]], counts: dict[int, tuple[int, int, int, int]]) -> None:
        self.inner = inner
        self.findings = findings
        self.counts = counts

    def aggregate(self, other: Any) -> "WorkerMeta":
        """The metadata of two ranks together."""
        theirs = other if isinstance(other, WorkerMeta) else WorkerMeta(other, [], {})
        both = self.inner is not None and theirs.inner is not None
        inner = self.inner.aggregate(theirs.inner) if both else self.inner or theirs.inner
        return WorkerMeta(inner, self.findings + theirs.findings, {**self.counts, **theirs.counts})


# --- the worker's half ---


class CheckedWorker:
    """The engine's worker of a connector, which reports its copies to the checker."""

    def __init__(self, inner: Any, sanitizer: "Sanitizer") -> None:
        self._inner = inner
        self._sanitizer = sanitizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> Any:
        self._sanitizer.guard("submit_store", job_id, self._sanitizer.pairs(src_spec, dst_spec))
        return self._inner.submit_store(job_id, src_spec, dst_spec, *args, **kwargs)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> Any:
        self._sanitizer.guard("submit_load", job_id, self._sanitizer.pairs(dst_spec, src_spec))
        return self._inner.submit_load(job_id, src_spec, dst_spec, *args, **kwargs)

    def get_finished(self) -> Any:
        results = self._inner.get_finished()
        for result in results:
            self._sanitizer.ended(result.job_id)
        return results


class Sanitizer:
    """One worker process. The binding calls ``attach`` when the engine's worker and its tensors are known."""

    def __init__(self, action: str, *, stores_here: bool = True) -> None:
        self.action = action
        self.stores_here = stores_here
        self.checker: Checker | None = None
        self.per_chunk = 1
        self.errors = 0
        self._seen: Any = None
        """The metadata of this step."""
        self._requests: dict[int, str] = {}
        self._sent_ns = 0
        self._sent: tuple[int, int, int, int] | None = None

    def attach(self, inner: Any, device: Any, host: Any, *, rank: int, per_chunk: int) -> CheckedWorker:
        """The engine's worker with a checker around it. ``device`` and ``host`` are sides of pages."""
        from kvbm_console.sanitize.checker import Checker

        self.per_chunk = per_chunk
        self.checker = Checker(device, host, rank=rank, action=self.action, stores_here=self.stores_here)
        return CheckedWorker(inner, self)

    def pairs(self, on_device: Any, on_host: Any) -> list[tuple[int, int, int]]:
        """The blocks of a copy, from both sides of its order."""
        return pairs_of(on_device.block_ids, on_host.block_ids, on_device.group_sizes, on_device.block_indices,
                        self.per_chunk)

    def guard(self, call: str, *args: Any) -> None:
        """Call the checker. Its own errors are counted and swallowed; ``Corrupt`` is raised to stop the engine."""
        if self.checker is None or self.errors >= ERRORS_MAX:
            return
        if call in ("submit_store", "submit_load", "order"):
            number, pairs = args
            args = number, self._requests.get(number, ""), pairs
        self._try(getattr(self.checker, call), *args)

    def _try(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from kvbm_console.sanitize.checker import Corrupt

        try:
            return call(*args, **kwargs)
        except Corrupt:
            raise
        except Exception:
            self.errors += 1
            if self.errors == 1:
                _log.warning("sanitize met an error of its own and goes on", exc_info=True)
            return None

    def begin(self, metadata: Any) -> None:
        """A step with this metadata begins; the engine may report a step twice."""
        if metadata is self._seen or self.checker is None:
            return
        from kvbm_console.sanitize.ledger import Orders

        self._seen = metadata
        for jobs in (getattr(metadata, "load_jobs", {}), getattr(metadata, "store_jobs", {})):
            for number, job in jobs.items():
                self._requests[number] = job.req_id
        self.guard("begin", getattr(metadata, ATTACHED, None) or Orders())

    def ordered(self, metadata: Any) -> None:
        """The forward pass is queued; the pages that this step's stores read are fingerprinted after it."""
        if not self.stores_here:
            return
        for number, job in getattr(metadata, "store_jobs", {}).items():
            self.guard("order", number, self.pairs(job.src_spec, job.dst_spec))

    def handed(self, metadata: Any) -> None:
        """Requests read from now on the loads that this step waited for."""
        for number, job in getattr(metadata, "load_jobs", {}).items():
            if getattr(job, "sync", False):
                self.guard("hand", number)

    def ended(self, number: int) -> None:
        """The engine's worker reports the end of a copy."""
        self.guard("end", number)
        self._requests.pop(number, None)

    def finish(self) -> None:
        """The engine ends."""
        if self.checker is not None:
            self.guard("finish")

    def invalid(self) -> set[int]:
        """Device places that must be recomputed."""
        return set() if self.checker is None else self.checker.take_invalid()

    def tell(self, inner: Any) -> Any:
        """The connector's worker metadata with ours, None when both are empty."""
        checker = self.checker
        if checker is None:
            return inner
        counts = checker.checked, checker.mismatches, checker.unknown, checker.spent_ns
        now = time.monotonic_ns()
        fresh = counts[:3] != (self._sent or ())[:3] and now - self._sent_ns >= TELL_EVERY_NS
        findings = [list(astuple(finding)) for finding in checker.findings]
        if inner is None and not findings and not fresh:
            return None
        checker.findings.clear()
        self._sent, self._sent_ns = counts, now
        return WorkerMeta(inner, findings, {checker.ledger.rank: counts})


# --- the calls of a worker, for ``connector.TAPPED`` ---


def _before(call: Callable[[Sanitizer, Any], None], attribute: str) -> Callable[..., Any]:
    def tapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sanitizer is not None:
            self._sanitizer._try(call, self._sanitizer, args[0] if args else self._sanitizer._seen)
        return getattr(self._tapped, attribute)(*args, **kwargs)

    return tapped


def start_load_kv(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Loads begin; the loads that this step reads have ended when the call returns."""
    answer = self._tapped.start_load_kv(*args, **kwargs)
    sanitizer = self._sanitizer
    if sanitizer is not None:
        sanitizer._try(sanitizer.handed, sanitizer._seen)
    return answer


def get_block_ids_with_load_errors(self: Any) -> Any:
    """Blocks whose load failed, and blocks that were loaded with wrong bytes."""
    answer = self._tapped.get_block_ids_with_load_errors()
    if self._sanitizer is None:
        return answer
    invalid = self._sanitizer.invalid()
    return answer | invalid if invalid else answer


def build_connector_worker_meta(self: Any) -> Any:
    """The message to the scheduler's half."""
    answer = self._tapped.build_connector_worker_meta()
    return answer if self._sanitizer is None else self._sanitizer.tell(answer)


WORKER_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "bind_connector_metadata": _before(Sanitizer.begin, "bind_connector_metadata"),
    "handle_preemptions": _before(Sanitizer.begin, "handle_preemptions"),
    "start_load_kv": start_load_kv,
    "wait_for_save": _before(Sanitizer.ordered, "wait_for_save"),
    "get_block_ids_with_load_errors": get_block_ids_with_load_errors,
    "build_connector_worker_meta": build_connector_worker_meta,
}
"""The recorded calls of a worker, by name."""
NEEDED: Final = ("handle_preemptions", "build_connector_worker_meta", "get_block_ids_with_load_errors")
"""Calls that an engine's base class must have, so that ``sanitize`` works in this release."""


def missing_calls(base: type) -> Iterable[str]:
    """Names of the calls that a release lacks."""
    return [name for name in NEEDED if not hasattr(base, name)]
