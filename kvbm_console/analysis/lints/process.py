"""Lints about the process: lost events, the recorder, the clock, the loop, bugs, late reports, a missing end.

Law of this file: findings about missing evidence come first.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.analysis.lints.lint import EVIDENCE_MAX, Finding, Level, Lint, plural
from kvbm_console.analysis.lints.slots import PinLeak
from kvbm_console.core import events as ev
from kvbm_console.core.audit import audit
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.ids import Note
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen, why_lost

LATE_REPORTS: Final = 10
BELOW: Final = "tier"
"""The stage of a mismatch that the tap around a lower tier found."""
VERDICT_WEIGHT: Final = 2**62
"""The weight puts a verdict in front of all findings of its level, whose weights are durations and counts."""


class LostEvents(Lint):
    """Events that are missing."""

    name = "lost"
    threshold = "any event that is missing"
    bad = "what happened there is not known; behind it everything is exact again"
    do = "give the recorder or the reader more room, or look at the disk"
    on_stream = False

    def __init__(self) -> None:
        super().__init__()
        self.events = 0

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Report the gap that ends here."""
        if gap is not None:
            self._seen(gap, state.at_ns, "state is exact again")

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """Report the gap in which the evidence ends."""
        if gap is not None:
            self._seen(gap, 0, "the evidence ends in it")

    def _seen(self, gap: GapSeen, at_ns: int, then: str) -> None:
        self.events += gap.count
        self.over(self.finding(
            plural(gap.count, "event"), "lost", f"{gap.first:,} to {gap.last:,}: {why_lost(gap.reason)}; {then}",
            seq=gap.first, evidence=(gap.last,), since_ns=at_ns, until_ns=at_ns, count=gap.count, weight=gap.count,
        ))


class Degraded(Lint):
    """The recorder dropped events."""

    name = "recorder"
    threshold = "the recorder was degraded"
    bad = "events were published and not recorded"
    do = "free space where the recording goes, or record elsewhere"
    drawn = False

    def __init__(self) -> None:
        super().__init__()
        self._began: ev.Noted | None = None
        self.after = {ev.Noted: self._noted}

    def _noted(self, e: ev.Noted, state: CacheState) -> None:
        if e.note is Note.RECORDER_DEGRADED:
            self._began = self._began or e
        elif e.note is Note.RECORDER_RESUMED:
            # In the recording itself the first note is usually part of the loss.
            began, self._began = self._began or e, None
            self.over(self.finding(
                "recorder", "degraded", e.detail or "events were not recorded", seq=began.seq, evidence=(e.seq,),
                since_ns=began.at_ns, until_ns=e.at_ns,
            ))

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """The findings also where the facts are unknown."""
        yield from self.past
        if self._began is not None:
            yield self.finding(
                "recorder", "degraded", self._began.detail or "events were not recorded", seq=self._began.seq,
                level=Level.FAULT, since_ns=self._began.at_ns,
            )


class ClockStepped(Lint):
    """The wall clock moved."""

    name = "clock"
    level = Level.NOTE
    threshold = "the wall clock moved by itself"
    bad = "times of the wall before and behind it cannot be compared; order and ages are not affected"
    do = "nothing here; look at the time service of the machine"

    def __init__(self) -> None:
        super().__init__()
        self.after = {ev.Noted: self._noted}

    def _noted(self, e: ev.Noted, state: CacheState) -> None:
        if e.note is Note.CLOCK_STEPPED:
            self.over(self.finding(
                "clock", f"stepped {e.detail}", "order and ages are unaffected", seq=e.seq, since_ns=e.at_ns,
                until_ns=e.at_ns,
            ))


class LoopBlocked(Lint):
    """The daemon's event loop stood still."""

    name = "blocked"
    threshold = "the daemon's loop stood still"
    bad = "the daemon answered nothing meanwhile, and holds went past their time"
    do = "look at what the daemon was called for; an interceptor that blocks is the usual cause"

    def __init__(self) -> None:
        super().__init__()
        self.after = {ev.Noted: self._noted}

    def _noted(self, e: ev.Noted, state: CacheState) -> None:
        if e.note is Note.LOOP_BLOCKED:
            self.over(self.finding(
                "daemon", "stood still", e.detail or "no detail", seq=e.seq, since_ns=e.at_ns, until_ns=e.at_ns
            ))


class Judged(Lint):
    """A run that a monitor of ``explore`` ended."""

    name = "verdict"
    level = Level.FAULT
    threshold = "the run ended here with a finding of `explore`"
    bad = "the engine, its connector or the leader did what the named monitor forbids"
    do = (
        "step back from here to see the course of it; the scenario, a reproduction and a text for an issue lie beside "
        "the recording"
    )

    def __init__(self) -> None:
        super().__init__()
        self.after = {ev.Noted: self._noted}

    def _noted(self, e: ev.Noted, state: CacheState) -> None:
        """The run ended here, so the finding has no end. Its request is the first live request in the sentence."""
        if e.note is not Note.VERDICT:
            return
        monitor, _, sentence = e.detail.partition(": ")
        requests = re.findall(r"\brequest (\S+)", sentence)
        slots = [slot for slot in state.slots.values() if slot.request in requests]
        slot = min(slots, key=lambda slot: requests.index(slot.request), default=None)
        self.over(self.finding(
            "engine" if slot is None else slot.request, monitor, sentence or "no sentence was recorded", seq=e.seq,
            slot=slot, since_ns=e.at_ns, weight=VERDICT_WEIGHT,
        ))


class WrongBytes(Lint):
    """Blocks whose bytes a worker found wrong; one finding for each engine and kind of fault."""

    name = "wrong_bytes"
    title = "wrong bytes"
    level = Level.FAULT
    threshold = "one block whose bytes differ from those that a store had taken"
    bad = "the model reads or will read another context than the request has, and nothing else tells"
    do = (
        "the edge that is named was missing: report it to the engine's or connector's project. Set \"action\": "
        "\"recompute\" of sanitize until it is mended"
    )

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[int, str], list[ev.ContentMismatched]] = {}
        self._times: dict[tuple[int, str], int] = {}
        self.after = {ev.ContentMismatched: self._mismatched}

    def _mismatched(self, e: ev.ContentMismatched, state: CacheState) -> None:
        if e.stage == BELOW:
            return
        self._keep((e.source, e.kind), e)

    def _keep(self, key: tuple[int, str], e: ev.ContentMismatched) -> None:
        self._times[key] = self._times.get(key, 0) + 1
        kept = self._seen.setdefault(key, [])
        if len(kept) <= EVIDENCE_MAX:
            kept.append(e)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """All findings, because wrong bytes stay wrong."""
        for key, (first, *more) in self._seen.items():
            yield self.finding(
                first.request or f"source {first.source}", self.title, self._what(first), seq=first.seq,
                evidence=(e.seq for e in more), request=first.request or None, since_ns=first.at_ns,
                count=self._times[key], weight=self._times[key],
            )

    def _what(self, first: ev.ContentMismatched) -> str:
        return f"{first.kind}: {first.edge}"


class DamagedBlocks(WrongBytes):
    """Blocks that a tier below the host tier gave back with other bytes; one finding for each engine and tier."""

    name = "damaged_blocks"
    title = "damaged blocks"
    threshold = "one block whose sum at its load is not the sum at its store"
    bad = "with \"integrity\": \"report\" the request that loaded it was answered from another context"
    do = (
        "set \"integrity\": \"fail\", so that such a block is computed again; then look at the tier's medium, and at "
        "other programs that write to it"
    )

    def _mismatched(self, e: ev.ContentMismatched, state: CacheState) -> None:
        if e.stage == BELOW:
            self._keep((e.source, e.writer), e)

    def _what(self, first: ev.ContentMismatched) -> str:
        block = unpack_hashes(first.hashes)[0]
        return f"{first.writer} gave {block:016x}"[:-8] + f" with {first.edge}, not {first.taken}"


class WrongFacts(Lint):
    """Differences that audits found between an engine's own pool and the facts; one finding for each engine."""

    name = "audit"
    level = Level.FAULT
    threshold = "one place whose content or holders differ from the engine's own pool"
    bad = "counts were wrong since the last audit that found no difference, and not marked as uncertain"
    do = "keep the recording and report it with the engine's release: this is a bug. The tap reports everything anew"

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, list[ev.AuditDiffered]] = {}
        self._times: dict[int, int] = {}
        self.after = {ev.AuditDiffered: self._differed}

    def _differed(self, e: ev.AuditDiffered, state: CacheState) -> None:
        source = state.pools[e.pool].info.source
        self._times[source] = self._times.get(source, 0) + 1
        kept = self._seen.setdefault(source, [])
        if len(kept) <= EVIDENCE_MAX:
            kept.append(e)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """All findings, because what was shown stays wrong."""
        for source, (first, *more) in self._seen.items():
            yield self.finding(
                f"source {source}", "audit differs", first.detail, seq=first.seq, evidence=(e.seq for e in more),
                since_ns=first.at_ns, count=self._times[source], weight=self._times[source],
            )


class BrokenInvariant(Lint):
    """Broken invariants that the core caught. Of a whole recording, ``audited`` finds more of them."""

    name = "violation"
    level = Level.FAULT
    threshold = "a broken invariant"
    bad = "the core caught itself in a mistake; the stimulus was refused and the facts are as before it"
    do = "keep the recording and report it: this is a bug"

    def __init__(self) -> None:
        super().__init__()
        self.after = {ev.InvariantViolated: self._violated}

    def _violated(self, e: ev.InvariantViolated, state: CacheState) -> None:
        self.over(self.finding(
            "leader", f"{e.rule} broken",
            e.detail.splitlines()[0] if e.detail else "a stimulus was refused, the facts are unchanged", seq=e.seq,
            since_ns=e.at_ns, until_ns=e.at_ns,
        ))


def audited(state: CacheState, at_ns: int) -> Iterator[Finding]:
    """Invariants that these facts break. It walks all places, so no stream is watched with it."""
    for broken in audit(state):
        lint: type[Lint] = PinLeak if broken.rule == "I2" else BrokenInvariant
        finding = lint.finding(
            "facts" if broken.slot is None else f"slot {broken.slot}", f"{broken.rule} broken", broken.detail,
            seq=state.seq - 1, since_ns=at_ns,
        )
        yield finding if broken.slot is None else msgspec.structs.replace(finding, slot=str(broken.slot))


class LateReports(Lint):
    """Reports of copies that the leader does not wait for."""

    name = "late_reports"
    threshold = "10 reports refused as duplicate, late or of an older epoch"
    bad = "a worker reports copies that the leader does not wait for; its bookkeeping and ours differ"
    do = "look at the worker that sends them"
    whole_run = True

    def __init__(self) -> None:
        super().__init__()
        self._refused: dict[str, list[int]] = {}
        self._times: dict[str, int] = {}
        self.after = {ev.CompletionRefused: self._late}

    def _late(self, e: ev.CompletionRefused, state: CacheState) -> None:
        self._times[e.why] = self._times.get(e.why, 0) + 1
        kept = self._refused.setdefault(e.why, [])
        if len(kept) < EVIDENCE_MAX:
            kept.append(e.seq)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """One finding for each reason of refusal, over all of the evidence."""
        for why, times in self._times.items():
            if times >= LATE_REPORTS:
                seqs = self._refused[why]
                yield self.finding(
                    "workers", plural(times, "refused report"), why, seq=seqs[0], evidence=seqs, until_ns=at_ns,
                    count=times, weight=times,
                )


class Unfinished(Lint):
    """A recording without its closing mark; ``diagnose`` tells it, because no event does."""

    name = "unfinished"
    level = Level.NOTE
    threshold = "a recording without its closing mark"
    bad = "it is still being written, or its daemon was killed; what is there is whole"
    do = "'rec recover' makes it whole"
    on_stream = False
