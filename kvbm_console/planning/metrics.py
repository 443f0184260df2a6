"""The formulas of cache metrics, ours and those of BLIS, as functions of plain counts.

Law of this file: pure; a rate of nothing is 0 only where the name says ``blis_``, otherwise None.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvbm_console.planning.options import check_bandwidth, check_latency


def rate(part: float, whole: float) -> float | None:
    """``part / whole``, None when there is no whole.

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
    """Evictions of the host tier per block copied to it: what that program calls thrashing."""
    return rate(evictions, mirrored) or 0.0


def transfer_ticks(blocks: int, block_size: int, bandwidth: float, base_latency: float) -> float:
    """Ticks of one transfer (BC-4): base + ceil(blocks x block size / bandwidth), bandwidth in tokens per tick."""
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
