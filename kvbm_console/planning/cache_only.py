"""Policies without an engine: prefix lookups and inserts alone, as the literature on eviction measures policies.

A trace becomes ``References``: the blocks that each prompt names. ``replay`` (``--cache-only``) sends them through one
pool. A request is atomic: its lookup precedes any change, and then all of its blocks are inserted, tail first. After
that the policy evicts down to the capacity. A hit is a block in the leading run of resident blocks. Unlike in an
engine, a partial last block counts, and no last token is kept back for computing.

For example, a pool of 3 blocks sees the prompts ``[1, 2]``, ``[3]``, ``[4]`` and ``[1, 2]``. ``simple_lru`` gives up
block 2, the tail of the oldest prompt, so the last prompt has one hit. ``Belady`` knows the last prompt: it gives up
block 3, and the last prompt has two hits.

``bound_of`` is the reference beside a simulated machine: ``Belady`` over one pool as large as all tiers together. This
policy knows the whole trace, and costs nothing: no time passes, and no block is held or copied. The machine may still
have more hits, because admissions have another order than arrivals.
A hit of ``bound_of`` counts as in the machine: full blocks of the prompt, with one token left to compute. Generated
blocks are stored too, and a request that the device can never hold is left out.

Law of this file: the policy never gives up a block of the request that it serves.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from itertools import count as numbers
from typing import Any, Final

import msgspec

from kvbm_console.core.config import require
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction import make_policy
from kvbm_console.core.eviction.policy import POLICIES, EvictionPolicy, PolicyConfig
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.traces import note_of
from kvbm_console.simulator.hashing import TRACE_BLOCK_TOKENS
from kvbm_console.simulator.traces import MILLISECOND_NS, MooncakeTrace, PromptLine
from kvbm_console.simulator.workloads import Request, Workload

COMPARED: Final = (*POLICIES, "belady")
"""Policies that a replay can use: the whole trace is known, so the optimal bound is among them."""
PROGRESS_REQUESTS: Final = 512
"""Requests between two calls of ``progress``: a few milliseconds."""

# --- references ---


class References(msgspec.Struct, frozen=True):
    """``keys[i]`` are the blocks that request i names, in prompt order, at ``at_ns[i]``, which never goes backwards."""

    trace: str
    block_tokens: int
    names: Sequence[str]
    at_ns: Sequence[int]
    keys: Sequence[Sequence[int]]
    note: str | None = None

    @property
    def total(self) -> int:
        """All references: the denominator of the hit rate."""
        return sum(map(len, self.keys))


def references_of(workload: Workload, block_tokens: int | None = None) -> References:
    """The references of a workload; ``block_tokens`` is the block of workloads without their own unit.

    Raises ``UsageError`` with file, line and error, and for a workload that never ends.
    """
    if isinstance(workload, MooncakeTrace):
        return _mooncake(workload)
    if workload.endless:
        raise UsageError(f"{workload.name} never ends; say how many requests with --limit")
    return _generated(workload, block_tokens or workload.capacities.block_tokens)


def _mooncake(trace: MooncakeTrace) -> References:
    at_ns: list[int] = []
    keys: list[list[int]] = []
    for _, line in trace.lines(PromptLine):
        at_ns.append(round(line.timestamp * MILLISECOND_NS))
        keys.append(line.hash_ids)
    names = [f"r{index:05d}" for index in range(len(keys))]
    return References(trace.name, TRACE_BLOCK_TOKENS, names, at_ns, keys)


def _generated(workload: Workload, block_tokens: int) -> References:
    requests = list(in_order(workload, block_tokens))
    return References(
        workload.name, block_tokens, [request.request for request in requests],
        [request.arrival_ns for request in requests], [request.hashes for request in requests], note_of(workload),
    )


def in_order(workload: Workload, block_tokens: int) -> Iterator[Request]:
    """The requests of a workload by arrival, as if answers took no time."""
    workload.begin(block_tokens)
    order = numbers()
    arrivals = workload.arrivals()
    coming: list[tuple[int, int, Request]] = []
    following = next(arrivals, None)
    while following is not None or coming:
        if following is not None and (not coming or following.arrival_ns <= coming[0][0]):
            request, following = following, next(arrivals, None)
        else:
            request = heapq.heappop(coming)[2]
        yield request
        later = workload.finished(request, request.arrival_ns)
        if later is not None:
            heapq.heappush(coming, (later.arrival_ns, next(order), later))


# --- the optimal policy ---

_DEPTH_BITS: Final = 24
"""A rank is -(next use, depth) as one number, because numbers compare faster. No prompt has 16 million blocks."""
_SLACK: Final = 5_000
"""Dead heap entries that are kept before the heap is rebuilt, in addition to three for each resident block."""


class Belady:
    """The optimal policy for a known sequence of touches.

    ``future`` has the keys of every coming touch, in order; ``touch`` must be called with exactly these keys.

    >>> policy = Belady([[1, 2], [3], [1]])
    >>> policy.touch([1, 2], 0); policy.touch([3], 1)
    >>> policy.victims(2)
    [2, 3]
    """

    name = "belady"

    def __init__(self, future: Sequence[Sequence[int]]) -> None:
        never = len(future)
        following: dict[int, int] = {}
        self._next_of: list[list[int]] = []
        """For each touch, the number of the next touch of each of its keys."""
        for number in range(len(future) - 1, -1, -1):
            keys = future[number]
            self._next_of.append([following.get(key, never) for key in keys])
            following.update(dict.fromkeys(keys, number))
        self._next_of.reverse()
        self._touches = 0
        self._rank: dict[int, int] = {}
        """Resident key to its rank."""
        self._heap: list[tuple[int, int]] = []
        """(rank, key)"""
        self._offered: list[tuple[int, int]] = []
        """Entries of the last victims, which go back into the heap unless the victims were forgotten meanwhile."""

    @property
    def resident(self) -> KeysView[int]:
        """The resident keys."""
        return self._rank.keys()

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """The next touch of the known future."""
        ranks, heap = self._rank, self._heap
        for depth, (key, following) in enumerate(zip(keys, self._next_of[self._touches], strict=True)):
            rank = ranks[key] = -(following << _DEPTH_BITS | depth)
            heapq.heappush(heap, (rank, key))
        self._touches += 1
        if len(heap) > 3 * len(ranks) + _SLACK:
            self._rebuild()

    def forget(self, keys: Iterable[int]) -> None:
        """Remove evicted keys."""
        for key in keys:
            self._rank.pop(key, None)

    def _rebuild(self) -> None:
        self._heap = [(rank, key) for key, rank in self._rank.items()]
        heapq.heapify(self._heap)
        self._offered = []

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` keys that are used again last, farthest first; None when there are fewer."""
        heap, ranks = self._heap, self._rank
        for entry in self._offered:
            if ranks.get(entry[1]) == entry[0]:
                heapq.heappush(heap, entry)
        self._offered = offered = []
        kept: list[tuple[int, int]] = []
        chosen: dict[int, None] = {}
        while len(chosen) < count and heap:
            entry = heapq.heappop(heap)
            key = entry[1]
            if ranks.get(key) != entry[0] or key in chosen:
                continue
            if key in protected or (evictable is not None and not evictable(key)):
                kept.append(entry)
            else:
                offered.append(entry)
                chosen[key] = None
        for entry in kept:
            heapq.heappush(heap, entry)
        return list(chosen) if len(chosen) >= count else None

    def gauges(self) -> dict[str, float]:
        """Empty: the policy has no gauges of its own."""
        return {}

    def export(self) -> Any:
        """The number of touches so far, and the resident keys in the order of eviction."""
        return {"touches": self._touches, "resident": sorted([rank, key] for key, rank in self._rank.items())}

    def restore(self, exported: Any) -> None:
        """Restore an exported state over the same future."""
        self._touches = exported["touches"]
        self._rank = {key: rank for rank, key in exported["resident"]}
        self._rebuild()


# --- replays ---


class CacheOnlyResult(msgspec.Struct, frozen=True):
    """The counts of a replay. Counts are blocks in the trace's own unit unless the name says requests."""

    policy: str
    capacity_blocks: int
    requests: int
    references: int
    hits: int
    evicted_blocks: int
    cut_requests: int
    """Requests with more blocks than the pool, of which only the leading blocks that fit are inserted."""
    gauges: dict[str, float]
    hits_of: list[int]
    """Hits of each request."""

    @property
    def hit_rate(self) -> float:
        """Hits per reference, 0 without references."""
        return self.hits / self.references if self.references else 0.0


def policy_named(name: str, parameters: PolicyConfig, capacity: int, references: References) -> EvictionPolicy:
    """The policy of this name for these references; ``belady`` gets their future."""
    require(name in COMPARED, "policy", f"one of {', '.join(COMPARED)}", name)
    if name == "belady":
        return Belady([keys[:capacity] for keys in references.keys])
    return make_policy(msgspec.structs.replace(parameters, policy=name), capacity)


class Miss(msgspec.Struct, frozen=True):
    """The first missed block of a request, and the request that it was evicted for (None: never stored)."""

    block: int
    evicted_for: int | None


def replay(
    references: References, policy: EvictionPolicy, capacity: int, *, progress: Callable[[int], None] | None = None,
    misses: list[Miss | None] | None = None, lookups: Sequence[Sequence[int]] | None = None,
) -> CacheOnlyResult:
    """Replay all references through a pool of ``capacity`` blocks; ``progress`` is called with the requests done.

    ``misses`` gets an entry for each request, None if every block was found. ``lookups`` are the keys that requests
    look up, if these are not all keys that they insert.
    """
    require(capacity >= 1, "--total-kv-blocks", "at least 1", capacity)
    hits_of: list[int] = []
    evicted = cut = 0
    evicted_for: dict[int, int] = {}
    touch, victims_of, forget = policy.touch, policy.victims, policy.forget
    requests = zip(references.at_ns, references.keys, lookups or references.keys, strict=True)
    for number, (at_ns, keys, wanted) in enumerate(requests):
        resident = policy.resident
        found = 0
        for key in wanted:
            if key not in resident:
                break
            found += 1
        hits_of.append(found)
        if misses is not None:
            misses.append(None if found == len(keys) else Miss(found, evicted_for.get(keys[found])))
        if len(keys) > capacity:
            keys = keys[:capacity]
            cut += 1
        touch(keys, at_ns)
        excess = len(policy.resident) - capacity
        if excess > 0:
            victims = victims_of(excess, None, set(keys))
            assert victims is not None, "a request that fits leaves enough others"
            evicted += excess
            forget(victims)
            if misses is not None:
                evicted_for.update(dict.fromkeys(victims, number))
        if progress is not None and not number % PROGRESS_REQUESTS:
            progress(number)
    return CacheOnlyResult(
        policy.name, capacity, len(hits_of), references.total, sum(hits_of), evicted, cut, policy.gauges(),
        hits_of,
    )


def request_blocks(prompt_tokens: int, output_tokens: int, block_tokens: int) -> int:
    """Device blocks that a request needs at its end; the last generated token needs no place."""
    return -(-(prompt_tokens + output_tokens - 1) // block_tokens)


def bound_of(workload: Workload, options: SimulateOptions) -> tuple[list[str], list[int], list[int], int]:
    """Names, hits and prompt blocks of the requests, and the blocks evicted."""
    capacity = options.total_kv_blocks + options.kv_cpu_blocks + options.kv_disk_blocks
    size = options.block_size
    requests = [
        request for request in in_order(workload, size)
        if request_blocks(request.prompt_tokens, request.output_tokens, size) <= options.total_kv_blocks
    ]
    names = [request.request for request in requests]
    stored = [(request.hashes + request.output_hashes)[:capacity] for request in requests]
    result = replay(
        References(workload.name, size, names, [request.arrival_ns for request in requests], stored), Belady(stored),
        capacity, lookups=[request.hashes[: (request.prompt_tokens - 1) // size] for request in requests],
    )
    return names, result.hits_of, [len(request.hashes) for request in requests], result.evicted_blocks


# --- the document ---

SCHEMA: Final = "kvbm-console.cache-only/1"

KEYS: Final[dict[str, str]] = {
    "schema": "name and version of this document",
    "trace": "the trace as named on the command line",
    "note": "limits of the trace that the reader should know, else null",
    "counting": "the rule by which references and hits count here",
    "block_tokens": "tokens of a block, the trace's own unit",
    "policy": "policy and its gauges",
    "capacity_blocks": "places of the pool",
    "requests": "requests replayed",
    "references": "blocks of all prompts",
    "hits": "blocks in the leading run of resident blocks of their prompt",
    "prefix_hit_rate": "hits / references, null without references",
    "evicted_blocks": "blocks that the policy gave up",
    "cut_requests": "requests with more blocks than places, of which only the leading ones were inserted",
}
"""Key of the JSON document to its definition, in order."""

COUNTING: Final = (
    "all blocks of a prompt count, a partial last one included and none kept back for computing, unlike in an engine"
)


def document_of(references: References, result: CacheOnlyResult) -> dict[str, Any]:
    """The JSON document, with the keys of ``KEYS``."""
    values = {
        "schema": SCHEMA, "trace": references.trace, "note": references.note, "counting": COUNTING,
        "block_tokens": references.block_tokens, "policy": {"policy": result.policy, "gauges": result.gauges},
        "capacity_blocks": result.capacity_blocks, "requests": result.requests, "references": result.references,
        "hits": result.hits, "prefix_hit_rate": result.hit_rate if result.references else None,
        "evicted_blocks": result.evicted_blocks, "cut_requests": result.cut_requests,
    }
    return {key: values[key] for key in KEYS}


def text_of(document: Mapping[str, Any]) -> str:
    """The document as aligned lines."""
    gauges = ", ".join(f"{name} {value:g}" for name, value in document["policy"]["gauges"].items())
    rate = document["prefix_hit_rate"]
    rows = [
        ("trace", document["trace"] + (f" ({document['note']})" if document["note"] else "")),
        ("pool", f"{document['capacity_blocks']:,} blocks of {document['block_tokens']} tokens"),
        ("policy", document["policy"]["policy"] + (f" ({gauges})" if gauges else "")),
        ("prefix hits", f"{'–' if rate is None else f'{100 * rate:.2f} %'}, {document['hits']:,} of "
                        f"{document['references']:,} references of {document['requests']:,} requests"),
        ("evicted", f"{document['evicted_blocks']:,} blocks"),
        ("counting", document["counting"]),
    ]
    if document["cut_requests"]:
        rows.append(("cut", f"{document['cut_requests']:,} requests with more blocks than the pool"))
    return "\n".join(f"{name:<12} {words}" for name, words in rows)
