"""Several recordings made one: the facts of all daemons side by side, in one order by the wall's clock.

The result is a recording like any other, with numbers of its own; it holds no stimuli, since no leader ever decided for
all of them, so the state replays and decisions do not. What one source lost, and a source that is recorded from its
middle on, is a gap with the number of its missing events, and a keyframe of all facts behind it. A reset of one source
is such a gap of one event: the event says that everything is gone, which is true of one source alone.

Law of this file: an event of a source is in the result, or counted in a gap, or in front of the result's beginning.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.errors import CorruptRecording, RecordingError, UsageError
from kvbm_console.core.events import Event, UnknownKind
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import FOLD_ERRORS
from kvbm_console.recording.format import About, Frame, Gap, Keyframe
from kvbm_console.recording.merge import RECORDINGS_MAX, Source
from kvbm_console.recording.merge_parts import Numbers, Part, side_by_side
from kvbm_console.recording.output import Made, end_frame, event_frame, keyframe_frame, write_recording
from kvbm_console.recording.place import require_new
from kvbm_console.recording.reader import items_of
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

BATCH_EVENTS: Final = 1_000
"""Events of one frame: above the knee of what encoding costs."""
KEYFRAME_EVENTS: Final = 100_000
"""As far apart as a recorder's of a state of that size."""


class _Resumed(msgspec.Struct, frozen=True):
    """A source's facts are known from here on; behind ``missing`` events that are not in its recording."""

    state: CacheState
    missing: int
    reason: str


class _Ended(msgspec.Struct, frozen=True):
    """A source's recording ends with so many missing events."""

    missing: int
    reason: str


_Happening = Event | _Resumed | _Ended


def merge(sources: Sequence[Source], target: Path, program: str = "") -> Made:
    """Write the sources to ``target``. Raises ``UsageError``, ``RecordingError`` and ``OSError``."""
    require_new(target)
    if not 2 <= len(sources) <= RECORDINGS_MAX:
        raise UsageError(f"from 2 to {RECORDINGS_MAX} recordings are merged, got {len(sources)}")
    abouts = [source.recording.segments[0].about for source in sources]
    base_ns = min(about.clock_anchor_ns for about in abouts)
    labels = {"merged_from": ", ".join(source.name for source in sources)}
    about = About(
        program=program, incarnation="+".join(one.incarnation[:8] for one in abouts)[:200], first_seq=0,
        clock_anchor_ns=base_ns, config=abouts[0].config, labels=labels,
    )
    shared = Numbers()
    parts = [
        Part(index, len(sources), source.name.removesuffix(".mcap"), one.clock_anchor_ns - base_ns, shared)
        for index, (source, one) in enumerate(zip(sources, abouts, strict=True))
    ]
    return write_recording(target, about, _Merge(about, sources, parts, shared).frames())


class _Merge:
    def __init__(self, about: About, sources: Sequence[Source], parts: list[Part], shared: Numbers) -> None:
        self.about, self.sources, self.parts, self.shared = about, sources, parts, shared
        self.whole = CacheState()
        self.begun = False
        self.cause: tuple[int, int] | None = None
        """(source, stimulus) of the last event."""
        self.batch: list[Event] = []
        self.since_keyframe = 0

    def frames(self) -> Iterator[Frame]:
        """All frames of the result."""
        order = count()  # what happened at one moment stays in the order of its source
        streams = [_happenings(index, source, self.parts[index], order) for index, source in enumerate(self.sources)]
        for at_ns, index, _, what in heapq.merge(*streams, key=itemgetter(0, 1)):
            part = self.parts[index]
            if isinstance(what, _Resumed):
                part.begin(what.state)
                yield from self._resume(at_ns, what.missing, what.reason)
            elif isinstance(what, _Ended):
                yield from self._missing(at_ns, what.missing, what.reason)
            elif isinstance(what, ev.ResetDone):
                self._fold_own(part, what)
                yield from self._resume(at_ns, 1, f"{part.name}: a reset, which is of one source alone")
            else:
                yield from self._event(part, what)
        yield from self._flush()
        yield end_frame(self.about, self.whole.seq - 1, self.whole.at_ns)

    # --- events ---

    def _event(self, part: Part, event: Event) -> Iterator[Frame]:
        if isinstance(event, UnknownKind):
            raise RecordingError(
                f"{part.name} holds kinds of a newer version of this program (event {event.seq}): they cannot be merged"
            )
        cause = (part.index, event.cause)
        if cause != self.cause:
            # Whole stimuli only: between the events of one an invariant may be open.
            if len(self.batch) >= BATCH_EVENTS:
                yield from self._flush()
                if self.since_keyframe >= KEYFRAME_EVENTS:
                    yield self._keyframe()
            self.cause, self.whole.n = cause, self.whole.n + 1
        self._append(part.event(event, self.parts))
        self._fold_own(part, event)
        frozen = [one for one in self.parts if one.state is not None and one.state.frozen is not None]
        if isinstance(event, ev.Thawed) and frozen:
            still = frozen[0].state.frozen  # type: ignore[union-attr]
            assert still is not None
            self._append(ev.Frozen(0, self.whole.at_ns, 0, frozen[0].text(still.by), still.max_hold_ns))

    def _append(self, event: Event) -> None:
        event = msgspec.structs.replace(event, seq=self.whole.seq, cause=self.whole.n)
        self.batch.append(event)
        try:
            self.whole.apply(event)
        except FOLD_ERRORS as error:
            raise CorruptRecording(f"event {event.seq} of the merged recording does not fit: {error}") from None

    def _fold_own(self, part: Part, event: Event) -> None:
        try:
            part.fold(event)
        except FOLD_ERRORS as error:
            raise CorruptRecording(f"{part.name}: event {event.seq} does not fit the facts: {error}") from None

    def _flush(self) -> Iterator[Frame]:
        if self.batch:
            yield event_frame(self.about, self.batch)
            self.since_keyframe += len(self.batch)
            self.batch = []

    # --- gaps and keyframes ---

    def _resume(self, at_ns: int, missing: int, reason: str) -> Iterator[Frame]:
        """Other facts than the ones so far, behind a gap; the very first ones stand behind none."""
        first, self.begun = not self.begun, True
        if not first:
            if not missing:
                return  # a source from its very first event on: there are no facts yet
            yield from self._missing(at_ns, missing, reason)
        seq, n = self.whole.seq, self.whole.n
        whole = side_by_side(self.parts, self.shared)
        whole.seq, whole.n, whole.at_ns = seq, n, max(whole.at_ns, at_ns)
        self.whole = whole
        yield self._keyframe(first=first)

    def _missing(self, at_ns: int, missing: int, reason: str) -> Iterator[Frame]:
        yield from self._flush()
        if missing:
            gap = Gap(self.whole.seq, self.whole.seq + missing - 1, reason)
            at = self.about.clock_anchor_ns + max(at_ns, self.whole.at_ns)
            yield Frame(fmt.MARKS, gap.first, gap.count, at, at, fmt.encode_item(gap))
            self.whole.seq += missing

    def _keyframe(self, *, first: bool = False) -> Frame:
        self.since_keyframe = 0
        keyframe = Keyframe(self.whole.seq, False, encode_facts(self.whole), b"")
        frame = keyframe_frame(self.about, keyframe, self.whole.at_ns)
        return frame if first else msgspec.structs.replace(frame, data=fmt.encode_item(keyframe))


def _happenings(
    index: int, source: Source, part: Part, order: Iterator[int],
) -> Iterator[tuple[int, int, int, _Happening]]:
    """(time of the merged recording, source, order, what) of one source, in its own order."""
    shift, now_ns = part.shift_ns, 0
    lost: GapSeen | None = None
    begun = False
    for item in items_of(source.recording):
        if isinstance(item, EventsArrived):
            for event in item.events:
                now_ns = event.at_ns
                yield now_ns + shift, index, next(order), event
        elif isinstance(item, GapSeen):
            lost = item
        elif isinstance(item, SnapshotTaken):
            state = item.state
            now_ns = max(now_ns, state.at_ns)
            missing, reason = state.seq, f"{source.name} is recorded from its event {state.seq:,} on"
            if begun:
                assert lost is not None
                missing, reason = lost.count, f"{source.name}: {lost.reason}"
            lost, begun = None, True
            yield now_ns + shift, index, next(order), _Resumed(state, missing, reason)
    if lost is not None:
        yield now_ns + shift, index, next(order), _Ended(lost.count, f"{source.name}: {lost.reason}")
