"""``--cache-only``: prefix lookups and inserts alone, in one pool, as the literature on eviction measures.

Law of this file: requests are atomic and in order. A hit is a block in the leading run of resident blocks, probed
before any change; then every block of the request is touched or inserted, tail first; then the policy evicts down to
the capacity, never a block of this request. Nothing is left out at the end of a prompt: unlike in an engine, a partial
last block counts, and no last token is kept back for computing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvbm_console.core.config import require
from kvbm_console.core.eviction import make_policy
from kvbm_console.core.eviction.policy import POLICIES, EvictionPolicy, PolicyConfig
from kvbm_console.planning.belady import Belady
from kvbm_console.planning.references import References

COMPARED: Final = (*POLICIES, "belady")
"""Policies that a replay can use: the whole trace is known, so the optimal bound is one of them."""
PROGRESS_REQUESTS: Final = 512
"""Requests between two calls of ``progress``: a few milliseconds."""


class CacheOnlyResult(msgspec.Struct, frozen=True):
    """What one replay found. Counts are blocks in the trace's own unit unless the name says requests."""

    policy: str
    capacity_blocks: int
    requests: int
    references: int
    hits: int
    evicted_blocks: int
    cut_requests: int
    """Requests with more blocks than the pool: only as many leading ones as it has places are inserted."""
    gauges: dict[str, float]
    hits_of: list[int]
    """Hits of each request."""

    @property
    def hit_rate(self) -> float:
        """Hits per reference, 0 when there are none."""
        return self.hits / self.references if self.references else 0.0


def policy_named(name: str, parameters: PolicyConfig, capacity: int, references: References) -> EvictionPolicy:
    """The policy of this name over these references; ``belady`` gets to know their future."""
    require(name in COMPARED, "policy", f"one of {', '.join(COMPARED)}", name)
    if name == "belady":
        return Belady([keys[:capacity] for keys in references.keys])
    return make_policy(msgspec.structs.replace(parameters, policy=name), capacity)


class Miss(msgspec.Struct, frozen=True):
    """The first block of a request that was not found, and which request it had to make room for (None: never here)."""

    block: int
    evicted_for: int | None


def replay(
    references: References, policy: EvictionPolicy, capacity: int, *, progress: Callable[[int], None] | None = None,
    misses: list[Miss | None] | None = None,
) -> CacheOnlyResult:
    """Replay all references through one pool of ``capacity`` blocks. ``progress`` is told the requests done.

    ``misses`` gets one entry for each request, None where every block was found.
    """
    require(capacity >= 1, "--total-kv-blocks", "at least 1", capacity)
    hits_of: list[int] = []
    evicted = cut = 0
    gone: dict[int, int] = {}
    touch, victims_of, forget = policy.touch, policy.victims, policy.forget
    for number, (at_ns, keys) in enumerate(zip(references.at_ns, references.keys, strict=True)):
        resident = policy.resident
        found = 0
        for key in keys:
            if key not in resident:
                break
            found += 1
        hits_of.append(found)
        if misses is not None:
            misses.append(None if found == len(keys) else Miss(found, gone.get(keys[found])))
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
                gone.update(dict.fromkeys(victims, number))
        if progress is not None and not number % PROGRESS_REQUESTS:
            progress(number)
    return CacheOnlyResult(
        policy.name, capacity, len(hits_of), references.total, sum(hits_of), evicted, cut, policy.gauges(),
        hits_of,
    )


# --- the document ---

SCHEMA: Final = "kvbm-console.cache-only/1"

KEYS: Final[dict[str, str]] = {
    "schema": "name and version of this document",
    "trace": "the trace as named on the command line",
    "note": "what the reader should know about the trace, else null",
    "counting": "what counts as a reference and as a hit here",
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
    """The document for people."""
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
