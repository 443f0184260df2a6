"""Lints: what needs a person, found in events and facts, each with threshold, evidence, explanation and what to do.

The console draws them while events come in, ``doctor`` asks them about a whole recording or a live target, tests assert
that there are none. They are visitors of one walk: ``diagnose`` does it all, ``all_lints`` gives the parts, and
``Watch`` shows them a stream while it is folded.

Law of this package: a healthy run has no finding, and a finding names its evidence.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from kvbm_console.analysis.lints.copies import FailedCopies, Pending, Slow, Straggler
from kvbm_console.analysis.lints.model import ABOUT, About, Diagnosis, Finding, Level, current
from kvbm_console.analysis.lints.process import Bugs, Lost, Notes, WrongBytes
from kvbm_console.analysis.lints.rule import Lint
from kvbm_console.analysis.lints.slots import WATCHED, Held, PinLeak, Polled, PreemptLoop, Stuck, fault_after
from kvbm_console.analysis.lints.streams import EngineEnded, PublisherQueue, ReportsLost
from kvbm_console.analysis.lints.tiers import DroppedWithRoom, Full, Thrash
from kvbm_console.analysis.lints.watch import Watch
from kvbm_console.analysis.lints.worth import AlreadyCached, Duplicate, NeverLoaded, Staged
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

if TYPE_CHECKING:
    from kvbm_console.analysis.walk import Evidence, Progress

__all__ = [
    "ABOUT", "WATCHED", "About", "Diagnosis", "Finding", "Level", "Lint", "Pending", "Slow", "Stuck", "Watch",
    "all_lints", "current", "diagnose", "document", "fault_after", "ranked", "stream_lints",
]


def all_lints() -> list[Lint]:
    """One of each, fresh."""
    return [
        Stuck(), Polled(), Held(), PinLeak(), PreemptLoop(), Pending(), Slow(), FailedCopies(), Straggler(),
        Duplicate(), Staged(), NeverLoaded(), AlreadyCached(), Full(), Thrash(), DroppedWithRoom(), Lost(),
        ReportsLost(), EngineEnded(), PublisherQueue(), Notes(), WrongBytes(), Bugs(),
    ]


def stream_lints() -> list[Lint]:
    """Those for a stream that is watched all the time: none of them walks all places to find something."""
    return [
        Stuck(), Polled(), PinLeak(walk_places=False), PreemptLoop(), Pending(), Slow(), FailedCopies(), Straggler(),
        Duplicate(), Staged(), NeverLoaded(), AlreadyCached(), Full(), Thrash(), DroppedWithRoom(), ReportsLost(),
        EngineEnded(), PublisherQueue(), Notes(), WrongBytes(), Bugs(),
    ]


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first, what lasts before what is over, longest first among equals."""
    return sorted(findings, key=lambda one: (one.level, one.until_ns is not None, -one.weight, one.seq))


class _Extent(Visitor):
    """From when to when, and how many requests and events."""

    def __init__(self) -> None:
        super().__init__()
        self.from_ns: int | None = None
        self.until_ns = 0
        self.requests = 0
        self.first_seq = self.next_seq = 0
        self.evicted = self.returned = 0
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
        self.until_ns, self.next_seq = state.at_ns, state.seq
        self.requests = state.next_slot - self._slots_before
        self.evicted, self.returned = (now - then for now, then in zip(_thrash(state), self._before, strict=True))


def _thrash(state: CacheState) -> tuple[int, int]:
    """Blocks evicted, and brought back within the window."""
    return sum(state.totals.evicted_blocks), sum(state.totals.returned_blocks)


def diagnose(evidence: "Evidence", progress: "Progress | None" = None) -> Diagnosis:
    """Everything that the lints find, as of the last event or, of a live target, of now."""
    from kvbm_console.analysis.walk import walk  # it opens files; who only watches a stream does not

    lints, extent = all_lints(), _Extent()
    state = walk(evidence, [*lints, extent], progress=progress, what="diagnose")
    now_ns = max(extent.until_ns, evidence.now_ns or 0)
    findings = [finding for lint in lints for finding in lint.findings(state, now_ns)]
    if not evidence.finished:
        findings.append(Finding(
            lint="unfinished", level=Level.NOTE, who="recording", what="has no end",
            because="still being written, or its daemon was killed", seq=max(0, extent.next_seq - 1),
        ))
    lost = next(lint.events for lint in lints if isinstance(lint, Lost))
    return Diagnosis(
        evidence=evidence.name, ok=all(finding.level is Level.NOTE for finding in findings),
        events=max(0, extent.next_seq - extent.first_seq - lost), lost_events=lost, requests=extent.requests,
        from_ns=extent.from_ns or 0, until_ns=now_ns, findings=tuple(ranked(findings)),
        evicted_blocks=extent.evicted, thrash_blocks=extent.returned,
        thrash_rate=extent.returned / extent.evicted if extent.evicted else None,
    )


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON of ``doctor``: the diagnosis with each finding's threshold, why it is bad and what to do."""
    told: dict[str, Any] = msgspec.to_builtins(diagnosis)
    told["findings"] = list(told["findings"])
    for finding in told["findings"]:
        finding["evidence"] = list(finding["evidence"])
        about = ABOUT[finding["lint"]]
        finding["level"] = Level(finding["level"]).label
        finding.pop("weight")
        finding.update(threshold=about.threshold, bad=about.bad, do=about.do)
    return told
