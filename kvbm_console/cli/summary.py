"""What a run came to: the document that ``serve`` ends with, and the line that ``demo`` prints without a terminal.

Law of this file: everything is counted from the facts; the totals are of the whole run, slots and candidates that are
still open are those of now.
"""

from typing import Any

from kvbm_console.cli.output import number, share
from kvbm_console.core.ids import CandidateStatus, FinishReason, SlotState, Tier
from kvbm_console.core.state import CacheState


def summary_document(state: CacheState, recorder: dict[str, Any] | None) -> dict[str, Any]:
    """The summary as JSON values; ``recorder`` is the ``recorder`` part of the status document."""
    totals = state.totals
    slots = {word.label: 0 for word in SlotState}
    for slot in state.slots.values():
        slots[slot.state.label] += 1
    candidates = {word.label: totals.candidates_ended[word] for word in CandidateStatus}
    for candidate in state.candidates.values():
        candidates[candidate.status.label] += 1
    return {
        "requests": {
            "opened": totals.slots_opened, "finished": sum(totals.finished),
            **{f"finished_{word.label}": totals.finished[word] for word in FinishReason},
            "preempted": totals.requests_preempted,
        },
        "slots": slots,
        "candidates": candidates,
        "hits": {tier.label: totals.hit_blocks[tier - 1] for tier in Tier},
        "lookups": totals.prompt_blocks,
        "lost_blocks": totals.lost_blocks,
        "moved_blocks": dict(sorted(totals.moved_blocks.items())),
        "evicted_blocks": {tier.label: totals.evicted_blocks[tier - 1] for tier in Tier},
        "preemptions": totals.preemptions,
        "holds": totals.holds,
        "violations": totals.violations,
        "rejected": totals.rejected,
        "events": state.seq,
        "at_ns": state.at_ns,
        "recorder": recorder,
    }


def summary_text(document: dict[str, Any]) -> str:
    """The same for people."""
    requests, hits, lookups = document["requests"], document["hits"], document["lookups"]
    reasons = _counts({
        key.removeprefix("finished_"): value for key, value in requests.items() if key.startswith("finished_")
    })
    rows = [
        ("requests", f"{number(requests['finished'])} finished of {number(requests['opened'])}{_in_brackets(reasons)}, "
                     f"{number(requests['preempted'])} preempted at least once"),
        ("slots", _counts(document["slots"]) or "none live"),
        ("candidates", _counts(document["candidates"]) or "none"),
        ("hits", f"{number(sum(hits.values()))} of {number(lookups)} prompt blocks, "
                 f"{share(sum(hits.values()), lookups)}{_in_brackets(_counts(hits))}"),
        ("moved", _counts(document["moved_blocks"], " blocks") or "nothing"),
        ("events", f"{number(document['events'])} published"),
        ("recorder", _recorder(document["recorder"])),
    ]
    if document["violations"]:
        rows.append(("violations", number(document["violations"])))
    return "\n".join(f"{name:<11} {words}" for name, words in rows)


def live_line(document: dict[str, Any]) -> str:
    """One line about now."""
    slots, hits, moved = document["slots"], document["hits"], document["moved_blocks"]
    live = {label: count for label, count in slots.items() if count}
    down = sum(blocks for route, blocks in moved.items() if route[1] < route[4])
    up = sum(blocks for route, blocks in moved.items() if route[1] > route[4])
    return (
        f"{document['at_ns'] / 1e9:7.1f}s  {number(document['events']):>9} events  "
        f"{number(document['requests']['finished']):>5} finished  {sum(live.values()):>3} live ({_counts(live)})  "
        f"hits {share(sum(hits.values()), document['lookups'])}  offloaded {number(down)}  onboarded {number(up)}  "
        f"preemptions {number(document['preemptions'])}"
    )


def _counts(values: dict[str, int], unit: str = "") -> str:
    return ", ".join(f"{number(count)}{unit} {label}" for label, count in values.items() if count)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _recorder(recorder: dict[str, Any] | None) -> str:
    if recorder is None:
        return "off"
    return f"{recorder['state']}, written {number(recorder['written_seq'])}, synced {number(recorder['synced_seq'])}"
