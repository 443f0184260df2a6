"""The reasons of first misses, as digests and lakes tell them, against those that ``why`` finds in the events.

Law of this file: a reason is the one of ``why``, or it is not known.
"""

import pytest

from kvbm_console.analysis.admissions import FirstMiss, FirstMisses
from kvbm_console.analysis.digest import UNKNOWN, DigestFold
from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import walk
from kvbm_console.core import events as ev
from kvbm_console.core.state import CacheState
from tests.analysis.evidence import evidence
from tests.tap.kept import run_of


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
