"""Merges recordings: their events in the order of the wall clock, or a single recording of all their facts.

A recording knows the wall's clock at its engine's time 0. The clocks of two machines differ, so the order across
recordings is only as good as they are. Within a recording the recorded order stays.

``merge`` writes a recording with the facts of all daemons side by side. Two daemons number their slots, copies and
places alike, and may serve requests of the same name. So a ``MergedSource`` translates every number and name:

    pools, slots                                            numbered anew, in the order in which they appear
    candidates, operations, batches, holds, breakpoints     interleaved: 7 of source 1 of 3 is 22
    requests, owners, sessions                              get the source's name in front

The result holds no stimuli, because no leader decided for all sources; so its state replays and its decisions do not.
Lost events of a source become a gap, with a keyframe of all facts behind it. So does the part in front of a source that
is recorded from its middle on. A reset of one source is a gap of one event, because its event would say that the facts
of all sources are gone.

Law of this file: an event of a source is in the result, or counted in a gap, or in front of the result's beginning.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.columns import copied, used
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import CorruptRecording, RecordingError, UsageError
from kvbm_console.core.events import Event, UnknownKind
from kvbm_console.core.holds import FreezeFacts
from kvbm_console.core.slots import ADVANCING_STATES, SlotFacts
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState, Totals
from kvbm_console.core.tiers import FREE, UNKNOWN_NS, PoolFacts
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import FOLD_ERRORS, decode_events
from kvbm_console.recording.format import About, Frame, Gap, Keyframe
from kvbm_console.recording.output import Made, end_frame, event_frame, keyframe_frame, require_new, write_recording
from kvbm_console.recording.reader import Recording, items_of
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

RECORDINGS_MAX: Final = 64
"""Recordings merged at once, each of which holds its index and a chunk in memory."""
_ORDER: Final = attrgetter("wall_ns", "source")


class Happened(msgspec.Struct, frozen=True):
    """An event or a gap of a recording."""

    wall_ns: int
    source: int
    """Which of them."""
    what: Event | Gap


class Source(msgspec.Struct, frozen=True):
    """One run of one recording, under a unique name."""

    name: str
    recording: Recording


def sources_of(paths: Sequence[Path]) -> list[Source]:
    """All runs of all paths. Raises ``RecordingError``."""
    found: list[tuple[Path, Recording]] = []
    for path in paths:
        last = Recording.open(path)
        found += [(path, last if run == last.incarnation else Recording.open(path, run)) for run in last.runs]
    short = [path.name for path, _ in found]
    names = [
        path.name if short.count(path.name) == 1 else f"{path}@{recording.incarnation}" for path, recording in found
    ]
    return [
        Source(name if name not in names[:place] else f"{name}#{names[: place + 1].count(name)}", recording)
        for place, (name, (_, recording)) in enumerate(zip(names, found, strict=True))
    ]


def merged(recordings: Sequence[Recording]) -> Iterator[Happened]:
    """All events and gaps in the order of the wall's clock. Raises ``RecordingError``."""
    return heapq.merge(*(_happened(source, recording) for source, recording in enumerate(recordings)), key=_ORDER)


def _happened(source: int, recording: Recording) -> Iterator[Happened]:
    anchor = recording.segments[0].about.clock_anchor_ns
    for frame in recording.frames():
        if frame.channel == fmt.EVENTS:
            for event in decode_events(frame, recording.path):
                yield Happened(anchor + event.at_ns, source, event)
        elif frame.channel == fmt.MARKS:
            mark = fmt.decode_mark(frame.data)
            if isinstance(mark, Gap) and mark.count:
                yield Happened(frame.log_ns, source, mark)


# --- a source inside a merged recording -------------------------------------------------------------------------------


class SharedNumbers:
    """The counters that the sources share: the next slot and pool, the iterations of all engines."""

    def __init__(self) -> None:
        self.slot = self.pool = self.iteration = 0

    def next_slot(self) -> int:
        """The number of another slot."""
        self.slot += 1
        return self.slot - 1

    def next_pool(self) -> int:
        """The index of another pool."""
        self.pool += 1
        return self.pool - 1


class MergedSource:
    """Source ``index`` of ``of``, whose time 0 is ``shift_ns`` of the merged recording's."""

    def __init__(self, index: int, of: int, name: str, shift_ns: int, shared: SharedNumbers) -> None:
        self.index, self.of, self.name, self.shift_ns = index, of, name, shift_ns
        self.shared = shared
        self.state: CacheState | None = None
        """Its own facts; None before its recording begins."""
        self.pools: dict[int, int] = {}
        self.slots: dict[int, int] = {}

    def begin(self, state: CacheState) -> None:
        """Take ``state`` as its facts from now on. Numbers of slots that are not in ``state`` are dropped."""
        self.state = state
        for pool in state.pools:
            if pool.info.pool not in self.pools:
                self.pools[pool.info.pool] = self.shared.next_pool()
        self.slots = {number: self.shared.next_slot() for number in state.slots}

    # --- names ---

    def number(self, own: int) -> int:
        """The number of a candidate, operation, batch, hold or breakpoint."""
        return own * self.of + self.index

    def source(self, own: int) -> int:
        """The index of an engine. The leader's own pools go to its first engine, which other sources' slots never
        ask."""
        return self.index + 1 if own <= 1 else own * self.of + self.index + 1

    def text(self, own: str) -> str:
        """A request, owner or session."""
        return f"{self.name}/{own}" if own else own

    def spec(self, own: BreakpointSpec) -> BreakpointSpec:
        """A breakpoint with its number and the number of the breakpoint that it depends on."""
        depends_on = self.number(own.depends_on) if own.depends_on else 0
        return msgspec.structs.replace(own, id=self.number(own.id), depends_on=depends_on)

    def event(self, event: Event, others: "Iterable[MergedSource]") -> Event:
        """The event as it reads in the merged recording, but for ``seq`` and ``cause``; not folded yet."""
        changes: dict[str, Any] = {"at_ns": event.at_ns + self.shift_ns}
        if isinstance(event, ev.PoolKnown):
            if event.pool not in self.pools:  # else it takes over the index of a pool that is forgotten
                self.pools[event.pool] = self.shared.next_pool()
        elif isinstance(event, ev.SlotOpened | ev.SlotCloned):
            self.slots[event.slot] = self.shared.next_slot()
        for field in event.__struct_fields__:
            translate = TRANSLATED.get(field)
            if translate is not None and (value := getattr(event, field)) is not None:
                changes[field] = translate(self, value)
        if isinstance(event, ev.IterationAdvanced):
            changes |= self._iteration(event, others)
        return msgspec.structs.replace(event, **changes)

    def _iteration(self, event: ev.IterationAdvanced, others: "Iterable[MergedSource]") -> dict[str, Any]:
        """An iteration computes a token of every decoding slot by itself: those of other engines are told to stay."""
        assert self.state is not None
        self.shared.iteration += event.iteration - self.state.iteration
        slots, positions = [*map(self.slots.__getitem__, event.slots)], [*event.positions]
        running, waiting = event.running, event.waiting
        for other in others:
            if other is self or other.state is None:
                continue
            running, waiting = running + other.state.running, waiting + other.state.waiting
            for slot in other.state.slots.values():
                if slot.state in ADVANCING_STATES:
                    slots.append(other.slots[slot.slot])
                    positions.append(slot.computed_tokens(other.state.iteration))
        return {
            "iteration": self.shared.iteration, "running": running, "waiting": waiting, "slots": tuple(slots),
            "positions": tuple(positions),
        }

    def fold(self, event: Event) -> None:
        """Fold an event of its own into its facts."""
        assert self.state is not None
        self.state.apply(event)
        if isinstance(event, ev.SlotClosed):
            del self.slots[event.slot]


TRANSLATED: Final[dict[str, Callable[[MergedSource, Any], Any]]] = {
    "pool": lambda part, own: part.pools[own],
    "source_pool": lambda part, own: part.pools[own],
    "target_pool": lambda part, own: part.pools[own],
    "slot": lambda part, own: part.slots[own],
    "parent": lambda part, own: part.slots.get(own),
    "for_slot": lambda part, own: part.slots.get(own),
    "slots": lambda part, own: tuple(part.slots[number] for number in own),
    "candidate": MergedSource.number, "operation": MergedSource.number, "batch": MergedSource.number,
    "hold": MergedSource.number, "breakpoint": MergedSource.number,
    "breakpoints": lambda part, own: tuple(map(part.number, own)),
    "specs": lambda part, own: tuple(map(part.spec, own)),
    "source": MergedSource.source,
    "request": MergedSource.text, "session": MergedSource.text, "owner": MergedSource.text, "by": MergedSource.text,
}
"""Fields of events that name something of their source. A test compares it with all fields that identify."""


# --- facts -----------------------------------------------------------------------------------------------------------


def side_by_side(parts: Sequence[MergedSource], shared: SharedNumbers) -> CacheState:
    """The facts of all sources together; the caller sets ``seq`` and ``n``."""
    whole = CacheState()
    begun = [(part, part.state) for part in parts if part.state is not None]
    pools: dict[int, PoolFacts] = {}
    slots: dict[int, SlotFacts] = {}
    for part, state in begun:
        pools |= {part.pools[pool.info.pool]: _pool(part, pool) for pool in state.pools}
        slots |= {part.slots[slot.slot]: _slot(part, slot, state, shared.iteration) for slot in state.slots.values()}
        _copies(part, state, whole)
        _debugger(part, state, whole)
        whole.lost_sources |= {part.source(own): times for own, times in state.lost_sources.items()}
        whole.measured |= {
            part.source(own): msgspec.structs.replace(
                known, at_ns=known.at_ns + part.shift_ns, first_ns=known.first_ns + part.shift_ns)
            for own, known in state.measured.items()
        }
        whole.connectors |= {
            part.source(own): msgspec.structs.replace(known, at_ns=known.at_ns + part.shift_ns)
            for own, known in state.connectors.items()
        }
        whole.running, whole.waiting = whole.running + state.running, whole.waiting + state.waiting
        whole.draining |= state.draining
        whole.at_ns = max(whole.at_ns, state.at_ns + part.shift_ns)
        whole.totals = _sum(whole.totals, state.totals)
        whole.next_candidate = max(whole.next_candidate, part.number(state.next_candidate))
        whole.next_operation = max(whole.next_operation, part.number(state.next_operation))
        whole.next_hold = max(whole.next_hold, part.number(state.next_hold))
        whole.next_breakpoint = max(whole.next_breakpoint, part.number(state.next_breakpoint))
    whole.pools = [pools[index] for index in sorted(pools)]
    whole.slots = dict(sorted(slots.items()))
    whole.slot_of = {slot.request: slot.slot for slot in whole.slots.values()}
    whole.breakpoints = dict(sorted(whole.breakpoints.items()))
    whole.next_slot, whole.iteration = shared.slot, shared.iteration
    return whole


def _pool(part: MergedSource, own: PoolFacts) -> PoolFacts:
    info = msgspec.structs.replace(own.info, pool=part.pools[own.info.pool], source=part.source(own.info.source))
    pool = PoolFacts(info)
    pool.hash_of, pool.content, pool.refs = copied(own.hash_of), copied(own.content), copied(own.refs)
    pool.stored_at = copied(own.stored_at)
    for at in used(own.content):
        for place in range(at.start, at.stop):
            if own.content[place] != FREE and own.stored_at[place] != UNKNOWN_NS:
                pool.stored_at[place] += part.shift_ns
    pool.by_hash = dict(own.by_hash)
    pool.copies = {key: list(places) for key, places in own.copies.items()}
    pool.quarantined = {place: [*map(part.number, runs)] for place, runs in own.quarantined.items()}
    pool.counts = list(own.counts)
    pool.chains = None if own.chains is None else own.chains.copy()
    pool.silent = own.silent
    return pool


def _slot(part: MergedSource, own: SlotFacts, state: CacheState, iteration: int) -> SlotFacts:
    return msgspec.structs.replace(
        own, slot=part.slots[own.slot], request=part.text(own.request), source=part.source(own.source),
        session=part.text(own.session or "") or None, since_ns=own.since_ns + part.shift_ns,
        opened_ns=own.opened_ns + part.shift_ns, hashes=list(own.hashes),
        parent=None if own.parent is None else part.slots.get(own.parent),
        anchor_tokens=own.computed_tokens(state.iteration), anchor_iteration=iteration,
        device_pool=None if own.device_pool is None else part.pools[own.device_pool],
        device_blocks=list(own.device_blocks), staged=[(part.pools[pool], list(ids)) for pool, ids in own.staged],
        outstanding=set(map(part.number, own.outstanding)), hold=None if own.hold is None else part.number(own.hold),
    )


def _copies(part: MergedSource, state: CacheState, whole: CacheState) -> None:
    number, shift = part.number, part.shift_ns

    def at(own: int | None) -> int | None:
        return None if own is None else own + shift

    for own in state.candidates.values():
        whole.candidates[number(own.candidate)] = msgspec.structs.replace(
            own, candidate=number(own.candidate), slot=None if own.slot is None else part.slots.get(own.slot),
            operation=None if own.operation is None else number(own.operation), planned_ns=own.planned_ns + shift,
            enqueued_ns=at(own.enqueued_ns), evaluated_ns=at(own.evaluated_ns), promoted_ns=at(own.promoted_ns),
            started_ns=at(own.started_ns), request=part.text(own.request) if own.request else "",
            for_slot=None if own.for_slot is None else part.slots.get(own.for_slot),
        )
    for operation in state.operations.values():
        whole.operations[number(operation.operation)] = msgspec.structs.replace(
            operation, operation=number(operation.operation), candidate=number(operation.candidate),
            batch=number(operation.batch), epoch=0, source_pool=part.pools[operation.source_pool],
            target_pool=part.pools[operation.target_pool], reported=set(operation.reported),
            failed=set(operation.failed),
        )
    whole.batches |= {number(batch): set(map(number, members)) for batch, members in state.batches.items()}
    whole.late |= {number(operation): set(ranks) for operation, ranks in state.late.items()}


def _debugger(part: MergedSource, state: CacheState, whole: CacheState) -> None:
    for own in state.holds.values():
        hold = msgspec.structs.replace(
            own, hold=part.number(own.hold), slot=part.slots[own.slot],
            breakpoints=tuple(map(part.number, own.breakpoints)), owner=part.text(own.owner),
            since_ns=own.since_ns + part.shift_ns,
        )
        whole.holds[hold.hold] = hold
    for known in state.breakpoints.values():
        spec = part.spec(known.spec)
        whole.breakpoints[spec.id] = msgspec.structs.replace(known, spec=spec, owner=part.text(known.owner))
    whole.leases |= {part.text(owner): live for owner, live in state.leases.items()}
    whole.standing |= set(map(part.text, state.standing))
    if state.frozen is not None:
        since_ns = state.frozen.since_ns + part.shift_ns
        if whole.frozen is None or whole.frozen.since_ns <= since_ns:
            whole.frozen = FreezeFacts(part.text(state.frozen.by), since_ns, state.frozen.max_hold_ns)


def _sum(a: Totals, b: Totals) -> Totals:
    """Field by field; lists place by place, dicts key by key."""
    return Totals(*(_added(getattr(a, name), getattr(b, name)) for name in Totals.__struct_fields__))


def _added(a: Any, b: Any) -> Any:
    if isinstance(a, bool):
        return a or b
    if isinstance(a, list):
        return [_added(*pair) for pair in zip(a, b, strict=True)]
    if isinstance(a, dict):
        return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
    return a + b


# --- writing a merged recording ---------------------------------------------------------------------------------------


BATCH_EVENTS: Final = 1_000
"""Events per frame; more events hardly reduce the cost of encoding."""
KEYFRAME_EVENTS: Final = 100_000
"""Events between keyframes, as a recorder spaces them for a state of that size."""


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
        program=program, incarnation="+".join(about.incarnation[:8] for about in abouts)[:200], first_seq=0,
        clock_anchor_ns=base_ns, config=abouts[0].config, labels=labels,
    )
    shared = SharedNumbers()
    parts = [
        MergedSource(index, len(sources), source.name.removesuffix(".mcap"), about.clock_anchor_ns - base_ns, shared)
        for index, (source, about) in enumerate(zip(sources, abouts, strict=True))
    ]
    return write_recording(target, about, _Merge(about, sources, parts, shared).frames())


class _Merge:
    def __init__(
        self, about: About, sources: Sequence[Source], parts: list[MergedSource], shared: SharedNumbers
    ) -> None:
        self.about, self.sources, self.parts, self.shared = about, sources, parts, shared
        self.whole = CacheState()
        self.begun = False
        self.cause: tuple[int, int] | None = None
        """(source, stimulus) of the last event."""
        self.batch: list[Event] = []
        self.since_keyframe = 0

    def frames(self) -> Iterator[Frame]:
        """All frames of the result."""
        order = count()  # events of the same time stay in the order of their source
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

    def _event(self, part: MergedSource, event: Event) -> Iterator[Frame]:
        if isinstance(event, UnknownKind):
            raise RecordingError(
                f"{part.name} holds kinds of a newer version of this program (event {event.seq}): they cannot be merged"
            )
        cause = (part.index, event.cause)
        if cause != self.cause:
            # Whole stimuli only: between the events of a stimulus an invariant may be open.
            if len(self.batch) >= BATCH_EVENTS:
                yield from self._flush()
                if self.since_keyframe >= KEYFRAME_EVENTS:
                    yield self._keyframe()
            self.cause, self.whole.n = cause, self.whole.n + 1
        self._append(part.event(event, self.parts))
        self._fold_own(part, event)
        frozen = [part for part in self.parts if part.state is not None and part.state.frozen is not None]
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

    def _fold_own(self, part: MergedSource, event: Event) -> None:
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
        """New facts behind a gap; the very first facts stand behind none."""
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
        return frame if first else msgspec.structs.replace(frame, keyframe=keyframe)


def _happenings(
    index: int, source: Source, part: MergedSource, order: Iterator[int],
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
