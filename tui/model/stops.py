"""Stops: which holds began or ended so lately that they are announced in place of the keys.

Law of this file: an announcement lasts some seconds and then leaves the keys alone for longer, however many holds come.
A hold that a person asked for is announced at once. Stops within a second share an announcement, and an end names its
reason.
"""

from typing import Final

from kvbm_console.analysis.waits import breakpoints_text
from kvbm_console.core.holds import HoldFacts
from kvbm_console.core.ids import HoldEnd, Site
from kvbm_console.core.state import CacheState
from kvbm_console.stream.ended import EndedHold

from .mirror import Mirror
from .numbers import S, count, duration

STOP_NS: Final = 6 * S
"""How long an announcement replaces the keys."""
READ_NS: Final = 2 * S
"""The time to read an announcement. A stop that comes later than this before the end waits for the next
announcement."""
REST_NS: Final = 12 * S
"""How long the keys are shown before the next announcement."""
ASKED: Final = (HoldEnd.CONTINUED, HoldEnd.STEPPED, HoldEnd.SKIPPED)
"""Ends that a person asked for; they need no announcement."""


class Stops:
    """The holds that began or ended last."""

    def __init__(self) -> None:
        self._announced = 0
        self._ends = 0
        self._since: int | None = None
        """Local time at which the announcement began."""
        self._news_ns = 0
        """Local time of its last new hold or end."""
        self._holds: list[int] = []
        self._ended: list[EndedHold] = []

    def watch(self, mirror: Mirror, mono_ns: int, *, stands: bool = False) -> None:
        """See which holds are new, and which have ended by themselves. A tape that ``stands`` announces nothing."""
        state, known = mirror.state, mirror.ended_holds
        if state is None:
            return
        if known.count < self._ends:  # another target
            self._ends = 0
        fresh = [hold for number, hold in state.holds.items() if number >= self._announced]
        asked = any(not hold.breakpoints for hold in fresh)
        ends = list(known.last)[-(known.count - self._ends):] if known.count > self._ends else []
        ends = [ended for ended in ends if ended.why not in ASKED]
        if (fresh or ends) and not stands:
            since_ns = None if self._since is None else mono_ns - self._since
            begins = asked or since_ns is None or since_ns > STOP_NS + REST_NS
            if not begins and since_ns is not None and since_ns > STOP_NS - READ_NS:
                return  # told after the rest, if it is still so
            if begins:
                self._since = mono_ns
            if begins or mono_ns - self._news_ns > S:
                self._holds, self._ended = [], []
            self._news_ns = mono_ns
            self._holds += [hold.hold for hold in fresh]
            self._ended += ends
        self._announced, self._ends = max(self._announced, state.next_hold), known.count

    def _shows(self, mono_ns: int) -> bool:
        return self._since is not None and mono_ns - self._since <= STOP_NS

    def text(self, mirror: Mirror, mono_ns: int) -> str | None:
        """The request that is held, the place and the time left, else the request whose hold ended and why. None
        without news."""
        state = mirror.state
        if state is None or not self._shows(mono_ns):
            return None
        holds = [state.holds[number] for number in self._holds if number in state.holds]
        if not holds:
            return _ended_text(self._ended)
        hold = holds[-1]
        slot = state.slots[hold.slot]
        left = max(0, mirror.hold_left_ns(hold.hold, mono_ns) or 0) // S
        more = f" and {len(holds) - 1} more" if len(holds) > 1 else ""
        by = breakpoints_text(hold.breakpoints)
        return f"‖ {slot.request}{more} held at {by}, {_place(mirror, state, hold)}; {left} s left"


def _ended_text(ended: list[EndedHold]) -> str | None:
    if not ended:
        return None
    last = ended[-1]
    if last.why is None:
        more = f" and {count(last.times - 1)} before" if last.times > 1 else ""
        return f"‖ the hold of {last.request}{more} was {last.text}"
    more = f" and {len(ended) - 1} more" if len(ended) > 1 else ""
    return f"‖ {last.request}{more} goes on after {duration(last.held_ns)}: {last.text}"


def _place(mirror: Mirror, state: CacheState, hold: HoldFacts) -> str:
    """The place of a stop. A move is named by the state that it led to, also when the slot has moved on since."""
    if hold.site not in (Site.TRANSITION_WILL, Site.TRANSITION_DID):
        return f"at {hold.site.label}"
    word = "entering" if hold.site is Site.TRANSITION_DID else "before"
    life = mirror.lives.get(hold.slot)
    moves = [] if life is None else [move for move in life.moves if move.start_ns <= hold.since_ns]
    if not moves:
        return f"{word} {state.slots[hold.slot].state.words}"
    known = [state.breakpoints[number].spec.to_state for number in hold.breakpoints if number in state.breakpoints]
    same = [move.state for move in moves if move.start_ns == moves[-1].start_ns]
    return f"{word} {next((state for state in same if state in known), same[-1]).words}"
