"""The tap in SGLang: a plugin that observes one scheduler, its tree of prefixes and its allocator.

SGLang loads the plugin in its scheduler's process (``sglang.srt.plugins``). The plugin does nothing unless ``KVBM_TAP``
is set, to a daemon's address or to a JSON object of settings (``tap.SETTINGS``).

The methods of the objects are replaced one by one on the instances, so no class of SGLang changes. A record keeps
references to the engine's tensors. The sender's thread reads them, because reading a tensor waits for the device.

Law of this file: it imports nothing of SGLang before SGLang has loaded it, and results and errors of SGLang's own
methods are unchanged. A held request stays in the waiting queue, and the scheduler passes over it.
"""

import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from kvbm_console.tap import VARIABLE, settings_of
from kvbm_console.tap.recorder import DISK, LIVE_MAX, QUEUE_MAX, STORAGE, TapRecorder
from kvbm_console.tap.sender import Sender, TapSettings
from kvbm_console.tap.sglang_flatten import DUMMY_PAGES, HOST_MEDIUM, PEER_MEDIUM, SglangFlattener

STORES: Final = {
    "controller": ("write_storage", "_page_backup", "allocate_storage_hit"),
    "tree": ("_handle_prefetch_result", "_retire_ongoing_prefetch", "_drain_storage_control_queues_impl"),
}
"""Methods that copy between HiCache's host tier and its storage."""
LOCAL_STORES: Final = ("file", "mmap", "shm")
"""SGLang's storage backends that keep pages on this machine."""
SCHEDULER: Final = "sglang.srt.managers.scheduler"
NEEDED: Final = {
    "scheduler": ("_add_request_to_queue", "get_new_batch_prefill", "get_next_batch_to_run"),
    "table": ("alloc", "free"),
    "tree": ("match_prefix", "checkpoint", "reset", "evict_for_alloc"),
    "pool": ("free", "free_segment", "check_decode_capacity"),
}
"""Methods that tell the course of a request. Releases before 0.5.22 lack some of them."""
_log: Final = logging.getLogger("sglang.kvbm_console")


def plugin() -> None:
    """The entry point that SGLang calls in each of its processes: observe the scheduler if ``KVBM_TAP`` is set.

    The engine runs unobserved, and a logged sentence names the reason, if the variable cannot be read."""
    text = os.environ.get(VARIABLE)
    if not text or SCHEDULER not in sys.modules:
        return
    try:
        settings = settings_of(text)
    except ValueError as error:
        _log.error("kvbm-console: %s. The engine is not observed.", error)
        return
    registry: Any = import_module("sglang.srt.plugins.hook_registry")

    def begun(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        try:
            tap_of(scheduler, settings)
        except Exception as error:
            _log.error("kvbm-console: this release cannot be observed (%r)", error)

    registry.HookRegistry.register(f"{SCHEDULER}.Scheduler.__init__", begun, registry.HookType.AFTER)


def tap_of(scheduler: Any, settings: dict[str, Any]) -> "SglangTap | None":
    """Observe this scheduler and start a sender; None in a rank whose scheduler repeats the decisions of another, and
    in a release that lacks what the tap needs, which is logged."""
    if not _leads(scheduler):
        return None
    if lacking := missing_methods(scheduler):
        _log.error(
            "kvbm-console: this release of SGLang has no %s, so the engine is not observed. The tap needs 0.5.22 or "
            "newer.", ", ".join(lacking),
        )
        return None
    tap = SglangTap(scheduler, settings)
    if settings.get("send", True):
        tap.sender.start()
    scheduler.kvbm_tap = tap
    return tap


def missing_methods(scheduler: Any) -> list[str]:
    """Methods that this release lacks. An engine with doubtful counts may lack those of its tree and its pool."""
    owners = {"scheduler": scheduler, "table": scheduler.req_to_token_pool}
    if _is_known(scheduler):
        owners |= {"tree": scheduler.tree_cache, "pool": scheduler.token_to_kv_pool_allocator}
    return [
        f"{type(owner).__name__}.{name}" for role, owner in owners.items() for name in NEEDED[role]
        if not hasattr(owner, name)
    ]


def _leads(scheduler: Any) -> bool:
    parallel = _parallel()
    return not any(getattr(parallel, rank, 0) for rank in ("attn_tp_rank", "attn_cp_rank", "pp_rank"))


def _parallel() -> Any:
    return import_module("sglang.srt.runtime_context").get_parallel()


def wrapped(inner: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """``around`` in the place of ``inner``, which is its first argument. Arguments that ``around`` names and a caller
    gives by name go there by their position, so another release may call them otherwise.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def named(call: Callable[..., Any]) -> tuple[str, ...]:
        try:
            parameters = inspect.signature(call).parameters.values()
        except (TypeError, ValueError):  # of a method written in C
            return ()
        return tuple(parameter.name for parameter in parameters if parameter.kind in positional)

    names = named(inner)[: len(named(around)) - 1]

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            for name in names[len(args) :]:
                if name not in kwargs:
                    break
                args = (*args, kwargs.pop(name))
        return around(inner, *args, **kwargs)

    return call


class SglangTap:
    """One scheduler and its recorder."""

    def __init__(self, scheduler: Any, settings: dict[str, Any]) -> None:
        self._scheduler = scheduler
        self._page = int(scheduler.page_size)
        self._tree, self._pool = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        self._table = scheduler.req_to_token_pool
        self._host: Any = getattr(self._tree, "cache_controller", None)
        """HiCache's controller of copies between device and host; None without HiCache."""
        self.recorder = recorder = TapRecorder()
        recorder.keeps = True
        parallel = _parallel()
        self._half = str(scheduler.disaggregation_mode.name)
        """``PREFILL`` or ``DECODE`` if another engine does the rest of each request, else ``NULL``."""
        self._may_hold = self._half != "DECODE" and (
            max(getattr(parallel, size, 1) for size in ("tp_size", "pp_size", "attn_cp_size")) == 1
        )
        caching = not self._tree.disable
        rank, known = getattr(parallel, "dp_rank", None) or 0, _is_known(scheduler)
        host = self._host is not None and caching
        flattener = SglangFlattener(page=self._page, caching=caching, host=host, half=self._half)
        medium = HOST_MEDIUM if host else PEER_MEDIUM if self._half == "DECODE" else ""
        self.sender = Sender(recorder, flattener, TapSettings(
            target=str(settings.get("daemon", "")), name=str(settings.get("name") or f"SGLang rank {rank}")[:256],
            block_tokens=self._page, capacity_blocks=self._pool.size // self._page if known else None,
            first_place=DUMMY_PAGES, dp_rank=rank,
            serve=bool(settings.get("serve")), token_file=str(settings.get("token_file", "")),
            tls_ca=str(settings.get("tls_ca", "")), uncertain=not known, caching=caching,
            medium=medium, silent=medium == PEER_MEDIUM,
        ), python=str(settings.get("python", "")))
        self._rows: set[str] = set()
        """Requests that have places."""
        self._wanted: list[tuple[Any, bool]] = []
        """(request, True if it decodes) that the scheduler allocates for at this moment."""
        self._receiving: set[str] = set()
        """Requests whose places another engine fills, and that no step has computed yet."""
        self._sending: set[str] = set()
        """Requests that have computed all, and whose blocks another engine reads."""
        self._loading = ""
        """The request that blocks are loaded for at this moment."""
        self._loaded: dict[str, int] = {}
        """Requests to the tokens that were loaded for them, in the step that forms now."""
        self._fetches: dict[Any, tuple[int, int]] = {}
        """Requests, as the tree names them, to their copy from storage to the host and its pages."""
        self._fetched: dict[str, tuple[int, int]] = {}
        """Requests that wait to the span of tokens, as (first, end), that came from storage for them."""
        self._saved: dict[int, tuple[int, int, int]] = {}
        """Copies to storage that have ended, to (pages written, pages wanted, nanoseconds)."""
        self._copies: dict[int, tuple[str, Any]] = {}
        """Copies between device and host that run, by our number: the tree's table of them and their name there."""
        self._copied = 0
        self._stored: list[Any] | None = None
        """Records of stores of blocks that are being published: the flattener must know the blocks first."""
        self._freed: list[Any] | None = None
        """Tensors that the tree gives up in the present eviction."""
        self._events = _events_of(self._pool.device)
        self._replaced: list[tuple[Any, str, Any]] = []
        """(owner, name, the method itself if this object had its own) of each method that was replaced."""
        self._observe()

    def _observe(self) -> None:
        try:
            self._observe_engine()
            self._observe_half()
        except Exception:
            self._withdraw()
            raise

    def _observe_engine(self) -> None:
        scheduler, tree, pool, table = self._scheduler, self._tree, self._pool, self._table
        self._replace(scheduler, "_add_request_to_queue", self._arrives)
        if hasattr(scheduler, "send_abort_output"):
            self._replace(scheduler, "send_abort_output", self._aborts)
        else:  # 0.5.22 has no method for what it tells the client of such a request
            self._replace(scheduler.ipc_channels.send_to_tokenizer, "send_output", self._answers)
        self._replace(scheduler, "get_new_batch_prefill", self._admits)
        self._replace(scheduler, "get_next_batch_to_run", self._forms)
        self._replace(tree, "match_prefix", self._looks_up)
        self._replace(tree, "checkpoint", self._publishes)
        self._replace(tree, "reset", self._clears)
        for name in ("evict", "evict_for_alloc"):
            self._replace(tree, name, self._evicts)
        self._replace(tree, "init_load_back", self._loads)
        for name in ("free", "free_segment", "free_full_segment", "free_page_ids"):
            self._replace(pool, name, self._frees)
        self._replace(pool, "check_decode_capacity", self._checks)
        self._replace(table, "alloc", self._takes_rows)
        self._replace(table, "free", self._gives_row)
        if self._host is not None:
            self._replace(self._host, "write", self._stores)
            self._replace(self._host, "load", self._loads_blocks)
            self._replace(tree.host_pool_group, "free", self._frees_below)
            for name in ("writing_check", "loading_check", "_drain_storage_control_queues_impl"):
                self._replace(tree, name, self._looks_for_ends)
            self._replace(self._host, "write_storage", self._saves)
            self._replace(self._host, "_page_backup", self._saves_pages)
            self._replace(self._host, "allocate_storage_hit", self._fetches_pages)
            self._replace(tree, "_handle_prefetch_result", self._has_fetched)
            self._replace(tree, "_retire_ongoing_prefetch", self._fetches_no_more)

    def _observe_half(self) -> None:
        scheduler = self._scheduler
        if self._half == "NULL":
            return
        if self._half == "PREFILL":
            self._replace(scheduler, "get_next_disagg_prefill_batch_to_run", self._forms)
            self._replace(scheduler, "send_kv_chunk", self._sends)
            self._replace(scheduler, "handle_bootstrap_failure", self._fails)
        else:
            self._replace(scheduler, "get_next_disagg_decode_batch_to_run", self._forms)
            self._replace(scheduler.disagg_decode_prealloc_queue, "_pre_alloc", self._receives)
            self._replace(scheduler.disagg_decode_prealloc_queue, "pop_preallocated", self._gives_up)
            self._replace(scheduler.disagg_decode_prealloc_queue, "resume_retracted_reqs", self._received)
            self._replace(scheduler.disagg_decode_transfer_queue, "pop_transferred", self._received)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Put ``around`` in the place of a method of this object, with the method as its first argument."""
        inner = getattr(owner, name, None)
        if inner is not None:
            self._replaced.append((owner, name, getattr(owner, "__dict__", {}).get(name)))
            setattr(owner, name, wrapped(inner, around))

    def _withdraw(self) -> None:
        """Give every object its own methods back, so an engine that cannot be observed runs as without the tap."""
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    # --- requests ---

    def _arrives(self, inner: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(req, *args, **kwargs)
        recorder = self.recorder
        with recorder.part as began:
            name = req.rid
            if self._queued() is req and name not in recorder.live and len(recorder.live) < LIVE_MAX:
                recorder.live[name] = req
                if recorder.on:
                    recorder.put(("new", began, req))
                else:
                    recorder.unheard = True
        return answer

    def _queued(self) -> Any:
        """The request that was queued last; None if there is none."""
        scheduler = self._scheduler
        if self._half == "DECODE":
            queue = scheduler.disagg_decode_prealloc_queue.queue
            return queue[-1].req if queue else None
        queue = scheduler.disagg_prefill_bootstrap_queue.queue if self._half == "PREFILL" else scheduler.waiting_queue
        return queue[-1] if queue else None

    def _aborts(self, inner: Any, abort: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.part as began:
            if req.rid not in self._rows:
                self._ended(began, req, "FINISH_ABORT")
        return inner(abort, req, *args, **kwargs)

    def _answers(self, inner: Any, output: Any, req: Any = None, *args: Any, **kwargs: Any) -> Any:
        if type(output).__name__ == "AbortReq":
            return self._aborts(inner, output, req, *args, **kwargs)
        return inner(output, req, *args, **kwargs)

    def _ended(self, now: int, req: Any, reason: str) -> None:
        recorder = self.recorder
        if recorder.live.pop(req.rid, None) is not None:
            recorder.forget(req.rid)
            self._fetched.pop(req.rid, None)
            recorder.put(("ended", now, req, reason))

    def _looks_up(self, inner: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(params, *args, **kwargs)
        recorder = self.recorder
        req = getattr(params, "req", None)
        if recorder.on and req is not None:
            with recorder.part as began:
                if req.rid in recorder.live and req.rid not in self._rows:
                    self._looked_up(began, req.rid, answer.device_prefix_len, answer.host_hit_length)
        return answer

    def _looked_up(self, now: int, name: str, device: int, below: int) -> None:
        recorder = self.recorder
        if recorder.answers.get(name) != (device, below):
            recorder.answers[name] = device, below
            recorder.put(("lookup", now, name, device, below, False))

    def _admits(self, inner: Any, running_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler looks for requests to start: held requests are out of its queue meanwhile."""
        recorder, scheduler = self.recorder, self._scheduler
        held: list[Any] = []
        before: list[Any] = []
        if recorder.gated and self._may_hold:
            with recorder.part:
                before = scheduler.waiting_queue
                held = [req for req in before if recorder.must_wait(req.rid, 0)]
                if held:
                    left_out = set(map(id, held))
                    scheduler.waiting_queue = [req for req in before if id(req) not in left_out]
        try:
            return inner(running_batch, *args, **kwargs)
        finally:
            if held:
                with recorder.part:
                    self._put_back(before, held)

    def _put_back(self, before: list[Any], held: list[Any]) -> None:
        scheduler = self._scheduler
        kept, still = set(map(id, before)), set(map(id, [*held, *scheduler.waiting_queue]))
        scheduler.waiting_queue = [
            *(req for req in before if id(req) in still),
            *(req for req in scheduler.waiting_queue if id(req) not in kept),
        ]

    # --- the table of rows: a request gets places, or gives all of them back ---

    def _takes_rows(self, inner: Any, reqs: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.part:
            self._wanted = [(req, False) for req in reqs]
        return inner(reqs, *args, **kwargs)

    def _gives_row(self, inner: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(req, *args, **kwargs)
        recorder = self.recorder
        with recorder.part as began:
            self._rows.discard(req.rid)
            self._receiving.discard(req.rid)
            if req.rid in self._sending:
                self._sending.discard(req.rid)
                recorder.put(("copies", began, [], [req.rid], [], []))
            elif req.finished():
                self._ended(began, req, type(req.finished_reason).__name__)
            elif req.rid in recorder.live:
                recorder.forget(req.rid)
                recorder.put(("preempt", began, req.rid))
        return answer

    # --- prefill and decode in two engines ---

    def _sends(self, inner: Any, req: Any, last_chunk: bool = False, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if last_chunk:
            with recorder.part as began:
                if req.rid in recorder.live and req.rid in self._rows:
                    self._sending.add(req.rid)
                    self._ended(began, req, "")
        return inner(req, last_chunk, *args, **kwargs)

    def _receives(self, inner: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler allocates the places that the other engine fills."""
        answer = inner(req, *args, **kwargs)
        recorder = self.recorder
        with recorder.part as began:
            self._rows.add(req.rid)
            self._receiving.add(req.rid)
            recorder.forget(req.rid)
            if recorder.on:
                end = req.kv.kv_committed_len
                row = self._table.req_to_token[req.kv.req_pool_idx, : end : self._page].clone()
                recorder.put(("receive", began, req, req.prefix_len, end, row, self._events()))
        return answer

    def _received(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        reqs = inner(*args, **kwargs)
        with self.recorder.part as began:
            if reqs:
                self.recorder.put(("copies", began, [req.rid for req in reqs], [], [], []))
        return reqs

    def _fails(self, inner: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """The other engine did not come, or a client gave up before this engine computed anything."""
        answer = inner(req, *args, **kwargs)
        with self.recorder.part as began:
            if req.rid not in self._rows:
                self._ended(began, req, "FINISH_ABORT")
        return answer

    def _gives_up(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        with self.recorder.part as began:
            for failed in found[1]:
                self._ended(began, failed.req, "FINISH_ABORT")
        return found

    # --- the tree ---

    def _publishes(self, inner: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        first: int | None = None
        with recorder.part:
            first = req.kv.cache_protected_len
        stored: list[Any] = []
        self._stored = stored
        try:
            answer = inner(req, *args, **kwargs)
        finally:
            self._stored = None
        with recorder.part as began:
            end = req.kv.cache_protected_len
            if first is not None and end > first and not self._tree.disable:
                row = self._table.req_to_token[req.kv.req_pool_idx, first : end : self._page].clone()
                recorder.put(("publish", began, req, first // self._page, row, self._events()))
        for record in stored:
            recorder.put(record)
        return answer

    def _evicts(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        if self._freed is not None:
            return inner(*args, **kwargs)
        freed: list[Any] = []
        before = 0
        with self.recorder.part:
            before = self._pool.available_size()
        self._freed = freed
        try:
            return inner(*args, **kwargs)
        finally:
            self._freed = None
            if freed:
                with self.recorder.part as began:
                    self.recorder.put(("evict", began, freed, self._events(), before, self._demands()))

    def _frees(self, inner: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        freed, self._freed = self._freed, None  # the allocator's methods call each other
        try:
            return inner(indices, *args, **kwargs)
        finally:
            if freed is not None:
                freed.append(indices)
                self._freed = freed

    def _demands(self) -> list[tuple[str, int]]:
        """Tokens that each request needs, in the order in which the scheduler serves them."""
        if self._loading:
            return [(self._loading, self._pool.size)]  # all that is evicted meanwhile
        page = self._page
        spare = page if page > 1 else 0
        return [
            (req.rid, page * (not req.kv.kv_committed_len % page) if decodes else req.extend_len + spare)
            for req, decodes in self._wanted
        ]

    def _checks(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.part:
            self._wanted = [(req, True) for req in kwargs.get("requests") or ()]
        return inner(*args, **kwargs)

    def _loads(self, inner: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        name = ""
        with self.recorder.part:
            name = "" if params.req is None else params.req.rid
        self._loading = name
        try:
            answer = inner(params, *args, **kwargs)
        finally:
            self._loading = ""
        with self.recorder.part:
            if answer and answer[0]:
                self._loaded[name] = answer[0]
        return answer

    def _clears(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(*args, **kwargs)
        with self.recorder.part as began:
            for number in (*self._copies, *(number for number, _ in self._fetches.values())):
                self.recorder.put(("copied", began, number, "cancelled"))
            for kept in (self._copies, self._saved, self._fetches, self._fetched):
                kept.clear()
            self.recorder.put(("cleared", began, []))
        return answer

    # --- HiCache: copies between device and host ---

    def _stores(self, inner: Any, device_indices: Any, *args: Any, **kwargs: Any) -> Any:
        host_indices = inner(device_indices, *args, **kwargs)
        with self.recorder.part as began:
            if host_indices is not None and len(host_indices):
                self._copies_blocks(began, "ongoing_write_through", kwargs.get("node_id"), device_indices, host_indices)
        return host_indices

    def _loads_blocks(self, inner: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
        device_indices = inner(host_indices, *args, **kwargs)
        with self.recorder.part as began:
            if device_indices is not None and len(host_indices):
                self._copies_blocks(began, "ongoing_load_back", kwargs.get("node_id"), device_indices, host_indices)
        return device_indices

    def _copies_blocks(self, now: int, table: str, node: Any, device_indices: Any, host_indices: Any) -> None:
        self._copied += 1
        self._copies[self._copied] = table, node
        kind = "store" if table == "ongoing_write_through" else "load"
        record = (
            kind, now, self._copied, self._loading, device_indices[:: self._page], host_indices[:: self._page],
            self._events(), self._size_of(len(host_indices)),
        )
        if self._stored is None:
            self.recorder.put(record)
        else:
            self._stored.append(record)

    def _looks_for_ends(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """The tree forgets copies that have ended."""
        answer = inner(*args, **kwargs)
        if self._copies:
            with self.recorder.part as began:
                tree, copies = self._tree, self._copies
                self._copies = {}  # without the tree's tables no end is ever seen, so all are forgotten
                running = {number: copy for number, copy in copies.items() if copy[1] in getattr(tree, copy[0])}
                for number, (table, node) in copies.items():
                    if number in running:
                        continue
                    saved = self._saved.pop(node, None) if table == "ongoing_backup" else None
                    self.recorder.put(("copied", began, number, *(_outcome(*saved) if saved else ("completed",))))
                self._copies = running
        return answer

    def _frees_below(self, inner: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(indices, *args, **kwargs)
        with self.recorder.part as began:
            if len(indices) and getattr(kwargs.get("pool"), "value", "kv") == "kv":
                self.recorder.put(("freed", began, indices[:: self._page]))
        return answer

    # --- HiCache: copies between host and storage ---

    def _store_medium(self) -> str:
        """The medium of the storage, with the backend's name."""
        kind = str(self._host.storage_backend_type)
        if kind == "dynamic":
            kind = str((self._host.storage_config.extra_config or {}).get("backend_name", kind))
        return f"{DISK if kind in LOCAL_STORES else STORAGE} {kind}"

    def _size_of(self, tokens: int) -> int | None:
        token_bytes = getattr(self._host.mem_pool_host, "size_per_token", None)
        return None if token_bytes is None else tokens * int(token_bytes)

    def _saves(self, inner: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
        operation = inner(host_indices, *args, **kwargs)
        with self.recorder.part as began:
            self._copied += 1
            self._copies[self._copied] = "ongoing_backup", operation
            self.recorder.put((
                "save", began, self._copied, host_indices[:: self._page], self._store_medium(),
                self._size_of(len(host_indices)),
            ))
        return operation

    def _saves_pages(self, inner: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """In SGLang's own thread: the scheduler's thread reports the end when it sees it."""
        began = time.monotonic_ns()
        try:
            return inner(operation, *args, **kwargs)
        finally:
            # The context of our part belongs to the scheduler's thread.
            try:
                took, wanted = time.monotonic_ns() - began, len(operation.hash_value)
                if len(self._saved) < QUEUE_MAX:  # nobody takes the ends of copies whose beginning was not seen
                    self._saved[operation.id] = operation.completed_tokens // self._page, wanted, took
            except Exception:
                self.recorder.failed()

    def _fetches_pages(self, inner: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """The storage has pages of a waiting request, and the host has room for them."""
        answer = inner(operation, *args, **kwargs)
        with self.recorder.part as began:
            host_indices, tokens = answer
            if host_indices is not None:
                self._copied += 1
                self._fetches[operation.handle] = self._copied, tokens // self._page
                self.recorder.put((
                    "fetch", began, self._copied, operation.handle.rid, operation.storage_start // self._page,
                    tokens // self._page, self._store_medium(), self._size_of(tokens),
                ))
        return answer

    def _has_fetched(self, inner: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """The tree takes what has come. Pages that the host had already are given back."""
        tree, waiting = self._tree, None
        with self.recorder.part:
            waiting = tree.ongoing_prefetch.get(operation.handle)
        answer = inner(operation, *args, **kwargs)
        with self.recorder.part as began:
            request = operation.handle
            number, pages = self._fetches.pop(request, (0, 0))
            if number and waiting is not None:
                end = operation.completed_tokens
                first = end - tree.prefetch_loaded_tokens_by_reqid.get(request, 0)
                if first < end:
                    self._fetched[request.rid] = operation.storage_start + first, operation.storage_start + end
                come = end // self._page
                self.recorder.put((
                    "fetched", began, number, request.rid, (operation.storage_start + first) // self._page,
                    waiting.host_indices[first : end : self._page], "completed" if come == pages else "failed",
                    "" if come == pages else f"{come} of {pages} pages were read",
                ))
        return answer

    def _fetches_no_more(self, inner: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = inner(request, *args, **kwargs)
        with self.recorder.part as began:
            number, _ = self._fetches.pop(request, (0, 0))
            if number:
                self.recorder.put(("copied", began, number, "cancelled"))
        return answer

    # --- steps ---

    def _forms(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        plan = inner(*args, **kwargs)
        with self.recorder.part as began:
            try:
                self._formed(began, plan.batch_to_run)
            finally:
                self._loaded.clear()
        return plan

    def _formed(self, now: int, batch: Any) -> None:
        recorder = self.recorder
        extends = batch is not None and batch.forward_mode.is_extend()
        started = [req for req in batch.reqs if req.rid not in self._rows] if extends else []
        self._rows.update([req.rid for req in started])
        if batch is not None:
            if self._receiving:
                self._receiving.difference_update(req.rid for req in batch.reqs)
            recorder.stepped(now)
        if recorder.on and (recorder.want_full or recorder.unheard):
            self._tell_all(now, batch)
        elif recorder.on and batch is not None:
            running = len(self._rows) - len(self._receiving) - len(self._sending)
            if extends:
                self._extended(now, batch, {req.rid for req in started}, running)
            else:
                recorder.put(("decode", now, batch.reqs[:], batch.out_cache_loc, self._events(), running))

    def _extended(self, now: int, batch: Any, started: set[str], running: int) -> None:
        rows = []
        for req, computed, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=False):
            prefix, loaded, stored = None, 0, 0
            if req.rid in started:
                loaded = min(self._loaded.get(req.rid, 0), computed)
                first, end = self._fetched.pop(req.rid, (0, 0))
                stored = max(0, min(computed, end) - max(computed - loaded, first))
                self._looked_up(now, req.rid, computed - loaded, loaded)
                self.recorder.forget(req.rid)
                if computed:
                    prefix = self._table.req_to_token[req.kv.req_pool_idx, : computed : self._page].clone()
            tokens = len(req.origin_input_ids) + len(req.output_ids)
            rows.append((req, computed, count, prefix, tokens, loaded, stored))
        self.recorder.put(("extend", now, rows, batch.out_cache_loc, self._events(), running))

    def _tell_all(self, now: int, batch: Any) -> None:
        """Every live request with its places, as they are after this step."""
        recorder = self.recorder
        if len(recorder.queue) > QUEUE_MAX // 2:
            return  # the sender is behind: at a later step
        recorder.want_full = recorder.unheard = False
        recorder.answers.clear()
        scheduled = set() if batch is None else {req.rid for req in batch.reqs}
        rows = []
        for name, req in recorder.live.items():
            places, computed = None, 0
            if name in self._rows:
                computed = req.kv.kv_committed_len
                places = self._table.req_to_token[req.kv.req_pool_idx, : computed : self._page].clone()
            rows.append((
                req, places, computed, name in scheduled, len(req.origin_input_ids) + len(req.output_ids),
                req.kv.cache_protected_len // self._page, name in self._receiving,
            ))
        recorder.put(("all", now, rows, int(bool(recorder.stepped_ns)), recorder.dropped, self._events()))


def _outcome(written: int, wanted: int, wire_ns: int) -> tuple[str, int, str]:
    """Status, nanoseconds and error of a copy to the storage."""
    if written == wanted:
        return "completed", wire_ns, ""
    return "failed", wire_ns, f"{written} of {wanted} pages were written"


def _events_of(device: Any) -> Callable[[], Any]:
    """A function that marks this moment on the device's stream; its result is None where tensors need no wait."""
    kind = str(device).split(":")[0]
    if kind == "cpu":
        return lambda: None
    module: Any = import_module("torch").get_device_module(kind)

    def mark() -> Any:
        event = module.Event()
        event.record()
        return event

    return mark


def _is_known(scheduler: Any) -> bool:
    """True if each request has one place for each of its tokens and no method of SGLang's changes that unseen."""
    tree = scheduler.tree_cache
    host = getattr(tree, "cache_controller", None)
    stores = host is not None and all(
        hasattr(owner, name) for owner, role in ((host, "controller"), (tree, "tree")) for name in STORES[role]
    )
    components = [getattr(kind, "name", str(kind)) for kind in getattr(tree, "tree_components", ("FULL",))]
    plain = components == ["FULL"] and getattr(scheduler, "kv_shard_widening", 1) == 1
    return (
        plain and (stores or not getattr(tree, "enable_storage", False))
        and getattr(tree, "buffer_pipeline", None) is None
        and scheduler.spec_algorithm.is_none() and scheduler.disaggregation_mode.name == "NULL"
        and getattr(scheduler, "dllm_config", None) is None and getattr(tree, "linker", None) is None
        and getattr(scheduler, "decode_offload_manager", None) is None
    )
