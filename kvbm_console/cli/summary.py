"""The summary at the end of ``serve``, and the line that ``demo`` prints without a terminal.

Law of this file: it only formats the daemon's summary (``server.summary``) and the facts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbm_console.cli.output import duration, number, share
from kvbm_console.core.ids import Authority, Measure, SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.stream.publishers import measure_texts


def summary_text(document: Mapping[str, Any]) -> str:
    """The summary for people; ``document`` is what ``--format json`` prints."""
    steps = "" if document["iterations"] is None else f", {number(document['iterations'])} iterations"
    rows = [
        *(_request_rows(document) if document["requests_finished"] is not None else [
            ("requests", "unknown: an event stream names none"),
            ("evicted", counts(document["evicted_by_tier"]) or "none"),
        ]),
        ("events", f"{number(document['events_published'])} published, from {number(document['stimuli'])} stimuli"
                   f"{steps} in {duration(document['at_ns'])}"),
        ("recorder", recorder_text(document["recorder"])),
    ]
    if document["carried"] is not None:
        rows.append(("bytes", carried_text(document["carried"])))
    for name in ("holds", "rejected", "violations"):
        if document[name]:
            rows.append((name, number(document[name])))
    return "\n".join(f"{name:<11} {words}" for name, words in rows)


def _request_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    hits, lookups = document["hits_by_tier"], document["prompt_blocks"]
    found = sum(hits.values())
    return [
        ("requests", f"{number(document['requests_finished'])} finished"
                     f"{_in_brackets(counts(document['finished_by_reason']))}, "
                     f"{number(document['preemptions'])} preemptions"),
        ("slots", counts(document["slots_by_state"]) or "none live"),
        ("candidates", (counts(document["candidates_by_status"]) or "none")
                       + _in_brackets(counts(document["skipped_by_reason"]))),
        ("hits", f"{number(found)} of {number(lookups)} prompt blocks, {share(found, lookups)}"
                 f"{_in_brackets(counts(hits))}"),
    ]


def carried_text(report: Mapping[str, int]) -> str:
    """The work of the ranks' workers and their findings (``bytes.ranks.BytesReport``)."""
    return (
        f"moved {report['moved_bytes'] / 1e9:.2f} GB and compared {number(report['compared_blocks'])} blocks: "
        f"{number(report['wrong_blocks'])} used with wrong bytes, {number(report['failed_blocks'])} failed, "
        f"{number(report['misused_places'])} places used under a copy, {number(report['deaths'])} workers lost"
    )


def carried_well(report: Mapping[str, int] | None) -> bool:
    """True if no request used a wrong byte, and no place was used under a copy."""
    return report is None or not (report["wrong_blocks"] or report["misused_places"])


def live_line(state: CacheState) -> str:
    """A line about the current state."""
    told = any(pool.info.authority is Authority.STREAM for pool in state.pools) or state.lost_sources
    if told and not state.totals.slots_opened:  # a tap reports requests, too
        return _stream_line(state)
    totals = state.totals
    live: dict[str, int] = {}
    for word in SlotState:
        live[word.label] = sum(1 for slot in state.slots.values() if slot.state is word)
    down = sum(blocks for route, blocks in totals.moved_blocks.items() if route[1] < route[4])
    up = sum(blocks for route, blocks in totals.moved_blocks.items() if route[1] > route[4])
    return (
        f"{state.at_ns / 1e9:6.1f}s  {number(state.seq)} events  {number(sum(totals.finished))} finished  "
        f"{len(state.slots)} live{_in_brackets(counts(live))}  "
        f"hits {share(sum(totals.hit_blocks), totals.prompt_blocks)}  "
        f"offloaded {number(down)}  onboarded {number(up)}  preemptions {number(totals.preemptions)}"
    )


def _stream_line(state: CacheState) -> str:
    """The line for followed event streams: a ``?`` marks counts that a loss has made doubtful."""
    media: dict[str, tuple[int, bool]] = {}
    for pool in state.counted(state.pools):
        blocks, doubt = media.get(pool.info.medium, (0, False))
        doubt = doubt or pool.info.source in state.lost_sources
        media[pool.info.medium] = (blocks + pool.resident_blocks, doubt)
    tiers = "  ".join(f"{medium} {number(blocks)}{'?' if doubt else ''}" for medium, (blocks, doubt) in media.items())
    numbers: dict[str, int] = {}
    for known in state.measured.values():
        for measure in (Measure.QUERY_TOKENS, Measure.HIT_TOKENS, Measure.RUNNING, Measure.WAITING):
            if measure in known.values:
                numbers[measure.label] = numbers.get(measure.label, 0) + known.values[measure]
    told = "".join(f"  {text}" for _, text in measure_texts(numbers))
    lost = f"  reports lost from {len(state.lost_sources)} publishers" if state.lost_sources else ""
    return (
        f"{state.at_ns / 1e9:6.1f}s  {number(state.seq)} events  blocks: {tiers or 'none yet'}  "
        f"evicted {number(sum(state.totals.evicted_blocks))}{told}{lost}"
    )


def counts(values: Mapping[str, int]) -> str:
    """``3 decoding, 1 onboarding``: the counts above zero, in the order given."""
    return ", ".join(f"{number(count)} {label}" for label, count in values.items() if count)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def recorder_text(recorder: Mapping[str, Any] | None) -> str:
    """The recorder's progress and place."""
    if recorder is None:
        return "off"
    lost = f", {number(recorder['not_recorded'])} events not recorded" if recorder["not_recorded"] else ""
    unwritten = recorder["unwritten"]
    waiting = f", {number(unwritten)} events not written because the disk does not answer" if unwritten else ""
    return (
        f"{recorder['state']}, written up to event {number(recorder['written_seq'])}, "
        f"synced up to {number(recorder['synced_seq'])}"
        f"{lost}{waiting}, in {recorder['path']}{_unsealed(recorder)}"
    )


def _unsealed(recorder: Mapping[str, Any]) -> str:
    count = len(recorder["unsealed"])
    if not count:
        return ""
    left = "1 segment is whole but not sealed" if count == 1 else f"{count} segments are whole but not sealed"
    return f"; {left}: rec index {Path(recorder['path']).parent} seals"
