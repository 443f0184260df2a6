"""The leader as a service: one thread and one writer, which publish, keep and record every change and never wait.

``submit`` is a plain function on the loop's thread. It stamps a stimulus, asks the leader, appends to the ring, offers
to the recorder, wakes subscribers and carries out instructions. It never awaits, so no lock exists. The bounds in time
of holds and leases run on the wall's monotonic clock and come in as stimuli like everything else.

Law of this file: the published facts can be folded from the base snapshot and the ring, at every moment.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import msgspec
import xxhash

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import InternalError
from kvbm_console.core.events import Event, InvariantViolated
from kvbm_console.core.ids import Note
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import sparse_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import DeadlinePassed, LeaseGranted, LeaseLost, NoteReported, Stimulus
from kvbm_console.debug.leases import LEASE_TTL_NS, Leases, WallDeadlines
from kvbm_console.debug.sessions import Sessions
from kvbm_console.dispatch import Dispatcher, start_leader
from kvbm_console.hosts import HostProcesses
from kvbm_console.parts import Parts, Watch
from kvbm_console.recording.writer import RecorderNotes
from kvbm_console.stream.broadcast import Broadcaster
from kvbm_console.stream.document import Document, status_document
from kvbm_console.stream.ended import EndedHolds
from kvbm_console.stream.ring import Cursor, Ring
from kvbm_console.wire.batches import EventChunk, StimulusChunk, unpack_stimuli

if TYPE_CHECKING:
    from kvbm_console.recording.output import RecordingPath
    from kvbm_console.recording.writer import Recorder

log = logging.getLogger("kvbm_console.service")

HEARTBEAT_S: Final = 0.5
"""A console knows within a second that it talks to a living daemon."""
LEASE_CHECK_S: Final = 0.1
"""How late a lost lease may be noticed; well below the half second that is promised."""
AUDIT_EVERY: Final = 50
"""With ``check`` the cheap invariants are verified after every stimulus, the full walk after as many: it takes 2 ms."""
SNAPSHOT_REUSE_EVENTS: Final = 4_096
"""A snapshot that is at most this old serves the next subscriber too: folding that much takes some milliseconds."""


AWAITED_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes that may wait for a recorder that is being made: as many as may wait for a recorder that writes."""
BASES_MAX: Final = 4
"""Older snapshots, each as large as the facts, that are kept while the ring goes on from them. ``rec dump`` reaches
back to the oldest."""


class Closing(Protocol):
    """A part that learns of the end of the service."""

    def close(self) -> None:
        """Finish the pending work."""
        ...


class Snapshot(msgspec.Struct, frozen=True):
    """Facts between two stimuli; ``seq`` is the number of the next event, ``n`` of the next stimulus."""

    seq: int
    n: int
    at_ns: int
    facts: memoryview

    @property
    def digest(self) -> int:
        """Digest of the facts."""
        return xxhash.xxh3_64_intdigest(self.facts)


class Changed:
    """Lets drivers wait until something was published."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None

    def notify(self) -> None:
        """Wake all waiting tasks."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Wait for the next ``notify``."""
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()


class LeaderService:
    """Owns leader, dispatcher, ring and broadcaster, debugger sessions and leases.

    ``clock`` is the engine's clock in nanoseconds (virtual when it is simulated). With ``check`` a bug of the core is
    raised where it happens; without, the stimulus is undone, published as ``InvariantViolated``, and the service goes
    on. ``more_hosts`` follow the same stimuli. Set ``recorder`` before the first stimulus.
    """

    labels: Mapping[str, str] = MappingProxyType({})
    """Labels of its recordings, beside the target."""
    hosts: HostProcesses | None = None
    """Further hosts in processes of their own; set before the first stimulus."""
    exported_ns = 0
    """Time of the processor that exports of the leader's memory took so far."""

    def __init__(
        self, config: LeaderConfig, clock: Callable[[], int], *, check: bool = False, ring: Ring | None = None,
        monotonic: Callable[[], int] = time.monotonic_ns, wall: Callable[[], int] = time.time_ns,
        lease_ttl_ns: int = LEASE_TTL_NS, incarnation: str | None = None, more_hosts: Sequence[Leader] = (),
        name: str = "",
    ) -> None:
        self.config = config
        self.name = name
        """The target's name for people."""
        self.check = check
        self.clock = clock
        self.incarnation = incarnation or secrets.token_hex(8)
        self.started_wall_ns = wall()
        self.started_at_ns = clock()
        self.recorder: Recorder | None = None
        self._awaited: list[tuple[StimulusChunk | None, EventChunk | None]] | None = None
        """Flushes since the first keyframe of a recorder that is being made; None while no recorder is being made."""
        self._awaited_bytes = 0
        self.place: RecordingPath | None = None
        """The recorder's place, for a path that a person named."""
        self.changed = Changed()
        self.listeners: list[Callable[[], None]] = []
        """Called after every publication, in this order; they must not submit."""
        self.feeds: list[Closing] = []
        """Engines in other processes, told when the service ends."""
        self.publishers: Callable[[], list[Document]] = list
        """Rows of the event streams that are followed (``stream.document``)."""
        self._sources = 0
        self.recoveries = 0
        """Bugs of the core that were undone."""
        self.broadcaster = Broadcaster(ring or Ring(), monotonic, on_flush=self._flushed)
        self.dispatcher = Dispatcher(
            Leader(config, check=check, audit_every=AUDIT_EVERY), clock, publish=self._publish, more_hosts=more_hosts
        )
        if not check:
            self.dispatcher.recover = self._recover
        self.leases = Leases(
            monotonic, granted=lambda owner, back: self.dispatcher.submit(LeaseGranted, owner, back),
            lost=lambda owner: self.dispatcher.submit(LeaseLost, owner), ttl_ns=lease_ttl_ns,
        )
        self.sessions = Sessions(self.dispatcher, self.leases)
        self.ended_holds = EndedHolds()
        self._holds_seen = 0
        self._watch = Watch(self.dispatcher, monotonic, wall)
        self.parts = Parts(self.dispatcher.submit, monotonic)
        self._recorder_notes = RecorderNotes(self.dispatcher.submit)
        self.submit = self.dispatcher.submit
        self._deadlines: WallDeadlines | None = None
        self._since_base: deque[StimulusChunk] = deque()
        self._stimulus_bytes = 0
        self._recovered = False
        self._base: Snapshot
        """The state from which a rerun begins."""
        self._shown: Snapshot
        """The state from which the next reader begins."""
        self._shown_bytes = 0
        self._bases: deque[Snapshot] = deque()
        self._memory = b""
        self._digest = -1, 0
        self._take_base()

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def leader(self) -> Leader:
        """The leader now; another object after a recovery."""
        return self.dispatcher.leader

    @property
    def state(self) -> CacheState:
        """The facts now. Read only."""
        return self.dispatcher.leader.state

    @property
    def ring(self) -> Ring:
        """The last events, encoded."""
        return self.broadcaster.ring

    @property
    def at_ns(self) -> int:
        """The engine's clock now, never before the last stimulus."""
        return max(self.clock(), self.dispatcher.at_ns)

    def status(self, slot_filter: str = "") -> Document:
        """The documented ``status`` document (``stream.document``), with the slots for which the filter holds."""
        recorder = None if self.recorder is None else self.recorder.status()
        return status_document(
            self.state, at_ns=self.at_ns, incarnation=self.incarnation, name=self.name,
            subscribers=len(self.broadcaster.subscribers), slot_filter=slot_filter, engines=self.costs(),
            publishers=self.publishers(), ended_holds=self.ended_holds.last,
            thrash_window_ns=self.leader.config.thrash_window_ns, parts=self.parts.rows(),
            warnings=self.parts.warnings(),
            recorder=None if recorder is None else {
                "state": recorder.state, "written_seq": recorder.written_seq, "synced_seq": recorder.synced_seq,
                "path": recorder.path, "bytes": recorder.bytes,
            },
        )

    def costs(self) -> list[Document]:
        """The cost of watching, a row for each watched engine."""
        rows = [getattr(feed, "cost_row", None) for feed in self.feeds]
        return sorted((row for row in rows if row is not None), key=lambda row: int(row["source"]))

    def digest(self) -> tuple[int, int]:
        """(number of the next event, digest of the facts)."""
        if not self.knows_digest:
            self._digest = self.state.seq, self.leader.digest()
        return self._digest

    @property
    def knows_digest(self) -> bool:
        """True if the digest of the facts now is known already."""
        return self._digest[0] == self.state.seq

    def snapshot(self) -> Snapshot:
        """Facts from which the ring goes on: at most ``SNAPSHOT_REUSE_EVENTS`` old."""
        if self.state.seq - self._shown.seq > SNAPSHOT_REUSE_EVENTS or self._shown.seq < self.ring.first_seq:
            self._show()
        return self._shown

    def go_on_from(self, cursor: Cursor) -> Snapshot:
        """Facts from which a reader that fell behind goes on. Its cursor is moved, and the events between are
        lost to it."""
        snapshot = self.snapshot()
        self.ring.skip_to(cursor, snapshot.seq)
        return snapshot

    def oldest_snapshot(self) -> Snapshot:
        """The oldest facts from which the ring goes on."""
        self.broadcaster.flush()
        for base in self._bases:
            if base.seq >= self.ring.first_seq:
                return base
        return self.snapshot()

    def keyframe(self) -> tuple[int, memoryview, bytes]:
        """(number of the next event, facts, memory), for the recorder. It is the next base, too: memory takes long to
        export, and the daemon stands still meanwhile."""
        if self.broadcaster.pending_stimuli:  # between two flushes
            return self.state.seq, sparse_facts(self.state), self._exported()
        self._take_base()
        return self._base.seq, self._base.facts, self._memory

    def facts(self) -> tuple[int, memoryview]:
        """(number of the next event, facts), for keyframes between those that decisions can be replayed from."""
        if self.broadcaster.pending_stimuli:  # between two flushes
            return self.state.seq, sparse_facts(self.state)
        self._show()
        return self._shown.seq, self._shown.facts

    # --- publishing ----------------------------------------------------------------------------------------------

    def _publish(self, stimulus: Stimulus, outcome: Outcome) -> None:
        if self.hosts is not None:
            self.hosts.decided(self.leader.digest())
        self.broadcaster.publish(stimulus, outcome.events)
        if self._recovered:
            self._recovered = False
            self._take_base()  # no later rerun may meet the stimulus that was undone
        totals = self.state.totals
        seen = 2 * totals.holds - len(self.state.holds) + totals.hold_denied
        if seen != self._holds_seen:  # a hold began, ended, or was refused
            self._holds_seen = seen
            for event in outcome.events:
                self.ended_holds.take(event, self.state)
        self.changed.notify()
        for listener in self.listeners:
            listener()

    def _flushed(self, stimuli: StimulusChunk | None, events: EventChunk | None) -> None:
        if stimuli is not None:
            self._since_base.append(stimuli)
            self._stimulus_bytes += len(stimuli.data)
            if self.hosts is not None:
                self.hosts.follow(stimuli.data, self.leader.memory_digest() if self.hosts.wants_memory else None)
        if self.recorder is not None:
            self.recorder.offer(stimuli, events)
        elif self._awaited is not None:
            self._await(stimuli, events)
        ring = self.ring
        if ring.next_seq - self._base.seq > ring.events_max or self._stimulus_bytes > ring.bytes_max // 2:
            self._take_base()
        elif (
            ring.next_seq - self._shown.seq > ring.events_max // 2 or self._shown.seq < ring.first_seq
            or ring.appended_bytes - self._shown_bytes > ring.bytes_max // 2
        ):
            self._show()

    def await_recorder(self) -> tuple[int, memoryview, bytes]:
        """The first keyframe of a recorder that another thread makes; flushes wait for it until ``attach``."""
        self.broadcaster.flush()
        self._awaited, self._awaited_bytes = [], 0
        return self.keyframe()

    def _await(self, stimuli: StimulusChunk | None, events: EventChunk | None) -> None:
        """Keep a flush. Beyond the bound it is dropped, and the recorder heals the hole with a keyframe, and counts."""
        assert self._awaited is not None
        self._awaited_bytes += sum(len(chunk.data) for chunk in (stimuli, events) if chunk is not None)
        if self._awaited_bytes <= AWAITED_BYTES_MAX:
            self._awaited.append((stimuli, events))

    def attach(self, recorder: "Recorder | None") -> None:
        """The recorder is made, or None when it could not be. It begins with the events that were published
        meanwhile."""
        awaited, self._awaited = self._awaited or [], None
        self.recorder = recorder
        if recorder is not None:
            for stimuli, events in awaited:
                recorder.offer(stimuli, events)

    def _take_base(self) -> None:
        """Take a new base to rerun from: facts and memory after all published events."""
        self._show()
        self._base = self._shown
        self._memory = self._exported()
        self._evictions = self.leader.evictions.copy()
        self._since_base.clear()
        self._stimulus_bytes = 0

    def _exported(self) -> bytes:
        began_ns = time.thread_time_ns()
        memory = self.leader.export()
        self.exported_ns += time.thread_time_ns() - began_ns
        return memory

    def _show(self) -> None:
        """The next reader begins with the facts now. No reader needs the leader's memory, whose export takes
        hundreds of times as long."""
        self.broadcaster.flush()
        state = self.state
        self._shown = Snapshot(state.seq, self.dispatcher.n, state.at_ns, sparse_facts(state))
        self._shown_bytes = self.ring.appended_bytes
        self._keep(self._shown)

    def _keep(self, base: Snapshot) -> None:
        """Keep a base for ``oldest_snapshot``, if it is far enough from the last kept base."""
        bases, ring = self._bases, self.ring
        while bases and bases[0].seq < ring.first_seq:
            bases.popleft()
        if not bases or base.seq - bases[-1].seq >= ring.events_max // BASES_MAX:
            bases.append(base)

    # --- a bug of ours -------------------------------------------------------------------------------------------

    def _recover(self, stimulus: Stimulus, error: Exception) -> Outcome:
        """Undo a stimulus whose handler raised: rerun all others since the base snapshot, and publish the bug.

        If the rerun fails too, the events of the stimulus that were emitted are published, so the stream goes on
        without a hole. The facts are those of the stream unless an event was folded in part.
        """
        told: list[Event] = []
        try:
            leader = self._rerun()
        except Exception as again:
            leader, told = self.dispatcher.leader, list(self.dispatcher.leader.events)
            log.exception("a bug could not be undone")
            error = InternalError(f"{error}; it could not be undone: {again}")
            if leader.state.seq != self.broadcaster.next_seq + len(told):
                raise error from again
        self.recoveries += 1
        self._recovered = True
        rule = getattr(error, "rule", type(error).__name__)
        event = InvariantViolated(
            leader.state.seq, stimulus.at_ns, stimulus.n, rule, str(error), tuple(getattr(error, "story", ()))
        )
        leader.state.apply(event)
        self.dispatcher.leader = leader
        return Outcome(None, [*told, event], [])

    def leader_after(self, n: int) -> Leader | None:
        """Another leader, as of the end of stimulus ``n``; None if that is too long ago."""
        leader = Leader.restore(self.config, self._base.facts, self._memory)
        if leader.state.n > n:
            return None
        for earlier in self._stimuli_since_base():
            if earlier.n <= n:
                leader.handle(earlier)
        return leader

    def _rerun(self) -> Leader:
        """Another leader, as of the end of the last published stimulus."""
        leader = Leader.restore(self.config, self._base.facts, self._memory)
        leader.evictions += self._evictions
        for earlier in self._stimuli_since_base():
            leader.handle(earlier)
        expected = self.broadcaster.next_seq
        if leader.state.seq != expected:
            raise InternalError(f"rerunning came to event {leader.state.seq} instead of {expected}")
        return leader

    def _stimuli_since_base(self) -> Iterator[Stimulus]:
        for chunk in self._since_base:
            yield from unpack_stimuli(chunk.data)
        yield from self.broadcaster.pending_stimuli

    # --- life ----------------------------------------------------------------------------------------------------

    def new_source(self, source: int | None = None) -> int:
        """The index of a new engine, from 1; an embedded engine may bring its own."""
        self._sources = self._sources + 1 if source is None else max(self._sources, source)
        return self._sources

    def start(self) -> None:
        """Declare the leader's own pools; before any engine."""
        start_leader(self.dispatcher)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Heartbeats, leases, deadlines and scheduled flushes, until cancelled."""
        loop = asyncio.get_running_loop()
        self.broadcaster.later = loop.call_later
        self._deadlines = WallDeadlines(loop.call_later, lambda d: self.dispatcher.submit(DeadlinePassed, d))
        self.dispatcher.wall_deadlines = self._deadlines
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self.keep, "heartbeat", self._beat)
                group.start_soon(self.keep, "leases", self._expire_leases)
                task_status.started()
        finally:
            self.broadcaster.later = None
            self._deadlines.close()
            self.dispatcher.wall_deadlines = None

    async def keep(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task of the daemon, again when it raises; with ``check`` its exception is raised."""
        await (run() if self.check else self.parts.keep(name, run))

    async def _beat(self) -> None:
        while True:
            await anyio.sleep(HEARTBEAT_S)
            self.broadcaster.beat()

    async def _expire_leases(self) -> None:
        while True:
            self._watch.look(int(LEASE_CHECK_S * 1e9))
            self._recorder_notes.look(self.recorder)
            self._look_at_recorder()
            await anyio.sleep(LEASE_CHECK_S)
            self.leases.expire()

    def _look_at_recorder(self) -> None:
        """Report ended threads of the recorder, and restart them."""
        recorder = self.recorder
        if recorder is None:
            self.parts.look({}, lambda _: None)
        else:
            self.parts.look(recorder.workers, recorder.restart)

    def release_all(self) -> None:
        """Take the first step of an orderly end: all held slots go on (``HoldEnd.SHUTDOWN``)."""
        self.submit(NoteReported, Note.SHUTTING_DOWN, "")

    def close(self) -> None:
        """End the stream: flush the pending events, then every subscriber sends ``Bye``."""
        self.broadcaster.close()
