"""Hit rates of vLLM's host tier by eviction policy: ``python -m tests.vllm.policies``.

vLLM's own ``CPUOffloadingManager`` is driven with traces, one request after the other: look up, load the prefix that
was found, store the rest. Copies take no time. LRU and ARC are vLLM's, the others are ours.

Law of this file: all policies get the same calls of the same manager, and only the policy's time is simulated.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvbm_console.planning.cache_only import References, references_of
from kvbm_console.planning.traces import parse_trace
from kvbm_console.tap.vllm_policy import LearnedCachePolicy, LrfuAutoCachePolicy
from tests.conftest import shared_directory
from tests.core.eviction.generated import WORKLOADS, references_named

MODULE: Final = "kvbm_console.tap.vllm_policy"
POLICIES: Final = {"lru": ("lru", None), "arc": ("arc", None), "lrfu_auto": ("LrfuAutoCachePolicy", MODULE),
                   "learned": ("LearnedCachePolicy", MODULE)}
"""Name to the two settings ``eviction_policy`` and ``cache_policy_module_path``."""
TRACE: Final = "shared trace"
TRACE_CAPACITIES: Final = (1_000, 4_000, 16_000)


class Figures(msgspec.Struct, frozen=True):
    """One replay: percent of the prompt's chunks that were found, and the time in calls of the manager."""

    hit_rate: float
    request_ns: float
    manager: Any


def manager_of(policy: str, chunks: int) -> CPUOffloadingManager:
    """vLLM's manager under a policy."""
    name, module = POLICIES[policy]
    return CPUOffloadingManager(chunks, cache_policy=name, cache_policy_module_path=module)


def replay(references: References, policy: str, chunks: int) -> Figures:
    """Every request of a trace, in order."""
    manager = manager_of(policy, chunks)
    found = spent = at = 0
    if isinstance(manager._policy, LrfuAutoCachePolicy | LearnedCachePolicy):
        manager._policy.clock = lambda: references.at_ns[at]
    for at, ids in enumerate(references.keys):
        keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in dict.fromkeys(ids)]
        began = time.thread_time_ns()
        found += request(manager, f"r{at}", keys)
        spent += time.thread_time_ns() - began
    total = sum(len(dict.fromkeys(ids)) for ids in references.keys)
    return Figures(100 * found / total, spent / len(references.keys), manager)


def request(manager: CPUOffloadingManager, name: str, keys: list[Any]) -> int:
    """One request as the scheduler's half of the connector asks for it; the chunks that it found."""
    context = ReqContext(name)
    manager.on_new_request(context)
    for at, key in enumerate(keys):
        context.set_offload_key_position(key, at + 1)
    hits = 0
    while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
        hits += 1
    if hits:
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
    stored = manager.prepare_store(keys, context)
    if stored is not None:
        manager.complete_store(stored.keys_to_store, context)
    manager.on_request_finished(context)
    return hits


def loads() -> Iterator[tuple[str, References, int]]:
    """(name, references, chunks of the tier) of every row of the table."""
    place = shared_directory()
    path = None if place is None else place / "traces" / "mooncake_conversation_trace.jsonl"
    if path is not None and path.is_file():
        references = references_of(parse_trace(f"mooncake:{path}"))
        for chunks in TRACE_CAPACITIES:
            yield TRACE, references, chunks
    for name, (_, capacities) in WORKLOADS.items():
        yield name, references_named(name), capacities[len(capacities) // 2]


def main() -> None:
    ours = ("lrfu_auto", "learned")
    rows = ["| load | chunks | lru | arc | lrfu_auto | learned | to the better | | a request, to lru | |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for name, references, chunks in loads():
        found = {policy: replay(references, policy, chunks) for policy in POLICIES}
        best = max(found["lru"].hit_rate, found["arc"].hit_rate)
        rates = " | ".join(f"{one.hit_rate:.1f}" for one in found.values())
        gains = " | ".join(f"{found[policy].hit_rate - best:+.1f}" for policy in ours)
        ratios = " | ".join(f"{found[policy].request_ns / found['lru'].request_ns:.2f}" for policy in ours)
        rows.append(f"| {name} | {chunks:,} | {rates} | {gains} | {ratios} |")
        print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
