"""The summary that a daemon ends with.

Law of this file: the facts, or the part that owns a number, count it, and nothing is counted twice.
"""

from typing import Any

import msgspec

from kvbm_console.bytes.ranks import BytesReport
from kvbm_console.core.ids import CandidateStatus, FinishReason, Tier
from kvbm_console.service import LeaderService


class Watermarks(msgspec.Struct, frozen=True):
    """How far the recording goes. ``not_recorded`` events had to be dropped, ``unwritten`` the disk did not take."""

    state: str
    written_seq: int
    synced_seq: int
    not_recorded: int
    path: str
    unsealed: tuple[str, ...] = ()
    """Segments that could not be sealed in the time that the end has; ``rec index`` seals them."""
    unwritten: int = 0
    """Events behind ``written_seq`` that wait for a disk that does not answer. They are lost unless it answers."""


class Summary(msgspec.Struct, frozen=True):
    """The outcome of a run. Dictionaries are keyed by labels; reasons and states that did not occur are left out.

    Numbers about requests are None, and ``hits_by_tier`` is empty, if event streams alone reported."""

    at_ns: int
    """The engine's clock."""
    requests_finished: int | None
    finished_by_reason: dict[str, int]
    slots_by_state: dict[str, int]
    """Slots that were live at the end."""
    candidates_by_status: dict[str, int]
    skipped_by_reason: dict[str, int]
    prompt_blocks: int | None
    hits_by_tier: dict[str, int]
    """Prompt blocks found in each tier."""
    evicted_by_tier: dict[str, int]
    preemptions: int | None
    holds: int
    violations: int
    rejected: int
    iterations: int | None
    events_published: int
    stimuli: int
    recorder: Watermarks | None
    carried: BytesReport | None = None
    """The work of the ranks' workers, if blocks have bytes."""


def summarise(service: LeaderService) -> Summary:
    """The summary of a service as of now."""
    state, totals = service.state, service.state.totals
    states: dict[str, int] = {}
    for slot in state.slots.values():
        states[slot.state.label] = states.get(slot.state.label, 0) + 1
    recorder = None
    if service.recorder is not None:
        status = service.recorder.status()
        recorder = Watermarks(
            status.state, status.written_seq, status.synced_seq, status.not_recorded, str(status.path),
            tuple(path.name for path in service.recorder.unsealed), service.recorder.unwritten,
        )
    candidates = _labelled(CandidateStatus, totals.candidates_ended)
    for candidate in state.candidates.values():
        candidates[candidate.status.label] = candidates.get(candidate.status.label, 0) + 1
    told = not state.streams_only
    return Summary(
        at_ns=service.at_ns, requests_finished=sum(totals.finished) if told else None,
        finished_by_reason=_labelled(FinishReason, totals.finished), slots_by_state=states,
        candidates_by_status=candidates,
        skipped_by_reason={reason: count for reason, count in totals.skips().items() if count},
        prompt_blocks=totals.prompt_blocks if told else None,
        hits_by_tier={tier.label: totals.hit_blocks[tier - 1] for tier in Tier if told},
        evicted_by_tier={tier.label: totals.evicted_blocks[tier - 1] for tier in Tier},
        preemptions=totals.preemptions if told else None, holds=totals.holds, violations=totals.violations,
        rejected=totals.rejected, iterations=state.iteration if told else None, events_published=state.seq,
        stimuli=service.dispatcher.n, recorder=recorder,
    )


def _labelled(words: Any, counts: list[int]) -> dict[str, int]:
    return {word.label: counts[word] for word in words if counts[word]}
