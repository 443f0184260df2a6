"""All lints on the whole of some evidence, and the document of ``doctor``.

Law of this file: each lint is asked once, at the end, and the worst finding stands first.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from kvbm_console.analysis.lints import LINTS, Finding, Level, all_lints
from kvbm_console.analysis.lints.process import LostEvents, Unfinished, audited
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import Evidence, Progress, walk
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``doctor``: a stable contract."""

    evidence: str
    ok: bool
    """True if nothing worse than a note was found."""
    events: int
    lost_events: int
    requests: int
    from_ns: int
    until_ns: int
    findings: tuple[Finding, ...]
    """Worst first, longest first among equals."""
    evicted_blocks: int = 0
    thrash_blocks: int | None = 0
    """The part of ``evicted_blocks`` that was brought back within the thrash window; None where only event streams
    report, which do not tell it."""
    thrash_rate: float | None = None
    """``thrash_blocks`` / ``evicted_blocks``; None where nothing was evicted, or where streams do not tell it."""


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The findings worst first, present before past problems, longest first among equals."""
    return sorted(findings, key=lambda each: (each.level, each.until_ns is not None, -each.weight, each.seq))


class _Extent(Visitor):
    """The span of the evidence in time and events, its requests, and its evictions."""

    def __init__(self) -> None:
        super().__init__()
        self.from_ns: int | None = None
        self.until_ns = 0
        self.requests = 0
        self.first_seq = self.next_seq = 0
        self.evicted = self.returned = 0
        self.streams_only = False
        self._before = (0, 0)
        self._slots_before = 0

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        if self.from_ns is None:
            self.from_ns, self.first_seq = state.at_ns, state.seq
            self._slots_before = state.next_slot - len(state.slots)
            self._before = _thrash(state)
        self._look(state)

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        if state is not None:
            self._look(state)

    def _look(self, state: CacheState) -> None:
        self.until_ns, self.next_seq, self.streams_only = state.at_ns, state.seq, state.streams_only
        self.requests = state.next_slot - self._slots_before
        self.evicted, self.returned = (now - then for now, then in zip(_thrash(state), self._before, strict=True))


def _thrash(state: CacheState) -> tuple[int, int]:
    """(blocks evicted, blocks brought back within the window)."""
    return sum(state.totals.evicted_blocks), sum(state.totals.returned_blocks)


def diagnose(evidence: Evidence, progress: Progress | None = None) -> Diagnosis:
    """Everything that the lints find, as of the last event or, of a live target, of now."""
    lints, extent = all_lints(), _Extent()
    state = walk(evidence, [*lints, extent], progress=progress, what="diagnose")
    now_ns = max(extent.until_ns, evidence.now_ns or 0)
    findings = [finding for lint in lints for finding in lint.findings(state, now_ns)]
    if state is not None:
        findings += audited(state, now_ns)
    if not evidence.finished:
        findings.append(Unfinished.finding(
            "recording", "has no end", "still being written, or its daemon was killed",
            seq=max(0, extent.next_seq - 1),
        ))
    lost = next(lint.events for lint in lints if isinstance(lint, LostEvents))
    returned = None if extent.streams_only else extent.returned
    return Diagnosis(
        evidence=evidence.name, ok=all(finding.level is Level.NOTE for finding in findings),
        events=max(0, extent.next_seq - extent.first_seq - lost), lost_events=lost, requests=extent.requests,
        from_ns=extent.from_ns or 0, until_ns=now_ns, findings=tuple(ranked(findings)),
        evicted_blocks=extent.evicted, thrash_blocks=returned,
        thrash_rate=returned / extent.evicted if returned is not None and extent.evicted else None,
    )


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON of ``doctor``: the diagnosis, with threshold, consequence and remedy of each finding."""
    body: dict[str, Any] = msgspec.to_builtins(diagnosis)
    body["findings"] = list(body["findings"])
    for finding in body["findings"]:
        finding["evidence"] = list(finding["evidence"])
        lint = LINTS[finding["lint"]]
        finding["level"] = Level(finding["level"]).label
        finding.pop("weight")
        finding.update(threshold=lint.threshold, bad=lint.bad, do=lint.do)
    return body
