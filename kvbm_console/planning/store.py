"""``KVStore``: a device pool and a host tier behind the verbs of the vectors, in the compatibility configuration.

Law of this file: BC-3. An admission is a plan, which changes nothing, and a commit, which cannot fail; a refusal leaves
no trace. The prefix of a request never pays for its own reload.

The compatibility configuration: the vectors were observed on BLIS, which differs from our defaults on purpose.

* Released blocks all go to the end of the free order, even blocks without a hash (ours are reused first).
* A block carries its hash from its allocation on, not from the end of the iteration that fills the block.
* Of several copies of a block, a lookup names the newest.
* The host tier keeps a chain in prompt order, so it loses the head of a chain first (ours loses the tail first, I13).
* A transfer costs base + ceil(block size / bandwidth) for each block (ours for each transfer).
* Misses count every allocated block, even for decoding (ours count blocks of prompts). A hit may cover the whole prompt
  (ours leaves a token to compute), and then still claims its blocks.
* ``thrash_rate`` of the state is evictions / copies; ``real_thrash_rate`` is ours (BC-6).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.core.config import require
from kvbm_console.core.eviction.simple_lru import SimpleLru
from kvbm_console.core.ids import EMPTY_HASH
from kvbm_console.planning.options import COMPAT_BANDWIDTH, check, check_bandwidth, check_latency
from kvbm_console.simulator.device_pool import DevicePool
from kvbm_console.simulator.hashing import as_hash, blis_hash

THRASH_WINDOW_TICKS: Final = 1_000
"""A block that comes back within this time after its offload counts as thrash, the end excluded (BC-6)."""
SHOWN_HEX: Final = 12
"""Digits of a hash that a state shows."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in blocks and tokens, bandwidth in tokens per tick, latency in ticks; ``cpu_blocks`` 0 is a single tier."""

    gpu_blocks: int
    block_size: int
    cpu_blocks: int = 0
    bandwidth: float = COMPAT_BANDWIDTH
    base_latency: float = 0
    threshold: float = 0.0
    """Unused, because only ``mirror`` makes copies."""

    def __post_init__(self) -> None:
        require(self.gpu_blocks >= 1, "gpu_blocks", "at least 1", self.gpu_blocks)
        require(self.block_size >= 1, "block_size", "at least 1", self.block_size)
        check(self.cpu_blocks >= 0, "kv_cpu_blocks", "at least 0", self.cpu_blocks)
        if self.cpu_blocks or self.bandwidth != 0:  # without a host tier there is no link, so 0 is valid
            check_bandwidth(self.bandwidth)
        check_latency(self.base_latency)


class FifoPool(DevicePool):
    """The device pool in the compatibility order; ``tokens_in[b]`` are the tokens that block b holds."""

    def clear(self) -> None:
        """Return to the initial state."""
        super().clear()
        self.tokens_in = [0] * self.capacity_blocks

    def release(self, ids: Sequence[int]) -> None:
        """Remove a holder from each block, tail first. A block without holders goes to the end of the free order."""
        for block in reversed(ids):
            left = self._state[block] = self._state[block] - 1
            if left:
                self._count_shared([left + 1], -1)
            else:
                self._free += 1
                self._append(block)

    def _append(self, block: int) -> None:
        self._state[block] = ~(self._base + len(self._ring))
        self._ring.append(block)

    def store(self, ids: Sequence[int], hashes: Sequence[int]) -> None:
        """Give the blocks these hashes; lookups find the newest copy."""
        for block, sequence_hash in zip(ids, hashes, strict=True):
            older = self._index.pop(sequence_hash, None)
            super().store([block], [sequence_hash])
            if older is not None:
                self._copies.setdefault(sequence_hash, []).insert(0, older)

    def reload(self, hashes: Sequence[int], prefix: Sequence[int]) -> None:
        """Put these hashes into the next free places outside ``prefix``, which go to the end of the free order."""
        kept = set(prefix)
        places = [block for block in self.free_order() if block not in kept][: len(hashes)]
        for block, sequence_hash in zip(places, hashes, strict=True):
            if self.hash_of[block] != EMPTY_HASH:
                self._forget(block)
            self._state[block] = 1
            self.store([block], [sequence_hash])
            self._append(block)


class HostTier(SimpleLru):
    """The host tier in the compatibility order: the head of a chain is the oldest."""

    def touch(self, keys: Sequence[int], at_ns: int = 0) -> None:
        """Note the use of blocks in prompt order; the last block is the newest."""
        super().touch(keys[::-1], at_ns)


class _Plan(msgspec.Struct):
    """The steps of an allocation, which is carried out if its ``need`` fits."""

    claims: list[int]
    """Hashes of blocks to take a holder on, in prompt order."""
    reloads: list[int]
    """Hashes to copy up."""
    prefix: list[int]
    """Resident blocks of the chain, which must not make room."""
    tokens: list[int]
    """Tokens to write after the claims."""
    need: int
    """Free places that the allocation takes."""


class KVStore:
    """A tiered cache by the verbs of the vectors. Counts are in blocks; ticks are 1 us.

    >>> store = KVStore(StoreConfig(gpu_blocks=4, block_size=2))
    >>> store.admit("a", [1, 2, 3]), store.lookup([1, 2, 9, 9])
    (([], 0, 3, True), [0])
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.pool = FifoPool(config.gpu_blocks)
        self.host = HostTier()
        self.requests: dict[str, list[int]] = {}
        self.tokens_of: dict[str, list[int]] = {}
        """The tokens that stand in the blocks of each request."""
        self.hits = self.misses = 0
        self.host_hits = self.mirrored = self.host_evictions = self.thrashed = 0
        self._pending: float = 0
        self._clock = 0
        self._stored_at: dict[int, int] = {}
        """Hash in the host tier to the clock at its offload."""
        self._hex: dict[int, str] = {}

    # --- questions ---

    def lookup(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest resident prefix of whole blocks. Changes nothing."""
        return self.pool.match([key for key, _ in self._chain(tokens)])

    def pending(self) -> float:
        """Ticks of transfers that no step was charged for. Reading changes nothing (BC-4)."""
        return self._pending

    @property
    def real_thrash_rate(self) -> float | None:
        """Blocks that came back within the window, for each offloaded block; None before any offload (BC-6)."""
        return rate(self.thrashed, self.mirrored)

    # --- verbs ---

    def admit(
        self, request: str, tokens: Sequence[int], chunk: int = 0, output: Sequence[int] = (),
    ) -> tuple[list[int], int, int, bool]:
        """Look up and allocate the next ``chunk`` tokens, all for 0. Returns (prefix hit, start, end, admitted)."""
        cached = self.lookup(tokens)
        start = len(cached) * self.config.block_size
        rest = len(tokens) - start
        end = start + (min(rest, chunk) if chunk else rest)
        return cached, start, end, self.allocate(request, tokens, start, end, cached)

    def allocate(
        self, request: str, tokens: Sequence[int], start: int, end: int, cached: Sequence[int] = (),
    ) -> bool:
        """Allocate blocks for prompt tokens from ``start`` to ``end``. A refusal is False and changes nothing."""
        plan = self._plan(request, tokens, start, end, cached)
        if plan.need > self.pool.free_blocks:
            return False
        self._commit(request, tokens, plan)
        return True

    def decode(self, request: str, token: int) -> bool:
        """Allocate a place for another token. A refusal is False and changes nothing."""
        plan = _Plan([], [], [], [token], self._new_blocks(request, 1))
        if plan.need > self.pool.free_blocks:
            return False
        self._commit(request, [*self.tokens_of.get(request, ()), token], plan)
        return True

    def release(self, request: str) -> None:
        """End a request; its blocks keep their content. An unknown request is ignored."""
        self.tokens_of.pop(request, None)
        self.pool.release(self.requests.pop(request, []))

    def mirror(self, requests: Sequence[str]) -> None:
        """Offload the full blocks of these requests, and touch blocks that the host tier has (BC-2, BC-10)."""
        if not self.config.cpu_blocks:
            return
        for request in requests:
            for block in self.requests.get(request, ()):
                key = self.pool.hash_of[block]
                if key == EMPTY_HASH:
                    continue
                if key not in self.host.resident:
                    self._make_room()
                    self.mirrored += 1
                    self._stored_at[key] = self._clock
                self.host.touch([key])

    def _make_room(self) -> None:
        if len(self.host.resident) >= self.config.cpu_blocks:
            for victim in self.host.victims(1) or ():
                self.host.forget([victim])
                del self._stored_at[victim]
                self.host_evictions += 1

    def clock(self, ticks: int) -> None:
        """Set the clock."""
        self._clock = ticks

    def consume(self) -> float:
        """The pending ticks, which are now charged to a step."""
        pending, self._pending = self._pending, 0
        return pending

    # --- plan and commit ---

    def _chain(self, tokens: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Hash of each whole block of the tokens, as our number and as hex."""
        size, previous = self.config.block_size, ""
        for at in range(0, len(tokens) - size + 1, size):
            previous = blis_hash(previous, tokens[at : at + size])
            key = as_hash(bytes.fromhex(previous))
            self._hex[key] = previous
            yield key, previous

    def _new_blocks(self, request: str, tokens: int) -> int:
        """Blocks needed for more tokens, the room in the last block taken into account."""
        size = self.config.block_size
        held = len(self.tokens_of.get(request, ()))
        room = len(self.requests.get(request, ())) * size - held
        return -(-max(0, tokens - room) // size)

    def _plan(self, request: str, tokens: Sequence[int], start: int, end: int, cached: Sequence[int]) -> _Plan:
        size = self.config.block_size
        owned = self.requests.get(request)
        held = len(self.tokens_of.get(request, ()))
        start = max(start, held)
        chain = [key for key, _ in self._chain(tokens)]
        resident = self.pool.match
        prefix = [block for key in chain for block in resident([key])]
        # A running request fills the block that it has begun, so no block is loaded after it.
        reloads = [] if held % size else self._continuation(chain, max(len(cached), len(owned or ())), prefix)
        known = set(reloads)
        reached = 0
        while reached < len(chain) and (chain[reached] in known or resident([chain[reached]])):
            reached += 1
        if reloads and reached * size > start:
            last = min(-(-end // size), reached)
            claims = chain[-(-start // size) if owned is not None else 0 : last]
            fresh = list(tokens[reached * size : end])
        else:
            claims = [] if owned is not None else chain[: len(cached)]
            fresh = list(tokens[start:end])
        taken = sum(1 for key in claims if key in known or not self.pool.holders(resident([key])[0]))
        return _Plan(claims, reloads, prefix, fresh, taken + self._new_after(request, len(claims), len(fresh)))

    def _new_after(self, request: str, claims: int, tokens: int) -> int:
        return -(-tokens // self.config.block_size) if claims else self._new_blocks(request, tokens)

    def _continuation(self, chain: Sequence[int], first: int, prefix: Sequence[int]) -> list[int]:
        """Hashes of the host tier that continue the chain after its first blocks, as far as there are places."""
        room = self.pool.free_blocks - sum(1 for block in prefix if not self.pool.holders(block))
        hits: list[int] = []
        for key in chain[first:]:
            if self.pool.match([key]):
                continue
            if key not in self.host.resident or len(hits) >= room:
                break
            hits.append(key)
        return hits

    def _commit(self, request: str, tokens: Sequence[int], plan: _Plan) -> None:
        if plan.reloads:
            self.pool.reload(plan.reloads, plan.prefix)
            self._charge(plan.reloads)
        if not (plan.claims or plan.tokens):
            return
        blocks = self.requests.setdefault(request, [])
        written = self.tokens_of.setdefault(request, [])
        claimed = [self.pool.match([key])[0] for key in plan.claims]
        self.pool.touch(claimed)
        self.hits += len(claimed)
        blocks += claimed
        written += tokens[len(written) : len(written) + len(claimed) * self.config.block_size]
        for block in claimed:
            self.pool.tokens_in[block] = self.config.block_size
        self._write(blocks, written, plan.tokens)

    def _charge(self, reloads: Sequence[int]) -> None:
        for key in reloads:
            self._pending += transfer_ticks(1, self.config.block_size, self.config.bandwidth, self.config.base_latency)
            self.host.touch([key])
            self.host_hits += 1
            self.thrashed += self._clock - self._stored_at[key] < THRASH_WINDOW_TICKS

    def _write(self, blocks: list[int], written: list[int], tokens: Sequence[int]) -> None:
        """Append tokens, to the last block while it has room, then to new blocks."""
        size, pool = self.config.block_size, self.pool
        at = 0
        while at < len(tokens):
            if len(blocks) * size == len(written):
                new = pool.allocate(1)
                assert new is not None, "the plan fitted"
                blocks += new
                pool.tokens_in[new[0]] = 0
                self.misses += 1
            part = tokens[at : at + len(blocks) * size - len(written)]
            at += len(part)
            written += part
            pool.tokens_in[blocks[-1]] += len(part)
            if len(blocks) * size == len(written):
                pool.store(blocks[-1:], [list(self._chain(written))[-1][0]])

    # --- the state that vectors compare ---

    def state(self, *, compatible: bool = True) -> dict[str, Any]:
        """The whole state in the form of the vectors; ``compatible`` False shows the real thrash rate."""
        pool = self.pool
        tiered = self.config.cpu_blocks > 0
        blocks = [
            {"id": block, "ref": pool.holders(block), "hash": self._shown(pool.hash_of[block]),
             "ntok": pool.tokens_in[block]}
            for block in range(self.config.gpu_blocks) if pool.holders(block) or pool.hash_of[block] != EMPTY_HASH
        ]
        thrash = blis_eviction_rate(self.host_evictions, self.mirrored)
        state: dict[str, Any] = {
            "used": self.config.gpu_blocks - pool.free_blocks, "free": pool.free_blocks,
            "total": self.config.gpu_blocks, "hits": self.hits, "misses": self.misses,
            "hit_rate": blis_cache_hit_rate(self.hits, self.misses),
            "thrash_rate": thrash if compatible else self.real_thrash_rate or 0.0, "pending": self._pending,
            "free_list": pool.free_order(), "requests": {name: list(ids) for name, ids in self.requests.items()},
            "blocks": blocks, "hash_entries": len({*pool.hash_of} - {EMPTY_HASH}),
        }
        if tiered:
            state |= {
                "cpu_used": len(self.host.resident), "cpu_capacity": self.config.cpu_blocks,
                "cpu_lru": [self._shown(key) for key in self.host.export()], "cpu_hits": self.host_hits,
                "cpu_misses": 0, "mirrored": self.mirrored, "cpu_evictions": self.host_evictions,
            }
        return state

    def _shown(self, key: int) -> str:
        return "" if key == EMPTY_HASH else self._hex[key][:SHOWN_HEX]


# --- formulas: a rate without a whole is 0 if the name begins with ``blis_``, otherwise None ---


def rate(part: float, whole: float) -> float | None:
    """``part / whole``, None if the whole is 0.

    >>> rate(2, 5), rate(0, 0)
    (0.4, None)
    """
    return part / whole if whole else None


def blis_cache_hit_rate(hits: int, misses: int) -> float:
    """hits / (hits + misses), 0 before any lookup."""
    return rate(hits, hits + misses) or 0.0


def blis_preemption_rate(preemptions: Sequence[int], completed: int) -> float:
    """Preemption events of all instances per completed request; may exceed 1."""
    return rate(sum(preemptions), completed) or 0.0


def blis_cache_hit_rate_mean(rates: Sequence[float]) -> float:
    """The unweighted mean over instances."""
    return rate(sum(rates), len(rates)) or 0.0


def blis_eviction_rate(evictions: int, mirrored: int) -> float:
    """Evictions of the host tier for each block copied to the tier, which that program calls thrashing."""
    return rate(evictions, mirrored) or 0.0


def transfer_ticks(blocks: int, block_size: int, bandwidth: float, base_latency: float) -> float:
    """Ticks of a transfer (BC-4): base + ceil(blocks x block size / bandwidth), bandwidth in tokens per tick."""
    check_bandwidth(bandwidth)
    check_latency(base_latency)
    return base_latency + math.ceil(blocks * block_size / bandwidth)


VECTORS: Final[dict[str, Callable[..., Any]]] = {
    "cache_hit_rate": blis_cache_hit_rate,
    "preemption_rate": lambda per_instance_preemptions, completed: blis_preemption_rate(
        per_instance_preemptions, completed
    ),
    "cluster_cache_hit_rate_unweighted_mean": lambda per_instance: blis_cache_hit_rate_mean(per_instance),
    "transfer_ticks_per_block": lambda block_size, bandwidth, base: transfer_ticks(1, block_size, bandwidth, base),
    "cpu_eviction_rate": blis_eviction_rate,
}
"""Name of a metric in a file of vectors to its formula here; arguments by name."""
