"""The reference beside a simulated machine: belady over one pool as large as all of its tiers together.

Law of this file: it knows everything and pays for nothing. Requests are looked up in the order of their arrival, with
the whole future known, no time passes, and nothing is held or copied. It is no bound of the machine, which may have
more hits: a preempted request finds its own blocks when it comes back, and admissions have another order than arrivals.

A hit is counted as in the machine: full blocks of the prompt, one token left to compute; what a request generates is
stored too, and a request that the device can never hold is refused and counted nowhere.
"""

from kvbm_console.planning.belady import Belady
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.references import in_order
from kvbm_console.simulator.workloads import Workload


def request_blocks(prompt_tokens: int, output_tokens: int, block_tokens: int) -> int:
    """Device blocks that a request needs in the end; the last token that it generates needs no place."""
    return -(-(prompt_tokens + output_tokens - 1) // block_tokens)


def bound_of(workload: Workload, options: SimulateOptions) -> tuple[list[str], list[int], list[int], int]:
    """Names, hits and prompt blocks of the requests, and the blocks evicted."""
    capacity = options.total_kv_blocks + options.kv_cpu_blocks + options.kv_disk_blocks
    names: list[str] = []
    lookups: list[tuple[int, ...]] = []
    stored: list[tuple[int, ...]] = []
    blocks_of: list[int] = []
    for request in in_order(workload, options.block_size):
        if request_blocks(request.prompt_tokens, request.output_tokens, options.block_size) > options.total_kv_blocks:
            continue
        names.append(request.request)
        blocks_of.append(len(request.hashes))
        lookups.append(request.hashes[: (request.prompt_tokens - 1) // options.block_size])
        stored.append((request.hashes + request.output_hashes)[:capacity])
    policy = Belady(stored)
    hits_of: list[int] = []
    evicted = 0
    for keys, whole in zip(lookups, stored, strict=True):
        resident = policy.resident
        found = 0
        for key in keys:
            if key not in resident:
                break
            found += 1
        hits_of.append(found)
        policy.touch(whole, 0)
        excess = len(policy.resident) - capacity
        if excess > 0:
            policy.forget(policy.victims(excess, None, set(whole)) or ())
            evicted += excess
    return names, hits_of, blocks_of, evicted
