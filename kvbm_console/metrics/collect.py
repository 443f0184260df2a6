"""The metrics of a daemon: every family, with a help text that explains a bad value.

Tiers are labelled with the medium that the engine names, routes with source and target tier, never with a direction.

Law of this file: it reads and changes nothing. An unknown count is left out, and a count that may be wrong has
``kvbm_tier_uncertain`` or ``kvbm_stream_uncertain`` at 1 beside it.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import (
    AGE_BOUNDS_NS,
    Authority,
    CandidateStatus,
    Condition,
    EvictRule,
    FinishReason,
    HoldEnd,
    Route,
    SkipReason,
    SlotState,
    Tier,
)
from kvbm_console.core.leader import Leader
from kvbm_console.core.leader.foresight import PrefetchAids
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
    """Spans of request timelines by what became of them; empty when none are exported."""
    lints: Mapping[str, int] = {}
    """Lint to the problems that it finds now; empty without a watch."""
    lints_passed_over: int | None = None
    """Events that the lints did not see."""
    block_bytes: int | None = None
    """Bytes of one block, None when unknown."""
    evictions: Mapping[tuple[Tier, EvictRule], int] = {}
    """Blocks given up by tier and deciding rule (``Decider.evictions``)."""
    policies: Mapping[Tier, Mapping[str, float]] = {}
    """Gauges of the policy of each tier that the leader decides (``PoolPolicy.gauges``)."""
    questions_refused: int = 0
    """Questions of clients that were refused because too many waited."""
    parts: Sequence[Mapping[str, Any]] = ()
    """Tasks and threads of the daemon (``Parts.rows``)."""
    prefetch: Mapping[str, int] = {}
    """Counts of prefetched blocks (``PrefetchAids.gauges``); empty when nothing is prefetched."""


def scrape_of(leader: Leader, **others: Any) -> Scrape:
    """The ``Scrape`` of a leader; ``others`` are its further fields. Costs the same however many blocks there are."""
    config = leader.config
    return Scrape(
        state=leader.state, config=config, evictions=leader.evictions,
        policies={
            pool.info.tier: leader.box.policies[pool.info.pool].gauges() for pool in leader.lower_pools()
        },
        prefetch=leader.aids.prefetch.gauges() if prefetches(leader) else {}, **others,
    )


class _Families:
    """Collects families in order; each is made once."""

    def __init__(self) -> None:
        self.made: list[Family] = []

    def make(self, name: str) -> Family:
        """The family of this name, without samples yet."""
        self.made.append(Family(name, HELP[name]))
        return self.made[-1]


def collect(scrape: Scrape) -> list[Family]:
    """All families as of now."""
    began = time.perf_counter()
    families = _Families()
    for part in _PARTS:
        part(families, scrape)
    families.make("kvbm_scrape_seconds").add(time.perf_counter() - began)
    return families.made


def _tiers(families: _Families, scrape: Scrape) -> None:
    state = scrape.state
    capacity = families.make("kvbm_tier_capacity_blocks")
    blocks = families.make("kvbm_tier_blocks")
    resident = families.make("kvbm_tier_resident_blocks")
    uncertain = families.make("kvbm_tier_uncertain")
    resident_bytes = families.make("kvbm_tier_resident_bytes")
    for (tier, medium), declared in _by_medium(state).items():
        pools = state.living(declared)
        labels = {"tier": tier.label, "medium": medium}
        capacities = [pool.info.capacity_blocks for pool in pools]
        known = None not in capacities
        capacity.add(sum(each or 0 for each in capacities) if known else None, labels)
        for condition in Condition:
            if known or condition is not Condition.EMPTY:  # unknown places cannot be counted as empty
                blocks.add(sum(pool.counts[condition] for pool in pools), {**labels, "condition": condition.label})
        blocks_here = sum(pool.resident_blocks for pool in pools)
        resident.add(blocks_here, labels)
        resident_bytes.add(_bytes(scrape, blocks_here), labels)
        uncertain.add(any(pool.info.source in state.lost_sources for pool in pools), labels)


def _bytes(scrape: Scrape, blocks: int) -> int | None:
    return None if scrape.block_bytes is None else blocks * scrape.block_bytes


def _evictions(families: _Families, scrape: Scrape) -> None:
    """Without tiers that only event streams describe, because streams give no reason."""
    state = scrape.state
    told = {pool.info.tier for pool in state.pools if pool.info.authority is not Authority.STREAM}
    evicted = families.make("kvbm_evicted_blocks_total")
    by_rule = families.make("kvbm_policy_evicted_blocks_total")
    for tier in sorted(told):
        evicted.add(state.totals.evicted_blocks[tier - 1], {"tier": tier.label})
    for (tier, rule), blocks in sorted(scrape.evictions.items()):
        by_rule.add(blocks, {"tier": tier.label, "rule": rule.label})


_POLICY_GAUGES: Final = (
    ("kvbm_policy_entries", "entries"), ("kvbm_policy_ghosts", "ghosts"), ("kvbm_policy_ghosts_max", "ghosts_max"),
    ("kvbm_policy_half_life_seconds", "half_life_s"), ("kvbm_policy_frequency_weight", "weight"),
    ("kvbm_policy_changes_total", "changes"), ("kvbm_policy_guarded_blocks", "guarded"),
    ("kvbm_pinned_hit_blocks_total", "pinned_hits"), ("kvbm_policy_not_admitted_blocks_total", "not_admitted"),
)


def _policies(families: _Families, scrape: Scrape) -> None:
    families.make("kvbm_policy_offload_threshold").add(scrape.config.offload_threshold)
    families.make("kvbm_policy_offload_hysteresis").add(scrape.config.offload_hysteresis)
    for name, gauge in _POLICY_GAUGES:
        family = families.make(name)
        for tier, gauges in scrape.policies.items():
            family.add(gauges.get(gauge), {"tier": tier.label, "policy": scrape.config.eviction.policy})


_PREFETCH_COUNTERS: Final = (
    ("kvbm_prefetch_fetched_blocks_total", "fetched"), ("kvbm_prefetch_used_blocks_total", "used"),
    ("kvbm_prefetch_late_blocks_total", "late"), ("kvbm_prefetch_disk_blocks_total", "from_disk"),
    ("kvbm_prefetch_evicted_blocks_total", "evicted_unused"),
    ("kvbm_prefetch_limits_total", "limits"), ("kvbm_prefetch_limited", "limited"),
)


def _prefetch(families: _Families, scrape: Scrape) -> None:
    labels = {"predictor": scrape.config.prefetch}
    for name, count in _PREFETCH_COUNTERS:
        families.make(name).add(scrape.prefetch.get(count), labels)
    wasted = families.make("kvbm_prefetch_wasted_bytes_total")
    shares = PrefetchAids.shares(scrape.prefetch) if scrape.prefetch else {}
    for share in ("precision", "coverage", "timeliness"):
        families.make(f"kvbm_prefetch_{share}_ratio").add(shares.get(share), labels)
    if scrape.prefetch:
        wasted.add(_bytes(scrape, scrape.prefetch["evicted_unused"]), labels)


def _by_medium(state: CacheState) -> dict[tuple[Tier, str], list[PoolFacts]]:
    found: dict[tuple[Tier, str], list[PoolFacts]] = {}
    for pool in state.pools:
        found.setdefault((pool.info.tier, pool.info.medium), []).append(pool)
    return found


def _reuse(families: _Families, scrape: Scrape) -> None:
    totals = scrape.state.totals
    families.make("kvbm_prompt_blocks_total").add(totals.prompt_blocks)
    hits = families.make("kvbm_hit_blocks_total")
    matched = families.make("kvbm_matched_tokens_total")
    for tier in Tier:
        hits.add(totals.hit_blocks[tier - 1], {"tier": tier.label})
        matched.add(totals.hit_blocks[tier - 1] * scrape.config.block_tokens, {"tier": tier.label})
    families.make("kvbm_lost_hit_blocks_total").add(totals.lost_blocks)
    _thrash(families, scrape)


def _thrash(families: _Families, scrape: Scrape) -> None:
    totals = scrape.state.totals
    thrash = families.make("kvbm_thrash_blocks_total")
    families.make("kvbm_thrash_window_seconds").add(scrape.config.thrash_window_ns / SECOND_NS)
    again = families.make("kvbm_asked_again_blocks_total")
    for tier in Tier:
        thrash.add(totals.returned_blocks[tier - 1], {"tier": tier.label})
        counts = totals.asked_again[tier - 1]
        if any(counts):
            bounds = [*(f"{bound / SECOND_NS:g}" for bound in AGE_BOUNDS_NS[:-1]), "+Inf"]
            for bound, blocks in zip(bounds, accumulate(counts), strict=True):
                again.add(blocks, {"tier": tier.label, "le": bound})


def _transfers(families: _Families, scrape: Scrape) -> None:
    state, totals = scrape.state, scrape.state.totals
    moved = families.make("kvbm_moved_blocks_total")
    moved_bytes = families.make("kvbm_moved_bytes_total")
    for label, blocks in totals.moved_blocks.items():
        labels = _route(Route.labelled(label))
        moved.add(blocks, labels)
        moved_bytes.add(_bytes(scrape, blocks), labels)
    flying: dict[Route, int] = {}
    oldest: dict[Route, int] = {}
    for candidate in state.candidates.values():
        flying[candidate.route] = flying.get(candidate.route, 0) + len(candidate.hashes)
        oldest[candidate.route] = min(oldest.get(candidate.route, scrape.at_ns), candidate.planned_ns)
    in_flight = families.make("kvbm_candidate_blocks")
    age = families.make("kvbm_oldest_candidate_seconds")
    for route, blocks in flying.items():
        in_flight.add(blocks, _route(route))
        age.add(max(0, scrape.at_ns - oldest[route]) / SECOND_NS, _route(route))
    ended = families.make("kvbm_candidates_ended_total")
    for status in CandidateStatus:
        if status > CandidateStatus.PROMOTED:
            ended.add(totals.candidates_ended[status], {"status": status.label})
    skipped = families.make("kvbm_candidates_skipped_total")
    for reason in SkipReason:
        skipped.add(totals.skipped[reason], {"reason": reason.label})


def _route(route: Route) -> dict[str, str]:
    return {"source": route.source.label, "target": route.target.label}


def _slots(families: _Families, scrape: Scrape) -> None:
    state, totals = scrape.state, scrape.state.totals
    counts = dict.fromkeys(SlotState, 0)
    since: dict[SlotState, int] = {}
    for slot in state.slots.values():
        counts[slot.state] += 1
        since[slot.state] = min(since.get(slot.state, slot.since_ns), slot.since_ns)
    slots = families.make("kvbm_slots")
    age = families.make("kvbm_oldest_slot_seconds")
    for word in SlotState:
        slots.add(counts[word], {"state": word.label})
        age.add(max(0, scrape.at_ns - since[word]) / SECOND_NS if word in since else 0, {"state": word.label})
    finished = families.make("kvbm_requests_finished_total")
    for reason in FinishReason:
        finished.add(totals.finished[reason], {"reason": reason.label})
    families.make("kvbm_preemptions_total").add(totals.preemptions)


def _holds(families: _Families, scrape: Scrape) -> None:
    state, totals = scrape.state, scrape.state.totals
    families.make("kvbm_holds").add(len(state.holds))
    oldest = max((scrape.at_ns - hold.since_ns for hold in state.holds.values()), default=0)
    families.make("kvbm_oldest_hold_seconds").add(oldest / SECOND_NS)
    families.make("kvbm_holds_total").add(totals.holds)
    ended = families.make("kvbm_holds_ended_total")
    for why in HoldEnd:
        ended.add(totals.holds_ended[why], {"why": why.label})
    families.make("kvbm_holds_denied_total").add(totals.hold_denied)
    families.make("kvbm_breakpoint_hits_total").add(totals.breakpoint_hits)


_STREAM_COUNTERS: Final = (
    ("kvbm_stream_batches_total", "batches"),
    ("kvbm_stream_stored_blocks_total", "stored_blocks"),
    ("kvbm_stream_removed_blocks_total", "removed_blocks"),
    ("kvbm_stream_lost_batches_total", "lost_batches"),
    ("kvbm_stream_replayed_batches_total", "replayed_batches"),
    ("kvbm_stream_restarts_total", "restarts"),
    ("kvbm_stream_unknown_events_total", "unknown_events"),
    ("kvbm_stream_malformed_events_total", "malformed_events"),
    ("kvbm_stream_bad_payloads_total", "bad_payloads"),
    ("kvbm_stream_refused_blocks_total", "refused_blocks"),
)


def _streams(families: _Families, scrape: Scrape) -> None:
    rows = [({"source": str(row.source), "publisher": row.label}, row) for row in scrape.streams]
    for name, field in _STREAM_COUNTERS:
        family = families.make(name)
        for labels, row in rows:
            family.add(getattr(row.counts, field), labels)
    connected = families.make("kvbm_stream_connected")
    age = families.make("kvbm_stream_last_batch_age_seconds")
    uncertain = families.make("kvbm_stream_uncertain")
    for labels, row in rows:
        connected.add(row.status.connected, labels)
        last = row.counts.last_batch_ns
        age.add(None if last is None else max(0, scrape.at_ns - last) / SECOND_NS, labels)
        uncertain.add(row.source in scrape.state.lost_sources, labels)


def _recorder(families: _Families, scrape: Scrape) -> None:
    status = scrape.recorder
    state = families.make("kvbm_recorder_state")
    written = families.make("kvbm_recorder_written_seq")
    synced = families.make("kvbm_recorder_synced_seq")
    age = families.make("kvbm_recorder_synced_age_seconds")
    lost = families.make("kvbm_recorder_not_recorded_total")
    if status is None:
        return
    for word in RECORDER_STATES:
        state.add(status.state == word, {"state": word})
    written.add(status.written_seq)
    synced.add(status.synced_seq)
    age.add(status.synced_age_ns / SECOND_NS)
    lost.add(status.not_recorded)


def _parts(families: _Families, scrape: Scrape) -> None:
    families.make("kvbm_questions_refused_total").add(scrape.questions_refused)
    healthy = families.make("kvbm_part_healthy")
    ended = families.make("kvbm_part_ended_total")
    for row in scrape.parts:
        healthy.add(row["healthy"], {"part": row["part"]})
        ended.add(row["ended"], {"part": row["part"]})


_TAP_COUNTERS: Final = (
    ("kvbm_tap_calls_total", "calls", 1), ("kvbm_tap_dropped_total", "dropped", 1),
    ("kvbm_tap_errors_total", "errors", 1), ("kvbm_tap_call_seconds_total", "call_ns", SECOND_NS),
    ("kvbm_tap_steps_total", "steps", 1), ("kvbm_tap_step_seconds_total", "step_ns", SECOND_NS),
)


def _taps(families: _Families, scrape: Scrape) -> None:
    for name, field, unit in _TAP_COUNTERS:
        family = families.make(name)
        for row in scrape.taps:
            family.add(row[field] / unit, {"source": row["source"], "engine": row["name"]})


_CHECKS: Final = (
    ("kvbm_sanitize_checked_blocks_total", "checked_blocks", 1),
    ("kvbm_sanitize_mismatched_blocks_total", "mismatched_blocks", 1),
    ("kvbm_sanitize_unknown_blocks_total", "unknown_blocks", 1),
    ("kvbm_sanitize_check_seconds_total", "check_ns", SECOND_NS),
)


def _checks(families: _Families, scrape: Scrape) -> None:
    """Of engines whose tap compares bytes; the others have no sample."""
    for name, field, unit in _CHECKS:
        family = families.make(name)
        for row in scrape.taps:
            if field in row:
                family.add(row[field] / unit, {"source": row["source"], "engine": row["name"]})


def _spans(families: _Families, scrape: Scrape) -> None:
    spans = families.make("kvbm_otlp_spans_total")
    for result, count in scrape.spans.items():
        spans.add(count, {"result": result})


def _lints(families: _Families, scrape: Scrape) -> None:
    active = families.make("kvbm_lint_active")
    for lint, problems in scrape.lints.items():
        active.add(problems, {"lint": lint})
    families.make("kvbm_lint_passed_over_events_total").add(scrape.lints_passed_over)


def _self(families: _Families, scrape: Scrape) -> None:
    state, totals = scrape.state, scrape.state.totals
    families.make("kvbm_stream_head_seq").add(state.seq - 1)
    families.make("kvbm_subscribers").add(scrape.subscribers)
    families.make("kvbm_ring_bytes").add(scrape.ring_bytes)
    families.make("kvbm_stimuli_rejected_total").add(totals.rejected)
    families.make("kvbm_completions_refused_total").add(totals.completions_refused)
    families.make("kvbm_invariant_violations_total").add(totals.violations)
    families.make("kvbm_process_cpu_seconds_total").add(time.process_time())
    families.make("kvbm_process_memory_peak_bytes").add(_memory_peak_bytes())


def _memory_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


_PARTS: Final[tuple[Callable[[_Families, Scrape], None], ...]] = (
    _tiers, _evictions, _reuse, _policies, _prefetch, _transfers, _slots, _holds, _streams, _taps, _checks, _recorder,
    _parts, _self,
    _spans, _lints,
)
