"""Facts that no call of a connector tells: blocks of an engine's other groups, and resets of its prefix cache.

A hybrid model keeps several groups of blocks in one pool of places. A connector hears of blocks that a request got, and
not which of them are in the prefix cache under which hash. So methods of the engine's own cache manager and block pool
are wrapped, each on the single object that the engine has. Their results go back unchanged.

Law of this file: the wrapped method runs first, always and with its own arguments. An error of ours is counted.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from kvbm_console.tap.recorder import TapRecorder

_now = time.monotonic_ns
_CALLS: Final = ("allocate_slots",)
_POOL_CALLS: Final = ("get_new_blocks", "cache_full_blocks", "evict_blocks")
"""Without these the groups cannot be followed."""


def record_resets(recorder: TapRecorder, manager: Any) -> None:
    """Tell when the engine forgets its prefix cache, and the requests that it preempts for that."""
    def forgot(done: Any, *_: Any, **__: Any) -> None:
        if done is not False:
            preempted = [name for name, one in recorder.live.items() if getattr(one.status, "name", "") == "PREEMPTED"]
            recorder.put(("cleared", _now(), preempted))

    if hasattr(manager, "reset_prefix_cache"):
        _after(recorder, manager, "reset_prefix_cache", forgot)


def record_places(recorder: TapRecorder, manager: Any) -> bool:
    """Tell which places of the pool are given out, for whom, and under which hash they are cached. False: it has other
    methods than those that are known."""
    pool = getattr(manager, "block_pool", None)
    if not all(hasattr(manager, name) for name in _CALLS) or not all(hasattr(pool, name) for name in _POOL_CALLS):
        return False
    blocks = pool.blocks  # type: ignore[union-attr]

    def told(changed: Iterable[Any]) -> None:
        recorder.put(("pool", _now(), recorder.allocating, [(one.block_id, one.block_hash) for one in changed]))

    def given(new: Any, *_: Any, **__: Any) -> None:
        told(new)

    def cached(_: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *__: Any,
               **___: Any) -> None:
        if num_cached_blocks < num_full_blocks:
            told([one for one in blocks[num_cached_blocks:num_full_blocks] if one.block_hash is not None])

    def evicted(_: Any, block_ids: Any) -> None:
        told([blocks[place] for place in block_ids])

    def partly(_: Any, request: Any, block: Any, *__: Any, **___: Any) -> None:
        told([] if block.is_null else [block])

    def moved(_: Any, src_block: Any, dst_block: Any) -> None:
        told([src_block, dst_block])

    _around_allocations(recorder, manager)
    for name, tell in (("get_new_blocks", given), ("cache_full_blocks", cached), ("evict_blocks", evicted),
                       ("cache_partial_block", partly), ("move_block_hashes", moved)):
        if hasattr(pool, name):
            _after(recorder, pool, name, tell)
    return True


def _after(recorder: TapRecorder, owner: Any, name: str, tell: Callable[..., None]) -> None:
    """``owner.name`` goes on as it is; while a daemon listens, ``tell`` gets its result and its arguments."""
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


def _around_allocations(recorder: TapRecorder, manager: Any) -> None:
    inside = manager.allocate_slots

    @functools.wraps(inside)
    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.allocating = request.request_id
        try:
            return inside(request, *args, **kwargs)
        finally:
            recorder.allocating = ""

    manager.allocate_slots = allocate_slots


def places_of(manager: Any) -> list[tuple[int, Any]] | None:
    """Every place of the pool that is in the prefix cache, with its hash; None when the engine does not say."""
    blocks = getattr(getattr(manager, "block_pool", None), "blocks", None)
    if blocks is None:
        return None
    return [(one.block_id, one.block_hash) for one in blocks if one.block_hash is not None]
