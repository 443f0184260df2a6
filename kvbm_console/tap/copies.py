"""The copies of a connector, the tiers that served a request, and the time in the connector's calls.

Theory of operation
-------------------
A connector orders its workers to copy by messages of its own, which differ from connector to connector. So a
``ConnectorWatch`` wraps methods on the connector's own object. The wrapped method runs first, and its result goes back
unchanged.

=======================  ==========================================================================================
call                     tells
=======================  ==========================================================================================
every public call        its time; a call above ``SLOW_NS`` is reported at once, because the engine stood still
build_connector_meta     copies that begin: ``store_jobs`` and ``load_jobs`` (OffloadingConnector), or
                         ``store_event`` and ``load_event`` (SimpleCPUOffloadConnector)
update_connector_output  copies that ended: ``completed_jobs``, ``completed_store_events``, ``finished_recving``
update_state_after_alloc the tiers that supplied the loaded tokens (``get_external_cache_hit_sources``)
reset_cache              open stores are given up
get_kv_connector_stats   the connector's own figures; those of its workers come with ``update_connector_output``
=======================  ==========================================================================================

The children of a MultiConnector are watched one by one. The tiers below the host tier of OffloadingConnector
(``TieringOffloadingManager``) have copies of their own, between the host tier and a lower tier.

A copy ends when each worker has reported it, as the connector's scheduler half counts it. Its bytes follow from its
blocks: the page of each layer in the block's group, on each worker. They are unknown if the release does not tell these
sizes.

Example: job 4 of request a stores device places 7 and 8. ``build_connector_meta`` returns the job in ``store_jobs``, so
``("copy", time, 1, "a", "GPU", "CPU", hashes, 2, 32768)`` is queued. Two workers report job 4 in two steps. The second
report queues ``("copied", time, 1, "completed")``.

Law of this file: a connector whose messages are not known has no copies here, and its calls are timed. Nothing raises
into the engine, and nothing of the connector is changed but its methods on this object.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from kvbm_console.tap.recorder import DISK, LOCAL, STORAGE, TapRecorder

SLOW_NS: Final = 100_000_000
"""A call above this is reported: it is longer than the steps of most models, and every request waits for it."""
OPEN_MAX: Final = 4_096
"""Open copies that are remembered; a connector has one or two for each running request."""
STATS_MAX: Final = 256
"""Figures of a connector's statistics that are kept."""
NAME_MAX: Final = 160
DEVICE: Final = "GPU"
BASE: Final = "KVConnectorBase_V1"
"""The name of the engine's base class; its public methods are the calls of the engine."""
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
_now = time.monotonic_ns


class Sizes:
    """Bytes of a block: by group of layers, and of a place in all tensors; None where the engine does not tell."""

    def __init__(self, groups: Iterable[int | None] = (), place: int | None = None, workers: int = 1) -> None:
        self.groups = list(groups)
        self.place = place
        self.workers = workers
        """Workers that each copy their part of every block."""

    def of_groups(self, counts: Iterable[int]) -> int | None:
        """Bytes of so many blocks of each group."""
        total = 0
        for group, count in enumerate(counts):
            each = self.groups[group] if group < len(self.groups) else None
            if each is None and count:
                return None
            total += (each or 0) * count
        return total * self.workers

    def of_places(self, count: int) -> int | None:
        """Bytes of so many places."""
        return None if self.place is None else self.place * count * self.workers


class OrderedCopy:
    """One open copy: the fields of its record, and the number of workers that did not report yet."""

    __slots__ = ("blocks", "keys", "number", "request", "size_bytes", "source", "target", "workers")

    def __init__(
        self, number: int, request: str, source: str, target: str, keys: list[Any], blocks: int,
        size_bytes: int | None, workers: int,
    ) -> None:
        self.number = number
        self.request = request
        self.source, self.target = source, target
        """Media; ``DEVICE`` for the device."""
        self.keys = keys
        """The engine's names of the blocks, as far as they are known."""
        self.blocks = blocks
        self.size_bytes = size_bytes
        self.workers = workers


class ConnectorWatch:
    """Observes the connectors of one engine. ``media`` maps the class of a connector to the medium of its blocks."""

    def __init__(self, recorder: TapRecorder, media: dict[str, str], sizes: Sizes | None = None) -> None:
        self._recorder = recorder
        self._media = media
        self._sizes = sizes or Sizes()
        self._root: Any = None
        self._finished: dict[int, str] = {}
        """Device places of ended requests, which a connector may store afterwards, to the last of these requests."""
        self._blocks: Any = None
        """The blocks of the device's pool, once the engine has told them."""
        self._numbers = 0
        self._slow_ns = 0
        """Time in calls that were reported as slow, so that the call around them is not reported for the same time."""
        self.holds_loads = False
        """True if a tap of ours stands around a lower tier, and can keep a load from beginning."""
        self.open: dict[tuple[int, str, Any], list[OrderedCopy]] = {}
        """(connector, kind, the connector's number) to the open copies of that order."""
        self.calls: dict[tuple[str, str], list[int]] = {}
        """(connector, method) to its calls, their time, and the longest time."""
        self.stats: dict[str, float] = {}
        self._gauged: dict[str, Any] = {}
        """Parts of ours with figures of their own, by the beginning of the figures' names: eviction policies of host
        tiers (``tap.vllm_policy``), and lower tiers or taps around them (``tap.vllm_slots``, ``tap.tiers``)."""

    def attach(self, connector: Any) -> None:
        """Observe this connector, and the connectors inside it."""
        self._root = connector
        self._wrap_all(connector, root=True)

    def _wrap_all(self, connector: Any, *, root: bool) -> None:
        inside = vars(connector).get("_tapped")
        if inside is not None:
            if not root and "sender" in vars(connector):
                return  # a tap that reports by itself
            connector = inside
            self._root = connector if root else self._root
        after: dict[str, Callable[..., None]] = {
            "build_connector_meta": self._ordered, "update_connector_output": self._reported,
            "reset_cache": self._reset, "bind_kv_cache_manager": self._bound, "bind_gpu_block_pool": self._bound_pool,
        }
        if root:
            after |= {"update_state_after_alloc": self._allocated, "get_kv_connector_stats": self._own_stats}
        for name in _calls_of(type(connector)):
            self._wrap(connector, name, after.get(name))
        for child in getattr(connector, "_connectors", None) or ():
            self._wrap_all(child, root=False)
        manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
        for tier in (manager, getattr(manager, "primary_tier", None)):
            policy = getattr(tier, "_policy", None)
            if hasattr(policy, "gauges"):
                self._gauged["eviction "] = policy
        if manager is not None and hasattr(manager, "_register_job") and hasattr(manager, "secondary_tiers"):
            self._watch_tiers(manager, connector.connector_scheduler.config.blocks_per_chunk)

    def _wrap(self, connector: Any, name: str, after: Callable[..., None] | None) -> None:
        inside = getattr(connector, name)
        row = self.calls.setdefault((type(connector).__name__, name), [0, 0, 0])
        recorder = self._recorder

        @functools.wraps(inside)
        def outside(*args: Any, **kwargs: Any) -> Any:
            slow_ns, began = self._slow_ns, _now()
            try:
                result = inside(*args, **kwargs)
            finally:
                ended = _now()
                row[0] += 1
                row[1] += ended - began
                row[2] = max(row[2], ended - began)
                if ended - began - (self._slow_ns - slow_ns) >= SLOW_NS:
                    self._slow(connector, name, args, ended, ended - began)
            if after is not None:
                try:
                    after(connector, result, *args, **kwargs)
                except Exception:
                    recorder.failed()
                recorder.spent(_now() - ended)
            return result

        try:
            setattr(connector, name, outside)
        except AttributeError:
            del self.calls[type(connector).__name__, name]  # an object without a dictionary keeps its methods

    def _slow(self, connector: Any, name: str, args: tuple[Any, ...], now: int, took_ns: int) -> None:
        self._slow_ns += took_ns
        request = getattr(args[0], "request_id", "") if args else ""
        if self._recorder.on:
            self._recorder.put(("slow", now, str(request), type(connector).__name__, name, took_ns))

    # --- the device's blocks, the tiers that served a request ---

    def bind(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager, whose pool has the hashes of the device's places."""
        self._blocks = getattr(getattr(kv_cache_manager, "block_pool", None), "blocks", self._blocks)

    def _bound(self, connector: Any, result: Any, kv_cache_manager: Any) -> None:
        self.bind(kv_cache_manager)

    def _bound_pool(self, connector: Any, result: Any, gpu_block_pool: Any) -> None:
        self._blocks = getattr(gpu_block_pool, "blocks", self._blocks)

    def _allocated(
        self, connector: Any, result: Any, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        ask = getattr(connector, "get_external_cache_hit_sources", None)
        if num_external_tokens and ask is not None and self._recorder.on:
            found = ask(request, num_external_tokens)
            row = {str(getattr(source, "value", source)): int(tokens) for source, tokens in found.items()}
            self._recorder.put(("found", _now(), request.request_id, row))

    def _ended(self, connector: Any, result: Any, request: Any, block_ids: Any) -> None:
        for group in block_ids:
            self._finished.update(dict.fromkeys(map(int, group), request.request_id))

    # --- copies that begin ---

    def _ordered(self, connector: Any, metadata: Any, scheduler_output: Any = None) -> None:
        medium = self._medium(connector)
        if hasattr(metadata, "store_jobs"):
            for job, order in (metadata.load_jobs or {}).items():
                self._begin_job(connector, "load", job, order, _side(order, 1), medium)
            for job, order in (metadata.store_jobs or {}).items():
                self._begin_job(connector, "store", job, order, _side(order, 0), medium)
        elif hasattr(metadata, "store_event"):
            manager = connector.scheduler_manager
            if metadata.load_event >= 0:
                shares = _loads_of(manager, metadata)
                self._begin_event(connector, "load", metadata.load_event, shares, medium)
            if metadata.store_event >= 0:
                shares = _stores_of(manager, metadata, self._finished)
                self._begin_event(connector, "store", metadata.store_event, shares, medium)

    def _medium(self, connector: Any) -> str:
        manager = getattr(connector, "scheduler_manager", None)
        told = getattr(manager, "kv_event_medium", None)
        return str(told or self._media.get(type(connector).__name__) or "EXTERNAL")

    def _begin_job(self, connector: Any, kind: str, job: Any, order: Any, device: Any, medium: str) -> None:
        places = [int(place) for place in device.block_ids]
        counts = getattr(device, "group_sizes", None) or [len(places)]
        keys = [] if kind == "load" else self._keys_of(places)
        self._begin((id(connector), kind, job), [self._copy(
            order.req_id, kind, medium, keys, len(places), self._sizes.of_groups(counts), self._sizes.workers
        )])

    def _begin_event(
        self, connector: Any, kind: str, event: int, shares: list[tuple[str, list[int]]], medium: str
    ) -> None:
        self._begin((id(connector), kind, event), [
            self._copy(
                request, kind, medium, [] if kind == "load" else self._keys_of(places), len(places),
                self._sizes.of_places(len(places)), self._sizes.workers,
            )
            for request, places in shares if places
        ])

    def _copy(
        self, request: str, kind: str, medium: str, keys: list[Any], blocks: int, size_bytes: int | None, workers: int
    ) -> OrderedCopy:
        self._numbers += 1
        source, target = (medium, DEVICE) if kind == "load" else (DEVICE, medium)
        return OrderedCopy(self._numbers, request, source, target, keys, blocks, size_bytes, workers)

    def _keys_of(self, places: list[int]) -> list[Any]:
        blocks = self._blocks
        if blocks is None:
            return []
        return [blocks[place].block_hash for place in places if blocks[place].block_hash is not None]

    def _begin(self, order: tuple[int, str, Any], copies: list[OrderedCopy], *, asks: bool = False) -> None:
        if len(self.open) < OPEN_MAX and copies:
            self.open[order] = copies
            if self._recorder.on:
                for copy in copies:
                    self._tell(copy, asks=asks)

    def _tell(self, copy: OrderedCopy, *, asks: bool = False) -> None:
        self._recorder.put((
            "copy", _now(), copy.number, copy.request, copy.source, copy.target, copy.keys, copy.blocks,
            copy.size_bytes, asks,
        ))

    def tell_open(self) -> None:
        """Report the open copies again, behind a report of the whole engine."""
        for copies in list(self.open.values()):
            for copy in copies:
                self._tell(copy)

    # --- copies that end ---

    def _reported(self, connector: Any, result: Any, connector_output: Any) -> None:
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        for kind, done in (("load", "completed_jobs"), ("store", "completed_jobs"),
                           ("store", "completed_store_events")):
            for number, count in (getattr(meta, done, None) or {}).items():
                self._count(connector, kind, number, count)
        loaded = getattr(connector_output, "finished_recving", None)
        if loaded and hasattr(connector, "scheduler_manager"):
            self._end_loads(connector, set(loaded))
        stats = getattr(connector_output, "kv_connector_stats", None)
        if stats is not None and connector is self._root:
            self._add_stats(stats)

    def _count(self, connector: Any, kind: str, number: Any, count: int) -> None:
        order = id(connector), kind, number
        copies = self.open.get(order)
        if copies is None:
            return
        for copy in copies:
            copy.workers -= count
        if copies[0].workers <= 0:
            self._end(order, COMPLETED)

    def _end_loads(self, connector: Any, requests: set[str]) -> None:
        """Loads of these requests arrived; one order may hold the loads of several requests."""
        for order, copies in list(self.open.items()):
            if order[:2] != (id(connector), "load"):
                continue
            left = [copy for copy in copies if copy.request not in requests]
            self.open[order] = [copy for copy in copies if copy.request in requests]
            self._end(order, COMPLETED)
            if left:
                self.open[order] = left

    def _end(self, order: tuple[int, str, Any], status: str, wire_ns: int | None = None, error: str = "") -> None:
        for copy in self.open.pop(order, ()):
            if self._recorder.on:
                self._recorder.put(("copied", _now(), copy.number, status, wire_ns, error))

    def _reset(self, connector: Any, result: Any) -> None:
        """The content of a connector is gone: copies into it are given up, and loads were ended by the engine."""
        for order in [order for order in self.open if order[0] == id(connector)]:
            self._end(order, CANCELLED)

    # --- copies between the tiers of OffloadingConnector ---

    def _watch_tiers(self, manager: Any, per_chunk: int) -> None:
        register, metrics = manager._register_job, manager._metrics
        ended = metrics.on_job_finished
        recorder = self._recorder

        def registered(transfer_job: Any, tier_idx: int, *args: Any, **kwargs: Any) -> Any:
            result = register(transfer_job, tier_idx, *args, **kwargs)
            try:
                self._begin_tier_job(manager, transfer_job, tier_idx, per_chunk)
            except Exception:
                recorder.failed()
            return result

        def finished(job: Any, outcome: Any, *args: Any, **kwargs: Any) -> Any:
            result = ended(job, outcome, *args, **kwargs)
            try:
                self._end_tier_job(manager, job.transfer_job, outcome)
            except Exception:
                recorder.failed()
            return result

        manager._register_job, metrics.on_job_finished = registered, finished
        for index, tier in enumerate(manager.secondary_tiers):
            if hasattr(type(tier), "watched_by"):  # a tap or a tier of ours (``tap.tiers``, ``tap.vllm_slots``)
                tier.watched_by(recorder)
                self.holds_loads = self.holds_loads or hasattr(type(tier), "will_ask")
                self._gauged[f"tier {index + 1}:{tier.tier_type} "] = tier

    def _begin_tier_job(self, manager: Any, job: Any, index: int, per_chunk: int) -> None:
        tier = manager.secondary_tiers[index]
        above = str(getattr(manager.primary_tier.medium, "value", "CPU"))
        below = medium_of(manager.secondary_tiers, index)
        size = getattr(tier, "block_size_bytes", None)
        keys = list(job.keys)
        source, target = (below, above) if job.is_promotion else (above, below)
        self._numbers += 1
        request = str(job.req_context.req_id)
        asks = job.is_promotion and hasattr(type(tier), "will_ask") and self._recorder.may_hold(request)
        if asks:
            tier.will_ask(job.job_id, self._numbers)
        self._begin((id(manager), "tier", job.job_id), [OrderedCopy(
            self._numbers, request, source, target, keys, len(keys) * per_chunk, size * len(keys) if size else None, 1,
        )], asks=asks)

    def _end_tier_job(self, manager: Any, job: Any, outcome: Any) -> None:
        took_s, error = getattr(outcome, "transfer_time", None), ""
        if not outcome.success:
            whole, arrived = len(job.keys), len(getattr(outcome, "successful_keys", None) or ())
            lost = f"{whole - arrived} of {whole} chunks did not arrive"
            error = lost if job.is_promotion else "the tier did not store it"
        self._end(
            (id(manager), "tier", job.job_id), COMPLETED if outcome.success else FAILED,
            None if took_s is None else max(0, int(took_s * 1e9)), error,
        )

    # --- the connector's own figures ---

    def _own_stats(self, connector: Any, stats: Any) -> None:
        if stats is not None:
            self._add_stats(stats)

    def _add_stats(self, stats: Any, prefix: str = "") -> None:
        """Add the figures of an interval: counts are summed, and other figures replace those before."""
        data = getattr(stats, "data", None)
        if not isinstance(data, dict):
            return
        types, values = data.get("types"), data.get("data")
        if isinstance(types, dict) and isinstance(values, dict):
            for name, by_label in values.items():
                for label, value in by_label.items():
                    self._add_figure(prefix + _named(name, label), types.get(name), value)
            return
        for child, inner in data.items():
            if hasattr(inner, "data"):
                self._add_stats(inner, f"{prefix}{child} ")
        if data and not any(hasattr(inner, "data") for inner in data.values()) and not stats.is_empty():
            for name, value in stats.reduce().items():
                if isinstance(value, (int, float)):
                    self._keep(prefix + str(name), float(value))

    def _add_figure(self, name: str, kind: Any, value: Any) -> None:
        if kind == "histogram":
            self._keep(f"{name}_count", self.stats.get(f"{name}_count", 0.0) + len(value))
            self._keep(f"{name}_sum", self.stats.get(f"{name}_sum", 0.0) + sum(value))
        elif kind == "counter":
            self._keep(name, self.stats.get(name, 0.0) + value)
        else:
            self._keep(name, float(value))

    def _keep(self, name: str, value: float) -> None:
        if name in self.stats or len(self.stats) < STATS_MAX:
            self.stats[name[:NAME_MAX]] = value

    def measured(self) -> list[Any]:
        """The message of the calls and figures so far."""
        for prefix, part in self._gauged.items():
            for name, value in part.gauges().items():
                self._keep(prefix + name, float(value))
        rows = [[connector, method, *row] for (connector, method), row in self.calls.items() if row[0]]
        return ["measured", _now(), rows, dict(self.stats)]


def medium_of(tiers: Sequence[Any], index: int) -> str:
    """The medium of a tier below the host tier: storage of this machine is a disk. Tiers of one medium have numbers."""
    media = []
    for tier in tiers:
        medium = str(getattr(tier.medium, "value", "EXTERNAL"))
        local = str(getattr(getattr(tier, "locality", None), "value", "")) == LOCAL
        media.append(DISK if local and medium == STORAGE else medium)
    again = media.count(media[index]) > 1
    return f"{media[index]} {index + 1}:{tiers[index].tier_type}" if again else media[index]


def _named(name: str, label: Any) -> str:
    return f"{name}{{{','.join(map(str, label))}}}" if label else str(name)


def _calls_of(kind: type) -> Iterator[str]:
    """The public methods that the engine's base class declares, and that belong to an object."""
    base = next((base for base in kind.__mro__ if base.__name__ == BASE), None)
    for name in () if base is None else dir(base):
        if name.startswith("_"):
            continue
        raw = next((owner.__dict__[name] for owner in kind.__mro__ if name in owner.__dict__), None)
        if callable(raw) and not isinstance(raw, (classmethod, staticmethod, type)):
            yield name


def _side(order: Any, at: int) -> Any:
    """The source (0) or the target (1) of a job of OffloadingConnector."""
    pair = getattr(order, "transfer_spec", None)
    return getattr(order, ("src_spec", "dst_spec")[at]) if pair is None else pair[at]


def _loads_of(manager: Any, metadata: Any) -> list[tuple[str, list[int]]]:
    """(request, device places) of the loads of an order of SimpleCPUOffloadConnector."""
    requests = metadata.load_event_to_reqs.get(metadata.load_event, [])
    states = {name: manager._reqs_to_load[name] for name in requests if name in manager._reqs_to_load}
    if len(states) < len(requests):
        return [(requests[0] if len(requests) == 1 else "", list(metadata.load_gpu_blocks))]
    return [(name, list(state.transfer_meta.gpu_block_ids)) for name, state in states.items()]


def _stores_of(manager: Any, metadata: Any, finished: dict[int, str]) -> list[tuple[str, list[int]]]:
    """(request, device places) of the stores of an order; places of no known request have an empty name."""
    owner: dict[int, str] = {}
    for name in manager._store_event_to_reqs.get(metadata.store_event, ()):
        state = manager._reqs_to_store.get(name)
        for group in () if state is None else state.block_ids:
            for place in group:
                owner.setdefault(place, name)
    shares: dict[str, list[int]] = {}
    for place in metadata.store_gpu_blocks:
        shares.setdefault(owner.get(place) or finished.get(place, ""), []).append(place)
    return list(shares.items())
