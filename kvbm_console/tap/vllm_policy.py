"""Eviction policies for vLLM's own host tier, ``lrfu_auto`` and ``learned``, loaded by ``cache_policy_module_path``.

    "kv_connector_extra_config": {"cpu_bytes_to_use": 8e9, "eviction_policy": "LrfuAutoCachePolicy",
                                  "cache_policy_module_path": "kvbm_console.tap.vllm_policy"}

vLLM's manager asks a policy for the chunk of a key, and for the chunks to evict. It tells the policy of the keys that a
request loads and stores, in several calls. Ours need one call for each request, with its prompt in order. So the first
of vLLM's calls for a request takes the request's keys with their positions, which the scheduler has set by then. A key
that the request adds later, for example for its answer, is put beside the key before it.

Law of this file: a key has a chunk as long as the policy knows it as resident, and a chosen chunk has no reader.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, Final

from kvbm_console.core.eviction import auto
from kvbm_console.core.eviction.learned import Learned
from kvbm_console.tap.flatten import GROUP_BYTES

_base: Final[Any] = import_module("vllm.v1.kv_offload.cpu.policies.base")
SAMPLED_PLACES: Final = 8_192
"""Places of a shadow cache, or as near as the share of ``lrfu_auto`` allows. Below, chance decides between rules: with
1,142 places a load of 8,000 chunks was 1.8 points below LRU, with all 8,000 it is 0.4."""
_POSITIONS: Final = "_offload_key_positions"
"""vLLM's ``ReqContext`` has the positions of all keys here, and a public method for the position of one key."""


class Ranking(auto.LrfuAuto):
    """``lrfu_auto`` for a tier that stores a prompt from its beginning on."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, min(auto.SAMPLED_SHARE, max(1, capacity // SAMPLED_PLACES)))

    def _stamps_beside(self, keys: Sequence[int], beside: int) -> None:
        """Each key is older than the key before it, so a chain is evicted from its end."""
        stamps = self._stamp
        above = stamps[beside]
        for key in reversed(keys):
            above = stamps[key] = max(0, min(above - 1, stamps.get(key, above)))


class _Request:
    """The keys of a live request as numbers, in the order of the prompt."""

    __slots__ = ("at", "numbers", "owner")

    def __init__(self, owner: object, numbers: list[int]) -> None:
        self.owner = owner
        """The ranking that was told of the request; ``clear`` makes another."""
        self.numbers = numbers
        self.at = {number: at for at, number in enumerate(numbers)}

    def add(self, number: int) -> None:
        """A key behind the others."""
        if number not in self.at:
            self.at[number] = len(self.numbers)
            self.numbers.append(number)


class _RankedCachePolicy(_base.CachePolicy):  # type: ignore[misc]
    """The chunks of the host tier, and their order."""

    make_ranking: Callable[[int], Ranking | Learned]
    """The order of a tier of so many chunks."""

    def __init__(self, cache_capacity: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """``clock`` gives nanoseconds that never go backwards: the half-life of a use runs on it."""
        super().__init__(cache_capacity)
        self.clock = clock
        self._begin()

    def _begin(self) -> None:
        self.ranking = type(self).make_ranking(self.cache_capacity)
        self._chunks: dict[bytes, Any] = {}
        self._keys: dict[int, bytes] = {}
        """Number of a resident key to the key."""
        self._idle: set[int] = set()
        """Numbers of the chunks that no transfer reads or writes."""

    def _told(self, context: Any, keys: Iterable[bytes]) -> _Request:
        """The request, with these keys. Its first call is its use of its prompt."""
        request: _Request | None = context.get_state(_Request)
        if request is None or request.owner is not self.ranking:
            positions: dict[bytes, int] = getattr(context, _POSITIONS, {})
            ordered = sorted(positions, key=positions.__getitem__) or keys
            request = _Request(self.ranking, list(map(_number, ordered)))
            self.ranking.use(request.numbers, self.clock())
            context.set_state(request)
        return request

    # --- chunks ---

    def get(self, key: bytes) -> Any | None:
        """The chunk of a key; None without one."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any) -> None:
        """A chunk becomes resident, as old as the nearest key before it that is resident."""
        request, number = self._told(req_context, (key,)), _number(key)
        request.add(number)
        resident, numbers = self.ranking.resident, request.numbers
        at = request.at[number] - 1
        while at >= 0 and numbers[at] not in resident:
            at -= 1
        self.ranking.insert([number], numbers[at] if at >= 0 else None, self.clock())
        self._chunks[key], self._keys[number] = chunk, key
        if chunk.ref_cnt == 0:
            self._idle.add(number)

    def remove(self, key: bytes) -> None:
        """A store failed."""
        self._forget([_number(key)])

    def clear(self) -> None:
        """Forget every chunk and what was learnt."""
        self._begin()

    def _forget(self, numbers: list[int]) -> list[tuple[bytes, Any]]:
        self.ranking.forget(numbers)
        self._idle.difference_update(numbers)
        keys = [self._keys.pop(number) for number in numbers]
        return [(key, self._chunks.pop(key)) for key in keys]

    def mark_evictable(self, key: bytes) -> None:
        """Its last transfer has ended."""
        self._idle.add(_number(key))

    def mark_non_evictable(self, key: bytes) -> None:
        """A transfer reads it."""
        self._idle.discard(_number(key))

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """The ``n`` coldest idle chunks that are not protected, removed; None, and no change, if there are fewer."""
        numbers = {_number(key) for key in protected if key in self._chunks}
        victims = self.ranking.victims(n, self._idle.__contains__, numbers)
        return None if victims is None else self._forget(victims)

    # --- uses ---

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """A request uses these keys; what it has used counts once."""
        self._told(req_context, keys)

    on_store_miss = touch
    on_request_access = touch

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], insertion_only_keys: set[bytes], reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """The request has counted at its first call."""

    def gauges(self) -> dict[str, float]:
        """The choice of the policy and the evicted keys that it remembers, see ``gauges`` of its order."""
        return self.ranking.gauges()


class LrfuAutoCachePolicy(_RankedCachePolicy):
    """The chunks of the host tier, and their order by ``lrfu_auto`` (``kvbm_console.core.eviction.auto``)."""

    make_ranking = Ranking


class LearnedCachePolicy(_RankedCachePolicy):
    """The chunks of the host tier, and their order by ``learned`` (``kvbm_console.core.eviction.learned``)."""

    make_ranking = Learned


def _number(key: bytes) -> int:
    """The key as a number whose low digits are those of the hash: ``lrfu_auto`` samples by them."""
    return int.from_bytes(key[-GROUP_BYTES:] + key[:-GROUP_BYTES], "big")
