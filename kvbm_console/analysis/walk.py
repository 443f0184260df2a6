"""One pass over evidence: facts, events and gaps in order, shown to visitors.

A recording and a live daemon's ring give the same kinds of items, so the answers of this room do not depend on the
source.

Law of this file: a visitor sees an event only while the facts around it are known. The stretch from a gap to the next
keyframe reaches it as one stated gap.
"""

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from kvbm_console.analysis.visitor import Handler, Visitor, merged
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import CorruptRecording
from kvbm_console.core.events import Event, PoolKnown
from kvbm_console.core.leader.memory import LiveMemory
from kvbm_console.core.state import CacheState
from kvbm_console.recording.decode import FOLD_ERRORS, check_size
from kvbm_console.recording.reader import Item, Recording, items_of
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

Progress = Callable[[str, int, int], None]
"""(step, events done, events in all)."""


class Evidence(msgspec.Struct, frozen=True):
    """A source of events. ``items`` can be walked more than once."""

    name: str
    config: LeaderConfig | None
    events: int
    """The approximate number of events, for progress."""
    items: Callable[[], Iterator[Item]]
    remembered: Callable[[int], Mapping[int, int]]
    """The leader's memory at the snapshot with this seq, empty when unknown. It maps a hash to the ``MissReason`` for
    which the block was last given up, even if the block was back at that time."""
    finished: bool = True
    """True if the run was closed on purpose; a live target has nothing to close."""
    now_ns: int | None = None
    """The present time of a live target's engine, because no event tells that time passes on an idle engine."""


def evidence_of(recording: Recording) -> Evidence:
    """A recording as evidence."""

    def remembered(seq: int) -> Mapping[int, int]:
        keyframe = recording.keyframe(seq, complete=True)
        if keyframe is None or keyframe.seq != seq:
            return {}
        try:
            memory = LiveMemory.restore(keyframe.memory).memory
            return ChainMap(memory.history, *memory.older)
        except (*FOLD_ERRORS, msgspec.MsgspecError):
            return {}  # written by a leader that remembered otherwise

    return Evidence(
        recording.path.name or str(recording.path), recording.config, recording.last_seq - recording.first_seq + 1,
        lambda: items_of(recording), remembered, recording.finished,
    )


def walk(
    evidence: Evidence, visitors: Iterable[Visitor], *, progress: Progress | None = None, what: str = "read",
) -> CacheState | None:
    """Fold the evidence once and show it to all visitors; the facts at its end, None when it ends in a gap.

    Raises ``RecordingError`` when the evidence cannot be read or does not fold.
    """
    walker = Walker(visitors, evidence.name)
    for item in evidence.items():
        walker.take(item)
        if progress is not None and isinstance(item, EventsArrived):
            progress(what, walker.events, evidence.events)
    return walker.end()


_Handlers = defaultdict[type[Event], tuple[list[Handler], list[Handler]]]
"""Kind of event to its handlers before and after."""


class Walker:
    """A walk that is fed item by item, for evidence that is still arriving; ``walk`` needs all of the evidence."""

    def __init__(self, visitors: Iterable[Visitor], name: str) -> None:
        self.events = 0
        """Events folded so far."""
        self._name = name
        self._visitors = list(visitors)
        every = [visitor.every for visitor in self._visitors if visitor.every is not None]
        before = merged(visitor.before for visitor in self._visitors)
        after = merged(visitor.after for visitor in self._visitors)
        self._handlers: _Handlers = defaultdict(lambda: (every, []))
        self._handlers.update(
            (kind, (every + before.get(kind, []), after.get(kind, []))) for kind in before.keys() | after.keys()
        )
        self._state: CacheState | None = None
        self._gap: GapSeen | None = None

    def take(self, item: Item) -> None:
        """The next item. Raises ``CorruptRecording`` when an event does not fit the facts."""
        if isinstance(item, SnapshotTaken):
            self._state = item.state
            for visitor in self._visitors:
                visitor.resumed(item.state, self._gap)
            self._gap = None
        elif isinstance(item, GapSeen):
            self._state, self._gap = None, item
        elif self._state is not None:
            _fold(self._name, self._state, item.events, self._handlers)
            self.events += len(item.events)

    def end(self) -> CacheState | None:
        """Nothing follows; the facts, None behind a gap."""
        for visitor in self._visitors:
            visitor.ended(self._state, self._gap)
        return self._state


def _fold(name: str, state: CacheState, events: list[Event], handlers: "_Handlers") -> None:
    apply = state.apply
    for event in events:
        before, after = handlers[type(event)]
        try:
            for handler in before:
                handler(event, state)
        except FOLD_ERRORS:
            # The handler looks up ids that only the fold checks. If the fold fails too, the file is damaged;
            # otherwise the handler has a bug.
            _apply(name, state, event)
            raise
        try:
            if type(event) is PoolKnown:
                check_size(state, event)
            apply(event)
        except FOLD_ERRORS as error:
            raise _unfit(name, event, error) from None
        for handler in after:
            handler(event, state)


def _apply(name: str, state: CacheState, event: Event) -> None:
    try:
        if type(event) is PoolKnown:
            check_size(state, event)
        state.apply(event)
    except FOLD_ERRORS as error:
        raise _unfit(name, event, error) from None


def _unfit(name: str, event: Event, error: Exception) -> CorruptRecording:
    return CorruptRecording(f"{name}: event {event.seq} does not fit the facts: {error}")
