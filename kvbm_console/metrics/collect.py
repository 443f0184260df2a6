"""The metrics of a daemon: every family, with a help text that explains a bad value.

Tiers are labelled with the medium that the engine names, routes with source and target tier, never with a direction.

Law of this file: it reads and changes nothing. An unknown count is left out, and a count that may be wrong has
``kvbm_tier_uncertain`` or ``kvbm_stream_uncertain`` at 1 beside it.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any, Final

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.curves import SampledRate
from kvbm_console.core.ids import (
    AGE_BOUNDS_NS,
    Authority,
    CandidateStatus,
    Condition,
    EvictRule,
    FinishReason,
    HoldEnd,
    Measure,
    Route,
    SlotState,
    Tier,
)
from kvbm_console.core.leader import Leader
from kvbm_console.core.leader.foresight import PrefetchMemory
from kvbm_console.core.leader.prefetch import prefetches
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.metrics.exposition import Family
from kvbm_console.metrics.texts import HELP

SECOND_NS: Final = 1e9
_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1_024
RECORDER_STATES: Final = ("recording", "degraded", "closed")


class Scrape(msgspec.Struct):
    """Everything that a scrape reads."""

    state: CacheState
    config: LeaderConfig
    at_ns: int
    """The engine's clock now."""
    subscribers: int
    ring_bytes: int
    recorder: Any | None
    """A ``RecorderStatus``, None when nothing is recorded."""
    streams: Sequence[Any]
    """Publishers, as ``engines.kv_events.zmq_source.StreamRow``."""
    taps: Sequence[Mapping[str, Any]] = ()
    """The cost of watching for the watched engines (``LeaderService.costs``)."""
    spans: Mapping[str, int] = {}
    """Spans of request timelines by outcome; empty when no spans are exported."""
    lints: Mapping[str, int] = {}
    """Lint to the problems that it finds now; empty without a watch."""
    lints_passed_over: int | None = None
    """Events that lints and curve did not see."""
    curve: Mapping[tuple[Tier, float], SampledRate] = {}
    """Tier and scale of its capacity to the hit rate of an LRU cache (``CurveFold.points``)."""
    block_bytes: int | None = None
    """Bytes of one block, None when unknown."""
    evictions: Mapping[tuple[Tier, EvictRule], int] = {}
    """Blocks given up by tier and deciding rule (``Decider.evictions``)."""
    lost_hits: Mapping[Tier, int] = {}
    """Hits taken back by tier (``Decider.lost_hits``)."""
    readmitted_blocks: int = 0
    readmitted_hits: int = 0
    """Prompt blocks of admissions after a preemption, and those found (``Decider.readmitted_hits``)."""
    policies: Mapping[Tier, Mapping[str, float]] = {}
    """Gauges of the policy of each tier that the leader decides (``PoolPolicy.gauges``)."""
    questions_refused: int = 0
    """Questions of clients that were refused because too many waited."""
    parts: Sequence[Mapping[str, Any]] = ()
    """Tasks and threads of the daemon (``Parts.rows``)."""
    prefetch: Mapping[str, int] = {}
    """Counts of prefetched blocks (``PrefetchMemory.gauges``); empty when nothing is prefetched."""


def scrape_of(leader: Leader, **others: Any) -> Scrape:
    """The ``Scrape`` of a leader; ``others`` are its further fields. Costs the same however many blocks there are."""
    config = leader.config
    return Scrape(
        state=leader.state, config=config, evictions=leader.evictions, lost_hits=leader.lost_hits,
        readmitted_blocks=leader.readmitted_blocks, readmitted_hits=leader.readmitted_hits,
        policies={
            pool.info.tier: leader.live_memory.policies[pool.info.pool].gauges() for pool in leader.lower_pools()
        },
        prefetch=leader.memory.prefetch.gauges() if prefetches(leader) else {}, **others,
    )


Sample = tuple[str, float | None, Mapping[str, str]]
"""Name of a family, value, labels; a value of None is unknown and left out."""
_BARE: Final[Mapping[str, str]] = {}


def collect(scrape: Scrape) -> list[Family]:
    """All families as of now, in the order of ``HELP``."""
    began = time.perf_counter()
    families = {name: Family(name, text) for name, text in HELP.items()}
    for part in _PARTS:
        for name, value, labels in part(scrape):
            families[name].add(value, labels)
    families["kvbm_scrape_seconds"].add(time.perf_counter() - began)
    return list(families.values())


def _tiers(scrape: Scrape) -> Iterator[Sample]:
    state = scrape.state
    for (tier, medium), declared in _by_medium(state).items():
        pools = state.counted(declared)
        if not pools:
            continue  # another medium of the same engine has these blocks
        labels = {"tier": tier.label, "medium": medium}
        capacities = [state.capacity_of(pool) for pool in pools]
        known = None not in [pool.info.capacity_blocks for pool in pools]
        told = sum(each or 0 for each in capacities) if None not in capacities else None
        yield "kvbm_tier_capacity_blocks", told, labels
        streamed = all(pool.info.authority is Authority.STREAM for pool in pools)
        for condition in Condition:
            # Unknown places cannot be counted as empty, and a stream does not tell which blocks are in use.
            if not streamed and (known or condition is not Condition.EMPTY):
                blocks = sum(pool.counts[condition] for pool in pools)
                yield "kvbm_tier_blocks", blocks, {**labels, "condition": condition.label}
        blocks_here = sum(pool.resident_blocks for pool in pools)
        yield "kvbm_tier_resident_blocks", blocks_here, labels
        yield "kvbm_tier_resident_bytes", _bytes(scrape, blocks_here), labels
        yield "kvbm_tier_uncertain", any(pool.info.source in state.lost_sources for pool in pools), labels


def _bytes(scrape: Scrape, blocks: int) -> int | None:
    return None if scrape.block_bytes is None else blocks * scrape.block_bytes


def _by_medium(state: CacheState) -> dict[tuple[Tier, str], list[PoolFacts]]:
    found: dict[tuple[Tier, str], list[PoolFacts]] = {}
    for pool in state.pools:
        found.setdefault((pool.info.tier, pool.info.medium), []).append(pool)
    return found


def _evictions(scrape: Scrape) -> Iterator[Sample]:
    """Evictions by reason. Tiers that only event streams describe are left out, because streams give no reason."""
    state = scrape.state
    told = {pool.info.tier for pool in state.shown_pools if pool.info.authority is not Authority.STREAM}
    for tier in sorted(told):
        yield "kvbm_evicted_blocks_total", state.totals.evicted_blocks[tier - 1], {"tier": tier.label}
    for (tier, rule), blocks in sorted(scrape.evictions.items()):
        yield "kvbm_policy_evicted_blocks_total", blocks, {"tier": tier.label, "rule": rule.label}


_POLICY_GAUGES: Final = (
    ("kvbm_policy_entries", "entries"), ("kvbm_policy_ghosts", "ghosts"), ("kvbm_policy_ghosts_max", "ghosts_max"),
    ("kvbm_policy_half_life_seconds", "half_life_s"), ("kvbm_policy_frequency_weight", "weight"),
    ("kvbm_policy_changes_total", "changes"), ("kvbm_policy_guarded_blocks", "guarded"),
    ("kvbm_pinned_hit_blocks_total", "pinned_hits"), ("kvbm_policy_not_admitted_blocks_total", "not_admitted"),
)


def _policies(scrape: Scrape) -> Iterator[Sample]:
    yield "kvbm_policy_offload_threshold", scrape.config.offload_threshold, _BARE
    yield "kvbm_policy_offload_hysteresis", scrape.config.offload_hysteresis, _BARE
    shown = {pool.info.tier for pool in scrape.state.shown_pools}
    for tier, gauges in scrape.policies.items():
        if tier not in shown:
            continue
        labels = {"tier": tier.label, "policy": scrape.config.eviction.policy}
        for name, gauge in _POLICY_GAUGES:
            yield name, gauges.get(gauge), labels


_PREFETCH_COUNTERS: Final = (
    ("kvbm_prefetch_fetched_blocks_total", "fetched"), ("kvbm_prefetch_used_blocks_total", "used"),
    ("kvbm_prefetch_late_blocks_total", "late"), ("kvbm_prefetch_disk_blocks_total", "from_disk"),
    ("kvbm_prefetch_evicted_blocks_total", "evicted_unused"),
    ("kvbm_prefetch_limits_total", "limits"), ("kvbm_prefetch_limited", "limited"),
)


def _prefetch(scrape: Scrape) -> Iterator[Sample]:
    if not scrape.prefetch:
        return
    labels = {"predictor": scrape.config.prefetch}
    for name, count in _PREFETCH_COUNTERS:
        yield name, scrape.prefetch.get(count), labels
    for share, value in PrefetchMemory.shares(scrape.prefetch).items():
        yield f"kvbm_prefetch_{share}_ratio", value, labels
    yield "kvbm_prefetch_wasted_bytes_total", _bytes(scrape, scrape.prefetch["evicted_unused"]), labels


def _reuse(scrape: Scrape) -> Iterator[Sample]:
    """Hits and thrash; nothing where only event streams report, which name no request."""
    if scrape.state.streams_only:
        return
    totals, size = scrape.state.totals, _block_tokens(scrape)
    yield "kvbm_prompt_blocks_total", totals.prompt_blocks, _BARE
    yield "kvbm_readmitted_prompt_blocks_total", scrape.readmitted_blocks, _BARE
    yield "kvbm_readmitted_hit_blocks_total", scrape.readmitted_hits, _BARE
    yield "kvbm_thrash_window_seconds", scrape.config.thrash_window_ns / SECOND_NS, _BARE
    for tier in Tier:
        labels = {"tier": tier.label}
        # A counter that falls would read as a restart, so hits that were taken back have a counter of their own.
        lost = scrape.lost_hits.get(tier, 0)
        hits = totals.hit_blocks[tier - 1] + lost
        yield "kvbm_hit_blocks_total", hits, labels
        yield "kvbm_lost_hit_blocks_total", lost, labels
        yield "kvbm_matched_tokens_total", None if size is None else hits * size, labels
        yield "kvbm_thrash_blocks_total", totals.returned_blocks[tier - 1], labels
        counts = totals.asked_again[tier - 1]
        if any(counts):
            bounds = [*(f"{bound / SECOND_NS:g}" for bound in AGE_BOUNDS_NS[:-1]), "+Inf"]
            for bound, blocks in zip(bounds, accumulate(counts), strict=True):
                yield "kvbm_asked_again_blocks_total", blocks, {**labels, "le": bound}


def _block_tokens(scrape: Scrape) -> int | None:
    """Tokens of a block of the engines that count hits; None if they differ."""
    told = {
        pool.info.block_tokens for pool in scrape.state.pools
        if pool.info.tier is Tier.G1 and pool.info.authority is not Authority.STREAM
    }
    sizes = told or {scrape.config.block_tokens}
    return sizes.pop() if len(sizes) == 1 else None


def _curve(scrape: Scrape) -> Iterator[Sample]:
    for (tier, scale), rate in scrape.curve.items():
        labels = {"tier": tier.label, "capacity": f"{scale:g}"}
        yield "kvbm_lru_hit_ratio", rate.hit_rate, labels
        yield "kvbm_lru_hit_ratio_error", rate.error, labels


def _transfers(scrape: Scrape) -> Iterator[Sample]:
    state, totals = scrape.state, scrape.state.totals
    for label, blocks in totals.moved_blocks.items():
        labels = _route(Route.labelled(label))
        yield "kvbm_moved_blocks_total", blocks, labels
        yield "kvbm_moved_bytes_total", _bytes(scrape, blocks), labels
    flying: dict[Route, int] = {}
    oldest: dict[Route, int] = {}
    for candidate in state.candidates.values():
        flying[candidate.route] = flying.get(candidate.route, 0) + len(candidate.hashes)
        oldest[candidate.route] = min(oldest.get(candidate.route, scrape.at_ns), candidate.planned_ns)
    for route, blocks in flying.items():
        yield "kvbm_candidate_blocks", blocks, _route(route)
        yield "kvbm_oldest_candidate_seconds", max(0, scrape.at_ns - oldest[route]) / SECOND_NS, _route(route)
    for status in CandidateStatus:
        if status > CandidateStatus.PROMOTED:
            yield "kvbm_candidates_ended_total", totals.candidates_ended[status], {"status": status.label}
    for reason, count in totals.skips().items():
        yield "kvbm_candidates_skipped_total", count, {"reason": reason}


def _route(route: Route) -> dict[str, str]:
    return {"source": route.source.label, "target": route.target.label}


def _slots(scrape: Scrape) -> Iterator[Sample]:
    """Slots and requests; nothing where only event streams report."""
    if scrape.state.streams_only:
        return
    state, totals = scrape.state, scrape.state.totals
    counts = dict.fromkeys(SlotState, 0)
    since: dict[SlotState, int] = {}
    for slot in state.slots.values():
        counts[slot.state] += 1
        since[slot.state] = min(since.get(slot.state, slot.since_ns), slot.since_ns)
    for word in SlotState:
        age_ns = max(0, scrape.at_ns - since[word]) if word in since else 0
        yield "kvbm_slots", counts[word], {"state": word.label}
        yield "kvbm_oldest_slot_seconds", age_ns / SECOND_NS, {"state": word.label}
    for reason in FinishReason:
        yield "kvbm_requests_finished_total", totals.finished[reason], {"reason": reason.label}
    yield "kvbm_preemptions_total", totals.preemptions, _BARE


def _holds(scrape: Scrape) -> Iterator[Sample]:
    state, totals = scrape.state, scrape.state.totals
    oldest = max((scrape.at_ns - hold.since_ns for hold in state.holds.values()), default=0)
    yield "kvbm_holds", len(state.holds), _BARE
    yield "kvbm_oldest_hold_seconds", oldest / SECOND_NS, _BARE
    yield "kvbm_holds_total", totals.holds, _BARE
    for why in HoldEnd:
        yield "kvbm_holds_ended_total", totals.holds_ended[why], {"why": why.label}
    yield "kvbm_holds_denied_total", totals.hold_denied, _BARE
    yield "kvbm_breakpoint_hits_total", totals.breakpoint_hits, _BARE


_STREAM_COUNTERS: Final = (
    "batches", "stored_blocks", "removed_blocks", "lost_batches", "replayed_batches", "restarts", "unknown_events",
    "malformed_events", "bad_payloads", "refused_blocks",
)
"""Fields of ``StreamCounts``."""


def _streams(scrape: Scrape) -> Iterator[Sample]:
    for row in scrape.streams:
        labels = {"source": str(row.source), "publisher": row.label}
        for field in _STREAM_COUNTERS:
            yield f"kvbm_stream_{field}_total", getattr(row.counts, field), labels
        last = row.counts.last_batch_ns
        age_s = None if last is None else max(0, scrape.at_ns - last) / SECOND_NS
        yield "kvbm_stream_connected", row.connected, labels
        yield "kvbm_stream_last_batch_age_seconds", age_s, labels
        yield "kvbm_stream_uncertain", row.source in scrape.state.lost_sources, labels
        yield "kvbm_stream_ended", scrape.state.has_ended(row.source), labels
        if row.page is not None:
            yield "kvbm_engine_scrape_failures_total", row.page.failures, labels
        yield from _engine_numbers(scrape, row.source, labels)
        yield from _lives(scrape, row.source, labels)


_ENGINE_GAUGES: Final = (
    ("kvbm_engine_capacity_blocks", Measure.CAPACITY_BLOCKS, 1), ("kvbm_engine_used_ratio", Measure.USED_PPM, 10**6),
    ("kvbm_engine_running", Measure.RUNNING, 1), ("kvbm_engine_waiting", Measure.WAITING, 1),
    ("kvbm_engine_running_most", Measure.RUNNING_MOST, 1),
    ("kvbm_engine_step_tokens_most", Measure.STEP_TOKENS_MOST, 1),
    ("kvbm_engine_retention_tokens", Measure.RETENTION_TOKENS, 1),
    ("kvbm_engine_preemptions_total", Measure.PREEMPTIONS, 1),
    ("kvbm_engine_query_tokens_total", Measure.QUERY_TOKENS, 1),
    ("kvbm_engine_hit_tokens_total", Measure.HIT_TOKENS, 1),
    ("kvbm_engine_below_query_tokens_total", Measure.BELOW_QUERY_TOKENS, 1),
    ("kvbm_engine_below_hit_tokens_total", Measure.BELOW_HIT_TOKENS, 1),
    ("kvbm_engine_first_token_seconds", Measure.FIRST_TOKEN_NS, SECOND_NS),
)


def _engine_numbers(scrape: Scrape, source: int, labels: Mapping[str, str]) -> Iterator[Sample]:
    """The engine's own numbers as it told them last; unknown numbers are missing."""
    known = scrape.state.measured.get(source)
    for name, measure, unit in _ENGINE_GAUGES:
        if known is not None and measure in known.values:
            yield name, known.values[measure] / unit, labels


def _lives(scrape: Scrape, source: int, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Lifetimes of the blocks of a stream, and those that were stored again."""
    for pool in scrape.state.pools:
        chains = pool.chains
        if pool.info.source != source or chains is None:
            continue
        place = {**labels, "tier": pool.info.tier.label, "medium": pool.info.medium, "group": str(pool.info.group)}
        yield "kvbm_stream_again_blocks_total", sum(chains.again.values()), place
        for share in ("0.5", "0.9"):
            lived = chains.lived_within(float(share))
            yield ("kvbm_stream_block_lifetime_seconds", None if lived is None else lived / SECOND_NS,
                   {**place, "quantile": share})


def _recorder(scrape: Scrape) -> Iterator[Sample]:
    status = scrape.recorder
    if status is None:
        return
    for word in RECORDER_STATES:
        yield "kvbm_recorder_state", status.state == word, {"state": word}
    yield "kvbm_recorder_written_seq", status.written_seq, _BARE
    yield "kvbm_recorder_synced_seq", status.synced_seq, _BARE
    yield "kvbm_recorder_synced_age_seconds", status.synced_age_ns / SECOND_NS, _BARE
    yield "kvbm_recorder_not_recorded_total", status.not_recorded, _BARE


_TAP_COUNTERS: Final = (
    ("kvbm_tap_calls_total", "calls", 1), ("kvbm_tap_dropped_total", "dropped", 1),
    ("kvbm_tap_errors_total", "errors", 1), ("kvbm_tap_call_seconds_total", "call_ns", SECOND_NS),
    ("kvbm_tap_steps_total", "steps", 1), ("kvbm_tap_step_seconds_total", "step_ns", SECOND_NS),
    ("kvbm_tap_audited_places_total", "audited_places", 1), ("kvbm_tap_differing_places_total", "differing_places", 1),
    ("kvbm_sanitize_checked_blocks_total", "checked_blocks", 1),
    ("kvbm_sanitize_mismatched_blocks_total", "mismatched_blocks", 1),
    ("kvbm_sanitize_unknown_blocks_total", "unknown_blocks", 1),
    ("kvbm_sanitize_check_seconds_total", "check_ns", SECOND_NS),
)


def _taps(scrape: Scrape) -> Iterator[Sample]:
    """Only a tap that compares bytes has the counters of ``sanitize``, and only one with a pool those of audits."""
    for row in scrape.taps:
        labels = {"source": row["source"], "engine": row["name"]}
        for name, field, unit in _TAP_COUNTERS:
            if field in row:
                yield name, row[field] / unit, labels
        yield from _engine_numbers(scrape, int(row["source"]), labels)


def _connectors(scrape: Scrape) -> Iterator[Sample]:
    """Time of watched engines inside their connectors' calls, and the connectors' own figures."""
    for source, known in sorted(scrape.state.connectors.items()):
        rows = zip(known.connectors, known.methods, known.calls, known.total_ns, known.longest_ns, strict=True)
        for connector, method, calls, total_ns, longest_ns in rows:
            labels = {"source": str(source), "connector": connector, "method": method}
            yield "kvbm_connector_calls_total", calls, labels
            yield "kvbm_connector_call_seconds_total", total_ns / SECOND_NS, labels
            yield "kvbm_connector_longest_call_seconds", longest_ns / SECOND_NS, labels
        for name, value in zip(known.stats, known.values, strict=True):
            yield "kvbm_connector_figure", value if isfinite(value) else None, {"source": str(source), "figure": name}


def _self(scrape: Scrape) -> Iterator[Sample]:
    state, totals = scrape.state, scrape.state.totals
    yield "kvbm_questions_refused_total", scrape.questions_refused, _BARE
    for row in scrape.parts:
        yield "kvbm_part_healthy", row["healthy"], {"part": row["part"]}
        yield "kvbm_part_ended_total", row["ended"], {"part": row["part"]}
    yield "kvbm_stream_head_seq", state.seq - 1, _BARE
    yield "kvbm_subscribers", scrape.subscribers, _BARE
    yield "kvbm_ring_bytes", scrape.ring_bytes, _BARE
    yield "kvbm_stimuli_rejected_total", totals.rejected, _BARE
    yield "kvbm_completions_refused_total", totals.completions_refused, _BARE
    yield "kvbm_invariant_violations_total", totals.violations, _BARE
    yield "kvbm_process_cpu_seconds_total", time.process_time(), _BARE
    yield "kvbm_process_memory_peak_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT, _BARE
    for result, count in scrape.spans.items():
        yield "kvbm_otlp_spans_total", count, {"result": result}
    for lint, problems in scrape.lints.items():
        yield "kvbm_lint_active", problems, {"lint": lint}
    yield "kvbm_lint_passed_over_events_total", scrape.lints_passed_over, _BARE


_PARTS: Final[tuple[Callable[[Scrape], Iterator[Sample]], ...]] = (
    _tiers, _evictions, _policies, _prefetch, _reuse, _curve, _transfers, _slots, _holds, _streams, _recorder, _taps,
    _connectors, _self,
)
