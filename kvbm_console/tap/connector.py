"""A connector class around another connector class, made from the engine's own base class at run time.

The base class changes with every release of the engine, so only the recorded calls are written down here. Every other
public method, property, class method and static method is found at run time and forwarded unchanged to the connector
inside.

A hybrid model keeps several groups of blocks in one pool of places, and a connector does not hear which of its blocks
are in the prefix cache under which hash. So the engine's pool is observed, too. ``scheduler`` uses the same recorded
calls when the scheduler itself is observed.

Law of this file: results and errors of the inner connector reach the engine unchanged, with two exceptions. A held
request's lookup is answered with "ask again", and ``sanitize`` adds to the messages between both halves of a connector.
"""

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Sized
from typing import Any, Final

from kvbm_console.tap.recorder import LIVE_MAX, NULL_BLOCKS, QUEUE_MAX, MovingWindow, TapRecorder
from kvbm_console.tap.sanitizing import WORKER_CALLS, WorkerMeta

_now = time.monotonic_ns
_POOL_CALLS: Final = ("get_new_blocks", "cache_full_blocks", "free_blocks")
"""Without these the groups cannot be followed."""
_WINDOW_CALL: Final = "remove_skipped_blocks"
"""Without this method of a group whose layers see a window, the blocks that it gives back are unknown."""
_CALLER: Final = 3
"""Frames between ``_request_of_call`` and the caller of a method that ``after`` has wrapped."""
_CALLERS: Final = 3
"""Callers of the pool that are asked for a request: its own, and those that helpers stand between."""
AUDIT_PLACES: Final = 512
AUDIT_NS: Final = 40_000
"""Places and time of one audit: a pool of 20,000 places is compared in 40 audits."""
AUDIT_STRIDE: Final = 64
"""Places that are read between two looks at the clock: some microseconds."""


def make_tap(name: str, bases: tuple[type, ...], engine: Any) -> type:
    """A class ``name`` on top of the engine's connector classes ``bases``, the base class of connectors first.

    ``engine`` is the engine's binding, such as ``vllm._Vllm``. Its ``inner`` makes the connector inside from the
    arguments of the constructor. ``inner_class`` returns the class inside for a call on the class, with the arguments
    that it gets. ``recorder`` returns the recorder of calls, None in a process that does not schedule.
    """
    members: dict[str, Any] = {"__doc__": "Reports to kvbm-console; set up by kv_connector_extra_config.",
                               "__module__": __name__}
    for base in reversed(bases):
        for attribute in dir(base):
            if not attribute.startswith("_"):
                members[attribute] = _forwarding(base, attribute, engine)
    for attribute, tapped in TAPPED.items():
        if attribute in members:
            members[attribute] = functools.wraps(getattr(bases[0], attribute, tapped))(tapped)

    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        arguments = (vllm_config, role, kv_cache_config)
        base: Any = bases[0]
        base.__init__(self, *arguments_of(base, arguments))
        self._events_are_ours = False
        self._sanitizer = self._marker = None
        self._tapped = engine.inner(self, arguments, {})
        self._recorder = engine.recorder(self, arguments, {}) or TapRecorder()

    def __getattr__(self: Any, attribute: str) -> Any:
        if attribute.startswith("__") or attribute in _OURS:
            raise AttributeError(attribute)
        return getattr(self._tapped, attribute)

    members.update(__init__=__init__, __getattr__=__getattr__)
    tap = type(name, bases, members)
    tap.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return tap


def arguments_of(kind: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """As many of the arguments as the constructor takes: older engines gave no ``kv_cache_config``."""
    kinds = [parameter.kind for parameter in inspect.signature(kind.__init__).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return arguments
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return arguments[: sum(kind in positional for kind in kinds) - 1]


_OURS: Final = ("_tapped", "_recorder", "_events_are_ours", "_sanitizer", "_marker")


class _OfClass:
    """A class method or static method. A tap asks the class of the connector inside it; a class of taps asks the class
    that its arguments name."""

    def __init__(self, attribute: str, raw: Any, engine: Any) -> None:
        self._attribute, self._raw, self._engine = attribute, raw, engine

    def __get__(self, tap: Any, owner: Any = None) -> Any:
        def of_class(*args: Any, **kwargs: Any) -> Any:
            inside, args, kwargs = self._engine.inner_class(args, kwargs)
            return getattr(inside if tap is None else tap._tapped, self._attribute)(*args, **kwargs)

        return functools.update_wrapper(of_class, self._raw.__func__)


def _forwarding(base: type, attribute: str, engine: Any) -> Any:
    """The replacement of a public member of the base class."""
    for owner in base.__mro__:
        if attribute in owner.__dict__:
            raw = owner.__dict__[attribute]
            break
    else:
        raw = getattr(base, attribute)
    if isinstance(raw, (classmethod, staticmethod)):
        return _OfClass(attribute, raw, engine)
    if callable(raw):
        @functools.wraps(raw)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._tapped, attribute)(*args, **kwargs)

        return method

    def read(self: Any) -> Any:
        return getattr(self._tapped, attribute)

    def write(self: Any, value: Any) -> None:
        setattr(self._tapped, attribute, value)

    return property(read, write, doc=getattr(raw, "__doc__", None))


# --- the recorded calls: our part, the inner connector's, our part ---


def bind_kv_cache_manager(self: Any, kv_cache_manager: Any) -> Any:
    """Keep the manager to report all blocks to a new daemon, and record the facts that no connector call carries."""
    self._kv_cache_manager = kv_cache_manager
    recorder = self._recorder
    try:
        record_resets(recorder, kv_cache_manager)
        recorder.places_known = record_places(recorder, kv_cache_manager)
    except Exception:
        recorder.failed()
    return self._tapped.bind_kv_cache_manager(kv_cache_manager)


def on_new_request(self: Any, request: Any) -> Any:
    """A request arrived."""
    recorder = self._recorder
    with recorder.part:
        arrived(recorder, request)
    return self._tapped.on_new_request(request)


def arrived(recorder: TapRecorder, request: Any) -> None:
    """Remember a request until it ends, and record its arrival."""
    if len(recorder.live) < LIVE_MAX:
        recorder.live[request.request_id] = request
        if recorder.on:
            recorder.put(("new", _now(), request))
        else:
            recorder.unheard = True


def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
    """A lookup. A held request gets "ask again"; other answers are recorded when they change."""
    began = _now()
    recorder = self._recorder
    try:
        if request.request_id not in recorder.live:
            arrived(recorder, request)  # older engines report no arrival
        if recorder.gated and recorder.must_wait(request.request_id, num_computed_tokens):
            recorder.spent(_now() - began)
            return None, False
    except Exception:
        recorder.failed()
    called = _now()
    answer = self._tapped.get_num_new_matched_tokens(request, num_computed_tokens)
    ended = _now()
    try:
        if recorder.on:
            name, fields = request.request_id, (num_computed_tokens, *answer)
            if recorder.answers.get(name) != fields:
                recorder.answers[name] = fields
                recorder.put(("lookup", ended, name, *fields))
    except Exception:
        recorder.failed()
    recorder.spent(_now() - ended + called - began)
    return answer


def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> Any:
    """Device blocks were allocated."""
    recorder = self._recorder
    with recorder.part as began:
        allocated(recorder, began, request.request_id, blocks, num_external_tokens)
    return self._tapped.update_state_after_alloc(request, blocks, num_external_tokens)


def allocated(recorder: TapRecorder, now: int, name: str, blocks: Any, external: int) -> None:
    """Record all blocks of a request that starts or waits for a load."""
    if recorder.on:
        recorder.forget(name)
        # The record carries the present length of each list, because the engine's own lists go on growing.
        groups = getattr(blocks, "blocks", None)
        ids = blocks.get_block_ids() if groups is None else tuple((group, len(group)) for group in groups)
        recorder.put(("alloc", now, name, ids, external))


def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
    """A step was formed. The copies that the connector inside orders in it are recorded before the step."""
    metadata = self._tapped.build_connector_meta(scheduler_output)
    recorder = self._recorder
    with recorder.part as began:
        formed(recorder, began, scheduler_output, getattr(self, "_kv_cache_manager", None))
    if self._marker is not None:
        _mark(self, scheduler_output, metadata)
    return metadata


def formed(recorder: TapRecorder, now: int, scheduler_output: Any, manager: Any) -> None:
    """Record a step before the engine counts its tokens as computed."""
    if scheduler_output.num_scheduled_tokens:
        recorder.stepped(now)
    if recorder.on:
        for name in _starting(scheduler_output):
            recorder.forget(name)
        preempted = _preempted(recorder, scheduler_output)
        if recorder.want_full or recorder.unheard:
            _tell_all(manager, recorder, scheduler_output, now)
            recorder.audit_from, recorder.audit_due, recorder.swept = NULL_BLOCKS, 0, False
        else:
            # A set: the connector inside reads it in the same order.
            ended = tuple(getattr(scheduler_output, "finished_req_ids", None) or ())
            lengths = _lengths(recorder, scheduler_output)
            recorder.put(("step", now, scheduler_output, preempted, lengths, ended if len(ended) > 1 else ()))
        if recorder.audit_every and recorder.places_known and not recorder.want_full:
            recorder.audit_due -= 1
            if recorder.audit_due <= 0:
                audit(recorder, manager.block_pool)


def _preempted(recorder: TapRecorder, scheduler_output: Any) -> tuple[str, ...]:
    """Requests that lost their blocks since the last step. A release before 0.12 does not name them."""
    if hasattr(scheduler_output, "preempted_req_ids"):
        return tuple(scheduler_output.preempted_req_ids or ())
    out = {name for name, one in recorder.live.items() if one.status.name == "PREEMPTED"}
    since, recorder.out = out - recorder.out, out
    return tuple(since)


def audit(recorder: TapRecorder, pool: Any) -> None:
    """Record a part of the pool as it is after this step, to compare it with the facts.

    After a whole report each step has a part, until the whole pool was compared once."""
    began, blocks, first = _now(), pool.blocks, recorder.audit_from
    rows: list[tuple[Any, int]] = []
    for at in range(first, min(first + AUDIT_PLACES, len(blocks)), AUDIT_STRIDE):
        rows += [(block.block_hash, block.ref_cnt) for block in blocks[at : at + AUDIT_STRIDE]]
        if _now() - began >= AUDIT_NS:
            break
    free = pool.get_num_free_blocks() if recorder.alone else None
    recorder.put(("audit", began, first, rows, free, _cached(pool) if recorder.one_size else None))
    recorder.audit_from = first + len(rows)
    if recorder.audit_from >= len(blocks):
        recorder.audit_from, recorder.swept = NULL_BLOCKS, True
    recorder.audit_due = recorder.audit_every if recorder.swept else 1


def _mark(self: Any, scheduler_output: Any, metadata: Any) -> None:
    """``sanitize``: name the blocks of the copies that the connector ordered."""
    recorder = self._recorder
    with recorder.part:
        self._marker.mark(recorder.live, self._kv_cache_manager.block_pool.blocks, scheduler_output, metadata)
        _tell_findings(self)


def _tell_findings(self: Any) -> None:
    recorder, waiting = self._recorder, self._marker.waiting
    while recorder.on and waiting:
        recorder.put(("sanitized", _now(), waiting.popleft()))


def _cached(pool: Any) -> int | None:
    """Number of hashes in the prefix cache, of all groups; None if the engine's cache has no length."""
    found = getattr(pool, "cached_block_hash_to_block", None)
    return len(found) if isinstance(found, Sized) else None



def _lengths(recorder: TapRecorder, scheduler_output: Any) -> dict[str, int]:
    """Tokens of the requests that start in this step, read now because they grow before the sender's turn."""
    live = recorder.live
    return {name: live[name].num_tokens for name in _starting(scheduler_output) if name in live}


def _starting(scheduler_output: Any) -> list[str]:
    """Requests that this step schedules for the first time, or again after a preemption."""
    starting = [one.req_id for one in scheduler_output.scheduled_new_reqs]
    starting += getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", None) or ()
    return starting


def _tell_all(manager: Any, recorder: TapRecorder, scheduler_output: Any, now: int) -> None:
    """Every live request with its blocks, as they are after this step: what a listener begins with."""
    if len(recorder.queue) > QUEUE_MAX // 2:
        return  # the sender is behind: at a later step
    recorder.want_full = recorder.unheard = False
    recorder.answers.clear()
    scheduled = scheduler_output.num_scheduled_tokens
    drafts = getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or {}
    rows = []
    for name, request in recorder.live.items():
        ids = manager.get_block_ids(name) if manager is not None else ()
        rows.append((
            request, ids, request.num_computed_tokens + scheduled.get(name, 0) - len(drafts.get(name, ())),
            name in scheduled, request.status, request.num_tokens, _decided(recorder, manager, name, ids),
        ))
    places = None if recorder.by_place and not recorder.places_known else places_of(manager)
    below = None if recorder.below is None else [(medium, dict(held)) for medium, held in recorder.below.items()]
    recorder.put(("all", now, rows, int(bool(recorder.stepped_ns)), recorder.dropped, places, below))
    if recorder.watch is not None:
        recorder.watch.tell_open()


def update_connector_output(self: Any, connector_output: Any) -> Any:
    """Copies ended. The connector inside may add to the workers' reports, so its call comes first."""
    recorder = self._recorder
    worker_meta = getattr(connector_output, "kv_connector_worker_meta", None)
    if isinstance(worker_meta, WorkerMeta):
        connector_output.kv_connector_worker_meta = worker_meta.inner
        try:
            self._marker.heard(worker_meta)
            recorder.checks = self._marker.totals
            _tell_findings(self)
        except Exception:
            recorder.failed()
    answer = self._tapped.update_connector_output(connector_output)
    with recorder.part as began:
        if recorder.on:
            copies = tuple(tuple(getattr(connector_output, field, None) or ()) for field in _COPIES)
            if any(copies):
                recorder.put(("copies", began, *copies))
    return answer


_COPIES: Final = ("finished_recving", "finished_sending", "failed_recving", "invalid_block_ids")


def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
    """A request ended, in an engine without hybrid memory."""
    answer = self._tapped.request_finished(request, block_ids)
    _finished(self, request, (block_ids,), answer)
    return answer


def request_finished_all_groups(self: Any, request: Any, block_ids: Any) -> Any:
    """A request ended. An inner connector that knows one group of blocks gets the first group, as from the engine."""
    inside = getattr(self._tapped, "request_finished_all_groups", None)
    answer = self._tapped.request_finished(request, block_ids[0]) if inside is None else inside(request, block_ids)
    _finished(self, request, block_ids, answer)
    return answer


_EARLY: Final = ("FINISHED_ABORTED", "FINISHED_ERROR")


def _finished(self: Any, request: Any, groups: Any, answer: Any) -> None:
    recorder = self._recorder
    with recorder.part as began:
        named = named_blocks(getattr(self, "_kv_cache_manager", None), request, groups)
        ended(recorder, began, request, bool(answer[0]), named)


def ended(recorder: TapRecorder, now: int, request: Any, delayed: bool, named: tuple[int, ...]) -> None:
    """Forget a request, and record its end."""
    recorder.live.pop(request.request_id, None)
    recorder.forget(request.request_id)
    if recorder.on:
        recorder.put(("finish", now, request, delayed, named))


def named_blocks(manager: Any, request: Any, groups: Any) -> tuple[int, ...]:
    """Number of leading blocks with a hash in each group, for a request that ends before its time.

    Empty for other requests, and if the engine does not give its blocks."""
    return _leading(manager, groups) if getattr(request.status, "name", "") in _EARLY else ()


def _decided(recorder: TapRecorder, manager: Any, name: str, groups: Any) -> tuple[int, ...]:
    """Number of leading blocks that the engine has cached, passed, or decided not to cache, in each group."""
    leading, window = _leading(manager, groups), recorder.window
    if window is None or not window.sparse or not leading:
        return leading
    part = manager.coordinator.single_type_managers[window.group]
    counts = list(leading)
    counts[window.group] = part.num_cached_block.get(name, counts[window.group])
    return tuple(counts)


def _leading(manager: Any, groups: Any) -> tuple[int, ...]:
    """Number of leading blocks with a hash, or before a window, in each group; empty if the engine does not give its
    blocks."""
    blocks = getattr(getattr(manager, "block_pool", None), "blocks", None)
    if blocks is None:
        return ()
    return tuple(next(
        (at for at, place in enumerate(ids) if place >= NULL_BLOCKS and blocks[place].block_hash is None), len(ids)
    ) for ids in groups)


def take_events(self: Any) -> Any:
    """The blocks that the inner connector stored and removed. Events that only we asked for go no further."""
    events = self._tapped.take_events()
    recorder = self._recorder
    if recorder.on or self._events_are_ours or recorder.below is not None:
        events = tuple(events or ())  # a generator can be read only once, and the engine reads it too
    with recorder.part as began:
        if events and recorder.below is not None:
            recorder.stored_below(events)
        if recorder.on and events:
            recorder.put(("events", began, events))
    return () if self._events_are_ours else events


def reset_cache(self: Any) -> Any:
    """The engine forgets what its connector holds."""
    recorder = self._recorder
    if self._marker is not None:
        self._marker.forget()
    if recorder.on:
        recorder.put(("reset", _now()))
    return self._tapped.reset_cache()


def shutdown(self: Any) -> Any:
    """The engine ends."""
    self._recorder.ending = True
    if self._sanitizer is not None:
        self._sanitizer.finish()
    return self._tapped.shutdown()


# --- facts that no connector call carries: we wrap methods of the engine's own cache manager and block pool, on the
# objects that the engine has; the wrapped method runs first, and its result goes back unchanged ---


def record_resets(recorder: TapRecorder, manager: Any) -> None:
    """Record each time that the engine forgets its prefix cache, with the requests that it preempts for that.

    They are preempted, too, if the engine then refuses the reset because a copy still holds blocks."""
    def forgot(done: Any, *_: Any, **__: Any) -> None:
        preempted = [
            name for name, request in recorder.live.items() if getattr(request.status, "name", "") == "PREEMPTED"
        ]
        if done is not False:
            recorder.put(("cleared", _now(), preempted))
            return
        for name in preempted:
            recorder.put(("preempt", _now(), name))

    if hasattr(manager, "reset_prefix_cache"):
        after(recorder, manager, "reset_prefix_cache", forgot)


def record_places(recorder: TapRecorder, manager: Any) -> bool:
    """Record each place of the pool that is allocated or cached, with its request and hash.

    Returns False if the manager or its pool lacks the methods that this needs."""
    pool = getattr(manager, "block_pool", None)
    parts = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    if recorder.window is not None and not all(hasattr(part, _WINDOW_CALL) for part in parts or (None,)):
        return False
    if not all(hasattr(pool, name) for name in _POOL_CALLS):
        return False
    blocks = pool.blocks  # type: ignore[union-attr]

    def report(changed: Iterable[Any], request: str = "") -> None:
        recorder.put(("pool", _now(), request, [(block.block_id, block.block_hash) for block in changed]))

    def allocated(new: Any, *_: Any, **__: Any) -> None:
        report(new, _request_of_call())

    def cached(_: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *__: Any,
               kv_cache_group_id: int = -1, **___: Any) -> None:
        if num_cached_blocks < num_full_blocks:
            named = [(block.block_id, block.block_hash) for block in blocks[num_cached_blocks:num_full_blocks]]
            recorder.put(("named", _now(), request.request_id, num_cached_blocks, named, kv_cache_group_id))

    def evicted(_: Any, block_ids: Any) -> None:
        report([blocks[place] for place in block_ids])

    def partly(_: Any, request: Any, block: Any, *__: Any, **___: Any) -> None:
        report([] if block.is_null else [block], request.request_id)

    def moved(_: Any, src_block: Any, dst_block: Any) -> None:
        report([src_block, dst_block])

    if recorder.window is not None:
        _watch_window(recorder, recorder.window, manager, parts[recorder.window.group])
    for name, changes in (("get_new_blocks", allocated), ("cache_full_blocks", cached), ("evict_blocks", evicted),
                       ("cache_partial_block", partly), ("move_block_hashes", moved)):
        if hasattr(pool, name):
            after(recorder, pool, name, changes)
    return True


def _watch_window(recorder: TapRecorder, window: MovingWindow, manager: Any, part: Any) -> None:
    """Record each move of a request's window, with the number of its leading blocks that are null blocks now.

    ``part`` is the part of the cache manager for this group. Its own method is not wrapped, because it runs for each
    request in each step and most often changes nothing."""
    def freed(_: Any, *__: Any, **___: Any) -> None:
        moved(None, _request_of_call())

    def moved(_: Any, request_id: str, *__: Any, **___: Any) -> None:
        blocks = part.req_to_blocks.get(request_id)
        if not blocks:
            return  # it has ended
        before = at = window.passed.get(request_id, 0)
        if at > len(blocks) or (at and not blocks[at - 1].is_null):  # the request has lost its blocks since
            at = 0
        while at < len(blocks) and blocks[at].is_null:
            at += 1
        if at != before:
            window.passed[request_id] = at
            recorder.put(("window", _now(), request_id, at))

    after(recorder, manager.block_pool, "free_blocks", freed)
    if hasattr(manager, _WINDOW_CALL):  # a request that ends gives back what its window has passed before it is sent
        after(recorder, manager, _WINDOW_CALL, moved)


def _request_of_call() -> str:
    """The request for which the engine calls the pool; empty if its method does not name it.

    The cache manager passes a request's id down to the method that calls the pool, and not to the pool. Its own methods
    are not wrapped, because they run for each request in each step; this runs for a new block."""
    frame: Any = sys._getframe(_CALLER)
    for _ in range(_CALLERS):
        if frame is None:
            break
        name = frame.f_locals.get("request_id")
        if name is not None:
            return str(name)
        frame = frame.f_back
    return ""


def after(recorder: TapRecorder, owner: Any, name: str, tell: Callable[..., None]) -> None:
    """Wrap ``owner.name``: while a daemon listens, ``tell`` gets its result and its arguments."""
    inside = getattr(owner, name)

    @functools.wraps(inside)
    def outside(*args: Any, **kwargs: Any) -> Any:
        result = inside(*args, **kwargs)
        if recorder.on:
            try:
                tell(result, *args, **kwargs)
            except Exception:
                recorder.failed()
        return result

    setattr(owner, name, outside)


def places_of(manager: Any) -> list[tuple[int, Any]] | None:
    """Every place of the pool that is in the prefix cache, with its hash; None if the engine does not give them."""
    blocks = getattr(getattr(manager, "block_pool", None), "blocks", None)
    if blocks is None:
        return None
    return [(block.block_id, block.block_hash) for block in blocks if block.block_hash is not None]


TAPPED: Final[dict[str, Callable[..., Any]]] = {
    tapped.__name__: tapped for tapped in (
        bind_kv_cache_manager, on_new_request, get_num_new_matched_tokens, update_state_after_alloc,
        build_connector_meta, update_connector_output, request_finished, request_finished_all_groups, take_events,
        reset_cache, shutdown,
    )
} | WORKER_CALLS
"""The calls that are recorded, by name."""
