"""What a site asks before it looks at any breakpoint: quick, and never wrong.

Law of this file: the quick no says no only where every breakpoint would, and costs the leader no call of ours.
"""

import sys
from collections import Counter
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core import stimuli as st
from kvbm_console.core.breakpoints import Gate, Moment, Watched
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.holds import BreakpointFacts
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.core.leader import Leader
from kvbm_console.core.slots import SlotFacts
from tests.benchmarks import samples

from .house import House

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


def slot(request: str, number: int = 1) -> SlotFacts:
    return SlotFacts(
        slot=number, request=request, source=1, state=SlotState.INITIALIZED, since_ns=0, opened_ns=0, hashes=[],
        prompt_tokens=1, output_limit=1, priority=0, session=None, prompt_blocks=0,
    )


def says_no(armed: Gate, watched: Watched | None, request: str, old: SlotState) -> bool:
    """What ``Decider.move`` and ``strike`` ask."""
    opened = slot(request)
    armed.seek(opened)
    unsought = not armed.awake or opened.slot not in armed.sought
    armed.lose(opened.slot)
    assert armed.awake is armed.everybody
    return watched is None or unsought or not watched.names(request, old)


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
        assert not says_no(armed, watched, request_id, old)
        assert not says_no(armed, armed.moves[new], request_id, old)
    wanted = [spec for spec in specs if spec.to_state in (None, new) and spec.from_state in (None, old)]
    if not wanted:
        assert says_no(armed, armed.moves[new], request_id, old), "states alone decide it"


@given(SPECS, TEXTS, STATES, STATES, some.sampled_from(MOVES))
def test_where_somebody_asked_a_slot_to_stop_nobody_is_told_no(
    specs: list[BreakpointSpec], request_id: str, old: SlotState, new: SlotState, site: Site
) -> None:
    stopping = gate(specs, frozenset([site]))
    assert not says_no(stopping, stopping.table[site << 4 | new], request_id, old)
    assert not says_no(stopping, stopping.moves[new], request_id, old)
    assert stopping.opens is (site is Site.TRANSITION_DID) or any(
        spec.site is Site.TRANSITION_DID and spec.to_state in (None, SlotState.INITIALIZED) for spec in specs
    )


@given(SPECS, TEXTS)
def test_what_is_not_between_begin_and_end_need_not_be_sought(specs: list[BreakpointSpec], request_id: str) -> None:
    """So a slot that opens there is not looked at."""
    armed, opened = gate(specs), slot(request_id)
    armed.seek(opened)
    if not armed.begin <= request_id < armed.end:
        assert armed.everybody or not armed.awake
    if any(fnmatchcase(request_id, spec.request) for spec in specs):
        assert armed.awake
        assert opened.slot in armed.sought


@given(TEXTS, some.lists(TEXTS, max_size=6))
def test_between_a_text_and_the_one_above_it_is_what_begins_with_it(text: str, others: list[str]) -> None:
    armed = gate([BreakpointSpec(request=f"{text}*")])
    for other in (text, *others, *(text + each for each in others), *(text[:-1] + each for each in others)):
        assert (armed.everybody or armed.begin <= other < armed.end) is other.startswith(text)


def ran(specs: tuple[BreakpointSpec, ...]) -> tuple[Counter[str], Counter[str]]:
    """The calls of ours that a leader makes for the traffic of the benchmarks, and its bytecodes by stimulus."""
    leader = Leader(samples.CONFIG)
    script = samples.stimuli(BATCHES)
    leader.handle(script[0])
    leader.handle(st.BreakpointsReplaced(0, 0, 0, None, "me", specs))
    assert (leader.gate is not None) is bool(specs)
    called: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    handled = ""

    def note(frame: FrameType, event: str, _: object) -> Any:
        if event == "call":
            if not frame.f_globals["__name__"].startswith("kvbm_console."):  # a finalizer's
                return None
            called[frame.f_code.co_qualname] += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            codes[handled] += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        for stimulus in script[1:]:
            handled = type(stimulus).__name__
            leader.handle(stimulus)
    finally:
        sys.settrace(before)
    return called, codes


NOBODY = ({"request": "nobody-*"}, {"request": "nobody-*", "to_state": SlotState.DECODING})


@pytest.mark.parametrize(
    "fields",
    [*NOBODY, {"to_state": SlotState.PREEMPTED}, {"site": Site.PROMOTE_WILL}, {"site": Site.DISPATCH_WILL}], ids=str,
)
def test_a_breakpoint_that_names_nobody_costs_no_call(fields: dict[str, Any]) -> None:
    ran(())  # what is found once and kept
    (armed, codes), (none, without) = ran((BreakpointSpec(**fields),)), ran(())
    assert not armed - none
    assert none.total() > 1_000
    requests = none["request_arrived"]
    assert requests == BATCHES * samples.BATCH
    assert 0 < codes.total() - without.total() <= 60 * requests, "some bytecodes for each request"


@pytest.mark.parametrize("fields", NOBODY, ids=str)
def test_a_name_is_asked_once_for_each_request(fields: dict[str, Any]) -> None:
    """Behind its arrival, a request that nobody named runs what it runs with nothing armed."""
    specs = tuple(BreakpointSpec(**fields | {"request": f"nobody-{at}-*"}) for at in range(100))
    ran(())
    (_, armed), (_, none) = ran(specs), ran(())
    assert set(armed - none) == {"RequestArrived"}
    assert not none - armed
    assert (armed - none).total() <= 20 * BATCHES * samples.BATCH


def test_the_gate_is_awake_while_a_request_that_it_names_is_alive() -> None:
    """Opened, cloned, there before; closed, reset; and everybody while a step is asked for."""
    house = House(g2=0)
    house.decoding("there-1")
    house.stop_at(Site.REQUEST_FINISH, request="there-*")
    assert house.leader.awake is not None
    house.finish("there-1")
    house.go_on()
    assert house.leader.awake is None
    house.decoding("other")
    assert house.leader.awake is None
    assert len(house.clone("other", "there-2", "elsewhere")) == 2
    assert house.leader.awake is not None
    house.finish("there-2")
    assert house.state.slots[house.hold.slot].request == "there-2", "a clone is stopped by its own name"
    house.command(st.SlotStepped, house.hold.hold, "me")
    house.arrive("there-3", "ab")
    house.finish("elsewhere")
    house.reset()
    assert house.leader.gate is not None
    assert house.leader.awake is None
