"""The mirror: feed items folded into facts and into the history that facts do not keep.

Law of this file: facts change only through ``CacheState.apply``, so the mirror's digest is the leader's. History is
folded beside them from the same events. It is bounded, and the contents of a gap are never invented.
"""

from bisect import bisect_left
from collections import deque
from typing import Any, Final

from kvbm_console.analysis.lints import LintFold, Pending, Slow, Stuck, stream_lints
from kvbm_console.core.errors import FoldError
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import (
    BatchArrived,
    Connected,
    Disconnected,
    EventsArrived,
    FeedItem,
    GapSeen,
    Heartbeat,
    SnapshotTaken,
)
from kvbm_console.wire.batches import MalformedBatch, UnreadBatch

from .clock import FeedProgress
from .coverage import Coverage, SeenGap
from .history import HISTORY, SKIMMED, History, PastLives, adopt, urgent
from .numbers import S
from .sources import Seen
from .spine import FIELDS, values_of
from .trail import Trail

GAPS_MAX: Final = 64


class Mirror(History):
    """The facts and the history of a target, as far as this console knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.connected: Connected | None = None
        self.disconnected: Disconnected | None = None
        self.disconnected_mono_ns = 0
        self.heartbeat: Heartbeat | None = None
        self.progress = FeedProgress()
        self.version = 0
        """Grows with every item, so a drawing can tell that it is old."""
        self.sampling = False
        """True if events are no longer folded into the facts, which come as snapshots instead."""
        self.affords = True
        """True if there is time to look at events while facts are sampled; without, they are passed over."""
        self.facts_mono_ns = 0
        """Local time of the last snapshot."""
        self.queues: tuple[tuple[int, int], dict[int, Any]] = (0, -1), {}
        """The queues of engines as ``waits.queue_of`` found them, with the moment of the facts."""
        self.places = 0
        """Places of a recording that were reached, because each has another known past."""
        self.lost_events = 0
        self.gaps: deque[SeenGap] = deque(maxlen=GAPS_MAX)
        self.broken: str | None = None
        """Why the last events did not fit; the session then asks for a new snapshot."""

    def clear(self) -> None:
        """Forget everything that events told, and everything derived from them."""
        super().clear()
        self.watch_with(LintFold(stream_lints()))
        self.trail = Trail()
        """The log with the events that are older than it."""
        self.coverage = Coverage()
        self.seen_ns = 0
        """The target's time up to which history is known."""
        self.tick_ns = -S
        """The beginning of the second, in the target's time, for which levels were sampled."""

    def watch_with(self, watch: LintFold) -> None:
        """Take these lints, with all that they have seen."""
        self.watch = watch
        """The library's lints, which see every event that is folded."""
        self.stuck = next(lint for lint in watch.lints if isinstance(lint, Stuck))
        """The usual stay in each state, and the level of a slot's stay."""
        self.pending = next(lint for lint in watch.lints if isinstance(lint, Pending))
        """The usual wait on each route before a copy begins."""
        self.slow = next(lint for lint in watch.lints if isinstance(lint, Slow))
        """The usual time of a copy on each route."""

    @property
    def incarnation(self) -> str:
        """The run of the target: numbers of slots, events and operations mean something within it."""
        return self.connected.incarnation if self.connected is not None else ""

    @property
    def block_bytes(self) -> int | None:
        """Bytes of a block by the geometry of the connected target; None while it is unknown."""
        return self.connected.block_bytes if self.connected is not None else None

    # --- items -------------------------------------------------------------------------------------------------------

    def take(self, item: FeedItem, mono_ns: int) -> None:
        """Fold an item. ``mono_ns`` is the local monotonic clock at its arrival."""
        self.version += 1
        self.mono_ns = mono_ns
        match item:
            case EventsArrived(events):
                self.fold(events, mono_ns)
            case BatchArrived(batch):
                self.batch(batch, mono_ns)
            case Heartbeat():
                self.heartbeat = item
                self.clock.beat(item.at_ns, mono_ns)
                self.progress.beat(item.head_seq, mono_ns)
            case SnapshotTaken(state):
                self._snapshot(state, mono_ns)
            case GapSeen():
                self._gap(item.first, item.last, item.reason, mono_ns)
            case Connected():
                self._connect(item, mono_ns)
            case Disconnected():
                if self.disconnected is None:
                    self.disconnected_mono_ns = mono_ns
                self.disconnected = item

    def batch(self, batch: UnreadBatch, mono_ns: int) -> None:
        """Take events that are still encoded. An unreadable batch sets ``broken``."""
        if self.reads:
            try:
                self.fold(batch.read(), mono_ns)
            except MalformedBatch as error:
                self.broken = str(error)
            return
        if self.state is None or self.broken is not None:
            return
        self.version += 1
        self.wants_facts = self.wants_facts or batch.may_have(urgent(self.state))
        self._pass_over(batch.first_seq, batch.count, batch.last_ns, mono_ns)

    @property
    def reads(self) -> bool:
        """True if the next events are looked at, rather than passed over."""
        return not (self.sampling or self.sampled) or (self.affords and not self.coverage.passing)

    def fold(self, events: list[Event], mono_ns: int) -> None:
        """Fold events in order. An event that does not fit ends the batch and sets ``broken``."""
        state = self.state
        if state is None or self.broken is not None or not events:
            return
        self.version += 1
        if not self.reads:
            kinds = urgent(state)
            self.wants_facts = self.wants_facts or any(type(event) in kinds for event in events)
            self._pass_over(events[0].seq, len(events), events[-1].at_ns, mono_ns)
            return
        self.progress.arrived(len(events), mono_ns)
        if self.sampling or self.sampled:
            if not self.sampled:
                self.flows.settle()
            self._skim(events, mono_ns)
            return
        known, apply = HISTORY.get, self.watch.apply
        index = first = 0
        before_ns = state.at_ns
        try:
            for index, event in enumerate(events):
                at_ns = event.at_ns
                if not self.tick_ns <= at_ns < self.tick_ns + S:
                    self._count(before_ns, index - first)
                    first = index
                    self._tick(at_ns)
                before_ns = at_ns
                keep = known(type(event))
                if keep is not None:
                    keep(self, event)
                apply(state, event)
        except (FoldError, KeyError, IndexError, ValueError) as error:
            self.broken = f"event {events[index].seq} does not fit: {error}"
            self.log.extend(events[:index])
            self.seen_ns = state.at_ns
            return
        self.log.extend(events)
        self._count(before_ns, len(events) - first)
        self.log_total += len(events)
        self.clock.event(state.at_ns, mono_ns)
        self.progress.applied(state.seq)
        self.next_seq, self.seen_ns = state.seq, state.at_ns

    @property
    def sampled(self) -> bool:
        """True if events have come that the facts do not contain; a snapshot ends it."""
        return self.state is not None and self.next_seq > self.state.seq

    def _skim(self, events: list[Event], mono_ns: int) -> None:
        """Fold events into the history alone; the facts stay as they are until the next snapshot."""
        known = SKIMMED.get
        try:
            for event in events:
                keep = known(type(event))
                if keep is not None:
                    keep(self, event)
        except KeyError as error:
            self.broken = f"event {event.seq} does not fit: {error}"
            return
        self.log.extend(events)
        self.coverage.took(len(events))
        self.seen_ns = events[-1].at_ns
        self._went_by(events[0].seq, len(events), self.seen_ns, mono_ns)

    def _pass_over(self, first: int, events: int, at_ns: int, mono_ns: int) -> None:
        """Count events without reading them; the next snapshot brings their effects."""
        self.progress.arrived(events, mono_ns)
        self.coverage.passed_over(first, events, self.seen_ns, at_ns)
        self._went_by(first, events, at_ns, mono_ns)

    def skip_to(self, state: CacheState, mono_ns: int) -> None:
        """Pass over the events in front of these facts, and take over the facts."""
        if state.seq > self.next_seq:
            self._pass_over(self.next_seq, state.seq - self.next_seq, state.at_ns, mono_ns)
        self.take(SnapshotTaken(state), mono_ns)

    def _went_by(self, first: int, events: int, at_ns: int, mono_ns: int) -> None:
        """Advance time and counts over events that were not folded; all of them count at the end of their slice."""
        if not self.tick_ns <= at_ns < self.tick_ns + S:
            self._tick(at_ns)
        self._count(at_ns, events)
        self.log_total += events
        self.next_seq = first + events
        self.clock.event(at_ns, mono_ns)
        self.progress.applied(self.next_seq)

    def _count(self, at_ns: int, events: int) -> None:
        """Count folded events of a second."""
        if events:
            self.flows.events.add(at_ns, events)
            self.density.add(at_ns, events)

    def _connect(self, item: Connected, mono_ns: int) -> None:
        if self.connected is None or self.incarnation != item.incarnation:
            self.state = None
            self.gaps.clear()
            self.lost_events = 0
            self.clear()
            self.clock.reset()
        self.connected = item
        self.disconnected = None
        self.broken = None
        self.clock.live = not item.recording
        self.progress.reset(mono_ns)

    def _gap(self, first: int, last: int, reason: str, mono_ns: int) -> None:
        self.gaps.append(SeenGap(first, last, reason, self.seen_ns, None, mono_ns))
        self.lost_events += last - first + 1

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def _snapshot(self, state: CacheState, mono_ns: int) -> None:
        before = self.state
        recording = self.connected is not None and self.connected.recording
        gap = self.gaps[-1] if self.gaps and self.gaps[-1].end_ns is None else None
        follows = not recording and before is not None and self.broken is None and state.seq == self.next_seq
        if before is not None and gap is None and state.seq > before.seq and not recording and not follows:
            first = self.next_seq if state.seq > self.next_seq else before.seq
            self._gap(first, state.seq - 1, "not delivered", mono_ns)
            gap = self.gaps[-1]
        known = follows if before is not None else state.seq == self.next_seq  # its past was told
        if not known and (before is None or gap is None or state.seq < before.seq or state.at_ns < before.at_ns):
            self.clear()
            self.clock.reset()
            if recording:  # another place of the tape: its past is folded again
                self.gaps.clear()
                self.lost_events = 0
        if gap is not None:
            gap.end_ns = state.at_ns
            self.flows.blank(state.at_ns)
        self.broken = None
        self.state = state
        each = self.coverage.snapshot(state.at_ns if gap is None else gap.start_ns)
        lost = None if gap is None or before is None else GapSeen(gap.first, gap.last, gap.reason)
        if follows and before is not None and before.seq < state.seq:
            lost = GapSeen(before.seq, state.seq - 1, "sampled")  # the lints of the library saw nothing of it
            self.flows.between(before, state, each)
        self.next_seq, self.facts_mono_ns = state.seq, mono_ns
        self.watch.resumed(state, lost)
        adopt(self, state, self.seen_ns if before is not None else state.at_ns, mono_ns)
        self.seen_ns = state.at_ns
        self.clock.event(state.at_ns, mono_ns)
        self.density.add(state.at_ns, 0)
        self.progress.applied(state.seq)

    # --- another place of a tape -------------------------------------------------------------------------------------

    def resume(self, state: CacheState, spine: bytes, mono_ns: int) -> None:
        """Stand at these facts with the history of a spine; lives, copies and the log begin here."""
        values, seen = values_of(spine)
        self._begin(state, values, seen, mono_ns)

    def become(self, other: "Mirror") -> None:
        """Stand where ``other`` stands, with all that it knows; ``other`` is not used any more."""
        version = self.version + 1
        vars(self).update(vars(other))
        self.version = version

    def let_go(self, mono_ns: int, lanes: PastLives | None = None) -> None:
        """Forget lives, copies and the log: they begin here, the lives with those of ``lanes``. The spine goes on."""
        self._begin(self.facts, {name: getattr(self, name) for name in FIELDS}, self.sources.seen, mono_ns, lanes)

    def _begin(
        self, state: CacheState, values: dict[str, Any], seen: dict[int, Seen], mono_ns: int,
        lanes: PastLives | None = None,
    ) -> None:
        told = self.sources.told
        self.clear()
        for name, value in values.items():
            setattr(self, name, value)
        self.sources.seen, self.sources.told = seen, told
        self.log_total = 0
        if lanes is not None:
            self.lives, self.archive, self.past = lanes.lives, lanes.archive, lanes.past
            self.halves, self.ended, self.lives_ns = lanes.halves, lanes.ended, lanes.lives_ns
        self.state, self.next_seq, self.seen_ns = state, state.seq, state.at_ns
        adopt(self, state, state.at_ns, mono_ns)

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, at_ns: int) -> None:
        """A new second of the target's time began: sample levels as they were at its end."""
        self.tick_ns = at_ns // S * S
        if self.state is None:
            return
        flows = self.flows
        for pool in self.state.pools:
            capacity = self.state.capacity_of(pool)
            if capacity:
                flows.occupancy[pool.info.pool].set(at_ns, pool.resident_blocks / capacity)
        asked, hits = flows.hit_shares(at_ns)
        flows.hit_rate.set(at_ns, sum(hits) / asked if asked else None)

    def now_ns(self, mono_ns: int) -> int:
        """The target's time."""
        return self.clock.now(mono_ns)

    def lost_age_ns(self, mono_ns: int) -> int | None:
        """Local time since the last loss, on a recording the target's; None when nothing was lost."""
        if not self.gaps:
            return None
        gap = self.gaps[-1]
        if self.connected is not None and self.connected.recording:
            return max(0, self.now_ns(mono_ns) - (gap.end_ns if gap.end_ns is not None else gap.start_ns))
        return mono_ns - gap.seen_mono_ns

    def hold_left_ns(self, hold: int, mono_ns: int) -> int | None:
        """Time until a hold resumes by itself. On a recording by the target's time, else by the wall clock."""
        if self.state is None or hold not in self.state.holds:
            return None
        facts = self.state.holds[hold]
        if self.clock.live and hold in self.hold_mono:
            return facts.max_hold_ns - (mono_ns - self.hold_mono[hold])
        return facts.max_hold_ns - (self.now_ns(mono_ns) - facts.since_ns)

    def hold_age_ns(self, hold: int, mono_ns: int) -> int:
        """How long a hold has lasted, on the same clock as its deadline."""
        left = self.hold_left_ns(hold, mono_ns)
        return 0 if left is None or self.state is None else self.state.holds[hold].max_hold_ns - left

    def frozen_left_ns(self, mono_ns: int) -> int | None:
        """Longest time until a frozen target goes on by itself; on the same clocks as holds."""
        frozen = None if self.state is None else self.state.frozen
        if frozen is None:
            return None
        if self.clock.live and self.frozen_mono is not None:
            return frozen.max_hold_ns - (mono_ns - self.frozen_mono)
        return frozen.max_hold_ns - (self.now_ns(mono_ns) - frozen.since_ns)

    def step_ns(self) -> int | None:
        """Mean time of the last iterations; None before two."""
        if len(self.steps) < 2 or self.steps[-1][0] == self.steps[0][0]:
            return None
        (first, start), (last, end) = self.steps[0], self.steps[-1]
        return (end - start) // (last - first)

    def event(self, seq: int) -> Event | None:
        """An event of the log, or an older event that is known, by its number."""
        index = bisect_left(self.log, seq, key=lambda event: event.seq)
        if index < len(self.log) and self.log[index].seq == seq:
            return self.log[index]
        return self.trail.event(seq)
