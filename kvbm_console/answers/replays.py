"""Questions that run a recording again: a remedy for one request, and the hit rate of other capacities.

Law of this file: an answer was run, or is exact for LRU, and says which of the two.
"""

import asyncio
from collections import defaultdict

from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import walk
from kvbm_console.answers.pages import Answer, ms, paged
from kvbm_console.answers.source import RecordingSource
from kvbm_console.core import events as ev
from kvbm_console.core.errors import UsageError
from kvbm_console.core.state import CacheState
from kvbm_console.planning.cache_only import in_order
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.plan import lru_curves
from kvbm_console.planning.recorded import RecordedLoad, read_run
from kvbm_console.planning.run import open_trace
from kvbm_console.planning.what_if import Counterfactual
from kvbm_console.planning.what_if import what_if as search


async def what_if(source: RecordingSource, request: str) -> Answer:
    """The least change that would have spared a request its misses, preemption or long wait; each was run."""
    evidence = await source.evidence()
    found: Counterfactual
    last, found = await asyncio.to_thread(_searched, source, request)
    troubles = [[one.kind, one.text, one.tried, one.inevitable_seq, one.inevitable] for one in found.troubles]
    rows = [
        [one.kind, remedy.flags, remedy.more_blocks, remedy.outcome.hits, remedy.outcome.ttft_ms, ms(remedy.latest_ns)]
        for one in found.troubles for remedy in one.remedies
    ]
    answer = {
        "seq": next((one.inevitable_seq for one in found.troubles if one.inevitable_seq is not None), last),
        "at_ms": next((ms(one.inevitable_ns) for one in found.troubles if one.inevitable_ns is not None), None),
        "request": request, "source": evidence.name, "recorded_hits": found.recorded_hits,
        "replayed_alike": found.alike, "notes": found.notes, "trouble_columns": [
            "kind", "text", "replays", "inevitable_from_seq", "inevitable"], "troubles": troubles,
    }
    return paged(answer, ("trouble", "flags", "more_blocks", "hits", "ttft_ms", "until_ms"), rows)


def _searched(source: RecordingSource, request: str) -> tuple[int | None, Counterfactual]:
    explanation = explain(source.run.evidence, request)
    last = explanation.admissions[-1].seq if explanation.admissions else None
    return last, search(_load(source, explanation.engine), explanation)


class _FirstHits(Visitor):
    """Prompt blocks that the first admissions of requests found, those of failed loads taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.of: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """Request to its slots, in their order, and what each found."""
        self._again: set[int] = set()
        """Slots that were admitted again, after a preemption."""
        self.after = {ev.PrefixScored: self._scored, ev.HitsLost: self._lost}

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        found = self.of[state.slots[e.slot].request]
        if e.slot in found:
            self._again.add(e.slot)
        else:
            found[e.slot] = sum(e.hits)

    def _lost(self, e: ev.HitsLost, state: CacheState) -> None:
        found = self.of[state.slots[e.slot].request]
        if e.slot in found and e.slot not in self._again:
            found[e.slot] -= e.blocks


def _measured(load: RecordedLoad, options: SimulateOptions, first: _FirstHits) -> float | None:
    """The hit rate of the later half of the requests at their first admissions; None for a stream."""
    found = {request: iter(slots.values()) for request, slots in first.of.items()}
    hits = asked = 0
    for number, request in enumerate(in_order(open_trace(options), load.block_tokens)):
        mine = next(found.get(request.request, iter(())), None)
        if mine is not None and number >= len(load.requests) // 2:
            hits, asked = hits + mine, asked + (request.prompt_tokens - 1) // load.block_tokens
    return round(hits / asked, 4) if asked else None


async def curve(source: RecordingSource) -> Answer:
    """The exact hit rate of one LRU cache by its capacity, and the measured rate of the same requests.

    Both are about the later half of the recorded requests, and about their first admissions.
    """
    facts = await source.facts(None)
    load = await asyncio.to_thread(_load, source, None)
    if len(load.requests) < 2:
        raise UsageError(f"a curve needs two requests, and {source.name} has {len(load.requests)}")
    options = SimulateOptions(trace=load.name, **load.option_fields())
    curves = await asyncio.to_thread(lru_curves, options, len(load.requests))
    first = _FirstHits()
    await asyncio.to_thread(walk, await source.evidence(), (first,))
    answer = {
        "seq": facts.seq, "at_ms": ms(facts.at_ns), "exact_for": "LRU, one pool, requests one after the other",
        "capacities_now": {"G1": options.total_kv_blocks, "G2": options.kv_cpu_blocks, "G3": options.kv_disk_blocks},
        "measured_hit_rate": _measured(load, options, first), "most": round(curves.most, 4),
        "enough_blocks": curves.enough,
    }
    return paged(answer, ("blocks", "hit_rate"), [[one.blocks, round(one.hit_rate, 4)] for one in curves.points()])


def _load(source: RecordingSource, engine: int | None) -> RecordedLoad:
    run = source.run.recording
    chosen = "" if engine is None else f",engine={engine}"
    return read_run(f"{run.path}{chosen},run={run.incarnation}")
