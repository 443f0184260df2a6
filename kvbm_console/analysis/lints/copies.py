"""Lints about copies: waiting too long, slow, silent, failed, the last of a batch.

Law of this file: time on the wire and time in front of it are judged apart, each against its own route of its own
daemon.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.analysis.lints.lint import EVIDENCE_MAX, Finding, Histogram, Level, Lint, limit_of, plural, spoken
from kvbm_console.analysis.waits import Way, daemon_of, way_of
from kvbm_console.core import events as ev
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import CandidateStatus
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

PENDING_LEAST_NS: Final = 2 * SECOND_NS
WIRE_LEAST_NS: Final = 100_000_000
SILENT_LEAST_NS: Final = 30 * SECOND_NS
SILENT_FACTOR: Final = 4
STRAGGLER_FACTOR: Final = 4
STRAGGLER_LEAST_NS: Final = 100_000_000


class _Slowness(msgspec.Struct):
    """Copies of one route of one daemon that were too slow at something."""

    count: int = 0
    longest_ns: int = 0
    seq: int = 0
    since_ns: int = 0
    until_ns: int = 0
    evidence: list[int] = []

    def add(self, seq: int, since_ns: int, at_ns: int, took_ns: int) -> None:
        """Count another copy."""
        self.count += 1
        if took_ns > self.longest_ns:
            self.longest_ns, self.seq = took_ns, seq
        self.since_ns = min(self.since_ns or since_ns, since_ns)
        self.until_ns = max(self.until_ns, at_ns)
        if len(self.evidence) < EVIDENCE_MAX:
            self.evidence = [*self.evidence, seq]


class Pending(Lint):
    """Candidates that wait for a decision, and copies that wait for their link."""

    name = "pending"
    threshold = (
        "a copy not begun for more than 4 × p99 of its route, at least 2 s; 10 s while fewer than 20 were seen"
    )
    bad = "blocks that should be saved or loaded wait in line"
    do = (
        "look at what stands in front of it. A closed pipeline or a full tier below holds all copies, a busy link "
        "those that are promoted"
    )
    ends = True
    view = "transfers"

    def __init__(self) -> None:
        super().__init__()
        self.usual: dict[Way, Histogram] = {}
        self._late: dict[Way, _Slowness] = {}
        self._seq: dict[int, int] = {}
        self._excused: set[int] = set()
        """Candidates that a hold or a freeze kept waiting."""
        self.before = {
            ev.OperationStarted: self._started, ev.CandidateSkipped: self._decided, ev.CandidateEnded: self._decided,
        }
        self.after = {
            ev.CandidatePlanned: self._planned, ev.SlotHeld: self._held, ev.Frozen: self._frozen,
        }

    def _planned(self, e: ev.CandidatePlanned, state: CacheState) -> None:
        self._seq[e.candidate] = e.seq
        held = e.slot is not None and state.slots[e.slot].hold is not None
        if held or state.pipeline_closed:
            self._excused.add(e.candidate)

    def _held(self, e: ev.SlotHeld, state: CacheState) -> None:
        self._excused |= state.candidates.keys() if state.pipeline_closed else state.slots[e.slot].outstanding

    def _frozen(self, e: ev.Frozen, state: CacheState) -> None:
        self._excused |= state.candidates.keys()

    def _started(self, e: ev.OperationStarted, state: CacheState) -> None:
        self._over(state.operations[e.operation].candidate, e, state)

    def _decided(self, e: ev.CandidateSkipped | ev.CandidateEnded, state: CacheState) -> None:
        if state.candidates[e.candidate].started_ns is None:
            self._over(e.candidate, e, state)

    def _over(self, number: int, e: ev.Event, state: CacheState) -> None:
        """The candidate no longer waits."""
        candidate = state.candidates[number]
        waited = e.at_ns - candidate.planned_ns
        seq = self._seq.pop(number, e.seq)
        if number in self._excused:
            self._excused.discard(number)
            return
        way = way_of(state, candidate)
        if waited > self.limit(way):
            self._late.setdefault(way, _Slowness()).add(seq, candidate.planned_ns, e.at_ns, waited)
        if isinstance(e, ev.OperationStarted):
            self.usual.setdefault(way, Histogram()).add(waited)

    def limit(self, way: Way) -> int:
        """The limit of the time until a copy begins."""
        return limit_of(self.usual.get(way), PENDING_LEAST_NS)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """A finding per route of a daemon: the copies that wait now, else the copies that waited."""
        waiting: dict[Way, _Slowness] = {}
        for candidate in () if state is None else state.candidates.values():
            if state is None or candidate.started_ns is not None or candidate.candidate in self._excused:
                continue
            slot = None if candidate.slot is None else state.slots[candidate.slot]
            age, way = at_ns - candidate.planned_ns, way_of(state, candidate)
            if not (slot is not None and slot.hold is not None) and age > self.limit(way):
                seq = self._seq.get(candidate.candidate, 0)
                waiting.setdefault(way, _Slowness()).add(seq, candidate.planned_ns, at_ns, age)
        yield from _by_route(self, self._late, waiting, self.usual, PENDING_LEAST_NS, "waiting candidate")


class Slow(Lint):
    """Copies that are long on the wire."""

    name = "slow"
    threshold = (
        "a copy on the wire for more than 4 × p99 of its route, at least 100 ms; 10 s while fewer than 20 were seen"
    )
    bad = "requests that wait for the load wait with it, and its places stay pinned at both ends"
    do = "look at the link or disk of this route"
    ends = True
    view = "transfers"

    def __init__(self) -> None:
        super().__init__()
        self.usual: dict[Way, Histogram] = {}
        self._late: dict[Way, _Slowness] = {}
        self._seq: dict[int, int] = {}
        self._away: dict[int, tuple[int, int]] = {}
        """Operation of an older epoch to (seq, time) of the reset that quarantined its places."""
        self.before = {ev.CandidateEnded: self._ended}
        self.after = {ev.OperationStarted: self._started, ev.BlocksQuarantined: self._quarantined}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Copies that were already open count from their first known time."""
        self._away = dict.fromkeys(state.late, (state.seq, state.at_ns))

    def _quarantined(self, e: ev.BlocksQuarantined, state: CacheState) -> None:
        self._away = {number: since for number, since in self._away.items() if number in state.late}
        self._away.setdefault(e.operation, (e.seq, e.at_ns))

    def _started(self, e: ev.OperationStarted, state: CacheState) -> None:
        self._seq[e.operation] = e.seq

    def _ended(self, e: ev.CandidateEnded, state: CacheState) -> None:
        candidate = state.candidates[e.candidate]
        seq = self._seq.pop(-1 if candidate.operation is None else candidate.operation, e.seq)
        if candidate.started_ns is None or e.status is CandidateStatus.CANCELLED:
            return
        took, way = e.at_ns - candidate.started_ns, way_of(state, candidate)
        if took > self.limit(way):
            self._late.setdefault(way, _Slowness()).add(seq, candidate.started_ns, e.at_ns, took)
        if e.status is CandidateStatus.COMPLETED:
            self.usual.setdefault(way, Histogram()).add(took)

    def limit(self, way: Way) -> int:
        """The limit of the time on the wire."""
        return limit_of(self.usual.get(way), WIRE_LEAST_NS)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """A finding per route of a daemon: the copies that are slow now, else past slow copies. A silent copy gives
        ``Silent``."""
        running: dict[Way, _Slowness] = {}
        for candidate in () if state is None else state.candidates.values():
            if state is None or candidate.started_ns is None or candidate.operation is None:
                continue
            age = at_ns - candidate.started_ns
            seq, way = self._seq.get(candidate.operation, 0), way_of(state, candidate)
            limit = self.limit(way)
            slot = None if candidate.slot is None else state.slots[candidate.slot]
            if age > max(SILENT_LEAST_NS, SILENT_FACTOR * limit) and not (slot is not None and slot.hold is not None):
                reported = state.operations[candidate.operation].reported
                text = f"{plural(len(reported), 'rank')} reported" if reported else "no rank reported"
                yield Silent.finding(
                    f"op {candidate.operation}", f"{candidate.route.arrow} {spoken(age)}",
                    f"{text}; {plural(len(candidate.hashes), 'block')} pinned at both ends", seq=seq, slot=slot,
                    since_ns=candidate.started_ns, weight=age,
                )
            elif age > limit:
                running.setdefault(way, _Slowness()).add(seq, candidate.started_ns, at_ns, age)
        yield from _by_route(self, self._late, running, self.usual, WIRE_LEAST_NS, "slow copy")
        for number in () if state is None else state.late:
            seq, since_ns = self._away[number]
            if at_ns - since_ns > SILENT_LEAST_NS:
                yield Silent.finding(
                    f"op {number}", f"quarantined {spoken(at_ns - since_ns)}",
                    "it ran when the leader was reset and has not reported since; its places stay out of use",
                    seq=seq, since_ns=since_ns, weight=at_ns - since_ns,
                )


class Silent(Lint):
    """Copies that started and do not end. ``Slow`` tells them, because it knows the usual time of their route."""

    name = "silent"
    level = Level.FAULT
    threshold = "a copy without all its reports for 30 s and for 4 × the limit of its route"
    bad = "a report that never comes pins the places of the copy for ever, and its request never ends"
    do = "look at the worker of the silent rank; a reset frees the places when it reports or is gone"


def _by_route(
    lint: Lint, late: dict[Way, _Slowness], now: dict[Way, _Slowness], usual: dict[Way, Histogram], least_ns: int,
    word: str,
) -> Iterator[Finding]:
    for way in sorted({*late, *now}):
        was, is_ = late.get(way), now.get(way)
        slow = is_ or was
        assert slow is not None
        limit = spoken(limit_of(usual.get(way), least_ns))
        earlier = f", {was.count:,} before" if was is not None and is_ is not None else ""
        yield lint.finding(
            way[0].arrow, plural(slow.count, word), f"longest {spoken(slow.longest_ns)}, limit {limit}{earlier}",
            seq=slow.seq, evidence=slow.evidence, since_ns=slow.since_ns,
            until_ns=None if is_ is not None else slow.until_ns,
            count=slow.count + (was.count if was is not None and is_ is not None else 0), weight=slow.longest_ns,
        )


class FailedCopies(Lint):
    """Copies that did not arrive."""

    name = "failed_copies"
    threshold = "one copy that failed"
    bad = "hits are taken back and computed again; blocks that should be kept are lost"
    do = "read the error that the rank reported"

    def __init__(self) -> None:
        super().__init__()
        self._failed: dict[Way, tuple[_Slowness, str]] = {}
        self.before = {ev.CandidateEnded: self._ended}

    def _ended(self, e: ev.CandidateEnded, state: CacheState) -> None:
        if e.status is not CandidateStatus.FAILED:
            return
        candidate = state.candidates[e.candidate]
        operation = state.operations.get(-1 if candidate.operation is None else candidate.operation)
        error = operation.error if operation is not None else ""
        way = way_of(state, candidate)
        failures, _ = self._failed.get(way, (_Slowness(), ""))
        failures.add(e.seq, e.at_ns, e.at_ns, 1 + failures.longest_ns)
        self._failed[way] = (failures, error)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """A finding per route of a daemon."""
        for (route, _), (failures, error) in sorted(self._failed.items()):
            yield self.finding(
                route.arrow, plural(failures.count, "failed copy"), f"last error: {error or 'none given'}",
                seq=failures.evidence[0], evidence=failures.evidence, since_ns=failures.since_ns,
                until_ns=failures.until_ns, count=failures.count, weight=failures.count,
            )


class Straggler(Lint):
    """The last copy of a batch, long behind the others."""

    name = "straggler"
    threshold = "the last copy of a batch needs 4 × the time of the others, and 100 ms more"
    bad = "the request waits for the slowest part of its load"
    do = "look at the tier that the straggler reads from"

    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[int, list[int]] = {}
        """Open batch to [promoted first, members, ended last but one, ended last, the candidate of that, daemon]."""
        self._batch_of: dict[int, int] = {}
        self._worst: dict[int, Finding] = {}
        """Daemon to its worst straggler, with the number of its stragglers."""
        self.after = {ev.CandidatePromoted: self._promoted, ev.BatchEnded: self._over}
        self.before = {ev.CandidateEnded: self._ended}

    def _promoted(self, e: ev.CandidatePromoted, state: CacheState) -> None:
        daemon = daemon_of(state, e.source_pool)
        batch = self._batches.setdefault(e.batch, [e.at_ns, 0, e.at_ns, e.at_ns, e.candidate, daemon])
        batch[1] += 1
        self._batch_of[e.candidate] = e.batch

    def _ended(self, e: ev.CandidateEnded, state: CacheState) -> None:
        batch = self._batches.get(self._batch_of.pop(e.candidate, -1))
        if batch is not None:
            batch[2], batch[3], batch[4] = batch[3], e.at_ns, e.candidate

    def _over(self, e: ev.BatchEnded, state: CacheState) -> None:
        batch = self._batches.pop(e.batch, None)
        if batch is None or batch[1] < 2:
            return
        began, _, others, last, candidate, daemon = batch
        if last - began > STRAGGLER_FACTOR * (others - began) and last - others > STRAGGLER_LEAST_NS:
            worst = self._worst.get(daemon)
            count = 1 if worst is None else worst.count + 1
            if worst is None or last - others > worst.weight:
                worst = self.finding(
                    f"batch {e.batch}", f"its last copy {spoken(last - others)} late",
                    f"candidate {candidate} took {spoken(last - began)}, the others {spoken(others - began)}",
                    seq=e.seq, since_ns=others, until_ns=last, weight=last - others,
                )
            self._worst[daemon] = msgspec.structs.replace(worst, count=count)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """The worst straggler of each daemon, with the number of its stragglers."""
        yield from self._worst.values()
