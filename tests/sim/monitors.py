"""The monitors of a simulation: laws that are looked at from outside, all the time or at the end of an act.

Each law is one method with one sentence. The facts of the core are audited by ``core.audit``, folding is that of the
tests' ``Mirror``, and recordings are judged by ``recording.verify``: nothing of those is written here again.

| law | what a violation means |
|---|---|
| acknowledged | an event up to ``written_seq``, or ``synced_seq`` after a power loss, is neither on disk nor stated |
| recorded | the disk says something else than was published, or has a hole that is not stated, or does not replay |
| counted | the recorder's count of lost events is not that of the gaps in the recording |
| said | the recorder calls itself well while nothing is written, or a thread died and no event says so |
| heals | some time after the last fault the recorder is still not well, or has not caught up |
| grows | events are lost behind a keyframe that does not fit, where the segment may grow without one |
| keep | the directory is larger than ``--keep`` and no reason is told, or a segment is sealed for a dead daemon |
| work | segments end with little but their first keyframe, so the whole state is exported again and again |
| foreign | a file of somebody else was changed |
| readers | received + lost is not what was published, or a mirror differs from the leader |
| holds | a hold has no living owner, or lasts longer than it may |
| engines | the loop waited for a disk or a lock, an answer was late, or an honest call was refused |
| core | the audit finds something, a stimulus was undone, or an event tells of a broken invariant |
| rooms | something grows with the lives of clients: pools, readers, feeds, descriptors, or breakpoints in others' way |
| edge | an exception reached the edge of a thread or of a loop (``World.fail``) |
| share | a flood of an observer takes the engine's time, or keeps a debugger waiting (``floods``) |
| metrics | a scrape has no page in time, a page cannot be read, or connections stay open |
| shown | a tool of a person would print a character that a terminal obeys, or another name |
| web | somebody gets into a console in a browser without key and cookie, or with them does not |
| told | `rec verify` passes over damage that a whole recording was given behind the end of the run |
| streams | a source's blocks are not its publisher's and are shown as certain, or a publisher is not heard of again |
| taps | a tap is not on, its requests are not its engine's, its reporter stays, it keeps a step or grows |
| end | an orderly end takes too long, or leaves a hold, or its last event is not that of the recording |

Law of this file: a monitor asks nothing that moves the simulation: no dice, no simulated call that takes time.
"""

import contextlib
import errno
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.audit import audit
from kvbm_console.core.errors import KvbmConsoleError, RecordingError, UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.ids import Authority, Note
from kvbm_console.core.snapshots import digest
from kvbm_console.debug import sessions
from kvbm_console.debug.sessions import DAEMON_OWNER
from kvbm_console.recording.format import MARKS, SyncFailed, decode_mark, segment_number
from kvbm_console.recording.reader import MISSING, PAUSED, Recording
from kvbm_console.recording.recover import recover_directory
from kvbm_console.recording.verify import verify
from kvbm_console.service import LeaderService
from kvbm_console.stream.feed import EventsArrived, Heartbeat, SnapshotTaken
from kvbm_console.wire.batches import unpack_events
from tests.sim.floods import FloodMonitor
from tests.sim.scrapers import TURNED_AWAY, is_whole, page_troubles
from tests.sim.shown import ShownLaws
from tests.sim.streams import StreamLaws

if TYPE_CHECKING:
    from tests.server.daemons import Mirror
    from tests.sim.disk import SimPath
    from tests.sim.load import Actor
    from tests.sim.machine import Life
    from tests.sim.run import Simulation

KEEP_S: Final = 1.0
"""So long a directory may be above its bound before the recorder must say why, while the disk has faults and a moment
behind them; at any other time it never is."""
KEYFRAMES_SHARE: Final = 2.5
KEEP_SHARE: Final = 0.25
"""A segment that takes this part of ``--keep`` is full, however large its keyframe is."""
EMPTY_SEGMENTS_MAX: Final = 3
"""A full segment has four times the bytes of its first keyframe. What it took since the last look is not seen."""
UNSAID_S: Final = 4.0
"""A recorder that is behind for so long is not well: the writer rests 50 ms, a sync takes a second."""
HANG_TOLD_S: Final = 6.0
"""A disk that hangs while events wait for it is told: a call that waits for 5 s, and begins within a second."""
DEATH_S: Final = 1.0
"""The end of a thread is an event within a second."""
HOLD_S: Final = 0.6
"""A lease is looked at ten times a second; half a second is promised."""
RENEWED_S: Final = 3.0
"""So long after a freeze of the daemon or of a session its lease may be missing: it ends before what was sent meanwhile
is read, and a session renews it each second."""
ANSWER_S: Final = 1.0
"""An engine's call is answered within milliseconds and two ways through the network."""
LOOP_S: Final = 0.05
"""The loop is kept by nothing that simulated time is spent in."""
END_S: Final = 5.0
NOTICED_S: Final = 8.0
"""A recorder notices with its next write that a file was removed, and begins anew when the disk takes it."""
DESCRIPTORS_MAX: Final = 8
EXTRA_POOLS_MAX: Final = 2
SLOW_S: Final = 0.01
"""A network with such a delay is slow."""
SCRAPE_S: Final = 8.0
"""A scrape is answered within it, whatever other connections do: three lost first packets and a turn."""
TURNED_AWAY_S: Final = 3.0
"""So long a scraper may be turned away beside others that read no answer, each of which has a second to read."""
HEALED_S: Final = 12.0
"""As long as the calm: a scraper gives up after 10 s, and asks again a second later."""
CONNECTIONS_MAX: Final = 16 + 4
"""Connections of the page that are open at once, with those that just made way."""
PER_LAW: Final = 3
"""Sentences that are kept of one law."""


class Journal:
    """Everything that one incarnation has published, and what of it must be on disk."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.events: list[Event] = []
        self.kept: dict[str, Kept] = {}
        """Directory to what is expected there."""
        self.parts: list[tuple[str, int]] = []
        """Notes of parts that ended, with the time."""


class Kept:
    """The events that one recording of an incarnation must hold."""

    def __init__(self, first: int, wall_offset: int) -> None:
        self.first = first
        self.wall_offset = wall_offset
        """Of the wall clock when it began."""
        self.required = first - 1
        """The last event that must be there or be stated as lost."""
        self.synced = first - 1
        self.recorder: Any = None
        self.bounded = False
        """Older segments may have been removed."""
        self.misfit = False
        """Its keyframes were too large at the end."""
        self.ended_ns = 0
        self.closed: Any = None
        """Its last status, if it was closed in order."""


class Monitors:
    """Of one simulation."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.closing = False
        self.journals: dict[str, Journal] = {}
        self.events_seen = 0
        self._found: dict[str, list[str]] = {}
        self._service: LeaderService | None = None
        self._journal: Journal | None = None
        self._above_ns: int | None = None
        self._behind_ns: int | None = None
        self._deaths: dict[str, int] = {}
        self._unavailable: list[tuple[int, int]] = []
        self._ready_ns = 0
        self._leases: dict[str, int] = {}
        self._stopped_ns = self._ailing_ns = 0
        self._samples = self._behind_seq = 0
        self._since: dict[int, int] = {}
        """Holds, and when each was seen first."""
        self._sessions: dict[str, tuple[Any, Any, Any]] = {}
        """Owner to its process, connection and session."""
        self._silent: dict[str, int] = {}
        """Owners that cannot show that they live, and since when."""
        self._heard: dict[str, int] = {}
        """Owners that could not show that they live, and until when."""
        self._positions: dict[str, tuple[str, Any, Any]] = {}
        self._there: dict[str, set[str]] = {}
        """Runs that were found, by directory."""
        self._scraped: dict[str, int] = {}
        """Scraper to when it read its last page."""
        self._crowded_ns = 0
        """The last moment in which no descriptor was free for anyone."""
        self._segment_seen: tuple[tuple[Any, int], int, int, int] | None = None
        """The segment that was seen last, since when, its bytes and those of its first keyframe."""
        self._empty_segments = 0
        self._frozen_ns = 0
        """Until then the daemon may not have caught up after a freeze."""
        self.floods = FloodMonitor(simulation)
        self._streams = StreamLaws(simulation, self.violated)
        self._shown = ShownLaws(simulation, self.violated)
        simulation.machine.disk.on_change = self._look_at_keep

    # --- results ------------------------------------------------------------------------------------------------------

    def violated(self, law: str, sentence: str) -> None:
        """A law is broken."""
        found = self._found.setdefault(law, [])
        if len(found) < PER_LAW:
            self.world.trace("VIOLATED", law, sentence)
            found.append(f"{self.world.seconds:.3f} s: {sentence}")

    def sentences(self) -> list[str]:
        """All violations."""
        return [f"{law}: {sentence}" for law, found in self._found.items() for sentence in found]

    # --- lives of the daemon ------------------------------------------------------------------------------------------

    def began(self, service: LeaderService) -> None:
        """A daemon is made; nothing was asked of it yet."""
        self._service = service
        journal = self._journal = Journal(service.incarnation)
        self.journals[service.incarnation] = journal
        service.broadcaster.flush()
        for data in service.ring.data_since(0):
            journal.events += unpack_events(data)
        publish = service.dispatcher.publish
        assert publish is not None

        def published(stimulus: Any, outcome: Any) -> None:
            self._saw(journal, outcome.events)
            publish(stimulus, outcome)

        service.dispatcher.publish = published
        life, close = self.simulation.life, service.close

        def closing() -> None:
            if life is not None:
                life.loop.serving = False  # the engine has ended, nobody waits for the loop
            close()

        service.close = closing  # type: ignore[method-assign]
        self._behind_ns, self._deaths, self._leases, self._since = None, {}, {}, {}
        self._sessions, self._silent = {}, {}
        self._ready_ns = self.world.now
        self._look_for_recorder()

    def _saw(self, journal: Journal, events: list[Event]) -> None:
        if not events:
            return
        if events[0].seq != len(journal.events):
            self.violated("core", f"event {events[0].seq} was published behind {len(journal.events) - 1}")
        journal.events += events
        self.events_seen += len(events)
        for event in events:
            if isinstance(event, ev.InvariantViolated):
                self.violated("core", f"event {event.seq} tells that {event.rule} was broken: {event.detail}")
            elif isinstance(event, ev.Noted) and event.note is Note.PART_ENDED:
                journal.parts.append((event.detail.partition(":")[0], self.world.now))

    def _look_for_recorder(self) -> None:
        """A recorder began, another one did, or the last one was stopped."""
        service, journal = self._service, self._journal
        if service is None or journal is None:
            return
        recorder = service.recorder
        for earlier in journal.kept.values():
            if earlier.recorder is not None and earlier.recorder is not recorder and earlier.recorder._released:
                self._let_go(earlier)
        if recorder is None:
            return
        where = str(recorder.directory)
        known = journal.kept.get(where)
        if known is None or known.recorder is not recorder:
            if recorder.retention.keep_ns is not None:
                self._let_age(where)
            kept = journal.kept[where] = Kept(recorder._segment.about.first_seq, self.world.wall_offset)
            kept.recorder = recorder
            # A directory with retention keeps room free on a disk that is full, whatever its bound is.
            full = recorder.retention.wanted and "disk_is_full" in self.simulation.faults.kinds
            kept.bounded = recorder.retention.keep_bytes is not None or full
            self.simulation.directory = recorder.directory  # type: ignore[assignment]
            self.simulation.machine.disk.watched = recorder.directory  # type: ignore[assignment]
            self._above_ns = self._behind_ns = None
            self._deaths = {}

    def _let_age(self, where: str) -> None:
        """A recorder takes the ages of earlier runs from the wall clock. If it was set forward, they may be gone."""
        for journal in self.journals.values():
            earlier = journal.kept.get(where)
            if earlier is not None and self.world.wall_offset > earlier.wall_offset:
                earlier.bounded = True

    def ended(self, life: "Life") -> None:
        """A daemon is gone, whatever the reason: what it has written stays."""
        if life.error is not None and not isinstance(life.error, UsageError):
            self.violated("end", f"the daemon ended: {type(life.error).__name__}: {life.error}")
        if life.daemon is not None and life.loop.disk_calls:
            self.violated("engines", f"the loop asked the disk: {life.loop.disk_calls[0]}")
        if life.daemon is not None and life.loop.waited_ns > LOOP_S * 1e9:
            self.violated("engines", f"a callback of the loop kept it for {life.loop.waited_ns / 1e9:.3f} s")
        self._look_for_recorder()
        for journal in self.journals.values():
            for kept in journal.kept.values():
                self._let_go(kept)
        self._service = self._journal = None  # the next daemon may end before it has made its own
        self._unavailable.append((self.world.now, self.world.now + 10**15))

    def _let_go(self, kept: Kept) -> None:
        if kept.recorder is not None:
            kept.required = max(kept.required, kept.recorder.written_seq)
            kept.synced = max(kept.synced, kept.recorder._syncer.synced_seq)
            kept.misfit = _keyframe_is_too_large(kept.recorder.status())
            kept.recorder, kept.ended_ns = None, self.world.now

    def power_lost(self) -> None:
        """Only what was synced must be there."""
        for journal in self.journals.values():
            for kept in journal.kept.values():
                kept.required = min(kept.required, kept.synced)
                if self.simulation.machine.disk.ever_lied:
                    kept.required = kept.first - 1

    def unavailable(self, seconds: float) -> None:
        """The daemon is frozen for so long."""
        until = self.world.now + round(seconds * 1e9)
        self._unavailable.append((self.world.now, until))
        self._frozen_ns = max(self._frozen_ns, until)

    # --- all the time -------------------------------------------------------------------------------------------------

    def _runs(self) -> bool:
        """Whether the daemon is ready and was not frozen a moment ago."""
        life = self.simulation.life
        if life is None or life.service is None or life.process.frozen or self.simulation.machine.disk.hangs:
            return False
        return self.world.now > self._frozen_ns + 1e9

    def sample(self) -> None:
        """Look at everything that can be looked at now."""
        life = self.simulation.life
        service = None if life is None else life.service
        if service is None or life is None or service is not self._service:
            return
        if self._unavailable and self._unavailable[-1][1] > self.world.now + 10**14:
            self._unavailable[-1] = (self._unavailable[-1][0], self.world.now)
        self._samples += 1
        if self.simulation.machine.disk.ailing:
            self._ailing_ns = self.world.now
        for name in self.simulation.machine.sealed_for_nobody:
            self.violated("keep", f"{name} sealed a segment for a daemon that was dead")
        self._look_for_recorder()
        self._look_at_recorder(service)
        self._look_at_threads(service)
        self._look_at_holds(service)
        self._look_at_rooms(service)
        self.floods.sample(service)
        self.simulation.taps.sample()
        self._streams.sample(service, [] if self._journal is None else self._journal.parts)
        self._look_at_connections(life)
        self._shown.sample(life, self.journals[service.incarnation].events)
        if self._samples % 20 == 0:
            for violation in audit(service.state):
                self.violated("core", f"{violation.rule} is broken: {violation.detail}")
        if service.recoveries:
            self.violated("core", "a stimulus was undone")

    def _look_at_recorder(self, service: LeaderService) -> None:
        recorder = service.recorder
        if recorder is None or not self._runs():
            self._behind_ns = None
            if recorder is not None:
                self._look_at_hang(recorder)
            return
        status = recorder.status()
        self._look_at_keyframes(recorder, status)
        self._look_at_segments(recorder, status)
        head = recorder._head - 1
        if status.written_seq >= head or status.state != "recording":
            self._behind_ns = None
        elif self._behind_ns is None or self._behind_seq <= status.written_seq:
            self._behind_ns, self._behind_seq = self.world.now, head
        elif self.world.now - self._behind_ns > UNSAID_S * 1e9:
            self.violated(
                "said", f"the recorder says {status.state!r} and has written {status.written_seq} of {head} events"
            )

    def _look_at_segments(self, recorder: Any, status: Any) -> None:
        """A segment that ends was full: mostly with events, or with what ``keep`` has room for."""
        simulation, last = self.simulation, self._segment_seen
        segment = recorder, status.segment
        if last is None or last[0] != segment:
            harmless = set(simulation.faults.happened) <= {"client_killed", "client_frozen", "segments_are_small"}
            if last is not None and last[0][0] is recorder and harmless:
                _, since, size, first = last
                asked = any(actor.kind == "operator" for actor in simulation.actors)
                young = self.world.now - since < simulation.recording.segment_ns
                full = KEYFRAMES_SHARE * first
                if simulation.keep is not None:
                    full = min(full, simulation.keep * KEEP_SHARE)
                self._empty_segments += young and not asked and size < full
            if self._empty_segments > EMPTY_SEGMENTS_MAX:
                self.violated("work", f"{self._empty_segments} segments ended with little but their first keyframe")
            self._segment_seen = segment, self.world.now, status.bytes, recorder._complete_bytes[0]
        else:
            self._segment_seen = segment, last[1], status.bytes, recorder._complete_bytes[0]

    def _look_at_keyframes(self, recorder: Any, status: Any) -> None:
        """Nothing that happened in this run makes a recorder lose events, but that keyframes are too large."""
        may_lose = set(self.simulation.faults.happened) - {"keyframes_do_not_fit", "client_killed", "client_frozen"}
        if status.not_recorded and not may_lose and recorder.retention.keep_bytes is None:
            self.violated("grows", f"{status.not_recorded} events are lost: {status.reason}")

    def _look_at_hang(self, recorder: Any) -> None:
        """The disk hangs, and calls of the recorder wait for it."""
        disk, life = self.simulation.machine.disk, self.simulation.life
        since = max(disk.hung_ns, self._ready_ns, self._frozen_ns)
        hangs_s = (self.world.now - since) / 1e9
        if not disk.hangs or life is None or life.process.frozen or hangs_s < HANG_TOLD_S:
            return
        status = recorder.status()
        if status.state == "recording" and status.written_seq < recorder._head - 1:
            self.violated("said", f"the disk hangs for {hangs_s:.1f} s, and the recorder is well")

    def _look_at_threads(self, service: LeaderService) -> None:
        recorder, journal = service.recorder, self._journal
        if recorder is None or journal is None or not self._runs() or recorder._closed:
            return
        for name, worker in recorder.workers.items():
            if worker._thread.is_alive():  # type: ignore[attr-defined]
                self._deaths.pop(name, None)
                continue
            since = self._deaths.setdefault(name, self.world.now)
            told = any(part == name and at >= since - 10**9 for part, at in journal.parts)
            if not told and self.world.now - since > DEATH_S * 1e9:
                self.violated("said", f"the thread {name!r} ended and no event says so")

    def _look_at_holds(self, service: LeaderService) -> None:
        if not self._runs():
            return
        owners, now = service.leases.owners, self.world.now
        for owner in owners:
            self._leases[owner] = now
        self._since = {hold: self._since.get(hold, now) for hold in service.state.holds}
        for hold in service.state.holds.values():
            if now - max(self._since[hold.hold], self._frozen_ns) > hold.max_hold_ns + HOLD_S * 1e9:
                self.violated("holds", f"hold {hold.hold} lasts longer than {hold.max_hold_ns / 1e9:g} s")
            known = service.state.breakpoints
            mine = {hold.owner, *(known[number].owner for number in hold.breakpoints if number in known)}
            last = max(self._leases.get(owner, self._ready_ns) for owner in mine)
            if mine.isdisjoint({DAEMON_OWNER, *owners}) and now - last > HOLD_S * 1e9:
                self.violated("holds", f"hold {hold.hold} belongs to {', '.join(sorted(mine))}, without a lease")
        held = {hold.owner for hold in service.state.holds.values()}
        lease_ns = service.leases.ttl_ns + round(2 * HOLD_S * 1e9)
        for owner, (process, connection, session) in self._sessions.items():
            if not (process.dead or process.frozen or connection.half_open or not connection.up):
                if self._silent.pop(owner, None) is not None:
                    self._heard[owner] = now
                self._look_at_lease(owner, session.alive and owner not in owners)
                continue
            since = self._silent.setdefault(owner, now)
            if owner in held and now - max(since, self._frozen_ns, self._ready_ns) > lease_ns:
                self.violated("holds", f"{owner} shows no life since {(now - since) / 1e9:.1f} s and holds a request")

    def _look_at_lease(self, owner: str, without: bool) -> None:
        """A session that shows its life every second keeps its lease, whatever the wall clock says."""
        if without and self.world.now - max(self._frozen_ns, self._heard.get(owner, 0)) > RENEWED_S * 1e9:
            self.violated("holds", f"{owner} lives and has lost its lease")

    def _look_at_rooms(self, service: LeaderService) -> None:
        engines = len(service.feeds) + 1
        state = service.state
        own = sum(pool.info.source == 0 or pool.info.authority is Authority.STREAM for pool in state.pools)
        lives = sum(actor.kind == "engine" for actor in self.simulation.actors) + len(self.simulation.taps.all)
        if len(state.pools) - own > max(engines, lives + 1) + EXTRA_POOLS_MAX:
            self.violated("rooms", f"{len(state.pools)} pools are remembered of {engines} engines")
        if len(state.breakpoints) > sessions.BREAKPOINTS_MAX:
            self.violated("rooms", f"there are {len(state.breakpoints)} breakpoints")

    def _look_at_connections(self, life: "Life", most: int = CONNECTIONS_MAX) -> None:
        """The page of metrics has few connections, whoever comes."""
        open_now = self.simulation.machine.tcp.of(life.process)
        if open_now > most + 1:
            self.violated("metrics", f"{open_now - 1} connections of the page of metrics are open")
        if self.simulation.machine.disk.open_error == errno.EMFILE:
            self._crowded_ns = self.world.now

    def _look_at_keep(self) -> None:
        """Called at every change of the directory."""
        service = self._service
        recorder = None if service is None else service.recorder
        keep = None if recorder is None else recorder.retention.keep_bytes
        if keep is None or recorder is None or self.closing:
            return
        disk = self.simulation.machine.disk
        total = sum(size for name, size in disk.bytes_in.items() if segment_number(disk.watched / name))  # type: ignore[operator,arg-type]
        if total <= keep or not self._runs():
            self._above_ns = None
            return
        if self._above_ns is None or recorder.status().reason is not None:
            self._above_ns = self.world.now
        ailing = self.world.now - self._ailing_ns < 2 * KEEP_S * 1e9
        if self.world.now - self._above_ns >= (KEEP_S * 1e9 if ailing else 0):
            self.violated("keep", f"the directory has {total} bytes, {keep} may be kept, and no reason is told")

    # --- what clients tell --------------------------------------------------------------------------------------------

    def told(self, name: str, error: KvbmConsoleError) -> None:
        """A client met this; a stream that contradicts itself is our bug, the rest is weather."""
        if " sent " in str(error):
            self.violated("readers", f"{name}: {error}")

    def read(self, reader: "Actor", stream: Any, mirror: "Mirror", item: Any) -> None:
        """A reader got an item and has folded it."""
        if stream.position is not None and stream.received + stream.lost != stream.position - stream.start:
            self.violated("readers", f"{reader.name} got {stream.received}, lost {stream.lost} of "
                          f"{stream.position - stream.start} events")
        call = stream._call
        service = self._service_of(call)
        if service is None:
            return
        journal = self.journals[service.incarnation]
        if isinstance(item, EventsArrived):
            first = item.events[0].seq
            if journal.events[first : first + len(item.events)] != item.events:
                self.violated("readers", f"{reader.name} got other events than were published behind {first - 1}")
        elif isinstance(item, SnapshotTaken) and item.state.seq > len(journal.events):
            self.violated("readers", f"{reader.name} got a snapshot of the future")
        elif isinstance(item, Heartbeat) and stream.digest is not None and mirror.state is not None:
            seq, value = stream.digest
            if mirror.state.seq == seq and digest(mirror.state) != value:
                self.violated("readers", f"{reader.name} has other facts than the leader at event {seq}")
        self._positions[reader.name] = (service.incarnation, stream, mirror)

    def _service_of(self, call: Any) -> LeaderService | None:
        connection = getattr(call, "connection", None)
        life = self.simulation.life
        if connection is None or life is None or connection.server.loop is not life.loop:
            return None
        return life.service

    def opened(self, debugger: "Actor", session: Any) -> None:
        """A session began."""
        self._sessions[session.owner] = debugger.process, session._call.connection, session

    def refused_debugger(self, debugger: "Actor", owner: str, error: Exception) -> None:
        """A verb was refused; that there is no room is only true when living sessions have taken it."""
        service = self.simulation.service
        if "breakpoints already" in str(error) and service is not None:
            recently = self.world.now - 3 * 10**9  # the refusal was on its way for a while
            alive = {owner for owner, at in self._leases.items() if at > recently}
            alive |= {DAEMON_OWNER, *service.leases.owners}
            taken = sum(known.owner in alive for known in service.state.breakpoints.values())
            if taken < sessions.BREAKPOINTS_MAX - 1:
                self.violated("rooms", f"{debugger.name} may set no breakpoint, and {taken} belong to the living")

    def refused_engine(self, engine: "Actor", call: str, error: Exception) -> None:
        """An honest engine's call was refused."""
        self.violated("engines", f"{engine.name}: {call} was refused: {error}")

    def answered(self, engine: "Actor", began_ns: int) -> None:
        """A call of an engine ended."""
        took_ns = self.world.now - began_ns
        for begin, end in self._unavailable:
            took_ns -= max(0, min(end, self.world.now) - max(begin, began_ns))
        if took_ns > ANSWER_S * 1e9 and self._network_was_well(engine) and not engine.process.dead:
            self.violated("engines", f"{engine.name} waited {took_ns / 1e9:.1f} s for an answer")

    def _network_was_well(self, engine: "Actor") -> bool:
        happened = self.simulation.faults.happened
        return not {"connection_half_open", "network_is_slow", "client_frozen", "connection_cut"} & set(happened)

    def scraped(self, scraper: "Actor", began_ns: int, answer: bytes, met: str, *, harmed: bool) -> None:
        """A scrape ended, with an answer or with an error."""
        head, _, body = answer.partition(b"\r\n\r\n")
        since_ns = self._could_be_scraped(began_ns)
        took_s = (self.world.now - max(began_ns, since_ns)) / 1e9
        if head.startswith(b"HTTP/1.1 200 ") and is_whole(answer):
            for trouble in page_troubles(body.decode()):
                self.violated("metrics", trouble)
            self._scraped[scraper.name] = self.world.now
            if took_s <= SCRAPE_S:
                return
        machine, life = self.simulation.machine, self.simulation.life
        weather = harmed or machine.network.delay_s > SLOW_S or self.closing or scraper.process.dead
        if weather or life is None or life.service is None or (since_ns and took_s <= SCRAPE_S):
            return
        unread = self.world.now - self.simulation.unread_ns < 2 * SCRAPE_S * 1e9
        if unread and answer.startswith(TURNED_AWAY) and took_s <= TURNED_AWAY_S:
            return  # who reads nothing has a moment to read, too
        if began_ns < self.simulation.full_until_ns and met == "TimeoutError" and not answer:
            return  # its connection was dropped as often as any other
        said = head.split(b"\r\n")[0].decode() or met or "half a page"
        self.violated("metrics", f"{scraper.name} got {said!r} after {took_s:.1f} s")

    def visited(self, request: str, *, entitled: bool, entered: bool) -> None:
        """A console in a browser was asked."""
        if entered is not entitled:
            self.violated("web", f"{request!r} was {'let in' if entered else 'turned away'}")

    def _could_be_scraped(self, began_ns: int) -> int:
        """Since when the daemon was never dead, starting, frozen or without descriptors; 0 if not since the scrape."""
        away = [end for begin, end in self._unavailable if end >= began_ns - 10**9]
        last_ns = max([self._ready_ns, self._crowded_ns, self._frozen_ns, *away])
        return last_ns if last_ns >= began_ns - 10**9 else 0

    # --- the end ------------------------------------------------------------------------------------------------------

    def after_calm(self) -> None:
        """All faults ended long ago: everything is as if none had happened."""
        life = self.simulation.life
        service = None if life is None else life.service
        if life is None or service is None:
            self.violated("heals", "no daemon runs" + (f": {life.error}" if life and life.error else ""))
            return
        recorder = service.recorder
        if recorder is not None:
            status = recorder.status()
            dead = [name for name, worker in recorder.workers.items() if worker.ended]
            # A bound that the keyframes do not fit into; a keyframe above the limit is tried again after a minute.
            too_large = _keyframe_is_too_large(status)
            misfit = too_large or "keep is " in (status.reason or "")
            if (status.state != "recording" or status.reason) and not dead and not misfit:
                self.violated("heals", f"the recorder is {status.state}: {status.reason}")
            behind = recorder._head - 1 - status.written_seq
            written = self.world.now - self._last_published_ns(service)
            if behind and not (dead or too_large) and written > 1e9:
                self.violated("heals", f"{behind} events are not written")
        self._after_calm_readers(service)
        self._streams.after_calm(service)
        self.simulation.taps.after_calm(service)
        scrapers = [actor.name for actor in self.simulation.actors if actor.kind == "scraper"]
        self._look_at_connections(life, len(scrapers))
        for name in scrapers:
            if self.world.now - self._scraped.get(name, 0) > HEALED_S * 1e9:
                self.violated("metrics", f"{name} has read no page for {HEALED_S:g} s")
        descriptors = self.simulation.machine.disk.descriptors(life.process)
        if descriptors > DESCRIPTORS_MAX:
            self.violated("rooms", f"the daemon has {descriptors} descriptors")

    def _last_published_ns(self, service: LeaderService) -> int:
        return service.broadcaster._last_ns

    def _after_calm_readers(self, service: LeaderService) -> None:
        readers = [actor for actor in self.simulation.actors if actor.kind == "reader"]
        half_open = "connection_half_open" in self.simulation.faults.happened
        if len(service.broadcaster.subscribers) > len(readers) and not half_open:
            self.violated("rooms", f"{len(service.broadcaster.subscribers)} subscribers, {len(readers)} readers")
        if half_open:
            return
        for reader in readers:
            incarnation, stream, mirror = self._positions.get(reader.name, ("", None, None))
            if incarnation != service.incarnation or mirror.state is None:
                self.violated("readers", f"{reader.name} follows nothing")
                continue
            behind = service.ring.next_seq - stream.position
            if behind > 2_000:
                self.violated("readers", f"{reader.name} is {behind} events behind")

    def stopping(self) -> None:
        """An orderly end was asked for."""
        self._stopped_ns = self.world.now

    def stopped(self, life: "Life") -> None:
        """It is over, or should be."""
        took = (self.world.now - self._stopped_ns) / 1e9
        if not life.ended:
            why = life.error or f"after {took:.1f} s it still runs"
            self.violated("end", f"the daemon did not end in order: {why}")
            return
        if took > END_S:
            self.violated("end", f"the end took {took:.1f} s")
        service = life.daemon.service  # type: ignore[union-attr]
        if service.state.holds:
            self.violated("end", f"{len(service.state.holds)} holds are left")
        journal = self.journals[service.incarnation]
        if service.recorder is not None:
            kept = journal.kept.get(str(service.recorder.directory))
            if kept is not None:
                kept.closed = service.recorder.status()
                if kept.closed.reason is None and kept.closed.state == "closed":
                    kept.required = max(kept.required, len(journal.events) - 1)

    def read_back(self) -> None:
        """The disk has exactly the published events."""
        for name in self._foreign_changed():
            self.violated("foreign", f"{name} was changed or removed")
        for directory in self.simulation.directories:
            file = directory.with_name(f"{directory.name}.mcap")
            parts = directory.with_name(f"{file.name}.parts")
            for place in (directory, parts):
                if place.exists():
                    self._read_place(place, place)
            if file.exists():
                self._read_place(file, parts)
                if parts.exists() and not self.simulation.faults.power_lost:  # which may undo their removal
                    self.violated("recorded", f"{file} is there, and its parts are, too")
        for journal in self.journals.values():
            for where, kept in journal.kept.items():
                if kept.required >= kept.first and not self._excused(where, kept) and not self._lied():
                    self._require_there(journal, where, kept)

    def _foreign_changed(self) -> list[str]:
        from tests.sim.run import FOREIGN

        first = self.simulation.first_directory
        if str(first) in self.simulation.faults.tampered or not first.exists():
            return []
        return [
            name for name in FOREIGN
            if not (first / name).exists() or (first / name).read_bytes() != b"the only copy"
        ]

    def _read_place(self, directory: "SimPath", written: "SimPath") -> None:
        """Read a directory, or the file that it has become; the recorder wrote into ``written``."""
        lossy = self.simulation.faults.power_lost
        there = self._there.setdefault(str(written), set())
        try:
            if directory.is_dir():
                if not any(segment_number(path) for path in directory.iterdir()):  # type: ignore[arg-type]
                    return
                recover_directory(directory, salvage=lossy, strict=False)  # type: ignore[arg-type]
            recording = Recording.open(directory)  # type: ignore[arg-type]
            for run in recording.runs:
                there.add(run)
                if run in self.journals:
                    self._try_run(directory, written, run)
                    self._try_export(directory, run)
                else:
                    self.violated("recorded", f"{directory} holds a run {run} that never was")
            report = verify(directory)  # type: ignore[arg-type]
        except RecordingError as error:
            self._unreadable(directory, error)
            return
        for each in [report, *report.earlier]:
            first = each.first_difference
            # A lying sync leaves files without an end, and they say so; what a file holds replays all the same.
            if first is not None and not (self._lied() and " is corrupt: " in first):
                self.violated("recorded", f"{directory} does not replay: {first}")
        if report.ok and directory.is_dir():
            self._damage(directory, recording.runs)

    def _damage(self, directory: "SimPath", runs: list[str]) -> None:
        """Take a segment of each run away for a moment, and change a bit of another."""
        for run in runs:
            segments = Recording.open(directory, run).segments  # type: ignore[arg-type]
            held = [one for one, next_ in pairwise(segments[1:]) if next_.about.first_seq > one.about.first_seq]
            for segment in held[:1]:
                self._require_told(segment.path, None, f"a segment of run {run} is missing")  # type: ignore[arg-type]
            if run != runs[-1]:
                whole = bytearray(segments[0].path.read_bytes())
                whole[len(whole) // 2] ^= 1
                self._require_told(segments[0].path, bytes(whole), f"a bit of run {run} changed")  # type: ignore[arg-type]

    def _require_told(self, path: "SimPath", instead: bytes | None, what: str) -> None:
        before = path.read_bytes()
        if instead is None:
            path.unlink()
        else:
            path.write_bytes(instead)
        try:
            if verify(path.parent).ok:  # type: ignore[arg-type]
                self.violated("told", f"{what} in {path.name}, and rec verify says nothing")
        except RecordingError:
            pass  # a sentence, too
        path.write_bytes(before)

    def _try_run(self, directory: "SimPath", written: "SimPath", run: str) -> None:
        try:
            self._read_run(written, Recording.open(directory, run))  # type: ignore[arg-type]
        except RecordingError as error:
            self._unreadable(directory, error)

    def _try_export(self, directory: "SimPath", run: str) -> None:
        if self.simulation.names.hostile:
            with contextlib.suppress(RecordingError):
                self._shown.exported(Recording.open(directory, run))  # type: ignore[arg-type]

    def _unreadable(self, directory: "SimPath", error: RecordingError) -> None:
        """A recording cannot be read, and says so: right only where a sync has lied in front of a power loss."""
        if not self._lied() and "holds no recording" not in str(error):
            self.violated("recorded", f"{directory} cannot be read: {error}")

    def _lied(self) -> bool:
        return self.simulation.machine.disk.ever_lied and self.simulation.faults.power_lost

    def _read_run(self, directory: "SimPath", recording: Recording) -> None:
        journal = self.journals[recording.incarnation]
        kept = journal.kept.get(str(directory))
        tampered = str(directory) in self.simulation.faults.tampered
        covered: set[int] = set()
        for batch in recording.events():
            for event in batch:
                if event.seq >= len(journal.events) or journal.events[event.seq] != event:
                    self.violated("recorded", f"event {event.seq} in {directory} was never published like this")
                    return
                covered.add(event.seq)
        lost = 0
        for gap in recording.gaps:
            if gap.reason == PAUSED or (gap.reason == MISSING and (tampered or self.simulation.faults.power_lost)):
                covered.update(range(gap.first, gap.last + 1))
            elif gap.reason == MISSING:
                self.violated("recorded", f"events {gap.first} to {gap.last} are missing in {directory}")
            else:
                acknowledged = kept is not None and gap.first <= kept.required and not tampered
                if gap.bytes and acknowledged and not _unsure(recording, gap.first):
                    self.violated("acknowledged", f"event {gap.first} in {directory} is damaged and was acknowledged")
                lost += gap.count
                covered.update(range(gap.first, gap.last + 1))
        first = recording.segments[0].about.first_seq
        holes = [seq for seq in range(first, recording.last_seq + 1) if seq not in covered]
        if holes:
            self.violated("recorded", f"event {holes[0]} in {directory} is neither there nor stated as lost")
        if kept is None or self._excused(str(directory), kept):
            return
        if not kept.bounded and first > kept.first and not tampered and not self._lied():
            self.violated("acknowledged", f"{directory} begins with event {first} instead of {kept.first}")
        if recording.last_seq < kept.required:
            self.violated(
                "acknowledged", f"{directory} ends with event {recording.last_seq}, {kept.required} was acknowledged"
            )
        whole = kept.closed is not None and not kept.bounded and not tampered
        if whole and lost != kept.closed.not_recorded:
            self.violated("counted", f"{kept.closed.not_recorded} events were counted as lost, the gaps hold {lost}")

    def _excused(self, where: str, kept: Kept) -> bool:
        """True if somebody else took files away, and the recorder had no time to notice and begin anew, or no keyframe
        to begin with."""
        tampered_ns = self.simulation.faults.tampered.get(where)
        return tampered_ns is not None and (kept.misfit or kept.ended_ns - tampered_ns < NOTICED_S * 1e9)

    def _require_there(self, journal: Journal, where: str, kept: Kept) -> None:
        there = self._there.get(where, set())
        if journal.incarnation not in there and not kept.bounded:
            self.violated("acknowledged", f"nothing of run {journal.incarnation} is in {where}, "
                          f"and {kept.required} was acknowledged")


def _unsure(recording: Recording, seq: int) -> bool:
    """True if the recording says that the disk refused to make this event durable."""
    marks = (decode_mark(frame.data) for frame in recording.frames() if frame.channel == MARKS)
    return any(isinstance(mark, SyncFailed) and mark.first <= seq <= mark.last for mark in marks)


def _keyframe_is_too_large(status: Any) -> bool:
    """True if a recorder has no keyframe to go on with; it tries again after a minute."""
    return "a keyframe of" in (status.reason or "")
