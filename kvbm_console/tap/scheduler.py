"""The tap at the engine's scheduler: the engine's own scheduler, cache manager and connector are observed as they are.

The scheduler sees more than a connector does, and it is there without a connector. We wrap single methods on the
objects that the engine has made, so every class, name and special case of the engine stays.

    scheduler.add_request                       a request waits, from its arrival
    scheduler._handle_blocked_waiting_request   a held request is passed over in this step
    cache_manager.get_computed_blocks           a lookup without a connector
    scheduler._update_after_schedule            a step is formed, and its tokens are not counted yet
    scheduler._free_request                     a request ended
    connector.get_num_new_matched_tokens, update_state_after_alloc, update_connector_output, take_events, reset_cache:
        as in ``connector``

Law of this file: a wrapped method gets the engine's arguments and gives the engine's result. The one exception is a
held request, which is not ready yet.
"""

import functools
import time
from types import SimpleNamespace
from typing import Any, Final

from kvbm_console.tap.connector import (
    TAPPED,
    after,
    arrived,
    ended,
    formed,
    named_blocks,
    record_places,
    record_resets,
)
from kvbm_console.tap.sender import Sender

_now = time.monotonic_ns
NEEDED: Final = ("add_request", "_update_after_schedule", "_free_request", "shutdown")
"""Methods of a scheduler without which it cannot be observed."""
READY: Final = "_handle_blocked_waiting_request"
"""The scheduler asks this method whether a waiting request may start in this step."""
_OF_CONNECTOR: Final = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "update_connector_output", "take_events", "reset_cache",
)


class SchedulerTap:
    """The wrapped methods of one scheduler, with the state that the recorded calls of ``connector`` keep on a tap."""

    def __init__(self, sender: Sender, scheduler: Any, *, events_are_ours: bool = False) -> None:
        self.sender = sender
        self._recorder = recorder = sender.recorder
        self._scheduler = scheduler
        self._kv_cache_manager = scheduler.kv_cache_manager
        self._events_are_ours = events_are_ours
        self._marker = None
        self._tapped = SimpleNamespace()
        """The connector's own methods, by name."""
        record_resets(recorder, self._kv_cache_manager)
        recorder.places_known = record_places(recorder, self._kv_cache_manager)
        self._wrap("add_request", self._add_request)
        self._wrap("_update_after_schedule", self._update_after_schedule)
        self._wrap("_free_request", self._free_request)
        self._wrap("shutdown", self._shutdown)
        self.holds = hasattr(scheduler, READY)
        """True if a single request can be held."""
        if self.holds:
            self._wrap(READY, self._ready)
        connector = getattr(scheduler, "connector", None)
        if connector is None:
            after(recorder, self._kv_cache_manager, "get_computed_blocks", self._looked_up)
        else:
            self._observe(connector)

    def _wrap(self, name: str, outside: Any) -> None:
        inside = getattr(self._scheduler, name)
        setattr(self._scheduler, name, functools.wraps(inside)(functools.partial(outside, inside)))

    def _observe(self, connector: Any) -> None:
        for name in _OF_CONNECTOR:
            if hasattr(connector, name):
                inside = getattr(connector, name)
                setattr(self._tapped, name, inside)
                setattr(connector, name, functools.wraps(inside)(functools.partial(TAPPED[name], self)))
        self.holds = True

    # --- the scheduler's methods: ``inside`` is the engine's own ---

    def _add_request(self, inside: Any, request: Any) -> Any:
        answer = inside(request)
        recorder = self._recorder
        with recorder.part:
            if request.request_id not in recorder.live:  # else a session goes on
                arrived(recorder, request)
        return answer

    def _ready(self, inside: Any, request: Any) -> bool:
        ready = bool(inside(request))
        recorder = self._recorder
        if ready and recorder.gated and not request.num_computed_tokens:
            try:
                return not recorder.must_wait(request.request_id, 0)
            except Exception:
                recorder.failed()
        return ready

    def _update_after_schedule(self, inside: Any, scheduler_output: Any) -> Any:
        recorder = self._recorder
        with recorder.part as began:
            formed(recorder, began, scheduler_output, self._kv_cache_manager)
        return inside(scheduler_output)

    def _free_request(self, inside: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        named: tuple[int, ...] = ()
        with recorder.part:
            manager = self._kv_cache_manager
            named = named_blocks(manager, request, manager.get_block_ids(request.request_id))
        answer = inside(request, *args, **kwargs)
        with recorder.part as began:
            # A load that is on its way keeps the blocks, too, and ``update_connector_output`` reports its end.
            loading = bool(args[0] if args else kwargs.get("delay_free_blocks"))
            delayed = not loading and request.request_id in self._scheduler.requests
            ended(recorder, began, request, delayed, named)
        return answer

    def _shutdown(self, inside: Any) -> Any:
        self._recorder.ending = True
        return inside()

    # --- the cache manager's methods, after they have run ---

    def _looked_up(self, answer: Any, request: Any, *_: Any, **__: Any) -> None:
        recorder, name = self._recorder, request.request_id
        fields = (answer[1], 0, False)
        if recorder.answers.get(name) != fields:
            recorder.answers[name] = fields
            recorder.put(("lookup", _now(), name, *fields))


def missing_methods(kind: type) -> list[str]:
    """Names of the methods that a scheduler class lacks."""
    return [name for name in NEEDED if not hasattr(kind, name)]
