"""The report of ``simulate``, every figure with its formula, and the file of ``--requests-out``.

Law of this file: the keys of the JSON document are exactly ``KEYS``, in that order, each with its formula. A key never
changes its meaning. Rates are fractions from 0 to 1, or null without counts. The figures of several instances are sums,
and rates are quotients of sums, so hit rates are weighted by lookups and thrash by offloads. Keys that begin with
``blis_`` are that program's formulas, for comparison. No figure depends on the computer; the time of the run goes to
stderr.
"""

import copy
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Tier, age_within
from kvbm_console.core.leader.foresight import PrefetchMemory
from kvbm_console.core.state import Totals
from kvbm_console.files import replacing
from kvbm_console.planning.meter import COMPLETED, Meter, Readmitted, RequestRecord, Timings, spread_of
from kvbm_console.planning.options import THRASH_STEPS, SimulateOptions
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig
from kvbm_console.simulator.link_settings import LinkSetting
from kvbm_console.simulator.simulated import EngineTotals

SCHEMA: Final = "kvbm-console.simulate/2"

KEYS: Final[dict[str, str]] = {
    "schema": "name and version of this document",
    "trace": "the trace as named on the command line",
    "note": "limits of the trace that the reader should know, else null",
    "settings": "the settings of the run, in blocks and tokens; settings of tiers only with a lower tier",
    "requests_arrived": "requests of the trace that arrived",
    "requests_cloned":
        "sequences beyond the first of requests of several, each of which counts as a request from here on",
    "requests_completed": "requests that produced all their tokens",
    "requests_too_large": "requests refused because they can never fit into the device pool",
    "requests_refused": "requests refused because too many were waiting",
    "requests_aborted": "requests whose client went away before their end, of a recording",
    "duration_s": "virtual seconds from the start of the trace to the last completion",
    "throughput_requests_per_s": "requests_completed / duration_s",
    "throughput_tokens_per_s": "output tokens / duration_s",
    "prefill_tokens": "prompt tokens computed, those computed again after a preemption included",
    "output_tokens": "tokens produced",
    "ttft_ms": "milliseconds from arrival to the first token, over completed requests: mean, p50, p90, p99, max",
    "latency_ms": "milliseconds from arrival to the last token, over completed requests: mean, p50, p90, p99, max",
    "itl_ms":
        "milliseconds between two tokens of a request, one value for each token behind a first: mean, p50, p90, p99, "
        "max",
    "tpot_ms":
        "milliseconds for each token behind the first, (latency - ttft) / (output tokens - 1), over completed requests "
        "of two tokens or more: mean, p50, p90, p99, max",
    "goodput": "requests within the limits of --slo-ttft and --slo-itl, null without a limit",
    "prompt_blocks": "full prompt blocks of all requests at their first admissions",
    "hit_blocks": "of these, found in each tier when the admission was committed, those of failed loads taken back",
    "prefix_hit_rate": "sum of hit_blocks / prompt_blocks",
    "readmitted_prompt_blocks": "full prompt blocks of admissions after a preemption, which no hit rate but blis_* has",
    "readmitted_hit_blocks": "of these, found in any tier: mostly what the request had computed itself",
    "lost_blocks": "hits taken back because their load failed",
    "preemptions": "times that the scheduler took the blocks of a request back",
    "preemptions_per_completed": "preemptions / requests_completed",
    "preempted_fraction": "requests preempted at least once / (requests_arrived + requests_cloned)",
    "offloaded_blocks": "blocks copied down",
    "onboarded_blocks": "blocks copied up",
    "moved_blocks": "blocks copied, by route",
    "moved_bytes": "moved_blocks x block size x bytes of a token (settings: kv_geometry, token_bytes), by route",
    "skipped_copies": "copies down that were not made, by reason; link_busy: the link is slower than a tier gives "
                      "places away",
    "thrash_blocks": "blocks that came back by a copy up within thrash_window_s after a tier had evicted them; null, "
                     "as all of thrash, where settings.connector is given, because nobody counts them",
    "thrash_rate": "thrash_blocks / evicted_blocks, over all tiers; null without a lower tier",
    "thrash": "the same by tier, and how long after their eviction blocks were asked for again; null without a lower "
              "tier",
    "bc6_thrash_rate": "blocks that came back within thrash_window_s after they were offloaded / offloaded_blocks",
    "evicted_blocks": "blocks that lost their place, by tier",
    "eviction_rate": "evicted blocks of the lower tiers / offloaded_blocks",
    "policy": "policy of the lower tiers and its gauges by tier, null without a lower tier",
    "prefetch": "what was copied from disk to host ahead of a lookup, null where nothing can be",
    "blocks_total": "places of all device pools",
    "blocks_used_peak": "most device blocks that requests and copies held at once, summed over instances",
    "blocks_used_mean": "the same, averaged over virtual time",
    "steps": "iterations of the engines",
    "stats": "active slots, blocks and the largest ref count after reset, prefill and decode, of the first instance",
    "blis_cache_hit_rate":
        "hits / (hits + misses) over prompt blocks of all admissions, those after a preemption included; 0 before any",
    "blis_cache_hit_rate_mean": "the unweighted mean of blis_cache_hit_rate over instances",
    "blis_preemption_rate": "preemptions / requests completed; may exceed 1; 0 without any",
    "blis_kv_thrashing_rate": "evicted blocks of the host tier / blocks copied down; really an eviction rate",
}
"""Key to its definition, in the order of the document."""


_SPREAD: Final = {
    "mean": "sum / number", "p50": "the smallest value that half of them do not exceed", "p90": "the same of 90 %",
    "p99": "the same of 99 %", "max": "the largest",
}
INNER: Final[dict[str, dict[str, str]]] = {
    "settings": {
        "limit": "--limit, null without", "seed": "--seed, null without", "instances": "--instances",
        "total_kv_blocks": "--total-kv-blocks, of one instance", "block_size": "--block-size",
        "kv_geometry": "layers, K/V heads, head dimension, bytes of an element",
        "token_bytes": "bytes of K and V of a token: layers x heads x head dimension x 2 x bytes of an element",
        "step_base_ns": "--step-base, in nanoseconds", "step_prefill_token_ns": "--step-prefill-token",
        "step_decode_request_ns": "--step-decode-request", "max_num_batched_tokens": "--max-num-batched-tokens",
        "max_num_seqs": "--max-num-seqs",
        "kv_cpu_blocks": "--kv-cpu-blocks, or --kv-cpu-size in blocks", "kv_disk_blocks": "--kv-disk-blocks",
        "kv_offload_threshold": "--kv-offload-threshold",
        "kv_offload_law": "order: what is evicted next is kept safe; total with --offload-preset original",
        "kv_offload_prompt_only": "--kv-offload-prompt-only",
        "kv_offload_link_busy": "--kv-offload-link-busy",
        "connector": "vllm if the host tier follows the rules of vLLM's OffloadingConnector; else absent",
        "kv_transfer_bandwidth": "--kv-transfer-bandwidth, only with --compat",
        "kv_transfer_base_latency": "--kv-transfer-base-latency, only with --compat",
        "links": "bandwidth and latency of each link; not with --compat",
        "transfers": "--transfers",
        "thrash_window_s": f"--thrash-window, else {THRASH_STEPS} steps of the engine",
        "prefetch": "--prefetch, none without both lower tiers",
        "prefetch_stop": "--prefetch-stop, where it is not best_effort",
        "prefetch_timeout_s": "--prefetch-timeout-s, where it counts",
    },
    "thrash": {
        "thrash_blocks": "blocks that came back within the window", "thrash_rate": "thrash_blocks / evicted blocks",
        "asked_again_blocks": "prompt blocks of admissions that the tier had evicted and had not got again",
        "asked_again_p50_s": "half of these were evicted at most so long ago (1, 2 or 5 times a power of ten)",
        "asked_again_p90_s": "the same of 90 %",
    },
    "prefetch": {
        "predictor": "--prefetch", "stop": "--prefetch-stop", "fetched_blocks": "blocks that arrived in the host tier",
        "used_blocks": "of these, found there by a lookup before they were evicted",
        "late_blocks": "found on disk by a lookup while they were on their way",
        "disk_blocks": "found on disk by a lookup, the late ones included",
        "precision": "used_blocks / fetched_blocks", "coverage": "used_blocks / (used_blocks + disk_blocks)",
        "timeliness": "used_blocks / (used_blocks + late_blocks)",
        "limits": "how often fetching was limited to probes, because less than a quarter of what was fetched was used",
        "limited": "instances that are limited at the end",
        "wasted_bytes": "(fetched_blocks - used_blocks) x block size x bytes of a token",
    },
    "ttft_ms": _SPREAD,
    "latency_ms": _SPREAD,
    "itl_ms": _SPREAD,
    "tpot_ms": _SPREAD,
    "goodput": {
        "slo_ttft_ms": "--slo-ttft, null without", "slo_itl_ms": "--slo-itl, null without",
        "requests": "completed requests whose ttft and whose tpot (0 without a second token) are within the limits",
        "share": "requests / (requests_arrived + requests_cloned)", "requests_per_s": "requests / duration_s",
    },
    "stats": {
        "point": "reset, prefill (the first token) or decode (the end)", "iteration": "iterations so far",
        "active_slots": "requests that have arrived and not ended", "blocks_used": "device blocks held or written",
        "blocks_free": "the others", "max_ref_count": "most holders of one device block",
    },
}
"""Keys inside the object (or the objects of the list) under a key of ``KEYS``, in the same way. Figures by tier have
the keys ``G1`` to ``G3``, figures by route ``G1>G2`` and so on."""


class InstanceMeasures(msgspec.Struct, frozen=True):
    """The sums of an instance."""

    engine: EngineTotals
    times: Timings
    totals: Totals
    readmitted: Readmitted
    gauges: dict[str, dict[str, float]] = {}
    """Gauges of the policies of the leader's pools, by tier."""
    prefetch: dict[str, int] = {}

    @property
    def blis_hit_rate(self) -> float:
        """The share of prompt blocks that all admissions found."""
        hits = sum(self.totals.hit_blocks) + self.readmitted.hit_blocks
        return _rate(hits, self.totals.prompt_blocks + self.readmitted.prompt_blocks) or 0.0


def measure(rig: Rig, meter: Meter) -> InstanceMeasures:
    """The sums of an instance with a leader, before the instance's clean-up."""
    leader = rig.leader
    return InstanceMeasures(
        rig.engine.totals, meter.times, copy.deepcopy(leader.state.totals), meter.readmitted,
        {pool.info.tier.name: leader.live_memory.policies[pool.info.pool].gauges() for pool in leader.lower_pools()},
        leader.memory.prefetch.gauges(),
    )


def make_report(options: SimulateOptions, note: str | None, parts: Sequence[InstanceMeasures]) -> dict[str, Any]:
    """The document of a run over all instances."""
    completed = sum(part.totals.finished[reason] for part in parts for reason in COMPLETED)
    prompt_blocks = sum(part.totals.prompt_blocks for part in parts)
    hits = _columns(part.totals.hit_blocks for part in parts)
    readmitted_blocks = sum(part.readmitted.prompt_blocks for part in parts)
    readmitted_hits = sum(part.readmitted.hit_blocks for part in parts)
    evicted = _columns(part.totals.evicted_blocks for part in parts)
    moved = _sum_by_key(part.totals.moved_blocks for part in parts)
    skipped = _sum_by_key(part.totals.skips() for part in parts)
    offloaded = sum(blocks for route, blocks in moved.items() if route[1] < route[4])
    preemptions = sum(part.totals.preemptions for part in parts)
    duration_s = max((part.times.last_finish_ns for part in parts), default=0) / SECOND_NS
    output_tokens = sum(part.engine.output_tokens for part in parts)
    arrived = sum(part.engine.arrived for part in parts)
    cloned = sum(part.engine.cloned for part in parts)
    tiers = _tiers(options)
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "trace": options.trace,
        "note": note,
        "settings": settings_of(options),
        "requests_arrived": arrived,
        "requests_cloned": cloned,
        "requests_completed": completed,
        "requests_too_large": sum(part.engine.too_large for part in parts),
        "requests_refused": sum(part.engine.refused for part in parts),
        "requests_aborted": sum(part.engine.aborted for part in parts),
        "duration_s": duration_s,
        "throughput_requests_per_s": _rate(completed, duration_s),
        "throughput_tokens_per_s": _rate(output_tokens, duration_s),
        "prefill_tokens": sum(part.engine.prefill_tokens for part in parts),
        "output_tokens": output_tokens,
        "ttft_ms": _spread([part.times.ttft_ns for part in parts]),
        "latency_ms": _spread([part.times.latency_ns for part in parts]),
        "itl_ms": _milliseconds(spread_of(sum((Counter(part.times.gaps.counts) for part in parts), Counter()))),
        "tpot_ms": _spread(filter(_is_time, part.times.per_token_ns) for part in parts),
        "goodput": _goodput(options, parts, arrived + cloned, duration_s),
        "prompt_blocks": prompt_blocks,
        "hit_blocks": {tier.name: hits[tier - 1] for tier in tiers},
        "prefix_hit_rate": _rate(sum(hits), prompt_blocks),
        "readmitted_prompt_blocks": readmitted_blocks,
        "readmitted_hit_blocks": readmitted_hits,
        "lost_blocks": sum(part.totals.lost_blocks for part in parts),
        "preemptions": preemptions,
        "preemptions_per_completed": _rate(preemptions, completed),
        "preempted_fraction": _rate(sum(part.totals.requests_preempted for part in parts), arrived + cloned),
        "offloaded_blocks": offloaded,
        "onboarded_blocks": sum(moved.values()) - offloaded,
        "moved_blocks": moved,
        "moved_bytes": {route: blocks * options.block_bytes for route, blocks in moved.items()},
        "skipped_copies": {reason: count for reason, count in skipped.items() if count},
        **_all_thrash(options, parts, offloaded),
        "evicted_blocks": {tier.name: evicted[tier - 1] for tier in tiers},
        "eviction_rate": _rate(sum(evicted[1:]), offloaded),
        "policy": _policy(options, parts),
        "prefetch": _prefetch(options, parts),
        "blocks_total": options.total_kv_blocks * options.instances,
        "blocks_used_peak": sum(part.times.peak_used for part in parts),
        "blocks_used_mean": sum(part.times.mean_used for part in parts),
        "steps": sum(part.engine.iterations for part in parts),
        "stats": [point.document() for point in parts[0].times.points if point.point != "cleanup"],
        "blis_cache_hit_rate": _rate(sum(hits) + readmitted_hits, prompt_blocks + readmitted_blocks) or 0.0,
        "blis_cache_hit_rate_mean": sum(part.blis_hit_rate for part in parts) / len(parts),
        "blis_preemption_rate": _rate(preemptions, completed) or 0.0,
        "blis_kv_thrashing_rate": _rate(evicted[Tier.G2 - 1], offloaded) or 0.0,
    }
    return {key: values[key] for key in KEYS}


def settings_of(options: SimulateOptions) -> dict[str, Any]:
    """The settings of the run, without tiers, links and policies if there is no lower tier."""
    engine = EngineConfig(**options.engine_fields())
    settings: dict[str, Any] = {
        "limit": options.limit, "seed": options.seed, "instances": options.instances,
        "total_kv_blocks": options.total_kv_blocks, "block_size": options.block_size,
        "kv_geometry": options.kv_geometry.text, "token_bytes": options.kv_geometry.token_bytes,
        "step_base_ns": engine.step_base_ns, "step_prefill_token_ns": engine.prefill_token_ns,
        "step_decode_request_ns": engine.decode_request_ns, "max_num_batched_tokens": engine.max_batch_tokens,
        "max_num_seqs": engine.max_running,
    }
    if options.tiered:
        settings |= {
            "kv_cpu_blocks": options.kv_cpu_blocks, "kv_disk_blocks": options.kv_disk_blocks,
            "kv_offload_threshold": options.kv_offload_threshold, "kv_offload_law": options.kv_offload_law,
            "kv_offload_prompt_only": options.kv_offload_prompt_only,
            "kv_offload_link_busy": options.kv_offload_link_busy,
            **({"connector": "vllm"} if options.connects else {}),
            **_links(options), "transfers": options.transfers,
            "thrash_window_s": options.thrash_window_ns / SECOND_NS,
            "prefetch": options.prefetch if options.prefetches else "none",
        }
        if options.prefetches and options.prefetch_stop != "best_effort":
            settings["prefetch_stop"] = options.prefetch_stop
            if options.prefetch_stop == "timeout":
                settings["prefetch_timeout_s"] = options.prefetch_timeout_s
    return settings


def _links(options: SimulateOptions) -> dict[str, Any]:
    if options.kv_transfer_bandwidth is not None:
        return {
            "kv_transfer_bandwidth": options.kv_transfer_bandwidth,
            "kv_transfer_base_latency": options.kv_transfer_base_latency,
        }
    return {"links": [
        LinkSetting(link.name, link.bytes_per_s, link.base_latency_ns).text for link in options.links()
    ]}


def _tiers(options: SimulateOptions) -> list[Tier]:
    lower = ((Tier.G2, options.kv_cpu_blocks), (Tier.G3, options.kv_disk_blocks))
    return [Tier.G1, *(tier for tier, blocks in lower if blocks)]


def _policy(options: SimulateOptions, parts: Sequence[InstanceMeasures]) -> dict[str, Any] | None:
    if not options.tiered:
        return None
    return {**msgspec.structs.asdict(options.policy), "gauges": parts[0].gauges}


def _all_thrash(options: SimulateOptions, parts: Sequence[InstanceMeasures], offloaded: int) -> dict[str, Any]:
    """Nulls where no leader counts what came back."""
    if options.connects:
        return dict.fromkeys(("thrash_blocks", "thrash_rate", "thrash", "bc6_thrash_rate"))
    returned = sum(_columns(part.totals.returned_blocks for part in parts))
    evicted = sum(_columns(part.totals.evicted_blocks for part in parts))
    return {
        "thrash_blocks": returned,
        "thrash_rate": _rate(returned, evicted) if options.tiered else None,
        "thrash": _thrash(_tiers(options), parts) if options.tiered else None,
        "bc6_thrash_rate": _rate(sum(part.totals.thrash_blocks for part in parts), offloaded),
    }


def _thrash(tiers: Sequence[Tier], parts: Sequence[InstanceMeasures]) -> dict[str, dict[str, Any]]:
    thrash = {}
    for tier in tiers:
        at = tier - 1
        returned = sum(part.totals.returned_blocks[at] for part in parts)
        again = _columns(part.totals.asked_again[at] for part in parts)
        half, most = age_within(again, 0.5), age_within(again, 0.9)
        thrash[tier.name] = {
            "thrash_blocks": returned,
            "thrash_rate": _rate(returned, sum(part.totals.evicted_blocks[at] for part in parts)),
            "asked_again_blocks": sum(again), "asked_again_p50_s": None if half is None else half / SECOND_NS,
            "asked_again_p90_s": None if most is None else most / SECOND_NS,
        }
    return thrash


def _prefetch(options: SimulateOptions, parts: Sequence[InstanceMeasures]) -> dict[str, Any] | None:
    if not options.prefetches:
        return None
    total = _sum_by_key(part.prefetch for part in parts)
    fetched, used, late, disk = (total[name] for name in ("fetched", "used", "late", "from_disk"))
    return {
        "predictor": options.prefetch, "stop": options.prefetch_stop, "fetched_blocks": fetched, "used_blocks": used,
        "late_blocks": late, "disk_blocks": disk, **PrefetchMemory.shares(total),
        "limits": total["limits"], "limited": total["limited"],
        "wasted_bytes": (fetched - used) * options.block_bytes,
    }


def _columns(lists: Any) -> list[int]:
    return [sum(column) for column in zip(*lists, strict=True)]


def _sum_by_key(parts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return dict(sorted(total.items()))


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _spread(columns: Iterable[Iterable[int]]) -> dict[str, float | None]:
    """Mean, percentiles and maximum in milliseconds."""
    return _milliseconds(spread_of(Counter(chain.from_iterable(columns))))


def _milliseconds(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else value / 1e6 for name, value in values.items()}


def _is_time(value: int) -> bool:
    return value >= 0


def _goodput(
    options: SimulateOptions, parts: Sequence[InstanceMeasures], requests: int, duration_s: float
) -> dict[str, Any] | None:
    """Requests within the limits. A request without a second token has no time between tokens, so any limit holds."""
    if options.slo_ttft is None and options.slo_itl is None:
        return None
    ttft_ns = options.slo_ttft if options.slo_ttft is not None else math.inf
    itl_ns = options.slo_itl if options.slo_itl is not None else math.inf
    good = sum(
        first_ns <= ttft_ns and per_token_ns <= itl_ns
        for part in parts for first_ns, per_token_ns in zip(part.times.ttft_ns, part.times.per_token_ns, strict=True)
    )
    return {
        "slo_ttft_ms": None if options.slo_ttft is None else options.slo_ttft / 1e6,
        "slo_itl_ms": None if options.slo_itl is None else options.slo_itl / 1e6,
        "requests": good, "share": _rate(good, requests), "requests_per_s": _rate(good, duration_s),
    }


# --- the report as text ---


def text_of(document: Mapping[str, Any]) -> str:
    """The report as aligned lines."""
    rows = [("trace", document["trace"] + (f" ({document['note']})" if document["note"] else ""))]
    rows += [
        ("requests", f"{document['requests_completed']:,} completed of "
                     f"{document['requests_arrived'] + document['requests_cloned']:,}"
                     + _also(document["requests_cloned"], "cloned")
                     + _also(document["requests_too_large"], "too_large")
                     + _also(document["requests_refused"], "refused")
                     + _also(document["requests_aborted"], "aborted")),
        ("throughput", f"{_number(document['throughput_requests_per_s'])} requests/s, "
                       f"{_number(document['throughput_tokens_per_s'])} tokens/s over {document['duration_s']:,.3f} s"),
        ("ttft", _spread_text(document["ttft_ms"])),
        ("latency", _spread_text(document["latency_ms"])),
        ("itl", _spread_text(document["itl_ms"])),
        ("tpot", _spread_text(document["tpot_ms"])),
        *([("goodput", _goodput_text(document["goodput"]))] if document["goodput"] is not None else []),
        ("prefix hits", f"{_percent(document['prefix_hit_rate'])} of {document['prompt_blocks']:,} prompt blocks"
                        f" ({_by_key(document['hit_blocks'])})" + _also(document["lost_blocks"], "lost again")),
        *([("readmitted", f"{document['readmitted_hit_blocks']:,} of {document['readmitted_prompt_blocks']:,} prompt "
                          "blocks found by admissions after a preemption")]
          if document["readmitted_prompt_blocks"] else []),
        ("preemptions", f"{document['preemptions']:,}, {_percent(document['preempted_fraction'])} of the requests, "
                        f"{_number(document['preemptions_per_completed'])} per completed one"),
        ("blocks", f"{document['blocks_used_peak']:,} at most and {document['blocks_used_mean']:,.1f} on average "
                   f"of {document['blocks_total']:,} used; evicted {_by_key(document['evicted_blocks'])}"),
    ]
    if document["policy"] is not None:
        moved = ", ".join(
            f"{route} {blocks:,} blocks {document['moved_bytes'][route]:,} bytes"
            for route, blocks in document["moved_blocks"].items()
        )
        gauges = "; ".join(
            f"{tier} {', '.join(f'{name} {value:g}' for name, value in values.items())}"
            for tier, values in document["policy"]["gauges"].items() if values
        )
        rows += [
            ("moved", f"{document['offloaded_blocks']:,} blocks offloaded, {document['onboarded_blocks']:,} onboarded"
                      + (f" ({moved})" if moved else "")),
            *([("not copied", f"{_by_key(document['skipped_copies']).replace('_', ' ')} copies")]
              if document["skipped_copies"] else []),
            ("geometry", f"{document['settings']['kv_geometry']} (layers, K/V heads, head dimension, bytes of an "
                         f"element): {document['settings']['token_bytes']:,} bytes per token"),
            *([("connector", "the host tier follows the rules of vLLM's OffloadingConnector, which counts no thrash")]
              if document["settings"].get("connector") else
              [("thrash", _thrash_text(document)), ("asked again", _again_text(document["thrash"]))]),
            ("policy", document["policy"]["policy"] + (f" ({gauges})" if gauges else "")),
        ]
    if document["prefetch"] is not None:
        rows.append(("prefetch", _prefetch_text(document["prefetch"])))
    rows.append(("steps", f"{document['steps']:,}"))
    return "\n".join(f"{name:<12} {words}" for name, words in rows)


def _goodput_text(values: Mapping[str, Any]) -> str:
    limits = ", ".join(
        f"{name} {values[key]:g} ms" for name, key in (("ttft", "slo_ttft_ms"), ("itl", "slo_itl_ms"))
        if values[key] is not None
    )
    return (
        f"{values['requests']:,} requests within {limits}: {_percent(values['share'])}, "
        f"{_number(values['requests_per_s'])} requests/s"
    )


def _thrash_text(document: Mapping[str, Any]) -> str:
    by_tier = ", ".join(f"{tier} {_percent(values['thrash_rate'])}" for tier, values in document["thrash"].items())
    window_s = document["settings"]["thrash_window_s"]
    steps = window_s * SECOND_NS / document["settings"]["step_base_ns"]
    return (
        f"{_percent(document['thrash_rate'])} of the evicted blocks came back within {window_s:g} s "
        f"({steps:g} steps): {by_tier}; {_percent(document['bc6_thrash_rate'])} of the "
        f"offloads, evictions {_percent(document['eviction_rate'])}"
    )


def _again_text(tiers: Mapping[str, Mapping[str, Any]]) -> str:
    """The time since the eviction of blocks that admissions asked for, by tier."""
    return "; ".join(
        f"{tier} {values['asked_again_blocks']:,} blocks" + (
            f", half within {values['asked_again_p50_s']:g} s of their eviction, 90 % within "
            f"{values['asked_again_p90_s']:g} s" if values["asked_again_blocks"] else ""
        ) for tier, values in tiers.items()
    )


def _prefetch_text(values: Mapping[str, Any]) -> str:
    return (
        f"{values['predictor']}, {values['stop']}: {values['fetched_blocks']:,} blocks fetched from disk, "
        f"{values['used_blocks']:,} used (precision {_percent(values['precision'])}), coverage "
        f"{_percent(values['coverage'])} of what lookups had from disk, timeliness {_percent(values['timeliness'])}, "
        f"{values['wasted_bytes']:,} bytes wasted, {values['limits']} times limited to probes"
    )


def _also(count: int, label: str) -> str:
    return f", {count:,} {label}" if count else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _by_key(values: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {value:,}" for key, value in values.items())


def _spread_text(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'–' if value is None else f'{value:,.3f}'}" for name, value in values.items()) + " ms"


# --- the file of --requests-out ---

COLUMNS: Final[dict[str, str]] = {
    "instance": "the engine that it ran on, from 0",
    "request": "its name",
    "arrived_ns": "nanoseconds of virtual time at its arrival",
    "first_token_ns": "the same of its first token; null, in CSV empty, without one",
    "finished_ns": "the same of its end",
    "reason": "why it ended: length, or too_large for a request that can never fit",
    "prompt_tokens": "tokens of its prompt",
    "cached_g1_tokens": "of these, in full blocks that its first admission found on the device",
    "cached_g2_tokens": "the same of the host tier, those of failed loads taken back",
    "cached_g3_tokens": "the same of the disk tier",
    "output_tokens": "tokens that it sampled",
    "preemptions": "times that the scheduler took its blocks back",
}
"""Column to its definition."""
SUFFIXES: Final = (".jsonl", ".csv")


def row_of(instance: int, record: RequestRecord, block_tokens: int) -> dict[str, Any]:
    """The row of a request that has ended."""
    g1, g2, g3, _ = record.hits
    values = (
        instance, record.request, record.arrived_ns, record.first_token_ns, record.finished_ns, record.reason,
        record.prompt_tokens, g1 * block_tokens, g2 * block_tokens, g3 * block_tokens, record.output_tokens,
        record.preemptions,
    )
    return dict(zip(COLUMNS, values, strict=True))


@contextmanager
def writer(path: Path | None, block_tokens: int) -> Iterator[Callable[[int, RequestRecord], None] | None]:
    """A function that writes a row of the file, which replaces an earlier one at the end; None without a path.

    Raises ``UsageError`` for an unknown suffix and for a file that cannot be written.
    """
    if path is None:
        yield None
        return
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--requests-out must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    try:
        with replacing(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
            yield _writes(path.suffix, file, block_tokens)
    except OSError as error:
        if error.filename != str(path):
            raise
        raise UsageError(f"--requests-out cannot be written: {error.strerror}, got {str(path)!r}") from None


def _writes(suffix: str, file: IO[str], block_tokens: int) -> Callable[[int, RequestRecord], None]:
    if suffix == ".csv":
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        rows.writeheader()
        return lambda instance, record: rows.writerow(row_of(instance, record, block_tokens))
    encode = msgspec.json.Encoder().encode
    return lambda instance, record: print(encode(row_of(instance, record, block_tokens)).decode(), file=file)
