"""Stops: which holds are new enough to be announced in place of the keys.

Law of this file: several stops within a second are one announcement, and one that is over is not told any more.
"""

from typing import Final

from kvbm_console.core.holds import HoldFacts
from kvbm_console.core.ids import Site
from kvbm_console.core.state import CacheState

from .mirror import Mirror
from .numbers import S
from .waits import breakpoints_text

STOP_NS: Final = 8 * S
"""How long a stop announcement replaces the keys."""


class Stops:
    """The holds that began last."""

    def __init__(self) -> None:
        self._announced = 0
        self._since: int | None = None
        self._holds: list[int] = []

    def watch(self, state: CacheState, mono_ns: int) -> None:
        """See which holds are new."""
        fresh = [number for number in state.holds if number >= self._announced]
        if fresh:
            if self._since is None or mono_ns - self._since > S:
                self._holds = []
            self._since = mono_ns
            self._holds.extend(fresh)
        self._announced = max(self._announced, state.next_hold)

    def text(self, mirror: Mirror, mono_ns: int) -> str | None:
        """Who is held, where, and for how long; None when nothing is new."""
        state = mirror.state
        if self._since is None or state is None or mono_ns - self._since > STOP_NS:
            return None
        holds = [state.holds[number] for number in self._holds if number in state.holds]
        if not holds:
            return None
        hold = holds[-1]
        slot = state.slots[hold.slot]
        left = max(0, mirror.hold_left_ns(hold.hold, mono_ns) or 0) // S
        more = f" and {len(holds) - 1} more" if len(holds) > 1 else ""
        by = breakpoints_text(hold.breakpoints)
        return f"‖ {slot.request}{more} held at {by}, {_place(mirror, hold)}; {left} s left"


def _place(mirror: Mirror, hold: HoldFacts) -> str:
    """Where it was stopped; a move is named by the state it led to, also when the slot stands in another one by now."""
    if hold.site not in (Site.TRANSITION_WILL, Site.TRANSITION_DID):
        return f"at {hold.site.label}"
    word = "entering" if hold.site is Site.TRANSITION_DID else "before"
    state = mirror.state
    assert state is not None
    life = mirror.lives.get(hold.slot)
    moves = [] if life is None else [move for move in life.moves if move.start_ns <= hold.since_ns]
    if not moves:
        return f"{word} {state.slots[hold.slot].state.label}"
    known = [state.breakpoints[number].spec.to_state for number in hold.breakpoints if number in state.breakpoints]
    same = [move.state for move in moves if move.start_ns == moves[-1].start_ns]
    return f"{word} {next((one for one in same if one in known), same[-1]).label}"
