"""The rows of the timeline: the choice and the order of lives.

Law of this file: lives that need a person come first, then lives by arrival. Live requests that have waited for their
first step for more than a second stand behind the live ones that work, so that a queue does not hide the work. Rows
move at most once a second, and the selected row never moves. While nothing is selected, new lives appear at the top at
once, so the live edge is never empty.
"""

from sys import maxsize
from typing import Any, Final

from kvbm_console.analysis.lives import Life
from kvbm_console.core.expression import Field, Schema
from kvbm_console.core.expression.fields import words
from kvbm_console.core.expression.schema import YES_NO, Kind
from kvbm_console.core.ids import SlotState
from kvbm_console.core.slots import SlotFacts

from .filters import Filter
from .history import Archive
from .lints import slot_level
from .mirror import Mirror
from .slots import SORT_EVERY_NS

WORKING: Final = 9
"""The rank of lives that need nobody, above every ``Level``: live ones that work, and ended ones that came after the
first of these."""
QUEUED: Final = 10
ENDED: Final = 11
"""Ended lives that came before every live one that works."""


def _rank(mirror: Mirror, slot: SlotFacts, now_ns: int) -> int:
    level = slot_level(mirror, slot, now_ns)
    if level is not None:
        return int(level)
    return QUEUED if slot.state is SlotState.INITIALIZED and now_ns - slot.since_ns > SORT_EVERY_NS else WORKING


class LifeOrder:
    """The order over time."""

    def __init__(self) -> None:
        self.by_arrival = False
        self._lives: list[Life] = []
        self._known: set[int] = set()
        """The slots of these lives."""
        self._gone: tuple[Archive, int] | None = None
        """The archive and its number of forgotten lives at the last update."""
        self._needy = 0
        """Number of lives at the top that need a person."""
        self._sorted_mono = -SORT_EVERY_NS
        self._sorted_by: tuple[bool, str, int] = (False, "", -1)
        self._chosen: Life | None = None

    def update(self, mirror: Mirror, mono_ns: int, selected: str | None, wanted: Filter | None) -> list[Life]:
        """Live and recently finished lives from the first row to the last."""
        state = mirror.facts
        now = mirror.now_ns(mono_ns)

        def key(life: Life) -> tuple[int, int]:
            if self.by_arrival:
                return (WORKING, -life.slot)
            rank = ranks.get(life.slot, WORKING if life.slot > oldest else ENDED)
            return (rank, life.slot if rank < WORKING else -life.slot)

        key_now = (self.by_arrival, wanted.text if wanted is not None else "", mirror.places)
        if key_now == self._sorted_by and 0 <= mono_ns - self._sorted_mono < SORT_EVERY_NS:
            self._catch_up(mirror, selected is None, wanted, now)
            return self._lives
        same = key_now == self._sorted_by
        self._sorted_by, self._sorted_mono, self._gone = key_now, mono_ns, (mirror.archive, mirror.archive.forgotten)
        by_slot = {life.slot: life for life in mirror.past} | mirror.lives
        lives = [life for life in by_slot.values() if wanted is None or wanted.matches(life, state, now)]
        ranks = {number: _rank(mirror, slot, now) for number, slot in state.slots.items()}
        oldest = min((number for number, rank in ranks.items() if rank == WORKING), default=maxsize)
        lives.sort(key=key)
        self._needy = sum(key(life)[0] < WORKING for life in lives[:len(mirror.lives)])
        at = next((i for i, life in enumerate(self._lives) if life is self._chosen), None) if same else None
        if at is not None and self._chosen in lives and self._chosen.request == selected:
            lives.remove(self._chosen)
            lives.insert(min(at, len(lives)), self._chosen)
        self._lives, self._known = lives, {life.slot for life in lives}
        self._chosen = mirror.life_of(selected) if selected else None
        return lives

    def _catch_up(self, mirror: Mirror, comes_in: bool, wanted: Filter | None, now: int) -> None:
        """Between two sorts, drop forgotten lives, and add new lives if they may come in."""
        lives, state, now_gone = self._lives, mirror.state, (mirror.archive, mirror.archive.forgotten)
        if now_gone != self._gone:
            self._gone = now_gone
            live, kept = mirror.lives.get, mirror.archive.slots.get
            self._lives = lives = [life for life in lives if (live(life.slot) or kept(life.slot)) is life]
            self._known = {life.slot for life in lives}
        if comes_in:
            fresh = [
                life for number, life in mirror.lives.items()
                if number not in self._known and (wanted is None or wanted.matches(life, state, now))
            ]
            if fresh:
                fresh.sort(key=lambda life: -life.slot)
                self._lives = [*lives[: self._needy], *fresh, *lives[self._needy :]]
                self._known.update(life.slot for life in fresh)


def _preemptions(life: Life, state: Any, now: Any) -> int:
    return sum(move.state is SlotState.PREEMPTED for move in life.moves)


def _life_age(life: Life, state: Any, now: int) -> int:
    end = now if life.closed_ns is None else life.closed_ns
    return end - (life.starts[-1] if life.starts else life.opened_ns)


LIVES: Final = Schema("a life", [
    Field("request", Kind.TEXT, lambda life, s, now: life.request, "The request's id.", ordered=False),
    Field("slot", Kind.ID, lambda life, s, now: life.slot, "The slot's number."),
    Field("state", Kind.WORD, lambda life, s, now: life.state, "Its last state.", words(SlotState), ordered=False),
    Field("age", Kind.DURATION, _life_age, "How long it has been, or was, in that state."),
    Field("lifetime", Kind.DURATION,
          lambda life, s, now: (life.closed_ns if life.closed_ns is not None else now) - life.opened_ns,
          "How long it has existed, or did."),
    Field("live", Kind.WORD, lambda life, s, now: life.closed_ns is None, "Yes if the slot has not ended.", YES_NO,
          ordered=False),
    Field("held", Kind.WORD, lambda life, s, now: life.held_now() is not None, "Yes if the slot is held.", YES_NO,
          ordered=False),
    Field("holds", Kind.COUNT, lambda life, s, now: len(life.stays), "How often it was held."),
    Field("preemptions", Kind.COUNT, _preemptions, "How often it was preempted."),
    Field("transfers", Kind.COUNT, lambda life, s, now: len(life.transfers), "Transfers of its blocks."),
])
"""Lives on the timeline. The moment is the shown time of the target."""
