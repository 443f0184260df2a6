"""What a site asks before it looks at any breakpoint: quick, and never wrong.

Law of this file: the quick no says no only where every breakpoint would, and costs the leader no call of ours.
"""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core import stimuli as st
from kvbm_console.core.breakpoints import Gate, Moment
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.holds import BreakpointFacts
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.core.leader import Leader
from tests.benchmarks import samples

BATCHES = 3
STATES = some.sampled_from(SlotState)
TEXTS = some.text("ab-1", max_size=4)
PARTS = TEXTS | some.sampled_from(["*", "?", "[ab]"])
PATTERNS = some.lists(PARTS, min_size=1, max_size=4).map("".join).filter(bool)
MOVES = (Site.TRANSITION_WILL, Site.TRANSITION_DID)
SPECS = some.lists(
    some.builds(
        BreakpointSpec, site=some.sampled_from(MOVES), request=PATTERNS, from_state=some.none() | STATES,
        to_state=some.none() | STATES,
    ),
    max_size=5,
)


def gate(specs: list[BreakpointSpec], stops: frozenset[Site] = frozenset()) -> Gate:
    return Gate({at: BreakpointFacts(spec, "me", True) for at, spec in enumerate(specs, 1)}, stops=stops)


def says_no(watched: Any, request: str, old: SlotState) -> bool:
    """What ``Decider.move`` and ``strike`` ask."""
    return watched is None or not (request.startswith(watched.begin) and watched.names(request, old))


@given(SPECS, TEXTS, STATES, STATES, some.sampled_from(MOVES))
def test_a_no_means_that_no_breakpoint_matches(
    specs: list[BreakpointSpec], request_id: str, old: SlotState, new: SlotState, site: Site
) -> None:
    """Before a move, after it, and for both together."""
    armed = gate(specs)
    watched = armed.table[site << 4 | new]
    matching = [
        one for one in ([] if watched is None else watched.armed)
        if one.matches(Moment(site, 1, request_id, old, new))
    ]
    if matching:
        assert not says_no(watched, request_id, old)
        assert not says_no(armed.moves[new], request_id, old)
    wanted = [spec for spec in specs if spec.to_state in (None, new) and spec.from_state in (None, old)]
    if not wanted:
        assert says_no(armed.moves[new], request_id, old), "states alone decide it"


@given(SPECS, TEXTS, STATES, STATES, some.sampled_from(MOVES))
def test_where_somebody_asked_a_slot_to_stop_nobody_is_told_no(
    specs: list[BreakpointSpec], request_id: str, old: SlotState, new: SlotState, site: Site
) -> None:
    stopping = gate(specs, frozenset([site]))
    assert not says_no(stopping.table[site << 4 | new], request_id, old)
    assert not says_no(stopping.moves[new], request_id, old)
    if site is Site.TRANSITION_DID:
        assert not says_no(stopping.opens, request_id, SlotState.INITIALIZED)


def calls(specs: tuple[BreakpointSpec, ...]) -> Counter[str]:
    """The calls of ours that a leader makes for the traffic of the benchmarks."""
    leader = Leader(samples.CONFIG)
    script = samples.stimuli(BATCHES)
    leader.handle(script[0])
    leader.handle(st.BreakpointsReplaced(0, 0, 0, None, "me", specs))
    assert (leader.gate is not None) is bool(specs)
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("kvbm_console."):  # and no finalizer's
            called[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for stimulus in script[1:]:
            leader.handle(stimulus)
    finally:
        sys.setprofile(before)
    return called


@pytest.mark.parametrize(
    "fields",
    [
        {"request": "nobody-*"}, {"request": "nobody-*", "to_state": SlotState.DECODING},
        {"to_state": SlotState.PREEMPTED}, {"site": Site.PROMOTE_WILL}, {"site": Site.DISPATCH_WILL},
    ],
    ids=str,
)
def test_a_breakpoint_that_names_nobody_costs_no_call(fields: dict[str, Any]) -> None:
    calls(())  # what is found once and kept
    armed, none = calls((BreakpointSpec(**fields),)), calls(())
    assert not armed - none
    assert none.total() > 1_000
