"""Breakpoints on an engine that is only watched: it asks before a lookup, and everything else is told afterwards.

Law of this file: a hold says that it stands still only while the engine really waits.
"""

from typing import Any

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.holds import ended_text
from kvbm_console.core.ids import Authority, BreakpointAction, HoldEnd, Site, SlotState, Tier
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import Dispatcher

TAP, TOKENS = 1, 16
LATE = "looked up before its engine heard of the hold"


class Watched:
    """A leader that follows one engine's tap."""

    def __init__(self, *specs: BreakpointSpec) -> None:
        self.events: list[Event] = []
        self.dispatcher = Dispatcher(Leader(LeaderConfig(), check=True), lambda: 1_000)
        self.dispatcher.publish = lambda stimulus, outcome: self.events.extend(outcome.events)
        self.state = self.dispatcher.leader.state
        self.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 64, TOKENS, Authority.OBSERVED)
        self.dispatcher.submit(st.BreakpointsReplaced, "me", specs)
        self.submit(st.RequestArrived, "r", pack_hashes([7]), TOKENS + 1, 4, 0, None)

    def submit(self, kind: Any, *fields: Any) -> Any:
        return self.dispatcher.submit_from(TAP, None, kind, *fields).result

    def asks(self) -> bool:
        """The engine asks about its lookup. True if it shall ask again."""
        answer = self.submit(st.MatchRequested, "r", 0)
        assert isinstance(answer, MatchAnswer)
        return answer.tokens is None

    def looks_up(self) -> None:
        self.submit(st.LookupObserved, "r", 0, 0, False, Tier.G1)

    def computes(self) -> None:
        """The request gets blocks and is scheduled."""
        self.submit(st.BlocksAllocated, "r", pack_ids([0, 1]), 0)
        self.submit(
            st.IterationScheduled, 0, 1, ("r",), (), (), (), (), (), ("r",), (TOKENS + 1,), (), (), b"", 1, 0
        )

    def ever(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]


def at_lookup(**more: Any) -> BreakpointSpec:
    return BreakpointSpec(site=Site.CALL_WILL, request="r", **more)


def test_a_lookup_is_held_once_and_its_report_does_not_hold_it_again() -> None:
    watched = Watched(at_lookup())
    assert not watched.state.holds, "nobody has asked yet"
    assert watched.asks()
    (hold,) = watched.state.holds.values()
    assert hold.parked
    watched.dispatcher.submit(st.HoldContinued, hold.hold, "me", None)
    watched.looks_up()
    watched.computes()
    assert not watched.state.holds
    assert len(watched.ever(ev.SlotHeld)) == len(watched.ever(ev.BreakpointHit)) == 1
    assert not watched.ever(ev.HoldDenied)


@pytest.mark.parametrize("told", ["lookup", "blocks"])
def test_a_hold_ends_when_the_engine_has_not_waited_for_it(told: str) -> None:
    watched = Watched(at_lookup())
    assert watched.asks()
    if told == "lookup":
        watched.looks_up()
    else:
        watched.computes()
    (released,) = watched.ever(ev.HoldReleased)
    assert (released.why, released.by) == (HoldEnd.CANCELLED, LATE)
    assert ended_text(released.why, released.by) == f"the request was {LATE}"
    if told == "lookup":
        watched.computes()
    assert watched.state.slots[watched.state.slot_of["r"]].state is SlotState.PREFILLING
    assert not watched.state.holds
    assert len(watched.ever(ev.SlotHeld)) == 1


def test_a_lookup_that_was_not_asked_about_is_a_hit_that_holds_nothing() -> None:
    watched = Watched(at_lookup())
    watched.looks_up()
    (hit,) = watched.ever(ev.BreakpointHit)
    assert hit.action is BreakpointAction.LOG
    (denied,) = watched.ever(ev.HoldDenied)
    assert denied.why == "its engine had looked it up already"
    assert not watched.state.holds


@pytest.mark.parametrize("asked", [True, False])
def test_a_log_point_tells_a_lookup_once(asked: bool) -> None:
    watched = Watched(at_lookup(action=BreakpointAction.LOG, log="{request}"))
    if asked:
        assert not watched.asks()
    watched.looks_up()
    watched.computes()
    (hit,) = watched.ever(ev.BreakpointHit)
    assert hit.message == "r"
