"""The reasons of first misses, as digests and lakes tell them, against those that ``why`` finds in the events.

Law of this file: a reason is the one of ``why``, or it is not known.
"""

from pathlib import Path

import pytest

from kvbm_console.analysis.admissions import FirstMiss, FirstMisses, SeenHits
from kvbm_console.analysis.digest import UNKNOWN, DigestFold
from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import walk
from kvbm_console.core import events as ev
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import GapSeen
from tests.analysis.evidence import evidence
from tests.tap.kept import run_of

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


class Told(Visitor):
    """The first misses of admissions by the number of their event, with their request."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[str, FirstMiss]] = {}
        self._misses = FirstMisses()
        self.after = {ev.LookupAnswered: self._misses.looked_up, ev.PrefixScored: self._scored}

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        slot = state.slots[e.slot]
        miss = self._misses.scored(e, slot)
        if miss is not None:
            self.found[e.seq] = slot.request, miss


@pytest.mark.parametrize(("name", "known"), [("alone", True), ("offload", False), ("mixed", False), ("trouble", False)])
def test_the_reason_is_that_of_why_or_not_known(name: str, known: bool) -> None:
    what = evidence(run_of(name).all_events, run_of(name).config)
    told, digest = Told(), DigestFold()
    walk(what, (told, digest))
    reasons = set()
    for seq, (request, miss) in told.found.items():
        first = next(one for one in explain(what, request).admissions if one.seq == seq).misses[0]
        assert miss.why is None or miss.why.label == first.reason, (request, first.text)
        reasons.add(miss.why)
    assert len(reasons - {None}) > 1 if known else reasons == {None}
    words = {each.why for each in digest.digest.missing.of.values()}
    assert words == {UNKNOWN if why is None else why.label for why in reasons}


class Hits(Visitor):
    """The slots that moved, and whether the hits that they then had were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SeenHits()
        self.told: dict[int, tuple[int, bool]] = {}
        self.after = {ev.PrefixScored: self._scored, ev.SlotMoved: self._moved}
        self.before = {ev.SlotClosed: self._closed}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        self.seen.keep(state.slots)

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        self.seen.scored(state.slots[e.slot])

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        self.told[e.seq] = e.slot, e.slot in self.seen

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        self.seen.closed(e.slot)


@pytest.mark.parametrize(("gap", "seen"), [("none", True), ("first", True), ("second", False), ("between", True)])
def test_hits_of_an_admission_in_a_gap_are_not_seen(gap: str, seen: bool) -> None:
    """A request is preempted and admitted again; the gap has one of its admissions, or only what is between."""
    recording = Recording.open(RECORDINGS / "preempt-and-resume.mcap")
    events = [event for batch in recording.events() for event in batch]
    scored = [event for event in events if isinstance(event, ev.PrefixScored)]
    first, second = next(
        (one, other) for at, one in enumerate(scored) for other in scored[at + 1 :] if one.slot == other.slot)
    gaps = {
        "first": (first.seq - 1, first.seq), "second": (first.seq + 1, second.seq),
        "between": (first.seq + 1, second.seq - 1),
    }
    assert recording.config is not None
    hits = Hits()
    walk(evidence(events, recording.config, gap=gaps.get(gap)), [hits])
    assert {told for seq, (slot, told) in hits.told.items() if slot == first.slot and seq > second.seq} == {seen}
    assert first.slot not in hits.seen, "it is forgotten when it ends"
