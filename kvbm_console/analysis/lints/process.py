"""Lints about the process: events lost, the recorder, the clock, the loop, bugs, late reports, an end that is missing.

Law of this file: what the evidence does not hold is said first.
"""

import re
from collections.abc import Iterator
from typing import Final

from kvbm_console.analysis.lints.model import EVIDENCE_MAX, Finding, Level, plural
from kvbm_console.analysis.lints.rule import Lint
from kvbm_console.core import events as ev
from kvbm_console.core.ids import Note
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

LATE_REPORTS: Final = 10
VERDICT_WEIGHT: Final = 2**62
"""Before all others of its level, which are durations and counts."""


class Lost(Lint):
    """Events that are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self._last_ns = 0

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Behind a gap everything is exact again."""
        if gap is not None:
            self._seen(gap, state.at_ns, "state is exact again")

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """The gaps."""
        yield from self.past

    def end(self, gap: GapSeen) -> None:
        """The evidence ends in a gap."""
        self._seen(gap, 0, "the evidence ends in it")

    def _seen(self, gap: GapSeen, at_ns: int, then: str) -> None:
        self.events += gap.count
        self.over(Finding(
            lint="lost", level=Level.CAUTION, who=plural(gap.count, "event"), what="lost",
            because=f"{gap.first:,} to {gap.last:,}: {gap.reason}; {then}", seq=gap.first, evidence=(gap.last,),
            since_ns=at_ns, until_ns=at_ns, count=gap.count, weight=gap.count,
        ))

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """Maybe in a gap."""
        if gap is not None:
            self.end(gap)


class Notes(Lint):
    """What the process said about itself."""

    def __init__(self) -> None:
        super().__init__()
        self._degraded: ev.Noted | None = None
        self._blocked: list[ev.Noted] = []
        self.after = {ev.Noted: self._noted}

    def _noted(self, e: ev.Noted, state: CacheState) -> None:
        if e.note is Note.RECORDER_DEGRADED:
            self._degraded = self._degraded or e
        elif e.note is Note.RECORDER_RESUMED:
            # In the recording itself the first note is usually part of what was lost.
            self.over(self._recorder(self._degraded or e, e))
            self._degraded = None
        elif e.note is Note.CLOCK_STEPPED:
            self.over(Finding(
                lint="clock", level=Level.NOTE, who="clock", what=f"stepped {e.detail}",
                because="order and ages are unaffected", seq=e.seq, since_ns=e.at_ns, until_ns=e.at_ns,
            ))
        elif e.note is Note.VERDICT:
            self.over(_verdict(e, state))
        elif e.note is Note.LOOP_BLOCKED:
            self.over(Finding(
                lint="blocked", level=Level.CAUTION, who="daemon", what="stood still", because=e.detail or "no detail",
                seq=e.seq, since_ns=e.at_ns, until_ns=e.at_ns,
            ))

    def _recorder(self, began: ev.Noted, ended: ev.Noted | None) -> Finding:
        return Finding(
            lint="recorder", level=Level.FAULT if ended is None else Level.CAUTION, who="recorder", what="degraded",
            because=(ended or began).detail or "events were not recorded", seq=began.seq,
            evidence=() if ended is None else (ended.seq,), since_ns=began.at_ns,
            until_ns=None if ended is None else ended.at_ns,
        )

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """All of them."""
        yield from self.past
        if self._degraded is not None:
            yield self._recorder(self._degraded, None)


def _verdict(e: ev.Noted, state: CacheState) -> Finding:
    """The run ended here, so it is still so; the request is the first live one that the sentence names."""
    monitor, _, sentence = e.detail.partition(": ")
    named = re.findall(r"\brequest (\S+)", sentence)
    slots = [slot for slot in state.slots.values() if slot.request in named]
    slot = min(slots, key=lambda one: named.index(one.request), default=None)
    return Finding(
        lint="verdict", level=Level.FAULT, who="engine" if slot is None else slot.request, what=monitor,
        because=sentence or "no sentence was recorded", seq=e.seq, request=None if slot is None else slot.request,
        slot=None if slot is None else str(slot.slot), since_ns=e.at_ns, weight=VERDICT_WEIGHT,
    )


class WrongBytes(Lint):
    """Blocks whose bytes a worker found wrong; one finding for each engine and kind of fault."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[int, str], list[ev.ContentMismatched]] = {}
        self._times: dict[tuple[int, str], int] = {}
        self.after = {ev.ContentMismatched: self._mismatched}

    def _mismatched(self, e: ev.ContentMismatched, state: CacheState) -> None:
        key = e.source, e.kind
        self._times[key] = self._times.get(key, 0) + 1
        kept = self._seen.setdefault(key, [])
        if len(kept) <= EVIDENCE_MAX:
            kept.append(e)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """All of them: wrong bytes stay wrong."""
        for key, (first, *more) in self._seen.items():
            yield Finding(
                lint="wrong_bytes", level=Level.FAULT, who=first.request or f"source {first.source}",
                what="wrong bytes", because=f"{first.kind}: {first.edge}", seq=first.seq,
                evidence=tuple(e.seq for e in more), request=first.request or None, since_ns=first.at_ns,
                count=self._times[key], weight=self._times[key],
            )


class Bugs(Lint):
    """Broken invariants that the core caught, and reports that nobody waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: dict[str, list[int]] = {}
        self._times: dict[str, int] = {}
        self.after = {ev.InvariantViolated: self._violated, ev.CompletionRefused: self._late}

    def _violated(self, e: ev.InvariantViolated, state: CacheState) -> None:
        self.over(Finding(
            lint="violation", level=Level.FAULT, who="leader", what=f"{e.rule} broken",
            because=e.detail.splitlines()[0] if e.detail else "a stimulus was refused, the facts are unchanged",
            seq=e.seq, since_ns=e.at_ns, until_ns=e.at_ns,
        ))

    def _late(self, e: ev.CompletionRefused, state: CacheState) -> None:
        self._times[e.why] = self._times.get(e.why, 0) + 1
        kept = self._refused.setdefault(e.why, [])
        if len(kept) < EVIDENCE_MAX:
            kept.append(e.seq)

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """All of them."""
        yield from self.past
        for why, times in self._times.items():
            if times >= LATE_REPORTS:
                seqs = self._refused[why]
                yield Finding(
                    lint="late_reports", level=Level.CAUTION, who="workers", what=plural(times, "refused report"),
                    because=why, seq=seqs[0], evidence=tuple(seqs), until_ns=at_ns, count=times, weight=times,
                )
