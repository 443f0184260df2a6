"""Figures of the cache-only replay: nanoseconds per reference under each policy, and of whole processes.

Law of this file: the reference of a policy is the least that any cache does, an ``OrderedDict`` as LRU over the same
references; that of a process is an interpreter that does nothing. The references are those of the shared trace where
it is at hand, else of generated chats, and the name of a figure says which.
"""

import resource
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Final

from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.planning.cache_only import COMPARED, References, policy_named, references_of, replay
from kvbm_console.planning.traces import parse_trace
from tests.benchmarks.harness import Figure, Target, measure
from tests.conftest import shared_directory
from tests.core.eviction.generated import WORKLOADS

CAPACITY: Final = 4_000
REQUESTS: Final = 2_000
"""Of the trace: enough to fill the pool many times, and a fifth of a second under each policy."""
LIMIT_NS: Final = {"simple_lru": 500.0, "lrfu_auto": 2_500.0, "learned": 3_000.0, "belady": 2_000.0}
"""Two million references a second, 400,000 and 500,000."""
OTHERS_NS: Final = 1e9 / 600_000
STARTS: Final = 3
LIMIT_S: Final = {"simple_lru": 0.6, "lrfu": 1.2, "lrfu_auto": 2.0, "learned": 2.0}
"""For the whole trace with the start of the program."""


def trace() -> Path | None:
    """The shared trace, if it is at hand."""
    place = shared_directory()
    path = None if place is None else place / "traces" / "mooncake_conversation_trace.jsonl"
    return path if path is not None and path.is_file() else None


@cache
def references() -> References:
    """What is replayed."""
    path = trace()
    if path is None:
        return references_of(parse_trace(f"multiturn:{WORKLOADS['chat-f'][0]}"))
    return references_of(parse_trace(f"mooncake:{path}", REQUESTS))


def plain(refs: References) -> int:
    """Blocks found by the least that an LRU cache does."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for keys in refs.keys:
        for key in reversed(keys):
            if key in order:
                hits += 1
                order.move_to_end(key)
            else:
                order[key] = None
        while len(order) > CAPACITY:
            order.popitem(last=False)
    return hits


def replayed(policy: str) -> Figure:
    """One policy over all references."""
    refs = references()
    parameters = PolicyConfig()
    return measure(
        f"replay {policy}, {'trace' if trace() else 'chats'}",
        lambda: replay(refs, policy_named(policy, parameters, CAPACITY, refs), CAPACITY), refs.total,
        "OrderedDict", lambda: plain(refs), refs.total, Target(ns=LIMIT_NS.get(policy, OTHERS_NS)), rounds=5, turns=1,
    )


def whole(policy: str) -> Figure:
    """The program from its start to its end, in processor's time."""
    path = trace()
    name = f"whole replay {policy}, {'trace' if path else 'chats'}"
    spec = f"mooncake:{path}" if path else f"multiturn:{WORKLOADS['chat-f'][0]}"
    command = [sys.executable, "-c", "from kvbm_console.cli.main import main; main()", "simulate", "--trace", spec,
               "--cache-only", "--total-kv-blocks", str(CAPACITY), "--policy", policy]
    ours = [_seconds(command) for _ in range(STARTS)]
    theirs = [_seconds([sys.executable, "-c", "pass"]) for _ in range(STARTS)]
    ns, reference_ns = median(ours) * 1e9, median(theirs) * 1e9
    return Figure(name, ns, "python -c pass", reference_ns, ns / reference_ns, Target(ns=LIMIT_S[policy] * 1e9),
                  compared=False)


def _seconds(command: list[str]) -> float:
    """Processor's time of a process and what it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


BENCHES: Final[dict[str, Callable[[], Figure]]] = {
    **{f"replay {policy}": partial(replayed, policy) for policy in COMPARED},
    **{f"whole replay {policy}": partial(whole, policy) for policy in LIMIT_S},
}
