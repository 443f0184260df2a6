"""Questions that run a recording again: a remedy for one request, and the hit rate of other capacities.

Law of this file: an answer was run, or is exact for LRU, and says which of the two.
"""

import asyncio

from kvbm_console.analysis.explain import explain
from kvbm_console.answers.pages import Answer, ms, paged
from kvbm_console.answers.source import RecordingSource
from kvbm_console.core.errors import UsageError
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.plan import lru_curves
from kvbm_console.planning.recorded import RecordedLoad, read_run
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


async def curve(source: RecordingSource) -> Answer:
    """The hit rate of one LRU cache by its capacity, exact, for the later half of the recorded requests."""
    facts = await source.facts(None)
    load = await asyncio.to_thread(_load, source, None)
    if len(load.requests) < 2:
        raise UsageError(f"a curve needs two requests, and {source.name} has {len(load.requests)}")
    options = SimulateOptions(trace=load.name, **load.option_fields())
    curves = await asyncio.to_thread(lru_curves, options, len(load.requests))
    answer = {
        "seq": facts.seq, "at_ms": ms(facts.at_ns), "exact_for": "LRU, one pool, requests one after the other",
        "capacities_now": {"G1": options.total_kv_blocks, "G2": options.kv_cpu_blocks, "G3": options.kv_disk_blocks},
        "measured_hit_rate": load.hit_rate, "most": round(curves.most, 4), "enough_blocks": curves.enough,
    }
    return paged(answer, ("blocks", "hit_rate"), [[one.blocks, round(one.hit_rate, 4)] for one in curves.points()])


def _load(source: RecordingSource, engine: int | None) -> RecordedLoad:
    run = source.run.recording
    chosen = "" if engine is None else f",engine={engine}"
    return read_run(f"{run.path}{chosen},run={run.incarnation}")
