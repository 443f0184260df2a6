"""The stories of slots, kept for a debugger: every event of a slot in words, and the states that it went through.

Law of this file: it keeps what the events say, and a row names its event and the stimulus that caused it.
"""

from bisect import bisect_right
from typing import Final

import msgspec

from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core import events as ev
from kvbm_console.core.describe import describe, kind, slot_of, slots_of
from kvbm_console.core.state import CacheState

ROWS_MAX: Final = 5_000
"""Rows kept of one story, the first ones; a request that is left out of every other iteration has more."""


class StoryRow(msgspec.Struct, frozen=True):
    """An event of a slot."""

    seq: int
    at_ns: int
    cause: int
    kind: str
    text: str
    state: str | None
    """The state that it led to; None unless it is a move."""


class Chronicle(Visitor):
    """Stories by slot, and the slots that each event is about.

    With ``ended_max`` it follows a daemon: only so many stories of requests that ended are kept, and no numbers of
    events.
    """

    def __init__(self, ended_max: int | None = None) -> None:
        super().__init__()
        self._ended_max = ended_max
        self.names: dict[int, str] = {}
        self.stories: dict[int, list[StoryRow]] = {}
        self.seqs: list[int] = []
        """Numbers of all events of a recording, ascending."""
        self.every = self._event

    def _event(self, event: ev.Event, state: CacheState) -> None:
        if self._ended_max is None:
            self.seqs.append(event.seq)
        if isinstance(event, ev.IterationAdvanced):
            return
        about = slots_of(event) or ((slot,) if (slot := slot_of(event, state)) is not None else ())
        new = None
        if isinstance(event, ev.SlotOpened | ev.SlotCloned):
            self.names[event.slot], new = event.request, "initialized"
        elif isinstance(event, ev.SlotMoved):
            new = event.new.label
        for slot in about:
            if slot not in self.names and slot in state.slots:
                self.names[slot] = state.slots[slot].request
            story = self.stories.setdefault(slot, [])
            if len(story) < ROWS_MAX:
                story.append(StoryRow(event.seq, event.at_ns, event.cause, kind(event), describe(event, state), new))
        if self._ended_max is not None and len(self.stories) > len(state.slots) + 2 * self._ended_max:
            self._forget(state, self._ended_max)

    def _forget(self, state: CacheState, ended_max: int) -> None:
        """Keep the stories of live requests and of the ``ended_max`` that began last of the others."""
        for slot in [slot for slot in self.stories if slot not in state.slots][:-ended_max]:
            del self.stories[slot]
            self.names.pop(slot, None)

    def story(self, slot: int, until: int) -> list[StoryRow]:
        """The events of a slot up to event ``until``."""
        story = self.stories.get(slot, [])
        return story[: bisect_right(story, until, key=lambda row: row.seq)]

    def following(self, seq: int, slot: int | None, *, moves: bool = False) -> int | None:
        """The next event behind ``seq``, of this slot if one is given, and only its moves with ``moves``."""
        if slot is None:
            at = bisect_right(self.seqs, seq)
            return self.seqs[at] if at < len(self.seqs) else None
        return next((row.seq for row in self.stories.get(slot, [])
                     if row.seq > seq and (row.state is not None or not moves)), None)

    def preceding(self, seq: int, slot: int | None) -> int | None:
        """The last event in front of ``seq``, of this slot if one is given."""
        if slot is None:
            at = bisect_right(self.seqs, seq - 1)
            return self.seqs[at - 1] if at else None
        return next((row.seq for row in reversed(self.stories.get(slot, [])) if row.seq < seq), None)
